//! The typed layer: [`Shmem`].

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::channels::Channels;
use super::heap::Heap;
use super::team::SyncWords;
use super::{Cmp, LostPe, Pod, RawWait, ShmemError, SignalOp, Sym, Team, Transport, Wait, WaitTimeout};

/// One PE's view of the symmetric heap, over a transport.
///
/// Allocates, checks bounds, and forms teams; the crate documentation defines the operations. Collective operations (those
/// on teams) must be called by one thread of a PE at a time, by all members, in the same order on every PE. After a collective
/// operation has timed out, the members' states differ, and the program must end.
///
/// # Panics
/// All operations on symmetric objects panic if the PE does not exist or the source is longer than the destination.
#[derive(Debug)]
pub struct Shmem<T: Transport> {
    transport: T,
    heap: Mutex<Heap>,
    world: Team,
    sync: Mutex<SyncWords>,
    channels: Mutex<Channels>,
    bytes_put: AtomicU64,
    network_bytes_put: AtomicU64,
}

impl<T: Transport> Shmem<T> {
    /// Creates the layer over `transport`. Its heap must be unused.
    ///
    /// Reserves [`Shmem::<T>::reserved_bytes`] at the heap's start for synchronisation and collectives.
    ///
    /// # Panics
    /// If the heap is smaller than that.
    pub fn new(transport: T) -> Self {
        let (n_pes, heap_bytes) = (transport.n_pes(), transport.heap_bytes());
        let (words, staging_bytes) = Channels::sizes(n_pes, heap_bytes);
        let mut heap = Heap::new(heap_bytes);
        let mut offset = |bytes: usize| {
            heap.alloc(bytes).unwrap_or_else(|_| {
                let need = Self::reserved_bytes(n_pes, heap_bytes);
                panic!("a symmetric heap for {n_pes} PEs has at least {need} bytes, this one {heap_bytes}")
            })
        };
        let mut word_array = |len| Sym::<u64>::new(offset(len * size_of::<u64>()), len);
        let (arrived, full) = (word_array(n_pes), word_array(words));
        let staging = Sym::new(offset(staging_bytes), staging_bytes);
        Self {
            world: Team::world(transport.my_pe(), n_pes),
            heap: Mutex::new(heap),
            sync: Mutex::new(SyncWords::new(arrived)),
            channels: Mutex::new(Channels::new(full, staging)),
            bytes_put: AtomicU64::new(0),
            network_bytes_put: AtomicU64::new(0),
            transport,
        }
    }

    /// Bytes that [`Shmem::new`] reserves in each heap of `heap_bytes` bytes with `n_pes` PEs: about a sixteenth, at most 32
    /// KiB per PE.
    pub fn reserved_bytes(n_pes: usize, heap_bytes: usize) -> usize {
        let (words, staging_bytes) = Channels::sizes(n_pes, heap_bytes);
        let word_bytes = |len: usize| (len * size_of::<u64>()).next_multiple_of(super::heap::ALIGN_BYTES);
        word_bytes(n_pes) + word_bytes(words) + staging_bytes
    }

    /// The heap size, bytes, in whole pages, that leaves `bytes` to the caller after the reservation of [`Shmem::new`].
    pub fn heap_bytes_for(n_pes: usize, bytes: usize) -> usize {
        const PAGE: usize = 4096;
        // The reservation is about a sixteenth of the heap, so this converges in a few iterations.
        let mut heap_bytes = bytes;
        loop {
            let need = bytes + Self::reserved_bytes(n_pes, heap_bytes);
            if need <= heap_bytes {
                return heap_bytes;
            }
            heap_bytes = need.next_multiple_of(PAGE);
        }
    }

    /// The underlying transport.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// This PE's number, `0..n_pes`.
    pub fn my_pe(&self) -> usize {
        self.transport.my_pe()
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.transport.n_pes()
    }

    /// The number by which messages refer to PE `pe`: [`Transport::world_pe`].
    pub fn world_pe(&self, pe: usize) -> usize {
        self.transport.world_pe(pe)
    }

    /// Size of each PE's heap, bytes.
    pub fn heap_bytes(&self) -> usize {
        self.transport.heap_bytes()
    }

    /// Bytes of the heap in use, including the reserved ones.
    pub fn used_bytes(&self) -> usize {
        lock(&self.heap).used_bytes()
    }

    /// Maximum bytes of the heap in use at once until now, including the reserved ones.
    pub fn peak_bytes(&self) -> usize {
        lock(&self.heap).peak_bytes()
    }

