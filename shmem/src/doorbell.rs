//! The signal word and the doorbell: how a PE signals another, and how one sleeps until it is signalled.
//!
//! # Contract
//! Once [`sleep_until`]'s check has read a value that [`signal`] produced, with an acquire load, everything that
//! the signalling PE did before `signal` is visible. And no wake-up is lost: a signal issued while the waiter is
//! anywhere in `sleep_until` is found by its check, or ends its sleep.
//!
//! # Why
//! Visibility: the word is stored or added to with Release, and read with Acquire. An ADD continues the release
//! sequence of the ADDs it follows, so that a sum announces what each of its contributors did before.
//!
//! No lost wake-up: the signaller writes the word (S1), then reads `waiters` (S2), with a SeqCst fence between; the
//! waiter writes `waiters` (W1), then reads the word (W2), with a SeqCst fence between. In the single order of the
//! two fences one comes first, so either W2 sees S1 and the waiter does not sleep, or S2 sees W1 and the signaller
//! rings. If it rings, it changes `bell` (S3) before it wakes. The waiter read `bell` (W0) before W2: if W0 did
//! not see S3, the futex finds another value than W0's and does not sleep, or is asleep and is woken; if W0 did see
//! S3, then, W0 being an acquire and the fence before S3 a release, W2 sees S1.
//!
//! `tests/loom.rs` checks this algorithm itself with loom, which explores all interleavings and all values that the memory
//! model lets a load return.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::SignalOp;

/// An atomic integer: std's in shared memory, loom's in the model.
pub(super) trait Word<V> {
    fn load(&self, order: Ordering) -> V;
    fn store(&self, value: V, order: Ordering);
    fn fetch_add(&self, value: V, order: Ordering) -> V;
    fn fetch_sub(&self, value: V, order: Ordering) -> V;
}

macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl Word<$value> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $value {
                <$atomic>::load(self, order)
            }
            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                <$atomic>::store(self, value, order);
            }
            #[inline]
            fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                <$atomic>::fetch_add(self, value, order)
            }
            #[inline]
            fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                <$atomic>::fetch_sub(self, value, order)
            }
        }
    };
}
word!(AtomicU32, u32);
word!(AtomicU64, u64);

/// The shared state in addition to the signal words, and its futex.
pub(super) trait Doorbell {
    /// The type of its words.
    type U32: Word<u32>;
    /// Number of threads of the owning PE that sleep or are about to.
    fn waiters(&self) -> &Self::U32;
    /// Changes at every ring.
    fn bell(&self) -> &Self::U32;
    /// Sleeps while `bell` is `seen`, at most for `at_most`; may wake spuriously.
    fn futex_wait(&self, seen: u32, at_most: Duration);
    /// Wakes all sleeping threads.
    fn futex_wake(&self);
    /// A SeqCst fence.
    fn full_fence();
}

/// Updates `word` on a PE, and wakes the PE if it sleeps on `doorbell`.
pub(super) fn signal<D: Doorbell>(word: &impl Word<u64>, value: u64, op: SignalOp, doorbell: &D) {
    match op {
        SignalOp::Set => word.store(value, Ordering::Release), // S1
        SignalOp::Add => {
            word.fetch_add(value, Ordering::Release);
        }
    }
    ring(doorbell);
}

/// Wakes the PE that owns `doorbell`, if it sleeps, after one of its words has changed.
pub(super) fn ring<D: Doorbell>(doorbell: &D) {
    D::full_fence();
    // S2
    if doorbell.waiters().load(Ordering::Relaxed) > 0 {
        doorbell.bell().fetch_add(1, Ordering::Relaxed); // S3
        doorbell.futex_wake();
    }
}

/// Sleeps until `check` returns a value or `time_left` returns `None`. The loads of `check` must be acquire.
pub(super) fn sleep_until<D: Doorbell, R>(
    doorbell: &D,
    mut check: impl FnMut() -> Option<R>,
    mut time_left: impl FnMut() -> Option<Duration>,
) -> Option<R> {
    doorbell.waiters().fetch_add(1, Ordering::Relaxed); // W1
    D::full_fence();
    let found = loop {
        let seen = doorbell.bell().load(Ordering::Acquire); // W0
        // W2
        if let Some(found) = check() {
            break Some(found);
        }
        let Some(at_most) = time_left() else { break None };
        doorbell.futex_wait(seen, at_most);
    };
    doorbell.waiters().fetch_sub(1, Ordering::Relaxed);
    found
}
