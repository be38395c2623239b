//! An expert's MLP on a matrix of token rows, forward and backward.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::matrix::{Matrix, axpy, for_row_blocks};
use super::special::activate;
use crate::moe::{LayerConfig, MlpConfig, Proj, WeightId};

/// Elementwise work in the units of [`for_row_blocks`]: an erf costs about as much as this many multiply-adds.
const ACTIVATION_WORK: usize = 64;

/// Loads one weight of the layer and checks its length.
pub fn load(
    config: &LayerConfig,
    weights: &dyn Fn(WeightId) -> Result<Vec<f32>>,
    id: WeightId,
) -> Result<(Vec<usize>, Vec<f32>)> {
    let shape = config.shape(id);
    let data = weights(id)?;
    let expected: usize = shape.iter().product();
    ensure!(
        data.len() == expected,
        "weight {id:?} has {} numbers, expected {expected} for shape {shape:?}",
        data.len()
    );
    Ok((shape, data))
}

/// `y = x W^T + b`.
struct Linear {
    weight: Matrix,
    bias: Option<Vec<f64>>,
}

impl Linear {
    fn forward(&self, x: &Matrix) -> Matrix {
        let mut y = x.times_transpose(&self.weight);
        if let Some(bias) = &self.bias {
            for r in 0..y.rows {
                axpy(1.0, bias, y.row_mut(r));
            }
        }
        y
    }

    /// The gradient of the input; those of the weight and the bias go to `grads`.
    fn backward(&self, x: &Matrix, dy: &Matrix, ids: [WeightId; 2], grads: &mut Gradients) -> Matrix {
        grads.insert(ids[0], dy.transposed().times_transpose(&x.transposed()).data);
        if self.bias.is_some() {
            grads.insert(ids[1], dy.column_sums());
        }
        dy.times_transpose(&self.weight.transposed())
    }
}

/// Gradients by weight.
pub type Gradients = BTreeMap<WeightId, Vec<f64>>;

/// Which MLP of the layer: a routed expert, or the shared one.
#[derive(Clone, Copy)]
pub enum Which {
    Expert(usize),
    Shared,
}

impl Which {
    /// The names of a projection's matrix and bias.
    fn ids(self, proj: Proj) -> [WeightId; 2] {
        match self {
            Which::Expert(e) => [WeightId::Expert(e, proj), WeightId::ExpertBias(e, proj)],
            Which::Shared => [WeightId::Shared(proj), WeightId::SharedBias(proj)],
        }
    }
}

/// An MLP with its weights.
pub struct Mlp {
    config: MlpConfig,
    which: Which,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

/// What the backward pass needs of the forward pass.
pub struct Trace {
    /// `gate(x)`, gated MLPs only.
    gate: Option<Matrix>,
    /// `up(x)`.
    up: Matrix,
    /// The input of `down`.
    inner: Matrix,
    /// The MLP's output.
    pub output: Matrix,
}

impl Mlp {
    pub fn load(
        layer: &LayerConfig,
        config: MlpConfig,
        which: Which,
        weights: &dyn Fn(WeightId) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let linear = |proj| -> Result<Linear> {
            let [weight_id, bias_id] = which.ids(proj);
            let (shape, data) = load(layer, weights, weight_id)?;
            let weight = Matrix::from_f32(shape[0], shape[1], &data);
            let bias = if config.bias {
                Some(load(layer, weights, bias_id)?.1.into_iter().map(f64::from).collect())
            } else {
                None
            };
            Ok(Linear { weight, bias })
        };
        let gate = if config.gated { Some(linear(Proj::Gate)?) } else { None };
        Ok(Mlp { config, which, gate, up: linear(Proj::Up)?, down: linear(Proj::Down)? })
    }

    pub fn forward(&self, x: &Matrix) -> Trace {
        let up = self.up.forward(x);
        let gate = self.gate.as_ref().map(|gate| gate.forward(x));
        let mut inner = Matrix::zeros(up.rows, up.cols);
        let cols = up.cols;
        for_row_blocks(&mut inner.data, cols, cols * ACTIVATION_WORK, |first, block| {
            for (i, h) in block.iter_mut().enumerate() {
                let at = first * cols + i;
                *h = match &gate {
                    Some(gate) => activate(self.config.activation, gate.data[at]).0 * up.data[at],
                    None => activate(self.config.activation, up.data[at]).0,
                };
            }
        });
        let output = self.down.forward(&inner);
        Trace { gate, up, inner, output }
    }

    /// The gradient of the input for the output's gradient `dy`; the weights' gradients go to `grads`.
    pub fn backward(&self, x: &Matrix, trace: &Trace, dy: &Matrix, grads: &mut Gradients) -> Matrix {
        let d_inner = self.down.backward(&trace.inner, dy, self.which.ids(Proj::Down), grads);
        let cols = d_inner.cols;
        // inner = act(gate) * up, or act(up).
        let mut d_up = Matrix::zeros(d_inner.rows, cols);
        for_row_blocks(&mut d_up.data, cols, cols * ACTIVATION_WORK, |first, block| {
            for (i, d) in block.iter_mut().enumerate() {
                let at = first * cols + i;
                *d = d_inner.data[at]
                    * match &trace.gate {
                        Some(gate) => activate(self.config.activation, gate.data[at]).0,
                        None => activate(self.config.activation, trace.up.data[at]).1,
                    };
            }
        });
        let mut dx = self.up.backward(x, &d_up, self.which.ids(Proj::Up), grads);
        if let (Some(linear), Some(gate)) = (&self.gate, &trace.gate) {
            let mut d_gate = d_up;
            for_row_blocks(&mut d_gate.data, cols, cols * ACTIVATION_WORK, |first, block| {
                for (i, d) in block.iter_mut().enumerate() {
                    let at = first * cols + i;
                    *d = d_inner.data[at] * trace.up.data[at] * activate(self.config.activation, gate.data[at]).1;
                }
            });
            dx.add(&linear.backward(x, &d_gate, self.which.ids(Proj::Gate), grads));
        }
        dx
    }
}
