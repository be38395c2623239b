//! Search for a good grouping on clusters of any size.
//!
//! First groupings that are made in one go, for every number of groups that the lower bounds leave: along an order of the devices that
//! keeps near ones together, cut by count, by rate or as soon as memory allows; whole hosts or blocks dealt out by rate. Then
//! simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983) with a fixed number of groups, the most promising numbers
//! getting ever more of the effort (after successive halving: Karnin, Koren and Somekh 2013), and a descent at the end.
//!
//! Effort is counted in links looked at, not in time, and random numbers come from a fixed seed: the same input gives the same
//! plan on any machine.

use super::bound::Bounds;
use super::objective::{IDLE, Problem};
use super::state::{Move, State, Worth};
use crate::cluster::LinkTable;

/// How much the devices' 8-norm or the groups' mean, in turn, count beside the objective while annealing: with the maximum alone, most moves change
/// nothing.
const NORM_WEIGHT: f64 = 1.0;
const MEAN_WEIGHT: f64 = 0.2;
/// One in so many proposals moves all devices that slow links join.
const JOINED_ONE_IN: usize = 8;
/// Beyond so many devices such proposals cost more than they bring.
const JOINED_MOST: usize = 128;
/// The same in the descent, where it only breaks ties.
const MEAN_TIE: f64 = 1e-6;
/// Rounds of annealing.
const ROUNDS: usize = 4;
/// Numbers of groups in each round at most, and its share of the effort.
const NUMBERS: [usize; ROUNDS] = [24, 6, 3, 1];
const SHARES: [f64; ROUNDS] = [0.15, 0.2, 0.25, 0.4];
/// How hot each round starts, by the moves' mean cost. Long and hot at last: short chains seldom end as well.
const COOLER: [f64; ROUNDS] = [1.0, 0.6, 0.6, 0.6];
/// Chains in a round at least: two processors for a thread each.
const CHAINS_LEAST: usize = 2;
/// Links that a chain looks at, at least, per device.
const CHAIN_LEAST: u64 = 16;
/// Chains shorter than this are not worth a thread.
const THREAD_LEAST: u64 = 20_000;

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

/// The best groupings so far.
pub(crate) struct Search<'p, 'a, L> {
    problem: &'p Problem<'a, L>,
    bounds: Bounds,
    allow_idle: bool,
    best: Option<Found>,
    /// By number of groups (index K - 1).
    by_groups: Vec<Option<Found>>,
    ops: u64,
}

impl<'p, 'a, L: LinkTable> Search<'p, 'a, L> {
    pub fn new(problem: &'p Problem<'a, L>, bounds: Bounds, allow_idle: bool) -> Self {
        Search { problem, bounds, allow_idle, best: None, by_groups: vec![None; problem.n()], ops: 0 }
    }

    /// The best grouping, which is there once a valid one was offered; the best for other numbers of groups, best first; and the bounds.
    pub fn into_found(self) -> (Option<Found>, Vec<Found>, Bounds) {
        let chosen = self.best.as_ref().map(|best| best.groups.len());
        let mut others: Vec<Found> = self.by_groups.into_iter().flatten().collect();
        others.retain(|found| Some(found.groups.len()) != chosen);
        others.sort_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
        (self.best, others, self.bounds)
    }

