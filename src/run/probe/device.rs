//! The probe on devices: measures the links, the compute rate with the layer's own kernels, and the memory.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use bytemuck::{Pod, Zeroable};

use super::host::{MEMORY_SHARE, host_name, probe_sources};
use super::links::{DeviceProber, RECORD_BYTES, symmetric_bytes};
use crate::cluster::{Cluster, Device};
use crate::gpu::{Buffer, DeviceLimits, Gpu, SymmetricBy};
use crate::job::device::{OpenDevice, WantedDevice, before_part, with_symmetric};
use crate::job::host::SymmetricRuntime;
use crate::job::request::{DeviceKind, ProbeRequest};
use crate::moe::device::{self, DeviceLayer, DeviceOptions};
use crate::moe::metrics::Phase;
use crate::moe::{
    Groups, LayerConfig, LayerSpec, MoeError, MoeLayer, Options, Placement, RouterConfig, WeightError, WeightId,
    WeightSource,
};
use crate::probe::{LinkProber, ProbeOptions, ProbeStage, probe_links_by};
use crate::report::median;
use crate::shmem::host_id;

/// Rows of the first pass: the largest tile of any GEMM path.
const MIN_ROWS: usize = 128;
/// Maximum rows of a pass: more rows do not increase the rate of a device.
const MAX_ROWS: usize = 8192;
/// Maximum rows of a pass on an emulated device. Few suffice, because its time is linear in the rows.
const MAX_EMULATED_ROWS: usize = 256;
/// Maximum FLOP of a pass that has more than `MIN_ROWS` rows.
const MAX_FLOP: f64 = 2e12;
/// Number of measurements of the rate.
const PARTS: u32 = 5;

/// The data of a device that its PE sends to all other PEs.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Record {
    flop_per_ms: f64,
    free_bytes: f64,
    host: [u8; 64],
    /// Identifies the device: PEs that share a device have equal values.
    place: [u8; 128],
}

const _: () = assert!(size_of::<Record>() <= RECORD_BYTES);

/// The first `BYTES` bytes of a text, or fewer whole characters, padded with zeros.
fn cut<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let end = text.floor_char_boundary(BYTES);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

/// The layer that measures a device's rate: one expert in a group of one PE.
struct ProbedLayer {
    config: LayerConfig,
}

impl WeightSource for ProbedLayer {
    fn config(&self) -> &LayerConfig {
        &self.config
    }

    fn name(&self, id: WeightId) -> String {
        format!("{id:?}")
    }

    /// Arbitrary small numbers, since the speed does not depend on the values.
    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        Ok(small(self.config.shape(id).iter().product()))
    }
}

fn small(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (i % 241) as f32 / 1200.0 - 0.1).collect()
}

impl ProbeRequest {
    /// Maximum rows of a pass.
    fn most_rows(&self) -> usize {
        let most = if self.device == DeviceKind::Emulated { MAX_EMULATED_ROWS } else { MAX_ROWS };
        ((MAX_FLOP / self.expert.flop_per_row()) as usize).clamp(MIN_ROWS, most)
    }

    fn layer(&self) -> Result<(LayerSpec, DeviceOptions)> {
        let config = LayerConfig::new(self.expert.hidden, 1, RouterConfig::external(1), self.expert.mlp());
        let options = Options { wait_limit: self.options.wait_limit, ..Options::default() };
        let spec =
            LayerSpec::new(config, 1, self.most_rows()).dtype(self.expert.dtype).training(false).options(options);
        let groups = (0..self.pes).map(|pe| (vec![pe], Placement::even(1, 1))).collect();
        let groups = Groups::new(self.pes, groups).map_err(|wrong| anyhow!("the probe's groups: {wrong}"))?;
        Ok((spec, DeviceOptions { path: self.gemm, groups: Some(groups), ..DeviceOptions::default() }))
    }

    /// The device that the probe needs. Its kernels use NVSHMEM's puts even between PEs that could use loads and stores.
    fn wanted(&self) -> WantedDevice {
        let (device, path, wait_limit) = (self.device, self.gemm, self.options.wait_limit);
        WantedDevice { device, symmetric: SymmetricBy::Nvshmem, path, wait_limit }
    }

    /// Symmetric memory of a PE in the probe, bytes.
    pub(crate) fn symmetric_bytes(&self, limits: &DeviceLimits, all_reachable: bool) -> Result<u64, MoeError> {
        let (spec, on_device) =
            self.layer().map_err(|error| MoeError::Usage { what: "probe", why: error.to_string() })?;
        let links = symmetric_bytes(&self.options, self.pes, limits.multiprocessors);
        // 4096 bytes for the padding between the two allocations.
        Ok(links + device::symmetric_bytes(&spec, &on_device, limits, all_reachable)? + 4096)
    }

