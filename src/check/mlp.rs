//! An expert's MLP on a matrix of token rows, forward and backward, with bounds on rounding errors (see `bound`).

use std::collections::BTreeMap;

use super::CheckError;
use super::bound::{Bounded, Bounds, F32_FLOOR, Rounding, SUM, coherence, column_coherence, norm, repetition, scalar};
use super::matrix::{Matrix, axpy, dot, for_row_blocks};
use super::special::{activate, glu_factors, steepest};
use crate::moe::{Glu, LayerConfig, MlpConfig, MlpId, Proj, WeightError, WeightId};

/// Elementwise work in the units of [`for_row_blocks`]: an erf costs about as much as this many multiply-adds.
const ACTIVATION_WORK: usize = 64;

/// The source of the reference's weights.
pub type WeightLoader<'a> = dyn Fn(WeightId) -> Result<Vec<f32>, WeightError> + 'a;

/// Loads one weight of the layer and checks its length.
pub fn load(config: &LayerConfig, weights: &WeightLoader, id: WeightId) -> Result<(Vec<usize>, Vec<f32>), CheckError> {
    let shape = config.shape(id);
    let data = weights(id)?;
    let expected: usize = shape.iter().product();
    if data.len() != expected {
        let len = data.len();
        return Err(CheckError::Input(format!(
            "weight {id:?} has {len} numbers, expected {expected} for shape {shape:?}"
        )));
    }
    Ok((shape, data))
}

/// `y = x W^T + b`.
struct Linear {
    weight: Matrix,
    bias: Option<Vec<f64>>,
    /// Norms of the weight's rows, of its columns, and of all of it.
    row_norms: Vec<f64>,
    column_norms: Vec<f64>,
    norm: f64,
}

impl Linear {
    fn new(weight: Matrix, bias: Option<Vec<f64>>) -> Self {
        let (row_norms, column_norms) = (weight.row_norms(None), weight.column_norms(None));
        Linear { norm: norm(&row_norms), row_norms, column_norms, weight, bias }
    }

    fn forward(&self, x: &Matrix) -> Matrix {
        let mut y = x.times_transpose(&self.weight);
        if let Some(bias) = &self.bias {
            for r in 0..y.rows {
                axpy(1.0, bias, y.row_mut(r));
            }
        }
        y
    }

    /// Error of the f32 sum in element `i` of the result, for an exact input with norm `x_norm`.
    fn sum_bound(&self, x_norm: f64, i: usize) -> f64 {
        SUM * (x_norm * self.row_norms[i] + self.bias.as_ref().map_or(0.0, |b| b[i].abs()))
    }

    fn bias_norm(&self) -> f64 {
        self.bias.as_deref().map_or(0.0, norm)
    }
}

/// A weight's gradient.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// In the weight's shape.
    pub values: Vec<f64>,
    /// Error bounds of its rows and columns.
    pub bounds: Bounds,
}

/// Gradients by weight.
pub type Gradients = BTreeMap<WeightId, Gradient>;

/// An MLP with its weights.
pub struct Mlp {
    config: MlpConfig,
    rounding: Rounding,
    id: MlpId,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

/// The values of the forward pass that the backward pass needs.
pub struct Trace {
    /// Norms of the input's rows, increased by their errors.
    x_norms: Vec<f64>,
    /// Errors of the input's rows, relative to their norms.
    input_error: f64,
    /// `gate(x)`, gated MLPs only.
    gate: Option<Matrix>,
    /// `up(x)`.
    up: Matrix,
    /// The input of `down`.
    inner: Matrix,
    /// The MLP's output.
    pub output: Matrix,
    /// Bounds on the errors of the output's rows.
    pub output_bounds: Vec<f64>,
}

/// The results of the backward pass, except the gradients of weights.
pub struct InputGradient {
    /// The gradient of the input.
    pub x: Matrix,
    /// Error bounds of the gradient's rows.
    pub x_bounds: Vec<f64>,
    /// The gradient of each row's factor.
    pub factors: Vec<Bounded>,
}

impl Mlp {
    pub fn load(
        layer: &LayerConfig,
        config: MlpConfig,
        rounding: Rounding,
        id: MlpId,
        weights: &WeightLoader,
    ) -> Result<Self, CheckError> {
        let linear = |proj| -> Result<Linear, CheckError> {
            let (weight_id, bias_id) = id.ids(proj);
            let (shape, data) = load(layer, weights, weight_id)?;
            let weight = Matrix::from_f32(shape[0], shape[1], &data);
            let bias = if config.bias {
                Some(load(layer, weights, bias_id)?.1.into_iter().map(f64::from).collect())
            } else {
                None
            };
            Ok(Linear::new(weight, bias))
        };
        let gate = if config.gated { Some(linear(Proj::Gate)?) } else { None };
        Ok(Mlp { config, rounding, id, gate, up: linear(Proj::Up)?, down: linear(Proj::Down)? })
    }

