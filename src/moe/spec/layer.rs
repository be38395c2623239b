//! The contract of a layer: what [`LayerSpec`] describes, and what every engine's layer does ([`MoeLayer`]).

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

/// A layer, and how one expert-parallel group of PEs runs it. The same on every PE of the group.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Shapes, router, experts.
    pub config: LayerConfig,
    /// Which PE owns which expert.
    pub placement: Placement,
    /// Element type of activations and expert weights.
    pub dtype: Dtype,
    /// Most tokens of one PE in a pass.
    pub max_tokens: usize,
    /// Whether there are backward passes: memory for gradients, and on a device for what a backward needs.
    pub training: bool,
    /// How it runs.
    pub options: Options,
    /// Most experts that a PE may come to hold when they move ([`MoeLayer::move_experts`]), for which there is symmetric memory then; `None`
    /// where none ever does.
    pub slots: Option<usize>,
}

impl LayerSpec {
    /// A layer for training in f32 on `n_pes` PEs with at most `max_tokens` tokens each, experts placed in even contiguous
    /// blocks.
    pub fn new(config: LayerConfig, n_pes: usize, max_tokens: usize) -> Self {
        let placement = Placement::even(config.n_experts, n_pes);
        let (dtype, options) = (Dtype::F32, Options::default());
        LayerSpec { config, placement, dtype, max_tokens, training: true, options, slots: None }
    }

    /// With another placement.
    pub fn placement(self, placement: Placement) -> Self {
        LayerSpec { placement, ..self }
    }

    /// With another element type.
    pub fn dtype(self, dtype: Dtype) -> Self {
        LayerSpec { dtype, ..self }
    }

    /// With or without backward passes.
    pub fn training(self, training: bool) -> Self {
        LayerSpec { training, ..self }
    }

    /// With other options.
    pub fn options(self, options: Options) -> Self {
        LayerSpec { options, ..self }
    }

    /// With experts that may move, as many on a PE as `slots`.
    pub fn slots(self, slots: usize) -> Self {
        LayerSpec { slots: Some(slots), ..self }
    }

    /// Checks that the parts fit together, and `n_pes`, the PEs that are to run it.
    ///
    /// # Errors
    /// Names the first field that is wrong, its value, and what would be right.
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

    /// The symmetric heap that a PE needs for this layer and nothing else, bytes.
    ///
    /// # Errors
    /// [`MoeError::TooLarge`].
    pub fn heap_bytes(&self) -> Result<usize, MoeError> {
        Ok(Shmem::<ShmTransport>::heap_bytes_for(self.placement.n_pes(), self.layout()?.total_bytes()))
    }

    /// The weights that PE `pe` holds, in a fixed order: those that every PE holds, then its experts'.
    pub fn held(&self, pe: usize) -> Vec<WeightId> {
        let mut ids = self.config.replicated_weights();
        ids.extend(self.placement.experts(pe).iter().flat_map(|&e| self.config.expert_weights(e)));
        ids
    }

    /// The sizes of the chunks and windows.
    ///
    /// # Errors
    /// [`MoeError::TooLarge`].
    pub fn layout(&self) -> Result<Layout, MoeError> {
        let row_element_bytes = self.options.wire(self.dtype).bytes();
        Layout::new(&self.config, &self.placement, self.slots, row_element_bytes, self.max_tokens, &self.options)
    }
}

/// Where a pass's rows went: what a report, a capture of the routing, or the caller's own router wants to know.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Routed {
    /// The experts of each of this PE's tokens, `[tokens, top_k]`; [`NO_EXPERT`] where a caller's routing has none.
    pub chosen: Vec<u32>,
    /// Their routing weights, `[tokens, top_k]`.
    pub weights: Vec<f32>,
    /// Rows that each local expert got, in the order of [`Placement::experts`].
    pub expert_rows: Vec<u64>,
    /// What the losses are computed from, over all PEs' tokens; empty where no loss has a coefficient.
    pub load: Load,
}

/// What a caller keeps of each expert that it holds, such as an optimizer's moments: it moves with the expert.
pub trait ExpertState {
    /// f32 values of an expert, on every PE alike.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies the values of `expert` to `into`, for a PE that gets it.
    fn give(&mut self, expert: usize, into: &mut [f32]);
    /// This PE has `expert` from now on, with these values.
    fn take(&mut self, expert: usize, values: &[f32]);
    /// This PE has `expert` no more.
    fn forget(&mut self, expert: usize);
}

