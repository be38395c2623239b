"""Makes parity cases for every family with `transformers`: python make_families.py DIR

The format is that of make_cases.py: a folder per case with a tiny model as save_pretrained writes it, the input, and the
results of the model's MoE block in f32. Every family has a case in its published layout, one in the model class's
layout (`save_original_format`), and one in bf16. DIR/cases.json lists the cases. DIR/defaults.json has the value of every
field that is absent or null in the configuration.

Names, shapes and order of gradients come from transformers: the model is saved once more with gradients as weights.
"""

import dataclasses
import inspect
import json
import os
import re
import shutil
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

H, TOKENS, LAYER = 32, 23, 1
TYPES = ["dense", "sparse"]
# Fields of a tiny model, used if its configuration class has them.
SMALL = dict(
    vocab_size=32,
    hidden_size=H,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=20,
    moe_intermediate_size=12,
    max_position_embeddings=32,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_experts=6,
    num_local_experts=6,
    n_routed_experts=6,
    num_experts_per_tok=2,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    sliding_window=8,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=4,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_head_dim=8,
    linear_num_heads=2,
    mamba_d_state=8,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_expand=2,
    mamba_chunk_size=8,
    mamba_dt_rank=4,
)
GROUPS = dict(n_group=3, topk_group=2)
# A tiny vision model.
VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    depth=1,
    num_attention_heads=2,
    num_heads=2,
    patch_size=4,
    image_size=8,
    out_hidden_size=H,
    spatial_merge_size=1,
    temporal_patch_size=1,
    in_channels=3,
    projector_input_dim=16,
    projector_output_dim=H,
    deepstack_visual_indexes=[0],
    num_position_embeddings=16,
)


def attention(x, name, block):
    return block(x)


@dataclasses.dataclass
class Case:
    """A case. `family` is the model type; `fields` are added to SMALL."""

    family: str
    fields: dict = dataclasses.field(default_factory=dict)
    # The model class, if it cannot be found automatically.
    model: str | None = None
    # Size of the biases in selection.
    bias: float = 0.15
    formats: tuple = (True, False)
    bf16: bool = True
    # Factor on the drawn weights of gate and up, so that clamps matter.
    gain: float = 1.0
    # Limits of gate and up. No value may be near them, where rounding would decide.
    limits: tuple = ()
    # Maximum size of a file, for several shards.
    shard: str | None = None
    # Tensors on disk that are not read.
    unread: str | None = None
    # The model type of a multimodal model that contains this one, and fields of its vision model.
    within: str | None = None
    vision: dict = dataclasses.field(default_factory=dict)
    # Quantisation of large matrices on disk: "mxfp4", "fp8".
    stored: str | None = None


