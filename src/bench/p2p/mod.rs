//! `aristos bench p2p`: latency, bandwidth and message rate of one-sided operations between two PEs.
//!
//! The figures are the same for all transports. [`host`] measures transports with calls from the host; `device` measures NVSHMEM with calls from the
//! device, and `stream` with operations on a stream. [`report`] prints and plots the results.
//!
//! The method is that of NVSHMEM's perftest, with two differences. Each iteration, or batch of short ones, has its own time, so that a row has the median
//! and the tail in addition to the mean. Bandwidth is also measured with a receiver that reads every byte, because a put to unread memory measures the
//! sender's cache.

#[cfg(feature = "cuda")]
pub mod device;
pub mod host;
pub mod pe;
pub mod raw;
pub mod report;
mod sampling;
#[cfg(feature = "cuda")]
mod stream;

use serde::{Deserialize, Serialize};

use super::cpus::CpuPair;
pub use crate::job::request::{Op, P2pBench, Scope};
use crate::report::median;

/// The measured quantity of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Time until one operation is complete; half the round trip of a ping-pong.
    Latency,
    /// Time until the call of one operation returns.
    Issue,
    /// Many operations, completed at the end, to memory that is not read.
    Bandwidth,
    /// A stream of messages with a limited window. The receiver reads and acknowledges each one.
    Consume,
}

impl Measure {
    /// Name in files.
    pub fn name(self) -> &'static str {
        match self {
            Measure::Latency => "latency",
            Measure::Issue => "issue",
            Measure::Bandwidth => "bandwidth",
            Measure::Consume => "consume",
        }
    }
}

/// The result of one figure. Times are microseconds of one operation; half the round trip for ping-pongs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The initiator and the other PE.
    pub pair: [usize; 2],
    /// The measured quantity.
    pub measure: Measure,
    /// The operation.
    pub op: Op,
    /// The threads of a device that execute an operation.
    pub scope: Option<Scope>,
    /// Bytes of an operation; on a device of all blocks together.
    pub bytes: usize,
    /// Number of samples.
    pub iterations: usize,
    /// Operations per sample: more than 1 if one is too short for the clock.
    pub batch: usize,
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The minimum.
    pub min_us: f64,
    /// The mean.
    pub mean_us: f64,
    /// The median round trip of ping-pongs.
    pub round_trip_us: Option<f64>,
    /// Bytes over the median (for streams over the mean), 10^9 per second.
    pub gb_per_s: f64,
    /// Operations per second, by the same time.
    pub messages_per_s: f64,
    /// The median time of a memcpy of the same size by one thread with a cached source, in the same run.
    pub memcpy_us: Option<f64>,
    /// `memcpy_us` over the median, percent.
    pub memcpy_percent: Option<f64>,
    /// The median of bare copies and flags on the same pages, in rounds that alternate with this figure's.
    pub raw_us: Option<f64>,
    /// The median over `raw_us`.
    pub raw_ratio: Option<f64>,
    /// Median one-way latency of a bare flag right after the figure: the distance between the PEs' CPUs.
    pub flag_us: Option<f64>,
    /// The CPUs of the PEs.
    pub placement: Option<CpuPair>,
}

/// One measurement: the key of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// See [`Row::pair`].
    pub pair: [usize; 2],
    /// See [`Row::measure`].
    pub measure: Measure,
    /// See [`Row::op`].
    pub op: Op,
    /// See [`Row::scope`].
    pub scope: Option<Scope>,
    /// See [`Row::bytes`].
    pub bytes: usize,
    /// See [`Row::batch`].
    pub batch: usize,
}

impl Figure {
    /// Whether a sample is a round trip.
    pub fn is_ping_pong(&self) -> bool {
        self.measure == Measure::Latency && matches!(self.op, Op::PutSignal | Op::SendRecv)
    }

