//! The layer's symmetric memory; [`Layout`] gives the sizes.

use crate::moe::spec::Layout;
use crate::shmem::{Shmem, ShmemError, Sym, Transport};

/// The layer's symmetric objects. A PE's peers are indexed by PE number, without the PE itself.
pub struct LayerMemory {
    pub layout: Layout,
    windows: Sym<u8>,
    returns: Sym<u8>,
    headers: Sym<u32>,
    counts: Sym<u32>,
    signals: Sym<u64>,
    moved: Sym<f32>,
    moved_signal: Sym<u64>,
    partials: Sym<u8>,
}

impl LayerMemory {
    /// Allocates the objects (collective).
    ///
    /// # Errors
    ///
    /// Returns `ShmemError` if the heap is too small.
    pub fn new<T: Transport>(shmem: &Shmem<T>, layout: Layout) -> Result<Self, ShmemError> {
        Ok(LayerMemory {
            windows: shmem.alloc(layout.window_bytes())?,
            returns: shmem.alloc(layout.return_bytes)?,
            headers: shmem.alloc(2 * layout.peers * layout.header_words)?,
            counts: shmem.alloc(layout.peers * layout.count_words)?,
            signals: shmem.alloc(layout.signal_words())?,
            moved: shmem.alloc(layout.move_len)?,
            moved_signal: shmem.alloc(1)?,
            partials: shmem.alloc(layout.all_partial_bytes())?,
            layout,
        })
    }

    /// Clears this PE's signal words; a barrier must follow before a peer signals.
    pub fn clear_signals<T: Transport>(&self, shmem: &Shmem<T>) {
        shmem.put(self.signals, &vec![0u64; self.signals.len()], shmem.my_pe());
        shmem.put(self.moved_signal, &[0], shmem.my_pe());
    }

    /// Frees the objects (collective).
    pub fn free<T: Transport>(&self, shmem: &Shmem<T>) {
        shmem.free(self.partials);
        shmem.free(self.moved_signal);
        shmem.free(self.moved);
        shmem.free(self.signals);
        shmem.free(self.counts);
        shmem.free(self.headers);
        shmem.free(self.returns);
        shmem.free(self.windows);
    }

    /// Index of peer `pe` in the memory of PE `at`.
    fn index(pe: usize, at: usize) -> usize {
        debug_assert_ne!(pe, at);
        pe - usize::from(pe > at)
    }

    /// Buffer at `at` for chunk `chunk` from `from`.
    pub fn chunk(&self, from: usize, at: usize, chunk: usize) -> Sym<u8> {
        let slot = Self::index(from, at) * self.layout.window_chunks + chunk % self.layout.window_chunks;
        let bytes = self.layout.chunk_bytes();
        self.windows.slice(slot * bytes..(slot + 1) * bytes)
    }

    pub fn returns(&self) -> Sym<u8> {
        self.returns
    }

    /// Buffer at `at` for the header of forward pass `forward` from `from`.
    pub fn header(&self, from: usize, at: usize, forward: u64) -> Sym<u32> {
        let slot = (forward % 2) as usize * self.layout.peers + Self::index(from, at);
        let words = self.layout.header_words;
        self.headers.slice(slot * words..(slot + 1) * words)
    }

    /// Buffer at `at` for the counts of pairs from `from`. One buffer is enough: `at` sends its header after it has read these counts, and
    /// `from` sends its next counts only after it has received this header.
    pub fn counts(&self, from: usize, at: usize) -> Sym<u32> {
        let slot = Self::index(from, at);
        let words = self.layout.count_words;
        self.counts.slice(slot * words..(slot + 1) * words)
    }

    /// Buffer for `elements` elements of an expert that moves to this PE, and the signal that holds the number of the last piece that has
    /// arrived.
    pub fn moved(&self, elements: usize) -> (Sym<f32>, Sym<u64>) {
        (self.moved.slice(0..elements), self.moved_signal)
    }

    fn word(&self, group: usize, from: usize, at: usize, index: usize, of: usize) -> Sym<u64> {
        self.signals.at(group * self.layout.peers + Self::index(from, at) * of + index)
    }

    /// At `at`: number of the last forward pass, among those of the parity of `forward`, whose header from `from` has arrived. With a
    /// single word for both parities, the value could decrease if a PE's header arrives before its previous header.
    pub fn header_signal(&self, from: usize, at: usize, forward: u64) -> Sym<u64> {
        self.word(0, from, at, (forward % 2) as usize, 2)
    }

    /// At `at`: number of the first forward pass of the last batch whose counts of pairs from `from` have arrived.
    pub fn counts_signal(&self, from: usize, at: usize) -> Sym<u64> {
        self.word(2, from, at, 0, 1)
    }

    /// At `at`: number of window slots for chunks of `at` that `from` has freed for reuse, over all passes.
    pub fn credit_signal(&self, from: usize, at: usize) -> Sym<u64> {
        self.word(3, from, at, 0, 1)
    }

    /// At `at`: stamp of the chunk that `from` last wrote to this window slot.
    pub fn chunk_signal(&self, from: usize, at: usize, chunk: usize) -> Sym<u64> {
        self.word(4, from, at, chunk % self.layout.window_chunks, self.layout.window_chunks)
    }

    /// At a relay: buffer for the partial results of sibling number `sibling` for the rows of source number `served`.
    pub fn partials(&self, served: usize, sibling: usize) -> Sym<u8> {
        let at = (served * self.layout.siblings + sibling) * self.layout.partial_bytes;
        self.partials.slice(at..at + self.layout.partial_bytes)
    }

    fn stream_word(&self, served: usize, sibling: usize, index: usize) -> Sym<u64> {
        let first = (4 + self.layout.window_chunks + self.layout.max_chunks) * self.layout.peers;
        let stream = served * self.layout.siblings + sibling;
        self.signals.at(first + stream * (1 + self.layout.max_chunks) + index)
    }

    /// At a relay: number of window slots of this stream that the sibling has freed for reuse, over all passes.
    pub fn stream_credit(&self, served: usize, sibling: usize) -> Sym<u64> {
        self.stream_word(served, sibling, 0)
    }

    /// At a relay: number of the last pass for which the partial results of chunk `chunk` of this stream have arrived.
    pub fn stream_result(&self, served: usize, sibling: usize, chunk: usize) -> Sym<u64> {
        self.stream_word(served, sibling, 1 + chunk)
    }

    /// At `at`: number of the last pass for which the results of `at`'s chunk `chunk` have arrived from `from`.
    pub fn result_signal(&self, from: usize, at: usize, chunk: usize) -> Sym<u64> {
        self.word(4 + self.layout.window_chunks, from, at, chunk, self.layout.max_chunks)
    }
}
