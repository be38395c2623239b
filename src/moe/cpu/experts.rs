//! An MLP over a batch of rows, tile by tile: forward, input gradients, weight gradients. Routed and shared experts
//! alike: a row's weight is its routing weight, or the shared expert's gate.

use std::ops::Range;

use super::kernels::{self, Element, Lent, Workspace};
use crate::moe::spec::{MlpConfig, MlpGradients, MlpGradientsMut, MlpId, MoeError, Proj, WeightId, proj_index};

/// The weights of one MLP, prepared for the GEMMs. Biases stay f32.
pub struct Mlp<E: Element> {
    config: MlpConfig,
    hidden: usize,
    gate: Option<E::Weight>,
    up: E::Weight,
    down: E::Weight,
    /// Of gate, up, down; empty where there is none.
    bias: [Vec<f32>; 3],
    /// Whether a row's weight multiplies its input, rather than its output.
    weigh_input: bool,
}

impl<E: Element> Mlp<E> {
    /// Loads and prepares one MLP of a layer of width `hidden`; `load` gives a weight of the shape asked for.
    ///
    /// # Errors
    /// Those of `load`.
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

    /// One whose matrices are read where the caller has them: gate (where gated), up and down, each `[out, in]`; `bias` of the same, empty
    /// where there is none.
    ///
    /// # Errors
    /// A projection that is missing or too many, or of another length.
    pub fn lent(
        config: MlpConfig,
        hidden: usize,
        [gate, up, down]: [Option<Lent<E>>; 3],
        bias: [Vec<f32>; 3],
    ) -> Result<Self, MoeError> {
        let lend = |proj: Proj, lent: Option<Lent<E>>| {
            let wanted = config.projections().contains(&proj);
            let [out, inp] = config.shape(proj, hidden);
            let (got, expected) =
                (lent.as_ref().map_or(0, |w| w.as_ref().as_ref().len()), if wanted { out * inp } else { 0 });
            if got != expected {
                return Err(MoeError::Shape {
                    what: format!("the lent {proj:?}").into(),
                    got,
                    expected: expected.to_string(),
                });
            }
            Ok(lent.map(|w| E::lend(w, out, inp)))
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
        let gate = lend(Proj::Gate, gate)?;
        let (Some(up), Some(down)) = (lend(Proj::Up, up)?, lend(Proj::Down, down)?) else {
            return Err(MoeError::Shape { what: "the lent expert".into(), got: 0, expected: "up and down".into() });
        };
        Ok(Mlp { config, hidden, gate, up, down, bias, weigh_input: false })
    }

    /// The same, with the rows' weights on their inputs or on their outputs.
    pub fn weigh_input(self, weigh_input: bool) -> Self {
        Mlp { weigh_input, ..self }
    }

    /// What it is.
    pub fn config(&self) -> &MlpConfig {
        &self.config
    }

    /// The model's width.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// A projection's matrix.
    pub fn matrix(&self, proj: Proj) -> Option<&E::Weight> {
        match proj {
            Proj::Gate => self.gate.as_ref(),
            Proj::Up => Some(&self.up),
            Proj::Down => Some(&self.down),
        }
    }

    /// A projection's matrix, to be replaced.
    pub fn matrix_mut(&mut self, proj: Proj) -> Option<&mut E::Weight> {
        match proj {
            Proj::Gate => self.gate.as_mut(),
            Proj::Up => Some(&mut self.up),
            Proj::Down => Some(&mut self.down),
        }
    }

    /// A projection's bias.
    pub fn bias(&self, proj: Proj) -> Option<&[f32]> {
        Some(&self.bias[proj_index(proj)][..]).filter(|bias| !bias.is_empty())
    }

    /// A projection's bias, to be replaced.
    pub fn bias_mut(&mut self, proj: Proj) -> Option<&mut [f32]> {
        Some(&mut self.bias[proj_index(proj)][..]).filter(|bias| !bias.is_empty())
    }

    /// Runs the bare GEMMs of a forward pass over `rows` rows, and of a backward pass when `backward`, with nothing
    /// around them: the measure that the layer is compared with.
    pub fn bare_gemms(&self, batch: &mut Batch<E>, grads: &mut MlpGradients, scratch: &mut Scratch, backward: bool) {
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

/// Memory that every tile reuses.
#[derive(Default)]
pub struct Scratch {
    /// For the GEMMs.
    pub workspace: Workspace,
    /// Two f32 blocks `[tile rows, intermediate]`.
    pub inner: [Vec<f32>; 2],
}

impl Scratch {
    /// Makes room for tiles of `elements` inner values.
    pub fn reserve(&mut self, elements: usize) {
        for block in &mut self.inner {
            if block.len() < elements {
                block.resize(elements, 0.0);
            }
        }
    }
}

/// The rows of one MLP in a step: what forward makes and backward needs.
///
/// Shapes: `[rows, hidden]` for `x`, `g`, `out`; `[rows, intermediate]` for the inner ones; `[rows]` for weights. A batch
/// that is used again may have had more rows: then what is behind these is left over, and has no meaning.
#[derive(Clone, Debug, Default)]
pub struct Batch<E> {
    /// Number of rows.
    pub rows: usize,
    /// Inputs, times the rows' weights once their tile is computed, where weights are on inputs.
    pub x: Vec<E>,
    /// Weight of each row.
    pub weight: Vec<f32>,
    /// Whether the weights are in the inputs already.
    pub weighed_input: bool,
    /// Forward: the unweighted outputs. Backward: the input gradients.
    pub out: Vec<f32>,
    /// Gradients of the weighted outputs, before the weights.
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
    /// Makes room for `rows` rows in forward; rows already there keep their values.
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

    /// Makes room for the backward of the rows that are there.
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

    /// Exchanges the memory that only one pass needs with another batch's, of which nothing else counts.
    pub fn swap_pass_memory(&mut self, other: &mut Batch<E>) {
        std::mem::swap(&mut self.out, &mut other.out);
        std::mem::swap(&mut self.d_weight, &mut other.d_weight);
        for (mine, others) in [
            (&mut self.g, &mut other.g),
            (&mut self.d_gate, &mut other.d_gate),
            (&mut self.d_up, &mut other.d_up),
            (&mut self.hw, &mut other.hw),
        ] {
            std::mem::swap(mine, others);
        }
    }

    /// A batch of `rows` rows with room for both passes, every input of a GEMM filled with small numbers: what
    /// [`Mlp::bare_gemms`] runs on.
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

    /// `out = MLP(x)` for the rows of one tile.
    pub fn forward_tile(&mut self, mlp: &Mlp<E>, scratch: &mut Scratch, tile: Range<usize>) {
        let (m, h, i) = (tile.len(), mlp.hidden, mlp.config.intermediate);
        scratch.reserve(m * i);
        let Scratch { workspace, inner: [gate, up] } = scratch;
        let (gate, up) = (&mut gate[..m * i], &mut up[..m * i]);
        let (outer, inner) = (tile.start * h..tile.end * h, tile.start * i..tile.end * i);
        self.weighed_input = mlp.weigh_input;
        if mlp.weigh_input {
            let mut row = vec![0.0; h];
            for (x, weight) in self.x[outer.clone()].chunks_exact_mut(h).zip(&self.weight[tile.clone()]) {
                E::widen(x, &mut row);
                row.iter_mut().for_each(|x| *x *= weight);
                E::convert(&row, x);
            }
        }
        let x = &self.x[outer.clone()];
        E::gemm_nt(workspace, m, x, &mlp.up, up, false);
        add_bias(m, up, &mlp.bias[1]);
        if let Some(w) = &mlp.gate {
            E::gemm_nt(workspace, m, x, w, gate, false);
            add_bias(m, gate, &mlp.bias[0]);
            kernels::forward_gated(
                mlp.config.activation,
                mlp.config.glu,
                gate,
                up,
                &mut self.gate[inner.clone()],
                &mut self.up[inner.clone()],
                &mut self.h[inner.clone()],
            );
        } else {
            kernels::forward_plain(mlp.config.activation, up, &mut self.up[inner.clone()], &mut self.h[inner.clone()]);
        }
        let out = &mut self.out[outer];
        E::gemm_nt(workspace, m, &self.h[inner], &mlp.down, out, false);
        add_bias(m, out, &mlp.bias[2]);
    }

    /// `out` = the gradient of `x`, and `d_weight`, for the rows of one tile, from `g`.
    pub fn backward_tile(&mut self, mlp: &Mlp<E>, scratch: &mut Scratch, tile: Range<usize>) {
        let (m, h, i) = (tile.len(), mlp.hidden, mlp.config.intermediate);
        scratch.reserve(m * i);
        let q = &mut scratch.inner[0][..m * i];
        let (outer, inner) = (tile.start * h..tile.end * h, tile.start * i..tile.end * i);
        let g = &self.g[outer.clone()];
        E::gemm_nn(&mut scratch.workspace, m, g, &mlp.down, q, false);
        // With weights on the inputs the outputs' are 1.
        let ones = if mlp.weigh_input { vec![1.0; m] } else { Vec::new() };
        let input_weight = &self.weight[tile.clone()];
        let weight = if mlp.weigh_input { &ones[..] } else { input_weight };
        let d_weight = &mut self.d_weight[tile];
        let (up, act) = (&self.up[inner.clone()], &self.h[inner.clone()]);
        let (d_up, hw) = (&mut self.d_up[inner.clone()], &mut self.hw[inner.clone()]);
        let activation = mlp.config.activation;
        let outer_range = outer.clone();
        let out = &mut self.out[outer];
        if let Some(w) = &mlp.gate {
            let d_gate = &mut self.d_gate[inner.clone()];
            kernels::backward_gated(
                activation,
                mlp.config.glu,
                m,
                i,
                weight,
                q,
                &self.gate[inner],
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
            // The input was x times the weight: d_weight = <x, gradient of the input>, and x is what is kept over the weight.
            let mut row = vec![0.0; h];
            let rows = self.x[outer_range].chunks_exact(h).zip(out.chunks_exact_mut(h));
            for ((x, out), (d, &weight)) in rows.zip(d_weight.iter_mut().zip(input_weight)) {
                E::widen(x, &mut row);
                *d = if weight == 0.0 { 0.0 } else { kernels::dot(&row, out) / weight };
                out.iter_mut().for_each(|o| *o *= weight);
            }
        }
    }

    /// The gradients of the MLP's weights over all rows, in row order; after every tile's backward.
    pub fn weight_gradients(&self, mlp: &Mlp<E>, scratch: &mut Scratch, grads: MlpGradientsMut<'_>) {
        let (m, h, i) = (self.rows, mlp.hidden, mlp.config.intermediate);
        let ws = &mut scratch.workspace;
        let (x, g) = (&self.x[..m * h], &self.g[..m * h]);
        let (d_up, hw) = (&self.d_up[..m * i], &self.hw[..m * i]);
        if mlp.gate.is_some() {
            E::gemm_tn(ws, m, i, h, &self.d_gate[..m * i], x, grads.matrix[0], false);
        }
        E::gemm_tn(ws, m, i, h, d_up, x, grads.matrix[1], false);
        E::gemm_tn(ws, m, h, i, g, hw, grads.matrix[2], false);
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

/// Makes a buffer at least this long. Never shorter, for what is cut off would have to be cleared when it grows again.
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

/// The tiles of `rows`: as many as are nearest to `tile_rows` rows each, in equal parts.
pub fn tiles(rows: Range<usize>, tile_rows: usize) -> impl Iterator<Item = Range<usize>> {
    let n = rows.len();
    let count = if n == 0 { 0 } else { ((n + tile_rows / 2) / tile_rows).max(1) };
    (0..count).map(move |k| rows.start + n * k / count..rows.start + n * (k + 1) / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_even_and_cover() {
        for n in [0, 1, 255, 512, 530, 767, 769, 5000] {
            let all: Vec<_> = tiles(7..7 + n, 512).collect();
            assert_eq!(all.iter().map(|t| t.len()).sum::<usize>(), n);
            assert!(all.windows(2).all(|w| w[0].end == w[1].start));
            assert!(all.iter().all(|t| t.len() <= 768));
        }
        assert_eq!(tiles(0..530, 512).count(), 1);
    }
}
