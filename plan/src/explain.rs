//! Explains a plan: compares its groups with other groupings, and names the binding constraints.

use serde::{Deserialize, Serialize};

use super::choose::{LYSI_MOST, choose};
use super::evaluate::{evaluate, indices, terms};
use super::objective::Evaluation;
use super::placed::choose::evaluate_groups;
use super::spread::{Spread, evaluate_spreads, spread_times};
use super::workload::Workload;
use super::{Algorithm, Objective, Options, Plan, PlanError, Terms};
use crate::cluster::{Cluster, LinkTable};

/// Maximum number of alternatives with other numbers of groups.
const OTHERS: usize = 3;

/// One grouping, chosen or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Alternative {
    /// Its name.
    pub name: String,
    /// Number of groups.
    pub groups: usize,
    /// The objective of the grouping, computed as if memory sufficed.
    pub objective_ms: f64,
    /// The objective's parts.
    pub terms: Terms,
    /// Why the grouping cannot be chosen; `None` if it is valid.
    pub invalid: Option<String>,
}

/// The chosen groups, rejected ones, and the binding constraints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The chosen groups first, then the others, best first.
    pub alternatives: Vec<Alternative>,
    /// The parts of the objective and its binding constraints, a sentence each.
    pub binding: Vec<String>,
}

/// Explains a plan that [`plan`](super::plan) made of this cluster and workload with these options.
///
/// # Errors
/// As [`plan`](super::plan).
pub fn explain(
    cluster: &Cluster,
    workload: &Workload,
    options: Options,
    plan: &Plan,
) -> Result<Explanation, PlanError> {
    let cluster = &*workload.on(cluster)?;
    let (groups, spreads) = indices(cluster, plan);
    let all: Vec<u32> = (0..cluster.devices.len() as u32).collect();
    let options = options.objective(plan.objective);
    let searched = Options { algorithm: Algorithm::Search, ..options };
    let found = choose(cluster, workload, searched)?;
    let roomy = roomy(cluster, workload);
    // The cost of memory limits: a search without them.
    let free = match roomy.devices == cluster.devices {
        true => (found.groups.len(), found.evaluation.objective_ms),
        false => {
            let free = choose(&roomy, workload, searched)?;
            (free.groups.len(), free.evaluation.objective_ms)
        }
    };
    let mut others = vec![
        ("all together".to_string(), vec![all.clone()]),
        ("one per node".to_string(), cluster.hosts()),
        ("one per device".to_string(), all.iter().map(|&i| vec![i]).collect()),
    ];
    if options.algorithm == Algorithm::Lysi {
        others.push(("search".into(), found.groups));
    } else if cluster.devices.len() <= LYSI_MOST {
        let published = Options { algorithm: Algorithm::Lysi, ..options };
        others.push(("lysi".into(), choose(cluster, workload, published)?.groups));
    }
    others.extend(found.published.map(|groups| ("least published objective".to_string(), groups)));
    for other in found.others.into_iter().take(OTHERS) {
        others.push((format!("best found with {} groups", other.groups.len()), other.groups));
    }
    let mut alternatives: Vec<Alternative> = Vec::new();
    for (name, groups) in others {
        let evaluation = best_of(cluster, workload, plan.objective, &groups);
        alternatives.push(alternative(cluster, workload, name, &groups, &evaluation));
    }
    alternatives.sort_by(|a, b| {
        let key = |a: &Alternative| (a.invalid.is_some(), a.objective_ms);
        key(a).partial_cmp(&key(b)).expect("objectives are finite")
    });
    let evaluation = as_planned(cluster, workload, plan.objective, &groups, &spreads);
    alternatives.insert(0, alternative(cluster, workload, "chosen".into(), &groups, &evaluation));
    let binding = binding(cluster, workload, free, plan, (&groups, &spreads), &evaluation);
    Ok(Explanation { alternatives, binding })
}

/// The objective of a plan's groups.
fn as_planned(
    cluster: &Cluster,
    workload: &Workload,
    objective: Objective,
    groups: &[Vec<u32>],
    spreads: &[Spread],
) -> Evaluation {
    match objective {
        Objective::Placed => evaluate_spreads(cluster, workload, groups, spreads),
        Objective::Published => evaluate(cluster, workload, groups, None),
    }
}

/// The objective of any groups, as if memory sufficed.
fn best_of(cluster: &Cluster, workload: &Workload, objective: Objective, groups: &[Vec<u32>]) -> Evaluation {
    let placed = || match evaluate_groups(cluster, workload, groups) {
        None => evaluate_groups(&roomy(cluster, workload), workload, groups),
        some => some,
    };
    let placed = (objective == Objective::Placed).then(placed).flatten();
    placed.unwrap_or_else(|| evaluate(cluster, workload, groups, None))
}

/// The cluster with memory for all experts on every device.
fn roomy(cluster: &Cluster, workload: &Workload) -> Cluster {
    let mut roomy = cluster.clone();
    let needed = workload.n_experts() as u64;
    roomy.devices.iter_mut().for_each(|device| device.memory_experts = device.memory_experts.max(needed));
    roomy
}

