//! The table of families.

use super::fields::{Field, Fields, flag, number, size, text};
use super::names::{self, FUSED, FUSED_SHARED_EXPERT, SEPARATE, SEPARATE_SHARED_EXPERT};
use super::{ActivationRule, Entry, ExpertsIn, GluRule, Only, Router, Shared, Switch, Wrapper};
use crate::checkpoint::FileError;
use crate::moe::{Activation, Glu, GroupScore, LayerConfig, Norm, Scoring};

const BASE: Entry = Entry::BASE;

const fn layers(default: usize) -> Field {
    size("num_hidden_layers", default)
}

const fn hidden(default: usize) -> Field {
    size("hidden_size", default)
}

/// The number of experts, under DeepSeek's name.
const fn routed(default: usize) -> Field {
    size("n_routed_experts", default).or("num_local_experts")
}

const fn experts(default: usize) -> Field {
    size("num_experts", default).or("num_local_experts")
}

const fn local(default: usize) -> Field {
    size("num_local_experts", default).or("num_experts")
}

const fn width(default: usize) -> Field {
    size("moe_intermediate_size", default)
}

const fn inner(default: usize) -> Field {
    size("intermediate_size", default)
}

const fn shared_count(default: usize) -> Shared {
    Shared::Times(size("n_shared_experts", default))
}

const fn text_config(model_type: &'static str) -> Option<Wrapper> {
    Some(Wrapper { model_type, path: &["text_config"] })
}

/// `mlp_layer_types`; without it dense before `first_k_dense_replace`.
const fn types_from(default: usize) -> ExpertsIn {
    ExpertsIn::Types { dense: size("first_k_dense_replace", default), freq: false }
}

/// `mlp_layer_types`; without it the first `dense` layers are dense, whatever other fields say.
const fn types(dense: usize) -> ExpertsIn {
    ExpertsIn::Types { dense: size("", dense), freq: false }
}

/// `mlp_layer_types`; without it according to `first_k_dense_replace` and `moe_layer_freq`.
const fn types_freq(default: usize) -> ExpertsIn {
    ExpertsIn::Types { dense: size("first_k_dense_replace", default), freq: true }
}

const fn dense_first(default: usize) -> ExpertsIn {
    ExpertsIn::From(size("first_k_dense_replace", default))
}

/// Fields of published `config.json` files that the model class does not read; it implements a single value of each.
const ONLY_DEEPSEEK: &[(&str, Only)] = &[
    ("scoring_func", Only::Text("sigmoid")),
    ("topk_method", Only::Text("noaux_tc")),
    ("moe_layer_freq", Only::Size(1)),
];

const SIGMOID_PLAIN: Router = Router { norm: Norm::sum(0.0), ..Router::sigmoid(0) };

