//! Groups annealed with experts as if they could be cut.
//!
//! Where every device of a group holds several experts, who is in which group matters more than which experts are where, and a placement that has not
//! been adapted hides what a change of groups is worth. So here a device has a share of all FLOP instead of experts, and each change of a group comes
//! with shares that fit it: none computes or receives for too long, and what is sent for too long is made less by steps of steepest descent.
//! Experts are dealt out to the shares of what it comes by.
//!
//! Times are in units of what the best grouping takes at first, in single precision. What is annealed is as in [`super::joint`].

mod deal;
mod guess;
mod memory;
mod trial;

use deal::dealt;
use trial::{Change, Packed, Trial};

use super::joint::Schedule;
use super::search::FoundPlaced;
use super::{Placed, larger};
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::random::Random;
use crate::search::{EXPONENTIAL, between};

/// Nothing in an answer takes as long, in units.
const FAR: f32 = 1e4;

/// A device that computes all in less, in units, counts as one that takes so long: of no time at all no multiple would be any.
const AT_ONCE: f32 = 1e-6;
/// Steps after which temperature and target are set anew, and sums are added up anew.
const SET_EVERY: u64 = 64;
/// So hot that nothing is left of where it began, and so warm that something is. What it began with is no answer of either.
pub(super) const HOT: Schedule = Schedule { under: (0.5, 0.003), temperature: (0.3, 0.01), forgetful: true };
pub(super) const WARM: Schedule = Schedule { under: (0.05, 0.003), temperature: (0.05, 0.01), forgetful: true };
/// No answer is taken before so much of the time.
const ANSWERS_FROM: f64 = 0.1;
/// In so many proposals of sixteen the groups stay as they are; in so many two devices change places; in the others one goes to another group.
const STAYS: usize = 2;
const SWAPS: usize = 9;
/// So many proposals in four are of the group that takes longest.
const WORST_IN_FOUR: usize = 3;
/// Of the mean expert: a device with less has none.
const LEAST: f32 = 0.5;
/// By how much a group computes longer than it must.
const SLACK: (f32, f32) = (0.0005, 10.0);
/// So many units, at first and at last, a group takes longer for a share of all experts that it has no room for.
const ROOM_PRICE: (f64, f64) = (1.0, 5.0);

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// Compute and the longest exchange.
    all: f32,
    /// What its devices are over the limit, all together.
    over: f32,
}

/// What a device has to do with its group, sums over the other members: alpha of what it sends to those that hold experts; alpha and, for all
/// experts, beta of what it receives.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    send: f32,
    receive: f32,
    receive_all: f32,
}

struct Relaxed<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    groups: Vec<Vec<u32>>,
    group_of: Vec<u32>,
    /// What x sends to c, at x n + c: alpha, and beta for all experts; and both at c n + x.
    alpha: Vec<f32>,
    beta: Vec<f32>,
    alpha_to: Vec<f32>,
    beta_to: Vec<f32>,
    /// All four of a pair, for who looks at a few pairs: `alpha_to`, `beta_to`, `alpha` and `beta`.
    pairs: Vec<[f32; 4]>,
    /// The same of each group's members alone.
    packed: Vec<Packed>,
    /// By device: how long it computes all experts for one device's tokens, and how many times that in a unit; its share at most, and as it is.
    compute: Vec<f32>,
    rate: Vec<f32>,
    most: Vec<f32>,
    share: Vec<f32>,
    /// The share of so many of the dearest experts.
    dearest: Vec<f32>,
    /// Whether it holds experts, as its group's sums have it.
    holds: Vec<bool>,
    sums: Vec<Sums>,
    /// What it sends, for alpha and beta.
    sent: Vec<f32>,
    /// What x would have to do with group g if it came, at g n + x: alpha and beta of what it would send; alpha and, for all experts, beta of what it would
    /// receive.
    joining: Vec<[f32; 4]>,
    /// By group: the sum of its members' rates, how long it computes, by how much that is longer than it must be, and all that it takes.
    rates: Vec<f32>,
    compute_as_is: Vec<f32>,
    slack: Vec<f32>,
    times: Vec<Times>,
    /// By group: how many experts it has room for, and for what share of all it has none with its members' shares; the price of such a share.
    room: Vec<usize>,
    without_room: Vec<f32>,
    room_price: f32,
    excess: f32,
    least: f32,
    slowest: Option<usize>,
    /// ms of a unit.
    unit: f64,
    gamma: f64,
    start_ms: f64,
    target_ms: f64,
    limit: f32,
    ops: u64,
    trials: [Trial; 2],
}

