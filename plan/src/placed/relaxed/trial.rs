//! What a group takes with other members, and with shares that fit them.

use super::{FAR, Relaxed, Sums, Times, exchange};
use crate::cluster::LinkTable;
use crate::placed::{larger, smaller};

/// Steps of descent at most, and how many times what the last one gained the next ones may have to.
const DESCENT: usize = 4;
const HOPE: f32 = 3.0;
/// Steps more from shares that there is room for.
const DESCENT_HELD: usize = 2;

/// Where what one device alone is over the limit, or all are before the first step, is so many times what all may be, no steps will do.
const HOPELESS_ALONE: f32 = 1.5;
const HOPELESS: f32 = 2.5;

/// Shares that are together so near to 1 are all.
const ALL: f32 = 1e-4;

/// What the members of a group send to each other, by place, in rows of who receives.
#[derive(Clone, Default)]
pub(super) struct Packed {
    stride: usize,
    beta: Vec<f32>,
}

/// A device in a place where the packed group has another, or none: what each place sends to it, and what it sends to each.
#[derive(Default)]
struct Patch {
    place: Option<usize>,
    from: Vec<f32>,
    to: Vec<f32>,
}

/// A group that is looked at, by place.
#[derive(Default)]
pub(super) struct Trial {
    patch: Patch,
    pub sums: Vec<Sums>,
    /// Shares: at most, and as they are.
    most: Vec<f32>,
    pub share: Vec<f32>,
    sent: Vec<f32>,
    over: Vec<f32>,
    price: Vec<f32>,
    step: Vec<f32>,
    sent_step: Vec<f32>,
    /// For what share of all experts there is no room; shares that there is room for; shares, and what is sent, that have their price.
    without_room: f32,
    held: Vec<f32>,
    priced: Vec<f32>,
    priced_sent: Vec<f32>,
}

/// A change of a group: who leaves, and who comes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    pub out: Option<u32>,
    pub into: Option<u32>,
}

impl Change {
    /// Makes it in a list of members: who comes takes the place of who leaves, or else the last one does. The place that has another device then.
    pub fn make(self, members: &mut Vec<u32>) -> Option<usize> {
        let place = self.out.and_then(|out| members.iter().position(|&i| i == out));
        match (place, self.into) {
            (Some(place), Some(into)) => members[place] = into,
            (Some(place), None) => {
                members.swap_remove(place);
                return (place < members.len()).then_some(place);
            }
            (None, Some(into)) => members.push(into),
            (None, None) => return None,
        }
        Some(place.unwrap_or(members.len() - 1))
    }
}

#[inline]
fn add_times(sums: &mut [f32], row: &[f32], by: f32) {
    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += by * value);
}

/// So many values are taken together, and summed up in as many sums, so that vectors do it.
const LANES: usize = 8;

#[inline]
fn chunks(list: &[f32]) -> impl Iterator<Item = &[f32; LANES]> {
    list.as_chunks().0.iter()
}

#[inline]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    for (a, b) in chunks(a).zip(chunks(b)) {
        sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().sum()
}

impl Packed {
    /// Of at most `n` devices.
    pub fn new(n: usize) -> Packed {
        let stride = n.next_multiple_of(LANES);
        Packed { stride, beta: vec![0.0; n * stride] }
    }

    /// What each place sends to this one.
    pub fn row(&self, place: usize) -> &[f32] {
        &self.beta[place * self.stride..][..self.stride]
    }

    /// Enters all members; `beta` has what x sends to c at c n + x.
    pub fn pack(&mut self, members: &[u32], beta: &[f32], n: usize) {
        for (row, &c) in self.beta.chunks_mut(self.stride).zip(members) {
            row.iter_mut().zip(members).for_each(|(at, &x)| *at = beta[c as usize * n + x as usize]);
        }
    }

    /// Enters a patch for a group of `size` devices.
    fn enter(&mut self, patch: &Patch, size: usize) {
        let Some(place) = patch.place else { return };
        let stride = self.stride;
        self.beta[place * stride..][..size].copy_from_slice(&patch.from[..size]);
        for c in 0..size {
            self.beta[c * stride + place] = patch.to[c];
        }
    }

