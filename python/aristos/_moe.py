"""A Mixture-of-Experts layer with router and shared expert."""

from typing import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from . import _group, _optimizers, _parameters, _replay
from ._experts import experts as run_experts
from ._parameters import local

# The parameters of the experts.
EXPERT_NAMES = ("gate_up_proj", "down_proj")


class MoE(nn.Module):
    """``sum over the top_k experts of weight * expert(x)``, plus a shared expert. This is the layer of Qwen2-MoE, and without the shared
    expert that of Mixtral.

    The experts are distributed over the group in contiguous blocks of equal size. Their weights, `gate_up_proj` and `down_proj`, are DTensors
    that are sharded over the group's mesh, `Group.mesh`, and plain tensors if the group has one process. Every process has a copy of the
    router and of the shared expert.

    The start weights depend on a number that the first process draws from torch's default generator. They do not depend on the generators
    of the other processes or on the number of processes. Creating a layer is therefore collective, except on the device "meta".
    `reset_parameters` draws new start weights.

    The gradients of the router and the shared expert cover only the tokens of this process, so the caller must average them, which DDP and
    FSDP do. The gradients of the experts are sums over the tokens of all processes. If the loss is a mean over processes, they must be
    divided by the group's size, by `mean_gradients=True` or by `scale_gradients`.

    A forward pass sets `aux_loss`, `z_loss` and `expert_tokens`. The two losses are multiplied by their coefficients, and are 0 if the
    coefficient is 0; the caller adds them to the model's loss. `expert_tokens`, [experts], is the number of this process's tokens per
    expert.

    Args:
        hidden: width of a token.
        intermediate: inner width of an expert.
        experts: number of experts, a multiple of the group's size.
        top_k: experts per token.
        group: a `Group`; the default has all processes.
        activation, gated: as for `experts`.
        scoring: "softmax" over all experts, or "sigmoid" per expert.
        normalise: whether the chosen scores are divided by their sum.
        shared_intermediate: inner width of the shared expert, or 0 if there is none. `shared_gate`: whether a sigmoid gate scales the
            output of the shared expert.
        aux_loss_coef: coefficient of the load-balancing loss (Fedus et al., Switch Transformers, section 2.2, summed over the top_k
            choices), which counts the tokens of the whole group. z_loss_coef: coefficient of the router z-loss (Zoph et al., ST-MoE,
            section 3.2, equation 5).
        mean_gradients: whether the gradients of the experts are divided by the group's size. Those of adapters on them are not.
        dtype, device: type and device of all weights. The type is float32 or bfloat16.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        group: _group.Group | None = None,
        activation: str = "silu",
        gated: bool = True,
        scoring: str = "softmax",
        normalise: bool = True,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        mean_gradients: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.group = group or _group.default()
        sizes = dict(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k, shared_intermediate=shared_intermediate)
        for name, value in sizes.items():
            least = 0 if name == "shared_intermediate" else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}, expected one of {', '.join(_ACTIVATIONS)}")
        if experts % self.group.size:
            raise ValueError(f"experts is {experts}, expected a multiple of {self.group.size}, the processes of the group")
        if top_k > experts:
            raise ValueError(f"top_k is {top_k}, expected 1 to {experts}, the number of experts")
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f'scoring is {scoring!r}, expected "softmax" or "sigmoid"')
        self.experts, self.top_k = experts, top_k
        self.activation, self.gated = activation, gated
        self.scoring, self.normalise = scoring, normalise
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, z_loss_coef
        self.mean_gradients = mean_gradients
        self.local = self.group.local_experts(experts)
        self.gate = _parameters.Linear(hidden, experts, dtype, device)
        wide = intermediate * (2 if gated else 1)
        for name, shape in zip(EXPERT_NAMES, ((wide, hidden), (hidden, intermediate))):
            block = torch.empty(len(self.local), *shape, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(_parameters.sharded(block, self.group)))
        self.shared_expert = _Mlp(hidden, shared_intermediate, activation, gated, dtype, device) if shared_intermediate else None
        self.shared_expert_gate = _parameters.Linear(hidden, 1, dtype, device) if shared_intermediate and shared_gate else None
        self.aux_loss = self.z_loss = self.expert_tokens = None
        self.reset_parameters()
        if self.group.size > 1:
            _optimizers.check_all()

    def reset_parameters(self) -> None:
        """Draws new start weights for the experts, the router and the shared expert. Collective, except on the device "meta", where it does
        nothing."""
        if self.down_proj.is_meta:
            return
        seed = _parameters.draw_seed(self.group)
        for name in EXPERT_NAMES:
            block = self.own_experts(name, self.get_parameter(name).detach())
            for expert, matrix in zip(self.local, block):
                matrix.copy_(_parameters.start_weights(matrix.shape, matrix.dtype, seed, name, expert))
        for name, part in self.named_modules():
            if isinstance(part, _parameters.Linear):
                part.place = (seed, name)
                part.reset_parameters()

    def own_experts(self, name: str, tensor: Tensor) -> Tensor:
        """This process's part of a parameter of the experts, or of a tensor like it."""
        block = local(tensor)
        if len(block) != len(self.local):
            raise ValueError(f"{name} has {len(block)} experts here, expected {len(self.local)}: the layer was sharded again, as by FSDP")
        return block

    def extra_repr(self) -> str:
        hidden, intermediate = self.down_proj.shape[1:]
        here = "" if len(self.local) == self.experts else f", here {self.local[0]} to {self.local[-1]}"
        form = f"activation={self.activation}, gated={self.gated}, scoring={self.scoring}, normalise={self.normalise}"
        return f"hidden={hidden}, intermediate={intermediate}, experts={self.experts}{here}, top_k={self.top_k}, {form}"

    def __getstate__(self):
        # The results of a pass are part of its graph, which cannot be copied.
        return self.__dict__ | dict(aux_loss=None, z_loss=None, expert_tokens=None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Computes the layer's output for [..., hidden], which has the same shape. Collective."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with record_function("aristos::gate"):
            logits = self.gate(x).float()
            scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
            weights, ids = scores.topk(self.top_k, dim=-1)
            if self.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        ids, weights = _replay.routed(self, self.group, ids, weights, self.experts)
        self._losses(logits, scores, ids)
        # The weights of the experts may have another type than x, because FSDP's mixed precision does not convert parameters that it ignores.
        # An attribute is the effective weight, also if a parametrization computes it.
        up, down = (local(getattr(self, name)).to(x.dtype) for name in EXPERT_NAMES)
        if self.mean_gradients:
            # If a parametrization computes a weight from adapters, DDP averages their gradients.
            up, down = (
                _parameters.Mean.apply(weight, self.group.size) if name in self._parameters else weight
                for name, weight in zip(EXPERT_NAMES, (up, down))
            )
        output = run_experts(x, ids, weights, up, down, group=self.group, activation=self.activation, gated=self.gated)
        if self.shared_expert is not None:
            with record_function("aristos::shared_expert"):
                shared = self.shared_expert(x)
                if self.shared_expert_gate is not None:
                    shared = self.shared_expert_gate(x).sigmoid() * shared
            output = output + shared
        # FSDP warns of outputs that are views, so this is done as in torch's linear layers.
        return torch.ops.aten._unsafe_view(output, hidden_states.shape)

    def _losses(self, logits, scores, ids):
        # Not by bincount, which waits for the device. A replay may have unset choices, -1.
        chosen = ids.reshape(-1)
        self.expert_tokens = ids.new_zeros(self.experts).scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).to(ids.dtype))
        self.aux_loss = self.z_loss = logits.new_zeros(())
        if self.aux_loss_coef:
            load = self.group.sum(torch.cat([self.expert_tokens, self.expert_tokens.new_full((1,), len(ids))]).double())
            share = (load[:-1] / load[-1].clamp(min=1)).float()
            probabilities = scores / scores.sum(-1, keepdim=True)
            mean = probabilities.sum(0) / max(1, len(ids))
            self.aux_loss = self.aux_loss_coef * self.experts * (share * mean).sum()
        if self.z_loss_coef:
            self.z_loss = self.z_loss_coef * logits.logsumexp(-1).square().sum() / max(1, len(ids))

    def scale_gradients(self) -> None:
        """Divides the gradients of the experts by the group's size. They are sums over the group, and the gradients of other parameters are
        averages."""
        if self.mean_gradients:
            raise RuntimeError("the gradients of the experts are divided already, because mean_gradients is True")
        for name in EXPERT_NAMES:
            if self.get_parameter(name).grad is not None:
                local(self.get_parameter(name).grad).div_(self.group.size)

    def matrices(self, prefix: str, up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
        """For each matrix of this process's experts, yields its name in a Hugging Face checkpoint and its view of `up` or `down`, which are
        this process's blocks of the parameters, or tensors like these."""
        inner = down.shape[2]
        for at, expert in enumerate(self.local):
            names = dict(gate_proj=up[at, :inner], up_proj=up[at, inner:]) if self.gated else dict(up_proj=up[at])
            for name, matrix in (names | dict(down_proj=down[at])).items():
                yield f"{prefix}experts.{expert}.{name}.weight", matrix

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        """Accepts the weights of all experts in two more forms: as plain tensors, and as a matrix per expert, as in Hugging Face
        checkpoints."""
        for name in EXPERT_NAMES:
            parameter, given = self.get_parameter(name), state_dict.get(prefix + name)
            if given is not None and not _parameters.is_dtensor(given) and given.shape == parameter.shape:
                block = given[self.local[0] : self.local[-1] + 1]
                state_dict[prefix + name] = _parameters.sharded(block, self.group)
        given = {name: state_dict[name] for name in state_dict if name.startswith(f"{prefix}experts.")}
        if given and not any(prefix + name in state_dict for name in EXPERT_NAMES):
            self._stack(given, state_dict, prefix, missing_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _stack(self, given, state_dict, prefix, missing_keys, error_msgs):
        """Replaces the matrices of experts in a state dict by this layer's parameters."""
        parameters = [self.get_parameter(name).detach() for name in EXPERT_NAMES]
        first = next(iter(given.values()))
        blocks = [torch.empty_like(local(parameter), dtype=first.dtype, device=first.device) for parameter in parameters]
        complete = True
        for name, matrix in self.matrices(prefix, *blocks):
            if name not in given:
                missing_keys.append(name)
            elif given[name].shape != matrix.shape:
                error_msgs.append(f"{name} has shape {list(given[name].shape)}, expected {list(matrix.shape)}")
            else:
                matrix.copy_(given[name])
                continue
            complete = False
        known = {f"{prefix}experts.{expert}." for expert in range(self.experts)}
        for name in given:
            if any(name.startswith(one) for one in known):
                del state_dict[name]
        for name, parameter, block in zip(EXPERT_NAMES, parameters, blocks):
            state_dict[prefix + name] = _parameters.sharded(block, self.group) if complete else parameter


_replay.finders.append(lambda module: (module, module.experts, 2) if isinstance(module, MoE) else None)


class _Mlp(nn.Module):
    def __init__(self, hidden, intermediate, activation, gated, dtype, device):
        super().__init__()
        self.gate_proj = _parameters.Linear(hidden, intermediate, dtype, device) if gated else None
        self.up_proj = _parameters.Linear(hidden, intermediate, dtype, device)
        self.down_proj = _parameters.Linear(intermediate, hidden, dtype, device)
        self.activation = activation

    def forward(self, x):
        if self.gate_proj is None:
            return self.down_proj(_ACTIVATIONS[self.activation](self.up_proj(x)))
        return self.down_proj(_ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
