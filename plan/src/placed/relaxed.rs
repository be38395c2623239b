//! Groups annealed with experts as if they could be cut.
//!
//! Where every device of a group holds several experts, who is in which group matters more than which experts are where, and a placement that has not
//! been adapted hides what a change of groups is worth. So here a group takes what it would with the best shares of all FLOP (`relaxed/shares.rs`). That is
//! the group's own whatever the others are, so it is remembered: when it has become cold, a chain comes by the same groups again and again. What is
//! annealed is how much longer than a target groups take, as in [`super::regroup`]. Experts are dealt out to the shares of what it comes by.
//!
//! Times are in units of what the best grouping takes at first, in single precision.

mod cycles;
mod deal;
mod shares;

use deal::dealt;
use rustc_hash::FxHashMap;
use shares::{Devices, IMPOSSIBLE, Simplex};

use super::joint::Schedule;
use super::regroup::{MOST_DEVICES, bits, members};
use super::search::FoundPlaced;
use super::{Placed, larger};
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::random::Random;
use crate::search::{EXPONENTIAL, between};

/// Nothing between two devices takes as long, in units, and no device computes longer.
const FAR: f32 = 1e4;
/// A device that computes all in less, in units, counts as one that takes so long: of no time at all no multiple would be any.
const AT_ONCE: f32 = 1e-6;
/// Groups whose times are remembered at a time; then all are forgotten.
const MOST_KNOWN: usize = 1 << 20;
/// Steps after which temperature and target are set anew.
const SET_EVERY: u64 = 64;
/// So hot that nothing is left of where it began, and so warm that something is. What it began with is no answer of either.
pub(super) const HOT: Schedule = Schedule { under: (0.8, 0.005), temperature: (0.05, 0.005), forgetful: true };
pub(super) const WARM: Schedule = Schedule { under: (0.05, 0.003), temperature: (0.02, 0.001), forgetful: true };
/// No answer is taken before so much of the time.
const ANSWERS_FROM: f64 = 0.1;
/// In so many proposals of sixteen the groups stay as they are, but for who may hold experts; in so many two devices change places; in the others one goes
/// to another group.
const STAYS: usize = 2;
const SWAPS: usize = 9;
/// So many proposals in four are of the group that takes longest.
const WORST_IN_FOUR: usize = 3;
/// A change of groups is that of so many which looks best for who comes.
const CANDIDATES: usize = 24;
/// Who comes has what who leaves had. As much as that need not be received, but all that others have must be sent, so of the one so much counts.
const RECEIVED: f32 = 0.5;
/// Of the mean expert: a device with less has none.
const LEAST: f32 = 0.5;

/// A group, or room for a new one.
#[derive(Clone, Default)]
struct Group {
    /// In any order, to choose from.
    members: Vec<u32>,
    /// The same, and those that may hold experts, as bits.
    set: u64,
    holders: u64,
    time: f32,
}

struct Relaxed<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    devices: Devices,
    /// Some are empty, one at least.
    groups: Vec<Group>,
    /// How many are not.
    count: usize,
    group_of: Vec<u32>,
    /// What x sends to c, at c n + x: alpha, and beta for all experts.
    alpha_to: Vec<f32>,
    beta_to: Vec<f32>,
    /// How long a newcomer would take: instead of another device, at other n + newcomer; and beside all of a group, at group n + newcomer.
    instead: Vec<f32>,
    beside: Vec<f32>,
    /// What groups take, by their set and their holders; below 0 where they take more than that.
    known: FxHashMap<(u64, u64), f32>,
    /// Of the two groups of a change, and what else is looked at by the first.
    simplex: [Simplex; 2],
    excess: f32,
    least: f32,
    slowest: Option<usize>,
    /// ms of a unit.
    unit: f64,
    gamma: f64,
    start_ms: f64,
    target_ms: f64,
    limit: f32,
    /// Links looked at so far, or what takes as long.
    ops: u64,
}

fn over(time: f32, limit: f32) -> f32 {
    larger(time - limit, 0.0)
}

#[inline]
fn indicator(yes: bool) -> f32 {
    if yes { 1.0 } else { 0.0 }
}

