//! The interface of a layer: its specification ([`LayerSpec`]), and the operations that every engine implements ([`MoeLayer`]).

use std::borrow::{Borrow, BorrowMut};

use super::config::{LayerConfig, WeightId};
use super::gradients::Gradients;
use super::groups::Groups;
use super::layout::Layout;
use super::load::Load;
use super::metrics::PassOutcome;
use super::options::{Dtype, Mode, Options};
use super::placement::Placement;
use super::{ConfigError, MoeError};
use crate::shmem::{ShmTransport, Shmem};

/// Specifies a layer, and how one expert-parallel group of PEs runs it. All PEs of the group must use the same value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Shapes, router, experts.
    pub config: LayerConfig,
    /// The placement of experts on PEs.
    pub placement: Placement,
    /// Element type of activations and expert weights.
    pub dtype: Dtype,
    /// Maximum tokens of one PE in a pass, for which symmetric memory is reserved. On a CPU a longer batch runs as several passes; a
    /// device refuses it.
    pub max_tokens: usize,
    /// Whether backward passes run. If so, gradients are allocated and, on a device, the memory that backward needs.
    pub training: bool,
    /// Options of the engine.
    pub options: Options,
    /// Maximum number of experts that a PE can hold after moves ([`MoeLayer::move_experts`]); symmetric memory is reserved for this many.
    /// `None` if experts never move.
    pub slots: Option<usize>,
}

impl LayerSpec {
    /// A layer for training in f32 on `n_pes` PEs with at most `max_tokens` tokens each. Experts are placed on PEs in contiguous blocks of
    /// even size.
    pub fn new(config: LayerConfig, n_pes: usize, max_tokens: usize) -> Self {
        let placement = Placement::even(config.n_experts, n_pes);
        let (dtype, options) = (Dtype::F32, Options::default());
        LayerSpec { config, placement, dtype, max_tokens, training: true, options, slots: None }
    }

    /// Sets the placement.
    pub fn placement(self, placement: Placement) -> Self {
        LayerSpec { placement, ..self }
    }

    /// Sets the element type.
    pub fn dtype(self, dtype: Dtype) -> Self {
        LayerSpec { dtype, ..self }
    }

    /// Sets whether backward passes run.
    pub fn training(self, training: bool) -> Self {
        LayerSpec { training, ..self }
    }

    /// Sets the options.
    pub fn options(self, options: Options) -> Self {
        LayerSpec { options, ..self }
    }

    /// Lets experts move, with at most `slots` on a PE.
    pub fn slots(self, slots: usize) -> Self {
        LayerSpec { slots: Some(slots), ..self }
    }

    /// Checks that the fields are consistent with each other and with `n_pes`, the number of PEs that run the layer.
    ///
    /// # Errors
    ///
    /// Returns an error that names the first wrong field, its value, and the expected values.
    pub fn validate(&self, n_pes: usize) -> Result<(), MoeError> {
        self.config.validate()?;
        self.options.validate(self.dtype)?;
        for (field, value, expected) in [
            ("the placement's number of PEs", self.placement.n_pes(), n_pes),
            ("the placement's number of experts", self.placement.n_experts(), self.config.n_experts),
        ] {
            if value != expected {
                return Err(ConfigError { field, value: value.to_string(), expected: expected.to_string() }.into());
            }
        }
        if let Some(slots) = self.slots.filter(|&slots| slots < self.placement.max_local()) {
            let expected = format!("at least {}, as many experts as a PE holds", self.placement.max_local());
            return Err(ConfigError { field: "slots", value: slots.to_string(), expected }.into());
        }
        Ok(())
    }

    /// Size of a symmetric heap with only this layer, bytes per PE.
    ///
    /// # Errors
    ///
    /// Returns [`MoeError::TooLarge`] if the sizes exceed the protocol's limits.
    pub fn heap_bytes(&self) -> Result<usize, MoeError> {
        Ok(Shmem::<ShmTransport>::heap_bytes_for(self.placement.n_pes(), self.layout()?.total_bytes()))
    }

