//! Puts and signals to PEs on other hosts, as messages that are sent and received while this PE computes.
//!
//! One-sided calls do not allow that without remote memory access: a flush returns only when the data has crossed the network, and
//! MPI at the target may take the data only during one of the target's calls. Therefore a put is copied and queued. A thread of each PE
//! starts and tests messages every [`PERIOD`], receives data straight into the heap, and sends the signals that follow it. A PE that
//! waits does the same itself, without the period.
//!
//! A message is a header, with data of at most [`INLINE_BYTES`] bytes in it, or followed by the data. The signals of one PE to another
//! are delivered in the order of their messages. Data may overtake the data of an earlier message, except after a fence. The target
//! acknowledges each message by an empty one, so that `quiet` knows of its delivery.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mpi::ffi;
use mpi::traits::AsRaw;

use super::super::SignalOp;
use super::window::Window;
use super::world::{MpiError, MpiRequest, MpiWorld, Turn, check};

/// The thread's sleep between calls of MPI. Each takes some microseconds from the PE's computation.
const PERIOD: Duration = Duration::from_micros(100);

/// Largest data inside a header. MPI sends such messages at once, without asking the receiver.
const INLINE_BYTES: usize = 4096;

/// A message to a PE starts while fewer bytes are on their way to it. It must cover the network's round trip.
const BYTES_ON_THE_WAY: usize = 4 << 20;

const HEADER_TAG: c_int = 1;
const DATA_TAG: c_int = 2;
const DELIVERED_TAG: c_int = 3;

/// The signal after a message's data: offset, value and operation.
pub(super) type Signal = (usize, u64, SignalOp);

/// Where a message's data is until it has been delivered.
#[derive(Debug)]
pub(super) enum Data {
    Copy(Vec<u8>),
    /// Offset and length in this PE's heap.
    Heap(usize, usize),
}

/// What precedes the data, as 64-bit words.
#[derive(Clone, Copy, Debug)]
struct Header {
    dest: usize,
    bytes: usize,
    /// The data's messages have this length, except the last one.
    piece_bytes: usize,
    signal: Option<Signal>,
    /// Whether a fence precedes the message.
    fenced: bool,
}

impl Header {
    const BYTES: usize = 7 * size_of::<u64>();

    fn encode(self) -> Vec<u8> {
        let (signal, value, op) = self.signal.unwrap_or((0, 0, SignalOp::Set));
        let kind = self.signal.map_or(0, |_| if op == SignalOp::Set { 1 } else { 2 });
        let (dest, bytes, piece_bytes) = (self.dest as u64, self.bytes as u64, self.piece_bytes as u64);
        let words = [dest, bytes, piece_bytes, signal as u64, value, kind, u64::from(self.fenced)];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn decode(message: &[u8]) -> Header {
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| message[8 * i + b]));
        let op = if word(5) == 1 { SignalOp::Set } else { SignalOp::Add };
        let signal = (word(5) > 0).then(|| (word(3) as usize, word(4), op));
        let (dest, bytes, piece_bytes) = (word(0) as usize, word(1) as usize, word(2) as usize);
        Header { dest, bytes, piece_bytes, signal, fenced: word(6) == 1 }
    }
}

/// A queued message, or one on its way.
#[derive(Debug)]
struct Outgoing {
    /// The header, with small data.
    first: Vec<u8>,
    /// Data that follows the header, in pieces of this length.
    data: Option<Data>,
    piece_bytes: usize,
    bytes: usize,
    requests: Vec<MpiRequest>,
    since: Instant,
}

/// A message whose header has been received.
#[derive(Debug)]
struct Incoming {
    header: Header,
    /// Data in the header.
    inline: Vec<u8>,
    /// Whether the data may be written to the heap. Messages start in order, because their data is matched in order.
    started: bool,
    requests: Vec<MpiRequest>,
}

/// What the holder of the turn works on, per PE.
#[derive(Debug, Default)]
struct Exchange {
    on_the_way: VecDeque<Outgoing>,
    bytes_on_the_way: usize,
    /// Delivered messages that are still in `on_the_way`.
    delivered: usize,
    incoming: VecDeque<Incoming>,
}

