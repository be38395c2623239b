//! Which change of groups to try: of several the one that looks best with shares as they are.
//!
//! Shares that fit a change take far longer than a look at it, and of hundreds of changes one is taken.

use super::trial::Change;
use super::{Relaxed, indicator};
use crate::cluster::LinkTable;
use crate::placed::larger;
use crate::random::Random;

/// So many changes are looked at.
const CANDIDATES: usize = 16;
/// Where the excess is so many times what it may be, shares that fit will not make up for it.
const UNPROMISING: f32 = 4.0;

/// Who comes to a group, if anyone does: for how long the group may exchange then, and what the newcomer is over that.
#[derive(Clone, Copy)]
struct Newcomer {
    room: f32,
    over: f32,
}

impl<L: LinkTable> Relaxed<'_, '_, '_, L> {
    /// A device of group `g`, a group for it, and, for a change of places, a device of that group. `None` where for none there is
    /// memory, or none will do with an excess of at most `most`.
    pub(super) fn most_promising(
        &mut self,
        g: usize,
        swap: bool,
        random: &mut Random,
        most: f32,
    ) -> Option<(u32, usize, Option<u32>)> {
        let mut least = UNPROMISING * most - self.excess;
        let mut best = None;
        for _ in 0..CANDIDATES {
            let (h, i) = (random.below(self.groups.len()), self.groups[g][random.below(self.groups[g].len())]);
            if h == g {
                continue;
            }
            let back = swap.then(|| self.groups[h][random.below(self.groups[h].len())]);
            let (leaves, comes) = (self.room_of(&[i]), self.room_of(back.as_slice()));
            let room = [self.room[g] + comes - leaves, self.room[h] + leaves - comes];
            if room.iter().any(|room| *room < self.placed.experts.costs.len()) {
                self.ops += 1;
                continue;
            }
            let before = self.times[g].over + self.times[h].over;
            let most = least + before;
            self.ops += 2;
            let [to_h, to_g] = [(h, Change { out: back, into: Some(i) }), (g, Change { out: Some(i), into: back })];
            // What is too much for who comes most often is too much already.
            let there = self.newcomer(to_h);
            if there.over > most {
                continue;
            }
            let here = self.newcomer(to_g);
            if there.over + here.over > most {
                continue;
            }
            let over = self.guess(to_h, there, most - here.over);
            if over + here.over > most {
                continue;
            }
            let more = over + self.guess(to_g, here, most - over) - before;
            if more < least {
                (least, best) = (more, Some((i, h, back)));
            }
        }
        best
    }

    /// What who comes to group `k` is over the limit, with the share of who leaves, or none. The group computes for as much longer than it does as its
    /// members are slower.
    fn newcomer(&self, (k, Change { out, into }): (usize, Change)) -> Newcomer {
        let rate = |x: Option<u32>| x.map_or(0.0, |x| self.rate[x as usize]);
        let size = self.groups[k].len() as f32;
        let rates = larger(self.rates[k] + rate(into) - rate(out), f32::MIN_POSITIVE);
        let slower = (size + indicator(into.is_some()) - indicator(out.is_some())) * self.rates[k] / (size * rates);
        let room = self.limit - slower * self.compute_as_is[k];
        let Some(into) = into else { return Newcomer { room, over: 0.0 } };
        let (n, share) = (self.group_of.len(), out.map_or(0.0, |out| self.share[out as usize]));
        let mut links = self.joining[k * n + into as usize];
        if let Some(out) = out {
            let by = [indicator(share > 0.0), share, 1.0, 1.0];
            let pair = &self.pairs[out as usize * n + into as usize];
            links.iter_mut().zip(pair).zip(by).for_each(|((sum, link), by)| *sum -= by * link);
        }
        let received = indicator(share > 0.0) * (links[2] + share * links[3]);
        Newcomer { room, over: larger(larger(links[0] + links[1], received) - room, 0.0) }
    }

    /// What group `k` is over the limit after a change: who comes has the share of who leaves, or none, and all others have what they have. It stops
    /// adding up once that is over `most`.
    fn guess(&mut self, (k, Change { out, into }): (usize, Change), newcomer: Newcomer, most: f32) -> f32 {
        let n = self.group_of.len();
        let share = out.map_or(0.0, |out| self.share[out as usize]);
        let share_in = if into.is_some() { share } else { 0.0 };
        // Of who does not come or leave, any pairs, no times.
        let row = |x: Option<u32>, other: Option<u32>| &self.pairs[x.or(other).unwrap_or(0) as usize * n..][..n];
        let (pairs_in, pairs_out) = (row(into, out), row(out, into));
        let by_in = [indicator(share_in > 0.0), share_in, indicator(into.is_some()), indicator(into.is_some())];
        let by_out = [indicator(share > 0.0), share, indicator(out.is_some()), indicator(out.is_some())];
        let Newcomer { room, mut over } = newcomer;
        let mut seen = 0;
        for &x in self.groups[k].iter().filter(|x| Some(**x) != out) {
            if over > most {
                break;
            }
            seen += 1;
            let x = x as usize;
            let (sums, share) = (&self.sums[x], self.share[x]);
            let (a, b) = (&pairs_in[x], &pairs_out[x]);
            let more: [f32; 4] = std::array::from_fn(|at| a[at] * by_in[at] - b[at] * by_out[at]);
            let received = indicator(share > 0.0) * (sums.receive + more[2] + share * (sums.receive_all + more[3]));
            over += larger(larger(self.sent[x] + (more[0] + more[1]), received) - room, 0.0);
        }
        self.ops += 1 + seen;
        over
    }
}

