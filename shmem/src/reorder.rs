//! For tests: a seeded transport that delays and reorders operations as far as the OpenSHMEM memory model allows.
//!
//! The PEs are threads of one process, each with its [`ReorderTransport`]. Every run shows behaviour that is rare on a real
//! network:
//! - a put, or the data of a put_signal, arrives late and in pieces; a put_nbi reads its source at delivery, so that
//!   overwriting a source before quiet is detected; a get_nbi happens at any time before the end of quiet;
//! - puts, signal operations and put_signals overtake one another, unless they go to the same PE with a fence of their PE in
//!   between; only the data of a put_signal always precedes its signal. This includes a PE's puts to itself;
//! - some operations are delayed until nothing else can happen;
//! - a PE may start late, stop for long, or run far ahead of the others.
//!
//! get and fetch_add are round trips: they happen at once and complete no other operation (fetch_add: only those that a fence
//! orders before it).
//!
//! # Determinism
//! Only one PE at a time proceeds inside a call, and the seed decides when the turn passes to which PE. Between calls PEs
//! compute in parallel but cannot observe each other, so a failing seed fails again. Therefore every PE needs its own thread,
//! and PEs must wait for each other only through the transport.
//!
//! If all PEs wait and no operation is in flight, no signal can arrive any more. All waits then return as if their deadlines
//! had passed, so a lost signal is detected at once, whatever the deadline.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{RawWait, SignalOp, Transport};

/// A PE that holds its turn longer than this without a call is assumed to wait outside of the transport.
const TURN_MAX: Duration = Duration::from_secs(120);

/// A world of PEs over the reordering transport.
#[derive(Debug)]
pub struct ReorderWorld {
    n_pes: usize,
    heap_bytes: usize,
    reachable: bool,
    state: Mutex<State>,
    /// Per PE: notified when its turn begins.
    turns: Vec<Condvar>,
}

/// One PE of a [`ReorderWorld`], to be moved to its own thread. The PE ends when its transport is dropped.
#[derive(Debug)]
pub struct ReorderTransport {
    my_pe: usize,
    world: Arc<ReorderWorld>,
}

impl ReorderWorld {
    /// The transports of `n_pes` PEs with heaps of `heap_bytes` bytes; [`Transport::is_reachable`] is false.
    #[expect(clippy::new_ret_no_self, reason = "a world is used through its PEs only")]
    pub fn new(n_pes: usize, heap_bytes: usize, seed: u64) -> Vec<ReorderTransport> {
        Self::with_reachable(n_pes, heap_bytes, seed, false)
    }

    /// Like [`ReorderWorld::new`], with [`Transport::is_reachable`] set to `reachable`. `ptr` returns `None` in either case.
    pub fn with_reachable(n_pes: usize, heap_bytes: usize, seed: u64, reachable: bool) -> Vec<ReorderTransport> {
        let state = Mutex::new(State::new(n_pes, heap_bytes, seed));
        let turns = (0..n_pes).map(|_| Condvar::new()).collect();
        let world = Arc::new(Self { n_pes, heap_bytes, reachable, state, turns });
        (0..n_pes).map(|my_pe| ReorderTransport { my_pe, world: world.clone() }).collect()
    }
}

/// Parameters that depend on the seed.
#[derive(Debug)]
struct Behaviour {
    /// Probability, per call and then per delivery, of a delivery.
    deliver: f64,
    /// Upper bound of ordinary delays, in calls.
    delay: u64,
    /// Probability of a much longer delay of an operation.
    hold: f64,
    /// Probability, per call, that the turn passes.
    switch: f64,
    /// Probability that a PE pauses for long instead of receiving the turn.
    pause: f64,
    /// Probability that a put is delivered in pieces.
    split: f64,
}

#[derive(Debug)]
struct State {
    rng: ChaCha8Rng,
    behaviour: Behaviour,
    /// Number of calls.
    clock: u64,
    /// The PE whose turn it is.
    turn: usize,
    heaps: Vec<Vec<u8>>,
    pes: Vec<Pe>,
    /// Operations not completely delivered, in no particular order.
    pending: Vec<OpInFlight>,
    /// For each pair (from, to): the fence epochs with pending operations, oldest first, and the number of those operations.
    epochs: Vec<VecDeque<(u64, usize)>>,
}

