//! Tiled MLP over a batch of rows: forward, input gradients and weight gradients. A row's weight is the routing weight for a routed expert,
//! and the gate's value for the shared expert.

use std::mem::take;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::kernels::{self, Borrowed, Element, Workspace};
use crate::moe::spec::{
    MatrixGradientMut, MlpConfig, MlpGradients, MlpGradientsMut, MlpId, MoeError, Proj, WeightId, proj_index,
};

/// The weights of one MLP, packed for the GEMMs. Biases stay f32.
pub struct Mlp<E: Element> {
    config: MlpConfig,
    hidden: usize,
    gate: Option<E::Weight>,
    up: E::Weight,
    down: E::Weight,
    /// Biases of gate, up and down; empty if the projection has none.
    bias: [Vec<f32>; 3],
    /// Whether row weights multiply the input instead of the output.
    weigh_input: bool,
}

impl<E: Element> Mlp<E> {
    /// Loads and packs one MLP of a layer of width `hidden`. `load(id)` returns the row-major values of a weight.
    ///
    /// # Errors
    ///
    /// Returns the errors of `load`.
    pub fn load<Error>(
        config: MlpConfig,
        hidden: usize,
        mlp: MlpId,
        mut load: impl FnMut(WeightId) -> Result<Vec<f32>, Error>,
    ) -> Result<Self, Error> {
        let mut matrix = |proj: Proj| {
            let [out, inp] = config.shape(proj, hidden);
            Ok(E::prepare(&load(mlp.ids(proj).0)?, out, inp))
        };
        let gate = if config.gated { Some(matrix(Proj::Gate)?) } else { None };
        let (up, down) = (matrix(Proj::Up)?, matrix(Proj::Down)?);
        let mut bias = [const { Vec::new() }; 3];
        if config.bias {
            for &proj in config.projections() {
                bias[proj_index(proj)] = load(mlp.ids(proj).1)?;
            }
        }
        Ok(Mlp { config, hidden, gate, up, down, bias, weigh_input: false })
    }

    /// Makes an MLP that reads the caller's matrices in place: gate (if gated), up and down, each `[out, in]`. `bias` has the biases in the
    /// same order; a projection without a bias has an empty one.
    ///
    /// # Errors
    ///
    /// Returns `MoeError::Shape` if a projection is missing, superfluous or of another length.
    pub fn borrowed(
        config: MlpConfig,
        hidden: usize,
        [gate, up, down]: [Option<Borrowed<E>>; 3],
        bias: [Vec<f32>; 3],
    ) -> Result<Self, MoeError> {
        let borrow = |proj: Proj, matrix: Option<Borrowed<E>>| {
            let wanted = config.projections().contains(&proj);
            let [out, inp] = config.shape(proj, hidden);
            let (got, expected) =
                (matrix.as_ref().map_or(0, |w| w.as_ref().as_ref().len()), if wanted { out * inp } else { 0 });
            if got != expected {
                return Err(MoeError::Shape {
                    what: format!("the borrowed {proj:?}").into(),
                    got,
                    expected: expected.to_string(),
                });
            }
            Ok(matrix.map(|w| E::borrow_weight(w, out, inp)))
        };
        let biased = |proj: Proj| config.bias && config.projections().contains(&proj);
        for (proj, bias) in [Proj::Gate, Proj::Up, Proj::Down].into_iter().zip(&bias) {
            let (got, expected) = (bias.len(), if biased(proj) { config.shape(proj, hidden)[0] } else { 0 });
            if got != expected {
                return Err(MoeError::Shape {
                    what: format!("the bias of {proj:?}").into(),
                    got,
                    expected: expected.to_string(),
                });
            }
        }
        let gate = borrow(Proj::Gate, gate)?;
        let (Some(up), Some(down)) = (borrow(Proj::Up, up)?, borrow(Proj::Down, down)?) else {
            return Err(MoeError::Shape { what: "the borrowed expert".into(), got: 0, expected: "up and down".into() });
        };
        Ok(Mlp { config, hidden, gate, up, down, bias, weigh_input: false })
    }

    /// Sets whether row weights multiply the inputs instead of the outputs.
    pub fn weigh_input(self, weigh_input: bool) -> Self {
        Mlp { weigh_input, ..self }
    }

    /// The MLP's configuration.
    pub fn config(&self) -> &MlpConfig {
        &self.config
    }

