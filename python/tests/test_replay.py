"""Tests of `aristos.record_routing` and `aristos.replay_routing`: `aristos.MoE` against a dense formula in float64, and models of transformers
against their own code in float64 with the routers replaced."""

import functools
import sys
from unittest import mock

import torch
import torch.distributed as dist
from harness import full, refused, relative_error
from test_transformers import batches_of, folder_of
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import aristos
from aristos import _moe, _replay
from aristos._experts import experts as run_experts

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 16, 24, 8, 2, 9
ALONE = aristos.Group.alone()


def moe_of(group=None, seed=3, **more):
    torch.manual_seed(seed)
    return aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group or aristos.init(), **more)


def batch(seed=11, tokens=TOKENS):
    torch.manual_seed(seed + 100 * dist.get_rank())
    return torch.randn(tokens, HIDDEN, requires_grad=True)


def drawn_ids(seed=5, tokens=TOKENS, experts=EXPERTS, top_k=TOP_K, unset=False):
    """Draws ids; with unset slots the first token has no expert, and the next ones lack one."""
    torch.manual_seed(seed + 100 * dist.get_rank())
    ids = torch.rand(tokens, experts).topk(top_k).indices
    if unset:
        ids[0], ids[1, 0], ids[2, -1] = -1, -1, -1
    return ids


def other_router(module):
    """Changes the weights of the router so that it chooses other experts."""
    with torch.no_grad():
        module.gate.weight.copy_(module.gate.weight.roll(3, 0))
    return module


def gradients(module):
    return {name: full(parameter.grad).clone() for name, parameter in module.named_parameters()}


def passes(module, *inputs, run=lambda module, x: module(x)):
    """Returns the outputs, the gradients of the inputs and those of the parameters, which belong to one backward of all passes."""
    module.zero_grad()
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = [run(module, x) for x in inputs]
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, *(x.grad for x in inputs), *gradients(module).values()]


def equal(got, want):
    """Checks that two lists of tensors have equal bits on all processes."""
    assert len(got) == len(want)
    differ = [None] * dist.get_world_size()
    dist.all_gather_object(differ, [number for number, (one, other) in enumerate(zip(got, want)) if not torch.equal(one, other)])
    assert not any(differ), differ


def dense(module, x, ids):
    """Returns the results of `passes` for this process's tokens by a formula in float64 over all experts."""
    names, whole = zip(*((name, full(parameter.detach()).double().requires_grad_()) for name, parameter in module.named_parameters()))
    gate, up, down = (dict(zip(names, whole))[name] for name in ("gate.weight", "gate_up_proj", "down_proj"))
    x = x.detach().double().requires_grad_()
    logits = x @ gate.T
    scores = logits.softmax(-1) if module.scoring == "softmax" else logits.sigmoid()
    chosen = torch.zeros_like(scores)
    for token, experts in enumerate(ids.tolist()):
        chosen[token, [expert for expert in experts if expert >= 0]] = 1
    weights = scores * chosen
    if module.normalise:
        weights = weights / weights.sum(-1, keepdim=True).masked_fill(chosen.sum(-1, keepdim=True) == 0, 1)
    gated, linear = torch.einsum("th,eih->tei", x, up).chunk(2, dim=-1)
    output = torch.einsum("tei,ehi,te->th", F.silu(gated) * linear, down, weights)
    output.square().sum().backward()
    for name, tensor in zip(names, whole):
        if name != "gate.weight":
            dist.all_reduce(tensor.grad)
    return [output, x.grad, *(tensor.grad for tensor in whole)]


def replayed_weights_are_the_routers_own():
    worst = 0
    for scoring, normalise in (("softmax", True), ("softmax", False), ("sigmoid", True)):
        for unset in (False, True):
            module, x, ids = moe_of(scoring=scoring, normalise=normalise, aux_loss_coef=0.01), batch(), drawn_ids(unset=unset)
            with aristos.replay_routing([ids]), aristos.record_routing() as layers, mock.patch.object(_moe, "run_experts", wraps=run_experts) as run:
                got = passes(module, x)
            assert torch.equal(layers[0], ids), "the experts are not the forced ones"
            _, _, weights, *_ = run.call_args.args
            assert torch.equal(weights == 0, ids < 0), "an unset slot has a weight"
            counts = torch.bincount(ids[ids >= 0], minlength=EXPERTS)
            assert torch.equal(module.expert_tokens, counts), (module.expert_tokens, counts)
            errors = [relative_error(one, other) for one, other in zip(got, dense(module, x, ids))]
            assert max(errors) <= 1e-5, errors
            assert not unset or not (got[0][0].any() or got[1][0].any()), "a token without experts has an output or a gradient"
            worst = max(worst, *errors)
    return f"{worst:.1e}"


