//! A layer in its caller's memory: the caller provides rows, weights, gradients and the state of a pass, for example as tensors of a
//! framework. A call only launches kernels on the caller's stream, so that a framework can capture the call.

use std::cell::Cell;
use std::mem::offset_of;

use bytemuck::Zeroable;

use super::tensor_maps::{TENSOR_MAP_BOX, tensor_maps};
use super::tiles::GemmPath;
use super::{DeviceLayer, DeviceOptions, lay_out, report};
use crate::gpu::params::{
    BeginArgs, ERROR_NONE, ErrorRecord, HostErrors, Kernel, LayerInfo, Pass, SLOT_MAPS, StateOrigin, Tables,
    WEIGHT_MAPS,
};
use crate::gpu::{Gpu, Launch, TensorMap};
use crate::moe::spec::{LayerConfig, LayerSpec, MoeError};

/// Alignment of a state, bytes.
const STATE_ALIGN: u64 = 64;
/// Offset of the kernels' `Layer` in a state, after the tensor maps of weights.
const LAYER_AT: u64 = (2 * WEIGHT_MAPS * size_of::<[u64; 16]>()) as u64;
/// Alignment of rows and weights, bytes: kernels copy 16 at a time.
const ROW_ALIGN: u64 = 16;

/// Device addresses of this PE's expert weights, or of their gradients. All arrays are contiguous; the address of a missing bias is 0.
/// Weights have the layer's element type; biases and gradients are f32. `up` is `[experts, 2 * intermediate, hidden]`, with the rows of
/// gate before those of up, or `[experts, intermediate, hidden]` without a gate. `down` is `[experts, hidden, intermediate]`, and biases
/// are `[experts, out]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ExpertAddresses {
    pub up: u64,
    pub down: u64,
    pub up_bias: u64,
    pub down_bias: u64,
}

/// A forward pass of [`DeviceExperts`].
#[derive(Clone, Copy, Debug)]
pub struct ExpertsForward {
    /// A `CUstream`; `None`: the device's own stream.
    pub stream: Option<u64>,
    /// Tokens of this PE.
    pub tokens: usize,
    /// `[tokens, hidden]` in the layer's element type.
    pub x: u64,
    /// Expert ids, `[tokens, top_k]`; -1 means no expert.
    pub ids: u64,
    /// Whether ids are i64 instead of i32.
    pub wide_ids: bool,
    /// Routing weights, f32 `[tokens, top_k]`.
    pub weights: u64,
    /// `[tokens, hidden]`.
    pub output: u64,
    /// Whether the output has the layer's element type instead of f32.
    pub narrow_output: bool,
    /// This PE's experts.
    pub experts: ExpertAddresses,
    /// Memory of [`DeviceExperts::state_bytes`] bytes, with any content.
    pub state: u64,
}

/// The backward pass of an [`ExpertsForward`].
#[derive(Clone, Copy, Debug)]
pub struct ExpertsBackward {
    /// As in the forward.
    pub stream: Option<u64>,
    /// As in the forward.
    pub tokens: usize,
    /// The forward's `x`, possibly at another address.
    pub x: u64,
    /// `[tokens, hidden]` in the layer's element type.
    pub grad_output: u64,
    /// `[tokens, hidden]`: the gradient of `x`.
    pub grad_x: u64,
    /// Whether `grad_x` has the layer's element type instead of f32.
    pub narrow_output: bool,
    /// f32 `[tokens, top_k]`: the gradient of the routing weights.
    pub grad_weights: u64,
    /// The experts, with the same values as in the forward.
    pub experts: ExpertAddresses,
    /// Gradients of the experts' weights.
    pub gradients: ExpertAddresses,
    /// Whether this pass's gradients are added to `gradients` instead of overwriting them.
    pub accumulate: bool,
    /// The forward's state, possibly at another address.
    pub state: u64,
}

/// One PE's part of a layer in memory of its caller, except for symmetric memory.
///
/// A state can be used for one backward. Passes must be called in the same order on all PEs. A call returns before its pass has ended, so a
/// later call returns errors of the pass. Dropping it waits for the stream of the last call, which must still exist then.
pub struct DeviceExperts<'g> {
    // The first field: dropping it waits for the kernels, and makes the device usable in the thread that drops the others.
    errors: HostRecord<'g>,
    layer: DeviceLayer<'g>,
}

