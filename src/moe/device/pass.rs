//! Passes of a layer on a device: argument checks, launches, and reading the outcome.

use bytemuck::Zeroable;

use super::report::{self, DevicePassTimes};
use super::saved::RoutedBy;
use super::{DeviceLayer, DeviceSaved, to_elements};
use crate::gpu::params::{ErrorRecord, Kernel, MAX_SPANS, Pass, PassStats, SpanRecord};
use crate::gpu::{Buffer, GpuError};
use crate::moe::metrics::PassOutcome;
use crate::moe::spec::{Gradients, LayerSpec, Load, Mode, MoeError, MoeLayer, Routed, WeightId};

/// The kernels of a pass in launch order, grouped by the phase to which their time is added.
pub(super) struct PassKernels {
    /// Router and plan.
    before: &'static [Kernel],
    /// The persistent kernel.
    layer: Kernel,
    /// The router's backward.
    after: &'static [Kernel],
    /// Sums over PEs.
    reduce: &'static [Kernel],
}

const FORWARD: PassKernels =
    PassKernels { before: &[Kernel::Route, Kernel::Plan], layer: Kernel::Forward, after: &[], reduce: &[] };
/// Forward with losses and several groups.
const FORWARD_WITH_LOSSES: PassKernels = PassKernels { reduce: &[Kernel::SumLosses], ..FORWARD };
const BACKWARD: PassKernels = PassKernels {
    before: &[],
    layer: Kernel::Backward,
    after: &[Kernel::RouteBackward, Kernel::RouterGradients],
    reduce: &[Kernel::AllReduce],
};

/// If the caller routes, the router and the shared expert are not used, so only gradients of experts are summed over PEs.
const EXPERTS: PassKernels =
    PassKernels { before: &[Kernel::TakeRouting, Kernel::Plan], layer: Kernel::Forward, after: &[], reduce: &[] };
const EXPERTS_BACKWARD: PassKernels = PassKernels { before: &[], layer: Kernel::Backward, after: &[], reduce: &[] };
const EXPERTS_BACKWARD_SUMMED: PassKernels = PassKernels { reduce: &[Kernel::AllReduce], ..EXPERTS_BACKWARD };

/// The events of a pass: start of the pass, start and end of the persistent kernel, start of the sums over PEs, and end of the pass.
const MARKS: [usize; 5] = [0, 1, 2, 3, 4];

/// A pass whose arguments have been checked against the layer.
pub(super) struct CheckedPass {
    pub(super) pass: Pass,
    pub(super) stages: &'static PassKernels,
    pub(super) by: RoutedBy,
}

/// Expected length of an argument.
#[derive(Clone, Copy)]
struct Expect {
    what: &'static str,
    elements: usize,
    /// Bytes per element.
    bytes: usize,
}

impl<'g> DeviceLayer<'g> {
    /// Checks the arguments of a forward pass.
    pub(super) fn check_forward(&self, x: &Buffer<'g>, output: &Buffer<'g>) -> Result<CheckedPass, MoeError> {
        if self.spec.config.router.external {
            let why = "the layer has no router: the caller routes, by experts".into();
            return Err(MoeError::Usage { what: "run forward", why });
        }
        let tokens = self.check_tokens(x)?;
        self.check_rows("output", output, tokens, size_of::<f32>())?;
        let pass = Pass { x: x.address(), output: output.address(), ..self.pass(tokens) };
        let gathers_losses = self.spec.config.has_losses() && self.groups.len() > 1;
        let stages = if gathers_losses { &FORWARD_WITH_LOSSES } else { &FORWARD };
        Ok(CheckedPass { pass, stages, by: RoutedBy::Layer })
    }

    /// Checks the arguments of the backward of a forward pass with `tokens` tokens.
    pub(super) fn check_backward(
        &self,
        tokens: usize,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &Buffer<'g>,
    ) -> Result<CheckedPass, MoeError> {
        self.check_training("run backward")?;
        self.check_rows("hidden_states", x, tokens, self.spec.dtype.bytes())?;
        self.check_rows("grad_output", grad_output, tokens, self.spec.dtype.bytes())?;
        self.check_rows("grad_hidden_states", grad_input, tokens, size_of::<f32>())?;
        let (x, grad_output, output) = (x.address(), grad_output.address(), grad_input.address());
        let pass = Pass { x, grad_output, output, ..self.pass(tokens) };
        Ok(CheckedPass { pass, stages: &BACKWARD, by: RoutedBy::Layer })
    }

