//! The inputs of the model: a layer, the rules, and the costs on a cluster.

use aristos_formats::InputError;
use aristos_formats::cluster::{Cluster, LinkTable};

/// How the rows of an expert are balanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// Experts in blocks, without replicas.
    None,
    /// Replicas, planned between steps by the loads of earlier steps.
    Replan,
    /// The replicas of `Replan`, with shares from the counts of each microbatch.
    Split,
    /// `Split`, and then PEs borrow experts of overloaded PEs of their host.
    Borrow,
}

impl Balance {
    /// All of them, each with the parts of the one before.
    pub const ALL: [Balance; 4] = [Balance::None, Balance::Replan, Balance::Split, Balance::Borrow];
}

/// The routed experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub count: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// FLOP of one row of an expert in a forward pass; a backward pass takes twice as many.
    pub row_flop: f64,
    /// Bytes of a row between PEs.
    pub row_bytes: f64,
    /// Bytes of an expert's weights.
    pub weights_bytes: f64,
    /// Bytes of the gradients of an expert's weights.
    pub gradients_bytes: f64,
    /// Rows of a tile. A tile takes as long as a full one.
    pub tile_rows: u64,
}

/// The costs and rules of balancing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Steps between two plans. A plan uses the loads since the last one.
    pub replan_every: usize,
    /// Microbatches of a step. Gradients of replicas are summed, and experts move, once a step.
    pub microbatches: usize,
    /// Replicas that each PE holds in addition to its share of the experts.
    pub replicas: usize,
    /// Experts that a PE may borrow in a pass.
    pub borrowed: usize,
    /// Time of a plan between steps, s.
    pub replan_s: f64,
    /// Time of the counts' exchange and the assignment in each forward pass with `Split` or `Borrow`, s.
    pub assign_s: f64,
    /// Rate at which a device reads weights, bytes/s; infinite to leave it out.
    pub memory_bytes_per_s: f64,
}

/// The costs of a layer on a cluster.
pub(super) struct Machine {
    /// By PE: its host, the time of one row of an expert, and of a byte inside the host and to another, s.
    pub(super) host: Vec<usize>,
    pub(super) row_s: Vec<f64>,
    pub(super) inside_s: Vec<f64>,
    pub(super) between_s: Vec<f64>,
    pub(super) experts: Experts,
    pub(super) rules: Rules,
}

impl Machine {
    pub(super) fn new(cluster: &Cluster, experts: &Experts, rules: &Rules) -> Result<Machine, InputError> {
        let counts = [
            ("replan_every", rules.replan_every),
            ("microbatches", rules.microbatches),
            ("tile_rows", experts.tile_rows as usize),
            ("experts", experts.count),
        ];
        for (field, value) in counts {
            if value == 0 || value > 1 << 20 {
                let expected = format!("1 to {}", 1 << 20);
                return Err(InputError::value(format!("`{field}`"), format!("is {value}"), expected));
            }
        }
        let pes = cluster.devices.len();
        let mut host = vec![0; pes];
        for (number, devices) in cluster.hosts().iter().enumerate() {
            devices.iter().for_each(|&pe| host[pe as usize] = number);
        }
        let byte_s = |pe: usize, local: bool| {
            let other = (1..pes).map(|k| (pe + k) % pes).find(|&other| (host[other] == host[pe]) == local);
            other.map_or(0.0, |other| cluster.links.link(pe, other).beta_ms_per_mb * 1e-9)
        };
        Ok(Machine {
            row_s: cluster.devices.iter().map(|device| experts.row_flop / (device.flop_per_ms * 1e3)).collect(),
            inside_s: (0..pes).map(|pe| byte_s(pe, true)).collect(),
            between_s: (0..pes).map(|pe| byte_s(pe, false)).collect(),
            host,
            experts: *experts,
            rules: *rules,
        })
    }
}