def a_replay_has_the_bits_of_the_recorded_run():
    modules, x = [moe_of(seed=seed) for seed in (3, 4)], batch()
    both = torch.nn.Sequential(*modules)
    with aristos.record_routing() as layers:
        want = passes(both, x)
    assert [list(ids.shape) for ids in layers] == [[TOKENS, TOP_K]] * 2
    with aristos.replay_routing(layers):
        equal(passes(both, x), want)
    # Lists and other types of integers, as inference engines give, have the same meaning.
    with aristos.replay_routing([layers[0].tolist(), layers[1].to(torch.int16)]):
        equal(passes(both, x), want)
    # Other routers choose other experts, but not in a replay.
    for module in modules:
        other_router(module)
    with aristos.record_routing() as free:
        both(x)
    assert not torch.equal(free[0], layers[0]) and not torch.equal(free[1], layers[1])
    with aristos.replay_routing(layers), aristos.record_routing() as again:
        got = passes(both, x)
    equal(again, layers)
    assert not torch.equal(got[0], want[0]), "the weights are not the router's own"


def a_recording_of_one_process_replays_on_several():
    size, rank = dist.get_world_size(), dist.get_rank()
    single, spread = moe_of(ALONE), moe_of()
    torch.manual_seed(7)
    x = torch.randn(size * TOKENS, HIDDEN)
    with aristos.record_routing() as layers:
        single(x)
    other_router(single), other_router(spread)
    with aristos.replay_routing(layers):
        want = passes(single, x)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    with aristos.replay_routing([layers[0][mine]]):
        got = passes(spread, x[mine])
    # The last gradient is that of the router, which covers the tokens of this process only.
    dist.all_reduce(got[-1])
    errors = [relative_error(one, other) for one, other in zip(got, [want[0][mine], want[1][mine], *want[2:]])]
    assert max(errors) <= 1e-5, errors
    # The other direction.
    with aristos.record_routing() as layers:
        spread(x[mine])
    everyone = torch.cat([ids for (ids,) in aristos.init().gather(layers)])
    with aristos.replay_routing([everyone]), aristos.record_routing() as again:
        single(x)
    assert torch.equal(again[0], everyone)


def checkpointing_repeats_the_ids_of_the_first_pass():
    module, xs = moe_of(), [batch(seed) for seed in (11, 12, 13)]
    layers = [drawn_ids(seed, unset=seed == 2) for seed in (1, 2, 3)]
    with aristos.replay_routing(layers):
        want = passes(module, *xs)
    for reentrant in (False, True):
        run = functools.partial(checkpoint, use_reentrant=reentrant)
        with aristos.replay_routing(layers), aristos.record_routing() as again:
            equal(passes(module, *xs, run=run), want)
        assert len(again) == 3, f"{len(again)} passes were recorded"


def repeated_passes_without_their_ids_are_refused():
    module, x, ids = moe_of(), batch(), drawn_ids()
    for reentrant in (False, True):
        run = functools.partial(checkpoint, module, use_reentrant=reentrant)
        with aristos.replay_routing([ids]):
            output = run(x)
        refused(RuntimeError, ["MoE", "outside of replay_routing()", "call backward() inside"], output.sum().backward)
        run(x).sum().backward()
        with aristos.replay_routing([ids]):
            output = run(x)
            other_router(module)
            refused(RuntimeError, ["MoE", "none of 1 replayed passes"], output.sum().backward)
        with aristos.replay_routing([ids, drawn_ids(6)]):
            output = run(x) + run(x)
            refused(RuntimeError, ["layers[0] and layers[1] differ", "the scores of both"], output.sum().backward)
        with aristos.replay_routing([ids, ids]):
            (run(x) + run(x)).sum().backward()
        # Nested checkpoints repeat a pass twice.
        with aristos.replay_routing([ids]):
            checkpoint(run, x, use_reentrant=reentrant).sum().backward()


