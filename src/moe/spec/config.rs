//! Configuration of an MoE layer: shapes, router, experts, and identifiers of its weights.
//!
//! These types do not depend on file formats. Both `checkpoint` and the synthetic layer produce them.

use std::ops::Range;

use aristos_cpu_kernels::{Activation, Glu};
use serde::{Deserialize, Serialize};

use super::error::{ConfigError, WeightError};
use super::place::WeightSlice;
use crate::formats::Model;

/// Maximum number of experts, and maximum width. It is far above that of any model, and low enough that a product of two cannot overflow.
pub const MAX_WIDTH: usize = 1 << 20;

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Scoring {
    /// Softmax over all experts (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE).
    Softmax,
    /// An independent sigmoid per expert (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    Sigmoid,
    /// `sqrt(ln(1 + e^logit))`, independent per expert (DeepSeek-V4).
    SqrtSoftplus,
}

/// The score by which group-limited selection ranks groups of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupScore {
    /// The sum of the two best scores in the group (DeepSeek-V3).
    #[default]
    BestTwo,
    /// The best score in the group (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).
    Best,
}

/// The divisor of renormalised weights: `max(norm + epsilon, floor)`, where `norm` is the `order`-norm of the chosen
/// scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Norm {
    /// Added to the norm.
    pub epsilon: f32,
    /// Minimum divisor (ERNIE 4.5's `moe_norm_min`); 0 if there is none.
    pub floor: f32,
    /// 1 for the sum; DBRX uses other orders above 0.
    pub order: f32,
}

impl Norm {
    /// The sum of the chosen scores and `epsilon`.
    pub const fn sum(epsilon: f32) -> Norm {
        Norm { epsilon, floor: 0.0, order: 1.0 }
    }
}

/// Group-limited selection (DeepSeek-V3, section 2.1.2). Experts form `n_groups` equal contiguous groups, each with a
/// score ([`GroupScore`]); only experts of the best `top_groups` groups can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupLimit {
    /// Number of groups; divides the number of experts.
    pub n_groups: usize,
    /// Number of groups from which experts can be chosen, 1 to `n_groups`.
    pub top_groups: usize,
}

/// The router: the experts of each token, and their weights.
///
/// `scores = scoring(x W^T)`. The `top_k` experts of the eligible groups with the largest `scores + correction bias` are chosen. Of equal
/// experts, the one with the smaller index is chosen. Their weights are their scores *without* the bias, divided by their norm if
/// `renormalise`, times `scaling`. A bias and a softcap may be applied to the logits before scoring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RouterConfig {
    /// Scores from logits.
    pub scoring: Scoring,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the chosen scores are divided by their norm.
    pub renormalise: bool,
    /// The divisor, if `renormalise`. The constructors set it to the sum, plus 1e-20 for scores that are not probabilities.
    pub norm: Norm,
    /// Factor on the weights (`routed_scaling_factor`); 1 if there is none.
    pub scaling: f32,
    /// Group-limited selection, if the model uses it.
    pub groups: Option<GroupLimit>,
    /// Score of a group.
    pub group_score: GroupScore,
    /// Whether selection adds a per-expert correction bias ([`WeightId::RouterBias`]).
    pub correction_bias: bool,
    /// Whether experts are selected by logits instead of scores; the correction bias is then added to the logits
    /// (Kolibri).
    pub select_logits: bool,
    /// Whether the logits have a trained bias ([`WeightId::LogitBias`], gpt-oss).
    pub logit_bias: bool,
    /// Logits become `softcap * tanh(logit / softcap)`; 0 for no cap.
    pub softcap: f32,
    /// Whether routing weights multiply an expert's input instead of its output (Llama 4).
    pub weigh_input: bool,
    /// PhiMoE's router, which replaces scoring and top-k: see [`SparseMixer`].
    pub sparse_mixer: Option<SparseMixer>,
    /// Whether the caller routes every pass ([`MoeLayer::experts`](super::MoeLayer::experts)). The layer then has no
    /// router weights and uses only `top_k` of these fields.
    pub external: bool,
}

