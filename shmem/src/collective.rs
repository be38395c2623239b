//! Collective data movement: all-reduce and all-gather, one-sided, through a bounded staging buffer.
//!
//! Everything goes over *channels*, one for each ordered pair of PEs. The channel from `s` to `d` has two slots in
//! `d`'s staging buffer, used in turn, and for each slot a word that counts the messages put there. Message `m`, counted
//! from 0, goes to slot `m % 2` by one put_signal, the data and an ADD of 1; `d` waits until the word is at least
//! `m / 2 + 1`, and reads the slot. Two PEs take part in common collectives in the same order, whatever the teams,
//! so the m-th message sent is the m-th expected. Nothing is ever reset.
//!
//! No slot is overwritten before it is read, though nobody acknowledges: **before `s` sends message `m + 2` to `d`, it
//! has received one that `d` sent after reading message `m`.** Hence at most one message is under way per slot, its
//! word cannot count a later one in its place, and no fence is needed: the only order asked for is put_signal's own,
//! data before signal. The proof, by stages. In a stage a PE sends to other members, then receives what they send it in
//! that stage; a message it sends in a later stage says that it has read all those of the earlier ones. All-gather
//! is one exchange per step: everybody sends to everybody. All-reduce is two stages per chunk: in reduce-scatter
//! (RS) everybody sends to each member whose part is not empty, in all-gather (AG) each of those sends to everybody.
//! - `m` is an RS: `d`'s part is not empty, so `s` receives `d`'s AG of that chunk, which `d` sends after reading `m`.
//!   That is before message `m + 2`, since the chunk has at most one message, its AG, after `m`.
//! - `m` is an AG or an exchange. Message `m + 1` belongs to a later stage. Before `m + 2`, `s` receives a message of
//!   `d` from the stage of `m + 1` or after, or, `m + 1` being an AG, from the RS before it; in either case `d` has
//!   then left the stage of `m`. For if `m + 1` is an exchange, so is `d`'s of the same step; if it is an RS, `d`'s
//!   part is not empty, and either `s` sends AG, after receiving `d`'s RS, or the chunk ends with `d`'s AG.
//!
//! Nobody deadlocks: sending does not wait, and what a PE waits for is sent by PEs that need no more than it has sent.

use std::time::Instant;

use super::channels::{Channels, SLOTS};
use super::{Pod, Shmem, SignalOp, Sym, Team, Transport, WaitTimeout};

impl Channels {
    /// Where message `m` of `sender` goes, at its receiver: `bytes` bytes of a slot, and the slot's word.
    fn place(&self, sender: usize, m: u64, bytes: usize) -> (Sym<u8>, Sym<u64>) {
        let index = sender * SLOTS + (m % SLOTS as u64) as usize;
        let start = index * self.slot_bytes;
        (self.staging.slice(start..start + bytes), self.full.at(index))
    }

    /// Sends `data`, no longer than a slot, to `to`.
    fn send<T: Transport, E: Pod>(&mut self, shmem: &Shmem<T>, data: &[E], to: usize) {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let (slot, full) = self.place(shmem.my_pe(), self.sent[to], bytes.len());
        self.sent[to] += 1;
        shmem.put_signal(slot, bytes, full, 1, SignalOp::Add, to);
    }

    /// Receives what `from` sent, as many elements as `data` has.
    fn receive<T: Transport, E: Pod>(
        &mut self,
        shmem: &Shmem<T>,
        data: &mut [E],
        from: usize,
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(data);
        let (slot, full) = self.place(from, self.received[from], bytes.len());
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
            // Reduce-scatter: part i of everybody's data goes to member i, who adds it up in team order.
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
                // All-gather: the sum goes to everybody.
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

/// The members other than `me`, starting with the next one, so that not everybody sends to member 0 first.
fn others(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |distance| (me + distance) % size)
}
