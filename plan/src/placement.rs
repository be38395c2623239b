//! Placement of experts on the devices of a group by makespan, the longest time of a device: the costs of its experts over its rate. Memory limits the
//! experts of a device. (Uniform machines with a limit on the number of jobs, Q | k_i | Cmax.)

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// The devices of a group, and the experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupDevices<'a> {
    /// Rates, FLOP per ms.
    pub flops: &'a [f64],
    /// Experts that each holds at most; together at least all.
    pub memory: &'a [u64],
    /// The experts' costs, FLOP.
    pub costs: &'a [f64],
}

/// Maximum number of experts for branch and bound, the depth of its recursion.
const MOST_BRANCHED: usize = 256;

/// The experts of each device, ascending.
pub(crate) type DeviceExperts = Vec<Vec<u32>>;

impl GroupDevices<'_> {
    /// The longest time of a device, ms.
    pub fn makespan(&self, placement: &DeviceExperts) -> f64 {
        let time = |d: usize| placement[d].iter().map(|&e| self.costs[e as usize]).sum::<f64>() / self.flops[d];
        (0..placement.len()).map(time).fold(0.0, f64::max)
    }

    /// A lower bound on the makespan, ms.
    fn least(&self) -> f64 {
        let mut costs = self.costs.to_vec();
        costs.sort_unstable_by(|a, b| b.total_cmp(a));
        let mut flops: Vec<f64> =
            self.flops.iter().zip(self.memory).filter(|(_, m)| **m > 0).map(|(f, _)| *f).collect();
        flops.sort_unstable_by(|a, b| b.total_cmp(a));
        // The j most expensive experts are on at most j devices.
        let (mut cost, mut rate, mut least) = (0.0, 0.0, 0.0f64);
        for (j, c) in costs.iter().enumerate() {
            cost += c;
            if let Some(f) = flops.get(j) {
                rate += f;
                least = least.max(cost / rate);
            }
        }
        if flops.len() < costs.len() { least.max(cost / rate) } else { least }
    }
}

/// Lysi's placement: round robin, each device taking the experts that fit its share best. A full device's rate leaves
/// the sum once, not at every visit, so it ends on every input.
pub(crate) fn lysi(group: &GroupDevices) -> DeviceExperts {
    let (n, n_experts) = (group.flops.len(), group.costs.len());
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| group.flops[b].total_cmp(&group.flops[a]));
    let even = n_experts.div_ceil(n) as u64;
    // As published: whether any of the first n - 1 has, not whether each has.
    let each_has_capacity = match n {
        1 => group.memory[0] >= even,
        _ => group.memory[..n - 1].iter().any(|m| *m >= even),
    };
    // Costs are not negative, so their bits are in their order.
    let mut experts: BTreeSet<(u64, u32)> = group.costs.iter().map(|c| c.to_bits()).zip(0..).collect();
    let mut placement = vec![Vec::new(); n];
    let mut memory = group.memory.to_vec();
    let mut cost_left: f64 = group.costs.iter().sum();
    let mut flops_left: f64 = group.flops.iter().sum();
    let mut counted = vec![true; n];
    while !experts.is_empty() {
        let before = experts.len();
        for &d in &order {
            if experts.is_empty() {
                break;
            }
            if memory[d] > 0 {
                if !counted[d] {
                    // One more round, in which the published version would divide by zero.
                    flops_left = (0..n).filter(|&d| memory[d] > 0).map(|d| group.flops[d]).sum();
                    counted = memory.iter().map(|m| *m > 0).collect();
                }
                let budget = share(group.flops[d], cost_left, flops_left);
                let mut left = budget;
                while left > 0.0 && memory[d] > 0 {
                    let Some(expert) = best_fit(&experts, left) else { break };
                    experts.remove(&expert);
                    placement[d].push(expert.1);
                    memory[d] -= 1;
                    left -= f64::from_bits(expert.0);
                }
                cost_left -= budget - left;
            }
            if counted[d] && (memory[d] == 0 || each_has_capacity) {
                counted[d] = false;
                flops_left -= group.flops[d];
            }
        }
        if experts.len() == before {
            // Only experts of cost 0 are left; any device may take them.
            let free = |d: usize| std::iter::repeat_n(d, memory[d].min(n_experts as u64) as usize);
            for ((_, expert), d) in std::mem::take(&mut experts).into_iter().zip((0..n).flat_map(free)) {
                placement[d].push(expert);
            }
        }
    }
    placement.iter_mut().for_each(|experts| experts.sort_unstable());
    placement
}

