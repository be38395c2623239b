//! The supervisor: starts the PEs, handles their frames, and kills all of them when the job fails.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::process::Signal;

use super::fleet::{Fleet, describe};
use super::heartbeat::{Heartbeats, Process};
use super::signals::Signals;
use super::status::StatusView;
use super::survivors::{Continuation, FailureDomains, Survivors};
use super::{LaunchError, MAX_PES, rendezvous};
use crate::shmem::control::frame::{Frame, Inbox, Kind, MAX_FILES, Outbox};
use crate::stdio::one_line;

/// Time between [`Event::Tick`]s.
const TICK: Duration = Duration::from_millis(100);
/// Time for which a failure report is held, so that the death or failure of another PE that caused it can be detected.
const GRACE: Duration = Duration::from_millis(250);
/// Time until a full socket is tried again.
const RETRY: Duration = Duration::from_millis(5);
/// Maximum time from a PE's `done` to its exit.
const EXIT_LIMIT: Duration = Duration::from_secs(20);
/// The supervisor ends the job this much later than a waiting PE would, because the PE's report has more detail.
const STALL_GRACE: Duration = Duration::from_secs(2);
/// Maximum bytes read from one PE before the next PE's socket is read.
const READ_BYTES: usize = 4 << 20;

/// Describes the processes of a job's PEs, which [`Processes::run`] starts. [`Processes::new`] sets the defaults.
pub struct Processes<'a> {
    /// Number of PEs, 1 to [`MAX_PES`].
    pub pes: usize,
    /// Every PE's [`PeContext::request`](super::PeContext::request).
    pub request: Vec<u8>,
    /// Files that every PE gets, by name (at most 251; no zero byte in a name).
    pub fds: Vec<(String, OwnedFd)>,
    /// Environment variables of each PE's process, in addition to those of this process.
    pub env: Vec<(String, String)>,
    /// Names of the phases; the index is the code that PEs pass to `set_phase`. The first is the initial phase of a
    /// PE.
    pub phase_names: &'a [&'a str],
    /// Maximum time of the whole job.
    pub time_limit: Option<Duration>,
    /// Maximum time for which a PE may take to connect, and maximum time from the first PE's segment to the last.
    pub start_limit: Duration,
    /// The PEs that may be lost without the job's failure.
    pub failure_domains: FailureDomains,
    /// Maximum time without a heartbeat of a PE that is not done; must exceed the time for which PEs wait for each other. `None`: no limit.
    pub stall_limit: Option<Duration>,
}

/// An event that [`Processes::run`] passes to its caller. While the caller handles it, the PEs are not watched.
pub enum Event<'e> {
    /// A PE sent a message.
    Message {
        /// The PE.
        pe: usize,
        /// Its message.
        body: &'e [u8],
    },
    /// PEs were lost, and the others continue.
    GoesOn {
        /// The lost PEs, and the first step without them.
        how: &'e Continuation,
        /// The first error seen.
        cause: &'e LaunchError,
    },
    /// The PEs' status, about ten times a second.
    Tick(&'e StatusView<'e>),
}