/// Chooses two experts, one after the other (SparseMixer-v2, arXiv 2409.12136, in evaluation, without sampling): the one with the best
/// logit, then the best one of the others. The weight of each is its share in a softmax over the remaining logits `l` with `(best
/// - l) / max(|l|, best) <= 2 jitter`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SparseMixer {
    /// The model's `router_jitter_noise`.
    pub jitter: f32,
}

impl RouterConfig {
    /// Softmax over all experts; weights of the best `top_k` are divided by their sum.
    pub fn softmax(top_k: usize) -> Self {
        RouterConfig { renormalise: true, external: false, ..RouterConfig::external(top_k) }
    }

    /// An independent sigmoid per expert; weights of the best `top_k` are divided by their sum + 1e-20.
    pub fn sigmoid(top_k: usize) -> Self {
        RouterConfig { scoring: Scoring::Sigmoid, norm: Norm::sum(1e-20), ..RouterConfig::softmax(top_k) }
    }

    /// No router: the caller supplies up to `top_k` experts per token, with weights.
    pub fn external(top_k: usize) -> Self {
        RouterConfig {
            scoring: Scoring::Softmax,
            top_k,
            renormalise: false,
            norm: Norm::sum(0.0),
            scaling: 1.0,
            groups: None,
            group_score: GroupScore::BestTwo,
            correction_bias: false,
            select_logits: false,
            logit_bias: false,
            softcap: 0.0,
            weigh_input: false,
            sparse_mixer: None,
            external: true,
        }
    }
}

/// The multi-layer perceptron of one expert.
///
/// Plain: `down(act(up(x)))`. Gated: `down(act(gate(x)) * up(x))`, or a variant of it ([`Glu`]). Each of `gate`, `up`,
/// `down` is `y = x W^T + b` with `W` stored `[out, in]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MlpConfig {
    /// Width of the intermediate activations.
    pub intermediate: usize,
    /// Whether the MLP has a gate projection.
    pub gated: bool,
    /// The activation function.
    pub activation: Activation,
    /// Whether every projection has a bias.
    pub bias: bool,
    /// The combination of gate and up in a gated MLP.
    pub glu: Glu,
}

/// The shared expert, which processes every token; its output is added to the sum of the routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SharedConfig {
    /// The shared expert's MLP.
    pub mlp: MlpConfig,
    /// Whether the output is multiplied by `sigmoid(x w^T)`, where `w` has shape `[1, hidden]` (Qwen2-MoE).
    pub sigmoid_gate: bool,
    /// Constant factor on the output; 1 for most models.
    pub scale: f32,
}

/// Configuration of the whole layer.
///
/// Start from [`LayerConfig::new`] and set the fields that differ, so that fields added later keep their defaults.
///
/// ```
/// use aristos::moe::{Activation, LayerConfig, MlpConfig, Proj, RouterConfig, WeightId};
///
/// // Mixtral 8x7B's layer, with a load-balancing loss.
/// let expert = MlpConfig::gated(14336, Activation::Silu);
/// let mut layer = LayerConfig::new(4096, 8, RouterConfig::softmax(2), expert);
/// layer.aux_loss_coef = 0.02;
/// layer.validate()?;
/// assert_eq!(layer.shape(WeightId::Router), [8, 4096]);
/// assert_eq!(layer.shape(WeightId::Expert(7, Proj::Down)), [4096, 14336]);
///
/// layer.router.top_k = 9;
/// assert_eq!(layer.validate().unwrap_err().to_string(), "top-k is 9, expected 1 to 8, the number of experts");
/// # Ok::<(), aristos::moe::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LayerConfig {
    /// Hidden size of the model.
    pub hidden: usize,
    /// Number of routed experts.
    pub n_experts: usize,
    /// Number of identity experts (LongCat-Flash's zero-computation experts, arXiv 2509.01322). Their output is their input. Their router
    /// indices start at `n_experts`.
    pub identity_experts: usize,
    /// The router.
    pub router: RouterConfig,
    /// A routed expert's MLP.
    pub expert: MlpConfig,
    /// The shared expert, if any.
    pub shared: Option<SharedConfig>,
    /// `None`: dropless. `Some(c)`: each expert keeps at most `ceil(c * top_k * tokens / n_experts)` of the (token,
    /// expert) pairs routed to it, counted over all PEs, in the order of global token indices. Dropped pairs contribute
    /// nothing, and kept weights are not renormalised.
    pub capacity_factor: Option<f64>,
    /// Coefficient of the load-balancing auxiliary loss (Fedus et al., Switch Transformers, section 2.2, summed over the top-k choices); 0
    /// without this loss.
    pub aux_loss_coef: f32,
    /// Coefficient of the router z-loss (Zoph et al., ST-MoE, section 3.2, equation 5); 0 without this loss.
    pub z_loss_coef: f32,
}

