"""Tests of saves that are interrupted; tools/test-python runs this script. ``--kills N`` and ``--seed S`` change the random kills.

Jobs of two processes are forked after the imports. Each job saves the weights of one moment, which a seed determines. After each job the
folder must hold all weights of one moment, bit for bit.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import resource
import select
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback

import torch
from torch.distributed.fsdp import fully_shard

import aristos
from aristos import _checkpoint
from harness import refused, run_here

RANKS = 2
FORM = dict(hidden=96, intermediate=128, experts=4, top_k=2)
# The time after which a job counts as hanging. If one process is killed, the other ends at once, because its connection is closed.
LIMIT_S = 120
ALONE = aristos.Group.alone()
SHAPES = {name: tensor.shape for name, tensor in aristos.MoE(**FORM, group=ALONE).state_dict().items()}


def weights(moment):
    generator = torch.Generator().manual_seed(moment)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moment_in(folder, expected):
    """Returns the moment whose weights the folder holds, which must be one of the expected moments."""
    module = aristos.MoE(**FORM, group=ALONE)
    aristos.load(module, folder)
    state = module.state_dict()
    for moment in expected:
        want = weights(moment)
        same = [name for name in SHAPES if torch.equal(state[name], want[name])]
        if len(same) == len(SHAPES):
            return moment
        assert not same, f"of two moments: only {same} are of moment {moment}"
    raise AssertionError(f"not the weights of moments {expected}")


class Job:
    """Two processes that save the weights of a moment, either into the same folder or into a folder each. ``prepare(rank)`` runs in each
    process before the save, and ``wrap(module)`` before that."""

    def __init__(self, folder, moment, prepare=lambda rank: None, wrap=lambda module: None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Each process writes b"b" to a pipe before its save, and b"e" after it.
        self.events, end = os.pipe()
        self.errors = tempfile.TemporaryFile("w+")
        self.pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                self.process(rank, port, folder, moment, prepare, wrap, end)
            self.pids.append(pid)
        os.close(end)
        self.began = self.ended = 0
        self.running = set(self.pids)

    def process(self, rank, port, folder, moment, prepare, wrap, end):
        failed = 1
        try:
            os.dup2(self.errors.fileno(), 2)
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            module = aristos.MoE(**FORM, group=aristos.init())
            module.load_state_dict(weights(moment))
            wrap(module)
            prepare(rank)
            os.write(end, b"b")
            aristos.save(module, folder if isinstance(folder, str) else folder[rank])
            os.write(end, b"e")
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(failed)

    def wait_for(self, begun, limit_s=LIMIT_S):
        """Waits until the given number of processes have begun to save, or until all have ended."""
        until = time.monotonic() + limit_s
        while self.began < begun:
            assert select.select([self.events], [], [], max(0, until - time.monotonic()))[0], "a job hangs"
            read = os.read(self.events, 16)
            self.began += read.count(b"b")
            self.ended += read.count(b"e")
            if not read:
                return

    def kill(self, rank):
        if self.pids[rank] in self.running:
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self):
        """Waits for the processes. Returns what they wrote and their exit codes. A negative exit code is a signal's number."""
        with contextlib.suppress(AssertionError):
            self.wait_for(RANKS + 1)
        codes, until = [], time.monotonic() + LIMIT_S
        for pid in self.pids:
            while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            self.running.discard(pid)
            codes.append(os.waitstatus_to_exitcode(ended[1]))
        os.close(self.events)
        self.errors.seek(0)
        with self.errors:
            return codes, self.errors.read()


def save(folder, moment, **more):
    codes, said = Job(folder, moment, **more).end()
    assert codes == [0] * RANKS, said[-600:]


def files_in(folder):
    return sorted(os.listdir(folder))


def only_one_checkpoint(folder):
    index = json.loads((pathlib.Path(folder) / "model.safetensors.index.json").read_text())
    want = sorted({"model.safetensors.index.json", *index["weight_map"].values()})
    assert files_in(folder) == want, f"{files_in(folder)}, expected {want}"


def random_kills_leave_one_moment(options):
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        took = []
        for moment in range(1, 4):
            job = Job(folder, moment)
            job.wait_for(RANKS)
            began = time.monotonic()
            assert job.end()[0] == [0, 0]
            took.append(time.monotonic() - began)
        # The time includes the exit of the processes.
        span, held, before, after = statistics.median(took), 3, 0, 0
        for moment in range(4, 4 + options.kills):
            job = Job(folder, moment)
            job.wait_for(RANKS)
            time.sleep(rng.uniform(0, span))
            for rank in rng.choice([[0], [1], [0, 1]]):
                job.kill(rank)
            codes, _ = job.end()
            found = moment_in(folder, [held, moment])
            if codes != [0, 0]:
                before, after = before + (found == held), after + (found == moment)
            else:
                assert found == moment, "a save without an error is not in the folder"
            held = found
        save(folder, 3)
        assert moment_in(folder, [3]) == 3
        only_one_checkpoint(folder)
        assert before, "no kill during a save"
    return f"seed {options.seed}, {options.kills} kills: {before} before the new index, {after} after it"