/// A [`HostErrors`] in host memory, which kernels write.
struct HostRecord<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    /// The stream of the last call.
    stream: Cell<Option<u64>>,
}

impl HostRecord<'_> {
    /// The record at offset `offset` in `HostErrors`.
    fn record(&self, offset: usize) -> *mut ErrorRecord {
        std::ptr::with_exposed_provenance_mut(self.address as usize + offset)
    }

    /// Reads the record at `offset`, if a kernel has written it completely.
    fn read(&self, offset: usize) -> Option<ErrorRecord> {
        let record = self.record(offset);
        // SAFETY: the record is in memory of this value, and aligned. The device writes the kind last, after a fence.
        unsafe {
            if (&raw const (*record).kind).read_volatile() == ERROR_NONE {
                return None;
            }
            std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
            Some(record.read_volatile())
        }
    }

    /// Clears the record at `offset`, so that kernels can write it again.
    fn clear(&self, offset: usize) {
        // SAFETY: as in `read`.
        unsafe { (&raw mut (*self.record(offset)).kind).write_volatile(ERROR_NONE) }
    }
}

impl Drop for HostRecord<'_> {
    fn drop(&mut self) {
        // Kernels may still write the record, so wait for them. If that fails, the record is leaked. Any thread may drop the value.
        if self.gpu.use_stream(self.stream.get()).and_then(|()| self.gpu.synchronise()).is_err() {
            return;
        }
        // SAFETY: `DeviceExperts::new` allocated the memory, which is not used after this.
        unsafe { self.gpu.free_host_raw(self.address) }
    }
}

/// The arguments of [`DeviceExperts::run`].
struct Call {
    pass: Pass,
    tables: Tables,
    state: u64,
    stream: Option<u64>,
    backward: bool,
}

impl<'g> DeviceExperts<'g> {
    /// Allocates the symmetric memory (collective). `spec` has no router and no shared expert.
    ///
    /// # Errors
    ///
    /// Returns an error if devices, or this device, do not support the configuration, if several PEs hold an expert, if
    /// allocation fails, or if a peer does not join.
    pub fn new(gpu: &'g dyn Gpu, spec: LayerSpec, device: &DeviceOptions) -> Result<Self, MoeError> {
        let refuse =
            |why: &str| Err(MoeError::Usage { what: "make a layer over its caller's memory", why: why.into() });
        if !spec.config.router.external || spec.config.shared.is_some() {
            return refuse("it has a router or a shared expert, which the caller computes itself");
        }
        let layer = DeviceLayer::build(gpu, spec, None, device)?;
        if layer.shape.summed == 1 {
            return refuse("several PEs hold an expert: gradients of the caller are not summed");
        }
        let address = gpu.alloc_host_raw(size_of::<HostErrors>() as u64)?;
        let experts = DeviceExperts { errors: HostRecord { gpu, address, stream: Cell::new(None) }, layer };
        // No PE may signal before the signal words of all PEs are zero.
        gpu.barrier(experts.layer.spec.options.wait_limit)?;
        Ok(experts)
    }

    /// The layer's configuration.
    pub fn spec(&self) -> &LayerSpec {
        &self.layer.spec
    }

    /// Symmetric memory of this PE, bytes.
    pub fn symmetric_bytes(&self) -> u64 {
        self.layer.symmetric_bytes()
    }

    /// Number of blocks of the persistent kernel of a pass.
    pub fn blocks(&self) -> u32 {
        self.layer.shape.blocks
    }

    /// Bytes of a pass's state.
    pub fn state_bytes(&self) -> u64 {
        self.local_at() + self.layer.sizes.local_bytes
    }

    /// Offset of a [`StateOrigin`] in a state.
    fn origin_at(&self) -> u64 {
        LAYER_AT + self.layer.sizes.layer_bytes
    }

    /// Offset of the local block in a state.
    fn local_at(&self) -> u64 {
        (self.origin_at() + size_of::<StateOrigin>() as u64).next_multiple_of(STATE_ALIGN)
    }

