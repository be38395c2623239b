//! The steps on one PE.
//!
//! Message `k` of a pair uses slot `k % 2` of the receiver and its signal. Two slots suffice: a PE sends message `k + 2` to a peer after it has
//! received the peer's message `k + 1`, which the peer sent after it had read message `k`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use super::clock::{self, ClockWords, Common, Offset, cpu_ns, now_ns};
use super::queue::RunQueue;
use super::{PeStep, StragglerBench, StragglerMode};
use crate::bench::cpus::{self, CpuSpan};
use crate::bench::p2p::host::meet;
use crate::job::host::{AllToAll, Host, PeTask, SymmetricRuntime};
use crate::shmem::{Cmp, Shmem, SignalOp, Sym, Transport, Wait};

/// Slots of a pair.
const SLOTS: usize = 2;
/// Words from one signal to the next, so that no two share a cache line.
const STRIDE: usize = 8;
/// A message begins with its send time.
const STAMP_BYTES: usize = size_of::<i64>();

/// The names of the job's phases.
pub const PHASE_NAMES: [&str; 5] =
    ["start-up", "reading clocks", "bulk steps", "one-sided steps", "steps of MPI_Alltoallv"];

/// The measurements of one PE in one mode, by its own clock.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeSteps {
    /// The PE.
    pub pe: usize,
    /// The mode.
    pub mode: StragglerMode,
    /// The host, which determines the clock.
    pub host: String,
    /// The CPUs of the PE.
    pub span: CpuSpan,
    /// Whether the system provides the time without a CPU.
    pub knows_queue: bool,
    /// Offsets of all clocks to PE 0's before and after the steps, index = PE; empty on other PEs.
    pub offsets: [Vec<Offset>; 2],
    /// The measured steps in order. The send times are by the senders' clocks.
    pub steps: Vec<PeStep>,
}

fn slot_bytes(bench: &StragglerBench) -> usize {
    bench.bytes.max(STAMP_BYTES).next_multiple_of(64)
}

/// The symmetric memory.
struct StragglerMemory {
    /// Slot `sender * SLOTS + k % SLOTS`.
    slots: Sym<u8>,
    /// Number of messages that each slot has received.
    signals: Sym<u64>,
}

/// Runs a PE's part: the steps of every mode, and sends a [`PeSteps`] for each.
///
/// # Errors
/// A PE that does not respond in time, or an error of the host.
pub fn run(bench: &StragglerBench, host: &mut impl SymmetricRuntime) -> Result<()> {
    host.work(StragglerPart { bench })
}

struct StragglerPart<'b> {
    bench: &'b StragglerBench,
}

impl PeTask for StragglerPart<'_> {
    type Error = anyhow::Error;

    fn heap_bytes<T: Transport>(&self) -> Result<usize> {
        let bench = self.bench;
        let slots = bench.pes * SLOTS * slot_bytes(bench);
        let words = bench.pes * SLOTS * STRIDE + clock::WORDS;
        Ok(Shmem::<T>::heap_bytes_for(bench.pes, slots + words * size_of::<u64>() + 256))
    }

    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
        measure(self.bench, shmem, host)
    }
}

fn measure<T: Transport>(bench: &StragglerBench, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
    let limit = bench.wait_limit;
    let all_to_all = match bench.modes.contains(&StragglerMode::Alltoallv) {
        true => host.all_to_all()?,
        false => None,
    };
    let all_to_all = all_to_all.as_deref();
    let (me, n) = (shmem.my_pe(), shmem.n_pes());
    cpus::pin(me, n);
    let memory = StragglerMemory {
        slots: shmem.alloc(n * SLOTS * slot_bytes(bench))?,
        signals: shmem.alloc(n * SLOTS * STRIDE)?,
    };
    let queue = RunQueue::of_this_thread();
    let part = Steps { bench, shmem, memory, all_to_all, limit, queue };
    let clocks = ClockWords::new(shmem.alloc(clock::WORDS)?);
    let all = bench.warmup + bench.steps;
    for (turn, &mode) in bench.modes.iter().enumerate() {
        let status = host.status();
        let read_clocks = |turn| {
            status.set_phase(1);
            clocks.measure(shmem, turn, now_ns, limit)
        };
        meet(shmem, limit)?;
        let before = read_clocks(2 * turn as u64)?;
        meet(shmem, limit)?;
        status.set_phase(2 + mode as u32);
        let span = CpuSpan::start_here();
        let mut queued = part.queue.waited_ns();
        let mut steps = Vec::with_capacity(bench.steps);
        for step in 0..all {
            let k = (turn * all + step) as u64;
            status.set_progress(k, (bench.modes.len() * all) as u64);
            let times = part.one_step(mode, k, step, &mut queued)?;
            if step >= bench.warmup {
                steps.push(times);
            }
        }
        let span = span.end_here();
        meet(shmem, limit)?;
        let after = read_clocks(2 * turn as u64 + 1)?;
        let host_id = crate::shmem::host_id();
        let knows_queue = queued.is_some();
        let result = PeSteps { pe: me, mode, host: host_id, span, knows_queue, offsets: [before, after], steps };
        host.send(&serde_json::to_vec(&result)?)?;
    }
    meet(shmem, limit)
}

