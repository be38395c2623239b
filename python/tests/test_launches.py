"""Tests that start and end processes; tools/test-python runs this script in the repository's root. `--deep` also trains 300 steps."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import typing
import unittest.mock

from harness import run_here

import aristos
from aristos import _launchers

ROOT = pathlib.Path(__file__).parents[2]
# The time after which a job counts as hanging. A job that works takes 10 s, and much longer on a busy machine.
LIMIT_S = 600
STUCK = """
import os, sys, time, torch, aristos
group = aristos.init(wait_limit_s=300)
up, down = torch.ones(2, 8, 4), torch.ones(2, 4, 4)
call = lambda: aristos.experts(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), up, down)
call()
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
try:
    if group.rank == 0:
        call()
    time.sleep(300)
except KeyboardInterrupt:
    open(os.path.join(sys.argv[1], f"{os.getpid()}.interrupted"), "w").close()
    raise
"""

# After a common pass, one process creates a layer of another shape: the other waits in a pass, and it waits for the other to
# create the layer.
PARTED = """
import time, torch, aristos
group = aristos.init(wait_limit_s=3)
def call(inner):
    up, down = torch.ones(2, 2 * inner, 4), torch.ones(2, 4, inner)
    aristos.experts(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), up, down)
call(4)
try:
    call(4 + group.rank)
except aristos.AristosError as error:
    print(f"rank {group.rank}: {error}", flush=True)
# Stay alive: the error must not be caused by a process that ends.
time.sleep(6)
"""


# All ranks except the last exit while a thread of gloo, which must release the tensor, waits for the interpreter. The interpreter is
# released only after the exit has begun.
ENDING = """
import sys, time, torch, torch.distributed as dist, aristos
group = aristos.init()
kept = dist.group.WORLD
dist.barrier()
class Late:
    sleep = time.sleep
    def __del__(self):
        self.sleep(0.2)
if group.rank < group.size - 1:
    late = Late()
    sys.setswitchinterval(1000)
    dist.all_reduce(torch.ones(4), async_op=True)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
else:
    time.sleep(0.2)
    dist.all_reduce(torch.ones(4))
    # Outlive the other processes, so that their exit does not depend on this one.
    time.sleep(1.5)
"""


# The variables of a Slurm job of four tasks, in three shells that are no task, because only srun starts the tasks: the shell of the batch
# script, the shell of salloc, which is an interactive step, and a shell without a step.
SHELLS = {
    "batch script": "SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_JOB_NUM_NODES=1",
    "batch step": "SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=4294967291",
    "interactive step": "SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1",
    "salloc": "SLURM_JOB_ID=5 SLURM_NTASKS=4",
}
# Environment variables, and the rank and the number of processes that they must give.
TASKS = [
    ("SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=4", (1, 4)),
    ("SLURM_JOB_ID=5 SLURM_STEP_ID=3 SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=4", (1, 4)),
    ("SLURM_JOB_ID=5 SLURM_STEP_ID=3 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 PMI_RANK=1 PMI_SIZE=4", (1, 4)),
    ("SLURM_JOB_ID=5 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 PMI_RANK=2 PMI_SIZE=3", (2, 3)),
    ("SLURM_JOB_ID=5 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3", (2, 3)),
    ("SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_PROCID=0 PMI_RANK=2 PMI_SIZE=3", (2, 3)),
    ("SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_PROCID=0 RANK=1 WORLD_SIZE=2", (1, 2)),
    ("SLURM_JOB_ID=5 SLURM_NTASKS=1 SLURM_PROCID=0", None),
    ("", None),
]


# Slurm's variables, and the node of rank 0.
NODES = [
    ("SLURM_JOB_ID=5 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=nid[001-003,7],login1", "nid001"),
    ("SLURM_JOB_ID=5 SLURM_NNODES=2 SLURM_NODELIST=login1,nid[001-003]", "login1"),
    ("SLURM_JOB_ID=5 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=rack[1-2]node,x", "rack1node"),
    ("SLURM_JOB_ID=5 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=a-1,a-2 SLURM_JOB_NODELIST=b", "a-1"),
    ("SLURM_JOB_ID=5 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=nid001 SLURM_NNODES=4", "127.0.0.1"),
    ("SLURM_JOB_ID=5 SLURM_STEP_NODELIST=nid001", "127.0.0.1"),
]


def torchrun(pes, *command, **more):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pes), *map(str, command)]
    return subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


def alive(pid):
    """Whether a process runs. A zombie does not run."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ctrl_c_ends_all_ranks():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "stuck.py"
        script.write_text(STUCK)
        pids = pathlib.Path(folder) / "pids"
        pids.mkdir()
        job = torchrun(2, script, pids, start_new_session=True)
        deadline = time.monotonic() + LIMIT_S
        while len(list(pids.iterdir())) < 2:
            assert time.monotonic() < deadline and job.poll() is None, job.communicate()[0][-400:]
            time.sleep(0.1)
        time.sleep(0.5)
        ranks = [int(file.name) for file in pids.iterdir()]
        # The signal is sent to all processes, as a terminal does.
        began = time.monotonic()
        os.killpg(job.pid, signal.SIGINT)
        try:
            job.communicate(timeout=LIMIT_S)
        finally:
            for pid in ranks:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
                    raise AssertionError(f"process {pid} runs after Ctrl-C")
        # The job is not started by torchrun, which kills the remaining processes after 30 s.
        for pid in ranks:
            assert (pids / f"{pid}.interrupted").exists(), f"process {pid} did not see Ctrl-C"
        return f"{time.monotonic() - began:.1f} s"


