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
//! # Errors
//! If a call fails during an operation, the PE prints a line with PE, call and MPI's reason to standard error and calls
//! `MPI_Abort`: the trait's operations cannot return errors, and peers would wait for missing data. MPI's flushes have no time
//! limit; [`MpiTransport::with_flush_limit`] sets one.

mod watchdog;
mod world;

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mpi::ffi;
use mpi::traits::AsRaw;

pub use watchdog::Watchdog;
pub use world::{MpiError, MpiWorld, library};

use super::{RawWait, SignalOp, Transport};
use world::check;

unsafe extern "C" {
    // src/mpi/constants.c
    static aristos_mpi_replace: ffi::MPI_Op;
    static aristos_mpi_win_model: c_int;
    static aristos_mpi_win_unified: c_int;
    static aristos_mpi_mode_nocheck: c_int;
}

/// Maximum bytes per call: counts are C ints.
const PIECE_BYTES: usize = 1 << 30;

/// A spinning wait calls MPI once per this number of polls, and so do repeated reads of a signal: a poll is one load, a call
/// takes a hundred times as long, and with more PEs than CPUs Open MPI yields the CPU in it.
const POLLS_PER_CALL: u32 = 16;

/// One PE's heap and its access to the other heaps. Must stay in the thread that initialised MPI.
#[derive(Debug)]
pub struct MpiTransport<'w> {
    world: &'w MpiWorld,
    window: ffi::MPI_Win,
    base: NonNull<u8>,
    heap_bytes: usize,
    /// Per PE: whether it has operations since its last flush; and the number of such PEs.
    pending: Vec<Cell<bool>>,
    n_pending: Cell<usize>,
    /// Number of signal reads outside of waits.
    polls: Cell<u32>,
    piece_bytes: usize,
    watchdog: Option<Watchdog>,
}

impl<'w> MpiTransport<'w> {
    /// Creates a zeroed heap of `heap_bytes` bytes on each PE of the world (collective). All PEs pass the same size and drop
    /// their transports in the same order.
    ///
    /// # Errors
    /// [`MpiError`] if MPI cannot allocate the memory or does not have the unified memory model.
    pub fn new(world: &'w MpiWorld, heap_bytes: usize) -> Result<Self, MpiError> {
        let unsuitable = |what: String| MpiError::Unfit(what);
        let size = ffi::MPI_Aint::try_from(heap_bytes)
            .map_err(|_| unsuitable(format!("a symmetric heap of {heap_bytes} bytes is larger than MPI can count")))?;
        let mut base = std::ptr::null_mut::<u8>();
        // SAFETY: reads a constant.
        let mut window = unsafe { ffi::RSMPI_WIN_NULL };
        let info = Info::new(&[
            (c"same_size", c"true"),
            (c"same_disp_unit", c"true"),
            (c"accumulate_ordering", c"none"),
            // Open MPI's hint that accumulates affect a single word.
            (c"acc_single_intrinsic", c"true"),
        ])?;
        // SAFETY: MPI writes the memory's address to `base` and the handle to `window`.
        check("MPI_Win_allocate", unsafe {
            let base = (&raw mut base).cast::<c_void>();
            ffi::MPI_Win_allocate(size, 1, info.0, world.comm().as_raw(), base, &mut window)
        })
        .map_err(|error| match error {
            // Open MPI's component `rdma` is selected first. Without remote memory access on the network it fails instead of
            // deferring to another component.
            MpiError::Call { .. }
                if world::library().starts_with("Open MPI") && world.pes_on_host() < world.n_pes() =>
            {
                unsuitable(format!(
                    "{error}; between these hosts start with mpirun --mca osc ^rdma, or OMPI_MCA_osc=^rdma set"
                ))
            }
            error => error,
        })?;
        drop(info);
        let base = NonNull::new(base)
            .filter(|base| base.addr().get().is_multiple_of(align_of::<u64>()))
            .ok_or_else(|| unsuitable(format!("MPI_Win_allocate gave memory at {base:?}, not fit for 64-bit words")))?;
        let n_pes = world.n_pes();
        let transport = MpiTransport {
            world,
            window,
            base,
            heap_bytes,
            pending: vec![Cell::new(false); n_pes],
            n_pending: Cell::new(0),
            polls: Cell::new(0),
            piece_bytes: PIECE_BYTES,
            watchdog: None,
        };
        // SAFETY: the window was just created.
        unsafe {
            check("MPI_Win_set_errhandler", ffi::MPI_Win_set_errhandler(window, ffi::RSMPI_ERRORS_RETURN))?;
            check("MPI_Win_lock_all", ffi::MPI_Win_lock_all(aristos_mpi_mode_nocheck, window))?;
        }
        transport.check_model()?;
        // SAFETY: the memory belongs to this PE and has `heap_bytes` bytes; peers access it only after the barrier.
        unsafe { base.write_bytes(0, heap_bytes) };
        transport.sync();
        // Creating the window has synchronised the PEs, so this barrier is short.
        world.barrier(Duration::from_secs(60))?;
        Ok(transport)
    }

