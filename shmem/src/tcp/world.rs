//! [`TcpWorld`]: connected PEs, their agreements, and messages between them.

use std::net::TcpListener;
#[cfg(feature = "ofi")]
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::frame::{Header, Kind};
use super::join::{self, Joining, Met};
use super::mesh::{Mesh, Peer, ReceivedState, lock};
use super::outbox::Body;
use super::{TcpError, progress};
use crate::LostPe;

/// The channels of messages: the caller's, and two for agreements. Other channels are in `intra_host.rs` and `ofi/transport.rs`.
const MESSAGES: u64 = 0;
const PROPOSALS: u64 = 1;
const DECISIONS: u64 = 2;
/// How much longer the others wait for a decision than PE 0, which knows and names a late PE.
const GRACE: Duration = Duration::from_secs(1);
/// How long a PE that ends waits for the others to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Longer than any job.
const YEAR: Duration = Duration::from_secs(365 * 86400);
/// How long sending a farewell may take.
const FAREWELL_LIMIT: Duration = Duration::from_millis(200);

/// PEs that are connected, each to all others.
///
/// Dropping it waits until the others drop theirs, 5 s at most. A process that ends or unwinds without dropping it is lost to the others.
#[derive(Debug)]
pub struct TcpWorld {
    running: Arc<Running>,
    hosts: Vec<String>,
    refusals: Vec<String>,
}

/// The connections, and the thread that serves them.
pub(crate) struct Running {
    pub(crate) mesh: Arc<Mesh>,
    thread: Option<JoinHandle<()>>,
    /// How long a wait for a message lasts before the other PEs are asked whether they answer, ms.
    liveness_ms: AtomicU64,
    /// The process that runs the thread, which a forked child does not.
    process: u32,
    /// Set by [`TcpWorld::leave`]: the end of this PE waits for no other.
    left: AtomicBool,
}

impl TcpWorld {
    /// Connects all PEs. PE 0 listens at `joining.rendezvous`. Collective.
    ///
    /// # Errors
    /// One line: a PE that has not joined in time, or was refused; an address that is not available.
    pub fn join(joining: &Joining<'_>) -> Result<TcpWorld, TcpError> {
        Self::over(joining, join::meet(joining, None)?)
    }

    /// As [`TcpWorld::join`], as PE 0 with a socket that already listens at the rendezvous.
    ///
    /// # Errors
    /// As [`TcpWorld::join`].
    pub fn join_at(joining: &Joining<'_>, listener: TcpListener) -> Result<TcpWorld, TcpError> {
        Self::over(joining, join::meet(joining, Some(listener))?)
    }

    fn over(joining: &Joining<'_>, met: Met) -> Result<TcpWorld, TcpError> {
        let Met { sockets, hosts, refusals, until } = met;
        let mesh = Mesh::new(joining.pe, sockets);
        let mesh = Arc::new(mesh.map_err(|error| TcpError::system("watch the connections to the other PEs", error))?);
        let (of_thread, silence) = (mesh.clone(), joining.limits.given_up_after());
        let thread = std::thread::Builder::new().name("aristos-tcp".to_string()).spawn(move || {
            let _watch = Watch(&of_thread);
            progress::run(&of_thread, silence);
        });
        let thread = thread.map_err(|error| TcpError::system("start the progress thread", error))?;
        let liveness_ms = AtomicU64::new(joining.limits.given_up_after().as_millis() as u64);
        let (process, left) = (std::process::id(), AtomicBool::new(false));
        let running = Arc::new(Running { mesh, thread: Some(thread), liveness_ms, process, left });
        let world = TcpWorld { running, hosts, refusals };
        // Every PE is connected to every other before any continues.
        world.barrier(until.saturating_duration_since(Instant::now()) + GRACE)?;
        Ok(world)
    }

    /// This PE's number.
    pub fn my_pe(&self) -> usize {
        self.running.mesh.me
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.running.mesh.n_pes()
    }

    /// Number of PEs on this host, this one included.
    pub fn pes_on_host(&self) -> usize {
        self.hosts.iter().filter(|host| **host == self.hosts[self.my_pe()]).count()
    }

    /// At PE 0: the first few callers that were refused while the PEs joined, a line each.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    /// The first PE that is known to be lost.
    pub fn lost(&self) -> Option<LostPe> {
        self.running.mesh.lost().cloned()
    }

    /// Sets how long this PE waits for a message before it queries all PEs; one that does not answer is lost. The wait's own limit may be
    /// longer. The initial value is [`JoinLimits::silence`](super::JoinLimits::silence).
    pub fn set_wait_limit(&self, limit: Duration) {
        let limit = limit.clamp(Duration::from_millis(100), YEAR);
        self.running.liveness_ms.store(limit.as_millis() as u64, Ordering::Relaxed);
    }

