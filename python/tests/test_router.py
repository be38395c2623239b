"""Tests of the router of `aristos.MoE`: against the models of transformers that published an option, otherwise against its formula in
float64, on all processes. Injected faults must fail the same comparisons."""

import copy
import itertools
import math
import sys
from unittest import mock

import torch
import torch.distributed as dist
from harness import full, refused, relative_error
from test_moe import ALONE, shared_folder
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV2Config, DeepseekV3Config, SwitchTransformersConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

import aristos
from aristos import _moe, _router

HIDDEN, INNER, EXPERTS, TOKENS = 16, 24, 8, 12
LIMIT = 1e-5
V3 = dict(scoring="sigmoid", correction_bias=True, n_groups=4, top_groups=2, scaling=2.5)
V2 = dict(normalise=False, n_groups=4, top_groups=2, group_score="max", scaling=1.5)


def moe_of(top_k=2, group=None, seed=3, **more):
    """A layer, whose router has scores that differ clearly and, if it has a bias, a random one."""
    torch.manual_seed(seed)
    module = aristos.MoE(HIDDEN, INNER, EXPERTS, top_k, group=group or aristos.init(), **more)
    with torch.no_grad():
        module.gate.weight.mul_(3)
        if module.correction_bias is not None:
            module.correction_bias.copy_(torch.randn(EXPERTS, generator=torch.Generator().manual_seed(5)) * 0.3)
    return module


def batch(rank=None, tokens=TOKENS, seed=11):
    """The tokens of a process, by default of this one."""
    torch.manual_seed(seed + 100 * (dist.get_rank() if rank is None else rank))
    return torch.randn(tokens, HIDDEN, requires_grad=True)


def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def everywhere(check):
    """Runs a check that does not communicate, and fails on all processes if it fails on one."""
    failure = None
    try:
        check()
    except AssertionError as error:
        failure = error
    failures = aristos.init().gather(failure and str(failure))
    assert not any(failures), next(one for one in failures if one)


def fails(check):
    """Checks that an injected fault is detected."""
    try:
        check()
    except AssertionError:
        return
    raise AssertionError("the fault was not detected")


def gradients_of(module, x, output, extra=0):
    """Runs backward and returns the output, the gradient of x, and those of all parameters, the experts' of all processes."""
    (output.square().sum() + extra).backward()
    return dict(output=output, x=x.grad) | {name: full(parameter.grad) for name, parameter in module.named_parameters()}


def compare(got, want):
    errors = {name: relative_error(got[name], want[name]) for name in want}
    everywhere(lambda: [_assert(error <= LIMIT, f"{name}: {error:.1e}") for name, error in errors.items()])
    return max(errors.values())


def _assert(condition, text):
    assert condition, text


def loaded(model, module):
    """Copies a layer's weights to a layer of transformers without shared experts, and returns it with the names of the copies."""
    names = {"gate.weight": "gate.weight", "experts.gate_up_proj": "gate_up_proj", "experts.down_proj": "down_proj"}
    state = {theirs: full(module.get_parameter(own).detach()) for theirs, own in names.items()}
    if module.correction_bias is not None:
        state["gate.e_score_correction_bias"] = module.correction_bias
    model.load_state_dict(state, strict=False)
    model.shared_experts = nn.Module()
    model.shared_experts.forward = torch.zeros_like
    return model, names


def equals_transformers(model, module):
    model, names = loaded(model, module)
    x = batch()
    theirs = x.detach().clone().requires_grad_()
    want = gradients_of(model, theirs, model(theirs[None])[0])
    for name, own in names.items():
        grad = want.pop(name)
        want[own] = grad if own == "gate.weight" else summed(grad)
    return compare(gradients_of(module, x, module(x)), want)


def deepseek_v3():
    sizes = dict(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, num_local_experts=EXPERTS, n_shared_experts=1)
    routing = dict(num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True)
    return DeepseekV3MoE(DeepseekV3Config(**sizes, **routing))


