//! The reference against finite differences of itself, a case computed by hand, and its errors.

use std::collections::{BTreeMap, BTreeSet};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::moe::{Activation, Dtype, GroupLimit, Proj, RouterConfig, Scoring, SharedConfig};

const HIDDEN: usize = 5;
const TOKENS: usize = 6;
/// Added to and subtracted from an entry; the entries are multiples of 2^-10, so that this is exact in f32.
const STEP: f32 = 1.0 / 16384.0;

fn mlp(activation: Activation, gated: bool, bias: bool) -> MlpConfig {
    MlpConfig { gated, bias, ..MlpConfig::gated(3, activation) }
}

/// Softmax top-2 of four plain SiLU experts.
fn base() -> LayerConfig {
    let router = RouterConfig { renormalise: false, ..RouterConfig::softmax(2) };
    LayerConfig::new(HIDDEN, 4, router, mlp(Activation::Silu, false, false))
}

/// Inputs and weights on a coarse grid in -1..1, the router's in -2..2.
struct Data {
    config: LayerConfig,
    hidden_states: Vec<f32>,
    grad_output: Vec<f32>,
    weights: BTreeMap<WeightId, Vec<f32>>,
}

impl Data {
    fn new(config: LayerConfig, tokens: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut numbers = |n: usize, max: f32| -> Vec<f32> {
            (0..n).map(|_| (rng.random_range(-1.0..1.0) * max * 1024.0_f32).round() / 1024.0).collect()
        };
        let hidden_states = numbers(tokens * config.hidden, 1.0);
        let grad_output = numbers(tokens * config.hidden, 1.0);
        let weights = config
            .weights()
            .into_iter()
            .map(|id| (id, numbers(config.shape(id).iter().product(), if id == WeightId::Router { 2.0 } else { 1.0 })))
            .collect();
        Data { config, hidden_states, grad_output, weights }
    }

    fn run(&self, chosen: Option<&[u32]>, tolerance: f64) -> Result<Reference, CheckError> {
        reference(&Problem {
            config: &self.config,
            tokens: self.hidden_states.len() / self.config.hidden,
            hidden_states: &self.hidden_states,
            grad_output: Some(&self.grad_output),
            weights: &|id| Ok(self.weights[&id].clone()),
            chosen,
            choice_tolerance: tolerance,
            dtype: Dtype::F32,
            wire: None,
        })
    }

    /// The differentiated objective, with fixed routing.
    fn objective(&self, chosen: &[u32]) -> f64 {
        let r = self.run(Some(chosen), 1e6).unwrap();
        let product: f64 = r.output.iter().zip(&self.grad_output).map(|(o, &g)| o * f64::from(g)).sum();
        product + f64::from(self.config.aux_loss_coef) * r.aux_loss + f64::from(self.config.z_loss_coef) * r.z_loss
    }

    /// The central difference quotient of the objective along `signs`, in the tensor that `tensor` picks.
    fn quotient(&mut self, chosen: &[u32], signs: &[f32], tensor: &dyn Fn(&mut Self) -> &mut Vec<f32>) -> f64 {
        let values = tensor(self).clone();
        let [above, below] = [STEP, -STEP].map(|step| {
            *tensor(self) = values.iter().zip(signs).map(|(value, sign)| value + step * sign).collect();
            self.objective(chosen)
        });
        *tensor(self) = values;
        (above - below) / (2.0 * f64::from(STEP))
    }

