//! What one PE measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One PE's part of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeReport {
    /// The PE's number.
    pub pe: usize,
    /// Tokens of the input that are this PE's.
    pub tokens: u64,
    /// Number of measured steps; warm-up steps are not among them.
    pub n_steps: u64,
    /// They, in order; of many a sample, which is the same on all PEs ([`StepSample`](super::StepSample)).
    pub steps: Vec<StepReport>,
    /// From the first step's beginning to the last one's end, with what was done between steps, seconds.
    #[serde(default)]
    pub all_steps_s: f64,
    /// Rounds through the receive memory, the most of any step: of the forward pass, and of the backward pass.
    pub rounds: [u64; 2],
    /// What it sent, over all measured steps.
    pub traffic: TrafficReport,
    /// Rows its experts received in one step (the last), its own tokens' included.
    pub expert_rows: Vec<ExpertRows>,
    /// The device it ran on: "cpu", or the device's name.
    pub device: String,
    /// The CPUs that it was let run on, by their numbers; none where it ran on a device.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// What carried rows and signals: "shm", "tcp", "hybrid", "ofi", "mpi", "nvshmem", or "nccl".
    #[serde(default)]
    pub transport: String,
    /// The device's matrix products: "ampere" or "hopper"; `None` on a CPU.
    pub gemm: Option<String>,
    /// The tiles that these are cut into, as in "128x256"; `None` on a CPU.
    #[serde(default)]
    pub tile: Option<String>,
    /// Its symmetric memory.
    pub symmetric: SymmetricMemory,
    /// Changes of the plan while the steps ran, the same on all PEs but for times.
    #[serde(default)]
    pub replanned: Vec<Replanned>,
}

/// One step of one PE.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The forward pass.
    pub forward: PassReport,
    /// The backward pass, where there is one.
    pub backward: Option<PassReport>,
}

impl StepReport {
    /// Both passes, seconds.
    pub fn seconds(&self) -> f64 {
        self.forward.seconds + self.backward.as_ref().map_or(0.0, |backward| backward.seconds)
    }

    /// Processor time of the experts' work in both, seconds.
    pub fn expert_cpu_s(&self) -> f64 {
        self.forward.expert_cpu_s + self.backward.as_ref().map_or(0.0, |backward| backward.expert_cpu_s)
    }
}

/// One pass of one step of one PE.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// The sum of the pass's phases, seconds: its wall time, for they follow each other without a gap.
    pub seconds: f64,
    /// The same by phase (the keys of [`PHASES`](super::PHASES)), seconds.
    pub phases_s: BTreeMap<String, f64>,
    /// Processor time of the experts' work, seconds; 0 on a device.
    #[serde(default)]
    pub expert_cpu_s: f64,
    /// Rounds through the receive memory.
    pub rounds: u64,
}

/// One-sided operations to other PEs. What a PE does in its own heap is not counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrafficReport {
    /// Bytes put, by kind ("dispatch_rows", "combine_rows", "counts", ...).
    pub remote_bytes: BTreeMap<String, u64>,
    /// Number of puts, those with a signal included; here and below those of the sums of gradients are counted on devices, and of collectives on CPUs none.
    pub puts: u64,
    /// Number of signal operations, those of puts included.
    pub signals: u64,
    /// Number of fences.
    pub fences: u64,
    /// Of all bytes, those put to PEs that only a network reaches.
    #[serde(default)]
    pub network_bytes: u64,
    /// With rows once per host, rows and parts of results that went between a home and the other PEs of its host, bytes.
    #[serde(default)]
    pub relay_bytes: u64,
}

impl TrafficReport {
    /// Adds what another PE sent.
    pub(super) fn add(&mut self, other: &TrafficReport) {
        for (kind, bytes) in &other.remote_bytes {
            *self.remote_bytes.entry(kind.clone()).or_default() += bytes;
        }
        self.puts += other.puts;
        self.signals += other.signals;
        self.fences += other.fences;
        self.network_bytes += other.network_bytes;
        self.relay_bytes += other.relay_bytes;
    }
}

/// How many rows an expert received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRows {
    /// The expert's number in the layer.
    pub expert: usize,
    /// Rows: pairs of a token and this expert.
    pub rows: u64,
}

/// Symmetric memory of one PE, or the most of any PE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymmetricMemory {
    /// Allocated at the end, bytes.
    pub used_bytes: u64,
    /// The most that was allocated at any time, bytes.
    pub peak_bytes: u64,
    /// What may be allocated, bytes.
    pub budget_bytes: u64,
}

/// A piece of a PE's time, for the trace. Spans of one track of a PE are nested or disjoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSpan {
    /// What it did.
    pub name: String,
    /// When it began: CLOCK_MONOTONIC, which the PEs of a host share, nanoseconds.
    pub start_ns: u64,
    /// How long it took, nanoseconds.
    pub dur_ns: u64,
    /// In which step.
    pub step: u64,
    /// Which of the things that a PE does at the same time, such as the block of a kernel; 0 on a CPU.
    #[serde(default)]
    pub track: u64,
}

/// A change of plans while the steps ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replanned {
    /// After so many steps.
    pub after_step: u64,
    /// Predicted under the measured loads: a step by the plan in use, and by the new one, seconds.
    pub current_s: f64,
    /// See `current_s`.
    pub planned_s: f64,
    /// Experts that PEs got which they did not hold.
    pub moved_experts: u64,
    /// What moving them takes: predicted, and of PE 0, seconds.
    pub predicted_move_s: f64,
    /// See `predicted_move_s`.
    pub move_s: f64,
}
