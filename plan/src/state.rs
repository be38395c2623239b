//! A grouping whose objective is updated incrementally when a device moves or two swap.
//!
//! Its cost is the excess over a target: each device's compute and communication above the limit that the target implies, summed over devices. Without
//! excess the target is met.

use super::objective::{IDLE, Problem};
use crate::cluster::LinkTable;

/// One group.
#[derive(Clone, Debug)]
struct Group {
    members: Vec<u32>,
    /// For each member, the sums of alpha and beta to the others.
    sums: Vec<(f64, f64)>,
    flops: f64,
    memory: u64,
    work: GroupWork,
}

/// Times of a group.
#[derive(Clone, Copy, Debug, Default)]
struct GroupWork {
    /// Compute and communication, ms.
    ms: f64,
    /// Sum over devices of the compute and communication above the limit, plus a penalty for missing memory, ms.
    excess_ms: f64,
}

/// A change: device `i` moves to group `to` (or [`IDLE`]), and device `j`, if given, from there to the group of `i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Move {
    pub i: u32,
    pub to: u32,
    pub j: Option<u32>,
}

/// A changed group, before its members are evaluated.
#[derive(Clone, Copy, Debug)]
struct ChangedGroup {
    g: u32,
    out: Option<u32>,
    into: Option<u32>,
    /// MB that a member sends to each other one.
    per_peer: f64,
    compute: f64,
    /// Time that the limit leaves for the exchange.
    over: f64,
    /// The exchange of the device that joins.
    worst: f64,
    /// The group's excess, and the penalty if it lacks memory.
    excess_ms: f64,
}

/// The outcome of a change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MoveResult {
    /// Times of the group that [`Move::i`] leaves, and of the group that it joins; zero for [`IDLE`].
    works: [GroupWork; 2],
    slowest: Option<usize>,
    limit_ms: f64,
}

/// A grouping, and cached sums for fast changes.
pub(crate) struct State<'p, 'a, L> {
    problem: &'p Problem<'a, L>,
    groups: Vec<Group>,
    group_of: Vec<u32>,
    /// A device's index in its group's list.
    place: Vec<u32>,
    /// For group g and device i (index g n + i): the sums of alpha and of beta over the device's links to the group's members. From these sums
    /// the exchange time of a joining device follows in constant time, and rejects most changes. Empty beyond [`TOWARD_MOST`] devices.
    toward: Vec<(f64, f64)>,
    workers: usize,
    /// The group with the most work, and how much.
    most: (u32, f64),
    /// Sum of the groups' excess.
    excess_ms: f64,
    /// The target for the objective.
    target_ms: f64,
    /// Time that the target leaves for a group's compute and communication, with the current groups.
    limit_ms: f64,
    /// The unit of penalties: the largest work of a group at the start.
    penalty_ms: f64,
    /// The place in the problem's edges of the slowest link between groups.
    slowest: Option<usize>,
    /// Groups that lack memory.
    short: usize,
    /// Number of changes.
    changes: u64,
    /// gamma by number of workers.
    gamma: Vec<f64>,
    /// Number of links examined: the measure of effort.
    pub ops: u64,
}

/// Penalty of a group short of memory, in the penalty's unit: a constant, and an amount proportional to the share of experts without memory.
pub(crate) const SHORT: (f64, f64) = (0.15, 3.0);
/// Maximum number of devices for which the sums with every group are kept.
pub(crate) const TOWARD_MOST: usize = 128;
/// Number of changes after which sums are computed anew, against rounding.
const REFRESH: u64 = 512;
/// Cost of a change in links, even if it is rejected at once.
const CHANGE_OPS: u64 = 16;

