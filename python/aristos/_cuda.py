"""What a layer over CUDA tensors takes from torch: the device's index, the current stream, and the communicator of a process group."""

import contextlib

import torch
import torch.distributed as dist

from . import _aristos

KIND = "cuda"
# Number of multiprocessors that are left to NCCL's kernels, which wait for peers and must therefore be able to run at the same time as the
# experts' kernels.
_SPARE_FOR_NCCL = 8


def is_used():
    """Whether this wheel has the kernels of CUDA devices, and this process has a device."""
    return KIND in _aristos.DEVICES and torch.cuda.is_available()


def backends():
    """The backends with which `aristos.init` starts torch.distributed."""
    return "cpu:gloo,cuda:nccl" if is_used() else "gloo"


def stream(tensor):
    """The address of the stream on which torch works now on the tensor's device."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def use(tensor):
    """A context in which the tensor's device is the current one. The native layer makes its context current, as torch's runtime does."""
    return torch.cuda.device(tensor.device) if tensor.device.type == KIND else contextlib.nullcontext()


def options(process_group, size, number):
    """The arguments of a native layer on CUDA device `number`, for a process group of `size` processes. Collective."""
    # A process group's NCCL may run at any time later, so the margin does not depend on whether it has run.
    spare = _SPARE_FOR_NCCL if dist.is_available() and dist.is_initialized() and dist.is_nccl_available() else 0
    chosen = dict(number=number, spare_multiprocessors=spare)
    return chosen if size == 1 else dict(chosen, communicator=_communicator(process_group or dist.group.WORLD, number))


def _communicator(process_group, number):
    """The address of a process group's NCCL communicator. Collective, because torch creates it in the first collective operation."""
    device = torch.device(KIND, number)
    try:
        backend = process_group._get_backend(device)
    except RuntimeError:  # The group has no backend for these tensors.
        backend = None
    if not hasattr(backend, "_comm_ptr"):
        raise ValueError(
            f"the process group has {dist.get_backend_config(process_group)}, expected NCCL for CUDA tensors:"
            ' torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
        )
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=process_group)
    # Waits until NCCL has ended, because the communicator is used by the layer next.
    one.item()
    return backend._comm_ptr()
