//! A plan as text.

use super::run::ranges;
use super::table::{count, plain, right_aligned};
use crate::plan::{Explanation, Plan, PlannedGroup, Rebalanced, Replan};

/// Groups and devices listed; the rest is counted.
const GROUPS_LISTED: usize = 16;
const DEVICES_LISTED: usize = 64;

/// The plan: its objective in parts, its groups, and who holds which experts.
pub(crate) fn plan_text(plan: &Plan, devices: usize, experts: usize) -> String {
    let terms = &plan.terms;
    let quality = match plan.optimal {
        true => "optimal".to_string(),
        false => format!("at most {:.3}% above the least possible", 100.0 * plan.gap_bound),
    };
    let idle = match plan.idle_devices.len() {
        0 => String::new(),
        n => format!(", {} idle: {}", count(n as u64, "device"), ranges(plan.idle_devices.iter().copied())),
    };
    let mut text = format!(
        "{} of {}, {}{idle}\n\nobjective      {:.4} ms per iteration ({}, {quality})\n               = {} * ({:.6} compute + {:.6} \
         communication) + {:.4} all-reduce\nplanned in     {:.3} ms\n\n",
        count(plan.groups.len() as u64, "group"),
        count(devices as u64, "device"),
        count(experts as u64, "expert"),
        plan.objective_ms,
        plan.algorithm,
        terms.gamma,
        terms.compute_ms,
        terms.communication_ms,
        terms.all_reduce_ms,
        plan.elapsed_ms
    );
    let mut table = plain();
    table.set_header(["group", "devices", "objective, ms", "makespan, ms", "experts per device"]);
    for (g, group) in plan.groups.iter().take(GROUPS_LISTED).enumerate() {
        let held = || group.experts.values().map(Vec::len);
        let (least, most) = (held().min().unwrap_or(0), held().max().unwrap_or(0));
        let held = if least == most { most.to_string() } else { format!("{least} to {most}") };
        let (objective, makespan) = (format!("{:.4}", group.objective_ms), format!("{:.6}", group.makespan_ms));
        table.add_row([g.to_string(), group.devices.len().to_string(), objective, makespan, held]);
    }
    text += &right_aligned(table, 1);
    if plan.groups.len() > GROUPS_LISTED {
        text += &format!("\n({} more)", plan.groups.len() - GROUPS_LISTED);
    }
    text += "\n\n";
    let seats =
        plan.groups.iter().enumerate().flat_map(|(g, group)| group.experts.iter().map(move |seat| (g, group, seat)));
    let mut table = plain();
    table.set_header(["device", "group", "experts"]);
    for (g, _, (id, experts)) in seats.clone().take(DEVICES_LISTED) {
        table.add_row([id.to_string(), g.to_string(), ranges(experts.iter().map(|&e| u64::from(e)))]);
    }
    text += &right_aligned(table, 3);
    let all: usize = plan.groups.iter().map(|group: &PlannedGroup| group.experts.len()).sum();
    if all > DEVICES_LISTED {
        text += &format!("\n({} more)", all - DEVICES_LISTED);
    }
    text += "\n";
    let replicas: Vec<_> =
        plan.groups.iter().enumerate().flat_map(|(g, group)| group.replicas.iter().map(move |r| (g, r))).collect();
    if !replicas.is_empty() {
        let mut table = plain();
        table.set_header(["expert", "group", "replicas on devices"]);
        for (g, replicas) in replicas.iter().take(DEVICES_LISTED) {
            table.add_row([replicas.expert.to_string(), g.to_string(), ranges(replicas.devices.iter().copied())]);
        }
        text += &format!("\n{}\n", right_aligned(table, 3));
        if replicas.len() > DEVICES_LISTED {
            text += &format!("({} more)\n", replicas.len() - DEVICES_LISTED);
        }
    }
    text
}

/// The chosen groups beside rejected ones, and what binds.
pub(crate) fn explanation_text(explanation: &Explanation) -> String {
    let mut table = plain();
    table.set_header([
        "",
        "groups",
        "objective, ms",
        "gamma",
        "compute, ms",
        "communication, ms",
        "all-reduce, ms",
        "",
    ]);
    for alternative in &explanation.alternatives {
        let terms = &alternative.terms;
        table.add_row([
            alternative.name.clone(),
            alternative.groups.to_string(),
            format!("{:.3}", alternative.objective_ms),
            format!("{:.4}", terms.gamma),
            format!("{:.5}", terms.compute_ms),
            format!("{:.5}", terms.communication_ms),
            format!("{:.3}", terms.all_reduce_ms),
            alternative.invalid.clone().map(|why| format!("not valid: {why}")).unwrap_or_default(),
        ]);
    }
    let mut text = right_aligned(table, 1) + "\n\n";
    explanation.binding.iter().for_each(|line| text += &format!("{line}\n"));
    text
}

/// What changing plans gains and costs.
pub(crate) fn replan_text(replan: &Replan) -> String {
    let verdict = match replan.repaid_after_iterations {
        Some(iterations) => format!("repaid after {:.0} iterations", iterations.ceil()),
        None => "never repaid: keep the plan in use".to_string(),
    };
    format!(
        "in use         {:.4} ms per iteration\nplanned        {:.4} ms per iteration, {:.4} less\nto move        {}, {:.3} MB, \
         {:.3} ms: {verdict}\n",
        replan.current_ms,
        replan.planned_ms,
        replan.gain_ms,
        count(replan.moved_experts, "expert"),
        replan.moved_mb,
        replan.move_ms
    )
}

/// Of each layer, the largest load over the mean, the least possible, and the experts of each rank.
pub(crate) fn rebalanced_text(all: &Rebalanced, ranks: usize) -> String {
    let mut table = plain();
    table.set_header(["layer", "largest / mean", "least possible", "experts by rank"]);
    for (layer, phy2log) in all.phy2log.iter().enumerate() {
        let held =
            phy2log.chunks(phy2log.len() / ranks).map(|held| held.iter().map(usize::to_string).collect::<Vec<_>>());
        let held = held.map(|held| held.join(" ")).collect::<Vec<_>>().join(" | ");
        let (imbalance, least) = (all.imbalance[layer], all.imbalance_least[layer]);
        table.add_row([layer.to_string(), format!("{imbalance:.4}"), format!("{least:.4}"), held]);
    }
    right_aligned(table, 3) + "\n"
}
