"""Tests of CUDA devices without a GPU, over the stand-in driver and NCCL of tests/cuda, which run no kernel and log each call. The wheel must be
built with the feature `cuda`. Each case runs in processes of its own, because a process loads its driver once. ``test_cuda.py [CASE PROCESSES]``
runs all cases, or one process of a case.

Tensors on the CPU stand for tensors of the device, whose memory is the host's. Results are not compared: test_device.py does that."""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import refused

import aristos
from aristos import _aristos, _cuda, _device, _experts, _group

SOURCES = Path(__file__).parents[2] / "tests" / "cuda"
BF16 = torch.bfloat16
STREAM = 0x5150
# The time after which the processes of a case are killed.
LIMIT_S = 300
ADDRESSES = ("x", "grad_output", "output", "ids", "weights", "grad_weights")


def use_stand_in():
    """Treats tensors on the CPU as tensors of device 0, on which torch's current stream is `STREAM`."""
    options = _cuda.options
    _device.kind = lambda tensor: "cuda"
    _cuda.stream = lambda tensor: STREAM
    _cuda.options = lambda group, size, _: options(group, size, 0)


class Inputs:
    def __init__(self, tokens=5, hidden=64, intermediate=64, experts=4, top_k=2):
        gen = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=gen).to(BF16).requires_grad_()
        size = _group.default().size
        self.x = draw(tokens, hidden)
        self.ids = torch.stack([torch.randperm(experts, generator=gen)[:top_k] for _ in range(tokens)])
        self.w = torch.rand(tokens, top_k, generator=gen).requires_grad_()
        self.up, self.down = draw(experts // size, 2 * intermediate, hidden), draw(experts // size, hidden, intermediate)

    def experts(self):
        return aristos.experts(self.x, self.ids, self.w, self.up, self.down)

    def step(self):
        output = self.experts()
        output.backward(torch.ones_like(output))
        return output


def calls(work):
    """Runs `work` and returns the driver's log of it: lines without the line ends."""
    log = Path(os.environ["FAKE_DRIVER_LOG"])
    log.write_text("")
    work()
    return log.read_text().splitlines()


def launches(lines, stream=STREAM):
    """Checks that all calls are launches on the stream. Returns the names of the kernels, and the addresses in their `Pass`."""
    found = []
    for line in lines:
        start = f"stream {stream}: launches "
        assert line.startswith(start), f"{line!r} is not a launch on stream {stream}"
        name, _, words = line.removeprefix(start).split(", ")
        addresses = dict(zip(ADDRESSES, (int(word, 16) for word in words.split()[4:])))
        found.append((name, addresses))
    return found


def calls_only_launch_on_the_callers_stream():
    """Torch can therefore record a call as a graph."""
    inputs = Inputs()
    inputs.step()
    output = []
    seen = launches(calls(lambda: output.append(inputs.step())))
    names = [name for name, _ in seen]
    kernel = lambda name: next(n for n in names if n.startswith(f"aristos_{name}_"))
    begin, forward, backward = "aristos_begin_pass", kernel("forward"), kernel("backward")
    assert names == [begin, "aristos_take_routing", "aristos_plan", forward, begin, backward], names
    assert forward.endswith("_bf16") and backward.endswith("_bf16"), names
    of = {name: addresses for name, addresses in seen}
    rows, ids, weights = inputs.x.data_ptr(), inputs.ids.data_ptr(), inputs.w.data_ptr()
    wanted = dict(x=rows, grad_output=0, output=output[0].data_ptr(), ids=ids, weights=weights, grad_weights=0)
    assert of[forward] == wanted, (of[forward], wanted)
    assert of[backward]["x"] == rows and of[backward]["output"] and of[backward]["grad_weights"], of[backward]
    assert all(leaf.grad is not None for leaf in (inputs.x, inputs.w, inputs.up, inputs.down))


def wrong_stream_is_seen():
    """The injected faults: the default stream, and allocations in a call, which makes its layer."""
    inputs = Inputs()
    inputs.step()
    allocate = lambda: (aristos.init(), inputs.step())
    right, _cuda.stream = _cuda.stream, lambda tensor: 0
    lines = calls(inputs.step)
    assert len(launches(lines, stream=0)) == len(lines) == 6, lines
    refused(AssertionError, ["is not a launch on stream"], lambda: launches(lines))
    _cuda.stream = right
    launches(calls(inputs.step))
    refused(AssertionError, ["is not a launch on stream"], lambda: launches(calls(allocate)))


def other_thread_has_the_context():
    """As in autograd, whose threads of devices have not used the driver before."""
    inputs = Inputs()
    output, raised = inputs.experts(), []

    def backward():
        try:
            output.backward(torch.ones_like(output))
        except Exception as error:
            raised.append(error)

    def run():
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    lines = calls(run)
    assert not raised, raised
    assert [name for name, _ in launches(lines)][0] == "aristos_begin_pass"


def margin_is_left_where_a_group_exists():
    """The stand-in device has 10 multiprocessors for two blocks each. With the margin, a multiprocessor has one block."""
    blocks = lambda: next(iter(_group.default()._layers.values()))[0][0].blocks()
    Inputs().step()
    assert blocks() == 20, blocks()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    aristos.init()
    Inputs().step()
    assert blocks() == 2, blocks()


def too_little_memory_is_one_line():
    """On all processes, although only one has too little."""
    start_nccl()
    words = ["the windows for 4096 tokens per process take", "bytes of symmetric memory", "of 1000000000 bytes free", "max_tokens", "empty_cache"]
    return refused(aristos.AristosError, words, Inputs(tokens=4096).step)


def groups_without_nccl_are_refused():
    refused(ValueError, ["has cpu:gloo,cuda:gloo, expected NCCL", '("cpu:gloo,cuda:nccl")'], Inputs().step)
    on_cpu = dist.new_group(backend="cpu:gloo")
    refused(ValueError, ["has cpu:gloo, expected NCCL"], lambda: _cuda._communicator(on_cpu, 0))


def start_nccl():
    """Starts a communicator of the stand-in for NCCL, which takes the place of the process group's."""
    nccl = ctypes.CDLL("libnccl.so.2")
    communicator = ctypes.c_void_p()

    class Id(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]

    one = Id()
    nccl.ncclGetUniqueId(ctypes.byref(one))
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), dist.get_world_size(), one, dist.get_rank()) == 0
    _cuda._communicator = lambda group, number: communicator.value


