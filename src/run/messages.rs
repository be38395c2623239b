//! The messages and the result files between a PE and the process that reports.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::report::{PeReport, TraceSpan};

/// The files that the supervisor hands to the PEs.
pub const RESULTS: &str = "results";
/// The weights at the end.
pub const WEIGHTS: &str = "weights";
/// The experts chosen for each token, `[tokens, top_k]` u32, little-endian.
pub const CHOSEN: &str = "chosen";

/// The experts chosen in every step, `[steps, tokens, top_k]` u32, little-endian; [`NO_EXPERT`](crate::moe::NO_EXPERT) for what a capacity left out.
pub const ROUTING: &str = "routing";

/// What a PE tells the supervisor.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// What it did when, where a trace was asked for: from time to time, so that nobody has to keep it.
    Spans(Vec<TraceSpan>),
    /// Its steps are done.
    Done(Box<Done>),
}

/// What a PE tells the supervisor at its end.
#[derive(Serialize, Deserialize)]
pub struct Done {
    /// Its measurements.
    pub report: PeReport,
    /// The losses over all PEs' tokens, by name, weighted.
    pub losses: BTreeMap<String, f64>,
}
