//! One PE's part of the main job on a device.

#[cfg(feature = "cuda")]
use std::time::Duration;

use anyhow::{Result, bail};

use super::pe;
use super::steps::{self, Results};
use super::{Device, Job};
use crate::checkpoint::InputTensor;
#[cfg(feature = "cuda")]
use crate::gpu::cuda::CudaGpu;
use crate::gpu::{Buffer, Gpu};
use crate::launch::PeContext;
use crate::moe::device::{DeviceLayer, DeviceOptions, to_elements};
use crate::moe::metrics::PassOutcome;
use crate::moe::{Dtype, Gradients, LayerConfig, Options, Placement, Routed, metrics};
use crate::report::{ExpertRows, PeReport, Span, StepReport, SymmetricMemory};

/// Runs this PE's part and does not return before all is reported.
pub(super) fn run(job: &Job, context: &mut PeContext) -> Result<()> {
    let size = SizeOf {
        config: &job.config,
        placement: job.groups.placement(0),
        dtype: job.request.dtype,
        max_tokens: job.max_tokens(),
        training: job.backward,
        options: &job.request.options,
        on_device: &on_device(job),
    };
    with_device(job.request.device, &size, 1, context, |gpu, context| run_on(job, context, gpu))
}

fn on_device(job: &Job) -> DeviceOptions {
    DeviceOptions { path: job.request.gemm, ..DeviceOptions::default() }
}

/// What the symmetric memory of a layer depends on. CUDA's grows with what is asked for; only the emulated device's must be
/// known before.
#[cfg_attr(not(feature = "emulate"), allow(dead_code))]
pub(crate) struct SizeOf<'a> {
    pub config: &'a LayerConfig,
    pub placement: &'a Placement,
    pub dtype: Dtype,
    pub max_tokens: usize,
    pub training: bool,
    pub options: &'a Options,
    pub on_device: &'a DeviceOptions,
}

/// Opens this PE's device, with as much symmetric memory as `layers` such layers need where that must be known at first, and
/// works with it.
#[cfg_attr(not(feature = "emulate"), allow(unused_variables))]
pub(crate) fn with_device<R>(
    device: Device,
    size: &SizeOf<'_>,
    layers: usize,
    context: &mut PeContext,
    work: impl FnOnce(&dyn Gpu, &PeContext) -> Result<R>,
) -> Result<R> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda => with_cuda(context, size.options.wait_limit, |gpu, context| work(gpu, context)),
        #[cfg(feature = "emulate")]
        Device::Emulated => {
            let gpu = emulated(size, layers, context)?;
            work(&gpu, context)
        }
        other => bail!("this build cannot run a layer on a device of kind {other:?}"),
    }
}

/// Works with the CUDA device of this PE. The PEs meet over shared memory of the host's, of which they need next to nothing.
#[cfg(feature = "cuda")]
pub(crate) fn with_cuda<R>(
    context: &mut PeContext,
    wait_limit: Duration,
    work: impl FnOnce(&CudaGpu, &PeContext) -> Result<R>,
) -> Result<R> {
    use crate::shmem::{ShmTransport, Shmem};
    let segments = context.exchange_segments(Shmem::<ShmTransport>::heap_bytes_for(context.n_pes(), 0))?;
    let shmem = Shmem::new(ShmTransport::new(context.my_pe(), segments)?);
    let gpu = CudaGpu::attach(shmem, wait_limit)?;
    if gpu.n_pes() > 1 {
        gpu.try_put()?;
    }
    let result = work(&gpu, context)?;
    gpu.finish()?;
    Ok(result)
}

#[cfg(feature = "emulate")]
fn emulated(size: &SizeOf<'_>, layers: usize, context: &mut PeContext) -> Result<crate::gpu::emulated::Emulated> {
    use crate::gpu::emulated::{EmulatedDevice, attach};
    use crate::moe::device::{GemmPath, symmetric_bytes};
    use crate::shmem::{ShmTransport, Shmem};
    let device = EmulatedDevice { hopper: size.on_device.path == Some(GemmPath::Hopper), ..EmulatedDevice::default() };
    let &SizeOf { config, placement, dtype, max_tokens, training, options, on_device } = size;
    let limits = device.limits();
    let bytes = symmetric_bytes(config, placement, dtype, max_tokens, training, options, on_device, &limits)?;
    let heap = Shmem::<ShmTransport>::heap_bytes_for(context.n_pes(), layers * bytes as usize);
    let segments = context.exchange_segments(heap)?;
    Ok(attach(Shmem::new(ShmTransport::new(context.my_pe(), segments)?), &device)?)
}

