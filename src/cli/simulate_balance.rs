//! The flags of `aristos simulate --balance`.

use clap::ValueEnum;

use crate::sim::balance::Balance;
use crate::simulate::Balancing;

/// Flags that only a comparison of balances has.
#[derive(clap::Args)]
pub struct BalanceArgs {
    /// Compare ways to balance experts, separated by commas, by their loads instead of event by event (docs/simulator.md)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODES",
        conflicts_with_all = ["plan", "mode", "order", "rows_per", "jitter", "nics", "calibration", "cores", "budget_factor", "chunk_rows", "tile_rows", "trace", "folder"])]
    balance: Vec<BalanceArg>,
    /// With --balance: draw the tokens' experts by Zipf's law with this exponent
    #[arg(long, value_name = "S", default_value_t = 0.6, requires = "balance", conflicts_with = "routing")]
    zipf: f64,
    /// With --balance: standard deviation of the logarithm of the popularity's factors for steps, microbatches and PEs
    #[arg(long, value_name = "S", default_value_t = 0.3, requires = "balance", conflicts_with = "routing")]
    drift: f64,
    /// With --balance: microbatches of a step; a record of a routing file is one
    #[arg(long, value_name = "N", default_value_t = 8, requires = "balance")]
    microbatches: usize,
    /// With --balance: steps between two plans
    #[arg(long, value_name = "N", default_value_t = 1, requires = "balance")]
    replan_every: usize,
    /// With --balance: time of a plan between steps
    #[arg(long, value_name = "US", default_value_t = 0.0, requires = "balance")]
    plan_us: f64,
    /// With --balance: time of the counts' exchange and the assignment in a forward pass [default: 40 to 8 PEs, 70 to 16, else 120]
    #[arg(long, value_name = "US", requires = "balance")]
    assign_us: Option<f64>,
}

/// `--balance`.
#[derive(Clone, Copy, ValueEnum)]
pub enum BalanceArg {
    /// Experts in blocks, without replicas
    None,
    /// A replica a PE, planned between steps
    Replan,
    /// Replicas as planned, with shares from each microbatch's counts
    Split,
    /// Split, and one borrowed expert a PE inside a host
    Borrow,
}

impl BalanceArgs {
    /// The comparison, if there is one.
    pub(super) fn balancing(&self) -> anyhow::Result<Option<Balancing>> {
        for (flag, us) in [("--plan-us", Some(self.plan_us)), ("--assign-us", self.assign_us)] {
            let us = us.unwrap_or(0.0);
            anyhow::ensure!((0.0..=1e9).contains(&us), "{flag} is {us}, expected a number from 0 to 1e9");
        }
        let of = |balance: &BalanceArg| match balance {
            BalanceArg::None => Balance::None,
            BalanceArg::Replan => Balance::Replan,
            BalanceArg::Split => Balance::Split,
            BalanceArg::Borrow => Balance::Borrow,
        };
        Ok((!self.balance.is_empty()).then(|| Balancing {
            balances: self.balance.iter().map(of).collect(),
            zipf: self.zipf,
            drift: self.drift,
            replan_every: self.replan_every,
            microbatches: self.microbatches,
            plan_s: self.plan_us * 1e-6,
            assign_s: self.assign_us.map(|us| us * 1e-6),
        }))
    }
}
