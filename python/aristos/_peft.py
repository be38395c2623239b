"""Adapters of PEFT on distributed experts.

PEFT adds an adapter's product to the weights of all experts. Each process has the adapter, and the weights of its own experts, in a DTensor.
Here the product is computed for these experts alone. Adapters of whole experts need nothing of this.
"""

import functools
import importlib.abc
import importlib.util
import sys

from ._parameters import is_dtensor

_LAYERS = "peft.tuners.lora.layer"


def own_rows(parameter):
    """The range of a DTensor's first dimension that this process has."""
    mesh = parameter.device_mesh
    dims = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    first, count = 0, parameter.shape[0]
    for dim in dims:
        if parameter.placements[dim].dim != 0 or count % mesh.size(dim) or len(dims) > 1:
            raise NotImplementedError(
                f"an adapter's parameter has the placements {parameter.placements}, expected Shard(0) in one dimension of the mesh: "
                "only experts that are distributed over one group of processes can have adapters"
            )
        count //= mesh.size(dim)
        first += count * mesh.get_local_rank(dim)
    return slice(first, first + count)


def _like(block, parameter):
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(block, parameter.device_mesh, parameter.placements, run_check=False)


def _patch(layers):
    """Changes PEFT's classes. Without distributed experts they behave as before."""
    proxy, wrapper = layers._LoraFactorsProxy, layers.ParamWrapper
    sum_of_factors, get_delta_weight = proxy.forward, wrapper.get_delta_weight

    @functools.wraps(sum_of_factors)
    def forward(self, W):
        if not is_dtensor(W):
            return sum_of_factors(self, W)
        rows = own_rows(W)
        return _like(sum_of_factors(proxy(self.lhs[rows], self.rhs[rows], self.scaling), W.to_local()), W)

    @functools.wraps(get_delta_weight)
    def get_own_delta_weight(self, *args, **kwargs):
        delta, parameter = get_delta_weight(self, *args, **kwargs), self.get_param()
        return _like(delta[own_rows(parameter)].contiguous(), parameter) if is_dtensor(parameter) else delta

    proxy.forward, wrapper.get_delta_weight = forward, get_own_delta_weight


class _Finder(importlib.abc.MetaPathFinder):
    """Patches the module when the program imports it, because importing it takes seconds."""

    def find_spec(self, name, path, target=None):
        if name != _LAYERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _patch_if_known(module)

        spec.loader.exec_module = exec_module
        return spec


def _patch_if_known(layers):
    # In other versions of PEFT an adapter on distributed experts fails with an error of torch.
    proxy, wrapper = getattr(layers, "_LoraFactorsProxy", None), getattr(layers, "ParamWrapper", None)
    if hasattr(proxy, "forward") and hasattr(wrapper, "get_delta_weight") and hasattr(wrapper, "get_param"):
        _patch(layers)


if _LAYERS in sys.modules:
    _patch_if_known(sys.modules[_LAYERS])
else:
    sys.meta_path.insert(0, _Finder())
