//! Cyclic exchanges: a device goes from the longest group to another, one from there to a third, and so on until one comes to the longest, so that all of
//! these groups take less than that did.
//!
//! (Thompson and Psaraftis 1993, "Cyclic transfer algorithms for multivehicle routing and scheduling problems".) When a chain has become cold, hardly
//! a change of two groups is left that helps; of more there often are. What a group takes with one device for another is the same whatever others do, so
//! for all devices that is found first, and then a cycle of such replacements.

use super::Relaxed;
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::placed::regroup::members;

/// So many groups take part at most.
const LONGEST: usize = 5;
/// Replacements that are looked at from one device of the longest group, at most.
const LOOKED_AT: usize = 20_000;
/// What is gained by less, as a share, is nothing.
const LITTLE: f32 = 1e-6;

/// A device, by its number, or nobody of a group: at n + group.
type Node = usize;

/// Who can come where a device or nobody goes, and what its group takes then; the shortest first.
type Arcs = Vec<Vec<(Node, f32)>>;

impl<L: LinkTable> Relaxed<'_, '_, '_, L> {
    /// Makes cyclic exchanges as long as there are any.
    pub(super) fn exchange_cyclically(&mut self) {
        let nodes = self.devices.n + self.groups.len();
        let mut arcs: Arcs = (0..nodes).map(|node| self.arcs(node)).collect();
        while let Some(cycle) = self.shortest_cycle(&arcs) {
            let before = (self.groups.clone(), self.group_of.clone(), self.slowest);
            let before_ms = self.objective_ms();
            let changed = self.exchange(&cycle);
            // The all-reduce may take longer.
            if self.objective_ms() >= before_ms {
                (self.groups, self.group_of, self.slowest) = before;
                changed.into_iter().for_each(|g| self.settle(g, 0));
                break;
            }
            for (node, arcs) in arcs.iter_mut().enumerate() {
                if self.group(node).is_some_and(|g| changed.contains(&g)) {
                    *arcs = self.arcs(node);
                }
            }
        }
    }

    fn group(&self, node: Node) -> Option<usize> {
        match node.checked_sub(self.devices.n) {
            Some(g) => (self.groups[g].set != 0).then_some(g),
            None => Some(self.group_of[node]).filter(|g| *g != IDLE).map(|g| g as usize),
        }
    }

    /// The device of a node as a set, an empty one where it is none.
    fn bit(&self, node: Node) -> u64 {
        if node < self.devices.n { 1 << node } else { 0 }
    }

    /// By whom a device, or nobody, can be replaced so that its group takes less than the longest does.
    fn arcs(&mut self, goes: Node) -> Vec<(Node, f32)> {
        let Some(g) = self.group(goes) else { return Vec::new() };
        let n = self.devices.n;
        let limit = self.groups[self.worst()].time * (1.0 - LITTLE);
        let mut arcs = Vec::new();
        for comes in 0..n + self.groups.len() {
            let elsewhere = self.group(comes).is_some_and(|h| h != g);
            let (set, holders) = self.replaced(g, self.bit(goes), self.bit(comes));
            if !elsewhere || (goes >= n && comes >= n) || holders == 0 {
                continue;
            }
            let time = self.time(0, set, holders, limit);
            if time < limit {
                arcs.push((comes, time));
            }
        }
        arcs.sort_by(|a, b| a.1.total_cmp(&b.1));
        arcs
    }

    /// A cycle through the longest group whose longest group is the shortest that was found.
    fn shortest_cycle(&self, arcs: &Arcs) -> Option<Vec<Node>> {
        let worst = self.worst();
        let limit = self.groups[worst].time * (1.0 - LITTLE);
        let mut search = Search { relaxed: self, arcs, limit, best: None, path: Vec::new(), left: 0 };
        for start in (0..arcs.len()).filter(|node| self.group(*node) == Some(worst)) {
            search.left = LOOKED_AT;
            search.path.push(start);
            search.go_on(start, 1 << worst, 0.0);
            search.path.clear();
        }
        search.best
    }

    /// Each goes where the one before it was, the first to the place of the last; the groups that are others then.
    fn exchange(&mut self, cycle: &[Node]) -> Vec<usize> {
        let next = |at: usize| cycle[(at + 1) % cycle.len()];
        let changed: Vec<usize> = cycle.iter().filter_map(|&node| self.group(node)).collect();
        for (at, (&goes, &g)) in cycle.iter().zip(&changed).enumerate() {
            let (set, holders) = self.replaced(g, self.bit(goes), self.bit(next(at)));
            (self.groups[g].set, self.groups[g].holders, self.groups[g].members) = (set, holders, members(set));
            self.settle(g, 0);
        }
        for &g in &changed {
            self.groups[g].members.iter().for_each(|&i| self.group_of[i as usize] = g as u32);
        }
        self.slowest = self.placed.problem.slowest(|i| self.group_of[i as usize]);
        changed
    }
}

/// A search, in depth, of the cycle that takes least.
struct Search<'r, 's, 'p, 'a, L> {
    relaxed: &'r Relaxed<'s, 'p, 'a, L>,
    arcs: &'r Arcs,
    /// What all groups of a cycle are to be below.
    limit: f32,
    best: Option<Vec<Node>>,
    path: Vec<Node>,
    left: usize,
}

