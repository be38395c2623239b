//! Search for a good grouping on clusters of any size.
//!
//! First groupings that are made in one go, for every number of groups that the lower bounds leave: along an order of the devices that
//! keeps near ones together, cut by count, by rate or as soon as memory allows; whole hosts or blocks dealt out by rate. Then
//! simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983) with a fixed number of groups, the most promising numbers
//! getting ever more of the effort (after successive halving: Karnin, Koren and Somekh 2013), and a descent at the end. What is annealed is
//! not the objective but how much the devices exceed a target a little below the best one so far (as graphs are coloured with a
//! given number of colours by annealing the conflicts: Johnson, Aragon, McGeoch and Schevon 1991).
//!
//! Effort is counted in links looked at, not in time, and random numbers come from a fixed seed: the same input gives the same
//! plan on any machine.

use super::anneal::{Annealed, Chain, exponential, in_threads};
use super::bound::Bounds;
use super::objective::{IDLE, Problem};
use super::random::Random;
use super::state::{Move, State};
use crate::cluster::LinkTable;

/// The target is below the best objective by this share of its work.
const UNDER: f64 = 0.03;
/// First and last temperature, as shares of the time that the target leaves for a group.
const HOT: f64 = 0.1;
const COLD: f64 = 0.02;
/// One in this many proposals moves several devices together.
const TOGETHER_ONE_IN: usize = 32;
/// Maximum number of devices for which such proposals pay.
pub(crate) const TOGETHER_MOST: usize = 128;
/// Maximum number of devices for which pairs of groups are merged.
const MERGE_MOST: usize = 64;
/// Rounds of annealing.
const ROUNDS: usize = 4;
/// Numbers of groups in each round at most, and its share of the effort.
const NUMBERS: [usize; ROUNDS] = [24, 6, 3, 1];
const SHARES: [f64; ROUNDS] = [0.15, 0.2, 0.25, 0.4];
/// Chains in a round at least: two processors for a thread each.
const CHAINS_LEAST: usize = 2;
/// Links that a chain looks at, at least, per device.
const CHAIN_LEAST: u64 = 16;
/// Chains shorter than this are not worth a thread.
pub(crate) const THREAD_LEAST: u64 = 20_000;

/// How hard to try, in links looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// For groupings made in one go.
    pub construct: u64,
    /// For annealing and descent.
    pub improve: u64,
}

/// Ways to see the devices: orders that keep near devices together, and blocks of them.
pub(crate) struct Views {
    /// Orders of all devices.
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
    /// Partitions of the devices into several blocks: the block of each device.
    blocks: Vec<Vec<u32>>,
    /// Values of the exponential distribution: logarithms take longer than many a proposal.
    exponential: Vec<f64>,
    allow_idle: bool,
    best: Option<Found>,
    /// By number of groups (index K - 1).
    by_groups: Vec<Option<Found>>,
    ops: u64,
}

impl<'p, 'a, L: LinkTable, E: Evaluate> Search<'p, 'a, L, E> {
    pub fn new(problem: &'p Problem<'a, L>, evaluate: E, bounds: Bounds, views: &Views, allow_idle: bool) -> Self {
        let n = problem.n();
        let several = views.blocks.iter().filter(|blocks| blocks.len() > 1 && blocks.len() < n);
        let block_of = |blocks: &Vec<Vec<u32>>| {
            let mut block_of = vec![0; n];
            for (place, block) in blocks.iter().enumerate() {
                block.iter().for_each(|&i| block_of[i as usize] = place as u32);
            }
            block_of
        };
        Search {
            problem,
            evaluate,
            bounds,
            blocks: several.map(block_of).collect(),
            exponential: exponential(),
            allow_idle,
            best: None,
            by_groups: vec![None; n],
            ops: 0,
        }
    }

