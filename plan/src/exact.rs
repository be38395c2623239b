//! Proof of optimality on small clusters: dynamic programming over sets of devices.
//!
//! Level t merges the ends of the t slowest edges of the tree of slowest links, so those edges are inside groups. If the ends u and v of the next edge
//! are in different groups, that edge is the slowest link between groups; every grouping of several groups appears at exactly one level. At a level the
//! all-reduce depends on the number of groups K alone. The remaining problem is to split the devices into K sets that minimise the maximum of a function
//! of each set: D(k, T) = min over S in T with T's first device of max(h(S), D(k - 1, T \ S)), O(3^m).

use super::bound::Bounds;
use super::objective::Problem;
use crate::cluster::{Edge, Link, LinkTable, Matrix};

/// Maximum number of devices: a table has 2^n entries.
pub(crate) const MOST_DEVICES: usize = 16;

/// The outcome.
pub(crate) struct Improvement {
    /// A better grouping than the known one, if one was found.
    pub better: Option<Vec<Vec<u32>>>,
    /// Whether the search was complete, so that the better or else the known grouping is optimal.
    pub complete: bool,
}

/// Looks for a grouping with a lower objective than `known_ms`, in at most about `budget` steps, under the published objective.
pub(crate) fn improve(
    problem: &Problem<Matrix>,
    bounds: &Bounds,
    known_ms: f64,
    allow_idle: bool,
    budget: u64,
) -> Improvement {
    if problem.n() > MOST_DEVICES {
        return Improvement { better: None, complete: false };
    }
    // No group has more than its share of the rate.
    let rate = problem.flops.iter().sum::<f64>();
    let compute = |k: usize| problem.compute(rate / k as f64) * (1.0 - 1e-12);
    improve_by(problem, work_of_sets(problem), &compute, bounds, known_ms, allow_idle, budget)
}

/// Looks for a better grouping under an objective given by `work[s]`, the time of the set of devices `s` as a group (ms, infinite if invalid). At least one
/// of `k` groups computes for `compute(k)` or longer.
pub(crate) fn improve_by(
    problem: &Problem<Matrix>,
    work: Vec<f64>,
    compute: &dyn Fn(usize) -> f64,
    bounds: &Bounds,
    known_ms: f64,
    allow_idle: bool,
    budget: u64,
) -> Improvement {
    let n = problem.n();
    let mut dp = Dp { problem, bounds, work, compute, best_ms: known_ms, best: None, left: budget };
    let all = (1u32 << n) - 1;
    let complete = if allow_idle {
        // Sets with more workers first, as they are best more often.
        let mut sets: Vec<u32> = (1..=all).collect();
        sets.sort_by_key(|set| (std::cmp::Reverse(set.count_ones()), *set));
        sets.into_iter().all(|set| dp.workers(set, n))
    } else {
        dp.workers(all, n)
    };
    let groups = |sets: Vec<u32>| sets.into_iter().map(devices).collect();
    Improvement { better: dp.best.map(groups), complete }
}

/// The devices of a set, ascending.
pub(crate) fn devices(set: u32) -> Vec<u32> {
    (0..32).filter(|i| set >> i & 1 == 1).collect()
}

/// Compute and communication of every set of devices, ms; infinite for invalid groups.
fn work_of_sets(problem: &Problem<Matrix>) -> Vec<f64> {
    let n = problem.n();
    let work = |set: u32| {
        let members = devices(set);
        if members.is_empty() || !problem.valid(&members) {
            return f64::INFINITY;
        }
        let (compute, communication) = problem.group(&members);
        compute + communication
    };
    (0..1u32 << n).map(work).collect()
}

struct Dp<'p, 'a> {
    problem: &'p Problem<'a, Matrix>,
    bounds: &'p Bounds,
    work: Vec<f64>,
    compute: &'p dyn Fn(usize) -> f64,
    best_ms: f64,
    best: Option<Vec<u32>>,
    left: u64,
}

impl Dp<'_, '_> {
    /// Searches all groupings of exactly these devices. Returns false if the budget ran out.
    fn workers(&mut self, set: u32, n: usize) -> bool {
        let members = devices(set);
        let w = members.len();
        let gamma = self.problem.gamma(w);
        let one = gamma * self.work[set as usize];
        if one < self.best_ms {
            (self.best_ms, self.best) = (one, Some(vec![set]));
        }
        let edges = match w == n {
            true => self.problem.links.slowest_tree(self.problem.workload.all_reduce_buffer_mb / 2.0),
            false => self.tree(&members),
        };
        // The merged devices, as sets.
        let mut merged: Vec<u32> = members.iter().map(|&i| 1 << i).collect();
        for edge in edges {
            let part = |merged: &[u32], i: u32| merged.iter().position(|set| set >> i & 1 == 1);
            let (Some(u), Some(v)) = (part(&merged, edge.i), part(&merged, edge.j)) else { continue };
            let most = self.most_groups(merged.len(), gamma, edge.link);
            if most >= 2 && !self.level(&merged, (u, v), most, gamma, edge.link) {
                return false;
            }
            // The later of the two goes into the earlier.
            let (first, second) = (u.min(v), u.max(v));
            let set = merged.remove(second);
            merged[first] |= set;
        }
        true
    }

