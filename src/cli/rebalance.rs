//! `aristos rebalance`.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::shared::show;
use crate::cluster::read_text;
use crate::plan::{Rebalanced, expert_weights, rebalance_experts};
use crate::report::rebalanced_text;

/// The flags of `aristos rebalance`.
#[derive(clap::Args)]
pub struct Args {
    /// The experts' loads, JSON: {"weight": [[..], ..]}, a list for each layer; or a report of `aristos run --json`
    #[arg(long, value_name = "LOADS.json")]
    load: PathBuf,
    /// Physical experts of a layer, replicas included
    #[arg(long, alias = "replicas", value_name = "N")]
    physical_experts: usize,
    /// Devices, each of which holds equally many physical experts
    #[arg(long, alias = "ranks", value_name = "N")]
    devices: usize,
    /// Nodes of the devices
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: usize,
    /// Routing groups of experts; if their number is a multiple of the nodes, each group stays on one node
    #[arg(long, value_name = "N", default_value_t = 1)]
    groups: usize,
    /// Print JSON: phy2log, log2phy, logcnt, imbalance, imbalance_least (docs/planner.md)
    #[arg(long)]
    json: bool,
}

/// Replicates and places the experts, and prints the result.
pub fn command(args: &Args) -> Result<bool> {
    let text = read_text(&args.load)?;
    let named = || args.load.display().to_string();
    let weight = expert_weights(&text).with_context(named)?;
    let all: Rebalanced = rebalance_experts(&weight, args.physical_experts, args.groups, args.nodes, args.devices)
        .map_err(|error| anyhow::anyhow!(flagged(&error.to_string())))
        .with_context(named)?;
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
    ];
    flags.iter().fold(line.to_string(), |line, (argument, flag)| line.replace(argument, flag))
}
