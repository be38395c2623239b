//! The reference: the MoE layer, forward and backward, in f64 and in plain loops.
//!
//! It shares no code with the layer, only the configuration types that specify it. There is no
//! dispatch, no packing and no split over PEs: expert by expert, the rows of the tokens that chose
//! it go through its MLP and are added to the output. Its own gradients are tested against finite
//! differences.
//!
//! The backward pass gives the gradients of
//! `sum(grad_output * output) + aux_loss_coef * aux_loss + z_loss_coef * z_loss`.
//! The choice of experts and the auxiliary loss's token counts are constants there; scores,
//! renormalisation and scaling are differentiated.

mod compare;
mod matrix;
mod mlp;
mod routing;
mod special;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

pub use compare::{Deviation, TOLERANCE_BF16, TOLERANCE_F16, TOLERANCE_F32, compare};

use crate::moe::{LayerConfig, MlpConfig, WeightId};
use matrix::{Matrix, axpy, dot};
use mlp::{Gradients, Mlp, Which};
use routing::Routing;

/// What a layer's f32 logits may be off by, relative to the sum of their terms' magnitudes:
/// some hundred f32 roundings.
pub const CHOICE_TOLERANCE: f64 = 1e-5;

/// One pass through the layer, to be computed by the reference.
pub struct Problem<'a> {
    /// The layer.
    pub config: &'a LayerConfig,
    /// Number of tokens, over all PEs.
    pub tokens: usize,
    /// The input, `[tokens, hidden]`, already rounded to the run's dtype.
    pub hidden_states: &'a [f32],
    /// The output's gradient, `[tokens, hidden]`, already rounded; without it there is no backward pass.
    pub grad_output: Option<&'a [f32]>,
    /// The weights, already rounded to the run's dtype; the router's as the layer uses them.
    pub weights: &'a dyn Fn(WeightId) -> Result<Vec<f32>>,
    /// The layer's choice of experts, `[tokens, top_k]`, in any order within a token. It is verified,
    /// and then used, since a near tie may fall either way in f32. Without it the reference chooses.
    pub chosen: Option<&'a [u32]>,
    /// How far the layer's router logits may be off, relative to the sum of their terms' magnitudes,
    /// when `chosen` is verified; usually [`CHOICE_TOLERANCE`].
    pub choice_tolerance: f64,
}

/// What the layer should have computed.
#[derive(Clone, Debug)]
pub struct Reference {
    /// `[tokens, hidden]`.
    pub output: Vec<f64>,
    /// `[tokens, hidden]`, where there was a `grad_output`.
    pub grad_hidden_states: Option<Vec<f64>>,
    /// The gradient of every weight that has one, in its shape; empty without a `grad_output`, and
    /// where [`reference_with`] handed them out.
    pub grads: BTreeMap<WeightId, Vec<f64>>,
    /// The load-balancing loss, before its coefficient:
    /// `n_experts * sum_e (pairs of e / tokens) * (mean probability of e)`. 0 without tokens.
    pub aux_loss: f64,
    /// The router z-loss, before its coefficient: the mean of `logsumexp(logits)^2`. 0 without tokens.
    pub z_loss: f64,
    /// Pairs of a token and one of its experts, per expert, before any drop: `[n_experts]`.
    pub tokens_per_expert: Vec<u64>,
    /// Pairs dropped because their expert was over its capacity.
    pub dropped: u64,
    /// The chosen experts, `[tokens, top_k]`: as given, or the reference's own, best first.
    pub chosen: Vec<u32>,
    /// The weights of the chosen experts, `[tokens, top_k]`, those of dropped pairs included.
    pub routing_weights: Vec<f64>,
}

