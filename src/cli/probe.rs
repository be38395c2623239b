//! `aristos probe`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::job::{self, JobProcesses, JobSpec};
use super::progress::Progress;
use super::shared::{TransportArgs, WaitArgs};
#[cfg(feature = "device")]
use super::values::GemmArg;
use super::values::{DeviceArg, DtypeArg, MlpArg, check_memory_mb, check_pes};
use crate::checkpoint::OutputFile;
use crate::cluster::{Cluster, Probe};
#[cfg(feature = "cuda")]
use crate::job::heap;
use crate::job::launch::settled_pes;
use crate::job::request::{DeviceKind, ProbeRequest, ProbedExpert, Request};
use crate::probe::ProbeOptions;
use crate::run::probe::{PROBE_PHASES, heap_bytes};
use crate::shmem::{ShmTransport, available_bytes};
use crate::stdio::{print, say};

/// Minimum of the default number of PEs: a single PE has no links.
const MIN_PES: usize = 2;

/// The flags of `aristos probe`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of PEs [default: as many processes as srun, mpirun or torchrun started; otherwise one per CPU, at least 2, or per CUDA device]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// Output file of the cluster (docs/planner.md), for `aristos plan --cluster`
    #[arg(long, value_name = "CLUSTER.json", required_unless_present = "json")]
    out: Option<PathBuf>,
    /// Print the cluster as JSON
    #[arg(long)]
    json: bool,
    /// Send fewer and smaller messages: less than half a second for a few PEs
    #[arg(long)]
    quick: bool,
    /// Hidden width
    #[arg(long, default_value_t = 256)]
    hidden: usize,
    /// Width inside an expert
    #[arg(long, default_value_t = 1024)]
    intermediate: usize,
    /// Gated experts, or plain two-matrix ones
    #[arg(long, value_enum, default_value = "gated")]
    mlp: MlpArg,
    /// Element type of activations and expert weights [default: f32 on the CPU, bf16 on a device]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Probe the CPUs, or devices: links by puts from kernels, rates of the layer's kernels, memory
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceArg,
    /// Matrix products of a device [default: the best that it has]
    #[cfg(feature = "device")]
    #[arg(long, value_enum)]
    gemm: Option<GemmArg>,
    /// Memory for experts, MB (10^6 bytes): one number for all PEs, or one for each [default: three quarters of the
    /// available memory, or of a device's free memory, in equal parts]
    #[arg(long, value_name = "MB[,MB...]", value_delimiter = ',')]
    memory_mb: Vec<f64>,
    #[command(flatten)]
    pub(super) between: TransportArgs,
    #[command(flatten)]
    wait: WaitArgs,
}

impl Args {
    fn request(&self, started: Option<usize>) -> Result<ProbeRequest> {
        let (device, dtype) = self.device.device(self.dtype)?;
        #[cfg(feature = "device")]
        ensure!(device != DeviceKind::Cpu || self.gemm.is_none(), "--gemm on the CPU, expected --device too");
        let one_each = || match device {
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => crate::gpu::cuda::visible_devices().map_or(1, |devices| devices.max(1)),
            _ => std::thread::available_parallelism().map_or(1, usize::from).max(MIN_PES),
        };
        let pes = check_pes(self.pes.or(started).or_else(settled_pes).unwrap_or_else(one_each))?;
        let wait_limit = self.wait.limit()?;
        check_memory_mb(&self.memory_mb, pes)?;
        let expert = ProbedExpert {
            hidden: self.hidden,
            intermediate: self.intermediate,
            gated: self.mlp == MlpArg::Gated,
            dtype,
            training: true,
        };
        expert.check(device)?;
        let mut options = if self.quick { ProbeOptions::quick() } else { ProbeOptions::thorough() };
        options.wait_limit = wait_limit;
        let (memory_mb, memory_source) = (self.memory_mb.clone(), "--memory-mb".to_string());
        Ok(ProbeRequest {
            pes,
            device,
            #[cfg(feature = "device")]
            gemm: self.gemm.map(Into::into),
            expert,
            options,
            memory_mb,
            memory_source,
        })
    }
}

