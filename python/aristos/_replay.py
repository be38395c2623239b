"""Records which experts the routers choose and forces these choices in other forward passes."""

import contextlib
import weakref
from typing import ContextManager, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from . import _routing

# Functions that return (layer, number of experts, dimensions of the router's scores) for a module whose forward pass contains both a router
# and the experts, and otherwise None.
finders = []
_open = None
# Layers whose last forward pass ran in a replay that is closed now.
_closed = weakref.WeakSet()


def record_routing() -> ContextManager[list[Tensor]]:
    """Records the experts that each token chooses, for `replay_routing`::

        with aristos.record_routing() as layers:
            model(batch)

    Yields:
        A list that gets one tensor [T, top_k] of integers for each forward pass of a layer, in the order of these passes. It has the tokens
        of this process, or the whole batch if the processes share one. Choices beyond an expert's capacity are included, and a replay
        drops them again. A pass that activation checkpointing repeats is not recorded.
        Compiled models run without torch.compile inside the context.

    Raises:
        ValueError: at exit, if no layer ran, as in a model whose experts Aristos does not compute.
    """
    return _record()


def replay_routing(layers: Iterable[Tensor]) -> ContextManager[None]:
    """Forces experts in the forward passes of the context. The weights are those that the router of each layer now gives to the forced
    experts, with its own normalisation and gradient. Losses that the model computes from the router's scores do not change.

    The backward pass of a model with activation checkpointing belongs inside the context, where the repeated forward passes get the experts
    of the first ones. The scores of the repeated pass must be equal bit for bit. Compiled models run without torch.compile inside the context.

    Args:
        layers: for each forward pass of a layer, in the order of these passes, the experts of this process's tokens: [T, top_k], integers, as
            of `record_routing` or of an inference engine. -1 is no expert: its weight is 0, and the weights of the token's other experts are
            normalised without it.

    Raises:
        ValueError: if an entry has another type or shape or an unknown expert, or if the number of forward passes differs from that of
            entries.
        NotImplementedError: if the experts cannot be forced on a router, for example because it does not use `torch.topk`.
        RuntimeError: if a replay is open already, or a replayed pass is repeated outside of its context or with other scores.
    """
    return _replay([_Entry(number, ids) for number, ids in enumerate(layers)])


@contextlib.contextmanager
def _record():
    with _routing.recording(with_dropped=True) as layers, torch.compiler.set_stance("force_eager"):
        yield layers
    if not layers:
        raise ValueError("no forward pass was recorded, expected one of a layer of aristos inside of record_routing()")


@contextlib.contextmanager
def _replay(entries):
    global _open
    if _open is not None:
        raise RuntimeError("a replay is open already, expected one replay_routing at a time")
    _open = replay = _Replay(entries)
    hooks = [register_module_forward_pre_hook(replay.enter), register_module_forward_hook(replay.leave, always_call=True)]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _open = None
        for hook in hooks:
            hook.remove()
        # torch calls no hook after an exception such as KeyboardInterrupt.
        while replay.blocks:
            replay.blocks.pop().__exit__(None, None, None)
        _closed.update(replay.passes)
    if replay.next < len(entries):
        raise ValueError(f"layers has {len(entries)} entries, but only {replay.next} forward passes of layers ran inside of replay_routing()")


def routed(layer, group, ids, weights, experts):
    """Called by each layer, which has `experts` experts on `group`, with the router's results, [T, top_k], before its experts run. Notes the
    routing. Returns the ids and weights of an open replay, in which -1 is no expert, and otherwise the same tensors."""
    ids, weights = forced(layer, ids, weights)
    _routing.note(layer, group, ids, experts)
    return ids, weights


def forced(layer, ids, weights):
    """As `routed`, for a layer that notes the routing itself."""
    if torch.compiler.is_compiling():
        return ids, weights
    if _open is not None:
        return _open.routed(layer, ids, weights)
    if not is_repeated():
        _closed.discard(layer)
    elif layer in _closed:
        raise RuntimeError(f"{_name(layer)}: a replayed pass is repeated outside of replay_routing(): call backward() inside of the context")
    return ids, weights


