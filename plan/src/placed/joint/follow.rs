//! Experts that follow a change of groups.
//!
//! A device in the place of another is most often too much only because others hold what suited that. So a change that is nearly good is made, experts
//! pass on, and if it is not good then, it is unmade.

use super::{Joint, Lanes, Role, Times, exchanged_ms, larger};
use crate::cluster::LinkTable;

/// Devices that may give an expert, and of the others that may take it, so many.
const GIVERS: usize = 4;
const TAKERS: usize = 4;

/// What was before a change of two groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Before {
    sums: Vec<Lanes>,
    roles: Vec<Role>,
    load: Vec<f64>,
    ends: Vec<f64>,
    times: Vec<Times>,
    rates: Vec<f64>,
    slowest: Option<usize>,
    limit: f64,
    excess: f64,
}

impl<L: LinkTable> Joint<'_, '_, '_, L> {
    /// Keeps loads as they are, to come back to.
    pub(super) fn save_loads(&mut self) {
        self.before.load.clone_from(&self.load);
        self.ops += self.n() as u64 / 8;
    }

    /// The same of what else there is of groups `g` and `h`, which are about to change.
    pub(super) fn save(&mut self, [g, h]: [usize; 2]) {
        let n = self.n();
        let before = &mut self.before;
        before.sums.clear();
        [g, h].iter().for_each(|g| before.sums.extend_from_slice(&self.sums[g * n..][..n]));
        before.roles.clone_from(&self.roles);
        before.ends.clone_from(&self.ends);
        before.times.clone_from(&self.times);
        before.rates.clone_from(&self.rates);
        (before.slowest, before.limit, before.excess) = (self.slowest, self.limit, self.excess);
    }

    /// Loads as they were.
    pub(super) fn restore_loads(&mut self) {
        std::mem::swap(&mut self.load, &mut self.before.load);
    }

    /// All else as it was, who is where and who holds what aside.
    pub(super) fn restore(&mut self, [g, h]: [usize; 2]) {
        let (n, before) = (self.n(), &mut self.before);
        let sums = [g, h].into_iter().zip(before.sums.chunks(n));
        sums.for_each(|(g, sums)| self.sums[g * n..][..n].copy_from_slice(sums));
        std::mem::swap(&mut self.roles, &mut before.roles);
        std::mem::swap(&mut self.ends, &mut before.ends);
        std::mem::swap(&mut self.times, &mut before.times);
        std::mem::swap(&mut self.rates, &mut before.rates);
        (self.slowest, self.limit, self.excess) = (before.slowest, before.limit, before.excess);
    }

    /// An expert of group `g` goes from one of its devices to another: of some pairs, where that leaves the least excess. False where none leaves less.
    pub(super) fn pass_on(&mut self, g: usize) -> bool {
        let (n, limit, now) = (self.n(), self.limit, self.times[g]);
        // What a FLOP less of each device takes off those that are over the limit, ms.
        let mut relief = std::mem::take(&mut self.relief);
        relief.clear();
        relief.extend(self.groups[g].iter().map(|&k| (0.0, k)));
        for (at, &m) in self.groups[g].iter().enumerate() {
            let sums = &self.sums[g * n + m as usize];
            let (sent, received) = exchanged_ms(sums, self.roles[m as usize]);
            if now.compute + larger(sent, received) <= limit {
                continue;
            }
            if received > sent {
                relief[at].0 += sums[3];
            } else {
                relief.iter_mut().for_each(|(relief, k)| *relief += self.pairs.to[*k as usize * n + m as usize][1]);
            }
        }
        self.ops += 2 * relief.len() as u64;
        relief.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        // First who computes for longest; then those whose experts are in others' way.
        let last = now.last as u32;
        let others = relief.iter().map(|(_, k)| *k).filter(|k| *k != last);
        let mut best = (now.over * (1.0 - 1e-9), None);
        let mut givers = GIVERS;
        for from in std::iter::once(last).chain(others) {
            let Some(&e) = self.experts[from as usize].last().filter(|_| givers > 0) else { continue };
            givers -= 1;
            let cost = self.placed.experts.costs[e as usize];
            let mut takers = TAKERS;
            for &(_, to) in relief.iter().rev() {
                let end = (self.load[to as usize] + cost) / self.placed.problem.flops[to as usize];
                let longer = end > now.end || (from == last && end == now.end);
                if takers == 0 || to == from || longer || self.experts[to as usize].len() >= self.memory(to) {
                    continue;
                }
                takers -= 1;
                let (held, there) = (self.experts[from as usize].len(), self.experts[to as usize].len());
                let parts = [self.loaded(from, -cost, held - 1), self.loaded(to, cost, there + 1)];
                if let Some(times) = self.after(g, &parts, limit, best.0).filter(|times| times.over < best.0) {
                    best = (times.over, Some((e, from, to, parts, times)));
                }
            }
        }
        self.relief = relief;
        let Some((e, from, to, parts, times)) = best.1 else { return false };
        self.put(g, &parts, times);
        self.give(e, from, to);
        self.given.push((e, from, to));
        self.settle(from as usize);
        self.settle(to as usize);
        true
    }
}
