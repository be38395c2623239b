"""The rank of this process and the number of processes, from the environment variables of the launcher."""

import functools
import logging
import os
import re

# These launchers come before Slurm, because torchrun and mpirun may be started in a step of Slurm.
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_PMI_NAMES = ("PMI_RANK", "PMI_SIZE")
# Slurm gives step numbers from this one on to the batch script, the interactive shell and the external step. These have one process each.
_SLURM_NO_STEP = 0xFFFF_FFF0


def find():
    """Returns the rank, the number of processes and the name of the rank's variable, or None if no launcher started this process."""
    for names in _LAUNCHERS:
        if _are_set(names):
            return _read(*names)
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    in_step = _in_slurm_step() and _are_set(("SLURM_PROCID", tasks))
    # Slurm sets PMI's variables for its own tasks too. If the size differs from the step's, an mpiexec that runs in the step has set it.
    if _are_set(_PMI_NAMES) and not (in_step and os.environ["PMI_SIZE"] == os.environ[tasks]):
        return _read(*_PMI_NAMES)
    if in_step:
        return _read("SLURM_PROCID", tasks)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in os.environ and tasks != "1":
        _warn_alone(tasks)
    return None


@functools.cache
def _warn_alone(tasks):
    said = "aristos.init(): this process runs alone: the Slurm job has %s tasks, but this shell is none of them; start the program with srun"
    logging.getLogger("aristos").warning(said, tasks)


def _are_set(names):
    return all(name in os.environ for name in names)


def _in_slurm_step():
    """Whether srun started this process. The variables of tasks do not show it, because the shell of a batch script or of salloc has them
    too."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _SLURM_NO_STEP


def _read(rank_name, size_name):
    rank, size = (_number(name) for name in (rank_name, size_name))
    if rank >= size:
        raise ValueError(f"{rank_name} is {rank}, expected less than {size_name}, {size}")
    return rank, size, rank_name


def _number(name):
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} is {text!r}, expected a number")
    return int(text)


def master_address(rank_name):
    """The address of rank 0's host for `MASTER_ADDR`, if the launcher whose variable is `rank_name` did not set it: the first node of a Slurm
    step of several nodes, otherwise this host."""
    nodes = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in os.environ), None)
    if rank_name != "SLURM_PROCID" or nodes is None or _number(nodes) == 1:
        return "127.0.0.1"
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    name = next((name for name in names if name in os.environ), names[0])
    # nid[001-003,7],login1 begins with nid001, rack[1-2]node with rack1node.
    first = re.match(r"([^\[\],]*)(?:\[(\w+)[^\[\]]*\]([^\[\],]*))?(?:,|$)", os.environ.get(name, ""))
    if not first or not first[0]:
        raise ValueError(f"{name} is {os.environ.get(name, '')!r}, expected a list of nodes; set MASTER_ADDR to the first one's address")
    return "".join(part or "" for part in first.groups())


def master_port(_rank_name):
    """A port for `MASTER_PORT`, which depends on the Slurm job."""
    return str(29500 + (_number("SLURM_JOB_ID") % 1000 if "SLURM_JOB_ID" in os.environ else 0))
