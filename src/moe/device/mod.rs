//! The layer on a device: the kernels in `kernels/` run the same protocol as the CPU layer (`docs/kernels.md`).
//!
//! A pass launches kernels and returns at once. The host neither waits for the device between passes nor reads counts
//! from it; [`MoeLayer::finish`](super::MoeLayer::finish) waits and returns the outcome of the last pass.

mod elements;
mod experts;
mod pass;
mod record;
mod relays;
mod report;
mod saved;
mod shape;
mod states;
mod sums;
mod tensor_maps;
mod tiles;
mod weights;
mod windows;

use std::sync::atomic::{AtomicU64, Ordering};

pub use elements::to_elements;
pub use experts::{DeviceExperts, ExpertAddresses, ExpertsBackward, ExpertsForward};
pub use record::{RecordedLayer, RecordedPass};
pub use saved::DeviceSaved;
pub use shape::{DeviceOptions, check, symmetric_bytes};
pub use tiles::{GemmPath, Tile};

use relays::Relays;
use shape::{MAX_ROUTER_PARTS, ShapeOf, lay_out};
use sums::sums;
use weights::DeviceWeights;

use super::spec::{Groups, LayerSpec, MoeError, WeightSource};
use crate::gpu::params::{KERNELS, Kernel, LayerInfo, LayerShape};
use crate::gpu::{Gpu, GpuError, SymmetricBuffer};

/// Kernels that are launched only in training.
const BACKWARD_ONLY: [Kernel; 5] =
    [Kernel::Backward, Kernel::RouteBackward, Kernel::RouterGradients, Kernel::AllReduce, Kernel::Accumulate];

/// One PE's part of an MoE layer on its device.
///
/// Its passes are those of [`MoeLayer`](super::MoeLayer), over [`Buffer`](crate::gpu::Buffer)s of its device.
pub struct DeviceLayer<'g> {
    gpu: &'g dyn Gpu,
    spec: LayerSpec,
    groups: Groups,
    /// This PE's index in its group.
    me: usize,
    /// Unique in this process.
    id: u64,
    shape: LayerShape,
    /// Incremented when `shape` changes. The state of each forward pass has a copy of the layer's description, and the version from which
    /// it was made.
    version: u64,
    path: GemmPath,
    /// Names of the layer's kernels, in the order of [`Kernel::ALL`].
    names: [String; KERNELS],
    /// Sizes of the memory blocks, and addresses relative to the start of each block.
    sizes: LayerInfo,
    weights: DeviceWeights<'g>,
    symmetric: SymmetricBuffer<'g>,
    trace: bool,
    pool: Vec<DeviceSaved<'g>>,
}

impl<'g> DeviceLayer<'g> {
    /// Loads the weights that this PE holds to its device, and allocates the symmetric memory (collective).
    ///
    /// # Errors
    ///
    /// Returns an error if devices, or this device, do not support the configuration, if weights cannot be loaded, if
    /// allocation fails, or if a peer does not join.
    pub fn new(
        gpu: &'g dyn Gpu,
        spec: LayerSpec,
        source: &dyn WeightSource,
        device: &DeviceOptions,
    ) -> Result<Self, MoeError> {
        let mut layer = Self::build(gpu, spec, Some(source), device)?;
        layer.reserve(1)?;
        // No PE may signal before the signal words of all PEs are zero.
        gpu.barrier(layer.spec.options.wait_limit)?;
        Ok(layer)
    }

