"""The expert-parallel implementation ``"aristos"`` of transformers (5.23 or later)."""

import torch
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from . import _aristos, _routing
from ._experts import experts as run_experts
from ._group import Group

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
    """An experts module's passes. What an expert computes is the family's, as the table of families has it; the module's flags say how its
    weights are stored."""

    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        name = type(experts).__name__
        if getattr(experts, "has_post_expert_norm", False):
            raise NotImplementedError(f"{name} has a norm after each expert: not among the experts that aristos computes")
        form = _aristos.family_expert(experts.config.to_json_string(use_diff=False))
        self._has_bias = form.pop("bias")
        for flag, family in (("has_gate", form["gated"]), ("has_bias", self._has_bias)):
            if getattr(experts, flag, family) != family:
                raise NotImplementedError(f"{name} has {flag} = {not family}, but experts of {experts.config.model_type} have {family}")
        self._module = experts
        self._form = form
        self._group = _group_of(ep_mesh)
        # Where processes share a batch each brings a part of it to the pass.
        self._batch_group = _group_of(tp_mesh) if tp_mesh.size() > 1 else None

    def _weights(self):
        """up, down and their biases, as `experts` takes them. A view where the module stores them so, otherwise a copy that autograd knows."""
        module, parameters = self._module, self._module._parameters
        name = "gate_up_proj" if self._form["gated"] else "up_proj"
        up, down = _local(parameters[name]), _local(parameters["down_proj"])
        biases = [None, None]
        if self._has_bias:
            biases = [_local(parameters[f"{name}_bias"]), _local(parameters["down_proj_bias"])]
        if getattr(module, "is_transposed", False):
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if self._form["gated"] and not getattr(module, "is_concatenated", True):
            up = torch.cat([up[:, 0::2], up[:, 1::2]], dim=1)
            if biases[0] is not None:
                biases[0] = torch.cat([biases[0][:, 0::2], biases[0][:, 1::2]], dim=1)
        return up, down, biases

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        _routing.note(top_k_index)
        up, down, (up_bias, down_bias) = self._weights()
        return run_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            up,
            down,
            up_bias=up_bias,
            down_bias=down_bias,
            group=self._group,
            batch_group=self._batch_group,
            **self._form,
        )


EPImplementationInterface.register("aristos", _AristosExperts)