/// Computes the layer.
///
/// # Errors
/// One line where the configuration does not hold together, an input or a weight has the wrong
/// length or cannot be loaded, a router logit is not finite, or the layer's choice of experts is
/// wrong (with the token, the expert, and the scores).
pub fn reference(problem: &Problem) -> Result<Reference> {
    let mut grads = BTreeMap::new();
    let mut result = reference_with(problem, &mut |id, grad| {
        grads.insert(id, grad);
        Ok(())
    })?;
    result.grads = grads;
    Ok(result)
}

/// Computes the layer as [`reference()`] does, but hands each weight's gradient to `on_grad` as soon
/// as it is known, so that only one expert's gradients are in memory at a time.
///
/// # Errors
/// As [`reference()`], and those of `on_grad`.
pub fn reference_with(
    problem: &Problem,
    on_grad: &mut dyn FnMut(WeightId, Vec<f64>) -> Result<()>,
) -> Result<Reference> {
    let &Problem { config, tokens, weights, .. } = problem;
    let hidden = config.hidden;
    config.validate()?;
    let rows = |name: &str, data: &[f32]| -> Result<Matrix> {
        ensure!(data.len() == tokens * hidden, "{name} has {} numbers, expected {tokens} x {hidden}", data.len());
        Ok(Matrix::from_f32(tokens, hidden, data))
    };
    let x = rows("hidden_states", problem.hidden_states)?;
    let grad_output = problem.grad_output.map(|g| rows("grad_output", g)).transpose()?;
    let k = config.router.top_k;
    if let Some(chosen) = problem.chosen {
        ensure!(chosen.len() == tokens * k, "the layer's choice has {} experts, expected {tokens} x {k}", chosen.len());
    }

    let router = Matrix::from_f32(config.n_experts, hidden, &mlp::load(config, weights, WeightId::Router)?.1);
    let bias =
        if config.router.correction_bias { Some(mlp::load(config, weights, WeightId::RouterBias)?.1) } else { None };
    let routing = Routing::new(config, &x, &router, bias.as_deref(), problem.chosen, problem.choice_tolerance)?;

    let mut layer = Layer {
        problem,
        x,
        output: Matrix::zeros(tokens, hidden),
        backward: grad_output.map(|dy| Backward {
            dy,
            dx: Matrix::zeros(tokens, hidden),
            d_weights: vec![0.0; tokens * k],
            on_grad,
        }),
    };
    for e in 0..config.n_experts {
        layer.expert(e, &routing)?;
    }
    if let Some(shared) = config.shared {
        layer.shared(shared.mlp, shared.sigmoid_gate)?;
    }
    if let Some(b) = &mut layer.backward {
        let d_logits = routing.backward(&b.d_weights);
        b.dx.add(&d_logits.times_transpose(&router.transposed()));
        (b.on_grad)(WeightId::Router, d_logits.transposed().times_transpose(&layer.x.transposed()).data)?;
    }

    Ok(Reference {
        output: layer.output.data,
        grad_hidden_states: layer.backward.map(|b| b.dx.data),
        grads: BTreeMap::new(),
        aux_loss: routing.aux_loss(),
        z_loss: routing.z_loss(),
        dropped: routing.kept.iter().filter(|kept| !**kept).count() as u64,
        chosen: routing.chosen.iter().map(|&e| e as u32).collect(),
        tokens_per_expert: routing.tokens_per_expert,
        routing_weights: routing.weights,
    })
}

/// The pass under way.
struct Layer<'a> {
    problem: &'a Problem<'a>,
    x: Matrix,
    output: Matrix,
    backward: Option<Backward<'a>>,
}

/// The backward pass under way.
struct Backward<'a> {
    /// The output's gradient.
    dy: Matrix,
    /// The input's gradient so far.
    dx: Matrix,
    /// The routing weights' gradient, `[tokens, top_k]`.
    d_weights: Vec<f64>,
    on_grad: &'a mut dyn FnMut(WeightId, Vec<f64>) -> Result<()>,
}

