//! Features of a run that act before and after its steps, a file each.
//!
//! [`Steps::run`](super::pe::Steps::run) runs the passes and calls the hooks. A new feature is a new [`StepHook`] and a line in [`hooks`].

mod commit;
mod hot_shift;
mod replan;
mod routing;
mod sgd;
mod trace;

use anyhow::Result;

pub(super) use commit::Progress;
pub(super) use replan::Gather;
pub(super) use sgd::read_weights;

use super::PreparedRun;
use crate::job::host::Host;
use crate::moe::metrics::PassOutcome;
use crate::moe::{Groups, MoeLayer, Routed};
use crate::report::PeReport;

/// The state of a run on this PE that its hooks read and change.
pub(super) struct StepContext<'c, L: MoeLayer> {
    pub job: &'c PreparedRun,
    pub host: &'c dyn Host,
    /// This PE's number in the job.
    pub pe: usize,
    pub layer: &'c mut L,
    /// The current step, from 0.
    pub step: usize,
    /// This PE's rows of `hidden_states`, `[tokens, hidden]`.
    pub input: L::RowsBuf,
    /// The routing of the current step, if a hook [needs it](StepHook::needs_routing), and of the last step.
    pub routed: Routed,
    /// The experts of every PE.
    pub groups: Groups,
    pub progress: &'c mut Progress,
}

/// The two passes of a step.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// A feature that acts around each step. Hooks are called in the order of [`hooks`].
pub(super) trait StepHook<L: MoeLayer> {
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

/// The hooks of the request, in the order in which they act: the weights change before the step is committed, and experts move after that.
pub(super) fn hooks<'h, L: MoeLayer>(
    run: &mut StepContext<'_, L>,
    settle: &'h dyn Fn() -> Result<()>,
    gather: &'h Gather<'h>,
) -> Result<Vec<Box<dyn StepHook<L> + 'h>>> {
    let request = &run.job.request;
    let mut hooks: Vec<Box<dyn StepHook<L> + 'h>> = Vec::new();
    if request.hot_shift_every.is_some() {
        hooks.push(Box::new(hot_shift::HotShift));
    }
    if request.routing.is_some() {
        hooks.push(Box::new(routing::UseGivenRouting));
    }
    if request.save_routing.is_some() {
        hooks.push(Box::new(routing::SaveRouting));
    }
    if let Some(rate) = request.sgd {
        hooks.push(Box::new(sgd::Sgd::new(run, rate)?));
    }
    hooks.push(Box::new(commit::Commit::new(settle)));
    if let Some(replanner) = replan::Replanner::new(run.job, gather)? {
        hooks.push(Box::new(replanner));
    }
    if request.trace.is_some() {
        hooks.push(Box::new(trace::Trace::new(run.layer)));
    }
    Ok(hooks)
}
