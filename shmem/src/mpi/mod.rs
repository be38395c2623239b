//! The transport over an MPI-3 window: PEs that `mpirun` started, on one host or many.
//!
//! The window is made by `MPI_Win_allocate`, so that MPI can place it where its peers reach it best (shared memory on one
//! host, registered memory on a network), and is locked for all from its start to its end: passive target
//! throughout, no PE takes part in another's operations.
//!
//! # What gives which order
//! MPI orders nothing between operations on different places but by a flush. Accumulates of one PE to one place keep
//! their order by default; that is of no use here, where data and signal are at different places, so it is not asked for.
//!
//! - **put**: `MPI_Put` and `MPI_Win_flush_local`, after which the source may be reused.
//! - **put_signal**: the put, `MPI_Win_flush` (its data is in the target's memory now), then the signal. Nothing less will do: the
//!   signal is an accumulate, and may overtake the put on any network, or take another path in one host.
//! - **Signals** are `MPI_Accumulate` with `MPI_REPLACE` or `MPI_SUM` of one 64-bit word, atomic to each other and to
//!   `MPI_Fetch_and_op`. The own word is signalled through MPI as well: a processor's atomic and MPI's may not know of each other.
//!   MPI promises no atomicity between a SET and an ADD of one word at the same time; the layer has none.
//! - **A wait** reads the word in its own memory: in the unified memory model, which is asked for when the window is made, what
//!   has been put or accumulated becomes visible to loads without a call, in the one copy that there is. The load is an acquire,
//!   so that the reads of the data come after it, and the data was there before the signal set out: that is all of what
//!   `MPI_Win_sync` could add. A wait also calls `MPI_Iprobe` for a message that nobody sends: many an MPI moves
//!   other PEs' operations on this PE's memory only while this PE is in a call.
//! - **fence** and **quiet** flush the PEs that something was sent to since their last flush. A fence need not complete anything, but
//!   MPI has nothing that only orders.
//! - **get** is `MPI_Get` and a local flush, which for a get means that the data is here. The own heap is read and written
//!   directly, as the unified model allows, with `MPI_Win_sync` in quiet.
//!
//! # Errors
//! A call that fails in the middle of an operation is a line on standard error that names PE, call and MPI's reason, and
//! `MPI_Abort`: the trait's operations cannot fail, and peers would wait for what does not come. MPI's flushes have
//! no time limit; [`MpiTransport::with_flush_limit`] gives them one.

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

/// The most bytes of one call: a count is a C int.
const PIECE_BYTES: usize = 1 << 30;

/// While a wait spins, MPI is called at every so many looks, and so it is by a caller who polls: a look is a load, a call a
/// hundred times as long, and with more PEs than CPUs one that Open MPI gives the CPU away in.
const LOOKS_A_CALL: u32 = 16;

/// One PE's heap and its view of the others'. It belongs to the thread that initialised MPI.
#[derive(Debug)]
pub struct MpiTransport<'w> {
    world: &'w MpiWorld,
    window: ffi::MPI_Win,
    base: NonNull<u8>,
    heap_bytes: usize,
    /// By PE, whether something was sent there, or asked of it, since its last flush; and how many there are.
    under_way: Vec<Cell<bool>>,
    n_under_way: Cell<usize>,
    /// Reads of signals outside of waits.
    polls: Cell<u32>,
    piece_bytes: usize,
    watchdog: Option<Watchdog>,
}