    /// The weights that PE `pe` holds, in a fixed order: replicated weights, then its experts' weights.
    pub fn held(&self, pe: usize) -> Vec<WeightId> {
        let mut ids = self.config.replicated_weights();
        ids.extend(self.placement.experts(pe).iter().flat_map(|&e| self.config.expert_weights(e)));
        ids
    }

    /// Sizes of the symmetric memory.
    ///
    /// # Errors
    ///
    /// Returns [`MoeError::TooLarge`] if the sizes exceed the protocol's limits.
    pub fn layout(&self) -> Result<Layout, MoeError> {
        let row_element_bytes = self.options.wire(self.dtype).bytes();
        Layout::new(&self.config, &self.placement, self.slots, row_element_bytes, self.max_tokens, &self.options)
    }
}

/// The routing of a pass, for reports, routing captures or the caller's own router.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Routed {
    /// The experts of each of this PE's tokens, `[tokens, top_k]`. [`NO_EXPERT`] if the caller's routing has no expert.
    pub chosen: Vec<u32>,
    /// Routing weights of `chosen`, `[tokens, top_k]`.
    pub weights: Vec<f32>,
    /// Rows of each local expert, in the order of [`Placement::experts`].
    pub expert_rows: Vec<u64>,
    /// Load sums for the losses, over all PEs' tokens; empty if no loss has a coefficient.
    pub load: Load,
}

/// Per-expert state of the caller, such as an optimizer's moments, which moves with the expert.
pub trait ExpertState {
    /// f32 values per expert, the same on every PE.
    fn len(&self) -> usize;
    /// Whether there are no values.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies the values of `expert` to `into`, to be sent to another PE.
    fn export(&mut self, expert: usize, into: &mut [f32]);
    /// Stores the values of `expert`, which this PE holds from now on.
    fn import(&mut self, expert: usize, values: &[f32]);
    /// Drops the values of `expert`, which this PE no longer holds.
    fn remove(&mut self, expert: usize);
}

/// No state.
impl ExpertState for () {
    fn len(&self) -> usize {
        0
    }

    fn export(&mut self, _: usize, _: &mut [f32]) {}

    fn import(&mut self, _: usize, _: &[f32]) {}

    fn remove(&mut self, _: usize) {}
}

/// Means no expert in [`Routed::chosen`]. In the caller's routing, id -1 has this meaning.
pub const NO_EXPERT: u32 = u32::MAX;

/// One PE's part of an MoE layer whose experts are distributed over all PEs. Each engine implements this trait.
///
/// Every PE makes its layer from the same [`LayerSpec`], and calls the same passes in the same order. The number of tokens may differ from
/// PE to PE, and may be 0. The call of a pass may return before the pass is done; [`MoeLayer::finish`] waits for the pass. A layer must not
/// be used after an error, because its PEs may be at different points of the protocol.
///
/// A forward pass returns a [`Saved`](MoeLayer::Saved), which is valid for one backward of this layer. A second backward, or a backward of
/// another layer, returns [`MoeError::Usage`].
pub trait MoeLayer {
    /// Rows in the layer's element type in memory of the engine, `[tokens, hidden]`: a slice, or a device buffer.
    type Rows: ?Sized;
    /// f32 values in memory of the engine.
    type Values: ?Sized;
    /// i32 expert ids in memory of the engine.
    type Ids: ?Sized;
    /// Owned [`MoeLayer::Rows`].
    type RowsBuf: Borrow<Self::Rows>;
    /// Owned [`MoeLayer::Values`].
    type ValuesBuf: BorrowMut<Self::Values>;
    /// Owned [`MoeLayer::Ids`].
    type IdsBuf: Borrow<Self::Ids>;
    /// State that a forward pass keeps for its backward.
    type Saved;

    /// The layer's spec.
    fn spec(&self) -> &LayerSpec;

    /// This PE's number in its group.
    fn my_pe(&self) -> usize;

