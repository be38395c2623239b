//! Experts dealt out to the devices of a group, under the placed objective: fast, a million times in a search.
//!
//! The most expensive first, each goes to the device that ends first (LPT, Graham 1969), once by compute alone and once by compute and what the
//! device receives. Then experts go one at a time from where the longest exchange is, as long as that helps; and the better of the two is kept.

use super::{Experts, GroupTimes, Placed};
use crate::cluster::LinkTable;
use crate::placement::DeviceExperts;

/// Experts that go elsewhere after a deal, at most, where it decides which groups are looked at; and where it is what a group is said to take.
pub(super) const ROUNDS: u64 = 2;
const MOST_ROUNDS: u64 = 20;
/// Groups of more devices keep their experts as dealt out: their links are too many.
const POLISHED_MOST: usize = 64;

/// Experts dealt out to the devices of a group.
#[derive(Clone, Debug, Default)]
pub(super) struct Dealt {
    /// FLOP of the experts of each device.
    pub load: Vec<f64>,
    /// How many each holds.
    pub count: Vec<u64>,
    /// When each ends with one more that costs nothing, ms, infinity where it is full; and how much later for each FLOP.
    ends: Vec<f64>,
    per_flop: Vec<f64>,
    /// Of each expert in the order of costs, the device; not where all cost the same, where `count` says it.
    owner: Vec<u32>,
}

impl Dealt {
    /// Of two ways of dealing: whether the second gave every device the experts that the first did, of which this keeps what it takes to see that.
    fn is_repeated(&mut self, second: bool, dealt: &Dealt) -> bool {
        if second {
            return self.count == dealt.count && self.load == dealt.load && self.owner == dealt.owner;
        }
        self.count.clone_from(&dealt.count);
        self.load.clone_from(&dealt.load);
        self.owner.clone_from(&dealt.owner);
        false
    }
}

/// What the devices of a group exchange, ms.
#[derive(Clone, Debug, Default)]
pub(super) struct Exchanges {
    pub sent: Vec<f64>,
    pub received: Vec<f64>,
    then: Vec<f64>,
}

/// Where the longest is, and how long.
fn longest(sent: &[f64], received: &[f64]) -> (usize, f64) {
    let mut longest = (0, 0.0);
    for (i, (sent, received)) in sent.iter().zip(received).enumerate() {
        if sent.max(*received) > longest.1 {
            longest = (i, sent.max(*received));
        }
    }
    longest
}

/// Devices that experts are dealt out to.
#[derive(Clone, Debug, Default)]
pub(super) struct Dealing {
    /// FLOP per ms of each, over the group's size: each device brings a mini-batch.
    rates: Vec<f64>,
    /// Experts that each has room for.
    pub memory: Vec<u64>,
    /// ms per FLOP that a device's exchange grows by, and ms from the first expert on.
    receiving: Vec<(f64, f64)>,
}

impl Dealing {
    /// The devices of a group.
    pub fn set<L: LinkTable>(&mut self, placed: &Placed<L>, members: &[u32]) {
        let problem = placed.problem;
        self.set_with(placed, members, |&j| {
            let from = members.iter().filter(|&&i| i != j).map(|&i| problem.links.link_to(j as usize, i as usize));
            from.fold((0.0, 0.0), |sums, link| (sums.0 + link.alpha_ms, sums.1 + link.beta_ms_per_mb))
        });
    }

    /// The same of a group of any size.
    fn of<L: LinkTable>(placed: &Placed<L>, members: &[u32]) -> Dealing {
        let mut sums = placed.problem.links.received_sums(members).into_iter();
        let mut dealing = Dealing::default();
        dealing.set_with(placed, members, |_| sums.next().unwrap_or_default());
        dealing
    }

    /// `sums`: of a device's alpha and beta from all others.
    fn set_with<L: LinkTable>(
        &mut self,
        placed: &Placed<L>,
        members: &[u32],
        mut sums: impl FnMut(&u32) -> (f64, f64),
    ) {
        let (problem, n) = (placed.problem, members.len() as f64);
        let eta = problem.workload.p2p_frequency;
        self.rates.clear();
        self.rates.extend(members.iter().map(|&i| problem.flops[i as usize] / n));
        self.memory.clear();
        self.memory.extend(members.iter().map(|&i| problem.memory[i as usize]));
        self.receiving.clear();
        self.receiving.extend(members.iter().map(|j| {
            let (alpha, beta) = sums(j);
            (eta * placed.received_mb(1.0) * beta, eta * alpha)
        }));
    }

