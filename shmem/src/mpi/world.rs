//! The processes that `mpirun` started, as a world of PEs: start, end, agreement, messages to PE 0.
//!
//! Nothing here blocks inside MPI for a peer's sake: what waits for a peer starts a non-blocking operation, and asks after
//! it until its deadline. The exceptions are the start, the end, and making a window, which MPI has in no other form.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::AsRaw;

/// The tag of messages.
const MESSAGE: c_int = 1;
/// A tag that no message has.
const NOTHING: c_int = 2;

/// What MPI refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// A call returned an error.
    #[error("{call}: {message}")]
    Call {
        /// The call.
        call: &'static str,
        /// What MPI says of its error code.
        message: String,
    },
    /// This MPI, or the way the program was started, does not do.
    #[error("{0}")]
    Unfit(String),
    /// A peer did not come in time.
    #[error("waited {} s for {what}", .limit.as_secs_f64())]
    Late {
        /// What did not come.
        what: &'static str,
        /// How long.
        limit: Duration,
    },
}

/// MPI, initialised, and a communicator of our own over all of its processes, whose rank is the PE's number.
///
/// Dropping it finalises MPI, which waits for all processes to do so, and during a panic aborts it instead: a process that
/// unwinds must not wait for the others, who would wait for it.
pub struct MpiWorld {
    comm: SimpleCommunicator,
    /// `None` in a world within a world.
    _universe: Option<Universe>,
    rank: usize,
    size: usize,
    on_host: usize,
    crowded: bool,
    given_up: Cell<bool>,
}

impl MpiWorld {
    /// Initialises MPI; a program started without `mpirun` is a world of one. Once in a process, by its main thread, to
    /// which all of it then belongs.
    ///
    /// # Errors
    /// When this MPI lacks what is needed.
    pub fn init() -> Result<Self, MpiError> {
        let unfit = |what: String| Err(MpiError::Unfit(what));
        let Some((universe, level)) = mpi::initialize_with_threading(Threading::Funneled) else {
            return unfit("MPI is initialised already in this process".into());
        };
        let library = library();
        if level < Threading::Funneled {
            return unfit(format!("{library} gives thread level {level:?}, at least MPI_THREAD_FUNNELED is needed"));
        }
        let (version, subversion) = mpi::environment::version();
        if version < 3 {
            return unfit(format!("{library} is MPI {version}.{subversion}, at least 3.0 is needed"));
        }
        // From here on an error is a code and not the end of the process.
        returns_errors(universe.world().as_raw())?;
        Self::over(universe.world().duplicate(), Some(universe))
    }

    fn over(comm: SimpleCommunicator, universe: Option<Universe>) -> Result<Self, MpiError> {
        returns_errors(comm.as_raw())?;
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let host = comm.split_shared(comm.rank());
        let on_host = host.size() as usize;
        // A launcher that binds processes leaves each of them a part of the CPUs: only together do they tell.
        let mine = own_cpus();
        let mut all = mine;
        // SAFETY: both arrays have as many words as is said, and the call returns when it is done with them.
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
        let crowded = on_host > cpus as usize;
        Ok(Self { comm, _universe: universe, rank, size, on_host, crowded, given_up: Cell::new(false) })
    }

