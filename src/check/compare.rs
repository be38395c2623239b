//! The deviation of a result from the reference, and its tolerance.

use std::fmt;

use super::bound::{Bounds, norm};
use crate::moe::Dtype;

/// Maximum relative deviation of an f32 result: f32's unit roundoff, 6e-8, grown by sums of a few thousand terms and a chain of three products.
pub const TOLERANCE_F32: f64 = 1e-5;

/// Maximum relative deviation of a bf16 result with f32 accumulation: bf16's unit roundoff, 4e-3, times the few roundings between input and
/// gradient.
pub const TOLERANCE_BF16: f64 = 2e-2;

/// Maximum relative deviation of an f16 result: f16's unit roundoff, 5e-4, is an eighth of bf16's.
pub const TOLERANCE_F16: f64 = TOLERANCE_BF16 / 8.0;

/// A bf16 or f16 tensor with at least `MANY` elements, and bounds of at most `SMALL` times its norm, must satisfy the tolerance above: the bounds assume
/// the worst case of all roundings, which does not happen over many elements. Other tensors may deviate up to their bounds, if these are larger: small
/// ones, and those with cancellation, large coefficients or equal tokens.
const MANY: usize = 256;
const SMALL: f64 = 0.05;

/// Maximum share of its bounds for the norm of an f32 result's error, if that is more than the tolerance. The bounds assume sums of ten thousand
/// terms; a single rounding is 0.006 of that, and several are in a chain. With fewer than `MANY` elements, one rounding may decide.
const SHARE_F32: f64 = 0.03;
const SHARE_F32_FEW: f64 = 0.3;

/// Absolute error of an element from underflow in f32 and in activations, about 1e-35, multiplied by the following products with inputs of a few
/// thousand.
const LOST: f64 = 1e-25;

/// The difference between a result and the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Deviation {
    /// Name of the tensor.
    pub name: String,
    /// `||got - want||_2 / ||want||_2`; `||got||_2` if `want` is all zero; infinite if either has a NaN or the lengths differ.
    pub relative: f64,
    /// The index of the largest `|got - want|`, or of the first NaN, or the length of the shorter tensor.
    pub worst: usize,
    /// The result at this index; NaN beyond its end.
    pub got: f32,
    /// The reference at this index; NaN beyond its end.
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

/// A slice of a matrix that has its own bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// A row, which is a token in a tensor with a row per token.
    Row,
    /// A column.
    Column,
}

impl Axis {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Row => "row",
            Axis::Column => "column",
        }
    }
}

/// The row or column of a result with the largest deviation relative to its bound.
#[derive(Clone, Debug, PartialEq)]
pub struct WorstSlice {
    /// Row or column.
    pub axis: Axis,
    /// The index of the row or column.
    pub index: usize,
    /// 2-norm of the difference.
    pub error: f64,
    /// Maximum error.
    pub bound: f64,
}

impl WorstSlice {
    /// Error over bound: above 1 for a wrong result, infinite for a NaN.
    pub fn severity(&self) -> f64 {
        if self.error == 0.0 {
            return 0.0;
        }
        let severity = self.error / self.bound;
        if severity.is_nan() { f64::INFINITY } else { severity }
    }
}

/// Compares every row and column that has a bound; `None` without bounds. For a result of the wrong length, returns the first row.
pub fn compare_slices(got: &[f32], want: &[f64], bounds: &Bounds) -> Option<WorstSlice> {
    let rows = bounds.rows.len();
    if rows == 0 {
        return None;
    }
    if got.len() != want.len() {
        return Some(WorstSlice { axis: Axis::Row, index: 0, error: f64::INFINITY, bound: bounds.rows[0] });
    }
    let cols = want.len() / rows;
    let mut by_row = vec![0.0; rows];
    let mut by_column = vec![0.0; bounds.columns.len()];
    for (r, row) in by_row.iter_mut().enumerate() {
        let range = r * cols..(r + 1) * cols;
        for (c, (&g, &w)) in got[range.clone()].iter().zip(&want[range]).enumerate() {
            let d = f64::from(g) - w;
            *row += d * d;
            if let Some(column) = by_column.get_mut(c) {
                *column += d * d;
            }
        }
    }
    let slices = |axis, squares: Vec<f64>, bounds: &[f64], len: usize| {
        let slice = |(index, (square, bound)): (usize, (f64, &f64))| WorstSlice {
            axis,
            index,
            error: square.sqrt(),
            bound: bound + LOST * (len as f64).sqrt(),
        };
        squares.into_iter().zip(bounds).enumerate().map(slice).collect::<Vec<_>>()
    };
    let mut all = slices(Axis::Row, by_row, &bounds.rows, cols);
    all.extend(slices(Axis::Column, by_column, &bounds.columns, rows));
    all.into_iter().reduce(|worst, slice| if slice.severity() > worst.severity() { slice } else { worst })
}

