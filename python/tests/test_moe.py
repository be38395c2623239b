"""Tests of `aristos.MoE`: start weights, gradients, copies and checkpoints."""

import copy
import io
import pathlib
import pickle
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import full, refused, relative_error
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel

import aristos

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 2
ALONE = aristos.Group.alone()


def moe_of(group, seed=3, **more):
    torch.manual_seed(seed)
    whole = dict(aux_loss_coef=0.01, z_loss_coef=0.001, shared_intermediate=12, shared_gate=True) | more
    return aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group, **whole)


def spread_of(**more):
    return moe_of(aristos.init(), **more)


def shared_folder():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def same(got, want):
    """Checks that two modules have the same weights on all processes, bit for bit. Collective, and fails on all processes."""
    whole = dict(want.named_parameters())
    assert {name for name, _ in got.named_parameters()} == whole.keys()
    # All are gathered before the first comparison fails, because that is collective.
    pairs = [(name, full(parameter.detach()), full(whole[name].detach())) for name, parameter in got.named_parameters()]
    differ = [None] * dist.get_world_size()
    dist.all_gather_object(differ, [name for name, one, other in pairs if not torch.equal(one, other)])
    assert not any(differ), differ


def disturbed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9.0)
    return module


def run(module, x):
    output = module(x)
    loss = output.square().mean() + module.aux_loss + module.z_loss
    loss.backward()
    return output, loss


def equals_one_process():
    size, rank = dist.get_world_size(), dist.get_rank()
    group = aristos.init()
    single, folder = moe_of(ALONE), shared_folder()
    if rank == 0:
        aristos.save(single, folder, ALONE)
    dist.barrier()
    spread = disturbed(moe_of(group))
    aristos.load(spread, folder)
    torch.manual_seed(4)
    x = torch.randn(size, 6, HIDDEN)
    want, want_loss = run(single, x)
    output, mean = run(spread, x[rank])
    spread.scale_gradients()
    assert relative_error(output, want[rank]) <= 1e-5
    mean = mean.detach()
    dist.all_reduce(mean)
    assert abs(mean.item() / size - want_loss.item()) <= 1e-5 * abs(want_loss.item())
    experts = aristos.expert_parameters(spread)
    for name, parameter in spread.named_parameters():
        got, whole = full(parameter.grad.clone()), single.get_parameter(name).grad
        if parameter not in experts:
            dist.all_reduce(got)
            got /= size
        assert relative_error(got, whole) <= 1e-5, f"{name}: {relative_error(got, whole)}"
    counts = spread.expert_tokens.clone()
    dist.all_reduce(counts)
    assert counts.tolist() == single.expert_tokens.tolist() and counts.sum() == size * 6 * TOP_K
    # All processes save, and one loads.
    again = shared_folder()
    aristos.save(spread, again, group)
    other = moe_of(ALONE, seed=5)
    aristos.load(other, again)
    same(other, single)


def starts_are_equal_for_any_seeds():
    single = moe_of(ALONE, seed=3)
    next_single = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=ALONE)
    spread = spread_of(seed=3 + 10 * dist.get_rank())
    next_spread = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K)
    same(spread, single)
    same(next_spread, next_single)
    assert not torch.equal(single.gate.weight, next_single.gate.weight)
    for name in ("gate_up_proj", "down_proj"):
        weight = single.get_parameter(name)
        bound = weight.shape[2] ** -0.5
        assert 0.9 * bound < weight.abs().max() <= bound and abs(weight.std() / bound - 3**-0.5) < 0.03
        assert len({matrix.sum().item() for matrix in weight}) == EXPERTS, "two experts are equal"


def reset_repeats_the_start():
    want = spread_of(seed=3)
    with torch.device("meta"):
        on_meta = spread_of()
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    # Loops call the function for each module, from the outside or from the inside.
    for order in (list, reversed):
        made = disturbed(copy.deepcopy(on_meta).to_empty(device="cpu"))
        torch.manual_seed(3 + dist.get_rank())
        for module in order(list(made.modules())):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        same(made, want)


def layer_on_meta_gives_shapes():
    for options in (dict(), dict(aux_loss_coef=0.01, mean_gradients=True)):
        with torch.device("meta"):
            module, x = spread_of(**options), torch.empty(2, 3, HIDDEN, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x)
        assert output.is_meta and output.shape == x.shape
        (output.sum() + module.aux_loss).backward()
        assert x.grad.shape == x.shape and module.down_proj.grad.shape == module.down_proj.shape


