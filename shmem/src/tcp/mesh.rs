//! State shared by the threads of a PE: its connections, and the messages and answers received over them.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::frame::{Header, Kind};
pub(crate) use super::outbox::lock;
use super::outbox::{Body, Outbox};
use crate::doorbell::ring;
use crate::{LostPe, Segment};

/// Maximum bytes queued per peer; senders block above it.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// How long a PE may take to answer a liveness query. The PE's progress thread answers, even while the PE computes.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The epoll event of the wake-up descriptor, which belongs to no peer.
pub(super) const WAKE: u64 = u64::MAX;

/// One connection.
pub(super) struct Peer {
    pub(super) socket: OwnedFd,
    pub(super) out: Outbox,
    /// Whether epoll reports when the socket has room.
    armed: Mutex<bool>,
    /// Number of the peer's frames that this PE has carried out.
    pub(super) carried_out: AtomicU64,
    /// Number of this PE's frames that the peer has carried out, as last reported.
    pub(super) acknowledged: AtomicU64,
    /// Set once the peer has sent `Bye`.
    pub(super) bye: AtomicBool,
    /// Set once the connection is closed.
    pub(super) ended: AtomicBool,
}

/// The destination of an answer.
pub(super) enum Wanted {
    /// `answers`; the number of bytes expected.
    Bytes(usize),
    /// This PE's heap: offset and length.
    Heap(Arc<Segment>, usize, usize),
}

/// State polled by waiting threads.
#[derive(Default)]
pub(super) struct ReceivedState {
    next_question: u64,
    /// By question: the PE asked, and the destination of its answer.
    pub(super) wanted: HashMap<u64, (usize, Wanted)>,
    pub(super) answers: HashMap<u64, Vec<u8>>,
    /// By channel: the sender and content of each message.
    pub(super) messages: HashMap<u64, VecDeque<(usize, Vec<u8>)>>,
}

/// A PE's connections to all others.
pub(crate) struct Mesh {
    pub(super) me: usize,
    /// By PE; `None` for itself.
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) epoll: OwnedFd,
    pub(super) wake: OwnedFd,
    /// The heap that frames access, while one exists.
    pub(super) window: RwLock<Option<Arc<Segment>>>,
    pub(super) received: Mutex<ReceivedState>,
    changed: Condvar,
    /// Number of threads that wait for `changed`.
    waiters: AtomicUsize,
    lost: OnceLock<LostPe>,
    /// Tells the progress thread to end.
    pub(super) stop: AtomicBool,
}

