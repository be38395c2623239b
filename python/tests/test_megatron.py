"""Compares Megatron-Core's MoE layer with Aristos, built from its specification, with its own experts in one process.

`without_gpu` replaces Apex, Transformer Engine and the GPU.
"""

import contextlib
import re
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import refused, relative_error
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

import aristos.megatron

HIDDEN, INNER, EXPERTS, TOP_K, LENGTH, BATCH = 16, 24, 8, 2, 6, 2


def config_of(**changed):
    shape = dict(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_ffn_hidden_size=INNER)
    expert = dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, moe_shared_expert_intermediate_size=INNER)
    more = dict(use_cpu_initialization=True, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)
    return TransformerConfig(**(shape | expert | more | changed))


def layer_of(module, config):
    """Builds a layer of this class in the way that Megatron does."""
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    mlp = spec.submodules.mlp
    return build_module(ModuleSpec(module=module, submodules=mlp.submodules, metainfo=mlp.metainfo), config=config)


def passes(layer, x, grad):
    """Returns the output, the gradient of the input, and the gradients of the parameters by name."""
    x = x.clone().requires_grad_()
    output, bias = layer(x)
    assert bias is None
    output.backward(grad)
    return output, x.grad, {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def numbered_from(name, first):
    """Returns the name that a parameter has in a layer on one process, given its name on a process whose first expert is `first`."""
    return re.sub(r"(?<=local_experts\.)\d+", lambda number: str(int(number[0]) + first), name)


def without_gpu():
    """Replaces the functions with which the router asks for the current GPU and for Transformer Engine. This version calls them even if
    neither exists."""
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")))
    patches.enter_context(mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True))
    return patches


@contextlib.contextmanager
def parallel(size):
    parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def layer_by_specification_equals_megatrons():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, grad = torch.randn(size, LENGTH, BATCH, HIDDEN), torch.randn(size, LENGTH, BATCH, HIDDEN)
    # Megatron's layer with all experts computes the tokens of one process after another, because the gradients of the experts are sums over
    # all tokens.
    with without_gpu(), parallel(1):
        own = layer_of(MoELayer, config_of())
        weights = dict(own.named_parameters())
        wanted = []
        for tokens, their_grad in zip(x, grad):
            own.zero_grad()
            wanted.append(passes(own, tokens, their_grad))
        summed = {name: sum(one[2][name] for one in wanted) for name in weights}
    with without_gpu(), parallel(size):
        layer = layer_of(aristos.megatron.MoELayer, config_of(expert_model_parallel_size=size))
        names = {name: numbered_from(name, rank * (EXPERTS // size)) for name, _ in layer.named_parameters()}
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(weights[names[name]])
        output, grad_x, gradients = passes(layer, x[rank], grad[rank])
        with aristos.record_routing() as layers:
            layer(x[rank])
        assert list(layers[0].shape) == [LENGTH * BATCH, TOP_K]

        def replay():
            with aristos.replay_routing(layers):
                layer(x[rank])

        refused(NotImplementedError, ["MoELayer", "could not be intercepted"], replay)
        wrong = dict(glu_linear_offset=1.0)
        refused(ValueError, ["glu_linear_offset is 1.0, expected 0.0"], lambda: layer_of(aristos.megatron.MoELayer, config_of(**wrong)))
    errors = {"output": relative_error(output, wanted[rank][0]), "x": relative_error(grad_x, wanted[rank][1])}
    for name, got in gradients.items():
        # The gradients of replicated parameters are those of the process's own tokens.
        want = summed if "local_experts" in name else wanted[rank][2]
        errors[name] = relative_error(got, want[names[name]])
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]}"
    return f"{errors[worst]:.1e}, {worst}"
