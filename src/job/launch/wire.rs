//! Frames on the control socket between the supervisor and one PE, and on that between rank 0 and another launched process.
//!
//! A frame is a 16-byte header (kind u32, number of files u32, body length u64, little endian), then the body. Files
//! travel as `SCM_RIGHTS` with the header's first byte, so that they are there when the frame is complete.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::shmem::fds;
pub(super) use crate::shmem::fds::MAX_FILES;

/// No frame is larger; a header that says otherwise is not one of ours.
const MAX_BODY_BYTES: u64 = 1 << 32;
const HEADER_BYTES: usize = 16;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    /// PE: I run. No body.
    Hello = 1,
    /// Supervisor: the status page, the request, then the job's files; the body is the files' names, each ended by a zero byte.
    Files,
    /// PE: my segment (one file); the body is its size in bytes, u64.
    Segment,
    /// Supervisor: the next PEs' segments, in PE order, at most [`MAX_FILES`] a frame. No body.
    Segments,
    /// PE: a message for the caller of [`Processes::run`](super::Processes::run).
    Message,
    /// PE: I have ended well. No body.
    Done,
    /// PE: I have failed; the body is one line, UTF-8.
    Fail,
    /// PE: I have failed because another did not answer; the body is its number, native usize, and one line.
    FailOn,
    /// Launched process to rank 0: asks to join; the body is a `Hello`.
    Join,
    /// Rank 0: admitted. No body.
    Joined,
    /// Rank 0: refused; the body says why, UTF-8.
    Refused,
    /// Rank 0: start a PE with this socket (one file); the body is a `Start`.
    Start,
    /// Launched process: it could not be started; the body is the system's error, i32.
    Unstarted,
    /// Launched process: it has ended; the body is its status as wait(2) has it, i32.
    Ended,
    /// Rank 0: kill the PE. No body.
    Kill,
    /// Rank 0: it is over; the body is the exit code, u8.
    Verdict,
    /// PE: I have stopped, as a PE is lost; the body is how many steps are final here, and of how many it has the results, both u64.
    Stopped,
    /// Supervisor: go on; the body is a `GoOn`.
    GoOn,
    /// PE: all steps are final; from now on the loss of a PE is the job's failure. No body.
    Final,
}

impl Kind {
    const ALL: [Kind; 19] = [
        Kind::Hello,
        Kind::Files,
        Kind::Segment,
        Kind::Segments,
        Kind::Message,
        Kind::Done,
        Kind::Fail,
        Kind::FailOn,
        Kind::Join,
        Kind::Joined,
        Kind::Refused,
        Kind::Start,
        Kind::Unstarted,
        Kind::Ended,
        Kind::Kill,
        Kind::Verdict,
        Kind::Stopped,
        Kind::GoOn,
        Kind::Final,
    ];

    fn from_code(code: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == code)
    }
}

/// A received frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) body: Vec<u8>,
    pub(super) files: Vec<OwnedFd>,
}

fn header(kind: Kind, n_files: usize, body_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    header[4..8].copy_from_slice(&(n_files as u32).to_le_bytes());
    header[8..].copy_from_slice(&(body_bytes as u64).to_le_bytes());
    header
}

/// Sends one frame on a blocking socket.
pub(super) fn send(socket: BorrowedFd<'_>, kind: Kind, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let header = header(kind, files.len(), body.len());
    let mut sent = 0;
    while sent < HEADER_BYTES + body.len() {
        let head = &header[sent.min(HEADER_BYTES)..];
        let tail = &body[sent.saturating_sub(HEADER_BYTES)..];
        let files = if sent == 0 { files } else { &[] };
        sent += fds::send(socket, &[IoSlice::new(head), IoSlice::new(tail)], files, SendFlags::empty())?;
    }
    Ok(())
}

/// Frames on their way to a PE over a socket that must not block the supervisor.
#[derive(Default)]
pub(super) struct Outbox {
    queue: VecDeque<Outgoing>,
}

struct Outgoing {
    /// Header and body.
    bytes: Vec<u8>,
    /// How many of them are sent.
    sent: usize,
    /// Shared among the PEs' outboxes; this frame carries `files[range]`.
    files: Arc<[OwnedFd]>,
    range: Range<usize>,
}

impl Outbox {
    /// Adds a frame with `files[range]`.
    pub(super) fn push(&mut self, kind: Kind, body: &[u8], files: Arc<[OwnedFd]>, range: Range<usize>) {
        let mut bytes = header(kind, range.len(), body.len()).to_vec();
        bytes.extend_from_slice(body);
        self.queue.push_back(Outgoing { bytes, sent: 0, files, range });
    }

    /// Whether everything has been handed to the socket.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends what the socket takes now. `TOOMANYREFS` (the limit on files in flight, the same as that on open files)
    /// passes as the PEs take theirs: it counts as a full socket.
    pub(super) fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        while let Some(Outgoing { bytes, sent, files, range }) = self.queue.front_mut() {
            let borrowed: Vec<BorrowedFd<'_>> =
                if *sent == 0 { files[range.clone()].iter().map(AsFd::as_fd).collect() } else { Vec::new() };
            match fds::send(socket, &[IoSlice::new(&bytes[*sent..])], &borrowed, SendFlags::DONTWAIT) {
                Ok(n) => *sent += n,
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => return Ok(()),
                Err(error) => return Err(error),
            }
            if *sent == bytes.len() {
                self.queue.pop_front();
            }
        }
        Ok(())
    }
}

