//! `aristos bench moe`: the layer against the bare GEMMs of the same shapes.
//!
//! Each iteration runs all [measurements](MoeBench::measurements) one after the other, so that a change of the machine's speed affects all of them.
//! Their order rotates by one with each iteration. A barrier precedes each measurement. The bare GEMMs are those of whole expert batches, with the
//! numbers of rows of the layer's routing.

use anyhow::{Result, bail};
use half::bf16;

use super::cpus;
use super::moe_samples::PeSamples;
use super::moe_steps::measure;
use crate::job::host::{Host, PeTask, SymmetricRuntime};
use crate::job::launch::StatusPage;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::job::request::DeviceKind;
use crate::job::request::MoeBench;
use crate::moe::cpu::experts::{Batch, Scratch};
use crate::moe::kernels::Element;
use crate::moe::metrics::{Observer, Phase};
use crate::moe::synthetic::Synthetic;
use crate::moe::{Dtype, Layer, LayerSpec, MlpGradients};
use crate::shmem::{Shmem, Transport};

/// Shows the layer's phase to the supervisor.
struct StatusObserver(StatusPage);

impl Observer for StatusObserver {
    fn phase(&self, phase: Phase) {
        self.0.set_phase(phase.code() as u32);
    }
}

/// Runs a PE's part: measures, and sends a [`PeSamples`] for each element type.
///
/// # Errors
/// A layer that cannot be built, or an error of the launcher or the protocol.
pub fn run(bench: &MoeBench, host: &mut impl SymmetricRuntime) -> Result<()> {
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    if bench.device != DeviceKind::Cpu {
        return super::moe_device::run(bench, host);
    }
    let source = Synthetic::new(bench.layer.clone())?;
    cpus::pin(host.my_pe(), host.n_pes());
    host.work(OnCpu { bench, source })
}

/// The part on the CPU.
struct OnCpu<'b> {
    bench: &'b MoeBench,
    source: Synthetic,
}

impl PeTask for OnCpu<'_> {
    type Error = anyhow::Error;

    fn heap_bytes<T: Transport>(&self) -> Result<usize> {
        let mut heap_bytes = 0;
        for &dtype in &self.bench.dtypes {
            heap_bytes = heap_bytes.max(self.bench.spec(&self.source, dtype).heap_bytes()?);
        }
        Ok(heap_bytes)
    }

    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
        let OnCpu { bench, source } = self;
        for (part, &dtype) in bench.dtypes.iter().enumerate() {
            let spec = bench.spec(&source, dtype);
            let samples = match dtype {
                Dtype::F32 => run_as::<_, f32>(bench, &source, shmem, spec, host, part)?,
                Dtype::Bf16 => run_as::<_, bf16>(bench, &source, shmem, spec, host, part)?,
                Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
            };
            host.send(&serde_json::to_vec(&samples)?)?;
        }
        Ok(())
    }
}

fn run_as<T: Transport, E: Element>(
    bench: &MoeBench,
    source: &Synthetic,
    shmem: &Shmem<T>,
    spec: LayerSpec,
    context: &dyn Host,
    part: usize,
) -> Result<PeSamples> {
    let (expert, hidden) = (spec.config.expert, spec.config.hidden);
    let observer = StatusObserver(context.status().clone());
    let mut layer = Layer::<_, E>::builder(spec).observer(observer).build(shmem, source)?;
    // Batches with the rows of the layer's routing.
    let bare_gemms = |rows: &[u64]| {
        let mut batches: Vec<Batch<E>> =
            rows.iter().map(|&rows| Batch::filled(&expert, hidden, rows as usize)).collect();
        let mut grads = vec![MlpGradients::zeros(&expert, hidden); rows.len()];
        let mut scratch = Scratch::default();
        move |layer: &Layer<_, E>, backward| {
            for ((batch, expert), grads) in batches.iter_mut().zip(layer.local_experts()).zip(&mut grads) {
                expert.run_gemms_only(batch, grads, &mut scratch, backward);
            }
        }
    };
    let samples = measure(bench, source, &mut layer, context, part, String::new(), bare_gemms)?;
    layer.free()?;
    Ok(samples)
}
