//! Turns processes that a launcher started on one host into a job: rank 0's side.
//!
//! Each process that `srun`, `mpirun` or `torchrun` started keeps one PE: it starts it as its child, in the environment and
//! on the CPUs that the launcher gave, and says how it ended. Rank 0's process is the supervisor besides. So the PEs, their
//! sockets and all that [`Processes::run`](super::Processes::run) does are the same whoever starts the processes, and one command may run several jobs.
//!
//! They meet at a Unix socket with an abstract name (nothing is left in a file system), made of the user and of what the
//! launcher gives to all of its processes and to no others. The kernel tells whose process is at a socket's other end: both sides refuse
//! another user's. A process of the same user must know the job's token (`ARISTOS_JOB_TOKEN` where it is set, and what the
//! name is made of), and be of the same version. A socket that ends is a process that ended, on either side.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::environment::LaunchedProcess;
use super::hello::Hello;
use super::signals::Signals;
use super::wire::{self, Inbox, Kind};
use super::{LaunchError, address};
use crate::stdio::{one_line, say};

/// How long rank 0, once its command has ended, waits for processes that have not come yet, to tell them.
const LINGER: Duration = Duration::from_secs(5);
/// How long a process that connects may take to send its hello.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// No hello is longer, bytes.
const HELLO_BYTES: usize = 1 << 13;
/// How long a process that keeps a PE may take to receive a frame.
const SEND_LIMIT: Duration = Duration::from_secs(10);
/// Connections that wait to be accepted. Those of strangers are among them, and a process of the job waits behind all of them, or for
/// a place; few are enough, for it waits in the kernel's queue (`address::connect`).
const BACKLOG: i32 = 128;
/// Most refusals that are printed.
const SHOWN_REFUSALS: usize = 8;

static JOB: OnceLock<LaunchedJob> = OnceLock::new();

/// The job that this process is rank 0 of.
struct LaunchedJob {
    size: usize,
    launcher: &'static str,
    rendezvous: Mutex<Rendezvous>,
}

/// As rank 0 of the processes that a launcher started, opens the rendezvous socket. Once in a process.
pub(super) fn open(process: LaunchedProcess, limit: Duration) -> Result<(), LaunchError> {
    let (size, launcher) = (process.size, process.launcher);
    let rendezvous = Mutex::new(Rendezvous::open(process, limit)?);
    let taken = |_| LaunchError::Environment("this process has joined the job already".to_string());
    JOB.set(LaunchedJob { size, launcher, rendezvous }).map_err(taken)
}

/// The number of PEs, where this process is rank 0 of those that a launcher started: each keeps one.
pub fn settled_pes() -> Option<usize> {
    JOB.get().map(|job| job.size)
}

/// As rank 0, tells the other processes the exit code with which this one ends; they end with it too.
pub fn conclude(code: u8) {
    let Some(job) = JOB.get() else { return };
    let mut rendezvous = job.rendezvous.lock().unwrap_or_else(PoisonError::into_inner);
    if !rendezvous.given_up {
        // A process that comes now learns at once that the job is over, instead of waiting for one that has ended.
        rendezvous.limit = rendezvous.limit.min(LINGER);
        let _ = rendezvous.gather(None);
    }
    for kept in rendezvous.kept.iter().flatten() {
        let _ = wire::send(kept.socket.as_fd(), Kind::Verdict, &[code], &[]);
    }
}

/// The processes that keep this job's PEs, once all are there; `None` where no launcher started this one.
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

/// A process that keeps a PE, as rank 0 knows it.
pub(super) struct KeeperLink {
    pub(super) socket: OwnedFd,
    pub(super) inbox: Inbox,
}

/// A process that has connected and not yet sent its hello.
struct Pending {
    socket: OwnedFd,
    inbox: Inbox,
    pid: i32,
    since: Instant,
    bytes: usize,
}

/// Where the processes meet: rank 0's end.
pub(super) struct Rendezvous {
    process: LaunchedProcess,
    hello: Hello,
    limit: Duration,
    /// Until all have come.
    listener: Option<OwnedFd>,
    pending: Vec<Pending>,
    /// By rank; rank 0 keeps its PE itself.
    pub(super) kept: Vec<Option<KeeperLink>>,
    refusals: usize,
    last_refusal: Option<String>,
    given_up: bool,
}

impl Rendezvous {
    fn open(process: LaunchedProcess, limit: Duration) -> Result<Rendezvous, LaunchError> {
        let setup =
            |source: Errno| LaunchError::Setup { what: "open the job's rendezvous socket", source: source.into() };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(setup)?;
        let name = address::name(&process);
        let address = SocketAddrUnix::new_abstract_name(&name).map_err(setup)?;
        match rustix::net::bind(&listener, &address) {
            Err(Errno::ADDRINUSE) => {
                let (name, launcher) = (String::from_utf8_lossy(&name).into_owned(), process.launcher);
                let cure = match launcher {
                    "torchrun" => "choose another --master-port",
                    _ => "wait for it to end",
                };
                return Err(LaunchError::World(one_line(&format!(
                    "the job's rendezvous socket (abstract name {name}) is taken: another job has the same id from {launcher}; {cure}"
                ))));
            }
            bound => bound.map_err(setup)?,
        }
        rustix::net::listen(&listener, BACKLOG).map_err(setup)?;
        let kept = (0..process.size).map(|_| None).collect();
        let hello = Hello::of(&process);
        let (pending, refusals, last_refusal) = (Vec::new(), 0, None);
        Ok(Rendezvous {
            process,
            hello,
            limit,
            listener: Some(listener),
            pending,
            kept,
            refusals,
            last_refusal,
            given_up: false,
        })
    }