impl<'p, 'a, L: LinkTable> State<'p, 'a, L> {
    /// The state of a grouping; devices in none of the groups are idle. The target is its own objective, less `under` of its work.
    pub fn new(problem: &'p Problem<'a, L>, groups: &[Vec<u32>], under: f64) -> Self {
        let n = problem.n();
        let mut state = State {
            problem,
            groups: Vec::with_capacity(groups.len()),
            group_of: vec![IDLE; n],
            place: vec![0; n],
            toward: Vec::new(),
            workers: groups.iter().map(Vec::len).sum(),
            most: (IDLE, 0.0),
            excess_ms: 0.0,
            target_ms: 0.0,
            limit_ms: 0.0,
            penalty_ms: 0.0,
            slowest: None,
            short: 0,
            changes: 0,
            gamma: (0..=n).map(|workers| problem.gamma(workers)).collect(),
            ops: 0,
        };
        for (g, members) in groups.iter().enumerate() {
            let flops = members.iter().map(|&i| problem.flops[i as usize]).sum();
            members.iter().for_each(|&i| state.group_of[i as usize] = g as u32);
            let memory = problem.holds(members);
            let (members, sums) = (members.clone(), Vec::new());
            state.groups.push(Group { members, sums, flops, memory, work: GroupWork::default() });
        }
        state.add_up();
        state.slowest = if groups.len() > 1 { problem.slowest(|x| state.group_of[x as usize]) } else { None };
        state.aim(0.0);
        state.penalty_ms = state.most.1;
        let target_ms = state.under(under);
        state.aim(target_ms);
        state
    }

    /// The objective, less a share of its work.
    pub fn under(&self, share: f64) -> f64 {
        self.gamma[self.workers] * self.most.1 * (1.0 - share) + self.all_reduce(self.slowest)
    }

    /// The objective, ms, computed as if every group had enough memory.
    pub fn objective_ms(&self) -> f64 {
        self.under(0.0)
    }

    /// Whether all groups have the memory that they need.
    pub fn valid(&self) -> bool {
        self.short == 0
    }

    /// Sum of all devices' excess over the limit, ms.
    pub fn excess_ms(&self) -> f64 {
        self.excess_ms
    }

    /// Time that the target leaves for a group's compute and communication, ms.
    pub fn limit_ms(&self) -> f64 {
        self.limit_ms
    }

    /// Sets the target.
    pub fn aim(&mut self, target_ms: f64) {
        self.target_ms = target_ms;
        self.limit_ms = self.limit(self.slowest, self.workers);
        for g in 0..self.groups.len() {
            self.groups[g].work = self.whole(g as u32, self.limit_ms);
        }
        self.ops += self.workers as u64;
        self.sum_up();
    }

    fn all_reduce(&self, slowest: Option<usize>) -> f64 {
        self.problem.all_reduce_over(self.groups.len(), slowest)
    }

    /// Time that the target leaves for a group's compute and communication.
    fn limit(&self, slowest: Option<usize>, workers: usize) -> f64 {
        (self.target_ms - self.all_reduce(slowest)) / self.gamma[workers]
    }

    /// Updates the values of all groups together.
    fn sum_up(&mut self) {
        self.most = (IDLE, 0.0);
        (self.excess_ms, self.short) = (0.0, 0);
        for (g, group) in self.groups.iter().enumerate() {
            self.excess_ms += group.work.excess_ms;
            self.short += usize::from(group.memory < self.problem.n_experts);
            if group.work.ms > self.most.1 || self.most.0 == IDLE {
                self.most = (g as u32, group.work.ms);
            }
        }
        self.ops += 8 + self.groups.len() as u64 / 2;
    }

    /// The groups, each ascending.
    pub fn grouping(&self) -> Vec<Vec<u32>> {
        let sorted = |group: &Group| {
            let mut members = group.members.clone();
            members.sort_unstable();
            members
        };
        self.groups.iter().map(sorted).collect()
    }

    /// Number of groups.
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    /// The group of a device.
    pub fn group_of(&self, i: u32) -> u32 {
        self.group_of[i as usize]
    }

    /// A group's devices, in no order.
    pub fn members(&self, g: u32) -> &[u32] {
        &self.groups[g as usize].members
    }

