//! Which devices of a group hold which experts, under the placed objective: thorough, for the groups of an answer. Simulated annealing of the
//! placement from one in which experts are dealt out ([`super::deal`]), and branch and bound where the group is small.

use super::branch::Branch;
use super::{Experts, Placed, PlacedTimes};
use crate::cluster::LinkTable;
use crate::placement::DeviceExperts;
use crate::random::Random;

/// Groups of more devices are not improved after they are dealt out: their links are too many.
const IMPROVED_MOST: usize = 512;
/// Temperatures of the annealing at first and at last, as shares of what the group takes.
const HOT: f64 = 0.02;
const COLD: f64 = 0.0002;

/// A group's devices and the links between them, near in memory.
pub(super) struct GroupLinks {
    pub flops: Vec<f64>,
    pub memory: Vec<u64>,
    /// By receiver j and sender i, at j n + i: alpha, and beta times the MB that all experts together are sent.
    pub alpha: Vec<f64>,
    pub beta: Vec<f64>,
    /// Sums over the senders of a receiver.
    pub received: Vec<(f64, f64)>,
    pub eta: f64,
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

    pub fn n(&self) -> usize {
        self.flops.len()
    }
}

/// What the devices of a group do while their experts change.
struct Working<'g> {
    links: &'g GroupLinks,
    experts: &'g Experts,
    /// FLOP of each device's experts, and how many they are.
    load: Vec<f64>,
    count: Vec<u64>,
    /// ms that each sends.
    send: Vec<f64>,
}

impl Clone for Working<'_> {
    fn clone(&self) -> Self {
        let Working { links, experts, load, count, send } = self;
        Working { links, experts, load: load.clone(), count: count.clone(), send: send.clone() }
    }

    // Without an allocation.
    fn clone_from(&mut self, other: &Self) {
        self.load.copy_from_slice(&other.load);
        self.count.copy_from_slice(&other.count);
        self.send.copy_from_slice(&other.send);
    }
}

impl<'g> Working<'g> {
    fn new(links: &'g GroupLinks, experts: &'g Experts, placement: &DeviceExperts) -> Self {
        let n = links.n();
        let mut working = Working { links, experts, load: vec![0.0; n], count: vec![0; n], send: vec![0.0; n] };
        for (j, held) in placement.iter().enumerate() {
            if !held.is_empty() {
                working.change(j, held.iter().map(|&e| experts.costs[e as usize]).sum(), held.len() as i64);
            }
        }
        working
    }

    /// Device `j` gets `cost` more, in `count` experts more.
    fn change(&mut self, j: usize, cost: f64, count: i64) {
        let n = self.links.n();
        let held = self.count[j] > 0;
        self.count[j] = self.count[j].wrapping_add_signed(count);
        let holds = self.count[j] > 0;
        // Nothing held is nothing at all, whatever sums leave.
        let load = if holds { self.load[j] + cost } else { 0.0 };
        let share = self.experts.share(load - self.load[j]);
        self.load[j] = load;
        let first = f64::from(i8::from(holds) - i8::from(held));
        let (alpha, beta) = (&self.links.alpha[j * n..(j + 1) * n], &self.links.beta[j * n..(j + 1) * n]);
        for ((send, alpha), beta) in self.send.iter_mut().zip(alpha).zip(beta) {
            *send += first * alpha + share * beta;
        }
    }

    fn ms(&self) -> f64 {
        let n = self.links.n();
        let (mut compute, mut longest) = (0.0f64, 0.0f64);
        for i in 0..n {
            compute = compute.max(self.load[i] / self.links.flops[i]);
            longest = longest.max(self.send[i]);
            if self.count[i] > 0 {
                let (alpha, beta) = self.links.received[i];
                longest = longest.max(alpha + self.experts.share(self.load[i]) * beta);
            }
        }
        n as f64 * compute + self.links.eta * longest
    }
}

impl<L: LinkTable> Placed<'_, '_, L> {
    /// A group's placement as it was dealt out, improved by annealing that looks at about `budget` links, and by branch and bound of at most `nodes`
    /// nodes.
    pub fn improved(&self, members: &[u32], dealt: PlacedTimes, budget: u64, nodes: u64) -> PlacedTimes {
        self.improved_below(members, dealt, f64::INFINITY, budget, nodes).0
    }

