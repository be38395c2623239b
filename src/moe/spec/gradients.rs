//! The gradients of the weights that a PE holds.

use half::bf16;

use super::config::{LayerConfig, MlpConfig, Proj, WeightId};
use super::placement::Placement;

/// The gradients of the weights that a PE holds, in the weights' shapes. Each backward overwrites them. Gradients of replicated weights are
/// sums over all PEs.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    /// Gradient of the router, `[n_experts + identity_experts, hidden]`; empty if the caller routes.
    pub router: Vec<f32>,
    /// Gradient of the logits' bias, `[n_experts + identity_experts]`; empty without this bias.
    pub logit_bias: Vec<f32>,
    /// Gradients of the local experts, in the order of [`Placement::experts`].
    pub experts: Vec<MlpGradients>,
    /// Gradients of the shared expert.
    pub shared: MlpGradients,
    /// Gradient of the shared expert's gate, `[1, hidden]`; empty without this gate.
    pub shared_gate: Vec<f32>,
}

impl Gradients {
    /// Zeros in the shapes of the weights that `pe` holds.
    pub fn zeros(config: &LayerConfig, placement: &Placement, pe: usize) -> Self {
        let expert = MlpGradients::zeros(&config.expert, config.hidden);
        Gradients {
            router: vec![0.0; config.router_rows() * config.hidden],
            logit_bias: vec![0.0; if config.router.logit_bias { config.choices() } else { 0 }],
            experts: vec![expert; placement.experts(pe).len()],
            shared: config.shared.map_or_else(Default::default, |s| MlpGradients::zeros(&s.mlp, config.hidden)),
            shared_gate: vec![0.0; if config.shared.is_some_and(|s| s.sigmoid_gate) { config.hidden } else { 0 }],
        }
    }

    /// The gradient of one weight; `None` if `pe` does not hold the weight or it has no gradient.
    pub fn get(&self, id: WeightId, placement: &Placement, pe: usize) -> Option<&[f32]> {
        let local = |e| placement.local_on(e, pe).map(|local| &self.experts[local]);
        match id {
            WeightId::Router => Some(&self.router),
            WeightId::LogitBias => Some(&self.logit_bias),
            WeightId::RouterBias => None,
            WeightId::Expert(e, p) => Some(&local(e)?.matrix[proj_index(p)]),
            WeightId::ExpertBias(e, p) => Some(&local(e)?.bias[proj_index(p)]),
            WeightId::Shared(p) => Some(&self.shared.matrix[proj_index(p)]),
            WeightId::SharedBias(p) => Some(&self.shared.bias[proj_index(p)]),
            WeightId::SharedGate => Some(&self.shared_gate),
        }
    }

    /// The gradients of the weights that every PE holds.
    pub(in crate::moe) fn replicated(&mut self) -> impl Iterator<Item = &mut Vec<f32>> {
        let shared = self.shared.matrix.iter_mut().chain(&mut self.shared.bias);
        [&mut self.router, &mut self.logit_bias].into_iter().chain(shared).chain(std::iter::once(&mut self.shared_gate))
    }
}

impl Gradients {
    /// Multiplies all gradients by `factor`.
    pub fn scale(&mut self, factor: f32) {
        let experts = self.experts.iter_mut().flat_map(MlpGradients::all);
        experts.for_each(|values| values.iter_mut().for_each(|x| *x *= factor));
        self.replicated().for_each(|values| values.iter_mut().for_each(|x| *x *= factor));
    }

    /// Adds the gradients of another backward, which must have the same shapes.
    pub(in crate::moe) fn add(&mut self, other: &mut Gradients) {
        let experts = self.experts.iter_mut().zip(&mut other.experts);
        let experts = experts.flat_map(|(to, from)| to.all().zip(from.all()));
        for (to, from) in experts {
            to.iter_mut().zip(&*from).for_each(|(to, from)| *to += from);
        }
        for (to, from) in self.replicated().zip(other.replicated()) {
            to.iter_mut().zip(&*from).for_each(|(to, from)| *to += from);
        }
    }
}

/// The gradients of one MLP's weights, in the weights' shapes; empty for a weight that the MLP does not have.
#[derive(Clone, Debug, Default)]
pub struct MlpGradients {
    /// Gradients of the gate, up and down matrices, `[out, in]`.
    pub matrix: [Vec<f32>; 3],
    /// Gradients of the biases of gate, up and down, `[out]`.
    pub bias: [Vec<f32>; 3],
}

impl MlpGradients {
    fn all(&mut self) -> impl Iterator<Item = &mut Vec<f32>> {
        self.matrix.iter_mut().chain(&mut self.bias)
    }

    /// Mutable slices of all gradients.
    pub fn slices_mut(&mut self) -> MlpGradientsMut<'_> {
        MlpGradientsMut {
            matrix: self.matrix.each_mut().map(|m| MatrixGradientMut::F32(m)),
            bias: self.bias.each_mut().map(|b| &mut b[..]),
        }
    }

    /// Zeros in the shapes of an MLP's weights.
    pub fn zeros(config: &MlpConfig, hidden: usize) -> Self {
        let mut grads = MlpGradients::default();
        for &proj in config.projections() {
            let [out, inp] = config.shape(proj, hidden);
            grads.matrix[proj_index(proj)] = vec![0.0; out * inp];
            if config.bias {
                grads.bias[proj_index(proj)] = vec![0.0; out];
            }
        }
        grads
    }
}

/// A buffer for the gradient of a matrix.
#[derive(Debug)]
pub enum MatrixGradientMut<'a> {
    /// In f32.
    F32(&'a mut [f32]),
    /// Rounded to bf16.
    Bf16(&'a mut [bf16]),
}

/// Buffers for the gradients of one MLP's weights, as in [`MlpGradients`].
#[derive(Debug)]
pub struct MlpGradientsMut<'a> {
    /// Gate, up and down matrices, `[out, in]`.
    pub matrix: [MatrixGradientMut<'a>; 3],
    /// Biases of gate, up and down, `[out]`.
    pub bias: [&'a mut [f32]; 3],
}

/// Receives the gradients of borrowed experts. Called once per expert, with the expert's local index and a function that writes the
/// gradients to buffers.
pub type GradientSink<'a> = dyn FnMut(usize, &mut dyn FnMut(MlpGradientsMut<'_>)) + 'a;

/// Index of a projection in arrays with an element for each of gate, up and down.
pub fn proj_index(proj: Proj) -> usize {
    match proj {
        Proj::Gate => 0,
        Proj::Up => 1,
        Proj::Down => 2,
    }
}

/// Identifies one MLP of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpId {
    /// A routed expert, by its global number.
    Routed(usize),
    /// The shared expert.
    Shared,
}

impl MlpId {
    /// The identifiers of a projection's matrix and bias.
    pub fn ids(self, proj: Proj) -> (WeightId, WeightId) {
        match self {
            MlpId::Routed(e) => (WeightId::Expert(e, proj), WeightId::ExpertBias(e, proj)),
            MlpId::Shared => (WeightId::Shared(proj), WeightId::SharedBias(proj)),
        }
    }
}
