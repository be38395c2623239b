//! `aristos sim comms`.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::files;
use super::sim_routing::PayloadArgs;
use crate::formats::routing::Routing;
use crate::report::simulated_trace_json;
use crate::sim::comms::{Exchange, Load, Params, Schedule, exchange};
use crate::sim::routing::dispatch_load;
use crate::stdio::out_line;

/// What `aristos sim comms` takes.
#[derive(clap::Args)]
pub struct Args {
    /// The network, JSON: num_links, base_delay_ms, packet_size_bytes, ... (docs/simulator.md)
    #[arg(long, value_name = "P.json")]
    params: PathBuf,
    /// Who has how much for whom, JSON: {"load_bytes": [[..], ..]}, a list for each source, or {"layers": [{"load_bytes": ..}, ..]}
    #[arg(long, value_name = "L.json", required_unless_present = "routing")]
    load: Option<PathBuf>,
    /// In place of a load, routing (docs/simulator.md): each step of each layer is a layer of the load, with experts in blocks on the nodes
    #[arg(long, value_name = "ROUTING.json", conflicts_with = "load")]
    routing: Option<PathBuf>,
    #[command(flatten)]
    payload: PayloadArgs,
    /// Compute as the published program does, its faults included
    #[arg(long)]
    compat: bool,
    /// Print JSON: time_ms, rounds, round_times_ms, closed_form_ms, layers
    #[arg(long)]
    json: bool,
    /// Write a timeline of the links for https://ui.perfetto.dev; of rounds that repeat, of the first
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// Simulates, and prints.
pub fn command(args: &Args) -> Result<bool> {
    files::check_distinct(
        &[("trace", args.trace.as_deref())],
        &[("params", Some(&args.params)), ("load", args.load.as_deref()), ("routing", args.routing.as_deref())],
    )?;
    let params = Params::read(&args.params)?;
    let load = match (&args.load, &args.routing) {
        (Some(path), _) => Load::read(path)?,
        (None, Some(path)) => {
            dispatch_load(&Routing::read(path)?, &args.payload.payload()).map_err(|error| error.in_file(path))?
        }
        (None, None) => bail!("--load is missing"),
    };
    let schedule = if args.compat { Schedule::Compat } else { Schedule::Fair };
    let file = files::create(args.trace.as_ref())?;
    let mut spans = file.is_some().then(Vec::new);
    let exchange = exchange(&params, &load, schedule, spans.as_mut()).map_err(|error| error.in_file(&args.params))?;
    files::write(file, simulated_trace_json("node", &spans.unwrap_or_default())?)?;
    match args.json {
        true => out_line!("{}", serde_json::to_string(&exchange)?),
        false => print(&exchange, load.nodes)?,
    }
    Ok(true)
}

fn print(exchange: &Exchange, nodes: usize) -> Result<()> {
    let layers = exchange.layers.len();
    out_line!("{nodes} nodes, {layers} layer{}: {} ms in {} rounds", plural(layers), exchange.time_ms, exchange.rounds);
    if let Some(closed_ms) = exchange.closed_form_ms {
        out_line!("closed form: {closed_ms} ms");
    }
    let longest = exchange.runs.iter().flat_map(|run| run.times_ms.iter().copied()).fold(0.0, f64::max);
    if exchange.rounds > 0 {
        out_line!("longest round: {longest} ms");
    }
    Ok(())
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
