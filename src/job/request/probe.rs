//! Links, speeds and memories of PEs.

use serde::{Deserialize, Serialize};

use super::{DeviceKind, FieldError};
#[cfg(feature = "device")]
use crate::moe::device::GemmPath;
use crate::moe::{Activation, Dtype, MlpConfig};
use crate::probe::ProbeOptions;

/// The expert that a cluster is probed for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbedExpert {
    /// Hidden width.
    pub hidden: usize,
    /// Width inside the expert.
    pub intermediate: usize,
    /// Three matrices instead of two.
    pub gated: bool,
    /// Element type: f32 or bf16 on the CPU, bf16 or f16 on a device.
    pub dtype: Dtype,
    /// Whether it is to be trained: it then has a gradient.
    pub training: bool,
}

impl ProbedExpert {
    /// Its MLP.
    pub fn mlp(&self) -> MlpConfig {
        MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, Activation::Silu) }
    }

    /// Checks that it can be made on `device`.
    ///
    /// # Errors
    /// Names the field.
    pub fn check(&self, device: DeviceKind) -> Result<(), FieldError> {
        const MOST: usize = 1 << 20;
        let on_device = device != DeviceKind::Cpu;
        for (field, width) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            if !(1..=MOST).contains(&width) {
                return Err(FieldError::new(field, width, format!("1 to {MOST}")));
            }
            if on_device && !width.is_multiple_of(8) {
                return Err(FieldError::new(field, width, "a multiple of 8 on a device"));
            }
        }
        let (value, expected) = match (self.dtype, on_device) {
            (Dtype::F16, false) => ("f16 on the CPU", "f32 or bf16"),
            (Dtype::F32, true) => ("f32 on a device", "bf16 or f16"),
            _ => return Ok(()),
        };
        Err(FieldError { field: "dtype", value: value.to_string(), expected: expected.to_string() })
    }
}

/// A probe.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// Number of PEs.
    pub pes: usize,
    /// What is probed: the CPUs, or the devices.
    pub device: DeviceKind,
    /// Which matrix products a device runs; by the device where `None`.
    #[cfg(feature = "device")]
    pub gemm: Option<GemmPath>,
    /// The expert.
    pub expert: ProbedExpert,
    /// How to measure.
    pub options: ProbeOptions,
    /// Memory for experts, MB (10^6 bytes): by PE or one number for all; what the machine has where empty.
    pub memory_mb: Vec<f64>,
    /// What the cluster says of where those numbers are from.
    pub memory_source: String,
}
