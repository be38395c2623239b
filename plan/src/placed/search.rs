//! Search for groups under the placed objective.
//!
//! It starts from the best groupings of every number of groups under the published objective, and from groupings made in one go, then
//! anneals those of the most promising numbers as `crate::search` does, with experts dealt out anew in every group that changes, and then all
//! numbers at once with the times of groups remembered ([`super::regroup`]). The groups of the best few are given a thorough placement each, those
//! are improved together with their placements in several rounds ([`super::rounds`]), and the best is the answer.

use super::regroup::{MOST_DEVICES, regrouped};
use super::rounds::{improve_together, large, many_experts, rounds};
use super::state::{Change, State};
use super::{DealtOut, GroupTimes, Known, Placed, PlacedTimes};
use crate::bound::Bounds;
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::placement::DeviceExperts;
use crate::random::Random;
use crate::search::{CHAINS_LEAST, EXPONENTIAL, Found, Views, constructed, dealt_by_memory, exponential, in_threads};

/// What is proved to be so near the least objective is good enough, as shares of that.
const NEAR: f64 = 1e-3;
/// The target is under the best objective so far, by so much of its work.
const UNDER: f64 = 0.03;
/// Temperatures at first and at last, as shares of what the target leaves for a group.
const HOT: f64 = 0.1;
const COLD: f64 = 0.003;
/// Rounds of annealing; numbers of groups in each at most, and its share of the effort.
const ROUNDS: usize = 4;
const NUMBERS: [usize; ROUNDS] = [16, 6, 3, 1];
const SHARES: [f64; ROUNDS] = [0.2, 0.2, 0.25, 0.35];
/// Links that all chains together look at, at least, for each pair of devices.
const CHAIN_LEAST: u64 = 64;
/// Chains shorter than this are not worth a thread.
pub(super) const THREAD_LEAST: u64 = 100_000;
/// One in so many proposals moves several devices together.
const TOGETHER_ONE_IN: usize = 16;
/// Chains of annealing with remembered times, all from the best grouping: two processors for a thread each.
const REGROUPED: u64 = 2;
/// They have one part in so many of the effort where experts are annealed as if they could be cut, as that says better which groups are good.
const REGROUPED_LESS: u64 = 3;
/// Groupings whose placement is improved.
const IMPROVED: usize = 10;

/// A grouping with its placement.
#[derive(Clone)]
pub(crate) struct FoundPlaced {
    pub groups: Vec<Vec<u32>>,
    pub placements: Vec<DeviceExperts>,
    pub times: Vec<GroupTimes>,
    pub objective_ms: f64,
}

impl FoundPlaced {
    pub fn new<L: LinkTable>(placed: &Placed<L>, groups: Vec<Vec<u32>>, placements: Vec<DeviceExperts>) -> FoundPlaced {
        let of = |(members, placement): (&Vec<u32>, &DeviceExperts)| placed.placed_times(members, placement);
        let times: Vec<GroupTimes> = groups.iter().zip(&placements).map(of).collect();
        let objective_ms = placed.evaluate(&groups, &times).objective_ms;
        FoundPlaced { groups, placements, times, objective_ms }
    }
}

/// How hard to try.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedEffort {
    /// For groupings made in one go, in links looked at.
    pub construct: u64,
    /// For annealing groups, in links looked at.
    pub anneal: u64,
    /// For annealing groups with their times remembered, in links looked at.
    pub regroup: u64,
    /// For the placements of one grouping, in links looked at; and nodes of branch and bound.
    pub place: u64,
    pub nodes: u64,
    /// For annealing groups and placements together, in links looked at.
    pub joint: u64,
}

pub(crate) struct PlacedSearch<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    bounds: &'s Bounds,
    /// Partitions of the devices into several blocks.
    blocks: Vec<Vec<Vec<u32>>>,
    exponential: Vec<f64>,
    allow_idle: bool,
    /// By number of groups (index K - 1), with experts dealt out.
    by_groups: Vec<Option<Found>>,
    /// Groupings that were offered with a placement.
    placed_already: Vec<FoundPlaced>,
    /// What annealing with remembered times came by.
    regrouped: Vec<Vec<Vec<u32>>>,
    dealt: DealtOut,
    ops: u64,
}

impl<'s, 'p, 'a, L: LinkTable> PlacedSearch<'s, 'p, 'a, L> {
    pub fn new(placed: &'s Placed<'p, 'a, L>, bounds: &'s Bounds, views: &Views, allow_idle: bool) -> Self {
        let n = placed.problem.n();
        let several = views.blocks.iter().filter(|blocks| blocks.len() > 1 && blocks.len() < n);
        PlacedSearch {
            placed,
            bounds,
            blocks: several.cloned().collect(),
            exponential: exponential(),
            allow_idle,
            by_groups: vec![None; n],
            placed_already: Vec::new(),
            regrouped: Vec::new(),
            dealt: DealtOut::new(),
            ops: 0,
        }
    }

