//! The hooks of a step, and the state that they share.

use anyhow::Result;

use super::progress::Progress;
use crate::job::host::Host;
use crate::moe::metrics::PassOutcome;
use crate::moe::{Groups, MoeLayer, Routed};
use crate::report::PeReport;
use crate::run::PreparedRun;

/// The state of a run on this PE that its hooks read and change.
pub(in crate::run) struct StepContext<'c, L: MoeLayer> {
    pub job: &'c PreparedRun,
    pub host: &'c dyn Host,
    /// This PE's number in the job.
    pub pe: usize,
    pub layer: &'c mut L,
    /// The current step, from 0.
    pub step: usize,
    /// This PE's rows of `hidden_states`, `[tokens, hidden]`.
    pub input: L::RowsBuf,
    /// `[tokens, hidden]` of the current step.
    pub output: L::ValuesBuf,
    /// With a backward pass, this PE's rows of `grad_output`, and `grad_hidden_states` of the current step.
    pub backward: Option<(L::RowsBuf, L::ValuesBuf)>,
    /// Whether the run ends after the current step without an update, because the step has values that are not finite.
    pub stopped: bool,
    /// The routing of the current step. Read only for the last step, or for every step if a hook [needs it](StepHook::needs_routing).
    pub routed: Routed,
    /// Rows of each of this PE's experts in the current step.
    pub expert_rows: Vec<u64>,
    /// The expert-parallel groups, and the experts of every PE.
    pub groups: Groups,
    pub progress: &'c mut Progress,
}

/// The two passes of a step.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::run) enum Pass {
    Forward,
    Backward,
}

/// A feature that acts around each step. Hooks are called in the order of [`hooks`](super::hooks).
pub(in crate::run) trait StepHook<L: MoeLayer> {
    /// Whether the hook reads [`StepContext::routed`] after every forward pass.
    fn needs_routing(&self) -> bool {
        false
    }

    /// Called before the forward pass.
    fn before(&mut self, _: &mut StepContext<'_, L>) -> Result<()> {
        Ok(())
    }

    /// Called after each pass.
    fn after_pass(&mut self, _: &mut StepContext<'_, L>, _: Pass, _: &PassOutcome) -> Result<()> {
        Ok(())
    }

    /// Called after the last pass of the step.
    fn after(&mut self, _: &mut StepContext<'_, L>) -> Result<()> {
        Ok(())
    }

    /// Called once after the last step.
    fn finish(&mut self, _: &mut StepContext<'_, L>, _: &mut PeReport) -> Result<()> {
        Ok(())
    }
}
