//! The PEs' processes: started, reaped, and killed when their owner goes.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{ENV_N_PES, ENV_PE, ENV_SUPERVISOR, signals};

/// How long killed processes may take to be gone. SIGKILL takes effect at once, except in a process that
/// sleeps uninterruptibly in the kernel; such a one is not waited for.
const REAP_LIMIT: Duration = Duration::from_millis(1500);

/// The processes of a job's PEs, index = PE. Dropping it kills and reaps those that still run.
pub(super) struct Fleet {
    members: Vec<(Child, Option<ExitStatus>)>,
}

impl Fleet {
    pub(super) fn new() -> Fleet {
        Fleet { members: Vec::new() }
    }

    /// Starts the next PE; returns the supervisor's end of its control socket.
    ///
    /// The PE dies with the calling thread (`PR_SET_PDEATHSIG`), which must therefore stay until the job's end.
    pub(super) fn spawn(&mut self, n_pes: usize, args: &[OsString], env: &[(String, String)]) -> io::Result<OwnedFd> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        let child = command
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .env(ENV_PE, self.members.len().to_string())
            .env(ENV_N_PES, n_pes.to_string())
            .env(ENV_SUPERVISOR, std::process::id().to_string())
            .stdin(Stdio::from(theirs))
            .process_group(0)
            .spawn()?;
        self.members.push((child, None));
        Ok(ours)
    }

    /// Reaps the PEs that have just ended.
    pub(super) fn reap(&mut self) -> Vec<(usize, ExitStatus)> {
        let mut ended = Vec::new();
        for (pe, (child, status)) in self.members.iter_mut().enumerate() {
            if status.is_none()
                && let Ok(Some(new)) = child.try_wait()
            {
                *status = Some(new);
                ended.push((pe, new));
            }
        }
        ended
    }

    /// The first PE whose process has not ended.
    pub(super) fn first_running(&self) -> Option<usize> {
        self.members.iter().position(|(_, status)| status.is_none())
    }

    /// Whether every process has ended and is reaped.
    pub(super) fn ended(&self) -> bool {
        self.first_running().is_none()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for (child, status) in &mut self.members {
            if status.is_none() {
                // An error says that it has ended already: reap() finds it.
                let _ = child.kill();
            }
        }
        let limit = Instant::now() + REAP_LIMIT;
        self.reap();
        while !self.ended() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
            self.reap();
        }
    }
}

/// The end of a process that was not done: "was killed by signal 9 (SIGKILL)", "exited with code 3".
pub(super) fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => match signals::name(signal) {
            name if name.starts_with("SIG") => format!("was killed by signal {signal} ({name})"),
            name => format!("was killed by {name}"),
        },
        (None, Some(0)) => "exited with code 0 before it was done".to_string(),
        (None, code) => format!("exited with code {}", code.unwrap_or(-1)),
    }
}
