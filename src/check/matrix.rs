//! Row-major f64 matrices with the one product the reference needs, in plain loops.

use std::num::NonZero;
use std::ops::Range;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

/// With fewer multiply-adds a thread costs more time than it saves.
const MIN_WORK_PER_THREAD: usize = 1 << 20;
/// Columns of a block of the product, such that two operands' rows of 2 KiB stay in the L1 cache.
const BLOCK_COLS: usize = 256;
/// Left rows of a block of the product: with [`BLOCK_COLS`], 128 KiB that stay in the L2 cache.
const BLOCK_ROWS: usize = 64;
/// Partial sums per dot product, so that the compiler may use vector registers.
const LANES: usize = 2;

/// A row-major matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Matrix {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Matrix { rows, cols, data: vec![0.0; rows * cols] }
    }

    /// Widens `data` to f64. The caller checks the length.
    pub fn from_f32(rows: usize, cols: usize, data: &[f32]) -> Self {
        assert_eq!(data.len(), rows * cols, "length of a {rows} x {cols} matrix");
        Matrix { rows, cols, data: data.iter().map(|&v| f64::from(v)).collect() }
    }

    pub fn row(&self, row: usize) -> &[f64] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Matrix { rows: self.rows, cols: self.cols, data: self.data.iter().map(|&v| f(v)).collect() }
    }

    pub fn add(&mut self, other: &Matrix) {
        assert_eq!((self.rows, self.cols), (other.rows, other.cols), "shapes of a sum");
        axpy(1.0, &other.data, &mut self.data);
    }

    pub fn transposed(&self) -> Self {
        let mut out = Matrix::zeros(self.cols, self.rows);
        // Square blocks, so that both sides stay within a few cache lines.
        const SIDE: usize = 32;
        for r0 in (0..self.rows).step_by(SIDE) {
            for c0 in (0..self.cols).step_by(SIDE) {
                for r in r0..self.rows.min(r0 + SIDE) {
                    for c in c0..self.cols.min(c0 + SIDE) {
                        out.data[c * self.rows + r] = self.data[r * self.cols + c];
                    }
                }
            }
        }
        out
    }

    /// Sums over the rows, `[cols]`.
    pub fn column_sums(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.cols];
        for r in 0..self.rows {
            axpy(1.0, self.row(r), &mut sums);
        }
        sums
    }

    /// The 2-norm of every row, its entries first multiplied by `scale [cols]`.
    pub fn row_norms(&self, scale: Option<&[f64]>) -> Vec<f64> {
        let norm = |row: &[f64]| match scale {
            None => dot(row, row).sqrt(),
            Some(scale) => row.iter().zip(scale).map(|(v, s)| (v * s) * (v * s)).sum::<f64>().sqrt(),
        };
        (0..self.rows).map(|r| norm(self.row(r))).collect()
    }

    /// The 2-norm of every column, its entries first multiplied by `scale [rows]`.
    pub fn column_norms(&self, scale: Option<&[f64]>) -> Vec<f64> {
        let mut squares = vec![0.0; self.cols];
        for r in 0..self.rows {
            let scale = scale.map_or(1.0, |scale| scale[r]);
            for (square, &v) in squares.iter_mut().zip(self.row(r)) {
                *square += (v * scale) * (v * scale);
            }
        }
        squares.into_iter().map(f64::sqrt).collect()
    }

    /// `A^T A v` for `A`, this matrix with its rows multiplied by `scale [rows]`.
    pub fn gram_product(&self, scale: &[f64], v: &[f64]) -> Vec<f64> {
        let part = |rows: Range<usize>| {
            let mut sum = vec![0.0; self.cols];
            for r in rows {
                axpy(scale[r] * scale[r] * dot(self.row(r), v), self.row(r), &mut sum);
            }
            sum
        };
        let threads = useful_threads(self.rows, 2 * self.cols);
        let block = self.rows.div_ceil(threads).max(1);
        let mut total = vec![0.0; self.cols];
        thread::scope(|scope| {
            let part = &part;
            let blocks = (0..self.rows).step_by(block).skip(1);
            let rows_from = |first: usize| first..self.rows.min(first + block);
            let others: Vec<_> = blocks
                .map(|first| (first, thread::Builder::new().spawn_scoped(scope, move || part(rows_from(first)))))
                .collect();
            axpy(1.0, &part(rows_from(0)), &mut total);
            for (first, other) in others {
                // If a thread cannot be started, this one does its work.
                let sums = other.ok().and_then(|other| other.join().ok()).unwrap_or_else(|| part(rows_from(first)));
                axpy(1.0, &sums, &mut total);
            }
        });
        total
    }

    /// `self * right^T`: entry (i, j) is the dot product of row i of `self` and row j of `right`.
    pub fn times_transpose(&self, right: &Matrix) -> Matrix {
        assert_eq!(self.cols, right.cols, "inner sizes of a product");
        let mut out = Matrix::zeros(self.rows, right.rows);
        let cols = out.cols;
        for_row_blocks([&mut out.data], cols, right.rows * self.cols, |first, [block]| {
            self.product_rows(right, first, block);
        });
        out
    }

    /// Rows `first..` of `self * right^T` into `out`, which starts as zeros.
    fn product_rows(&self, right: &Matrix, first: usize, out: &mut [f64]) {
        let n = right.rows;
        let rows = out.len() / n;
        for k0 in (0..self.cols).step_by(BLOCK_COLS) {
            let k1 = self.cols.min(k0 + BLOCK_COLS);
            let l = |i: usize| &self.row(first + i)[k0..k1];
            let r = |j: usize| &right.row(j)[k0..k1];
            for i0 in (0..rows).step_by(BLOCK_ROWS) {
                let i1 = rows.min(i0 + BLOCK_ROWS);
                let mut j = 0;
                while j + 4 <= n {
                    let rights = [r(j), r(j + 1), r(j + 2), r(j + 3)];
                    let mut i = i0;
                    while i + 2 <= i1 {
                        let dots = dots([l(i), l(i + 1)], rights);
                        for (di, dots) in dots.iter().enumerate() {
                            axpy(1.0, dots, &mut out[(i + di) * n + j..][..4]);
                        }
                        i += 2;
                    }
                    if i < i1 {
                        axpy(1.0, &dots([l(i)], rights)[0], &mut out[i * n + j..][..4]);
                    }
                    j += 4;
                }
                for j in j..n {
                    for i in i0..i1 {
                        out[i * n + j] += dot(l(i), r(j));
                    }
                }
            }
        }
    }
}

