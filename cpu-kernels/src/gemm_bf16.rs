//! bf16 GEMMs with f32 accumulation.
//!
//! On a CPU with AMX or AVX512-BF16 they run in kernels of this crate; elsewhere operands are widened to f32, exactly, and multiplied by faer.
//!
//! Right operands are packed in panels of 32 columns (`panels`), columns past the end zero. An owned weight is packed once, for each of its two
//! products; a borrowed one, and the operands of `gemm_tn`, on every call.
//!
//! The order of summation depends only on the length of the summed dimension, so a row of a result is independent of the other rows. Denormals
//! count as zero (by definition of the instructions).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod panels;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use self::panels::{
    LeftOperand, Output, RightOperand, pack_panels, pack_panels_transposed, panel_lines, unpack_panels,
};
#[cfg(target_arch = "x86_64")]
use super::Line;
#[cfg(target_arch = "x86_64")]
use super::cpu::{Amx, Avx512Bf16};
use super::weight::{bf16_from_f32, bf16_to_f32, narrow_bf16, widen_bf16};
use super::{Borrowed, F32Weight, WeightShape, Workspace, gemm_f32, scratch};

/// GEMM implementation.
#[derive(Clone, Copy)]
pub(super) enum ProductPath {
    /// The AMX kernel.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// The AVX512-BF16 kernel.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    /// f32 through faer.
    Widen,
}

impl ProductPath {
    /// The fastest implementation for this CPU, within the limit of `ARISTOS_CPU`.
    pub(super) fn detect() -> ProductPath {
        #[cfg(target_arch = "x86_64")]
        if let Some(features) = Amx::detect() {
            return ProductPath::Amx(features);
        } else if let Some(features) = Avx512Bf16::detect() {
            return ProductPath::Avx512Bf16(features);
        }
        ProductPath::Widen
    }
}

/// [`Element::convert`](crate::Element::convert) to bf16.
pub(super) fn convert(src: &[f32], dst: &mut [bf16]) {
    if !narrow(src, dst) {
        narrow_bf16(src, dst);
    }
}

/// Rounds `src` into `dst` with the CPU's instruction; returns false if it has none.
fn narrow(src: &[f32], dst: &mut [bf16]) -> bool {
    assert_eq!(src.len(), dst.len());
    #[cfg(target_arch = "x86_64")]
    if let Some(features) = Avx512Bf16::detect() {
        avx512::narrow(features, src, dst);
        return true;
    }
    false
}

/// A weight matrix `W [out, inp]` rounded to bf16 and packed for both of its products.
pub struct Bf16Weight {
    out: usize,
    inp: usize,
    form: Form,
}

enum Form {
    #[cfg(target_arch = "x86_64")]
    Panels {
        features: Avx512Bf16,
        /// Panels of `Wᵀ`, pairs along `inp`.
        nt: Vec<Line>,
        /// Panels of `W`, pairs along `out`.
        nn: Vec<Line>,
    },
    #[cfg(target_arch = "x86_64")]
    Rows {
        features: Amx,
        /// Rows of `W`, padded with zeros to `row_stride(inp)` elements.
        nt: Vec<Line>,
        /// Panels of `W`, pairs along `out`.
        nn: Vec<Line>,
    },
    Wide(F32Weight),
    /// Unpacked; each product packs or widens it.
    Borrowed(ProductPath, Borrowed<bf16>),
}

/// Elements from one row of [`Form::Rows`] to the next: whole cache lines.
#[cfg(target_arch = "x86_64")]
fn row_stride(inp: usize) -> usize {
    inp.next_multiple_of(32)
}

impl Bf16Weight {
    pub(super) fn borrowed(path: ProductPath, w: Borrowed<bf16>, out: usize, inp: usize) -> Self {
        assert_eq!(w.as_ref().as_ref().len(), out * inp, "weight of shape [{out}, {inp}]");
        Bf16Weight { out, inp, form: Form::Borrowed(path, w) }
    }

