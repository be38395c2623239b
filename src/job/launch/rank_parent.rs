//! A launched process other than rank 0. It is the parent of one PE of rank 0's job.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::process::{Pid, PidfdFlags};

use super::child::Start;
use super::environment::LaunchedProcess;
use super::{LaunchError, rendezvous};
use crate::shmem::control::frame::{self, Frame, Kind};
use crate::shmem::control::{Attempt, CallError, Introduction, Link, call, local};

/// The parent of one PE.
pub struct RankParent {
    process: LaunchedProcess,
    limit: Duration,
}

/// The PE, while it runs.
struct Running {
    child: Child,
    /// Readable when the child has ended.
    pidfd: OwnedFd,
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the child has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RankParent {
    pub(super) fn new(process: LaunchedProcess, limit: Duration) -> RankParent {
        RankParent { process, limit }
    }

    /// Starts and watches PEs on behalf of rank 0, one at a time, until rank 0's command ends. Returns the exit code of that command. If
    /// rank 0 or this process ends earlier, the PE is killed. Call it in the main thread, because the kernel kills the PE when the calling
    /// thread ends.
    ///
    /// # Errors
    /// Returns an error of one line if rank 0 was not found, or refused this process.
    pub fn serve(self) -> Result<u8, LaunchError> {
        // A process that inherits an ignored SIGCHLD from its launcher would not learn from wait(2) how a child ended.
        let handled = signal_hook::flag::register(signal_hook::consts::SIGCHLD, Arc::default());
        handled.map_err(|source| LaunchError::Setup { what: "catch SIGCHLD", source })?;
        let Some(Link { socket, mut inbox, .. }) = self.join()? else { return Ok(1) };
        let mut scratch = vec![0; 1 << 16];
        let mut running: Option<Running> = None;
        loop {
            while let Some(frame) = inbox.next().transpose() {
                let Ok(frame) = frame else { return Ok(1) };
                match frame.kind {
                    Kind::Start => {
                        if self.start(frame, &socket, &mut running).is_err() {
                            return Ok(1);
                        }
                    }
                    Kind::Kill => {
                        if let Some(running) = &mut running {
                            let _ = running.child.kill();
                        }
                    }
                    Kind::Verdict => return Ok(frame.body.first().copied().unwrap_or(1)),
                    _ => return Ok(1),
                }
            }
            let mut fds = vec![PollFd::new(&socket, PollFlags::IN)];
            fds.extend(running.iter().map(|running| PollFd::new(&running.pidfd, PollFlags::IN)));
            // This wait needs no limit: rank 0 enforces the job's limits, and when rank 0 ends, the socket becomes readable.
            let _ = poll(&mut fds, None);
            if let Some(one) = &mut running
                && let Ok(Some(status)) = one.child.try_wait()
            {
                running = None;
                let _ = frame::send(socket.as_fd(), Kind::Ended, &status.into_raw().to_le_bytes(), &[]);
            }
            match inbox.fill(socket.as_fd(), &mut scratch, RecvFlags::DONTWAIT) {
                Ok(1..) | Err(Errno::AGAIN) => {}
                Ok(0) | Err(_) => return Ok(1),
            }
        }
    }

    /// Joins the job. `None` if rank 0 is on another host or has ended; rank 0 reports both.
    fn join(&self) -> Result<Option<Link>, LaunchError> {
        let (rank, n_pes) = (self.process.rank, self.process.size);
        let (key, program) = rendezvous::identity(&self.process);
        let name = rendezvous::name(&self.process);
        let mut found = false;
        let who = Introduction { pe: rank, n_pes, program: &program };
        let link = call(who, &key, Instant::now() + self.limit, |_, _| match local::connect(&name) {
            Ok(socket) => {
                found = true;
                Ok((socket, Vec::new()))
            }
            // Rank 0 has ended, and has printed why.
            Err(local::Refusal::NoListener(_)) if found => Err(Attempt::Fatal(None)),
            Err(local::Refusal::NoListener(error)) => Err(Attempt::Retry(error.into())),
            Err(local::Refusal::OtherUser(owner)) => {
                let line = format!("rank {rank}: user {owner} has taken the job's rendezvous socket");
                Err(Attempt::Fatal(Some(LaunchError::World(line))))
            }
            Err(local::Refusal::System(error)) => {
                Err(Attempt::Fatal(Some(LaunchError::Setup { what: "connect to rank 0", source: error.into() })))
            }
        });
        let world = |line| Err(LaunchError::World(line));
        match link {
            Ok(link) => Ok(Some(link)),
            Err(CallError::Connect(error)) => error.map_or(Ok(None), Err),
            Err(CallError::Nonce(source)) => Err(LaunchError::Setup { what: "draw a number", source }),
            Err(CallError::NoListener(_)) if !self.process.one_host => Ok(None),
            Err(CallError::NoListener(_) | CallError::Late(_)) => {
                let (launcher, seconds) = (self.process.launcher, self.limit.as_secs_f64());
                world(format!("rank {rank}: rank 0 has not come within {seconds} s, as {launcher} started it"))
            }
            Err(CallError::Unproven(why)) => world(format!(
                "rank {rank}: the process at the job's rendezvous socket is not rank 0 of this job: {why}"
            )),
            Err(CallError::Refused(why)) => world(format!("rank 0 refused rank {rank}: {why}")),
        }
    }

    /// Starts the PE.
    ///
    /// # Errors
    /// Returns an error if rank 0 has ended, or violated the protocol.
    fn start(&self, frame: Frame, socket: &OwnedFd, running: &mut Option<Running>) -> Result<(), ()> {
        let start: Start = serde_json::from_slice(&frame.body).map_err(|_| ())?;
        let (Some(socket_of_pe), None) = (frame.files.into_iter().next(), &running) else { return Err(()) };
        let started = start.spawn(socket_of_pe).and_then(|mut child| {
            match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
                Ok(pidfd) => Ok(Running { child, pidfd }),
                Err(error) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    Err(error.into())
                }
            }
        });
        match started {
            Ok(started) => {
                *running = Some(started);
                Ok(())
            }
            Err(error) => {
                let code = error.raw_os_error().unwrap_or(0);
                frame::send(socket.as_fd(), Kind::Unstarted, &code.to_le_bytes(), &[]).map_err(|_| ())
            }
        }
    }
}
