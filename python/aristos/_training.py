"""Functions for loops that train a model whose experts are distributed over processes."""

from typing import Iterable, KeysView

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _group
from ._moe import EXPERT_NAMES, MoE
from ._parameters import is_dtensor, local


def expert_parameters(model: nn.Module) -> KeysView[nn.Parameter]:
    """Returns the set of the parameters of the model's `MoE` layers that are distributed over processes, in the same order on all processes.
    FSDP must leave them alone: ``fully_shard(model, mesh=group.mesh, ignored_params=aristos.expert_parameters(model))``."""
    layers = [layer for layer in model.modules() if isinstance(layer, MoE) and layer.group.size > 1]
    # Unlike a set, the keys of a dict have an order.
    return {layer.get_parameter(name): None for layer in layers for name in EXPERT_NAMES}.keys()


def exclude_experts(model: nn.Module) -> nn.Module:
    """Makes `DistributedDataParallel` leave the distributed experts of this model alone, and returns the model:
    ``DistributedDataParallel(aristos.exclude_experts(model))``."""
    experts = expert_parameters(model)
    names = [name for name, parameter in model.named_parameters() if parameter in experts]
    # DDP puts a point before the names of the model's own parameters.
    names += [f".{name}" for name in names if "." not in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


@torch.no_grad()
def update_correction_biases(model: nn.Module, speed: float = 0.001, group: _group.Group | None = None) -> None:
    """Adds ``speed * sign(mean load - load)`` to the bias of each expert, in all `MoE` layers that have `correction_bias` (Wang et al., arXiv
    2408.15664, algorithm 1). Collective, once per optimizer step, for example by
    ``optimizer.register_step_post_hook(lambda *_: aristos.update_correction_biases(model))``.

    The load of an expert is the number of tokens that chose it in training mode since the last update, on all processes, including
    dropped choices. All processes compute the same bias. A forward pass that activation checkpointing repeats is not counted.

    Args:
        model: the model, or a layer.
        speed: the change of a bias per update; DeepSeek-V3 used 0.001, and 0 at the end of the training.
        group: the `Group` whose tokens count, by default that of each layer. If layers of several groups are replicas of each other, as with
            data parallelism around them, it must have all processes.

    Raises:
        ValueError: if no layer of the model has a bias, or the speed is negative or not finite.
    """
    if not (isinstance(speed, (int, float)) and 0 <= speed < float("inf")):
        raise ValueError(f"speed is {speed!r}, expected a finite number, 0 or more")
    layers = [layer for layer in model.modules() if isinstance(layer, MoE) and layer.correction_bias is not None]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no aristos.MoE with a bias, expected one with correction_bias=True")
    # One message for all layers of a group.
    by_group = {}
    for layer in layers:
        by_group.setdefault(group or layer.group, []).append(layer)
    for owner, of_owner in by_group.items():
        # A process without a forward pass takes part in the sum of the others.
        loads = [torch.zeros_like(layer.correction_bias, dtype=torch.int64) if layer.load is None else layer.load for layer in of_owner]
        sums = owner.sum(torch.cat(loads)).split([layer.experts for layer in of_owner])
        for layer, load in zip(of_owner, sums):
            # The mean is not an integer, so both sides are multiplied by the number of experts.
            below = torch.sign(load.sum() - layer.experts * load)
            layer.correction_bias.add_(below.to(layer.correction_bias), alpha=speed)
            if layer.load is not None:
                layer.load.zero_()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips the gradients of a model whose parameters are plain tensors and DTensors over any meshes, and returns their norm before that.

    The norm is that of all gradients together, and is the same on all processes. Plain tensors count once: the caller has averaged their
    gradients. Collective over the meshes of the DTensors.

    Args:
        parameters: the parameters, in the same order on all processes.
        max_norm: maximum norm after the call.
        norm_type: the order of the norm, above 0, or infinity.
        error_if_nonfinite: whether a norm that is infinite or not a number raises an error.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type, groups = float(norm_type), {}
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, expected above 0")
    for parameter in parameters:
        grads = groups.setdefault(_shards(parameter), [])
        if parameter.grad is not None:
            grads.append(_local_grad(parameter))
    if not groups:
        return torch.tensor(0.0)
    device = local(parameters[0]).device
    norms = []
    for shards, grads in groups.items():
        # A process without gradients takes part in the sum of the others.
        norm = nn.utils.get_total_norm(grads, norm_type).to(device, torch.float32)
        for mesh, dim in shards:
            norm = _norm_over(mesh.get_group(dim), norm, norm_type)
        norms.append(norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return total


def _shards(parameter):
    """The dimensions of a DTensor's mesh over which the tensor is divided, as pairs of the mesh and the index of the dimension."""
    if not is_dtensor(parameter):
        return ()
    return tuple((parameter.device_mesh, dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())


def _local_grad(parameter):
    grad = parameter.grad
    if is_dtensor(grad) and grad.placements != parameter.placements:
        # For example a sum of which each process has a part. The gradient that is clipped must be that of the optimizer.
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return local(grad)


def _norm_over(group, norm, norm_type):
    """The norm of all processes' tensors, given the norm of this process's tensors."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    power = norm**norm_type
    dist.all_reduce(power, group=group)
    return power ** (1 / norm_type)
