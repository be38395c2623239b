"""Mixture-of-Experts layers with one-sided communication, for PyTorch training loops.

If transformers is installed, ``import aristos`` registers the expert-parallel implementation ``"aristos"`` with it::

    DistributedConfig(ep_size=N, fsdp_size=N, ep_implementation="aristos")

Without transformers, use `MoE`, a layer with router and shared expert, or `experts`, which computes the routed experts for the caller's
routing.
"""

import importlib.metadata

from . import _exit as _exit
from . import _peft as _peft
from ._aristos import AristosError, families
from ._balance import rebalance_experts
from ._checkpoint import load, save
from ._experts import experts
from ._group import Group, init
from ._memory import memory
from ._metrics import step_metrics
from ._moe import MoE
from ._non_finite import detect_non_finite
from ._replay import record_routing, replay_routing
from ._routing import Routing
from ._training import clip_grad_norm_, exclude_experts, expert_parameters, update_correction_biases

__all__ = [
    "AristosError",
    "Group",
    "MoE",
    "Routing",
    "clip_grad_norm_",
    "detect_non_finite",
    "exclude_experts",
    "expert_parameters",
    "experts",
    "families",
    "init",
    "load",
    "memory",
    "rebalance_experts",
    "record_routing",
    "replay_routing",
    "save",
    "step_metrics",
    "update_correction_biases",
]
__version__ = importlib.metadata.version("aristos")

try:
    from . import _transformers as _transformers
except ImportError:  # transformers is missing or has no expert-parallel implementations.
    pass