/// One of the projections of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proj {
    /// `[intermediate, hidden]`, gated MLPs only.
    Gate,
    /// `[intermediate, hidden]`.
    Up,
    /// `[hidden, intermediate]`.
    Down,
}

/// Identifies one weight of the layer, independent of file naming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightId {
    /// The router, `[n_experts + identity_experts, hidden]`.
    Router,
    /// Bias of the router's logits, `[n_experts + identity_experts]`.
    LogitBias,
    /// The router's correction bias, `[n_experts + identity_experts]`. Used in selection only; it has no gradient.
    RouterBias,
    /// A routed expert's projection matrix.
    Expert(usize, Proj),
    /// A routed expert's bias, `[out]`.
    ExpertBias(usize, Proj),
    /// The shared expert's projection matrix.
    Shared(Proj),
    /// The shared expert's bias, `[out]`.
    SharedBias(Proj),
    /// The shared expert's sigmoid gate, `[1, hidden]`.
    SharedGate,
}

impl WeightId {
    /// The routed expert to which the weight belongs; `None` for a weight that every PE holds.
    pub fn expert(self) -> Option<usize> {
        match self {
            WeightId::Expert(e, _) | WeightId::ExpertBias(e, _) => Some(e),
            _ => None,
        }
    }

    /// Whether training gives this weight a gradient.
    pub fn has_gradient(self) -> bool {
        self != WeightId::RouterBias
    }
}

impl MlpConfig {
    /// A gated MLP without biases, with intermediate width `intermediate`.
    pub fn gated(intermediate: usize, activation: Activation) -> Self {
        MlpConfig { intermediate, gated: true, activation, bias: false, glu: Glu::PRODUCT }
    }

    /// An MLP without gate and biases, with intermediate width `intermediate`.
    pub fn plain(intermediate: usize, activation: Activation) -> Self {
        MlpConfig { gated: false, ..MlpConfig::gated(intermediate, activation) }
    }

    /// The MLP's projections in a fixed order: gate (if gated), up, down.
    pub fn projections(&self) -> &'static [Proj] {
        if self.gated { &[Proj::Gate, Proj::Up, Proj::Down] } else { &[Proj::Up, Proj::Down] }
    }

    /// `[out, in]` of a projection for a model of width `hidden`.
    pub fn shape(&self, proj: Proj, hidden: usize) -> [usize; 2] {
        match proj {
            Proj::Gate | Proj::Up => [self.intermediate, hidden],
            Proj::Down => [hidden, self.intermediate],
        }
    }

    /// FLOP of a forward pass of one row: `2 * hidden * intermediate` per projection.
    pub fn forward_flop_per_row(&self, hidden: usize) -> f64 {
        2.0 * hidden as f64 * self.intermediate as f64 * self.projections().len() as f64
    }
}