    /// Rounds `values` to the layer's element type and copies them to memory of the engine. `name` is their name in
    /// errors.
    ///
    /// # Errors
    ///
    /// Returns an error if a finite value overflows the element type, or if allocation fails.
    fn rows(&self, values: &[f32], name: &str) -> Result<Self::RowsBuf, MoeError>;

    /// Copies f32 values to memory of the engine.
    ///
    /// # Errors
    ///
    /// Returns an error if allocation fails.
    fn values(&self, values: &[f32]) -> Result<Self::ValuesBuf, MoeError>;

    /// Copies expert ids to memory of the engine.
    ///
    /// # Errors
    ///
    /// Returns an error if allocation fails.
    fn ids(&self, ids: &[i32]) -> Result<Self::IdsBuf, MoeError>;

    /// Copies values to `into`, which must have the same length, after all passes that were called before.
    ///
    /// # Errors
    ///
    /// Returns an error if the lengths differ, or the device's error.
    fn read(&self, values: &Self::Values, into: &mut [f32]) -> Result<(), MoeError>;

    /// `output = sum over chosen experts of weight * expert(x)`, plus the shared expert, for this PE's tokens, routed by the layer's own
    /// router. `x` and `output` are `[tokens, hidden]`. Pass the returned state to [`MoeLayer::recycle`] when it is no longer needed.
    ///
    /// # Errors
    ///
    /// Returns an error if an argument has the wrong length, if the layer has no router, or if a peer exceeds the wait
    /// limit, is lost or sends invalid data.
    fn forward(&mut self, x: &Self::Rows, output: &mut Self::Values) -> Result<Self::Saved, MoeError>;

    /// Backward of [`MoeLayer::forward`]: computes the gradient of the input from that of the output, and the gradients
    /// of the weights ([`MoeLayer::gradients`]), including the auxiliary losses. `x` is the input of forward.
    ///
    /// # Errors
    ///
    /// Returns the errors of `forward`, and an error if `saved` is that of another layer or has had its backward, or if the layer was not
    /// made for training.
    fn backward(
        &mut self,
        saved: &mut Self::Saved,
        x: &Self::Rows,
        grad_output: &Self::Rows,
        grad_input: &mut Self::Values,
    ) -> Result<(), MoeError>;

    /// Runs the routed experts with the caller's routing, without the layer's router and shared expert: `output = sum over the given
    /// experts of weight * expert(x)`. `ids` are global expert ids and `weights` their weights, both `[tokens, top_k]` in any order. Id -1
    /// means no expert; its weight is not read.
    ///
    /// # Errors
    ///
    /// Returns the errors of `forward`, and an error if an id is out of range or occurs twice in a token.
    fn experts(
        &mut self,
        x: &Self::Rows,
        ids: &Self::Ids,
        weights: &Self::Values,
        output: &mut Self::Values,
    ) -> Result<Self::Saved, MoeError>;

    /// Backward of [`MoeLayer::experts`]. Also computes the gradient of the routing weights, `[tokens, top_k]`, which is 0 for id -1.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`MoeLayer::backward`].
    fn experts_backward(
        &mut self,
        saved: &mut Self::Saved,
        x: &Self::Rows,
        grad_output: &Self::Rows,
        grad_input: &mut Self::Values,
        grad_weights: &mut Self::Values,
    ) -> Result<(), MoeError>;

    /// Waits until the last pass, which must have used `saved`, is done. Returns its times and traffic. Call this after each pass for which
    /// you need the outcome: on a device the next pass overwrites the outcome, and on a CPU the next outcome includes this one.
    ///
    /// # Errors
    ///
    /// Returns an error if a peer exceeds the wait limit, is lost or sent invalid data, or the device's error.
    fn finish(&mut self, saved: &Self::Saved) -> Result<PassOutcome, MoeError>;

    /// The routing of the forward pass. Call it before the backward.
    ///
    /// # Errors
    ///
    /// Returns an error if `saved` is that of another layer, or the device's error.
    fn routed(&mut self, saved: &Self::Saved) -> Result<Routed, MoeError>;

