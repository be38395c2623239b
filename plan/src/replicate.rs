//! Replicas of experts in a group's placement: an overloaded device gives some tokens of one of its experts to an underloaded one, which then holds the
//! expert too. A device's part is the group's work in proportion to its rate.
//!
//! `docs/planner.md` proves that no device exceeds its part if every receiver has memory.

use std::collections::BTreeMap;

use crate::chosen::{Chosen, EQUAL};
use crate::cluster::{Cluster, LinkTable};
use crate::evaluate::terms;
use crate::objective::{Evaluation, Problem};
use crate::placed::Placed;
use crate::placed::choose::place_groups;
use crate::spread::{Split, Spread, evaluate};
use crate::workload::Workload;
use crate::{Plan, PlannedGroup, Replication};

/// Maximum number of devices of a group for which every step is evaluated. For larger groups only the last one is.
const STEPWISE_MOST: usize = 64;
/// Maximum relative deviation from even work.
const EVEN: f64 = 1e-9;

/// Groups with replicas, and their objective.
pub(crate) struct Replicated {
    pub groups: Vec<Vec<u32>>,
    pub spreads: Vec<Spread>,
    pub evaluation: Evaluation,
}

/// Replicas for the chosen or other groups, starting from their best placements. Returns the least objective, `None` if no replica helps.
pub(crate) fn replicate(
    cluster: &Cluster,
    workload: &Workload,
    chosen: &Chosen,
    replication: Replication,
) -> Option<Replicated> {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    let placed = Placed::new(&problem);
    let mut together: Vec<u32> = chosen.groups.iter().flatten().copied().collect();
    together.sort_unstable();
    let all = together.len();
    let mut candidates = vec![(chosen.groups.clone(), chosen.placements.clone())];
    let others = chosen.others.iter().map(|other| other.groups.clone());
    for groups in [vec![together], cluster.hosts()].into_iter().chain(others) {
        let is_new = candidates.iter().all(|(known, _)| *known != groups);
        if is_new && groups.iter().map(Vec::len).sum::<usize>() == all {
            let placements = place_groups(&placed, &groups);
            candidates.push((groups, placements));
        }
    }
    let mut least_ms = chosen.evaluation.objective_ms;
    let mut best = None;
    for (groups, placements) in candidates {
        let Some(placements) = placements else { continue };
        let whole = |held| Spread { held, splits: BTreeMap::new() };
        let replicated = from_start(&placed, groups, placements.into_iter().map(whole).collect(), replication);
        if replicated.evaluation.objective_ms < least_ms * (1.0 - EQUAL) {
            least_ms = replicated.evaluation.objective_ms;
            best = Some(replicated);
        }
    }
    best
}

/// Replicas for the groups of a plan in use, starting from its placement, so that few experts move.
pub(crate) fn from_current(
    cluster: &Cluster,
    workload: &Workload,
    replication: Replication,
    (groups, spreads): (Vec<Vec<u32>>, Vec<Spread>),
) -> Replicated {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    from_start(&Placed::new(&problem), groups, spreads, replication)
}

fn from_start<L: LinkTable>(
    placed: &Placed<L>,
    groups: Vec<Vec<u32>>,
    start: Vec<Spread>,
    replication: Replication,
) -> Replicated {
    let of = |(members, start): (&Vec<u32>, &Spread)| spread(placed, members, start, replication);
    let spreads: Vec<Spread> = groups.iter().zip(&start).map(of).collect();
    let evaluation = evaluate(placed, &groups, &spreads);
    Replicated { groups, spreads, evaluation }
}

/// The best step between `start` and even work.
fn spread<L: LinkTable>(placed: &Placed<L>, members: &[u32], start: &Spread, replication: Replication) -> Spread {
    let mut state = State::new(placed, members, start, replication);
    let gamma = placed.problem.gamma(placed.problem.n());
    let ms = |spread: &Spread| {
        let (times, sum_ms) = spread.times(placed, members);
        gamma * times.ms() + sum_ms
    };
    let mut best = state.spread();
    let mut least_ms = ms(&best);
    loop {
        let more = state.step();
        if members.len() <= STEPWISE_MOST || !more {
            let spread = state.spread();
            let spread_ms = ms(&spread);
            if spread_ms < least_ms * (1.0 - EQUAL) {
                (best, least_ms) = (spread, spread_ms);
            }
        }
        if !more {
            return best;
        }
    }
}

