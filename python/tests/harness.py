"""Runs test cases on all processes. Rank 0 prints a line for each case."""

import traceback

import torch.distributed as dist

import aristos


def relative_error(got, want):
    """Returns the norm of the difference divided by the norm of `want`, or infinity if a value is not finite."""
    got, want = got.detach().float(), want.detach().float()
    error = ((got - want).norm() / (want.norm() + 1e-12)).item()
    return error if error == error else float("inf")


def full(tensor):
    """Returns the full tensor of a DTensor. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(cases):
    """Runs cases, which are pairs of a name and a function. A function returns a remark, or raises an error if the case fails. Returns the
    number of cases that failed on any process."""
    group = aristos.init()
    rank, size = group.rank, group.size
    failures = 0
    for name, case in cases:
        note, failed = "", False
        try:
            note = case() or ""
        except Exception as error:
            failed = True
            note = f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc()
        notes = [None] * size
        dist.all_gather_object(notes, (failed, note))
        wrong = [one for failed, one in notes if failed]
        failures += bool(wrong)
        if rank == 0:
            said = wrong[0] if wrong else note
            verdict = "FAILED" if wrong else "ok"
            print(f"test {name}::{size} ... {verdict}{f' ({said})' if said else ''}", flush=True)
    dist.destroy_process_group()
    return failures


def run_here(cases):
    """Runs cases, which are pairs of a name and a function, in this process without a group. Returns the exit code."""
    print(f"running {len(cases)} cases", flush=True)
    failures = 0
    for name, case in cases:
        try:
            note = case()
            verdict = f"ok ({note})" if note else "ok"
        except Exception as error:
            failures += 1
            traceback.print_exc()
            verdict = f"FAILED ({type(error).__name__}: {' '.join(str(error).split())})"
        print(f"test {name} ... {verdict}", flush=True)
    return int(failures > 0)


def refused(kind, words, call):
    """Checks that a call raises an error of this kind, whose message is one line and contains these words."""
    try:
        call()
    except kind as error:
        text = str(error)
        assert "\n" not in text.strip(), f"more than a line: {text!r}"
        for word in words:
            assert word in text, f"no {word!r} in {text!r}"
        return text
    raise AssertionError(f"expected {kind.__name__} with {words}")
