//! One pass (forward or backward) of the layer protocol on one PE; see `docs/protocol.md`.
//!
//! The PE's thread runs an event loop. Each iteration sends the chunks that have a free window slot, receives chunks,
//! computes ready tiles (one per thread; tiles that other PEs wait for first, then by expert), returns finished chunks
//! and adds returned results. If none of these is possible, it runs idle work (shared expert, weight gradients), and if
//! no idle work is left, it waits.

mod combine;
mod dispatch;
mod relaying;
mod wire;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::experts::{Batch, BatchTile, Mlp, Scratch, par_for_each, tiles};
use super::kernels::Element;
use super::memory::LayerMemory;
use super::relay::{Announced, RelayMap, RelayedSlots, Stream};
use super::replicas::Exchange;
use super::router::{Routes, Routing};
use crate::moe::spec::metrics::{Phase, Recorder};
use crate::moe::spec::{GradientSink, LayerConfig, Load, MlpGradients, Mode, MoeError, Options, Placement, ROUND_BITS};
use crate::shmem::{Cmp, Shmem, Transport, Wait};

/// Rows received from one PE, or this PE's own rows, and the destination of their results.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    rows: usize,
    slots: usize,
    /// Offsets of this PE's rows and slots in the sender's return area.
    return_row: usize,
    return_slot: usize,
    /// Tokens of the sender's whole batch.
    tokens: usize,
    /// By local expert: number of rows received for the expert, and the first of these rows in the expert's batch.
    counts: Vec<usize>,
    starts: Vec<usize>,
    /// The slots of row `j` are `batch_rows[slot_start[j]..slot_start[j + 1]]`, each as (local expert, row of its
    /// batch).
    slot_start: Vec<u32>,
    batch_rows: Vec<(u32, u32)>,
    /// Rows in the order in which their results return (`Routes::returns`). Until all rows have arrived, only a prefix of this order.
    returns: Vec<u32>,
    /// `returns` covers the rows whose last expert is below this one.
    returns_until: u32,
    /// Set if this PE is the relay for the rows: their slots on all PEs of this host, and one stream per PE of the host.
    relayed: Option<RelayedSlots>,
    streams: Vec<Stream>,
}

impl Inbound {
    fn batch_rows(&self, row: usize) -> &[(u32, u32)] {
        &self.batch_rows[self.slot_start[row] as usize..self.slot_start[row + 1] as usize]
    }

    fn first_expert(&self, row: usize) -> u32 {
        if let Some(relayed) = &self.relayed {
            return relayed.row(row).first().map_or(0, |slot| slot.0);
        }
        self.batch_rows(row).iter().map(|slot| slot.0).min().unwrap_or(0)
    }

    fn last_expert(&self, row: usize) -> u32 {
        if let Some(relayed) = &self.relayed {
            return relayed.row(row).last().map_or(0, |slot| slot.0);
        }
        self.batch_rows(row).iter().map(|slot| slot.0).max().unwrap_or(0)
    }

    /// Call it when the first `rows` rows have arrived. Extends `returns` by the rows whose position is final: rows are sorted by first
    /// expert, so later rows have no expert below `until`.
    fn extend_returns(&mut self, rows: usize) {
        let until = if rows == self.rows { u32::MAX } else { self.first_expert(rows - 1) };
        if until == self.returns_until {
            return;
        }
        let new = self.returns_until..until;
        let mut more: Vec<u32> =
            (0..rows as u32).filter(|&row| new.contains(&self.last_expert(row as usize))).collect();
        more.sort_by_key(|&row| self.last_expert(row as usize));
        self.returns.append(&mut more);
        self.returns_until = until;
    }
}

