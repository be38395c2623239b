//! Expert-parallel (EP) groups. Each group holds all experts and has its own tokens; all groups together are one layer.
//!
//! Dispatch stays within a group. Gradients of an expert are summed over all PEs that hold the expert, in all groups, by one-sided puts
//! that overlap with backward ([`Replicas`]). Gradients of the router and of the shared expert are summed over all PEs. Placements may
//! differ from group to group.

use std::time::Instant;

use crate::moe::spec::metrics::Phase;
use crate::moe::spec::{Groups, LayerConfig, Load, MlpGradients, MoeError};
use crate::shmem::{AsShmem, Cmp, Shmem, ShmemError, SignalOp, Sym, Wait, WaitTimeout};

/// A layer's communication with the other PEs that hold the same experts: [`Replicas`], or [`OneGroup`] for a layer
/// without replicas.
pub trait Exchange {
    /// Starts a backward pass.
    fn begin(&mut self);
    /// Sends the complete gradients of local expert `local`.
    fn ready(&mut self, local: usize, grads: &MlpGradients);
    /// Processes contributions and sums that have arrived. `grads` are the gradients of the local experts. Returns false if it had nothing
    /// to process.
    fn poll(&mut self, grads: &mut [MlpGradients]) -> bool;
    /// Waits until `grads` are the sums over all replicas.
    ///
    /// # Errors
    ///
    /// Returns a wait error if a peer is lost or `deadline` passes; likewise for the methods below.
    fn finish(&mut self, grads: &mut [MlpGradients], deadline: Instant) -> Result<(), MoeError>;
    /// Sums `data` over all PEs, in the order of PEs.
    fn sum(&self, data: &mut [f32], deadline: Instant) -> Result<(), MoeError>;
    /// The loads of all PEs' tokens, by PE.
    fn loads(&self, own: &Load, deadline: Instant) -> Result<Vec<Load>, MoeError>;
    /// The counts of all PEs, by PE, and this PE's index among them.
    fn counts(&self, own: &[u32], deadline: Instant) -> Result<(Vec<Vec<u32>>, usize), MoeError>;
    /// Switches to the placement of `groups` (collective over all PEs).
    fn regroup(&mut self, groups: &Groups, deadline: Instant) -> Result<(), MoeError>;
    /// Bytes put to other PEs since the start, and how many of them were sent over a network.
    fn bytes_put(&self) -> [u64; 2];
}

/// The exchange of a layer with a single group and no replicas. Cannot be instantiated.
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

    fn regroup(&mut self, _: &Groups, _: Instant) -> Result<(), MoeError> {
        match *self {}
    }

    fn bytes_put(&self) -> [u64; 2] {
        match *self {}
    }
}

/// Progress of the sum of one expert's gradients.
#[derive(Clone, Default)]
struct SumState {
    ready: bool,
    summed: bool,
    /// By other holder: whether the holder's sum has been copied.
    received: Vec<bool>,
}

/// One PE's part in summing expert gradients over replicas.
///
/// The gradients of an expert with K holders (its matrices and biases, one after another) are split into K parts. Holder j sums part j: the
/// other holders put their contributions to separate slots of its memory, and it adds them in the order of holders and puts the sum to all.
/// (Reduce-scatter and all-gather: each PE sends and receives 2 (K - 1) / K of the gradients.) Signals hold the number of the backward
/// pass. A slot is overwritten only in the next pass, when its content has been read. For a contribution: it is read before its sum is
/// sent, and the sender waits for that sum before it sends its next contribution. For a sum: it is read before its receiver sends the next
/// contribution, without which there is no next sum.
pub struct Replicas<W> {
    world: W,
    experts: Vec<ReplicatedExpert>,
    /// Elements of one expert's gradients.
    len: usize,
    /// K - 1 slots for each local expert: contributions to this PE's part, and the sums of the other parts.
    contributions: Sym<f32>,
    sums: Sym<f32>,
    /// By local expert and slot: the last pass whose contribution or sum has arrived.
    signals: Sym<u64>,
    pass: u64,
    state: Vec<SumState>,
    buffer: Vec<f32>,
    part: Vec<f32>,
}

/// A local expert and its replicas.
struct ReplicatedExpert {
    /// The PEs that hold the expert, including this one, in the order of groups.
    holders: Vec<usize>,
    /// This PE's index in `holders`.
    me: usize,
    /// By holder: the position of its slots for this expert.
    slot_offsets: Vec<SlotOffset>,
}

impl ReplicatedExpert {
    /// Indices of the other holders, starting after this PE.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (k, me) = (self.holders.len(), self.me);
        (1..k).map(move |distance| (me + distance) % k)
    }
}

/// Position of a PE's slots for one expert: the first element in `contributions` and `sums`, and the first word in
/// `signals`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SlotOffset {
    element: usize,
    word: usize,
}