/// What annealing came by.
struct Shares {
    groups: Vec<Vec<u32>>,
    share: Vec<f32>,
}

impl<'s, 'p, 'a, L: LinkTable> Relaxed<'s, 'p, 'a, L> {
    fn new(placed: &'s Placed<'p, 'a, L>, start: &FoundPlaced) -> Self {
        let (n, problem) = (placed.problem.n(), placed.problem);
        let (eta, mb) = (problem.workload.p2p_frequency, placed.received_mb(placed.experts.total));
        let (mut group_of, mut share) = (vec![IDLE; n], vec![0.0; n]);
        for (g, (members, placement)) in start.groups.iter().zip(&start.placements).enumerate() {
            for (&i, held) in members.iter().zip(placement) {
                group_of[i as usize] = g as u32;
                share[i as usize] = placed.experts.share(placed.load(held)) as f32;
            }
        }
        let gamma = problem.gamma(start.groups.iter().map(Vec::len).sum());
        let slowest = problem.slowest(|i| group_of[i as usize]);
        let all_reduce = problem.all_reduce_over(start.groups.len(), slowest);
        let unit = ((start.objective_ms - all_reduce) / gamma).max(f64::MIN_POSITIVE);
        let in_units = |ms: f64| ((ms / unit) as f32).min(FAR);
        let link = |at: usize| problem.links.link(at / n, at % n);
        let is_link = |at: usize| at / n != at % n;
        let of_links = |of: &dyn Fn(usize) -> f64| -> Vec<f32> {
            (0..n * n).map(|at| if is_link(at) { in_units(eta * of(at)) } else { 0.0 }).collect()
        };
        let (mut dearest, mut all) = (vec![0.0], 0.0);
        for &e in &placed.experts.order {
            all += placed.experts.share(placed.experts.costs[e as usize]);
            dearest.push(all as f32);
        }
        let experts = placed.experts.costs.len();
        let most = |memory: &u64| dearest[(*memory).min(experts as u64) as usize];
        let mut relaxed = Relaxed {
            placed,
            groups: start.groups.clone(),
            group_of,
            alpha: of_links(&|at| link(at).alpha_ms),
            beta: of_links(&|at| link(at).beta_ms_per_mb * mb),
            alpha_to: Vec::new(),
            beta_to: Vec::new(),
            pairs: Vec::new(),
            packed: vec![Packed::new(n); start.groups.len()],
            compute: problem.flops.iter().map(|flops| in_units(placed.experts.total / flops).max(AT_ONCE)).collect(),
            rate: Vec::new(),
            most: problem.memory.iter().map(most).collect(),
            share,
            dearest,
            holds: vec![false; n],
            sums: vec![Sums::default(); n],
            sent: vec![0.0; n],
            joining: vec![[0.0; 4]; n * start.groups.len()],
            rates: vec![0.0; start.groups.len()],
            compute_as_is: vec![0.0; start.groups.len()],
            slack: Vec::new(),
            times: vec![Times::default(); start.groups.len()],
            room: Vec::new(),
            without_room: vec![0.0; start.groups.len()],
            room_price: 0.0,
            excess: 0.0,
            least: LEAST / experts as f32,
            slowest,
            unit,
            gamma,
            start_ms: start.objective_ms,
            target_ms: 0.0,
            limit: 1.0,
            ops: (n * n) as u64,
            trials: Default::default(),
        };
        relaxed.rate = relaxed.compute.iter().map(|compute| 1.0 / compute).collect();
        let to = |from: &[f32]| (0..n * n).map(|at| from[at % n * n + at / n]).collect();
        (relaxed.alpha_to, relaxed.beta_to) = (to(&relaxed.alpha), to(&relaxed.beta));
        let pair = |at: usize| [relaxed.alpha_to[at], relaxed.beta_to[at], relaxed.alpha[at], relaxed.beta[at]];
        relaxed.pairs = (0..n * n).map(pair).collect();
        for (packed, members) in relaxed.packed.iter_mut().zip(&relaxed.groups) {
            packed.pack(members, &relaxed.beta_to, n);
        }
        let slack = |members: &Vec<u32>| {
            let least = relaxed.least_compute(members, FAR).unwrap_or(FAR);
            (relaxed.compute_of(members) / least - 1.0).clamp(SLACK.0, SLACK.1)
        };
        relaxed.slack = relaxed.groups.iter().map(slack).collect();
        relaxed.room = relaxed.groups.iter().map(|members| relaxed.room_of(members)).collect();
        (0..relaxed.groups.len()).for_each(|g| relaxed.join(g));
        relaxed
    }

