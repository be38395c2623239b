//! How far a result is from the reference, and how far it may be.

use std::fmt;

use super::bound::{Bounds, norm};
use crate::moe::Dtype;

/// The largest relative deviation of an f32 result: f32's unit roundoff, 6e-8, times what sums of
/// some thousand terms in f32 and a chain of three products make of it.
pub const TOLERANCE_F32: f64 = 1e-5;

/// The largest relative deviation of a bf16 result (f32 accumulation): bf16's unit roundoff, 4e-3,
/// times the few roundings between input and gradient.
pub const TOLERANCE_BF16: f64 = 2e-2;

/// The same of an f16 result: f16's unit roundoff, 5e-4, is an eighth of bf16's.
pub const TOLERANCE_F16: f64 = TOLERANCE_BF16 / 8.0;

/// A bf16 or f16 tensor of so many elements, whose bounds together are at most [`SMALL`] of its norm, is held to the tolerance above: over
/// many elements roundings do not all do their worst, as bounds suppose. Another one, which is small, or whose sums nearly cancel, or
/// where coefficients make rounding large or tokens are alike, may be off by what its bounds allow where that is more.
const MANY: usize = 256;
const SMALL: f64 = 0.09;

/// What share of its bounds the norm of an f32 result's error may reach, where that is more than the tolerance: sums are bounded as if they
/// had ten thousand terms, and one rounding is 0.006 of that; several are in a chain.
const SHARE_F32: f64 = 0.03;

/// What f32 may have lost of an element of a result: what it has no numbers for, and where activations are cut off, some 1e-35, through the
/// products that follow, by inputs of thousands.
const LOST: f64 = 1e-25;

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

/// What of a matrix is bounded by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// A row: a token's, of a tensor with a row per token.
    Row,
    /// A column.
    Column,
}

impl Axis {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Row => "row",
            Axis::Column => "column",
        }
    }
}

/// The row or column of a result that is the farthest from the reference, relative to its bound.
#[derive(Clone, Debug, PartialEq)]
pub struct WorstSlice {
    /// Row or column.
    pub axis: Axis,
    /// Its number.
    pub index: usize,
    /// 2-norm of the difference.
    pub error: f64,
    /// The most that it may be.
    pub bound: f64,
}

impl WorstSlice {
    /// Error over bound: above 1 where the result is wrong; infinite where it is not a number.
    pub fn severity(&self) -> f64 {
        if self.error == 0.0 {
            return 0.0;
        }
        let severity = self.error / self.bound;
        if severity.is_nan() { f64::INFINITY } else { severity }
    }
}

/// Compares every row and column that has a bound; `None` where there is none. A result of the wrong length is worst in
/// its first row.
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

/// A result beside the reference.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// As a whole.
    pub deviation: Deviation,
    /// The most that [`Deviation::relative`] may be.
    pub tolerance: f64,
    /// The worst of its rows and columns, where there is one.
    pub worst: Option<WorstSlice>,
}

impl Comparison {
    /// Whether both are within.
    pub fn passed(&self) -> bool {
        self.deviation.relative <= self.tolerance && self.worst.as_ref().is_none_or(|slice| slice.severity() <= 1.0)
    }
}

/// Compares a result with the reference, norm-wise and by rows and columns.
pub fn judge(name: &str, got: &[f32], want: &[f64], bounds: &Bounds, dtype: Dtype) -> Comparison {
    let (tolerance, share) = match dtype {
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
    fn deviation_is_norm_wise_and_points_at_the_worst() {
        let d = compare("x", &[3.0, 4.5, 0.0], &[3.0, 4.0, 0.0]);
        assert_eq!((d.relative, d.worst, d.got, d.want), (0.1, 1, 4.5, 4.0));
        assert_eq!(d.to_string(), "x: relative deviation 1.0e-1, largest at 1: got 4.5, expected 4");
        assert_eq!(compare("x", &[0.0, -2.0], &[0.0, 0.0]).relative, 2.0);
        assert_eq!(compare("x", &[], &[]).relative, 0.0);
    }

    #[test]
    fn the_worst_slice_is_relative_to_its_bound() {
        let bounds = Bounds { rows: vec![1.0, 0.1, 0.0], columns: vec![2.0, 2.0] };
        let want = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0];
        let worst = |got: [f32; 6]| compare_slices(&got, &want, &bounds).unwrap();
        assert_eq!(worst([1.0, 2.0, 3.0, 4.0, 0.0, 0.0]).severity(), 0.0);
        // 0.5 of the first row's bound, 2.5 of the second's.
        let slice = worst([1.5, 2.0, 3.25, 4.0, 0.0, 0.0]);
        assert_eq!((slice.axis, slice.index, slice.error), (Axis::Row, 1, 0.25));
        assert!((slice.severity() - 2.5).abs() < 1e-9);
        // Where nothing may be off, anything is too much.
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
