//! Element types of activations and weights.

use half::bf16;

use super::gemm_bf16::ProductPath;
use super::weight::{Borrowed, WeightShape, bf16_from_f32, bf16_to_f32, widen_bf16};
use super::{Bf16Weight, F32Weight, Workspace, gemm_bf16, gemm_f32, scratch};

/// Element type of activations and weights: f32 or bf16. Accumulation is always in f32.
///
/// GEMMs overwrite `c`, or add to it if `accumulate`. They panic if a slice does not have the length of its shape; the
/// layer computes all shapes itself. The trait is sealed.
///
/// The same inputs and shapes give the same bits. In bf16 on AVX512-BF16, a result row of [`gemm_nt`](Self::gemm_nt)
/// and [`gemm_nn`](Self::gemm_nn) is also independent of the other rows and of their number; with faer, its last bits
/// may depend on them.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + Send + Sync + 'static {
    /// `"f32"` or `"bf16"`.
    const NAME: &'static str;
    /// A weight matrix packed for [`gemm_nt`](Self::gemm_nt) and [`gemm_nn`](Self::gemm_nn).
    type Weight: WeightShape + Send + Sync;

    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;

    /// Widens exactly.
    fn to_f32(self) -> f32;

    /// Rounds a slice into another of the same length. A value that would be a denormal bf16 may become 0, as GEMMs
    /// treat it as 0.
    fn convert(src: &[f32], dst: &mut [Self]);

    /// Widens a slice into another of the same length.
    fn widen(src: &[Self], dst: &mut [f32]);

    /// Rounds `w [out, inp]` to `Self` and packs it.
    fn prepare(w: &[f32], out: usize, inp: usize) -> Self::Weight;

    /// Uses a weight `[out, inp]` in place: f32 directly, bf16 by packing it again for each product.
    fn borrow_weight(w: Borrowed<Self>, out: usize, inp: usize) -> Self::Weight;

    /// Replaces the values of a packed weight by `w [out, inp]`, in place. Does not allocate once `ws` is large enough.
    fn set_weight(ws: &mut Workspace, weight: &mut Self::Weight, w: &[f32]);

    /// Copies a packed weight to `w [out, inp]` as f32, rounded as in [`prepare`](Self::prepare).
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

    /// [`gemm_tn`](Self::gemm_tn) without accumulation, rounded to bf16.
    #[allow(clippy::too_many_arguments)]
    fn gemm_tn_bf16(ws: &mut Workspace, m: usize, n: usize, k: usize, a: &[Self], b: &[Self], c: &mut [bf16]);
}

mod sealed {
    #[expect(unnameable_types, reason = "Element is sealed by an unnameable trait")]
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

    fn borrow_weight(w: Borrowed<f32>, out: usize, inp: usize) -> F32Weight {
        F32Weight::borrowed(w, out, inp)
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

    fn gemm_tn_bf16(ws: &mut Workspace, m: usize, n: usize, k: usize, a: &[f32], b: &[f32], c: &mut [bf16]) {
        let wide = scratch::<f32>(&mut ws.sums, n * k);
        gemm_f32::tn([m, n, k], a, b, wide, false);
        gemm_bf16::convert(wide, c);
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

    fn borrow_weight(w: Borrowed<bf16>, out: usize, inp: usize) -> Bf16Weight {
        Bf16Weight::borrowed(ProductPath::detect(), w, out, inp)
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

    fn gemm_tn_bf16(ws: &mut Workspace, m: usize, n: usize, k: usize, a: &[bf16], b: &[bf16], c: &mut [bf16]) {
        gemm_bf16::tn_rounded(ws, [m, n, k], a, b, c);
    }
}