def wrong_ids_are_refused():
    module, x, ids = moe_of(), batch(), drawn_ids()

    def replay(layers, passes=1):
        with aristos.replay_routing(layers):
            for _ in range(passes):
                module(x)

    wrong = ids.clone()
    wrong[4, 1] = EXPERTS
    refused(ValueError, ["layers[0] has expert 8 for token 4", "expected 0 to 7, or -1"], lambda: replay([wrong]))
    wrong[4, 1] = -2
    refused(ValueError, ["layers[0] has expert -2 for token 4"], lambda: replay([wrong]))
    wrong[4] = 3
    refused(ValueError, ["token 4", "expert 3", "twice"], lambda: replay([wrong]))
    refused(ValueError, ["layers[0] has type torch.float32, expected integers"], lambda: replay([ids.float()]))
    refused(ValueError, ["layers[1] has shape [18], expected [tokens, top_k]"], lambda: replay([ids, ids.flatten()]))
    refused(ValueError, ["layers[0] has shape [8, 2], expected [9, 2]", "MoE"], lambda: replay([ids[1:]]))
    refused(ValueError, ["layers[0] has shape [9, 1], expected [9, 2]"], lambda: replay([ids[:, 1:]]))
    refused(ValueError, ["layers has 1 entries, but another forward pass of MoE"], lambda: replay([ids], 2))
    refused(ValueError, ["layers has 3 entries, but only 2 forward passes"], lambda: replay([ids] * 3, 2))
    refused(ValueError, ["layers has 1 entries, but only 0"], lambda: replay([ids], 0))
    with aristos.replay_routing([ids]):
        refused(RuntimeError, ["a replay is open already"], lambda: replay([ids]))
        module(x)

    def record():
        with aristos.record_routing():
            pass

    refused(ValueError, ["no forward pass was recorded"], record)
    # After every refusal, and after Ctrl-C in a pass, the layer works.
    with mock.patch.object(module.gate, "forward", side_effect=KeyboardInterrupt):
        try:
            replay([ids])
        except KeyboardInterrupt:
            pass
    assert _get_current_function_mode() is None, "an interception is left"
    replay([ids])


def routers_without_topk_are_refused():
    class Sorted(aristos.MoE):
        def forward(self, hidden_states):
            ids = self.gate(hidden_states).argsort(-1)[:, :TOP_K]
            return _replay.routed(self, self.group, ids, torch.ones(ids.shape), EXPERTS)[1]

    class Twice(aristos.MoE):
        def forward(self, hidden_states):
            self.gate(hidden_states).topk(TOP_K)
            return super().forward(hidden_states)

    class Changed(aristos.MoE):
        def forward(self, hidden_states):
            weights, ids = self.gate(hidden_states).topk(TOP_K)
            return _replay.routed(self, self.group, ids.flip(1), weights, EXPERTS)[1]

    group = aristos.init()
    for kind, times in ((Sorted, "0 times"), (Twice, "2 times"), (Changed, "1 times")):
        module = kind(HIDDEN, INNER, EXPERTS, TOP_K, group=group)

        def replay():
            with aristos.replay_routing([drawn_ids()]):
                module(batch())

        refused(NotImplementedError, [kind.__name__, "could not be intercepted", times], replay)


def compiled_layers_run_without_compilation():
    module, x, ids = moe_of(), batch(), drawn_ids()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    compiled(x)
    with aristos.replay_routing([ids]):
        want = passes(module, x)
    with aristos.replay_routing([ids]), aristos.record_routing() as layers:
        equal(passes(module, x, run=lambda _, x: compiled(x)), want)
    equal(layers, [ids])
    with aristos.record_routing() as layers:
        compiled(x)
    assert len(layers) == 1


# The weights that the routers of families give to chosen experts, from the logits [T, experts] and a mask of the chosen ones.
def normalised(scores, chosen):
    scores = scores * chosen
    return scores / scores.sum(-1, keepdim=True).masked_fill(chosen.sum(-1, keepdim=True) == 0, 1)