# name: case. Further cases of a family are named after their setting.
CASES = {
    "mixtral": Case("mixtral"),
    "qwen2_moe": Case("qwen2_moe"),
    "qwen3_moe": Case("qwen3_moe", dict(norm_topk_prob=True)),
    "qwen3_moe-one": Case("qwen3_moe", dict(num_experts_per_tok=1), bf16=False),
    "olmoe": Case("olmoe"),
    "deepseek_v3": Case("deepseek_v3", GROUPS),
    "deepseek_v3-fp8": Case("deepseek_v3", dict(GROUPS, n_shared_experts=1), formats=(True,), stored="fp8"),
    "deepseek_v3-shards": Case("deepseek_v3", dict(n_shared_experts=0), shard="8KB", bf16=False),
    "deepseek_v3-null": Case("deepseek_v3", dict(norm_topk_prob=None, n_shared_experts=3), bf16=False),
    "afmoe": Case("afmoe", dict(num_shared_experts=1, route_scale=1.5)),
    "aria_text": Case("aria_text", dict(moe_num_experts=6)),
    "aria_text-bias": Case("aria_text", dict(moe_num_experts=6, mlp_bias=True), bf16=False),
    "axk1": Case("axk1", GROUPS),
    "axk2": Case("axk2"),
    "axk2-groups": Case("axk2", GROUPS, bf16=False),
    "bailing_hybrid": Case("bailing_hybrid", GROUPS),
    "beam": Case("beam", dict(mlp_layer_types=TYPES, **GROUPS)),
    "cohere2_moe": Case("cohere2_moe"),
    "cohere2_moe-mean": Case("cohere2_moe", dict(num_shared_experts=3), bf16=False),
    "cohere2_moe-sigmoid": Case(
        "cohere2_moe",
        dict(
            num_shared_experts=1, expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum",
            norm_topk_prob=False,
        ),
        bf16=False,
    ),
    "dbrx": Case(
        "dbrx",
        dict(
            d_model=H, n_heads=4, n_layers=2, max_seq_len=32,
            ffn_config=dict(ffn_hidden_size=12, moe_num_experts=6, moe_top_k=2, moe_normalize_expert_weights=2.0),
            attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10000.0),
        ),
        formats=(True,),
    ),
    "deepseek_v2": Case("deepseek_v2"),
    "deepseek_v2-groups": Case("deepseek_v2", dict(topk_method="group_limited_greedy", num_experts_per_tok=3, routed_scaling_factor=2.0, **GROUPS)),
    "deepseek_ocr2": Case("deepseek_ocr2_text", dict(mlp_layer_types=TYPES, num_key_value_heads=4)),
    "unlimited_ocr": Case("unlimited_ocr_text", dict(mlp_layer_types=TYPES)),
    "deepseek_v32": Case("deepseek_v32", GROUPS),
    "deepseek_v4": Case("deepseek_v4", dict(mlp_layer_types=["hash_moe", "moe"], swiglu_limit=1.0), gain=2.0, limits=(1.0,)),
    "dots1": Case("dots1", dict(n_shared_experts=2, norm_topk_prob=True)),
    "dots3_note": Case("dots3_note_text", dict(num_key_value_heads=4, shared_experts_intermediate_size=10, n_shared_experts=2)),
    "ernie4_5_moe": Case("ernie4_5_moe", dict(moe_num_experts=6, moe_k=2), bias=0.05),
    "ernie4_5_moe-floor": Case("ernie4_5_moe", dict(moe_num_experts=6, moe_k=2, moe_norm_min=0.8), bias=0.05, bf16=False),
    "exaone_moe": Case("exaone_moe", GROUPS),
    "flex_olmo": Case("flex_olmo"),
    "flint": Case("flint", dict(mlp_only_layers=[0])),
    "glm4_moe": Case("glm4_moe", GROUPS),
    "glm4v_moe": Case("glm4v_moe_text"),
    "glm4_moe_lite": Case("glm4_moe_lite"),
    "glm5_next": Case(
        "glm5_next_text",
        dict(mlp_layer_types=TYPES, num_key_value_heads=4, qk_rope_head_dim=0, swiglu_limit=1.0, index_kpool=2),
        gain=2.0,
        limits=(1.0,),
    ),
    "glm_moe_dsa": Case("glm_moe_dsa"),
    "gpt_oss": Case("gpt_oss", dict(swiglu_limit=1.5), gain=2.0, limits=(1.5,)),
    "gpt_oss-mxfp4": Case(
        "gpt_oss", dict(swiglu_limit=1.5, intermediate_size=64), gain=2.0, limits=(1.5,), formats=(True,), stored="mxfp4"
    ),
    "gpt_oss-shards": Case("gpt_oss", dict(swiglu_limit=1.5), gain=2.0, limits=(1.5,), shard="8KB", bf16=False),
    "openai_privacy_filter": Case("openai_privacy_filter", dict(swiglu_limit=1.5), gain=2.0, limits=(1.5,)),
    "granitemoe": Case("granitemoe"),
    "granitemoeshared": Case("granitemoeshared"),
    "granitemoeshared-none": Case("granitemoeshared", dict(shared_intermediate_size=0), bf16=False),
    "granitemoehybrid": Case("granitemoehybrid", dict(layer_types=["linear_attention", "full_attention"], mamba_n_groups=1)),
    "granitemoe_swa": Case("granitemoe_swa"),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe", dict(moe_topk=[1, 2])),
    "hy_v3": Case("hy_v3"),
    "hy_v4": Case("hy_v4", dict(swiglu_limit=1.0), gain=2.0, limits=(1.0,)),
    "jamba": Case("jamba", dict(attn_layer_period=2, attn_layer_offset=1)),
    "kimi_linear": Case("kimi_linear"),
    "kolibri1": Case("kolibri1", dict(norm_topk_prob=True)),
    "laguna": Case("laguna", dict(moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=2.0)),
    "lfm2_moe": Case("lfm2_moe", dict(num_dense_layers=1, layer_types=["full_attention", "conv"])),
    "lfm2_moe-unbiased": Case(
        "lfm2_moe", dict(num_dense_layers=1, layer_types=["full_attention", "conv"], use_expert_bias=False), bf16=False
    ),
    "llama4": Case("llama4_text"),
    "llama4-two": Case("llama4_text", dict(num_experts_per_tok=2), bf16=False),
    "longcat_flash": Case(
        "longcat_flash",
        dict(num_layers=2, ffn_hidden_size=20, expert_ffn_hidden_size=12, moe_topk=3, zero_expert_num=3),
        bias=0.05,
        formats=(True,),
        unread=r"experts\.[678]\.",
    ),
    "mellum": Case("mellum"),
    "mimo_v2_flash": Case("mimo_v2_flash"),
    "minimax": Case("minimax"),
    "minimax_m2": Case("minimax_m2"),
    "minimax_m3_vl": Case(
        "minimax_m3_vl_text", dict(dense_intermediate_size=20, mlp_layer_types=TYPES, swiglu_limit=1.5), gain=2.0, limits=(1.5,)
    ),
    "mistral4": Case("mistral4", GROUPS),
    "mistral_large4": Case("mistral_large4_text", dict(moe_intermediate_size=12, **GROUPS)),
    "nemotron_h": Case(
        "nemotron_h",
        dict(layers_block_type=["linear_attention", "moe"], moe_shared_expert_intermediate_size=16),
    ),
    "nemotron_h-bias": Case(
        "nemotron_h",
        dict(layers_block_type=["linear_attention", "moe"], moe_shared_expert_intermediate_size=16, mlp_bias=True),
        bf16=False,
    ),
    "phimoe": Case("phimoe", dict(router_jitter_noise=0.4)),
    "qwen3_5_moe": Case("qwen3_5_moe_text"),
    "qwen3_next": Case("qwen3_next"),
    "qwen3_omni_moe": Case("qwen3_omni_moe_text", model="Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": Case("qwen3_vl_moe_text"),
    "qwen4_exp": Case("qwen4_exp_text"),
    "solar_open": Case("solar_open"),
    "step3p7": Case(
        "step3p5",
        dict(mlp_layer_types=TYPES, swiglu_limits=[None, 1.5], swiglu_limits_shared=[None, 1.0], share_expert_dim=10),
        gain=2.0,
        limits=(1.0, 1.5),
    ),
    "within-aria": Case("aria_text", dict(moe_num_experts=6), within="aria", bf16=False),
    "within-glm4v_moe": Case("glm4v_moe_text", within="glm4v_moe", bf16=False),
    "within-llama4": Case("llama4_text", within="llama4", vision=dict(vision_output_dim=16), bf16=False),
    "within-minimax_m3_vl": Case(
        "minimax_m3_vl_text",
        dict(dense_intermediate_size=20, mlp_layer_types=TYPES, swiglu_limit=1.5),
        within="minimax_m3_vl",
        bf16=False,
        gain=2.0,
        limits=(1.5,),
    ),
    "within-mistral_large4": Case("mistral_large4_text", dict(moe_intermediate_size=12), within="mistral_large4", bf16=False),
    "within-qwen3_5_moe": Case("qwen3_5_moe_text", within="qwen3_5_moe", bf16=False),
    "within-qwen3_vl_moe": Case("qwen3_vl_moe_text", within="qwen3_vl_moe", bf16=False),
    "within-qwen4_exp": Case("qwen4_exp_text", within="qwen4_exp", bf16=False),
    "step3p7-free": Case("step3p5", dict(mlp_layer_types=TYPES, share_expert_dim=10), bf16=False),
}


