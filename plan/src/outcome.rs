//! The outcome of planning.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Objective, Workload};

/// The objective's parts: `objective_ms = gamma * (compute_ms + communication_ms) + all_reduce_ms`, of the group that the
/// objective is the maximum of.
///
/// By the published objective, compute is the experts' costs over the group's rate, and communication the exchange in even shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Terms {
    /// Passes of an MoE layer per iteration.
    pub gamma: f64,
    /// The longest time of a device of the group for its experts.
    pub compute_ms: f64,
    /// Exchanges per pass times the longest exchange of a device of the group.
    pub communication_ms: f64,
    /// The all-reduces of gradients between groups and, with replicas, between an expert's holders.
    pub all_reduce_ms: f64,
}

/// One expert-parallel group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedGroup {
    /// Ids of its devices, in the cluster's order.
    pub devices: Vec<u64>,
    /// The group's objective; the plan's is the largest.
    pub objective_ms: f64,
    /// By device id, the experts that it holds, ascending.
    pub experts: BTreeMap<u64, Vec<u32>>,
    /// The longest time of a device for its experts in one pass: of the group's tokens, or by the published objective of one device's.
    pub makespan_ms: f64,
    /// With [`Options::replicas`](crate::Options::replicas): no placement of the group with as many replicas has a smaller makespan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_makespan_ms: Option<f64>,
    /// The experts that several of its devices hold, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<PlannedReplicas>,
}

/// An expert with replicas in a group, and the share of its tokens that each device sends to each of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedReplicas {
    /// The expert.
    pub expert: u32,
    /// Ids of the devices that hold it, in the cluster's order.
    pub devices: Vec<u64>,
    /// `[the group's devices, devices]`: of each device's tokens with this expert the share that goes to each that holds it.
    pub split: Vec<Vec<f64>>,
}

/// Groups and placement. As JSON it is what `aristos plan --json` prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Plan {
    /// True; see [`Outcome`].
    pub feasible: bool,
    /// The planned workload; `None` in plans without the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<Workload>>,
    /// What was minimised. Plans that do not say so are of before there was a choice.
    #[serde(default = "before_objectives")]
    pub objective: Objective,
    /// What chose the groups: "exact", "search" or "lysi".
    pub algorithm: String,
    /// Whether there is no lower objective.
    pub optimal: bool,
    /// The objective is at most this share above the least possible one: objective / lower bound - 1.
    pub gap_bound: f64,
    /// The objective.
    pub objective_ms: f64,
    /// Its parts.
    pub terms: Terms,
    /// The groups, by their first device.
    pub groups: Vec<PlannedGroup>,
    /// Ids of the devices in no group.
    pub idle_devices: Vec<u64>,
    /// Time that planning took.
    pub elapsed_ms: f64,
}

fn before_objectives() -> Objective {
    Objective::Published
}

/// There is no plan, for lack of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Infeasible {
    /// False.
    pub feasible: bool,
    /// The missing memory.
    pub shortage: String,
    /// Time that planning took.
    pub elapsed_ms: f64,
}

/// The outcome of planning.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// A plan.
    Plan(Plan),
    /// There is none.
    Infeasible(Infeasible),
}

impl Outcome {
    /// As JSON, indented, with the keys of `docs/planner.md`.
    pub fn to_json(&self) -> String {
        let json = match self {
            Outcome::Plan(plan) => serde_json::to_string_pretty(plan),
            Outcome::Infeasible(infeasible) => serde_json::to_string_pretty(infeasible),
        };
        json.expect("maps have string keys, and numbers are finite")
    }
}
