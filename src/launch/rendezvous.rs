//! Processes that somebody else started on one host become a job: rank 0's side.
//!
//! Each process that `srun`, `mpirun` or `torchrun` started keeps one PE: it starts it as its child, in the environment and
//! on the CPUs that the launcher gave, and says how it ended. Rank 0's process is the supervisor besides. So the PEs, their
//! sockets and all that [`Job::run`](super::Job::run) does are the same whoever starts the processes, and one command may run several jobs.
//!
//! They meet at a Unix socket with an abstract name (nothing is left in a file system), made of the user and of what the
//! launcher gives to all of its processes and to no others. The kernel says who is at a socket's other end: both sides refuse
//! another user's process. A process of the same user must know the job's token (`ARISTOS_JOB_TOKEN` where it is set, and what the
//! name is made of), and be of the same version. A socket that ends is a process that ended, on either side.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::hello::Hello;
use super::keeper::Keeper;
use super::place::{BadPlace, Place, place};
use super::signals::Signals;
use super::wire::{self, Inbox, Kind};
use super::{ENV_N_PES, ENV_PE, LaunchError, one_line};

/// How long processes wait for each other at the start, seconds.
const ENV_JOIN_LIMIT: &str = "ARISTOS_JOIN_LIMIT";
const JOIN_LIMIT: Duration = Duration::from_secs(60);
/// The same where the launcher says that there are several hosts, though it may count one host twice.
const SEVERAL_HOSTS_LIMIT: Duration = Duration::from_secs(10);
/// How long rank 0, its command at an end, waits for processes that have not come yet, to tell them.
const LINGER: Duration = Duration::from_secs(5);
/// How long who connects may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// No hello is longer, bytes.
const HELLO_BYTES: usize = 1 << 13;
/// How long a process that keeps a PE may take to take a frame.
const SEND_LIMIT: Duration = Duration::from_secs(10);
/// Most refusals that are printed.
const SHOWN_REFUSALS: usize = 8;

static WORLD: OnceLock<World> = OnceLock::new();

/// The job that this process is rank 0 of.
struct World {
    size: usize,
    launcher: &'static str,
    meeting: Mutex<Meeting>,
}

/// What a process is among those that a launcher started.
pub enum Role {
    /// No launcher started it, or it alone; it starts PEs itself.
    Alone,
    /// Rank 0: it runs the command.
    Supervisor,
    /// It keeps a PE: [`Keeper::serve`].
    Keeper(Keeper),
    /// Its launcher's environment makes no sense, and rank 0 says so: it ends.
    Silent,
}

/// Finds this process's role, and as rank 0 opens the meeting place. To be called once.
///
/// # Errors
/// One line: the environment makes no sense; the meeting place is taken.
pub fn enter() -> Result<Role, LaunchError> {
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid());
    let place = match place(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()), parent) {
        Ok(None) => return Ok(Role::Alone),
        Ok(Some(place)) => place,
        Err(BadPlace { speaks: false, .. }) => return Ok(Role::Silent),
        Err(BadPlace { line, .. }) => return Err(LaunchError::Environment(line)),
    };
    let limit = match join_limit(&place) {
        Ok(limit) => limit,
        Err(_) if place.rank > 0 => return Ok(Role::Silent),
        Err(error) => return Err(error),
    };
    if place.rank > 0 {
        return Ok(Role::Keeper(Keeper::new(place, limit)));
    }
    let (size, launcher) = (place.size, place.launcher);
    let meeting = Mutex::new(Meeting::open(place, limit)?);
    match WORLD.set(World { size, launcher, meeting }) {
        Ok(()) => Ok(Role::Supervisor),
        Err(_) => Err(LaunchError::Environment("this process has taken its place in the job already".to_string())),
    }
}

/// The number of PEs, where somebody has settled it: in a PE its supervisor, in rank 0 the launcher.
pub fn settled_pes() -> Option<usize> {
    let of_pe = || std::env::var_os(ENV_PE).and(std::env::var(ENV_N_PES).ok())?.parse().ok();
    WORLD.get().map(|world| world.size).or_else(of_pe)
}

/// As rank 0, tells the other processes the exit code with which this one ends; they end with it too.
pub fn conclude(code: u8) {
    let Some(world) = WORLD.get() else { return };
    let mut meeting = world.meeting.lock().unwrap_or_else(PoisonError::into_inner);
    if !meeting.given_up {
        // Whoever comes now learns at once that it is over, instead of waiting for one who has gone.
        meeting.limit = meeting.limit.min(LINGER);
        let _ = meeting.gather(None);
    }
    for kept in meeting.kept.iter().flatten() {
        let _ = wire::send(kept.socket.as_fd(), Kind::Verdict, &[code], &[]);
    }
}

