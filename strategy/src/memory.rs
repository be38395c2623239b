//! The memory that a strategy takes on a device.

use aristos_sim::roofline;
use serde::Serialize;

use crate::training::{Shape, Training};

/// Bytes of a gradient, which is summed in f32.
const GRADIENT_BYTES: f64 = 4.0;
/// Size of the receive windows over an even share of the rows.
const WINDOW: f64 = 2.0;

/// The memory of a device, MB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Weights.
    pub weights_mb: f64,
    /// Gradients.
    pub gradients_mb: f64,
    /// Optimizer state.
    pub optimizer_mb: f64,
    /// Activations that the backward needs.
    pub activations_mb: f64,
    /// Receive windows of the exchange.
    pub windows_mb: f64,
}

impl Memory {
    /// The sum.
    pub fn all_mb(&self) -> f64 {
        self.weights_mb + self.gradients_mb + self.optimizer_mb + self.activations_mb + self.windows_mb
    }
}

/// Weights of the experts and of the other parts on a device of the largest stage.
pub(crate) fn parameters(training: &Training, shape: &Shape) -> (f64, f64) {
    let (model, dense) = (&training.model, training.stage(shape.stages));
    let experts = dense.layers.1 as f64 * model.experts.div_ceil(shape.ep) as f64 * model.expert_parameters;
    // With several stages, the embedding and the head are in different ones.
    let embedding = (dense.vocabulary * dense.hidden) as f64;
    let rest = roofline::parameters(&dense) - if shape.stages > 1 { embedding } else { 0.0 };
    (experts, rest)
}

/// The memory of a device of the first stage, which keeps most microbatches.
pub(crate) fn of(training: &Training, shape: &Shape) -> Memory {
    let (experts, rest) = parameters(training, shape);
    let (elements, state) = (training.element_bytes as f64, training.optimizer.bytes(training.element_bytes));
    let shards = |replicas: usize| if shape.sharded { replicas as f64 } else { 1.0 };
    let (model, dense) = (&training.model, training.stage(shape.stages));
    let (tokens, hidden) = (shape.microbatch_tokens as f64, model.hidden as f64);
    let of_attention = {
        let ((heads, kv_heads), (key, value)) = (dense.heads, dense.head_dim);
        // Input and output of the norm; queries, keys and values; output.
        2.0 * hidden + (heads * key + kv_heads * (key + value) + heads * value) as f64
    };
    // An MLP keeps its gate, its up projection and their product. A routed row is kept too, and its output, which the weight's gradient needs.
    let top_k = model.top_k as f64;
    let routed = top_k * (model.expert_parameters / hidden + 2.0 * hidden) + 3.0 * dense.shared_intermediate as f64;
    let of_moe = of_attention + 2.0 * hidden + routed;
    let of_dense = of_attention + 2.0 * hidden + 3.0 * dense.dense_intermediate as f64;
    let layers = (dense.layers.0 - dense.layers.1) as f64 * of_dense + dense.layers.1 as f64 * of_moe;
    let in_flight = shape.stages.min(shape.microbatches) as f64;
    let kept = match shape.recompute {
        // The input of each layer, and one layer at a time.
        true => in_flight * dense.layers.0 as f64 * hidden + of_moe.max(of_dense),
        false => in_flight * layers,
    };
    // The logits of a microbatch, and their gradient in f32, are in the last stage, which keeps one microbatch.
    let logits = dense.vocabulary as f64 * (elements + 4.0) * tokens;
    let last = if shape.stages == 1 { logits } else { 0.0 };
    let copies = if shape.ep > 1 { model.top_k.min(shape.ep) as f64 } else { 0.0 };
    Memory {
        weights_mb: (experts + rest) * elements * 1e-6,
        gradients_mb: (experts + rest) * GRADIENT_BYTES * 1e-6,
        optimizer_mb: state * (experts / shards(shape.replicas) + rest / shards(shape.replicas * shape.ep)) * 1e-6,
        activations_mb: (kept * tokens * elements + last) * 1e-6,
        // Rows and results.
        windows_mb: 2.0 * WINDOW * tokens * copies * hidden * elements * 1e-6,
    }
}
