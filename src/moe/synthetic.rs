//! A synthetic layer with a specified routing workload, generated from a seed.
//!
//! **Workload.** A fraction `hot_ratio` of the experts (rounded, at least one) is hot. They share the fraction `hot_weight` of the routing
//! probability equally, and the other experts share the rest equally. Every token draws its `top_k` distinct experts in sequence with these
//! probabilities, without replacement. So with `top_k` above 1 and few hot experts, the hot experts' share of all (token, expert) pairs is
//! below `hot_weight`. Hot experts have the smallest indices. In a placement in contiguous blocks they are all on the first PEs, which is
//! the hardest case. With a group-limited router, once the drawn experts are in as many groups as the router allows, the remaining experts
//! are drawn from these groups.
//!
//! **Making a real router choose the drawn experts.** Hidden dimension `e` belongs to expert `e`: the expert's router row is 1 in this
//! dimension, and small noise in the others. In dimension `e` a token has a value in 0.75..2.25 if expert `e` was drawn, in -3..-1.5 if the
//! expert is in a group without drawn experts, and in -1.5..0 otherwise. Noise changes a logit by 0.05 (standard deviation), so chosen and
//! other logits are clearly separated, even after rounding to bf16.
//!
//! Every weight and every token has its own random stream. So each PE generates only its own weights and tokens, and any split over PEs
//! gives the same layer and tokens.

use std::ops::Range;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::parallel::par_chunks;
use super::{ConfigError, GroupLimit, LayerConfig, Proj, RouterConfig, Scoring, WeightError, WeightId, WeightSource};

/// Standard deviation of the noise that a router row adds to a logit.
const LOGIT_NOISE: f32 = 0.05;
/// Minimum logit of a drawn expert, without noise.
const CHOSEN_LOGIT_MIN: f32 = 0.75;
/// Width of the range of logits, without noise, of drawn experts, and of the other experts.
const LOGIT_SPAN: f32 = 1.5;
/// Maximum magnitude of the correction bias; far below the separation of sigmoid scores.
const BIAS_MAX: f32 = 0.01;

/// Routers that a synthetic layer can have, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterKind {
    /// Softmax top-k (OLMoE, Qwen2-MoE).
    Softmax,
    /// Softmax top-k, renormalised (Mixtral, Qwen3-MoE).
    SoftmaxRenormalised,
    /// Sigmoid with correction bias, group-limited, renormalised and scaled by 2.5 (DeepSeek-V3).
    Sigmoid,
}

impl RouterKind {
    /// The configuration of a router of this kind. A sigmoid router has 8, 4 or 2 groups, the largest number for which groups are equal and
    /// have at least two experts. Half of them are eligible, or more if `top_k` requires that. With too few experts it has no groups.
    pub fn config(self, n_experts: usize, top_k: usize) -> RouterConfig {
        let sigmoid = self == RouterKind::Sigmoid;
        let fits = |n: &usize| n_experts >= 2 * n && n_experts.is_multiple_of(*n);
        let groups = [8, 4, 2].into_iter().find(fits).filter(|_| sigmoid).map(|n_groups| {
            let needed = top_k.div_ceil(n_experts / n_groups);
            GroupLimit { n_groups, top_groups: (n_groups / 2).max(needed).min(n_groups) }
        });
        match self {
            RouterKind::Softmax => RouterConfig { renormalise: false, ..RouterConfig::softmax(top_k) },
            RouterKind::SoftmaxRenormalised => RouterConfig::softmax(top_k),
            RouterKind::Sigmoid => {
                RouterConfig { scaling: 2.5, groups, correction_bias: true, ..RouterConfig::sigmoid(top_k) }
            }
        }
    }
}

/// Specification of a synthetic layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SyntheticSpec {
    /// The layer; its hidden size must be at least its number of experts.
    pub layer: LayerConfig,
    /// Fraction of experts that are hot, 0 to 1; 0 for uniform routing.
    pub hot_ratio: f64,
    /// Fraction of the routing probability that the hot experts share, 0 to 1.
    pub hot_weight: f64,
    /// Seed of weights, tokens and routing.
    pub seed: u64,
}