def equals_deepseek_v3():
    worst = equals_transformers(deepseek_v3(), moe_of(3, **V3))
    choose, weigh = _router.choose, _router.weigh

    def biased(scores, *rest):
        bias = moe_of(3, **V3).correction_bias
        return weigh(scores + bias, *rest)

    with mock.patch.object(_router, "weigh", biased):
        fails(lambda: equals_transformers(deepseek_v3(), moe_of(3, **V3)))
    with mock.patch.object(_router, "choose", lambda *args: choose(*args[:-1], "max")):
        fails(lambda: equals_transformers(deepseek_v3(), moe_of(3, **V3)))
    return f"{worst:.1e}"


def deepseek_v2():
    sizes = dict(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, num_experts=EXPERTS, n_shared_experts=1)
    routing = dict(num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=1.5, topk_method="group_limited_greedy")
    return DeepseekV2Moe(DeepseekV2Config(num_attention_heads=4, num_key_value_heads=4, **sizes, **routing))


def equals_deepseek_v2():
    worst = equals_transformers(deepseek_v2(), moe_of(3, **V2))
    fails(lambda: equals_transformers(deepseek_v2(), moe_of(3, **V2 | dict(group_score="top2"))))
    return f"{worst:.1e}"


def choice(scores, top_k, bias, n_groups, top_groups, group_score):
    """The experts of a token, by lists of numbers: those with the highest scores in the best groups."""
    scores = [score + one for score, one in zip(scores, bias)]
    size = len(scores) // n_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    best = {"max": 1, "top2": 2}[group_score]
    groups.sort(key=lambda group: -sum(sorted(scores[expert] for expert in group)[-best:]))
    eligible = [expert for group in groups[:top_groups] for expert in group]
    return sorted(eligible, key=lambda expert: -scores[expert])[:top_k]


def formula(module, xs):
    """The results of `gradients_of` for this process, by a formula in float64 over all tokens, `xs` by process, and all experts. Also the
    number of choices that each process dropped, and the chosen experts of all tokens."""
    rank, top_k = dist.get_rank(), module.top_k
    whole = {name: full(parameter.detach()).double().requires_grad_() for name, parameter in module.named_parameters()}
    xs = [x.detach().double().requires_grad_() for x in xs]
    x = torch.cat(xs)
    logits = x @ whole["gate.weight"].T
    scores = logits.softmax(-1) if module.scoring == "softmax" else logits.sigmoid()
    bias = [0.0] * EXPERTS if module.correction_bias is None else module.correction_bias.tolist()
    limit = math.inf if module.capacity_factor is None else math.ceil(module.capacity_factor * top_k * len(x) / EXPERTS)
    mask, kept, load, dropped, chosen = torch.zeros_like(scores), torch.zeros_like(scores), [0] * EXPERTS, [], []
    owners = [owner for owner, of_owner in enumerate(xs) for _ in of_owner]
    for token, (owner, of_token) in enumerate(zip(owners, scores.tolist())):
        chosen.append(choice(of_token, top_k, bias, module.n_groups, module.top_groups, module.group_score))
        for expert in chosen[-1]:
            mask[token, expert] = 1
            kept[token, expert] = load[expert] < limit
            dropped += [owner] * (load[expert] >= limit)
            load[expert] += 1
    weights = scores * mask
    if module.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * kept * module.scaling
    gated, linear = torch.einsum("th,eih->tei", x, whole["gate_up_proj"]).chunk(2, dim=-1)
    outputs = torch.einsum("tei,ehi,te->th", F.silu(gated) * linear, whole["down_proj"], weights).split([len(one) for one in xs])
    # The experts' gradients are sums over all tokens, the router's cover those of this process.
    grads = torch.autograd.grad(sum(one.square().sum() for one in outputs), [whole["gate_up_proj"], whole["down_proj"]], retain_graph=True)
    own = torch.autograd.grad(outputs[rank].square().sum(), [xs[rank], whole["gate.weight"]])
    found = dict(zip(("output", "gate_up_proj", "down_proj", "x", "gate.weight"), (outputs[rank], *grads, *own)))
    return found, [dropped.count(owner) for owner in range(len(xs))], chosen