    /// The model's hidden size.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// A projection's matrix; `None` for the gate of an MLP without one.
    pub fn matrix(&self, proj: Proj) -> Option<&E::Weight> {
        match proj {
            Proj::Gate => self.gate.as_ref(),
            Proj::Up => Some(&self.up),
            Proj::Down => Some(&self.down),
        }
    }

    /// Like [`matrix`](Self::matrix), mutable.
    pub fn matrix_mut(&mut self, proj: Proj) -> Option<&mut E::Weight> {
        match proj {
            Proj::Gate => self.gate.as_mut(),
            Proj::Up => Some(&mut self.up),
            Proj::Down => Some(&mut self.down),
        }
    }

    /// A projection's bias, `[out]`, if it has one.
    pub fn bias(&self, proj: Proj) -> Option<&[f32]> {
        Some(&self.bias[proj_index(proj)][..]).filter(|bias| !bias.is_empty())
    }

    /// Like [`bias`](Self::bias), mutable.
    pub fn bias_mut(&mut self, proj: Proj) -> Option<&mut [f32]> {
        Some(&mut self.bias[proj_index(proj)][..]).filter(|bias| !bias.is_empty())
    }

    /// Runs only the GEMMs of a forward pass over `batch`, then, if `backward`, those of a backward pass. Benchmarks compare the layer's
    /// speed with this.
    pub fn run_gemms_only(
        &self,
        batch: &mut Batch<E>,
        grads: &mut MlpGradients,
        scratch: &mut Scratch,
        backward: bool,
    ) {
        let (m, h, i) = (batch.rows, self.hidden, self.config.intermediate);
        scratch.reserve(m * i);
        let Scratch { workspace: ws, inner: [a, b] } = scratch;
        let inner = [&mut a[..m * i], &mut b[..m * i]];
        if let Some(gate) = &self.gate {
            E::gemm_nt(ws, m, &batch.x, gate, inner[0], false);
        }
        E::gemm_nt(ws, m, &batch.x, &self.up, inner[1], false);
        E::gemm_nt(ws, m, &batch.h, &self.down, &mut batch.out, false);
        if !backward {
            return;
        }
        E::gemm_nn(ws, m, &batch.g, &self.down, inner[0], false);
        if let Some(gate) = &self.gate {
            E::gemm_nn(ws, m, &batch.d_gate, gate, &mut batch.out, false);
        }
        E::gemm_nn(ws, m, &batch.d_up, &self.up, &mut batch.out, self.gate.is_some());
        if self.gate.is_some() {
            E::gemm_tn(ws, m, i, h, &batch.d_gate, &batch.x, &mut grads.matrix[0], false);
        }
        E::gemm_tn(ws, m, i, h, &batch.d_up, &batch.x, &mut grads.matrix[1], false);
        E::gemm_tn(ws, m, h, i, &batch.g, &batch.hw, &mut grads.matrix[2], false);
    }
}

/// Scratch memory of one thread, reused by every tile.
#[derive(Default)]
pub struct Scratch {
    /// Packing buffers of the GEMMs.
    pub workspace: Workspace,
    /// Two f32 blocks `[tile rows, intermediate]`.
    pub inner: [Vec<f32>; 2],
}

impl Scratch {
    /// Grows both blocks to at least `elements`.
    pub fn reserve(&mut self, elements: usize) {
        for block in &mut self.inner {
            if block.len() < elements {
                block.resize(elements, 0.0);
            }
        }
    }
}

/// The rows of one MLP in a step, with the results of forward that backward needs.
///
/// Shapes: `[rows, hidden]` for `x`, `g`, `out`; `[rows, intermediate]` for `gate` to `hw`; `[rows]` for weights. Buffers never shrink,
/// so they may be longer; elements behind `rows` are stale.
#[derive(Clone, Debug, Default)]
pub struct Batch<E> {
    /// Number of rows.
    pub rows: usize,
    /// Inputs. With `weigh_input`, computing a tile multiplies its inputs by the row weights in place.
    pub x: Vec<E>,
    /// Weight of each row.
    pub weight: Vec<f32>,
    /// Whether `x` includes the weights.
    pub weighed_input: bool,
    /// Forward: the unweighted outputs. Backward: the input gradients.
    pub out: Vec<f32>,
    /// Gradients of the weighted outputs, not multiplied by the weights.
    pub g: Vec<E>,
    /// Gradient of each row's weight.
    pub d_weight: Vec<f32>,
    gate: Vec<E>,
    up: Vec<E>,
    h: Vec<E>,
    d_gate: Vec<E>,
    d_up: Vec<E>,
    hw: Vec<E>,
}

