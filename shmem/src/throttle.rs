//! Injected delays: [`Delay`] extends computations, [`Throttle`] messages.

use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Sleeps for a requested total: a sleep that overshoots shortens the next one.
#[derive(Debug)]
pub struct Delay {
    /// Time requested and not yet slept, nanoseconds; negative after a sleep that overshot.
    owed_ns: AtomicI64,
    most: Duration,
}

impl Delay {
    /// `most` limits each sleep.
    pub fn new(most: Duration) -> Delay {
        Delay { owed_ns: AtomicI64::new(0), most }
    }

    /// Adds `seconds`, at most the longest sleep, to the time owed. Does not sleep.
    pub fn owe(&self, seconds: f64) {
        let seconds = seconds.clamp(0.0, self.most.as_secs_f64());
        self.owed_ns.fetch_add((seconds * 1e9) as i64, Ordering::Relaxed);
    }

    /// Sleeps for the time owed.
    pub fn pay(&self) {
        let owed = Duration::from_nanos(self.owed_ns.load(Ordering::Relaxed).max(0) as u64);
        if !owed.is_zero() {
            let begin = Instant::now();
            thread::sleep(owed.min(self.most));
            self.owed_ns.fetch_sub(owed.max(begin.elapsed()).as_nanos() as i64, Ordering::Relaxed);
        }
    }
}

/// Minimum times of one PE's messages. A message is all puts up to a signal; it takes the latency to the signal's target plus the bytes
/// put times the inverse bandwidth. The PE sends one message at a time and sleeps meanwhile.
#[derive(Debug)]
pub struct Throttle {
    /// Latency to each PE, seconds, and inverse bandwidth, seconds a byte.
    links: Vec<(f64, f64)>,
    delay: Delay,
}

impl Throttle {
    /// A message to PE `i` takes `links[i].0` seconds plus `links[i].1` seconds per byte. `most` limits each of the two, and each sleep.
    pub fn new(links: Vec<(f64, f64)>, most: Duration) -> Throttle {
        Throttle { links, delay: Delay::new(most) }
    }

    pub(crate) fn put(&self, pe: usize, bytes: usize) {
        self.delay.owe(self.links[pe].1 * bytes as f64);
    }

    pub(crate) fn signal(&self, pe: usize) {
        self.delay.owe(self.links[pe].0);
        self.delay.pay();
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
mod tests {
    use super::*;
    use crate::{ShmTransport, Shmem, SignalOp};

    #[test]
    fn sleeps_add_up_and_are_bounded() {
        let delay = Delay::new(Duration::from_millis(5));
        let begin = Instant::now();
        for _ in 0..200 {
            delay.owe(50e-6);
            delay.pay();
        }
        let took = begin.elapsed();
        // Separate sleeps would overshoot 200 times.
        assert!(took >= Duration::from_millis(10), "{took:?}");
        assert!(delay.owed_ns.load(Ordering::Relaxed) <= 0);
        delay.owe(1e30);
        delay.pay();
        assert!(delay.owed_ns.load(Ordering::Relaxed) <= 0);
    }

    #[test]
    fn a_message_takes_its_latency_and_its_bytes_to_that_pe() {
        let mut pes = ShmTransport::threads(3, 1 << 16).unwrap();
        let far = Duration::from_secs(60);
        // No delay to PE 1; 20 ms and 2 us per byte to PE 2.
        let slow = pes.remove(0).throttled(Throttle::new(vec![(0.0, 0.0), (0.0, 0.0), (20e-3, 2e-6)], far));
        let pe = Shmem::new(slow);
        let (data, signal) = (pe.alloc::<u8>(10_000).unwrap(), pe.alloc::<u64>(1).unwrap());
        let took = |to: usize| {
            let begin = Instant::now();
            pe.put(data.slice(0..5_000), &[1; 5_000], to);
            pe.put_signal(data.slice(0..5_000), &[1; 5_000], signal, 1, SignalOp::Set, to);
            begin.elapsed()
        };
        let quick = took(1);
        let slow = took(2);
        assert!(slow >= Duration::from_millis(40), "{slow:?}");
        assert!(quick < slow, "{quick:?}");
    }
}