impl<'w> MpiTransport<'w> {
    /// A heap of `heap_bytes` bytes, zero, on each PE of the world. Collective; the PEs ask for the same size, and drop it in
    /// the same order as others.
    ///
    /// # Errors
    /// When MPI refuses the memory, or has another memory model than the unified one.
    pub fn new(world: &'w MpiWorld, heap_bytes: usize) -> Result<Self, MpiError> {
        let unfit = |what: String| MpiError::Unfit(what);
        let size = ffi::MPI_Aint::try_from(heap_bytes)
            .map_err(|_| unfit(format!("a symmetric heap of {heap_bytes} bytes is larger than MPI can count")))?;
        let mut base = std::ptr::null_mut::<u8>();
        // SAFETY: the null window is a constant.
        let mut window = unsafe { ffi::RSMPI_WIN_NULL };
        let info = Info::new(&[
            (c"same_size", c"true"),
            (c"same_disp_unit", c"true"),
            (c"accumulate_ordering", c"none"),
            // Open MPI's: accumulates are of one word.
            (c"acc_single_intrinsic", c"true"),
        ])?;
        // SAFETY: MPI writes the address of the memory where `base` is, and the window.
        check("MPI_Win_allocate", unsafe {
            let base = (&raw mut base).cast::<c_void>();
            ffi::MPI_Win_allocate(size, 1, info.0, world.comm().as_raw(), base, &mut window)
        })
        .map_err(|error| match error {
            // Its component `rdma` is asked first, and where the network has no remote memory access fails instead of leaving it to
            // another.
            MpiError::Call { .. }
                if world::library().starts_with("Open MPI") && world.pes_on_host() < world.n_pes() =>
            {
                unfit(format!(
                    "{error}; between these hosts start with mpirun --mca osc ^rdma, or OMPI_MCA_osc=^rdma set"
                ))
            }
            error => error,
        })?;
        drop(info);
        let base = NonNull::new(base)
            .filter(|base| base.addr().get().is_multiple_of(align_of::<u64>()))
            .ok_or_else(|| unfit(format!("MPI_Win_allocate gave memory at {base:?}, not fit for 64-bit words")))?;
        let n_pes = world.n_pes();
        let transport = MpiTransport {
            world,
            window,
            base,
            heap_bytes,
            under_way: vec![Cell::new(false); n_pes],
            n_under_way: Cell::new(0),
            polls: Cell::new(0),
            piece_bytes: PIECE_BYTES,
            watchdog: None,
        };
        // SAFETY: the window is the one just made.
        unsafe {
            check("MPI_Win_set_errhandler", ffi::MPI_Win_set_errhandler(window, ffi::RSMPI_ERRORS_RETURN))?;
            check("MPI_Win_lock_all", ffi::MPI_Win_lock_all(aristos_mpi_mode_nocheck, window))?;
        }
        transport.check_model()?;
        // SAFETY: the memory is this PE's own, of this size, and no peer touches it before the barrier.
        unsafe { base.write_bytes(0, heap_bytes) };
        transport.sync();
        // Making a window has brought the PEs together, so that none is far.
        world.barrier(Duration::from_secs(60))?;
        Ok(transport)
    }

    /// With at most `bytes` bytes a call, for tests of what is longer than MPI counts.
    ///
    /// # Panics
    /// If that is 0.
    pub fn with_piece_bytes(mut self, bytes: usize) -> Self {
        assert!(bytes > 0 && bytes <= PIECE_BYTES, "a piece has 1 to {PIECE_BYTES} bytes");
        self.piece_bytes = bytes;
        self
    }

