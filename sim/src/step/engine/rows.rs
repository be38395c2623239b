//! Transfers of rows and results: a PE's puts, gathers and sums, and the return of slots (credits).

use std::cmp::Reverse;

use super::event::{Kind, Message, What};
use super::types::Copying;
use super::{Engine, Phase};
use crate::step::Schedule;
use crate::step::plan::Chunk;
use aristos_formats::Span;

impl Engine<'_> {
    /// Queues a copy for a PE. A copy without cost completes at once. The caller then calls [`Engine::compute`].
    pub(super) fn copy(&mut self, p: usize, copy: Copying) {
        let cost = &self.step.cost.copy_flop[usize::from(self.is_backward(p))];
        let of = |at: usize, chunk: u32| self.plan(at).chunks[chunk as usize];
        let flop = match copy {
            Copying::Send { to, chunk, kind } => {
                cost.message[0] + f64::from(self.size(to as usize, chunk, kind).0) * cost.put_row[0]
            }
            Copying::Gather { chunk } => f64::from(of(p, chunk).slots) * cost.gather_slot,
            Copying::Return { chunk } => {
                let chunk = of(p, chunk);
                cost.message[1]
                    + f64::from(chunk.result_rows) * cost.put_row[1]
                    + f64::from(chunk.result_slots) * cost.sum_slot
            }
            Copying::Add { at, chunk, kind } => f64::from(self.size(at as usize, chunk, kind).0) * cost.add_row,
            Copying::AddOwn { chunk } => {
                let chunk = of(p, chunk);
                f64::from(chunk.rows) * cost.add_row + f64::from(chunk.result_slots) * cost.sum_slot
            }
        };
        match flop > 0.0 {
            true => self.pes[p].copies.push(copy, flop),
            false => self.copied(p, copy),
        }
    }

    /// Applies the effects of a finished copy.
    pub(super) fn copied(&mut self, p: usize, copy: Copying) {
        let (pass, bulk) = (self.pes[p].pass, self.step.schedule == Schedule::Bulk);
        match copy {
            Copying::Send { to, chunk, kind } => {
                let to = to as usize;
                self.message(Message { from: p, to, at: to, chunk, kind, pass });
            }
            Copying::Return { chunk } => {
                let kind = Kind::Results;
                match self.ends(p, chunk, kind).1 {
                    to if to == p => self.collect(p, chunk, pass),
                    to => self.message(Message { from: p, to, at: p, chunk, kind, pass }),
                }
            }
            Copying::Gather { chunk } => {
                self.gathered(p, chunk);
                let is_own = self.plan(p).chunks[chunk as usize].from == self.pes[p].index;
                self.pes[p].own_left -= u32::from(is_own);
                // The phase of rows waits for own rows too, if they are gathered after it has begun.
                let group = self.pes[p].group as usize;
                if bulk && (!is_own || self.groups[group].phase != Phase::Counts) {
                    self.one_less(group);
                }
            }
            Copying::Add { .. } => {
                self.pes[p].results_left -= 1;
                if bulk {
                    self.one_less(self.pes[p].group as usize);
                }
            }
            Copying::AddOwn { .. } => self.pes[p].results_left -= 1,
        }
    }

    /// Queues the puts of one window of chunks to each other PE, beginning with the next PE. Returns the number of chunks that PEs receive
    /// by these puts.
    pub(super) fn send_chunks(&mut self, p: usize, round: u32) -> u32 {
        let n = self.step.groups[self.pes[p].group as usize].members.len() as u32;
        let me = self.pes[p].index;
        let window = self.step.window_chunks as u32;
        let mut sent = 0;
        for k in 1..n {
            let to = self.member(p, (me + k) % n);
            let plan = self.plan(to);
            let (direct, crossings) = (plan.direct_from(me as usize), plan.crossings_from(me as usize));
            for (all, kind) in [(direct, Kind::Rows), (crossings, Kind::CrossingRows)] {
                let first = all.start.saturating_add(round * window).min(all.end);
                for chunk in first..all.end.min(first + window) {
                    self.copy(p, Copying::Send { to: to as u32, chunk, kind });
                    sent += if kind == Kind::Rows { 1 } else { plan.crossings[chunk as usize].parts.len() as u32 };
                }
            }
        }
        sent
    }

    /// Sends a message. The head arrives after the link's latency, once the port is free.
    pub(super) fn message(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        let bytes = self.bytes(at, chunk, kind, pass);
        self.sent_bytes += bytes;
        if !self.network.is_local(from, to) {
            self.network_bytes += bytes;
        }
        let leaves_s = self.network.send(from, to, self.on_wire(from, to, bytes, pass), self.now_s);
        let head_s = leaves_s + self.network.alpha_s(from, to);
        self.at(head_s, from, pass, What::Head { at: at as u32, chunk, kind });
    }

    /// The sender and the receiver of a message.
    pub(super) fn ends(&self, at: usize, chunk: u32, kind: Kind) -> (usize, usize) {
        let plan = self.plan(at);
        let other = match kind {
            Kind::Rows | Kind::Results => {
                let chunk = &plan.chunks[chunk as usize];
                chunk.relay.map_or(chunk.from, |(relay, _)| relay)
            }
            Kind::CrossingRows | Kind::CrossingResults => plan.crossings[chunk as usize].from,
        };
        let other = self.member(at, other);
        if kind.is_out() { (other, at) } else { (at, other) }
    }

    /// Number of rows and of slots in a message.
    pub(super) fn size(&self, at: usize, chunk: u32, kind: Kind) -> (u32, u32) {
        let (plan, chunk) = (self.plan(at), chunk as usize);
        match kind {
            Kind::Rows => (plan.chunks[chunk].rows, plan.chunks[chunk].slots),
            Kind::Results => (plan.chunks[chunk].result_rows, plan.chunks[chunk].result_slots),
            Kind::CrossingRows => (plan.crossings[chunk].rows, plan.crossings[chunk].slots),
            Kind::CrossingResults => (plan.crossings[chunk].rows, plan.crossings[chunk].result_slots),
        }
    }

    fn bytes(&self, at: usize, chunk: u32, kind: Kind, pass: u32) -> f64 {
        let cost = self.step.cost;
        let (rows, slots) = self.size(at, chunk, kind);
        let (rows, slots) = (f64::from(rows), f64::from(slots));
        let backward = self.step.backward && pass.is_multiple_of(2);
        let beside = match (kind.is_out(), backward) {
            (true, false) => rows * cost.out_bytes.0 + slots * cost.out_bytes.1,
            (false, true) => slots * cost.back_bytes,
            _ => 0.0,
        };
        rows * cost.row_bytes + beside
    }

    /// The bytes for which a message occupies ports: 0 inside a host if PEs copy rows themselves, as the copy is counted as their work.
    fn on_wire(&self, from: usize, to: usize, bytes: f64, pass: u32) -> f64 {
        let backward = self.step.backward && pass.is_multiple_of(2);
        let copies = self.step.cost.copy_flop[usize::from(backward)].put_row != [0.0; 2];
        if copies && self.network.is_local(from, to) { 0.0 } else { bytes }
    }

    pub(super) fn head(&mut self, at: usize, chunk: u32, kind: Kind, pass: u32) {
        let (from, to) = self.ends(at, chunk, kind);
        let bytes = self.on_wire(from, to, self.bytes(at, chunk, kind, pass), pass);
        let end_s = self.network.receive(from, to, bytes, self.now_s);
        if to < self.step.traced {
            let dur_s = self.network.wire_s(from, to, bytes);
            let what = if kind.is_out() { "rows" } else { "results" };
            let track = if self.network.is_local(from, to) { 1 } else { 2 };
            let name = format!("{what} from PE {from}");
            self.spans.push(Span { pe: to as u32, track, name, start_s: end_s - dur_s, dur_s });
        }
        self.at(end_s, to, pass, What::Arrived { at: at as u32, chunk, kind });
    }

    /// Handles a received message.
    pub(super) fn arrived(&mut self, to: usize, at: u32, chunk: u32, kind: Kind, pass: u32) {
        match kind {
            Kind::Rows => self.rows_arrived(to, chunk, pass),
            Kind::CrossingRows => self.hand_on(to, chunk, pass),
            Kind::Results if self.plan(at as usize).chunks[chunk as usize].relay.is_some() => {
                self.collect(at as usize, chunk, pass);
            }
            Kind::Results | Kind::CrossingResults => self.result_arrived(to, at, chunk, kind),
        }
    }

    pub(super) fn rows_arrived(&mut self, p: usize, chunk: u32, pass: u32) {
        let takes = self.step.schedule == Schedule::Bulk || self.pes[p].pass == pass && self.pes[p].placed;
        match takes {
            true => {
                self.copy(p, Copying::Gather { chunk });
                self.compute(p);
            }
            false => self.pes[p].early.push((pass, chunk)),
        }
    }

    pub(super) fn gather_own(&mut self, p: usize) {
        let chunks = self.plan(p).from(self.pes[p].index as usize);
        self.pes[p].own_left = chunks.len() as u32;
        for chunk in chunks {
            self.copy(p, Copying::Gather { chunk });
        }
    }

    /// The rows of a chunk have been copied to their tiles. The chunk's slot is returned to the sender.
    fn gathered(&mut self, p: usize, chunk: u32) {
        let (tiling, plan) = (self.tiling(p), self.plan(p));
        let pe = &mut self.pes[p];
        for piece in tiling.of_chunk(chunk) {
            let tile = &tiling.tiles[piece.tile as usize];
            pe.missing[piece.tile as usize] -= piece.slots;
            if pe.missing[piece.tile as usize] == 0 && (pe.placed || tile.early) {
                pe.ready.push(Reverse((tile.own, piece.tile)));
            }
        }
        let Chunk { from, relay, .. } = plan.chunks[chunk as usize];
        if self.step.schedule == Schedule::Pipelined && from != pe.index {
            match relay {
                None => self.credit(p, chunk, Kind::Rows, plan.from(from as usize).end, self.now_s),
                Some((relay, number)) => self.part_gathered(p, relay, number),
            }
        }
    }

    /// Returns the slot of a chunk or crossing to its sender, which may then send the chunk or crossing that uses this slot next. `end` is
    /// the end of this sender's chunks or crossings at `p`.
    pub(super) fn credit(&mut self, p: usize, chunk: u32, kind: Kind, end: u32, now_s: f64) {
        let next = chunk.saturating_add(self.step.window_chunks as u32);
        if next < end {
            let (source, pass) = (self.ends(p, chunk, kind).0, self.pes[p].pass);
            self.at(
                now_s + self.network.alpha_s(p, source),
                source,
                pass,
                What::Leave { to: p as u32, chunk: next, kind },
            );
        }
    }

    /// All results of a chunk have been computed.
    pub(super) fn chunk_done(&mut self, p: usize, chunk: u32) {
        if self.plan(p).chunks[chunk as usize].from == self.pes[p].index {
            self.copy(p, Copying::AddOwn { chunk });
        } else if self.step.schedule == Schedule::Pipelined {
            self.copy(p, Copying::Return { chunk });
        }
    }

    fn result_arrived(&mut self, p: usize, at: u32, chunk: u32, kind: Kind) {
        self.copy(p, Copying::Add { at, chunk, kind });
        if self.step.schedule == Schedule::Pipelined || self.step.cost.copy_flop[0].add_row > 0.0 {
            self.compute(p);
        }
    }
}
