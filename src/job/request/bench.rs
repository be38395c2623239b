//! Requests of benchmarks.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{DeviceKind, FieldError, optional_path_bytes};
#[cfg(feature = "device")]
use crate::gpu::SymmetricBy;
#[cfg(feature = "device")]
use crate::moe::device::{GemmPath, Tile};
use crate::moe::synthetic::SyntheticSpec;
use crate::moe::{Dtype, Options};

/// Compares the layer with the GEMMs of its experts alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MoeBench {
    /// Number of PEs.
    pub pes: usize,
    /// The layer and its workload.
    pub layer: SyntheticSpec,
    /// A file of the tokens' experts, which replaces the router's choice.
    #[serde(with = "optional_path_bytes")]
    pub routing: Option<PathBuf>,
    /// Tokens, over all PEs.
    pub tokens: usize,
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
    /// Element types, measured one after the other.
    pub dtypes: Vec<Dtype>,
    /// The layer's options; the benchmark sets the mode.
    pub options: Options,
    /// Warm-up iterations.
    pub warmup: usize,
    /// Measured iterations.
    pub iterations: usize,
}

/// A measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// A put, then quiet.
    Put,
    /// A non-blocking put, then quiet. The time until the put returns is reported separately.
    PutNbi,
    /// A get.
    Get,
    /// A put with a signal in each direction.
    PutSignal,
    /// A fetch-and-add of 8 bytes.
    Atomic,
    /// A two-sided message in each direction.
    SendRecv,
}

impl Op {
    /// The name, as used in files too.
    pub fn name(self) -> &'static str {
        match self {
            Op::Put => "put",
            Op::PutNbi => "put-nbi",
            Op::Get => "get",
            Op::PutSignal => "put-signal",
            Op::Atomic => "atomic",
            Op::SendRecv => "send-recv",
        }
    }

    /// The scopes in which it exists on a device.
    pub fn scopes(self) -> &'static [Scope] {
        match self {
            Op::Put | Op::Get | Op::PutSignal => &Scope::ALL,
            Op::PutNbi => &[Scope::Thread, Scope::Warp, Scope::Block],
            Op::SendRecv => &[Scope::Stream],
            Op::Atomic => &[],
        }
    }
}

/// The threads of a device that work on one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// One thread.
    Thread,
    /// The 32 threads of a warp.
    Warp,
    /// The threads of a block.
    Block,
    /// No thread: the host enqueues the operation on a stream.
    Stream,
}

impl Scope {
    /// All scopes.
    pub const ALL: [Scope; 4] = [Scope::Thread, Scope::Warp, Scope::Block, Scope::Stream];

    /// The name, as used in files too.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Thread => "thread",
            Scope::Warp => "warp",
            Scope::Block => "block",
            Scope::Stream => "stream",
        }
    }
}

/// Measures operations between two PEs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct P2pBench {
    /// Operations.
    pub ops: Vec<Op>,
    /// Scopes on a device; each operation is measured in those that it supports.
    pub scopes: Vec<Scope>,
    /// Whether the user chose the operations, and whether the user chose the scopes. A chosen value that cannot be measured is an error. A
    /// default value that cannot be measured is omitted.
    pub asked: (bool, bool),
    /// Sizes, bytes, ascending.
    pub sizes: Vec<usize>,
    /// The pairs of PEs, measured one after the other; the first PE of a pair initiates.
    pub pairs: Vec<[usize; 2]>,
    /// Number of PEs.
    pub pes: usize,
    /// Measured samples; large sizes have fewer.
    pub iterations: usize,
    /// Warm-up samples.
    pub warmup: usize,
    /// Whether NVSHMEM's operations between devices are measured.
    pub on_device: bool,
    /// Maximum time for which a PE waits for another.
    pub wait_limit: Duration,
}

/// How the PEs synchronise in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StragglerMode {
    /// A barrier before and after: no PE continues before all have received all data.
    Bulk,
    /// Signals only: a PE continues once it has received its own data.
    OneSided,
    /// `MPI_Alltoallv`, the baseline, if the transport supports it.
    Alltoallv,
}