impl SyntheticSpec {
    /// A layer with uniform routing.
    pub fn new(layer: LayerConfig, seed: u64) -> Self {
        SyntheticSpec { layer, hot_ratio: 0.0, hot_weight: 0.0, seed }
    }
}

/// A synthetic layer. Generates its weights, and any number of tokens for it.
#[derive(Clone, Debug)]
pub struct Synthetic {
    spec: SyntheticSpec,
    /// Probability of each expert in a token's first draw, `[n_experts]`.
    probabilities: Vec<f64>,
}

/// Purpose of a random stream, which is part of the stream's key.
#[derive(Clone, Copy)]
enum Stream {
    Routing,
    HiddenStates,
    GradOutput,
    Weight(WeightId),
}

impl Synthetic {
    /// Checks the specification.
    ///
    /// # Errors
    ///
    /// Returns a `ConfigError` that names the first wrong field, its value, and the expected values.
    pub fn new(spec: SyntheticSpec) -> Result<Self, ConfigError> {
        spec.layer.validate()?;
        let (n_experts, hidden) = (spec.layer.choices(), spec.layer.hidden);
        if n_experts > hidden {
            return Err(ConfigError {
                field: "experts",
                value: n_experts.to_string(),
                expected: format!(
                    "at most {hidden}, the hidden width (a synthetic router takes one dimension per expert)"
                ),
            });
        }
        for (field, value) in [("hot ratio", spec.hot_ratio), ("hot weight", spec.hot_weight)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(ConfigError { field, value: value.to_string(), expected: "a number from 0 to 1".into() });
            }
        }
        let probabilities = probabilities(n_experts, spec.hot_ratio, spec.hot_weight);
        Ok(Synthetic { spec, probabilities })
    }

    /// A copy of this layer with other hot experts: their indices are rotated by `times` times the number of hot experts.
    pub fn shifted(&self, times: usize) -> Synthetic {
        let n = self.probabilities.len();
        let hot = hot_experts(n, self.spec.hot_ratio);
        let mut probabilities = self.probabilities.clone();
        probabilities.rotate_right((hot * (times % n)) % n);
        Synthetic { spec: self.spec.clone(), probabilities }
    }

    /// The experts of global token `token` in the order drawn, distinct, `[top_k]`. The router chooses the same set.
    pub fn draw_experts(&self, token: usize) -> Vec<usize> {
        let LayerConfig { n_experts, router, .. } = &self.spec.layer;
        let mut rng = self.rng(Stream::Routing, token);
        let mut weights = self.probabilities.clone();
        let mut drawn = Vec::with_capacity(router.top_k);
        for _ in 0..router.top_k {
            let groups = self.groups_of(&drawn);
            let full = router.groups.is_some_and(|g| groups.len() == g.top_groups);
            let eligible = |e: usize| !drawn.contains(&e) && (!full || groups.contains(&self.group(e)));
            for (e, w) in weights.iter_mut().enumerate() {
                if !eligible(e) {
                    *w = 0.0;
                }
            }
            // If all remaining experts have probability 0, one of them is drawn uniformly.
            if weights.iter().all(|&w| w == 0.0) {
                weights = (0..*n_experts).map(|e| f64::from(u8::from(eligible(e)))).collect();
            }
            let mut point = rng.random::<f64>() * weights.iter().sum::<f64>();
            let mut pick = None;
            for (e, &w) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
                pick = Some(e);
                if point < w {
                    break;
                }
                point -= w;
            }
            // `validate` guarantees that the eligible groups have `top_k` experts.
            drawn.extend(pick);
        }
        drawn
    }

    /// Hidden states of global tokens `rows`, `[rows.len(), hidden]`, of about unit variance.
    pub fn hidden_states(&self, rows: Range<usize>) -> Vec<f32> {
        let LayerConfig { hidden, n_experts, router, .. } = &self.spec.layer;
        let mut out = vec![0.0; rows.len() * hidden];
        for (token, x) in rows.zip(out.chunks_mut(*hidden)) {
            let mut rng = self.rng(Stream::HiddenStates, token);
            let drawn = self.draw_experts(token);
            let groups = self.groups_of(&drawn);
            for (e, x) in x[..*n_experts].iter_mut().enumerate() {
                let fraction: f32 = rng.random();
                *x = match drawn.iter().position(|&d| d == e) {
                    // Each draw has its own part of the range; that of the first draw is the highest.
                    Some(i) => {
                        let part = (router.top_k - 1 - i) as f32 + 0.5 * fraction;
                        CHOSEN_LOGIT_MIN + LOGIT_SPAN * part / router.top_k as f32
                    }
                    None if router.groups.is_none() || groups.contains(&self.group(e)) => LOGIT_SPAN * (fraction - 1.0),
                    None => LOGIT_SPAN * (fraction - 2.0),
                };
            }
            fill(&mut rng, 1.0, &mut x[*n_experts..]);
        }
        out
    }

    /// Output gradients of global tokens `rows`, `[rows.len(), hidden]`, of unit variance.
    pub fn grad_output(&self, rows: Range<usize>) -> Vec<f32> {
        let hidden = self.spec.layer.hidden;
        let mut out = vec![0.0; rows.len() * hidden];
        for (token, g) in rows.zip(out.chunks_mut(hidden)) {
            fill(&mut self.rng(Stream::GradOutput, token), 1.0, g);
        }
        out
    }

    /// The expert's group; without groups, each expert is its own group.
    fn group(&self, expert: usize) -> usize {
        let LayerConfig { n_experts, router, .. } = &self.spec.layer;
        expert / router.groups.map_or(1, |g| n_experts / g.n_groups)
    }

    /// The distinct groups of `experts`.
    fn groups_of(&self, experts: &[usize]) -> Vec<usize> {
        let mut groups: Vec<usize> = experts.iter().map(|&e| self.group(e)).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// The generator of a stream; `token` is 0 for weights.
    fn rng(&self, stream: Stream, token: usize) -> ChaCha8Rng {
        let key = match stream {
            Stream::Routing => [0, 0, 0],
            Stream::HiddenStates => [1, 0, 0],
            Stream::GradOutput => [2, 0, 0],
            Stream::Weight(WeightId::Router) => [3, 0, 0],
            Stream::Weight(WeightId::RouterBias) => [4, 0, 0],
            Stream::Weight(WeightId::SharedGate) => [5, 0, 0],
            Stream::Weight(WeightId::Expert(e, p)) => [6, e as u64, p as u64],
            Stream::Weight(WeightId::ExpertBias(e, p)) => [7, e as u64, p as u64],
            Stream::Weight(WeightId::Shared(p)) => [8, 0, p as u64],
            Stream::Weight(WeightId::SharedBias(p)) => [9, 0, p as u64],
            Stream::Weight(WeightId::LogitBias) => [10, 0, 0],
        };
        let mut seed = [0; 32];
        for (bytes, word) in seed.chunks_exact_mut(8).zip([self.spec.seed, key[0], key[1], key[2]]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut rng = ChaCha8Rng::from_seed(seed);
        rng.set_stream(token as u64);
        rng
    }
}

impl WeightSource for Synthetic {
    fn config(&self) -> &LayerConfig {
        &self.spec.layer
    }

    fn name(&self, id: WeightId) -> String {
        let proj = |p| match p {
            Proj::Gate => "gate_proj",
            Proj::Up => "up_proj",
            Proj::Down => "down_proj",
        };
        match id {
            WeightId::Router => "router.weight".into(),
            WeightId::LogitBias => "router.bias".into(),
            WeightId::RouterBias => "router.correction_bias".into(),
            WeightId::Expert(e, p) => format!("experts.{e}.{}.weight", proj(p)),
            WeightId::ExpertBias(e, p) => format!("experts.{e}.{}.bias", proj(p)),
            WeightId::Shared(p) => format!("shared_expert.{}.weight", proj(p)),
            WeightId::SharedBias(p) => format!("shared_expert.{}.bias", proj(p)),
            WeightId::SharedGate => "shared_expert_gate.weight".into(),
        }
    }

    /// Projections, their biases and the shared gate are uniform with variance `1 / fan_in`.
    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        let layer = &self.spec.layer;
        let exists = match id {
            WeightId::Expert(e, _) | WeightId::ExpertBias(e, _) => {
                e < layer.n_experts && layer.expert_weights(e).contains(&id)
            }
            _ => layer.replicated_weights().contains(&id),
        };
        if !exists {
            return Err(WeightError::new(format!("the synthetic layer has no weight {}", self.name(id))));
        }
        let mut data = vec![0.0; layer.shape(id).iter().product()];
        let matrix = match id {
            WeightId::ExpertBias(e, p) => WeightId::Expert(e, p),
            WeightId::SharedBias(p) => WeightId::Shared(p),
            other => other,
        };
        let fan_in_scale = 1.0 / (layer.shape(matrix).last().copied().unwrap_or(1) as f32).sqrt();
        let std_dev = match id {
            WeightId::Router => LOGIT_NOISE * fan_in_scale,
            WeightId::LogitBias => LOGIT_NOISE,
            WeightId::RouterBias => {
                let max = match layer.router.scoring {
                    Scoring::Sigmoid | Scoring::SqrtSoftplus => BIAS_MAX,
                    // Softmax scores, and their separation, shrink with the number of experts.
                    Scoring::Softmax => BIAS_MAX / layer.n_experts as f32,
                };
                max / 3.0_f32.sqrt()
            }
            _ => fan_in_scale,
        };
        par_fill(&self.rng(Stream::Weight(id), 0), std_dev, &mut data);
        if id == WeightId::Router {
            for (e, row) in data.chunks_mut(layer.hidden).enumerate() {
                row[e] = 1.0;
            }
        }
        Ok(data)
    }
}

