//! The work of a PE, and its slowdown by the other PEs of its host.

use std::cmp::Reverse;

use super::event::What;
use super::types::{Copying, OnCore, Work};
use super::{Engine, Phase};
use crate::step::plan::Tile;
use crate::step::{Cores, Schedule};
use aristos_formats::Span;

impl Engine<'_> {
    /// Starts a piece of work on an idle PE.
    pub(super) fn begin_work(&mut self, p: usize, work: Work, flop: f64) {
        let time_s = self.compute_s(p, flop);
        self.pes[p].working = Some((work, self.now_s));
        let Some(cores) = self.step.cores else {
            let pass = self.pes[p].pass;
            return self.at(self.now_s + time_s, p, pass, What::Computed { turn: 0 });
        };
        let host = self.network.host(p);
        self.advance(host, &cores);
        let (pe, state) = (&mut self.pes[p], &mut self.hosts[host]);
        // Model of the operating system's scheduler: a PE that was idle returns to its last core if no PE works there, otherwise to an idle
        // core if there is one. A working PE moves only away from a core with three or more.
        if pe.worked_until_s < self.now_s {
            let on = state.on_cores(&cores);
            if on[pe.core] > 0 {
                pe.core = on.iter().position(|&on| on == 0).unwrap_or(pe.core);
            }
        }
        state.working.push(OnCore { pe: p, core: pe.core, left_s: time_s });
        state.balance(&cores);
        self.expect_next(host, &cores);
    }

    /// Subtracts the work done since the last change of the host's working PEs.
    fn advance(&mut self, host: usize, cores: &Cores) {
        let host = &mut self.hosts[host];
        let passed_s = self.now_s - host.at_s;
        let slowdowns = host.slowdowns(cores);
        for (own, slowdown) in host.working.iter_mut().zip(slowdowns) {
            own.left_s = (own.left_s - passed_s / slowdown).max(0.0);
        }
        host.at_s = self.now_s;
    }

    /// A message of `rows` rows has arrived. The PE's receiving thread copies it on an idle core; without one, the time is added to the
    /// work on the PE's core.
    pub(super) fn take_in(&mut self, p: usize, rows: u32) {
        let cost = &self.step.cost.copy_flop[usize::from(self.is_backward(p))];
        let flop = cost.take_message + f64::from(rows) * cost.take_row;
        let Some(cores) = self.step.cores.filter(|_| flop > 0.0) else { return };
        let (host, time_s) = (self.network.host(p), self.compute_s(p, flop));
        self.advance(host, &cores);
        let state = &mut self.hosts[host];
        if state.on_cores(&cores).iter().all(|&on| on > 0)
            && let Some(own) = state.working.iter_mut().find(|own| own.core == self.pes[p].core)
        {
            own.left_s += time_s;
        }
        self.expect_next(host, &cores);
    }

    /// Schedules the completion of the host's work that ends first, assuming no further changes.
    fn expect_next(&mut self, host: usize, cores: &Cores) {
        let host = &mut self.hosts[host];
        host.turn += 1;
        let (turn, slowdowns) = (host.turn, host.slowdowns(cores));
        let ends = host.working.iter().zip(slowdowns).map(|(own, slowdown)| (own.pe, own.left_s * slowdown));
        if let Some((p, in_s)) = ends.min_by(|a, b| a.1.total_cmp(&b.1)) {
            let pass = self.pes[p].pass;
            self.at(self.now_s + in_s, p, pass, What::Computed { turn });
        }
    }

    /// Starts the next piece of work of an idle PE, or ends the pass.
    pub(super) fn compute(&mut self, p: usize) {
        if self.pes[p].working.is_some() {
            return;
        }
        let (cost, backward) = (self.step.cost, usize::from(self.is_backward(p)));
        let tiling = self.tiling(p);
        let phase = self.groups[self.pes[p].group as usize].phase;
        let copies_only = self.step.schedule == Schedule::Bulk && phase != Phase::Experts;
        let pe = &mut self.pes[p];
        let next = if let Some(flop) = pe.start.take() {
            Some((Work::Start, flop))
        } else if let Some((copy, flop)) = pe.copies.urgent() {
            Some((Work::Copy(copy), flop))
        } else if copies_only {
            pe.copies.last().map(|(copy, flop)| (Work::Copy(copy), flop))
        } else if let Some(Reverse((_, tile))) = pe.ready.pop() {
            let Tile { expert, rows, .. } = tiling.tiles[tile as usize];
            let is_first = pe.tiles_left[expert as usize] == tiling.tiles_of_expert[expert as usize];
            let weights = if is_first { cost.weights_flop[backward] } else { 0.0 };
            let products = weights + cost.tile_flop[backward].of(f64::from(rows));
            let epilogue = cost.epilogue_flop[backward].of(f64::from(rows));
            Some((Work::Tile(tile, share(epilogue, products)), products + epilogue))
        } else if let Some((copy, flop)) = pe.copies.last() {
            Some((Work::Copy(copy), flop))
        } else if let Some([products, epilogue]) = pe.fillers.pop() {
            Some((Work::Filler(share(epilogue, products)), products + epilogue))
        } else if pe.all_tiles_left == 0 && pe.results_left == 0 {
            let router = pe.router_last.take().map(|flop| (Work::Router, flop));
            router.or_else(|| pe.tail.take().map(|flop| (Work::Tail, flop)))
        } else {
            None
        };
        match next {
            Some((work, flop)) => self.begin_work(p, work, flop),
            None => self.end_if_done(p),
        }
    }

    /// A PE has finished a piece of work. Does nothing if the host has changed since this completion was scheduled.
    pub(super) fn computed(&mut self, p: usize, turn: u64) {
        if let Some(cores) = self.step.cores {
            let host = self.network.host(p);
            if self.hosts[host].turn != turn {
                return;
            }
            self.advance(host, &cores);
            let working = &mut self.hosts[host].working;
            if let Some(at) = working.iter().position(|own| own.pe == p) {
                self.pes[p].core = working.remove(at).core;
            }
            self.pes[p].worked_until_s = self.now_s;
            self.expect_next(host, &cores);
        }
        match self.worked(p) {
            Some(Work::Route) => return self.routed(p),
            Some(Work::Tile(tile, _)) => self.tile_done(p, tile),
            Some(Work::Copy(copy)) => self.copied(p, copy),
            Some(Work::Router | Work::Filler(_) | Work::Start | Work::Tail) | None => {}
        }
        self.compute(p);
    }

    /// Accounts for a PE's finished work, and returns it.
    pub(super) fn worked(&mut self, p: usize) -> Option<Work> {
        let backward = usize::from(self.is_backward(p));
        let tiling = self.tiling(p);
        let (work, start_s) = self.pes[p].working.take()?;
        let dur_s = self.now_s - start_s;
        let time = &mut self.pes[p].time;
        let (sum, name) = match work {
            Work::Route | Work::Router => (&mut time.router_s, "router"),
            Work::Start => (&mut time.start_s, "start"),
            Work::Tail => (&mut time.tail_s, "tail"),
            Work::Copy(copy) => match copy {
                Copying::Send { .. } | Copying::Gather { .. } => (&mut time.dispatch_s, "dispatch"),
                _ => (&mut time.combine_s, "combine"),
            },
            Work::Tile(..) => (&mut time.expert_s, "expert"),
            Work::Filler(_) => (&mut time.expert_s, "filler"),
        };
        let epilogue_s = match work {
            Work::Tile(_, share) | Work::Filler(share) => share * dur_s,
            _ => 0.0,
        };
        sum[backward] += dur_s - epilogue_s;
        time.epilogue_s[backward] += epilogue_s;
        if p < self.step.traced {
            let name = match work {
                Work::Tile(tile, _) => format!("expert {}", tiling.tiles[tile as usize].expert),
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
            let rows = f64::from(plan.expert_rows[expert]);
            pe.fillers.push(self.step.cost.gradient_flop.map(|cost| cost.of(rows)));
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

/// The share of an epilogue in a tile's work.
fn share(epilogue: f64, products: f64) -> f64 {
    if epilogue > 0.0 { epilogue / (epilogue + products) } else { 0.0 }
}
