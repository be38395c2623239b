"""Replicas of hot experts, and their placement on ranks."""

from typing import Literal

import torch

from . import _aristos


def rebalance_experts(
    weight: torch.Tensor,
    num_replicas: int | Literal["auto"],
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    imbalance: float | None = None,
    current: torch.Tensor | None = None,
    move_cost: float = 0.001,
    shares: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Replicates and places the experts of each layer, with the arguments and results of EPLB.

    ``weight[layer, expert]`` is an expert's load. ``num_replicas`` is the number of physical experts of a layer; ``"auto"`` is the least number that holds all
    experts, or that reaches ``imbalance``, the largest load of a GPU over the mean, in all layers. Returns ``phy2log`` (layers, replicas), ``log2phy``
    (layers, experts, most replicas), with -1 where an expert has fewer, and ``logcnt`` (layers, experts).

    ``current`` is the ``phy2log`` in use: a physical expert moves to another GPU only if each move lowers the largest load by ``move_cost`` of the mean load.
    With ``shares`` an expert's tokens are split unequally among its replicas, and a fourth tensor (layers, replicas) has the part that each physical expert
    gets.
    """
    phy2log, log2phy, logcnt, parts = _aristos.rebalance_experts(
        weight.detach().to("cpu", torch.float64).tolist(),
        None if num_replicas == "auto" else num_replicas,
        num_groups,
        num_nodes,
        num_gpus,
        imbalance,
        None if current is None else current.detach().cpu().tolist(),
        move_cost,
        shares,
    )
    most = max(len(slots) for layer in log2phy for slots in layer)
    padded = [[slots + [-1] * (most - len(slots)) for slots in layer] for layer in log2phy]
    tensors = tuple(torch.tensor(of, dtype=torch.int64, device=weight.device) for of in (phy2log, padded, logcnt))
    return (*tensors, torch.tensor(parts, dtype=torch.float64, device=weight.device)) if shares else tensors
