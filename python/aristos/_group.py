"""The processes that share the experts of a layer."""

import atexit
import datetime
import functools
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import _aristos, _cuda, _hosts, _launchers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_groups = []
_default = None
# One year.
_MAX_WAIT_S = 31_536_000
# The tag of the messages of `_barrier`. Messages of the program are unlikely to have the same tag.
_NOTHING = dict(rows_sent=0, bytes_sent=0, dispatch_s=0.0, expert_s=0.0, combine_s=0.0, waiting_s=0.0)
_BARRIER_TAG = 0x4152
_settings = dict(wait_limit_s=60.0, max_tokens=None)


def init(*, wait_limit_s: float | None = None, max_tokens: int | None = None) -> "Group":
    """Creates the default group of all processes, as given by torch.distributed, torchrun, Slurm or MPI. Without these the group has only
    this process. Collective.

    Initialises torch.distributed (gloo, and NCCL where the wheel has CUDA) if the environment variables of a launcher describe several
    processes. In the shell of a Slurm
    batch script or of salloc the group has only this process, because only srun starts the tasks of a job. A warning is logged there if the
    job has several tasks. A second call resets all groups, which is needed after an error that made a layer unusable. Patched models then
    use the reset groups.

    Args:
        wait_limit_s: seconds after which a process stops waiting for another one and names it. The default is 60, or 600 if the process
            has CUDA devices, as in NCCL.
        max_tokens: number of tokens for which a layer's windows have room. A batch in which a process has more is sent in parts, which
            is slower. By default, it is the largest number that any process has in a layer's first pass, and the windows grow before the
            next pass after a larger batch. If given, they keep this size. On a device it is the maximum, and grows only if the group has
            one process.

    Returns:
        The `Group`.
    """
    global _default, _settings
    if wait_limit_s is None:
        wait_limit_s = 600.0 if _cuda.is_used() else 60.0
    if not (isinstance(wait_limit_s, (int, float)) and 0 < wait_limit_s <= _MAX_WAIT_S):
        raise ValueError(f"wait_limit_s is {wait_limit_s!r}, expected seconds above 0, at most {_MAX_WAIT_S}")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens > 0):
        raise ValueError(f"max_tokens is {max_tokens!r}, expected 1 or more, or None")
    initialised = dist.is_available() and dist.is_initialized()
    if initialised and any(group._pid != os.getpid() for group in _groups):
        raise RuntimeError("this process was forked after torch.distributed was initialised: start it by spawn instead")
    if dist.is_available() and not initialised:
        found = _launchers.find()
        if found:
            rank, size, name = found
            for variable, value in (("MASTER_ADDR", _launchers.master_address), ("MASTER_PORT", _launchers.master_port)):
                if variable not in os.environ:
                    os.environ[variable] = value(name)
            if size > 1 or name == "RANK":
                dist.init_process_group(_cuda.backends(), rank=rank, world_size=size)
    _settings = dict(wait_limit_s=wait_limit_s, max_tokens=max_tokens)
    for group in _groups:
        group._restart()
    _default = _default or Group()
    return _default


def default():
    """The default group. The first call creates it, which is collective."""
    return _default or init()


def check_all():
    """Raises the error of a pass on a device that has ended, of any group."""
    for group in _groups:
        group.check()


def numbered(number):
    """The group with this number. Operators refer to a group by its number."""
    if not 0 <= number < len(_groups):
        raise ValueError(f"group is {number}, expected 0 to {len(_groups) - 1}, the number of a Group")
    return _groups[number]


def has_mesh(mesh):
    """Whether the experts of a group are sharded over this mesh."""
    return any(group._mesh == mesh for group in _groups)


def _with_ranks(ranks):
    """The group of these processes of torch.distributed, which is one of the groups that exist, or the group of this process alone."""
    if ranks is None:
        return alone()
    everyone = default()
    for group in _groups:
        # A group that does not use torch.distributed has no process group to ask.
        if group.__reduce__()[1][0] == ranks:
            return group
    raise ValueError(f"the layer's group had the processes {ranks}, expected those of a group here, such as all {everyone.size}")


@atexit.register
def _leave():
    """Takes leave of the other hosts' processes, which may still compute the last pass. Without it they would lose this process."""
    for group in _groups:
        group._leave()


class Part:
    """This process's part of the tokens that the processes of a batch group have in common. Without a batch group (-1) it is all tokens."""

    def __init__(self, batch_group, tokens):
        self._tokens = tokens
        self._group = None if batch_group == -1 else numbered(batch_group)
        self._counts = self._group and [len(part) for part in torch.arange(tokens, device="cpu").tensor_split(self._group.size)]

    def mine(self, name, rows):
        """Returns this process's part of the rows, which are those of a batch group."""
        if rows.dim() != 2 or rows.shape[0] != self._tokens:
            raise ValueError(f"{name} has shape {list(rows.shape)}, expected 2 dimensions with {self._tokens} tokens, as in the forward pass")
        return rows if self._group is None else rows.tensor_split(len(self._counts))[self._group.rank]

    def all(self, rows):
        """Returns all rows, given this process's part of them. Collective."""
        return rows if self._group is None else self._group.gather_rows(rows, self._counts)