    /// Launches a forward pass (collective).
    ///
    /// # Safety
    ///
    /// Each address must be that of memory of this device with the documented shape. Until the launched kernels have ended, the caller must
    /// not free the memory or use it in another way, except in operations that the stream orders after the kernels. The same applies to the
    /// state until its backward has ended. For a recorded stream this applies to each replay.
    ///
    /// # Errors
    ///
    /// Returns the error of an earlier pass, and an error for an unaligned address or too many tokens.
    pub unsafe fn forward(&self, forward: &ExpertsForward) -> Result<(), MoeError> {
        let ExpertsForward { tokens, x, ids, weights, output, state, .. } = *forward;
        self.check_passes()?;
        self.check_call(tokens, &[("x", x), ("output", output)], &[("ids", ids), ("weights", weights)])?;
        let pass = Pass {
            tokens: tokens as u32,
            wide_ids: forward.wide_ids.into(),
            narrow_output: forward.narrow_output.into(),
            x,
            output,
            ids,
            weights,
            ..Pass::zeroed()
        };
        let tables = self.tables(&forward.experts)?;
        let call = Call { pass, tables, state, stream: forward.stream, backward: false };
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(&call, &[Kernel::TakeRouting, Kernel::Plan, Kernel::Forward]) }
    }

    /// Launches the backward of a forward pass (collective).
    ///
    /// # Safety
    ///
    /// As for [`DeviceExperts::forward`]. The state must be that of a forward pass of this layer with the same number of tokens, which has
    /// had no backward.
    ///
    /// # Errors
    ///
    /// As for [`DeviceExperts::forward`], except for invalid choices: the peers launch their backward, which waits for this one.
    pub unsafe fn backward(&self, backward: &ExpertsBackward) -> Result<(), MoeError> {
        let ExpertsBackward { tokens, x, grad_output, grad_x, grad_weights, gradients, state, .. } = *backward;
        if !self.layer.spec.training {
            return Err(MoeError::Usage { what: "run backward", why: "the layer was not made for training".into() });
        }
        let rows = [("x", x), ("grad_output", grad_output), ("grad_x", grad_x)];
        self.check_call(tokens, &rows, &[("grad_weights", grad_weights)])?;
        let pass = Pass {
            tokens: tokens as u32,
            accumulate: backward.accumulate.into(),
            narrow_output: backward.narrow_output.into(),
            x,
            grad_output,
            output: grad_x,
            // Without tokens the address may be 0. The kernels need another value, from which they detect that the caller routes.
            grad_weights: grad_weights.max(size_of::<f32>() as u64),
            ..Pass::zeroed()
        };
        let mut tables = self.tables(&backward.experts)?;
        let (addresses, strides) = self.arrays(&gradients, size_of::<f32>())?;
        tables.gradients = bytemuck::cast(addresses);
        tables.gradient_strides = bytemuck::cast(strides);
        let call = Call { pass, tables, state, stream: backward.stream, backward: true };
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(&call, &[Kernel::Backward]) }
    }

    /// Waits until the stream of the last call has completed all passes, and returns their error.
    ///
    /// # Errors
    ///
    /// Returns the error of a pass, or the driver's.
    pub fn finish(&self) -> Result<(), MoeError> {
        self.layer.gpu.synchronise()?;
        self.check_passes()
    }

    /// Returns the error of a pass that has ended, without waiting. An invalid expert id is reported once, and the layer can still be used.
    /// After any other error the layer cannot be used.
    ///
    /// # Errors
    ///
    /// Returns the error of a pass.
    pub fn check_passes(&self) -> Result<(), MoeError> {
        self.check_stopped()?;
        let Some(wrong) = self.error_at(offset_of!(HostErrors, routing)) else { return Ok(()) };
        self.errors.clear(offset_of!(HostErrors, routing));
        match wrong {
            MoeError::Usage { why, .. } => Err(MoeError::Usage { what: "route by the ids of an earlier pass", why }),
            other => Err(other),
        }
    }

    /// Returns the error of a pass that did not complete.
    fn check_stopped(&self) -> Result<(), MoeError> {
        self.error_at(offset_of!(HostErrors, stopped)).map_or(Ok(()), Err)
    }

    /// The error in the record at this offset in `HostErrors`.
    fn error_at(&self, offset: usize) -> Option<MoeError> {
        let layer = &self.layer;
        let me = layer.gpu.my_pe();
        let members = layer.groups.members(layer.groups.position(me).0);
        self.errors.read(offset).and_then(|record| report::error(&record, me, members, &layer.spec.options))
    }

    /// Returns an error unless a call has valid arguments and earlier passes completed.
    fn check_call(&self, tokens: usize, rows: &[(&str, u64)], choices: &[(&str, u64)]) -> Result<(), MoeError> {
        self.check_stopped()?;
        let max = self.layer.spec.max_tokens;
        if tokens > max {
            return Err(MoeError::Shape { what: "tokens".into(), got: tokens, expected: format!("at most {max}") });
        }
        check_aligned(rows, ROW_ALIGN)?;
        check_aligned(choices, size_of::<f32>() as u64)
    }

    /// The result of [`arrays`], after checking the alignment of the addresses.
    fn arrays(&self, of: &ExpertAddresses, element_bytes: usize) -> Result<([u64; 6], [u64; 6]), MoeError> {
        let ExpertAddresses { up, down, up_bias, down_bias } = *of;
        check_aligned(&[("up", up), ("down", down), ("up_bias", up_bias), ("down_bias", down_bias)], ROW_ALIGN)?;
        Ok(arrays(&self.layer.spec.config, of, element_bytes))
    }

    /// The layer's tables with these weights.
    fn tables(&self, experts: &ExpertAddresses) -> Result<Tables, MoeError> {
        let (addresses, strides) = self.arrays(experts, self.layer.spec.dtype.bytes())?;
        let (weights, weight_strides) = (bytemuck::cast(addresses), bytemuck::cast(strides));
        Ok(Tables { weights, weight_strides, host_errors: self.errors.address, ..self.layer.weights.tables })
    }

    /// Launches a pass.
    ///
    /// # Safety
    ///
    /// As for [`DeviceExperts::forward`] or [`DeviceExperts::backward`].
    unsafe fn run(&self, call: &Call, kernels: &[Kernel]) -> Result<(), MoeError> {
        let (layer, state) = (&self.layer, call.state);
        check_aligned(&[("state", state)], STATE_ALIGN)?;
        let gpu = layer.gpu;
        gpu.use_stream(call.stream)?;
        self.errors.stream.set(call.stream);
        let mut tables = call.tables;
        if layer.path == GemmPath::Hopper {
            tables.tensor_maps = state;
        }
        let (info, description) = lay_out(&layer.shape, &tables, state + self.local_at(), layer.symmetric.address())?;
        let x_bytes = (call.pass.tokens as usize * layer.spec.config.hidden * layer.spec.dtype.bytes()) as u64;
        let now = StateOrigin { state, state_bytes: self.state_bytes(), x: call.pass.x, x_bytes };
        let begin = BeginArgs {
            layer: state + LAYER_AT,
            origin: state + self.origin_at(),
            now,
            zero: info.local_zero,
            zero_bytes: info.local_zero_bytes,
            backward: call.backward.into(),
            unused: 0,
            weight_maps: self.weight_maps(&tables)?,
            slot_maps: self.slot_maps(&info)?,
        };
        let launch = info.launch(Kernel::BeginPass);
        let most = u64::from(2 * layer.shape.blocks);
        let pieces = if call.backward { 1 } else { info.local_zero_bytes / ROW_ALIGN };
        let grid = pieces.div_ceil(u64::from(launch.block)).clamp(1, most) as u32;
        let name = |kernel: Kernel| layer.names[kernel as usize].as_str();
        let argument = [description.as_slice(), bytemuck::bytes_of(&begin)].concat();
        // SAFETY: the kernel takes a `Layer` followed by `BeginArgs`. It writes the state, whose size the caller guarantees.
        unsafe { gpu.launch(name(Kernel::BeginPass), Launch { grid, ..launch }, &[&argument])? };
        let args = [bytemuck::bytes_of(&begin.layer), bytemuck::bytes_of(&call.pass)];
        for &kernel in kernels {
            // SAFETY: the kernels take the address of a `Layer`, which the first kernel writes, and a `Pass`. The caller
            // guarantees the addresses of both. Kernels validate ids and data from peers before they use them as an index.
            unsafe { gpu.launch(name(kernel), info.launch(kernel), &args)? };
        }
        // An emulated pass has ended here; that of a GPU may have.
        self.check_stopped()
    }

    fn weight_maps(&self, tables: &Tables) -> Result<[[u64; 16]; WEIGHT_MAPS], MoeError> {
        let layer = &self.layer;
        if layer.path != GemmPath::Hopper {
            return Ok([[0; 16]; WEIGHT_MAPS]);
        }
        let LayerConfig { hidden, expert, .. } = &layer.spec.config;
        let arrays = (bytemuck::cast(tables.weights), bytemuck::cast(tables.weight_strides));
        let experts = layer.shape.n_local as usize;
        Ok(bytemuck::cast(tensor_maps(layer.gpu, expert, *hidden, layer.spec.dtype, arrays, experts)?))
    }

    fn slot_maps(&self, info: &LayerInfo) -> Result<[[u64; 16]; SLOT_MAPS], MoeError> {
        let mut maps = [[0; 16]; SLOT_MAPS];
        for (map, array) in maps.iter_mut().zip(&info.slot_arrays).filter(|(_, array)| array.at != 0) {
            *map = bytemuck::cast(self.layer.gpu.tensor_map(TensorMap {
                base: array.base,
                rows: array.rows,
                cols: array.cols,
                row_stride_bytes: array.row_stride_bytes,
                items: 0,
                item_stride_bytes: 0,
                box_rows: array.box_rows,
                box_cols: TENSOR_MAP_BOX,
                element_bytes: self.layer.spec.dtype.bytes() as u32,
            })?);
        }
        Ok(maps)
    }

    /// Frees the symmetric memory (collective).
    ///
    /// # Errors
    ///
    /// Returns an error if a peer does not join.
    pub fn free(self) -> Result<(), MoeError> {
        let DeviceExperts { layer, errors } = self;
        drop(errors);
        layer.free()
    }
}

