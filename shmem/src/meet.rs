//! How processes of one host that did not start together become a world: PE 0 listens at a Unix socket with an abstract name (no file is left
//! behind), the others call it and send their segments and pidfds, and each receives all of them. By the pidfds a wait for a process that has
//! ended fails at once.
//!
//! Both sides prove that they know the key ([`crate::control`]), and the kernel tells each which user's process is at the other end: another
//! user's is refused. Segments travel as `SCM_RIGHTS`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::{Segment, ShmTransport, ShmemError, check_heap};
use crate::control::frame::{Kind, receive_by, send_by};
use crate::control::{Attempt, CallError, Gate, Hello, Introduction, Joined, Key, Link, call, local};

/// Maximum number of files in a frame.
const FILES_PER_FRAME: usize = 16;
/// Maximum length of a frame's body, bytes.
const MAX_BODY_BYTES: usize = 1 << 12;
/// How much longer the others wait than PE 0, which knows which PE is missing.
const GRACE: Duration = Duration::from_secs(1);
/// The program name in every PE's hello. Every change to the PEs' messages increases the number in it.
const PROGRAM: &str = "aristos meet 3";

/// Makes a world of `n_pes` processes of this host, which call this with the same `key`, `n_pes` and `heap_bytes` (as for
/// [`crate::threads`]), and different `my_pe`. Collective; returns when all have joined.
///
/// Only these processes of the user may have `key`; it can be a random number that one of them has drawn.
///
/// # Errors
/// One line: another process has this key; a PE has not joined by the `deadline`, or expects another world; the heap is too small, or
/// larger than the host's memory.
pub fn meet(
    key: &str,
    my_pe: usize,
    n_pes: usize,
    heap_bytes: usize,
    deadline: Instant,
) -> Result<ShmTransport, ShmemError> {
    if my_pe >= n_pes {
        return Err(meeting(format!("PE {my_pe} of {n_pes}: expected a number below that of PEs")));
    }
    check_heap(n_pes, heap_bytes)?;
    let own = Segment::create(&format!("aristos-{my_pe}"), heap_bytes)?;
    let user = rustix::process::geteuid().as_raw();
    let name = format!("aristos-meet-{user}-{key}");
    if name.len() > local::MAX_NAME_BYTES {
        return Err(meeting(format!("the key {key:?} is too long for a socket's name")));
    }
    let place = Place { name: name.into_bytes(), key: Key::new(key.as_bytes()), n_pes, heap_bytes, deadline };
    if n_pes == 1 {
        return ShmTransport::new(my_pe, vec![own]);
    }
    // Linux before 5.3 has no pidfds, and a sandbox may forbid them. Without pidfds all waits have their full time.
    let process = pidfd_open(getpid(), PidfdFlags::empty()).ok();
    let own_files = [Some(own.fd()), process.as_ref().map(AsFd::as_fd)].into_iter().flatten().collect();
    let mut files = if my_pe == 0 { place.lead(own_files)? } else { place.follow(my_pe, own_files)? };
    let processes = files.split_off(n_pes);
    let mut own = Some(own);
    let segment = |(pe, file): (usize, OwnedFd)| match own.take_if(|_| pe == my_pe) {
        Some(own) => Ok(own),
        None => Segment::from_fd(file),
    };
    let segments = files.into_iter().enumerate().map(segment).collect::<Result<_, _>>()?;
    Ok(ShmTransport::new(my_pe, segments)?.of_processes(processes))
}

fn meeting(why: impl Into<String>) -> ShmemError {
    ShmemError::Meeting(why.into())
}

fn system(what: &str, error: impl Into<io::Error>) -> ShmemError {
    ShmemError::System { what: what.to_string(), source: error.into() }
}

/// A PE's view of the rendezvous.
struct Place {
    /// The socket's abstract name.
    name: Vec<u8>,
    key: Key,
    n_pes: usize,
    heap_bytes: usize,
    deadline: Instant,
}

impl Place {
    /// PE 0's side. Takes its segment and, if it has one, its pidfd. Returns the segments of all PEs, followed by their pidfds if all have one.
    fn lead(&self, own: Vec<BorrowedFd<'_>>) -> Result<Vec<OwnedFd>, ShmemError> {
        let listener = local::listen(&self.name, 4096).map_err(|errno| match errno {
            Errno::ADDRINUSE => meeting("another process listens with the same key"),
            errno => system("listen for the other PEs", errno),
        })?;
        let heap_bytes = self.heap_bytes;
        let same_heap = move |hello: &Hello| {
            let theirs = hello.payload.as_slice().try_into().map(u64::from_le_bytes).unwrap_or(0);
            if theirs == heap_bytes as u64 {
                return Ok(());
            }
            let pe = hello.pe;
            Err(format!("PE {pe} has a symmetric heap of {theirs} bytes, PE 0 one of {heap_bytes}: they must be equal"))
        };
        let mut gate = Gate::new(vec![listener], self.key.clone(), PROGRAM, self.n_pes, 1..self.n_pes, same_heap);
        let admitted = self.admit(&mut gate);
        let mut joined = gate.close();
        let files = admitted.and_then(|()| self.receive_files(own, &mut joined));
        let files = files.inspect_err(|why| {
            for one in joined.iter().flatten() {
                let body = one.session.seal(Kind::Refused, why.as_bytes());
                // A PE that does not receive this sees the connection end.
                let _ = send_by(one.socket.as_fd(), Kind::Refused, &body, &[], Instant::now());
            }
        });
        let files = files.map_err(meeting)?;
        let count = u32::try_from(files.len()).unwrap_or(u32::MAX).to_le_bytes();
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        for (pe, one) in joined.iter().enumerate() {
            let Some(one) = one else { continue };
            for files in borrowed.chunks(FILES_PER_FRAME) {
                let body = one.session.seal(Kind::Segments, &count);
                send_by(one.socket.as_fd(), Kind::Segments, &body, files, self.deadline + GRACE).map_err(|errno| {
                    match errno {
                        Errno::PIPE | Errno::CONNRESET => meeting(format!("PE {pe} has ended")),
                        errno => system("send segments to a PE", errno),
                    }
                })?;
            }
        }
        Ok(files)
    }