    /// Limits each call to `bytes` bytes, to test transfers longer than MPI's maximum count.
    ///
    /// # Panics
    /// If `bytes` is 0 or above the maximum.
    pub fn with_piece_bytes(mut self, bytes: usize) -> Self {
        assert!(bytes > 0 && bytes <= PIECE_BYTES, "a piece has 1 to {PIECE_BYTES} bytes");
        self.piece_bytes = bytes;
        self
    }

    /// Limits the time that a flush may wait for a peer. After the limit the process prints a line to standard error and exits
    /// with code 1, and `mpirun` ends the other processes.
    ///
    /// # Errors
    /// [`MpiError::Unfit`] if the watchdog's thread cannot be started.
    pub fn with_flush_limit(mut self, limit: Duration) -> Result<Self, MpiError> {
        let watchdog = Watchdog::start(self.world.my_pe(), limit, |pe| {
            format!("PE {pe} to take what was sent to it (MPI_Win_flush)")
        });
        self.watchdog =
            Some(watchdog.map_err(|e| MpiError::Unfit(format!("cannot start the watchdog's thread: {e}")))?);
        Ok(self)
    }

    fn check_model(&self) -> Result<(), MpiError> {
        let mut model = std::ptr::null::<c_int>();
        let mut flag = 0;
        // SAFETY: the attribute's value is the address of an int that lives as long as the window.
        let model = unsafe {
            let at = (&raw mut model).cast::<c_void>();
            check("MPI_Win_get_attr", ffi::MPI_Win_get_attr(self.window, aristos_mpi_win_model, at, &mut flag))?;
            (flag != 0).then(|| *model)
        };
        // SAFETY: reads a constant.
        if model != Some(unsafe { aristos_mpi_win_unified }) {
            return Err(MpiError::Unfit(format!(
                "{}: its windows have not the unified memory model (MPI_WIN_UNIFIED), which signals need",
                library()
            )));
        }
        Ok(())
    }

