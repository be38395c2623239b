//! How far rounding may move each row of a correct result.
//!
//! A norm over a tensor does not see one token among thousands; a bound on each row does, if it is about as small as that row's
//! own rounding. So the reference carries, beside every value, a bound on how far a layer that computes in the run's element
//! type may be from it. The model: an element that is stored, or sent, is off by [`Rounding::unit`] of its magnitude
//! and [`Rounding::floor`]; a sum in f32 of products of two vectors is off by [`SUM`] of the product of their norms.
//!
//! Errors of the elements of a vector, at most `e_i`, go through a product with a matrix whose columns are `w_i` to at most
//! `|sum_i e_i w_i| <= kappa sqrt(sum_i e_i^2 |w_i|^2)`, where `kappa`, the [`coherence`] of the `w_i`, is the spectral norm of the
//! matrix whose columns are `w_i / |w_i|`: 1 where they are orthogonal, near `1 + sqrt(columns / rows)` where they point
//! anywhere, and the square root of their number where they are all alike. So no rounding is assumed to be independent of another,
//! and yet the bound grows with the number of terms only as far as the terms can add up. It costs no matrix product.
//!
//! One sum is bounded too widely that way, the scalar `<q, h>` that is the gradient of a routing weight, and what is made of it, the
//! router's gradient: [`scalar`] takes the roundings of different elements for independent there.

use std::collections::HashMap;

use super::matrix::Matrix;
use crate::moe::Dtype;

/// What a sum in f32 of the products of two vectors' elements is off by, relative to the product of the vectors' norms; and a
/// single f32 operation, relative to its result. f32's unit roundoff, 6e-8, times the square root of some ten thousand terms, which
/// is what sums in order of terms of one sign come to.
pub const SUM: f64 = 1e-5;

/// Magnitudes that f32 arithmetic may lose: its smallest normal number is 1e-38, and activations are cut off a little above.
pub const F32_FLOOR: f64 = 1e-35;

/// The estimate of a coherence may be too small by this factor.
const COHERENCE_MARGIN: f64 = 1.05;

/// Steps of the power iteration.
const COHERENCE_STEPS: usize = 6;

/// How far a scalar sum may be off, in units of the root of the sum of its terms' squared bounds. A term's bound is the sum of the
/// largest that each of its roundings can do, more than two of their standard deviations.
const DEVIATIONS: f64 = 2.0;

/// What storing an element does to it.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Relative to its magnitude.
    pub unit: f64,
    /// And in addition, where numbers become subnormal or zero.
    pub floor: f64,
}

impl Rounding {
    /// Of a run's element type.
    pub fn of(dtype: Dtype) -> Rounding {
        let (unit, floor) = match dtype {
            Dtype::F32 => (2f64.powi(-24), F32_FLOOR),
            Dtype::Bf16 => (2f64.powi(-8), F32_FLOOR),
            Dtype::F16 => (2f64.powi(-11), 2f64.powi(-24)),
        };
        Rounding { unit, floor }
    }

    /// Of an element of this magnitude that was computed in f32 and stored.
    pub fn stored(&self, value: f64) -> f64 {
        (self.unit + SUM) * value.abs() + self.floor
    }
}

/// A scalar with the bound on its error.
#[derive(Clone, Copy, Debug)]
pub struct Bounded {
    pub value: f64,
    pub bound: f64,
}

impl Bounded {
    pub const ZERO: Bounded = Bounded { value: 0.0, bound: 0.0 };
    pub const ONE: Bounded = Bounded { value: 1.0, bound: 0.0 };

    pub fn plus(self, other: Bounded) -> Bounded {
        Bounded { value: self.value + other.value, bound: self.bound + other.bound }
    }

    /// Their product, not rounded.
    pub fn times(self, other: Bounded) -> Bounded {
        let Bounded { value, bound } = self;
        Bounded {
            value: value * other.value,
            bound: value.abs() * other.bound + bound * (other.value.abs() + other.bound),
        }
    }
}

/// Bounds on the 2-norms of the errors of a matrix's rows, and of its columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bounds {
    /// Of each row.
    pub rows: Vec<f64>,
    /// Of each column; empty where only rows are bounded.
    pub columns: Vec<f64>,
}

impl Bounds {
    /// Nothing may be off: for a tensor that is zero because nothing went into it.
    pub(super) fn exact(shape: &[usize]) -> Bounds {
        let columns = if shape.len() > 1 { shape[1] } else { 0 };
        Bounds { rows: vec![0.0; shape[0]], columns: vec![0.0; columns] }
    }

