//! The processes that `mpirun` started, as a world of PEs: start, end, agreement, and messages.
//!
//! Functions do not block inside MPI to wait for a peer: they start a non-blocking operation and test it until a deadline.
//! Exceptions are initialisation, finalisation and creating a window, which MPI provides only as blocking calls.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::{AsRaw, CommunicatorCollectives};

/// Tag of messages.
const MESSAGE_TAG: c_int = 1;
/// A tag that no message uses.
const UNUSED_TAG: c_int = 2;

/// Locked during every call of MPI, because the level MPI_THREAD_SERIALIZED allows one call at a time in a process.
static MPI: Mutex<()> = Mutex::new(());

/// The right to call MPI.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "unlocks when it is dropped")] MutexGuard<'static, ()>);

impl Turn {
    /// Waits until no other thread calls MPI.
    pub(super) fn wait() -> Turn {
        Turn(MPI.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `None` if another thread calls MPI.
    pub(super) fn now() -> Option<Turn> {
        match MPI.try_lock() {
            Ok(guard) => Some(Turn(guard)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Turn(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The communicator of all PEs, with the right to call MPI. A thread that holds it must not use the transport. Before a blocking call,
/// the transport's `quiet` must have returned: messages between hosts make no progress meanwhile.
pub struct Comm<'w> {
    comm: &'w SimpleCommunicator,
    _turn: Turn,
}

impl std::fmt::Debug for Comm<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Comm").field(&self.comm.rank()).finish()
    }
}

impl Deref for Comm<'_> {
    type Target = SimpleCommunicator;

    fn deref(&self) -> &SimpleCommunicator {
        self.comm
    }
}

/// An error of MPI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// A call returned an error.
    #[error("{call}: {message}")]
    Call {
        /// The MPI function.
        call: &'static str,
        /// MPI's text for the error code.
        message: String,
    },
    /// The MPI library, or the way in which the program was started, is unsuitable.
    #[error("{0}")]
    Unsuitable(String),
    /// A peer was missing after a limit.
    #[error("waited {} s for {what}", .limit.as_secs_f64())]
    Late {
        /// The missing event.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
}

/// Initialised MPI with a communicator over all of its processes; ranks are PE numbers.
///
/// Dropping it finalises MPI, which waits for all processes. During a panic it aborts instead, because the other processes
/// would wait for this one.
pub struct MpiWorld {
    comm: SimpleCommunicator,
    /// `None` for a world created by [`MpiWorld::first`].
    _universe: Option<Universe>,
    rank: usize,
    size: usize,
    /// The PEs on this host, including this one.
    on_host: Vec<usize>,
    oversubscribed: bool,
    /// Whether several threads may call MPI, one at a time.
    serialized: bool,
    abandoned: Cell<bool>,
}

impl MpiWorld {
    /// Initialises MPI. A program started without `mpirun` is a world of one PE. Must be called once per process, by its main
    /// thread, which must also make all later calls.
    ///
    /// Asks for MPI_THREAD_SERIALIZED, with which messages to other hosts make progress while this PE computes.
    ///
    /// # Errors
    /// [`MpiError::Unsuitable`] if MPI is initialised already, is older than 3.0, or lacks MPI_THREAD_FUNNELED.
    pub fn init() -> Result<Self, MpiError> {
        let unsuitable = |what: String| Err(MpiError::Unsuitable(what));
        let Some((universe, level)) = mpi::initialize_with_threading(Threading::Serialized) else {
            return unsuitable("MPI is initialised already in this process".into());
        };
        let library = library();
        if level < Threading::Funneled {
            return unsuitable(format!(
                "{library} gives thread level {level:?}, at least MPI_THREAD_FUNNELED is needed"
            ));
        }
        let (version, subversion) = mpi::environment::version();
        if version < 3 {
            return unsuitable(format!("{library} is MPI {version}.{subversion}, at least 3.0 is needed"));
        }
        // From here on errors are returned instead of ending the process.
        returns_errors(universe.world().as_raw())?;
        Self::over(universe.world().duplicate(), Some(universe), level >= Threading::Serialized)
    }

    fn over(comm: SimpleCommunicator, universe: Option<Universe>, serialized: bool) -> Result<Self, MpiError> {
        returns_errors(comm.as_raw())?;
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let host = comm.split_shared(comm.rank());
        let mut on_host = vec![0u64; host.size() as usize];
        host.all_gather_into(&(rank as u64), &mut on_host[..]);
        let on_host: Vec<usize> = on_host.into_iter().map(|pe| pe as usize).collect();
        // A launcher may bind each process to different CPUs, so count the union over the host.
        let mine = own_cpus();
        let mut all = mine;
        // SAFETY: both arrays have `mine.len()` words, and the call is blocking.
        check("MPI_Allreduce", unsafe {
            ffi::MPI_Allreduce(
                mine.as_ptr().cast::<c_void>(),
                all.as_mut_ptr().cast::<c_void>(),
                mine.len() as c_int,
                ffi::RSMPI_UINT64_T,
                ffi::RSMPI_BOR,
                host.as_raw(),
            )
        })?;
        let cpus: u32 = all.iter().map(|word| word.count_ones()).sum();
        let oversubscribed = on_host.len() > cpus as usize;
        let abandoned = Cell::new(false);
        Ok(Self { comm, _universe: universe, rank, size, on_host, oversubscribed, serialized, abandoned })
    }

    /// A world of the first `size` PEs; `None` on the other PEs (collective).
    ///
    /// # Errors
    /// [`MpiError::Call`] if MPI fails.
    pub fn first(&self, size: usize) -> Result<Option<MpiWorld>, MpiError> {
        let color = mpi::topology::Color::with_value(c_int::from(self.rank < size));
        let _turn = Turn::wait();
        let comm = self.comm.split_by_color(color);
        match comm {
            Some(comm) if self.rank < size => Self::over(comm, None, self.serialized).map(Some),
            _ => Ok(None),
        }
    }

    /// This PE's number.
    pub fn my_pe(&self) -> usize {
        self.rank
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.size
    }

    /// Number of PEs on this host, including this one.
    pub fn pes_on_host(&self) -> usize {
        self.on_host.len()
    }

    /// Per PE: whether it is on this host.
    pub(super) fn is_on_host(&self) -> Vec<bool> {
        (0..self.size).map(|pe| self.on_host.contains(&pe)).collect()
    }

    /// Whether several threads may call MPI, one at a time.
    pub(super) fn is_serialized(&self) -> bool {
        self.serialized
    }

    /// The communicator of all PEs.
    pub fn comm(&self) -> Comm<'_> {
        Comm { comm: &self.comm, _turn: Turn::wait() }
    }

    /// The pause between two polls of a wait.
    pub(super) fn pause(&self) -> Pause {
        Pause { oversubscribed: self.oversubscribed, polls: 0, since: None, sleep: SLEEP_MIN }
    }

    /// The minimum of all PEs' values (collective). Values must be below 2^63, because MPICH 4.0.2 treats larger ones as
    /// negative.
    ///
    /// # Errors
    /// [`MpiError::Call`] if MPI fails, [`MpiError::Late`] if a PE is missing after `limit`. After an error only
    /// [`MpiWorld::abort`] may follow.
    pub fn min(&self, value: u64, limit: Duration) -> Result<u64, MpiError> {
        debug_assert!(value < 1 << 63);
        // On the heap, so that the vector can be moved while MPI writes to its buffer.
        let mut words = vec![value, 0];
        let at = words.as_mut_ptr();
        let mut request = MpiRequest::new();
        let turn = Turn::wait();
        // SAFETY: both words live until the operation has completed; otherwise `finish` leaks them.
        check("MPI_Iallreduce", unsafe {
            ffi::MPI_Iallreduce(
                at.cast::<c_void>(),
                at.add(1).cast::<c_void>(),
                1,
                ffi::RSMPI_UINT64_T,
                ffi::RSMPI_MIN,
                self.comm.as_raw(),
                &mut request.0,
            )
        })?;
        drop(turn);
        self.finish(request, words, "all PEs", limit).map(|words| words[1])
    }

    /// Waits for all PEs.
    ///
    /// # Errors
    /// As for [`MpiWorld::min`].
    pub fn barrier(&self, limit: Duration) -> Result<(), MpiError> {
        self.min(0, limit).map(drop)
    }

    /// Sends a message; messages to one PE arrive in order.
    ///
    /// # Errors
    /// [`MpiError::Call`] if MPI fails, [`MpiError::Late`] if `to` has not received it after `limit`.
    ///
    /// # Panics
    /// If the message has 2 GiB or more.
    pub fn send(&self, to: usize, message: Vec<u8>, limit: Duration) -> Result<(), MpiError> {
        let len = c_int::try_from(message.len()).expect("a message has less than 2 GiB");
        let mut request = MpiRequest::new();
        let turn = Turn::wait();
        // SAFETY: the message lives until it has been sent; otherwise `finish` leaks it.
        check("MPI_Isend", unsafe {
            ffi::MPI_Isend(
                message.as_ptr().cast::<c_void>(),
                len,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                MESSAGE_TAG,
                self.comm.as_raw(),
                &mut request.0,
            )
        })?;
        drop(turn);
        self.finish(request, message, "a message to be taken", limit).map(drop)
    }

    /// Receives the next message of any PE. Returns `None` if no message arrives within `limit`; without a limit it waits
    /// forever.
    ///
    /// # Errors
    /// [`MpiError::Call`] if MPI fails, [`MpiError::Late`] if a message is incomplete after a minute.
    pub fn receive(&self, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        const REST: Duration = Duration::from_secs(60);
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut pause = self.pause();
        let (mut flag, mut len) = (0, 0);
        // SAFETY: a status consists of integers, so all-zero bytes are valid.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: reads a constant.
        let mut matched = unsafe { ffi::RSMPI_MESSAGE_NULL };
        let turn = loop {
            let turn = Turn::wait();
            // SAFETY: MPI writes only to the three locals.
            check("MPI_Improbe", unsafe {
                let comm = self.comm.as_raw();
                ffi::MPI_Improbe(ffi::RSMPI_ANY_SOURCE, MESSAGE_TAG, comm, &mut flag, &mut matched, &mut status)
            })?;
            if flag != 0 {
                break turn;
            }
            drop(turn);
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(None);
            }
            pause.step();
        };
        // SAFETY: the status belongs to the matched message.
        check("MPI_Get_count", unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len) })?;
        let mut bytes = vec![0u8; len as usize];
        let mut request = MpiRequest::new();
        // SAFETY: the buffer has the message's length and lives until the message is complete; otherwise `finish` leaks it.
        check("MPI_Imrecv", unsafe {
            let at = bytes.as_mut_ptr().cast::<c_void>();
            ffi::MPI_Imrecv(at, len, ffi::RSMPI_UINT8_T, &mut matched, &mut request.0)
        })?;
        drop(turn);
        let bytes = self.finish(request, bytes, "the rest of a message", REST)?;
        Ok(Some((status.MPI_SOURCE as usize, bytes)))
    }

    /// Waits for an operation on `buffer`. If it does not complete, the buffer is leaked, because MPI still uses it.
    fn finish<B>(
        &self,
        mut request: MpiRequest,
        buffer: B,
        what: &'static str,
        limit: Duration,
    ) -> Result<B, MpiError> {
        let start = Instant::now();
        let mut pause = self.pause();
        loop {
            let ended = request.test(&Turn::wait());
            if ended == Ok(true) {
                return Ok(buffer);
            }
            if ended.is_err() || start.elapsed() >= limit {
                std::mem::forget(buffer);
                self.abandoned.set(true);
                return ended.and(Err(MpiError::Late { what, limit }));
            }
            pause.step();
        }
    }

    /// Ends all processes of the world including this one; `mpirun` exits with `code` and prints its own message.
    pub fn abort(&self, code: i32) -> ! {
        // Not for ever: the other thread may hang in MPI.
        let until = Instant::now() + Duration::from_secs(1);
        let mut turn = Turn::now();
        while turn.is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            turn = Turn::now();
        }
        // SAFETY: MPI is initialised.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
        std::process::exit(code)
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        // Finalising MPI with a pending operation is forbidden and would hang without the other PEs.
        if std::thread::panicking() || self.abandoned.get() {
            self.abort(1);
        }
    }
}

