//! From a model and a batch to a workload.

use crate::error::InputError;
use crate::workload::Workload;

/// A Mixture-of-Experts model, as far as the planner looks at it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Model {
    /// Layers.
    pub layers: usize,
    /// Those of them that have experts.
    pub moe_layers: usize,
    /// Width of a token's hidden state, elements.
    pub hidden: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub top_k: usize,
    /// Weights of one expert.
    pub expert_parameters: f64,
    /// FLOP of one expert for one token, forward: two for each weight that multiplies.
    pub flop_per_row: f64,
}

impl Model {
    /// A model of `layers` layers, `moe_layers` of them with `experts` gated experts (three matrices of `hidden` x `intermediate`), `top_k` for
    /// a token.
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

    /// A published model by its name, one of [`MODELS`].
    ///
    /// # Errors
    /// One line that says which names there are.
    pub fn preset(name: &str) -> Result<Model, InputError> {
        // From the config.json that each was published with. DeepSeek-V3's first three layers are dense.
        let model = match name {
            "mixtral-8x7b" => Model::gated((32, 32), 4096, 14_336, 8, 2),
            "mixtral-8x22b" => Model::gated((56, 56), 6144, 16_384, 8, 2),
            "qwen3-30b-a3b" => Model::gated((48, 48), 2048, 768, 128, 8),
            "qwen3-235b-a22b" => Model::gated((94, 94), 4096, 1536, 128, 8),
            "deepseek-v3" => Model::gated((61, 58), 7168, 2048, 256, 8),
            "gpt-oss-120b" => Model::gated((36, 36), 2880, 2880, 128, 4),
            _ => {
                let expected = format!("a folder with a config.json, or one of {}", MODELS.join(", "));
                return Err(InputError::value(format!("model {name}"), "is unknown", expected));
            }
        };
        Ok(model)
    }

    /// What the planner plans for when this model trains on such a batch.
    ///
    /// A pass is a forward, a backward or a recomputation of all layers with experts; an iteration has `2 + recomputation` passes, as gamma counts
    /// them. A backward takes two products for each of forward's, so a pass costs `(3 + recomputation) / (2 + recomputation)` forwards on
    /// average, and that is what `expert_flop` says, of one device's tokens in an even share for each expert. In an exchange a device sends each token
    /// once to each of the devices that have one of its experts: `top_k` at most, and no more than there are.
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
        // gamma counts two passes; forward alone is half of that.
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
pub const MODELS: [&str; 6] =
    ["mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b"];

/// How a model is trained.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Batch {
    /// Tokens that each device has in a step.
    pub tokens_per_device: f64,
    /// Devices, where they are known; a step of each is an iteration.
    pub devices: Option<usize>,
    /// Bytes of an element of a token's hidden state on its way.
    pub element_bytes: usize,
    /// Bytes of a weight's gradient on its way.
    pub gradient_bytes: f64,
    /// Bytes of a device's memory for each weight of an expert, with gradient and optimizer state.
    pub bytes_per_parameter: Option<f64>,
    /// Whether there is a backward.
    pub backward: bool,
    /// Further forward passes by recomputation.
    pub recomputation: f64,
}

impl Batch {
    /// Training with so many tokens for each device, of elements of so many bytes. Gradients are summed in f32.
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

    /// Bytes for each weight when Adam trains it (Rajbhandari et al. 2020, section 3.1, with gradients in f32): the weight, the gradient, two moments,
    /// and for weights of less than 4 bytes a copy in f32.
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
        // 128 rows an expert, three products of 2 x 7168 x 2048 forward, one and a half of that a pass.
        let forward = 128.0 * 6.0 * 7168.0 * 2048.0;
        assert!(workload.expert_flop.iter().all(|flop| *flop == 1.5 * forward));
        assert_eq!(workload.p2p_buffer_mb, 4096.0 * 8.0 * 7168.0 * 2.0 * 1e-6);
        assert_eq!(workload.moe_layers(), 58.0);
        assert_eq!(workload.expert_mb, Some(3.0 * 7168.0 * 2048.0 * 18.0 * 1e-6));
        assert_eq!(workload.global_batch_size, None);
        let parameters = 58.0 * 256.0 * 3.0 * 7168.0 * 2048.0;
        assert!((workload.all_reduce_buffer_mb / (parameters * 4e-6) - 1.0).abs() < 1e-12);
        // Four devices hold a token's eight experts: it goes to each once.
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
