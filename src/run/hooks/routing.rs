//! `--routing` and `--save-routing`.

use anyhow::Result;

use super::{Pass, StepContext, StepHook};
use crate::moe::MoeLayer;
use crate::moe::metrics::PassOutcome;
use crate::run::pe_results::ROUTING;

/// Sets the experts of each step's tokens to those in the routing file.
pub(super) struct UseGivenRouting;

impl<L: MoeLayer> StepHook<L> for UseGivenRouting {
    fn before(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        let given = run.job.routing.as_ref().map(|given| given.of_step(run.step, run.job.tokens_of(run.pe)));
        Ok(run.layer.set_choices(given)?)
    }
}

/// Writes the chosen experts of each step's tokens.
pub(super) struct SaveRouting;

impl<L: MoeLayer> StepHook<L> for SaveRouting {
    fn needs_routing(&self) -> bool {
        true
    }

    fn after_pass(&mut self, run: &mut StepContext<'_, L>, pass: Pass, _: &PassOutcome) -> Result<()> {
        if pass == Pass::Forward {
            let at = run.job.captured().offset_bytes(run.step, run.job.tokens_of(run.pe).start);
            run.host.write(ROUTING, at, bytemuck::cast_slice(&run.routed.chosen), "the routing")?;
        }
        Ok(())
    }
}
