//! Why these groups: the chosen ones beside others, and what keeps them from being better.

use serde::{Deserialize, Serialize};

use super::workload::Workload;
use super::{Algorithm, Options, Plan, PlanError, Terms, choose, evaluate, terms};
use crate::cluster::{Cluster, LinkTable};

/// Better groupings of other numbers of groups that are shown.
const OTHERS: usize = 3;

/// One grouping, chosen or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Alternative {
    /// What it is.
    pub name: String,
    /// Number of groups.
    pub groups: usize,
    /// Its objective; what it would be, where it is not valid.
    pub objective_ms: f64,
    /// The objective's parts.
    pub terms: Terms,
    /// Why it cannot be chosen, where it cannot.
    pub invalid: Option<String>,
}

/// The chosen groups beside rejected ones, and what binds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The chosen groups first, then the others, best first.
    pub alternatives: Vec<Alternative>,
    /// What the objective consists of and what keeps it from being lower, a sentence each.
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
    let groups = indices(cluster, plan);
    let all: Vec<u32> = (0..cluster.devices.len() as u32).collect();
    let searched = Options { algorithm: Algorithm::Search, ..options };
    let found = choose(cluster, workload, searched)?;
    let mut others = vec![
        ("all together".to_string(), vec![all.clone()]),
        ("one per node".to_string(), cluster.hosts()),
        ("one per device".to_string(), all.iter().map(|&i| vec![i]).collect()),
    ];
    if options.algorithm == Algorithm::Lysi {
        others.push(("search".into(), found.groups));
    } else if cluster.devices.len() <= super::LYSI_MOST {
        let published = Options { algorithm: Algorithm::Lysi, ..options };
        others.push(("lysi".into(), choose(cluster, workload, published)?.groups));
    }
    for other in found.others.into_iter().take(OTHERS) {
        others.push((format!("best found with {} groups", other.groups.len()), other.groups));
    }
    let mut alternatives: Vec<Alternative> = Vec::new();
    for (name, groups) in others {
        alternatives.push(alternative(cluster, workload, name, &groups));
    }
    alternatives.sort_by(|a, b| {
        let key = |a: &Alternative| (a.invalid.is_some(), a.objective_ms);
        key(a).partial_cmp(&key(b)).expect("objectives are finite")
    });
    alternatives.insert(0, alternative(cluster, workload, "chosen".into(), &groups));
    let binding = binding(cluster, workload, searched, plan, &groups)?;
    Ok(Explanation { alternatives, binding })
}

/// The groups of a plan by the devices' indices.
fn indices(cluster: &Cluster, plan: &Plan) -> Vec<Vec<u32>> {
    let index: std::collections::HashMap<u64, u32> = cluster.devices.iter().map(|d| d.id).zip(0..).collect();
    let group = |devices: &[u64]| devices.iter().filter_map(|id| index.get(id).copied()).collect();
    plan.groups.iter().map(|g| group(&g.devices)).collect()
}

fn alternative(cluster: &Cluster, workload: &Workload, name: String, groups: &[Vec<u32>]) -> Alternative {
    let evaluation = evaluate(cluster, workload, groups);
    let held = |members: &Vec<u32>| {
        members.iter().fold(0u64, |sum, &i| sum.saturating_add(cluster.devices[i as usize].memory_experts))
    };
    let needed = workload.n_experts() as u64;
    let least = groups.iter().map(held).min().unwrap_or(0);
    Alternative {
        name,
        groups: groups.len(),
        objective_ms: evaluation.objective_ms,
        terms: terms(&evaluation),
        invalid: (least < needed).then(|| format!("a group holds {least} of {needed} experts")),
    }
}

fn binding(
    cluster: &Cluster,
    workload: &Workload,
    options: Options,
    plan: &Plan,
    groups: &[Vec<u32>],
) -> Result<Vec<String>, PlanError> {
    let evaluation = evaluate(cluster, workload, groups);
    let id = |i: u32| cluster.devices[i as usize].id;
    let Terms { gamma, compute_ms, communication_ms, all_reduce_ms } = plan.terms;
    let share = |ms: f64| if plan.objective_ms > 0.0 { 100.0 * ms / plan.objective_ms } else { 0.0 };
    let mut lines = vec![format!(
        "compute is {:.1}% of the objective, communication {:.1}%, the all-reduce {:.1}%",
        share(gamma * compute_ms),
        share(gamma * communication_ms),
        share(all_reduce_ms)
    )];
    if let Some(members) = groups.get(evaluation.worst()) {
        let sums = cluster.links.sums(members);
        let time = |&(a, b): &(f64, f64)| a + b * (workload.p2p_buffer_mb / members.len() as f64);
        let slowest = members.iter().zip(&sums).fold(None, |slowest: Option<(u32, f64)>, (&i, sum)| match slowest {
            Some((_, ms)) if ms >= time(sum) => slowest,
            _ => Some((i, time(sum))),
        });
        if let Some((i, ms)) = slowest {
            lines.push(format!(
                "group {} decides ({} devices); in it device {} exchanges longest, {ms:.4} ms",
                evaluation.worst(),
                members.len(),
                id(i)
            ));
        }
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
    // Memory binds where a search without its limits finds better groups.
    let mut roomy = cluster.clone();
    let needed = workload.n_experts() as u64;
    roomy.devices.iter_mut().for_each(|device| device.memory_experts = device.memory_experts.max(needed));
    let free = choose(&roomy, workload, options)?;
    let free_ms = evaluate(cluster, workload, &free.groups).objective_ms;
    let groups = match free.groups.len() {
        1 => "1 group".to_string(),
        n => format!("{n} groups"),
    };
    lines.push(if free_ms < plan.objective_ms * (1.0 - 1e-9) {
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
    Ok(lines)
}
