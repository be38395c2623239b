//! How far a result is from the reference, and how far it may be.

use std::fmt;

/// The largest relative deviation of an f32 result: f32's unit roundoff, 6e-8, times what sums of
/// some thousand terms in f32 and a chain of three products make of it.
pub const TOLERANCE_F32: f64 = 1e-5;

/// The largest relative deviation of a bf16 result (f32 accumulation): bf16's unit roundoff, 4e-3,
/// times the few roundings between input and gradient.
pub const TOLERANCE_BF16: f64 = 2e-2;

/// The same of an f16 result: f16's unit roundoff, 5e-4, is an eighth of bf16's.
pub const TOLERANCE_F16: f64 = TOLERANCE_BF16 / 8.0;

/// The difference between a result and the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Deviation {
    /// What was compared.
    pub name: String,
    /// `||got - want||_2 / ||want||_2`; `||got||_2` where `want` is all zero; infinite where either
    /// has a NaN or their lengths differ.
    pub relative: f64,
    /// Where `|got - want|` is largest, or the first NaN, or the shorter one's length.
    pub worst: usize,
    /// The result there; NaN where it has none.
    pub got: f32,
    /// The reference there; NaN where it has none.
    pub want: f64,
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Deviation { name, relative, worst, got, want } = self;
        write!(f, "{name}: relative deviation {relative:.1e}, largest at {worst}: got {got}, expected {want}")
    }
}

/// Compares a result with the reference, norm-wise.
pub fn compare(name: &str, got: &[f32], want: &[f64]) -> Deviation {
    let at = |worst: usize, relative: f64| Deviation {
        name: name.to_owned(),
        relative,
        worst,
        got: got.get(worst).copied().unwrap_or(f32::NAN),
        want: want.get(worst).copied().unwrap_or(f64::NAN),
    };
    if got.len() != want.len() {
        return at(got.len().min(want.len()), f64::INFINITY);
    }
    let (mut worst, mut largest) = (0, 0.0);
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let d = (f64::from(g) - w).abs();
        if d.is_nan() {
            return at(i, f64::INFINITY);
        }
        if d > largest {
            (worst, largest) = (i, d);
        }
        difference += d * d;
        norm += w * w;
    }
    let scale = if norm > 0.0 { norm.sqrt() } else { 1.0 };
    at(worst, difference.sqrt() / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviation_is_norm_wise_and_points_at_the_worst() {
        let d = compare("x", &[3.0, 4.5, 0.0], &[3.0, 4.0, 0.0]);
        assert_eq!((d.relative, d.worst, d.got, d.want), (0.1, 1, 4.5, 4.0));
        assert_eq!(d.to_string(), "x: relative deviation 1.0e-1, largest at 1: got 4.5, expected 4");
        assert_eq!(compare("x", &[0.0, -2.0], &[0.0, 0.0]).relative, 2.0);
        assert_eq!(compare("x", &[], &[]).relative, 0.0);
    }

    #[test]
    fn nan_infinity_and_length_are_infinite_deviations() {
        assert_eq!(compare("x", &[1.0, f32::NAN], &[1.0, 2.0]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[1.0, f32::NAN], &[1.0, 2.0]).worst, 1);
        assert_eq!(compare("x", &[f32::INFINITY], &[1.0]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[f32::INFINITY], &[f64::INFINITY]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[1.0], &[f64::NAN]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[1.0], &[1.0, 2.0]).worst, 1);
        assert_eq!(compare("x", &[1.0], &[1.0, 2.0]).relative, f64::INFINITY);
    }
}
