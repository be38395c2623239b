//! The libfabric transport, [`OfiTransport`].

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::engine::{Answer, Data, Engine, Op, Target};
use super::ffi::{Choice, EndpointInfo, Fabric, Kind};
use super::{OfiError, exit};
use crate::tcp::{Mesh, Running, TcpError, TcpTransport, TcpWorld};
use crate::wait::Patience;
use crate::{LostPe, RawWait, Segment, SignalOp, Transport};

/// Default providers in search order: Slingshot's, then TCP's.
pub const PROVIDERS: [&str; 2] = ["cxi", "tcp;ofi_rxm"];
/// Message channel on which PEs exchange their [`EndpointInfo`]; `tcp/world.rs` and `tcp/intra_host.rs` use other channels.
const ENDPOINT_CHANNEL: u64 = 4;
/// Maximum in-flight copied bytes per PE; senders block above it.
const MAX_COPIED_BYTES: usize = 64 << 20;
/// Maximum bytes per operation, even if the provider allows more.
const PIECE_BYTES: usize = 1 << 30;
/// Sleep between the polls of a wait without a wake-up: no thread of this host sees a network card's write of a signal.
const NAP: Duration = Duration::from_micros(20);
/// A failed wait shorter than this does not search for a silent PE.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// One PE's heap and its access to the other heaps.
pub struct OfiTransport {
    /// The heap and the TCP connections to other PEs, which carry no operations.
    tcp: TcpTransport,
    engine: Arc<Engine>,
    thread: Option<JoinHandle<()>>,
    provider: String,
    piece_bytes: usize,
    patience: Patience,
}

impl OfiTransport {
    /// Creates a zeroed heap of `heap_bytes` bytes on each PE of the world (collective; so is dropping it). A world has one
    /// such transport. `provider` is a name of `fi_info`; the default is the first available one of [`PROVIDERS`]. Operations
    /// without a deadline wait at most `limit` for a peer.
    ///
    /// # Errors
    /// As for [`TcpTransport::new`]; [`OfiError::Unsuitable`] if no provider is suitable on some PE, or the PEs' providers differ.
    pub fn new(world: &TcpWorld, heap_bytes: usize, provider: Option<&str>, limit: Duration) -> Result<Self, OfiError> {
        let tcp = TcpTransport::new(world, heap_bytes, limit)?;
        let (me, n) = (world.my_pe(), world.n_pes());
        let running = world.running();
        let send_to_all =
            |message: &[u8]| (0..n).filter(|&pe| pe != me).for_each(|pe| running.tell(pe, ENDPOINT_CHANNEL, message));
        let (mut fabric, mine) = match open(world, tcp.heap(), provider) {
            Ok(opened) => opened,
            Err(error) => {
                // Report the error, so that the other PEs do not wait for this one.
                send_to_all(format!("\0{error}").as_bytes());
                return Err(error);
            }
        };
        send_to_all(&[&[1], &*mine.to_bytes()].concat());
        let deadline = Instant::now() + limit;
        let mut targets = Vec::with_capacity(n);
        for pe in 0..n {
            let info = if pe == me { mine.clone() } else { receive_endpoint(running, pe, &mine, deadline, limit)? };
            let to = fabric.insert(&info.address).map_err(|why| {
                let (provider, call) = (mine.provider.clone(), format!("fi_av_insert of PE {pe}'s address"));
                OfiError::Fabric { provider, call, why }
            })?;
            targets.push(Target { to, base: info.base, key: info.key });
        }
        let piece_bytes = fabric.max_message_bytes().min(PIECE_BYTES);
        let provider = mine.provider;
        // The target's own thread writes to memory with these providers; with others a network card may do it.
        let is_software = provider.contains(";ofi_rx");
        let patience = Patience::of(2 * world.pes_on_host());
        let patience = if is_software { patience } else { patience.napping(NAP) };
        let engine = Engine::new(me, fabric, provider.clone(), targets, tcp.heap().clone());
        let engine = engine.map_err(|errno| TcpError::system("make an eventfd", errno))?;
        let engine = Arc::new(engine);
        exit::watch(&engine);
        let (thread_engine, mesh) = (engine.clone(), running.mesh.clone());
        let thread =
            std::thread::Builder::new().name("aristos-ofi".to_string()).spawn(move || thread_engine.run(&mesh));
        let thread = Some(thread.map_err(|error| TcpError::system("start the progress thread", error))?);
        let transport = OfiTransport { tcp, engine, thread, provider, piece_bytes, patience };
        // Peers must not access a heap before its owner serves the endpoint.
        world.barrier(limit)?;
        Ok(transport)
    }

    /// Limits each operation to `bytes` bytes, to test transfers longer than a provider's maximum.
    ///
    /// # Panics
    /// If `bytes` is 0 or above the maximum.
    pub fn with_piece_bytes(mut self, bytes: usize) -> Self {
        assert!((1..=self.piece_bytes).contains(&bytes), "a piece has 1 to {} bytes", self.piece_bytes);
        self.piece_bytes = bytes;
        self
    }