/// The five oldest families, then the others roughly by name. A variant follows the family that it resembles.
pub(super) static FAMILIES: &[Entry] = &[
    Entry {
        model_type: "mixtral",
        layouts: &[names::BLOCK_SPARSE, FUSED],
        layers: layers(32),
        hidden: hidden(4096),
        experts: local(8),
        intermediate: inner(14336),
        router: Router::softmax(2),
        noise: &[number("router_jitter_noise", 0.0)],
        ..BASE
    },
    Entry {
        model_type: "qwen2_moe",
        layouts: &[SEPARATE_SHARED_EXPERT, FUSED_SHARED_EXPERT],
        layers: layers(24),
        experts_in: ExpertsIn::Step(&[]),
        hidden: hidden(2048),
        experts: experts(60),
        intermediate: width(1408),
        router: Router::softmax_by(4, false),
        shared: Shared::Width(size("shared_expert_intermediate_size", 5632)),
        shared_gate: true,
        ..BASE
    },
    Entry {
        model_type: "qwen3_moe",
        layers: layers(24),
        experts_in: ExpertsIn::Step(&[]),
        hidden: hidden(2048),
        experts: experts(128),
        intermediate: width(768),
        router: Router::softmax_by(8, false),
        ..BASE
    },
    Entry {
        model_type: "olmoe",
        layers: layers(16),
        hidden: hidden(2048),
        experts: experts(64),
        intermediate: inner(2048),
        router: Router::softmax_by(8, false),
        ..BASE
    },
    Entry {
        model_type: "deepseek_v3",
        layers: layers(61),
        experts_in: dense_first(3),
        hidden: hidden(7168),
        experts: routed(256),
        intermediate: width(2048),
        router: Router {
            renormalise: Switch::Field(flag("norm_topk_prob", true).null_is_false()),
            ..Router::deepseek(8, [8, 4], 2.5)
        },
        shared: shared_count(1),
        only: ONLY_DEEPSEEK,
        ..BASE
    },
    Entry {
        model_type: "afmoe",
        layouts: &[names::AFMOE, names::AFMOE_FUSED],
        experts_in: ExpertsIn::From(size("num_dense_layers", 1)),
        hidden: hidden(2048),
        experts: size("num_experts", 64),
        intermediate: width(1408),
        router: Router { scaling: Some(number("route_scale", 1.0)), ..Router::sigmoid(6) },
        shared: Shared::Times(size("num_shared_experts", 2)),
        ..BASE
    },
    Entry {
        model_type: "aria_text",
        wrapper: text_config("aria"),
        layouts: &[names::ARIA, names::ARIA_FUSED],
        experts: size("moe_num_experts", 8),
        intermediate: inner(4096),
        router: Router { top_k: size("moe_topk", 2), ..Router::softmax(0) },
        shared: Shared::Times(size("moe_num_shared_experts", 2)),
        shared_bias: Some(flag("mlp_bias", false)),
        adjust: Some(routed_silu),
        ..BASE
    },
    Entry {
        model_type: "axk1",
        layers: layers(61),
        experts_in: types_freq(1),
        hidden: hidden(7168),
        experts: routed(192),
        intermediate: width(2048),
        router: Router {
            renormalise: Switch::Field(flag("norm_topk_prob", true).null_is_false()),
            ..Router::deepseek(8, [8, 4], 2.5)
        },
        shared: shared_count(1),
        note: "The layer ends before the norm of the sum (`post_mlp_layernorm`).",
        ..BASE
    },
    Entry {
        model_type: "axk2",
        layers: layers(48),
        experts_in: types_freq(1),
        hidden: hidden(2048),
        experts: routed(128),
        intermediate: width(512),
        router: Router {
            groups: Some([size("n_group", 0).optional(), size("topk_group", 0).optional()]),
            ..Router::deepseek(8, [1, 1], 2.5)
        },
        shared: shared_count(1),
        note: "With groups, an expert whose score and bias together are below 0 is never passed over for one of another group, which the \
               model class gives the score 0.",
        ..BASE
    },
    Entry {
        model_type: "bailing_hybrid",
        layouts: &[names::BAILING, FUSED],
        layers: layers(42),
        experts_in: types_from(2),
        hidden: hidden(2560),
        experts: local(512),
        intermediate: width(768),
        router: Router {
            top_k: size("num_experts_per_tok", 8).or("num_experts_per_token"),
            renormalise: Switch::Field(flag("norm_topk_prob", true).or("moe_renormalize")),
            groups: Some([size("n_group", 8).or("num_expert_group"), size("topk_group", 4)]),
            ..Router::deepseek(8, [8, 4], 2.5)
        },
        shared: Shared::Times(size("n_shared_experts", 1).or("num_shared_experts")),
        ..BASE
    },
    Entry {
        model_type: "beam",
        layers: layers(52),
        experts_in: types(3),
        hidden: hidden(5120),
        experts: size("num_experts", 256),
        intermediate: width(2560),
        router: Router::deepseek(8, [8, 4], 2.5),
        ..BASE
    },
    Entry {
        model_type: "cohere2_moe",
        layers: layers(40),
        experts_in: types_from(0),
        hidden: hidden(8192),
        experts: size("num_experts", 8),
        intermediate: inner(22528),
        router: Router::softmax(2),
        shared: Shared::Times(size("num_shared_experts", 0)),
        adjust: Some(cohere2),
        note: "Softmax over the chosen logits, or sigmoid, by `expert_selection_fn`; with shared experts the mean of both sums where \
               `shared_expert_combination_strategy` says so.",
        ..BASE
    },
    Entry {
        model_type: "dbrx",
        layouts: &[names::DBRX],
        layers: size("n_layers", 24).or("num_hidden_layers"),
        hidden: size("d_model", 2048).or("hidden_size"),
        experts: size("ffn_config.moe_num_experts", 4),
        intermediate: size("ffn_config.ffn_hidden_size", 3584),
        activation: ActivationRule::Field(text("ffn_config.ffn_act_fn.name", "silu")),
        router: Router { top_k: size("ffn_config.moe_top_k", 1), ..Router::softmax(0) },
        adjust: Some(dbrx),
        note: "Weights are divided by their p-norm, p being `moe_normalize_expert_weights`.",
        ..BASE
    },
    DEEPSEEK_V2,
    Entry {
        model_type: "deepseek_ocr2_text",
        wrapper: text_config("deepseek_ocr2"),
        experts_in: types(0),
        ..DEEPSEEK_V2
    },
    Entry {
        model_type: "unlimited_ocr_text",
        wrapper: text_config("unlimited_ocr"),
        layers: layers(12),
        hidden: hidden(1280),
        experts_in: types_from(1),
        intermediate: width(896),
        router: Router {
            top_k: size("num_experts_per_tok", 6),
            groups: Some([size("n_group", 1).nullable(), size("topk_group", 1).nullable()]),
            ..DEEPSEEK_V2.router
        },
        ..DEEPSEEK_V2
    },
    Entry {
        model_type: "deepseek_v32",
        layers: layers(61),
        experts_in: types_from(3),
        hidden: hidden(7168),
        experts: routed(256),
        intermediate: width(2048),
        router: Router::deepseek(8, [8, 4], 2.5),
        shared: shared_count(1),
        only: ONLY_DEEPSEEK,
        ..BASE
    },
    Entry {
        model_type: "deepseek_v4",
        layouts: &[names::DEEPSEEK_V4, FUSED],
        layers: layers(43),
        // Without mlp_layer_types the first three layers route by token id.
        experts_in: types(3),
        hidden: hidden(4096),
        experts: routed(256),
        intermediate: width(2048).or("intermediate_size"),
        glu: GluRule::Clamped(number("swiglu_limit", 10.0)),
        router: Router { scaling: Some(number("routed_scaling_factor", 1.5)), ..Router::sigmoid(6) },
        shared: Shared::One,
        shared_bias: Some(flag("mlp_bias", false)),
        shared_glu: true,
        adjust: Some(deepseek_v4),
        note: "Layers that route by token id (`hash_moe`) need the tokens' ids, and are refused.",
        ..BASE
    },
    Entry {
        model_type: "dots1",
        layers: layers(62),
        experts_in: dense_first(0),
        hidden: hidden(4608),
        experts: routed(0).required(),
        intermediate: width(1408),
        router: Router {
            top_k: size("num_experts_per_tok", 0).required(),
            renormalise: Switch::Field(flag("norm_topk_prob", false).null_is_false()),
            ..Router::deepseek(0, [1, 1], 1.0)
        },
        shared: Shared::Times(size("n_shared_experts", 0).required()),
        ..BASE
    },
    Entry {
        model_type: "dots3_note_text",
        wrapper: text_config("dots3_note"),
        layers: layers(46),
        experts_in: types_freq(1),
        hidden: hidden(5120),
        experts: routed(256),
        intermediate: width(1536),
        router: Router::deepseek(8, [1, 1], 1.0),
        shared: Shared::Product(
            size("shared_experts_intermediate_size", 1536).or("moe_shared_expert_intermediate_size"),
            size("n_shared_experts", 1),
        ),
        ..BASE
    },
    Entry {
        model_type: "ernie4_5_moe",
        layouts: &[names::ERNIE, names::ERNIE_FUSED],
        layers: layers(28),
        experts_in: ExpertsIn::Range,
        hidden: hidden(2560),
        experts: size("moe_num_experts", 64).or("num_experts"),
        intermediate: width(1536),
        router: Router {
            top_k: size("moe_k", 6).or("num_experts_per_tok"),
            bias: Switch::On,
            floor: Some(number("moe_norm_min", 1e-12)),
            ..Router::softmax(0)
        },
        shared: Shared::Times(size("moe_num_shared_experts", 2)),
        shared_bias: Some(flag("use_bias", false)),
        ..BASE
    },
    Entry {
        model_type: "exaone_moe",
        layouts: &[names::EXAONE, FUSED],
        experts_in: types_from(1),
        experts: size("num_experts", 64),
        intermediate: width(1024),
        router: Router::deepseek(8, [1, 1], 2.5),
        shared: Shared::Times(size("num_shared_experts", 1)),
        ..BASE
    },
    Entry {
        model_type: "flex_olmo",
        experts: experts(7),
        intermediate: inner(11008),
        router: Router::softmax_by(5, false),
        ..BASE
    },
    Entry {
        model_type: "flint",
        layouts: &[SEPARATE_SHARED_EXPERT, FUSED_SHARED_EXPERT],
        layers: layers(49),
        experts_in: ExpertsIn::Step(&[0, 1]),
        hidden: hidden(2048),
        experts: size("num_experts", 256),
        intermediate: width(512),
        router: Router {
            renormalise: Switch::Field(flag("norm_topk_prob", true)),
            bias: Switch::Off,
            top_k: size("num_experts_per_tok", 6),
            ..SIGMOID_PLAIN
        },
        shared: Shared::Width(size("shared_expert_intermediate_size", 1024)),
        ..BASE
    },
    GLM4_MOE,
    Entry { model_type: "glm4v_moe_text", wrapper: text_config("glm4v_moe"), layouts: &[SEPARATE, FUSED], ..GLM4_MOE },
    Entry {
        model_type: "glm4_moe_lite",
        layers: layers(47),
        experts_in: types(1),
        hidden: hidden(2048),
        experts: routed(64),
        intermediate: width(1536),
        router: Router::deepseek(4, [1, 1], 1.8),
        shared: shared_count(1),
        ..BASE
    },
    Entry {
        model_type: "glm5_next_text",
        wrapper: text_config("glm5_next"),
        layers: layers(45),
        experts_in: types(3),
        experts: routed(288),
        intermediate: width(2048),
        activation: ActivationRule::Field(text("hidden_act", "silu")),
        glu: GluRule::Clamped(number("swiglu_limit", 10.0)),
        router: Router::deepseek(8, [1, 1], 2.5),
        shared: shared_count(1),
        shared_glu: true,
        adjust: Some(routed_silu),
        ..BASE
    },
    Entry {
        model_type: "glm_moe_dsa",
        layers: layers(78),
        experts_in: types_from(3),
        hidden: hidden(6144),
        experts: routed(256),
        intermediate: width(2048),
        router: Router::deepseek(8, [1, 1], 2.5),
        shared: shared_count(1),
        ..BASE
    },
    Entry {
        model_type: "gpt_oss",
        layouts: &[names::GPT_OSS],
        layers: layers(36),
        hidden: hidden(2880),
        experts: local(128),
        intermediate: inner(2880),
        activation: ActivationRule::Fixed(Activation::QuickGelu),
        bias: true,
        glu: GPT_OSS_GLU,
        router: Router { logit_bias: true, ..Router::softmax(4) },
        ..BASE
    },
    Entry {
        model_type: "openai_privacy_filter",
        layouts: &[names::PRIVACY_FILTER],
        layers: layers(8),
        hidden: hidden(640),
        experts: local(128),
        intermediate: inner(640),
        activation: ActivationRule::Fixed(Activation::QuickGelu),
        bias: true,
        glu: GPT_OSS_GLU,
        router: Router { logit_bias: true, ..Router::softmax(4) },
        ..BASE
    },
    GRANITE,
    Entry { model_type: "granitemoeshared", shared: Shared::Width(size("shared_intermediate_size", 0)), ..GRANITE },
    Entry { model_type: "granitemoehybrid", shared: Shared::Width(size("shared_intermediate_size", 1024)), ..GRANITE },
    Entry {
        model_type: "granitemoe_swa",
        layouts: &[names::GRANITE_FUSED, names::GRANITE],
        shared: Shared::Width(size("shared_intermediate_size", 0)),
        ..GRANITE
    },
    Entry {
        model_type: "hunyuan_v1_moe",
        layouts: &[names::HUNYUAN, names::HUNYUAN_FUSED],
        experts: experts(1).per_layer(),
        intermediate: inner(11008),
        router: Router { top_k: size("moe_topk", 1).or("num_experts_per_tok").per_layer(), ..Router::softmax(0) },
        shared: Shared::One,
        ..BASE
    },
    Entry {
        model_type: "hy_v3",
        layouts: &[names::HY_V3, names::FUSED_BLOCK_BIAS],
        layers: layers(80),
        experts_in: types(1),
        experts: experts(192),
        intermediate: width(1536),
        router: Router { scaling: Some(number("router_scaling_factor", 2.826)), ..Router::sigmoid(8) },
        shared: Shared::Times(size("num_shared_experts", 1)),
        shared_bias: Some(flag("mlp_bias", false)),
        ..BASE
    },
    Entry {
        model_type: "hy_v4",
        layouts: &[names::HY_V4, FUSED],
        layers: layers(34),
        experts_in: types(1),
        hidden: hidden(2816),
        experts: routed(256),
        intermediate: width(768),
        glu: GluRule::Clamped(number("swiglu_limit", 10.0)),
        router: Router::deepseek(8, [1, 1], 2.827),
        shared: shared_count(1),
        adjust: Some(routed_silu),
        ..BASE
    },
    Entry {
        model_type: "jamba",
        layouts: &[names::JAMBA, names::JAMBA_FUSED],
        experts_in: ExpertsIn::Period,
        experts: experts(16),
        intermediate: inner(14336),
        router: Router { renormalise: Switch::Off, ..Router::softmax(2) },
        ..BASE
    },
    Entry {
        model_type: "kimi_linear",
        layouts: &[names::KIMI, FUSED],
        layers: layers(27),
        experts_in: types_from(1),
        hidden: hidden(2304),
        experts: local(256),
        intermediate: width(1024),
        router: Router {
            top_k: size("num_experts_per_tok", 8).or("num_experts_per_token"),
            renormalise: Switch::Field(flag("norm_topk_prob", true).or("moe_renormalize")),
            groups: Some([size("n_group", 1).or("num_expert_group"), size("topk_group", 1)]),
            ..Router::deepseek(8, [1, 1], 2.446)
        },
        shared: Shared::Times(size("n_shared_experts", 1).or("num_shared_experts")),
        ..BASE
    },
    Entry {
        model_type: "kolibri1",
        layouts: &[names::KOLIBRI, FUSED],
        layers: layers(50),
        hidden: hidden(2560),
        experts: experts(384),
        intermediate: width(512),
        router: Router {
            top_k: size("num_experts_per_tok", 6),
            renormalise: Switch::Field(flag("norm_topk_prob", false)),
            select_logits: true,
            ..SIGMOID_PLAIN
        },
        shared: Shared::Width(size("shared_expert_intermediate_size", 512)),
        ..BASE
    },
    Entry {
        model_type: "laguna",
        layouts: &[names::LAGUNA, FUSED],
        layers: layers(40),
        experts_in: types(1),
        hidden: hidden(2048),
        experts: size("num_experts", 256),
        intermediate: width(512),
        router: Router {
            top_k: size("num_experts_per_tok", 8),
            scaling: Some(number("moe_routed_scaling_factor", 1.0)),
            softcap: Some(number("moe_router_logit_softcapping", 0.0)),
            ..SIGMOID_PLAIN
        },
        shared: Shared::Width(size("shared_expert_intermediate_size", 512)),
        only: &[("moe_apply_router_weight_on_input", Only::Flag(false))],
        ..BASE
    },
    Entry {
        model_type: "lfm2_moe",
        layouts: &[names::LFM2, names::LFM2_FUSED],
        experts_in: ExpertsIn::From(size("num_dense_layers", 2)),
        hidden: hidden(2048),
        experts: size("num_experts", 32),
        intermediate: width(1792),
        activation: ActivationRule::Fixed(Activation::Silu),
        router: Router {
            renormalise: Switch::Field(flag("norm_topk_prob", true)),
            norm: Norm::sum(1e-6),
            bias: Switch::Field(flag("use_expert_bias", true)),
            scaling: Some(number("routed_scaling_factor", 1.0)),
            ..Router::sigmoid(4)
        },
        ..BASE
    },
    Entry {
        model_type: "llama4_text",
        wrapper: text_config("llama4"),
        layouts: &[names::LLAMA4],
        layers: layers(48),
        experts_in: ExpertsIn::Listed,
        hidden: hidden(5120),
        experts: size("num_local_experts", 16),
        intermediate: inner(8192),
        router: Router {
            top_k: size("num_experts_per_tok", 1),
            renormalise: Switch::Off,
            bias: Switch::Off,
            weigh_input: true,
            ..SIGMOID_PLAIN
        },
        shared: Shared::One,
        noise: &[number("router_jitter_noise", 0.0)],
        ..BASE
    },
    Entry {
        model_type: "longcat_flash",
        layouts: &[names::LONGCAT],
        layers: size("num_layers", 28),
        hidden: hidden(6144),
        experts: routed(512),
        identity_experts: Some(size("zero_expert_num", 256)),
        intermediate: size("expert_ffn_hidden_size", 2048).or("moe_intermediate_size"),
        router: Router {
            top_k: size("moe_topk", 12).or("num_experts_per_tok"),
            renormalise: Switch::Off,
            bias: Switch::On,
            scaling: Some(number("routed_scaling_factor", 6.0)),
            ..Router::softmax(0)
        },
        only: &[("router_bias", Only::Flag(false))],
        note: "In the published layout; the model class's own has rows for identity experts, which nothing reads.",
        ..BASE
    },
    Entry {
        model_type: "mellum",
        layers: layers(28),
        experts_in: types(0),
        hidden: hidden(2304),
        experts: experts(64),
        intermediate: width(896),
        router: Router::softmax_by(8, true),
        ..BASE
    },
    Entry {
        model_type: "mimo_v2_flash",
        layers: layers(48),
        experts_in: types(1),
        experts: routed(256),
        intermediate: width(2048),
        router: Router {
            scaling: Some(number("routed_scaling_factor", 1.0).null_is(1.0)),
            ..Router::deepseek(8, [1, 1], 1.0)
        },
        ..BASE
    },
    Entry {
        model_type: "minimax",
        layouts: &[names::BLOCK_SPARSE, FUSED],
        experts: local(8),
        intermediate: inner(14336),
        router: Router::softmax(2),
        noise: &[number("router_jitter_noise", 0.0)],
        ..BASE
    },
    Entry {
        model_type: "minimax_m2",
        layouts: &[names::BLOCK_SPARSE, names::FUSED_BLOCK_BIAS],
        layers: layers(62),
        hidden: hidden(3072),
        experts: local(256),
        intermediate: inner(1536),
        router: Router { top_k: size("num_experts_per_tok", 8), ..SIGMOID_PLAIN },
        noise: &[number("router_jitter_noise", 0.0)],
        ..BASE
    },
    Entry {
        model_type: "minimax_m3_vl_text",
        wrapper: text_config("minimax_m3_vl"),
        layouts: &[names::MINIMAX_M3_SEPARATE, names::MINIMAX_M3],
        layers: layers(60),
        experts_in: types(0),
        hidden: hidden(6144),
        experts: local(128),
        intermediate: inner(3072),
        activation: ActivationRule::Fixed(Activation::QuickGelu),
        glu: GPT_OSS_GLU,
        router: Router {
            top_k: size("num_experts_per_tok", 4),
            scaling: Some(number("routed_scaling_factor", 2.0)),
            ..SIGMOID_PLAIN
        },
        shared: Shared::Width(size("shared_intermediate_size", 3072)),
        shared_glu: true,
        ..BASE
    },
    Entry {
        model_type: "mistral4",
        layouts: &[FUSED, SEPARATE],
        layers: layers(36),
        experts_in: dense_first(0),
        experts: routed(128),
        intermediate: width(2048),
        router: Router {
            scoring: Scoring::Softmax,
            bias: Switch::Off,
            renormalise: Switch::Field(flag("norm_topk_prob", true).null_is_false()),
            ..Router::deepseek(4, [1, 1], 1.0)
        },
        shared: shared_count(1),
        ..BASE
    },
    Entry {
        model_type: "mistral_large4_text",
        wrapper: text_config("mistral_large4"),
        layouts: &[names::MISTRAL_LARGE_4, names::MISTRAL_LARGE_4_TEXT, FUSED],
        layers: layers(72),
        experts_in: types_from(1),
        hidden: hidden(6144),
        experts: routed(128),
        intermediate: width(6144),
        router: Router {
            scoring: Scoring::Softmax,
            bias: Switch::Off,
            renormalise: Switch::On,
            ..Router::deepseek(4, [1, 1], 1.0)
        },
        shared: shared_count(1),
        ..BASE
    },
    Entry {
        model_type: "nemotron_h",
        layouts: &[names::NEMOTRON, names::NEMOTRON_FUSED],
        experts_in: ExpertsIn::Blocks,
        experts: routed(8),
        intermediate: width(7688),
        activation: ActivationRule::Field(text("mlp_hidden_act", "relu2")),
        gated: false,
        router: Router::deepseek(2, [1, 1], 1.0),
        shared: Shared::Width(size("moe_shared_expert_intermediate_size", 7688)),
        shared_bias: Some(flag("mlp_bias", false)),
        only: &[("moe_latent_size", Only::Null)],
        note: "Without projections around the experts (`moe_latent_size` null).",
        ..BASE
    },
    Entry {
        model_type: "phimoe",
        layouts: &[names::BLOCK_SPARSE, names::PHI_FUSED],
        experts: local(16),
        intermediate: inner(6400),
        router: Router { mixer: Some(number("router_jitter_noise", 0.01)), ..Router::softmax(2) },
        noise: &[number("input_jitter_noise", 0.0)],
        note: "SparseMixer as it evaluates; its sampling in training is not applied.",
        ..BASE
    },
    Entry {
        model_type: "qwen3_5_moe_text",
        wrapper: text_config("qwen3_5_moe"),
        layouts: &[SEPARATE_SHARED_EXPERT, FUSED_SHARED_EXPERT],
        layers: layers(40),
        hidden: hidden(2048),
        experts: size("num_experts", 256),
        intermediate: width(512),
        router: Router::softmax(8),
        shared: Shared::Width(size("shared_expert_intermediate_size", 512)),
        shared_gate: true,
        ..BASE
    },
    Entry {
        model_type: "qwen3_next",
        layouts: &[SEPARATE_SHARED_EXPERT, FUSED_SHARED_EXPERT],
        layers: layers(48),
        experts_in: ExpertsIn::Step(&[]),
        hidden: hidden(2048),
        experts: size("num_experts", 512),
        intermediate: width(512),
        router: Router::softmax_by(10, true),
        shared: Shared::Width(size("shared_expert_intermediate_size", 512)),
        shared_gate: true,
        ..BASE
    },
    Entry {
        model_type: "qwen3_omni_moe_text",
        wrapper: Some(Wrapper { model_type: "qwen3_omni_moe_thinker", path: &["text_config"] }),
        layers: layers(28),
        experts_in: ExpertsIn::Step(&[]),
        hidden: hidden(2048),
        experts: size("num_experts", 128),
        intermediate: width(768),
        router: Router::softmax_by(8, true),
        note: "The thinker, by itself or in `qwen3_omni_moe`.",
        ..BASE
    },
    Entry {
        model_type: "qwen3_vl_moe_text",
        wrapper: text_config("qwen3_vl_moe"),
        layouts: &[names::QWEN3_VL, FUSED, SEPARATE],
        layers: layers(24),
        experts_in: ExpertsIn::Step(&[]),
        hidden: hidden(2048),
        experts: experts(60),
        intermediate: width(1408),
        router: Router::softmax(4),
        ..BASE
    },
    Entry {
        model_type: "qwen4_exp_text",
        wrapper: text_config("qwen4_exp"),
        layouts: &[SEPARATE_SHARED_EXPERT, FUSED_SHARED_EXPERT],
        layers: layers(40),
        hidden: hidden(2048),
        experts: size("num_experts", 512),
        intermediate: width(512),
        router: Router::softmax_by(10, true),
        shared: Shared::Width(size("shared_expert_intermediate_size", 512)),
        shared_gate: true,
        ..BASE
    },
    Entry {
        model_type: "solar_open",
        layers: layers(48),
        experts: routed(128),
        intermediate: width(1280),
        router: Router::deepseek(8, [1, 1], 1.0),
        shared: shared_count(1),
        ..BASE
    },
    Entry {
        model_type: "step3p5",
        wrapper: text_config("step3p7"),
        layouts: &[names::STEP3, SEPARATE, FUSED],
        layers: layers(45),
        experts_in: types(3),
        experts: routed(288).or("moe_num_experts"),
        intermediate: width(1280),
        router: Router {
            top_k: size("num_experts_per_tok", 8).or("moe_top_k"),
            scaling: Some(number("moe_router_scaling_factor", 1.0)),
            ..SIGMOID_PLAIN
        },
        shared: Shared::Width(size("share_expert_dim", 1280).or("share_expert_dims")),
        shared_bias: Some(flag("mlp_bias", false)),
        adjust: Some(step3),
        note: "Gate and up are cut off, the gate after its activation, at the layer's `swiglu_limits`. The published names are by the \
               conversion table of `transformers`; parity is of the text model by itself.",
        ..BASE
    },
];