fn run_on(job: &Job, context: &PeContext, gpu: &dyn Gpu) -> Result<()> {
    let (me, dtype) = (context.my_pe(), job.request.dtype);
    let options = job.request.options.clone();
    let mut layer = DeviceLayer::new(
        gpu,
        job,
        // A device has one group of all PEs.
        job.groups.placement(0).clone(),
        dtype,
        job.max_tokens(),
        job.backward,
        options,
        &on_device(job),
    )?;
    let (weights, pass) = layer.device_bytes();
    tracing::debug!(pe = me, weights, pass, symmetric = layer.symmetric_bytes(), "the layer is on the device");
    if job.request.trace.is_some() {
        layer.record_spans();
    }
    let tokens = job.tokens_of(me);
    let rows = |tensor: InputTensor, name: &str| -> Result<Buffer<'_>> {
        Ok(Buffer::from_slice(gpu, &to_elements(&job.rows(tensor, tokens.clone())?, dtype, name)?)?)
    };
    let elements = tokens.len() * job.config.hidden;
    let x = rows(InputTensor::HiddenStates, "hidden_states")?;
    let output = Buffer::new(gpu, (elements * size_of::<f32>()) as u64)?;
    let gradients = if job.backward {
        let grad_input = Buffer::new(gpu, (elements * size_of::<f32>()) as u64)?;
        Some((rows(InputTensor::GradOutput, "grad_output")?, grad_input))
    } else {
        None
    };

    let mut report = PeReport {
        pe: me,
        tokens: tokens.len() as u64,
        device: gpu.name(),
        gemm: Some(layer.path().name().to_string()),
        ..PeReport::default()
    };
    let mut sent = metrics::Traffic::default();
    let mut all_reduce_bytes = 0;
    let mut routed = Routed::default();
    let gradient_buffers = gradients.as_ref().map(|(grad_output, grad_input)| (grad_output, grad_input));
    let recorded = match job.request.graph {
        true => Some(layer.record(&x, tokens.len(), &output, gradient_buffers)?),
        false => None,
    };
    for step in 0..job.request.steps {
        let mut take = |outcome: PassOutcome, spans: &mut Vec<Span>| {
            sent.add(&outcome.traffic);
            all_reduce_bytes += outcome.all_reduce_bytes;
            spans.extend(outcome.spans.iter().map(|s| Span {
                name: s.phase.name().to_string(),
                start_ns: s.start_ns,
                dur_ns: s.dur_ns,
                step: step as u64,
                track: s.track.into(),
            }));
            steps::pass_report(&outcome)
        };
        context.status().set_progress(step as u64, job.request.steps as u64);
        context.status().set_phase(pe::DEVICE_FORWARD);
        let mut fresh = None;
        let saved = match &recorded {
            Some(step) => {
                layer.replay_forward(step)?;
                step.saved()
            }
            None => fresh.insert(layer.forward(&x, tokens.len(), &output)?),
        };
        let forward = take(layer.finish(saved)?, &mut report.spans);
        if step + 1 == job.request.steps {
            routed.chosen = layer.chosen(saved)?;
            let rows = layer.expert_rows(saved)?.into_iter().map(u64::from);
            let experts = job.groups.experts(me).iter().zip(rows.clone());
            report.expert_rows = experts.map(|(&expert, rows)| ExpertRows { expert, rows }).collect();
            routed.expert_rows = rows.collect();
            routed.load = layer.load(saved)?;
        }
        let mut backward = None;
        if let Some((grad_output, grad_input)) = &gradients {
            context.status().set_phase(pe::DEVICE_BACKWARD);
            match &recorded {
                Some(step) => layer.replay_backward(step)?,
                None => layer.backward(saved, &x, grad_output, grad_input)?,
            }
            backward = Some(take(layer.finish(saved)?, &mut report.spans));
        }
        if let Some(saved) = fresh {
            layer.recycle(saved);
        }
        report.steps.push(StepReport { forward, backward });
    }
    report.traffic = steps::traffic(&sent, all_reduce_bytes);
    let symmetric = layer.symmetric_bytes();
    report.symmetric = SymmetricMemory {
        used_bytes: symmetric,
        peak_bytes: symmetric,
        budget_bytes: gpu.limits()?.symmetric_total.max(symmetric),
    };

    let mut grad_input = Vec::new();
    let mut grads = Gradients::default();
    if let Some((_, on_device)) = &gradients {
        grad_input = on_device.read_vec(0, elements)?;
        grads = layer.gradients()?;
    }
    let output: Vec<f32> = output.read_vec(0, elements)?;
    let results = Results { output, grad_input, grads, routed };
    pe::report_and_write(job, context, report, &results)?;
    drop(recorded);
    // No PE may end while another's kernels still reach into its memory.
    Ok(layer.free()?)
}
