"""Output and every parameter's gradient with experts over N processes equal the unpatched model's in one process.

A case is a mode (``fsdp``, ``tp``, ``both``: tp of 2 within fsdp, or ``alone``: one process, without expert parallelism), a colon, and a model
type; ``:bf16`` for bfloat16; ``:emulated`` for an emulated device; ``:FAULT`` for an injected fault that the comparison must detect.
"""

import contextlib
import functools
import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
from harness import full, relative_error
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import aristos
from aristos import _transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "parity"))
from make_families import configure

EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8)
# The fields that only one family has. All other fields are those of the parity tests.
FIELDS = {
    "deepseek_v3": dict(n_group=2, topk_group=1),
    "dots1": dict(n_shared_experts=1),
    "ernie4_5_moe": dict(moe_k=2),
    "qwen3_moe": dict(norm_topk_prob=True),
}
# In bfloat16, the grouped GEMM of the unpatched model needs rows whose size is a multiple of 16 bytes.
WIDTHS = dict(moe_intermediate_size=16, intermediate_size=32, shared_intermediate_size=16)
ROUTERS = ("gate.weight", "router.weight", "gate.wg.weight")
BATCH, LENGTH = 4, 16
# In bfloat16 there is only one step, because rounding alone makes the weights of a second step differ.
STEPS = {torch.float32: 2, torch.bfloat16: 1}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# A device rounds to bfloat16 in other places than the engine on the CPU, whose largest error is just below its limit.
DEVICE_LIMIT = 3e-2
# Maximum error of a gradient above the general limit, relative to the unpatched model's own distance from a wider type: in
# bfloat16, rounding alone changes gradients of routers and layer norms by up to 0.3, and in float32 FlexOlmo's by 1.0e-5 after
# a step.
ROUNDING, WIDER = 1.1, {torch.float32: torch.float64, torch.bfloat16: torch.float32}


def without_routing_gradient(original):
    def backward(*args):
        grad_x, grad_weights, *rest = original(*args)
        return grad_x, torch.zeros_like(grad_weights), *rest

    return backward


def with_first_weights(original):
    first = {}

    def experts(x, ids, weights, up, down, **form):
        # The injected fault: the layer keeps the weights of its first pass and the storage of their gradients.
        def stale(tensor, part):
            key = (tensor.data_ptr(), part)
            return tensor + (first.setdefault(key, tensor.detach().clone()) - tensor).detach()

        return original(x, ids, weights, stale(up, "up"), stale(down, "down"), **form)

    return experts


@contextlib.contextmanager
def injected(fault):
    """Injects a fault into the plug-in, or leaves it unchanged if there is none."""
    ops, run = torch.ops.aristos, _transformers.run_experts
    backwards = ops.experts_backward, ops.device_experts_backward
    if fault == "no-gradient-of-weights":
        ops.experts_backward, ops.device_experts_backward = map(without_routing_gradient, backwards)
    if fault == "stale-weights":
        _transformers.run_experts = with_first_weights(run)
    try:
        yield
    finally:
        (ops.experts_backward, ops.device_experts_backward), _transformers.run_experts = backwards, run


