//! `aristos sim comms`.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::files;
use super::shared::show;
use super::sim_routing::PayloadArgs;
use crate::formats::routing::Routing;
use crate::report::{exchange_text, simulated_trace_json};
use crate::sim::comms::{Load, Params, Schedule, exchange};
use crate::sim::routing::dispatch_load;

/// The flags of `aristos sim comms`.
#[derive(clap::Args)]
pub struct Args {
    /// The network, JSON: num_links, base_delay_ms, packet_size_bytes, ... (docs/simulator.md)
    #[arg(long, value_name = "P.json")]
    params: PathBuf,
    /// Bytes that each node sends to each other one, JSON: {"load_bytes": [[..], ..]}, a list for each source, or {"layers": [{"load_bytes": ..}, ..]}
    #[arg(long, alias = "load", value_name = "L.json", required_unless_present = "routing")]
    traffic: Option<PathBuf>,
    /// In place of the traffic, routing (docs/simulator.md): each step of each layer is a layer of the traffic, with experts in blocks on the nodes
    #[arg(long, value_name = "ROUTING.json", conflicts_with = "traffic")]
    routing: Option<PathBuf>,
    #[command(flatten)]
    payload: PayloadArgs,
    /// Reproduce the published program, including its errors
    #[arg(long)]
    compat: bool,
    /// Print JSON: time_ms, rounds, round_times_ms, closed_form_ms, layers
    #[arg(long)]
    json: bool,
    /// Write a timeline of the links for https://ui.perfetto.dev, with the first of each series of equal rounds
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// Simulates the exchange and prints the result.
pub fn command(args: &Args) -> Result<bool> {
    files::check_distinct(
        &[("trace", args.trace.as_deref())],
        &[("params", Some(&args.params)), ("traffic", args.traffic.as_deref()), ("routing", args.routing.as_deref())],
    )?;
    let params = Params::read(&args.params)?;
    let load = match (&args.traffic, &args.routing) {
        (Some(path), _) => Load::read(path)?,
        (None, Some(path)) => {
            dispatch_load(&Routing::read(path)?, &args.payload.payload()).map_err(|error| error.in_file(path))?
        }
        (None, None) => bail!("--traffic is missing"),
    };
    let schedule = if args.compat { Schedule::Compat } else { Schedule::Fair };
    let file = files::create(args.trace.as_ref())?;
    let mut spans = file.is_some().then(Vec::new);
    let exchange = exchange(&params, &load, schedule, spans.as_mut()).map_err(|error| error.in_file(&args.params))?;
    files::write(file, simulated_trace_json("node", &spans.unwrap_or_default())?)?;
    show(args.json, &exchange, || exchange_text(&exchange, load.nodes))?;
    Ok(true)
}
