//! What the threads of a PE share: its connections, and what has come over them.

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

/// So many bytes may wait for a peer before who sends more to it waits.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// How long a PE that is asked whether it is there may take to answer: its progress thread does, whatever else it does.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The event that is no peer's.
pub(super) const WAKE: u64 = u64::MAX;

/// One connection.
pub(super) struct Peer {
    pub(super) socket: OwnedFd,
    pub(super) out: Outbox,
    /// Whether the progress thread is told when the socket takes more.
    armed: Mutex<bool>,
    /// How many of its frames this PE has carried out.
    pub(super) carried_out: AtomicU64,
    /// How many of this PE's frames it has carried out, as it last said.
    pub(super) acknowledged: AtomicU64,
    /// It has said that it ends.
    pub(super) bye: AtomicBool,
    /// Its connection is at its end.
    pub(super) ended: AtomicBool,
}

/// Where an answer goes.
pub(super) enum Wanted {
    /// To who asked, by way of `answers`: so many bytes.
    Bytes(usize),
    /// To the own heap.
    Heap(Arc<Segment>, usize, usize),
}

/// What who waits looks at.
#[derive(Default)]
pub(super) struct Came {
    next_question: u64,
    /// By question: whom it was asked, and what is wanted.
    pub(super) wanted: HashMap<u64, (usize, Wanted)>,
    pub(super) answers: HashMap<u64, Vec<u8>>,
    /// By channel: messages, and who sent them.
    pub(super) messages: HashMap<u64, VecDeque<(usize, Vec<u8>)>>,
}

/// A PE's connections to all others.
pub(crate) struct Mesh {
    pub(super) me: usize,
    /// By PE; none to itself.
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) epoll: OwnedFd,
    pub(super) wake: OwnedFd,
    /// The heap that frames are about, while there is one.
    pub(super) window: RwLock<Option<Arc<Segment>>>,
    pub(super) came: Mutex<Came>,
    changed: Condvar,
    /// How many threads wait for `changed`.
    waiters: AtomicUsize,
    lost: OnceLock<LostPe>,
    /// The progress thread is to end.
    pub(super) stop: AtomicBool,
}

impl Mesh {
    /// Over these connections, which do not block.
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
            came: Mutex::default(),
            changed: Condvar::new(),
            waiters: AtomicUsize::new(0),
            lost: OnceLock::new(),
            stop: AtomicBool::new(false),
        })
    }

    pub(super) fn n_pes(&self) -> usize {
        self.peers.len()
    }

    /// The other PEs that there are connections to.
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

    /// From now on `pe` is lost, if none is so far; ends all waits.
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

    /// The same of one that was waited for in vain: not where that was for another's loss.
    pub(crate) fn give_up(&self, pe: usize, why: String) {
        if self.lost().is_none() {
            self.lose(pe, why);
        }
    }

    /// The connection to `pe` is at its end.
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

    /// Wakes who waits, after something that they wait for may have come.
    pub(super) fn notify(&self) {
        // Who waits counts itself before it looks, and looks under the lock: it sees what has come, or is counted here.
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.came));
            self.changed.notify_all();
        }
    }

    /// Waits until `look` finds something, all with SeqCst; `None` where it has not by the deadline, or a PE was lost first.
    pub(super) fn wait<R>(&self, deadline: Instant, mut look: impl FnMut(&mut Came) -> Option<R>) -> Option<R> {
        let mut came = lock(&self.came);
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            if let Some(found) = look(&mut came) {
                break Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.lost().is_some() {
                break None;
            }
            came = self.changed.wait_timeout(came, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// Sends a frame to `pe`; not to one that is lost or has ended. Returns its number there.
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

    /// Waits, where very much waits for `pe` already, until there is less, `limit` long; past that the PE is lost.
    pub(super) fn make_room(&self, pe: usize, limit: Duration) {
        let peer = self.peer(pe);
        if peer.out.waiting_bytes() <= WAITING_BYTES_MAX {
            return;
        }
        let room = |_: &mut Came| (peer.out.waiting_bytes() <= WAITING_BYTES_MAX).then_some(());
        if self.wait(Instant::now() + limit, room).is_none() {
            self.give_up(pe, format!("it has not taken what was sent to it for {} s", limit.as_secs_f64()));
        }
    }

    /// Writes what waits for `pe`, as far as its socket takes it.
    pub(super) fn flush(&self, pe: usize) {
        let peer = self.peer(pe);
        // First, so that who queues something from here on asks again.
        self.arm(pe, peer, false);
        match peer.out.flush(&peer.socket) {
            Ok(true) => self.arm(pe, peer, true),
            Ok(false) => {}
            Err(error) => self.fail(pe, error),
        }
        self.notify();
    }

    /// Has the progress thread told when the socket takes more, or not.
    fn arm(&self, pe: usize, peer: &Peer, wanted: bool) {
        let mut armed = lock(&peer.armed);
        if *armed != wanted {
            *armed = wanted;
            let events = if wanted { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            // Fails only for a socket that has ended.
            let _ = epoll::modify(&self.epoll, &peer.socket, EventData::new_u64(pe as u64), events);
        }
    }

    /// Sending to `pe` has failed: the progress thread reads what it had sent before, and finds the end.
    fn fail(&self, pe: usize, error: Errno) {
        self.peer(pe).out.close();
        if !matches!(error, Errno::PIPE | Errno::CONNRESET) {
            self.lose(pe, format!("its connection has failed: {error}"));
        }
    }

    /// Asks `pe` something: `question` is made with the question's number. The answer, if it comes within `limit`; past that the PE
    /// is lost.
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
        let found = self.wait(Instant::now() + limit, |came| match came.answers.remove(&number) {
            None if gone() => Some(None),
            answer => answer.map(Some),
        });
        if found.is_none() || found == Some(None) {
            lock(&self.came).wanted.remove(&number);
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

    /// Makes a question to `pe`; its number.
    pub(super) fn question(&self, pe: usize, wanted: Wanted) -> u64 {
        let mut came = lock(&self.came);
        came.next_question += 1;
        let number = came.next_question;
        came.wanted.insert(number, (pe, wanted));
        number
    }

    /// Waits until all peers have carried out what was sent to them, `limit` long; past that one that has not is lost.
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

    /// After a wait in vain: whether a PE is silent altogether, which is then lost. Takes no time where all are there.
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