/// The placement of a group, step by step.
struct State<'p, 'q, 'a, L> {
    placed: &'p Placed<'q, 'a, L>,
    members: &'p [u32],
    /// By expert, its holders and the share of its tokens that each computes.
    shares: Vec<BTreeMap<usize, f64>>,
    /// By member: FLOP of one device's tokens that it computes, and its part.
    load: Vec<f64>,
    part: Vec<f64>,
    /// By member: experts that it may hold, and holds.
    slots: Vec<u64>,
    holds: Vec<u64>,
}

impl<'p, 'q, 'a, L: LinkTable> State<'p, 'q, 'a, L> {
    fn new(
        placed: &'p Placed<'q, 'a, L>,
        members: &'p [u32],
        start: &Spread,
        replication: Replication,
    ) -> State<'p, 'q, 'a, L> {
        let costs = &placed.experts.costs;
        let mut holders = vec![Vec::new(); costs.len()];
        for (member, held) in start.held.iter().enumerate() {
            held.iter().for_each(|&e| holders[e as usize].push(member));
        }
        let rate = |member: usize| placed.problem.flops[members[member] as usize];
        let all: f64 = (0..members.len()).map(rate).sum();
        let mut state = State {
            placed,
            members,
            shares: Vec::new(),
            load: vec![0.0; members.len()],
            part: (0..members.len()).map(|member| placed.experts.total * rate(member) / all).collect(),
            slots: Vec::new(),
            holds: start.held.iter().map(|held| held.len() as u64).collect(),
        };
        for ((holders, cost), e) in holders.iter().zip(costs).zip(0..) {
            let split = start.splits.get(&e);
            let share = |(column, &member): (usize, &usize)| {
                let of_all =
                    |split: &Split| split.shares.iter().map(|row| row[column]).sum::<f64>() / members.len() as f64;
                (member, split.map_or(1.0, of_all))
            };
            let shares: BTreeMap<usize, f64> = holders.iter().enumerate().map(share).collect();
            shares.iter().for_each(|(&member, share)| state.load[member] += cost * share);
            state.shares.push(shares);
        }
        // Existing replicas count towards the limit.
        let mut whole = state.holds.clone();
        for holders in &holders {
            holders.iter().skip(1).for_each(|&member| whole[member] -= 1);
        }
        let slots = |(member, &holds): (usize, &u64)| {
            let memory = placed.problem.memory[members[member] as usize];
            match replication {
                Replication::Auto => memory,
                Replication::AtMost(n) => memory.min(whole[member].saturating_add(n)),
            }
            .max(holds)
        };
        state.slots = state.holds.iter().enumerate().map(slots).collect();
        state.use_replicas();
        state
    }

    fn over(&self, member: usize) -> f64 {
        self.load[member] - self.part[member]
    }

    /// Evens the work out by the existing replicas.
    fn use_replicas(&mut self) {
        let small = EVEN * self.placed.experts.total;
        for _ in 0..2 * self.members.len() {
            let mut any = false;
            for e in 0..self.shares.len() {
                let holders: Vec<usize> = self.shares[e].keys().copied().collect();
                for (&from, &to) in holders.iter().flat_map(|from| holders.iter().map(move |to| (from, to))) {
                    let amount = self.over(from).min(-self.over(to)).min(self.cost_at(e, from));
                    if amount > small {
                        self.give(e, from, to, amount);
                        any = true;
                    }
                }
            }
            if !any {
                return;
            }
        }
    }

    /// FLOP of an expert that a member computes.
    fn cost_at(&self, e: usize, member: usize) -> f64 {
        self.placed.experts.costs[e] * self.shares[e].get(&member).copied().unwrap_or(0.0)
    }

    fn give(&mut self, e: usize, from: usize, to: usize, amount: f64) {
        let cost = self.placed.experts.costs[e];
        let shares = &mut self.shares[e];
        let left = shares.get(&from).copied().unwrap_or(0.0) - amount / cost;
        if left > EVEN {
            shares.insert(from, left);
        } else if shares.remove(&from).is_some() {
            self.holds[from] -= 1;
        }
        if !shares.contains_key(&to) {
            self.holds[to] += 1;
        }
        *shares.entry(to).or_default() += amount / cost;
        self.load[from] -= amount;
        self.load[to] += amount;
    }

    /// Moves work from the most overloaded member to the most underloaded one that can take it: part of an expert's tokens, or a whole expert. A receiver
    /// without room gives one of its experts in return. Returns false if no work can be moved.
    fn step(&mut self) -> bool {
        let small = EVEN * self.placed.experts.total;
        let busy = (0..self.members.len()).max_by(|&a, &b| self.over(a).total_cmp(&self.over(b)).then(b.cmp(&a)));
        let Some(from) = busy.filter(|&busy| self.over(busy) > small) else { return false };
        let mut idle: Vec<usize> = (0..self.members.len()).filter(|&member| self.over(member) < -small).collect();
        idle.sort_by(|&a, &b| self.over(a).total_cmp(&self.over(b)).then(a.cmp(&b)));
        idle.into_iter().any(|to| match self.holds[to] < self.slots[to] {
            true => self.relieve(from, to),
            false => self.exchange(from, to),
        })
    }

    /// Moves as much of `from`'s excess as possible to `to`, which has room. Returns false if no expert can be given.
    fn relieve(&mut self, from: usize, to: usize) -> bool {
        let amount = self.over(from).min(-self.over(to));
        let given = |e: usize| !self.shares[e].contains_key(&to) && self.cost_at(e, from) > 0.0;
        let largest = (0..self.shares.len())
            .filter(|&e| given(e))
            .max_by(|&a, &b| self.cost_at(a, from).total_cmp(&self.cost_at(b, from)).then(b.cmp(&a)));
        let Some(e) = self.enough(from, to, amount).or(largest) else { return false };
        let amount = amount.min(self.cost_at(e, from));
        self.give(e, from, to, amount);
        true
    }

    /// `to` gives `from` its smallest expert and receives a larger part of another. Returns false if that is impossible.
    fn exchange(&mut self, from: usize, to: usize) -> bool {
        let alone = |e: usize| self.shares[e].len() == 1 && self.shares[e].contains_key(&to);
        let smallest = (0..self.shares.len())
            .filter(|&e| alone(e))
            .min_by(|&a, &b| self.placed.experts.costs[a].total_cmp(&self.placed.experts.costs[b]).then(a.cmp(&b)));
        let Some(smallest) = smallest.filter(|_| self.holds[from] < self.slots[from]) else { return false };
        let back = self.placed.experts.costs[smallest];
        let amount = self.over(from).min(-self.over(to)) + back;
        let Some(e) = self.enough(from, to, amount).filter(|_| back > 0.0) else { return false };
        self.give(smallest, to, from, back);
        self.give(e, from, to, amount);
        true
    }

    /// Among the experts of `from` that `to` does not hold, the smallest of at least `amount`.
    fn enough(&self, from: usize, to: usize, amount: f64) -> Option<usize> {
        let is_enough = |&e: &usize| !self.shares[e].contains_key(&to) && self.cost_at(e, from) >= amount;
        (0..self.shares.len())
            .filter(is_enough)
            .min_by(|&a, &b| self.cost_at(a, from).total_cmp(&self.cost_at(b, from)).then(a.cmp(&b)))
    }

    fn spread(&self) -> Spread {
        let mut spread = Spread { held: vec![Vec::new(); self.members.len()], splits: BTreeMap::new() };
        for (e, shares) in self.shares.iter().enumerate() {
            shares.keys().for_each(|&member| spread.held[member].push(e as u32));
            if shares.len() > 1 {
                spread.splits.insert(e as u32, self.split(shares));
            }
        }
        spread
    }

    /// The shares that each member sends to each holder, assigned to the nearest pairs first.
    fn split(&self, holders: &BTreeMap<usize, f64>) -> Split {
        let m = self.members.len();
        let mb = self.placed.problem.workload.p2p_buffer_mb / m as f64;
        let link = |i: usize, j: usize| {
            let link = self.placed.problem.links.link(self.members[i] as usize, self.members[j] as usize);
            if i == j { 0.0 } else { link.time_ms(mb) }
        };
        let mut pairs: Vec<(f64, usize, usize)> = (0..m)
            .flat_map(|i| holders.keys().enumerate().map(move |(column, &j)| (i, column, j)))
            .map(|(i, column, j)| (link(i, j), i, column))
            .collect();
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let mut wanted: Vec<f64> = holders.values().map(|share| share * m as f64).collect();
        let mut left = vec![1.0; m];
        let mut shares = vec![vec![0.0; holders.len()]; m];
        for (_, i, column) in pairs {
            let amount = f64::min(left[i], wanted[column]);
            shares[i][column] += amount;
            left[i] -= amount;
            wanted[column] -= amount;
        }
        // Normalises rounding errors.
        for row in &mut shares {
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|share| *share /= sum);
        }
        Split { holders: holders.keys().copied().collect(), shares }
    }
}

