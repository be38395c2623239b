//! What is on its way to one peer: written by whoever sends as far as the socket takes it at once, the rest by the progress thread.
//!
//! One thread at a time writes, and does so without the lock: who sends meanwhile queues its frame and goes on.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::frame::HEADER_BYTES;
use crate::Segment;

/// A lock whose holder cannot have left half a change: what panics under it has reported it.
pub(crate) fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    /// Of a frame of which `sent` bytes are sent.
    fn new(header: [u8; HEADER_BYTES], body: &Body<'_>, sent: usize) -> Waiting {
        match *body {
            Body::Bytes(bytes) => {
                // What is sent of them is not copied.
                let gone = sent.saturating_sub(HEADER_BYTES);
                Waiting { header, rest: Rest::Bytes(bytes[gone..].to_vec()), sent: sent - gone }
            }
            Body::Heap(segment, at, bytes) => Waiting { header, rest: Rest::Heap(segment.clone(), at, bytes), sent },
        }
    }

    /// What is left of it.
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
    /// Of those that wait, and of those that are being written.
    waiting_bytes: usize,
    /// Whether a thread writes: what it has taken comes before all that waits.
    writing: bool,
    /// How many frames were ever given to it.
    issued: u64,
    /// The last of them that quiet waits for.
    last_op: u64,
    /// Nothing more is sent.
    closed: bool,
}

/// The way out to one peer.
#[derive(Default)]
pub(super) struct Outbox(Mutex<Queue>);

/// Frames that are taken out of the queue to be written at once.
const BATCH_FRAMES: usize = 32;
/// Bytes after which a batch is large enough.
const BATCH_BYTES: usize = 1 << 20;

impl Outbox {
    /// Bytes that the socket has not taken.
    pub(super) fn waiting_bytes(&self) -> usize {
        lock(&self.0).waiting_bytes
    }

    /// The number of the last frame that quiet waits for.
    pub(super) fn last_op(&self) -> u64 {
        lock(&self.0).last_op
    }

    /// Sends the frame that `header` makes, as an operation that quiet waits for or not, or queues what the socket does not take. Returns its
    /// number, and whether something waits now.
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
        // Under the lock, so that what was queued before a frame was carried out goes before who says that it was.
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

    /// Writes what waits, as far as the socket takes it; says whether more waits.
    pub(super) fn flush(&self, socket: &OwnedFd) -> Result<bool, Errno> {
        loop {
            let mut queue = lock(&self.0);
            if queue.writing || queue.waiting.is_empty() {
                // Who writes will find what waits, and say so.
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

    /// After a write of its own: gives back what the socket has not taken, and says whether anything waits.
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

    /// Forgets what waits, and sends nothing more: nobody will take it.
    pub(super) fn close(&self) {
        let mut queue = lock(&self.0);
        queue.closed = true;
        queue.waiting.clear();
        queue.waiting_bytes = 0;
    }
}

/// Takes what is sent off the batch.
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

/// Writes what the socket takes now.
fn write(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match retry_on_intr(|| sendmsg(socket.as_fd(), parts, &mut SendAncillaryBuffer::default(), flags)) {
        Err(Errno::AGAIN) => Ok(0),
        sent => sent,
    }
}