    /// Deals all experts out. `both` counts what a device receives beside its compute; otherwise it only decides between devices that end at
    /// the same time. False where memory does not suffice.
    pub fn deal(&self, experts: &Experts, both: bool, dealt: &mut Dealt) -> bool {
        let n = self.rates.len();
        dealt.load.clear();
        dealt.load.resize(n, 0.0);
        dealt.count.clear();
        dealt.count.resize(n, 0);
        dealt.owner.clear();
        dealt.ends.clear();
        dealt.per_flop.clear();
        for (rate, receiving) in self.rates.iter().zip(&self.receiving) {
            dealt.ends.push(if both { receiving.1 } else { 0.0 });
            dealt.per_flop.push(1.0 / rate + if both { receiving.0 } else { 0.0 });
        }
        let mut left = experts.order.len() as u64;
        if let Some(cost) = experts.uniform.filter(|cost| *cost > 0.0) {
            // All that end no later than the ideal, at once.
            let rate: f64 = dealt.per_flop.iter().map(|per_flop| 1.0 / per_flop).sum();
            let start = dealt.ends.iter().copied().fold(f64::INFINITY, f64::min);
            let ideal = start + experts.total / rate;
            for i in 0..n {
                let fits = ((ideal - dealt.ends[i]).max(0.0) / (dealt.per_flop[i] * cost)).floor() as u64;
                let taken = fits.min(self.memory[i]).min(left);
                dealt.count[i] = taken;
                left -= taken;
                self.give(i, taken as f64 * cost, both, dealt);
            }
            for _ in 0..left {
                let Some(i) = self.next(cost, dealt) else { return false };
                dealt.count[i] += 1;
                self.give(i, dealt.count[i] as f64 * cost, both, dealt);
            }
            return true;
        }
        (0..n).for_each(|i| self.give(i, 0.0, both, dealt));
        for &e in &experts.order {
            let cost = experts.costs[e as usize];
            let Some(i) = self.next(cost, dealt) else { return false };
            dealt.count[i] += 1;
            self.give(i, dealt.load[i] + cost, both, dealt);
            dealt.owner.push(i as u32);
        }
        true
    }

    /// Device `i`, whose number of experts is the new one already, has this load.
    fn give(&self, i: usize, load: f64, both: bool, dealt: &mut Dealt) {
        dealt.load[i] = load;
        let first = if both { self.receiving[i].1 } else { 0.0 };
        let room = dealt.count[i] < self.memory[i];
        dealt.ends[i] = if room { first + load * dealt.per_flop[i] } else { f64::INFINITY };
    }

    /// The device with room that ends first with one more expert; of those that end at the same time the one that receives for the shortest.
    fn next(&self, cost: f64, dealt: &Dealt) -> Option<usize> {
        // Several at a time, as this is most of what a search does.
        const LANES: usize = 4;
        let end = |(end, per_flop): (&f64, &f64)| end + cost * per_flop;
        let (ends, per_flop) = (dealt.ends.chunks_exact(LANES), dealt.per_flop.chunks_exact(LANES));
        let rest = ends.remainder().iter().zip(per_flop.remainder()).map(end).fold(f64::INFINITY, f64::min);
        let mut least = [rest; LANES];
        for (ends, per_flop) in ends.zip(per_flop) {
            for lane in 0..LANES {
                let end = ends[lane] + cost * per_flop[lane];
                least[lane] = if end < least[lane] { end } else { least[lane] };
            }
        }
        let least = least.into_iter().fold(f64::INFINITY, f64::min);
        let first = dealt.ends.iter().zip(&dealt.per_flop).map(end).enumerate().filter(|(_, end)| *end <= least);
        let mut best: Option<(usize, f64)> = None;
        for (i, _) in first.filter(|(i, _)| dealt.count[*i] < self.memory[*i]) {
            let receive = self.receive_ms(i, dealt.load[i] + cost, 1);
            if best.is_none_or(|best| receive < best.1) {
                best = Some((i, receive));
            }
        }
        best.map(|best| best.0)
    }

    /// What device `i` receives with `count` experts of this load.
    fn receive_ms(&self, i: usize, load: f64, count: u64) -> f64 {
        if count == 0 { 0.0 } else { self.receiving[i].1 + load * self.receiving[i].0 }
    }

    /// The longest compute of a device.
    pub fn compute_ms(&self, dealt: &Dealt) -> f64 {
        dealt.load.iter().zip(&self.rates).map(|(load, rate)| load / rate).fold(0.0, f64::max)
    }

