//! The measurement over transports with calls from the host.
//!
//! A *sample* is the mean of a batch of operations. A batch is long enough that reading the clock takes about 2% of it. Large sizes have batches of one;
//! large sizes and slow links have fewer samples (`sampling.rs`). If the PEs share pages, rounds of the measurement alternate with rounds of bare copies and
//! flags ([`super::raw`]), so that a change of the machine's speed affects both.
//!
//! - **Latency**: for put, get and atomic the call and quiet; for put with signal and send a ping-pong.
//! - **Bandwidth**: a batch of calls to the same address, then quiet. The bytes are not read.
//! - **Consume**: a stream of put with signal, or of sends, through a ring of 2 MiB or two slots, whichever is larger. The receiver sums every byte,
//!   checks the sum, and returns the slot. The receiver's clock is used, starting when all warm-up messages have been read.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::raw::{self, Pages};
use super::report::PeRows;
use super::sampling::{HostSampling, LinkSpeed, ROUNDS};
use super::{Figure, Measure, Op, P2pBench, Row};
use crate::bench::cpus::{self, CpuSpan};
use crate::job::host::{Host, PeTask, TwoSided};
use crate::report::median;
use crate::shmem::{Cmp, Shmem, SignalOp, Sym, Transport, Wait};

/// Maximum bytes in flight, unless two messages are larger.
const RING_BYTES: usize = 2 << 20;
/// Maximum messages in flight.
const MAX_SLOTS: usize = 64;
/// Words from one signal to the next, so that no two share a cache line.
const STRIDE: usize = 8;
/// Signals: of ping-pongs, of returned slots, a target of atomics, then one for each slot. The bare rounds use the same words, because a word's address
/// determines its distance from either core.
const PING: usize = 0;
const CREDIT: usize = 1;
const ATOMIC: usize = 2;
const SLOT: usize = 3;
/// Two words that are not signals: the pair's [`LinkSpeed`].
const LINK: usize = SLOT + MAX_SLOTS;
const SIGNALS: usize = LINK + 1;
/// Samples of the probe, and round trips per sample.
const PROBE: (usize, usize) = (9, 16);

/// The names of the job's phases, one for each operation.
pub const PHASE_NAMES: [&str; 8] = [
    "start-up",
    "measuring memcpy",
    "measuring put",
    "measuring put-nbi",
    "measuring get",
    "measuring put-signal",
    "measuring atomic",
    "measuring send-recv",
];

fn phase(op: Op) -> u32 {
    2 + op as u32
}

/// The symmetric memory of the measurement; the same on every PE.
struct P2pMemory {
    /// Where data arrives.
    ring: Sym<u8>,
    /// The source of non-blocking puts.
    source: Sym<u8>,
    /// Signals, [`STRIDE`] words apart.
    signals: Sym<u64>,
}

impl P2pMemory {
    fn ring_bytes(bench: &P2pBench) -> usize {
        (2 * largest(bench)).max(RING_BYTES)
    }
}

fn largest(bench: &P2pBench) -> usize {
    bench.sizes.iter().copied().max().unwrap_or(0).max(size_of::<u64>()).next_multiple_of(64)
}

/// A PE's part: measures one pair after the other, and sends a [`PeRows`].
pub struct OnHost<'b> {
    /// The request.
    pub bench: &'b P2pBench,
}

impl PeTask for OnHost<'_> {
    type Error = anyhow::Error;

    fn heap_bytes<T: Transport>(&self) -> Result<usize> {
        let bench = self.bench;
        let signals = SIGNALS * STRIDE * size_of::<u64>();
        Ok(Shmem::<T>::heap_bytes_for(bench.pes, P2pMemory::ring_bytes(bench) + largest(bench) + signals))
    }

    /// # Errors
    /// A PE that does not answer in time, wrong bytes, or an error of the host.
    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
        measure(self.bench, shmem, host)
    }
}