def options_equal_their_formula():
    worst = 0
    for scoring, score, normalise, bias in itertools.product(("softmax", "sigmoid"), ("max", "top2"), (True, False), (True, False)):
        for groups, capacity in (((4, 3), None), ((2, 1), 0.7)):
            options = dict(scoring=scoring, group_score=score, normalise=normalise, correction_bias=bias, scaling=1.25)
            module = moe_of(3, n_groups=groups[0], top_groups=groups[1], capacity_factor=capacity, **options)
            want, dropped, _ = formula(module, [batch(rank) for rank in range(dist.get_world_size())])
            x = batch()
            worst = max(worst, compare(gradients_of(module, x, module(x)), want))
            assert module.dropped.item() == dropped[dist.get_rank()]
    return f"{worst:.1e}"


def capacity_counts_over_all_tokens():
    """Processes have different numbers of tokens, and one of them has none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [batch(of_rank, 0 if of_rank == 2 else 9 + 7 * of_rank) for of_rank in range(size)]

    def check(factor, top_k):
        # With one expert, which has the whole weight, the router would have no gradient.
        module = moe_of(top_k, capacity_factor=factor, normalise=top_k > 1)
        want, dropped, _ = formula(module, xs)
        x = xs[rank].detach().clone().requires_grad_()
        compare(gradients_of(module, x, module(x)), want)
        everywhere(lambda: _assert(module.dropped.item() == dropped[rank], f"{module.dropped.item()} dropped, expected {dropped[rank]}"))
        return sum(dropped)

    totals = [check(factor, top_k) for factor, top_k in ((0.3, 1), (0.8, 2), (1.0, 3), (8.0, 2))]
    assert totals[0] > totals[-1] == 0 and all(totals[:-1]), totals
    if size > 1:
        # Each process drops by its own counts.
        with mock.patch.object(aristos.Group, "gather_tensors", lambda self, values: torch.stack([values] * self.size)):
            fails(lambda: check(0.8, 2))
    return f"{totals} dropped"


def switch(capacity, jitter=0.0):
    config = SwitchTransformersConfig(
        hidden_size=HIDDEN, d_model=HIDDEN, num_experts=EXPERTS, expert_capacity=capacity, router_jitter_noise=jitter, router_bias=False
    )
    return SwitchTransformersTop1Router(config)


def routing_of(module, x):
    """Returns the ids and weights with which the experts run."""
    with mock.patch.object(_moe, "run_experts", wraps=_moe.run_experts) as run:
        module(x)
    return run.call_args.args[1:3]


def capacity_equals_switch_transformers():
    """All tokens of the group, in the order of ranks, are a sequence of Switch Transformers."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.cat([batch(of_rank) for of_rank in range(size)]).detach()
    for capacity in (1, 2, 4):
        factor = capacity * EXPERTS / len(x)
        module, router = moe_of(1, normalise=False, capacity_factor=factor), switch(capacity)
        router.classifier.weight.data.copy_(module.gate.weight)
        mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
        chosen, probability, _ = router(x[None].clone())
        chosen, probability = chosen[0, mine], probability[0, mine]
        kept = chosen.sum(-1, keepdim=True) > 0
        ids, weights = routing_of(module, x[mine])
        everywhere(lambda: _assert(torch.equal(ids, torch.where(kept, chosen.argmax(-1, keepdim=True), -1)), "other experts"))
        assert torch.allclose(weights, probability * kept) and module.dropped == (~kept).sum()


