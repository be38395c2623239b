//! Row-major f64 matrices with the one product the reference needs, in plain loops.

use std::num::NonZero;
use std::thread;

/// Below this many multiply-adds a thread costs more than it saves.
const MIN_WORK_PER_THREAD: usize = 1 << 20;
/// Columns of a block of the product: two operands' rows of 2 KiB stay in the first-level cache.
const BLOCK_COLS: usize = 256;
/// Left rows of a block of the product: with [`BLOCK_COLS`], 128 KiB that stay in the second-level cache.
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

    /// Widens `data`, whose length the caller has checked.
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
        // Square blocks, so that both sides are walked within a few cache lines.
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

    /// `self * right^T`: entry (i, j) is the dot product of row i of `self` and row j of `right`.
    pub fn times_transpose(&self, right: &Matrix) -> Matrix {
        assert_eq!(self.cols, right.cols, "inner sizes of a product");
        let mut out = Matrix::zeros(self.rows, right.rows);
        let cols = out.cols;
        for_row_blocks(&mut out.data, cols, right.rows * self.cols, |first, block| {
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

/// Splits `data`, rows of `cols`, into contiguous blocks of rows, one per thread, and calls
/// `f(first row, block)` on each. `work_per_row` is in multiply-adds; little work stays on this thread.
pub fn for_row_blocks(data: &mut [f64], cols: usize, work_per_row: usize, f: impl Fn(usize, &mut [f64]) + Sync) {
    if data.is_empty() {
        return;
    }
    let rows = data.len() / cols;
    let useful = (rows * work_per_row / MIN_WORK_PER_THREAD).clamp(1, rows);
    if useful == 1 {
        return f(0, data);
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(useful);
    let rows_per_thread = rows.div_ceil(threads);
    thread::scope(|scope| {
        for (i, block) in data.chunks_mut(rows_per_thread * cols).enumerate() {
            let f = &f;
            scope.spawn(move || f(i * rows_per_thread, block));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rows: usize, cols: usize, seed: usize) -> Matrix {
        let data = (0..rows * cols).map(|i| (((i + seed) * 7919) % 1009) as f64 - 500.0).collect();
        Matrix { rows, cols, data }
    }

    #[test]
    fn product_is_the_plain_triple_loop() {
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
    fn transpose_and_sums() {
        let a = sample(37, 41, 3);
        let t = a.transposed();
        assert_eq!(t.data[5 * 37 + 9], a.data[9 * 41 + 5]);
        assert_eq!(t.transposed(), a);
        assert_eq!(a.column_sums()[4], (0..37).map(|r| a.data[r * 41 + 4]).sum::<f64>());
    }
}
