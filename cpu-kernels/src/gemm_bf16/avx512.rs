//! Products with `VDPBF16PS`, which adds to each f32 lane the products of two neighbouring bf16 pairs.
//!
//! The left operand is packed in tiles of up to `MR` rows, `[tile][pair][rows]`, one cache block at a time. Loops, outermost first: blocks of
//! the summed dimension (`KC`); blocks of rows, whose packed tiles stay in the L2 cache together with one panel; panels; tiles. The register
//! tile is `MR x NR` f32 sums.

use std::arch::x86_64::*;

use half::bf16;

use super::panels::{LeftOperand, NR, panel_words};
use crate::cpu::Avx512Bf16;
use crate::weight::bf16_from_f32;
use crate::{Line, scratch, vectorised};

/// Rows of a register tile.
const MR: usize = 12;
/// Maximum elements of the summed dimension in one block.
const KC: usize = 2048;
/// Maximum bytes of packed left operand in one block: together with a panel of `KC * NR * 2` bytes well below 1 MiB
/// of L2.
const A_BLOCK_BYTES: usize = 384 << 10;

/// Two bf16 in one word, the first in the low half.
#[inline(always)]
fn pair(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
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
pub(super) fn narrow(_: Avx512Bf16, src: &[f32], dst: &mut [bf16]) {
    // SAFETY: an `Avx512Bf16` exists, so the CPU has the instructions.
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
    _: Avx512Bf16,
    buffer: &mut Vec<Line>,
    [m, n, k]: [usize; 3],
    left: LeftOperand<'_>,
    right: &[u32],
    c: &mut [f32],
    accumulate: bool,
) {
    assert_eq!(right.len(), n.div_ceil(NR) * panel_words(k), "packed right operand of shape [{k}, {n}]");
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
            for (j, panel) in right.chunks(panel_words(k)).enumerate() {
                let panel = &panel[k0 / 2 * NR..][..pairs * NR];
                let columns = NR.min(n - j * NR);
                for (t, tile) in tiles.chunks(pairs * MR).enumerate() {
                    let c = &mut c[(i0 + t * MR) * n + j * NR..];
                    // SAFETY: an `Avx512Bf16` exists, so the CPU has the instructions.
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
                let sum = if accumulate { _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to.as_ptr())) } else { sum };
                _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, sum);
            }
        }
    }
}