    /// Makes the layer without states of passes and without a barrier. Without a source, the caller owns weights and gradients, and passes
    /// their addresses to each pass.
    fn build(
        gpu: &'g dyn Gpu,
        spec: LayerSpec,
        source: Option<&dyn WeightSource>,
        device: &DeviceOptions,
    ) -> Result<Self, MoeError> {
        static LAYERS: AtomicU64 = AtomicU64::new(0);
        let (my_pe, n_pes) = (gpu.my_pe(), gpu.n_pes());
        let groups = device.groups(&spec, my_pe, n_pes)?;
        let (group, me) = groups.position(my_pe);
        check(&spec.config, spec.dtype, &spec.options)?;
        let limits = gpu.limits()?;
        let available = limits.multiprocessors;
        let limits = device.without_spare(limits)?;
        let all_reachable = gpu.all_reachable()?;
        let router_parts = MAX_ROUTER_PARTS;
        let mut shape_of = ShapeOf { spec: &spec, device, groups: &groups, my_pe, all_reachable, router_parts };
        let path = shape_of.path(&limits);
        if path == GemmPath::Hopper && !limits.hopper() {
            let (major, minor) = limits.capability;
            return Err(
                GpuError::Unavailable(format!("this device, of capability {major}.{minor}, is no Hopper")).into()
            );
        }
        // The number of resident blocks depends on the shared memory per block. That does not depend on the number of blocks, so any number
        // will do here. It is largest with the maximum number of planes of the router's weights.
        let probe = shape_of.shape(&limits, 2)?;
        let mut weights = match source {
            Some(source) => DeviceWeights::new(gpu, &spec, me, source, path)?,
            None => DeviceWeights::of_caller(gpu, &spec, me, path)?,
        };
        let (probed, _) = lay_out(&probe, &weights.tables, 0, 0)?;
        let infix = shape_of.tile(&limits)?.infix();
        let names = Kernel::ALL.map(|kernel| kernel.on(infix, probe.dtype));
        let (mut blocks, mut cluster) = (u32::MAX, 1);
        for kernel in Kernel::ALL.into_iter().filter(|kernel| spec.training || !BACKWARD_ONLY.contains(kernel)) {
            let launch = probed.launch(kernel);
            let shared_bytes = launch.shared_bytes;
            if shared_bytes > limits.shared_bytes_per_block {
                let has = limits.shared_bytes_per_block;
                let message = format!("a block takes {shared_bytes} bytes of shared memory, and the device has {has}");
                return Err(GpuError::failed(format!("launch {}", kernel.name()), message).into());
            }
            let name = &names[kernel as usize];
            gpu.prepare(name, shared_bytes)?;
            if launch.cooperative != 0 {
                blocks = blocks.min(gpu.resident_blocks(name, launch)?);
                cluster = cluster.max(launch.cluster);
            }
        }
        if limits.multiprocessors < available {
            // Blocks are placed on the least loaded multiprocessor, so more blocks than this would take some of the spare ones, even if two
            // of them fit on one. Other kernels, such as NCCL's, need registers of a whole multiprocessor.
            blocks = blocks.min(limits.multiprocessors) / cluster * cluster;
        }
        if blocks < 2 {
            let message = format!("only {blocks} of its blocks run at a time, and the layer needs 2");
            return Err(GpuError::failed("run the layer on this device", message).into());
        }
        shape_of.router_parts = weights.router_parts;
        let shape = shape_of.shape(&limits, blocks)?;
        let (sizes, _) = lay_out(&shape, &weights.tables, 0, 0)?;

        let symmetric = SymmetricBuffer::new(gpu, shape_of.symmetric_bytes(&limits, blocks)?)?;
        symmetric.zero(sizes.signals, sizes.signal_bytes)?;
        let relays = Relays::new(&spec.placement, &spec.options.hosts);
        weights.set_peers(gpu, &symmetric, groups.members(group), &relays)?;
        if spec.training {
            weights.set_sums(gpu, &sums(&shape, &groups))?;
        }
        let id = LAYERS.fetch_add(1, Ordering::Relaxed);
        let (version, trace, pool) = (0, false, Vec::new());
        Ok(DeviceLayer {
            gpu,
            spec,
            groups,
            me,
            id,
            shape,
            version,
            path,
            names,
            sizes,
            weights,
            symmetric,
            trace,
            pool,
        })
    }

    /// Allocates states for `forwards` forward passes, so that this many passes can wait for their backward without an allocation during a
    /// step.
    ///
    /// # Errors
    ///
    /// Returns an error if allocation fails.
    pub fn reserve(&mut self, forwards: usize) -> Result<(), MoeError> {
        while self.pool.len() < forwards {
            let state = DeviceSaved::new(self)?;
            self.pool.push(state);
        }
        Ok(())
    }

    /// The layer's shape as passed to the kernels.
    pub fn shape(&self) -> &LayerShape {
        &self.shape
    }

    /// The GEMM path in use.
    pub fn path(&self) -> GemmPath {
        self.path
    }

    /// The GEMM tile in use.
    pub fn tile(&self) -> Tile {
        Tile { rows: self.shape.tile_m, columns: self.shape.tile_n }
    }

    /// Symmetric memory of this PE, bytes.
    pub fn symmetric_bytes(&self) -> u64 {
        self.symmetric.bytes()
    }

    /// Device memory, bytes: that of weights, gradients and tables, and that of one forward pass's state.
    pub fn device_bytes(&self) -> (u64, u64) {
        (self.weights.bytes, self.sizes.local_bytes + self.sizes.layer_bytes)
    }

    /// Frees the symmetric memory (collective). A layer that is dropped instead leaves it allocated until the PE ends.
    ///
    /// # Errors
    ///
    /// Returns an error if a peer does not join.
    pub fn free(self) -> Result<(), MoeError> {
        let DeviceLayer { symmetric, spec, .. } = self;
        Ok(symmetric.free(spec.options.wait_limit)?)
    }
}