def is_repeated():
    """Whether activation checkpointing repeats this forward pass in the backward pass. False in a compiler's trace."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _name(layer):
    return type(layer).__name__


class _Entry:
    """The forced experts of a forward pass."""

    def __init__(self, number, ids):
        self.name = f"layers[{number}]"
        ids = torch.as_tensor(ids).detach()
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"{self.name} has type {ids.dtype}, expected integers")
        if ids.dim() != 2:
            raise ValueError(f"{self.name} has shape {list(ids.shape)}, expected [tokens, top_k]")
        self.ids = ids.long()
        # Read here once, so that forward passes do not wait for a device.
        self.least, self.most = (0, -1) if not ids.numel() else (self.ids.min().item(), self.ids.max().item())
        self.unset = self.least < 0

    def check(self, layer, shape, experts):
        if list(self.ids.shape) != shape:
            raise ValueError(f"{self.name} has shape {list(self.ids.shape)}, expected {shape}, as this pass of {_name(layer)} chooses")
        if self.least < -1 or self.most >= experts:
            wrong = self.least if self.least < -1 else self.most
            token = (self.ids == wrong).any(1).nonzero()[0].item()
            raise ValueError(f"{self.name} has expert {wrong} for token {token}, expected 0 to {experts - 1}, or -1 for none")


class _Replay:
    """An open replay. A block is a module whose forward pass contains a router and its experts."""

    def __init__(self, entries):
        self.entries = entries
        self.next = 0
        # By layer, the forward passes that activation checkpointing may repeat, as pairs of the scores' hash and the entry.
        self.passes = weakref.WeakKeyDictionary()
        self.blocks = []

    def enter(self, module, _):
        for find in finders:
            found = find(module)
            # An adapter's wrapper is a second block around the same experts.
            if found and all(block.layer is not found[0] for block in self.blocks):
                block = _Block(self, module, *found)
                self.blocks.append(block)
                block.__enter__()

    def leave(self, module, *_):
        if self.blocks and self.blocks[-1].module is module:
            self.blocks.pop().__exit__(None, None, None)

    def entry(self, layer, scores):
        """Returns the entry for these scores, [T, experts], of a layer, and the scores' hash: the next entry, or if this pass is repeated, that
        of its first run."""
        digest = _digest(scores)
        if not is_repeated():
            if self.next == len(self.entries):
                raise ValueError(f"layers has {self.next} entries, but another forward pass of {_name(layer)} runs inside of replay_routing()")
            return self.entries[self.next], digest
        passes = self.passes.get(layer, [])
        equal = [one for one in passes if torch.equal(one[0], digest)]
        if not equal:
            raise RuntimeError(
                f"{_name(layer)}: the scores of a repeated pass equal those of none of {len(passes)} replayed passes, expected equal bits"
            )
        if any(not torch.equal(one[1].ids, equal[0][1].ids) for one in equal):
            names = " and ".join(one[1].name for one in equal)
            raise RuntimeError(f"{_name(layer)}: {names} differ, but a repeated pass has the scores of both: use a replay_routing() for each")
        return equal[0][1], digest

    def routed(self, layer, ids, weights):
        block = self.blocks[-1] if self.blocks and self.blocks[-1].layer is layer else None
        times = block.count if block else 0
        if times != 1 or not _same(ids, block.ids.flatten(0, -2)):
            raise NotImplementedError(
                f"{_name(layer)}: the router could not be intercepted: it chose by torch.topk {times} times, expected once, with the chosen experts "
                "passed on unchanged"
            )
        if not is_repeated():
            self.passes.setdefault(layer, []).append((block.digest, block.entry))
            self.next += 1
        if block.entry.unset:
            ids = block.entry.ids.to(ids.device)
            weights = weights.masked_fill(ids < 0, 0)
        return ids, weights


def _digest(scores):
    """A hash of each token's scores, [T], which activation checkpointing compares on the device."""
    bits = scores.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[scores.element_size()]).long()
    odd = torch.arange(scores.shape[-1], device=scores.device) * 2 + 1
    return (bits * (odd * 0x9E3779B97F4A7C1)).sum(-1)


def _same(one, other):
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one.long(), other))


_TOPK = {torch.topk, Tensor.topk}
_GATHER = {torch.gather, Tensor.gather}
_SIGMOID = {torch.sigmoid, Tensor.sigmoid, F.sigmoid}
_SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
_MASKED_FILL = {torch.masked_fill, Tensor.masked_fill}


class _Block(TorchFunctionMode):
    """Intercepts the router's choice in a block.

    The router's `torch.topk` over all experts returns the forced experts and their scores. The router then computes weights from these or
    from other scores that it gathers at the experts. Unset slots have the router's own choice there, so that no sum over a token without any
    expert is 0. In the sums of other tokens unset slots count as 0.
    """

    def __init__(self, replay, module, layer, experts, dimensions):
        super().__init__()
        self.replay, self.module, self.layer, self.experts, self.dimensions = replay, module, layer, experts, dimensions
        self.count = 0
        self.ids = self.unset = self.entry = self.digest = None
        # Pairs of scores without some groups of experts, and all scores.
        self.limited = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if func in _TOPK and self._over_experts(first):
            return self._choose(func, first, args, kwargs)
        if self.unset is not None and func in _SOFTMAX and first.shape == self.unset.shape:
            kwargs = {name: value for name, value in kwargs.items() if name != "input"}
            return func(first.masked_fill(self.unset, float("-inf")), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func in _MASKED_FILL and self._over_experts(first):
            self.limited.append((result, first))
        if self.unset is not None:
            index = args[2] if len(args) > 2 else kwargs.get("index")
            if func in _GATHER and index is self.ids or func in _SIGMOID and first.shape == self.unset.shape:
                result = result.masked_fill(self.unset, 0)
        return result

    def _over_experts(self, scores):
        return isinstance(scores, Tensor) and scores.dim() == self.dimensions and scores.shape[-1] == self.experts

    def _choose(self, func, scores, args, kwargs):
        if hasattr(scores, "to_local"):
            raise NotImplementedError(f"{_name(self.layer)}: the router's scores are a DTensor, expected a plain tensor")
        self.count += 1
        entry, digest = self.replay.entry(self.layer, scores.flatten(0, -2))
        top_k = args[1] if len(args) > 1 else kwargs["k"]
        entry.check(self.layer, [scores.shape[:-1].numel(), top_k], self.experts)
        forced = entry.ids.to(scores.device).view(*scores.shape[:-1], top_k)
        ids = forced
        if entry.unset:
            unset = forced < 0
            ids = torch.where(unset, func(*args, **kwargs).indices, forced)
            self.unset = unset & ~unset.all(-1, keepdim=True)
        # A choice among some groups of experts gives the others a score of 0 or -inf.
        for limited, whole in reversed(self.limited):
            scores = whole if limited is scores else scores
        values = scores.gather(-1, ids)
        if entry.unset:
            values = values.masked_fill(self.unset, 0)
        self.ids, self.entry, self.digest = ids, entry, digest
        return torch.return_types.topk((values, ids))
