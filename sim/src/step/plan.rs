//! The rows between the PEs of an expert-parallel group, their chunks, and the tiles that they form at the receivers.

use std::ops::Range;

/// The rows that one PE sends to another: for each row its experts, numbered as at the receiver.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// The experts of row j are `experts[starts[j]..starts[j + 1]]`.
    pub starts: Vec<u32>,
    /// The experts of all rows.
    pub experts: Vec<u32>,
    /// The rows in the order in which their results return.
    pub returns: Vec<u32>,
    /// How the rows cross the network through a relay; `None` if they are sent to the receiver directly.
    pub relay: Option<Relay>,
}

/// How rows cross the network together with those for the other PEs of the destination host: each token is sent once, to a relay on that
/// host, which forwards the rows and sums the results.
#[derive(Clone, Debug, PartialEq)]
pub struct Relay {
    /// The relay's number in the group. All PEs of the host have the same relay.
    pub pe: u32,
    /// Number of rows that cross for all PEs of the host.
    pub rows: u32,
    /// For each row its index among the crossing rows, ascending.
    pub places: Vec<u32>,
    /// For each result, in the order of `returns`, its index among the crossing results.
    pub result_places: Vec<u32>,
}

impl Rows {
    pub(super) fn len(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// A row's experts.
    fn of(&self, row: usize) -> &[u32] {
        &self.experts[self.starts[row] as usize..self.starts[row + 1] as usize]
    }

    /// For each chunk its rows, and the range in `returns` of the results that have the chunk's number. If a relay forwards the rows, a
    /// chunk has the part of a crossing for this receiver, which may be empty.
    fn chunks(&self, chunk_rows: usize) -> Vec<[Range<usize>; 2]> {
        let Some(relay) = &self.relay else {
            let run = |start: usize| start..self.len().min(start + chunk_rows);
            return (0..self.len()).step_by(chunk_rows).map(|start| [run(start), run(start)]).collect();
        };
        let cut = |places: &[u32], chunk: usize| places.partition_point(|&place| (place as usize) < chunk * chunk_rows);
        let chunks = 0..(relay.rows as usize).div_ceil(chunk_rows);
        let of = |chunk| [&relay.places, &relay.result_places].map(|at| cut(at, chunk)..cut(at, chunk + 1));
        chunks.map(of).collect()
    }
}

/// Rows that arrive under one signal, as numbered at their receiver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chunk {
    /// Number in the group of the sender.
    pub from: u32,
    /// Number of the chunk among those of its sender.
    pub index: u32,
    pub rows: u32,
    pub slots: u32,
    /// Rows and slots of the results that return as chunk `index`.
    pub result_rows: u32,
    pub result_slots: u32,
    /// If a relay forwards the chunk: the relay's number in the group, and the index of the crossing in the relay's plan.
    pub relay: Option<(u32, u32)>,
}

/// Rows for the PEs of a host that cross the network under one signal, as numbered at their relay.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Crossing {
    /// Number in the group of the sender.
    pub from: u32,
    /// Number of rows, which is also that of result rows.
    pub rows: u32,
    /// Slots of the rows, and of the results that return with this crossing's index.
    pub slots: u32,
    pub result_slots: u32,
    /// The PEs that receive a part, by number in the group, and their chunks.
    pub parts: Vec<(u32, u32)>,
    /// Number of PEs that return a part of its results.
    pub result_parts: u32,
}

/// Rows of one expert that are computed at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tile {
    pub expert: u32,
    pub rows: u32,
    /// Whether it is formed before the other PEs' counts arrive.
    pub early: bool,
    /// Whether all its rows are the PE's own. No other PE waits for the results of such a tile.
    pub own: bool,
}

/// The number of slots of a chunk in a tile: of received rows, or of results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Piece {
    pub chunk: u32,
    pub tile: u32,
    pub slots: u32,
}

/// The tiles of a pass, and their rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Tiling {
    pub tiles: Vec<Tile>,
    /// By chunk: the pieces of chunk c are `pieces[chunk_starts[c]..chunk_starts[c + 1]]`.
    pub pieces: Vec<Piece>,
    pub chunk_starts: Vec<u32>,
    /// By tile: the pieces of result chunks.
    pub results: Vec<Piece>,
    pub tile_starts: Vec<u32>,
    /// Number of tiles of each expert.
    pub tiles_of_expert: Vec<u32>,
}

/// The rows that one PE of a group receives and computes.
#[derive(Clone, Debug)]
pub(super) struct PePlan {
    pub tokens: u32,
    /// By sender, then by number; includes chunks of the PE's own rows.
    pub chunks: Vec<Chunk>,
    /// Start of each sender's chunks, and the total.
    pub first_chunk: Vec<u32>,
    /// Crossings that this PE forwards, by sender; and the start of each sender's crossings, and the total.
    pub crossings: Vec<Crossing>,
    pub first_crossing: Vec<u32>,
    pub expert_rows: Vec<u32>,
    pub forward: Tiling,
    pub backward: Tiling,
}