fn hot_experts(n_experts: usize, hot_ratio: f64) -> usize {
    let rounded = (hot_ratio * n_experts as f64).round() as usize;
    if hot_ratio > 0.0 { rounded.max(1) } else { 0 }
}

/// Probability of each expert in a first draw, `[n_experts]`.
fn probabilities(n_experts: usize, hot_ratio: f64, hot_weight: f64) -> Vec<f64> {
    let n_hot = hot_experts(n_experts, hot_ratio);
    if n_hot == 0 || n_hot == n_experts {
        return vec![1.0 / n_experts as f64; n_experts];
    }
    let (hot, cold) = (hot_weight / n_hot as f64, (1.0 - hot_weight) / (n_experts - n_hot) as f64);
    (0..n_experts).map(|e| if e < n_hot { hot } else { cold }).collect()
}

/// Fills `out` with uniform variates of mean 0 and standard deviation `std_dev`.
fn fill(rng: &mut ChaCha8Rng, std_dev: f32, out: &mut [f32]) {
    let max = std_dev * 3.0_f32.sqrt();
    for x in out {
        // 24 random bits give numbers in -1..1 in steps of 2^-23, which are exact in f32.
        let unit = (rng.next_u32() >> 8) as f32 * (1.0 / 8_388_608.0) - 1.0;
        *x = max * unit;
    }
}

