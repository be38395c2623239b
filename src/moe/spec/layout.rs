//! Layout of the layer's symmetric memory.
//!
//! Per PE, for each of its `n_pes - 1` peers:
//!
//! - two headers (of even and of odd forward passes), each with its signal word;
//! - a window of `window_chunks` chunks, to which the peer writes rows, and a signal word per chunk;
//! - a credit word, to which the peer adds when it frees a slot of its window for *this* PE's rows;
//! - a result word per chunk that this PE may send to the peer;
//!
//! and one return area for the results of all peers. This PE's header to a peer has the offset of the peer's results in the area.

use std::ops::Range;

use super::config::LayerConfig;
use super::placement::Placement;
use super::{Balance, MoeError, Options};

/// Words of a header before the counts of local experts.
pub const HEADER_WORDS: usize = 6;

/// Number of low bits of a chunk's signal that hold the number of the window refill; the bits above hold the pass.
pub const ROUND_BITS: u32 = 24;

/// Words of a header to a PE with `local` experts, without the words for relays.
pub(crate) fn header_words(config: &LayerConfig, local: usize) -> usize {
    HEADER_WORDS + local + if config.has_losses() { 2 + 3 * config.n_experts } else { 0 }
}

/// Sizes of the layer's symmetric memory; the same on every PE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of other PEs.
    pub peers: usize,
    /// Maximum tokens on one PE in a pass.
    pub max_tokens: usize,
    /// Bytes of a row that is sent: `hidden` elements.
    pub row_bytes: usize,
    /// Maximum experts of a row on one PE, or on one host if rows are relayed.
    pub max_slots_per_row: usize,
    /// Rows of a full chunk.
    pub chunk_rows: usize,
    /// Chunks of a window.
    pub window_chunks: usize,
    /// Maximum chunks from one PE to another in a pass.
    pub max_chunks: usize,
    /// Words of a header.
    pub header_words: usize,
    /// Words of the counts that are exchanged before dispatch; 0 without a capacity factor or divided replicas.
    pub count_words: usize,
    /// Bytes of the return area.
    pub return_bytes: usize,
    /// Elements per piece of a moving expert; 0 if experts never move.
    pub move_len: usize,
    /// With relays: the maximum number of other PEs on a host. Otherwise 0.
    pub siblings: usize,
    /// With relays: the maximum number of sources for which one PE is the relay. Otherwise 0.
    pub served: usize,
    /// With relays: bytes of one sibling's partial results for the rows of one source.
    pub partial_bytes: usize,
}

/// Elements per piece of a moving expert; a piece has 1 MiB.
const MOVE_LEN: usize = 1 << 18;

impl Layout {
    /// Computes the sizes for a layer with at most `max_tokens` tokens per PE, and with rows whose elements have `element_bytes` bytes when
    /// they are sent. With `slots`, the sizes are enough for any placement with at most that many experts per PE.
    ///
    /// The windows for all peers together hold `budget_factor` times the even share. The even share is the number of rows that a PE
    /// receives if every token is sent to the maximum number of PEs and all PEs receive the same number.
    ///
    /// # Errors
    ///
    /// Returns [`MoeError::TooLarge`] if a PE's rows or slots cannot be numbered in 32 bits, or the window refills of a pass in
    /// `ROUND_BITS` bits.
    pub fn new(
        config: &LayerConfig,
        placement: &Placement,
        slots: Option<usize>,
        element_bytes: usize,
        max_tokens: usize,
        options: &Options,
    ) -> Result<Self, MoeError> {
        let pes = placement.n_pes();
        let peers = pes - 1;
        let top_k = config.router.top_k;
        let max_tokens = max_tokens.max(1);
        let hosts = if slots.is_some() { pes } else { placement.hosts() };
        let max_local = slots.unwrap_or(placement.max_local());
        let targets = top_k.min(hosts).max(1);
        if !Self::can_number(max_tokens, top_k) {
            return Err(MoeError::TooLarge { tokens: max_tokens, top_k });
        }
        let row_bytes = config.hidden * element_bytes;
        let window_rows = options.window_rows(max_tokens, targets, pes);
        // Chunks of equal size, so that a window exceeds its rows by less than `window_chunks`.
        let window_chunks = window_rows.div_ceil(options.chunk_rows(window_rows));
        let chunk_rows = window_rows.div_ceil(window_chunks);
        let max_chunks = max_tokens.div_ceil(chunk_rows).max(1);
        if max_chunks.div_ceil(window_chunks) >= 1 << ROUND_BITS {
            return Err(MoeError::TooLarge { tokens: max_tokens, top_k });
        }
        let relays = options.hosts.relays();
        let members = if relays { options.hosts.most_members() } else { 0 };
        let has_counts = config.capacity_factor.is_some() || options.balance == Balance::Split;
        // With relays, a row's slots on all PEs of a host.
        let max_slots_per_row = top_k.min(max_local * members.max(1)).max(1);
        Ok(Layout {
            peers,
            max_tokens,
            row_bytes,
            max_slots_per_row,
            chunk_rows,
            window_chunks,
            max_chunks,
            header_words: header_words(config, max_local) + members,
            count_words: if has_counts { config.n_experts } else { 0 },
            return_bytes: if peers == 0 {
                0
            } else {
                max_tokens * targets.min(peers) * row_bytes + max_tokens * top_k * 4
            },
            move_len: slots.map_or(0, |_| MOVE_LEN),
            siblings: members.saturating_sub(1),
            served: if relays { options.hosts.most_served() } else { 0 },
            partial_bytes: max_tokens * row_bytes + max_tokens * max_slots_per_row * 4,
        })
    }

