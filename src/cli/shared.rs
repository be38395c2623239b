//! Flags that several subcommands share. A flag has the same meaning in all of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::files::{Csv, create, write};
use super::ranks::{Over, RanksArgs};
use super::values::{ActivationArg, TransportArg};
#[cfg(feature = "device")]
use super::values::{GemmArg, SymmetricArg};
use crate::cluster::{Cluster, preset, read_text};
use crate::formats::routing::Routing;
#[cfg(feature = "device")]
use crate::job::request::DeviceKind;
#[cfg(feature = "device")]
use crate::moe::device::Tile;
use crate::moe::{LayerConfig, MlpConfig, RouterConfig};
use crate::plan::{InputError, Workload, loads_of_report};
use crate::plot;
use crate::report::Report;
use crate::stdio::{print, print_line, say};

/// The largest `--timeout`, seconds: half a year.
const MAX_TIMEOUT_S: f64 = (1 << 24) as f64;

/// The wait limit of a job.
#[derive(clap::Args)]
pub struct WaitArgs {
    /// How long a PE waits for another before the job fails, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    timeout: f64,
}

impl WaitArgs {
    /// # Errors
    /// A time that is not positive, or longer than half a year.
    pub fn limit(&self) -> Result<Duration> {
        let seconds = self.timeout;
        ensure!(seconds > 0.0, "--timeout is {seconds}, expected a number of seconds above 0");
        ensure!(seconds <= MAX_TIMEOUT_S, "--timeout is {seconds}, expected at most {MAX_TIMEOUT_S} seconds");
        Ok(Duration::from_secs_f64(seconds))
    }
}

/// The transport between the PEs of a job.
#[derive(clap::Args)]
pub struct TransportArgs {
    /// Transport of rows and signals between PEs
    #[arg(long, value_enum, default_value = "shm")]
    pub transport: TransportArg,
    #[command(flatten)]
    ranks: RanksArgs,
}

impl TransportArgs {
    /// # Errors
    /// As [`RanksArgs::over`].
    pub fn over(&self) -> Result<Over> {
        self.ranks.over(self.transport)
    }
}

/// The kernels and the memory of a layer on a device.
#[cfg(feature = "device")]
#[derive(clap::Args)]
pub struct KernelArgs {
    /// Library that gives CUDA devices symmetric memory; nccl, 2.29.2 or newer, for PEs of one host [default: nvshmem]
    #[arg(long, value_enum)]
    symmetric: Option<SymmetricArg>,
    /// Matrix products of a device [default: the best that it has]
    #[arg(long, value_enum)]
    gemm: Option<GemmArg>,
    /// Tiles of these products, such as 64x128 [default: by the layer's shape]
    #[arg(long)]
    pub tile: Option<Tile>,
    /// On Hopper, store results of 16 bits and copy operands by lanes instead of TMA: to compare the two
    #[arg(long)]
    pub lane_stores: bool,
}

#[cfg(feature = "device")]
impl KernelArgs {
    /// # Errors
    /// A flag that needs a device, without one.
    pub fn check(&self, device: DeviceKind) -> Result<()> {
        let given = [("gemm", self.gemm.is_some()), ("tile", self.tile.is_some()), ("lane-stores", self.lane_stores)];
        for (flag, given) in given {
            ensure!(device != DeviceKind::Cpu || !given, "--{flag} on the CPU, expected --device too");
        }
        ensure!(
            self.symmetric.is_none() || device == DeviceKind::Cuda,
            "--symmetric without --device cuda, expected --device cuda too"
        );
        Ok(())
    }

    pub fn gemm(&self) -> Option<crate::moe::device::GemmPath> {
        self.gemm.map(Into::into)
    }

    pub fn symmetric(&self) -> crate::gpu::SymmetricBy {
        match self.symmetric {
            None | Some(SymmetricArg::Nvshmem) => crate::gpu::SymmetricBy::Nvshmem,
            Some(SymmetricArg::Nccl) => crate::gpu::SymmetricBy::Nccl,
        }
    }
}

