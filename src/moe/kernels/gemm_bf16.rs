//! bf16 matrix products with f32 accumulation.

use half::bf16;

use super::{Element, F32Weight, WeightShape, Workspace, gemm_f32, scratch};

/// A weight matrix `W [out, inp]` rounded to bf16.
pub struct Bf16Weight(F32Weight);

impl Bf16Weight {
    pub(super) fn new(w: &[f32], out: usize, inp: usize) -> Self {
        Bf16Weight(F32Weight::new(
            w.iter().map(|&x| Element::to_f32(<bf16 as Element>::from_f32(x))).collect(),
            out,
            inp,
        ))
    }
}

impl WeightShape for Bf16Weight {
    fn out(&self) -> usize {
        self.0.out()
    }

    fn inp(&self) -> usize {
        self.0.inp()
    }
}

/// Whether bf16 products run on this CPU's AVX512-BF16 instructions.
pub fn uses_avx512_bf16() -> bool {
    false
}

pub(super) fn nt(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
    let wide = scratch::<f32>(&mut ws.a, a.len());
    bf16::widen(a, wide);
    gemm_f32::nt(m, wide, &w.0, c, accumulate);
}

pub(super) fn nn(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
    let wide = scratch::<f32>(&mut ws.a, a.len());
    bf16::widen(a, wide);
    gemm_f32::nn(m, wide, &w.0, c, accumulate);
}

pub(super) fn tn(ws: &mut Workspace, shape: [usize; 3], a: &[bf16], b: &[bf16], c: &mut [f32], accumulate: bool) {
    let wide_a = scratch::<f32>(&mut ws.a, a.len());
    bf16::widen(a, wide_a);
    let wide_b = scratch::<f32>(&mut ws.b, b.len());
    bf16::widen(b, wide_b);
    gemm_f32::tn(shape, wide_a, wide_b, c, accumulate);
}
