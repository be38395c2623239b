//! Open files (memfds, sockets) that travel between processes of a host, over Unix sockets as `SCM_RIGHTS`.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Maximum number of files in one message on Linux (`SCM_MAX_FD`).
pub const MAX_FILES: usize = 253;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FILES));

/// Sends `files` and as much of `parts` as the socket accepts; returns the number of bytes. Does not raise SIGPIPE.
///
/// # Errors
/// The system's error; `INVAL` for more than [`MAX_FILES`] files.
pub fn send(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::INVAL);
    }
    retry_on_intr(|| sendmsg(socket, parts, &mut ancillary, flags | SendFlags::NOSIGNAL))
}

/// Receives once into `parts`, and adds the files that came to `files` (closed on exec); returns the number of bytes, 0 at the end of
/// the stream.
///
/// # Errors
/// The system's.
pub fn receive(
    socket: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    files: &mut impl Extend<OwnedFd>,
    flags: RecvFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| recvmsg(socket, parts, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC))?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            files.extend(descriptors);
        }
    }
    Ok(received.bytes)
}
