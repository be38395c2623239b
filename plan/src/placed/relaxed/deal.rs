//! Whole experts for devices that have shares of all FLOP.

use crate::cluster::LinkTable;
use crate::placed::{Placed, larger};
use crate::placement::DeviceExperts;

/// Changes at most, of what was dealt out.
const CHANGES: usize = 200;
/// A change that makes less of what is too much, by this share, is none.
const LITTLE: f64 = 1e-9;

/// A group's experts dealt out so that nobody has much more than its share, by number of device; `None` where the group has no room for all.
pub(super) fn dealt<L: LinkTable>(placed: &Placed<L>, members: &[u32], share: &[f32]) -> Option<DeviceExperts> {
    let of = |by_room: bool| {
        let mut dealing = Dealing::new(placed, members, share);
        dealing.deal(by_room)?;
        (0..CHANGES).take_while(|_| dealing.change()).for_each(drop);
        let mut placement = dealing.placement;
        placement.iter_mut().for_each(|held| held.sort_unstable());
        Some((placed.placed_times(members, &placement).ms(), placement))
    };
    let ways = [true, false].into_iter().filter_map(of);
    ways.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, placement)| placement)
}

struct Dealing<'d> {
    costs: &'d [f64],
    /// Experts, the dearest first.
    order: &'d [u32],
    /// By place: how many experts there is room for, by how many ms a FLOP more may make the group longer, FLOP left of its share, and its experts.
    memory: Vec<u64>,
    dear: Vec<f64>,
    left: Vec<f64>,
    placement: DeviceExperts,
}

/// Of the experts of one place the one at `at` goes to another, for the one at `back` of its if there is one: FLOP that it has more then.
#[derive(Clone, Copy)]
struct Move {
    at: usize,
    to: usize,
    back: Option<usize>,
    flop: f64,
}

impl<'d> Dealing<'d> {
    fn new<L: LinkTable>(placed: &'d Placed<L>, members: &[u32], share: &[f32]) -> Self {
        let (problem, experts) = (placed.problem, &placed.experts);
        let of = |i: &u32| f64::from(share[*i as usize]) * experts.total;
        // Who is to have none has none, not the cheapest one either: others would send to it. Unless the others have no room.
        let has_share = |i: u32| share[i as usize] > 0.0;
        let holders: Vec<u32> = members.iter().copied().filter(|&i| has_share(i)).collect();
        let enough = problem.valid(&holders);
        let uses = |i: u32| has_share(i) || !enough;
        // It is computed and received there, or sent by who has the slowest link to it.
        let dear = |&c: &u32| {
            let (mut received, mut sent) = (0.0, 0.0);
            for &x in members.iter().filter(|x| **x != c) {
                let beta = problem.links.link(x as usize, c as usize).beta_ms_per_mb;
                (received, sent) = (received + beta, larger(beta, sent));
            }
            let exchanged = problem.workload.p2p_frequency * placed.received_mb(1.0) * larger(received, sent);
            members.len() as f64 / problem.flops[c as usize] + exchanged
        };
        Dealing {
            costs: &experts.costs,
            order: &experts.order,
            memory: members.iter().map(|&i| if uses(i) { problem.memory[i as usize] } else { 0 }).collect(),
            dear: members.iter().map(dear).collect(),
            left: members.iter().map(of).collect(),
            placement: vec![Vec::new(); members.len()],
        }
    }

    fn room(&self, place: usize) -> u64 {
        self.memory[place] - self.placement[place].len() as u64
    }

    /// The dearest first, each to who has most left, all or `by_room` for an expert: where memory is tight, who is to have much in little memory has the
    /// dearest.
    fn deal(&mut self, by_room: bool) -> Option<()> {
        for &e in self.order {
            let want = |place: usize| self.left[place] / if by_room { self.room(place) as f64 } else { 1.0 };
            let with_room = (0..self.left.len()).filter(|&place| self.room(place) > 0);
            let place = with_room.max_by(|&a, &b| want(a).total_cmp(&want(b)))?;
            self.left[place] -= self.costs[e as usize];
            self.placement[place].push(e);
        }
        Some(())
    }

    /// By how much what it has too much may make the group longer, with so much left, squared.
    fn over(&self, place: usize, left: f64) -> f64 {
        let ms = larger(-left, 0.0) * self.dear[place];
        ms * ms
    }

    /// Who has most too much gives an expert, or changes one for another, so that the squares become least. False where nothing helps.
    fn change(&mut self) -> bool {
        let over = |place: usize| self.over(place, self.left[place]);
        let worst = (0..self.left.len()).fold(0, |worst, place| if over(place) > over(worst) { place } else { worst });
        let now = over(worst);
        let mut best: (f64, Option<Move>) = (LITTLE * now, None);
        for (at, &e) in self.placement[worst].iter().enumerate() {
            let cost = self.costs[e as usize];
            for to in (0..self.left.len()).filter(|&to| to != worst) {
                let there = over(to);
                let mut look = |flop: f64, back: Option<usize>| {
                    let then = self.over(worst, self.left[worst] + flop) + self.over(to, self.left[to] - flop);
                    if now + there - then > best.0 {
                        best = (now + there - then, Some(Move { at, to, back, flop }));
                    }
                };
                if self.room(to) > 0 {
                    look(cost, None);
                }
                for (back, &f) in self.placement[to].iter().enumerate() {
                    let flop = cost - self.costs[f as usize];
                    if flop > 0.0 {
                        look(flop, Some(back));
                    }
                }
            }
        }
        let Some(Move { at, to, back, flop }) = best.1 else { return false };
        let e = self.placement[worst][at];
        match back {
            Some(back) => self.placement[worst][at] = std::mem::replace(&mut self.placement[to][back], e),
            None => {
                self.placement[worst].swap_remove(at);
                self.placement[to].push(e);
            }
        }
        self.left[worst] += flop;
        self.left[to] -= flop;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Link, Links, Tier, Tiers};
    use crate::objective::Problem;

    #[test]
    fn nobody_has_much_more_than_its_share() {
        let link = Link { alpha_ms: 0.0, beta_ms_per_mb: 0.0 };
        let links = Links::Tiers(Tiers::new(3, vec![Tier { size: 3, link }]).unwrap());
        // Room for exactly all of the twelve: with little of it and much to do, the dearest.
        let devices = [(0, 5), (1, 4), (2, 3)].map(|(id, memory)| Device::new(id, "a", 1e9, memory));
        let costs: Vec<f64> = (0..12).map(|e| 1e8 * f64::from(5 + e)).collect();
        let (cluster, workload) = (Cluster::new(devices.to_vec(), links), Workload::new(costs.clone()));
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        let total: f64 = costs.iter().sum();
        for share in [[0.32, 0.33, 0.35], [0.42, 0.33, 0.25], [0.5, 0.3, 0.2]] {
            let placement = dealt(&placed, &[0, 1, 2], &share).unwrap();
            assert_eq!(placement.iter().map(Vec::len).collect::<Vec<_>>(), [5, 4, 3]);
            for (held, share) in placement.iter().zip(share) {
                let load: f64 = held.iter().map(|&e| costs[e as usize]).sum();
                assert!((load / total - f64::from(share)).abs() < 0.01, "{load} of {total} for {share}");
            }
        }
        assert_eq!(dealt(&placed, &[1, 2], &[0.0, 0.5, 0.5]), None, "room for seven of twelve");
    }
}
