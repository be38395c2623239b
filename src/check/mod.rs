//! The reference: the MoE layer, forward and backward, in f64 and in plain loops.
//!
//! The reference shares no code with the layer, only the configuration types that specify it. Without dispatch, packing or PEs, it applies the MLP of one
//! expert after the other to the rows of the tokens that chose it, and adds the results to the output. The gradients are tested against finite
//! differences.
//!
//! The backward pass computes the gradients of
//! `sum(grad_output * output) + aux_loss_coef * aux_loss + z_loss_coef * z_loss`.
//! The choice of experts and the token counts of the auxiliary loss are constants; scores, renormalisation and scaling are differentiated.

mod bound;
mod compare;
mod error;
mod matrix;
mod mlp;
mod routing;
mod special;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use bound::Bounds;
pub use compare::{
    Axis, Comparison, Deviation, TOLERANCE_BF16, TOLERANCE_F16, TOLERANCE_F32, WorstSlice, compare, compare_slices,
    judge,
};

use half::{bf16, f16};

pub use error::CheckError;

use crate::moe::{Dtype, LayerConfig, MlpConfig, MlpId, WeightId};
use bound::{Bounded, Rounding, SUM, coherence, repetition};
use matrix::{Matrix, axpy, dot};
pub use mlp::{Gradient, WeightLoader};
use mlp::{Gradients, Mlp};
use routing::Routing;

/// Maximum error of a layer's f32 logits relative to the sum of their terms' magnitudes: about a hundred f32 roundings.
pub const CHOICE_TOLERANCE: f64 = 1e-5;

/// The input of the reference: one pass through the layer.
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
    pub weights: &'a WeightLoader<'a>,
    /// The layer's choice of experts, `[tokens, top_k]`, in any order within a token. The choice is verified and then used, because f32 rounding may
    /// decide a near tie either way. Without it the reference chooses.
    pub chosen: Option<&'a [u32]>,
    /// Maximum error of the layer's router logits in the verification of `chosen`, relative to the sum of their terms' magnitudes; usually
    /// [`CHOICE_TOLERANCE`].
    pub choice_tolerance: f64,
    /// The run's element type, for the bounds.
    pub dtype: Dtype,
    /// The rounding of rows between PEs; `None` if they have the run's element type.
    pub wire: Option<Wire<'a>>,
}

/// The rounding of rows between PEs, to a coarser type than the run's: an expert on another PE computes with rounded rows of `hidden_states` and
/// `grad_output`, and its result is rounded.
#[derive(Clone, Copy, Debug)]
pub struct Wire<'a> {
    /// Element type of rows between PEs.
    pub dtype: Dtype,
    /// Whether the pair's expert is on another PE than its token, `[tokens, top_k]` in the order of `chosen`.
    pub sent: &'a [bool],
    /// How often a result is rounded at most: by its PE, and by a relay that adds results of other PEs.
    pub roundings: u32,
}

impl Wire<'_> {
    /// Rounds a row as the sender does.
    fn round(&self, row: &mut [f64]) {
        let round = |v: f64| match self.dtype {
            Dtype::F32 => v,
            Dtype::Bf16 => bf16::from_f32(v as f32).to_f64(),
            Dtype::F16 => f16::from_f32(v as f32).to_f64(),
        };
        row.iter_mut().for_each(|v| *v = round(*v));
    }

    /// The largest error of a result of this norm in transit.
    fn error(&self, norm: f64, len: usize) -> f64 {
        let rounding = Rounding::of(self.dtype);
        let once = rounding.unit * norm + rounding.floor * (len as f64).sqrt();
        // A second rounding acts on the result of the first.
        f64::from(self.roundings) * once * (1.0 + rounding.unit)
    }
}