    /// The address of `offset` in this PE's heap.
    ///
    /// # Panics
    /// If `bytes` bytes at `offset` are out of bounds.
    #[track_caller]
    fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        self.check_bounds(offset, bytes);
        // SAFETY: `check_bounds` has checked that the range is inside the heap.
        unsafe { self.base.add(offset) }
    }

    #[track_caller]
    fn check_bounds(&self, offset: usize, bytes: usize) {
        let fits = offset <= self.heap_bytes && bytes <= self.heap_bytes - offset;
        assert!(fits, "{bytes} bytes at offset {offset} of a symmetric heap of {} bytes", self.heap_bytes);
    }

    #[track_caller]
    fn check_word(&self, offset: usize) {
        self.check_bounds(offset, size_of::<u64>());
        assert!(offset.is_multiple_of(size_of::<u64>()), "offset {offset} is not a word's");
    }

    /// Aborts the job if a call has failed.
    fn abort_on_error_code(&self, call: &'static str, code: c_int) {
        self.abort_on_error(check(call, code));
    }

    fn abort_on_error(&self, result: Result<(), MpiError>) {
        if let Err(error) = result {
            let _ = writeln!(std::io::stderr(), "aristos: PE {} failed: {error}", self.world.my_pe());
            self.world.abort(1);
        }
    }

    fn mark_pending(&self, pe: usize) {
        if !self.pending[pe].replace(true) {
            self.n_pending.set(self.n_pending.get() + 1);
        }
    }

    /// Makes a call that may wait for `pe`, under the watchdog if there is one.
    fn watched(&self, pe: usize, call: impl FnOnce() -> c_int) -> c_int {
        match &self.watchdog {
            Some(watchdog) => watchdog.during(pe, call),
            None => call(),
        }
    }

    /// Completes all operations on `pe` at the target.
    fn flush(&self, pe: usize) {
        // SAFETY: the window is locked for all.
        let flush = || unsafe { ffi::MPI_Win_flush(pe as c_int, self.window) };
        self.abort_on_error_code("MPI_Win_flush", self.watched(pe, flush));
        if self.pending[pe].replace(false) {
            self.n_pending.set(self.n_pending.get() - 1);
        }
    }

    /// Completes all operations on `pe` at this PE: their buffers may be reused.
    fn flush_local(&self, pe: usize) {
        // SAFETY: the window is locked for all.
        let flush = || unsafe { ffi::MPI_Win_flush_local(pe as c_int, self.window) };
        self.abort_on_error_code("MPI_Win_flush_local", self.watched(pe, flush));
    }

    fn flush_all(&self) {
        if self.n_pending.get() > 0 {
            (0..self.n_pes()).filter(|&pe| self.pending[pe].get()).for_each(|pe| self.flush(pe));
        }
    }

    fn sync(&self) {
        // SAFETY: the window is locked for all.
        self.abort_on_error_code("MPI_Win_sync", unsafe { ffi::MPI_Win_sync(self.window) });
    }

    /// Splits `bytes` into calls of at most `piece_bytes`; `move_piece` gets the offset and length of each.
    fn in_pieces(&self, bytes: usize, move_piece: impl Fn(usize, usize)) {
        let mut at = 0;
        while at < bytes {
            let len = self.piece_bytes.min(bytes - at);
            move_piece(at, len);
            at += len;
        }
    }

    /// Starts a put of `bytes` bytes from `src`.
    ///
    /// # Safety
    /// The source stays valid and unchanged until a local or remote flush of `pe`.
    unsafe fn start_put(&self, dest: usize, src: *const u8, bytes: usize, pe: usize) {
        self.check_bounds(dest, bytes);
        self.mark_pending(pe);
        self.in_pieces(bytes, |at, len| {
            // SAFETY: the destination was bounds-checked, and the caller keeps the source valid.
            self.abort_on_error_code("MPI_Put", unsafe {
                let (len, place) = (len as c_int, (dest + at) as ffi::MPI_Aint);
                let byte = ffi::RSMPI_UINT8_T;
                ffi::MPI_Put(src.add(at).cast::<c_void>(), len, byte, pe as c_int, place, len, byte, self.window)
            });
        });
    }

    /// Starts a get of `bytes` bytes into `dest`.
    ///
    /// # Safety
    /// The destination stays valid and is not accessed until a local or remote flush of `pe`.
    unsafe fn start_get(&self, dest: *mut u8, src: usize, bytes: usize, pe: usize) {
        self.check_bounds(src, bytes);
        self.mark_pending(pe);
        self.in_pieces(bytes, |at, len| {
            // SAFETY: the source was bounds-checked, and the caller keeps the destination valid.
            self.abort_on_error_code("MPI_Get", unsafe {
                let (len, place) = (len as c_int, (src + at) as ffi::MPI_Aint);
                let byte = ffi::RSMPI_UINT8_T;
                ffi::MPI_Get(dest.add(at).cast::<c_void>(), len, byte, pe as c_int, place, len, byte, self.window)
            });
        });
    }

    /// Loads the word at `offset` of this PE's heap.
    fn load(&self, offset: usize) -> u64 {
        let word = self.at(offset, size_of::<u64>()).cast::<u64>();
        // SAFETY: `at` has checked the bounds; words are aligned and only modified as a whole.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }.load(Ordering::Acquire)
    }
}

