//! Reports of commands: tables for a terminal, JSON, and traces.
//!
//! Every PE of a run sends a [`PeReport`] to the supervisor as JSON, and [`RunReport::merge`] merges them. The fields of the structs are the
//! keys of the JSON; `docs/report.md` lists them.
//!
//! A time over several steps and PEs is the median over the steps of each PE, then the median and the maximum over the PEs.

mod balance;
mod cluster;
mod models;
mod non_finite;
mod pe;
mod plan;
mod run;
mod run_text;
mod sample;
mod strategy;
pub(crate) mod text;
mod trace;

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

pub use balance::{Balance, LoadBalance};
pub(crate) use cluster::cluster_text;
pub(crate) use models::{exchange_text, linear_text, sweep_text};
pub(crate) use non_finite::nulls_are_nan;
pub use non_finite::{NonFinite, NonFiniteKind};
pub use pe::{ExpertRows, PassReport, PeReport, Replanned, StepReport, SymmetricMemory, TraceSpan, TrafficReport};
pub(crate) use plan::{explanation_text, plan_text, rebalanced_text, replan_text};
pub(crate) use run::median;
pub use run::{
    CheckReport, LostGroups, PassTimes, PlanReport, PlanTimes, PlannedPes, RunConfig, RunReport, SliceCheck, Spread,
    TensorCheck,
};
pub use sample::StepSample;
pub(crate) use strategy::{StrategyRow, launch_text, memory_text, strategies_text};
pub use trace::{TraceWriter, simulated_trace_json};

/// The result of a command.
pub trait Report: Serialize {
    /// The result as text for a terminal, ending with a newline.
    fn render_table(&self) -> String;

    /// The result as indented JSON.
    fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("maps have string keys, and nothing else can fail")
    }

    /// Writes the plots of the result in the formats of [`plot::save`](crate::plot::save); returns the files.
    ///
    /// # Errors
    /// A file that cannot be written.
    fn plot(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let _ = folder;
        Ok(Vec::new())
    }
}

/// The keys of the phases, in the order of the table, and their names there.
pub const PHASES: [(&str, &str); 7] = [
    ("router", "router"),
    ("dispatch", "dispatch"),
    ("expert_gemm", "expert GEMM"),
    ("combine", "combine"),
    ("scale", "scale"),
    ("waiting", "waiting"),
    ("other", "other"),
];
