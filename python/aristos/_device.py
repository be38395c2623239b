"""The routed experts on a CUDA device. The operators keep the state of a pass in a tensor. A call only launches kernels, on the current stream.

If the environment variable ARISTOS_DEVICE is ``emulated`` or ``emulated-hopper``, a tensor on the CPU is treated as a tensor of an emulated
device. The wheel must be built with the feature `emulate`. This makes it possible to run the code of this file and the device's kernels
without a GPU.
"""

import os
from typing import Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _aristos, _cuda, _group

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def kind(tensor):
    """The kind of device that computes the experts for this tensor, or None for the engine on the CPU."""
    if tensor.device.type not in ("cpu", "meta"):
        return tensor.device.type
    named = os.environ.get("ARISTOS_DEVICE", "")
    if named in ("", "cpu"):
        return None
    emulated = [device for device in _aristos.DEVICES if device != _cuda.KIND]
    if named not in emulated:
        known = " or ".join(["cpu", *emulated])
        raise ValueError(f"ARISTOS_DEVICE is {named!r}, expected {known}: emulated devices need a wheel built with --features emulate")
    return named


def _layer(group, tokens, x, top_k, up, down, up_bias, form):
    """The native layer of this process for these tensors, of which it computes `tokens` rows. The first call is collective."""
    owner = _group.numbered(group)
    activation, gated, limit, limit_after, plus_one = form
    with _cuda.use(x):
        return owner.layer(
            tokens,
            kind(x),
            x.device.index,
            hidden=int(x.shape[1]),  # symbolic in a compiler's trace, like the following ones
            intermediate=int(down.shape[2]),
            experts=int(down.shape[0]) * owner.size,
            top_k=int(top_k),
            activation=activation,
            gated=gated,
            bias=up_bias is not None,
            limit=limit,
            limit_after=limit_after,
            plus_one=plus_one,
            dtype=DTYPES[x.dtype],
        )


def _plain(tensor, dtype=None):
    """Returns the tensor in the form that kernels read: contiguous, of this type, and at a multiple of 16 bytes. It is copied only if
    needed, which is not the case for the weights of a usual layer."""
    if tensor is None:
        return None
    tensor = tensor.detach().to(dtype or tensor.dtype).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _addresses(*tensors):
    return [0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr() for tensor in tensors]


def _stream(tensor):
    """The address of the stream on which both torch and the kernels work, or None on an emulated device."""
    return _cuda.stream(tensor) if kind(tensor) == _cuda.KIND else None


@torch.library.custom_op("aristos::device_experts", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
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
    from . import _experts

    _experts._check(x, ids, weights, up, down, up_bias, down_bias, gated, limit)
    part = _group.Part(batch_group, x.shape[0])
    x, ids, weights = part.mine("x", x), part.mine("ids", ids), part.mine("weights", weights)
    native = _layer(group, x.shape[0], x, ids.shape[1], up, down, up_bias, (activation, gated, limit, limit_after, plus_one))
    wide = ids.dtype != torch.int32
    ids, weights = _plain(ids, torch.int64 if wide else None), _plain(weights, torch.float32)
    x, up, down = _plain(x), _plain(up), _plain(down)
    up_bias, down_bias = _plain(up_bias, torch.float32), _plain(down_bias, torch.float32)
    output = torch.empty_like(x)
    state = torch.empty(native.state_bytes(), dtype=torch.uint8, device=x.device)
    tensors, experts = _addresses(x, ids, weights, output), _addresses(up, down, up_bias, down_bias)
    with _cuda.use(x):
        native.forward(x.shape[0], tensors, experts, state.data_ptr(), wide_ids=wide, stream=_stream(x))
    return part.all(output), state


@_forward.register_fake
def _(x, ids, weights, up, down, up_bias, down_bias, group, batch_group, activation, gated, limit, limit_after, plus_one):
    # Only the native layer knows the size of the state, so the layer must be created even while a compiler traces.
    with unset_fake_temporarily():
        # The largest part of a batch group's tokens.
        tokens = x.shape[0] if batch_group < 0 else -(-x.shape[0] // _group.numbered(batch_group).size)
        native = _layer(group, tokens, x, ids.shape[1], up, down, up_bias, (activation, gated, limit, limit_after, plus_one))
    return x.new_empty(x.shape), x.new_empty(native.state_bytes(), dtype=torch.uint8)


def _check_backward(grad_output, x, weights, up, down, up_bias, down_bias, into):
    """Checks what the kernels rely on. The forward pass has checked that the other shapes match."""
    if weights.dim() != 2 or weights.shape[0] != x.shape[0]:
        raise ValueError(f"weights has shape {list(weights.shape)}, expected [{x.shape[0]}, top_k]")
    for name, tensor, like in (("grad_output", grad_output, x), *((f"the gradient of {name}", one, of) for name, one, of in zip(("up", "down"), into, (up, down)))):
        if tensor.shape != like.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(like.shape)}")
    for tensor in (grad_output, weights, up, down, *into, *(bias for bias in (up_bias, down_bias) if bias is not None)):
        if tensor.device != x.device:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} is on {tensor.device}, expected {x.device}, as x is")


