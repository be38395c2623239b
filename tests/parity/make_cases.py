"""Makes the parity cases with `transformers`: python make_cases.py DIR

Each case is a folder in DIR:
    config.json, model*.safetensors   a tiny model of the family, as save_pretrained writes it
    input.safetensors                 hidden_states, grad_output: [tokens, hidden]
    expected.safetensors              results of the model's MoE block in f32: output, grad_hidden_states, and
                                      grad.<name> for every weight of the block, under its name in the checkpoint
DIR/cases.json lists the cases: [{name, layer, dtype, tokens_per_expert}]. A bf16 case has weights and inputs rounded to
bf16, and its results are computed in f32 from the rounded values. The same seeds give the same files.

The weights are drawn so that the routing is far from uniform. A token is drawn again if its choice of experts or groups
is near a tie, where the result depends on rounding.
"""

import json
import os
import shutil
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LAYER = 1
# A token is drawn again if its k-th and (k+1)-th candidates are closer than this, relative to the k-th.
TIE = 1e-3

COMMON = dict(
    vocab_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    experts_implementation="eager",
)


def mixtral(**kw):
    return MixtralForCausalLM, MixtralConfig(**COMMON, **kw)


def qwen2(**kw):
    return Qwen2MoeForCausalLM, Qwen2MoeConfig(**COMMON, **kw)


def qwen3(**kw):
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**COMMON, head_dim=16, **kw)


def olmoe(**kw):
    return OlmoeForCausalLM, OlmoeConfig(**COMMON, **kw)


def deepseek(**kw):
    mla = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
    config = DeepseekV3Config(**{**COMMON, "num_key_value_heads": 4}, **mla, first_k_dense_replace=1, **kw)
    return DeepseekV3ForCausalLM, config


# name: (family, its fields, tokens, shard size or None)
CASES = {
    "mixtral": (
        mixtral,
        dict(hidden_size=64, intermediate_size=100, num_local_experts=8, num_experts_per_tok=2),
        61,
        None,
    ),
    "mixtral-sharded": (
        mixtral,
        dict(
            hidden_size=72, intermediate_size=96, num_local_experts=5, num_experts_per_tok=3, hidden_act="gelu_new"
        ),
        61,
        "100KB",
    ),
    "qwen2-moe": (
        qwen2,
        dict(
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=96,
            shared_expert_intermediate_size=140,
            num_experts=6,
            num_experts_per_tok=4,
            norm_topk_prob=False,
        ),
        61,
        None,
    ),
    "qwen2-moe-norm": (
        qwen2,
        dict(
            hidden_size=96,
            intermediate_size=128,
            moe_intermediate_size=104,
            shared_expert_intermediate_size=160,
            num_experts=7,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            hidden_act="gelu",
            decoder_sparse_step=2,
        ),
        61,
        "120KB",
    ),
    "qwen3-moe": (
        qwen3,
        dict(
            hidden_size=80,
            intermediate_size=128,
            moe_intermediate_size=112,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        ),
        61,
        None,
    ),
    "qwen3-moe-one-token": (
        qwen3,
        dict(
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=96,
            num_experts=9,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            hidden_act="gelu_pytorch_tanh",
        ),
        1,
        None,
    ),
    "olmoe": (
        olmoe,
        dict(hidden_size=64, intermediate_size=104, num_experts=11, num_experts_per_tok=4, norm_topk_prob=False),
        61,
        None,
    ),
    "olmoe-norm": (
        olmoe,
        dict(
            hidden_size=88,
            intermediate_size=96,
            num_experts=10,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            hidden_act="relu",
        ),
        67,
        "200KB",
    ),
    "deepseek-v3": (
        deepseek,
        dict(
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=96,
            n_routed_experts=16,
            n_shared_experts=2,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
        61,
        None,
    ),
    "deepseek-v3-raw": (
        deepseek,
        dict(
            hidden_size=96,
            intermediate_size=128,
            moe_intermediate_size=100,
            n_routed_experts=15,
            n_shared_experts=1,
            num_experts_per_tok=6,
            n_group=3,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            hidden_act="gelu",
        ),
        59,
        "150KB",
    ),
}
# Cases that are also made in bf16, one per family.
BF16 = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3"]


def draw_weights(block, gen):
    """Draws weights so that all terms of the layer have similar magnitude and the routing is skewed."""

    def normal(p, std):
        p.copy_(torch.randn(p.shape, generator=gen) * std)

    with torch.no_grad():
        for p in block.parameters():
            # 1/sqrt(in) keeps activations near 1; a slightly larger factor makes the nonlinearity matter.
            normal(p, 1.5 / p.shape[-1] ** 0.5)
        gate = block.gate.weight
        experts, hidden = gate.shape
        normal(gate, 2.0 / hidden**0.5)
        if hasattr(block.gate, "e_score_correction_bias"):
            bias = block.gate.e_score_correction_bias
            bias.copy_(torch.linspace(0.15, -0.15, experts)[torch.randperm(experts, generator=gen)])


def near_tie(block, config, x):
    """Per token, whether its choice of experts or groups is near a tie."""
    with torch.no_grad():
        logits = (x.double() @ block.gate.weight.double().T).reshape(-1, block.gate.weight.shape[0])
        k = config.num_experts_per_tok

        def close(values, k):
            if k >= values.shape[-1]:
                return torch.zeros(len(values), dtype=torch.bool)
            top = values.topk(k + 1, dim=-1)[0]
            a, b = top[:, k - 1], top[:, k]
            return (a - b) < TIE * a.abs().clamp(min=1e-9)

        if not hasattr(block.gate, "e_score_correction_bias"):
            return close(logits.softmax(-1), k)
        choice = logits.sigmoid() + block.gate.e_score_correction_bias.double()
        groups = choice.view(len(choice), config.n_group, -1)
        group_scores = groups.topk(2, dim=-1)[0].sum(-1)
        kept = group_scores.topk(config.topk_group, dim=-1)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, kept, 1).bool()
        masked = groups.masked_fill(~mask[..., None], -1e9).view(len(choice), -1)
        return close(group_scores, config.topk_group) | close(masked, k)


