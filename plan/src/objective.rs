//! The objective that the planner minimises, equation (1) of the Lysi poster:
//!
//! ```text
//! max over groups g of  gamma(W) * (sum of costs / sum of flops of g + eta * max over i in g of C_i(g))
//!                       + AR(K, slowest link between groups)
//! gamma(W)   = layers / moe_frequency * global_batch / (W * mini_batch) * (2 + recomputation)
//! C_i(g)     = sum over j in g, j != i, of alpha_ij + beta_ij * d / |g|
//! AR(k, l)   = 2 (k - 1) (alpha_l + beta_l * a / k)                  (ring all-reduce, Rabenseifner 2004)
//! ```
//!
//! with K groups, W workers in them, d the p2p buffer, a the all-reduce buffer, eta the p2p frequency. A group is valid
//! when its memory holds all experts.

use super::workload::Workload;
use crate::cluster::{Device, Edge, Link, LinkTable};

/// Most devices whose pairs are all listed.
pub(crate) const PAIRS_LISTED: usize = 256;

/// The group of idle devices.
pub(crate) const IDLE: u32 = u32::MAX;

/// A cluster and a workload, prepared for evaluation.
pub(crate) struct Problem<'a, L> {
    pub links: &'a L,
    pub flops: Vec<f64>,
    pub memory: Vec<u64>,
    /// Sum of the experts' costs, FLOP.
    pub cost: f64,
    pub n_experts: u64,
    pub workload: &'a Workload,
    /// Edges that contain the slowest link between any groups, slowest first: the tree of [`LinkTable::slowest_tree`], or all pairs
    /// if devices may be idle, because the tree may run through those.
    pub edges: Vec<Edge>,
    /// For each device, the index of its first edge.
    first_edge: Vec<u32>,
}

/// The objective of a grouping, in parts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Evaluation {
    pub gamma: f64,
    /// Of each group: the costs over its rate, ms.
    pub compute_ms: Vec<f64>,
    /// Of each group: eta times its worst device's C_i, ms.
    pub communication_ms: Vec<f64>,
    pub all_reduce_ms: f64,
    /// The slowest link between groups.
    pub slowest: Option<Edge>,
    pub objective_ms: f64,
}

impl Evaluation {
    /// The group with the largest objective; the first of several.
    pub fn worst(&self) -> usize {
        let cost = |g: usize| self.compute_ms[g] + self.communication_ms[g];
        (0..self.compute_ms.len()).fold(0, |worst, g| if cost(g) > cost(worst) { g } else { worst })
    }

    /// One group's objective.
    pub fn group_ms(&self, g: usize) -> f64 {
        self.gamma * (self.compute_ms[g] + self.communication_ms[g]) + self.all_reduce_ms
    }
}

