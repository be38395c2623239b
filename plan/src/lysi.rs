//! Lysi, the published grouping algorithm, for comparison (`--algorithm lysi`).
//!
//! One ascending pass over the pairs of devices, merging their groups when both gain on average; no merge is ever undone.
//! As published, the pass reads only the upper triangle of the links, and a merged group keeps a stale all-reduce time; both decide the result. The
//! objective of the result is computed fresh.

use std::collections::HashMap;

use super::objective::Problem;
use crate::cluster::{Link, LinkTable};

/// Maximum number of devices for which all pairs are always listed and sorted. Above it they are only if links are of more than a few kinds.
const PAIRS_SORTED: usize = 2048;
const KINDS_FEW: usize = 16;
/// Maximum number of devices for which all pairs of groups are in a table. Sizes are then below 2^16.
const EVALUATED_LISTED: usize = 1024;

/// A group of the algorithm.
struct Group {
    members: Vec<u32>,
    flops: f64,
    memory: u64,
    /// gamma, as of the last merge, times compute and communication, ms; infinite while the group is invalid.
    work_ms: f64,
    all_reduce_ms: f64,
}

/// The two sides merged.
struct Merged {
    work_ms: f64,
    /// Sums of alpha and beta: of the first side's members, then of the second's.
    sums: Vec<(f64, f64)>,
}

/// The final groups, each ascending, by first device; and the devices of the group that stayed short of memory (at most one,
/// as two invalid groups always merge).
pub(crate) fn groups<L: LinkTable>(problem: &Problem<L>) -> (Vec<Vec<u32>>, Vec<u32>) {
    let mut pass = MergePass::new(problem);
    pairs_ascending(problem, |i, j| pass.pair(i, j));
    let mut groups = Vec::new();
    let mut invalid = Vec::new();
    for mut group in pass.groups.into_iter().flatten() {
        group.members.sort_unstable();
        if group.memory >= problem.n_experts { groups.push(group.members) } else { invalid.extend(group.members) }
    }
    groups.sort();
    invalid.sort_unstable();
    (groups, invalid)
}

/// For each evaluated pair of groups, their sizes then.
enum Evaluated {
    /// By pair, both sizes in one number; of few devices.
    Table(usize, Vec<u32>),
    Map(HashMap<(u32, u32), (usize, usize)>),
}

impl Evaluated {
    fn new(n: usize) -> Evaluated {
        if n <= EVALUATED_LISTED { Evaluated::Table(n, vec![0; n * n]) } else { Evaluated::Map(HashMap::new()) }
    }

    /// Whether the pair was last evaluated with these sizes; notes that it was.
    fn before(&mut self, pair: (u32, u32), sizes: (usize, usize)) -> bool {
        match self {
            Evaluated::Table(n, table) => {
                let both = (sizes.0 as u32) << 16 | sizes.1 as u32;
                std::mem::replace(&mut table[pair.0 as usize * *n + pair.1 as usize], both) == both
            }
            Evaluated::Map(map) => map.insert(pair, sizes) == Some(sizes),
        }
    }
}

struct MergePass<'p, 'a, L> {
    problem: &'p Problem<'a, L>,
    groups: Vec<Option<Group>>,
    group_of: Vec<u32>,
    /// Sums of alpha and beta to the other members of a device's own group.
    sums: Vec<(f64, f64)>,
    n_groups: usize,
    invalid: usize,
    workers: usize,
    evaluated: Evaluated,
    /// Slowest links first, which hold the slowest external one; those before `external` are internal.
    slowest: Vec<(u32, u32)>,
    external: usize,
}

impl<'p, 'a, L: LinkTable> MergePass<'p, 'a, L> {
    fn new(problem: &'p Problem<'a, L>) -> Self {
        let n = problem.n();
        let valid = |i: usize| problem.memory[i] >= problem.n_experts;
        let workers = (0..n).filter(|&i| valid(i)).count();
        let slowest = slowest_tree_upper(problem);
        let all_reduce_ms = slowest.first().map_or(0.0, |&(i, j)| problem.all_reduce(workers, upper(problem, i, j)));
        let group = |i: usize| Group {
            members: vec![i as u32],
            flops: problem.flops[i],
            memory: problem.memory[i],
            work_ms: match valid(i) {
                true => problem.gamma(workers) * problem.compute(problem.flops[i]),
                false => f64::INFINITY,
            },
            all_reduce_ms,
        };
        MergePass {
            problem,
            groups: (0..n).map(|i| Some(group(i))).collect(),
            group_of: (0..n as u32).collect(),
            sums: vec![(0.0, 0.0); n],
            n_groups: n,
            invalid: n - workers,
            workers,
            evaluated: Evaluated::new(n),
            slowest,
            external: 0,
        }
    }

