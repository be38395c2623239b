//! The transport over an MPI-3 window, for PEs started by `mpirun` on one or several hosts.
//!
//! `MPI_Win_allocate` creates the window, so that MPI can choose memory that peers reach well (shared memory on one host,
//! registered memory on a network). The window stays locked for all from creation to destruction: passive target, no PE takes
//! part in another's operations.
//!
//! # Ordering
//! MPI orders operations at different locations only by flushes. The default ordering of accumulates at one location is not
//! needed, because data and signal are at different locations, so it is turned off.
//!
//! - **put**: `MPI_Put` and `MPI_Win_flush_local`, after which the source may be reused.
//! - **put_signal**: the put, `MPI_Win_flush` (the data is then in the target's memory), then the signal. The flush is
//!   necessary: the signal is an accumulate, which may overtake the put on a network, or take another path within a host.
//! - **Signals** are `MPI_Accumulate` with `MPI_REPLACE` or `MPI_SUM` of one 64-bit word, atomic with respect to each other and
//!   to `MPI_Fetch_and_op`. A PE also signals itself through MPI, because a processor's atomics and MPI's may not be atomic
//!   with respect to each other. MPI does not guarantee atomicity between a concurrent SET and ADD of one word; callers do not
//!   use that.
//! - **A wait** reads the word in its own memory. In the unified memory model, which is checked when the window is created,
//!   puts and accumulates become visible to loads without an MPI call. The load is an acquire, so reads of the data follow it,
//!   and the data arrived before the signal was sent; `MPI_Win_sync` would add no more. A wait also calls `MPI_Iprobe` for a
//!   message that is never sent, because many MPI libraries progress other PEs' operations on this PE's memory only during a
//!   call of this PE.
//! - **fence** and **quiet** flush the PEs with operations since their last flush. A fence does not need completion, but MPI
//!   has no weaker operation that orders.
//! - **get** is `MPI_Get` and a local flush, which for a get means that the data has arrived. The PE's own heap is accessed
//!   directly, as the unified model allows, with `MPI_Win_sync` in quiet.
//!
//! # Between hosts
//! Puts and signals to PEs on other hosts are messages, which a thread of each PE sends and receives while the PE computes
//! (`messages.rs`), if MPI allows calls from several threads, one at a time (MPI_THREAD_SERIALIZED). Messages to a PE arrive in order.
//! A put copies its source, which may be reused at once. Gets and atomic operations go through the window, once all
//! messages to their PE have been delivered. Without PEs on other hosts there is no thread.
//!
//! # Errors
//! If a call fails during an operation, the PE prints a line with PE, call and MPI's reason to standard error and calls
//! `MPI_Abort`: the trait's operations cannot return errors, and peers would wait for missing data. MPI's flushes have no time
//! limit; [`MpiTransport::with_flush_limit`] sets one.

mod messages;
mod watchdog;
mod window;
mod world;

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use watchdog::Watchdog;
pub use world::{Comm, MpiError, MpiWorld, library};

use super::{RawWait, SignalOp, Transport};
use messages::{Data, Messages};
use window::{PIECE_BYTES, Window};
use world::Turn;

/// A spinning wait calls MPI once per this number of polls, and so do repeated reads of a signal: a poll is one load, a call
/// takes a hundred times as long, and with more PEs than CPUs Open MPI yields the CPU in it.
const POLLS_PER_CALL: u32 = 16;

/// One PE's heap and its access to the other heaps. Must stay in the thread that initialised MPI.
#[derive(Debug)]
pub struct MpiTransport<'w> {
    world: &'w MpiWorld,
    window: Arc<Window>,
    /// Messages to and from other hosts, and their thread.
    messages: Option<(Arc<Messages>, JoinHandle<()>)>,
    on_host: Vec<bool>,
    /// Number of signal reads outside of waits.
    polls: Cell<u32>,
}

