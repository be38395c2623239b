//! A team as a world: [`GroupTransport`].

use std::ptr::NonNull;
use std::time::Instant;

use super::{LostPe, RawWait, Shmem, ShmemError, SignalOp, Sym, Team, Transport};

/// The members of a team, renumbered by their index in it, over a block of the world's symmetric heap. Code written for a
/// world, such as a layer, runs unchanged on a group, such as an expert-parallel group.
#[derive(Debug)]
pub struct GroupTransport<'w, T: Transport> {
    world: &'w Shmem<T>,
    team: Team,
    block: Sym<u8>,
}

impl<'w, T: Transport> GroupTransport<'w, T> {
    /// Creates the group of `team`, in which each member has a heap of `heap_bytes` bytes within `world`'s. All PEs of the
    /// world must call this with the same `heap_bytes`, each with its own team, before anything is freed in the world's heap,
    /// because the group's heap must be zero.
    ///
    /// # Errors
    /// [`ShmemError::OutOfMemory`] if the world's heap is too full.
    pub fn new(world: &'w Shmem<T>, team: Team, heap_bytes: usize) -> Result<Self, ShmemError> {
        Ok(GroupTransport { block: world.alloc(heap_bytes)?, world, team })
    }

    /// The members' world numbers, in group order.
    pub fn members(&self) -> &[usize] {
        self.team.members()
    }

    /// Translates `bytes` bytes at `offset` of the group's heap to the offset in the world's heap.
    fn at(&self, offset: usize, bytes: usize) -> usize {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.block.len()),
            "{bytes} bytes at offset {offset} are outside a group's heap of {} bytes",
            self.block.len()
        );
        self.block.offset() + offset
    }

    fn word(&self, offset: usize) -> usize {
        self.at(offset, size_of::<u64>())
    }

    fn pe(&self, pe: usize) -> usize {
        self.team.members()[pe]
    }

    fn transport(&self) -> &T {
        self.world.transport()
    }
}

impl<T: Transport> Transport for GroupTransport<'_, T> {
    fn my_pe(&self) -> usize {
        self.team.my_index()
    }

    fn n_pes(&self) -> usize {
        self.team.size()
    }

    fn world_pe(&self, pe: usize) -> usize {
        self.transport().world_pe(self.pe(pe))
    }

    fn heap_bytes(&self) -> usize {
        self.block.len()
    }

    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        self.transport().put(self.at(dest, src.len()), src, self.pe(pe));
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.transport().put_nbi(self.at(dest, bytes), self.at(src, bytes), bytes, self.pe(pe));
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        let src = self.at(src, dest.len());
        self.transport().get(dest, src, self.pe(pe));
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.transport().get_nbi(self.at(dest, bytes), self.at(src, bytes), bytes, self.pe(pe));
    }

    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.transport().put_signal(self.at(dest, src.len()), src, self.word(signal), value, op, self.pe(pe));
    }

    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.transport().signal_op(self.word(signal), value, op, self.pe(pe));
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.transport().signal_fetch(self.word(signal))
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        self.transport().fetch_add(self.word(target), value, self.pe(pe))
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let translated = |wait: &RawWait| {
            let from = wait.from.map(|pe| self.pe(pe));
            RawWait { signal: self.word(wait.signal), from, ..*wait }
        };
        match waits {
            [one] => self.transport().wait_any(&[translated(one)], deadline),
            many => self.transport().wait_any(&many.iter().map(translated).collect::<Vec<_>>(), deadline),
        }
    }

    fn fence(&self) {
        self.transport().fence();
    }

    fn quiet(&self) {
        self.transport().quiet();
    }

    fn lost(&self) -> Option<LostPe> {
        self.transport().lost()
    }

    fn has_ended(&self, pe: usize) -> bool {
        self.transport().has_ended(self.pe(pe))
    }

    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>> {
        self.transport().ptr(self.at(offset, 0), self.pe(pe))
    }

    fn is_reachable(&self, pe: usize) -> bool {
        self.team.members().get(pe).is_some_and(|&pe| self.transport().is_reachable(pe))
    }
}