    /// The same, and how many nodes are left: with any left there is no placement that takes less, or none below `least_ms`.
    pub fn improved_below(
        &self,
        members: &[u32],
        (placement, times): PlacedTimes,
        least_ms: f64,
        budget: u64,
        nodes: u64,
    ) -> (PlacedTimes, u64) {
        if members.len() > IMPROVED_MOST || members.len() == 1 {
            return ((placement, times), if members.len() == 1 { nodes } else { 0 });
        }
        let links = GroupLinks::new(self, members);
        let placement = self.anneal(&links, placement, budget);
        let known_ms = self.placed_times(members, &placement).ms();
        let mut branch = Branch::new(&links, &self.experts, known_ms.min(least_ms), nodes);
        branch.search();
        let left = branch.nodes_left();
        let placement = branch.into_best().unwrap_or(placement);
        let times = self.placed_times(members, &placement);
        ((placement, times), left)
    }

    /// No placement in this group takes less, ms.
    pub fn least_ms(&self, members: &[u32]) -> f64 {
        let problem = self.problem;
        let size = members.len() as f64;
        let with_memory =
            || members.iter().filter(|&&i| problem.memory[i as usize] > 0).map(|&i| problem.flops[i as usize]);
        let rate: f64 = with_memory().sum();
        let fastest = with_memory().fold(0.0, f64::max);
        let dearest = self.experts.order.first().map_or(0.0, |&e| self.experts.costs[e as usize]);
        let compute = size * (self.experts.total / rate).max(dearest / fastest);
        // Of the devices with experts, one has an even share or more.
        let share = self.received_mb(self.experts.total) / members.len().min(self.experts.costs.len()) as f64;
        let sums = problem.links.received_sums(members);
        let received = sums.iter().map(|(alpha, beta)| alpha + share * beta).fold(f64::INFINITY, f64::min);
        (compute + problem.workload.p2p_frequency * received) * (1.0 - 1e-12)
    }

    fn anneal(&self, links: &GroupLinks, start: DeviceExperts, budget: u64) -> DeviceExperts {
        let (n, n_experts) = (links.n(), self.experts.costs.len());
        let mut owner = vec![0usize; n_experts];
        for (j, held) in start.iter().enumerate() {
            held.iter().for_each(|&e| owner[e as usize] = j);
        }
        let mut working = Working::new(links, &self.experts, &start);
        let cost = |e: usize| self.experts.costs[e];
        let mut trial = working.clone();
        let mut now = working.ms();
        let (first, mut best) = (now, (now, None));
        let mut random = Random(n as u64 * 1_000_003 + n_experts as u64);
        // A change looks at all devices about four times.
        let steps = budget / (4 * n as u64 + 8);
        for step in 0..steps {
            let temperature = first * HOT * (COLD / HOT).powf(step as f64 / steps as f64);
            let e = random.below(n_experts);
            let from = owner[e];
            let (to, other) = if random.below(2) == 0 {
                (random.below(n), None)
            } else {
                let other = random.below(n_experts);
                (owner[other], Some(other))
            };
            if to == from || (other.is_none() && working.count[to] >= links.memory[to]) {
                continue;
            }
            let moved = cost(e) - other.map_or(0.0, cost);
            if other.is_some() && moved == 0.0 {
                continue;
            }
            let count = i64::from(other.is_none());
            trial.clone_from(&working);
            trial.change(from, -moved, -count);
            trial.change(to, moved, count);
            let then = trial.ms();
            if then > now && random.real() >= ((now - then) / temperature).exp() {
                continue;
            }
            std::mem::swap(&mut working, &mut trial);
            owner[e] = to;
            if let Some(other) = other {
                owner[other] = from;
            }
            now = then;
            if now < best.0 * (1.0 - 1e-12) {
                best = (now, Some(owner.clone()));
            }
        }
        let Some(owner) = best.1 else { return start };
        let mut placement = vec![Vec::new(); n];
        owner.iter().enumerate().for_each(|(e, &j)| placement[j].push(e as u32));
        placement
    }
}
