"""Tests of `aristos.step_metrics` against the routing and the clock, of the profiler's names, and of `python -m aristos`."""

import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import aristos

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 2
SLEEP_S = 0.5


def moe():
    return aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=aristos.init())


def batch(tokens):
    torch.manual_seed(11 + dist.get_rank())
    return torch.randn(tokens, HIDDEN, requires_grad=True)


def tokens_and_rows_are_those_of_the_routing():
    group = aristos.init()
    layers = [aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group) for _ in range(2)]
    # The first call starts counting.
    aristos.step_metrics()
    tokens, rows = torch.zeros(2, EXPERTS, dtype=torch.int64), 0
    for count in (5 + 3 * group.rank, 20, 12):
        x = batch(count)
        for number, layer in enumerate(layers):
            # Checkpointing repeats the forward pass, with its messages, in the backward pass.
            output = checkpoint(layer, x, use_reentrant=False) if number else layer(x)
            tokens[number] += layer.expert_tokens
            ids = layer.gate(x).softmax(-1).topk(TOP_K).indices
            ranks = ids // (EXPERTS // group.size)
            other = sum(len(set(one) - {group.rank}) for one in ranks.tolist())
            # A row goes out and its result returns, in each pass.
            rows += 2 * other * (2 + number)
            output.sum().backward()
    found = aristos.step_metrics(per_expert=True)
    tokens, rows = group.sum(tokens), group.sum(torch.tensor([rows])).item()
    for number, of_layer in enumerate(tokens):
        assert found[f"layer{number}/tokens"] == of_layer.tolist(), (found, of_layer)
        assert abs(found[f"layer{number}/expert_imbalance"] - (of_layer.max() / of_layer.double().mean()).item()) < 1e-6
        by_rank = of_layer.view(group.size, -1).sum(1)
        assert abs(found[f"layer{number}/rank_imbalance"] - (by_rank.max() / by_rank.double().mean()).item()) < 1e-6
    assert found["rows_sent"] == rows, (found["rows_sent"], rows)
    assert (found["bytes_sent"] >= rows * HIDDEN * 4) and found["expert_s"] > 0
    again = aristos.step_metrics()
    assert again["rows_sent"] == again["bytes_sent"] == again["expert_s"] == 0 and "layer0/tokens" not in again
    return f"{rows} rows"


def unset_choices_count_for_no_expert():
    layer = moe()
    aristos.step_metrics()
    aristos._routing.note(layer, layer.group, torch.tensor([[0, -1], [7, 0], [-1, -1]]), EXPERTS)
    found = aristos.step_metrics(per_expert=True)["layer0/tokens"]
    assert found == [2 * layer.group.size, 0, 0, 0, 0, 0, 0, layer.group.size], found


def metrics_are_equal_on_all_ranks():
    aristos.step_metrics()
    layer = moe()
    layer(batch(7))
    found = aristos.step_metrics()
    everyone = layer.group.gather(found)
    assert all(other == found for other in everyone), everyone
    assert all(isinstance(value, (int, float)) for value in found.values()), found


def a_slow_rank_is_the_late_one():
    layer = moe()
    slow = layer.group.size - 1
    layer(batch(4))
    aristos.step_metrics()
    for _ in range(4):
        if layer.group.rank == slow:
            time.sleep(SLEEP_S)
        layer(batch(4))
    found = aristos.step_metrics()
    if layer.group.size == 1:
        assert "late_rank" not in found
        return
    assert found["late_rank"] == slow, found
    assert found["waiting_max_s"] > 2 * SLEEP_S, found
    return f"waited {found['waiting_max_s']:.1f} s"


def the_profiler_shows_the_parts_of_a_layer():
    layer = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=aristos.init(), shared_intermediate=8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(batch(4)).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    for part in ("gate", "experts", "shared_expert", "experts_backward"):
        assert counts.get(f"aristos::{part}") == 1, (part, counts)


def the_module_says_what_it_uses():
    said = subprocess.run([sys.executable, "-m", "aristos"], capture_output=True, text=True, check=True).stdout
    for word in (f"aristos        {aristos.__version__}", torch.__version__, aristos._aristos.instruction_set(), "/dev/shm", "qwen3_moe"):
        assert word in said, f"no {word!r} in {said!r}"


CASES = [
    tokens_and_rows_are_those_of_the_routing,
    unset_choices_count_for_no_expert,
    metrics_are_equal_on_all_ranks,
    a_slow_rank_is_the_late_one,
    the_profiler_shows_the_parts_of_a_layer,
    the_module_says_what_it_uses,
]


def cases(wanted, size):
    """Returns the cases as (name, function) pairs, or only the wanted case."""
    found = [(f"metrics::{case.__name__}", case) for case in CASES if wanted in ("", case.__name__)]
    return found or sys.exit(f"no case metrics:{wanted}")
