//! Groups and placement improved together: two devices of different groups change places, each taking the other's experts, or experts move inside a
//! group. Shares stay as they are but for what moves, so a change costs a pass over the devices of its groups, and the objective is exact.

use super::Placed;
use super::search::FoundPlaced;
use crate::cluster::{Link, LinkTable};
use crate::objective::IDLE;
use crate::random::Random;
use crate::search::EXPONENTIAL;

/// The target is under the best objective so far, by so much of its work.
const UNDER: f64 = 0.02;
/// Temperatures at first and at last, as shares of what the target leaves for a group.
const HOT: f64 = 0.03;
const COLD: f64 = 0.002;
/// What sums are kept of is added up anew after so many changes.
const REFRESH: u64 = 512;

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

/// Adds up what a group takes.
struct Sum {
    eta: f64,
    limit: f64,
    compute: f64,
    times: Times,
}

impl Sum {
    fn device(&mut self, sent: f64, received: f64) {
        let ms = self.eta * sent.max(received);
        self.times.longest = self.times.longest.max(ms);
        self.times.over += (self.compute + ms - self.limit).max(0.0);
    }
}

struct Joint<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    groups: Vec<Vec<u32>>,
    group_of: Vec<u32>,
    /// By device: its experts, their FLOP, the MB that each other device sends for them, or `None` without experts.
    experts: Vec<Vec<u32>>,
    load: Vec<f64>,
    mb: Vec<Option<f64>>,
    /// By device: what it sends, and the sums of the links to it from the others of its group.
    sent: Vec<f64>,
    from: Vec<Link>,
    times: Vec<Times>,
    slowest: Option<usize>,
    target_ms: f64,
    limit: f64,
    changes: u64,
    ops: u64,
}

impl<'s, 'p, 'a, L: LinkTable> Joint<'s, 'p, 'a, L> {
    fn new(placed: &'s Placed<'p, 'a, L>, found: &FoundPlaced) -> Self {
        let n = placed.problem.n();
        let mut joint = Joint {
            placed,
            groups: found.groups.clone(),
            group_of: vec![IDLE; n],
            experts: vec![Vec::new(); n],
            load: vec![0.0; n],
            mb: vec![None; n],
            sent: vec![0.0; n],
            from: vec![Link::default(); n],
            times: vec![Times::default(); found.groups.len()],
            slowest: None,
            target_ms: 0.0,
            limit: f64::INFINITY,
            changes: 0,
            ops: 0,
        };
        for (g, (members, placement)) in found.groups.iter().zip(&found.placements).enumerate() {
            for (&i, held) in members.iter().zip(placement) {
                joint.group_of[i as usize] = g as u32;
                joint.experts[i as usize] = held.clone();
            }
        }
        joint.slowest = placed.problem.slowest(|i| joint.group_of[i as usize]);
        (0..n).for_each(|i| joint.weigh(i));
        (0..joint.groups.len()).for_each(|g| joint.refresh(g));
        joint.aim();
        joint
    }

    /// The load of device `i`, from its experts.
    fn weigh(&mut self, i: usize) {
        let held = &self.experts[i];
        self.load[i] = self.placed.load(held);
        self.mb[i] = (!held.is_empty()).then(|| self.placed.received_mb(self.load[i]));
    }

    /// Adds up everything of group `g` anew.
    fn refresh(&mut self, g: usize) {
        let links = &self.placed.problem.links;
        for &i in &self.groups[g] {
            let (mut sent, mut from) = (0.0, Link::default());
            for &j in self.groups[g].iter().filter(|&&j| j != i) {
                sent += self.mb[j as usize].map_or(0.0, |mb| links.link(i as usize, j as usize).time_ms(mb));
                let link = links.link_to(i as usize, j as usize);
                from.alpha_ms += link.alpha_ms;
                from.beta_ms_per_mb += link.beta_ms_per_mb;
            }
            (self.sent[i as usize], self.from[i as usize]) = (sent, from);
        }
        self.ops += (self.groups[g].len() * self.groups[g].len()) as u64;
        self.times[g] = self.group_times(g, self.limit);
    }

    fn sum(&self, compute: f64, limit: f64) -> Sum {
        Sum {
            eta: self.placed.problem.workload.p2p_frequency,
            limit,
            compute,
            times: Times { compute, ..Times::default() },
        }
    }