/// The results of the reference.
#[derive(Clone, Debug)]
pub struct Reference {
    /// `[tokens, hidden]`.
    pub output: Vec<f64>,
    /// Error bounds of each token's output.
    pub output_bounds: Bounds,
    /// `[tokens, hidden]`, with a `grad_output`.
    pub grad_hidden_states: Option<Vec<f64>>,
    /// Error bounds of each token's gradient.
    pub grad_hidden_states_bounds: Bounds,
    /// The gradient of every weight that has one, in its shape; empty without a `grad_output`, and
    /// if [`reference_with`] passed them to its callback.
    pub grads: BTreeMap<WeightId, Vec<f64>>,
    /// Error bounds of the gradients.
    pub grad_bounds: BTreeMap<WeightId, Bounds>,
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
/// An invalid configuration, an input or a weight that has the wrong length or cannot be loaded, a router logit that is not finite, or a wrong choice of
/// experts (with the token, the expert, and the scores).
pub fn reference(problem: &Problem) -> Result<Reference, CheckError> {
    let (mut grads, mut grad_bounds) = (BTreeMap::new(), BTreeMap::new());
    let result = reference_with(problem, &mut |id, grad| -> Result<(), CheckError> {
        grads.insert(id, grad.values);
        grad_bounds.insert(id, grad.bounds);
        Ok(())
    })?;
    Ok(Reference { grads, grad_bounds, ..result })
}

/// Computes the layer as [`reference()`] does, but passes each weight's gradient to `on_grad` as soon as it is complete, so that only one expert's
/// gradients are in memory at a time.
///
/// # Errors
/// As [`reference()`], and those of `on_grad`.
pub fn reference_with<E: From<CheckError>>(
    problem: &Problem,
    on_grad: &mut dyn FnMut(WeightId, Gradient) -> Result<(), E>,
) -> Result<Reference, E> {
    let &Problem { config, tokens, weights, .. } = problem;
    let hidden = config.hidden;
    config.validate().map_err(CheckError::from)?;
    let rows = |name: &str, data: &[f32]| {
        let len = data.len();
        if len != tokens * hidden {
            return Err(CheckError::Input(format!("{name} has {len} numbers, expected {tokens} x {hidden}")));
        }
        Ok(Matrix::from_f32(tokens, hidden, data))
    };
    let x = rows("hidden_states", problem.hidden_states)?;
    let grad_output = problem.grad_output.map(|g| rows("grad_output", g)).transpose()?;
    let k = config.router.top_k;
    if let Some(len) = problem.wire.map(|wire| wire.sent.len()).filter(|&len| len != tokens * k) {
        return Err(CheckError::Input(format!("the wire has {len} pairs, expected {tokens} x {k}")).into());
    }
    if let Some(len) = problem.chosen.map(<[u32]>::len)
        && len != tokens * k
    {
        let text = format!("the layer's choice has {len} experts, expected {tokens} x {k}");
        return Err(CheckError::Choice(text).into());
    }

    let router = Matrix::from_f32(config.choices(), hidden, &mlp::load(config, weights, WeightId::Router)?.1);
    let bias =
        if config.router.correction_bias { Some(mlp::load(config, weights, WeightId::RouterBias)?.1) } else { None };
    let logit_bias =
        if config.router.logit_bias { Some(mlp::load(config, weights, WeightId::LogitBias)?.1) } else { None };
    let biases = [logit_bias.as_deref(), bias.as_deref()];
    let routing = Routing::new(config, &x, &router, biases[0], biases[1], problem.chosen, problem.choice_tolerance)?;

    let mut layer = Layer {
        problem,
        rounding: Rounding::of(problem.dtype),
        x,
        output: Matrix::zeros(tokens, hidden),
        output_bounds: vec![0.0; tokens],
        backward: grad_output.map(|dy| Backward {
            dy,
            dx: Matrix::zeros(tokens, hidden),
            dx_bounds: vec![0.0; tokens],
            d_weights: vec![Bounded::ZERO; tokens * k],
            on_grad,
        }),
    };
    for e in 0..config.n_experts {
        layer.expert(e, &routing)?;
    }
    layer.identities(&routing);
    if let Some(shared) = config.shared {
        layer.shared(shared.mlp, shared.sigmoid_gate, f64::from(shared.scale))?;
    }
    if let Some(b) = &mut layer.backward {
        let (d_logits, errors) = routing.backward(&b.d_weights);
        b.dx.add(&d_logits.times_transpose(&router.transposed()));
        let row_norms = router.row_norms(None);
        let (kappa, router_norm) = (coherence(&router, &row_norms), bound::norm(&row_norms));
        let moved = errors.row_norms(Some(&row_norms)).into_iter().zip(d_logits.row_norms(None));
        for (bound, (moved, d_norm)) in b.dx_bounds.iter_mut().zip(moved) {
            *bound += kappa * moved + SUM * d_norm * router_norm;
        }
        let bounds = Bounds::of_outer_products(&d_logits, &errors, &layer.x, repetition(&layer.x));
        let values = d_logits.transposed().times_transpose(&layer.x.transposed()).data;
        (b.on_grad)(WeightId::Router, Gradient { values, bounds })?;
        if config.router.logit_bias {
            let mut rows = vec![0.0; d_logits.cols];
            for t in 0..d_logits.rows {
                let of_token = d_logits.row(t).iter().zip(errors.row(t));
                rows.iter_mut().zip(of_token).for_each(|(row, (d, error))| *row += error + SUM * d.abs());
            }
            let bounds = Bounds { rows, columns: Vec::new() };
            (b.on_grad)(WeightId::LogitBias, Gradient { values: d_logits.column_sums(), bounds })?;
        }
    }

    let by_row = |rows: Vec<f64>| Bounds { rows, columns: Vec::new() };
    let (dx, dx_bounds) = layer.backward.map(|b| (b.dx.data, b.dx_bounds)).unzip();
    Ok(Reference {
        output: layer.output.data,
        output_bounds: by_row(layer.output_bounds),
        grad_hidden_states: dx,
        grad_hidden_states_bounds: by_row(dx_bounds.unwrap_or_default()),
        grads: BTreeMap::new(),
        grad_bounds: BTreeMap::new(),
        aux_loss: routing.aux_loss(),
        z_loss: routing.z_loss(),
        dropped: routing.kept.iter().filter(|kept| !**kept).count() as u64,
        chosen: routing.chosen.iter().map(|&e| e as u32).collect(),
        routing_weights: routing.weights.iter().map(|w| w.value).collect(),
        tokens_per_expert: routing.tokens_per_expert[..config.n_experts].to_vec(),
    })
}

/// The state of the forward pass.
struct Layer<'a, E> {
    problem: &'a Problem<'a>,
    rounding: Rounding,
    x: Matrix,
    output: Matrix,
    /// Error bounds of the output's rows.
    output_bounds: Vec<f64>,
    backward: Option<Backward<'a, E>>,
}

