//! Search for good groupings on clusters of any size.
//!
//! Groupings are first constructed for every number of groups that the lower bounds allow: an order of the devices that keeps near ones together is
//! split by count, rate or memory; hosts and blocks are assigned by rate. The published objective is then annealed with a fixed number of groups. The
//! most promising numbers get an increasing share of the effort (successive halving: Karnin, Koren and Somekh 2013).

use super::anneal::{Annealed, Chain, exponential, in_threads};
use super::bound::Bounds;
use super::objective::{IDLE, Problem};
use super::state::{Move, State, TOWARD_MOST};
use crate::cluster::LinkTable;
use aristos_balance::Random;

/// The target is the best objective with all but its all-reduce term reduced by this share.
const UNDER: f64 = 0.03;
/// First and last temperature, relative to the first limit of a group.
const HOT: f64 = 0.1;
const COLD: f64 = 0.02;
/// Rounds of annealing.
const ROUNDS: usize = 4;
/// Maximum number of group counts in each round, and the share of the effort.
const NUMBERS: [usize; ROUNDS] = [24, 6, 3, 1];
const SHARES: [f64; ROUNDS] = [0.15, 0.2, 0.25, 0.4];
/// Minimum number of chains in a round, one per thread.
const CHAINS_LEAST: usize = 2;
/// Minimum number of links that a chain examines, per device.
const CHAIN_LEAST: u64 = 16;
/// Minimum number of links of a chain that is worth a thread.
pub(crate) const THREAD_LEAST: u64 = 20_000;

/// Search effort, in links examined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// For constructed groupings.
    pub construct: u64,
    /// For annealing.
    pub improve: u64,
}

/// Orders and partitions of the devices from which groupings are constructed.
pub(crate) struct Views {
    /// Orders of all devices that keep near ones together.
    pub orders: Vec<Vec<u32>>,
    /// Partitions of the devices: hosts, blocks of tiers.
    pub blocks: Vec<Vec<Vec<u32>>>,
}

/// A grouping and its objective, computed fresh.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub groups: Vec<Vec<u32>>,
    pub objective_ms: f64,
}

/// An objective of groupings.
pub(crate) trait Evaluate {
    /// Returns the objective of groups, each valid and ascending; `None` where their experts cannot be placed. Adds the links examined to `ops`.
    fn objective_ms(&mut self, groups: &[Vec<u32>], ops: &mut u64) -> Option<f64>;
}

/// The published objective.
impl<L: LinkTable> Evaluate for &Problem<'_, L> {
    fn objective_ms(&mut self, groups: &[Vec<u32>], ops: &mut u64) -> Option<f64> {
        *ops += groups.iter().map(|members| self.links.sums_cost(members.len())).sum::<u64>();
        Some(self.evaluate(groups).objective_ms)
    }
}

/// The best groupings found, by an objective `E`.
pub(crate) struct Search<'p, 'a, L, E> {
    problem: &'p Problem<'a, L>,
    evaluate: E,
    bounds: Bounds,
    /// Table of the exponential distribution.
    exponential: Vec<f64>,
    allow_idle: bool,
    best: Option<Found>,
    /// By number of groups (index K - 1).
    by_groups: Vec<Option<Found>>,
    ops: u64,
}

impl<'p, 'a, L: LinkTable, E: Evaluate> Search<'p, 'a, L, E> {
    pub fn new(problem: &'p Problem<'a, L>, evaluate: E, bounds: Bounds, allow_idle: bool) -> Self {
        Search {
            problem,
            evaluate,
            bounds,
            exponential: exponential(),
            allow_idle,
            best: None,
            by_groups: vec![None; problem.n()],
            ops: 0,
        }
    }

    /// Returns the best grouping for each number of groups, best first; the bounds; and the evaluator.
    pub fn into_found(self) -> (Vec<Found>, Bounds, E) {
        let best = self.best.as_ref().map(|best| best.groups.len());
        let mut found: Vec<Found> = self.by_groups.into_iter().flatten().collect();
        let key = |found: &Found| (Some(found.groups.len()) != best, found.objective_ms);
        found.sort_by(|a, b| key(a).0.cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1)));
        (found, self.bounds, self.evaluate)
    }

    /// The best objective found, ms.
    pub fn best_ms(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.objective_ms)
    }

    /// Records a grouping if every group is valid.
    pub fn offer(&mut self, mut groups: Vec<Vec<u32>>) {
        groups.iter_mut().for_each(|members| members.sort_unstable());
        if groups.is_empty() || !groups.iter().all(|members| self.problem.valid(members)) {
            return;
        }
        if let Some(objective_ms) = self.evaluate.objective_ms(&groups, &mut self.ops) {
            self.keep(Found { groups, objective_ms });
        }
    }

    fn keep(&mut self, found: Found) {
        let place = &mut self.by_groups[found.groups.len() - 1];
        if place.as_ref().is_none_or(|known| found.objective_ms < known.objective_ms) {
            *place = Some(found.clone());
        }
        if found.objective_ms < self.best_ms() {
            self.best = Some(found);
        }
    }

    /// Whether a grouping into `k` groups may be better than the best.
    fn may_improve(&self, k: usize) -> bool {
        self.bounds.by_groups[k - 1] < self.best_ms() * (1.0 - 1e-12)
    }

    /// Offers constructed groupings.
    pub fn construct(&mut self, views: &Views, budget: u64) {
        for blocks in &views.blocks {
            self.offer(blocks.clone());
        }
        let mut numbers: Vec<usize> = (1..=self.problem.n()).collect();
        numbers.retain(|&k| self.bounds.by_groups[k - 1].is_finite());
        numbers.sort_by(|&a, &b| self.bounds.by_groups[a - 1].total_cmp(&self.bounds.by_groups[b - 1]).then(a.cmp(&b)));
        let end = self.ops + budget;
        for k in numbers {
            if !self.may_improve(k) || self.ops > end {
                break;
            }
            let made = constructed(self.problem, views, k);
            self.ops += (made.len() * self.problem.n()) as u64;
            made.into_iter().for_each(|groups| self.offer(groups));
            if self.by_groups[k - 1].is_none() {
                // Memory is tight.
                self.offer(dealt_by_memory(self.problem, k));
            }
        }
    }
}