impl<'s, 'p, 'a, L: LinkTable> Relaxed<'s, 'p, 'a, L> {
    fn new(placed: &'s Placed<'p, 'a, L>, start: &FoundPlaced, whole: bool) -> Self {
        let (n, problem) = (placed.problem.n(), placed.problem);
        let mut group_of = vec![IDLE; n];
        for (g, members) in start.groups.iter().enumerate() {
            members.iter().for_each(|&i| group_of[i as usize] = g as u32);
        }
        let gamma = problem.gamma(start.groups.iter().map(Vec::len).sum());
        let slowest = problem.slowest(|i| group_of[i as usize]);
        let all_reduce = problem.all_reduce_over(start.groups.len(), slowest);
        let unit = ((start.objective_ms - all_reduce) / gamma).max(f64::MIN_POSITIVE);
        let devices = in_units(placed, unit, whole);
        let to = |from: &[f32]| (0..n * n).map(|at| from[at % n * n + at / n]).collect();
        let group = |(members, placement): (&Vec<u32>, &Vec<Vec<u32>>)| {
            let holders = members.iter().zip(placement).filter(|(_, held)| !held.is_empty());
            let (set, holders) = (bits(members.iter().copied()), bits(holders.map(|(&i, _)| i)));
            Group { members: members.clone(), set, holders, time: 0.0 }
        };
        let groups = start.groups.iter().zip(&start.placements).map(group);
        let mut relaxed = Relaxed {
            placed,
            groups: groups.chain([Group::default()]).collect(),
            count: start.groups.len(),
            group_of,
            alpha_to: to(&devices.alpha),
            beta_to: to(&devices.beta),
            devices,
            instead: vec![0.0; n * n],
            beside: vec![0.0; n * (n + 1)],
            known: FxHashMap::default(),
            simplex: Default::default(),
            excess: 0.0,
            least: LEAST / placed.experts.costs.len() as f32,
            slowest,
            unit,
            gamma,
            start_ms: start.objective_ms,
            target_ms: 0.0,
            limit: 1.0,
            ops: (n * n) as u64,
        };
        (0..relaxed.groups.len()).for_each(|g| relaxed.settle(g, 0));
        relaxed
    }

    fn all_reduce(&self) -> f64 {
        self.placed.problem.all_reduce_over(self.count, self.slowest)
    }

    fn limit_of(&self, count: usize, slowest: Option<usize>) -> f32 {
        let all_reduce = self.placed.problem.all_reduce_over(count, slowest);
        ((self.target_ms - all_reduce) / self.gamma / self.unit) as f32
    }

    fn objective_ms(&self) -> f64 {
        let longest = self.groups.iter().map(|group| group.time).fold(0.0, larger);
        self.gamma * f64::from(longest) * self.unit + self.all_reduce()
    }

    /// The group that takes longest.
    fn worst(&self) -> usize {
        (0..self.groups.len()).fold(0, |worst, g| if self.groups[g].time > self.groups[worst].time { g } else { worst })
    }

    /// Aims below an objective, by a share of what of it is not the all-reduce.
    fn aim(&mut self, objective_ms: f64, under: f64) {
        let all_reduce = self.all_reduce();
        self.target_ms = (objective_ms - all_reduce) * (1.0 - under) + all_reduce;
        self.limit = self.limit_of(self.count, self.slowest);
        self.weigh();
    }

    fn weigh(&mut self) {
        self.excess = self.groups.iter().map(|group| over(group.time, self.limit)).sum();
    }

    /// What a group takes, as far as that is not above `most`; `by` one of the two solvers, if it is not known.
    fn time(&mut self, by: usize, set: u64, holders: u64, most: f32) -> f32 {
        self.ops += 4;
        match self.known.get(&(set, holders)) {
            Some(&known) if known >= 0.0 => return known,
            Some(&known) if -known > most => return -known,
            _ => {}
        }
        let time = self.least(by, set, holders, most);
        if self.known.len() == MOST_KNOWN {
            self.known.clear();
        }
        self.known.insert((set, holders), if time > most { -time } else { time });
        time
    }