/// The plan of an expert-parallel group for a step. Groups with the same routes may share a plan.
#[derive(Clone, Debug)]
pub struct GroupPlan {
    pub(super) pes: Vec<PePlan>,
    /// Maximum number of chunks between two PEs.
    pub(super) most_chunks: u32,
}

/// The layer's rules for dividing rows into chunks and tiles.
pub struct Cutting<'f> {
    /// Rows of a full chunk.
    pub chunk_rows: usize,
    /// Minimum number of an expert's own rows for which tiles are formed before the other PEs' counts arrive.
    pub early_rows: usize,
    /// Divides consecutive rows of an expert into tiles.
    pub tiles: &'f dyn Fn(Range<usize>) -> Vec<Range<usize>>,
}

impl GroupPlan {
    /// Creates the plan of a group from the rows `rows[source][destination]`, and from the number of tokens and of experts of each PE.
    ///
    /// # Panics
    /// If the lengths of the three arguments differ.
    pub fn new(rows: &[Vec<Rows>], tokens: &[usize], experts: &[usize], cutting: &Cutting) -> GroupPlan {
        assert!(rows.len() == tokens.len() && rows.len() == experts.len(), "one for each PE");
        let mut pes: Vec<PePlan> = (0..rows.len())
            .map(|pe| {
                let from: Vec<&Rows> = rows.iter().map(|rows| &rows[pe]).collect();
                PePlan::new(pe, &from, tokens[pe], experts[pe], cutting)
            })
            .collect();
        cross(&mut pes, rows, cutting.chunk_rows);
        let chunks = |plan: &PePlan| {
            let of = plan.first_chunk.windows(2).map(|first| first[1] - first[0]);
            of.max().unwrap_or(0)
        };
        let most_chunks = pes.iter().map(chunks).max().unwrap_or(0);
        GroupPlan { pes, most_chunks }
    }

    /// Number of chunks in a pass, including those of the PEs' own rows.
    pub fn chunks(&self) -> usize {
        self.pes.iter().map(|pe| pe.chunks.len()).sum()
    }

    /// Rows of each expert, by PE of the group and its experts.
    pub fn expert_rows(&self) -> impl Iterator<Item = &[u32]> {
        self.pes.iter().map(|pe| &pe.expert_rows[..])
    }
}

/// Derives the crossings from the chunks of each PE.
fn cross(pes: &mut [PePlan], rows: &[Vec<Rows>], chunk_rows: usize) {
    for (source, rows) in rows.iter().enumerate() {
        for (pe, rows) in rows.iter().enumerate() {
            let Some(relay) = &rows.relay else { continue };
            let (at, all) = (relay.pe as usize, relay.rows as usize);
            let first = pes[at].first_crossing[source];
            if pes[at].crossings.len() == first as usize {
                let crossing = |start: usize| {
                    let rows = chunk_rows.min(all - start) as u32;
                    Crossing {
                        from: source as u32,
                        rows,
                        slots: 0,
                        result_slots: 0,
                        parts: Vec::new(),
                        result_parts: 0,
                    }
                };
                pes[at].crossings.extend((0..all).step_by(chunk_rows).map(crossing));
            }
            for (chunk, number) in pes[pe].from(source).zip(first..) {
                let part = &mut pes[pe].chunks[chunk as usize];
                part.relay = Some((relay.pe, number));
                let part = *part;
                let crossing = &mut pes[at].crossings[number as usize];
                crossing.slots += part.slots;
                crossing.result_slots += part.result_slots;
                crossing.result_parts += u32::from(part.result_rows > 0);
                crossing.parts.extend((part.rows > 0).then_some((pe as u32, chunk)));
            }
        }
        pes.iter_mut().for_each(|pe| pe.first_crossing.push(pe.crossings.len() as u32));
    }
}

impl PePlan {
    fn new(me: usize, from: &[&Rows], tokens: usize, experts: usize, cutting: &Cutting) -> PePlan {
        let n = from.len();
        let mut chunks = Vec::new();
        let mut first_chunk = vec![0];
        let mut counts = vec![vec![0usize; experts]; n];
        for (source, rows) in from.iter().enumerate() {
            rows.experts.iter().for_each(|expert| counts[source][*expert as usize] += 1);
            for (index, [out, back]) in rows.chunks(cutting.chunk_rows).into_iter().enumerate() {
                let result_slots = rows.returns[back.clone()].iter().map(|&row| rows.of(row as usize).len() as u32);
                chunks.push(Chunk {
                    from: source as u32,
                    index: index as u32,
                    rows: out.len() as u32,
                    slots: if out.is_empty() { 0 } else { rows.starts[out.end] - rows.starts[out.start] },
                    result_rows: back.len() as u32,
                    result_slots: result_slots.sum(),
                    relay: None,
                });
            }
            first_chunk.push(chunks.len() as u32);
        }
        let total = |expert: usize| counts.iter().map(|counts| counts[expert]).sum::<usize>();
        let expert_rows: Vec<u32> = (0..experts).map(|expert| total(expert) as u32).collect();
        // The batch of an expert has the PE's own rows first, then those of the next PE, and so on.
        let starts = starts(me, &counts);
        let tiling = |early: bool| {
            let mut tiling = Tiling::default();
            let mut tile_at: Vec<Vec<u32>> = Vec::with_capacity(experts);
            for expert in 0..experts {
                let (own, all) = (counts[me][expert], expert_rows[expert] as usize);
                let cut = if early && own >= cutting.early_rows { own } else { 0 };
                let mut at = Vec::with_capacity(all);
                let before = tiling.tiles.len();
                for (run, early) in [(0..cut, true), (cut..all, false)] {
                    for tile in (cutting.tiles)(run) {
                        at.resize(at.len() + tile.len(), tiling.tiles.len() as u32);
                        let (rows, is_own) = (tile.len() as u32, tile.end <= own);
                        tiling.tiles.push(Tile { expert: expert as u32, rows, early, own: is_own });
                    }
                }
                tiling.tiles_of_expert.push((tiling.tiles.len() - before) as u32);
                tile_at.push(at);
            }
            tiling.fill(from, &starts, &tile_at, cutting.chunk_rows);
            tiling
        };
        let (forward, backward) = (tiling(true), tiling(false));
        let (crossings, first_crossing) = (Vec::new(), vec![0]);
        PePlan { tokens: tokens as u32, chunks, first_chunk, crossings, first_crossing, expert_rows, forward, backward }
    }