/// ceil(flops * cost / all flops), exact where the numbers are whole, as in the original.
fn share(flops: f64, cost: f64, flops_left: f64) -> f64 {
    const EXACT: f64 = (1u64 << 62) as f64;
    let whole = |x: f64| x.fract() == 0.0 && (0.0..EXACT).contains(&x);
    if whole(flops) && whole(cost) && whole(flops_left) && flops_left > 0.0 {
        return (flops as u128 * cost as u128).div_ceil(flops_left as u128) as f64;
    }
    let share = (flops * (cost / flops_left)).ceil();
    if share.is_finite() { share } else { f64::MAX }
}

/// The expert whose cost is nearest to the budget; of two as near, the cheaper; among equals, the one that an ordered set
/// gives: the largest id below the budget, the smallest at or above it.
fn best_fit(experts: &BTreeSet<(u64, u32)>, budget: f64) -> Option<(u64, u32)> {
    let key = (budget.to_bits(), 0);
    let above = experts.range(key..).next().copied();
    let below = experts.range(..key).next_back().copied();
    match (below, above) {
        (_, Some(above)) if above == key => Some(above),
        (Some(below), Some(above)) => {
            let (under, over) = (budget - f64::from_bits(below.0), f64::from_bits(above.0) - budget);
            Some(if over < under { above } else { below })
        }
        (below, above) => below.or(above),
    }
}

/// A placement, never worse than [`lysi`]'s; optimal for experts of one cost, and where about `budget` steps suffice to
/// prove it.
pub(crate) fn auto(group: &GroupDevices, budget: u64) -> DeviceExperts {
    let least = group.least();
    let greedy = largest_first(group);
    let mut best = (group.makespan(&greedy), greedy);
    let keep = |best: &mut (f64, DeviceExperts), placement: DeviceExperts| {
        let makespan = group.makespan(&placement);
        if makespan < best.0 {
            *best = (makespan, placement);
        }
    };
    let reached = |best: &(f64, DeviceExperts)| best.0 * (1.0 - 1e-12) <= least;
    let equal = group.costs.iter().all(|c| *c == group.costs[0]);
    let mut done = equal || reached(&best);
    if !done {
        keep(&mut best, lysi(group));
        let mut improved = best.1.clone();
        local_search(group, &mut improved, budget / 4);
        keep(&mut best, improved);
        done = reached(&best);
    }
    if !done && group.costs.len() <= MOST_BRANCHED {
        let mut branch = Branch::new(group, best.0, budget / 4 * 3);
        branch.go(0);
        if let Some(owner) = branch.best_owner {
            let mut placement = vec![Vec::new(); group.flops.len()];
            branch.order.iter().zip(owner).for_each(|(&e, d)| placement[d as usize].push(e));
            keep(&mut best, placement);
        }
    }
    let mut placement = in_order(group, best.1);
    placement.iter_mut().for_each(|experts| experts.sort_unstable());
    placement
}

