"""Experts over a group of processes, by the caller's routing, as one autograd operation."""

import torch

from . import _aristos
from ._group import Group

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Experts:
    """The routed experts of one layer, spread over a group in even contiguous blocks.

    Args:
        group: the processes that share them.
        hidden: width of a token.
        intermediate: inner width of an expert.
        experts: number of experts, of all processes together.
        top_k: experts of a token.
        activation: "silu", "gelu", "gelu-tanh" or "relu".
        gated: whether an expert is ``down(act(gate(x)) * up(x))``; otherwise ``down(act(up(x)))``.
        max_tokens: the most tokens that a process brings to a pass. By default the most that any brings to the first.
        shares_batch: whether every process has the same tokens (tensor parallelism); each then computes a part.
    """

    def __init__(
        self,
        group: Group,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        activation: str = "silu",
        gated: bool = True,
        max_tokens: int | None = None,
        shares_batch: bool = False,
    ):
        self.group = group
        self.shape = dict(
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            top_k=top_k,
            activation=activation,
            gated=gated,
        )
        self.max_tokens = max_tokens
        self.shares_batch = shares_batch
        self._local = _aristos.local_experts(experts, group.rank, group.size)
        self._layer = None
        self._dtype = None

    def __call__(self, x, ids, weights, up, down):
        """``sum over a token's experts of weight * expert(x)``. Collective; differentiable in x, weights, up and down.

        Args:
            x: tokens, [T, hidden], float32 or bfloat16.
            ids: their experts, [T, top_k], integers; -1 is none. No expert twice for a token.
            weights: the experts' weights, [T, top_k].
            up: this process's experts' [E_local, 2 * intermediate, hidden], gate then up; without gate [E_local, intermediate, hidden].
            down: [E_local, hidden, intermediate].

        Returns:
            [T, hidden], of x's type.

        Raises:
            ValueError: a type, shape or expert that does not fit.
            AristosError: another process did not do its part in time; the layer is then not usable.
        """
        self._check(x, ids, weights, up, down)
        if not self.shares_batch:
            return _Pass.apply(x, ids, weights, up, down, self)
        return _SharedPass.apply(x, ids, weights, up, down, self)

    def _check(self, x, ids, weights, up, down):
        s, k = self.shape, self.shape["top_k"]
        local = len(self._local)
        wide = s["intermediate"] * (2 if s["gated"] else 1)
        if x.dim() != 2 or x.shape[1] != s["hidden"]:
            raise ValueError(f"x has shape {list(x.shape)}, expected [T, {s['hidden']}]")
        tokens = x.shape[0]
        for name, tensor, shape in (
            ("ids", ids, [tokens, k]),
            ("weights", weights, [tokens, k]),
            ("up", up, [local, wide, s["hidden"]]),
            ("down", down, [local, s["hidden"], s["intermediate"]]),
        ):
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {shape}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"x has type {x.dtype}, expected float32 or bfloat16")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids has type {ids.dtype}, expected integers")
        for name, tensor in (("up", up), ("down", down)):
            if tensor.dtype != x.dtype:
                raise ValueError(f"{name} has type {tensor.dtype}, expected {x.dtype}, as x has")
        for name, tensor in (("x", x), ("ids", ids), ("weights", weights), ("up", up), ("down", down)):
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} is on {tensor.device}, expected cpu: this wheel has no CUDA devices")

    def _ready(self, x):
        """The native layer. Collective in the first pass."""
        if self._layer is None:
            if self.max_tokens is None:
                self.max_tokens = max(1, self.group.largest(x.shape[0]))
            self._layer = _aristos.Layer(
                self.group.next_key(),
                self.group.rank,
                self.group.size,
                dtype=_DTYPES[x.dtype],
                max_tokens=self.max_tokens,
                wait_limit_s=self.group.wait_limit,
                **self.shape,
            )
            self._dtype = x.dtype
        if x.dtype != self._dtype:
            raise ValueError(f"x has type {x.dtype}, but the layer was made for {self._dtype}")
        if x.shape[0] > self.max_tokens:
            raise ValueError(f"{x.shape[0]} tokens, expected at most {self.max_tokens}, the layer's max_tokens")
        return self._layer

    def _load(self, up, down):
        """Gives the native layer these weights.

        In every forward pass: what an optimizer does to a DTensor does not raise the version of the tensor that it wraps, which is all
        that is seen here, so that no counter says when weights are stale.
        """
        for expert, projection, matrix in self._matrices(up.contiguous(), down.contiguous()):
            self._layer.set_weight(expert, projection, matrix.data_ptr())

    def _matrices(self, up, down):
        """The native layer's matrices in these tensors: expert, projection and view."""
        inner = self.shape["intermediate"]
        for local, expert in enumerate(self._local):
            if self.shape["gated"]:
                yield expert, "gate", up[local, :inner]
                yield expert, "up", up[local, inner:]
            else:
                yield expert, "up", up[local]
            yield expert, "down", down[local]


