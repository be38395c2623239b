//! Operations in libfabric: queued, posted, completed; and the thread that progresses them.
//!
//! An issuing thread queues an operation and posts it at once if no other thread is in libfabric; otherwise the thread that is
//! there posts it before it leaves. Issuing therefore never waits for a poll, which may copy megabytes. Only the progress
//! thread and waiting threads poll.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::ffi::{Done, Fabric, Kind, PostResult, RawOp};
use crate::Segment;
use crate::doorbell::ring;
use crate::tcp::{Mesh, Watch, lock};

/// After a failed operation, time for TCP supervision to name the lost PE before the operation's target is reported.
const GRACE: Duration = Duration::from_millis(500);
/// Iterations without a pause while a provider reports pending work, before the progress thread yields.
const MAX_SPINS: u32 = 256;
/// Maximum consecutive polls before newly enabled operations are posted.
const MAX_POLLS: usize = 8;

/// The local buffer of an operation.
pub(super) enum Data {
    /// No buffer, only the operand.
    Word,
    /// A copy of the data to put, or a buffer for a get.
    Bytes(Box<[u8]>),
    /// Offset and length in this PE's heap.
    Heap(usize, usize),
}

/// The result of an operation that a thread waits for; `None` if it failed.
pub(super) type Answer = Arc<OnceLock<Option<Box<[u8]>>>>;

/// An operation. While it is posted only libfabric accesses it.
#[repr(C)]
pub(super) struct Op {
    /// The provider's context (struct fi_context2); must be the first field.
    _context: [u64; 8],
    pub(super) kind: Kind,
    pub(super) pe: usize,
    /// Offset in the target's heap.
    pub(super) at: usize,
    pub(super) data: Data,
    /// Operand of an atomic.
    pub(super) operand: u64,
    /// Previous value of a word.
    result: u64,
    /// Whether all earlier operations on the PE must complete before it is posted.
    pub(super) fenced: bool,
    /// An operation to post when this one completes: the signal of a put.
    pub(super) then: Option<Box<Op>>,
    /// Whether it was counted as in flight with its predecessor.
    follows: bool,
    pub(super) answer: Option<Answer>,
}

impl Op {
    /// An operation without a successor or a waiter.
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

    /// Number of operations, including the successor.
    fn count(&self) -> usize {
        1 + usize::from(self.then.is_some())
    }

    /// Bytes of the copy that it holds.
    fn copied_bytes(&self) -> usize {
        match &self.data {
            Data::Bytes(bytes) => bytes.len(),
            _ => 0,
        }
    }
}

/// A posted operation.
struct PostedOp(NonNull<Op>);

// SAFETY: it is the operation's only owner, and an operation can be sent between threads.
unsafe impl Send for PostedOp {}

/// Counters of a PE.
#[derive(Default)]
struct Counts {
    /// Operations issued and not completed.
    open: AtomicUsize,
    /// Bytes of copies not yet completed.
    copied_bytes: AtomicUsize,
}

/// Operations issued and not yet taken over by `Core`.
struct Queue {
    ops: Vec<Op>,
    /// Number of fences, and per PE that number at its last operation.
    fences: u64,
    fenced: Vec<u64>,
}

/// Remote access to a PE's heap.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// libfabric's address of the PE.
    pub(super) to: u64,
    /// Base address of its heap.
    pub(super) base: u64,
    pub(super) key: u64,
}

/// State used by one thread at a time, under a lock.
struct Core {
    /// `None` after closing.
    fabric: Option<Fabric>,
    targets: Vec<Target>,
    /// Per PE: operations to post, in order.
    ready: Vec<VecDeque<Op>>,
    /// PEs with operations to post.
    open: BTreeSet<usize>,
    /// Whether posting must be retried, because the provider had no room or no connection.
    again: bool,
    /// Per PE: operations that are posted or follow a posted one.
    in_flight: Vec<usize>,
    /// Per PE: whether an operation has failed; then no more are posted.
    failed_pes: Vec<bool>,
    posted: HashMap<usize, PostedOp>,
    done: Vec<Done>,
}

/// A PE's operations and the state shared by its threads.
pub(super) struct Engine {
    me: usize,
    heap: Arc<Segment>,
    provider: String,
    queue: Mutex<Queue>,
    has_new: AtomicBool,
    core: Mutex<Core>,
    counts: Vec<Counts>,
    /// The first failed operation: time, PE, reason.
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
            failed_pes: vec![false; n],
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