    fn best_ms(&self) -> f64 {
        let found = self.by_groups.iter().flatten().map(|found| found.objective_ms);
        let placed = self.placed_already.iter().map(|found| found.objective_ms);
        found.chain(placed).fold(f64::INFINITY, f64::min)
    }

    fn may_improve(&self, k: usize) -> bool {
        self.bounds.by_groups[k - 1] < self.best_ms() * (1.0 - 1e-12)
    }

    /// Takes a grouping into account, if every group is valid.
    pub fn offer(&mut self, mut groups: Vec<Vec<u32>>) {
        groups.iter_mut().for_each(|members| members.sort_unstable());
        if groups.is_empty() || !groups.iter().all(|members| self.placed.problem.valid(members)) {
            return;
        }
        let links = &self.placed.problem.links;
        let mut times = Vec::with_capacity(groups.len());
        for members in &groups {
            if !self.dealt.contains_key(members) {
                self.ops += 3 * links.sums_cost(members.len()) + 4 * self.placed.experts.costs.len() as u64;
                self.dealt.insert(members.clone(), self.placed.dealt(members));
            }
            let Some(Some((_, here))) = self.dealt.get(members) else { return };
            times.push(*here);
        }
        let objective_ms = self.placed.evaluate(&groups, &times).objective_ms;
        self.keep(Found { groups, objective_ms });
    }

    fn keep(&mut self, found: Found) {
        let place = &mut self.by_groups[found.groups.len() - 1];
        if place.as_ref().is_none_or(|known| found.objective_ms < known.objective_ms) {
            *place = Some(found);
        }
    }

    /// Takes a grouping into account with its placement, too.
    pub fn offer_placed(&mut self, groups: Vec<Vec<u32>>, placements: Vec<DeviceExperts>) {
        self.placed_already.push(FoundPlaced::new(self.placed, groups.clone(), placements));
        self.offer(groups);
    }

    /// Groupings made in one go.
    pub fn construct(&mut self, views: &Views, budget: u64) {
        for blocks in &views.blocks {
            self.offer(blocks.clone());
        }
        let mut numbers: Vec<usize> = (1..=self.placed.problem.n()).collect();
        numbers.retain(|&k| self.bounds.by_groups[k - 1].is_finite());
        numbers.sort_by(|&a, &b| self.bounds.by_groups[a - 1].total_cmp(&self.bounds.by_groups[b - 1]).then(a.cmp(&b)));
        let end = self.ops + budget;
        for k in numbers {
            if self.ops > end || !self.may_improve(k) {
                break;
            }
            for groups in constructed(self.placed.problem, views, k) {
                self.offer(groups);
            }
        }
    }

    /// Annealing, on ever fewer numbers of groups; two chains at a time.
    pub fn anneal(&mut self, budget: u64) {
        let n = self.placed.problem.n();
        // A chain that is shorter than what starting it costs is not worth it.
        if budget < CHAIN_LEAST * (n * n) as u64 {
            return;
        }
        for round in 0..ROUNDS {
            if near(self.bounds, self.best_ms()) {
                return;
            }
            let mut numbers: Vec<usize> = (1..=n).collect();
            numbers.retain(|&k| self.may_improve(k) && (k > 1 || self.allow_idle));
            let known =
                |k: usize| self.by_groups[k - 1].as_ref().map_or(self.bounds.by_groups[k - 1], |f| f.objective_ms);
            numbers.sort_by(|&a, &b| known(a).total_cmp(&known(b)).then(a.cmp(&b)));
            numbers.truncate(NUMBERS[round]);
            if numbers.is_empty() {
                return;
            }
            let start = |k: usize| match &self.by_groups[k - 1] {
                Some(found) => found.groups.clone(),
                None => dealt_by_memory(self.placed.problem, k),
            };
            let mut chains: Vec<(Vec<Vec<u32>>, u64)> =
                numbers.iter().map(|&k| (start(k), (round * 65_536 + k) as u64)).collect();
            if chains.len() < CHAINS_LEAST {
                let more = chains.iter().map(|(start, seed)| (start.clone(), seed + 32_768)).collect::<Vec<_>>();
                chains.extend(more);
            }
            let each = (budget as f64 * SHARES[round]) as u64 / chains.len() as u64;
            let anneal = |(start, seed): (Vec<Vec<u32>>, u64)| self.anneal_from(&start, each, &mut Random(seed));
            let found = in_threads(chains, each >= THREAD_LEAST, anneal);
            found.into_iter().flatten().for_each(|groups| self.offer(groups));
        }
    }

