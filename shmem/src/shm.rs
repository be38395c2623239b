//! The shared-memory transport: PEs of one host, each with a [`Segment`] that all of them map.
//!
//! # Memory ordering
//! OpenSHMEM's requirements and their implementation, for processors with and without store reordering:
//!
//! - **Once a wait, a test or a signal_fetch has returned a value, all effects ordered before the operation that produced it
//!   are visible.** Signals are stored and added with Release and read with Acquire; a put is a plain copy that precedes its
//!   PE's later release operations in program order. This exceeds the contract of put_signal, since earlier puts become visible
//!   too. Callers must not rely on that (the reordering transport does not provide it).
//! - **An ADD announces all contributors**: a read-modify-write continues the release sequences of earlier ADDs.
//! - **fence**: an atomic fence(Release). Every operation that can be waited for is a release operation anyway; the fence keeps
//!   compiler and processor from moving the stores of a later plain put above it.
//! - **quiet**: an atomic fence(SeqCst). All operations have been issued as loads and stores when they return, so that it only
//!   remains to order them before later loads (store-load order), which requires SeqCst. This includes gets and nbi operations,
//!   which are complete when they return.
//! - **fetch_add** is AcqRel.
//! - Stores are never non-temporal: on x86 a release does not order such stores, so put_signal, signal_op, fence and quiet
//!   would need an sfence.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::doorbell::{ring, signal};
use super::wait::Patience;
use super::{LostPe, RawWait, Segment, ShmemError, SignalOp, Throttle, Transport};

/// A wait that is shorter does not check whether processes have ended.
const SHORT_WAIT: Duration = Duration::from_millis(10);

/// Reports lost PEs of a world over shared memory, which shared memory itself does not reveal.
pub trait Watch: Send + Sync {
    /// A lost PE, if any.
    fn lost(&self) -> Option<LostPe>;
}

impl fmt::Debug for dyn Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watch").field(&self.lost()).finish()
    }
}

/// One PE of a world over shared memory.
#[derive(Debug)]
pub struct ShmTransport {
    my_pe: usize,
    /// Indexed by PE; shared if the PEs are threads of one process.
    segments: Arc<[Segment]>,
    patience: Patience,
    /// The PEs' numbers in messages, if they differ.
    numbers: Option<Vec<usize>>,
    watch: Option<Arc<dyn Watch>>,
    /// The pidfd of each PE's process; empty if this host has none.
    processes: Vec<OwnedFd>,
    throttle: Option<Throttle>,
}

impl ShmTransport {
    /// PE `my_pe` of `segments.len()` PEs; `segments[i]` is PE `i`'s heap.
    ///
    /// # Errors
    /// [`ShmemError::Segment`] if `my_pe` has no segment or the heaps differ in size.
    pub fn new(my_pe: usize, segments: Vec<Segment>) -> Result<Self, ShmemError> {
        Self::over(my_pe, segments.into())
    }

    /// Creates `n_pes` PEs with heaps of `heap_bytes` bytes in this process, in PE order, one for each of its threads.
    /// [`crate::threads`] wraps them in [`Shmem`](crate::Shmem).
    ///
    /// # Errors
    /// As for [`Segment::create`].
    pub fn threads(n_pes: usize, heap_bytes: usize) -> Result<Vec<Self>, ShmemError> {
        let create = |pe| Segment::create(&format!("aristos-{pe}"), heap_bytes);
        let segments: Arc<[Segment]> = (0..n_pes).map(create).collect::<Result<_, _>>()?;
        (0..n_pes).map(|pe| Self::over(pe, segments.clone())).collect()
    }

    /// Sets the PEs' numbers in messages, and a watch that ends all waits once it reports a lost PE.
    ///
    /// # Panics
    /// If there is not exactly one number per PE.
    pub fn watched(self, numbers: Vec<usize>, watch: Arc<dyn Watch>) -> Self {
        assert_eq!(numbers.len(), self.segments.len(), "a number for each PE");
        ShmTransport { numbers: Some(numbers), watch: Some(watch), ..self }
    }

    /// Sets the pidfd of each PE's process, by which a wait for a process that has ended fails at once. None are set if the list is empty.
    ///
    /// # Panics
    /// If the list is neither empty nor of one pidfd per PE.
    pub(crate) fn of_processes(self, processes: Vec<OwnedFd>) -> Self {
        assert!(processes.is_empty() || processes.len() == self.segments.len(), "a pidfd for each PE");
        ShmTransport { processes, ..self }
    }

    /// Delays messages as `throttle` specifies.
    pub fn throttled(self, throttle: Throttle) -> Self {
        ShmTransport { throttle: Some(throttle), ..self }
    }

    fn over(my_pe: usize, segments: Arc<[Segment]>) -> Result<Self, ShmemError> {
        let Some(mine) = segments.get(my_pe) else {
            return Err(ShmemError::Segment(format!("PE {my_pe} of {} has none", segments.len())));
        };
        let bytes = mine.heap_bytes();
        if let Some(pe) = segments.iter().position(|segment| segment.heap_bytes() != bytes) {
            let other = segments[pe].heap_bytes();
            return Err(ShmemError::Segment(format!("PE {pe}'s heap has {other} bytes, PE {my_pe}'s {bytes}")));
        }
        let patience = Patience::of(segments.len());
        Ok(Self { my_pe, segments, patience, numbers: None, watch: None, processes: Vec::new(), throttle: None })
    }

    #[inline]
    fn mine(&self) -> &Segment {
        &self.segments[self.my_pe]
    }
}

impl Transport for ShmTransport {
    #[inline]
    fn my_pe(&self) -> usize {
        self.my_pe
    }

    #[inline]
    fn n_pes(&self) -> usize {
        self.segments.len()
    }

