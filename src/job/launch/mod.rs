//! How the processes of a job's PEs start, find each other, and end together.
//!
//! [`Processes::run`], in the supervisor, starts N PEs on this host: the same program with [`PE_COMMAND`] for its only argument, and the
//! environment variables `ARISTOS_PE`, `ARISTOS_N_PES` and `ARISTOS_SUPERVISOR`. [`PeContext::take`], called first thing in
//! such a process, finds out which PE it is, and what the job asks of it.
//!
//! Supervisor and PE talk over a Unix socket pair that is the PE's standard input until `take` takes it. So
//! each PE holds its own socket and no other, whatever else the program starts meanwhile, and the end of a process is the
//! end of its stream. Files (the request, the symmetric heaps, the inputs, the status page) are memfds or ordinary files passed over
//! it: nothing has a name in `/dev/shm` or `/tmp`, so nothing can be left there.
//!
//! # How a job ends
//! - Every PE said [`PeContext::done`] and exited with code 0: `Ok`.
//! - A PE died without that, failed, or broke the protocol; the time limit passed; SIGINT, SIGTERM or SIGHUP came: the
//!   other PEs get SIGKILL at once, all are reaped, and the [`LaunchError`] is one line that names the PE and its phase.
//!   A PE that notices a peer's death may report before the death itself is seen; so a report is held for 250 ms, and a
//!   death in that time is named instead.
//! - A PE died of a job whose other PEs are to go on ([`Separable`]): they do, see `survivors.rs`.
//! - The supervisor died, by `kill -9` too: the kernel kills the PEs (`PR_SET_PDEATHSIG`).
//!
//! Each PE is in a process group of its own: a terminal's Ctrl-C reaches the supervisor alone.
//!
//! # Processes that a launcher started
//! Where `srun`, `mpirun` or `torchrun` started several processes on this host, [`enter`] makes rank 0 the supervisor, and each
//! process the parent of one PE: see `rendezvous.rs`. All of the above holds, and the end of such a process ends the job.

mod child;
mod environment;
mod fleet;
#[cfg(all(test, feature = "command"))]
mod fuzz;
mod keeper;
mod life;
pub mod mpirun;
mod pe;
mod rendezvous;
mod role;
mod signals;
mod status;
mod supervisor;
mod survivors;

use std::io;
use std::time::Duration;

pub use keeper::Keeper;
pub use pe::PeContext;
pub use rendezvous::{conclude, settled_pes};
#[cfg(feature = "ofi")]
pub use role::ofi_provider;
pub use role::{LaunchedPlace, Role, enter, job_token, join_limit, launched_place, on_several_hosts};
pub use status::{PeStatus, StatusPage, StatusView};
pub use supervisor::{Event, Processes};
pub use survivors::{GoOn, Separable};

/// Raised with every change to what the processes of a job send each other: the frames on their sockets, and the request.
pub const VERSION: u32 = 5;
/// The argument with which a program starts itself again as a PE.
pub const PE_COMMAND: &str = "pe";

/// Most PEs a job may have.
pub const MAX_PES: usize = 1024;

/// The PE's number.
const ENV_PE: &str = "ARISTOS_PE";
/// The number of PEs.
const ENV_N_PES: &str = "ARISTOS_N_PES";
/// The process id of its parent: the supervisor, or a launched process that keeps it.
const ENV_SUPERVISOR: &str = "ARISTOS_SUPERVISOR";

