//! Packing of bf16 operands, with AVX-512.
//!
//! The summed dimension is packed as *pairs* of neighbouring elements, one `u32` each with the earlier element in the low half, and padded with
//! zeros to a whole number of [`STEP`]s, as AMX needs.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

use half::bf16;

use crate::cpu::Avx512Bf16;

/// Columns of a panel.
pub(super) const NR: usize = 32;
/// Summed elements per AMX instruction.
pub(super) const STEP: usize = 32;
/// Words of a panel per step.
pub(super) const STEP_WORDS: usize = STEP / 2 * NR;
/// Rows of an AMX tile.
pub(super) const TILE_ROWS: usize = 16;
/// bf16 elements of an AMX tile.
pub(super) const TILE: usize = TILE_ROWS * STEP;

/// Words of one panel with `k` summed elements.
pub(super) fn panel_words(k: usize) -> usize {
    k.div_ceil(STEP) * STEP_WORDS
}

/// Cache lines of a packed right operand of `k` rows and `n` columns.
pub(super) fn panel_lines(k: usize, n: usize) -> usize {
    n.div_ceil(NR) * panel_words(k) / 16
}

/// Storage of a left operand `[m, k]`.
#[derive(Clone, Copy)]
pub(super) enum LeftOperand<'a> {
    /// Stored `[m, k]`.
    Rows(&'a [bf16]),
    /// Stored `[k, m]`.
    Columns(&'a [bf16]),
}

/// Storage of a right operand `[k, n]` of the AMX kernel.
#[derive(Clone, Copy)]
pub(super) enum RightOperand<'a> {
    /// Packed by [`pack_panels`].
    Panels(&'a [u32]),
    /// Stored `[k, n]`; packed one panel at a time.
    Rows(&'a [bf16]),
}

/// Result `[m, n]` of the AMX kernel.
pub(super) enum Output<'a> {
    /// Sums in f32; true if they are added to the current values.
    Sums(&'a mut [f32], bool),
    /// Sums rounded to bf16.
    Rounded(&'a mut [bf16]),
}

/// A block of a row-major matrix.
#[derive(Clone)]
pub(super) struct Block<'a> {
    pub matrix: &'a [bf16],
    /// Elements from one row of the matrix to the next.
    pub stride: usize,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

impl Block<'_> {
    /// Up to 32 elements of row `row`, from column `column`, both relative to the block; zeros outside of it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load(&self, row: usize, column: usize) -> __m512i {
        let width = self.columns.len().saturating_sub(column).min(32);
        if row >= self.rows.len() || width == 0 {
            return _mm512_setzero_si512();
        }
        let start = (self.rows.start + row) * self.stride + self.columns.start + column;
        let elements = &self.matrix[start..start + width];
        // SAFETY: the mask selects only `elements`.
        unsafe { _mm512_maskz_loadu_epi16(u32::MAX >> (32 - width), elements.as_ptr().cast()) }
    }

    /// Prefetches the line of row `row` after the block's columns into L2.
    #[inline]
    fn prefetch_next_columns(&self, row: usize) {
        let next = (self.rows.start + row) * self.stride + self.columns.end;
        // SAFETY: a prefetch of any address has no effect but on the caches.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(self.matrix.as_ptr().wrapping_add(next).cast()) }
    }
}

/// Interleaves two rows of 32 elements to pairs: the first and the last 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs(first: __m512i, second: __m512i) -> [__m512i; 2] {
    const fn order(start: u16) -> [u16; 32] {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = start + i as u16 / 2 + 32 * (i as u16 % 2);
            i += 1;
        }
        order
    }
    const ORDERS: [[u16; 32]; 2] = [order(0), order(16)];
    // SAFETY: both types are 64 bytes of any bit pattern.
    ORDERS.map(|order| unsafe { _mm512_permutex2var_epi16(first, transmute::<[u16; 32], __m512i>(order), second) })
}

/// Transposes a matrix of 16 x 16 words, one row per vector.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(rows: &mut [__m512i; 16]) {
    let r = *rows;
    let mut t = r;
    // Within each 128-bit lane: pairs of rows, then groups of four rows.
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut r = t;
    for i in 0..4 {
        for j in 0..2 {
            r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + j + 2]);
            r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + j + 2]);
        }
    }
    // The lanes: first between groups 0, 1 and 2, 3, then between these.
    for c in 0..4 {
        for half in 0..2 {
            t[8 * half + c] = _mm512_shuffle_i32x4::<0x88>(r[8 * half + c], r[8 * half + 4 + c]);
            t[8 * half + 4 + c] = _mm512_shuffle_i32x4::<0xdd>(r[8 * half + c], r[8 * half + 4 + c]);
        }
    }
    for c in 0..8 {
        let from = c % 4 + c / 4 * 4;
        rows[c] = _mm512_shuffle_i32x4::<0x88>(t[from], t[from + 8]);
        rows[c + 8] = _mm512_shuffle_i32x4::<0xdd>(t[from], t[from + 8]);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [u32], values: __m512i) {
    let to: &mut [u32; 16] = to.first_chunk_mut().expect("16 words");
    // SAFETY: 64 writable bytes.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), values) }
}