#[derive(Debug)]
struct Pe {
    status: PeState,
    /// Whether it has made a call.
    started: bool,
    /// Number of fences.
    epoch: u64,
    /// Does not run before this time unless no other PE can run.
    paused_until: u64,
}

#[derive(Debug)]
enum PeState {
    Running,
    Waiting {
        waits: Vec<RawWait>,
        deadline: Instant,
    },
    /// The wait can never be satisfied.
    Stuck,
    Gone,
}

/// An operation in flight: its pieces, in any order, then its signal.
#[derive(Debug)]
struct OpInFlight {
    issuer: usize,
    /// The PE whose heap it changes.
    target_pe: usize,
    /// The issuer's number of fences before it; `None` for a get, which fences do not order.
    epoch: Option<u64>,
    /// Not delivered before this time unless nothing else can happen.
    due: u64,
    pieces: Vec<Piece>,
    signal: Option<(usize, u64, SignalOp)>,
}

#[derive(Debug)]
struct Piece {
    dest: usize,
    data: Data,
}

#[derive(Debug)]
enum Data {
    /// Copied at issue.
    Copied(Vec<u8>),
    /// Read at delivery.
    Heap { pe: usize, offset: usize, bytes: usize },
}

impl State {
    fn new(n_pes: usize, heap_bytes: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        fn one_of<V: Copy>(rng: &mut ChaCha8Rng, values: &[V]) -> V {
            values[rng.random_range(0..values.len())]
        }
        let behaviour = Behaviour {
            deliver: one_of(&mut rng, &[0.02, 0.2, 0.5, 0.9]),
            delay: one_of(&mut rng, &[1, 10, 100]),
            hold: one_of(&mut rng, &[0.0, 0.05, 0.3]),
            switch: one_of(&mut rng, &[0.02, 0.1, 0.4]),
            pause: one_of(&mut rng, &[0.0, 0.02, 0.2]),
            split: one_of(&mut rng, &[0.0, 0.3]),
        };
        let late = one_of(&mut rng, &[0.0, 0.3]);
        let pes = (0..n_pes)
            .map(|_| {
                let paused_until = if rng.random_bool(late) { rng.random_range(0..2000) } else { 0 };
                Pe { status: PeState::Running, started: false, epoch: 0, paused_until }
            })
            .collect();
        Self {
            turn: rng.random_range(0..n_pes.max(1)),
            rng,
            behaviour,
            clock: 0,
            heaps: (0..n_pes).map(|_| vec![0; heap_bytes]).collect(),
            pes,
            pending: Vec::new(),
            epochs: vec![VecDeque::new(); n_pes * n_pes],
        }
    }

    /// Adds a pending operation.
    fn issue(
        &mut self,
        issuer: usize,
        target_pe: usize,
        fenced: bool,
        parts: (Vec<Piece>, Option<(usize, u64, SignalOp)>),
    ) {
        let epoch = fenced.then_some(self.pes[issuer].epoch);
        if let Some(epoch) = epoch {
            let epochs = &mut self.epochs[issuer * self.heaps.len() + target_pe];
            match epochs.back_mut() {
                Some((last, count)) if *last == epoch => *count += 1,
                _ => epochs.push_back((epoch, 1)),
            }
        }
        let delay = match self.rng.random_bool(self.behaviour.hold) {
            true => self.rng.random_range(50..3000),
            false => self.rng.random_range(0..self.behaviour.delay),
        };
        let (pieces, signal) = parts;
        self.pending.push(OpInFlight { issuer, target_pe, epoch, due: self.clock + delay, pieces, signal });
    }

