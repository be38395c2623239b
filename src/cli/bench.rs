//! `aristos bench`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Subcommand, ValueEnum};

use super::files::{Csv, create, write};
use super::job::{self, JobProcesses, JobSpec};
use super::progress::Progress;
use super::ranks::RanksArgs;
use super::values::{self, ActivationArg, DeviceArg, TransportArg, check_pes};
#[cfg(feature = "device")]
use super::values::{GemmArg, SymmetricArg, symmetric_by};
use super::{bench_p2p, bench_straggler, bench_summary};
#[cfg(feature = "cuda")]
use crate::bench::moe_device::heap_variable;
use crate::bench::moe_samples::{self, PeSamples};
use crate::bench::{MoeSummary, samples_csv};
#[cfg(feature = "cuda")]
use crate::job::heap;
use crate::job::launch::settled_pes;
use crate::job::request::{DeviceKind, MoeBench, Request};
#[cfg(feature = "device")]
use crate::moe::device::Tile;
use crate::moe::synthetic::{Synthetic, SyntheticSpec};
use crate::moe::{Dtype, LayerConfig, MlpConfig, Options, RouterConfig};
use crate::run::memory::check_bench_memory;
use crate::run::routing::GivenRouting;
#[cfg(feature = "cuda")]
use crate::stdio::say;
use crate::stdio::{print, print_line};

/// What `aristos bench` takes.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// The layer, pipelined and bulk, forward and backward, against the bare GEMMs of its experts
    Moe(MoeArgs),
    /// Latency, bandwidth and message rate of one-sided operations between two PEs, with plots
    P2p(bench_p2p::Args),
    /// All-to-all steps: the delay of each, and which PE or link it was waiting for, with plots
    Straggler(bench_straggler::Args),
    /// What each part of a forward pass has of its time, with a plot
    Summary(bench_summary::Args),
}

#[derive(clap::Args)]
struct MoeArgs {
    /// Number of PEs, one thread each [default: as many processes as srun, mpirun or torchrun started; otherwise 2]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// What carries rows and signals between PEs
    #[arg(long, value_enum, default_value = "shm")]
    transport: TransportArg,
    #[command(flatten)]
    ranks: RanksArgs,
    /// What the layer runs on
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceArg,
    /// What gives CUDA devices symmetric memory; nccl, 2.29.2 or newer, to PEs of one host [default: nvshmem]
    #[cfg(feature = "device")]
    #[arg(long, value_enum)]
    symmetric: Option<SymmetricArg>,
    /// Which matrix products a device runs [default: the best that it has]
    #[cfg(feature = "device")]
    #[arg(long, value_enum)]
    gemm: Option<GemmArg>,
    /// The tiles that a device cuts these into, such as 64x128 [default: by the layer's shape]
    #[cfg(feature = "device")]
    #[arg(long)]
    tile: Option<Tile>,
    /// On Hopper, have lanes store results of 16 bits, and copy operands, where TMA could: to compare the two
    #[cfg(feature = "device")]
    #[arg(long)]
    lane_stores: bool,
    /// Element type of activations and expert weights; accumulation is always f32 [default: both on the CPU, bf16 on a device]
    #[arg(long, value_enum)]
    dtype: Option<BenchDtypeArg>,
    /// Tokens, over all PEs
    #[arg(long, default_value_t = 2048)]
    tokens: usize,
    /// Hidden width
    #[arg(long, default_value_t = 1024)]
    hidden: usize,
    /// Width inside an expert
    #[arg(long, default_value_t = 4096)]
    intermediate: usize,
    /// Routed experts
    #[arg(long, default_value_t = 8)]
    experts: usize,
    /// Experts per token
    #[arg(long, default_value_t = 2)]
    top_k: usize,
    /// The experts' nonlinearity
    #[arg(long, value_enum, default_value = "gelu")]
    activation: ActivationArg,
    /// Gated experts, instead of plain two-matrix ones
    #[arg(long)]
    gated: bool,
    /// Share of the experts that are hot
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    hot_ratio: f64,
    /// Share of the routing that the hot experts get
    #[arg(long, value_name = "WEIGHT", default_value_t = 0.0)]
    hot_weight: f64,
    /// Seed of weights, tokens and routing
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Take the tokens' experts from a routing file (docs/simulator.md), its first record of layer 0, in place of the router's choice; on the CPU
    #[arg(long, value_name = "ROUTING.json", conflicts_with_all = ["hot_ratio", "hot_weight"])]
    routing: Option<PathBuf>,
    /// Iterations that count; each runs every measurement once
    #[arg(long, default_value_t = 7)]
    iterations: usize,
    /// Iterations before them
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Rows that an expert's GEMMs are cut to, about; on the CPU only [default: 512]
    #[arg(long, value_name = "ROWS")]
    tile_rows: Option<usize>,
    /// Most rows sent under one signal [default: a 16th of a receive window's, between 128 and 256]
    #[arg(long, value_name = "ROWS")]
    chunk_rows: Option<usize>,
    /// How long a PE waits for another before the job fails, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u32,
    /// Print the result as JSON (keys: docs/measurements/README.md)
    #[arg(long)]
    json: bool,
    /// Write the raw samples of every PE and iteration
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BenchDtypeArg {
    F32,
    Bf16,
    /// On a device only
    F16,
    /// One after the other
    Both,
}

impl MoeArgs {
    fn bench(&self, started: Option<usize>) -> Result<MoeBench> {
        for (flag, value) in
            [("iterations", Some(self.iterations)), ("tile-rows", self.tile_rows), ("chunk-rows", self.chunk_rows)]
        {
            ensure!(value != Some(0), "--{flag} is 0, expected at least 1");
        }
        if let (Some(rows), true) = (self.tile_rows, self.device != DeviceArg::Cpu) {
            bail!("--tile-rows {rows} on a device, expected --device cpu: a device's tiles are those of --tile");
        }
        ensure!(self.timeout > 0, "--timeout is 0, expected a number of seconds above 0");
        let (device, dtypes) = match (self.device, self.dtype) {
            (DeviceArg::Cpu, None | Some(BenchDtypeArg::Both)) => (DeviceKind::Cpu, vec![Dtype::F32, Dtype::Bf16]),
            (device, dtype) => {
                let dtype = match dtype {
                    Some(BenchDtypeArg::Both) => bail!("--dtype both on a device, expected bf16 or f16"),
                    Some(BenchDtypeArg::F32) => Some(values::DtypeArg::F32),
                    Some(BenchDtypeArg::Bf16) => Some(values::DtypeArg::Bf16),
                    Some(BenchDtypeArg::F16) => Some(values::DtypeArg::F16),
                    None => None,
                };
                let (device, dtype) = device.device(dtype)?;
                (device, vec![dtype])
            }
        };
        let activation = self.activation.into();
        let expert = MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, activation) };
        let layer = LayerConfig::new(self.hidden, self.experts, RouterConfig::softmax(self.top_k), expert);
        let layer = SyntheticSpec { layer, hot_ratio: self.hot_ratio, hot_weight: self.hot_weight, seed: self.seed };
        Synthetic::new(layer.clone())?;
        if let Some(path) = &self.routing {
            ensure!(device == DeviceKind::Cpu, "--routing on a device, expected --device cpu");
            GivenRouting::read(path, 0, (self.experts, self.top_k), Some(self.tokens))?;
        }
        let pes = check_pes(self.pes.or(started).or_else(settled_pes).unwrap_or(2))?;
        Ok(MoeBench {
            pes,
            layer,
            routing: self.routing.clone(),
            tokens: self.tokens,
            device,
            #[cfg(feature = "device")]
            symmetric: symmetric_by(self.symmetric, device)?,
            #[cfg(feature = "device")]
            gemm: self.gemm.map(Into::into),
            #[cfg(feature = "device")]
            tile: self.tile,
            #[cfg(feature = "device")]
            lane_stores: self.lane_stores,
            dtypes,
            options: Options {
                tile_rows: self.tile_rows,
                chunk_rows: self.chunk_rows,
                wait_limit: Duration::from_secs(self.timeout.into()),
                ..Options::default()
            },
            warmup: self.warmup,
            iterations: self.iterations,
        })
    }
}

