//! bf16 GEMMs with f32 accumulation.
//!
//! On a CPU with AVX512-BF16 they run in a kernel of this file; elsewhere operands are widened to f32, exactly, and
//! multiplied by faer.
//!
//! `VDPBF16PS` adds to each f32 lane the products of two neighbouring bf16 pairs. Both operands are therefore packed as
//! *pairs* along the summed dimension, one `u32` each (the earlier element in the low half; zero-padded if the
//! dimension is odd):
//!
//! - the right operand in panels of `NR` columns, `[panel][pair][NR]`, columns past the end zero. A weight is packed
//!   once, for each of its two products; `gemm_tn` packs its operand on every call;
//! - the left operand in tiles of up to `MR` rows, `[tile][pair][rows]`, one cache block at a time.
//!
//! Loops, outermost first: blocks of the summed dimension (`KC`); blocks of rows, whose packed tiles stay in the L2
//! cache together with one panel; panels; tiles. The register tile is `MR x NR` f32 sums.
//!
//! The order of summation depends only on the length of the summed dimension, so a row of a result is independent of
//! the other rows. Denormals count as zero (by definition of the instruction).

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::Line;
use super::weight::{bf16_from_f32, bf16_to_f32, narrow_bf16, widen_bf16};
use super::{Borrowed, F32Weight, WeightShape, Workspace, gemm_f32, scratch};
#[cfg(target_arch = "x86_64")]
use avx512::{LeftOperand, pack_panels, pack_panels_transposed, panel_lines, unpack_panels};

/// GEMM implementation.
#[derive(Clone, Copy)]
pub(super) enum ProductPath {
    /// The AVX512-BF16 kernel.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512::Features),
    /// f32 through faer.
    Widen,
}

impl ProductPath {
    /// The fastest implementation for this CPU.
    pub(super) fn detect() -> ProductPath {
        #[cfg(target_arch = "x86_64")]
        if let Some(features) = avx512::Features::detect() {
            return ProductPath::Avx512Bf16(features);
        }
        ProductPath::Widen
    }
}

/// Whether bf16 GEMMs use this CPU's AVX512-BF16 instructions.
pub fn uses_avx512_bf16() -> bool {
    !matches!(ProductPath::detect(), ProductPath::Widen)
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
    match ProductPath::detect() {
        #[cfg(target_arch = "x86_64")]
        ProductPath::Avx512Bf16(features) => {
            avx512::narrow(features, src, dst);
            true
        }
        ProductPath::Widen => false,
    }
}

/// A weight matrix `W [out, inp]` rounded to bf16 and packed for both of its products.
pub struct Bf16Weight {
    out: usize,
    inp: usize,
    form: Form,
}

