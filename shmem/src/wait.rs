//! How a PE waits for signal words in its own heap, where whoever changes one rings its doorbell.
//!
//! A wait looks at its words without a pause between looks (PAUSE takes up to 140 cycles, as long as a signal's way to a near CPU), then
//! with sched_yield between them, then sleeps on the doorbell of its own segment ([`super::doorbell`]). With more threads than
//! CPUs it goes to sleep sooner, as whoever it waits for may need this CPU.

use std::sync::atomic::Ordering;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::doorbell::sleep_until;
use super::segment::Bell;
use super::{RawWait, Segment};

/// The longest sleep where somebody rings.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// Looks between two readings of the clock. There is no PAUSE between them: a hypervisor takes a CPU that pauses again and again
/// for one that spins in vain, and takes it away for microseconds.
const LOOKS_A_CLOCK: u32 = 200;

/// How long a wait looks at its words before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For so long one look right after the other: waking up takes some microseconds, which a wait for a large message would add.
    spin: Duration,
    /// With a sched_yield after each.
    yields: u32,
    /// The longest sleep without looking at the words again.
    nap: Duration,
}

impl Patience {
    /// Of one of `threads` busy threads on this host.
    pub(super) fn of(threads: usize) -> Patience {
        if available_parallelism().is_ok_and(|cores| threads > cores.get()) {
            Patience { spin: Duration::ZERO, yields: 2, nap: SLEEP_MAX }
        } else {
            Patience { spin: Duration::from_micros(200), yields: 5, nap: SLEEP_MAX }
        }
    }

    /// The same where not all that changes a word rings the doorbell: it sleeps no longer than `nap`.
    #[cfg(feature = "ofi")]
    pub(super) fn napping(self, nap: Duration) -> Patience {
        Patience { nap, ..self }
    }

    /// Waits until one of `waits` holds for the words of `mine`, and says which; `None` when `deadline` passes or `give_up` says so first.
    pub(super) fn wait(
        &self,
        mine: &Segment,
        waits: &[RawWait],
        deadline: Instant,
        give_up: impl Fn() -> bool,
    ) -> Option<usize> {
        self.wait_while(mine, waits, deadline, || (), give_up)
    }

    /// The same, calling `meanwhile` now and then before it sleeps.
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

    /// The same until `look` finds something, whose changes ring `bell`.
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
