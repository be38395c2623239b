//! The measurements of one PE.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::non_finite::NonFinite;

/// One PE's part of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeReport {
    /// The PE's number.
    pub pe: usize,
    /// This PE's tokens of the input.
    pub tokens: u64,
    /// Number of measured steps, without warm-up.
    pub n_steps: u64,
    /// The measured steps in order, or a sample of many, which is the same on all PEs ([`StepSample`](super::StepSample)).
    pub steps: Vec<StepReport>,
    /// Time from the beginning of the first step to the end of the last, including work between steps, seconds.
    #[serde(default)]
    pub all_steps_s: f64,
    /// Rounds through the receive memory, the maximum over the steps: of the forward and of the backward pass.
    pub rounds: [u64; 2],
    /// Traffic to other PEs over all measured steps.
    pub traffic: TrafficReport,
    /// Rows that its experts received in the last step, including rows of its own tokens.
    pub expert_rows: Vec<ExpertRows>,
    /// "cpu", or the device's name.
    pub device: String,
    /// The CPUs on which the PE was allowed to run; empty on a device.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// Transport of rows and signals: "shm", "tcp", "hybrid", "ofi", "mpi", "nvshmem", or "nccl".
    #[serde(default)]
    pub transport: String,
    /// The device's matrix products: "ampere" or "hopper"; `None` on a CPU.
    pub gemm: Option<String>,
    /// Tiles of the matrix products, such as "128x256"; `None` on a CPU.
    #[serde(default)]
    pub tile: Option<String>,
    /// Symmetric memory of the PE.
    pub symmetric: SymmetricMemory,
    /// Changes of the plan during the run, on all PEs the same except for their times.
    #[serde(default)]
    pub replanned: Vec<Replanned>,
    /// The first values found that are not finite.
    #[serde(default)]
    pub non_finite: Vec<NonFinite>,
}

/// One step of one PE.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The forward pass.
    pub forward: PassReport,
    /// The backward pass, if there is one.
    pub backward: Option<PassReport>,
    /// The experts of the PE, each with its rows.
    #[serde(default)]
    pub expert_rows: Vec<(usize, u64)>,
}

impl StepReport {
    /// Time of both passes, seconds.
    pub fn seconds(&self) -> f64 {
        self.forward.seconds + self.backward.as_ref().map_or(0.0, |backward| backward.seconds)
    }

    /// Processor time of the experts in both passes, seconds.
    pub fn expert_cpu_s(&self) -> f64 {
        self.forward.expert_cpu_s + self.backward.as_ref().map_or(0.0, |backward| backward.expert_cpu_s)
    }
}

/// One pass of one step of one PE.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// Wall time of the pass, seconds: the sum of its phases, which follow each other without gaps.
    pub seconds: f64,
    /// Time by phase (the keys of [`PHASES`](super::PHASES)), seconds.
    pub phases_s: BTreeMap<String, f64>,
    /// Processor time of the experts' work, seconds; 0 on a device.
    #[serde(default)]
    pub expert_cpu_s: f64,
    /// Rounds through the receive memory.
    pub rounds: u64,
}

/// One-sided operations to other PEs, without those on the PE's own heap.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrafficReport {
    /// Bytes put, by kind ("dispatch_rows", "combine_rows", "counts", ...).
    pub remote_bytes: BTreeMap<String, u64>,
    /// Number of puts, including those with a signal. Operations of gradient sums count on devices only, and operations of collectives on CPUs
    /// never.
    pub puts: u64,
    /// Number of signal operations, including those of puts.
    pub signals: u64,
    /// Number of fences.
    pub fences: u64,
    /// Bytes put to PEs of other hosts.
    #[serde(default)]
    pub network_bytes: u64,
    /// Rows and partial results between a relay and the other PEs of its host, with rows once per host, bytes.
    #[serde(default)]
    pub relay_bytes: u64,
}

impl TrafficReport {
    /// Adds the traffic of another PE.
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

/// The rows of an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRows {
    /// The expert's number in the layer.
    pub expert: usize,
    /// Rows: pairs of a token and this expert.
    pub rows: u64,
}

/// Symmetric memory of one PE, or the maximum over the PEs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymmetricMemory {
    /// Bytes allocated at the end.
    pub used_bytes: u64,
    /// Maximum bytes allocated at any time.
    pub peak_bytes: u64,
    /// Size of the heap, bytes.
    pub budget_bytes: u64,
}

/// An interval of a PE's time for the trace. Spans of one track are nested or disjoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSpan {
    /// Name of the phase.
    pub name: String,
    /// Start, nanoseconds of CLOCK_MONOTONIC, which the PEs of a host share.
    pub start_ns: u64,
    /// Duration, nanoseconds.
    pub dur_ns: u64,
    /// The step.
    pub step: u64,
    /// The concurrent activity, such as the block of a kernel; 0 on a CPU.
    #[serde(default)]
    pub track: u64,
}

/// A change of the plan during the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replanned {
    /// Number of completed steps.
    pub after_step: u64,
    /// Predicted time of a step with the old plan under the measured loads, seconds.
    pub current_s: f64,
    /// Predicted time of a step with the new plan, seconds.
    pub planned_s: f64,
    /// Number of experts that were sent to a PE.
    pub moved_experts: u64,
    /// Predicted time of the move, seconds.
    pub predicted_move_s: f64,
    /// Measured time of the move on PE 0, seconds.
    pub move_s: f64,
}