impl SharedConfig {
    /// A shared expert with scale 1, and a sigmoid gate if `sigmoid_gate`.
    pub fn new(mlp: MlpConfig, sigmoid_gate: bool) -> Self {
        SharedConfig { mlp, sigmoid_gate, scale: 1.0 }
    }
}

impl LayerConfig {
    /// A dropless layer without a shared expert and without auxiliary losses.
    pub fn new(hidden: usize, n_experts: usize, router: RouterConfig, expert: MlpConfig) -> Self {
        LayerConfig {
            hidden,
            n_experts,
            identity_experts: 0,
            router,
            expert,
            shared: None,
            capacity_factor: None,
            aux_loss_coef: 0.0,
            z_loss_coef: 0.0,
        }
    }

    /// The shape of a weight.
    pub fn shape(&self, id: WeightId) -> Vec<usize> {
        match id {
            WeightId::Router => vec![self.choices(), self.hidden],
            WeightId::LogitBias | WeightId::RouterBias => vec![self.choices()],
            WeightId::Expert(_, p) => self.expert.shape(p, self.hidden).to_vec(),
            WeightId::ExpertBias(_, p) => vec![self.expert.shape(p, self.hidden)[0]],
            WeightId::Shared(p) => self.shared_mlp().shape(p, self.hidden).to_vec(),
            WeightId::SharedBias(p) => vec![self.shared_mlp().shape(p, self.hidden)[0]],
            WeightId::SharedGate => vec![1, self.hidden],
        }
    }

    fn shared_mlp(&self) -> MlpConfig {
        self.shared.map_or(self.expert, |s| s.mlp)
    }

    /// Number of choices of the router: routed and identity experts.
    pub fn choices(&self) -> usize {
        self.n_experts + self.identity_experts
    }

    /// Maximum number of (token, expert) pairs per expert, for `pairs` pairs over all PEs; `None` without a capacity factor.
    pub(crate) fn expert_capacity(&self, pairs: u64) -> Option<u64> {
        let (factor, top_k) = (self.capacity_factor?, self.router.top_k);
        let tokens = pairs / top_k as u64;
        Some((factor * top_k as f64 * tokens as f64 / self.n_experts as f64).ceil() as u64)
    }

    /// Rows of the router's weight: the number of choices, or 0 if the caller routes.
    pub(in crate::moe) fn router_rows(&self) -> usize {
        if self.router.external { 0 } else { self.choices() }
    }

    /// Whether an auxiliary loss has a coefficient. The layer then needs load sums over all PEs' tokens.
    pub fn has_losses(&self) -> bool {
        self.aux_loss_coef != 0.0 || self.z_loss_coef != 0.0
    }

    /// The weights that every PE holds: router, correction bias, shared expert and its gate, in a fixed order.
    pub fn replicated_weights(&self) -> Vec<WeightId> {
        let mut ids = Vec::new();
        if !self.router.external {
            ids.push(WeightId::Router);
        }
        if self.router.logit_bias {
            ids.push(WeightId::LogitBias);
        }
        if self.router.correction_bias {
            ids.push(WeightId::RouterBias);
        }
        if let Some(shared) = self.shared {
            for &p in shared.mlp.projections() {
                ids.push(WeightId::Shared(p));
                if shared.mlp.bias {
                    ids.push(WeightId::SharedBias(p));
                }
            }
            if shared.sigmoid_gate {
                ids.push(WeightId::SharedGate);
            }
        }
        ids
    }

    /// The weights of routed expert `expert`, in a fixed order.
    pub fn expert_weights(&self, expert: usize) -> Vec<WeightId> {
        let mut ids = Vec::new();
        for &p in self.expert.projections() {
            ids.push(WeightId::Expert(expert, p));
            if self.expert.bias {
                ids.push(WeightId::ExpertBias(expert, p));
            }
        }
        ids
    }

