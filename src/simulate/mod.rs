//! A layer's step in virtual time: predicts `aristos run` on a cluster that need not exist.
//!
//! The layer's own code plans the work of each group (`plans`), and `aristos-sim` simulates the step.

mod balance;
mod bench_log;
mod calibrate;
mod calibration;
mod compare;
mod device;
mod device_fit;
mod machine;
mod model;
mod plans;
mod report;
mod rows;
mod run;
mod text;

use anyhow::Result;

use crate::cluster::Cluster;
use crate::formats::Transformer;
use crate::formats::routing::Routing;
use crate::moe::synthetic::Synthetic;
use crate::moe::{Dtype, Groups, LayerConfig, MlpConfig, Options, Placement};
use crate::plan::{Model, Plan};
use crate::run::plan::groups_of;
use crate::sim::linear::Device;
use crate::sim::network::Nics;
use crate::sim::routing::Popularity;
use crate::sim::step::{Cores, Jitter};
pub use balance::{BalanceReport, BalanceTime, Balancing, LayerBalance, balance_text};
pub use calibrate::calibrate;
pub use calibration::{Calibration, Fitted, MAX_CORES, PassTerms, Residual, Terms};
pub use compare::{Compared, Comparison, compare};
pub use device::{DeviceCalibration, DeviceTerms, LoggedPass};
pub use device_fit::calibrate_device;
pub use machine::Machine;
pub use model::{ModelTime, Part};
pub use report::{Change, Memory, SimulatedConfig, SimulatedReport, Stragglers};
pub use text::{calibration_text, comparison_text, device_text, simulated_text};

/// Gradients are summed in f32.
const GRADIENT_BYTES: f64 = 4.0;

/// The source of the tokens' experts.
pub enum Tokens {
    /// A routing file. The steps use its records in turn.
    File(Routing),
    /// Random choices.
    Drawn {
        /// Tokens over all PEs.
        tokens: usize,
        /// Distribution of the experts.
        popularity: Popularity,
        /// Seed of the random numbers.
        seed: u64,
    },
    /// The tokens of a synthetic layer, as in `aristos run`, and their number over all PEs.
    Synthetic(Box<Synthetic>, usize),
}

/// The order of the rows from one PE to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowOrder {
    /// By (first expert at the destination, token), results by (last expert, row): the order of the layer.
    #[default]
    Expert,
    /// By token in both directions.
    Token,
}

/// The destinations of a token's row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowsPer {
    /// Each of its experts on another PE.
    Expert,
    /// Each other PE with any of its experts, as in the layer.
    #[default]
    Pe,
    /// A relay on each other host with any of its experts, which forwards the row and returns one sum; each PE on the own host.
    Host,
}

/// The parts of a model that are not routed experts, and their device.
pub struct Dense {
    /// The shapes.
    pub transformer: Transformer,
    /// The device of every PE.
    pub device: Device,
    /// Tokens of a sequence.
    pub sequence: usize,
}

/// The input of a simulation.
pub struct Simulated {
    /// The PEs.
    pub cluster: Cluster,
    /// The layer.
    pub config: LayerConfig,
    /// The expert-parallel groups.
    pub groups: Groups,
    /// Element type.
    pub dtype: Dtype,
    /// Options of the layer.
    pub options: Options,
    /// The tokens.
    pub tokens: Tokens,
    /// The order of rows.
    pub order: RowOrder,
    /// The destinations of rows.
    pub rows_per: RowsPer,
    /// Whether a step has a backward pass.
    pub backward: bool,
    /// Steps.
    pub steps: usize,
    /// Random variation of the PEs' speed.
    pub jitter: Option<Jitter>,
    /// Network ports.
    pub nics: Nics,
    /// The cores of each host, if its PEs share them.
    pub cores: Option<Cores>,
    /// Constants of a machine, instead of the devices' rates.
    pub calibration: Option<Machine>,
    /// The other parts of the model, if the whole model is simulated.
    pub dense: Option<Dense>,
    /// Timelines are recorded for PEs `0..traced`.
    pub traced: usize,
}

/// The layer of a model: gated experts, a softmax router.
pub fn layer_of(model: &Model) -> LayerConfig {
    let intermediate = (model.expert_parameters / (3.0 * model.hidden as f64)).round().max(1.0) as usize;
    let expert = MlpConfig::gated(intermediate, crate::moe::Activation::Silu);
    LayerConfig::new(model.hidden, model.experts, crate::moe::RouterConfig::softmax(model.top_k), expert)
}

/// The groups of a plan on a cluster; one group with even shares without a plan.
///
/// # Errors
/// A plan for another cluster or other experts; the line names the entry.
pub fn groups_on(cluster: &Cluster, plan: Option<&Plan>, experts: usize) -> Result<Groups> {
    let pes = cluster.devices.len();
    let Some(plan) = plan else { return Ok(Groups::one(Placement::even(experts, pes))) };
    let index: std::collections::HashMap<u64, usize> =
        cluster.devices.iter().enumerate().map(|(pe, device)| (device.id, pe)).collect();
    groups_of(plan, pes, experts, |id| index.get(&id).copied())
}

impl Simulated {
    fn pes(&self) -> usize {
        self.cluster.devices.len()
    }

    /// Tokens of a step over all PEs.
    fn tokens(&self) -> usize {
        match &self.tokens {
            Tokens::Drawn { tokens, .. } | Tokens::Synthetic(_, tokens) => *tokens,
            Tokens::File(routing) => {
                let of_node = |pe: usize| routing.records[0].tokens_per_node[pe % routing.nodes];
                (0..self.pes()).map(of_node).sum()
            }
        }
    }

    /// Maximum tokens of a PE.
    fn most_tokens(&self) -> usize {
        match &self.tokens {
            Tokens::File(routing) => {
                let all = routing.records.iter().flat_map(|record| &record.tokens_per_node);
                all.copied().max().unwrap_or(0)
            }
            _ => self.tokens().div_ceil(self.pes()),
        }
    }
}