    /// The group with the most compute and communication.
    pub fn worst(&self) -> u32 {
        self.most.0
    }

    /// Group `g` unchanged, with another limit.
    fn whole(&self, g: u32, limit_ms: f64) -> GroupWork {
        let side = self.side(g, None, None, limit_ms);
        self.work(&side, f64::INFINITY).unwrap_or(GroupWork { ms: f64::INFINITY, excess_ms: f64::INFINITY })
    }

    /// Group `g` without device `out` and with device `into`, before the exchanges of its other members are evaluated.
    fn side(&self, g: u32, out: Option<u32>, into: Option<u32>, limit_ms: f64) -> ChangedGroup {
        let (problem, group) = (self.problem, &self.groups[g as usize]);
        let size = group.members.len() + usize::from(into.is_some()) - usize::from(out.is_some());
        let per_peer = problem.workload.p2p_buffer_mb / size as f64;
        let (mut flops, mut memory) = (group.flops, group.memory);
        if let Some(out) = out {
            flops -= problem.flops[out as usize];
            memory -= problem.memory[out as usize];
        }
        if let Some(into) = into {
            flops += problem.flops[into as usize];
            memory += problem.memory[into as usize];
        }
        let compute = problem.compute(flops);
        let over = limit_ms - compute;
        let (mut worst, mut excess_ms) = (0.0, 0.0);
        if memory < problem.n_experts {
            let share = (problem.n_experts - memory) as f64 / problem.n_experts as f64;
            excess_ms = self.penalty_ms * (SHORT.0 + SHORT.1 * share);
        }
        if let Some(into) = into {
            let (mut alpha, mut beta) = match self.toward.get(g as usize * self.group_of.len() + into as usize) {
                Some(toward) => *toward,
                None => group.members.iter().fold((0.0, 0.0), |(alpha, beta), &m| {
                    let link = problem.links.link(into as usize, m as usize);
                    (alpha + link.alpha_ms, beta + link.beta_ms_per_mb)
                }),
            };
            if let Some(out) = out {
                let link = problem.links.link(into as usize, out as usize);
                alpha -= link.alpha_ms;
                beta -= link.beta_ms_per_mb;
            }
            worst = problem.workload.p2p_frequency * (alpha + beta * per_peer);
            excess_ms += (worst - over).max(0.0);
        }
        ChangedGroup { g, out, into, per_peer, compute, over, worst, excess_ms }
    }

    /// Evaluates all members of a changed group; `None` as soon as the excess exceeds `most`.
    fn work(&self, side: &ChangedGroup, most: f64) -> Option<GroupWork> {
        match (side.out.is_some(), side.into.is_some()) {
            (false, false) => self.work_of::<false, false>(side, most),
            (true, false) => self.work_of::<true, false>(side, most),
            (false, true) => self.work_of::<false, true>(side, most),
            (true, true) => self.work_of::<true, true>(side, most),
        }
    }

    fn work_of<const OUT: bool, const IN: bool>(&self, side: &ChangedGroup, most: f64) -> Option<GroupWork> {
        let problem = self.problem;
        let (out, into) = (side.out.unwrap_or_default(), side.into.unwrap_or_default());
        let eta = problem.workload.p2p_frequency;
        let (mut worst, mut excess_ms) = (side.worst, side.excess_ms);
        let group = &self.groups[side.g as usize];
        for (&m, &(mut alpha, mut beta)) in group.members.iter().zip(&group.sums) {
            if OUT && m == out {
                continue;
            }
            if OUT {
                let link = problem.links.link_to(out as usize, m as usize);
                alpha -= link.alpha_ms;
                beta -= link.beta_ms_per_mb;
            }
            if IN {
                let link = problem.links.link_to(into as usize, m as usize);
                alpha += link.alpha_ms;
                beta += link.beta_ms_per_mb;
            }
            let here = eta * (alpha + beta * side.per_peer);
            // Branch-free, because the values are unpredictable.
            worst = if here > worst { here } else { worst };
            excess_ms += if here > side.over { here - side.over } else { 0.0 };
            if excess_ms > most {
                return None;
            }
        }
        (excess_ms <= most).then_some(GroupWork { ms: side.compute + worst, excess_ms })
    }

