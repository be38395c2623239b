//! How PEs meet: all connect to PE 0, which tells each where the others listen; then each connects to those below it.
//!
//! Whoever connects says who it is, and is admitted if it knows the job's token, runs the same program, and is a PE that has not come yet.
//! Between PEs the token is joined by a number that PE 0 has drawn for this job. Strangers are no part of this: one that says nothing, or not
//! in time, or anything else, is closed, and delays nobody; only so many are kept waiting.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::TcpError;
use super::frame::VERSION;
use super::hello::{
    Hello, MAX_HELLO_BYTES, MAX_TEXT_BYTES, Nonce, Place, answer, places_from_bytes, places_to_bytes, read_answer,
};
use super::silence::retry_soon;

/// How long one that connects may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How many more than PEs may have connected and not said who they are.
const STRANGERS: usize = 64;
/// How long an answer may take to be sent.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How much longer than PE 0 the others wait: it knows who is missing, and says so.
const GRACE: Duration = Duration::from_secs(1);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(50);
/// The longest attempt.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Most refusals that are kept.
const KEPT_REFUSALS: usize = 8;

/// Who meets where.
#[derive(Clone, Copy, Debug)]
pub struct Joining<'a> {
    /// This PE's number.
    pub pe: usize,
    /// Number of PEs.
    pub n_pes: usize,
    /// Where PE 0 listens, as HOST:PORT.
    pub rendezvous: &'a str,
    /// The program and its version, which must be one on all PEs; at most 512 bytes.
    pub program: &'a str,
    /// What the PEs of this job know, and nobody else; at most 512 bytes.
    pub token: &'a [u8],
    /// Limits of time.
    pub limits: JoinLimits,
}

/// How long what may take.
#[derive(Clone, Copy, Debug)]
pub struct JoinLimits {
    /// Until all PEs have come.
    pub join: Duration,
    /// A host whose kernel acknowledges nothing for so long is given up: its PEs are lost. At least 2 s.
    pub silence: Duration,
}

impl Default for JoinLimits {
    fn default() -> Self {
        JoinLimits { join: Duration::from_secs(60), silence: Duration::from_secs(10) }
    }
}

impl JoinLimits {
    /// As it is used: a shorter one would be an ordinary pause.
    pub(super) fn given_up_after(&self) -> Duration {
        self.silence.max(Duration::from_secs(2))
    }
}

/// PEs that have met.
pub(super) struct Met {
    /// By PE.
    pub(super) sockets: Vec<Option<TcpStream>>,
    /// By PE: the name of its host.
    pub(super) hosts: Vec<String>,
    pub(super) refusals: Vec<String>,
}

fn meeting(why: impl Into<String>) -> TcpError {
    TcpError::Meeting(why.into())
}

/// Meets the other PEs; `listener` is PE 0's, if it has one.
pub(super) fn meet(joining: &Joining<'_>, listener: Option<TcpListener>) -> Result<Met, TcpError> {
    let &Joining { pe, n_pes, rendezvous, program, token, limits } = joining;
    if pe >= n_pes {
        return Err(meeting(format!("PE {pe} of {n_pes}: expected a number below that of PEs")));
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for (what, bytes) in
        [("the program's name", program.len()), ("the job's token", token.len()), ("the host's name", host.len())]
    {
        if bytes > MAX_TEXT_BYTES {
            return Err(meeting(format!("{what} has {bytes} bytes, expected at most {MAX_TEXT_BYTES}")));
        }
    }
    let mine = Hello {
        version: VERSION,
        pe: pe as u32,
        n_pes: n_pes as u32,
        port: 0,
        nonce: Nonce::default(),
        program: program.as_bytes().to_vec(),
        token: token.to_vec(),
        host: host.into_bytes(),
    };
    let until = Instant::now() + limits.join;
    let met = match (pe, listener) {
        (0, _) if n_pes == 1 => {
            let hosts = vec![String::from_utf8_lossy(&mine.host).into_owned()];
            Met { sockets: vec![None], hosts, refusals: Vec::new() }
        }
        (0, Some(listener)) => lead(Gate::new(listener, mine, limits.join, until)?)?,
        (0, None) => lead(Gate::new(listen(rendezvous)?, mine, limits.join, until)?)?,
        _ => follow(mine, rendezvous, limits.join, until)?,
    };
    for (peer, socket) in met.sockets.iter().enumerate() {
        let Some(socket) = socket else { continue };
        prepare(socket, limits.given_up_after())
            .map_err(|error| TcpError::system(format!("set up the connection to PE {peer}"), error))?;
    }
    Ok(met)
}

/// Sets a connection's options, as it is used from now on.
fn prepare(socket: &TcpStream, silence: Duration) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    retry_soon(socket);
    // Where nothing is sent. Half of it until the first probe, then one a second.
    let idle = Duration::from_secs((silence.as_secs() / 2).clamp(1, 600));
    sockopt::set_tcp_keepidle(socket, idle)?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(socket, (silence - idle).as_secs().clamp(1, 100) as u32)?;
    sockopt::set_socket_keepalive(socket, true)?;
    Ok(())
}

