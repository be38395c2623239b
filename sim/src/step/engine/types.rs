//! The state of a PE's work, copies and relayed crossings.

use std::collections::VecDeque;

use super::event::Kind;
use crate::step::Cores;
use crate::step::plan::Crossing;

/// A piece of a PE's work.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// Routes its tokens.
    Route,
    /// Computes the router's gradients.
    Router,
    /// Idle time before the first tile of a pass.
    Start,
    /// Idle time after the last result of a pass.
    Tail,
    /// A tile, and the share of its epilogue.
    Tile(u32, f64),
    Copy(Copying),
    /// Background work: the shared expert, and gradients of expert weights; and the share of its epilogue.
    Filler(f64),
}

/// The PEs at work on a host with shared cores.
#[derive(Default)]
pub(super) struct HostWork {
    pub(super) working: Vec<OnCore>,
    /// Time of the last change, s.
    pub(super) at_s: f64,
    /// Number of changes. A completion that was scheduled before the last change is ignored.
    pub(super) turn: u64,
}

/// A PE at work.
pub(super) struct OnCore {
    pub(super) pe: usize,
    pub(super) core: usize,
    /// Remaining time of its work if it ran alone, s.
    pub(super) left_s: f64,
}

impl HostWork {
    /// Number of PEs at work on each core.
    pub(super) fn on_cores(&self, cores: &Cores) -> Vec<usize> {
        let mut on = vec![0; cores.count];
        self.working.iter().for_each(|own| on[own.core] += 1);
        on
    }

    /// Moves one PE from the core with the most PEs at work to the one with the fewest, if they have three or more and at least two fewer.
    pub(super) fn balance(&mut self, cores: &Cores) {
        let on = self.on_cores(cores);
        let most = (0..cores.count).max_by_key(|&core| on[core]).unwrap_or(0);
        let least = (0..cores.count).min_by_key(|&core| on[core]).unwrap_or(0);
        if on[most] >= 3
            && on[most] >= on[least] + 2
            && let Some(last) = self.working.iter_mut().rev().find(|own| own.core == most)
        {
            last.core = least;
        }
    }

    /// For each element of `working`, the factor on the time of its work.
    pub(super) fn slowdowns(&self, cores: &Cores) -> Vec<f64> {
        let on = self.on_cores(cores);
        let busy = on.iter().filter(|&&on| on > 0).count();
        self.working.iter().map(|own| cores.slowdown(busy) * on[own.core] as f64).collect()
    }
}

/// A copy of a chunk.
#[derive(Clone, Copy)]
pub(super) enum Copying {
    /// Puts rows to PE `to`: its chunk `chunk`, or crossing `chunk`, which it forwards.
    Send { to: u32, chunk: u32, kind: Kind },
    /// Gathers received or own rows into their tiles.
    Gather { chunk: u32 },
    /// Sums the results of a chunk, and puts them to the source of its rows.
    Return { chunk: u32 },
    /// Adds the results of chunk `chunk` of PE `at`, or the sum that relay `at` has returned for crossing `chunk`.
    Add { at: u32, chunk: u32, kind: Kind },
    /// Sums and adds results of its own rows.
    AddOwn { chunk: u32 },
}

/// Pending copies, by priority: send, gather, return, add.
#[derive(Default)]
pub(super) struct Copies([VecDeque<(Copying, f64)>; 4]);

impl Copies {
    pub(super) fn push(&mut self, copy: Copying, flop: f64) {
        let rank = match copy {
            Copying::Send { .. } => 0,
            Copying::Gather { .. } => 1,
            Copying::Return { .. } => 2,
            Copying::Add { .. } | Copying::AddOwn { .. } => 3,
        };
        self.0[rank].push_back((copy, flop));
    }

    /// Removes and returns the next copy for which other PEs or tiles wait: a send, gather or return.
    pub(super) fn urgent(&mut self) -> Option<(Copying, f64)> {
        self.0[..3].iter_mut().find_map(VecDeque::pop_front)
    }

    /// Removes and returns the next addition.
    pub(super) fn last(&mut self) -> Option<(Copying, f64)> {
        self.0[3].pop_front()
    }
}

/// The open parts of a crossing in a pass.
pub(super) struct Relaying {
    /// Number of PEs that have not gathered their part of its rows, and the time at which the latest credit from the other PEs arrives, s.
    pub(super) ungathered: u32,
    pub(super) free_s: f64,
    /// Number of PEs whose part of its results has not arrived.
    pub(super) uncollected: u32,
}

impl Relaying {
    pub(super) fn new(crossing: &Crossing) -> Relaying {
        Relaying { ungathered: crossing.parts.len() as u32, free_s: 0.0, uncollected: crossing.result_parts }
    }
}
