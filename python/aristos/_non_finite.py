"""Finds the first value of a training step that is not finite."""

import warnings
import weakref
from typing import Optional

import torch

from . import _device, _group

# The open context, and the module whose pass begins next.
_open: Optional["detect_non_finite"] = None
_module = None

# The kinds of values in a pass, in the order in which one causes the next. In a backward pass there are only the first two.
_INPUT, _WEIGHT, _ROUTING, _OUTPUT, _NAMED = range(5)


class detect_non_finite:
    """Finds the first value in the experts of a step that is not finite (NaN or infinite), and names its place::

        with aristos.detect_non_finite(step=step) as watch:
            loss = model(batch)
            watch.check("loss", loss)
            loss.backward()
        optimizer.step()

    It checks the tokens, weights, routing weights and output of each forward pass, and all gradients of each backward pass, on every
    process. Of several values it names that of the earliest pass, and in a pass tokens before weights, and these before the output.

    No process stops in the middle of the step, where the others would wait for it: the end of the context is collective and raises the
    error on all. If the code inside raises another error, the end does nothing. Each check reads the whole tensor and waits for the device,
    so use this to look for a fault, like ``torch.autograd.detect_anomaly``. Layers compiled by torch.compile are not checked.

    Args:
        action: "stop" raises the error on all processes, "warn" warns on the group's first one. `found` is then the message, or None.
        step: number of the step, for the message.
        group: the `Group` of processes that leave the context together; the default has all processes.

    Raises:
        FloatingPointError: at the end, for example "down_proj has 3 values that are not finite, the first nan at expert 5, element 17: step
            4, rank 1, layer 0". The layers are numbered in the order of their first forward pass in the context. A call of
            `aristos.experts` by other code has no layer.
    """

    def __init__(self, action: str = "stop", *, step: Optional[int] = None, group: Optional["_group.Group"] = None):
        if action not in ("stop", "warn"):
            raise ValueError(f'action is {action!r}, expected "stop" or "warn"')
        self.found: Optional[str] = None
        self._action, self._step, self._group = action, step, group

    def __enter__(self) -> "detect_non_finite":
        global _open
        if _open is not None:
            raise RuntimeError("a context of aristos.detect_non_finite is open already, leave it first")
        self._group = self._group or _group.default()
        # Counts forward and backward passes. All processes have the same count, because passes are collective.
        self._passes = 0
        self._layers = weakref.WeakKeyDictionary()
        # This process's first value: pass, kind, message, layer.
        self._first = None
        # The checks of gradients that kernels add to `main_grad`, for the end.
        self._at_end = []
        _open = self
        return self

    def __exit__(self, kind, error, trace) -> None:
        global _open
        _open = None
        if error is not None:
            return
        for check in self._at_end:
            check()
        everyone = self._group.gather(self._first, purpose="gather values that are not finite")
        found = [(*first[:2], rank, *first[2:]) for rank, first in enumerate(everyone) if first is not None]
        self.found = None
        if not found:
            return
        _, _, rank, what, layer = min(found)
        step = "" if self._step is None else f"step {self._step}, "
        self.found = f"{what}: {step}rank {rank}{layer}"
        if self._action == "stop":
            raise FloatingPointError(self.found)
        if self._group.rank == 0:
            warnings.warn(self.found, RuntimeWarning, stacklevel=2)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Checks a tensor of any shape that the caller computed after the passes so far, such as the loss."""
        self._check(self._passes, _NAMED, name, tensor)

    def _check(self, number, kind, name, tensor, row="", base=0, layer=""):
        """Records the first value of a tensor in pass `number` that is not finite, unless an earlier one is recorded. The first dimension
        counts what `row` says, "token" or "expert", from `base`; without `row` it has no name."""
        if self._first is not None and self._first[:2] <= (number, kind):
            return
        flat = tensor.detach().reshape(-1)
        bad = ~torch.isfinite(flat)
        count = int(bad.sum())
        if not count:
            return
        index = int(bad.int().argmax())
        at, element = divmod(index, tensor[0].numel()) if row else (0, index)
        where = f"{row} {base + at}, element {element}" if row else f"element {element}"
        values = "1 value that is not finite," if count == 1 else f"{count} values that are not finite, the first"
        self._first = (number, kind, f"{name} has {values} {flat[index].item()} at {where}", layer)


class _Pass:
    """A forward pass in the open context, and its backward pass."""

    def __init__(self, group, local_experts):
        self._context, self._first_expert = _open, group.rank * local_experts
        self._context._passes += 1
        self._number = self._context._passes
        self._layer = ""
        if _module is not None:
            layers = self._context._layers
            self._layer = f", layer {layers.setdefault(_module, len(layers))}"

    def begin_backward(self, grad_output):
        self._context._passes += 1
        self._number = self._context._passes
        self.check(_INPUT, "the gradient of output", "token", grad_output)

    def check(self, kind, name, row, tensor):
        # The context may have ended before the backward pass.
        if self._context is _open:
            base = self._first_expert if row == "expert" else 0
            self._context._check(self._number, kind, name, tensor, row, base, self._layer)

    def check_main_grad_at_end(self, name, parameter):
        place = (self._first_expert, self._layer)
        # The backward pass, which has another number, has not begun.
        self._context._at_end.append(lambda: self._context._check(self._number, _WEIGHT, name, parameter.main_grad, "expert", *place))


class _Gradient(torch.autograd.Function):
    """The identity. Its backward pass checks the gradient of this use of the tensor alone."""

    @staticmethod
    def forward(ctx, tensor, one, name, row):
        ctx.check = (one, name, row)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        one, name, row = ctx.check
        one.check(_WEIGHT, f"the gradient of {name}", row, grad)
        return grad, None, None, None


def begin(module):
    """Names the module whose pass begins next."""
    global _module
    _module = module if _open is not None else None


def watch(run, group, ids, gated, x, weights, up, down, up_bias, down_bias):
    """Returns the output of a forward pass, ``run(x, weights, up, down, up_bias, down_bias)``, and checks its values if a context is open."""
    if torch.compiler.is_compiling() or _open is None:
        return run(x, weights, up, down, up_bias, down_bias)
    one = _Pass(group, down.shape[0])
    begin(None)
    # Kernels add to these gradients in place, so autograd does not see them.
    mains = [] if _device.kind(x) is None else [_device.main_grad(up), _device.main_grad(down)]
    into_mains = bool(mains) and None not in mains
    wide = "gate_up_proj" if gated else "up_proj"
    inputs = [
        (_INPUT, "hidden_states", "token", x),
        (_ROUTING, "routing_weights", "token", weights),
        (_WEIGHT, wide, "expert", up),
        (_WEIGHT, "down_proj", "expert", down),
        (_WEIGHT, f"{wide}_bias", "expert", up_bias),
        (_WEIGHT, "down_proj_bias", "expert", down_bias),
    ]
    passed = []
    for kind, name, row, tensor in inputs:
        if tensor is not None:
            # An unset choice may have any routing weight.
            one.check(kind, name, row, tensor.masked_fill(ids < 0, 0) if kind == _ROUTING else tensor)
            if into_mains and (tensor is up or tensor is down):
                one.check_main_grad_at_end(f"main_grad of {name}", tensor)
            elif tensor.requires_grad:
                tensor = _Gradient.apply(tensor, one, name, row)
        passed.append(tensor)
    output = run(*passed)
    one.check(_OUTPUT, "output", "token", output)
    if output.requires_grad:
        output.register_hook(one.begin_backward)
    return output
