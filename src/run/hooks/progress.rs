//! A PE's record of final and pending steps. The record is kept when another PE is lost.

use crate::moe::WeightId;
use crate::moe::metrics::Traffic;
use crate::report::{NonFinite, StepReport, StepSample, TraceSpan};

/// The progress of this PE. When the job continues after a loss, the layer is rebuilt, but the progress is kept.
#[derive(Default)]
pub(in crate::run) struct Progress {
    /// Number of final steps, whose results every PE has.
    pub(super) settled: usize,
    /// The step after the final ones, if this PE has its results and does not know yet whether all other PEs have theirs.
    pub(super) pending: Option<StepReport>,
    /// With SGD, the weights that this PE holds after the pending step.
    pub(super) weights: Vec<(WeightId, Vec<f32>)>,
    /// The weights before the pending step, in case the step must be repeated.
    pub(super) weights_before: Vec<(WeightId, Vec<f32>)>,
    /// Trace spans that have not been sent yet.
    pub(super) spans: Vec<TraceSpan>,
    /// The first values found that are not finite.
    pub(super) non_finite: Vec<NonFinite>,
    pub(super) sample: StepSample,
    pub(super) traffic: Traffic,
    pub(super) all_reduce_bytes: u64,
    pub(super) rounds: [u64; 2],
}

impl Progress {
    /// Number of final steps.
    pub(in crate::run) fn settled(&self) -> usize {
        self.settled
    }

    /// Number of steps whose results this PE has.
    pub(in crate::run) fn complete(&self) -> usize {
        self.settled + usize::from(self.pending.is_some())
    }

    pub(super) fn settle(&mut self) {
        if let Some(report) = self.pending.take() {
            self.sample.offer(report);
            self.settled += 1;
        }
    }

    /// Prepares to continue with `step`. A pending step before `step` becomes final. Otherwise the pending step is undone.
    pub(in crate::run) fn resume_from(&mut self, step: usize) {
        if step > self.settled {
            self.settle();
        } else if self.pending.take().is_some() {
            self.weights = std::mem::take(&mut self.weights_before);
            self.non_finite.retain(|found| (found.step as usize) < step);
        }
    }
}