    pub(super) fn new(w: &[f32], out: usize, inp: usize) -> Self {
        Self::with_path(ProductPath::detect(), w, out, inp)
    }

    /// Like [`new`](Self::new), with a given implementation.
    pub(super) fn with_path(path: ProductPath, w: &[f32], out: usize, inp: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        let zeros = |lines: usize| vec![bytemuck::Zeroable::zeroed(); lines];
        let form = match path {
            #[cfg(target_arch = "x86_64")]
            ProductPath::Avx512Bf16(features) => {
                Form::Panels { features, nt: zeros(panel_lines(inp, out)), nn: zeros(panel_lines(out, inp)) }
            }
            #[cfg(target_arch = "x86_64")]
            ProductPath::Amx(features) => {
                Form::Rows { features, nt: zeros(out * row_stride(inp) / 32), nn: zeros(panel_lines(out, inp)) }
            }
            ProductPath::Widen => Form::Wide(F32Weight::new(vec![0.0; out * inp], out, inp)),
        };
        let mut weight = Bf16Weight { out, inp, form };
        weight.set(&mut Workspace::default(), w);
        weight
    }

    /// Rounds and packs `w [out, inp]` in place of the current values.
    pub(super) fn set(&mut self, ws: &mut Workspace, w: &[f32]) {
        let (out, inp) = (self.out, self.inp);
        assert_eq!(w.len(), out * inp, "weight of shape [{out}, {inp}]");
        match &mut self.form {
            #[cfg(target_arch = "x86_64")]
            Form::Panels { features, nt, nn } => {
                let rounded = scratch::<bf16>(&mut ws.a, w.len());
                convert(w, rounded);
                pack_panels_transposed(*features, rounded, out, inp, bytemuck::cast_slice_mut(nt));
                pack_panels(*features, rounded, out, inp, bytemuck::cast_slice_mut(nn));
            }
            #[cfg(target_arch = "x86_64")]
            Form::Rows { features, nt, nn } => {
                let rounded = scratch::<bf16>(&mut ws.a, w.len());
                convert(w, rounded);
                if inp > 0 {
                    let padded = bytemuck::cast_slice_mut::<_, bf16>(nt).chunks_mut(row_stride(inp));
                    padded.zip(rounded.chunks(inp)).for_each(|(to, row)| to[..inp].copy_from_slice(row));
                }
                pack_panels(features.avx512, rounded, out, inp, bytemuck::cast_slice_mut(nn));
            }
            Form::Wide(wide) => {
                for (to, &x) in wide.values_mut().iter_mut().zip(w) {
                    *to = bf16_to_f32(bf16_from_f32(x));
                }
            }
            Form::Borrowed(path, _) => *self = Bf16Weight::with_path(*path, w, out, inp),
        }
    }

    /// Copies the elements, `[out, inp]`, to `w` as f32.
    pub(super) fn get(&self, w: &mut [f32]) {
        assert_eq!(w.len(), self.out * self.inp, "weight of shape [{}, {}]", self.out, self.inp);
        match &self.form {
            #[cfg(target_arch = "x86_64")]
            Form::Panels { nn, .. } | Form::Rows { nn, .. } => {
                unpack_panels(bytemuck::cast_slice(nn), self.out, self.inp, w);
            }
            Form::Wide(wide) => w.copy_from_slice(wide.values()),
            Form::Borrowed(_, elements) => widen_bf16(elements.as_ref().as_ref(), w),
        }
    }
}

impl WeightShape for Bf16Weight {
    fn out(&self) -> usize {
        self.out
    }

    fn inp(&self) -> usize {
        self.inp
    }
}

