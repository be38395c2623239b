"""Runs test cases of this folder and prints a line for each case: ``run.py PROCESSES CASE... [-- PROCESSES CASE...]...``.

A case is ``docs``, ``docs-device``, ``torchtitan``, ``megatron``, ``experts`` (all of test_experts.py), ``experts:NAME``, likewise ``lengths``,
``metrics``, ``moe``, ``non_finite``, ``peft``, ``replay``, ``router``, ``training`` (on 2 or 4 processes) and ``device`` (for a wheel with the
emulator), or a case of test_transformers.py.

Processes are forked with torchrun's variables after importing torch and transformers, because the imports take longer than most cases.
"""

import os
import signal
import socket
import sys
import time
import traceback

import harness
import test_device
import test_docs
import test_experts
import test_lengths
import test_metrics
import test_moe
import test_non_finite
import test_replay
import test_router
import test_training
import test_transformers

_MODULES = dict(
    experts=test_experts,
    lengths=test_lengths,
    metrics=test_metrics,
    moe=test_moe,
    non_finite=test_non_finite,
    replay=test_replay,
    router=test_router,
    training=test_training,
)

# The time that the other processes have to end after one process has failed.
GRACE_S = 20


def megatron():
    # Imported here only, because it takes seconds.
    import test_megatron

    return test_megatron.layer_by_specification_equals_megatrons()


def cases_of(text, size):
    """Returns the cases, as (name, function) pairs, that a word of the command line stands for."""
    module, _, name = text.partition(":")
    if text == "docs":
        return [(f"docs::{case.__name__}", case) for case in test_docs.CASES]
    if text == "docs-device":
        return [("docs::the_lines_for_one_gpu", test_docs.the_lines_for_one_gpu)]
    if text == "torchtitan":
        # Imported here only, because it takes seconds.
        import test_torchtitan

        return [(f"torchtitan::{case.__name__}", case) for case in test_torchtitan.CASES]
    if text == "megatron":
        return [("megatron::layer_by_specification_equals_megatrons", megatron)]
    if module == "device":
        return test_device.cases(name)
    if module in _MODULES:
        return _MODULES[module].cases(name, size)
    if module == "peft":
        # Imported here only, because it takes seconds.
        import test_peft

        return test_peft.cases(name, size)
    return [test_transformers.case_named(text)]


def process(rank, size, port, cases):
    """Runs the cases in a forked process. Does not return."""
    failed = 1
    try:
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        failed = harness.run(cases)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)


def launch(size, cases):
    """Runs cases on `size` processes and returns whether all succeeded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            process(rank, size, port, cases)
        pids.append(pid)
    failed, until = False, None
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            pids.remove(pid)
            failed |= status != 0
        elif until is None or time.monotonic() < until:
            until = until or (time.monotonic() + GRACE_S if failed else None)
            time.sleep(0.05)
        else:
            for left in pids:
                os.kill(left, signal.SIGKILL)
            until = None
    return not failed


def main():
    launches = []
    for part in " ".join(sys.argv[1:]).split(" -- "):
        size, *words = part.split()
        launches.append((int(size), [case for word in words for case in cases_of(word, int(size))]))
    print(f"running {sum(len(cases) for _, cases in launches)} cases", flush=True)
    sys.exit(not all([launch(*one) for one in launches]))


if __name__ == "__main__":
    main()