impl<E: Element> Batch<E> {
    /// Grows the buffers of forward to `rows` rows; existing rows keep their values.
    pub fn resize_forward(&mut self, config: &MlpConfig, hidden: usize, rows: usize) {
        let inner = rows * config.intermediate;
        self.rows = rows;
        grow(&mut self.x, rows * hidden);
        grow(&mut self.weight, rows);
        grow(&mut self.out, rows * hidden);
        if config.gated {
            grow(&mut self.gate, inner);
        }
        grow(&mut self.up, inner);
        grow(&mut self.h, inner);
    }

    /// Grows the buffers of backward to the batch's rows.
    pub fn resize_backward(&mut self, config: &MlpConfig, hidden: usize) {
        let inner = self.rows * config.intermediate;
        grow(&mut self.g, self.rows * hidden);
        grow(&mut self.d_weight, self.rows);
        if config.gated {
            grow(&mut self.d_gate, inner);
        }
        grow(&mut self.d_up, inner);
        grow(&mut self.hw, inner);
    }

    /// Swaps the buffers that only one pass needs with those of `other`.
    pub fn swap_pass_memory(&mut self, other: &mut Batch<E>) {
        std::mem::swap(&mut self.out, &mut other.out);
        std::mem::swap(&mut self.d_weight, &mut other.d_weight);
        for (own, others) in [
            (&mut self.g, &mut other.g),
            (&mut self.d_gate, &mut other.d_gate),
            (&mut self.d_up, &mut other.d_up),
            (&mut self.hw, &mut other.hw),
        ] {
            std::mem::swap(own, others);
        }
    }

    /// A batch of `rows` rows for [`Mlp::run_gemms_only`], with every GEMM input filled with values in [-1, 1].
    pub fn filled(config: &MlpConfig, hidden: usize, rows: usize) -> Self {
        let mut batch = Batch::default();
        batch.resize_forward(config, hidden, rows);
        batch.resize_backward(config, hidden);
        let Batch { x, g, h, d_gate, d_up, hw, .. } = &mut batch;
        for values in [x, g, h, d_gate, d_up, hw] {
            for (i, value) in values.iter_mut().enumerate() {
                *value = E::from_f32((i % 251) as f32 / 125.0 - 1.0);
            }
        }
        batch
    }

    /// Splits the batch's buffers into the row ranges `tiles`, which must ascend, for a forward (`is_forward`) or a backward pass through
    /// `mlp`.
    pub fn tiles(&mut self, mlp: &Mlp<E>, tiles: &[Range<usize>], is_forward: bool) -> Vec<BatchTile<'_, E>> {
        let (h, i) = (mlp.hidden, mlp.config.intermediate);
        if is_forward {
            self.weighed_input = mlp.weigh_input;
        }
        let (mut x, mut out) = (split_tiles(&mut self.x, h, tiles), split_tiles(&mut self.out, h, tiles));
        let (mut gate, mut up, mut act) = (
            split_tiles(&mut self.gate, i, tiles),
            split_tiles(&mut self.up, i, tiles),
            split_tiles(&mut self.h, i, tiles),
        );
        let (mut d_gate, mut d_up, mut hw) = (
            split_tiles(&mut self.d_gate, i, tiles),
            split_tiles(&mut self.d_up, i, tiles),
            split_tiles(&mut self.hw, i, tiles),
        );
        let mut d_weight = split_tiles(&mut self.d_weight, 1, tiles);
        let tile = |(k, tile): (usize, &Range<usize>)| BatchTile {
            rows: tile.len(),
            weight: &self.weight[tile.clone()],
            g: if is_forward { &[] } else { &self.g[tile.start * h..tile.end * h] },
            x: take(&mut x[k]),
            out: take(&mut out[k]),
            gate: take(&mut gate[k]),
            up: take(&mut up[k]),
            h: take(&mut act[k]),
            d_gate: take(&mut d_gate[k]),
            d_up: take(&mut d_up[k]),
            hw: take(&mut hw[k]),
            d_weight: take(&mut d_weight[k]),
        };
        tiles.iter().enumerate().map(tile).collect()
    }

    /// Computes the weight gradients over all rows, in row order. Call it after the backward of every tile.
    pub fn weight_gradients(&self, mlp: &Mlp<E>, scratch: &mut Scratch, grads: MlpGradientsMut<'_>) {
        let (m, h, i) = (self.rows, mlp.hidden, mlp.config.intermediate);
        let ws = &mut scratch.workspace;
        let (x, g) = (&self.x[..m * h], &self.g[..m * h]);
        let (d_up, hw) = (&self.d_up[..m * i], &self.hw[..m * i]);
        let mut product = |[n, k]: [usize; 2], a: &[E], b: &[E], to| match to {
            MatrixGradientMut::F32(to) => E::gemm_tn(ws, m, n, k, a, b, to, false),
            MatrixGradientMut::Bf16(to) => E::gemm_tn_bf16(ws, m, n, k, a, b, to),
        };
        let [gate, up, down] = grads.matrix;
        if mlp.gate.is_some() {
            product([i, h], &self.d_gate[..m * i], x, gate);
        }
        product([i, h], d_up, x, up);
        product([h, i], g, hw, down);
        if mlp.config.bias {
            let [gate, up, down] = grads.bias;
            for bias in [&mut *gate, &mut *up, &mut *down] {
                bias.fill(0.0);
            }
            if mlp.gate.is_some() {
                kernels::column_sum(m, i, &self.d_gate[..m * i], None, gate);
            }
            kernels::column_sum(m, i, d_up, None, up);
            let weights = (!mlp.weigh_input).then_some(&self.weight[..m]);
            kernels::column_sum(m, h, g, weights, down);
        }
    }
}

