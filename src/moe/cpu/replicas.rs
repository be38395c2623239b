//! Expert-parallel (EP) groups: each holds all experts, each has its own tokens, and together they make one layer.
//!
//! Within a group, rows go to experts as in any layer. Between groups, gradients are summed: those of an expert by its owners,
//! one in each group, one-sided and while backward still computes others ([`Replicas`]); those of the router and the
//! shared expert over all PEs. Where experts live may differ from group to group.

use std::time::Instant;

use crate::moe::spec::metrics::Phase;
use crate::moe::spec::{Groups, LayerConfig, Load, MlpGradients, MoeError};
use crate::shmem::{AsShmem, Cmp, Shmem, ShmemError, SignalOp, Sym, Wait, WaitTimeout};

/// What a layer asks of the other EP groups, which hold the same experts: [`Replicas`], or [`OneGroup`] where there are none.
pub trait Exchange {
    /// A backward pass begins.
    fn begin(&mut self);
    /// The gradients of local expert `local` are computed: they go out.
    fn ready(&mut self, local: usize, grads: &MlpGradients);
    /// Takes what has come; says whether there was anything. `grads` are those of the local experts.
    fn poll(&mut self, grads: &mut [MlpGradients]) -> bool;
    /// Waits until `grads` are sums over all groups.
    fn finish(&mut self, grads: &mut [MlpGradients], deadline: Instant) -> Result<(), MoeError>;
    /// Adds up `data` over all PEs, in their order.
    fn sum(&self, data: &mut [f32], deadline: Instant) -> Result<(), MoeError>;
    /// The loads of all PEs' tokens, in their order.
    fn loads(&self, mine: &Load, deadline: Instant) -> Result<Vec<Load>, MoeError>;
    /// The counts of all PEs, in their order, and which are this PE's.
    fn counts(&self, mine: &[u32], deadline: Instant) -> Result<(Vec<Vec<u32>>, usize), MoeError>;
    /// Bytes put to other PEs so far.
    fn bytes_put(&self) -> u64;
}

/// The exchange of a layer whose group is the only one.
#[derive(Clone, Copy, Debug)]
pub enum OneGroup {}

impl Exchange for OneGroup {
    fn begin(&mut self) {
        match *self {}
    }

    fn ready(&mut self, _: usize, _: &MlpGradients) {
        match *self {}
    }

    fn poll(&mut self, _: &mut [MlpGradients]) -> bool {
        match *self {}
    }

    fn finish(&mut self, _: &mut [MlpGradients], _: Instant) -> Result<(), MoeError> {
        match *self {}
    }

    fn sum(&self, _: &mut [f32], _: Instant) -> Result<(), MoeError> {
        match *self {}
    }

    fn loads(&self, _: &Load, _: Instant) -> Result<Vec<Load>, MoeError> {
        match *self {}
    }

    fn counts(&self, _: &[u32], _: Instant) -> Result<(Vec<Vec<u32>>, usize), MoeError> {
        match *self {}
    }

    fn bytes_put(&self) -> u64 {
        match *self {}
    }
}

/// How far the sum of an expert's gradients has come.
#[derive(Clone, Default)]
struct Sum {
    ready: bool,
    summed: bool,
    /// By other group: its part has been taken.
    taken: Vec<bool>,
}

/// The sums over groups of expert gradients, at one PE.
///
/// With K groups, an expert's gradients (all its matrices and biases, one after another) have K parts. Part j is summed by the
/// owner in group j: the others put theirs to it, each to a place of its own; it adds them in the order of groups, and
/// puts the sum to all. (Reduce-scatter and all-gather: each PE sends and receives 2 (K - 1) / K of the gradients.) Signals hold
/// the number of the backward pass. A place is written again in the next pass, when what was there has been read: a
/// contribution before its sum is sent, and who sends the next contribution has that sum; a sum before its receiver sends the
/// next contribution, without which there is no next sum.
pub struct Replicas<W> {
    world: W,
    groups: Groups,
    group: usize,
    experts: Vec<usize>,
    /// Elements of an expert's gradients.
    len: usize,
    /// Most elements of a part.
    part_len: usize,
    /// `[max_local, K - 1, part_len]`: parts of ours that other groups have put here; sums that they have.
    contributions: Sym<f32>,
    sums: Sym<f32>,
    /// `[2, max_local, K - 1]`: the pass whose contributions, sums are here.
    signals: Sym<u64>,
    pass: u64,
    state: Vec<Sum>,
    buffer: Vec<f32>,
    part: Vec<f32>,
}

