"""A Mixture-of-Experts layer with router and shared expert."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from . import _group, _routing
from ._experts import experts as run_experts


class MoE(nn.Module):
    """``sum over the top_k experts of weight * expert(x)``, plus a shared expert. This is the layer of Qwen2-MoE, and without the shared
    expert that of Mixtral.

    The experts are distributed over the group in contiguous blocks of equal size. Every process has a copy of the router and of the shared
    expert. The gradients of the experts are sums over the tokens of all processes. The gradients of the router and the shared expert cover
    only the tokens of this process, so the caller must average them. If the loss is a mean over processes, the caller must also divide the
    gradients of the experts by the group's size, which `scale_gradients` does.

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
        dtype: type of all weights, float32 or bfloat16.
    """

    def __init__(
        self,
        hidden,
        intermediate,
        experts,
        top_k,
        *,
        group=None,
        activation="silu",
        gated=True,
        scoring="softmax",
        normalise=True,
        shared_intermediate=0,
        shared_gate=False,
        aux_loss_coef=0.0,
        z_loss_coef=0.0,
        dtype=torch.float32,
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
        self.local = self.group.local_experts(experts)
        self.gate = nn.Linear(hidden, experts, bias=False, dtype=dtype)
        wide = intermediate * (2 if gated else 1)
        self.gate_up_proj = nn.Parameter(_uniform(len(self.local), wide, hidden, dtype))
        self.down_proj = nn.Parameter(_uniform(len(self.local), hidden, intermediate, dtype))
        self.shared_expert = _Mlp(hidden, shared_intermediate, activation, gated, dtype) if shared_intermediate else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False, dtype=dtype) if shared_intermediate and shared_gate else None
        self.aux_loss = self.z_loss = self.expert_tokens = None

    def forward(self, hidden_states):
        """Computes the layer's output for [..., hidden], which has the same shape. Collective."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x).float()
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        weights, ids = scores.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        self._losses(logits, scores, ids)
        _routing.note(ids)
        form = dict(activation=self.activation, gated=self.gated)
        output = run_experts(x, ids, weights, self.gate_up_proj, self.down_proj, group=self.group, **form)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(x).sigmoid() * shared
            output = output + shared
        return output.reshape(hidden_states.shape)

    def _losses(self, logits, scores, ids):
        self.expert_tokens = torch.bincount(ids.reshape(-1), minlength=self.experts)
        self.aux_loss = self.z_loss = logits.new_zeros(())
        if self.aux_loss_coef:
            load = self.group.sum(torch.cat([self.expert_tokens, self.expert_tokens.new_tensor([len(ids)])]).double())
            share = (load[:-1] / load[-1].clamp(min=1)).float()
            probabilities = scores / scores.sum(-1, keepdim=True)
            mean = probabilities.sum(0) / max(1, len(ids))
            self.aux_loss = self.aux_loss_coef * self.experts * (share * mean).sum()
        if self.z_loss_coef:
            self.z_loss = self.z_loss_coef * logits.logsumexp(-1).square().sum() / max(1, len(ids))

    def scale_gradients(self):
        """Divides the gradients of the experts by the group's size. They are sums over the group, and the gradients of other parameters are
        averages."""
        for parameter in (self.gate_up_proj, self.down_proj):
            if parameter.grad is not None:
                parameter.grad /= self.group.size

    def _matrices(self, prefix):
        """For each matrix of this process's experts, yields its name in a Hugging Face checkpoint and a view of the parameter."""
        inner = self.down_proj.shape[2]
        for local, expert in enumerate(self.local):
            names = {"gate_proj": self.gate_up_proj[local, :inner], "up_proj": self.gate_up_proj[local, inner:]}
            if not self.gated:
                names = {"up_proj": self.gate_up_proj[local]}
            names["down_proj"] = self.down_proj[local]
            for name, matrix in names.items():
                yield f"{prefix}experts.{expert}.{name}.weight", matrix

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for name, matrix in self._matrices(prefix):
            destination[name] = matrix if keep_vars else matrix.detach()

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs):
        for name, matrix in self._matrices(prefix):
            if name not in state_dict:
                missing_keys.append(name)
            elif state_dict[name].shape != matrix.shape:
                got, want = list(state_dict[name].shape), list(matrix.shape)
                error_msgs.append(f"{name} has shape {got}, expected {want}")
            else:
                with torch.no_grad():
                    matrix.copy_(state_dict[name])
        if strict:
            known = {f"{prefix}experts.{e}." for e in range(self.experts)}
            for name in state_dict:
                if name.startswith(f"{prefix}experts.") and not any(name.startswith(one) for one in known):
                    unexpected_keys.append(name)


class _Mlp(nn.Module):
    def __init__(self, hidden, intermediate, activation, gated, dtype):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype) if gated else None
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, dtype=dtype)
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


def _uniform(experts, out, width, dtype):
    """Weights initialised like those of nn.Linear."""
    bound = 1 / math.sqrt(width)
    return torch.empty(experts, out, width, dtype=dtype).uniform_(-bound, bound)
