//! How processes of one host that did not start together become a world: PE 0 listens at a Unix socket with an abstract name (nothing
//! is left in a file system), the others bring their segments, and all get all.
//!
//! The kernel tells whose process is at a socket's other end: both sides refuse another user's. Packets are whole (`SOCK_SEQPACKET`); files
//! travel with them as `SCM_RIGHTS`.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::{Segment, ShmTransport, ShmemError, check_heap, fds};

/// The most files in a packet.
const FILES_PER_PACKET: usize = 16;
/// No refusal is longer, bytes.
const MAX_TEXT: usize = 1 << 12;
/// How much longer than PE 0 the others wait: it knows who is missing, and says so.
const GRACE: Duration = Duration::from_secs(1);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(2);
/// Raised with every change to the packets.
const VERSION: u64 = 1;

/// A PE's side of the agreement, and the header of every packet.
#[derive(Clone, Copy)]
struct Hello {
    version: u64,
    /// 0 when files come with it; otherwise a refusal follows.
    refused: u64,
    pe: u64,
    n_pes: u64,
    heap_bytes: u64,
}

impl Hello {
    fn words(&self) -> [u64; 5] {
        [self.version, self.refused, self.pe, self.n_pes, self.heap_bytes]
    }

    fn from_words([version, refused, pe, n_pes, heap_bytes]: [u64; 5]) -> Hello {
        Hello { version, refused, pe, n_pes, heap_bytes }
    }
}

/// Makes a world with the `n_pes - 1` other processes of this host that call this with the same `key`, `n_pes` and `heap_bytes` (as for
/// [`crate::threads`]), each with another `my_pe`. Collective; returns when all have come.
///
/// `key` is what they have in common and no other processes of the user: a random number that one of them has drawn, say.
///
/// # Errors
/// One line: another process has this key; who has not come by the `deadline`, or asked for something else; a heap that is too
/// small, or more than the host has.
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
    let hello =
        Hello { version: VERSION, refused: 0, pe: my_pe as u64, n_pes: n_pes as u64, heap_bytes: heap_bytes as u64 };
    let user = rustix::process::geteuid().as_raw();
    let name = format!("aristos-meet-{user}-{key}");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|_| meeting(format!("the key {key:?} is too long for a socket's name")))?;
    let files = match my_pe {
        0 if n_pes == 1 => vec![None],
        0 => listen(&address, &hello, &own, deadline)?,
        _ => call(&address, &hello, &own, deadline)?,
    };
    let mut own = Some(own);
    let segment = |(pe, file): (usize, Option<OwnedFd>)| match file {
        Some(file) if pe != my_pe => Segment::from_fd(file),
        _ => own.take().ok_or_else(|| meeting(format!("no segment of PE {pe} came"))),
    };
    let segments = files.into_iter().enumerate().map(segment).collect::<Result<_, _>>()?;
    ShmTransport::new(my_pe, segments)
}

fn meeting(why: String) -> ShmemError {
    ShmemError::Meeting(why)
}

fn system(what: &str, errno: Errno) -> ShmemError {
    ShmemError::System { what: what.to_string(), source: errno.into() }
}

fn socket(flags: SocketFlags) -> Result<OwnedFd, ShmemError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)
        .map_err(|errno| system("open a socket", errno))
}

/// PE 0's side: the files of all, by PE, its own missing.
fn listen(
    address: &SocketAddrUnix,
    mine: &Hello,
    own: &Segment,
    deadline: Instant,
) -> Result<Vec<Option<OwnedFd>>, ShmemError> {
    let n_pes = mine.n_pes as usize;
    let listener = socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&listener, address).map_err(|errno| match errno {
        Errno::ADDRINUSE => meeting("another process listens with the same key".into()),
        errno => system("bind the socket where PEs meet", errno),
    })?;
    rustix::net::listen(&listener, 4096).map_err(|errno| system("listen where PEs meet", errno))?;

    let mut waiting: Vec<OwnedFd> = Vec::new();
    let mut came: Vec<Option<(OwnedFd, OwnedFd)>> = (0..n_pes).map(|_| None).collect();
    let agreed = loop {
        let missing: Vec<usize> = (1..n_pes).filter(|&pe| came[pe].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            break Err(format!("PE {} has not come in time", list(&missing)));
        };
        let mut fds = vec![PollFd::new(&listener, PollFlags::IN)];
        fds.extend(waiting.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
        wait(&mut fds, left)?;
        while let Ok(socket) = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
            if is_ours(&socket) {
                waiting.push(socket);
            }
        }
        let mut wrong = None;
        for socket in std::mem::take(&mut waiting) {
            match receive(&socket) {
                Err(Errno::AGAIN) => waiting.push(socket),
                Ok((hello, _, mut files)) if files.len() == 1 => match objection(mine, &hello, &came) {
                    None => came[hello.pe as usize] = files.pop().map(|file| (socket, file)),
                    Some(why) => {
                        refuse(&socket, mine, &why);
                        wrong = Some(why);
                    }
                },
                // It has ended, or is none of us.
                _ => {}
            }
        }
        if let Some(why) = wrong {
            break Err(why);
        }
    };
    if let Err(why) = agreed {
        came.iter().flatten().for_each(|(socket, _)| refuse(socket, mine, &why));
        return Err(meeting(why));
    }
    let files: Vec<BorrowedFd<'_>> =
        came.iter().map(|one| one.as_ref().map_or(own.fd(), |(_, file)| file.as_fd())).collect();
    for (pe, one) in came.iter().enumerate() {
        let Some((socket, _)) = one else { continue };
        for files in files.chunks(FILES_PER_PACKET) {
            send(socket, mine, b"", files, deadline).map_err(|errno| match errno {
                Errno::PIPE | Errno::CONNRESET => meeting(format!("PE {pe} has ended")),
                errno => system("send segments to a PE", errno),
            })?;
        }
    }
    Ok(came.into_iter().map(|one| one.map(|(_, file)| file)).collect())
}

