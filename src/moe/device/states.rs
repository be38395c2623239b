//! Allocates the states of passes, and checks that a state belongs to a layer.

use super::saved::{DeviceSaved, RoutedBy};
use super::shape::lay_out;
use super::tensor_maps::TENSOR_MAP_BOX;
use super::{DeviceLayer, MoeError};
use crate::gpu::{Buffer, TensorMap};

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
                items: 0,
                item_stride_bytes: 0,
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

    /// Whether the state is of this layer.
    pub(super) fn belongs_to(&self, layer: &DeviceLayer<'g>) -> bool {
        self.layer == layer.id
    }

    /// Returns an error if the state is not of this layer.
    pub(super) fn check(&self, layer: &DeviceLayer<'g>, what: &'static str) -> Result<(), MoeError> {
        match self.belongs_to(layer) {
            true => Ok(()),
            false => Err(MoeError::Usage { what, why: "the forward pass was another layer's".into() }),
        }
    }

    /// Updates the description if the layer has changed since the last use. `layer` must be the state's own layer.
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

    /// Returns an error for a second backward, or if `by` is not the source of the forward pass's routing.
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
}
