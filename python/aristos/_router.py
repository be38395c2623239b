"""The parts of the router of `MoE`: the choice of experts, their weights, the capacity, and the load-balancing losses. They compute on the
device of the scores, without waiting for it."""

import math

import torch
from torch import Tensor

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


def check(
    *,
    experts: int,
    top_k: int,
    scoring: str,
    scaling: float,
    n_groups: int,
    top_groups: int,
    group_score: str,
    capacity_factor: float | None,
    jitter: float,
    coefficients: dict[str, float],
) -> None:
    """Raises a ValueError that names the first option with an invalid value. `coefficients` are those of the losses, by name."""
    if top_k > experts:
        raise ValueError(f"top_k is {top_k}, expected 1 to {experts}, the number of experts")
    for name, value, names in (("scoring", scoring, SCORINGS), ("group_score", group_score, GROUP_SCORES)):
        if value not in names:
            raise ValueError(f"{name} is {value!r}, expected " + " or ".join(f'"{one}"' for one in names))
    if not _is_number(scaling) or scaling <= 0:
        raise ValueError(f"scaling is {scaling!r}, expected a finite number above 0")
    if not isinstance(n_groups, int) or n_groups < 1 or experts % n_groups:
        raise ValueError(f"n_groups is {n_groups!r}, expected a divisor of {experts}, the number of experts")
    size = experts // n_groups
    if n_groups > 1 and size < 2:
        raise ValueError(f"n_groups is {n_groups}, expected at most {experts // 2}, because a group has two or more experts")
    least = -(-top_k // size)
    if not isinstance(top_groups, int) or not least <= top_groups <= n_groups:
        raise ValueError(f"top_groups is {top_groups!r}, expected {least} to {n_groups}: groups have {size} experts each, and top_k is {top_k}")
    if capacity_factor is not None and (not _is_number(capacity_factor) or capacity_factor <= 0):
        raise ValueError(f"capacity_factor is {capacity_factor!r}, expected a finite number above 0, or None")
    if not _is_number(jitter) or not 0 <= jitter < 1:
        raise ValueError(f"jitter is {jitter!r}, expected 0 or more, below 1")
    for name, value in coefficients.items():
        if not _is_number(value) or value < 0:
            raise ValueError(f"{name} is {value!r}, expected a finite number, 0 or more")


def _is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def jittered(x: Tensor, jitter: float) -> Tensor:
    """Multiplies each element by a number that is drawn uniformly from 1 - jitter to 1 + jitter."""
    noise = torch.empty_like(x, dtype=torch.float32).uniform_(1 - jitter, 1 + jitter)
    return (x * noise).to(x.dtype)


def choose(scores: Tensor, top_k: int, bias: Tensor | None, n_groups: int, top_groups: int, group_score: str) -> Tensor:
    """Returns the `top_k` experts with the highest scores, [T, top_k], given all scores, [T, experts]. `bias`, [experts], is added to the
    scores first. Only experts of the `top_groups` best of `n_groups` groups are chosen."""
    selection = scores.detach() if bias is None else scores.detach() + bias
    if top_groups < n_groups:
        groups = selection.unflatten(-1, (n_groups, selection.shape[-1] // n_groups))
        of_group = groups.amax(-1) if group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
        best = of_group.topk(top_groups, dim=-1).indices
        excluded = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, best, False)
        selection = groups.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
    return selection.topk(top_k, dim=-1).indices


def weigh(scores: Tensor, ids: Tensor, normalise: bool, scaling: float) -> Tensor:
    """Returns the weights of the chosen experts, [T, top_k]: their scores, divided by their sum if `normalise`, times `scaling`."""
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if scaling == 1 else weights * scaling


def count(ids: Tensor, experts: int) -> Tensor:
    """Returns the number of choices of each expert, [experts]. Unset choices, -1, are not counted."""
    # Not by bincount, which waits for the device.
    chosen = ids.reshape(-1)
    return ids.new_zeros(experts, dtype=torch.int64).scatter_add_(0, chosen.clamp(min=0).long(), (chosen >= 0).long())


def within_capacity(ids: Tensor, by_rank: Tensor, rank: int, factor: float) -> Tensor:
    """Returns which choices, [T, top_k], are among the first ``ceil(factor * top_k * tokens / experts)`` choices of their expert, in the
    order of ranks and tokens. Unset choices are. `by_rank`, [ranks, experts], has the number of choices of each expert on each rank. The
    command's layer uses the same rule."""
    ranks, experts = by_rank.shape
    top_k = ids.shape[-1]
    tokens = by_rank.sum() // top_k
    capacity = (factor * top_k * tokens.double() / experts).ceil().long()
    # A stable sort by expert keeps the order of tokens. Unset choices are first.
    chosen = ids.reshape(-1)
    order = chosen.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(chosen), device=ids.device))
    own = by_rank[rank]
    start = len(chosen) - own.sum() + own.cumsum(0) - own
    before = by_rank[:rank].sum(0)
    place = place + (before - start)[chosen.clamp(min=0)]
    return ((place < capacity) | (chosen < 0)).view(ids.shape)


def balance_loss(counts: Tensor, tokens: Tensor | int, probabilities: Tensor) -> Tensor:
    """The load-balancing loss ``experts * sum of share * probability`` over the experts (Fedus et al., Switch Transformers, section 2.2),
    summed over the top_k choices. An expert's share is its number of choices, `counts`, [experts], over the tokens that were counted. Its
    probability is the mean of `probabilities`, [T, experts]."""
    tokens = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(1, tokens)
    share = (counts.double() / tokens).float()
    mean = probabilities.sum(0) / max(1, len(probabilities))
    return len(share) * (share * mean).sum()


def sequence_loss(scores: Tensor, top_k: int) -> Tensor:
    """The sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), without its factor, averaged over the sequences.
    `scores` has the shape [sequences, length, experts]. As in equation 18, an expert counts as chosen if its score is one of the `top_k`
    highest, whatever bias and groups do."""
    sequences, length, experts = scores.shape
    best = scores.detach().topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores).scatter_(-1, best, 1.0).sum(1)
    share = chosen * (experts / (top_k * max(1, length)))
    mean = (scores / scores.sum(-1, keepdim=True)).sum(1) / max(1, length)
    return (share * mean).sum() / max(1, sequences)
