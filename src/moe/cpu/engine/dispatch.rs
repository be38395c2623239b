//! Sends and receives headers and rows.

use std::ops::Range;

use super::wire::WireRows;
use super::{Direction, Engine, Inbound};
use crate::moe::cpu::kernels::Element;
use crate::moe::spec::metrics::{Phase, Traffic};
use crate::moe::spec::{HEADER_WORDS, Layout, Load, MoeError};
use crate::shmem::{Cmp, Shmem, SignalOp, Sym, Transport, Wait};

impl<T: Transport, E: Element> Engine<'_, T, E> {
    /// Sends each peer its header: its rows and slots, their offsets in this PE's return area, the tokens of this PE's whole batch, and
    /// its slots per expert.
    pub(super) fn send_headers(&mut self) {
        if self.direction == Direction::Backward {
            return;
        }
        let most = self.peers().map(|pe| self.chunks(self.block.routes[pe].tokens.len())).max().unwrap_or(0);
        self.block.rounds = most.div_ceil(self.memory.layout.window_chunks);
        self.rec.enter(Phase::Dispatch);
        let me = self.me();
        let (mut row, mut slot) = (0, 0);
        for pe in 0..self.shmem.n_pes() {
            if pe == me {
                continue;
            }
            let routes = &self.block.routes[pe];
            let announced = self.block.announced.get(pe);
            let counts = match announced {
                None => routes.counts(self.placement.experts(pe).len()),
                Some(announced) => announced.counts.clone(),
            };
            let is_relayed = self.relay_map.as_ref().is_some_and(|map| map.relay[pe] != pe);
            let [rows, slots, first_row, first_slot] = match announced {
                // The results for this PE return through the relay, so no part of its return area is needed.
                Some(announced) if is_relayed => [announced.rows, announced.slots, 0, 0],
                _ => [routes.tokens.len(), routes.slots.len(), row, slot],
            };
            row += routes.tokens.len();
            slot += routes.slots.len();
            let rounds = self.block.rounds;
            let mut words: Vec<u32> = [rows, slots, first_row, first_slot, self.saved.routing.tokens, rounds]
                .iter()
                .map(|&w| w as u32)
                .collect();
            words.extend(counts);
            if self.has_loss_sums() {
                let load = &self.saved.loads[me];
                words.extend(load.routed.iter().map(|&r| r as u32));
                words.extend(std::iter::once(&load.z_sum).chain(&load.prob_sums).flat_map(|x| {
                    let bits = x.to_bits();
                    [bits as u32, (bits >> 32) as u32]
                }));
            }
            words.extend(self.host_row_counts(pe));
            let signal = self.memory.header_signal(me, pe, self.forward);
            let at = self.memory.header(me, pe, self.forward);
            self.shmem.put_signal(at, &words, signal, self.forward, SignalOp::Set, pe);
            let traffic = &mut self.rec.traffic;
            traffic.header_bytes += 4 * words.len() as u64;
            traffic.puts += 1;
            traffic.signals += 1;
        }
    }

    /// Reads the headers that have arrived. After the last header, assigns batch rows. Returns true if it did either.
    pub(super) fn receive_headers(&mut self) -> Result<bool, MoeError> {
        if self.progress.batches_assigned {
            return Ok(false);
        }
        let mut new = false;
        for pe in self.peers() {
            if !self.progress.headers[pe] && self.shmem.signal_fetch(self.header_wait(pe).signal) >= self.forward {
                self.rec.enter(Phase::Dispatch);
                self.read_header(pe)?;
                self.progress.headers[pe] = true;
                new = true;
            }
        }
        if self.progress.headers.iter().all(|&h| h) {
            self.rec.enter(Phase::Dispatch);
            self.assign_batch_rows();
            new = true;
        }
        Ok(new)
    }

    pub(super) fn header_wait(&self, pe: usize) -> Wait {
        Wait { signal: self.memory.header_signal(pe, self.me(), self.forward), cmp: Cmp::Ge, value: self.forward }
    }

    /// Whether headers have the sums for the losses. The headers of the first block have the sums over the whole batch.
    fn has_loss_sums(&self) -> bool {
        self.config.has_losses() && self.block.number == 0
    }

    /// Reads and validates the header from `pe`. A peer's header is untrusted until it is validated here.
    fn read_header(&mut self, pe: usize) -> Result<(), MoeError> {
        let (me, local, e) = (self.me(), self.experts.len(), self.config.n_experts);
        let layout = &self.memory.layout;
        let mut words = vec![0u32; layout.header_words];
        self.shmem.get(&mut words, self.memory.header(pe, me, self.forward), me);
        let [rows, slots, return_row, return_slot, tokens, rounds] = [0, 1, 2, 3, 4, 5].map(|k| words[k] as usize);
        let counts: Vec<usize> = words[HEADER_WORDS..HEADER_WORDS + local].iter().map(|&c| c as usize).collect();
        let top_k = self.config.router.top_k;
        let own_slots = counts.iter().sum::<usize>();
        let is_relay_for = self.is_relay_for(pe);
        let of_block = layout.block(tokens, self.block.number).len();
        let valid = rows <= of_block
            && Layout::can_number(tokens, top_k)
            && slots <= rows * layout.max_slots_per_row
            && slots >= rows
            && (own_slots == slots || is_relay_for && own_slots < slots)
            && (return_row + rows) * layout.row_bytes + (return_slot + slots) * 4 <= layout.return_bytes
            && return_slot + slots <= of_block * top_k
            && rounds <= layout.max_chunks;
        if !valid {
            let what = format!("counts {:?} that do not fit the layer", &words[..HEADER_WORDS + local]);
            return Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what });
        }
        // All headers of a batch have its tokens. With other tokens this PE would run another number of passes than its peers.
        if let Some(first) = self.saved.blocks[..self.block.number].first().map(|first| first.inbound[pe].tokens)
            && first != tokens
        {
            let what = format!("a header for {tokens} tokens in pass {} of a batch of {first}", self.block.number + 1);
            return Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what });
        }
        self.saved.most_tokens = self.saved.most_tokens.max(tokens);
        if self.has_loss_sums() {
            let loss = &words[HEADER_WORDS + local..];
            let double = |k: usize| f64::from_bits(u64::from(loss[e + 2 * k]) | u64::from(loss[e + 2 * k + 1]) << 32);
            self.saved.loads[pe] = Load {
                tokens: tokens as u64,
                routed: loss[..e].iter().map(|&r| u64::from(r)).collect(),
                z_sum: double(0),
                prob_sums: (1..=e).map(double).collect(),
            };
        }
        self.block.rounds = self.block.rounds.max(rounds);
        self.block.inbound[pe] = Inbound {
            rows,
            slots,
            return_row,
            return_slot,
            tokens,
            counts,
            starts: vec![0; local],
            ..Inbound::default()
        };
        if is_relay_for {
            let losses = if self.has_loss_sums() { 2 + 3 * e } else { 0 };
            self.open_streams(pe, &words[HEADER_WORDS + local + losses..])?;
        }
        Ok(())
    }

    /// Sends the chunks below `limit` whose window slot is free.
    pub(super) fn send_chunks(&mut self, limit: usize) {
        let me = self.me();
        for pe in self.peers() {
            let chunks = self.chunks(self.block.routes[pe].tokens.len());
            while self.progress.sent[pe] < chunks.min(limit) {
                let chunk = self.progress.sent[pe];
                if let Some(wait) = self.credit_wait(pe, chunk)
                    && self.shmem.signal_fetch(wait.signal) < wait.value
                {
                    break;
                }
                self.rec.enter(Phase::Dispatch);
                let signal = (self.memory.chunk_signal(me, pe, chunk), self.stamp(chunk));
                self.send_chunk(pe, chunk, signal);
                self.progress.sent[pe] += 1;
            }
        }
    }

    /// The wait for the window slot of chunk `chunk` at `pe`; `None` if the slot is used for the first time in the
    /// pass.
    pub(super) fn credit_wait(&self, pe: usize, chunk: usize) -> Option<Wait> {
        let reused = (chunk + 1).checked_sub(self.memory.layout.window_chunks)?;
        let value = self.credits_used[pe] + reused as u64;
        (reused > 0).then(|| Wait { signal: self.memory.credit_signal(pe, self.me()), cmp: Cmp::Ge, value })
    }

    fn send_chunk(&mut self, pe: usize, chunk: usize, signal: (Sym<u64>, u64)) {
        let routes = &self.block.routes[pe];
        let rows = self.chunk_range(routes.tokens.len(), chunk);
        let (h, row_bytes) = (self.config.hidden, self.memory.layout.row_bytes);
        let mut slots: Vec<u32> = Vec::new();
        if self.direction == Direction::Forward {
            slots.extend(rows.clone().map(|j| routes.row(j).len() as u32));
            for slot in rows.clone().flat_map(|j| routes.row(j)) {
                slots.extend([slot.expert, slot.weight.to_bits()]);
            }
        }
        let slot_bytes: &[u8] = bytemuck::cast_slice(&slots);
        let dst = self.memory.chunk(self.me(), pe, chunk);
        let input = self.input;
        let data = rows.clone().map(|j| {
            let token = routes.tokens[j] as usize;
            &input[token * h..(token + 1) * h]
        });
        let traffic = &mut self.rec.traffic;
        traffic.dispatch_rows += rows.len() as u64;
        traffic.dispatch_row_bytes += (rows.len() * row_bytes) as u64;
        traffic.dispatch_slot_bytes += slot_bytes.len() as u64;
        if self.options.wire.is_none() {
            let pieces = data.map(bytemuck::cast_slice).chain(std::iter::once(slot_bytes));
            return put_pieces(self.shmem, dst, pieces, signal, pe, traffic);
        }
        let mut packed = WireRows::<E>::zeros(self.options.wire, rows.len() * h);
        for (k, row) in data.enumerate() {
            E::widen(row, &mut self.progress.row);
            packed.set(k * h, &self.progress.row);
        }
        put_pieces(self.shmem, dst, [packed.as_bytes(), slot_bytes].into_iter(), signal, pe, traffic);
    }

    /// Copies the rows that stay on this PE from the input to the batches.
    pub(super) fn gather_own(&mut self) {
        self.rec.enter(Phase::Dispatch);
        let (me, h) = (self.me(), self.config.hidden);
        let rows = self.block.inbound[me].rows;
        if self.direction == Direction::Forward {
            let routes = &self.block.routes[me];
            let from = &mut self.block.inbound[me];
            let mut next = from.starts.clone();
            from.slot_start = routes.slot_start.clone();
            from.batch_rows = routes
                .slots
                .iter()
                .map(|s| {
                    let batch_row = next[s.expert as usize];
                    next[s.expert as usize] += 1;
                    self.saved.batches[s.expert as usize].weight[batch_row] = s.weight;
                    (s.expert, batch_row as u32)
                })
                .collect();
        }
        for chunk in 0..self.chunks(rows) {
            let range = self.chunk_range(rows, chunk);
            for j in range.clone() {
                let token = self.block.routes[me].tokens[j] as usize;
                let row = &self.input[token * h..(token + 1) * h];
                let from = &self.block.inbound[me];
                for &(e, batch_row) in &from.batch_rows[from.slot_start[j] as usize..from.slot_start[j + 1] as usize] {
                    let batch = &mut self.saved.batches[e as usize];
                    let to = if self.direction == Direction::Forward { &mut batch.x } else { &mut batch.g };
                    to[batch_row as usize * h..(batch_row as usize + 1) * h].copy_from_slice(row);
                }
            }
            self.mark_gathered(me, range);
        }
    }

    /// Copies received chunks to the experts' batches. Returns true if there were any.
    pub(super) fn gather_chunks(&mut self) -> Result<bool, MoeError> {
        if !self.progress.batches_assigned {
            return Ok(false);
        }
        let mut new = false;
        for pe in self.peers() {
            let rows = self.block.inbound[pe].rows;
            while self.progress.gathered[pe] < self.chunks(rows) {
                let chunk = self.progress.gathered[pe];
                let wait = self.chunk_wait(pe, chunk);
                if self.shmem.signal_fetch(wait.signal) < wait.value {
                    break;
                }
                self.rec.enter(Phase::Dispatch);
                self.gather_chunk(pe, chunk)?;
                if chunk + self.memory.layout.window_chunks < self.chunks(rows) {
                    // The credit tells the sender that it may reuse this window slot for its next chunk.
                    let (credit, sender) = self.credit_of(pe);
                    self.shmem.signal_op(credit, 1, SignalOp::Add, sender);
                    self.rec.traffic.signals += 1;
                }
                new = true;
            }
        }
        Ok(new)
    }

    pub(super) fn chunk_wait(&self, pe: usize, chunk: usize) -> Wait {
        Wait { signal: self.memory.chunk_signal(pe, self.me(), chunk), cmp: Cmp::Ge, value: self.stamp(chunk) }
    }

    fn gather_chunk(&mut self, pe: usize, chunk: usize) -> Result<(), MoeError> {
        let (me, h, row_bytes) = (self.me(), self.config.hidden, self.memory.layout.row_bytes);
        let range = self.chunk_range(self.block.inbound[pe].rows, chunk);
        let data = self.memory.chunk(pe, me, chunk);
        if self.direction == Direction::Forward {
            self.read_slots(pe, &range, data)?;
        }
        let from = &self.block.inbound[pe];
        let mut packed = self.options.wire.map(|_| WireRows::<E>::zeros(self.options.wire, h));
        for (k, j) in range.clone().enumerate() {
            let row = data.slice(k * row_bytes..(k + 1) * row_bytes);
            if from.relayed.is_some() {
                let relay_rows = &mut self.progress.relay_rows[pe];
                relay_rows.resize((j + 1) * row_bytes, 0);
                self.shmem.get(&mut relay_rows[j * row_bytes..], row, me);
            }
            if let Some(packed) = &mut packed {
                self.shmem.get(packed.as_bytes_mut(), row, me);
                packed.widen(&mut self.progress.row);
            }
            for &(e, batch_row) in &from.batch_rows[from.slot_start[j] as usize..from.slot_start[j + 1] as usize] {
                let batch = &mut self.saved.batches[e as usize];
                let to = if self.direction == Direction::Forward { &mut batch.x } else { &mut batch.g };
                let to = &mut to[batch_row as usize * h..(batch_row as usize + 1) * h];
                match &packed {
                    None => self.shmem.get(bytemuck::cast_slice_mut(to), row, me),
                    Some(_) => E::convert(&self.progress.row, to),
                }
            }
        }
        if self.direction == Direction::Forward {
            self.block.inbound[pe].extend_returns(range.end);
            self.extend_streams(pe, range.end)?;
        }
        self.mark_gathered(pe, range);
        Ok(())
    }

    /// Reads the slots of a chunk's rows and validates them against the counts in the header.
    fn read_slots(&mut self, pe: usize, range: &Range<usize>, data: Sym<u8>) -> Result<(), MoeError> {
        let (me, layout, named) = (self.me(), &self.memory.layout, self.shmem.world_pe(pe));
        let protocol_error = |what: &str| Err(MoeError::Protocol { pe: named, what: format!("rows {range:?} {what}") });
        let at = range.len() * layout.row_bytes;
        let mut counts = vec![0u32; range.len()];
        let slots_at = at + 4 * counts.len();
        self.shmem.get(bytemuck::cast_slice_mut(&mut counts), data.slice(at..slots_at), me);
        if counts.iter().any(|&c| c == 0 || c as usize > layout.max_slots_per_row) {
            return protocol_error("with an impossible number of experts");
        }
        let slots: usize = counts.iter().map(|&c| c as usize).sum();
        let mut words = vec![0u32; 2 * slots];
        self.shmem.get(bytemuck::cast_slice_mut(&mut words), data.slice(slots_at..slots_at + 8 * slots), me);
        if self.is_relay_for(pe) {
            words = self.read_relayed_slots(pe, range, &mut counts, &words)?;
        }
        let from = &mut self.block.inbound[pe];
        if from.slot_start.is_empty() {
            from.slot_start.push(0);
        }
        let mut before = range.start.checked_sub(1).map_or(0, |row| from.first_expert(row));
        let mut rest = &words[..];
        for count in counts {
            from.slot_start.push(from.slot_start.last().expect("starts with 0") + count);
            let (row, others) = rest.split_at(2 * count as usize);
            rest = others;
            if from.relayed.is_some() {
                continue;
            }
            let first = row.iter().step_by(2).min().copied().unwrap_or(0);
            // The order in which results return is derived from this order.
            if first < before {
                return protocol_error("out of the order of experts");
            }
            before = first;
        }
        let received = &mut self.progress.received_slots[pe];
        for slot in words.chunks_exact(2) {
            let e = slot[0] as usize;
            if e >= from.counts.len() || received[e] == from.counts[e] {
                return protocol_error(&format!("for expert {e} beyond the announced counts"));
            }
            let batch_row = from.starts[e] + received[e];
            received[e] += 1;
            from.batch_rows.push((slot[0], batch_row as u32));
            self.saved.batches[e].weight[batch_row] = f32::from_bits(slot[1]);
        }
        if range.end == from.rows && from.batch_rows.len() != from.counts.iter().sum::<usize>() {
            return protocol_error("end short of the announced counts");
        }
        Ok(())
    }

    /// Records that rows have been copied to their batches, and queues the tiles that are complete.
    fn mark_gathered(&mut self, pe: usize, range: Range<usize>) {
        let (start, partials) = (range.start, self.partials_awaited(pe, range.clone()));
        let from = &self.block.inbound[pe];
        let p = &mut self.progress;
        for row in range {
            let batch_rows = from.batch_rows(row);
            for &(e, batch_row) in batch_rows {
                p.origin[e as usize][batch_row as usize] = (pe as u32, row as u32);
                // Own rows may be gathered before the tiles exist. `add_tiles` does not count them as missing.
                if let Some(tile) = p.maps[e as usize].tile(batch_row as usize) {
                    p.tiles[tile].missing -= 1;
                    if p.tiles[tile].missing == 0 {
                        p.mark_ready(tile);
                    }
                }
            }
            p.pending[pe].push(batch_rows.len() as u32 + partials[row - start]);
        }
        p.gathered[pe] += 1;
    }
}

/// Puts `pieces` one after the other to `dst` on `pe`, then signals. If `pe`'s memory is directly reachable, each piece is a put, and a
/// fence follows. Otherwise all pieces and the signal are sent in one message.
pub(super) fn put_pieces<'d, T: Transport>(
    shmem: &Shmem<T>,
    dst: Sym<u8>,
    pieces: impl Iterator<Item = &'d [u8]>,
    (signal, value): (Sym<u64>, u64),
    pe: usize,
    traffic: &mut Traffic,
) {
    traffic.signals += 1;
    if shmem.is_reachable(pe) {
        let mut at = 0;
        for piece in pieces.filter(|piece| !piece.is_empty()) {
            shmem.put(dst.slice(at..at + piece.len()), piece, pe);
            at += piece.len();
            traffic.puts += 1;
        }
        shmem.fence();
        traffic.fences += 1;
        shmem.signal_op(signal, value, SignalOp::Set, pe);
    } else {
        let mut message = Vec::new();
        pieces.for_each(|piece| message.extend_from_slice(piece));
        shmem.put_signal(dst, &message, signal, value, SignalOp::Set, pe);
        traffic.puts += 1;
    }
}
