//! `aristos rebalance`.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::cluster::read_text;
use crate::plan::{Rebalanced, expert_weights, rebalance_experts};
use crate::report::rebalanced_text;
use crate::stdio::{print, print_line};

/// What `aristos rebalance` takes.
#[derive(clap::Args)]
pub struct Args {
    /// The experts' loads, JSON: {"weight": [[..], ..]}, a list for each layer; or a report of `aristos run --json`
    #[arg(long, value_name = "LOADS.json")]
    load: PathBuf,
    /// Physical experts of a layer, replicas included
    #[arg(long, value_name = "N")]
    replicas: usize,
    /// Devices, each of which holds as many physical experts
    #[arg(long, value_name = "N")]
    ranks: usize,
    /// Nodes that the devices are in
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: usize,
    /// Groups that experts are routed in; where the number of nodes divides theirs, a group stays on one node
    #[arg(long, value_name = "N", default_value_t = 1)]
    groups: usize,
    /// Print JSON: phy2log, log2phy, logcnt, imbalance, imbalance_least (docs/planner.md)
    #[arg(long)]
    json: bool,
}

/// Replicates and places, and prints.
pub fn command(args: &Args) -> Result<bool> {
    let text = read_text(&args.load)?;
    let named = || args.load.display().to_string();
    let weight = expert_weights(&text).with_context(named)?;
    let all: Rebalanced = rebalance_experts(&weight, args.replicas, args.groups, args.nodes, args.ranks)
        .map_err(|error| anyhow::anyhow!(flagged(&error.to_string())))
        .with_context(named)?;
    match args.json {
        true => print_line(&serde_json::to_string(&all)?)?,
        false => print(&rebalanced_text(&all, args.ranks))?,
    }
    Ok(true)
}

/// The function's arguments by the flags that they came from.
fn flagged(line: &str) -> String {
    let flags = ["replicas", "groups", "nodes", "ranks"];
    flags.iter().fold(line.to_string(), |line, flag| line.replace(&format!("num_{flag}"), &format!("--{flag}")))
}