    /// With a limit on how long a flush may wait for a peer: past it, a line on standard error, and the end of the process with
    /// code 1, which makes `mpirun` end the others.
    ///
    /// # Errors
    /// When there can be no thread to watch.
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
        // SAFETY: a constant.
        if model != Some(unsafe { aristos_mpi_win_unified }) {
            return Err(MpiError::Unfit(format!(
                "{}: its windows have not the unified memory model (MPI_WIN_UNIFIED), which signals need",
                library()
            )));
        }
        Ok(())
    }

    /// The own memory at `offset`.
    ///
    /// # Panics
    /// If `bytes` bytes from there are not in the heap.
    #[track_caller]
    fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        self.check_bounds(offset, bytes);
        // SAFETY: inside the heap.
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

    /// Ends the job where a call has failed.
    fn must(&self, call: &'static str, code: c_int) {
        self.must_be(check(call, code));
    }

    fn must_be(&self, result: Result<(), MpiError>) {
        if let Err(error) = result {
            let _ = writeln!(std::io::stderr(), "aristos: PE {} failed: {error}", self.world.my_pe());
            self.world.abort(1);
        }
    }

    fn mark(&self, pe: usize) {
        if !self.under_way[pe].replace(true) {
            self.n_under_way.set(self.n_under_way.get() + 1);
        }
    }

    /// Makes a call that may wait for `pe`.
    fn watched(&self, pe: usize, call: impl FnOnce() -> c_int) -> c_int {
        match &self.watchdog {
            Some(watchdog) => watchdog.during(pe, call),
            None => call(),
        }
    }

    /// What was sent to `pe` is there.
    fn flush(&self, pe: usize) {
        // SAFETY: the window is locked for all.
        let flush = || unsafe { ffi::MPI_Win_flush(pe as c_int, self.window) };
        self.must("MPI_Win_flush", self.watched(pe, flush));
        if self.under_way[pe].replace(false) {
            self.n_under_way.set(self.n_under_way.get() - 1);
        }
    }

    /// Our side of what was sent to `pe`, or asked of it, is done.
    fn flush_local(&self, pe: usize) {
        // SAFETY: the window is locked for all.
        let flush = || unsafe { ffi::MPI_Win_flush_local(pe as c_int, self.window) };
        self.must("MPI_Win_flush_local", self.watched(pe, flush));
    }

    fn flush_all(&self) {
        if self.n_under_way.get() > 0 {
            (0..self.n_pes()).filter(|&pe| self.under_way[pe].get()).for_each(|pe| self.flush(pe));
        }
    }

    fn sync(&self) {
        // SAFETY: the window is locked for all.
        self.must("MPI_Win_sync", unsafe { ffi::MPI_Win_sync(self.window) });
    }

    /// Calls `move_piece` with the offset and the length of each call that moving `bytes` bytes takes.
    fn in_pieces(&self, bytes: usize, move_piece: impl Fn(usize, usize)) {
        let mut at = 0;
        while at < bytes {
            let len = self.piece_bytes.min(bytes - at);
            move_piece(at, len);
            at += len;
        }
    }

    /// Starts putting `bytes` bytes from `src`.
    ///
    /// # Safety
    /// They stay as they are until a flush of `pe`, local or not.
    unsafe fn start_put(&self, dest: usize, src: *const u8, bytes: usize, pe: usize) {
        self.check_bounds(dest, bytes);
        self.mark(pe);
        self.in_pieces(bytes, |at, len| {
            // SAFETY: source and destination are in their bounds; the caller keeps the source.
            self.must("MPI_Put", unsafe {
                let (len, place) = (len as c_int, (dest + at) as ffi::MPI_Aint);
                let byte = ffi::RSMPI_UINT8_T;
                ffi::MPI_Put(src.add(at).cast::<c_void>(), len, byte, pe as c_int, place, len, byte, self.window)
            });
        });
    }

    /// Starts getting `bytes` bytes into `dest`.
    ///
    /// # Safety
    /// Nobody touches them until a flush of `pe`, local or not.
    unsafe fn start_get(&self, dest: *mut u8, src: usize, bytes: usize, pe: usize) {
        self.check_bounds(src, bytes);
        self.mark(pe);
        self.in_pieces(bytes, |at, len| {
            // SAFETY: source and destination are in their bounds; the caller keeps off the destination.
            self.must("MPI_Get", unsafe {
                let (len, place) = (len as c_int, (src + at) as ffi::MPI_Aint);
                let byte = ffi::RSMPI_UINT8_T;
                ffi::MPI_Get(dest.add(at).cast::<c_void>(), len, byte, pe as c_int, place, len, byte, self.window)
            });
        });
    }

    /// The word at `offset` of the own heap, now.
    fn load(&self, offset: usize) -> u64 {
        let word = self.at(offset, size_of::<u64>()).cast::<u64>();
        // SAFETY: in the heap and aligned; whatever changes it, changes it as a whole.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }.load(Ordering::Acquire)
    }
}

