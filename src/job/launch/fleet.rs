//! Starts and reaps the PEs' processes, and kills them when the fleet is dropped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};

use super::child::Start;
use super::rendezvous::{ParentLink, Rendezvous};
use super::{LaunchError, signals};
use crate::out_of_memory::OUT_OF_MEMORY;
use crate::shmem::control::frame::Kind;

/// Maximum wait for killed processes to end. SIGKILL takes effect at once, except in a process that sleeps uninterruptibly in the kernel;
/// the fleet does not wait longer for such a process.
const REAP_LIMIT: Duration = Duration::from_millis(1500);

/// The processes of a job's PEs, by PE. Dropping the fleet kills and reaps the processes that still run.
pub(super) struct Fleet {
    members: Vec<Member>,
    /// The launched processes that are the parents of PEs 1 and up, if a launcher started this process.
    rendezvous: Option<MutexGuard<'static, Rendezvous>>,
    scratch: Vec<u8>,
}

struct Member {
    /// `None` if the PE is the child of a launched process, not of this one.
    child: Option<Child>,
    end: Option<End>,
    /// Whether [`Fleet::reap`] has returned the end of this PE.
    told: bool,
}

#[derive(Clone, Copy)]
enum End {
    Status(ExitStatus),
    /// The PE's parent, a launched process, has ended.
    Lost,
}

impl Fleet {
    /// A fleet without PEs. Launched processes, if any, become the parents of PEs 1 and up.
    pub(super) fn new(rendezvous: Option<MutexGuard<'static, Rendezvous>>) -> Fleet {
        Fleet { members: Vec::new(), rendezvous, scratch: vec![0; 4096] }
    }

    /// Starts the next PE, and returns the supervisor's end of the PE's control socket.
    ///
    /// The kernel kills the PE when the calling thread ends (`PR_SET_PDEATHSIG`), so that thread must live until the job's end. A PE whose
    /// parent is a launched process is killed when that process ends.
    pub(super) fn spawn(&mut self, n_pes: usize, env: &[(String, String)]) -> io::Result<OwnedFd> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let pe = self.members.len();
        let start = Start { pe, n_pes, env: env.to_vec() };
        let child = match self.parent(pe) {
            Some(parent) => {
                parent.send(Kind::Start, &serde_json::to_vec(&start)?, &[theirs.as_fd()])?;
                None
            }
            None => Some(start.spawn(theirs)?),
        };
        self.members.push(Member { child, end: None, told: false });
        Ok(ours)
    }

    /// The process id of a PE that is a child of this process.
    pub(super) fn child(&self, pe: usize) -> Option<u32> {
        self.members.get(pe)?.child.as_ref().map(Child::id)
    }

    /// The launched process that is the parent of a PE.
    fn parent(&mut self, pe: usize) -> Option<&mut ParentLink> {
        self.rendezvous.as_mut()?.parents.get_mut(pe)?.as_mut()
    }

    /// The sockets of the launched processes. The caller polls them for input before [`Fleet::listen`].
    pub(super) fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        self.rendezvous.iter().flat_map(|rendezvous| rendezvous.parents.iter().flatten()).map(|parent| &parent.socket)
    }

    /// Handles the frames of the launched processes. Returns the PEs that were newly lost because their parents have ended.
    ///
    /// # Errors
    /// [`LaunchError::Spawn`] if a PE could not be started.
    pub(super) fn listen(&mut self) -> Result<Vec<usize>, LaunchError> {
        let mut lost = Vec::new();
        let n_pes = self.members.len();
        let Some(rendezvous) = &mut self.rendezvous else { return Ok(lost) };
        for (pe, (member, place)) in self.members.iter_mut().zip(&mut rendezvous.parents).enumerate() {
            let Some(parent) = place else { continue };
            let gone = match parent.inbox.fill(parent.socket.as_fd(), &mut self.scratch, RecvFlags::DONTWAIT) {
                Ok(1..) | Err(Errno::AGAIN) => false,
                Ok(0) | Err(_) => true,
            };
            while let Ok(Some(frame)) = parent.inbox.next() {
                let code = frame.body.first_chunk().map_or(0, |code| i32::from_le_bytes(*code));
                match frame.kind {
                    Kind::Ended => member.end = Some(End::Status(ExitStatus::from_raw(code))),
                    Kind::Unstarted => {
                        member.end = Some(End::Lost);
                        let source = io::Error::from_raw_os_error(code);
                        return Err(LaunchError::Spawn { pe, n_pes, source });
                    }
                    _ => {}
                }
            }
            if gone {
                *place = None;
                if member.end.is_none() {
                    member.end = Some(End::Lost);
                    lost.push(pe);
                }
            }
        }
        Ok(lost)
    }

    /// Reaps the PEs that are children of this process. Returns all PEs whose end has not been returned before.
    pub(super) fn reap(&mut self) -> Vec<(usize, ExitStatus)> {
        let mut ended = Vec::new();
        for (pe, member) in self.members.iter_mut().enumerate() {
            if member.end.is_none()
                && let Some(child) = &mut member.child
                && let Ok(Some(status)) = child.try_wait()
            {
                member.end = Some(End::Status(status));
            }
            if let (false, Some(End::Status(status))) = (member.told, member.end) {
                member.told = true;
                ended.push((pe, status));
            }
        }
        ended
    }

    /// The first PE whose process has not ended.
    pub(super) fn first_running(&self) -> Option<usize> {
        self.members.iter().position(|member| member.end.is_none())
    }

    /// Whether every process has ended and is reaped.
    pub(super) fn ended(&self) -> bool {
        self.first_running().is_none()
    }

    /// Kills a PE, if it has not ended.
    pub(super) fn kill(&mut self, pe: usize) {
        let member = &mut self.members[pe];
        if member.end.is_some() {
            return;
        }
        match &mut member.child {
            // An error means that the process has ended already; reap() returns it.
            Some(child) => drop(child.kill()),
            None => {
                if let Some(parent) = self.parent(pe) {
                    let _ = parent.send(Kind::Kill, b"", &[]);
                }
            }
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|pe| self.kill(pe));
        let limit = Instant::now() + REAP_LIMIT;
        self.reap();
        while !self.ended() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
            let _ = self.listen();
            self.reap();
        }
    }
}

/// Describes how a process ended before its PE was done: "was killed by signal 9 (SIGKILL)", "exited with code 3".
pub(super) fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => match signals::name(signal) {
            name if name.starts_with("SIG") => format!("was killed by signal {signal} ({name})"),
            name => format!("was killed by {name}"),
        },
        (None, Some(0)) => "exited with code 0 before it was done".to_string(),
        (None, Some(code)) if code == i32::from(OUT_OF_MEMORY) => {
            "ran out of memory: an allocation exceeds the machine's memory, or the limit of ulimit -v".to_string()
        }
        (None, code) => format!("exited with code {}", code.unwrap_or(-1)),
    }
}