def dropped_choices_are_counted_and_recorded():
    module, x = moe_of(2, capacity_factor=0.6), batch()
    xs = [batch(rank) for rank in range(dist.get_world_size())]
    _, dropped, chosen = formula(module, xs)
    aristos.step_metrics()
    routing = aristos.Routing()
    with routing.step(0), aristos.record_routing() as recorded:
        checkpoint(module, x, use_reentrant=False).sum().backward()
    found = aristos.step_metrics(per_expert=True)
    assert found["layer0/dropped"] == sum(dropped) > 0, (found, dropped)
    assert found["layer0/tokens"] == torch.tensor(chosen).flatten().bincount(minlength=EXPERTS).tolist()
    assert "layer1/dropped" not in found
    # The simulator's file has the choices that were sent, a replay those of the router.
    (_, (sent,)), = routing._steps
    assert (sent == -1).sum() == module.dropped == dropped[dist.get_rank()] and (recorded[0] >= 0).all()
    want = routing_of(module, x)
    with aristos.replay_routing(recorded):
        got = routing_of(module, x)
    assert all(torch.equal(*pair) for pair in zip(got, want))
    moe_of()(x)
    aristos.step_metrics()


def bias_follows_the_load_of_all_processes():
    size = dist.get_world_size()

    def check(group=None, counted=None):
        module = moe_of(2, group, **V3)
        # DDP copies buffers from the first process before each pass.
        model = DistributedDataParallel(aristos.exclude_experts(module))
        seeds, load = (11, 12, 13, 14), torch.zeros(EXPERTS, dtype=torch.int64)
        for seed in seeds:
            ids = torch.tensor(formula(module, [batch(rank, seed=seed) for rank in range(size)])[2])
            load += ids.flatten().bincount(minlength=EXPERTS)
        with torch.inference_mode():
            module(batch(seed=seeds[3]))
        # Passes in evaluation and repeated ones do not count.
        model.eval()(batch(seed=15))
        model.train()
        checkpoint(module, batch(seed=seeds[0]), use_reentrant=False).sum().backward()
        before = module.correction_bias.clone()
        for seed in seeds[1:3]:
            model(batch(seed=seed)).sum().backward()
        aristos.update_correction_biases(model, 0.01, counted)
        after = module.correction_bias.clone()
        want = before + 0.01 * (load.double().mean() - load).sign().float()
        everywhere(lambda: _assert(torch.equal(after, want), f"{after - before} for {load}"))
        # The next update starts from 0.
        aristos.update_correction_biases(model, 0.01, counted)
        everywhere(lambda: _assert(torch.equal(after, module.correction_bias), "the load was not reset"))

    check()
    if size == 4:
        # Two groups with replicas of the experts.
        pairs = aristos.Group(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"])
        check(pairs, aristos.init())
        fails(lambda: check(pairs))
    if size > 1:
        with mock.patch.object(aristos.Group, "sum", lambda self, values: values):
            fails(check)


def replayed_weights_are_without_the_bias():
    options = V3 | dict(sequence_aux_loss_coef=0.1)
    ids = torch.rand(TOKENS, EXPERTS).topk(2).indices
    ids[0], ids[1, 0] = -1, -1

    def check():
        module, x = moe_of(2, **options), batch()
        with aristos.replay_routing([ids]):
            got, weights = routing_of(module, x)
        scores = module.gate(x).sigmoid().gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0)
        want = 2.5 * scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
        everywhere(lambda: _assert(torch.equal(got, ids) and torch.allclose(weights, want), "other weights"))

    check()
    weigh, bias = _router.weigh, moe_of(2, **options).correction_bias
    with mock.patch.object(_router, "weigh", lambda scores, *rest: weigh(scores + bias, *rest)):
        fails(check)


def updates_balance_the_load():
    module = moe_of(2, scoring="sigmoid", correction_bias=True)
    module.correction_bias.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer.register_step_post_hook(lambda *_: aristos.update_correction_biases(module, 0.01))
    x, largest = batch(tokens=256) + 0.5, []
    for _ in range(100):
        module(x)
        load = summed(module.expert_tokens)
        largest.append((load.max() / load.double().mean()).item())
        optimizer.step()
    assert largest[0] > 1.5 and max(largest[-10:]) < 1.15, (largest[0], largest[-10:])
    biases = module.group.gather(module.correction_bias)
    assert all(torch.equal(one, biases[0]) for one in biases)
    return f"largest load over the mean {largest[0]:.2f} to {largest[-1]:.2f}"