def steps(model, batches, count):
    """Returns the logits of the first batch, and the gradients of the last of `count` steps of SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits = None
    for batch in batches[:count]:
        optimizer.zero_grad()
        output = model(input_ids=batch, labels=batch)
        logits = output.logits.detach() if logits is None else logits
        output.loss.backward()
        optimizer.step()
    return logits, {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


_folders = []


@functools.cache
def folder_of(name):
    """Makes a folder with a tiny model of a family. The model is the same on all processes."""
    # The process that creates the folder deletes it at the end.
    made = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    _folders.append(made)
    shared = [made and made.name]
    dist.broadcast_object_list(shared)
    if made:
        torch.manual_seed(0)
        config = configure(name, {})
        fields = {field: n for field, n in (EXPERTS | WIDTHS).items() if hasattr(config, field)} | FIELDS.get(name, {})
        model = AutoModelForCausalLM.from_config(configure(name, fields))
        # The scores are made to differ widely, so that rounding to bfloat16 does not change which experts are selected.
        for key, parameter in model.named_parameters():
            if key.endswith(ROUTERS) and parameter.dim() == 2:
                parameter.data.mul_(40)
        model.save_pretrained(shared[0])
    dist.barrier()
    return shared[0]


@functools.cache
def wanted(name, dtype, batches, split_attention):
    """Returns the reference, which is the unpatched model. It runs either on one process, or with attention split in the way of the patched
    model and with its own expert parallelism."""
    how = dict(experts_implementation="eager")
    if split_attention:
        size = dist.get_world_size()
        how = dict(distributed_config=DistributedConfig(ep_size=size, tp_size=size, ep_implementation="all_to_all"))
    reference = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=dtype, **how)
    return steps(reference, batches_of(batches), STEPS[dtype])


@functools.cache
def exact(name, dtype, batches):
    """Returns the gradients in a wider type, for weights that are rounded to `dtype`."""
    reference = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=dtype, experts_implementation="eager").to(WIDER[dtype])
    return steps(reference, batches_of(batches), STEPS[dtype])[1]


def rounded_alike(got, want, exactly):
    return relative_error(got, exactly) <= ROUNDING * relative_error(want, exactly)


def batches_of(n):
    torch.manual_seed(1)
    return torch.randint(3, 32, (2, n, LENGTH))


def compare(mode, name, dtype, limit):
    """The worst relative error of the logits and all gradients except those with similar rounding; its name, and the excepted names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # In bfloat16, the rounding of split attention differs from that of whole attention by as much as the differences that are compared.
    logits, gradients = wanted(name, dtype, BATCH * size, mode == "tp" and dtype == torch.bfloat16)
    split = {"fsdp": dict(fsdp_size=size), "tp": dict(tp_size=size), "both": dict(fsdp_size=size // 2, tp_size=2), "alone": {}}[mode]
    if mode == "alone":
        how = dict(experts_implementation="aristos")
    else:
        how = dict(distributed_config=DistributedConfig(ep_size=size, ep_implementation="aristos", **split))
    patched = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=dtype, **how)
    parts = split.get("fsdp_size", 1)
    mine = slice(*(BATCH * size // parts * (rank * parts // size + k) for k in (0, 1)))
    got_logits, got = steps(patched, batches_of(BATCH * size)[:, mine], STEPS[dtype])
    assert got.keys() == gradients.keys(), f"{got.keys() ^ gradients.keys()}"
    errors, alike = {"logits": relative_error(got_logits, logits[mine])}, []
    for key, want in gradients.items():
        if want is None:
            assert got[key] is None or not got[key].any(), f"{key} has a gradient, and none in the unpatched model"
            continue
        assert got[key] is not None, f"{key} has no gradient"
        error = relative_error(got[key], want)
        if error > limit and rounded_alike(got[key], want, exact(name, dtype, BATCH * size)[key]):
            alike.append(f"{key} {error:.1e}")
        else:
            errors[key] = error
    worst = max(errors, key=errors.get)
    return errors[worst], "; rounded alike: ".join([worst] + alike)


def case(mode, name, dtype, device, fault):
    limit = LIMITS[dtype] if device == "cpu" else DEVICE_LIMIT
    with injected(fault):
        os.environ["ARISTOS_DEVICE"] = device
        try:
            error, worst = compare(mode, name, dtype, limit)
        finally:
            os.environ["ARISTOS_DEVICE"] = "cpu"
    seen = error > limit
    said = f"{error:.1e}, {worst}"
    assert seen == bool(fault), f"{said}, expected {'more' if fault else 'at most'} {limit}"
    return said


def case_named(text):
    """Returns the name and the function of a case."""
    mode, name, *rest = text.split(":")
    dtype = torch.bfloat16 if "bf16" in rest else torch.float32
    device = "emulated" if "emulated" in rest else "cpu"
    fault = next((word for word in rest if word not in ("bf16", "emulated")), "")
    if mode not in ("fsdp", "tp", "both", "alone") or name not in aristos.families() or fault not in ("", "no-gradient-of-weights", "stale-weights"):
        sys.exit(f"no case {text}")
    return f"transformers::{text.replace(':', '::')}", functools.partial(case, mode, name, dtype, device, fault)
