//! Measures the links between all PEs, over any kind of messages.

use std::time::Duration;

use super::fit::{Fit, fit};
use super::options::{ProbeError, ProbeOptions, ProbeStage};
use crate::cluster::{Cluster, Device, Links, Matrix, Probe};

/// One PE's side of the measurements. [`probe_links_by`] calls the methods on all PEs in the same order. Times are in ms, by the clock of
/// the PE that returns them.
pub trait LinkProber {
    /// The error of a failed measurement.
    type Error: From<ProbeError>;

    /// This PE's number.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Waits for all PEs.
    ///
    /// # Errors
    /// Returns an error if a PE does not arrive.
    fn barrier(&mut self) -> Result<(), Self::Error>;

    /// Gathers an equal number of values from every PE, in the order of PEs.
    ///
    /// # Errors
    /// Returns an error if a PE does not arrive.
    fn gather(&mut self, mine: &[f64]) -> Result<Vec<f64>, Self::Error>;

    /// Median round-trip times to `to`, which calls `answer` meanwhile: of an empty message, and of each size. `limit` bounds the time of a
    /// size after [`ProbeOptions::LEAST`] messages.
    ///
    /// # Errors
    /// Returns an error without an answer.
    fn send(&mut self, to: usize, limit: Duration) -> Result<Vec<f64>, Self::Error>;

    /// Receives and answers the messages of [`LinkProber::send`] from `from`.
    ///
    /// # Errors
    /// Returns an error without a message.
    fn answer(&mut self, from: usize) -> Result<(), Self::Error>;

    /// All PEs send at once, each to one PE, and receive from one: the median round-trip time to `to`, of the common size.
    ///
    /// # Errors
    /// Returns an error without a message or an answer.
    fn shift(&mut self, to: usize, from: usize) -> Result<f64, Self::Error>;

    /// All PEs send to all others: the median time until all have received this PE's messages.
    ///
    /// # Errors
    /// Those of [`LinkProber::shift`].
    fn exchange(&mut self) -> Result<f64, Self::Error>;
}

/// The links between all PEs, by ordered pair, row by row; diagonal entries have no meaning.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProbedLinks {
    /// Fits of the times alone.
    pub fits: Vec<Option<Fit>>,
    /// Round-trip time with all PEs sending, relative to the time alone.
    pub contention: Vec<f64>,
    /// By PE, the time of an all-to-all relative to the sum of its times alone.
    pub exchange_factor: Vec<f64>,
}

impl ProbedLinks {
    /// The cluster of these links and devices, in the order of PEs. `transport` is the transport's name in the cluster file.
    pub fn cluster(self, devices: Vec<Device>, options: &ProbeOptions, transport: &str) -> Cluster {
        let n = devices.len();
        let of = |value: &dyn Fn(&Fit) -> f64| -> Vec<f64> {
            self.fits.iter().map(|fit| fit.as_ref().map_or(0.0, value)).collect()
        };
        let matrix = Matrix::new(n, of(&|fit| fit.link.alpha_ms), of(&|fit| fit.link.beta_ms_per_mb));
        let rows = |flat: &[f64]| flat.chunks(n.max(1)).map(<[f64]>::to_vec).collect();
        let probe = Probe {
            transport: transport.to_string(),
            sizes_bytes: options.sizes.clone(),
            together_bytes: options.sizes.get(options.together).copied().unwrap_or(0),
            residual: rows(&of(&|fit| fit.residual)),
            contention: rows(&self.contention),
            exchange_factor: self.exchange_factor,
        };
        let mut cluster = Cluster::new(devices, Links::Matrix(matrix));
        cluster.probe = Some(probe);
        cluster
    }
}

/// Probes the links with `prober`; every PE gets the same result. Collective.
///
/// # Errors
/// The prober's errors, and [`ProbeError::Options`].
pub fn probe_links_by<P: LinkProber>(
    prober: &mut P,
    options: &ProbeOptions,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<ProbedLinks, P::Error> {
    options.check()?;
    let (n, me) = (prober.n_pes(), prober.my_pe());
    prober.barrier()?;

    // Row `me`: for each peer the round-trip times of an empty message and of each size, ms.
    let each = options.sizes.len() + 1;
    let mut own = vec![0.0; n * each];
    let pairs = n * (n - 1);
    let per_size = options.alone_limit.div_f64((pairs * each).max(1) as f64);
    let others = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j);
    for (done, (i, j)) in others.enumerate() {
        progress(ProbeStage::Alone, done, pairs);
        if me == i {
            let times = prober.send(j, per_size)?;
            own[j * each..(j + 1) * each].copy_from_slice(&times);
        } else if me == j {
            prober.answer(i)?;
        }
        prober.barrier()?;
    }
    let times = Times { n, sizes: &options.sizes };
    let mut alone = prober.gather(&own)?;
    for _ in 0..options.retries {
        // All PEs have the same times, thus the same pairs.
        let wild = times.wild(&alone);
        if wild.is_empty() {
            break;
        }
        for &(i, j) in &wild {
            if me == i {
                let again = prober.send(j, per_size)?;
                // Disturbances only add time, so the smaller time is kept.
                own[j * each..].iter_mut().zip(again).for_each(|(time, again)| *time = time.min(again));
            } else if me == j {
                prober.answer(i)?;
            }
            prober.barrier()?;
        }
        alone = prober.gather(&own)?;
    }

    let mut contention = vec![1.0; n];
    for shift in 1..n {
        progress(ProbeStage::Together, shift - 1, n);
        let to = (me + shift) % n;
        let time = prober.shift(to, (me + n - shift) % n)?;
        contention[to] = time / own[to * each + 1 + options.together].max(f64::MIN_POSITIVE);
    }
    progress(ProbeStage::Together, n.saturating_sub(1), n);
    let together = prober.exchange()?;
    let sum: f64 = (0..n).filter(|to| *to != me).map(|to| own[to * each + 1 + options.together]).sum();
    let factor = if n > 1 { together / sum.max(f64::MIN_POSITIVE) } else { 1.0 };
    let contention = prober.gather(&contention)?;
    let exchange_factor = prober.gather(&[factor])?;
    // No PE may free memory that another still uses.
    prober.barrier()?;

    let fits = (0..n * n).map(|at| if at / n == at % n { None } else { times.fit(&alone, at / n, at % n) }).collect();
    Ok(ProbedLinks { fits, contention, exchange_factor })
}