/// Checks the lengths of `a` and `c`. Returns whether `c (+)= a b`, of shape `[m, n]` with `k` summed elements, has terms; otherwise it is done.
#[cfg(target_arch = "x86_64")]
fn has_terms([m, n, k]: [usize; 3], a: &[bf16], c: &mut [f32], accumulate: bool) -> bool {
    assert_eq!(c.len(), m * n, "result of shape [{m}, {n}]");
    assert_eq!(a.len(), m * k, "left operand of shape [{m}, {k}]");
    if k == 0 && !accumulate {
        c.fill(0.0);
    }
    m > 0 && n > 0 && k > 0
}

/// `c [m, out] (+)= a [m, inp] Wᵀ`.
pub(super) fn nt(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
    let shape = [m, w.out, w.inp];
    #[cfg(target_arch = "x86_64")]
    if !matches!(w.form, Form::Wide(_)) && !has_terms(shape, a, c, accumulate) {
        return;
    }
    match &w.form {
        #[cfg(target_arch = "x86_64")]
        &Form::Panels { features, ref nt, .. } => {
            let panels = bytemuck::cast_slice(nt);
            avx512::product(features, &mut ws.a, shape, LeftOperand::Rows(a), panels, c, accumulate);
        }
        #[cfg(target_arch = "x86_64")]
        &Form::Rows { features, ref nt, .. } => {
            let rows = (bytemuck::cast_slice(nt), row_stride(w.inp));
            amx::product_transposed(features, ws, shape, a, rows, c, accumulate);
        }
        Form::Wide(w) => {
            let wide = scratch::<f32>(&mut ws.a, a.len());
            widen_bf16(a, wide);
            gemm_f32::nt(m, wide, w, c, accumulate);
        }
        Form::Borrowed(path, values) => {
            let values = values.as_ref().as_ref();
            match *path {
                #[cfg(target_arch = "x86_64")]
                ProductPath::Amx(features) => {
                    amx::product_transposed(features, ws, shape, a, (values, w.inp), c, accumulate);
                }
                #[cfg(target_arch = "x86_64")]
                ProductPath::Avx512Bf16(features) => {
                    let panels = scratch::<u32>(&mut ws.b, panel_lines(w.inp, w.out) * 16);
                    pack_panels_transposed(features, values, w.out, w.inp, panels);
                    avx512::product(features, &mut ws.a, shape, LeftOperand::Rows(a), panels, c, accumulate);
                }
                ProductPath::Widen => {
                    widen_both(ws, a, values, |a, w| gemm_f32::nt_slices(shape, a, w, c, accumulate));
                }
            }
        }
    }
}

fn widen_both(ws: &mut Workspace, a: &[bf16], b: &[bf16], product: impl FnOnce(&[f32], &[f32])) {
    let wide_a = scratch::<f32>(&mut ws.a, a.len());
    widen_bf16(a, wide_a);
    let wide_b = scratch::<f32>(&mut ws.b, b.len());
    widen_bf16(b, wide_b);
    product(wide_a, wide_b);
}

/// `c [m, inp] (+)= a [m, out] W`.
pub(super) fn nn(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
    #[cfg(target_arch = "x86_64")]
    let shape = [m, w.inp, w.out];
    #[cfg(target_arch = "x86_64")]
    if !matches!(w.form, Form::Wide(_)) && !has_terms(shape, a, c, accumulate) {
        return;
    }
    match &w.form {
        #[cfg(target_arch = "x86_64")]
        &Form::Panels { features, ref nn, .. } => {
            let panels = bytemuck::cast_slice(nn);
            avx512::product(features, &mut ws.a, shape, LeftOperand::Rows(a), panels, c, accumulate);
        }
        #[cfg(target_arch = "x86_64")]
        &Form::Rows { features, ref nn, .. } => {
            let panels = RightOperand::Panels(bytemuck::cast_slice(nn));
            amx::product(features, ws, shape, LeftOperand::Rows(a), panels, Output::Sums(c, accumulate));
        }
        Form::Wide(w) => {
            let wide = scratch::<f32>(&mut ws.a, a.len());
            widen_bf16(a, wide);
            gemm_f32::nn(m, wide, w, c, accumulate);
        }
        Form::Borrowed(path, values) => {
            let values = values.as_ref().as_ref();
            match *path {
                #[cfg(target_arch = "x86_64")]
                ProductPath::Amx(features) => {
                    let rows = RightOperand::Rows(values);
                    amx::product(features, ws, shape, LeftOperand::Rows(a), rows, Output::Sums(c, accumulate));
                }
                #[cfg(target_arch = "x86_64")]
                ProductPath::Avx512Bf16(features) => {
                    let panels = scratch::<u32>(&mut ws.b, panel_lines(w.out, w.inp) * 16);
                    pack_panels(features, values, w.out, w.inp, panels);
                    avx512::product(features, &mut ws.a, shape, LeftOperand::Rows(a), panels, c, accumulate);
                }
                ProductPath::Widen => {
                    let shape = [m, w.out, w.inp];
                    widen_both(ws, a, values, |a, w| gemm_f32::nn_slices(shape, a, w, c, accumulate));
                }
            }
        }
    }
}

