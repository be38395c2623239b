"""Sources of listings: fat binaries, cubins, or text files."""

import os
import subprocess
import tempfile
from pathlib import Path

from . import listing


class Failed(Exception):
    pass


def tools(cache):
    """The folder of cuobjdump and nvdisasm."""
    homes = [Path(home) for home in [os.environ.get("CUDA_HOME")] if home] + [cache / "cuda-toolchain/nvidia/cu13"]
    for home in homes:
        if (home / "bin/cuobjdump").exists():
            return home / "bin"
    raise Failed("cuobjdump not found: run tools/cuda-toolchain, or set CUDA_HOME")


def run(folder, command, *arguments, cwd=None):
    environment = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")
    done = subprocess.run([folder / command, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    if done.returncode:
        raise Failed(f"{command} {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


def kernels(path, cache):
    """The kernels of a file: a fat binary, a cubin, or the text of cuobjdump -res-usage and nvdisasm -c (*.sass)."""
    if path.suffix == ".sass":
        text = path.read_text()
        return known(text, text)
    folder = tools(cache)
    if path.read_bytes()[:4] == b"\x7fELF":
        return of_cubin(folder, path)
    with tempfile.TemporaryDirectory() as temporary:
        run(folder, "cuobjdump", "-xelf", "all", path.resolve(), cwd=temporary)
        # Only nvdisasm's listing names the targets of indirect branches.
        return [kernel for cubin in sorted(Path(temporary).iterdir()) for kernel in of_cubin(folder, cubin)]


def of_cubin(folder, path):
    return known(run(folder, "cuobjdump", "-res-usage", path), run(folder, "nvdisasm", "-c", path))


def known(resources, text):
    """The kernels of a listing; other functions have no resources."""
    found, known = listing.kernels(text), listing.resources(resources)
    for kernel in found:
        kernel.resources = known.get(kernel.name)
    return [kernel for kernel in found if kernel.resources]
