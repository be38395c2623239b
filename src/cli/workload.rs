//! `aristos workload`, and the model's flags of `aristos plan`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::files::check_distinct;
use super::values::DtypeArg;
use crate::checkpoint::{self, OutputFile};
use crate::cluster::read_text;
use crate::formats::Transformer;
use crate::formats::routing::Routing;
use crate::moe::Dtype;
use crate::plan::{self, Batch, InputError, Model, Workload};
use crate::stdio::print;

/// What `aristos workload` takes.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    of_model: ModelArgs,
    /// Number of devices, where it is known: a token goes to each at most once, and a step of each is an iteration [default: as many as the
    /// cluster has, and every copy of a token counted]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    devices: Option<u32>,
    /// Weigh the experts by the tokens that each got in a report of `aristos run --json`, or in a routing file (docs/simulator.md)
    #[arg(long, value_name = "REPORT.json|ROUTING.json")]
    routing: Option<PathBuf>,
    /// Where to write the workload (docs/planner.md), for `aristos plan --workload` [default: standard output]
    #[arg(long, value_name = "W.json")]
    out: Option<PathBuf>,
}

/// A model and a batch.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A folder with a config.json, or one of mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, gpt-oss-120b
    #[arg(long, value_name = "DIR|NAME")]
    model: PathBuf,
    /// Tokens of each device in a step
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    tokens_per_device: u64,
    #[command(flatten)]
    rest: RestArgs,
}

/// The same as an alternative to `--workload`.
#[derive(clap::Args)]
pub struct OptionalModelArgs {
    /// In place of a workload file, a model: a folder with a config.json, or one of mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b,
    /// qwen3-235b-a22b, deepseek-v3, gpt-oss-120b
    #[arg(long, value_name = "DIR|NAME", conflicts_with = "workload", requires = "tokens_per_device")]
    model: Option<PathBuf>,
    /// With --model: tokens of each device in a step
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    tokens_per_device: Option<u64>,
    #[command(flatten)]
    rest: RestArgs,
}

#[derive(clap::Args)]
struct RestArgs {
    /// With --model: so many of its layers with experts [default: all]
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// With --model: element type of activations and weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArg,
    /// With --model: bytes of memory for each weight of an expert, with its gradient and what the optimizer keeps [default: of Adam, 18 for
    /// bf16 and 16 for f32]
    #[arg(long, value_name = "B")]
    bytes_per_parameter: Option<f64>,
    /// With --model: further forward passes by recomputation
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    recomputation: f64,
}

impl RestArgs {
    fn workload(&self, model: &Path, tokens_per_device: u64, devices: Option<usize>) -> Result<Workload> {
        let mut model = read_model(model)?;
        if let Some(layers) = self.layers {
            (model.layers, model.moe_layers) = (layers as usize, layers as usize);
        }
        let dtype: Dtype = self.dtype.into();
        let bytes = self.bytes_per_parameter.unwrap_or(Batch::adam_bytes(dtype.bytes()));
        ensure!((1e-3..=1e6).contains(&bytes), "--bytes-per-parameter is {bytes}, expected a number from 0.001 to 1e6");
        let recomputation = self.recomputation;
        ensure!(
            (0.0..=1e6).contains(&recomputation),
            "--recomputation is {recomputation}, expected a number from 0 to 1e6"
        );
        let mut batch = Batch::new(tokens_per_device as f64, dtype.bytes());
        (batch.devices, batch.bytes_per_parameter, batch.recomputation) = (devices, Some(bytes), recomputation);
        Ok(model.workload(&batch))
    }
}

impl OptionalModelArgs {
    /// The model's experts per token, where there is a model.
    pub fn top_k(&self) -> Result<Option<usize>> {
        Ok(self.model.as_deref().map(read_model).transpose()?.map(|model| model.top_k))
    }

    /// The workload of the model for so many devices.
    pub fn workload(&self, devices: usize) -> Result<Workload> {
        let (model, tokens) = self.model.as_deref().zip(self.tokens_per_device).context("--model is missing")?;
        self.rest.workload(model, tokens, Some(devices))
    }
}

/// A model by its folder, or by its name.
pub(super) fn read_model(model: &Path) -> Result<Model> {
    if model.is_dir() {
        return Ok(checkpoint::read_model(model)?);
    }
    Model::preset(&model.to_string_lossy()).map_err(|error| anyhow::anyhow!("--{error}"))
}

/// What such a model has beside its routed experts.
pub(super) fn read_transformer(model: &Path) -> Result<Transformer> {
    match model.is_dir() {
        true => Ok(checkpoint::read_transformer(model)?),
        false => Transformer::preset(&model.to_string_lossy()).context("--model has no shapes of attention"),
    }
}

/// Weighs the experts by the tokens that each got in a report.
pub(super) fn weigh(workload: &mut Workload, report: &str) -> Result<(), InputError> {
    workload.set_load(plan::loads_of_report(report)?, "tokens_per_expert")
}

/// Weighs the experts by the tokens that each gets in a routing file, of a model with so many experts per token where that is known.
pub(super) fn weigh_by_routing(workload: &mut Workload, path: &Path, top_k: Option<usize>) -> Result<(), InputError> {
    let routing = Routing::read(path)?;
    let fits = routing.check_model(workload.n_experts(), top_k.unwrap_or(routing.top_k));
    let set = fits.and_then(|()| workload.set_load(routing.tokens_per_expert(), "choices"));
    set.map_err(|error| error.in_file(path))
}

/// Writes the workload.
pub fn command(args: &Args) -> Result<bool> {
    let config = args.of_model.model.join("config.json");
    check_distinct(
        &[("out", args.out.as_deref())],
        &[("routing", args.routing.as_deref()), ("model", Some(config.as_path()))],
    )?;
    let of_model = &args.of_model;
    let devices = args.devices.map(|devices| devices as usize);
    let mut workload = of_model.rest.workload(&of_model.model, of_model.tokens_per_device, devices)?;
    if let Some(path) = &args.routing {
        let text = read_text(path)?;
        match Routing::is_routing(&text) {
            true => weigh_by_routing(&mut workload, path, Some(read_model(&of_model.model)?.top_k))?,
            false => weigh(&mut workload, &text).with_context(|| path.display().to_string())?,
        }
    }
    let text = workload.to_json() + "\n";
    match &args.out {
        None => print(&text)?,
        Some(path) => OutputFile::replace(path, text.as_bytes())?,
    }
    Ok(true)
}