/// State that a forward pass keeps for its backward pass. Only the layer that returned it can use it.
#[derive(Debug, Default)]
pub struct Saved<E> {
    pub(super) layer: u64,
    pub(super) stage: SavedStage,
    /// Whether the caller supplied the routing.
    pub(super) external: bool,
    /// Routing decisions for this PE's tokens.
    pub(super) routing: Routing,
    /// Maximum tokens of a PE.
    pub(super) most_tokens: usize,
    /// The passes of the batch, one per block of tokens.
    pub(super) blocks: Vec<Block>,
    /// The rows of all blocks, one block after the other.
    pub(super) batches: Vec<Batch<E>>,
    /// The shared expert's batch; its rows are this PE's tokens.
    pub(super) shared: Batch<E>,
    /// Load sums of each PE; empty if no auxiliary loss has a coefficient.
    pub(super) loads: Vec<Load>,
}

/// The rows of one pass. A batch of more tokens than [`Layout::max_tokens`](crate::moe::Layout) runs as several passes, each over a block
/// of that many tokens. Token and choice numbers count from the block's first token.
#[derive(Debug, Default)]
pub(super) struct Block {
    /// Number of the block in the batch.
    pub(super) number: usize,
    /// The rows to send to each PE. With relays, the rows for all PEs of another host are merged, at the index of their relay.
    pub(super) routes: Vec<Routes>,
    /// With relays: the rows that each PE finally receives. Otherwise empty.
    pub(super) announced: Vec<Announced>,
    pub(super) inbound: Vec<Inbound>,
    /// Refills of the receive windows that the pass needs.
    pub(super) rounds: usize,
}

/// The last pass that used a [`Saved`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SavedStage {
    #[default]
    Forward,
    Backward,
}

/// Direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Dispatches tokens, returns expert outputs.
    Forward,
    /// Dispatches output gradients, returns the gradients of inputs and routing weights.
    Backward,
}

struct Tile {
    expert: usize,
    /// Whether all rows are this PE's own. No other PE waits for the results of such a tile.
    is_own: bool,
    rows: Range<usize>,
    missing: usize,
}

/// Maps the rows of one local expert to tiles. Each segment is a run of rows, split into tiles of nearly equal size.
#[derive(Default)]
struct TileMap {
    /// (first row, end row, first tile, number of tiles).
    segments: Vec<(usize, usize, usize, usize)>,
}

impl TileMap {
    fn tile(&self, row: usize) -> Option<usize> {
        let &(start, end, first, count) = self.segments.iter().find(|s| s.0 <= row && row < s.1)?;
        // The tile k with floor(n k / count) <= row - start < floor(n (k + 1) / count), which is how `tiles` splits
        // rows.
        Some(first + ((row - start + 1) * count - 1) / (end - start))
    }
}

/// Inputs, outputs and state of one pass.
pub struct Engine<'a, T: Transport, E: Element> {
    pub shmem: &'a Shmem<T>,
    pub memory: &'a LayerMemory,
    pub config: &'a LayerConfig,
    pub placement: &'a Placement,
    pub options: &'a Options,
    pub experts: &'a [Mlp<E>],
    pub shared: Option<&'a Mlp<E>>,
    /// One per thread.
    pub scratch: &'a mut [Scratch],
    pub rec: &'a mut Recorder,
    pub credits_used: &'a mut [u64],
    /// Set if a row is sent to another host only once, to a relay.
    pub relay_map: Option<RelayMap>,
    /// Like `credits_used`, indexed by relayed stream.
    pub stream_credits: &'a mut [u64],
    pub saved: &'a mut Saved<E>,
    pub block: &'a mut Block,
    /// Whether this is the last pass of the batch. A backward then computes the weight gradients of all blocks.
    pub is_last: bool,
    pub direction: Direction,
    /// Number of this pass and of its forward pass, each from 1.
    pub pass: u64,
    pub forward: u64,
    /// `[tokens, hidden]` for the block's tokens: inputs, or output gradients.
    pub input: &'a [E],
    /// `[tokens, hidden]`, accumulated: outputs, or input gradients.
    pub output: &'a mut [f32],
    /// Backward: gradient of each routing weight, `[tokens, top_k]`.
    pub d_weights: &'a mut [f32],
    /// Backward: weight gradients of the local experts and of the shared expert.
    pub expert_grads: ExpertGradients<'a>,
    pub shared_grads: &'a mut MlpGradients,
    /// Backward: sums gradients over the groups that hold the same experts.
    pub exchange: Option<&'a mut (dyn Exchange + 'a)>,
    pub progress: PassProgress,
}