/// The messages of one PE to and from other hosts.
#[derive(Debug)]
pub(super) struct Messages {
    window: Arc<Window>,
    /// A communicator of these messages only.
    comm: ffi::MPI_Comm,
    queues: Mutex<Vec<VecDeque<Outgoing>>>,
    /// Number of messages per PE that are not known to be delivered.
    undelivered: Vec<AtomicUsize>,
    /// Per PE: whether a fence precedes the next message.
    fenced: Vec<AtomicBool>,
    /// Locked only with the turn.
    exchanges: Mutex<Vec<Exchange>>,
    limit: OnceLock<Duration>,
    stop: AtomicBool,
}

// SAFETY: the communicator is a handle, which any thread may use that has the turn.
unsafe impl Send for Messages {}
// SAFETY: as above.
unsafe impl Sync for Messages {}

impl Messages {
    /// Starts the thread (collective).
    pub(super) fn start(window: Arc<Window>, world: &MpiWorld) -> Result<(Arc<Messages>, JoinHandle<()>), MpiError> {
        let n_pes = world.n_pes();
        // SAFETY: MPI writes the handle; the world's communicator is valid.
        let comm = unsafe {
            let mut comm = ffi::RSMPI_COMM_NULL;
            check("MPI_Comm_dup", ffi::MPI_Comm_dup(world.comm().as_raw(), &mut comm))?;
            comm
        };
        let messages = Arc::new(Messages {
            window,
            comm,
            queues: Mutex::new((0..n_pes).map(|_| VecDeque::new()).collect()),
            undelivered: (0..n_pes).map(|_| AtomicUsize::new(0)).collect(),
            fenced: (0..n_pes).map(|_| AtomicBool::new(false)).collect(),
            exchanges: Mutex::new((0..n_pes).map(|_| Exchange::default()).collect()),
            limit: OnceLock::new(),
            stop: AtomicBool::new(false),
        });
        let own = messages.clone();
        let thread = thread::Builder::new().name("aristos-mpi".into()).spawn(move || {
            while !own.stop.load(Ordering::Relaxed) {
                thread::sleep(PERIOD);
                own.advance();
            }
        });
        let failed = |e| MpiError::Unsuitable(format!("cannot start the thread of messages between hosts: {e}"));
        Ok((messages, thread.map_err(failed)?))
    }

    /// Frees the communicator (collective).
    ///
    /// # Safety
    /// The thread has ended, and no message follows.
    pub(super) unsafe fn free(&self, _turn: &Turn) {
        let mut comm = self.comm;
        // SAFETY: this is the communicator's last use. Errors have no consequence here.
        unsafe { ffi::MPI_Comm_free(&mut comm) };
    }