    /// Evaluates a change; `None` if it empties a group, changes nothing, or the excess would exceed `most_ms`.
    pub fn after(&mut self, Move { i, to, j }: Move, most_ms: f64) -> Option<MoveResult> {
        self.ops += CHANGE_OPS;
        let from = self.group_of[i as usize];
        if from == to || j.is_some_and(|j| self.group_of[j as usize] != to) {
            return None;
        }
        let mut workers = self.workers;
        if j.is_none() {
            match (from, to) {
                (IDLE, _) => workers += 1,
                (_, IDLE) => workers -= 1,
                _ => {}
            }
            if from != IDLE && self.groups[from as usize].members.len() == 1 {
                return None;
            }
        }
        let slowest = self.slowest_after(i, to, j, from);
        let as_now = slowest == self.slowest && workers == self.workers;
        let limit_ms = if as_now { self.limit_ms } else { self.limit(slowest, workers) };
        let others = self.others(from, to, as_now, limit_ms);
        // First the devices that join, because they exceed the limit most often.
        let mut left = most_ms - others;
        let changed = [(from, Some(i), j), (to, j, Some(i))];
        let sides = changed.map(|(g, out, into)| (g != IDLE).then(|| self.side(g, out, into, limit_ms)));
        if self.toward.is_empty() {
            self.ops +=
                sides.iter().flatten().map(|side| self.groups[side.g as usize].members.len() as u64 / 2).sum::<u64>();
        }
        if sides.iter().flatten().map(|side| side.excess_ms).sum::<f64>() > left {
            return None;
        }
        let mut works = [GroupWork::default(); 2];
        for (work, side) in works.iter_mut().zip(&sides).rev() {
            let Some(side) = side else { continue };
            self.ops += self.groups[side.g as usize].members.len() as u64 * 3 / 2;
            *work = self.work(side, left)?;
            left -= work.excess_ms;
        }
        Some(MoveResult { works, slowest, limit_ms })
    }

    /// The excess of all groups except two, either of which may be [`IDLE`]; cached if the limit is unchanged (`as_now`).
    fn others(&mut self, a: u32, b: u32, as_now: bool, limit_ms: f64) -> f64 {
        if as_now {
            let excess = |g: u32| if g == IDLE { 0.0 } else { self.groups[g as usize].work.excess_ms };
            return self.excess_ms - excess(a) - excess(b);
        }
        self.ops += self.workers as u64;
        let others = (0..self.groups.len() as u32).filter(|&g| g != a && g != b);
        others.map(|g| self.whole(g, limit_ms).excess_ms).sum()
    }

    /// The slowest link between groups after a change.
    fn slowest_after(&mut self, i: u32, to: u32, j: Option<u32>, from: u32) -> Option<usize> {
        self.slowest?;
        let slowest = self.problem.slowest_after(self.slowest, [Some(i), j], |x| match x {
            x if x == i => to,
            x if Some(x) == j => from,
            x => self.group_of[x as usize],
        });
        self.ops += slowest.unwrap_or(0) as u64 / 2;
        slowest
    }

    /// Makes a change, evaluated as `after`.
    pub fn apply(&mut self, change: Move, after: MoveResult) {
        let from = self.group_of[change.i as usize];
        let again = after.limit_ms != self.limit_ms;
        (self.slowest, self.limit_ms) = (after.slowest, after.limit_ms);
        self.shift(change);
        self.reach(change.i, from, change.to);
        if let Some(j) = change.j {
            self.reach(j, change.to, from);
        }
        for (g, work) in [from, change.to].into_iter().zip(after.works) {
            if g != IDLE {
                self.groups[g as usize].work = work;
            }
        }
        self.changes += 1;
        if self.changes.is_multiple_of(REFRESH) {
            self.refresh();
        } else if again {
            self.aim(self.target_ms);
        } else {
            self.sum_up();
        }
    }