const GPT_OSS_GLU: GluRule =
    GluRule::ScaledSigmoid { limit: number("swiglu_limit", 7.0), alpha: number("swiglu_alpha", 1.702) };

const DEEPSEEK_V2: Entry = Entry {
    model_type: "deepseek_v2",
    experts_in: dense_first(0),
    experts: size("n_routed_experts", 64).or("num_experts"),
    intermediate: width(1407),
    router: Router {
        top_k: size("num_experts_per_tok", 0).required(),
        renormalise: Switch::Off,
        scaling: Some(number("routed_scaling_factor", 1.0)),
        groups: Some([size("n_group", 0).optional(), size("topk_group", 0).optional()]),
        group_score: GroupScore::Best,
        ..Router::softmax(0)
    },
    shared: shared_count(2),
    shared_bias: Some(flag("mlp_bias", false)),
    adjust: Some(deepseek_v2),
    note: "`topk_method` `greedy` or `group_limited_greedy`. The model class does not read `norm_topk_prob`.",
    ..BASE
};

const GLM4_MOE: Entry = Entry {
    model_type: "glm4_moe",
    layers: layers(46),
    experts_in: dense_first(1),
    experts: routed(128),
    intermediate: width(1408),
    router: Router::deepseek(8, [1, 1], 1.0),
    shared: shared_count(1),
    ..BASE
};