/// Which of the two kinds of messages.
#[derive(Clone, Copy)]
enum MessageKind {
    Contribution = 0,
    Sum = 1,
}

impl<W: AsShmem> Replicas<W> {
    /// The exchange at this PE of `world` (collective). Its memory must be zero, as it is before anything was freed.
    ///
    /// # Errors
    /// When the heap is too small.
    pub fn new(world: W, config: &LayerConfig, groups: Groups) -> Result<Self, ShmemError> {
        let (floats, words) = sizes(config, &groups);
        let shmem = world.as_shmem();
        let me = shmem.my_pe();
        let len = gradient_len(config);
        let experts = groups.experts(me).to_vec();
        Ok(Replicas {
            group: groups.place(me).0,
            len,
            part_len: len.div_ceil(groups.len()),
            contributions: shmem.alloc(floats)?,
            sums: shmem.alloc(floats)?,
            signals: shmem.alloc(words)?,
            pass: 0,
            state: vec![Sum::default(); experts.len()],
            experts,
            groups,
            buffer: Vec::new(),
            part: Vec::new(),
            world,
        })
    }

    fn shmem(&self) -> &Shmem<W::Transport> {
        self.world.as_shmem()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<W> {
        let (k, mine) = (self.groups.len(), self.group);
        (1..k).map(move |distance| (mine + distance) % k)
    }

    /// Where `part` of an expert's gradients begins and ends.
    fn part(&self, part: usize) -> std::ops::Range<usize> {
        let k = self.groups.len();
        self.len * part / k..self.len * (part + 1) / k
    }

    /// At the owner of its local expert `local` in group `at`: the place and the signal of messages from group `from`.
    fn place(&self, kind: MessageKind, local: usize, from: usize, at: usize) -> (Sym<f32>, Sym<u64>) {
        let others = self.groups.len() - 1;
        let index = local * others + from - usize::from(from > at);
        let places = match kind {
            MessageKind::Contribution => self.contributions,
            MessageKind::Sum => self.sums,
        };
        let word = kind as usize * self.groups.max_local() * others + index;
        (places.slice(index * self.part_len..(index + 1) * self.part_len), self.signals.at(word))
    }

    /// Puts `data` to the owner of `expert` in group `to`.
    fn send(&mut self, kind: MessageKind, expert: usize, data: &[f32], to: usize) {
        let local = self.groups.placement(to).local(expert);
        let (place, signal) = self.place(kind, local, self.group, to);
        self.shmem().put_signal(place, data, signal, self.pass, SignalOp::Set, self.groups.owner(to, expert));
    }

    /// What would let expert `local` go on, and the group it is from.
    fn awaited(&self, local: usize) -> impl Iterator<Item = (Wait, usize)> + '_ {
        let state = &self.state[local];
        self.others().enumerate().filter_map(move |(i, from)| {
            let kind = match (state.summed, state.taken[i]) {
                (_, true) => None,
                (false, _) => Some(MessageKind::Contribution),
                (true, false) => Some(MessageKind::Sum),
            }?;
            let (_, signal) = self.place(kind, local, from, self.group);
            Some((Wait { signal, cmp: Cmp::Ge, value: self.pass }, from))
        })
    }

    fn error(&self, what: &'static str, timeout: WaitTimeout) -> MoeError {
        MoeError::wait(self.shmem(), timeout.index, what, Phase::AllReduce, timeout)
    }

