//! A sample of the steps, so that a report of a million steps takes no more memory than one of a few thousand.

use super::pe::StepReport;

/// Maximum steps in the sample. A report of fewer steps has all of them.
const MAX_STEPS: usize = 2048;

/// A uniform random sample of the steps: the steps whose hashed number is below a bound, which is halved when the sample is full, so that
/// every PE keeps the same steps. (Every n-th step would be biased if steps alternate.)
#[derive(Debug, Default)]
pub struct StepSample {
    kept: Vec<(u64, StepReport)>,
    halvings: u32,
    seen: u64,
}

impl StepSample {
    /// Adds the next step, if it is in the sample.
    pub fn offer(&mut self, step: StepReport) {
        let number = self.seen;
        self.seen += 1;
        if !self.has(number) {
            return;
        }
        self.kept.push((number, step));
        if self.kept.len() > MAX_STEPS {
            self.halvings += 1;
            let halvings = self.halvings;
            self.kept.retain(|(number, _)| is_below(*number, halvings));
        }
    }

    /// Number of steps, inside and outside the sample.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The steps of the sample in order.
    pub fn into_steps(self) -> Vec<StepReport> {
        self.kept.into_iter().map(|(_, step)| step).collect()
    }

    fn has(&self, number: u64) -> bool {
        is_below(number, self.halvings)
    }
}

/// Whether a step is in the sample after `halvings` halvings. Each halving keeps half of the steps.
fn is_below(number: u64, halvings: u32) -> bool {
    // Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), `mix64` of their figure 16.
    let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    mixed.leading_zeros() >= halvings
}

#[cfg(test)]
mod tests {
    use super::super::pe::PassReport;
    use super::*;

    fn step(seconds: f64) -> StepReport {
        StepReport { forward: PassReport { seconds, ..PassReport::default() }, ..StepReport::default() }
    }

    fn sample(steps: u64, seconds: impl Fn(u64) -> f64) -> Vec<f64> {
        let mut sample = StepSample::default();
        (0..steps).for_each(|number| sample.offer(step(seconds(number))));
        assert_eq!(sample.seen(), steps);
        sample.into_steps().iter().map(StepReport::seconds).collect()
    }

    #[test]
    fn few_steps_are_all_kept_in_order() {
        assert_eq!(sample(2048, |n| n as f64), (0..2048).map(f64::from).collect::<Vec<_>>());
    }

    #[test]
    fn sample_of_many_steps_is_uniform() {
        let kept = sample(1_000_000, |n| n as f64);
        assert!((900..=2048).contains(&kept.len()), "{}", kept.len());
        assert!(kept.is_sorted());
        // The median of a uniform sample of a thousand is within five of its standard deviations, 0.5 / sqrt(1000) each.
        assert!((kept[kept.len() / 2] / 1e6 - 0.5).abs() < 0.08, "{}", kept[kept.len() / 2]);
        // As is the share of any period.
        for period in [2_u64, 3, 8, 100] {
            let first = kept.iter().filter(|&&n| (n as u64).is_multiple_of(period)).count() as f64 / kept.len() as f64;
            let p = 1.0 / period as f64;
            assert!((first - p).abs() < 5.0 * (p * (1.0 - p) / 900.0).sqrt(), "{period}: {first}");
        }
    }
}
