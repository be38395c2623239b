"""Tests of the operators on an emulated device, in which the kernels of a GPU compute with tensors on the CPU. The wheel must be built with
the feature `emulate`."""

import os
import threading

import test_replay
import torch
import torch.distributed as dist
from harness import refused, relative_error
from test_experts import EXPERTS, HIDDEN, INNER, TOP_K, Problem, matches, tokens_of
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import aristos
from aristos import _aristos, _group, _moe

BF16, F16 = torch.bfloat16, torch.float16
# The largest relative errors of values and of gradients, compared with float64.
LIMIT = {BF16: 2e-2, F16: 3e-3}


def grads(problem):
    return [leaf.grad for leaf in problem.leaves()]


def step_of(problem, **form):
    output = problem.experts(**form)
    output.backward(problem.grad)
    return output


def right(problem, output):
    return matches(problem, output, grads(problem), LIMIT[problem.x.dtype])


def wrong(problem, output):
    """Checks that an injected fault is detected."""
    try:
        right(problem, output)
    except AssertionError:
        return
    raise AssertionError("the fault was not seen")


def equal_in(dtype):
    def case():
        problem = Problem(dtype)
        return right(problem, step_of(problem))

    return case


def equal_on_hopper():
    os.environ["ARISTOS_DEVICE"] = "emulated-hopper"
    try:
        return equal_in(BF16)()
    finally:
        os.environ["ARISTOS_DEVICE"] = "emulated"


def equal_with_narrow_ids():
    problem = Problem(BF16)
    problem.ids = problem.ids.to(torch.int32)
    return right(problem, step_of(problem))


def memory_is_not_copied():
    """A pass allocates only its results and one state, because weights and rows are read in place."""
    problem = Problem(BF16)
    step_of(problem)
    seen = []
    run = _aristos.DeviceLayer.forward

    class Spy:
        def __init__(self, native):
            self.native = native

        def state_bytes(self):
            return self.native.state_bytes()

        def forward(self, tokens, tensors, experts, state, **more):
            seen.append((tensors, experts, more))
            return run(self.native, tokens, tensors, experts, state, **more)

        def backward(self, *args, **more):
            return self.native.backward(*args, **more)

    group = _group.default()
    before = dict(group._layers)
    group._layers = {key: [(Spy(native), most) for native, most in layers] for key, layers in before.items()}
    try:
        problem.experts()
    finally:
        group._layers = before
    (tensors, experts, more), = seen
    assert tensors[:2] == [problem.x.data_ptr(), problem.ids.data_ptr()], "rows or ids were copied"
    assert experts == [problem.up.data_ptr(), problem.down.data_ptr(), 0, 0], "weights were copied"
    assert more == dict(wide_ids=True, stream=None), more


def losses(device, steps=20, stale=False):
    """Returns the losses of some steps of SGD, which changes the weights in place."""
    os.environ["ARISTOS_DEVICE"] = device
    problem = Problem(BF16, seed=5)
    old = [leaf.detach().clone() for leaf in (problem.up, problem.down)]
    target = Problem(BF16, seed=6).x.detach()
    optimizer = torch.optim.SGD([problem.up, problem.down], lr=0.1)
    all_losses = []
    for step in range(steps):
        if step == steps // 2:
            # Some frameworks give parameters new storage.
            problem.up.data = problem.up.data.clone()
        up, down = old if stale else (problem.up, problem.down)
        output = aristos.experts(problem.x, problem.ids, problem.w, up, down)
        loss = (output.float() - target.float()).square().mean()
        optimizer.zero_grad()
        if not stale:
            loss.backward()
            optimizer.step()
        all_losses.append(loss.item())
    os.environ["ARISTOS_DEVICE"] = "emulated"
    return torch.tensor(all_losses)


def training_follows_the_cpu_engine():
    want, got, stale = losses("cpu"), losses("emulated"), losses("emulated", stale=True)
    error = ((got - want).abs() / want).max().item()
    assert want[-1] < 0.95 * want[0], f"the loss does not fall: {want.tolist()}"
    assert error <= 1e-2, error
    assert ((stale - want).abs() / want).max() > 0.1, "stale weights were not seen"
    return f"{error:.1e}"