    /// [`Routed::expert_rows`] alone, which is little to copy from a device.
    ///
    /// # Errors
    ///
    /// As for [`MoeLayer::routed`].
    fn expert_rows(&mut self, saved: &Self::Saved) -> Result<Vec<u64>, MoeError>;

    /// Reuses the memory of a pass for a later one.
    fn recycle(&mut self, saved: Self::Saved);

    /// The gradients of the last backward, or their sums since [`MoeLayer::set_accumulate`]. The gradients of replicated weights are sums
    /// over all PEs.
    ///
    /// # Errors
    ///
    /// Returns an error if the layer was not made for training, or the device's error.
    fn gradients(&mut self) -> Result<&Gradients, MoeError>;

    /// Sets whether backward passes add to the gradients (gradient accumulation) instead of overwriting them, which is the default. Must be
    /// the same on every PE. When it is turned on for the first time, a second set of gradients is allocated.
    ///
    /// # Errors
    ///
    /// Returns an error if the layer was not made for training, or if allocation fails.
    fn set_accumulate(&mut self, accumulate: bool) -> Result<(), MoeError>;

    /// Copies a weight that this PE holds to `into`, as f32. The values have the rounding with which the engine computes.
    ///
    /// # Errors
    ///
    /// Returns an error if this PE does not hold the weight, or if the length differs.
    fn weights(&self, id: WeightId, into: &mut [f32]) -> Result<(), MoeError>;

    /// Replaces a weight that this PE holds, in place: rounds and packs it without allocation or communication. The next pass uses the new
    /// values. Replicated weights must be set to the same values on every PE, and an expert's weights on every PE that holds the expert.
    ///
    /// # Errors
    ///
    /// Returns an error if this PE does not hold the weight, if the length differs, or if a finite value overflows the
    /// element type.
    fn set_weights(&mut self, id: WeightId, values: &[f32]) -> Result<(), MoeError>;

    /// Moves experts and the caller's `state` of them to the placement of `groups`, by one-sided puts (collective over all PEs; call it
    /// between passes). The members of this PE's group must not change. Afterwards gradients are zero, and earlier forward passes can no
    /// longer have a backward. Returns the number of transfers within this group.
    ///
    /// # Errors
    ///
    /// Returns an error if the engine does not support moves, if the layer has too few [`LayerSpec::slots`], or if a
    /// peer exceeds the wait limit or is lost.
    fn move_experts(&mut self, groups: &Groups, state: &mut dyn ExpertState) -> Result<usize, MoeError> {
        let _ = (groups, state);
        Err(MoeError::Usage { what: "move experts", why: "experts move on the CPU only".into() })
    }

    /// Changes the mode of later passes; must be called on every PE.
    ///
    /// # Errors
    ///
    /// Returns the device's error.
    fn set_mode(&mut self, mode: Mode) -> Result<(), MoeError>;

    /// Replaces the router's choices in later passes by `choices`, `[tokens, top_k]` global ids for this PE's tokens.
    /// The router's scores still determine the weights. `None` restores the router's choices.
    ///
    /// # Errors
    ///
    /// Returns an error if an id is out of range or occurs twice in a token, if the router cannot compute weights for arbitrary experts, or
    /// if the engine does not support given choices.
    fn set_choices(&mut self, choices: Option<&[u32]>) -> Result<(), MoeError> {
        match choices {
            None => Ok(()),
            Some(_) => Err(MoeError::Usage {
                what: "take experts in place of the router's",
                why: "it is the layer of a device, expected one on the CPU".into(),
            }),
        }
    }

    /// Starts recording spans ([`PassOutcome::spans`]).
    fn record_spans(&mut self);

    /// Waits for all PEs of the group, and for all passes of this PE (collective).
    ///
    /// # Errors
    ///
    /// Returns an error if a peer does not join.
    fn barrier(&mut self) -> Result<(), MoeError>;
}
