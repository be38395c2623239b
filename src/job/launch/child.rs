//! Starts one PE's process as a child of this process, which is the supervisor or a launched process.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::{ENV_N_PES, ENV_PE, ENV_SUPERVISOR, PE_COMMAND};

/// A PE to start. Its JSON is the body of a `Start` frame, which also carries the PE's end of its control socket.
#[derive(Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) pe: usize,
    pub(super) n_pes: usize,
    /// Environment variables in addition to those of this process.
    pub(super) env: Vec<(String, String)>,
}

impl Start {
    /// Starts the PE as a child of this process; the PE is killed when this process ends. The child runs this program with [`PE_COMMAND`]
    /// as its only argument and receives its request over `socket`.
    pub(super) fn spawn(&self, socket: OwnedFd) -> io::Result<Child> {
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        command
            .arg(PE_COMMAND)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env(ENV_PE, self.pe.to_string())
            .env(ENV_N_PES, self.n_pes.to_string())
            .env(ENV_SUPERVISOR, std::process::id().to_string())
            .stdin(Stdio::from(socket))
            .process_group(0)
            .spawn()
    }
}