#[cfg(test)]
mod tests {
    use super::super::FAR;
    use super::super::tests::mixed;
    use super::*;
    use crate::cluster::{Links, Matrix};
    use crate::objective::Problem;
    use crate::placed::Placed;
    use crate::placed::search::FoundPlaced;

    #[test]
    fn a_guess_is_what_groups_take_with_shares_as_they_are() {
        let (mut cluster, workload) = mixed(12);
        let mut random = Random(7);
        let mut links = || (0..36).map(|_| 0.01 * (1 + random.below(100)) as f64).collect::<Vec<f64>>();
        cluster.links = Links::Matrix(Matrix::new(6, links(), links()));
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        let groups = vec![vec![0, 1, 2], vec![3, 4, 5]];
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let mut relaxed = Relaxed::new(&placed, &FoundPlaced::new(&placed, groups, placements));
        // Two hold nothing.
        relaxed.share = vec![0.5, 0.0, 0.5, 0.3, 0.7, 0.0];
        relaxed.aim(relaxed.start_ms, 0.9);
        (0..2).for_each(|g| relaxed.join(g));
        let changes = [
            (Some(0), Some(3)),
            (Some(1), Some(4)),
            (Some(2), Some(5)),
            (None, Some(3)),
            (Some(2), None),
            (Some(1), None),
        ];
        for (out, into) in changes {
            let members: Vec<u32> = [0, 1, 2].into_iter().filter(|&x| Some(x) != out).chain(into).collect();
            let share = |c: u32| match (out, Some(c) == into) {
                (Some(out), true) => relaxed.share[out as usize],
                (None, true) => 0.0,
                (_, false) => relaxed.share[c as usize],
            };
            let over = members.iter().map(|&x| {
                let (mut sent, mut received) = (0.0, 0.0);
                for &c in members.iter().filter(|&&c| c != x) {
                    let (to, from) = (x as usize * 6 + c as usize, c as usize * 6 + x as usize);
                    sent += if share(c) > 0.0 { relaxed.alpha[to] + relaxed.beta[to] * share(c) } else { 0.0 };
                    received += relaxed.alpha[from] + relaxed.beta[from] * share(x);
                }
                let received = if share(x) > 0.0 { received } else { 0.0 };
                (relaxed.compute_as_is[0] + sent.max(received) - relaxed.limit).max(0.0)
            });
            let (over, change) = (over.sum::<f32>(), Change { out, into });
            let newcomer = relaxed.newcomer((0, change));
            let guess = relaxed.guess((0, change), newcomer, FAR);
            assert!(over > 0.0 && (guess - over).abs() < 1e-4 * over, "{change:?} {guess} {over}");
            let stopped = relaxed.guess((0, change), newcomer, 0.5 * over);
            assert!(stopped > 0.5 * over && stopped <= guess, "{change:?} is known to be too much");
        }
    }
}
