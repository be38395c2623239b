//! The weights that a PE holds, by [`WeightId`].

use super::experts::Mlp;
use super::kernels::{Element, F32Weight, WeightShape, Workspace};
use crate::moe::spec::{LayerSpec, MlpId, MoeError, Placement, WeightId, WeightSource};

/// Router, local experts and shared expert, packed for the GEMMs.
pub struct Weights<E: Element> {
    /// `[n_experts + identity_experts, hidden]`; `None` if the caller routes.
    pub router: Option<F32Weight>,
    pub logit_bias: Option<Vec<f32>>,
    pub router_bias: Option<Vec<f32>>,
    /// The local experts, in the order of [`Placement::experts`].
    pub experts: Vec<Mlp<E>>,
    pub shared: Option<Mlp<E>>,
    pub shared_gate: Option<Vec<f32>>,
}

/// A reference to a weight, which is packed for the GEMMs or plain values.
enum Weight<'w, E: Element> {
    Matrix(&'w E::Weight),
    Router(&'w F32Weight),
    Values(&'w [f32]),
}

enum WeightMut<'w, E: Element> {
    Matrix(&'w mut E::Weight),
    Router(&'w mut F32Weight),
    Values(&'w mut [f32]),
}

impl<E: Element> Weights<E> {
    /// No weights, for a layer to which the experts are passed in each pass.
    pub fn none() -> Self {
        Weights {
            router: None,
            logit_bias: None,
            router_bias: None,
            experts: Vec::new(),
            shared: None,
            shared_gate: None,
        }
    }

    /// Loads the weights that `pe` holds.
    ///
    /// # Errors
    ///
    /// Returns an error if `source` fails or returns a wrong number of values.
    pub fn load(source: &dyn WeightSource, spec: &LayerSpec, pe: usize) -> Result<Self, MoeError> {
        let LayerSpec { config, placement, .. } = spec;
        let load = |id: WeightId| -> Result<Vec<f32>, MoeError> {
            let values = source.load(id).map_err(MoeError::Weights)?;
            let expected: usize = config.shape(id).iter().product();
            if values.len() != expected {
                let (what, expected) = (source.name(id).into(), expected.to_string());
                return Err(MoeError::Shape { what, got: values.len(), expected });
            }
            Ok(values)
        };
        let optional = |id, wanted: bool| wanted.then(|| load(id)).transpose();
        let (hidden, gated) = (config.hidden, config.shared.is_some_and(|s| s.sigmoid_gate));
        let router = optional(WeightId::Router, !config.router.external)?;
        let routed = |&e: &usize| {
            Mlp::load(config.expert, hidden, MlpId::Routed(e), load)
                .map(|mlp| mlp.weigh_input(config.router.weigh_input))
        };
        Ok(Weights {
            router: router.map(|w| f32::prepare(&w, config.choices(), hidden)),
            logit_bias: optional(WeightId::LogitBias, config.router.logit_bias)?,
            router_bias: optional(WeightId::RouterBias, config.router.correction_bias)?,
            shared_gate: optional(WeightId::SharedGate, gated)?,
            experts: placement.experts(pe).iter().map(routed).collect::<Result<_, _>>()?,
            shared: config.shared.map(|s| Mlp::load(s.mlp, hidden, MlpId::Shared, load)).transpose()?,
        })
    }

    /// Copies a weight to `into` as f32.
    pub fn get(&self, id: WeightId, placement: &Placement, pe: usize, into: &mut [f32]) -> Result<(), MoeError> {
        let weight = self.find(id, placement, pe).ok_or_else(|| not_held(id, pe))?;
        match weight {
            Weight::Matrix(w) => check_len(id, into.len(), w.out() * w.inp()).map(|()| E::get_weight(w, into)),
            Weight::Router(w) => check_len(id, into.len(), w.out() * w.inp()).map(|()| f32::get_weight(w, into)),
            Weight::Values(w) => check_len(id, into.len(), w.len()).map(|()| into.copy_from_slice(w)),
        }
    }

    /// Replaces a weight in place.
    pub fn set(
        &mut self,
        ws: &mut Workspace,
        id: WeightId,
        placement: &Placement,
        pe: usize,
        values: &[f32],
    ) -> Result<(), MoeError> {
        let weight = self.find_mut(id, placement, pe).ok_or_else(|| not_held(id, pe))?;
        match weight {
            WeightMut::Matrix(w) => {
                check_len(id, values.len(), w.out() * w.inp()).map(|()| E::set_weight(ws, w, values))
            }
            WeightMut::Router(w) => {
                check_len(id, values.len(), w.out() * w.inp()).map(|()| f32::set_weight(ws, w, values))
            }
            WeightMut::Values(w) => check_len(id, values.len(), w.len()).map(|()| w.copy_from_slice(values)),
        }
    }

    fn find(&self, id: WeightId, placement: &Placement, pe: usize) -> Option<Weight<'_, E>> {
        let local = |e| placement.local_on(e, pe).map(|local| &self.experts[local]);
        match id {
            WeightId::Router => self.router.as_ref().map(Weight::Router),
            WeightId::LogitBias => self.logit_bias.as_deref().map(Weight::Values),
            WeightId::RouterBias => self.router_bias.as_deref().map(Weight::Values),
            WeightId::Expert(e, proj) => local(e)?.matrix(proj).map(Weight::Matrix),
            WeightId::ExpertBias(e, proj) => local(e)?.bias(proj).map(Weight::Values),
            WeightId::Shared(proj) => self.shared.as_ref()?.matrix(proj).map(Weight::Matrix),
            WeightId::SharedBias(proj) => self.shared.as_ref()?.bias(proj).map(Weight::Values),
            WeightId::SharedGate => self.shared_gate.as_deref().map(Weight::Values),
        }
    }

    fn find_mut(&mut self, id: WeightId, placement: &Placement, pe: usize) -> Option<WeightMut<'_, E>> {
        let local = |e| placement.local_on(e, pe);
        match id {
            WeightId::Router => self.router.as_mut().map(WeightMut::Router),
            WeightId::LogitBias => self.logit_bias.as_deref_mut().map(WeightMut::Values),
            WeightId::RouterBias => self.router_bias.as_deref_mut().map(WeightMut::Values),
            WeightId::Expert(e, proj) => self.experts[local(e)?].matrix_mut(proj).map(WeightMut::Matrix),
            WeightId::ExpertBias(e, proj) => self.experts[local(e)?].bias_mut(proj).map(WeightMut::Values),
            WeightId::Shared(proj) => self.shared.as_mut()?.matrix_mut(proj).map(WeightMut::Matrix),
            WeightId::SharedBias(proj) => self.shared.as_mut()?.bias_mut(proj).map(WeightMut::Values),
            WeightId::SharedGate => self.shared_gate.as_deref_mut().map(WeightMut::Values),
        }
    }
}

fn not_held(id: WeightId, pe: usize) -> MoeError {
    MoeError::Usage { what: "use this weight", why: format!("PE {pe} holds no {id:?}") }
}

fn check_len(id: WeightId, got: usize, expected: usize) -> Result<(), MoeError> {
    if got == expected {
        return Ok(());
    }
    Err(MoeError::Shape { what: format!("{id:?}").into(), got, expected: expected.to_string() })
}