    /// Checks the arguments of a forward pass with the caller's routing.
    pub(super) fn check_experts(
        &self,
        x: &Buffer<'g>,
        ids: &Buffer<'g>,
        weights: &Buffer<'g>,
        output: &Buffer<'g>,
    ) -> Result<CheckedPass, MoeError> {
        let tokens = self.check_tokens(x)?;
        self.check_choices("ids", ids, tokens)?;
        self.check_choices("weights", weights, tokens)?;
        self.check_rows("output", output, tokens, size_of::<f32>())?;
        let (x, ids, weights, output) = (x.address(), ids.address(), weights.address(), output.address());
        let pass = Pass { x, ids, weights, output, ..self.pass(tokens) };
        Ok(CheckedPass { pass, stages: &EXPERTS, by: RoutedBy::Caller })
    }

    /// Checks the arguments of the backward of a forward pass with the caller's routing.
    pub(super) fn check_experts_backward(
        &self,
        tokens: usize,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &Buffer<'g>,
        grad_weights: &Buffer<'g>,
    ) -> Result<CheckedPass, MoeError> {
        self.check_choices("grad_weights", grad_weights, tokens)?;
        let CheckedPass { pass, .. } = self.check_backward(tokens, x, grad_output, grad_input)?;
        let pass = Pass { grad_weights: grad_weights.address(), ..pass };
        let stages = if self.shape.summed == 1 { &EXPERTS_BACKWARD_SUMMED } else { &EXPERTS_BACKWARD };
        Ok(CheckedPass { pass, stages, by: RoutedBy::Caller })
    }

    fn check_training(&self, what: &'static str) -> Result<(), MoeError> {
        match self.spec.training {
            true => Ok(()),
            false => Err(MoeError::Usage { what, why: "the layer was not made for training".into() }),
        }
    }

    /// Checks the length of an input, and returns its number of tokens.
    fn check_tokens(&self, x: &Buffer<'g>) -> Result<usize, MoeError> {
        let (hidden, bytes) = (self.spec.config.hidden, self.spec.dtype.bytes());
        let (tokens, max) = (x.bytes() as usize / bytes / hidden, self.spec.max_tokens * hidden);
        if x.bytes() as usize != tokens * hidden * bytes || tokens * hidden > max {
            let got = x.bytes() as usize / bytes;
            let expected = format!("a multiple of {hidden}, the hidden size, up to {max}");
            return Err(MoeError::Shape { what: "hidden_states".into(), got, expected });
        }
        self.check_rows("hidden_states", x, tokens, bytes)?;
        Ok(tokens)
    }

    fn check_choices(&self, what: &'static str, choices: &Buffer<'g>, tokens: usize) -> Result<(), MoeError> {
        let elements = tokens * self.spec.config.router.top_k;
        self.check_buffer(choices, Expect { what, elements, bytes: size_of::<f32>() })
    }

    fn check_rows(&self, what: &'static str, rows: &Buffer<'g>, tokens: usize, bytes: usize) -> Result<(), MoeError> {
        self.check_buffer(rows, Expect { what, elements: tokens * self.spec.config.hidden, bytes })
    }

    /// Checks that a buffer is on this device and has the expected length.
    fn check_buffer(&self, buffer: &Buffer<'g>, expect: Expect) -> Result<(), MoeError> {
        let Expect { what, elements, bytes } = expect;
        if !buffer.is_on(self.gpu) {
            return Err(MoeError::Usage { what: "run a pass", why: format!("{what} is memory of another device") });
        }
        if buffer.bytes() != (elements * bytes) as u64 {
            let got = buffer.bytes() as usize / bytes;
            return Err(MoeError::Shape { what: what.into(), got, expected: elements.to_string() });
        }
        Ok(())
    }

    fn pass(&self, tokens: usize) -> Pass {
        Pass { tokens: tokens as u32, trace: self.trace.into(), ..Pass::zeroed() }
    }