    /// For a symmetric heap that cannot grow: the environment variable that sets the heap's size for this probe's PEs.
    ///
    /// # Errors
    /// Returns the errors of [`heap::variable`](crate::job::heap::variable).
    #[cfg(feature = "cuda")]
    pub fn heap_variable(&self) -> Result<Option<(String, String)>> {
        let bytes = |limits: &DeviceLimits, all_reachable| self.symmetric_bytes(limits, all_reachable);
        Ok(crate::job::heap::variable(self.pes, SymmetricBy::Nvshmem, bytes)?)
    }

    /// The options for measuring links. The other PEs wait while a pair is measured, so a pair may take at most a quarter of the wait
    /// limit.
    fn link_options(&self) -> ProbeOptions {
        let mut options = self.options.clone();
        let pairs = (self.pes * self.pes.saturating_sub(1)).max(1) as u32;
        options.alone_limit = options.alone_limit.min((options.wait_limit / 4).saturating_mul(pairs));
        options
    }
}

/// Threads of a sending block: as many as in `bench p2p`, but fewer on an emulated device, which runs them one after the other.
fn threads(device: DeviceKind) -> u32 {
    if device == DeviceKind::Emulated { 32 } else { 1024 }
}

/// Host memory that `here` PEs with emulated devices need for a probe, bytes.
///
/// # Errors
/// Returns an error if a device cannot run the expert.
pub fn emulated_bytes(request: &ProbeRequest, limits: &DeviceLimits, here: usize) -> Result<f64> {
    let symmetric = request.symmetric_bytes(limits, true)? as f64;
    let rows = (request.most_rows() * (request.expert.hidden * 16 + request.expert.intermediate * 16)) as f64;
    Ok(here as f64 * (symmetric + request.expert.bytes(request.device) + rows))
}

/// Runs a PE's part of a probe on devices. PE 0 sends the cluster as JSON text.
///
/// # Errors
/// Returns the errors of [`probe_devices`].
pub(super) fn run(request: &ProbeRequest, host: &mut impl SymmetricRuntime) -> Result<()> {
    let bytes = |limits: &DeviceLimits, all_reachable| request.symmetric_bytes(limits, all_reachable);
    with_symmetric(request.wanted(), bytes, host, |gpu, host| {
        let mut show = |stage: ProbeStage, done: usize, of: usize| {
            host.status().set_phase(1 + stage as u32);
            host.status().set_progress(done as u64, of as u64);
        };
        let cluster = probe_devices(gpu, request, &mut show)?;
        if gpu.my_pe() == 0 {
            host.send(&serde_json::to_vec(&cluster.to_json())?)?;
        }
        Ok(())
    })
}

/// Probes the devices before a job on the same PEs. Returns the cluster, and the PE's device if it stays open. Collective.
///
/// # Errors
/// Returns the errors of [`probe_devices`].
pub fn probe_before(request: &ProbeRequest, host: &mut impl SymmetricRuntime) -> Result<(Cluster, Option<OpenDevice>)> {
    let bytes = |limits: &DeviceLimits, all_reachable| request.symmetric_bytes(limits, all_reachable);
    before_part(request.wanted(), bytes, host, |gpu| probe_devices(gpu, request, &mut |_, _, _| {}))
}

