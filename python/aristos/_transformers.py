"""The expert-parallel implementation ``"aristos"`` of transformers (5.23 or later)."""

from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ._experts import Experts
from ._group import Group

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
}
_groups = {}


def _group_of(mesh):
    """One group for all layers of a mesh."""
    group = mesh.get_group()
    if group not in _groups:
        _groups[group] = Group(group)
    return _groups[group]


def _local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


class _AristosExperts(EPImplementation):
    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        name = type(experts).__name__
        for flag in ("has_bias", "is_transposed", "has_post_expert_norm"):
            if getattr(experts, flag, False):
                raise NotImplementedError(f"{name} has {flag}: not among the experts that aristos computes")
        if not getattr(experts, "is_concatenated", True):
            raise NotImplementedError(f"{name} interleaves gate and up: not among the experts that aristos computes")
        self._module = experts
        self._group = _group_of(ep_mesh)
        self._experts = None

    def _make(self, top_k):
        module = self._module
        gated = getattr(module, "has_gate", True)
        up = _local(module._parameters["gate_up_proj" if gated else "up_proj"])
        config = module.config
        activation = getattr(config, "hidden_act", None) or config.hidden_activation
        if activation not in _ACTIVATIONS:
            raise NotImplementedError(f"activation {activation!r}, expected one of {', '.join(_ACTIVATIONS)}")
        return Experts(
            self._group,
            hidden=up.shape[2],
            intermediate=up.shape[1] // (2 if gated else 1),
            experts=self.num_local_experts * self._group.size,
            top_k=top_k,
            activation=_ACTIVATIONS[activation],
            gated=gated,
            shares_batch=self.shares_batch,
        )

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        if self._experts is None:
            self._experts = self._make(top_k_index.shape[1])
        module, gated = self._module, self._experts.shape["gated"]
        up, down = module._parameters["gate_up_proj" if gated else "up_proj"], module._parameters["down_proj"]
        return self._experts(hidden_states, top_k_index, top_k_weights, _local(up), _local(down))


EPImplementationInterface.register("aristos", _AristosExperts)