#[derive(Clone, Copy)]
enum MessageKind {
    Contribution = 0,
    Sum = 1,
}

impl<W: AsShmem> Replicas<W> {
    /// Allocates the exchange of this PE of `world` (collective). The heap's memory must be zero, as it is until memory is freed.
    ///
    /// # Errors
    ///
    /// Returns `ShmemError` if the heap is too small.
    pub fn new(world: W, config: &LayerConfig, groups: Groups) -> Result<Self, ShmemError> {
        Self::with_slots(world, config, groups, None)
    }

    /// Like [`new`](Self::new), with memory for any placement of at most `slots` experts per PE.
    ///
    /// # Errors
    ///
    /// Returns `ShmemError` if the heap is too small.
    pub fn with_slots(
        world: W,
        config: &LayerConfig,
        groups: Groups,
        slots: Option<usize>,
    ) -> Result<Self, ShmemError> {
        let shmem = world.as_shmem();
        let len = config.expert_elements();
        let (experts, size) = replicated_experts(shmem.my_pe(), len, &groups);
        let size = size_for(len, size, &groups, slots);
        Ok(Replicas {
            len,
            contributions: shmem.alloc(size.element)?,
            sums: shmem.alloc(size.element)?,
            signals: shmem.alloc(size.word)?,
            pass: 0,
            state: vec![SumState::default(); experts.len()],
            experts,
            buffer: Vec::new(),
            part: Vec::new(),
            world,
        })
    }

    fn shmem(&self) -> &Shmem<W::Transport> {
        self.world.as_shmem()
    }

    /// Element range of part `part` of local expert `local`'s gradients.
    fn part(&self, local: usize, part: usize) -> std::ops::Range<usize> {
        let k = self.experts[local].holders.len();
        self.len * part / k..self.len * (part + 1) / k
    }

    /// The slot and the signal at holder `at` for messages from holder `from`. Both are holders of local expert `local`.
    fn slot(&self, kind: MessageKind, local: usize, from: usize, at: usize) -> (Sym<f32>, Sym<u64>) {
        let ReplicatedExpert { holders, slot_offsets, .. } = &self.experts[local];
        let others = holders.len() - 1;
        let index = from - usize::from(from > at);
        let buffer = match kind {
            MessageKind::Contribution => self.contributions,
            MessageKind::Sum => self.sums,
        };
        let part_len = part_len(self.len, holders.len());
        let element = slot_offsets[at].element + index * part_len;
        let word = slot_offsets[at].word + kind as usize * others + index;
        (buffer.slice(element..element + part_len), self.signals.at(word))
    }

    /// Puts `data` to holder `to` of local expert `local`.
    fn send(&mut self, kind: MessageKind, local: usize, data: &[f32], to: usize) {
        let ReplicatedExpert { me, holders, .. } = &self.experts[local];
        let (slot, signal) = self.slot(kind, local, *me, to);
        self.shmem().put_signal(slot, data, signal, self.pass, SignalOp::Set, holders[to]);
    }

    /// The waits whose completion lets the sum of expert `local` make progress, each with the PE that signals.
    fn pending_waits(&self, local: usize) -> impl Iterator<Item = (Wait, usize)> + '_ {
        let (state, expert) = (&self.state[local], &self.experts[local]);
        expert.others().enumerate().filter_map(move |(i, from)| {
            let kind = match (state.summed, state.received[i]) {
                (_, true) => None,
                (false, _) => Some(MessageKind::Contribution),
                (true, false) => Some(MessageKind::Sum),
            }?;
            let (_, signal) = self.slot(kind, local, from, expert.me);
            Some((Wait { signal, cmp: Cmp::Ge, value: self.pass }, expert.holders[from]))
        })
    }

    fn error(&self, what: &'static str, timeout: WaitTimeout) -> MoeError {
        MoeError::wait(self.shmem(), timeout.index, what, Phase::AllReduce, timeout)
    }

    /// If all contributions have arrived: sums this PE's part of expert `local`, sends the sum, and returns true.
    fn reduce(&mut self, local: usize, grads: &mut MlpGradients) -> bool {
        let arrived = |wait: (Wait, usize)| self.shmem().test(wait.0);
        if !self.state[local].ready || self.state[local].summed || !self.pending_waits(local).all(arrived) {
            return false;
        }
        let pe = self.shmem().my_pe();
        let (k, me) = (self.experts[local].holders.len(), self.experts[local].me);
        let own = self.part(local, me);
        let mut sum = std::mem::take(&mut self.buffer);
        let mut part = std::mem::take(&mut self.part);
        sum.clear();
        sum.resize(own.len(), 0.0);
        part.resize(own.len(), 0.0);
        for holder in 0..k {
            if holder == me {
                copy_out(grads, own.start, &mut part);
            } else {
                self.shmem().get(&mut part, self.slot(MessageKind::Contribution, local, holder, me).0, pe);
            }
            sum.iter_mut().zip(&part).for_each(|(sum, x)| *sum += x);
        }
        copy_in(grads, own.start, &sum);
        self.state[local].summed = true;
        for to in self.experts[local].others() {
            self.send(MessageKind::Sum, local, &sum, to);
        }
        (self.buffer, self.part) = (sum, part);
        true
    }

    /// Copies the sums of expert `local` that have arrived. Returns false if no sum had arrived.
    fn receive_sums(&mut self, local: usize, grads: &mut MlpGradients) -> bool {
        let mut any = false;
        if !self.state[local].summed {
            return any;
        }
        let mut part = std::mem::take(&mut self.part);
        for (i, from) in self.experts[local].others().enumerate() {
            let (slot, signal) = self.slot(MessageKind::Sum, local, from, self.experts[local].me);
            if self.state[local].received[i] || !self.shmem().test(Wait { signal, cmp: Cmp::Ge, value: self.pass }) {
                continue;
            }
            let range = self.part(local, from);
            part.resize(range.len(), 0.0);
            self.shmem().get(&mut part, slot, self.shmem().my_pe());
            copy_in(grads, range.start, &part);
            self.state[local].received[i] = true;
            any = true;
        }
        self.part = part;
        any
    }

    fn is_done(&self) -> bool {
        self.state.iter().all(|state| state.summed && state.received.iter().all(|&received| received))
    }
}

