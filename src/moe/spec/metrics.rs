//! The time of a pass by phase, and its traffic.

use rustix::time::{ClockId, clock_gettime};

/// The phase a PE is in. Every nanosecond of a pass belongs to exactly one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Outside a pass.
    Idle,
    /// Logits, selection, routing tables, and their backward.
    Router,
    /// Sending headers and rows, and copying received rows to the experts' batches.
    Dispatch,
    /// GEMMs and activations of the experts, including shared experts and weight gradients.
    Expert,
    /// Returning partial sums, and adding them at the tokens' PEs.
    Combine,
    /// Waiting for a peer.
    Waiting,
    /// Summing the gradients of replicated weights over PEs.
    AllReduce,
    /// In forward: multiplying experts' results by their weights, and summing them by token on the expert's PE. A device counts this as
    /// [`Phase::Combine`].
    Scale,
    /// Moving experts to other PEs, between passes.
    Move,
}

impl Phase {
    /// All phases, in the order of their codes.
    pub const ALL: [Phase; 9] = [
        Phase::Idle,
        Phase::Router,
        Phase::Dispatch,
        Phase::Expert,
        Phase::Combine,
        Phase::Waiting,
        Phase::AllReduce,
        Phase::Scale,
        Phase::Move,
    ];

    /// The phases of passes: all except [`Phase::Idle`] and [`Phase::Move`].
    pub fn of_passes() -> impl Iterator<Item = Phase> {
        Self::ALL.into_iter().filter(|phase| !matches!(phase, Phase::Idle | Phase::Move))
    }

    /// The name in tables, traces and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Idle => "idle",
            Phase::Router => "router",
            Phase::Dispatch => "dispatch",
            Phase::Expert => "expert GEMM",
            Phase::Combine => "combine",
            Phase::Waiting => "waiting",
            Phase::AllReduce => "all-reduce",
            Phase::Scale => "scale",
            Phase::Move => "move",
        }
    }

    /// Index in [`Phase::ALL`].
    pub const fn code(self) -> usize {
        self as usize
    }
}

/// Data put to other PEs since the counters were reset. Puts to the PE itself are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Headers: counts and offsets, bytes.
    pub header_bytes: u64,
    /// Token rows (forward) and gradient rows (backward) in dispatch, bytes.
    pub dispatch_row_bytes: u64,
    /// Experts and weights of the rows in dispatch, bytes.
    pub dispatch_slot_bytes: u64,
    /// Partial sums (forward) and input gradients (backward) in combine, bytes.
    pub combine_row_bytes: u64,
    /// Routing-weight gradients in combine, bytes.
    pub combine_slot_bytes: u64,
    /// Rows in dispatch.
    pub dispatch_rows: u64,
    /// Rows in combine.
    pub combine_rows: u64,
    /// Put calls. `puts`, `signals` and `fences` include gradient sums on devices, and exclude collectives on CPUs.
    pub puts: u64,
    /// Signal operations (with or without data).
    pub signals: u64,
    /// Fences.
    pub fences: u64,
    /// Bytes put to PEs that are reachable only over a network. These bytes are a part of the counts above and of the gradient sums.
    pub network_bytes: u64,
    /// With relays: bytes of rows forwarded by relays, and of partial results sent to relays with their routing-weight
    /// gradients. On a CPU the other counters include these bytes.
    pub relay_bytes: u64,
}

impl Traffic {
    /// Adds the traffic of another pass.
    pub fn add(&mut self, other: &Traffic) {
        self.header_bytes += other.header_bytes;
        self.dispatch_row_bytes += other.dispatch_row_bytes;
        self.dispatch_slot_bytes += other.dispatch_slot_bytes;
        self.combine_row_bytes += other.combine_row_bytes;
        self.combine_slot_bytes += other.combine_slot_bytes;
        self.dispatch_rows += other.dispatch_rows;
        self.combine_rows += other.combine_rows;
        self.puts += other.puts;
        self.signals += other.signals;
        self.fences += other.fences;
        self.network_bytes += other.network_bytes;
        self.relay_bytes += other.relay_bytes;
    }

    /// Bytes put to other PEs by the layer protocol, without the gradient sums.
    pub fn total_bytes(&self) -> u64 {
        self.header_bytes
            + self.dispatch_row_bytes
            + self.dispatch_slot_bytes
            + self.combine_row_bytes
            + self.combine_slot_bytes
    }
}

