//! The steps of `aristos bench moe`, over the layer of any engine.

use std::borrow::{Borrow, BorrowMut};
use std::time::Instant;

use anyhow::Result;

use super::moe_samples::{Measurement, PeSamples, Sample, Subject};
use crate::job::host::Host;
use crate::job::request::MoeBench;
use crate::moe::placement::block;
use crate::moe::synthetic::Synthetic;
use crate::moe::{MoeLayer, WeightSource};
use crate::run::routing::GivenRouting;

/// Measures the layer of any engine on `device`. `bare_gemms` takes the rows of this PE's experts and returns a function that runs their GEMMs
/// alone.
pub(super) fn measure<L: MoeLayer, G: FnMut(&L, bool)>(
    bench: &MoeBench,
    source: &Synthetic,
    layer: &mut L,
    context: &dyn Host,
    part: usize,
    device: String,
    bare_gemms: impl FnOnce(&[u64]) -> G,
) -> Result<PeSamples> {
    let tokens = block(bench.tokens, context.n_pes(), layer.my_pe());
    if let Some(path) = &bench.routing {
        let (experts, top_k) = (source.config().n_experts, source.config().router.top_k);
        let given = GivenRouting::read(path, 0, (experts, top_k), Some(bench.tokens))?;
        layer.set_choices(Some(given.of_step(0, tokens.clone())))?;
    }
    let zeros = vec![0.0; tokens.len() * source.config().hidden];
    let x = layer.rows(&source.hidden_states(tokens.clone()), "hidden_states")?;
    let grad_output = layer.rows(&source.grad_output(tokens), "grad_output")?;
    let (mut output, mut grad_input) = (layer.values(&zeros)?, layer.values(&zeros)?);

    let saved = layer.forward(x.borrow(), output.borrow_mut())?;
    layer.finish(&saved)?;
    let expert_rows = layer.routed(&saved)?.expert_rows;
    layer.recycle(saved);
    let mut gemms = bare_gemms(&expert_rows);

    let measurements = bench.measurements();
    let steps = bench.warmup + bench.iterations;
    let all_steps = (steps * bench.dtypes.len()) as u64;
    let mut iterations = Vec::new();
    for step in 0..steps {
        context.status().set_progress((part * steps + step) as u64, all_steps);
        let mut samples = vec![Sample::default(); measurements.len()];
        for turn in 0..measurements.len() {
            let which = (step + turn) % measurements.len();
            let Measurement { what, backward } = measurements[which];
            let mut sample = Sample::default();
            if let Subject::Layer(mode) = what {
                layer.set_mode(mode)?;
            }
            layer.barrier()?;
            match what {
                Subject::Gemms => {
                    let start = Instant::now();
                    gemms(layer, backward);
                    sample.seconds = start.elapsed().as_secs_f64();
                }
                Subject::Layer(_) => {
                    let mut saved = layer.forward(x.borrow(), output.borrow_mut())?;
                    sample.add(&layer.finish(&saved)?);
                    if backward {
                        layer.backward(&mut saved, x.borrow(), grad_output.borrow(), grad_input.borrow_mut())?;
                        sample.add(&layer.finish(&saved)?);
                    }
                    layer.recycle(saved);
                }
            }
            sample.cpu = rustix::thread::sched_getcpu();
            samples[which] = sample;
        }
        if step >= bench.warmup {
            iterations.push(samples);
        }
    }
    context.status().set_progress(((part + 1) * steps) as u64, all_steps);
    Ok(PeSamples { dtype: layer.spec().dtype.name().into(), device, expert_rows, iterations })
}