    /// Allocates `len` elements, 64-byte aligned, at the same offset on every PE that makes the same calls in the same order.
    ///
    /// Does not synchronise: before a PE writes to a peer's new object, the peer must have finished using that memory.
    /// Memory is zero at its first use; after a [`Shmem::free`] it keeps its old contents.
    ///
    /// # Errors
    /// [`ShmemError::OutOfMemory`] if the heap has no free range of that size.
    pub fn alloc<E: Pod>(&self, len: usize) -> Result<Sym<E>, ShmemError> {
        const { assert!(align_of::<E>() <= super::heap::ALIGN_BYTES) };
        let asked_bytes = len.saturating_mul(size_of::<E>());
        if asked_bytes == 0 {
            return Ok(Sym::new(0, len));
        }
        let offset = lock(&self.heap).alloc(asked_bytes).map_err(|full| ShmemError::OutOfMemory {
            heap_bytes: self.heap_bytes(),
            asked_bytes,
            free_bytes: full.free_bytes,
            largest_bytes: full.largest_bytes,
        })?;
        Ok(Sym::new(offset, len))
    }

    /// Frees an object of [`Shmem::alloc`]. No PE may use it any more or have operations on it in flight.
    ///
    /// # Panics
    /// If `sym` is not exactly an allocated object.
    pub fn free<E: Pod>(&self, sym: Sym<E>) {
        let bytes = sym.bytes();
        let freed = bytes == 0 || lock(&self.heap).free(sym.offset, bytes);
        assert!(freed, "{bytes} bytes at offset {} of the symmetric heap are not an allocation", sym.offset);
    }

    /// Copies `src` to the start of `dest` on `pe`. Returns when `src` may be reused, possibly before the data arrives.
    pub fn put<E: Pod>(&self, dest: Sym<E>, src: &[E], pe: usize) {
        self.check(src.len(), dest.len, pe);
        self.count(size_of_val(src), pe);
        if !src.is_empty() {
            self.transport.put(dest.offset, bytemuck::cast_slice(src), pe);
        }
    }

    /// Starts copying this PE's `src` to the start of `dest` on `pe`; until [`Shmem::quiet`], `src` must not change.
    pub fn put_nbi<E: Pod>(&self, dest: Sym<E>, src: Sym<E>, pe: usize) {
        self.check(src.len, dest.len, pe);
        self.count(src.bytes(), pe);
        if src.len > 0 {
            self.transport.put_nbi(dest.offset, src.offset, src.bytes(), pe);
        }
    }

    /// Bytes that this PE has put to other PEs by all kinds of puts, without signal words; exact if one thread puts at a time.
    pub fn bytes_put(&self) -> u64 {
        self.bytes_put.load(Ordering::Relaxed)
    }

    /// The part of [`Shmem::bytes_put`] that went to PEs beyond the reach of loads and stores ([`Shmem::is_reachable`]).
    pub fn network_bytes_put(&self) -> u64 {
        self.network_bytes_put.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize, pe: usize) {
        // An atomic addition would cost a tenth of a small put; with concurrent puts of several threads some may not be
        // counted.
        let add = |to: &AtomicU64| to.store(to.load(Ordering::Relaxed).wrapping_add(bytes as u64), Ordering::Relaxed);
        if pe != self.my_pe() {
            add(&self.bytes_put);
            if !self.is_reachable(pe) {
                add(&self.network_bytes_put);
            }
        }
    }

    /// Fills `dest` from the start of `src` on `pe`, which may be this PE.
    pub fn get<E: Pod>(&self, dest: &mut [E], src: Sym<E>, pe: usize) {
        self.check(dest.len(), src.len, pe);
        if !dest.is_empty() {
            self.transport.get(bytemuck::cast_slice_mut(dest), src.offset, pe);
        }
    }

    /// Starts copying `src` on `pe` to the start of this PE's `dest`; until [`Shmem::quiet`], `dest` must not be read.
    pub fn get_nbi<E: Pod>(&self, dest: Sym<E>, src: Sym<E>, pe: usize) {
        self.check(src.len, dest.len, pe);
        if src.len > 0 {
            self.transport.get_nbi(dest.offset, src.offset, src.bytes(), pe);
        }
    }

    /// Copies `src` to the start of `dest` on `pe`, then updates the first word of `signal` there: a PE that sees the signal
    /// also sees this data. With empty data only the signal is sent.
    pub fn put_signal<E: Pod>(&self, dest: Sym<E>, src: &[E], signal: Sym<u64>, value: u64, op: SignalOp, pe: usize) {
        self.check(src.len(), dest.len, pe);
        if src.is_empty() {
            self.signal_op(signal, value, op, pe);
        } else {
            self.transport.put_signal(dest.offset, bytemuck::cast_slice(src), signal.word(), value, op, pe);
        }
        // Counts while the signal is in flight.
        self.count(size_of_val(src), pe);
    }