    fn world_pe(&self, pe: usize) -> usize {
        self.numbers.as_ref().map_or(pe, |numbers| numbers[pe])
    }

    #[inline]
    fn heap_bytes(&self) -> usize {
        self.mine().heap_bytes()
    }

    #[inline]
    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        self.segments[pe].copy_in(dest, src);
        self.throttle.iter().for_each(|throttle| throttle.put(pe, src.len()));
    }

    #[inline]
    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.mine().copy_to(src, &self.segments[pe], dest, bytes);
        self.throttle.iter().for_each(|throttle| throttle.put(pe, bytes));
    }

    #[inline]
    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        self.segments[pe].copy_out(src, dest);
    }

    #[inline]
    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.segments[pe].copy_to(src, self.mine(), dest, bytes);
    }

    #[inline]
    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.put(dest, src, pe);
        self.signal_op(signal, value, op, pe);
    }

    #[inline]
    fn signal_op(&self, word: usize, value: u64, op: SignalOp, pe: usize) {
        self.throttle.iter().for_each(|throttle| throttle.signal(pe));
        let peer = &self.segments[pe];
        signal(peer.atomic_u64(word), value, op, peer.bell());
    }

    #[inline]
    fn signal_fetch(&self, signal: usize) -> u64 {
        self.mine().atomic_u64(signal).load(Ordering::Acquire)
    }

    #[inline]
    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        let peer = &self.segments[pe];
        let was = peer.atomic_u64(target).fetch_add(value, Ordering::AcqRel);
        ring(peer.bell());
        was
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let start = Instant::now();
        // Each check of a process is a system call, which short waits spare.
        let has_ended = || start.elapsed() >= SHORT_WAIT && self.waits_for_ended(waits);
        self.patience.wait(self.mine(), waits, deadline, || self.lost().is_some() || has_ended())
    }

    fn lost(&self) -> Option<LostPe> {
        self.watch.as_ref()?.lost()
    }

    fn has_ended(&self, pe: usize) -> bool {
        let Some(process) = self.processes.get(pe) else { return false };
        // A pidfd is readable once its process has ended.
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::Release);
    }

    #[inline]
    fn quiet(&self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>> {
        Some(self.segments[pe].address(offset, 0))
    }

    #[inline]
    fn is_reachable(&self, pe: usize) -> bool {
        pe < self.segments.len()
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

    use super::*;
    use crate::{Cmp, Shmem, Wait};

    #[test]
    fn lost_pe_ends_waits_and_is_named() {
        struct Flag(AtomicBool);
        impl Watch for Flag {
            fn lost(&self) -> Option<LostPe> {
                self.0.load(Ordering::Relaxed).then(|| LostPe::new(9, "its process has ended"))
            }
        }
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        let pe = ShmTransport::threads(2, 4096).unwrap().remove(0).watched(vec![4, 9], flag.clone());
        assert_eq!((pe.world_pe(1), pe.lost()), (9, None));
        let shmem = Shmem::new(pe);
        let deadline = Instant::now() + Duration::from_secs(600);
        let wait = Wait { signal: shmem.alloc(1).unwrap(), cmp: Cmp::Eq, value: 1 };
        let timeout = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| shmem.wait_until(wait, deadline).unwrap_err());
            flag.0.store(true, Ordering::Relaxed);
            waiting.join().unwrap()
        });
        assert_eq!(timeout.lost, Some(LostPe::new(9, "its process has ended")));
    }

    #[test]
    fn wait_for_an_ended_process_fails_at_once() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = |child: &std::process::Child| Pid::from_raw(child.id() as i32).unwrap();
        let processes = [getpid(), id(&child), getpid()].map(|pid| pidfd_open(pid, PidfdFlags::empty()).unwrap());
        let pe = ShmTransport::threads(3, 1 << 16).unwrap().remove(0).of_processes(processes.into());
        let shmem = Shmem::new(pe);
        let wait = || Wait { signal: shmem.alloc(1).unwrap(), cmp: Cmp::Ge, value: 1 };
        let (first, second, third) = (wait(), wait(), wait());
        // The child stays a zombie until `wait`, as a process may whose parent is busy.
        let far = Instant::now() + Duration::from_secs(600);
        let timeout = shmem.wait_until_any_of(&[third, first], &[2, 1], far).unwrap_err();
        assert_eq!((timeout.index, timeout.lost), (1, Some(LostPe::new(1, "its process has ended"))));
        child.wait().unwrap();
        let timeout = shmem.wait_until_any_of(&[first], &[1], far).unwrap_err();
        assert_eq!(timeout.lost, Some(LostPe::new(1, "its process has ended")));
        // A signal that arrived before the end of its sender counts.
        shmem.signal_op(second.signal, 1, SignalOp::Set, 0);
        assert_eq!(shmem.wait_until_any_of(&[third, second], &[2, 1], far), Ok(1));
        let near = Instant::now() + 3 * Duration::from_millis(100);
        let timeout = shmem.wait_until_any_of(&[third], &[2], near).unwrap_err();
        assert!(timeout.lost.is_none() && timeout.waited >= Duration::from_millis(200), "{timeout:?}");
    }

    #[test]
    fn mismatched_segments_are_refused() {
        let segment = |bytes| Segment::create("test", bytes).unwrap();
        let message = |my_pe, segments| ShmTransport::new(my_pe, segments).unwrap_err().to_string();
        assert_eq!(
            message(0, vec![segment(64), segment(128)]),
            "unusable segment: PE 1's heap has 128 bytes, PE 0's 64"
        );
        assert_eq!(message(2, vec![segment(64), segment(64)]), "unusable segment: PE 2 of 2 has none");
    }
}