def kills_at_each_step_leave_one_moment(options):
    """Kills a process before and after each of its system calls that change the folder."""

    def killed_at(victim, at):
        def prepare(rank):
            if rank != victim:
                return
            left = [at]

            def counted(call):
                def run(*args, **more):
                    for do in (lambda: None, lambda: call(*args, **more)):
                        if left[0] == 0:
                            os.kill(os.getpid(), signal.SIGKILL)
                        left[0] -= 1
                        result = do()
                    return result

                return run

            import safetensors.torch

            for module, name in ((os, "replace"), (os, "remove"), (os, "rename"), (os, "mkdir"), (os, "fsync"), (safetensors.torch, "save_file")):
                setattr(module, name, counted(getattr(module, name)))

        return prepare

    steps = []
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)
        held, moment = 1, 2
        for victim in range(RANKS):
            at, found = 0, set()
            while True:
                codes, said = Job(folder, moment, killed_at(victim, at)).end()
                if codes[victim] == 0:
                    break
                assert codes[victim] == -signal.SIGKILL, said[-600:]
                now = moment_in(folder, [held, moment])
                found.add(now == moment)
                held, moment, at = now, moment + 1, at + 1
            steps.append(at)
            assert found == ({True, False} if victim == 0 else {False}), found
            held, moment = moment, moment + 1
        only_one_checkpoint(folder)
    return f"{steps} steps"


def kill_while_a_shard_is_written_leaves_no_files(options):
    def killed_in_write(rank):
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)
        before = files_in(folder)
        codes, said = Job(folder, 2, killed_in_write).end()
        assert codes == [1, -signal.SIGXFSZ], (codes, said[-600:])
        assert moment_in(folder, [1, 2]) == 1 and files_in(folder) != before
        save(folder, 2)
        only_one_checkpoint(folder)


def second_save_into_a_folder_is_refused(options):
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)
        with _checkpoint._locked(folder):
            codes, said = Job(folder, 2).end()
            assert codes == [1, 1] and said.count(f"{folder}: another save into this folder is running") == 2, (codes, said[-600:])
        assert moment_in(folder, [1, 2]) == 1
        only_one_checkpoint(folder)
        # The folder is not locked any more if the job that locked it was killed.
        (pathlib.Path(folder) / _checkpoint._LOCK).touch()
        save(folder, 2)
        assert moment_in(folder, [1, 2]) == 2
        only_one_checkpoint(folder)


def second_save_of_a_model_with_fsdp_is_refused(options):
    """Rank 1 must not wait for rank 0 in the collectives that gather other parameters."""

    def wrap(module):
        fully_shard(module, mesh=module.group.mesh, ignored_params=aristos.expert_parameters(module))

    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1, wrap=wrap)
        with _checkpoint._locked(folder):
            codes, said = Job(folder, 2, wrap=wrap).end()
            assert codes == [1, 1] and said.count(f"{folder}: another save into this folder is running") == 2, (codes, said[-600:])
        assert moment_in(folder, [1, 2]) == 1


def failed_pass_on_a_device_is_raised_on_all(options):
    """Of another group than the save's. The error is known only once the device's tensors were copied."""

    class Device:
        error = None

        def check(self):
            if self.error:
                raise self.error

    def prepare(rank):
        if rank == 1:
            import safetensors.torch

            device, copy = Device(), safetensors.torch.save_file
            aristos.Group.alone()._layers["device"] = [(device, 1)]

            def fail(*args, **more):
                copy(*args, **more)
                device.error = aristos.AristosError("a pass failed")

            safetensors.torch.save_file = fail

    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)
        codes, said = Job(folder, 2, prepare).end()
        assert codes == [1, 1] and "not saved: rank 1: AristosError: a pass failed" in said, (codes, said[-600:])
        assert moment_in(folder, [1, 2]) == 1
        only_one_checkpoint(folder)


def failed_write_of_a_process_is_raised_on_all(options):
    def no_room(rank):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)
        codes, said = Job(folder, 2, no_room).end()
        assert codes == [1, 1], (codes, said[-600:])
        assert f"RuntimeError: {folder}: not saved: rank 1: OSError: {folder}/model-" in said, said[-600:]
        assert moment_in(folder, [1, 2]) == 1
        only_one_checkpoint(folder)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        codes, said = Job([folder, other], 2).end()
        assert codes == [1, 1] and "rank 1 saved into another folder" in said, (codes, said[-600:])
        assert files_in(folder) == files_in(other) == []


