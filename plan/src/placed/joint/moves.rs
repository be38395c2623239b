//! Random changes of groups and placement.

use super::{Joint, Others, Part, Role, Times, exchange_ms, larger};
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use aristos_balance::Random;

/// Proposals in four that begin with the slowest group.
const WORST_IN_FOUR: usize = 3;
/// One proposal in this many moves a device to another group.
const MOVE_ONE_IN: usize = 12;
/// Share of the other proposals that swap two devices, as a fraction.
const SWAPS_OF: (usize, usize) = (3, 10);
/// One change of experts in this many moves several at once.
const SEVERAL_ONE_IN: usize = 4;
/// One proposal in this many brings an idle device back.
const IDLE_ONE_IN: usize = 8;
/// Devices compared as partners of a swap.
const CANDIDATES: usize = 4;
/// Weight of a device's time in its new group, relative to its excess there.
const TAKES: f64 = 0.3;
/// One swap in this many also moves experts to where they end earlier.
const BALANCE_ONE_IN: usize = 3;

impl<L: LinkTable> Joint<'_, '_, '_, L> {
    /// Makes a random change unless the excess would be above `most`.
    pub(super) fn random_change(&mut self, random: &mut Random, most: f64) -> bool {
        let several = self.groups.len() > 1;
        if let Some(idle) = self.groups.get(self.n_groups).filter(|idle| !idle.is_empty())
            && random.below(IDLE_ONE_IN) == 0
        {
            let i = idle[random.below(idle.len())];
            return self.move_device(i, random.below(self.n_groups), most);
        }
        let g = if random.below(4) < WORST_IN_FOUR { self.worst() } else { random.below(self.n_groups) };
        let members = &self.groups[g];
        // The device with the longer exchange of two.
        let two = [0; 2].map(|_| members[random.below(members.len())]);
        let i = if self.exchange_of(g, two[1]) > self.exchange_of(g, two[0]) { two[1] } else { two[0] };
        if several && random.below(MOVE_ONE_IN) == 0 {
            return self.move_device(i, random.below(self.groups.len()), most);
        }
        if several && random.below(SWAPS_OF.1) < SWAPS_OF.0 {
            let Some(j) = self.most_promising(i, g, random) else { return false };
            return self.swap(i, j, random.below(BALANCE_ONE_IN) == 0, most);
        }
        let j = members[random.below(members.len())];
        let (held, other) = (self.experts[i as usize].len(), self.experts[j as usize].len());
        if i == j || held == 0 {
            return false;
        }
        if held > 1 && random.below(SEVERAL_ONE_IN) == 0 {
            return self.give_several(i, j, 1 + random.below(held), most);
        }
        let place = random.below(held);
        let uniform = self.placed.experts.uniform.is_some();
        let other = (!uniform && other > 0 && random.below(2) == 0).then(|| random.below(other));
        self.give_or_swap((i, place), (j, other), most)
    }

    /// Time of device `i`'s exchange with the members of a group, ms.
    fn exchange_of(&self, g: usize, i: u32) -> f64 {
        exchange_ms(&self.sums[g * self.n() + i as usize], self.roles[i as usize])
    }

    /// The device of another group, of some drawn at random, that suits a swap with device `i` of group `g` best.
    fn most_promising(&mut self, i: u32, g: usize, random: &mut Random) -> Option<u32> {
        self.ops += CANDIDATES as u64 / 2;
        let mut best = (f64::INFINITY, None);
        for _ in 0..CANDIDATES {
            let j = random.below(self.n()) as u32;
            let h = self.group(j);
            if h == g {
                continue;
            }
            let loss = self.loss(i, (h, j)) + self.loss(j, (g, i));
            if loss < best.0 {
                best = (loss, Some(j));
            }
        }
        best.1
    }

    /// Estimated loss, ms, if device `x` replaces `out` in a group and takes its experts: its excess there plus a share of its time.
    fn loss(&self, x: u32, (g, out): (usize, u32)) -> f64 {
        if self.is_idle(g) {
            return 0.0;
        }
        let (n, at, role) = (self.n(), out as usize * self.n() + x as usize, self.roles[out as usize]);
        let (mut sums, to, from) = (self.sums[g * n + x as usize], self.pairs.to[at], self.pairs.from[at]);
        if role.holds {
            sums[0] -= to[0];
            sums[1] -= to[1] * role.load;
        }
        sums[2] -= from[0];
        sums[3] -= from[1];
        let exchange = exchange_ms(&sums, role);
        let compute = self.groups[g].len() as f64 * role.load / self.flops[x as usize];
        larger(larger(self.times[g].compute, compute) + exchange - self.limit, 0.0) + TAKES * (compute + exchange)
    }

    /// Swaps two devices of different groups, each taking the other's experts, and, with `balance` or where those do not fit, moves some to or from others.
    fn swap(&mut self, i: u32, j: u32, balance: bool, most: f64) -> bool {
        let (g, h) = (self.group(i), self.group(j));
        let Some(others) = self.hopeful((i, g, h), Some(j), most) else { return false };
        self.keep_loads();
        self.exchange_experts(i, j);
        let fits = self.balance(j, (g, i), balance) && self.balance(i, (h, j), balance);
        let changed = fits && self.changed((i, g, h), Some(j), others, most);
        if !changed {
            self.take_back();
            self.experts.swap(i as usize, j as usize);
        }
        changed
    }

    /// Moves device `i` to group `h`: its experts go to those that stay, and it takes some of those in `h`. If that is its own group, it gives all
    /// its experts away, or takes some if it has none.
    fn move_device(&mut self, i: u32, h: usize, most: f64) -> bool {
        let g = self.group(i);
        if !self.is_idle(g) && self.groups[g].len() == 1 {
            return false;
        }
        let Some(others) = self.hopeful((i, g, h), None, most) else { return false };
        let takes = g != h || self.experts[i as usize].is_empty();
        self.keep_loads();
        let fits = self.give_all(i, (g, i), 0);
        if takes {
            self.take(i, (h, i));
        }
        let changed = fits && self.changed((i, g, h), None, others, most);
        if !changed {
            self.take_back();
        }
        changed
    }

    fn exchange_experts(&mut self, i: u32, j: u32) {
        self.experts.swap(i as usize, j as usize);
        self.load.swap(i as usize, j as usize);
    }

    /// Gives device `j` of the same group the expert at `place` of device `i`, for the one at `other` of `j` if that is given.
    fn give_or_swap(&mut self, (i, place): (u32, usize), (j, other): (u32, Option<usize>), most: f64) -> bool {
        let costs = &self.placed.experts.costs;
        let e = self.experts[i as usize][place];
        let f = other.map(|other| self.experts[j as usize][other]);
        let moved = costs[e as usize] - f.map_or(0.0, |f| costs[f as usize]);
        if (f.is_none() && self.experts[j as usize].len() >= self.memory[j as usize]) || (f.is_some() && moved == 0.0) {
            return false;
        }
        let one = usize::from(f.is_none());
        self.change_inside((i, j), moved, one, most, |joint| {
            joint.give(e, i, j);
            f.into_iter().for_each(|f| joint.give(f, j, i));
        })
    }

    /// Device `i` gives `j` of the same group its last `count` experts.
    fn give_several(&mut self, i: u32, j: u32, count: usize, most: f64) -> bool {
        let (held, there) = (self.experts[i as usize].len(), self.experts[j as usize].len());
        if there + count > self.memory[j as usize] {
            return false;
        }
        let costs = &self.placed.experts.costs;
        let moved: f64 = self.experts[i as usize][held - count..].iter().map(|&e| costs[e as usize]).sum();
        self.change_inside((i, j), moved, count, most, |joint| {
            while joint.experts[i as usize].len() > held - count
                && let Some(&e) = joint.experts[i as usize].last()
            {
                joint.give(e, i, j);
            }
        })
    }

    /// Moves `moved` FLOP in `count` experts from device `i` to `j` of the same group, by `give`.
    fn change_inside(
        &mut self,
        (i, j): (u32, u32),
        moved: f64,
        count: usize,
        most: f64,
        give: impl FnOnce(&mut Self),
    ) -> bool {
        let (g, held) = (self.group(i), self.experts[i as usize].len() - count);
        let there = self.experts[j as usize].len() + count;
        let parts = [self.loaded(i, -moved, held), self.loaded(j, moved, there)];
        let Some(times) = self.after(g, &parts, self.limit, most - self.excess + self.times[g].over) else {
            return false;
        };
        self.put(g, &parts, times);
        self.given.clear();
        give(self);
        self.settle(i as usize);
        self.settle(j as usize);
        true
    }

    /// Device `i` in its group, with `more` FLOP, in this many experts.
    fn loaded(&self, i: u32, more: f64, experts: usize) -> Part {
        let before = self.roles[i as usize];
        let load = if experts > 0 { before.load + more } else { 0.0 };
        Part::new(i as usize, before, Role { member: true, holds: experts > 0, load })
    }

    /// The other groups after device `i` moves from group `g` to `h`, and `back` from there to `g`.
    fn others(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>) -> Others {
        let idle = self.n_groups as u32;
        let named = |g: u32| if g == idle { IDLE } else { g };
        let to = |x: u32| match x {
            _ if x == i => named(h as u32),
            _ if Some(x) == back => named(g as u32),
            _ => named(self.group_of[x as usize]),
        };
        let slowest = match self.n_groups > 1 {
            true => self.placed.problem.slowest_after(self.slowest, [Some(i), back], to),
            false => None,
        };
        self.ops += slowest.unwrap_or(0) as u64 / 2;
        let mut workers = self.workers;
        if back.is_none() {
            workers = workers + usize::from(self.is_idle(g)) - usize::from(self.is_idle(h));
        }
        if slowest == self.slowest && workers == self.workers {
            let excess = self.excess - self.times[g].over - self.times[h].over;
            return Others { slowest, workers, limit: self.limit, excess };
        }
        let limit = self.limit_of(slowest, workers);
        self.ops += self.n() as u64;
        let others = (0..self.n_groups).filter(|&k| k != g && k != h);
        Others { slowest, workers, limit, excess: others.map(|k| self.group_times(k, limit).over).sum() }
    }

    /// Returns the state of the other groups if the change can stay at or below an excess of `most`. The estimate uses the newcomers' sends to the current
    /// holders, and compute as if experts were divisible.
    fn hopeful(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, most: f64) -> Option<Others> {
        if g == h {
            let excess = self.excess - self.times[g].over;
            return Some(Others { slowest: self.slowest, workers: self.workers, limit: self.limit, excess });
        }
        let others = self.others((i, g, h), back);
        let mut excess = others.excess;
        for (into, to, out) in [(Some(i), h, back), (back, g, Some(i))].into_iter().filter(|part| !self.is_idle(part.1))
        {
            let flops_of = |i: Option<u32>| i.map_or(0.0, |i| self.flops[i as usize]);
            let rate = self.rates[to] + flops_of(into) - flops_of(out);
            let size = (self.groups[to].len() + usize::from(into.is_some()) - usize::from(out.is_some())) as f64;
            let sent = into.map_or(0.0, |into| {
                let sums = &self.sums[to * self.n() + into as usize];
                let to_out = out.map_or(0.0, |out| {
                    let links = self.pairs.to[out as usize * self.n() + into as usize];
                    let role = self.roles[out as usize];
                    if role.holds { links[0] + links[1] * role.load } else { 0.0 }
                });
                sums[0] + sums[1] - to_out
            });
            let compute = size * self.placed.experts.total / rate;
            let over = compute - others.limit;
            excess += (over + sent).max(0.0) + (size - 1.0) * over.max(0.0);
        }
        self.ops += 4;
        (excess <= most).then_some(others)
    }

    /// Moves device `i` from group `g` to `h`, and `back` from there to `g`, after experts have been given: brings sums and times up to date. If the excess
    /// would be above `most`, returns false and leaves the state as it was.
    fn changed(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, others: Others, most: f64) -> bool {
        let [mut into_g, mut into_h] = std::mem::take(&mut self.parts);
        into_g.clear();
        into_h.clear();
        if g != h {
            let none = Role::default();
            let joins = |j: u32| Part::new(j as usize, none, self.role(j as usize));
            let leaves = |j: u32| Part::new(j as usize, self.roles[j as usize], none);
            into_h.push(joins(i));
            into_h.extend(back.map(leaves));
            into_g.extend(back.map(joins));
            into_g.push(leaves(i));
            self.add_changing(g, (i, back), &mut into_g);
            self.add_changing(h, (i, back), &mut into_h);
        } else {
            self.add_changing(h, (u32::MAX, None), &mut into_h);
        }
        let changed = self.enter_both((i, g, h), back, [&into_g, &into_h], others, most);
        if changed {
            for part in into_g.iter().chain(&into_h).filter(|part| part.after.member) {
                self.settle(part.device);
            }
        }
        self.parts = [into_g, into_h];
        changed
    }

    /// Adds the members of a group whose experts have changed, except those that move.
    fn add_changing(&self, g: usize, (i, back): (u32, Option<u32>), into: &mut Vec<Part>) {
        if !self.is_idle(g) {
            for &j in self.groups[g].iter().filter(|j| **j != i && Some(**j) != back) {
                let (before, after) = (self.roles[j as usize], self.role(j as usize));
                if before != after {
                    into.push(Part::new(j as usize, before, after));
                }
            }
        }
    }

    fn enter_both(
        &mut self,
        (i, g, h): (u32, usize, usize),
        back: Option<u32>,
        [into_g, into_h]: [&[Part]; 2],
        Others { slowest, workers, limit, excess }: Others,
        most: f64,
    ) -> bool {
        let Some(there) = self.after(h, into_h, limit, most - excess) else { return false };
        if g == h {
            self.put(g, into_h, there);
            return true;
        }
        let Some(here) = self.after(g, into_g, limit, most - excess - there.over) else { return false };
        self.enter(h, into_h);
        self.enter(g, into_g);
        self.move_to(i, h);
        back.into_iter().for_each(|j| self.move_to(j, g));
        (self.times[g], self.times[h]) = (here, there);
        (self.slowest, self.workers) = (slowest, workers);
        if limit != self.limit {
            self.limit = limit;
            for k in (0..self.n_groups).filter(|&k| k != g && k != h) {
                self.times[k] = self.group_times(k, limit);
            }
        }
        self.excess = self.times.iter().map(|times| times.over).sum();
        true
    }

    /// Enters a change inside group `g`, which takes `times` then.
    fn put(&mut self, g: usize, parts: &[Part], times: Times) {
        self.enter(g, parts);
        self.times[g] = times;
        self.excess = self.times.iter().map(|times| times.over).sum();
    }

    fn move_to(&mut self, i: u32, to: usize) {
        let (from, flops) = (self.group(i), self.flops[i as usize]);
        self.rates[from] -= flops;
        self.rates[to] += flops;
        let members = &mut self.groups[from];
        if let Some(place) = members.iter().position(|&j| j == i) {
            members.swap_remove(place);
        }
        self.groups[to].push(i);
        self.group_of[i as usize] = to as u32;
    }

    /// How long device `i` computes and receives in group `g` with this load, ms.
    #[inline]
    fn end(&self, g: usize, i: u32, load: f64) -> f64 {
        let sums = &self.sums[g * self.n() + i as usize];
        let received = if load > 0.0 { sums[2] + sums[3] * load } else { 0.0 };
        self.groups[g].len() as f64 * load / self.flops[i as usize] + received
    }

    /// Moves expert `e` from one device to another.
    fn give(&mut self, e: u32, from: u32, to: u32) {
        let cost = self.placed.experts.costs[e as usize];
        let here = &mut self.experts[from as usize];
        if let Some(place) = here.iter().rposition(|held| *held == e) {
            here.swap_remove(place);
        }
        self.load[from as usize] = if here.is_empty() { 0.0 } else { self.load[from as usize] - cost };
        self.experts[to as usize].push(e);
        self.load[to as usize] += cost;
        self.given.push((e, from, to));
    }

    /// Keeps the loads for [`Self::take_back`].
    fn keep_loads(&mut self) {
        self.given.clear();
        self.load_before.clone_from(&self.load);
        self.ops += self.n() as u64 / 8;
    }

    /// Returns all experts that were given since [`Self::keep_loads`].
    fn take_back(&mut self) {
        while let Some((e, from, to)) = self.given.pop() {
            let there = &mut self.experts[to as usize];
            if let Some(place) = there.iter().rposition(|held| *held == e) {
                there.swap_remove(place);
            }
            self.experts[from as usize].push(e);
        }
        std::mem::swap(&mut self.load, &mut self.load_before);
    }

    /// Device `i` gives experts to those of a group, except `out`, until it holds no more than `most`. Returns false if there is no room.
    fn give_all(&mut self, i: u32, from: (usize, u32), most: usize) -> bool {
        while self.experts[i as usize].len() > most {
            if !self.give_one(i, from, f64::INFINITY) {
                return false;
            }
        }
        true
    }

    /// Device `i` gives its last expert to the device that ends first with it. Returns false where none ends before `latest`.
    fn give_one(&mut self, i: u32, (g, out): (usize, u32), latest: f64) -> bool {
        let Some(&e) = self.experts[i as usize].last() else { return false };
        let cost = self.placed.experts.costs[e as usize];
        let mut first = (latest, None);
        for &j in self.groups[g].iter().filter(|j| **j != i && **j != out) {
            if self.experts[j as usize].len() < self.memory[j as usize] {
                let end = self.end(g, j, self.load[j as usize] + cost);
                if end < first.0 {
                    first = (end, Some(j));
                }
            }
        }
        self.ops += self.groups[g].len() as u64;
        let Some(to) = first.1 else { return false };
        self.give(e, i, to);
        true
    }

    /// Device `i` takes experts of those of a group, except `out`, as long as it ends before the giver did.
    fn take(&mut self, i: u32, (g, out): (usize, u32)) {
        let costs = &self.placed.experts.costs;
        while !self.is_idle(g) && self.experts[i as usize].len() < self.memory[i as usize] {
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
        }
    }

    /// Device `i`, new in a group that `out` leaves, gives away the experts that exceed its memory. With `more` it also gives what others end earlier with, or else
    /// takes experts. Returns false where there is no room.
    fn balance(&mut self, i: u32, from: (usize, u32), more: bool) -> bool {
        if self.is_idle(from.0) {
            return self.experts[i as usize].is_empty();
        }
        if !self.give_all(i, from, self.memory[i as usize]) {
            return false;
        }
        if more {
            let before = self.given.len();
            while self.give_one(i, from, self.end(from.0, i, self.load[i as usize])) {}
            if self.given.len() == before {
                self.take(i, from);
            }
        }
        true
    }
}
