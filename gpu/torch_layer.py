#!/usr/bin/env python3
"""Times MoE layers in PyTorch on one GPU, and cuBLAS as the limit of the card. `gpu/check.sh speed` compares with these times.

The layer chooses the top-k experts by softmax, normalises their scores, and has gated SiLU experts. Tokens are sorted by expert,
`grouped_mm` runs the GEMMs of the experts in one kernel per projection, and the weighted results are summed per token. The limit is the
rate of cuBLAS for the GEMM shape of an expert, on the number of rows of all experts together. The data are random, device events measure
the times, and the results are medians.

Prints CSV: what,shape,tokens,skew,pass,median_ms,p99_ms,min_ms,tflops,iterations
"""

import argparse
import csv
import sys

import torch
import torch.nn.functional as F

SHAPES = {  # experts, hidden, intermediate, top_k
    "mixtral": (8, 4096, 14336, 2),
    "qwen3-30b": (128, 2048, 768, 8),
    "llama4-scout": (16, 5120, 8192, 1),
    "deepseek-v3-of-8": (32, 7168, 2048, 8),  # one PE's experts of eight PEs, with the rows of all PEs
}

grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


class Layer(torch.nn.Module):
    def __init__(self, experts, hidden, intermediate, top_k, device, dtype):
        super().__init__()
        self.k, self.experts = top_k, experts
        new = lambda *shape: torch.nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * (1 / shape[-1]) ** 0.5)
        self.router = torch.nn.Parameter(torch.randn(experts, hidden, device=device) * hidden**-0.5)
        self.gate_up, self.down = new(experts, 2 * intermediate, hidden), new(experts, hidden, intermediate)

    def forward(self, x, chosen=None):
        scores = F.linear(x.float(), self.router).softmax(-1)
        if chosen is None:
            weights, chosen = scores.topk(self.k, dim=-1)
        else:
            weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.experts).cumsum(0).to(torch.int32)
        rows = x[order // self.k]
        gate, up = grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        out = grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        out = out * weights.flatten()[order, None].to(out.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return out[back].view(len(x), self.k, -1).sum(1)


def choose(tokens, experts, top_k, skew, device):
    """Returns the experts of each token. With `skew`, a quarter of the experts together have that probability."""
    p = torch.ones(experts, device=device) / experts
    if skew:
        hot = max(1, experts // 4)
        p[:hot], p[hot:] = skew / hot, (1 - skew) / (experts - hot)
    return torch.multinomial(p.expand(tokens, -1), top_k).sort(-1).values


def measure(run, iterations, warmup):
    for _ in range(warmup):
        run()
    begin = [torch.cuda.Event(enable_timing=True) for _ in range(iterations)]
    end = [torch.cuda.Event(enable_timing=True) for _ in range(iterations)]
    for b, e in zip(begin, end):
        b.record()
        run()
        e.record()
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in zip(begin, end))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="128,512,2048,4096,8192,16384")
    parser.add_argument("--skews", default="0,0.7", help="share of the tokens for a quarter of the experts; 0: even")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch_layer.py: no GPU here that PyTorch can use")
    device, dtype = torch.device("cuda"), torch.bfloat16
    out = csv.writer(sys.stdout)
    out.writerow("what,shape,tokens,skew,pass,median_ms,p99_ms,min_ms,tflops,iterations".split(","))

    def row(what, shape, tokens, skew, which, times, flop):
        median = times[len(times) // 2]
        p99 = times[min(len(times) - 1, round(0.99 * (len(times) - 1)))]
        values = [f"{v:.5f}" for v in (median, p99, times[0])]
        out.writerow([what, shape, tokens, skew, which, *values, f"{flop / median / 1e9:.1f}", len(times)])
        sys.stdout.flush()

    for shape in args.shapes.split(","):
        experts, hidden, intermediate, top_k = SHAPES[shape]
        torch.manual_seed(0)
        layer = Layer(experts, hidden, intermediate, top_k, device, dtype)
        for tokens in map(int, args.tokens.split(",")):
            x = torch.randn(tokens, hidden, device=device, dtype=dtype)
            grad = torch.randn_like(x)
            flop = 2.0 * tokens * top_k * 3 * hidden * intermediate
            rows = torch.randn(tokens * top_k, hidden, device=device, dtype=dtype)
            inner = torch.randn(tokens * top_k, intermediate, device=device, dtype=dtype)
            w_up = torch.randn(2 * intermediate, hidden, device=device, dtype=dtype)
            w_down = torch.randn(hidden, intermediate, device=device, dtype=dtype)

            def gemms():
                rows @ w_up.t()
                inner @ w_down.t()

            row("cublas", shape, tokens, 0, "forward", measure(gemms, args.iterations, args.warmup), flop)
            for skew in map(float, args.skews.split(",")):
                chosen = choose(tokens, experts, top_k, skew, device)

                def forward():
                    with torch.no_grad():
                        layer(x, chosen)

                xg = x.clone().requires_grad_()

                def both():
                    layer.zero_grad(set_to_none=True)
                    xg.grad = None
                    layer(xg, chosen).backward(grad)

                row("torch", shape, tokens, skew, "forward", measure(forward, args.iterations, args.warmup), flop)
                row("torch", shape, tokens, skew, "forward+backward", measure(both, args.iterations, args.warmup), 3 * flop)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
