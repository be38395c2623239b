//! Collective data movement: all-reduce and all-gather, one-sided, through a bounded staging buffer.
//!
//! Everything goes over *channels*, one for each ordered pair of PEs. The channel from `s` to `d` has two slots in
//! `d`'s staging buffer, used in turn, and for each slot two words that only ever grow: `full` (at `d`: messages put
//! there) and `taken` (at `s`: messages read from there). Message `m` uses slot `m % 2`; with `k = m / 2`:
//! - `s` waits until `taken >= k`, then issues one put_signal: the data, and `full += 1`;
//! - `d` waits until `full >= k + 1`, reads the slot, then signals `taken += 1`.
//!
//! At most one message is under way per slot, so `full` cannot count a later message in place of an earlier one,
//! and no fence is needed: the only order asked for is put_signal's own, data before signal. Two PEs take part in
//! common collectives in the same order, whatever the teams, so the m-th message sent is the m-th expected. A PE
//! that runs ahead stops at `taken`.
//!
//! Nobody deadlocks: an operation is a sequence of stages, and in each a PE sends to every other member, then
//! receives from every other. The PE least advanced is never held up: the slots it needs were emptied two stages ago.

use std::time::Instant;

use super::{Pod, Shmem, SignalOp, Sym, Team, Transport, WaitTimeout};

/// Slots of a channel: two, so that a stage's messages do not wait for the previous stage's to be read.
const SLOTS: usize = 2;

/// The largest slot, bytes.
const SLOT_BYTES_MAX: usize = 16 << 10;

/// The size of one slot, bytes: a multiple of 64, so that all of them take at most 1/16 of a heap that is large enough.
pub(super) fn slot_bytes(n_pes: usize, heap_bytes: usize) -> usize {
    (heap_bytes / 16 / (SLOTS * n_pes) / 64 * 64).clamp(64, SLOT_BYTES_MAX)
}

/// The ends, at this PE, of the channels from and to every PE.
#[derive(Debug)]
pub(super) struct Channels {
    /// Word `s * SLOTS + slot`: messages that `s` has put into that slot of its channel to this PE.
    full: Sym<u64>,
    /// Word `d * SLOTS + slot`: messages that `d` has taken from that slot of this PE's channel to it.
    taken: Sym<u64>,
    /// Slot `s * SLOTS + slot`, of `slot_bytes`.
    staging: Sym<u8>,
    slot_bytes: usize,
    /// Messages sent so far, per PE.
    sent: Vec<u64>,
    /// Messages received so far, per PE.
    received: Vec<u64>,
}

impl Channels {
    /// Elements of the words `full` and `taken`, and bytes of `staging`.
    pub(super) fn sizes(n_pes: usize, heap_bytes: usize) -> (usize, usize) {
        (SLOTS * n_pes, SLOTS * n_pes * slot_bytes(n_pes, heap_bytes))
    }

    /// Over words that are zero; sizes as [`Channels::sizes`] gives them.
    pub(super) fn new(full: Sym<u64>, taken: Sym<u64>, staging: Sym<u8>) -> Self {
        let n_pes = full.len() / SLOTS;
        let slot_bytes = staging.len() / full.len();
        Self { full, taken, staging, slot_bytes, sent: vec![0; n_pes], received: vec![0; n_pes] }
    }

    /// The index of slot `slot` of the channel whose other end is `pe`.
    fn index(pe: usize, slot: u64) -> usize {
        pe * SLOTS + slot as usize
    }

    fn slot(&self, index: usize, bytes: usize) -> Sym<u8> {
        self.staging.slice(index * self.slot_bytes..index * self.slot_bytes + bytes)
    }

    /// Sends `data`, no longer than a slot, to `to`.
    fn send<T: Transport, E: Pod>(
        &mut self,
        shmem: &Shmem<T>,
        data: &[E],
        to: usize,
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let (count, slot) = (self.sent[to] / SLOTS as u64, self.sent[to] % SLOTS as u64);
        self.sent[to] += 1;
        shmem.wait_at_least(self.taken.at(Self::index(to, slot)), count, to, deadline)?;
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let there = Self::index(shmem.my_pe(), slot);
        shmem.put_signal(self.slot(there, bytes.len()), bytes, self.full.at(there), 1, SignalOp::Add, to);
        Ok(())
    }

