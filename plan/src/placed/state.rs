//! A grouping under change, for annealing: what its groups take with experts dealt out, and how far that is over a target.

use super::deal::{Dealing, Dealt, Exchanges, ROUNDS};
use super::{Experts, Placed};
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::state::SHORT;

/// What one group takes.
#[derive(Clone, Debug, Default)]
struct GroupWork {
    compute_ms: f64,
    /// eta times what each device exchanges.
    exchange_ms: Vec<f64>,
    /// Compute and the longest exchange.
    ms: f64,
    /// Experts that its memory lacks room for.
    short: u64,
}

impl GroupWork {
    /// Sum over devices of what is over the limit, and a penalty where memory is short.
    fn excess(&self, limit_ms: f64, penalty_ms: f64, n_experts: u64) -> f64 {
        let over = |ms: &f64| (self.compute_ms + ms - limit_ms).max(0.0);
        let short = match self.short {
            0 => 0.0,
            short => penalty_ms * (SHORT.0 + SHORT.1 * short as f64 / n_experts as f64),
        };
        self.exchange_ms.iter().map(over).sum::<f64>() + short
    }
}

/// Devices that change groups: which, and where to ([`IDLE`]: to none).
pub(super) type Change = Vec<(u32, u32)>;

/// What a change comes to; what its groups are then is with the state.
#[derive(Clone, Copy)]
pub(super) struct Changed {
    groups: [u32; 2],
    slowest: Option<usize>,
    workers: usize,
    limit_ms: f64,
    excess_ms: f64,
}

/// Memory that is used again for every change.
#[derive(Default)]
struct Scratch {
    dealing: Dealing,
    dealt: [Dealt; 2],
    exchanges: Exchanges,
    /// Of the two groups of a change, the members and the work.
    members: [Vec<u32>; 2],
    works: [GroupWork; 2],
}

pub(super) struct State<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    groups: Vec<Vec<u32>>,
    works: Vec<GroupWork>,
    group_of: Vec<u32>,
    workers: usize,
    slowest: Option<usize>,
    target_ms: f64,
    limit_ms: f64,
    penalty_ms: f64,
    excess_ms: f64,
    scratch: Scratch,
    /// Links looked at so far: the measure of effort.
    pub ops: u64,
}

impl<'s, 'p, 'a, L: LinkTable> State<'s, 'p, 'a, L> {
    /// The state of a grouping; devices in none of the groups are idle. The target is its own objective, less `under` of its work.
    pub fn new(placed: &'s Placed<'p, 'a, L>, groups: &[Vec<u32>], under: f64) -> Self {
        let mut group_of = vec![IDLE; placed.problem.n()];
        for (g, members) in groups.iter().enumerate() {
            members.iter().for_each(|&i| group_of[i as usize] = g as u32);
        }
        let slowest = placed.problem.slowest(|i| group_of[i as usize]);
        let mut state = State {
            placed,
            groups: groups.to_vec(),
            works: Vec::new(),
            workers: groups.iter().map(Vec::len).sum(),
            group_of,
            slowest,
            target_ms: 0.0,
            limit_ms: 0.0,
            penalty_ms: 0.0,
            excess_ms: 0.0,
            scratch: Scratch::default(),
            ops: 0,
        };
        for members in groups {
            let mut work = GroupWork::default();
            state.work(members, f64::INFINITY, f64::INFINITY, &mut work);
            state.works.push(work);
        }
        state.penalty_ms = state.worst_ms();
        state.aim(state.under(under));
        state
    }

    fn worst_ms(&self) -> f64 {
        self.works.iter().map(|work| work.ms).fold(0.0, f64::max)
    }

    fn all_reduce(&self, slowest: Option<usize>) -> f64 {
        self.placed.problem.all_reduce_over(self.groups.len(), slowest)
    }

    /// The objective, less a share of its work.
    pub fn under(&self, share: f64) -> f64 {
        let gamma = self.placed.problem.gamma(self.workers);
        gamma * self.worst_ms() * (1.0 - share) + self.all_reduce(self.slowest)
    }

    /// The objective, ms; what it would be if groups that are short of memory were not.
    pub fn objective_ms(&self) -> f64 {
        self.under(0.0)
    }

    /// Whether all groups have the memory that they need.
    pub fn valid(&self) -> bool {
        self.works.iter().all(|work| work.short == 0)
    }

    pub fn excess_ms(&self) -> f64 {
        self.excess_ms
    }

    /// What the target leaves for a group's compute and communication, ms.
    pub fn limit_ms(&self) -> f64 {
        self.limit_ms
    }

    /// The groups, their members in no order.
    pub fn groups(&self) -> &[Vec<u32>] {
        &self.groups
    }

    pub fn group_of(&self, i: u32) -> u32 {
        self.group_of[i as usize]
    }

    /// The group that takes longest.
    pub fn worst(&self) -> usize {
        (0..self.works.len()).fold(0, |worst, g| if self.works[g].ms > self.works[worst].ms { g } else { worst })
    }

    /// Aims at an objective.
    pub fn aim(&mut self, target_ms: f64) {
        self.target_ms = target_ms;
        self.limit_ms = self.limit(self.slowest, self.workers);
        self.excess_ms = self.works.iter().map(|work| self.excess(work, self.limit_ms)).sum();
    }

    fn limit(&self, slowest: Option<usize>, workers: usize) -> f64 {
        (self.target_ms - self.all_reduce(slowest)) / self.placed.problem.gamma(workers)
    }

    fn excess(&self, work: &GroupWork, limit_ms: f64) -> f64 {
        work.excess(limit_ms, self.penalty_ms, self.placed.problem.n_experts)
    }

