"""An MoE layer of Megatron-Core (0.16.1) whose routed experts run in Aristos. It is used in a specification::

    spec = get_gpt_layer_local_spec(num_experts=N)
    mlp = spec.submodules.mlp
    spec.submodules.mlp = ModuleSpec(module=aristos.megatron.MoELayer, submodules=mlp.submodules, metainfo=mlp.metainfo)

The router, the shared expert, the parameters of the experts and their names in checkpoints are those of Megatron. `aristos.replay_routing`
refuses this layer; Megatron has `moe_enable_routing_replay`.
"""

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module

from . import _group, _replay
from ._experts import experts as run_experts

_ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", squared_relu: "relu2", quick_gelu: "quick_gelu"}
# The options of Megatron that affect experts, with the only value of each that is supported.
_EXPECTED = dict(
    activation_func_clamp_value=None,
    add_bias_linear=False,
    expert_tensor_parallel_size=1,
    fp4=None,
    fp8=None,
    glu_linear_offset=0.0,
    moe_apply_probs_on_input=False,
    moe_latent_size=None,
    moe_shared_expert_overlap=False,
)


class MoELayer(BaseMoELayer):
    """Megatron's `MoELayer`, except that dispatch and the computation of experts run in Aristos over the expert-parallel group.

    The experts must be a `SequentialMLP`. In each pass their weights are copied into one tensor. The gradients are sums over all tokens of
    the expert-parallel group, which is also so with Megatron's own dispatchers.

    Raises:
        ValueError: if Aristos does not support the value of a configuration field. The message names the field.
    """

    def __init__(self, config, submodules=None, layer_number=None, pg_collection=None):
        for field, expected in _EXPECTED.items():
            if getattr(config, field) != expected:
                raise ValueError(f"{field} is {getattr(config, field)}, expected {expected}: aristos.megatron.MoELayer supports nothing else")
        if config.activation_func not in _ACTIVATIONS:
            names = ", ".join(_ACTIVATIONS.values())
            raise ValueError(f"activation_func is {config.activation_func}, expected one of {names}")
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            raise ValueError("sequence_parallel is False, expected True where tensor_model_parallel_size is above 1")
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config=config, layer_number=layer_number, pg_collection=groups)
        self.router = submodules.router(config=config, pg_collection=groups)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        if not isinstance(self.experts, SequentialMLP):
            raise ValueError(f"experts is a {type(self.experts).__name__}, expected a SequentialMLP (moe_grouped_gemm=False)")
        if self.use_shared_expert:
            gate = config.moe_shared_expert_gate
            self.shared_experts = build_module(submodules.shared_experts, config=config, pg_collection=groups, gate=gate)

    def forward(self, hidden_states, padding_mask=None):
        """Returns the output, and None in place of a bias. hidden_states and the output are [sequence, batch, hidden]. padding_mask is
        [batch, sequence], and True for tokens that the router excludes from its losses."""
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        probs, chosen = self.router(hidden_states, mask)
        # If the router drops tokens because of a capacity factor, such a token has fewer experts.
        weights, ids = probs.masked_fill(~chosen, -1).topk(self.config.moe_router_topk)
        dropped = ~chosen.gather(1, ids)
        weights, ids = weights.masked_fill(dropped, 0), ids.masked_fill(dropped, -1)
        group = _group.of(self.ep_group)
        ids, weights = _replay.routed(self, group, ids, weights, self.config.num_moe_experts)
        local = self.experts.local_experts
        up, down = (torch.stack([linear.weight for linear in linears]) for linears in zip(*((e.linear_fc1, e.linear_fc2) for e in local)))
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        form = dict(activation=_ACTIVATIONS[self.config.activation_func], gated=self.config.gated_linear_unit)
        output = run_experts(x, ids, weights, up, down, group=group, **form).view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output, None
