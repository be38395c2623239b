"""Functions for loops that train a model whose experts are distributed over processes."""

from typing import Iterable, KeysView

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


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
