//! Frames on their way to one peer: the sending thread writes as much as the socket has room for, the progress thread the rest.
//!
//! One thread at a time writes, without holding the lock: other senders queue their frames and continue.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::frame::HEADER_BYTES;
use crate::Segment;

/// Locks, even after a panic: no holder leaves inconsistent state, and a panic of the progress thread is reported elsewhere.
pub(crate) fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The body of a frame.
pub(super) enum Body<'a> {
    /// The caller's bytes, copied if the socket has no room for them.
    Bytes(&'a [u8]),
    /// A part of this PE's heap, which must not change until it is sent.
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
    // SAFETY: inside the mapping, which lives as long as the segment. The slice is only passed to a system call. The contract of put_nbi
    // and get excludes writes to these bytes before they are sent; a caller that breaks it sends unspecified bytes.
    unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes) }
}

/// A frame, or the rest of one, that waits for room in the socket.
struct Waiting {
    header: [u8; HEADER_BYTES],
    rest: Rest,
    /// Number of bytes of header and body that are sent.
    sent: usize,
}

enum Rest {
    Bytes(Vec<u8>),
    Heap(Arc<Segment>, usize, usize),
}

impl Waiting {
    /// A frame of which `sent` bytes are sent.
    fn new(header: [u8; HEADER_BYTES], body: &Body<'_>, sent: usize) -> Waiting {
        match *body {
            Body::Bytes(bytes) => {
                // Bytes that are already sent are not copied.
                let gone = sent.saturating_sub(HEADER_BYTES);
                Waiting { header, rest: Rest::Bytes(bytes[gone..].to_vec()), sent: sent - gone }
            }
            Body::Heap(segment, at, bytes) => Waiting { header, rest: Rest::Heap(segment.clone(), at, bytes), sent },
        }
    }

    /// The unsent parts of header and body.
    fn parts(&self) -> [IoSlice<'_>; 2] {
        let header = &self.header[self.sent.min(HEADER_BYTES)..];
        [IoSlice::new(header), IoSlice::new(&self.body()[self.sent.saturating_sub(HEADER_BYTES)..])]
    }

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
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Length of the queued frames and those being written, bytes.
    waiting_bytes: usize,
    /// Whether a thread is writing; its frames precede all queued ones.
    writing: bool,
    /// Number of frames issued.
    issued: u64,
    /// The number of the last frame that quiet waits for.
    last_op: u64,
    /// Set once further frames are discarded.
    closed: bool,
}

/// The outgoing queue of one peer.
#[derive(Default)]
pub(super) struct Outbox(Mutex<Queue>);

/// Maximum frames written in one call.
const BATCH_FRAMES: usize = 32;
/// Bytes after which a batch is large enough.
const BATCH_BYTES: usize = 1 << 20;

impl Outbox {
    /// Bytes that the socket has not accepted.
    pub(super) fn waiting_bytes(&self) -> usize {
        lock(&self.0).waiting_bytes
    }

    /// The number of the last frame that quiet waits for.
    pub(super) fn last_op(&self) -> u64 {
        lock(&self.0).last_op
    }

    /// Sends a frame, and queues the part that the socket has no room for. Quiet waits for it if `is_op`. Returns the frame's number, and whether
    /// bytes are queued now.
    pub(super) fn send(
        &self,
        socket: &OwnedFd,
        header: impl FnOnce() -> [u8; HEADER_BYTES],
        body: Body<'_>,
        is_op: bool,
    ) -> Result<(u64, bool), Errno> {
        let mut queue = lock(&self.0);
        if queue.closed {
            return Ok((queue.issued, false));
        }
        queue.issued += 1;
        let number = queue.issued;
        if is_op {
            queue.last_op = number;
        }
        // Built under the lock, so that frames queued before an operation completed precede its acknowledgement.
        let header = header();
        let bytes = HEADER_BYTES + body.as_slice().len();
        queue.waiting_bytes += bytes;
        if queue.writing || !queue.waiting.is_empty() {
            queue.waiting.push_back(Waiting::new(header, &body, 0));
            return Ok((number, true));
        }
        queue.writing = true;
        drop(queue);
        let written = write(socket, &[IoSlice::new(&header), IoSlice::new(body.as_slice())]);
        let rest = match written {
            Ok(sent) if sent < bytes => Some(Waiting::new(header, &body, sent)),
            _ => None,
        };
        self.written(written, rest.into_iter().collect()).map(|waits| (number, waits))
    }

    /// Writes queued frames, as far as the socket has room; returns whether more are queued.
    pub(super) fn flush(&self, socket: &OwnedFd) -> Result<bool, Errno> {
        loop {
            let mut queue = lock(&self.0);
            if queue.writing || queue.waiting.is_empty() {
                // The writing thread will see queued frames, and report them.
                return Ok(false);
            }
            let mut batch = VecDeque::new();
            let mut offered = 0;
            while batch.len() < BATCH_FRAMES && offered < BATCH_BYTES {
                let Some(frame) = queue.waiting.pop_front() else { break };
                offered += frame.left();
                batch.push_back(frame);
            }
            queue.writing = true;
            drop(queue);
            let parts: Vec<IoSlice<'_>> = batch.iter().flat_map(Waiting::parts).collect();
            let written = write(socket, &parts);
            drop(parts);
            advance(&mut batch, written.unwrap_or(0));
            let all = batch.is_empty();
            if !self.written(written, batch)? || !all {
                return Ok(!all);
            }
        }
    }

    /// After a write by this thread: returns the unsent frames to the queue; returns whether bytes are queued.
    fn written(&self, written: Result<usize, Errno>, rest: VecDeque<Waiting>) -> Result<bool, Errno> {
        let mut queue = lock(&self.0);
        queue.writing = false;
        let sent = written?;
        if queue.closed {
            return Ok(false);
        }
        queue.waiting_bytes -= sent;
        rest.into_iter().rev().for_each(|frame| queue.waiting.push_front(frame));
        Ok(!queue.waiting.is_empty())
    }

    /// Discards the queued frames and all later ones: the peer is lost.
    pub(super) fn close(&self) {
        let mut queue = lock(&self.0);
        queue.closed = true;
        queue.waiting.clear();
        queue.waiting_bytes = 0;
    }
}

/// Removes `sent` bytes from the front of the batch.
fn advance(batch: &mut VecDeque<Waiting>, mut sent: usize) {
    while let Some(first) = batch.front_mut() {
        let left = first.left();
        if sent < left {
            first.sent += sent;
            return;
        }
        sent -= left;
        batch.pop_front();
    }
}

/// Writes as much as the socket has room for.
fn write(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match retry_on_intr(|| sendmsg(socket.as_fd(), parts, &mut SendAncillaryBuffer::default(), flags)) {
        Err(Errno::AGAIN) => Ok(0),
        sent => sent,
    }
}