/// Annealing by the published objective.
impl<'p, 'a, L: LinkTable> Search<'p, 'a, L, &'p Problem<'a, L>> {
    /// Anneals from the best groupings, for ever fewer numbers of groups.
    pub fn improve(&mut self, budget: u64) {
        let n = self.problem.n();
        // Chains shorter than their setup are not started.
        let most_chains = (budget / ROUNDS as u64 / (CHAIN_LEAST * n as u64)).max(1) as usize;
        for round in 0..ROUNDS {
            let mut numbers: Vec<usize> = (1..=n).collect();
            numbers.retain(|&k| self.may_improve(k) && (k > 1 || self.allow_idle));
            // A number of groups without a valid grouping is ranked by its bound.
            let known =
                |k: usize| self.by_groups[k - 1].as_ref().map_or(self.bounds.by_groups[k - 1], |f| f.objective_ms);
            numbers.sort_by(|&a, &b| known(a).total_cmp(&known(b)).then(a.cmp(&b)));
            numbers.truncate(NUMBERS[round].min(most_chains));
            if numbers.is_empty() {
                return;
            }
            let start = |k: usize| match &self.by_groups[k - 1] {
                Some(found) => found.groups.clone(),
                None => dealt_by_memory(self.problem, k),
            };
            let mut chains: Vec<(Vec<Vec<u32>>, u64)> =
                numbers.iter().map(|&k| (start(k), (round * 65_536 + k) as u64)).collect();
            if chains.len() < CHAINS_LEAST.min(most_chains) {
                let more = chains.iter().map(|(start, seed)| (start.clone(), seed + 32_768)).collect::<Vec<_>>();
                chains.extend(more);
            }
            let each = (budget as f64 * SHARES[round]) as u64 / chains.len() as u64;
            let anneal = |(start, seed): (Vec<Vec<u32>>, u64)| self.anneal_from(&start, each, Random(seed));
            let found = in_threads(chains, each >= THREAD_LEAST, anneal);
            found.into_iter().flatten().for_each(|groups| self.offer(groups));
        }
    }

    /// The best valid grouping of a chain from `start`, if it is better than `start`.
    fn anneal_from(&self, start: &[Vec<u32>], budget: u64, random: Random) -> Option<Vec<Vec<u32>>> {
        let state = State::new(self.problem, start, UNDER);
        let start_ms = if state.valid() { state.objective_ms() } else { f64::INFINITY };
        let unit_ms = state.limit_ms();
        let annealing = Annealing { search: self, state, unit_ms };
        let mut chain = Chain::new(annealing, start_ms, false, budget, random);
        chain.advance(&self.exponential, 1.0);
        chain.into_answer()
    }

    /// A random change: a device, of the worst group or of any, moves to another group or becomes idle, or is swapped with another device.
    fn propose(&self, state: &State<L>, random: &mut Random) -> Option<Move> {
        let n = self.problem.n();
        let i = if random.below(8) < 3 {
            let worst = state.members(state.worst());
            worst[random.below(worst.len())]
        } else {
            random.below(n) as u32
        };
        if self.allow_idle && random.below(8) == 0 {
            return Some(Move { i, to: IDLE, j: None });
        }
        if random.below(2) == 0 {
            let to = random.below(state.n_groups()) as u32;
            return Some(Move { i, to, j: None });
        }
        let j = random.below(n) as u32;
        Some(Move { i, to: state.group_of(j), j: Some(j) })
    }
}

/// A grouping annealed by the published objective.
struct Annealing<'s, 'p, 'a, L> {
    search: &'s Search<'p, 'a, L, &'p Problem<'a, L>>,
    state: State<'p, 'a, L>,
    /// Limit of a group under the first target, ms: the unit of temperatures.
    unit_ms: f64,
}