impl Layer<'_> {
    /// Adds one routed expert's share: `output_t += weight_te * expert(x_t)` for the tokens that keep it.
    fn expert(&mut self, expert: usize, routing: &Routing) -> Result<()> {
        let config = self.problem.config;
        let k = config.router.top_k;
        let pairs: Vec<usize> =
            (0..routing.chosen.len()).filter(|&p| routing.chosen[p] == expert && routing.kept[p]).collect();
        if pairs.is_empty() {
            if let Some(b) = &mut self.backward {
                for id in config.expert_weights(expert) {
                    (b.on_grad)(id, vec![0.0; config.shape(id).iter().product()])?;
                }
            }
            return Ok(());
        }
        let mlp = Mlp::load(config, config.expert, Which::Expert(expert), self.problem.weights)?;
        let mut rows = Matrix::zeros(pairs.len(), config.hidden);
        for (r, &p) in pairs.iter().enumerate() {
            rows.row_mut(r).copy_from_slice(self.x.row(p / k));
        }
        let trace = mlp.forward(&rows);
        for (r, &p) in pairs.iter().enumerate() {
            axpy(routing.weights[p], trace.output.row(r), self.output.row_mut(p / k));
        }
        let Some(b) = &mut self.backward else { return Ok(()) };
        let mut d_rows = Matrix::zeros(pairs.len(), config.hidden);
        for (r, &p) in pairs.iter().enumerate() {
            b.d_weights[p] = dot(b.dy.row(p / k), trace.output.row(r));
            axpy(routing.weights[p], b.dy.row(p / k), d_rows.row_mut(r));
        }
        let mut grads = Gradients::new();
        let dx = mlp.backward(&rows, &trace, &d_rows, &mut grads);
        for (r, &p) in pairs.iter().enumerate() {
            axpy(1.0, dx.row(r), b.dx.row_mut(p / k));
        }
        grads.into_iter().try_for_each(|(id, grad)| (b.on_grad)(id, grad))
    }

    /// Adds the shared expert's share: `output_t += shared(x_t)`, times `sigmoid(x_t w^T)` if gated.
    fn shared(&mut self, config: MlpConfig, sigmoid_gate: bool) -> Result<()> {
        let layer = self.problem.config;
        let tokens = self.x.rows;
        let mlp = Mlp::load(layer, config, Which::Shared, self.problem.weights)?;
        let trace = mlp.forward(&self.x);
        let gate = if sigmoid_gate {
            let (_, w) = mlp::load(layer, self.problem.weights, WeightId::SharedGate)?;
            Some(Matrix::from_f32(1, layer.hidden, &w))
        } else {
            None
        };
        let factor = |t: usize| gate.as_ref().map_or(1.0, |w| special::sigmoid(dot(self.x.row(t), w.row(0))));
        let factors: Vec<f64> = (0..tokens).map(factor).collect();
        for (t, &s) in factors.iter().enumerate() {
            axpy(s, trace.output.row(t), self.output.row_mut(t));
        }
        let Some(b) = &mut self.backward else { return Ok(()) };
        let mut grads = Gradients::new();
        let mut d_rows = Matrix::zeros(tokens, layer.hidden);
        for (t, &s) in factors.iter().enumerate() {
            axpy(s, b.dy.row(t), d_rows.row_mut(t));
        }
        b.dx.add(&mlp.backward(&self.x, &trace, &d_rows, &mut grads));
        if let Some(w) = gate {
            let mut dw = vec![0.0; layer.hidden];
            for (t, &s) in factors.iter().enumerate() {
                let d_logit = dot(b.dy.row(t), trace.output.row(t)) * s * (1.0 - s);
                axpy(d_logit, self.x.row(t), &mut dw);
                axpy(d_logit, w.row(0), b.dx.row_mut(t));
            }
            grads.insert(WeightId::SharedGate, dw);
        }
        grads.into_iter().try_for_each(|(id, grad)| (b.on_grad)(id, grad))
    }
}
