//! The stream from one peer: headers pass through a buffer, bodies are received at their final place.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use super::frame::{HEADER_BYTES, Header};
use crate::Segment;

/// Bytes read behind a body in the same call: headers and small bodies.
const BUFFER_BYTES: usize = 32 << 10;

/// The destination of a body.
pub(super) enum Sink {
    /// This PE's heap, from this offset on.
    Heap(Arc<Segment>, usize),
    /// A buffer of the body's length.
    Buffer(Vec<u8>),
}

/// A frame whose body has arrived in part.
struct Arriving {
    header: Header,
    sink: Sink,
    here: usize,
}

impl Arriving {
    fn left(&self) -> usize {
        self.header.body_bytes() as usize - self.here
    }

    /// The destination of the missing bytes.
    fn rest(&mut self) -> &mut [u8] {
        let (here, left) = (self.here, self.left());
        match &mut self.sink {
            Sink::Heap(segment, at) => {
                let start = segment.address(*at + here, left);
                // SAFETY: inside the mapping, which lives as long as the segment. The slice is used for one system call or one copy.
                // The contract of put and get_nbi excludes other accesses meanwhile (`segment.rs` covers peers that
                // break it).
                unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), left) }
            }
            Sink::Buffer(buffer) => &mut buffer[here..],
        }
    }
}

/// The stream from one peer.
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    /// Start of the bytes in `buffer` that are not parsed yet.
    start: usize,
    end: usize,
    arriving: Option<Arriving>,
}

/// The result of [`Inbox::receive`].
pub(super) enum Received {
    /// Some bytes arrived; more may be waiting.
    Bytes,
    /// The socket is empty.
    Nothing,
    /// The stream has ended.
    End,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        Inbox { buffer: vec![0; BUFFER_BYTES].into(), start: 0, end: 0, arriving: None }
    }

    /// Whether the stream is between two frames.
    pub(super) fn is_between_frames(&self) -> bool {
        self.arriving.is_none() && self.start == self.end
    }

    /// Reads once.
    pub(super) fn receive(&mut self, socket: &OwnedFd) -> Result<Received, Errno> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < HEADER_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let (rest, left) = match &mut self.arriving {
            Some(arriving) => (arriving.left(), IoSliceMut::new(arriving.rest())),
            None => (0, IoSliceMut::new(&mut [])),
        };
        let mut parts = [left, IoSliceMut::new(&mut self.buffer[self.end..])];
        let flags = RecvFlags::DONTWAIT;
        let mut ancillary = RecvAncillaryBuffer::default();
        let bytes = match retry_on_intr(|| recvmsg(socket.as_fd(), &mut parts, &mut ancillary, flags)) {
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            received => received?.bytes,
        };
        if bytes == 0 {
            return Ok(Received::End);
        }
        if let Some(arriving) = &mut self.arriving {
            arriving.here += bytes.min(rest);
        }
        self.end += bytes.saturating_sub(rest);
        Ok(Received::Bytes)
    }

    /// The next complete frame, with its body if that was received in a buffer. `place` returns the destination of a body.
    pub(super) fn next<E>(
        &mut self,
        place: impl FnOnce(&Header) -> Result<Sink, E>,
        invalid: impl FnOnce() -> E,
    ) -> Result<Option<(Header, Vec<u8>)>, E> {
        if self.arriving.is_none() {
            let Some((bytes, _)) = self.buffer[self.start..self.end].split_first_chunk::<HEADER_BYTES>() else {
                return Ok(None);
            };
            let header = Header::from_bytes(bytes).ok_or_else(invalid)?;
            self.start += HEADER_BYTES;
            let sink = place(&header)?;
            self.arriving = Some(Arriving { header, sink, here: 0 });
        }
        let Some(mut arriving) = self.arriving.take() else { return Ok(None) };
        let here = arriving.left().min(self.end - self.start);
        arriving.rest()[..here].copy_from_slice(&self.buffer[self.start..self.start + here]);
        self.start += here;
        arriving.here += here;
        if arriving.left() > 0 {
            self.arriving = Some(arriving);
            return Ok(None);
        }
        let body = match arriving.sink {
            Sink::Buffer(body) => body,
            Sink::Heap(..) => Vec::new(),
        };
        Ok(Some((arriving.header, body)))
    }
}
