//! One pass (forward or backward) of the layer protocol on one PE. `docs/protocol.md` is its description.
//!
//! The PE is one thread that turns a crank: send what may be sent, take what has arrived, compute a tile whose
//! rows are all there, return chunks that are done, add results that have come back; and when nothing of this
//! is possible, work that nobody waits for (shared expert, weight gradients); and only then wait.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use super::config::LayerConfig;
use super::experts::{Batch, Mlp, MlpGradients, Scratch, tiles};
use super::kernels::{self, Element};
use super::layout::{HEADER_WORDS, Memory};
use super::metrics::{Phase, Recorder};
use super::placement::Placement;
use super::router::{Load, Routes, Routing};
use super::{Mode, MoeError, Options};
use crate::shmem::{Cmp, Shmem, SignalOp, Sym, Transport, Wait};

/// Rows that came from one PE (or stayed: the own ones), and where its results go.
#[derive(Clone, Debug, Default)]
pub struct Inbound {
    rows: usize,
    slots: usize,
    /// First of the sender's return rows and return slots that are ours.
    return_row: usize,
    return_slot: usize,
    /// Rows for each local expert, and where they begin in its batch.
    counts: Vec<usize>,
    starts: Vec<usize>,
    /// Row `j`'s places are `places[place_start[j]..place_start[j + 1]]`, each (local expert, row of its batch).
    place_start: Vec<u32>,
    places: Vec<(u32, u32)>,
}

/// What a forward pass leaves for its backward.
#[derive(Clone, Debug, Default)]
pub struct Saved<E> {
    /// The router's decisions for this PE's tokens.
    pub routing: Routing,
    /// The rows for each PE.
    pub routes: Vec<Routes>,
    /// The rows from each PE.
    pub inbound: Vec<Inbound>,
    /// One batch per local expert.
    pub batches: Vec<Batch<E>>,
    /// The shared expert's, with this PE's tokens as rows; its `x` is the layer's input even without shared expert.
    pub shared: Batch<E>,
    /// Each PE's sums for the losses, where a loss has a coefficient.
    pub loads: Vec<Load>,
    /// Rounds through the receive windows.
    pub rounds: usize,
}

/// Which way a pass goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Tokens out, expert outputs back.
    Forward,
    /// Output gradients out, input gradients and routing-weight gradients back.
    Backward,
}

struct Tile {
    expert: usize,
    rows: Range<usize>,
    missing: usize,
}

/// Tiles of one local expert: `segments` are runs of rows that are cut into equal tiles.
#[derive(Default)]
struct TileMap {
    /// (first row, end row, first tile, number of tiles).
    segments: Vec<(usize, usize, usize, usize)>,
}

impl TileMap {
    fn tile(&self, row: usize) -> Option<usize> {
        let &(start, end, first, count) = self.segments.iter().find(|s| s.0 <= row && row < s.1)?;
        // The tile k with floor(n k / count) <= row - start < floor(n (k + 1) / count), as `tiles` cuts them.
        Some(first + ((row - start + 1) * count - 1) / (end - start))
    }
}

/// What a pass works with and on.
pub struct Engine<'a, 'o, T: Transport, E: Element> {
    pub shmem: &'a Shmem<T>,
    pub memory: &'a Memory,
    pub config: &'a LayerConfig,
    pub placement: &'a Placement,
    pub options: &'a Options,
    pub experts: &'a [Mlp<E>],
    pub shared: Option<&'a Mlp<E>>,
    pub scratch: &'a mut Scratch,
    pub rec: &'a mut Recorder<'o>,
    pub credits_used: &'a mut [u64],
    pub saved: &'a mut Saved<E>,
    pub direction: Direction,
    /// Number of this pass, from 1, and of its forward pass.
    pub pass: u64,
    pub forward: u64,
    /// This PE's rows, `[tokens, hidden]`: inputs, or output gradients.
    pub input: &'a [E],
    /// `[tokens, hidden]`: outputs, or input gradients; added to.
    pub output: &'a mut [f32],
    /// Backward: gradient of each choice's routing weight.
    pub d_weights: &'a mut [f32],
    /// Backward: gradients of the local experts' and the shared expert's weights.
    pub expert_grads: &'a mut [MlpGradients],
    pub shared_grads: &'a mut MlpGradients,
    pub progress: Progress,
}

/// How far a pass has come.
#[derive(Default)]
pub struct Progress {
    sent: Vec<usize>,
    headers: Vec<bool>,
    placed: bool,
    taken: Vec<Vec<usize>>,
    gathered: Vec<usize>,
    /// Per source and chunk: slots whose tile is not computed yet.
    undone: Vec<Vec<usize>>,
    returned: Vec<usize>,
    /// Chunk (source, index) of each row of each local expert's batch.
    origin: Vec<Vec<(u32, u32)>>,
    tiles: Vec<Tile>,
    maps: Vec<TileMap>,
    ready: VecDeque<usize>,
    tiles_left: Vec<usize>,
    /// Work nobody waits for, last first.
    filler: Vec<Filler>,
    /// The next result to add: (PE, chunk).
    combine: (usize, usize),
    row: Vec<f32>,
}