    /// Splits a transfer of `bytes` bytes to `dest` into one or more pieces; `data` creates the piece of a range.
    fn pieces(&mut self, dest: usize, bytes: usize, data: impl Fn(std::ops::Range<usize>) -> Data) -> Vec<Piece> {
        let mut bounds = vec![0, bytes];
        if bytes > 1 && self.rng.random_bool(self.behaviour.split) {
            let cut = |rng: &mut ChaCha8Rng| rng.random_range(1..bytes);
            bounds.extend([cut(&mut self.rng), cut(&mut self.rng)]);
            bounds.sort_unstable();
            bounds.dedup();
        }
        bounds.windows(2).map(|cut| Piece { dest: dest + cut[0], data: data(cut[0]..cut[1]) }).collect()
    }

    /// Whether no pending operation is ordered before `op` by a fence.
    fn eligible(&self, op: &OpInFlight) -> bool {
        let oldest = self.epochs[op.issuer * self.heaps.len() + op.target_pe].front();
        op.epoch.is_none_or(|epoch| oldest.is_some_and(|(oldest, _)| *oldest == epoch))
    }

    /// Delivers one piece of pending operation `index`, or its signal once all pieces are delivered.
    fn deliver(&mut self, index: usize) {
        let op = &mut self.pending[index];
        if op.pieces.is_empty() {
            if let Some((offset, value, what)) = op.signal.take() {
                let word = word_mut(&mut self.heaps[op.target_pe], offset);
                let new = match what {
                    SignalOp::Set => value,
                    SignalOp::Add => u64::from_ne_bytes(*word).wrapping_add(value),
                };
                *word = new.to_ne_bytes();
            }
        } else {
            let piece = op.pieces.swap_remove(self.rng.random_range(0..op.pieces.len()));
            let data = match piece.data {
                Data::Copied(data) => data,
                Data::Heap { pe, offset, bytes } => self.heaps[pe][offset..offset + bytes].to_vec(),
            };
            self.heaps[op.target_pe][piece.dest..piece.dest + data.len()].copy_from_slice(&data);
        }
        let op = &self.pending[index];
        if op.pieces.is_empty() && op.signal.is_none() {
            let op = self.pending.swap_remove(index);
            if op.epoch.is_some() {
                let epochs = &mut self.epochs[op.issuer * self.heaps.len() + op.target_pe];
                let oldest = epochs.front_mut().expect("a pending operation is counted");
                oldest.1 -= 1;
                if oldest.1 == 0 {
                    epochs.pop_front();
                }
            }
        }
    }

    /// Delivers all operations that `which` selects, in an order that fences allow.
    fn drain(&mut self, which: impl Fn(&OpInFlight) -> bool) {
        loop {
            let chosen = |op: &OpInFlight| which(op) && self.eligible(op);
            let indices: Vec<_> = (0..self.pending.len()).filter(|&i| chosen(&self.pending[i])).collect();
            if indices.is_empty() {
                return;
            }
            let index = indices[self.rng.random_range(0..indices.len())];
            self.deliver(index);
        }
    }

    /// Advances the clock and delivers operations with the configured probability.
    fn tick(&mut self) {
        self.clock += 1;
        while !self.pending.is_empty() && self.rng.random_bool(self.behaviour.deliver) {
            let index = self.rng.random_range(0..self.pending.len());
            let op = &self.pending[index];
            if op.due <= self.clock && self.eligible(op) {
                self.deliver(index);
            }
        }
    }

    /// Delivers one operation, preferably a due one; returns false if no operation is in flight.
    fn deliver_something(&mut self) -> bool {
        let eligible: Vec<_> = (0..self.pending.len()).filter(|&i| self.eligible(&self.pending[i])).collect();
        let due: Vec<_> = eligible.iter().copied().filter(|&i| self.pending[i].due <= self.clock).collect();
        let index = if due.is_empty() {
            let Some(next) = eligible.into_iter().min_by_key(|&i| self.pending[i].due) else { return false };
            self.clock = self.pending[next].due;
            next
        } else {
            due[self.rng.random_range(0..due.len())]
        };
        self.deliver(index);
        true
    }

