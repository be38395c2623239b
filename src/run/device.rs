//! One PE's part of a run on a device.

use anyhow::Result;

use super::PreparedRun;
use super::pe_results as pe;
use super::steps::{self, Results};
use crate::checkpoint::InputTensor;
use crate::gpu::{Buffer, Gpu};
use crate::job::device::{LayerSize, with_device};
use crate::job::host::{Host, MemoryHost};
use crate::moe::device::{DeviceLayer, DeviceOptions, to_elements};
use crate::moe::metrics::PassOutcome;
use crate::moe::{Gradients, Routed, metrics};
use crate::report::{ExpertRows, PeReport, Span, StepReport, SymmetricMemory};

/// Runs this PE's part and does not return before all is reported.
pub(super) fn run(job: &PreparedRun, host: &mut impl MemoryHost) -> Result<()> {
    let size = LayerSize {
        config: &job.config,
        placement: job.groups.placement(0),
        dtype: job.request.dtype,
        max_tokens: job.max_tokens(),
        training: job.backward,
        options: &job.request.options,
        on_device: &on_device(job),
    };
    with_device(job.request.device, &size, 1, host, |gpu, host| run_on(job, host, gpu))
}

fn on_device(job: &PreparedRun) -> DeviceOptions {
    DeviceOptions { path: job.request.gemm, ..DeviceOptions::default() }
}

fn run_on(job: &PreparedRun, context: &dyn Host, gpu: &dyn Gpu) -> Result<()> {
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