/// Nothing kept.
impl ExpertState for () {
    fn len(&self) -> usize {
        0
    }

    fn give(&mut self, _: usize, _: &mut [f32]) {}

    fn take(&mut self, _: usize, _: &[f32]) {}

    fn forget(&mut self, _: usize) {}
}

/// In [`Routed::chosen`]: no expert. A caller's routing has -1 there.
pub const NO_EXPERT: u32 = u32::MAX;

/// One PE's part of a MoE layer whose experts are spread over all PEs, whichever engine runs it.
///
/// Every PE makes its layer by the same [`LayerSpec`], and calls the same passes in the same order; how many tokens it brings to a
/// pass, 0 included, is up to each. A pass may return before it has run: [`MoeLayer::finish`] waits for it. After an error the
/// layer is not usable, because the PEs may be at different places of the protocol.
///
/// A forward pass returns a [`Saved`](MoeLayer::Saved), which belongs to this layer: other layers refuse it
/// ([`MoeError::Usage`]), and so does a second backward.
pub trait MoeLayer {
    /// Rows of the layer's element type where the engine reads them, `[tokens, hidden]`: a slice, or a device's buffer.
    type Rows: ?Sized;
    /// f32 values where the engine reads and writes them.
    type Values: ?Sized;
    /// i32 expert ids where the engine reads them.
    type Ids: ?Sized;
    /// [`MoeLayer::Rows`] that the caller owns.
    type RowsBuf: Borrow<Self::Rows>;
    /// [`MoeLayer::Values`] that the caller owns.
    type ValuesBuf: BorrowMut<Self::Values>;
    /// [`MoeLayer::Ids`] that the caller owns.
    type IdsBuf: Borrow<Self::Ids>;
    /// What a forward pass leaves for its backward.
    type Saved;

    /// What the layer was made by.
    fn spec(&self) -> &LayerSpec;

    /// This PE's number in its group.
    fn my_pe(&self) -> usize;

    /// Rounds `values` to the layer's element type and puts them where the engine reads them; `name` is what errors call them.
    ///
    /// # Errors
    /// A finite value that the element type cannot hold; too little memory.
    fn rows(&self, values: &[f32], name: &str) -> Result<Self::RowsBuf, MoeError>;

    /// Puts f32 values where the engine reads and writes them.
    ///
    /// # Errors
    /// Too little memory.
    fn values(&self, values: &[f32]) -> Result<Self::ValuesBuf, MoeError>;

    /// Puts expert ids where the engine reads them.
    ///
    /// # Errors
    /// Too little memory.
    fn ids(&self, ids: &[i32]) -> Result<Self::IdsBuf, MoeError>;

    /// Copies values to `into`, of the same length, after all passes that were called.
    ///
    /// # Errors
    /// Another length; the device's.
    fn read(&self, values: &Self::Values, into: &mut [f32]) -> Result<(), MoeError>;

    /// `output = sum over chosen experts of weight * expert(x), plus the shared expert`, for this PE's tokens, by the layer's own
    /// router; `x` and `output` are `[tokens, hidden]`. Give what it returns to [`MoeLayer::recycle`] in the end.
    ///
    /// # Errors
    /// Arguments of the wrong length; a layer without a router; a peer that does not do its part within the wait limit, or sends
    /// what does not fit the layer.
    fn forward(&mut self, x: &Self::Rows, output: &mut Self::Values) -> Result<Self::Saved, MoeError>;

    /// The backward of [`MoeLayer::forward`]: from the gradient of the output that of the input, and those of the weights
    /// ([`MoeLayer::gradients`]). `x` is what forward was given. The losses count with their coefficients.
    ///
    /// # Errors
    /// As for forward; a `saved` that is not this layer's, or of which there has been a backward; a layer not made for training.
    fn backward(
        &mut self,
        saved: &mut Self::Saved,
        x: &Self::Rows,
        grad_output: &Self::Rows,
        grad_input: &mut Self::Values,
    ) -> Result<(), MoeError>;

    /// `output = sum over the given experts of weight * expert(x)`: routed experts by the caller's routing, without the layer's
    /// router and shared expert. `ids` are global expert ids and `weights` their weights, both `[tokens, top_k]` in any order;
    /// an id of -1 is no expert, and its weight is not read.
    ///
    /// # Errors
    /// As for forward; an id out of range, or twice in one token.
    fn experts(
        &mut self,
        x: &Self::Rows,
        ids: &Self::Ids,
        weights: &Self::Values,
        output: &mut Self::Values,
    ) -> Result<Self::Saved, MoeError>;

