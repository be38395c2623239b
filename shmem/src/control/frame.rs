//! Frames of the control plane: between callers and acceptors at a rendezvous, a supervisor and its PEs, rank 0 and the other ranks' processes.
//!
//! A frame is a 16-byte header (kind u32, number of files u32, body length u64, little endian), then the body. Over a Unix socket files
//! travel as `SCM_RIGHTS` with the header's first byte, so that they have arrived when the frame is complete.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::fds;
pub use crate::fds::MAX_FILES;

/// Maximum body length, bytes. A longer one marks an invalid header.
const MAX_BODY_BYTES: u64 = 1 << 32;
const HEADER_BYTES: usize = 16;
/// Time between attempts to send files while too many are in flight.
const RETRY: Duration = Duration::from_millis(2);

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Caller: asks to join; the body is a [`Hello`](super::Hello).
    Join = 1,
    /// Acceptor: its nonce and its proof.
    Challenge,
    /// Caller: its proof.
    Proof,
    /// Acceptor: the caller is admitted.
    Accepted,
    /// Acceptor: the caller is refused; the body says why, UTF-8.
    Refused,
    /// Acceptor: the data that the ranks need about each other, once all have joined.
    World,
    /// PE: it has started; the body is its process id, u32.
    Running,
    /// Supervisor: the status page, the request, then the job's files; the body is the files' names, each ended by a zero byte.
    Files,
    /// PE: its segment (one file); the body is its size in bytes, u64.
    Segment,
    /// Supervisor: the next PEs' segments, in PE order, at most [`MAX_FILES`] a frame. No body.
    Segments,
    /// PE: a message for the job's report.
    Message,
    /// PE: its part ended well. No body.
    Done,
    /// PE: it failed; the body is one line, UTF-8.
    Fail,
    /// PE: it failed because another PE did not answer; the body is that PE's number, native usize, and one line.
    FailOn,
    /// Rank 0: start a PE with this socket (one file); the body is JSON.
    Start,
    /// Parent of a PE: the PE could not be started; the body is the system's error, i32.
    Unstarted,
    /// Parent of a PE: the PE has ended; the body is its wait(2) status, i32.
    Ended,
    /// Rank 0: kill the PE. No body.
    Kill,
    /// Rank 0: the command has ended; the body is its exit code, u8.
    Verdict,
    /// PE: it stopped because a PE is lost; the body is the number of final steps and of steps with results, both u64.
    Stopped,
    /// Supervisor: continue without the lost PEs; the body is JSON.
    Continuation,
    /// PE: all steps are final; from now on the loss of a PE is the job's failure. No body.
    Final,
}

impl Kind {
    const ALL: [Kind; 22] = [
        Kind::Join,
        Kind::Challenge,
        Kind::Proof,
        Kind::Accepted,
        Kind::Refused,
        Kind::World,
        Kind::Running,
        Kind::Files,
        Kind::Segment,
        Kind::Segments,
        Kind::Message,
        Kind::Done,
        Kind::Fail,
        Kind::FailOn,
        Kind::Start,
        Kind::Unstarted,
        Kind::Ended,
        Kind::Kill,
        Kind::Verdict,
        Kind::Stopped,
        Kind::Continuation,
        Kind::Final,
    ];

    fn from_code(code: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == code)
    }
}

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    /// Its kind.
    pub kind: Kind,
    /// Its body.
    pub body: Vec<u8>,
    /// The files that it carries.
    pub files: Vec<OwnedFd>,
}

fn header(kind: Kind, n_files: usize, body_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    header[4..8].copy_from_slice(&(n_files as u32).to_le_bytes());
    header[8..].copy_from_slice(&(body_bytes as u64).to_le_bytes());
    header
}

