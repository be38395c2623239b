//! [`TcpTransport`].

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::frame::{Header, Kind};
use super::mesh::{Mesh, Wanted};
use super::outbox::Body;
use super::world::Running;
use super::{TcpError, TcpWorld, intra_host};
use crate::doorbell::{ring, signal};
use crate::wait::Patience;
use crate::{LostPe, RawWait, Segment, SignalOp, Transport, Watch};

/// A wait that times out sooner does not query the PEs for a silent one.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// One PE's heap, and its view of the others'.
pub struct TcpTransport {
    running: Arc<Running>,
    heap: Arc<Segment>,
    /// By PE, the other PEs' heaps that are mapped here; empty if none is.
    intra_host: Vec<Option<Segment>>,
    unmapped: Option<String>,
    watch: Option<Arc<dyn Watch>>,
    /// How long an operation without a deadline waits for a PE.
    limit: Duration,
    patience: Patience,
}

impl TcpTransport {
    /// A heap of `heap_bytes` zero bytes on each PE of the world, which has no other heap. Creating and dropping it are collective. A PE waits for
    /// another at most for `limit` in operations without a deadline: creating and dropping the heap, get, quiet.
    ///
    /// # Errors
    /// As [`Segment::create`]; a PE is late or lost; the world already has a heap.
    pub fn new(world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<Self, TcpError> {
        let running = world.running().clone();
        let heap = Arc::new(Segment::create(&format!("aristos-{}", world.my_pe()), heap_bytes)?);
        {
            let mut window = running.mesh.window.write().unwrap_or_else(PoisonError::into_inner);
            if window.is_some() {
                return Err(TcpError::Meeting("this world has a symmetric heap already".to_string()));
            }
            *window = Some(heap.clone());
        }
        // No PE sends a frame for this heap before the barrier below.
        let patience = Patience::of(2 * world.pes_on_host());
        let (intra_host, unmapped, watch) = (Vec::new(), None, None);
        let transport = TcpTransport { running, heap, intra_host, unmapped, watch, limit, patience };
        world.barrier(limit)?;
        Ok(transport)
    }

    /// As [`TcpTransport::new`], with the heaps of a host's PEs as shared memory, so that TCP only carries data to other hosts. If a PE cannot map
    /// them (another user's, another container's), TCP carries all data, for all PEs; [`TcpTransport::unmapped`] then says why. Collective.
    ///
    /// # Errors
    /// As [`TcpTransport::new`].
    pub fn hybrid(world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<Self, TcpError> {
        let mut transport = Self::new(world, heap_bytes, limit)?;
        (transport.intra_host, transport.unmapped) =
            intra_host::map(&transport.running, world.hosts(), &transport.heap, limit)?;
        Ok(transport)
    }

    /// Sets a watch that ends all waits once it reports a lost PE, such as this one.
    pub fn watched(mut self, watch: Arc<dyn Watch>) -> Self {
        self.watch = Some(watch);
        self
    }

    /// The PE of this host whose memory this PE could not map, and why.
    pub fn unmapped(&self) -> Option<&str> {
        self.unmapped.as_deref()
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        &self.running.mesh
    }

    #[cfg(feature = "ofi")]
    pub(crate) fn running(&self) -> &Running {
        &self.running
    }

    #[cfg(feature = "ofi")]
    pub(crate) fn heap(&self) -> &Arc<Segment> {
        &self.heap
    }

    #[cfg(feature = "ofi")]
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// The heap of `pe`, where this PE maps it.
    #[inline]
    fn mapped(&self, pe: usize) -> Option<&Segment> {
        if pe == self.mesh().me { Some(&self.heap) } else { self.intra_host.get(pe)?.as_ref() }
    }

    fn send(&self, pe: usize, header: Header, body: Body<'_>) {
        self.mesh().make_room(pe, self.limit);
        self.mesh().send(pe, header, body);
    }

    /// # Panics
    /// If the bytes are not in the heap, which has the same size on every PE.
    fn check(&self, at: usize, bytes: usize) {
        self.heap.address(at, bytes);
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        if self.running.has_left() {
            // The progress thread may still access the heap, which it frees when it ends.
            return;
        }
        // All frames for this heap must arrive before it is unmapped; after a panic the other PEs may never call this.
        if !std::thread::panicking() {
            self.quiet();
            let _ = self.running.barrier(self.limit);
        }
        *self.mesh().window.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl std::fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpTransport").field("my_pe", &self.my_pe()).field("heap", &self.heap).finish_non_exhaustive()
    }
}

impl Transport for TcpTransport {
    fn my_pe(&self) -> usize {
        self.mesh().me
    }

    fn n_pes(&self) -> usize {
        self.mesh().n_pes()
    }

    fn heap_bytes(&self) -> usize {
        self.heap.heap_bytes()
    }

    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        if let Some(heap) = self.mapped(pe) {
            return heap.copy_in(dest, src);
        }
        self.check(dest, src.len());
        let header = Header { at: dest as u64, bytes: src.len() as u64, ..Header::of(Kind::Put) };
        self.send(pe, header, Body::Bytes(src));
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        if let Some(heap) = self.mapped(pe) {
            return self.heap.copy_to(src, heap, dest, bytes);
        }
        self.check(dest, bytes);
        let header = Header { at: dest as u64, bytes: bytes as u64, ..Header::of(Kind::Put) };
        self.send(pe, header, Body::Heap(&self.heap, src, bytes));
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        if let Some(heap) = self.mapped(pe) {
            return heap.copy_out(src, dest);
        }
        self.check(src, dest.len());
        let question = |value| Header { at: src as u64, bytes: dest.len() as u64, value, ..Header::of(Kind::Get) };
        match self.mesh().ask(pe, dest.len(), question, self.limit) {
            Some(bytes) => dest.copy_from_slice(&bytes),
            None => dest.fill(0),
        }
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        if let Some(heap) = self.mapped(pe) {
            return heap.copy_to(src, &self.heap, dest, bytes);
        }
        self.check(src, bytes);
        self.check(dest, bytes);
        let value = self.mesh().question(pe, Wanted::Heap(self.heap.clone(), dest, bytes));
        let header = Header { at: src as u64, bytes: bytes as u64, value, ..Header::of(Kind::Get) };
        self.send(pe, header, Body::Bytes(&[]));
    }

    fn put_signal(&self, dest: usize, src: &[u8], word: usize, value: u64, op: SignalOp, pe: usize) {
        if let Some(heap) = self.mapped(pe) {
            heap.copy_in(dest, src);
            return signal(heap.atomic_u64(word), value, op, heap.bell());
        }
        self.check(dest, src.len());
        self.heap.atomic_u64(word);
        let (at, bytes, signal) = (dest as u64, src.len() as u64, word as u64);
        let header = Header { op, at, bytes, signal, value, ..Header::of(Kind::PutSignal) };
        self.send(pe, header, Body::Bytes(src));
    }

    fn signal_op(&self, word: usize, value: u64, op: SignalOp, pe: usize) {
        if let Some(heap) = self.mapped(pe) {
            return signal(heap.atomic_u64(word), value, op, heap.bell());
        }
        self.heap.atomic_u64(word);
        let header = Header { op, signal: word as u64, value, ..Header::of(Kind::Signal) };
        self.send(pe, header, Body::Bytes(&[]));
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.heap.atomic_u64(signal).load(Ordering::Acquire)
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        if let Some(heap) = self.mapped(pe) {
            let was = heap.atomic_u64(target).fetch_add(value, Ordering::AcqRel);
            ring(heap.bell());
            return was;
        }
        self.heap.atomic_u64(target);
        let question = |at| Header { at, signal: target as u64, value, ..Header::of(Kind::FetchAdd) };
        let answer = self.mesh().ask(pe, size_of::<u64>(), question, self.limit);
        answer.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        let start = Instant::now();
        let is_hopeless = || self.lost().is_some() || self.waits_for_ended(waits);
        let found = self.patience.wait(&self.heap, waits, deadline, is_hopeless);
        if found.is_none() && !is_hopeless() && start.elapsed() >= SHORT_WAIT {
            self.mesh().find_silent();
        }
        found
    }

    fn fence(&self) {
        // Connections preserve the order of frames; this orders stores to mapped heaps.
        fence(Ordering::Release);
    }

    fn quiet(&self) {
        fence(Ordering::SeqCst);
        self.mesh().quiet(self.limit);
    }

    fn lost(&self) -> Option<LostPe> {
        self.mesh().lost().cloned().or_else(|| self.watch.as_ref()?.lost())
    }

    fn has_ended(&self, pe: usize) -> bool {
        pe != self.mesh().me && self.mesh().peer(pe).ended.load(Ordering::SeqCst)
    }

    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>> {
        self.mapped(pe).map(|heap| heap.address(offset, 0))
    }

    fn is_reachable(&self, pe: usize) -> bool {
        self.mapped(pe).is_some()
    }
}