/// The addresses of a rendezvous.
fn resolve(rendezvous: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(rendezvous.to_socket_addrs()?.collect())
}

/// A socket that listens: on all addresses of this host, unless the rendezvous is for this host alone. A host's own name is often one of an
/// address that only the host itself can reach.
fn listen(rendezvous: &str) -> Result<TcpListener, TcpError> {
    let addresses = resolve(rendezvous).map_err(|error| TcpError::system(format!("find {rendezvous}"), error))?;
    let Some(first) = addresses.first() else {
        return Err(meeting(format!("{rendezvous} has no address")));
    };
    let listener = listen_near(first, first.port());
    listener.map_err(|error| TcpError::system(format!("listen for the other PEs at {rendezvous}"), error))
}

/// Listens at `port` wherever one comes from who reaches this host by `address`.
fn listen_near(address: &SocketAddr, port: u16) -> io::Result<TcpListener> {
    let explicit_loopback = address.ip() == Ipv4Addr::LOCALHOST || address.ip() == Ipv6Addr::LOCALHOST;
    let listener = match address {
        _ if explicit_loopback => TcpListener::bind((address.ip(), port)),
        // Takes IPv4 too; but there are hosts without IPv6.
        _ => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
    }?;
    rustix::net::listen(&listener, 4096)?;
    Ok(listener)
}

/// PE 0's side.
fn lead(mut gate: Gate) -> Result<Met, TcpError> {
    let n = gate.mine.n_pes as usize;
    gate.admit(1..n)?;
    let port_of = |hello: &Hello, stream: &TcpStream| {
        let ip = stream.peer_addr().map_or(Ipv4Addr::UNSPECIFIED.into(), |address| address.ip().to_canonical());
        Place { address: SocketAddr::new(ip, hello.port), host: String::from_utf8_lossy(&hello.host).into_owned() }
    };
    let own = Place {
        address: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        host: String::from_utf8_lossy(&gate.mine.host).into_owned(),
    };
    let places: Vec<Place> = gate
        .came
        .iter()
        .map(|one| one.as_ref().map_or(own.clone(), |(stream, hello)| port_of(hello, stream)))
        .collect();
    let body = places_to_bytes(&rand::random(), &places);
    let mut sockets = Vec::with_capacity(n);
    for (pe, one) in gate.came.into_iter().enumerate() {
        sockets.push(match one {
            None => None,
            Some((mut stream, _)) => {
                let answered =
                    stream.set_write_timeout(Some(ANSWER_LIMIT)).and_then(|()| answer(&mut stream, true, &body));
                answered.map_err(|_| meeting(format!("PE {pe} has ended")))?;
                Some(stream)
            }
        });
    }
    Ok(Met { sockets, hosts: places.into_iter().map(|place| place.host).collect(), refusals: gate.refusals })
}

