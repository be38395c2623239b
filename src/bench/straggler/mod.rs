//! `aristos bench straggler`: all-to-all steps, whom they wait for, and why.
//!
//! In a step every PE computes, then sends a message to every other, and is through when it has all of theirs. Its *time* is from the
//! first message it sends until then. The fastest PE's time is what the exchange *actually* takes; the slowest's is longer by the
//! *delay*, which it spent waiting. Each delay is attributed: to a PE that began to send late, to a link on which a message took
//! long after it was sent, or to the scheduler, where a PE was ready to run and had no CPU.
//!
//! - [`pe`]: the steps, on one PE.
//! - [`clock`]: times of several PEs on one clock.
//! - [`attribute`]: the cause of each delay.
//! - [`queue`]: time without a CPU.
//! - [`report`]: what is printed and plotted.

pub mod attribute;
pub mod clock;
pub mod pe;
pub mod queue;
pub mod report;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

pub use crate::job::request::{Inject, StragglerBench, StragglerMode};

impl StragglerBench {
    /// How much CPU time a PE computes for in a step, microseconds: the same on every PE that computes it.
    pub fn compute_us(&self, step: usize, pe: usize) -> f64 {
        let n = self.pes as f64;
        let mut of_step = ChaCha8Rng::seed_from_u64(self.seed);
        of_step.set_stream(step as u64);
        let hottest = of_step.random_range(0..self.pes);
        let share = match self.pes {
            1 => 1.0,
            _ if pe == hottest => self.imbalance,
            _ => (n - self.imbalance) / (n - 1.0),
        };
        let mut time = self.compute_us * share;
        for inject in &self.inject {
            match *inject {
                Inject::SlowPe { pe: slow, factor } if slow == pe => time *= factor,
                _ => {}
            }
        }
        for inject in &self.inject {
            if let Inject::Jitter { us } = *inject {
                let mut of_pe = ChaCha8Rng::seed_from_u64(self.seed ^ 0x6A09_E667_F3BC_C908);
                of_pe.set_stream((step * self.pes + pe) as u64);
                time += us * of_pe.random::<f64>();
            }
        }
        time
    }

    /// How much longer a message takes, nanoseconds.
    pub fn link_ns(&self, from: usize, to: usize) -> u64 {
        let of = |inject: &Inject| match *inject {
            Inject::SlowLink { from: a, to: b, us } if (a, b) == (from, to) => us * 1e3,
            _ => 0.0,
        };
        self.inject.iter().map(of).sum::<f64>() as u64
    }
}

/// One step of one PE, on the common clock, nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeStep {
    /// When it began to compute.
    pub begin: i64,
    /// When it began to send.
    pub send: i64,
    /// When it was through.
    pub end: i64,
    /// When each PE sent its message to this one; index = sender.
    pub sent: Vec<i64>,
    /// When that arrived; at the earliest when this PE looked.
    pub arrived: Vec<i64>,
    /// How long it was ready to run and had no CPU: since it had all messages of the step before, until it began.
    pub queued_before: i64,
    /// While it computed.
    pub queued_compute: i64,
    /// While it sent.
    pub queued_send: i64,
    /// From then on, until it had all messages.
    pub queued_receive: i64,
}

impl PeStep {
    /// From the first message it sent until it was through.
    pub fn time_ns(&self) -> i64 {
        self.end - self.send
    }

    /// How long it was ready to run and had no CPU, the time since the step before included.
    pub fn queued_ns(&self) -> i64 {
        self.queued_before + self.queued_compute + self.queued_send + self.queued_receive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench() -> StragglerBench {
        StragglerBench {
            pes: 4,
            steps: 10,
            warmup: 0,
            bytes: 64,
            compute_us: 100.0,
            imbalance: 2.5,
            modes: vec![StragglerMode::Bulk],
            inject: Vec::new(),
            seed: 1,
            wait_limit: std::time::Duration::from_secs(1),
        }
    }

    #[test]
    fn a_steps_mean_stays_and_one_pe_has_the_most() {
        let bench = bench();
        let mut hottest = [0; 4];
        for step in 0..200 {
            let times: Vec<f64> = (0..4).map(|pe| bench.compute_us(step, pe)).collect();
            assert!((times.iter().sum::<f64>() - 400.0).abs() < 1e-9, "{times:?}");
            let most = (0..4).max_by(|&a, &b| times[a].total_cmp(&times[b])).unwrap();
            assert!((times[most] - 250.0).abs() < 1e-9);
            hottest[most] += 1;
        }
        assert!(hottest.iter().all(|&n| n > 20), "{hottest:?}");
        let one = StragglerBench { pes: 1, imbalance: 1.0, ..bench };
        assert_eq!(one.compute_us(3, 0), 100.0);
    }

    #[test]
    fn noise_is_where_it_was_asked_for_and_the_seeds() {
        let even = StragglerBench { imbalance: 1.0, ..bench() };
        let slow = StragglerBench { inject: vec![Inject::SlowPe { pe: 2, factor: 3.0 }], ..even.clone() };
        let times: Vec<f64> = (0..4).map(|pe| slow.compute_us(0, pe)).collect();
        assert_eq!(times, [100.0, 100.0, 300.0, 100.0]);
        let jitter = StragglerBench { inject: vec![Inject::Jitter { us: 50.0 }], ..even.clone() };
        let times = |bench: &StragglerBench| -> Vec<f64> { (0..40).map(|i| bench.compute_us(i / 4, i % 4)).collect() };
        assert_eq!(times(&jitter), times(&jitter.clone()));
        assert_ne!(times(&jitter), times(&StragglerBench { seed: 2, ..jitter.clone() }));
        assert!(times(&jitter).iter().all(|t| (100.0..150.0).contains(t)));
        assert!(times(&jitter).iter().any(|t| *t > 140.0));
        let link = StragglerBench { inject: vec![Inject::SlowLink { from: 0, to: 3, us: 20.5 }], ..even };
        assert_eq!((link.link_ns(0, 3), link.link_ns(3, 0)), (20500, 0));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |change: fn(&mut StragglerBench)| {
            let mut bench = bench();
            change(&mut bench);
            bench.validate().unwrap_err().to_string()
        };
        assert_eq!(wrong(|b| b.steps = 0), "`steps` is 0, expected at least 1");
        assert_eq!(wrong(|b| b.imbalance = 5.0), "`imbalance` is 5, expected 1 to 4, the number of PEs");
        assert_eq!(wrong(|b| b.compute_us = f64::NAN), "`compute_us` is NaN, expected 0 to 10^7 microseconds");
        assert_eq!(
            wrong(|b| b.inject = vec![Inject::SlowPe { pe: 4, factor: 2.0 }]),
            "`inject` slow-pe: PE 4, expected one below `pes`, which is 4"
        );
        assert_eq!(
            wrong(|b| b.inject = vec![Inject::SlowLink { from: 1, to: 1, us: 2.0 }]),
            "`inject` slow-link: PE 1 to itself, expected two PEs"
        );
    }
}