def windows_are_on_the_groups_communicator():
    start_nccl()
    inputs = Inputs()
    inputs.step()
    dist.barrier()
    log = Path(os.environ["FAKE_NVSHMEM_LOG"]).read_text()
    assert "wrong" not in log, log
    # Memory 0 is that of the first test.
    for rank in range(dist.get_world_size()):
        assert f"PE {rank} registers memory 1" in log and f"PE {rank} frees memory 1" not in log, log
    seen = launches(calls(inputs.step)) if dist.get_rank() == 0 else inputs.step()
    dist.barrier()
    return f"{len(seen)} launches" if dist.get_rank() == 0 else ""


def cuda_tensors_pass_the_check():
    """The check of arguments, with fake tensors of a CUDA device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        new = lambda *shape, dtype=BF16, device="cuda": torch.empty(*shape, dtype=dtype, device=device)
        arguments = lambda **other: dict(
            dict(x=new(5, 64), ids=new(5, 2, dtype=torch.int64), weights=new(5, 2), up=new(4, 128, 64), down=new(4, 64, 64)), **other
        )
        check = lambda **other: _experts._check(**arguments(**other), up_bias=None, down_bias=None, gated=True, limit=0.0)
        check()
        refused(ValueError, ["down is on cpu, expected cuda:0, as x is"], lambda: check(down=new(4, 64, 64, device="cpu")))


# For each case its number of processes, and variables of the stand-ins.
CASES = [
    (calls_only_launch_on_the_callers_stream, 1, {}),
    (wrong_stream_is_seen, 1, {}),
    (other_thread_has_the_context, 1, {}),
    (margin_is_left_where_a_group_exists, 1, {}),
    (too_little_memory_is_one_line, 2, dict(FAKE_NCCL="full1")),
    (groups_without_nccl_are_refused, 2, {}),
    (windows_are_on_the_groups_communicator, 2, {}),
    (cuda_tensors_pass_the_check, 1, {}),
]


def run_case(name):
    assert "cuda" in _aristos.DEVICES, "this wheel has no CUDA devices: build it with --features cuda"
    case = next(case for case, _, _ in CASES if case.__name__ == name)
    if case is not cuda_tensors_pass_the_check:
        use_stand_in()
    aristos.init(wait_limit_s=20)
    print(case() or "", flush=True)


def compile_stand_ins(folder):
    """Compiles the stand-ins into the folder. That of NCCL also has the symbols with which torch is linked, because it takes the place of torch's."""

    def compile(library, *sources):
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", "-o", str(folder / library), *map(str, sources)]
        subprocess.run(command, check=True)

    def symbols(library):
        lines = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True).stdout.splitlines()
        return {line.split()[-1].split("@")[0] for line in lines}

    compile("libcuda.so.1", SOURCES / "driver.c")
    compile("libnccl.so.2", SOURCES / "nccl.c")
    others = symbols(Path(torch.__file__).parent / "lib" / "libnccl.so.2") - symbols(folder / "libnccl.so.2")
    rest = folder / "rest.c"
    rest.write_text("".join(f"char {name}[64];\n" for name in sorted(others) if name.isidentifier()))
    compile("libnccl.so.2", SOURCES / "nccl.c", rest)


