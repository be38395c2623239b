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
    /// Whether it is trained, and thus has a gradient.
    pub training: bool,
}

impl ProbedExpert {
    /// Its MLP.
    pub fn mlp(&self) -> MlpConfig {
        MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, Activation::Silu) }
    }

    /// Checks that `device` supports it.
    ///
    /// # Errors
    /// The invalid field.
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
    /// Whether CPUs or devices are probed.
    pub device: DeviceKind,
    /// The matrix products on a device; `None`: chosen by the device.
    #[cfg(feature = "device")]
    pub gemm: Option<GemmPath>,
    /// The expert.
    pub expert: ProbedExpert,
    /// How to measure.
    pub options: ProbeOptions,
    /// Memory for experts, MB (10^6 bytes): by PE or one number for all; if empty, the machine's memory.
    pub memory_mb: Vec<f64>,
    /// The source of these numbers, for the cluster file.
    pub memory_source: String,
}