/// Another PE's side.
fn follow(mut mine: Hello, rendezvous: &str, limit: Duration, until: Instant) -> Result<Met, TcpError> {
    let (me, n) = (mine.pe as usize, mine.n_pes as usize);
    let mut zero = call_zero(rendezvous, limit, until)?;
    let near = zero.peer_addr().map_err(|error| TcpError::system("find out where PE 0 is", error))?;
    let near = SocketAddr::new(near.ip().to_canonical(), near.port());
    let setup = |error| TcpError::system("listen for the other PEs", error);
    let listener = listen_near(&near, 0).map_err(setup)?;
    mine.port = listener.local_addr().map_err(setup)?.port();
    // A PE's own socket is not for strangers: it is given to those alone that PE 0 has admitted.
    let ended = |_| meeting("PE 0 has ended");
    zero.write_all(&mine.to_bytes()).map_err(ended)?;
    let (places, nonce) = match answer_of(&mut zero, until + GRACE) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(meeting(format!("PE 0 has not answered within {} s", limit.as_secs_f64())));
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(meeting(format!("{rendezvous}: {error}")));
        }
        Err(_) => return Err(meeting("PE 0 has ended, or refused what it was sent")),
        Ok((false, why)) => return Err(meeting(String::from_utf8_lossy(&why).into_owned())),
        Ok((true, body)) => {
            let (nonce, places) =
                places_from_bytes(&body, n).ok_or_else(|| meeting("PE 0 sent no valid list of PEs"))?;
            (places, nonce)
        }
    };
    mine.nonce = nonce;
    // Who is on PE 0's host reached it by an address of that host's own: the others go where they found PE 0.
    let address = |place: &Place| match place.address.ip().is_loopback() {
        true => SocketAddr::new(near.ip(), place.address.port()),
        false => place.address,
    };
    let mut sockets: Vec<Option<TcpStream>> = (0..n).map(|_| None).collect();
    let hello = mine.to_bytes();
    for pe in 1..me {
        let failed = |error| TcpError::system(format!("connect to PE {pe} at {}", address(&places[pe])), error);
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let mut stream = TcpStream::connect_timeout(&address(&places[pe]), left).map_err(failed)?;
        stream.write_all(&hello).map_err(failed)?;
        sockets[pe] = Some(stream);
    }
    let mut gate = Gate::new(listener, mine, limit, until)?;
    gate.admit(me + 1..n)?;
    for (pe, one) in gate.came.iter_mut().enumerate() {
        let Some((mut stream, _)) = one.take() else { continue };
        let ended = |_| meeting(format!("PE {pe} has ended"));
        stream.set_write_timeout(Some(ANSWER_LIMIT)).and_then(|()| answer(&mut stream, true, b"")).map_err(ended)?;
        sockets[pe] = Some(stream);
    }
    for (pe, stream) in sockets.iter_mut().enumerate() {
        let Some(stream) = stream.as_mut().filter(|_| pe < me) else { continue };
        match answer_of(stream, until + GRACE) {
            Ok((true, _)) => {}
            Ok((false, why)) => return Err(meeting(format!("PE {pe}: {}", String::from_utf8_lossy(&why)))),
            Err(_) => return Err(meeting(format!("PE {pe} has ended, or has not answered"))),
        }
    }
    sockets[0] = Some(zero);
    Ok(Met { sockets, hosts: places.into_iter().map(|place| place.host).collect(), refusals: gate.refusals })
}

fn answer_of(stream: &mut TcpStream, until: Instant) -> io::Result<(bool, Vec<u8>)> {
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left))?;
    read_answer(stream)
}

/// Connects to PE 0, which may not listen yet.
fn call_zero(rendezvous: &str, limit: Duration, until: Instant) -> Result<TcpStream, TcpError> {
    loop {
        let connected = resolve(rendezvous).and_then(|addresses| {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)).min(ATTEMPT);
            let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
            for address in addresses {
                match TcpStream::connect_timeout(&address, left) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        });
        match connected {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return Err(TcpError::system(format!("find {rendezvous}"), error));
            }
            Err(_) if Instant::now() + RETRY < until => thread::sleep(RETRY),
            Err(error) => {
                let seconds = limit.as_secs_f64();
                return Err(meeting(format!("PE 0 has not listened at {rendezvous} within {seconds} s: {error}")));
            }
        }
    }
}

/// One that has connected and not said who it is.
struct Stranger {
    stream: TcpStream,
    address: SocketAddr,
    said: Vec<u8>,
    since: Instant,
}

/// A socket where PEs of one job are let in.
struct Gate {
    listener: TcpListener,
    mine: Hello,
    limit: Duration,
    until: Instant,
    strangers: Vec<Stranger>,
    /// By PE.
    came: Vec<Option<(TcpStream, Hello)>>,
    refusals: Vec<String>,
}

impl Gate {
    fn new(listener: TcpListener, mine: Hello, limit: Duration, until: Instant) -> Result<Gate, TcpError> {
        listener.set_nonblocking(true).map_err(|error| TcpError::system("listen for the other PEs", error))?;
        let came = (0..mine.n_pes).map(|_| None).collect();
        Ok(Gate { listener, mine, limit, until, strangers: Vec::new(), came, refusals: Vec::new() })
    }