    /// Returns a state for a forward pass: a spare one from the pool, or a new one.
    pub(super) fn acquire_state(&mut self) -> Result<DeviceSaved<'g>, MoeError> {
        self.pool.pop().map_or_else(|| DeviceSaved::new(self), Ok)
    }

    /// Launches the kernels of a pass, with events between the phases.
    fn run(&self, saved: &DeviceSaved<'g>, CheckedPass { pass, stages, .. }: &CheckedPass) -> Result<(), MoeError> {
        self.gpu.mark(MARKS[0])?;
        self.launch(saved, pass, stages.before)?;
        self.gpu.mark(MARKS[1])?;
        self.launch(saved, pass, &[stages.layer])?;
        self.gpu.mark(MARKS[2])?;
        self.launch(saved, pass, stages.after)?;
        self.gpu.mark(MARKS[3])?;
        self.launch(saved, pass, stages.reduce)?;
        Ok(self.gpu.mark(MARKS[4])?)
    }

    /// Launches the kernels of a pass without events.
    pub(super) fn launch_all(&self, saved: &DeviceSaved<'g>, checked: &CheckedPass) -> Result<(), GpuError> {
        let CheckedPass { pass, stages, .. } = checked;
        self.launch(saved, pass, stages.before)?;
        self.launch(saved, pass, &[stages.layer])?;
        self.launch(saved, pass, stages.after)?;
        self.launch(saved, pass, stages.reduce)
    }

    /// Runs `launch`, which launches a whole pass. All of its time is counted as that of the persistent kernel.
    pub(super) fn run_single_launch(&self, launch: impl FnOnce() -> Result<(), GpuError>) -> Result<(), MoeError> {
        self.gpu.mark(MARKS[0])?;
        self.gpu.mark(MARKS[1])?;
        launch()?;
        for mark in &MARKS[2..] {
            self.gpu.mark(*mark)?;
        }
        Ok(())
    }

    fn launch(&self, saved: &DeviceSaved<'g>, pass: &Pass, kernels: &[Kernel]) -> Result<(), GpuError> {
        let args = [bytemuck::bytes_of(&saved.description()).to_vec(), bytemuck::bytes_of(pass).to_vec()];
        kernels.iter().try_for_each(|kernel| {
            let (name, launch) = (&self.names[*kernel as usize], saved.info().launch(*kernel));
            // SAFETY: every kernel of a layer takes the address of a `Layer` and a `Pass`.
            // - `place` made the `Layer`, over the state's memory and this layer's tables, weights and symmetric
            //   memory. The state was checked to be of this layer (`DeviceSaved::check`, or it is one of the layer's
            //   own), which holds the rest; the state's memory has the size that `place` required.
            // - The addresses in the `Pass` are of buffers that the caller of this pass borrows to it, on this device
            //   and as long as the pass reads and writes (`check_buffer`). By the contract of `Gpu`, freeing, writing
            //   or reading after the launch waits for it; no kernel accesses buffers of an earlier pass.
            // - Kernels validate data from peers before they use it as an index.
            unsafe { self.gpu.launch(name, launch, &[&args[0], &args[1]]) }
        })
    }
}

impl<'g> DeviceLayer<'g> {
    /// Runs a forward pass on a state of the layer's own.
    fn run_forward(&mut self, checked: &CheckedPass) -> Result<DeviceSaved<'g>, MoeError> {
        let mut saved = self.acquire_state()?;
        saved.refresh(self)?;
        saved.begin(checked.pass.tokens as usize, checked.by);
        self.run(&saved, checked)?;
        Ok(saved)
    }

    /// Runs a backward after `saved` and the arguments have been checked.
    fn run_backward(&mut self, saved: &mut DeviceSaved<'g>, checked: &CheckedPass) -> Result<(), MoeError> {
        saved.refresh(self)?;
        saved.begin_backward();
        self.before_backward(checked.by)?;
        self.run(saved, checked)?;
        self.after_backward()
    }

    /// Prepares the gradients for the next backward, before it is launched.
    pub(super) fn before_backward(&mut self, by: RoutedBy) -> Result<(), MoeError> {
        let (gpu, add) = (self.gpu, self.sizes.launch(Kernel::Accumulate));
        let by_caller = by == RoutedBy::Caller;
        Ok(self.weights.gradients.as_mut().map_or(Ok(()), |gradients| gradients.begin(gpu, add, by_caller))?)
    }

    /// If the layer accumulates gradients: adds those of the launched backward to the sums.
    pub(super) fn after_backward(&mut self) -> Result<(), MoeError> {
        let (gpu, add) = (self.gpu, self.sizes.launch(Kernel::Accumulate));
        Ok(self.weights.gradients.as_mut().map_or(Ok(()), |gradients| gradients.end(gpu, add))?)
    }

    /// Call after a change of `shape`: updates the layer's description in all spare states.
    fn update_descriptions(&mut self) -> Result<(), MoeError> {
        self.version += 1;
        // Updates the states now rather than in the next pass, for which other PEs may wait.
        let mut pool = std::mem::take(&mut self.pool);
        let done = pool.iter_mut().try_for_each(|saved| saved.refresh(self));
        self.pool = pool;
        done
    }
}