    /// The row of samples, which are microseconds of one operation or round trip.
    pub fn row(self, samples: &[f64]) -> Row {
        let ways = if self.is_ping_pong() { 2.0 } else { 1.0 };
        let mut sorted: Vec<f64> = samples.iter().map(|us| us / ways).collect();
        sorted.sort_by(f64::total_cmp);
        let p50_us = median(sorted.clone());
        let mean_us = sorted.iter().sum::<f64>() / sorted.len().max(1) as f64;
        // Messages of a stream may be delivered in bunches. Then most samples are near 0, and a few contain all the time.
        let of_one = if self.measure == Measure::Consume { mean_us } else { p50_us };
        let per_us = |amount: f64| if of_one > 0.0 { amount / of_one } else { 0.0 };
        Row {
            pair: self.pair,
            measure: self.measure,
            op: self.op,
            scope: self.scope,
            bytes: self.bytes,
            iterations: sorted.len(),
            batch: self.batch,
            p50_us,
            p99_us: percentile(&sorted, 0.99),
            min_us: sorted.first().copied().unwrap_or(0.0),
            mean_us,
            round_trip_us: self.is_ping_pong().then_some(2.0 * p50_us),
            gb_per_s: per_us(self.bytes as f64) * 1e-3,
            messages_per_s: per_us(1e6),
            memcpy_us: None,
            memcpy_percent: None,
            raw_us: None,
            raw_ratio: None,
            flag_us: None,
            placement: None,
        }
    }
}

impl Row {
    /// Adds the time of a memcpy, microseconds.
    pub fn with_memcpy(self, memcpy_us: f64) -> Row {
        let percent = if self.p50_us > 0.0 { 100.0 * memcpy_us / self.p50_us } else { 0.0 };
        Row { memcpy_us: Some(memcpy_us), memcpy_percent: Some(percent), ..self }
    }

    /// Adds samples of the bare copies and flags.
    pub fn with_raw(self, of: Figure, samples: &[f64]) -> Row {
        let raw_us = of.row(samples).p50_us;
        let ratio = if raw_us > 0.0 { self.p50_us / raw_us } else { 0.0 };
        Row { raw_us: Some(raw_us), raw_ratio: Some(ratio), ..self }
    }
}

/// The percentile of sorted values: `share` of the values are at most this. 0 without values.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    pub(super) const LIMIT: Duration = Duration::from_secs(60);

    /// All operations between two PEs.
    pub(super) fn bench() -> P2pBench {
        P2pBench {
            ops: vec![Op::Put, Op::PutNbi, Op::Get, Op::PutSignal, Op::Atomic, Op::SendRecv],
            scopes: Vec::new(),
            asked: (false, false),
            sizes: vec![1, 24, 4096],
            pairs: vec![[0, 1]],
            pes: 2,
            iterations: 10,
            warmup: 5,
            on_device: false,
            wait_limit: LIMIT,
        }
    }

    #[test]
    fn row_has_the_statistics_of_the_samples() {
        let of = Figure { pair: [0, 1], measure: Measure::Latency, op: Op::Put, scope: None, bytes: 4096, batch: 4 };
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let row = of.row(&samples);
        assert_eq!((row.min_us, row.p50_us, row.p99_us, row.mean_us), (1.0, 50.5, 99.0, 50.5));
        assert_eq!((row.iterations, row.batch, row.round_trip_us), (100, 4, None));
        assert!((row.gb_per_s - 4096.0 / 50.5e3).abs() < 1e-12);
        assert!((row.messages_per_s - 1e6 / 50.5).abs() < 1e-6);
        let row = row.with_memcpy(5.05);
        assert!((row.memcpy_percent.unwrap() - 10.0).abs() < 1e-9);

        let of = Figure { op: Op::PutSignal, ..of };
        let row = of.row(&samples).with_raw(of, &[50.0]);
        assert_eq!((row.min_us, row.p50_us, row.round_trip_us), (0.5, 25.25, Some(50.5)));
        assert_eq!((row.raw_us, row.raw_ratio), (Some(25.0), Some(1.01)));
        // Only the latency of a put with signal is a ping-pong.
        let stream = Figure { measure: Measure::Consume, ..of };
        assert_eq!(stream.row(&samples).p50_us, 50.5);
        // Every tenth sample contains the time of ten messages.
        let bunched: Vec<f64> = (0..100).map(|i| if i % 10 == 9 { 91.0 } else { 1.0 }).collect();
        let row = stream.row(&bunched);
        assert_eq!((row.p50_us, row.mean_us), (1.0, 10.0));
        assert!((row.gb_per_s - 4096.0 / 10e3).abs() < 1e-12 && (row.messages_per_s - 1e5).abs() < 1e-6);
        let none = of.row(&[]);
        assert_eq!((none.p50_us, none.gb_per_s, none.p99_us), (0.0, 0.0, 0.0));
    }
}
