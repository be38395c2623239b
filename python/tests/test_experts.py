"""Compares the operators and the layer with plain PyTorch, and checks their errors."""

import gc
import multiprocessing
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from harness import refused, relative_error
from test_moe import moe_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import aristos
from aristos import _experts

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 2


def tokens_of(rank):
    return 5 + 3 * rank


class Problem:
    """The tokens, the routing and the weights of all processes, and this process's part of them."""

    def __init__(self, dtype=torch.float32, seed=0, counts=None):
        rank, size = dist.get_rank(), dist.get_world_size()
        gen = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=gen).to(dtype)
        self.counts = counts or [tokens_of(r) for r in range(size)]
        start = sum(self.counts[:rank])
        self.mine = slice(start, start + self.counts[rank])
        total = sum(self.counts)
        self.all_x, self.all_grad = draw(total, HIDDEN), draw(total, HIDDEN)
        self.all_w, self.all_ids = torch.rand(total, EXPERTS, generator=gen).topk(TOP_K)
        self.all_up, self.all_down = draw(EXPERTS, 2 * INNER, HIDDEN) / 4, draw(EXPERTS, HIDDEN, INNER) / 4
        local = EXPERTS // size
        self.local = slice(rank * local, (rank + 1) * local)
        leaf = lambda t: t.clone().requires_grad_()
        self.x, self.w, self.ids = leaf(self.all_x[self.mine]), leaf(self.all_w[self.mine]), self.all_ids[self.mine]
        self.up, self.down = leaf(self.all_up[self.local]), leaf(self.all_down[self.local])
        self.grad = self.all_grad[self.mine]

    def leaves(self):
        return self.x, self.w, self.up, self.down

    def experts(self, **form):
        return aristos.experts(self.x, self.ids, self.w, self.up, self.down, **form)

    def wanted(self):
        """Returns the reference for the output and for the gradients of this process's leaves. It is computed in float64 without other
        processes."""
        x, w, up, down = (t.double().requires_grad_() for t in (self.all_x, self.all_w, self.all_up, self.all_down))
        y = 0
        for k in range(TOP_K):
            gate, wide = torch.einsum("th,toh->to", x, up[self.all_ids[:, k]]).chunk(2, -1)
            y = y + w[:, k, None] * torch.einsum("ti,thi->th", F.silu(gate) * wide, down[self.all_ids[:, k]])
        grads = torch.autograd.grad(y, (x, w, up, down), self.all_grad.double())
        parts = self.mine, self.mine, self.local, self.local
        return y[self.mine], [grad[part] for grad, part in zip(grads, parts)]


def matches(problem, output, grads, limit=1e-5):
    want, want_grads = problem.wanted()
    errors = [relative_error(output, want)] + [relative_error(g, w) for g, w in zip(grads, want_grads)]
    assert max(errors) <= limit, f"{errors}, expected at most {limit}"
    return f"{max(errors):.1e}"


def equal_in(dtype, limit):
    def case():
        problem = Problem(dtype)
        output = problem.experts()
        output.backward(problem.grad)
        return matches(problem, output, [leaf.grad for leaf in problem.leaves()], limit)

    return case


def operators_pass_opcheck():
    problem = Problem()
    group = aristos.init()
    arguments = (problem.x, problem.ids, *problem.leaves()[1:], None, None, group.number, -1, "silu", True, 0.0, False, False)
    torch.library.opcheck(torch.ops.aristos.experts.default, arguments)
    # The backward operator is run by opcheck's AOT dispatch. It has no opcheck of its own, because that would copy its ticket.


def compile_has_no_graph_break():
    problem = Problem()
    aristos.init()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(x, ids, w, up, down):
        return aristos.experts(x * 2, ids, w, up, down) + aristos.experts(x * 2, ids, w, up, down)

    output = twice(problem.x, problem.ids, problem.w, problem.up, problem.down)
    output.backward(problem.grad)
    got = [leaf.grad.clone() for leaf in problem.leaves()]
    eager = Problem()
    x = eager.x * 2
    want = sum(aristos.experts(x, eager.ids, eager.w, eager.up, eager.down) for _ in range(2))
    want.backward(eager.grad)
    errors = [relative_error(output, want)] + [relative_error(g, leaf.grad) for g, leaf in zip(got, eager.leaves())]
    assert max(errors) <= 1e-6, errors


