//! The model families: what `config.json` means, and what the weights are called.
//!
//! A family is a row of [`table`]; adding one takes a row and nothing else, and names in [`names`] where its checkpoints have
//! names of their own. Meanings and defaults follow the configuration and model classes of `transformers` 5.23, null included;
//! `tests/parity` compares both with it. `docs/families.md` is made from the table ([`docs`]).

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

/// A row of the table. What most families have is in [`Entry::USUAL`].
struct Entry {
    /// Of the text model.
    model_type: &'static str,
    /// The model that has the text model as a part.
    wrapper: Option<Wrapper>,
    /// Other names of the same.
    aliases: &'static [&'static str],
    /// Ways of writing its checkpoints; the first whose experts are there is taken.
    layouts: &'static [Layout],
    layers: Field,
    experts_in: ExpertsIn,
    hidden: Field,
    experts: Field,
    identity_experts: Option<Field>,
    /// The inner width of an expert.
    intermediate: Field,
    activation: Act,
    gated: bool,
    /// Whether experts have biases.
    bias: bool,
    glu: GluRule,
    router: Router,
    shared: Shared,
    shared_gate: bool,
    /// Whether the shared expert has biases.
    shared_bias: Option<Field>,
    /// Whether the shared expert's gate and up are cut off as the experts' are.
    shared_glu: bool,
    /// Fields that may only be this, and are not read by the model class, or not supported.
    only: &'static [(&'static str, Only)],
    /// Random noise in training, which is not applied.
    noise: &'static [Field],
    /// What no field above says.
    adjust: Option<Adjust>,
    /// What a reader of `docs/families.md` should know.
    note: &'static str,
}

/// Sets what a row's fields cannot say.
type Adjust = fn(&Fields, &mut LayerConfig) -> Result<(), FileError>;

/// A model whose `config.json` has the text model's in it.
#[derive(Clone, Copy)]
struct Wrapper {
    model_type: &'static str,
    /// The objects that lead to it.
    path: &'static [&'static str],
}

/// The only value of a field that is allowed, beside its absence.
#[derive(Clone, Copy)]
enum Only {
    Text(&'static str),
    Flag(bool),
    Size(usize),
    /// Null.
    Nothing,
}

/// Which layers have experts.
#[derive(Clone, Copy)]
enum ExpertsIn {
    All,
    /// From this number on.
    From(Field),
    /// Where `mlp_layer_types` says so; without it from this number on, and if `freq` only every `moe_layer_freq`th.
    Types {
        dense: Field,
        freq: bool,
    },
    /// Layer `i` where `i + 1` is a multiple of `decoder_sparse_step` and `i` is not in `mlp_only_layers`, or in these where that is
    /// absent or null.
    Step(&'static [usize]),
    /// Layer `i` where `i mod expert_layer_period` is `expert_layer_offset`.
    Period,
    /// From `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`th.
    Range,
    /// In `moe_layers`; without it every `interleave_moe_layer_step`th.
    Listed,
    /// Where `layers_block_type` is `moe`.
    Blocks,
}

#[derive(Clone, Copy)]
enum Act {
    By(Field),
    Is(Activation),
}

#[derive(Clone, Copy)]
enum GluRule {
    Product,
    /// Gate and up are cut off at this.
    Clamped(Field),
    /// gpt-oss's: the same, with 1 added to up, and this factor in the sigmoid.
    ScaledSigmoid {
        limit: Field,
        alpha: Field,
    },
}

#[derive(Clone, Copy)]
enum Switch {
    On,
    Off,
    By(Field),
}

/// The shared expert's inner width; there is none where it is 0.
#[derive(Clone, Copy)]
enum Shared {
    None,
    /// As wide as so many experts.
    Times(Field),
    /// As wide as this says.
    Width(Field),
    /// As wide as these two multiplied.
    Product(Field, Field),
    /// As wide as an expert.
    One,
}

#[derive(Clone, Copy)]
struct Router {
    scoring: Scoring,
    top_k: Field,
    renormalise: Switch,
    norm: Norm,
    /// The norm's least value.
    floor: Option<Field>,
    scaling: Option<Field>,
    /// Number of groups, and of those that stay; none where the number is null.
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

    /// Softmax, renormalised where `norm_topk_prob` says so.
    const fn softmax_by(top_k: usize, default: bool) -> Router {
        Router { renormalise: Switch::By(flag("norm_topk_prob", default)), ..Router::softmax(top_k) }
    }

    /// Sigmoid with a bias in the selection, renormalised.
    const fn sigmoid(top_k: usize) -> Router {
        Router { scoring: Scoring::Sigmoid, norm: Norm::sum(1e-20), bias: Switch::On, ..Router::softmax(top_k) }
    }

    /// DeepSeek-V3's: sigmoid with a bias and groups, renormalised where `norm_topk_prob` says so, scaled.
    const fn deepseek(top_k: usize, groups: [usize; 2], scaling: f64) -> Router {
        Router {
            renormalise: Switch::By(flag("norm_topk_prob", true)),
            scaling: Some(number("routed_scaling_factor", scaling)),
            groups: Some([size("n_group", groups[0]), size("topk_group", groups[1])]),
            ..Router::sigmoid(top_k)
        }
    }
}

impl Entry {
    const USUAL: Entry = Entry {
        model_type: "",
        wrapper: None,
        aliases: &[],
        layouts: &[names::EACH, names::FUSED],
        layers: size("num_hidden_layers", 32),
        experts_in: ExpertsIn::All,
        hidden: size("hidden_size", 4096),
        experts: size("num_experts", 0).or("num_local_experts"),
        identity_experts: None,
        intermediate: size("moe_intermediate_size", 0),
        activation: Act::By(text("hidden_act", "silu")),
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

    /// The fields that are read, lists and nested objects apart.
    fn fields(&self) -> Vec<Field> {
        let mut all = vec![self.hidden, self.experts, self.intermediate, self.router.top_k];
        // Where layers are listed, their number is not read.
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
        if let Act::By(field) = self.activation {
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
            if let Switch::By(field) = switch {
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
