//! A new plan for measured loads, and the cost of moving to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use super::evaluate::indices;
use super::spread::evaluate_spreads;
use super::workload::Workload;
use super::{InputError, Plan};
use crate::cluster::{Cluster, LinkTable, Number, Range, parse_json};

/// Gain and cost of a change of plans.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Replan {
    /// Predicted time of an iteration with the plan in use, under the new loads: its [`Objective::Placed`](crate::Objective::Placed).
    pub current_ms: f64,
    /// Predicted time of an iteration with the new plan, under the new loads.
    pub planned_ms: f64,
    /// Gain per iteration; negative for a loss.
    pub gain_ms: f64,
    /// Number of experts that devices must receive.
    pub moved_experts: u64,
    /// Their size.
    pub moved_mb: f64,
    /// Time to move them: each from the nearest holder, serially per device and direction.
    pub move_ms: f64,
    /// Iterations after which the gain has repaid the move; `None` without a gain.
    pub repaid_after_iterations: Option<f64>,
}

/// Reads the tokens of each expert from a report of `aristos run --json`.
///
/// # Errors
/// Returns an error that names the path inside the text, the value found and the expected one.
pub fn loads_of_report(text: &str) -> Result<Vec<f64>, InputError> {
    #[derive(Deserialize)]
    struct Report {
        tokens_per_expert: Vec<Number>,
    }
    let report: Report = parse_json(text)?;
    let tokens = report.tokens_per_expert.iter().enumerate();
    tokens.map(|(e, x)| Range::NonNegative.check(x.0, || format!("tokens_per_expert[{e}]"))).collect()
}

/// Compares the plan in use with a new one, both under `workload`'s loads; an expert is `expert_mb` large.
///
/// # Errors
/// Returns an error if the plan in use does not match the cluster and the experts.
pub fn replan(
    cluster: &Cluster,
    workload: &Workload,
    current: &Plan,
    planned: &Plan,
    expert_mb: f64,
) -> Result<Replan, InputError> {
    let index: HashMap<u64, u32> = cluster.devices.iter().map(|device| device.id).zip(0..).collect();
    check(cluster, workload, current)?;
    let current_ms = placed_ms(cluster, workload, current);
    let planned_ms = placed_ms(cluster, workload, planned);
    let held = |plan: &Plan| -> BTreeMap<u32, BTreeSet<u32>> {
        let devices = plan.groups.iter().flat_map(|group| &group.experts);
        devices.map(|(id, experts)| (index[id], experts.iter().copied().collect())).collect()
    };
    let (before, after) = (held(current), held(planned));
    let mut holders: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (&device, experts) in &before {
        experts.iter().for_each(|&e| holders.entry(e).or_default().push(device));
    }
    let mut moved_experts = 0;
    let (mut to, mut from) = (vec![0.0f64; cluster.devices.len()], vec![0.0f64; cluster.devices.len()]);
    for (&device, experts) in &after {
        for expert in experts.iter().filter(|e| !before.get(&device).is_some_and(|held| held.contains(e))) {
            moved_experts += 1;
            let time = |&from: &u32| cluster.links.link(from as usize, device as usize).time_ms(expert_mb);
            let nearest = holders.get(expert).into_iter().flatten().min_by(|a, b| time(a).total_cmp(&time(b)));
            if let Some(nearest) = nearest {
                to[device as usize] += time(nearest);
                from[*nearest as usize] += time(nearest);
            }
        }
    }
    let move_ms = to.into_iter().chain(from).fold(0.0, f64::max);
    let gain_ms = current_ms - planned_ms;
    Ok(Replan {
        current_ms,
        planned_ms,
        gain_ms,
        moved_experts,
        moved_mb: moved_experts as f64 * expert_mb,
        move_ms,
        repaid_after_iterations: (gain_ms > 0.0).then(|| move_ms / gain_ms),
    })
}

/// The placed objective of a plan.
fn placed_ms(cluster: &Cluster, workload: &Workload, plan: &Plan) -> f64 {
    let (groups, spreads) = indices(cluster, plan);
    evaluate_spreads(cluster, workload, &groups, &spreads).objective_ms
}

/// Checks that a plan, read from a file, matches these devices and experts.
///
/// # Errors
/// Returns an error that names the path inside the plan, the value found and the expected one.
pub fn check(cluster: &Cluster, workload: &Workload, plan: &Plan) -> Result<(), InputError> {
    let index: BTreeSet<u64> = cluster.devices.iter().map(|device| device.id).collect();
    let wrong = |field: String, found: String, expected: String| Err(InputError::Value { field, found, expected });
    if plan.groups.is_empty() {
        return wrong("groups".into(), "is empty".into(), "at least one group".into());
    }
    let n_experts = workload.n_experts();
    let mut used = BTreeSet::new();
    for (g, group) in plan.groups.iter().enumerate() {
        for (place, id) in group.devices.iter().enumerate() {
            let path = format!("groups[{g}].devices[{place}]");
            if !index.contains(id) {
                return wrong(path, format!("is {id}"), "the id of a device of the cluster".into());
            }
            if !used.insert(id) {
                return wrong(path, format!("is {id}"), "a device that is in no other place".into());
            }
        }
        for (r, replicas) in group.replicas.iter().enumerate() {
            let path = format!("groups[{g}].replicas[{r}]");
            let e = replicas.expert;
            let holds = |id: &u64| group.experts.get(id).is_some_and(|held| held.contains(&e));
            let holders: BTreeSet<u64> = group.experts.keys().copied().filter(holds).collect();
            if replicas.devices.len() != holders.len() || !replicas.devices.iter().all(|id| holders.contains(id)) {
                let expected = format!("the devices that hold expert {e}");
                return wrong(path + ".devices", format!("is {:?}", replicas.devices), expected);
            }
            let share = |share: &f64| (0.0..=1.0 + 1e-6).contains(share);
            let row = |row: &Vec<f64>| {
                row.len() == holders.len() && row.iter().all(share) && (row.iter().sum::<f64>() - 1.0).abs() < 1e-6
            };
            if replicas.split.len() != group.devices.len() || !replicas.split.iter().all(row) {
                let (rows, columns) = (group.devices.len(), holders.len());
                let expected = format!("{rows} rows of {columns} shares that sum to 1");
                return wrong(path + ".split", String::new(), expected);
            }
        }
        let mut seen = vec![false; n_experts];
        for (id, experts) in &group.experts {
            let path = format!("groups[{g}].experts.{id}");
            if !group.devices.contains(id) {
                return wrong(path, String::new(), "the id of a device of the group".into());
            }
            for &e in experts {
                let split = group.replicas.iter().any(|replicas| replicas.expert == e);
                let new = seen.get_mut(e as usize).is_some_and(|seen| !std::mem::replace(seen, true) || split);
                if !new {
                    let expected = format!("each of {n_experts} experts once in the group");
                    return wrong(path, format!("has {e}"), expected);
                }
            }
        }
        if let Some(e) = seen.iter().position(|seen| !seen) {
            let expected = format!("each of {n_experts} experts once");
            return wrong(format!("groups[{g}].experts"), format!("lacks expert {e}"), expected);
        }
    }
    Ok(())
}