@functools.cache
def of(process_group):
    """The `Group` of a process group, which all layers over that process group share. The first call is collective."""
    return Group(process_group)


@functools.cache
def alone():
    """The `Group` that all layers share that run only in this process."""
    return Group.alone()


class Group:
    """The processes of a torch.distributed group, or this process alone.

    Creating a group is collective. Processes of one host communicate through shared memory, and hosts over TCP; CUDA devices must be on one
    host. The wait limit and the maximum number of tokens are those of `init`.

    Args:
        group: a process group, a device mesh of one dimension, or None for the default process group. If torch.distributed is not
            initialised, None stands for this process alone.
    """

    def __init__(self, group: "dist.ProcessGroup | DeviceMesh | None" = None):
        mesh = group if hasattr(group, "mesh_dim_names") else None
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"the mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names}, expected one, such as mesh['ep']")
        group = group if mesh is None else mesh.get_group()
        self._begin(group)
        self._mesh = mesh
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            drawn = [secrets.token_hex(16)]
            dist.broadcast_object_list(drawn, src=dist.get_global_rank(group, 0) if group else 0, group=group)
            self._key = drawn[0]
        elif group is not None:
            raise ValueError("a process group was given, but torch.distributed is not initialised")
        else:
            self.rank, self.size, self._key = 0, 1, secrets.token_hex(16)

    @classmethod
    def alone(cls) -> "Group":
        """Creates a group that has only this process and does not use torch.distributed. Not collective."""
        group = cls.__new__(cls)
        group._begin(None)
        group.rank, group.size, group._key = 0, 1, secrets.token_hex(16)
        return group

    def _begin(self, group):
        self._group = group
        self._mesh = None
        self._starts = 0
        self.number = len(_groups)
        self._restart()
        _groups.append(self)

    def _restart(self):
        self.wait_limit_s, self.max_tokens = _settings["wait_limit_s"], _settings["max_tokens"]
        self._layers, self._made = {}, 0
        self._rendezvous = None
        self._measured = _NOTHING
        self._starts += 1
        self._pid = os.getpid()

    @property
    def mesh(self) -> "DeviceMesh":
        """The device mesh of the group's processes, over which the weights of experts are sharded. Its dimension is named "ep", unless the
        group was made of a mesh."""
        if self._mesh is None:
            from torch.distributed.device_mesh import DeviceMesh

            device = "cuda" if "nccl" in dist.get_backend_config(self._group) else "cpu"
            self._mesh = DeviceMesh.from_group(self._group or dist.group.WORLD, device, mesh_dim_names=("ep",))
        return self._mesh

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        ranks = None
        if self._group is not None or self.size > 1:
            ranks = tuple(dist.get_process_group_ranks(self._group or dist.group.WORLD))
        return _with_ranks, (ranks,)

    def local_experts(self, experts: int) -> list[int]:
        """The indices of this process's experts. They are contiguous, and every process has the same number of experts."""
        return _aristos.local_experts(experts, self.rank, self.size)

    def layer(
        self, tokens: int, device: str | None = None, number: int | None = None, **shape: Any
    ) -> "_aristos.Layer | _aristos.DeviceLayer":
        """Returns the native layer of this shape on this kind of device, which all identical layers share. The first call is collective.
        `number` is the index of a CUDA device."""
        if os.getpid() != self._pid:
            raise RuntimeError("this process was forked after its group was made: start it by spawn instead, or, alone, call aristos.init() in it")
        key = (device, number, *shape.values())
        layers = self._layers.setdefault(key, [])
        if not layers:
            layers.append(self._make(tokens, device, number, shape))
        elif device is None and self.max_tokens is None and (grown := layers[0][0].grown(self._next_key())):
            # A forward pass is collective, and all processes know of a larger batch after the pass in which it occurred.
            self._measure(layers[0][0])
            layers[0] = grown, None
            self._made += 1
        elif device is not None and self.max_tokens is None and self.size == 1 and tokens > layers[-1][1]:
            # The smaller layers stay, because passes of theirs may still need a backward pass.
            layers.append(self._make(max(tokens, layers[-1][1] * 3 // 2), device, number, shape))
        if device is None:
            return layers[0][0]
        for native, max_tokens in layers:
            if tokens <= max_tokens:
                return native
        longest = f"aristos.init(max_tokens={tokens}) before the first pass makes room for more"
        raise ValueError(f"x has {tokens} tokens, expected at most {max_tokens} on a device: {longest}")

    def _next_key(self):
        return f"{self._key}-{self._starts}-{self._made}"

    def sent_bytes(self) -> int:
        """The number of bytes that this process has put to other processes, summed over all layers on the CPU."""
        natives = (native for layers in self._layers.values() for native, _ in layers)
        return sum(native.sent_bytes() for native in natives if isinstance(native, _aristos.Layer))

    def measured(self) -> dict[str, int | float]:
        """What this process's layers on the CPU have sent, and the time of each phase, since the last call."""
        for native in (native for layers in self._layers.values() for native, _ in layers):
            if isinstance(native, _aristos.Layer):
                self._measure(native)
        measured, self._measured = self._measured, _NOTHING
        return measured

    def _measure(self, native):
        self._measured = {name: value + self._measured[name] for name, value in native.measured().items()}

    def check(self) -> None:
        """Raises the error of a pass on a device that has ended, without waiting. Other calls raise it when the next pass begins."""
        for native in (native for layers in self._layers.values() for native, _ in layers):
            if not isinstance(native, _aristos.Layer):
                native.check()

    def _make(self, tokens, device, number, shape):
        # The number is converted because it is symbolic while a compiler traces.
        tokens = int(max(1, tokens if self.max_tokens is None else self.max_tokens))
        facts = dict(shape, device=device, **({} if device is None else dict(host=os.uname().nodename)))
        gathered = self.gather((tokens, facts, _hosts.identity()))
        for rank, (theirs, their_facts, _) in enumerate(gathered):
            for field, value in facts.items():
                if their_facts.get(field) != value:
                    theirs = their_facts.get(field)
                    raise ValueError(f"{field} is {value} here (rank {self.rank}), but {theirs} on rank {rank}: expected the same on all")
            tokens = max(tokens, theirs)
        key = self._next_key()
        self._made += 1
        shape = dict(shape, max_tokens=tokens, wait_limit_s=self.wait_limit_s)
        if device is None:
            if self._rendezvous is None and len({host for *_, host in gathered}) > 1:
                self._rendezvous = self._meet()
            native = _aristos.Layer(key, self.rank, self.size, self._rendezvous, **shape)
            for note in native.notes:
                logging.getLogger("aristos").warning("%s", note)
            return native, tokens
        on_device = _cuda.options(self._group, self.size, number) if device == _cuda.KIND else dict(spare_multiprocessors=0)
        native = _aristos.DeviceLayer(key, self.rank, self.size, device=device, **shape, **on_device)
        said = "%d bytes of symmetric memory: windows for %d tokens per process (aristos.init(max_tokens=...)), shared by all layers of this shape"
        logging.getLogger("aristos").info(said, native.symmetric_bytes(), tokens)
        return native, tokens

    def _meet(self):
        """Returns the place where the processes of several hosts connect, which rank 0 tells the others. Collective."""
        own = _aristos.Rendezvous.listen(_hosts.address()) if self.rank == 0 else None
        address = self.gather(own and own.address)[0]
        return own or _aristos.Rendezvous(address)

    def _leave(self):
        for native in (native for layers in self._layers.values() for native, _ in layers):
            if isinstance(native, _aristos.Layer):
                native.leave()

    def gather(self, value: Any, *, purpose: str = "make a layer", limit_s: float | None = None) -> list:
        """Returns the values of all processes, in rank order. Collective. With gloo it waits at most `limit_s`, by default the wait limit,
        and the error names a missing process."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        try:
            if "cpu:gloo" in dist.get_backend_config(self._group):
                self._barrier(purpose, self.wait_limit_s if limit_s is None else limit_s)
            dist.all_gather_object(values, value, group=self._group)
        except _aristos.AristosError:
            raise
        except RuntimeError as error:  # torch's error of a process that has ended
            raise _aristos.AristosError(f"to {purpose}: {str(error).splitlines()[0]}{_aristos.how_to_restart()}") from None
        return values

    def _barrier(self, purpose, limit_s):
        """A barrier with a time limit on every process. It is needed because gloo's monitored barrier has a limit only on rank 0."""
        deadline, message = time.monotonic() + limit_s, torch.zeros(1, device="cpu")
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [dist.isend(message, group=self._group, group_dst=rank, tag=_BARRIER_TAG) for rank in others]
        received = [dist.irecv(torch.zeros(1, device="cpu"), group=self._group, group_src=rank, tag=_BARRIER_TAG) for rank in others]
        for rank, *works in zip(others, sent, received):
            try:
                for work in works:
                    work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError:
                late = time.monotonic() >= deadline
                why = f"did not come in {limit_s:.1f} s" if late else "is lost, its connection has ended"
                raise _aristos.AristosError(f"to {purpose}: rank {rank} {why}{_aristos.how_to_restart()}") from None

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the rows of all processes, in rank order. ``rows`` has ``counts[rank]`` rows. Collective."""
        if self.size == 1:
            return rows
        most = max(counts)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        all_rows = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(all_rows, padded, group=self._group)
        return torch.cat([one[:n] for one, n in zip(all_rows, counts)])

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of the tensors of all processes. Collective, not differentiable."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, group=self._group)
        return values

    def gather_tensors(self, values: Tensor) -> Tensor:
        """Returns the tensors of all processes, which have equal shapes of one dimension, as the rows of a matrix in rank order. Collective,
        not differentiable."""
        if self.size == 1:
            return values.unsqueeze(0)
        everyone = values.new_empty(self.size * len(values))
        dist.all_gather_into_tensor(everyone, values, group=self._group)
        return everyone.view(self.size, -1)