    /// Receives what `from` sent, as many elements as `data` has.
    fn receive<T: Transport, E: Pod>(
        &mut self,
        shmem: &Shmem<T>,
        data: &mut [E],
        from: usize,
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let (count, slot) = (self.received[from] / SLOTS as u64, self.received[from] % SLOTS as u64);
        self.received[from] += 1;
        let here = Self::index(from, slot);
        shmem.wait_at_least(self.full.at(here), count + 1, from, deadline)?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(data);
        shmem.get(bytes, self.slot(here, bytes.len()), shmem.my_pe());
        shmem.signal_op(self.taken.at(Self::index(shmem.my_pe(), slot)), 1, SignalOp::Add, from);
        Ok(())
    }

    /// See [`Shmem::all_reduce_sum`].
    pub(super) fn all_reduce_sum<T: Transport>(
        &mut self,
        shmem: &Shmem<T>,
        team: &Team,
        data: &mut [f32],
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let (size, me) = (team.size(), team.my_index());
        if size == 1 {
            return Ok(());
        }
        let part_len = self.slot_bytes / size_of::<f32>();
        let mut contribution = vec![0.0; part_len];
        let mut sum = vec![0.0; part_len];
        for chunk in data.chunks_mut(part_len * size) {
            let len = chunk.len();
            let part = |i: usize| len * i / size..len * (i + 1) / size;
            let my_part = part(me);
            // Reduce-scatter: part i of everybody's data goes to member i, who adds it up in team order.
            for i in others(me, size).filter(|&i| !part(i).is_empty()) {
                self.send(shmem, &chunk[part(i)], team.members()[i], deadline)?;
            }
            if !my_part.is_empty() {
                let contribution = &mut contribution[..my_part.len()];
                let sum = &mut sum[..my_part.len()];
                for (i, &pe) in team.members().iter().enumerate() {
                    if i == me {
                        contribution.copy_from_slice(&chunk[my_part.clone()]);
                    } else {
                        self.receive(shmem, contribution, pe, deadline)?;
                    }
                    if i == 0 {
                        sum.copy_from_slice(contribution);
                    } else {
                        sum.iter_mut().zip(&*contribution).for_each(|(sum, x)| *sum += x);
                    }
                }
                chunk[my_part.clone()].copy_from_slice(sum);
                // All-gather: the sum goes to everybody.
                for i in others(me, size) {
                    self.send(shmem, &chunk[my_part.clone()], team.members()[i], deadline)?;
                }
            }
            for i in others(me, size).filter(|&i| !part(i).is_empty()) {
                self.receive(shmem, &mut chunk[part(i)], team.members()[i], deadline)?;
            }
        }
        Ok(())
    }

    /// See [`Shmem::all_gather`].
    pub(super) fn all_gather<T: Transport, E: Pod>(
        &mut self,
        shmem: &Shmem<T>,
        team: &Team,
        mine: &[E],
        all: &mut [E],
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let (size, me, len) = (team.size(), team.my_index(), mine.len());
        all[me * len..][..len].copy_from_slice(mine);
        let step = self.slot_bytes / size_of::<E>().max(1);
        assert!(step > 0, "an element of {} bytes does not fit a slot of {} bytes", size_of::<E>(), self.slot_bytes);
        for start in (0..len).step_by(step) {
            let here = start..len.min(start + step);
            for i in others(me, size) {
                self.send(shmem, &mine[here.clone()], team.members()[i], deadline)?;
            }
            for i in others(me, size) {
                self.receive(shmem, &mut all[i * len..][here.clone()], team.members()[i], deadline)?;
            }
        }
        Ok(())
    }
}

/// The members other than `me`, starting with the next one, so that not everybody sends to member 0 first.
fn others(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |distance| (me + distance) % size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_stays_within_a_sixteenth_of_a_heap() {
        for n_pes in [1, 2, 3, 8, 64] {
            for heap_bytes in [1 << 20, 16 << 20, 1 << 30] {
                let (_, staging) = Channels::sizes(n_pes, heap_bytes);
                assert!(staging <= heap_bytes / 16, "{n_pes} PEs, {heap_bytes} bytes: {staging}");
                assert!(staging <= SLOTS * n_pes * SLOT_BYTES_MAX);
            }
        }
        assert_eq!(slot_bytes(8, 0), 64, "a tiny heap still gets slots");
    }
}
