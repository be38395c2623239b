//! Groups and placement as one state for annealing: devices move or swap between groups, and experts between the devices of a group. The objective is
//! exact.
//!
//! The state keeps, for every group and every device, the sums of the device's links with the members. The exchange of a device in another group then
//! takes constant time, and most proposals are rejected by it.
//!
//! The target begins far below the best objective, so that every device counts, and rises until only the slowest ones do.

mod moves;

use super::found::FoundPlaced;
use super::{Placed, larger};
use crate::anneal::{Annealed, between};
use crate::cluster::LinkTable;
use crate::objective::IDLE;
use crate::placement::DeviceExperts;
use aristos_balance::Random;

/// Maximum number of devices, the bits of a set.
pub(crate) const MOST_DEVICES: usize = u128::BITS as usize;
/// Number of changes after which sums are recomputed, because each change rounds them.
const REFRESH: u64 = 4096;

/// First and last values over a chain, as shares of the best objective's work (the part that is not the all-reduce).
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// Distance of the target below the best objective.
    pub under: (f64, f64),
    pub temperature: (f64, f64),
}

/// Sums over the members c of a group, for a device x, times eta: alpha of x's links to members that hold experts; beta of those links by the FLOP held;
/// alpha and beta of the links from all members to x.
type Sums = [f64; 4];

/// The links of every pair of devices c and x, at c n + x, times eta: alpha, and beta by FLOP. Zero where c = x.
struct Pairs {
    n: usize,
    /// From x to c.
    to: Vec<[f64; 2]>,
    /// From c to x.
    from: Vec<[f64; 2]>,
}

impl Pairs {
    fn new<L: LinkTable>(placed: &Placed<L>, devices: &[u32]) -> Self {
        let (n, eta, mb_per_flop) = (devices.len(), placed.problem.workload.p2p_frequency, placed.received_mb(1.0));
        let link = |from: usize, to: usize| {
            let link = placed.problem.links.link(devices[from] as usize, devices[to] as usize);
            if from == to { [0.0; 2] } else { [eta * link.alpha_ms, eta * link.beta_ms_per_mb * mb_per_flop] }
        };
        let all = |of: &dyn Fn(usize, usize) -> [f64; 2]| (0..n * n).map(|at| of(at / n, at % n)).collect();
        Pairs { n, to: all(&|c, x| link(x, c)), from: all(&link) }
    }
}

/// Times of one group, ms.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// The device that computes longest, and how long for one device's tokens.
    last: usize,
    end: f64,
    /// The longest compute, for the tokens of all members.
    compute: f64,
    /// eta times the longest exchange.
    longest: f64,
    /// Excess of all members over the limit.
    over: f64,
}

impl Times {
    fn ms(&self) -> f64 {
        self.compute + self.longest
    }

    /// Takes a device's compute into account.
    #[inline]
    fn computes(&mut self, device: usize, end: f64) {
        if end >= self.end {
            (self.last, self.end) = (device, end);
        }
    }

    /// Takes a device's exchange into account.
    #[inline]
    fn exchanges(&mut self, sums: &Sums, role: Role, limit: f64) {
        let ms = exchange_ms(sums, role);
        self.longest = larger(self.longest, ms);
        self.over += larger(self.compute + ms - limit, 0.0);
    }
}

/// The role of a device in a group.
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
    /// Changes of: the number of members that hold experts (-1, 0 or 1), the FLOP held, the number of members.
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

    /// Updates the sums of device `x`.
    #[inline]
    fn add(&self, sums: &mut Sums, pairs: &Pairs, x: usize) {
        let at = self.device * pairs.n + x;
        let to = pairs.to[at];
        sums[0] += self.holds * to[0];
        sums[1] += self.load * to[1];
        // Most changes move experts inside a group.
        if self.member != 0.0 {
            let from = pairs.from[at];
            sums[2] += self.member * from[0];
            sums[3] += self.member * from[1];
        }
    }
}

