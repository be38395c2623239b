//! Relaying within a host: this PE forwards rows of another host to the other PEs of its own host, and sums their
//! partial results.

use std::ops::Range;

use super::combine::{return_offset, sum_batch_rows};
use super::dispatch::put_pieces;
use super::wire::WireRows;
use super::{Direction, Engine};
use crate::moe::cpu::kernels::{self, Element};
use crate::moe::cpu::relay::{NONE, RelayedSlots, Stream};
use crate::moe::spec::MoeError;
use crate::moe::spec::metrics::Phase;
use crate::shmem::{Cmp, Sym, Transport, Wait};

impl<T: Transport, E: Element> Engine<'_, T, E> {
    /// Whether this PE relays the rows of `pe` to other PEs of this host.
    pub(super) fn is_relay_for(&self, pe: usize) -> bool {
        self.relay_map.as_ref().is_some_and(|map| map.served[pe].is_some())
    }

    /// The PE that writes the rows of `pe` into this PE's memory.
    pub(super) fn writer_of(&self, pe: usize) -> usize {
        self.relay_of(pe).map_or(pe, |(relay, ..)| relay)
    }

    /// If another PE of this host relays the rows of `pe`: that relay, the index of `pe` among its sources, and this
    /// PE's index among its siblings.
    pub(super) fn relay_of(&self, pe: usize) -> Option<(usize, usize, usize)> {
        self.relay_map.as_ref()?.via[pe]
    }

    /// The credit word for window slots that held rows of `pe`, and the PE that waits for it.
    pub(super) fn credit_of(&self, pe: usize) -> (Sym<u64>, usize) {
        match self.relay_of(pe) {
            None => (self.memory.credit_signal(self.me(), pe), pe),
            Some((relay, served, sibling)) => (self.memory.stream_credit(served, sibling), relay),
        }
    }

    /// The header's extension for a relay: the number of rows for each PE of the relay's host. Empty if `pe` is no relay for this PE.
    pub(super) fn host_row_counts(&self, pe: usize) -> Vec<u32> {
        let Some(map) = &self.relay_map else { return Vec::new() };
        let targets: Vec<usize> = (0..map.relay.len()).filter(|target| map.relay[*target] == pe).collect();
        match targets.len() {
            0 | 1 => Vec::new(),
            _ => targets.iter().map(|target| self.block.announced[*target].rows as u32).collect(),
        }
    }

    /// Reads the header extension of `pe` and opens one stream per member of this host. The counts are untrusted and
    /// validated here.
    pub(super) fn open_streams(&mut self, pe: usize, rows: &[u32]) -> Result<(), MoeError> {
        let Some(map) = &self.relay_map else { return Ok(()) };
        let from = &mut self.block.inbound[pe];
        let rows = &rows[..map.members.len()];
        if rows.iter().any(|rows| *rows as usize > from.rows) {
            let what = format!("counts {rows:?} of rows to pass on, of {}", from.rows);
            return Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what });
        }
        from.relayed = Some(RelayedSlots { slot_start: vec![0], slots: Vec::new() });
        from.streams = rows.iter().map(|rows| Stream::new(*rows as usize)).collect();
        Ok(())
    }

    pub(super) fn begin_streams(&mut self) {
        let Some(map) = &self.relay_map else { return };
        for pe in (0..map.served.len()).filter(|pe| map.served[*pe].is_some()) {
            self.progress.forwarded[pe] = vec![0; map.members.len()];
            self.progress.partials[pe] = vec![0; map.members.len()];
        }
    }

    /// Stores the slots on all PEs of this host for a chunk of `pe`; row `i` has `counts[i]` slots. Then sets `counts` to the numbers of
    /// slots on this PE, and returns those slots as (local expert, weight) words.
    pub(super) fn read_relayed_slots(
        &mut self,
        pe: usize,
        range: &Range<usize>,
        counts: &mut [u32],
        words: &[u32],
    ) -> Result<Vec<u32>, MoeError> {
        let (Some(map), named) = (&self.relay_map, self.shmem.world_pe(pe)) else { return Ok(Vec::new()) };
        let protocol_error = |what: &str| Err(MoeError::Protocol { pe: named, what: format!("rows {range:?} {what}") });
        let own = map.own_experts();
        let end = map.first_experts.last().copied().unwrap_or(0);
        let before = range.start.checked_sub(1).map_or(0, |row| self.block.inbound[pe].first_expert(row));
        let from = &mut self.block.inbound[pe];
        let (Some(relayed), all) = (&mut from.relayed, from.slots) else { return Ok(Vec::new()) };
        let (mut own_slots, mut first, mut rest) = (Vec::new(), before, words);
        for count in counts {
            let (row, others) = rest.split_at(2 * *count as usize);
            rest = others;
            let experts = || row.iter().step_by(2).copied();
            if !experts().is_sorted_by(|a, b| a < b) || experts().any(|expert| expert >= end) {
                return protocol_error("with experts that this host has not, or out of order");
            }
            if row.first().is_none_or(|expert| *expert < first) {
                return protocol_error("out of the order of experts");
            }
            first = row[0];
            relayed.slots.extend(row.chunks_exact(2).map(|slot| (slot[0], f32::from_bits(slot[1]))));
            relayed.slot_start.push(relayed.slots.len() as u32);
            let begin = own_slots.len();
            for slot in row.chunks_exact(2).filter(|slot| own.contains(&slot[0])) {
                own_slots.extend([slot[0] - own.start, slot[1]]);
            }
            *count = (own_slots.len() - begin) as u32 / 2;
        }
        if relayed.slots.len() > all || range.end == from.rows && relayed.slots.len() != all {
            return protocol_error("with other numbers of experts than announced");
        }
        Ok(own_slots)
    }

    /// Call it when the first `arrived` rows of `pe` have arrived. Extends the streams by the rows whose position is final.
    pub(super) fn extend_streams(&mut self, pe: usize, arrived: usize) -> Result<(), MoeError> {
        let from = &mut self.block.inbound[pe];
        let (Some(map), Some(relayed)) = (&self.relay_map, &from.relayed) else { return Ok(()) };
        let until = match arrived == from.rows {
            true => u32::MAX,
            false => relayed.row(arrived - 1)[0].0,
        };
        let own = map.own_member();
        for (member, stream) in from.streams.iter_mut().enumerate().filter(|(member, _)| *member != own) {
            stream.extend(relayed, map.experts(member), arrived, until);
            let (rows, announced) = (stream.rows.len(), stream.announced);
            if rows > announced || until == u32::MAX && rows != announced {
                let what = format!("{rows} rows for PE {}, and counts of {announced}", map.members[member]);
                return Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what });
            }
        }
        Ok(())
    }

    /// Whether this PE has gathered all rows for itself, and has forwarded all rows for which it is the relay.
    pub(super) fn has_forwarded(&self) -> bool {
        let p = &self.progress;
        let gathered = |pe: usize| p.gathered[pe] == self.chunks(self.block.inbound[pe].rows);
        self.peers().all(gathered)
            && self.streams().iter().all(|&(pe, _, member, _)| {
                p.forwarded[pe][member] == self.chunks(self.block.inbound[pe].streams[member].announced)
            })
    }

    /// The streams that this PE forwards, as (source, index of the source, index of the receiver in the host, index of the receiver among
    /// the siblings).
    fn streams(&self) -> Vec<(usize, usize, usize, usize)> {
        let Some(map) = &self.relay_map else { return Vec::new() };
        let others: Vec<usize> = (0..map.members.len()).filter(|member| *member != map.own_member()).collect();
        let served = map.served.iter().enumerate().filter_map(|(pe, served)| Some((pe, (*served)?)));
        let opened = served.filter(|(pe, _)| self.block.inbound[*pe].relayed.is_some());
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
    fn next_to_forward(&self, pe: usize, member: usize) -> Option<Range<usize>> {
        let (from, chunk) = (&self.block.inbound[pe], self.progress.forwarded[pe][member]);
        let stream = &from.streams[member];
        let range = self.chunk_range(stream.announced, chunk);
        let arrived = (self.progress.gathered[pe] * self.chunk_rows()) as u32;
        let rows = stream.rows.get(range.clone()).filter(|rows| !rows.is_empty())?;
        rows.iter().all(|row| *row < arrived).then_some(range)
    }

    /// The wait for the window slot of a chunk of a stream; `None` if the slot is used for the first time in the pass.
    fn stream_credit_wait(&self, served: usize, sibling: usize, chunk: usize) -> Option<Wait> {
        let reused = (chunk + 1).checked_sub(self.memory.layout.window_chunks)? as u64;
        let used = self.stream_credits[served * self.memory.layout.siblings + sibling];
        let signal = self.memory.stream_credit(served, sibling);
        (reused > 0).then_some(Wait { signal, cmp: Cmp::Ge, value: used + reused })
    }

    /// Forwards the chunks whose rows have arrived and whose window slot is free. Returns true if there were any.
    pub(super) fn forward_rows(&mut self) -> bool {
        let mut any = false;
        for (pe, served, member, sibling) in self.streams() {
            while let Some(range) = self.next_to_forward(pe, member) {
                let chunk = self.progress.forwarded[pe][member];
                if let Some(wait) = self.stream_credit_wait(served, sibling, chunk)
                    && self.shmem.signal_fetch(wait.signal) < wait.value
                {
                    break;
                }
                self.rec.enter(Phase::Dispatch);
                self.forward_chunk(pe, member, chunk, range);
                self.progress.forwarded[pe][member] += 1;
                any = true;
            }
        }
        any
    }

    fn forward_chunk(&mut self, pe: usize, member: usize, chunk: usize, range: Range<usize>) {
        let from = &self.block.inbound[pe];
        let (Some(map), Some(relayed)) = (&self.relay_map, &from.relayed) else { return };
        let rows = &from.streams[member].rows[range];
        let experts = map.experts(member);
        let mut slots: Vec<u32> = Vec::new();
        if self.direction == Direction::Forward {
            let of = |row: &u32| relayed.slots_of(*row as usize, experts.clone());
            slots.extend(rows.iter().map(|row| of(row).len() as u32));
            slots.extend(rows.iter().flat_map(of).flat_map(|slot| [slot.0 - experts.start, slot.1.to_bits()]));
        }
        let (to, row_bytes) = (map.members[member], self.memory.layout.row_bytes);
        let relay_rows = &self.progress.relay_rows[pe];
        let data = rows.iter().map(|row| &relay_rows[*row as usize * row_bytes..(*row as usize + 1) * row_bytes]);
        let slot_bytes: &[u8] = bytemuck::cast_slice(&slots);
        let signal = (self.memory.chunk_signal(pe, to, chunk), self.stamp(chunk));
        let dst = self.memory.chunk(pe, to, chunk);
        let traffic = &mut self.rec.traffic;
        traffic.dispatch_rows += rows.len() as u64;
        traffic.dispatch_row_bytes += (rows.len() * row_bytes) as u64;
        traffic.dispatch_slot_bytes += slot_bytes.len() as u64;
        traffic.relay_bytes += (rows.len() * row_bytes) as u64;
        put_pieces(self.shmem, dst, data.chain(std::iter::once(slot_bytes)), signal, to, traffic);
    }

    /// Records the partial results that have arrived for relayed rows. Returns true if there were any.
    pub(super) fn receive_partials(&mut self) -> bool {
        let mut any = false;
        for (pe, served, member, sibling) in self.streams() {
            while let Some((chunk, range)) = self.next_partial(pe, member) {
                if self.shmem.signal_fetch(self.memory.stream_result(served, sibling, chunk)) < self.pass {
                    break;
                }
                for row in &self.block.inbound[pe].streams[member].returns[range] {
                    self.progress.pending[pe][*row as usize] -= 1;
                }
                self.progress.partials[pe][member] += 1;
                any = true;
            }
        }
        any
    }

    /// The next chunk of partial results of a stream, if its rows have been forwarded.
    fn next_partial(&self, pe: usize, member: usize) -> Option<(usize, Range<usize>)> {
        let (stream, chunk) = (&self.block.inbound[pe].streams[member], self.progress.partials[pe][member]);
        let range = self.chunk_range(stream.returns.len(), chunk);
        (chunk < self.progress.forwarded[pe][member] && !range.is_empty()).then_some((chunk, range))
    }

    /// For each of these rows of `pe`: the number of other PEs that compute a partial result.
    pub(super) fn partials_awaited(&self, pe: usize, rows: Range<usize>) -> Vec<u32> {
        let (Some(map), Some(relayed)) = (&self.relay_map, &self.block.inbound[pe].relayed) else {
            return vec![0; rows.len()];
        };
        let others = || (0..map.members.len()).filter(|member| *member != map.own_member());
        let has = |row: usize, member: usize| !relayed.slots_of(row, map.experts(member)).is_empty();
        rows.map(|row| others().filter(|member| has(row, *member)).count() as u32).collect()
    }

    /// Adds the partial results of a row of `pe` to `sum`, in the order of this host's PEs. In backward, also appends the gradients of the
    /// row's routing weights to `d_weights`.
    pub(super) fn sum_partials(&self, pe: usize, row: usize, sum: &mut [f32], d_weights: &mut Vec<f32>) {
        let (from, me) = (&self.block.inbound[pe], self.me());
        let Some((map, served)) = self.relay_map.as_ref().and_then(|map| Some((map, map.served[pe]?))) else {
            return;
        };
        let (backward, row_bytes) = (self.direction == Direction::Backward, self.memory.layout.row_bytes);
        for (member, stream) in from.streams.iter().enumerate() {
            if member == map.own_member() {
                let batch_rows = from.batch_rows(row);
                sum_batch_rows(&self.saved.batches, batch_rows, self.direction, sum);
                if backward {
                    d_weights
                        .extend(batch_rows.iter().map(|&(e, k)| self.saved.batches[e as usize].d_weight[k as usize]));
                }
                continue;
            }
            let Some(position) =
                stream.position.get(row).filter(|position| **position != NONE).map(|position| *position as usize)
            else {
                continue;
            };
            let partials = self.memory.partials(served, map.sibling(map.members[member]));
            let range = self.chunk_range(stream.returns.len(), position / self.chunk_rows());
            let before = |position: usize| stream.slots_before[position] as usize;
            let start = return_offset((0, 0), (range.start, before(range.start)), row_bytes, self.direction);
            let at = start + (position - range.start) * row_bytes;
            let mut packed = WireRows::<E>::zeros(self.options.wire, sum.len());
            let mut part = vec![0.0; sum.len()];
            self.shmem.get(packed.as_bytes_mut(), partials.slice(at..at + row_bytes), me);
            packed.widen(&mut part);
            kernels::axpy(sum, 1.0, &part);
            if backward {
                let at = start + range.len() * row_bytes + 4 * (before(position) - before(range.start));
                let mut of_row = vec![0.0f32; before(position + 1) - before(position)];
                let bytes = 4 * of_row.len();
                self.shmem.get(bytemuck::cast_slice_mut(&mut of_row), partials.slice(at..at + bytes), me);
                d_weights.extend(of_row);
            }
        }
    }

    /// Appends the waits of the streams: for window slots and for partial results.
    pub(super) fn add_stream_waits(&self, waits: &mut Vec<Wait>, names: &mut Vec<(usize, &'static str)>) {
        for (pe, served, member, sibling) in self.streams() {
            let Some(map) = &self.relay_map else { return };
            let to = map.members[member];
            if self.next_to_forward(pe, member).is_some()
                && let Some(wait) = self.stream_credit_wait(served, sibling, self.progress.forwarded[pe][member])
            {
                waits.push(wait);
                names.push((to, "room in its window"));
            }
            if let Some((chunk, _)) = self.next_partial(pe, member) {
                let signal = self.memory.stream_result(served, sibling, chunk);
                waits.push(Wait { signal, cmp: Cmp::Ge, value: self.pass });
                names.push((to, "its results"));
            }
        }
    }

    /// Adds the credits that the streams used in this pass to `stream_credits`.
    pub(super) fn record_stream_credits(&mut self) {
        let (window, siblings) = (self.memory.layout.window_chunks, self.memory.layout.siblings);
        for (pe, served, member, sibling) in self.streams() {
            let chunks = self.chunks(self.block.inbound[pe].streams[member].announced);
            self.stream_credits[served * siblings + sibling] += chunks.saturating_sub(window) as u64;
        }
    }
}
