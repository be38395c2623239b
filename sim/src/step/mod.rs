//! One step of an MoE layer in virtual time, event by event: the layer's protocol (`docs/protocol.md`) over an alpha-beta network.
//!
//! A PE computes one tile at a time while rows are in flight. The order of a PE's work and sends, the chunks, windows, credits and tiles
//! are those of the layer: a [`GroupPlan`] is derived from the layer's own routes. The gradients of an expert are summed between its
//! holders once all of them have finished their backward pass.

mod engine;
mod plan;
#[cfg(test)]
mod tests;

use aristos_formats::cluster::Cluster;

use crate::network::Nics;
use aristos_formats::Span;
pub use engine::simulate;
pub use plan::{Cutting, GroupPlan, Relay, Rows};

/// How the PEs exchange rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Rows, tiles and results are processed as they arrive.
    #[default]
    Pipelined,
    /// All PEs of a group finish each phase (counts, rows, experts, results) before any starts the next.
    Bulk,
}

/// The costs of a layer's parts. Work is given in FLOP: its time multiplied by the device's nominal rate.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Bytes of a row on the wire.
    pub row_bytes: f64,
    /// Bytes sent with a row, and with each of its slots, in the dispatch of a forward.
    pub out_bytes: (f64, f64),
    /// Bytes returned with each slot in a backward.
    pub back_bytes: f64,
    /// Bytes of a header.
    pub header_bytes: f64,
    /// The tiles of an expert, by pass, per slot.
    pub tile_flop: [Affine; 2],
    /// Epilogues of these tiles, by pass, per slot.
    pub epilogue_flop: [Affine; 2],
    /// Reads an expert's weights, by pass; once for each expert with rows.
    pub weights_flop: [f64; 2],
    /// The gradients of an expert's weights, per slot of the expert: products, and epilogues.
    pub gradient_flop: [Affine; 2],
    /// The router and other work at the start and the end of a pass, by pass, per token.
    pub router_flop: [Affine; 2],
    /// The shared expert, by pass, per token.
    pub shared_flop: [Affine; 2],
    /// Work of the PE itself to send, gather and sum rows, by pass.
    pub copy_flop: [CopyFlop; 2],
    /// Idle time before a pass's first tile, by pass, per expert of the PE.
    pub start_flop: [Affine; 2],
    /// Idle time after a pass's last result, by pass, per expert of the PE.
    pub tail_flop: [Affine; 2],
    /// Gradient bytes of one expert, and of the replicated weights.
    pub gradient_bytes: (f64, f64),
}

/// A cost that grows with the number of rows, slots or tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Affine {
    /// Constant part; not added for a number of 0.
    pub base: f64,
    /// Cost per row, slot or token.
    pub each: f64,
    /// Numbers are rounded up to a multiple of this; 0 for no rounding.
    pub multiple: f64,
}

impl Affine {
    /// A cost without a constant part.
    pub fn each(each: f64) -> Affine {
        Affine { each, ..Affine::default() }
    }

    /// The cost of `n`.
    pub fn of(&self, n: f64) -> f64 {
        let counted = if self.multiple > 0.0 { (n / self.multiple).ceil() * self.multiple } else { n };
        if n > 0.0 { self.base + counted * self.each } else { 0.0 }
    }
}

/// Work of a PE's processor to copy rows, FLOP; 0 if rows are transferred without the processor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CopyFlop {
    /// Puts a chunk with its signal, in addition to the cost of its rows: for a chunk of rows, and of results.
    pub message: [f64; 2],
    /// Puts one row: in the dispatch, and in the combine.
    pub put_row: [f64; 2],
    /// Gathers one slot of a received row, or of the PE's own.
    pub gather_slot: f64,
    /// Sums the result of one slot.
    pub sum_slot: f64,
    /// Adds one row of results to its token.
    pub add_row: f64,
    /// Receives one message of rows or results, in addition to `take_row` for each row. A second thread of the PE does this, so it delays
    /// the PE only if the host has no idle core ([`Cores`]).
    pub take_message: f64,
    /// Receives one row of a message.
    pub take_row: f64,
}

/// Cores that the PEs of a host share, if PEs are threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// Cores per host.
    pub count: usize,
    /// The time of some work if all cores are busy, relative to its time if only one core is busy.
    pub busy_factor: f64,
}

impl Cores {
    /// The factor on the time of work with this number of busy cores: linear from 1 for one core to `busy_factor` for all.
    pub fn slowdown(&self, busy: usize) -> f64 {
        let share = if self.count > 1 { busy.saturating_sub(1) as f64 / (self.count - 1) as f64 } else { 0.0 };
        1.0 + (self.busy_factor - 1.0) * share
    }
}

/// An expert-parallel group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Members as device indices of the cluster, in the order of their numbers in the group.
    pub members: Vec<usize>,
    /// By member, the experts that it holds, ascending.
    pub experts: Vec<Vec<usize>>,
    /// Index of its plan.
    pub plan: usize,
}

/// Random speed differences between PEs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Jitter {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Standard deviation of the logarithm of the factor on a PE's time, which is drawn for each PE and step.
    pub sigma: f64,
}

