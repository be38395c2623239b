//! `aristos simulate`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::files;
use super::plan::read_cluster;
use super::run::SyntheticArgs;
use super::sim_linear::read_device;
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
use crate::simulate::{Calibration, Dense, RowOrder, RowsPer, Simulated, SimulatedReport, Tokens, groups_on, layer_of};
use crate::stdio::out_line;

/// Tokens of a PE with --model, where nothing else is said.
const MODEL_TOKENS_PER_PE: usize = 4096;
/// PEs of a timeline.
const TRACED: usize = 16;

/// What `aristos simulate` takes.
#[derive(clap::Args)]
pub struct Args {
    /// The cluster: a JSON file (docs/planner.md), or preset:NAME[:NODES] with perlmutter-a100-40gb, perlmutter-a100-80gb
    /// or dgx-h100; a PE is a device
    #[arg(long, value_name = "C")]
    cluster: PathBuf,
    /// Expert-parallel groups and placement, as `aristos plan --out` wrote them [default: one group, even shares]
    #[arg(long, value_name = "PLAN.json")]
    plan: Option<PathBuf>,
    /// A folder with a config.json, or one of mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, gpt-oss-120b
    /// [default: the synthetic layer below; with it the tokens of a step are 4096 for each PE, or --tokens]
    #[arg(long, value_name = "DIR|NAME", conflicts_with_all = ["hidden", "intermediate", "experts", "top_k", "activation", "mlp", "bias", "shared_intermediate", "router"])]
    model: Option<PathBuf>,
    /// With --model: all its layers, attention and what else is no routed expert by the roofline of this device: a JSON file (docs/simulator.md), or one of
    /// V100, A100-40GB, A100-80GB, H100, H200, B200 [default: one layer's routed experts]
    #[arg(long, value_name = "D.json|NAME", requires = "model")]
    device: Option<PathBuf>,
    /// With --device: tokens of a sequence
    #[arg(long, value_name = "S", default_value_t = 4096, requires = "device")]
    sequence: usize,
    /// Which experts tokens go to (docs/simulator.md); the steps are shared out over its records, and PE p has the tokens of node p mod `nodes`
    #[arg(long, value_name = "ROUTING.json", conflicts_with_all = ["tokens", "hot_ratio", "hot_weight", "seed"])]
    routing: Option<PathBuf>,
    /// Element type of activations and expert weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArg,
    /// How the PEs exchange rows
    #[arg(long, value_enum, default_value = "pipelined")]
    schedule: ModeArg,
    /// The order of the rows that a PE sends another one
    #[arg(long, value_enum, default_value = "expert")]
    order: OrderArg,
    /// How often a token's row is sent
    #[arg(long, value_enum, default_value = "pe")]
    rows_per: RowsPerArg,
    /// Steps
    #[arg(long, value_name = "N", default_value_t = 1)]
    steps: usize,
    /// Make PEs slower and faster, step by step, from this seed
    #[arg(long, value_name = "SEED")]
    jitter: Option<u64>,
    /// With --jitter: standard deviation of the logarithm of a PE's time for the same work
    #[arg(long, value_name = "S", default_value_t = 0.1, requires = "jitter")]
    jitter_sigma: f64,
    /// Who has a port to the network
    #[arg(long, value_enum, default_value = "pe")]
    nics: NicsArg,
    /// What work takes on the machine, as `aristos calibrate` has written it, in place of the devices' rates
    #[arg(long, value_name = "CALIBRATION.json")]
    calibration: Option<PathBuf>,
    /// Cores of a host, which its PEs share as threads do [default: the calibration's, and without one each PE has its own]
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    /// Receive memory, as a multiple of the even share of the rows
    #[arg(long, value_name = "F", default_value_t = 2.0)]
    budget_factor: f64,
    /// Most rows sent under one signal [default: a 16th of a receive window's, between 128 and 256]
    #[arg(long, value_name = "ROWS")]
    chunk_rows: Option<usize>,
    /// Rows that an expert's products are cut to, about [default: 512]
    #[arg(long, value_name = "ROWS")]
    tile_rows: Option<usize>,
    /// Print JSON (keys: docs/simulator.md)
    #[arg(long)]
    json: bool,
    /// Write a timeline of the first 16 PEs for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Draw the distribution of straggler delays into this folder, as SVG, and with the feature `png` as PNG too
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    synthetic: SyntheticArgs,
}

/// `--order`.
#[derive(Clone, Copy, ValueEnum)]
pub enum OrderArg {
    /// By their first expert there, and back by their last one, as the layer sends them
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
    /// To each host that has any of its experts; a PE there hands it on, and sends one sum back
    Node,
}

/// `--nics`.
#[derive(Clone, Copy, ValueEnum)]
pub enum NicsArg {
    /// Every PE
    Pe,
    /// All PEs of a host share one
    Host,
}