    /// The backward of [`MoeLayer::experts`]: also the gradient of the routing weights, `[tokens, top_k]`, 0 where there is no
    /// expert.
    ///
    /// # Errors
    /// As for [`MoeLayer::backward`].
    fn experts_backward(
        &mut self,
        saved: &mut Self::Saved,
        x: &Self::Rows,
        grad_output: &Self::Rows,
        grad_input: &mut Self::Values,
        grad_weights: &mut Self::Values,
    ) -> Result<(), MoeError>;

    /// Waits until the last pass, which was on `saved`, is done; what it took and sent. To be called after each pass whose outcome
    /// is wanted: on a device the next pass overwrites it, on a CPU the next outcome has it too.
    ///
    /// # Errors
    /// A peer that did not do its part in time or sent what does not fit; the device's.
    fn finish(&mut self, saved: &Self::Saved) -> Result<PassOutcome, MoeError>;

    /// Where the forward pass's rows went. Before its backward.
    ///
    /// # Errors
    /// A `saved` that is not this layer's; the device's.
    fn routed(&mut self, saved: &Self::Saved) -> Result<Routed, MoeError>;

    /// Keeps the memory of a pass for the next one.
    fn recycle(&mut self, saved: Self::Saved);

    /// The gradients that the last backward left, or the sums over those since [`MoeLayer::set_accumulate`]; replicated weights'
    /// are summed over all PEs.
    ///
    /// # Errors
    /// A layer not made for training; the device's.
    fn gradients(&mut self) -> Result<&Gradients, MoeError>;

    /// Whether backward passes add to the gradients (gradient accumulation) rather than overwrite them, as at first. The same on
    /// every PE. Takes memory for a second set of gradients when it is first turned on.
    ///
    /// # Errors
    /// A layer not made for training; too little memory.
    fn set_accumulate(&mut self, accumulate: bool) -> Result<(), MoeError>;

    /// Copies a weight that this PE holds to `into`, of its length, widened to f32: what the engine computes with.
    ///
    /// # Errors
    /// A weight that this PE does not hold, or another length.
    fn weights(&self, id: WeightId, into: &mut [f32]) -> Result<(), MoeError>;

    /// Replaces a weight that this PE holds, in place: rounded and packed again, no allocation, nothing collective. The next pass
    /// computes with it. Replicated weights must be given the same values on every PE, an expert's on every PE that holds it.
    ///
    /// # Errors
    /// A weight that this PE does not hold, another length, or a finite value that the element type cannot hold.
    fn set_weights(&mut self, id: WeightId, values: &[f32]) -> Result<(), MoeError>;

    /// Moves experts to where `groups` has them, between passes: their weights, one-sided, and the caller's `state` of them. This PE's group keeps its
    /// PEs. Gradients are zero afterwards, and forward passes of before have no backward any more. Says how many experts were given
    /// to a PE of this group (collective over all PEs).
    ///
    /// # Errors
    /// An engine whose experts do not move; a layer without room for it ([`LayerSpec::slots`]); a peer that does not do its part.
    fn move_experts(&mut self, groups: &Groups, state: &mut dyn ExpertState) -> Result<usize, MoeError> {
        let _ = (groups, state);
        Err(MoeError::Usage { what: "move experts", why: "experts move on the CPU only".into() })
    }

    /// Changes the mode of the passes from now on, on every PE alike.
    ///
    /// # Errors
    /// The device's.
    fn set_mode(&mut self, mode: Mode) -> Result<(), MoeError>;

    /// From now on the router takes these experts of each token, `[tokens, top_k]` global ids, in place of those with the best scores; its scores
    /// make their weights. `None` lets it choose again. Each PE says it for its own tokens.
    ///
    /// # Errors
    /// An id out of range, or twice in one token; a router that cannot weigh every expert; an engine whose router cannot be told.
    fn set_choices(&mut self, choices: Option<&[u32]>) -> Result<(), MoeError> {
        match choices {
            None => Ok(()),
            Some(_) => Err(MoeError::Usage {
                what: "take experts in place of the router's",
                why: "it is the layer of a device, expected one on the CPU".into(),
            }),
        }
    }

    /// Keeps spans from now on: what the layer did when ([`PassOutcome::spans`]).
    fn record_spans(&mut self);

    /// Waits for all PEs of the group, and for all of this one's passes (collective).
    ///
    /// # Errors
    /// A peer that does not come.
    fn barrier(&mut self) -> Result<(), MoeError>;
}