    /// Sums this PE's part of expert `local` if all contributions are here, and sends the sum. Says whether.
    fn add_up(&mut self, local: usize, grads: &mut MlpGradients) -> bool {
        let here = |wait: (Wait, usize)| self.shmem().test(wait.0);
        if !self.state[local].ready || self.state[local].summed || !self.awaited(local).all(here) {
            return false;
        }
        let (mine, me) = (self.part(self.group), self.shmem().my_pe());
        let mut sum = std::mem::take(&mut self.buffer);
        let mut part = std::mem::take(&mut self.part);
        sum.clear();
        sum.resize(mine.len(), 0.0);
        part.resize(mine.len(), 0.0);
        for group in 0..self.groups.len() {
            if group == self.group {
                copy_out(grads, mine.start, &mut part);
            } else {
                self.shmem().get(&mut part, self.place(MessageKind::Contribution, local, group, self.group).0, me);
            }
            sum.iter_mut().zip(&part).for_each(|(sum, x)| *sum += x);
        }
        copy_in(grads, mine.start, &sum);
        self.state[local].summed = true;
        let expert = self.experts[local];
        for to in self.others() {
            self.send(MessageKind::Sum, expert, &sum, to);
        }
        (self.buffer, self.part) = (sum, part);
        true
    }

    /// Takes the sums of expert `local` that are here. Says whether there were any.
    fn take(&mut self, local: usize, grads: &mut MlpGradients) -> bool {
        let mut any = false;
        if !self.state[local].summed {
            return any;
        }
        let mut part = std::mem::take(&mut self.part);
        for (i, from) in self.others().enumerate() {
            let (place, signal) = self.place(MessageKind::Sum, local, from, self.group);
            if self.state[local].taken[i] || !self.shmem().test(Wait { signal, cmp: Cmp::Ge, value: self.pass }) {
                continue;
            }
            let range = self.part(from);
            part.resize(range.len(), 0.0);
            self.shmem().get(&mut part, place, self.shmem().my_pe());
            copy_in(grads, range.start, &part);
            self.state[local].taken[i] = true;
            any = true;
        }
        self.part = part;
        any
    }

    fn is_done(&self) -> bool {
        self.state.iter().all(|state| state.summed && state.taken.iter().all(|&taken| taken))
    }
}

impl<W: AsShmem> Exchange for Replicas<W> {
    fn begin(&mut self) {
        self.pass += 1;
        self.state.fill(Sum { taken: vec![false; self.groups.len() - 1], ..Sum::default() });
    }

    fn ready(&mut self, local: usize, grads: &MlpGradients) {
        let mut part = std::mem::take(&mut self.part);
        for to in self.others() {
            let range = self.part(to);
            part.resize(range.len(), 0.0);
            copy_out(grads, range.start, &mut part);
            self.send(MessageKind::Contribution, self.experts[local], &part, to);
        }
        self.part = part;
        self.state[local].ready = true;
    }

    fn poll(&mut self, grads: &mut [MlpGradients]) -> bool {
        let mut any = false;
        for (local, grads) in grads.iter_mut().enumerate() {
            any |= self.add_up(local, grads);
            any |= self.take(local, grads);
        }
        any
    }

    fn finish(&mut self, grads: &mut [MlpGradients], deadline: Instant) -> Result<(), MoeError> {
        while !self.is_done() {
            if self.poll(grads) {
                continue;
            }
            let (mut waits, mut owners) = (Vec::new(), Vec::new());
            for (local, &expert) in self.experts.iter().enumerate() {
                for (wait, from) in self.awaited(local).filter(|(wait, _)| !self.shmem().test(*wait)) {
                    waits.push(wait);
                    owners.push(self.groups.owner(from, expert));
                }
            }
            if waits.is_empty() {
                continue; // came meanwhile
            }
            self.shmem().wait_until_any(&waits, deadline).map_err(|mut timeout| {
                timeout.index = owners[timeout.index];
                self.error("its gradients of an expert", timeout)
            })?;
        }
        Ok(())
    }

    fn sum(&self, data: &mut [f32], deadline: Instant) -> Result<(), MoeError> {
        let sum = self.shmem().all_reduce_sum(self.shmem().world(), data, deadline);
        sum.map_err(|timeout| self.error("its gradients of replicated weights", timeout))
    }

    fn loads(&self, mine: &Load, deadline: Instant) -> Result<Vec<Load>, MoeError> {
        let e = mine.routed.len();
        let mut words = vec![mine.tokens, mine.z_sum.to_bits()];
        words.extend(&mine.routed);
        words.extend(mine.prob_sums.iter().map(|sum| sum.to_bits()));
        let mut all = vec![0; words.len() * self.shmem().n_pes()];
        let gathered = self.shmem().all_gather(self.shmem().world(), &words, &mut all, deadline);
        gathered.map_err(|timeout| self.error("its sums for the losses", timeout))?;
        let load = |words: &[u64]| Load {
            tokens: words[0],
            z_sum: f64::from_bits(words[1]),
            routed: words[2..2 + e].to_vec(),
            prob_sums: words[2 + e..].iter().map(|&bits| f64::from_bits(bits)).collect(),
        };
        Ok(all.chunks_exact(words.len()).map(load).collect())
    }