    pub fn tiling(&self, backward: bool) -> &Tiling {
        if backward { &self.backward } else { &self.forward }
    }

    /// The chunks of a sender.
    pub fn from(&self, sender: usize) -> Range<u32> {
        self.first_chunk[sender]..self.first_chunk[sender + 1]
    }

    /// The chunks of a sender that are not forwarded by a relay.
    pub fn direct_from(&self, sender: usize) -> Range<u32> {
        let all = self.from(sender);
        // A relay forwards either all chunks of a sender or no chunk.
        match self.chunks[all.start as usize..all.end as usize].first() {
            Some(Chunk { relay: Some(_), .. }) => all.end..all.end,
            _ => all,
        }
    }

    /// The crossings of a sender that this PE forwards.
    pub fn crossings_from(&self, sender: usize) -> Range<u32> {
        self.first_crossing[sender]..self.first_crossing[sender + 1]
    }
}

/// Start of each PE's rows in each expert's batch.
fn starts(me: usize, counts: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let n = counts.len();
    let mut starts = vec![vec![0; counts[me].len()]; n];
    for expert in 0..counts[me].len() {
        let mut total = 0;
        for k in 0..n {
            let source = (me + k) % n;
            starts[source][expert] = total;
            total += counts[source][expert];
        }
    }
    starts
}

impl Tiling {
    /// Counts the slots of each chunk in each tile.
    fn fill(&mut self, from: &[&Rows], starts: &[Vec<usize>], tile_at: &[Vec<u32>], chunk_rows: usize) {
        self.chunk_starts.push(0);
        let mut next_chunk = 0;
        for (source, rows) in from.iter().enumerate() {
            let mut place = starts[source].clone();
            // The tile of each slot, in the order of `rows.experts`.
            let mut tiles = Vec::with_capacity(rows.experts.len());
            for &expert in &rows.experts {
                tiles.push(tile_at[expert as usize][place[expert as usize]]);
                place[expert as usize] += 1;
            }
            let of_row = |row: usize| &tiles[rows.starts[row] as usize..rows.starts[row + 1] as usize];
            for [out, back] in rows.chunks(chunk_rows) {
                count(&mut self.pieces, next_chunk, out.flat_map(of_row));
                self.chunk_starts.push(self.pieces.len() as u32);
                let returned = rows.returns[back].iter().flat_map(|&row| of_row(row as usize));
                count(&mut self.results, next_chunk, returned);
                next_chunk += 1;
            }
        }
        self.results.sort_by_key(|piece| piece.tile);
        let mut tile_starts = vec![0u32; self.tiles.len() + 1];
        self.results.iter().for_each(|piece| tile_starts[piece.tile as usize + 1] += 1);
        (1..tile_starts.len()).for_each(|tile| tile_starts[tile] += tile_starts[tile - 1]);
        self.tile_starts = tile_starts;
    }

    /// The pieces of a chunk, by tile.
    pub fn of_chunk(&self, chunk: u32) -> &[Piece] {
        &self.pieces[self.chunk_starts[chunk as usize] as usize..self.chunk_starts[chunk as usize + 1] as usize]
    }

    /// The pieces of result chunks of a tile.
    pub fn results_of(&self, tile: u32) -> &[Piece] {
        &self.results[self.tile_starts[tile as usize] as usize..self.tile_starts[tile as usize + 1] as usize]
    }
}

/// Appends the number of a chunk's slots in each tile. The linear search is short: a chunk has few tiles, since an expert's slots are
/// consecutive in its batch.
fn count<'t>(pieces: &mut Vec<Piece>, chunk: u32, tiles: impl Iterator<Item = &'t u32>) {
    let first = pieces.len();
    for &tile in tiles {
        match pieces[first..].iter_mut().rev().find(|piece| piece.tile == tile) {
            Some(piece) => piece.slots += 1,
            None => pieces.push(Piece { chunk, tile, slots: 1 }),
        }
    }
}
