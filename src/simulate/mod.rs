//! A layer's step in virtual time: what `aristos run` would take on a cluster, before there is one.
//!
//! The plan of each group is made by the layer's own code (`plans`), and the step simulated by `aristos-sim`.

mod calibrate;
mod calibration;
mod compare;
mod model;
mod plans;
mod report;
mod rows;
mod run;

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
pub use calibrate::calibrate;
pub use calibration::{CORES_MOST, Calibration, Fitted, PassTerms, Residual, Terms};
pub use compare::{Compared, Comparison, compare};
pub use model::{ModelTime, Part};
pub use report::{Change, Memory, SimulatedConfig, SimulatedReport, Stragglers};

/// Gradients are summed in f32.
const GRADIENT_BYTES: f64 = 4.0;
/// Where the tokens' experts come from.
pub enum Tokens {
    /// A routing file; the steps are shared out over its records.
    File(Routing),
    /// Drawn, so many tokens over all PEs.
    Drawn {
        /// Tokens.
        tokens: usize,
        /// How often experts are chosen.
        popularity: Popularity,
        /// Of the random numbers.
        seed: u64,
    },
    /// Those of a synthetic layer, so many over all PEs, as `aristos run` has them.
    Synthetic(Box<Synthetic>, usize),
}

/// The order of the rows that a PE sends another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowOrder {
    /// By (first expert there, token), results by (last expert, row): the layer's own.
    #[default]
    Expert,
    /// By token, there and back.
    Token,
}

/// How often a token's row is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowsPer {
    /// To each of its experts on another PE.
    Expert,
    /// To each other PE with any of its experts: the layer's own.
    #[default]
    Pe,
    /// To each other host with any of its experts, to a PE there that hands it on, and sends back one sum; on its own host to each PE.
    Node,
}

/// What a model has beside its routed experts, and what computes it.
pub struct Dense {
    /// The shapes.
    pub transformer: Transformer,
    /// The device of every PE.
    pub device: Device,
    /// Tokens of a sequence.
    pub sequence: usize,
}

/// What is simulated.
pub struct Simulated {
    /// The PEs.
    pub cluster: Cluster,
    /// The layer.
    pub config: LayerConfig,
    /// The expert-parallel groups.
    pub groups: Groups,
    /// Element type.
    pub dtype: Dtype,
    /// How the layer runs.
    pub options: Options,
    /// The tokens.
    pub tokens: Tokens,
    /// The order of rows.
    pub order: RowOrder,
    /// How often rows are sent.
    pub rows_per: RowsPer,
    /// Whether a step has a backward pass.
    pub backward: bool,
    /// Steps.
    pub steps: usize,
    /// Slower and faster PEs.
    pub jitter: Option<Jitter>,
    /// Who has a port to the network.
    pub nics: Nics,
    /// The cores of each host, which its PEs share, where they are threads of a processor.
    pub cores: Option<Cores>,
    /// What work takes on the machine, in place of the devices' rates.
    pub calibration: Option<Calibration>,
    /// What the layer's model has beside its routed experts, where the model is simulated.
    pub dense: Option<Dense>,
    /// PEs of which a timeline is kept, the first so many.
    pub traced: usize,
}

/// A layer as a model describes it: gated experts, a softmax router.
pub fn layer_of(model: &Model) -> LayerConfig {
    let intermediate = (model.expert_parameters / (3.0 * model.hidden as f64)).round().max(1.0) as usize;
    let expert = MlpConfig::gated(intermediate, crate::moe::Activation::Silu);
    LayerConfig::new(model.hidden, model.experts, crate::moe::RouterConfig::softmax(model.top_k), expert)
}

/// The groups of a plan on a cluster; one group with even shares without a plan.
///
/// # Errors
/// One line that says where the plan is not one for this cluster and these experts.
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

    /// The most tokens of a PE.
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