/// Destination of the local experts' weight gradients.
pub enum ExpertGradients<'a> {
    /// The layer's own buffers, by local expert.
    Own(&'a mut [MlpGradients]),
    /// The caller's buffers.
    Sink(&'a mut GradientSink<'a>),
}

/// Progress of a pass.
#[derive(Default)]
pub struct PassProgress {
    sent: Vec<usize>,
    headers: Vec<bool>,
    batches_assigned: bool,
    received_slots: Vec<Vec<usize>>,
    gathered: Vec<usize>,
    /// By source and received row: number of slots whose tile has not been computed, plus number of partial results of this host's PEs that
    /// have not arrived.
    pending: Vec<Vec<u32>>,
    /// By source: the number of leading entries of `returns` whose rows have been computed.
    computed: Vec<usize>,
    /// By source: number of chunks of results sent, and of the slots in these chunks.
    returned: Vec<usize>,
    returned_slots: Vec<usize>,
    /// By local expert and row of the expert's batch: the source PE, and the number of the row among those of the source.
    origin: Vec<Vec<(u32, u32)>>,
    tiles: Vec<Tile>,
    maps: Vec<TileMap>,
    /// Tiles whose rows have all arrived, as (all rows are this PE's own, expert, tile). Tiles that other PEs wait for
    /// run first; own tiles fill the gaps between arrivals.
    ready: BinaryHeap<Reverse<(bool, usize, usize)>>,
    tiles_left: Vec<usize>,
    /// Work that no other PE waits for; the next item is last.
    idle_work: Vec<IdleWork>,
    /// The next results to add: (PE, chunk), and the number of slots in that PE's earlier chunks.
    combine: (usize, usize),
    combined_slots: usize,
    row: Vec<f32>,
    /// By source: bytes of the received rows, for forwarding. Empty unless this PE is the relay for the source.
    relay_rows: Vec<Vec<u8>>,
    /// By source and PE of this host: number of chunks forwarded, and of chunks of partial results received.
    forwarded: Vec<Vec<usize>>,
    partials: Vec<Vec<usize>>,
}

impl PassProgress {
    /// Queues a tile whose rows have all arrived.
    fn mark_ready(&mut self, tile: usize) {
        let Tile { expert, is_own, .. } = self.tiles[tile];
        self.ready.push(Reverse((is_own, expert, tile)));
    }
}

#[derive(Clone)]
enum IdleWork {
    SharedTile(Range<usize>),
    SharedGradients,
    ExpertGradients(usize),
}

impl IdleWork {
    fn shared_rows(&self) -> Option<Range<usize>> {
        if let IdleWork::SharedTile(rows) = self { Some(rows.clone()) } else { None }
    }

    fn expert(&self) -> Option<usize> {
        if let IdleWork::ExpertGradients(expert) = self { Some(*expert) } else { None }
    }

    /// Whether another thread may run this item at the same time as `other`.
    fn can_run_with(&self, other: &IdleWork) -> bool {
        match self {
            IdleWork::SharedTile(_) => other.shared_rows().is_some(),
            IdleWork::SharedGradients => false,
            IdleWork::ExpertGradients(_) => other.expert().is_some(),
        }
    }
}

/// Minimum number of multiplications per product for which a tile is computed by another thread. They take some hundred microseconds, while
/// starting a thread takes about 20.
const THREAD_WORK: usize = 4 << 20;

