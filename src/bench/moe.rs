//! `aristos bench moe`: the layer against the bare GEMMs of the same shapes.
//!
//! Each iteration runs all of [`MEASUREMENTS`] one after the other, so that a machine that grows faster or slower
//! meanwhile does so for all of them; their order turns by one with each iteration. Before each one all PEs meet at
//! a barrier. The bare GEMMs are those of whole expert batches, as large as the layer's routing makes them.

use std::borrow::{Borrow, BorrowMut};
use std::time::Instant;

use anyhow::{Result, bail};
use half::bf16;
use serde::{Deserialize, Serialize};

use super::probe;
use crate::launch::{PeContext, StatusPage};
use crate::moe::cpu::experts::{Batch, Scratch};
use crate::moe::kernels::Element;
use crate::moe::metrics::{Observer, PassOutcome, Phase};
use crate::moe::placement::block;
use crate::moe::synthetic::{Synthetic, SyntheticSpec};
use crate::moe::{Dtype, Layer, LayerSpec, MlpGradients, Mode, MoeLayer, Options, WeightSource};
use crate::run::Device;
use crate::shmem::{ShmTransport, Shmem, Transport};

/// What is measured.
#[derive(Clone, Debug)]
pub struct MoeBench {
    /// The layer and its workload.
    pub layer: SyntheticSpec,
    /// Tokens, over all PEs.
    pub tokens: usize,
    /// What computes.
    pub device: Device,
    /// On a device, which matrix products; by the device where `None`.
    #[cfg(feature = "device")]
    pub gemm: Option<crate::moe::device::GemmPath>,
    /// Element types, measured one after the other.
    pub dtypes: Vec<Dtype>,
    /// How the layer runs; the mode is the measurement's.
    pub options: Options,
    /// Iterations that are not kept.
    pub warmup: usize,
    /// Iterations that are kept.
    pub iterations: usize,
}

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The experts' GEMMs alone.
    Gemms,
    /// The layer in this mode.
    Layer(Mode),
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// What runs.
    pub what: What,
    /// Whether its backward runs too.
    pub backward: bool,
}

/// All measurements of an iteration on the CPU.
pub const MEASUREMENTS: [Measurement; 6] = [
    Measurement { what: What::Gemms, backward: false },
    Measurement { what: What::Layer(Mode::Bulk), backward: false },
    Measurement { what: What::Layer(Mode::Pipelined), backward: false },
    Measurement { what: What::Gemms, backward: true },
    Measurement { what: What::Layer(Mode::Bulk), backward: true },
    Measurement { what: What::Layer(Mode::Pipelined), backward: true },
];

impl MoeBench {
    /// The layer on `n_pes` PEs.
    pub(super) fn spec(&self, source: &Synthetic, n_pes: usize, dtype: Dtype) -> LayerSpec {
        LayerSpec::new(source.config().clone(), n_pes, block(self.tokens, n_pes, 0).len())
            .dtype(dtype)
            .options(self.options.clone())
    }

    /// What each iteration runs.
    pub fn measurements(&self) -> &'static [Measurement] {
        #[cfg(any(feature = "cuda", feature = "emulate"))]
        if self.device != Device::Cpu {
            return &super::moe_device::MEASUREMENTS;
        }
        &MEASUREMENTS
    }
}

impl Measurement {
    /// Its name in tables and files: what runs, and which passes.
    pub fn name(self) -> (&'static str, &'static str) {
        let what = match self.what {
            What::Gemms => "gemms",
            What::Layer(Mode::Bulk) => "bulk",
            What::Layer(Mode::Pipelined) => "pipelined",
        };
        (what, if self.backward { "forward+backward" } else { "forward" })
    }
}

/// What one PE measured with one element type; travels to the supervisor as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeSamples {
    /// The element type's name.
    pub dtype: String,
    /// The device's name; empty for the CPU.
    pub device: String,
    /// Rows of each of its experts, its own tokens' included.
    pub expert_rows: Vec<u64>,
    /// By iteration, one sample for each of [`MoeBench::measurements`].
    pub iterations: Vec<Vec<Sample>>,
}

/// One measurement of one iteration on one PE.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Of the passes, or of the GEMMs, seconds; on a device the device's own.
    pub seconds: f64,
    /// Of it, by phase (in the order of [`Phase::ALL`]), seconds; zeros for bare GEMMs.
    pub phases_s: [f64; Phase::ALL.len()],
    /// The CPU that it ended on.
    pub cpu: usize,
}

