//! The best placement in a small group, by depth-first branch and bound over the experts, the most expensive first.

use super::{Experts, Placed};
use crate::cluster::LinkTable;
use crate::placement::DeviceExperts;

/// Maximum number of experts, the depth of the recursion.
const MOST_EXPERTS: usize = 256;

/// A group's devices and the links between them.
pub(super) struct GroupLinks {
    flops: Vec<f64>,
    memory: Vec<u64>,
    /// By receiver j and sender i, at j n + i: alpha, and beta times the MB of all experts.
    alpha: Vec<f64>,
    beta: Vec<f64>,
    /// Sums over the senders of a receiver.
    received: Vec<(f64, f64)>,
    eta: f64,
}

impl GroupLinks {
    pub fn new<L: LinkTable>(placed: &Placed<L>, members: &[u32]) -> GroupLinks {
        let (problem, n) = (placed.problem, members.len());
        let mb = placed.received_mb(placed.experts.total);
        let (mut alpha, mut beta) = (vec![0.0; n * n], vec![0.0; n * n]);
        for (place, &j) in members.iter().enumerate() {
            for (from, &i) in members.iter().enumerate().filter(|(from, _)| *from != place) {
                let link = problem.links.link_to(j as usize, i as usize);
                alpha[place * n + from] = link.alpha_ms;
                beta[place * n + from] = link.beta_ms_per_mb * mb;
            }
        }
        let sum = |values: &[f64], j: usize| values[j * n..(j + 1) * n].iter().sum();
        GroupLinks {
            flops: members.iter().map(|&i| problem.flops[i as usize]).collect(),
            memory: members.iter().map(|&i| problem.memory[i as usize]).collect(),
            received: (0..n).map(|j| (sum(&alpha, j), sum(&beta, j))).collect(),
            alpha,
            beta,
            eta: problem.workload.p2p_frequency,
        }
    }

    fn n(&self) -> usize {
        self.flops.len()
    }
}

/// A search for a placement faster than the best known.
pub(super) struct Branch<'g> {
    links: &'g GroupLinks,
    experts: &'g Experts,
    /// FLOP of the experts from each position of the order on.
    rest: Vec<f64>,
    /// Devices, fastest first.
    devices: Vec<u32>,
    load: Vec<f64>,
    free: Vec<u64>,
    held: Vec<u64>,
    /// The device of each placed expert.
    owner: Vec<u32>,
    /// Send time of each device, ms: one row per number of placed experts, so that backtracking restores it for free.
    sent: Vec<f64>,
    /// Lower bounds on compute and exchange of any placement, ms.
    least: (f64, f64),
    best_ms: f64,
    best: Option<Vec<u32>>,
    left: u64,
}

impl<'g> Branch<'g> {
    /// A search below `best_ms` of at most about `nodes` nodes.
    pub fn new(links: &'g GroupLinks, experts: &'g Experts, best_ms: f64, nodes: u64) -> Self {
        let n = links.n();
        let n_experts = experts.order.len();
        let mut rest = vec![0.0; n_experts + 1];
        for place in (0..n_experts).rev() {
            rest[place] = rest[place + 1] + experts.costs[experts.order[place] as usize];
        }
        let mut devices: Vec<u32> = (0..n as u32).collect();
        devices.sort_by(|&a, &b| links.flops[b as usize].total_cmp(&links.flops[a as usize]).then(a.cmp(&b)));
        let rate: f64 = (0..n).filter(|&i| links.memory[i] > 0).map(|i| links.flops[i]).sum();
        let most = n_experts.min(n).max(1) as f64;
        let share = if experts.total > 0.0 { 1.0 / most } else { 0.0 };
        // Some device has at least that share.
        let receive = links.received.iter().map(|(alpha, beta)| alpha + share * beta).fold(f64::INFINITY, f64::min);
        Branch {
            links,
            experts,
            rest,
            devices,
            load: vec![0.0; n],
            free: links.memory.clone(),
            held: vec![0; n],
            owner: Vec::with_capacity(n_experts),
            sent: vec![0.0; (n_experts.min(MOST_EXPERTS) + 1) * n],
            least: (n as f64 * experts.total / rate, if n > 1 { receive } else { 0.0 }),
            best_ms,
            best: None,
            left: if n_experts > MOST_EXPERTS { 0 } else { nodes },
        }
    }