impl<'w> MpiTransport<'w> {
    /// Creates a zeroed heap of `heap_bytes` bytes on each PE of the world (collective). All PEs pass the same size and drop
    /// their transports in the same order.
    ///
    /// # Errors
    /// [`MpiError`] if MPI cannot allocate the memory or does not have the unified memory model.
    pub fn new(world: &'w MpiWorld, heap_bytes: usize) -> Result<Self, MpiError> {
        let window = Arc::new(Window::new(world, heap_bytes)?);
        // Creating the window has synchronised the PEs, so this barrier is short.
        world.barrier(Duration::from_secs(60))?;
        let on_host = world.is_on_host();
        let messages = if world.is_serialized() && on_host.contains(&false) {
            Some(Messages::start(window.clone(), world)?)
        } else {
            None
        };
        Ok(MpiTransport { world, window, messages, on_host, polls: Cell::new(0) })
    }

    /// Limits each call to `bytes` bytes, to test transfers longer than MPI's maximum count.
    ///
    /// # Panics
    /// If `bytes` is 0 or above the maximum.
    pub fn with_piece_bytes(self, bytes: usize) -> Self {
        assert!(bytes > 0 && bytes <= PIECE_BYTES, "a piece has 1 to {PIECE_BYTES} bytes");
        self.window.piece_bytes.store(bytes, Ordering::Relaxed);
        self
    }

    /// Limits the time that a flush may wait for a peer. After the limit the process prints a line to standard error and exits
    /// with code 1, and `mpirun` ends the other processes.
    ///
    /// # Errors
    /// [`MpiError::Unsuitable`] if the watchdog's thread cannot be started.
    pub fn with_flush_limit(self, limit: Duration) -> Result<Self, MpiError> {
        self.window.limit_flushes(limit)?;
        if let Some((messages, _)) = &self.messages {
            messages.limit(limit);
        }
        Ok(self)
    }

    /// The messages, if `pe` is on another host.
    fn messages_to(&self, pe: usize) -> Option<&Messages> {
        self.messages.as_ref().filter(|_| !self.on_host[pe]).map(|(messages, _)| &**messages)
    }

    /// Waits until all messages to `pe` have been delivered.
    fn drain(&self, pe: usize) {
        if let Some(messages) = self.messages_to(pe) {
            messages.drain(pe);
        }
    }

    /// Lets MPI progress, unless another thread does.
    fn progress(&self) {
        match &self.messages {
            Some((messages, _)) => messages.advance(),
            None => self.window.progress(&Turn::wait()),
        }
    }
}

impl Drop for MpiTransport<'_> {
    fn drop(&mut self) {
        // Both steps wait for the other PEs, which may be missing after a panic.
        let ends = !std::thread::panicking();
        if ends && self.messages.is_some() {
            (0..self.n_pes()).for_each(|pe| self.drain(pe));
            // The others need this PE's thread until they have sent everything. Freeing the window has no limit either.
            if let Err(error) = self.world.barrier(Duration::MAX) {
                self.window.abort(&error);
            }
        }
        if let Some((messages, thread)) = self.messages.take() {
            messages.stop();
            // The thread does not panic.
            let _ = thread.join();
            if ends {
                // SAFETY: the thread has ended, and all messages have been delivered.
                unsafe { messages.free(&Turn::wait()) };
            } else {
                // MPI may still read the buffers.
                std::mem::forget(messages);
            }
        }
        if ends {
            // SAFETY: this is the window's last use.
            unsafe { self.window.free(&Turn::wait()) };
        }
    }
}

