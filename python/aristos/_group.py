"""The processes that share the experts of a layer."""

import os
import secrets

import torch
import torch.distributed as dist


class Group:
    """The processes of a torch.distributed group, or this one alone.

    Collective over the group. The processes must be on one host: they meet over shared memory.

    Args:
        group: a process group; None is the default one, or this process alone where torch.distributed is not initialised.
        wait_limit: seconds that a process waits for another one before it gives up and names it.
    """

    def __init__(self, group=None, wait_limit=60.0):
        self.wait_limit = wait_limit
        self._group = group
        self._layers = 0
        self._pid = os.getpid()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            drawn = [secrets.token_hex(16)]
            dist.broadcast_object_list(drawn, src=dist.get_global_rank(group, 0) if group else 0, group=group)
            self._key = drawn[0]
        elif group is not None:
            raise ValueError("a process group was given, but torch.distributed is not initialised")
        else:
            self.rank, self.size, self._key = 0, 1, secrets.token_hex(16)

    def next_key(self):
        """What the group's processes call their next layer: the same on each, as they make the same layers in the same order."""
        if os.getpid() != self._pid:
            raise RuntimeError("this process was forked after the group was made: make a group of its own")
        self._layers += 1
        return f"{self._key}-{self._layers}"

    def largest(self, number):
        """The largest of the processes' numbers. Collective."""
        if self.size == 1:
            return number
        value = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return int(value.item())

    def gather_rows(self, rows, counts):
        """All processes' rows, in order: ``rows`` has ``counts[rank]`` of them. Collective."""
        if self.size == 1:
            return rows
        most = max(counts)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        all_rows = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(all_rows, padded, group=self._group)
        return torch.cat([one[:n] for one, n in zip(all_rows, counts)])
