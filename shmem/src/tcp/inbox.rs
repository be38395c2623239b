//! What comes from one peer: headers through a buffer, bodies to their final place.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use super::frame::{HEADER_BYTES, Header};
use crate::Segment;

/// What is read at once behind a body: headers, and bodies that are not worth a call each.
const BUFFER_BYTES: usize = 32 << 10;

/// Where a body goes.
pub(super) enum Sink {
    /// To the own heap, from this offset on.
    Heap(Arc<Segment>, usize),
    /// To a buffer of its length.
    Buffer(Vec<u8>),
}

/// A frame whose body is not all there.
struct Arriving {
    header: Header,
    sink: Sink,
    here: usize,
}

impl Arriving {
    fn left(&self) -> usize {
        self.header.body_bytes() as usize - self.here
    }

    /// The place of what is still to come.
    fn rest(&mut self) -> &mut [u8] {
        let (here, left) = (self.here, self.left());
        match &mut self.sink {
            Sink::Heap(segment, at) => {
                let start = segment.address(*at + here, left);
                // SAFETY: inside the mapping, which lives as long as the segment. The slice goes to a system call or is the destination
                // of a copy, and is gone after it. That nobody else accesses these bytes meanwhile is the contract of put and
                // get_nbi (`segment.rs` says what holds where a peer breaks it).
                unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), left) }
            }
            Sink::Buffer(buffer) => &mut buffer[here..],
        }
    }
}

/// The stream from one peer.
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    /// What of it is still to be looked at.
    start: usize,
    end: usize,
    arriving: Option<Arriving>,
}

/// What [`Inbox::receive`] found.
pub(super) enum Received {
    /// Something; there may be more.
    Bytes,
    /// Nothing more for now.
    Nothing,
    /// The stream is at its end.
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

    /// The next frame that is all there, with its body if that went to a buffer. `place` says where a body goes.
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
