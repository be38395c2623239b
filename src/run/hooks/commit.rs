//! Collects the measurements of the steps, and decides when a step is final.

use std::collections::BTreeMap;

use anyhow::Result;

use super::{Pass, StepContext, StepHook};
use crate::moe::MoeLayer;
use crate::moe::metrics::{PassOutcome, Phase, Traffic};
use crate::report::{PassReport, PeReport, StepReport, TrafficReport};

/// Collects the measurements of each pass, and makes a step final once every PE has the step's results.
pub(super) struct Commit<'h> {
    settle: &'h dyn Fn() -> Result<()>,
    current: StepReport,
}

impl<'h> Commit<'h> {
    /// `settle` returns when every PE has the results of the step.
    pub(super) fn new(settle: &'h dyn Fn() -> Result<()>) -> Self {
        Commit { settle, current: StepReport::default() }
    }
}

impl<L: MoeLayer> StepHook<L> for Commit<'_> {
    fn after_pass(&mut self, run: &mut StepContext<'_, L>, pass: Pass, outcome: &PassOutcome) -> Result<()> {
        run.progress.traffic.add(&outcome.traffic);
        run.progress.all_reduce_bytes += outcome.all_reduce_bytes;
        match pass {
            Pass::Forward => {
                let held = run.groups.experts(run.job.rank(run.pe));
                let expert_rows = held.iter().copied().zip(run.expert_rows.iter().copied()).collect();
                self.current = StepReport { forward: pass_report(outcome), backward: None, expert_rows };
            }
            Pass::Backward => self.current.backward = Some(pass_report(outcome)),
        }
        Ok(())
    }

    fn after(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        let (progress, current) = (&mut *run.progress, std::mem::take(&mut self.current));
        let rounds = [current.forward.rounds, current.backward.as_ref().map_or(0, |pass| pass.rounds)];
        progress.rounds.iter_mut().zip(rounds).for_each(|(most, rounds)| *most = rounds.max(*most));
        progress.pending = Some(current);
        (self.settle)()?;
        progress.settle();
        Ok(())
    }

    fn finish(&mut self, run: &mut StepContext<'_, L>, report: &mut PeReport) -> Result<()> {
        let progress = &mut *run.progress;
        let sample = std::mem::take(&mut progress.sample);
        report.rounds = progress.rounds;
        report.n_steps = sample.seen();
        report.steps = sample.into_steps();
        report.traffic = traffic_report(&progress.traffic, progress.all_reduce_bytes);
        Ok(())
    }
}

/// The times of a pass, with the report's names of the phases.
fn pass_report(outcome: &PassOutcome) -> PassReport {
    let mut phases_s = BTreeMap::new();
    let mut seconds = 0.0;
    for phase in Phase::of_passes() {
        let key = match phase {
            Phase::Router => "router",
            Phase::Dispatch => "dispatch",
            Phase::Expert => "expert_gemm",
            Phase::Combine => "combine",
            Phase::Scale => "scale",
            Phase::Waiting => "waiting",
            Phase::AllReduce => "other",
            Phase::Idle | Phase::Move => continue,
        };
        let time = outcome.phases_s[phase.code()];
        seconds += time;
        *phases_s.entry(key.to_string()).or_default() += time;
    }
    PassReport { seconds, phases_s, expert_cpu_s: outcome.expert_cpu_s, rounds: outcome.rounds }
}

fn traffic_report(traffic: &Traffic, all_reduce_bytes: u64) -> TrafficReport {
    let kinds = [
        ("counts", traffic.header_bytes),
        ("dispatch_rows", traffic.dispatch_row_bytes),
        ("dispatch_slots", traffic.dispatch_slot_bytes),
        ("combine_rows", traffic.combine_row_bytes),
        ("combine_slots", traffic.combine_slot_bytes),
        ("all_reduce", all_reduce_bytes),
    ];
    TrafficReport {
        remote_bytes: kinds.into_iter().map(|(kind, bytes)| (kind.to_string(), bytes)).collect(),
        puts: traffic.puts,
        signals: traffic.signals,
        fences: traffic.fences,
        network_bytes: traffic.network_bytes,
        relay_bytes: traffic.relay_bytes,
    }
}