def draw_tokens(block, config, tokens, gen, rounding):
    """Draws tokens around a common direction, so that the experts' loads differ much."""
    hidden = config.hidden_size
    common = torch.randn(hidden, generator=gen)

    def draw(n):
        return rounding(torch.randn(n, hidden, generator=gen) + 0.7 * common)

    x = draw(tokens)
    for _ in range(100):
        tie = near_tie(block, config, x)
        if not tie.any():
            return x
        x[tie] = draw(int(tie.sum()))
    raise SystemExit("tokens stay near a tie")


def names_of(block_name, disk_names):
    """Maps a tensor's name on disk to (parameter of the block, expert or None, half 0 or 1 or None)."""
    # On disk each expert has separate matrices; in memory `transformers` packs gate and up of all experts in one
    # tensor.
    parts = {
        "gate_proj": ("experts.gate_up_proj", 0),
        "w1": ("experts.gate_up_proj", 0),
        "up_proj": ("experts.gate_up_proj", 1),
        "w3": ("experts.gate_up_proj", 1),
        "down_proj": ("experts.down_proj", None),
        "w2": ("experts.down_proj", None),
    }
    out = {}
    for name in disk_names:
        if not name.startswith(block_name):
            continue
        rest = name[len(block_name) :]
        if rest.startswith("experts."):
            _, expert, part, _ = rest.split(".")
            parameter, half = parts[part]
            out[name] = (parameter, int(expert), half)
        else:
            out[name] = (rest, None, None)
    return out


def pick(tensor, expert, half):
    if expert is None:
        return tensor
    tensor = tensor[expert]
    return tensor if half is None else tensor.chunk(2, dim=0)[half]


