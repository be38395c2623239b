//! Times of several PEs on one clock.
//!
//! PEs of one host, recognised by the kernel's boot id, share `CLOCK_MONOTONIC`: their offsets are exactly 0. Between hosts the offset is measured over
//! the transport (Cristian 1989): PE 0 sends a request, the other PE answers with its time, and PE 0 assumes that this was the middle of the round trip,
//! with an uncertainty of half the round trip. The shortest of many round trips is used. The offset is measured before and after the steps, and
//! interpolated to correct drift. In a second, two hosts' clocks drift apart by less than this uncertainty.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::shmem::{Cmp, Shmem, SignalOp, Sym, Transport, Wait};

/// Round trips of one measurement.
const ROUNDS: u64 = 64;

/// This PE's clock, nanoseconds.
pub fn now_ns() -> i64 {
    read(ClockId::Monotonic)
}

/// CPU time of this thread, nanoseconds.
pub fn cpu_ns() -> i64 {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> i64 {
    let now = clock_gettime(clock);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The offset of another PE's clock at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offset {
    /// PE 0's time of the measurement, nanoseconds.
    pub at: i64,
    /// The other PE's clock minus PE 0's, nanoseconds.
    pub offset_ns: i64,
    /// Uncertainty, nanoseconds: half the shortest round trip.
    pub error_ns: i64,
}

impl Offset {
    /// The offset from round trips: (request by PE 0's clock, answer by the other's, arrival by PE 0's).
    fn of(trips: impl Iterator<Item = (i64, i64, i64)>) -> Offset {
        let shortest = trips.min_by_key(|(asked, _, answered)| answered - asked);
        let Some((asked, theirs, answered)) = shortest else { return Offset::default() };
        let middle = asked + (answered - asked) / 2;
        Offset { at: middle, offset_ns: theirs - middle, error_ns: (answered - asked + 1) / 2 }
    }
}

/// Converts one PE's times to PE 0's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common {
    before: Offset,
    after: Offset,
}

impl Common {
    /// Interpolates between two measurements. Outside, the nearer one is used.
    pub fn new(before: Offset, after: Offset) -> Common {
        Common { before, after }
    }

    /// Converts this PE's time to PE 0's.
    pub fn common_ns(&self, theirs: i64) -> i64 {
        let (a, b) = (self.before, self.after);
        let span = (b.at - a.at).max(1);
        // The share of the interval, estimated with the first offset.
        let part = ((theirs - a.offset_ns - a.at) as f64 / span as f64).clamp(0.0, 1.0);
        theirs - a.offset_ns - (part * (b.offset_ns - a.offset_ns) as f64) as i64
    }
}

/// The words of a clock measurement: the request, the answer, and the answered time.
#[derive(Clone, Copy)]
pub struct ClockWords {
    asked: Sym<u64>,
    answered: Sym<u64>,
    time: Sym<u64>,
}

/// Number of u64 words of [`ClockWords`].
pub const WORDS: usize = 3 * 8;

impl ClockWords {
    /// Uses [`WORDS`] zeroed words, with each word on its own cache line.
    pub fn new(words: Sym<u64>) -> ClockWords {
        ClockWords { asked: words.at(0), answered: words.at(8), time: words.at(16) }
    }

