//! Starts, connects and ends the processes of a job's PEs.
//!
//! [`Processes::run`], in the supervisor, starts N PEs on this host. A PE is a process of the same program with [`PE_COMMAND`] as its only
//! argument, and with the environment variables `ARISTOS_PE`, `ARISTOS_N_PES` and `ARISTOS_SUPERVISOR`. The process first calls
//! [`PeContext::take`], which reads its rank and its request.
//!
//! Supervisor and PE communicate over a Unix socket pair, which is the PE's standard input until `take`. So each PE has only its own
//! socket, and the socket reports the end of stream when the process ends. Files (the request, the symmetric heaps, the inputs, the status
//! page) are memfds or ordinary files that are passed over the socket. The memfds have no names in `/dev/shm` or `/tmp`, so no file can be
//! left there.
//!
//! # How a job ends
//! - Every PE called [`PeContext::done`] and exited with code 0: `Ok`.
//! - A PE died without `done`, failed, or violated the protocol; the time limit passed; or SIGINT, SIGTERM or SIGHUP arrived: the other PEs
//!   get SIGKILL at once, all are reaped, and the [`LaunchError`] is one line that names the PE and its phase. A PE may report a peer's
//!   death before the supervisor detects it. So a report is held for 250 ms, and a death within that time is reported instead.
//! - A PE died, and the job's other PEs can continue ([`FailureDomains`]): they continue, see `survivors.rs`.
//! - The supervisor died, even by `kill -9`: the kernel kills the PEs (`PR_SET_PDEATHSIG`).
//!
//! Each PE is in a process group of its own, so a terminal's Ctrl-C is sent only to the supervisor.
//!
//! # Processes that a launcher started
//! If `srun`, `mpirun` or `torchrun` started several processes on this host, [`enter`] makes rank 0 the supervisor, and each process the
//! parent of one PE: see `rendezvous.rs`. The rules above still apply. In addition, the job ends when one of these processes ends.

mod child;
mod environment;
mod fleet;
#[cfg(all(test, feature = "command"))]
mod fuzz;
mod heartbeat;
pub mod mpirun;
mod pe;
mod rank_parent;
mod rendezvous;
mod role;
mod signals;
mod status;
mod supervisor;
mod survivors;

use std::io;
use std::time::Duration;

pub use environment::job_token;
pub use pe::PeContext;
pub use rank_parent::RankParent;
pub use rendezvous::{conclude, settled_pes};
#[cfg(feature = "ofi")]
pub use role::ofi_provider;
pub use role::{LaunchedPlace, Role, enter, join_limit, launched_place, on_several_hosts};
pub use status::{PeStatus, StatusPage, StatusView};
pub use supervisor::{Event, Processes};
pub use survivors::{Continuation, FailureDomains};

/// Protocol version. Increase it with every change to the request or to the frames between the processes of a job.
pub const VERSION: u32 = 5;
/// The argument with which a program starts itself again as a PE.
pub const PE_COMMAND: &str = "pe";

/// Maximum number of PEs of a job.
pub const MAX_PES: usize = 1024;

/// Environment variable with the PE's number.
const ENV_PE: &str = "ARISTOS_PE";
/// Environment variable with the number of PEs.
const ENV_N_PES: &str = "ARISTOS_N_PES";
/// Environment variable with the process id of the PE's parent: the supervisor, or a launched process.
const ENV_SUPERVISOR: &str = "ARISTOS_SUPERVISOR";

/// Errors of a job, or of a PE's part in the job. Each displays as one line, in which fields of the request are in backticks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The number of PEs is 0 or above [`MAX_PES`].
    #[error("`pes` {pes}: the number of PEs must be 1 to {MAX_PES}")]
    Pes {
        /// The number given.
        pes: usize,
    },
    /// The operating system refused a step of the job's setup.
    #[error("cannot {what}: {source}")]
    Setup {
        /// The step.
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
        /// How it ended: "was killed by signal 9 (SIGKILL)", "exited with code 3".
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
        /// The PE's error, as one line.
        message: String,
    },
    /// The launched process that was the parent of a PE ended, and the PE ended with it.
    #[error("PE {pe} was lost in phase {phase}: the process that its launcher started for it has ended")]
    Lost {
        /// The PE.
        pe: usize,
        /// The phase it was in.
        phase: String,
    },
    /// The processes that a launcher started do not match this job.
    #[error("{0}")]
    World(String),
    /// The job exceeded its time limit.
    #[error("time limit of {} s passed: {states}", .limit.as_secs_f64())]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Every PE's phase.
        states: String,
    },
    /// A PE did not complete a step within a limit, and other PEs wait for that.
    #[error("PE {pe} has not {what} within {} s, in phase {phase}", .limit.as_secs_f64())]
    Late {
        /// The PE.
        pe: usize,
        /// The step: "connected", "given its segment", "exited".
        what: &'static str,
        /// The limit.
        limit: Duration,
        /// The phase it is in.
        phase: String,
    },
    /// A PE had no heartbeat.
    #[error(
        "PE {pe} stalled in phase {phase}: for {} s it used no processor time and moved no data; it is stopped, or its file \
         system does not answer",
        .silent.as_secs()
    )]
    Stalled {
        /// The PE.
        pe: usize,
        /// The time without a heartbeat.
        silent: Duration,
        /// The phase it is in.
        phase: String,
    },
    /// A signal ended the job.
    #[error("interrupted by {}", signals::name(*.signal))]
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// PEs sent segments of different sizes.
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
    /// A control socket received an invalid frame.
    #[error("control socket of PE {pe}: {message}")]
    Protocol {
        /// The PE at the other end of the socket.
        pe: usize,
        /// A description of the invalid frame.
        message: String,
    },
    /// In a PE or a launched process: its environment variables are missing or invalid.
    #[error("{0}")]
    Environment(String),
    /// In a PE: the supervisor has ended.
    #[error("PE {pe}: the supervisor has ended")]
    SupervisorEnded {
        /// This PE.
        pe: usize,
    },
    /// In a PE: its symmetric heap could not be created, or a peer's heap could not be mapped.
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
    /// The exit code: 128 + signal if a signal ended the job (as in shells), otherwise 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            LaunchError::Interrupted { signal } => (128 + signal) as u8,
            _ => 1,
        }
    }
}

/// A hint for the user on why a process could not be started.
fn spawn_hint(error: &io::Error) -> &'static str {
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::AGAIN) => ": the limit on processes (ulimit -u, or the cgroup's pids.max) is reached",
        Some(rustix::io::Errno::NOMEM) => ": no memory is left for it",
        Some(rustix::io::Errno::MFILE) => ": the limit on open files (ulimit -n) is reached",
        // The program is started through the link /proc/self/exe.
        Some(rustix::io::Errno::NOENT) => ": /proc is not mounted, or has no /proc/self/exe",
        _ => "",
    }
}
