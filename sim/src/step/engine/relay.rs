//! Relays: a row for several PEs of a host crosses the network once. A relay on that host forwards the row to the PEs, and returns one sum
//! of their results.

use super::Engine;
use super::event::{Kind, Message};

impl Engine<'_> {
    /// The rows of a crossing have arrived at relay `p`. It forwards each PE's part at once, even while `p` computes.
    pub(super) fn hand_on(&mut self, p: usize, crossing: u32, pass: u32) {
        for &(to, chunk) in &self.plan(p).crossings[crossing as usize].parts {
            match self.member(p, to) {
                to if to == p => self.rows_arrived(p, chunk, pass),
                to => self.message(Message { from: p, to, at: to, chunk, kind: Kind::Rows, pass }),
            }
        }
    }

    /// PE `p` has gathered its part of a crossing. After the last part the slot of the crossing is returned to the sender.
    pub(super) fn part_gathered(&mut self, p: usize, relay: u32, crossing: u32) {
        let relay = self.member(p, relay);
        let there_s = if relay == p { self.now_s } else { self.now_s + self.network.alpha_s(p, relay) };
        let plan = self.plan(relay);
        let (of, state) = (&plan.crossings[crossing as usize], &mut self.pes[relay].relaying[crossing as usize]);
        state.ungathered -= 1;
        state.free_s = state.free_s.max(there_s);
        if state.ungathered == 0 {
            let free_s = std::mem::take(&mut state.free_s);
            state.ungathered = of.parts.len() as u32;
            self.credit(relay, crossing, Kind::CrossingRows, plan.crossings_from(of.from as usize).end, free_s);
        }
    }

    /// The results of chunk `chunk` of PE `at` have arrived at its relay. When all PEs' results of a crossing have arrived, the relay sends
    /// their sum to the source.
    pub(super) fn collect(&mut self, at: usize, chunk: u32, pass: u32) {
        let Some((relay, crossing)) = self.plan(at).chunks[chunk as usize].relay else { return };
        let relay = self.member(at, relay);
        let of = &self.plan(relay).crossings[crossing as usize];
        let state = &mut self.pes[relay].relaying[crossing as usize];
        state.uncollected -= 1;
        if state.uncollected == 0 {
            state.uncollected = of.result_parts;
            let (kind, to) = (Kind::CrossingResults, self.member(relay, of.from));
            self.message(Message { from: relay, to, at: relay, chunk: crossing, kind, pass });
        }
    }
}