    /// Which experts each device got.
    fn placement(&self, experts: &Experts, dealt: &Dealt) -> DeviceExperts {
        let mut placement: DeviceExperts = vec![Vec::new(); self.rates.len()];
        if dealt.owner.is_empty() {
            let mut ids = 0..experts.order.len() as u32;
            for (held, count) in placement.iter_mut().zip(&dealt.count) {
                held.extend(ids.by_ref().take(*count as usize));
            }
        } else {
            dealt.owner.iter().zip(&experts.order).for_each(|(&i, &e)| placement[i as usize].push(e));
            placement.iter_mut().for_each(|held| held.sort_unstable());
        }
        placement
    }
}

/// Memory that is used again for every group.
#[derive(Default)]
pub(super) struct Scratch {
    dealing: Dealing,
    dealt: Dealt,
    /// As by compute alone, before experts went elsewhere.
    first: Dealt,
    exchanges: Exchanges,
}

impl<L: LinkTable> Placed<'_, '_, L> {
    /// Computes the exchanges of experts dealt out, and gives up to `rounds` experts away from where the longest is, as long as that helps. `ops`
    /// counts links looked at.
    pub(super) fn polish(
        &self,
        members: &[u32],
        dealing: &Dealing,
        dealt: &mut Dealt,
        exchanges: &mut Exchanges,
        rounds: u64,
        ops: &mut u64,
    ) -> GroupTimes {
        let n = members.len();
        exchanges.sent.clear();
        exchanges.sent.resize(n, 0.0);
        exchanges.received.clear();
        for j in 0..n {
            exchanges.received.push(dealing.receive_ms(j, dealt.load[j], dealt.count[j]));
            let mb = self.sent_mb(dealt.load[j], dealt.count[j]);
            if mb.is_some() {
                (0..n).for_each(|i| exchanges.sent[i] += self.sent_ms(members, (i, j), mb));
            }
        }
        *ops += (n * n) as u64;
        let communication_ms = longest(&exchanges.sent, &exchanges.received).1;
        let mut times = GroupTimes { compute_ms: dealing.compute_ms(dealt), communication_ms };
        for _ in 0..rounds {
            let Some(then) = self.give_away(members, dealing, dealt, exchanges, times, ops) else { break };
            times = then;
        }
        times
    }

    /// What each other device sends to one that holds `count` experts of this load, MB; `None` where it holds none.
    fn sent_mb(&self, load: f64, count: u64) -> Option<f64> {
        (count > 0).then(|| self.received_mb(load))
    }

    /// What the first of two places of a group sends to the second, ms.
    fn sent_ms(&self, members: &[u32], (i, j): (usize, usize), mb: Option<f64>) -> f64 {
        let Some(mb) = mb.filter(|_| i != j) else { return 0.0 };
        let link = self.problem.links.link_to(members[j] as usize, members[i] as usize);
        self.problem.workload.p2p_frequency * link.time_ms(mb)
    }