/// Packs a panel from a block of up to [`NR`] columns; rows are summed.
pub(super) fn pack_panel(_: Avx512Bf16, block: &Block<'_>, panel: &mut [u32]) {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn pack(block: &Block<'_>, panel: &mut [u32]) {
        for (pair, to) in panel.as_chunks_mut::<NR>().0.iter_mut().enumerate() {
            let rows = [2 * pair, 2 * pair + 1];
            rows.iter().for_each(|&row| block.prefetch_next_columns(row));
            let [low, high] = pairs(block.load(rows[0], 0), block.load(rows[1], 0));
            store(to, low);
            store(&mut to[16..], high);
        }
    }
    // SAFETY: an `Avx512Bf16` exists, so the CPU has the instructions.
    unsafe { pack(block, panel) }
}

/// Packs a panel from the transpose of a block of up to [`NR`] rows; the block's columns are summed.
pub(super) fn pack_panel_transposed(_: Avx512Bf16, block: &Block<'_>, panel: &mut [u32]) {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn pack(block: &Block<'_>, panel: &mut [u32]) {
        for (step, to) in panel.as_chunks_mut::<STEP_WORDS>().0.iter_mut().enumerate() {
            for half in 0..2 {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = block.load(16 * half + i, step * STEP);
                }
                transpose(&mut rows);
                for (i, row) in rows.into_iter().enumerate() {
                    store(&mut to[i * NR + 16 * half..], row);
                }
            }
        }
    }
    // SAFETY: an `Avx512Bf16` exists, so the CPU has the instructions.
    unsafe { pack(block, panel) }
}

/// Packs all panels of `b [k, n]`.
pub(super) fn pack_panels(avx512: Avx512Bf16, b: &[bf16], k: usize, n: usize, panels: &mut [u32]) {
    for (j, panel) in panels.chunks_mut(panel_words(k).max(1)).enumerate() {
        let columns = j * NR..n.min((j + 1) * NR);
        pack_panel(avx512, &Block { matrix: b, stride: n, rows: 0..k, columns }, panel);
    }
}

/// Packs all panels of the transpose of `w [n, k]`.
pub(super) fn pack_panels_transposed(avx512: Avx512Bf16, w: &[bf16], n: usize, k: usize, panels: &mut [u32]) {
    for (j, panel) in panels.chunks_mut(panel_words(k).max(1)).enumerate() {
        let rows = j * NR..n.min((j + 1) * NR);
        pack_panel_transposed(avx512, &Block { matrix: w, stride: k, rows, columns: 0..k }, panel);
    }
}

/// Widens panels of [`pack_panels`] to `b [k, n]`.
pub(super) fn unpack_panels(panels: &[u32], k: usize, n: usize, b: &mut [f32]) {
    for (row, values) in b.chunks_mut(n.max(1)).enumerate() {
        for (column, value) in values.iter_mut().enumerate() {
            let pair = panels[column / NR * panel_words(k) + row / 2 * NR + column % NR];
            // A bf16 is the upper half of an f32.
            *value = f32::from_bits(if row % 2 == 0 { pair << 16 } else { pair & 0xffff_0000 });
        }
    }
}

/// Packs a block into AMX tiles of 16 rows, `[tile][step][row][32]`; rows past the block are zero.
pub(super) fn pack_tiles(_: Avx512Bf16, block: &Block<'_>, tiles: &mut [bf16]) {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn pack(block: &Block<'_>, tiles: &mut [bf16]) {
        let steps = block.columns.len().div_ceil(STEP);
        for (t, tiles) in tiles.chunks_mut(steps * TILE).enumerate() {
            for (step, tile) in tiles.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
                for (row, to) in bytemuck::cast_slice_mut(tile).chunks_mut(STEP / 2).enumerate() {
                    store(to, block.load(t * TILE_ROWS + row, step * STEP));
                }
            }
        }
    }
    // SAFETY: an `Avx512Bf16` exists, so the CPU has the instructions.
    unsafe { pack(block, tiles) }
}

/// Packs the transpose of a block into AMX tiles, as [`pack_tiles`] does; the block's rows are summed.
pub(super) fn pack_tiles_transposed(_: Avx512Bf16, block: &Block<'_>, tiles: &mut [bf16]) {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn pack(block: &Block<'_>, tiles: &mut [bf16]) {
        let steps = block.rows.len().div_ceil(STEP);
        for (two, tiles) in tiles.chunks_mut(2 * steps * TILE).enumerate() {
            for step in 0..steps {
                let mut halves = [[_mm512_setzero_si512(); 16]; 2];
                for pair in 0..STEP / 2 {
                    let row = step * STEP + 2 * pair;
                    let column = two * 2 * TILE_ROWS;
                    let both = pairs(block.load(row, column), block.load(row + 1, column));
                    for (half, vector) in halves.iter_mut().zip(both) {
                        half[pair] = vector;
                    }
                }
                for (tile, half) in tiles.chunks_mut(steps * TILE).zip(&mut halves) {
                    transpose(half);
                    let tile = bytemuck::cast_slice_mut(&mut tile[step * TILE..][..TILE]);
                    for (to, vector) in tile.chunks_mut(STEP / 2).zip(half) {
                        store(to, *vector);
                    }
                }
            }
        }
    }
    // SAFETY: an `Avx512Bf16` exists, so the CPU has the instructions.
    unsafe { pack(block, tiles) }
}