    fn least(&mut self, by: usize, set: u64, holders: u64, most: f32) -> f32 {
        let simplex = &mut self.simplex[by];
        let time = simplex.least(&self.devices, set, holders, most);
        self.ops += std::mem::take(&mut simplex.ops);
        time
    }

    /// A group is another: who comes to have nothing holds nothing, and what newcomers take is known. The solver may have come to its shares.
    fn settle(&mut self, g: usize, by: usize) {
        let Group { set, mut holders, .. } = self.groups[g];
        if set == 0 {
            (self.groups[g].holders, self.groups[g].time) = (0, 0.0);
            let of = &self.devices;
            let alone = |i: usize| if of.room[i] < of.experts() { IMPOSSIBLE } else { of.compute[i] };
            self.beside[g * of.n..][..of.n].iter_mut().enumerate().for_each(|(i, beside)| *beside = alone(i));
            return;
        }
        let solved = self.simplex[by].solved(set, holders);
        let mut time = solved.unwrap_or_else(|| self.least(by, set, holders, IMPOSSIBLE));
        loop {
            let none = self.simplex[by].shares().filter(|(_, share)| *share < self.least);
            let fewer = holders & !bits(none.map(|(i, _)| i as u32));
            if fewer == holders {
                break;
            }
            let then = self.least(by, set, fewer, time);
            if then > time {
                self.least(by, set, holders, IMPOSSIBLE);
                break;
            }
            (holders, time) = (fewer, then);
        }
        (self.groups[g].holders, self.groups[g].time) = (holders, time);
        self.meet_newcomers(g, by);
    }

    /// What newcomers take, by the shares that were just found for a group.
    fn meet_newcomers(&mut self, g: usize, by: usize) {
        let Group { members, holders, .. } = &self.groups[g];
        let n = self.devices.n;
        let mut share = [0.0; MOST_DEVICES];
        self.simplex[by].shares().for_each(|(i, of)| share[i] = of);
        let ends = members.iter().map(|&i| self.devices.compute[i as usize] * share[i as usize]);
        let compute = members.len() as f32 * ends.fold(0.0, larger);
        // Of each of all devices as a newcomer beside all: what it sends, and receives for alpha and, with a share of all experts, for beta.
        let [mut sent, mut receive, mut receive_all] = [[0.0; MOST_DEVICES]; 3];
        let of = |c: u32| {
            let [alpha_to, beta_to, alpha, beta] =
                [&self.alpha_to, &self.beta_to, &self.devices.alpha, &self.devices.beta]
                    .map(|list| &list[c as usize * n..][..n]);
            let (to, from) = (alpha_to.iter().zip(beta_to), alpha.iter().zip(beta));
            (indicator(holders >> c & 1 == 1), share[c as usize], to.zip(from))
        };
        for (holds, share, pairs) in members.iter().map(|&c| of(c)) {
            let sums = sent.iter_mut().zip(&mut receive).zip(&mut receive_all);
            for (((sent, receive), receive_all), ((alpha_to, beta_to), (alpha, beta))) in sums.zip(pairs) {
                *sent += holds * alpha_to + share * beta_to;
                *receive += alpha;
                *receive_all += beta;
            }
        }
        for (beside, sent) in self.beside[g * n..][..n].iter_mut().zip(&sent) {
            *beside = compute + sent;
        }
        for (&c, (holds, share, pairs)) in members.iter().map(|c| (c, of(*c))) {
            let (receives, part) = (indicator(share > 0.0), RECEIVED * share);
            let sums = sent.iter().zip(&receive).zip(&receive_all);
            let instead = self.instead[c as usize * n..][..n].iter_mut();
            for ((instead, ((sent, receive), receive_all)), ((alpha_to, beta_to), (alpha, beta))) in
                instead.zip(sums).zip(pairs)
            {
                let received = receives * (receive - alpha) + part * (receive_all - beta);
                *instead = compute + larger(sent - holds * alpha_to - share * beta_to, received);
            }
        }
        self.ops += (n * members.len()) as u64 / 2;
    }