    /// Gives one expert away from where the longest exchange is; what the group takes then, if that is less.
    fn give_away(
        &self,
        members: &[u32],
        dealing: &Dealing,
        dealt: &mut Dealt,
        exchanges: &mut Exchanges,
        times: GroupTimes,
        ops: &mut u64,
    ) -> Option<GroupTimes> {
        let n = members.len();
        let (i, _) = longest(&exchanges.sent, &exchanges.received);
        // From the device itself where it receives for longest, and otherwise from the one that it sends to for longest.
        let from = if exchanges.received[i] >= exchanges.sent[i] {
            i
        } else {
            *ops += n as u64;
            let sent = |j: usize| self.sent_ms(members, (i, j), self.sent_mb(dealt.load[j], dealt.count[j]));
            (0..n).map(|j| (j, sent(j))).fold((i, 0.0), |most, to| if to.1 > most.1 { to } else { most }).0
        };
        if dealt.count[from] == 0 {
            return None;
        }
        // Its cheapest.
        let owned = dealt.owner.iter().rposition(|&owner| owner as usize == from);
        *ops += owned.map_or(0, |place| (dealt.owner.len() - place) as u64 / 4);
        let cost = owned.map_or(self.experts.costs[0], |place| self.experts.costs[self.experts.order[place] as usize]);
        let left = (if dealt.count[from] > 1 { dealt.load[from] - cost } else { 0.0 }, dealt.count[from] - 1);
        // How much longer a device sends to `from`, and to one that the expert goes to.
        let (mb, mb_left) = (self.sent_mb(dealt.load[from], dealt.count[from]), self.sent_mb(left.0, left.1));
        let less = |x: usize| self.sent_ms(members, (x, from), mb_left) - self.sent_ms(members, (x, from), mb);
        let more = |x: usize, to: usize| {
            let (mb, mb_more) =
                (self.sent_mb(dealt.load[to], dealt.count[to]), self.received_mb(dealt.load[to] + cost));
            self.sent_ms(members, (x, to), Some(mb_more)) - self.sent_ms(members, (x, to), mb)
        };
        let sent = exchanges.sent[i] + less(i);
        let mut best = (f64::INFINITY, from);
        for to in (0..n).filter(|&to| to != from && dealt.count[to] < dealing.memory[to]) {
            let load = dealt.load[to] + cost;
            let exchange = dealing.receive_ms(to, load, 1).max(sent + more(i, to));
            let score = exchange + (load / dealing.rates[to] - times.compute_ms).max(0.0);
            if score < best.0 {
                best = (score, to);
            }
        }
        *ops += 2 * n as u64;
        let to = best.1;
        if best.0 >= times.communication_ms {
            return None;
        }
        exchanges.then.clear();
        exchanges.then.extend((0..n).map(|x| exchanges.sent[x] + less(x) + more(x, to)));
        *ops += 2 * n as u64;
        let before = [from, to].map(|j| (dealt.load[j], exchanges.received[j]));
        (dealt.load[from], dealt.load[to]) = (left.0, dealt.load[to] + cost);
        exchanges.received[from] = dealing.receive_ms(from, left.0, left.1);
        exchanges.received[to] = dealing.receive_ms(to, dealt.load[to], 1);
        let (_, communication_ms) = longest(&exchanges.then, &exchanges.received);
        let then = GroupTimes { compute_ms: dealing.compute_ms(dealt), communication_ms };
        if then.ms() >= times.ms() * (1.0 - 1e-9) {
            [from, to].into_iter().zip(before).for_each(|(j, (load, received))| {
                (dealt.load[j], exchanges.received[j]) = (load, received);
            });
            return None;
        }
        dealt.count[from] -= 1;
        dealt.count[to] += 1;
        if let Some(place) = owned {
            dealt.owner[place] = to as u32;
        }
        std::mem::swap(&mut exchanges.sent, &mut exchanges.then);
        Some(then)
    }

    /// What a group takes with experts dealt out, ms; infinite where memory does not suffice. `ops` counts links looked at.
    pub(super) fn dealt_ms(&self, members: &[u32], scratch: &mut Scratch, ops: &mut u64) -> f64 {
        let n = members.len();
        let Scratch { dealing, dealt, first, exchanges } = scratch;
        dealing.set(self, members);
        *ops += (n * n) as u64;
        let (mut best, mut polish_ops) = (f64::INFINITY, 0);
        for both in [false, true] {
            *ops += if self.experts.uniform.is_some() { n } else { self.experts.costs.len() * (n + 2) / 2 } as u64;
            if !dealing.deal(&self.experts, both, dealt) {
                return f64::INFINITY;
            }
            if first.is_repeated(both, dealt) {
                // Nor does what comes of it differ, nor what it would have cost.
                *ops += polish_ops;
                break;
            }
            polish_ops = *ops;
            best = best.min(self.polish(members, dealing, dealt, exchanges, MOST_ROUNDS, ops).ms());
            polish_ops = *ops - polish_ops;
        }
        best
    }

    /// A placement in one go; `None` where memory does not suffice.
    pub fn dealt(&self, members: &[u32]) -> Option<(DeviceExperts, GroupTimes)> {
        let dealing = Dealing::of(self, members);
        let (mut dealt, mut exchanges, mut ops) = (Dealt::default(), Exchanges::default(), 0);
        let mut first = Dealt::default();
        let mut best: Option<(DeviceExperts, GroupTimes)> = None;
        for both in [false, true] {
            if !dealing.deal(&self.experts, both, &mut dealt) {
                return None;
            }
            if first.is_repeated(both, &dealt) {
                // Nor does what comes of it differ.
                break;
            }
            if members.len() <= POLISHED_MOST {
                self.polish(members, &dealing, &mut dealt, &mut exchanges, ROUNDS, &mut ops);
            }
            let placement = dealing.placement(&self.experts, &dealt);
            let times = self.placed_times(members, &placement);
            if best.as_ref().is_none_or(|(_, known)| times.ms() < known.ms()) {
                best = Some((placement, times));
            }
        }
        best
    }
}