def checkpointed(reentrant):
    def case():
        problem = Problem(BF16)
        run = lambda x, w, up, down: aristos.experts(x, problem.ids, w, up, down)
        output = checkpoint(run, *problem.leaves(), use_reentrant=reentrant)
        output.backward(problem.grad)
        return right(problem, output)

    return case


def backwards_in_any_order():
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        problems = [Problem(BF16, seed=seed) for seed in range(3)]
        outputs = [problem.experts() for problem in problems]
        for index in order:
            outputs[index].backward(problems[index].grad)
        for problem, output in zip(problems, outputs):
            right(problem, output)


def one_layer_twice_in_a_step():
    problem = Problem(BF16)
    (problem.experts() + problem.experts()).backward(problem.grad)
    once = Problem(BF16)
    step_of(once)
    for twice, leaf in zip(problem.leaves(), once.leaves()):
        assert relative_error(twice.grad, 2 * leaf.grad) <= 1e-2


def backward_in_another_thread():
    problem, raised = Problem(BF16), []
    output = problem.experts()

    def run():
        try:
            output.backward(problem.grad)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not raised, raised
    return right(problem, output)


def saved_tensors_may_move():
    problem = Problem(BF16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        output = problem.experts()
    output.backward(problem.grad)
    return right(problem, output)


def overwritten_state_is_seen():
    """The injected fault: the memory of the state is reused before the backward pass."""
    problem, states = Problem(BF16), []

    def keep(tensor):
        if tensor.dtype == torch.uint8:
            states.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = problem.experts()
    (state,) = states
    # Sets the activations of the forward pass to a NaN of bf16. They come after the words that control the kernels.
    words = state[: state.numel() // 2 * 2].view(torch.int16)
    values = words.view(BF16).float()
    activations = (values.abs() > 1e-3) & (values.abs() < 1e3)
    words[activations] = 0x7FC0
    output.backward(problem.grad)
    wrong(problem, output)


def second_backward_is_refused():
    problem = Problem(BF16)
    output = problem.experts()
    output.backward(problem.grad, retain_graph=True)
    refused(ValueError, ["a pass allows one backward", "retain_graph"], lambda: output.backward(problem.grad))
    problem = Problem(BF16)
    return right(problem, step_of(problem))


def gradients_are_added_to_main_grad():
    problem = Problem(BF16)
    mains = [torch.zeros(leaf.shape) for leaf in (problem.up, problem.down)]
    for leaf, main in zip((problem.up, problem.down), mains):
        leaf.main_grad, leaf.grad_added_to_main_grad = main, False
    output = problem.experts()
    output.backward(problem.grad)
    assert problem.up.grad_added_to_main_grad and problem.down.grad_added_to_main_grad
    right_mains = lambda scale: matches(problem, output, [problem.x.grad, problem.w.grad, *(main / scale for main in mains)], LIMIT[BF16])
    right_mains(1)
    problem.x.grad = problem.w.grad = None
    problem.experts().backward(problem.grad)
    note = right_mains(2)
    # The injected fault: a gradient is added twice.
    problem.experts().backward(problem.grad)
    try:
        right_mains(2)
    except AssertionError:
        return note
    raise AssertionError("a gradient added twice was not seen")


def operators_pass_opcheck():
    problem = Problem(BF16)
    group = _group.default()
    arguments = (problem.x, problem.ids, *problem.leaves()[1:], None, None, group.number, -1, "silu", True, 0.0, False, False)
    # The test that compares all results with those of a trace is left out, because a state has words that no kernel writes.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.aristos.device_experts.default, arguments, test_utils=checks)


def compile_has_no_graph_break(dynamic):
    def case():
        problem = Problem(BF16)
        aristos.init()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def twice(x, ids, w, up, down):
            return aristos.experts(x * 2, ids, w, up, down) + aristos.experts(x * 2, ids, w, up, down)

        output = twice(problem.x, problem.ids, problem.w, problem.up, problem.down)
        output.backward(problem.grad)
        eager = Problem(BF16)
        x = eager.x * 2
        want = sum(aristos.experts(x, eager.ids, eager.w, eager.up, eager.down) for _ in range(2))
        want.backward(eager.grad)
        errors = [relative_error(output, want)] + [relative_error(g, w) for g, w in zip(grads(problem), grads(eager))]
        assert max(errors) <= 1e-2, errors

    return case


def biases_and_forms():
    problem = Problem(BF16)
    local, wide, hidden = problem.up.shape
    gen = torch.Generator().manual_seed(3 + dist.get_rank())
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(BF16).requires_grad_()
    up_bias, down_bias = draw(local, wide), draw(local, hidden)
    for form in (dict(), dict(gated=False, activation="gelu")):
        up = problem.up if form == {} else problem.up[:, : wide // 2].detach().requires_grad_()
        bias = up_bias if form == {} else up_bias[:, : wide // 2].detach().requires_grad_()
        results = []
        for device in ("emulated", "cpu"):
            os.environ["ARISTOS_DEVICE"] = device
            leaves = [leaf.detach().clone().requires_grad_() for leaf in (problem.x, problem.w, up, problem.down, bias, down_bias)]
            x, w, one_up, one_down, *biases = leaves
            output = aristos.experts(x, problem.ids, w, one_up, one_down, up_bias=biases[0], down_bias=biases[1], **form)
            output.backward(problem.grad)
            results.append([output] + [leaf.grad for leaf in leaves])
        errors = [relative_error(got, want) for got, want in zip(*results)]
        assert max(errors) <= LIMIT[BF16], errors


def batch_of_a_group():
    """Processes that have the same tokens compute a part of them each."""
    group = _group.default()
    problem = Problem(BF16)
    output = aristos.experts(problem.all_x, problem.all_ids, problem.all_w, problem.up, problem.down, batch_group=group)
    want, _ = problem.wanted()
    error = relative_error(output[problem.mine], want)
    assert error <= LIMIT[BF16], error


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Eager:
    """Takes the place of `aristos.experts` in a layer: plain torch in float64, on all experts, whose weights are gathered."""

    def __init__(self):
        self.whole = []

    def __call__(self, x, ids, weights, up, down, **_):
        size = dist.get_world_size()
        self.whole = []
        for part in (up, down):
            parts = [torch.empty_like(part) for _ in range(size)]
            dist.all_gather(parts, part.detach().contiguous())
            self.whole.append(torch.cat(parts).double().requires_grad_())
        (up, down), x, output = self.whole, x.double(), 0
        for k in range(ids.shape[1]):
            gate, wide = torch.einsum("th,toh->to", x, up[ids[:, k]]).chunk(2, -1)
            output = output + weights[:, k, None] * torch.einsum("ti,thi->th", F.silu(gate) * wide, down[ids[:, k]])
        return output.to(BF16)

    def gradients(self):
        """This process's part of the gradients of the experts, summed over all processes' tokens."""
        for whole in self.whole:
            dist.all_reduce(whole.grad)
        return [whole.grad.chunk(dist.get_world_size())[dist.get_rank()] for whole in self.whole]


def moe_step(run=None):
    """Returns the output of a layer with router and shared expert, and the gradients of x, of the experts, and of its other parameters."""
    torch.manual_seed(7)
    layer = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, shared_intermediate=INNER, shared_gate=True, aux_loss_coef=0.1, dtype=BF16)
    torch.manual_seed(8 + dist.get_rank())
    x = torch.randn(tokens_of(dist.get_rank()), HIDDEN).to(BF16).requires_grad_()
    original = _moe.run_experts
    _moe.run_experts = run or original
    try:
        output = layer(x)
    finally:
        _moe.run_experts = original
    (output.float().square().sum() + layer.aux_loss).backward()
    experts = [layer.gate_up_proj, layer.down_proj]
    parts = run.gradients() if run else [local(parameter.grad) for parameter in experts]
    return [output, x.grad, *parts] + [p.grad for p in layer.parameters() if all(p is not expert for expert in experts)]


def moe_equals_eager():
    eager = Eager()
    errors = [relative_error(got, want) for got, want in zip(moe_step(), moe_step(eager), strict=True)]
    assert max(errors) <= LIMIT[BF16], errors
    return f"{max(errors):.1e}"


def replayed_routing_has_unset_slots():
    """A layer with forced experts, some of them unset, gives the results of the CPU's experts."""
    results = []
    for device in ("cpu", "emulated"):
        os.environ["ARISTOS_DEVICE"] = device
        module = test_replay.moe_of(dtype=BF16)
        ids, x = test_replay.drawn_ids(unset=True), test_replay.batch().to(BF16)
        with aristos.replay_routing([ids]):
            results.append(test_replay.passes(module, x))
    output, grad_x = results[1][:2]
    assert not output[0].any() and not grad_x[0].any(), "a token without experts has an output or a gradient"
    errors = [relative_error(got, want) for got, want in zip(results[1], results[0], strict=True)]
    assert max(errors) <= LIMIT[BF16], errors
    return f"{max(errors):.1e}"


def routers_drop_choices():
    """A layer with a bias, groups and a capacity gives the results of the CPU's experts."""
    results = []
    for device in ("cpu", "emulated"):
        os.environ["ARISTOS_DEVICE"] = device
        module = test_replay.moe_of(dtype=BF16, scoring="sigmoid", correction_bias=True, n_groups=2, scaling=1.5, capacity_factor=0.5)
        module.correction_bias.copy_(torch.arange(test_replay.EXPERTS) / 50)
        results.append(test_replay.passes(module, test_replay.batch().to(BF16)))
        dropped = module.dropped.clone()
        dist.all_reduce(dropped)
        assert dropped > 0
    errors = [relative_error(got, want) for got, want in zip(results[1], results[0], strict=True)]
    assert max(errors) <= LIMIT[BF16], errors
    return f"{max(errors):.1e}"


def fsdp_shards_the_other_parameters():
    """FSDP2 over gloo: the parameters around the experts are sharded, the experts' are not. The gradients are those without FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.before = torch.nn.Linear(HIDDEN, HIDDEN, dtype=BF16)
            self.moe = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, dtype=BF16)
            self.after = torch.nn.Linear(HIDDEN, HIDDEN, dtype=BF16)

        def forward(self, x):
            return self.after(self.moe(self.before(x)))

    results = []
    for sharded in (False, True):
        model = Model()
        experts = {model.moe.gate_up_proj, model.moe.down_proj}
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), ignored_params=experts)
        torch.manual_seed(8 + dist.get_rank())
        for _ in range(2):
            model(torch.randn(tokens_of(dist.get_rank()), HIDDEN).to(BF16)).float().square().sum().backward()
        gradients = []
        for parameter in model.parameters():
            gradient = parameter.grad
            if any(parameter is expert for expert in experts):
                gradient = local(gradient)
            elif sharded:
                gradient = gradient.full_tensor()
            else:
                # FSDP averages over the processes.
                dist.all_reduce(gradient.div_(size))
            gradients.append(gradient)
        results.append(gradients)
    errors = [relative_error(got, want) for want, got in zip(*results, strict=True)]
    assert max(errors) <= LIMIT[BF16], errors
    return f"{max(errors):.1e}"


def a_main_grad_that_is_not_finite_is_named():
    problem = Problem(BF16)
    for leaf in (problem.up, problem.down):
        leaf.main_grad, leaf.grad_added_to_main_grad = torch.zeros(leaf.shape), False

    def step():
        with aristos.detect_non_finite():
            problem.experts().backward(problem.grad)

    step()
    if aristos.init().rank == 0:
        problem.down.main_grad[0, 0, 1] = float("inf")
    refused(FloatingPointError, ["main_grad of down_proj has 1 value that is not finite, inf at expert 0, element 1: rank 0"], step)


def invalid_arguments_are_named_and_the_next_pass_works():
    p = Problem(BF16)
    call = lambda **changed: aristos.experts(**(dict(x=p.x, ids=p.ids, weights=p.w, up=p.up, down=p.down) | changed))
    refused(ValueError, ["x has type torch.float32, expected bfloat16 or float16 on a device"], lambda: call(x=p.x.float()))
    refused(ValueError, ["down is on meta"], lambda: call(down=p.down.to("meta")))
    refused(ValueError, ["GLU", "on a device"], lambda: call(limit=7.0))
    refused(ValueError, ["ReLU^2", "on a device"], lambda: call(activation="relu2"))
    os.environ["ARISTOS_DEVICE"] = "emulate"
    refused(ValueError, ["ARISTOS_DEVICE is 'emulate', expected cpu or emulated"], call)
    os.environ["ARISTOS_DEVICE"] = "emulated"
    p.experts()
    if dist.get_world_size() > 1:
        more = Problem(BF16, counts=[100] * dist.get_world_size())
        refused(ValueError, ["x has 100 tokens, expected at most", "on a device: aristos.init(max_tokens=100)"], more.experts)
    # Only one process makes the invalid choice. The pass ends on all processes, and the next call of this process reports the choice.
    if dist.get_rank() == 0:
        call(ids=p.ids.index_fill(0, torch.tensor([1]), 2**33))
        refused(ValueError, ["ids of an earlier pass", "token 1 has expert 8589934592, expected 0 to 7"], call)
    else:
        p.experts()
    return right(p, step_of(p))


def longer_batches_of_one_process():
    if dist.get_world_size() > 1:
        return
    aristos.init()
    problems = [Problem(BF16, seed=tokens, counts=[tokens]) for tokens in (4, 30, 31, 90, 20)]
    outputs = [problem.experts() for problem in problems]
    for problem, output in zip(problems, outputs):
        output.backward(problem.grad)
        right(problem, output)
    aristos.init(max_tokens=8)
    refused(ValueError, ["x has 30 tokens, expected at most 8 on a device", "max_tokens=30"], problems[1].experts)
    aristos.init()


def stopped_rank_is_named():
    aristos.init(wait_limit_s=3)
    problem = Problem(BF16)
    problem.experts()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = ""
    if size > 1 and rank != size - 1:
        text = refused(aristos.AristosError, [f"PE {size - 1}"], problem.experts)
        refused(aristos.AristosError, ["failed before", "aristos.init()"], problem.experts)
    dist.barrier()
    aristos.init()
    equal_in(BF16)()
    return text


CASES = [
    ("equal_in_bf16", equal_in(BF16)),
    ("equal_in_f16", equal_in(F16)),
    ("equal_on_hopper", equal_on_hopper),
    ("equal_with_narrow_ids", equal_with_narrow_ids),
    ("memory_is_not_copied", memory_is_not_copied),
    ("training_follows_the_cpu_engine", training_follows_the_cpu_engine),
    ("checkpointed", checkpointed(False)),
    ("checkpointed_reentrantly", checkpointed(True)),
    ("backwards_in_any_order", backwards_in_any_order),
    ("one_layer_twice_in_a_step", one_layer_twice_in_a_step),
    ("backward_in_another_thread", backward_in_another_thread),
    ("saved_tensors_may_move", saved_tensors_may_move),
    ("overwritten_state_is_seen", overwritten_state_is_seen),
    ("second_backward_is_refused", second_backward_is_refused),
    ("gradients_are_added_to_main_grad", gradients_are_added_to_main_grad),
    ("a_main_grad_that_is_not_finite_is_named", a_main_grad_that_is_not_finite_is_named),
    ("operators_pass_opcheck", operators_pass_opcheck),
    ("compile_has_no_graph_break", compile_has_no_graph_break(None)),
    ("compile_of_any_number_of_tokens", compile_has_no_graph_break(True)),
    ("biases_and_forms", biases_and_forms),
    ("batch_of_a_group", batch_of_a_group),
    ("moe_equals_eager", moe_equals_eager),
    ("replayed_routing_has_unset_slots", replayed_routing_has_unset_slots),
    ("routers_drop_choices", routers_drop_choices),
    ("fsdp_shards_the_other_parameters", fsdp_shards_the_other_parameters),
    ("invalid_arguments_are_named_and_the_next_pass_works", invalid_arguments_are_named_and_the_next_pass_works),
    ("longer_batches_of_one_process", longer_batches_of_one_process),
    ("stopped_rank_is_named", stopped_rank_is_named),
]


def cases(name):
    """Returns all cases on an emulated device, or only the case with this name."""
    assert "emulated" in _aristos.DEVICES, "this wheel has no emulated device: build it with --features emulate"

    def emulated(case):
        def run():
            os.environ["ARISTOS_DEVICE"] = "emulated"
            try:
                return case()
            finally:
                os.environ["ARISTOS_DEVICE"] = "cpu"

        return run

    chosen = [(f"device::{one}", emulated(case)) for one, case in CASES if name in ("", one)]
    assert chosen, f"there is no case {name!r}"
    return chosen
