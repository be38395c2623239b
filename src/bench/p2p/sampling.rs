//! The number of samples of an operation: the requested one, reduced for large sizes and slow links.

use std::time::{Duration, Instant};

use super::{Measure, Op, P2pBench};
use crate::shmem::{Shmem, Sym, Transport};

/// Rounds of samples, alternating with rounds of the bare measurement.
pub const ROUNDS: usize = 5;
/// Approximate maximum bytes of a figure.
const FIGURE_BYTES: usize = 512 << 20;
/// Minimum samples of large sizes.
pub const MIN_SAMPLES: usize = 20;
/// Approximate maximum time of a figure including warm-up, seconds. Slow links have fewer samples.
const FIGURE_S: f64 = 2.0;
/// Maximum time of a batch of calls that each wait for the other PE, seconds. Reading the clock takes much less.
const BATCH_S: f64 = 1e-3;
/// Minimum time of the put that measures the link's rate, seconds; the largest put may be shorter.
const RATE_S: f64 = 0.05;

/// The approximate speed of a link.
#[derive(Clone, Copy, Debug)]
pub struct LinkSpeed {
    /// Round trip, seconds.
    round_trip_s: f64,
    bytes_per_s: f64,
}

impl LinkSpeed {
    /// Measures the link from this PE to `peer` by puts to unread memory.
    pub fn measure<T: Transport>(shmem: &Shmem<T>, ring: Sym<u8>, source: &[u8], peer: usize) -> LinkSpeed {
        let put_s = |bytes: usize| {
            let start = Instant::now();
            shmem.put(ring.slice(0..bytes), &source[..bytes], peer);
            shmem.quiet();
            // A coarse clock may return 0.
            start.elapsed().as_secs_f64().max(1e-9)
        };
        let round_trip_s = (0..5).map(|_| put_s(8)).fold(f64::INFINITY, f64::min);
        let (mut bytes, mut seconds) = (8, round_trip_s);
        while bytes < source.len() && seconds < RATE_S.max(4.0 * round_trip_s) {
            bytes = (4 * bytes).min(source.len());
            seconds = put_s(bytes);
        }
        LinkSpeed { round_trip_s, bytes_per_s: bytes as f64 / (seconds - round_trip_s).max(seconds / 10.0) }
    }

    /// Words for the peer: both PEs must take the same samples.
    pub fn to_words(self) -> [u64; 2] {
        [self.round_trip_s, self.bytes_per_s].map(f64::to_bits)
    }

    /// The inverse of [`LinkSpeed::to_words`].
    pub fn from_words([round_trip_s, bytes_per_s]: [u64; 2]) -> LinkSpeed {
        LinkSpeed { round_trip_s: f64::from_bits(round_trip_s), bytes_per_s: f64::from_bits(bytes_per_s) }
    }
}

/// The sampling of one size of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSampling {
    /// Measured samples, a multiple of [`ROUNDS`].
    pub samples: usize,
    /// Warm-up samples of each round.
    pub warmup: usize,
    /// Operations per sample.
    pub batch: usize,
    /// Approximate time of a round.
    pub round: Duration,
}

impl HostSampling {
    /// The sampling of an operation between two PEs with this link.
    pub fn new(bench: &P2pBench, link: LinkSpeed, measure: Measure, op: Op, bytes: usize) -> HostSampling {
        // Makes a batch long enough for the clock: about 100 ns for a hop, 10 for a call, and the bytes.
        let (budget, most) = match (measure, op) {
            (Measure::Latency, Op::PutSignal | Op::SendRecv) => (64 << 10, 16),
            (Measure::Latency | Measure::Issue, _) => (16 << 10, 64),
            (Measure::Bandwidth, _) => (64 << 10, 512),
            (Measure::Consume, _) => (256 << 10, 256),
        };
        let mut batch = (budget / bytes.max(1)).clamp(1, most);
        let one_s = link.round_trip_s + bytes as f64 / link.bytes_per_s;
        // Puts of a bandwidth measurement overlap; all other calls, and gets, are sequential. A non-blocking put is measured twice.
        let batch_s = match (measure, op) {
            (Measure::Bandwidth, Op::Put) | (Measure::Consume, _) => {
                link.round_trip_s + (batch * bytes) as f64 / link.bytes_per_s
            }
            _ => {
                batch = batch.min((BATCH_S / one_s).ceil() as usize).max(1);
                let ways = if matches!(op, Op::PutSignal | Op::SendRecv | Op::PutNbi) { 2.0 } else { 1.0 };
                ways * batch as f64 * one_s
            }
        };
        let warmup = bench.warmup.div_ceil(ROUNDS);
        let affordable = (FIGURE_BYTES / (batch * bytes).max(1)).max(MIN_SAMPLES);
        let in_time = (FIGURE_S / batch_s) as usize;
        let rounds = |samples: usize| samples.div_ceil(ROUNDS).max(1);
        let samples = rounds(bench.iterations.min(affordable).min(in_time.saturating_sub(ROUNDS * warmup)));
        let warmup = warmup.min(samples);
        let round = Duration::from_secs_f64((warmup + samples) as f64 * batch_s);
        HostSampling { samples: ROUNDS * samples, warmup, batch, round }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::p2p::tests::bench;

    const NEAR: LinkSpeed = LinkSpeed { round_trip_s: 2e-7, bytes_per_s: 1e12 };

    #[test]
    fn batches_are_long_enough_for_the_clock() {
        let bench = P2pBench { iterations: 1000, ..bench() };
        let plan = |measure, op, bytes| HostSampling::new(&bench, NEAR, measure, op, bytes);
        let small = plan(Measure::Latency, Op::PutSignal, 16);
        assert_eq!((small.batch, small.samples), (16, 1000));
        let large = plan(Measure::Latency, Op::PutSignal, 64 << 20);
        assert_eq!((large.batch, large.samples), (1, MIN_SAMPLES));
        assert_eq!(plan(Measure::Bandwidth, Op::Put, 4096).batch, 16);
        for (measure, op) in [(Measure::Consume, Op::PutSignal), (Measure::Latency, Op::Get)] {
            for bytes in [1, 100, 1 << 12, 1 << 22, 1 << 30] {
                let plan = plan(measure, op, bytes);
                assert!(plan.batch >= 1 && plan.samples.is_multiple_of(ROUNDS) && plan.samples >= MIN_SAMPLES);
            }
        }
    }

    #[test]
    fn slow_links_have_fewer_samples() {
        let bench = P2pBench { iterations: 1000, ..bench() };
        for link in [(1e-4, 1e7), (0.04, 1e9), (0.04, 1e5), (2e-3, 1e8)] {
            let link = LinkSpeed::from_words(LinkSpeed { round_trip_s: link.0, bytes_per_s: link.1 }.to_words());
            for op in bench.ops.iter().copied() {
                for measure in [Measure::Latency, Measure::Bandwidth, Measure::Consume] {
                    for bytes in [1, 1 << 12, 1 << 18] {
                        let plan = HostSampling::new(&bench, link, measure, op, bytes);
                        let least = plan.samples == ROUNDS && plan.warmup <= 1;
                        assert!(plan.samples >= ROUNDS && plan.batch >= 1);
                        assert!(least || ROUNDS as f64 * plan.round.as_secs_f64() <= FIGURE_S * 1.5, "{plan:?}");
                    }
                }
            }
        }
        let plan = HostSampling::new(&bench, LinkSpeed { round_trip_s: 0.04, ..NEAR }, Measure::Latency, Op::Get, 16);
        assert_eq!(plan.batch, 1);
    }
}