    /// Ends the job if a message has not been delivered after this time.
    pub(super) fn limit(&self, limit: Duration) {
        let _ = self.limit.set(limit);
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Data of later messages is written after that of earlier ones.
    pub(super) fn fence(&self) {
        self.fenced.iter().for_each(|fenced| fenced.store(true, Ordering::Relaxed));
    }

    /// Queues a message to `pe`. A large one starts at once if no other thread calls MPI, a small one in any case, because this PE may
    /// next wait for `pe` inside a call of MPI.
    ///
    /// # Panics
    /// If it does not fit into the heap.
    #[track_caller]
    pub(super) fn send(&self, dest: usize, data: Data, signal: Option<Signal>, pe: usize) {
        let bytes = match &data {
            Data::Copy(data) => data.len(),
            Data::Heap(offset, bytes) => {
                self.window.check_bounds(*offset, *bytes);
                *bytes
            }
        };
        self.window.check_bounds(dest, bytes);
        signal.iter().for_each(|&(signal, ..)| self.window.check_word(signal));
        let piece_bytes = self.window.piece_bytes.load(Ordering::Relaxed);
        let fenced = self.fenced[pe].swap(false, Ordering::Relaxed);
        let mut first = Header { dest, bytes, piece_bytes, signal, fenced }.encode();
        let mut rest = Some(data);
        if bytes <= INLINE_BYTES {
            first.extend_from_slice(self.bytes_of(rest.as_ref()));
            rest = None;
        }
        self.undelivered[pe].fetch_add(1, Ordering::Relaxed);
        lock(&self.queues)[pe].push_back(Outgoing {
            first,
            data: rest,
            piece_bytes,
            bytes,
            requests: Vec::new(),
            since: Instant::now(),
        });
        if bytes <= INLINE_BYTES {
            self.work(&Turn::wait());
        } else {
            self.advance();
        }
    }

    fn bytes_of<'d>(&'d self, data: Option<&'d Data>) -> &'d [u8] {
        match data {
            None => &[],
            Some(Data::Copy(data)) => data,
            // SAFETY: inside the heap, and by the contract of put_nbi unchanged until it has been delivered.
            Some(&Data::Heap(offset, bytes)) => unsafe {
                std::slice::from_raw_parts(self.window.at(offset, bytes).as_ptr(), bytes)
            },
        }
    }

    /// Waits until all messages to `pe` have been delivered.
    pub(super) fn drain(&self, pe: usize) {
        while self.undelivered[pe].load(Ordering::Acquire) > 0 {
            self.advance();
            thread::yield_now();
        }
    }

    /// Receives, delivers and starts messages as far as possible without a wait. Returns at once if another thread calls MPI.
    pub(super) fn advance(&self) {
        if let Some(turn) = Turn::now() {
            self.work(&turn);
        }
    }

    fn work(&self, turn: &Turn) {
        let mut exchanges = lock(&self.exchanges);
        while let Some((source, _)) = self.receive(DELIVERED_TAG, turn) {
            exchanges[source].delivered += 1;
        }
        while let Some((source, message)) = self.receive(HEADER_TAG, turn) {
            let header = Header::decode(&message);
            let inline = message[Header::BYTES..].to_vec();
            exchanges[source].incoming.push_back(Incoming { header, inline, started: false, requests: Vec::new() });
        }
        for (pe, exchange) in exchanges.iter_mut().enumerate() {
            self.deliver(pe, &mut exchange.incoming, turn);
            if self.undelivered[pe].load(Ordering::Relaxed) > 0 {
                self.send_queued(pe, exchange, turn);
            }
        }
    }

    /// Starts messages to `pe` and retires those that have been delivered.
    fn send_queued(&self, pe: usize, exchange: &mut Exchange, turn: &Turn) {
        while exchange.bytes_on_the_way < BYTES_ON_THE_WAY {
            let Some(mut message) = lock(&self.queues)[pe].pop_front() else { break };
            message.since = Instant::now();
            let data = self.bytes_of(message.data.as_ref());
            let parts = [(&message.first[..], HEADER_TAG)];
            let parts = parts.into_iter().chain(data.chunks(message.piece_bytes).map(|piece| (piece, DATA_TAG)));
            let mut requests = Vec::new();
            for (part, tag) in parts {
                let mut request = MpiRequest::new();
                // SAFETY: `message` keeps the part, unchanged, until its requests have completed.
                self.window.abort_on_error_code("MPI_Isend", unsafe {
                    let (at, len, byte) = (part.as_ptr().cast::<c_void>(), part.len() as c_int, ffi::RSMPI_UINT8_T);
                    ffi::MPI_Isend(at, len, byte, pe as c_int, tag, self.comm, &mut request.0)
                });
                requests.push(request);
            }
            message.requests = requests;
            exchange.bytes_on_the_way += message.bytes;
            exchange.on_the_way.push_back(message);
        }
        for message in &mut exchange.on_the_way {
            self.window.retain_incomplete(&mut message.requests, turn);
        }
        while exchange.delivered > 0
            && let Some(message) = exchange.on_the_way.pop_front_if(|message| message.requests.is_empty())
        {
            exchange.bytes_on_the_way -= message.bytes;
            exchange.delivered -= 1;
            self.undelivered[pe].fetch_sub(1, Ordering::Release);
        }
        let limit = self.limit.get().copied().unwrap_or(Duration::MAX);
        if exchange.on_the_way.front().is_some_and(|message| message.since.elapsed() >= limit) {
            self.window.abort_late(pe, limit);
        }
    }

    /// Receives a header or an acknowledgement, with its source.
    fn receive(&self, tag: c_int, _turn: &Turn) -> Option<(usize, Vec<u8>)> {
        let (mut flag, mut len) = (0, 0);
        // SAFETY: a status consists of integers, so all-zero bytes are valid; the null handle is a constant.
        let (mut status, mut matched) = unsafe { (std::mem::zeroed::<ffi::MPI_Status>(), ffi::RSMPI_MESSAGE_NULL) };
        // SAFETY: MPI writes only to the three locals.
        self.window.abort_on_error_code("MPI_Improbe", unsafe {
            ffi::MPI_Improbe(ffi::RSMPI_ANY_SOURCE, tag, self.comm, &mut flag, &mut matched, &mut status)
        });
        if flag == 0 {
            return None;
        }
        // SAFETY: the status belongs to the matched message.
        let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len) };
        self.window.abort_on_error_code("MPI_Get_count", code);
        let mut message = vec![0u8; len as usize];
        // SAFETY: the buffer has the message's length. MPI has the message already, because it is small.
        self.window.abort_on_error_code("MPI_Mrecv", unsafe {
            let at = message.as_mut_ptr().cast::<c_void>();
            ffi::MPI_Mrecv(at, len, ffi::RSMPI_UINT8_T, &mut matched, ffi::RSMPI_STATUS_IGNORE)
        });
        Some((status.MPI_SOURCE as usize, message))
    }

    /// Writes the data of a message from `pe` to the heap, now or when it arrives.
    fn start_incoming(&self, pe: usize, message: &mut Incoming) {
        let Header { dest, bytes, piece_bytes, .. } = message.header;
        let to = self.window.at(dest, bytes).as_ptr();
        message.started = true;
        if bytes <= INLINE_BYTES {
            assert_eq!(message.inline.len(), bytes);
            // SAFETY: `at` has checked the destination, and the ranges do not overlap.
            unsafe { to.copy_from_nonoverlapping(message.inline.as_ptr(), bytes) };
            return;
        }
        for at in (0..bytes).step_by(piece_bytes) {
            let (len, mut request) = (piece_bytes.min(bytes - at) as c_int, MpiRequest::new());
            // SAFETY: `at` has checked the destination, which outlives the request.
            self.window.abort_on_error_code("MPI_Irecv", unsafe {
                let (to, byte) = (to.add(at).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                ffi::MPI_Irecv(to, len, byte, pe as c_int, DATA_TAG, self.comm, &mut request.0)
            });
            message.requests.push(request);
        }
    }

    /// Starts messages from `pe`. Sends the signals of those whose data has arrived, and acknowledges them.
    fn deliver(&self, pe: usize, incoming: &mut VecDeque<Incoming>, turn: &Turn) {
        loop {
            for (place, message) in incoming.iter_mut().enumerate().skip_while(|(_, message)| message.started) {
                if message.header.fenced && place > 0 {
                    break;
                }
                self.start_incoming(pe, message);
            }
            let Some(message) = incoming.front_mut() else { return };
            self.window.retain_incomplete(&mut message.requests, turn);
            if !message.requests.is_empty() {
                return;
            }
            if let Some((signal, value, op)) = message.header.signal {
                // MPI does not order its write of the signal after other writes for this PE's other thread.
                fence(Ordering::Release);
                self.window.signal(signal, value, op, self.window.me, turn);
            }
            incoming.pop_front();
            let mut request = MpiRequest::new();
            // SAFETY: the message has no data, so it needs no buffer.
            unsafe {
                let (nothing, byte) = (std::ptr::null::<c_void>(), ffi::RSMPI_UINT8_T);
                let code = ffi::MPI_Isend(nothing, 0, byte, pe as c_int, DELIVERED_TAG, self.comm, &mut request.0);
                self.window.abort_on_error_code("MPI_Isend", code);
                self.window.abort_on_error_code("MPI_Request_free", ffi::MPI_Request_free(&mut request.0));
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
