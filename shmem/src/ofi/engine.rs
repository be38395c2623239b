//! What is on its way through libfabric: operations that are queued, posted and done, and the thread that keeps them moving.
//!
//! Who issues an operation queues it, and posts it at once where nobody else is in libfabric; otherwise whoever is there does, before it goes. So
//! issuing never waits for a poll, which may be reading megabytes. Polling is the thread's, and that of who waits.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::ffi::{Done, Fabric, Kind, Posted, RawOp};
use crate::Segment;
use crate::doorbell::ring;
use crate::tcp::{Mesh, Watch, lock};

/// How long another way is given to say why a PE is lost, after an operation on it has failed.
const GRACE: Duration = Duration::from_millis(500);
/// So often the thread looks again without a pause where a provider says that there is something to do.
const AGAIN_MOST: u32 = 256;
/// Polls in a row, of some completions each, before what they allow is posted.
const POLLS: usize = 8;

/// The local side of an operation.
pub(super) enum Data {
    /// None but the operand.
    Word,
    /// A copy of what is put, or room for what is got.
    Bytes(Box<[u8]>),
    /// Offset and length in the own heap.
    Heap(usize, usize),
}

/// What came of an operation that somebody waits for: nothing where it failed.
pub(super) type Answer = Arc<OnceLock<Option<Box<[u8]>>>>;

/// One operation. While it is posted libfabric alone touches it.
#[repr(C)]
pub(super) struct Op {
    /// For the provider (struct fi_context2): at the operation's address.
    _context: [u64; 8],
    pub(super) kind: Kind,
    pub(super) pe: usize,
    /// Offset in the target's heap.
    pub(super) at: usize,
    pub(super) data: Data,
    /// An atomic's operand.
    pub(super) operand: u64,
    /// What a word was.
    result: u64,
    /// To be posted when all that was sent to the PE before is done.
    pub(super) fenced: bool,
    /// To be posted when this is done: the signal of a put.
    pub(super) then: Option<Box<Op>>,
    /// Counted as in flight with the one that it follows.
    follows: bool,
    pub(super) answer: Option<Answer>,
}

impl Op {
    /// One that nothing follows and nobody waits for.
    pub(super) fn new(kind: Kind, pe: usize, at: usize, data: Data) -> Op {
        Op {
            _context: [0; 8],
            kind,
            pe,
            at,
            data,
            operand: 0,
            result: 0,
            fenced: false,
            then: None,
            follows: false,
            answer: None,
        }
    }

    /// How many operations it is, with the one that follows.
    fn count(&self) -> usize {
        1 + usize::from(self.then.is_some())
    }

    /// The bytes of the copy that it holds.
    fn held_bytes(&self) -> usize {
        match &self.data {
            Data::Bytes(bytes) => bytes.len(),
            _ => 0,
        }
    }
}

/// An operation that libfabric has.
struct Held(NonNull<Op>);

// SAFETY: it is the operation's only owner; an operation is plain data.
unsafe impl Send for Held {}

/// What is counted for a PE.
#[derive(Default)]
struct Counts {
    /// Operations that are issued and not done.
    open: AtomicUsize,
    /// Bytes of copies that are not done.
    held_bytes: AtomicUsize,
}

/// Operations that nobody has looked at yet.
struct Queue {
    ops: Vec<Op>,
    /// Fences so far, and by PE how many there had been at its last operation.
    fences: u64,
    fenced: Vec<u64>,
}

/// How a PE is reached.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// libfabric's name for it.
    pub(super) to: u64,
    /// Where its heap begins.
    pub(super) base: u64,
    pub(super) key: u64,
}

/// What one thread at a time works on.
struct Core {
    /// `None` after its end.
    fabric: Option<Fabric>,
    targets: Vec<Target>,
    /// By PE: operations to be posted, in their order.
    ready: Vec<VecDeque<Op>>,
    /// The PEs that have some.
    open: BTreeSet<usize>,
    /// Whether one of them is to be tried again, as there was no room or no connection.
    again: bool,
    /// By PE: how many operations are posted, or follow one that is.
    in_flight: Vec<usize>,
    /// By PE: whether an operation has failed; then nothing more is sent there.
    gone: Vec<bool>,
    posted: HashMap<usize, Held>,
    done: Vec<Done>,
}

