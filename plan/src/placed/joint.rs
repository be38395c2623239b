//! Groups and placement improved together: two devices of different groups change places, each taking the other's experts; a device goes to another
//! group, where others give it experts, and leaves its own to those that stay; or experts move inside a group. The objective is exact.
//!
//! For every group and every device, of the group or not, the sums of its links with the members are kept, so that what a device comes to in another
//! group takes no pass over that group. It is most often too much, and then nothing else is looked at; where it is nearly good, experts follow.
//!
//! What is annealed is by how much all devices together are over a target. At first that is far below what was found, so that every device counts; it
//! rises to little below, when only the longest ones do.

mod follow;
mod give;
mod moves;

use super::Placed;
use super::search::FoundPlaced;
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::random::Random;
use crate::search::{EXPONENTIAL, between};

/// Sums are added up anew after so many changes, as each change rounds them.
const REFRESH: u64 = 4096;
/// Steps after which temperature and target are set anew.
const SET_EVERY: u64 = 64;

/// Where devices change groups the excess may be too large at first by so much of the limit for each device of both groups.
const SLACK: f64 = 0.005;

/// How annealing goes, at first and at last. All are shares of the work of the best objective so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// The target is so much under the best objective.
    pub under: (f64, f64),
    pub temperature: (f64, f64),
    /// Whether what it begins with is no answer of it.
    pub forgetful: bool,
}

/// Of a group and a device x, eta times the sums over the members c of: alpha and beta of what x sends to c, if that holds experts, and by the FLOP
/// of these; alpha and beta of what c sends to x likewise, which all of a group do.
type Lanes = [f64; 4];

/// What a pair of devices c and x adds to these, at c n + x; nothing where both are the same.
struct Pairs {
    n: usize,
    /// Of what x sends to c.
    to: Vec<[f64; 2]>,
    /// Of what c sends to x.
    from: Vec<[f64; 2]>,
}

impl Pairs {
    fn new<L: LinkTable>(placed: &Placed<L>) -> Self {
        let (n, eta, mb_per_flop) =
            (placed.problem.n(), placed.problem.workload.p2p_frequency, placed.received_mb(1.0));
        let link = |from: usize, to: usize| {
            let link = placed.problem.links.link(from, to);
            if from == to { [0.0; 2] } else { [eta * link.alpha_ms, eta * link.beta_ms_per_mb * mb_per_flop] }
        };
        let all = |of: &dyn Fn(usize, usize) -> [f64; 2]| (0..n * n).map(|at| of(at / n, at % n)).collect();
        Pairs { n, to: all(&|c, x| link(x, c)), from: all(&link) }
    }
}

/// What one group takes, ms.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// Who computes for longest, and how long for one device's tokens.
    last: usize,
    end: f64,
    /// The longest compute.
    compute: f64,
    /// eta times the longest exchange.
    longest: f64,
    /// What its devices are over the limit, all together.
    over: f64,
}

impl Times {
    /// Counts in how long a device computes.
    #[inline]
    fn computes(&mut self, device: usize, end: f64) {
        if end >= self.end {
            (self.last, self.end) = (device, end);
        }
    }
}

/// What a device is to a group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Role {
    member: bool,
    /// Whether it holds experts, and their FLOP.
    holds: bool,
    load: f64,
}

/// A device whose role in a group changes.
#[derive(Clone, Copy, Debug)]
struct Part {
    device: usize,
    after: Role,
    /// What changes: whether it is a member that holds experts (from -1 to 1), the FLOP of these, whether it is a member (from -1 to 1).
    holds: f64,
    load: f64,
    member: f64,
}

impl Part {
    fn new(device: usize, before: Role, after: Role) -> Part {
        let counts = |role: Role| {
            let one = |yes: bool| f64::from(u8::from(yes));
            [one(role.member && role.holds), if role.member { role.load } else { 0.0 }, one(role.member)]
        };
        let (old, new) = (counts(before), counts(after));
        let [holds, load, member] = std::array::from_fn(|k| new[k] - old[k]);
        Part { device, after, holds, load, member }
    }

