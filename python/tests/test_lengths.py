"""Batches of any length: they run in parts until the layer's windows have grown."""

import gc
import random
import re
import sys

import torch
import torch.distributed as dist
from harness import full, refused, relative_error
from test_experts import EXPERTS, HIDDEN, TOP_K, Problem, matches

import aristos

# The mapping of a process's windows in /proc/self/maps: first address, end, rank.
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .* /memfd:aristos-(\d+) \(deleted\)$", re.MULTILINE)


def windows():
    """Returns the number of bytes of this process's windows, without the page that precedes them."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = _MAPPING.findall(maps.read())
    return sum(int(end, 16) - int(start, 16) - 4096 for start, end, rank in mappings if int(rank) == dist.get_rank())


def lengths(size, passes=50):
    """Returns the number of tokens of each process in each pass: from short to long ones, in random order, in some of them on one process
    only."""
    draw = random.Random(3)
    batches = [[draw.randrange(1 + 4 * step) for _ in range(size)] for step in range(passes)]
    for step in range(0, passes, 3):
        alone = draw.randrange(size)
        batches[step] = [tokens if rank == alone else tokens % 3 for rank, tokens in enumerate(batches[step])]
    draw.shuffle(batches)
    return batches


def step_of(problem, group):
    """Returns the output, the gradients, and the number of bytes that this process sent in a step."""
    before = group.sent_bytes()
    output = problem.experts()
    output.backward(problem.grad)
    return output.detach(), [leaf.grad for leaf in problem.leaves()], group.sent_bytes() - before


def fifty_lengths_in_random_order():
    size = dist.get_world_size()
    batches = lengths(size)
    longest = max(map(max, batches))
    group = aristos.init()
    room, in_parts, grown = max(1, *batches[0]), [], []
    for seed, counts in enumerate(batches):
        problem = Problem(seed=seed, counts=counts)
        output, grads, sent = step_of(problem, group)
        matches(problem, output, grads)
        in_parts.append(max(counts) > room)
        room = room if max(counts) <= room else max(counts) + max(counts) // 32
        grown.append((output, grads, sent))
    allocated = windows()
    # Repeats the passes with windows that have room for all batches from the start.
    group = aristos.init(max_tokens=longest)
    for seed, (counts, in_part, (output, grads, sent)) in enumerate(zip(batches, in_parts, grown)):
        wanted_output, wanted_grads, wanted_sent = step_of(Problem(seed=seed, counts=counts), group)
        if in_part and size > 1:
            # A header of each process to each other one for each further part.
            assert sent > wanted_sent, f"pass {seed}: {sent} bytes sent, and {wanted_sent} in one part"
        else:
            assert sent == wanted_sent, f"pass {seed}: {sent} bytes sent, expected {wanted_sent}"
            same = [torch.equal(one, wanted) for one, wanted in zip([output, *grads], [wanted_output, *wanted_grads])]
            assert all(same), f"pass {seed}: {same}"
    known = aristos.MoE(HIDDEN, 24, EXPERTS, TOP_K)
    foretold = aristos.memory(known, longest, size)
    assert windows() == foretold, f"{windows()} bytes of windows, expected {foretold}"
    if size > 1:
        assert abs(allocated / foretold - 1) <= 0.05, f"{allocated} bytes of windows, expected {foretold}"
        assert 3 <= sum(in_parts) <= 15, in_parts
    return f"{sum(in_parts)} in parts, {allocated} bytes, foretold {foretold}"


def backward_through_windows_that_have_grown():
    size = dist.get_world_size()
    aristos.init()
    small, large, last = problems = [Problem(seed=seed, counts=[tokens] * size) for seed, tokens in enumerate((3, 200, 150))]
    outputs = [problem.experts() for problem in problems]
    both = windows()
    for problem, output in zip((large, small, last), (outputs[1], outputs[0], outputs[2])):
        output.backward(problem.grad)
        matches(problem, output, [leaf.grad for leaf in problem.leaves()])
    del output, outputs, small, large, problems
    one = windows()
    # The first windows are freed with the last graph that needs them.
    assert size == 1 or one < both, f"{one} bytes of windows, and {both} before"


def equal_layers_and_longer_evaluations():
    """Two equal layers share their windows, which have room for the training batches. Each evaluation is longer, one of them on one process
    only."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def model(group):
        torch.manual_seed(3)
        return torch.nn.Sequential(*[aristos.MoE(HIDDEN, 24, EXPERTS, TOP_K, group=group) for _ in range(2)])

    spread, single = model(aristos.init()), model(aristos.Group.alone())
    for step, (tokens, evaluates) in enumerate([(5, False), (60, True), (7, False), (200, True), (150, False)]):
        x = torch.randn(size, tokens, HIDDEN, generator=torch.Generator().manual_seed(step))
        mine = x[rank][:1] if step == 3 and rank else x[rank]
        with torch.set_grad_enabled(not evaluates):
            got, want = spread(mine), single(x)
        error = relative_error(got, want[rank][: len(mine)])
        assert error <= 1e-5, f"step {step}: {error}"
        if not evaluates:
            for output, network in ((got, spread), (want, single)):
                network.zero_grad()
                output.square().sum().backward()
            gradient, whole = spread[0].down_proj.grad, single[0].down_proj.grad
            error = relative_error(full(gradient), whole)
            assert error <= 1e-5, f"step {step}: {error}"


def given_length_is_kept():
    size = dist.get_world_size()
    group = aristos.init(max_tokens=4)
    step_of(Problem(counts=[2] * size), group)
    before = windows()
    for seed in range(2):
        problem = Problem(seed=seed, counts=[50 * (rank == size - 1) for rank in range(size)])
        matches(problem, *step_of(problem, group)[:2])
    assert windows() == before


def memory_of_a_configuration():
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=1)
    of_layer = aristos.MoE(HIDDEN, 24, EXPERTS, TOP_K, group=aristos.init())
    assert aristos.memory(config, 100, 4) == aristos.memory(config.to_dict(), 100, 4) == aristos.memory(of_layer, 100, 4)
    assert aristos.memory(dict(hidden=HIDDEN, intermediate=24, experts=EXPERTS, top_k=TOP_K), 100, 4) == aristos.memory(config, 100, 4)
    narrow = aristos.memory(config, 1000, 4, dtype=torch.bfloat16) / aristos.memory(config, 1000, 4)
    assert 0.5 < narrow < 0.75, narrow
    refused(ValueError, ["tokens is 0, expected an integer of at least 1"], lambda: aristos.memory(config, 0, 4))
    refused(ValueError, ["ranks is 3, expected a divisor of 8"], lambda: aristos.memory(config, 100, 3))
    refused(ValueError, ["neither model_type nor top_k"], lambda: aristos.memory(dict(hidden=16, experts=8), 100, 4))
    refused(ValueError, ["dtype is torch.float64"], lambda: aristos.memory(config, 100, 4, dtype=torch.float64))


CASES = [
    ("fifty_lengths_in_random_order", fifty_lengths_in_random_order),
    ("backward_through_windows_that_have_grown", backward_through_windows_that_have_grown),
    ("equal_layers_and_longer_evaluations", equal_layers_and_longer_evaluations),
    ("given_length_is_kept", given_length_is_kept),
    ("memory_of_a_configuration", memory_of_a_configuration),
]


def cases(wanted, size):
    """Returns the cases as (name, function) pairs, or only the wanted case."""
    found = [(f"lengths::{name}", case) for name, case in CASES if wanted in ("", name)]
    return found or sys.exit(f"no case lengths:{wanted}")