    /// The minimum of all PEs' numbers. Collective.
    ///
    /// # Errors
    /// A PE is lost, or has not taken part within `limit`.
    pub fn min(&self, value: u64, limit: Duration) -> Result<u64, TcpError> {
        self.running.min(value, limit)
    }

    /// Waits until all PEs have called this.
    ///
    /// # Errors
    /// As [`TcpWorld::min`].
    pub fn barrier(&self, limit: Duration) -> Result<(), TcpError> {
        self.running.barrier(limit)
    }

    /// Sends a message of at most 256 MiB; messages to one PE arrive in order. Returns once the message is queued.
    ///
    /// # Errors
    /// A PE is lost; or `to` has not received earlier messages for `limit`.
    pub fn send(&self, to: usize, message: &[u8], limit: Duration) -> Result<(), TcpError> {
        let mesh = &self.running.mesh;
        if to == mesh.me {
            lock(&mesh.received).messages.entry(MESSAGES).or_default().push_back((to, message.to_vec()));
            return Ok(());
        }
        mesh.make_room(to, limit);
        self.running.tell(to, MESSAGES, message);
        self.lost().map_or(Ok(()), |lost| Err(lost.into()))
    }

    /// Receives the next message of any PE, or of `from`; `None` if none arrives within `limit`. Without a limit it waits until a PE is lost.
    ///
    /// # Errors
    /// A PE is lost.
    pub fn receive(&self, from: Option<usize>, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, TcpError> {
        let deadline = Instant::now() + limit.unwrap_or(YEAR).min(YEAR);
        self.running.receive(deadline, from, MESSAGES)
    }

    /// Reports to the other PEs, as far as their sockets have room, that this PE ends because PE `lost` is lost; `why` is half a line.
    /// Afterwards the process must end without dropping this world.
    pub fn farewell(&self, lost: usize, why: &str) {
        let mesh = &self.running.mesh;
        let header = Header { at: lost as u64, bytes: why.len() as u64, ..Header::of(Kind::Lost) };
        mesh.others().for_each(|(pe, _)| _ = mesh.send(pe, header, Body::Bytes(why.as_bytes())));
        let sent = || mesh.others().all(|(_, peer)| peer.out.waiting_bytes() == 0);
        let deadline = Instant::now() + FAREWELL_LIMIT;
        while !sent() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends this PE's part in the world and its heap, which can then be dropped without waiting. Not collective: other PEs may continue among
    /// themselves, as the end of this PE's connections is no loss to them. Returns once each has carried out the frames sent to it, 5 s at the
    /// latest. If this PE has failed, or another is lost, the others learn that instead. In a forked child it only prevents that a drop ends the
    /// parent's connections.
    pub fn leave(&self, failure: Option<&str>) {
        let mesh = &self.running.mesh;
        if self.running.left.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.running.process != std::process::id() {
            std::mem::forget(self.running.clone());
            return;
        }
        match (mesh.lost(), failure) {
            (Some(lost), _) => return self.farewell(lost.pe, &lost.why),
            (None, Some(why)) => return self.farewell(mesh.me, &format!("it failed: {why}")),
            (None, None) => {}
        }
        let ask = |(pe, peer)| {
            mesh.send(pe, Header::of(Kind::Bye), Body::Bytes(&[]));
            (peer, mesh.send(pe, Header::of(Kind::Ask), Body::Bytes(&[])))
        };
        let asked: Vec<(&Peer, u64)> = mesh.others().map(ask).collect();
        mesh.wait(Instant::now() + END_LIMIT, |_| {
            let has_all = |&(peer, number): &(&Peer, u64)| {
                peer.ended.load(Ordering::SeqCst) || peer.acknowledged.load(Ordering::SeqCst) >= number
            };
            asked.iter().all(has_all).then_some(())
        });
    }

    /// Number of this host's PEs with a lower number.
    #[cfg(feature = "ofi")]
    pub(crate) fn index_on_host(&self) -> usize {
        let me = self.my_pe();
        self.hosts[..me].iter().filter(|host| **host == self.hosts[me]).count()
    }

    /// This host's address on the network between the PEs: not a loopback address, if a connection has another.
    #[cfg(feature = "ofi")]
    pub(crate) fn address(&self) -> Option<IpAddr> {
        let address = |(_, peer): (usize, &Peer)| {
            let address = SocketAddr::try_from(rustix::net::getsockname(&peer.socket).ok()?).ok()?;
            Some(address.ip().to_canonical())
        };
        let mut addresses: Vec<IpAddr> = self.running.mesh.others().filter_map(address).collect();
        addresses.sort_by_key(IpAddr::is_loopback);
        // The only PE.
        addresses.first().copied().or(Some(Ipv4Addr::LOCALHOST.into()))
    }

    /// The hosts' names, by PE.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    pub(crate) fn running(&self) -> &Arc<Running> {
        &self.running
    }
}

impl Running {
    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }

