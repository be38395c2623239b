"""Every parameter's gradient with experts over N processes equals the unpatched model's in one process.

Run by tools/test-python as ``torchrun --nproc-per-node N test_transformers.py CASE...``, a case being ``fsdp`` or ``tp``, a colon, and a model; or
a further colon and a fault, which is planted, and which the comparison must see.
"""

import contextlib
import math
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import aristos
from aristos import _experts

WIDTHS = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=64,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "qwen2_moe": dict(
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    ),
    "qwen3_moe": dict(
        moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1
    ),
    "olmoe": dict(num_experts=8, num_experts_per_tok=2),
    "deepseek_v3": dict(
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
        n_shared_experts=1,
    ),
}
BATCH, LENGTH, STEPS = 4, 16, 2


def broken_backward(original):
    """Loses the gradient of the routing weights."""

    def backward(ctx, grad_output):
        grad_x, grad_weights, grad_up, grad_down = original(ctx, grad_output)
        return grad_x, torch.zeros_like(grad_weights), grad_up, grad_down

    return backward


def broken_load(original):
    """Keeps the weights of the first pass."""

    def load(self, up, down):
        if not hasattr(self, "loaded"):
            original(self, up, down)
        self.loaded = True

    return load


FAULTS = {
    "no-gradient-of-weights": (_experts, "_backward", broken_backward),
    "stale-weights": (_experts.Experts, "_load", broken_load),
}


@contextlib.contextmanager
def planted(fault):
    """The plug-in with a fault, or as it is with none."""
    if not fault:
        yield
        return
    owner, name, breaks = FAULTS[fault]
    original = getattr(owner, name)
    setattr(owner, name, breaks(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def steps(model, batches):
    """The gradients of the last of some steps of SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    return {name: full(p.grad) for name, p in model.named_parameters()}


def compare(name, mode, folder):
    """The worst relative error over all parameters' gradients, and which."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    batches = torch.randint(3, 64, (STEPS, BATCH * size, LENGTH))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = steps(reference, batches)
    split = dict(fsdp_size=size) if mode == "fsdp" else dict(tp_size=size)
    patched = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(ep_size=size, ep_implementation="aristos", **split),
    )
    own = batches[:, BATCH * rank : BATCH * (rank + 1)] if mode == "fsdp" else batches
    got = steps(patched, own)
    assert got.keys() == wanted.keys(), f"{got.keys() ^ wanted.keys()}"
    worst = ("", 0.0)
    for key, want in wanted.items():
        assert got[key] is not None, f"{key} has no gradient"
        error = ((got[key] - want).norm() / (want.norm() + 1e-12)).item()
        if math.isnan(error):
            return key, math.inf
        if error > worst[1]:
            worst = (key, error)
    return worst


def parse(text):
    """A case: its mode, its model, its fault or an empty string."""
    mode, model, fault = (text.split(":") + [""])[:3]
    if mode not in ("fsdp", "tp") or model not in MODELS or (fault and fault not in FAULTS):
        sys.exit(f"no case {text}")
    return mode, model, fault


def main():
    cases = [parse(text) for text in sys.argv[1:]]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    failed = 0
    for mode, name, fault in cases:
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.manual_seed(0)
                config = AutoConfig.for_model(name, **{**WIDTHS, **MODELS[name]})
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            shared = [folder]
            dist.broadcast_object_list(shared)
            with planted(fault):
                key, error = compare(name, mode, shared[0])
            dist.barrier()
        seen = error > 1e-5
        wrong = seen != bool(fault)
        failed += wrong
        if rank == 0:
            what = f"fault {fault}" if fault else "equal"
            verdict = "FAILED" if wrong else "ok"
            print(f"test transformers::{name}::{mode}::{size}::{what} ... {verdict} ({error:.1e}, {key})", flush=True)
    dist.destroy_process_group()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
