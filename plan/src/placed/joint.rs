//! Groups and placement improved together: two devices of different groups change places, each taking the other's experts; a device goes to another
//! group, where others give it experts, and leaves its own to those that stay; or experts move inside a group. The objective is exact.
//!
//! For every group and every device, of the group or not, the sums of its links with the members are kept, so that what a device comes to in another
//! group takes no pass over that group. It is most often too much, and then nothing else is looked at.

mod give;

use super::Placed;
use super::search::FoundPlaced;
use crate::cluster::{Link, LinkTable};
use crate::objective::IDLE;
use crate::random::Random;
use crate::search::EXPONENTIAL;

/// The target is under the best objective so far, by so much of its work.
const UNDER: f64 = 0.02;
/// Temperatures at first and at last, as shares of what the target leaves for a group.
const HOT: f64 = 0.2;
const COLD: f64 = 0.002;
/// One in so many proposals moves a device to another group.
const JOIN_ONE_IN: usize = 8;
/// Sums are added up anew after so many changes, as each change rounds them.
const REFRESH: u64 = 4096;

/// What one group takes, ms.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// The longest compute.
    compute: f64,
    /// eta times the longest exchange.
    longest: f64,
    /// What its devices are over the limit, all together.
    over: f64,
}

/// The links of a device with others of a group, added up.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// ms that it sends to those that hold experts.
    sent: f64,
    /// The links to it.
    from: Link,
}

/// The two links of a pair of devices.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    to: Link,
    from: Link,
}

/// What a device is to a group, before and after a change.
#[derive(Clone, Copy, Debug)]
struct Part {
    device: u32,
    /// Whether it is in the group.
    before: bool,
    after: bool,
    /// FLOP of its experts after the change.
    load: f64,
    /// MB that each other member sends for its experts; `None` without.
    mb_before: Option<f64>,
    mb_after: Option<f64>,
}

impl Part {
    /// By how much it changes the sums of the device that it has these links with.
    fn add(&self, sums: &mut Sums, pair: Pair) {
        let time = |mb: Option<f64>| mb.map_or(0.0, |mb| pair.to.time_ms(mb));
        sums.sent += time(self.mb_after) - time(self.mb_before);
        let more = f64::from(i8::from(self.after) - i8::from(self.before));
        sums.from.alpha_ms += more * pair.from.alpha_ms;
        sums.from.beta_ms_per_mb += more * pair.from.beta_ms_per_mb;
    }
}

/// What a change between two groups means to all others.
#[derive(Clone, Copy, Debug)]
struct Others {
    slowest: Option<usize>,
    limit: f64,
    /// Of the other groups.
    excess: f64,
}

struct Joint<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    groups: Vec<Vec<u32>>,
    group_of: Vec<u32>,
    /// Of devices c and x at c n + x: the link to c from x, and the one from c to x; none of a device with itself.
    pairs: Vec<Pair>,
    /// By device: its experts, and their FLOP.
    experts: Vec<Vec<u32>>,
    load: Vec<f64>,
    /// By device: how long it computes for one device's tokens, ms.
    ends: Vec<f64>,
    /// By device: MB that each other device of its group sends for its experts; `None` without.
    mb: Vec<Option<f64>>,
    /// Of group g and device x at g n + x.
    sums: Vec<Sums>,
    times: Vec<Times>,
    /// FLOP per ms of each group.
    rates: Vec<f64>,
    excess: f64,
    slowest: Option<usize>,
    target_ms: f64,
    limit: f64,
    changes: u64,
    ops: u64,
}

