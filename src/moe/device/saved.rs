//! State that a forward pass keeps for its backward.

use crate::gpu::Buffer;
use crate::gpu::params::LayerInfo;

/// The source of a pass's routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoutedBy {
    /// The layer's router.
    Layer,
    /// The caller.
    Caller,
}

/// State that a forward pass keeps for its backward, on the device.
///
/// Only the layer that made the state accepts it; the state has the layer's id, which is unique in the process. The state can be used for
/// one backward, which must have the same source of routing as the forward pass.
pub struct DeviceSaved<'g> {
    pub(super) layer: u64,
    /// The `DeviceLayer::version` from which the description was made.
    pub(super) version: u64,
    pub(super) tokens: usize,
    pub(super) routed_by: RoutedBy,
    /// Whether the pass may still have a backward.
    pub(super) awaits_backward: bool,
    pub(super) local: Buffer<'g>,
    /// The kernels' `Layer`, with addresses in `local` and in the layer's tables, weights and symmetric memory.
    pub(super) description: Buffer<'g>,
    pub(super) info: LayerInfo,
}

impl<'g> DeviceSaved<'g> {
    /// Tokens of the pass.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The source of the pass's routing.
    pub(super) fn routed_by(&self) -> RoutedBy {
        self.routed_by
    }

    /// Sizes, addresses in the state's memory, and launch parameters.
    pub(super) fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Device address of the kernels' `Layer`.
    pub(super) fn description(&self) -> u64 {
        self.description.address()
    }

    /// The state's memory, and the offset of `address`, which is from [`DeviceSaved::info`], in that memory.
    pub(super) fn at(&self, address: u64) -> (&Buffer<'g>, u64) {
        (&self.local, address - self.local.address())
    }

    /// Call before launching a forward pass of `tokens` tokens.
    pub(super) fn begin(&mut self, tokens: usize, by: RoutedBy) {
        (self.tokens, self.routed_by, self.awaits_backward) = (tokens, by, true);
    }

    /// Call before launching the backward.
    pub(super) fn begin_backward(&mut self) {
        self.awaits_backward = false;
    }
}
