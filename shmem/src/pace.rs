//! Slowness on purpose: [`Hold`] makes what is done last longer, [`Pace`] what is sent.

use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Sleeps that add up to what was asked for: by how much one was too long, the next is shorter.
#[derive(Debug)]
pub struct Hold {
    /// Asked for and not slept, nanoseconds; below 0 after a sleep that was too long.
    owed_ns: AtomicI64,
    most: Duration,
}

impl Hold {
    /// No single sleep is longer than `most`.
    pub fn new(most: Duration) -> Hold {
        Hold { owed_ns: AtomicI64::new(0), most }
    }

    /// Adds to what is to be slept, at most the longest sleep, without sleeping yet.
    pub fn owe(&self, seconds: f64) {
        let seconds = seconds.clamp(0.0, self.most.as_secs_f64());
        self.owed_ns.fetch_add((seconds * 1e9) as i64, Ordering::Relaxed);
    }

    /// Sleeps what is owed.
    pub fn pay(&self) {
        let owed = Duration::from_nanos(self.owed_ns.load(Ordering::Relaxed).max(0) as u64);
        if !owed.is_zero() {
            let begin = Instant::now();
            thread::sleep(owed.min(self.most));
            self.owed_ns.fetch_sub(owed.max(begin.elapsed()).as_nanos() as i64, Ordering::Relaxed);
        }
    }
}

/// The least that one PE's messages take. A message is everything that it puts until it sets a signal: it takes the alpha of the signal's way and
/// beta times the bytes put, and the PE, which sends one message at a time, does nothing else meanwhile.
#[derive(Debug)]
pub struct Pace {
    /// Latency to each PE, seconds, and inverse bandwidth, seconds a byte.
    links: Vec<(f64, f64)>,
    hold: Hold,
}

impl Pace {
    /// Of a PE whose messages to PE `i` take `links[i].0` seconds and `links[i].1` seconds a byte, at most `most` each.
    pub fn new(links: Vec<(f64, f64)>, most: Duration) -> Pace {
        Pace { links, hold: Hold::new(most) }
    }

    pub(crate) fn put(&self, pe: usize, bytes: usize) {
        self.hold.owe(self.links[pe].1 * bytes as f64);
    }

    pub(crate) fn signal(&self, pe: usize) {
        self.hold.owe(self.links[pe].0);
        self.hold.pay();
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
mod tests {
    use super::*;
    use crate::{ShmTransport, Shmem, SignalOp};

    #[test]
    fn sleeps_add_up_and_are_bounded() {
        let hold = Hold::new(Duration::from_millis(5));
        let begin = Instant::now();
        for _ in 0..200 {
            hold.owe(50e-6);
            hold.pay();
        }
        let took = begin.elapsed();
        // One by one they would be 200 times too long by what a sleep is.
        assert!(took >= Duration::from_millis(10), "{took:?}");
        assert!(hold.owed_ns.load(Ordering::Relaxed) <= 0);
        hold.owe(1e30);
        hold.pay();
        assert!(hold.owed_ns.load(Ordering::Relaxed) <= 0);
    }

    #[test]
    fn a_message_takes_its_latency_and_its_bytes_to_that_pe() {
        let mut pes = ShmTransport::threads(3, 1 << 16).unwrap();
        let far = Duration::from_secs(60);
        // To PE 1 nothing; to PE 2 20 ms and 2 us a byte.
        let slow = pes.remove(0).paced(Pace::new(vec![(0.0, 0.0), (0.0, 0.0), (20e-3, 2e-6)], far));
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
