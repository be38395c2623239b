"""Training of models with `aristos.MoE` layers in the wrappers of torch and accelerate, compared with one process."""

import contextlib
import functools
import sys
import unittest.mock
import warnings
import weakref

import torch
import torch.distributed as dist
import transformers
from harness import full, refused, relative_error
from test_moe import ALONE, EXPERTS, HIDDEN, INNER, TOP_K, shared_folder
from test_transformers import folder_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import aristos

STEPS, TOKENS, MOST = 3, 6, 0.05
# With this epsilon AdamW's steps do not amplify the rounding of small gradients.
OPTIMIZERS = dict(
    adamw=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    sgd=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
)


def everyone():
    """The group of all processes, with room for the batches of all cases."""
    return aristos.init(max_tokens=1024)


class Net(nn.Module):
    def __init__(self, group, **more):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        options = dict(mean_gradients=True, aux_loss_coef=0.01, shared_intermediate=12) | more
        self.moe = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group, **options)
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.last(x + self.moe(self.first(x)))


def batches():
    """The tokens of all steps and processes."""
    return torch.randn(STEPS, dist.get_world_size(), TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))


def train(model, net, optimizer, clip, x, average=lambda: None):
    """Returns the losses and the norms of the gradients of the steps."""
    losses, norms = [], []
    for batch in x:
        loss = model(batch).square().mean() + net.moe.aux_loss
        loss.backward()
        average()
        norms.append(clip(model.parameters(), MOST))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack([full(norm) for norm in norms])


def equals_one_process(prepare, optimizer, clip=aristos.clip_grad_norm_, group=None, **more):
    """Checks that the steps of a prepared model equal those of one process with the whole batch. `prepare` gets the model and returns it
    wrapped, and what averages gradients after each backward pass."""
    single = Net(ALONE, **more)
    whole = train(single, single, OPTIMIZERS[optimizer](single.parameters()), torch.nn.utils.clip_grad_norm_, batches().flatten(1, 2))
    net = Net(group or everyone(), **more)
    model, average = prepare(net)
    mine = train(model, net, OPTIMIZERS[optimizer](model.parameters()), clip, batches()[:, dist.get_rank()], average)
    dist.all_reduce(mine[0])
    errors = dict(loss=relative_error(mine[0] / dist.get_world_size(), whole[0]), norm=relative_error(mine[1], whole[1]))
    for name, parameter in net.named_parameters():
        errors[name] = relative_error(full(parameter), single.get_parameter(name))
    # All processes must have the same replicated weights, bit for bit.
    for name, parameter in net.named_parameters():
        if not hasattr(parameter, "to_local"):
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            errors[f"{name} on rank 0"] = 0.0 if torch.equal(first, parameter) else float("inf")
    worst = max(errors, key=errors.get)
    assert whole[1].min() > MOST, "the gradients are not clipped"
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]}"
    return f"{errors[worst]:.1e}"


def plain_loop_with_clipping():
    def prepare(net):
        experts = aristos.expert_parameters(net)

        def average():
            for parameter in net.parameters():
                if parameter not in experts:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()

        return net, average

    return equals_one_process(prepare, "sgd")


def ddp(optimizer):
    return lambda: equals_one_process(lambda net: (DistributedDataParallel(aristos.exclude_experts(net)), lambda: None), optimizer)


def accelerate_with_ddp():
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True)
    return equals_one_process(lambda net: (prepared.prepare(aristos.exclude_experts(net)), lambda: None), "adamw")


def fsdp(optimizer, clip):
    def prepare(net):
        ignored = aristos.expert_parameters(net)
        mesh = everyone().mesh
        fully_shard(net.moe, mesh=mesh, ignored_params=ignored)
        return fully_shard(net, mesh=mesh, ignored_params=ignored), lambda: None

    return lambda: equals_one_process(prepare, optimizer, clip)