def checkpointed():
    problem = Problem()
    output = checkpoint(lambda x, w, up, down: aristos.experts(x, problem.ids, w, up, down), *problem.leaves(), use_reentrant=False)
    output.backward(problem.grad)
    return matches(problem, output, [leaf.grad for leaf in problem.leaves()])


def forwards_before_backwards():
    # The backward passes run in the order of the forward passes, which differs from autograd's order.
    first, second = Problem(seed=1), Problem(seed=2)
    outputs = [problem.experts() for problem in (first, second)]
    for problem, output in zip((first, second), outputs):
        output.backward(problem.grad)
    for problem, output in zip((first, second), outputs):
        matches(problem, output, [leaf.grad for leaf in problem.leaves()])


def frozen_experts_cost_no_gradients():
    """The gradients of frozen experts are not computed, and those of the tokens are equal."""
    trained, original, asked = Problem(), torch.ops.aristos.experts_backward, []
    trained.experts().backward(trained.grad)

    def recorded(*arguments):
        results = original(*arguments)
        asked.append([result.numel() for result in results[2:]])
        return results

    torch.ops.aristos.experts_backward = recorded
    try:
        for frozen in (("up", "down"), ("down",)):
            problem = Problem()
            for name in frozen:
                getattr(problem, name).requires_grad_(False)
            problem.experts().backward(problem.grad)
            for name in ("x", "w", "up", "down"):
                got, want = getattr(problem, name).grad, getattr(trained, name).grad
                assert (got is None) if name in frozen else torch.equal(got, want), name
    finally:
        torch.ops.aristos.experts_backward = original
    sizes = [trained.up.numel(), trained.down.numel()]
    assert asked == [[0, 0, 0, 0], [*sizes, 0, 0]], asked

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, ids, w, up, down):
        return aristos.experts(x, ids, w, up, down)

    problem = Problem()
    compiled(problem.x, problem.ids, problem.w, problem.up.detach(), problem.down.detach()).backward(problem.grad)
    assert torch.equal(problem.x.grad, trained.x.grad)


def autocast_computes_in_its_type():
    rounded = Problem()
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in (rounded.x, rounded.up, rounded.down)]
    want = aristos.experts(leaves[0], rounded.ids, rounded.w, *leaves[1:])
    want.backward(rounded.grad.bfloat16())

    def call(x, ids, w, up, down):
        with torch.autocast("cpu", torch.bfloat16):
            return aristos.experts(x, ids, w, up, down)

    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        problem = Problem()
        output = run(problem.x, problem.ids, problem.w, problem.up, problem.down)
        assert output.dtype == torch.bfloat16 and torch.equal(output, want)
        output.backward(problem.grad.bfloat16())
        for leaf, one in zip((problem.x, problem.up, problem.down), leaves):
            assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, one.grad.float())
        assert torch.equal(problem.w.grad, rounded.w.grad)
    with torch.autocast("cpu", torch.float16):
        refused(ValueError, ["x has type torch.float16"], problem.experts)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert problem.experts().dtype == torch.float32


def second_backward_names_retain_graph():
    problem = Problem()
    output = problem.experts()
    output.backward(problem.grad, retain_graph=True)
    refused(ValueError, ["a pass allows one backward", "retain_graph=True", "forward pass again"], lambda: output.backward(problem.grad))
    return equal_in(torch.float32, 1e-5)()


def forward_mode_is_refused():
    p = Problem()
    tangent = torch.ones_like(p.x)
    call = lambda x: aristos.experts(x, p.ids, p.w, p.up, p.down)
    refused(NotImplementedError, ["no forward-mode derivative (jvp)"], lambda: torch.func.jvp(call, (p.x.detach(),), (tangent,)))
    with forward_ad.dual_level():
        refused(NotImplementedError, ["no forward-mode derivative (jvp)"], lambda: call(forward_ad.make_dual(p.x.detach(), tangent)))
        call(p.x)


def one_layer_twice_in_a_step():
    problem = Problem()
    (problem.experts() + problem.experts()).backward(problem.grad)
    once = Problem()
    once.experts().backward(once.grad)
    for twice, leaf in zip(problem.leaves(), once.leaves()):
        assert relative_error(twice.grad, 2 * leaf.grad) <= 1e-6


def without_gradients():
    problem = Problem()
    with torch.no_grad():
        output = problem.experts()
    assert not output.requires_grad
    del output
    held = problem.experts()
    del held
    gc.collect()
    assert not _experts._passes, "a pass outlives its graph"
    with torch.inference_mode():
        return matches_output(problem, problem.experts())


