"""The routed experts of a layer over a group of processes. The caller provides the routing. There is one operator for the forward pass and
one for the backward pass."""

import ctypes
import weakref
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _aristos, _device, _group, _non_finite
from ._parameters import local

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    group: _group.Group | None = None,
    activation: str = "silu",
    gated: bool = True,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
    limit_after: bool = False,
    plus_one: bool = False,
    batch_group: _group.Group | None = None,
) -> Tensor:
    """``sum over a token's experts of weight * expert(x)``, with the experts distributed over a group in contiguous blocks of equal size.

    Collective: every process of the group makes the same calls in the same order, each with its own tokens, or with none. The result is
    differentiable with respect to all tensors except ``ids``. The gradients of expert weights are sums over the tokens of all processes.
    Each call reads ``up`` and ``down`` in place and keeps no copy, so changed weights take effect at once. Of a DTensor it reads this
    process's part. Under autocast the experts compute in autocast's type, as matrix products do.

    Args:
        x: tokens, [T, hidden], float32 or bfloat16.
        ids: the experts of each token, [T, top_k], integers, -1 for no expert. A token must not have the same expert twice.
        weights: the routing weights of these experts, [T, top_k], of a floating type.
        up: weights of this process's experts, [E_local, 2 * intermediate, hidden], with the gate's rows before those of up. Without a gate
            [E_local, intermediate, hidden].
        down: weights of this process's experts, [E_local, hidden, intermediate].
        group: a `Group`; the default has all processes (`init`).
        activation: the activation by its name in transformers: "silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2" or "quick_gelu".
        gated: whether an expert computes ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``.
        up_bias, down_bias: biases, [E_local, 2 * intermediate] and [E_local, hidden]. Either both or none must be given.
        limit: the limit to which gate and up are clamped, 0 for no limit. `limit_after`: whether the activation is clamped instead of the
            gate. `plus_one`: whether 1 is added to up.
        batch_group: a `Group` whose processes have the same tokens, as with tensor parallelism. Each process then computes a part of them.

    Returns:
        [T, hidden], of x's type.

    Raises:
        ValueError: if a type, a device, a shape or an expert is invalid. The group can still be used.
        AristosError: if another process is missing after the wait limit. The group cannot be used any more.
    """
    group = group or _group.default()
    up, down, up_bias, down_bias = (local(tensor) for tensor in (up, down, up_bias, down_bias))
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in (x, weights, up, down)):
        # torch would give a derivative of 0.
        raise NotImplementedError("aristos.experts has no forward-mode derivative (jvp), use backward")
    # torch raises an error for the device "meta", which has no autocast.
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        x, up, down = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, up, down))
    _check(x, ids, weights, up, down, up_bias, down_bias, gated, limit, meta=True)
    shared = -1 if batch_group is None else batch_group.number
    form = (activation, gated, float(limit), limit_after, plus_one)
    op = torch.ops.aristos.experts if _device.kind(x) is None else torch.ops.aristos.device_experts

    def run(x, weights, up, down, up_bias, down_bias):
        return op(x, ids, weights, up, down, up_bias, down_bias, group.number, shared, *form)[0]

    return _non_finite.watch(run, group, ids, gated, x, weights, up, down, up_bias, down_bias)


_NO_CUDA = "this wheel has no CUDA devices: build one by MATURIN_PEP517_ARGS='--features cuda' pip install ./python (docs/training.md)"


def _check_devices(device, tensors, meta=False):
    """Checks that tensors, which are given by name, are on the device of x, and that the wheel can use this device."""
    if device.type not in ("cpu", *_aristos.DEVICES) and not (meta and device.type == "meta"):
        raise ValueError(f"x is on {device}, expected cpu: {_NO_CUDA if device.type == 'cuda' else 'not a device of aristos'}")
    for name, tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}, as x is")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} has layout {tensor.layout}, expected torch.strided")