    /// Issues operations in this order. All must be for one PE.
    pub(super) fn issue(&self, ops: impl IntoIterator<Item = Op>) {
        let mut queue = lock(&self.queue);
        for mut op in ops {
            // A fence orders deliveries only, not gets.
            if op.kind != Kind::Read {
                let now = queue.fences;
                op.fenced |= std::mem::replace(&mut queue.fenced[op.pe], now) != now;
            }
            let counts = &self.counts[op.pe];
            counts.open.fetch_add(op.count(), Ordering::SeqCst);
            counts.copied_bytes.fetch_add(op.copied_bytes(), Ordering::SeqCst);
            queue.ops.push(op);
        }
        self.has_new.store(true, Ordering::SeqCst);
        drop(queue);
        // Either `advance` finds the lock free, or its holder sees `has_new`, which it checks after a fence.
        fence(Ordering::SeqCst);
        self.advance(false);
    }

    /// Orders all later operations after all earlier ones.
    pub(super) fn fence(&self) {
        lock(&self.queue).fences += 1;
    }

    /// Bytes of copies not yet in `pe`'s memory.
    pub(super) fn copied_bytes(&self, pe: usize) -> usize {
        self.counts[pe].copied_bytes.load(Ordering::SeqCst)
    }

    /// For each PE with pending operations: an answer that is set when all of those have completed, not counting later operations.
    pub(super) fn drain(&self) -> Vec<(usize, Answer)> {
        let is_open = |counts: &Counts| counts.open.load(Ordering::SeqCst) > 0;
        let open = self.counts.iter().enumerate().filter(|(_, counts)| is_open(counts));
        let drains: Vec<(usize, Answer)> = open.map(|(pe, _)| (pe, Answer::default())).collect();
        if !drains.is_empty() {
            self.issue(drains.iter().map(|(pe, answer)| {
                let mut last = Op::new(Kind::Marker, *pe, 0, Data::Word);
                (last.fenced, last.answer) = (true, Some(answer.clone()));
                last
            }));
        }
        drains
    }