    fn counts(&self, mine: &[u32], deadline: Instant) -> Result<(Vec<Vec<u32>>, usize), MoeError> {
        let mut all = vec![0; mine.len() * self.shmem().n_pes()];
        let gathered = self.shmem().all_gather(self.shmem().world(), mine, &mut all, deadline);
        gathered.map_err(|timeout| self.error("its counts for the capacity", timeout))?;
        Ok((all.chunks_exact(mine.len()).map(<[u32]>::to_vec).collect(), self.shmem().my_pe()))
    }

    fn bytes_put(&self) -> u64 {
        self.shmem().bytes_put()
    }
}

/// Bytes of the world's heap that [`Replicas::new`] takes.
pub fn replica_bytes(config: &LayerConfig, groups: &Groups) -> usize {
    let (floats, words) = sizes(config, groups);
    2 * (floats * size_of::<f32>()).next_multiple_of(64) + (words * size_of::<u64>()).next_multiple_of(64)
}

/// Elements of `contributions` and of `signals`.
fn sizes(config: &LayerConfig, groups: &Groups) -> (usize, usize) {
    let places = groups.max_local() * (groups.len() - 1);
    (places * gradient_len(config).div_ceil(groups.len()), 2 * places)
}

/// Elements of the gradients of one expert.
fn gradient_len(config: &LayerConfig) -> usize {
    config
        .expert
        .projections()
        .iter()
        .map(|&proj| {
            let [out, inp] = config.expert.shape(proj, config.hidden);
            out * inp + if config.expert.bias { out } else { 0 }
        })
        .sum()
}

/// The gradients' elements from `start` on, as if they lay one after another: matrices, then biases.
fn copy_out(grads: &MlpGradients, mut start: usize, mut to: &mut [f32]) {
    for values in grads.matrix.iter().chain(&grads.bias) {
        let here = values.get(start..).unwrap_or_default();
        let n = here.len().min(to.len());
        let (head, tail) = to.split_at_mut(n);
        head.copy_from_slice(&here[..n]);
        to = tail;
        start = start.saturating_sub(values.len());
    }
    debug_assert!(to.is_empty());
}

/// The reverse of [`copy_out`].
fn copy_in(grads: &mut MlpGradients, mut start: usize, mut from: &[f32]) {
    for values in grads.matrix.iter_mut().chain(&mut grads.bias) {
        let len = values.len();
        let here = values.get_mut(start..).unwrap_or_default();
        let n = here.len().min(from.len());
        let (head, tail) = from.split_at(n);
        here[..n].copy_from_slice(head);
        from = tail;
        start = start.saturating_sub(len);
    }
    debug_assert!(from.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_gradients_go_out_and_in() {
        let numbered = |first: usize, n: usize| (first..first + n).map(|i| i as f32).collect::<Vec<_>>();
        let grads = MlpGradients {
            matrix: [numbered(0, 4), numbered(4, 3), numbered(7, 5)],
            bias: [Vec::new(), numbered(12, 2), numbered(14, 1)],
        };
        let mut back = MlpGradients {
            matrix: [vec![0.0; 4], vec![0.0; 3], vec![0.0; 5]],
            bias: [Vec::new(), vec![0.0; 2], vec![0.0; 1]],
        };
        for k in 1..=15 {
            for i in 0..k {
                let range = 15 * i / k..15 * (i + 1) / k;
                let mut part = vec![-1.0; range.len()];
                copy_out(&grads, range.start, &mut part);
                assert_eq!(part, numbered(range.start, range.len()));
                copy_in(&mut back, range.start, &part);
            }
            assert_eq!((&back.matrix, &back.bias), (&grads.matrix, &grads.bias), "{k} parts");
            back.matrix.iter_mut().chain(&mut back.bias).for_each(|values| values.fill(0.0));
        }
    }
}