    /// Updates the first word of `signal` on `pe`.
    pub fn signal_op(&self, signal: Sym<u64>, value: u64, op: SignalOp, pe: usize) {
        self.check(1, signal.len, pe);
        self.transport.signal_op(signal.word(), value, op, pe);
    }

    /// Loads this PE's first word of `signal`, with acquire ordering.
    pub fn signal_fetch(&self, signal: Sym<u64>) -> u64 {
        self.transport.signal_fetch(signal.word())
    }

    /// Atomically adds `value`, wrapping, to the first word of `target` on `pe`; returns the previous value.
    pub fn fetch_add(&self, target: Sym<u64>, value: u64, pe: usize) -> u64 {
        self.check(1, target.len, pe);
        self.transport.fetch_add(target.word(), value, pe)
    }

    /// Whether `wait` holds now.
    pub fn test(&self, wait: Wait) -> bool {
        wait.cmp.holds(self.signal_fetch(wait.signal), wait.value)
    }

    /// The first PE known to be lost: [`Transport::lost`].
    pub fn lost(&self) -> Option<LostPe> {
        self.transport.lost()
    }

    /// Waits until `wait` holds; returns the word's value, read afterwards (it may have changed again).
    ///
    /// # Errors
    /// [`WaitTimeout`] if `deadline` passes or a PE is lost first. A condition that already holds succeeds even after the
    /// deadline.
    pub fn wait_until(&self, wait: Wait, deadline: Instant) -> Result<u64, WaitTimeout> {
        let seen = self.signal_fetch(wait.signal);
        if wait.cmp.holds(seen, wait.value) {
            return Ok(seen);
        }
        self.wait_until_any(&[wait], deadline)?;
        Ok(self.signal_fetch(wait.signal))
    }

    /// Waits until one of `waits` holds; returns its index.
    ///
    /// # Errors
    /// [`WaitTimeout`] if `deadline` passes or a PE is lost first.
    ///
    /// # Panics
    /// If `waits` is empty.
    pub fn wait_until_any(&self, waits: &[Wait], deadline: Instant) -> Result<usize, WaitTimeout> {
        self.wait_any(waits, |_| None, deadline)
    }

    /// Waits like [`wait_until_any`](Self::wait_until_any), but fails as soon as a wait cannot hold any more, because the process of the PE
    /// that would fulfil it, `pes[i]` for `waits[i]`, has ended. Not all transports can tell.
    ///
    /// # Errors
    /// [`WaitTimeout`] if `deadline` passes or a PE is lost first; `index` is the wait of the PE that has ended.
    ///
    /// # Panics
    /// If `waits` is empty or not as long as `pes`.
    pub fn wait_until_any_of(&self, waits: &[Wait], pes: &[usize], deadline: Instant) -> Result<usize, WaitTimeout> {
        assert_eq!(waits.len(), pes.len(), "a PE for each wait");
        self.wait_any(waits, |index| Some(pes[index]), deadline)
    }

    fn wait_any(
        &self,
        waits: &[Wait],
        from: impl Fn(usize) -> Option<usize>,
        deadline: Instant,
    ) -> Result<usize, WaitTimeout> {
        assert!(!waits.is_empty(), "nothing to wait for");
        if let Some(index) = waits.iter().position(|&wait| self.test(wait)) {
            return Ok(index);
        }
        let start = Instant::now();
        let raw = |(index, wait): (usize, &Wait)| RawWait {
            signal: wait.signal.word(),
            cmp: wait.cmp,
            value: wait.value,
            from: from(index),
        };
        let found = match waits {
            [one] => self.transport.wait_any(&[raw((0, one))], deadline),
            many => self.transport.wait_any(&many.iter().enumerate().map(raw).collect::<Vec<_>>(), deadline),
        };
        found.ok_or_else(|| {
            // A process changes the words before it ends, so its word is read after the state of the process.
            let ended = (0..waits.len()).find_map(|index| {
                let pe = from(index).filter(|&pe| self.transport.has_ended(pe) && !self.test(waits[index]))?;
                Some((index, LostPe::new(self.world_pe(pe), "its process has ended")))
            });
            let (index, lost) = ended.map_or((0, None), |(index, lost)| (index, Some(lost)));
            WaitTimeout {
                expected: waits[index].value,
                seen: self.signal_fetch(waits[index].signal),
                cmp: waits[index].cmp,
                index,
                waited: start.elapsed(),
                lost: self.transport.lost().or(lost),
            }
        })
    }

    /// Orders deliveries to each PE: earlier puts, signals and atomics are delivered before later ones.
    pub fn fence(&self) {
        self.transport.fence();
    }

