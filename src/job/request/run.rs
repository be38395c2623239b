//! The request to run steps of a layer.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{optional_path_bytes, path_bytes};
#[cfg(feature = "device")]
use crate::gpu::SymmetricBy;
#[cfg(feature = "device")]
use crate::moe::device::{GemmPath, Tile};
use crate::moe::synthetic::SyntheticSpec;
use crate::moe::{Dtype, Options};
use crate::plan::{Plan, Replication};

/// The layer and its tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// A layer of a Hugging Face checkpoint.
    Checkpoint {
        /// The directory of the checkpoint.
        #[serde(with = "path_bytes")]
        model: PathBuf,
        /// The layer's number.
        layer: usize,
        /// The file of the tokens.
        #[serde(with = "path_bytes")]
        input: PathBuf,
    },
    /// A layer generated from a seed.
    Synthetic {
        /// The layer and its routing.
        spec: SyntheticSpec,
        /// Number of tokens.
        tokens: usize,
        /// Whether the backward pass runs.
        backward: bool,
    },
}

impl Work {
    /// The layer's number: 0 for a synthetic layer.
    pub fn layer(&self) -> u64 {
        match self {
            Work::Checkpoint { layer, .. } => *layer as u64,
            Work::Synthetic { .. } => 0,
        }
    }
}

/// The kind of device on which the layer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// A CUDA device for each PE.
    Cuda,
    /// An emulated device, which runs the kernels for CUDA devices on the CPU.
    Emulated,
}

/// The source of the plan of EP groups and placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlanSource {
    /// A new plan, made for the probed PEs.
    Auto {
        /// Memory for experts, MB (10^6 bytes): a number for each PE, or one for all PEs. If empty, the machine's memory is used.
        memory_mb: Vec<f64>,
        /// Number of expert replicas that the plan may have.
        replicas: Option<Replication>,
    },
    /// A file written by `aristos plan`.
    File(#[serde(with = "path_bytes")] PathBuf),
    /// The plan itself, which the supervisor has made or read.
    Made(Box<Plan>),
}

/// The effect of the loss of a PE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// The job ends.
    #[default]
    Stop,
    /// The PE's EP group ends, and the other groups continue.
    Continue,
}

/// The reaction to a value that is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinitePolicy {
    /// The run ends after the step, writes its files, and fails.
    #[default]
    Stop,
    /// The run continues, with a warning.
    Warn,
}

/// The unit, PE or host, to which a row is sent once for all its experts in this unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowsPer {
    /// A row is sent once to each PE that has experts of the row.
    #[default]
    Pe,
    /// A row is sent once to each other host. A relay PE on that host forwards the row, and sums the results.
    Host,
}

impl RowsPer {
    /// The name, as in the request's field.
    pub fn name(self) -> &'static str {
        match self {
            RowsPer::Pe => "pe",
            RowsPer::Host => "host",
        }
    }
}

/// Replanning while the steps run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Replanning {
    /// Number of steps between two plans.
    pub every: usize,
    /// Number of expert replicas that the new plan may have.
    pub replicas: Replication,
    /// The cluster for which the first plan was made, as JSON; empty before the probe.
    pub cluster: String,
}

/// A run of a layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunRequest {
    /// The layer and the tokens.
    pub work: Work,
    /// Number of PEs.
    pub pes: usize,
    /// The source of EP groups and placement; `None`: one group, with the experts distributed evenly.
    pub plan: Option<PlanSource>,
    /// The effect of the loss of a PE.
    pub on_failure: OnFailure,
    /// Number of steps after which other experts become hot; for synthetic layers only.
    pub hot_shift_every: Option<usize>,
    /// Replanning, if enabled.
    pub replan: Option<Replanning>,
    /// A cluster file to whose speeds PEs and links are slowed down.
    #[serde(with = "optional_path_bytes")]
    pub inject: Option<PathBuf>,
    /// The device.
    pub device: DeviceKind,
    /// The library that provides symmetric memory of CUDA devices.
    #[cfg(feature = "device")]
    #[serde(default)]
    pub symmetric: SymmetricBy,
    /// The GEMM path on a device; `None`: chosen for the device.
    #[cfg(feature = "device")]
    pub gemm: Option<GemmPath>,
    /// The tiles of the GEMMs; `None`: chosen for the layer's shape.
    #[cfg(feature = "device")]
    pub tile: Option<Tile>,
    /// Whether threads store 16-bit results and copy operands themselves, instead of Hopper's tensor memory accelerator.
    #[cfg(feature = "device")]
    #[serde(default)]
    pub lane_stores: bool,
    /// Whether a device's passes are recorded once and replayed.
    #[cfg(feature = "device")]
    pub graph: bool,
    /// Element type.
    pub dtype: Dtype,
    /// Whether a row is sent once per PE or once per host.
    #[serde(default)]
    pub rows_per: RowsPer,
    /// Measured steps.
    pub steps: usize,
    /// The learning rate of a stochastic gradient descent update after each step, if enabled.
    pub sgd: Option<f32>,
    /// The reaction to a value that is not finite.
    #[serde(default)]
    pub non_finite: NonFinitePolicy,
    /// The options of the layer.
    pub options: Options,
    /// Coefficients of the load-balancing loss and of the z-loss, which override the layer's.
    pub losses: (f32, f32),
    /// See [`LayerConfig::capacity_factor`](crate::moe::LayerConfig::capacity_factor).
    pub capacity_factor: Option<f64>,
    /// The file of the results.
    #[serde(with = "optional_path_bytes")]
    pub output: Option<PathBuf>,
    /// The file of the final weights, in the layout of the checkpoint.
    #[serde(with = "optional_path_bytes")]
    pub save_weights: Option<PathBuf>,
    /// A routing file, whose experts replace the router's choice.
    #[serde(with = "optional_path_bytes")]
    pub routing: Option<PathBuf>,
    /// The file to which the chosen experts of all steps are written.
    #[serde(with = "optional_path_bytes")]
    pub save_routing: Option<PathBuf>,
    /// Whether the results are checked against the float64 reference.
    pub check: bool,
    /// The file to which the timeline is written.
    #[serde(with = "optional_path_bytes")]
    pub trace: Option<PathBuf>,
    /// Whether the report is printed as JSON.
    pub json: bool,
}