/// The round-trip times between all pairs alone, ms: for each ordered pair that of an empty message, then of each size.
struct Times<'s> {
    n: usize,
    sizes: &'s [usize],
}

impl Times<'_> {
    /// The fit for the link from `i` to `j`.
    fn fit(&self, all: &[f64], i: usize, j: usize) -> Option<Fit> {
        let each = self.sizes.len() + 1;
        let times = &all[(i * self.n + j) * each..(i * self.n + j + 1) * each];
        // At least a tenth of the round trip, so that noise cannot make it 0.
        let one_way = |round_trip: f64| (round_trip - times[0] / 2.0).max(round_trip / 10.0);
        let points: Vec<(f64, f64)> =
            self.sizes.iter().zip(&times[1..]).map(|(bytes, ms)| (*bytes as f64 * 1e-6, one_way(*ms))).collect();
        let mut fit = fit(&points)?;
        // Latency is above 0, regardless of the other times.
        let least = points.iter().map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min);
        fit.link.alpha_ms = fit.link.alpha_ms.max(least / 10.0);
        Some(fit)
    }

    /// The pairs with a bad fit, which are measured again.
    fn wild(&self, all: &[f64]) -> Vec<(usize, usize)> {
        let pairs = (0..self.n).flat_map(|i| (0..self.n).map(move |j| (i, j))).filter(|(i, j)| i != j);
        pairs.filter(|&(i, j)| self.fit(all, i, j).is_none_or(|fit| fit.residual > Probe::FITS)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Round-trip times of 3 PEs over links of 2 us and 10 GB/s, each multiplied by the factor that `noise` returns.
    fn round_trips(sizes: &[usize], noise: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
        let time = |bytes: usize| 0.002 + 0.1e-6 * bytes as f64;
        let of_pair = |i: usize, j: usize| -> Vec<f64> {
            let all = [0].into_iter().chain(sizes.iter().copied()).enumerate();
            all.map(|(at, bytes)| (time(bytes) + time(0)) * noise(i, j, at)).collect()
        };
        (0..9).flat_map(|at| of_pair(at / 3, at % 3)).collect()
    }

    #[test]
    fn times_that_fit_no_line_are_found_and_no_link_takes_no_time() {
        let sizes = ProbeOptions::thorough().sizes;
        let times = Times { n: 3, sizes: &sizes };
        let quiet = round_trips(&sizes, |_, _, _| 1.0);
        assert!(times.wild(&quiet).is_empty());
        let fit = times.fit(&quiet, 0, 2).unwrap();
        assert!((fit.link.alpha_ms - 0.002).abs() < 1e-6 && (fit.link.beta_ms_per_mb - 0.1).abs() < 1e-6, "{fit:?}");
        // Every second size from 1 to 2 is 20 times as slow.
        let busy = round_trips(&sizes, |i, j, at| if (i, j) == (1, 2) && at % 2 == 0 { 20.0 } else { 1.0 });
        assert_eq!(times.wild(&busy), [(1, 2)]);
        // The faster of two measurements.
        let again = round_trips(&sizes, |_, _, at| if at % 2 == 1 { 20.0 } else { 1.0 });
        let best: Vec<f64> = busy.iter().zip(&again).map(|(a, b)| a.min(*b)).collect();
        assert!(times.wild(&best).is_empty());
        // Any noise gives a valid latency and bandwidth.
        for seed in 1..500_u64 {
            let noise = |i: usize, j: usize, at: usize| {
                let mixed = (seed * 31 + (i * 77 + j * 13 + at) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                10f64.powf(mixed as f64 / f64::from(1 << 24) * 6.0 - 3.0)
            };
            let wild = round_trips(&sizes, noise);
            for (i, j) in [(0, 1), (2, 0)] {
                let Fit { link, residual } = times.fit(&wild, i, j).unwrap();
                let usual = |x: f64| x.is_finite() && x > 0.0;
                assert!(usual(link.alpha_ms) && usual(link.beta_ms_per_mb) && residual.is_finite(), "{link:?}");
            }
        }
    }
}
