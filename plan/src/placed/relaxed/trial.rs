//! What a group takes with other members, and with shares that fit them.

use super::{Relaxed, Sums, Times, exchange};
use crate::cluster::LinkTable;

/// Steps of descent at most, and how many times what the last one gained the next ones may have to.
const DESCENT: usize = 4;
const HOPE: f32 = 3.0;

/// A group that is looked at, by place; rows have a multiple of 8 places.
#[derive(Default)]
pub(super) struct Trial {
    /// What all members send to c, if that held all experts; in rows of c.
    beta: Vec<f32>,
    pub sums: Vec<Sums>,
    /// Shares: at most, and as they are.
    most: Vec<f32>,
    pub share: Vec<f32>,
    sent: Vec<f32>,
    price: Vec<f32>,
    step: Vec<f32>,
    sent_step: Vec<f32>,
}

/// A change of a group: who leaves, and who comes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    pub out: Option<u32>,
    pub into: Option<u32>,
}

#[inline]
fn add_times(sums: &mut [f32], row: &[f32], by: f32) {
    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += by * value);
}

impl<L: LinkTable> Relaxed<'_, '_, '_, L> {
    /// What a group of these members, after a change, takes with shares that fit, which are left in a trial. `None` where memory does not suffice,
    /// or as soon as it seems to be over the limit by more than `most`.
    pub(super) fn after(
        &mut self,
        which: usize,
        members: &[u32],
        Change { out, into }: Change,
        slack: f32,
        limit: f32,
        most: f32,
    ) -> Option<Times> {
        let n = self.n();
        self.ops += 2 * members.len() as u64;
        let compute = self.fitted(which, members, slack, limit, most)?;
        self.ops += (members.len() * members.len()) as u64 / 2;
        let mut trial = std::mem::take(&mut self.trials[which]);
        trial.sums.clear();
        trial.sums.extend(members.iter().map(|&i| {
            if into == Some(i) {
                return self.sums_of(i, members);
            }
            let x = i as usize;
            let mut sums = self.sums[x];
            for (other, sign) in [(into, 1.0), (out, -1.0)] {
                if let Some(c) = other {
                    let c = c as usize;
                    sums.receive += sign * self.alpha[c * n + x];
                    sums.receive_all += sign * self.beta[c * n + x];
                }
            }
            sums
        }));
        let times = self.settled(&mut trial, members, compute, limit, most);
        self.trials[which] = trial;
        times
    }

    /// How long the group computes, and in a trial what shares its members have at most, so that together they can have all. `None` where memory
    /// does not suffice or that is over the limit by more than `most`.
    fn fitted(&mut self, which: usize, members: &[u32], slack: f32, limit: f32, most: f32) -> Option<f32> {
        if !self.placed.problem.valid(members) {
            return None;
        }
        let size = members.len() as f32;
        let places = || members.iter().map(|&i| i as usize);
        let rate: f32 = places().filter(|&i| self.most[i] > 0.0).map(|i| 1.0 / self.compute[i]).sum();
        let mut compute = size / rate * (1.0 + slack);
        let at_most = &mut self.trials[which].most;
        while size * (compute - limit) <= most {
            at_most.clear();
            at_most.extend(places().map(|i| (compute / (size * self.compute[i])).min(self.most[i])));
            let sum: f32 = at_most.iter().sum();
            if sum >= 1.0 {
                return Some(compute);
            }
            // Those whose memory is full leave more to others.
            compute *= 1.02 / sum.max(0.1);
        }
        None
    }

    /// The shares, once compute and sums are known.
    fn settled(&mut self, trial: &mut Trial, members: &[u32], compute: f32, limit: f32, most: f32) -> Option<Times> {
        let (n, m) = (self.n(), members.len());
        let pad = m.next_multiple_of(8);
        let room = limit - compute;
        // Nobody receives for too long, if that can be.
        let all: f32 = trial.most.iter().sum();
        trial.share.clear();
        trial.share.extend(
            trial.most.iter().zip(&trial.sums).map(|(most, sums)| {
                ((room - sums.receive) / sums.receive_all.max(f32::MIN_POSITIVE)).clamp(0.0, *most)
            }),
        );
        let received: f32 = trial.share.iter().sum();
        let beyond = if received >= 1.0 { 0.0 } else { ((1.0001 - received) / (all - received).max(1e-9)).min(1.0) };
        trial.most.iter_mut().zip(&trial.share).for_each(|(most, share)| *most = share + beyond * (*most - share));
        // As before, as far as that fits.
        for (place, &i) in members.iter().enumerate() {
            let share = self.share[i as usize].min(trial.most[place]);
            trial.share[place] = if share < self.least { 0.0 } else { share };
        }
        let with = |share: &f32, most: &f32| if *share > 0.0 { *most } else { 0.0 };
        let mut sum: f32 = trial.share.iter().zip(&trial.most).map(|(share, most)| with(share, most)).sum();
        if sum >= 1.0 {
            // Who has none needs none.
            trial.most.iter_mut().zip(&trial.share).for_each(|(most, share)| *most = with(share, most));
        } else {
            sum = trial.most.iter().sum();
        }
        let have: f32 = trial.share.iter().sum();
        if have < 1.0 {
            let more = (1.0 - have) / (sum - have).max(1e-9);
            trial.share.iter_mut().zip(&trial.most).for_each(|(share, most)| *share += more * (most - *share));
        } else {
            trial.share.iter_mut().for_each(|share| *share /= have);
        }
        // What each sends.
        trial.beta.clear();
        trial.beta.resize(m * pad, 0.0);
        trial.sent.clear();
        trial.sent.resize(pad, 0.0);
        for (place, &c) in members.iter().enumerate() {
            let share = trial.share[place];
            let (to, row) = (&self.beta_to[c as usize * n..][..n], &mut trial.beta[place * pad..][..pad]);
            row.iter_mut().zip(members).for_each(|(beta, &x)| *beta = to[x as usize]);
            if share > 0.0 {
                add_times(&mut trial.sent, row, share);
            }
        }
        for (place, &x) in members.iter().enumerate() {
            let alpha = &self.alpha[x as usize * n..][..n];
            let to = |(&c, share): (&u32, &f32)| if *share > 0.0 { alpha[c as usize] } else { 0.0 };
            let send: f32 = members.iter().zip(&trial.share).map(to).sum();
            trial.sums[place].send = send;
            trial.sent[place] += send;
        }
        let mut times = measured(trial, compute, limit);
        for _ in 0..DESCENT {
            let before = times.over;
            if !self.descend(trial, members, room) {
                break;
            }
            times = measured(trial, compute, limit);
            if times.over - most > HOPE * (before - times.over).max(0.0) {
                return None;
            }
        }
        (times.over <= most).then_some(times)
    }

    /// A step towards less that is sent for longer than there is room: the squares of what is too much decrease. False where there is none.
    fn descend(&mut self, trial: &mut Trial, members: &[u32], room: f32) -> bool {
        let (n, m) = (self.n(), members.len());
        let pad = trial.sent.len();
        trial.price.clear();
        trial.price.resize(m, 0.0);
        let mut rows = 0;
        for (place, &x) in members.iter().enumerate() {
            let over = trial.sent[place] - room;
            if over > 0.0 {
                let row = &self.beta[x as usize * n..][..n];
                trial.price.iter_mut().zip(members).for_each(|(price, &c)| *price += over * row[c as usize]);
                rows += 1;
            }
        }
        self.ops += ((rows + m) * m) as u64 / 4 + m as u64;
        if rows == 0 {
            return false;
        }
        let (mut sum, mut weights) = (0.0, 0.0);
        for place in 0..m {
            let (share, most) = (trial.share[place], trial.most[place]);
            let weight = (most - share).min(share).max(0.02 / m as f32);
            sum += weight * trial.price[place];
            weights += weight;
        }
        let mean = sum / weights;
        let (mut up, mut down) = (0.0, 0.0);
        trial.step.clear();
        for place in 0..m {
            let step = mean - trial.price[place];
            let step = step * if step > 0.0 { trial.most[place] - trial.share[place] } else { trial.share[place] };
            trial.step.push(step);
            if step > 0.0 { up += step } else { down -= step }
        }
        if up <= 0.0 || down <= 0.0 {
            return false;
        }
        // As much goes as comes, and none further than it can.
        let (by_up, by_down) = ((down / up).min(1.0), (up / down).min(1.0));
        let mut furthest = f32::INFINITY;
        trial.sent_step.clear();
        trial.sent_step.resize(pad, 0.0);
        for place in 0..m {
            let step = &mut trial.step[place];
            *step *= if *step > 0.0 { by_up } else { by_down };
            if *step != 0.0 {
                let room = if *step > 0.0 { trial.most[place] - trial.share[place] } else { trial.share[place] };
                furthest = furthest.min(room / step.abs());
                add_times(&mut trial.sent_step, &trial.beta[place * pad..][..pad], *step);
            }
        }
        let (mut along, mut square) = (0.0, 0.0);
        for (sent, step) in trial.sent[..m].iter().zip(&trial.sent_step) {
            if *sent > room {
                along -= (sent - room) * step;
                square += step * step;
            }
        }
        if along <= 0.0 {
            return false;
        }
        let length = (along / square).min(furthest);
        add_times(&mut trial.share, &trial.step, length);
        add_times(&mut trial.sent, &trial.sent_step, length);
        true
    }
}

fn measured(trial: &Trial, compute: f32, limit: f32) -> Times {
    let mut times = Times { all: compute, over: 0.0 };
    for ((sums, share), sent) in trial.sums.iter().zip(&trial.share).zip(&trial.sent) {
        exchange(&mut times, compute, sums, *share, *sent, limit);
    }
    times
}