def launch(case, size, env):
    """Runs a case on `size` processes. Returns whether it succeeded, and what it said."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        compile_stand_ins(folder)
        free.bind(("127.0.0.1", 0))
        processes, logs = [], []
        for rank in range(size):
            more = dict(FAKE_MEMORY="1000000000", FAKE_NCCL_VERSION="22902", FAKE_DEVICES="2", FAKE_NCCL_DIR=name) | env
            more |= dict(FAKE_NVSHMEM_LOG=str(folder / "log"), FAKE_DRIVER_LOG=str(folder / f"driver-{rank}"))
            more |= dict(LD_LIBRARY_PATH=name, LD_PRELOAD=str(folder / "libnccl.so.2"))
            if size > 1:
                port = free.getsockname()[1]
                more |= dict(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            command = [sys.executable, __file__, case.__name__]
            # Files, because a process whose pipe is full would wait for a reader.
            logs.append([folder / f"{rank}.{stream}" for stream in ("out", "err")])
            with logs[-1][0].open("w") as out, logs[-1][1].open("w") as err:
                processes.append(subprocess.Popen(command, env=os.environ | more, stdout=out, stderr=err))
        free.close()
        until, errors = time.monotonic() + LIMIT_S, []
        try:
            failed = any([process.wait(max(0, until - time.monotonic())) for process in processes])
        except subprocess.TimeoutExpired:
            failed = True
            errors = [f"not ended after {LIMIT_S} s"]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        errors += [err.read_text().strip() for _, err in logs]
        if failed:
            print("\n".join(errors), file=sys.stderr)
            return False, next((text.splitlines()[-1] for text in errors if text), "no message")
        return True, logs[0][0].read_text().strip()


def main():
    if len(sys.argv) > 1:
        return run_case(sys.argv[1])
    print(f"running {len(CASES)} cases", flush=True)
    failures = 0
    for case, size, env in CASES:
        done, said = launch(case, size, env)
        failures += not done
        print(f"test cuda::{case.__name__}::{size} ... {'ok' if done else 'FAILED'}{f' ({said})' if said else ''}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