    /// A world of the first `size` PEs of this one; `None` in the others. Collective.
    ///
    /// # Errors
    /// What MPI says.
    pub fn first(&self, size: usize) -> Result<Option<MpiWorld>, MpiError> {
        let color = mpi::topology::Color::with_value(c_int::from(self.rank < size));
        let comm = self.comm.split_by_color(color);
        match comm {
            Some(comm) if self.rank < size => Self::over(comm, None).map(Some),
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

    /// How many of the PEs run on this host, this one included.
    pub fn pes_on_host(&self) -> usize {
        self.on_host
    }

    /// Our communicator.
    pub fn comm(&self) -> &SimpleCommunicator {
        &self.comm
    }

    /// Has MPI move what is under way.
    pub(super) fn progress(&self) -> Result<(), MpiError> {
        let mut flag = 0;
        // SAFETY: the communicator lives as long as `self`, and the flag is ours.
        check("MPI_Iprobe", unsafe {
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, NOTHING, self.comm.as_raw(), &mut flag, ffi::RSMPI_STATUS_IGNORE)
        })
    }

    /// How a wait spends the time between its looks.
    pub(super) fn pause(&self) -> Pause {
        Pause { crowded: self.crowded, looks: 0, since: None, sleep: SLEEP_MIN }
    }

    /// The smallest of all PEs' numbers, which are below 2^63: MPICH 4.0.2 takes larger ones for negative. Collective.
    ///
    /// # Errors
    /// What MPI says; or not all PEs came within `limit`, after which there is nothing left but [`MpiWorld::abort`].
    pub fn min(&self, value: u64, limit: Duration) -> Result<u64, MpiError> {
        debug_assert!(value < 1 << 63);
        // Behind a pointer of its own, so that it may move while MPI writes to it.
        let mut words = vec![value, 0];
        let at = words.as_mut_ptr();
        let mut request = MpiRequest::new();
        // SAFETY: the two words live until the operation is done: `finish` leaks them if it is not.
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
        self.finish(request, words, "all PEs", limit).map(|words| words[1])
    }

    /// Waits for all PEs to come here.
    ///
    /// # Errors
    /// As [`MpiWorld::min`].
    pub fn barrier(&self, limit: Duration) -> Result<(), MpiError> {
        self.min(0, limit).map(drop)
    }

    /// Sends a message of less than 2 GiB; messages to one PE arrive in order.
    ///
    /// # Errors
    /// What MPI says; or `to` has not taken it within `limit`.
    ///
    /// # Panics
    /// If the message is longer.
    pub fn send(&self, to: usize, message: Vec<u8>, limit: Duration) -> Result<(), MpiError> {
        let len = c_int::try_from(message.len()).expect("a message has less than 2 GiB");
        let mut request = MpiRequest::new();
        // SAFETY: the message lives until it is sent: `finish` leaks it if it is not.
        check("MPI_Isend", unsafe {
            ffi::MPI_Isend(
                message.as_ptr().cast::<c_void>(),
                len,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                MESSAGE,
                self.comm.as_raw(),
                &mut request.0,
            )
        })?;
        self.finish(request, message, "a message to be taken", limit).map(drop)
    }

    /// Receives the next message of any PE; `None` when none has come within `limit`, or ever where that is `None`.
    ///
    /// # Errors
    /// What MPI says; or a message that has begun to arrive does not end within a minute.
    pub fn receive(&self, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        const REST: Duration = Duration::from_secs(60);
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut pause = self.pause();
        let (mut flag, mut len) = (0, 0);
        // SAFETY: a status is plain numbers.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: the null message is a constant.
        let mut matched = unsafe { ffi::RSMPI_MESSAGE_NULL };
        loop {
            // SAFETY: all that is pointed to is ours.
            check("MPI_Improbe", unsafe {
                let comm = self.comm.as_raw();
                ffi::MPI_Improbe(ffi::RSMPI_ANY_SOURCE, MESSAGE, comm, &mut flag, &mut matched, &mut status)
            })?;
            if flag != 0 {
                break;
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(None);
            }
            pause.step();
        }
        // SAFETY: the status is that of the message found.
        check("MPI_Get_count", unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len) })?;
        let mut bytes = vec![0u8; len as usize];
        let mut request = MpiRequest::new();
        // SAFETY: the buffer has as many bytes as the message, and lives until it is there: `finish` leaks it if it is not.
        check("MPI_Imrecv", unsafe {
            let at = bytes.as_mut_ptr().cast::<c_void>();
            ffi::MPI_Imrecv(at, len, ffi::RSMPI_UINT8_T, &mut matched, &mut request.0)
        })?;
        let bytes = self.finish(request, bytes, "the rest of a message", REST)?;
        Ok(Some((status.MPI_SOURCE as usize, bytes)))
    }

    /// Waits for an operation on `buffer`, which MPI goes on using if it does not end.
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
            let mut flag = 0;
            // SAFETY: the request is one that MPI gave, and is not used after it has ended.
            let code = unsafe { ffi::MPI_Test(&mut request.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
            let ended = check("MPI_Test", code);
            if ended.is_ok() && flag != 0 {
                return Ok(buffer);
            }
            if ended.is_err() || start.elapsed() >= limit {
                std::mem::forget(buffer);
                self.given_up.set(true);
                return ended.and(Err(MpiError::Late { what, limit }));
            }
            pause.step();
        }
    }

    /// Ends all processes of the world, this one included; `mpirun`'s exit code is `code`, and it says what it likes.
    pub fn abort(&self, code: i32) -> ! {
        // SAFETY: MPI is initialised.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
        std::process::exit(code)
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        // To finalise with an operation under way is not allowed, and without the others there is no end to it.
        if std::thread::panicking() || self.given_up.get() {
            self.abort(1);
        }
    }
}

