//! Returns the sums of each row's results to the token's PE, and adds returned sums to the output.

use super::dispatch::put_pieces;
use super::wire::WireRows;
use super::{Direction, Engine};
use crate::moe::cpu::experts::Batch;
use crate::moe::cpu::kernels::{self, Element};
use crate::moe::spec::metrics::{Phase, Recorder};
use crate::shmem::Transport;

impl<T: Transport, E: Element> Engine<'_, T, E> {
    /// Returns the results of all chunks whose slots have been computed.
    pub(super) fn return_chunks(&mut self) {
        for pe in self.peers() {
            while self.is_computed(pe, self.progress.returned[pe]) {
                self.rec.enter(Phase::Combine);
                self.return_chunk(pe, self.progress.returned[pe]);
                self.progress.returned[pe] += 1;
            }
        }
    }

    /// Whether chunk `chunk` of results for `pe` exists and all of its rows have been computed.
    fn is_computed(&mut self, pe: usize, chunk: usize) -> bool {
        let from = &self.block.inbound[pe];
        let (range, p) = (self.chunk_range(from.rows, chunk), &mut self.progress);
        let pending = &p.pending[pe];
        let computed = from.returns[p.computed[pe]..].iter().take_while(|&&row| pending.get(row as usize) == Some(&0));
        p.computed[pe] += computed.count();
        !range.is_empty() && p.computed[pe] >= range.end
    }

    fn return_chunk(&mut self, pe: usize, chunk: usize) {
        let (me, h, row_bytes) = (self.me(), self.config.hidden, self.memory.layout.row_bytes);
        let from = &self.block.inbound[pe];
        let range = self.chunk_range(from.rows, chunk);
        let mut rows = WireRows::<E>::zeros(self.options.wire, range.len() * h);
        let mut d_weights = Vec::new();
        enter_scale(self.rec, self.direction);
        let mut slots = 0;
        for (k, &j) in from.returns[range.clone()].iter().enumerate() {
            let batch_rows = from.batch_rows(j as usize);
            slots += from.relayed.as_ref().map_or(batch_rows.len(), |relayed| relayed.row(j as usize).len());
            self.progress.row.fill(0.0);
            if from.relayed.is_some() {
                let mut row = std::mem::take(&mut self.progress.row);
                self.sum_partials(pe, j as usize, &mut row, &mut d_weights);
                rows.set(k * h, &row);
                self.progress.row = row;
                continue;
            }
            sum_batch_rows(&self.saved.batches, batch_rows, self.direction, &mut self.progress.row);
            rows.set(k * h, &self.progress.row);
            if self.direction == Direction::Backward {
                d_weights.extend(batch_rows.iter().map(|&(e, k)| self.saved.batches[e as usize].d_weight[k as usize]));
            }
        }
        self.rec.enter(Phase::Combine);
        let from = &self.block.inbound[pe];
        // A relay has a separate buffer for each PE's partial results, so their offsets start at 0.
        let base = if self.relay_of(pe).is_some() { (0, 0) } else { (from.return_row, from.return_slot) };
        let start = return_offset(base, (range.start, self.progress.returned_slots[pe]), row_bytes, self.direction);
        self.progress.returned_slots[pe] += slots;
        let pieces = [rows.as_bytes(), bytemuck::cast_slice::<f32, u8>(&d_weights)];
        let dst = start..start + pieces[0].len() + pieces[1].len();
        let (dst, signal, to) = match self.relay_of(pe) {
            None => (self.memory.returns().slice(dst), self.memory.result_signal(me, pe, chunk), pe),
            Some((relay, served, sibling)) => {
                let partials = self.memory.partials(served, sibling);
                (partials.slice(dst), self.memory.stream_result(served, sibling, chunk), relay)
            }
        };
        let relayed = self.relay_of(pe).is_some();
        let traffic = &mut self.rec.traffic;
        if relayed {
            traffic.relay_bytes += (pieces[0].len() + pieces[1].len()) as u64;
        }
        traffic.combine_rows += range.len() as u64;
        traffic.combine_row_bytes += pieces[0].len() as u64;
        traffic.combine_slot_bytes += pieces[1].len() as u64;
        put_pieces(self.shmem, dst, pieces.into_iter(), (signal, self.pass), to, traffic);
    }

    /// Adds the returned results in the order of PEs, regardless of their order of arrival, so that sums are reproducible. Returns true if
    /// it added any.
    pub(super) fn combine_arrived(&mut self) -> bool {
        let (me, n) = (self.me(), self.shmem.n_pes());
        let mut new = false;
        loop {
            let (pe, chunk) = self.progress.combine;
            if pe == n {
                return new;
            }
            if chunk == self.chunks(self.block.routes[pe].tokens.len()) {
                self.progress.combine = (pe + 1, 0);
                self.progress.combined_slots = 0;
                continue;
            }
            let arrived = if pe == me {
                self.is_computed(me, chunk)
            } else {
                self.shmem.signal_fetch(self.memory.result_signal(pe, me, chunk)) >= self.pass
            };
            if !arrived {
                return new;
            }
            self.rec.enter(Phase::Combine);
            if pe == me {
                self.combine_own(chunk);
                self.rec.enter(Phase::Combine);
            } else {
                self.combine_chunk(pe, chunk)
            }
            self.progress.combine = (pe, chunk + 1);
            new = true;
        }
    }

    fn combine_own(&mut self, chunk: usize) {
        enter_scale(self.rec, self.direction);
        let (me, h) = (self.me(), self.config.hidden);
        let (routes, from) = (&self.block.routes[me], &self.block.inbound[me]);
        for &j in &routes.returns[self.chunk_range(routes.tokens.len(), chunk)] {
            let j = j as usize;
            let token = routes.tokens[j] as usize;
            let batch_rows = from.batch_rows(j);
            // Like a returned row, an own row is summed before it is added to the output, so that both are rounded in the same way.
            let row = &mut self.progress.row;
            row.fill(0.0);
            sum_batch_rows(&self.saved.batches, batch_rows, self.direction, row);
            kernels::axpy(&mut self.output[token * h..(token + 1) * h], 1.0, row);
            if self.direction == Direction::Backward {
                for (slot, &(e, k)) in routes.row(j).iter().zip(batch_rows) {
                    self.d_weights[slot.choice as usize] = self.saved.batches[e as usize].d_weight[k as usize];
                }
            }
        }
    }

    fn combine_chunk(&mut self, pe: usize, chunk: usize) {
        let (me, h, row_bytes) = (self.me(), self.config.hidden, self.memory.layout.row_bytes);
        let before = (0..pe).filter(|&p| p != me);
        let (first_row, first_slot) = before.fold((0, 0), |(rows, slots), p| {
            (rows + self.block.routes[p].tokens.len(), slots + self.block.routes[p].slots.len())
        });
        let routes = &self.block.routes[pe];
        let range = self.chunk_range(routes.tokens.len(), chunk);
        let rows = &routes.returns[range.clone()];
        let first = (range.start, self.progress.combined_slots);
        let start = return_offset((first_row, first_slot), first, row_bytes, self.direction);
        let returns = self.memory.returns();
        let mut row = WireRows::<E>::zeros(self.options.wire, h);
        for (k, &j) in rows.iter().enumerate() {
            let at = start + k * row_bytes;
            self.shmem.get(row.as_bytes_mut(), returns.slice(at..at + row_bytes), me);
            row.widen(&mut self.progress.row);
            let token = routes.tokens[j as usize] as usize;
            kernels::axpy(&mut self.output[token * h..(token + 1) * h], 1.0, &self.progress.row);
        }
        let slots = || rows.iter().flat_map(|&j| routes.row(j as usize));
        let n_slots = slots().count();
        if self.direction == Direction::Backward {
            let mut d_weights = vec![0.0f32; n_slots];
            let at = start + rows.len() * row_bytes;
            self.shmem.get(bytemuck::cast_slice_mut(&mut d_weights), returns.slice(at..at + 4 * n_slots), me);
            for (slot, d) in slots().zip(d_weights) {
                self.d_weights[slot.choice as usize] = d;
            }
        }
        self.progress.combined_slots += n_slots;
    }
}