    /// Waits until these PEs have come.
    fn admit(&mut self, pes: std::ops::Range<usize>) -> Result<(), TcpError> {
        loop {
            let missing: Vec<usize> = pes.clone().filter(|&pe| self.came[pe].is_none()).collect();
            let Some(first) = missing.first() else { return Ok(()) };
            let now = Instant::now();
            if now >= self.until {
                let seconds = self.limit.as_secs_f64();
                let more = if missing.len() > 1 { format!(" and {} more", missing.len() - 1) } else { String::new() };
                let refused = self.refusals.last().map_or_else(String::new, |line| format!("; {line}"));
                return Err(meeting(format!("PE {first}{more} has not come within {seconds} s{refused}")));
            }
            let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
            fds.extend(self.strangers.iter().map(|one| PollFd::new(&one.stream, PollFlags::IN)));
            fds.extend(self.came.iter().flatten().map(|(stream, _)| PollFd::new(stream, PollFlags::IN)));
            let wait = (self.until - now).min(Duration::from_millis(100));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as _ }));
            self.accept()?;
            self.hear(&pes);
            self.check_came()?;
        }
    }

    /// Accepts new connections, fewer at once than may wait: one that belongs here is heard before strangers can take its place.
    fn accept(&mut self) -> Result<(), TcpError> {
        for _ in 0..STRANGERS / 2 {
            let (stream, address) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => match rustix::io::Errno::from_io_error(&error) {
                    Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                        return Err(TcpError::system(
                            "accept a PE (the limit on open files, ulimit -n, is reached)",
                            error,
                        ));
                    }
                    // None for now; or one that is gone already.
                    _ => return Ok(()),
                },
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            // One that belongs here speaks at once: who has been silent longest goes first.
            if self.strangers.len() >= self.came.len() + STRANGERS {
                let oldest = self.strangers.remove(0);
                self.refuse(oldest.stream, oldest.address, "it was silent, and others came");
            }
            self.strangers.push(Stranger { stream, address, said: Vec::new(), since: Instant::now() });
        }
        Ok(())
    }

    /// Reads what strangers say, and lets in who may come.
    fn hear(&mut self, pes: &std::ops::Range<usize>) {
        for mut one in std::mem::take(&mut self.strangers) {
            let mut buffer = [0; MAX_HELLO_BYTES];
            let end = match one.stream.read(&mut buffer[one.said.len()..]) {
                Ok(0) => Some("it has ended without a hello".to_string()),
                Ok(bytes) => {
                    let from = one.said.len();
                    one.said.extend_from_slice(&buffer[from..from + bytes]);
                    None
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(error) => Some(error.to_string()),
            };
            let heard = match end {
                Some(why) => Err(why),
                None => Hello::from_bytes(&one.said),
            };
            match heard {
                Ok(None) if one.since.elapsed() < HELLO_LIMIT => self.strangers.push(one),
                Ok(None) => self.refuse(one.stream, one.address, "it sent no hello in time"),
                Err(why) => self.refuse(one.stream, one.address, &why),
                Ok(Some(hello)) => match self.objection(&hello, pes) {
                    Some(why) => self.refuse(one.stream, one.address, &why),
                    // From here on it is waited for, as long as the socket says.
                    None => match one.stream.set_nonblocking(false) {
                        Ok(()) => {
                            let pe = hello.pe as usize;
                            self.came[pe] = Some((one.stream, hello));
                        }
                        Err(error) => self.refuse(one.stream, one.address, &error.to_string()),
                    },
                },
            }
        }
    }

    fn objection(&self, hello: &Hello, pes: &std::ops::Range<usize>) -> Option<String> {
        if let Err(why) = self.mine.admits(hello) {
            return Some(why);
        }
        let pe = hello.pe as usize;
        if !pes.contains(&pe) {
            return Some(format!("PE {pe} does not connect here"));
        }
        self.came[pe].is_some().then(|| format!("PE {pe} has come already"))
    }

    fn refuse(&mut self, mut stream: TcpStream, address: SocketAddr, why: &str) {
        // A fresh socket has room, and one that has not is not waited for.
        let _ = answer(&mut stream, false, format!("refused: {why}").as_bytes());
        if self.refusals.len() < KEPT_REFUSALS {
            self.refusals.push(format!("refused {}: {why}", address.ip().to_canonical()));
        }
    }

    /// Whether those that have come are still there: they say nothing before they are answered.
    fn check_came(&mut self) -> Result<(), TcpError> {
        for (pe, one) in self.came.iter().enumerate() {
            let Some((stream, _)) = one else { continue };
            let flags = rustix::net::RecvFlags::DONTWAIT | rustix::net::RecvFlags::PEEK;
            match rustix::net::recv(stream, &mut [0u8; 1][..], flags) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                _ => return Err(meeting(format!("PE {pe} has ended before all had come"))),
            }
        }
        Ok(())
    }
}