    /// What a change comes to; `None` where it would empty a group, or the excess would be over `most_ms`. All its devices come from and go to
    /// the same two groups, either of which may be [`IDLE`].
    pub fn after(&mut self, change: &Change, most_ms: f64) -> Option<Changed> {
        self.ops += 16;
        let &(first, to) = change.first()?;
        let from = self.group_of[first as usize];
        let groups = [from, to];
        let goes = |i: u32| change.iter().find(|(moved, _)| *moved == i).map(|(_, to)| *to);
        let mut members = std::mem::take(&mut self.scratch.members);
        let mut workers = self.workers;
        for (&g, members) in groups.iter().zip(&mut members) {
            members.clear();
            if g != IDLE {
                let here = &self.groups[g as usize];
                members.extend(here.iter().copied().filter(|&i| goes(i).is_none()));
                members.extend(change.iter().filter(|(_, to)| *to == g).map(|(i, _)| *i));
                workers = workers + members.len() - here.len();
            }
        }
        let mut works = std::mem::take(&mut self.scratch.works);
        let changed = self.after_with(groups, &members, &mut works, workers, most_ms, goes);
        (self.scratch.members, self.scratch.works) = (members, works);
        changed
    }

    fn after_with(
        &mut self,
        groups: [u32; 2],
        members: &[Vec<u32>; 2],
        works: &mut [GroupWork; 2],
        workers: usize,
        most_ms: f64,
        goes: impl Fn(u32) -> Option<u32>,
    ) -> Option<Changed> {
        if groups.iter().zip(members).any(|(g, members)| *g != IDLE && members.is_empty()) {
            return None;
        }
        let slowest = self.placed.problem.slowest(|i| goes(i).unwrap_or(self.group_of[i as usize]));
        self.ops += slowest.unwrap_or(0) as u64 / 2;
        let as_now = slowest == self.slowest && workers == self.workers;
        let limit_ms = if as_now { self.limit_ms } else { self.limit(slowest, workers) };
        let mut excess_ms = if as_now {
            let touched = groups.iter().filter(|g| **g != IDLE);
            self.excess_ms - touched.map(|&g| self.excess(&self.works[g as usize], limit_ms)).sum::<f64>()
        } else {
            self.ops += self.workers as u64;
            let others = (0..self.works.len()).filter(|g| !groups.contains(&(*g as u32)));
            others.map(|g| self.excess(&self.works[g], limit_ms)).sum()
        };
        // First what the device comes to, as that is most likely to be too much.
        for place in [1, 0] {
            if groups[place] != IDLE {
                if !self.work(&members[place], limit_ms, most_ms - excess_ms, &mut works[place]) {
                    return None;
                }
                excess_ms += self.excess(&works[place], limit_ms);
                if excess_ms > most_ms {
                    return None;
                }
            }
        }
        Some(Changed { groups, slowest, workers, limit_ms, excess_ms: excess_ms.max(0.0) })
    }

    /// Makes the change that [`State::after`] has last looked at.
    pub fn apply(&mut self, changed: Changed, change: &Change) {
        change.iter().for_each(|&(i, to)| self.group_of[i as usize] = to);
        for (place, &g) in changed.groups.iter().enumerate().filter(|(_, g)| **g != IDLE) {
            std::mem::swap(&mut self.groups[g as usize], &mut self.scratch.members[place]);
            std::mem::swap(&mut self.works[g as usize], &mut self.scratch.works[place]);
        }
        (self.slowest, self.workers) = (changed.slowest, changed.workers);
        (self.limit_ms, self.excess_ms) = (changed.limit_ms, changed.excess_ms);
    }

    /// A group's work with its experts dealt out, the better way of two, into `work`. False as soon as its excess over the limit is seen to be more
    /// than `most_ms`.
    fn work(&mut self, members: &[u32], limit_ms: f64, most_ms: f64, work: &mut GroupWork) -> bool {
        let (placed, problem) = (self.placed, self.placed.problem);
        let experts: &Experts = &placed.experts;
        let n = members.len();
        let Scratch { dealing, dealt: [first, second], exchanges, .. } = &mut self.scratch;
        dealing.set(placed, members);
        let held = dealing.memory.iter().fold(0u64, |sum, m| sum.saturating_add(*m));
        work.short = problem.n_experts.saturating_sub(held);
        if work.short > 0 {
            // As if one device more could hold them.
            if let Some(last) = dealing.memory.last_mut() {
                *last = last.saturating_add(work.short);
            }
        }
        self.ops += (n * n + 4 * n) as u64;
        self.ops += match experts.uniform {
            Some(_) => n as u64,
            None => (experts.costs.len() * n) as u64,
        };
        work.ms = f64::INFINITY;
        for both in [false, true] {
            let dealt = if both { &mut *second } else { &mut *first };
            dealing.deal(experts, both, dealt);
            if both && first.load == second.load && first.count == second.count {
                break;
            }
            let dealt = if both { &mut *second } else { &mut *first };
            let compute_ms = dealing.compute_ms(dealt);
            // The first has the least compute there is, or nearly.
            if !both && n as f64 * (compute_ms - limit_ms) > most_ms {
                return false;
            }
            if compute_ms >= work.ms {
                break;
            }
            let times = placed.polish(members, dealing, dealt, exchanges, ROUNDS, &mut self.ops);
            if times.ms() < work.ms {
                (work.compute_ms, work.ms) = (times.compute_ms, times.ms());
                work.exchange_ms.clear();
                let each = exchanges.sent.iter().zip(&exchanges.received);
                work.exchange_ms.extend(each.map(|(sent, received)| sent.max(*received)));
            }
        }
        true
    }
}
