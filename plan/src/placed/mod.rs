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
mod deal;
mod few;
mod joint;
mod place;
mod prove;
mod regroup;
mod relaxed;
mod rounds;
mod search;
mod state;

use std::collections::HashMap;

use crate::bound::LeastExchange;
use crate::choose::{Chosen, EQUAL, PROVED_FAST, THOROUGH_DEVICES};
use crate::cluster::{Cluster, LinkTable, Matrix};
use crate::objective::{Evaluation, Problem};
use crate::options::placement_kind;
use crate::placement::DeviceExperts;
use crate::search::Views;
use crate::workload::Workload;
use crate::{Algorithm, Options, PlacementKind, PlanError};

use bound::bounds;
use prove::prove;
use search::{FoundPlaced, PlacedEffort, PlacedSearch, place_thoroughly};

/// The experts, as placement sees them.
pub(crate) struct Experts {
    /// FLOP of each.
    pub costs: Vec<f64>,
    /// Their ids, the most expensive first.
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

/// What a group takes, ms: its longest compute, and its exchanges at the longest of a device.
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

    /// What a group (ascending) takes with a placement.
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

/// The larger of two numbers. Unlike [`f64::max`] it is one instruction, as it does not look for what is no number.
#[inline]
fn larger<T: PartialOrd>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

/// A group's placement, and what it takes with that.
pub(crate) type PlacedTimes = (DeviceExperts, GroupTimes);

/// Placements of groups that were asked for before.
pub(crate) type Known = HashMap<Vec<u32>, PlacedTimes>;

/// Experts dealt out in groups before; `None` where memory does not suffice.
pub(crate) type DealtOut = HashMap<Vec<u32>, Option<PlacedTimes>>;

/// Links looked at for [`THOROUGH_DEVICES`], in annealing groups.
const ANNEAL_OPS: f64 = 2e7;
/// In annealing groups with their times remembered, however many devices: what comes before takes less of the time of fewer.
const REGROUP_OPS: u64 = 240_000_000;
/// In annealing groups and placements together; fewer devices get more of it, as what comes before takes less of their time.
const JOINT_OPS: f64 = 7.6e7;
const JOINT_MORE: f64 = 0.5;
/// Links looked at for the placements of one grouping, and nodes of branch and bound.
const PLACE_OPS: u64 = 8_000_000;
const PLACE_NODES: u64 = 50_000;
/// Nodes and steps of a proof of optimality: what nobody waits for, and what is asked for.
const PROOF_AUTO: (u64, u64) = (1_000_000, 60_000_000);
const PROOF_ASKED: (u64, u64) = (100_000_000, 4_000_000_000);

fn effort(n: usize, matrix: bool, times: u32) -> PlacedEffort {
    let share = n as f64 / THOROUGH_DEVICES;
    let times = u64::from(times.max(1));
    let usual = match matrix {
        true if n <= PROVED_FAST => PlacedEffort {
            construct: 200_000,
            anneal: 1_000_000,
            regroup: 0,
            place: 100_000,
            nodes: PLACE_NODES,
            joint: 500_000,
        },
        true if share <= 1.0 => PlacedEffort {
            construct: 4_000_000,
            anneal: (ANNEAL_OPS * share) as u64,
            regroup: REGROUP_OPS,
            place: PLACE_OPS,
            nodes: PLACE_NODES,
            joint: match n <= crate::exact::MOST_DEVICES {
                true => (JOINT_OPS * share) as u64,
                false => (JOINT_OPS * (1.0 + JOINT_MORE * (1.0 - share))) as u64,
            },
        },
        true => PlacedEffort {
            construct: (n * n) as u64,
            anneal: (ANNEAL_OPS * share.powi(-8)) as u64,
            regroup: 0,
            place: (PLACE_OPS as f64 * share.powi(-5)) as u64,
            nodes: 200,
            joint: 0,
        },
        false => PlacedEffort { construct: 3_000_000, anneal: 0, regroup: 0, place: 100_000, nodes: 1_000, joint: 0 },
    };
    let PlacedEffort { anneal, regroup, place, joint, .. } = usual;
    let [anneal, regroup, place, joint] = [anneal, regroup, place, joint].map(|ops| ops.saturating_mul(times));
    PlacedEffort { anneal, regroup, place, joint, ..usual }
}

/// Groups and placements of the least placed objective. `published` is what was found under the published one, with its placements.
pub(crate) fn choose<L: LeastExchange>(
    cluster: &Cluster,
    problem: &Problem<L>,
    views: &Views,
    options: Options,
    matrix: Option<&Matrix>,
    published: (Chosen, Vec<DeviceExperts>),
) -> Result<Chosen, PlanError> {
    let placed = Placed::new(problem);
    let bounds = bounds(problem, &placed.experts, options.allow_idle);
    let n = problem.n();
    let effort = effort(n, matrix.is_some(), options.effort);
    let (published, placements) = published;
    let mut known = Known::new();
    let least_published = published.groups.clone();
    let finish = |found: FoundPlaced, algorithm: &'static str, proved: bool, others| {
        let mut order: Vec<usize> = (0..found.groups.len()).collect();
        order.sort_by(|&a, &b| found.groups[a].cmp(&found.groups[b]));
        let groups: Vec<Vec<u32>> = order.iter().map(|&g| found.groups[g].clone()).collect();
        let placements = order.iter().map(|&g| found.placements[g].clone()).collect();
        let times: Vec<GroupTimes> = order.iter().map(|&g| found.times[g]).collect();
        let evaluation = placed.evaluate(&groups, &times);
        let bound_ms = bounds.least();
        let optimal = proved || evaluation.objective_ms * (1.0 - EQUAL) <= bound_ms;
        let (placements, published) = (Some(placements), Some(least_published.clone()));
        Ok(Chosen { groups, placements, evaluation, algorithm, optimal, bound_ms, others, published })
    };
    if options.algorithm == Algorithm::Lysi || placement_kind(options) == PlacementKind::Lysi {
        let found = FoundPlaced::new(&placed, published.groups, placements);
        return finish(found, published.algorithm, false, Vec::new());
    }
    let mut search = PlacedSearch::new(&placed, &bounds, views, options.allow_idle);
    search.offer_placed(published.groups, placements);
    published.others.into_iter().for_each(|other| search.offer(other.groups));
    search.construct(views, effort.construct);
    search.anneal(effort.anneal);
    search.regroup(effort.regroup);
    let (found, others) = search.into_found(effort, &mut known);
    let found = found.ok_or(PlanError::NoGrouping)?;
    let proved = found.objective_ms * (1.0 - EQUAL) <= bounds.least();
    let asked = options.algorithm == Algorithm::Exact;
    if options.algorithm == Algorithm::Search || proved {
        let label = if options.algorithm == Algorithm::Search || n > prove::MOST_DEVICES { "search" } else { "exact" };
        return finish(found, label, proved, others);
    }
    let proof = match matrix.filter(|_| n <= prove::MOST_DEVICES) {
        Some(matrix) => {
            let problem = Problem::new(&cluster.devices, matrix, problem.workload, options.allow_idle);
            let budget = if asked { PROOF_ASKED } else { PROOF_AUTO };
            prove(&Placed::new(&problem), &bounds, found.objective_ms, options.allow_idle, budget, &mut known)
        }
        None => crate::exact::Improvement { better: None, complete: false },
    };
    if asked && !proof.complete {
        let found_ms = found.objective_ms;
        return Err(PlanError::Unproved { devices: n, found_ms, gap: found_ms / bounds.least() - 1.0 });
    }
    let better = proof.better.and_then(|groups| {
        place_thoroughly(&placed, &groups, effort.place, effort.nodes, (&DealtOut::new(), &mut known))
    });
    let better = better.filter(|better| better.objective_ms < found.objective_ms);
    let label = if proof.complete { "exact" } else { "search" };
    finish(better.unwrap_or(found), label, proof.complete, others)
}

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

/// The same with the best placements found; `None` where a group lacks memory.
pub(crate) fn evaluate_groups(cluster: &Cluster, workload: &Workload, groups: &[Vec<u32>]) -> Option<Evaluation> {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    let placed = Placed::new(&problem);
    let found = place_thoroughly(&placed, groups, PLACE_OPS / 8, PLACE_NODES, (&DealtOut::new(), &mut Known::new()))?;
    Some(placed.evaluate(groups, &found.times))
}

/// The best placements found for groups; `None` where a group lacks memory.
pub(crate) fn place_groups<L: LinkTable>(placed: &Placed<L>, groups: &[Vec<u32>]) -> Option<Vec<DeviceExperts>> {
    let found = place_thoroughly(placed, groups, PLACE_OPS / 8, PLACE_NODES, (&DealtOut::new(), &mut Known::new()))?;
    Some(found.placements)
}