    /// One candidate pair, `i < j`.
    fn pair(&mut self, i: u32, j: u32) {
        let (a, b) = (self.group_of[i as usize], self.group_of[j as usize]);
        if a == b {
            return;
        }
        while let Some(&(i, j)) = self.slowest.get(self.external)
            && self.group_of[i as usize] == self.group_of[j as usize]
        {
            self.external += 1;
        }
        let problem = self.problem;
        let experts = problem.n_experts;
        let group = |g: u32| self.groups[g as usize].as_ref().expect("a device's group exists");
        let (ga, gb) = (group(a), group(b));
        let sizes = (ga.members.len(), gb.members.len());
        let (key, by_key) = if a < b { ((a, b), sizes) } else { ((b, a), (sizes.1, sizes.0)) };
        if self.evaluated.before(key, by_key) {
            return;
        }
        let memory = ga.memory.saturating_add(gb.memory);
        let (valid_a, valid_b, valid) = (ga.memory >= experts, gb.memory >= experts, memory >= experts);
        let mut k = self.n_groups - self.invalid;
        match (valid_a, valid_b) {
            (false, false) if valid => k += 1,
            (true, true) => k -= 1,
            _ => {}
        }
        let mut workers = self.workers;
        if valid {
            workers += if valid_a { 0 } else { sizes.0 } + if valid_b { 0 } else { sizes.1 };
        }
        let external = self.slowest.get(self.external);
        let all_reduce_ms = external.map_or(0.0, |&(i, j)| problem.all_reduce(k, upper(problem, i, j)));

        let merged = self.merged(ga, gb, valid.then_some(workers));
        let (one, two) = (ga.work_ms + all_reduce_ms, gb.work_ms + all_reduce_ms);
        // As published, the first group's all-reduce time is the stale one of its last evaluation.
        let both = merged.work_ms + ga.all_reduce_ms;
        let merge = (one.is_infinite() && two.is_infinite()) || both == 0.0 || both * (1.0 / one + 1.0 / two) <= 2.0;
        for g in [a, b] {
            self.groups[g as usize].as_mut().expect("as above").all_reduce_ms = all_reduce_ms;
        }
        if merge {
            self.workers = workers;
            self.invalid -= match (valid_a, valid_b) {
                (true, true) => 0,
                (false, false) => 1 + usize::from(valid),
                // One side is valid, and so are both together.
                _ => 1,
            };
            self.merge(a, b, merged);
        }
    }

    /// The two groups merged, with `workers` devices in valid groups; `None` if that is invalid.
    fn merged(&self, ga: &Group, gb: &Group, workers: Option<usize>) -> Merged {
        let size = ga.members.len() + gb.members.len();
        let mut sums: Vec<(f64, f64)> = ga.members.iter().chain(&gb.members).map(|&i| self.sums[i as usize]).collect();
        let (first, second) = sums.split_at_mut(ga.members.len());
        for (&i, to_i) in ga.members.iter().zip(first) {
            for (&j, to_j) in gb.members.iter().zip(second.iter_mut()) {
                let link = upper(self.problem, i, j);
                for sum in [&mut *to_i, to_j] {
                    sum.0 += link.alpha_ms;
                    sum.1 += link.beta_ms_per_mb;
                }
            }
        }
        let worst = sums.iter().map(|&(a, b)| self.problem.exchange(a, b, size)).fold(0.0, f64::max);
        let work_ms = workers.map_or(f64::INFINITY, |workers| {
            let eta = self.problem.workload.p2p_frequency;
            self.problem.gamma(workers) * (self.problem.compute(ga.flops + gb.flops) + eta * worst)
        });
        Merged { work_ms, sums }
    }

