//! Annealing of groups whose times are remembered.
//!
//! Small groups come by again and again, so that experts are dealt out in each only once. Unlike in [`super::state`], what a group is
//! over the limit counts once, however many of its devices are; and groups are made and end on the way.

use rustc_hash::FxHashMap;

use super::Placed;
use super::deal::Scratch;
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::random::Random;
use crate::search::EXPONENTIAL;

/// Groups are sets of so many devices at most, as bits.
pub(super) const MOST_DEVICES: usize = u64::BITS as usize;
/// Groups whose times are remembered at a time; all are forgotten then, as only very long searches come so far.
const MOST_KNOWN: usize = 1 << 22;
/// The target is under the best objective so far, by so much of its work.
const UNDER: f64 = 0.05;
/// Temperatures at first and at last, as shares of what the target leaves for a group.
const HOT: f64 = 0.1;
const COLD: f64 = 0.01;

/// The set of some devices, as bits.
pub(super) fn bits(list: impl Iterator<Item = u32>) -> u64 {
    list.fold(0, |set, i| set | 1 << i)
}

/// The devices of a set.
pub(super) fn devices(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(first)
    })
}

pub(super) fn members(set: u64) -> Vec<u32> {
    devices(set).map(|i| i as u32).collect()
}

/// What groups take, by their sets of devices.
struct Known<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    ms: FxHashMap<u64, f64>,
    scratch: Scratch,
    /// Links looked at so far.
    ops: u64,
}

impl<L: LinkTable> Known<'_, '_, '_, L> {
    /// ms; infinite where memory does not suffice.
    fn ms(&mut self, set: u64) -> f64 {
        self.ops += 12;
        if let Some(ms) = self.ms.get(&set) {
            return *ms;
        }
        self.ops += 64;
        let ms = self.placed.dealt_ms(&members(set), &mut self.scratch, &mut self.ops);
        if self.ms.len() == MOST_KNOWN {
            self.ms.clear();
        }
        self.ms.insert(set, ms);
        ms
    }
}

struct Grouping<'s, 'p, 'a, L> {
    known: Known<'s, 'p, 'a, L>,
    sets: Vec<u64>,
    /// What each takes.
    ms: Vec<f64>,
    group_of: Vec<u32>,
    slowest: Option<usize>,
    /// Of the work of all devices that are in a group.
    gamma: f64,
    target_ms: f64,
    limit_ms: f64,
    excess_ms: f64,
}

impl<'s, 'p, 'a, L: LinkTable> Grouping<'s, 'p, 'a, L> {
    fn new(placed: &'s Placed<'p, 'a, L>, groups: &[Vec<u32>]) -> Self {
        let mut known = Known { placed, ms: FxHashMap::default(), scratch: Scratch::default(), ops: 0 };
        let mut group_of = vec![IDLE; placed.problem.n()];
        for (g, list) in groups.iter().enumerate() {
            list.iter().for_each(|&i| group_of[i as usize] = g as u32);
        }
        let sets: Vec<u64> = groups.iter().map(|list| bits(list.iter().copied())).collect();
        let mut grouping = Grouping {
            ms: sets.iter().map(|&set| known.ms(set)).collect(),
            slowest: placed.problem.slowest(|i| group_of[i as usize]),
            gamma: placed.problem.gamma(groups.iter().map(Vec::len).sum()),
            known,
            sets,
            group_of,
            target_ms: 0.0,
            limit_ms: 0.0,
            excess_ms: 0.0,
        };
        grouping.aim();
        grouping
    }

    fn all_reduce(&self, groups: usize, slowest: Option<usize>) -> f64 {
        let problem = self.known.placed.problem;
        problem.all_reduce_over(groups, slowest)
    }

    fn under(&self, share: f64) -> f64 {
        let longest = self.ms.iter().copied().fold(0.0, f64::max);
        self.gamma * longest * (1.0 - share) + self.all_reduce(self.sets.len(), self.slowest)
    }

    fn objective_ms(&self) -> f64 {
        self.under(0.0)
    }

    /// Aims a little below what it is.
    fn aim(&mut self) {
        self.target_ms = self.under(UNDER);
        self.limit_ms = (self.target_ms - self.all_reduce(self.sets.len(), self.slowest)) / self.gamma;
        self.weigh();
    }

    fn weigh(&mut self) {
        self.excess_ms = self.ms.iter().map(|ms| (ms - self.limit_ms).max(0.0)).sum();
    }

