//! `--hot-shift-every`: changes the hot experts.

use anyhow::Result;

use super::{StepContext, StepHook};
use crate::checkpoint::InputTensor;
use crate::moe::MoeLayer;

/// Replaces the input by one with other hot experts every `hot_shift_every` steps.
pub(super) struct HotShift;

impl<L: MoeLayer> StepHook<L> for HotShift {
    fn before(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        let (job, step) = (run.job, run.step);
        if job.shifts(step) != job.shifts(step.saturating_sub(1)) {
            let rows = job.rows_in(InputTensor::HiddenStates, job.tokens_of(run.pe), step)?;
            run.input = run.layer.rows(&rows, "hidden_states")?;
        }
        Ok(())
    }
}