def class_of_config(family):
    return CONFIG_MAPPING[family]


def configure(family, fields):
    cls = class_of_config(family)
    known = {f.name for f in dataclasses.fields(cls)}
    config = cls(**{k: v for k, v in SMALL.items() if k in known} | fields)
    config._experts_implementation = "eager"
    return config


def wrap(case, text):
    """The configuration of the model that contains the text model."""
    cls = class_of_config(case.within)
    default = cls(text_config=text.to_dict()).vision_config
    known = {f.name for f in dataclasses.fields(type(default))}
    vision = type(default)(**({k: v for k, v in VISION.items() if k in known} | case.vision))
    config = cls(text_config=text.to_dict(), vision_config=vision.to_dict())
    config._experts_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    return config


def model_class(config, named):
    """The class of the model that generates text, or else of the text model, from the family's module."""
    module = inspect.getmodule(type(config)).__name__.replace("configuration_", "modeling_")
    module = __import__(module, fromlist=["x"])
    if named:
        return getattr(module, named)
    classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    fits = [c for c in classes if getattr(c, "config_class", None) is type(config)]
    for pattern in (r"ForConditionalGeneration$", r"ForCausalLM$", r"TextModel$|LanguageModel$", r"Model$"):
        for c in fits:
            if re.search(pattern, c.__name__) and "PreTrained" not in c.__name__:
                return c
    raise SystemExit(f"no model class for {type(config).__name__}")


