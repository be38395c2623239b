//! Changes of groups and placement.

use super::{Joint, Others, Part, Role, Times, exchange_ms, larger};
use crate::cluster::LinkTable;
use crate::random::Random;

/// So many proposals in four are of the group that takes longest.
const WORST_IN_FOUR: usize = 3;
/// One in so many proposals moves a device to another group.
const JOIN_ONE_IN: usize = 12;
/// Of the others so many in so many are changes of places.
const SWAP_OF: (usize, usize) = (3, 10);
/// One in so many moves of experts is of several at once.
const POUR_ONE_IN: usize = 4;
/// So many devices are looked at for a change of places.
const CANDIDATES: usize = 4;
/// How much of what a device takes in its new place counts beside what it is over the limit there.
const TAKES: f64 = 0.3;
/// One in so many changes of places lets experts go elsewhere, too.
const BALANCE_ONE_IN: usize = 3;
/// Where a change of groups is too much, an expert of each group passes on, up to so many times.
const STEPS: usize = 4;

impl<L: LinkTable> Joint<'_, '_, '_, L> {
    /// Makes a random change, unless the excess would be over `most`.
    pub(super) fn random_change(&mut self, random: &mut Random, most: f64) -> bool {
        let several = self.groups.len() > 1;
        let g = if random.below(4) < WORST_IN_FOUR { self.worst() } else { random.below(self.groups.len()) };
        let members = &self.groups[g];
        // Of two devices the one that exchanges for longer.
        let two = [0; 2].map(|_| members[random.below(members.len())]);
        let i = if self.exchange_ms(g, two[1]) > self.exchange_ms(g, two[0]) { two[1] } else { two[0] };
        if several && random.below(JOIN_ONE_IN) == 0 {
            return self.join(i, random.below(self.groups.len()), most);
        }
        if several && random.below(SWAP_OF.1) < SWAP_OF.0 {
            let Some(j) = self.most_promising(i, g, random) else { return false };
            return self.swap(i, j, random.below(BALANCE_ONE_IN) != 0, most);
        }
        let j = members[random.below(members.len())];
        let (held, other) = (self.experts[i as usize].len(), self.experts[j as usize].len());
        if i == j || held == 0 {
            return false;
        }
        if held > 1 && random.below(POUR_ONE_IN) == 0 {
            return self.pour(i, j, 1 + random.below(held), most);
        }
        let place = random.below(held);
        let uniform = self.placed.experts.uniform.is_some();
        let other = (!uniform && other > 0 && random.below(2) == 0).then(|| random.below(other));
        self.shift((i, place), (j, other), most)
    }

    /// What device `i` would exchange with the members of a group as they are, ms.
    fn exchange_ms(&self, g: usize, i: u32) -> f64 {
        exchange_ms(&self.sums[g * self.n() + i as usize], self.roles[i as usize])
    }

    /// Of some devices of other groups the one that is best to change places with device `i` of group `g`.
    fn most_promising(&mut self, i: u32, g: usize, random: &mut Random) -> Option<u32> {
        self.ops += CANDIDATES as u64 / 2;
        let mut best = (f64::INFINITY, None);
        for _ in 0..CANDIDATES {
            let j = random.below(self.n()) as u32;
            let Some(h) = self.group(j).filter(|h| *h != g) else { continue };
            let loss = self.loss(i, (h, j)) + self.loss(j, (g, i));
            if loss < best.0 {
                best = (loss, Some(j));
            }
        }
        best.1
    }

    /// How bad device `x` is in the place of `out` of a group, with the experts of that, ms: what it is over the limit, and some of what it takes.
    fn loss(&self, x: u32, (g, out): (usize, u32)) -> f64 {
        let (n, at, role) = (self.n(), out as usize * self.n() + x as usize, self.roles[out as usize]);
        let (mut sums, to, from) = (self.sums[g * n + x as usize], self.pairs.to[at], self.pairs.from[at]);
        if role.holds {
            sums[0] -= to[0];
            sums[1] -= to[1] * role.load;
        }
        sums[2] -= from[0];
        sums[3] -= from[1];
        let exchange = exchange_ms(&sums, role);
        let compute = self.groups[g].len() as f64 * role.load / self.placed.problem.flops[x as usize];
        larger(larger(self.times[g].compute, compute) + exchange - self.limit, 0.0) + TAKES * (compute + exchange)
    }

    /// Two devices of different groups change places, each taking the other's experts, and, where they are not to be `kept` or do not fit, some of them
    /// to others or from others; where that is too much, but not by far, experts pass on. Unless the excess would be over `most`.
    fn swap(&mut self, i: u32, j: u32, kept: bool, most: f64) -> bool {
        let (Some(g), Some(h)) = (self.group(i), self.group(j)) else { return false };
        let Some(others) = self.hopeful((i, g, h), Some(j), most) else { return false };
        self.follow((i, g, h), Some(j), others, most, |joint| {
            joint.exchange_experts(i, j);
            joint.balance(j, (g, i), kept) && joint.balance(i, (h, j), kept)
        })
    }

    /// Device `i` goes from group `g` to group `h`, and `back` from there to `g`, each with what experts it has when they are `dealt`; where that is too
    /// much, but not by far, experts pass on. Unless the excess would be over `most`, or they cannot be dealt.
    fn follow(
        &mut self,
        (i, g, h): (u32, usize, usize),
        back: Option<u32>,
        others: Others,
        most: f64,
        dealt: impl FnOnce(&mut Self) -> bool,
    ) -> bool {
        let room = most + self.slack * self.limit * (self.groups[g].len() + self.groups[h].len()) as f64;
        self.save_loads();
        self.given.clear();
        let changed = dealt(self) && self.changed((i, g, h), back, others, room);
        let mut open = [g, h].map(|_| changed);
        for _ in 0..STEPS {
            for (open, k) in open.iter_mut().zip([g, h]) {
                *open = *open && self.excess > most && self.pass_on(k);
            }
        }
        let good = changed && self.excess <= most;
        if !good {
            self.take_back();
            back.into_iter().for_each(|j| self.experts.swap(i as usize, j as usize));
            if changed {
                self.move_to(i, g);
                back.into_iter().for_each(|j| self.move_to(j, h));
                self.restore([g, h]);
            }
            self.restore_loads();
        }
        good
    }

    fn exchange_experts(&mut self, i: u32, j: u32) {
        self.experts.swap(i as usize, j as usize);
        self.load.swap(i as usize, j as usize);
    }

    /// Device `i` goes to group `h`: those that stay take its experts, and those there give it some; unless the excess would be over `most`. If that is
    /// its own group, it gives all experts to the others, or takes some where it has none.
    fn join(&mut self, i: u32, h: usize, most: f64) -> bool {
        let Some(g) = self.group(i).filter(|g| self.groups[*g].len() > 1) else { return false };
        let Some(others) = self.hopeful((i, g, h), None, most) else { return false };
        let takes = g != h || self.experts[i as usize].is_empty();
        self.follow((i, g, h), None, others, most, |joint| {
            let dealt = joint.give_away(i, (g, i), 0);
            if takes {
                joint.take(i, (h, i));
            }
            dealt
        })
    }

    /// The expert at `place` of device `i`'s goes to `j` of the same group, for that at `other` of `j`'s if there is one, unless the excess would be
    /// over `most`.
    fn shift(&mut self, (i, place): (u32, usize), (j, other): (u32, Option<usize>), most: f64) -> bool {
        let Some(g) = self.group(i) else { return false };
        let costs = &self.placed.experts.costs;
        let e = self.experts[i as usize][place];
        let f = other.map(|other| self.experts[j as usize][other]);
        let (held, there) = (self.experts[i as usize].len(), self.experts[j as usize].len());
        if f.is_none() && there >= self.memory(j) {
            return false;
        }
        let moved = costs[e as usize] - f.map_or(0.0, |f| costs[f as usize]);
        if f.is_some() && moved == 0.0 {
            return false;
        }
        let one = usize::from(f.is_none());
        let parts = [self.loaded(i, -moved, held - one), self.loaded(j, moved, there + one)];
        if !self.change_one(g, &parts, most) {
            return false;
        }
        self.give(e, i, j);
        f.into_iter().for_each(|f| self.give(f, j, i));
        self.settle(i as usize);
        self.settle(j as usize);
        true
    }

    /// Device `i` gives `j` of the same group its last `count` experts, unless the excess would be over `most`.
    fn pour(&mut self, i: u32, j: u32, count: usize, most: f64) -> bool {
        let Some(g) = self.group(i) else { return false };
        let costs = &self.placed.experts.costs;
        let (held, there) = (self.experts[i as usize].len(), self.experts[j as usize].len());
        if there + count > self.memory(j) {
            return false;
        }
        let moved: f64 = self.experts[i as usize][held - count..].iter().map(|&e| costs[e as usize]).sum();
        let parts = [self.loaded(i, -moved, held - count), self.loaded(j, moved, there + count)];
        if !self.change_one(g, &parts, most) {
            return false;
        }
        while self.experts[i as usize].len() > held - count
            && let Some(&e) = self.experts[i as usize].last()
        {
            self.give(e, i, j);
        }
        self.settle(i as usize);
        self.settle(j as usize);
        true
    }

    /// Device `i` where it is, with `more` FLOP, in so many experts.
    pub(super) fn loaded(&self, i: u32, more: f64, experts: usize) -> Part {
        let before = self.roles[i as usize];
        let load = if experts > 0 { before.load + more } else { 0.0 };
        Part::new(i as usize, before, Role { member: true, holds: experts > 0, load })
    }

    /// Where these devices change between two groups: the slowest link then, the limit, and the excess of all other groups.
    fn others(&mut self, g: usize, h: usize, i: u32, back: Option<u32>) -> Others {
        let to = |x: u32| match x {
            _ if x == i => h as u32,
            _ if Some(x) == back => g as u32,
            _ => self.group_of[x as usize],
        };
        let slowest = self.placed.problem.slowest_after(self.slowest, [Some(i), back], to);
        self.ops += slowest.unwrap_or(0) as u64 / 2;
        if slowest == self.slowest {
            let excess = self.excess - self.times[g].over - self.times[h].over;
            return Others { slowest, limit: self.limit, excess };
        }
        let limit = self.limit_of(slowest);
        self.ops += self.n() as u64;
        let others = (0..self.groups.len()).filter(|&k| k != g && k != h);
        Others { slowest, limit, excess: others.map(|k| self.group_times(k, limit).over).sum() }
    }

    /// Whether device `i` may go from group `g` to group `h`, and `back` from there to `g`, with an excess of at most `most`: what it sends there, to
    /// experts where they are now, and experts as if they could be cut, leave that open.
    fn hopeful(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, most: f64) -> Option<Others> {
        if g == h {
            return Some(Others { slowest: self.slowest, limit: self.limit, excess: 0.0 });
        }
        let others = self.others(g, h, i, back);
        let (n, flops) = (self.n(), &self.placed.problem.flops);
        let mut excess = others.excess;
        for (into, to, out) in [(Some(i), h, back), (back, g, Some(i))] {
            let flops_of = |i: Option<u32>| i.map_or(0.0, |i| flops[i as usize]);
            let rate = self.rates[to] + flops_of(into) - flops_of(out);
            let size = (self.groups[to].len() + usize::from(into.is_some()) - usize::from(out.is_some())) as f64;
            let sent = into.map_or(0.0, |into| {
                let sums = &self.sums[to * n + into as usize];
                let to_out = out.map_or(0.0, |out| {
                    let (links, role) = (self.pairs.to[out as usize * n + into as usize], self.roles[out as usize]);
                    if role.holds { links[0] + links[1] * role.load } else { 0.0 }
                });
                sums[0] + sums[1] - to_out
            });
            let compute = size * self.placed.experts.total / rate;
            excess += (compute + sent - others.limit).max(0.0) + (size - 1.0) * (compute - others.limit).max(0.0);
        }
        self.ops += 4;
        (excess <= most).then_some(others)
    }

    /// Device `i` goes from group `g` to group `h`, and `back` from there to `g`; they and others hold what they are to hold, of which the sums know
    /// nothing yet. Or nothing of the sort, and false, where the excess would be over `most`.
    fn changed(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, others: Others, most: f64) -> bool {
        let [mut into_g, mut into_h] = std::mem::take(&mut self.parts);
        into_g.clear();
        into_h.clear();
        let none = Role::default();
        let of = |j: u32| (j as usize, self.roles[j as usize], self.role(j as usize));
        let stay = |k: usize, into: &mut Vec<Part>| {
            let all = self.groups[k].iter().filter(|j| g == h || (**j != i && Some(**j) != back)).map(|&j| of(j));
            let changing = all.filter(|(_, before, after)| before != after);
            into.extend(changing.map(|(j, before, after)| Part::new(j, before, after)));
        };
        if g != h {
            let (joins, leaves) = (
                |j: u32| Part::new(j as usize, none, self.role(j as usize)),
                |j: u32| Part::new(j as usize, self.roles[j as usize], none),
            );
            into_h.push(joins(i));
            into_h.extend(back.map(leaves));
            into_g.extend(back.map(joins));
            into_g.push(leaves(i));
            stay(g, &mut into_g);
        }
        stay(h, &mut into_h);
        let changed = match (g == h, back) {
            (true, _) => {
                let times = self.after_one(g, &into_h, most);
                if let Some(times) = times {
                    self.save([g, h]);
                    self.put(g, &into_h, times);
                }
                times.is_some()
            }
            (false, None) => self.change_two((g, &into_g), (h, &into_h), &[(i, h)], others, most),
            (false, Some(j)) => self.change_two((g, &into_g), (h, &into_h), &[(i, h), (j, g)], others, most),
        };
        if changed {
            for part in into_g.iter().chain(&into_h).filter(|part| part.after.member) {
                self.settle(part.device);
            }
        }
        self.parts = [into_g, into_h];
        changed
    }

    /// What group `g` takes after a change inside it, unless the excess would be over `most`.
    fn after_one(&mut self, g: usize, parts: &[Part], most: f64) -> Option<Times> {
        self.after(g, parts, self.limit, most - self.excess + self.times[g].over)
    }

    /// A change inside group `g`, as far as sums and times go, unless the excess would be over `most`.
    fn change_one(&mut self, g: usize, parts: &[Part], most: f64) -> bool {
        let Some(times) = self.after_one(g, parts, most) else { return false };
        self.put(g, parts, times);
        true
    }

    /// Enters a change inside group `g`, which takes `times` then.
    pub(super) fn put(&mut self, g: usize, parts: &[Part], times: Times) {
        self.enter(g, parts);
        self.times[g] = times;
        self.excess = self.times.iter().map(|times| times.over).sum();
    }

    /// The same in two groups, between which these devices move; what was before is kept.
    fn change_two(
        &mut self,
        (g, from_g): (usize, &[Part]),
        (h, into_h): (usize, &[Part]),
        moved: &[(u32, usize)],
        Others { slowest, limit, excess }: Others,
        most: f64,
    ) -> bool {
        let Some(there) = self.after(h, into_h, limit, most - excess) else { return false };
        let Some(here) = self.after(g, from_g, limit, most - excess - there.over) else { return false };
        self.save([g, h]);
        self.enter(h, into_h);
        self.enter(g, from_g);
        for &(i, to) in moved {
            let (from, flops) = (self.group_of[i as usize] as usize, self.placed.problem.flops[i as usize]);
            self.rates[from] -= flops;
            self.rates[to] += flops;
            self.move_to(i, to);
        }
        (self.times[g], self.times[h], self.slowest) = (here, there, slowest);
        if limit != self.limit {
            self.limit = limit;
            for k in (0..self.groups.len()).filter(|&k| k != g && k != h) {
                self.times[k] = self.group_times(k, limit);
            }
        }
        self.excess = self.times.iter().map(|times| times.over).sum();
        true
    }

    /// Device `i` is a member of group `to`.
    fn move_to(&mut self, i: u32, to: usize) {
        let from = &mut self.groups[self.group_of[i as usize] as usize];
        if let Some(place) = from.iter().position(|&j| j == i) {
            from.swap_remove(place);
        }
        self.groups[to].push(i);
        self.group_of[i as usize] = to as u32;
    }
}
