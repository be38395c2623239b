//! What a PE works on, and how long it takes beside the others of its host.

use std::cmp::Reverse;

use super::rows::Copying;
use super::{Engine, Phase, Schedule, What};
use crate::timeline::Span;

/// A piece of a PE's work.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// Routes its tokens.
    Route,
    /// The router's gradients.
    Router,
    Tile(u32),
    Copy(Copying),
    /// Work that nobody waits for: the shared expert, gradients of weights.
    Filler,
}

/// The PEs at work on a host whose cores they share.
#[derive(Default)]
pub(super) struct HostWork {
    /// Each, and how long its work would still take alone, s.
    working: Vec<(usize, f64)>,
    /// As of when, s.
    at_s: f64,
    /// Changes of who works: what was expected before one is void.
    turn: u64,
}

impl Engine<'_> {
    /// Begins a piece of work of so many FLOP on a PE that has none.
    pub(super) fn begin_work(&mut self, p: usize, work: Work, flop: f64) {
        let time_s = self.compute_s(p, flop);
        self.pes[p].working = Some((work, self.now_s));
        let (pass, end_s) = (self.pes[p].pass, self.now_s + time_s);
        if self.hosts.is_empty() {
            return self.at(end_s, p, pass, What::Computed { turn: 0 });
        }
        let host = self.network.host(p);
        self.advance(host);
        self.hosts[host].working.push((p, time_s));
        self.expect_next(host);
    }

    /// Takes what was done since the last change off what is left.
    fn advance(&mut self, host: usize) {
        let slowdown = self.slowdown(host);
        let host = &mut self.hosts[host];
        let done_s = (self.now_s - host.at_s) / slowdown;
        host.working.iter_mut().for_each(|(_, left_s)| *left_s = (*left_s - done_s).max(0.0));
        host.at_s = self.now_s;
    }

    fn slowdown(&self, host: usize) -> f64 {
        let working = self.hosts[host].working.len().max(1);
        self.step.cores.map_or(1.0, |cores| cores.slowdown(working))
    }

    /// Says when the first of a host's PEs at work will be done, if nothing changes before.
    fn expect_next(&mut self, host: usize) {
        let slowdown = self.slowdown(host);
        let state = &mut self.hosts[host];
        state.turn += 1;
        let (turn, first) = (state.turn, state.working.iter().min_by(|a, b| a.1.total_cmp(&b.1)).copied());
        if let Some((p, left_s)) = first {
            let pass = self.pes[p].pass;
            self.at(self.now_s + left_s * slowdown, p, pass, What::Computed { turn });
        }
    }

    /// Begins the next piece of work, where the PE has none; or ends the pass.
    pub(super) fn compute(&mut self, p: usize) {
        if self.pes[p].working.is_some() {
            return;
        }
        let (cost, backward) = (self.step.cost, usize::from(self.is_backward(p)));
        let tiling = self.tiling(p);
        let phase = self.groups[self.pes[p].group as usize].phase;
        let copies_only = self.step.schedule == Schedule::Bulk && phase != Phase::Experts;
        let pe = &mut self.pes[p];
        let next = if let Some((copy, flop)) = pe.copies.urgent() {
            Some((Work::Copy(copy), flop))
        } else if copies_only {
            pe.copies.last().map(|(copy, flop)| (Work::Copy(copy), flop))
        } else if let Some(Reverse((_, tile))) = pe.ready.pop() {
            let rows = f64::from(tiling.tiles[tile as usize].rows);
            Some((Work::Tile(tile), cost.tile_flop[backward].of(rows)))
        } else if let Some((copy, flop)) = pe.copies.last() {
            Some((Work::Copy(copy), flop))
        } else if let Some(flop) = pe.fillers.pop() {
            Some((Work::Filler, flop))
        } else if pe.all_tiles_left == 0 && pe.results_left == 0 {
            pe.router_last.take().map(|flop| (Work::Router, flop))
        } else {
            None
        };
        match next {
            Some((work, flop)) => self.begin_work(p, work, flop),
            None => self.end_if_done(p),
        }
    }

    /// A PE's piece of work is done, unless its host has changed since that was expected.
    pub(super) fn computed(&mut self, p: usize, turn: u64) {
        if !self.hosts.is_empty() {
            let host = self.network.host(p);
            if self.hosts[host].turn != turn {
                return;
            }
            self.advance(host);
            self.hosts[host].working.retain(|(pe, _)| *pe != p);
            self.expect_next(host);
        }
        match self.worked(p) {
            Some(Work::Route) => return self.routed(p),
            Some(Work::Tile(tile)) => self.tile_done(p, tile),
            Some(Work::Copy(copy)) => self.copied(p, copy),
            Some(Work::Router | Work::Filler) | None => {}
        }
        self.compute(p);
    }

    /// Accounts for the work that a PE has done; gives it.
    fn worked(&mut self, p: usize) -> Option<Work> {
        let backward = usize::from(self.is_backward(p));
        let tiling = self.tiling(p);
        let (work, start_s) = self.pes[p].working.take()?;
        let dur_s = self.now_s - start_s;
        let time = &mut self.pes[p].time;
        let (sum, name) = match work {
            Work::Route | Work::Router => (&mut time.router_s, "router"),
            Work::Copy(Copying::Send { .. } | Copying::Gather { .. }) => (&mut time.dispatch_s, "dispatch"),
            Work::Copy(Copying::Return { .. } | Copying::Add { .. } | Copying::AddOwn { .. }) => {
                (&mut time.combine_s, "combine")
            }
            Work::Tile(_) => (&mut time.expert_s, "expert"),
            Work::Filler => (&mut time.expert_s, "filler"),
        };
        sum[backward] += dur_s;
        if p < self.step.traced {
            let name = match work {
                Work::Tile(tile) => format!("expert {}", tiling.tiles[tile as usize].expert),
                _ => name.to_string(),
            };
            self.spans.push(Span { pe: p as u32, track: 0, name, start_s, dur_s });
        }
        Some(work)
    }

    fn tile_done(&mut self, p: usize, tile: u32) {
        let (tiling, plan) = (self.tiling(p), self.plan(p));
        let expert = tiling.tiles[tile as usize].expert as usize;
        let backward = self.is_backward(p);
        let pe = &mut self.pes[p];
        pe.all_tiles_left -= 1;
        pe.tiles_left[expert] -= 1;
        if pe.tiles_left[expert] == 0 && backward {
            pe.fillers.push(self.step.cost.gradient_flop.of(f64::from(plan.expert_rows[expert])));
        }
        for piece in tiling.results_of(tile) {
            let undone = &mut self.pes[p].undone[piece.chunk as usize];
            *undone -= piece.slots;
            if *undone == 0 {
                self.chunk_done(p, piece.chunk);
            }
        }
    }
}
