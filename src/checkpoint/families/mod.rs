//! Model families: the meaning of `config.json`, and the names of the weights.
//!
//! A family is a row of [`table`]. Adding one takes a row, and entries in [`names`] if its checkpoints have different
//! names. Meanings and defaults, including null, follow the configuration and model classes of `transformers` 5.23;
//! `tests/parity` compares both with it. `docs/families.md` is generated from the table ([`docs`]).

mod docs;
mod family;
mod fields;
mod names;
mod read;
mod table;

use super::FileError;
use crate::moe::{Activation, GroupScore, LayerConfig, Norm, Scoring};
pub use docs::families_page;
pub use family::Family;
use fields::{Field, Fields, flag, number, size, text};
pub(super) use names::Layout;
pub use read::ACTIVATIONS;
pub(super) use read::{ReadConfig, read_config, read_model, read_transformer};

/// A row of the table. [`Entry::BASE`] has the values of most families.
struct Entry {
    /// Of the text model.
    model_type: &'static str,
    /// The model that contains the text model.
    wrapper: Option<Wrapper>,
    /// Alternative `model_type`s.
    aliases: &'static [&'static str],
    /// Layouts of its checkpoints; the first whose experts exist is used.
    layouts: &'static [Layout],
    layers: Field,
    experts_in: ExpertsIn,
    hidden: Field,
    experts: Field,
    identity_experts: Option<Field>,
    /// Inner width of an expert.
    intermediate: Field,
    activation: ActivationRule,
    gated: bool,
    /// Whether experts have biases.
    bias: bool,
    glu: GluRule,
    router: Router,
    shared: Shared,
    shared_gate: bool,
    /// Whether the shared expert has biases.
    shared_bias: Option<Field>,
    /// Whether the shared expert's gate and up are clamped like the experts'.
    shared_glu: bool,
    /// Fields with a single supported value, which the model class ignores or this engine does not implement otherwise.
    only: &'static [(&'static str, Only)],
    /// Random noise in training, which is not applied.
    noise: &'static [Field],
    /// Settings that no field above can express.
    adjust: Option<Adjust>,
    /// Note for `docs/families.md`.
    note: &'static str,
}

/// Adjusts a configuration for settings that the fields of a row cannot express.
type Adjust = fn(&Fields, &mut LayerConfig) -> Result<(), FileError>;

/// A model whose `config.json` contains the text model's.
#[derive(Clone, Copy)]
struct Wrapper {
    model_type: &'static str,
    /// Path of objects to the text model's configuration.
    path: &'static [&'static str],
}

/// The only supported value of a field, which may also be absent.
#[derive(Clone, Copy)]
enum Only {
    Text(&'static str),
    Flag(bool),
    Size(usize),
    Null,
}

/// The layers that have experts.
#[derive(Clone, Copy)]
enum ExpertsIn {
    All,
    /// From this layer on.
    From(Field),
    /// According to `mlp_layer_types`. Without it, from layer `dense` on, and with `freq` only every
    /// `moe_layer_freq`th.
    Types {
        dense: Field,
        freq: bool,
    },
    /// Layer `i` if `i + 1` is a multiple of `decoder_sparse_step` and `i` is not in `mlp_only_layers`, whose default
    /// is given.
    Step(&'static [usize]),
    /// Layer `i` if `i mod expert_layer_period` is `expert_layer_offset`.
    Period,
    /// From `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`th.
    Range,
    /// The layers in `moe_layers`; without it every `interleave_moe_layer_step`th.
    Listed,
    /// Where `layers_block_type` is `moe`.
    Blocks,
}

#[derive(Clone, Copy)]
enum ActivationRule {
    Field(Field),
    Fixed(Activation),
}

#[derive(Clone, Copy)]
enum GluRule {
    Product,
    /// Gate and up are clamped at this limit.
    Clamped(Field),
    /// gpt-oss's: clamped, with 1 added to up, and the factor `alpha` in the sigmoid.
    ScaledSigmoid {
        limit: Field,
        alpha: Field,
    },
}

#[derive(Clone, Copy)]
enum Switch {
    On,
    Off,
    Field(Field),
}

/// Inner width of the shared expert; 0 for none.
#[derive(Clone, Copy)]
enum Shared {
    None,
    /// The field times the width of an expert.
    Times(Field),
    /// The field.
    Width(Field),
    /// The product of two fields.
    Product(Field, Field),
    /// The width of an expert.
    One,
}

#[derive(Clone, Copy)]
struct Router {
    scoring: Scoring,
    top_k: Field,
    renormalise: Switch,
    norm: Norm,
    /// Minimum of the norm.
    floor: Option<Field>,
    scaling: Option<Field>,
    /// Number of groups, and number of eligible groups; no groups if null.
    groups: Option<[Field; 2]>,
    group_score: GroupScore,
    bias: Switch,
    logit_bias: bool,
    softcap: Option<Field>,
    select_logits: bool,
    weigh_input: bool,
    /// SparseMixer's jitter.
    mixer: Option<Field>,
}

const TOP_K: &str = "num_experts_per_tok";

impl Router {
    /// Softmax, renormalised.
    const fn softmax(top_k: usize) -> Router {
        Router {
            scoring: Scoring::Softmax,
            top_k: size(TOP_K, top_k),
            renormalise: Switch::On,
            norm: Norm::sum(0.0),
            floor: None,
            scaling: None,
            groups: None,
            group_score: GroupScore::BestTwo,
            bias: Switch::Off,
            logit_bias: false,
            softcap: None,
            select_logits: false,
            weigh_input: false,
            mixer: None,
        }
    }