    /// Completes every operation this PE has issued, on every PE.
    pub fn quiet(&self) {
        self.transport.quiet();
    }

    /// The team of all PEs.
    pub fn world(&self) -> &Team {
        &self.world
    }

    /// The team of `members`, world numbers of PEs of `parent`, in that order; `None` if this PE is not among them.
    ///
    /// All members must pass the same list. A team uses no symmetric memory and needs no communication.
    ///
    /// # Errors
    /// [`ShmemError::Team`] if `members` is empty, contains a PE twice, or contains one that is not in `parent`.
    pub fn team_split(&self, parent: &Team, members: &[usize]) -> Result<Option<Team>, ShmemError> {
        parent.split(self.my_pe(), members)
    }

    /// Waits until every member of `team` has called this. Puts are not completed, see [`Shmem::barrier_all`].
    ///
    /// # Errors
    /// [`WaitTimeout`] if `deadline` passes first; `index` is a missing PE.
    pub fn sync(&self, team: &Team, deadline: Instant) -> Result<(), WaitTimeout> {
        lock(&self.sync).sync(self, team, deadline)
    }

    /// [`Shmem::sync`] of all PEs.
    ///
    /// # Errors
    /// As for [`Shmem::sync`].
    pub fn sync_all(&self, deadline: Instant) -> Result<(), WaitTimeout> {
        self.sync(&self.world, deadline)
    }

    /// [`Shmem::quiet`], then [`Shmem::sync_all`]: afterwards all earlier operations of all PEs are complete.
    ///
    /// # Errors
    /// As for [`Shmem::sync`].
    pub fn barrier_all(&self, deadline: Instant) -> Result<(), WaitTimeout> {
        self.quiet();
        self.sync_all(deadline)
    }

    /// Sums `data`, which has the same length on all members, element by element; every member gets the sums.
    ///
    /// Values are added once, in team order, so all members get bitwise identical sums.
    ///
    /// # Errors
    /// [`WaitTimeout`] if `deadline` passes first; `index` is the missing PE.
    pub fn all_reduce_sum(&self, team: &Team, data: &mut [f32], deadline: Instant) -> Result<(), WaitTimeout> {
        lock(&self.channels).all_reduce_sum(self, team, data, deadline)
    }

    /// Collects `mine`, which has the same length on all members, into `all`: member `i`'s at `i * mine.len()`.
    ///
    /// # Errors
    /// [`WaitTimeout`] if `deadline` passes first; `index` is the missing PE.
    ///
    /// # Panics
    /// If `all` does not have `team.size() * mine.len()` elements, or an element is larger than a slot of the staging buffer
    /// (64 bytes to 16 KiB).
    pub fn all_gather<E: Pod>(
        &self,
        team: &Team,
        mine: &[E],
        all: &mut [E],
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        assert_eq!(all.len(), team.size() * mine.len(), "all_gather: the length of `all`");
        lock(&self.channels).all_gather(self, team, mine, all, deadline)
    }

    /// The address of `sym` on `pe`, if this PE can load and store it directly.
    pub fn ptr<E: Pod>(&self, sym: Sym<E>, pe: usize) -> Option<NonNull<E>> {
        self.check(0, 0, pe);
        self.transport.ptr(sym.offset, pe).map(NonNull::cast)
    }

    /// Whether this PE's loads and stores reach `pe`'s heap: [`Transport::is_reachable`].
    pub fn is_reachable(&self, pe: usize) -> bool {
        self.transport.is_reachable(pe)
    }

    /// Waits for `word >= value`; an error names `pe`.
    pub(super) fn wait_at_least(
        &self,
        word: Sym<u64>,
        value: u64,
        pe: usize,
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        let wait = Wait { signal: word, cmp: Cmp::Ge, value };
        self.wait_until_any_of(&[wait], &[pe], deadline)
            .map(drop)
            .map_err(|timeout| WaitTimeout { index: pe, ..timeout })
    }

    #[track_caller]
    fn check(&self, src_len: usize, dest_len: usize, pe: usize) {
        assert!(src_len <= dest_len, "{src_len} elements from or to a symmetric object of {dest_len}");
        assert!(pe < self.n_pes(), "PE {pe} of {}", self.n_pes());
    }
}

impl<E> Sym<E> {
    pub(super) fn new(offset: usize, len: usize) -> Self {
        Self { offset, len, element: std::marker::PhantomData }
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<E>()
    }
}

impl Sym<u64> {
    /// The offset of the first word. Panics if there is none.
    #[inline]
    #[track_caller]
    fn word(&self) -> usize {
        assert!(self.len > 0, "a signal is at least one word");
        self.offset
    }
}

/// The state behind a lock is valid even if a thread panicked while holding it.
fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
