//! The probe on PEs: measures links, compute rates, and memory for experts.

#[cfg(feature = "device")]
pub mod device;
mod host;
#[cfg(feature = "device")]
pub mod links;

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use half::bf16;

use host::{MEMORY_SHARE, host_name, probe_sources};

use crate::cluster::Cluster;
use crate::job::host::{Host, PeTask, SymmetricRuntime};
use crate::job::request::{DeviceKind, ProbeRequest, ProbedExpert};
use crate::moe::cpu::experts::{Batch, Mlp, Scratch};
use crate::moe::kernels::Element;
use crate::moe::{Dtype, MlpGradients, MlpId, Options, WeightId};
use crate::probe::{OwnDevice, ProbeOptions, ProbeStage, probe};
use crate::shmem::{Shmem, Transport, available_bytes};

/// The names of a probe's phases by status code.
pub const PROBE_PHASES: [&str; 4] = ["start-up", "links alone", "links together", "expert GEMM"];

impl ProbedExpert {
    /// FLOP of the forward GEMMs for one row.
    pub fn flop_per_row(&self) -> f64 {
        self.mlp().forward_flop_per_row(self.hidden)
    }

    /// Memory of the expert, bytes: its packed weights, and in training its gradient in f32. On the CPU bf16 weights are packed twice, once
    /// for each product.
    pub fn bytes(&self, device: DeviceKind) -> f64 {
        let matrices = if self.gated { 3.0 } else { 2.0 };
        let twice = device == DeviceKind::Cpu && self.dtype == Dtype::Bf16;
        let per_weight = self.dtype.bytes() as f64 * if twice { 2.0 } else { 1.0 };
        let gradient = if self.training { size_of::<f32>() as f64 } else { 0.0 };
        matrices * self.hidden as f64 * self.intermediate as f64 * (per_weight + gradient)
    }

    /// Rows of a measured GEMM: the layer's tile, or fewer for a large expert.
    fn rows(&self) -> usize {
        const FLOP: f64 = 1e10;
        let least_rows = Options::DEFAULT_TILE_ROWS / 8;
        let fits = (FLOP / self.flop_per_row()) as usize / least_rows * least_rows;
        fits.clamp(least_rows, Options::DEFAULT_TILE_ROWS)
    }

    /// A description for the sources of the cluster file.
    fn text(&self) -> String {
        let ProbedExpert { hidden, intermediate, gated, dtype, .. } = self;
        let mlp = if *gated { "gated" } else { "plain" };
        format!("a {mlp} expert of {hidden} x {intermediate} in {}", dtype.name())
    }

    /// Bytes that a PE needs to compute with the expert on the CPU.
    pub fn working_bytes(&self) -> f64 {
        let rows = self.rows() as f64;
        self.bytes(DeviceKind::Cpu) + rows * (self.hidden as f64 * 16.0 + self.intermediate as f64 * 32.0)
    }
}

impl ProbeRequest {
    /// The number of experts that fit into the memory of `pe`, one of `here` PEs on this host.
    fn memory_experts(&self, pe: usize, here: usize) -> Result<u64> {
        let mb = match self.memory_mb[..] {
            [] => match available_bytes() {
                Some(bytes) => bytes as f64 * 1e-6 * MEMORY_SHARE / here as f64,
                None => bail!("/proc/meminfo does not say how much memory is available: give `memory_mb`"),
            },
            [all] => all,
            ref each => each[pe],
        };
        Ok(self.experts_in(mb))
    }

    /// The number of experts that fit into `mb` MB.
    fn experts_in(&self, mb: f64) -> u64 {
        // A cluster file allows at most 2^40 experts.
        ((mb * 1e6 / self.expert.bytes(self.device)) as u64).min(1 << 40)
    }
}

impl ProbeRequest {
    /// The source of each figure.
    fn sources(&self, transport: &str) -> BTreeMap<String, String> {
        let expert = self.expert.text();
        let memory = match self.memory_mb.is_empty() {
            true => format!("{:.0}% of the host's available memory, in equal parts to its PEs", 100.0 * MEMORY_SHARE),
            false => self.memory_source.clone(),
        };
        let sizes = &self.options.sizes;
        probe_sources(self, &memory).chain([
            ("links", format!(
                "probed over {transport}: put with signal, taken and answered, {} to {} bytes, every pair alone; a line through the \
                 medians (Theil and Sen)",
                sizes.first().unwrap_or(&0),
                sizes.last().unwrap_or(&0)
            )),
            ("flop_per_ms", format!("probed: forward GEMMs of {expert}, {} rows at a time, all PEs at once", self.expert.rows())),
        ])
        .map(|(what, source)| (what.to_string(), source))
        .collect()
    }
}

