//! Products with AMX tiles.
//!
//! `TDPBF16PS` multiplies a tile of 16 rows x 32 summed elements by one of 16 pairs x 16 columns and adds to a tile of 16 x 16 f32 sums. A block
//! is 2 x 2 tiles of sums. Stable Rust has no intrinsics for tiles, so the loop over the summed dimension is assembly, and no tile is live outside
//! of it. Instructions and their permission: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux,
//! Documentation/arch/x86/xstate.rst.
//!
//! A weight `W` is the right operand of `a W`, packed in panels. In `a Wᵀ` it is instead the left operand of `W aᵀ`: rows of `W` are tiles as they
//! are stored, so they are read once and never packed, and blocks of sums are transposed when they are added to the result.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::avx512;
use super::panels::{
    Block, LeftOperand, NR, Output, RightOperand, STEP, STEP_WORDS, TILE, TILE_ROWS, pack_panel, pack_panel_transposed,
    pack_tiles, pack_tiles_transposed, panel_words, transpose,
};
use crate::cpu::Amx;
use crate::{Line, Workspace, scratch};

/// Rows and columns of a block of sums.
const BLOCK: usize = 32;
/// Maximum elements of the summed dimension in one pass over the sums.
const KC: usize = 2048;
/// Maximum bytes of the operand that stays in L2 while the other one is streamed. CPUs with AMX have 2 MiB of L2 a core.
const RESIDENT_BYTES: usize = 512 << 10;

/// The configuration of this thread's tiles, released when dropped: 8 tiles of 16 rows of 64 bytes.
struct Tiles;

