//! Synthetic routing whose popularity changes between steps, microbatches and PEs.

use aristos_formats::InputError;
use aristos_formats::routing::Record;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::generate::draw;

/// Zipf's popularity of experts in random order, times log-normal factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// PEs.
    pub pes: usize,
    /// Tokens of a PE in a microbatch.
    pub tokens_per_pe: usize,
    /// The expert of rank r has a popularity in proportion to r^-zipf, from 1.
    pub zipf: f64,
    /// Standard deviation of the logarithm of each of three factors: of a step, of a microbatch, and of a PE in a microbatch.
    pub sigma: f64,
    /// Correlation of a step's factor with that of the next.
    pub correlation: f64,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// The microbatches of a [`Drift`], without end.
pub struct Drifting {
    drift: Drift,
    rng: ChaCha8Rng,
    /// Logarithm of each expert's popularity, and of the step's factor.
    base: Vec<f64>,
    step: Vec<f64>,
    number: usize,
}

impl Drift {
    /// Starts at the first microbatch.
    ///
    /// # Errors
    /// Returns an error that names the field, its value and the values allowed.
    pub fn start(self) -> Result<Drifting, InputError> {
        let Drift { experts, top_k, pes, tokens_per_pe, zipf, sigma, correlation, microbatches, .. } = self;
        let choices = top_k.saturating_mul(pes).saturating_mul(tokens_per_pe);
        let counts = [
            ("experts", experts, 1 << 16),
            ("top_k", top_k, experts),
            ("pes", pes, 1 << 12),
            ("microbatches", microbatches, 1 << 20),
            ("choices", choices, 1 << 26),
        ];
        for (field, value, most) in counts {
            if value == 0 || value > most {
                return Err(InputError::value(format!("`{field}`"), format!("is {value}"), format!("1 to {most}")));
            }
        }
        for (field, value, most) in [("zipf", zipf, 20.0), ("drift", sigma, 10.0), ("correlation", correlation, 1.0)] {
            if !(0.0..=most).contains(&value) {
                let expected = format!("a number from 0 to {most}");
                return Err(InputError::value(format!("`{field}`"), format!("is {value}"), expected));
            }
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut base: Vec<f64> = (1..=experts).map(|rank| -zipf * (rank as f64).ln()).collect();
        // Shuffle by Fisher and Yates (1938).
        (1..experts).for_each(|last| base.swap(last, rng.random_range(0..=last)));
        let step = (0..experts).map(|_| sigma * normal(&mut rng)).collect();
        Ok(Drifting { drift: self, rng, base, step, number: 0 })
    }
}

/// A normal random number by the method of Box and Muller (1958).
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (a, b): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

impl Iterator for Drifting {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let Drift { experts, top_k, pes, tokens_per_pe, sigma, correlation, microbatches, .. } = self.drift;
        if self.number > 0 && self.number.is_multiple_of(microbatches) {
            let fresh = sigma * (1.0 - correlation * correlation).sqrt();
            for factor in &mut self.step {
                *factor = correlation * *factor + fresh * normal(&mut self.rng);
            }
        }
        let number = self.number as u64;
        self.number += 1;
        let batch: Vec<f64> = (0..experts).map(|_| sigma * normal(&mut self.rng)).collect();
        let mut choices = Vec::with_capacity(pes * tokens_per_pe * top_k);
        for _ in 0..pes {
            let mut sum = 0.0;
            let cumulative: Vec<f64> = (0..experts)
                .map(|e| {
                    sum += (self.base[e] + self.step[e] + batch[e] + sigma * normal(&mut self.rng)).exp();
                    sum
                })
                .collect();
            (0..tokens_per_pe).for_each(|_| draw(&mut self.rng, &cumulative, top_k, &mut choices));
        }
        Some(Record { layer: 0, step: number, tokens_per_node: vec![tokens_per_pe; pes], choices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drift() -> Drift {
        Drift {
            experts: 16,
            top_k: 2,
            pes: 3,
            tokens_per_pe: 4000,
            zipf: 0.7,
            sigma: 0.0,
            correlation: 0.9,
            microbatches: 4,
            seed: 1,
        }
    }

    fn loads(record: &Record) -> Vec<f64> {
        let mut loads = vec![0.0; 16];
        record.choices.iter().for_each(|&e| loads[e as usize] += 1.0);
        loads
    }

    #[test]
    fn popularity_is_zipf_in_random_order() {
        let record = drift().start().unwrap().next().unwrap();
        assert_eq!((record.tokens_per_node, record.choices.len()), (vec![4000; 3], 24_000));
        let with = |drift: Drift| loads(&drift.start().unwrap().next().unwrap());
        let drawn = Drift { top_k: 1, tokens_per_pe: 40_000, ..drift() };
        let mut sorted = with(drawn);
        assert!(!sorted.is_sorted_by(|a, b| a > b) && with(Drift { seed: 2, ..drawn }) != sorted);
        sorted.sort_by(|a, b| b.total_cmp(a));
        let all: f64 = (1..=16).map(|rank| f64::from(rank).powf(-0.7)).sum();
        for (rank, load) in sorted.iter().enumerate() {
            let want = 120_000.0 * (rank as f64 + 1.0).powf(-0.7) / all;
            // Neighbours may change places by chance, so the bound is wide: seven standard deviations.
            assert!((load - want).abs() < 7.0 * want.sqrt(), "{rank}: {load} {want}");
        }
    }

    #[test]
    fn seeds_repeat_and_loads_drift() {
        let start = |drift: Drift| drift.start().unwrap().take(8).collect::<Vec<_>>();
        assert_eq!(start(drift()), start(drift()));
        // The mean absolute change of the logarithm of a load from one microbatch to the next: noise of the draws only, and with drift.
        let change = |sigma: f64| {
            let all: Vec<Vec<f64>> = start(Drift { sigma, ..drift() }).iter().map(loads).collect();
            let pairs = all.windows(2).flat_map(|pair| pair[0].iter().zip(&pair[1]));
            pairs.map(|(a, b)| (a / b).ln().abs()).sum::<f64>() / (16.0 * 7.0)
        };
        assert!(change(0.0) < 0.05 && change(0.5) > 0.2, "{} {}", change(0.0), change(0.5));
    }

    #[test]
    fn bad_input_is_reported_in_one_line() {
        let error = |drift: Drift| drift.start().err().map(|wrong| wrong.to_string()).unwrap_or_default();
        assert_eq!(error(Drift { top_k: 17, ..drift() }), "`top_k` is 17, expected 1 to 16");
        assert_eq!(error(Drift { pes: 0, ..drift() }), "`pes` is 0, expected 1 to 4096");
        assert_eq!(error(Drift { zipf: f64::NAN, ..drift() }), "`zipf` is NaN, expected a number from 0 to 20");
        assert_eq!(error(Drift { sigma: -1.0, ..drift() }), "`drift` is -1, expected a number from 0 to 10");
        assert!(error(Drift { tokens_per_pe: usize::MAX, ..drift() }).starts_with("`choices` is"));
    }
}