impl Drop for MpiTransport<'_> {
    fn drop(&mut self) {
        // Both wait for the other PEs, which during a panic may never come.
        if !std::thread::panicking() {
            // SAFETY: the window is locked for all, and used no more. An error here has nothing left to spoil.
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
            // SAFETY: both ranges are in their bounds, and a borrowed slice is not in the window, which is never lent.
            unsafe { to.as_ptr().copy_from_nonoverlapping(src.as_ptr(), src.len()) };
            return;
        }
        // SAFETY: `src` is borrowed until the flush.
        unsafe { self.start_put(dest, src.as_ptr(), src.len(), pe) };
        self.flush_local(pe);
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        let from = self.at(src, bytes);
        if pe == self.my_pe() {
            // SAFETY: both ranges are in the heap; they may overlap.
            unsafe { self.at(dest, bytes).copy_from(from, bytes) };
            return;
        }
        // SAFETY: the source is in the heap, which outlives every operation; that it stays as it is, the caller keeps.
        unsafe { self.start_put(dest, from.as_ptr(), bytes, pe) };
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        if pe == self.my_pe() {
            let from = self.at(src, dest.len());
            // SAFETY: both ranges are in their bounds, and a borrowed slice is not in the window, which is never lent.
            unsafe { dest.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), dest.len()) };
            return;
        }
        // SAFETY: `dest` is borrowed until the flush.
        unsafe { self.start_get(dest.as_mut_ptr(), src, dest.len(), pe) };
        self.flush_local(pe);
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        let to = self.at(dest, bytes);
        if pe == self.my_pe() {
            // SAFETY: both ranges are in the heap; they may overlap.
            unsafe { to.copy_from(self.at(src, bytes), bytes) };
            return;
        }
        // SAFETY: the destination is in the heap, which outlives every operation; that nobody reads it, the caller keeps.
        unsafe { self.start_get(to.as_ptr(), src, bytes, pe) };
    }

    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        if pe == self.my_pe() {
            self.put(dest, src, pe);
        } else {
            // SAFETY: `src` is borrowed until the flush.
            unsafe { self.start_put(dest, src.as_ptr(), src.len(), pe) };
            self.flush(pe);
        }
        self.signal_op(signal, value, op, pe);
    }

    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.check_word(signal);
        // SAFETY: constants.
        let op = unsafe {
            match op {
                SignalOp::Set => aristos_mpi_replace,
                SignalOp::Add => ffi::RSMPI_SUM,
            }
        };
        self.mark(pe);
        // SAFETY: the word is in the heap; `value` lives until the flush.
        self.must("MPI_Accumulate", unsafe {
            let (from, place, word) =
                ((&raw const value).cast::<c_void>(), signal as ffi::MPI_Aint, ffi::RSMPI_UINT64_T);
            ffi::MPI_Accumulate(from, 1, word, pe as c_int, place, 1, word, op, self.window)
        });
        self.flush_local(pe);
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.check_word(signal);
        self.polls.set(self.polls.get().wrapping_add(1));
        if self.polls.get().is_multiple_of(LOOKS_A_CALL) {
            self.must_be(self.world.progress());
        }
        self.load(signal)
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        self.check_word(target);
        self.mark(pe);
        let mut was = 0u64;
        // SAFETY: the word is in the heap; `value` and `was` live until the flush.
        self.must("MPI_Fetch_and_op", unsafe {
            let (from, to) = ((&raw const value).cast::<c_void>(), (&raw mut was).cast::<c_void>());
            let place = target as ffi::MPI_Aint;
            ffi::MPI_Fetch_and_op(from, to, ffi::RSMPI_UINT64_T, pe as c_int, place, ffi::RSMPI_SUM, self.window)
        });
        self.flush(pe);
        was
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let look = || waits.iter().position(|wait| wait.cmp.holds(self.load(wait.signal), wait.value));
        let mut pause = self.world.pause();
        loop {
            if let Some(found) = look() {
                return Some(found);
            }
            pause.step();
            if !pause.spins() || pause.looks().is_multiple_of(LOOKS_A_CALL) {
                self.must_be(self.world.progress());
                if Instant::now() >= deadline {
                    return look();
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
        // SAFETY: the null info is a constant.
        let mut info = Info(unsafe { ffi::RSMPI_INFO_NULL });
        // SAFETY: MPI writes the handle.
        check("MPI_Info_create", unsafe { ffi::MPI_Info_create(&mut info.0) })?;
        for (key, value) in hints {
            // SAFETY: both end with a zero byte.
            check("MPI_Info_set", unsafe { ffi::MPI_Info_set(info.0, key.as_ptr(), value.as_ptr()) })?;
        }
        Ok(info)
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: an info object that MPI gave, or the null info, which it refuses to free.
        unsafe { ffi::MPI_Info_free(&mut self.0) };
    }
}