    /// Like [`expert_weights`](Self::expert_weights). Each weight has its element range in the concatenation of all.
    pub fn expert_parts(&self, expert: usize) -> Vec<(WeightId, Range<usize>)> {
        let mut end = 0;
        let part = |id| {
            let start = end;
            end += self.shape(id).iter().product::<usize>();
            (id, start..end)
        };
        self.expert_weights(expert).into_iter().map(part).collect()
    }

    /// Number of elements of one expert's weights, including biases.
    pub fn expert_elements(&self) -> usize {
        self.expert_parts(0).last().map_or(0, |(_, part)| part.end)
    }

    /// All weights of the layer, in a fixed order: replicated weights, then those of the experts.
    pub fn weights(&self) -> Vec<WeightId> {
        let mut ids = self.replicated_weights();
        ids.extend((0..self.n_experts).flat_map(|e| self.expert_weights(e)));
        ids
    }

    /// Checks the fields that only some model families use.
    fn validate_router(&self) -> Result<(), ConfigError> {
        let err = |field: &'static str, value: String, expected: &str| {
            Err(ConfigError { field, value, expected: expected.into() })
        };
        let Norm { epsilon, floor, order } = self.router.norm;
        for (field, value) in [("norm epsilon", epsilon), ("norm floor", floor), ("softcap", self.router.softcap)] {
            if !(value.is_finite() && value >= 0.0) {
                return err(field, value.to_string(), "a finite number, 0 or more");
            }
        }
        if !(order.is_finite() && order > 0.0) {
            return err("norm order", order.to_string(), "a finite number above 0");
        }
        for (field, mlp) in [("glu limit", Some(self.expert)), ("shared glu limit", self.shared.map(|s| s.mlp))] {
            let Some(glu) = mlp.map(|mlp| mlp.glu) else { continue };
            if !(glu.limit.is_finite() && glu.limit >= 0.0) {
                return err(field, glu.limit.to_string(), "a finite number, 0 or more");
            }
        }
        if let Some(mixer) = self.router.sparse_mixer {
            if !(mixer.jitter.is_finite() && mixer.jitter >= 0.0) {
                return err("jitter", mixer.jitter.to_string(), "a finite number, 0 or more");
            }
            if self.router.top_k != 2 || self.n_experts < 2 {
                return err(
                    "top-k",
                    self.router.top_k.to_string(),
                    "2 experts of 2 or more, which SparseMixer chooses",
                );
            }
        }
        let no_losses = self.identity_experts > 0 || self.router.sparse_mixer.is_some();
        if no_losses && (self.has_losses() || self.capacity_factor.is_some()) {
            return err("a loss or capacity factor", "given".into(), "none with identity experts or SparseMixer");
        }
        if self.router.groups.is_some() && self.identity_experts > 0 {
            return err("n_group", "given".into(), "none with identity experts");
        }
        Ok(())
    }

    /// Checks the configuration for consistency.
    ///
    /// # Errors
    ///
    /// Returns a `ConfigError` that names the first wrong field, its value, and the expected values.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let err = |field: &'static str, value: String, expected: String| Err(ConfigError { field, value, expected });
        let e = self.n_experts;
        let shared = self.shared.map_or(1, |s| s.mlp.intermediate);
        for (field, value) in [
            ("hidden", self.hidden),
            ("experts", e),
            ("intermediate", self.expert.intermediate),
            ("shared intermediate", shared),
        ] {
            if value == 0 || value > MAX_WIDTH {
                return err(field, value.to_string(), format!("1 to {MAX_WIDTH}"));
            }
        }
        if self.identity_experts > MAX_WIDTH {
            return err("identity experts", self.identity_experts.to_string(), format!("0 to {MAX_WIDTH}"));
        }
        let k = self.router.top_k;
        if k == 0 || k > self.choices() {
            return err("top-k", k.to_string(), format!("1 to {}, the number of experts", self.choices()));
        }
        self.validate_router()?;
        if self.router.external {
            let fields = [
                ("n_group", self.router.groups.is_some()),
                ("correction bias", self.router.correction_bias),
                ("aux-loss coefficient", self.aux_loss_coef != 0.0),
                ("z-loss coefficient", self.z_loss_coef != 0.0),
            ];
            if let Some((field, _)) = fields.into_iter().find(|(_, given)| *given) {
                return err(field, "given".into(), "none where the caller routes".into());
            }
        }
        if !self.router.scaling.is_finite() {
            return err("scaling", self.router.scaling.to_string(), "a finite number".into());
        }
        if let Some(g) = self.router.groups {
            if g.n_groups == 0 || !e.is_multiple_of(g.n_groups) {
                return err("n_group", g.n_groups.to_string(), format!("a divisor of {e}, the number of experts"));
            }
            if g.top_groups == 0 || g.top_groups > g.n_groups {
                return err(
                    "topk_group",
                    g.top_groups.to_string(),
                    format!("1 to {}, the number of groups", g.n_groups),
                );
            }
            let eligible = e / g.n_groups * g.top_groups;
            if k > eligible {
                return err(
                    "top-k",
                    k.to_string(),
                    format!("at most {eligible}, the experts of {} groups", g.top_groups),
                );
            }
        }
        if let Some(c) = self.capacity_factor
            && !(c.is_finite() && c > 0.0)
        {
            return err("capacity factor", c.to_string(), "a finite number above 0".into());
        }
        for (field, v) in [("aux-loss coefficient", self.aux_loss_coef), ("z-loss coefficient", self.z_loss_coef)] {
            if !(v.is_finite() && v >= 0.0) {
                return err(field, v.to_string(), "a finite number, 0 or more".into());
            }
        }
        Ok(())
    }
}