    /// Whether the (token, expert) pairs of a batch can be numbered.
    pub(in crate::moe) fn can_number(tokens: usize, top_k: usize) -> bool {
        tokens.saturating_mul(top_k) <= u32::MAX as usize / 8
    }

    /// Number of passes for a batch whose largest part has `tokens` tokens on one PE. A PE without peers sends no rows, so it runs every
    /// batch in one pass.
    pub(in crate::moe) fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens()).max(1)
    }

    /// The tokens of pass `number` of a PE's batch of `tokens` tokens.
    pub(in crate::moe) fn block(&self, tokens: usize, number: usize) -> Range<usize> {
        let at = |number: usize| number.saturating_mul(self.block_tokens()).min(tokens);
        at(number)..at(number + 1)
    }

    /// Maximum tokens of a PE in a pass.
    pub(in crate::moe) fn block_tokens(&self) -> usize {
        if self.peers == 0 { usize::MAX } else { self.max_tokens }
    }

    /// Bytes of a full chunk: rows, then one count per row, then (expert, weight) per slot.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_rows * (self.row_bytes + 4 + 8 * self.max_slots_per_row)
    }

    /// Bytes of the receive windows for all peers: the receive budget.
    pub fn window_bytes(&self) -> usize {
        self.peers * self.window_chunks * self.chunk_bytes()
    }

    /// Number of signal words: those for all peers (two headers, counts, credit, chunks, results) and those for all relayed
    /// streams.
    pub(in crate::moe) fn signal_words(&self) -> usize {
        self.peers * (2 + 1 + 1 + self.window_chunks + self.max_chunks)
            + self.served * self.siblings * (1 + self.max_chunks)
    }

    /// Bytes of the partial results that a relay receives.
    pub(in crate::moe) fn all_partial_bytes(&self) -> usize {
        self.served * self.siblings * self.partial_bytes
    }

    /// Total bytes, with every object rounded up to the heap's alignment.
    pub fn total_bytes(&self) -> usize {
        let aligned = |bytes: usize| bytes.next_multiple_of(64);
        aligned(self.window_bytes())
            + aligned(self.return_bytes)
            + aligned(2 * self.peers * self.header_words * 4)
            + aligned(self.peers * self.count_words * 4)
            + aligned(self.signal_words() * 8)
            + aligned(self.move_len * 4)
            + aligned(self.all_partial_bytes())
            + aligned(8)
            + 8 * 64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::spec::{Activation, MlpConfig};
    use crate::moe::synthetic::RouterKind;

    #[test]
    fn chunks_are_smaller_in_a_small_window() {
        let config = LayerConfig::new(1, 8, RouterKind::Softmax.config(8, 2), MlpConfig::plain(1, Activation::Relu));
        let of = |tokens, pes, chunk_rows| {
            let options = Options { chunk_rows, ..Options::default() };
            let layout = Layout::new(&config, &Placement::even(8, pes), None, 4, tokens, &options).unwrap();
            (layout.window_chunks, layout.chunk_rows)
        };
        // Windows of 4096, 2048, 1024, 90 and 1 rows.
        assert_eq!(of(4096, 4, None), (16, 256));
        assert_eq!(of(4096, 8, None), (16, 128));
        assert_eq!(of(2048, 8, None), (8, 128));
        assert_eq!(of(90, 2, None), (1, 90));
        assert_eq!(of(0, 2, None), (1, 1));
        assert_eq!(of(4096, 8, Some(256)), (8, 256));
        assert_eq!(of(4096, 8, Some(1000)), (3, 683));
    }

    #[test]
    fn too_many_rounds_for_the_signal_format_are_rejected() {
        let expert = MlpConfig::plain(1, Activation::Relu);
        let config = LayerConfig::new(1, 2, RouterKind::Softmax.config(2, 1), expert);
        // With windows of one row, a pass has as many refills as tokens.
        let options = Options { budget_factor: 1e-9, ..Options::default() };
        let layout = |tokens| Layout::new(&config, &Placement::even(2, 2), None, 4, tokens, &options);
        assert!(layout((1 << 24) - 1).is_ok());
        assert!(matches!(layout(1 << 24), Err(MoeError::TooLarge { .. })));
    }
}