/// A PE's operations, and what its threads share for them.
pub(super) struct Engine {
    me: usize,
    heap: Arc<Segment>,
    provider: String,
    queue: Mutex<Queue>,
    has_new: AtomicBool,
    core: Mutex<Core>,
    counts: Vec<Counts>,
    /// The first operation that failed: when, on which PE, and how.
    failed: Mutex<Option<(Instant, usize, String)>>,
    wake: OwnedFd,
    stop: AtomicBool,
}

impl Engine {
    pub(super) fn new(
        me: usize,
        fabric: Fabric,
        provider: String,
        targets: Vec<Target>,
        heap: Arc<Segment>,
    ) -> rustix::io::Result<Engine> {
        let n = targets.len();
        let core = Core {
            fabric: Some(fabric),
            targets,
            ready: (0..n).map(|_| VecDeque::new()).collect(),
            open: BTreeSet::new(),
            again: false,
            in_flight: vec![0; n],
            gone: vec![false; n],
            posted: HashMap::new(),
            done: Vec::new(),
        };
        Ok(Engine {
            me,
            heap,
            provider,
            queue: Mutex::new(Queue { ops: Vec::new(), fences: 0, fenced: vec![0; n] }),
            has_new: AtomicBool::new(false),
            core: Mutex::new(core),
            counts: (0..n).map(|_| Counts::default()).collect(),
            failed: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
        })
    }

    /// Issues operations on one PE, in this order.
    pub(super) fn issue(&self, ops: impl IntoIterator<Item = Op>) {
        let mut queue = lock(&self.queue);
        for mut op in ops {
            // A fence orders deliveries, and no gets.
            if op.kind != Kind::Read {
                let now = queue.fences;
                op.fenced |= std::mem::replace(&mut queue.fenced[op.pe], now) != now;
            }
            let counts = &self.counts[op.pe];
            counts.open.fetch_add(op.count(), Ordering::SeqCst);
            counts.held_bytes.fetch_add(op.held_bytes(), Ordering::SeqCst);
            queue.ops.push(op);
        }
        self.has_new.store(true, Ordering::SeqCst);
        drop(queue);
        // Either the lock is seen to be free, or its holder sees `has_new`: it looks after a fence of its own.
        fence(Ordering::SeqCst);
        self.turn(false);
    }

    /// What is issued from here on is delivered after what was issued before.
    pub(super) fn fence(&self) {
        lock(&self.queue).fences += 1;
    }

    /// Bytes of copies that are not yet in `pe`'s memory.
    pub(super) fn held_bytes(&self, pe: usize) -> usize {
        self.counts[pe].held_bytes.load(Ordering::SeqCst)
    }

    /// By PE on which something is under way: an answer that comes when all of it is done, whatever is issued meanwhile.
    pub(super) fn drain(&self) -> Vec<(usize, Answer)> {
        let is_open = |counts: &Counts| counts.open.load(Ordering::SeqCst) > 0;
        let open = self.counts.iter().enumerate().filter(|(_, counts)| is_open(counts));
        let drains: Vec<(usize, Answer)> = open.map(|(pe, _)| (pe, Answer::default())).collect();
        if !drains.is_empty() {
            self.issue(drains.iter().map(|(pe, answer)| {
                let mut last = Op::new(Kind::Nothing, *pe, 0, Data::Word);
                (last.fenced, last.answer) = (true, Some(answer.clone()));
                last
            }));
        }
        drains
    }