/// The names of the job's phases, for the supervisor.
pub fn phase_names() -> Vec<&'static str> {
    Phase::ALL.iter().map(|phase| phase.name()).collect()
}

/// Shows the layer's phase to the supervisor.
struct Status(StatusPage);

impl Observer for Status {
    fn phase(&self, phase: Phase) {
        self.0.set_phase(phase.code() as u32);
    }
}

/// A PE's part: measures, and sends a [`PeSamples`] for each element type.
///
/// # Errors
/// A layer that cannot be made, or an error of the launcher or the protocol.
pub fn run_pe(bench: &MoeBench, context: &mut PeContext) -> Result<()> {
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    if bench.device != Device::Cpu {
        return super::moe_device::run_pe(bench, context);
    }
    let source = Synthetic::new(bench.layer.clone())?;
    let n = context.n_pes();
    probe::pin(context.my_pe(), n);
    let spec = |dtype| bench.spec(&source, n, dtype);
    let mut heap_bytes = 0;
    for &dtype in &bench.dtypes {
        heap_bytes = heap_bytes.max(spec(dtype).heap_bytes()?);
    }
    let segments = context.exchange_segments(heap_bytes)?;
    let shmem = Shmem::new(ShmTransport::new(context.my_pe(), segments)?);
    for (part, &dtype) in bench.dtypes.iter().enumerate() {
        let samples = match dtype {
            Dtype::F32 => run_as::<_, f32>(bench, &source, &shmem, spec(dtype), context, part)?,
            Dtype::Bf16 => run_as::<_, bf16>(bench, &source, &shmem, spec(dtype), context, part)?,
            Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
        };
        context.send(&serde_json::to_vec(&samples)?)?;
    }
    Ok(())
}

fn run_as<T: Transport, E: Element>(
    bench: &MoeBench,
    source: &Synthetic,
    shmem: &Shmem<T>,
    spec: LayerSpec,
    context: &PeContext,
    part: usize,
) -> Result<PeSamples> {
    let (expert, hidden) = (spec.config.expert, spec.config.hidden);
    let observer = Status(context.status().clone());
    let mut layer = Layer::<_, E>::builder(spec).observer(observer).build(shmem, source)?;
    // As large as the layer's routing makes them.
    let bare_gemms = |rows: &[u64]| {
        let mut batches: Vec<Batch<E>> =
            rows.iter().map(|&rows| Batch::filled(&expert, hidden, rows as usize)).collect();
        let mut grads = vec![MlpGradients::zeros(&expert, hidden); rows.len()];
        let mut scratch = Scratch::default();
        move |layer: &Layer<_, E>, backward| {
            for ((batch, expert), grads) in batches.iter_mut().zip(layer.local_experts()).zip(&mut grads) {
                expert.bare_gemms(batch, grads, &mut scratch, backward);
            }
        }
    };
    let samples = measure(bench, source, &mut layer, context, part, String::new(), bare_gemms)?;
    layer.free()?;
    Ok(samples)
}

/// Measures over the layer of any engine, on `device`; `bare_gemms` makes what runs the GEMMs of this PE's experts alone, given the
/// rows of each.
pub(super) fn measure<L: MoeLayer, G: FnMut(&L, bool)>(
    bench: &MoeBench,
    source: &Synthetic,
    layer: &mut L,
    context: &PeContext,
    part: usize,
    device: String,
    bare_gemms: impl FnOnce(&[u64]) -> G,
) -> Result<PeSamples> {
    let tokens = block(bench.tokens, context.n_pes(), layer.my_pe());
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
            if let What::Layer(mode) = what {
                layer.set_mode(mode)?;
            }
            layer.barrier()?;
            match what {
                What::Gemms => {
                    let start = Instant::now();
                    gemms(layer, backward);
                    sample.seconds = start.elapsed().as_secs_f64();
                }
                What::Layer(_) => {
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

impl Sample {
    fn add(&mut self, outcome: &PassOutcome) {
        self.seconds += outcome.seconds;
        self.phases_s.iter_mut().zip(outcome.phases_s).for_each(|(sum, s)| *sum += s);
    }
}