def processes_without_a_pass_update_too():
    layers = nn.ModuleList([moe_of(2, correction_bias=True), moe_of(2), moe_of(1, correction_bias=True, scoring="sigmoid")])
    x = batch(tokens=30)
    layers[0](x)
    sums, kinds = [], aristos.Group.sum
    with mock.patch.object(aristos.Group, "sum", lambda self, values: sums.append(values) or kinds(self, values)):
        aristos.update_correction_biases(layers)
    assert len(sums) == 1, "more than one message"
    assert torch.equal(layers[2].correction_bias, moe_of(1, correction_bias=True).correction_bias)
    assert not torch.equal(layers[0].correction_bias, moe_of(2, correction_bias=True).correction_bias)
    refused(ValueError, ["no aristos.MoE with a bias", "correction_bias=True"], lambda: aristos.update_correction_biases(layers[1]))
    refused(ValueError, ["speed is -1"], lambda: aristos.update_correction_biases(layers, -1))


def the_bias_is_saved_and_stays_float32():
    module, folder = moe_of(2, **V3), shared_folder()
    bias = module.correction_bias.clone()
    assert torch.equal(module.state_dict()["correction_bias"], bias) and "correction_bias" not in dict(module.named_parameters())
    module(batch())
    for one in (copy.deepcopy(module), copy.deepcopy(module).bfloat16(), copy.deepcopy(module).to(torch.float16)):
        assert torch.equal(one.correction_bias, bias) and one.correction_bias.dtype == torch.float32 and one.load is None
    aristos.save(module, folder)
    for group in (aristos.init(), ALONE):
        other = moe_of(2, group, seed=4, **V3)
        other.reset_parameters()
        assert not other.correction_bias.any()
        aristos.load(other, folder)
        assert torch.equal(other.correction_bias, bias)
    # The file has the name of transformers' models.
    model = {name: tensor for name, tensor in module.state_dict().items() if name != "correction_bias"}
    other = moe_of(2, seed=4, **V3)
    other.reset_parameters()
    other.load_state_dict(model | {_moe.BIAS_NAME: bias})
    assert torch.equal(other.correction_bias, bias)
    with open(f"{folder}/model.safetensors.index.json") as index:
        assert f'"{_moe.BIAS_NAME}"' in index.read()
    with torch.device("meta"):
        on_meta = moe_of(2, **V3)
    aristos.load(on_meta, folder)
    assert torch.equal(on_meta.correction_bias, bias)


def loss_and_grad(module, x):
    module.zero_grad()
    module(x)
    module.aux_loss.backward()
    return dict(loss=module.aux_loss, gate=module.gate.weight.grad)


