//! Connects PEs over TCP: all call PE 0, which sends each PE the addresses of the others; then each PE calls those with lower numbers.
//! Every connection begins with the handshake of the control plane ([`crate::control`]). With PE 0 its key is the job's token. Between
//! the other PEs the key also depends on a random number that PE 0 draws for this world and sends to admitted PEs only.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{getpeername, sockopt};

use super::TcpError;
use super::liveness::limit_retransmission;
use super::places::{self, Place};
use crate::control::frame::{Kind, receive_by, send_by};
use crate::control::{Attempt, CallError, Gate, Hello, Introduction, Joined, Key, Link, MAX_TEXT_BYTES, Nonce, call};

/// How long PE 0 may take to send the places to one PE.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How much longer the others wait than PE 0, which knows which PE is missing.
const GRACE: Duration = Duration::from_secs(1);
/// Maximum time of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Maximum length of the places of all PEs, bytes.
const MAX_PLACES_BYTES: usize = 4 << 20;

/// A PE's part of a rendezvous.
#[derive(Clone, Copy, Debug)]
pub struct Joining<'a> {
    /// This PE's number.
    pub pe: usize,
    /// Number of PEs.
    pub n_pes: usize,
    /// Where PE 0 listens, as HOST:PORT.
    pub rendezvous: &'a str,
    /// The program and its version, which must be the same on all PEs; at most 512 bytes.
    pub program: &'a str,
    /// The job's secret. It is never sent.
    pub token: &'a [u8],
    /// Limits of time.
    pub limits: JoinLimits,
}

/// Limits of time.
#[derive(Clone, Copy, Debug)]
pub struct JoinLimits {
    /// Limit until all PEs are connected.
    pub join: Duration,
    /// The PEs of a host that sends no acknowledgement for this long are lost. At least 2 s.
    pub silence: Duration,
}

impl Default for JoinLimits {
    fn default() -> Self {
        JoinLimits { join: Duration::from_secs(60), silence: Duration::from_secs(10) }
    }
}

impl JoinLimits {
    /// The limit in use, at least 2 s: shorter silences are ordinary pauses.
    pub(super) fn given_up_after(&self) -> Duration {
        self.silence.max(Duration::from_secs(2))
    }
}

/// Connected PEs.
pub(super) struct Met {
    /// By PE.
    pub(super) sockets: Vec<Option<OwnedFd>>,
    /// By PE: the name of its host.
    pub(super) hosts: Vec<String>,
    pub(super) refusals: Vec<String>,
    /// Deadline for connecting all PEs.
    pub(super) until: Instant,
}

/// This PE's side of every handshake.
struct Rank<'a> {
    joining: Joining<'a>,
    host: String,
    key: Key,
    until: Instant,
}

fn meeting(why: impl Into<String>) -> TcpError {
    TcpError::Meeting(why.into())
}