/// Computes tiles in parallel.
fn run_tiles<E: Element>(scratch: &mut [Scratch], work: Vec<(&Mlp<E>, BatchTile<'_, E>)>, is_forward: bool) {
    par_for_each(scratch, work, |scratch, (mlp, tile)| match is_forward {
        true => tile.forward(mlp, scratch),
        false => tile.backward(mlp, scratch),
    });
}

impl<T: Transport, E: Element> Engine<'_, T, E> {
    fn me(&self) -> usize {
        self.shmem.my_pe()
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<T, E> {
        // Each PE starts with the next PE, so that not all write to PE 0 first.
        let (me, n) = (self.me(), self.shmem.n_pes());
        (1..n).map(move |k| (me + k) % n)
    }

    fn chunk_rows(&self) -> usize {
        self.memory.layout.chunk_rows
    }

    /// Rows of chunk `chunk`, out of `rows` rows.
    fn chunk_range(&self, rows: usize, chunk: usize) -> Range<usize> {
        let start = chunk * self.chunk_rows();
        start..rows.min(start + self.chunk_rows())
    }

    fn chunks(&self, rows: usize) -> usize {
        rows.div_ceil(self.chunk_rows())
    }

    /// Signal value of a chunk in this pass. Values increase from pass to pass and with each reuse of a window slot.
    fn stamp(&self, chunk: usize) -> u64 {
        (self.pass << ROUND_BITS) + (chunk / self.memory.layout.window_chunks) as u64 + 1
    }

    /// Runs the pass to completion.
    ///
    /// # Errors
    ///
    /// Returns `MoeError::Protocol` if a peer's header or rows are invalid, and a wait error if a peer is lost or the
    /// deadline passes.
    pub fn run(&mut self) -> Result<(), MoeError> {
        self.begin();
        match self.options.mode {
            Mode::Pipelined => self.run_pipelined()?,
            Mode::Bulk => self.run_bulk()?,
        }
        let window = self.memory.layout.window_chunks;
        for pe in self.peers() {
            self.credits_used[pe] += self.chunks(self.block.routes[pe].tokens.len()).saturating_sub(window) as u64;
        }
        self.record_stream_credits();
        Ok(())
    }

    fn run_pipelined(&mut self) -> Result<(), MoeError> {
        self.send_headers();
        self.send_chunks(usize::MAX);
        self.gather_own();
        loop {
            self.send_chunks(usize::MAX);
            let arrived =
                self.receive_headers()? | self.gather_chunks()? | self.forward_rows() | self.receive_partials();
            if self.run_ready_tiles() {
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
            if !self.run_idle_work() {
                self.wait()?;
            }
        }
    }

    /// Bulk-synchronous all-to-all: the same phases, separated by barriers.
    fn run_bulk(&mut self) -> Result<(), MoeError> {
        self.send_headers();
        self.gather_own();
        self.barrier("its counts, at a barrier")?;
        self.receive_headers()?;
        self.check_arrived("counts", |pe| self.progress.headers[pe])?;
        for round in 0..self.block.rounds {
            let end = (round + 1) * self.memory.layout.window_chunks;
            self.send_chunks(end);
            self.barrier("its rows, at a barrier")?;
            self.gather_chunks()?;
            self.check_arrived("rows", |pe| {
                let chunks = self.chunks(self.block.inbound[pe].rows).min(end);
                self.progress.gathered[pe] >= chunks || self.writer_of(pe) != pe
            })?;
            if round + 1 < self.block.rounds {
                self.barrier("its windows emptied, at a barrier")?;
            }
        }
        self.gather_chunks()?;
        // Relays forward rows and receive partial results only within a host, and each PE detects by itself when both are complete, so no
        // barrier is needed.
        while !self.has_forwarded() {
            if !(self.forward_rows() | self.gather_chunks()?) {
                self.wait()?;
            }
        }
        while self.run_ready_tiles() {}
        while self.run_idle_work() {}
        self.barrier("its experts, at a barrier")?;
        self.return_chunks();
        while !self.has_returned() {
            if self.receive_partials() {
                self.return_chunks();
            } else {
                self.wait()?;
            }
        }
        self.barrier("its results, at a barrier")?;
        self.combine_arrived();
        self.check_arrived("results", |pe| pe < self.progress.combine.0)?;
        debug_assert!(self.is_done());
        Ok(())
    }

    /// Checks after a barrier of bulk mode that what each peer sent before the barrier has arrived, since no later step waits for it.
    fn check_arrived(&self, what: &str, has_arrived: impl Fn(usize) -> bool) -> Result<(), MoeError> {
        match self.peers().find(|&pe| !has_arrived(pe)) {
            Some(pe) => {
                Err(MoeError::Protocol { pe: self.shmem.world_pe(pe), what: format!("no {what} before a barrier") })
            }
            None => Ok(()),
        }
    }

    fn begin(&mut self) {
        let (n, local) = (self.shmem.n_pes(), self.experts.len());
        let mut p = PassProgress {
            sent: vec![0; n],
            headers: vec![false; n],
            received_slots: vec![vec![0; local]; n],
            gathered: vec![0; n],
            pending: vec![Vec::new(); n],
            computed: vec![0; n],
            returned: vec![0; n],
            returned_slots: vec![0; n],
            origin: vec![Vec::new(); local],
            maps: (0..local).map(|_| TileMap::default()).collect(),
            tiles_left: vec![0; local],
            row: vec![0.0; self.config.hidden],
            relay_rows: vec![Vec::new(); n],
            forwarded: vec![Vec::new(); n],
            partials: vec![Vec::new(); n],
            ..PassProgress::default()
        };
        if let Some(shared) = self.shared {
            if self.direction == Direction::Backward {
                p.idle_work.push(IdleWork::SharedGradients);
            } else {
                self.saved.shared.resize_forward(shared.config(), self.config.hidden, self.saved.routing.tokens);
            }
            let tokens = 0..self.saved.routing.tokens;
            let mut shared_tiles: Vec<_> = tiles(tokens, self.options.tile_rows()).map(IdleWork::SharedTile).collect();
            shared_tiles.reverse();
            p.idle_work.append(&mut shared_tiles);
        }
        self.progress = p;
        let me = self.me();
        self.progress.headers[me] = true;
        if self.direction == Direction::Forward {
            self.block.inbound = (0..n).map(|_| Inbound::default()).collect();
            let routes = &self.block.routes[me];
            let (rows, slots) = (routes.tokens.len(), routes.slots.len());
            let counts: Vec<usize> = routes.counts(local).iter().map(|&c| c as usize).collect();
            let earlier = |batch: &Batch<E>| if self.block.number == 0 { 0 } else { batch.rows };
            let (starts, returns) = (self.saved.batches.iter().map(earlier).collect(), routes.returns.clone());
            self.block.inbound[me] = Inbound { rows, slots, counts, starts, returns, ..Inbound::default() };
            for e in 0..local {
                let own = self.own_rows(e);
                self.saved.batches[e].resize_forward(&self.config.expert, self.config.hidden, own.end);
                self.progress.origin[e].resize(own.end, (0, 0));
                // The own rows are enough for separate tiles, which can be computed before other PEs' rows arrive.
                if 2 * own.len() >= self.options.tile_rows() {
                    self.add_tiles(e, own.clone(), own.start);
                }
            }
        } else {
            self.progress.headers.fill(true);
            for batch in &mut self.saved.batches {
                batch.resize_backward(&self.config.expert, self.config.hidden);
            }
            if let Some(shared) = self.shared {
                self.saved.shared.resize_backward(shared.config(), self.config.hidden);
            }
            self.assign_batch_rows();
        }
        self.begin_streams();
    }

    /// This PE's own rows in a local expert's batch: the first of the block.
    fn own_rows(&self, expert: usize) -> Range<usize> {
        let Inbound { starts, counts, .. } = &self.block.inbound[self.me()];
        starts[expert]..starts[expert] + counts[expert]
    }

    /// Splits rows of an expert into tiles. Rows below `present` have been copied to the batch already.
    fn add_tiles(&mut self, expert: usize, rows: Range<usize>, present: usize) {
        let own = self.own_rows(expert);
        let p = &mut self.progress;
        let first = p.tiles.len();
        for tile in tiles(rows.clone(), self.options.tile_rows()) {
            let missing = tile.end.saturating_sub(present.max(tile.start));
            p.tiles.push(Tile { expert, is_own: tile.end <= own.end, rows: tile, missing });
            if missing == 0 {
                p.mark_ready(p.tiles.len() - 1);
            }
        }
        let count = p.tiles.len() - first;
        p.tiles_left[expert] += count;
        if count > 0 {
            p.maps[expert].segments.push((rows.start, rows.end, first, count));
        }
    }

    /// Assigns the rows of every PE to rows of the experts' batches, once all counts are known: own rows first, then
    /// those of the following PEs. The order does not depend on arrival, so sums over rows are reproducible.
    fn assign_batch_rows(&mut self) {
        let (me, n) = (self.me(), self.shmem.n_pes());
        let forward = self.direction == Direction::Forward;
        for e in 0..self.experts.len() {
            let own = self.own_rows(e);
            let mut total = own.start;
            for k in 0..n {
                let from = &mut self.block.inbound[(me + k) % n];
                from.starts[e] = total;
                total += from.counts[e];
            }
            if forward {
                self.saved.batches[e].resize_forward(&self.config.expert, self.config.hidden, total);
            } else if total == own.start && self.is_last {
                self.progress.idle_work.push(IdleWork::ExpertGradients(e));
            }
            self.progress.origin[e].resize(total, (0, 0));
            let tiled = self.progress.maps[e].segments.last().map_or(own.start, |s| s.1);
            // Forward has gathered its own rows before this call. Backward gathers them after it.
            self.add_tiles(e, tiled..total, if forward { own.end } else { 0 });
        }
        self.progress.batches_assigned = true;
    }

    /// Maximum number of work items to run before the peers are polled again: one per thread. Without peers, threads run all items at once.
    fn pieces(&self) -> usize {
        match self.scratch.len() {
            1 => 1,
            _ if self.shmem.n_pes() == 1 => usize::MAX,
            threads => threads,
        }
    }

    /// Computes ready tiles, at most `pieces()`. Returns false if none was ready.
    fn run_ready_tiles(&mut self) -> bool {
        let (row, pieces) = (self.config.hidden * self.config.expert.intermediate, self.pieces());
        let p = &mut self.progress;
        let mut chosen: Vec<usize> = Vec::new();
        while let Some(&Reverse((.., tile))) = p.ready.peek()
            && (chosen.is_empty() || chosen.len() < pieces && p.tiles[tile].rows.len() * row >= THREAD_WORK)
        {
            p.ready.pop();
            chosen.push(tile);
        }
        if chosen.is_empty() {
            return false;
        }
        self.rec.enter(Phase::Expert);
        let is_forward = self.direction == Direction::Forward;
        chosen.sort_unstable_by_key(|&tile| p.tiles[tile].rows.start);
        let mut work = Vec::with_capacity(chosen.len());
        for (expert, (batch, mlp)) in self.saved.batches.iter_mut().zip(self.experts).enumerate() {
            let tiles = chosen.iter().map(|&tile| &p.tiles[tile]).filter(|tile| tile.expert == expert);
            let rows: Vec<Range<usize>> = tiles.map(|tile| tile.rows.clone()).collect();
            if rows.is_empty() {
                continue;
            }
            work.extend(batch.tiles(mlp, &rows, is_forward).into_iter().map(|tile| (mlp, tile)));
        }
        run_tiles(self.scratch, work, is_forward);
        let rows: usize = chosen.iter().map(|&tile| p.tiles[tile].rows.len()).sum();
        self.rec.computed(self.config.expert.forward_flop_per_row(self.config.hidden) * rows as f64);
        for tile in chosen {
            let Tile { expert, rows, .. } = &p.tiles[tile];
            for &(pe, row) in &p.origin[*expert][rows.clone()] {
                p.pending[pe as usize][row as usize] -= 1;
            }
            p.tiles_left[*expert] -= 1;
            if !is_forward && self.is_last && p.tiles_left[*expert] == 0 {
                p.idle_work.push(IdleWork::ExpertGradients(*expert));
            }
        }
        true
    }

    /// Runs one or more items of idle work of the same kind. Returns false if no idle work was left.
    fn run_idle_work(&mut self) -> bool {
        let pieces = self.pieces();
        let idle_work = &mut self.progress.idle_work;
        let Some(first) = idle_work.pop() else { return false };
        self.rec.enter(Phase::Expert);
        let mut work = vec![first];
        while work.len() < pieces
            && let Some(next) = idle_work.pop_if(|next| next.can_run_with(&work[0]))
        {
            work.push(next);
        }
        let is_forward = self.direction == Direction::Forward;
        if let (IdleWork::SharedGradients, Some(mlp)) = (&work[0], self.shared) {
            self.saved.shared.weight_gradients(mlp, &mut self.scratch[0], self.shared_grads.slices_mut());
        }
        if let Some(mlp) = self.shared {
            let rows: Vec<Range<usize>> = work.iter().filter_map(IdleWork::shared_rows).collect();
            let tiles = self.saved.shared.tiles(mlp, &rows, is_forward);
            run_tiles(self.scratch, tiles.into_iter().map(|tile| (mlp, tile)).collect(), is_forward);
        }
        let of: Vec<usize> = work.iter().filter_map(IdleWork::expert).collect();
        if of.is_empty() {
            return true;
        }
        let (batches, experts) = (&self.saved.batches, self.experts);
        match &mut self.expert_grads {
            ExpertGradients::Sink(sink) => {
                for &e in &of {
                    sink(e, &mut |buffers| batches[e].weight_gradients(&experts[e], &mut self.scratch[0], buffers));
                }
            }
            ExpertGradients::Own(grads) => {
                let computed = grads.iter_mut().enumerate().filter(|(expert, _)| of.contains(expert));
                par_for_each(self.scratch, computed.collect(), |scratch, (e, grads)| {
                    batches[e].weight_gradients(&experts[e], scratch, grads.slices_mut());
                });
            }
        }
        let rows: usize = of.iter().map(|&e| batches[e].rows).sum();
        self.rec.computed(self.config.expert.forward_flop_per_row(self.config.hidden) * rows as f64);
        if let (Some(exchange), ExpertGradients::Own(grads)) = (&mut self.exchange, &mut self.expert_grads) {
            self.rec.enter(Phase::AllReduce);
            of.iter().for_each(|&e| exchange.ready(e, &grads[e]));
            exchange.poll(grads);
        }
        true
    }

    fn is_done(&self) -> bool {
        let p = &self.progress;
        p.batches_assigned
            && p.combine.0 == self.shmem.n_pes()
            && p.idle_work.is_empty()
            && self.has_returned()
            && self.peers().all(|pe| p.sent[pe] == self.chunks(self.block.routes[pe].tokens.len()))
            && p.tiles_left.iter().all(|&left| left == 0)
    }

    /// Whether all results for other PEs have been sent.
    fn has_returned(&self) -> bool {
        self.peers().all(|pe| self.progress.returned[pe] == self.chunks(self.block.inbound[pe].rows))
    }

    /// Waits for any event that lets the pass make progress.
    fn wait(&mut self) -> Result<(), MoeError> {
        let mut waits = Vec::new();
        // If all waits time out, the error names the first entry.
        let mut names = Vec::new();
        for pe in self.peers() {
            let (incoming, outgoing) = (self.block.inbound[pe].rows, self.block.routes[pe].tokens.len());
            if !self.progress.headers[pe] {
                waits.push(self.header_wait(pe));
                names.push((pe, "its counts"));
            } else if self.progress.batches_assigned && self.progress.gathered[pe] < self.chunks(incoming) {
                // Chunks cannot be gathered before the last header has arrived. A wait for a chunk that has arrived already would return
                // immediately, and this PE would spin.
                waits.push(self.chunk_wait(pe, self.progress.gathered[pe]));
                names.push((self.writer_of(pe), "its rows"));
            }
            let sent = self.progress.sent[pe];
            if sent < self.chunks(outgoing)
                && let Some(wait) = self.credit_wait(pe, sent)
            {
                waits.push(wait);
                names.push((pe, "room in its window"));
            }
        }
        self.add_stream_waits(&mut waits, &mut names);
        let (pe, chunk) = self.progress.combine;
        // Bulk mode adds results after a barrier.
        if self.options.mode == Mode::Pipelined && pe < self.shmem.n_pes() && pe != self.me() {
            let signal = self.memory.result_signal(pe, self.me(), chunk);
            waits.push(Wait { signal, cmp: Cmp::Ge, value: self.pass });
            names.push((pe, "its results"));
        }
        let phase = self.rec.enter(Phase::Waiting);
        let pes: Vec<usize> = names.iter().map(|&(pe, _)| pe).collect();
        match self.shmem.wait_until_any_of(&waits, &pes, self.options.deadline()) {
            Ok(_) => Ok(()),
            Err(timeout) => {
                let (pe, what) = names[timeout.index];
                Err(MoeError::wait(self.shmem, pe, what, phase, timeout))
            }
        }
    }

    fn barrier(&mut self, what: &'static str) -> Result<(), MoeError> {
        let phase = self.rec.enter(Phase::Waiting);
        self.shmem
            .barrier_all(self.options.deadline())
            .map_err(|timeout| MoeError::wait(self.shmem, timeout.index, what, phase, timeout))
    }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::super::router::{Routing, routes};
    use super::*;

    /// The rows of `routes` as their receiver stores them.
    fn inbound(routes: &Routes) -> Inbound {
        let batch_rows = routes.slots.iter().map(|slot| (slot.expert, 0)).collect();
        Inbound { rows: routes.tokens.len(), slot_start: routes.slot_start.clone(), batch_rows, ..Inbound::default() }
    }

    #[test]
    fn sender_and_receiver_order_rows_by_expert() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        for round in 0..200 {
            let (experts, top_k, pes) = (rng.random_range(3..20), rng.random_range(1..4), rng.random_range(1..4));
            let tokens = [0, 1, 7, 200][round % 4];
            let chosen = (0..tokens)
                .flat_map(|_| rand::seq::index::sample(&mut rng, experts, top_k).into_vec())
                .map(|expert| expert as u32)
                .collect();
            let weights = vec![0.5; tokens * top_k];
            let mut routing = Routing::default();
            (routing.tokens, routing.chosen, routing.weights) = (tokens, chosen, weights);
            let all = routes(&routing, &Placement::even(experts, pes), 0, top_k);
            assert_eq!(all.iter().map(|routes| routes.slots.len()).sum::<usize>(), tokens * top_k);
            for routes in &all {
                let mut from = inbound(routes);
                let rows = routes.tokens.len();
                let sorted: Vec<_> = (0..rows).map(|row| (from.first_expert(row), routes.tokens[row])).collect();
                assert!(sorted.is_sorted() && routes.slot_start.len() == rows + 1);
                let returns: Vec<_> = routes.returns.iter().map(|&row| (from.last_expert(row as usize), row)).collect();
                assert!(returns.is_sorted() && returns.len() == rows);
                // The receiver extends the order chunk by chunk and never changes its prefix.
                let chunk_rows = rng.random_range(1..40);
                for end in (chunk_rows..rows).step_by(chunk_rows).chain((rows > 0).then_some(rows)) {
                    from.extend_returns(end);
                    assert_eq!(from.returns, routes.returns[..from.returns.len()]);
                    assert!(from.returns.iter().all(|&row| (row as usize) < end));
                    let until = from.first_expert(end - 1);
                    let known = returns.iter().filter(|(last, row)| *last < until && (*row as usize) < end).count();
                    assert!(from.returns.len() >= known);
                }
                assert_eq!(from.returns, routes.returns);
            }
        }
    }
}
