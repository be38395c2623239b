//! `aristos sim routing`, and the flags that make loads of routing.

use std::path::PathBuf;

use anyhow::Result;

use super::files;
use super::flags::of_flags;
use super::progress::Progress;
use super::shared::PlotArgs;
use crate::checkpoint::OutputFile;
use crate::plot::plot_expert_load;
use crate::sim::routing::{Payload, Popularity, Workload, dispatch_load};
use crate::stdio::out_line;

/// The flags of `aristos sim routing`.
#[derive(clap::Args)]
pub struct Args {
    /// Experts of a layer
    #[arg(long, value_name = "E")]
    experts: usize,
    /// Tokens of a step, of all nodes
    #[arg(long, value_name = "T")]
    tokens: usize,
    /// Experts of a token
    #[arg(long, value_name = "K")]
    top_k: usize,
    /// Share of the experts that are hot, which are those with the smallest numbers
    #[arg(long, value_name = "R", default_value_t = 0.5)]
    hot_ratio: f64,
    /// Share of the routing that the hot experts get
    #[arg(long, value_name = "W", default_value_t = 0.8)]
    hot_weight: f64,
    /// Probabilities proportional to (number + 1)^-S instead of hot experts
    #[arg(long, value_name = "S", conflicts_with_all = ["hot_ratio", "hot_weight"])]
    zipf: Option<f64>,
    /// Even choices, without random numbers: the experts of each node get equally many tokens, to one
    #[arg(long, conflicts_with_all = ["hot_ratio", "hot_weight", "zipf", "imbalance"])]
    balanced: bool,
    /// Even choices, except that the first node's experts get this many times the mean of the nodes, to one token
    #[arg(long, value_name = "MAX_OVER_MEAN", conflicts_with_all = ["hot_ratio", "hot_weight", "zipf"])]
    imbalance: Option<f64>,
    /// Nodes; token t starts at node t mod N
    #[arg(long, value_name = "N")]
    nodes: usize,
    /// Layers
    #[arg(long, value_name = "L", default_value_t = 1)]
    layers: usize,
    /// Steps
    #[arg(long, value_name = "N", default_value_t = 1)]
    steps: usize,
    /// Seed of the random numbers
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Output file of the routing (docs/simulator.md)
    #[arg(long, value_name = "ROUTING.json")]
    out: PathBuf,
    /// Write the bytes that nodes send each other, for `aristos sim comms --traffic`
    #[arg(long, alias = "loads", value_name = "L.json")]
    save_traffic: Option<PathBuf>,
    #[command(flatten)]
    payload: PayloadArgs,
    #[command(flatten)]
    plots: PlotArgs,
}

/// The payload of a token to one of its experts.
#[derive(clap::Args)]
pub struct PayloadArgs {
    /// Traffic: bytes of a routing weight
    #[arg(long, value_name = "B", default_value_t = 4, value_parser = clap::value_parser!(u64).range(0..=65536))]
    weight_bytes: u64,
    /// Traffic: bytes of a token's source, and of its index there
    #[arg(long, value_name = "B", default_value_t = 2, value_parser = clap::value_parser!(u64).range(0..=65536))]
    id_bytes: u64,
    /// Traffic: bytes of an expert's number
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=65536))]
    routing_bytes: u64,
    /// Traffic: elements of the hidden state
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=16_777_216))]
    embed_dim: u64,
    /// Traffic: bytes of an element
    #[arg(long, value_name = "B", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=16))]
    element_bytes: u64,
}

impl PayloadArgs {
    /// The payload.
    pub fn payload(&self) -> Payload {
        let mut payload = Payload::default();
        (payload.weight_bytes, payload.id_bytes) = (self.weight_bytes, self.id_bytes);
        (payload.routing_bytes, payload.embed_dim) = (self.routing_bytes, self.embed_dim);
        payload.element_bytes = self.element_bytes;
        payload
    }
}

/// Draws and writes the routing, and prints its imbalance.
pub fn command(args: &Args) -> Result<bool> {
    files::check_distinct(&[("out", Some(&args.out)), ("save-traffic", args.save_traffic.as_deref())], &[])?;
    let popularity = match (args.zipf, args.imbalance.or(args.balanced.then_some(1.0))) {
        (Some(exponent), _) => Popularity::Zipf { exponent },
        (None, Some(max_over_mean)) => Popularity::Imbalance { max_over_mean },
        (None, None) => Popularity::Hot { ratio: args.hot_ratio, weight: args.hot_weight },
    };
    let workload = Workload {
        experts: args.experts,
        tokens: args.tokens,
        top_k: args.top_k,
        nodes: args.nodes,
        popularity,
        layers: args.layers,
        steps: args.steps,
        seed: args.seed,
    };
    args.plots.create()?;
    let progress = Progress::of_work("drawing experts");
    let drawn = workload.routing().map_err(of_flags);
    progress.clear();
    let routing = drawn?;
    let loads = match &args.save_traffic {
        Some(_) => Some(dispatch_load(&routing, &args.payload.payload()).map_err(of_flags)?),
        None => None,
    };
    let mut written = Vec::new();
    if let (Some(path), Some(loads)) = (&args.save_traffic, loads) {
        written.push(OutputFile::create_empty(path)?.with_content(loads.to_json().as_bytes())?);
    }
    written.push(OutputFile::create_empty(&args.out)?.with_content(routing.to_json().as_bytes())?);
    OutputFile::publish_all(written)?;
    let tokens = routing.tokens_per_expert();
    args.plots.save("expert_load", || plot_expert_load(&tokens))?;
    let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
    let most = tokens.iter().fold(0.0f64, |most, &tokens| most.max(tokens));
    out_line!(
        "{}: {} records of {} tokens; tokens of an expert: mean {mean:.1}, most {most:.0}, {:.2} times the mean",
        args.out.display(),
        routing.records.len(),
        args.tokens,
        most / mean
    );
    Ok(true)
}