    /// The best of each number of groups, best first; the bounds; and the objective.
    pub fn into_found(self) -> (Vec<Found>, Bounds, E) {
        let best = self.best.as_ref().map(|best| best.groups.len());
        let mut found: Vec<Found> = self.by_groups.into_iter().flatten().collect();
        // Of equal ones the first that was found.
        let key = |found: &Found| (Some(found.groups.len()) != best, found.objective_ms);
        found.sort_by(|a, b| key(a).0.cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1)));
        (found, self.bounds, self.evaluate)
    }

    /// The best objective found, ms.
    pub fn best_ms(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.objective_ms)
    }

    /// Takes a grouping into account, if every group is valid.
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

    /// Groupings made in one go.
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
    /// From the best found.
    pub fn improve(&mut self, budget: u64) {
        self.anneal(budget / 20 * 19);
        self.descend(budget / 20);
        self.merge();
    }

    /// Of every number of groups the best grouping with two of its groups made one: those that together take least. Where one group decides
    /// and cannot be bettered, what is left to win is the all-reduce.
    fn merge(&mut self) {
        if self.problem.n() > MERGE_MOST {
            return;
        }
        for k in (2..=self.problem.n()).rev() {
            if !self.may_improve(k - 1) {
                continue;
            }
            let Some(Found { groups, .. }) = self.by_groups[k - 1].clone() else { continue };
            let mut least = (f64::INFINITY, Vec::new(), (0, 0));
            for (b, a) in (1..k).flat_map(|b| (0..b).map(move |a| (b, a))) {
                let mut both = [&groups[a][..], &groups[b]].concat();
                both.sort_unstable();
                let (compute, communication) = self.problem.group(&both);
                if compute + communication < least.0 {
                    least = (compute + communication, both, (a, b));
                }
            }
            let (_, both, (a, b)) = least;
            if !both.is_empty() {
                let others = groups.into_iter().enumerate().filter(|(g, _)| *g != a && *g != b);
                self.offer(others.map(|(_, group)| group).chain([both]).collect());
            }
        }
    }

    /// Annealing, on ever fewer numbers of groups; two chains at a time.
    fn anneal(&mut self, budget: u64) {
        let n = self.problem.n();
        // A chain shorter than its setup is not worth starting.
        let most_chains = (budget / ROUNDS as u64 / (CHAIN_LEAST * n as u64)).max(1) as usize;
        for round in 0..ROUNDS {
            self.merge();
            let mut numbers: Vec<usize> = (1..=n).collect();
            numbers.retain(|&k| self.may_improve(k) && (k > 1 || self.allow_idle));
            // A number of groups without a valid grouping yet is as promising as its bound.
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
        let mut state = State::new(self.problem, start, UNDER);
        let tree = !self.allow_idle && self.problem.n() <= TOGETHER_MOST && start.len() > 1;
        if tree {
            state = state.with_tree();
        }
        let start_ms = if state.valid() { state.objective_ms() } else { f64::INFINITY };
        let unit_ms = state.limit_ms();
        let annealing = Annealing { search: self, state, tree, unit_ms, moves: Vec::new(), joined: Vec::new() };
        let mut chain = Chain::new(annealing, start_ms, false, budget, random);
        chain.advance(&self.exponential, 1.0);
        chain.into_answer()
    }

    /// Moves, as device, from and to, of several devices together: those that links slower than the slowest between groups join, as they must
    /// stay in one group; or some of those of one block. In the first case, half of the time the first device is an end of the slowest link
    /// between groups, and goes to where the other end is. Others may come back for them.
    fn propose_together(
        &self,
        state: &mut State<L>,
        random: &mut Random,
        joined: &mut Vec<u32>,
        moves: &mut Vec<(u32, u32, u32)>,
    ) {
        moves.clear();
        let Some(place) = state.slowest() else { return };
        state.ops += place as u64 / 2;
        let edge = self.problem.edges[place];
        let (i, to) = match random.below(4) {
            0 => (edge.i, state.group_of(edge.j)),
            1 => (edge.j, state.group_of(edge.i)),
            _ => (random.below(self.problem.n()) as u32, random.below(state.n_groups()) as u32),
        };
        let from = state.group_of(i);
        if from == to {
            return;
        }
        let block = match self.blocks.len() {
            0 => None,
            partitions => Some(&self.blocks[random.below(partitions)]).filter(|_| random.below(2) == 0),
        };
        let together = |state: &mut State<L>, i: u32, joined: &mut Vec<u32>, random: &mut Random| match block {
            Some(block) => {
                let group = state.members(state.group_of(i));
                joined.clear();
                joined.push(i);
                joined.extend(group.iter().filter(|m| **m != i && block[**m as usize] == block[i as usize]));
                let most = 2 * joined.len();
                joined.truncate(1 + random.below(most));
            }
            None => state.joined(i, place, joined),
        };
        together(state, i, joined, random);
        moves.extend(joined.iter().map(|&m| (m, from, to)));
        let (mut here, there) = (state.members(from).len() - joined.len(), state.members(to).len());
        let mut back = 0;
        // As many as came, or fewer; of blocks, often one.
        let returns = match block {
            Some(_) if random.below(2) == 0 => 1,
            _ => random.below(joined.len() + 2),
        };
        for _ in 0..returns {
            let j = state.members(to)[random.below(there)];
            if moves.iter().any(|(m, ..)| *m == j) {
                continue;
            }
            together(state, j, joined, random);
            joined.retain(|m| !moves.iter().any(|(moved, ..)| moved == m));
            back += joined.len();
            here += joined.len();
            moves.extend(joined.iter().map(|&m| (m, to, from)));
        }
        if here == 0 || back == there {
            // A group of none: the number of groups is fixed.
            moves.clear();
        }
    }

    /// A random change: a device of the worst group, or any, into the group of another device, alone or in its place.
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

    /// From the best grouping, every change that brings it nearer to the target, until there is none.
    fn descend(&mut self, budget: u64) {
        let Some(best) = self.best.clone() else { return };
        let n = self.problem.n() as u32;
        let mut state = State::new(self.problem, &best.groups, UNDER);
        let mut best = (best.objective_ms, None);
        let mut since = 0;
        // Until a whole round improves nothing.
        let mut i = 0;
        while since < n && state.ops < budget {
            let mut to: Vec<Move> = (0..state.n_groups() as u32).map(|to| Move { i, to, j: None }).collect();
            if self.allow_idle {
                to.push(Move { i, to: IDLE, j: None });
            }
            to.extend((0..n).filter(|&j| j != i).map(|j| Move { i, to: IDLE, j: Some(j) }));
            let mut improved = false;
            for mut change in to {
                if let Some(j) = change.j {
                    change.to = state.group_of(j);
                }
                if state.ops > budget {
                    break;
                }
                let most = state.excess_ms() * (1.0 - 1e-12);
                let Some(after) = state.after(change, most) else { continue };
                if after.excess_ms < most {
                    state.apply(change, after);
                    improved = true;
                    if state.valid() && state.objective_ms() < best.0 * (1.0 - 1e-12) {
                        best = (state.objective_ms(), Some(state.grouping()));
                    }
                }
            }
            since = if improved { 0 } else { since + 1 };
            i = (i + 1) % n;
        }
        self.ops += state.ops;
        if let Some(groups) = best.1 {
            self.offer(groups);
        }
    }
}