    /// Union by size, ties to the smaller index.
    fn merge(&mut self, a: u32, b: u32, merged: Merged) {
        let (ga, gb) = (self.groups[a as usize].take(), self.groups[b as usize].take());
        let (ga, gb) = (ga.expect("it exists"), gb.expect("it exists"));
        for (&i, sum) in ga.members.iter().chain(&gb.members).zip(merged.sums) {
            self.sums[i as usize] = sum;
        }
        let a_stays = ga.members.len() > gb.members.len() || (ga.members.len() == gb.members.len() && a < b);
        let (root, mut stays, goes) = if a_stays { (a, ga, gb) } else { (b, gb, ga) };
        goes.members.iter().for_each(|&i| self.group_of[i as usize] = root);
        stays.members.extend(goes.members);
        stays.flops += goes.flops;
        stays.memory = stays.memory.saturating_add(goes.memory);
        stays.work_ms = merged.work_ms;
        self.groups[root as usize] = Some(stays);
        self.n_groups -= 1;
    }
}

/// The link from the smaller index to the larger.
#[inline]
fn upper<L: LinkTable>(problem: &Problem<L>, i: u32, j: u32) -> Link {
    problem.links.link(i.min(j) as usize, i.max(j) as usize)
}

/// Calls `visit` with the pairs i < j, ascending by (alpha + beta * d, i, j).
fn pairs_ascending<L: LinkTable>(problem: &Problem<L>, mut visit: impl FnMut(u32, u32)) {
    let (n, mb) = (problem.n(), problem.workload.p2p_buffer_mb);
    let time = |i: usize, j: usize| problem.links.link(i, j).time_ms(mb);
    // Times are not negative, so their bits are in their order.
    let bits = |i: usize, j: usize| time(i, j).to_bits();
    let kinds = if n > PAIRS_SORTED { few_kinds(n, bits) } else { None };
    let Some(kinds) = kinds else {
        let mut pairs = Vec::with_capacity(n * n.saturating_sub(1) / 2);
        for i in 0..n {
            pairs.extend((i + 1..n).map(|j| (bits(i, j), i as u32, j as u32)));
        }
        pairs.sort_unstable();
        pairs.iter().for_each(|&(_, i, j)| visit(i, j));
        return;
    };
    for kind in kinds {
        for i in 0..n {
            for j in (i + 1..n).filter(|&j| bits(i, j) == kind) {
                visit(i as u32, j as u32);
            }
        }
    }
}

/// The distinct times of all pairs, ascending; `None` if there are more than [`KINDS_FEW`]. For few, one pass over the pairs per time is cheaper than a
/// list of all pairs.
fn few_kinds(n: usize, bits: impl Fn(usize, usize) -> u64) -> Option<Vec<u64>> {
    let mut kinds: Vec<u64> = Vec::new();
    for i in 0..n {
        for j in i + 1..n {
            let kind = bits(i, j);
            if !kinds.contains(&kind) {
                kinds.push(kind);
                if kinds.len() > KINDS_FEW {
                    return None;
                }
            }
        }
    }
    kinds.sort_unstable();
    Some(kinds)
}

/// A spanning tree of the largest edges by (alpha + beta * a / 2, i, j), largest first: it holds the largest external edge
/// at all times.
fn slowest_tree_upper<L: LinkTable>(problem: &Problem<L>) -> Vec<(u32, u32)> {
    let n = problem.n();
    let mb = problem.workload.all_reduce_buffer_mb / 2.0;
    type EdgeKey = (f64, u32, u32);
    let mut best: Vec<EdgeKey> = vec![(f64::NEG_INFINITY, 0, 0); n];
    let mut left: Vec<u32> = (1..n as u32).collect();
    let (mut tree, mut last): (Vec<EdgeKey>, u32) = (Vec::new(), 0);
    while !left.is_empty() {
        let mut next = ((f64::NEG_INFINITY, 0, 0), 0);
        for (place, &j) in left.iter().enumerate() {
            let key = (upper(problem, last, j).time_ms(mb), last.min(j), last.max(j));
            if key > best[j as usize] {
                best[j as usize] = key;
            }
            if best[j as usize] > next.0 {
                next = (best[j as usize], place);
            }
        }
        last = left.swap_remove(next.1);
        tree.push(next.0);
    }
    tree.sort_by(|a, b| b.partial_cmp(a).expect("finite"));
    tree.into_iter().map(|(_, i, j)| (i, j)).collect()
}
