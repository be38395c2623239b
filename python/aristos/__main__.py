"""``python -m aristos`` prints what this package uses on this machine."""

import os
import shutil

import torch

import aristos

from . import _aristos


def _gib(count):
    return f"{count / 2**30:.1f} GiB"


def main():
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shared = shutil.disk_usage("/dev/shm")
    print(f"aristos        {aristos.__version__}, torch {torch.__version__}")
    print(f"CPU kernels    {_aristos.instruction_set()} (ARISTOS_CPU limits the instruction set)")
    print(f"CPUs           {cpus} usable by this process, torch uses {torch.get_num_threads()} threads")
    print(f"devices        {', '.join(_aristos.DEVICES) or 'none in this wheel (docs/training.md builds one with CUDA)'}")
    print(f"processes      of one host, through shared memory: {_gib(shared.free)} of {_gib(shared.total)} free in /dev/shm")
    print(f"model families {len(aristos.families())}: {', '.join(sorted(aristos.families()))}")


if __name__ == "__main__":
    main()