const GRANITE: Entry = Entry {
    model_type: "granitemoe",
    layouts: &[names::GRANITE, names::GRANITE_FUSED],
    experts: size("num_local_experts", 8),
    intermediate: inner(11008),
    router: Router::softmax(2),
    ..BASE
};

fn deepseek_v2(fields: &Fields, config: &mut LayerConfig) -> Result<(), FileError> {
    match fields.text(&text("topk_method", "greedy"))? {
        "greedy" => config.router.groups = None,
        "group_limited_greedy" if config.router.groups.is_some() => {}
        "group_limited_greedy" => return Err(fields.unexpected("n_group", "a number of groups")),
        _ => return Err(fields.unexpected("topk_method", "\"greedy\" or \"group_limited_greedy\"")),
    }
    Ok(())
}

fn deepseek_v4(fields: &Fields, config: &mut LayerConfig) -> Result<(), FileError> {
    config.router.scoring = match fields.text(&text("scoring_func", "sqrtsoftplus"))? {
        "sqrtsoftplus" => Scoring::SqrtSoftplus,
        "sigmoid" => Scoring::Sigmoid,
        _ => return Err(fields.unexpected("scoring_func", "\"sqrtsoftplus\" or \"sigmoid\"")),
    };
    Ok(())
}

fn cohere2(fields: &Fields, config: &mut LayerConfig) -> Result<(), FileError> {
    match fields.text(&text("expert_selection_fn", "softmax"))? {
        "softmax" => {}
        "sigmoid" => {
            config.router.scoring = Scoring::Sigmoid;
            config.router.renormalise = fields.flag(&flag("norm_topk_prob", true))?;
        }
        _ => return Err(fields.unexpected("expert_selection_fn", "\"softmax\" or \"sigmoid\"")),
    }
    if let Some(shared) = &mut config.shared {
        match fields.text(&text("shared_expert_combination_strategy", "average"))? {
            "sum" => {}
            "average" => {
                config.router.scaling = 0.5;
                shared.scale = 0.5;
            }
            _ => return Err(fields.unexpected("shared_expert_combination_strategy", "\"sum\" or \"average\"")),
        }
    }
    Ok(())
}