/// Largest expert first, each where it ends first (Graham 1969, on uniform machines); optimal for experts of one cost.
fn largest_first(group: &GroupDevices) -> DeviceExperts {
    let mut order: Vec<u32> = (0..group.costs.len() as u32).collect();
    order.sort_by(|&a, &b| group.costs[b as usize].total_cmp(&group.costs[a as usize]).then(a.cmp(&b)));
    let n = group.flops.len();
    let mut placement = vec![Vec::new(); n];
    let mut load = vec![0.0f64; n];
    let equal = group.costs.iter().all(|c| *c == group.costs[0]);
    // With equal costs the next end of each device can wait in a heap; times are not negative, so bits are in order.
    if equal {
        let cost = group.costs[0];
        let ends = |d: usize, held: usize| ((held as f64 + 1.0) * cost / group.flops[d]).to_bits();
        let mut heap: BinaryHeap<_> =
            (0..n).filter(|&d| group.memory[d] > 0).map(|d| Reverse((ends(d, 0), 0usize, d))).collect();
        for e in order {
            let Some(Reverse((_, _, d))) = heap.pop() else { break };
            placement[d].push(e);
            if (placement[d].len() as u64) < group.memory[d] {
                heap.push(Reverse((ends(d, placement[d].len()), placement[d].len(), d)));
            }
        }
        return placement;
    }
    for e in order {
        let cost = group.costs[e as usize];
        let free = (0..n).filter(|&d| (placement[d].len() as u64) < group.memory[d]);
        let ends = |d: usize| (load[d] + cost) / group.flops[d];
        // Ties go to the device with the fewest experts, so that experts of cost 0 spread.
        let key = |d: usize| (ends(d), placement[d].len());
        let Some(d) = free.min_by(|&a, &b| key(a).partial_cmp(&key(b)).expect("finite")) else { break };
        placement[d].push(e);
        load[d] += cost;
    }
    placement
}

/// Moves and swaps that relieve the slowest device, until there is none.
fn local_search(group: &GroupDevices, placement: &mut DeviceExperts, budget: u64) {
    let n = group.flops.len();
    let cost = |e: u32| group.costs[e as usize];
    let mut load: Vec<f64> = placement.iter().map(|experts| experts.iter().map(|&e| cost(e)).sum()).collect();
    let mut left = budget as i64;
    while left > 0 {
        let time = |d: usize, load: f64| load / group.flops[d];
        let slowest = (0..n).fold(0, |s, d| if time(d, load[d]) > time(s, load[s]) { d } else { s });
        let now = time(slowest, load[slowest]);
        // The change after which the later of the two devices ends first.
        let mut best = (now * (1.0 - 1e-12), None);
        for (place, &e) in placement[slowest].iter().enumerate() {
            for d in (0..n).filter(|&d| d != slowest) {
                if (placement[d].len() as u64) < group.memory[d] {
                    let then = time(d, load[d] + cost(e)).max(time(slowest, load[slowest] - cost(e)));
                    if then < best.0 {
                        best = (then, Some((place, d, None)));
                    }
                }
                for (other, &f) in placement[d].iter().enumerate() {
                    let gain = cost(e) - cost(f);
                    if gain > 0.0 {
                        let then = time(d, load[d] + gain).max(time(slowest, load[slowest] - gain));
                        if then < best.0 {
                            best = (then, Some((place, d, Some(other))));
                        }
                    }
                }
                left -= 1 + placement[d].len() as i64;
            }
            if left <= 0 {
                break;
            }
        }
        let Some((place, d, other)) = best.1 else { return };
        let e = placement[slowest].swap_remove(place);
        if let Some(other) = other {
            let f = placement[d].swap_remove(other);
            placement[slowest].push(f);
        }
        placement[d].push(e);
        for d in [slowest, d] {
            load[d] = placement[d].iter().map(|&e| cost(e)).sum();
        }
    }
}

/// Depth-first branch and bound over the experts, most expensive first.
struct Branch<'s, 'a> {
    group: &'s GroupDevices<'a>,
    order: Vec<u32>,
    /// Cost of the experts from each place of the order on.
    rest: Vec<f64>,
    /// Devices, fastest first.
    devices: Vec<u32>,
    load: Vec<f64>,
    free: Vec<u64>,
    owner: Vec<u32>,
    best_ms: f64,
    best_owner: Option<Vec<u32>>,
    left: u64,
}