/// A time span in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The phase.
    pub phase: Phase,
    /// Start, nanoseconds. On a CPU by `CLOCK_MONOTONIC`, which PEs of a host share; on a device by the device's clock.
    pub start_ns: u64,
    /// Duration, nanoseconds.
    pub dur_ns: u64,
    /// Track of the PE's timeline: the number of the thread block on a device; 0 on a CPU.
    pub track: u32,
}

/// Times and traffic of one or more passes.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PassOutcome {
    /// Time of the pass, seconds; on a device by the device's clock.
    pub seconds: f64,
    /// The time by [`Phase::code`], seconds. On a device, the persistent kernel's time is divided in proportion to the time that its blocks
    /// spend in each phase.
    pub phases_s: [f64; Phase::ALL.len()],
    /// CPU time in [`Phase::Expert`], seconds, which does not depend on other load on the CPU; 0 on a device.
    pub expert_cpu_s: f64,
    /// Window refills.
    pub rounds: u64,
    /// Traffic of the layer protocol.
    pub traffic: Traffic,
    /// Bytes put to other PEs to sum gradients: those of replicated weights, and of experts that several PEs hold.
    pub all_reduce_bytes: u64,
    /// Recorded spans, if enabled.
    pub spans: Vec<Span>,
}

/// Receives a PE's phase changes, for status displays and for reporting the phase of a lost PE.
pub trait Observer: Send {
    /// The PE enters `phase`.
    fn phase(&self, phase: Phase);

    /// The PE has computed `flop` FLOP of an expert's GEMMs.
    fn computed(&self, flop: f64) {
        let _ = flop;
    }
}

/// An observer that ignores all calls.
pub struct NoObserver;

impl Observer for NoObserver {
    fn phase(&self, _: Phase) {}
}

/// `CLOCK_MONOTONIC`, nanoseconds.
pub fn now_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

fn clock_ns(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Sums the time of each phase and, if enabled, records spans.
pub struct Recorder {
    observer: Box<dyn Observer>,
    phase: Phase,
    since_ns: u64,
    totals_ns: [u64; Phase::ALL.len()],
    /// CPU time in [`Phase::Expert`], and the thread's CPU time at the last start or end of that phase.
    expert_cpu_ns: u64,
    cpu_since_ns: u64,
    spans: Option<Vec<Span>>,
    /// Traffic since the last [`take`](Self::take).
    pub traffic: Traffic,
}

impl Recorder {
    /// A recorder in [`Phase::Idle`].
    pub fn new(observer: Box<dyn Observer>) -> Self {
        Recorder {
            observer,
            phase: Phase::Idle,
            since_ns: now_ns(),
            totals_ns: Default::default(),
            expert_cpu_ns: 0,
            cpu_since_ns: 0,
            spans: None,
            traffic: Traffic::default(),
        }
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Starts recording spans.
    pub fn record_spans(&mut self) {
        self.spans.get_or_insert_default();
    }

    /// Ends the current phase and starts `phase`. Returns the previous phase.
    pub fn enter(&mut self, phase: Phase) -> Phase {
        let before = self.phase;
        if phase != before {
            let now = now_ns();
            let dur_ns = now.saturating_sub(self.since_ns);
            self.totals_ns[before.code()] += dur_ns;
            if let Some(spans) = &mut self.spans
                && before != Phase::Idle
            {
                spans.push(Span { phase: before, start_ns: self.since_ns, dur_ns, track: 0 });
            }
            if before == Phase::Expert || phase == Phase::Expert {
                let cpu = clock_ns(ClockId::ThreadCPUTime);
                if before == Phase::Expert {
                    self.expert_cpu_ns += cpu.saturating_sub(self.cpu_since_ns);
                }
                self.cpu_since_ns = cpu;
            }
            self.phase = phase;
            self.since_ns = now;
            self.observer.phase(phase);
        }
        before
    }

    /// Reports `flop` FLOP of an expert's GEMMs to the observer.
    pub fn computed(&self, flop: f64) {
        self.observer.computed(flop);
    }

    /// Returns and resets the times (nanoseconds, by [`Phase::code`]) and the traffic.
    pub fn take(&mut self) -> ([u64; Phase::ALL.len()], Traffic) {
        let phase = self.enter(Phase::Idle);
        self.enter(phase);
        (std::mem::take(&mut self.totals_ns), std::mem::take(&mut self.traffic))
    }

    /// Returns and resets the CPU time in [`Phase::Expert`], nanoseconds.
    pub fn take_expert_cpu_ns(&mut self) -> u64 {
        std::mem::take(&mut self.expert_cpu_ns)
    }

    /// Returns and removes the recorded spans.
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.spans.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
