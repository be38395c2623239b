//! What a forward pass leaves for its backward, and whose it is.

use crate::gpu::Buffer;
use crate::gpu::params::LayerInfo;

/// Who chose the experts of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoutedBy {
    /// The layer's router.
    Layer,
    /// The caller.
    Caller,
}

/// What a forward pass leaves for its backward, on the device.
///
/// It belongs to the layer that made it, by the layer's number, which no other layer of the process has: all others refuse it,
/// also one that was made after its own was freed. The state of its pass is checked too, so there is one backward, and that of
/// the same kind.
pub struct DeviceSaved<'g> {
    pub(super) layer: u64,
    /// `DeviceLayer::version` of the description.
    pub(super) version: u64,
    pub(super) tokens: usize,
    pub(super) routed_by: RoutedBy,
    /// Whether there may be a backward.
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

    /// Who chose the experts of the pass.
    pub(super) fn routed_by(&self) -> RoutedBy {
        self.routed_by
    }

    /// Sizes, addresses in the state's memory, and launches.
    pub(super) fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Where the kernels' `Layer` is on the device.
    pub(super) fn description(&self) -> u64 {
        self.description.address()
    }

    /// The state's memory, and where in it an address of [`DeviceSaved::info`] is.
    pub(super) fn at(&self, address: u64) -> (&Buffer<'g>, u64) {
        (&self.local, address - self.local.address())
    }

    /// A forward pass of `tokens` tokens is about to be launched.
    pub(super) fn begin(&mut self, tokens: usize, by: RoutedBy) {
        (self.tokens, self.routed_by, self.awaits_backward) = (tokens, by, true);
    }

    /// Its backward is about to be launched.
    pub(super) fn begin_backward(&mut self) {
        self.awaits_backward = false;
    }
}
