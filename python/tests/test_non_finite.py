"""Tests of `aristos.detect_non_finite`: a value that is not finite is planted on one process, and all processes must name it."""

import warnings

import torch
import transformers
from harness import full, refused
from torch.utils.checkpoint import checkpoint

import aristos
from aristos._parameters import local

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 8, 12, 8, 2, 10
NAN = float("nan")


class Model(torch.nn.Module):
    """Two layers with residual connections."""

    def __init__(self, again=False, **options):
        super().__init__()
        torch.manual_seed(3)
        group = aristos.init()
        self.layers = torch.nn.ModuleList(aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group, **options) for _ in range(2))
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return x


def batch():
    torch.manual_seed(5 + aristos.init().rank)
    return torch.randn(TOKENS, HIDDEN, requires_grad=True)


def last():
    """Whether this is the last process, on which faults are planted, and its number."""
    group = aristos.init()
    return group.rank == group.size - 1, group.size - 1


def named(model, x, words, **options):
    """Checks that a step raises an error with these words on every process."""

    def step():
        with aristos.detect_non_finite(**options) as watch:
            loss = model(x).square().mean()
            watch.check("loss", loss)
            loss.backward()

    return refused(FloatingPointError, words, step)


def a_token_is_named():
    x, (here, rank) = batch(), last()
    if here:
        x.data[3, 5] = NAN
    row = "hidden_states has 1 value that is not finite, nan at token 3, element 5: "
    named(Model(), x, [row + f"step 7, rank {rank}, layer 0"], step=7)


def a_weight_is_named():
    for name, place in (("down_proj", (1, 2)), ("gate_up_proj", (0, 3))):
        model, (here, rank) = Model(), last()
        layer = model.layers[1]
        expert = EXPERTS - 1
        if here:
            local(layer.get_parameter(name).data)[-1][place] = -float("inf")
        element = place[0] * layer.get_parameter(name).shape[2] + place[1]
        said = named(model, batch(), [f"{name} has 1 value that is not finite, -inf at expert {expert}, element {element}: rank {rank}, layer 1"])
    return said


def a_routing_weight_is_named():
    model, (here, rank) = Model(), last()
    if here:
        model.layers[0].gate.weight.data[:] = NAN
    words = f"routing_weights has {TOKENS * TOP_K} values that are not finite, the first nan at token 0, element 0: rank {rank}, layer 0"
    named(model, batch(), [words])


def a_loss_is_named():
    model, x, (here, rank) = Model(), batch(), last()

    def step():
        with aristos.detect_non_finite(step=0) as watch:
            loss = model(x).mean() * (NAN if here else 1)
            watch.check("loss", loss)
            loss.backward()

    refused(FloatingPointError, [f"loss has 1 value that is not finite, nan at element 0: step 0, rank {rank}"], step)


def a_gradient_is_named():
    for again in (False, True):
        model, x, (here, rank) = Model(again), batch(), last()

        def step():
            with aristos.detect_non_finite():
                planted = torch.ones(TOKENS, HIDDEN)
                planted[4, 6] = NAN if here else 1
                model(x).backward(planted)

        words = f"the gradient of output has 1 value that is not finite, nan at token 4, element 6: rank {rank}, layer 1"
        refused(FloatingPointError, [words], step)


def an_overflowed_gradient_is_named_with_its_expert():
    here, rank = last()
    group = aristos.init()
    own = EXPERTS // group.size
    up, down = (torch.full(shape, 1e-10, requires_grad=True) for shape in ((own, 2 * INNER, HIDDEN), (own, HIDDEN, INNER)))
    # The output is finite, and its product with the gradient of the output is not.
    x = torch.full((1, HIDDEN), 1e20 if here else 0.0)
    grad = torch.full((1, HIDDEN), 1e30)
    chosen = EXPERTS - 2 if own > 1 else EXPERTS - 1

    def step():
        with aristos.detect_non_finite():
            aristos.experts(x, torch.tensor([[chosen]]), torch.ones(1, 1), up, down, group=group, activation="relu").backward(grad)

    said = refused(FloatingPointError, ["the gradient of ", f"the first inf at expert {chosen}, element 0: rank {rank}"], step)
    assert "layer" not in said, said
    return said


def unset_choices_may_have_any_weight():
    group = aristos.init()
    own = EXPERTS // group.size
    up, down = torch.randn(own, 2 * INNER, HIDDEN), torch.randn(own, HIDDEN, INNER)
    ids, weights = torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[0.5, NAN], [NAN, NAN]])
    with aristos.detect_non_finite() as watch:
        aristos.experts(torch.randn(2, HIDDEN), ids, weights, up, down, group=group)
    assert watch.found is None


def a_finite_step_is_unchanged():
    results = []
    for watched in (False, True):
        model, x = Model(mean_gradients=True), batch()
        watch = aristos.detect_non_finite()
        if watched:
            watch.__enter__()
        output = model(x)
        output.square().sum().backward()
        if watched:
            watch.__exit__(None, None, None)
        assert watch.found is None
        results.append([output, x.grad, *(full(parameter.grad) for parameter in model.parameters())])
    assert all(torch.equal(plain, other) for plain, other in zip(*results))


def warn_goes_on():
    model, x, (here, rank) = Model(), batch(), last()
    if here:
        x.data[0, 0] = NAN
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with aristos.detect_non_finite("warn") as watch:
            model(x)
    assert f"rank {rank}, layer 0" in watch.found, watch.found
    said = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert said == ([watch.found] if aristos.init().rank == 0 else []), said
    # The next step has no fault.
    with aristos.detect_non_finite() as watch:
        model(batch())
    assert watch.found is None


def an_error_inside_is_not_replaced():
    def step():
        with aristos.detect_non_finite():
            raise KeyError("mine")

    refused(KeyError, ["mine"], step)
    with aristos.detect_non_finite():
        refused(RuntimeError, ["open already, leave it first"], aristos.detect_non_finite().__enter__)
    refused(ValueError, ["action is 'halt', expected \"stop\" or \"warn\""], lambda: aristos.detect_non_finite("halt"))


def a_layer_of_transformers_is_named():
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, vocab_size=32
    )
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="aristos")
    here, rank = last()
    if here:
        model.model.layers[1].mlp.experts.down_proj.data[2, 0, 1] = NAN

    def step():
        ids = torch.arange(6)[None]
        with aristos.detect_non_finite():
            model(ids, labels=ids).loss.backward()

    refused(FloatingPointError, [f"down_proj has 1 value that is not finite, nan at expert 2, element 1: rank {rank}, layer 1"], step)


CASES = [
    a_token_is_named,
    a_weight_is_named,
    a_routing_weight_is_named,
    a_loss_is_named,
    a_gradient_is_named,
    an_overflowed_gradient_is_named_with_its_expert,
    unset_choices_may_have_any_weight,
    a_finite_step_is_unchanged,
    warn_goes_on,
    an_error_inside_is_not_replaced,
    a_layer_of_transformers_is_named,
]


def cases(wanted, size):
    """Returns the cases as (name, function) pairs, or only the wanted case."""
    return [(f"non_finite::{case.__name__}", case) for case in CASES if wanted in ("", case.__name__)]