def _check(x, ids, weights, up, down, up_bias, down_bias, gated, limit, meta=False):
    """Checks the arguments of a forward pass. Both `aristos.experts` and the operator call this function, because torch does not call the
    operator's code for a tensor on another device. `meta`: whether tensors on torch's device "meta" are allowed."""
    if not limit >= 0:
        raise ValueError(f"limit is {limit}, expected 0 or more")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, expected [tokens, hidden]")
    if down.dim() != 3:
        raise ValueError(f"down has shape {list(down.shape)}, expected [local experts, hidden, intermediate]")
    if ids.dim() != 2:
        raise ValueError(f"ids has shape {list(ids.shape)}, expected [tokens, top_k]")
    tokens, hidden = x.shape
    local, _, inner = down.shape
    wide = inner * (2 if gated else 1)
    expected = [
        ("ids", ids, [tokens, ids.shape[1]]),
        ("weights", weights, [tokens, ids.shape[1]]),
        ("up", up, [local, wide, hidden]),
        ("down", down, [local, hidden, inner]),
    ]
    if (up_bias is None) != (down_bias is None):
        raise ValueError("one of up_bias and down_bias is missing, expected both or none")
    if up_bias is not None:
        expected += [("up_bias", up_bias, [local, wide]), ("down_bias", down_bias, [local, hidden])]
    for name, tensor, shape in expected:
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {shape}")
    _check_devices(x.device, [("x", x)] + [(name, tensor) for name, tensor, _ in expected], meta)
    kind = _device.kind(x)
    if kind is None and x.dtype not in _DTYPES:
        raise ValueError(f"x has type {x.dtype}, expected float32 or bfloat16")
    if kind is not None and x.dtype not in _device.DTYPES:
        raise ValueError(f"x has type {x.dtype}, expected bfloat16 or float16 on a device")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids has type {ids.dtype}, expected integers")
    if not weights.is_floating_point():
        raise ValueError(f"weights has type {weights.dtype}, expected a floating type")
    for name, tensor in (("up", up), ("down", down)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} has type {tensor.dtype}, expected {x.dtype}, as x has")


def _check_backward(tensors):
    """Checks the types and devices of the tensors of a backward pass, which are given by name. The native layer compares the shapes with
    those of the forward pass."""
    device = tensors["ticket"].device
    for name, tensor in tensors.items():
        if tensor is not None and name != "ticket" and not tensor.is_floating_point():
            raise ValueError(f"{name} has type {tensor.dtype}, expected a floating type")
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}, as the ticket")


class _Pass:
    """What a forward pass keeps until its backward pass: the state that the native layer saved, and this process's part of the tokens."""

    def __init__(self, part):
        self.saved = None
        self.part = part


# The passes, keyed by the address of their tickets. A ticket is a tensor that represents a pass in autograd's graph. The pass is kept until
# the ticket's memory is freed.
_passes = weakref.WeakValueDictionary()


def _ticket(one):
    memory = (ctypes.c_int64 * 1)()
    memory.one = one
    _passes[ctypes.addressof(memory)] = one
    return torch.frombuffer(memory, dtype=torch.int64)


def _contiguous_all(*tensors):
    return [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]


def _views(*tensors):
    """Describes the tensors for the native layer. That layer checks shapes and types, and relies on the check of the layout here."""
    for tensor in tensors:
        if tensor is not None and not (tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()):
            raise ValueError(f"a tensor of shape {list(tensor.shape)} on {tensor.device} is not contiguous in host memory")
    return [None if tensor is None else (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype)[6:]) for tensor in tensors]


def _narrow(ids, experts):
    """Converts ids for the native layer, which checks their range but cannot detect truncation to 32 bits."""
    narrow = ids.to(torch.int32).contiguous()
    for token, choice in (narrow != ids).nonzero()[:1].tolist():
        raise ValueError(f"token {token} has expert {ids[token, choice]}, expected 0 to {experts - 1}, or -1 for none")
    return narrow


def _float(tensor):
    return None if tensor is None else tensor.detach().float().contiguous()


