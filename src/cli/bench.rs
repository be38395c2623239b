//! `aristos bench`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::{Subcommand, ValueEnum};

use super::files::{Csv, create, write};
use super::job::{self, JobProcesses, JobSpec};
use super::progress::Progress;
#[cfg(feature = "device")]
use super::shared::KernelArgs;
use super::shared::{BenchLayerArgs, TransportArgs, WaitArgs, print_report};
use super::values::{self, DeviceArg, check_pes};
use super::{bench_p2p, bench_straggler, bench_summary};
#[cfg(feature = "cuda")]
use crate::bench::moe_device::heap_variable;
use crate::bench::moe_samples::{self, PeSamples};
use crate::bench::{MoeSummary, samples_csv};
#[cfg(feature = "cuda")]
use crate::job::heap;
use crate::job::launch::settled_pes;
use crate::job::request::{DeviceKind, MoeBench, Request};
use crate::moe::synthetic::{Synthetic, SyntheticSpec};
use crate::moe::{Dtype, Options};
use crate::run::memory::check_bench_memory;
use crate::run::routing::GivenRouting;
#[cfg(feature = "cuda")]
use crate::stdio::say;

/// The flags of `aristos bench`.
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
    /// All-to-all steps: their delays, and the PE or link that caused each, with plots
    Straggler(bench_straggler::Args),
    /// The share of each part in the time of a forward pass, with a plot
    Summary(bench_summary::Args),
}

#[derive(clap::Args)]
struct MoeArgs {
    /// Number of PEs, one thread each [default: as many processes as srun, mpirun or torchrun started; otherwise 2]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    #[command(flatten)]
    between: TransportArgs,
    /// Where the layer runs
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceArg,
    #[cfg(feature = "device")]
    #[command(flatten)]
    kernels: KernelArgs,
    /// Element type of activations and expert weights; accumulation is always f32 [default: both on the CPU, bf16 on a device]
    #[arg(long, value_enum)]
    dtype: Option<BenchDtypeArg>,
    #[command(flatten)]
    layer: BenchLayerArgs,
    /// Share of the experts that are hot
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    hot_ratio: f64,
    /// Share of the routing that the hot experts get
    #[arg(long, value_name = "WEIGHT", default_value_t = 0.0)]
    hot_weight: f64,
    /// Take the tokens' experts from a routing file (docs/simulator.md), its first record of layer 0, instead of the router; on the CPU only
    #[arg(long, value_name = "ROUTING.json", conflicts_with_all = ["hot_ratio", "hot_weight"])]
    routing: Option<PathBuf>,
    /// Measured iterations; each runs every measurement once
    #[arg(long, default_value_t = 7)]
    iterations: usize,
    /// Warm-up iterations
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Approximate rows of a tile of an expert's GEMMs; on the CPU only [default: 512]
    #[arg(long, value_name = "ROWS")]
    tile_rows: Option<usize>,
    /// Maximum rows per signal [default: a 16th of a receive window's, between 128 and 256]
    #[arg(long, value_name = "ROWS")]
    chunk_rows: Option<usize>,
    #[command(flatten)]
    wait: WaitArgs,
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
        let wait_limit = self.wait.limit()?;
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
        #[cfg(feature = "device")]
        self.kernels.check(device)?;
        let BenchLayerArgs { tokens, experts, top_k, seed, .. } = self.layer;
        let (hot_ratio, hot_weight) = (self.hot_ratio, self.hot_weight);
        let layer = SyntheticSpec { layer: self.layer.config(), hot_ratio, hot_weight, seed };
        Synthetic::new(layer.clone())?;
        if let Some(path) = &self.routing {
            ensure!(device == DeviceKind::Cpu, "--routing on a device, expected --device cpu");
            let given = GivenRouting::read(path, 0, (experts, top_k), Some(tokens))?;
            given.check_even("the same number for all: the benchmark gives each PE as many")?;
        }
        let pes = check_pes(self.pes.or(started).or_else(settled_pes).unwrap_or(2))?;
        Ok(MoeBench {
            pes,
            layer,
            routing: self.routing.clone(),
            tokens,
            device,
            #[cfg(feature = "device")]
            symmetric: self.kernels.symmetric(),
            #[cfg(feature = "device")]
            gemm: self.kernels.gemm(),
            #[cfg(feature = "device")]
            tile: self.kernels.tile,
            #[cfg(feature = "device")]
            lane_stores: self.kernels.lane_stores,
            dtypes,
            options: Options {
                tile_rows: self.tile_rows,
                chunk_rows: self.chunk_rows,
                wait_limit,
                ..Options::default()
            },
            warmup: self.warmup,
            iterations: self.iterations,
        })
    }
}

impl Args {
    /// Whether the PEs are separate processes that join over the transport.
    pub fn has_own_world(&self) -> bool {
        match &self.bench {
            Bench::P2p(args) => args.host_transport().has_own_world(),
            Bench::Straggler(args) => args.between.transport.has_own_world(),
            Bench::Moe(args) => args.between.transport.has_own_world(),
            Bench::Summary(_) => false,
        }
    }
}

/// Runs the benchmark.
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
        let over = self.between.over()?;
        #[cfg(feature = "cuda")]
        over.set_heap(|started| {
            let bench = self.bench(Some(started))?;
            if bench.device == DeviceKind::Cuda { heap_variable(&bench) } else { Ok(None) }
        })?;
        job::run(over, &moe_samples::phase_names(), progress, ask, |(bench, csv), sent| self.report(&bench, csv, sent))
    }

    /// Writes and prints the measurements of all PEs.
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
        print_report(&MoeSummary::new(bench, &by_dtype), self.json)?;
        Ok(true)
    }
}
