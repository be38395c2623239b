#!/usr/bin/env python3
"""Times an MoE layer in PyTorch, for `tools/bench-vs-pytorch`, which compares it with `aristos bench moe`.

Experts are plain MLPs (GELU), assigned to the processes in equal blocks. Tokens are sorted by expert, sent to the
experts' processes with all_to_all_single (gloo), and computed with one GEMM per expert and projection; index_add sums
the weighted results. A single process sends nothing. The router is softmax top-k, renormalised, in f32.

Prints one JSON object with the time of each iteration on the slowest process, seconds.
"""

import argparse
import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows. Backward exchanges the roles of sending and receiving."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.splits = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.splits
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


def weight(seed, out, inp):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(out, inp, generator=generator) * 2 - 1) * (3 / inp) ** 0.5


class Moe(torch.nn.Module):
    def __init__(self, args, rank, world):
        super().__init__()
        self.k, self.experts, self.world = args.top_k, args.experts, world
        self.local = args.experts // world
        mine = range(rank * self.local, (rank + 1) * self.local)
        dtype = getattr(torch, args.dtype)
        parameter = lambda seed, out, inp: torch.nn.Parameter(weight(seed, out, inp).to(dtype))
        self.router = torch.nn.Parameter(weight(0, args.experts, args.hidden))
        self.up = torch.nn.ParameterList(parameter(1 + 2 * e, args.intermediate, args.hidden) for e in mine)
        self.down = torch.nn.ParameterList(parameter(2 + 2 * e, args.hidden, args.intermediate) for e in mine)

    def route(self, x):
        scores = F.linear(x.float(), self.router).softmax(-1)
        weights, chosen = scores.topk(self.k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def mlp(self, x, e):
        return F.linear(F.gelu(F.linear(x, self.up[e])), self.down[e])

    def forward(self, x):
        weights, chosen = self.route(x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // self.k
        counts = torch.bincount(flat, minlength=self.experts)
        rows = x[token]
        if self.world == 1:
            parts = rows.split(counts.tolist())
            results = torch.cat([self.mlp(part, e) for e, part in enumerate(parts)])
            self.rows = len(rows)
        else:
            theirs = torch.empty_like(counts)  # [process, my expert]
            dist.all_to_all_single(theirs, counts)
            by_process = theirs.view(self.world, self.local)
            send, receive = counts.view(self.world, -1).sum(1).tolist(), by_process.sum(1).tolist()
            self.rows = sum(receive)
            parts = Exchange.apply(rows, send, receive).split(theirs.tolist())
            results = [None] * len(parts)
            for e in range(self.local):
                pieces = parts[e :: self.local]
                done = self.mlp(torch.cat(pieces), e).split([len(piece) for piece in pieces])
                results[e :: self.local] = done
            results = Exchange.apply(torch.cat(results), receive, send)
        scaled = results * weights.flatten()[order].unsqueeze(1).to(results.dtype)
        return torch.zeros_like(x).index_add(0, token, scaled)


def check(moe, args, x, out):
    """Compares with a dense computation of all experts for all tokens."""
    with torch.no_grad():
        weights, chosen = moe.route(x)
        scores = torch.zeros(len(x), args.experts).scatter(1, chosen, weights)
        dense = torch.zeros(len(x), args.hidden)
        for e in range(args.experts):
            up, down = weight(1 + 2 * e, args.intermediate, args.hidden), weight(2 + 2 * e, args.hidden, args.intermediate)
            dense += scores[:, e : e + 1] * F.linear(F.gelu(F.linear(x.float(), up)), down)
        error = ((out.float() - dense).norm() / dense.norm()).item()
    limit = 1e-5 if args.dtype == "float32" else 2e-2
    assert error < limit, f"the layer is {error:.2e} off the dense computation, more than {limit}"


def run(rank, world, args, store):
    torch.set_num_threads(args.threads)
    cpus = sorted(os.sched_getaffinity(0))
    if args.threads == 1 and world <= len(cpus):
        os.sched_setaffinity(0, {cpus[rank]})  # like the PEs of `aristos bench moe`
    torch.manual_seed(1000 + rank)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    assert torch.get_num_threads() == args.threads, f"{torch.get_num_threads()} threads, not {args.threads}"
    moe = Moe(args, rank, world)
    dtype = getattr(torch, args.dtype)
    tokens = args.tokens // world
    x = torch.randn(tokens, args.hidden).to(dtype)
    grad = torch.randn(tokens, args.hidden).to(dtype)

    def forward():
        with torch.no_grad():
            return moe(x)

    def both():
        moe.zero_grad(set_to_none=True)
        inputs = x.detach().requires_grad_()
        moe(inputs).backward(grad)
        if world > 1:
            dist.all_reduce(moe.router.grad)

    check(moe, args, x, forward())
    samples = {"forward": [], "forward+backward": []}
    for iteration in range(args.warmup + args.iterations):
        for name, work in (("forward", forward), ("forward+backward", both)):
            if world > 1:
                dist.barrier()
            start = time.perf_counter()
            work()
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            if world > 1:
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if iteration >= args.warmup:
                samples[name].append(seconds.item())
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    if world > 1:
        dist.all_gather(rows, torch.tensor([moe.rows]))
    else:
        rows = [torch.tensor([moe.rows])]
    if rank == 0:
        result = {
            "torch": torch.__version__,
            "processes": world,
            "threads": args.threads,
            "dtype": args.dtype,
            "rows_per_process": [row.item() for row in rows],
            "seconds": samples,
        }
        print(json.dumps(result), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per process")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=2048, help="over all processes")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    if args.tokens % args.processes or args.experts % args.processes:
        sys.exit("--tokens and --experts must divide by --processes")
    # Must be set before torch's OpenMP starts in the children, which fork before it is used.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    if args.processes == 1:
        return run(0, 1, args, None)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run, (args.processes, args, store), nprocs=args.processes)


if __name__ == "__main__":
    main()