impl<'s, 'p, 'a, L: LinkTable> Joint<'s, 'p, 'a, L> {
    fn new(placed: &'s Placed<'p, 'a, L>, found: &FoundPlaced) -> Self {
        let n = placed.problem.n();
        let links = &placed.problem.links;
        let pair = |at: usize| match (at / n, at % n) {
            (c, x) if c == x => Pair::default(),
            (c, x) => Pair { to: links.link(x, c), from: links.link(c, x) },
        };
        let mut joint = Joint {
            placed,
            groups: found.groups.clone(),
            group_of: vec![IDLE; n],
            pairs: (0..n * n).map(pair).collect(),
            experts: vec![Vec::new(); n],
            load: vec![0.0; n],
            ends: vec![0.0; n],
            mb: vec![None; n],
            sums: Vec::new(),
            times: vec![Times::default(); found.groups.len()],
            rates: Vec::new(),
            excess: 0.0,
            slowest: None,
            target_ms: 0.0,
            limit: f64::INFINITY,
            changes: 0,
            ops: (n * n) as u64,
        };
        for (g, (members, placement)) in found.groups.iter().zip(&found.placements).enumerate() {
            for (&i, held) in members.iter().zip(placement) {
                joint.group_of[i as usize] = g as u32;
                joint.experts[i as usize] = held.clone();
                joint.weigh_device(i);
                joint.mb[i as usize] = joint.received_mb(joint.load[i as usize], held.len());
            }
        }
        joint.slowest = placed.problem.slowest(|i| joint.group_of[i as usize]);
        joint.refresh();
        joint.aim();
        joint
    }

    fn n(&self) -> usize {
        self.group_of.len()
    }

    /// MB that each other device of a group sends to one with so many experts.
    fn received_mb(&self, load: f64, experts: usize) -> Option<f64> {
        (experts > 0).then(|| self.placed.received_mb(load))
    }

    /// Adds up the experts of device `i`.
    fn weigh_device(&mut self, i: u32) {
        let i = i as usize;
        self.load[i] = self.placed.load(&self.experts[i]);
        self.ops += self.experts[i].len() as u64 / 4;
        self.ends[i] = self.load[i] / self.placed.problem.flops[i];
    }

    /// Adds up everything anew.
    fn refresh(&mut self) {
        let n = self.n();
        let flops = &self.placed.problem.flops;
        self.rates = self.groups.iter().map(|members| members.iter().map(|&i| flops[i as usize]).sum()).collect();
        self.sums = vec![Sums::default(); self.groups.len() * n];
        for (members, sums) in self.groups.iter().zip(self.sums.chunks_mut(n)) {
            for &i in members {
                let load = self.load[i as usize];
                let part = Part {
                    device: i,
                    before: false,
                    after: true,
                    load,
                    mb_before: None,
                    mb_after: self.mb[i as usize],
                };
                let pairs = &self.pairs[i as usize * n..][..n];
                sums.iter_mut().zip(pairs).for_each(|(sums, pair)| part.add(sums, *pair));
            }
        }
        self.ops += (n * n) as u64;
        self.weigh(self.limit);
    }

    /// What every group takes, under this limit.
    fn weigh(&mut self, limit: f64) {
        self.limit = limit;
        for g in 0..self.groups.len() {
            self.times[g] = self.group_times(g, limit);
        }
        self.excess = self.times.iter().map(|times| times.over).sum();
        self.ops += self.n() as u64;
    }

    fn group_times(&self, g: usize, limit: f64) -> Times {
        let members = &self.groups[g];
        let compute = members.len() as f64 * members.iter().map(|&i| self.ends[i as usize]).fold(0.0, f64::max);
        let mut times = Times { compute, ..Times::default() };
        for &i in members {
            self.exchange(&mut times, self.sums[g * self.n() + i as usize], self.mb[i as usize], limit);
        }
        times
    }

    /// Counts in what one device of a group exchanges.
    fn exchange(&self, times: &mut Times, sums: Sums, mb: Option<f64>, limit: f64) {
        let received = mb.map_or(0.0, |mb| sums.from.time_ms(mb));
        let ms = self.placed.problem.workload.p2p_frequency * sums.sent.max(received);
        times.longest = times.longest.max(ms);
        times.over += (times.compute + ms - limit).max(0.0);
    }

