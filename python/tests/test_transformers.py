"""Output and every parameter's gradient with experts over N processes equal the unpatched model's in one process.

Run by tools/test-python as ``torchrun --nproc-per-node N test_transformers.py CASE...``, a case being a mode (``fsdp``, ``tp``, or ``both``: tp of
2 within fsdp), a colon, and a model type; ``:bf16`` for bfloat16; ``:FAULT`` for a fault that is planted, and that the comparison must see.
"""

import contextlib
import functools
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
from harness import full, relative_error, run
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import aristos
from aristos import _transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "parity"))
from make_families import configure

EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8)
# What only one family has; the other fields are the parity tests'.
FIELDS = {
    "deepseek_v3": dict(n_group=2, topk_group=1),
    "ernie4_5_moe": dict(moe_k=2),
    "granitemoe": dict(intermediate_size=12),
    "qwen3_moe": dict(norm_topk_prob=True),
}
BATCH, LENGTH, STEPS = 4, 16, 2
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def without_routing_gradient(original):
    def backward(*args):
        grad_x, grad_weights, *rest = original(*args)
        return grad_x, torch.zeros_like(grad_weights), *rest

    return backward


def with_first_weights(original):
    first = {}

    def experts(x, ids, weights, up, down, **form):
        # As if the layer had kept the weights of its first pass, and their gradients' place.
        def stale(tensor, part):
            key = (tensor.data_ptr(), part)
            return tensor + (first.setdefault(key, tensor.detach().clone()) - tensor).detach()

        return original(x, ids, weights, stale(up, "up"), stale(down, "down"), **form)

    return experts


@contextlib.contextmanager
def planted(fault):
    """The plug-in with a fault, or as it is with none."""
    original = torch.ops.aristos.experts_backward, _transformers.run_experts
    if fault == "no-gradient-of-weights":
        torch.ops.aristos.experts_backward = without_routing_gradient(original[0])
    if fault == "stale-weights":
        _transformers.run_experts = with_first_weights(original[1])
    try:
        yield
    finally:
        torch.ops.aristos.experts_backward, _transformers.run_experts = original


def steps(model, batches):
    """The logits of the first batch, and the gradients of the last of some steps of SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits = None
    for batch in batches:
        optimizer.zero_grad()
        output = model(input_ids=batch, labels=batch)
        logits = output.logits.detach() if logits is None else logits
        output.loss.backward()
        optimizer.step()
    return logits, {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


@functools.cache
def folder_of(name):
    """A folder with a tiny model of a family, the same on all processes."""
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = configure(name, {})
        fields = FIELDS.get(name, {}) | {field: n for field, n in EXPERTS.items() if hasattr(config, field)}
        AutoModelForCausalLM.from_config(configure(name, fields)).save_pretrained(shared[0])
    dist.barrier()
    return shared[0]


@functools.cache
def wanted(name, dtype, batches):
    reference = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=dtype, experts_implementation="eager")
    return steps(reference, batches_of(batches))


def batches_of(n):
    torch.manual_seed(1)
    return torch.randint(3, 32, (STEPS, n, LENGTH))


def compare(mode, name, dtype):
    """The worst relative error over the logits and all parameters' gradients, and of which."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logits, gradients = wanted(name, dtype, BATCH * size)
    split = {"fsdp": dict(fsdp_size=size), "tp": dict(tp_size=size), "both": dict(fsdp_size=size // 2, tp_size=2)}[mode]
    patched = AutoModelForCausalLM.from_pretrained(
        folder_of(name),
        dtype=dtype,
        distributed_config=DistributedConfig(ep_size=size, ep_implementation="aristos", **split),
    )
    parts = split.get("fsdp_size", 1)
    mine = slice(*(BATCH * size // parts * (rank * parts // size + k) for k in (0, 1)))
    got_logits, got = steps(patched, batches_of(BATCH * size)[:, mine])
    assert got.keys() == gradients.keys(), f"{got.keys() ^ gradients.keys()}"
    errors = {"logits": relative_error(got_logits, logits[mine])}
    for key, want in gradients.items():
        if want is None:
            assert got[key] is None or not got[key].any(), f"{key} has a gradient, and none in the unpatched model"
            continue
        assert got[key] is not None, f"{key} has no gradient"
        errors[key] = relative_error(got[key], want)
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def case(mode, name, dtype, fault):
    with planted(fault):
        error, worst = compare(mode, name, dtype)
    seen = error > LIMITS[dtype]
    said = f"{error:.1e}, {worst}"
    assert seen == bool(fault), f"{said}, expected {'more' if fault else 'at most'} {LIMITS[dtype]}"
    return said


def parse(text):
    mode, name, *rest = text.split(":")
    dtype = torch.bfloat16 if "bf16" in rest else torch.float32
    fault = next((word for word in rest if word != "bf16"), "")
    if mode not in ("fsdp", "tp", "both") or name not in aristos.families() or fault not in ("", "no-gradient-of-weights", "stale-weights"):
        sys.exit(f"no case {text}")
    return text.replace(":", "::"), functools.partial(case, mode, name, dtype, fault)


if __name__ == "__main__":
    run("transformers", [parse(text) for text in sys.argv[1:]])