fn alternative(
    cluster: &Cluster,
    workload: &Workload,
    name: String,
    groups: &[Vec<u32>],
    evaluation: &Evaluation,
) -> Alternative {
    let held = |members: &Vec<u32>| {
        members.iter().fold(0u64, |sum, &i| sum.saturating_add(cluster.devices[i as usize].memory_experts))
    };
    let needed = workload.n_experts() as u64;
    let least = groups.iter().map(held).min().unwrap_or(0);
    Alternative {
        name,
        groups: groups.len(),
        objective_ms: evaluation.objective_ms,
        terms: terms(evaluation),
        invalid: (least < needed).then(|| format!("a group holds {least} of {needed} experts")),
    }
}

fn binding(
    cluster: &Cluster,
    workload: &Workload,
    (free_groups, free_ms): (usize, f64),
    plan: &Plan,
    (groups, spreads): (&[Vec<u32>], &[Spread]),
    evaluation: &Evaluation,
) -> Vec<String> {
    let id = |i: u32| cluster.devices[i as usize].id;
    let Terms { gamma, compute_ms, communication_ms, all_reduce_ms } = plan.terms;
    let share = |ms: f64| if plan.objective_ms > 0.0 { 100.0 * ms / plan.objective_ms } else { 0.0 };
    let mut lines = vec![format!(
        "compute is {:.1}% of the objective, communication {:.1}%, the all-reduce {:.1}%",
        share(gamma * compute_ms),
        share(gamma * communication_ms),
        share(all_reduce_ms)
    )];
    let worst = evaluation.worst();
    if let (Some(members), Some(spread)) = (groups.get(worst), spreads.get(worst)) {
        let (computes, placed) = spread_times(cluster, workload, members, spread);
        let exchanges: Vec<f64> = match plan.objective {
            Objective::Placed => placed,
            Objective::Published => {
                let time = |(alpha, beta)| alpha + beta * (workload.p2p_buffer_mb / members.len() as f64);
                cluster.links.sums(members).into_iter().map(time).collect()
            }
        };
        let longest = (0..members.len()).fold(0, |l, i| if exchanges[i] > exchanges[l] { i } else { l });
        let (device, ms) = (id(members[longest]), exchanges[longest]);
        lines.push(format!(
            "group {worst} decides ({} devices); in it device {device} exchanges longest, {ms:.4} ms",
            members.len(),
        ));
        if plan.objective == Objective::Placed {
            let longest = (0..members.len()).fold(0, |l, i| if computes[i] > computes[l] { i } else { l });
            let held = match spread.held[longest].len() {
                1 => "1 expert".to_string(),
                n => format!("{n} experts"),
            };
            let (device, ms) = (id(members[longest]), evaluation.compute_ms[worst]);
            lines.push(format!("in it device {device} computes longest, {ms:.4} ms for {held}"));
        }
    }
    for (g, (group, spread)) in plan.groups.iter().zip(spreads).enumerate() {
        if let (Some(least), false) = (group.least_makespan_ms, spread.splits.is_empty()) {
            let copies: usize = spread.splits.values().map(|split| split.holders.len() - 1).sum();
            let over = if least > 0.0 { 100.0 * (group.makespan_ms / least - 1.0) } else { 0.0 };
            lines.push(format!(
                "group {g} has {copies} replicas, of {} experts: its longest compute is {:.4} ms, {over:.1}% above the least possible with so many",
                spread.splits.len(),
                group.makespan_ms
            ));
        }
    }
    if !plan.idle_devices.is_empty() {
        lines.push(format!("in no group: {}", devices(&plan.idle_devices)));
    }
    let empty: Vec<u64> = groups
        .iter()
        .zip(spreads)
        .flat_map(|(members, spread)| {
            members.iter().zip(&spread.held).filter(|(_, experts)| experts.is_empty()).map(|(&i, _)| id(i))
        })
        .collect();
    if !empty.is_empty() {
        lines.push(format!("in a group but without experts, so with nothing to compute: {}", devices(&empty)));
    }
    if let Some(edge) = evaluation.slowest {
        lines.push(format!(
            "between groups the link of devices {} and {} is slowest: alpha {} ms, beta {} ms/MB",
            id(edge.i),
            id(edge.j),
            edge.link.alpha_ms,
            edge.link.beta_ms_per_mb
        ));
    }
    // Memory binds if a search without its limits finds better groups.
    let needed = workload.n_experts();
    let groups = match free_groups {
        1 => "1 group".to_string(),
        n => format!("{n} groups"),
    };
    lines.push(if plan.groups.iter().any(|group| !group.replicas.is_empty()) {
        format!("without replicas, and with room for all {needed} experts on every device, {groups} would take {free_ms:.3} ms")
    } else if free_ms < plan.objective_ms * (1.0 - 1e-9) {
        format!(
            "memory binds: with room for all {needed} experts on every device, {groups} of {free_ms:.3} ms would do, {:.1}% \
             less",
            100.0 * (1.0 - free_ms / plan.objective_ms)
        )
    } else if plan.optimal {
        "memory does not bind: the groups are optimal with any amount of it".to_string()
    } else {
        "memory does not bind: a search without its limits finds nothing better".to_string()
    });
    lines
}

/// The first few ids, and the number of the others.
fn devices(ids: &[u64]) -> String {
    const SHOWN: usize = 16;
    let shown = ids.iter().take(SHOWN).map(u64::to_string).collect::<Vec<_>>().join(", ");
    let what = if ids.len() == 1 { "device" } else { "devices" };
    match ids.len().saturating_sub(SHOWN) {
        0 => format!("{what} {shown}"),
        more => format!("{what} {shown} and {more} more"),
    }
}