/// The other groups after a change between two groups.
#[derive(Clone, Copy, Debug)]
struct Others {
    slowest: Option<usize>,
    workers: usize,
    limit: f64,
    /// Excess of the other groups.
    excess: f64,
}

/// Groups, or one group on its own. Devices are numbered by their place in `devices`.
pub(super) struct Joint<'s, 'p, 'a, L> {
    placed: &'s Placed<'p, 'a, L>,
    schedule: Schedule,
    flops: Vec<f64>,
    memory: Vec<usize>,
    /// The groups; where devices may be idle, the last one holds those.
    groups: Vec<Vec<u32>>,
    /// Groups without that last one.
    n_groups: usize,
    group_of: Vec<u32>,
    pairs: Pairs,
    /// Of group g and device x at g n + x; unused for idle devices.
    sums: Vec<Sums>,
    /// By device: its experts, and its role as `sums` has it.
    experts: Vec<Vec<u32>>,
    roles: Vec<Role>,
    /// By device: FLOP of its experts, and its compute for one device's tokens, ms.
    load: Vec<f64>,
    ends: Vec<f64>,
    times: Vec<Times>,
    /// FLOP per ms of each group.
    rates: Vec<f64>,
    excess: f64,
    slowest: Option<usize>,
    workers: usize,
    /// gamma by number of workers.
    gamma: Vec<f64>,
    target_ms: f64,
    limit: f64,
    changes: u64,
    ops: u64,
    /// Buffers that are reused.
    parts: [Vec<Part>; 2],
    given: Vec<(u32, u32, u32)>,
    load_before: Vec<f64>,
}

impl<'s, 'p, 'a, L: LinkTable> Joint<'s, 'p, 'a, L> {
    /// All devices, at most [`MOST_DEVICES`]; those of no group are idle.
    pub fn new(placed: &'s Placed<'p, 'a, L>, found: &FoundPlaced, allow_idle: bool, schedule: Schedule) -> Self {
        let all: Vec<u32> = (0..placed.problem.n() as u32).collect();
        Self::of(placed, &all, found.groups.clone(), &found.placements, allow_idle, schedule)
    }

    /// One group, as if there were no other.
    pub fn of_group(
        placed: &'s Placed<'p, 'a, L>,
        members: &[u32],
        placement: &DeviceExperts,
        schedule: Schedule,
    ) -> Self {
        let all = (0..members.len() as u32).collect();
        Self::of(placed, members, vec![all], std::slice::from_ref(placement), false, schedule)
    }

    fn of(
        placed: &'s Placed<'p, 'a, L>,
        devices: &[u32],
        mut groups: Vec<Vec<u32>>,
        placements: &[DeviceExperts],
        allow_idle: bool,
        schedule: Schedule,
    ) -> Self {
        let (n, problem) = (devices.len(), placed.problem);
        let (mut group_of, mut experts) = (vec![IDLE; n], vec![Vec::new(); n]);
        for (g, (members, placement)) in groups.iter().zip(placements).enumerate() {
            for (&i, held) in members.iter().zip(placement) {
                group_of[i as usize] = g as u32;
                experts[i as usize].clone_from(held);
            }
        }
        let n_groups = groups.len();
        let slowest = if n_groups > 1 { problem.slowest(|i| group_of[i as usize]) } else { None };
        let workers = groups.iter().map(Vec::len).sum();
        if allow_idle || group_of.contains(&IDLE) {
            groups.push((0..n as u32).filter(|&i| group_of[i as usize] == IDLE).collect());
            group_of.iter_mut().filter(|g| **g == IDLE).for_each(|g| *g = n_groups as u32);
        }
        let mut joint = Joint {
            placed,
            schedule,
            flops: devices.iter().map(|&i| problem.flops[i as usize]).collect(),
            memory: devices
                .iter()
                .map(|&i| usize::try_from(problem.memory[i as usize]).unwrap_or(usize::MAX))
                .collect(),
            n_groups,
            group_of,
            pairs: Pairs::new(placed, devices),
            sums: Vec::new(),
            experts,
            roles: vec![Role::default(); n],
            load: vec![0.0; n],
            ends: vec![0.0; n],
            times: vec![Times::default(); groups.len()],
            groups,
            rates: Vec::new(),
            excess: 0.0,
            slowest,
            workers,
            gamma: (0..=n).map(|workers| problem.gamma(workers)).collect(),
            target_ms: 0.0,
            limit: f64::INFINITY,
            changes: 0,
            ops: (n * n) as u64,
            parts: Default::default(),
            given: Vec::new(),
            load_before: Vec::new(),
        };
        joint.refresh();
        joint
    }

