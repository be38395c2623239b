//! `aristos simulate`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::files;
use super::progress::Progress;
use super::run::SyntheticArgs;
use super::shared::{ClusterArgs, PlotArgs, show};
use super::sim_linear::read_device;
use super::simulate_balance::BalanceArgs;
use super::values::{DtypeArg, ModeArg, check_cores};
use super::workload::{read_model, read_transformer};
use crate::cluster::read_text;
use crate::formats::routing::Routing;
use crate::job::request::Work;
use crate::moe::synthetic::Synthetic;
use crate::moe::{Dtype, Options};
use crate::plot;
use crate::report::simulated_trace_json;
use crate::run::plan::parse_plan;
use crate::sim::network::Nics;
use crate::sim::routing::Popularity;
use crate::sim::step::{Cores, Jitter};
use crate::simulate::{
    Dense, Machine, RowOrder, RowsPer, Simulated, Tokens, balance_text, groups_on, layer_of, simulated_text,
};

/// Default tokens of a PE with `--model`.
const MODEL_TOKENS_PER_PE: usize = 4096;
/// Maximum PEs of a timeline.
const TRACED: usize = 16;

/// The flags of `aristos simulate`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: ClusterArgs,
    /// Expert-parallel groups and placement from `aristos plan --out` [default: one group, even shares]
    #[arg(long, value_name = "PLAN.json")]
    plan: Option<PathBuf>,
    /// A folder with a config.json, or one of mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, kimi-k2, gpt-oss-20b, gpt-oss-120b
    /// [default: the synthetic layer below; with it the tokens of a step are 4096 for each PE, or --tokens]
    #[arg(long, value_name = "DIR|NAME", conflicts_with_all = ["hidden", "intermediate", "experts", "top_k", "activation", "mlp", "bias", "shared_intermediate", "router"])]
    model: Option<PathBuf>,
    /// With --model: simulate all layers, and everything except routed experts by the roofline of this device: a JSON file (docs/simulator.md), or one of
    /// V100, A100-40GB, A100-80GB, H100, H200, B200 [default: one layer's routed experts]
    #[arg(long, alias = "device", value_name = "D.json|NAME", requires = "model")]
    roofline: Option<PathBuf>,
    /// With --roofline: tokens of a sequence
    #[arg(long, value_name = "S", default_value_t = 4096, requires = "roofline")]
    sequence: usize,
    /// Take the tokens' experts from a routing file (docs/simulator.md); the steps use its records in turn, and PE p has the tokens of node p mod `nodes`
    #[arg(long, value_name = "ROUTING.json", conflicts_with_all = ["tokens", "hot_ratio", "hot_weight", "seed"])]
    routing: Option<PathBuf>,
    /// Element type of activations and expert weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArg,
    /// How the PEs exchange rows
    #[arg(long, alias = "schedule", value_enum, default_value = "pipelined")]
    mode: ModeArg,
    /// Order of the rows from one PE to another
    #[arg(long, value_enum, default_value = "expert")]
    order: OrderArg,
    /// Destinations of a token's row
    #[arg(long, value_enum, default_value = "pe")]
    rows_per: RowsPerArg,
    /// Steps
    #[arg(long, value_name = "N", default_value_t = 1)]
    steps: usize,
    /// Vary the speed of each PE in each step at random, with this seed
    #[arg(long, value_name = "SEED")]
    jitter: Option<u64>,
    /// With --jitter: standard deviation of the logarithm of a PE's compute time
    #[arg(long, value_name = "S", default_value_t = 0.1, requires = "jitter")]
    jitter_sigma: f64,
    /// Network ports
    #[arg(long, value_enum, default_value = "pe")]
    nics: NicsArg,
    /// Constants of a machine from `aristos calibrate`, instead of the devices' rates
    #[arg(long, value_name = "CALIBRATION.json")]
    calibration: Option<PathBuf>,
    /// Cores of a host, shared by its PEs [default: the calibration's; without one each PE has its own]
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    /// Receive memory, as a multiple of the even share of the rows
    #[arg(long, value_name = "F", default_value_t = 2.0)]
    budget_factor: f64,
    /// Maximum rows per signal [default: a 16th of a receive window's, between 128 and 256]
    #[arg(long, value_name = "ROWS")]
    chunk_rows: Option<usize>,
    /// Approximate rows of a tile of an expert's GEMMs [default: 512]
    #[arg(long, value_name = "ROWS")]
    tile_rows: Option<usize>,
    /// Print JSON (keys: docs/simulator.md)
    #[arg(long)]
    json: bool,
    /// Write a timeline of the first 16 PEs for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    plots: PlotArgs,
    #[command(flatten)]
    balance: BalanceArgs,
    #[command(flatten)]
    synthetic: SyntheticArgs,
}

/// `--order`.
#[derive(Clone, Copy, ValueEnum)]
pub enum OrderArg {
    /// By the first expert at the destination, and results by the last one, as the layer sends them
    Expert,
    /// By token
    Token,
}