fn measure<T: Transport>(bench: &P2pBench, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
    let (two_sided, limit) = (host.two_sided(), bench.wait_limit);
    let me = shmem.my_pe();
    cpus::pin(me, shmem.n_pes());
    let memory = P2pMemory {
        ring: shmem.alloc(P2pMemory::ring_bytes(bench))?,
        source: shmem.alloc(largest(bench))?,
        signals: shmem.alloc(SIGNALS * STRIDE)?,
    };
    let mut results = PeRows::default();
    let mut figure = 0;
    let figures = figures(bench);
    let total = (figures.len() * bench.pairs.len()) as u64;
    for &pair in &bench.pairs {
        // Each pair starts with signals at 0. The barrier after the last figure separates it from the pair before.
        shmem.put(memory.signals, &vec![0; memory.signals.len()], me);
        meet(shmem, limit)?;
        let mut part = pair.iter().position(|&pe| pe == me).map(|place| {
            let pages = |pe| Pages::of(shmem, memory.ring, memory.signals, pe);
            let peer = pair[1 - place];
            let source: Vec<u64> =
                (0..largest(bench) as u64 / 8).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
            shmem.put(memory.source, bytemuck::cast_slice(&source), me);
            PairMember {
                shmem,
                two_sided,
                memory: &memory,
                pair,
                peer,
                first: place == 0,
                raw: pages(me).zip(pages(peer)),
                source,
                count: HashMap::new(),
                limit,
            }
        });
        let words = memory.signals.slice(LINK * STRIDE..LINK * STRIDE + 2);
        if let Some(part) = part.as_ref().filter(|part| part.first) {
            let speed = LinkSpeed::measure(shmem, memory.ring, part.bytes(largest(bench)), part.peer);
            pair.iter().for_each(|&pe| shmem.put(words, &speed.to_words(), pe));
        }
        meet(shmem, limit)?;
        let mut speed = [0; 2];
        shmem.get(&mut speed, words, me);
        let speed = LinkSpeed::from_words(speed);
        host.status().set_phase(1);
        let mut memcpy_us = HashMap::new();
        if let Some(part) = part.as_mut().filter(|part| part.first) {
            for &bytes in &bench.sizes {
                let plan = HostSampling::new(bench, speed, Measure::Bandwidth, Op::Put, bytes);
                memcpy_us.insert(bytes, part.memcpy(plan, bytes));
            }
        }
        meet(shmem, limit)?;
        for &(op, measure, bytes) in &figures {
            host.status().set_phase(phase(op));
            host.status().set_progress(figure as u64, total);
            if let Some(part) = &mut part {
                let span = CpuSpan::start_here();
                let plan = HostSampling::new(bench, speed, measure, op, bytes);
                let rows = part.figure(plan, op, measure, bytes)?;
                let span = span.end_here();
                let flag_us = part.flag_us()?;
                results.cpu_spans.push((figure, part.first, span));
                if part.first
                    && let Some(us) = memcpy_us.get(&bytes)
                {
                    results.memcpy_us.push((figure, *us));
                }
                results.rows.extend(rows.into_iter().map(|row| (figure, Row { flag_us, ..row })));
            }
            figure += 1;
            meet(shmem, limit)?;
        }
    }
    host.status().set_progress(total, total);
    host.send(&serde_json::to_vec(&results)?)?;
    Ok(())
}

/// A barrier of all PEs.
///
/// # Errors
/// A PE that does not arrive within `limit`.
pub fn meet<T: Transport>(shmem: &Shmem<T>, limit: Duration) -> Result<()> {
    shmem.barrier_all(Instant::now() + limit).map_err(|timeout| anyhow!("barrier with PE {}: {timeout}", timeout.index))
}

/// The figures of a pair in order. One measurement gives both latency and issue of a non-blocking put.
fn figures(bench: &P2pBench) -> Vec<(Op, Measure, usize)> {
    let mut figures = Vec::new();
    for &op in &bench.ops {
        let measures: &[Measure] = match op {
            Op::Put | Op::Get | Op::Atomic => &[Measure::Latency, Measure::Bandwidth],
            Op::PutNbi => &[Measure::Latency],
            Op::PutSignal | Op::SendRecv => &[Measure::Latency, Measure::Consume],
        };
        let word = [size_of::<u64>()];
        let sizes = if op == Op::Atomic { &word[..] } else { &bench.sizes };
        figures.extend(measures.iter().flat_map(|&m| sizes.iter().map(move |&bytes| (op, m, bytes))));
    }
    figures
}