def loads_during_saves_read_one_moment(options):
    moments, loads = range(1, 9), 0
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)
        for moment in moments[1:]:
            job = Job(folder, moment)
            job.wait_for(RANKS)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                moment_in(folder, [moment - 1, moment])
                loads += 1
            codes, said = job.end()
            assert codes == [0, 0], said[-600:]
            assert moment_in(folder, [moment - 1, moment]) == moment
    return f"{loads} loads"


def shards_removed_while_they_are_opened_are_read_anew(options):
    # safetensors opens a shard, and then torch opens it again. A save ends in between.
    open_again, opened = torch.UntypedStorage.from_file, []
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1)

        def save_first(*arguments, **named):
            opened.append(arguments)
            if len(opened) in (1, 4):
                save(folder, len(opened) + 1)
            return open_again(*arguments, **named)

        torch.UntypedStorage.from_file = save_first
        try:
            assert moment_in(folder, [1, 2, 5]) == 2, opened
            assert moment_in(folder, [1, 2, 5]) == 5, opened
        finally:
            torch.UntypedStorage.from_file = open_again


def index_entries_outside_the_folder_are_refused(options):
    with tempfile.TemporaryDirectory() as base:
        base = pathlib.Path(base)
        module = aristos.MoE(**FORM, group=ALONE)
        aristos.save(module, base / "a", ALONE)
        aristos.save(module, base / "b", ALONE)
        index = base / "b" / "model.safetensors.index.json"
        files = json.loads((base / "a" / index.name).read_text())["weight_map"]
        for prefix in ("../a/", f"{base}/a/", "./", "x/../../a/"):
            index.write_text(json.dumps({"weight_map": {name: prefix + file for name, file in files.items()}}))
            refused(ValueError, [str(index), 'weight_map["', prefix, "a file in this folder"], lambda: aristos.load(module, base / "b"))
        for wrong in (None, 3, [], {}, True, "", ".", "..", "a\0b", "a\n/b"):
            index.write_text(json.dumps({"weight_map": files | {"gate.weight": wrong}}))
            words = [str(index), 'weight_map["gate.weight"] is ', json.dumps(wrong)]
            refused(ValueError, words, lambda: aristos.load(module, base / "b"))
        for wrong in ("[]", "null", "[1]", "3", '""'):
            index.write_text(f'{{"weight_map": {wrong}}}')
            refused(ValueError, [str(index), "weight_map is " + wrong], lambda: aristos.load(module, base / "b"))
        for text in ("", "{", "[]", "null", "[1]", "{}", "[" * 100_000, "\xff"):
            index.write_text(text, encoding="latin-1")
            refused(ValueError, [str(index), "expected an object with a weight_map"], lambda: aristos.load(module, base / "b"))
        # Entries that can be opened but are no checkpoint: a folder, a pipe and a text.
        (base / "b" / "folder").mkdir()
        os.mkfifo(base / "b" / "pipe")
        (base / "b" / "text").write_text("text")
        for name in ("folder", "pipe", "text"):
            index.write_text(json.dumps({"weight_map": dict.fromkeys(files, name)}))
            refused(ValueError, [str(base / "b" / name)], lambda: aristos.load(module, base / "b"))
        index.write_text(json.dumps({"weight_map": dict.fromkeys(files, "gone")}))
        refused(FileNotFoundError, [str(base / "b" / "gone")], lambda: aristos.load(module, base / "b"))


CASES = [
    random_kills_leave_one_moment,
    kills_at_each_step_leave_one_moment,
    kill_while_a_shard_is_written_leaves_no_files,
    second_save_into_a_folder_is_refused,
    second_save_of_a_model_with_fsdp_is_refused,
    failed_pass_on_a_device_is_raised_on_all,
    failed_write_of_a_process_is_raised_on_all,
    loads_during_saves_read_one_moment,
    shards_removed_while_they_are_opened_are_read_anew,
    index_entries_outside_the_folder_are_refused,
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("cases", nargs="*", help="names of cases, default: all")
    options = parser.parse_args()
    options.seed = random.randrange(2**32) if options.seed is None else options.seed
    cases = [case for case in CASES if not options.cases or case.__name__ in options.cases]
    print(f"seed {options.seed}", flush=True)
    sys.exit(run_here([(f"checkpoint::{case.__name__}", functools.partial(case, options)) for case in cases]))