    /// Compares every gradient with finite differences along some directions. In each direction all elements of a tensor change, so that
    /// each direction detects an error in any element. The quotients have an error of STEP^2/6 times a third derivative, about 1e-8, and
    /// of 2^-52 / STEP, 1e-12.
    fn check_gradients(mut self) -> Reference {
        let result = self.run(None, CHOICE_TOLERANCE).unwrap();
        let chosen = &result.chosen;
        let config = self.config.clone();
        let ids: Vec<WeightId> = self.config.weights().into_iter().filter(|id| id.has_gradient()).collect();
        assert_eq!(result.grads.keys().copied().collect::<BTreeSet<_>>(), ids.iter().copied().collect());
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut compare = |what: &str, got: &[f64], tensor: &dyn Fn(&mut Data) -> &mut Vec<f32>| {
            let size = got.iter().map(|g| g * g).sum::<f64>().sqrt();
            for _ in 0..DIRECTIONS {
                let signs: Vec<f32> = got.iter().map(|_| if random.random() { 1.0 } else { -1.0 }).collect();
                let along: f64 = got.iter().zip(&signs).map(|(g, sign)| g * f64::from(*sign)).sum();
                let want = self.quotient(chosen, &signs, tensor);
                assert!(
                    (along - want).abs() <= 1e-6 * size + 1e-9,
                    "{what} of {config:?}: {along} along {signs:?}, not {want}: {got:?}"
                );
            }
        };
        compare("grad_hidden_states", result.grad_hidden_states.as_ref().unwrap(), &|data| &mut data.hidden_states);
        for id in ids {
            compare(&format!("{id:?}"), &result.grads[&id], &|data| data.weights.get_mut(&id).unwrap());
        }
        result
    }
}

/// An error in one element changes the derivative along every direction by twice that error.
const DIRECTIONS: usize = 3;

#[test]
fn gradients_of_every_activation_gated_and_plain_with_biases() {
    use Activation::{Gelu, GeluTanh, QuickGelu, Relu, Relu2, Silu};
    let activations = [Silu, Gelu, GeluTanh, Relu, Relu2, QuickGelu];
    for (i, activation) in activations.into_iter().enumerate() {
        for gated in [false, true] {
            let expert = mlp(activation, gated, true);
            Data::new(LayerConfig { expert, ..base() }, TOKENS, 10 + i as u64).check_gradients();
        }
    }
}

#[test]
fn gradients_of_every_router_with_both_losses() {
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        for renormalise in [false, true] {
            for groups in [None, Some(GroupLimit { n_groups: 4, top_groups: 2 })] {
                let router = RouterConfig {
                    scoring,
                    top_k: 3,
                    renormalise,
                    scaling: 2.5,
                    groups,
                    correction_bias: scoring == Scoring::Sigmoid,
                    ..RouterConfig::sigmoid(3)
                };
                let config = LayerConfig { n_experts: 8, router, aux_loss_coef: 0.5, z_loss_coef: 0.25, ..base() };
                Data::new(config, TOKENS, 20).check_gradients();
            }
        }
    }
}

#[test]
fn gradients_of_features_of_single_families() {
    use crate::moe::{Glu, GroupScore, Norm, SparseMixer};
    type Change = fn(&mut LayerConfig);
    let changes: [(Change, bool); 13] = [
        (|l| l.router.scoring = Scoring::SqrtSoftplus, true),
        (|l| l.router.norm = Norm::sum(0.3), true),
        (|l| l.router.norm.floor = 0.6, true),
        (|l| l.router.norm.order = 2.0, true),
        (|l| l.router.softcap = 1.5, true),
        (|l| l.router.logit_bias = true, true),
        (|l| l.router.group_score = GroupScore::Best, true),
        (|l| (l.router.select_logits, l.router.scoring) = (true, Scoring::Sigmoid), true),
        (|l| l.router.weigh_input = true, true),
        (|l| l.router.sparse_mixer = Some(SparseMixer { jitter: 0.5 }), false),
        (|l| l.identity_experts = 3, false),
        (|l| l.expert.glu = Glu { plus_one: true, ..Glu::clamped(0.9) }, true),
        (|l| l.expert.glu = Glu { limit_after: true, ..Glu::clamped(0.4) }, true),
    ];
    for (i, (change, losses)) in changes.into_iter().enumerate() {
        let router = RouterConfig::softmax(2);
        let mut config = LayerConfig { router, expert: mlp(Activation::Silu, true, true), ..base() };
        if losses {
            (config.aux_loss_coef, config.z_loss_coef) = (0.5, 0.25);
        }
        change(&mut config);
        Data::new(config, TOKENS, 90 + i as u64).check_gradients();
    }
}