    fn received(&self, i: u32) -> f64 {
        self.mb[i as usize].map_or(0.0, |mb| self.from[i as usize].time_ms(mb))
    }

    fn group_times(&self, g: usize, limit: f64) -> Times {
        let members = &self.groups[g];
        let flops = &self.placed.problem.flops;
        let time = |&i: &u32| self.load[i as usize] / flops[i as usize];
        let mut sum = self.sum(members.len() as f64 * members.iter().map(time).fold(0.0, f64::max), limit);
        members.iter().for_each(|&i| sum.device(self.sent[i as usize], self.received(i)));
        sum.times
    }

    /// What group `g` takes when `into` is in the place of `out`, with its experts.
    fn with(&self, g: usize, out: u32, into: u32, limit: f64) -> Times {
        let (links, flops) = (&self.placed.problem.links, &self.placed.problem.flops);
        let members = &self.groups[g];
        let others = || members.iter().copied().filter(|&i| i != out);
        let time = |i: u32| self.load[i as usize] / flops[i as usize];
        let own = self.load[out as usize] / flops[into as usize];
        let mut sum = self.sum(members.len() as f64 * others().map(time).fold(own, f64::max), limit);
        let (mut sent, mut received) = (0.0, 0.0);
        for i in others() {
            let (old, new) = (links.link_to(out as usize, i as usize), links.link_to(into as usize, i as usize));
            let mut here = self.sent[i as usize];
            if let Some(mb) = self.mb[out as usize] {
                received += new.time_ms(mb);
                here += new.time_ms(mb) - old.time_ms(mb);
            }
            let mut there = 0.0;
            if let Some(mb) = self.mb[i as usize] {
                let (old, new) = (links.link(out as usize, i as usize), links.link(into as usize, i as usize));
                sent += new.time_ms(mb);
                there = self.from[i as usize].time_ms(mb) + new.time_ms(mb) - old.time_ms(mb);
            }
            sum.device(here, there);
        }
        sum.device(sent, received);
        sum.times
    }

    /// What group `g` takes when these two of its members have these loads.
    fn loaded(&self, g: usize, changed: [(u32, f64, Option<f64>); 2]) -> Times {
        let (links, flops) = (&self.placed.problem.links, &self.placed.problem.flops);
        let members = &self.groups[g];
        let [a, b] = changed;
        let load = |i: u32| {
            if i == a.0 {
                a.1
            } else if i == b.0 {
                b.1
            } else {
                self.load[i as usize]
            }
        };
        let time = |&i: &u32| load(i) / flops[i as usize];
        let mut sum = self.sum(members.len() as f64 * members.iter().map(time).fold(0.0, f64::max), self.limit);
        for &i in members {
            let (mut sent, mut received) = (self.sent[i as usize], self.received(i));
            for (j, _, mb) in changed {
                let from = self.from[j as usize];
                if i == j {
                    received = mb.map_or(0.0, |mb| from.time_ms(mb));
                } else {
                    let link = links.link_to(j as usize, i as usize);
                    let time = |mb: Option<f64>| mb.map_or(0.0, |mb| link.time_ms(mb));
                    sent += time(mb) - time(self.mb[j as usize]);
                }
            }
            sum.device(sent, received);
        }
        sum.times
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
        self.limit = self.limit_of(self.slowest);
        for g in 0..self.groups.len() {
            self.times[g] = self.group_times(g, self.limit);
        }
        self.ops += self.placed.problem.n() as u64;
    }

    fn excess(&self) -> f64 {
        self.times.iter().map(|times| times.over).sum()
    }

    /// The group that takes longest.
    fn worst(&self) -> usize {
        let ms = |g: usize| self.times[g].compute + self.times[g].longest;
        (0..self.times.len()).fold(0, |worst, g| if ms(g) > ms(worst) { g } else { worst })
    }

