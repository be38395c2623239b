//! The step of a whole model: simulated layers with experts, everything else by the roofline model.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::{Dense, Simulated};
use crate::sim::roofline;
use crate::sim::step::{PeTime, StepTimes};

/// A step of all layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelTime {
    /// Number of layers.
    pub layers: usize,
    /// Number of layers with experts.
    pub moe_layers: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Bytes of replicated weights in the layer's element type. `memory` has the experts' weights of one layer.
    pub dense_weights_bytes: u64,
    /// Time of a step, the sum of the parts, seconds.
    pub step_s: f64,
    /// Tokens of a step over `step_s`.
    pub tokens_per_s: f64,
    /// Attention with its projections.
    pub attention: Part,
    /// Dense MLPs, norms, additions, embedding and head.
    pub dense: Part,
    /// Compute and copies of layers with experts, the mean over the PEs.
    pub moe: Part,
    /// The remaining time of layers with experts: waits for rows, results, gradient sums and slower PEs.
    pub exposed_communication: Part,
}

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Time, seconds.
    pub time_s: f64,
    /// Share of the step, 0 to 1.
    pub share: f64,
}

impl Dense {
    /// Rate at which the device reads weights, bytes/s.
    pub(super) fn memory_bytes_per_s(&self) -> f64 {
        self.device.base_util * self.device.global_bytes_per_s
    }

    /// Replicated weights per layer with experts: their gradients are summed together with those of the layer.
    pub(super) fn parameters_per_layer(&self) -> f64 {
        roofline::parameters(&self.transformer) / self.transformer.layers.1.max(1) as f64
    }

    /// A step of the model. Layer l with experts has the times of simulated step l mod the number of steps.
    pub(super) fn time(&self, simulated: &Simulated, times: &StepTimes) -> Result<ModelTime> {
        let element_bytes = simulated.dtype.bytes();
        let dense =
            roofline::time(&self.transformer, &self.device, simulated.most_tokens(), self.sequence, element_bytes)?;
        let (layers, moe_layers) = self.transformer.layers;
        let steps = times.step_s.len();
        let in_layers_s: f64 = (0..moe_layers).map(|layer| times.step_s[layer % steps]).sum();
        let work_s = |pe: &PeTime| pe.work_s(0) + pe.work_s(1);
        let of_pes_s: f64 = times.pes.iter().map(work_s).sum();
        let moe_s = of_pes_s / (times.pes.len() * steps) as f64 * moe_layers as f64;
        let of = |passes: [f64; 2]| if simulated.backward { passes[0] + passes[1] } else { passes[0] };
        let (attention_s, rest_s) = (of(dense.attention_s), of(dense.rest_s));
        let step_s = attention_s + rest_s + in_layers_s;
        ensure!(step_s.is_finite() && step_s > 0.0, "the model's step takes {step_s} s, expected a time above 0");
        let part = |time_s: f64| Part { time_s, share: time_s / step_s };
        Ok(ModelTime {
            layers,
            moe_layers,
            sequence: self.sequence,
            dense_weights_bytes: (roofline::parameters(&self.transformer) * element_bytes as f64) as u64,
            step_s,
            tokens_per_s: simulated.tokens() as f64 / step_s,
            attention: part(attention_s),
            dense: part(rest_s),
            moe: part(moe_s),
            exposed_communication: part(in_layers_s - moe_s),
        })
    }
}
