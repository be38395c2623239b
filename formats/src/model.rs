//! Models, and the workload of a model with a batch.

use crate::error::InputError;
use crate::workload::Workload;

/// A Mixture-of-Experts model, as the planner sees it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Model {
    /// Number of layers.
    pub layers: usize,
    /// Number of layers with experts.
    pub moe_layers: usize,
    /// Width of a token's hidden state, elements.
    pub hidden: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Number of weights of an expert.
    pub expert_parameters: f64,
    /// Forward FLOP of one expert for one token: two per weight that multiplies.
    pub flop_per_row: f64,
}

impl Model {
    /// A model with `layers` layers, `moe_layers` of them with `experts` gated experts (three matrices of `hidden` x `intermediate`),
    /// `top_k` of them per token.
    pub fn gated(
        (layers, moe_layers): (usize, usize),
        hidden: usize,
        intermediate: usize,
        experts: usize,
        top_k: usize,
    ) -> Model {
        let expert_parameters = 3.0 * hidden as f64 * intermediate as f64;
        let flop_per_row = 2.0 * expert_parameters;
        Model { layers, moe_layers, hidden, experts, top_k, expert_parameters, flop_per_row }
    }

    /// A published model by name, one of [`MODELS`].
    ///
    /// # Errors
    /// Returns an error that lists the names.
    pub fn preset(name: &str) -> Result<Model, InputError> {
        // From each model's published config.json. The first three layers of DeepSeek-V3 are dense, and the first of Kimi K2.
        let model = match name {
            "mixtral-8x7b" => Model::gated((32, 32), 4096, 14_336, 8, 2),
            "mixtral-8x22b" => Model::gated((56, 56), 6144, 16_384, 8, 2),
            "qwen3-30b-a3b" => Model::gated((48, 48), 2048, 768, 128, 8),
            "qwen3-235b-a22b" => Model::gated((94, 94), 4096, 1536, 128, 8),
            "deepseek-v3" => Model::gated((61, 58), 7168, 2048, 256, 8),
            "kimi-k2" => Model::gated((61, 60), 7168, 2048, 384, 8),
            "gpt-oss-20b" => Model::gated((24, 24), 2880, 2880, 32, 4),
            "gpt-oss-120b" => Model::gated((36, 36), 2880, 2880, 128, 4),
            _ => {
                let expected = format!("a folder with a config.json, or one of {}", MODELS.join(", "));
                return Err(InputError::value(format!("model {name}"), "is unknown", expected));
            }
        };
        Ok(model)
    }

    /// The planner's workload for training this model with `batch`.
    ///
    /// A pass is a forward, a backward or a recomputation of all layers with experts; an iteration has `2 + recomputation` passes, as in
    /// gamma. A backward has two products per product of forward, so the mean pass costs `(3 + recomputation) / (2 + recomputation)`
    /// forwards. `expert_flop` is that cost, for one device's tokens in even shares. In an exchange a device sends each token once to each
    /// device with any of its experts, thus to at most `top_k` devices.
    pub fn workload(&self, batch: &Batch) -> Workload {
        let (top_k, tokens) = (self.top_k as f64, batch.tokens_per_device);
        let passes = 2.0 + batch.recomputation;
        let mean_pass = match batch.backward {
            true => (3.0 + batch.recomputation) / passes,
            false => 1.0,
        };
        let rows = tokens * top_k / self.experts as f64;
        let copies = batch.devices.map_or(top_k, |devices| top_k.min(devices as f64));
        let parameters = self.moe_layers as f64 * self.experts as f64 * self.expert_parameters;
        let mut workload = Workload::new(vec![self.flop_per_row * rows * mean_pass; self.experts]);
        workload.p2p_buffer_mb = tokens * copies * (self.hidden * batch.element_bytes) as f64 * 1e-6;
        workload.p2p_frequency = 2.0;
        workload.all_reduce_buffer_mb = if batch.backward { parameters * batch.gradient_bytes * 1e-6 } else { 0.0 };
        workload.expert_mb = batch.bytes_per_parameter.map(|bytes| self.expert_parameters * bytes * 1e-6);
        // gamma counts two passes; forward alone is half of them.
        let halves = if batch.backward { 1.0 } else { 0.5 };
        workload.num_layers = self.layers as f64 * halves;
        workload.moe_frequency = self.layers as f64 / self.moe_layers.max(1) as f64;
        workload.mini_batch_size = tokens;
        workload.global_batch_size = batch.devices.map(|devices| tokens * devices as f64);
        workload.recomputation_amount = batch.recomputation;
        workload
    }
}