    /// What group `g` takes after a change; `None` as soon as it is seen to be over the limit by more than `most`.
    fn after(&mut self, g: usize, parts: &[Part], limit: f64, most: f64) -> Option<Times> {
        let n = self.n();
        let here = || parts.iter().filter(|part| part.after);
        let left = parts.iter().filter(|part| part.before).count();
        let size = (self.groups[g].len() + here().count() - left) as f64;
        let flops = &self.placed.problem.flops;
        let own = here().map(|part| part.load / flops[part.device as usize]).fold(0.0, f64::max);
        let sums = |i: u32| {
            let mut sums = self.sums[g * n + i as usize];
            parts.iter().for_each(|part| part.add(&mut sums, self.pairs[part.device as usize * n + i as usize]));
            sums
        };
        // Those that change are most often too much already.
        let mut changed = Times { compute: size * own, ..Times::default() };
        here().for_each(|part| self.exchange(&mut changed, sums(part.device), part.mb_after, limit));
        let mut seen = parts.len() * parts.len();
        if changed.over > most {
            self.ops += seen as u64;
            return None;
        }
        let others = || self.groups[g].iter().filter(|i| parts.iter().all(|part| part.device != **i));
        let compute = size * others().map(|&i| self.ends[i as usize]).fold(own, f64::max);
        let mut times = Times { compute, ..Times::default() };
        if compute > changed.compute {
            here().for_each(|part| self.exchange(&mut times, sums(part.device), part.mb_after, limit));
        } else {
            times = changed;
        }
        if times.over + (size - parts.len() as f64) * (compute - limit) <= most {
            for &i in others() {
                self.exchange(&mut times, sums(i), self.mb[i as usize], limit);
                seen += parts.len();
                if times.over > most {
                    break;
                }
            }
        } else {
            times.over = f64::INFINITY;
        }
        self.ops += seen as u64 + size as u64 / 4;
        (times.over <= most).then_some(times)
    }

    /// Enters a change into the sums of group `g`.
    fn enter(&mut self, g: usize, parts: &[Part]) {
        let n = self.n();
        for part in parts {
            let pairs = &self.pairs[part.device as usize * n..][..n];
            let sums = &mut self.sums[g * n..][..n];
            sums.iter_mut().zip(pairs).for_each(|(sums, pair)| part.add(sums, *pair));
        }
        self.ops += (parts.len() * n) as u64;
    }

    fn all_reduce(&self, slowest: Option<usize>) -> f64 {
        let problem = self.placed.problem;
        slowest.map_or(0.0, |place| problem.all_reduce(self.groups.len(), problem.edges[place].link))
    }

    fn workers(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }

    fn limit_of(&self, slowest: Option<usize>) -> f64 {
        (self.target_ms - self.all_reduce(slowest)) / self.placed.problem.gamma(self.workers())
    }

    fn worst_ms(&self) -> f64 {
        self.times.iter().map(|times| times.compute + times.longest).fold(0.0, f64::max)
    }

    fn objective_ms(&self) -> f64 {
        self.placed.problem.gamma(self.workers()) * self.worst_ms() + self.all_reduce(self.slowest)
    }

    /// Aims a little below what it is.
    fn aim(&mut self) {
        let work = self.placed.problem.gamma(self.workers()) * self.worst_ms();
        self.target_ms = work * (1.0 - UNDER) + self.all_reduce(self.slowest);
        self.weigh(self.limit_of(self.slowest));
    }

    /// The group that takes longest.
    fn worst(&self) -> usize {
        let ms = |g: usize| self.times[g].compute + self.times[g].longest;
        (0..self.times.len()).fold(0, |worst, g| if ms(g) > ms(worst) { g } else { worst })
    }

