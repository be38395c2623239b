//! One step of an MoE layer in virtual time, event by event: the layer's protocol (`docs/protocol.md`) over an alpha-beta network.
//!
//! A PE computes one tile at a time, while rows travel. Its own work, the order of what it sends, the chunks, the windows and their credits and the
//! tiles are the layer's; a [`GroupPlan`] is made of the layer's own routes. Between expert-parallel groups gradients are summed when the backward
//! of all of an expert's owners is done.

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
    /// Rows, tiles and results flow as they come.
    #[default]
    Pipelined,
    /// All PEs of a group finish each phase (counts, rows, experts, results) before any begins the next.
    Bulk,
}

/// What a layer's parts cost. Work is in FLOP: what the device does at its nominal rate in the time that the work takes.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCost {
    /// Bytes of a row on its way.
    pub row_bytes: f64,
    /// Bytes that go with a row, and with each of its slots, out in a forward.
    pub out_bytes: (f64, f64),
    /// Bytes that go back with each slot in a backward.
    pub back_bytes: f64,
    /// Bytes of a header.
    pub header_bytes: f64,
    /// An expert's tiles, by pass, of so many slots.
    pub tile_flop: [Affine; 2],
    /// The gradients of an expert's weights, of so many slots.
    pub gradient_flop: Affine,
    /// The router, by pass, of so many tokens, with what else a pass begins and ends with.
    pub router_flop: [Affine; 2],
    /// The shared expert, by pass, of so many tokens.
    pub shared_flop: [Affine; 2],
    /// What a PE does itself to have rows sent and summed, by pass.
    pub copy_flop: [CopyFlop; 2],
    /// Bytes of one expert's gradients, and of those of what every PE has.
    pub gradient_bytes: (f64, f64),
}

/// A cost that grows with a number of rows, slots or tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Affine {
    /// Of any number above 0.
    pub base: f64,
    /// Of each.
    pub each: f64,
}

impl Affine {
    /// A cost of nothing but each.
    pub fn each(each: f64) -> Affine {
        Affine { base: 0.0, each }
    }

    /// The cost of `n`.
    pub fn of(&self, n: f64) -> f64 {
        if n > 0.0 { self.base + n * self.each } else { 0.0 }
    }
}

/// What a PE's own processor does with rows, FLOP; 0 where rows travel by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CopyFlop {
    /// Puts one chunk under its signal: of rows, of results.
    pub message: [f64; 2],
    /// Puts one row: out, back.
    pub put_row: [f64; 2],
    /// Gathers one slot of a row that came, or is the PE's own.
    pub gather_slot: f64,
    /// Sums one slot's result.
    pub sum_slot: f64,
    /// Adds one row of results to the token's.
    pub add_row: f64,
    /// Takes in one message that comes from a PE, of rows or of results, and one of its rows: a thread beside the PE's own, which takes the PE's time where
    /// the host has no idle core ([`Cores`]).
    pub take_message: f64,
    /// See `take_message`.
    pub take_row: f64,
}

/// Processors that the PEs of a host share, where a PE is a thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// How many a host has.
    pub count: usize,
    /// How many times as long the same work takes with all of them busy as with one.
    pub busy_factor: f64,
}

impl Cores {
    /// How many times as long work takes with so many of the cores busy.
    pub fn slowdown(&self, busy: usize) -> f64 {
        let share = if self.count > 1 { busy.saturating_sub(1) as f64 / (self.count - 1) as f64 } else { 0.0 };
        1.0 + (self.busy_factor - 1.0) * share
    }
}

/// An expert-parallel group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its PEs, as indices of the cluster's devices, in the order of their numbers in the group.
    pub members: Vec<usize>,
    /// By member, the experts that it has, ascending.
    pub experts: Vec<Vec<usize>>,
    /// Which of the plans it has.
    pub plan: usize,
}

/// Slower and faster PEs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Jitter {
    /// Of the random numbers.
    pub seed: u64,
    /// Standard deviation of the logarithm of a PE's time for the same work, drawn for each step.
    pub sigma: f64,
}