impl<L: LinkTable> Annealed for Annealing<'_, '_, '_, L> {
    type Answer = Vec<Vec<u32>>;

    fn ops(&self) -> u64 {
        self.state.ops
    }

    fn set_target(&mut self, progress: f64, _: f64) -> f64 {
        // `answer` sets the target.
        self.unit_ms * HOT * (COLD / HOT).powf(progress)
    }

    fn excess_ms(&self) -> f64 {
        self.state.excess_ms()
    }

    fn count_proposal(&mut self) {
        self.state.ops += 1;
    }

    fn change(&mut self, random: &mut Random, most_ms: f64) -> bool {
        let Some(change) = self.search.propose(&self.state, random) else { return false };
        let Some(after) = self.state.after(change, most_ms) else { return false };
        self.state.apply(change, after);
        true
    }

    fn objective_below(&mut self, limit_ms: f64) -> Option<f64> {
        let below = |state: &State<L>| state.valid() && state.objective_ms() < limit_ms;
        if below(&self.state) && self.search.problem.n() <= TOWARD_MOST {
            // Accumulated rounding errors may make the objective too low.
            self.state.refresh();
        }
        below(&self.state).then(|| self.state.objective_ms())
    }

    fn answer(&mut self) -> Self::Answer {
        self.state.ops += self.search.problem.n() as u64;
        let target_ms = self.state.under(UNDER);
        let groups = self.state.grouping();
        self.state.aim(target_ms);
        groups
    }
}

/// Constructs distinct groupings into `k` groups.
fn constructed<L: LinkTable>(problem: &Problem<L>, views: &Views, k: usize) -> Vec<Vec<Vec<u32>>> {
    let mut made: Vec<Vec<Vec<u32>>> = Vec::new();
    // Equal devices give the same split by count, rate and memory.
    let mut keep = |groups: Vec<Vec<u32>>| {
        if !made.contains(&groups) {
            made.push(groups);
        }
    };
    for order in &views.orders {
        for by in [CutBy::Count, CutBy::Rate, CutBy::Memory] {
            keep(cut(problem, order, k, by));
        }
    }
    for blocks in views.blocks.iter().filter(|blocks| blocks.len() >= k) {
        keep(deal(blocks, k, |i| problem.flops[i as usize]));
    }
    made
}

/// Distributes devices to `k` groups by memory, for clusters short of it.
fn dealt_by_memory<L: LinkTable>(problem: &Problem<L>, k: usize) -> Vec<Vec<u32>> {
    let singles: Vec<Vec<u32>> = (0..problem.n() as u32).map(|i| vec![i]).collect();
    deal(&singles, k, |i| problem.memory[i as usize].min(problem.n_experts) as f64)
}

/// The weight by which an order is split.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CutBy {
    Count,
    Rate,
    Memory,
}

/// About `k` valid groups of consecutive devices of an order; the last one gets the remainder.
fn cut<L: LinkTable>(problem: &Problem<L>, order: &[u32], k: usize, by: CutBy) -> Vec<Vec<u32>> {
    let weight = |i: u32| match by {
        CutBy::Count => 1.0,
        CutBy::Rate => problem.flops[i as usize],
        CutBy::Memory => problem.memory[i as usize].min(problem.n_experts) as f64,
    };
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let mut groups = Vec::with_capacity(k);
    let mut group: Vec<u32> = Vec::new();
    let (mut sum, mut memory) = (0.0, 0u64);
    for &i in order {
        let half = weight(i) / 2.0;
        let target = total * (groups.len() + 1) as f64 / k as f64;
        // A device joins the group that covers more of its weight.
        if memory >= problem.n_experts && sum + half > target && groups.len() + 1 < k {
            groups.push(std::mem::take(&mut group));
            memory = 0;
        }
        sum += 2.0 * half;
        memory = memory.saturating_add(problem.memory[i as usize]);
        group.push(i);
    }
    match groups.last_mut() {
        Some(last) if memory < problem.n_experts => last.extend(group),
        _ => groups.push(group),
    }
    groups
}

/// Assigns whole blocks to `k` groups: the heaviest first, each to the lightest group.
fn deal(blocks: &[Vec<u32>], k: usize, weight: impl Fn(u32) -> f64) -> Vec<Vec<u32>> {
    let rate = |block: &Vec<u32>| block.iter().map(|&i| weight(i)).sum::<f64>();
    let mut order: Vec<(f64, usize)> = blocks.iter().map(rate).zip(0..).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    // Sums of weights are not negative, so their bits sort like the numbers.
    let mut heap: std::collections::BinaryHeap<_> = (0..k).map(|g| std::cmp::Reverse((0u64, g))).collect();
    let mut groups = vec![Vec::new(); k];
    for (rate, block) in order {
        let Some(std::cmp::Reverse((bits, g))) = heap.pop() else { break };
        groups[g].extend(&blocks[block]);
        heap.push(std::cmp::Reverse(((f64::from_bits(bits) + rate).to_bits(), g)));
    }
    groups
}