impl<'a, L: LinkTable> Problem<'a, L> {
    pub fn new(devices: &[Device], links: &'a L, workload: &'a Workload, allow_idle: bool) -> Problem<'a, L> {
        let mb = workload.all_reduce_buffer_mb / 2.0;
        let edges = if allow_idle && devices.len() <= PAIRS_LISTED { links.pairs(mb) } else { links.slowest_tree(mb) };
        let mut first_edge = vec![u32::MAX; devices.len()];
        for (place, edge) in edges.iter().enumerate().rev() {
            first_edge[edge.i as usize] = place as u32;
            first_edge[edge.j as usize] = place as u32;
        }
        Problem {
            links,
            flops: devices.iter().map(|device| device.flop_per_ms).collect(),
            memory: devices.iter().map(|device| device.memory_experts).collect(),
            cost: workload.costs().iter().sum(),
            n_experts: workload.n_experts() as u64,
            workload,
            edges,
            first_edge,
        }
    }

    /// Number of devices.
    pub fn n(&self) -> usize {
        self.flops.len()
    }

    /// Passes of an MoE layer per iteration, with `workers` devices in groups.
    pub fn gamma(&self, workers: usize) -> f64 {
        let w = self.workload;
        let global_batch = w.global_batch_size.unwrap_or(self.n() as f64 * w.mini_batch_size);
        let steps = global_batch / (workers as f64 * w.mini_batch_size);
        w.moe_layers() * steps * (2.0 + w.recomputation_amount)
    }

    /// The all-reduce between `k` groups over their slowest link, ms.
    pub fn all_reduce(&self, k: usize, link: Link) -> f64 {
        if k < 2 {
            return 0.0;
        }
        2.0 * (k as f64 - 1.0) * link.time_ms(self.workload.all_reduce_buffer_mb / k as f64)
    }

    /// The all-reduce between `k` groups over an edge, given by its index in `edges`; 0 without one.
    pub fn all_reduce_over(&self, k: usize, slowest: Option<usize>) -> f64 {
        slowest.map_or(0.0, |place| self.all_reduce(k, self.edges[place].link))
    }

    /// Cost over rate, ms.
    pub fn compute(&self, flops: f64) -> f64 {
        self.cost / flops
    }

    /// C of a device from its sums of alpha and beta in a group of `size`, ms.
    #[inline]
    pub fn exchange(&self, alpha: f64, beta: f64, size: usize) -> f64 {
        alpha + beta * (self.workload.p2p_buffer_mb / size as f64)
    }

    /// Compute and communication of one group (ascending), ms.
    pub fn group(&self, members: &[u32]) -> (f64, f64) {
        self.group_from(members, self.links.sums(members))
    }

    fn group_from(&self, members: &[u32], sums: Vec<(f64, f64)>) -> (f64, f64) {
        let flops: f64 = members.iter().map(|&i| self.flops[i as usize]).sum();
        let worst = sums.iter().map(|&(a, b)| self.exchange(a, b, members.len())).fold(0.0, f64::max);
        (self.compute(flops), self.workload.p2p_frequency * worst)
    }

    /// Experts that a group's memory holds.
    pub fn holds(&self, members: &[u32]) -> u64 {
        members.iter().fold(0, |sum, &i| sum.saturating_add(self.memory[i as usize]))
    }

    /// Whether a group is valid.
    pub fn valid(&self, members: &[u32]) -> bool {
        self.holds(members) >= self.n_experts
    }

    /// The place in `edges` of the slowest link between groups, where `group_of` gives each device's group.
    #[inline]
    pub fn slowest(&self, group_of: impl Fn(u32) -> u32) -> Option<usize> {
        self.edges.iter().position(|edge| {
            let (a, b) = (group_of(edge.i), group_of(edge.j));
            a != b && a != IDLE && b != IDLE
        })
    }

    /// The slowest link between groups after the `moved` devices have changed groups; `now` is the one before.
    #[inline]
    pub fn slowest_after<const N: usize>(
        &self,
        now: Option<usize>,
        moved: [Option<u32>; N],
        group_of: impl Fn(u32) -> u32,
    ) -> Option<usize> {
        // If no end of a counted edge has moved, the result is unchanged.
        let counts = |i: u32| now.is_none_or(|now| self.first_edge[i as usize] as usize <= now);
        if moved.into_iter().flatten().any(counts) { self.slowest(group_of) } else { now }
    }

    /// The objective of a grouping, computed fresh.
    pub fn evaluate(&self, groups: &[Vec<u32>]) -> Evaluation {
        self.evaluate_by(groups, |members| self.group(members))
    }

    /// [`Self::evaluate`] with sums that do not depend on the order of the members.
    pub fn evaluate_exactly(&self, groups: &[Vec<u32>]) -> Evaluation {
        self.evaluate_by(groups, |members| self.group_from(members, self.links.exact_sums(members)))
    }

    fn evaluate_by(&self, groups: &[Vec<u32>], group: impl Fn(&[u32]) -> (f64, f64)) -> Evaluation {
        let (compute_ms, communication_ms) = groups.iter().map(|g| group(g)).unzip();
        self.evaluate_times(groups, compute_ms, communication_ms)
    }

    /// The objective of a grouping whose groups take these times.
    pub fn evaluate_times(&self, groups: &[Vec<u32>], compute_ms: Vec<f64>, communication_ms: Vec<f64>) -> Evaluation {
        let mut group_of = vec![IDLE; self.n()];
        for (g, members) in groups.iter().enumerate() {
            members.iter().for_each(|&i| group_of[i as usize] = g as u32);
        }
        let workers: usize = groups.iter().map(Vec::len).sum();
        let slowest = match workers == self.n() {
            true => self.slowest(|i| group_of[i as usize]).map(|place| self.edges[place]),
            false => self.links.slowest_between(&group_of, IDLE, self.workload.all_reduce_buffer_mb / 2.0),
        };
        let mut evaluation = Evaluation {
            gamma: self.gamma(workers),
            compute_ms,
            communication_ms,
            all_reduce_ms: slowest.map_or(0.0, |edge| self.all_reduce(groups.len(), edge.link)),
            slowest,
            objective_ms: 0.0,
        };
        evaluation.objective_ms = evaluation.group_ms(evaluation.worst());
        evaluation
    }
}
