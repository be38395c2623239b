//! The layer on a device: the same protocol, run by the kernels of `kernels/` (`docs/kernels.md`).
//!
//! [`DeviceLayer::forward`] and [`DeviceLayer::backward`] launch kernels and return at once; nothing between them waits for
//! the device, and no count comes to the host. [`DeviceLayer::finish`] waits, and says how the last pass went.

mod record;
mod report;
mod shape;
mod weights;

use bytemuck::Zeroable;

pub use record::RecordedStep;
pub use shape::{DeviceOptions, GemmPath, check, symmetric_bytes};
pub use weights::to_elements;

use report::PassTimes;
use shape::{ShapeOf, place};
use weights::{DeviceWeights, Router};

use super::spec::metrics::PassOutcome;
use super::spec::{Dtype, Gradients, LayerConfig, Load, MoeError, Options, Placement, WeightSource};
use crate::gpu::params::{ErrorRecord, Kernel, LayerInfo, LayerShape, MAX_SPANS, Pass, PassStats, SpanRecord};
use crate::gpu::{Buffer, Gpu, GpuError, Launch, SymmetricBuffer};

/// The marks of a pass: its begin, the persistent kernel's, the persistent kernel's end, the begin of the all-reduce, the end.
const MARKS: [usize; 5] = [0, 1, 2, 3, 4];

/// The kernels of a forward and of a backward pass, in order.
const FORWARD: [Kernel; 3] = [Kernel::Route, Kernel::Plan, Kernel::Forward];
const BACKWARD: [Kernel; 4] = [Kernel::Backward, Kernel::RouteBackward, Kernel::RouterGradients, Kernel::AllReduce];

/// The kernels of a layer that waits of one block for another are in.
const COOPERATIVE: [Kernel; 4] = [Kernel::Plan, Kernel::Forward, Kernel::Backward, Kernel::AllReduce];

/// One PE's part of a MoE layer on its device.
///
/// As for [`Layer`](super::Layer), every PE makes it with the same configuration, and calls the same passes in the same
/// order, with as many tokens as it likes. After an error it is not usable.
pub struct DeviceLayer<'g> {
    gpu: &'g dyn Gpu,
    config: LayerConfig,
    placement: Placement,
    options: Options,
    dtype: Dtype,
    shape: LayerShape,
    path: GemmPath,
    /// With addresses relative to the blocks' beginnings.
    sizes: LayerInfo,
    weights: DeviceWeights<'g>,
    symmetric: SymmetricBuffer<'g>,
    trace: bool,
    spare: Vec<DeviceSaved<'g>>,
}

/// What a forward pass leaves for its backward, on the device.
pub struct DeviceSaved<'g> {
    local: Buffer<'g>,
    layer: Buffer<'g>,
    info: LayerInfo,
    tokens: usize,
}

impl DeviceSaved<'_> {
    /// Tokens of the pass.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Where an address of the information about the layer is in its block.
    fn at(&self, address: u64) -> u64 {
        address - self.local.address()
    }
}