impl Mesh {
    /// A mesh over these connections, which do not block.
    pub(super) fn new(me: usize, sockets: Vec<Option<OwnedFd>>) -> Result<Mesh, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        for (pe, socket) in sockets.iter().enumerate() {
            if let Some(socket) = socket {
                epoll::add(&epoll, socket, EventData::new_u64(pe as u64), EventFlags::IN)?;
            }
        }
        let peer = |socket| Peer {
            socket,
            out: Outbox::default(),
            armed: Mutex::default(),
            carried_out: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            bye: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        };
        Ok(Mesh {
            me,
            peers: sockets.into_iter().map(|socket| socket.map(peer)).collect(),
            epoll,
            wake,
            window: RwLock::new(None),
            received: Mutex::default(),
            changed: Condvar::new(),
            waiters: AtomicUsize::new(0),
            lost: OnceLock::new(),
            stop: AtomicBool::new(false),
        })
    }

    pub(super) fn n_pes(&self) -> usize {
        self.peers.len()
    }

    /// All peers by PE, with their connections.
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(pe, peer)| Some((pe, peer.as_ref()?)))
    }

    /// The connection to another PE.
    #[track_caller]
    pub(super) fn peer(&self, pe: usize) -> &Peer {
        self.peers[pe].as_ref().expect("a PE has no connection to itself")
    }

    pub(super) fn window(&self) -> Option<Arc<Segment>> {
        self.window.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The first PE that was lost.
    pub(crate) fn lost(&self) -> Option<&LostPe> {
        self.lost.get()
    }

    /// Records that `pe` is lost, unless another PE already is; ends all waits.
    pub(super) fn lose(&self, pe: usize, why: impl Into<String>) {
        let _ = self.lost.set(LostPe { pe, why: why.into() });
        if let Some(Some(peer)) = self.peers.get(pe) {
            peer.out.close();
        }
        if let Some(window) = self.window() {
            ring(window.bell());
        }
        self.notify();
    }

    /// Records that a PE is lost after a wait for it timed out, unless the wait ended for another PE's loss.
    pub(crate) fn give_up(&self, pe: usize, why: String) {
        if self.lost().is_none() {
            self.lose(pe, why);
        }
    }

    /// The connection to `pe` has ended.
    pub(super) fn end(&self, pe: usize, why: &str) {
        let peer = self.peer(pe);
        if peer.ended.swap(true, Ordering::SeqCst) {
            return;
        }
        let _ = epoll::delete(&self.epoll, &peer.socket);
        if peer.bye.load(Ordering::SeqCst) {
            peer.out.close();
            self.notify();
        } else {
            self.lose(pe, why);
        }
    }

    /// Wakes the waiting threads, because one of their conditions may have changed.
    pub(super) fn notify(&self) {
        // A waiter increments `waiters` before it evaluates its condition under the lock: it sees the change, or is counted here.
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.received));
            self.changed.notify_all();
        }
    }

    /// Waits until `look`, which loads with SeqCst, returns a value; `None` after the deadline or the loss of a PE.
    pub(super) fn wait<R>(
        &self,
        deadline: Instant,
        mut look: impl FnMut(&mut ReceivedState) -> Option<R>,
    ) -> Option<R> {
        let mut state = lock(&self.received);
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            if let Some(found) = look(&mut state) {
                break Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.lost().is_some() {
                break None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// Sends a frame to `pe`, unless it is lost or has ended. Returns the frame's number.
    pub(super) fn send(&self, pe: usize, header: Header, body: Body<'_>) -> u64 {
        let peer = self.peer(pe);
        let is_op = matches!(header.kind, Kind::Put | Kind::PutSignal | Kind::Signal | Kind::Get | Kind::FetchAdd);
        let carried_out = || peer.carried_out.load(Ordering::SeqCst);
        let header = || Header { carried_out: carried_out(), ..header }.to_bytes();
        match peer.out.send(&peer.socket, header, body, is_op) {
            Ok((number, waits)) => {
                if waits {
                    self.arm(pe, peer, true);
                }
                number
            }
            Err(error) => {
                self.fail(pe, error);
                0
            }
        }
    }

    /// Blocks while more than the maximum is queued for `pe`; after `limit` the PE is lost.
    pub(super) fn make_room(&self, pe: usize, limit: Duration) {
        let peer = self.peer(pe);
        if peer.out.waiting_bytes() <= WAITING_BYTES_MAX {
            return;
        }
        let room = |_: &mut ReceivedState| (peer.out.waiting_bytes() <= WAITING_BYTES_MAX).then_some(());
        if self.wait(Instant::now() + limit, room).is_none() {
            self.give_up(pe, format!("it has not taken what was sent to it for {} s", limit.as_secs_f64()));
        }
    }

    /// Writes queued frames to `pe`, as far as its socket has room.
    pub(super) fn flush(&self, pe: usize) {
        let peer = self.peer(pe);
        // Disarm before flushing, so that a sender that queues a frame meanwhile arms it again.
        self.arm(pe, peer, false);
        match peer.out.flush(&peer.socket) {
            Ok(true) => self.arm(pe, peer, true),
            Ok(false) => {}
            Err(error) => self.fail(pe, error),
        }
        self.notify();
    }

    /// Turns epoll's reports of room in the socket on or off.
    fn arm(&self, pe: usize, peer: &Peer, wanted: bool) {
        let mut armed = lock(&peer.armed);
        if *armed != wanted {
            *armed = wanted;
            let events = if wanted { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            // Fails only for a closed socket.
            let _ = epoll::modify(&self.epoll, &peer.socket, EventData::new_u64(pe as u64), events);
        }
    }

    /// Handles a failed send to `pe`: the progress thread still reads its last frames, then finds the end of the stream.
    fn fail(&self, pe: usize, error: Errno) {
        self.peer(pe).out.close();
        if !matches!(error, Errno::PIPE | Errno::CONNRESET) {
            self.lose(pe, format!("its connection has failed: {error}"));
        }
    }

    /// Sends `pe` a question, made by `question` from its number, and returns the answer. If no answer arrives within `limit`, the PE is
    /// lost.
    pub(super) fn ask(
        &self,
        pe: usize,
        wanted: usize,
        question: impl FnOnce(u64) -> Header,
        limit: Duration,
    ) -> Option<Vec<u8>> {
        let number = self.question(pe, Wanted::Bytes(wanted));
        self.send(pe, question(number), Body::Bytes(&[]));
        let gone = || self.peer(pe).ended.load(Ordering::SeqCst);
        let found = self.wait(Instant::now() + limit, |state| match state.answers.remove(&number) {
            None if gone() => Some(None),
            answer => answer.map(Some),
        });
        if found.is_none() || found == Some(None) {
            lock(&self.received).wanted.remove(&number);
            self.give_up(
                pe,
                match found {
                    Some(_) => "it has ended".to_string(),
                    None => format!("it has not answered for {} s", limit.as_secs_f64()),
                },
            );
        }
        found.flatten()
    }

    /// Registers a question to `pe`; returns its number.
    pub(super) fn question(&self, pe: usize, wanted: Wanted) -> u64 {
        let mut state = lock(&self.received);
        state.next_question += 1;
        let number = state.next_question;
        state.wanted.insert(number, (pe, wanted));
        number
    }

    /// Waits until all peers have carried out all operations sent to them. After `limit` the first peer that has not is lost.
    pub(super) fn quiet(&self, limit: Duration) {
        let mut open: Vec<(usize, &Peer, u64)> = Vec::new();
        for (pe, peer) in self.others() {
            let last = peer.out.last_op();
            if peer.acknowledged.load(Ordering::SeqCst) < last {
                self.send(pe, Header::of(Kind::Ask), Body::Bytes(&[]));
                open.push((pe, peer, last));
            }
        }
        if open.is_empty() {
            return;
        }
        let done = self.wait(Instant::now() + limit, |_| {
            open.retain(|(_, peer, last)| {
                peer.acknowledged.load(Ordering::SeqCst) < *last && !peer.ended.load(Ordering::SeqCst)
            });
            open.is_empty().then_some(())
        });
        if let (None, Some((pe, ..))) = (done, open.first()) {
            self.give_up(*pe, format!("it has not carried out what was sent to it for {} s", limit.as_secs_f64()));
        }
    }

    /// After a wait that timed out: queries all PEs, and records one that does not answer as lost. Returns at once if all answer.
    pub(crate) fn find_silent(&self) {
        let asked: Vec<(usize, &Peer, u64)> = self
            .others()
            .filter(|(_, peer)| !peer.ended.load(Ordering::SeqCst))
            .map(|(pe, peer)| (pe, peer, self.send(pe, Header::of(Kind::Ask), Body::Bytes(&[]))))
            .collect();
        let mut silent = asked;
        self.wait(Instant::now() + ANSWER_LIMIT, |_| {
            silent.retain(|(_, peer, number)| {
                peer.acknowledged.load(Ordering::SeqCst) < *number && !peer.ended.load(Ordering::SeqCst)
            });
            silent.is_empty().then_some(())
        });
        if let Some((pe, ..)) = silent.first() {
            self.give_up(*pe, "its process does not answer".to_string());
        }
    }
}