impl<L: LinkTable> Search<'_, '_, '_, '_, L> {
    /// Who is last in the path goes to where the one before it was, and somebody of a group that does not take part yet comes, or the first of all does.
    /// Groups before that take `longest`.
    fn go_on(&mut self, last: Node, groups: u64, longest: f32) {
        for &(comes, time) in &self.arcs[last] {
            if longest.max(time) >= self.limit || self.left == 0 {
                return;
            }
            self.left -= 1;
            if comes == self.path[0] {
                if self.path.len() > 1 {
                    (self.limit, self.best) = (longest.max(time), Some(self.path.clone()));
                }
                continue;
            }
            let Some(g) = self.relaxed.group(comes).filter(|g| groups >> g & 1 == 0) else { continue };
            if self.path.len() < LONGEST {
                self.path.push(comes);
                self.go_on(comes, groups | 1 << g, longest.max(time));
                self.path.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shares::IMPOSSIBLE;
    use super::super::tests::kept_is_right;
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Links, Matrix};
    use crate::objective::Problem;
    use crate::placed::Placed;
    use crate::placed::search::FoundPlaced;
    use crate::random::Random;

    /// Six devices in the groups 0 1, 2 3 and 4 5, with 12 experts, and what is found from there; `ms` that a MB takes from one to
    /// another. Nothing is all-reduced.
    fn exchanged(ms: impl FnMut(usize) -> f64, memory: u64, check: impl Fn(&Relaxed<Matrix>, f32)) {
        let ms: Vec<f64> = (0..36).map(ms).collect();
        let devices = (0..6).map(|id| Device::new(id, "a", 1e9 * (1 + id % 2) as f64, memory)).collect();
        let cluster = Cluster::new(devices, Links::Matrix(Matrix::new(6, vec![0.0; 36], ms)));
        let workload = Workload { p2p_buffer_mb: 0.5, p2p_frequency: 2.0, ..Workload::new(vec![1e8; 12]) };
        let Links::Matrix(matrix) = &cluster.links else { return };
        let problem = Problem::new(&cluster.devices, matrix, &workload, false);
        let placed = Placed::new(&problem);
        let groups: Vec<Vec<u32>> = (0..3).map(|g| vec![2 * g, 2 * g + 1]).collect();
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let mut relaxed = Relaxed::new(&placed, &FoundPlaced::new(&placed, groups, placements), false);
        relaxed.aim(relaxed.start_ms, 0.1);
        let before = relaxed.groups[relaxed.worst()].time;
        relaxed.exchange_cyclically();
        relaxed.weigh();
        kept_is_right(&relaxed);
        check(&relaxed, before);
    }

    #[test]
    fn three_groups_exchange_where_no_two_can() {
        // Good links have 0 and 5, 2 and 1, 4 and 3.
        let good = |at: usize| [(0, 5), (2, 1), (4, 3)].contains(&(at / 6, at % 6));
        let good = |at: usize| good(at) || good(at % 6 * 6 + at / 6);
        exchanged(
            |at| if good(at) { 0.01 } else { 20.0 },
            12,
            |relaxed, before| {
                let mut sets: Vec<u64> = relaxed.groups.iter().map(|group| group.set).collect();
                sets.sort_unstable();
                assert_eq!(sets, [0, 0b000_110, 0b011_000, 0b100_001]);
                assert!(relaxed.groups.iter().all(|group| group.time < 0.5 * before));
            },
        );
    }

    #[test]
    fn no_exchange_of_the_longest_group_is_left() {
        let (mut random, better) = (Random(1), std::cell::Cell::new(0));
        for case in 0..60 {
            let memory = if case % 2 == 0 { 12 } else { 7 };
            exchanged(
                |_| 0.01 * (1 + random.below(100)) as f64,
                memory,
                |relaxed, before| {
                    let (of, mut simplex) = (&relaxed.devices, super::super::shares::Simplex::default());
                    let now = relaxed.groups[relaxed.worst()].time;
                    assert!(now <= before);
                    better.set(better.get() + u32::from(now < before));
                    let groups: Vec<_> = relaxed.groups.iter().filter(|group| group.set != 0).collect();
                    // All ways to have the devices in these groups.
                    for way in 0..groups.len().pow(6) {
                        let there = |i: usize| way / groups.len().pow(i as u32) % groups.len();
                        let mut longest = 0.0f32;
                        for (g, group) in groups.iter().enumerate() {
                            let set = (0..6).filter(|i| there(*i) == g).map(|i| 1u64 << i).sum::<u64>();
                            let (gone, come) = (group.set & !set, set & !group.set);
                            if set == 0 || gone.count_ones() > 1 || come.count_ones() > 1 {
                                longest = f32::INFINITY;
                                break;
                            }
                            let may = gone == 0 || group.holders & gone != 0;
                            let holders = group.holders & !gone | if may { come } else { 0 };
                            longest = longest.max(simplex.least(of, set, holders, IMPOSSIBLE));
                        }
                        assert!(longest > now * 0.999, "case {case}: {longest} {now}");
                    }
                },
            );
        }
        assert!(better.get() > 20, "{} of 60", better.get());
    }
}