    /// Posts issued operations, and with `polls` progresses libfabric, unless another thread does; that thread then also posts.
    pub(super) fn advance(&self, polls: bool) {
        loop {
            let mut core = match self.core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The lock's holder checks `has_new` after releasing it.
                Err(TryLockError::WouldBlock) => return,
            };
            core.work(self, polls);
            let again = core.again;
            drop(core);
            fence(Ordering::SeqCst);
            if again && !polls {
                // The progress thread retries soon.
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

    /// Body of the progress thread, until [`Engine::end`].
    pub(super) fn run(&self, mesh: &Mesh) {
        let _watch = Watch(mesh);
        let mut again = 0u32;
        while !self.stop.load(Ordering::SeqCst) {
            self.advance(true);
            self.report_failed_pe(mesh);
            let mut core = self.core();
            let busy = (core.again, !core.posted.is_empty() || lock(&self.failed).is_some());
            let Some(fabric) = &mut core.fabric else { return };
            let (fd, may_wait) = (fabric.fd(), fabric.may_wait());
            drop(core);
            // An operation issued while the lock was held here was left to this thread.
            fence(Ordering::SeqCst);
            if !may_wait || self.has_new.load(Ordering::SeqCst) {
                // Do not yield every iteration: work is queued, and on an oversubscribed host a yield can cost milliseconds.
                again = again.wrapping_add(1);
                if again.is_multiple_of(MAX_SPINS) {
                    rustix::thread::sched_yield();
                }
                continue;
            }
            let at_most = match (busy, fd) {
                // Retry operations that could not be posted.
                ((true, _), Some(_)) => Duration::from_millis(1),
                // The descriptor signals completions; the time-out is a fallback.
                ((_, true), Some(_)) => Duration::from_millis(10),
                (_, Some(_)) => Duration::from_millis(50),
                ((false, false), None) => Duration::from_millis(1),
                (_, None) => Duration::from_micros(100),
            };
            // SAFETY: the descriptor belongs to the completion queue, which is closed after this thread has ended.
            let fd = fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
            let mut fds: Vec<PollFd<'_>> = fd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            fds.push(PollFd::new(&self.wake, PollFlags::IN));
            let time = Timespec { tv_sec: 0, tv_nsec: at_most.as_nanos() as _ };
            // Whether ready or timed out, poll again.
            let _ = poll(&mut fds, Some(&time));
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
    }

    /// Reports the PE of a failed operation as lost, if after [`GRACE`] the TCP connections have not named a lost PE and a
    /// reason; usually another PE is the cause.
    fn report_failed_pe(&self, mesh: &Mesh) {
        let mut failed = lock(&self.failed);
        match &*failed {
            Some((at, pe, why)) if at.elapsed() >= GRACE => {
                mesh.give_up(*pe, why.clone());
                *failed = None;
            }
            _ => {}
        }
    }

    /// Stops the progress thread.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Closes the endpoint. No operation may be issued afterwards.
    pub(super) fn close(&self) {
        self.core().close();
    }

    /// Keeps all threads out of libfabric for the rest of the process, except a thread that stays in it for over a second.
    pub(super) fn quiesce(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            match self.core.try_lock() {
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
                core => return std::mem::forget(core),
            }
        }
    }

    /// Counts an operation and its successor as completed.
    fn complete(&self, op: Op, well: bool) {
        let (counts, ended) = (&self.counts[op.pe], op.count());
        counts.copied_bytes.fetch_sub(op.copied_bytes(), Ordering::SeqCst);
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

    /// Keeps all threads of this PE out of libfabric while the value lives.
    #[cfg(test)]
    pub(super) fn freeze(&self) -> impl Sized + '_ {
        self.core()
    }

    /// Kinds of the operations posted and not completed.
    #[cfg(test)]
    pub(super) fn posted(&self) -> Vec<Kind> {
        // SAFETY: operations in the table are not freed, and libfabric does not write `kind`.
        self.core().posted.values().map(|PostedOp(op)| unsafe { (*op.as_ptr()).kind }).collect()
    }

    fn core(&self) -> std::sync::MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    /// See [`Engine::advance`].
    fn work(&mut self, engine: &Engine, polls: bool) {
        if engine.has_new.swap(false, Ordering::SeqCst) {
            for op in std::mem::take(&mut lock(&engine.queue).ops) {
                self.open.insert(op.pe);
                self.ready[op.pe].push_back(op);
            }
        }
        self.post_all(engine);
        if polls {
            for _ in 0..MAX_POLLS {
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

    /// Posts the ready operations of `pe`, as far as fences and the provider's capacity permit.
    fn post(&mut self, engine: &Engine, pe: usize) {
        let Target { to, base, key } = self.targets[pe];
        while let Some(op) = self.ready[pe].pop_front() {
            let Some(fabric) = self.fabric.as_mut().filter(|_| !self.failed_pes[pe]) else {
                engine.complete(op, false);
                continue;
            };
            if op.fenced && self.in_flight[pe] > 0 {
                return self.ready[pe].push_front(op);
            }
            if op.kind == Kind::Marker {
                engine.complete(op, true);
                continue;
            }
            let added = if op.follows { 0 } else { op.count() };
            let op = NonNull::from(Box::leak(Box::new(op)));
            // SAFETY: only this function owns the operation; pointers into it stay valid until it becomes a box again.
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
            // SAFETY: all pointers lead into the operation, which is not accessed until it completes or the fabric is dropped,
            // or into the heap, which lives as long. By the contract of put_nbi and get_nbi heap sources do not change and
            // destinations are not accessed. The context is the operation's first 64 bytes.
            match unsafe { fabric.post(&raw) } {
                PostResult::Posted => {
                    self.in_flight[pe] += added;
                    self.posted.insert(op.addr().get(), PostedOp(op));
                }
                PostResult::Retry => {
                    self.again = true;
                    // SAFETY: libfabric refused it, so this function owns it again.
                    return self.ready[pe].push_front(*unsafe { Box::from_raw(op.as_ptr()) });
                }
                PostResult::Refused(why) => {
                    // SAFETY: libfabric refused it, so this function owns it again.
                    let op = *unsafe { Box::from_raw(op.as_ptr()) };
                    self.in_flight[pe] += added;
                    self.failed(engine, op, &why);
                }
            }
        }
        self.open.remove(&pe);
    }

    /// Polls once; returns whether there may be more completions.
    fn poll(&mut self, engine: &Engine) -> bool {
        let Some(fabric) = &mut self.fabric else { return false };
        let mut done = std::mem::take(&mut self.done);
        let polled = fabric.poll(&mut done);
        for Done { context, error } in done.drain(..) {
            // An unknown context is a provider's report about a connection; the connection's operations report the same error.
            let Some(PostedOp(op)) = self.posted.remove(&context) else { continue };
            // SAFETY: leaked when posted, removed from `posted` once, and completed by libfabric.
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
                // The queue itself failed: no operation completes any more.
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
            // In front of waiting operations, which may be fenced behind this one.
            signal.follows = true;
            self.ready[pe].push_front(*signal);
            self.open.insert(pe);
        }
        engine.complete(op, true);
    }

    /// Completes a failed operation and stops posting to its PE.
    fn failed(&mut self, engine: &Engine, op: Op, why: &str) {
        let pe = op.pe;
        self.in_flight[pe] = self.in_flight[pe].saturating_sub(op.count());
        self.failed_pes[pe] = true;
        if !self.ready[pe].is_empty() {
            self.open.insert(pe);
        }
        let line = format!("libfabric ({}): {}: {why}", engine.provider, op.kind.call());
        lock(&engine.failed).get_or_insert((Instant::now(), pe, line));
        engine.complete(op, false);
    }

    fn close(&mut self) {
        self.fabric = None;
        for (_, PostedOp(op)) in self.posted.drain() {
            // SAFETY: leaked when posted; the endpoint is closed, so libfabric no longer uses it.
            drop(unsafe { Box::from_raw(op.as_ptr()) });
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.close();
    }
}
