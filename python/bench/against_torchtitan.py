"""Compares forward and backward of torchtitan's routed experts between Aristos and its own all_to_all over gloo.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 python/bench/against_torchtitan.py

Weights in float32, GEMMs in bfloat16, as in torchtitan's training. Times: medians over alternating passes, of the slowest process, with the first and
third quartile. Bytes: of Aristos' puts; of torchtitan's four exchanges of rows, counted from the routing. The results are checked to be equal.
"""

import argparse
import statistics
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from against_transformers import slowest
from torch.distributed.device_mesh import init_device_mesh

# GPU kernels that this benchmark does not call, but whose import needs triton.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from aristos import _group
from aristos.torchtitan import AristosRoutedExperts

# hidden, intermediate, experts, top_k, tokens per process
SHAPES = [(256, 128, 16, 4, 1024), (512, 256, 16, 4, 1024), (1024, 512, 8, 2, 1024), (2048, 768, 16, 8, 256)]
WAYS = {"aristos": AristosRoutedExperts.Config, "torchtitan": RoutedExperts.Config}


def make(config, shape, mesh, weights):
    hidden, inner, experts, top_k, _ = shape
    module = config(
        inner_experts=GroupedExperts.Config(dim=hidden, hidden_dim=inner, num_experts=experts // mesh.size()),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k),
    ).build()
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    parts = module.inner_experts
    with torch.no_grad():
        for parameter, values in zip((parts.w1_EFD, parts.w2_EDF, parts.w3_EFD), weights):
            parameter.copy_(values)
    return module


def passes(module, x, scores, ids, counts, grad):
    """Output, and gradients of tokens, scores and weights."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    module.zero_grad()
    output = module(x, scores, ids, counts)
    output.backward(grad)
    return output.detach(), x.grad, scores.grad, *(parameter.grad for parameter in module.parameters())


def compare(shape, mesh, repeats):
    hidden, inner, experts, top_k, tokens = shape
    rank, local = dist.get_rank(), experts // mesh.size()
    gen = torch.Generator().manual_seed(1 + rank)
    draw = lambda *size: torch.randn(*size, generator=gen)
    x, grad = draw(1, tokens, hidden), draw(1, tokens, hidden)
    scores, ids = torch.rand(1, tokens, experts, generator=gen).topk(top_k)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    weights = draw(local, inner, hidden) / 32, draw(local, hidden, inner) / 32, draw(local, inner, hidden) / 32
    modules = {way: make(config, shape, mesh, weights) for way, config in WAYS.items()}
    results = [passes(module, x, scores, ids, counts, grad) for module in modules.values()]
    for ours, theirs in zip(*results, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert error < 3e-2, f"they differ by {error}"
    group = _group.of(mesh.get_group())
    before = group.sent_bytes()
    passes(modules["aristos"], x, scores, ids, counts, grad)
    sent = group.sent_bytes() - before
    # Tokens and results are sent in float32.
    theirs = 2 * 2 * (ids // local != rank).sum().item() * hidden * x.element_size()
    times = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, module in modules.items():
            dist.barrier()
            began = time.perf_counter()
            passes(module, x, scores, ids, counts, grad)
            times[way].append(slowest(time.perf_counter() - began) * 1e3)
    return times, sent, theirs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    set_spmd_backend("default")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in SHAPES:
        times, sent, theirs = compare(shape, mesh, args.repeats)
        if dist.get_rank() == 0:
            said = []
            for way, ms in times.items():
                first, median, third = statistics.quantiles(ms, n=4)
                said.append(f"{way} {median:.1f} ms ({first:.1f} to {third:.1f})")
            ratio = statistics.median(ours / own for ours, own in zip(times["aristos"], times["torchtitan"], strict=True))
            hidden, inner, experts, top_k, tokens = shape
            print(
                f"hidden {hidden} intermediate {inner} experts {experts} top {top_k} tokens {tokens}: {', '.join(said)}: {ratio:.2f}; "
                f"bytes {sent / 1e6:.2f} of {theirs / 1e6:.2f} MB: {sent / theirs:.2f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