/// A lower bound on the makespan with this number of replicas: the group's work at the group's rate, and the largest expert at the rate of its
/// `replicas + 1` fastest holders.
fn least_makespan<L: LinkTable>(placed: &Placed<L>, members: &[u32], replicas: usize) -> f64 {
    let mut flops: Vec<f64> = members.iter().map(|&i| placed.problem.flops[i as usize]).collect();
    flops.sort_unstable_by(|a, b| b.total_cmp(a));
    let largest = placed.experts.costs.iter().copied().fold(0.0, f64::max);
    let of_one: f64 = flops.iter().take(replicas + 1).sum();
    members.len() as f64 * (placed.experts.total / flops.iter().sum::<f64>()).max(largest / of_one)
}

/// Puts replicas into a plan.
pub(crate) fn enter(plan: &mut Plan, cluster: &Cluster, workload: &Workload, replicated: Replicated) {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    let placed = Placed::new(&problem);
    let Replicated { groups, spreads, evaluation } = replicated;
    // The bound for any groups and replicas: all work at the rate of all devices.
    let rate: f64 = problem.flops.iter().sum();
    let least_ms = evaluation.gamma * groups.iter().map(Vec::len).sum::<usize>() as f64 * placed.experts.total / rate;
    plan.gap_bound = match evaluation.objective_ms > least_ms {
        true => (evaluation.objective_ms / least_ms - 1.0).min(f64::MAX),
        false => 0.0,
    };
    plan.optimal = plan.gap_bound <= EQUAL;
    plan.objective_ms = evaluation.objective_ms;
    plan.terms = terms(&evaluation);
    plan.algorithm = "search".into();
    let planned = groups.iter().zip(spreads).enumerate().map(|(g, (members, spread))| {
        let ids: Vec<u64> = members.iter().map(|&i| cluster.devices[i as usize].id).collect();
        let copies: usize = spread.splits.values().map(|split| split.holders.len() - 1).sum();
        let (experts, replicas) = spread.into_planned(&ids);
        PlannedGroup {
            devices: ids,
            objective_ms: evaluation.group_ms(g),
            experts,
            makespan_ms: evaluation.compute_ms[g],
            least_makespan_ms: Some(least_makespan(&placed, members, copies)),
            replicas,
        }
    });
    plan.groups = planned.collect();
    let used: Vec<u32> = groups.iter().flatten().copied().collect();
    let idle = cluster.devices.iter().zip(0..).filter(|(_, i)| !used.contains(i));
    plan.idle_devices = idle.map(|(device, _)| device.id).collect();
}