/// The state of the steps of one PE.
struct Steps<'a, T: Transport> {
    bench: &'a StragglerBench,
    shmem: &'a Shmem<T>,
    memory: StragglerMemory,
    all_to_all: Option<&'a dyn AllToAll>,
    limit: Duration,
    queue: RunQueue,
}

impl<T: Transport> Steps<'_, T> {
    /// Runs one step with message `k` of each pair. `queued` is the run-queue time at the end of the step before, and is set to that at the end of this
    /// one.
    fn one_step(&self, mode: StragglerMode, k: u64, step: usize, queued: &mut Option<i64>) -> Result<PeStep> {
        // Run-queue time since the last call.
        let mut queue = || {
            let now = self.queue.waited_ns();
            let before = std::mem::replace(queued, now);
            now.zip(before).map_or(0, |(now, before)| now - before)
        };
        let (me, n) = (self.shmem.my_pe(), self.shmem.n_pes());
        if mode == StragglerMode::Bulk {
            meet(self.shmem, self.limit)?;
        }
        let compute_ns = (self.bench.compute_us(step, me) * 1e3) as i64;
        let mut times = PeStep { sent: vec![0; n], arrived: vec![0; n], queued_before: queue(), ..PeStep::default() };
        times.begin = now_ns();
        // Spins for CPU time, not wall time.
        let until = cpu_ns() + compute_ns;
        while cpu_ns() < until {
            std::hint::spin_loop();
        }
        times.queued_compute = queue();
        times.send = now_ns();
        if mode == StragglerMode::Alltoallv {
            self.call(&mut times)?;
            times.queued_receive = queue();
            return Ok(times);
        }
        self.send(k);
        times.queued_send = queue();
        self.receive(k, step, &mut times)?;
        times.queued_receive = queue();
        if mode == StragglerMode::Bulk {
            meet(self.shmem, self.limit)?;
        }
        times.end = now_ns();
        Ok(times)
    }

    /// The index of the slot of a sender's message `k`.
    fn slot(&self, sender: usize, k: u64) -> usize {
        sender * SLOTS + (k % SLOTS as u64) as usize
    }

    fn send(&self, k: u64) {
        let (me, n) = (self.shmem.my_pe(), self.shmem.n_pes());
        let mut message = vec![0; self.bench.bytes.max(STAMP_BYTES)];
        let (slot, pitch) = (self.slot(me, k), slot_bytes(self.bench));
        let dest = self.memory.slots.slice(slot * pitch..slot * pitch + message.len());
        // Starts with the next PE, so that the PEs do not all send to PE 0 first.
        for pe in (1..n).map(|distance| (me + distance) % n) {
            message[..STAMP_BYTES].copy_from_slice(&now_ns().to_le_bytes());
            self.shmem.put_signal(dest, &message, self.memory.signals.at(slot * STRIDE), 1, SignalOp::Add, pe);
        }
    }

    fn receive(&self, k: u64, step: usize, times: &mut PeStep) -> Result<()> {
        let (me, n) = (self.shmem.my_pe(), self.shmem.n_pes());
        let deadline = Instant::now() + self.limit;
        (times.sent[me], times.arrived[me]) = (times.send, times.send);
        let mut missing: Vec<usize> = (0..n).filter(|&pe| pe != me).collect();
        // Messages of slowed links, and their simulated arrival.
        let mut due: Vec<(usize, i64)> = Vec::new();
        while !missing.is_empty() {
            let wait = |&pe: &usize| {
                let signal = self.memory.signals.at(self.slot(pe, k) * STRIDE);
                Wait { signal, cmp: Cmp::Ge, value: k / SLOTS as u64 + 1 }
            };
            let waits: Vec<Wait> = missing.iter().map(wait).collect();
            let found = self.shmem.wait_until_any(&waits, deadline);
            let found = found.map_err(|timeout| anyhow!("step {step}: message of PE {}: {timeout}", missing[0]))?;
            let (pe, now) = (missing.swap_remove(found), now_ns());
            let mut stamp = [0; STAMP_BYTES];
            let at = self.slot(pe, k) * slot_bytes(self.bench);
            self.shmem.get(&mut stamp, self.memory.slots.slice(at..at + STAMP_BYTES), me);
            times.sent[pe] = i64::from_le_bytes(stamp);
            times.arrived[pe] = now;
            // A slowed link delays the message from its send time, if the sender is on this host and shares the clock, otherwise from its arrival.
            let extra = self.bench.link_ns(pe, me) as i64;
            if extra > 0 {
                let from = if (now - times.sent[pe]).abs() < 1_000_000_000 { times.sent[pe] } else { now };
                due.push((pe, (from + extra).max(now)));
            }
        }
        for (pe, at) in due {
            while now_ns() < at {
                std::hint::spin_loop();
            }
            times.arrived[pe] = at;
        }
        Ok(())
    }

    /// Exchanges the messages by one collective call. All of them arrive when it returns.
    fn call(&self, times: &mut PeStep) -> Result<()> {
        let (me, n) = (self.shmem.my_pe(), self.shmem.n_pes());
        let all_to_all = self.all_to_all.context("this transport has no all-to-all")?;
        let bytes = self.bench.bytes.max(STAMP_BYTES);
        let (mut out, mut into) = (vec![0; n * bytes], vec![0; n * bytes]);
        times.send = now_ns();
        out.chunks_exact_mut(bytes)
            .for_each(|message| message[..STAMP_BYTES].copy_from_slice(&times.send.to_le_bytes()));
        all_to_all.exchange(&out, &mut into, bytes)?;
        times.end = now_ns();
        for (sent, message) in times.sent.iter_mut().zip(into.chunks_exact(bytes)) {
            let mut stamp = [0; STAMP_BYTES];
            stamp.copy_from_slice(&message[..STAMP_BYTES]);
            *sent = i64::from_le_bytes(stamp);
        }
        times.arrived.fill(times.end);
        (times.sent[me], times.arrived[me]) = (times.send, times.send);
        Ok(())
    }
}