    /// libfabric's name of the provider.
    pub fn provider(&self) -> &str {
        &self.provider
    }

    #[cfg(test)]
    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    fn mesh(&self) -> &Mesh {
        self.tcp.mesh()
    }

    fn heap(&self) -> &Arc<Segment> {
        self.tcp.heap()
    }

    fn limit(&self) -> Duration {
        self.tcp.limit()
    }

    /// # Panics
    /// If the range is outside the heap, which has the same size on every PE.
    fn check(&self, at: usize, bytes: usize) {
        self.heap().address(at, bytes);
    }

    /// Waits until `look` returns a value; returns `None` after the limit or if a PE is lost.
    fn wait_until<R>(&self, look: impl FnMut() -> Option<R>) -> Option<R> {
        let (deadline, bell) = (Instant::now() + self.limit(), self.heap().bell());
        let lost = || self.mesh().lost().is_some();
        self.patience.wait_for(bell, look, deadline, || self.engine.advance(true), lost)
    }

    /// Blocks while more than [`MAX_COPIED_BYTES`] are in flight to `pe`.
    fn make_room(&self, pe: usize) {
        let has_room = || (self.engine.copied_bytes(pe) <= MAX_COPIED_BYTES).then_some(());
        if has_room().is_none() && self.wait_until(has_room).is_none() {
            let seconds = self.limit().as_secs_f64();
            self.mesh().give_up(pe, format!("it has not taken what was sent to it for {seconds} s"));
        }
    }

    /// Offset and length of each operation of a transfer of `bytes` bytes.
    fn pieces(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let piece = self.piece_bytes;
        (0..bytes).step_by(piece).map(move |at| (at, piece.min(bytes - at)))
    }

    /// Write operations with copies of the data.
    fn writes(&self, dest: usize, src: &[u8], pe: usize) -> Vec<Op> {
        let write = |(at, len)| Op::new(Kind::Write, pe, dest + at, Data::Bytes(src[at..at + len].into()));
        self.pieces(src.len()).map(write).collect()
    }

    fn signal(&self, word: usize, value: u64, op: SignalOp, pe: usize) -> Op {
        // Panics if the word is out of bounds or misaligned.
        self.heap().atomic_u64(word);
        let kind = match op {
            SignalOp::Set => Kind::Set,
            SignalOp::Add => Kind::Add,
        };
        let mut signal = Op::new(kind, pe, word, Data::Word);
        signal.operand = value;
        signal
    }

    /// Waits for an answer of `pe`; returns `None` if there is none, in which case `pe` or another PE is lost.
    fn answer(&self, answer: &Answer, pe: usize) -> Option<Box<[u8]>> {
        let found = self.wait_until(|| answer.get());
        if found.is_none() {
            let seconds = self.limit().as_secs_f64();
            self.mesh().give_up(pe, format!("it has not answered for {seconds} s"));
        }
        found?.clone()
    }
}

/// Opens an endpoint of the requested provider, or of the first available default.
fn open(world: &TcpWorld, heap: &Arc<Segment>, provider: Option<&str>) -> Result<(Fabric, EndpointInfo), OfiError> {
    let network = world.index_on_host();
    let (node, key, n_pes) = (world.address(), rand::random(), world.n_pes());
    for provider in provider.map_or(PROVIDERS.to_vec(), |provider| vec![provider]) {
        if let Some(opened) = Fabric::open(&Choice { provider, node, network, key, n_pes }, heap)? {
            return Ok(opened);
        }
    }
    Err(OfiError::Unsuitable(match provider {
        Some(provider) => format!(
            "libfabric has no provider {provider} with remote memory access and atomics here; `fi_info -c \
             'FI_RMA|FI_ATOMIC'` names those that it has"
        ),
        None => format!("libfabric has neither of the providers {} here; see fi_info", PROVIDERS.join(" and ")),
    }))
}

/// Receives `pe`'s [`EndpointInfo`] and checks that it is compatible with `mine`.
fn receive_endpoint(
    running: &Running,
    pe: usize,
    mine: &EndpointInfo,
    deadline: Instant,
    limit: Duration,
) -> Result<EndpointInfo, OfiError> {
    let message = running.receive(deadline, Some(pe), ENDPOINT_CHANNEL)?;
    let (_, message) = message.ok_or(TcpError::Late { pe, what: "the endpoint", limit })?;
    let info = match message.split_first() {
        Some((1, info)) => EndpointInfo::from_bytes(info),
        Some((0, why)) => {
            return Err(OfiError::Unsuitable(format!("PE {pe}: {}", String::from_utf8_lossy(why))));
        }
        _ => None,
    };
    let info = info.ok_or_else(|| OfiError::Unsuitable(format!("PE {pe} has not said how it is reached")))?;
    let kind = |info: &EndpointInfo| (info.provider.clone(), info.protocol, info.address.len());
    if kind(&info) != kind(mine) {
        let [theirs, ours] = [&info, mine].map(|info| {
            let (protocol, version) = info.protocol;
            format!("{} (protocol {protocol}, version {version})", info.provider)
        });
        return Err(OfiError::Unsuitable(format!(
            "PE {pe} has libfabric's provider {theirs}, this PE {ours}: expected the same on all"
        )));
    }
    Ok(info)
}

