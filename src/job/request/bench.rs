//! Benchmarks.

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

/// The layer against the bare GEMMs of its experts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MoeBench {
    /// Number of PEs.
    pub pes: usize,
    /// The layer and its workload.
    pub layer: SyntheticSpec,
    /// The file of the tokens' experts, in place of the router's choice.
    #[serde(with = "optional_path_bytes")]
    pub routing: Option<PathBuf>,
    /// Tokens, over all PEs.
    pub tokens: usize,
    /// What computes.
    pub device: DeviceKind,
    /// What gives CUDA devices symmetric memory.
    #[cfg(feature = "device")]
    #[serde(default)]
    pub symmetric: SymmetricBy,
    /// On a device, which matrix products; by the device where `None`.
    #[cfg(feature = "device")]
    pub gemm: Option<GemmPath>,
    /// The tiles that these are cut into; by the layer's shape where `None`.
    #[cfg(feature = "device")]
    pub tile: Option<Tile>,
    /// Whether lanes store results of 16 bits, and copy operands, where Hopper's tensor memory accelerator could.
    #[cfg(feature = "device")]
    #[serde(default)]
    pub lane_stores: bool,
    /// Element types, measured one after the other.
    pub dtypes: Vec<Dtype>,
    /// How the layer runs; the mode is the measurement's.
    pub options: Options,
    /// Iterations that are not kept.
    pub warmup: usize,
    /// Iterations that are kept.
    pub iterations: usize,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// A put, and quiet.
    Put,
    /// A non-blocking put and quiet; the time until the call returns apart.
    PutNbi,
    /// A get.
    Get,
    /// A put with a signal there, and one back.
    PutSignal,
    /// A fetch-and-add of 8 bytes.
    Atomic,
    /// A send there and one back, matched by receives.
    SendRecv,
}

impl Op {
    /// Its name, in files too.
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

    /// The scopes that it has on a device.
    pub fn scopes(self) -> &'static [Scope] {
        match self {
            Op::Put | Op::Get | Op::PutSignal => &Scope::ALL,
            Op::PutNbi => &[Scope::Thread, Scope::Warp, Scope::Block],
            Op::SendRecv => &[Scope::Stream],
            Op::Atomic => &[],
        }
    }
}

/// Which threads of a device work on one operation, or whether none does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// One thread.
    Thread,
    /// The 32 threads of a warp.
    Warp,
    /// The threads of a block.
    Block,
    /// None: the host asks for it, and the stream does it.
    Stream,
}

impl Scope {
    /// All of them.
    pub const ALL: [Scope; 4] = [Scope::Thread, Scope::Warp, Scope::Block, Scope::Stream];

    /// Its name, in files too.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Thread => "thread",
            Scope::Warp => "warp",
            Scope::Block => "block",
            Scope::Stream => "stream",
        }
    }
}

/// One-sided operations between two PEs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct P2pBench {
    /// Operations.
    pub ops: Vec<Op>,
    /// Scopes, for a device; each operation is measured in those of them that it has.
    pub scopes: Vec<Scope>,
    /// Whether the operations were asked for, and the scopes: what cannot be measured here is an error then, and left out
    /// of all that there is.
    pub asked: (bool, bool),
    /// Sizes, bytes, ascending.
    pub sizes: Vec<usize>,
    /// The pairs of PEs, measured one after the other; the first of each begins.
    pub pairs: Vec<[usize; 2]>,
    /// Number of PEs.
    pub pes: usize,
    /// Samples that count; large sizes have fewer.
    pub iterations: usize,
    /// Samples before them.
    pub warmup: usize,
    /// Whether the operations are those of NVSHMEM, between devices.
    pub on_device: bool,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
}

/// How the PEs of a step wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StragglerMode {
    /// A barrier before and after: nobody is through before everybody has everything.
    Bulk,
    /// Signals alone: a PE goes on when it has what was sent to it.
    OneSided,
    /// `MPI_Alltoallv`, the baseline, for transports that have it.
    Alltoallv,
}

impl StragglerMode {
    /// Its name, in files too.
    pub fn name(self) -> &'static str {
        match self {
            StragglerMode::Bulk => "bulk",
            StragglerMode::OneSided => "one-sided",
            StragglerMode::Alltoallv => "alltoallv",
        }
    }
}

/// Noise that is made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inject {
    /// A PE computes this many times as long.
    SlowPe {
        /// The PE.
        pe: usize,
        /// At least 1.
        factor: f64,
    },
    /// Messages from one PE to another take this much longer.
    SlowLink {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Microseconds.
        us: f64,
    },
    /// Every PE computes longer by a random time, up to this.
    Jitter {
        /// Microseconds.
        us: f64,
    },
}

/// All-to-all steps, and whom they wait for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StragglerBench {
    /// Number of PEs.
    pub pes: usize,
    /// Steps that count.
    pub steps: usize,
    /// Steps before them.
    pub warmup: usize,
    /// Bytes of each message.
    pub bytes: usize,
    /// Mean time a PE computes in a step, microseconds.
    pub compute_us: f64,
    /// Compute of the most loaded PE of a step over the mean, 1 to the number of PEs; which PE it is, the seed decides anew
    /// for each step.
    pub imbalance: f64,
    /// Modes, measured one after the other.
    pub modes: Vec<StragglerMode>,
    /// Noise.
    pub inject: Vec<Inject>,
    /// Of imbalance and jitter.
    pub seed: u64,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
}

impl StragglerBench {
    /// Checks the numbers.
    ///
    /// # Errors
    /// Names the first field that is out of range.
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