#[test]
fn gradients_of_a_scaled_shared_expert() {
    let shared = Some(SharedConfig { scale: 0.5, ..SharedConfig::new(mlp(Activation::Relu2, true, false), true) });
    Data::new(LayerConfig { shared, ..base() }, TOKENS, 31).check_gradients();
}

#[test]
fn gradients_of_shared_experts() {
    for sigmoid_gate in [false, true] {
        let shared = Some(SharedConfig::new(mlp(Activation::Gelu, true, sigmoid_gate), sigmoid_gate));
        Data::new(LayerConfig { shared, ..base() }, TOKENS, 30).check_gradients();
    }
}

#[test]
fn gradients_with_dropped_tokens() {
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        let router = RouterConfig { scoring, renormalise: true, ..base().router };
        let config = LayerConfig { router, capacity_factor: Some(0.6), aux_loss_coef: 0.5, ..base() };
        let result = Data::new(config, TOKENS, 40).check_gradients();
        // ceil(0.6 * 2 * 6 / 4) = 2 pairs per expert.
        let dropped: u64 = result.tokens_per_expert.iter().map(|n| n.saturating_sub(2)).sum();
        assert!(dropped > 0);
        assert_eq!(result.dropped, dropped);
        assert_eq!(result.tokens_per_expert.iter().sum::<u64>(), 12);
    }
}

/// Two experts of width 1, hidden width 2, top-1, ReLU: small enough to compute by hand.
fn by_hand() -> Data {
    let router = RouterConfig { top_k: 1, ..base().router };
    let expert = MlpConfig { intermediate: 1, ..mlp(Activation::Relu, false, false) };
    let config = LayerConfig { hidden: 2, n_experts: 2, router, expert, ..base() };
    let mut data = Data::new(config, 2, 0);
    // Logits (0, ln 3) and (0, -ln 3): probabilities (1/4, 3/4) and (3/4, 1/4).
    let ln3 = 3.0_f32.ln();
    data.hidden_states = vec![ln3, 1.0, -ln3, 2.0];
    data.grad_output = vec![1.0, 0.0, 1.0, 1.0];
    data.weights.insert(WeightId::Router, vec![0.0, 0.0, 1.0, 0.0]);
    for e in 0..2 {
        data.weights.insert(WeightId::Expert(e, Proj::Up), vec![0.0, (e + 1) as f32]);
        data.weights.insert(WeightId::Expert(e, Proj::Down), vec![1.0, -1.0]);
    }
    data
}

#[test]
fn small_layer_matches_values_computed_by_hand() {
    let close = |what: &str, got: &[f64], want: &[f64]| {
        assert_eq!(got.len(), want.len(), "{what}");
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6), "{what}: {got:?}, not {want:?}");
    };
    let r = by_hand().run(None, CHOICE_TOLERANCE).unwrap();
    assert_eq!((r.chosen, r.tokens_per_expert, r.dropped), (vec![1, 0], vec![1, 1], 0));
    close("weights", &r.routing_weights, &[0.75, 0.75]);
    // Both experts' inner value is 2: expert 1 doubles 1, expert 0 takes 2.
    close("output", &r.output, &[1.5, -1.5, 1.5, -1.5]);
    // f = (1/2, 1/2), P = (1/2, 1/2).
    close("aux_loss", &[r.aux_loss], &[1.0]);
    // logsumexp is ln 4 and ln 4/3.
    close("z_loss", &[r.z_loss], &[(4.0_f64.ln().powi(2) + (4.0_f64 / 3.0).ln().powi(2)) / 2.0]);
    // Token 0: d weight = 1 * 2; d logit_1 = 2 * 3/4 * 1/4. Token 1: d weight = 1 * 2 - 1 * 2 = 0.
    let d = 0.375;
    let ln3 = 3.0_f64.ln();
    close("grad router", &r.grads[&WeightId::Router], &[-d * ln3, -d, d * ln3, d]);
    // Token 0: through the logit to x_0, through expert 1 (0.75 * 1 * 2) to x_1; token 1: 0.75 * (1 - 1) * 1.
    close("grad x", &r.grad_hidden_states.unwrap(), &[d, 1.5, 0.0, 0.0]);
    close("grad down", &r.grads[&WeightId::Expert(1, Proj::Down)], &[1.5, 0.0]);
    close("grad up", &r.grads[&WeightId::Expert(1, Proj::Up)], &[0.75 * ln3, 0.75]);
}

