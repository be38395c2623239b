"""Checks the Python package on one GPU: ``python gpu/plugin.py``, with a wheel of tools/cuda-wheel. Prints a line for each check, and ends with 1
if one failed. Without a GPU, ``ARISTOS_DEVICE=emulated python gpu/plugin.py`` runs the checks that do not need one, with a wheel that has the
emulator."""

import logging
import sys
import time
import traceback

import torch
from torch.nn import functional as F

import aristos
from aristos import _group

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HIDDEN, INNER, EXPERTS, TOP_K = (512, 256, 16, 4) if GPU else (64, 32, 8, 2)
TOKENS = 300 if GPU else 20
LIMIT = 2e-2


class Problem:
    def __init__(self, seed=0, dtype=torch.bfloat16):
        gen = torch.Generator().manual_seed(seed)
        draw = lambda *shape: (torch.randn(*shape, generator=gen) / 4).to(DEVICE, dtype).requires_grad_()
        self.x, self.up, self.down = draw(TOKENS, HIDDEN), draw(EXPERTS, 2 * INNER, HIDDEN), draw(EXPERTS, HIDDEN, INNER)
        self.w, self.ids = torch.rand(TOKENS, EXPERTS, generator=gen).to(DEVICE).topk(TOP_K)
        self.w.requires_grad_()

    def leaves(self):
        return self.x, self.w, self.up, self.down

    def run(self):
        return aristos.experts(self.x, self.ids, self.w, self.up, self.down)

    def wanted(self):
        x, w, up, down = (leaf.detach().double().requires_grad_() for leaf in self.leaves())
        output = 0
        for expert in range(EXPERTS):
            gate, wide = (x @ up[expert].T).chunk(2, -1)
            weight = (w * (self.ids == expert)).sum(1, keepdim=True)
            output = output + weight * ((F.silu(gate) * wide) @ down[expert].T)
        return output, torch.autograd.grad(output.sum(), (x, w, up, down))

    def check(self, output):
        want, gradients = self.wanted()
        pairs = zip((output, *(leaf.grad for leaf in self.leaves())), (want, *gradients))
        errors = [error(got, right) for got, right in pairs if got is not None]
        assert max(errors) <= LIMIT, errors
        return f"{max(errors):.1e}"


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def values_and_gradients():
    said = []
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem(dtype=dtype)
        output = problem.run()
        output.sum().backward()
        said.append(problem.check(output))
    return ", ".join(said)


def invalid_choice_is_reported_once():
    problem = Problem()
    problem.ids[3, 0] = EXPERTS
    problem.run()
    if GPU:
        torch.cuda.synchronize()
    try:
        Problem().run()
    except ValueError as refusal:
        assert "token 3" in str(refusal), refusal
    else:
        raise AssertionError("it was not reported")
    problem = Problem()
    return problem.check(problem.run())


def side_stream_waits_for_its_producer():
    problem, stream = Problem(1), torch.cuda.Stream()
    x = problem.x.detach().clone()
    problem.x.data.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        problem.x.data.copy_(x)
        output = problem.run()
        output.sum().backward()
    stream.synchronize()
    return problem.check(output)


def graph_is_replayed_with_other_contents():
    problem, other = Problem(2), Problem(3)
    problem.run().sum().backward()
    for leaf in problem.leaves():
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = problem.run()
        output.sum().backward()
    for _ in range(3):
        for mine, theirs in zip((*problem.leaves(), problem.ids), (*other.leaves(), other.ids)):
            mine.data.copy_(theirs)
        graph.replay()
        torch.cuda.synchronize()
        said = problem.check(output)
    _group.default().check()
    return said


def memory_returns():
    problem = Problem()
    problem.run().sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        problem.run().sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before, (torch.cuda.memory_allocated(), before)


def losses(device, steps=20):
    """The losses of a layer that learns a fixed function. On "cpu" the engine of the CPU computes the experts."""
    torch.manual_seed(4)
    layer = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, shared_intermediate=INNER, dtype=torch.bfloat16).to(device)
    x, target = (torch.randn(TOKENS, HIDDEN).to(device, torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0)
    seen = []
    for _ in range(steps):
        loss = (layer(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return torch.tensor(seen)


def training_follows_the_cpu_engine():
    want, got = losses("cpu"), losses("cuda")
    worst = ((got - want).abs() / want).max().item()
    assert want[-1] < 0.99 * want[0] and worst <= 1e-2, (worst, want.tolist(), got.tolist())
    return f"{worst:.1e}, loss {want[0]:.3f} to {got[-1]:.3f}"


def step_time():
    problem = Problem()
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        problem.run().sum().backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return f"{sorted(times)[15]:.3f} ms forward and backward, {TOKENS} tokens"


ANYWHERE = [values_and_gradients, invalid_choice_is_reported_once]
ON_GPU = [side_stream_waits_for_its_producer, graph_is_replayed_with_other_contents, memory_returns, training_follows_the_cpu_engine, step_time]


def main():
    # Shows the symmetric memory that a layer takes.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    aristos.init(wait_limit_s=20)
    failures = 0
    for check in ANYWHERE + (ON_GPU if GPU else []):
        try:
            said, verdict = check() or "", "ok"
        except Exception as problem:
            traceback.print_exc()
            said, verdict = f"{type(problem).__name__}: {problem}".splitlines()[0], "FAILED"
        failures += verdict == "FAILED"
        print(f"{check.__name__} ... {verdict}{f' ({said})' if said else ''}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
