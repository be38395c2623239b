//! The placed objective, which [`plan`](crate::plan) minimises unless told otherwise: the published one with experts whole, where they
//! are, and every group's own tokens.
//!
//! ```text
//! T          = gamma(W) * max over groups g of (max over i in g of compute_i + eta * max over i in g of C_i) + AR(K, slowest link)
//! compute_i  = |g| * sum of the costs of i's experts / flops_i
//! send_i     = sum over j in g that hold experts, j != i, of alpha_ij + beta_ij * d * s_j
//! recv_j     = sum over i in g, i != j, of alpha_ij + beta_ij * d * s_j where j holds experts, else 0
//! C_i        = max(send_i, recv_i)
//! ```
//!
//! A cost is that of one device's mini-batch, and every device of a group brings one; s_j is the share of all costs that j's experts have,
//! and so of the tokens that go there. gamma, AR, W, K, eta and d are as in `objective.rs`. With equal devices, symmetric links and experts
//! spread evenly, C_i is the published one.

mod bound;
mod branch;
pub(crate) mod choose;
mod deal;
mod found;
mod joint;
mod place;
mod search;

use crate::cluster::{Cluster, LinkTable};
use crate::objective::{Evaluation, Problem};
use crate::placement::DeviceExperts;
use crate::workload::Workload;

/// The experts, as placement sees them.
pub(crate) struct Experts {
    /// FLOP of each.
    pub costs: Vec<f64>,
    /// Ids of the experts, the most expensive first.
    pub order: Vec<u32>,
    pub total: f64,
    /// What each costs, where all cost the same.
    pub uniform: Option<f64>,
}

impl Experts {
    fn new(costs: Vec<f64>) -> Experts {
        let mut order: Vec<u32> = (0..costs.len() as u32).collect();
        order.sort_by(|&a, &b| costs[b as usize].total_cmp(&costs[a as usize]).then(a.cmp(&b)));
        let uniform = costs.first().copied().filter(|first| costs.iter().all(|cost| cost == first));
        Experts { total: costs.iter().sum(), order, uniform, costs }
    }

    /// The share of all costs.
    fn share(&self, load: f64) -> f64 {
        if self.total > 0.0 { load / self.total } else { 0.0 }
    }
}

/// Times of a group, ms: the longest compute of a device, and its longest exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct GroupTimes {
    pub compute_ms: f64,
    pub communication_ms: f64,
}

impl GroupTimes {
    pub fn ms(self) -> f64 {
        self.compute_ms + self.communication_ms
    }
}

/// The problem under this objective.
pub(crate) struct Placed<'p, 'a, L> {
    pub problem: &'p Problem<'a, L>,
    pub experts: Experts,
}

impl<'p, 'a, L: LinkTable> Placed<'p, 'a, L> {
    pub fn new(problem: &'p Problem<'a, L>) -> Self {
        Placed { problem, experts: Experts::new(problem.workload.costs()) }
    }

    /// MB that one device sends to a device of this load.
    pub fn received_mb(&self, load: f64) -> f64 {
        self.problem.workload.p2p_buffer_mb * self.experts.share(load)
    }

    /// FLOP of a device's experts.
    fn load(&self, held: &[u32]) -> f64 {
        held.iter().map(|&e| self.experts.costs[e as usize]).sum()
    }

    /// What each member of a group (ascending) exchanges with a placement, ms.
    pub fn exchanges(&self, members: &[u32], placement: &DeviceExperts) -> Vec<f64> {
        let received = |held: &Vec<u32>| (!held.is_empty()).then(|| self.received_mb(self.load(held)));
        self.problem.links.exchanges(members, &placement.iter().map(received).collect::<Vec<_>>())
    }

    /// Times of a group (ascending) with a placement.
    pub fn placed_times(&self, members: &[u32], placement: &DeviceExperts) -> GroupTimes {
        let compute = |(&i, held): (&u32, &Vec<u32>)| self.load(held) / self.problem.flops[i as usize];
        let longest = self.exchanges(members, placement).into_iter().fold(0.0, f64::max);
        GroupTimes {
            compute_ms: members.len() as f64 * members.iter().zip(placement).map(compute).fold(0.0, f64::max),
            communication_ms: self.problem.workload.p2p_frequency * longest,
        }
    }

    /// The objective of groups that take `times`.
    pub fn evaluate(&self, groups: &[Vec<u32>], times: &[GroupTimes]) -> Evaluation {
        self.problem.evaluate_times(
            groups,
            times.iter().map(|times| times.compute_ms).collect(),
            times.iter().map(|times| times.communication_ms).collect(),
        )
    }
}

/// The larger of two numbers. Unlike [`f64::max`] it does not handle NaN, and is one instruction.
#[inline]
fn larger<T: PartialOrd>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

/// A group's placement and its times.
pub(crate) type PlacedTimes = (DeviceExperts, GroupTimes);

/// The placed objective of groups and placements, on any cluster.
pub(crate) fn evaluate(
    cluster: &Cluster,
    workload: &Workload,
    groups: &[Vec<u32>],
    placements: &[DeviceExperts],
) -> Evaluation {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    let placed = Placed::new(&problem);
    let of = |(members, placement): (&Vec<u32>, &DeviceExperts)| placed.placed_times(members, placement);
    placed.evaluate(groups, &groups.iter().zip(placements).map(of).collect::<Vec<_>>())
}