impl<W: AsShmem> Exchange for Replicas<W> {
    fn begin(&mut self) {
        self.pass += 1;
        for (state, expert) in self.state.iter_mut().zip(&self.experts) {
            // An expert with a single holder needs no sum.
            let single = expert.holders.len() == 1;
            *state = SumState { ready: single, summed: single, received: vec![false; expert.holders.len() - 1] };
        }
    }

    fn ready(&mut self, local: usize, grads: &MlpGradients) {
        let mut part = std::mem::take(&mut self.part);
        for to in self.experts[local].others() {
            let range = self.part(local, to);
            part.resize(range.len(), 0.0);
            copy_out(grads, range.start, &mut part);
            self.send(MessageKind::Contribution, local, &part, to);
        }
        self.part = part;
        self.state[local].ready = true;
    }

    fn poll(&mut self, grads: &mut [MlpGradients]) -> bool {
        let mut any = false;
        for (local, grads) in grads.iter_mut().enumerate() {
            any |= self.reduce(local, grads);
            any |= self.receive_sums(local, grads);
        }
        any
    }

    fn finish(&mut self, grads: &mut [MlpGradients], deadline: Instant) -> Result<(), MoeError> {
        while !self.is_done() {
            if self.poll(grads) {
                continue;
            }
            let pending_waits = (0..self.experts.len()).flat_map(|local| self.pending_waits(local));
            let (waits, holders): (Vec<_>, Vec<_>) =
                pending_waits.filter(|(wait, _)| !self.shmem().test(*wait)).unzip();
            if waits.is_empty() {
                continue; // arrived in the meantime
            }
            self.shmem().wait_until_any(&waits, deadline).map_err(|mut timeout| {
                timeout.index = holders[timeout.index];
                self.error("its gradients of an expert", timeout)
            })?;
        }
        Ok(())
    }

    fn sum(&self, data: &mut [f32], deadline: Instant) -> Result<(), MoeError> {
        let sum = self.shmem().all_reduce_sum(self.shmem().world(), data, deadline);
        sum.map_err(|timeout| self.error("its gradients of replicated weights", timeout))
    }