impl std::fmt::Debug for MpiWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MpiWorld").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

/// A pending non-blocking operation.
#[derive(Debug)]
pub(super) struct MpiRequest(pub(super) ffi::MPI_Request);

// SAFETY: a handle, which any thread may use that has the turn.
unsafe impl Send for MpiRequest {}

impl MpiRequest {
    pub(super) fn new() -> MpiRequest {
        // SAFETY: reads a constant.
        MpiRequest(unsafe { ffi::RSMPI_REQUEST_NULL })
    }

    /// Whether the operation has completed. The request must not be used afterwards.
    pub(super) fn test(&mut self, _turn: &Turn) -> Result<bool, MpiError> {
        let mut flag = 0;
        // SAFETY: the request was created by MPI and is not used after its completion.
        let code = unsafe { ffi::MPI_Test(&mut self.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Test", code).map(|()| flag != 0)
    }
}

/// Lets MPI progress pending operations.
pub(super) fn progress(comm: ffi::MPI_Comm, _turn: &Turn) -> Result<(), MpiError> {
    let mut flag = 0;
    // SAFETY: the communicator is valid; MPI writes only `flag`.
    check("MPI_Iprobe", unsafe {
        ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, UNUSED_TAG, comm, &mut flag, ffi::RSMPI_STATUS_IGNORE)
    })
}

/// Name and version of the MPI library at run time, on one line.
pub fn library() -> String {
    let text = mpi::environment::library_version().unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // Examples: "Open MPI v4.1.4, package: Debian OpenMPI, ident: ..."; "MPICH Version:\t4.0.2".
    line.split(", package").next().unwrap_or(line).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Converts a call's code to a result.
pub(super) fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { Err(error(call, code)) }
}

#[cold]
fn error(call: &'static str, code: c_int) -> MpiError {
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer holds MPI_MAX_ERROR_STRING bytes and a NUL.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let message = match known == ffi::MPI_SUCCESS as c_int {
        true => String::from_utf8_lossy(&text[..len as usize]).split_whitespace().collect::<Vec<_>>().join(" "),
        false => format!("error code {code}"),
    };
    MpiError::Call { call, message }
}

fn returns_errors(comm: ffi::MPI_Comm) -> Result<(), MpiError> {
    // SAFETY: the communicator was created by MPI.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) })
}

/// Bit mask of the CPUs that this process may run on.
fn own_cpus() -> [u64; 16] {
    let mut words = [0u64; 16];
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        let cpus = rustix::thread::CpuSet::MAX_CPU.min(64 * words.len());
        (0..cpus).filter(|&cpu| set.is_set(cpu)).for_each(|cpu| words[cpu / 64] |= 1 << (cpu % 64));
    }
    words
}