    /// Applies the MLP to the rows of `x`, which have errors of up to `input_error` relative to their norms.
    pub fn forward(&self, x: &Matrix, input_error: f64) -> Trace {
        let rounding = self.rounding;
        // The error of a sum is SUM times the product of the norms, plus the error of its input.
        let mut x_norms = x.row_norms(None);
        x_norms.iter_mut().for_each(|norm| *norm *= 1.0 + input_error / SUM);
        let up = self.up.forward(x);
        let gate = self.gate.as_ref().map(|gate| gate.forward(x));
        let cols = up.cols;
        let mut inner = Matrix::zeros(up.rows, cols);
        let mut errors = Matrix::zeros(up.rows, cols);
        let outputs = [&mut inner.data[..], &mut errors.data[..]];
        for_row_blocks(outputs, cols, cols * ACTIVATION_WORK, |first, [inner, errors]| {
            for (i, (h, error)) in inner.iter_mut().zip(errors).enumerate() {
                let (at, t, column) = (first * cols + i, first + i / cols, i % cols);
                let up_bound = self.up.sum_bound(x_norms[t], column);
                let moved;
                (*h, moved) = match (&self.gate, &gate) {
                    (Some(linear), Some(gate)) => {
                        let gate_bound = linear.sum_bound(x_norms[t], column);
                        let steepest = steepest(self.config.activation, gate.data[at], gate_bound);
                        let (value, up) = match self.config.glu {
                            Glu::PRODUCT => (activate(self.config.activation, gate.data[at]).0, up.data[at]),
                            glu => {
                                let [value, up] = glu_factors(self.config.activation, glu, gate.data[at], up.data[at]);
                                (value.0, up.0)
                            }
                        };
                        (
                            value * up,
                            value.abs() * up_bound + (steepest * gate_bound + F32_FLOOR) * (up.abs() + up_bound),
                        )
                    }
                    _ => {
                        let steepest = steepest(self.config.activation, up.data[at], up_bound);
                        (activate(self.config.activation, up.data[at]).0, steepest * up_bound)
                    }
                };
                *error = moved + rounding.stored(*h);
            }
        });
        let output = self.down.forward(&inner);
        let kappa = column_coherence(&self.down.weight, &self.down.column_norms);
        let moved = errors.row_norms(Some(&self.down.column_norms));
        let (inner_norms, output_norms) = (inner.row_norms(None), output.row_norms(None));
        let floor = rounding.floor * (output.cols as f64).sqrt();
        let output_bounds = (0..x.rows)
            .map(|t| {
                let sums = SUM * (inner_norms[t] * self.down.norm + self.down.bias_norm());
                kappa * moved[t] + sums + rounding.stored(output_norms[t]) + floor
            })
            .collect();
        Trace { x_norms, input_error, gate, up, inner, output, output_bounds }
    }