/// Connects this PE to all others; `listener` is PE 0's, if it has one.
pub(super) fn meet(joining: &Joining<'_>, listener: Option<TcpListener>) -> Result<Met, TcpError> {
    let &Joining { pe, n_pes, rendezvous, program, token, limits } = joining;
    if pe >= n_pes {
        return Err(meeting(format!("PE {pe} of {n_pes}: expected a number below that of PEs")));
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    // A payload is a port and the host's name.
    for (what, bytes) in [("the program's name", program.len()), ("the host's name", host.len() + 2)] {
        if bytes > MAX_TEXT_BYTES {
            return Err(meeting(format!("{what} has {bytes} bytes, expected at most {MAX_TEXT_BYTES}")));
        }
    }
    let rank = Rank { joining: *joining, host, key: Key::new(token), until: Instant::now() + limits.join };
    let met = match (pe, listener) {
        (0, _) if n_pes == 1 => {
            Met { sockets: vec![None], hosts: vec![rank.host], refusals: Vec::new(), until: rank.until }
        }
        (0, Some(listener)) => rank.lead(vec![listener])?,
        (0, None) => rank.lead(listen(rendezvous)?)?,
        _ => rank.follow()?,
    };
    for (peer, socket) in met.sockets.iter().enumerate() {
        let Some(socket) = socket else { continue };
        prepare(socket, limits.given_up_after())
            .map_err(|error| TcpError::system(format!("set up the connection to PE {peer}"), error))?;
    }
    Ok(met)
}

/// Sets a connection's options.
fn prepare(socket: &OwnedFd, silence: Duration) -> io::Result<()> {
    rustix::io::ioctl_fionbio(socket, true)?;
    sockopt::set_tcp_nodelay(socket, true)?;
    limit_retransmission(socket);
    // Keepalive on an idle connection: the first probe after half of the limit, then one per second.
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

/// The listening sockets of a rendezvous: on all addresses of this host, unless the rendezvous is a loopback address. A host's own name
/// often resolves to a loopback address.
fn listen(rendezvous: &str) -> Result<Vec<TcpListener>, TcpError> {
    let addresses = resolve(rendezvous).map_err(|error| TcpError::system(format!("find {rendezvous}"), error))?;
    let Some(first) = addresses.first() else {
        return Err(meeting(format!("{rendezvous} has no address")));
    };
    let failed = |error| TcpError::system(format!("listen for the other PEs at {rendezvous}"), error);
    let mut listeners = vec![listen_for(first.ip(), first.port()).map_err(failed)?];
    if is_loopback(first.ip()) {
        // Another user must not listen at the name's other address.
        for other in addresses.iter().filter(|other| other.ip() != first.ip() && is_loopback(other.ip())) {
            match listen_for(other.ip(), other.port()) {
                Ok(listener) => listeners.push(listener),
                // This host has no IPv6.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
    Ok(listeners)
}

/// Whether only the host itself can reach this address, e.g. 127.0.1.1, to which a host's own name may resolve.
fn is_loopback(ip: IpAddr) -> bool {
    ip == Ipv4Addr::LOCALHOST || ip == Ipv6Addr::LOCALHOST
}

/// A socket for [`TcpWorld::join_at`](super::TcpWorld::join_at), which listens on every interface, at a port that the system assigns.
///
/// # Errors
/// The system's.
pub fn listen_anywhere() -> io::Result<TcpListener> {
    listen_for(Ipv6Addr::UNSPECIFIED.into(), 0)
}

/// Listens on `port` on every interface through which peers can reach `address`.
fn listen_for(address: IpAddr, port: u16) -> io::Result<TcpListener> {
    let listener = match address {
        address if is_loopback(address) => TcpListener::bind((address, port)),
        // Accepts IPv4 too; but some hosts have no IPv6.
        _ => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
    }?;
    rustix::net::listen(&listener, 4096)?;
    Ok(listener)
}

fn address_of(socket: &OwnedFd) -> io::Result<SocketAddr> {
    let address = getpeername(socket)?.and_then(|address| SocketAddr::try_from(address).ok());
    let address = address.ok_or(io::ErrorKind::NotConnected)?;
    Ok(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

impl Rank<'_> {
    fn seconds(&self) -> f64 {
        self.joining.limits.join.as_secs_f64()
    }

    /// PE 0's side.
    fn lead(self, listeners: Vec<TcpListener>) -> Result<Met, TcpError> {
        let gate = self.gate(listeners, self.key.clone(), 1, |hello| {
            let is_valid = hello.payload.len() >= 2;
            if is_valid { Ok(()) } else { Err("it sent no valid hello".to_string()) }
        })?;
        let (joined, refusals) = self.admit(gate, None)?;
        let place = |one: &Joined| {
            let (port, host) = one.hello.payload.split_first_chunk().unwrap_or((&[0; 2], &[]));
            let ip = address_of(&one.socket).map_or(Ipv4Addr::UNSPECIFIED.into(), |address| address.ip());
            let address = SocketAddr::new(ip, u16::from_le_bytes(*port));
            Place { address, host: String::from_utf8_lossy(host).into_owned() }
        };
        let own = Place { address: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0), host: self.host.clone() };
        let places: Vec<Place> = joined.iter().map(|one| one.as_ref().map_or(own.clone(), place)).collect();
        let session = Nonce::draw().map_err(|error| TcpError::system("draw a number", error))?;
        let data = places::to_bytes(&session, &places);
        for (pe, one) in joined.iter().enumerate() {
            let Some(one) = one else { continue };
            let body = one.session.seal(Kind::World, &data);
            send_by(one.socket.as_fd(), Kind::World, &body, &[], Instant::now() + ANSWER_LIMIT)
                .map_err(|_| meeting(format!("PE {pe} has ended")))?;
        }
        let sockets = joined.into_iter().map(|one| Some(one?.socket)).collect();
        let hosts = places.into_iter().map(|place| place.host).collect();
        Ok(Met { sockets, hosts, refusals, until: self.until })
    }

    /// Another PE's side.
    fn follow(self) -> Result<Met, TcpError> {
        let Joining { pe: me, n_pes: n, rendezvous, .. } = self.joining;
        let (mut zero, listener) = self.call_zero()?;
        let zero_address =
            address_of(&zero.socket).map_err(|error| TcpError::system("find out where PE 0 is", error))?;
        let frame = receive_by(zero.socket.as_fd(), &mut zero.inbox, MAX_PLACES_BYTES, self.until + GRACE);
        let frame = frame.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => meeting(format!("PE 0 has not answered within {} s", self.seconds())),
            io::ErrorKind::InvalidData => meeting(format!("{rendezvous}: {error}")),
            _ => meeting("PE 0 has ended"),
        })?;
        let data = zero.session.open(frame.kind, &frame.body).filter(|_| frame.kind == Kind::World);
        let (session, places) = data
            .and_then(|data| places::from_bytes(data, n))
            .ok_or_else(|| meeting("PE 0 sent no valid list of PEs"))?;
        let key = self.key.for_session(&session);
        let mut sockets: Vec<Option<OwnedFd>> = (0..n).map(|_| None).collect();
        for pe in 1..me {
            // A PE on PE 0's host called it by a loopback address; the others reach that PE at the address where they found PE 0.
            let address = match places[pe].address.ip() {
                ip if ip.is_loopback() => SocketAddr::new(zero_address.ip(), places[pe].address.port()),
                _ => places[pe].address,
            };
            sockets[pe] = Some(self.call_peer(pe, address, &key)?);
        }
        let gate = self.gate(vec![listener], key, me + 1, |_| Ok(()))?;
        let (joined, refusals) = self.admit(gate, Some(&zero.socket))?;
        for (socket, one) in sockets.iter_mut().zip(joined) {
            *socket = socket.take().or(one.map(|one| one.socket));
        }
        sockets[0] = Some(zero.socket);
        let hosts = places.into_iter().map(|place| place.host).collect();
        Ok(Met { sockets, hosts, refusals, until: self.until })
    }

    fn introduction(&self) -> Introduction<'_> {
        let Joining { pe, n_pes, program, .. } = self.joining;
        Introduction { pe, n_pes, program }
    }

    fn gate(
        &self,
        listeners: Vec<TcpListener>,
        key: Key,
        first: usize,
        condition: impl Fn(&Hello) -> Result<(), String> + Send + 'static,
    ) -> Result<Gate, TcpError> {
        for listener in &listeners {
            listener.set_nonblocking(true).map_err(|error| TcpError::system("listen for the other PEs", error))?;
        }
        let Joining { n_pes, program, .. } = self.joining;
        let listeners = listeners.into_iter().map(OwnedFd::from).collect();
        Ok(Gate::new(listeners, key, program, n_pes, first..n_pes, condition))
    }

    /// Waits until all PEs of the gate have joined; returns them and the refusals. `zero`, the connection to PE 0, has nothing to read meanwhile.
    fn admit(&self, mut gate: Gate, zero: Option<&OwnedFd>) -> Result<(Vec<Option<Joined>>, Vec<String>), TcpError> {
        loop {
            let missing = gate.missing();
            let Some(first) = missing.first() else { break };
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let more = if missing.len() > 1 { format!(" and {} more", missing.len() - 1) } else { String::new() };
                let refused = gate.refusals().last().map_or_else(String::new, |line| format!("; {line}"));
                return Err(meeting(format!("PE {first}{more} has not come within {} s{refused}", self.seconds())));
            }
            let mut fds: Vec<PollFd<'_>> = zero.iter().map(|zero| PollFd::new(*zero, PollFlags::IN)).collect();
            fds.extend(gate.sockets().map(|socket| PollFd::new(socket, PollFlags::IN)));
            let wait = left.min(Duration::from_millis(100));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as _ }));
            if zero.is_some() && !fds[0].revents().is_empty() {
                return Err(meeting("PE 0 has ended, or has lost a PE"));
            }
            gate.advance().map_err(|error| {
                TcpError::system("accept a PE (the limit on open files, ulimit -n, is reached)", error)
            })?;
            if let Some(pe) = gate.ended() {
                return Err(meeting(format!("PE {pe} has ended before all had come")));
            }
        }
        let refusals = gate.refusals().to_vec();
        Ok((gate.close(), refusals))
    }

    /// Calls PE 0, which may not listen yet; returns the socket where this PE listens for others, too.
    fn call_zero(&self) -> Result<(Link, TcpListener), TcpError> {
        let Joining { rendezvous, .. } = self.joining;
        let mut own = None;
        let link = call(self.introduction(), &self.key, self.until, |attempt, until| {
            let stream = connect(rendezvous, attempt, until).map_err(|error| match error.kind() {
                io::ErrorKind::InvalidInput => Attempt::Fatal(TcpError::system(format!("find {rendezvous}"), error)),
                _ => Attempt::Retry(error),
            })?;
            let listen = || {
                let listener = listen_for(stream.peer_addr()?.ip().to_canonical(), 0)?;
                let port = listener.local_addr()?.port();
                Ok((listener, port))
            };
            let (listener, port) = listen()
                .map_err(|error: io::Error| Attempt::Fatal(TcpError::system("listen for the other PEs", error)))?;
            own = Some(listener);
            Ok((OwnedFd::from(stream), [&port.to_le_bytes()[..], self.host.as_bytes()].concat()))
        });
        let seconds = self.seconds();
        let link = link.map_err(|error| match error {
            CallError::Connect(error) => error,
            CallError::Nonce(error) => TcpError::system("draw a number", error),
            CallError::NoListener(error) => {
                meeting(format!("PE 0 has not listened at {rendezvous} within {seconds} s: {error}"))
            }
            CallError::Late(why) => meeting(format!("PE 0 has not answered at {rendezvous} within {seconds} s: {why}")),
            CallError::Unproven(why) => {
                meeting(format!("the process that listens at {rendezvous} is not PE 0 of this job: {why}"))
            }
            CallError::Refused(why) => meeting(format!("refused: {why}")),
        })?;
        let own = own.ok_or_else(|| meeting("PE 0 has ended"))?;
        Ok((link, own))
    }

    /// Calls a PE at `address`. It has listened there since before it called PE 0.
    fn call_peer(&self, pe: usize, address: SocketAddr, key: &Key) -> Result<OwnedFd, TcpError> {
        let failed = |error| TcpError::system(format!("connect to PE {pe} at {address}"), error);
        let link = call(self.introduction(), key, self.until, |_, until| {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => Ok((OwnedFd::from(stream), Vec::new())),
                Err(error) => Err(Attempt::Fatal(failed(error))),
            }
        });
        let link = link.map_err(|error| match error {
            CallError::Connect(error) => error,
            CallError::Nonce(error) => TcpError::system("draw a number", error),
            CallError::NoListener(error) => failed(error),
            CallError::Late(why) => meeting(format!("PE {pe} has not answered within {} s: {why}", self.seconds())),
            CallError::Unproven(why) => meeting(format!("the process that listens at {address} is not PE {pe}: {why}")),
            CallError::Refused(why) => meeting(format!("PE {pe}: refused: {why}")),
        })?;
        Ok(link.socket)
    }
}

/// Connects to one of the rendezvous' addresses, beginning with another one at each attempt.
fn connect(rendezvous: &str, attempt: usize, until: Instant) -> io::Result<TcpStream> {
    let addresses = resolve(rendezvous)?;
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)).min(ATTEMPT);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for k in 0..addresses.len() {
        match TcpStream::connect_timeout(&addresses[(attempt + k) % addresses.len()], left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
