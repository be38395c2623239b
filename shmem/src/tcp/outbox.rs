//! What is on its way to one peer: written by whoever sends as far as the socket takes it at once, the rest by the progress thread.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::frame::HEADER_BYTES;
use crate::Segment;

/// What follows a header.
pub(super) enum Body<'a> {
    /// Bytes of the caller's, which are copied if the socket does not take them at once.
    Bytes(&'a [u8]),
    /// A part of the own heap, which stays as it is until it is sent.
    Heap(&'a Arc<Segment>, usize, usize),
}

impl Body<'_> {
    fn as_slice(&self) -> &[u8] {
        match *self {
            Body::Bytes(bytes) => bytes,
            Body::Heap(segment, at, bytes) => heap_slice(segment, at, bytes),
        }
    }
}

/// Bytes of a heap, for the kernel to read.
fn heap_slice(segment: &Segment, at: usize, bytes: usize) -> &[u8] {
    let start = segment.address(at, bytes);
    // SAFETY: inside the mapping, which lives as long as the segment. The slice goes to a system call and nowhere else. That nobody
    // writes these bytes before they are sent is the contract of put_nbi and get; if it is broken, unspecified bytes are sent.
    unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes) }
}

/// A frame, or the rest of one, that waits for room in the socket.
struct Waiting {
    header: [u8; HEADER_BYTES],
    rest: Rest,
    /// How much of header and body together is sent.
    sent: usize,
}

enum Rest {
    Bytes(Vec<u8>),
    Heap(Arc<Segment>, usize, usize),
}

impl Waiting {
    fn body(&self) -> &[u8] {
        match &self.rest {
            Rest::Bytes(bytes) => bytes,
            Rest::Heap(segment, at, bytes) => heap_slice(segment, *at, *bytes),
        }
    }

    fn left(&self) -> usize {
        HEADER_BYTES + self.body().len() - self.sent
    }
}

/// The frames for one peer, in their order.
#[derive(Default)]
pub(super) struct Outbox {
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// How many frames were ever given to it.
    pub(super) issued: u64,
    /// The last of them that quiet waits for.
    pub(super) last_op: u64,
    /// Whether the progress thread is told when the socket takes more.
    pub(super) armed: bool,
    /// Nothing more is sent.
    pub(super) closed: bool,
}

impl Outbox {
    /// Bytes that wait for room in the socket.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// Whether the socket has taken everything.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Sends a frame, or queues what the socket does not take.
    pub(super) fn send(&mut self, socket: &OwnedFd, header: [u8; HEADER_BYTES], body: Body<'_>) -> Result<(), Errno> {
        self.issued += 1;
        let sent = match self.waiting.is_empty() {
            true => write(socket, &[IoSlice::new(&header), IoSlice::new(body.as_slice())])?,
            false => 0,
        };
        let bytes = HEADER_BYTES + body.as_slice().len();
        if sent < bytes {
            let (rest, sent) = match body {
                Body::Bytes(bytes) => {
                    // What is sent of them is not copied.
                    let gone = sent.saturating_sub(HEADER_BYTES);
                    (Rest::Bytes(bytes[gone..].to_vec()), sent - gone)
                }
                Body::Heap(segment, at, bytes) => (Rest::Heap(segment.clone(), at, bytes), sent),
            };
            let waiting = Waiting { header, rest, sent };
            self.waiting_bytes += waiting.left();
            self.waiting.push_back(waiting);
        }
        Ok(())
    }

    /// Writes what the socket takes of what waits, `most` bytes or a frame more; says whether it took all that was offered.
    pub(super) fn flush(&mut self, socket: &OwnedFd, most: usize) -> Result<bool, Errno> {
        /// Frames of one call.
        const FRAMES: usize = 32;
        let mut written = 0;
        while !self.waiting.is_empty() && written < most {
            let mut parts = Vec::with_capacity(2 * FRAMES);
            let mut offered = 0;
            for frame in self.waiting.iter().take(FRAMES) {
                let header = &frame.header[frame.sent.min(HEADER_BYTES)..];
                let body = &frame.body()[frame.sent.saturating_sub(HEADER_BYTES)..];
                parts.extend([IoSlice::new(header), IoSlice::new(body)]);
                offered += frame.left();
                if offered >= most {
                    break;
                }
            }
            let sent = write(socket, &parts)?;
            drop(parts);
            written += sent;
            self.waiting_bytes -= sent;
            self.advance(sent);
            if sent < offered {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn advance(&mut self, mut sent: usize) {
        while let Some(first) = self.waiting.front_mut() {
            let left = first.left();
            if sent < left {
                first.sent += sent;
                return;
            }
            sent -= left;
            self.waiting.pop_front();
        }
    }

    /// Forgets what waits: nobody will take it.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.waiting.clear();
        self.waiting_bytes = 0;
    }
}

/// Writes what the socket takes now.
fn write(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match retry_on_intr(|| sendmsg(socket.as_fd(), parts, &mut SendAncillaryBuffer::default(), flags)) {
        Err(Errno::AGAIN) => Ok(0),
        sent => sent,
    }
}