    /// Makes a random change, unless the excess would be over `most`.
    fn random_change(&mut self, random: &mut Random, most: f32) -> bool {
        let g = if random.below(4) < WORST_IN_FOUR { self.worst() } else { random.below(self.groups.len()) };
        let kind = random.below(16);
        if self.groups[g].set == 0 {
            return false;
        }
        if kind < STAYS {
            let i = self.groups[g].members[random.below(self.groups[g].members.len())];
            return self.turn(g, i, most);
        }
        let Some((i, h, back)) = self.most_promising(g, kind < STAYS + SWAPS, random) else { return false };
        self.go((i, g, h), back, most)
    }

    /// A device of group `g`, another group, and, for a change of places, a device of that: of some the one with least too much for who comes.
    fn most_promising(&mut self, g: usize, swap: bool, random: &mut Random) -> Option<(u32, usize, Option<u32>)> {
        let n = self.devices.n;
        self.ops += CANDIDATES as u64;
        let mut best = (f32::INFINITY, None);
        for _ in 0..CANDIDATES {
            let mut h = random.below(self.groups.len() - 1);
            h += usize::from(h >= g);
            if swap && self.groups[h].set == 0 {
                continue;
            }
            let one_of =
                |g: usize, random: &mut Random| self.groups[g].members[random.below(self.groups[g].members.len())];
            let i = one_of(g, random);
            let back = swap.then(|| one_of(h, random));
            let too_much = match back.map(|j| j as usize) {
                Some(j) => {
                    let [there, here] = [j * n + i as usize, i as usize * n + j];
                    over(self.instead[there], self.limit) + over(self.instead[here], self.limit)
                }
                None => over(self.beside[h * n + i as usize], self.limit),
            };
            if too_much < best.0 {
                best = (too_much, Some((i, h, back)));
            }
        }
        best.1
    }

    /// The groups are these again.
    fn go_back(&mut self, groups: Vec<(u64, u64)>) {
        let group = |(set, holders)| Group { members: members(set), set, holders, time: 0.0 };
        self.groups = groups.into_iter().map(group).collect();
        self.count = self.groups.len();
        self.group_of.fill(IDLE);
        for (g, group) in self.groups.iter().enumerate() {
            group.members.iter().for_each(|&i| self.group_of[i as usize] = g as u32);
        }
        self.slowest = self.placed.problem.slowest(|i| self.group_of[i as usize]);
        (0..self.count).for_each(|g| self.settle(g, 0));
    }

    /// Device `i` of group `g` may hold experts where it did not, or no longer.
    fn turn(&mut self, g: usize, i: u32, most: f32) -> bool {
        let Group { set, holders, time, .. } = self.groups[g];
        let most = self.limit + most - (self.excess - over(time, self.limit));
        let holders = holders ^ 1 << i;
        if self.time(0, set, holders, most) > most {
            return false;
        }
        self.groups[g].holders = holders;
        self.settle(g, 0);
        self.weigh();
        true
    }

    /// A group without who goes and with who comes, as bits: its devices, and which of them may hold experts.
    fn replaced(&self, g: usize, goes: u64, comes: u64) -> (u64, u64) {
        let Group { set, holders, .. } = self.groups[g];
        // Who comes may hold experts if who leaves might, or if nobody leaves.
        let may = goes == 0 || holders & goes != 0;
        (set & !goes | comes, holders & !goes | if may { comes } else { 0 })
    }