    /// Annealing with the times of groups remembered, from the best grouping so far.
    pub fn regroup(&mut self, budget: u64) {
        let n = self.placed.problem.n();
        let best = self.by_groups.iter().flatten().min_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
        let Some(best) = best.filter(|best| !large(n, best.groups.len())) else { return };
        if budget == 0 || n > MOST_DEVICES || near(self.bounds, self.best_ms()) {
            return;
        }
        let part = if many_experts(self.placed, best.groups.len()) { REGROUPED_LESS } else { 1 };
        let each = budget / (part * REGROUPED);
        let anneal = |seed: u64| regrouped(self.placed, &best.groups, &self.exponential, each, &mut Random(seed));
        let starts = (1..=REGROUPED).collect();
        let found = in_threads(starts, each >= THREAD_LEAST, anneal);
        self.regrouped.extend(found.into_iter().flatten());
    }

    /// The best valid grouping that annealing from `start` comes by, if it is better than `start`.
    fn anneal_from(&self, start: &[Vec<u32>], budget: u64, random: &mut Random) -> Option<Vec<Vec<u32>>> {
        let mut state = State::new(self.placed, start, UNDER);
        let mut best = (if state.valid() { state.objective_ms() } else { f64::INFINITY }, None);
        let unit = state.limit_ms();
        let (mut temperature, mut steps) = (0.0, 0u64);
        let mut change = Change::new();
        while state.ops < budget {
            if steps.is_multiple_of(64) {
                let progress = state.ops as f64 / budget as f64;
                temperature = unit * HOT * (COLD / HOT).powf(progress);
            }
            steps += 1;
            // A proposal costs something even where it comes to nothing.
            state.ops += 1;
            self.propose(&state, random, &mut change);
            if change.is_empty() {
                continue;
            }
            let most = state.excess_ms() + temperature * self.exponential[random.below(EXPONENTIAL)];
            let Some(changed) = state.after(&change, most) else { continue };
            state.apply(changed, &change);
            if state.valid() && state.objective_ms() < best.0 * (1.0 - 1e-12) {
                let mut groups = state.groups().to_vec();
                groups.iter_mut().for_each(|members| members.sort_unstable());
                best = (state.objective_ms(), Some(groups));
                let target_ms = state.under(UNDER);
                state.aim(target_ms);
            }
        }
        best.1
    }

    /// A random change: a device of the worst group, or any, into the group of another device, alone or in its place; or devices of one
    /// block together, and devices of another back for them.
    fn propose(&self, state: &State<L>, random: &mut Random, change: &mut Change) {
        change.clear();
        let n = self.placed.problem.n();
        let groups = state.groups();
        if !self.blocks.is_empty() && groups.len() > 1 && random.below(TOGETHER_ONE_IN) == 0 {
            let partition = &self.blocks[random.below(self.blocks.len())];
            let (from, back) = (&partition[random.below(partition.len())], &partition[random.below(partition.len())]);
            let to = random.below(groups.len()) as u32;
            let source = state.group_of(from[random.below(from.len())]);
            if source == IDLE || source == to {
                return;
            }
            change.extend(from.iter().filter(|&&i| state.group_of(i) == source).map(|&i| (i, to)));
            if random.below(4) > 0 {
                let most = change.len();
                let returns = back.iter().filter(|&&i| state.group_of(i) == to && !from.contains(&i)).take(most);
                change.extend(returns.map(|&i| (i, source)).collect::<Vec<_>>());
            }
            return;
        }
        let i = if random.below(8) < 3 {
            let worst = &groups[state.worst()];
            worst[random.below(worst.len())]
        } else {
            random.below(n) as u32
        };
        let from = state.group_of(i);
        if self.allow_idle && random.below(8) == 0 {
            if from != IDLE {
                change.push((i, IDLE));
            }
            return;
        }
        if random.below(2) == 0 {
            let to = random.below(groups.len()) as u32;
            if to != from {
                change.push((i, to));
            }
            return;
        }
        let j = random.below(n) as u32;
        let to = state.group_of(j);
        if to != from && to != IDLE {
            change.extend([(j, from), (i, to)]);
        }
    }