impl<'g> MoeLayer for DeviceLayer<'g> {
    type Rows = Buffer<'g>;
    type Values = Buffer<'g>;
    type Ids = Buffer<'g>;
    type RowsBuf = Buffer<'g>;
    type ValuesBuf = Buffer<'g>;
    type IdsBuf = Buffer<'g>;
    type Saved = DeviceSaved<'g>;

    fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    fn my_pe(&self) -> usize {
        self.me
    }

    fn rows(&self, values: &[f32], name: &str) -> Result<Buffer<'g>, MoeError> {
        Ok(Buffer::from_slice(self.gpu, &to_elements(values, self.spec.dtype, name)?)?)
    }

    fn values(&self, values: &[f32]) -> Result<Buffer<'g>, MoeError> {
        Ok(Buffer::from_slice(self.gpu, values)?)
    }

    fn ids(&self, ids: &[i32]) -> Result<Buffer<'g>, MoeError> {
        Ok(Buffer::from_slice(self.gpu, ids)?)
    }

    fn read(&self, values: &Buffer<'g>, into: &mut [f32]) -> Result<(), MoeError> {
        if values.bytes() != size_of_val(into) as u64 {
            let (got, expected) = (into.len(), (values.bytes() as usize / size_of::<f32>()).to_string());
            return Err(MoeError::Shape { what: "the place to read to".into(), got, expected });
        }
        Ok(values.read(0, into)?)
    }

    fn forward(&mut self, x: &Buffer<'g>, output: &mut Buffer<'g>) -> Result<DeviceSaved<'g>, MoeError> {
        let checked = self.check_forward(x, output)?;
        self.run_forward(&checked)
    }

    fn backward(
        &mut self,
        saved: &mut DeviceSaved<'g>,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &mut Buffer<'g>,
    ) -> Result<(), MoeError> {
        saved.check_backward(self, RoutedBy::Layer)?;
        let checked = self.check_backward(saved.tokens(), x, grad_output, grad_input)?;
        self.run_backward(saved, &checked)
    }

    fn experts(
        &mut self,
        x: &Buffer<'g>,
        ids: &Buffer<'g>,
        weights: &Buffer<'g>,
        output: &mut Buffer<'g>,
    ) -> Result<DeviceSaved<'g>, MoeError> {
        let checked = self.check_experts(x, ids, weights, output)?;
        self.run_forward(&checked)
    }

    fn experts_backward(
        &mut self,
        saved: &mut DeviceSaved<'g>,
        x: &Buffer<'g>,
        grad_output: &Buffer<'g>,
        grad_input: &mut Buffer<'g>,
        grad_weights: &mut Buffer<'g>,
    ) -> Result<(), MoeError> {
        saved.check_backward(self, RoutedBy::Caller)?;
        let tokens = saved.tokens();
        let checked = self.check_experts_backward(tokens, x, grad_output, grad_input, grad_weights)?;
        self.run_backward(saved, &checked)
    }

    fn finish(&mut self, saved: &DeviceSaved<'g>) -> Result<PassOutcome, MoeError> {
        saved.check(self, "finish a pass")?;
        self.gpu.synchronise()?;
        let info = saved.info();
        let mut record = ErrorRecord::zeroed();
        let (local, at) = saved.at(info.error);
        local.read(at, std::slice::from_mut(&mut record))?;
        let me = self.gpu.my_pe();
        let members = self.groups.members(self.groups.position(me).0);
        if let Some(error) = report::error(&record, me, members, &self.spec.options) {
            return Err(error);
        }
        let mut stats = PassStats::zeroed();
        let (local, at) = saved.at(info.stats);
        local.read(at, std::slice::from_mut(&mut stats))?;
        let mut spans = Vec::new();
        if self.trace {
            let (_, count_at) = saved.at(info.span_count);
            let count = local.read_vec::<u32>(count_at, 1)?[0] as usize;
            let (_, at) = saved.at(info.spans);
            spans = local.read_vec::<SpanRecord>(at, count.min(MAX_SPANS))?;
            local.zero(count_at, size_of::<u32>() as u64)?;
        }
        let router = self.gpu.elapsed(MARKS[0], MARKS[1])? + self.gpu.elapsed(MARKS[2], MARKS[3])?;
        let layer = self.gpu.elapsed(MARKS[1], MARKS[2])?;
        let all_reduce = self.gpu.elapsed(MARKS[3], MARKS[4])?;
        Ok(report::outcome(&stats, DevicePassTimes { router, layer, all_reduce }, &spans))
    }

    fn routed(&mut self, saved: &DeviceSaved<'g>) -> Result<Routed, MoeError> {
        let expert_rows = self.expert_rows(saved)?;
        let (info, config) = (saved.info(), &self.spec.config);
        let choices = saved.tokens() * config.router.top_k;
        let (local, chosen) = saved.at(info.chosen);
        let (_, weights) = saved.at(info.routing_weights);
        let mut load = Load::default();
        if config.has_losses() {
            let n = config.n_experts;
            let (_, at) = saved.at(info.loss_sums);
            let sums: Vec<f64> = local.read_vec(at, 2 + 2 * n)?;
            load = Load {
                tokens: sums[0] as u64,
                z_sum: sums[1],
                routed: sums[2..2 + n].iter().map(|&r| r as u64).collect(),
                prob_sums: sums[2 + n..].to_vec(),
            };
        }
        let (mut chosen, mut weights) = (local.read_vec(chosen, choices)?, local.read_vec(weights, choices)?);
        if saved.routed_by() == RoutedBy::Caller {
            // Converts the order of experts to the caller's order.
            let (_, at) = saved.at(info.columns);
            let columns: Vec<u32> = local.read_vec(at, choices)?;
            let (by_expert, by_expert_weights) = (chosen.clone(), weights.clone());
            for (i, column) in columns.into_iter().enumerate() {
                let to = i - i % config.router.top_k + column as usize;
                (chosen[to], weights[to]) = (by_expert[i], by_expert_weights[i]);
            }
        }
        Ok(Routed { chosen, weights, expert_rows, load })
    }

    fn expert_rows(&mut self, saved: &DeviceSaved<'g>) -> Result<Vec<u64>, MoeError> {
        saved.check(self, "read a pass's routing")?;
        let (local, rows) = saved.at(saved.info().expert_rows);
        let rows: Vec<u32> = local.read_vec(rows, self.shape.n_local as usize)?;
        Ok(rows.into_iter().map(u64::from).collect())
    }

    fn recycle(&mut self, saved: DeviceSaved<'g>) {
        // A state of another layer is freed.
        if saved.belongs_to(self) {
            self.pool.push(saved);
        }
    }

    fn gradients(&mut self) -> Result<&Gradients, MoeError> {
        self.check_training("read gradients")?;
        let why = || MoeError::Usage { what: "read gradients", why: "the layer has none".into() };
        let gradients = self.weights.gradients.as_mut().ok_or_else(why)?;
        Ok(gradients.read(&self.spec, self.me)?)
    }

    fn set_accumulate(&mut self, accumulate: bool) -> Result<(), MoeError> {
        self.check_training("accumulate gradients")?;
        let gpu = self.gpu;
        if let Some(gradients) = &mut self.weights.gradients {
            self.weights.bytes += gradients.set_accumulate(gpu, accumulate)?;
        }
        Ok(())
    }

    fn weights(&self, id: WeightId, into: &mut [f32]) -> Result<(), MoeError> {
        self.weights.read(&self.spec, self.me, id, into)
    }

    fn set_weights(&mut self, id: WeightId, values: &[f32]) -> Result<(), MoeError> {
        self.weights.write(&self.spec, self.me, id, values)?;
        // `router_parts` never decreases. Planes that are not needed are zeros, which do not change the results.
        if self.weights.router_parts > self.shape.router_parts {
            self.shape.router_parts = self.weights.router_parts;
            self.update_descriptions()?;
        }
        Ok(())
    }

    fn set_mode(&mut self, mode: Mode) -> Result<(), MoeError> {
        if mode != self.spec.options.mode {
            self.spec.options.mode = mode;
            self.shape.bulk = (mode == Mode::Bulk).into();
            self.update_descriptions()?;
        }
        Ok(())
    }

    fn record_spans(&mut self) {
        self.trace = true;
    }

    fn barrier(&mut self) -> Result<(), MoeError> {
        Ok(self.gpu.barrier(self.spec.options.wait_limit)?)
    }
}