/// Probes all PEs of `shmem`, and returns the same cluster on every PE. `here` is the number of PEs on this host. Collective.
///
/// `transport` is the transport's name for the cluster file. `progress` receives the stage, the number of completed parts, and that of all
/// parts.
///
/// # Errors
/// Returns a [`ProbeError`](crate::probe::ProbeError), or an error if the size of the available memory is unknown.
pub fn probe_pes<T: Transport>(
    shmem: &Shmem<T>,
    request: &ProbeRequest,
    transport: &str,
    here: usize,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<Cluster> {
    match request.expert.dtype {
        Dtype::F32 => probe_as::<T, f32>(shmem, request, transport, here, progress),
        Dtype::Bf16 => probe_as::<T, bf16>(shmem, request, transport, here, progress),
        Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
    }
}

fn probe_as<T: Transport, E: Element>(
    shmem: &Shmem<T>,
    request: &ProbeRequest,
    transport: &str,
    here: usize,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<Cluster> {
    let expert = request.expert;
    let memory_experts = request.memory_experts(shmem.my_pe(), here)?;
    // Any small numbers: the speed does not depend on the values.
    let small = |id: WeightId| -> Result<Vec<f32>> {
        let [out, inp] = match id {
            WeightId::Expert(_, proj) => expert.mlp().shape(proj, expert.hidden),
            other => bail!("an expert without biases has no {other:?}"),
        };
        Ok((0..out * inp).map(|i| (i % 241) as f32 / 1200.0 - 0.1).collect())
    };
    let mlp = Mlp::<E>::load(expert.mlp(), expert.hidden, MlpId::Routed(0), small)?;
    let rows = expert.rows();
    let mut batch = Batch::<E>::filled(&expert.mlp(), expert.hidden, rows);
    let (mut scratch, mut none) = (Scratch::default(), MlpGradients::default());
    let mut work = || mlp.run_gemms_only(&mut batch, &mut none, &mut scratch, false);
    let work_flop = expert.flop_per_row() * rows as f64;
    let own = OwnDevice::new(host_name(), memory_experts, &mut work, work_flop);
    let mut cluster = probe(shmem, &request.options, transport, own, progress)?;
    cluster.sources = request.sources(transport);
    Ok(cluster)
}

/// Size of the symmetric heap of a probe of `pes` PEs, bytes.
pub fn heap_bytes<T: Transport>(options: &ProbeOptions, pes: usize) -> usize {
    Shmem::<T>::heap_bytes_for(pes, options.symmetric_bytes(pes))
}

/// Runs a PE's part of a probe. PE 0 sends the cluster as JSON text.
///
/// # Errors
/// Returns the errors of [`probe_pes`].
pub fn run(request: &ProbeRequest, host: &mut impl SymmetricRuntime) -> Result<()> {
    if request.device != DeviceKind::Cpu {
        #[cfg(feature = "device")]
        return device::run(request, host);
        #[cfg(not(feature = "device"))]
        bail!("this build probes CPUs only");
    }
    host.work(ProbePart { request })
}

struct ProbePart<'r> {
    request: &'r ProbeRequest,
}

impl PeTask for ProbePart<'_> {
    type Error = anyhow::Error;

    fn heap_bytes<T: Transport>(&self) -> Result<usize> {
        Ok(heap_bytes::<T>(&self.request.options, self.request.pes))
    }

    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
        let mut show = |stage: ProbeStage, done: usize, of: usize| {
            host.status().set_phase(1 + stage as u32);
            host.status().set_progress(done as u64, of as u64);
        };
        let cluster = probe_pes(shmem, self.request, host.transport(), host.pes_on_host(), &mut show)?;
        if shmem.my_pe() == 0 {
            host.send(&serde_json::to_vec(&cluster.to_json())?)?;
        }
        Ok(())
    }
}
