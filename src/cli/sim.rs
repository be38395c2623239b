//! `aristos sim`: models of a layer, of an exchange and of routing.

use anyhow::Result;

use super::{sim_comms, sim_linear, sim_routing};

/// The flags of `aristos sim`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    model: Model,
}

#[derive(clap::Subcommand)]
enum Model {
    /// Time of a linear layer from its FLOP and data movement.
    Linear(sim_linear::Args),
    /// Time of an all-to-all exchange over a full mesh, in rounds of packets.
    Comms(sim_comms::Args),
    /// Draw random routing with a given skew.
    Routing(sim_routing::Args),
}

/// Evaluates the model and prints the result.
pub fn command(args: &Args) -> Result<bool> {
    match &args.model {
        Model::Linear(args) => sim_linear::command(args),
        Model::Comms(args) => sim_comms::command(args),
        Model::Routing(args) => sim_routing::command(args),
    }
}