impl<'g> DeviceLayer<'g> {
    /// Loads the weights that this PE holds to its device and allocates the symmetric memory (collective). Without `training`
    /// there is no memory for backward.
    ///
    /// # Errors
    /// What no device runs, or not this one; weights that cannot be loaded; too little memory; a peer that does not come.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        gpu: &'g dyn Gpu,
        source: &dyn WeightSource,
        placement: Placement,
        dtype: Dtype,
        max_tokens: usize,
        training: bool,
        options: Options,
        device: &DeviceOptions,
    ) -> Result<Self, MoeError> {
        let config = source.config().clone();
        config.validate()?;
        options.validate()?;
        check(&config, dtype)?;
        for (what, got, expected) in [
            ("the placement's list of PEs", placement.n_pes(), gpu.n_pes()),
            ("the placement's list of experts", placement.n_experts(), config.n_experts),
        ] {
            if got != expected {
                return Err(MoeError::Shape { what: what.into(), got, expected: expected.to_string() });
            }
        }
        let limits = gpu.limits()?;
        let router = Router::load(source, dtype)?;
        let shape_of = ShapeOf {
            config: &config,
            placement: &placement,
            options: &options,
            device,
            dtype,
            my_pe: gpu.my_pe(),
            max_tokens,
            training,
            all_reachable: gpu.all_reachable()?,
            router_parts: router.parts(),
        };
        let path = shape_of.path(&limits);
        if path == GemmPath::Hopper && !limits.hopper() {
            let (major, minor) = limits.capability;
            return Err(
                GpuError::Unavailable(format!("this device, of capability {major}.{minor}, is no Hopper")).into()
            );
        }
        // How much shared memory a block takes does not depend on how many there are; how many run at once depends on it.
        let probe = shape_of.shape(&limits, 2)?;
        let mut weights = DeviceWeights::new(gpu, source, &placement, dtype, path, training, &router)?;
        let (probed, _) = place(&probe, &weights.tables, 0, 0)?;
        let mut blocks = u32::MAX;
        for kernel in
            COOPERATIVE.into_iter().filter(|&k| training || !matches!(k, Kernel::Backward | Kernel::AllReduce))
        {
            let Launch { block, shared_bytes, .. } = probed.launch(kernel);
            blocks = blocks.min(gpu.resident_blocks(kernel.on(path.is_hopper(), probe.dtype), block, shared_bytes)?);
        }
        for kernel in Kernel::ALL {
            let wanted = probed.launch(kernel).shared_bytes;
            if wanted > limits.shared_bytes_per_block {
                let has = limits.shared_bytes_per_block;
                let message = format!("a block takes {wanted} bytes of shared memory, and the device has {has}");
                return Err(GpuError::failed(format!("launch {}", kernel.name()), message).into());
            }
        }
        if blocks < 2 {
            let message = format!("only {blocks} of its blocks run at a time, and the layer needs 2");
            return Err(GpuError::failed("run the layer on this device", message).into());
        }
        let shape = shape_of.shape(&limits, blocks)?;
        let (sizes, _) = place(&shape, &weights.tables, 0, 0)?;

        let symmetric = SymmetricBuffer::new(gpu, sizes.symmetric_bytes)?;
        symmetric.zero(sizes.signals, sizes.signal_bytes)?;
        weights.set_peers(gpu, &symmetric)?;
        let mut layer = DeviceLayer {
            gpu,
            config,
            placement,
            options,
            dtype,
            shape,
            path,
            sizes,
            weights,
            symmetric,
            trace: false,
            spare: Vec::new(),
        };
        layer.reserve(1)?;
        // Nobody may signal before every PE's signal words are zero.
        gpu.barrier(layer.options.wait_limit)?;
        Ok(layer)
    }

    /// Sees to it that `forwards` forward passes can wait for their backward without an allocation in a step.
    ///
    /// # Errors
    /// Too little memory.
    pub fn reserve(&mut self, forwards: usize) -> Result<(), MoeError> {
        while self.spare.len() < forwards {
            let state = self.new_state()?;
            self.spare.push(state);
        }
        Ok(())
    }

    fn new_state(&self) -> Result<DeviceSaved<'g>, MoeError> {
        let local = Buffer::new(self.gpu, self.sizes.local_bytes)?;
        let (info, layer) = place(&self.shape, &self.weights.tables, local.address(), self.symmetric.address())?;
        local.zero(info.local_zero - local.address(), info.local_zero_bytes)?;
        Ok(DeviceSaved { layer: Buffer::from_slice(self.gpu, &layer)?, local, info, tokens: 0 })
    }

    /// The layer's configuration.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// Where the experts live.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// What the layer is to the kernels.
    pub fn shape(&self) -> &LayerShape {
        &self.shape
    }

    /// The matrix products that run.
    pub fn path(&self) -> GemmPath {
        self.path
    }

    /// Symmetric memory of this PE, bytes.
    pub fn symmetric_bytes(&self) -> u64 {
        self.symmetric.bytes()
    }

    /// Device memory of weights, gradients and tables, and of one forward pass, bytes.
    pub fn device_bytes(&self) -> (u64, u64) {
        (self.weights.bytes, self.sizes.local_bytes + self.sizes.layer_bytes)
    }

    /// Records what every block does when, from the next pass on.
    pub fn record_spans(&mut self) {
        self.trace = true;
    }

    /// Launches `output = sum over chosen experts of weight * expert(x), plus the shared expert`, for the first `tokens` rows
    /// of `x` (`[tokens, hidden]` of the layer's element type) into those of `output` (f32). Give what it returns to
    /// [`DeviceLayer::recycle`] if there is to be no backward.
    ///
    /// # Errors
    /// Buffers too small, more tokens than the layer was made for; the driver's.
    pub fn forward(&mut self, x: &Buffer<'g>, tokens: usize, output: &Buffer<'g>) -> Result<DeviceSaved<'g>, MoeError> {
        let saved = self.begin(x, tokens, output)?;
        let pass = Pass { x: x.address(), output: output.address(), ..self.pass(&saved) };
        self.gpu.mark(MARKS[0])?;
        self.launch(&saved, &pass, &FORWARD[..2])?;
        self.gpu.mark(MARKS[1])?;
        self.launch(&saved, &pass, &FORWARD[2..])?;
        for mark in &MARKS[2..] {
            self.gpu.mark(*mark)?;
        }
        Ok(saved)
    }

    /// Launches the backward of the forward pass that returned `saved`, whose input `x` must still hold what it held then: from
    /// the gradient of the output (the layer's element type) that of the input (f32), and those of the weights, which
    /// [`DeviceLayer::gradients`] reads. The losses count with their coefficients. Once per forward: it overwrites what that
    /// left.
    ///
    /// # Errors
    /// Buffers too small; a layer that was not made for training; the driver's.
    pub fn backward(
        &mut self,
        saved: &DeviceSaved<'g>,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &Buffer<'g>,
    ) -> Result<(), MoeError> {
        let pass = self.backward_pass(saved, x, grad_output, grad_input)?;
        self.gpu.mark(MARKS[0])?;
        self.gpu.mark(MARKS[1])?;
        self.launch(saved, &pass, &BACKWARD[..1])?;
        self.gpu.mark(MARKS[2])?;
        self.launch(saved, &pass, &BACKWARD[1..3])?;
        self.gpu.mark(MARKS[3])?;
        self.launch(saved, &pass, &BACKWARD[3..])?;
        self.gpu.mark(MARKS[4])?;
        Ok(())
    }

    /// Keeps the memory of a forward pass for the next one.
    pub fn recycle(&mut self, saved: DeviceSaved<'g>) {
        self.spare.push(saved);
    }

    /// Waits until the last pass, which was on `saved`, is done; what it took and sent.
    ///
    /// # Errors
    /// A peer that did not do its part in time or sent what cannot be; the driver's.
    pub fn finish(&mut self, saved: &DeviceSaved<'g>) -> Result<PassOutcome, MoeError> {
        self.gpu.synchronise()?;
        let (local, info) = (&saved.local, &saved.info);
        let mut record = ErrorRecord::zeroed();
        local.read(saved.at(info.error), std::slice::from_mut(&mut record))?;
        if let Some(error) = report::error(&record, self.gpu.my_pe(), &self.options) {
            return Err(error);
        }
        let mut stats = PassStats::zeroed();
        local.read(saved.at(info.stats), std::slice::from_mut(&mut stats))?;
        let mut spans = Vec::new();
        if self.trace {
            let count = local.read_vec::<u32>(saved.at(info.span_count), 1)?[0] as usize;
            spans = local.read_vec::<SpanRecord>(saved.at(info.spans), count.min(MAX_SPANS))?;
            local.zero(saved.at(info.span_count), size_of::<u32>() as u64)?;
        }
        let router = self.gpu.elapsed(MARKS[0], MARKS[1])? + self.gpu.elapsed(MARKS[2], MARKS[3])?;
        let layer = self.gpu.elapsed(MARKS[1], MARKS[2])?;
        let all_reduce = self.gpu.elapsed(MARKS[3], MARKS[4])?;
        Ok(report::outcome(&stats, PassTimes { router, layer, all_reduce }, &spans))
    }

    /// The experts chosen for each token in a forward pass, ascending, `[tokens, top_k]`.
    ///
    /// # Errors
    /// The driver's.
    pub fn chosen(&self, saved: &DeviceSaved<'g>) -> Result<Vec<u32>, MoeError> {
        let len = saved.tokens * self.config.router.top_k;
        Ok(saved.local.read_vec(saved.at(saved.info.chosen), len)?)
    }

    /// Their weights, `[tokens, top_k]`.
    ///
    /// # Errors
    /// The driver's.
    pub fn routing_weights(&self, saved: &DeviceSaved<'g>) -> Result<Vec<f32>, MoeError> {
        let len = saved.tokens * self.config.router.top_k;
        Ok(saved.local.read_vec(saved.at(saved.info.routing_weights), len)?)
    }

    /// Rows that each local expert got in a forward pass.
    ///
    /// # Errors
    /// The driver's.
    pub fn expert_rows(&self, saved: &DeviceSaved<'g>) -> Result<Vec<u32>, MoeError> {
        Ok(saved.local.read_vec(saved.at(saved.info.expert_rows), self.shape.n_local as usize)?)
    }

    /// What the losses of a forward pass are computed from, over all PEs' tokens; empty where no loss has a coefficient.
    ///
    /// # Errors
    /// The driver's.
    pub fn load(&self, saved: &DeviceSaved<'g>) -> Result<Load, MoeError> {
        if !self.config.has_losses() {
            return Ok(Load::default());
        }
        let n = self.config.n_experts;
        let sums: Vec<f64> = saved.local.read_vec(saved.at(saved.info.loss_sums), 2 + 2 * n)?;
        Ok(Load {
            tokens: sums[0] as u64,
            z_sum: sums[1],
            routed: sums[2..2 + n].iter().map(|&r| r as u64).collect(),
            prob_sums: sums[2 + n..].to_vec(),
        })
    }

    /// The gradients that the last backward left.
    ///
    /// # Errors
    /// A layer that was not made for training; the driver's.
    pub fn gradients(&self) -> Result<Gradients, MoeError> {
        let read = self.weights.gradients(&self.config, &self.placement, self.gpu.my_pe())?;
        read.ok_or_else(|| GpuError::failed("read gradients", "the layer was made without training").into())
    }

    /// Frees the symmetric memory (collective); dropped without it, the layer leaves that to the end of the PE.
    ///
    /// # Errors
    /// A peer that does not come.
    pub fn free(self) -> Result<(), MoeError> {
        let DeviceLayer { symmetric, options, .. } = self;
        Ok(symmetric.free(options.wait_limit)?)
    }

    /// A state for a forward pass over these buffers, which fit.
    fn begin(&mut self, x: &Buffer<'g>, tokens: usize, output: &Buffer<'g>) -> Result<DeviceSaved<'g>, MoeError> {
        if tokens > self.shape.max_tokens as usize {
            let expected = format!("at most {}", self.shape.max_tokens);
            return Err(MoeError::Shape { what: "the batch of tokens".into(), got: tokens, expected });
        }
        self.check_rows("hidden_states", x, tokens, self.dtype.bytes())?;
        self.check_rows("output", output, tokens, size_of::<f32>())?;
        let mut saved = match self.spare.pop() {
            Some(state) => state,
            None => self.new_state()?,
        };
        saved.tokens = tokens;
        Ok(saved)
    }

    /// The backward of a forward pass, over buffers that fit.
    fn backward_pass(
        &self,
        saved: &DeviceSaved<'g>,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &Buffer<'g>,
    ) -> Result<Pass, MoeError> {
        if self.shape.training == 0 {
            return Err(GpuError::failed("run backward", "the layer was made without training").into());
        }
        let tokens = saved.tokens;
        self.check_rows("hidden_states", x, tokens, self.dtype.bytes())?;
        self.check_rows("grad_output", grad_output, tokens, self.dtype.bytes())?;
        self.check_rows("grad_hidden_states", grad_input, tokens, size_of::<f32>())?;
        let (x, grad_output, output) = (x.address(), grad_output.address(), grad_input.address());
        Ok(Pass { x, grad_output, output, ..self.pass(saved) })
    }

    fn pass(&self, saved: &DeviceSaved<'g>) -> Pass {
        Pass { tokens: saved.tokens as u32, trace: self.trace.into(), ..Pass::zeroed() }
    }

    fn launch(&self, saved: &DeviceSaved<'g>, pass: &Pass, kernels: &[Kernel]) -> Result<(), GpuError> {
        let args = [bytemuck::bytes_of(&saved.layer.address()).to_vec(), bytemuck::bytes_of(pass).to_vec()];
        kernels.iter().try_for_each(|kernel| {
            let (name, launch) = (kernel.on(self.path.is_hopper(), self.shape.dtype), saved.info.launch(*kernel));
            // SAFETY: every kernel of a layer takes the address of a `Layer` and a `Pass`. The first is `place`'s, over blocks of
            // the sizes it asked for and tables of this layer, all of which live as long as `self`; the rows of the second
            // were checked, and buffers wait for what is launched before they change.
            unsafe { self.gpu.launch(name, launch, &[&args[0], &args[1]]) }
        })
    }

    fn check_rows(&self, what: &'static str, rows: &Buffer<'g>, tokens: usize, bytes: usize) -> Result<(), MoeError> {
        let wanted = tokens * self.config.hidden;
        let got = rows.bytes() as usize / bytes;
        if got < wanted {
            return Err(MoeError::Shape { what: what.into(), got, expected: format!("at least {wanted}") });
        }
        Ok(())
    }
}