    /// Waits until all PEs have joined; half a line otherwise.
    fn admit(&self, gate: &mut Gate) -> Result<(), String> {
        loop {
            let missing = gate.missing();
            if missing.is_empty() {
                return Ok(());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("PE {} has not come in time", list(&missing)));
            }
            let mut fds: Vec<PollFd<'_>> = gate.sockets().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            let time = Timespec { tv_sec: 0, tv_nsec: left.min(Duration::from_millis(100)).as_nanos() as _ };
            let _ = poll(&mut fds, Some(&time));
            gate.advance().map_err(|errno| format!("cannot accept a PE (ulimit -n): {}", io::Error::from(errno)))?;
            // PEs with one key are one job, so a PE that expects another world is an error for all.
            if let Some(why) = gate.mismatch() {
                return Err(why.to_string());
            }
        }
    }

    fn receive_files(&self, own: Vec<BorrowedFd<'_>>, joined: &mut [Option<Joined>]) -> Result<Vec<OwnedFd>, String> {
        let own =
            own.iter().map(|file| file.try_clone_to_owned().map_err(|error| format!("PE 0: {error} (ulimit -n)")));
        let mut own = own.collect::<Result<Vec<_>, _>>()?.into_iter();
        let (mut segments, mut processes) = (Vec::from_iter(own.next()), Vec::from_iter(own.next()));
        for (pe, one) in joined.iter_mut().enumerate() {
            let Some(one) = one else { continue };
            let frame = receive_by(one.socket.as_fd(), &mut one.inbox, MAX_BODY_BYTES, self.deadline);
            let frame = frame.map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => format!("PE {pe} has not come in time"),
                io::ErrorKind::InvalidData => format!("PE {pe}: {error}"),
                _ => format!("PE {pe} has ended"),
            })?;
            let mut files = frame.files.into_iter().filter(|_| frame.kind == Kind::Segment);
            segments.push(files.next().ok_or_else(|| format!("PE {pe} sent no segment"))?);
            processes.extend(files.next());
        }
        if processes.len() == self.n_pes {
            segments.append(&mut processes);
        }
        Ok(segments)
    }

    /// Another PE's side, with arguments and results as those of [`lead`](Self::lead).
    fn follow(&self, pe: usize, own: Vec<BorrowedFd<'_>>) -> Result<Vec<OwnedFd>, ShmemError> {
        let who = Introduction { pe, n_pes: self.n_pes, program: PROGRAM };
        let mut link = call(who, &self.key, self.deadline, |_, _| match local::connect(&self.name) {
            Ok(socket) => Ok((socket, (self.heap_bytes as u64).to_le_bytes().to_vec())),
            Err(local::Refusal::NoListener(errno)) => Err(Attempt::Retry(errno.into())),
            Err(local::Refusal::OtherUser(_)) => {
                Err(Attempt::Fatal(meeting("another user's process listens with the same key")))
            }
            Err(local::Refusal::System(errno)) => Err(Attempt::Fatal(system("connect to PE 0", errno))),
        })
        .map_err(|error| match error {
            CallError::Connect(error) => error,
            CallError::Nonce(error) => system("draw a number", error),
            CallError::NoListener(_) => meeting("PE 0 has not come in time"),
            CallError::Late(why) => meeting(format!("PE 0 has not answered in time: {why}")),
            CallError::Unproven(why) => meeting(format!("the process that listens is not PE 0 of this job: {why}")),
            CallError::Refused(why) => meeting(why),
        })?;
        let ended = |error: io::Error| match error.kind() {
            io::ErrorKind::TimedOut => meeting("PE 0 has not answered in time"),
            io::ErrorKind::InvalidData => meeting(format!("PE 0: {error}")),
            _ => meeting("PE 0 has ended"),
        };
        let late = self.deadline + GRACE;
        match send_by(link.socket.as_fd(), Kind::Segment, b"", &own, late) {
            // PE 0 has refused this PE and closed the connection. The reason can still be received.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
            Err(errno) => return Err(ended(errno.into())),
        }
        let Link { socket, inbox, session } = &mut link;
        let (mut files, mut count) = (Vec::with_capacity(2 * self.n_pes), self.n_pes);
        while files.len() < count {
            let frame = receive_by(socket.as_fd(), inbox, MAX_BODY_BYTES, late).map_err(ended)?;
            match (frame.kind, session.open(frame.kind, &frame.body)) {
                (Kind::Refused, Some(why)) => return Err(meeting(String::from_utf8_lossy(why))),
                (Kind::Segments, Some(body)) if !frame.files.is_empty() => {
                    files.extend(frame.files);
                    count = body.try_into().map_or(0, |count| u32::from_le_bytes(count) as usize);
                }
                _ => return Err(meeting("PE 0 sent no segments")),
            }
        }
        // Proven messages of PE 0 have one of these counts.
        match files.len() == count && [self.n_pes, 2 * self.n_pes].contains(&count) {
            true => Ok(files),
            false => Err(meeting(format!("PE 0 sent {} files for {count}", files.len()))),
        }
    }
}

fn list(pes: &[usize]) -> String {
    const SHOWN: usize = 16;
    let mut text = pes.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
    if pes.len() > SHOWN {
        text += &format!(" and {} more", pes.len() - SHOWN);
    }
    text
}
