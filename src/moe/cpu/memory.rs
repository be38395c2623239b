//! The layer's symmetric objects, of the sizes that a [`Layout`] gives.

use crate::moe::spec::Layout;
use crate::shmem::{Shmem, ShmemError, Sym, Transport};

/// The layer's symmetric objects. A peer's index is its number, less one if it is above ours.
pub struct LayerMemory {
    /// The sizes.
    pub layout: Layout,
    windows: Sym<u8>,
    returns: Sym<u8>,
    headers: Sym<u32>,
    capacity: Sym<u32>,
    signals: Sym<u64>,
    moved: Sym<f32>,
    moved_signal: Sym<u64>,
    parts: Sym<u8>,
}

impl LayerMemory {
    /// Allocates on every PE (collective).
    ///
    /// # Errors
    /// When the heap is too small.
    pub fn new<T: Transport>(shmem: &Shmem<T>, layout: Layout) -> Result<Self, ShmemError> {
        Ok(LayerMemory {
            windows: shmem.alloc(layout.window_bytes())?,
            returns: shmem.alloc(layout.return_bytes)?,
            headers: shmem.alloc(2 * layout.peers * layout.header_words)?,
            capacity: shmem.alloc(layout.peers * layout.capacity_words)?,
            signals: shmem.alloc(layout.signal_words())?,
            moved: shmem.alloc(layout.move_len)?,
            moved_signal: shmem.alloc(1)?,
            parts: shmem.alloc(layout.all_part_bytes())?,
            layout,
        })
    }

    /// Sets this PE's signal words to zero; a barrier must follow before a peer signals.
    pub fn clear_signals<T: Transport>(&self, shmem: &Shmem<T>) {
        shmem.put(self.signals, &vec![0u64; self.signals.len()], shmem.my_pe());
        shmem.put(self.moved_signal, &[0], shmem.my_pe());
    }

    /// Gives the memory back (collective).
    pub fn free<T: Transport>(&self, shmem: &Shmem<T>) {
        shmem.free(self.parts);
        shmem.free(self.moved_signal);
        shmem.free(self.moved);
        shmem.free(self.signals);
        shmem.free(self.capacity);
        shmem.free(self.headers);
        shmem.free(self.returns);
        shmem.free(self.windows);
    }

    /// The index of `pe` at `at`.
    fn index(pe: usize, at: usize) -> usize {
        debug_assert_ne!(pe, at);
        pe - usize::from(pe > at)
    }

    /// Where `from` writes chunk `chunk` at `at`.
    pub fn chunk(&self, from: usize, at: usize, chunk: usize) -> Sym<u8> {
        let slot = Self::index(from, at) * self.layout.window_chunks + chunk % self.layout.window_chunks;
        let bytes = self.layout.chunk_bytes();
        self.windows.slice(slot * bytes..(slot + 1) * bytes)
    }

    /// The return area.
    pub fn returns(&self) -> Sym<u8> {
        self.returns
    }

    /// Where `from` writes its header of forward pass `forward` at `at`.
    pub fn header(&self, from: usize, at: usize, forward: u64) -> Sym<u32> {
        let slot = (forward % 2) as usize * self.layout.peers + Self::index(from, at);
        let words = self.layout.header_words;
        self.headers.slice(slot * words..(slot + 1) * words)
    }

    /// Where `from` writes its capacity counts at `at`. One place is enough: the next counts follow the header that `at`
    /// sends after it has read these.
    pub fn capacity_counts(&self, from: usize, at: usize) -> Sym<u32> {
        let slot = Self::index(from, at);
        let words = self.layout.capacity_words;
        self.capacity.slice(slot * words..(slot + 1) * words)
    }

    /// Where a PE gets `elements` of an expert that moves to it, and the number of the last piece that has arrived.
    pub fn moved(&self, elements: usize) -> (Sym<f32>, Sym<u64>) {
        (self.moved.slice(0..elements), self.moved_signal)
    }

    fn word(&self, group: usize, from: usize, at: usize, index: usize, of: usize) -> Sym<u64> {
        self.signals.at(group * self.layout.peers + Self::index(from, at) * of + index)
    }

    /// At `at`: the number of the last forward pass, of those even or odd as `forward` is, whose header from `from` has
    /// arrived. One word for both would go backwards when the header of a PE that runs ahead overtakes its last one.
    pub fn header_signal(&self, from: usize, at: usize, forward: u64) -> Sym<u64> {
        self.word(0, from, at, (forward % 2) as usize, 2)
    }

    /// At `at`: the number of the last forward pass whose capacity counts from `from` have arrived.
    pub fn capacity_signal(&self, from: usize, at: usize) -> Sym<u64> {
        self.word(2, from, at, 0, 1)
    }

    /// At `at`: how many chunks of `at`'s window at `from` have ever been emptied for reuse.
    pub fn credit_signal(&self, from: usize, at: usize) -> Sym<u64> {
        self.word(3, from, at, 0, 1)
    }

    /// At `at`: the stamp of the chunk that `from` last wrote into this place of its window.
    pub fn chunk_signal(&self, from: usize, at: usize, chunk: usize) -> Sym<u64> {
        self.word(4, from, at, chunk % self.layout.window_chunks, self.layout.window_chunks)
    }

    /// At the home of PE number `served` of those that it serves: the results of its other PE number `sibling` for that PE's rows.
    pub fn parts(&self, served: usize, sibling: usize) -> Sym<u8> {
        let at = (served * self.layout.siblings + sibling) * self.layout.part_bytes;
        self.parts.slice(at..at + self.layout.part_bytes)
    }

    fn stream_word(&self, served: usize, sibling: usize, index: usize) -> Sym<u64> {
        let first = (4 + self.layout.window_chunks + self.layout.max_chunks) * self.layout.peers;
        let stream = served * self.layout.siblings + sibling;
        self.signals.at(first + stream * (1 + self.layout.max_chunks) + index)
    }

    /// There: how many chunks of such rows that PE has ever emptied for reuse.
    pub fn stream_credit(&self, served: usize, sibling: usize) -> Sym<u64> {
        self.stream_word(served, sibling, 0)
    }

    /// There: the number of the pass whose results for chunk `chunk` of such rows have arrived.
    pub fn stream_result(&self, served: usize, sibling: usize, chunk: usize) -> Sym<u64> {
        self.stream_word(served, sibling, 1 + chunk)
    }

    /// At `at`: the number of the pass whose results for `at`'s chunk `chunk` have arrived from `from`.
    pub fn result_signal(&self, from: usize, at: usize, chunk: usize) -> Sym<u64> {
        self.word(4 + self.layout.window_chunks, from, at, chunk, self.layout.max_chunks)
    }
}