def matches_output(problem, output):
    with torch.inference_mode(False), torch.enable_grad():
        want, _ = problem.wanted()
    error = relative_error(output, want)
    assert error <= 1e-5, error


def strided_inputs():
    problem = Problem()
    wider = lambda t: torch.stack([t.detach(), t.detach()], dim=-1)[..., 0].requires_grad_()
    leaves = [wider(leaf) for leaf in problem.leaves()]
    assert not any(leaf.is_contiguous() for leaf in leaves)
    ids = problem.ids.t().contiguous().t()
    x, w, up, down = leaves
    output = aristos.experts(x, ids, w, up, down)
    output.backward(problem.grad.t().contiguous().t())
    return matches(problem, output, [leaf.grad for leaf in leaves])


def weights_are_never_stale():
    problem = Problem()
    problem.experts()
    # The weights are changed in three ways: in place, through .data, which changes no version counter, and in the way of an optimizer.
    with torch.no_grad():
        problem.up.mul_(0.5)
        problem.all_up.mul_(0.5)
    problem.down.data.add_(0.1)
    problem.all_down.add_(0.1)
    output = problem.experts()
    output.backward(problem.grad)
    return matches(problem, output, [leaf.grad for leaf in problem.leaves()])


def finite_differences():
    # This compares the derivative in a random direction, in f32. With this step the central difference has an error of about 1e-3.
    problem = Problem()
    output = problem.experts()
    output.backward(problem.grad)
    gen = torch.Generator().manual_seed(7 + dist.get_rank())
    directions = [torch.randn(leaf.shape, generator=gen) for leaf in problem.leaves()]
    slope = torch.stack([(leaf.grad * d).sum() for leaf, d in zip(problem.leaves(), directions)]).sum().double()
    dist.all_reduce(slope)

    def value(step):
        moved = [leaf.detach() + step * d for leaf, d in zip(problem.leaves(), directions)]
        x, w, up, down = moved
        with torch.no_grad():
            total = (aristos.experts(x, problem.ids, w, up, down).double() * problem.grad).sum()
        dist.all_reduce(total)
        return total

    step = 1e-3
    difference = (value(step) - value(-step)) / (2 * step)
    error = abs(difference - slope).item() / abs(slope).item()
    assert error <= 5e-3, error
    return f"{error:.1e}"


def group_of_a_subset():
    # All processes create the process group, and only the first uses it.
    part = dist.new_group([0])
    if dist.get_rank() == 0:
        group = aristos.Group(part)
        full = Problem()
        output = aristos.experts(full.all_x, full.all_ids, full.all_w, full.all_up, full.all_down, group=group)
        want, _ = full.wanted()
        assert relative_error(output[full.mine], want) <= 1e-5


def invalid_arguments_are_named_and_the_next_pass_works():
    p = Problem()
    group = aristos.init()
    call = lambda **changed: aristos.experts(**(dict(x=p.x, ids=p.ids, weights=p.w, up=p.up, down=p.down) | changed))
    refused(ValueError, ["x has type torch.float64"], lambda: call(x=p.x.double()))
    refused(ValueError, ["up has type torch.bfloat16"], lambda: call(up=p.up.bfloat16()))
    refused(ValueError, ["ids has type torch.float32"], lambda: call(ids=p.ids.float()))
    refused(ValueError, ["weights has shape"], lambda: call(weights=p.w[:, :1]))
    refused(ValueError, ["down is on meta"], lambda: call(down=p.down.to("meta")))
    refused(ValueError, ["token 1 has expert 8, expected 0 to 7"], lambda: call(ids=p.ids.index_fill(0, torch.tensor([1]), 8)))
    refused(ValueError, ["token 2 has expert 4294967296, expected 0 to 7"], lambda: call(ids=p.ids.index_fill(0, torch.tensor([2]), 2**32)))
    refused(ValueError, ["limit is nan, expected 0 or more"], lambda: call(limit=float("nan")))
    refused(ValueError, ["x has layout torch.sparse_coo"], lambda: call(x=p.x.detach().to_sparse()))
    refused(ValueError, ["token 0 has expert 3 twice"], lambda: call(ids=torch.full_like(p.ids, 3)))
    refused(ValueError, ['activation is "tanh", expected one of silu'], lambda: call(activation="tanh"))
    refused(ValueError, ["up_bias"], lambda: call(up_bias=torch.zeros(1)))
    # Only one process makes the invalid call. The others wait for its next call.
    if dist.get_rank() == 0:
        refused(ValueError, ["token 0 has expert 8"], lambda: call(ids=torch.full_like(p.ids, 8)))
    output = p.experts()
    output.backward(p.grad)
    matches(p, output, [leaf.grad for leaf in p.leaves()])
    refused(RuntimeError, [], lambda: aristos.experts(p.x, p.ids, p.w, p.up, p.down).sum().backward() or output.backward(p.grad))
    return f"group {group.number}"


