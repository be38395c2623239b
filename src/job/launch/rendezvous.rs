//! Joins the processes that a launcher started on one host to a job: rank 0's side.
//!
//! Each process that `srun`, `mpirun` or `torchrun` started is the parent of one PE. The process starts the PE as its child, which inherits
//! the environment and the CPUs that the launcher has set, and reports how the PE ended. Rank 0's process is also the supervisor. So the
//! PEs, their sockets and [`Processes::run`](super::Processes::run) work in the same way as without a launcher, and one command may run
//! several jobs.
//!
//! Rank 0 listens at a Unix socket with an abstract name, so that no file is left behind. The name consists of the user id and of the
//! launcher's identifier for the job, which all processes of the job share. Each process proves that it knows the job's token
//! ([`crate::shmem::control`]), which is made of `ARISTOS_JOB_TOKEN`, if set, and of this identifier. The kernel reports the user of the
//! process at the other end of a socket; both sides refuse another user's process. Each side detects the end of the other process by the
//! end of the stream.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::environment::{LaunchedProcess, job_token};
use super::signals::Signals;
use super::{LaunchError, VERSION};
use crate::shmem::control::frame::{Inbox, Kind, send_by};
use crate::shmem::control::{Gate, Joined, Key, local};
use crate::stdio::{one_line, say};

/// Maximum time for which rank 0, after its command has ended, waits for processes that have not joined yet, to send them the exit code.
const LINGER: Duration = Duration::from_secs(5);
/// Maximum time for which a parent of a PE may take to receive a frame.
const SEND_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of connections that wait to be accepted, including those of other jobs' processes. It need not be large: if the queue is
/// full, a process of the job waits.
const BACKLOG: i32 = 128;

static JOB: OnceLock<LaunchedJob> = OnceLock::new();

/// The job of which this process is rank 0.
struct LaunchedJob {
    size: usize,
    launcher: &'static str,
    rendezvous: Mutex<Rendezvous>,
}

/// Opens the rendezvous socket, as rank 0 of the processes that a launcher started. Call it once per process.
pub(super) fn open(process: LaunchedProcess, limit: Duration) -> Result<(), LaunchError> {
    let (size, launcher) = (process.size, process.launcher);
    let rendezvous = Mutex::new(Rendezvous::open(process, limit)?);
    let taken = |_| LaunchError::Environment("this process has joined the job already".to_string());
    JOB.set(LaunchedJob { size, launcher, rendezvous }).map_err(taken)
}

/// If this process is rank 0 of launched processes: the number of PEs, which is that of the processes.
pub fn settled_pes() -> Option<usize> {
    JOB.get().map(|job| job.size)
}

/// Sends the exit code of this process, if it is rank 0, to the other processes, which exit with the same code.
pub fn conclude(code: u8) {
    let Some(job) = JOB.get() else { return };
    let mut rendezvous = job.rendezvous.lock().unwrap_or_else(PoisonError::into_inner);
    if !rendezvous.given_up {
        // A process that joins now gets the exit code at once. Missing processes are awaited only for a short time.
        rendezvous.limit = rendezvous.limit.min(LINGER);
        let _ = rendezvous.gather(None);
    }
    let until = Instant::now() + SEND_LIMIT;
    let joined = rendezvous.gate.iter().flat_map(Gate::joined).flatten().map(|one| &one.socket);
    for socket in joined.chain(rendezvous.parents.iter().flatten().map(|parent| &parent.socket)) {
        let _ = send_by(socket.as_fd(), Kind::Verdict, &[code], &[], until);
    }
}

/// Waits until all parents of the job's PEs have joined, and returns them. `None` if no launcher started this process.
pub(super) fn gather(pes: usize, signals: &Signals) -> Result<Option<MutexGuard<'static, Rendezvous>>, LaunchError> {
    let Some(job) = JOB.get() else { return Ok(None) };
    if pes != job.size {
        let LaunchedJob { size, launcher, .. } = job;
        return Err(LaunchError::World(format!(
            "this is a job of {pes} PEs, but {launcher} started {size} processes, each of which is a PE: make `pes`, or the \
             processes, agree"
        )));
    }
    let mut rendezvous = job.rendezvous.lock().unwrap_or_else(PoisonError::into_inner);
    rendezvous.gather(Some(signals))?;
    Ok(Some(rendezvous))
}

/// Rank 0's connection to the parent of a PE.
pub(super) struct ParentLink {
    pub(super) socket: OwnedFd,
    pub(super) inbox: Inbox,
}

