//! The engine that simulates steps: its state, and look-ups in the plans.

mod bulk;
mod event;
mod reduce;
mod relay;
mod rows;
mod run;
mod types;
mod work;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use event::{Event, What};
use types::{Copies, HostWork, Relaying, Work};

use super::plan::{PePlan, Tiling};
use super::{PeTime, Step};
use crate::network::Network;
use aristos_formats::Span;
pub use run::simulate;

/// The state of a PE in a pass.
#[derive(Default)]
struct Pe {
    group: u32,
    index: u32,
    /// Passes started.
    pass: u32,
    start_s: f64,
    /// Whether all tiles are formed (the counts of all PEs have arrived).
    placed: bool,
    working: Option<(Work, f64)>,
    missing: Vec<u32>,
    undone: Vec<u32>,
    /// Tiles whose rows have all arrived, as (whether all rows are this PE's own, tile), so that tiles for which other PEs wait are
    /// computed first.
    ready: BinaryHeap<Reverse<(bool, u32)>>,
    /// Pending copies: puts, gathers and sums.
    copies: Copies,
    /// Background work: FLOP of products, and of epilogues.
    fillers: Vec<[f64; 2]>,
    /// FLOP of the idle time at the start and at the end of the pass, until each has passed.
    start: Option<f64>,
    tail: Option<f64>,
    /// FLOP of the router's gradients, which are computed last: they need the gradients of all routing weights.
    router_last: Option<f64>,
    tiles_left: Vec<u32>,
    all_tiles_left: u32,
    /// Messages of results that have not arrived, and chunks of its own rows that have not been added.
    results_left: u32,
    /// Chunks of its own rows that have not been gathered.
    own_left: u32,
    /// Chunks that arrived before they could be gathered, as (pass, chunk).
    early: Vec<(u32, u32)>,
    /// Open parts of the crossings for which this PE is the relay.
    relaying: Vec<Relaying>,
    headers: u32,
    headers_s: f64,
    /// Factor on the time of its work in this step ([`Jitter`](crate::step::Jitter)).
    slowness: f64,
    /// The PE's core, if PEs share cores, and the end of its last work there, s.
    core: usize,
    worked_until_s: f64,
    end_s: f64,
    /// End of its experts' work, in the bulk schedule.
    experts_until_s: f64,
    time: PeTime,
}

/// The phase of a group in the bulk schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Counts,
    Rows(u32),
    Experts,
    Results,
}

struct GroupState {
    phase: Phase,
    pending: u32,
    /// Time of a barrier of the group, s.
    barrier_s: f64,
    counts_s: f64,
}

struct Engine<'a> {
    step: &'a Step<'a>,
    network: Network<'a>,
    pes: Vec<Pe>,
    groups: Vec<GroupState>,
    /// The PEs at work on each host, if PEs share cores.
    hosts: Vec<HostWork>,
    queue: BinaryHeap<Reverse<Event>>,
    number: u64,
    events: u64,
    sent_bytes: f64,
    network_bytes: f64,
    now_s: f64,
    running: usize,
    spans: Vec<Span>,
}

impl<'a> Engine<'a> {
    fn plan(&self, pe: usize) -> &'a PePlan {
        let (group, index) = (self.pes[pe].group as usize, self.pes[pe].index as usize);
        &self.step.plans[self.step.groups[group].plan].pes[index]
    }

    fn member(&self, pe: usize, index: u32) -> usize {
        self.step.groups[self.pes[pe].group as usize].members[index as usize]
    }

    fn is_backward(&self, pe: usize) -> bool {
        self.step.backward && self.pes[pe].pass.is_multiple_of(2)
    }

    fn tiling(&self, pe: usize) -> &'a Tiling {
        self.plan(pe).tiling(self.is_backward(pe))
    }

    fn at(&mut self, time_s: f64, who: usize, pass: u32, what: What) {
        self.number += 1;
        self.queue.push(Reverse(Event { time_s, number: self.number, who: who as u32, pass, what }));
    }

    /// Time of `flop` FLOP on a PE.
    fn compute_s(&self, pe: usize, flop: f64) -> f64 {
        let per_s = self.step.cluster.devices[pe].flop_per_ms * 1e3 * self.step.speed.1;
        flop / per_s * self.pes[pe].slowness
    }
}
