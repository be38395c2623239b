//! Devices give experts to others of their group.

use super::Joint;
use crate::cluster::LinkTable;

impl<L: LinkTable> Joint<'_, '_, '_, L> {
    /// How long device `i` in group `g` computes and receives with this load.
    #[inline]
    fn end(&self, g: usize, i: u32, load: f64) -> f64 {
        let sums = &self.sums[g * self.n() + i as usize];
        let received = if load > 0.0 { sums[2] + sums[3] * load } else { 0.0 };
        self.groups[g].len() as f64 * load / self.placed.problem.flops[i as usize] + received
    }

    /// Expert `e` goes from one device to another.
    pub(super) fn give(&mut self, e: u32, from: u32, to: u32) {
        let cost = self.placed.experts.costs[e as usize];
        let here = &mut self.experts[from as usize];
        if let Some(place) = here.iter().rposition(|held| *held == e) {
            here.swap_remove(place);
        }
        self.load[from as usize] = if here.is_empty() { 0.0 } else { self.load[from as usize] - cost };
        self.experts[to as usize].push(e);
        self.load[to as usize] += cost;
    }

    /// What was given since that was last forgotten goes back.
    pub(super) fn take_back(&mut self) {
        while let Some((e, from, to)) = self.given.pop() {
            self.give(e, to, from);
        }
    }

    /// Device `i` gives experts to those of a group, `out` aside, until it holds no more than `most`. False where there is no room.
    pub(super) fn give_away(&mut self, i: u32, from: (usize, u32), most: usize) -> bool {
        while self.experts[i as usize].len() > most {
            if !self.give_one(i, from, f64::INFINITY) {
                return false;
            }
        }
        true
    }

    /// Device `i` gives its last expert to who ends first with it, of those that end before `latest`. False where there is none.
    fn give_one(&mut self, i: u32, (g, out): (usize, u32), latest: f64) -> bool {
        let Some(&e) = self.experts[i as usize].last() else { return false };
        let cost = self.placed.experts.costs[e as usize];
        let mut first = (latest, None);
        for &j in self.groups[g].iter().filter(|j| **j != i && **j != out) {
            if self.experts[j as usize].len() < self.memory(j) {
                let end = self.end(g, j, self.load[j as usize] + cost);
                if end < first.0 {
                    first = (end, Some(j));
                }
            }
        }
        self.ops += self.groups[g].len() as u64;
        let Some(to) = first.1 else { return false };
        self.give(e, i, to);
        self.given.push((e, i, to));
        true
    }

    /// Device `i` takes experts of those of a group, `out` aside, as long as it ends before who gives.
    pub(super) fn take(&mut self, i: u32, (g, out): (usize, u32)) {
        let costs = &self.placed.experts.costs;
        while self.experts[i as usize].len() < self.memory(i) {
            let mut last = (self.end(g, i, self.load[i as usize]), None);
            for &j in self.groups[g].iter().filter(|j| **j != i && **j != out) {
                let end = self.end(g, j, self.load[j as usize]);
                if end > last.0 {
                    last = (end, Some(j));
                }
            }
            self.ops += self.groups[g].len() as u64;
            let (end, Some(from)) = last else { break };
            self.ops += self.experts[from as usize].len() as u64 / 4;
            let ends = |e: u32| self.end(g, i, self.load[i as usize] + costs[e as usize]);
            let earlier = self.experts[from as usize].iter().copied().filter(|&e| ends(e) < end);
            let Some(e) = earlier.max_by(|&a, &b| costs[a as usize].total_cmp(&costs[b as usize])) else { break };
            self.give(e, from, i);
            self.given.push((e, from, i));
        }
    }

    /// Device `i`, new in a group that `out` leaves, gives what it has no room for, and, unless its experts are `kept`, what others end earlier with, or
    /// takes experts. False where there is no room.
    pub(super) fn balance(&mut self, i: u32, from: (usize, u32), kept: bool) -> bool {
        if !self.give_away(i, from, self.memory(i)) {
            return false;
        }
        if !kept {
            let before = self.given.len();
            while self.give_one(i, from, self.end(from.0, i, self.load[i as usize])) {}
            if self.given.len() == before {
                self.take(i, from);
            }
        }
        true
    }
}
