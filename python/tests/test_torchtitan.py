"""Compares the routed experts of torchtitan in two forms: those that the command line overrides, and torchtitan's own in one process. Both
compute in bfloat16."""

import sys
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from harness import relative_error
from torch.distributed.device_mesh import init_device_mesh

# Modules with GPU kernels. These tests do not call the kernels, but importing them needs triton, a download of 0.2 GB.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module

import aristos

HIDDEN, INNER, EXPERTS, TOP_K, LENGTH = 16, 32, 8, 2, 12


class Holder(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        experts: RoutedExperts.Config


def config_of(experts):
    inner = GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=experts)
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    return Holder.Config(experts=RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher))


def passes(module, x, scores, ids, grad):
    """Returns the output and the gradients of the tokens, the scores and the weights."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    output = module(x, scores, ids, counts)
    output.backward(grad)
    inner = module.inner_experts
    return output, x.grad, scores.grad, inner.w1_EFD.grad, inner.w2_EDF.grad, inner.w3_EFD.grad


def overridden_experts_equal_torchtitans():
    rank, size = dist.get_rank(), dist.get_world_size()
    gen = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=gen)
    x, grad = draw(size, LENGTH, HIDDEN), draw(size, LENGTH, HIDDEN)
    scores, ids = torch.rand(size, LENGTH, EXPERTS, generator=gen).topk(TOP_K)
    weights = draw(EXPERTS, INNER, HIDDEN) / 4, draw(EXPERTS, HIDDEN, INNER) / 4, draw(EXPERTS, INNER, HIDDEN) / 4
    local = EXPERTS // size
    here, mine = slice(rank, rank + 1), slice(rank * local, (rank + 1) * local)

    def filled(module, part):
        inner = module.inner_experts
        with torch.no_grad():
            for parameter, values in zip((inner.w1_EFD, inner.w2_EDF, inner.w3_EFD), weights):
                parameter.copy_(values[part])
        return module

    wanted = passes(filled(config_of(EXPERTS).experts.build(), slice(None)), x, scores, ids, grad)
    config = config_of(local)
    replaced = apply_overrides(OverrideConfig(imports=["aristos.torchtitan.experts"]), config)
    assert len(replaced) == 1 and "AristosRoutedExperts" in replaced[0], replaced
    ours = filled(config.experts.build(), mine)
    if size > 1:
        ours.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,)))
    got = passes(ours, x[here], scores[here], ids[here], grad[here])
    parts = here, here, here, mine, mine, mine
    errors = [relative_error(one, want[part]) for one, want, part in zip(got, wanted, parts)]
    assert max(errors) <= 2e-2, errors
    return f"{max(errors):.1e}"


def routing_is_replayed():
    rank, size = dist.get_rank(), dist.get_world_size()
    gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS)
    groups = dict(num_expert_groups=4, num_limited_groups=2)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP_K, route_norm=True, route_scale=2.5, **groups)
    config = MoE.Config(num_experts=EXPERTS, routed_experts=config_of(EXPERTS // size).experts, router=router)
    apply_overrides(OverrideConfig(imports=["aristos.torchtitan.experts"]), config)
    layer = config.build()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
        layer.expert_bias_E.normal_(std=0.3)
    if size > 1:
        layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,)))
    torch.manual_seed(5 + rank)
    x = torch.randn(2, LENGTH, HIDDEN)
    with aristos.record_routing() as layers:
        want = layer(x)
    with aristos.replay_routing(layers):
        assert torch.equal(layer(x), want)
    ids = torch.rand(2 * LENGTH, EXPERTS).topk(TOP_K).indices
    ids[0], ids[1, 0], ids[2, -1] = -1, -1, -1
    with aristos.replay_routing([ids]), aristos.record_routing() as layers:
        output = layer(x)
        output.square().sum().backward()
    assert torch.equal(layers[0], ids)
    got = layer.router.gate.weight.grad.clone()
    layer.zero_grad()
    scores = (x.view(-1, HIDDEN) @ layer.router.gate.weight.T).sigmoid()
    weights = scores.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    expected = layer.routed_experts(x, weights, ids, None)
    expected.square().sum().backward()
    errors = relative_error(output, expected), relative_error(got, layer.router.gate.weight.grad)
    assert max(errors) <= 1e-5, errors
    return f"{max(errors):.1e}"


CASES = [overridden_experts_equal_torchtitans, routing_is_replayed]