/// Sends one frame on a blocking socket.
///
/// # Errors
/// The system's error.
pub fn send(socket: BorrowedFd<'_>, kind: Kind, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
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

/// Sends one frame, blocking until `until` at most.
///
/// # Errors
/// `TIMEDOUT`, or the system's.
pub fn send_by(
    socket: BorrowedFd<'_>,
    kind: Kind,
    body: &[u8],
    files: &[BorrowedFd<'_>],
    until: Instant,
) -> Result<(), Errno> {
    let header = header(kind, files.len(), body.len());
    let mut sent = 0;
    while sent < HEADER_BYTES + body.len() {
        let head = &header[sent.min(HEADER_BYTES)..];
        let tail = &body[sent.saturating_sub(HEADER_BYTES)..];
        let files = if sent == 0 { files } else { &[] };
        match fds::send(socket, &[IoSlice::new(head), IoSlice::new(tail)], files, SendFlags::DONTWAIT) {
            Ok(bytes) => sent += bytes,
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, until)?,
            // Too many files are in flight; the error ends when other processes receive theirs.
            Err(Errno::TOOMANYREFS) if Instant::now() < until => std::thread::sleep(RETRY),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives the next frame. The deadline is for the whole frame, however its bytes arrive.
///
/// # Errors
/// `TimedOut`; `UnexpectedEof` at the end of the stream; `InvalidData` if the bytes are no frame, or its body has more than `max_body` bytes;
/// the system's.
pub fn receive_by(socket: BorrowedFd<'_>, inbox: &mut Inbox, max_body: usize, until: Instant) -> io::Result<Frame> {
    let mut scratch = [0; 4096];
    loop {
        if let Some(frame) = inbox.next().map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))? {
            return Ok(frame);
        }
        if inbox.bytes.len() > max_body + HEADER_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame that is too long"));
        }
        wait(socket, PollFlags::IN, until)?;
        match inbox.fill(socket, &mut scratch, RecvFlags::DONTWAIT) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Blocks until the socket is ready, in error, or `until` has passed (`TIMEDOUT`).
fn wait(socket: BorrowedFd<'_>, ready: PollFlags, until: Instant) -> Result<(), Errno> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        let left = Timespec::try_from(left.min(Duration::from_secs(3600))).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&socket, ready)], Some(&left)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Frames that wait for room in a nonblocking socket.
#[derive(Default)]
pub struct Outbox {
    queue: VecDeque<Outgoing>,
}

struct Outgoing {
    /// Header and body.
    bytes: Vec<u8>,
    /// Number of them already sent.
    sent: usize,
    /// Shared by the PEs' outboxes; this frame carries `files[range]`.
    files: Arc<[OwnedFd]>,
    range: Range<usize>,
}

impl Outbox {
    /// Adds a frame with `files[range]`.
    pub fn push(&mut self, kind: Kind, body: &[u8], files: Arc<[OwnedFd]>, range: Range<usize>) {
        let mut bytes = header(kind, range.len(), body.len()).to_vec();
        bytes.extend_from_slice(body);
        self.queue.push_back(Outgoing { bytes, sent: 0, files, range });
    }

    /// Whether the socket has accepted every frame.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends as much as the socket accepts now. `TOOMANYREFS` (the limit on files in flight equals that on open files) ends when the PEs
    /// receive their files, so it is treated as a full socket.
    ///
    /// # Errors
    /// The system's error.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
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

/// Bytes and files received, but not yet taken as frames.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    files: VecDeque<OwnedFd>,
}

impl Inbox {
    /// Receives once, through `scratch`; returns the number of bytes, 0 at the end of the stream.
    ///
    /// # Errors
    /// The system's.
    pub fn fill(&mut self, socket: BorrowedFd<'_>, scratch: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
        let bytes = fds::receive(socket, &mut [IoSliceMut::new(scratch)], &mut self.files, flags)?;
        self.bytes.extend_from_slice(&scratch[..bytes]);
        Ok(bytes)
    }

    /// Adds bytes that were received without files.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next complete frame.
    ///
    /// # Errors
    /// One line, if the bytes are not a frame, or its files were lost (no room in the table of open files).
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Frame>, String> {
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

#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests {
    use std::fs::File;

    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn dev_null() -> io::Result<File> {
        File::options().read(true).write(true).open("/dev/null")
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// Receives until the end of the stream, `step` bytes at a time.
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
            send(a.as_fd(), Kind::Running, b"", &[]).unwrap();
            send(a.as_fd(), Kind::Segment, b"12345678", &[null.as_fd()]).unwrap();
            send(a.as_fd(), Kind::Message, &[7; 300], &[]).unwrap();
            send(a.as_fd(), Kind::Segments, b"", &vec![null.as_fd(); MAX_FILES]).unwrap();
            let frames = receive(&b, step);
            let seen: Vec<_> = frames.iter().map(|f| (f.kind, f.body.len(), f.files.len())).collect();
            let want =
                [(Kind::Running, 0, 0), (Kind::Segment, 8, 1), (Kind::Message, 300, 0), (Kind::Segments, 0, MAX_FILES)];
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