    /// Device `i` goes from group `g` to group `h`, and `back` from there to `g`, unless the excess would be over `most`.
    fn go(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, most: f32) -> bool {
        let to = |x: u32| match x {
            _ if x == i => h as u32,
            _ if Some(x) == back => g as u32,
            _ => self.group_of[x as usize],
        };
        let slowest = self.placed.problem.slowest_after(self.slowest, [Some(i), back], to);
        self.ops += 4 + slowest.unwrap_or(0) as u64 / 2;
        let (goes, comes) = (1u64 << i, bits(back.into_iter()));
        let after = [self.replaced(h, comes, goes), self.replaced(g, goes, comes)];
        let count = self.count + usize::from(self.groups[h].set == 0) - usize::from(after[1].0 == 0);
        let same = slowest == self.slowest && count == self.count;
        let limit = if same { self.limit } else { self.limit_of(count, slowest) };
        let others = (0..self.groups.len()).filter(|&k| k != g && k != h);
        let others: f32 = others.map(|k| over(self.groups[k].time, limit)).sum();
        let mut most = limit + most - others;
        for (at, &(set, holders)) in after.iter().enumerate() {
            if most < limit {
                return false;
            }
            let time = if set == 0 { 0.0 } else { self.time(at, set, holders, most) };
            if time > most {
                return false;
            }
            most -= over(time, limit);
        }
        let place = |g: usize, i: u32| self.groups[g].members.iter().position(|x| *x == i);
        if let (Some(at), Some(to)) = (place(g, i), back.and_then(|j| place(h, j))) {
            (self.groups[g].members[at], self.groups[h].members[to]) = (self.groups[h].members[to], i);
        } else if let Some(at) = place(g, i) {
            self.groups[g].members.swap_remove(at);
            self.groups[h].members.push(i);
        }
        self.group_of[i as usize] = h as u32;
        back.into_iter().for_each(|j| self.group_of[j as usize] = g as u32);
        (self.slowest, self.count, self.limit) = (slowest, count, limit);
        for (at, k) in [h, g].into_iter().enumerate() {
            (self.groups[k].set, self.groups[k].holders) = after[at];
            self.settle(k, at);
        }
        if self.groups.len() == count {
            self.groups.push(Group::default());
            self.settle(count, 0);
        }
        self.weigh();
        true
    }
}

/// What devices compute and send, in units.
fn in_units<L: LinkTable>(placed: &Placed<L>, unit: f64, whole: bool) -> Devices {
    let (n, problem) = (placed.problem.n(), placed.problem);
    let (eta, mb) = (problem.workload.p2p_frequency, placed.received_mb(placed.experts.total));
    let in_units = |ms: f64| ((ms / unit) as f32).min(FAR);
    let of_links = |of: &dyn Fn(usize, usize) -> f64| -> Vec<f32> {
        (0..n * n).map(|at| if at / n != at % n { in_units(eta * of(at / n, at % n)) } else { 0.0 }).collect()
    };
    let (mut dearest, mut all) = (vec![0.0], 0.0);
    for &e in &placed.experts.order {
        all += placed.experts.share(placed.experts.costs[e as usize]);
        dearest.push(all as f32);
    }
    let experts = placed.experts.costs.len();
    Devices {
        n,
        compute: problem.flops.iter().map(|flops| in_units(placed.experts.total / flops).max(AT_ONCE)).collect(),
        alpha: of_links(&|x, c| problem.links.link(x, c).alpha_ms),
        beta: of_links(&|x, c| problem.links.link(x, c).beta_ms_per_mb * mb),
        room: problem.memory.iter().map(|memory| (*memory).min(experts as u64) as usize).collect(),
        dearest,
        whole: whole && placed.experts.uniform.is_some(),
    }
}

/// An annealing from one grouping, which goes on where it was stopped.
pub(super) struct Chain<'s, 'p, 'a, L> {
    relaxed: Relaxed<'s, 'p, 'a, L>,
    schedule: Schedule,
    /// Links that it looks at in all.
    budget: u64,
    /// The best that it came by after the first tenth, if that is anything.
    best_ms: f64,
    best: Option<Vec<(u64, u64)>>,
    temperature: f64,
    steps: u64,
    random: Random,
}

impl<'s, 'p, 'a, L: LinkTable> Chain<'s, 'p, 'a, L> {
    pub fn new(
        placed: &'s Placed<'p, 'a, L>,
        (start, whole): (&FoundPlaced, bool),
        schedule: Schedule,
        budget: u64,
        random: Random,
    ) -> Self {
        let relaxed = Relaxed::new(placed, start, whole);
        Chain { relaxed, schedule, budget, best_ms: f64::INFINITY, best: None, temperature: 0.0, steps: 0, random }
    }

    /// Whether it takes experts as whole.
    pub fn whole(&self) -> bool {
        self.relaxed.devices.whole
    }

    /// The least that it came by, ms.
    pub fn best_ms(&self) -> f64 {
        self.best_ms
    }