    fn missing(&self) -> Vec<usize> {
        (1..self.process.size).filter(|&rank| self.kept[rank].is_none()).collect()
    }

    /// Waits until all have come.
    fn gather(&mut self, signals: Option<&Signals>) -> Result<(), LaunchError> {
        let until = Instant::now() + self.limit;
        while let (Some(listener), missing) = (&self.listener, self.missing()) {
            if missing.is_empty() {
                // A process that comes later finds nobody.
                self.listener = None;
                self.pending.clear();
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
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(pipe.iter().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
            fds.extend(self.pending.iter().map(|one| PollFd::new(&one.socket, PollFlags::IN)));
            fds.extend(self.kept.iter().flatten().map(|kept| PollFd::new(&kept.socket, PollFlags::IN)));
            let wait = (until - now).min(Duration::from_millis(100));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as _ }));
            if let Some(signals) = signals {
                signals.clear();
            }
            self.accept();
            self.hear();
            self.check_kept()?;
        }
        Ok(())
    }

    /// Whether those that have come are still there. They send nothing before they are asked to start a PE.
    fn check_kept(&mut self) -> Result<(), LaunchError> {
        let size = self.process.size;
        for (rank, kept) in self.kept.iter_mut().enumerate() {
            let Some(kept) = kept else { continue };
            if !matches!(kept.inbox.fill(kept.socket.as_fd(), &mut [0; 64], RecvFlags::DONTWAIT), Err(Errno::AGAIN)) {
                self.given_up = true;
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
        let refused = self.last_refusal.as_ref().map_or_else(String::new, |line| format!("; {line}"));
        let seconds = self.limit.as_secs_f64();
        format!("{noun} {ranks} of {size} {have} not come within {seconds} s, as {launcher} started them{refused}")
    }

    /// Accepts new connections, as many as do not keep it from its other work: anybody on this host may connect, and go on to.
    fn accept(&mut self) {
        const MOST: usize = 2 * super::MAX_PES;
        const AT_ONCE: usize = 64;
        for _ in 0..AT_ONCE {
            let Some(listener) = self.listener.as_ref().filter(|_| self.pending.len() < MOST) else { return };
            let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { return };
            let Ok(peer) = socket_peercred(&socket) else { continue };
            let pid = peer.pid.as_raw_pid();
            if peer.uid != rustix::process::geteuid() {
                if self.refusals < SHOWN_REFUSALS {
                    self.refuse(&socket, pid, &format!("it belongs to user {}", peer.uid.as_raw()));
                }
                continue;
            }
            let (inbox, since) = (Inbox::default(), Instant::now());
            self.pending.push(Pending { socket, inbox, pid, since, bytes: 0 });
        }
    }

    /// Reads the hellos of those that have connected, and admits those that may join.
    fn hear(&mut self) {
        let mut scratch = [0; 2048];
        for mut one in std::mem::take(&mut self.pending) {
            let received = one.inbox.fill(one.socket.as_fd(), &mut scratch, RecvFlags::DONTWAIT);
            one.bytes += received.unwrap_or(0);
            let said = match one.inbox.next() {
                Ok(Some(frame)) if frame.kind == Kind::Join => self.hello.admit(&frame.body),
                Ok(None) if one.bytes > HELLO_BYTES => Err("its hello is too long".to_string()),
                Ok(None) => match received {
                    Ok(0) => Err("it disconnected without a hello".to_string()),
                    Ok(_) | Err(Errno::AGAIN) if one.since.elapsed() < HELLO_LIMIT => {
                        self.pending.push(one);
                        continue;
                    }
                    Ok(_) | Err(Errno::AGAIN) => Err("it sent no hello in time".to_string()),
                    Err(error) => Err(error.to_string()),
                },
                Ok(Some(_)) | Err(_) => Err("it sent no valid hello".to_string()),
            };
            match said {
                Ok(rank) if self.kept[rank].is_some() => {
                    self.refuse(&one.socket, one.pid, &format!("rank {rank} has come already"));
                }
                Ok(rank) => {
                    let limited = set_socket_timeout(&one.socket, Timeout::Send, Some(SEND_LIMIT));
                    let let_in = limited.and_then(|()| wire::send(one.socket.as_fd(), Kind::Joined, b"", &[]));
                    if let_in.is_ok() {
                        self.kept[rank] = Some(KeeperLink { socket: one.socket, inbox: one.inbox });
                    }
                }
                Err(why) => self.refuse(&one.socket, one.pid, &why),
            }
        }
    }

    /// Refuses a process, and reports it.
    fn refuse(&mut self, socket: &OwnedFd, pid: i32, why: &str) {
        let line = one_line(&format!("refused process {pid}: {why}"));
        // A fresh socket has room; one that has not is not waited for.
        let _ = set_socket_timeout(socket, Timeout::Send, Some(Duration::from_millis(10)));
        let _ = wire::send(socket.as_fd(), Kind::Refused, why.as_bytes(), &[]);
        if self.refusals < SHOWN_REFUSALS {
            say(&format!("aristos: {line}"));
        }
        self.refusals += 1;
        self.last_refusal = Some(line);
    }
}