/// A result compared with the reference.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The deviation of the whole tensor.
    pub deviation: Deviation,
    /// Maximum of [`Deviation::relative`].
    pub tolerance: f64,
    /// The worst row or column, if any has a bound.
    pub worst: Option<WorstSlice>,
}

impl Comparison {
    /// Whether both are within their limits.
    pub fn passed(&self) -> bool {
        self.deviation.relative <= self.tolerance && self.worst.as_ref().is_none_or(|slice| slice.severity() <= 1.0)
    }
}

/// Compares a result with the reference, norm-wise and by rows and columns.
pub fn judge(name: &str, got: &[f32], want: &[f64], bounds: &Bounds, dtype: Dtype) -> Comparison {
    let (tolerance, share) = match dtype {
        Dtype::F32 if want.len() < MANY => (TOLERANCE_F32, SHARE_F32_FEW),
        Dtype::F32 => (TOLERANCE_F32, SHARE_F32),
        Dtype::Bf16 => (TOLERANCE_BF16, 1.0),
        Dtype::F16 => (TOLERANCE_F16, 1.0),
    };
    let size = norm(want);
    let bound = norm(&bounds.rows) / if size > 0.0 { size } else { 1.0 };
    let lost = LOST * (want.len() as f64).sqrt() / if size > 0.0 { size } else { 1.0 };
    let many = dtype != Dtype::F32 && want.len() >= MANY && bound <= SMALL;
    let tolerance = if many { tolerance } else { tolerance.max(share * bound) } + lost;
    Comparison { deviation: compare(name, got, want), tolerance, worst: compare_slices(got, want, bounds) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviation_is_norm_wise_with_the_worst_index() {
        let d = compare("x", &[3.0, 4.5, 0.0], &[3.0, 4.0, 0.0]);
        assert_eq!((d.relative, d.worst, d.got, d.want), (0.1, 1, 4.5, 4.0));
        assert_eq!(d.to_string(), "x: relative deviation 1.0e-1, largest at 1: got 4.5, expected 4");
        assert_eq!(compare("x", &[0.0, -2.0], &[0.0, 0.0]).relative, 2.0);
        assert_eq!(compare("x", &[], &[]).relative, 0.0);
    }

    #[test]
    fn worst_slice_is_relative_to_its_bound() {
        let bounds = Bounds { rows: vec![1.0, 0.1, 0.0], columns: vec![2.0, 2.0] };
        let want = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0];
        let worst = |got: [f32; 6]| compare_slices(&got, &want, &bounds).unwrap();
        assert_eq!(worst([1.0, 2.0, 3.0, 4.0, 0.0, 0.0]).severity(), 0.0);
        // 0.5 of the first row's bound, 2.5 of the second's.
        let slice = worst([1.5, 2.0, 3.25, 4.0, 0.0, 0.0]);
        assert_eq!((slice.axis, slice.index, slice.error), (Axis::Row, 1, 0.25));
        assert!((slice.severity() - 2.5).abs() < 1e-9);
        // With a bound of 0 any error is too large.
        assert!(worst([1.0, 2.0, 3.0, 4.0, 0.0, 1e-15]).severity() > 1e9);
        assert!(worst([1.0, 2.0, 3.0, 4.0, 0.0, 1e-37]).severity() < 1.0);
        assert_eq!(worst([1.0, 2.0, 3.0, f32::NAN, 0.0, 0.0]).severity(), f64::INFINITY);
        let columns = Bounds { rows: vec![1.0; 2], columns: vec![9.0, 0.01, 9.0] };
        let slice = compare_slices(&[0.0, 0.03, 0.0, 0.0, 0.04, 0.0], &[0.0; 6], &columns).unwrap();
        assert_eq!((slice.axis, slice.index), (Axis::Column, 1));
        assert_eq!(compare_slices(&[1.0], &[1.0, 2.0], &columns).unwrap().severity(), f64::INFINITY);
        assert_eq!(compare_slices(&[], &[], &Bounds::default()), None);
    }

    #[test]
    fn nan_infinity_and_wrong_length_are_infinite_deviations() {
        assert_eq!(compare("x", &[1.0, f32::NAN], &[1.0, 2.0]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[1.0, f32::NAN], &[1.0, 2.0]).worst, 1);
        assert_eq!(compare("x", &[f32::INFINITY], &[1.0]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[f32::INFINITY], &[f64::INFINITY]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[1.0], &[f64::NAN]).relative, f64::INFINITY);
        assert_eq!(compare("x", &[1.0], &[1.0, 2.0]).worst, 1);
        assert_eq!(compare("x", &[1.0], &[1.0, 2.0]).relative, f64::INFINITY);
    }
}