    fn n(&self) -> usize {
        self.group_of.len()
    }

    fn group(&self, i: u32) -> usize {
        self.group_of[i as usize] as usize
    }

    /// Whether this is the group of idle devices.
    fn is_idle(&self, g: usize) -> bool {
        g == self.n_groups
    }

    /// The role of a member with its experts as they are.
    fn role(&self, i: usize) -> Role {
        Role { member: true, holds: !self.experts[i].is_empty(), load: self.load[i] }
    }

    /// Updates a device's role after its experts have changed.
    fn settle(&mut self, i: usize) {
        self.roles[i] = self.role(i);
        self.ends[i] = self.load[i] / self.flops[i];
    }

    /// Recomputes all sums.
    fn refresh(&mut self) {
        let n = self.n();
        let flops = &self.flops;
        self.rates = self.groups.iter().map(|members| members.iter().map(|&i| flops[i as usize]).sum()).collect();
        for i in 0..n {
            self.load[i] = self.placed.load(&self.experts[i]);
            self.settle(i);
        }
        self.sums.clear();
        self.sums.resize(self.n_groups * n, Sums::default());
        for (members, sums) in self.groups.iter().zip(self.sums.chunks_mut(n)) {
            for &i in members {
                let part = Part::new(i as usize, Role::default(), self.roles[i as usize]);
                sums.iter_mut().enumerate().for_each(|(x, sums)| part.add(sums, &self.pairs, x));
            }
        }
        self.ops += (n * n) as u64;
        self.set_limit(self.limit);
    }

    fn set_limit(&mut self, limit: f64) {
        self.limit = limit;
        for g in 0..self.n_groups {
            self.times[g] = self.group_times(g, limit);
        }
        self.excess = self.times.iter().map(|times| times.over).sum();
        self.ops += self.n() as u64;
    }

    fn group_times(&self, g: usize, limit: f64) -> Times {
        if self.is_idle(g) {
            return Times::default();
        }
        let members = &self.groups[g];
        let mut times = self.computing(members.iter().copied());
        times.compute = members.len() as f64 * times.end;
        for &i in members {
            times.exchanges(&self.sums[g * self.n() + i as usize], self.roles[i as usize], limit);
        }
        times
    }

    /// Times with the device of these that computes longest.
    fn computing(&self, devices: impl Iterator<Item = u32>) -> Times {
        let mut times = Times::default();
        devices.for_each(|i| times.computes(i as usize, self.ends[i as usize]));
        times
    }