    /// Posts what was issued, and with `polls` moves what there is to move, unless another thread does; that one sees to what was issued.
    pub(super) fn turn(&self, polls: bool) {
        loop {
            let mut core = match self.core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // Its holder looks at `has_new` when it has given it back.
                Err(TryLockError::WouldBlock) => return,
            };
            core.work(self, polls);
            let again = core.again;
            drop(core);
            fence(Ordering::SeqCst);
            if again && !polls {
                // The thread does so soon.
                let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
            }
            if !self.has_new.load(Ordering::SeqCst) {
                break;
            }
        }
        if polls {
            ring(self.heap.bell());
        }
    }

    /// The progress thread's work, until [`Engine::end`].
    pub(super) fn run(&self, mesh: &Mesh) {
        let _watch = Watch(mesh);
        let mut again = 0u32;
        while !self.stop.load(Ordering::SeqCst) {
            self.turn(true);
            self.name_who_failed(mesh);
            let mut core = self.core();
            let busy = (core.again, !core.posted.is_empty() || lock(&self.failed).is_some());
            let Some(fabric) = &mut core.fabric else { return };
            let (fd, may_wait) = (fabric.fd(), fabric.may_wait());
            drop(core);
            // Who issued something while the lock was held here has left it to this thread.
            fence(Ordering::SeqCst);
            if !may_wait || self.has_new.load(Ordering::SeqCst) {
                // Not given away each time: there is something to do, and on a busy machine it would take milliseconds to come back.
                again = again.wrapping_add(1);
                if again.is_multiple_of(AGAIN_MOST) {
                    rustix::thread::sched_yield();
                }
                continue;
            }
            let at_most = match (busy, fd) {
                // What could not be posted is tried again.
                ((true, _), Some(_)) => Duration::from_millis(1),
                // The descriptor says when; this is in case it does not.
                ((_, true), Some(_)) => Duration::from_millis(10),
                (_, Some(_)) => Duration::from_millis(50),
                ((false, false), None) => Duration::from_millis(1),
                (_, None) => Duration::from_micros(100),
            };
            // SAFETY: the descriptor is the completion queue's, which is closed after this thread has ended.
            let fd = fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
            let mut fds: Vec<PollFd<'_>> = fd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            fds.push(PollFd::new(&self.wake, PollFlags::IN));
            let time = Timespec { tv_sec: 0, tv_nsec: at_most.as_nanos() as _ };
            // Whatever it says, it is time to look.
            let _ = poll(&mut fds, Some(&time));
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
    }

    /// A PE on which an operation has failed is lost, if the connections over TCP have not said by now who is, and why: mostly another.
    fn name_who_failed(&self, mesh: &Mesh) {
        let mut failed = lock(&self.failed);
        match &*failed {
            Some((at, pe, why)) if at.elapsed() >= GRACE => {
                mesh.give_up(*pe, why.clone());
                *failed = None;
            }
            _ => {}
        }
    }

    /// Ends the thread.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Closes the endpoint. Nothing may be sent any more.
    pub(super) fn close(&self) {
        self.core().close();
    }

    /// No thread is in libfabric from now on, for as long as the process lives; unless one is for a second.
    pub(super) fn leave(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            match self.core.try_lock() {
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
                core => return std::mem::forget(core),
            }
        }
    }

    /// Counts an operation as done, with what would have followed it.
    fn ended(&self, op: Op, well: bool) {
        let (counts, ended) = (&self.counts[op.pe], op.count());
        counts.held_bytes.fetch_sub(op.held_bytes(), Ordering::SeqCst);
        let Op { kind, data, answer, result, .. } = op;
        if let Some(answer) = answer {
            let bytes = match (kind, data) {
                (Kind::FetchAdd, _) => Some(Box::from(result.to_ne_bytes())),
                (_, Data::Bytes(bytes)) => Some(bytes),
                _ => None,
            };
            let _ = answer.set(bytes.filter(|_| well));
        }
        counts.open.fetch_sub(ended, Ordering::SeqCst);
    }

    /// Keeps all threads of this PE out of libfabric as long as the value lives.
    #[cfg(test)]
    pub(super) fn freeze(&self) -> impl Sized + '_ {
        self.core()
    }

    /// What is posted and has not ended.
    #[cfg(test)]
    pub(super) fn posted(&self) -> Vec<Kind> {
        // SAFETY: what is in the table has not been freed, and libfabric does not write the kind.
        self.core().posted.values().map(|Held(op)| unsafe { (*op.as_ptr()).kind }).collect()
    }

    fn core(&self) -> std::sync::MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    /// See [`Engine::turn`].
    fn work(&mut self, engine: &Engine, polls: bool) {
        if engine.has_new.swap(false, Ordering::SeqCst) {
            for op in std::mem::take(&mut lock(&engine.queue).ops) {
                self.open.insert(op.pe);
                self.ready[op.pe].push_back(op);
            }
        }
        self.post_all(engine);
        if polls {
            for _ in 0..POLLS {
                if !self.poll(engine) {
                    break;
                }
            }
            self.post_all(engine);
        }
    }

    fn post_all(&mut self, engine: &Engine) {
        self.again = false;
        let mut next = 0;
        while let Some(&pe) = self.open.range(next..).next() {
            self.post(engine, pe);
            next = pe + 1;
        }
    }

    /// Posts what is ready for `pe`, as far as it may be and there is room.
    fn post(&mut self, engine: &Engine, pe: usize) {
        let Target { to, base, key } = self.targets[pe];
        while let Some(op) = self.ready[pe].pop_front() {
            let Some(fabric) = self.fabric.as_mut().filter(|_| !self.gone[pe]) else {
                engine.ended(op, false);
                continue;
            };
            if op.fenced && self.in_flight[pe] > 0 {
                return self.ready[pe].push_front(op);
            }
            if op.kind == Kind::Nothing {
                engine.ended(op, true);
                continue;
            }
            let added = if op.follows { 0 } else { op.count() };
            let op = NonNull::from(Box::leak(Box::new(op)));
            // SAFETY: the operation is this function's alone; pointers into it stay valid until it is a box again.
            let raw = unsafe {
                let at = op.as_ptr();
                let (buffer, bytes) = match &mut (*at).data {
                    Data::Word => ((&raw mut (*at).operand).cast(), size_of::<u64>()),
                    Data::Bytes(bytes) => (bytes.as_mut_ptr(), bytes.len()),
                    Data::Heap(offset, bytes) => (engine.heap.address(*offset, *bytes).as_ptr(), *bytes),
                };
                RawOp {
                    kind: (*at).kind as u32,
                    to,
                    at: base + (*at).at as u64,
                    key,
                    buffer: buffer.cast(),
                    bytes: bytes as u64,
                    result: (&raw mut (*at).result).cast(),
                    context: at.cast(),
                }
            };
            // SAFETY: all that it names is in the operation, which nobody touches before it has ended or the fabric is dropped, or is in the
            // heap, which lives as long; that nobody changes there what is read, or touches what is written, is the contract of
            // put_nbi and get_nbi. The context is the operation's first 64 bytes.
            match unsafe { fabric.post(&raw) } {
                Posted::Yes => {
                    self.in_flight[pe] += added;
                    self.posted.insert(op.addr().get(), Held(op));
                }
                Posted::Later => {
                    self.again = true;
                    // SAFETY: it was refused, so that it is ours alone.
                    return self.ready[pe].push_front(*unsafe { Box::from_raw(op.as_ptr()) });
                }
                Posted::Refused(why) => {
                    // SAFETY: as above.
                    let op = *unsafe { Box::from_raw(op.as_ptr()) };
                    self.in_flight[pe] += added;
                    self.failed(engine, op, &why);
                }
            }
        }
        self.open.remove(&pe);
    }

    /// Polls once; whether there may be more.
    fn poll(&mut self, engine: &Engine) -> bool {
        let Some(fabric) = &mut self.fabric else { return false };
        let mut done = std::mem::take(&mut self.done);
        let polled = fabric.poll(&mut done);
        for Done { context, error } in done.drain(..) {
            // What is not known is no operation's, but a provider's word on a connection: its operations say the same.
            let Some(Held(op)) = self.posted.remove(&context) else { continue };
            // SAFETY: it was leaked when it was posted, is taken out of `posted` once, and libfabric has ended with it.
            let op = *unsafe { Box::from_raw(op.as_ptr()) };
            match error {
                None => self.succeeded(engine, op),
                Some(why) => self.failed(engine, op, &why),
            }
        }
        self.done = done;
        match polled {
            Ok(more) => more,
            Err(why) => {
                // Nothing ends any more.
                let line = format!("libfabric ({}): fi_cq_read: {why}", engine.provider);
                lock(&engine.failed).get_or_insert((Instant::now(), engine.me, line));
                false
            }
        }
    }

    fn succeeded(&mut self, engine: &Engine, mut op: Op) {
        let pe = op.pe;
        self.in_flight[pe] -= 1;
        if let Some(mut signal) = op.then.take() {
            // Before all that waits, which may be for this one's end.
            signal.follows = true;
            self.ready[pe].push_front(*signal);
            self.open.insert(pe);
        }
        engine.ended(op, true);
    }

    /// Nothing more is sent to the PE of an operation that has failed.
    fn failed(&mut self, engine: &Engine, op: Op, why: &str) {
        let pe = op.pe;
        self.in_flight[pe] = self.in_flight[pe].saturating_sub(op.count());
        self.gone[pe] = true;
        if !self.ready[pe].is_empty() {
            self.open.insert(pe);
        }
        let line = format!("libfabric ({}): {}: {why}", engine.provider, op.kind.call());
        lock(&engine.failed).get_or_insert((Instant::now(), pe, line));
        engine.ended(op, false);
    }

    fn close(&mut self) {
        self.fabric = None;
        for (_, Held(op)) in self.posted.drain() {
            // SAFETY: leaked when it was posted; the endpoint is closed, so that libfabric has ended with it.
            drop(unsafe { Box::from_raw(op.as_ptr()) });
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.close();
    }
}
