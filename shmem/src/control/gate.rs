//! The acceptor's side: a gate where the ranks of one job are let in.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{RecvFlags, SocketFlags};
use rustix::process::Resource;

use super::frame::{Frame, Inbox, Kind, send_by};
use super::hello::{Hello, MAX_HELLO_BYTES, Session};
use super::key::{Key, Nonce, PROOF_BYTES};

/// How long a caller may take for its hello, and again for its proof.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of connections without a proof, if the limit on open files allows it.
const MAX_STRANGERS: usize = 1024;
/// Maximum connections accepted before existing ones are read again.
const ACCEPTED_AT_ONCE: usize = 64;
/// Maximum bytes read from a connection without a proof.
const MAX_UNPROVEN_BYTES: usize = 64 + MAX_HELLO_BYTES + PROOF_BYTES;
/// Maximum number of refusals stored. Later strangers of another user are closed without an answer.
const KEPT_REFUSALS: usize = 8;

/// A rank that has joined.
#[derive(Debug)]
pub struct Joined {
    /// The rank's connection; non-blocking.
    pub socket: OwnedFd,
    /// Bytes that were received after the handshake.
    pub inbox: Inbox,
    /// For this side's later frames.
    pub session: Session,
    /// Its introduction.
    pub hello: Hello,
}

/// A connection that has not proved that it belongs to the job.
struct Stranger {
    socket: OwnedFd,
    peer: Peer,
    inbox: Inbox,
    /// The time of its connection or, later, of its challenge.
    since: Instant,
    received: usize,
    challenged: Option<(Hello, Session)>,
}

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    Address(IpAddr),
    Process { pid: i32, user: u32 },
}

impl Peer {
    fn of(socket: &OwnedFd) -> Result<Peer, Errno> {
        let address = rustix::net::getpeername(socket)?;
        if let Some(Ok(address)) = address.map(SocketAddr::try_from) {
            return Ok(Peer::Address(address.ip().to_canonical()));
        }
        let peer = socket_peercred(socket)?;
        Ok(Peer::Process { pid: peer.pid.as_raw_pid(), user: peer.uid.as_raw() })
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Address(address) => address.fmt(f),
            Peer::Process { pid, .. } => write!(f, "process {pid}"),
        }
    }
}

/// An additional condition on callers that know the token; an error is half a line.
type Condition = Box<dyn Fn(&Hello) -> Result<(), String> + Send>;

/// Sockets that admit the ranks of one job.
pub struct Gate {
    listeners: Vec<OwnedFd>,
    key: Key,
    program: Vec<u8>,
    ranks: Range<usize>,
    condition: Condition,
    max_strangers: usize,
    strangers: Vec<Stranger>,
    joined: Vec<Option<Joined>>,
    refusals: Vec<String>,
    n_refusals: usize,
    mismatch: Option<String>,
}

impl Gate {
    /// A gate for `ranks` of a job of `n_pes` ranks. The `listeners` are non-blocking. Ranks must run `program` and meet the
    /// `condition`.
    pub fn new(
        listeners: Vec<OwnedFd>,
        key: Key,
        program: &str,
        n_pes: usize,
        ranks: Range<usize>,
        condition: impl Fn(&Hello) -> Result<(), String> + Send + 'static,
    ) -> Gate {
        Gate {
            listeners,
            key,
            program: program.as_bytes().to_vec(),
            max_strangers: max_strangers(ranks.len()),
            ranks,
            condition: Box::new(condition),
            strangers: Vec::new(),
            joined: (0..n_pes).map(|_| None).collect(),
            refusals: Vec::new(),
            n_refusals: 0,
            mismatch: None,
        }
    }

    /// The ranks that have not joined, ascending.
    pub fn missing(&self) -> Vec<usize> {
        self.ranks.clone().filter(|&rank| self.joined[rank].is_none()).collect()
    }

    /// The ranks that have joined, by rank.
    pub fn joined(&self) -> &[Option<Joined>] {
        &self.joined
    }

    /// Stops listening; returns the ranks that have joined, by rank.
    pub fn close(self) -> Vec<Option<Joined>> {
        self.joined
    }

