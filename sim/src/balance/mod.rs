//! Balance inside a step: would dividing each microbatch's rows by its own counts pay?
//!
//! A model of one MoE layer by its loads, without events: a pass takes as long as the PE that computes or sends and receives the longest. The model compares ways
//! to balance on the same microbatches. `docs/simulator.md` lists the assumptions.

mod assign;
#[cfg(test)]
mod tests;
mod time;

use aristos_formats::InputError;
use aristos_formats::cluster::{Cluster, LinkTable};
use aristos_formats::routing::Record;

use assign::{Microbatch, Placement};

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

/// The result of one way to balance, as means over the microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balanced {
    /// Time of a microbatch's forward and backward pass with everything below, s.
    pub time_s: f64,
    /// The part of `time_s` for plans and assignments, s.
    pub plan_s: f64,
    /// The part of `time_s` for moves of experts, s.
    pub move_s: f64,
    /// The part of `time_s` for sums of replicas' gradients, s.
    pub gradients_s: f64,
    /// The largest number of rows of a PE over the mean.
    pub imbalance: f64,
    /// Tiles that were computed with borrowed weights, over all tiles.
    pub borrowed: f64,
}

/// All results on the same microbatches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Time if compute and rows were spread evenly, without tiles, plans and replicas, s: the longer of the mean compute and the mean link time, by pass.
    pub ideal_s: f64,
    /// By the balances asked for.
    pub balances: Vec<Balanced>,
    /// Measured microbatches.
    pub microbatches: usize,
}

/// Compares balances on the microbatches that `next` returns, in order. The first `replan_every` steps only give loads to the first plan. PE p has the tokens
/// of node p mod the nodes of a record.
///
/// # Errors
/// Returns an error if rules or records are invalid, there are fewer microbatches than two plans need, or PEs hold fewer than one expert each.
pub fn compare(
    cluster: &Cluster,
    experts: &Experts,
    rules: &Rules,
    balances: &[Balance],
    next: &mut dyn FnMut() -> Option<Record>,
) -> Result<Comparison, InputError> {
    let machine = Machine::new(cluster, experts, rules)?;
    let pes = machine.host.len();
    let per_plan = rules.replan_every * rules.microbatches;
    let blocks = Placement::blocks(experts.count, pes);
    let mut planned = None;
    let mut loads = vec![0.0; experts.count];
    let mut sums = Comparison { balances: vec![Balanced::default(); balances.len()], ..Comparison::default() };
    let mut seen = 0;
    while let Some(record) = next() {
        let batch = Microbatch::new(&record, experts, pes)?;
        if seen > 0 && seen % per_plan == 0 {
            planned = Some(Placement::plan(&loads, pes, rules.replicas, planned.as_ref())?);
            loads.fill(0.0);
        }
        batch.rows.iter().zip(&mut loads).for_each(|(&rows, load)| *load += rows as f64);
        seen += 1;
        let Some(planned) = &planned else { continue };
        let of_blocks = machine.times(&batch, &batch.assign(&blocks, Balance::None, &machine)?);
        sums.ideal_s += of_blocks.ideal_s;
        for (balance, sum) in balances.iter().zip(&mut sums.balances) {
            let (times, parts) = match balance {
                Balance::None => (of_blocks.clone(), [0.0; 3]),
                _ => {
                    let assigned = batch.assign(planned, *balance, &machine)?;
                    let plan_s = rules.replan_s / per_plan as f64
                        + if *balance == Balance::Replan { 0.0 } else { rules.assign_s };
                    let move_s = machine.move_s(&planned.moves) / per_plan as f64;
                    let gradients_s = machine.gradients_s(&planned.holders) / rules.microbatches as f64;
                    (machine.times(&batch, &assigned), [plan_s, move_s, gradients_s])
                }
            };
            sum.time_s += times.pass_s.iter().sum::<f64>() + parts.iter().sum::<f64>();
            sum.plan_s += parts[0];
            sum.move_s += parts[1];
            sum.gradients_s += parts[2];
            sum.imbalance += times.imbalance;
            sum.borrowed += times.borrowed;
        }
        sums.microbatches += 1;
    }
    if sums.microbatches == 0 {
        let found = format!("is {}, and the layer has {seen}", rules.microbatches);
        let expected = format!("fewer: the first plan needs {per_plan}, those of `replan_every` steps");
        return Err(InputError::value("`microbatches`", found, expected));
    }
    let n = sums.microbatches as f64;
    sums.ideal_s /= n;
    for sum in &mut sums.balances {
        let Balanced { time_s, plan_s, move_s, gradients_s, imbalance, borrowed } = sum;
        [time_s, plan_s, move_s, gradients_s, imbalance, borrowed].into_iter().for_each(|part| *part /= n);
    }
    Ok(sums)
}

/// The costs of a layer on a cluster.
struct Machine {
    /// By PE: its host, the time of one row of an expert, and of a byte inside the host and to another, s.
    host: Vec<usize>,
    row_s: Vec<f64>,
    inside_s: Vec<f64>,
    between_s: Vec<f64>,
    experts: Experts,
    rules: Rules,
}

impl Machine {
    fn new(cluster: &Cluster, experts: &Experts, rules: &Rules) -> Result<Machine, InputError> {
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
