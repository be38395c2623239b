//! Unix sockets with abstract names: a rendezvous on one host that leaves no file behind.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Maximum length of a name, bytes.
pub const MAX_NAME_BYTES: usize = 107;
/// How long a connection may wait for its place in the listener's queue.
const QUEUE_LIMIT: Duration = Duration::from_secs(1);

/// Why no connection was made.
#[derive(Debug)]
pub enum Refusal {
    /// No process listens yet, or its queue is full.
    NoListener(Errno),
    /// A process of this user listens.
    OtherUser(u32),
    /// The system's.
    System(Errno),
}

/// A socket that listens at this name and does not block.
///
/// # Errors
/// `ADDRINUSE` if another process listens there; the system's.
pub fn listen(name: &[u8], backlog: i32) -> Result<OwnedFd, Errno> {
    let listener = socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&listener, backlog)?;
    Ok(listener)
}

/// Connects to a process of this user that listens at this name; the socket blocks.
///
/// # Errors
/// See [`Refusal`].
pub fn connect(name: &[u8]) -> Result<OwnedFd, Refusal> {
    let socket = socket(SocketFlags::empty()).map_err(Refusal::System)?;
    // The kernel serves connections that wait for a full queue in their order.
    set_socket_timeout(&socket, Timeout::Send, Some(QUEUE_LIMIT)).map_err(Refusal::System)?;
    let address = SocketAddrUnix::new_abstract_name(name).map_err(Refusal::System)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(error @ (Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR | Errno::NOENT)) => {
            return Err(Refusal::NoListener(error));
        }
        Err(error) => return Err(Refusal::System(error)),
    }
    let owner = socket_peercred(&socket).map_err(Refusal::System)?.uid;
    if owner != rustix::process::geteuid() {
        return Err(Refusal::OtherUser(owner.as_raw()));
    }
    set_socket_timeout(&socket, Timeout::Send, None).map_err(Refusal::System)?;
    Ok(socket)
}

fn socket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)
}