/// `y += a x`.
pub fn axpy(a: f64, x: &[f64], y: &mut [f64]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// The dot product of two slices of one length.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    dots([a], [b])[0][0]
}

/// All dot products between `R` left and `C` right slices of one length.
#[inline(always)]
fn dots<const R: usize, const C: usize>(left: [&[f64]; R], right: [&[f64]; C]) -> [[f64; C]; R] {
    let len = left[0].len();
    let body = len / LANES;
    let left_body = left.map(|s| &s[..len].as_chunks::<LANES>().0[..body]);
    let right_body = right.map(|s| &s[..len].as_chunks::<LANES>().0[..body]);
    let mut sums = [[[0.0; LANES]; C]; R];
    for p in 0..body {
        for i in 0..R {
            for j in 0..C {
                for lane in 0..LANES {
                    sums[i][j][lane] += left_body[i][p][lane] * right_body[j][p][lane];
                }
            }
        }
    }
    let mut out = [[0.0; C]; R];
    for i in 0..R {
        for j in 0..C {
            out[i][j] = sums[i][j].iter().sum();
            for p in body * LANES..len {
                out[i][j] += left[i][p] * right[j][p];
            }
        }
    }
    out
}

/// Splits all of `data`, rows of `cols`, into the same contiguous blocks of rows, one per thread, and calls
/// `f(first row, blocks)` on each. `work_per_row` is in multiply-adds; little work stays on this thread. A matrix that is
/// empty where others are not is empty in every call.
pub fn for_row_blocks<const N: usize>(
    data: [&mut [f64]; N],
    cols: usize,
    work_per_row: usize,
    f: impl Fn(usize, [&mut [f64]; N]) + Sync,
) {
    let len = data.iter().map(|d| d.len()).max().unwrap_or(0);
    if len == 0 {
        return;
    }
    let rows = len / cols;
    let threads = useful_threads(rows, work_per_row);
    if threads == 1 {
        return f(0, data);
    }
    let rows_per_thread = rows.div_ceil(threads);
    let mut rest = data;
    let blocks: Vec<(usize, [&mut [f64]; N])> = (0..rows)
        .step_by(rows_per_thread)
        .map(|first| {
            let mut block = [(); N].map(|()| &mut [][..]);
            for (block, rest) in block.iter_mut().zip(&mut rest) {
                let at = rest.len().min(rows_per_thread * cols);
                (*block, *rest) = std::mem::take(rest).split_at_mut(at);
            }
            (first, block)
        })
        .collect();
    // An idle thread claims the next block. If no thread can be started, this one claims all blocks.
    let blocks = Mutex::new(blocks.into_iter());
    let work = || {
        let next = || blocks.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((first, block)) = next() {
            f(first, block);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

/// The number of threads that are worth their cost.
fn useful_threads(rows: usize, work_per_row: usize) -> usize {
    // Cached: querying the number of processors reads system files.
    static PROCESSORS: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));
    match (rows * work_per_row / MIN_WORK_PER_THREAD).clamp(1, rows.max(1)) {
        1 => 1,
        useful => useful.min(*PROCESSORS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rows: usize, cols: usize, seed: usize) -> Matrix {
        let data = (0..rows * cols).map(|i| (((i + seed) * 7919) % 1009) as f64 - 500.0).collect();
        Matrix { rows, cols, data }
    }

    #[test]
    fn product_equals_the_triple_loop() {
        // Odd sizes take every edge; the last one is split over threads and over both block sizes.
        for (m, n, k) in [(0, 3, 2), (3, 0, 2), (2, 3, 0), (1, 1, 1), (3, 5, 7), (2, 4, 2), (131, 67, 519)] {
            let (a, b) = (sample(m, k, 1), sample(n, k, 2));
            let got = a.times_transpose(&b);
            assert_eq!((got.rows, got.cols), (m, n));
            for i in 0..m {
                for j in 0..n {
                    let want: f64 = (0..k).map(|p| a.data[i * k + p] * b.data[j * k + p]).sum();
                    // Integers far below 2^53: exact in any order.
                    assert_eq!(got.data[i * n + j], want, "{m} {n} {k}: {i} {j}");
                }
            }
        }
    }

    #[test]
    fn norms_and_gram_product_are_those_of_the_scaled_matrix() {
        // The last one is split over threads.
        for (rows, cols) in [(3, 2), (1, 5), (1031, 1100)] {
            let m = sample(rows, cols, 4);
            let (by_row, by_col): (Vec<f64>, Vec<f64>) =
                ((0..rows).map(|r| (r % 3) as f64).collect(), (0..cols).map(|c| (c % 5) as f64 - 2.0).collect());
            let a = |r: usize, c: usize| by_row[r] * m.data[r * cols + c];
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let close = |got: f64, want: f64| assert!((got - want).abs() <= 1e-12 * want.abs(), "{got}, not {want}");
            close(m.row_norms(None)[rows - 1], norm(&mut m.row(rows - 1).iter().copied()));
            let scaled = m.row(0).iter().zip(&by_col).map(|(v, s)| v * s);
            close(m.row_norms(Some(&by_col))[0], norm(&mut scaled.clone()));
            close(m.column_norms(None)[1], norm(&mut (0..rows).map(|r| m.data[r * cols + 1])));
            close(m.column_norms(Some(&by_row))[1], norm(&mut (0..rows).map(|r| a(r, 1))));
            let got = m.gram_product(&by_row, &by_col);
            let product: Vec<f64> = (0..rows).map(|r| (0..cols).map(|c| a(r, c) * by_col[c]).sum()).collect();
            for (c, &got) in got.iter().enumerate() {
                // Integers far below 2^53.
                assert_eq!(got, (0..rows).map(|r| a(r, c) * product[r]).sum::<f64>(), "{rows} {cols}: {c}");
            }
        }
    }

    #[test]
    fn transpose_and_sums() {
        let a = sample(37, 41, 3);
        let t = a.transposed();
        assert_eq!(t.data[5 * 37 + 9], a.data[9 * 41 + 5]);
        assert_eq!(t.transposed(), a);
        assert_eq!(a.column_sums()[4], (0..37).map(|r| a.data[r * 41 + 4]).sum::<f64>());
    }
}
