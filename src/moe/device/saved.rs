//! State that a forward pass keeps for its backward.

use super::shape::lay_out;
use super::weights::TENSOR_MAP_BOX;
use super::{DeviceLayer, MoeError};
use crate::gpu::params::LayerInfo;
use crate::gpu::{Buffer, TensorMap};

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
/// It belongs to the layer that made it, by an id that is unique in the process; any other layer rejects it. It allows
/// a single backward, of the same kind as the forward pass.
pub struct DeviceSaved<'g> {
    layer: u64,
    /// [`DeviceLayer::version`] that the description was made from.
    version: u64,
    tokens: usize,
    routed_by: RoutedBy,
    /// Whether a backward is allowed.
    awaits_backward: bool,
    local: Buffer<'g>,
    /// The kernels' `Layer`, with addresses in `local` and in the layer's tables, weights and symmetric memory.
    description: Buffer<'g>,
    info: LayerInfo,
}

impl<'g> DeviceSaved<'g> {
    /// Allocates the state of a pass of this layer.
    pub(super) fn new(layer: &DeviceLayer<'g>) -> Result<Self, MoeError> {
        let local = Buffer::new(layer.gpu, layer.sizes.local_bytes)?;
        let (info, description) =
            lay_out(&layer.shape, &layer.weights.tables, local.address(), layer.symmetric.address())?;
        local.zero(info.local_zero - local.address(), info.local_zero_bytes)?;
        for array in info.slot_arrays.iter().filter(|array| array.at != 0) {
            let map = layer.gpu.tensor_map(TensorMap {
                base: array.base,
                rows: array.rows,
                cols: array.cols,
                row_stride_bytes: array.row_stride_bytes,
                box_rows: array.box_rows,
                box_cols: TENSOR_MAP_BOX,
                element_bytes: layer.spec.dtype.bytes() as u32,
            })?;
            local.write(array.at - local.address(), &map)?;
        }
        let description = Buffer::from_slice(layer.gpu, &description)?;
        Ok(DeviceSaved {
            layer: layer.id,
            version: layer.version,
            tokens: 0,
            routed_by: RoutedBy::Layer,
            awaits_backward: false,
            local,
            description,
            info,
        })
    }

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

    /// The state's memory, and the offset in it of an address of [`DeviceSaved::info`].
    pub(super) fn at(&self, address: u64) -> (&Buffer<'g>, u64) {
        (&self.local, address - self.local.address())
    }

    /// Whether the state is of this layer.
    pub(super) fn belongs_to(&self, layer: &DeviceLayer<'g>) -> bool {
        self.layer == layer.id
    }

    /// Returns an error unless the state is of this layer.
    pub(super) fn check(&self, layer: &DeviceLayer<'g>, what: &'static str) -> Result<(), MoeError> {
        match self.belongs_to(layer) {
            true => Ok(()),
            false => Err(MoeError::Usage { what, why: "the forward pass was another layer's".into() }),
        }
    }

    /// Updates the description if the layer, which must be the state's own, has changed since the last use.
    pub(super) fn refresh(&mut self, layer: &DeviceLayer<'g>) -> Result<(), MoeError> {
        if self.version != layer.version {
            let (info, description) =
                lay_out(&layer.shape, &layer.weights.tables, self.local.address(), layer.symmetric.address())?;
            // Changes of the layer do not change sizes, so the state's memory fits the new description.
            assert_eq!((info.local_bytes, info.layer_bytes), (self.info.local_bytes, self.info.layer_bytes));
            self.description.write(0, &description)?;
            (self.info, self.version) = (info, layer.version);
        }
        Ok(())
    }

    /// Call before launching a forward pass of `tokens` tokens.
    pub(super) fn begin(&mut self, tokens: usize, by: RoutedBy) {
        (self.tokens, self.routed_by, self.awaits_backward) = (tokens, by, true);
    }

    /// Returns an error for a second backward, or one of another kind than the forward pass.
    pub(super) fn check_backward(&self, layer: &DeviceLayer<'g>, by: RoutedBy) -> Result<(), MoeError> {
        let what = match by {
            RoutedBy::Layer => "run backward",
            RoutedBy::Caller => "run the backward of experts",
        };
        self.check(layer, what)?;
        let why = match self.routed_by {
            _ if !self.awaits_backward => "the forward pass has had its backward",
            routed if routed == by => return Ok(()),
            RoutedBy::Layer => "the layer's own router routed the forward pass",
            RoutedBy::Caller => "the caller routed the forward pass",
        };
        Err(MoeError::Usage { what, why: why.into() })
    }

    /// Call before launching its backward.
    pub(super) fn begin_backward(&mut self) {
        self.awaits_backward = false;
    }
}