@torch.library.custom_op("aristos::experts", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    group: int,
    batch_group: int,
    activation: str,
    gated: bool,
    limit: float,
    limit_after: bool,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    _check(x, ids, weights, up, down, up_bias, down_bias, gated, limit)
    owner = _group.numbered(group)
    one = _Pass(_group.Part(batch_group, x.shape[0]))
    x, ids, weights = (one.part.mine(name, tensor) for name, tensor in (("x", x), ("ids", ids), ("weights", weights)))
    native = owner.layer(
        x.shape[0],
        hidden=x.shape[1],
        intermediate=down.shape[2],
        experts=down.shape[0] * owner.size,
        top_k=ids.shape[1],
        activation=activation,
        gated=gated,
        bias=up_bias is not None,
        limit=limit,
        limit_after=limit_after,
        plus_one=plus_one,
        dtype=_DTYPES[x.dtype],
    )
    x, up, down = _contiguous_all(x, up, down)
    ids, weights = _narrow(ids, down.shape[0] * owner.size), _float(weights)
    up_bias, down_bias = _float(up_bias), _float(down_bias)
    output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    one.saved = native.forward(_views(x, ids, weights, output), _views(up, down, up_bias, down_bias))
    return one.part.all(output.to(x.dtype)), _ticket(one)


@_forward.register_fake
def _(x, ids, weights, up, down, up_bias, down_bias, group, batch_group, activation, gated, limit, limit_after, plus_one):
    # This function is also called for tensors on torch's device "meta".
    _check(x, ids, weights, up, down, up_bias, down_bias, gated, limit, meta=True)
    return x.new_empty(x.shape), x.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("aristos::experts_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _backward(
    grad_output: Tensor,
    ticket: Tensor,
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    experts_need_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = dict(grad_output=grad_output, ticket=ticket, x=x, weights=weights, up=up, down=down, up_bias=up_bias, down_bias=down_bias)
    _check_backward(tensors)
    one = _passes.get(ticket.data_ptr())
    if one is None:
        raise ValueError("the forward pass is not available: its ticket was copied")
    x, grad_output, weights = (one.part.mine(name, tensor) for name, tensor in (("x", x), ("grad_output", grad_output), ("weights", weights)))
    weights_dtype, pairs = weights.dtype, weights.shape
    x, grad_output, up, down = _contiguous_all(x, grad_output.to(x.dtype), up, down)
    up32, down32 = _float(up_bias), _float(down_bias)
    grad_x, grad_weights = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (x.shape, pairs))
    grads = None
    if experts_need_grad:
        grads = [None if tensor is None else torch.empty_like(tensor) for tensor in (up, down, up32, down32)]
    one.saved.backward(_views(x, grad_output, grad_x, grad_weights), _views(up, down, up32, down32), grads and _views(*grads))
    grads = _no_gradients(x) if grads is None else grads
    for index, bias in ((2, up_bias), (3, down_bias)):
        grads[index] = x.new_empty(0, dtype=torch.float32) if grads[index] is None else grads[index].to(bias.dtype)
    return one.part.all(grad_x.to(x.dtype)), one.part.all(grad_weights.to(weights_dtype)), *grads


def _no_gradients(x):
    return [x.new_empty(0), x.new_empty(0), None, None]


@_backward.register_fake
def _(grad_output, ticket, x, weights, up, down, up_bias, down_bias, experts_need_grad=True):
    tensors = dict(grad_output=grad_output, ticket=ticket, x=x, weights=weights, up=up, down=down, up_bias=up_bias, down_bias=down_bias)
    _check_backward(tensors)
    grads = [up, down, up_bias, down_bias] if experts_need_grad else _no_gradients(x)
    grads = [x.new_empty(0, dtype=torch.float32) if one is None else one.new_empty(one.shape) for one in grads]
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *grads


def _setup(ctx, inputs, output):
    x, _, weights, up, down, up_bias, down_bias = inputs[:7]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, weights, up, down, up_bias, down_bias)


def _backward_formula(ctx, grad_output, _):
    ticket, x, weights, up, down, up_bias, down_bias = ctx.saved_tensors
    # The backward pass must run even if the loss of this process does not depend on these experts, because it is collective and the loss of
    # another process may.
    if grad_output is None:
        grad_output = torch.zeros_like(x)
    tensors = (ticket, x, weights, up, down, up_bias, down_bias)
    # The gradients of frozen experts are not computed, because they are half of the work.
    need = any(ctx.needs_input_grad[3:7])
    grad_x, grad_weights, *grads = torch.ops.aristos.experts_backward(grad_output, *tensors, need)
    grads = [grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad[3:7])]
    return (grad_x, None, grad_weights, *grads, *[None] * 7)


_forward.register_autograd(_backward_formula, setup_context=_setup)