impl std::fmt::Debug for MpiWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MpiWorld").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

/// A non-blocking operation.
struct MpiRequest(ffi::MPI_Request);

impl MpiRequest {
    fn new() -> MpiRequest {
        // SAFETY: the null request is a constant.
        MpiRequest(unsafe { ffi::RSMPI_REQUEST_NULL })
    }
}

/// The name and version of the MPI that this program runs with, one line.
pub fn library() -> String {
    let text = mpi::environment::library_version().unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // "Open MPI v4.1.4, package: Debian OpenMPI, ident: ..."; "MPICH Version:\t4.0.2".
    line.split(", package").next().unwrap_or(line).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The error that a call's code is.
pub(super) fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { Err(error(call, code)) }
}

#[cold]
fn error(call: &'static str, code: c_int) -> MpiError {
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer is longer than the longest text.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let message = match known == ffi::MPI_SUCCESS as c_int {
        true => String::from_utf8_lossy(&text[..len as usize]).split_whitespace().collect::<Vec<_>>().join(" "),
        false => format!("error code {code}"),
    };
    MpiError::Call { call, message }
}

fn returns_errors(comm: ffi::MPI_Comm) -> Result<(), MpiError> {
    // SAFETY: the communicator is one that MPI gave.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) })
}

/// The CPUs that this process may run on, a bit each.
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
/// How long a wait offers the CPU to others before it sleeps. Where there are CPUs enough it is as good as always, as with MPI's own waits:
/// while a PE sleeps, puts to it that MPI makes messages of do not move.
const PATIENCE: Duration = Duration::from_secs(1);
const PATIENCE_CROWDED: Duration = Duration::from_micros(50);

/// What a wait does between its looks: nobody rings here, as memory may be written by a network. First nothing (no PAUSE either:
/// `shm.rs` says why), then
/// the CPU is offered to others, then it sleeps, always shorter than it has waited; all sooner where there are more PEs than
/// CPUs, and the PE waited for may need this one.
pub(super) struct Pause {
    crowded: bool,
    looks: u32,
    since: Option<Instant>,
    sleep: Duration,
}

impl Pause {
    /// How many looks there have been.
    pub(super) fn looks(&self) -> u32 {
        self.looks
    }

    /// Whether looks still follow each other without a pause.
    pub(super) fn spins(&self) -> bool {
        self.looks < if self.crowded { 50 } else { 2000 }
    }

    /// Between two looks.
    pub(super) fn step(&mut self) {
        let spins = self.spins();
        self.looks = self.looks.saturating_add(1);
        if spins {
            return;
        }
        let patience = if self.crowded { PATIENCE_CROWDED } else { PATIENCE };
        if self.since.get_or_insert_with(Instant::now).elapsed() < patience {
            rustix::thread::sched_yield();
        } else {
            std::thread::sleep(self.sleep);
            self.sleep = (2 * self.sleep).min(SLEEP_MAX);
        }
    }
}
