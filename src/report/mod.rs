//! The report of a run: the table it prints, the JSON of `--json`, and the trace of `--trace`.
//!
//! Every PE fills a [`PeReport`] and sends it to the supervisor as JSON; [`RunReport::merge`] makes one report of them. The
//! structs' fields are the keys of the JSON; `docs/report.md` lists them.
//!
//! Where there are several steps and several PEs, a time is the median over the steps of each PE, and of those the median
//! and the maximum over the PEs.

mod cluster;
mod pe;
mod plan;
mod run;
mod sample;
pub(crate) mod table;
mod trace;

pub(crate) use cluster::cluster_text;
pub use pe::{ExpertRows, PassReport, PeReport, Replanned, StepReport, SymmetricMemory, TraceSpan, TrafficReport};
pub(crate) use plan::{explanation_text, plan_text, rebalanced_text, replan_text};
pub(crate) use run::median;
pub use run::{
    CheckReport, LostGroups, PassTimes, PlanReport, PlanTimes, PlannedPes, RunConfig, RunReport, SliceCheck, Spread,
    TensorCheck,
};
pub use sample::StepSample;
pub use trace::{TraceWriter, simulated_trace_json};

/// The phases' keys, in the order of the table, and their names there.
pub const PHASES: [(&str, &str); 7] = [
    ("router", "router"),
    ("dispatch", "dispatch"),
    ("expert_gemm", "expert GEMM"),
    ("combine", "combine"),
    ("scale", "scale"),
    ("waiting", "waiting"),
    ("other", "other"),
];