impl Drop for OfiTransport {
    fn drop(&mut self) {
        // Earlier operations must complete before the peers close their endpoints. After a panic the peers may be missing.
        if !std::thread::panicking() {
            self.quiet();
            let _ = self.tcp.running().barrier(self.limit());
        }
        self.engine.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.engine.close();
    }
}

impl std::fmt::Debug for OfiTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OfiTransport").field("tcp", &self.tcp).field("provider", &self.provider).finish_non_exhaustive()
    }
}

impl Transport for OfiTransport {
    fn my_pe(&self) -> usize {
        self.tcp.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.tcp.n_pes()
    }

    fn heap_bytes(&self) -> usize {
        self.tcp.heap_bytes()
    }

    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        if pe == self.my_pe() {
            return self.heap().copy_in(dest, src);
        }
        self.check(dest, src.len());
        self.make_room(pe);
        self.engine.issue(self.writes(dest, src, pe));
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        if pe == self.my_pe() {
            return self.heap().copy_to(src, self.heap(), dest, bytes);
        }
        self.check(dest, bytes);
        self.check(src, bytes);
        let write = |(at, len)| Op::new(Kind::Write, pe, dest + at, Data::Heap(src + at, len));
        self.engine.issue(self.pieces(bytes).map(write));
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        if pe == self.my_pe() {
            return self.heap().copy_out(src, dest);
        }
        self.check(src, dest.len());
        let mut answers = Vec::new();
        let reads: Vec<_> = self
            .pieces(dest.len())
            .map(|(at, len)| {
                let mut read = Op::new(Kind::Read, pe, src + at, Data::Bytes(vec![0; len].into()));
                let answer = Answer::default();
                read.answer = Some(answer.clone());
                answers.push((at, len, answer));
                read
            })
            .collect();
        self.engine.issue(reads);
        for (at, len, answer) in answers {
            match self.answer(&answer, pe) {
                Some(bytes) => dest[at..at + len].copy_from_slice(&bytes),
                None => dest[at..at + len].fill(0),
            }
        }
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        if pe == self.my_pe() {
            return self.heap().copy_to(src, self.heap(), dest, bytes);
        }
        self.check(src, bytes);
        self.check(dest, bytes);
        let read = |(at, len)| Op::new(Kind::Read, pe, src + at, Data::Heap(dest + at, len));
        self.engine.issue(self.pieces(bytes).map(read));
    }

    fn put_signal(&self, dest: usize, src: &[u8], word: usize, value: u64, op: SignalOp, pe: usize) {
        let mut signal = self.signal(word, value, op, pe);
        if pe == self.my_pe() {
            self.heap().copy_in(dest, src);
            return self.engine.issue([signal]);
        }
        self.check(dest, src.len());
        self.make_room(pe);
        let mut writes = self.writes(dest, src, pe);
        match &mut writes[..] {
            [] => self.engine.issue([signal]),
            [write] => {
                write.then = Some(Box::new(signal));
                self.engine.issue(writes);
            }
            _ => {
                signal.fenced = true;
                writes.push(signal);
                self.engine.issue(writes);
            }
        }
    }

    fn signal_op(&self, word: usize, value: u64, op: SignalOp, pe: usize) {
        self.engine.issue([self.signal(word, value, op, pe)]);
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.heap().atomic_u64(signal).load(Ordering::Acquire)
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        // Panics if the word is out of bounds or misaligned.
        self.heap().atomic_u64(target);
        let mut add = Op::new(Kind::FetchAdd, pe, target, Data::Word);
        let answer = Answer::default();
        (add.operand, add.answer) = (value, Some(answer.clone()));
        self.engine.issue([add]);
        self.answer(&answer, pe).and_then(|bytes| bytes[..].try_into().ok()).map_or(0, u64::from_ne_bytes)
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let start = Instant::now();
        let lost = || self.mesh().lost().is_some();
        let found = self.patience.wait_while(self.heap(), waits, deadline, || self.engine.advance(true), lost);
        if found.is_none() && !lost() && start.elapsed() >= SHORT_WAIT {
            self.mesh().find_silent();
        }
        found
    }

    fn fence(&self) {
        self.engine.fence();
    }

    fn quiet(&self) {
        fence(Ordering::SeqCst);
        let mut open = self.engine.drain();
        let done = open.is_empty().then_some(()).or_else(|| {
            self.wait_until(|| {
                open.retain(|(_, answer)| answer.get().is_none());
                open.is_empty().then_some(())
            })
        });
        if let (None, Some((pe, _))) = (done, open.first()) {
            let seconds = self.limit().as_secs_f64();
            self.mesh().give_up(*pe, format!("it has not carried out what was sent to it for {seconds} s"));
        }
    }

    fn lost(&self) -> Option<LostPe> {
        self.tcp.lost()
    }

    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>> {
        self.tcp.ptr(offset, pe)
    }

    fn is_reachable(&self, pe: usize) -> bool {
        self.tcp.is_reachable(pe)
    }
}