    fn loads(&self, own: &Load, deadline: Instant) -> Result<Vec<Load>, MoeError> {
        let e = own.routed.len();
        let mut words = vec![own.tokens, own.z_sum.to_bits()];
        words.extend(&own.routed);
        words.extend(own.prob_sums.iter().map(|sum| sum.to_bits()));
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

    fn counts(&self, own: &[u32], deadline: Instant) -> Result<(Vec<Vec<u32>>, usize), MoeError> {
        let mut all = vec![0; own.len() * self.shmem().n_pes()];
        let gathered = self.shmem().all_gather(self.shmem().world(), own, &mut all, deadline);
        gathered.map_err(|timeout| self.error("its counts for the capacity", timeout))?;
        Ok((all.chunks_exact(own.len()).map(<[u32]>::to_vec).collect(), self.shmem().my_pe()))
    }

    fn regroup(&mut self, groups: &Groups, deadline: Instant) -> Result<(), MoeError> {
        let (experts, size) = replicated_experts(self.shmem().my_pe(), self.len, groups);
        if size.element > self.sums.len() || size.word > self.signals.len() {
            let why = "the exchange between replicas was made without room for it (`Replicas::with_slots`)".into();
            return Err(MoeError::Usage { what: "move experts", why });
        }
        self.state = vec![SumState::default(); experts.len()];
        self.experts = experts;
        // Slots now belong to other experts, so all PEs must synchronise before they use them. Signal words need not be cleared, because
        // pass numbers only increase.
        let shmem = self.shmem();
        let error = |timeout: WaitTimeout| {
            MoeError::wait(shmem, timeout.index, "that its experts have moved", Phase::Move, timeout)
        };
        shmem.barrier_all(deadline).map_err(error)
    }

    fn bytes_put(&self) -> [u64; 2] {
        [self.shmem().bytes_put(), self.shmem().network_bytes_put()]
    }
}

/// Heap bytes that [`Replicas::with_slots`] allocates.
pub fn replica_bytes(config: &LayerConfig, groups: &Groups, slots: Option<usize>) -> usize {
    let len = config.expert_elements();
    let (_, size) = slot_offsets(len, groups, &groups.holders());
    let SlotOffset { element, word } = size_for(len, size, groups, slots);
    2 * (element * size_of::<f32>()).next_multiple_of(64) + (word * size_of::<u64>()).next_multiple_of(64)
}

/// The experts of PE `me` with the positions of their slots, and the memory for slots of the PE that needs most.
fn replicated_experts(me: usize, len: usize, groups: &Groups) -> (Vec<ReplicatedExpert>, SlotOffset) {
    let all = groups.holders();
    let (slot_offsets, size) = slot_offsets(len, groups, &all);
    let of = |&expert: &usize| {
        let holders = all[expert].clone();
        let offset =
            |pe: &usize| slot_offsets[*pe][groups.experts(*pe).binary_search(&expert).expect("a holder has it")];
        let index = holders.iter().position(|pe| *pe == me).expect("this PE holds its experts");
        ReplicatedExpert { slot_offsets: holders.iter().map(offset).collect(), me: index, holders }
    };
    (groups.experts(me).iter().map(of).collect(), size)
}

/// The size of the buffers for exchanging gradients: `now`, or, with `slots`, enough for any placement of at most `slots` experts per PE.
/// Each of an expert's K holders needs K - 1 buffers of ceil(`len` / K) elements, less than `len` + K in all, and K is at most the number
/// of PEs.
fn size_for(len: usize, now: SlotOffset, groups: &Groups, slots: Option<usize>) -> SlotOffset {
    let Some(slots) = slots else { return now };
    let pes: usize = (0..groups.len()).map(|g| groups.members(g).len()).sum();
    SlotOffset { element: slots * (len + pes), word: 2 * slots * (pes - 1) }
}

/// Number of elements in the largest part, if gradients are split into `holders` parts.
fn part_len(len: usize, holders: usize) -> usize {
    len.div_ceil(holders)
}

/// The position of the slots of each local expert, by PE; and the memory for slots of the PE that needs most.
fn slot_offsets(len: usize, groups: &Groups, holders: &[Vec<usize>]) -> (Vec<Vec<SlotOffset>>, SlotOffset) {
    let mut largest = SlotOffset::default();
    let pes: usize = (0..groups.len()).map(|g| groups.members(g).len()).sum();
    let of_pe = |pe: usize| {
        let mut next = SlotOffset::default();
        let mut slot_offsets = Vec::new();
        for &expert in groups.experts(pe) {
            slot_offsets.push(next);
            let k = holders[expert].len();
            next.element += (k - 1) * part_len(len, k);
            next.word += 2 * (k - 1);
        }
        largest = SlotOffset { element: largest.element.max(next.element), word: largest.word.max(next.word) };
        slot_offsets
    };
    let slot_offsets = (0..pes).map(of_pe).collect();
    (slot_offsets, largest)
}

/// Copies the gradients' elements from number `start` on to `to`. Elements are numbered through the matrices, then through the biases.
fn copy_out(grads: &MlpGradients, mut start: usize, mut to: &mut [f32]) {
    for values in grads.matrix.iter().chain(&grads.bias) {
        let part = values.get(start..).unwrap_or_default();
        let n = part.len().min(to.len());
        let (head, tail) = to.split_at_mut(n);
        head.copy_from_slice(&part[..n]);
        to = tail;
        start = start.saturating_sub(values.len());
    }
    debug_assert!(to.is_empty());
}

/// The reverse of [`copy_out`].
fn copy_in(grads: &mut MlpGradients, mut start: usize, mut from: &[f32]) {
    for values in grads.matrix.iter_mut().chain(&mut grads.bias) {
        let len = values.len();
        let part = values.get_mut(start..).unwrap_or_default();
        let n = part.len().min(from.len());
        let (head, tail) = from.split_at(n);
        part[..n].copy_from_slice(head);
        from = tail;
        start = start.saturating_sub(len);
    }
    debug_assert!(from.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradient_slices_round_trip() {
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
