"""Compares forward and backward of an experts module between Aristos and transformers' own all_to_all over gloo.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 python/bench/against_transformers.py            # times and bytes
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 python/bench/against_transformers.py --memory aristos | eager | grouped_mm

Times: medians over alternating passes, of the slowest process. transformers runs its experts as `eager` and as `grouped_mm`; the faster one counts.
Bytes: of Aristos' puts; of transformers' four exchanges of rows, counted from the routing. `--memory`: peak resident memory, summed over the
processes, of training a model of four such layers with one implementation (AdamW, 3 steps), one run per implementation.
"""

import argparse
import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from aristos import _aristos, _group

# hidden, intermediate, experts, top_k, tokens per process
SHAPES = [(256, 128, 16, 4, 1024), (512, 256, 16, 4, 1024), (1024, 512, 8, 2, 1024), (2048, 768, 16, 8, 256)]
WAYS = ["aristos", "eager", "grouped_mm"]


def make(way, shape, dtype, meshes, weights):
    """An implementation of an experts module, and its parameters."""
    hidden, inner, experts, top_k, _ = shape
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts // dist.get_world_size(), num_experts_per_tok=top_k
    )
    config._experts_implementation = "eager" if way == "aristos" else way
    module = Qwen3MoeExperts(config).to(dtype)
    for parameter, values in zip((module.gate_up_proj, module.down_proj), weights):
        parameter.data.copy_(values)
    name = "aristos" if way == "aristos" else "all_to_all"
    return EPImplementationInterface()[name](module, *meshes), list(module.parameters())


def drawn(shape, dtype, seed):
    """Random tokens, choices, routing weights and output gradient, and this process's weights."""
    hidden, inner, experts, top_k, tokens = shape
    gen = torch.Generator().manual_seed(seed + dist.get_rank())
    draw = lambda *size: torch.randn(*size, generator=gen).to(dtype)
    weights, ids = torch.rand(tokens, experts, generator=gen).topk(top_k)
    local = experts // dist.get_world_size()
    return draw(tokens, hidden), ids, weights.to(dtype), draw(tokens, hidden), (draw(local, 2 * inner, hidden) / 32, draw(local, hidden, inner) / 32)


def passes(way, parameters, x, ids, weights, grad):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    way(x, ids, weights).backward(grad)
    return x.grad


def slowest(seconds):
    value = torch.tensor([seconds])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def compare(shape, dtype, meshes, repeats):
    x, ids, routing, grad, weights = drawn(shape, dtype, 1)
    ways = {way: make(way, shape, dtype, meshes, weights) for way in WAYS}
    results = {way: passes(*made, x, ids, routing, grad) for way, made in ways.items()}
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for way in WAYS[1:]:
        error = ((results[way] - results["aristos"]).norm() / results["aristos"].norm()).item()
        assert error < limit, f"{way} and aristos differ by {error}"
    group = _group.of(meshes[0].get_group())
    before = group.sent_bytes()
    passes(*ways["aristos"], x, ids, routing, grad)
    sent = group.sent_bytes() - before
    local = shape[2] // dist.get_world_size()
    away = (ids // local != dist.get_rank()).sum().item()
    theirs = 2 * 2 * away * shape[0] * x.element_size()
    times = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            dist.barrier()
            began = time.perf_counter()
            passes(*ways[way], x, ids, routing, grad)
            times[way].append(slowest(time.perf_counter() - began))
    return {way: statistics.median(all_s) * 1e3 for way, all_s in times.items()}, sent, theirs


def memory(way, meshes, layers=4, steps=3):
    """Peak resident memory of this process, bytes."""
    shape = (1024, 512, 16, 4, 1024)
    x, ids, routing, grad, weights = drawn(shape, torch.float32, 1)
    made = [make(way, shape, torch.float32, meshes, weights) for _ in range(layers)]
    del weights
    optimizer = torch.optim.AdamW([p for _, parameters in made for p in parameters], lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        y = x
        for implementation, _ in made:
            y = y + implementation(y, ids, routing)
        y.backward(grad)
        optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=WAYS)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    meshes = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (size, 1), mesh_dim_names=("all", "tp"))["tp"]
    if args.memory:
        peak = torch.tensor([memory(args.memory, meshes)])
        dist.all_reduce(peak)
        if rank == 0:
            print(f"{args.memory}: peak resident memory {peak.item() / size / 1e6:.0f} MB a process")
        return dist.destroy_process_group()
    if rank == 0:
        print(f"kernels for {_aristos.instruction_set()}, {size} processes")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            ms, sent, theirs = compare(shape, dtype, meshes, args.repeats)
            if rank == 0:
                best = min(ms["eager"], ms["grouped_mm"])
                name = str(dtype).removeprefix("torch.")
                hidden, inner, experts, top_k, tokens = shape
                print(
                    f"{name} hidden {hidden} intermediate {inner} experts {experts} top {top_k} tokens {tokens}: aristos {ms['aristos']:.1f} ms, "
                    f"all_to_all eager {ms['eager']:.1f} ms, grouped_mm {ms['grouped_mm']:.1f} ms: {ms['aristos'] / best:.2f}; "
                    f"bytes {sent / 1e6:.2f} of {theirs / 1e6:.2f} MB: {sent / theirs:.2f}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