    /// The best grouping with its placement; the best of other numbers of groups, best first. `known` collects placements.
    pub fn into_found(self, effort: PlacedEffort, known: &mut Known) -> (Option<FoundPlaced>, Vec<Found>) {
        let PlacedSearch { placed, bounds, exponential, by_groups, placed_already, regrouped, dealt, .. } = self;
        let mut candidates: Vec<Found> = by_groups.into_iter().flatten().collect();
        candidates.sort_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
        let groupings = candidates.iter().take(IMPROVED).map(|found| &found.groups).chain(&regrouped);
        let mut best = place_all(placed, groupings.collect(), effort, (&dealt, &mut *known));
        let rounds = rounds(placed, best.first().map_or(1, |best| best.groups.len()));
        // Where all experts are equal, half of the first relaxed chains take them as whole, and then all do as the best did.
        let mut whole = placed.experts.uniform.is_none().then_some(false);
        for (number, round) in rounds.iter().enumerate().filter(|_| effort.joint > 0) {
            if best.first().is_some_and(|best| near(bounds, best.objective_ms)) {
                break;
            }
            let budget = (effort.joint as f64 * round.share) as u64;
            best = improve_together(
                placed,
                &exponential,
                best,
                (number, round),
                &mut whole,
                (budget, effort),
                (&dealt, &mut *known),
            );
        }
        best.extend(placed_already);
        let best = best.into_iter().min_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
        let chosen = best.as_ref().map(|best| best.groups.len());
        candidates.retain(|found| Some(found.groups.len()) != chosen);
        (best, candidates)
    }
}

/// Whether nothing can be much better than `ms`.
fn near(bounds: &Bounds, ms: f64) -> bool {
    ms <= bounds.least() * (1.0 + NEAR)
}

/// Groupings with thorough placements, best first; those are left out for which memory does not suffice.
pub(super) fn place_all<L: LinkTable>(
    placed: &Placed<L>,
    groupings: Vec<&Vec<Vec<u32>>>,
    effort: PlacedEffort,
    (dealt, known): (&DealtOut, &mut Known),
) -> Vec<FoundPlaced> {
    // Each knows what was known before, so that nothing depends on the order in which they end.
    let place = |groups: &Vec<Vec<u32>>| {
        let mut known = known.clone();
        (place_thoroughly(placed, groups, effort.place, effort.nodes, (dealt, &mut known)), known)
    };
    let (found, learnt): (Vec<_>, Vec<_>) =
        in_threads(groupings, effort.place >= THREAD_LEAST, place).into_iter().unzip();
    learnt.into_iter().for_each(|learnt| known.extend(learnt));
    let mut found: Vec<FoundPlaced> = found.into_iter().flatten().collect();
    best_first(&mut found);
    found
}

pub(super) fn best_first(found: &mut [FoundPlaced]) {
    found.sort_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
}

/// A grouping's placement: of the group that takes longest the best, until that is still the longest; `budget` and `nodes` are for all groups
/// together. Where experts were dealt out before, that is the start. `None` where memory does not suffice.
pub(crate) fn place_thoroughly<L: LinkTable>(
    placed: &Placed<L>,
    groups: &[Vec<u32>],
    budget: u64,
    nodes: u64,
    (dealt, known): (&DealtOut, &mut Known),
) -> Option<FoundPlaced> {
    let (mut placements, mut times, mut improved) = (Vec::new(), Vec::new(), Vec::new());
    for members in groups {
        let known = known.get(members).cloned();
        improved.push(known.is_some());
        let dealt = || dealt.get(members).cloned().unwrap_or_else(|| placed.dealt(members));
        let (placement, here) = known.or_else(dealt)?;
        placements.push(placement);
        times.push(here);
    }
    let start = Start { placements, times, improved };
    let learn = |members: &Vec<u32>, better: &PlacedTimes| drop(known.insert(members.clone(), better.clone()));
    Some(improve_longest(placed, groups, start, (budget, nodes), learn))
}

/// The group that takes longest.
pub(super) fn longest(times: &[GroupTimes]) -> usize {
    (0..times.len()).fold(0, |longest, g| if times[g].ms() > times[longest].ms() { g } else { longest })
}

/// Where the placements of a grouping begin.
pub(super) struct Start {
    pub placements: Vec<DeviceExperts>,
    pub times: Vec<GroupTimes>,
    /// Whether it is as good as it gets.
    pub improved: Vec<bool>,
}

/// The placement of the group that takes longest improved, until that is still the longest; `learn` is told of each.
pub(super) fn improve_longest<L: LinkTable>(
    placed: &Placed<L>,
    groups: &[Vec<u32>],
    Start { mut placements, mut times, mut improved }: Start,
    (budget, nodes): (u64, u64),
    mut learn: impl FnMut(&Vec<u32>, &PlacedTimes),
) -> FoundPlaced {
    loop {
        let worst = longest(&times);
        if improved[worst] {
            break;
        }
        let share = groups.len() as u64;
        let start = (std::mem::take(&mut placements[worst]), times[worst]);
        let better = placed.improved(&groups[worst], start, budget / share, nodes / share);
        learn(&groups[worst], &better);
        (placements[worst], times[worst]) = better;
        improved[worst] = true;
    }
    let objective_ms = placed.evaluate(groups, &times).objective_ms;
    FoundPlaced { groups: groups.to_vec(), placements, times, objective_ms }
}