    fn n(&self) -> usize {
        self.group_of.len()
    }

    fn all_reduce(&self, slowest: Option<usize>) -> f64 {
        self.placed.problem.all_reduce_over(self.groups.len(), slowest)
    }

    fn limit_of(&self, slowest: Option<usize>) -> f32 {
        ((self.target_ms - self.all_reduce(slowest)) / self.gamma / self.unit) as f32
    }

    /// The objective, with the last price of what there is no room for.
    fn objective_ms(&self) -> f64 {
        let more = ROOM_PRICE.1 as f32 - self.room_price;
        let groups = self.times.iter().zip(&self.without_room);
        let longest = groups.map(|(times, without_room)| times.all + more * without_room).fold(0.0, larger);
        self.gamma * f64::from(longest) * self.unit + self.all_reduce(self.slowest)
    }

    /// The group that takes longest.
    fn worst(&self) -> usize {
        (0..self.times.len()).fold(0, |worst, g| if self.times[g].all > self.times[worst].all { g } else { worst })
    }

    /// Aims below an objective, by a share of what of it is not the all-reduce, and adds up everything anew.
    fn aim(&mut self, objective_ms: f64, under: f64) {
        let all_reduce = self.all_reduce(self.slowest);
        self.target_ms = (objective_ms - all_reduce) * (1.0 - under) + all_reduce;
        self.limit = self.limit_of(self.slowest);
        let n = self.n();
        for g in 0..self.groups.len() {
            for x in self.groups[g].iter().map(|&x| x as usize) {
                self.sums[x] = self.sums_of(x as u32, &self.groups[g]);
                self.holds[x] = self.share[x] > 0.0;
                let row = &self.beta[x * n..][..n];
                let sent: f32 = self.groups[g].iter().map(|&c| row[c as usize] * self.share[c as usize]).sum();
                self.sent[x] = self.sums[x].send + sent;
            }
            self.compute_as_is[g] = self.compute_of(&self.groups[g]);
            self.times[g] = self.times_of(g, self.limit);
        }
        self.excess = self.times.iter().map(|times| times.over).sum();
    }

    /// Adds up what each device would have to do with group `g`, and the rates of its members.
    fn join(&mut self, g: usize) {
        let n = self.n();
        self.rates[g] = self.groups[g].iter().map(|&c| self.rate[c as usize]).sum();
        let of = |&c: &u32| {
            let share = self.share[c as usize];
            (c as usize * n, [indicator(share > 0.0), share, 1.0, 1.0])
        };
        let members: Vec<(usize, [f32; 4])> = self.groups[g].iter().map(of).collect();
        for (x, joining) in self.joining[g * n..][..n].iter_mut().enumerate() {
            let mut sum = [0.0; 4];
            for (row, by) in &members {
                let pair = &self.pairs[row + x];
                sum = std::array::from_fn(|at| sum[at] + by[at] * pair[at]);
            }
            *joining = sum;
        }
    }

    /// The sums of device `x` as a member of a group.
    fn sums_of(&self, x: u32, members: &[u32]) -> Sums {
        let (n, x) = (self.n(), x as usize);
        let mut sums = Sums::default();
        for c in members.iter().map(|&c| c as usize) {
            // Of a device with itself both are 0.
            if self.share[c] > 0.0 {
                sums.send += self.alpha[x * n + c];
            }
            sums.receive += self.alpha[c * n + x];
            sums.receive_all += self.beta[c * n + x];
        }
        sums
    }

    /// How long a group computes with the shares that its members have.
    fn compute_of(&self, members: &[u32]) -> f32 {
        let end = members.iter().map(|&i| self.compute[i as usize] * self.share[i as usize]).fold(0.0, f32::max);
        members.len() as f32 * end
    }