    /// What it means to the sums of device `x`.
    #[inline]
    fn add(&self, sums: &mut Lanes, pairs: &Pairs, x: usize) {
        let at = self.device * pairs.n + x;
        let to = pairs.to[at];
        sums[0] += self.holds * to[0];
        sums[1] += self.load * to[1];
        // Most changes are of who holds what in a group.
        if self.member != 0.0 {
            let from = pairs.from[at];
            sums[2] += self.member * from[0];
            sums[3] += self.member * from[1];
        }
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
    pairs: Pairs,
    /// Of group g and device x at g n + x.
    sums: Vec<Lanes>,
    /// By device: its experts, and what the sums have of it.
    experts: Vec<Vec<u32>>,
    roles: Vec<Role>,
    /// By device: FLOP of its experts, and how long it computes for one device's tokens, ms.
    load: Vec<f64>,
    ends: Vec<f64>,
    times: Vec<Times>,
    /// FLOP per ms of each group.
    rates: Vec<f64>,
    excess: f64,
    slowest: Option<usize>,
    target_ms: f64,
    limit: f64,
    /// Of the work of all devices that are in a group.
    gamma: f64,
    /// See [`SLACK`].
    slack: f64,
    changes: u64,
    ops: u64,
    /// Memory that is used again.
    parts: [Vec<Part>; 2],
    given: Vec<(u32, u32, u32)>,
    before: follow::Before,
    relief: Vec<(f64, u32)>,
}

impl<'s, 'p, 'a, L: LinkTable> Joint<'s, 'p, 'a, L> {
    fn new(placed: &'s Placed<'p, 'a, L>, found: &FoundPlaced) -> Self {
        let n = placed.problem.n();
        let mut joint = Joint {
            placed,
            groups: found.groups.clone(),
            group_of: vec![IDLE; n],
            pairs: Pairs::new(placed),
            sums: Vec::new(),
            experts: vec![Vec::new(); n],
            roles: vec![Role::default(); n],
            load: vec![0.0; n],
            ends: vec![0.0; n],
            times: vec![Times::default(); found.groups.len()],
            rates: Vec::new(),
            excess: 0.0,
            slowest: None,
            target_ms: 0.0,
            limit: f64::INFINITY,
            gamma: placed.problem.gamma(found.groups.iter().map(Vec::len).sum()),
            slack: SLACK,
            changes: 0,
            ops: (n * n) as u64,
            parts: Default::default(),
            given: Vec::new(),
            before: follow::Before::default(),
            relief: Vec::new(),
        };
        for (g, (members, placement)) in found.groups.iter().zip(&found.placements).enumerate() {
            for (&i, held) in members.iter().zip(placement) {
                joint.group_of[i as usize] = g as u32;
                joint.experts[i as usize].clone_from(held);
            }
        }
        joint.slowest = placed.problem.slowest(|i| joint.group_of[i as usize]);
        joint.refresh();
        joint
    }

    fn n(&self) -> usize {
        self.group_of.len()
    }

    fn group(&self, i: u32) -> Option<usize> {
        let g = self.group_of[i as usize];
        (g != IDLE).then_some(g as usize)
    }

    /// How many experts device `i` has room for.
    fn memory(&self, i: u32) -> usize {
        self.placed.problem.memory[i as usize].min(usize::MAX as u64) as usize
    }

    /// The role of a member of a group with its experts as they are.
    fn role(&self, i: usize) -> Role {
        Role { member: true, holds: !self.experts[i].is_empty(), load: self.load[i] }
    }

    /// What the sums of its group are to have of device `i`, whose experts have changed.
    fn settle(&mut self, i: usize) {
        self.roles[i] = self.role(i);
        self.ends[i] = self.load[i] / self.placed.problem.flops[i];
    }