def default_device_is_not_used():
    """All tensors of the package have the devices of the arguments, or are in host memory."""
    p, sent, isend = Problem(), [], dist.isend
    torch.set_default_device("meta")
    # torch accepts the send of a tensor on "meta" and does nothing.
    dist.isend = lambda tensor, **more: sent.append(tensor.device.type) or isend(tensor, **more)
    try:
        aristos.init()
        layer = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, device="cpu")
        assert layer(p.x.detach()).device == p.x.device
        output = p.experts()
        output.backward(p.grad)
        assert aristos.experts(p.x, p.ids, p.w, p.all_up, p.all_down, group=aristos.Group.alone()).device == p.x.device
    finally:
        torch.set_default_device(None)
        dist.isend = isend
    assert set(sent) == ({"cpu"} if dist.get_world_size() > 1 else set()), sent
    return matches(p, output, [leaf.grad for leaf in p.leaves()])


def meta_tensors_give_shapes():
    p = Problem()
    x, ids, w, up, down = (tensor.to("meta") for tensor in (p.x, p.ids, p.w, p.up, p.down))
    output = aristos.experts(x, ids, w, up, down)
    assert output.is_meta and output.shape == x.shape
    assert [grad.shape for grad in torch.autograd.grad(output.sum(), (x, w, up, down))] == [one.shape for one in (x, w, up, down)]
    refused(ValueError, ["down is on cpu, expected meta"], lambda: aristos.experts(x, ids, w, up, p.down))