    /// A group's times with the shares that its members have.
    fn times_of(&self, g: usize, limit: f32) -> Times {
        let compute = self.compute_as_is[g] + self.room_price * self.without_room[g];
        let mut times = Times { all: compute, over: 0.0 };
        for x in self.groups[g].iter().map(|&x| x as usize) {
            exchange(&mut times, compute, &self.sums[x], self.share[x], self.sent[x], limit);
        }
        times
    }

    /// Makes a random change, unless the excess would be over `most`.
    fn random_change(&mut self, random: &mut Random, most: f32) -> bool {
        let several = self.groups.len() > 1;
        let g = if random.below(4) < WORST_IN_FOUR { self.worst() } else { random.below(self.groups.len()) };
        let kind = random.below(16);
        if kind < STAYS || !several {
            let i = self.groups[g][random.below(self.groups[g].len())];
            let slack = self.slack[g] * [0.5, 0.8, 1.25, 2.0][random.below(4)];
            let turn = random.below(2) == 0;
            return self.stay(g, turn.then_some(i), slack.clamp(SLACK.0, SLACK.1), most);
        }
        let Some((i, h, back)) = self.most_promising(g, kind < STAYS + SWAPS, random, most) else { return false };
        self.go((i, g, h), back, most)
    }

    /// Group `g` gets another slack, and one device holds experts where it held none, or none.
    fn stay(&mut self, g: usize, turned: Option<u32>, slack: f32, most: f32) -> bool {
        let members = std::mem::take(&mut self.groups[g]);
        let before = turned.map(|i| (i as usize, self.share[i as usize]));
        if let Some((i, share)) = before {
            self.share[i] = if share > 0.0 { 0.0 } else { 1.0 / members.len() as f32 };
        }
        let room = most - self.excess + self.times[g].over;
        let after = self.after((0, g), (&members, None), Change::default(), slack, self.limit, room);
        self.groups[g] = members;
        let Some(times) = after else {
            before.into_iter().for_each(|(i, share)| self.share[i] = share);
            return false;
        };
        self.slack[g] = slack;
        self.enter(0, g, times);
        self.excess = self.times.iter().map(|times| times.over).sum();
        true
    }

    /// Device `i` goes from group `g` to group `h`, and `back` from there to `g`.
    fn go(&mut self, (i, g, h): (u32, usize, usize), back: Option<u32>, most: f32) -> bool {
        let to = |x: u32| match x {
            _ if x == i => h as u32,
            _ if Some(x) == back => g as u32,
            _ => self.group_of[x as usize],
        };
        let slowest = self.placed.problem.slowest_after(self.slowest, [Some(i), back], to);
        self.ops += 24 + 2 * slowest.unwrap_or(0) as u64;
        let (limit, others) = if slowest == self.slowest {
            (self.limit, self.excess - self.times[g].over - self.times[h].over)
        } else {
            let limit = self.limit_of(slowest);
            let others = (0..self.groups.len()).filter(|&k| k != g && k != h);
            self.ops += (self.n() * self.n() / self.groups.len()) as u64 / 2;
            (limit, others.map(|k| self.times_of(k, limit).over).sum())
        };
        let changes = [Change { out: back, into: Some(i) }, Change { out: Some(i), into: back }];
        let mut changed: [Vec<u32>; 2] = Default::default();
        let mut places = [None; 2];
        for at in 0..2 {
            changed[at].extend_from_slice(&self.groups[[h, g][at]]);
            places[at] = changes[at].make(&mut changed[at]);
        }
        // Who comes has what the other had, or an even share.
        let before = [Some(i), back].map(|x| x.map_or(0.0, |x| self.share[x as usize]));
        self.share[i as usize] = if back.is_some() { before[1] } else { 1.0 / changed[0].len() as f32 };
        back.into_iter().for_each(|j| self.share[j as usize] = before[0]);
        let [into_h, into_g] = changes;
        let there = self.after((0, h), (&changed[0], places[0]), into_h, self.slack[h], limit, most - others);
        let both = there.and_then(|there| {
            let room = most - others - there.over;
            let here = self.after((1, g), (&changed[1], places[1]), into_g, self.slack[g], limit, room)?;
            Some((there, here))
        });
        let Some((there, here)) = both else {
            self.share[i as usize] = before[0];
            back.into_iter().for_each(|j| self.share[j as usize] = before[1]);
            return false;
        };
        [self.groups[h], self.groups[g]] = changed;
        self.group_of[i as usize] = h as u32;
        back.into_iter().for_each(|j| self.group_of[j as usize] = g as u32);
        self.enter(0, h, there);
        self.enter(1, g, here);
        self.slowest = slowest;
        if limit != self.limit {
            self.limit = limit;
            for k in (0..self.groups.len()).filter(|&k| k != g && k != h) {
                self.times[k] = self.times_of(k, limit);
            }
        }
        self.excess = self.times.iter().map(|times| times.over).sum();
        true
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
    best: Option<Shares>,
    temperature: f64,
    steps: u64,
    random: Random,
}

impl<'s, 'p, 'a, L: LinkTable> Chain<'s, 'p, 'a, L> {
    pub fn new(
        placed: &'s Placed<'p, 'a, L>,
        start: &FoundPlaced,
        schedule: Schedule,
        budget: u64,
        random: Random,
    ) -> Self {
        let relaxed = Relaxed::new(placed, start);
        Chain { relaxed, schedule, budget, best_ms: f64::INFINITY, best: None, temperature: 0.0, steps: 0, random }
    }

