"""The expert-parallel implementation ``"aristos"`` for transformers (5.23 or later)."""

import functools

import torch
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import _aristos, _group, _optimizers, _replay
from ._experts import experts as run_experts
from ._parameters import local


class _Stored:
    """The weights of a module of experts, converted to the layout of `experts`. The model family determines what an expert computes, and
    the flags of the module determine how its weights are stored."""

    def __init__(self, module, group):
        name = type(module).__name__
        if getattr(module, "has_post_expert_norm", False):
            raise NotImplementedError(f"{name} has a norm after each expert: aristos does not support it")
        self.form = _aristos.family_expert(module.config.to_json_string(use_diff=False))
        self._has_bias = self.form.pop("bias")
        for flag, family in (("has_gate", self.form["gated"]), ("has_bias", self._has_bias)):
            if getattr(module, flag, family) != family:
                raise NotImplementedError(f"{name} has {flag} = {not family}, but experts of {module.config.model_type} have {family}")
        self._module, self._group = module, group

    def experts(self):
        """The number of experts of all processes."""
        return len(local(self._module.down_proj)) * self._group.size

    def weights(self):
        """Returns up, down, and their biases by name. They are views if the module has this layout, and otherwise copies that autograd
        tracks."""
        module, gated = self._module, self.form["gated"]
        name = "gate_up_proj" if gated else "up_proj"
        # An attribute has the effective weight, also if a parametrization such as an adapter computes it.
        up, down = local(getattr(module, name)), local(module.down_proj)
        up_bias = local(getattr(module, f"{name}_bias")) if self._has_bias else None
        if getattr(module, "is_transposed", False):
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if gated and not getattr(module, "is_concatenated", True):
            # In this module the rows of gate and up are interleaved.
            up = torch.cat([up[:, 0::2], up[:, 1::2]], dim=1)
            up_bias = None if up_bias is None else torch.cat([up_bias[:, 0::2], up_bias[:, 1::2]], dim=1)
        biases = dict(up_bias=up_bias, down_bias=local(module.down_proj_bias)) if self._has_bias else {}
        return up, down, biases

    def run(self, hidden_states, top_k_index, top_k_weights, batch_group=None):
        up, down, biases = self.weights()
        group, form = self._group, biases | self.form
        ids, weights = _replay.routed(self._module, group, top_k_index, top_k_weights, self.experts())
        return run_experts(hidden_states, ids, weights, up, down, group=group, batch_group=batch_group, **form)


class _AristosExperts(EPImplementation):
    """Experts that are distributed over an expert-parallel group."""

    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        _optimizers.check_all()
        experts._aristos = self._stored = _Stored(experts, _group.of(ep_mesh.get_group()))
        # Each process of a group that shares a batch computes a part of it.
        self._batch_group = _group.of(tp_mesh.get_group()) if tp_mesh.size() > 1 else None

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        return self._stored.run(hidden_states, top_k_index, top_k_weights, self._batch_group)


def _stored(module):
    """Returns what Aristos keeps of a module of experts that it computes, and None for other modules."""
    alone = getattr(getattr(module, "config", None), "_experts_implementation", None) == "aristos" and hasattr(module, "is_transposed")
    if alone and not hasattr(module, "_aristos"):
        module._aristos = _Stored(module, _group.alone())
    return getattr(module, "_aristos", None)


def _alone(module, hidden_states, top_k_index, top_k_weights):
    """Runs all of a module's experts in this process."""
    return _stored(module).run(hidden_states, top_k_index, top_k_weights)


def _find(module):
    """Finds the experts in a block of a model, which adapters may have wrapped."""
    for child in module.children():
        while hasattr(child, "base_layer"):
            child = child.base_layer
        if (stored := _stored(child)) is not None:
            return child, stored.experts(), 2


_replay.finders.append(_find)


# The names of the number of experts in the configurations of families.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# In other versions, which may lack these private functions, such families are not refused.
_check_implementation = getattr(PreTrainedModel, "_check_and_adjust_experts_implementation", None)


@functools.wraps(_check_implementation)
def _refuse_if_never_called(self, experts_implementation):
    """Refuses families whose experts transformers computes in its own code, so that it would accept the implementation and never call it."""
    if experts_implementation == "aristos" and not self._can_set_experts_implementation():
        for field in _EXPERT_COUNTS:
            if getattr(self.config, field, 0):
                raise NotImplementedError(
                    f"{type(self).__name__} has {field} = {getattr(self.config, field)}, but transformers lets no implementation compute the "
                    f'experts of {self.config.model_type}: experts_implementation="aristos" would never be called'
                )
    return _check_implementation(self, experts_implementation)


if _check_implementation and hasattr(PreTrainedModel, "_can_set_experts_implementation"):
    PreTrainedModel._check_and_adjust_experts_implementation = _refuse_if_never_called
EPImplementationInterface.register("aristos", _AristosExperts)
ALL_EXPERTS_FUNCTIONS.register("aristos", _alone)