    /// Softmax, renormalised by the flag `norm_topk_prob`.
    const fn softmax_by(top_k: usize, default: bool) -> Router {
        Router { renormalise: Switch::Field(flag("norm_topk_prob", default)), ..Router::softmax(top_k) }
    }

    /// Sigmoid with a bias in selection, renormalised.
    const fn sigmoid(top_k: usize) -> Router {
        Router { scoring: Scoring::Sigmoid, norm: Norm::sum(1e-20), bias: Switch::On, ..Router::softmax(top_k) }
    }

    /// DeepSeek-V3's router: sigmoid with a bias and groups, renormalised by the flag `norm_topk_prob`, scaled.
    const fn deepseek(top_k: usize, groups: [usize; 2], scaling: f64) -> Router {
        Router {
            renormalise: Switch::Field(flag("norm_topk_prob", true)),
            scaling: Some(number("routed_scaling_factor", scaling)),
            groups: Some([size("n_group", groups[0]), size("topk_group", groups[1])]),
            ..Router::sigmoid(top_k)
        }
    }
}

impl Entry {
    const BASE: Entry = Entry {
        model_type: "",
        wrapper: None,
        aliases: &[],
        layouts: &[names::SEPARATE, names::FUSED],
        layers: size("num_hidden_layers", 32),
        experts_in: ExpertsIn::All,
        hidden: size("hidden_size", 4096),
        experts: size("num_experts", 0).or("num_local_experts"),
        identity_experts: None,
        intermediate: size("moe_intermediate_size", 0),
        activation: ActivationRule::Field(text("hidden_act", "silu")),
        gated: true,
        bias: false,
        glu: GluRule::Product,
        router: Router::softmax(0),
        shared: Shared::None,
        shared_gate: false,
        shared_bias: None,
        shared_glu: false,
        only: &[],
        noise: &[],
        adjust: None,
        note: "",
    };

    /// The fields that are read, without lists and nested objects.
    fn fields(&self) -> Vec<Field> {
        let mut all = vec![self.hidden, self.experts, self.intermediate, self.router.top_k];
        // If layers are listed, their number is not read.
        if !matches!(self.experts_in, ExpertsIn::Blocks) {
            all.push(self.layers);
        }
        match self.experts_in {
            ExpertsIn::From(dense) => all.push(dense),
            ExpertsIn::Step(_) => all.push(STEP),
            ExpertsIn::Period => all.extend(PERIOD),
            ExpertsIn::Range => all.extend(RANGE),
            ExpertsIn::Listed => all.push(INTERLEAVE),
            ExpertsIn::All | ExpertsIn::Types { .. } | ExpertsIn::Blocks => {}
        }
        if let ActivationRule::Field(field) = self.activation {
            all.push(field);
        }
        match self.glu {
            GluRule::Product => {}
            GluRule::Clamped(limit) => all.push(limit),
            GluRule::ScaledSigmoid { limit, alpha } => all.extend([limit, alpha]),
        }
        match self.shared {
            Shared::None | Shared::One => {}
            Shared::Times(field) | Shared::Width(field) => all.push(field),
            Shared::Product(a, b) => all.extend([a, b]),
        }
        for switch in [self.router.renormalise, self.router.bias] {
            if let Switch::Field(field) = switch {
                all.push(field);
            }
        }
        let Router { floor, scaling, groups, softcap, mixer, .. } = self.router;
        all.extend([self.identity_experts, self.shared_bias, floor, scaling, softcap, mixer].into_iter().flatten());
        all.extend(groups.into_iter().flatten());
        all
    }
}

const STEP: Field = size("decoder_sparse_step", 1);
const PERIOD: [Field; 2] = [size("expert_layer_period", 2), size("expert_layer_offset", 1)];
const RANGE: [Field; 3] =
    [size("moe_layer_start_index", 1), number("moe_layer_end_index", -1.0), size("moe_layer_interval", 1)];
const INTERLEAVE: Field = size("interleave_moe_layer_step", 1);