impl Args {
    fn simulated(&self) -> Result<Simulated> {
        let cluster = read_cluster(&self.cluster)?;
        let (model, pes) = (self.model.as_deref().map(read_model).transpose()?, cluster.devices.len());
        let Work::Synthetic { spec, tokens, backward } = self.synthetic.work(None)? else { bail!("there is no layer") };
        let config = model.as_ref().map_or_else(|| spec.layer.clone(), layer_of);
        let (ratio, weight) = (spec.hot_ratio, spec.hot_weight);
        let tokens = match (&self.routing, &model) {
            (Some(path), _) => {
                let routing = Routing::read(path)?;
                let fits = routing.check_model(config.n_experts, config.router.top_k);
                fits.with_context(|| path.display().to_string())?;
                Tokens::File(routing)
            }
            (None, None) => Tokens::Synthetic(Box::new(Synthetic::new(spec.clone())?), tokens),
            (None, Some(_)) => Tokens::Drawn {
                tokens: self.synthetic.tokens.unwrap_or(MODEL_TOKENS_PER_PE * pes),
                popularity: match ratio > 0.0 || weight > 0.0 {
                    true => Popularity::Hot { ratio, weight },
                    false => Popularity::Zipf { exponent: 0.0 },
                },
                seed: spec.seed,
            },
        };
        let dense = match (&self.model, &self.device) {
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
        (options.mode, options.budget_factor) = (self.schedule.into(), self.budget_factor);
        (options.chunk_rows, options.tile_rows) = (self.chunk_rows, self.tile_rows);
        let calibration = self.calibration.as_deref().map(Calibration::read).transpose()?;
        check_cores(self.cores)?;
        let busy_factor = calibration.as_ref().map_or(1.0, |calibration| calibration.busy_factor);
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
                RowsPerArg::Node => RowsPer::Node,
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

/// Simulates, and prints.
pub fn command(args: &Args) -> Result<bool> {
    files::check_distinct(
        &[("trace", args.trace.as_deref())],
        &[
            ("cluster", Some(&args.cluster)),
            ("plan", args.plan.as_deref()),
            ("routing", args.routing.as_deref()),
            ("calibration", args.calibration.as_deref()),
            ("device", args.device.as_deref()),
        ],
    )?;
    let simulated = args.simulated()?;
    if let Some(folder) = &args.plot {
        plot::create_folder(folder)?;
    }
    let file = files::create(args.trace.as_ref())?;
    let (report, times) = simulated.run()?;
    files::write(file, simulated_trace_json("PE", &times.spans)?)?;
    if let Some(folder) = &args.plot {
        plot::save(folder, "stragglers", &plot::plot_stragglers(&report.stragglers.ecdf_s)?)?;
    }
    match args.json {
        true => out_line!("{}", serde_json::to_string(&report)?),
        false => print(&report)?,
    }
    Ok(true)
}

fn print(report: &SimulatedReport) -> Result<()> {
    let config = &report.config;
    out_line!(
        "{} PEs in {} group{}, {} tokens, {} experts, top-{}, hidden {}, {}, {}",
        config.pes,
        config.groups,
        if config.groups == 1 { "" } else { "s" },
        config.tokens,
        config.experts,
        config.top_k,
        config.hidden,
        config.dtype,
        config.mode
    );
    out_line!("step {:.3} ms, {:.4e} tokens/s", report.step_s * 1e3, report.tokens_per_s);
    out_line!("{:14} {:>14} {:>14} {:>14} {:>14}", "time, ms", "forward median", "max", "backward median", "max");
    let of = |pass: Option<&crate::report::PassTimes>, phase: Option<&str>| {
        let spread = pass.and_then(|pass| match phase {
            None => Some(pass.total),
            Some(phase) => pass.phases.get(phase).copied(),
        });
        spread.map_or(format!("{:>14} {:>14}", "", ""), |s| format!("{:14.3} {:14.3}", s.median_s * 1e3, s.max_s * 1e3))
    };
    for (name, phase) in [
        ("total", None),
        ("router", Some("router")),
        ("expert GEMM", Some("expert_gemm")),
        ("dispatch", Some("dispatch")),
        ("combine", Some("combine")),
        ("waiting", Some("waiting")),
        ("other", Some("other")),
    ] {
        out_line!("{name:14} {} {}", of(Some(&report.forward), phase), of(report.backward.as_ref(), phase));
    }
    let (all, network) = (report.exchange_bytes_per_step, report.network_bytes_per_step);
    out_line!("sent in dispatch and combine, MB: {:.3}, between hosts {:.3}", all * 1e-6, network * 1e-6);
    let stragglers = &report.stragglers;
    out_line!("overlap efficiency {:.1}%", report.overlap_efficiency * 100.0);
    out_line!(
        "straggler delay, ms: median {:.3}, P95 {:.3}, max {:.3}",
        stragglers.median_s * 1e3,
        stragglers.p95_s * 1e3,
        stragglers.max_s * 1e3
    );
    let memory = &report.memory;
    out_line!(
        "memory of a PE, MB: symmetric {:.0}, weights {:.0}, gradients {:.0}, rows {:.0}",
        memory.symmetric_bytes as f64 * 1e-6,
        memory.weights_bytes as f64 * 1e-6,
        memory.gradients_bytes as f64 * 1e-6,
        memory.rows_bytes as f64 * 1e-6
    );
    if let Some(model) = &report.model {
        let (step_ms, layers) = (model.step_s * 1e3, model.layers);
        out_line!(
            "model, {layers} layers, {} with experts: step {step_ms:.3} ms, {:.4e} tokens/s",
            model.moe_layers,
            model.tokens_per_s
        );
        let parts = [
            ("attention", model.attention),
            ("dense", model.dense),
            ("MoE", model.moe),
            ("exposed communication", model.exposed_communication),
        ];
        for (name, part) in parts {
            out_line!("  {name:22} {:12.3} ms {:6.1}%", part.time_s * 1e3, part.share * 100.0);
        }
    }
    for change in &report.would_help {
        out_line!("with {}: {:.3} ms, {:.2}x", change.change, change.step_s * 1e3, change.speedup);
    }
    Ok(())
}