/// One tile's rows of the [`Batch`] buffers with the same names. Empty for buffers that the pass does not use.
pub struct BatchTile<'b, E> {
    rows: usize,
    weight: &'b [f32],
    g: &'b [E],
    x: &'b mut [E],
    out: &'b mut [f32],
    gate: &'b mut [E],
    up: &'b mut [E],
    h: &'b mut [E],
    d_gate: &'b mut [E],
    d_up: &'b mut [E],
    hw: &'b mut [E],
    d_weight: &'b mut [f32],
}

impl<E: Element> BatchTile<'_, E> {
    /// Computes `out = MLP(x)`.
    pub fn forward(self, mlp: &Mlp<E>, scratch: &mut Scratch) {
        let (m, h, i) = (self.rows, mlp.hidden, mlp.config.intermediate);
        scratch.reserve(m * i);
        let Scratch { workspace, inner: [gate, up] } = scratch;
        let (gate, up) = (&mut gate[..m * i], &mut up[..m * i]);
        if mlp.weigh_input {
            let mut row = vec![0.0; h];
            for (x, weight) in self.x.chunks_exact_mut(h).zip(self.weight) {
                E::widen(x, &mut row);
                row.iter_mut().for_each(|x| *x *= weight);
                E::convert(&row, x);
            }
        }
        let x = &*self.x;
        E::gemm_nt(workspace, m, x, &mlp.up, up, false);
        add_bias(m, up, &mlp.bias[1]);
        if let Some(w) = &mlp.gate {
            E::gemm_nt(workspace, m, x, w, gate, false);
            add_bias(m, gate, &mlp.bias[0]);
            kernels::forward_gated(mlp.config.activation, mlp.config.glu, gate, up, self.gate, self.up, self.h);
        } else {
            kernels::forward_plain(mlp.config.activation, up, self.up, self.h);
        }
        E::gemm_nt(workspace, m, self.h, &mlp.down, self.out, false);
        add_bias(m, self.out, &mlp.bias[2]);
    }

    /// Computes the gradient of `x` into `out`, and `d_weight`, from `g`.
    pub fn backward(self, mlp: &Mlp<E>, scratch: &mut Scratch) {
        let (m, h, i) = (self.rows, mlp.hidden, mlp.config.intermediate);
        scratch.reserve(m * i);
        let q = &mut scratch.inner[0][..m * i];
        let BatchTile { weight: input_weight, x, out, g, d_weight, gate, up, h: act, d_gate, d_up, hw, .. } = self;
        E::gemm_nn(&mut scratch.workspace, m, g, &mlp.down, q, false);
        // If weights multiply the inputs, outputs have weight 1.
        let ones = if mlp.weigh_input { vec![1.0; m] } else { Vec::new() };
        let weight = if mlp.weigh_input { &ones[..] } else { input_weight };
        let activation = mlp.config.activation;
        if let Some(w) = &mlp.gate {
            kernels::backward_gated(
                activation,
                mlp.config.glu,
                m,
                i,
                weight,
                q,
                gate,
                up,
                act,
                d_gate,
                d_up,
                hw,
                d_weight,
            );
            E::gemm_nn(&mut scratch.workspace, m, d_gate, w, out, false);
        } else {
            kernels::backward_plain(activation, m, i, weight, q, up, act, d_up, hw, d_weight);
        }
        E::gemm_nn(&mut scratch.workspace, m, d_up, &mlp.up, out, mlp.gate.is_some());
        if !mlp.bias[2].is_empty() {
            let mut row = vec![0.0; h];
            for (g, d) in g.chunks_exact(h).zip(&mut *d_weight) {
                E::widen(g, &mut row);
                *d += kernels::dot(&row, &mlp.bias[2]);
            }
        }
        if mlp.weigh_input {
            // The input was x * weight, and the stored x includes the weight: d_weight = <stored x, gradient of the
            // input> / weight.
            let mut row = vec![0.0; h];
            let rows = x.chunks_exact(h).zip(out.chunks_exact_mut(h));
            for ((x, out), (d, &weight)) in rows.zip(d_weight.iter_mut().zip(input_weight)) {
                E::widen(x, &mut row);
                *d = if weight == 0.0 { 0.0 } else { kernels::dot(&row, out) / weight };
                out.iter_mut().for_each(|o| *o *= weight);
            }
        }
    }
}