/// The rows of the pairs' tokens as their experts receive them.
fn received(from: &Matrix, pairs: &[usize], k: usize, wire: Option<Wire<'_>>) -> Matrix {
    let mut rows = Matrix::zeros(pairs.len(), from.cols);
    for (r, &p) in pairs.iter().enumerate() {
        rows.row_mut(r).copy_from_slice(from.row(p / k));
        if let Some(wire) = wire.filter(|wire| wire.sent[p]) {
            wire.round(rows.row_mut(r));
        }
    }
    rows
}

/// The largest error of a pair's result, `factor * row`, in transit. A PE rounds the sum of its experts' results; the norm of a sum is at most the sum of the norms.
fn in_transit(wire: Option<Wire<'_>>, pair: usize, factor: f64, row: &[f64], row_bound: f64) -> f64 {
    let wire = wire.filter(|wire| wire.sent[pair]);
    wire.map_or(0.0, |wire| wire.error(factor.abs() * (bound::norm(row) + row_bound), row.len()))
}

/// The state of the backward pass.
struct Backward<'a, E> {
    /// The output's gradient.
    dy: Matrix,
    /// The input's gradient.
    dx: Matrix,
    /// Error bounds of the rows of `dx`.
    dx_bounds: Vec<f64>,
    /// The routing weights' gradient, `[tokens, top_k]`.
    d_weights: Vec<Bounded>,
    on_grad: &'a mut dyn FnMut(WeightId, Gradient) -> Result<(), E>,
}

