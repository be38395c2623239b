//! Collective data movement: all-reduce and all-gather, one-sided, through a bounded staging buffer.
//!
//! PEs communicate over *channels*, one for each ordered pair of PEs. The channel from `s` to `d` has two slots in `d`'s
//! staging buffer, which alternate, and for each slot a word that counts the messages put into it. Message `m`, counted from 0,
//! goes to slot `m % 2` by one put_signal (the data and an ADD of 1); `d` waits until the word is at least `m / 2 + 1` and
//! reads the slot. Two PEs take part in their common collectives in the same order, whatever the teams, so the m-th message
//! sent is the m-th expected. Words are never reset.
//!
//! No slot is overwritten before it is read, although receivers send no acknowledgements: **before `s` sends message `m + 2` to
//! `d`, it has received a message that `d` sent after reading message `m`.** Hence at most one message per slot is in flight,
//! its word cannot count a later message instead, and no fence is needed: the only ordering used is that of put_signal, data
//! before signal. The proof goes by stages. In a stage a PE sends to other members and then receives what they send in that
//! stage; a message of a later stage implies that its sender has read all messages of the earlier ones. All-gather is one
//! exchange per step, in which every member sends to every other. All-reduce has two stages per chunk: in reduce-scatter (RS)
//! every member sends to each member whose part is not empty; in all-gather (AG) each of those sends to every other.
//! - `m` is an RS: `d`'s part is not empty, so `s` receives `d`'s AG of that chunk, which `d` sends after reading `m`.
//!   This precedes message `m + 2`, since the chunk has at most one message, its AG, after `m`.
//! - `m` is an AG or an exchange. Message `m + 1` belongs to a later stage. Before `m + 2`, `s` receives a message of `d` from
//!   the stage of `m + 1` or later, or, if `m + 1` is an AG, from the RS before it; in either case `d` has then left the stage
//!   of `m`. For if `m + 1` is an exchange, so is `d`'s of the same step; if it is an RS, `d`'s part is not empty, and either
//!   `s` sends AG, after receiving `d`'s RS, or the chunk ends with `d`'s AG.
//!
//! There is no deadlock: sending never blocks, and a PE waits only for messages whose senders need at most what it has already
//! sent.

use std::time::Instant;

use super::channels::{Channels, SLOTS};
use super::{Pod, Shmem, SignalOp, Sym, Team, Transport, WaitTimeout};

impl Channels {
    /// Location of message `m` of `sender` at the receiver: `bytes` bytes of a slot, and the slot's word.
    fn location(&self, sender: usize, m: u64, bytes: usize) -> (Sym<u8>, Sym<u64>) {
        let index = sender * SLOTS + (m % SLOTS as u64) as usize;
        let start = index * self.slot_bytes;
        (self.staging.slice(start..start + bytes), self.full.at(index))
    }

    /// Sends `data`, at most one slot long, to `to`.
    fn send<T: Transport, E: Pod>(&mut self, shmem: &Shmem<T>, data: &[E], to: usize) {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let (slot, full) = self.location(shmem.my_pe(), self.sent[to], bytes.len());
        self.sent[to] += 1;
        shmem.put_signal(slot, bytes, full, 1, SignalOp::Add, to);
    }

    /// Receives a message of `data.len()` elements from `from`.
    fn receive<T: Transport, E: Pod>(
        &mut self,
        shmem: &Shmem<T>,
        data: &mut [E],
        from: usize,
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(data);
        let (slot, full) = self.location(from, self.received[from], bytes.len());
        let count = self.received[from] / SLOTS as u64 + 1;
        self.received[from] += 1;
        shmem.wait_at_least(full, count, from, deadline)?;
        shmem.get(bytes, slot, shmem.my_pe());
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
            // Reduce-scatter: part i of each member's data goes to member i, which sums in team order.
            for i in others(me, size).filter(|&i| !part(i).is_empty()) {
                self.send(shmem, &chunk[part(i)], team.members()[i]);
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
                // All-gather: the sum goes to all other members.
                for i in others(me, size) {
                    self.send(shmem, &chunk[my_part.clone()], team.members()[i]);
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
                self.send(shmem, &mine[here.clone()], team.members()[i]);
            }
            for i in others(me, size) {
                self.receive(shmem, &mut all[i * len..][here.clone()], team.members()[i], deadline)?;
            }
        }
        Ok(())
    }
}

/// The members other than `me`, starting with the next one, so that the first messages do not all go to member 0.
fn others(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |distance| (me + distance) % size)
}