    /// Two devices of different groups change places, unless the excess would be over `most`.
    fn swap(&mut self, i: u32, j: u32, most: f64) -> bool {
        let (g, h) = (self.group_of[i as usize], self.group_of[j as usize]);
        if g == h || g == IDLE || h == IDLE {
            return false;
        }
        let memory = &self.placed.problem.memory;
        let fits = |i: u32, j: u32| self.experts[i as usize].len() as u64 <= memory[j as usize];
        if !fits(i, j) || !fits(j, i) {
            return false;
        }
        let (g, h) = (g as usize, h as usize);
        let moved = |x: u32| {
            if x == i {
                h as u32
            } else if x == j {
                g as u32
            } else {
                self.group_of[x as usize]
            }
        };
        let slowest = self.placed.problem.slowest(moved);
        self.ops += slowest.unwrap_or(0) as u64 / 2;
        let others = (0..self.groups.len()).filter(|&k| k != g && k != h);
        let (limit, mut excess) = if slowest == self.slowest {
            (self.limit, others.map(|k| self.times[k].over).sum::<f64>())
        } else {
            let limit = self.limit_of(slowest);
            self.ops += self.placed.problem.n() as u64;
            (limit, others.map(|k| self.group_times(k, limit).over).sum())
        };
        for (g, out, into) in [(h, j, i), (g, i, j)] {
            self.ops += 2 * self.groups[g].len() as u64;
            excess += self.with(g, out, into, limit).over;
            if excess > most {
                return false;
            }
        }
        for (g, out, into) in [(g, i, j), (h, j, i)] {
            self.groups[g].iter_mut().filter(|m| **m == out).for_each(|m| *m = into);
            self.group_of[into as usize] = g as u32;
        }
        self.experts.swap(i as usize, j as usize);
        self.load.swap(i as usize, j as usize);
        self.mb.swap(i as usize, j as usize);
        if slowest != self.slowest {
            (self.slowest, self.limit) = (slowest, limit);
            for k in (0..self.groups.len()).filter(|&k| k != g && k != h) {
                self.times[k] = self.group_times(k, limit);
            }
        }
        self.refresh(g);
        self.refresh(h);
        true
    }

    /// The expert at `place` of device `i`'s goes to `j` of the same group, for that at `other` of `j`'s if there is one, unless the excess would be
    /// over `most`.
    fn shift(&mut self, (i, place): (u32, usize), (j, other): (u32, Option<usize>), most: f64) -> bool {
        let g = self.group_of[i as usize] as usize;
        let costs = &self.placed.experts.costs;
        let (e, f) = (self.experts[i as usize][place], other.map(|other| self.experts[j as usize][other]));
        if f.is_none() && self.experts[j as usize].len() as u64 >= self.placed.problem.memory[j as usize] {
            return false;
        }
        let moved = costs[e as usize] - f.map_or(0.0, |f| costs[f as usize]);
        let changed = [(i, -moved, self.experts[i as usize].len() > 1 || f.is_some()), (j, moved, true)];
        let changed = changed.map(|(i, moved, holds)| {
            let load = self.load[i as usize] + moved;
            (i, load, holds.then(|| self.placed.received_mb(load)))
        });
        self.ops += 2 * self.groups[g].len() as u64;
        let times = self.loaded(g, changed);
        if self.excess() - self.times[g].over + times.over > most {
            return false;
        }
        let links = &self.placed.problem.links;
        for (j, _, mb) in changed {
            for &i in self.groups[g].iter().filter(|&&i| i != j) {
                let link = links.link_to(j as usize, i as usize);
                let time = |mb: Option<f64>| mb.map_or(0.0, |mb| link.time_ms(mb));
                self.sent[i as usize] += time(mb) - time(self.mb[j as usize]);
            }
        }
        self.experts[i as usize].swap_remove(place);
        if let Some(other) = other {
            self.experts[j as usize].swap_remove(other);
        }
        self.experts[j as usize].push(e);
        self.experts[i as usize].extend(f);
        self.weigh(i as usize);
        self.weigh(j as usize);
        self.changes += 1;
        if self.changes.is_multiple_of(REFRESH) {
            self.refresh(g);
        } else {
            self.times[g] = self.group_times(g, self.limit);
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
            let most = joint.excess() + temperature * exponential[random.below(EXPONENTIAL)];
            let g = if random.below(2) == 0 { joint.worst() } else { random.below(joint.groups.len()) };
            let members = &joint.groups[g];
            let i = members[random.below(members.len())];
            let changed = if joint.groups.len() > 1 && random.below(2) == 0 {
                joint.swap(i, random.below(placed.problem.n()) as u32, most)
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