/// Why a job, or a PE's part in it, ended. Each displays as one line; a field of the request is named in backticks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A job of no PEs, or of more than [`MAX_PES`].
    #[error("`pes` {pes}: the number of PEs must be 1 to {MAX_PES}")]
    Pes {
        /// What was asked.
        pes: usize,
    },
    /// The operating system refused what a job needs before any PE runs.
    #[error("cannot {what}: {source}")]
    Setup {
        /// What was refused.
        what: &'static str,
        /// The refusal.
        source: io::Error,
    },
    /// A PE's process could not be started.
    #[error("cannot start PE {pe} of {n_pes}: {source}{}", spawn_hint(.source))]
    Spawn {
        /// The PE.
        pe: usize,
        /// Number of PEs of the job.
        n_pes: usize,
        /// The refusal.
        source: io::Error,
    },
    /// A PE ended before it was done.
    #[error("PE {pe} {how} in phase {phase}")]
    Died {
        /// The PE.
        pe: usize,
        /// Its end: "was killed by signal 9 (SIGKILL)", "exited with code 3".
        how: String,
        /// The phase it was in.
        phase: String,
    },
    /// A PE reported a failure or panicked.
    #[error("PE {pe} failed in phase {phase}: {message}")]
    Failed {
        /// The PE.
        pe: usize,
        /// The phase it was in.
        phase: String,
        /// Its line.
        message: String,
    },
    /// The launched process that kept a PE ended, and the PE with it.
    #[error("PE {pe} was lost in phase {phase}: the process that its launcher started for it has ended")]
    Lost {
        /// The PE.
        pe: usize,
        /// The phase it was in.
        phase: String,
    },
    /// The processes that a launcher started do not make up this job.
    #[error("{0}")]
    World(String),
    /// The job ran longer than it may.
    #[error("time limit of {} s passed: {states}", .limit.as_secs_f64())]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Every PE's phase.
        states: String,
    },
    /// A PE did not do within [`Processes::start_limit`] what the others' start depends on.
    #[error("PE {pe} has not {what} within {} s, in phase {phase}", .limit.as_secs_f64())]
    Late {
        /// The PE.
        pe: usize,
        /// What it has not done: "connected", "given its segment", "exited".
        what: &'static str,
        /// The limit.
        limit: Duration,
        /// The phase it is in.
        phase: String,
    },
    /// A PE showed no sign of life.
    #[error(
        "PE {pe} stalled in phase {phase}: for {} s it used no processor time and moved no data; it is stopped, or its file \
         system does not answer",
        .silent.as_secs()
    )]
    Stalled {
        /// The PE.
        pe: usize,
        /// For how long.
        silent: Duration,
        /// The phase it is in.
        phase: String,
    },
    /// A signal ended the job.
    #[error("interrupted by {}", signals::name(*.signal))]
    Interrupted {
        /// Its number.
        signal: i32,
    },
    /// PEs gave segments of different sizes.
    #[error("PE {pe} has a symmetric heap of {bytes} bytes, PE {first} one of {expected}: they must be equal")]
    SegmentSize {
        /// The first PE that differs.
        pe: usize,
        /// Its size.
        bytes: u64,
        /// The first PE.
        first: usize,
        /// Its size.
        expected: u64,
    },
    /// Something other than a frame came over a control socket.
    #[error("control socket of PE {pe}: {message}")]
    Protocol {
        /// The PE at its end.
        pe: usize,
        /// What came.
        message: String,
    },
    /// In a PE: its environment is not what a supervisor makes.
    #[error("{0}")]
    Environment(String),
    /// In a PE: the supervisor has ended.
    #[error("PE {pe}: the supervisor has ended")]
    SupervisorEnded {
        /// This PE.
        pe: usize,
    },
    /// In a PE: its symmetric heap, or its view of a peer's, could not be made.
    #[error("PE {pe}: {message}")]
    Segment {
        /// This PE.
        pe: usize,
        /// The refusal.
        message: String,
    },
    /// In a PE: an operation on its socket or its memory failed.
    #[error("PE {pe} cannot {what}: {source}")]
    Pe {
        /// This PE.
        pe: usize,
        /// The operation.
        what: &'static str,
        /// The refusal.
        source: io::Error,
    },
}

impl LaunchError {
    /// The exit code that says this: 128 + signal where a signal ended the job, as shells have it, otherwise 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            LaunchError::Interrupted { signal } => (128 + signal) as u8,
            _ => 1,
        }
    }
}

/// What to look at when a process cannot be started for this reason.
fn spawn_hint(error: &io::Error) -> &'static str {
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::AGAIN) => ": the limit on processes (ulimit -u, or the cgroup's pids.max) is reached",
        Some(rustix::io::Errno::NOMEM) => ": no memory is left for it",
        Some(rustix::io::Errno::MFILE) => ": the limit on open files (ulimit -n) is reached",
        // The program is started again by the name that /proc has for it.
        Some(rustix::io::Errno::NOENT) => ": /proc is not mounted, or has no /proc/self/exe",
        _ => "",
    }
}
