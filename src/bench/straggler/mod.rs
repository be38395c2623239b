//! `aristos bench straggler`: all-to-all steps, their delays and the causes.
//!
//! In a step every PE computes, sends a message to every other PE, and waits for all of their messages. The *time* of a PE is from its first sent to its
//! last received message. The fastest PE's time is the *actual* time of the exchange; the difference to the slowest PE's is the *delay*. Each delay is
//! attributed to a PE that began to send late, to a link on which a message took long, or to the scheduler, if a PE was ready to run without a CPU.
//!
//! - [`pe`]: the steps on one PE.
//! - [`clock`]: times of several PEs on one clock.
//! - [`attribute`]: the cause of each delay.
//! - [`queue`]: time without a CPU.
//! - [`report`]: table, CSV, JSON and plots.

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
    /// CPU time of a PE in a step, microseconds. Every PE computes the same value.
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

    /// Additional time of a message, nanoseconds.
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
    /// Start of the computation.
    pub begin: i64,
    /// Start of the first send.
    pub send: i64,
    /// End of the step.
    pub end: i64,
    /// Send time of each PE's message to this one; index = sender.
    pub sent: Vec<i64>,
    /// Arrival of each message, or the time when this PE read it.
    pub arrived: Vec<i64>,
    /// Time without a CPU while ready to run: from the last message of the step before to the start of this one.
    pub queued_before: i64,
    /// Time without a CPU during the computation.
    pub queued_compute: i64,
    /// Time without a CPU during the sends.
    pub queued_send: i64,
    /// Time without a CPU from the sends to the last message.
    pub queued_receive: i64,
}

impl PeStep {
    /// Time from the first sent message to the end of the step.
    pub fn time_ns(&self) -> i64 {
        self.end - self.send
    }

    /// Total time without a CPU, including the time since the step before.
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
    fn imbalance_keeps_the_mean_of_a_step() {
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
    fn injected_noise_depends_on_request_and_seed() {
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
    fn invalid_requests_are_errors() {
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