/// A grouping that is annealed by the published objective.
struct Annealing<'s, 'p, 'a, L> {
    search: &'s Search<'p, 'a, L, &'p Problem<'a, L>>,
    state: State<'p, 'a, L>,
    /// Whether several devices move together at times.
    tree: bool,
    /// Time that the first target leaves for a group, ms: the unit of temperatures.
    unit_ms: f64,
    moves: Vec<(u32, u32, u32)>,
    joined: Vec<u32>,
}

impl<L: LinkTable> Annealed for Annealing<'_, '_, '_, L> {
    type Answer = Vec<Vec<u32>>;

    fn ops(&self) -> u64 {
        self.state.ops
    }

    fn set_target(&mut self, progress: f64, _: f64) -> f64 {
        // The target is set whenever there is a better grouping.
        self.unit_ms * HOT * (COLD / HOT).powf(progress)
    }

    fn excess_ms(&self) -> f64 {
        self.state.excess_ms()
    }

    fn count_proposal(&mut self) {
        self.state.ops += 1;
    }

    fn change(&mut self, random: &mut Random, most_ms: f64) -> bool {
        if self.tree && random.below(TOGETHER_ONE_IN) == 0 {
            self.search.propose_together(&mut self.state, random, &mut self.joined, &mut self.moves);
            return self.state.exchange(&self.moves, most_ms);
        }
        let Some(change) = self.search.propose(&self.state, random) else { return false };
        let Some(after) = self.state.after(change, most_ms) else { return false };
        self.state.apply(change, after);
        true
    }

    fn objective_below(&mut self, limit_ms: f64) -> Option<f64> {
        let below = |state: &State<L>| state.valid() && state.objective_ms() < limit_ms;
        if below(&self.state) && self.search.problem.n() <= TOGETHER_MOST {
            // Rounding may have made it better than it is.
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

/// Groupings into `k` groups that are made in one go, each once.
fn constructed<L: LinkTable>(problem: &Problem<L>, views: &Views, k: usize) -> Vec<Vec<Vec<u32>>> {
    let mut made: Vec<Vec<Vec<u32>>> = Vec::new();
    // Like devices are cut alike, by whatever.
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

/// Distributes devices to `k` groups by memory, which may be scarce.
fn dealt_by_memory<L: LinkTable>(problem: &Problem<L>, k: usize) -> Vec<Vec<u32>> {
    let singles: Vec<Vec<u32>> = (0..problem.n() as u32).map(|i| vec![i]).collect();
    deal(&singles, k, |i| problem.memory[i as usize].min(problem.n_experts) as f64)
}

/// Where an order is cut.
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
        // A device goes where most of it belongs.
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

/// Distributes whole blocks to `k` groups: the heaviest first, each to the lightest group.
fn deal(blocks: &[Vec<u32>], k: usize, weight: impl Fn(u32) -> f64) -> Vec<Vec<u32>> {
    let rate = |block: &Vec<u32>| block.iter().map(|&i| weight(i)).sum::<f64>();
    let mut order: Vec<(f64, usize)> = blocks.iter().map(rate).zip(0..).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    // Not negative, so the bits are in the numbers' order.
    let mut heap: std::collections::BinaryHeap<_> = (0..k).map(|g| std::cmp::Reverse((0u64, g))).collect();
    let mut groups = vec![Vec::new(); k];
    for (rate, block) in order {
        let Some(std::cmp::Reverse((bits, g))) = heap.pop() else { break };
        groups[g].extend(&blocks[block]);
        heap.push(std::cmp::Reverse(((f64::from_bits(bits) + rate).to_bits(), g)));
    }
    groups
}