    /// Number of nodes left. If it is above 0, the search was complete.
    pub fn nodes_left(&self) -> u64 {
        self.left
    }

    /// The best placement, if one was better than the known one.
    pub fn into_best(self) -> Option<DeviceExperts> {
        let owner = self.best?;
        let mut placement = vec![Vec::new(); self.links.n()];
        owner.iter().zip(&self.experts.order).for_each(|(&i, &e)| placement[i as usize].push(e));
        placement.iter_mut().for_each(|held| held.sort_unstable());
        Some(placement)
    }

    /// Enumerates all placements that may be faster.
    pub fn search(&mut self) {
        if self.left > 0 {
            self.go(0, 0.0, 0.0);
        }
    }

    /// Places the experts from `place` on. `compute` (FLOP over rate) and `exchange` are the longest so far.
    fn go(&mut self, place: usize, compute: f64, exchange: f64) {
        let n = self.links.n();
        let limit = self.best_ms * (1.0 - 1e-12);
        let size = n as f64;
        if place == self.experts.order.len() {
            let ms = size * compute + self.links.eta * exchange;
            if ms < limit {
                self.best_ms = ms;
                self.best = Some(self.owner.clone());
            }
            return;
        }
        self.left = self.left.saturating_sub(1);
        let exchange_least = self.links.eta * exchange.max(self.least.1);
        if self.left == 0 || (size * compute).max(self.least.0) + exchange_least >= limit {
            return;
        }
        // FLOP that all devices together can add within the limit.
        let cost = self.experts.costs[self.experts.order[place] as usize];
        let most = (limit - exchange_least) / size;
        let room: f64 =
            (0..n).map(|i| (most * self.links.flops[i] - self.load[i]).clamp(0.0, self.free[i] as f64 * cost)).sum();
        if room < self.rest[place] * (1.0 - 1e-12) {
            return;
        }
        // Symmetry: among experts of equal cost, devices ascend.
        let twin = place > 0 && self.experts.costs[self.experts.order[place - 1] as usize] == cost;
        let first = match twin {
            true => self.devices.iter().position(|i| Some(i) == self.owner.last()).unwrap_or(0),
            false => 0,
        };
        let share = self.experts.share(cost);
        for at in first..n {
            let j = self.devices[at] as usize;
            if self.free[j] == 0 {
                continue;
            }
            let load = self.load[j] + cost;
            let compute = compute.max(load / self.links.flops[j]);
            let (alpha, beta) = self.links.received[j];
            let received = alpha + self.experts.share(load) * beta;
            let mut longest = exchange.max(received);
            if size * compute + self.links.eta * longest >= self.best_ms * (1.0 - 1e-12) {
                continue;
            }
            let first = if self.held[j] == 0 { 1.0 } else { 0.0 };
            let (before, after) = self.sent.split_at_mut((place + 1) * n);
            let before = &before[place * n..];
            let (alpha, beta) = (&self.links.alpha[j * n..(j + 1) * n], &self.links.beta[j * n..(j + 1) * n]);
            for i in 0..n {
                after[i] = before[i] + first * alpha[i] + share * beta[i];
                longest = longest.max(after[i]);
            }
            let load_before = std::mem::replace(&mut self.load[j], load);
            self.free[j] -= 1;
            self.held[j] += 1;
            self.owner.push(j as u32);
            self.go(place + 1, compute, longest);
            self.owner.pop();
            self.held[j] -= 1;
            self.free[j] += 1;
            self.load[j] = load_before;
            if self.left == 0 {
                return;
            }
        }
    }
}