/// What is simulated.
pub struct Step<'a> {
    /// The PEs and their links.
    pub cluster: &'a Cluster,
    /// All PEs, each in one group.
    pub groups: &'a [Group],
    /// What groups do.
    pub plans: &'a [GroupPlan],
    /// What that costs.
    pub cost: &'a LayerCost,
    /// How rows are exchanged.
    pub schedule: Schedule,
    /// Whether a step has a backward pass.
    pub backward: bool,
    /// Chunks of a window.
    pub window_chunks: usize,
    /// Steps.
    pub steps: usize,
    /// Slower and faster PEs, where there are any.
    pub jitter: Option<Jitter>,
    /// The cores that PEs share, where they do.
    pub cores: Option<Cores>,
    /// Whether a put takes its PE's time until its target has taken it, which that does while it is in a put of its own or waits: one-sided operations over
    /// messages, with nobody beside the PE to make progress.
    pub puts_block: bool,
    /// Who has a port to the network.
    pub nics: Nics,
    /// How many times as fast as the cluster says: ports to the network, and FLOP.
    pub speed: (f64, f64),
    /// PEs of which a timeline is kept, the first so many.
    pub traced: usize,
}

/// A PE's time in all steps, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PeTime {
    /// The router, by pass.
    pub router_s: [f64; 2],
    /// Experts, the shared one included, by pass.
    pub expert_s: [f64; 2],
    /// Putting and gathering rows, by pass.
    pub dispatch_s: [f64; 2],
    /// Putting and summing results, by pass.
    pub combine_s: [f64; 2],
    /// Waiting for rows, results or other PEs, by pass.
    pub waiting_s: [f64; 2],
    /// Forward and backward, from the step's beginning to the PE's end.
    pub pass_s: [f64; 2],
    /// Sums of gradients, waiting for them included.
    pub all_reduce_s: f64,
    /// How long its busiest port sent or received.
    pub port_s: f64,
}

impl PeTime {
    fn add(&mut self, other: &PeTime) {
        let pairs = [(&mut self.router_s, other.router_s), (&mut self.expert_s, other.expert_s)];
        let more = [(&mut self.waiting_s, other.waiting_s), (&mut self.pass_s, other.pass_s)];
        let copies = [(&mut self.dispatch_s, other.dispatch_s), (&mut self.combine_s, other.combine_s)];
        for (sum, other) in pairs.into_iter().chain(more).chain(copies) {
            sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
        }
        self.all_reduce_s += other.all_reduce_s;
        self.port_s += other.port_s;
    }
}

/// What steps come to.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepTimes {
    /// Each step, from its beginning to the end of the last PE, s.
    pub step_s: Vec<f64>,
    /// By PE.
    pub pes: Vec<PeTime>,
    /// Of every PE and step: how much later than the first PE of its group it ended its passes, or in the bulk schedule the last pass's experts; s,
    /// ascending.
    pub straggler_s: Vec<f64>,
    /// What the traced PEs did: computing in track 0, receiving inside the host in 1 and from the network in 2.
    pub spans: Vec<Span>,
    /// Bytes of all rows and results that PEs sent each other, with their slots.
    pub sent_bytes: f64,
    /// Those of them between hosts.
    pub network_bytes: f64,
    /// Events that were simulated.
    pub events: u64,
}

impl StepTimes {
    /// These steps and further ones of the same PEs.
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

    /// The share of the ports' busy time that no PE waited for: 1 - waiting / port time, at least 0.
    pub fn overlap_efficiency(&self) -> f64 {
        let waiting: f64 = self.pes.iter().map(|pe| pe.waiting_s.iter().sum::<f64>()).sum();
        let ports: f64 = self.pes.iter().map(|pe| pe.port_s).sum();
        if ports > 0.0 { (1.0 - waiting / ports).max(0.0) } else { 1.0 }
    }
}