/// `c [n, k] (+)= aᵀ b` with `a [m, n]` and `b [m, k]`.
pub(super) fn tn(ws: &mut Workspace, shape: [usize; 3], a: &[bf16], b: &[bf16], c: &mut [f32], accumulate: bool) {
    tn_with_path(ProductPath::detect(), ws, shape, a, b, c, accumulate);
}

/// Like [`tn`], with a given implementation.
pub(super) fn tn_with_path(
    path: ProductPath,
    ws: &mut Workspace,
    shape: [usize; 3],
    a: &[bf16],
    b: &[bf16],
    c: &mut [f32],
    accumulate: bool,
) {
    #[cfg(target_arch = "x86_64")]
    let [m, n, k] = shape;
    #[cfg(target_arch = "x86_64")]
    if !matches!(path, ProductPath::Widen) && !has_terms([n, k, m], a, c, accumulate) {
        return;
    }
    match path {
        #[cfg(target_arch = "x86_64")]
        ProductPath::Amx(features) => {
            let (left, right) = (LeftOperand::Columns(a), RightOperand::Rows(b));
            amx::product(features, ws, [n, k, m], left, right, Output::Sums(c, accumulate));
        }
        #[cfg(target_arch = "x86_64")]
        ProductPath::Avx512Bf16(features) => {
            let panels = scratch::<u32>(&mut ws.b, panel_lines(m, k) * 16);
            pack_panels(features, b, m, k, panels);
            avx512::product(features, &mut ws.a, [n, k, m], LeftOperand::Columns(a), panels, c, accumulate);
        }
        ProductPath::Widen => widen_both(ws, a, b, |a, b| gemm_f32::tn(shape, a, b, c, accumulate)),
    }
}

/// [`tn`], rounded: `c [n, k] = aᵀ b`.
pub(super) fn tn_rounded(ws: &mut Workspace, shape: [usize; 3], a: &[bf16], b: &[bf16], c: &mut [bf16]) {
    let [m, n, k] = shape;
    assert_eq!(c.len(), n * k, "result of shape [{n}, {k}]");
    #[cfg(target_arch = "x86_64")]
    if let ProductPath::Amx(features) = ProductPath::detect()
        && (1..=amx::MAX_ROUNDED).contains(&m)
        && n * k > 0
    {
        assert!(a.len() == m * n && b.len() == m * k, "operands of shapes [{m}, {n}] and [{m}, {k}]");
        let (left, right) = (LeftOperand::Columns(a), RightOperand::Rows(b));
        return amx::product(features, ws, [n, k, m], left, right, Output::Rounded(c));
    }
    let mut sums = std::mem::take(&mut ws.sums);
    let wide = scratch::<f32>(&mut sums, n * k);
    tn(ws, shape, a, b, wide, false);
    convert(wide, c);
    ws.sums = sums;
}