impl Transport for MpiTransport<'_> {
    fn my_pe(&self) -> usize {
        self.world.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.world.n_pes()
    }

    fn heap_bytes(&self) -> usize {
        self.window.heap_bytes
    }

    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        if pe == self.my_pe() {
            let to = self.window.at(dest, src.len());
            // SAFETY: both ranges were bounds-checked. The window's memory is never borrowed as a slice, so the ranges do not overlap.
            unsafe { to.as_ptr().copy_from_nonoverlapping(src.as_ptr(), src.len()) };
            return;
        }
        if let Some(messages) = self.messages_to(pe) {
            return messages.send(dest, Data::Copy(src.to_vec()), None, pe);
        }
        let turn = Turn::wait();
        // SAFETY: `src` is borrowed until after the flush.
        unsafe { self.window.start_put(dest, src.as_ptr(), src.len(), pe, &turn) };
        self.window.flush_local(pe, &turn);
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        let from = self.window.at(src, bytes);
        if pe == self.my_pe() {
            // SAFETY: both ranges were bounds-checked; they may overlap.
            unsafe { self.window.at(dest, bytes).copy_from(from, bytes) };
            return;
        }
        if let Some(messages) = self.messages_to(pe) {
            return messages.send(dest, Data::Heap(src, bytes), None, pe);
        }
        // SAFETY: the source is in the heap, which outlives every operation; by the contract of put_nbi it does not change.
        unsafe { self.window.start_put(dest, from.as_ptr(), bytes, pe, &Turn::wait()) };
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        if pe == self.my_pe() {
            let from = self.window.at(src, dest.len());
            // SAFETY: both ranges were bounds-checked. The window's memory is never borrowed as a slice, so the ranges do not overlap.
            unsafe { dest.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), dest.len()) };
            return;
        }
        self.drain(pe);
        let turn = Turn::wait();
        // SAFETY: `dest` is borrowed until after the flush.
        unsafe { self.window.start_get(dest.as_mut_ptr(), src, dest.len(), pe, &turn) };
        self.window.flush_local(pe, &turn);
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        let to = self.window.at(dest, bytes);
        if pe == self.my_pe() {
            // SAFETY: both ranges were bounds-checked; they may overlap.
            unsafe { to.copy_from(self.window.at(src, bytes), bytes) };
            return;
        }
        self.drain(pe);
        // SAFETY: the destination is in the heap, which outlives every operation; by the contract of get_nbi it is not read.
        unsafe { self.window.start_get(to.as_ptr(), src, bytes, pe, &Turn::wait()) };
    }

    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        if pe == self.my_pe() {
            self.put(dest, src, pe);
            return self.signal_op(signal, value, op, pe);
        }
        if let Some(messages) = self.messages_to(pe) {
            return messages.send(dest, Data::Copy(src.to_vec()), Some((signal, value, op)), pe);
        }
        let turn = Turn::wait();
        // SAFETY: `src` is borrowed until after the flush.
        unsafe { self.window.start_put(dest, src.as_ptr(), src.len(), pe, &turn) };
        self.window.flush(pe, &turn);
        self.window.signal(signal, value, op, pe, &turn);
    }

    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize) {
        match self.messages_to(pe) {
            Some(messages) => messages.send(0, Data::Copy(Vec::new()), Some((signal, value, op)), pe),
            None => self.window.signal(signal, value, op, pe, &Turn::wait()),
        }
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.window.check_word(signal);
        self.polls.set(self.polls.get().wrapping_add(1));
        if self.polls.get().is_multiple_of(POLLS_PER_CALL) {
            self.progress();
        }
        self.window.load(signal)
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        self.drain(pe);
        self.window.fetch_add(target, value, pe, &Turn::wait())
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let poll = || waits.iter().position(|wait| wait.cmp.holds(self.window.load(wait.signal), wait.value));
        let mut pause = self.world.pause();
        loop {
            if let Some(found) = poll() {
                return Some(found);
            }
            pause.step();
            if !pause.spins() || pause.polls().is_multiple_of(POLLS_PER_CALL) {
                self.progress();
                if Instant::now() >= deadline {
                    return poll();
                }
            }
        }
    }

    fn fence(&self) {
        if let Some((messages, _)) = &self.messages {
            messages.fence();
        }
        self.window.flush_all();
    }

    fn quiet(&self) {
        (0..self.n_pes()).for_each(|pe| self.drain(pe));
        self.window.flush_all();
        self.window.sync(&Turn::wait());
    }

    fn ptr(&self, _offset: usize, _pe: usize) -> Option<NonNull<u8>> {
        None
    }

    fn is_reachable(&self, _pe: usize) -> bool {
        false
    }
}
