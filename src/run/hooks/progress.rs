//! A PE's record of final and pending steps, which survives the loss of another PE.

use crate::moe::WeightId;
use crate::moe::metrics::Traffic;
use crate::report::{NonFinite, StepReport, StepSample, TraceSpan};

/// The progress of this PE. It outlives the layer when the job continues after a loss.
#[derive(Default)]
pub(in crate::run) struct Progress {
    /// Number of final steps: every PE has their results.
    pub(super) settled: usize,
    /// The next step, if this PE has its results but cannot tell yet whether every other PE has them.
    pub(super) pending: Option<StepReport>,
    /// With SGD, the weights that this PE holds after the pending step.
    pub(super) weights: Vec<(WeightId, Vec<f32>)>,
    /// The weights before the pending step, kept if the step may have to be repeated.
    pub(super) weights_before: Vec<(WeightId, Vec<f32>)>,
    /// Spans that are not sent yet.
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

    /// Continues with `step`: the pending step becomes final if it is before `step`, and is undone otherwise.
    pub(in crate::run) fn resume_from(&mut self, step: usize) {
        if step > self.settled {
            self.settle();
        } else if self.pending.take().is_some() {
            self.weights = std::mem::take(&mut self.weights_before);
            self.non_finite.retain(|found| (found.step as usize) < step);
        }
    }
}