impl StragglerMode {
    /// The name, as used in files too.
    pub fn name(self) -> &'static str {
        match self {
            StragglerMode::Bulk => "bulk",
            StragglerMode::OneSided => "one-sided",
            StragglerMode::Alltoallv => "alltoallv",
        }
    }
}

/// Injected noise.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inject {
    /// A PE's compute time is multiplied by a factor.
    SlowPe {
        /// The PE.
        pe: usize,
        /// The factor, at least 1.
        factor: f64,
    },
    /// Messages from one PE to another are delayed.
    SlowLink {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Microseconds.
        us: f64,
    },
    /// Every PE's compute time is extended by a random time.
    Jitter {
        /// Microseconds.
        us: f64,
    },
}

/// Measures all-to-all steps, and how much single PEs delay them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StragglerBench {
    /// Number of PEs.
    pub pes: usize,
    /// Measured steps.
    pub steps: usize,
    /// Warm-up steps.
    pub warmup: usize,
    /// Bytes of each message.
    pub bytes: usize,
    /// Mean compute time of a PE in a step, microseconds.
    pub compute_us: f64,
    /// Compute time of the most loaded PE of a step relative to the mean, from 1 to the number of PEs. A random PE is the most loaded one
    /// in each step.
    pub imbalance: f64,
    /// Modes, measured one after the other.
    pub modes: Vec<StragglerMode>,
    /// Injected noise.
    pub inject: Vec<Inject>,
    /// The seed for imbalance and jitter.
    pub seed: u64,
    /// Maximum time for which a PE waits for another.
    pub wait_limit: Duration,
}

impl StragglerBench {
    /// Checks that the numbers are in their ranges.
    ///
    /// # Errors
    /// Returns an error that names the first field that is out of range.
    pub fn validate(&self) -> Result<(), FieldError> {
        const MOST: usize = 1 << 20;
        let n = self.pes;
        let range = |field, value: &dyn fmt::Display, ok, expected: &str| match ok {
            true => Ok(()),
            false => Err(FieldError::new(field, value, expected)),
        };
        range("steps", &self.steps, self.steps > 0, "at least 1")?;
        for (field, value) in [("steps", self.steps), ("warmup", self.warmup)] {
            range(field, &value, value <= MOST, &format!("at most {MOST}"))?;
        }
        const MICROSECONDS: &str = "0 to 10^7 microseconds";
        let is_time = |us: f64| (0.0..=1e7).contains(&us);
        range("compute_us", &self.compute_us, is_time(self.compute_us), MICROSECONDS)?;
        let balanced = (1.0..=n as f64).contains(&self.imbalance);
        range("imbalance", &self.imbalance, balanced, &format!("1 to {n}, the number of PEs"))?;
        self.inject.iter().try_for_each(|inject| self.validate_inject(*inject))
    }

    fn validate_inject(&self, inject: Inject) -> Result<(), FieldError> {
        let n = self.pes;
        let part = |ok, value: String, expected: &str| match ok {
            true => Ok(()),
            false => Err(FieldError { field: "inject", value, expected: expected.to_string() }),
        };
        let there =
            |kind: &str, pe: usize| part(pe < n, format!("{kind}: PE {pe}"), &format!("one below `pes`, which is {n}"));
        let time =
            |kind: &str, us: f64| part((0.0..=1e7).contains(&us), format!("{kind} is {us}"), "0 to 10^7 microseconds");
        match inject {
            Inject::SlowPe { pe, factor } => {
                there("slow-pe", pe)?;
                part((1.0..=1e6).contains(&factor), format!("slow-pe: factor {factor}"), "1 to 10^6")
            }
            Inject::SlowLink { from, to, us } => {
                there("slow-link", from)?;
                there("slow-link", to)?;
                part(from != to, format!("slow-link: PE {from} to itself"), "two PEs")?;
                time("slow-link", us)
            }
            Inject::Jitter { us } => time("jitter", us),
        }
    }
}
