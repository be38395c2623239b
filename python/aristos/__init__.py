"""Mixture-of-Experts layers with one-sided communication, for PyTorch training loops.

``import aristos`` registers the expert-parallel implementation ``"aristos"`` with transformers, where transformers is installed::

    DistributedConfig(ep_size=N, fsdp_size=N, ep_implementation="aristos")

`experts` is the same without transformers: experts of a group of processes, by the caller's routing.
"""

from ._aristos import AristosError
from ._experts import Experts
from ._group import Group

__all__ = ["AristosError", "Experts", "Group"]

try:
    from . import _transformers as _transformers
except ImportError:  # No transformers, or one without expert-parallel implementations.
    pass