    /// What each place sends, if what each receives is `by` times what it would with all experts.
    fn sent(&self, patch: &Patch, by: &[f32], sent: &mut [f32]) {
        for (chunk, sent) in sent.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            // In registers until all are added up.
            let mut sums = [0.0; LANES];
            for (place, &by) in by.iter().enumerate() {
                let row = if patch.place == Some(place) { &patch.from[..] } else { self.row(place) };
                add_times(&mut sums, &row[chunk * LANES..][..LANES], by);
            }
            *sent = sums;
        }
        if let Some(place) = patch.place {
            sent[place] = by.iter().zip(&patch.to).map(|(by, to)| by * to).sum();
        }
    }

    /// For each place the sum over all of what they send to it, times `by`; `by` has 0 beyond the last.
    fn received(&self, patch: &Patch, by: &mut [f32], received: &mut [f32]) {
        let patched = patch.place.map(|place| std::mem::take(&mut by[place]));
        for (place, received) in received.iter_mut().enumerate() {
            let row = if patch.place == Some(place) { &patch.from[..] } else { self.row(place) };
            *received = dot(row, by);
        }
        if let (Some(place), Some(here)) = (patch.place, patched) {
            by[place] = here;
            received.iter_mut().zip(&patch.to).for_each(|(received, to)| *received += here * to);
        }
    }
}