/// Addresses of the first expert's gate, up and down matrices and of their biases, and the byte strides from one expert to the next; 0 for
/// missing arrays.
fn arrays(config: &LayerConfig, of: &ExpertAddresses, element_bytes: usize) -> ([u64; 6], [u64; 6]) {
    let (h, i, gated) = (config.hidden, config.expert.intermediate, config.expert.gated);
    let wide = if gated { 2 * i } else { i };
    // The rows of up follow those of gate.
    let first = if gated { i } else { 0 };
    let (matrix, bias) = (h * element_bytes, size_of::<f32>());
    let all = [
        (of.up, 0, wide * matrix, gated),
        (of.up, first * matrix, wide * matrix, true),
        (of.down, 0, i * matrix, true),
        (of.up_bias, 0, wide * bias, gated && config.expert.bias),
        (of.up_bias, first * bias, wide * bias, config.expert.bias),
        (of.down_bias, 0, h * bias, config.expert.bias),
    ];
    let is = |value: u64, exists: bool| if exists { value } else { 0 };
    (
        all.map(|(base, offset, _, exists)| is(base + offset as u64, exists)),
        all.map(|(_, _, stride, exists)| is(stride as u64, exists)),
    )
}

fn check_aligned(addresses: &[(&str, u64)], to: u64) -> Result<(), MoeError> {
    let Some((name, address)) = addresses.iter().find(|(_, address)| address % to != 0) else { return Ok(()) };
    let why = format!("{name} is at address {address:#x}, expected a multiple of {to}");
    Err(MoeError::Usage { what: "run a pass", why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::spec::{Activation, MlpConfig, RouterConfig};

    #[test]
    fn experts_arrays_follow_each_other() {
        let mut config = LayerConfig::new(16, 4, RouterConfig::external(2), MlpConfig::gated(8, Activation::Silu));
        config.expert.bias = true;
        let of = ExpertAddresses { up: 0x1000, down: 0x2000, up_bias: 0x3000, down_bias: 0x4000 };
        let (addresses, strides) = arrays(&config, &of, 2);
        assert_eq!(addresses, [0x1000, 0x1000 + 8 * 32, 0x2000, 0x3000, 0x3000 + 8 * 4, 0x4000]);
        assert_eq!(strides, [16 * 32, 16 * 32, 8 * 32, 16 * 4, 16 * 4, 16 * 4]);
        (config.expert.gated, config.expert.bias) = (false, false);
        let (addresses, strides) = arrays(&config, &of, 4);
        assert_eq!(addresses, [0, 0x1000, 0x2000, 0, 0, 0]);
        assert_eq!(strides, [0, 8 * 64, 8 * 64, 0, 0, 0]);
    }

    #[test]
    fn unaligned_address_is_named() {
        let line = check_aligned(&[("x", 32), ("output", 40)], 16).unwrap_err().to_string();
        assert!(line.contains("output is at address 0x28, expected a multiple of 16"), "{line}");
    }
}
