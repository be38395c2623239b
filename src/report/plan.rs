//! A plan as text.

use super::text::{TextTable, count, join, list, ranges};
use crate::plan::{Explanation, Plan, Rebalanced, Replan};

/// Groups and devices that are listed; the others are counted.
const GROUPS_LISTED: usize = 16;
const DEVICES_LISTED: usize = 64;

/// The plan: its objective in parts, its groups, and the experts of each device.
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
    let header = ["group", "devices", "objective, ms", "makespan, ms", "experts per device"];
    let mut table = TextTable::new(1, header).at_most(GROUPS_LISTED);
    for (g, group) in plan.groups.iter().enumerate() {
        let held = || group.experts.values().map(Vec::len);
        let (least, most) = (held().min().unwrap_or(0), held().max().unwrap_or(0));
        let held = if least == most { most.to_string() } else { format!("{least} to {most}") };
        let (objective, makespan) = (format!("{:.4}", group.objective_ms), format!("{:.6}", group.makespan_ms));
        table.row([g.to_string(), group.devices.len().to_string(), objective, makespan, held]);
    }
    text += &format!("{}\n", table.render());
    let groups = || plan.groups.iter().enumerate();
    let mut table = TextTable::new(3, ["device", "group", "experts"]).at_most(DEVICES_LISTED);
    for (g, (id, experts)) in groups().flat_map(|(g, group)| group.experts.iter().map(move |device| (g, device))) {
        table.row([id.to_string(), g.to_string(), ranges(experts.iter().map(|&e| u64::from(e)))]);
    }
    text += &table.render();
    if groups().any(|(_, group)| !group.replicas.is_empty()) {
        let mut table = TextTable::new(3, ["expert", "group", "replicas on devices"]).at_most(DEVICES_LISTED);
        for (g, replicas) in groups().flat_map(|(g, group)| group.replicas.iter().map(move |r| (g, r))) {
            table.row([replicas.expert.to_string(), g.to_string(), ranges(replicas.devices.iter().copied())]);
        }
        text += &format!("\n{}", table.render());
    }
    text
}

/// The chosen groups next to rejected ones, and the binding constraints.
pub(crate) fn explanation_text(explanation: &Explanation) -> String {
    let header = ["", "groups", "objective, ms", "gamma", "compute, ms", "communication, ms", "all-reduce, ms", ""];
    let mut table = TextTable::new(1, header);
    for alternative in &explanation.alternatives {
        let terms = &alternative.terms;
        table.row([
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
    let mut text = table.render() + "\n";
    explanation.binding.iter().for_each(|line| text += &format!("{line}\n"));
    text
}

/// The gain and the cost of a change of plans.
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

/// For each layer the largest load over the mean, its lower bound, and the experts of each device.
pub(crate) fn rebalanced_text(all: &Rebalanced, devices: usize) -> String {
    let now = (!all.moved.is_empty()).then_some(["now", "moved"]);
    let columns = ["layer", "largest / mean", "least possible"].into_iter().chain(now.into_iter().flatten());
    let mut table = TextTable::new(if now.is_some() { 5 } else { 3 }, columns.chain(["experts by device"]));
    for (layer, phy2log) in all.phy2log.iter().enumerate() {
        let held = join(phy2log.chunks(phy2log.len() / devices).map(list), " | ");
        let (imbalance, least) = (all.imbalance[layer], all.imbalance_least[layer]);
        let mut row = vec![layer.to_string(), format!("{imbalance:.4}"), format!("{least:.4}")];
        if let (Some(now), Some(moved)) = (all.imbalance_current.get(layer), all.moved.get(layer)) {
            row.extend([format!("{now:.4}"), moved.to_string()]);
        }
        row.push(held);
        table.row(row);
    }
    table.render()
}
