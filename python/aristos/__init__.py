"""Mixture-of-Experts layers with one-sided communication, for PyTorch training loops.

``import aristos`` registers the expert-parallel implementation ``"aristos"`` with transformers, where transformers is installed::

    DistributedConfig(ep_size=N, fsdp_size=N, ep_implementation="aristos")

Without transformers: `MoE` is a layer with router and shared expert, `experts` the routed experts alone, by the caller's routing.
"""

from . import _exit as _exit
from ._aristos import AristosError, families
from ._experts import experts
from ._group import Group, init
from ._moe import MoE, load, save
from ._routing import Routing

__all__ = ["AristosError", "Group", "MoE", "Routing", "experts", "families", "init", "load", "save"]

try:
    from . import _transformers as _transformers
except ImportError:  # No transformers, or one without expert-parallel implementations.
    pass