/// Probes, and writes and prints the cluster.
pub fn command(args: &Args) -> Result<bool> {
    let ask = |found: JobProcesses| {
        let request = args.request(found.started)?;
        let here = found.here.unwrap_or(request.pes);
        check_available(&request, here)?;
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
        let mut env = Vec::new();
        #[cfg(feature = "cuda")]
        if request.device == DeviceKind::Cuda {
            env.extend(crate::gpu::cuda::pe_environment(here, crate::gpu::SymmetricBy::Nvshmem)?);
            crate::gpu::cuda::check_times(here)?;
            env.extend(request.heap_variable()?.inspect(|variable| {
                if found.reports {
                    say(&heap::words(variable));
                }
            }));
        }
        let out = if found.reports { args.create_out()? } else { None };
        let (pes, wait_limit) = (request.pes, request.options.wait_limit);
        Ok(JobSpec { request: Request::Probe(request), pes, wait_limit, env, kept: out })
    };
    let report = |out, sent: Vec<(usize, String)>| args.finish(out, sent.into_iter().next().map(|(_, text)| text));
    let over = args.between.over()?;
    #[cfg(feature = "cuda")]
    over.set_heap(|started| {
        let request = args.request(Some(started))?;
        if request.device == DeviceKind::Cuda { request.heap_variable() } else { Ok(None) }
    })?;
    job::run(over, &PROBE_PHASES, Progress::of_first_pe(), ask, report)
}

/// Returns an error if the memory of this host does not suffice for `here` PEs: the kernel would kill the probe later.
fn check_available(request: &ProbeRequest, here: usize) -> Result<()> {
    let need = match request.device {
        DeviceKind::Cpu => {
            let heap_bytes = heap_bytes::<ShmTransport>(&request.options, request.pes);
            here as f64 * (heap_bytes as f64 + request.expert.working_bytes())
        }
        #[cfg(feature = "emulate")]
        DeviceKind::Emulated => {
            let device = crate::gpu::emulated::EmulatedDevice::default();
            crate::run::probe::device::emulated_bytes(request, &device.limits(), here)?
        }
        // The PEs check the memory of their devices.
        _ => return Ok(()),
    };
    if let Some(available) = available_bytes() {
        ensure!(
            need <= available as f64,
            "the probe needs about {:.1} GB of memory, this machine has {:.1} GB available: use fewer --pes, a smaller \
             expert, or --quick",
            need * 1e-9,
            available as f64 * 1e-9
        );
    }
    Ok(())
}

impl Args {
    fn create_out(&self) -> Result<Option<OutputFile>> {
        Ok(self.out.as_deref().map(OutputFile::create_empty).transpose()?)
    }

    /// Writes and prints the cluster from PE 0.
    fn finish(&self, out: Option<OutputFile>, text: Option<String>) -> Result<bool> {
        let text = text.context("no PE sent its measurements")?;
        let cluster = Cluster::from_json(&text).context("PE 0 sent what is no cluster")?;
        if let (Some(out), Some(path)) = (out, &self.out) {
            let written = out.file().write_all(text.as_bytes());
            written.with_context(|| format!("cannot write {}", path.display()))?;
            out.publish()?;
        }
        let shown = if self.json { text } else { crate::report::cluster_text(&cluster) };
        print(&shown)?;
        cluster.probe.iter().for_each(warn_of_wild_links);
        Ok(true)
    }
}

/// Warns about links whose times do not fit a latency and a rate, even after repeated measurements.
pub(crate) fn warn_of_wild_links(probe: &Probe) {
    const SHOWN: usize = 8;
    let wild = probe.wild_links(Probe::USABLE);
    for (from, to, residual) in wild.iter().take(SHOWN) {
        let percent = 100.0 * residual;
        say(&format!(
            "aristos: the link from PE {from} to PE {to}: its times are {percent:.0}% off a latency and a rate, however often they were \
             measured: is the machine busy?"
        ));
    }
    if wild.len() > SHOWN {
        say(&format!("aristos: and {} more links", wild.len() - SHOWN));
    }
}