impl Args {
    /// Whether the PEs are processes that the transport makes a world of.
    pub fn has_own_world(&self) -> bool {
        match &self.bench {
            Bench::P2p(args) => args.host_transport().has_own_world(),
            Bench::Straggler(args) => args.transport.has_own_world(),
            Bench::Moe(args) => args.transport.has_own_world(),
            Bench::Summary(_) => false,
        }
    }
}

/// Runs the benchmark.
///
/// # Errors
/// One line.
pub fn command(args: &Args) -> Result<bool> {
    match &args.bench {
        Bench::Moe(args) => args.command(),
        Bench::P2p(args) => args.command(),
        Bench::Straggler(args) => args.command(),
        Bench::Summary(args) => args.command(),
    }
}

impl MoeArgs {
    fn command(&self) -> Result<bool> {
        let ask = |found: JobProcesses| {
            let bench = self.bench(found.started)?;
            check_bench_memory(&bench)?;
            #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
            let mut env = Vec::new();
            #[cfg(feature = "cuda")]
            if bench.device == DeviceKind::Cuda {
                env.extend(crate::gpu::cuda::pe_environment(bench.pes, bench.symmetric)?);
                env.extend(heap_variable(&bench)?.inspect(|variable| {
                    if found.reports {
                        say(&heap::words(variable));
                    }
                }));
            }
            let (pes, wait_limit) = (bench.pes, bench.options.wait_limit);
            let csv = if found.reports { create(self.csv.as_ref())? } else { None };
            let kept = (bench.clone(), csv);
            Ok(JobSpec { request: Request::BenchMoe(Box::new(bench)), pes, wait_limit, env, kept })
        };
        let progress = Progress::of_slowest_pe("measurement");
        let over = self.ranks.over(self.transport)?;
        #[cfg(feature = "cuda")]
        over.set_heap(|started| {
            let bench = self.bench(Some(started))?;
            if bench.device == DeviceKind::Cuda { heap_variable(&bench) } else { Ok(None) }
        })?;
        job::run(over, &moe_samples::phase_names(), progress, ask, |(bench, csv), sent| self.report(&bench, csv, sent))
    }

    /// Prints and writes what all PEs measured.
    fn report(&self, bench: &MoeBench, csv: Csv, sent: Vec<(usize, PeSamples)>) -> Result<bool> {
        // By PE, then by element type.
        let mut samples: BTreeMap<usize, Vec<PeSamples>> = BTreeMap::new();
        sent.into_iter().for_each(|(pe, of_pe)| samples.entry(pe).or_default().push(of_pe));
        let mut by_dtype: Vec<Vec<PeSamples>> = bench.dtypes.iter().map(|_| Vec::new()).collect();
        for (pe, of_pe) in samples {
            ensure!(of_pe.len() == by_dtype.len(), "PE {pe} sent {} of {} samples", of_pe.len(), by_dtype.len());
            by_dtype.iter_mut().zip(of_pe).for_each(|(pes, of_pe)| pes.push(of_pe));
        }
        write(csv, samples_csv(bench, &by_dtype))?;
        let summary = MoeSummary::new(bench, &by_dtype);
        if self.json {
            print_line(&summary.to_json())?;
        } else {
            print(&summary.render_table())?;
        }
        Ok(true)
    }
}