    /// The slowest tree of some of the devices.
    fn tree(&self, members: &[u32]) -> Vec<Edge> {
        let mb = self.problem.workload.all_reduce_buffer_mb / 2.0;
        let pairs = members.iter().enumerate().flat_map(|(a, &i)| members[a + 1..].iter().map(move |&j| (i, j)));
        let mut pairs: Vec<_> = pairs.map(|(i, j)| self.problem.links.edge(i as usize, j as usize, mb)).collect();
        pairs.sort_by(|a, b| b.slowness.partial_cmp(&a.slowness).expect("finite"));
        let mut part: Vec<u32> = (0..self.problem.n() as u32).collect();
        pairs.retain(|edge| {
            let (a, b) = (part[edge.i as usize], part[edge.j as usize]);
            part.iter_mut().filter(|p| **p == b).for_each(|p| *p = a);
            a != b
        });
        pairs
    }

    /// The largest number of groups that may be better than the best known.
    fn most_groups(&self, m: usize, gamma: f64, slowest: Link) -> usize {
        let may = |k: &usize| {
            let work = gamma * (self.compute)(*k);
            let least = self.bounds.by_groups[k - 1].max(work + self.problem.all_reduce(*k, slowest));
            least < self.best_ms
        };
        (2..=m).rev().find(may).unwrap_or(0)
    }

    /// Groupings of the merged devices into 2 to `most` groups that keep `apart` apart. False when the budget ran out.
    fn level(&mut self, merged: &[u32], apart: (usize, usize), most: usize, gamma: f64, slowest: Link) -> bool {
        let m = merged.len();
        let sets = 1usize << m;
        let both = 1 << apart.0 | 1 << apart.1;
        // Groups no better than the best objective on their own are excluded.
        let limit = (self.best_ms - self.problem.all_reduce(2, slowest)) / gamma;
        let mut union = vec![0u32; sets];
        let mut work = vec![f64::INFINITY; sets];
        for set in 1..sets {
            union[set] = union[set & (set - 1)] | merged[set.trailing_zeros() as usize];
            let here = self.work[union[set] as usize];
            if set & both != both && here < limit {
                work[set] = here;
            }
        }
        // D(k, T) for T without the first device; T with it is asked for as a whole only.
        let mut tables = vec![work.clone()];
        for k in 2..=most {
            let last = tables.last().expect("D(1) is there");
            let whole = best_split(sets - 1, &work, last);
            self.left = self.left.saturating_sub(1 << (m - 1));
            let objective_ms = gamma * whole.0 + self.problem.all_reduce(k, slowest);
            if objective_ms < self.best_ms {
                let mut groups = vec![union[whole.1]];
                let mut rest = (sets - 1) ^ whole.1;
                for table in tables[..k - 2].iter().rev() {
                    let split = best_split(rest, &work, table).1;
                    groups.push(union[split]);
                    rest ^= split;
                }
                groups.push(union[rest]);
                (self.best_ms, self.best) = (objective_ms, Some(groups));
            }
            if k == most {
                break;
            }
            // About (3^(m - 1)) / 2 steps.
            let steps = 3u64.pow(m as u32 - 1) / 2;
            if steps > self.left {
                return false;
            }
            self.left -= steps;
            let mut table = vec![f64::INFINITY; sets];
            for set in (2..sets).step_by(2) {
                table[set] = best_split(set, &work, last).0;
            }
            tables.push(table);
        }
        true
    }
}

/// The best first group of `set`, the one with its first device, the rest being as good as `rest` says; and the maximum of both.
fn best_split(set: usize, work: &[f64], rest: &[f64]) -> (f64, usize) {
    let first = set & set.wrapping_neg();
    let others = set ^ first;
    let mut best = (f64::INFINITY, set);
    let mut taken = others;
    loop {
        let group = taken | first;
        let both = work[group].max(rest[set ^ group]);
        if both < best.0 {
            best = (both, group);
        }
        if taken == 0 {
            return best;
        }
        taken = (taken - 1) & others;
    }
}