    /// Indices of the waits that hold for `pe`.
    fn satisfied(&self, pe: usize, waits: &[RawWait]) -> Vec<usize> {
        let holds = |wait: &RawWait| wait.cmp.holds(word(&self.heaps[pe], wait.signal), wait.value);
        (0..waits.len()).filter(|&i| holds(&waits[i])).collect()
    }

    fn can_run(&self, pe: usize, now: Instant) -> bool {
        match &self.pes[pe].status {
            PeState::Running | PeState::Stuck => true,
            PeState::Waiting { waits, deadline } => now >= *deadline || !self.satisfied(pe, waits).is_empty(),
            PeState::Gone => false,
        }
    }

    /// Gives the turn to a PE that can run, delivering operations until there is one.
    fn pass_turn(&mut self) {
        loop {
            let now = Instant::now();
            let can_run: Vec<_> = (0..self.pes.len()).filter(|&pe| self.can_run(pe, now)).collect();
            let awake: Vec<_> = can_run.iter().copied().filter(|&pe| self.pes[pe].paused_until <= self.clock).collect();
            let asleep_only = awake.is_empty();
            let candidates = if asleep_only { can_run } else { awake };
            if candidates.is_empty() || (asleep_only && !self.pending.is_empty() && self.rng.random_bool(0.5)) {
                if self.deliver_something() {
                    continue;
                }
                // No PE can run and no operation is in flight.
                let mut stuck = false;
                for pe in &mut self.pes {
                    if matches!(pe.status, PeState::Waiting { .. }) {
                        pe.status = PeState::Stuck;
                        stuck = true;
                    }
                }
                if stuck {
                    continue;
                }
                return;
            }
            let next = candidates[self.rng.random_range(0..candidates.len())];
            if candidates.len() > 1 && self.rng.random_bool(self.behaviour.pause) {
                self.pes[next].paused_until = self.clock + self.rng.random_range(10..2000);
                continue;
            }
            self.turn = next;
            return;
        }
    }
}

impl ReorderTransport {
    /// Waits for this PE's turn.
    fn turn(&self) -> MutexGuard<'_, State> {
        let start = Instant::now();
        let mut state = self.world.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.turn != self.my_pe {
            let waited = self.world.turns[self.my_pe].wait_timeout(state, TURN_MAX);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            assert!(
                state.turn == self.my_pe || start.elapsed() < TURN_MAX,
                "PE {} has the turn and makes no call: each PE needs its own thread, and waits through the transport",
                state.turn
            );
        }
        state.pes[self.my_pe].started = true;
        state
    }

    /// Ends a call: advances the clock and possibly passes the turn.
    fn done(&self, mut state: MutexGuard<'_, State>) {
        state.tick();
        let switch = state.behaviour.switch;
        if state.rng.random_bool(switch) {
            self.pass_turn(&mut state);
        }
    }

    fn pass_turn(&self, state: &mut State) {
        state.pass_turn();
        if state.turn != self.my_pe {
            self.world.turns[state.turn].notify_one();
        }
    }

    /// Bounds check before an access.
    fn check(&self, offset: usize, bytes: usize) {
        let heap_bytes = self.world.heap_bytes;
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= heap_bytes),
            "{bytes} bytes at offset {offset} are outside the symmetric heap of {heap_bytes} bytes"
        );
    }

    fn check_word(&self, offset: usize) {
        assert!(offset.is_multiple_of(8), "offset {offset} of a signal word is not a multiple of 8");
        self.check(offset, 8);
    }
}

impl Transport for ReorderTransport {
    fn my_pe(&self) -> usize {
        self.my_pe
    }

    fn n_pes(&self) -> usize {
        self.world.n_pes
    }