    /// Computes the gradients of the input and of the rows' factors from `dy`, the gradient of `factors[t] * output[t]`. Weight gradients
    /// go to `grads`.
    pub fn backward(
        &self,
        x: &Matrix,
        trace: &Trace,
        dy: &Matrix,
        factors: &[Bounded],
        grads: &mut Gradients,
    ) -> InputGradient {
        let rounding = self.rounding;
        let dy_norms = dy.row_norms(None);
        // The gradient of the inner values, before the factor.
        let q = dy.times_transpose(&self.down.weight.transposed());
        let cols = q.cols;
        let shape = || Matrix::zeros(q.rows, cols);
        let if_gated = || if self.gate.is_some() { shape() } else { Matrix::zeros(0, cols) };
        let (mut d_up, mut d_gate) = (shape(), if_gated());
        let (mut up_errors, mut gate_errors, mut inner_errors) = (shape(), if_gated(), shape());
        let outputs = [&mut d_up, &mut d_gate, &mut up_errors, &mut gate_errors, &mut inner_errors];
        let outputs = outputs.map(|m| &mut m.data[..]);
        let act = |x: f64| activate(self.config.activation, x);
        // The activation's value and slope at a stored argument, with their error bounds.
        let spread = |argument: f64, bound: f64| {
            let (value, slope) = act(argument);
            let ends = [act(argument - bound), act(argument + bound)];
            let most = |f: &dyn Fn((f64, f64)) -> f64| ends.into_iter().map(f).fold(0.0, f64::max);
            let value_bound = most(&|end| (end.0 - value).abs()) + SUM * value.abs() + F32_FLOOR;
            let slope_bound = most(&|end| (end.1 - slope).abs()) + SUM * slope.abs() + F32_FLOOR;
            (Bounded { value, bound: value_bound }, Bounded { value: slope, bound: slope_bound })
        };
        for_row_blocks(outputs, cols, 3 * cols * ACTIVATION_WORK, |first, [d_ups, d_gates, up_e, gate_e, inner_e]| {
            for i in 0..d_ups.len() {
                let (at, t, column) = (first * cols + i, first + i / cols, i % cols);
                let factor = factors[t];
                let up = trace.up.data[at];
                let up_bound = self.up.sum_bound(trace.x_norms[t], column) + rounding.stored(up);
                let q = Bounded {
                    value: q.data[at],
                    bound: SUM * (dy_norms[t] * self.down.column_norms[column] + q.data[at].abs()),
                };
                // The gradient of the inner value, with the factor.
                let d_inner = factor.times(q);
                let store = |values: &mut [f64], errors: &mut [f64], d: Bounded| {
                    values[i] = d.value;
                    errors[i] = d.bound + rounding.stored(d.value);
                };
                let inner = match (&self.gate, &trace.gate) {
                    (Some(linear), Some(gate)) => {
                        let gate = gate.data[at];
                        let gate_bound = linear.sum_bound(trace.x_norms[t], column) + rounding.stored(gate);
                        let (value, slope, up, up_slope) = if self.config.glu == Glu::PRODUCT {
                            let (value, slope) = spread(gate, gate_bound);
                            (value, slope, Bounded { value: up, bound: up_bound }, Bounded::ONE)
                        } else {
                            self.spread_glu((gate, gate_bound), (up, up_bound))
                        };
                        store(d_ups, up_e, d_inner.times(value.times(up_slope)));
                        store(d_gates, gate_e, d_inner.times(up.times(slope)));
                        value.times(up)
                    }
                    _ => {
                        let (value, slope) = spread(up, up_bound);
                        store(d_ups, up_e, d_inner.times(slope));
                        value
                    }
                };
                inner_e[i] = inner.bound + rounding.stored(inner.value);
            }
        });

        // An error of the input adds to the error of each product with it.
        for (d, errors) in [(&d_up, &mut up_errors), (&d_gate, &mut gate_errors)] {
            errors.data.iter_mut().zip(&d.data).for_each(|(error, d)| *error += trace.input_error * d.abs());
        }

        // Gradient of the down projection: the sum of dy times `factor * inner`, which the layer stores.
        let (down_id, down_bias_id) = self.id.ids(Proj::Down);
        let (mut weighted, mut weighted_errors) = (trace.inner.clone(), inner_errors.clone());
        for (t, factor) in factors.iter().enumerate() {
            for (h, error) in weighted.row_mut(t).iter_mut().zip(weighted_errors.row_mut(t)) {
                *error = factor.value.abs() * *error + factor.bound * (h.abs() + *error);
                *h *= factor.value;
                *error += rounding.stored(*h);
            }
        }
        grads.insert(
            down_id,
            Gradient {
                values: dy.transposed().times_transpose(&weighted.transposed()).data,
                bounds: Bounds::of_outer_products(&weighted, &weighted_errors, dy, coherence(dy, &dy_norms))
                    .transposed(),
            },
        );
        if self.down.bias.is_some() {
            let (mut values, mut rows) = (vec![0.0; dy.cols], vec![0.0; dy.cols]);
            for (t, factor) in factors.iter().enumerate() {
                axpy(factor.value, dy.row(t), &mut values);
                let bound = factor.bound + SUM * factor.value.abs();
                rows.iter_mut().zip(dy.row(t)).for_each(|(row, d)| *row += bound * d.abs());
            }
            grads.insert(down_bias_id, Gradient { values, bounds: Bounds { rows, columns: Vec::new() } });
        }

        let mut dx = Matrix::zeros(x.rows, x.cols);
        let mut dx_bounds = vec![0.0; x.rows];
        let x_coherence = coherence(x, &x.row_norms(None));
        let first_layer =
            [(Proj::Up, Some(&self.up), &d_up, &up_errors), (Proj::Gate, self.gate.as_ref(), &d_gate, &gate_errors)];
        for (proj, linear, d, errors) in first_layer {
            let Some(linear) = linear else { continue };
            let (id, bias_id) = self.id.ids(proj);
            let bounds = Bounds::of_outer_products(d, errors, x, x_coherence);
            grads.insert(id, Gradient { values: d.transposed().times_transpose(&x.transposed()).data, bounds });
            if linear.bias.is_some() {
                let mut rows = vec![0.0; cols];
                for t in 0..d.rows {
                    for ((row, d), error) in rows.iter_mut().zip(d.row(t)).zip(errors.row(t)) {
                        *row += error + SUM * d.abs();
                    }
                }
                let bounds = Bounds { rows, columns: Vec::new() };
                grads.insert(bias_id, Gradient { values: d.column_sums(), bounds });
            }
            dx.add(&d.times_transpose(&linear.weight.transposed()));
            let rows_coherence = coherence(&linear.weight, &linear.row_norms);
            let moved = errors.row_norms(Some(&linear.row_norms)).into_iter().zip(d.row_norms(None));
            for (bound, (moved, d_norm)) in dx_bounds.iter_mut().zip(moved) {
                *bound += rows_coherence * moved + SUM * d_norm * linear.norm;
            }
        }
        let floor = rounding.floor * (dx.cols as f64).sqrt();
        for (bound, norm) in dx_bounds.iter_mut().zip(dx.row_norms(None)) {
            *bound += rounding.stored(norm) + floor;
        }

        // <dy, output>, which the layer computes as <q, inner> + <dy, bias>.
        let inner_scales = trace.inner.row_norms(Some(&self.down.column_norms));
        let repetition = repetition(&self.up.weight);
        let factor_gradient = |t: usize| {
            let value = dot(dy.row(t), trace.output.row(t));
            let errors = q.row(t).iter().zip(inner_errors.row(t)).map(|(q, error)| q.abs() * error);
            let sums = SUM
                * (dy_norms[t] * (inner_scales[t] + self.down.bias_norm()) + norm(q.row(t)) * norm(trace.inner.row(t)));
            Bounded { value, bound: scalar(errors, repetition, 3.0 * rounding.unit * value.abs()) + sums }
        };
        InputGradient { x: dx, x_bounds: dx_bounds, factors: (0..x.rows).map(factor_gradient).collect() }
    }

    /// The factors of an inner value and their derivatives with respect to gate and up, if these have errors up to their bounds. A
    /// derivative jumps at the clamp's limit: if the argument may be on either side, either derivative is allowed.
    fn spread_glu(&self, gate: (f64, f64), up: (f64, f64)) -> (Bounded, Bounded, Bounded, Bounded) {
        let at = |gate, up| glu_factors(self.config.activation, self.config.glu, gate, up);
        let [value, factor] = at(gate.0, up.0);
        let ends = [at(gate.0 - gate.1, up.0 - up.1), at(gate.0 + gate.1, up.0 + up.1)];
        let bounded = |value: f64, ends: [f64; 2]| {
            let most = ends.into_iter().map(|end| (end - value).abs()).fold(0.0, f64::max);
            Bounded { value, bound: most + SUM * value.abs() + F32_FLOOR }
        };
        (
            bounded(value.0, ends.map(|end| end[0].0)),
            bounded(value.1, ends.map(|end| end[0].1)),
            bounded(factor.0, ends.map(|end| end[1].0)),
            Bounded {
                value: factor.1,
                bound: ends.map(|end| (end[1].1 - factor.1).abs()).into_iter().fold(0.0, f64::max),
            },
        )
    }
}
