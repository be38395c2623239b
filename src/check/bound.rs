//! Bounds on the rounding error of each row of a correct result.
//!
//! A norm over a whole tensor cannot detect an error in one token among thousands. A bound on each row can, if it is about as small as the rounding
//! of that row. So the reference computes, for every value, a bound on its distance to the result of a layer in the run's element type. The error
//! model: a stored or sent element has an error of [`Rounding::unit`] times its magnitude plus [`Rounding::floor`]; an f32 sum of products of two
//! vectors has an error of [`SUM`] times the product of their norms.
//!
//! Errors of at most `e_i` in the elements of a vector become, after a product with a matrix with columns `w_i`, an error of at most
//! `|sum_i e_i w_i| <= kappa sqrt(sum_i e_i^2 |w_i|^2)`. Here `kappa`, the [`coherence`] of the `w_i`, is the spectral norm of the matrix with columns
//! `w_i / |w_i|`: 1 for orthogonal columns, about `1 + sqrt(columns / rows)` for random directions, and the square root of their number for equal
//! columns. So the bound does not assume independent rounding errors, and grows with the number of terms only as far as the terms can add up. The
//! bound needs no additional matrix product.
//!
//! This bound is too wide for the scalar `<q, h>`, the gradient of a routing weight, and for the router's gradient, which depends on it. There,
//! [`scalar`] assumes that rounding errors of different elements are independent.

use std::collections::HashMap;

use super::matrix::Matrix;
use crate::moe::Dtype;

/// Error of an f32 dot product relative to the product of the vectors' norms, and of a single f32 operation relative to its result: f32's unit
/// roundoff, 6e-8, times the square root of about ten thousand terms, which is the error of sequential sums of terms with one sign.
pub const SUM: f64 = 1e-5;

/// Magnitudes that may be lost in f32: the smallest normal number is 1e-38, and activations are set to 0 slightly above.
pub const F32_FLOOR: f64 = 1e-35;

/// Factor by which the estimate of a coherence may be too small.
const COHERENCE_MARGIN: f64 = 1.05;

/// Steps of the power iteration.
const COHERENCE_STEPS: usize = 6;

/// Error bound of a scalar sum, in units of the root of the sum of its terms' squared bounds. A term's bound is the sum of the maximum errors of its
/// roundings, which is more than two standard deviations.
const DEVIATIONS: f64 = 2.0;

/// The error of a stored element.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Error relative to the magnitude.
    pub unit: f64,
    /// Additional absolute error from subnormal numbers.
    pub floor: f64,
}

impl Rounding {
    /// The rounding of an element type.
    pub fn of(dtype: Dtype) -> Rounding {
        let (unit, floor) = match dtype {
            Dtype::F32 => (2f64.powi(-24), F32_FLOOR),
            Dtype::Bf16 => (2f64.powi(-8), F32_FLOOR),
            Dtype::F16 => (2f64.powi(-11), 2f64.powi(-24)),
        };
        Rounding { unit, floor }
    }

    /// The error of an element of this magnitude that was computed in f32 and stored.
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

    /// The product of two scalars, without rounding.
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
    /// Bound of each row.
    pub rows: Vec<f64>,
    /// Bound of each column; empty if only rows are bounded.
    pub columns: Vec<f64>,
}

impl Bounds {
    /// Bounds of 0, for a tensor that is exactly zero because it received no term.
    pub(super) fn exact(shape: &[usize]) -> Bounds {
        let columns = if shape.len() > 1 { shape[1] } else { 0 };
        Bounds { rows: vec![0.0; shape[0]], columns: vec![0.0; columns] }
    }

    /// Bounds of `coefficients^T vectors`, a sum over rows `t` of outer products, if the coefficients have errors of up to `errors`. A
    /// coefficient's error changes a row of the result only along that coefficient's vector, so the bounds of rows are sharp; the bound
    /// of a column is the sum over all `t`. `kappa` is the coherence of the vectors, or their [`repetition`] if the errors are bounds of
    /// scalars (see [`scalar`]).
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

    /// The bounds of the transposed matrix.
    pub(super) fn transposed(self) -> Bounds {
        Bounds { rows: self.columns, columns: self.rows }
    }
}

/// The 2-norm.
pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// The factor by which errors along the rows of `m` can add up: the spectral norm of the matrix of the rows divided by their norms (`norms`).
/// Between 1 and the square root of their number. Estimated by power iteration, with a margin.
pub fn coherence(m: &Matrix, norms: &[f64]) -> f64 {
    let scale: Vec<f64> = norms.iter().map(|&n| if n > 0.0 { 1.0 / n } else { 0.0 }).collect();
    power_iteration(m, &scale, None)
}

/// The square root of the multiplicity of the most frequent row of `m`: the factor by which errors of values computed from these rows can add up, if
/// errors of different rows are independent.
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
    // A start vector without special structure: fractional parts of multiples of the golden ratio.
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

/// The error bound of a sum of terms with the given errors: the sum of the errors, or if smaller [`DEVIATIONS`] times the root of the sum of their
/// squares, because rounding errors of different terms have different signs. `repetition` accounts for equal terms, and `proportional` is the sum of
/// errors that all terms share.
pub fn scalar(errors: impl Iterator<Item = f64> + Clone, repetition: f64, proportional: f64) -> f64 {
    let squares: f64 = errors.clone().map(|e| e * e).sum();
    errors.sum::<f64>().min(DEVIATIONS * repetition * squares.sqrt() + proportional)
}
