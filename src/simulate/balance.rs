//! `--balance`: compares ways to balance experts on the same microbatches, by the model in `aristos_sim::balance`.

use std::fmt::Write;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{Dense, Simulated, Tokens};
use crate::formats::InputError;
use crate::formats::routing::Record;
use crate::report::text::{TextTable, count, ms};
use crate::sim::balance::{Balance, Balanced, Experts, Rules, compare};
use crate::sim::routing::{Drift, Popularity};

/// Rows of a tile, as of the device's matrix products.
const TILE_ROWS: u64 = 128;
/// Maximum microbatches. More take longer than minutes.
const MAX_MICROBATCHES: usize = 1 << 14;

/// The rules of a comparison, and how loads change if they are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Balancing {
    /// The ways to balance.
    pub balances: Vec<Balance>,
    /// The exponent of Zipf's popularity.
    pub zipf: f64,
    /// Standard deviation of the logarithm of the popularity's factors ([`Drift::sigma`]).
    pub drift: f64,
    /// Steps between two plans.
    pub replan_every: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Time of a plan between steps, s.
    pub plan_s: f64,
    /// Time of an assignment in a forward pass, s; `None` for the estimate for this number of PEs.
    pub assign_s: Option<f64>,
}

/// Correlation of the popularity between steps.
const CORRELATION: f64 = 0.9;

/// The comparison of each layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BalanceReport {
    /// PEs.
    pub pes: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// By layer of the routing file; one layer if loads are drawn.
    pub layers: Vec<LayerBalance>,
}

/// The comparison of a layer. Times are means over the measured microbatches.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerBalance {
    /// Number of the layer in the routing file; 0 if loads are drawn.
    pub layer: u64,
    /// Measured microbatches.
    pub microbatches: usize,
    /// Time with evenly spread work, s.
    pub ideal_s: f64,
    /// The ways to balance, as asked for.
    pub balances: Vec<BalanceTime>,
}

/// The time with one way to balance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BalanceTime {
    /// "none", "replan", "split" or "borrow".
    pub balance: &'static str,
    /// Both passes of a microbatch with all of the following, s.
    pub time_s: f64,
    /// `ideal_s` over `time_s`.
    pub ideal_share: f64,
    /// Plans and assignments, s.
    pub plan_s: f64,
    /// Moves of experts, s.
    pub move_s: f64,
    /// Sums of replicas' gradients, s.
    pub gradients_s: f64,
    /// The largest number of rows of a PE over the mean.
    pub imbalance: f64,
    /// Share of the tiles that were computed with borrowed weights.
    pub borrowed: f64,
}

