//! Relaying within a host: this PE forwards rows of another host to the other PEs of its own host, and sums their
//! partial results.

use std::ops::Range;

use super::combine::{return_offset, sum_places};
use super::dispatch::put_pieces;
use super::wire::WireRows;
use super::{Direction, Engine};
use crate::moe::cpu::kernels::{self, Element};
use crate::moe::cpu::relay::{NONE, Passed, Stream};
use crate::moe::spec::MoeError;
use crate::moe::spec::metrics::Phase;
use crate::shmem::{Cmp, Sym, Transport, Wait};

impl<T: Transport, E: Element> Engine<'_, T, E> {
    /// Whether this PE relays the rows of `pe` to other PEs of this host.
    pub(super) fn passes_on(&self, pe: usize) -> bool {
        self.relay.as_ref().is_some_and(|relay| relay.served[pe].is_some())
    }

    /// The PE that writes the rows of `pe` into this PE's memory.
    pub(super) fn written_by(&self, pe: usize) -> usize {
        self.home_of(pe).map_or(pe, |(home, ..)| home)
    }

    /// If another PE of this host relays the rows of `pe`: that relay, the index of `pe` among its sources, and this
    /// PE's index among its siblings.
    pub(super) fn home_of(&self, pe: usize) -> Option<(usize, usize, usize)> {
        self.relay.as_ref()?.via[pe]
    }

    /// The credit word for window slots that held rows of `pe`, and the PE that waits for it.
    pub(super) fn credit_of(&self, pe: usize) -> (Sym<u64>, usize) {
        match self.home_of(pe) {
            None => (self.memory.credit_signal(self.me(), pe), pe),
            Some((home, served, sibling)) => (self.memory.stream_credit(served, sibling), home),
        }
    }

    /// Header extension for a relay: the number of rows for each PE of its host.
    pub(super) fn announced_on_host_of(&self, pe: usize) -> Vec<u32> {
        let Some(relay) = &self.relay else { return Vec::new() };
        let targets: Vec<usize> = (0..relay.home.len()).filter(|target| relay.home[*target] == pe).collect();
        match targets.len() {
            0 | 1 => Vec::new(),
            _ => targets.iter().map(|target| self.saved.announced[*target].rows as u32).collect(),
        }
    }

    /// Reads the header extension of `pe` and opens one stream per member of this host. The counts are untrusted and
    /// validated here.
    pub(super) fn open_streams(&mut self, pe: usize, rows: &[u32]) -> Result<(), MoeError> {
        let Some(relay) = &self.relay else { return Ok(()) };
        let from = &mut self.saved.inbound[pe];
        let rows = &rows[..relay.members.len()];
        if rows.iter().any(|rows| *rows as usize > from.rows) {
            let what = format!("counts {rows:?} of rows to pass on, of {}", from.rows);
            return Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what });
        }
        from.passed = Some(Passed { slot_start: vec![0], slots: Vec::new() });
        from.streams = rows.iter().map(|rows| Stream::new(*rows as usize)).collect();
        Ok(())
    }

    pub(super) fn begin_streams(&mut self) {
        let Some(relay) = &self.relay else { return };
        for pe in (0..relay.served.len()).filter(|pe| relay.served[*pe].is_some()) {
            self.progress.passed_on[pe] = vec![0; relay.members.len()];
            self.progress.parts[pe] = vec![0; relay.members.len()];
        }
    }

    /// Stores the slots of a chunk of `pe` for all PEs of this host; row `i` has `counts[i]` of them. Reduces `counts`
    /// to this PE's own slots and returns these as (local expert, weight) words.
    pub(super) fn read_passed(
        &mut self,
        pe: usize,
        range: &Range<usize>,
        counts: &mut [u32],
        words: &[u32],
    ) -> Result<Vec<u32>, MoeError> {
        let (Some(relay), named) = (&self.relay, self.shmem.world_pe(pe)) else { return Ok(Vec::new()) };
        let bad = |what: &str| Err(MoeError::Protocol { pe: named, what: format!("rows {range:?} {what}") });
        let own = relay.own_experts();
        let end = relay.firsts.last().copied().unwrap_or(0);
        let before = range.start.checked_sub(1).map_or(0, |row| self.saved.inbound[pe].first_expert(row));
        let from = &mut self.saved.inbound[pe];
        let (Some(passed), all) = (&mut from.passed, from.slots) else { return Ok(Vec::new()) };
        let (mut mine, mut first, mut rest) = (Vec::new(), before, words);
        for count in counts {
            let (row, others) = rest.split_at(2 * *count as usize);
            rest = others;
            let experts = || row.iter().step_by(2).copied();
            if !experts().is_sorted_by(|a, b| a < b) || experts().any(|expert| expert >= end) {
                return bad("with experts that this host has not, or out of order");
            }
            if row.first().is_none_or(|expert| *expert < first) {
                return bad("out of the order of experts");
            }
            first = row[0];
            passed.slots.extend(row.chunks_exact(2).map(|slot| (slot[0], f32::from_bits(slot[1]))));
            passed.slot_start.push(passed.slots.len() as u32);
            let begin = mine.len();
            for slot in row.chunks_exact(2).filter(|slot| own.contains(&slot[0])) {
                mine.extend([slot[0] - own.start, slot[1]]);
            }
            *count = (mine.len() - begin) as u32 / 2;
        }
        if passed.slots.len() > all || range.end == from.rows && passed.slots.len() != all {
            return bad("with other numbers of experts than announced");
        }
        Ok(mine)
    }

    /// Called once the first `arrived` rows of `pe` have arrived: extends the streams by the rows whose position is
    /// final.
    pub(super) fn extend_streams(&mut self, pe: usize, come: usize) -> Result<(), MoeError> {
        let from = &mut self.saved.inbound[pe];
        let (Some(relay), Some(passed)) = (&self.relay, &from.passed) else { return Ok(()) };
        let until = match come == from.rows {
            true => u32::MAX,
            false => passed.row(come - 1)[0].0,
        };
        let own = relay.own_member();
        for (member, stream) in from.streams.iter_mut().enumerate().filter(|(member, _)| *member != own) {
            stream.extend(passed, relay.experts(member), come, until);
            let (rows, announced) = (stream.rows.len(), stream.announced);
            if rows > announced || until == u32::MAX && rows != announced {
                let what = format!("{rows} rows for PE {}, and counts of {announced}", relay.members[member]);
                return Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what });
            }
        }
        Ok(())
    }

    /// Whether all rows for this PE are gathered, and all rows that it relays are forwarded.
    pub(super) fn has_passed_on(&self) -> bool {
        let p = &self.progress;
        let gathered = |pe: usize| p.gathered[pe] == self.chunks(self.saved.inbound[pe].rows);
        self.peers().all(gathered)
            && self.streams().iter().all(|&(pe, _, member, _)| {
                p.passed_on[pe][member] == self.chunks(self.saved.inbound[pe].streams[member].announced)
            })
    }

    /// The streams that this PE relays, as (source, index of the source, member of the host, index of the member among
    /// the siblings).
    fn streams(&self) -> Vec<(usize, usize, usize, usize)> {
        let Some(relay) = &self.relay else { return Vec::new() };
        let others: Vec<usize> = (0..relay.members.len()).filter(|member| *member != relay.own_member()).collect();
        let served = relay.served.iter().enumerate().filter_map(|(pe, served)| Some((pe, (*served)?)));
        let opened = served.filter(|(pe, _)| self.saved.inbound[*pe].passed.is_some());
        opened
            .flat_map(|(pe, served)| {
                others
                    .iter()
                    .enumerate()
                    .map(move |(sibling, member)| (pe, served, *member, sibling))
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    /// Rows of the next chunk of a stream, if they have all arrived.
    fn next_to_pass(&self, pe: usize, member: usize) -> Option<Range<usize>> {
        let (from, chunk) = (&self.saved.inbound[pe], self.progress.passed_on[pe][member]);
        let stream = &from.streams[member];
        let range = self.chunk_range(stream.announced, chunk);
        let come = (self.progress.gathered[pe] * self.chunk_rows()) as u32;
        let rows = stream.rows.get(range.clone()).filter(|rows| !rows.is_empty())?;
        rows.iter().all(|row| *row < come).then_some(range)
    }

    /// The wait for the window slot of a chunk of a stream; `None` if the slot is used for the first time in the pass.
    fn stream_credit_wait(&self, served: usize, sibling: usize, chunk: usize) -> Option<Wait> {
        let reused = (chunk + 1).checked_sub(self.memory.layout.window_chunks)? as u64;
        let used = self.stream_credits[served * self.memory.layout.siblings + sibling];
        let signal = self.memory.stream_credit(served, sibling);
        (reused > 0).then_some(Wait { signal, cmp: Cmp::Ge, value: used + reused })
    }

    /// Forwards the chunks whose rows have arrived and whose window slot is free. Returns true if there were any.
    pub(super) fn pass_on(&mut self) -> bool {
        let mut any = false;
        for (pe, served, member, sibling) in self.streams() {
            while let Some(range) = self.next_to_pass(pe, member) {
                let chunk = self.progress.passed_on[pe][member];
                if let Some(wait) = self.stream_credit_wait(served, sibling, chunk)
                    && self.shmem.signal_fetch(wait.signal) < wait.value
                {
                    break;
                }
                self.rec.enter(Phase::Dispatch);
                self.pass_on_chunk(pe, member, chunk, range);
                self.progress.passed_on[pe][member] += 1;
                any = true;
            }
        }
        any
    }

    fn pass_on_chunk(&mut self, pe: usize, member: usize, chunk: usize, range: Range<usize>) {
        let from = &self.saved.inbound[pe];
        let (Some(relay), Some(passed)) = (&self.relay, &from.passed) else { return };
        let rows = &from.streams[member].rows[range];
        let experts = relay.experts(member);
        let mut slots: Vec<u32> = Vec::new();
        if self.direction == Direction::Forward {
            let of = |row: &u32| passed.slots_of(*row as usize, experts.clone());
            slots.extend(rows.iter().map(|row| of(row).len() as u32));
            slots.extend(rows.iter().flat_map(of).flat_map(|slot| [slot.0 - experts.start, slot.1.to_bits()]));
        }
        let (to, row_bytes) = (relay.members[member], self.memory.layout.row_bytes);
        let passing = &self.progress.passing[pe];
        let data = rows.iter().map(|row| &passing[*row as usize * row_bytes..(*row as usize + 1) * row_bytes]);
        let slot_bytes: &[u8] = bytemuck::cast_slice(&slots);
        let signal = (self.memory.chunk_signal(pe, to, chunk), self.stamp(chunk));
        let place = self.memory.chunk(pe, to, chunk);
        let traffic = &mut self.rec.traffic;
        traffic.dispatch_rows += rows.len() as u64;
        traffic.dispatch_row_bytes += (rows.len() * row_bytes) as u64;
        traffic.dispatch_slot_bytes += slot_bytes.len() as u64;
        traffic.relay_bytes += (rows.len() * row_bytes) as u64;
        put_pieces(self.shmem, place, data.chain(std::iter::once(slot_bytes)), signal, to, traffic);
    }

    /// Records the partial results that have arrived for relayed rows. Returns true if there were any.
    pub(super) fn take_parts(&mut self) -> bool {
        let mut any = false;
        for (pe, served, member, sibling) in self.streams() {
            while let Some((chunk, range)) = self.next_part(pe, member) {
                if self.shmem.signal_fetch(self.memory.stream_result(served, sibling, chunk)) < self.pass {
                    break;
                }
                for row in &self.saved.inbound[pe].streams[member].returns[range] {
                    self.progress.undone[pe][*row as usize] -= 1;
                }
                self.progress.parts[pe][member] += 1;
                any = true;
            }
        }
        any
    }

    /// The next chunk of partial results of a stream, if its rows have been forwarded.
    fn next_part(&self, pe: usize, member: usize) -> Option<(usize, Range<usize>)> {
        let (stream, chunk) = (&self.saved.inbound[pe].streams[member], self.progress.parts[pe][member]);
        let range = self.chunk_range(stream.returns.len(), chunk);
        (chunk < self.progress.passed_on[pe][member] && !range.is_empty()).then_some((chunk, range))
    }

    /// For each of these rows of `pe`: the number of other PEs that compute a partial result.
    pub(super) fn parts_awaited(&self, pe: usize, rows: Range<usize>) -> Vec<u32> {
        let (Some(relay), Some(passed)) = (&self.relay, &self.saved.inbound[pe].passed) else {
            return vec![0; rows.len()];
        };
        let others = || (0..relay.members.len()).filter(|member| *member != relay.own_member());
        let has = |row: usize, member: usize| !passed.slots_of(row, relay.experts(member)).is_empty();
        rows.map(|row| others().filter(|member| has(row, *member)).count() as u32).collect()
    }

    /// Adds the partial results of a row of `pe` to `sum`, in the order of this host's PEs, and appends its gradients
    /// of routing weights to `d_weights`.
    pub(super) fn sum_parts(&self, pe: usize, row: usize, sum: &mut [f32], d_weights: &mut Vec<f32>) {
        let (from, me) = (&self.saved.inbound[pe], self.me());
        let Some((relay, served)) = self.relay.as_ref().and_then(|relay| Some((relay, relay.served[pe]?))) else {
            return;
        };
        let (backward, row_bytes) = (self.direction == Direction::Backward, self.memory.layout.row_bytes);
        for (member, stream) in from.streams.iter().enumerate() {
            if member == relay.own_member() {
                let places = from.places(row);
                sum_places(&self.saved.batches, places, self.direction, sum);
                if backward {
                    d_weights.extend(places.iter().map(|&(e, k)| self.saved.batches[e as usize].d_weight[k as usize]));
                }
                continue;
            }
            let Some(place) = stream.place.get(row).filter(|place| **place != NONE).map(|place| *place as usize) else {
                continue;
            };
            let parts = self.memory.parts(served, relay.sibling(relay.members[member]));
            let range = self.chunk_range(stream.returns.len(), place / self.chunk_rows());
            let before = |place: usize| stream.slots_before[place] as usize;
            let start = return_offset((0, 0), (range.start, before(range.start)), row_bytes, self.direction);
            let at = start + (place - range.start) * row_bytes;
            let mut packed = WireRows::<E>::zeros(self.options.wire, sum.len());
            let mut part = vec![0.0; sum.len()];
            self.shmem.get(packed.as_bytes_mut(), parts.slice(at..at + row_bytes), me);
            packed.widen(&mut part);
            kernels::axpy(sum, 1.0, &part);
            if backward {
                let at = start + range.len() * row_bytes + 4 * (before(place) - before(range.start));
                let mut of_row = vec![0.0f32; before(place + 1) - before(place)];
                let bytes = 4 * of_row.len();
                self.shmem.get(bytemuck::cast_slice_mut(&mut of_row), parts.slice(at..at + bytes), me);
                d_weights.extend(of_row);
            }
        }
    }

    /// Adds the waits of the streams.
    pub(super) fn stream_waits(&self, waits: &mut Vec<Wait>, names: &mut Vec<(usize, &'static str)>) {
        for (pe, served, member, sibling) in self.streams() {
            let Some(relay) = &self.relay else { return };
            let to = relay.members[member];
            if self.next_to_pass(pe, member).is_some()
                && let Some(wait) = self.stream_credit_wait(served, sibling, self.progress.passed_on[pe][member])
            {
                waits.push(wait);
                names.push((to, "room in its window"));
            }
            if let Some((chunk, _)) = self.next_part(pe, member) {
                let signal = self.memory.stream_result(served, sibling, chunk);
                waits.push(Wait { signal, cmp: Cmp::Ge, value: self.pass });
                names.push((to, "its results"));
            }
        }
    }

    /// Counts the credits that the streams used in this pass.
    pub(super) fn count_stream_credits(&mut self) {
        let (window, siblings) = (self.memory.layout.window_chunks, self.memory.layout.siblings);
        for (pe, served, member, sibling) in self.streams() {
            let chunks = self.chunks(self.saved.inbound[pe].streams[member].announced);
            self.stream_credits[served * siblings + sibling] += chunks.saturating_sub(window) as u64;
        }
    }
}
