//! The element types of activations and weights.

use half::bf16;

use super::gemm_bf16::ProductPath;
use super::weight::{Lent, WeightShape, bf16_from_f32, bf16_to_f32, widen_bf16};
use super::{Bf16Weight, F32Weight, Workspace, gemm_bf16, gemm_f32};

/// Element type of activations and weights: f32 or bf16. Accumulation is always in f32.
///
/// The matrix products overwrite `c`, or add to it if `accumulate`. Each panics if a slice is not of the
/// length its shape says: the layer computes all shapes itself.
///
/// It is sealed: the kernels are for these two types.
///
/// The same inputs and shapes give the same bits. In bf16 on AVX512-BF16 a row of [`gemm_nt`](Self::gemm_nt) and
/// [`gemm_nn`](Self::gemm_nn) moreover does not depend on the other rows, nor on how many there are; through faer it may,
/// in the last bits.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + Send + Sync + 'static {
    /// `"f32"` or `"bf16"`.
    const NAME: &'static str;
    /// A weight matrix prepared for [`gemm_nt`](Self::gemm_nt) and [`gemm_nn`](Self::gemm_nn).
    type Weight: WeightShape + Send + Sync;

    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;

    /// Widens, exactly.
    fn to_f32(self) -> f32;

    /// Rounds a slice into another of the same length. What would be a denormal bf16 may become 0, as it counts as 0
    /// in the products.
    fn convert(src: &[f32], dst: &mut [Self]);

    /// Widens a slice into another of the same length.
    fn widen(src: &[Self], dst: &mut [f32]);

    /// Prepares `w [out, inp]`, rounded to `Self`.
    fn prepare(w: &[f32], out: usize, inp: usize) -> Self::Weight;

    /// A weight `[out, inp]` that is read where it lies: of f32 as it is; of bf16 packed for each product anew, as it has no second form.
    fn lend(w: Lent<Self>, out: usize, inp: usize) -> Self::Weight;

    /// As [`prepare`](Self::prepare), in place of what is there: allocates nothing once `ws` is large enough.
    fn set_weight(ws: &mut Workspace, weight: &mut Self::Weight, w: &[f32]);

    /// Widens a prepared weight into `w`, `[out, inp]`: what [`prepare`](Self::prepare) was given, rounded.
    fn get_weight(weight: &Self::Weight, w: &mut [f32]);

    /// Forward: `c [m, out] (+)= a [m, inp] Wᵀ`.
    fn gemm_nt(ws: &mut Workspace, m: usize, a: &[Self], w: &Self::Weight, c: &mut [f32], accumulate: bool);

    /// Gradient of the input: `c [m, inp] (+)= a [m, out] W`.
    fn gemm_nn(ws: &mut Workspace, m: usize, a: &[Self], w: &Self::Weight, c: &mut [f32], accumulate: bool);

    /// Gradient of the weight: `c [n, k] (+)= aᵀ b` with `a [m, n]` and `b [m, k]`.
    #[allow(clippy::too_many_arguments)]
    fn gemm_tn(
        ws: &mut Workspace,
        m: usize,
        n: usize,
        k: usize,
        a: &[Self],
        b: &[Self],
        c: &mut [f32],
        accumulate: bool,
    );
}

mod sealed {
    #[expect(unnameable_types, reason = "that nobody can name it is what seals Element")]
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    type Weight = F32Weight;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    fn convert(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }

    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn prepare(w: &[f32], out: usize, inp: usize) -> F32Weight {
        F32Weight::new(w.to_vec(), out, inp)
    }

    fn lend(w: Lent<f32>, out: usize, inp: usize) -> F32Weight {
        F32Weight::lent(w, out, inp)
    }

    fn set_weight(_: &mut Workspace, weight: &mut F32Weight, w: &[f32]) {
        weight.values_mut().copy_from_slice(w);
    }

    fn get_weight(weight: &F32Weight, w: &mut [f32]) {
        w.copy_from_slice(weight.values());
    }

    fn gemm_nt(_: &mut Workspace, m: usize, a: &[f32], w: &F32Weight, c: &mut [f32], accumulate: bool) {
        gemm_f32::nt(m, a, w, c, accumulate);
    }

    fn gemm_nn(_: &mut Workspace, m: usize, a: &[f32], w: &F32Weight, c: &mut [f32], accumulate: bool) {
        gemm_f32::nn(m, a, w, c, accumulate);
    }

    fn gemm_tn(_: &mut Workspace, m: usize, n: usize, k: usize, a: &[f32], b: &[f32], c: &mut [f32], accumulate: bool) {
        gemm_f32::tn([m, n, k], a, b, c, accumulate);
    }
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    type Weight = Bf16Weight;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16_from_f32(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self)
    }

    fn convert(src: &[f32], dst: &mut [Self]) {
        gemm_bf16::convert(src, dst);
    }

    fn widen(src: &[Self], dst: &mut [f32]) {
        widen_bf16(src, dst);
    }

    fn prepare(w: &[f32], out: usize, inp: usize) -> Bf16Weight {
        Bf16Weight::new(w, out, inp)
    }

    fn lend(w: Lent<bf16>, out: usize, inp: usize) -> Bf16Weight {
        Bf16Weight::lent(ProductPath::detect(), w, out, inp)
    }

    fn set_weight(ws: &mut Workspace, weight: &mut Bf16Weight, w: &[f32]) {
        weight.set(ws, w);
    }

    fn get_weight(weight: &Bf16Weight, w: &mut [f32]) {
        weight.get(w);
    }

    fn gemm_nt(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
        gemm_bf16::nt(ws, m, a, w, c, accumulate);
    }

    fn gemm_nn(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
        gemm_bf16::nn(ws, m, a, w, c, accumulate);
    }

    fn gemm_tn(
        ws: &mut Workspace,
        m: usize,
        n: usize,
        k: usize,
        a: &[bf16],
        b: &[bf16],
        c: &mut [f32],
        accumulate: bool,
    ) {
        gemm_bf16::tn(ws, [m, n, k], a, b, c, accumulate);
    }
}
