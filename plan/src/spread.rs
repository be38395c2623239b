//! Spreads: the experts of each device of a group, the split of the tokens of replicated experts, and the resulting times.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, LinkTable};
use crate::objective::{Evaluation, Problem};
use crate::placed::{GroupTimes, Placed};
use crate::placement::DeviceExperts;
use crate::workload::Workload;
use crate::{PlannedGroup, PlannedReplicas};

/// The experts of each member of a group, and the split of the tokens of each replicated expert.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Spread {
    /// By member, the experts that it holds, ascending.
    pub held: DeviceExperts,
    /// By expert with replicas.
    pub splits: BTreeMap<u32, Split>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Split {
    /// Members of the group, ascending.
    pub holders: Vec<usize>,
    /// `[members, holders]`: the share of a member's tokens with the expert that goes to each holder.
    pub shares: Vec<Vec<f64>>,
}

impl Spread {
    /// The spread of a planned group. `ids` and `held` are by member, in the cluster's order.
    pub fn of(group: &PlannedGroup, held: DeviceExperts, ids: &[u64]) -> Spread {
        let place = |id: &u64| ids.iter().position(|other| other == id);
        let split = |replicas: &PlannedReplicas| {
            let mut columns: Vec<(usize, usize)> =
                replicas.devices.iter().enumerate().filter_map(|(column, id)| Some((place(id)?, column))).collect();
            columns.sort_unstable();
            let row = |id: &u64| {
                let row = group.devices.iter().position(|other| other == id).and_then(|row| replicas.split.get(row));
                let share = |(_, column): &(usize, usize)| row.and_then(|row| row.get(*column)).copied().unwrap_or(0.0);
                columns.iter().map(share).collect()
            };
            let holders = columns.iter().map(|(member, _)| *member).collect();
            (replicas.expert, Split { holders, shares: ids.iter().map(row).collect() })
        };
        Spread { held, splits: group.replicas.iter().map(split).collect() }
    }

    /// The experts of each device and the replicas, in the form of a plan.
    pub fn into_planned(self, ids: &[u64]) -> (BTreeMap<u64, Vec<u32>>, Vec<PlannedReplicas>) {
        let replicas = self.splits.into_iter().map(|(expert, split)| PlannedReplicas {
            expert,
            devices: split.holders.iter().map(|&member| ids[member]).collect(),
            split: split.shares,
        });
        (ids.iter().copied().zip(self.held).collect(), replicas.collect())
    }

    /// FLOP of each member's tokens that each member computes.
    fn flow<L: LinkTable>(&self, placed: &Placed<L>, members: usize) -> Vec<Vec<f64>> {
        let mut flow = vec![vec![0.0; members]; members];
        for (j, held) in self.held.iter().enumerate() {
            let whole: f64 =
                held.iter().filter(|e| !self.splits.contains_key(e)).map(|&e| placed.experts.costs[e as usize]).sum();
            flow.iter_mut().for_each(|row| row[j] += whole);
        }
        for (&e, split) in &self.splits {
            let cost = placed.experts.costs[e as usize];
            for (row, shares) in flow.iter_mut().zip(&split.shares) {
                split.holders.iter().zip(shares).for_each(|(&j, share)| row[j] += cost * share);
            }
        }
        flow
    }

    /// Compute and exchange of each member of a group (ascending) in a pass, ms.
    fn member_times<L: LinkTable>(&self, placed: &Placed<L>, members: &[u32]) -> (Vec<f64>, Vec<f64>) {
        let (problem, m) = (placed.problem, members.len());
        let flow = self.flow(placed, m);
        let link = |i: usize, j: usize| problem.links.link(members[i] as usize, members[j] as usize);
        let (mut sent, mut received, mut computes) = (vec![0.0f64; m], vec![0.0f64; m], vec![0.0f64; m]);
        for j in (0..m).filter(|&j| !self.held[j].is_empty()) {
            let load: f64 = flow.iter().map(|row| row[j]).sum();
            computes[j] = load / problem.flops[members[j] as usize];
            for i in (0..m).filter(|&i| i != j && !self.splits.is_empty()) {
                let ms = link(i, j).time_ms(placed.received_mb(flow[i][j]));
                sent[i] += ms;
                received[j] += ms;
            }
        }
        let exchanges = match self.splits.is_empty() {
            true => placed.exchanges(members, &self.held),
            false => sent.into_iter().zip(received).map(|(sent, received)| sent.max(received)).collect(),
        };
        (computes, exchanges)
    }

    /// Times of a group (ascending) in a pass, and of the all-reduces of its replicas' gradients in an iteration, ms.
    pub fn times<L: LinkTable>(&self, placed: &Placed<L>, members: &[u32]) -> (GroupTimes, f64) {
        if self.splits.is_empty() {
            return (placed.placed_times(members, &self.held), 0.0);
        }
        let (problem, m) = (placed.problem, members.len());
        let (computes, exchanges) = self.member_times(placed, members);
        let link = |i: usize, j: usize| problem.links.link(members[i] as usize, members[j] as usize);
        let workload = problem.workload;
        let compute_ms = computes.into_iter().fold(0.0, f64::max);
        let communication_ms = workload.p2p_frequency * exchanges.into_iter().fold(0.0, f64::max);
        let expert_mb = workload.all_reduce_buffer_mb / workload.n_experts() as f64;
        let mut sum_ms = vec![0.0f64; m];
        for split in self.splits.values().filter(|_| expert_mb > 0.0) {
            let k = split.holders.len() as f64;
            for &i in &split.holders {
                let others = split.holders.iter().filter(|&&j| j != i);
                let slowest = others.map(|&j| link(i, j).time_ms(expert_mb / k)).fold(0.0, f64::max);
                sum_ms[i] += 2.0 * (k - 1.0) * slowest;
            }
        }
        (GroupTimes { compute_ms, communication_ms }, sum_ms.into_iter().fold(0.0, f64::max))
    }
}

/// The objective of groups of these spreads. The sums of the replicas' gradients count with those between groups.
pub(crate) fn evaluate_spreads(
    cluster: &Cluster,
    workload: &Workload,
    groups: &[Vec<u32>],
    spreads: &[Spread],
) -> Evaluation {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    evaluate(&Placed::new(&problem), groups, spreads)
}

/// What each member of a group (ascending) computes and exchanges in a pass, ms.
pub(crate) fn spread_times(
    cluster: &Cluster,
    workload: &Workload,
    members: &[u32],
    spread: &Spread,
) -> (Vec<f64>, Vec<f64>) {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    spread.member_times(&Placed::new(&problem), members)
}

/// [`evaluate_spreads`] for a given problem.
pub(crate) fn evaluate<L: LinkTable>(placed: &Placed<L>, groups: &[Vec<u32>], spreads: &[Spread]) -> Evaluation {
    let of = |(members, spread): (&Vec<u32>, &Spread)| spread.times(placed, members);
    let (times, sums_ms): (Vec<_>, Vec<_>) = groups.iter().zip(spreads).map(of).unzip();
    let mut evaluation = placed.evaluate(groups, &times);
    let sum_ms = sums_ms.into_iter().fold(0.0, f64::max);
    evaluation.all_reduce_ms += sum_ms;
    evaluation.objective_ms += sum_ms;
    evaluation
}