    /// The least that it came by, ms.
    pub fn best_ms(&self) -> f64 {
        self.best_ms
    }

    /// The best that it came by, with experts dealt out; `None` where there is none, or a group has no room for all.
    pub fn into_best(self) -> Option<FoundPlaced> {
        self.best?.dealt(self.relaxed.placed)
    }

    /// Goes on until it has spent this share of its budget.
    pub fn advance(&mut self, exponential: &[f64], share: f64) {
        let Chain { relaxed, schedule, budget, best_ms, best, temperature, steps, random } = self;
        let budget = *budget as f64;
        while (relaxed.ops as f64) < share * budget {
            if steps.is_multiple_of(SET_EVERY) {
                let progress = relaxed.ops as f64 / budget;
                let from_ms = if best.is_some() { *best_ms } else { relaxed.start_ms };
                let work = (from_ms - relaxed.all_reduce(relaxed.slowest)) / relaxed.gamma / relaxed.unit;
                *temperature = work * between(schedule.temperature, progress);
                relaxed.room_price = between(ROOM_PRICE, progress) as f32;
                relaxed.aim(from_ms, between(schedule.under, progress));
                relaxed.ops += (relaxed.n() * relaxed.n() / relaxed.groups.len()) as u64 / 2;
            }
            *steps += 1;
            relaxed.ops += 16;
            let most = relaxed.excess + (*temperature * exponential[random.below(EXPONENTIAL)]) as f32;
            if relaxed.random_change(random, most) && relaxed.ops as f64 > ANSWERS_FROM * budget {
                let now_ms = relaxed.objective_ms();
                if now_ms < *best_ms {
                    *best_ms = now_ms;
                    *best = Some(Shares { groups: relaxed.groups.clone(), share: relaxed.share.clone() });
                }
            }
        }
    }
}

#[inline]
fn indicator(yes: bool) -> f32 {
    if yes { 1.0 } else { 0.0 }
}

/// Counts in what one device of a group exchanges.
#[inline]
fn exchange(times: &mut Times, compute: f32, sums: &Sums, share: f32, sent: f32, limit: f32) {
    let received = if share > 0.0 { sums.receive + sums.receive_all * share } else { 0.0 };
    let all = compute + larger(received, sent);
    times.all = larger(all, times.all);
    times.over += larger(all - limit, 0.0);
}

impl Shares {
    /// The groups with experts dealt out to the shares; `None` where a group has no room for all.
    fn dealt<L: LinkTable>(self, placed: &Placed<L>) -> Option<FoundPlaced> {
        let Shares { mut groups, share } = self;
        groups.iter_mut().for_each(|members| members.sort_unstable());
        let of = |members: &Vec<u32>| dealt(placed, members, &share);
        let placements = groups.iter().map(of).collect::<Option<Vec<_>>>()?;
        Some(FoundPlaced::new(placed, groups, placements))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Links, Matrix};
    use crate::objective::Problem;
    use crate::search::exponential;