    /// Of `coefficients^T vectors`, a sum over rows `t` of outer products, whose coefficients are off by up to `errors`. Where a
    /// coefficient is off, a row of the result moves along the vectors, so the bounds of rows are the sharp ones; a column's is
    /// the sum of what each `t` may add. `kappa` is the coherence of the vectors, or where the errors are bounds of scalars
    /// (see [`scalar`]) their [`repetition`].
    pub(super) fn of_outer_products(coefficients: &Matrix, errors: &Matrix, vectors: &Matrix, kappa: f64) -> Bounds {
        let norms = vectors.row_norms(None);
        let (coefficient_norms, vector_norms) = (coefficients.column_norms(None), vectors.column_norms(None));
        let (all_coefficients, all_vectors) = (norm(&coefficient_norms), norm(&vector_norms));
        let rows = errors.column_norms(Some(&norms)).into_iter().zip(coefficient_norms);
        let mut columns: Vec<f64> = vector_norms.iter().map(|norm| SUM * norm * all_coefficients).collect();
        for (t, error) in errors.row_norms(None).into_iter().enumerate() {
            columns.iter_mut().zip(vectors.row(t)).for_each(|(bound, v)| *bound += v.abs() * error);
        }
        Bounds { rows: rows.map(|(error, norm)| kappa * error + SUM * norm * all_vectors).collect(), columns }
    }

    /// The same of the transposed matrix.
    pub(super) fn transposed(self) -> Bounds {
        Bounds { rows: self.columns, columns: self.rows }
    }
}

/// The 2-norm.
pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// How much the rows of `m`, whose norms are `norms`, can add up: the spectral norm of the matrix of these rows, each divided by its
/// norm. Between 1 and the square root of their number; by power iteration, a little above the estimate.
pub fn coherence(m: &Matrix, norms: &[f64]) -> f64 {
    let scale: Vec<f64> = norms.iter().map(|&n| if n > 0.0 { 1.0 / n } else { 0.0 }).collect();
    power_iteration(m, &scale, None)
}

/// The root of the number of times that the most frequent row of `m` is there: how much the errors of what is made of these rows can add
/// up, if the errors of different rows have nothing to do with each other.
pub fn repetition(m: &Matrix) -> f64 {
    let mut times: HashMap<&[u8], u32> = HashMap::new();
    (0..m.rows).for_each(|r| *times.entry(bytemuck::cast_slice(m.row(r))).or_default() += 1);
    f64::from(times.into_values().max().unwrap_or(1)).sqrt()
}

/// The [`coherence`] of the columns of `m`.
pub fn column_coherence(m: &Matrix, norms: &[f64]) -> f64 {
    let scale: Vec<f64> = norms.iter().map(|&n| if n > 0.0 { 1.0 / n } else { 0.0 }).collect();
    power_iteration(m, &vec![1.0; m.rows], Some(&scale))
}

fn power_iteration(m: &Matrix, by_row: &[f64], by_column: Option<&[f64]>) -> f64 {
    if m.rows == 0 {
        return 1.0;
    }
    let scaled = |mut v: Vec<f64>| {
        if let Some(scale) = by_column {
            v.iter_mut().zip(scale).for_each(|(v, s)| *v *= s);
        }
        v
    };
    // Any start that is orthogonal to nothing in particular: fractional parts of multiples of the golden ratio.
    let mut v: Vec<f64> = (1..=m.cols).map(|i| (i as f64 * 0.618_033_988_749_895).fract() - 0.3).collect();
    let mut largest: f64 = 1.0;
    for _ in 0..COHERENCE_STEPS {
        let size = norm(&v);
        if !(size.is_finite() && size > 0.0) {
            break;
        }
        v.iter_mut().for_each(|v| *v /= size);
        v = scaled(m.gram_product(by_row, &scaled(v)));
        largest = largest.max(norm(&v));
    }
    largest.sqrt() * COHERENCE_MARGIN
}

/// The bound of a sum of terms that are off by `errors`: their sum; or [`DEVIATIONS`] times the root of the sum of their squares, as
/// rounding errors of different terms have different signs, unless terms repeat each other, as `repetition` says; and all
/// may be off alike in proportion, which `proportional` is the sum of.
pub fn scalar(errors: impl Iterator<Item = f64> + Clone, repetition: f64, proportional: f64) -> f64 {
    let squares: f64 = errors.clone().map(|e| e * e).sum();
    errors.sum::<f64>().min(DEVIATIONS * repetition * squares.sqrt() + proportional)
}
