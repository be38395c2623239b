//! Steps of a layer.

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

/// Which layer, on which tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// A layer of a Hugging Face checkpoint.
    Checkpoint {
        /// Its directory.
        #[serde(with = "path_bytes")]
        model: PathBuf,
        /// The layer's number.
        layer: usize,
        /// The file of the tokens.
        #[serde(with = "path_bytes")]
        input: PathBuf,
    },
    /// A layer made from a seed.
    Synthetic {
        /// The layer and its routing.
        spec: SyntheticSpec,
        /// Number of tokens.
        tokens: usize,
        /// Whether there is a backward pass.
        backward: bool,
    },
}

impl Work {
    /// The layer's number: 0 of a synthetic one.
    pub fn layer(&self) -> u64 {
        match self {
            Work::Checkpoint { layer, .. } => *layer as u64,
            Work::Synthetic { .. } => 0,
        }
    }
}

/// What the layer runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// A CUDA device for each PE.
    Cuda,
    /// The kernels for CUDA devices, on the CPU.
    Emulated,
}

/// Where the plan of EP groups and placement comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlanSource {
    /// The PEs are probed, and a plan is made for them.
    Auto {
        /// Memory for experts, MB (10^6 bytes): by PE, or one number for all; what the machine has where empty.
        memory_mb: Vec<f64>,
        /// Replicas of experts that the plan may have.
        replicas: Option<Replication>,
    },
    /// What `aristos plan` wrote.
    File(#[serde(with = "path_bytes")] PathBuf),
    /// The plan itself, as the supervisor has made or read it.
    Made(Box<Plan>),
}

/// What becomes of a job when a PE dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// It ends.
    #[default]
    Stop,
    /// The PE's EP group ends, and the other groups go on.
    Continue,
}

/// What a row goes to once, with all of its experts there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowsPer {
    /// Each PE that has experts of it.
    #[default]
    Pe,
    /// Each other host: a PE there passes it on, and adds up the results.
    Host,
}

impl RowsPer {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            RowsPer::Pe => "pe",
            RowsPer::Host => "host",
        }
    }
}

/// A plan that is made anew while the steps run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Replanning {
    /// After so many steps, each time.
    pub every: usize,
    /// Replicas of experts that the new plan may have.
    pub replicas: Replication,
    /// The cluster that the first plan was made for, as JSON, once it has been probed.
    pub cluster: String,
}

/// A run of a layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunRequest {
    /// The layer and the tokens.
    pub work: Work,
    /// Number of PEs.
    pub pes: usize,
    /// Where the EP groups and the placement come from; one group with even shares where `None`.
    pub plan: Option<PlanSource>,
    /// What becomes of it when a PE dies.
    pub on_failure: OnFailure,
    /// Of a synthetic layer: after so many steps, each time, other experts are hot.
    pub hot_shift_every: Option<usize>,
    /// Whether and when the plan is made anew while the steps run.
    pub replan: Option<Replanning>,
    /// A cluster file: PEs compute, and their messages travel, no faster than its devices and links.
    #[serde(with = "optional_path_bytes")]
    pub inject: Option<PathBuf>,
    /// What it runs on.
    pub device: DeviceKind,
    /// What gives CUDA devices symmetric memory.
    #[cfg(feature = "device")]
    #[serde(default)]
    pub symmetric: SymmetricBy,
    /// Which matrix products a device runs; by the device where `None`.
    #[cfg(feature = "device")]
    pub gemm: Option<GemmPath>,
    /// The tiles that these are cut into; by the layer's shape where `None`.
    #[cfg(feature = "device")]
    pub tile: Option<Tile>,
    /// Whether lanes store results of 16 bits, and copy operands, where Hopper's tensor memory accelerator could.
    #[cfg(feature = "device")]
    #[serde(default)]
    pub lane_stores: bool,
    /// Whether a device's passes are recorded once and repeated.
    #[cfg(feature = "device")]
    pub graph: bool,
    /// Element type.
    pub dtype: Dtype,
    /// What a row goes to once.
    #[serde(default)]
    pub rows_per: RowsPer,
    /// Measured steps.
    pub steps: usize,
    /// The learning rate, where weights take a step of stochastic gradient descent after each step.
    pub sgd: Option<f32>,
    /// How the layer runs.
    pub options: Options,
    /// Coefficients of the load-balancing and the z-loss, over what the layer says.
    pub losses: (f32, f32),
    /// See [`LayerConfig::capacity_factor`](crate::moe::LayerConfig::capacity_factor).
    pub capacity_factor: Option<f64>,
    /// Where the results go.
    #[serde(with = "optional_path_bytes")]
    pub output: Option<PathBuf>,
    /// Where the weights go as they are at the end, in the layout of their checkpoint.
    #[serde(with = "optional_path_bytes")]
    pub save_weights: Option<PathBuf>,
    /// The file of the tokens' experts, in place of the router's choice.
    #[serde(with = "optional_path_bytes")]
    pub routing: Option<PathBuf>,
    /// Where the experts of all steps' tokens go.
    #[serde(with = "optional_path_bytes")]
    pub save_routing: Option<PathBuf>,
    /// Whether the results are checked against the float64 reference.
    pub check: bool,
    /// Where the timeline goes.
    #[serde(with = "optional_path_bytes")]
    pub trace: Option<PathBuf>,
    /// Whether the report is printed as JSON.
    pub json: bool,
}