    /// Measures every PE's clock against PE 0's. PE 0 gets the results, index = PE. Collective; `turn` numbers the calls from 0.
    ///
    /// # Errors
    /// A PE that does not answer within `limit`.
    pub fn measure<T: Transport>(
        &self,
        shmem: &Shmem<T>,
        turn: u64,
        clock: impl Fn() -> i64,
        limit: Duration,
    ) -> Result<Vec<Offset>> {
        let (me, n) = (shmem.my_pe(), shmem.n_pes());
        let deadline = Instant::now() + limit;
        let wait = |signal, value, peer: usize| {
            let wait = Wait { signal, cmp: Cmp::Ge, value };
            shmem.wait_until(wait, deadline).map(drop).map_err(|timeout| anyhow!("clock of PE {peer}: {timeout}"))
        };
        if me != 0 {
            for round in 1..=ROUNDS {
                wait(self.asked, turn * ROUNDS + round, 0)?;
                let time = [clock() as u64];
                shmem.put_signal(self.time, &time, self.answered, 1, SignalOp::Add, 0);
            }
            return Ok(Vec::new());
        }
        let mut offsets = vec![Offset { at: clock(), ..Offset::default() }];
        for pe in 1..n {
            let mut trips = Vec::new();
            for round in 1..=ROUNDS {
                let asked = clock();
                shmem.signal_op(self.asked, turn * ROUNDS + round, SignalOp::Set, pe);
                // Plus the answers of all PEs before this one, in this and all earlier turns.
                let answers = (turn * (n as u64 - 1) + pe as u64 - 1) * ROUNDS + round;
                wait(self.answered, answers, pe)?;
                let answered = clock();
                let mut time = [0];
                shmem.get(&mut time, self.time, 0);
                trips.push((asked, time[0] as i64, answered));
            }
            offsets.push(Offset::of(trips.into_iter()));
        }
        Ok(offsets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortest_round_trip_is_used() {
        // The other clock is 1000 ahead. The second round trip is short, the others are delayed in one direction.
        let trips = [(0, 1090, 100), (200, 1205, 210), (300, 1305, 400)];
        let offset = Offset::of(trips.into_iter());
        assert_eq!(offset, Offset { at: 205, offset_ns: 1000, error_ns: 5 });
        assert_eq!(Offset::of(std::iter::empty()), Offset::default());
    }

    #[test]
    fn drift_is_corrected() {
        // Their clock is ahead by 1000 at 0, and by 1100 at 1000000: it is 100 ppm faster.
        let at = |at, offset_ns| Offset { at, offset_ns, error_ns: 5 };
        let common = Common::new(at(0, 1000), at(1_000_000, 1100));
        for (theirs, ours) in [(1000, 0), (501_050, 500_000), (1_001_100, 1_000_000)] {
            assert!((common.common_ns(theirs) - ours).abs() <= 1, "{theirs}: {}", common.common_ns(theirs));
        }
        let same = Common::new(at(0, 0), at(0, 0));
        assert_eq!((same.common_ns(-5), same.common_ns(77)), (-5, 77));
    }

    #[cfg(not(miri))]
    #[test]
    fn offsets_of_clocks_that_differ_are_measured() {
        use crate::shmem::{Segment, ShmTransport};
        const N: usize = 3;
        let bytes = Shmem::<ShmTransport>::heap_bytes_for(N, WORDS * 8);
        let segments: Vec<Segment> = (0..N).map(|_| Segment::create("test", bytes).unwrap()).collect();
        let view = || -> Vec<Segment> {
            segments.iter().map(|s| Segment::from_fd(s.fd().try_clone_to_owned().unwrap()).unwrap()).collect()
        };
        let ahead = [0i64, 5_000_000_000, -7_000_000_000];
        let limit = Duration::from_secs(60);
        std::thread::scope(|scope| {
            let pes: Vec<_> = (0..N)
                .map(|pe| {
                    let segments = view();
                    scope.spawn(move || {
                        let shmem = Shmem::new(ShmTransport::new(pe, segments).unwrap());
                        let words = ClockWords::new(shmem.alloc(WORDS).unwrap());
                        let clock = || now_ns() + ahead[pe];
                        let turns = [0, 1].map(|turn| words.measure(&shmem, turn, clock, limit).unwrap());
                        shmem.barrier_all(Instant::now() + limit).unwrap();
                        turns
                    })
                })
                .collect();
            let [first, second] = pes.into_iter().map(|pe| pe.join().unwrap()).next().unwrap();
            for offsets in [first, second] {
                assert_eq!(offsets.len(), N);
                for (offset, ahead) in offsets.iter().zip(ahead) {
                    let wrong = (offset.offset_ns - ahead).abs();
                    assert!(wrong <= offset.error_ns, "{offset:?} {ahead}");
                }
            }
        });
    }
}
