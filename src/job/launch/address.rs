//! Where the processes that a launcher started meet: a Unix socket with an abstract name.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::LaunchError;
use super::environment::LaunchedProcess;

/// How long a connection may wait for its place in the queue before it is tried anew.
const QUEUE_LIMIT: Duration = Duration::from_secs(1);

/// The name of the rendezvous socket, without its leading zero byte. Names that are equal once cut to what fits do no harm: a hello
/// has the whole.
pub(super) fn name(process: &LaunchedProcess) -> Vec<u8> {
    const MAX_BYTES: usize = 100;
    let mut name = format!("aristos-{}-{}", rustix::process::geteuid().as_raw(), process.job).into_bytes();
    name.truncate(MAX_BYTES);
    name
}

/// Connects to the rendezvous socket; `None` while there is none.
pub(super) fn connect(process: &LaunchedProcess) -> Result<Option<OwnedFd>, LaunchError> {
    let failed = |source: Errno| LaunchError::Setup { what: "connect to rank 0", source: io::Error::from(source) };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(failed)?;
    // Where the queue of connections is full, the kernel serves those that wait for a place in their order.
    set_socket_timeout(&socket, Timeout::Send, Some(QUEUE_LIMIT)).map_err(failed)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&name(process)).map_err(failed)?) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    let owner = socket_peercred(&socket).map_err(failed)?.uid;
    if owner != rustix::process::geteuid() {
        let (owner, rank) = (owner.as_raw(), process.rank);
        return Err(LaunchError::World(format!("rank {rank}: user {owner} has taken the job's rendezvous socket")));
    }
    set_socket_timeout(&socket, Timeout::Send, None).map_err(failed)?;
    Ok(Some(socket))
}