/// The steps of one mode on one clock, by step, then by PE. `of_mode` has an entry for each PE in order.
pub fn on_one_clock(of_mode: &[PeSteps]) -> Vec<Vec<PeStep>> {
    let Some(first) = of_mode.first() else { return Vec::new() };
    let clocks: Vec<Common> = of_mode
        .iter()
        .map(|pe| {
            let same = pe.host == first.host && !pe.host.is_empty();
            let offset = |which: usize| first.offsets[which].get(pe.pe).copied().filter(|_| !same).unwrap_or_default();
            Common::new(offset(0), offset(1))
        })
        .collect();
    let steps = of_mode.iter().map(|pe| pe.steps.len()).min().unwrap_or(0);
    let of_pe = |pe: usize, step: usize| {
        let (times, own) = (&of_mode[pe].steps[step], clocks[pe]);
        let of = |t: i64| own.common_ns(t);
        PeStep {
            begin: of(times.begin),
            send: of(times.send),
            end: of(times.end),
            sent: times.sent.iter().zip(&clocks).map(|(&t, sender)| sender.common_ns(t)).collect(),
            arrived: times.arrived.iter().map(|&t| of(t)).collect(),
            ..*times
        }
    };
    (0..steps).map(|step| (0..of_mode.len()).map(|pe| of_pe(pe, step)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_two_hosts_are_converted_to_one_clock() {
        let at = |offset_ns| Offset { at: 0, offset_ns, error_ns: 1 };
        let pe = |pe: usize, host: &str, ahead: i64, sender: i64| PeSteps {
            pe,
            mode: StragglerMode::Bulk,
            host: host.into(),
            span: CpuSpan::default(),
            knows_queue: true,
            offsets: [vec![at(0), at(500)], vec![at(0), at(500)]],
            steps: vec![PeStep {
                begin: 10 + ahead,
                send: 20 + ahead,
                end: 40 + ahead,
                sent: if pe == 0 { vec![20, 21 + sender] } else { vec![21, 20 + ahead] },
                arrived: vec![30 + ahead; 2],
                queued_compute: 3,
                ..PeStep::default()
            }],
        };
        let steps = on_one_clock(&[pe(0, "a", 0, 500), pe(1, "b", 500, 0)]);
        let want = |sent: [i64; 2]| {
            let (sent, arrived) = (sent.to_vec(), vec![30, 30]);
            PeStep { begin: 10, send: 20, end: 40, sent, arrived, queued_compute: 3, ..PeStep::default() }
        };
        assert_eq!(steps, [vec![want([20, 21]), want([21, 20])]]);
        // On one host the measured offsets are ignored.
        let steps = on_one_clock(&[pe(0, "a", 0, 0), pe(1, "a", 0, 0)]);
        assert_eq!(steps[0][1], want([21, 20]));
    }
}