    /// Six devices of which the even ones, and the odd ones, have good links; the start has them mixed.
    pub(super) fn mixed(memory: u64) -> (Cluster, Workload) {
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
            let mut chain = Chain::new(&placed, &start, HOT, 1_000_000, Random(1));
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

    /// What a group takes after changes, of which sums are kept, is what it takes when all is added up anew.
    #[test]
    fn sums_are_those_of_the_groups() {
        sums_are_those_of(false, vec![vec![0, 1, 2], vec![3, 4], vec![5]]);
        // Room for no more than all, half of it with the slow.
        sums_are_those_of(true, vec![vec![0, 1, 2], vec![3, 4, 5]]);
    }

    fn sums_are_those_of(tight: bool, groups: Vec<Vec<u32>>) {
        let (mut cluster, workload) = mixed(if tight { 3 } else { 12 });
        for device in cluster.devices.iter_mut().filter(|device| tight && device.id % 3 == 2) {
            (device.memory_experts, device.flop_per_ms) = (6, 3e8);
        }
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let start = FoundPlaced::new(&placed, groups, placements);
        let mut relaxed = Relaxed::new(&placed, &start);
        relaxed.room_price = 0.01;
        relaxed.aim(start.objective_ms, 0.1);
        let (mut random, mut changes, mut priced) = (Random(3), 0, 0);
        let mut before = relaxed.group_of.clone();
        for _ in 0..2_000 {
            if !relaxed.random_change(&mut random, relaxed.excess + 2.0) {
                continue;
            }
            changes += u32::from(relaxed.group_of != before);
            before.clone_from(&relaxed.group_of);
            for (g, members) in relaxed.groups.iter().enumerate() {
                let (kept, limit) = (relaxed.times[g], relaxed.limit);
                let share: f32 = members.iter().map(|&i| relaxed.share[i as usize]).sum();
                assert!((share - 1.0).abs() < 1e-3, "{share}");
                for &i in members {
                    let (kept, anew) = (relaxed.sums[i as usize], relaxed.sums_of(i, members));
                    let off = (kept.send - anew.send).abs().max((kept.receive - anew.receive).abs());
                    assert!(off.max((kept.receive_all - anew.receive_all).abs()) < 1e-3, "{kept:?} {anew:?}");
                    let to = |&c: &u32| relaxed.beta[i as usize * 6 + c as usize] * relaxed.share[c as usize];
                    let sent = anew.send + members.iter().map(to).sum::<f32>();
                    assert!((relaxed.sent[i as usize] - sent).abs() < 1e-3, "{} {sent}", relaxed.sent[i as usize]);
                }
                assert_eq!(relaxed.compute_as_is[g], relaxed.compute_of(members));
                let outside = (0..6).filter(|x| !members.contains(x));
                for (x, [alpha, beta, receive, receive_all]) in
                    outside.map(|x| (x, relaxed.joining[g * 6 + x as usize]))
                {
                    let anew = relaxed.sums_of(x, members);
                    let to = |&c: &u32| relaxed.beta[x as usize * 6 + c as usize] * relaxed.share[c as usize];
                    let off = (alpha - anew.send).abs().max((beta - members.iter().map(to).sum::<f32>()).abs());
                    let off = off.max((receive - anew.receive).abs()).max((receive_all - anew.receive_all).abs());
                    assert!(off < 1e-3, "{x} would have {off} else to do with {members:?}");
                }
                let shares: Vec<f32> = members.iter().map(|&i| relaxed.share[i as usize]).collect();
                let without_room = relaxed.without_room(members, &shares, &mut Vec::new()).unwrap();
                assert!((relaxed.without_room[g] - without_room).abs() < 1e-5, "{without_room}");
                priced += u32::from(without_room > 0.0);
                for (place, &c) in members.iter().enumerate() {
                    let sent = members.iter().map(|&x| relaxed.beta_to[c as usize * 6 + x as usize]);
                    assert!(sent.eq(relaxed.packed[g].row(place)[..members.len()].iter().copied()));
                    assert_eq!(relaxed.holds[c as usize], relaxed.share[c as usize] > 0.0);
                }
                // The compute that a trial had room for is at least what its shares take.
                let anew = relaxed.times_of(g, limit);
                assert!(anew.all < kept.all + 1e-3 && anew.over < kept.over + 1e-2, "{kept:?} {anew:?}");
            }
        }
        assert!(changes > 50, "{changes}");
        assert_eq!(priced > 0, tight, "{priced}");
    }
}