    fn shift(&mut self, Move { i, to, j }: Move) {
        let from = self.group_of[i as usize];
        self.take(i);
        if let Some(j) = j {
            self.take(j);
        }
        self.put(i, to);
        if let Some(j) = j {
            self.put(j, from);
        }
        self.add_rates([from, to]);
    }

    fn add_rates(&mut self, groups: [u32; 2]) {
        for g in groups {
            if g != IDLE {
                // Recomputed: with differences a very large rate would cancel the others permanently.
                let group = &mut self.groups[g as usize];
                group.flops = group.members.iter().map(|&m| self.problem.flops[m as usize]).sum();
            }
        }
    }

    /// Recomputes all sums of links, against cancellation.
    fn add_up(&mut self) {
        for group in &mut self.groups {
            group.members.sort_unstable();
            group.members.iter().zip(0..).for_each(|(&i, place)| self.place[i as usize] = place);
            group.sums = self.problem.links.sums(&group.members);
            self.ops += self.problem.links.sums_cost(group.members.len());
        }
        let n = self.group_of.len();
        if n <= TOWARD_MOST {
            self.toward.clear();
            self.toward.resize(n * self.groups.len(), (0.0, 0.0));
            (0..n as u32).for_each(|i| self.reach(i, IDLE, self.group_of[i as usize]));
        }
    }

    /// Recomputes all sums and the excess.
    pub fn refresh(&mut self) {
        self.add_up();
        self.aim(self.target_ms);
    }

    /// Updates all devices' sums with groups after device `i` moved.
    fn reach(&mut self, i: u32, from: u32, to: u32) {
        if self.toward.is_empty() {
            return;
        }
        let n = self.group_of.len();
        for (g, sign) in [(from, -1.0), (to, 1.0)].into_iter().filter(|(g, _)| *g != IDLE) {
            for (x, (alpha, beta)) in self.toward[g as usize * n..][..n].iter_mut().enumerate() {
                let link = self.problem.links.link_to(i as usize, x);
                *alpha += sign * link.alpha_ms;
                *beta += sign * link.beta_ms_per_mb;
            }
        }
        self.ops += n as u64;
    }

    fn take(&mut self, i: u32) {
        let g = self.group_of[i as usize];
        self.group_of[i as usize] = IDLE;
        if g == IDLE {
            return;
        }
        self.workers -= 1;
        let place = self.place[i as usize] as usize;
        let group = &mut self.groups[g as usize];
        group.members.swap_remove(place);
        group.sums.swap_remove(place);
        if let Some(&moved) = group.members.get(place) {
            self.place[moved as usize] = place as u32;
        }
        group.memory -= self.problem.memory[i as usize];
        for (&m, sums) in group.members.iter().zip(&mut group.sums) {
            let link = self.problem.links.link_to(i as usize, m as usize);
            sums.0 -= link.alpha_ms;
            sums.1 -= link.beta_ms_per_mb;
        }
        self.ops += group.members.len() as u64;
    }

    fn put(&mut self, i: u32, g: u32) {
        self.group_of[i as usize] = g;
        if g == IDLE {
            return;
        }
        self.workers += 1;
        let group = &mut self.groups[g as usize];
        let mut new = (0.0, 0.0);
        for (&m, sums) in group.members.iter().zip(&mut group.sums) {
            let link = self.problem.links.link_to(i as usize, m as usize);
            sums.0 += link.alpha_ms;
            sums.1 += link.beta_ms_per_mb;
            let link = self.problem.links.link(i as usize, m as usize);
            new.0 += link.alpha_ms;
            new.1 += link.beta_ms_per_mb;
        }
        self.ops += group.members.len() as u64;
        group.sums.push(new);
        self.place[i as usize] = group.members.len() as u32;
        group.members.push(i);
        group.memory += self.problem.memory[i as usize];
    }
}
