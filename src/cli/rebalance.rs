//! `aristos rebalance`.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::shared::show;
use crate::cluster::read_text;
use crate::plan::{Rebalance, Rebalanced, expert_weights, placement_in_use, rebalance_auto, rebalance_with};
use crate::report::rebalanced_text;

/// The flags of `aristos rebalance`.
#[derive(clap::Args)]
pub struct Args {
    /// The experts' loads, JSON: {"weight": [[..], ..]}, a list for each layer; or a report of `aristos run --json`
    #[arg(long, value_name = "LOADS.json")]
    load: PathBuf,
    /// Physical experts of a layer, replicas included; `auto` is the least number that holds all experts, or that reaches --imbalance
    #[arg(long, alias = "replicas", value_name = "N|auto", value_parser = physical_experts, default_value = "auto")]
    physical_experts: Auto,
    /// With `--physical-experts auto`, the largest load of a device over the mean that is to be reached in every layer
    #[arg(long, value_name = "RATIO")]
    imbalance: Option<f64>,
    /// Devices, each of which holds equally many physical experts
    #[arg(long, alias = "ranks", value_name = "N")]
    devices: usize,
    /// Nodes of the devices
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: usize,
    /// Routing groups of experts; if their number is a multiple of the nodes, each group stays on one node
    #[arg(long, value_name = "N", default_value_t = 1)]
    groups: usize,
    /// Split an expert's tokens unequally among its replicas, as plans do, which makes the devices' loads equal
    #[arg(long)]
    shares: bool,
    /// The placement in use, as this command prints it with --json; its experts move as far as it pays
    #[arg(long, value_name = "PLACEMENT.json")]
    current: Option<PathBuf>,
    /// With --current, the part of the mean load by which each move of an expert must lower the largest load
    #[arg(long, value_name = "SHARE", default_value_t = 0.001)]
    move_cost: f64,
    /// Print JSON: phy2log, log2phy, logcnt, imbalance, imbalance_least (docs/planner.md)
    #[arg(long)]
    json: bool,
}

/// A number of physical experts, or `None` for `auto`.
#[derive(Clone, Copy)]
struct Auto(Option<usize>);

fn physical_experts(text: &str) -> Result<Auto, String> {
    match text {
        "auto" => Ok(Auto(None)),
        _ => text.parse().map(|number| Auto(Some(number))).map_err(|_| "expected a number, or auto".into()),
    }
}

/// Replicates and places the experts, and prints the result.
pub fn command(args: &Args) -> Result<bool> {
    let text = read_text(&args.load)?;
    let named = || args.load.display().to_string();
    let weight = expert_weights(&text).with_context(named)?;
    let current = match &args.current {
        Some(path) => Some(placement_in_use(&read_text(path)?).with_context(|| path.display().to_string())?),
        None => None,
    };
    // A placement in use has a number of its own.
    let replicas = args.physical_experts.0.or(current.as_ref().and_then(|current| Some(current.first()?.len())));
    if replicas.is_some() && args.imbalance.is_some() {
        anyhow::bail!("--imbalance needs --physical-experts auto and no --current");
    }
    let how = Rebalance { shares: args.shares, current: current.as_deref(), move_cost: args.move_cost };
    let all = match replicas {
        Some(replicas) => rebalance_with(how, &weight, replicas, args.groups, args.nodes, args.devices),
        None => rebalance_auto(how, &weight, args.imbalance, args.groups, args.nodes, args.devices),
    };
    let all: Rebalanced = all.map_err(|error| anyhow::anyhow!(flagged(&error.to_string()))).with_context(named)?;
    show(args.json, &all, || rebalanced_text(&all, args.devices))?;
    Ok(true)
}

/// Replaces the names of the function's arguments by the flags.
fn flagged(line: &str) -> String {
    let flags = [
        ("num_replicas", "--physical-experts"),
        ("num_groups", "--groups"),
        ("num_nodes", "--nodes"),
        ("num_ranks", "--devices"),
        ("move_cost", "--move-cost"),
        ("phy2log", "--current: phy2log"),
    ];
    let line = if line.starts_with("imbalance") { format!("--{line}") } else { line.to_string() };
    flags.iter().fold(line, |line, (argument, flag)| line.replace(argument, flag))
}
