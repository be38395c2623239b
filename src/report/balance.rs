//! How evenly rows are distributed in each step, and whether the same experts and PEs have the most in all steps.

use serde::{Deserialize, Serialize};

use super::pe::PeReport;

/// The distribution of rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// Over the experts of the layer.
    pub experts: LoadBalance,
    /// Over the PEs, by the rows that their experts compute.
    pub pes: LoadBalance,
}

/// The loads of the experts or of the PEs. A load is relative to the mean load of its step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadBalance {
    /// The largest load of each measured step, or of each step of the sample. 1 in a step without rows.
    pub imbalance: Vec<f64>,
    /// Estimated variance of the expected loads, which is the same in all steps; `None` with fewer than two steps.
    pub persistent: Option<f64>,
    /// Estimated variance of a load between steps; `None` with fewer than two steps.
    pub changing: Option<f64>,
}

impl Balance {
    /// Computes the balance from the steps that all PEs report.
    pub fn new(experts: usize, n_pes: usize, pes: &[PeReport]) -> Balance {
        let steps = pes.iter().map(|pe| pe.steps.len()).min().unwrap_or(0);
        let mut by_expert = vec![vec![0; experts]; steps];
        let mut by_pe = vec![vec![0; n_pes]; steps];
        for pe in pes {
            for ((step, by_expert), by_pe) in pe.steps.iter().zip(&mut by_expert).zip(&mut by_pe) {
                for &(expert, rows) in &step.expert_rows {
                    by_expert.get_mut(expert).into_iter().for_each(|sum| *sum += rows);
                    by_pe.get_mut(pe.pe).into_iter().for_each(|sum| *sum += rows);
                }
            }
        }
        // A lost PE computes no rows, and is not part of the mean.
        let reporting = |loads: Vec<u64>| pes.iter().filter_map(|pe| loads.get(pe.pe).copied()).collect();
        Balance {
            experts: LoadBalance::new(by_expert),
            pes: LoadBalance::new(by_pe.into_iter().map(reporting).collect()),
        }
    }
}

impl LoadBalance {
    /// `rows[step]` are the rows of each expert, or of each PE, in the same order in all steps.
    pub fn new(rows: Vec<Vec<u64>>) -> LoadBalance {
        let relative = |rows: Vec<u64>| -> Vec<f64> {
            let mean = rows.iter().sum::<u64>() as f64 / rows.len() as f64;
            rows.into_iter().map(|rows| if mean > 0.0 { rows as f64 / mean } else { 1.0 }).collect()
        };
        let loads: Vec<Vec<f64>> = rows.into_iter().map(relative).collect();
        let imbalance = loads.iter().map(|loads| loads.iter().copied().fold(0.0, f64::max)).collect();
        let (steps, n) = (loads.len() as f64, loads.first().map_or(0, Vec::len) as f64);
        if loads.len() < 2 || n == 0.0 {
            return LoadBalance { imbalance, persistent: None, changing: None };
        }
        let (mut between, mut within) = (0.0, 0.0);
        for i in 0..loads[0].len() {
            let mean = loads.iter().map(|loads| loads[i]).sum::<f64>() / steps;
            between += (mean - 1.0) * (mean - 1.0);
            within += loads.iter().map(|loads| (loads[i] - mean) * (loads[i] - mean)).sum::<f64>();
        }
        // The mean over S steps itself varies by a share 1 / S of the variance between steps.
        let changing = within / (n * (steps - 1.0));
        let persistent = (between / n - changing / steps).max(0.0);
        LoadBalance { imbalance, persistent: Some(persistent), changing: Some(changing) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variances_by_hand() {
        // Two experts, loads 1.5 and 0.5 in both steps: all of the variance is persistent.
        let steady = LoadBalance::new(vec![vec![30, 10], vec![15, 5]]);
        let want = LoadBalance { imbalance: vec![1.5, 1.5], persistent: Some(0.25), changing: Some(0.0) };
        assert_eq!(steady, want);
        // The experts change places: the means are equal, and each load varies by 2 * 0.5^2 / (2 - 1).
        let swapped = LoadBalance::new(vec![vec![30, 10], vec![5, 15]]);
        let want = LoadBalance { imbalance: vec![1.5, 1.5], persistent: Some(0.0), changing: Some(0.5) };
        assert_eq!(swapped, want);
        let one = LoadBalance::new(vec![vec![0, 0]]);
        assert_eq!(one, LoadBalance { imbalance: vec![1.0], persistent: None, changing: None });
        assert_eq!(LoadBalance::new(Vec::new()), LoadBalance::default());
    }

    #[test]
    fn estimates_find_the_variances_of_drawn_loads() {
        // Expert e has an expected load of 1 +- 0.4 and varies by a uniform factor with variance 0.1^2 in each step.
        let mut random = aristos_balance::Random(7);
        let width = 0.1 * 12f64.sqrt();
        let mut drawn = |steps: usize| {
            let mut rows = |e: usize| {
                let factor = 1.0 + width * (random.real() - 0.5);
                (1e6 * if e.is_multiple_of(2) { 1.4 } else { 0.6 } * factor) as u64
            };
            LoadBalance::new((0..steps).map(|_| (0..2000).map(&mut rows).collect()).collect())
        };
        // Within five standard deviations of the estimate of a variance from 2000 loads, whatever the number of steps.
        for steps in [2, 3, 20] {
            let found = drawn(steps);
            let changing = 0.01 * (1.4 * 1.4 + 0.6 * 0.6) / 2.0;
            assert!((found.changing.unwrap() - changing).abs() < 0.12 * changing, "{steps}: {:?}", found.changing);
            assert!((found.persistent.unwrap() - 0.16).abs() < 0.005, "{steps}: {:?}", found.persistent);
        }
    }

    #[test]
    fn rows_of_moved_experts_and_replicas_are_added() {
        let step = |expert_rows: &[(usize, u64)]| super::super::StepReport {
            expert_rows: expert_rows.to_vec(),
            ..super::super::StepReport::default()
        };
        let pe = |pe, steps: Vec<_>| PeReport { pe, steps, ..PeReport::default() };
        // Expert 0 is on both PEs in step 0; expert 1 moves from PE 1 to PE 3. PE 2 is lost.
        let pes = [
            pe(0, vec![step(&[(0, 4)]), step(&[(0, 8)])]),
            pe(1, vec![step(&[(0, 4), (1, 8)]), step(&[])]),
            pe(3, vec![step(&[(2, 8)]), step(&[(1, 8), (2, 8)])]),
        ];
        let balance = Balance::new(3, 4, &pes);
        assert_eq!(balance.experts, LoadBalance::new(vec![vec![8, 8, 8], vec![8, 8, 8]]));
        assert_eq!(balance.pes, LoadBalance::new(vec![vec![4, 12, 8], vec![8, 0, 16]]));
    }
}