/// Bytes and files received and not yet taken as frames.
#[derive(Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    files: VecDeque<OwnedFd>,
}

impl Inbox {
    /// Receives once into `scratch` and keeps it; returns the number of bytes, 0 at the end of the stream.
    pub(super) fn fill(
        &mut self,
        socket: BorrowedFd<'_>,
        scratch: &mut [u8],
        flags: RecvFlags,
    ) -> Result<usize, Errno> {
        let bytes = fds::receive(socket, &mut [IoSliceMut::new(scratch)], &mut self.files, flags)?;
        self.bytes.extend_from_slice(&scratch[..bytes]);
        Ok(bytes)
    }

    /// Takes the next complete frame.
    ///
    /// # Errors
    /// One line, when what came is not a frame, or when its files were lost (no room in the table of open files).
    pub(super) fn next(&mut self) -> Result<Option<Frame>, String> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let body_bytes = u64::from(word(8)) | u64::from(word(12)) << 32;
        let kind = Kind::from_code(word(0)).filter(|_| body_bytes <= MAX_BODY_BYTES);
        let Some(kind) = kind else {
            return Err(format!("unknown frame (kind {}, {body_bytes} bytes)", word(0)));
        };
        if (rest.len() as u64) < body_bytes {
            return Ok(None);
        }
        let n_files = word(4) as usize;
        if self.files.len() < n_files {
            return Err(format!(
                "{} of {n_files} files of a {kind:?} frame arrived: the limit on open files (ulimit -n) is too low",
                self.files.len()
            ));
        }
        let end = HEADER_BYTES + body_bytes as usize;
        let rest = self.bytes.split_off(end);
        let mut body = std::mem::replace(&mut self.bytes, rest);
        body.drain(..HEADER_BYTES);
        Ok(Some(Frame { kind, body, files: self.files.drain(..n_files).collect() }))
    }
}

/// A file that holds nothing and takes everything.
pub(super) fn dev_null() -> std::io::Result<File> {
    File::options().read(true).write(true).open("/dev/null")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// Receives everything that is there, `step` bytes at a time.
    fn receive(socket: &OwnedFd, step: usize) -> Vec<Frame> {
        let (mut inbox, mut frames, mut scratch) = (Inbox::default(), Vec::new(), vec![0; step]);
        while let Ok(n) = inbox.fill(socket.as_fd(), &mut scratch, RecvFlags::DONTWAIT) {
            if n == 0 {
                break;
            }
            while let Some(frame) = inbox.next().unwrap() {
                frames.push(frame);
            }
        }
        frames
    }

    #[test]
    fn frames_and_files_survive_any_fragmentation() {
        for step in [1, 3, 16, 17, 4096] {
            let (a, b) = pair();
            let null = dev_null().unwrap();
            send(a.as_fd(), Kind::Hello, b"", &[]).unwrap();
            send(a.as_fd(), Kind::Segment, b"12345678", &[null.as_fd()]).unwrap();
            send(a.as_fd(), Kind::Message, &[7; 300], &[]).unwrap();
            send(a.as_fd(), Kind::Segments, b"", &vec![null.as_fd(); MAX_FILES]).unwrap();
            let frames = receive(&b, step);
            let seen: Vec<_> = frames.iter().map(|f| (f.kind, f.body.len(), f.files.len())).collect();
            let want =
                [(Kind::Hello, 0, 0), (Kind::Segment, 8, 1), (Kind::Message, 300, 0), (Kind::Segments, 0, MAX_FILES)];
            assert_eq!(seen, want, "step {step}");
        }
    }

    #[test]
    fn an_outbox_resumes_where_the_socket_was_full() {
        let (a, b) = pair();
        let mut outbox = Outbox::default();
        let files: Arc<[OwnedFd]> = Arc::from([OwnedFd::from(dev_null().unwrap())]);
        for _ in 0..3 {
            outbox.push(Kind::Message, &vec![5; 1 << 20], files.clone(), 0..1);
        }
        let (mut inbox, mut scratch, mut seen) = (Inbox::default(), vec![0; 1 << 16], 0);
        while seen < 3 {
            outbox.flush(a.as_fd()).unwrap();
            inbox.fill(b.as_fd(), &mut scratch, RecvFlags::DONTWAIT).unwrap();
            while let Some(frame) = inbox.next().unwrap() {
                assert_eq!((frame.body.len(), frame.files.len()), (1 << 20, 1));
                seen += 1;
            }
        }
        assert!(outbox.is_empty());
    }

    #[test]
    fn garbage_and_lost_files_are_errors() {
        let (a, b) = pair();
        rustix::io::write(&a, &[0xff; 32]).unwrap();
        let mut inbox = Inbox::default();
        inbox.fill(b.as_fd(), &mut [0; 64], RecvFlags::DONTWAIT).unwrap();
        assert!(inbox.next().unwrap_err().starts_with("unknown frame"));

        let (a, b) = pair();
        rustix::io::write(&a, &header(Kind::Segment, 1, 0)).unwrap();
        let mut inbox = Inbox::default();
        inbox.fill(b.as_fd(), &mut [0; 64], RecvFlags::DONTWAIT).unwrap();
        assert!(inbox.next().unwrap_err().contains("0 of 1 files"));
    }
}