def make(root, name, family, fields, tokens, shard, bf16, seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    cls, config = family(**fields)
    model = cls(config).float().eval()
    block = model.model.layers[LAYER].mlp
    draw_weights(block, gen)

    def rounding(t):
        return t.to(torch.bfloat16).float() if bf16 else t

    with torch.no_grad():
        for p in [*block.parameters()]:
            p.copy_(rounding(p))
    x = draw_tokens(block, config, tokens, gen, rounding)
    grad = rounding(torch.randn(tokens, config.hidden_size, generator=gen))

    folder = os.path.join(root, name)
    os.makedirs(folder)
    bias = getattr(block.gate, "e_score_correction_bias", None)
    if bf16:
        model = model.to(torch.bfloat16)
        if bias is not None:  # published checkpoints keep it in f32
            block.gate.e_score_correction_bias = bias
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    if bf16:
        model = model.float()

    leaf = x.clone().requires_grad_()
    output = block(leaf[None])[0]
    output.backward(grad)

    on_disk = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(folder, file), "pt") as f:
                on_disk.update({k: f.get_tensor(k) for k in f.keys()})
    old = "block_sparse_moe" if family is mixtral else "mlp"
    names = names_of(f"model.layers.{LAYER}.{old}.", on_disk)
    check_names(family, names, config)
    parameters = dict(block.named_parameters())
    buffers = dict(block.named_buffers())
    expected = {"output": output.detach(), "grad_hidden_states": leaf.grad}
    for disk, (parameter, expert, half) in names.items():
        if parameter in buffers:
            assert torch.equal(on_disk[disk].float(), buffers[parameter]), f"{disk} on disk is not what was run"
            continue
        value = parameters[parameter]
        assert torch.equal(on_disk[disk].float(), pick(value, expert, half)), f"{disk} on disk is not what was run"
        expected["grad." + disk] = pick(value.grad, expert, half)
    n = len([k for k in names if "experts." in k and "shared" not in k])
    assert n == 3 * block.gate.weight.shape[0], f"{name}: {n} expert tensors on disk"

    save = {k: v.detach().contiguous() for k, v in expected.items()}
    save_file(save, os.path.join(folder, "expected.safetensors"))
    dtype = torch.bfloat16 if bf16 else torch.float32
    save_file({"hidden_states": x.to(dtype), "grad_output": grad.to(dtype)}, os.path.join(folder, "input.safetensors"))

    with torch.no_grad():
        chosen = block.gate(x)[-1]
    load = torch.bincount(chosen.reshape(-1), minlength=block.gate.weight.shape[0]).tolist()
    assert tokens == 1 or max(load) > 1.3 * sum(load) / len(load), f"{name}: routing is uniform: {load}"
    return {"name": name, "layer": LAYER, "dtype": "bf16" if bf16 else "f32", "tokens_per_expert": load}


def check_names(family, names, config):
    """Checks that the names on disk equal those of the published checkpoints."""
    p = f"model.layers.{LAYER}."
    want = {
        mixtral: ["block_sparse_moe.gate.weight", "block_sparse_moe.experts.0.w1.weight"],
        qwen2: ["mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.shared_expert.down_proj.weight"]
        + ["mlp.shared_expert_gate.weight"],
        qwen3: ["mlp.gate.weight", "mlp.experts.0.down_proj.weight"],
        olmoe: ["mlp.gate.weight", "mlp.experts.0.up_proj.weight"],
        deepseek: ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.0.up_proj.weight"]
        + ["mlp.shared_experts.gate_proj.weight"],
    }[family]
    missing = [p + w for w in want if p + w not in names]
    assert not missing, f"not on disk: {missing}"


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    root = sys.argv[1]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    if os.path.isdir(root) and os.listdir(root) and not os.path.exists(os.path.join(root, "cases.json")):
        raise SystemExit(f"{root} is a folder with something else in it")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    cases = []
    for seed, (name, (family, fields, tokens, shard)) in enumerate(CASES.items()):
        cases.append(make(root, name, family, fields, tokens, shard, False, seed))
    for seed, name in enumerate(BF16, start=100):
        family, fields, tokens, shard = CASES[name]
        cases.append(make(root, name + "-bf16", family, fields, tokens, shard, True, seed))
    with open(os.path.join(root, "cases.json"), "w") as f:
        json.dump(cases, f, indent=1)
    for case in cases:
        print(f"{case['name']}: layer {case['layer']}, tokens per expert {case['tokens_per_expert']}")


if __name__ == "__main__":
    main()