def _forward(ctx, layer, x, ids, weights, up, down):
    native = layer._ready(x)
    layer._load(up, down)
    x, ids = x.contiguous(), ids.to(torch.int32).contiguous()
    weights32 = weights.float().contiguous()
    output = torch.empty(x.shape, dtype=torch.float32)
    ctx.pass_ = native.forward(x.shape[0], x.data_ptr(), ids.data_ptr(), weights32.data_ptr(), output.data_ptr())
    ctx.layer = layer
    ctx.weights_dtype = weights.dtype
    ctx.save_for_backward(x, up, down)
    return output.to(x.dtype)


def _backward(ctx, grad_output):
    layer = ctx.layer
    x, up, down = ctx.saved_tensors
    native = layer._layer
    grad_output = grad_output.to(x.dtype).contiguous()
    grad_x = torch.empty(x.shape, dtype=torch.float32)
    grad_weights = torch.empty((x.shape[0], layer.shape["top_k"]), dtype=torch.float32)
    native.backward(ctx.pass_, x.data_ptr(), grad_output.data_ptr(), grad_x.data_ptr(), grad_weights.data_ptr())
    grad_up = torch.empty(up.shape, dtype=torch.float32)
    grad_down = torch.empty(down.shape, dtype=torch.float32)
    for expert, projection, matrix in layer._matrices(grad_up, grad_down):
        native.gradient(expert, projection, matrix.data_ptr())
    return (
        grad_x.to(x.dtype),
        grad_weights.to(ctx.weights_dtype),
        grad_up.to(up.dtype),
        grad_down.to(down.dtype),
    )


class _Pass(torch.autograd.Function):
    """Every process has tokens of its own."""

    @staticmethod
    def forward(ctx, x, ids, weights, up, down, layer):
        return _forward(ctx, layer, x, ids, weights, up, down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        grad_x, grad_weights, grad_up, grad_down = _backward(ctx, grad_output)
        return grad_x, None, grad_weights, grad_up, grad_down, None


class _SharedPass(torch.autograd.Function):
    """Every process has the same tokens: each brings a part, and all get all results."""

    @staticmethod
    def forward(ctx, x, ids, weights, up, down, layer):
        ctx.counts = [len(part) for part in torch.arange(x.shape[0]).tensor_split(layer.group.size)]
        start = sum(ctx.counts[: layer.group.rank])
        ctx.mine = slice(start, start + ctx.counts[layer.group.rank])
        output = _forward(ctx, layer, x[ctx.mine], ids[ctx.mine], weights[ctx.mine], up, down)
        return layer.group.gather_rows(output, ctx.counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        grad_x, grad_weights, grad_up, grad_down = _backward(ctx, grad_output[ctx.mine])
        gather = ctx.layer.group.gather_rows
        return gather(grad_x, ctx.counts), None, gather(grad_weights, ctx.counts), grad_up, grad_down, None