#[derive(Clone)]
enum Filler {
    SharedTile(Range<usize>),
    SharedGradients,
    ExpertGradients(usize),
}

impl<T: Transport, E: Element> Engine<'_, '_, T, E> {
    fn me(&self) -> usize {
        self.shmem.my_pe()
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<T, E> {
        // Each PE begins with the next one, so that they do not all write to PE 0 first.
        let (me, n) = (self.me(), self.shmem.n_pes());
        (1..n).map(move |k| (me + k) % n)
    }

    fn chunk_rows(&self) -> usize {
        self.memory.layout.chunk_rows
    }

    /// The rows of chunk `chunk` of `rows` rows.
    fn chunk_range(&self, rows: usize, chunk: usize) -> Range<usize> {
        let start = chunk * self.chunk_rows();
        start..rows.min(start + self.chunk_rows())
    }

    fn chunks(&self, rows: usize) -> usize {
        rows.div_ceil(self.chunk_rows())
    }

    /// The value of a chunk's signal in this pass: monotonic, and different each time its place is reused.
    fn stamp(&self, chunk: usize) -> u64 {
        (self.pass << 24) + (chunk / self.memory.layout.window_chunks) as u64 + 1
    }

    /// Runs the pass to its end.
    pub fn run(&mut self) -> Result<(), MoeError> {
        self.begin();
        match self.options.mode {
            Mode::Pipelined => self.run_pipelined()?,
            Mode::Bulk => self.run_bulk()?,
        }
        let window = self.memory.layout.window_chunks;
        for pe in self.peers() {
            self.credits_used[pe] += self.chunks(self.saved.routes[pe].tokens.len()).saturating_sub(window) as u64;
        }
        Ok(())
    }

    fn run_pipelined(&mut self) -> Result<(), MoeError> {
        self.send_headers();
        self.send_chunks(usize::MAX);
        self.gather_own();
        loop {
            self.send_chunks(usize::MAX);
            let arrived = self.take_headers()? | self.gather_chunks()?;
            if self.compute_one() {
                self.return_chunks();
                continue;
            }
            self.return_chunks();
            if self.combine_arrived() | arrived {
                continue;
            }
            if self.is_done() {
                return Ok(());
            }
            if !self.fill_one() {
                self.wait()?;
            }
        }
    }

    /// The bulk-synchronous all-to-all: the same steps, each finished everywhere before the next begins.
    fn run_bulk(&mut self) -> Result<(), MoeError> {
        self.send_headers();
        self.gather_own();
        self.barrier("the counts of every PE")?;
        self.take_headers()?;
        for round in 0..self.saved.rounds {
            self.send_chunks((round + 1) * self.memory.layout.window_chunks);
            self.barrier("the rows of every PE")?;
            self.gather_chunks()?;
            if round + 1 < self.saved.rounds {
                self.barrier("every window emptied")?;
            }
        }
        self.gather_chunks()?;
        while self.compute_one() {}
        while self.fill_one() {}
        self.barrier("the experts of every PE")?;
        self.return_chunks();
        self.barrier("the results of every PE")?;
        self.combine_arrived();
        debug_assert!(self.is_done());
        Ok(())
    }

    fn begin(&mut self) {
        let (n, local) = (self.shmem.n_pes(), self.experts.len());
        let mut p = Progress {
            sent: vec![0; n],
            headers: vec![false; n],
            taken: vec![vec![0; local]; n],
            gathered: vec![0; n],
            undone: vec![Vec::new(); n],
            returned: vec![0; n],
            origin: vec![Vec::new(); local],
            maps: (0..local).map(|_| TileMap::default()).collect(),
            tiles_left: vec![0; local],
            row: vec![0.0; self.config.hidden],
            ..Progress::default()
        };
        if let Some(shared) = self.config.shared {
            if self.direction == Direction::Backward {
                p.filler.push(Filler::SharedGradients);
            } else {
                self.saved.shared.resize_forward(&shared.mlp, self.config.hidden, self.saved.routing.tokens);
            }
            let tokens = 0..self.saved.routing.tokens;
            let mut shared_tiles: Vec<_> = tiles(tokens, self.options.tile_rows).map(Filler::SharedTile).collect();
            shared_tiles.reverse();
            p.filler.append(&mut shared_tiles);
        }
        self.progress = p;
        let me = self.me();
        self.progress.headers[me] = true;
        if self.direction == Direction::Forward {
            self.saved.inbound = vec![Inbound::default(); n];
            let routes = &self.saved.routes[me];
            let (rows, slots) = (routes.tokens.len(), routes.slots.len());
            let counts: Vec<usize> = routes.counts(local).iter().map(|&c| c as usize).collect();
            for (e, &rows) in counts.iter().enumerate() {
                self.saved.batches[e].resize_forward(&self.config.expert, self.config.hidden, rows);
                self.progress.origin[e].resize(rows, (0, 0));
                if rows >= self.options.tile_rows {
                    self.add_tiles(e, 0..rows, 0);
                }
            }
            let starts = vec![0; local];
            self.saved.inbound[me] = Inbound { rows, slots, counts, starts, ..Inbound::default() };
        } else {
            self.progress.headers.fill(true);
            for batch in &mut self.saved.batches {
                batch.resize_backward(&self.config.expert, self.config.hidden);
            }
            if let Some(shared) = self.config.shared {
                self.saved.shared.resize_backward(&shared.mlp, self.config.hidden);
            }
            self.place();
        }
    }

    /// Cuts rows of an expert into tiles; those below `there` are in the batch already.
    fn add_tiles(&mut self, expert: usize, rows: Range<usize>, there: usize) {
        let p = &mut self.progress;
        let first = p.tiles.len();
        for tile in tiles(rows.clone(), self.options.tile_rows) {
            let missing = tile.end.saturating_sub(there.max(tile.start));
            if missing == 0 {
                p.ready.push_back(p.tiles.len());
            }
            p.tiles.push(Tile { expert, rows: tile, missing });
        }
        let count = p.tiles.len() - first;
        p.tiles_left[expert] += count;
        if count > 0 {
            p.maps[expert].segments.push((rows.start, rows.end, first, count));
        }
    }

    /// With all counts known, gives the rows of every PE their places in the experts' batches: own rows first, then
    /// those of the following PEs in turn. The order, and so every sum over rows, does not depend on arrival.
    fn place(&mut self) {
        let (me, n) = (self.me(), self.shmem.n_pes());
        let forward = self.direction == Direction::Forward;
        for e in 0..self.experts.len() {
            let mut total = 0;
            for k in 0..n {
                let from = &mut self.saved.inbound[(me + k) % n];
                from.starts[e] = total;
                total += from.counts[e];
            }
            let own = self.saved.inbound[me].counts[e];
            if forward {
                self.saved.batches[e].resize_forward(&self.config.expert, self.config.hidden, total);
            } else if total == 0 {
                self.progress.filler.push(Filler::ExpertGradients(e));
            }
            self.progress.origin[e].resize(total, (0, 0));
            let tiled = self.progress.maps[e].segments.last().map_or(0, |s| s.1);
            // In backward the own rows are gathered after this, in forward before.
            self.add_tiles(e, tiled..total, if forward { own } else { 0 });
        }
        self.progress.placed = true;
    }

    // ---- counts ------------------------------------------------------------------------------------------------

    /// Puts to every peer: how many rows and slots it gets, where their results go, and how many for each expert.
    fn send_headers(&mut self) {
        let window = self.memory.layout.window_chunks;
        let most = self.peers().map(|pe| self.chunks(self.saved.routes[pe].tokens.len())).max().unwrap_or(0);
        self.saved.rounds = if self.direction == Direction::Forward { most.div_ceil(window) } else { self.saved.rounds };
        if self.direction == Direction::Backward {
            return;
        }
        self.rec.enter(Phase::Dispatch);
        let me = self.me();
        let (mut row, mut slot) = (0, 0);
        let losses = self.memory.layout.header_words > HEADER_WORDS + self.placement.max_local();
        for pe in 0..self.shmem.n_pes() {
            if pe == me {
                continue;
            }
            let routes = &self.saved.routes[pe];
            let (rows, slots) = (routes.tokens.len(), routes.slots.len());
            let rounds = self.saved.rounds;
            let mut words: Vec<u32> =
                [rows, slots, row, slot, self.saved.routing.tokens, rounds].iter().map(|&w| w as u32).collect();
            words.extend(routes.counts(self.placement.experts(pe).len()));
            if losses {
                let load = &self.saved.loads[me];
                words.extend(load.routed.iter().map(|&r| r as u32));
                words.extend(std::iter::once(&load.z_sum).chain(&load.prob_sums).flat_map(|x| {
                    let bits = x.to_bits();
                    [bits as u32, (bits >> 32) as u32]
                }));
            }
            row += rows;
            slot += slots;
            let signal = self.memory.header_signal(me, pe, self.forward);
            let at = self.memory.header(me, pe, self.forward);
            self.shmem.put_signal(at, &words, signal, self.forward, SignalOp::Set, pe);
            let traffic = &mut self.rec.traffic;
            traffic.header_bytes += 4 * words.len() as u64;
            traffic.puts += 1;
            traffic.signals += 1;
        }
    }

    /// Reads the headers that have arrived; once all have, every row has its place. Says whether anything was new.
    fn take_headers(&mut self) -> Result<bool, MoeError> {
        if self.progress.placed {
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
            self.place();
            new = true;
        }
        Ok(new)
    }

    fn header_wait(&self, pe: usize) -> Wait {
        Wait { signal: self.memory.header_signal(pe, self.me(), self.forward), cmp: Cmp::Ge, value: self.forward }
    }

    /// What a peer's header says is an allegation: it is checked here, once, and trusted from here on.
    fn read_header(&mut self, pe: usize) -> Result<(), MoeError> {
        let (me, local, e) = (self.me(), self.experts.len(), self.config.n_experts);
        let layout = &self.memory.layout;
        let mut words = vec![0u32; layout.header_words];
        self.shmem.get(&mut words, self.memory.header(pe, me, self.forward), me);
        let [rows, slots, return_row, return_slot, tokens, rounds] = [0, 1, 2, 3, 4, 5].map(|k| words[k] as usize);
        let counts: Vec<usize> = words[HEADER_WORDS..HEADER_WORDS + local].iter().map(|&c| c as usize).collect();
        let top_k = self.config.router.top_k;
        let valid = rows <= tokens
            && tokens <= layout.max_tokens
            && slots <= rows * layout.max_slots_per_row
            && slots >= rows
            && counts.iter().sum::<usize>() == slots
            && (return_row + rows) * layout.row_bytes + (return_slot + slots) * 4 <= layout.return_bytes
            && return_slot + slots <= tokens * top_k
            && rounds <= layout.max_chunks;
        if !valid {
            let what = format!("counts {:?} that do not fit the layer", &words[..HEADER_WORDS + local]);
            return Err(MoeError::Protocol { pe, what });
        }
        if words.len() > HEADER_WORDS + self.placement.max_local() {
            let loss = &words[HEADER_WORDS + local..];
            let double = |k: usize| f64::from_bits(u64::from(loss[e + 2 * k]) | u64::from(loss[e + 2 * k + 1]) << 32);
            self.saved.loads[pe] = Load {
                tokens: tokens as u64,
                routed: loss[..e].iter().map(|&r| u64::from(r)).collect(),
                z_sum: double(0),
                prob_sums: (1..=e).map(double).collect(),
            };
        }
        self.saved.rounds = self.saved.rounds.max(rounds);
        self.saved.inbound[pe] =
            Inbound { rows, slots, return_row, return_slot, counts, starts: vec![0; local], ..Inbound::default() };
        Ok(())
    }

    // ---- rows out ----------------------------------------------------------------------------------------------

    /// Sends the chunks below `limit` that have a place in their receiver's window.
    fn send_chunks(&mut self, limit: usize) {
        let me = self.me();
        for pe in self.peers() {
            let chunks = self.chunks(self.saved.routes[pe].tokens.len());
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

    /// What must hold before chunk `chunk` may be written at `pe`: its place has been emptied.
    fn credit_wait(&self, pe: usize, chunk: usize) -> Option<Wait> {
        let reused = (chunk + 1).checked_sub(self.memory.layout.window_chunks)?;
        let value = self.credits_used[pe] + reused as u64;
        (reused > 0).then(|| Wait { signal: self.memory.credit_signal(pe, self.me()), cmp: Cmp::Ge, value })
    }

    fn send_chunk(&mut self, pe: usize, chunk: usize, signal: (Sym<u64>, u64)) {
        let routes = &self.saved.routes[pe];
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
        let place = self.memory.chunk(self.me(), pe, chunk);
        let input = self.input;
        let data = rows.clone().map(|j| {
            let token = routes.tokens[j] as usize;
            bytemuck::cast_slice::<E, u8>(&input[token * h..(token + 1) * h])
        });
        let traffic = &mut self.rec.traffic;
        traffic.dispatch_rows += rows.len() as u64;
        traffic.dispatch_row_bytes += (rows.len() * row_bytes) as u64;
        traffic.dispatch_slot_bytes += slot_bytes.len() as u64;
        put_pieces(self.shmem, place, data.chain(std::iter::once(slot_bytes)), signal, pe, traffic);
    }

    // ---- rows in -----------------------------------------------------------------------------------------------

    /// Gathers the rows that stay on this PE, straight from the input.
    fn gather_own(&mut self) {
        self.rec.enter(Phase::Dispatch);
        let (me, h) = (self.me(), self.config.hidden);
        let rows = self.saved.inbound[me].rows;
        if self.direction == Direction::Forward {
            let routes = &self.saved.routes[me];
            let from = &mut self.saved.inbound[me];
            let mut next = from.starts.clone();
            from.place_start = routes.slot_start.clone();
            from.places = routes
                .slots
                .iter()
                .map(|s| {
                    let place = next[s.expert as usize];
                    next[s.expert as usize] += 1;
                    self.saved.batches[s.expert as usize].weight[place] = s.weight;
                    (s.expert, place as u32)
                })
                .collect();
        }
        for chunk in 0..self.chunks(rows) {
            let range = self.chunk_range(rows, chunk);
            for j in range.clone() {
                let token = self.saved.routes[me].tokens[j] as usize;
                let row = &self.input[token * h..(token + 1) * h];
                let from = &self.saved.inbound[me];
                for &(e, place) in &from.places[from.place_start[j] as usize..from.place_start[j + 1] as usize] {
                    let batch = &mut self.saved.batches[e as usize];
                    let to = if self.direction == Direction::Forward { &mut batch.x } else { &mut batch.g };
                    to[place as usize * h..(place as usize + 1) * h].copy_from_slice(row);
                }
            }
            self.mark_gathered(me, chunk, range);
        }
    }

    /// Gathers the chunks that have arrived into the experts' batches. Says whether there were any.
    fn gather_chunks(&mut self) -> Result<bool, MoeError> {
        if !self.progress.placed {
            return Ok(false);
        }
        let mut new = false;
        for pe in self.peers() {
            let rows = self.saved.inbound[pe].rows;
            while self.progress.gathered[pe] < self.chunks(rows) {
                let chunk = self.progress.gathered[pe];
                let wait = self.chunk_wait(pe, chunk);
                if self.shmem.signal_fetch(wait.signal) < wait.value {
                    break;
                }
                self.rec.enter(Phase::Dispatch);
                self.gather_chunk(pe, chunk)?;
                if chunk + self.memory.layout.window_chunks < self.chunks(rows) {
                    // The sender waits for this place.
                    let credit = self.memory.credit_signal(self.me(), pe);
                    self.shmem.signal_op(credit, 1, SignalOp::Add, pe);
                    self.rec.traffic.signals += 1;
                }
                new = true;
            }
        }
        Ok(new)
    }

    fn chunk_wait(&self, pe: usize, chunk: usize) -> Wait {
        Wait { signal: self.memory.chunk_signal(pe, self.me(), chunk), cmp: Cmp::Ge, value: self.stamp(chunk) }
    }

    fn gather_chunk(&mut self, pe: usize, chunk: usize) -> Result<(), MoeError> {
        let (me, h, row_bytes) = (self.me(), self.config.hidden, self.memory.layout.row_bytes);
        let range = self.chunk_range(self.saved.inbound[pe].rows, chunk);
        let data = self.memory.chunk(pe, me, chunk);
        if self.direction == Direction::Forward {
            self.read_slots(pe, &range, data)?;
        }
        let from = &self.saved.inbound[pe];
        for (k, j) in range.clone().enumerate() {
            for &(e, place) in &from.places[from.place_start[j] as usize..from.place_start[j + 1] as usize] {
                let batch = &mut self.saved.batches[e as usize];
                let to = if self.direction == Direction::Forward { &mut batch.x } else { &mut batch.g };
                let to = &mut to[place as usize * h..(place as usize + 1) * h];
                self.shmem.get(bytemuck::cast_slice_mut(to), data.slice(k * row_bytes..(k + 1) * row_bytes), me);
            }
        }
        self.mark_gathered(pe, chunk, range);
        Ok(())
    }

    /// Reads which experts the rows of a chunk are for. Allegations again: checked against the header's counts.
    fn read_slots(&mut self, pe: usize, range: &Range<usize>, data: Sym<u8>) -> Result<(), MoeError> {
        let (me, layout) = (self.me(), &self.memory.layout);
        let bad = |what: &str| Err(MoeError::Protocol { pe, what: format!("rows {range:?} {what}") });
        let at = range.len() * layout.row_bytes;
        let mut counts = vec![0u32; range.len()];
        let slots_at = at + 4 * counts.len();
        self.shmem.get(bytemuck::cast_slice_mut(&mut counts), data.slice(at..slots_at), me);
        if counts.iter().any(|&c| c == 0 || c as usize > layout.max_slots_per_row) {
            return bad("with an impossible number of experts");
        }
        let slots: usize = counts.iter().map(|&c| c as usize).sum();
        let mut words = vec![0u32; 2 * slots];
        self.shmem.get(bytemuck::cast_slice_mut(&mut words), data.slice(slots_at..slots_at + 8 * slots), me);
        let from = &mut self.saved.inbound[pe];
        if from.place_start.is_empty() {
            from.place_start.push(0);
        }
        for count in counts {
            from.place_start.push(from.place_start.last().expect("starts with 0") + count);
        }
        // `taken[e]`: how many places of expert e this PE's rows have so far.
        let taken = &mut self.progress.taken[pe];
        for slot in words.chunks_exact(2) {
            let e = slot[0] as usize;
            if e >= from.counts.len() || taken[e] == from.counts[e] {
                return bad(&format!("for expert {e} beyond the announced counts"));
            }
            let place = from.starts[e] + taken[e];
            taken[e] += 1;
            from.places.push((slot[0], place as u32));
            self.saved.batches[e].weight[place] = f32::from_bits(slot[1]);
        }
        if range.end == from.rows && from.places.len() != from.slots {
            return bad("end short of the announced counts");
        }
        Ok(())
    }

    /// The rows of a chunk are in their batches: their tiles come nearer.
    fn mark_gathered(&mut self, pe: usize, chunk: usize, range: Range<usize>) {
        let from = &self.saved.inbound[pe];
        let p = &mut self.progress;
        let places = &from.places[from.place_start[range.start] as usize..from.place_start[range.end] as usize];
        for &(e, place) in places {
            p.origin[e as usize][place as usize] = (pe as u32, chunk as u32);
            // Own rows may come before their tiles are cut; `add_tiles` knows of them.
            if let Some(tile) = p.maps[e as usize].tile(place as usize) {
                p.tiles[tile].missing -= 1;
                if p.tiles[tile].missing == 0 {
                    p.ready.push_back(tile);
                }
            }
        }
        p.undone[pe].push(places.len());
        p.gathered[pe] += 1;
    }

    // ---- experts -----------------------------------------------------------------------------------------------

    /// Computes a tile whose rows are all there. Says whether there was one.
    fn compute_one(&mut self) -> bool {
        let Some(tile) = self.progress.ready.pop_front() else { return false };
        self.rec.enter(Phase::Expert);
        let Tile { expert, rows, .. } = &self.progress.tiles[tile];
        let (expert, rows) = (*expert, rows.clone());
        let batch = &mut self.saved.batches[expert];
        match self.direction {
            Direction::Forward => batch.forward_tile(&self.experts[expert], self.scratch, rows.clone()),
            Direction::Backward => batch.backward_tile(&self.experts[expert], self.scratch, rows.clone()),
        }
        let p = &mut self.progress;
        for &(pe, chunk) in &p.origin[expert][rows] {
            p.undone[pe as usize][chunk as usize] -= 1;
        }
        p.tiles_left[expert] -= 1;
        if self.direction == Direction::Backward && p.tiles_left[expert] == 0 {
            p.filler.push(Filler::ExpertGradients(expert));
        }
        true
    }

    /// Does a piece of work that no other PE waits for. Says whether there was one.
    fn fill_one(&mut self) -> bool {
        let Some(work) = self.progress.filler.pop() else { return false };
        self.rec.enter(Phase::Expert);
        let shared = &mut self.saved.shared;
        match (work, self.shared, self.direction) {
            (Filler::SharedTile(rows), Some(mlp), Direction::Forward) => shared.forward_tile(mlp, self.scratch, rows),
            (Filler::SharedTile(rows), Some(mlp), Direction::Backward) => shared.backward_tile(mlp, self.scratch, rows),
            (Filler::SharedGradients, Some(mlp), _) => shared.weight_gradients(mlp, self.scratch, self.shared_grads),
            (Filler::ExpertGradients(e), ..) => {
                self.saved.batches[e].weight_gradients(&self.experts[e], self.scratch, &mut self.expert_grads[e]);
            }
            (Filler::SharedTile(_) | Filler::SharedGradients, None, _) => {}
        }
        true
    }

    // ---- results -----------------------------------------------------------------------------------------------

    /// Sends back the results of the chunks whose slots are all computed.
    fn return_chunks(&mut self) {
        for pe in self.peers() {
            while self.progress.returned[pe] < self.progress.gathered[pe]
                && self.progress.undone[pe][self.progress.returned[pe]] == 0
            {
                self.rec.enter(Phase::Combine);
                self.return_chunk(pe, self.progress.returned[pe]);
                self.progress.returned[pe] += 1;
            }
        }
    }

    fn return_chunk(&mut self, pe: usize, chunk: usize) {
        let (me, h, row_bytes) = (self.me(), self.config.hidden, self.memory.layout.row_bytes);
        let from = &self.saved.inbound[pe];
        let range = self.chunk_range(from.rows, chunk);
        let mut rows = vec![E::default(); range.len() * h];
        let mut d_weights = Vec::new();
        for (row, j) in rows.chunks_exact_mut(h).zip(range.clone()) {
            let places = &from.places[from.place_start[j] as usize..from.place_start[j + 1] as usize];
            self.progress.row.fill(0.0);
            sum_places(&self.saved.batches, places, self.direction, &mut self.progress.row);
            E::convert(&self.progress.row, row);
            if self.direction == Direction::Backward {
                d_weights.extend(places.iter().map(|&(e, k)| self.saved.batches[e as usize].d_weight[k as usize]));
            }
        }
        let start = return_offset(
            (from.return_row, from.return_slot),
            (range.start, from.place_start[range.start] as usize),
            row_bytes,
            self.direction,
        );
        let pieces = [bytemuck::cast_slice::<E, u8>(&rows), bytemuck::cast_slice::<f32, u8>(&d_weights)];
        let place = self.memory.returns().slice(start..start + pieces[0].len() + pieces[1].len());
        let signal = (self.memory.result_signal(me, pe, chunk), self.pass);
        let traffic = &mut self.rec.traffic;
        traffic.combine_rows += range.len() as u64;
        traffic.combine_row_bytes += pieces[0].len() as u64;
        traffic.combine_slot_bytes += pieces[1].len() as u64;
        put_pieces(self.shmem, place, pieces.into_iter(), signal, pe, traffic);
    }

    /// Adds the results that have come back, in the order of PEs and rows whatever came first. Says whether any had.
    fn combine_arrived(&mut self) -> bool {
        let (me, n) = (self.me(), self.shmem.n_pes());
        let mut new = false;
        loop {
            let (pe, chunk) = self.progress.combine;
            if pe == n {
                return new;
            }
            if chunk == self.chunks(self.saved.routes[pe].tokens.len()) {
                self.progress.combine = (pe + 1, 0);
                continue;
            }
            let arrived = if pe == me {
                self.progress.undone[me][chunk] == 0
            } else {
                self.shmem.signal_fetch(self.memory.result_signal(pe, me, chunk)) >= self.pass
            };
            if !arrived {
                return new;
            }
            self.rec.enter(Phase::Combine);
            if pe == me { self.combine_own(chunk) } else { self.combine_chunk(pe, chunk) }
            self.progress.combine = (pe, chunk + 1);
            new = true;
        }
    }

    fn combine_own(&mut self, chunk: usize) {
        let (me, h) = (self.me(), self.config.hidden);
        let (routes, from) = (&self.saved.routes[me], &self.saved.inbound[me]);
        for j in self.chunk_range(routes.tokens.len(), chunk) {
            let token = routes.tokens[j] as usize;
            let places = &from.places[from.place_start[j] as usize..from.place_start[j + 1] as usize];
            // Summed apart and then added, and in the element type, as a row that came back would be.
            let row = &mut self.progress.row;
            row.fill(0.0);
            sum_places(&self.saved.batches, places, self.direction, row);
            kernels::axpy(&mut self.output[token * h..(token + 1) * h], 1.0, row);
            if self.direction == Direction::Backward {
                for (slot, &(e, k)) in routes.row(j).iter().zip(places) {
                    self.d_weights[slot.choice as usize] = self.saved.batches[e as usize].d_weight[k as usize];
                }
            }
        }
    }

    fn combine_chunk(&mut self, pe: usize, chunk: usize) {
        let (me, h, row_bytes) = (self.me(), self.config.hidden, self.memory.layout.row_bytes);
        let before = (0..pe).filter(|&p| p != me);
        let (first_row, first_slot) = before.fold((0, 0), |(rows, slots), p| {
            (rows + self.saved.routes[p].tokens.len(), slots + self.saved.routes[p].slots.len())
        });
        let routes = &self.saved.routes[pe];
        let range = self.chunk_range(routes.tokens.len(), chunk);
        let slots = routes.slot_start[range.start] as usize..routes.slot_start[range.end] as usize;
        let start = return_offset((first_row, first_slot), (range.start, slots.start), row_bytes, self.direction);
        let returns = self.memory.returns();
        let mut wire = vec![E::default(); h];
        for (k, j) in range.clone().enumerate() {
            let at = start + k * row_bytes;
            self.shmem.get(bytemuck::cast_slice_mut(&mut wire), returns.slice(at..at + row_bytes), me);
            E::widen(&wire, &mut self.progress.row);
            let token = routes.tokens[j] as usize;
            kernels::axpy(&mut self.output[token * h..(token + 1) * h], 1.0, &self.progress.row);
        }
        if self.direction == Direction::Backward {
            let mut d_weights = vec![0.0f32; slots.len()];
            let at = start + range.len() * row_bytes;
            self.shmem.get(bytemuck::cast_slice_mut(&mut d_weights), returns.slice(at..at + 4 * slots.len()), me);
            for (slot, d) in routes.slots[slots].iter().zip(d_weights) {
                self.d_weights[slot.choice as usize] = d;
            }
        }
    }

    // ---- the end, and waiting ----------------------------------------------------------------------------------

    fn is_done(&self) -> bool {
        let p = &self.progress;
        p.placed
            && p.combine.0 == self.shmem.n_pes()
            && p.filler.is_empty()
            && self.peers().all(|pe| {
                let incoming = self.chunks(self.saved.inbound[pe].rows);
                p.sent[pe] == self.chunks(self.saved.routes[pe].tokens.len()) && p.returned[pe] == incoming
            })
            && p.tiles_left.iter().all(|&left| left == 0)
    }

    /// Waits for anything that would let the pass go on.
    fn wait(&mut self) -> Result<(), MoeError> {
        let mut waits = Vec::new();
        let mut names = Vec::new();
        for pe in self.peers() {
            let (incoming, outgoing) = (self.saved.inbound[pe].rows, self.saved.routes[pe].tokens.len());
            if !self.progress.headers[pe] {
                waits.push(self.header_wait(pe));
                names.push((pe, "its counts"));
            } else if self.progress.gathered[pe] < self.chunks(incoming) {
                waits.push(self.chunk_wait(pe, self.progress.gathered[pe]));
                names.push((pe, "its rows"));
            }
            let sent = self.progress.sent[pe];
            if sent < self.chunks(outgoing)
                && let Some(wait) = self.credit_wait(pe, sent)
            {
                waits.push(wait);
                names.push((pe, "room in its window"));
            }
        }
        let (pe, chunk) = self.progress.combine;
        if pe < self.shmem.n_pes() && pe != self.me() {
            let signal = self.memory.result_signal(pe, self.me(), chunk);
            waits.push(Wait { signal, cmp: Cmp::Ge, value: self.pass });
            names.push((pe, "its results"));
        }
        let phase = self.rec.enter(Phase::Waiting);
        match self.shmem.wait_until_any(&waits, Instant::now() + self.options.wait_limit) {
            Ok(_) => Ok(()),
            Err(timeout) => {
                let (pe, what) = names[timeout.index];
                Err(MoeError::wait(self.me(), Some(pe), what, phase, timeout))
            }
        }
    }

    fn barrier(&mut self, what: &'static str) -> Result<(), MoeError> {
        let phase = self.rec.enter(Phase::Waiting);
        self.shmem
            .barrier_all(Instant::now() + self.options.wait_limit)
            .map_err(|timeout| MoeError::wait(self.me(), None, what, phase, timeout))
    }
}

/// Adds the results of a row's places, in the order of experts, to `acc`.
fn sum_places<E: Element>(batches: &[Batch<E>], places: &[(u32, u32)], direction: Direction, acc: &mut [f32]) {
    let h = acc.len();
    for &(e, place) in places {
        let (batch, place) = (&batches[e as usize], place as usize);
        let weight = if direction == Direction::Forward { batch.weight[place] } else { 1.0 };
        kernels::axpy(acc, weight, &batch.out[place * h..(place + 1) * h]);
    }
}

/// Byte offset, in the sender's return area, of the results of its rows from `row` on: `base` and `first` are
/// (rows, slots) before its rows to this PE, and before the chunk among these. Only backward returns slots.
fn return_offset(base: (usize, usize), first: (usize, usize), row_bytes: usize, direction: Direction) -> usize {
    let slots = if direction == Direction::Forward { 0 } else { base.1 + first.1 };
    (base.0 + first.0) * row_bytes + slots * 4
}

/// Puts pieces one behind the other at `place` of `pe`, then signals: piece by piece and a fence where the peer's memory
/// can be stored to, and as one message with its signal where it cannot.
fn put_pieces<'d, T: Transport>(
    shmem: &Shmem<T>,
    place: Sym<u8>,
    pieces: impl Iterator<Item = &'d [u8]>,
    (signal, value): (Sym<u64>, u64),
    pe: usize,
    traffic: &mut super::metrics::Traffic,
) {
    traffic.signals += 1;
    if shmem.is_reachable(pe) {
        let mut at = 0;
        for piece in pieces.filter(|piece| !piece.is_empty()) {
            shmem.put(place.slice(at..at + piece.len()), piece, pe);
            at += piece.len();
            traffic.puts += 1;
        }
        shmem.fence();
        traffic.fences += 1;
        shmem.signal_op(signal, value, SignalOp::Set, pe);
    } else {
        let message: Vec<u8> = pieces.flatten().copied().collect();
        shmem.put_signal(place, &message, signal, value, SignalOp::Set, pe);
        traffic.puts += 1;
    }
}