    /// Device `i` goes to group `to`, or into a new one where that is the number of groups, and `back`, of that group, to its own; unless the excess
    /// would be over `most`.
    fn change(&mut self, i: u32, to: usize, back: Option<u32>, most: f64) -> bool {
        let from = self.group_of[i as usize] as usize;
        let back_set = back.map_or(0, |j| 1u64 << j);
        let there = self.sets.get(to).copied().unwrap_or(0);
        let (left, joined) = (self.sets[from] & !(1 << i) | back_set, (there | 1 << i) & !back_set);
        if from == to || (left == 0 && there == 0) {
            return false;
        }
        let groups = self.sets.len() + usize::from(there == 0) - usize::from(left == 0);
        let goes = |x: u32| match x {
            _ if x == i => to as u32,
            _ if Some(x) == back => from as u32,
            _ => self.group_of[x as usize],
        };
        let slowest = self.known.placed.problem.slowest_after(self.slowest, [Some(i), back], goes);
        self.known.ops += 8 + slowest.unwrap_or(0) as u64 / 2;
        let limit_ms = (self.target_ms - self.all_reduce(groups, slowest)) / self.gamma;
        let over = |ms: f64| (ms - limit_ms).max(0.0);
        let others = (0..self.ms.len()).filter(|g| *g != from && *g != to);
        let mut excess = others.map(|g| over(self.ms[g])).sum::<f64>();
        // First where it goes, as that is most likely to be too much.
        let mut ms = [0.0; 2];
        for (ms, set) in ms.iter_mut().zip([joined, left]).filter(|(_, set)| *set != 0) {
            if excess > most {
                return false;
            }
            *ms = self.known.ms(set);
            excess += over(*ms);
        }
        if excess > most || !excess.is_finite() {
            return false;
        }
        if there == 0 {
            self.sets.push(0);
            self.ms.push(0.0);
        }
        (self.sets[to], self.sets[from]) = (joined, left);
        (self.ms[to], self.ms[from]) = (ms[0], ms[1]);
        self.group_of[i as usize] = to as u32;
        if let Some(j) = back {
            self.group_of[j as usize] = from as u32;
        }
        if left == 0 {
            let last = self.sets.len() - 1;
            self.sets.swap_remove(from);
            self.ms.swap_remove(from);
            self.group_of.iter_mut().filter(|g| **g == last as u32).for_each(|g| *g = from as u32);
        }
        (self.slowest, self.limit_ms) = (slowest, limit_ms);
        self.weigh();
        true
    }

    fn random_change(&mut self, random: &mut Random, most: f64) -> bool {
        let n = self.group_of.len();
        let i = if random.below(2) == 0 {
            let worst = (0..self.ms.len()).fold(0, |worst, g| if self.ms[g] > self.ms[worst] { g } else { worst });
            let mut set = self.sets[worst];
            (0..random.below(set.count_ones() as usize)).for_each(|_| set &= set - 1);
            set.trailing_zeros()
        } else {
            random.below(n) as u32
        };
        if self.group_of[i as usize] == IDLE {
            return false;
        }
        if random.below(4) == 0 {
            return self.change(i, random.below(self.sets.len() + 1), None, most);
        }
        let j = random.below(n) as u32;
        match self.group_of[j as usize] {
            IDLE => false,
            to => self.change(i, to as usize, Some(j), most),
        }
    }
}

/// The best groups that annealing from `start` comes by, in about `budget` links looked at, if they are better than `start`.
pub(super) fn regrouped<L: LinkTable>(
    placed: &Placed<L>,
    start: &[Vec<u32>],
    exponential: &[f64],
    budget: u64,
    random: &mut Random,
) -> Option<Vec<Vec<u32>>> {
    let mut grouping = Grouping::new(placed, start);
    let unit = grouping.limit_ms;
    let mut best = (grouping.objective_ms(), None);
    let (mut temperature, mut steps) = (0.0, 0u64);
    while grouping.known.ops < budget {
        if steps.is_multiple_of(64) {
            let progress = grouping.known.ops as f64 / budget as f64;
            temperature = unit * HOT * (COLD / HOT).powf(progress);
        }
        steps += 1;
        grouping.known.ops += 8;
        let most = grouping.excess_ms + temperature * exponential[random.below(EXPONENTIAL)];
        if grouping.random_change(random, most) && grouping.objective_ms() < best.0 * (1.0 - 1e-9) {
            best = (grouping.objective_ms(), Some(grouping.sets.clone()));
            grouping.aim();
        }
    }
    best.1.map(|sets| sets.into_iter().map(members).collect())
}