impl<'s, 'a> Branch<'s, 'a> {
    fn new(group: &'s GroupDevices<'a>, best_ms: f64, budget: u64) -> Self {
        let mut order: Vec<u32> = (0..group.costs.len() as u32).collect();
        order.sort_by(|&a, &b| group.costs[b as usize].total_cmp(&group.costs[a as usize]).then(a.cmp(&b)));
        let mut rest = vec![0.0; order.len() + 1];
        for place in (0..order.len()).rev() {
            rest[place] = rest[place + 1] + group.costs[order[place] as usize];
        }
        let mut devices: Vec<u32> = (0..group.flops.len() as u32).collect();
        devices.sort_by(|&a, &b| group.flops[b as usize].total_cmp(&group.flops[a as usize]).then(a.cmp(&b)));
        Branch {
            group,
            order,
            rest,
            devices,
            load: vec![0.0; group.flops.len()],
            free: group.memory.to_vec(),
            owner: Vec::new(),
            best_ms,
            best_owner: None,
            left: budget,
        }
    }

    fn go(&mut self, place: usize) {
        let limit = self.best_ms * (1.0 - 1e-12);
        if place == self.order.len() {
            let time = |d: usize| self.load[d] / self.group.flops[d];
            let makespan = (0..self.load.len()).map(time).fold(0.0, f64::max);
            if makespan < limit {
                self.best_ms = makespan;
                self.best_owner = Some(self.owner.clone());
            }
            return;
        }
        self.left = self.left.saturating_sub(self.devices.len() as u64);
        if self.left == 0 {
            return;
        }
        // FLOP that all devices together can add within the limit.
        let largest = self.group.costs[self.order[place] as usize];
        let room: f64 = (0..self.load.len())
            .map(|d| (limit * self.group.flops[d] - self.load[d]).clamp(0.0, self.free[d] as f64 * largest))
            .sum();
        if room < self.rest[place] * (1.0 - 1e-12) {
            return;
        }
        // Symmetry: among experts of equal cost, devices ascend.
        let twin = place > 0 && self.group.costs[self.order[place - 1] as usize] == largest;
        let first = match twin {
            true => self.devices.iter().position(|d| Some(d) == self.owner.last()).unwrap_or(0),
            false => 0,
        };
        for at in first..self.devices.len() {
            let d = self.devices[at] as usize;
            if self.free[d] == 0 || (self.load[d] + largest) / self.group.flops[d] >= limit {
                continue;
            }
            // Symmetry: an equal device leads to the same placements.
            let alike = |o: u32| {
                let o = o as usize;
                self.group.flops[o] == self.group.flops[d]
                    && self.load[o] == self.load[d]
                    && self.free[o] == self.free[d]
            };
            if self.devices[first..at].iter().any(|&o| alike(o)) {
                continue;
            }
            let before = self.load[d];
            self.load[d] += largest;
            self.free[d] -= 1;
            self.owner.push(d as u32);
            self.go(place + 1);
            self.owner.pop();
            self.free[d] += 1;
            self.load[d] = before;
            if self.left == 0 {
                return;
            }
        }
    }
}

/// Renumbers experts of equal cost: earlier devices get the lower ids.
fn in_order(group: &GroupDevices, placement: DeviceExperts) -> DeviceExperts {
    let mut ids: Vec<u32> = (0..group.costs.len() as u32).collect();
    let by_cost = |&a: &u32, &b: &u32| group.costs[a as usize].total_cmp(&group.costs[b as usize]).then(a.cmp(&b));
    ids.sort_by(by_cost);
    // For each expert, the next unused place of its cost among `ids`.
    let mut first = vec![0usize; group.costs.len()];
    for (place, &e) in ids.iter().enumerate() {
        let twin = place > 0 && group.costs[ids[place - 1] as usize] == group.costs[e as usize];
        first[e as usize] = if twin { first[ids[place - 1] as usize] } else { place };
    }
    let mut used = vec![0usize; group.costs.len()];
    let mut next = |e: u32| {
        let class = first[e as usize];
        used[class] += 1;
        ids[class + used[class] - 1]
    };
    placement.into_iter().map(|experts| experts.into_iter().map(&mut next).collect()).collect()
}