#[test]
fn gated_sigmoid_layer_with_biases_and_shared_expert_matches_its_formula() {
    let expert = MlpConfig { intermediate: 1, ..mlp(Activation::Silu, true, true) };
    let router = RouterConfig {
        scoring: Scoring::Sigmoid,
        renormalise: true,
        scaling: 2.5,
        correction_bias: true,
        ..base().router
    };
    let shared = Some(SharedConfig::new(expert, true));
    let mut data = Data::new(LayerConfig { hidden: 1, n_experts: 3, router, expert, shared, ..base() }, 1, 70);
    data.hidden_states = vec![0.5];
    // Expert 0 has the best score, but the bias makes it last.
    data.weights.insert(WeightId::Router, vec![2.0, 1.0, -1.0]);
    data.weights.insert(WeightId::RouterBias, vec![-5.0, 0.0, 0.0]);
    data.weights.insert(WeightId::SharedGate, vec![-3.0]);
    let x = 0.5;
    let w = |id| f64::from(data.weights[&id][0]);
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let mlp = |matrix: &dyn Fn(Proj) -> f64, bias: &dyn Fn(Proj) -> f64| {
        let gate = matrix(Proj::Gate) * x + bias(Proj::Gate);
        let up = matrix(Proj::Up) * x + bias(Proj::Up);
        matrix(Proj::Down) * (gate * sigmoid(gate) * up) + bias(Proj::Down)
    };
    let routed = |e| mlp(&|p| w(WeightId::Expert(e, p)), &|p| w(WeightId::ExpertBias(e, p)));
    let (s1, s2) = (sigmoid(0.5), sigmoid(-0.5));
    let want = 2.5 * (s1 * routed(1) + s2 * routed(2)) / (s1 + s2)
        + sigmoid(-1.5) * mlp(&|p| w(WeightId::Shared(p)), &|p| w(WeightId::SharedBias(p)));
    let r = data.run(None, CHOICE_TOLERANCE).unwrap();
    assert_eq!(r.chosen, [1, 2]);
    assert!((r.output[0] - want).abs() < 1e-14, "{} is not {want}", r.output[0]);
    // f = (0, 1, 1); P = scores over their sum.
    let aux = 3.0 * (s1 + s2) / (sigmoid(1.0) + s1 + s2);
    assert!((r.aux_loss - aux).abs() < 1e-14, "{} is not {aux}", r.aux_loss);
}

#[test]
fn pairs_with_the_smallest_token_index_are_kept() {
    let mut data = by_hand();
    data.config.capacity_factor = Some(1.0);
    // Both tokens choose expert 1, which may keep ceil(1 * 1 * 2 / 2) = 1.
    data.hidden_states[2] = 3.0_f32.ln();
    let r = data.run(None, CHOICE_TOLERANCE).unwrap();
    assert_eq!((r.chosen, r.tokens_per_expert, r.dropped), (vec![1, 1], vec![0, 2], 1));
    assert!(r.output[0] > 1.0);
    assert_eq!(r.output[2..], [0.0, 0.0]);
    assert!(r.grads[&WeightId::Expert(0, Proj::Up)] == [0.0, 0.0]);
}

