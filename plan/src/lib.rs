//! The planner: expert-parallel groups and the placement of experts in them. Lysi, the published algorithm, is one of its algorithms.
//!
//! [`plan`] takes a [`Cluster`] and a [`Workload`] and returns an [`Outcome`]: a [`Plan`], or the reason why there is none. `placed/mod.rs` defines the
//! default objective, `objective.rs` the published one. `docs/planner.md` describes the algorithms. A workload is read from a file or
//! computed from a [`Model`] and a [`Batch`]. [`Options::replicas`] lets devices share hot experts; [`rebalance_experts`] replicates
//! them as EPLB does.
//!
//! Units are those of the files: ms, MB of 10^6 bytes, FLOP per ms.
//!
//! # Example
//! ```
//! use aristos_plan::cluster::preset;
//! use aristos_plan::{Options, Outcome, Workload, plan};
//!
//! let cluster = preset("dgx-h100:2")?;
//! let workload = Workload::from_json(
//!     r#"{"expert_flop": [2e10, 2e10, 2e10, 2e10, 2e10, 2e10, 2e10, 2e10], "p2p_buffer_mb": 16, "p2p_frequency": 4,
//!         "all_reduce_buffer_mb": 400, "num_layers": 24, "moe_frequency": 2, "global_batch_size": 256,
//!         "mini_batch_size": 4, "recomputation_amount": 1}"#,
//! )?;
//! let Outcome::Plan(plan) = plan(&cluster, &workload, Options::default())? else { panic!("8 experts fit anywhere") };
//! let devices: usize = plan.groups.iter().map(|group| group.devices.len()).sum();
//! assert_eq!(devices, 16);
//! // Every group holds every expert, once.
//! for group in &plan.groups {
//!     let mut experts: Vec<u32> = group.experts.values().flatten().copied().collect();
//!     experts.sort();
//!     assert_eq!(experts, [0, 1, 2, 3, 4, 5, 6, 7]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod anneal;
mod bound;
mod choose;
mod chosen;
mod error;
mod evaluate;
mod exact;
mod explain;
mod lysi;
mod objective;
mod options;
mod outcome;
mod placed;
mod placement;
mod replan;
mod replicate;
mod search;
mod spread;
mod state;

use std::time::Instant;

use crate::cluster::Cluster;
pub use aristos_balance::{
    Rebalance, Rebalanced, expert_weights, placement_in_use, rebalance_auto, rebalance_experts, rebalance_with,
};
use aristos_formats::workload;
pub use aristos_formats::{Batch, InputError, MODELS, Model, Workload, cluster};
use choose::{choose, place};
use chosen::Chosen;
pub use error::PlanError;
use evaluate::{evaluate, indices, terms};
pub use explain::{Alternative, Explanation, explain};
use options::placement_kind;
pub use options::{Algorithm, Objective, Options, PlacementKind, Replication};
pub use outcome::{Infeasible, Outcome, Plan, PlannedGroup, PlannedReplicas, Terms};
pub use replan::{Replan, check, loads_of_report, replan};

/// Plans groups and placement.
///
/// # Errors
/// Returns [`PlanError::Unproved`] with [`Algorithm::Exact`] only, and [`PlanError::Input`] if memory in MB is given without `expert_mb` or replicas are
/// requested under the published objective.
pub fn plan(cluster: &Cluster, workload: &Workload, options: Options) -> Result<Outcome, PlanError> {
    plan_from(cluster, workload, options, None)
}

/// Plans while `current` is in use. With replicas, its groups stay and its experts move only for balance; without, `current` is ignored.
///
/// # Errors
/// As [`plan`], and [`PlanError::Input`] if `current` does not match the cluster and the experts.
pub fn plan_from(
    cluster: &Cluster,
    workload: &Workload,
    options: Options,
    current: Option<&Plan>,
) -> Result<Outcome, PlanError> {
    let cluster = &*workload.on(cluster)?;
    let start = Instant::now();
    let elapsed_ms = || start.elapsed().as_secs_f64() * 1e3;
    if let Some(shortage) = shortage(cluster, workload) {
        return Ok(Outcome::Infeasible(Infeasible { feasible: false, shortage, elapsed_ms: elapsed_ms() }));
    }
    if let (Some(replication), Some(current), Objective::Placed) = (options.replicas, current, options.minimised()) {
        replan::check(cluster, workload, current)?;
        let mut plan = Plan { workload: Some(Box::new(workload.clone())), ..current.clone() };
        let replicated = replicate::from_current(cluster, workload, replication, indices(cluster, current));
        replicate::enter(&mut plan, cluster, workload, replicated);
        plan.elapsed_ms = elapsed_ms();
        return Ok(Outcome::Plan(plan));
    }
    let chosen = choose(cluster, workload, options)?;
    let mut plan = assemble(cluster, workload, &chosen, options);
    if let Some(replication) = options.replicas {
        if options.minimised() == Objective::Published {
            let expected = "the placed one, by which experts are whole";
            return Err(InputError::value("replicas", "are asked for under the published objective", expected).into());
        }
        if let Some(replicated) = replicate::replicate(cluster, workload, &chosen, replication) {
            replicate::enter(&mut plan, cluster, workload, replicated);
        }
    }
    plan.elapsed_ms = elapsed_ms();
    Ok(Outcome::Plan(plan))
}

