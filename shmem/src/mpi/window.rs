//! The MPI-3 window: calls, bounds, and errors. A [`Turn`] gives the right to call MPI.

use std::ffi::{c_int, c_void};
use std::io::Write;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use mpi::ffi;
use mpi::traits::AsRaw;

use super::super::SignalOp;
use super::watchdog::Watchdog;
use super::world::{MpiError, MpiRequest, MpiWorld, Turn, check, library, progress};

unsafe extern "C" {
    // src/mpi/constants.c
    static aristos_mpi_replace: ffi::MPI_Op;
    static aristos_mpi_win_model: c_int;
    static aristos_mpi_win_unified: c_int;
    static aristos_mpi_mode_nocheck: c_int;
}

/// Maximum bytes per call: counts are C ints.
pub(super) const PIECE_BYTES: usize = 1 << 30;

/// One PE's window. The memory lives until [`Window::free`].
#[derive(Debug)]
pub(super) struct Window {
    window: ffi::MPI_Win,
    comm: ffi::MPI_Comm,
    base: NonNull<u8>,
    pub(super) heap_bytes: usize,
    pub(super) me: usize,
    /// Per PE: whether it has operations since its last flush. Written only with the turn.
    pending: Vec<AtomicBool>,
    pub(super) piece_bytes: AtomicUsize,
    watchdog: OnceLock<Watchdog>,
}

// SAFETY: handles and an address, which any thread may use; calls of MPI need the turn, which one thread at a time has.
unsafe impl Send for Window {}
// SAFETY: as above; the memory is read and written only by raw pointers, or as atomic words.
unsafe impl Sync for Window {}

