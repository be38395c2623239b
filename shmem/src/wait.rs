//! Waits for signal words in a PE's own heap. A PE that changes a word rings the owner's doorbell.
//!
//! A wait first polls its words without PAUSE (which takes up to 140 cycles, as long as a signal takes from a near CPU), then with
//! sched_yield between polls, then sleeps on the doorbell of its own segment ([`super::doorbell`]). With more threads than CPUs it sleeps
//! sooner, because the thread that it waits for may need this CPU.

use std::sync::atomic::Ordering;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::doorbell::sleep_until;
use super::segment::Bell;
use super::{RawWait, Segment};

/// The longest sleep if every change of a word rings the doorbell.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// Polls between two readings of the clock. No PAUSE between them: a hypervisor takes repeated PAUSEs for useless spinning and
/// deschedules the CPU for microseconds.
const LOOKS_A_CLOCK: u32 = 200;

/// How long a wait polls before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Time of polling without a pause. A wake-up takes some microseconds, which would add to a wait for a large message.
    spin: Duration,
    /// Number of polling rounds that follow, each with a sched_yield.
    yields: u32,
    /// Maximum sleep between polls.
    nap: Duration,
}

impl Patience {
    /// The policy for one of `threads` busy threads on this host.
    pub(super) fn of(threads: usize) -> Patience {
        if available_parallelism().is_ok_and(|cores| threads > cores.get()) {
            Patience { spin: Duration::ZERO, yields: 2, nap: SLEEP_MAX }
        } else {
            Patience { spin: Duration::from_micros(200), yields: 5, nap: SLEEP_MAX }
        }
    }

    /// Limits sleeps to `nap`, for words that may change without a ring of the doorbell.
    #[cfg(feature = "ofi")]
    pub(super) fn napping(self, nap: Duration) -> Patience {
        Patience { nap, ..self }
    }

    /// Waits until one of `waits` holds for the words of `mine`; returns its index, or `None` if `deadline` passes or `give_up` returns
    /// true first.
    pub(super) fn wait(
        &self,
        mine: &Segment,
        waits: &[RawWait],
        deadline: Instant,
        give_up: impl Fn() -> bool,
    ) -> Option<usize> {
        self.wait_while(mine, waits, deadline, || (), give_up)
    }

    /// Like [`Patience::wait`]; calls `meanwhile` at intervals before it sleeps.
    pub(super) fn wait_while(
        &self,
        mine: &Segment,
        waits: &[RawWait],
        deadline: Instant,
        meanwhile: impl FnMut(),
        give_up: impl Fn() -> bool,
    ) -> Option<usize> {
        let word = |wait: &RawWait| mine.atomic_u64(wait.signal).load(Ordering::Acquire);
        let look = || waits.iter().position(|wait| wait.cmp.holds(word(wait), wait.value));
        self.wait_for(mine.bell(), look, deadline, meanwhile, give_up)
    }

    /// Like [`Patience::wait_while`], until `look` returns a value. Changes that `look` can observe must ring `bell`.
    pub(super) fn wait_for<R>(
        &self,
        bell: &Bell,
        mut look: impl FnMut() -> Option<R>,
        deadline: Instant,
        mut meanwhile: impl FnMut(),
        give_up: impl Fn() -> bool,
    ) -> Option<R> {
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS_A_CLOCK {
                if let Some(found) = look() {
                    return Some(found);
                }
            }
            let now = Instant::now();
            if now >= deadline || give_up() {
                return look();
            }
            meanwhile();
            if now - start >= self.spin {
                break;
            }
        }
        for _ in 0..self.yields {
            if let Some(found) = look() {
                return Some(found);
            }
            rustix::thread::sched_yield();
            meanwhile();
            if Instant::now() >= deadline {
                return look();
            }
        }
        let time_left = || {
            let left = deadline.saturating_duration_since(Instant::now());
            (!left.is_zero() && !give_up()).then_some(left.min(self.nap))
        };
        sleep_until(bell, look, time_left)
    }
}