/// In forward, enters the phase in which results are multiplied by their weights and summed. Backward does not multiply them.
fn enter_scale(rec: &mut Recorder, direction: Direction) {
    if direction == Direction::Forward {
        rec.enter(Phase::Scale);
    }
}

/// Adds the results of one row's slots, in the order of experts, to `acc`.
pub(super) fn sum_batch_rows<E: Element>(
    batches: &[Batch<E>],
    batch_rows: &[(u32, u32)],
    direction: Direction,
    acc: &mut [f32],
) {
    let h = acc.len();
    for &(e, row) in batch_rows {
        let (batch, row) = (&batches[e as usize], row as usize);
        let weighs = direction == Direction::Forward && !batch.weighed_input;
        let weight = if weighs { batch.weight[row] } else { 1.0 };
        kernels::axpy(acc, weight, &batch.out[row * h..(row + 1) * h]);
    }
}

/// Byte offset of results in the sender's return area. `base` counts the (rows, slots) before this PE's part of the
/// area, `first` those before the chunk within the part. Only backward returns slots.
pub(super) fn return_offset(
    base: (usize, usize),
    first: (usize, usize),
    row_bytes: usize,
    direction: Direction,
) -> usize {
    let slots = if direction == Direction::Forward { 0 } else { base.1 + first.1 };
    (base.0 + first.0) * row_bytes + slots * 4
}