class Block:
    """The MoE block of a layer: the router, the experts, and the shared expert if it is outside the block."""

    def __init__(self, layer):
        names = ("block_sparse_moe", "feed_forward", "mixer", "ffn", "mlp")
        self.moe = next(getattr(layer, n) for n in names if hasattr(getattr(layer, n, None), "experts"))
        self.shared = getattr(layer, "shared_mlp", None)
        if hasattr(self.moe, "post_mlp_layernorm"):
            self.moe.post_mlp_layernorm = torch.nn.Identity()  # the layer ends before it
        self.chosen = None
        self.moe.experts.register_forward_pre_hook(self.note, with_kwargs=True)

    def modules(self):
        return [m for m in (self.moe, self.shared) if m is not None]

    def note(self, module, args, kwargs):
        for value in [*args, *kwargs.values()]:
            if torch.is_tensor(value) and not value.is_floating_point():
                self.chosen = value.detach().clone()

    def __call__(self, x):
        self.chosen = None
        output = self.moe(x[None])
        output = output[0] if isinstance(output, tuple) else output
        output = output.reshape(x.shape)
        if self.shared is not None:
            output = output + self.shared(x[None])[0]
        return output

    def choose(self, x):
        """The experts of each token, in ascending order: [tokens, k]."""
        with torch.no_grad():
            self(x)
            if self.chosen is None:  # llama4 gives every expert every token, with a score of 0 where it is not chosen
                scores = self.moe.router(x)[0]
                k = self.moe.top_k
                self.chosen = scores.topk(k, dim=-1)[1]
        return self.chosen.reshape(len(x), -1).sort(-1)[0]


    def near(self, x, limits):
        """Per token, whether gate, up or the activation of any of its experts is near a limit."""
        values = []
        with torch.no_grad():
            experts = self.moe.experts
            w = experts.gate_up_proj if experts.gate_up_proj.shape[-1] == H else experts.gate_up_proj.transpose(1, 2)
            inner = torch.einsum("th,eih->tei", x, w)
            if hasattr(experts, "gate_up_proj_bias"):
                inner = inner + experts.gate_up_proj_bias
            chosen = self.choose(x)
            values.append(inner[torch.arange(len(x))[:, None], chosen].reshape(len(x), -1))
            shared = getattr(self.moe, "shared_experts", None)
            for name in ("gate_proj", "up_proj", "gate_up_proj"):
                if hasattr(shared, name):
                    values.append(getattr(shared, name)(x))
        values = torch.cat(values, -1)
        values = torch.cat([values, torch.nn.functional.silu(values)], -1).abs()
        return torch.stack([((values - limit).abs() < 0.006 * limit).any(-1) for limit in limits]).any(0)