impl<L: LinkTable> Relaxed<'_, '_, '_, L> {
    /// Group `g` is as it was tried.
    pub(super) fn enter(&mut self, which: usize, g: usize, times: Times) {
        let trial = &self.trials[which];
        for (place, &i) in self.groups[g].iter().enumerate() {
            self.share[i as usize] = trial.share[place];
            self.holds[i as usize] = trial.share[place] > 0.0;
            self.sums[i as usize] = trial.sums[place];
            self.sent[i as usize] = trial.sent[place];
        }
        self.packed[g].enter(&trial.patch, self.groups[g].len());
        self.compute_as_is[g] = self.compute_of(&self.groups[g]);
        self.room[g] = self.room_of(&self.groups[g]);
        self.without_room[g] = trial.without_room;
        self.times[g] = times;
        self.join(g);
    }

    /// What group `g` takes with these members, after a change by which `place` has another device, with shares that fit, which are left in a
    /// trial. `None` where memory does not suffice, or as soon as it seems to be over the limit by more than `most`.
    pub(super) fn after(
        &mut self,
        (which, g): (usize, usize),
        (members, place): (&[u32], Option<usize>),
        change: Change,
        slack: f32,
        limit: f32,
        most: f32,
    ) -> Option<Times> {
        self.ops += 2 * members.len() as u64;
        let compute = self.fitted(which, members, slack, limit, most)?;
        let mut trial = std::mem::take(&mut self.trials[which]);
        self.patch(&mut trial, (members, place), change);
        let times = self.settled(&mut trial, (g, members, change), compute, limit, most);
        self.trials[which] = trial;
        times
    }

    /// What the place with another device has to do with the others, and their sums with it; what is sent for alpha is as it was.
    fn patch(&self, trial: &mut Trial, (members, place): (&[u32], Option<usize>), Change { out, into }: Change) {
        let n = self.n();
        trial.patch.place = place;
        let rows = |c: Option<u32>| {
            let first = c? as usize * n;
            Some((&self.alpha[first..][..n], &self.beta[first..][..n]))
        };
        let (joined, left) = (rows(into), rows(out));
        trial.sums.clear();
        trial.sums.extend(members.iter().map(|&i| {
            let i = i as usize;
            let mut sums = self.sums[i];
            if let Some((alpha, beta)) = joined {
                sums.receive += alpha[i];
                sums.receive_all += beta[i];
            }
            if let Some((alpha, beta)) = left {
                sums.receive -= alpha[i];
                sums.receive_all -= beta[i];
            }
            sums
        }));
        if let Some(place) = place {
            let x = members[place] as usize * n;
            let (from, to) = (&self.beta_to[x..][..n], &self.beta[x..][..n]);
            trial.patch.from.clear();
            trial.patch.from.extend(members.iter().map(|&c| from[c as usize]));
            trial.patch.from.resize(members.len().next_multiple_of(LANES), 0.0);
            trial.patch.to.clear();
            trial.patch.to.extend(members.iter().map(|&c| to[c as usize]));
        }
        if let (Some(place), Some(into)) = (place, into) {
            let alpha = &self.alpha_to[into as usize * n..][..n];
            trial.sums[place].receive = members.iter().map(|&c| alpha[c as usize]).sum();
            trial.sums[place].receive_all = trial.patch.from.iter().sum();
        }
    }

    /// How long a group computes at least, as far as its devices have room; `None` where they have none for all, or that is over `most`.
    pub(super) fn least_compute(&self, members: &[u32], most: f32) -> Option<f32> {
        let size = members.len() as f32;
        let places = || members.iter().map(|&i| i as usize);
        let rate: f32 = places().map(|i| if self.most[i] > 0.0 { self.rate[i] } else { 0.0 }).sum();
        // Newton's method, from below, as what all compute in a time is concave.
        let mut least = size / rate;
        while least < FAR && least <= most {
            let (mut sum, mut slope) = (0.0, 0.0);
            for i in places() {
                let computed = least / size * self.rate[i];
                let full = computed >= self.most[i];
                sum += if full { self.most[i] } else { computed };
                slope += if full { 0.0 } else { self.rate[i] };
            }
            if sum >= 1.0 - ALL {
                return Some(least);
            }
            if slope <= 0.0 {
                return None;
            }
            least += (1.0 - sum) * size / slope;
        }
        None
    }

    /// How long the group computes, and in a trial what shares its members have at most. `None` where memory does not suffice or that is over the limit by
    /// more than `most`.
    fn fitted(&mut self, which: usize, members: &[u32], slack: f32, limit: f32, most: f32) -> Option<f32> {
        let size = members.len() as f32;
        let compute = (1.0 + slack) * self.least_compute(members, (limit + most / size) / (1.0 + slack))?;
        let at_most = &mut self.trials[which].most;
        at_most.clear();
        at_most.extend(members.iter().map(|&i| smaller(compute / size * self.rate[i as usize], self.most[i as usize])));
        Some(compute)
    }

    /// The shares, once compute and sums are known.
    fn settled(
        &mut self,
        trial: &mut Trial,
        (g, members, change): (usize, &[u32], Change),
        compute: f32,
        limit: f32,
        most: f32,
    ) -> Option<Times> {
        let (n, m) = (self.n(), members.len());
        let room = limit - compute;
        // Nobody receives for too long, if that can be.
        let (mut all, mut received) = (0.0, 0.0);
        trial.share.clear();
        trial.share.extend(trial.most.iter().zip(&trial.sums).map(|(most, sums)| {
            let share = ((room - sums.receive) / sums.receive_all.max(f32::MIN_POSITIVE)).clamp(0.0, *most);
            all += most;
            received += share;
            share
        }));
        let beyond = if received >= 1.0 { 0.0 } else { ((1.0001 - received) / (all - received).max(1e-9)).min(1.0) };
        let with = |share: &f32, most: &f32| if *share > 0.0 { *most } else { 0.0 };
        let (mut sum, mut at_most, mut have) = (0.0, 0.0, 0.0);
        for ((most, share), &i) in trial.most.iter_mut().zip(&mut trial.share).zip(members) {
            *most = *share + beyond * (*most - *share);
            // As before, as far as that fits.
            let before = smaller(self.share[i as usize], *most);
            *share = if before < self.least { 0.0 } else { before };
            sum += with(share, most);
            at_most += *most;
            have += *share;
        }
        if sum >= 1.0 {
            // Who has none needs none.
            trial.most.iter_mut().zip(&trial.share).for_each(|(most, share)| *most = with(share, most));
        } else {
            sum = at_most;
        }
        self.ops += 6 * m as u64;
        let more = (1.0 - have) / (sum - have).max(1e-9);
        // All together receive what all together send.
        let mut all = 0.0;
        for ((share, most), sums) in trial.share.iter_mut().zip(&trial.most).zip(&trial.sums) {
            *share = if have < 1.0 { *share + more * (most - *share) } else { *share / have };
            all += if *share > 0.0 { sums.receive + *share * sums.receive_all } else { 0.0 };
        }
        if all - m as f32 * room > most {
            return None;
        }
        // What each sends for alpha, to those that hold experts.
        let Change { out, into } = change;
        let mut turn = |c: u32, by: f32| {
            let alpha = &self.alpha_to[c as usize * n..][..n];
            trial.sums.iter_mut().zip(members).for_each(|(sums, &x)| sums.send += by * alpha[x as usize]);
        };
        for (&c, share) in members.iter().zip(&trial.share) {
            match (self.holds[c as usize] && into != Some(c), *share > 0.0) {
                (false, true) => turn(c, 1.0),
                (true, false) => turn(c, -1.0),
                _ => {}
            }
        }
        out.filter(|&c| self.holds[c as usize]).into_iter().for_each(|c| turn(c, -1.0));
        if let (Some(place), Some(into)) = (trial.patch.place, into) {
            let alpha = &self.alpha[into as usize * n..][..n];
            let to = |(&c, share): (&u32, &f32)| if *share > 0.0 { alpha[c as usize] } else { 0.0 };
            let send: f32 = members.iter().zip(&trial.share).map(to).sum();
            trial.sums[place].send = send;
            let sent: f32 = trial.patch.to.iter().zip(&trial.share).map(|(to, share)| to * share).sum();
            let mut times = Times { all: compute, over: 0.0 };
            exchange(&mut times, compute, &trial.sums[place], trial.share[place], send + sent, limit);
            if times.over > HOPELESS_ALONE * most {
                return None;
            }
        }
        self.send(trial, g, m);
        let mut times = measured(trial, compute, limit);
        if times.over > HOPELESS * most {
            return None;
        }
        for _ in 0..DESCENT {
            let before = times.over;
            if !self.descend(trial, g, m, room) {
                break;
            }
            times = measured(trial, compute, limit);
            if times.over - most > HOPE * (before - times.over).max(0.0) {
                return None;
            }
        }
        if times.over > most {
            return None;
        }
        self.ops += m as u64 / 2;
        trial.without_room = self.without_room(members, &trial.share[..m], &mut trial.held)?;
        if trial.without_room > 0.0 {
            times = self.held(trial, (g, members), compute, limit, most)?;
        }
        (times.over <= most).then_some(times)
    }

    /// What all send, with their shares as they are.
    fn send(&mut self, trial: &mut Trial, g: usize, m: usize) {
        let pad = m.next_multiple_of(LANES);
        trial.sent.resize(pad, 0.0);
        self.packed[g].sent(&trial.patch, &trial.share[..m], &mut trial.sent);
        trial.sent.iter_mut().zip(&trial.sums).for_each(|(sent, sums)| *sent += sums.send);
        self.ops += (m * pad) as u64 / 8;
    }

    /// What a group takes whose members have shares that they have no room for: with a price for that or, if that is less, with shares that they have
    /// room for. `None` where these are no longer for all experts.
    fn held(
        &mut self,
        trial: &mut Trial,
        (g, members): (usize, &[u32]),
        compute: f32,
        limit: f32,
        most: f32,
    ) -> Option<Times> {
        let m = members.len();
        let priced = measured(trial, compute + self.room_price * trial.without_room, limit);
        trial.priced.clone_from(&trial.share);
        trial.priced_sent.clone_from(&trial.sent);
        let (mut without_room, mut steps) = (trial.without_room, 0);
        let times = loop {
            if without_room > 0.0 {
                std::mem::swap(&mut trial.share, &mut trial.held);
                self.send(trial, g, m);
            }
            let ends = members.iter().zip(&trial.share).map(|(&i, share)| self.compute[i as usize] * share);
            let times = measured(trial, larger(compute, m as f32 * ends.fold(0.0, larger)), limit);
            if times.over <= most || steps == DESCENT_HELD || !self.descend(trial, g, m, limit - compute) {
                break times;
            }
            steps += 1;
            without_room = self.without_room(members, &trial.share[..m], &mut trial.held)?;
        };
        if priced.over < times.over {
            std::mem::swap(&mut trial.share, &mut trial.priced);
            std::mem::swap(&mut trial.sent, &mut trial.priced_sent);
            return Some(priced);
        }
        trial.without_room = 0.0;
        Some(times)
    }

    /// A step towards less that is sent for longer than there is room: the squares of what is too much decrease. False where there is none.
    fn descend(&mut self, trial: &mut Trial, g: usize, m: usize, room: f32) -> bool {
        let (packed, pad) = (&self.packed[g], trial.sent.len());
        let Trial { patch, most, share, sent, over, price, step, sent_step, .. } = trial;
        // Beyond the last place all are 0.
        over.clear();
        over.extend(sent[..m].iter().map(|sent| larger(sent - room, 0.0)));
        if over.iter().all(|over| *over == 0.0) {
            return false;
        }
        for list in [&mut *over, most, share, step] {
            list.resize(pad, 0.0);
        }
        price.clear();
        price.resize(pad, 0.0);
        packed.received(patch, over, &mut price[..m]);
        self.ops += (m * pad) as u64 / 4 + 4 * m as u64;
        let least = 0.02 / m as f32;
        let (mut priced, mut weights) = ([0.0; LANES], [0.0; LANES]);
        for ((most, share), price) in chunks(most).zip(chunks(share)).zip(chunks(price)) {
            for k in 0..LANES {
                let weight = larger(smaller(most[k] - share[k], share[k]), least);
                priced[k] += weight * price[k];
                weights[k] += weight;
            }
        }
        let weights = weights.iter().sum::<f32>() - (pad - m) as f32 * least;
        let mean = priced.iter().sum::<f32>() / weights;
        let (mut up, mut down) = ([0.0; LANES], [0.0; LANES]);
        let places = chunks(most).zip(chunks(share)).zip(chunks(price));
        for (((most, share), price), step) in places.zip(step.as_chunks_mut::<LANES>().0.iter_mut()) {
            for k in 0..LANES {
                let wanted = mean - price[k];
                step[k] = wanted * if wanted > 0.0 { most[k] - share[k] } else { share[k] };
                up[k] += larger(step[k], 0.0);
                down[k] -= smaller(step[k], 0.0);
            }
        }
        let [up, down]: [f32; 2] = [up, down].map(|sums| sums.iter().sum());
        if up <= 0.0 || down <= 0.0 {
            return false;
        }
        // As much goes as comes, and none further than it can.
        let (by_up, by_down) = ((down / up).min(1.0), (up / down).min(1.0));
        let mut steepest = [0.0f32; LANES];
        for ((most, share), step) in chunks(most).zip(chunks(share)).zip(step.as_chunks_mut::<LANES>().0.iter_mut()) {
            for k in 0..LANES {
                step[k] *= if step[k] > 0.0 { by_up } else { by_down };
                let room = if step[k] > 0.0 { most[k] - share[k] } else { share[k] };
                steepest[k] = larger(step[k].abs() / larger(room, f32::MIN_POSITIVE), steepest[k]);
            }
        }
        sent_step.resize(pad, 0.0);
        packed.sent(patch, &step[..m], sent_step);
        let mut square = [0.0; LANES];
        for (over, step) in chunks(over).zip(chunks(sent_step)) {
            for k in 0..LANES {
                square[k] += if over[k] > 0.0 { step[k] * step[k] } else { 0.0 };
            }
        }
        let along = -dot(over, sent_step);
        if along <= 0.0 {
            return false;
        }
        let furthest = 1.0 / steepest.iter().fold(f32::MIN_POSITIVE, |most, step| most.max(*step));
        let length = (along / square.iter().sum::<f32>()).min(furthest);
        add_times(share, step, length);
        add_times(sent, sent_step, length);
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
