"""A Mixture-of-Experts layer with router and shared expert."""

from typing import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from . import _group, _optimizers, _parameters, _replay, _router, _routing
from ._experts import experts as run_experts
from ._parameters import local

# The parameters of the experts.
EXPERT_NAMES = ("gate_up_proj", "down_proj")
# The name of `correction_bias` in Hugging Face checkpoints.
BIAS_NAME = "gate.e_score_correction_bias"


class MoE(nn.Module):
    """``sum over the top_k experts of weight * expert(x)``, plus a shared expert. This is the layer of Qwen2-MoE, without the shared expert
    that of Mixtral, and with other options of the router those of Switch Transformers, DeepSeek-V2 and DeepSeek-V3.

    The experts are distributed over the group in contiguous blocks of equal size. Their weights, `gate_up_proj` and `down_proj`, are DTensors
    that are sharded over the group's mesh, `Group.mesh`, and plain tensors if the group has one process. Every process has a copy of the
    router and of the shared expert.

    The start weights depend on a number that the first process draws from torch's default generator. They do not depend on the generators
    of the other processes or on the number of processes. Creating a layer is therefore collective, except on the device "meta".
    `reset_parameters` draws new start weights.

    The gradients of the router and the shared expert cover only the tokens of this process, so the caller must average them, which DDP and
    FSDP do. The gradients of the experts are sums over the tokens of all processes. If the loss is a mean over processes, they must be
    divided by the group's size, by `mean_gradients=True` or by `scale_gradients`.

    A forward pass sets `aux_loss`, `z_loss`, `expert_tokens` and `dropped`. The losses are multiplied by their coefficients, and are 0 if
    the coefficients are 0; the caller adds them to the model's loss. `expert_tokens`, [experts], is the number of this process's tokens
    that chose each expert, and `dropped` the number of these choices beyond the capacity.

    Args:
        hidden: width of a token.
        intermediate: inner width of an expert.
        experts: number of experts, a multiple of the group's size.
        top_k: experts per token.
        group: a `Group`; the default has all processes.
        activation, gated: as for `experts`.
        scoring: "softmax" over all experts, or "sigmoid" per expert.
        normalise: whether the chosen scores are divided by their sum. scaling: a factor of the weights after that.
        correction_bias: whether the layer has the buffer `correction_bias`, float32, [experts]. It is added to the scores for the choice of
            experts, but not for their weights, and has no gradient. `update_correction_biases` changes it to balance the load without a
            loss (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).
        n_groups, top_groups: each token chooses its experts from the `top_groups` best of `n_groups` groups, which are contiguous and of
            equal size. group_score: the score of a group, "max" for that of its best expert (DeepSeek-V2), or "top2" for the sum of its
            best two (DeepSeek-V3). The scores include the bias.
        capacity_factor: each expert keeps the first ``ceil(capacity_factor * top_k * tokens / experts)`` tokens that chose it, counted over
            the group in the order of ranks and tokens, in training and in evaluation. The other choices are dropped: they contribute 0,
            and the token's other weights do not change. None: no limit.
        jitter: in training mode each element of the router's input is multiplied by a number drawn from 1 - jitter to 1 + jitter (Switch
            Transformers, section 2.4) with torch's generator of the device. The experts' input does not change.
        aux_loss_coef: coefficient of the load-balancing loss (Switch Transformers, section 2.2, summed over the top_k choices), which
            counts the tokens of the whole group. rank_aux_loss_coef: that of the same loss over this process's tokens only.
        sequence_aux_loss_coef: coefficient of DeepSeek-V3's loss over the tokens of each sequence, the second to last dimension of the
            layer's input, averaged over this process's sequences (arXiv 2412.19437, equations 17 to 20).
        z_loss_coef: coefficient of the router z-loss (Zoph et al., ST-MoE, section 3.2, equation 5).
        shared_intermediate: inner width of the shared expert, or 0 if there is none. shared_gate: whether a sigmoid gate scales the output
            of the shared expert.
        mean_gradients: whether the gradients of the experts are divided by the group's size. Those of adapters on them are not.
        dtype, device: type and device of all weights. The type is float32 or bfloat16.

    Raises:
        ValueError: if an option is invalid. The message names it.
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
        scaling: float = 1.0,
        correction_bias: bool = False,
        n_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2",
        capacity_factor: float | None = None,
        jitter: float = 0.0,
        aux_loss_coef: float = 0.0,
        rank_aux_loss_coef: float = 0.0,
        sequence_aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
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
        coefficients = dict(
            aux_loss_coef=aux_loss_coef,
            rank_aux_loss_coef=rank_aux_loss_coef,
            sequence_aux_loss_coef=sequence_aux_loss_coef,
            z_loss_coef=z_loss_coef,
        )
        _router.check(
            experts=experts,
            top_k=top_k,
            scoring=scoring,
            scaling=scaling,
            n_groups=n_groups,
            top_groups=top_groups,
            group_score=group_score,
            capacity_factor=capacity_factor,
            jitter=jitter,
            coefficients=coefficients,
        )
        self.experts, self.top_k = experts, top_k
        self.activation, self.gated = activation, gated
        self.scoring, self.normalise, self.scaling = scoring, normalise, scaling
        self.n_groups, self.top_groups, self.group_score = n_groups, top_groups, group_score
        self.capacity_factor, self.jitter = capacity_factor, jitter
        for name, value in coefficients.items():
            setattr(self, name, value)
        self.mean_gradients = mean_gradients
        self.local = self.group.local_experts(experts)
        self.gate = _parameters.Linear(hidden, experts, dtype, device)
        bias = torch.zeros(experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction_bias", bias)
        wide = intermediate * (2 if gated else 1)
        for name, shape in zip(EXPERT_NAMES, ((wide, hidden), (hidden, intermediate))):
            block = torch.empty(len(self.local), *shape, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(_parameters.sharded(block, self.group)))
        self.shared_expert = _Mlp(hidden, shared_intermediate, activation, gated, dtype, device) if shared_intermediate else None
        self.shared_expert_gate = _parameters.Linear(hidden, 1, dtype, device) if shared_intermediate and shared_gate else None
        self.aux_loss = self.z_loss = self.expert_tokens = self.dropped = None
        # The number of this process's tokens per expert since the last update of the bias, [experts]. Not a buffer, because DDP would
        # replace it by that of the first process.
        self.load = None
        self.reset_parameters()
        if self.group.size > 1:
            _optimizers.check_all()

    def reset_parameters(self) -> None:
        """Draws new start weights for the experts, the router and the shared expert, and sets the bias to 0. Collective, except on the device
        "meta", where it does nothing."""
        if self.down_proj.is_meta:
            return
        if self.correction_bias is not None:
            self.correction_bias.zero_()
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
        if self.n_groups > 1:
            form += f", n_groups={self.n_groups}, top_groups={self.top_groups}, group_score={self.group_score}"
        if self.capacity_factor is not None:
            form += f", capacity_factor={self.capacity_factor}"
        return f"hidden={hidden}, intermediate={intermediate}, experts={self.experts}{here}, top_k={self.top_k}, {form}"

    def _apply(self, fn, recurse=True):
        # In bfloat16 the bias would not change by an update's speed.
        bias = self.correction_bias
        super()._apply(fn, recurse)
        if bias is not None and self.correction_bias.dtype != bias.dtype:
            self.correction_bias = bias.to(self.correction_bias.device)
        return self

    def __getstate__(self):
        # The results of a pass are part of its graph, which cannot be copied.
        return self.__dict__ | dict(aux_loss=None, z_loss=None, expert_tokens=None, dropped=None, load=None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Computes the layer's output for [..., hidden], which has the same shape. Collective."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with record_function("aristos::gate"):
            logits = self.gate(_router.jittered(x, self.jitter) if self.training and self.jitter else x).float()
            scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
            ids = _router.choose(scores, self.top_k, self.correction_bias, self.n_groups, self.top_groups, self.group_score)
            weights = _router.weigh(scores, ids, self.normalise, self.scaling)
        chosen, weights = _replay.forced(self, ids, weights)
        ids, weights, counts = self._limited(chosen, weights)
        _routing.note(self, self.group, chosen, self.experts, None if self.capacity_factor is None else ids)
        self._losses(logits, scores, counts, hidden_states.shape[:-1])
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

    def _limited(self, ids, weights):
        """Counts the choices, and drops those beyond the capacity. Returns ids, weights, and the number of choices of each expert and of
        tokens, [experts + 1], over the group; None without a capacity and a loss that need them. Collective with one of these."""
        self.expert_tokens, self.dropped = _router.count(ids, self.experts), ids.new_zeros(())
        if self.training and self.correction_bias is not None and not _replay.is_repeated():
            if self.load is None or self.load.device != ids.device:
                # A tensor of inference mode could not be changed outside of it.
                with torch.inference_mode(False):
                    self.load = torch.zeros_like(self.expert_tokens)
            self.load.add_(self.expert_tokens)
        if self.capacity_factor is None and not self.aux_loss_coef:
            return ids, weights, None
        counts = torch.cat([self.expert_tokens, self.expert_tokens.new_full((1,), len(ids))])
        if self.capacity_factor is None:
            return ids, weights, self.group.sum(counts)
        by_rank = self.group.gather_tensors(counts)
        dropped = ~_router.within_capacity(ids, by_rank[:, :-1], self.group.rank, self.capacity_factor)
        self.dropped = dropped.sum()
        return ids.masked_fill(dropped, -1), weights.masked_fill(dropped, 0), by_rank.sum(0)

    def _losses(self, logits, scores, counts, shape):
        """Computes the losses, with the counts of `_limited`. `shape` is that of the input without its last dimension."""
        self.aux_loss = self.z_loss = logits.new_zeros(())
        if self.aux_loss_coef or self.rank_aux_loss_coef:
            probabilities = scores / scores.sum(-1, keepdim=True)
            if self.aux_loss_coef:
                self.aux_loss = self.aux_loss_coef * _router.balance_loss(counts[:-1], counts[-1], probabilities)
            if self.rank_aux_loss_coef:
                own = _router.balance_loss(self.expert_tokens, len(logits), probabilities)
                self.aux_loss = self.aux_loss + self.rank_aux_loss_coef * own
        if self.sequence_aux_loss_coef:
            length = shape[-1] if shape else 1
            by_sequence = scores.view(shape[:-1].numel(), length, self.experts)
            self.aux_loss = self.aux_loss + self.sequence_aux_loss_coef * _router.sequence_loss(by_sequence, self.top_k)
        if self.z_loss_coef:
            self.z_loss = self.z_loss_coef * logits.logsumexp(-1).square().sum() / max(1, len(logits))

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
        checkpoints. Accepts the bias by its name in these, too."""
        if self.correction_bias is not None and prefix + BIAS_NAME in state_dict:
            state_dict[f"{prefix}correction_bias"] = state_dict.pop(prefix + BIAS_NAME)
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
