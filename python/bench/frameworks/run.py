#!/usr/bin/env python3
"""usage: run.py [--write] [--verbose] [NAME...]: trains with aristos inside other libraries, by the scripts of this folder, on 2 processes.

Prints a line of a table for each script: "works" if aristos computed the experts and the loss falls on all processes, otherwise the error.
--write puts the table into docs/training.md. --verbose prints what failed processes wrote.

Run it from the repository's root in an environment with aristos and the libraries (requirements.txt). Missing ones are named in the table.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time

PROCESSES, LIMIT_S = 2, 180
FOLDER, PAGE = pathlib.Path(__file__).parent, pathlib.Path("docs/training.md")
MARKERS = "<!-- python/bench/frameworks/run.py --write -->\n", "<!-- end -->\n"
# The library of each script.
SCRIPTS = dict(
    ddp="torch",
    fsdp2="torch",
    accelerate_loop="accelerate",
    trainer="transformers",
    trl_sft="trl",
    peft_lora="peft",
    lightning_ddp="pytorch-lightning",
    torchtitan_loop="torchtitan",
    megatron_layer="megatron-core",
    deepspeed_zero1="deepspeed",
    deepspeed_zero2="deepspeed",
)


def train(name):
    """Runs a script in this process. Its variable `losses` has the loss of each step."""
    losses = runpy.run_path(str(FOLDER / f"{name}.py"))["losses"]
    from aristos import _group

    if not any(group._layers for group in _group._groups):
        raise AssertionError("aristos computed no experts")
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss does not fall: {losses[0]:.3f} to {losses[-1]:.3f}")


def outcome(name):
    """Runs a script on several processes and returns "works" or the error of the first process that failed, on one line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = dict(WORLD_SIZE=PROCESSES, LOCAL_WORLD_SIZE=PROCESSES, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS=1)
    # DeepSpeed looks for ninja in PATH.
    shared |= dict(DS_ACCELERATOR="cpu", PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    with contextlib.ExitStack() as opened:
        started = []
        for rank in range(PROCESSES):
            log = opened.enter_context(tempfile.TemporaryFile("w+"))
            environment = os.environ | {variable: str(value) for variable, value in (shared | dict(RANK=rank, LOCAL_RANK=rank)).items()}
            command = [sys.executable, str(FOLDER / "run.py"), "--train", name]
            started.append((subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log), log))
        end, said = time.monotonic() + LIMIT_S, "works"
        for process, log in started:
            try:
                process.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                said = f"no result after {LIMIT_S} s"
            log.seek(0)
            text = log.read()
            if process.returncode and "--verbose" in sys.argv:
                print(text, file=sys.stderr)
            if process.returncode and said == "works":
                errors = re.findall(r"^(?:\[rank\d\]: )?(?:\w+\.)*(\w+(?:Error|Exception)\b.*)", text, re.MULTILINE)
                said = errors[-1] if errors else f"exit status {process.returncode}"
    return said


def row(name):
    title = re.match(r'"""(.*?)"""', (FOLDER / f"{name}.py").read_text()).group(1)
    package = SCRIPTS[name]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"| {title} | | {package} is not installed |"
    said = outcome(name)
    if said != "works":
        said = "`" + said.replace("|", " ").replace("`", "") + "`"
    return f"| {title} | {package} {version} | {said} |"


def main():
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2])
        return
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    table = [f"| training loop | library | {PROCESSES} processes |", "|---|---|---|"]
    print("\n".join(table), flush=True)
    for name in names or SCRIPTS:
        table.append(row(name))
        print(table[-1], flush=True)
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(MARKERS[0])
        _, _, after = rest.partition(MARKERS[1])
        PAGE.write_text(before + MARKERS[0] + "\n".join(table) + "\n" + MARKERS[1] + after)


if __name__ == "__main__":
    main()