def losses_equal_their_formulas():
    size, rank = dist.get_world_size(), dist.get_rank()
    worst = 0
    for scoring, top_k in (("softmax", 2), ("sigmoid", 3)):
        base = dict(scoring=scoring)
        length = TOKENS // 3
        xs = [batch(of_rank).detach().view(3, length, HIDDEN) for of_rank in range(size)]
        module = moe_of(top_k, **base)

        def scored(x):
            gate = module.gate.weight.detach().double().requires_grad_()
            logits = x.double() @ gate.T
            scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
            return gate, logits, scores, scores / scores.sum(-1, keepdim=True)

        def formula_of(loss, gate):
            loss.backward()
            return dict(loss=loss, gate=gate.grad)

        # DeepSeek-V3, equations 17 to 20, sequence by sequence and token by token.
        gate, _, scores, probabilities = scored(xs[rank])
        loss = 0
        for of_sequence, shares in zip(scores.tolist(), probabilities):
            chosen = [expert for token in of_sequence for expert in choice(token, top_k, [0.0] * EXPERTS, 1, 1, "max")]
            for expert in range(EXPERTS):
                share = EXPERTS / (top_k * length) * chosen.count(expert)
                loss = loss + share * shares[:, expert].mean() / 3
        sequences = formula_of(0.1 * loss, gate)
        # A bias and groups change the choice of experts, but not the loss.
        for more in (dict(), dict(correction_bias=True, n_groups=2)):
            module = moe_of(top_k, sequence_aux_loss_coef=0.1, **base, **more)
            worst = max(worst, compare(loss_and_grad(module, xs[rank]), sequences))
        fails(lambda: compare(loss_and_grad(module, xs[rank].flatten(0, 1)), sequences))

        def switch_loss(x):
            gate, logits, _, probabilities = scored(x.flatten(0, -2))
            if scoring == "softmax":
                # transformers computes it in float32.
                return formula_of(0.2 * load_balancing_loss_func((logits,), EXPERTS, top_k), gate)
            load = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1).mean(0)
            return formula_of(0.2 * EXPERTS * (load * probabilities.mean(0)).sum(), gate)

        own, whole = switch_loss(xs[rank]), switch_loss(torch.cat(xs))
        worst = max(worst, compare(loss_and_grad(moe_of(top_k, rank_aux_loss_coef=0.2, **base), xs[rank]), own))
        # The mean over the processes, which have equal numbers of tokens, is the loss of all tokens.
        means = lambda found: {name: summed(one.detach()) / size for name, one in found.items()}
        for more in (dict(), dict(capacity_factor=1.0)):
            found = loss_and_grad(moe_of(top_k, aux_loss_coef=0.2, **base, **more), xs[rank])
            worst = max(worst, compare(means(found), whole))
        if size > 1:
            fails(lambda: compare(means(own), whole))
        both = loss_and_grad(moe_of(top_k, rank_aux_loss_coef=0.2, sequence_aux_loss_coef=0.1, **base), xs[rank])
        compare(both, {name: own[name] + sequences[name] for name in own})
    return f"{worst:.1e}"


def batches_without_tokens_have_no_loss():
    options = dict(aux_loss_coef=0.1, rank_aux_loss_coef=0.1, sequence_aux_loss_coef=0.1, capacity_factor=0.5, jitter=0.1, **V3)
    for shape in ((0, HIDDEN), (0, 5, HIDDEN), (3, 0, HIDDEN)):
        module, x = moe_of(**options), torch.zeros(shape, requires_grad=True)
        output = module(x)
        (output.sum() + module.aux_loss).backward()
        aristos.update_correction_biases(module)
        assert output.shape == x.shape and module.aux_loss == 0 and module.dropped == 0 and not full(module.down_proj.grad).any()


def jitter_equals_switch_transformers():
    eps, seed = 0.3, 21 + dist.get_rank()
    x = batch().detach()
    for training in (True, False):
        module, router = moe_of(1, normalise=False, jitter=eps).train(training), switch(TOKENS, eps).train(training)
        router.classifier.weight.data.copy_(module.gate.weight)
        torch.manual_seed(seed)
        chosen, probability, _ = router(x[None].clone())
        torch.manual_seed(seed)
        ids, weights = routing_of(module, x)
        assert torch.equal(ids, chosen[0].argmax(-1, keepdim=True)) and torch.allclose(weights, probability[0])
        torch.manual_seed(seed)
        without = routing_of(moe_of(1, normalise=False), x)[1]
        assert torch.equal(weights, without) != training
    noise = _router.jittered(torch.ones(100_000), eps)
    assert 1 - eps <= noise.min() < 1 - 0.99 * eps and 1 + 0.99 * eps < noise.max() <= 1 + eps
    assert abs(noise.mean() - 1) < 0.005 and abs(noise.std() - eps / 3**0.5) < 0.005
    assert _router.jittered(x.bfloat16(), eps).dtype == torch.bfloat16
    # The experts see the unchanged tokens, and a repeated pass the same noise.
    module = moe_of(2, jitter=eps)
    grads = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        module.zero_grad()
        torch.manual_seed(seed)
        with mock.patch.object(_moe, "run_experts", wraps=_moe.run_experts) as experts:
            run(x).square().sum().backward()
        assert all(torch.equal(call.args[0], x) for call in experts.call_args_list)
        grads.append(module.gate.weight.grad)
    assert torch.equal(*grads)