def _run_backward(grad_output, state, x, weights, up, down, up_bias, down_bias, group, batch_group, form, into):
    """Runs the backward pass. It adds to the f32 gradients `into`, or writes new f32 gradients if `into` is empty."""
    _check_backward(grad_output, x, weights, up, down, up_bias, down_bias, into)
    part = _group.Part(batch_group, x.shape[0])
    x, grad_output, weights = part.mine("x", x), part.mine("grad_output", grad_output), part.mine("weights", weights)
    native = _layer(group, x.shape[0], x, weights.shape[1], up, down, up_bias, form)
    if state.dtype != torch.uint8 or state.numel() != native.state_bytes():
        raise ValueError(f"state has {state.numel()} elements of {state.dtype}, expected the {native.state_bytes()} bytes of a forward pass")
    if state.data_ptr() % 64 or not state.is_contiguous():
        state = state.clone(memory_format=torch.contiguous_format)
    x, grad_output, up, down = _plain(x), _plain(grad_output, x.dtype), _plain(up), _plain(down)
    up32, down32 = _plain(up_bias, torch.float32), _plain(down_bias, torch.float32)
    grad_x, grad_weights = torch.empty_like(x), torch.empty(weights.shape, dtype=torch.float32, device=x.device)
    new = torch.zeros if into else torch.empty
    grads = list(into) or [torch.empty(one.shape, dtype=torch.float32, device=x.device) for one in (up, down)]
    grads += [new(0 if bias is None else bias.shape, dtype=torch.float32, device=x.device) for bias in (up32, down32)]
    with _cuda.use(x):
        native.backward(
            x.shape[0],
            _addresses(x, grad_output, grad_x, grad_weights),
            _addresses(up, down, up32, down32),
            _addresses(*grads),
            state.data_ptr(),
            accumulate=bool(into),
            stream=_stream(x),
        )
    for index, bias in ((2, up_bias), (3, down_bias)):
        if bias is not None:
            grads[index] = grads[index].to(bias.dtype)
    return part.all(grad_x), part.all(grad_weights.to(weights.dtype)), grads


@torch.library.custom_op("aristos::device_experts_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _backward(
    grad_output: Tensor,
    state: Tensor,
    x: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = (activation, gated, limit, limit_after, plus_one)
    tensors = (grad_output, state, x, weights, up, down, up_bias, down_bias)
    grad_x, grad_weights, grads = _run_backward(*tensors, group, batch_group, form, ())
    return grad_x, grad_weights, grads[0].to(up.dtype), grads[1].to(down.dtype), grads[2], grads[3]


@_backward.register_fake
def _(grad_output, state, x, weights, up, down, up_bias, down_bias, *form):
    biases = [x.new_empty(0, dtype=torch.float32) if bias is None else bias.new_empty(bias.shape) for bias in (up_bias, down_bias)]
    return *(tensor.new_empty(tensor.shape) for tensor in (x, weights, up, down)), *biases


@torch.library.custom_op(
    "aristos::device_experts_backward_into", mutates_args=("main_up", "main_down"), tags=(torch.Tag.nondeterministic_seeded,)
)
def _backward_into(
    grad_output: Tensor,
    state: Tensor,
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    main_up: Tensor,
    main_down: Tensor,
    group: int,
    batch_group: int,
    activation: str,
    gated: bool,
    limit: float,
    limit_after: bool,
    plus_one: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form = (activation, gated, limit, limit_after, plus_one)
    tensors = (grad_output, state, x, weights, up, down, up_bias, down_bias)
    grad_x, grad_weights, grads = _run_backward(*tensors, group, batch_group, form, (main_up, main_down))
    return grad_x, grad_weights, grads[2], grads[3]


@_backward_into.register_fake
def _(grad_output, state, x, weights, up, down, up_bias, down_bias, *_):
    biases = [x.new_empty(0, dtype=torch.float32) if bias is None else bias.new_empty(bias.shape) for bias in (up_bias, down_bias)]
    return *(tensor.new_empty(tensor.shape) for tensor in (x, weights)), *biases


def _setup(ctx, inputs, output):
    x, _, weights, up, down, up_bias, down_bias = inputs[:7]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], x, weights, up, down, up_bias, down_bias)
    ctx.form = inputs[7:]
    ctx.spent = False


def main_grad(parameter):
    """Returns `main_grad`, the parameter's f32 sum of gradients in Megatron, if it exists and kernels can add to it in place, and otherwise
    None."""
    main = getattr(parameter, "main_grad", None)
    fits = main is not None and main.dtype == torch.float32 and main.is_contiguous() and main.data_ptr() % 16 == 0
    return main if fits and main.shape == parameter.shape else None


def _added(parameter):
    """Marks a parameter as one whose gradient is in `main_grad`. Returns the placeholder that Megatron's hooks expect, or None without
    Megatron."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(parameter)


def _backward_formula(ctx, grad_output, _):
    # The backward operators overwrite the state but do not declare it, because a compiler would then copy the state. No other operator
    # reads it.
    if ctx.spent:
        raise ValueError("a pass allows one backward, which overwrites its state, also with retain_graph=True: run the forward pass again")
    state, x, weights, up, down, up_bias, down_bias = ctx.saved_tensors
    # The backward pass must run even if the loss of this process does not depend on these experts, because it is collective and the loss of
    # another process may.
    if grad_output is None:
        grad_output = torch.zeros_like(x)
    tensors = (grad_output, state, x, weights, up, down, up_bias, down_bias)
    mains = main_grad(up), main_grad(down)
    if None in mains:
        grad_x, grad_weights, grad_up, grad_down, *biases = torch.ops.aristos.device_experts_backward(*tensors, *ctx.form)
    else:
        grad_x, grad_weights, *biases = torch.ops.aristos.device_experts_backward_into(*tensors, *mains, *ctx.form)
        grad_up, grad_down = _added(up), _added(down)
    ctx.spent = True
    grad_up_bias, grad_down_bias = biases if up_bias is not None else (None, None)
    return (grad_x, None, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias, *[None] * 7)


_forward.register_autograd(_backward_formula, setup_context=_setup)
