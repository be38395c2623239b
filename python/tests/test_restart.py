"""Tests of training jobs that lose a process; tools/test-python runs this script. ``--kills N`` and ``--seed S`` change the random kills.

A job trains experts and saves a checkpoint at some steps. A process is killed at a random moment. The other processes must end at once with a
line that names the last complete checkpoint, and a job that starts from it must end with the weights of a job that was not killed, bit for bit.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback

import torch
from harness import run_here

import aristos
from aristos import _checkpoint

RANKS, STEPS, SAVE_EVERY = 3, 12, 3
HIDDEN, INNER, EXPERTS, TOP_K = 32, 48, 6, 2
# The processes wait far longer for each other than for a job's end here, so a process that noticed a loss by its wait limit alone would fail.
WAIT_S, LIMIT_S = 3000, 150


def moe(group):
    torch.manual_seed(1)
    return aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group)


def saved(folder):
    """The steps of complete checkpoints."""
    return sorted(int(path.parent.name) for path in pathlib.Path(folder).glob("*/model.safetensors.index.json"))


def weights(folder, step):
    module = moe(aristos.Group.alone())
    aristos.load(module, f"{folder}/{step}")
    return module.state_dict()


def train(folder, began):
    group = aristos.init(wait_limit_s=WAIT_S)
    module, first = moe(group), max(saved(folder), default=0)
    if first:
        aristos.load(module, f"{folder}/{first}")
    experts = [module.gate_up_proj, module.down_proj]
    optimizer = torch.optim.SGD(experts, lr=0.5)
    for step in range(first + 1, STEPS + 1):
        os.write(began, b"s")
        torch.manual_seed(100 * step + group.rank)
        x = torch.randn(16, HIDDEN)
        (module(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            aristos.save(module, f"{folder}/{step}")


class Job:
    """A job of RANKS processes. Process `killed` is killed `delay_s` after `steps` steps of all processes have begun, or if `syncs` is above 0,
    when a save of it syncs a file for that time. Afterwards `ended` has the exit code and the last line of each process."""

    def __init__(self, folder, killed=None, steps=0, delay_s=0.0, syncs=0):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        events, began = os.pipe()
        pids, outputs = [], [tempfile.TemporaryFile("w+") for _ in range(RANKS)]
        for rank in range(RANKS):
            pids.append(os.fork())
            if pids[-1] == 0:
                self.process(rank, port, folder, began, outputs[rank], syncs if rank == killed else 0)
        os.close(began)
        until = time.monotonic() + LIMIT_S
        while select.select([events], [], [], max(0, until - time.monotonic()))[0] and (read := os.read(events, 1)):
            steps -= 1
            if killed is not None and steps == 0:
                time.sleep(delay_s)
                os.kill(pids[killed], signal.SIGKILL)
        os.close(events)
        self.ended = []
        for pid, output in zip(pids, outputs):
            while not (status := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            output.seek(0)
            with output:
                lines = output.read().strip().splitlines()
            self.ended.append((os.waitstatus_to_exitcode(status[1]), lines[-1] if lines else ""))

    @staticmethod
    def process(rank, port, folder, began, output, syncs):
        code = 1
        sync = _checkpoint._sync

        def sync_or_die(path):
            nonlocal syncs
            syncs -= 1
            if syncs == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)

        _checkpoint._sync = sync_or_die
        try:
            os.dup2(output.fileno(), 2)
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            train(folder, began)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)


def killed_jobs_restart_from_the_named_checkpoint(options):
    generator = random.Random(options.seed)
    named = 0
    with tempfile.TemporaryDirectory() as whole:
        assert [code for code, _ in Job(whole).ended] == [0] * RANKS
        expected = {step: weights(whole, step) for step in saved(whole)}
        for number in range(options.kills):
            with tempfile.TemporaryDirectory() as folder:
                rank = generator.randrange(RANKS)
                if number % 2:
                    when = dict(syncs=generator.randint(1, STEPS // SAVE_EVERY))
                else:
                    when = dict(steps=generator.randrange(2, RANKS * STEPS), delay_s=generator.uniform(0, 0.02))
                job = Job(folder, rank, **when)
                if job.ended[rank][0] == 0:
                    continue  # The process had ended before it was killed.
                context = f"kill {number} of rank {rank} at {when}: {job.ended}"
                assert job.ended[rank][0] == -signal.SIGKILL, context
                steps = saved(folder)
                for other, (code, line) in enumerate(job.ended):
                    if other == rank or code == 0:
                        continue
                    assert code == 1 and line.startswith("_aristos.AristosError: "), context
                    hint = "; start the job again from its last checkpoint, "
                    if hint in line:
                        named += 1
                        step = int(line.rsplit("/", 1)[1])
                        # A process may end before the last save has told it that the checkpoint is complete.
                        assert line.split(hint)[1] == f"{folder}/{step}" and step in steps[-2:], (context, steps)
                    else:
                        assert len(steps) < 2, (context, steps)
                for step in steps:
                    got = weights(folder, step)
                    assert all(torch.equal(got[name], tensor) for name, tensor in expected[step].items()), f"{context}: step {step}"
                assert [code for code, _ in Job(folder).ended] == [0] * RANKS, context
                got = weights(folder, STEPS)
                assert all(torch.equal(got[name], tensor) for name, tensor in expected[STEPS].items()), f"{context}: after the restart"
    assert named or options.kills < 5, "no process named a checkpoint"
    return f"seed {options.seed}, {options.kills} kills, {named} lines that name a checkpoint"


CASES = [killed_jobs_restart_from_the_named_checkpoint]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("ARISTOS_TEST_SEED", random.randrange(1 << 32))))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    sys.exit(run_here([(f"restart::{case.__name__}", functools.partial(case, options)) for case in CASES]))


if __name__ == "__main__":
    main()