impl<'a> Processes<'a> {
    /// No files, no time limit, and a minute for each PE to start.
    pub fn new(pes: usize, request: Vec<u8>, phase_names: &'a [&'a str]) -> Processes<'a> {
        Processes {
            pes,
            request,
            fds: Vec::new(),
            env: Vec::new(),
            phase_names,
            time_limit: None,
            start_limit: Duration::from_secs(60),
            failure_domains: FailureDomains::default(),
            stall_limit: None,
        }
    }

    /// Derives the start and stall limits from the time for which PEs wait for each other.
    pub fn set_wait_limit(&mut self, wait_limit: Duration) {
        self.start_limit = self.start_limit.max(wait_limit);
        self.stall_limit = Some(wait_limit + STALL_GRACE);
    }

    /// Starts the PEs, and returns when all of them have ended, even if the job fails.
    ///
    /// If this process is rank 0 of a launcher's processes ([`enter`](super::enter)), it first waits for the other processes. Each of them
    /// is then the parent of a PE.
    ///
    /// The calling thread must live until the function returns, because the kernel kills a PE when the thread that started it ends.
    /// Meanwhile SIGINT, SIGTERM and SIGHUP end the job instead of the process.
    ///
    /// # Errors
    /// Returns the first cause of the job's failure; see the [module](super).
    pub fn run(self, on_event: impl FnMut(Event<'_>)) -> Result<(), LaunchError> {
        if !(1..=MAX_PES).contains(&self.pes) {
            return Err(LaunchError::Pes { pes: self.pes });
        }
        let setup = |what| move |source: io::Error| LaunchError::Setup { what, source };
        let start = Instant::now();
        let status = StatusView::create(self.pes, self.phase_names).map_err(setup("create the status page"))?;
        let page = status.fd().try_clone_to_owned().map_err(setup("create the status page"))?;
        let request = memory_file("aristos-request", &self.request).map_err(setup("write the request"))?;
        let mut names = Vec::new();
        let mut files = vec![page, request];
        for (name, file) in self.fds {
            names.extend_from_slice(name.as_bytes());
            names.push(0);
            files.push(file);
        }
        if files.len() > MAX_FILES {
            let source = io::Error::other(format!("{} files, at most {}", files.len() - 2, MAX_FILES - 2));
            return Err(LaunchError::Setup { what: "pass files to the PEs", source });
        }
        let files: Arc<[OwnedFd]> = files.into();

        let oom_kills = oom_kills();
        let signals = Signals::catch().map_err(setup("catch signals"))?;
        // The drop order matters, here and in the supervisor: the fleet must kill a PE before the PE's socket is closed, so that the PE
        // does not report the closed socket.
        let mut links = Vec::with_capacity(self.pes);
        let mut fleet = Fleet::new(rendezvous::gather(self.pes, &signals)?);
        for pe in 0..self.pes {
            let socket = fleet.spawn(self.pes, &self.env).map_err(|source| LaunchError::Spawn {
                pe,
                n_pes: self.pes,
                source,
            })?;
            let mut link = PeLink { socket: Some(socket), ..PeLink::default() };
            link.outbox.push(Kind::Files, &names, files.clone(), 0..files.len());
            links.push(link);
            if let Some(signal) = signals.caught() {
                return Err(LaunchError::Interrupted { signal });
            }
        }
        drop(files);
        let mut supervisor = Supervisor {
            fleet,
            on_event,
            status,
            links,
            started: Instant::now(),
            time_limit: self.time_limit.map(|limit| (start + limit, limit)),
            start_limit: self.start_limit,
            stall_limit: self.stall_limit,
            heartbeats: Heartbeats::new(self.pes),
            survivors: Survivors::new(self.pes, self.failure_domains),
            oom_kills,
            first_segment: None,
            all_done: None,
            failures: Vec::new(),
            failed_at: None,
            scratch: vec![0; 1 << 16],
        };
        supervisor.watch(&signals)
    }
}

