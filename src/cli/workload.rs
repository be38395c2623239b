//! `aristos workload`, and the model's flags of `aristos plan`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::files::check_distinct;
use super::shared::LoadArgs;
use super::values::DtypeArg;
use crate::checkpoint::{self, OutputFile};
use crate::formats::Transformer;
use crate::moe::Dtype;
use crate::plan::{Batch, Model, Workload};
use crate::stdio::print;

/// The flags of `aristos workload`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    of_model: ModelArgs,
    /// Number of devices: a token is sent to each at most once, and a step of all of them is an iteration [default: the cluster's,
    /// with every copy of a token counted]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    devices: Option<u32>,
    #[command(flatten)]
    load: LoadArgs,
    /// Output file of the workload (docs/planner.md), for `aristos plan --workload` [default: standard output]
    #[arg(long, value_name = "W.json")]
    out: Option<PathBuf>,
}

/// A model and a batch.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A folder with a config.json, or one of mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, kimi-k2, gpt-oss-20b, gpt-oss-120b
    #[arg(long, value_name = "DIR|NAME")]
    model: PathBuf,
    /// Tokens of each device in a step
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    tokens_per_device: u64,
    #[command(flatten)]
    rest: RestArgs,
}

/// A model and a batch as an alternative to `--workload`.
#[derive(clap::Args)]
pub struct OptionalModelArgs {
    /// A model instead of a workload file: a folder with a config.json, or one of mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b,
    /// qwen3-235b-a22b, deepseek-v3, kimi-k2, gpt-oss-20b, gpt-oss-120b
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
    /// With --model: number of its layers with experts [default: all]
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// With --model: element type of activations and weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArg,
    /// With --model: bytes of memory per weight of an expert, including gradient and optimizer state [default: of Adam, 18 for
    /// bf16 and 16 for f32]
    #[arg(long, value_name = "B")]
    bytes_per_parameter: Option<f64>,
    /// With --model: additional forward passes for recomputation
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
    /// The model's experts per token, if there is a model.
    pub fn top_k(&self) -> Result<Option<usize>> {
        Ok(self.model.as_deref().map(read_model).transpose()?.map(|model| model.top_k))
    }

    /// The model, its dense parts, and the tokens of a device.
    pub(super) fn parts(&self) -> Result<(Model, Transformer, usize)> {
        let (model, tokens) = self.model.as_deref().zip(self.tokens_per_device).context("--model is missing")?;
        Ok((read_model(model)?, read_transformer(model)?, tokens as usize))
    }

    /// Whether there is a model, with all of its layers.
    pub(super) fn is_whole(&self) -> bool {
        self.model.is_some() && self.rest.layers.is_none()
    }

    /// Bytes of an element.
    pub(super) fn element_bytes(&self) -> usize {
        Dtype::from(self.rest.dtype).bytes()
    }

    /// `--bytes-per-parameter`.
    pub(super) fn bytes_per_parameter(&self) -> Option<f64> {
        self.rest.bytes_per_parameter
    }

    /// `--recomputation`.
    pub(super) fn recomputation(&self) -> f64 {
        self.rest.recomputation
    }

    /// The workload of the model for `devices` devices.
    pub fn workload(&self, devices: usize) -> Result<Workload> {
        let (model, tokens) = self.model.as_deref().zip(self.tokens_per_device).context("--model is missing")?;
        self.rest.workload(model, tokens, Some(devices))
    }
}

/// A model by folder or name.
pub(super) fn read_model(model: &Path) -> Result<Model> {
    if model.is_dir() {
        return Ok(checkpoint::read_model(model)?);
    }
    Model::preset(&model.to_string_lossy()).map_err(|error| anyhow::anyhow!("--{error}"))
}

/// The parts of a model that are not routed experts.
pub(super) fn read_transformer(model: &Path) -> Result<Transformer> {
    match model.is_dir() {
        true => Ok(checkpoint::read_transformer(model)?),
        false => Transformer::preset(&model.to_string_lossy()).context("--model has no shapes of attention"),
    }
}

/// Writes the workload.
pub fn command(args: &Args) -> Result<bool> {
    let config = args.of_model.model.join("config.json");
    check_distinct(
        &[("out", args.out.as_deref())],
        &[
            ("expert-load-from", args.load.expert_load_from.as_deref()),
            ("routing", args.load.routing.as_deref()),
            ("model", Some(config.as_path())),
        ],
    )?;
    let of_model = &args.of_model;
    let devices = args.devices.map(|devices| devices as usize);
    let mut workload = of_model.rest.workload(&of_model.model, of_model.tokens_per_device, devices)?;
    args.load.weight(&mut workload, || Ok(Some(read_model(&of_model.model)?.top_k)))?;
    let text = workload.to_json() + "\n";
    match &args.out {
        None => print(&text)?,
        Some(path) => OutputFile::replace(path, text.as_bytes())?,
    }
    Ok(true)
}
