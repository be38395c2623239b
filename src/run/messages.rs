//! The messages of a PE, and the names of the files that PEs write.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::report::{PeReport, TraceSpan, nulls_are_nan};

/// Name of the job's file of results.
pub const RESULTS: &str = "results";
/// Name of the job's file of weights.
pub const WEIGHTS: &str = "weights";
/// Name of the job's file of the experts chosen in the last step, `[tokens, top_k]` u32, little-endian.
pub const CHOSEN: &str = "chosen";

/// Name of the job's file of the experts chosen in every step, `[steps, tokens, top_k]` u32, little-endian. A choice beyond the capacity is
/// [`NO_EXPERT`](crate::moe::NO_EXPERT).
pub const ROUTING: &str = "routing";

/// A message of a PE to the supervisor.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// Spans for `--trace`, sent during the run.
    Spans(Vec<TraceSpan>),
    /// The PE has completed its steps.
    Done(Box<Done>),
}

/// The last message of a PE.
#[derive(Serialize, Deserialize)]
pub struct Done {
    /// The PE's measurements.
    pub report: PeReport,
    /// The weighted losses over all PEs' tokens, by name.
    #[serde(deserialize_with = "nulls_are_nan")]
    pub losses: BTreeMap<String, f64>,
}