/// Like [`fill`], with the same values, but in parallel. Each element uses one word of the generator, so any part can be filled
/// independently.
fn par_fill(rng: &ChaCha8Rng, std_dev: f32, out: &mut [f32]) {
    let begin = rng.get_word_pos();
    par_chunks(out, |first, part| {
        let mut rng = rng.clone();
        rng.set_word_pos(begin + first as u128);
        fill(&mut rng, std_dev, part);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{CHOICE_TOLERANCE, Problem, reference};
    use crate::moe::{Activation, Dtype, MlpConfig, SharedConfig};

    fn layer(hidden: usize, router: RouterConfig, n_experts: usize) -> LayerConfig {
        let expert = MlpConfig { bias: true, ..MlpConfig::gated(4, Activation::Silu) };
        let shared = Some(SharedConfig::new(expert, true));
        LayerConfig { shared, ..LayerConfig::new(hidden, n_experts, router, expert) }
    }

    fn make(kind: RouterKind, hidden: usize, n_experts: usize, top_k: usize, hot: (f64, f64)) -> Synthetic {
        let layer = layer(hidden, kind.config(n_experts, top_k), n_experts);
        Synthetic::new(SyntheticSpec { layer, hot_ratio: hot.0, hot_weight: hot.1, seed: 11 }).unwrap()
    }

    fn bf16(x: Vec<f32>) -> Vec<f32> {
        x.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect()
    }

    /// Choices of the reference, with all inputs rounded to bf16.
    fn routed(s: &Synthetic, tokens: usize) -> Vec<u32> {
        let weights = |id| Ok(bf16(s.load(id)?));
        let hidden_states = bf16(s.hidden_states(0..tokens));
        let problem = Problem {
            config: s.config(),
            tokens,
            hidden_states: &hidden_states,
            grad_output: None,
            weights: &weights,
            chosen: None,
            choice_tolerance: CHOICE_TOLERANCE,
            dtype: Dtype::Bf16,
            wire: None,
        };
        reference(&problem).unwrap().chosen
    }

    #[test]
    fn router_selects_the_drawn_experts() {
        use RouterKind::*;
        for (kind, hidden, experts, k, hot) in [
            (Softmax, 64, 8, 2, (0.0, 0.0)),
            (Softmax, 64, 64, 8, (0.25, 0.7)),
            (SoftmaxRenormalised, 40, 8, 2, (0.25, 0.7)),
            (SoftmaxRenormalised, 8, 1, 1, (1.0, 1.0)),
            (SoftmaxRenormalised, 16, 8, 8, (0.1, 1.0)),
            (Sigmoid, 64, 8, 2, (0.25, 0.7)),
            (Sigmoid, 128, 64, 8, (0.1, 0.9)),
            (Sigmoid, 96, 5, 3, (0.5, 0.9)),
        ] {
            let mut s = make(kind, hidden, experts, k, hot);
            // DeepSeek's group-limited selection, with both scorings.
            for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
                s.spec.layer.router.scoring = scoring;
                let tokens = 300;
                for (t, chosen) in routed(&s, tokens).chunks(k).enumerate() {
                    let mut chosen: Vec<usize> = chosen.iter().map(|&e| e as usize).collect();
                    let mut drawn = s.draw_experts(t);
                    chosen.sort_unstable();
                    drawn.sort_unstable();
                    assert_eq!(chosen, drawn, "{kind:?} {scoring:?} {experts} {k} token {t}");
                }
            }
        }
    }

    #[test]
    fn chosen_logits_exceed_the_others_by_a_margin() {
        let s = make(RouterKind::Softmax, 256, 64, 4, (0.25, 0.7));
        let router = s.load(WeightId::Router).unwrap();
        let hidden_states = bf16(s.hidden_states(0..500));
        for (t, x) in hidden_states.chunks(256).enumerate() {
            let drawn = s.draw_experts(t);
            let (mut lowest, mut highest) = (f32::INFINITY, f32::NEG_INFINITY);
            for (e, w) in router.chunks(256).enumerate() {
                let logit: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                if drawn.contains(&e) {
                    lowest = lowest.min(logit);
                } else {
                    highest = highest.max(logit);
                }
            }
            assert!(lowest - highest > 0.25, "token {t}: {lowest} {highest}");
        }
    }

    #[test]
    fn hot_experts_receive_the_given_share() {
        let tokens = 20_000;
        let share = |s: &Synthetic, n_hot: usize| {
            let drawn: Vec<usize> = (0..tokens).flat_map(|t| s.draw_experts(t)).collect();
            drawn.iter().filter(|&&e| e < n_hot).count() as f64 / drawn.len() as f64
        };
        // The standard error of a share of 20,000 draws is at most 0.0035; the tolerance is more than four standard errors.
        let close = |got: f64, want: f64| assert!((got - want).abs() < 0.015, "{got}, not {want}");
        close(share(&make(RouterKind::Softmax, 16, 8, 1, (0.25, 0.7)), 2), 0.7);
        close(share(&make(RouterKind::Softmax, 16, 8, 1, (0.01, 0.5)), 1), 0.5);
        close(share(&make(RouterKind::Softmax, 16, 8, 2, (0.0, 0.7)), 2), 0.25);
        assert_eq!(share(&make(RouterKind::Softmax, 16, 8, 1, (0.01, 1.0)), 1), 1.0);
        // The probability that the second of two draws is hot: (0.7 - 0.35) / 0.65 if the first was hot, 0.7 / 0.95 otherwise.
        let second = 0.7 * (0.35 / 0.65) + 0.3 * (0.7 / 0.95);
        close(share(&make(RouterKind::Softmax, 16, 8, 2, (0.25, 0.7)), 2), (0.7 + second) / 2.0);
        // Hot experts have all the probability, and top-k exceeds their number: the rest are drawn uniformly.
        close(share(&make(RouterKind::Softmax, 16, 8, 4, (0.25, 1.0)), 2), 0.5);
    }

    #[test]
    fn tokens_do_not_depend_on_the_split_and_weights_differ() {
        let s = make(RouterKind::Sigmoid, 32, 8, 2, (0.25, 0.7));
        assert_eq!(s.hidden_states(0..9), [s.hidden_states(0..4), s.hidden_states(4..9)].concat());
        assert_eq!(s.grad_output(0..9), [s.grad_output(0..1), s.grad_output(1..9)].concat());
        assert!(s.hidden_states(3..3).is_empty());
        let mut other = s.clone();
        other.spec.seed += 1;
        let ids = s.config().weights();
        let names: std::collections::BTreeSet<String> = ids.iter().map(|&id| s.name(id)).collect();
        assert_eq!(names.len(), ids.len());
        let mut first_values = std::collections::BTreeSet::new();
        for id in ids {
            let weight = s.load(id).unwrap();
            assert_eq!(weight.len(), s.config().shape(id).iter().product::<usize>(), "{id:?}");
            assert_eq!(weight, s.load(id).unwrap(), "{id:?}");
            assert_ne!(weight, other.load(id).unwrap(), "{id:?}");
            assert!(first_values.insert(weight[1].to_bits()), "{id:?} repeats another weight");
        }
        assert_eq!(s.name(WeightId::Expert(3, Proj::Gate)), "experts.3.gate_proj.weight");
        let text = s.load(WeightId::Expert(8, Proj::Up)).unwrap_err().to_string();
        assert_eq!(text, "the synthetic layer has no weight experts.8.up_proj.weight");
    }

    #[test]
    fn weights_have_variance_one_over_fan_in() {
        let mut s = make(RouterKind::Softmax, 400, 2, 1, (0.0, 0.0));
        s.spec.layer.expert.intermediate = 100;
        for (proj, fan_in) in [(Proj::Up, 400.0), (Proj::Down, 100.0)] {
            let w = s.load(WeightId::Expert(1, proj)).unwrap();
            let variance = w.iter().map(|w| w * w).sum::<f32>() / w.len() as f32;
            assert!((variance * fan_in - 1.0).abs() < 0.03, "{proj:?}: {variance}");
        }
        let g = s.grad_output(0..100);
        let variance = g.iter().map(|g| g * g).sum::<f32>() / g.len() as f32;
        assert!((variance - 1.0).abs() < 0.03, "{variance}");
    }

    #[test]
    fn invalid_specifications_are_rejected() {
        let error = |hidden, experts, k, hot_ratio, hot_weight| {
            let layer = layer(hidden, RouterKind::Sigmoid.config(experts, k), experts);
            Synthetic::new(SyntheticSpec { layer, hot_ratio, hot_weight, seed: 0 }).unwrap_err().to_string()
        };
        assert!(error(32, 64, 2, 0.0, 0.0).starts_with("experts is 64, expected at most 32, the hidden width"));
        assert_eq!(error(64, 8, 2, 1.5, 0.5), "hot ratio is 1.5, expected a number from 0 to 1");
        assert_eq!(error(64, 8, 2, 0.5, f64::NAN), "hot weight is NaN, expected a number from 0 to 1");
        assert_eq!(error(64, 8, 9, 0.5, 0.5), "top-k is 9, expected 1 to 8, the number of experts");
    }
}