def gradients_are_zero_without_tokens():
    size, rank = dist.get_world_size(), dist.get_rank()
    single, spread = moe_of(ALONE), spread_of()
    # All tokens are on the last process, and go to the first two experts.
    for module in (single, spread):
        with torch.no_grad():
            module.gate.weight.zero_()
            module.gate.weight[:2] = 1
    torch.manual_seed(4)
    x = torch.rand(5, HIDDEN)
    single(x).square().sum().backward()
    spread(x if rank == size - 1 else x[:0]).square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        got, want = spread.get_parameter(name).grad, single.get_parameter(name).grad
        assert got is not None and relative_error(full(got), want) <= 1e-5
        assert not full(got)[2:].any() and full(got)[:2].any()


def means_are_scaled_sums():
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    sums, means = spread_of(), spread_of(mean_gradients=True)
    for module in (sums, means):
        for _ in range(2):
            module(x).square().sum().backward()
    sums.scale_gradients()
    for name, parameter in sums.named_parameters():
        assert relative_error(full(means.get_parameter(name).grad), full(parameter.grad)) <= 1e-6, name
    refused(RuntimeError, ["mean_gradients is True"], means.scale_gradients)


def compiled_layer_equals_eager():
    module = spread_of(aux_loss_coef=0.01, mean_gradients=True)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    outputs, grads = [], []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        outputs.append(call(x))
        (outputs[-1].square().sum() + module.aux_loss).backward()
        outputs.append(module.aux_loss)
        grads.append({name: full(parameter.grad) for name, parameter in module.named_parameters()})
        module.zero_grad()
    assert outputs[1] > 0 and all(torch.equal(*pair) for pair in zip(outputs[:2], outputs[2:]))
    errors = {name: relative_error(grads[1][name], grad) for name, grad in grads[0].items()}
    assert max(errors.values()) <= 1e-6, errors


def copies_after_a_pass_equal_the_layer():
    module = spread_of()
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4))
    want, _ = run(module, x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    average = AveragedModel(module)
    average.update_parameters(module)
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False), average.module):
        same(one, module)
        assert one.group.size == module.group.size and one.aux_loss is None
        assert torch.equal(one(x), want)
        one(x).sum().backward()
    # The copies have weights of their own.
    disturbed(average.module)
    assert torch.equal(module(x), want)
    assert pickle.loads(pickle.dumps(ALONE)).size == 1


