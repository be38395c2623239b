"""Parameters of experts and their start weights."""

import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

# A compiler's trace does not see a DTensor's attributes, but its class.
if dist.is_available():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def is_dtensor(tensor):
    return dist.is_available() and isinstance(tensor, DTensor)


def local(tensor):
    """This process's part of a DTensor, in the same memory, or the tensor itself if it is not a DTensor."""
    if not is_dtensor(tensor):
        return tensor
    return tensor.to_local() if tensor.device.type in (tensor.device_mesh.device_type, "meta") else _Local.apply(tensor)


def sharded(block, group):
    """Returns a tensor of all experts, [experts, ...], of which this process has the given block: a DTensor over the group's mesh. On one
    process it is the block itself."""
    if group.size == 1:
        return block
    return _from_local(block, group.mesh, [Shard(0)])


def _from_local(block, mesh, placements):
    """A DTensor on the block's device. DTensor.from_local moves a block to the mesh's type of device, which is another one if a layer is on
    the CPU and its group has NCCL. It does not move blocks on "meta"."""
    if block.device.type in (mesh.device_type, "meta"):
        return DTensor.from_local(block, mesh, placements, run_check=False)
    with torch.no_grad():
        whole = DTensor.from_local(torch.empty_like(block, device="meta"), mesh, placements, run_check=False)
        whole = torch.empty_like(whole, device=block.device)
        whole.to_local().copy_(block)
    return whole


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, whose gradient stays on its device."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.layout = tensor.device_mesh, tensor.placements
        return tensor.to_local()

    @staticmethod
    def backward(ctx, grad):
        return _from_local(grad, *ctx.layout)


def distributed_like(values, parameter):
    """Returns a plain tensor, which all processes have, in the layout of the parameter. Without communication."""
    if not is_dtensor(parameter):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Mean(torch.autograd.Function):
    """The identity, whose gradient is divided by the number of processes."""

    @staticmethod
    def forward(ctx, weight, processes):
        ctx.processes = processes
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.processes, None


def draw_seed(group):
    """Draws a number from the default generator. The number is that of the group's first process. Collective."""
    drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
    return group.gather(drawn, purpose="create a layer")[0]


def start_weights(shape, dtype, *place):
    """Weights, [out, in], distributed like those of nn.Linear. They depend only on `place`: a seed and names."""
    digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape, dtype=dtype, device="cpu").uniform_(-bound, bound, generator=generator)


class Linear(nn.Linear):
    """A linear layer without bias. Its start weights are equal on all processes."""

    # What `start_weights` needs. The layer that owns this module sets it before the first reset.
    place = None

    def __init__(self, width, out, dtype, device):
        super().__init__(width, out, bias=False, dtype=dtype, device=device)

    def reset_parameters(self):
        if self.place is not None and not self.weight.is_meta:
            with torch.no_grad():
                values = start_weights((self.out_features, self.in_features), self.weight.dtype, *self.place)
                self.weight.copy_(distributed_like(values, self.weight))
