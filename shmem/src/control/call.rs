//! The caller's side of a handshake.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::frame::{Inbox, Kind, receive_by, send_by};
use super::hello::{Hello, MAX_TEXT_BYTES, Session, VERSION};
use super::key::{Key, Nonce, PROOF_BYTES};

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(20);
/// Time between two attempts after an acceptor that has not proved that it knows the token.
const RETRY_UNPROVEN: Duration = Duration::from_millis(200);
/// How long an acceptor may take to prove itself before the caller connects anew.
const CHALLENGE_LIMIT: Duration = Duration::from_secs(5);
/// How long a caller retries after the first acceptor that does not know the token.
pub const UNPROVEN_LIMIT: Duration = Duration::from_secs(3);
/// Maximum length of an acceptor's frame during the handshake, bytes.
const MAX_REPLY_BYTES: usize = PROOF_BYTES + (1 << 12);

/// A caller's part of its [`Hello`].
#[derive(Clone, Copy, Debug)]
pub struct Introduction<'a> {
    /// Its rank.
    pub pe: usize,
    /// Number of ranks.
    pub n_pes: usize,
    /// The program and its version, at most [`MAX_TEXT_BYTES`].
    pub program: &'a str,
}

/// A connection on which both sides have proved themselves. The socket blocks only if `connect` returned a blocking one.
#[derive(Debug)]
pub struct Link {
    /// The connection.
    pub socket: OwnedFd,
    /// Bytes that were received after the handshake.
    pub inbox: Inbox,
    /// For the acceptor's later frames.
    pub session: Session,
}

/// Why a connection could not be made.
#[derive(Debug)]
pub enum Attempt<E> {
    /// The acceptor may listen later.
    Retry(io::Error),
    /// No later attempt can succeed.
    Fatal(E),
}

/// Why a call failed; texts are half a line.
#[derive(Debug)]
pub enum CallError<E> {
    /// [`Attempt::Fatal`].
    Connect(E),
    /// The system gave no random number.
    Nonce(io::Error),
    /// No process listened before the deadline.
    NoListener(io::Error),
    /// The acceptor did not complete the handshake before the deadline.
    Late(String),
    /// The process that listens has not proved that it knows the token.
    Unproven(String),
    /// The acceptor, which knows the token, refused the caller.
    Refused(String),
}

/// Why one handshake failed.
enum Broken {
    Refused(String),
    Unproven(String),
    /// The connection ended, or was silent.
    Ended(String),
}

/// Calls an acceptor until it admits this rank, or `until` passes. `connect` makes a connection, given the number of the attempt and its deadline,
/// and the hello's payload.
///
/// # Errors
/// See [`CallError`].
pub fn call<E>(
    who: Introduction<'_>,
    key: &Key,
    until: Instant,
    mut connect: impl FnMut(usize, Instant) -> Result<(OwnedFd, Vec<u8>), Attempt<E>>,
) -> Result<Link, CallError<E>> {
    let mut unproven_since = None;
    for attempt in 0.. {
        let (late, pause) = match connect(attempt, until) {
            Err(Attempt::Fatal(error)) => return Err(CallError::Connect(error)),
            Err(Attempt::Retry(error)) => (CallError::NoListener(error), RETRY),
            Ok((socket, payload)) => {
                debug_assert!(who.program.len() <= MAX_TEXT_BYTES && payload.len() <= MAX_TEXT_BYTES);
                let nonce = Nonce::draw().map_err(CallError::Nonce)?;
                let program = who.program.as_bytes().to_vec();
                let hello = Hello { version: VERSION, pe: who.pe, n_pes: who.n_pes, nonce, program, payload };
                match shake_hands(socket, &hello, key, until) {
                    Ok(link) => return Ok(link),
                    Err(Broken::Refused(why)) => return Err(CallError::Refused(why)),
                    Err(Broken::Ended(why)) => (CallError::Late(why), RETRY),
                    Err(Broken::Unproven(why)) => {
                        let since = unproven_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= UNPROVEN_LIMIT {
                            return Err(CallError::Unproven(why));
                        }
                        (CallError::Unproven(why), RETRY_UNPROVEN)
                    }
                }
            }
        };
        if Instant::now() + pause >= until {
            return Err(late);
        }
        std::thread::sleep(pause);
    }
    unreachable!("attempts do not end by themselves")
}

fn shake_hands(socket: OwnedFd, hello: &Hello, key: &Key, until: Instant) -> Result<Link, Broken> {
    let mut link = Link { socket, inbox: Inbox::default(), session: Session::new(key.clone(), hello) };
    let soon = until.min(Instant::now() + CHALLENGE_LIMIT);
    link.send(Kind::Join, &hello.to_bytes(), soon)?;
    let nonce = link.expect(Kind::Challenge, soon)?;
    let nonce = Nonce::from_bytes(&nonce).ok_or_else(|| Broken::Unproven("it sent no valid challenge".to_string()))?;
    link.session.challenge(nonce);
    let proof = link.session.prove();
    link.send(Kind::Proof, &proof, until)?;
    link.expect(Kind::Accepted, until)?;
    Ok(link)
}

impl Link {
    fn send(&self, kind: Kind, body: &[u8], until: Instant) -> Result<(), Broken> {
        send_by(self.socket.as_fd(), kind, body, &[], until).map_err(|error| match error {
            Errno::TIMEDOUT => Broken::Ended("it has not taken what was sent to it".to_string()),
            error => Broken::Ended(error.to_string()),
        })
    }

    /// Receives a frame of this kind, with a valid proof; returns its data.
    fn expect(&mut self, kind: Kind, until: Instant) -> Result<Vec<u8>, Broken> {
        let frame = receive_by(self.socket.as_fd(), &mut self.inbox, MAX_REPLY_BYTES, until);
        let frame = frame.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => Broken::Unproven("it is no rank of this job".to_string()),
            io::ErrorKind::TimedOut => Broken::Ended("it has not answered".to_string()),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                Broken::Ended("it has closed the connection".to_string())
            }
            _ => Broken::Ended(error.to_string()),
        })?;
        let data = self.session.open(frame.kind, &frame.body);
        let text = |data: &[u8]| String::from_utf8_lossy(data).into_owned();
        match (frame.kind, data) {
            (Kind::Refused, Some(why)) => Err(Broken::Refused(text(why))),
            // Without a proof the reason is untrusted: any process can send it.
            (Kind::Refused, None) => Err(Broken::Unproven(text(frame.body.get(PROOF_BYTES..).unwrap_or_default()))),
            (received, Some(data)) if received == kind => Ok(data.to_vec()),
            _ => Err(Broken::Unproven("it does not know the job's token".to_string())),
        }
    }
}
