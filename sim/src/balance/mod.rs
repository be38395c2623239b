//! Balance inside a step: would dividing each microbatch's rows by its own counts pay?
//!
//! A model of one MoE layer by its loads, without events: a pass takes as long as the PE that computes or sends and receives the longest. The model compares ways
//! to balance on the same microbatches. `docs/simulator.md` lists the assumptions.

mod assign;
mod machine;
#[cfg(test)]
mod tests;
mod time;

use aristos_formats::InputError;
use aristos_formats::cluster::Cluster;
use aristos_formats::routing::Record;

use assign::{Microbatch, Placement};
use machine::Machine;
pub use machine::{Balance, Experts, Rules};

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