enum Form {
    #[cfg(target_arch = "x86_64")]
    Packed {
        features: avx512::Features,
        /// Panels of `Wᵀ`, pairs along `inp`.
        nt: Vec<Line>,
        /// Panels of `W`, pairs along `out`.
        nn: Vec<Line>,
    },
    Wide(F32Weight),
    /// Unpacked; each product packs or widens it.
    Borrowed(ProductPath, Borrowed<bf16>),
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
        let form = match path {
            #[cfg(target_arch = "x86_64")]
            ProductPath::Avx512Bf16(features) => Form::Packed {
                features,
                nt: vec![bytemuck::Zeroable::zeroed(); panel_lines(inp, out)],
                nn: vec![bytemuck::Zeroable::zeroed(); panel_lines(out, inp)],
            },
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
            Form::Packed { nt, nn, .. } => {
                let rounded = scratch::<bf16>(&mut ws.a, w.len());
                convert(w, rounded);
                pack_panels_transposed(rounded, out, inp, bytemuck::cast_slice_mut(nt));
                pack_panels(rounded, out, inp, bytemuck::cast_slice_mut(nn));
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
            Form::Packed { nn, .. } => unpack_panels(bytemuck::cast_slice(nn), self.out, self.inp, w),
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

/// `c [m, out] (+)= a [m, inp] Wᵀ`.
pub(super) fn nt(ws: &mut Workspace, m: usize, a: &[bf16], w: &Bf16Weight, c: &mut [f32], accumulate: bool) {
    match &w.form {
        #[cfg(target_arch = "x86_64")]
        &Form::Packed { features, ref nt, .. } => {
            let (left, k, n) = (LeftOperand::Rows(a), w.inp, w.out);
            avx512::product(features, &mut ws.a, [m, n, k], left, bytemuck::cast_slice(nt), c, accumulate);
        }
        Form::Wide(w) => {
            let wide = scratch::<f32>(&mut ws.a, a.len());
            widen_bf16(a, wide);
            gemm_f32::nt(m, wide, w, c, accumulate);
        }
        Form::Borrowed(path, values) => {
            let w = BorrowedWeight { values: values.as_ref().as_ref(), shape: [w.out, w.inp], transposed: true };
            borrowed_product(*path, ws, m, a, w, c, accumulate);
        }
    }
}

/// An unpacked weight `[out, inp]`, as operand of a product.
struct BorrowedWeight<'w> {
    values: &'w [bf16],
    shape: [usize; 2],
    transposed: bool,
}

/// [`nt`] for a transposed weight, otherwise [`nn`].
fn borrowed_product(
    path: ProductPath,
    ws: &mut Workspace,
    m: usize,
    a: &[bf16],
    BorrowedWeight { values: w, shape: [out, inp], transposed }: BorrowedWeight<'_>,
    c: &mut [f32],
    accumulate: bool,
) {
    match path {
        #[cfg(target_arch = "x86_64")]
        ProductPath::Avx512Bf16(features) => {
            let (k, n) = if transposed { (inp, out) } else { (out, inp) };
            let panels = scratch::<u32>(&mut ws.b, panel_lines(k, n) * 16);
            match transposed {
                true => pack_panels_transposed(w, n, k, panels),
                false => pack_panels(w, k, n, panels),
            }
            avx512::product(features, &mut ws.a, [m, n, k], LeftOperand::Rows(a), panels, c, accumulate);
        }
        ProductPath::Widen => {
            let product = if transposed { gemm_f32::nt_slices } else { gemm_f32::nn_slices };
            widen_both(ws, a, w, |a, w| product([m, out, inp], a, w, c, accumulate));
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
    match &w.form {
        #[cfg(target_arch = "x86_64")]
        &Form::Packed { features, ref nn, .. } => {
            let (left, k, n) = (LeftOperand::Rows(a), w.out, w.inp);
            avx512::product(features, &mut ws.a, [m, n, k], left, bytemuck::cast_slice(nn), c, accumulate);
        }
        Form::Wide(w) => {
            let wide = scratch::<f32>(&mut ws.a, a.len());
            widen_bf16(a, wide);
            gemm_f32::nn(m, wide, w, c, accumulate);
        }
        Form::Borrowed(path, values) => {
            let w = BorrowedWeight { values: values.as_ref().as_ref(), shape: [w.out, w.inp], transposed: false };
            borrowed_product(*path, ws, m, a, w, c, accumulate);
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
    match path {
        #[cfg(target_arch = "x86_64")]
        ProductPath::Avx512Bf16(features) => {
            let [m, n, k] = shape;
            let panels = scratch::<u32>(&mut ws.b, panel_lines(m, k) * 16);
            pack_panels(b, m, k, panels);
            avx512::product(features, &mut ws.a, [n, k, m], LeftOperand::Columns(a), panels, c, accumulate);
        }
        ProductPath::Widen => widen_both(ws, a, b, |a, b| gemm_f32::tn(shape, a, b, c, accumulate)),
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use half::bf16;

    use crate::weight::bf16_from_f32;
    use crate::{Line, scratch, vectorised};

    /// Rows of a register tile.
    const MR: usize = 12;
    /// Columns of a register tile and of a packed panel: two vectors.
    const NR: usize = 32;
    /// Maximum elements of the summed dimension in one block.
    const KC: usize = 2048;
    /// Maximum bytes of packed left operand in one block: together with a panel of `KC * NR * 2` bytes well below 1 MiB
    /// of L2.
    const A_BLOCK_BYTES: usize = 384 << 10;

    /// Proof that the CPU has the instructions; only [`Features::detect`] creates one.
    #[derive(Clone, Copy)]
    pub(crate) struct Features(());

    impl Features {
        pub(super) fn detect() -> Option<Features> {
            (is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512bf16"))
            .then_some(Features(()))
        }
    }

    /// Cache lines of a packed right operand of `k` rows and `n` columns.
    pub(super) fn panel_lines(k: usize, n: usize) -> usize {
        n.div_ceil(NR) * k.div_ceil(2) * (NR / 16)
    }

    /// Two bf16 in one word, the first in the low half.
    #[inline(always)]
    fn pair(first: bf16, second: bf16) -> u32 {
        u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
    }

    vectorised! {
        /// Packs `b [k, n]`: pairs of neighbouring rows.
        pub(super) fn pack_panels<>(b: &'a [bf16], k: usize, n: usize, panels: &'a mut [u32]) -> () {
            let pairs = k.div_ceil(2);
            assert!(b.len() == k * n && panels.len() == panel_lines(k, n) * 16);
            for p in 0..pairs {
                let first = &b[2 * p * n..][..n];
                let second = b.get((2 * p + 1) * n..(2 * p + 2) * n).unwrap_or(&[]);
                for (i, columns) in first.chunks(NR).enumerate() {
                    let to: &mut [u32; NR] = panels[(i * pairs + p) * NR..].first_chunk_mut().expect("a panel's row");
                    match (columns.first_chunk::<NR>(), second[(i * NR).min(second.len())..].first_chunk::<NR>()) {
                        (Some(x), Some(y)) => {
                            for (to, (&x, &y)) in to.iter_mut().zip(x.iter().zip(y)) {
                                *to = pair(x, y);
                            }
                        }
                        _ => {
                            for (j, to) in to.iter_mut().enumerate() {
                                let or_zero = |x: Option<&bf16>| x.copied().unwrap_or_default();
                                *to = pair(or_zero(columns.get(j)), or_zero(second.get(i * NR + j)));
                            }
                        }
                    }
                }
            }
        }
    }

    /// Widens panels of [`pack_panels`] to `b [k, n]`.
    pub(super) fn unpack_panels(panels: &[u32], k: usize, n: usize, b: &mut [f32]) {
        let pairs = k.div_ceil(2);
        for (row, values) in b.chunks_mut(n.max(1)).enumerate() {
            for (column, value) in values.iter_mut().enumerate() {
                let pair = panels[(column / NR * pairs + row / 2) * NR + column % NR];
                // A bf16 is the upper half of an f32.
                *value = f32::from_bits(if row % 2 == 0 { pair << 16 } else { pair & 0xffff_0000 });
            }
        }
    }

    /// Pairs per block of [`pack_panels_transposed`]: one cache line of each row of a panel.
    const BLOCK: usize = 16;

    vectorised! {
        /// Packs `wᵀ` from `w [n, k]`: pairs along a row. Works in blocks that stay in L1, so that every line of the
        /// panels is written once.
        pub(super) fn pack_panels_transposed<>(w: &'a [bf16], n: usize, k: usize, panels: &'a mut [u32]) -> () {
            let pairs = k.div_ceil(2);
            assert!(w.len() == k * n && panels.len() == panel_lines(k, n) * 16);
            for (rows, panel) in w.chunks(NR * k.max(1)).zip(panels.chunks_mut(pairs.max(1) * NR)) {
                for first in (0..pairs).step_by(BLOCK) {
                    let mut block = [[0u32; BLOCK]; NR];
                    for (row, block) in rows.chunks(k).zip(&mut block) {
                        let row = &row[2 * first..];
                        if let Some(whole) = row.first_chunk::<{ 2 * BLOCK }>() {
                            for (to, x) in block.iter_mut().zip(whole.chunks_exact(2)) {
                                *to = pair(x[0], x[1]);
                            }
                        } else {
                            for (to, x) in block.iter_mut().zip(row.chunks(2)) {
                                *to = pair(x[0], x.get(1).copied().unwrap_or_default());
                            }
                        }
                    }
                    for (p, to) in panel[first * NR..].chunks_exact_mut(NR).take(BLOCK).enumerate() {
                        for (to, row) in to.iter_mut().zip(&block) {
                            *to = row[p];
                        }
                    }
                }
            }
        }
    }

    /// Storage of a left operand `[m, k]`.
    #[derive(Clone, Copy)]
    pub(super) enum LeftOperand<'a> {
        /// Stored `[m, k]`.
        Rows(&'a [bf16]),
        /// Stored `[k, m]`.
        Columns(&'a [bf16]),
    }

    /// Packs rows `i0..i0 + rows` and summed elements `k0..k0 + kc` of a left operand into tiles.
    fn pack_left(
        left: LeftOperand<'_>,
        [m, k]: [usize; 2],
        [i0, rows]: [usize; 2],
        [k0, kc]: [usize; 2],
        tiles: &mut [u32],
    ) {
        match left {
            LeftOperand::Rows(a) => {
                let pairs = kc.div_ceil(2);
                for (t, tile) in tiles.chunks_mut(pairs * MR).enumerate() {
                    let height = MR.min(rows - t * MR);
                    for r in 0..height {
                        let row = &a[(i0 + t * MR + r) * k + k0..][..kc];
                        let (whole, rest) = row.as_chunks::<2>();
                        for (to, &[x, y]) in tile[r..].iter_mut().step_by(height).zip(whole) {
                            *to = pair(x, y);
                        }
                        if let &[x] = rest {
                            tile[(pairs - 1) * height + r] = pair(x, bf16::ZERO);
                        }
                    }
                }
            }
            LeftOperand::Columns(a) => pack_left_columns(a, m, i0, rows, k0, kc, tiles),
        }
    }

    vectorised! {
        fn pack_left_columns<>(
            a: &'a [bf16],
            m: usize,
            i0: usize,
            rows: usize,
            k0: usize,
            kc: usize,
            tiles: &'a mut [u32],
        ) -> () {
            let pairs = kc.div_ceil(2);
            for p in 0..pairs {
                let first = &a[(k0 + 2 * p) * m + i0..][..rows];
                // At an odd end the second element of the pair is zero.
                let second = if 2 * p + 1 < kc { &a[(k0 + 2 * p + 1) * m + i0..][..rows] } else { &[] };
                for (t, x) in first.chunks(MR).enumerate() {
                    let tile = &mut tiles[t * pairs * MR..];
                    match (x.first_chunk::<MR>(), second[(t * MR).min(second.len())..].first_chunk::<MR>()) {
                        (Some(x), Some(y)) => {
                            let to: &mut [u32; MR] = tile[p * MR..].first_chunk_mut().expect("a tile's row");
                            for (to, (&x, &y)) in to.iter_mut().zip(x.iter().zip(y)) {
                                *to = pair(x, y);
                            }
                        }
                        _ => {
                            for (r, to) in tile[p * x.len()..][..x.len()].iter_mut().enumerate() {
                                *to = pair(x[r], second.get(t * MR + r).copied().unwrap_or_default());
                            }
                        }
                    }
                }
            }
        }
    }

    /// Rounds `src` into `dst`, of the same length.
    pub(super) fn narrow(_: Features, src: &[f32], dst: &mut [bf16]) {
        // SAFETY: a `Features` exists, so the CPU has the instructions.
        unsafe { narrow_vectors(src, dst) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn narrow_vectors(src: &[f32], dst: &mut [bf16]) {
        let (whole, rest) = src.as_chunks::<32>();
        let (to_whole, to_rest) = dst.as_chunks_mut::<32>();
        for (x, to) in whole.iter().zip(to_whole) {
            // SAFETY: 32 floats to read, 32 halves to write.
            unsafe {
                let [low, high] = [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr())];
                let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.as_mut_ptr().cast(), halves);
            }
        }
        for (&x, to) in rest.iter().zip(to_rest) {
            *to = bf16_from_f32(x);
        }
    }

    /// `c [m, n] (+)= left [m, k] right`, `right` packed in panels.
    pub(super) fn product(
        _: Features,
        buffer: &mut Vec<Line>,
        [m, n, k]: [usize; 3],
        left: LeftOperand<'_>,
        right: &[u32],
        c: &mut [f32],
        accumulate: bool,
    ) {
        let pairs_total = k.div_ceil(2);
        assert_eq!(c.len(), m * n, "result of shape [{m}, {n}]");
        let (LeftOperand::Rows(a) | LeftOperand::Columns(a)) = left;
        assert_eq!(a.len(), m * k, "left operand of shape [{m}, {k}]");
        assert_eq!(right.len(), n.div_ceil(NR) * pairs_total * NR, "packed right operand of shape [{k}, {n}]");
        if k == 0 && !accumulate {
            c.fill(0.0);
        }
        if m == 0 || n == 0 || k == 0 {
            return;
        }
        let kc = k.div_ceil(k.div_ceil(KC)).next_multiple_of(2);
        let mc = (A_BLOCK_BYTES / (kc * 2) / MR * MR).max(MR);
        for k0 in (0..k).step_by(kc) {
            let kc = kc.min(k - k0);
            let pairs = kc.div_ceil(2);
            let add = accumulate || k0 > 0;
            for i0 in (0..m).step_by(mc) {
                let rows = mc.min(m - i0);
                let tiles = scratch::<u32>(buffer, rows * pairs);
                pack_left(left, [m, k], [i0, rows], [k0, kc], tiles);
                for (j, panel) in right.chunks(pairs_total * NR).enumerate() {
                    let panel = &panel[k0 / 2 * NR..][..pairs * NR];
                    let columns = NR.min(n - j * NR);
                    for (t, tile) in tiles.chunks(pairs * MR).enumerate() {
                        let c = &mut c[(i0 + t * MR) * n + j * NR..];
                        // SAFETY: a `Features` exists, so the CPU has the instructions.
                        unsafe { tile_of_any_height(tile, pairs, panel, c, n, columns, add) };
                    }
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn tile_of_any_height(
        a: &[u32],
        pairs: usize,
        b: &[u32],
        c: &mut [f32],
        stride: usize,
        columns: usize,
        accumulate: bool,
    ) {
        macro_rules! by_height {
            ($($height:literal)*) => {
                match a.len() / pairs {
                    $($height => tile::<$height>(a, b, c, stride, columns, accumulate),)*
                    height => unreachable!("a tile of {height} rows"),
                }
            };
        }
        by_height!(1 2 3 4 5 6 7 8 9 10 11 12);
    }

    /// `c (+)= a b` for one register tile: `c` has `R` rows, `stride` apart, of `columns` entries.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn tile<const R: usize>(a: &[u32], b: &[u32], c: &mut [f32], stride: usize, columns: usize, accumulate: bool) {
        const VECTORS: usize = NR / 16;
        let (a, _) = a.as_chunks::<R>();
        let (b, _) = b.as_chunks::<16>();
        let (b, _) = b.as_chunks::<VECTORS>();
        // Prefetch the tile's lines of `c` while the sums are computed.
        for r in 0..R {
            let row = &c[r * stride..][..columns];
            _mm_prefetch::<_MM_HINT_ET0>(row.as_ptr().cast());
            _mm_prefetch::<_MM_HINT_ET0>(row[columns - 1..].as_ptr().cast());
        }
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; R];
        for (a, b) in a.iter().zip(b) {
            // SAFETY: an array of 16 words is 64 readable bytes, and every bit pattern is a vector.
            let b = b.each_ref().map(|b| unsafe { std::mem::transmute(_mm512_loadu_epi32(b.as_ptr().cast())) });
            for (sums, &a) in sums.iter_mut().zip(a) {
                // SAFETY: both types are 64 bytes of any bit pattern.
                let a = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(a as i32)) };
                for (sum, &b) in sums.iter_mut().zip(&b) {
                    *sum = _mm512_dpbf16_ps(*sum, a, b);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let row = &mut c[r * stride..][..columns];
            for (v, &sum) in sums.iter().enumerate() {
                let Some(to) = row.get_mut(v * 16..) else { break };
                let mask = if to.len() >= 16 { 0xffff } else { (1u16 << to.len()) - 1 };
                // SAFETY: the mask selects only elements of `to`.
                unsafe {
                    let sum =
                        if accumulate { _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to.as_ptr())) } else { sum };
                    _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, sum);
                }
            }
        }
    }
}