/// Number of processes that the kernel has killed on this machine for lack of memory; `None` if the kernel does not report the number.
fn oom_kills() -> Option<u64> {
    let text = fs::read_to_string("/proc/vmstat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// Creates a file in memory with this content.
fn memory_file(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let file = fs::File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all_at(content, 0)?;
    Ok(file.into())
}

/// The supervisor's connection to one PE, and the PE's state.
#[derive(Default)]
struct PeLink {
    /// `None` after the end of the stream.
    socket: Option<OwnedFd>,
    inbox: Inbox,
    outbox: Outbox,
    connected: bool,
    /// The process id that the PE has reported.
    pid: Option<u32>,
    segment: Option<(OwnedFd, u64)>,
    done: bool,
    failed: bool,
}

struct Supervisor<'a, F> {
    fleet: Fleet,
    on_event: F,
    status: StatusView<'a>,
    links: Vec<PeLink>,
    started: Instant,
    time_limit: Option<(Instant, Duration)>,
    start_limit: Duration,
    stall_limit: Option<Duration>,
    heartbeats: Heartbeats,
    survivors: Survivors,
    /// Number of out-of-memory kills at the start.
    oom_kills: Option<u64>,
    /// Time at which the first segment of an exchange arrived.
    first_segment: Option<Instant>,
    /// Time at which the last PE was done.
    all_done: Option<Instant>,
    /// The failure reports: the reporter, the PE that it waited for, and the error.
    failures: Vec<(usize, Option<usize>, LaunchError)>,
    /// Time at which the first failure report arrived.
    failed_at: Option<Instant>,
    scratch: Vec<u8>,
}

impl<F: FnMut(Event<'_>)> Supervisor<'_, F> {
    /// Handles frames and ends of processes until the job has ended or failed.
    fn watch(&mut self, signals: &Signals) -> Result<(), LaunchError> {
        let mut next_tick = Instant::now() + TICK;
        loop {
            if let Some(signal) = signals.caught() {
                return Err(LaunchError::Interrupted { signal });
            }
            self.flush();
            self.wait(signals, next_tick);
            signals.clear();
            for pe in 0..self.links.len() {
                self.read(pe, READ_BYTES)?;
            }
            self.hand_out_segments()?;
            let lost = self.fleet.listen()?;
            self.judge_ended()?;
            self.note_lost(&lost)?;
            self.continuation()?;
            let now = Instant::now();
            if self.failed_at.is_some_and(|at| now >= at + GRACE || self.fleet.ended()) {
                return Err(self.first_cause());
            }
            if self.fleet.ended() {
                // All PEs are done, since judge_ended returns an error for any other end.
                return Ok(());
            }
            if self.failed_at.is_none() {
                self.check_limits(now)?;
            }
            if now >= next_tick {
                next_tick = now + TICK;
                (self.on_event)(Event::Tick(&self.status));
            }
        }
    }

    /// Sends queued frames as far as the sockets have room. An error means that the PE has ended; judge_ended handles that.
    fn flush(&mut self) {
        for link in &mut self.links {
            if let Some(socket) = &link.socket
                && link.outbox.flush(socket.as_fd()).is_err()
            {
                link.outbox = Outbox::default();
            }
        }
    }

    /// Sleeps until a descriptor is ready or the next tick is due.
    fn wait(&self, signals: &Signals, next_tick: Instant) {
        let pending = self.links.iter().any(|link| link.socket.is_some() && !link.outbox.is_empty());
        let mut limit = next_tick.saturating_duration_since(Instant::now());
        if pending {
            limit = limit.min(RETRY);
        }
        let signal_pipe = signals.pipe();
        let mut fds = vec![PollFd::new(&signal_pipe, PollFlags::IN)];
        fds.extend(self.fleet.sockets().map(|socket| PollFd::new(socket, PollFlags::IN)));
        fds.extend(self.links.iter().filter_map(|link| Some(PollFd::new(link.socket.as_ref()?, PollFlags::IN))));
        let timeout = Timespec { tv_sec: 0, tv_nsec: limit.as_nanos().min(999_999_999) as _ };
        // EINTR means that a signal arrived; the loop handles it.
        let _ = poll(&mut fds, Some(&timeout));
    }

    /// Reads up to `budget` bytes from a PE, and handles their frames.
    fn read(&mut self, pe: usize, budget: usize) -> Result<(), LaunchError> {
        let protocol = |message| LaunchError::Protocol { pe, message };
        let mut taken = 0;
        while taken < budget {
            let link = &mut self.links[pe];
            let Some(socket) = &link.socket else { return Ok(()) };
            match link.inbox.fill(socket.as_fd(), &mut self.scratch, RecvFlags::DONTWAIT) {
                Ok(n @ 1..) => taken += n,
                Err(Errno::AGAIN) => return Ok(()),
                // An error ends the stream, as 0 bytes do. CONNRESET means that the PE ended without reading all bytes.
                Ok(0) | Err(_) => link.socket = None,
            }
            while let Some(frame) = self.links[pe].inbox.next().map_err(protocol)? {
                self.handle(pe, frame).map_err(protocol)?;
            }
        }
        Ok(())
    }

    /// Handles one frame; an error says why it is invalid.
    fn handle(&mut self, pe: usize, frame: Frame) -> Result<(), String> {
        if self.survivors.is_lost(pe) {
            return Ok(()); // sent before it was lost
        }
        let link = &mut self.links[pe];
        match frame.kind {
            Kind::Running => {
                link.connected = true;
                link.pid = frame.body.first_chunk().map(|pid| u32::from_le_bytes(*pid));
            }
            Kind::Message => (self.on_event)(Event::Message { pe, body: &frame.body }),
            Kind::Segment => {
                let bytes = frame.body.try_into().map(u64::from_le_bytes);
                let (Ok(bytes), Some(file), None) = (bytes, frame.files.into_iter().next(), &link.segment) else {
                    return Err("a segment without its file or size, or a second one in one exchange".to_string());
                };
                link.segment = Some((file, bytes));
                self.first_segment.get_or_insert_with(Instant::now);
            }
            Kind::Done => {
                link.done = true;
                if self.survivors.living().all(|pe| self.links[pe].done) {
                    self.all_done = Some(Instant::now());
                }
            }
            Kind::Stopped => self.survivors.stop(pe, &frame.body)?,
            Kind::Final => self.survivors.finish(),
            Kind::Fail | Kind::FailOn => {
                link.failed = true;
                let (peer, message) = match frame.body.split_first_chunk() {
                    Some((peer, message)) if frame.kind == Kind::FailOn => (Some(usize::from_le_bytes(*peer)), message),
                    _ => (None, &frame.body[..]),
                };
                let message = one_line(&String::from_utf8_lossy(message));
                let error = LaunchError::Failed { pe, phase: self.phase(pe), message };
                self.failures.push((pe, peer, error));
                self.failed_at.get_or_insert_with(Instant::now);
            }
            _ => return Err(format!("a {:?} frame from a PE", frame.kind)),
        }
        Ok(())
    }

    /// The first failure report that no other report explains: that of a PE that failed by itself, or that waited for a PE without a
    /// report. (A stopped PE sends no report. The PEs that wait for it send one, and then so do the PEs that wait for those.)
    fn first_cause(&mut self) -> LaunchError {
        let reported = |pe: usize| self.failures.iter().any(|(reporter, ..)| *reporter == pe);
        let cause = self.failures.iter().position(|(_, peer, _)| !peer.is_some_and(reported));
        self.failures.swap_remove(cause.unwrap_or(0)).2
    }

    /// Once every PE has sent its segment, sends all segments to all PEs.
    fn hand_out_segments(&mut self) -> Result<(), LaunchError> {
        let living: Vec<usize> = self.survivors.living().collect();
        let mut given = Vec::with_capacity(living.len());
        if !living.iter().all(|&pe| self.links[pe].segment.is_some()) {
            return Ok(());
        }
        given.extend(living.iter().filter_map(|&pe| Some((pe, self.links[pe].segment.take()?))));
        let (first, (_, expected)) = &given[0];
        if let Some((pe, (_, bytes))) = given.iter().find(|(_, (_, bytes))| bytes != expected) {
            return Err(LaunchError::SegmentSize { pe: *pe, bytes: *bytes, first: *first, expected: *expected });
        }
        let files: Arc<[OwnedFd]> = given.into_iter().map(|(_, (file, _))| file).collect();
        self.survivors.met();
        for pe in living {
            let link = &mut self.links[pe];
            for first in (0..files.len()).step_by(MAX_FILES) {
                link.outbox.push(Kind::Segments, b"", files.clone(), first..files.len().min(first + MAX_FILES));
            }
        }
        self.first_segment = None;
        Ok(())
    }

    /// Checks the exit statuses of processes that have newly ended. If several failed, one that was killed by a signal is reported, because
    /// it has caused the failures of the others.
    fn judge_ended(&mut self) -> Result<(), LaunchError> {
        let mut ended = self.fleet.reap();
        ended.sort_by_key(|(_, status)| status.signal().is_none());
        for (pe, status) in ended {
            self.read(pe, usize::MAX)?; // frames sent before it ended
            if self.survivors.is_lost(pe) {
                continue;
            }
            let link = &self.links[pe];
            if !(link.failed || link.done && status.success()) {
                let mut how = describe(status);
                if status.signal() == Some(Signal::KILL.as_raw()) && oom_kills() > self.oom_kills {
                    how += " (the kernel has killed a process meanwhile because memory ran out, the machine's or a control group's)";
                }
                self.lose(pe, LaunchError::Died { pe, how, phase: self.phase(pe) })?;
            }
        }
        Ok(())
    }

    /// Kills the PEs that are lost together with this PE, and notifies the others.
    ///
    /// # Errors
    /// Returns the cause if the others cannot continue.
    fn lose(&mut self, pe: usize, cause: LaunchError) -> Result<(), LaunchError> {
        if self.failed_at.is_some() {
            return Err(cause);
        }
        for pe in self.survivors.lose(pe, cause)? {
            self.fleet.kill(pe);
        }
        self.survivors.living().for_each(|living| self.status.tell_lost(living, Some(pe)));
        Ok(())
    }

    /// Lets the remaining PEs continue, once all of them have stopped.
    fn continuation(&mut self) -> Result<(), LaunchError> {
        let Some((how, cause)) = self.survivors.decide()? else { return Ok(()) };
        let body = serde_json::to_vec(&how).expect("numbers have a JSON form");
        for pe in self.survivors.living() {
            self.status.tell_lost(pe, None);
            self.links[pe].outbox.push(Kind::Continuation, &body, Arc::new([]), 0..0);
        }
        (self.on_event)(Event::GoesOn { how: &how, cause: &cause });
        Ok(())
    }

    /// Records PEs that were lost with their parents as failures. These reports are held like others, because the launcher may be ending
    /// all processes of the job, and its signal to this process may arrive later.
    fn note_lost(&mut self, lost: &[usize]) -> Result<(), LaunchError> {
        for &pe in lost {
            self.read(pe, usize::MAX)?; // frames sent before it ended
            if self.survivors.is_lost(pe) {
                continue;
            }
            self.links[pe].failed = true;
            let error = LaunchError::Lost { pe, phase: self.phase(pe) };
            self.failures.push((pe, None, error));
            self.failed_at.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    fn check_limits(&mut self, now: Instant) -> Result<(), LaunchError> {
        if let Some(limit) = self.stall_limit {
            let (links, status, fleet, survivors) = (&self.links, &self.status, &self.fleet, &self.survivors);
            let watched = |pe: usize| {
                let link: &PeLink = &links[pe];
                // A PE that has sent its segment or has stopped is waiting for others, so it needs no heartbeat.
                let waiting = link.segment.is_some() || survivors.has_stopped(pe);
                let working = !link.done && !waiting && !survivors.is_lost(pe);
                let process = fleet.child(pe).map(Process::Child).or(link.pid.map(Process::Reported));
                Some((process.filter(|_| working)?, status.words(pe)))
            };
            if let Some(pe) = self.heartbeats.check(limit, watched) {
                return Err(LaunchError::Stalled { pe, silent: limit, phase: self.phase(pe) });
            }
        }
        if let Some((until, limit)) = self.time_limit
            && now >= until
        {
            return Err(LaunchError::TimeLimit { limit, states: self.states() });
        }
        let late = |pe, what, limit| LaunchError::Late { pe, what, limit, phase: self.phase(pe) };
        if now >= self.started + self.start_limit
            && let Some(pe) = self.survivors.living().find(|&pe| !self.links[pe].connected)
        {
            return Err(late(pe, "connected", self.start_limit));
        }
        if self.first_segment.is_some_and(|first| now >= first + self.start_limit)
            && let Some(pe) = self.survivors.living().find(|&pe| self.links[pe].segment.is_none())
        {
            return Err(late(pe, "given its segment", self.start_limit));
        }
        if self.all_done.is_some_and(|done| now >= done + EXIT_LIMIT)
            && let Some(pe) = self.fleet.first_running()
        {
            return Err(late(pe, "exited after it was done", EXIT_LIMIT));
        }
        Ok(())
    }

    fn phase(&self, pe: usize) -> String {
        self.status.pe(pe).phase.to_string()
    }

    /// Describes the state of the first 16 PEs: "PE 0 in phase dispatch, PE 1 done".
    fn states(&self) -> String {
        const SHOWN: usize = 16;
        let state = |(pe, link): (usize, &PeLink)| match link.done {
            _ if self.survivors.is_lost(pe) => format!("PE {pe} lost"),
            true => format!("PE {pe} done"),
            false => format!("PE {pe} in phase {}", self.status.pe(pe).phase),
        };
        let mut states: Vec<String> = self.links.iter().enumerate().take(SHOWN).map(state).collect();
        if self.links.len() > SHOWN {
            states.push(format!("and {} more", self.links.len() - SHOWN));
        }
        states.join(", ")
    }
}
