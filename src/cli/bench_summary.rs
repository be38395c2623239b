//! `aristos bench summary`.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::progress::Progress;
use super::values::{ActivationArg, DeviceArg, DtypeArg, ModeArg, check_pes};
use crate::bench::kernel_summary::KernelSummary;
use crate::job::request::{OnFailure, RowsPer, RunRequest, Work};
use crate::moe::synthetic::SyntheticSpec;
use crate::moe::{LayerConfig, MlpConfig, Options, RouterConfig};
use crate::plot;
use crate::run::{PreparedRun, supervisor};
use crate::stdio::{print, print_line, say};

/// What `aristos bench summary` takes.
#[derive(clap::Args)]
pub struct Args {
    /// A report that `aristos run --json` wrote, instead of a run
    #[arg(long, value_name = "FILE", conflicts_with = "Layer")]
    report: Option<PathBuf>,
    /// Time of attention beside the layer, as a training loop measures it, milliseconds
    #[arg(long, value_name = "X")]
    attention_ms: Option<f64>,
    /// Print the result as JSON (keys: docs/measurements/README.md)
    #[arg(long)]
    json: bool,
    /// Write the shares as a plot: SVG, and with the feature `png` PNG too
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    layer: LayerArgs,
}

/// The layer that is run where no report is given.
#[derive(clap::Args)]
#[group(id = "Layer", multiple = true)]
#[command(next_help_heading = "Layer")]
struct LayerArgs {
    /// Number of PEs, one thread each
    #[arg(long, value_name = "N", default_value_t = 2)]
    pes: usize,
    /// Steps that are measured
    #[arg(long, default_value_t = 5)]
    steps: usize,
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
    /// Element type of activations and expert weights
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DtypeArg,
    /// How the PEs exchange rows
    #[arg(long, value_enum, default_value = "pipelined")]
    mode: ModeArg,
    /// Seed of weights, tokens and routing
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl LayerArgs {
    fn run(&self) -> Result<PreparedRun> {
        ensure!(self.steps > 0, "--steps is 0, expected at least 1");
        let (device, dtype) = DeviceArg::Cpu.device(Some(self.dtype))?;
        let activation = self.activation.into();
        let expert = MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, activation) };
        let layer = LayerConfig::new(self.hidden, self.experts, RouterConfig::softmax(self.top_k), expert);
        let spec = SyntheticSpec::new(layer, self.seed);
        PreparedRun::open(RunRequest {
            work: Work::Synthetic { spec, tokens: self.tokens, backward: false },
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
            check: false,
            trace: None,
            json: false,
        })
    }
}

impl Args {
    /// Runs the benchmark.
    ///
    /// # Errors
    /// One line.
    pub fn command(&self) -> Result<bool> {
        if let Some(ms) = self.attention_ms {
            ensure!((0.0..=1e9).contains(&ms), "--attention-ms is {ms}, expected 0 to 10^9 milliseconds");
        }
        self.plot.as_deref().map(plot::create_folder).transpose()?;
        let summary = match &self.report {
            Some(path) => KernelSummary::read(path, self.attention_ms)?,
            None => {
                let progress = Progress::of_slowest_pe("step");
                let report = supervisor::measure(&mut self.layer.run()?, |status| progress.show(status));
                progress.clear();
                KernelSummary::new(&report?, self.attention_ms)?
            }
        };
        if self.json {
            print_line(&summary.to_json())?;
        } else {
            print(&summary.render_table())?;
        }
        if let Some(folder) = &self.plot {
            for file in summary.plot(folder)? {
                say(&file.display().to_string());
            }
        }
        Ok(true)
    }
}