impl Simulated {
    /// Compares ways to balance the experts.
    ///
    /// # Errors
    /// A layer, rules or a routing file that contradict each other; the line names the field.
    pub fn balance(&self, how: &Balancing) -> Result<BalanceReport> {
        self.config.validate()?;
        ensure!(self.backward, "--forward-only: --balance compares both passes, expected none");
        let (experts, pes) = (self.config.n_experts, self.pes());
        ensure!(experts >= pes, "`experts` is {experts}, expected at least {pes}, one for each PE");
        let weights = self.config.expert_elements() as f64;
        let of_layer = Experts {
            count: experts,
            top_k: self.config.router.top_k,
            row_flop: self.config.expert.forward_flop_per_row(self.config.hidden),
            row_bytes: (self.config.hidden * self.options.wire(self.dtype).bytes()) as f64,
            weights_bytes: weights * self.dtype.bytes() as f64,
            gradients_bytes: weights * super::GRADIENT_BYTES,
            tile_rows: TILE_ROWS,
        };
        let rules = Rules {
            replan_every: how.replan_every,
            microbatches: how.microbatches,
            replicas: 1,
            borrowed: 1,
            replan_s: how.plan_s,
            assign_s: how.assign_s.unwrap_or(match pes {
                0..=8 => 40e-6,
                9..=16 => 70e-6,
                _ => 120e-6,
            }),
            memory_bytes_per_s: self.dense.as_ref().map_or(f64::INFINITY, Dense::memory_bytes_per_s),
        };
        let each = |layer: u64, next: &mut dyn FnMut() -> Option<Record>| -> Result<LayerBalance> {
            let found = compare(&self.cluster, &of_layer, &rules, &how.balances, next).map_err(of_flags)?;
            let of = |(&balance, found_of): (&Balance, &Balanced)| BalanceTime {
                balance: name(balance),
                time_s: found_of.time_s,
                ideal_share: if found_of.time_s > 0.0 { found.ideal_s / found_of.time_s } else { 1.0 },
                plan_s: found_of.plan_s,
                move_s: found_of.move_s,
                gradients_s: found_of.gradients_s,
                imbalance: found_of.imbalance,
                borrowed: found_of.borrowed,
            };
            Ok(LayerBalance {
                layer,
                microbatches: found.microbatches,
                ideal_s: found.ideal_s,
                balances: how.balances.iter().zip(&found.balances).map(of).collect(),
            })
        };
        let mut report = BalanceReport { pes, experts, top_k: of_layer.top_k, layers: Vec::new() };
        if let Tokens::File(routing) = &self.tokens {
            let mut layers: Vec<u64> = routing.records.iter().map(|record| record.layer).collect();
            layers.sort_unstable();
            layers.dedup();
            for layer in layers {
                let mut records = routing.records.iter().filter(|record| record.layer == layer).cloned();
                report.layers.push(each(layer, &mut || records.next())?);
            }
            return Ok(report);
        }
        let Tokens::Drawn { tokens, seed, popularity: Popularity::Zipf { .. } } = self.tokens else {
            anyhow::bail!(
                "--balance draws Zipf's loads or reads --routing, expected neither --hot-ratio nor --hot-weight"
            )
        };
        ensure!(
            tokens > 0 && tokens.is_multiple_of(pes),
            "`tokens` is {tokens}, expected a multiple of {pes}, the PEs"
        );
        let batches = (self.steps.saturating_add(how.replan_every)).saturating_mul(how.microbatches);
        ensure!(
            self.steps > 0 && batches <= MAX_MICROBATCHES,
            "`steps` is {}, {batches} microbatches with those of the first plan, expected 1 to {MAX_MICROBATCHES} microbatches",
            self.steps
        );
        let drift = Drift {
            experts,
            top_k: of_layer.top_k,
            pes,
            tokens_per_pe: tokens / pes,
            zipf: how.zipf,
            sigma: how.drift,
            correlation: CORRELATION,
            microbatches: how.microbatches,
            seed,
        };
        let mut records = drift.start().map_err(of_flags)?.take(batches);
        report.layers.push(each(0, &mut || records.next())?);
        Ok(report)
    }
}

/// Marks an error of the arguments, not of a file, so that the command shows its fields as flags.
fn of_flags(wrong: InputError) -> anyhow::Error {
    anyhow::anyhow!("{wrong}")
}

fn name(balance: Balance) -> &'static str {
    match balance {
        Balance::None => "none",
        Balance::Replan => "replan",
        Balance::Split => "split",
        Balance::Borrow => "borrow",
    }
}

/// A table for each layer.
pub fn balance_text(report: &BalanceReport) -> String {
    let (pes, experts) = (count(report.pes as u64, "PE"), count(report.experts as u64, "expert"));
    let mut text = format!("{pes}, {experts}, top-{}\n", report.top_k);
    for layer in &report.layers {
        let (layer_number, batches) = (layer.layer, layer.microbatches);
        let _ = writeln!(text, "\nlayer {layer_number}, {batches} microbatches, ideal {} ms", ms(layer.ideal_s));
        let mut table = TextTable::new(
            1,
            ["balance", "ms", "% of ideal", "plan ms", "moves ms", "gradients ms", "largest/mean", "borrowed"],
        );
        for of in &layer.balances {
            table.row([
                of.balance.to_string(),
                ms(of.time_s),
                format!("{:.1}", of.ideal_share * 100.0),
                ms(of.plan_s),
                ms(of.move_s),
                ms(of.gradients_s),
                format!("{:.2}", of.imbalance),
                format!("{:.1}%", of.borrowed * 100.0),
            ]);
        }
        text += &table.render();
    }
    text
}
