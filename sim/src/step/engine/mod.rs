//! The events of a step.

mod blocking;
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

use event::{Event, Message, What};
use types::{Copies, HostWork, Relaying, Work};

use super::plan::{PePlan, Tiling};
use super::{PeTime, Step};
use crate::network::Network;
use aristos_formats::Span;
pub use run::simulate;

/// A PE in a pass.
#[derive(Default)]
struct Pe {
    group: u32,
    index: u32,
    /// Passes so far, this one included.
    pass: u32,
    start_s: f64,
    /// Whether tiles are cut.
    placed: bool,
    working: Option<(Work, f64)>,
    missing: Vec<u32>,
    undone: Vec<u32>,
    /// Tiles whose rows are there: whether they are all this PE's own, which nobody else waits for, and the tile.
    ready: BinaryHeap<Reverse<(bool, u32)>>,
    /// What is to be put, gathered and summed.
    copies: Copies,
    /// FLOP of work that nobody waits for.
    fillers: Vec<f64>,
    /// FLOP of the router's gradients, which need those of all choices' weights.
    router_last: Option<f64>,
    tiles_left: Vec<u32>,
    all_tiles_left: u32,
    /// Chunks that this PE has not had results of, its own included.
    results_left: u32,
    /// Chunks that came before they could be gathered.
    early: Vec<(u32, u32)>,
    /// What it hands on.
    relaying: Vec<Relaying>,
    /// Where puts block: messages that are to be sent to it, and others that have come, which wait until it is in a call.
    announced: Vec<Message>,
    untaken: Vec<Message>,
    /// It takes some, and begins nothing until it has them all.
    taking: bool,
    headers: u32,
    headers_s: f64,
    /// How many times as long as usual its work takes in this step.
    slowness: f64,
    /// Its core, where PEs share them, and until when it has worked there, s.
    core: usize,
    worked_until_s: f64,
    end_s: f64,
    /// When it had done its experts' work, in the bulk schedule.
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
    /// Waiting for all PEs of the group at once.
    barrier_s: f64,
    counts_s: f64,
}

struct Engine<'a> {
    step: &'a Step<'a>,
    network: Network<'a>,
    pes: Vec<Pe>,
    groups: Vec<GroupState>,
    /// Who is at work on each host, where PEs share cores.
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

    /// Time of so many FLOP on a PE.
    fn compute_s(&self, pe: usize, flop: f64) -> f64 {
        let per_s = self.step.cluster.devices[pe].flop_per_ms * 1e3 * self.step.speed.1;
        flop / per_s * self.pes[pe].slowness
    }
}