def different_later_shapes_are_an_error_on_each_rank():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "parted.py"
        script.write_text(PARTED)
        job = torchrun(2, script)
        try:
            said = job.communicate(timeout=LIMIT_S)[0]
        finally:
            job.terminate()
        assert "rank 0: PE 0 waited 3.0 s" in said and "for PE 1" in said, said[-400:]
        assert "rank 1: to make a layer: rank 0 did not come in 3" in said, said[-400:]


def finished_job_exits_cleanly():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "ending.py"
        script.write_text(ENDING)
        job = torchrun(4, script)
        said = job.communicate(timeout=LIMIT_S)[0]
        assert job.returncode == 0, reason(said)


def variables(text):
    return dict(one.split("=", 1) for one in text.split())


def shells_of_slurm_jobs_run_alone():
    unset = ("SLURM_", "PMI", "OMPI_", "RANK", "WORLD_SIZE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    code = "import aristos; group = aristos.init(); aristos.init(); print(group.rank, group.size)"
    for shell, text in SHELLS.items():
        job = subprocess.run([sys.executable, "-c", code], env=clean | variables(text), capture_output=True, text=True, timeout=LIMIT_S)
        assert job.stdout == "0 1\n", f"{shell}: {job.stdout}{job.stderr[-400:]}"
        assert job.stderr.count("\n") == 1 and "the Slurm job has 4 tasks" in job.stderr and "srun" in job.stderr, f"{shell}: {job.stderr}"


def ranks_are_read_from_the_innermost_launcher():
    for text, expected in TASKS:
        with unittest.mock.patch.dict(os.environ, variables(text), clear=True):
            found = _launchers.find()
        assert (found and found[:2]) == expected, f"{text}: {found}"
    for text in ("RANK=x WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2", "RANK=-1 WORLD_SIZE=2", "SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_NTASKS=two"):
        with unittest.mock.patch.dict(os.environ, variables(text), clear=True):
            try:
                raise AssertionError(f"{text}: {_launchers.find()}, expected an error")
            except ValueError as error:
                assert " is " in str(error) and "expected" in str(error), error


def master_is_the_first_node_of_a_step():
    for nodes, expected in NODES:
        with unittest.mock.patch.dict(os.environ, variables(nodes), clear=True):
            chosen = _launchers.master_address("SLURM_PROCID"), _launchers.master_address("RANK"), _launchers.master_port("SLURM_PROCID")
        assert chosen == (expected, "127.0.0.1", "29505"), f"{nodes}: {chosen}"
    refused = {
        "SLURM_NNODES=2 SLURM_STEP_NODELIST=[": "SLURM_STEP_NODELIST is '[', expected a list of nodes; set MASTER_ADDR",
        "SLURM_NNODES=2": "SLURM_STEP_NODELIST is '', expected a list of nodes; set MASTER_ADDR",
        "SLURM_NNODES=two": "SLURM_NNODES is 'two', expected a number",
        "SLURM_JOB_ID=5.x": "SLURM_JOB_ID is '5.x', expected a number",
    }
    for text, expected in refused.items():
        job = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
        with unittest.mock.patch.dict(os.environ, job | variables(text), clear=True):
            try:
                raise AssertionError(f"{text}: {aristos.init()}, expected an error")
            except ValueError as error:
                assert str(error).startswith(expected), f"{text}: {error}"


def reason(said):
    """Returns the end of a job's output, without torchrun's report about its processes."""
    lines = said.split("failed (exitcode")[0].splitlines()
    return "\n".join(line for line in lines if "torch/distributed/elastic" not in line)[-1200:]


def train(pes, out, *more, batch=4, length=64):
    job = torchrun(pes, "examples/train_text.py", "--batch", batch, "--length", length, "--out", out, *more)
    said = job.communicate(timeout=LIMIT_S)[0]
    assert job.returncode == 0, reason(said)


def training_resumes_with_another_number_of_processes():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        train(2, out, "--steps", 12, "--save-every", 6)
        train(4, out, "--steps", 12, "--resume", out / "aristos-2-step6", "--name", "resumed")
        train(1, out, "--steps", 12, "--experts", "eager")
        whole, resumed, eager = (json.loads((out / f"{name}.json").read_text())["losses"] for name in ("aristos-2", "resumed", "eager-1"))
        assert len(whole) == len(eager) == 12 and len(resumed) == 6
        again = max(abs(a - b) / b for a, b in zip(resumed, whole[6:]))
        unpatched = max(abs(a - b) / b for a, b in zip(whole, eager))
        assert again <= 1e-5 and unpatched <= 1e-3, (again, unpatched)
        routing = json.loads((out / "aristos-2.routing.json").read_text())
        assert (routing["version"], routing["experts"], routing["top_k"], routing["nodes"]) == (1, 8, 2, 2)
        assert all(len(r["choices"]) == 2 * sum(r["tokens_per_node"]) == 2 * 4 * 64 for r in routing["records"])
        assert len(routing["records"]) == 4 * 4
        return f"resumed {again:.1e}, unpatched {unpatched:.1e}"


def losses_agree_for_300_steps():
    # A trained model is fine-tuned on a different text. Training does not begin with random weights, because from them even the expert
    # implementations of transformers diverge from each other.
    how = ("--from-model", "examples/tiny-moe", "--text", typing.__file__, "--learning-rate", 1e-4, "--epsilon", 1e-6, "--warm-up", 20)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        train(1, out, "--experts", "eager", *how, batch=8, length=128)
        for pes in (1, 2, 4):
            train(pes, out, *how, batch=8, length=128)
        losses = {name: json.loads((out / f"{name}.json").read_text())["losses"] for name in ("eager-1", "aristos-1", "aristos-2", "aristos-4")}
    eager = losses.pop("eager-1")
    assert all(len(one) == len(eager) == 300 for one in losses.values())
    assert sum(eager[-20:]) < 0.7 * sum(eager[:20]), f"the loss goes from {eager[0]} to {eager[-1]}"
    worst = {name: max(abs(a - b) / b for a, b in zip(one, eager)) for name, one in losses.items()}
    assert max(worst.values()) <= 1e-3, worst
    return ", ".join(f"{name} {error:.1e}" for name, error in worst.items())


CASES = [
    ctrl_c_ends_all_ranks,
    different_later_shapes_are_an_error_on_each_rank,
    finished_job_exits_cleanly,
    shells_of_slurm_jobs_run_alone,
    ranks_are_read_from_the_innermost_launcher,
    master_is_the_first_node_of_a_step,
    training_resumes_with_another_number_of_processes,
]

if __name__ == "__main__":
    if sys.argv[1:] == ["--deep"]:
        CASES.append(losses_agree_for_300_steps)
    sys.exit(run_here([(f"launches::{case.__name__}", case) for case in CASES]))