    /// Times of group `g` after a change; `None` as soon as its excess exceeds `most`.
    #[inline]
    fn after(&mut self, g: usize, parts: &[Part], limit: f64, most: f64) -> Option<Times> {
        if self.is_idle(g) {
            return (most >= 0.0).then_some(Times::default());
        }
        let n = self.n();
        let (members, sums) = (&self.groups[g], &self.sums[g * n..][..n]);
        let (mut size, mut changing) = (members.len() as f64, 0u128);
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
            times.computes(part.device, part.after.load / self.flops[part.device]);
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
        // The devices that change first, as they exceed the limit most often.
        for part in parts.iter().filter(|part| part.after.member) {
            times.exchanges(&after(part.device), part.after, limit);
            seen += 1;
        }
        if times.over <= most {
            for &i in members {
                if stays(i) {
                    let i = i as usize;
                    times.exchanges(&after(i), self.roles[i], limit);
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
        if self.is_idle(g) {
            return;
        }
        let n = self.n();
        let sums = &mut self.sums[g * n..][..n];
        for part in parts {
            sums.iter_mut().enumerate().for_each(|(x, sums)| part.add(sums, &self.pairs, x));
        }
        self.ops += (parts.len() * n) as u64 / 2;
    }

    fn all_reduce(&self, slowest: Option<usize>) -> f64 {
        self.placed.problem.all_reduce_over(self.n_groups, slowest)
    }

    /// Time that the target leaves for a group's compute and exchange, ms.
    fn limit_of(&self, slowest: Option<usize>, workers: usize) -> f64 {
        (self.target_ms - self.all_reduce(slowest)) / self.gamma[workers]
    }

    pub fn objective_ms(&self) -> f64 {
        let worst_ms = self.times.iter().map(Times::ms).fold(0.0, f64::max);
        self.gamma[self.workers] * worst_ms + self.all_reduce(self.slowest)
    }

    /// The group that takes longest.
    fn worst(&self) -> usize {
        let ms = |g: usize| self.times[g].ms();
        (0..self.n_groups).fold(0, |worst, g| if ms(g) > ms(worst) { g } else { worst })
    }
}

impl<L: LinkTable> Annealed for Joint<'_, '_, '_, L> {
    type Answer = (Vec<Vec<u32>>, Vec<DeviceExperts>);

    fn ops(&self) -> u64 {
        self.ops
    }

    fn set_target(&mut self, progress: f64, best_ms: f64) -> f64 {
        let all_reduce = self.all_reduce(self.slowest);
        self.target_ms = (best_ms - all_reduce) * (1.0 - between(self.schedule.under, progress)) + all_reduce;
        self.set_limit(self.limit_of(self.slowest, self.workers));
        (best_ms - all_reduce) / self.gamma[self.workers] * between(self.schedule.temperature, progress)
    }

    fn excess_ms(&self) -> f64 {
        self.excess
    }

    fn count_proposal(&mut self) {
        self.ops += 6 + self.groups.len() as u64 / 4;
    }

    fn change(&mut self, random: &mut Random, most_ms: f64) -> bool {
        if !self.random_change(random, most_ms) {
            return false;
        }
        self.changes += 1;
        if self.changes.is_multiple_of(REFRESH) {
            self.refresh();
        }
        true
    }

    fn objective_below(&mut self, limit_ms: f64) -> Option<f64> {
        let ms = self.objective_ms();
        (ms < limit_ms).then_some(ms)
    }

    /// Groups and experts, both ascending.
    fn answer(&mut self) -> Self::Answer {
        let sorted = |list: &Vec<u32>| {
            let mut list = list.clone();
            list.sort_unstable();
            list
        };
        let groups: Vec<Vec<u32>> = self.groups[..self.n_groups].iter().map(sorted).collect();
        let held = |members: &Vec<u32>| members.iter().map(|&i| sorted(&self.experts[i as usize])).collect();
        let placements = groups.iter().map(held).collect();
        (groups, placements)
    }
}

/// A device's exchange, given its sums: the longer of sending and receiving, ms.
#[inline]
fn exchange_ms(sums: &Sums, role: Role) -> f64 {
    larger(sums[0] + sums[1], if role.holds { sums[2] + sums[3] * role.load } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::anneal::{Chain, exponential};
    use crate::cluster::{Cluster, Device, Link, Links, Matrix, Tier, Tiers};
    use crate::objective::Problem;

    fn sorted_lists(lists: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let mut lists = lists.to_vec();
        lists.iter_mut().for_each(|list| list.sort_unstable());
        lists
    }

    #[test]
    fn devices_change_groups_and_experts_are_kept() {
        let link = Link { alpha_ms: 0.01, beta_ms_per_mb: 0.01 };
        let links = Links::Tiers(Tiers::new(4, vec![Tier { size: 4, link }]).unwrap());
        let devices = (0..4).map(|id| Device::new(id, "a", 1e9, 4)).collect();
        let (cluster, workload) = (Cluster::new(devices, links), Workload::new(vec![1e9; 4]));
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        // The group of three takes 3 * 2 ms, two groups of two take 2 * 2 ms; only a move makes the groups equal.
        let placements = vec![vec![vec![0, 1], vec![2], vec![3]], vec![vec![0, 1, 2, 3]]];
        let start = FoundPlaced::new(&placed, vec![vec![0, 1, 2], vec![3]], placements);
        let schedule = Schedule { under: (0.3, 0.03), temperature: (0.05, 0.002) };
        let joint = Joint::new(&placed, &start, false, schedule);
        let mut chain = Chain::new(joint, start.objective_ms, false, 100_000, Random(1));
        chain.advance(&exponential(), 1.0);
        let (groups, placements) = chain.into_answer().unwrap();
        let found = FoundPlaced::new(&placed, groups, placements);
        assert!(found.objective_ms < 0.7 * start.objective_ms, "{} {}", found.objective_ms, start.objective_ms);
        assert_eq!(found.groups.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        for placement in &found.placements {
            assert_eq!(sorted_lists(&[placement.concat()]), [[0, 1, 2, 3]]);
        }
    }

    /// After every change the kept sums are those that adding up anew gives, and a refused change leaves everything as it was.
    #[test]
    fn kept_sums_match_a_fresh_start() {
        for allow_idle in [false, true] {
            kept_sums_match(allow_idle);
        }
    }

    fn kept_sums_match(allow_idle: bool) {
        let mut random = Random(5);
        let mut ms = || (0..81).map(|_| 0.01 * (1 + random.below(50)) as f64).collect::<Vec<f64>>();
        let links = Links::Matrix(Matrix::new(9, ms(), ms()));
        // More room than experts, so that some devices hold none.
        let devices = (0..9).map(|id| Device::new(id, "a", 1e9 * (1 + id % 2) as f64, 2 + id % 3)).collect();
        let costs = (0..4).map(|e| 1e8 * f64::from(1 + e)).collect();
        let workload = Workload { p2p_buffer_mb: 0.5, p2p_frequency: 2.0, ..Workload::new(costs) };
        let cluster = Cluster::new(devices, links);
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, allow_idle);
        let placed = Placed::new(&problem);
        let groups = vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7, 8]];
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let start = FoundPlaced::new(&placed, groups, placements);
        let schedule = Schedule { under: (0.5, 0.5), temperature: (1.0, 1.0) };
        let mut joint = Joint::new(&placed, &start, allow_idle, schedule);
        joint.set_target(0.0, start.objective_ms);
        let (mut changes, mut refused, mut idle) = (0, 0, 0);
        for _ in 0..5_000 {
            let before = [sorted_lists(&joint.groups), sorted_lists(&joint.experts)];
            let most = joint.excess + [0.0, 0.3, 3.0][random.below(3)];
            if joint.random_change(&mut random, most) {
                assert!(joint.excess <= most + 1e-9, "{} {most}", joint.excess);
                changes += 1;
            } else {
                assert_eq!([sorted_lists(&joint.groups), sorted_lists(&joint.experts)], before);
                refused += 1;
            }
            idle += u32::from(joint.workers < 9);
            let numbers = |joint: &Joint<_>| {
                let times = joint.times.iter().map(|times| times.ms() + times.over);
                let roles = joint.roles.iter().map(|role| role.load + f64::from(u8::from(role.holds)));
                let kept = joint.load.iter().chain(&joint.ends).chain(&joint.rates).chain(joint.sums.iter().flatten());
                times.chain(roles).chain(kept.copied()).chain([joint.excess]).collect::<Vec<f64>>()
            };
            let kept = numbers(&joint);
            joint.refresh();
            for (kept, anew) in kept.iter().zip(&numbers(&joint)) {
                assert!((kept - anew).abs() < 1e-6, "{kept} {anew}");
            }
            let (groups, placements) = joint.answer();
            let found = FoundPlaced::new(&placed, groups, placements);
            assert!((found.objective_ms - joint.objective_ms()).abs() < 1e-6);
        }
        assert!(changes > 500 && refused > 500, "{changes} {refused}");
        assert_eq!(idle > 0, allow_idle);
    }
}