impl Window {
    /// Creates a zeroed heap of `heap_bytes` bytes on each PE of the world (collective).
    pub(super) fn new(world: &MpiWorld, heap_bytes: usize) -> Result<Window, MpiError> {
        let unsuitable = |what: String| MpiError::Unsuitable(what);
        let size = ffi::MPI_Aint::try_from(heap_bytes)
            .map_err(|_| unsuitable(format!("a symmetric heap of {heap_bytes} bytes is larger than MPI can count")))?;
        let mut base = std::ptr::null_mut::<u8>();
        // SAFETY: reads a constant.
        let mut window = unsafe { ffi::RSMPI_WIN_NULL };
        let comm = world.comm();
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
            ffi::MPI_Win_allocate(size, 1, info.0, comm.as_raw(), base, &mut window)
        })
        .map_err(|error| match error {
            // Open MPI's component `rdma` is selected first. Without remote memory access on the network it fails instead of
            // deferring to another component.
            MpiError::Call { .. } if library().starts_with("Open MPI") && world.pes_on_host() < world.n_pes() => {
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
        // SAFETY: the window was just created.
        unsafe {
            check("MPI_Win_set_errhandler", ffi::MPI_Win_set_errhandler(window, ffi::RSMPI_ERRORS_RETURN))?;
            check("MPI_Win_lock_all", ffi::MPI_Win_lock_all(aristos_mpi_mode_nocheck, window))?;
        }
        check_model(window)?;
        // SAFETY: the memory belongs to this PE and has `heap_bytes` bytes; peers access it only after the barrier that follows.
        unsafe { base.write_bytes(0, heap_bytes) };
        let window = Window {
            window,
            comm: comm.as_raw(),
            base,
            heap_bytes,
            me: world.my_pe(),
            pending: (0..world.n_pes()).map(|_| AtomicBool::new(false)).collect(),
            piece_bytes: AtomicUsize::new(PIECE_BYTES),
            watchdog: OnceLock::new(),
        };
        drop(comm);
        window.sync(&Turn::wait());
        Ok(window)
    }

    /// Limits the time that each flush waits. After the limit the process prints a line to standard error and exits with code 1.
    pub(super) fn limit_flushes(&self, limit: Duration) -> Result<(), MpiError> {
        let watchdog = Watchdog::start(self.me, limit, |pe| format!("{} (MPI_Win_flush)", late(pe)));
        let watchdog =
            watchdog.map_err(|e| MpiError::Unsuitable(format!("cannot start the watchdog's thread: {e}")))?;
        let _ = self.watchdog.set(watchdog);
        Ok(())
    }

    /// Unlocks and frees the window, which waits for the other PEs.
    ///
    /// # Safety
    /// The window is not used afterwards.
    pub(super) unsafe fn free(&self, _turn: &Turn) {
        let mut window = self.window;
        // SAFETY: the window is locked for all, and this is its last use. Errors have no consequence here.
        unsafe {
            ffi::MPI_Win_unlock_all(window);
            ffi::MPI_Win_free(&mut window);
        }
    }

    /// The address of `offset` in this PE's heap.
    ///
    /// # Panics
    /// If `bytes` bytes at `offset` are out of bounds.
    #[track_caller]
    pub(super) fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        self.check_bounds(offset, bytes);
        // SAFETY: `check_bounds` has checked that the range is inside the heap.
        unsafe { self.base.add(offset) }
    }

    #[track_caller]
    pub(super) fn check_bounds(&self, offset: usize, bytes: usize) {
        let fits = offset <= self.heap_bytes && bytes <= self.heap_bytes - offset;
        assert!(fits, "{bytes} bytes at offset {offset} of a symmetric heap of {} bytes", self.heap_bytes);
    }

    #[track_caller]
    pub(super) fn check_word(&self, offset: usize) {
        self.check_bounds(offset, size_of::<u64>());
        assert!(offset.is_multiple_of(size_of::<u64>()), "offset {offset} is not a word's");
    }

    /// Loads the word at `offset` of this PE's heap.
    pub(super) fn load(&self, offset: usize) -> u64 {
        let word = self.at(offset, size_of::<u64>()).cast::<u64>();
        // SAFETY: `at` has checked the bounds; words are aligned and only modified as a whole.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }.load(Ordering::Acquire)
    }

    /// Prints an error and aborts the job.
    pub(super) fn abort(&self, error: &dyn std::fmt::Display) -> ! {
        let _ = writeln!(std::io::stderr(), "aristos: PE {} failed: {error}", self.me);
        // SAFETY: MPI is initialised.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
        std::process::exit(1)
    }

    fn abort_on_error<T>(&self, result: Result<T, MpiError>) -> T {
        result.unwrap_or_else(|error| self.abort(&error))
    }

    pub(super) fn abort_on_error_code(&self, call: &'static str, code: c_int) {
        self.abort_on_error(check(call, code));
    }

    /// Aborts the job because `pe` has not received a message in time.
    pub(super) fn abort_late(&self, pe: usize, limit: Duration) -> ! {
        self.abort(&format_args!("waited {} s for {}", limit.as_secs_f64(), late(pe)))
    }

    /// Makes a call that may wait for `pe`, under the watchdog if there is one.
    fn watched(&self, pe: usize, call: impl FnOnce() -> c_int) -> c_int {
        match self.watchdog.get() {
            Some(watchdog) => watchdog.during(pe, call),
            None => call(),
        }
    }

    fn mark_pending(&self, pe: usize) {
        self.pending[pe].store(true, Ordering::Relaxed);
    }

    /// Completes all operations on `pe` at the target.
    pub(super) fn flush(&self, pe: usize, _turn: &Turn) {
        // SAFETY: the window is locked for all.
        let flush = || unsafe { ffi::MPI_Win_flush(pe as c_int, self.window) };
        self.abort_on_error_code("MPI_Win_flush", self.watched(pe, flush));
        self.pending[pe].store(false, Ordering::Relaxed);
    }

    /// Completes all operations on `pe` at this PE: their buffers may be reused.
    pub(super) fn flush_local(&self, pe: usize, _turn: &Turn) {
        // SAFETY: the window is locked for all.
        let flush = || unsafe { ffi::MPI_Win_flush_local(pe as c_int, self.window) };
        self.abort_on_error_code("MPI_Win_flush_local", self.watched(pe, flush));
    }

    /// Flushes the PEs with operations since their last flush.
    pub(super) fn flush_all(&self) {
        let is_pending = |pe: &usize| self.pending[*pe].load(Ordering::Relaxed);
        (0..self.pending.len()).filter(is_pending).for_each(|pe| self.flush(pe, &Turn::wait()));
    }

    pub(super) fn sync(&self, _turn: &Turn) {
        // SAFETY: the window is locked for all.
        self.abort_on_error_code("MPI_Win_sync", unsafe { ffi::MPI_Win_sync(self.window) });
    }

    /// Lets MPI progress pending operations.
    pub(super) fn progress(&self, turn: &Turn) {
        self.abort_on_error(progress(self.comm, turn));
    }

    /// Removes the operations that have completed.
    pub(super) fn retain_incomplete(&self, requests: &mut Vec<MpiRequest>, turn: &Turn) {
        requests.retain_mut(|request| !self.abort_on_error(request.test(turn)));
    }

    /// Splits `bytes` into calls of at most `piece_bytes`; `move_piece` gets the offset and length of each.
    fn in_pieces(&self, bytes: usize, move_piece: impl Fn(usize, usize)) {
        let most = self.piece_bytes.load(Ordering::Relaxed);
        let mut at = 0;
        while at < bytes {
            let len = most.min(bytes - at);
            move_piece(at, len);
            at += len;
        }
    }

    /// Starts a put of `bytes` bytes from `src`.
    ///
    /// # Safety
    /// The source stays valid and unchanged until a local or remote flush of `pe`.
    pub(super) unsafe fn start_put(&self, dest: usize, src: *const u8, bytes: usize, pe: usize, _turn: &Turn) {
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
    pub(super) unsafe fn start_get(&self, dest: *mut u8, src: usize, bytes: usize, pe: usize, _turn: &Turn) {
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

    /// Sends a signal.
    pub(super) fn signal(&self, signal: usize, value: u64, op: SignalOp, pe: usize, turn: &Turn) {
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
        self.flush_local(pe, turn);
    }

    /// Adds to a word of `pe` and returns its value before.
    pub(super) fn fetch_add(&self, target: usize, value: u64, pe: usize, turn: &Turn) -> u64 {
        self.check_word(target);
        self.mark_pending(pe);
        let mut was = 0u64;
        // SAFETY: `check_word` has checked the word; `value` and `was` live until after the flush.
        self.abort_on_error_code("MPI_Fetch_and_op", unsafe {
            let (from, to) = ((&raw const value).cast::<c_void>(), (&raw mut was).cast::<c_void>());
            let place = target as ffi::MPI_Aint;
            ffi::MPI_Fetch_and_op(from, to, ffi::RSMPI_UINT64_T, pe as c_int, place, ffi::RSMPI_SUM, self.window)
        });
        self.flush(pe, turn);
        was
    }
}

/// The event that is missing if `pe` does not call MPI.
fn late(pe: usize) -> String {
    format!("PE {pe} to take what was sent to it")
}

fn check_model(window: ffi::MPI_Win) -> Result<(), MpiError> {
    let mut model = std::ptr::null::<c_int>();
    let mut flag = 0;
    // SAFETY: the attribute's value is the address of an int that lives as long as the window.
    let model = unsafe {
        let at = (&raw mut model).cast::<c_void>();
        check("MPI_Win_get_attr", ffi::MPI_Win_get_attr(window, aristos_mpi_win_model, at, &mut flag))?;
        (flag != 0).then(|| *model)
    };
    // SAFETY: reads a constant.
    if model != Some(unsafe { aristos_mpi_win_unified }) {
        return Err(MpiError::Unsuitable(format!(
            "{}: its windows have not the unified memory model (MPI_WIN_UNIFIED), which signals need",
            library()
        )));
    }
    Ok(())
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
