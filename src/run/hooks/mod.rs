//! Features of a run that act before and after its steps. Each has a file.
//!
//! [`Steps::run`](super::steps::Steps::run) runs the passes and calls the hooks. A new feature needs a [`StepHook`] and a line in
//! [`hooks`].

mod commit;
mod hot_shift;
mod non_finite;
mod progress;
mod replan;
mod routing;
mod sgd;
mod step;
mod trace;

use anyhow::Result;

pub(super) use progress::Progress;
pub(super) use replan::Gather;
pub(super) use sgd::read_weights;
pub(super) use step::{Pass, StepContext, StepHook};

use crate::moe::MoeLayer;

/// Returns the hooks that the request needs, in the order in which they act. Weights are updated before the step becomes final, and experts
/// move after that.
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
    hooks.push(Box::new(non_finite::FindNonFinite::new(run, gather)));
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