def draw_weights(block, gen, case):
    with torch.no_grad():
        for module in block.modules():
            for name, p in [*module.named_parameters(), *module.named_buffers()]:
                if not p.is_floating_point():
                    continue
                draw = torch.randn(p.shape, generator=gen)
                if "correction_bias" in name or "expert_bias" in name:
                    n = p.numel()
                    steps = torch.linspace(case.bias, -case.bias, n)[torch.randperm(n, generator=gen)]
                    p.copy_(steps.reshape(p.shape))
                elif name.endswith("bias"):
                    p.copy_(0.3 * draw)
                elif re.search(r"^(gate|router)\.", name) and "experts" not in name:
                    p.copy_(draw * 2.0 / H**0.5)
                else:
                    gain = case.gain if re.search("gate|up", name) else 1.0
                    p.copy_(draw * gain * 1.5 / H**0.5)


def draw_tokens(block, gen, rounding, limits):
    """Draws tokens around a common direction; no choice of experts is near a tie."""
    common = torch.randn(H, generator=gen)

    def draw(n):
        return rounding(torch.randn(n, H, generator=gen) + 0.5 * common)

    x = draw(TOKENS)
    for _ in range(2000):
        chosen = block.choose(x)
        near = torch.zeros(len(x), dtype=torch.bool)
        for _ in range(4):
            moved = x * (1 + 1e-3 * torch.randn(x.shape, generator=gen))
            near |= (block.choose(moved) != chosen).any(-1)
        if limits:
            near |= block.near(x, limits)
        if not near.any():
            return x
        x[near] = draw(int(near.sum()))
    raise SystemExit("tokens stay near a tie")


# Rows and columns of the FP8 blocks, and the weights in FP8.
FP8_BLOCK = [4, 4]
FP8_NAMES = r"experts.*(gate|up|down)"


