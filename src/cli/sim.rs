//! `aristos sim`: models of a layer, of an exchange and of routing.

use anyhow::Result;

use super::{sim_comms, sim_linear, sim_routing};

/// What `aristos sim` takes.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    model: Model,
}

#[derive(clap::Subcommand)]
enum Model {
    /// The time of a linear layer from its FLOP and its data movement.
    Linear(sim_linear::Args),
    /// The time of an all-to-all exchange over a full mesh, in rounds of packets.
    Comms(sim_comms::Args),
    /// Make up which experts tokens go to, with a stated skew.
    Routing(sim_routing::Args),
}

/// Runs the model, and prints.
pub fn command(args: &Args) -> Result<bool> {
    match &args.model {
        Model::Linear(args) => sim_linear::command(args),
        Model::Comms(args) => sim_comms::command(args),
        Model::Routing(args) => sim_routing::command(args),
    }
}
