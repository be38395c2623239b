//! Links, speeds and memories of PEs.

use serde::{Deserialize, Serialize};

use super::FieldError;
use crate::cluster::ProbeOptions;
use crate::moe::{Activation, Dtype, MlpConfig};

/// The expert that a cluster is probed for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbedExpert {
    /// Hidden width.
    pub hidden: usize,
    /// Width inside the expert.
    pub intermediate: usize,
    /// Three matrices instead of two.
    pub gated: bool,
    /// Element type: f32 or bf16.
    pub dtype: Dtype,
    /// Whether it is to be trained: it then has a gradient.
    pub training: bool,
}

impl ProbedExpert {
    /// Its MLP.
    pub fn mlp(&self) -> MlpConfig {
        MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, Activation::Silu) }
    }

    /// Checks that it can be made.
    ///
    /// # Errors
    /// Names the field.
    pub fn check(&self) -> Result<(), FieldError> {
        const MOST: usize = 1 << 20;
        for (field, width) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            if !(1..=MOST).contains(&width) {
                return Err(FieldError::new(field, width, format!("1 to {MOST}")));
            }
        }
        if self.dtype == Dtype::F16 {
            let value = "f16 on the CPU".to_string();
            return Err(FieldError { field: "dtype", value, expected: "f32 or bf16".to_string() });
        }
        Ok(())
    }
}

/// A probe.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// Number of PEs.
    pub pes: usize,
    /// The expert.
    pub expert: ProbedExpert,
    /// How to measure.
    pub options: ProbeOptions,
    /// Memory for experts, MB (10^6 bytes): by PE or one number for all; what the machine has where empty.
    pub memory_mb: Vec<f64>,
    /// What the cluster says of where those numbers are from.
    pub memory_source: String,
}