/// A step to simulate.
pub struct Step<'a> {
    /// The PEs and their links.
    pub cluster: &'a Cluster,
    /// The groups; each PE is in one of them.
    pub groups: &'a [Group],
    /// The groups' plans.
    pub plans: &'a [GroupPlan],
    /// The costs of the work.
    pub cost: &'a LayerCost,
    /// The schedule.
    pub schedule: Schedule,
    /// Whether a step has a backward pass.
    pub backward: bool,
    /// Chunks of a window.
    pub window_chunks: usize,
    /// Number of steps.
    pub steps: usize,
    /// Random speed differences, if any.
    pub jitter: Option<Jitter>,
    /// The cores that PEs share; `None` if each PE has a processor of its own.
    pub cores: Option<Cores>,
    /// Whether PEs share a port to the network.
    pub nics: Nics,
    /// Factors on the speed of the network ports, and on FLOP/s.
    pub speed: (f64, f64),
    /// Timelines are recorded for PEs `0..traced`.
    pub traced: usize,
}

/// Times of a PE over all steps, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PeTime {
    /// The router, by pass.
    pub router_s: [f64; 2],
    /// Products of experts, including the shared expert, by pass.
    pub expert_s: [f64; 2],
    /// Epilogues of tiles, by pass, if the cost of a layer gives them.
    pub epilogue_s: [f64; 2],
    /// Idle before the first tile, by pass, if the cost of a layer gives it.
    pub start_s: [f64; 2],
    /// Idle after the last result, by pass, if the cost of a layer gives it.
    pub tail_s: [f64; 2],
    /// Putting and gathering rows, by pass.
    pub dispatch_s: [f64; 2],
    /// Putting and summing results, by pass.
    pub combine_s: [f64; 2],
    /// Waiting for rows, results or other PEs, by pass.
    pub waiting_s: [f64; 2],
    /// Forward and backward, from the start of the step to the end of the PE.
    pub pass_s: [f64; 2],
    /// After the passes, waiting for the other PEs whose gradients are summed with its own.
    pub sums_wait_s: f64,
    /// Summing the gradients of experts that several PEs hold. The replicated weights' are summed at the same time, so only the sums that end
    /// later count.
    pub expert_sums_s: f64,
    /// Summing the gradients of replicated weights.
    pub replicated_sums_s: f64,
    /// Time in which its busiest port sent, or in which it received, whichever is longer.
    pub port_s: f64,
}

impl PeTime {
    /// Time in a pass that it does not wait for other PEs, s.
    pub fn work_s(&self, pass: usize) -> f64 {
        let PeTime { router_s, expert_s, epilogue_s, start_s, tail_s, dispatch_s, combine_s, .. } = self;
        [router_s, expert_s, epilogue_s, start_s, tail_s, dispatch_s, combine_s].iter().map(|s| s[pass]).sum()
    }

    fn add(&mut self, other: &PeTime) {
        for (sum, other) in [
            (&mut self.router_s, other.router_s),
            (&mut self.expert_s, other.expert_s),
            (&mut self.epilogue_s, other.epilogue_s),
            (&mut self.start_s, other.start_s),
            (&mut self.tail_s, other.tail_s),
            (&mut self.dispatch_s, other.dispatch_s),
            (&mut self.combine_s, other.combine_s),
            (&mut self.waiting_s, other.waiting_s),
            (&mut self.pass_s, other.pass_s),
        ] {
            sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
        }
        self.sums_wait_s += other.sums_wait_s;
        self.expert_sums_s += other.expert_sums_s;
        self.replicated_sums_s += other.replicated_sums_s;
        self.port_s += other.port_s;
    }
}

/// The times of the steps.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepTimes {
    /// Each step, from its start to the end of the last PE, s.
    pub step_s: Vec<f64>,
    /// Times by PE.
    pub pes: Vec<PeTime>,
    /// For each PE and step, how much later the PE ended its passes than the first PE of its group, s. In the bulk schedule, the ends of
    /// the last pass's expert work are compared. Ascending.
    pub straggler_s: Vec<f64>,
    /// Timelines of the traced PEs: computation in track 0, reception inside the host in track 1 and from the network in track 2.
    pub spans: Vec<Span>,
    /// Bytes of all messages of rows and results between PEs.
    pub sent_bytes: f64,
    /// Bytes between hosts, included in `sent_bytes`.
    pub network_bytes: f64,
    /// Simulated events.
    pub events: u64,
}

impl StepTimes {
    /// Appends later steps of the same PEs.
    pub fn then(mut self, next: StepTimes) -> StepTimes {
        self.step_s.extend(next.step_s);
        for (pe, next) in self.pes.iter_mut().zip(next.pes) {
            pe.add(&next);
        }
        self.straggler_s.extend(next.straggler_s);
        self.straggler_s.sort_by(f64::total_cmp);
        self.sent_bytes += next.sent_bytes;
        self.network_bytes += next.network_bytes;
        self.events += next.events;
        self
    }

    /// How much of the communication is hidden: 1 - (sum of the PEs' waiting time) / (sum of their ports' busy time), at least 0.
    pub fn overlap_efficiency(&self) -> f64 {
        let waiting: f64 = self.pes.iter().map(|pe| pe.waiting_s.iter().sum::<f64>()).sum();
        let ports: f64 = self.pes.iter().map(|pe| pe.port_s).sum();
        if ports > 0.0 { (1.0 - waiting / ports).max(0.0) } else { 1.0 }
    }
}
