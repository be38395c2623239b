//! The allocator of the symmetric heap, which manages offsets and does not access memory.
//!
//! Allocation is deterministic (first fit): PEs that make the same calls in the same order get the same offsets, so an allocation is
//! symmetric without communication.

use std::collections::BTreeMap;

/// Alignment and granularity of allocations: one cache line, bytes.
pub const ALIGN_BYTES: usize = 64;

/// A first-fit allocator over `0..capacity`, with coalescing free.
#[derive(Debug)]
pub struct Heap {
    /// Free ranges, offset to bytes; none is empty and no two are adjacent.
    free: BTreeMap<usize, usize>,
    /// Allocated ranges, offset to bytes.
    live: BTreeMap<usize, usize>,
    used_bytes: usize,
    peak_bytes: usize,
}

/// A failed allocation, with the free space.
#[derive(Debug, PartialEq, Eq)]
pub struct Full {
    /// Total free bytes.
    pub free_bytes: usize,
    /// Bytes of the largest free range.
    pub largest_bytes: usize,
}

impl Heap {
    /// An empty heap of `capacity_bytes`, rounded down to whole cache lines.
    pub fn new(capacity_bytes: usize) -> Self {
        let capacity = capacity_bytes / ALIGN_BYTES * ALIGN_BYTES;
        let free = if capacity > 0 { BTreeMap::from([(0, capacity)]) } else { BTreeMap::new() };
        Self { free, live: BTreeMap::new(), used_bytes: 0, peak_bytes: 0 }
    }

    /// Allocates `bytes` (more than 0) and returns the offset.
    ///
    /// # Errors
    /// [`Full`] if no free range is large enough.
    pub fn alloc(&mut self, bytes: usize) -> Result<usize, Full> {
        debug_assert!(bytes > 0);
        let fit = bytes
            .checked_next_multiple_of(ALIGN_BYTES)
            .and_then(|need| self.free.iter().find(|(_, free)| **free >= need).map(|(&at, &free)| (at, free, need)));
        let Some((offset, free, need)) = fit else {
            return Err(Full {
                free_bytes: self.free.values().sum(),
                largest_bytes: self.free.values().copied().max().unwrap_or(0),
            });
        };
        self.free.remove(&offset);
        if free > need {
            self.free.insert(offset + need, free - need);
        }
        self.live.insert(offset, need);
        self.used_bytes += need;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
        Ok(offset)
    }

    /// Frees the allocation of `bytes` at `offset`; returns false if there is no such allocation.
    pub fn free(&mut self, offset: usize, bytes: usize) -> bool {
        if self.live.get(&offset) != Some(&bytes.next_multiple_of(ALIGN_BYTES)) {
            return false;
        }
        let mut bytes = self.live.remove(&offset).expect("the allocation was just found");
        self.used_bytes -= bytes;
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            bytes += after;
        }
        match self.free.range_mut(..offset).next_back() {
            Some((&before, free)) if before + *free == offset => *free += bytes,
            _ => {
                self.free.insert(offset, bytes);
            }
        }
        true
    }

    /// Bytes allocated now.
    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Maximum of [`Heap::used_bytes`] since the start, bytes.
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_fit_reuses_the_lowest_hole() {
        let mut heap = Heap::new(1024);
        let a = heap.alloc(100).unwrap();
        let b = heap.alloc(64).unwrap();
        let c = heap.alloc(1).unwrap();
        assert_eq!((a, b, c), (0, 128, 192));
        assert!(heap.free(a, 100));
        assert_eq!(heap.alloc(129), Ok(256), "too large for the hole");
        assert_eq!(heap.alloc(128), Ok(0), "fits the hole");
    }

    #[test]
    fn free_coalesces_in_any_order() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut heap = Heap::new(768);
            let at: Vec<_> = (0..3).map(|_| heap.alloc(200).unwrap()).collect();
            assert!(heap.alloc(1).is_err());
            for i in order {
                assert!(heap.free(at[i], 200));
            }
            assert_eq!(heap.alloc(768), Ok(0), "free order {order:?} left the heap in pieces");
        }
    }

    #[test]
    fn peak_is_kept_after_free() {
        let mut heap = Heap::new(4096);
        let a = heap.alloc(1000).unwrap();
        let b = heap.alloc(1000).unwrap();
        heap.free(a, 1000);
        heap.free(b, 1000);
        let _ = heap.alloc(64).unwrap();
        assert_eq!((heap.used_bytes(), heap.peak_bytes()), (64, 2048));
    }

    #[test]
    fn full_heap_reports_free_space() {
        let mut heap = Heap::new(300);
        let a = heap.alloc(64).unwrap();
        let _ = heap.alloc(64).unwrap();
        heap.free(a, 64);
        assert_eq!(heap.alloc(200), Err(Full { free_bytes: 192, largest_bytes: 128 }));
        assert_eq!(heap.alloc(usize::MAX), Err(Full { free_bytes: 192, largest_bytes: 128 }));
        assert!(Heap::new(63).alloc(1).is_err());
    }

    #[test]
    fn free_rejects_ranges_that_are_not_allocated() {
        let mut heap = Heap::new(1024);
        let a = heap.alloc(256).unwrap();
        assert!(!heap.free(a + 64, 192), "inside an allocation");
        assert!(!heap.free(a, 64), "another size");
        assert!(heap.free(a, 256));
        assert!(!heap.free(a, 256), "twice");
    }
}
