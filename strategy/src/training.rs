//! What is trained, on which devices, and how it is divided among them.

use aristos_formats::cluster::Cluster;
use aristos_formats::{InputError, Model, Transformer};
use aristos_sim::linear::Device;
use serde::Serialize;

/// The state of an optimizer, in bytes a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// AdamW with two moments in f32, and an f32 copy of bf16 weights.
    AdamW,
    /// AdamW with two moments in bf16, and an f32 copy of bf16 weights.
    Bf16,
    /// AdamW with two moments of 8 bits (Dettmers et al. 2022), and an f32 copy of bf16 weights.
    EightBit,
    /// A number of bytes.
    Bytes(f64),
}

impl Optimizer {
    /// Bytes a parameter, besides weight and gradient.
    pub fn bytes(self, element_bytes: usize) -> f64 {
        let copy = if element_bytes < 4 { 4.0 } else { 0.0 };
        match self {
            Optimizer::AdamW => copy + 8.0,
            Optimizer::Bf16 => copy + 4.0,
            Optimizer::EightBit => copy + 2.0,
            Optimizer::Bytes(bytes) => bytes,
        }
    }
}

/// Share of a device's memory that a cluster file's `memory_mb` has, and the share that a strategy may use: the rest is for the driver, libraries and unused
/// parts of the allocator.
const FOR_EXPERTS: f64 = 0.75;
const USABLE: f64 = 0.9;

/// A model to train on a cluster.
#[derive(Clone, Debug)]
pub struct Training<'a> {
    /// The devices and links.
    pub cluster: &'a Cluster,
    /// The layers and their experts.
    pub model: Model,
    /// All other parts.
    pub dense: Transformer,
    /// The roofline of a device.
    pub device: Device,
    /// Tokens of a step over the number of devices.
    pub tokens_per_device: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Bytes of an element of weights and activations.
    pub element_bytes: usize,
    /// The optimizer.
    pub optimizer: Optimizer,
}

impl Training<'_> {
    /// The usable memory of the smallest device, MB.
    ///
    /// # Errors
    /// Returns an error that names a device without `memory_mb`.
    pub fn usable_mb(&self) -> Result<f64, InputError> {
        let mut least = f64::INFINITY;
        for (i, device) in self.cluster.devices.iter().enumerate() {
            let field =
                || InputError::value(format!("devices[{i}].memory_mb"), "is missing", "the device's memory in MB");
            least = least.min(device.memory_mb.ok_or_else(field)?);
        }
        Ok(least / FOR_EXPERTS * USABLE)
    }

    /// The largest of some stages.
    pub(crate) fn stage(&self, stages: usize) -> Transformer {
        let (layers, moe_layers) = self.dense.layers;
        let (of_stage, moe) = (layers.div_ceil(stages), moe_layers.div_ceil(stages));
        let windowed = (self.dense.windowed.0.div_ceil(stages), self.dense.windowed.1);
        Transformer { layers: (of_stage.max(moe), moe), windowed, ..self.dense.clone() }
    }
}

/// How a model is divided among the devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    /// Pipeline stages.
    pub stages: usize,
    /// Devices of an expert-parallel group.
    pub ep: usize,
    /// Groups of a stage, which are replicas of its experts; the other weights have `ep * replicas`.
    pub replicas: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Tokens of a microbatch on a device.
    pub microbatch_tokens: usize,
    /// Whether the layers' activations are recomputed in backward.
    pub recompute: bool,
    /// Whether the optimizer's state is sharded over replicas.
    pub sharded: bool,
}