/// Splits `values`, which are rows of `width` elements, into the row ranges `tiles`. A tile past the end gets an empty slice.
fn split_tiles<'v, V>(values: &'v mut [V], width: usize, tiles: &[Range<usize>]) -> Vec<&'v mut [V]> {
    let (mut rest, mut at) = (values, 0);
    let one = |tile: &Range<usize>| {
        let (before, rows) = ((tile.start - at) * width, tile.len() * width);
        let (_, tail) = take(&mut rest).split_at_mut_checked(before)?;
        let (part, tail) = tail.split_at_mut_checked(rows)?;
        (rest, at) = (tail, tile.end);
        Some(part)
    };
    tiles.iter().map(one).map(Option::unwrap_or_default).collect()
}

/// Runs `each` on all items, on this thread and on one more thread for each further element of `scratch`.
pub fn par_for_each<W: Send>(scratch: &mut [Scratch], work: Vec<W>, each: impl Fn(&mut Scratch, W) + Sync) {
    let pieces = work.len();
    let queue = Mutex::new(work.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run_items = &|scratch: &mut Scratch| {
        while let Some(piece) = next() {
            each(scratch, piece);
        }
    };
    let Some((own, others)) = scratch.split_first_mut() else { return };
    thread::scope(|scope| {
        for scratch in others.iter_mut().take(pieces.saturating_sub(1)) {
            // If a thread cannot be started, the other threads run its items.
            let _ = thread::Builder::new().spawn_scoped(scope, move || run_items(scratch));
        }
        run_items(own);
    });
}

/// Grows a buffer to at least `len`. Never shrinks it, because growing again would clear the elements.
fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

fn add_bias(m: usize, c: &mut [f32], bias: &[f32]) {
    if !bias.is_empty() {
        kernels::add_bias(m, bias.len(), c, bias);
    }
}

/// Splits `rows` into equal tiles; the number of tiles is such that their size is closest to `tile_rows`.
pub fn tiles(rows: Range<usize>, tile_rows: usize) -> impl Iterator<Item = Range<usize>> {
    let n = rows.len();
    let count = if n == 0 { 0 } else { ((n + tile_rows / 2) / tile_rows).max(1) };
    (0..count).map(move |k| rows.start + n * k / count..rows.start + n * (k + 1) / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_even_and_cover_all_rows() {
        for n in [0, 1, 255, 512, 530, 767, 769, 5000] {
            let all: Vec<_> = tiles(7..7 + n, 512).collect();
            assert_eq!(all.iter().map(|t| t.len()).sum::<usize>(), n);
            assert!(all.windows(2).all(|w| w[0].end == w[1].start));
            assert!(all.iter().all(|t| t.len() <= 768));
        }
        assert_eq!(tiles(0..530, 512).count(), 1);
    }
}
