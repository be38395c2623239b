//! `--non-finite`: finds values that are not finite, and the step in which they first appear.

use anyhow::Result;

use super::replan::Gather;
use super::{StepContext, StepHook};
use crate::job::request::{DeviceKind, NonFinitePolicy};
use crate::moe::MoeLayer;
use crate::report::PeReport;
use crate::run::non_finite::StepValues;

/// Checks the results of each step before the weights are updated from them. Without updates all steps have the same weights, so only the
/// last step is checked.
pub(super) struct FindNonFinite<'g> {
    gather: &'g Gather<'g>,
    updates: bool,
    /// Whether the run ends after the first step with a value that is not finite. Never with devices, whose PEs cannot agree between steps.
    stop: bool,
    found: bool,
    output: Vec<f32>,
    grad_input: Vec<f32>,
}

impl<'g> FindNonFinite<'g> {
    pub(super) fn new<L: MoeLayer>(run: &StepContext<'_, L>, gather: &'g Gather<'g>) -> Self {
        let request = &run.job.request;
        let updates = request.sgd.is_some();
        let stop = updates && request.non_finite == NonFinitePolicy::Stop && request.device == DeviceKind::Cpu;
        FindNonFinite { gather, updates, stop, found: false, output: Vec::new(), grad_input: Vec::new() }
    }

    /// Returns whether this PE's results are finite.
    fn read<L: MoeLayer>(&mut self, run: &mut StepContext<'_, L>) -> Result<bool> {
        let len = run.job.tokens_of(run.pe).len() * run.job.config.hidden;
        self.output.resize(len, 0.0);
        run.layer.read(std::borrow::Borrow::borrow(&run.output), &mut self.output)?;
        if let Some((_, grad_input)) = &run.backward {
            self.grad_input.resize(len, 0.0);
            run.layer.read(std::borrow::Borrow::borrow(grad_input), &mut self.grad_input)?;
        }
        let job = run.job;
        self.with_values(run, |values, _| Ok(values.are_finite(job)))
    }

    /// Adds the values of this step that are not finite to [`Progress::non_finite`](super::Progress).
    fn find<L: MoeLayer>(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        self.found = true;
        let job = run.job;
        let found = self.with_values(run, |values, weights| values.find(job, weights))?;
        run.progress.non_finite.extend(found);
        Ok(())
    }

    fn with_values<L: MoeLayer, R>(
        &self,
        run: &mut StepContext<'_, L>,
        act: impl FnOnce(&StepValues<'_>, &[(crate::moe::WeightId, Vec<f32>)]) -> Result<R>,
    ) -> Result<R> {
        let backward = match &run.backward {
            Some(_) => Some((&self.grad_input[..], run.layer.gradients()?)),
            None => None,
        };
        let (step, routed, groups) = (run.step, &run.routed, &run.groups);
        let values = StepValues { pe: run.pe, step, output: &self.output, backward, routed, groups };
        act(&values, &run.progress.weights)
    }
}

impl<L: MoeLayer> StepHook<L> for FindNonFinite<'_> {
    fn needs_routing(&self) -> bool {
        self.updates
    }

    fn after(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        if self.found || !self.updates {
            return Ok(());
        }
        // The update of the previous step has recorded weights that overflowed in it.
        let bad = !self.read(run)? || !run.progress.non_finite.is_empty();
        let any = if self.stop { (self.gather)(&[u64::from(bad)])?.iter().any(|&bad| bad != 0) } else { bad };
        if any {
            self.find(run)?;
            run.stopped = self.stop;
        }
        Ok(())
    }

    fn finish(&mut self, run: &mut StepContext<'_, L>, report: &mut PeReport) -> Result<()> {
        if !self.updates && run.progress.settled() > 0 && !self.read(run)? {
            if run.job.request.hot_shift_every.is_none() && run.job.request.routing.is_none() {
                // All steps have the same input and weights, so step 0 had these values already.
                run.step = 0;
            }
            self.find(run)?;
        }
        report.non_finite = std::mem::take(&mut run.progress.non_finite);
        Ok(())
    }
}