    /// The best objective so far, ms.
    pub fn best_ms(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.objective_ms)
    }

    /// Takes a grouping into account, if every group is valid.
    pub fn offer(&mut self, mut groups: Vec<Vec<u32>>) {
        groups.iter_mut().for_each(|members| members.sort_unstable());
        if groups.is_empty() || !groups.iter().all(|members| self.problem.valid(members)) {
            return;
        }
        self.ops += groups.iter().map(|members| self.problem.links.sums_cost(members.len())).sum::<u64>();
        let objective_ms = self.problem.evaluate(&groups).objective_ms;
        self.keep(Found { groups, objective_ms });
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

    /// From the best so far.
    pub fn improve(&mut self, budget: u64) {
        self.anneal(budget / 10 * 9);
        self.descend(budget / 10);
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
            // Like devices are cut alike, by whatever.
            let mut made: Vec<Vec<Vec<u32>>> = Vec::new();
            for order in &views.orders {
                for by in [CutBy::Count, CutBy::Rate, CutBy::Memory] {
                    made.push(cut(self.problem, order, k, by));
                }
            }
            for blocks in views.blocks.iter().filter(|blocks| blocks.len() >= k) {
                made.push(deal(blocks, k, |i| self.problem.flops[i as usize]));
            }
            self.ops += (made.len() * self.problem.n()) as u64;
            for place in 0..made.len() {
                let (before, here) = made.split_at(place);
                if !before.contains(&here[0]) {
                    self.offer(here[0].clone());
                }
            }
            if self.by_groups[k - 1].is_none() {
                // Memory is tight.
                self.offer(self.dealt_by_memory(k));
            }
        }
    }

    fn dealt_by_memory(&self, k: usize) -> Vec<Vec<u32>> {
        let singles: Vec<Vec<u32>> = (0..self.problem.n() as u32).map(|i| vec![i]).collect();
        deal(&singles, k, |i| self.problem.memory[i as usize].min(self.problem.n_experts) as f64)
    }

    /// Annealing, on ever fewer numbers of groups; two chains at a time.
    fn anneal(&mut self, budget: u64) {
        let n = self.problem.n();
        // A chain that is shorter than what starting it costs is not worth it.
        let most_chains = (budget / ROUNDS as u64 / (CHAIN_LEAST * n as u64)).max(1) as usize;
        for round in 0..ROUNDS {
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
                None => self.dealt_by_memory(k),
            };
            let mut chains: Vec<(Vec<Vec<u32>>, u64, bool)> = numbers
                .iter()
                .enumerate()
                .map(|(place, &k)| (start(k), (round * 65_536 + k) as u64, (round + place).is_multiple_of(2)))
                .collect();
            if chains.len() < CHAINS_LEAST.min(most_chains) {
                let more =
                    chains.iter().map(|(start, seed, norm)| (start.clone(), seed + 32_768, !norm)).collect::<Vec<_>>();
                chains.extend(more);
            }
            let each = (budget as f64 * SHARES[round]) as u64 / chains.len() as u64;
            let anneal = |(start, seed, norm): &(Vec<Vec<u32>>, u64, bool)| {
                self.anneal_from(start, each, round, *norm, &mut Random(*seed))
            };
            let half = chains.len() / 2;
            let found: Vec<Option<Vec<Vec<u32>>>> = if half > 0 && each >= THREAD_LEAST {
                let (here, there) = chains.split_at(chains.len() - half);
                std::thread::scope(|scope| {
                    let beside = scope.spawn(|| there.iter().map(anneal).collect::<Vec<_>>());
                    let mut found: Vec<_> = here.iter().map(anneal).collect();
                    // A thread that could not be joined has panicked; its chains are done again, here.
                    found.extend(beside.join().unwrap_or_else(|_| there.iter().map(anneal).collect()));
                    found
                })
            } else {
                chains.iter().map(anneal).collect()
            };
            found.into_iter().flatten().for_each(|groups| self.offer(groups));
        }
    }

    /// The best valid grouping that annealing from `start` comes by, if it is better than `start`.
    fn anneal_from(
        &self,
        start: &[Vec<u32>],
        budget: u64,
        round: usize,
        norm: bool,
        random: &mut Random,
    ) -> Option<Vec<Vec<u32>>> {
        let n = self.problem.n();
        let mut state = State::new(self.problem, start);
        let tree = !self.allow_idle && n <= JOINED_MOST && start.len() > 1;
        if tree {
            state = state.with_tree();
        }
        let (mut moves, mut joined) = (Vec::new(), Vec::new());
        let worth = state.worth(None, f64::INFINITY)?;
        // A group that lacks one expert is as bad as this much.
        let penalty = worth.objective_ms;
        let energy = |worth: &Worth| {
            let short = if worth.short > 0.0 { penalty * (0.02 + worth.short) } else { 0.0 };
            let guide = if norm { NORM_WEIGHT * worth.norm_ms } else { MEAN_WEIGHT * worth.mean_ms };
            worth.objective_ms + guide + short
        };
        // Whatever a group's work, the energy is at least so many times that and the least all-reduce: what is over it need not be looked at
        // to the end.
        let guide = if norm { NORM_WEIGHT * (1.0 / n as f64).powf(0.125) } else { MEAN_WEIGHT / start.len() as f64 };
        let per_work = self.problem.gamma(n) * (1.0 + guide) * (1.0 - 1e-9);
        let reduce = if self.allow_idle {
            0.0
        } else {
            let edges = &self.problem.edges[..=n - start.len().max(2)];
            edges.iter().map(|edge| self.problem.all_reduce(start.len(), edge.link)).fold(f64::INFINITY, f64::min)
        };
        let mut now = energy(&worth);
        let hot = self.temperature(&mut state, now, &energy, random)?;
        // Later rounds start from good groupings, and cooler.
        let hot = hot * COOLER[round];
        let cold = hot * 1e-3;
        let mut temperature = hot;
        let known = if worth.short > 0.0 { f64::INFINITY } else { worth.objective_ms };
        let mut best = (known, None);
        let mut steps = 0u64;
        while state.ops < budget {
            if steps.is_multiple_of(64) {
                let progress = state.ops as f64 / budget as f64;
                temperature = hot * (cold / hot).powf(progress);
            }
            steps += 1;
            // A proposal costs something even where it comes to nothing.
            state.ops += 1;
            if tree && random.below(JOINED_ONE_IN) == 0 {
                self.propose_joined(&mut state, random, &mut joined, &mut moves);
                if moves.is_empty() {
                    continue;
                }
                let Some(worth) = make(&mut state, &moves) else { continue };
                let then = energy(&worth);
                if then <= now || random.unit() < ((now - then) / temperature).exp() {
                    now = then;
                    if worth.short == 0.0 && worth.objective_ms < best.0 * (1.0 - 1e-12) {
                        best = (worth.objective_ms, Some(state.grouping()));
                        state.ops += n as u64;
                    }
                } else {
                    moves.reverse();
                    moves.iter_mut().for_each(|(_, from, to)| std::mem::swap(from, to));
                    make(&mut state, &moves);
                }
                continue;
            }
            let Some(change) = self.propose(&state, random) else { continue };
            // Drawn before the change is looked at.
            let most = now - temperature * (1.0 - random.unit()).ln();
            let Some(worth) = state.worth(Some(change), (most - reduce) / per_work) else { continue };
            let then = energy(&worth);
            if then <= most {
                state.apply(change);
                now = then;
                if worth.short == 0.0 && worth.objective_ms < best.0 * (1.0 - 1e-12) {
                    best = (worth.objective_ms, Some(state.grouping()));
                    state.ops += n as u64;
                }
            }
        }
        best.1
    }

    /// A temperature at which a good part of the moves for the worse are made; `None` when no move can be made.
    fn temperature(
        &self,
        state: &mut State<L>,
        now: f64,
        energy: &impl Fn(&Worth) -> f64,
        random: &mut Random,
    ) -> Option<f64> {
        let (mut sum, mut count) = (0.0, 0);
        for _ in 0..64 {
            let Some(change) = self.propose(state, random) else { continue };
            let Some(worth) = state.worth(Some(change), f64::INFINITY) else { continue };
            let worse = energy(&worth) - now;
            if worse > 0.0 && worth.short == 0.0 {
                sum += worse;
                count += 1;
            }
        }
        match count {
            0 => Some(now * 1e-3).filter(|t| *t > 0.0),
            _ => Some(0.2 * sum / f64::from(count)),
        }
    }

    /// Moves, as device, from and to, that keep the slowest links inside groups: the devices that these join with one move together. Half of
    /// the time the first of them is an end of the slowest link between groups, and goes to where the other end is. Others may come back for them.
    fn propose_joined(
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
        state.joined(i, place, joined);
        moves.extend(joined.iter().map(|&m| (m, from, to)));
        let (mut here, there) = (state.members(from).len() - joined.len(), state.members(to).len());
        let mut back = 0;
        // As many as came, or fewer.
        for _ in 0..random.below(joined.len() + 2) {
            let j = state.members(to)[random.below(there)];
            if moves.iter().any(|(m, ..)| *m == j) {
                continue;
            }
            state.joined(j, place, joined);
            back += joined.len();
            here += joined.len();
            moves.extend(joined.iter().map(|&m| (m, to, from)));
        }
        if here == 0 || back == there {
            // A group of none: the number of groups is fixed.
            moves.clear();
        }
    }

    /// A random change: the device that exchanges longest, another of its group, or any, into the group of another device, alone or in its place.
    fn propose(&self, state: &State<L>, random: &mut Random) -> Option<Move> {
        let n = self.problem.n();
        let i = match random.below(8) {
            0 => state.worst_device()?,
            1 | 2 => {
                let worst = state.members(state.worst());
                worst[random.below(worst.len())]
            }
            _ => random.below(n) as u32,
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

    /// From the best grouping, every change that makes it better, until there is none.
    fn descend(&mut self, budget: u64) {
        let Some(best) = self.best.clone() else { return };
        let n = self.problem.n() as u32;
        let mut state = State::new(self.problem, &best.groups);
        let energy = |worth: &Worth| match worth.short > 0.0 {
            true => f64::INFINITY,
            false => worth.objective_ms + MEAN_TIE * worth.mean_ms,
        };
        let mut now = state.worth(None, f64::INFINITY).map_or(f64::INFINITY, |worth| energy(&worth));
        let gamma = self.problem.gamma(n as usize);
        let mut since = 0;
        // Round and round, until a whole round brought nothing.
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
                let Some(worth) = state.worth(Some(change), now / gamma) else { continue };
                if energy(&worth) < now * (1.0 - 1e-13) {
                    state.apply(change);
                    now = energy(&worth);
                    improved = true;
                }
            }
            since = if improved { 0 } else { since + 1 };
            i = (i + 1) % n;
        }
        self.ops += state.ops;
        self.offer(state.grouping());
    }
}

/// Makes all of these moves, from their `from` to their `to`.
fn make<L: LinkTable>(state: &mut State<L>, moves: &[(u32, u32, u32)]) -> Option<Worth> {
    moves.iter().for_each(|&(i, _, to)| state.apply(Move { i, to, j: None }));
    state.worth(None, f64::INFINITY)
}

/// Where an order is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CutBy {
    Count,
    Rate,
    Memory,
}

/// Consecutive devices of an order as about `k` groups, each valid; what is left at the end goes to the last.
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

/// Whole blocks dealt out to `k` groups: the heaviest first, each to the lightest group.
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

/// SplitMix64 (Steele, Lea and Flood 2014): fast, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is above 0.
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}