ALL = dict(
    V3, aux_loss_coef=0.1, rank_aux_loss_coef=0.1, sequence_aux_loss_coef=0.1, z_loss_coef=0.01, capacity_factor=0.7, mean_gradients=True
)


def compiled_routers_equal_eager():
    module = moe_of(3, **ALL)
    x = batch().detach().view(2, -1, HIDDEN)
    outputs, grads = [], []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        module.load = None
        for _ in range(2):
            output = call(x)
            (output.square().sum() + module.aux_loss).backward()
        outputs.append((output, module.aux_loss, module.dropped, module.load))
        grads.append({name: full(parameter.grad) for name, parameter in module.named_parameters()})
        module.zero_grad()
    # The capacity may drop tokens of the last processes only.
    assert summed(outputs[0][2]) > 0 and all(torch.equal(*pair) for pair in zip(*outputs)), outputs
    errors = {name: relative_error(grads[1][name], grad) for name, grad in grads[0].items()}
    assert max(errors.values()) <= 1e-6, errors


def routers_do_not_wait_for_a_device():
    """On the device "meta" each read of a value by the host is an error. A group of several processes cannot sum tensors there."""
    with torch.device("meta"):
        module, x = moe_of(3, ALONE, jitter=0.1, **ALL), torch.empty(2, 3, HIDDEN, requires_grad=True)
    output = module(x)
    (output.sum() + module.aux_loss).backward()
    aristos.update_correction_biases(module)
    assert output.shape == x.grad.shape == x.shape


def wrong_options_are_refused():
    for words, options in [
        (["top_k is 9"], dict(top_k=9)),
        (['scoring is \'tanh\', expected "softmax" or "sigmoid"'], dict(scoring="tanh")),
        (['group_score is \'sum\', expected "max" or "top2"'], dict(group_score="sum")),
        (["scaling is 0, expected"], dict(scaling=0)),
        (["n_groups is 3, expected a divisor of 8"], dict(n_groups=3)),
        (["n_groups is 8, expected at most 4"], dict(n_groups=8, top_groups=8)),
        (["top_groups is 1, expected 2 to 4", "top_k is 3"], dict(n_groups=4, top_k=3)),
        (["top_groups is 5, expected 1 to 4"], dict(n_groups=4, top_groups=5)),
        (["capacity_factor is 0, expected"], dict(capacity_factor=0)),
        (["capacity_factor is nan"], dict(capacity_factor=math.nan)),
        (["jitter is 1, expected"], dict(jitter=1)),
        (["sequence_aux_loss_coef is -1"], dict(sequence_aux_loss_coef=-1)),
    ]:
        refused(ValueError, words, lambda: moe_of(**options))


CASES = [
    equals_deepseek_v3,
    equals_deepseek_v2,
    options_equal_their_formula,
    capacity_counts_over_all_tokens,
    capacity_equals_switch_transformers,
    dropped_choices_are_counted_and_recorded,
    bias_follows_the_load_of_all_processes,
    replayed_weights_are_without_the_bias,
    updates_balance_the_load,
    processes_without_a_pass_update_too,
    the_bias_is_saved_and_stays_float32,
    losses_equal_their_formulas,
    batches_without_tokens_have_no_loss,
    jitter_equals_switch_transformers,
    compiled_routers_equal_eager,
    routers_do_not_wait_for_a_device,
    wrong_options_are_refused,
]


def cases(wanted, size):
    """Returns the cases as (name, function) pairs, or only the wanted case."""
    found = [(f"router::{case.__name__}", case) for case in CASES if wanted in ("", case.__name__)]
    return found or sys.exit(f"no case router:{wanted}")
