"""What the layers did in a step: tokens of each expert, rows and bytes sent, and the time of each phase."""

import weakref
from typing import Optional

import torch

from . import _group, _router

# By group and layer, the number of tokens of each expert since the last call of `step_metrics`, and of dropped choices, which is None without
# a capacity. A group without a call is not counted.
_counts: dict = {}

_PHASES = ("dispatch", "expert", "combine", "waiting")


def step_metrics(group: Optional["_group.Group"] = None, *, per_expert: bool = False) -> dict:
    """What the layers of a group did since the last call, summed over its processes. The first call starts counting and returns zeros.
    Collective: every process gets the same values, for example to log them::

        for name, value in aristos.step_metrics().items():
            writer.add_scalar(name, value, step)

    Layers are numbered in the order of their first forward pass. A forward pass that activation checkpointing repeats is not counted.
    Layers compiled by torch.compile are not counted, and passes on devices have no rows, bytes and times.

    Args:
        group: the `Group` of the layers; the default has all processes.
        per_expert: whether "layerN/tokens" is returned, a list with the number of tokens of each expert.

    Returns:
        "layerN/expert_imbalance" and "layerN/rank_imbalance": the largest number of tokens of an expert, or of a process's experts, over
        the mean, before choices are dropped. "layerN/dropped": the number of choices beyond the experts' capacity; absent without a
        capacity. "rows_sent" and "bytes_sent": token rows, results and gradients sent to other processes, and all bytes. "dispatch_s",
        "expert_s", "combine_s" and "waiting_s": seconds of these phases, mean over the processes. "waiting_max_s": the seconds that the
        process waited that waited longest. "late_rank": the rank that waited least, for which the others waited; absent without a wait.
    """
    group = group or _group.default()
    layers = [(tokens.tolist(), None if dropped is None else dropped.item()) for tokens, dropped in _counts.get(group, {}).values()]
    _counts[group] = weakref.WeakKeyDictionary()
    everyone = group.gather((layers, group.measured()), purpose="gather metrics")
    result = {}
    for number, by_rank in enumerate(zip(*(layers for layers, _ in everyone))):
        tokens = [sum(of_expert) for of_expert in zip(*(of_rank for of_rank, _ in by_rank))]
        local = len(tokens) // group.size
        if per_expert:
            result[f"layer{number}/tokens"] = tokens
        result[f"layer{number}/expert_imbalance"] = _max_over_mean(tokens)
        result[f"layer{number}/rank_imbalance"] = _max_over_mean([sum(tokens[at : at + local]) for at in range(0, len(tokens), local)])
        if by_rank[0][1] is not None:
            result[f"layer{number}/dropped"] = sum(dropped for _, dropped in by_rank)
    measured = [mine for _, mine in everyone]
    for name in ("rows_sent", "bytes_sent"):
        result[name] = sum(mine[name] for mine in measured)
    for phase in _PHASES:
        result[f"{phase}_s"] = sum(mine[f"{phase}_s"] for mine in measured) / group.size
    waits = [mine["waiting_s"] for mine in measured]
    result["waiting_max_s"] = max(waits)
    if max(waits) > min(waits):
        result["late_rank"] = waits.index(min(waits))
    return result


def _max_over_mean(values):
    return max(values) * len(values) / max(1, sum(values))


def count(layer, group, ids, experts, kept):
    """Counts the tokens of each expert in a forward pass of this layer, and the dropped choices, which are -1 in `kept`."""
    if group not in _counts:
        return
    counts = _counts[group]
    if layer not in counts:
        # A tensor of inference mode could not be changed outside of it.
        with torch.inference_mode(False):
            counts[layer] = ids.new_zeros(experts, dtype=torch.int64), None if kept is None else ids.new_zeros((), dtype=torch.int64)
    tokens, dropped = counts[layer]
    tokens += _router.count(ids.detach(), experts)
    if kept is not None:
        dropped += (ids != kept).sum()
