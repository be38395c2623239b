//! `aristos bench summary`.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::progress::Progress;
use super::shared::{BenchLayerArgs, PlotArgs, plot_report, print_report};
use super::values::{DeviceArg, DtypeArg, ModeArg, check_pes};
use crate::bench::kernel_summary::KernelSummary;
use crate::job::request::{NonFinitePolicy, OnFailure, RowsPer, RunRequest, Work};
use crate::moe::Options;
use crate::moe::synthetic::SyntheticSpec;
use crate::run::{PreparedRun, supervisor};

/// The flags of `aristos bench summary`.
#[derive(clap::Args)]
pub struct Args {
    /// A report that `aristos run --json` wrote, instead of a run
    #[arg(long, value_name = "FILE", conflicts_with_all = ["Run", "BenchLayer"])]
    report: Option<PathBuf>,
    /// Time of attention, measured by a training loop, to be shown with the layer, milliseconds
    #[arg(long, value_name = "X")]
    attention_ms: Option<f64>,
    /// Print the result as JSON (keys: docs/measurements/README.md)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    plots: PlotArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten, next_help_heading = "Layer")]
    layer: BenchLayerArgs,
}

/// The run, if no report is given.
#[derive(clap::Args)]
#[group(id = "Run", multiple = true)]
#[command(next_help_heading = "Run")]
struct RunArgs {
    /// Number of PEs, one thread each
    #[arg(long, value_name = "N", default_value_t = 2)]
    pes: usize,
    /// Measured steps
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Element type of activations and expert weights
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DtypeArg,
    /// How the PEs exchange rows
    #[arg(long, value_enum, default_value = "pipelined")]
    mode: ModeArg,
}

impl RunArgs {
    fn prepare(&self, layer: &BenchLayerArgs) -> Result<PreparedRun> {
        ensure!(self.steps > 0, "--steps is 0, expected at least 1");
        let (device, dtype) = DeviceArg::Cpu.device(Some(self.dtype))?;
        let spec = SyntheticSpec::new(layer.config(), layer.seed);
        PreparedRun::open(RunRequest {
            work: Work::Synthetic { spec, tokens: layer.tokens, backward: false },
            pes: check_pes(self.pes)?,
            plan: None,
            on_failure: OnFailure::Stop,
            hot_shift_every: None,
            inject: None,
            replan: None,
            device,
            #[cfg(feature = "device")]
            symmetric: crate::gpu::SymmetricBy::Nvshmem,
            #[cfg(feature = "device")]
            gemm: None,
            #[cfg(feature = "device")]
            tile: None,
            #[cfg(feature = "device")]
            lane_stores: false,
            #[cfg(feature = "device")]
            graph: false,
            dtype,
            rows_per: RowsPer::Pe,
            steps: self.steps,
            sgd: None,
            options: Options { mode: self.mode.into(), ..Options::default() },
            losses: (0.0, 0.0),
            capacity_factor: None,
            output: None,
            save_weights: None,
            routing: None,
            save_routing: None,
            non_finite: NonFinitePolicy::Stop,
            check: false,
            trace: None,
            json: false,
        })
    }
}

impl Args {
    /// Runs the benchmark.
    pub fn command(&self) -> Result<bool> {
        if let Some(ms) = self.attention_ms {
            ensure!((0.0..=1e9).contains(&ms), "--attention-ms is {ms}, expected 0 to 10^9 milliseconds");
        }
        self.plots.create()?;
        let summary = match &self.report {
            Some(path) => KernelSummary::read(path, self.attention_ms)?,
            None => {
                let progress = Progress::of_slowest_pe("step");
                let report = supervisor::measure(&mut self.run.prepare(&self.layer)?, |status| progress.show(status));
                progress.clear();
                KernelSummary::new(&report?, self.attention_ms)?
            }
        };
        print_report(&summary, self.json)?;
        plot_report(&summary, &self.plots)?;
        Ok(true)
    }
}
