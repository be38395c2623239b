//! f32 matrix products, through faer.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};

use super::WeightShape;

/// A weight matrix `W [out, inp]` in f32, row-major.
pub struct F32Weight {
    w: Vec<f32>,
    out: usize,
    inp: usize,
}

impl F32Weight {
    pub(super) fn new(w: Vec<f32>, out: usize, inp: usize) -> Self {
        assert_eq!(w.len(), out * inp, "weight of shape [{out}, {inp}]");
        F32Weight { w, out, inp }
    }
}

impl WeightShape for F32Weight {
    fn out(&self) -> usize {
        self.out
    }

    fn inp(&self) -> usize {
        self.inp
    }
}

fn product(c: MatMut<'_, f32>, accumulate: bool, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    let accum = if accumulate { Accum::Add } else { Accum::Replace };
    matmul(c, accum, a, b, 1.0, Par::Seq);
}

/// `c [m, out] (+)= a [m, inp] Wᵀ`.
pub(super) fn nt(m: usize, a: &[f32], w: &F32Weight, c: &mut [f32], accumulate: bool) {
    product(
        MatMut::from_row_major_slice_mut(c, m, w.out),
        accumulate,
        MatRef::from_row_major_slice(a, m, w.inp),
        MatRef::from_row_major_slice(&w.w, w.out, w.inp).transpose(),
    );
}

/// `c [m, inp] (+)= a [m, out] W`.
pub(super) fn nn(m: usize, a: &[f32], w: &F32Weight, c: &mut [f32], accumulate: bool) {
    product(
        MatMut::from_row_major_slice_mut(c, m, w.inp),
        accumulate,
        MatRef::from_row_major_slice(a, m, w.out),
        MatRef::from_row_major_slice(&w.w, w.out, w.inp),
    );
}

/// `c [n, k] (+)= aᵀ b` with `a [m, n]` and `b [m, k]`.
pub(super) fn tn([m, n, k]: [usize; 3], a: &[f32], b: &[f32], c: &mut [f32], accumulate: bool) {
    product(
        MatMut::from_row_major_slice_mut(c, n, k),
        accumulate,
        MatRef::from_row_major_slice(a, m, n).transpose(),
        MatRef::from_row_major_slice(b, m, k),
    );
}
