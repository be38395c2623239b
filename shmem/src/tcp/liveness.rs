//! Silent hosts: how long a connection has waited for an acknowledgement.
//!
//! `TCP_USER_TIMEOUT` would abort a connection that has recovered. A segment lost in a partition of 4 s and delivered at the third attempt can look
//! like a round trip of seconds; the next retransmission is then scheduled after the timeout, which counts from the first attempt, and the
//! connection ends before it. So silence is measured by acknowledgements, and the kernel, if it can, retransmits at short intervals.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// linux/tcp.h, since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Retransmits unacknowledged data at least once a second. Older kernels have no such limit: their interval doubles with each attempt.
pub(super) fn limit_retransmission(socket: impl AsFd) {
    // The option's minimum.
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

/// Time without an acknowledgement while data is unacknowledged; otherwise zero: keepalive then detects a silent host.
pub(super) fn silent_for(socket: impl AsFd) -> Duration {
    // SAFETY: the struct consists of integers, so all-zero bytes are valid.
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