    /// The best that it came by, after cyclic exchanges, with experts dealt out; `None` where there is none, or a group has no room for all.
    pub fn into_best(self) -> Option<FoundPlaced> {
        let mut relaxed = self.relaxed;
        relaxed.go_back(self.best?);
        relaxed.exchange_cyclically();
        let Relaxed { placed, devices: of, simplex: [mut simplex, _], least, .. } = relaxed;
        let mut share = vec![0.0; of.n];
        let mut groups = Vec::new();
        for Group { set, holders, .. } in relaxed.groups.into_iter().filter(|group| group.set != 0) {
            simplex.least(&of, set, holders, IMPOSSIBLE);
            simplex.shares().filter(|(_, of)| *of >= least).for_each(|(i, of)| share[i] = of);
            groups.push(members(set));
        }
        let placements = groups.iter().map(|members| dealt(placed, members, &share)).collect::<Option<Vec<_>>>()?;
        Some(FoundPlaced::new(placed, groups, placements))
    }

    /// Goes on until it has spent this share of its budget.
    pub fn advance(&mut self, exponential: &[f64], share: f64) {
        let Chain { relaxed, schedule, budget, best_ms, best, temperature, steps, random } = self;
        let budget = *budget as f64;
        while (relaxed.ops as f64) < share * budget {
            if steps.is_multiple_of(SET_EVERY) {
                let progress = relaxed.ops as f64 / budget;
                let from_ms = if best.is_some() { *best_ms } else { relaxed.start_ms };
                let work = (from_ms - relaxed.all_reduce()) / relaxed.gamma / relaxed.unit;
                *temperature = work * between(schedule.temperature, progress);
                relaxed.aim(from_ms, between(schedule.under, progress));
            }
            *steps += 1;
            relaxed.ops += 8;
            let most = relaxed.excess + (*temperature * exponential[random.below(EXPONENTIAL)]) as f32;
            if relaxed.random_change(random, most) && relaxed.ops as f64 > ANSWERS_FROM * budget {
                let now_ms = relaxed.objective_ms();
                if now_ms < *best_ms {
                    *best_ms = now_ms;
                    let groups = relaxed.groups.iter().filter(|group| group.set != 0);
                    *best = Some(groups.map(|group| (group.set, group.holders)).collect());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Links, Matrix};
    use crate::objective::Problem;
    use crate::placed::regroup::devices;
    use crate::search::exponential;

    /// Six devices of which the even ones, and the odd ones, have good links; the start has them mixed.
    fn mixed(memory: u64) -> (Cluster, Workload) {
        let ms = |at: usize| if (at / 6 + at % 6).is_multiple_of(2) { 0.01 } else { 1.0 };
        let ms: Vec<f64> = (0..36).map(ms).collect();
        let devices = (0..6).map(|id| Device::new(id, "a", 1e9, memory)).collect();
        let links = Links::Matrix(Matrix::new(6, ms.clone(), ms));
        let costs = (0..12).map(|e| 1e8 * f64::from(1 + e % 3)).collect();
        (Cluster::new(devices, links), Workload { p2p_buffer_mb: 0.5, p2p_frequency: 2.0, ..Workload::new(costs) })
    }

    #[test]
    fn devices_find_those_with_good_links() {
        for memory in [4, 12] {
            let (cluster, workload) = mixed(memory);
            let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
            let placed = Placed::new(&problem);
            let groups = vec![vec![0, 1, 2], vec![3, 4, 5]];
            let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
            let start = FoundPlaced::new(&placed, groups, placements);
            let mut chain = Chain::new(&placed, (&start, false), HOT, 1_000_000, Random(1));
            chain.advance(&exponential(), 1.0);
            let found = chain.into_best().unwrap();
            let mut groups = found.groups.clone();
            groups.sort();
            assert_eq!(groups, [[0, 2, 4], [1, 3, 5]]);
            assert!(found.objective_ms < 0.7 * start.objective_ms, "{} {}", found.objective_ms, start.objective_ms);
            for placement in &found.placements {
                let mut held = placement.concat();
                held.sort_unstable();
                assert_eq!(held, (0..12).collect::<Vec<u32>>());
                assert!(placement.iter().all(|held| held.len() as u64 <= memory));
            }
        }
    }

    /// What is kept of groups and newcomers after changes is what it is when all is added up anew.
    #[test]
    fn what_is_kept_is_that_of_the_groups() {
        // Half of the memory with the slow; and ample.
        for (tight, groups) in
            [(true, vec![vec![0, 1, 2], vec![3, 4, 5]]), (false, vec![vec![0, 1, 2], vec![3, 4], vec![5]])]
        {
            let (mut cluster, workload) = mixed(if tight { 3 } else { 12 });
            for device in cluster.devices.iter_mut().filter(|device| tight && device.id % 3 == 2) {
                (device.memory_experts, device.flop_per_ms) = (6, 3e8);
            }
            let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
            let placed = Placed::new(&problem);
            let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
            let mut relaxed = Relaxed::new(&placed, &FoundPlaced::new(&placed, groups, placements), false);
            relaxed.aim(relaxed.start_ms, 0.1);
            let (mut random, mut moved, mut turned) = (Random(3), 0, 0);
            let mut counts = std::collections::BTreeSet::new();
            for _ in 0..2_000 {
                let before =
                    (relaxed.group_of.clone(), relaxed.groups.iter().map(|group| group.holders).collect::<Vec<_>>());
                if relaxed.random_change(&mut random, relaxed.excess + 2.0) {
                    moved += u32::from(before.0 != relaxed.group_of);
                    turned += u32::from(
                        before.0 == relaxed.group_of
                            && before.1.iter().ne(relaxed.groups.iter().map(|group| &group.holders)),
                    );
                    counts.insert(relaxed.count);
                    kept_is_right(&relaxed);
                }
            }
            assert_eq!(counts.len() > 1, !tight, "{counts:?} groups");
            // Where memory is tight, whoever holds experts must.
            assert!(moved > 50 && (turned > 10) != tight, "{moved} {turned}");
        }
    }

    pub(super) fn kept_is_right<L: LinkTable>(relaxed: &Relaxed<L>) {
        let (of, mut simplex) = (&relaxed.devices, Simplex::default());
        let near = |a: f32, b: f32| (a - b).abs() < 1e-3 * (1.0 + a.abs());
        for (g, group) in relaxed.groups.iter().enumerate() {
            assert_eq!(group.set, bits(group.members.iter().copied()));
            assert!(group.members.iter().all(|&i| relaxed.group_of[i as usize] == g as u32));
            assert!(group.holders & !group.set == 0);
            if group.set == 0 {
                assert_eq!(group.time, 0.0);
                let alone = |x: usize| if of.room[x] < 12 { IMPOSSIBLE } else { of.compute[x] };
                assert!((0..6).all(|x| relaxed.beside[g * 6 + x] == alone(x)));
                continue;
            }
            assert!(near(group.time, simplex.least(of, group.set, group.holders, IMPOSSIBLE)));
            let mut share = [0.0; 6];
            simplex.shares().for_each(|(i, of)| share[i] = of);
            let compute =
                group.members.iter().map(|&i| group.members.len() as f32 * of.compute[i as usize] * share[i as usize]);
            let compute = compute.fold(0.0, f32::max);
            for x in (0..6).filter(|x| group.set >> x & 1 == 0) {
                let sent = |without: Option<usize>| -> f32 {
                    let holders = devices(group.holders).filter(|c| Some(*c) != without);
                    holders.map(|c| of.alpha[x * 6 + c] + of.beta[x * 6 + c] * share[c]).sum()
                };
                assert!(near(relaxed.beside[g * 6 + x], compute + sent(None)));
                for c in devices(group.set) {
                    let others = devices(group.set).filter(|other| *other != c);
                    let received = |y: usize| of.alpha[y * 6 + x] + RECEIVED * share[c] * of.beta[y * 6 + x];
                    let received = if share[c] > 0.0 { others.map(received).sum() } else { 0.0 };
                    assert!(near(relaxed.instead[c * 6 + x], compute + sent(Some(c)).max(received)));
                }
            }
        }
        let empty = relaxed.groups.iter().filter(|group| group.set == 0).count();
        assert!(empty > 0 && relaxed.count + empty == relaxed.groups.len());
        let excess: f32 = relaxed.groups.iter().map(|group| (group.time - relaxed.limit).max(0.0)).sum();
        assert!(near(relaxed.excess, excess));
    }
}