impl Drop for MpiTransport<'_> {
    fn drop(&mut self) {
        // Both calls wait for the other PEs, which may be missing after a panic.
        if !std::thread::panicking() {
            // SAFETY: the window is locked for all, and this is its last use. Errors have no consequence here.
            unsafe {
                ffi::MPI_Win_unlock_all(self.window);
                ffi::MPI_Win_free(&mut self.window);
            }
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
        self.heap_bytes
    }

    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        if pe == self.my_pe() {
            let to = self.at(dest, src.len());
            // SAFETY: both ranges were bounds-checked. The window's memory is never borrowed as a slice, so the ranges do not overlap.
            unsafe { to.as_ptr().copy_from_nonoverlapping(src.as_ptr(), src.len()) };
            return;
        }
        // SAFETY: `src` is borrowed until after the flush.
        unsafe { self.start_put(dest, src.as_ptr(), src.len(), pe) };
        self.flush_local(pe);
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        let from = self.at(src, bytes);
        if pe == self.my_pe() {
            // SAFETY: both ranges were bounds-checked; they may overlap.
            unsafe { self.at(dest, bytes).copy_from(from, bytes) };
            return;
        }
        // SAFETY: the source is in the heap, which outlives every operation; by the contract of put_nbi it does not change.
        unsafe { self.start_put(dest, from.as_ptr(), bytes, pe) };
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        if pe == self.my_pe() {
            let from = self.at(src, dest.len());
            // SAFETY: both ranges were bounds-checked. The window's memory is never borrowed as a slice, so the ranges do not overlap.
            unsafe { dest.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), dest.len()) };
            return;
        }
        // SAFETY: `dest` is borrowed until after the flush.
        unsafe { self.start_get(dest.as_mut_ptr(), src, dest.len(), pe) };
        self.flush_local(pe);
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        let to = self.at(dest, bytes);
        if pe == self.my_pe() {
            // SAFETY: both ranges were bounds-checked; they may overlap.
            unsafe { to.copy_from(self.at(src, bytes), bytes) };
            return;
        }
        // SAFETY: the destination is in the heap, which outlives every operation; by the contract of get_nbi it is not read.
        unsafe { self.start_get(to.as_ptr(), src, bytes, pe) };
    }

    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        if pe == self.my_pe() {
            self.put(dest, src, pe);
        } else {
            // SAFETY: `src` is borrowed until after the flush.
            unsafe { self.start_put(dest, src.as_ptr(), src.len(), pe) };
            self.flush(pe);
        }
        self.signal_op(signal, value, op, pe);
    }

    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.check_word(signal);
        // SAFETY: reads constants.
        let op = unsafe {
            match op {
                SignalOp::Set => aristos_mpi_replace,
                SignalOp::Add => ffi::RSMPI_SUM,
            }
        };
        self.mark_pending(pe);
        // SAFETY: `check_word` has checked the word; `value` lives until after the flush.
        self.abort_on_error_code("MPI_Accumulate", unsafe {
            let (from, place, word) =
                ((&raw const value).cast::<c_void>(), signal as ffi::MPI_Aint, ffi::RSMPI_UINT64_T);
            ffi::MPI_Accumulate(from, 1, word, pe as c_int, place, 1, word, op, self.window)
        });
        self.flush_local(pe);
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.check_word(signal);
        self.polls.set(self.polls.get().wrapping_add(1));
        if self.polls.get().is_multiple_of(POLLS_PER_CALL) {
            self.abort_on_error(self.world.progress());
        }
        self.load(signal)
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        self.check_word(target);
        self.mark_pending(pe);
        let mut was = 0u64;
        // SAFETY: `check_word` has checked the word; `value` and `was` live until after the flush.
        self.abort_on_error_code("MPI_Fetch_and_op", unsafe {
            let (from, to) = ((&raw const value).cast::<c_void>(), (&raw mut was).cast::<c_void>());
            let place = target as ffi::MPI_Aint;
            ffi::MPI_Fetch_and_op(from, to, ffi::RSMPI_UINT64_T, pe as c_int, place, ffi::RSMPI_SUM, self.window)
        });
        self.flush(pe);
        was
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let poll = || waits.iter().position(|wait| wait.cmp.holds(self.load(wait.signal), wait.value));
        let mut pause = self.world.pause();
        loop {
            if let Some(found) = poll() {
                return Some(found);
            }
            pause.step();
            if !pause.spins() || pause.polls().is_multiple_of(POLLS_PER_CALL) {
                self.abort_on_error(self.world.progress());
                if Instant::now() >= deadline {
                    return poll();
                }
            }
        }
    }

    fn fence(&self) {
        self.flush_all();
    }

    fn quiet(&self) {
        self.flush_all();
        self.sync();
    }

    fn ptr(&self, _offset: usize, _pe: usize) -> Option<NonNull<u8>> {
        None
    }

    fn is_reachable(&self, _pe: usize) -> bool {
        false
    }
}

/// Hints for a window.
struct Info(ffi::MPI_Info);

impl Info {
    fn new(hints: &[(&std::ffi::CStr, &std::ffi::CStr)]) -> Result<Info, MpiError> {
        // SAFETY: reads a constant.
        let mut info = Info(unsafe { ffi::RSMPI_INFO_NULL });
        // SAFETY: writes the handle.
        check("MPI_Info_create", unsafe { ffi::MPI_Info_create(&mut info.0) })?;
        for (key, value) in hints {
            // SAFETY: both strings are NUL-terminated.
            check("MPI_Info_set", unsafe { ffi::MPI_Info_set(info.0, key.as_ptr(), value.as_ptr()) })?;
        }
        Ok(info)
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: a handle from MPI_Info_create, or the null handle, which MPI rejects.
        unsafe { ffi::MPI_Info_free(&mut self.0) };
    }
}
