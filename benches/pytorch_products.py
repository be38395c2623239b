#!/usr/bin/env python3
"""GFLOP/s of PyTorch's matrix products on one thread, for `tools/bench-products`, which compares them with `benches/gemm.rs`.

Reads the products from that benchmark's CSV (standard input), and prints the same columns. bf16 products are oneDNN's; f32 ones are MKL's.
"""

import csv
import sys
import time

import torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
REPETITIONS = 11


def seconds(product):
    product()
    times = []
    for _ in range(REPETITIONS):
        began = time.thread_time()
        product()
        times.append(time.thread_time() - began)
    return sorted(times)[REPETITIONS // 2]


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    out = csv.writer(sys.stdout)
    out.writerow(["dtype", "product", "m", "n", "k", "gflops"])
    for row in csv.DictReader(sys.stdin):
        if row["product"] == "tn+=":
            continue
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        draw = lambda *shape: (torch.rand(*shape) - 0.5).to(DTYPES[row["dtype"]])
        # As the layer has them: nt multiplies by a transposed weight, tn transposes the left operand.
        a = draw(k, m).t() if row["product"] == "tn" else draw(m, k)
        b = draw(n, k).t() if row["product"] == "nt" else draw(k, n)
        result = torch.empty(m, n, dtype=a.dtype)
        gflops = 2e-9 * m * n * k / seconds(lambda: torch.mm(a, b, out=result))
        out.writerow([row["dtype"], row["product"], m, n, k, f"{gflops:.2f}"])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