def operators_check_their_arguments():
    """Calls the registered operators and the native layer directly, without `aristos.experts`."""
    p = Problem()
    group = aristos.init()
    x, w, up, down = (leaf.detach() for leaf in p.leaves())
    arguments = dict(x=x, ids=p.ids, weights=w, up=up, down=down, up_bias=None, down_bias=None, group=group.number, batch_group=-1)
    arguments |= dict(activation="silu", gated=True, limit=0.0, limit_after=False, plus_one=False)
    call = lambda **changed: torch.ops.aristos.experts(**(arguments | changed))
    tokens, local = len(x), len(up)
    for words, changed in [
        (["weights has shape [2, 2]", f"expected [{tokens}, 2]"], dict(weights=w[:2])),
        (["ids has shape [2, 2]", f"expected [{tokens}, 2]"], dict(ids=p.ids[:2])),
        (["weights has shape", "expected [", "4]"], dict(ids=p.ids.repeat(1, 2))),
        (["up has shape", f"expected [{local}, 48, 16]"], dict(up=up[:-1])),
        (["up has shape", f"expected [{local}, 24, 16]"], dict(gated=False)),
        (["up has type torch.bfloat16"], dict(up=up.bfloat16())),
        (["x has type torch.float64"], dict(x=x.double())),
        (["down is on meta, expected cpu"], dict(down=down.to("meta"))),
        (["up_bias has shape [1]"], dict(up_bias=torch.zeros(1), down_bias=torch.zeros(1))),
        (["limit is nan"], dict(limit=float("nan"))),
        (["group is -1, expected 0 to"], dict(group=-1)),
        (["group is 1000000, expected 0 to"], dict(group=10**6)),
        (["group is -2, expected 0 to"], dict(batch_group=-2)),
    ]:
        refused(ValueError, words, lambda: call(**changed))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)
    for word, changed in (("weights has shape [2, 2]", dict(weights=w[:2])), ("up has shape", dict(up=up[:-1]))):
        try:
            compiled(**changed)
            raise AssertionError(f"expected {word}")
        except Exception as error:
            assert word in str(error) and not isinstance(error, AssertionError), error
    assert call(x=x.to("meta"), **{name: arguments[name].to("meta") for name in ("ids", "weights", "up", "down")})[0].shape == x.shape

    output, ticket = call()
    backward = torch.ops.aristos.experts_backward
    gradients = dict(grad_output=p.grad, ticket=ticket, x=x, weights=w, up=up, down=down, up_bias=None, down_bias=None)
    for words, changed in [
        (["grad_output has shape [3, 16]", f"{tokens} tokens"], dict(grad_output=p.grad[:3])),
        (["x has shape [2, 16]", f"{tokens} tokens"], dict(x=x[:2])),
        (["x has shape", f"expected [{tokens}, 16]"], dict(x=x[:, :8])),
        (["grad_weights has shape", f"expected [{tokens}, 2]"], dict(weights=w[:, :1])),
        (["weights has shape [2]"], dict(weights=w[0])),
        (["weights has type torch.int64, expected a floating type"], dict(weights=w.long())),
        (["grad_output has type torch.complex64"], dict(grad_output=p.grad.cfloat())),
        (["grad_output is on meta, expected cpu"], dict(grad_output=p.grad.to("meta"))),
        (["up has shape", f"expected [{local}, 48, 16]"], dict(up=up[:-1])),
        (["down has type bfloat16, expected float32"], dict(down=down.bfloat16())),
        (["up_bias is given"], dict(up_bias=torch.zeros(local, 2 * INNER))),
        (["ticket"], dict(ticket=ticket.clone())),
    ]:
        refused(ValueError, words, lambda: backward(**(gradients | changed)))

    form = dict(activation="silu", gated=True, bias=False, limit=0.0, limit_after=False, plus_one=False, dtype="float32")
    native = group.layer(tokens, hidden=HIDDEN, intermediate=INNER, experts=EXPERTS, top_k=TOP_K, **form)
    tensors, experts = _experts._views(x, p.ids.int(), w, torch.empty_like(x)), _experts._views(up, down, None, None)
    for at, view, words in [
        (1, (tensors[1][0], (tokens,), "int32"), ["ids has shape"]),
        (1, (*tensors[1][:2], "int64"), ["ids has type int64, expected int32"]),
        (2, (0, *tensors[2][1:]), ["weights is at address 0"]),
        (3, (tensors[3][0] + 2, *tensors[3][1:]), ["output is at address"]),
        (3, (tensors[3][0], (tokens - 1, HIDDEN), "float32"), ["output has shape"]),
    ]:
        refused(ValueError, words, lambda: native.forward([*tensors[:at], view, *tensors[at + 1 :]], experts))
    refused(ValueError, ["up is missing"], lambda: native.forward(tensors, [None, *experts[1:]]))
    refused(ValueError, ["not contiguous in host memory"], lambda: _experts._views(x.t()))

    # Passes after the errors work.
    matches(p, output, backward(**gradients)[:4])
    matches(p, call()[0], [])


def invalid_settings_are_named():
    for limit in (0, -1.0, float("nan"), 1e300, "a"):
        refused(ValueError, ["wait_limit_s is", "expected seconds"], lambda: aristos.init(wait_limit_s=limit))
    for most in (0, 1.5, "a"):
        refused(ValueError, ["max_tokens is", "expected 1 or more"], lambda: aristos.init(max_tokens=most))
    alone = aristos.Group.alone()
    refused(ValueError, ["hidden is 0"], lambda: aristos.MoE(0, INNER, EXPERTS, TOP_K, group=alone))
    refused(ValueError, ["top_k is 2.5"], lambda: aristos.MoE(HIDDEN, INNER, EXPERTS, 2.5, group=alone))
    refused(ValueError, ["activation is 'tanh'"], lambda: moe_of(alone, activation="tanh"))
    layer = moe_of(alone)
    with tempfile.TemporaryDirectory() as folder:
        aristos.save(layer, folder, alone)
        (shard,) = pathlib.Path(folder).glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:100])
        refused(ValueError, [str(shard)], lambda: aristos.load(layer, folder))
        index = pathlib.Path(folder) / "model.safetensors.index.json"
        for text in ("{", "[]", "{}"):
            index.write_text(text)
            refused(ValueError, [str(index), "weight_map"], lambda: aristos.load(layer, folder))


def cuda_tensors_need_another_wheel():
    """With fake tensors of a CUDA device, because there is none."""
    with FakeTensorMode():
        new = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="cuda")
        arguments = new(5, HIDDEN), new(5, TOP_K, dtype=torch.int64), new(5, TOP_K), new(EXPERTS, 2 * INNER, HIDDEN), new(EXPERTS, HIDDEN, INNER)
        words = ["x is on cuda:0, expected cpu: this wheel has no CUDA devices", "--features cuda", "docs/training.md"]
        refused(ValueError, words, lambda: aristos.experts(*arguments))