    fn heap_bytes(&self) -> usize {
        self.world.heap_bytes
    }

    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        self.check(dest, src.len());
        let mut state = self.turn();
        let pieces = state.pieces(dest, src.len(), |part| Data::Copied(src[part].to_vec()));
        state.issue(self.my_pe, pe, true, (pieces, None));
        self.done(state);
    }

    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.check(dest, bytes);
        self.check(src, bytes);
        let mut state = self.turn();
        let data =
            |part: std::ops::Range<usize>| Data::Heap { pe: self.my_pe, offset: src + part.start, bytes: part.len() };
        let pieces = state.pieces(dest, bytes, data);
        state.issue(self.my_pe, pe, true, (pieces, None));
        self.done(state);
    }

    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        self.check(src, dest.len());
        let state = self.turn();
        dest.copy_from_slice(&state.heaps[pe][src..src + dest.len()]);
        self.done(state);
    }

    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.check(dest, bytes);
        self.check(src, bytes);
        let mut state = self.turn();
        let data = |part: std::ops::Range<usize>| Data::Heap { pe, offset: src + part.start, bytes: part.len() };
        let pieces = state.pieces(dest, bytes, data);
        state.issue(self.my_pe, self.my_pe, false, (pieces, None));
        self.done(state);
    }

    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.check(dest, src.len());
        self.check_word(signal);
        let mut state = self.turn();
        let pieces = state.pieces(dest, src.len(), |part| Data::Copied(src[part].to_vec()));
        state.issue(self.my_pe, pe, true, (pieces, Some((signal, value, op))));
        self.done(state);
    }

    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.check_word(signal);
        let mut state = self.turn();
        state.issue(self.my_pe, pe, true, (Vec::new(), Some((signal, value, op))));
        self.done(state);
    }

    fn signal_fetch(&self, signal: usize) -> u64 {
        self.check_word(signal);
        let state = self.turn();
        let value = word(&state.heaps[self.my_pe], signal);
        self.done(state);
        value
    }

    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        self.check_word(target);
        let mut state = self.turn();
        let (me, epoch) = (self.my_pe, state.pes[self.my_pe].epoch);
        state.drain(|op| op.issuer == me && op.target_pe == pe && op.epoch.is_some_and(|before| before < epoch));
        let word = word_mut(&mut state.heaps[pe], target);
        let was = u64::from_ne_bytes(*word);
        *word = was.wrapping_add(value).to_ne_bytes();
        self.done(state);
        was
    }

    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        waits.iter().for_each(|wait| self.check_word(wait.signal));
        let mut state = self.turn();
        if state.satisfied(self.my_pe, waits).is_empty() {
            state.pes[self.my_pe].status = PeState::Waiting { waits: waits.to_vec(), deadline };
            self.pass_turn(&mut state);
            drop(state);
            state = self.turn();
            state.pes[self.my_pe].status = PeState::Running;
        }
        let satisfied = state.satisfied(self.my_pe, waits);
        let found = (!satisfied.is_empty()).then(|| satisfied[state.rng.random_range(0..satisfied.len())]);
        self.done(state);
        found
    }

    fn fence(&self) {
        let mut state = self.turn();
        state.pes[self.my_pe].epoch += 1;
        self.done(state);
    }

    fn quiet(&self) {
        let mut state = self.turn();
        state.drain(|op| op.issuer == self.my_pe);
        self.done(state);
    }

    fn ptr(&self, _offset: usize, _pe: usize) -> Option<NonNull<u8>> {
        None
    }

    fn is_reachable(&self, _pe: usize) -> bool {
        self.world.reachable
    }
}

impl Drop for ReorderTransport {
    fn drop(&mut self) {
        let lock = || self.world.state.lock().unwrap_or_else(PoisonError::into_inner);
        // During its turn, so that the run stays deterministic; but a PE that panics or was never used ends at once.
        let waits = !std::thread::panicking() && lock().pes[self.my_pe].started;
        let mut state = if waits { self.turn() } else { lock() };
        state.pes[self.my_pe].status = PeState::Gone;
        if state.turn == self.my_pe {
            self.pass_turn(&mut state);
        }
    }
}

fn word(heap: &[u8], offset: usize) -> u64 {
    u64::from_ne_bytes(heap[offset..offset + 8].try_into().expect("8 bytes"))
}

fn word_mut(heap: &mut [u8], offset: usize) -> &mut [u8; 8] {
    (&mut heap[offset..offset + 8]).try_into().expect("8 bytes")
}