impl ParentLink {
    /// Sends a frame to the parent.
    pub(super) fn send(&self, kind: Kind, body: &[u8], files: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Errno> {
        send_by(self.socket.as_fd(), kind, body, files, Instant::now() + SEND_LIMIT)
    }
}

/// Rank 0's side of the rendezvous.
pub(super) struct Rendezvous {
    process: LaunchedProcess,
    limit: Duration,
    /// Accepts processes. `None` once all have joined.
    gate: Option<Gate>,
    /// The parents by rank, once all have joined. `None` for rank 0, since this process is the parent of PE 0.
    pub(super) parents: Vec<Option<ParentLink>>,
    /// Number of refusals that have been printed.
    shown: usize,
    given_up: bool,
}

/// The key and the program description, which must be equal in all processes of the job.
pub(super) fn identity(process: &LaunchedProcess) -> (Key, String) {
    let key = Key::new(format!("{}\0{}", job_token(), process.job).as_bytes());
    (key, format!("aristos {} (protocol {VERSION})", env!("CARGO_PKG_VERSION")))
}

/// The name of the rendezvous socket, without its leading zero byte. The name may be truncated; jobs with equal truncated names still
/// differ in their keys, which include the whole name.
pub(super) fn name(process: &LaunchedProcess) -> Vec<u8> {
    const MAX_BYTES: usize = 100;
    let mut name = format!("aristos-{}-{}", rustix::process::geteuid().as_raw(), process.job).into_bytes();
    name.truncate(MAX_BYTES);
    name
}

impl Rendezvous {
    fn open(process: LaunchedProcess, limit: Duration) -> Result<Rendezvous, LaunchError> {
        let name = name(&process);
        let listener = local::listen(&name, BACKLOG).map_err(|error| match error {
            Errno::ADDRINUSE => {
                let (name, launcher) = (String::from_utf8_lossy(&name).into_owned(), process.launcher);
                let cure = match launcher {
                    "torchrun" => "choose another --master-port",
                    _ => "wait for it to end",
                };
                LaunchError::World(one_line(&format!(
                    "the job's rendezvous socket (abstract name {name}) is taken: another job has the same id from {launcher}; {cure}"
                )))
            }
            source => LaunchError::Setup { what: "open the job's rendezvous socket", source: source.into() },
        })?;
        let (key, program) = identity(&process);
        let gate = Gate::new(vec![listener], key, &program, process.size, 1..process.size, |_| Ok(()));
        Ok(Rendezvous { process, limit, gate: Some(gate), parents: Vec::new(), shown: 0, given_up: false })
    }

    /// Waits until all processes have joined.
    fn gather(&mut self, signals: Option<&Signals>) -> Result<(), LaunchError> {
        let until = Instant::now() + self.limit;
        while let Some(gate) = &mut self.gate {
            let missing = gate.missing();
            if missing.is_empty() {
                let joined = self.gate.take().map(Gate::close).unwrap_or_default();
                let link = |one: Joined| ParentLink { socket: one.socket, inbox: one.inbox };
                self.parents = joined.into_iter().map(|one| one.map(link)).collect();
                break;
            }
            if let Some(signal) = signals.and_then(Signals::caught) {
                self.given_up = true;
                return Err(LaunchError::Interrupted { signal });
            }
            let now = Instant::now();
            if now >= until {
                self.given_up = true;
                return Err(LaunchError::World(self.describe_missing(&missing)));
            }
            let pipe = signals.map(Signals::pipe);
            let mut fds: Vec<PollFd<'_>> = gate.sockets().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            fds.extend(pipe.iter().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
            let wait = (until - now).min(Duration::from_millis(100));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as _ }));
            if let Some(signals) = signals {
                signals.clear();
            }
            let accepted = gate.advance();
            for line in &gate.refusals()[self.shown..] {
                say(&format!("aristos: {}", one_line(line)));
            }
            self.shown = gate.refusals().len();
            if let Err(error) = accepted {
                self.given_up = true;
                let what = "accept a process of the job (the limit on open files, ulimit -n, is reached)";
                return Err(LaunchError::Setup { what, source: error.into() });
            }
            if let Some(rank) = gate.ended() {
                self.given_up = true;
                let size = self.process.size;
                return Err(LaunchError::World(format!("rank {rank} of {size} has ended before all had come")));
            }
        }
        Ok(())
    }

    fn describe_missing(&self, missing: &[usize]) -> String {
        const SHOWN: usize = 16;
        let LaunchedProcess { launcher, size, .. } = self.process;
        let mut ranks = missing.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
        if missing.len() > SHOWN {
            ranks += &format!(" and {} more", missing.len() - SHOWN);
        }
        let (noun, have) = if missing.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
        if !self.process.one_host {
            return format!(
                "{launcher} started {size} processes on several hosts, and {noun} {ranks} {have} not come on this one: shared \
                 memory joins the PEs of one host; use `transport` tcp or `transport` mpi (a build with the feature mpi)"
            );
        }
        let last = self.gate.as_ref().and_then(|gate| gate.refusals().last());
        let refused = last.map_or_else(String::new, |line| format!("; {}", one_line(line)));
        let seconds = self.limit.as_secs_f64();
        format!("{noun} {ranks} of {size} {have} not come within {seconds} s, as {launcher} started them{refused}")
    }
}