/// The synthetic layer of a benchmark.
#[derive(clap::Args)]
#[group(id = "BenchLayer", multiple = true)]
pub struct BenchLayerArgs {
    /// Tokens, over all PEs
    #[arg(long, default_value_t = 2048)]
    pub tokens: usize,
    /// Hidden width
    #[arg(long, default_value_t = 1024)]
    hidden: usize,
    /// Width inside an expert
    #[arg(long, default_value_t = 4096)]
    intermediate: usize,
    /// Routed experts
    #[arg(long, default_value_t = 8)]
    pub experts: usize,
    /// Experts per token
    #[arg(long, default_value_t = 2)]
    pub top_k: usize,
    /// The experts' nonlinearity
    #[arg(long, value_enum, default_value = "gelu")]
    activation: ActivationArg,
    /// Gated experts, instead of plain two-matrix ones
    #[arg(long)]
    gated: bool,
    /// Seed of weights, tokens and routing
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl BenchLayerArgs {
    pub fn config(&self) -> LayerConfig {
        let activation = self.activation.into();
        let expert = MlpConfig { gated: self.gated, ..MlpConfig::gated(self.intermediate, activation) };
        LayerConfig::new(self.hidden, self.experts, RouterConfig::softmax(self.top_k), expert)
    }
}

/// The cluster of a plan or a simulation.
#[derive(clap::Args)]
pub struct ClusterArgs {
    /// The cluster: a JSON file, or preset:NAME[:NODES] (docs/planner.md lists the names)
    #[arg(long = "cluster", value_name = "C")]
    pub path: PathBuf,
}

impl ClusterArgs {
    /// # Errors
    /// A file that is not a cluster; an unknown preset.
    pub fn read(&self) -> Result<Cluster> {
        match self.path.to_str().and_then(|text| text.strip_prefix("preset:")) {
            Some(name) => Ok(preset(name)?),
            None => Ok(Cluster::read(&self.path)?),
        }
    }
}

/// The measured or captured load of a workload's experts.
#[derive(clap::Args)]
pub struct LoadArgs {
    /// Weight the experts by the tokens that each got in a report of `aristos run --json`
    #[arg(long, value_name = "REPORT.json")]
    pub expert_load_from: Option<PathBuf>,
    /// Weight the experts by the tokens that each gets in a routing file (docs/simulator.md)
    #[arg(long, value_name = "ROUTING.json", conflicts_with = "expert_load_from")]
    pub routing: Option<PathBuf>,
}

impl LoadArgs {
    /// Weights the experts of `workload`. `top_k` is the model's number of experts per token, if known.
    ///
    /// # Errors
    /// A file of another model.
    pub fn weight(&self, workload: &mut Workload, top_k: impl FnOnce() -> Result<Option<usize>>) -> Result<()> {
        if let Some(path) = &self.expert_load_from {
            let text = read_text(path)?;
            let set = loads_of_report(&text).and_then(|loads| workload.set_load(loads, "tokens_per_expert"));
            set.with_context(|| path.display().to_string())?;
        }
        if let Some(path) = &self.routing {
            weight_by_routing(workload, path, top_k()?)?;
        }
        Ok(())
    }
}

fn weight_by_routing(workload: &mut Workload, path: &Path, top_k: Option<usize>) -> Result<(), InputError> {
    let routing = Routing::read(path)?;
    let fits = routing.check_model(workload.n_experts(), top_k.unwrap_or(routing.top_k));
    let set = fits.and_then(|()| workload.set_load(routing.tokens_per_expert(), "choices"));
    set.map_err(|error| error.in_file(path))
}

/// A folder of plots.
#[derive(clap::Args)]
pub struct PlotArgs {
    /// Write plots into this folder: SVG, and with the feature `png` PNG too
    #[arg(long = "plot", value_name = "DIR")]
    pub folder: Option<PathBuf>,
}

impl PlotArgs {
    /// Creates the folder before anything is measured.
    ///
    /// # Errors
    /// A folder that cannot be created.
    pub fn create(&self) -> Result<()> {
        self.folder.as_deref().map_or(Ok(()), plot::create_folder)
    }

    /// Writes one plot, if plots are asked for.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, stem: &str, svg: impl FnOnce() -> Result<String>) -> Result<()> {
        match &self.folder {
            Some(folder) => plot::save(folder, stem, &svg()?).map(drop),
            None => Ok(()),
        }
    }
}

/// The files of a benchmark's result.
#[derive(clap::Args)]
pub struct BenchOutputArgs {
    /// Print the result as JSON (keys: docs/measurements/README.md)
    #[arg(long)]
    json: bool,
    /// Write the raw rows
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    plots: PlotArgs,
}

impl BenchOutputArgs {
    /// Creates the files before anything is measured, in the process that `reports`.
    ///
    /// # Errors
    /// A file or a folder that cannot be created.
    pub fn create(&self, reports: bool) -> Result<Csv> {
        if !reports {
            return Ok(None);
        }
        let csv = create(self.csv.as_ref())?;
        self.plots.create()?;
        Ok(csv)
    }

    /// Writes, prints and plots the result.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn report(&self, report: &impl Report, csv: Csv, rows: impl FnOnce() -> String) -> Result<()> {
        if csv.is_some() {
            write(csv, rows())?;
        }
        print_report(report, self.json)?;
        plot_report(report, &self.plots)
    }
}

/// Prints a result as JSON in one line, or as `text`.
///
/// # Errors
/// Standard output does not take it.
pub fn show(json: bool, result: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
    match json {
        true => print_line(&serde_json::to_string(result)?)?,
        false => print(&text())?,
    }
    Ok(())
}

/// Prints a report as JSON or as text.
///
/// # Errors
/// Standard output does not take it.
pub fn print_report(report: &impl Report, json: bool) -> Result<()> {
    match json {
        true => print_line(&report.to_json())?,
        false => print(&report.render_table())?,
    }
    Ok(())
}

/// Writes the plots of a report, if they are asked for, and names the files on standard error.
///
/// # Errors
/// A file that cannot be written.
pub fn plot_report(report: &impl Report, plots: &PlotArgs) -> Result<()> {
    let Some(folder) = &plots.folder else { return Ok(()) };
    report.plot(folder)?.iter().for_each(|file| say(&file.display().to_string()));
    Ok(())
}
