//! Where a pass spends its time, and what it put on the wire.

use rustix::time::{ClockId, clock_gettime};

/// What a PE is doing. Every nanosecond of a pass belongs to exactly one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Outside a pass.
    Idle,
    /// Logits, selection, routing tables, and their backward.
    Router,
    /// Counts and rows on their way out, and arrived rows gathered into expert order.
    Dispatch,
    /// GEMMs and activations of the experts, shared experts included; weight gradients too.
    Expert,
    /// Partial sums on their way back, and the final sum.
    Combine,
    /// Blocked on a peer.
    Waiting,
    /// Sum over PEs of the gradients of replicated weights.
    AllReduce,
    /// Of a forward pass: experts' results times their routing weights, summed by token where the expert is. A device counts
    /// it with [`Phase::Combine`].
    Scale,
    /// Between passes: experts on their way to other PEs.
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

    /// Those of passes: all but [`Phase::Idle`] and [`Phase::Move`].
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

    /// Its index in [`Phase::ALL`].
    pub const fn code(self) -> usize {
        self as usize
    }
}

/// What this PE has put to other PEs since the counters were reset. Bytes to itself are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Counts and offsets, bytes.
    pub header_bytes: u64,
    /// Token rows (forward) and gradient rows (backward) on the dispatch routes, bytes.
    pub dispatch_row_bytes: u64,
    /// Which experts a row is for, and with which weights, bytes.
    pub dispatch_slot_bytes: u64,
    /// Partial sums (forward) and input gradients (backward) on the combine routes, bytes.
    pub combine_row_bytes: u64,
    /// Routing-weight gradients on the combine routes, bytes.
    pub combine_slot_bytes: u64,
    /// Rows on the dispatch routes.
    pub dispatch_rows: u64,
    /// Rows on the combine routes.
    pub combine_rows: u64,
    /// Put calls; here and in the next two those of the sums of gradients are counted on devices, and of collectives on CPUs none.
    pub puts: u64,
    /// Signal operations (with or without data).
    pub signals: u64,
    /// Fences.
    pub fences: u64,
    /// Of all these bytes and those of the sums of gradients, what went to PEs that only a network reaches.
    pub network_bytes: u64,
    /// With rows once per host, rows that PEs got by way of a home on their host, and parts of results, their gradients of routing weights included,
    /// that they put to it. On a CPU these bytes are among the others too.
    pub relay_bytes: u64,
}

impl Traffic {
    /// Adds another pass's.
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

    /// All bytes put to other PEs by the layer's protocol (not the gradient all-reduce).
    pub fn total_bytes(&self) -> u64 {
        self.header_bytes
            + self.dispatch_row_bytes
            + self.dispatch_slot_bytes
            + self.combine_row_bytes
            + self.combine_slot_bytes
    }
}

/// A stretch of time in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The phase.
    pub phase: Phase,
    /// Start, nanoseconds: of `CLOCK_MONOTONIC`, comparable between the PEs of one host, or of the device's clock.
    pub start_ns: u64,
    /// Duration, nanoseconds.
    pub dur_ns: u64,
    /// Which of the things that a PE does at the same time: the block of a kernel; 0 on a CPU.
    pub track: u32,
}

/// What one pass, or several, took and sent.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PassOutcome {
    /// Time of the pass, seconds; on a device the device's own.
    pub seconds: f64,
    /// Of it by [`Phase::code`], seconds; on a device the time of the persistent kernel by what its blocks did.
    pub phases_s: [f64; Phase::ALL.len()],
    /// Processor time of [`Phase::Expert`], seconds, which others on the same CPU do not stretch; 0 on a device.
    pub expert_cpu_s: f64,
    /// Rounds through the windows.
    pub rounds: u64,
    /// What the protocol put to other PEs.
    pub traffic: Traffic,
    /// Bytes of the sums of gradients (of replicated weights; of experts between groups) put to other PEs.
    pub all_reduce_bytes: u64,
    /// What was done when, where spans are recorded.
    pub spans: Vec<Span>,
}

/// Told what a PE is doing while it does it (for status displays and for naming the phase of a dead PE).
pub trait Observer: Send {
    /// The PE enters `phase`.
    fn phase(&self, phase: Phase);

    /// The PE has computed `flop` FLOP of an expert's matrix products.
    fn computed(&self, flop: f64) {
        let _ = flop;
    }
}

/// An observer that ignores what it is told.
pub struct Unobserved;

impl Observer for Unobserved {
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

/// Accumulates the time of each phase and, when asked, the spans.
pub struct Recorder {
    observer: Box<dyn Observer>,
    phase: Phase,
    since_ns: u64,
    totals_ns: [u64; Phase::ALL.len()],
    /// Processor time in [`Phase::Expert`], and the thread's at the last change to or from it.
    expert_cpu_ns: u64,
    cpu_since_ns: u64,
    spans: Option<Vec<Span>>,
    /// What was put to other PEs.
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

    /// Keeps spans from now on.
    pub fn record_spans(&mut self) {
        self.spans.get_or_insert_default();
    }

    /// Ends the current phase and begins `phase`; returns the one that ended.
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

    /// Tells the observer that the phase had `flop` FLOP of an expert's matrix products.
    pub fn computed(&self, flop: f64) {
        self.observer.computed(flop);
    }

    /// Takes the times (nanoseconds, by [`Phase::code`]) and the traffic since the last call, and resets both.
    pub fn take(&mut self) -> ([u64; Phase::ALL.len()], Traffic) {
        let phase = self.enter(Phase::Idle);
        self.enter(phase);
        (std::mem::take(&mut self.totals_ns), std::mem::take(&mut self.traffic))
    }

    /// Takes the processor time in [`Phase::Expert`] since the last call, nanoseconds.
    pub fn take_expert_cpu_ns(&mut self) -> u64 {
        std::mem::take(&mut self.expert_cpu_ns)
    }

    /// Takes the spans kept since the last call.
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.spans.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
