//! A host that TCP hears nothing of, and one that it hears of again.
//!
//! `TCP_USER_TIMEOUT` would give a connection up that has healed: a segment that was lost in a cut of 4 s and came through at the third attempt may
//! be taken for a round trip of seconds, the next attempt then comes later than the timeout, which counts from the first, and ends the
//! connection without another one. So silence is when no acknowledgement came, and attempts are never far apart where the kernel can be told.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// linux/tcp.h, since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Sends again at least once a second what is not acknowledged. Older kernels know no such limit: theirs doubles with each attempt.
pub(super) fn retry_soon(socket: impl AsFd) {
    // The least that it takes.
    let longest_ms: libc::c_int = 1000;
    // SAFETY: the socket is open, and the value is an int, as it is said to be.
    unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const longest_ms).cast(),
            size_of_val(&longest_ms) as libc::socklen_t,
        );
    }
}

/// How long no acknowledgement has come, where one is owed; otherwise zero, and keepalive is what sees to it.
pub(super) fn silent_for(socket: impl AsFd) -> Duration {
    // SAFETY: all zeros are integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut bytes = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the socket is open, and at most `bytes` are written, those of `info`.
    let got = unsafe {
        let info = (&raw mut info).cast();
        libc::getsockopt(socket.as_fd().as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info, &raw mut bytes)
    };
    match got {
        0 if info.tcpi_unacked > 0 => Duration::from_millis(info.tcpi_last_ack_recv.into()),
        _ => Duration::ZERO,
    }
}