FORMULAS = dict(
    mixtral=lambda router, logits, chosen: normalised(logits.softmax(-1), chosen),
    qwen3_moe=lambda router, logits, chosen: normalised(logits.softmax(-1), chosen),
    deepseek_v3=lambda router, logits, chosen: normalised(logits.sigmoid(), chosen) * router.routed_scaling_factor,
    deepseek_v2=lambda router, logits, chosen: logits.softmax(-1) * chosen * router.routed_scaling_factor,
    gpt_oss=lambda router, logits, chosen: normalised(logits.exp(), chosen),
)


def forced_router(formula, entries, router):
    """Replaces a router by a formula with given ids."""

    def forward(hidden_states):
        ids = entries.pop(0)
        logits = F.linear(hidden_states.view(-1, hidden_states.shape[-1]), router.weight, getattr(router, "bias", None))
        chosen = torch.zeros_like(logits)
        for column in ids.T:
            rows = (column >= 0).nonzero().flatten()
            chosen[rows, column[rows]] = 1
        weights = formula(router, logits, chosen).gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0)
        return logits, weights, ids.clamp(min=0)

    router.forward = forward


def routers_of(model):
    return [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router")) and hasattr(module, "weight")]


def step(model, text):
    """Returns the logits, the gradients of a step, and the loss."""
    model.zero_grad()
    output = model(input_ids=text, labels=text)
    output.loss.backward()
    return [output.logits.detach(), *(full(p.grad).clone() for p in model.parameters() if p.grad is not None)]


def model_of(name, **how):
    return AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32, **how).train()


def transformers_model(name, mode):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        how = dict(experts_implementation="aristos")
    else:
        how = dict(distributed_config=DistributedConfig(ep_size=size, ep_implementation="aristos", **{f"{mode}_size": size}))
    model = model_of(name, **how)
    if name == "deepseek_v2":
        for router in routers_of(model):
            router.topk_method, router.num_group, router.topk_group = "group_limited_greedy", 4, 2
    text = batches_of(2 * size)[0]
    mine = text if mode == "tp" else text[2 * rank : 2 * rank + 2]
    with aristos.record_routing() as layers:
        want = step(model, mine)
    with aristos.replay_routing(layers):
        equal(step(model, mine), want)
    # Other experts than the router's, some of them unset.
    torch.manual_seed(0 if mode == "tp" else rank)
    forced = [torch.rand(len(ids), EXPERTS).topk(ids.shape[1]).indices for ids in layers]
    for ids in forced:
        ids[0], ids[1, 0], ids[2, -1] = -1, -1, -1
    # No intermediate value is NaN, also for the token without experts. torch cannot check DTensors.
    with aristos.replay_routing(forced), aristos.record_routing() as again, torch.autograd.set_detect_anomaly(size == 1):
        want = step(model, mine)
    equal(again, forced)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
        with aristos.replay_routing(forced):
            equal(step(model, mine), want)
    # The formula, for all tokens in one process.
    everyone = [forced] if mode == "tp" else aristos.init().gather(forced)
    entries = [torch.cat(parts) for parts in zip(*everyone)]
    reference = model_of(name, experts_implementation="eager").double()
    for router in routers_of(reference):
        forced_router(FORMULAS[name], entries, router)
    expected = step(reference, text)
    assert not entries and len(expected) == len(want)
    expected[0] = expected[0] if mode == "tp" else expected[0][2 * rank : 2 * rank + 2]
    errors = [relative_error(one, other) for one, other in zip(want, expected)]
    assert max(errors) <= 1e-5, errors
    return f"{max(errors):.1e}"


CASES = [
    replayed_weights_are_the_routers_own,
    a_replay_has_the_bits_of_the_recorded_run,
    a_recording_of_one_process_replays_on_several,
    checkpointing_repeats_the_ids_of_the_first_pass,
    repeated_passes_without_their_ids_are_refused,
    wrong_ids_are_refused,
    routers_without_topk_are_refused,
    compiled_layers_run_without_compilation,
]


def cases(wanted, size):
    """Returns the cases as (name, function) pairs, or only the wanted case."""
    found = [(case.__name__, case) for case in CASES]
    found += [(name, functools.partial(transformers_model, name, "fsdp")) for name in FORMULAS]
    found += [("deepseek_v3-tp", functools.partial(transformers_model, "deepseek_v3", "tp"))] if size > 1 else []
    return [(f"replay::{name}", case) for name, case in found if wanted in ("", name)] or sys.exit(f"no case replay:{wanted}")
