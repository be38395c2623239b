"""Checks of optimizers, which torch runs before each step. They find what would be wrong without an error."""

import warnings
import weakref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _group
from ._parameters import is_dtensor

# The optimizers that have been checked.
_checked = weakref.WeakSet()
_hook = None


def check_all():
    """Makes every optimizer check its parameters before its first step."""
    global _hook
    _hook = _hook or register_optimizer_step_pre_hook(_check)


def _check(optimizer, args, kwargs):
    if optimizer in _checked:
        return
    sharded = [one for group in optimizer.param_groups for one in group["params"] if is_dtensor(one)]
    if sharded and type(optimizer).__name__ == "Adafactor":
        raise RuntimeError(
            "Adafactor scales the steps of a DTensor by the norm of this process's part of it, so that they depend on the number of processes: "
            "use another optimizer, such as torch.optim.AdamW"
        )
    meshes = dict.fromkeys(one.device_mesh for one in sharded)
    of_experts = [mesh for mesh in meshes if _group.has_mesh(mesh)]
    for mesh in meshes:
        ranks = set(mesh.mesh.flatten().tolist())
        for experts in of_experts:
            if not ranks.issuperset(experts.mesh.flatten().tolist()):
                warnings.warn(
                    f"parameters are sharded over the processes {sorted(ranks)} only, and experts over {experts.mesh.tolist()}: unless your "
                    "loop sums the gradients of the former over the latter, shard them over a mesh with all these processes",
                    stacklevel=2,
                )
    _checked.add(optimizer)