fn dbrx(fields: &Fields, config: &mut LayerConfig) -> Result<(), FileError> {
    match fields.number_or_none(&number("ffn_config.moe_normalize_expert_weights", 1.0).nullable())? {
        None => config.router.renormalise = false,
        Some(order) if order > 0.0 && order.is_finite() => config.router.norm.order = order as f32,
        Some(_) => {
            return Err(fields.unexpected("ffn_config.moe_normalize_expert_weights", "a number above 0, or null"));
        }
    }
    Ok(())
}

/// The routed experts use silu; `hidden_act` is the activation of the shared expert only.
fn routed_silu(_: &Fields, config: &mut LayerConfig) -> Result<(), FileError> {
    config.expert.activation = Activation::Silu;
    Ok(())
}

fn step3(fields: &Fields, config: &mut LayerConfig) -> Result<(), FileError> {
    let limit = |name: &str| -> Result<Glu, FileError> {
        const EXPECTED: &str = "a number or null for each layer";
        let Some(list) = fields.list(name, EXPECTED)?.filter(|list| !list.is_empty()) else { return Ok(Glu::PRODUCT) };
        let value = list.get(fields.layer).ok_or_else(|| fields.unexpected(name, EXPECTED))?;
        let limit = match value.as_f64() {
            Some(limit) if limit >= 0.0 => limit as f32,
            None if value.is_null() => 0.0,
            _ => return Err(fields.unexpected(name, EXPECTED)),
        };
        Ok(if limit > 0.0 { Glu { limit_after: true, ..Glu::clamped(limit) } } else { Glu::PRODUCT })
    };
    config.expert.glu = limit("swiglu_limits")?;
    let shared = limit("swiglu_limits_shared")?;
    if let Some(expert) = &mut config.shared {
        expert.mlp.glu = shared;
    }
    Ok(())
}
