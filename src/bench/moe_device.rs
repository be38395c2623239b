//! `aristos bench moe` on a device: the layer, pipelined and bulk, forward and backward.
//!
//! As on the CPU, each iteration runs every measurement once, in an order that turns by one. All PEs meet at a barrier
//! before each; the time is the device's own, from the first kernel of the passes to the end of the last. Bulk runs the same
//! work one piece after the other, with all PEs waiting for each other between: what overlap wins is the ratio of the two.

use anyhow::Result;

use super::moe_samples::{DEVICE_MEASUREMENTS as MEASUREMENTS, Measurement, PeSamples, Sample, What};
use crate::gpu::{Buffer, Gpu};
use crate::job::device::{LayerSize, with_device};
use crate::job::host::{Host, MemoryHost};
use crate::job::request::MoeBench;
use crate::moe::device::{DeviceLayer, DeviceOptions, to_elements};
use crate::moe::metrics::{PassOutcome, Phase};
use crate::moe::placement::block;
use crate::moe::synthetic::Synthetic;
use crate::moe::{Dtype, Mode, Options, Placement, WeightSource};

/// A PE's part: measures, and sends a [`PeSamples`] for each element type.
///
/// # Errors
/// No such device, a layer that it cannot run, or an error of the launcher or the protocol.
pub fn run(bench: &MoeBench, host: &mut impl MemoryHost) -> Result<()> {
    let source = Synthetic::new(bench.layer.clone())?;
    let placement = Placement::even(source.config().n_experts, bench.pes);
    let max_tokens = block(bench.tokens, bench.pes, 0).len();
    // Each mode is a layer of its own.
    let layers = [Mode::Bulk, Mode::Pipelined].len();
    let size = LayerSize {
        config: source.config(),
        placement: &placement,
        dtype: Dtype::Bf16,
        max_tokens,
        training: true,
        options: &bench.options,
        on_device: &on_device(bench),
    };
    with_device(bench.device, &size, layers, host, |gpu, host| {
        for (part, &dtype) in bench.dtypes.iter().enumerate() {
            let samples = measure(bench, &source, &placement, gpu, host, (part, dtype))?;
            host.send(&serde_json::to_vec(&samples)?)?;
        }
        Ok(())
    })
}

fn on_device(bench: &MoeBench) -> DeviceOptions {
    DeviceOptions { path: bench.gemm, ..DeviceOptions::default() }
}

fn measure(
    bench: &MoeBench,
    source: &Synthetic,
    placement: &Placement,
    gpu: &dyn Gpu,
    context: &dyn Host,
    (part, dtype): (usize, Dtype),
) -> Result<PeSamples> {
    let (me, n) = (context.my_pe(), context.n_pes());
    let tokens = block(bench.tokens, n, me);
    let upload = |values: Vec<f32>, name| -> Result<Buffer<'_>> {
        Ok(Buffer::from_slice(gpu, &to_elements(&values, dtype, name)?)?)
    };
    let x = upload(source.hidden_states(tokens.clone()), "hidden_states")?;
    let grad_output = upload(source.grad_output(tokens.clone()), "grad_output")?;
    let elements = tokens.len() * source.config().hidden;
    let output = Buffer::new(gpu, (elements * size_of::<f32>()) as u64)?;
    let grad_input = Buffer::new(gpu, (elements * size_of::<f32>()) as u64)?;
    let max_tokens = block(bench.tokens, n, 0).len();
    let on_device = on_device(bench);
    let make = |mode| {
        let options = Options { mode, ..bench.options.clone() };
        DeviceLayer::new(gpu, source, placement.clone(), dtype, max_tokens, true, options, &on_device)
    };
    let mut layers = [make(Mode::Bulk)?, make(Mode::Pipelined)?];

    let saved = layers[0].forward(&x, tokens.len(), &output)?;
    layers[0].finish(&saved)?;
    let expert_rows = layers[0].expert_rows(&saved)?.into_iter().map(u64::from).collect();
    layers[0].recycle(saved);

    let steps = bench.warmup + bench.iterations;
    let all_steps = (steps * bench.dtypes.len()) as u64;
    let mut iterations = Vec::new();
    for step in 0..steps {
        context.status().set_progress((part * steps + step) as u64, all_steps);
        let mut samples = vec![Sample::default(); MEASUREMENTS.len()];
        for turn in 0..MEASUREMENTS.len() {
            let which = (step + turn) % MEASUREMENTS.len();
            let Measurement { what, backward } = MEASUREMENTS[which];
            let layer = &mut layers[usize::from(what == What::Layer(Mode::Pipelined))];
            gpu.barrier(bench.options.wait_limit)?;
            let saved = layer.forward(&x, tokens.len(), &output)?;
            let mut sample = Sample::default();
            let mut add = |outcome: PassOutcome| {
                sample.seconds += outcome.seconds;
                sample.phases_s.iter_mut().zip(outcome.phases_s).for_each(|(sum, s)| *sum += s);
            };
            // Read after each pass, so that the next one's counters do not take the place of this one's.
            add(layer.finish(&saved)?);
            if backward {
                layer.backward(&saved, &x, &grad_output, &grad_input)?;
                add(layer.finish(&saved)?);
            }
            layer.recycle(saved);
            sample.phases_s[Phase::Idle.code()] = 0.0;
            sample.cpu = rustix::thread::sched_getcpu();
            samples[which] = sample;
        }
        if step >= bench.warmup {
            iterations.push(samples);
        }
    }
    context.status().set_progress(((part + 1) * steps) as u64, all_steps);
    for layer in layers {
        layer.free()?;
    }
    Ok(PeSamples { dtype: dtype.name().into(), device: gpu.name(), expert_rows, iterations })
}