/// `--rows-per`.
#[derive(Clone, Copy, ValueEnum)]
pub enum RowsPerArg {
    /// To each PE that has any of its experts, as the layer does
    Pe,
    /// To each of its experts
    Expert,
    /// To each host that has any of its experts; a PE there forwards it, and sends one sum back
    #[value(alias = "node")]
    Host,
}

/// `--nics`.
#[derive(Clone, Copy, ValueEnum)]
pub enum NicsArg {
    /// One for every PE
    Pe,
    /// One for every host
    Host,
}

impl Args {
    fn simulated(&self, balancing: bool) -> Result<Simulated> {
        let cluster = self.on.read()?;
        let (model, pes) = (self.model.as_deref().map(read_model).transpose()?, cluster.devices.len());
        let Work::Synthetic { spec, tokens, backward } = self.synthetic.work(None)? else {
            bail!("the flags of a synthetic layer are missing")
        };
        let config = model.as_ref().map_or_else(|| spec.layer.clone(), layer_of);
        let (ratio, weight) = (spec.hot_ratio, spec.hot_weight);
        let tokens = match (&self.routing, &model) {
            (Some(path), _) => {
                let routing = Routing::read(path)?;
                let fits = routing.check_model(config.n_experts, config.router.top_k);
                fits.with_context(|| path.display().to_string())?;
                Tokens::File(routing)
            }
            (None, None) if !balancing => Tokens::Synthetic(Box::new(Synthetic::new(spec.clone())?), tokens),
            (None, _) => Tokens::Drawn {
                tokens: self.synthetic.tokens.unwrap_or(MODEL_TOKENS_PER_PE * pes),
                popularity: match ratio > 0.0 || weight > 0.0 {
                    true => Popularity::Hot { ratio, weight },
                    false => Popularity::Zipf { exponent: 0.0 },
                },
                seed: spec.seed,
            },
        };
        let dense = match (&self.model, &self.roofline) {
            (Some(model), Some(device)) => Some(Dense {
                transformer: read_transformer(model)?,
                device: read_device(device)?,
                sequence: self.sequence,
            }),
            _ => None,
        };
        let groups = match &self.plan {
            None => groups_on(&cluster, None, config.n_experts)?,
            Some(path) => {
                let groups = || groups_on(&cluster, Some(&parse_plan(&read_text(path)?)?), config.n_experts);
                groups().with_context(|| path.display().to_string())?
            }
        };
        ensure!(
            (0.0..=10.0).contains(&self.jitter_sigma),
            "--jitter-sigma is {}, expected a number from 0 to 10",
            self.jitter_sigma
        );
        let mut options = Options::default();
        (options.mode, options.budget_factor) = (self.mode.into(), self.budget_factor);
        (options.chunk_rows, options.tile_rows) = (self.chunk_rows, self.tile_rows);
        let calibration = self.calibration.as_deref().map(Machine::read).transpose()?;
        check_cores(self.cores)?;
        let busy_factor = calibration.as_ref().map_or(1.0, Machine::busy_factor);
        Ok(Simulated {
            cores: self.cores.map(|count| Cores { count, busy_factor }),
            calibration,
            cluster,
            config,
            groups,
            dtype: Dtype::from(self.dtype),
            options,
            tokens,
            order: match self.order {
                OrderArg::Expert => RowOrder::Expert,
                OrderArg::Token => RowOrder::Token,
            },
            rows_per: match self.rows_per {
                RowsPerArg::Pe => RowsPer::Pe,
                RowsPerArg::Expert => RowsPer::Expert,
                RowsPerArg::Host => RowsPer::Host,
            },
            backward,
            steps: self.steps,
            jitter: self.jitter.map(|seed| Jitter { seed, sigma: self.jitter_sigma }),
            nics: match self.nics {
                NicsArg::Pe => Nics::PerPe,
                NicsArg::Host => Nics::PerHost,
            },
            dense,
            traced: if self.trace.is_some() { TRACED } else { 0 },
        })
    }
}

/// Simulates the steps and prints the result.
pub fn command(args: &Args) -> Result<bool> {
    files::check_distinct(
        &[("trace", args.trace.as_deref())],
        &[
            ("cluster", Some(&args.on.path)),
            ("plan", args.plan.as_deref()),
            ("routing", args.routing.as_deref()),
            ("calibration", args.calibration.as_deref()),
            ("roofline", args.roofline.as_deref()),
        ],
    )?;
    let balancing = args.balance.balancing()?;
    let simulated = args.simulated(balancing.is_some())?;
    if let Some(balancing) = balancing {
        let progress = Progress::of_work("simulating");
        let done = simulated.balance(&balancing);
        progress.clear();
        let report = done?;
        show(args.json, &report, || balance_text(&report))?;
        return Ok(true);
    }
    args.plots.create()?;
    let file = files::create(args.trace.as_ref())?;
    let progress = Progress::of_work("simulating");
    let done = simulated.run();
    progress.clear();
    let (report, times) = done?;
    files::write(file, simulated_trace_json("PE", &times.spans)?)?;
    args.plots.save("stragglers", || plot::plot_stragglers(&report.stragglers.ecdf_s))?;
    show(args.json, &report, || simulated_text(&report))?;
    Ok(true)
}