    /// Adds up everything anew.
    fn refresh(&mut self) {
        let n = self.n();
        let flops = &self.placed.problem.flops;
        self.rates = self.groups.iter().map(|members| members.iter().map(|&i| flops[i as usize]).sum()).collect();
        for i in 0..n {
            self.load[i] = self.placed.load(&self.experts[i]);
            self.settle(i);
        }
        self.sums.clear();
        self.sums.resize(self.groups.len() * n, Lanes::default());
        for (members, sums) in self.groups.iter().zip(self.sums.chunks_mut(n)) {
            for &i in members {
                let part = Part::new(i as usize, Role::default(), self.roles[i as usize]);
                sums.iter_mut().enumerate().for_each(|(x, sums)| part.add(sums, &self.pairs, x));
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
        let mut times = self.computing(members.iter().copied());
        times.compute = members.len() as f64 * times.end;
        for &i in members {
            exchange(&mut times, &self.sums[g * self.n() + i as usize], self.roles[i as usize], limit);
        }
        times
    }

    /// Who of these computes for longest.
    fn computing(&self, devices: impl Iterator<Item = u32>) -> Times {
        let mut times = Times::default();
        devices.for_each(|i| times.computes(i as usize, self.ends[i as usize]));
        times
    }

    /// What group `g` takes after a change; `None` as soon as it is seen to be over the limit by more than `most`.
    #[inline]
    fn after(&mut self, g: usize, parts: &[Part], limit: f64, most: f64) -> Option<Times> {
        let n = self.n();
        let (members, sums) = (&self.groups[g], &self.sums[g * n..][..n]);
        let flops = &self.placed.problem.flops;
        let (mut size, mut changing) = (members.len() as f64, 0u64);
        for part in parts {
            size += part.member;
            changing |= 1 << part.device;
        }
        let stays = |i: u32| changing >> i & 1 == 0;
        let before = self.times[g];
        let mut times = match stays(before.last as u32) {
            true => Times { last: before.last, end: before.end, ..Times::default() },
            false => self.computing(members.iter().copied().filter(|&i| stays(i))),
        };
        for part in parts.iter().filter(|part| part.after.member) {
            times.computes(part.device, part.after.load / flops[part.device]);
        }
        times.compute = size * times.end;
        if size * (times.compute - limit) > most {
            self.ops += members.len() as u64 / 8;
            return None;
        }
        let after = |i: usize| {
            let mut after = sums[i];
            parts.iter().for_each(|part| part.add(&mut after, &self.pairs, i));
            after
        };
        let mut seen = 0;
        // Those that change are most often too much already.
        for part in parts.iter().filter(|part| part.after.member) {
            exchange(&mut times, &after(part.device), part.after, limit);
            seen += 1;
        }
        if times.over <= most {
            for &i in members {
                if stays(i) {
                    let i = i as usize;
                    exchange(&mut times, &after(i), self.roles[i], limit);
                    seen += 1;
                    if times.over > most {
                        break;
                    }
                }
            }
        }
        self.ops += (seen * parts.len()) as u64 + members.len() as u64 / 8;
        (times.over <= most).then_some(times)
    }

    /// Enters a change into the sums of group `g`.
    fn enter(&mut self, g: usize, parts: &[Part]) {
        let n = self.n();
        let sums = &mut self.sums[g * n..][..n];
        for part in parts {
            sums.iter_mut().enumerate().for_each(|(x, sums)| part.add(sums, &self.pairs, x));
        }
        self.ops += (parts.len() * n) as u64 / 2;
    }

    fn all_reduce(&self, slowest: Option<usize>) -> f64 {
        self.placed.problem.all_reduce_over(self.groups.len(), slowest)
    }

    fn limit_of(&self, slowest: Option<usize>) -> f64 {
        (self.target_ms - self.all_reduce(slowest)) / self.gamma
    }

    fn objective_ms(&self) -> f64 {
        let worst_ms = self.times.iter().map(|times| times.compute + times.longest).fold(0.0, f64::max);
        self.gamma * worst_ms + self.all_reduce(self.slowest)
    }

    /// Aims below an objective, by a share of what of it is not the all-reduce.
    fn aim(&mut self, objective_ms: f64, under: f64) {
        let all_reduce = self.all_reduce(self.slowest);
        self.target_ms = (objective_ms - all_reduce) * (1.0 - under) + all_reduce;
        self.weigh(self.limit_of(self.slowest));
    }

    /// The group that takes longest.
    fn worst(&self) -> usize {
        let ms = |g: usize| self.times[g].compute + self.times[g].longest;
        (0..self.times.len()).fold(0, |worst, g| if ms(g) > ms(worst) { g } else { worst })
    }
}

/// What a device sends and receives, given its sums, ms.
#[inline]
fn exchanged_ms(sums: &Lanes, role: Role) -> (f64, f64) {
    (sums[0] + sums[1], if role.holds { sums[2] + sums[3] * role.load } else { 0.0 })
}

/// The longer of both, ms.
#[inline]
fn exchange_ms(sums: &Lanes, role: Role) -> f64 {
    let (sent, received) = exchanged_ms(sums, role);
    larger(sent, received)
}

/// Counts in what one device of a group exchanges.
#[inline]
fn exchange(times: &mut Times, sums: &Lanes, role: Role, limit: f64) {
    let ms = exchange_ms(sums, role);
    times.longest = larger(times.longest, ms);
    times.over += larger(times.compute + ms - limit, 0.0);
}

/// The larger of two numbers; in a loop, what `f64::max` does for NaN takes time.
#[inline]
fn larger(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

fn sorted(list: &[u32]) -> Vec<u32> {
    let mut list = list.to_vec();
    list.sort_unstable();
    list
}

/// An annealing from one grouping, which goes on where it was stopped.
pub(super) struct Chain<'s, 'p, 'a, L> {
    joint: Joint<'s, 'p, 'a, L>,
    schedule: Schedule,
    /// Links that it looks at in all.
    budget: u64,
    start: FoundPlaced,
    /// The least that it came by, ms: of `start`, until there is an answer.
    best_ms: f64,
    /// The groups of that and, by device, the experts; without any, that is no better than `start`.
    best: (Vec<Vec<u32>>, Vec<Vec<u32>>),
    temperature: f64,
    steps: u64,
    random: Random,
}

impl<'s, 'p, 'a, L: LinkTable> Chain<'s, 'p, 'a, L> {
    pub fn new(
        placed: &'s Placed<'p, 'a, L>,
        start: FoundPlaced,
        schedule: Schedule,
        budget: u64,
        random: Random,
    ) -> Self {
        Chain {
            joint: Joint::new(placed, &start),
            schedule,
            budget,
            best_ms: start.objective_ms,
            start,
            best: Default::default(),
            temperature: 0.0,
            steps: 0,
            random,
        }
    }

    /// The least that it came by, ms.
    pub fn best_ms(&self) -> f64 {
        self.best_ms
    }

    /// The best that it came by; what it began with, if that is not better and the schedule is not forgetful.
    pub fn into_best(self) -> FoundPlaced {
        let (groups, experts) = self.best;
        if groups.is_empty() {
            return self.start;
        }
        let groups: Vec<Vec<u32>> = groups.iter().map(|members| sorted(members)).collect();
        let held = |members: &Vec<u32>| members.iter().map(|&i| sorted(&experts[i as usize])).collect();
        let placements: Vec<Vec<Vec<u32>>> = groups.iter().map(held).collect();
        let found = FoundPlaced::new(self.joint.placed, groups, placements);
        if self.schedule.forgetful || found.objective_ms < self.start.objective_ms { found } else { self.start }
    }

    /// Goes on until it has spent this share of its budget.
    pub fn advance(&mut self, exponential: &[f64], share: f64) {
        let Chain { joint, schedule, budget, best_ms, best, temperature, steps, random, .. } = self;
        let end = (*budget as f64 * share) as u64;
        while joint.ops < end {
            if steps.is_multiple_of(SET_EVERY) {
                let progress = joint.ops as f64 / *budget as f64;
                let work = (*best_ms - joint.all_reduce(joint.slowest)) / joint.gamma;
                *temperature = work * between(schedule.temperature, progress);
                joint.aim(*best_ms, between(schedule.under, progress));
            }
            *steps += 1;
            joint.ops += 6 + joint.groups.len() as u64 / 4;
            let most = joint.excess + *temperature * exponential[random.below(EXPONENTIAL)];
            if !joint.random_change(random, most) {
                continue;
            }
            joint.changes += 1;
            if joint.changes.is_multiple_of(REFRESH) {
                joint.refresh();
            }
            // A forgetful one's first answer is what it has come to in a tenth of its time, however good it is.
            let unanswered = schedule.forgetful && best.0.is_empty();
            let now_ms = joint.objective_ms();
            let is_answer = match unanswered {
                true => joint.ops >= *budget / 10,
                false => now_ms < *best_ms * (1.0 - 1e-12),
            };
            if is_answer {
                *best_ms = now_ms;
                best.0.clone_from(&joint.groups);
                best.1.clone_from(&joint.experts);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Link, Links, Matrix, Tier, Tiers};
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
        let schedule = Schedule { under: (0.3, 0.03), temperature: (0.05, 0.002), forgetful: false };
        let mut chain = Chain::new(&placed, start.clone(), schedule, 100_000, Random(1));
        chain.advance(&exponential(), 1.0);
        let found = chain.into_best();
        assert!(found.objective_ms < 0.7 * start.objective_ms, "{} {}", found.objective_ms, start.objective_ms);
        assert_eq!(found.groups.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        for placement in &found.placements {
            assert_eq!(sorted(&placement.concat()), [0, 1, 2, 3]);
        }
    }

    /// What groups take after changes, of which sums are kept, is what they take when all is added up anew.
    #[test]
    fn sums_are_those_of_the_groups() {
        let mut random = Random(5);
        let mut ms = || (0..81).map(|_| 0.01 * (1 + random.below(50)) as f64).collect::<Vec<f64>>();
        let links = Links::Matrix(Matrix::new(9, ms(), ms()));
        // More room than experts, so that some devices hold none.
        let devices = (0..9).map(|id| Device::new(id, "a", 1e9 * (1 + id % 2) as f64, 2 + id % 3)).collect();
        let costs = (0..4).map(|e| 1e8 * f64::from(1 + e)).collect();
        let workload = Workload { p2p_buffer_mb: 0.5, p2p_frequency: 2.0, ..Workload::new(costs) };
        let cluster = Cluster::new(devices, links);
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        let groups = vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7, 8]];
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let mut joint = Joint::new(&placed, &FoundPlaced::new(&placed, groups, placements));
        joint.aim(joint.objective_ms(), 0.5);
        joint.slack = 0.3;
        let (mut changes, mut refused) = (0, 0);
        for _ in 0..5_000 {
            let lists = |lists: &[Vec<u32>]| lists.iter().map(|list| sorted(list)).collect::<Vec<_>>();
            let before = [lists(&joint.groups), lists(&joint.experts)];
            // Much room or little, so that some changes are unmade when experts have passed on.
            let most = joint.excess + [0.0, 0.3, 3.0][random.below(3)];
            if joint.random_change(&mut random, most) {
                assert!(joint.excess <= most, "{} {most}", joint.excess);
                changes += 1;
            } else {
                assert_eq!([lists(&joint.groups), lists(&joint.experts)], before);
                refused += 1;
            }
            let numbers = |joint: &Joint<_>| {
                let times = joint.times.iter().map(|times| times.compute + times.longest + times.over);
                let roles = joint.roles.iter().map(|role| role.load + f64::from(u8::from(role.holds)));
                let kept = joint.load.iter().chain(&joint.ends).chain(&joint.rates).chain(joint.sums.iter().flatten());
                times.chain(roles).chain(kept.copied()).chain([joint.excess]).collect::<Vec<f64>>()
            };
            let kept = numbers(&joint);
            joint.refresh();
            for (kept, anew) in kept.iter().zip(&numbers(&joint)) {
                assert!((kept - anew).abs() < 1e-6, "{kept} {anew}");
            }
        }
        assert!(changes > 500 && refused > 500, "{changes} {refused}");
    }
}