/// Why PE 0 does not take this one.
fn objection(mine: &Hello, other: &Hello, came: &[Option<(OwnedFd, OwnedFd)>]) -> Option<String> {
    let pe = other.pe;
    if other.version != VERSION {
        return Some(format!("PE {pe} is of another version of this library"));
    }
    if other.n_pes != mine.n_pes {
        return Some(format!("PE {pe} wants a world of {} PEs, PE 0 one of {}", other.n_pes, mine.n_pes));
    }
    if other.heap_bytes != mine.heap_bytes {
        let (theirs, ours) = (other.heap_bytes, mine.heap_bytes);
        return Some(format!("PE {pe} has a symmetric heap of {theirs} bytes, PE 0 one of {ours}: they must be equal"));
    }
    let twice = came.get(pe as usize).is_none_or(Option::is_some) || pe == 0;
    twice.then(|| format!("two processes say that they are PE {pe}"))
}

/// Another PE's side.
fn call(
    address: &SocketAddrUnix,
    mine: &Hello,
    own: &Segment,
    deadline: Instant,
) -> Result<Vec<Option<OwnedFd>>, ShmemError> {
    let socket = socket(SocketFlags::empty())?;
    loop {
        match rustix::net::connect(&socket, address) {
            Ok(()) => break,
            Err(Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                thread::sleep(RETRY);
            }
            Err(Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN) => {
                return Err(meeting("PE 0 has not come in time".into()));
            }
            Err(errno) => return Err(system("connect to PE 0", errno)),
        }
    }
    if !is_ours(&socket) {
        return Err(meeting("another user's process listens with the same key".into()));
    }
    let ended = |errno| match errno {
        Errno::PIPE | Errno::CONNRESET => meeting("PE 0 has ended".into()),
        errno => system("exchange segments with PE 0", errno),
    };
    send(&socket, mine, b"", &[own.fd()], deadline).map_err(ended)?;
    let mut files = Vec::with_capacity(mine.n_pes as usize);
    while files.len() < mine.n_pes as usize {
        match receive(&socket) {
            Ok((hello, text, _)) if hello.refused != 0 => return Err(meeting(text)),
            Ok((_, _, more)) if more.is_empty() => return Err(meeting("PE 0 has ended".into())),
            Ok((_, _, more)) => files.extend(more.into_iter().map(Some)),
            Err(Errno::AGAIN) => {
                let left = (deadline + GRACE).checked_duration_since(Instant::now());
                let left = left.ok_or_else(|| meeting("PE 0 has not answered in time".into()))?;
                wait(&mut [PollFd::new(&socket, PollFlags::IN)], left)?;
            }
            Err(errno) => return Err(ended(errno)),
        }
    }
    files.truncate(mine.n_pes as usize);
    Ok(files)
}

/// Whether a process of this user is at the other end.
fn is_ours(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

fn list(pes: &[usize]) -> String {
    const SHOWN: usize = 16;
    let mut text = pes.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
    if pes.len() > SHOWN {
        text += &format!(" and {} more", pes.len() - SHOWN);
    }
    text
}

fn wait(fds: &mut [PollFd<'_>], at_most: Duration) -> Result<(), ShmemError> {
    let at_most = at_most.min(Duration::from_millis(200));
    let time = Timespec { tv_sec: 0, tv_nsec: at_most.as_nanos() as _ };
    match poll(fds, Some(&time)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(system("wait for other PEs", errno)),
    }
}

/// Sends one packet, by the deadline.
fn send(
    socket: &OwnedFd,
    hello: &Hello,
    text: &[u8],
    files: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), Errno> {
    let words = hello.words();
    let parts = [IoSlice::new(bytemuck::cast_slice(&words)), IoSlice::new(text)];
    loop {
        match fds::send(socket.as_fd(), &parts, files, SendFlags::DONTWAIT) {
            Ok(_) => return Ok(()),
            // TOOMANYREFS: files in flight, which passes as the other PEs take theirs.
            Err(Errno::AGAIN | Errno::TOOMANYREFS) if Instant::now() < deadline => thread::sleep(RETRY),
            Err(errno) => return Err(errno),
        }
    }
}

fn refuse(socket: &OwnedFd, mine: &Hello, why: &str) {
    let why = &why.as_bytes()[..why.len().min(MAX_TEXT)];
    // Who does not take it will see the socket end.
    let _ = send(socket, &Hello { refused: 1, ..*mine }, why, &[], Instant::now());
}

/// Receives one packet: its header, its text and its files. An empty one, where the other end has closed, is an error.
fn receive(socket: &OwnedFd) -> Result<(Hello, String, Vec<OwnedFd>), Errno> {
    let mut words = [0u64; 5];
    let mut text = [0; MAX_TEXT];
    let mut files = Vec::new();
    let mut parts = [IoSliceMut::new(bytemuck::cast_slice_mut(&mut words)), IoSliceMut::new(&mut text)];
    let bytes = fds::receive(socket.as_fd(), &mut parts, &mut files, RecvFlags::DONTWAIT)?;
    let len = bytes.checked_sub(size_of_val(&words)).ok_or(Errno::CONNRESET)?;
    Ok((Hello::from_words(words), String::from_utf8_lossy(&text[..len]).into_owned(), files))
}