/// The names of [`Model::preset`].
pub const MODELS: [&str; 8] = [
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-v3",
    "kimi-k2",
    "gpt-oss-20b",
    "gpt-oss-120b",
];

/// A batch, and the memory and bytes of its training.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Batch {
    /// Tokens per device and step.
    pub tokens_per_device: f64,
    /// Number of devices, if known; a step of all devices is an iteration.
    pub devices: Option<usize>,
    /// Bytes per element of a hidden state in an exchange.
    pub element_bytes: usize,
    /// Bytes per weight of a gradient in an all-reduce.
    pub gradient_bytes: f64,
    /// Bytes of device memory per weight of an expert, with gradient and optimizer state.
    pub bytes_per_parameter: Option<f64>,
    /// Whether there is a backward.
    pub backward: bool,
    /// Additional forward passes by recomputation.
    pub recomputation: f64,
}

impl Batch {
    /// Training with `tokens_per_device` tokens per device and elements of `element_bytes` bytes. Gradients are summed in f32.
    pub fn new(tokens_per_device: f64, element_bytes: usize) -> Batch {
        Batch {
            tokens_per_device,
            devices: None,
            element_bytes,
            gradient_bytes: 4.0,
            bytes_per_parameter: None,
            backward: true,
            recomputation: 0.0,
        }
    }

    /// Bytes per weight with Adam (Rajbhandari et al. 2020, section 3.1, with gradients in f32): the weight, the gradient, two moments, and
    /// for weights of less than 4 bytes a copy in f32.
    pub fn adam_bytes(element_bytes: usize) -> f64 {
        let copy = if element_bytes < 4 { 4 } else { 0 };
        (element_bytes + 4 + 8 + copy) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_and_a_batch_make_a_workload() {
        let model = Model::preset("deepseek-v3").unwrap();
        let mut batch = Batch::new(4096.0, 2);
        batch.bytes_per_parameter = Some(Batch::adam_bytes(2));
        let workload = model.workload(&batch);
        assert_eq!(workload.n_experts(), 256);
        // 128 rows per expert, three products of 2 x 7168 x 2048 in forward, one and a half times that in a pass.
        let forward = 128.0 * 6.0 * 7168.0 * 2048.0;
        assert!(workload.expert_flop.iter().all(|flop| *flop == 1.5 * forward));
        assert_eq!(workload.p2p_buffer_mb, 4096.0 * 8.0 * 7168.0 * 2.0 * 1e-6);
        assert_eq!(workload.moe_layers(), 58.0);
        assert_eq!(workload.expert_mb, Some(3.0 * 7168.0 * 2048.0 * 18.0 * 1e-6));
        assert_eq!(workload.global_batch_size, None);
        let parameters = 58.0 * 256.0 * 3.0 * 7168.0 * 2048.0;
        assert!((workload.all_reduce_buffer_mb / (parameters * 4e-6) - 1.0).abs() < 1e-12);
        // Four devices hold the eight experts of a token: each receives it once.
        batch.devices = Some(4);
        let few = model.workload(&batch);
        assert_eq!(few.p2p_buffer_mb, workload.p2p_buffer_mb / 2.0);
        assert_eq!(few.global_batch_size, Some(4.0 * 4096.0));
        batch.backward = false;
        let forward_only = model.workload(&batch);
        assert_eq!((forward_only.expert_flop[0], forward_only.moe_layers()), (forward, 29.0));
        assert_eq!(forward_only.all_reduce_buffer_mb, 0.0);
        for name in MODELS {
            assert!(Model::preset(name).is_ok(), "{name}");
        }
        let error = Model::preset("gpt-2").unwrap_err().to_string();
        assert!(error.contains("gpt-2") && error.contains("deepseek-v3"), "{error}");
    }
}