    pub(crate) fn tell(&self, pe: usize, channel: u64, message: &[u8]) {
        let header = Header { at: channel, bytes: message.len() as u64, ..Header::of(Kind::Message) };
        self.mesh.send(pe, header, Body::Bytes(message));
    }

    pub(crate) fn receive(
        &self,
        deadline: Instant,
        from: Option<usize>,
        channel: u64,
    ) -> Result<Option<(usize, Vec<u8>)>, TcpError> {
        let mut next = |state: &mut ReceivedState| {
            let messages = state.messages.get_mut(&channel)?;
            let place = messages.iter().position(|(pe, _)| from.is_none_or(|from| from == *pe))?;
            messages.remove(place)
        };
        loop {
            let liveness = Duration::from_millis(self.liveness_ms.load(Ordering::Relaxed));
            if let Some(message) = self.mesh.wait(deadline.min(Instant::now() + liveness), &mut next) {
                return Ok(Some(message));
            }
            if self.mesh.lost().is_none() && Instant::now() < deadline {
                self.mesh.find_silent();
            }
            match self.mesh.lost() {
                Some(lost) => return Err(lost.clone().into()),
                None if Instant::now() >= deadline => return Ok(None),
                None => {}
            }
        }
    }

    /// See [`TcpWorld::min`]: every PE sends its number to PE 0, which sends back the minimum.
    pub(super) fn min(&self, value: u64, limit: Duration) -> Result<u64, TcpError> {
        let (me, n) = (self.mesh.me, self.mesh.n_pes());
        let number = |pe: usize, bytes: Vec<u8>| {
            let bytes = bytes.try_into().map_err(|_| TcpError::Meeting(format!("PE {pe} sent no number")))?;
            Ok::<_, TcpError>(u64::from_le_bytes(bytes))
        };
        let late = |pe, what| {
            self.mesh.find_silent();
            let lost = self.mesh.lost().cloned();
            lost.map_or(TcpError::Late { pe, what, limit }, TcpError::from)
        };
        let deadline = Instant::now() + limit;
        if me > 0 {
            self.tell(0, PROPOSALS, &value.to_le_bytes());
            let decision = self.receive(deadline + GRACE, Some(0), DECISIONS)?;
            return decision.map_or_else(|| Err(late(0, "the decision")), |(pe, bytes)| number(pe, bytes));
        }
        let mut least = value;
        for pe in 1..n {
            let Some((_, bytes)) = self.receive(deadline, Some(pe), PROPOSALS)? else {
                return Err(late(pe, "the part"));
            };
            least = least.min(number(pe, bytes)?);
        }
        (1..n).for_each(|pe| self.tell(pe, DECISIONS, &least.to_le_bytes()));
        Ok(least)
    }

    pub(crate) fn barrier(&self, limit: Duration) -> Result<(), TcpError> {
        self.min(0, limit).map(drop)
    }
}

/// Ends all waits of a PE whose progress thread panics.
pub(crate) struct Watch<'m>(pub(crate) &'m Mesh);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lose(self.0.me, "its progress thread has panicked");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mesh = &self.mesh;
        if !std::thread::panicking() && mesh.lost().is_none() && !self.has_left() {
            mesh.others().for_each(|(pe, _)| _ = mesh.send(pe, Header::of(Kind::Bye), Body::Bytes(&[])));
            // Waits until all have sent it and received all frames, so that no connection is closed with unread data.
            mesh.wait(Instant::now() + END_LIMIT, |_| {
                let is_over = mesh.others().all(|(_, peer)| {
                    let (bye, ended) = (peer.bye.load(Ordering::SeqCst), peer.ended.load(Ordering::SeqCst));
                    ended || bye && peer.out.waiting_bytes() == 0
                });
                is_over.then_some(())
            });
        }
        mesh.stop.store(true, Ordering::SeqCst);
        // A few additions cannot overflow an eventfd's counter.
        let _ = rustix::io::write(&mesh.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (me, n) = (self.mesh.me, self.mesh.n_pes());
        f.debug_struct("Running").field("my_pe", &me).field("n_pes", &n).finish_non_exhaustive()
    }
}