#[test]
fn zero_tokens_are_allowed() {
    let mlp = mlp(Activation::Silu, true, true);
    let shared = Some(SharedConfig::new(mlp, true));
    let config = LayerConfig { shared, aux_loss_coef: 1.0, z_loss_coef: 1.0, ..base() };
    let r = Data::new(config.clone(), 0, 1).run(Some(&[]), CHOICE_TOLERANCE).unwrap();
    assert!(r.output.is_empty() && r.grad_hidden_states.unwrap().is_empty());
    assert_eq!((r.aux_loss, r.z_loss), (0.0, 0.0));
    for id in config.weights() {
        assert_eq!(r.grads[&id], vec![0.0; config.shape(id).iter().product()], "{id:?}");
    }
}

#[test]
fn layer_choice_is_used_in_its_order_and_a_wrong_one_is_an_error() {
    let data = Data::new(base(), TOKENS, 50);
    let own = data.run(None, CHOICE_TOLERANCE).unwrap();
    let swapped: Vec<u32> = own.chosen.chunks(2).flat_map(|c| [c[1], c[0]]).collect();
    let same = data.run(Some(&swapped), CHOICE_TOLERANCE).unwrap();
    assert_eq!(same.chosen, swapped);
    assert!(same.output.iter().zip(&own.output).all(|(a, b)| (a - b).abs() < 1e-14));

    let mut wrong = own.chosen.clone();
    // Token 3: one of the two experts that were not chosen.
    let left_out = (0..4).find(|e| !wrong[6..8].contains(e)).unwrap();
    wrong[6] = left_out;
    let text = data.run(Some(&wrong), CHOICE_TOLERANCE).unwrap_err().to_string();
    assert!(text.contains("token 3 goes to expert") && text.contains("expected expert"), "{text}");
    wrong[6] = 9;
    let text = data.run(Some(&wrong), CHOICE_TOLERANCE).unwrap_err().to_string();
    assert_eq!(text, "token 3 goes to expert 9, but there are 4 experts");
    let text = data.run(Some(&wrong[1..]), CHOICE_TOLERANCE).unwrap_err().to_string();
    assert_eq!(text, "the layer's choice has 11 experts, expected 6 x 2");
}

#[test]
fn choice_within_f32_rounding_is_accepted() {
    // Experts 0 and 1 differ by one part in 10^6 of the logit.
    let mut data = by_hand();
    data.weights.insert(WeightId::Router, vec![1.0, 1.0, 1.000_001, 1.0]);
    data.hidden_states = vec![1.0, 1.0, 1.0, -1.0];
    data.run(Some(&[0, 1]), CHOICE_TOLERANCE).unwrap();
    data.run(Some(&[0, 1]), 1e-8).unwrap_err();
}

#[test]
fn invalid_inputs_are_errors() {
    let error = |data: &Data| data.run(None, CHOICE_TOLERANCE).unwrap_err().to_string();
    let mut data = Data::new(base(), TOKENS, 60);
    data.weights.insert(WeightId::Router, vec![0.0; 3]);
    assert_eq!(error(&data), "weight Router has 3 numbers, expected 20 for shape [4, 5]");
    data = Data::new(base(), TOKENS, 60);
    data.hidden_states[HIDDEN + 1] = f32::NAN;
    assert_eq!(error(&data), "router logit of token 1, expert 0 is not finite");
    data = Data::new(base(), TOKENS, 60);
    data.grad_output.pop();
    assert_eq!(error(&data), "grad_output has 29 numbers, expected 6 x 5");
    data = Data::new(base(), TOKENS, 60);
    data.config.router.top_k = 5;
    assert!(error(&data).starts_with("top-k is 5"));
}
