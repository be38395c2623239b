//! A greedy placement, for every group of the search.
//!
//! Experts are assigned the most expensive first, each to the device that ends first (LPT, Graham 1969), once by compute alone and once by compute and what
//! the device receives. The better of the two placements is kept.

use super::{Experts, GroupTimes, Placed};
use crate::cluster::LinkTable;
use crate::placement::DeviceExperts;

/// Experts assigned to the devices of a group.
#[derive(Clone, Debug, Default)]
struct Assigned {
    /// FLOP of the experts of each device, and their number.
    load: Vec<f64>,
    count: Vec<u64>,
    /// End of each device, ms, if it takes one more expert of cost 0 (infinite if it is full); and the increase per FLOP.
    ends: Vec<f64>,
    per_flop: Vec<f64>,
    /// The device of each expert, in the order of costs; empty if all cost the same.
    owner: Vec<u32>,
}

/// The devices of a group.
struct Dealing {
    /// FLOP per ms of each, over the group's size, as each device brings a mini-batch.
    rates: Vec<f64>,
    /// Maximum number of experts of each.
    memory: Vec<u64>,
    /// Receive time of each device: ms per FLOP, and ms for the first expert.
    receiving: Vec<(f64, f64)>,
}

impl Dealing {
    fn new<L: LinkTable>(placed: &Placed<L>, members: &[u32]) -> Dealing {
        let (problem, n) = (placed.problem, members.len() as f64);
        let eta = problem.workload.p2p_frequency;
        let sums = problem.links.received_sums(members);
        let receiving = |(alpha, beta)| (eta * placed.received_mb(1.0) * beta, eta * alpha);
        Dealing {
            rates: members.iter().map(|&i| problem.flops[i as usize] / n).collect(),
            memory: members.iter().map(|&i| problem.memory[i as usize]).collect(),
            receiving: sums.into_iter().map(receiving).collect(),
        }
    }

    /// Assigns all experts. With `both`, what a device receives counts like its compute; otherwise it only decides between devices that end at the same time.
    /// Returns `None` where memory does not suffice.
    fn assign(&self, experts: &Experts, both: bool) -> Option<Assigned> {
        let n = self.rates.len();
        let per_flop = |(rate, receiving): (&f64, &(f64, f64))| 1.0 / rate + if both { receiving.0 } else { 0.0 };
        let mut to = Assigned {
            load: vec![0.0; n],
            count: vec![0; n],
            ends: self.receiving.iter().map(|receiving| if both { receiving.1 } else { 0.0 }).collect(),
            per_flop: self.rates.iter().zip(&self.receiving).map(per_flop).collect(),
            owner: Vec::new(),
        };
        let mut left = experts.order.len() as u64;
        if let Some(cost) = experts.uniform.filter(|cost| *cost > 0.0) {
            // First all experts that end no later than the ideal.
            let rate: f64 = to.per_flop.iter().map(|per_flop| 1.0 / per_flop).sum();
            let start = to.ends.iter().copied().fold(f64::INFINITY, f64::min);
            let ideal = start + experts.total / rate;
            for i in 0..n {
                let fits = ((ideal - to.ends[i]).max(0.0) / (to.per_flop[i] * cost)).floor() as u64;
                let count = fits.min(self.memory[i]).min(left);
                to.count[i] = count;
                left -= count;
                self.set_load(i, count as f64 * cost, both, &mut to);
            }
            for _ in 0..left {
                let i = self.first_to_end(cost, &to)?;
                to.count[i] += 1;
                self.set_load(i, to.count[i] as f64 * cost, both, &mut to);
            }
            return Some(to);
        }
        (0..n).for_each(|i| self.set_load(i, 0.0, both, &mut to));
        for &e in &experts.order {
            let cost = experts.costs[e as usize];
            let i = self.first_to_end(cost, &to)?;
            to.count[i] += 1;
            self.set_load(i, to.load[i] + cost, both, &mut to);
            to.owner.push(i as u32);
        }
        Some(to)
    }

    /// Sets the load of device `i` after its number of experts was updated.
    fn set_load(&self, i: usize, load: f64, both: bool, to: &mut Assigned) {
        to.load[i] = load;
        let first = if both { self.receiving[i].1 } else { 0.0 };
        let room = to.count[i] < self.memory[i];
        to.ends[i] = if room { first + load * to.per_flop[i] } else { f64::INFINITY };
    }

    /// The device with room that ends first with one more expert; between equals, the one that receives shortest.
    fn first_to_end(&self, cost: f64, to: &Assigned) -> Option<usize> {
        // In lanes, because construction spends most of its time here.
        const LANES: usize = 4;
        let end = |(end, per_flop): (&f64, &f64)| end + cost * per_flop;
        let (ends, per_flop) = (to.ends.chunks_exact(LANES), to.per_flop.chunks_exact(LANES));
        let rest = ends.remainder().iter().zip(per_flop.remainder()).map(end).fold(f64::INFINITY, f64::min);
        let mut least = [rest; LANES];
        for (ends, per_flop) in ends.zip(per_flop) {
            for lane in 0..LANES {
                let end = ends[lane] + cost * per_flop[lane];
                least[lane] = if end < least[lane] { end } else { least[lane] };
            }
        }
        let least = least.into_iter().fold(f64::INFINITY, f64::min);
        let first = to.ends.iter().zip(&to.per_flop).map(end).enumerate().filter(|(_, end)| *end <= least);
        let with_room = first.map(|(i, _)| i).filter(|&i| to.count[i] < self.memory[i]);
        let receive = |&i: &usize| self.receive_ms(i, to.load[i] + cost, 1);
        with_room.min_by(|a, b| receive(a).total_cmp(&receive(b)))
    }

    /// Receive time of device `i` with `count` experts of this load, ms.
    fn receive_ms(&self, i: usize, load: f64, count: u64) -> f64 {
        if count == 0 { 0.0 } else { self.receiving[i].1 + load * self.receiving[i].0 }
    }

    /// The experts of each device.
    fn placement(&self, experts: &Experts, to: &Assigned) -> DeviceExperts {
        let mut placement: DeviceExperts = vec![Vec::new(); self.rates.len()];
        if to.owner.is_empty() {
            let mut ids = 0..experts.order.len() as u32;
            for (held, count) in placement.iter_mut().zip(&to.count) {
                held.extend(ids.by_ref().take(*count as usize));
            }
        } else {
            to.owner.iter().zip(&experts.order).for_each(|(&i, &e)| placement[i as usize].push(e));
            placement.iter_mut().for_each(|held| held.sort_unstable());
        }
        placement
    }
}

impl<L: LinkTable> Placed<'_, '_, L> {
    /// The greedy placement; `None` if memory does not suffice.
    pub fn dealt(&self, members: &[u32]) -> Option<(DeviceExperts, GroupTimes)> {
        let dealing = Dealing::new(self, members);
        let mut best: Option<(DeviceExperts, GroupTimes)> = None;
        for both in [false, true] {
            let placement = dealing.placement(&self.experts, &dealing.assign(&self.experts, both)?);
            let times = self.placed_times(members, &placement);
            if best.as_ref().is_none_or(|(_, known)| times.ms() < known.ms()) {
                best = Some((placement, times));
            }
        }
        best
    }
}