/// One of the two PEs of a pair.
struct PairMember<'s, T: Transport> {
    shmem: &'s Shmem<T>,
    two_sided: Option<&'s dyn TwoSided>,
    memory: &'s P2pMemory,
    pair: [usize; 2],
    peer: usize,
    /// Whether this PE is the initiator.
    first: bool,
    /// This PE's pages and the peer's, if both are mapped.
    raw: Option<(Pages<'s>, Pages<'s>)>,
    source: Vec<u64>,
    /// The values of the signals by index. They only grow, so that no signal is reset; both PEs have the same counts.
    count: HashMap<usize, u64>,
    limit: Duration,
}

/// The code path of a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CodePath {
    Library,
    Raw,
}

fn us(start: Instant, operations: usize) -> f64 {
    start.elapsed().as_secs_f64() * 1e6 / operations as f64
}

impl<T: Transport> PairMember<'_, T> {
    /// Measures one figure. Returns its rows on the PE that measures the time.
    fn figure(&mut self, plan: HostSampling, op: Op, measure: Measure, bytes: usize) -> Result<Vec<Row>> {
        let of = Figure { pair: self.pair, measure, op, scope: None, bytes, batch: plan.batch };
        let counts_here = (measure == Measure::Consume) != self.first;
        if op == Op::PutNbi {
            return Ok(self.put_nbi(plan, of));
        }
        // The bare rounds consist of a copy and a flag, the two parts of a put with signal.
        let has_raw = op == Op::PutSignal && self.raw.is_some();
        let (mut samples, mut raw) = (Vec::new(), Vec::new());
        let part = HostSampling { samples: plan.samples / ROUNDS, ..plan };
        for _ in 0..ROUNDS {
            samples.extend(match (measure, op) {
                (Measure::Latency, Op::PutSignal) => self.ping_pong(part, bytes, CodePath::Library)?,
                (Measure::Latency, Op::SendRecv) => self.send_recv(part, bytes)?,
                (Measure::Consume, Op::SendRecv) => self.send_stream(part, bytes)?,
                (Measure::Consume, _) => self.stream(part, bytes, CodePath::Library)?,
                _ => self.calls(part, op, measure, bytes),
            });
            if has_raw {
                raw.extend(match measure {
                    Measure::Consume => self.stream(part, bytes, CodePath::Raw)?,
                    _ => self.ping_pong(part, bytes, CodePath::Raw)?,
                });
            }
        }
        if !counts_here {
            return Ok(Vec::new());
        }
        let row = of.row(&samples);
        Ok(vec![if has_raw { row.with_raw(of, &raw) } else { row }])
    }

    /// The deadline of the waits of a round.
    fn deadline(&self, plan: HostSampling) -> Instant {
        Instant::now() + self.limit + plan.round
    }

    fn bytes(&self, bytes: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.source)[..bytes]
    }

    /// The signal with this index.
    fn signal(&self, place: usize) -> Sym<u64> {
        self.memory.signals.at(place * STRIDE)
    }

    /// Waits until this PE's signal `place` is at least `value`.
    fn wait(&self, place: usize, value: u64, deadline: Instant) -> Result<()> {
        let wait = Wait { signal: self.signal(place), cmp: Cmp::Ge, value };
        self.shmem.wait_until(wait, deadline).map(drop).with_context(|| format!("PE {}", self.peer))
    }

    /// Samples of an operation that the peer takes no part in.
    fn sample(&self, plan: HostSampling, mut batch: impl FnMut(usize)) -> Vec<f64> {
        let mut samples = Vec::with_capacity(plan.samples);
        for i in 0..plan.warmup + plan.samples {
            let start = Instant::now();
            batch(plan.batch);
            if i >= plan.warmup {
                samples.push(us(start, plan.batch));
            }
        }
        samples
    }

    /// The median time of a memcpy from this PE's private memory to its heap, both cached if they fit.
    fn memcpy(&self, plan: HostSampling, bytes: usize) -> f64 {
        let src = self.bytes(bytes);
        let Some((mine, _)) = &self.raw else {
            let mut dest = vec![0; bytes];
            return median(self.sample(plan, |n| {
                for _ in 0..n {
                    dest.copy_from_slice(std::hint::black_box(src));
                    std::hint::black_box(&mut dest);
                }
            }));
        };
        median(self.sample(plan, |n| {
            for _ in 0..n {
                mine.copy_in(0, std::hint::black_box(src));
            }
        }))
    }

    /// Put, get and atomic.
    fn calls(&self, plan: HostSampling, op: Op, measure: Measure, bytes: usize) -> Vec<f64> {
        if !self.first {
            return Vec::new();
        }
        let (shmem, peer) = (self.shmem, self.peer);
        let mut local = vec![0; bytes];
        let one = |local: &mut [u8]| match op {
            Op::Get => shmem.get(local, self.memory.ring, peer),
            Op::Atomic => drop(shmem.fetch_add(self.signal(ATOMIC), 1, peer)),
            _ => shmem.put(self.memory.ring, std::hint::black_box(self.bytes(bytes)), peer),
        };
        self.sample(plan, |n| {
            for _ in 0..n {
                one(&mut local);
                if measure == Measure::Latency {
                    shmem.quiet();
                }
            }
            shmem.quiet();
            std::hint::black_box(&mut local);
        })
    }

    /// A non-blocking put until the call returns, and until quiet returns.
    fn put_nbi(&self, plan: HostSampling, of: Figure) -> Vec<Row> {
        if !self.first {
            return Vec::new();
        }
        let (shmem, peer) = (self.shmem, self.peer);
        let source = self.memory.source.slice(0..of.bytes);
        // `complete` is the time of a call and its quiet. `issue` is that of the calls alone: the clock is read before the batch's quiet.
        let complete = self.sample(plan, |n| {
            for _ in 0..n {
                shmem.put_nbi(self.memory.ring, source, peer);
                shmem.quiet();
            }
        });
        let mut issue = Vec::with_capacity(plan.samples);
        for i in 0..plan.warmup + plan.samples {
            let start = Instant::now();
            for _ in 0..plan.batch {
                shmem.put_nbi(self.memory.ring, source, peer);
            }
            let sample = us(start, plan.batch);
            shmem.quiet();
            if i >= plan.warmup {
                issue.push(sample);
            }
        }
        vec![of.row(&complete), Figure { measure: Measure::Issue, ..of }.row(&issue)]
    }

    /// Samples of round trips, valid on the initiator.
    fn rounds(
        &self,
        plan: HostSampling,
        mut there: impl FnMut(&Self) -> Result<()>,
        mut back: impl FnMut(&Self) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let mut samples = Vec::with_capacity(plan.samples);
        for i in 0..plan.warmup + plan.samples {
            let start = Instant::now();
            for _ in 0..plan.batch {
                if self.first {
                    there(self)?;
                    back(self)?;
                } else {
                    back(self)?;
                    there(self)?;
                }
            }
            if i >= plan.warmup {
                samples.push(us(start, plan.batch));
            }
        }
        Ok(samples)
    }

    /// A round trip of puts with signal.
    fn ping_pong(&mut self, plan: HostSampling, bytes: usize, path: CodePath) -> Result<Vec<f64>> {
        let place = PING;
        let base = self.counted(place, ((plan.warmup + plan.samples) * plan.batch) as u64);
        let deadline = self.deadline(plan);
        let (mut sent, mut seen) = (base, base);
        if let (CodePath::Raw, Some((mine, theirs))) = (path, self.raw) {
            let (own, other) = (mine.flag(place * STRIDE), theirs.flag(place * STRIDE));
            return self.rounds(
                plan,
                |part| {
                    sent += 1;
                    theirs.copy_in(0, part.bytes(bytes));
                    other.store(sent, Ordering::Release);
                    Ok(())
                },
                |part| {
                    seen += 1;
                    raw::spin_until(own, seen, part.peer, deadline)
                },
            );
        }
        self.rounds(
            plan,
            |part| {
                sent += 1;
                let (dest, signal) = (part.memory.ring, part.signal(place));
                part.shmem.put_signal(dest, part.bytes(bytes), signal, sent, SignalOp::Set, part.peer);
                Ok(())
            },
            |part| {
                seen += 1;
                part.wait(place, seen, deadline)
            },
        )
    }

    /// The value of a signal before it grows by `by`.
    fn counted(&mut self, place: usize, by: u64) -> u64 {
        let count = self.count.entry(place).or_default();
        *count += by;
        *count - by
    }

    /// A stream of messages that the receiver reads. The samples are the receiver's.
    fn stream(&mut self, plan: HostSampling, bytes: usize, path: CodePath) -> Result<Vec<f64>> {
        // No two slots share a cache line.
        let pitch = bytes.max(1).next_multiple_of(64);
        let slots = (self.memory.ring.len() / pitch).clamp(1, MAX_SLOTS);
        let messages = ((plan.warmup + plan.samples) * plan.batch) as u64;
        // The measurement starts with an empty ring: messages that were delivered before would increase the rate.
        let counted_from = (plan.warmup * plan.batch) as u64;
        let deadline = self.deadline(plan);
        // A slot's signal holds the message's number. One count covers all slots and both paths, so that figures may differ in slot size.
        let first = self.counted(SLOT, messages);
        let credit = self.counted(CREDIT, messages);
        let slot_of = |m: u64| (m % slots as u64) as usize;
        let stamped = bytes >= size_of::<u64>();
        let raw = self.raw.filter(|_| path == CodePath::Raw);
        if self.first {
            let mut stamp = self.source[0];
            for m in 0..messages {
                if m >= slots as u64 || m == counted_from {
                    let unread = if m == counted_from { 0 } else { slots as u64 - 1 };
                    let least = credit + m - unread;
                    match raw {
                        Some((mine, _)) => {
                            raw::spin_until(mine.flag(CREDIT * STRIDE), least, self.peer, deadline)?;
                        }
                        None => self.wait(CREDIT, least, deadline)?,
                    }
                }
                stamp = stamp.wrapping_add(1);
                self.source[0] = stamp;
                let (slot, src) = (slot_of(m), self.bytes(bytes));
                match raw {
                    Some((_, theirs)) => {
                        theirs.copy_in(slot * pitch, src);
                        theirs.flag((SLOT + slot) * STRIDE).store(first + m + 1, Ordering::Release);
                    }
                    None => {
                        let dest = self.memory.ring.slice(slot * pitch..slot * pitch + bytes);
                        let signal = self.signal(SLOT + slot);
                        self.shmem.put_signal(dest, src, signal, first + m + 1, SignalOp::Set, self.peer);
                    }
                }
            }
            self.source[0] = self.source[0].wrapping_sub(messages);
            // The next figure may overwrite the ring only after the last message was read.
            match raw {
                Some((mine, _)) => {
                    raw::spin_until(mine.flag(CREDIT * STRIDE), credit + messages, self.peer, deadline)?;
                }
                None => self.wait(CREDIT, credit + messages, deadline)?,
            }
            return Ok(Vec::new());
        }
        let pages = self.raw.map(|(mine, _)| mine);
        let mut copy = vec![0; if pages.is_none() { bytes } else { 0 }];
        let expected = raw::sum(self.bytes(bytes));
        let give_back = (slots as u64 / 4).max(1);
        let mut owed = 0;
        let mut samples = Vec::with_capacity(plan.samples);
        let mut start = Instant::now();
        for m in 0..messages {
            let slot = slot_of(m);
            match raw {
                Some((mine, _)) => {
                    let flag = mine.flag((SLOT + slot) * STRIDE);
                    raw::spin_until(flag, first + m + 1, self.peer, deadline)?;
                }
                None => self.wait(SLOT + slot, first + m + 1, deadline)?,
            }
            let sum = match pages {
                Some(pages) => pages.sum(slot * pitch, bytes),
                None => {
                    self.shmem.get(
                        &mut copy,
                        self.memory.ring.slice(slot * pitch..slot * pitch + bytes),
                        self.shmem.my_pe(),
                    );
                    raw::sum(&copy)
                }
            };
            let expected = if stamped { expected.wrapping_add(m + 1) } else { sum };
            ensure!(sum == expected, "message {m} of {bytes} bytes from PE {} arrived damaged", self.peer);
            owed += 1;
            if owed == give_back || m + 1 == counted_from || m + 1 == messages {
                match raw {
                    Some((_, theirs)) => {
                        theirs.flag(CREDIT * STRIDE).store(credit + m + 1, Ordering::Release);
                    }
                    None => self.shmem.signal_op(self.signal(CREDIT), owed, SignalOp::Add, self.peer),
                }
                owed = 0;
            }
            if (m + 1) % plan.batch as u64 == 0 {
                if m / plan.batch as u64 >= plan.warmup as u64 {
                    samples.push(us(start, plan.batch));
                }
                start = Instant::now();
            }
        }
        Ok(samples)
    }

    fn messages(&self) -> Result<&dyn TwoSided> {
        self.two_sided.context("`op` send-recv: the transport has no matched messages")
    }

    /// Sends a message and receives one of the same size.
    fn send_recv(&self, plan: HostSampling, bytes: usize) -> Result<Vec<f64>> {
        let (messages, deadline) = (self.messages()?, self.deadline(plan));
        let mut received = vec![0; bytes];
        let samples = self.rounds(
            plan,
            |part| Ok(messages.send(part.bytes(bytes), part.peer)?),
            |part| Ok(messages.receive(&mut received, part.peer, deadline)?),
        )?;
        ensure!(received == self.bytes(bytes), "{bytes} bytes from PE {} arrived damaged", self.peer);
        Ok(samples)
    }

    /// A stream of sends whose bytes are read, with an answer after the warm-up and one at the end. The samples are the receiver's.
    fn send_stream(&self, plan: HostSampling, bytes: usize) -> Result<Vec<f64>> {
        let (messages, deadline) = (self.messages()?, self.deadline(plan));
        let mut received = vec![0; bytes];
        let answer = bytes.min(1);
        if self.first {
            for part in [plan.warmup, plan.samples] {
                (0..part * plan.batch).try_for_each(|_| messages.send(self.bytes(bytes), self.peer))?;
                messages.receive(&mut received[..answer], self.peer, deadline)?;
            }
            return Ok(Vec::new());
        }
        let expected = raw::sum(self.bytes(bytes));
        let mut samples = Vec::with_capacity(plan.samples);
        for i in 0..plan.warmup + plan.samples {
            if i == plan.warmup {
                messages.send(&received[..answer], self.peer)?;
            }
            let start = Instant::now();
            for _ in 0..plan.batch {
                messages.receive(&mut received, self.peer, deadline)?;
                ensure!(raw::sum(&received) == expected, "{bytes} bytes from PE {} arrived damaged", self.peer);
            }
            if i >= plan.warmup {
                samples.push(us(start, plan.batch));
            }
        }
        messages.send(&received[..answer], self.peer)?;
        Ok(samples)
    }

    /// One-way latency of a bare flag, microseconds: the current distance between the two CPUs.
    fn flag_us(&mut self) -> Result<Option<f64>> {
        if self.raw.is_none() {
            return Ok(None);
        }
        let plan = HostSampling { samples: PROBE.0, warmup: 2, batch: PROBE.1, round: Duration::ZERO };
        Ok(Some(median(self.ping_pong(plan, 0, CodePath::Raw)?) / 2.0))
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::bench::p2p::tests::{LIMIT, bench};
    use crate::job::JobError;
    use crate::shmem::{Segment, ShmTransport};

    /// Messages between two threads.
    struct Mailbox(Mutex<Ends>);
    type Ends = (Sender<Vec<u8>>, Receiver<Vec<u8>>);

    impl TwoSided for Mailbox {
        fn send(&self, bytes: &[u8], _: usize) -> Result<(), JobError> {
            self.0.lock().unwrap().0.send(bytes.to_vec()).map_err(|error| JobError::Peers(error.to_string()))
        }

        fn receive(&self, bytes: &mut [u8], _: usize, deadline: Instant) -> Result<(), JobError> {
            let left = deadline.saturating_duration_since(Instant::now());
            let received = self.0.lock().unwrap().1.recv_timeout(left);
            bytes.copy_from_slice(&received.map_err(|error| JobError::Peers(error.to_string()))?);
            Ok(())
        }
    }

    /// Both PEs' rows of every figure, with or without mapped pages. `source_of_1` may change the bytes that PE 1 expects.
    fn measure(pages: bool, source_of_1: impl Fn(&mut Vec<u64>) + Sync) -> [Result<Vec<Row>>; 2] {
        let bench = bench();
        let bytes = OnHost { bench: &bench }.heap_bytes::<ShmTransport>().unwrap();
        let segments: Vec<Segment> = (0..2).map(|_| Segment::create("test", bytes).unwrap()).collect();
        let view = || -> Vec<Segment> {
            segments.iter().map(|s| Segment::from_fd(s.fd().try_clone_to_owned().unwrap()).unwrap()).collect()
        };
        let (to_1, from_0) = channel();
        let (to_0, from_1) = channel();
        let boxes = [(to_1, from_1), (to_0, from_0)].map(|ends| Mailbox(Mutex::new(ends)));
        std::thread::scope(|scope| {
            let run = |me: usize, mailbox: Mailbox| {
                let (segments, bench, source_of_1) = (view(), &bench, &source_of_1);
                scope.spawn(move || {
                    let shmem = Shmem::new(ShmTransport::new(me, segments).unwrap());
                    let memory = P2pMemory {
                        ring: shmem.alloc(P2pMemory::ring_bytes(bench)).unwrap(),
                        source: shmem.alloc(largest(bench)).unwrap(),
                        signals: shmem.alloc(SIGNALS * STRIDE).unwrap(),
                    };
                    let mut source: Vec<u64> = (0..largest(bench) as u64 / 8).collect();
                    if me == 1 {
                        source_of_1(&mut source);
                    }
                    let reach = |pe| Pages::of(&shmem, memory.ring, memory.signals, pe).filter(|_| pages);
                    let mut part = PairMember {
                        shmem: &shmem,
                        two_sided: Some(&mailbox),
                        memory: &memory,
                        pair: [0, 1],
                        peer: 1 - me,
                        first: me == 0,
                        raw: reach(me).zip(reach(1 - me)),
                        source,
                        count: HashMap::new(),
                        limit: if me == 0 { Duration::from_secs(2) } else { LIMIT },
                    };
                    let mut rows = Vec::new();
                    let speed = LinkSpeed::from_words([2e-7, 1e10].map(f64::to_bits));
                    for (op, measure, bytes) in figures(bench) {
                        let plan = HostSampling::new(bench, speed, measure, op, bytes);
                        rows.extend(part.figure(plan, op, measure, bytes)?);
                        meet(&shmem, part.limit)?;
                    }
                    Ok(rows)
                })
            };
            let [first, second] = boxes;
            let pes = [run(0, first), run(1, second)];
            pes.map(|pe| pe.join().unwrap())
        })
    }

    #[test]
    fn rows_come_from_the_pe_whose_clock_is_used() {
        for pages in [true, false] {
            let [first, second] = measure(pages, |_| {}).map(Result::unwrap);
            assert!(second.iter().all(|row| row.measure == Measure::Consume));
            assert_eq!(second.iter().filter(|row| row.op == Op::SendRecv).count(), 3);
            assert_eq!(second.len(), 6);
            // Put, get: two measures; non-blocking: latency and issue; ping-pongs; atomic at one size.
            assert_eq!(first.len(), 3 * (2 + 2 + 2 + 1 + 1) + 2);
            for row in first.iter().chain(&second) {
                assert_eq!(row.iterations, 10, "{row:?}");
                assert_eq!(row.raw_us.is_some(), pages && row.op == Op::PutSignal, "{row:?}");
                assert!(row.min_us > 0.0, "{row:?}");
            }
        }
    }

    #[test]
    fn wrong_bytes_are_an_error() {
        // Only the last word of the largest size differs from what the receiver expects.
        let [_, second] = measure(true, |source| source[511] ^= 1 << 40);
        let error = second.unwrap_err().to_string();
        assert_eq!(error, "message 0 of 4096 bytes from PE 0 arrived damaged");
    }
}