def to_fp8(weight):
    """Elements and scales of blocks of the last two dimensions. Scales are powers of two, so from_fp8 inverts this exactly."""
    b0, b1 = FP8_BLOCK
    *lead, rows, columns = weight.shape
    blocks = weight.reshape(*lead, rows // b0, b0, columns // b1, b1)
    largest = blocks.abs().amax((-3, -1)).clamp_min(1e-12)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    elements = (blocks / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return elements.reshape(weight.shape), scales


def from_fp8(elements, scales):
    return Fp8Dequantize(None)._dequantize_one(elements, scales, torch.float32)


def to_mxfp4(weight, blocks, scales, key):
    """Draws blocks and scales for a weight [experts, in, out], and returns the weight as transformers dequantises it."""
    experts, inner, out = weight.shape
    gen = torch.Generator().manual_seed(len(key))
    blocks[key] = torch.randint(0, 256, (experts, out, inner // 32, 16), generator=gen, dtype=torch.uint8)
    scales[key] = torch.randint(122, 126, (experts, out, inner // 32), generator=gen, dtype=torch.uint8)
    return convert_moe_packed_tensors(blocks[key], scales[key], dtype=torch.float32).reshape(weight.shape)


class Stored:
    """Replaces a block's experts by their quantised values, and writes saved models in the quantised format."""

    def __init__(self, kind, block):
        self.kind, self.blocks, self.scales = kind, {}, {}
        with torch.no_grad():
            for name, p in block.named_parameters():
                if kind == "mxfp4" and re.search(r"experts\.(gate_up|down)_proj$", name):
                    p.copy_(to_mxfp4(p, self.blocks, self.scales, name.rsplit(".", 1)[1]))
                elif kind == "fp8" and re.search(FP8_NAMES, name):
                    p.copy_(from_fp8(*to_fp8(p)))

    def rewrite(self, folder):
        path = os.path.join(folder, "model.safetensors")
        out = {}
        for name, value in load_file(path).items():
            of_layer = f"layers.{LAYER}." in name
            if self.kind == "mxfp4" and (found := re.search(r"experts\.((gate_up|down)_proj)$", name)):
                key = found.group(1)
                # The tensors of the layer that is compared; the other layer gets the same.
                out[name + "_blocks"], out[name + "_scales"] = self.blocks[key].clone(), self.scales[key].clone()
            elif self.kind == "fp8" and of_layer and value.dim() == 2 and re.search(FP8_NAMES, name):
                elements, scales = to_fp8(value.float())
                assert torch.equal(from_fp8(elements, scales), value.float()), name
                out[name], out[name + "_scale_inv"] = elements, scales
            else:
                out[name] = value
        save_file({k: v.contiguous() for k, v in out.items()}, path, metadata={"format": "pt"})
        path = os.path.join(folder, "config.json")
        with open(path) as f:
            config = json.load(f)
        config["quantization_config"] = (
            dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"])
            if self.kind == "mxfp4"
            else dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=FP8_BLOCK)
        )
        with open(path, "w") as f:
            json.dump(config, f)


def save(model, folder, original, shard=None):
    model.save_pretrained(folder, save_original_format=original, **({"max_shard_size": shard} if shard else {}))


def tensors_of(folder):
    out = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".safetensors"):
            out.update(load_file(os.path.join(folder, file)))
    return out


def make(root, name, case, seed):
    torch.manual_seed(seed)
    config = configure(case.family, case.fields)
    if case.within:
        config = wrap(case, config)
    model = model_class(config, case.model)(config).float().eval()
    core = model
    while not any(hasattr(core, a) for a in ("layers", "blocks")):
        core = next(getattr(core, a) for a in ("language_model", "model", "transformer", "backbone") if hasattr(core, a))
    core_block = (core.layers if hasattr(core, "layers") else core.blocks)[LAYER]
    block = Block(core_block)
    cases = []
    kinds = [("f32", original) for original in case.formats] + ([("bf16", case.formats[0])] if case.bf16 else [])
    for number, (dtype, original) in enumerate(kinds):
        gen = torch.Generator().manual_seed(seed)
        draw_weights(block, gen, case)

        def rounding(t):
            return t.to(torch.bfloat16).float() if dtype == "bf16" else t

        parameters = [p for m in block.modules() for p in m.parameters()]
        stored = Stored(case.stored, core_block) if case.stored else None
        with torch.no_grad():
            for p in parameters:
                p.copy_(rounding(p))
                p.grad = None
        x = draw_tokens(block, gen, rounding, case.limits)
        grad = rounding(torch.randn(TOKENS, H, generator=gen))
        leaf = x.clone().requires_grad_()
        output = block(leaf)
        output.backward(grad)
        expected = {"output": output.detach(), "grad_hidden_states": leaf.grad}
        chosen = block.choose(x)

        folder = os.path.join(root, name + ("" if original else "-internal") + ("-bf16" if dtype == "bf16" else ""))
        save(model, folder, original, case.shard)
        if dtype == "bf16":
            path = os.path.join(folder, "model.safetensors")
            rounded = {k: v.bfloat16() if v.dim() > 1 and v.is_floating_point() else v for k, v in load_file(path).items()}
            save_file(rounded, path, metadata={"format": "pt"})
        if stored:
            stored.rewrite(folder)

        # The same model with gradients instead of weights, and NaN for tensors without a gradient.
        mine = {id(p) for p in parameters if p.requires_grad}
        state = [*model.parameters(), *model.buffers()]
        kept = [p.detach().clone() for p in state]
        with torch.no_grad():
            for p in state:
                if p.is_floating_point():
                    is_mine = id(p) in mine
                    p.copy_((p.grad if p.grad is not None else torch.zeros_like(p)) if is_mine else torch.full_like(p, float("nan")))
        save(model, os.path.join(root, "gradients"), original)
        for key, value in tensors_of(os.path.join(root, "gradients")).items():
            if case.unread and re.search(case.unread, key):
                continue
            if value.numel() and value.is_floating_point() and not value.isnan().any():
                expected["grad." + key] = value.float()
        with torch.no_grad():
            for p, value in zip(state, kept):
                p.copy_(value)
        shutil.rmtree(os.path.join(root, "gradients"))

        save_file({k: v.contiguous() for k, v in expected.items()}, os.path.join(folder, "expected.safetensors"))
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        save_file(
            {"hidden_states": x.to(kind).contiguous(), "grad_output": grad.to(kind)},
            os.path.join(folder, "input.safetensors"),
        )
        cases.append(
            dict(name=os.path.basename(folder), family=case.family, layer=LAYER, dtype=dtype, layout="published" if original else "own",
                 tokens_per_expert=torch.bincount(chosen.reshape(-1)).tolist())
        )
    return cases


def lookup(config, path):
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part)
    return config


def defaults(root, families):
    """Per family, the fields of its configuration class: the default of each, and whether it may be null."""
    out = {}
    for family in families:
        cls = class_of_config(family)
        values = {}
        for f in dataclasses.fields(cls):
            value = f.default
            if value is None or isinstance(value, (bool, int, float, str)):
                try:
                    cls(**{f.name: None})
                    null = True
                except Exception:
                    null = False
                values[f.name] = dict(default=value, null=null)
        out[family] = values
    ffn = CONFIG_MAPPING["dbrx"]().ffn_config
    for key in ("moe_num_experts", "ffn_hidden_size", "moe_top_k"):
        out["dbrx"]["ffn_config." + key] = dict(default=getattr(ffn, key), null=False)
    out["dbrx"]["ffn_config.ffn_act_fn.name"] = dict(default=ffn.ffn_act_fn["name"], null=False)
    with open(os.path.join(root, "defaults.json"), "w") as f:
        json.dump(out, f, indent=1)


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    root, only = sys.argv[1], sys.argv[2:]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if os.path.isdir(root) and os.listdir(root) and not os.path.exists(os.path.join(root, "cases.json")):
        raise SystemExit(f"{root} is a folder with something else in it")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    cases = []
    failed = []
    for seed, (name, case) in enumerate(CASES.items()):
        if only and name not in only:
            continue
        try:
            cases += make(root, name, case, seed)
        except Exception as e:
            if not os.environ.get("KEEP_GOING"):
                raise SystemExit(f"{name}: {type(e).__name__}: {e}") from e
            failed.append(f"{name}: {type(e).__name__}: {str(e)[:300]}")
    with open(os.path.join(root, "cases.json"), "w") as f:
        json.dump(cases, f, indent=1)
    if not only:
        defaults(root, sorted({case.family for case in CASES.values()}))
    print(f"{len(cases)} cases of {len({c['family'] for c in cases})} families")
    for line in failed:
        print("failed:", line)


if __name__ == "__main__":
    main()