def fsdp_with_bf16_experts():
    """FSDP converts the tokens and the parameters that it manages, but not the experts."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    net, mesh = Net(everyone()), everyone().mesh
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(net, mesh=mesh, mp_policy=policy, ignored_params=aristos.expert_parameters(net))
    batch = batches()[0, dist.get_rank()]
    output = net(batch)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    single = Net(ALONE)
    single(batches()[0].flatten(0, 1)).square().mean().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
    error = relative_error(full(net.moe.down_proj.grad), single.moe.down_proj.grad)
    assert error <= 0.1, error
    return f"{error:.1e}"


def fsdp_of_a_model_on_meta():
    """A model that FSDP shards before it has memory gets the start weights of one process, and is saved and loaded."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group, single = everyone(), Net(ALONE)
    with torch.device("meta"):
        net = Net(group)
    fully_shard(net, mesh=group.mesh, ignored_params=aristos.expert_parameters(net))
    net.to_empty(device="cpu")
    torch.manual_seed(10 + rank)
    net.moe.reset_parameters()
    torch.manual_seed(10)
    single.moe.reset_parameters()
    wrong = [name for name, parameter in net.moe.named_parameters() if not torch.equal(full(parameter), single.moe.get_parameter(name))]
    assert not wrong, wrong
    folder = shared_folder()
    if rank == 0:
        aristos.save(single, folder, ALONE)
    dist.barrier()
    aristos.load(net, folder)
    folder, gathered, kept, gather = shared_folder(), [], [], DTensor.full_tensor

    def counted(tensor):
        whole = gather(tensor)
        gathered.append(weakref.ref(whole))
        kept.append(sum(one() is not None for one in gathered))
        return whole

    with unittest.mock.patch.object(DTensor, "full_tensor", counted):
        aristos.save(net, folder, group)
    assert len(kept) > 1 and (rank == 0 or max(kept) == 1), kept
    other = Net(ALONE)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(9.0)
    aristos.load(other, folder)
    wrong = [name for name, parameter in other.named_parameters() if not torch.equal(parameter, single.get_parameter(name))]
    assert not wrong and size > 1, wrong


def layer_on_the_cpu_in_a_group_with_nccl():
    """The mesh of such a group is of CUDA devices. The layer trains, is saved and is loaded in host memory."""
    group = everyone()
    mesh = group.mesh
    group._mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("ep",))
    try:
        said = equals_one_process(lambda net: (DistributedDataParallel(aristos.exclude_experts(net)), lambda: None), "adamw")
        net, other, folder = Net(group), Net(group, mean_gradients=False), shared_folder()
        aristos.save(net, folder)
        for values in (lambda: aristos.load(other, folder), lambda: other.load_state_dict(net.state_dict())):
            torch.nn.init.zeros_(other.moe.down_proj)
            values()
            assert torch.equal(other.moe.down_proj.to_local(), net.moe.down_proj.to_local()) and other.moe.down_proj.device.type == "cpu"
    finally:
        group._mesh = mesh
    return said


def layer_of_one_process_under_fsdp_is_refused():
    """Its experts are sharded over other processes than the layer's group, so a checkpoint of this process's experts would be incomplete."""
    net = fully_shard(Net(ALONE), mesh=everyone().mesh)
    words = ["moe.gate_up_proj has", f"experts here, expected {EXPERTS}", "sharded again"]
    folder = shared_folder()
    refused(ValueError, words, lambda: aristos.save(net, folder))
    refused(ValueError, words, lambda: aristos.load(net, folder))


