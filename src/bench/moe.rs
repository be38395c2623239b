//! `aristos bench moe`: the layer against the bare GEMMs of the same shapes.
//!
//! Each iteration runs all of [`MEASUREMENTS`] one after the other, so that a machine that grows faster or slower
//! meanwhile does so for all of them; their order turns by one with each iteration. Before each one all PEs meet at
//! a barrier. The bare GEMMs are those of whole expert batches, as large as the layer's routing makes them.

use std::time::Instant;

use anyhow::{Result, bail};
use half::bf16;
use serde::{Deserialize, Serialize};

use super::probe;
use crate::launch::{PeContext, StatusPage};
use crate::moe::cpu::experts::{Batch, Scratch};
use crate::moe::kernels::Element;
use crate::moe::metrics::{Observer, Phase};
use crate::moe::placement::{Placement, block};
use crate::moe::synthetic::{Synthetic, SyntheticSpec};
use crate::moe::{Dtype, Gradients, Layer, Layout, Mode, Options, WeightSource};
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
    /// From the barrier to this PE's end, seconds.
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
struct Status<'s>(&'s StatusPage);

impl Observer for Status<'_> {
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
    let mut layer_bytes = 0;
    for dtype in &bench.dtypes {
        let placement = Placement::even(source.config().n_experts, n);
        let max_tokens = block(bench.tokens, n, 0).len();
        let layout = Layout::new(source.config(), &placement, dtype.bytes(), max_tokens, &bench.options)?;
        layer_bytes = layout.total_bytes().max(layer_bytes);
    }
    let segments = context.exchange_segments(Shmem::<ShmTransport>::heap_bytes_for(n, layer_bytes))?;
    let shmem = Shmem::new(ShmTransport::new(context.my_pe(), segments)?);
    for (part, dtype) in bench.dtypes.iter().enumerate() {
        let samples = match dtype {
            Dtype::F32 => measure::<_, f32>(bench, &source, &shmem, context, part)?,
            Dtype::Bf16 => measure::<_, bf16>(bench, &source, &shmem, context, part)?,
            Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
        };
        context.send(&serde_json::to_vec(&samples)?)?;
    }
    Ok(())
}

fn measure<T: Transport, E: Element>(
    bench: &MoeBench,
    source: &Synthetic,
    shmem: &Shmem<T>,
    context: &PeContext,
    part: usize,
) -> Result<PeSamples> {
    let (me, n) = (shmem.my_pe(), shmem.n_pes());
    let tokens = block(bench.tokens, n, me);
    let elements = |values: Vec<f32>| values.into_iter().map(E::from_f32).collect::<Vec<E>>();
    let x = elements(source.hidden_states(tokens.clone()));
    let grad_output = elements(source.grad_output(tokens));
    let (mut output, mut grad_input) = (vec![0.0; x.len()], vec![0.0; x.len()]);

    let observer = Status(context.status());
    let placement = Placement::even(source.config().n_experts, n);
    let max_tokens = block(bench.tokens, n, 0).len();
    let mut layer = Layer::<T, E>::new(shmem, source, placement, max_tokens, bench.options.clone(), &observer)?;
    let config = layer.config().clone();
    let mut grads = Gradients::zeros(&config, layer.placement(), me);

    let saved = layer.forward(&x, &mut output)?;
    let rows: Vec<usize> = saved.batches.iter().map(|batch| batch.rows).collect();
    layer.recycle(saved);
    let mut batches: Vec<Batch<E>> =
        rows.iter().map(|&rows| Batch::filled(&config.expert, config.hidden, rows)).collect();
    let mut scratch = Scratch::default();

    let steps = bench.warmup + bench.iterations;
    let all_steps = (steps * bench.dtypes.len()) as u64;
    let mut iterations = Vec::new();
    for step in 0..steps {
        context.status().set_progress((part * steps + step) as u64, all_steps);
        let mut samples = vec![Sample::default(); MEASUREMENTS.len()];
        for turn in 0..MEASUREMENTS.len() {
            let which = (step + turn) % MEASUREMENTS.len();
            let Measurement { what, backward } = MEASUREMENTS[which];
            if let What::Layer(mode) = what {
                layer.set_mode(mode);
            }
            layer.recorder.take();
            shmem.barrier_all(bench.options.deadline())?;
            let start = Instant::now();
            match what {
                What::Gemms => {
                    for ((batch, expert), grads) in batches.iter_mut().zip(layer.experts()).zip(&mut grads.experts) {
                        expert.bare_gemms(batch, grads, &mut scratch, backward);
                    }
                }
                What::Layer(_) => {
                    let saved = layer.forward(&x, &mut output)?;
                    if backward {
                        layer.backward(saved, &grad_output, &mut grad_input, &mut grads)?;
                    } else {
                        layer.recycle(saved);
                    }
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            let (phases_ns, _) = layer.recorder.take();
            let mut phases_s = phases_ns.map(|ns| ns as f64 * 1e-9);
            phases_s[Phase::Idle.code()] = 0.0;
            samples[which] = Sample { seconds, phases_s, cpu: rustix::thread::sched_getcpu() };
        }
        if step >= bench.warmup {
            iterations.push(samples);
        }
    }
    context.status().set_progress(((part + 1) * steps) as u64, all_steps);
    layer.free()?;
    Ok(PeSamples {
        dtype: E::NAME.into(),
        device: String::new(),
        expert_rows: rows.iter().map(|&r| r as u64).collect(),
        iterations,
    })
}