/// Probes the devices of all PEs, and returns the same cluster on every PE. Collective.
///
/// # Errors
/// Returns an error if a device cannot run the kernels, or a PE does not respond.
pub fn probe_devices(
    gpu: &dyn Gpu,
    request: &ProbeRequest,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<Cluster> {
    let options = request.link_options();
    // All PEs read the free memory before any of them allocates.
    let free_bytes = gpu.limits()?.memory_free as f64;
    gpu.barrier(options.wait_limit)?;
    let mut prober = DeviceProber::new(gpu, &options, threads(request.device))?;
    let links = probe_links_by(&mut prober, &options, progress)?;
    progress(ProbeStage::Compute, 0, 1);
    let (flop_per_ms, rows) = rate(gpu, request, &mut prober)?;
    let host = host_name();
    let mine =
        Record { flop_per_ms, free_bytes, host: cut(&host), place: cut(&format!("{} {}", host_id(), gpu.device_id())) };
    let all = prober.gather_bytes(bytemuck::bytes_of(&mine))?;
    prober.free()?;
    progress(ProbeStage::Compute, 1, 1);

    let records: Vec<Record> = all.chunks_exact(size_of::<Record>()).map(bytemuck::pod_read_unaligned).collect();
    let devices = records.iter().enumerate().map(|(pe, record)| {
        let sharing = records.iter().filter(|other| other.place == record.place).count().max(1);
        let mb = match request.memory_mb[..] {
            [] => record.free_bytes * 1e-6 * MEMORY_SHARE / sharing as f64,
            [all] => all,
            ref each => each[pe],
        };
        let host = String::from_utf8_lossy(&record.host).trim_end_matches('\0').to_string();
        Device::new(pe as u64, host, record.flop_per_ms, request.experts_in(mb)).memory_mb(mb)
    });
    let name = if request.device == DeviceKind::Emulated { "emulated" } else { "nvshmem" };
    let mut cluster = links.cluster(devices.collect(), &options, name);
    cluster.sources = sources(request, &gpu.name(), rows);
    Ok(cluster)
}

/// How each figure of the cluster was obtained.
fn sources(request: &ProbeRequest, name: &str, rows: usize) -> std::collections::BTreeMap<String, String> {
    let expert = request.expert;
    let memory = match request.memory_mb.is_empty() {
        true => format!("{:.0}% of the device's free memory, in equal parts to its PEs", 100.0 * MEMORY_SHARE),
        false => request.memory_source.clone(),
    };
    let sizes = &request.options.sizes;
    probe_sources(request, &memory)
        .chain([
            ("memory_mb", memory.clone()),
            ("links", format!(
                "probed on {name}: puts of symmetric memory with signals, from kernels, taken and answered, {} to {} bytes, every pair alone; a \
                 line through the medians (Theil and Sen)",
                sizes.first().unwrap_or(&0),
                sizes.last().unwrap_or(&0)
            )),
            ("flop_per_ms", format!(
                "probed on {name}: the layer's forward kernel with {}, {rows} rows at a time, by the device's clock, all PEs at once",
                expert.text()
            )),
        ])
        .map(|(what, source)| (what.to_string(), source))
        .collect()
}

/// Runs passes of the probed layer on this PE's device.
struct Passes<'g> {
    layer: DeviceLayer<'g>,
    request: &'g ProbeRequest,
    rows: usize,
    x: Buffer<'g>,
    ids: Buffer<'g>,
    weights: Buffer<'g>,
    output: Buffer<'g>,
}

impl<'g> Passes<'g> {
    fn new(layer: DeviceLayer<'g>, request: &'g ProbeRequest, rows: usize) -> Result<Self> {
        let elements = rows * request.expert.hidden;
        let x = layer.rows(&small(elements), "hidden_states")?;
        let (ids, weights) = (layer.ids(&vec![0; rows])?, layer.values(&vec![1.0; rows])?);
        let output = layer.values(&vec![0.0; elements])?;
        Ok(Passes { layer, request, rows, x, ids, weights, output })
    }

    /// Runs one pass, and returns the time of the persistent kernel by the device's clock, at least 1 ns.
    fn run(&mut self) -> Result<Duration> {
        let saved = self.layer.experts(&self.x, &self.ids, &self.weights, &mut self.output)?;
        let outcome = self.layer.finish(&saved)?;
        self.layer.recycle(saved);
        let seconds = outcome.seconds - outcome.phases_s[Phase::Router.code()];
        Ok(Duration::try_from_secs_f64(seconds).unwrap_or_default().max(Duration::from_nanos(1)))
    }

    fn flop(&self) -> f64 {
        self.request.expert.flop_per_row() * self.rows as f64
    }
}

/// Measures this PE's rate while all PEs compute. Returns FLOP per ms, and the number of rows of a pass, which is as large as the time
/// allows, because small passes do not fill a device. Collective.
fn rate(gpu: &dyn Gpu, request: &ProbeRequest, prober: &mut DeviceProber<'_>) -> Result<(f64, usize)> {
    let (spec, on_device) = request.layer()?;
    let (most, part) = (spec.max_tokens, request.options.compute / PARTS);
    let source = ProbedLayer { config: spec.config.clone() };
    let layer = DeviceLayer::new(gpu, spec, &source, &on_device)?;
    let mut passes = Passes::new(layer, request, MIN_ROWS)?;
    // The first pass loads the kernels, and the device raises its clocks.
    passes.run()?;
    while 2 * passes.rows <= most && passes.run()? < part / 8 {
        let Passes { layer, rows, .. } = passes;
        passes = Passes::new(layer, request, 2 * rows)?;
        passes.run()?;
    }
    let mut rates = Vec::new();
    for _ in 0..PARTS {
        prober.barrier()?;
        let (start, mut took, mut times) = (Instant::now(), Duration::ZERO, 0);
        while times == 0 || start.elapsed() < part {
            took += passes.run()?;
            times += 1;
        }
        rates.push(f64::from(times) * passes.flop() / (took.as_secs_f64() * 1e3));
    }
    let Passes { layer, rows, .. } = passes;
    layer.free()?;
    // A cluster file needs a rate above 0.
    Ok((median(rates).max(1.0), rows))
}