def clipping_of_any_norm():
    """Two meshes, plain tensors, and processes without some gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    module = aristos.MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=everyone())
    gen = torch.Generator().manual_seed(5)
    whole = {name: torch.randn(parameter.shape, generator=gen) for name, parameter in module.named_parameters()}
    for norm_type in (1, 2, 2.5, float("inf")):
        for absent in (False, True):
            expected = {name: torch.nn.Parameter(torch.empty_like(values)) for name, values in whole.items()}
            for name, values in whole.items():
                grad = values.clone()
                parameter = module.get_parameter(name)
                experts = "proj" in name
                if absent and experts:
                    # The first half of the processes has no gradient at all.
                    grad[: EXPERTS // 2] = 0
                expected[name].grad = grad
                local = grad[rank * EXPERTS // size : (rank + 1) * EXPERTS // size] if experts else grad
                parameter.grad = aristos._parameters.sharded(local.clone(), module.group) if experts else grad.clone()
                if absent and experts and (rank + 1) * 2 <= size:
                    parameter.grad = None
            want = torch.nn.utils.clip_grad_norm_(expected.values(), 0.5, norm_type)
            got = aristos.clip_grad_norm_(module.parameters(), 0.5, norm_type)
            assert relative_error(got, want) <= 1e-5, (norm_type, got, want)
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    wanted = aristos._parameters.distributed_like(expected[name].grad, parameter)
                    assert relative_error(aristos._parameters.local(parameter.grad), aristos._parameters.local(wanted)) <= 1e-5, name
    module.gate.weight.grad.fill_(float("nan"))
    refused(RuntimeError, ["norm of order 2.0", "nan"], lambda: aristos.clip_grad_norm_(module.parameters(), 0.5, error_if_nonfinite=True))
    refused(ValueError, ["norm_type is 0.0"], lambda: aristos.clip_grad_norm_(module.parameters(), 0.5, 0))
    assert aristos.clip_grad_norm_([], 0.5) == 0


def clipping_of_a_transformers_model(split):
    """Transformers distributes experts and other parameters over different meshes."""

    def case():
        size, rank = dist.get_world_size(), dist.get_rank()
        batch = torch.randint(3, 32, (2 * size, 12), generator=torch.Generator().manual_seed(2))
        load = functools.partial(AutoModelForCausalLM.from_pretrained, folder_of("qwen3_moe"), dtype=torch.float32)
        eager = load(experts_implementation="eager")
        eager(input_ids=batch, labels=batch).loss.backward()
        want = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.01)
        everyone()
        model = load(distributed_config=DistributedConfig(ep_size=size, ep_implementation="aristos", **{split: size}))
        mine = batch if split == "tp_size" else batch[2 * rank : 2 * rank + 2]
        model(input_ids=mine, labels=mine).loss.backward()
        got = aristos.clip_grad_norm_(model.parameters(), 0.01)
        assert relative_error(got, want) <= 1e-5, (got, want)
        grads = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
        errors = {name: relative_error(grad, eager.get_parameter(name).grad) for name, grad in grads.items()}
        worst = max(errors, key=errors.get)
        assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]}"
        return f"{errors[worst]:.1e}"

    return case


def autocast_computes_experts_in_its_type():
    """In a layer and in a model of transformers."""
    net = Net(everyone())
    batch = batches()[0, dist.get_rank()]
    want = net(batch)
    with torch.autocast("cpu", torch.bfloat16), types_of_experts(aristos._moe) as seen:
        got = net(batch)
    assert seen == [torch.bfloat16] and 0 < relative_error(got, want) <= 2e-2
    got.float().square().mean().backward()
    assert net.moe.down_proj.grad.dtype == torch.float32
    ids = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(2))
    losses = []
    for how in ("eager", "aristos"):
        model = AutoModelForCausalLM.from_pretrained(folder_of("qwen3_moe"), dtype=torch.float32, experts_implementation=how)
        with torch.autocast("cpu", torch.bfloat16), types_of_experts(aristos._transformers) as seen:
            losses.append(model(input_ids=ids, labels=ids).loss)
    assert seen and set(seen) == {torch.bfloat16} and relative_error(losses[1], losses[0]) <= 1e-2


@contextlib.contextmanager
def types_of_experts(module):
    """Records the types of what experts return to this module of the package."""
    original, seen = module.run_experts, []

    def recorded(*arguments, **form):
        output = original(*arguments, **form)
        seen.append(output.dtype)
        return output

    module.run_experts = recorded
    try:
        yield seen
    finally:
        module.run_experts = original


def tools_that_do_not_take_dtensors_fail():
    """They fail with an error, before they change the experts."""

    def step(**options):
        net = Net(everyone())
        net(batches()[0, 0]).sum().backward()
        return net, torch.optim.SGD(net.parameters(), lr=0.1, **options).step

    def zero():
        net = Net(everyone())
        net(batches()[0, 0]).sum().backward()
        return net, ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.SGD, lr=0.0).step

    def average():
        net = Net(everyone())
        copied = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        copied.update_parameters(net)
        return net, lambda: copied.update_parameters(net)

    def wrapped(wrap):
        net = Net(everyone())
        return net, lambda: wrap(net)

    tools = [
        wrapped(DistributedDataParallel),
        wrapped(lambda net: fully_shard(net, mesh=everyone().mesh)),
        step(fused=True),
        step(foreach=True),
        zero(),
        average(),
    ]
    for at, (net, call) in enumerate(tools):
        before = net.moe.down_proj.to_local().detach().clone()
        try:
            call()
            raise AssertionError(f"expected an error of tool {at}")
        except (RuntimeError, NotImplementedError) as error:
            words = ("DTensor", "sharding strategy", "overlapping meshes")
            assert any(word in str(error) for word in words), error
        assert torch.equal(net.moe.down_proj.to_local(), before)


def adafactor_is_refused():
    net = Net(everyone())
    optimizer = torch.optim.Adafactor(net.parameters())
    net(batches()[0, 0]).sum().backward()
    refused(RuntimeError, ["Adafactor", "torch.optim.AdamW"], optimizer.step)
    single = Net(ALONE)
    single(batches()[0, 0]).sum().backward()
    torch.optim.Adafactor(single.parameters()).step()
    size = dist.get_world_size()
    split = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation="aristos")
    model = AutoModelForCausalLM.from_pretrained(folder_of("qwen3_moe"), dtype=torch.float32, distributed_config=split)
    for kind in (torch.optim.Adafactor, transformers.Adafactor):
        refused(RuntimeError, ["Adafactor", "torch.optim.AdamW"], kind(model.parameters()).step)


def sharding_over_data_parallel_processes_alone_is_warned_of():
    """On 4 processes: two groups of experts. FSDP over the processes with equal experts never sums gradients over a group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    group = aristos.Group(mesh["ep"])
    for of_all in (False, True):
        net = Net(group)
        over = mesh["dp", "ep"]._flatten("all") if of_all else mesh["dp"]
        fully_shard(net, mesh=over, ignored_params=aristos.expert_parameters(net))
        net(batches()[0, dist.get_rank()]).sum().backward()
        optimizer = torch.optim.SGD([dict(params=[one]) for one in net.parameters()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.step()
        said = [str(one.message) for one in caught if "sharded over the processes" in str(one.message)]
        assert len(said) == (not of_all), said


def groups_of_experts_with_data_parallelism():
    """On 4 processes: two groups of two, and data parallelism over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))

    def prepare(net):
        experts = aristos.expert_parameters(net)

        def average():
            for parameter in experts:
                grad = parameter.grad.to_local()
                dist.all_reduce(grad, group=mesh["dp"].get_group())
                grad /= mesh["dp"].size()

        return DistributedDataParallel(aristos.exclude_experts(net)), average

    # The load-balancing loss counts the tokens of a group of experts only.
    return equals_one_process(prepare, "adamw", group=aristos.Group(mesh["ep"]), aux_loss_coef=0.0)


CASES = dict(
    plain_loop_with_clipping=plain_loop_with_clipping,
    ddp_adamw=ddp("adamw"),
    ddp_sgd=ddp("sgd"),
    accelerate_with_ddp=accelerate_with_ddp,
    fsdp_adamw=fsdp("adamw", aristos.clip_grad_norm_),
    fsdp_sgd=fsdp("sgd", aristos.clip_grad_norm_),
    fsdp_with_torchs_clipping=fsdp("adamw", torch.nn.utils.clip_grad_norm_),
    fsdp_with_bf16_experts=fsdp_with_bf16_experts,
    fsdp_of_a_model_on_meta=fsdp_of_a_model_on_meta,
    layer_on_the_cpu_in_a_group_with_nccl=layer_on_the_cpu_in_a_group_with_nccl,
    layer_of_one_process_under_fsdp_is_refused=layer_of_one_process_under_fsdp_is_refused,
    clipping_of_any_norm=clipping_of_any_norm,
    clipping_of_a_model_with_fsdp=clipping_of_a_transformers_model("fsdp_size"),
    clipping_of_a_model_with_tp=clipping_of_a_transformers_model("tp_size"),
    autocast_computes_experts_in_its_type=autocast_computes_experts_in_its_type,
    tools_that_do_not_take_dtensors_fail=tools_that_do_not_take_dtensors_fail,
    adafactor_is_refused=adafactor_is_refused,
    sharding_over_data_parallel_processes_alone_is_warned_of=sharding_over_data_parallel_processes_alone_is_warned_of,
    groups_of_experts_with_data_parallelism=groups_of_experts_with_data_parallelism,
)

# The number of processes that a case needs. Other cases run on any number above 1.
SIZES = dict(
    clipping_of_a_model_with_tp=2,
    sharding_over_data_parallel_processes_alone_is_warned_of=4,
    groups_of_experts_with_data_parallelism=4,
)


def cases(wanted, size):
    """Returns the cases for this number of processes as (name, function) pairs, or only the wanted case."""
    fitting = {name: case for name, case in CASES.items() if SIZES.get(name, size) == size}
    found = [(f"training::{name}", case) for name, case in fitting.items() if wanted in ("", name)]
    return found or sys.exit(f"no case training:{wanted}")