const SLEEP_MIN: Duration = Duration::from_micros(20);
const SLEEP_MAX: Duration = Duration::from_micros(500);
/// Time for which a wait yields the CPU before it sleeps. With enough CPUs a wait practically never sleeps, like MPI's own
/// waits: while a PE sleeps, puts to it that MPI sends as messages do not progress.
const YIELD_TIME: Duration = Duration::from_secs(1);
const YIELD_TIME_OVERSUBSCRIBED: Duration = Duration::from_micros(50);

/// Pauses between the polls of a wait. Memory may be written by the network without a wake-up, so a wait spins first (without
/// PAUSE, see `shm.rs`), then yields the CPU, then sleeps, always for less than it has already waited. With more PEs than CPUs
/// it yields and sleeps sooner, because the awaited PE may need this CPU.
pub(super) struct Pause {
    oversubscribed: bool,
    polls: u32,
    since: Option<Instant>,
    sleep: Duration,
}

impl Pause {
    /// Number of polls.
    pub(super) fn polls(&self) -> u32 {
        self.polls
    }

    /// Whether polls still follow each other without a pause.
    pub(super) fn spins(&self) -> bool {
        self.polls < if self.oversubscribed { 50 } else { 2000 }
    }

    /// Pauses once.
    pub(super) fn step(&mut self) {
        let spins = self.spins();
        self.polls = self.polls.saturating_add(1);
        if spins {
            return;
        }
        let yield_time = if self.oversubscribed { YIELD_TIME_OVERSUBSCRIBED } else { YIELD_TIME };
        if self.since.get_or_insert_with(Instant::now).elapsed() < yield_time {
            rustix::thread::sched_yield();
        } else {
            std::thread::sleep(self.sleep);
            self.sleep = (2 * self.sleep).min(SLEEP_MAX);
        }
    }
}