/// Why there is no plan: together the devices hold fewer experts than one group needs.
fn shortage(cluster: &Cluster, workload: &Workload) -> Option<String> {
    let held = cluster.devices.iter().fold(0u64, |sum, device| sum.saturating_add(device.memory_experts));
    let needed = workload.n_experts() as u64;
    let devices = match cluster.devices.len() {
        1 => "the one device holds".to_string(),
        n => format!("all {n} devices together hold"),
    };
    // Often one expert of all layers is too large for a device.
    let size = workload.expert_mb.filter(|_| cluster.devices.iter().any(|device| device.memory_mb.is_some()));
    let size = size.map_or(String::new(), |mb| {
        let layers = workload.moe_layers();
        format!(" (an expert takes {} MB in its {layers} layers)", mb * layers)
    });
    (held < needed)
        .then(|| format!("memory: a group holds all {needed} experts, {devices} {held}: {} short{size}", needed - held))
}

/// The objective of groups, ms; devices are indices in the cluster. Under [`Objective::Placed`] with the best placement found. Returns `None` if a group's
/// memory does not hold all experts. Devices may be left out; groups must be disjoint and not empty.
pub fn objective_ms(cluster: &Cluster, workload: &Workload, groups: &[Vec<u32>], objective: Objective) -> Option<f64> {
    let cluster = &*workload.on(cluster).ok()?;
    let held = |members: &Vec<u32>| {
        members.iter().fold(0u64, |sum, &i| sum.saturating_add(cluster.devices[i as usize].memory_experts))
    };
    if groups.iter().any(|members| held(members) < workload.n_experts() as u64) {
        return None;
    }
    match objective {
        Objective::Placed => placed::choose::evaluate_groups(cluster, workload, groups),
        Objective::Published => Some(evaluate(cluster, workload, groups, None)),
    }
    .map(|evaluation| evaluation.objective_ms)
}

fn assemble(cluster: &Cluster, workload: &Workload, chosen: &Chosen, options: Options) -> Plan {
    let evaluation = &chosen.evaluation;
    let placements = match &chosen.placements {
        Some(placements) => placements.iter().cloned().zip(evaluation.compute_ms.iter().copied()).collect(),
        None => place(cluster, &workload.costs(), &chosen.groups, placement_kind(options)),
    };
    let id = |i: u32| cluster.devices[i as usize].id;
    let groups = chosen.groups.iter().zip(placements).enumerate().map(|(g, (members, (placement, makespan_ms)))| {
        let ids: Vec<u64> = members.iter().map(|&i| id(i)).collect();
        let experts = ids.iter().copied().zip(placement).collect();
        PlannedGroup {
            devices: ids,
            objective_ms: evaluation.group_ms(g),
            experts,
            makespan_ms,
            least_makespan_ms: None,
            replicas: Vec::new(),
        }
    });
    let mut idle = vec![true; cluster.devices.len()];
    chosen.groups.iter().flatten().for_each(|&i| idle[i as usize] = false);
    // Finite, because JSON has no infinity. A lower bound of 0 has no relative gap.
    let gap = match chosen.optimal {
        true => 0.0,
        false => (evaluation.objective_ms / chosen.bound_ms - 1.0).clamp(0.0, f64::MAX),
    };
    Plan {
        feasible: true,
        workload: Some(Box::new(workload.clone())),
        objective: options.minimised(),
        algorithm: chosen.algorithm.to_string(),
        optimal: chosen.optimal,
        gap_bound: gap,
        objective_ms: evaluation.objective_ms,
        terms: terms(evaluation),
        groups: groups.collect(),
        idle_devices: cluster.devices.iter().zip(idle).filter(|(_, idle)| *idle).map(|(d, _)| d.id).collect(),
        elapsed_ms: 0.0,
    }
}