impl Tiles {
    fn configure(_: Amx) -> Tiles {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(TILE_ROWS as u8);
        // SAFETY: an `Amx` exists, and the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Tiles
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles were configured, so the CPU has the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The left operand of a block: up to two tiles, of which row `r` of step `s` starts at `first + r * stride + s * step`.
#[derive(Clone, Copy)]
struct LeftBlock {
    first: *const u8,
    second: *const u8,
    /// Tiles that have rows: 1 or 2.
    tiles: usize,
    stride: usize,
    packed: bool,
}

impl LeftBlock {
    /// Tiles packed by [`pack_tiles`]: one or two, of equal length.
    fn packed(tiles: &[bf16], steps: usize) -> LeftBlock {
        let first: *const u8 = tiles.as_ptr().cast();
        let second = first.wrapping_add(steps * TILE * 2);
        LeftBlock { first, second, tiles: tiles.len() / (steps * TILE), stride: STEP * 2, packed: true }
    }
}

/// Lines that a block prefetches into L2 in each step: `units` times 4, of which line `i` of step `s` starts at `start + i * stride + s * step`.
/// The strides are those of the left block.
#[derive(Clone, Copy)]
struct Prefetch {
    start: *const u8,
    units: usize,
}

impl Prefetch {
    /// The share of call `call` of `calls` in the lines of the next 32-row or 32-column operand.
    fn share(next: *const u8, stride: usize, call: usize, calls: usize) -> Prefetch {
        let units = 8usize.div_ceil(calls).next_power_of_two();
        let start = next.wrapping_add(call * units * 4 * stride);
        Prefetch { start, units: if call * units < 8 { units } else { 0 } }
    }
}

/// `c (+)= left * right` for one block of sums, whose rows are `c_stride` bytes apart.
///
/// # Safety
/// The tiles are configured. `left` and `right` are readable over `steps` steps. `c` is writable for 16 rows a tile, of 32 columns.
#[inline]
unsafe fn block(left: LeftBlock, right: &[u32], prefetch: Prefetch, c: *mut f32, c_stride: usize, add: bool) {
    macro_rules! by_form {
        ($($tiles:literal $packed:literal $units:literal)*) => {
            match (left.tiles, left.packed, prefetch.units) {
                $(($tiles, $packed, $units) =>
                    // SAFETY: as for this function.
                    unsafe {
                        steps::<$tiles, { if $packed { TILE * 2 } else { STEP * 2 } },
                            { if $packed { STEP_WORDS * 4 } else { STEP * 2 } }, $units>(left, right, prefetch.start, c, c_stride, add)
                    },)*
                form => unreachable!("a block of form {form:?}"),
            }
        };
    }
    by_form!(
        1 true 0  1 true 1  1 true 2  1 true 4  1 true 8
        2 true 0  2 true 1  2 true 2  2 true 4  2 true 8
        1 false 0  1 false 1  1 false 2  1 false 4  1 false 8
        2 false 0  2 false 1  2 false 2  2 false 4  2 false 8
    );
}

/// [`block`] for `TILES` left tiles, whose steps are `LEFT_STEP` bytes apart. Each step prefetches `4 * UNITS` lines, `PREFETCH_STEP` bytes after
/// those of the step before.
///
/// # Safety
/// As for [`block`].
#[inline(never)]
unsafe fn steps<const TILES: usize, const LEFT_STEP: usize, const PREFETCH_STEP: usize, const UNITS: usize>(
    left: LeftBlock,
    right: &[u32],
    prefetch: *const u8,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    // SAFETY: reads and writes are those that the caller permits; prefetches have no effect but on the caches. The tiles are clobbered.
    unsafe {
        asm!(
            "test {line:e}, {line:e}",
            "jnz 3f",
            "tilezero tmm0",
            "tilezero tmm1",
            ".if {tiles} == 2",
            "tilezero tmm2",
            "tilezero tmm3",
            ".endif",
            "jmp 2f",
            "3:",
            "tileloadd tmm0, [{c} + {c_stride}]",
            "tileloadd tmm1, [{c} + {c_stride} + 64]",
            ".if {tiles} == 2",
            "tileloadd tmm2, [{c2} + {c_stride}]",
            "tileloadd tmm3, [{c2} + {c_stride} + 64]",
            ".endif",
            ".p2align 5",
            "2:",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tileloadd tmm4, [{a} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            ".if {tiles} == 2",
            "tileloadd tmm5, [{a2} + {stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            ".endif",
            ".if {units} > 0",
            "mov {line}, {prefetch}",
            ".rept {units}",
            "prefetcht1 [{line}]",
            "prefetcht1 [{line} + {stride}]",
            "prefetcht1 [{line} + 2 * {stride}]",
            "prefetcht1 [{line} + {stride3}]",
            "lea {line}, [{line} + 4 * {stride}]",
            ".endr",
            "add {prefetch}, {prefetch_step}",
            ".endif",
            ".if {tiles} == 2",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a2}, {left_step}",
            ".endif",
            "add {a}, {left_step}",
            "add {b}, {right_step}",
            "dec {k}",
            "jnz 2b",
            "tilestored [{c} + {c_stride}], tmm0",
            "tilestored [{c} + {c_stride} + 64], tmm1",
            ".if {tiles} == 2",
            "tilestored [{c2} + {c_stride}], tmm2",
            "tilestored [{c2} + {c_stride} + 64], tmm3",
            ".endif",
            tiles = const TILES,
            units = const UNITS,
            left_step = const LEFT_STEP,
            prefetch_step = const PREFETCH_STEP,
            right_step = const STEP_WORDS * 4,
            // Whether to add to `c`, then the next line to prefetch.
            line = inout(reg) u64::from(add) => _,
            a = inout(reg) left.first => _,
            a2 = inout(reg) left.second => _,
            stride = in(reg) left.stride,
            stride3 = in(reg) 3 * left.stride,
            b = inout(reg) right.as_ptr() => _,
            b_stride = in(reg) NR * 4,
            k = inout(reg) right.len() / STEP_WORDS => _,
            prefetch = inout(reg) prefetch => _,
            c = in(reg) c,
            c2 = in(reg) c.wrapping_byte_add(TILE_ROWS * c_stride),
            c_stride = in(reg) c_stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The blocks of the summed dimension: equal multiples of [`STEP`], except the last one.
fn summed_blocks(k: usize) -> impl Iterator<Item = Range<usize>> {
    let length = k.div_ceil(k.div_ceil(KC)).next_multiple_of(STEP);
    (0..k).step_by(length).map(move |start| start..k.min(start + length))
}

/// Ranges of at most `RESIDENT_BYTES`, with `k` summed elements, in multiples of [`BLOCK`].
fn resident_blocks(n: usize, k: usize) -> impl Iterator<Item = Range<usize>> {
    let length = (RESIDENT_BYTES / (k * 2) / BLOCK * BLOCK).max(BLOCK);
    (0..n).step_by(length).map(move |start| start..n.min(start + length))
}

/// Prefetches the rows of a block of `c` for writing.
fn prefetch_rows<T>(c: &[T], stride: usize, rows: usize) {
    for row in 0..rows {
        for column in (0..BLOCK).step_by(size_of::<Line>() / size_of::<T>()) {
            // SAFETY: a prefetch of any address has no effect but on the caches.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(c.as_ptr().wrapping_add(row * stride + column).cast()) };
        }
    }
}

/// Maximum summed elements of a rounded result, which is written once.
pub(super) const MAX_ROUNDED: usize = KC;

/// `c [m, n] (+)= left [m, k] right [k, n]`; no dimension is zero.
pub(super) fn product(
    amx: Amx,
    Workspace { a: left_buffer, b: right_buffer, .. }: &mut Workspace,
    [m, n, k]: [usize; 3],
    left: LeftOperand<'_>,
    right: RightOperand<'_>,
    mut c: Output<'_>,
) {
    assert!(matches!(c, Output::Sums(..)) || k <= MAX_ROUNDED, "{k} summed elements of a rounded result");
    let mut edge = [Line([0; 16]); BLOCK * BLOCK / 16];
    let edge: &mut [f32] = bytemuck::cast_slice_mut(&mut edge);
    let _tiles = Tiles::configure(amx);
    for summed in summed_blocks(k) {
        let steps = summed.len().div_ceil(STEP);
        for rows in resident_blocks(m, summed.len()) {
            let tiles = scratch::<bf16>(left_buffer, rows.len().div_ceil(TILE_ROWS) * steps * TILE);
            match left {
                LeftOperand::Rows(matrix) => {
                    let block = Block { matrix, stride: k, rows: rows.clone(), columns: summed.clone() };
                    pack_tiles(amx.avx512, &block, tiles);
                }
                LeftOperand::Columns(matrix) => {
                    let block = Block { matrix, stride: m, rows: summed.clone(), columns: rows.clone() };
                    pack_tiles_transposed(amx.avx512, &block, tiles);
                }
            }
            let tiles = &*tiles;
            for j in (0..n).step_by(NR) {
                let columns = j..n.min(j + NR);
                let (panel, next) = match right {
                    RightOperand::Panels(panels) => {
                        let start = j / NR * panel_words(k) + summed.start / STEP * STEP_WORDS;
                        let next = panels.as_ptr().wrapping_add(start + panel_words(k)).cast();
                        (&panels[start..start + steps * STEP_WORDS], Some(next))
                    }
                    RightOperand::Rows(matrix) => {
                        let panel = scratch::<u32>(right_buffer, steps * STEP_WORDS);
                        let block = Block { matrix, stride: n, rows: summed.clone(), columns: columns.clone() };
                        pack_panel(amx.avx512, &block, panel);
                        (&*panel, None)
                    }
                };
                let calls = rows.len().div_ceil(BLOCK);
                for (call, tiles) in tiles.chunks(2 * steps * TILE).enumerate() {
                    let row = rows.start + call * BLOCK;
                    let height = BLOCK.min(rows.end - row);
                    let left = LeftBlock::packed(tiles, steps);
                    let prefetch = match next {
                        Some(next) => Prefetch::share(next, left.stride, call, calls),
                        None => Prefetch { start: left.first, units: 0 },
                    };
                    match &mut c {
                        Output::Sums(c, accumulate) => {
                            let c = &mut c[row * n + j..];
                            let add = *accumulate || summed.start > 0;
                            prefetch_rows(c, n, height);
                            if columns.len() == NR && height == left.tiles * TILE_ROWS {
                                // SAFETY: `c` has `height` rows of `n` columns, of which 32 are in this block.
                                unsafe { block(left, panel, prefetch, c.as_mut_ptr(), n * 4, add) };
                                continue;
                            }
                            if add {
                                for (edge, c) in edge.chunks_mut(BLOCK).zip(c.chunks(n)).take(height) {
                                    edge[..columns.len()].copy_from_slice(&c[..columns.len()]);
                                }
                            }
                            // SAFETY: `edge` has 32 rows of 32 columns.
                            unsafe { block(left, panel, prefetch, edge.as_mut_ptr(), BLOCK * 4, add) };
                            for (edge, c) in edge.chunks(BLOCK).zip(c.chunks_mut(n)).take(height) {
                                c[..columns.len()].copy_from_slice(&edge[..columns.len()]);
                            }
                        }
                        Output::Rounded(c) => {
                            let c = &mut c[row * n + j..];
                            prefetch_rows(c, n, height);
                            // SAFETY: `edge` has 32 rows of 32 columns.
                            unsafe { block(left, panel, prefetch, edge.as_mut_ptr(), BLOCK * 4, false) };
                            for (edge, c) in edge.chunks(BLOCK).zip(c.chunks_mut(n)).take(height) {
                                avx512::narrow(amx.avx512, &edge[..columns.len()], &mut c[..columns.len()]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// `c [m, n] (+)= a [m, k] wᵀ`, with rows of `w` `stride` elements apart; no dimension is zero. Elements of `w` between its columns and `stride`
/// are zero.
pub(super) fn product_transposed(
    amx: Amx,
    Workspace { a: left_buffer, b: right_buffer, .. }: &mut Workspace,
    [m, n, k]: [usize; 3],
    a: &[bf16],
    (w, stride): (&[bf16], usize),
    c: &mut [f32],
    accumulate: bool,
) {
    assert_eq!(w.len(), n * stride, "weight of shape [{n}, {k}]");
    let mut sums = [Line([0; 16]); BLOCK * BLOCK / 16];
    let sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums);
    // Tile loads of unaligned rows take twice the time.
    let in_place = stride.is_multiple_of(STEP) && w.as_ptr().cast::<Line>().is_aligned();
    let _tiles = Tiles::configure(amx);
    for summed in summed_blocks(k) {
        let steps = summed.len().div_ceil(STEP);
        let add = accumulate || summed.start > 0;
        for tokens in resident_blocks(m, summed.len()) {
            let panels = scratch::<u32>(right_buffer, tokens.len().div_ceil(NR) * steps * STEP_WORDS);
            for (j, panel) in panels.chunks_mut(steps * STEP_WORDS).enumerate() {
                let rows = tokens.start + j * NR..tokens.end.min(tokens.start + (j + 1) * NR);
                let block = Block { matrix: a, stride: k, rows, columns: summed.clone() };
                pack_panel_transposed(amx.avx512, &block, panel);
            }
            let panels = &*panels;
            let calls = tokens.len().div_ceil(NR);
            for i in (0..n).step_by(BLOCK) {
                let height = BLOCK.min(n - i);
                let row: *const bf16 = w[i * stride + summed.start..].as_ptr();
                let left = if in_place && height.is_multiple_of(TILE_ROWS) {
                    LeftBlock {
                        first: row.cast(),
                        second: row.wrapping_add(TILE_ROWS * stride).cast(),
                        tiles: height / TILE_ROWS,
                        stride: stride * 2,
                        packed: false,
                    }
                } else {
                    let tiles = scratch::<bf16>(left_buffer, height.div_ceil(TILE_ROWS) * steps * TILE);
                    let block = Block { matrix: w, stride, rows: i..i + height, columns: summed.clone() };
                    pack_tiles(amx.avx512, &block, tiles);
                    LeftBlock::packed(tiles, steps)
                };
                for (call, panel) in panels.chunks(steps * STEP_WORDS).enumerate() {
                    let token = tokens.start + call * NR;
                    let width = NR.min(tokens.end - token);
                    let prefetch = match left.packed {
                        true => Prefetch { start: left.first, units: 0 },
                        false => Prefetch::share(row.wrapping_add(BLOCK * stride).cast(), left.stride, call, calls),
                    };
                    let c = &mut c[token * n + i..];
                    prefetch_rows(c, n, width);
                    // SAFETY: `sums` has 32 rows of 32 columns.
                    unsafe { block(left, panel, prefetch, sums.as_mut_ptr(), BLOCK * 4, false) };
                    store_transposed(amx, sums, c, n, [width, height], add);
                }
            }
        }
    }
}

/// `c [width, height] (+)= sumsᵀ`, with rows of `c` `n` elements apart.
fn store_transposed(_: Amx, sums: &[f32], c: &mut [f32], n: usize, shape: [usize; 2], add: bool) {
    #[target_feature(enable = "avx512f")]
    fn store(sums: &[f32], c: &mut [f32], n: usize, [width, height]: [usize; 2], add: bool) {
        for first in (0..width).step_by(16) {
            for row in (0..height).step_by(16) {
                let mut block = [_mm512_setzero_si512(); 16];
                for (i, vector) in block.iter_mut().enumerate() {
                    let from = &sums[(row + i) * BLOCK + first..][..16];
                    // SAFETY: 64 readable bytes.
                    *vector = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
                }
                transpose(&mut block);
                let mask = u16::MAX >> (16 - (height - row).min(16));
                for (column, vector) in block.into_iter().enumerate().take(width - first) {
                    let to = &mut c[(first + column) * n + row..][..(height - row).min(16)];
                    let mut values = _mm512_castsi512_ps(vector);
                    // SAFETY: the mask selects only elements of `to`.
                    unsafe {
                        if add {
                            values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, to.as_ptr()));
                        }
                        _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, values);
                    }
                }
            }
        }
    }
    // SAFETY: an `Amx` exists, so the CPU has the instructions.
    unsafe { store(sums, c, n, shape, add) }
}