def copies_for_another_group_are_refused():
    part = dist.new_group([0])
    pickled = [pickle.dumps(aristos.Group(part)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(pickled)
    if dist.get_rank() > 0:
        refused(ValueError, ["had the processes (0,)"], lambda: pickle.loads(pickled[0]))


def description_names_the_local_experts():
    module, local = spread_of(), EXPERTS // dist.get_world_size()
    first = dist.get_rank() * local
    here = "" if local == EXPERTS else f", here {first} to {first + local - 1}"
    assert f"hidden=16, intermediate=24, experts=8{here}, top_k=2, activation=silu" in repr(module), repr(module)


def states_load_by_parameter_and_by_matrix():
    single, size = moe_of(ALONE), dist.get_world_size()
    state = single.state_dict()
    assert state.keys() == dict(single.named_parameters()).keys()
    by_matrix = {name: tensor for name, tensor in state.items() if "." in name}
    by_matrix |= single.matrices("", single.gate_up_proj.detach(), single.down_proj.detach())
    assert "experts.3.gate_proj.weight" in by_matrix and len(by_matrix) == 5 + 3 * EXPERTS
    own = spread_of()
    for assign in (False, True):
        for given in (state, by_matrix, own.state_dict()):
            spread = disturbed(spread_of())
            spread.load_state_dict(given, assign=assign)
            same(spread, single)
            # The layer may be a part of a model.
            outer = nn.Sequential(nn.Identity(), disturbed(spread_of()))
            outer.load_state_dict({f"1.{name}": tensor for name, tensor in given.items()}, assign=assign)
            same(outer[1], single)
    with torch.device("meta"):
        on_meta = spread_of()
    on_meta.load_state_dict(by_matrix, assign=True)
    same(on_meta, single)
    on_meta(torch.randn(3, HIDDEN))
    here = on_meta.local[0]
    for words, changed in [
        ([f"experts.{here}.up_proj.weight", "Missing"], {f"experts.{here}.up_proj.weight": None}),
        ([f"experts.{here}.up_proj.weight has shape [3]"], {f"experts.{here}.up_proj.weight": torch.zeros(3)}),
        (["experts.8.up_proj.weight", "Unexpected"], {"experts.8.up_proj.weight": torch.zeros(3)}),
    ]:
        given = {name: tensor for name, tensor in (by_matrix | changed).items() if tensor is not None}
        kept = spread_of()
        try:
            kept.load_state_dict(given)
            raise AssertionError(f"{words} were not noticed")
        except RuntimeError as error:
            assert all(word in str(error) for word in words), error
        same(kept, single)
    block = dict(gate_up_proj=torch.zeros(EXPERTS // size, 2 * INNER, HIDDEN))
    if size > 1:
        try:
            spread_of().load_state_dict(state | block)
            raise AssertionError("a block was taken for all experts")
        except RuntimeError as error:
            assert "gate_up_proj" in str(error)


def one_file_loads_onto_any_device():
    single, folder = moe_of(ALONE), pathlib.Path(shared_folder())
    by_matrix = {name: tensor for name, tensor in single.state_dict().items() if "." in name}
    by_matrix |= {name: matrix.contiguous() for name, matrix in single.matrices("", single.gate_up_proj.detach(), single.down_proj.detach())}
    for state in (single.state_dict(), by_matrix):
        if dist.get_rank() == 0:
            save_file(state, folder / "model.safetensors")
        dist.barrier()
        for device in ("cpu", "meta"):
            with torch.device(device):
                spread = spread_of()
            spread = disturbed(spread)
            aristos.load(spread, folder)
            same(spread, single)
        # Only a parameter on "meta" is replaced, because an optimizer refers to the others.
        partly = disturbed(spread_of())
        partly.gate.to("meta")
        before = dict(partly.named_parameters())
        refused(FileNotFoundError, ["index.json"], lambda: aristos.load(partly, folder / "missing"))
        aristos.load(partly, folder)
        same(partly, single)
        assert [name for name, parameter in partly.named_parameters() if parameter is not before[name]] == ["gate.weight"]
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "model.safetensors").write_bytes(b"12345678")
    dist.barrier()
    refused(ValueError, [str(folder / "model.safetensors")], lambda: aristos.load(spread, folder))


def stepped(module, optimizer):
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(4))
    run(module, x)
    optimizer.step()
    optimizer.zero_grad()


def checkpoints_with_optimizers_load_by_name():
    """Saves with torch's distributed checkpoints. Another number of processes loads the model and the optimizer, and all take a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = dist.new_group(range(max(1, size // 2)))

    def layer(processes):
        group = {1: lambda: ALONE, size: aristos.init}.get(processes, lambda: aristos.Group(part))()
        module = moe_of(group, mean_gradients=True)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)

    def writes(processes):
        return rank < processes

    def distributed(processes):
        return dict(no_dist=True) if processes == 1 else dict(process_group=None if processes == size else part)

    sizes = sorted({1, max(1, size // 2), size})
    want = layer(1)
    stepped(*want)
    folders = {}
    for processes in sizes:
        folder = folders[processes] = shared_folder()
        if writes(processes):
            module, optimizer = layer(processes)
            stepped(module, optimizer)
            state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer)))
            assert "gate_up_proj" in state["model"] and "gate_up_proj" in state["optimizer"]["state"]
            dcp.save(state, checkpoint_id=folder, **distributed(processes))
        dist.barrier()
    stepped(*want)
    for saved, folder in folders.items():
        for processes in sizes:
            if writes(processes):
                module, optimizer = layer(processes)
                disturbed(module)
                state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer)))
                dcp.load(state, checkpoint_id=folder, **distributed(processes))
                set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                stepped(module, optimizer)
                for name, parameter in module.named_parameters():
                    error = relative_error(full(parameter), want[0].get_parameter(name))
                    assert error <= 1e-5, f"{name}: {error}, saved by {saved}, loaded by {processes}"
            dist.barrier()
    spread = disturbed(spread_of())
    set_model_state_dict(spread, want[0].state_dict(), options=StateDictOptions(full_state_dict=True))
    same(spread, want[0])


CASES = [
    equals_one_process,
    starts_are_equal_for_any_seeds,
    reset_repeats_the_start,
    layer_on_meta_gives_shapes,
    gradients_are_zero_without_tokens,
    means_are_scaled_sums,
    compiled_layer_equals_eager,
    copies_after_a_pass_equal_the_layer,
    copies_for_another_group_are_refused,
    description_names_the_local_experts,
    states_load_by_parameter_and_by_matrix,
    one_file_loads_onto_any_device,
    checkpoints_with_optimizers_load_by_name,
]


def cases(wanted, size):
    """Returns the cases as (name, function) pairs, or only the wanted case."""
    found = [(f"moe::{case.__name__}", case) for case in CASES if wanted in ("", case.__name__)]
    return found or sys.exit(f"no case moe:{wanted}")
