//! The multiprocessors of an emulated device that are occupied by kernels whose blocks must all run at the same time.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// An emulated device's multiprocessors. A cooperative launch waits until it has one for each of its blocks, as on a GPU.
pub struct Multiprocessors {
    count: u32,
    occupied: Mutex<u32>,
    freed: Condvar,
}

/// A kernel that occupies multiprocessors until the value is dropped.
pub struct Resident {
    of: Arc<Multiprocessors>,
    count: u32,
}

impl Multiprocessors {
    pub(super) fn new(count: u32) -> Arc<Self> {
        Arc::new(Multiprocessors { count, occupied: Mutex::new(0), freed: Condvar::new() })
    }

    /// Waits until `count` multiprocessors are free, or all if the device has fewer, and occupies them.
    pub fn occupy(self: &Arc<Self>, count: u32) -> Resident {
        let count = count.min(self.count);
        let occupied = self.occupied.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.freed.wait_while(occupied, |occupied| *occupied + count > self.count);
        *free.unwrap_or_else(PoisonError::into_inner) += count;
        Resident { of: self.clone(), count }
    }

    /// The number of occupied multiprocessors.
    pub fn occupied(&self) -> u32 {
        *self.occupied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        *self.of.occupied.lock().unwrap_or_else(PoisonError::into_inner) -= self.count;
        self.of.freed.notify_all();
    }
}
