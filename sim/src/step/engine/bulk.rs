//! The bulk schedule: all PEs of a group finish a phase before any starts the next.

use std::cmp::Reverse;

use super::event::What;
use super::types::Copying;
use super::{Engine, Phase};

impl Engine<'_> {
    pub(super) fn begin_bulk(&mut self, group: usize) {
        let state = &mut self.groups[group];
        (state.phase, state.pending) = (Phase::Counts, self.step.groups[group].members.len() as u32);
        state.counts_s = self.now_s;
    }

    /// Counts one completion in the current phase of the group. After the last one, and a barrier, the phase ends. Bulk schedule only.
    pub(super) fn one_less(&mut self, group: usize) {
        let state = &mut self.groups[group];
        state.pending -= 1;
        if state.pending == 0 {
            let there_s = if state.phase == Phase::Counts { state.counts_s.max(self.now_s) } else { self.now_s };
            let time_s = there_s + state.barrier_s;
            self.at(time_s, group, 0, What::Phase);
        }
    }

    pub(super) fn next_phase(&mut self, group: usize) {
        let members = self.step.groups[group].members.clone();
        let plan = &self.step.plans[self.step.groups[group].plan];
        let rounds = plan.most_chunks.div_ceil(self.step.window_chunks as u32);
        let next = match self.groups[group].phase {
            Phase::Counts if rounds > 0 => Phase::Rows(0),
            Phase::Rows(round) if round + 1 < rounds => Phase::Rows(round + 1),
            Phase::Counts | Phase::Rows(_) => Phase::Experts,
            Phase::Experts => Phase::Results,
            Phase::Results => return self.end_bulk(group, &members),
        };
        self.groups[group].phase = next;
        self.groups[group].pending = match next {
            Phase::Rows(round) => {
                let own: u32 = members.iter().map(|&pe| self.pes[pe].own_left).sum();
                own + members.iter().map(|&pe| self.send_chunks(pe, round)).sum::<u32>()
            }
            Phase::Experts => members.len() as u32,
            _ => self.return_all(&members),
        };
        if next != Phase::Experts {
            members.iter().for_each(|&pe| self.compute(pe));
        }
        if self.groups[group].pending == 0 {
            // The phase has no work, so it ends after the barrier.
            self.groups[group].pending = 1;
            return self.one_less(group);
        }
        if next == Phase::Experts {
            for pe in members {
                self.begin_experts(pe);
            }
        }
    }

    fn begin_experts(&mut self, p: usize) {
        let tiles = self.tiling(p).tiles.len() as u32;
        let pe = &mut self.pes[p];
        pe.placed = true;
        pe.ready.clear();
        pe.ready.extend((0..tiles).map(|tile| Reverse((false, tile))));
        self.compute(p);
    }

    fn return_all(&mut self, members: &[usize]) -> u32 {
        let mut sent = 0;
        for &p in members {
            let (n, me) = (members.len() as u32, self.pes[p].index);
            for k in 1..n {
                let from = ((me + k) % n) as usize;
                for chunk in self.plan(p).from(from) {
                    if self.plan(p).chunks[chunk as usize].result_rows > 0 {
                        self.copy(p, Copying::Return { chunk });
                    }
                }
                sent += self.plan(p).direct_from(from).len() + self.plan(p).crossings_from(from).len();
            }
        }
        sent as u32
    }

    /// Ends the pass: all results have arrived. The router's gradients and the tail follow; their times differ between PEs.
    fn end_bulk(&mut self, group: usize, members: &[usize]) {
        let start_s = self.now_s;
        self.begin_bulk(group);
        for &p in members {
            let router = self.pes[p].router_last.take().unwrap_or(0.0);
            let tail = self.pes[p].tail.take().unwrap_or(0.0);
            let (router_s, tail_s) = (self.compute_s(p, router), self.compute_s(p, tail));
            let backward = usize::from(self.is_backward(p));
            self.pes[p].time.router_s[backward] += router_s;
            self.pes[p].time.tail_s[backward] += tail_s;
            self.now_s = start_s + router_s + tail_s;
            self.end_pass(p);
            self.now_s = start_s;
        }
    }
}
