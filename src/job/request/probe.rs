//! The request to measure links, speeds and memory of PEs.

use serde::{Deserialize, Serialize};

use super::{DeviceKind, FieldError};
#[cfg(feature = "device")]
use crate::moe::device::GemmPath;
use crate::moe::{Activation, Dtype, MlpConfig};
use crate::probe::ProbeOptions;

/// The expert for which a cluster is probed: its GEMMs are measured, and memory is counted in such experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbedExpert {
    /// Hidden width.
    pub hidden: usize,
    /// Width inside the expert.
    pub intermediate: usize,
    /// Whether the expert is gated, with three matrices instead of two.
    pub gated: bool,
    /// Element type: f32 or bf16 on the CPU, bf16 or f16 on a device.
    pub dtype: Dtype,
    /// Whether the expert is trained, and thus has gradients.
    pub training: bool,
}

impl ProbedExpert {
    /// The configuration of the expert's MLP.
    pub fn mlp(&self) -> MlpConfig {
        MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, Activation::Silu) }
    }

    /// Checks that `device` supports the expert.
    ///
    /// # Errors
    /// Returns an error that names the invalid field.
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
    /// The GEMM path on a device; `None`: chosen for the device.
    #[cfg(feature = "device")]
    pub gemm: Option<GemmPath>,
    /// The expert.
    pub expert: ProbedExpert,
    /// The options of the measurements.
    pub options: ProbeOptions,
    /// Memory for experts, MB (10^6 bytes): a number for each PE, or one for all PEs. If empty, the machine's memory is used.
    pub memory_mb: Vec<f64>,
    /// The source of these numbers, for the cluster file.
    pub memory_source: String,
}