    /// The first refusals, a line each.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    /// The last refusal of a caller that knows the token.
    pub fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    /// The sockets to poll for input before [`Gate::advance`].
    pub fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        let strangers = self.strangers.iter().map(|one| &one.socket);
        self.listeners.iter().chain(strangers).chain(self.joined.iter().flatten().map(|one| &one.socket))
    }

    /// Reads callers' frames, admits those that belong to the job, and accepts new connections. Does not block.
    ///
    /// # Errors
    /// `MFILE` or `NFILE`, if the limit on open files leaves no room for a single caller.
    pub fn advance(&mut self) -> Result<(), Errno> {
        self.read();
        self.accept()
    }

    /// The first joined rank whose connection has ended. Input means the end: ranks send no data before they are answered.
    pub fn ended(&self) -> Option<usize> {
        let is_silent = |one: &Joined| {
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            matches!(rustix::net::recv(&one.socket, &mut [0u8; 1][..], flags), Err(Errno::AGAIN | Errno::INTR))
        };
        self.joined.iter().position(|one| one.as_ref().is_some_and(|one| !is_silent(one)))
    }

    fn accept(&mut self) -> Result<(), Errno> {
        for listener in 0..self.listeners.len() {
            for _ in 0..ACCEPTED_AT_ONCE {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                match rustix::net::accept_with(&self.listeners[listener], flags) {
                    Ok(socket) => self.admit_stranger(socket),
                    Err(error @ (Errno::MFILE | Errno::NFILE)) if self.strangers.is_empty() => return Err(error),
                    Err(Errno::MFILE | Errno::NFILE) => {
                        // Leaves descriptors for files that the process opens meanwhile.
                        self.max_strangers = (self.strangers.len() / 2).max(1);
                        while self.strangers.len() >= self.max_strangers {
                            self.evict();
                        }
                    }
                    // No connection is waiting, or it has been closed again.
                    Err(_) => break,
                }
            }
        }
        Ok(())
    }

    fn admit_stranger(&mut self, socket: OwnedFd) {
        let Ok(peer) = Peer::of(&socket) else { return };
        if let Peer::Process { user, .. } = peer
            && user != rustix::process::geteuid().as_raw()
        {
            if self.n_refusals < KEPT_REFUSALS {
                self.refuse(&socket, peer, None, &format!("it belongs to user {user}"));
            }
            return;
        }
        if self.strangers.len() >= self.max_strangers {
            self.evict();
        }
        let (inbox, since) = (Inbox::default(), Instant::now());
        self.strangers.push(Stranger { socket, peer, inbox, since, received: 0, challenged: None });
    }

    /// Closes the oldest stranger, preferring one without a hello: ranks send theirs at once. A rank that is closed without an answer connects
    /// anew.
    fn evict(&mut self) {
        if self.strangers.is_empty() {
            return;
        }
        let silent = self.strangers.iter().position(|one| one.challenged.is_none());
        let peer = self.strangers.remove(silent.unwrap_or(0)).peer;
        self.note(format!("refused {peer}: it was silent, and others connected"));
    }

    fn read(&mut self) {
        let mut ready: Vec<PollFd<'_>> =
            self.strangers.iter().map(|one| PollFd::new(&one.socket, PollFlags::IN)).collect();
        let _ = poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        let ready: Vec<bool> = ready.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (mut one, ready) in std::mem::take(&mut self.strangers).into_iter().zip(ready) {
            let handled = if ready { self.read_from(&mut one) } else { Ok(false) };
            match handled {
                Ok(true) => self.join(one),
                Ok(false) if one.since.elapsed() < HELLO_LIMIT => self.strangers.push(one),
                Ok(false) => self.refuse_stranger(&one, "it sent no hello in time"),
                Err(why) => self.refuse_stranger(&one, &why),
            }
        }
    }

    /// Reads once and answers; returns whether the caller has proved itself.
    fn read_from(&self, one: &mut Stranger) -> Result<bool, String> {
        let mut buffer = [0; MAX_UNPROVEN_BYTES];
        match rustix::net::recv(&one.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
            // A rank with a different token closes the connection, because our proof is wrong for it.
            Ok((0, _)) | Err(Errno::CONNRESET) if one.challenged.is_some() => {
                return Err("it does not know the job's token".to_string());
            }
            Ok((0, _)) => return Err("it has ended without a hello".to_string()),
            Ok((bytes, _)) => {
                one.received += bytes;
                one.inbox.push(&buffer[..bytes]);
            }
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        }
        while let Some(frame) = one.inbox.next().map_err(|_| "it sent no valid hello".to_string())? {
            if self.answer(one, &frame)? {
                return Ok(true);
            }
        }
        if one.received > MAX_UNPROVEN_BYTES { Err("its hello is too long".to_string()) } else { Ok(false) }
    }

    /// Answers a frame; returns whether the frame proved the caller.
    fn answer(&self, one: &mut Stranger, frame: &Frame) -> Result<bool, String> {
        match (frame.kind, &one.challenged) {
            (Kind::Join, None) => {
                let hello = Hello::from_bytes(&frame.body)?;
                let mut session = Session::new(self.key.clone(), &hello);
                let nonce = Nonce::draw().map_err(|error| error.to_string())?;
                let challenge = session.seal(Kind::Challenge, &nonce.0);
                session.challenge(nonce);
                one.reply(Kind::Challenge, &challenge).map_err(|error| error.to_string())?;
                one.since = Instant::now();
                one.challenged = Some((hello, session));
                Ok(false)
            }
            (Kind::Proof, Some((_, session))) if session.is_proof(&frame.body) => Ok(true),
            (Kind::Proof, Some(_)) => Err("it does not know the job's token".to_string()),
            _ => Err("it sent no valid hello".to_string()),
        }
    }

    /// Admits a proven caller if it is an expected rank.
    fn join(&mut self, mut one: Stranger) {
        let Some((hello, session)) = one.challenged.take() else { return };
        if let Err(why) = self.check(&hello) {
            self.mismatch = Some(why.clone());
            return self.refuse(&one.socket, one.peer, Some(&session), &why);
        }
        if one.reply(Kind::Accepted, &session.seal(Kind::Accepted, b"")).is_ok() {
            let rank = hello.pe;
            self.joined[rank] = Some(Joined { socket: one.socket, inbox: one.inbox, session, hello });
        }
    }

    fn check(&self, hello: &Hello) -> Result<(), String> {
        let Hello { pe, n_pes, program, .. } = hello;
        if *program != self.program {
            let [theirs, ours] = [program, &self.program].map(|program| String::from_utf8_lossy(program));
            return Err(format!("it is {theirs}, this is {ours}: all must be the same"));
        }
        let expected = self.joined.len();
        if *n_pes != expected || *pe >= expected {
            return Err(format!("PE {pe} of {n_pes}, of {expected} expected"));
        }
        if !self.ranks.contains(pe) {
            return Err(format!("PE {pe} does not connect here"));
        }
        if self.joined[*pe].is_some() {
            return Err(format!("PE {pe} has come already"));
        }
        (self.condition)(hello)
    }

    fn refuse_stranger(&mut self, one: &Stranger, why: &str) {
        let session = one.challenged.as_ref().map(|(_, session)| session);
        self.refuse(&one.socket, one.peer, session, why);
    }

    fn refuse(&mut self, socket: &OwnedFd, peer: Peer, session: Option<&Session>, why: &str) {
        let body = match session {
            Some(session) => session.seal(Kind::Refused, why.as_bytes()),
            None => [&[0; PROOF_BYTES], why.as_bytes()].concat(),
        };
        // The send buffer of a new socket has room for the frame.
        let _ = send_by(socket.as_fd(), Kind::Refused, &body, &[], Instant::now());
        self.note(format!("refused {peer}: {why}"));
    }

    fn note(&mut self, line: String) {
        self.n_refusals += 1;
        if self.refusals.len() < KEPT_REFUSALS && self.refusals.last() != Some(&line) {
            self.refusals.push(line);
        }
    }
}

impl Stranger {
    fn reply(&self, kind: Kind, body: &[u8]) -> Result<(), Errno> {
        send_by(self.socket.as_fd(), kind, body, &[], Instant::now())
    }
}

/// Half of the files that the process can still open once all ranks have connected.
fn max_strangers(ranks: usize) -> usize {
    let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = std::fs::read_dir("/proc/self/fd").map_or(32, Iterator::count);
    let free = usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(open + ranks);
    (free / 2).clamp(4, MAX_STRANGERS)
}