/// Source of a layer's weights: a checkpoint, or the synthetic generator.
pub trait WeightSource {
    /// Configuration of the layer.
    fn config(&self) -> &LayerConfig;

    /// Name that the source uses for the tensor that contains the weight. The weight's gradient is written under this name.
    fn name(&self, id: WeightId) -> String;

    /// Position of the weight in the tensor [`name`](Self::name). By default the weight is the whole tensor.
    fn weight_slice(&self, id: WeightId) -> WeightSlice {
        WeightSlice::whole(self.name(id), self.config().shape(id))
    }

    /// Reads one weight, row-major, widened to f32 (exact for bf16 and f16).
    ///
    /// # Errors
    ///
    /// Returns a `WeightError` that names the file, the tensor and the fault.
    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError>;
}

impl LayerConfig {
    /// The planner's description of a model whose MoE layers have this configuration. `layers` is (number of all layers, number of MoE
    /// layers).
    pub fn model(&self, layers: (usize, usize)) -> Model {
        let replicated = self.replicated_weights();
        let routed = self.weights().into_iter().filter(|id| id.has_gradient() && !replicated.contains(id));
        let weights: usize = routed.map(|id| self.shape(id).iter().product::<usize>()).sum();
        let mut model = Model::gated(layers, self.hidden, self.expert.intermediate, self.n_experts, self.router.top_k);
        model.expert_parameters = weights as f64 / self.n_experts as f64;
        model.flop_per_row = self.expert.forward_flop_per_row(self.hidden);
        model
    }
}

/// FLOP of the experts' GEMMs in a step, with `routed_rows` rows for routed experts and `tokens` rows for the shared expert. With
/// `backward`, three times those of forward. The router is not included.
pub fn gemm_flop(layer: &LayerConfig, routed_rows: u64, tokens: u64, backward: bool) -> f64 {
    let shared = layer.shared.map_or(0.0, |s| s.mlp.forward_flop_per_row(layer.hidden) * tokens as f64);
    let routed = layer.expert.forward_flop_per_row(layer.hidden) * routed_rows as f64;
    (routed + shared) * if backward { 3.0 } else { 1.0 }
}
