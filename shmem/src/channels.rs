//! The memory of the channels that collective operations send their data through; `collective.rs` describes the protocol.

use super::Sym;

/// Slots per channel: with two, messages need no acknowledgement (see the module documentation).
pub(super) const SLOTS: usize = 2;

/// Maximum slot size, bytes.
const SLOT_BYTES_MAX: usize = 16 << 10;

/// The size of one slot, bytes: a multiple of 64, such that all slots take at most 1/16 of a sufficiently large heap.
pub(super) fn slot_bytes(n_pes: usize, heap_bytes: usize) -> usize {
    (heap_bytes / 16 / (SLOTS * n_pes) / 64 * 64).clamp(64, SLOT_BYTES_MAX)
}

/// This PE's state of the channels from and to every PE.
#[derive(Debug)]
pub(super) struct Channels {
    /// Word `s * SLOTS + slot`: messages that `s` has put into that slot of its channel to this PE.
    pub(super) full: Sym<u64>,
    /// Slot `s * SLOTS + slot`, of `slot_bytes`.
    pub(super) staging: Sym<u8>,
    pub(super) slot_bytes: usize,
    /// Number of messages sent, per PE.
    pub(super) sent: Vec<u64>,
    /// Number of messages received, per PE.
    pub(super) received: Vec<u64>,
}

impl Channels {
    /// Number of words in `full`, and of bytes in `staging`.
    pub(super) fn sizes(n_pes: usize, heap_bytes: usize) -> (usize, usize) {
        (SLOTS * n_pes, SLOTS * n_pes * slot_bytes(n_pes, heap_bytes))
    }

    /// Requires zeroed words, and sizes as returned by [`Channels::sizes`].
    pub(super) fn new(full: Sym<u64>, staging: Sym<u8>) -> Self {
        let n_pes = full.len() / SLOTS;
        let slot_bytes = staging.len() / full.len();
        Self { full, staging, slot_bytes, sent: vec![0; n_pes], received: vec![0; n_pes] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_stays_within_a_sixteenth_of_a_heap() {
        for n_pes in [1, 2, 3, 8, 64] {
            for heap_bytes in [1 << 20, 16 << 20, 1 << 30] {
                let (_, staging) = Channels::sizes(n_pes, heap_bytes);
                assert!(staging <= heap_bytes / 16, "{n_pes} PEs, {heap_bytes} bytes: {staging}");
                assert!(staging <= SLOTS * n_pes * SLOT_BYTES_MAX);
            }
        }
        assert_eq!(slot_bytes(8, 0), 64, "a tiny heap still gets slots");
    }
}
