//! Fits a link to measured times of several message sizes.

use crate::cluster::Link;

/// A link fitted to times.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Fit {
    /// Latency, ms, at least 0; inverse bandwidth, ms per MB, above 0.
    pub link: Link,
    /// Median over the sizes of |time - fitted time| / time.
    pub residual: f64,
}

/// Fits `time = alpha + beta * size` to pairs of size, MB, and time, ms.
///
/// beta is the median of the slopes between all pairs of points, and alpha the median of the remaining times (Theil 1950, Sen 1968), so a
/// few outliers change neither. Both medians are weighted. A slope's weight is the distance of its points over its error, with errors
/// proportional to times (Sievers 1978): sizes are geometric, and the noisy slopes of the many pairs of small messages would otherwise
/// dominate. The weight of a remaining time is the inverse of the expected time.
///
/// Returns `None` for fewer than two sizes, or without times above 0.
pub fn fit(points: &[(f64, f64)]) -> Option<Fit> {
    let points: Vec<(f64, f64)> = points.iter().copied().filter(|(mb, ms)| *mb >= 0.0 && *ms > 0.0).collect();
    // Expected times, to which errors are proportional: estimated from the smaller half and the larger half of the sizes. With the measured
    // times as weights, outliers that are too short would count most.
    let mut ascending = points.clone();
    ascending.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (small, large) = ascending.split_at(points.len() / 2);
    let least = weighted_median(small.iter().map(|(_, t)| (*t, 1.0)).collect())?;
    let per_mb = weighted_median(large.iter().filter(|(x, _)| *x > 0.0).map(|(x, t)| (t / x, 1.0)).collect())?;
    let about = |x: f64| least + per_mb * x;
    let mut slopes = Vec::new();
    for (place, &(x, t)) in points.iter().enumerate() {
        for &(y, u) in &points[place + 1..] {
            if x != y {
                slopes.push(((u - t) / (y - x), (y - x).abs() / about(x).hypot(about(y))));
            }
        }
    }
    let mut beta = weighted_median(slopes)?;
    let above = |beta: f64| points.iter().map(|(x, t)| (t - beta * x, 1.0 / about(*x))).collect::<Vec<_>>();
    let mut alpha = weighted_median(above(beta))?;
    if beta <= 0.0 || alpha < 0.0 {
        // Noise. A latency below 0, or an inverse bandwidth of at most 0, is impossible: fit a line through zero.
        let through_zero: Vec<(f64, f64)> =
            points.iter().filter(|(x, _)| *x > 0.0).map(|(x, t)| (t / x, x / t)).collect();
        let most = weighted_median(through_zero.clone())?;
        if beta <= 0.0 {
            // The fastest measurement.
            beta = through_zero.iter().map(|(slope, _)| *slope).fold(most, f64::min);
            alpha = weighted_median(above(beta))?.max(0.0);
        } else {
            (alpha, beta) = (0.0, most);
        }
    }
    let off = points.iter().map(|(x, t)| ((t - alpha - beta * x).abs() / t, 1.0)).collect();
    Some(Fit { link: Link { alpha_ms: alpha, beta_ms_per_mb: beta }, residual: weighted_median(off)? })
}

/// The weighted median.
fn weighted_median(mut values: Vec<(f64, f64)>) -> Option<f64> {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half = values.iter().map(|(_, weight)| weight).sum::<f64>() / 2.0;
    let mut sum = 0.0;
    values
        .iter()
        .find(|(_, weight)| {
            sum += weight;
            sum >= half
        })
        .or(values.last())
        .map(|(value, _)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [f64; 10] = [1.6e-5, 6.4e-5, 2.56e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2, 0.25, 1.0, 4.0];

    fn times(alpha: f64, beta: f64) -> Vec<(f64, f64)> {
        SIZES.iter().map(|&mb| (mb, alpha + beta * mb)).collect()
    }

    /// Pseudo-random, from -1 to 1.
    fn noise(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    #[track_caller]
    fn near(a: f64, b: f64, share: f64) {
        assert!((a - b).abs() <= share * b.abs(), "{a}, expected {b}");
    }

    #[test]
    fn a_line_is_found_exactly() {
        for (alpha, beta) in [(0.0003, 0.02), (0.03, 0.054), (1e-6, 1e-4), (5.0, 100.0)] {
            let fit = fit(&times(alpha, beta)).unwrap();
            near(fit.link.alpha_ms, alpha, 1e-9);
            near(fit.link.beta_ms_per_mb, beta, 1e-9);
            assert!(fit.residual < 1e-9, "{fit:?}");
        }
        let flat = fit(&times(0.0, 0.5)).unwrap();
        assert!(flat.link.alpha_ms >= 0.0 && flat.link.alpha_ms < 1e-12, "{flat:?}");
    }

    #[test]
    fn a_wild_point_of_ten_moves_it_little() {
        let (alpha, beta) = (0.0003, 0.02);
        for wild in 0..SIZES.len() {
            for factor in [0.1, 0.5, 3.0, 30.0] {
                let mut points = times(alpha, beta);
                points[wild].1 *= factor;
                let fit = fit(&points).unwrap();
                near(fit.link.beta_ms_per_mb, beta, 0.2);
                near(fit.link.alpha_ms, alpha, 0.5);
            }
        }
    }

    #[test]
    fn noise_of_a_tenth_is_averaged_out_and_is_the_residual() {
        let mut state = 7;
        for _ in 0..200 {
            let (alpha, beta) = (0.0003, 0.02);
            let points: Vec<(f64, f64)> =
                times(alpha, beta).iter().map(|(x, t)| (*x, t * (1.0 + 0.1 * noise(&mut state)))).collect();
            let fit = fit(&points).unwrap();
            near(fit.link.beta_ms_per_mb, beta, 0.1);
            near(fit.link.alpha_ms, alpha, 0.12);
            assert!(fit.residual < 0.1, "{fit:?}");
        }
    }

    #[test]
    fn whatever_the_times_alpha_is_no_less_than_0_and_beta_above_it() {
        let mut state = 11;
        for round in 0..2000 {
            let scale = if round % 2 == 0 { 1.0 } else { 1e-6 };
            let points: Vec<(f64, f64)> =
                SIZES.iter().map(|&mb| (mb, scale * (1.0 + noise(&mut state)).powi(1 + round % 9))).collect();
            let Some(fit) = fit(&points) else { panic!("no fit of {points:?}") };
            let Link { alpha_ms, beta_ms_per_mb } = fit.link;
            assert!(alpha_ms >= 0.0 && alpha_ms.is_finite(), "{fit:?} of {points:?}");
            assert!(beta_ms_per_mb > 0.0 && beta_ms_per_mb.is_finite(), "{fit:?} of {points:?}");
            assert!(fit.residual >= 0.0 && fit.residual.is_finite(), "{fit:?} of {points:?}");
        }
        // Falling, and all equal.
        for points in [[(0.1, 3.0), (0.2, 2.0), (0.4, 1.0)], [(0.1, 1.0), (0.2, 1.0), (0.4, 1.0)]] {
            let fit = fit(&points).unwrap();
            assert!(fit.link.alpha_ms >= 0.0 && fit.link.beta_ms_per_mb > 0.0, "{fit:?}");
        }
        assert!(fit(&[(0.1, 1.0)]).is_none() && fit(&[(0.1, 1.0), (0.1, 2.0)]).is_none() && fit(&[]).is_none());
    }
}