def nan_weights_pass_through():
    p = Problem()
    with torch.no_grad():
        p.w[0, 0] = float("nan")
    output = p.experts()
    assert output[0].isnan().all() and not output[1:].isnan().any()
    output.backward(p.grad)
    with torch.no_grad():
        p.up.fill_(float("nan"))
    assert p.experts().isnan().all()
    return equal_in(torch.float32, 1e-5)()


def different_shapes_are_named():
    aristos.init(wait_limit_s=20)
    rank = dist.get_rank()
    inner = INNER + 8 * (rank == 1)
    local = EXPERTS // dist.get_world_size()
    up, down = torch.randn(local, 2 * inner, HIDDEN), torch.randn(local, HIDDEN, inner)
    x, ids, w = torch.randn(3, HIDDEN), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    text = refused(ValueError, ["intermediate is", "on rank"], lambda: aristos.experts(x, ids, w, up, down))
    aristos.init()
    Problem().experts()
    return text


def stopped_rank_is_named():
    aristos.init(wait_limit_s=3)
    problem = Problem()
    problem.experts()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = ""
    if rank != size - 1:
        start = time.monotonic()
        text = refused(aristos.AristosError, [f"PE {size - 1}"], problem.experts)
        assert time.monotonic() - start < 20
        refused(aristos.AristosError, ["failed before", "aristos.init()"], problem.experts)
    dist.barrier()
    aristos.init()
    equal_in(torch.float32, 1e-5)()
    return text


def next_step_works_after_an_exception():
    problem = Problem()
    for _ in range(2):
        try:
            output = problem.experts()
            raise KeyError("in the middle of a step")
        except KeyError:
            output = None
    return equal_in(torch.float32, 1e-5)()


def _in_a_fork(queue, problem):
    try:
        problem.experts()
        queue.put("no error")
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def fork_is_refused():
    problem = Problem()
    problem.experts()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_fork, args=(queue, problem))
    child.start()
    said = queue.get(timeout=60)
    child.join()
    assert "RuntimeError" in said and "forked" in said and "aristos.init()" in said, said


CASES = [
    ("equal_in_f32", equal_in(torch.float32, 1e-5)),
    ("equal_in_bf16", equal_in(torch.bfloat16, 2e-2)),
    ("operators_pass_opcheck", operators_pass_opcheck),
    ("compile_has_no_graph_break", compile_has_no_graph_break),
    ("checkpointed", checkpointed),
    ("forwards_before_backwards", forwards_before_backwards),
    ("frozen_experts_cost_no_gradients", frozen_experts_cost_no_gradients),
    ("autocast_computes_in_its_type", autocast_computes_in_its_type),
    ("second_backward_names_retain_graph", second_backward_names_retain_graph),
    ("forward_mode_is_refused", forward_mode_is_refused),
    ("one_layer_twice_in_a_step", one_layer_twice_in_a_step),
    ("without_gradients", without_gradients),
    ("strided_inputs", strided_inputs),
    ("weights_are_never_stale", weights_are_never_stale),
    ("finite_differences", finite_differences),
    ("group_of_a_subset", group_of_a_subset),
    ("invalid_arguments_are_named_and_the_next_pass_works", invalid_arguments_are_named_and_the_next_pass_works),
    ("default_device_is_not_used", default_device_is_not_used),
    ("meta_tensors_give_shapes", meta_tensors_give_shapes),
    ("operators_check_their_arguments", operators_check_their_arguments),
    ("invalid_settings_are_named", invalid_settings_are_named),
    ("cuda_tensors_need_another_wheel", cuda_tensors_need_another_wheel),
    ("nan_weights_pass_through", nan_weights_pass_through),
    ("different_shapes_are_named", different_shapes_are_named),
    ("stopped_rank_is_named", stopped_rank_is_named),
    ("next_step_works_after_an_exception", next_step_works_after_an_exception),
    ("fork_is_refused", fork_is_refused),
]

# The cases that need more than one process.
SEVERAL = {"group_of_a_subset", "different_shapes_are_named", "stopped_rank_is_named"}


def cases(wanted, size):
    """Returns the cases for this number of processes as (name, function) pairs, or only the wanted case."""
    found = [(f"experts::{name}", case) for name, case in CASES if name == wanted or not wanted and (size > 1 or name not in SEVERAL)]
    return found or sys.exit(f"no case experts:{wanted}")