impl<E: From<CheckError>> Layer<'_, E> {
    /// Adds one routed expert's share: `output_t += weight_te * expert(x_t)` for the tokens that keep it.
    fn expert(&mut self, expert: usize, routing: &Routing) -> Result<(), E> {
        let config = self.problem.config;
        let k = config.router.top_k;
        let pairs: Vec<usize> =
            (0..routing.chosen.len()).filter(|&p| routing.chosen[p] == expert && routing.kept[p]).collect();
        if pairs.is_empty() {
            if let Some(b) = &mut self.backward {
                for id in config.expert_weights(expert) {
                    let shape = config.shape(id);
                    let values = vec![0.0; shape.iter().product()];
                    (b.on_grad)(id, Gradient { values, bounds: Bounds::exact(&shape) })?;
                }
            }
            return Ok(());
        }
        let id = MlpId::Routed(expert);
        let mlp = Mlp::load(config, config.expert, self.rounding, id, self.problem.weights)?;
        let wire = self.problem.wire;
        let rows_of = |from: &Matrix| received(from, &pairs, k, wire);
        let tokens = rows_of(&self.x);
        let weights: Vec<Bounded> = pairs.iter().map(|&p| routing.weights[p]).collect();
        if config.router.weigh_input {
            return self.weighed_input(&mlp, &pairs, &tokens, &weights);
        }
        let (rows, factors) = (tokens, weights);
        let trace = mlp.forward(&rows, 0.0);
        for (r, &p) in pairs.iter().enumerate() {
            self.add_output(p / k, factors[r], trace.output.row(r), trace.output_bounds[r]);
            self.output_bounds[p / k] +=
                in_transit(wire, p, factors[r].value, trace.output.row(r), trace.output_bounds[r]);
        }
        let Some(b) = &mut self.backward else { return Ok(()) };
        let mut grads = Gradients::new();
        let d = mlp.backward(&rows, &trace, &rows_of(&b.dy), &factors, &mut grads);
        for (r, &p) in pairs.iter().enumerate() {
            b.d_weights[p] = d.factors[r];
            b.add_dx(p / k, d.x.row(r), d.x_bounds[r], self.rounding);
            b.dx_bounds[p / k] += in_transit(wire, p, 1.0, d.x.row(r), d.x_bounds[r]);
        }
        grads.into_iter().try_for_each(|(id, grad)| (b.on_grad)(id, grad))
    }

    /// [`Layer::expert`] where weights are on inputs: `output_t += expert(weight_te * x_t)`.
    fn weighed_input(&mut self, mlp: &Mlp, pairs: &[usize], tokens: &Matrix, weights: &[Bounded]) -> Result<(), E> {
        let k = self.problem.config.router.top_k;
        let mut rows = tokens.clone();
        // The weights' errors, and the rounding of the product, relative to the rows.
        let mut error: f64 = self.rounding.unit + SUM;
        for (r, weight) in weights.iter().enumerate() {
            rows.row_mut(r).iter_mut().for_each(|x| *x *= weight.value);
            if weight.value > 0.0 {
                error = error.max(self.rounding.unit + SUM + weight.bound / weight.value);
            }
        }
        let ones = vec![Bounded::ONE; pairs.len()];
        let trace = mlp.forward(&rows, error);
        let wire = self.problem.wire;
        for (r, &p) in pairs.iter().enumerate() {
            self.add_output(p / k, Bounded::ONE, trace.output.row(r), trace.output_bounds[r]);
            self.output_bounds[p / k] += in_transit(wire, p, 1.0, trace.output.row(r), trace.output_bounds[r]);
        }
        let Some(b) = &mut self.backward else { return Ok(()) };
        let dy = received(&b.dy, pairs, k, wire);
        let mut grads = Gradients::new();
        let d = mlp.backward(&rows, &trace, &dy, &ones, &mut grads);
        for (r, &p) in pairs.iter().enumerate() {
            let (x, dx, weight) = (tokens.row(r), d.x.row(r), weights[r]);
            let norm = bound::norm(x);
            b.d_weights[p] =
                Bounded { value: dot(x, dx), bound: norm * (d.x_bounds[r] + (error + SUM) * bound::norm(dx)) };
            let weighed: Vec<f64> = dx.iter().map(|d| d * weight.value).collect();
            let bound = weight.value.abs() * d.x_bounds[r] + weight.bound * (bound::norm(dx) + d.x_bounds[r]);
            b.add_dx(p / k, &weighed, bound, self.rounding);
            b.dx_bounds[p / k] += in_transit(wire, p, 1.0, &weighed, bound);
        }
        grads.into_iter().try_for_each(|(id, grad)| (b.on_grad)(id, grad))
    }

    /// Adds the identity experts' share: `output_t += weight_te * x_t`.
    fn identities(&mut self, routing: &Routing) {
        let config = self.problem.config;
        let k = config.router.top_k;
        for p in (0..routing.chosen.len()).filter(|&p| routing.chosen[p] >= config.n_experts) {
            let (t, weight) = (p / k, routing.weights[p]);
            let x = self.x.row(t).to_vec();
            self.add_output(t, weight, &x, 0.0);
            let Some(b) = &mut self.backward else { continue };
            let dy = b.dy.row(t).to_vec();
            let bound = SUM * bound::norm(&x) * bound::norm(&dy);
            b.d_weights[p] = Bounded { value: dot(&dy, &x), bound };
            let row: Vec<f64> = dy.iter().map(|d| d * weight.value).collect();
            b.add_dx(t, &row, (weight.bound + SUM * weight.value.abs()) * bound::norm(&dy), self.rounding);
        }
    }

    /// Adds the shared expert's share: `output_t += scale * shared(x_t)`, times `sigmoid(x_t w^T)` if gated.
    fn shared(&mut self, config: MlpConfig, sigmoid_gate: bool, scale: f64) -> Result<(), E> {
        let layer = self.problem.config;
        let tokens = self.x.rows;
        let mlp = Mlp::load(layer, config, self.rounding, MlpId::Shared, self.problem.weights)?;
        let trace = mlp.forward(&self.x, 0.0);
        let gate = if sigmoid_gate {
            let (_, w) = mlp::load(layer, self.problem.weights, WeightId::SharedGate)?;
            Some(Matrix::from_f32(1, layer.hidden, &w))
        } else {
            None
        };
        let gate_norm = gate.as_ref().map_or(0.0, |w| bound::norm(w.row(0)));
        let x_norms = self.x.row_norms(None);
        let factor = |t: usize| {
            let Some(w) = &gate else { return Bounded::ONE };
            let s = special::sigmoid(dot(self.x.row(t), w.row(0)));
            Bounded { value: s, bound: routing::score_bound(s, SUM * x_norms[t] * gate_norm) }
        };
        let gates: Vec<Bounded> = (0..tokens).map(factor).collect();
        let scaled = |g: &Bounded| Bounded { value: scale * g.value, bound: scale.abs() * g.bound };
        let factors: Vec<Bounded> = gates.iter().map(scaled).collect();
        for (t, &factor) in factors.iter().enumerate() {
            self.add_output(t, factor, trace.output.row(t), trace.output_bounds[t]);
        }
        let Some(b) = &mut self.backward else { return Ok(()) };
        let mut grads = Gradients::new();
        let d = mlp.backward(&self.x, &trace, &b.dy, &factors, &mut grads);
        for t in 0..tokens {
            b.add_dx(t, d.x.row(t), d.x_bounds[t], self.rounding);
        }
        if let Some(w) = gate {
            let (mut d_logits, mut errors) = (Matrix::zeros(tokens, 1), Matrix::zeros(tokens, 1));
            for (t, (s, d)) in gates.iter().zip(d.factors.iter().map(scaled)).enumerate() {
                let slope = s.value * (1.0 - s.value);
                let d_logit = d.value * slope;
                let error = d.bound * (slope + s.bound) + d.value.abs() * (s.bound + SUM * s.value);
                axpy(d_logit, w.row(0), b.dx.row_mut(t));
                b.dx_bounds[t] += (error + SUM * d_logit.abs()) * gate_norm;
                (d_logits.data[t], errors.data[t]) = (d_logit, error);
            }
            let values = d_logits.transposed().times_transpose(&self.x.transposed()).data;
            let rows = Bounds::of_outer_products(&d_logits, &errors, &self.x, repetition(&self.x)).rows;
            grads.insert(WeightId::SharedGate, Gradient { values, bounds: Bounds { rows, columns: Vec::new() } });
        }
        grads.into_iter().try_for_each(|(id, grad)| (b.on_grad)(id, grad))
    }

    /// `output[t] += factor * row`. A PE's partial sum may be rounded once in transit; the bound covers a rounding of each part.
    fn add_output(&mut self, t: usize, factor: Bounded, row: &[f64], row_bound: f64) {
        axpy(factor.value, row, self.output.row_mut(t));
        let norm = bound::norm(row);
        let floor = self.rounding.floor * (row.len() as f64).sqrt();
        self.output_bounds[t] +=
            factor.value.abs() * (row_bound + self.rounding.stored(norm)) + factor.bound * (norm + row_bound) + floor;
    }
}

impl<E> Backward<'_, E> {
    /// `dx[t] += row`, as in [`Layer::add_output`].
    fn add_dx(&mut self, t: usize, row: &[f64], row_bound: f64, rounding: Rounding) {
        axpy(1.0, row, self.dx.row_mut(t));
        let floor = rounding.floor * (row.len() as f64).sqrt();
        self.dx_bounds[t] += row_bound + rounding.stored(bound::norm(row)) + floor;
    }
}