    /// Where these devices change between two groups: the slowest link then, the limit, and the excess of all other groups.
    fn others(&mut self, g: usize, h: usize, moved: &[(u32, usize)]) -> Others {
        let to = |x: u32| moved.iter().find(|(i, _)| *i == x).map_or(self.group_of[x as usize], |(_, to)| *to as u32);
        let slowest = self.placed.problem.slowest(to);
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

    /// Two devices change places, each taking the other's experts, and, where they are not to be `kept` or do not fit, some of them to others or from
    /// others; unless the excess would be over `most`.
    fn swap(&mut self, i: u32, j: u32, kept: bool, most: f64) -> bool {
        let (g, h) = (self.group_of[i as usize], self.group_of[j as usize]);
        if i == j || g == IDLE || h == IDLE {
            return false;
        }
        let (g, h) = (g as usize, h as usize);
        let Some(others) = self.hopeful((i, g, h), Some(j), most) else { return false };
        let mut given = Vec::new();
        self.exchange_experts(i, j);
        let balanced = self.balance(j, (g, i), kept, &mut given) && self.balance(i, (h, j), kept, &mut given);
        let changed = balanced && self.changed((i, g, h), Some(j), others, most);
        if !changed {
            given.into_iter().rev().for_each(|(e, from, to)| self.give(e, to, from));
            self.exchange_experts(i, j);
        }
        changed
    }

    fn exchange_experts(&mut self, i: u32, j: u32) {
        self.experts.swap(i as usize, j as usize);
        self.weigh_device(i);
        self.weigh_device(j);
    }

    /// Whether device `i` may go from group `g` to group `h`, and `back` from there to `g`, with an excess of at most `most`: what it sends there, to
    /// experts where they are now, and experts as if they could be cut, leave that open.
    fn hopeful(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, most: f64) -> Option<Others> {
        if g == h {
            return Some(Others { slowest: self.slowest, limit: self.limit, excess: 0.0 });
        }
        let moved = [(i, h), (back.unwrap_or(i), if back.is_some() { g } else { h })];
        let others = self.others(g, h, &moved);
        let problem = self.placed.problem;
        let (n, eta, flops) = (self.n(), problem.workload.p2p_frequency, &problem.flops);
        let mut excess = others.excess;
        for (into, to, out) in [(Some(i), h, back), (back, g, Some(i))] {
            let flops_of = |i: Option<u32>| i.map_or(0.0, |i| flops[i as usize]);
            let rate = self.rates[to] + flops_of(into) - flops_of(out);
            let size = (self.groups[to].len() + usize::from(into.is_some()) - usize::from(out.is_some())) as f64;
            let sent = into.map_or(0.0, |into| {
                let to_out = out.and_then(|out| {
                    Some(self.pairs[out as usize * n + into as usize].to.time_ms(self.mb[out as usize]?))
                });
                self.sums[to * n + into as usize].sent - to_out.unwrap_or(0.0)
            });
            let compute = size * self.placed.experts.total / rate;
            excess += (compute + eta * sent - others.limit).max(0.0) + (size - 1.0) * (compute - others.limit).max(0.0);
        }
        self.ops += 4;
        (excess <= most).then_some(others)
    }

    /// Device `i` goes from group `g` to group `h`, and `back` from there to `g`; they and others hold what they are to hold, of which the sums know
    /// nothing yet. Or nothing of the sort, and false, where the excess would be over `most`.
    fn changed(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, others: Others, most: f64) -> bool {
        let after = |j: u32| {
            let (load, mb_before) = (self.load[j as usize], self.mb[j as usize]);
            let mb_after = self.received_mb(load, self.experts[j as usize].len());
            Part { device: j, before: true, after: true, load, mb_before, mb_after }
        };
        let joins = |j: u32| Part { before: false, mb_before: None, ..after(j) };
        let leaves = |j: u32| Part { after: false, load: 0.0, mb_after: None, ..after(j) };
        let stay = |g: usize| {
            let all =
                self.groups[g].iter().filter(move |j| g == h || (**j != i && Some(**j) != back)).map(|&j| after(j));
            all.filter(|part| part.mb_before != part.mb_after)
        };
        let mut into_h: Vec<Part> = Vec::new();
        let mut into_g: Vec<Part> = Vec::new();
        let mut moved = Vec::new();
        if g != h {
            into_h.push(joins(i));
            into_h.extend(back.map(leaves));
            into_g.extend(back.map(joins));
            into_g.push(leaves(i));
            into_g.extend(stay(g));
            moved.push((i, h));
            moved.extend(back.map(|j| (j, g)));
        }
        into_h.extend(stay(h));
        let changed = match g == h {
            true => self.change_one(g, &into_h, most),
            false => self.change_two((g, &into_g), (h, &into_h), &moved, others, most),
        };
        if changed {
            for part in into_g.iter().chain(&into_h).filter(|part| part.after) {
                self.mb[part.device as usize] = part.mb_after;
            }
        }
        changed
    }

    /// A change inside group `g`, as far as sums and times go, unless the excess would be over `most`.
    fn change_one(&mut self, g: usize, parts: &[Part], most: f64) -> bool {
        let room = most - self.excess + self.times[g].over;
        let Some(times) = self.after(g, parts, self.limit, room) else { return false };
        self.enter(g, parts);
        self.times[g] = times;
        self.excess = self.times.iter().map(|times| times.over).sum();
        true
    }

    /// The same in two groups, between which these devices move.
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
        self.enter(h, into_h);
        self.enter(g, from_g);
        for &(i, to) in moved {
            let (from, flops) = (self.group_of[i as usize] as usize, self.placed.problem.flops[i as usize]);
            self.rates[from] -= flops;
            self.rates[to] += flops;
            self.groups[from].retain(|&j| j != i);
            self.groups[to].push(i);
            self.group_of[i as usize] = to as u32;
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

    /// Device `i` goes to group `h`: those that stay take its experts, and those there give it some; unless the excess would be over `most`. If that is
    /// its own group, it gives all experts to the others, or takes some where it has none.
    fn join(&mut self, i: u32, h: usize, most: f64) -> bool {
        let g = self.group_of[i as usize];
        if g == IDLE || self.groups[g as usize].len() == 1 {
            return false;
        }
        let g = g as usize;
        let Some(others) = self.hopeful((i, g, h), None, most) else { return false };
        let takes = g != h || self.experts[i as usize].is_empty();
        let mut given = Vec::new();
        let dealt = self.give_away(i, (g, i), 0, &mut given);
        if takes {
            self.take(i, (h, i), &mut given);
        }
        let changed = dealt && self.changed((i, g, h), None, others, most);
        if !changed {
            given.into_iter().rev().for_each(|(e, from, to)| self.give(e, to, from));
        }
        changed
    }

    /// The expert at `place` of device `i`'s goes to `j` of the same group, for that at `other` of `j`'s if there is one, unless the excess would be
    /// over `most`.
    fn shift(&mut self, (i, place): (u32, usize), (j, other): (u32, Option<usize>), most: f64) -> bool {
        let g = self.group_of[i as usize] as usize;
        let costs = &self.placed.experts.costs;
        let e = self.experts[i as usize][place];
        let f = other.map(|other| self.experts[j as usize][other]);
        let (held, there) = (self.experts[i as usize].len(), self.experts[j as usize].len());
        if f.is_none() && there as u64 >= self.placed.problem.memory[j as usize] {
            return false;
        }
        let moved = costs[e as usize] - f.map_or(0.0, |f| costs[f as usize]);
        if f.is_some() && moved == 0.0 {
            return false;
        }
        let part = |i: u32, more: f64, experts: usize| {
            let load = if experts > 0 { self.load[i as usize] + more } else { 0.0 };
            let (mb_before, mb_after) = (self.mb[i as usize], self.received_mb(load, experts));
            Part { device: i, before: true, after: true, load, mb_before, mb_after }
        };
        let one = usize::from(f.is_none());
        let parts = [part(i, -moved, held - one), part(j, moved, there + one)];
        if !self.change_one(g, &parts, most) {
            return false;
        }
        self.give(e, i, j);
        f.into_iter().for_each(|f| self.give(f, j, i));
        for part in parts {
            self.mb[part.device as usize] = part.mb_after;
        }
        true
    }

    fn found(&self) -> FoundPlaced {
        let groups: Vec<Vec<u32>> = self.groups.iter().map(|members| sorted(members)).collect();
        let held = |members: &Vec<u32>| members.iter().map(|&i| sorted(&self.experts[i as usize])).collect();
        let placements: Vec<Vec<Vec<u32>>> = groups.iter().map(held).collect();
        FoundPlaced::new(self.placed, groups, placements)
    }
}

fn sorted(list: &[u32]) -> Vec<u32> {
    let mut list = list.to_vec();
    list.sort_unstable();
    list
}

impl FoundPlaced {
    /// The best that annealing from here, in about `budget` links looked at, comes by.
    pub fn improved<L: LinkTable>(
        self,
        placed: &Placed<L>,
        exponential: &[f64],
        budget: u64,
        random: &mut Random,
    ) -> FoundPlaced {
        let mut joint = Joint::new(placed, &self);
        let unit = joint.limit;
        let mut best = self;
        let (mut temperature, mut steps) = (0.0, 0u64);
        let uniform = placed.experts.uniform.is_some();
        while joint.ops < budget {
            if steps.is_multiple_of(64) {
                let progress = joint.ops as f64 / budget as f64;
                temperature = unit * HOT * (COLD / HOT).powf(progress);
            }
            steps += 1;
            joint.ops += 16;
            let most = joint.excess + temperature * exponential[random.below(EXPONENTIAL)];
            let g = if random.below(2) == 0 { joint.worst() } else { random.below(joint.groups.len()) };
            let members = &joint.groups[g];
            let i = members[random.below(members.len())];
            let several = joint.groups.len() > 1;
            let changed = if several && random.below(JOIN_ONE_IN) == 0 {
                joint.join(i, random.below(joint.groups.len()), most)
            } else if several && random.below(2) == 0 {
                joint.swap(i, random.below(placed.problem.n()) as u32, random.below(2) == 0, most)
            } else {
                let j = members[random.below(members.len())];
                let (held, other) = (joint.experts[i as usize].len(), joint.experts[j as usize].len());
                if i == j || held == 0 {
                    continue;
                }
                let place = random.below(held);
                let other = (!uniform && other > 0 && random.below(2) == 0).then(|| random.below(other));
                joint.shift((i, place), (j, other), most)
            };
            joint.changes += u64::from(changed);
            if changed && joint.changes.is_multiple_of(REFRESH) {
                joint.refresh();
            }
            if changed && joint.objective_ms() < best.objective_ms * (1.0 - 1e-12) {
                let found = joint.found();
                if found.objective_ms < best.objective_ms {
                    best = found;
                    joint.aim();
                }
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Links, Tier, Tiers};
    use crate::objective::Problem;
    use crate::search::exponential;

    #[test]
    fn a_device_goes_to_another_group_and_experts_are_kept() {
        let link = Link { alpha_ms: 0.01, beta_ms_per_mb: 0.01 };
        let links = Links::Tiers(Tiers::new(4, vec![Tier { size: 4, link }]).unwrap());
        let devices = (0..4).map(|id| Device::new(id, "a", 1e9, 4)).collect();
        let (cluster, workload) = (Cluster::new(devices, links), Workload::new(vec![1e9; 4]));
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        // Three devices take 3 * 2 ms for what two take 2 * 2 ms for; no change of places makes the groups alike.
        let placements = vec![vec![vec![0, 1], vec![2], vec![3]], vec![vec![0, 1, 2, 3]]];
        let start = FoundPlaced::new(&placed, vec![vec![0, 1, 2], vec![3]], placements);
        let found = start.clone().improved(&placed, &exponential(), 100_000, &mut Random(1));
        assert!(found.objective_ms < 0.7 * start.objective_ms, "{} {}", found.objective_ms, start.objective_ms);
        assert_eq!(found.groups.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        for placement in &found.placements {
            assert_eq!(sorted(&placement.concat()), [0, 1, 2, 3]);
        }
    }
}