/// The processes that keep this job's PEs, once all are there; `None` where no launcher started this one.
pub(super) fn gather(pes: usize, signals: &Signals) -> Result<Option<MutexGuard<'static, Meeting>>, LaunchError> {
    let Some(world) = WORLD.get() else { return Ok(None) };
    if pes != world.size {
        let World { size, launcher, .. } = world;
        return Err(LaunchError::World(format!(
            "this is a job of {pes} PEs, but {launcher} started {size} processes, each of which is a PE: make --pes, or the \
             processes, agree"
        )));
    }
    let mut meeting = world.meeting.lock().unwrap_or_else(PoisonError::into_inner);
    meeting.gather(Some(signals))?;
    Ok(Some(meeting))
}

fn join_limit(place: &Place) -> Result<Duration, LaunchError> {
    let limit = match std::env::var_os(ENV_JOIN_LIMIT) {
        None => JOIN_LIMIT,
        Some(value) => {
            let seconds = value.to_str().and_then(|value| value.parse().ok()).filter(|s| (0.01..=1e6).contains(s));
            let wrong = || format!("{ENV_JOIN_LIMIT}={}: expected a number of seconds above 0", value.display());
            Duration::from_secs_f64(seconds.ok_or_else(|| LaunchError::Environment(wrong()))?)
        }
    };
    Ok(if place.one_host { limit } else { limit.min(SEVERAL_HOSTS_LIMIT) })
}

/// The name of the meeting place, without its leading zero byte. Names that are equal in what fits are no danger: a hello
/// has the whole.
pub(super) fn name(place: &Place) -> Vec<u8> {
    const MAX_BYTES: usize = 100;
    let mut name = format!("aristos-{}-{}", rustix::process::geteuid().as_raw(), place.job).into_bytes();
    name.truncate(MAX_BYTES);
    name
}

/// A process that keeps a PE, as rank 0 knows it.
pub(super) struct Kept {
    pub(super) socket: OwnedFd,
    pub(super) inbox: Inbox,
}

/// One that has connected and not said who it is.
struct Pending {
    socket: OwnedFd,
    inbox: Inbox,
    pid: i32,
    since: Instant,
    bytes: usize,
}

/// Where the processes come to.
pub(super) struct Meeting {
    place: Place,
    hello: Hello,
    limit: Duration,
    /// Until all have come.
    listener: Option<OwnedFd>,
    pending: Vec<Pending>,
    /// By rank; rank 0 keeps its PE itself.
    pub(super) kept: Vec<Option<Kept>>,
    refusals: usize,
    last_refusal: Option<String>,
    given_up: bool,
}

impl Meeting {
    fn open(place: Place, limit: Duration) -> Result<Meeting, LaunchError> {
        let setup = |source: Errno| LaunchError::Setup { what: "open the job's meeting place", source: source.into() };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(setup)?;
        let name = name(&place);
        let address = SocketAddrUnix::new_abstract_name(&name).map_err(setup)?;
        match rustix::net::bind(&listener, &address) {
            Err(Errno::ADDRINUSE) => {
                let (name, launcher) = (String::from_utf8_lossy(&name).into_owned(), place.launcher);
                let cure = match launcher {
                    "torchrun" => "choose another --master-port",
                    _ => "wait for it to end",
                };
                return Err(LaunchError::World(one_line(&format!(
                    "the job's meeting place (abstract socket {name}) is taken: another job has the same mark of {launcher}'s; {cure}"
                ))));
            }
            bound => bound.map_err(setup)?,
        }
        rustix::net::listen(&listener, 4096).map_err(setup)?;
        let kept = (0..place.size).map(|_| None).collect();
        let hello = Hello::of(&place);
        let (pending, refusals, last_refusal) = (Vec::new(), 0, None);
        Ok(Meeting {
            place,
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
        (1..self.place.size).filter(|&rank| self.kept[rank].is_none()).collect()
    }

    /// Waits until all have come.
    fn gather(&mut self, signals: Option<&Signals>) -> Result<(), LaunchError> {
        let until = Instant::now() + self.limit;
        while let (Some(listener), missing) = (&self.listener, self.missing()) {
            if missing.is_empty() {
                // Whoever comes later finds nobody.
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

    /// Whether those that have come are still there. They say nothing before they are asked to start a PE.
    fn check_kept(&mut self) -> Result<(), LaunchError> {
        let size = self.place.size;
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
        let Place { launcher, size, .. } = self.place;
        let mut ranks = missing.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
        if missing.len() > SHOWN {
            ranks += &format!(" and {} more", missing.len() - SHOWN);
        }
        let (noun, have) = if missing.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
        if !self.place.one_host {
            return format!(
                "{launcher} started {size} processes on several hosts, and {noun} {ranks} {have} not come on this one: shared \
                 memory joins the PEs of one host; use --transport mpi (a build with --features mpi), or NVSHMEM on devices"
            );
        }
        let refused = self.last_refusal.as_ref().map_or_else(String::new, |line| format!("; {line}"));
        let seconds = self.limit.as_secs_f64();
        format!("{noun} {ranks} of {size} {have} not come within {seconds} s, as {launcher} started them{refused}")
    }

    /// Takes in who has connected.
    fn accept(&mut self) {
        const MOST: usize = 2 * super::MAX_PES;
        while let Some(listener) = self.listener.as_ref().filter(|_| self.pending.len() < MOST) {
            let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { return };
            let Ok(peer) = socket_peercred(&socket) else { continue };
            let pid = peer.pid.as_raw_pid();
            if peer.uid != rustix::process::geteuid() {
                self.refuse(&socket, pid, &format!("it is of user {}", peer.uid.as_raw()));
                continue;
            }
            let (inbox, since) = (Inbox::default(), Instant::now());
            self.pending.push(Pending { socket, inbox, pid, since, bytes: 0 });
        }
    }

    /// Listens to who has connected, and lets in who may.
    fn hear(&mut self) {
        let mut scratch = [0; 2048];
        for mut one in std::mem::take(&mut self.pending) {
            let received = one.inbox.fill(one.socket.as_fd(), &mut scratch, RecvFlags::DONTWAIT);
            one.bytes += received.unwrap_or(0);
            let said = match one.inbox.next() {
                Ok(Some(frame)) if frame.kind == Kind::Join => self.hello.admit(&frame.body),
                Ok(None) if one.bytes > HELLO_BYTES => Err("it says too much".to_string()),
                Ok(None) => match received {
                    Ok(0) => Err("it left without a word".to_string()),
                    Ok(_) | Err(Errno::AGAIN) if one.since.elapsed() < HELLO_LIMIT => {
                        self.pending.push(one);
                        continue;
                    }
                    Ok(_) | Err(Errno::AGAIN) => Err("it does not say who it is".to_string()),
                    Err(error) => Err(error.to_string()),
                },
                Ok(Some(_)) | Err(_) => Err("it does not speak as a process of a job".to_string()),
            };
            match said {
                Ok(rank) if self.kept[rank].is_some() => {
                    self.refuse(&one.socket, one.pid, &format!("rank {rank} has come already"));
                }
                Ok(rank) => {
                    let limited = set_socket_timeout(&one.socket, Timeout::Send, Some(SEND_LIMIT));
                    let let_in = limited.and_then(|()| wire::send(one.socket.as_fd(), Kind::Joined, b"", &[]));
                    if let_in.is_ok() {
                        self.kept[rank] = Some(Kept { socket: one.socket, inbox: one.inbox });
                    }
                }
                Err(why) => self.refuse(&one.socket, one.pid, &why),
            }
        }
    }

    /// Sends somebody away, and says so.
    fn refuse(&mut self, socket: &OwnedFd, pid: i32, why: &str) {
        let line = one_line(&format!("refused process {pid}: {why}"));
        // A fresh socket has room; one that has not is not waited for.
        let _ = set_socket_timeout(socket, Timeout::Send, Some(Duration::from_millis(10)));
        let _ = wire::send(socket.as_fd(), Kind::Refused, why.as_bytes(), &[]);
        if self.refusals < SHOWN_REFUSALS {
            eprintln!("aristos: {line}");
        }
        self.refusals += 1;
        self.last_refusal = Some(line);
    }
}

/// Connects to the meeting place; `None` while nobody is there.
pub(super) fn connect(place: &Place) -> Result<Option<OwnedFd>, LaunchError> {
    let failed = |source: Errno| LaunchError::Setup { what: "connect to rank 0", source: io::Error::from(source) };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&name(place)).map_err(failed)?) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    let owner = socket_peercred(&socket).map_err(failed)?.uid;
    if owner != rustix::process::geteuid() {
        let (owner, rank) = (owner.as_raw(), place.rank);
        return Err(LaunchError::World(format!("rank {rank}: user {owner} sits at the job's meeting place")));
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(failed)?;
    Ok(Some(socket))
}
