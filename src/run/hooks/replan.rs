//! `--replan-every`: makes new plans from the measured loads between steps, and moves experts to follow them.
//!
//! Every PE computes the same plan from the same loads. The plans may differ if a mathematical function rounds differently on one of the
//! machines. The current plan is then kept.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use anyhow::{Context, Result};

use super::{Pass, StepContext, StepHook};
use crate::cluster::Cluster;
use crate::job::request::PlanSource;
use crate::moe::metrics::PassOutcome;
use crate::moe::{ExpertState, Groups, LayerConfig, MoeLayer, WeightId};
use crate::plan::{self, Options, Outcome, Plan, Workload};
use crate::report::{PeReport, Replanned};
use crate::run::PreparedRun;

/// An all-gather: sends this PE's words, and returns those of all PEs in order. Every PE passes the same number of words.
pub(in crate::run) type Gather<'g> = dyn Fn(&[u64]) -> Result<Vec<u64>> + 'g;

/// Minimum gain of a new plan, as a share of the step's time. Smaller gains are within the variation of loads between batches.
const MIN_GAIN: f64 = 0.01;

/// How well measured loads predict later loads: a moving average of (confirmed gain) / (predicted gain). 1 before the first observation.
#[derive(Clone, Copy, Debug)]
struct LoadPersistence(f64);

impl LoadPersistence {
    /// Adds an observation: a plan with the predicted gain `promised` would have gained `gained` with the later loads. The latest
    /// observation has weight 1/2.
    fn observe(&mut self, promised: f64, gained: f64) {
        self.0 = 0.5 * (self.0 + (gained / promised).clamp(0.0, 1.0));
    }

    /// The number of steps at the full gain that have the same total gain as the `left` remaining steps. The gain is assumed to decay by a
    /// factor r every `every` steps, which sums to `every` (r + r^2 + ...).
    fn steps(self, every: usize, left: usize) -> f64 {
        (every as f64 * self.0 / (1.0 - self.0)).min(left as f64)
    }
}

/// A plan with a predicted gain, whether it was adopted or not.
struct Proposal {
    from: Plan,
    to: Plan,
    gain_ms: f64,
}

/// The plan in use, and the loads since the last decision.
pub(super) struct Replanner<'g> {
    every: usize,
    cluster: Cluster,
    workload: Workload,
    options: Options,
    plan: Plan,
    /// Rows that this PE's experts received, by expert.
    loads: Vec<u64>,
    persistence: LoadPersistence,
    proposed: Option<Proposal>,
    /// Time of the last move on this PE per moved expert, ns; 0 before the first move.
    move_ns: u64,
    /// Time per moved expert on the slowest PE of a move: the minimum over all moves, so that one unusually slow move does not prevent
    /// later moves.
    expert_move_ms: Option<f64>,
    gather: &'g Gather<'g>,
    done: Vec<Replanned>,
}

impl<'g> Replanner<'g> {
    /// Returns `None` if the job does not replan.
    pub(super) fn new(job: &PreparedRun, gather: &'g Gather<'g>) -> Result<Option<Self>> {
        let (Some(replan), Some(PlanSource::Made(plan))) = (&job.request.replan, &job.request.plan) else {
            return Ok(None);
        };
        let mut cluster = Cluster::from_json(&replan.cluster).context("the probed cluster")?;
        // The number of experts is limited by the slots of the layer, which is allocated already, rather than by memory.
        let slots = job.slots().unwrap_or(0) as u64;
        for device in &mut cluster.devices {
            device.memory_mb = None;
            device.memory_experts = slots;
        }
        Ok(Some(Replanner {
            every: replan.every,
            cluster,
            workload: job.workload(),
            options: Options::default().replicas(replan.replicas),
            plan: (**plan).clone(),
            loads: vec![0; job.config.n_experts],
            persistence: LoadPersistence(1.0),
            proposed: None,
            move_ns: 0,
            expert_move_ms: None,
            gather,
            done: Vec::new(),
        }))
    }

    /// Returns the new groups if replanning is due after step `step` and the gain of the new plan repays the move. Collective.
    fn replan(&mut self, job: &PreparedRun, step: usize) -> Result<Option<Groups>> {
        let left = job.request.steps - (step + 1);
        if !(step + 1).is_multiple_of(self.every) || left == 0 {
            return Ok(None);
        }
        let n = self.loads.len();
        self.loads.push(self.move_ns);
        let by_pe = (self.gather)(&self.loads)?;
        self.loads.truncate(n);
        let of_all = |word: usize| by_pe.iter().skip(word).step_by(n + 1);
        let loads: Vec<f64> = (0..n).map(|e| of_all(e).sum::<u64>() as f64).collect();
        if let Some(last) = of_all(n).max().filter(|ns| **ns > 0).map(|ns| *ns as f64 * 1e-6) {
            self.expert_move_ms = Some(self.expert_move_ms.map_or(last, |least| least.min(last)));
        }
        self.loads.fill(0);
        if loads.iter().sum::<f64>() <= 0.0 {
            return Ok(None);
        }
        self.workload.set_load(loads, "the measured loads")?;
        if let Some(Proposal { from, to, gain_ms }) = self.proposed.take() {
            let gained = plan::replan(&self.cluster, &self.workload, &from, &to, 0.0)?.gain_ms;
            self.persistence.observe(gain_ms, gained);
        }
        let planned = plan::plan_from(&self.cluster, &self.workload, self.options, Some(&self.plan))?;
        let Outcome::Plan(planned) = planned else { return Ok(None) };
        let copies = if job.request.sgd.is_some() { 2 } else { 1 };
        let expert_mb = (4 * copies * job.config.expert_elements()) as f64 * 1e-6;
        let change = plan::replan(&self.cluster, &self.workload, &self.plan, &planned, expert_mb)?;
        let gains = change.gain_ms > MIN_GAIN * change.current_ms;
        // The time over the links is a lower bound of the move's time, since weights are also packed and prepared.
        let move_ms = change.move_ms.max(self.expert_move_ms.unwrap_or(0.0) * change.moved_experts as f64);
        let repaid = gains && change.gain_ms * self.persistence.steps(self.every, left) >= move_ms;
        tracing::debug!(
            step,
            plan_ms = planned.elapsed_ms,
            gain_ms = change.gain_ms,
            move_ms,
            persistence = self.persistence.0,
            repaid,
            "planned again"
        );
        if gains {
            self.proposed = Some(Proposal { from: self.plan.clone(), to: planned.clone(), gain_ms: change.gain_ms });
        }
        let mut hasher = DefaultHasher::new();
        (repaid, serde_json::to_string(&planned.groups)?).hash(&mut hasher);
        let hashes = (self.gather)(&[hasher.finish()])?;
        if !repaid || hashes.iter().any(|hash| *hash != hashes[0]) {
            return Ok(None);
        }
        let groups = job.groups_of(&planned).context("the new plan")?;
        self.plan = planned;
        self.done.push(Replanned {
            after_step: step as u64 + 1,
            current_s: change.current_ms * 1e-3,
            planned_s: change.planned_ms * 1e-3,
            moved_experts: change.moved_experts,
            predicted_move_s: move_ms * 1e-3,
            move_s: 0.0,
        });
        Ok(Some(groups))
    }

    /// Records the time from `start` to now as that of the last move.
    fn moved(&mut self, start: Instant) {
        if let Some(last) = self.done.last_mut() {
            last.move_s = start.elapsed().as_secs_f64();
            let each_ns = (start.elapsed().as_nanos() as u64).checked_div(last.moved_experts);
            self.move_ns = each_ns.unwrap_or(self.move_ns);
        }
    }
}

impl<L: MoeLayer> StepHook<L> for Replanner<'_> {
    fn after_pass(&mut self, run: &mut StepContext<'_, L>, pass: Pass, _: &PassOutcome) -> Result<()> {
        if pass == Pass::Forward {
            for (&expert, rows) in run.groups.experts(run.pe).iter().zip(&run.expert_rows) {
                self.loads[expert] += rows;
            }
        }
        Ok(())
    }

    fn after(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        if run.stopped {
            return Ok(());
        }
        let Some(groups) = self.replan(run.job, run.step)? else { return Ok(()) };
        tracing::info!(pe = run.pe, step = run.step, "experts move");
        let start = Instant::now();
        let (config, weights) = (run.layer.spec().config.clone(), &mut run.progress.weights);
        run.layer.move_experts(&groups, &mut MasterWeights { config: &config, weights })?;
        let held = run.layer.spec().held(run.layer.my_pe());
        run.progress.weights.sort_by_key(|(id, _)| held.iter().position(|held| held == id));
        self.moved(start);
        run.groups = groups;
        Ok(())
    }

    fn finish(&mut self, _: &mut StepContext<'_, L>, report: &mut PeReport) -> Result<()> {
        report.replanned = std::mem::take(&mut self.done);
        Ok(())
    }
}

/// SGD's f32 weights, which move together with their expert; empty without SGD.
struct MasterWeights<'m> {
    config: &'m LayerConfig,
    weights: &'m mut Vec<(WeightId, Vec<f32>)>,
}

impl ExpertState for MasterWeights<'_> {
    fn len(&self) -> usize {
        if self.weights.is_empty() { 0 } else { self.config.expert_elements() }
    }

    fn export(&mut self, expert: usize, into: &mut [f32]) {
        for (id, part) in self.config.expert_parts(expert) {
            if let Some((_, values)) = self.weights.iter().find(|(other, _)| *other == id) {
                into[part].copy_from_slice(values);
            }
        }
    }

    fn import(&mut self, expert: usize, values: &[f32]) {
        if !values.is_empty() {
            let parts = self.config.expert_parts(expert).into_iter();
            self.weights.extend(parts.map(|(id, part)| (id, values[part].to_vec())));
        }
    }

    fn remove(&mut self, expert: usize) {
        self.weights.retain(|(id, _)| id.expert() != Some(expert));
    }
}

#[cfg(test)]
mod tests {
    use super::LoadPersistence;

    #[test]
    fn predicted_gain_decays_with_unconfirmed_loads() {
        let mut persistence = LoadPersistence(1.0);
        assert_eq!(persistence.steps(5, 1000), 1000.0);
        persistence.observe(2.0, 2.0);
        assert_eq!(persistence.steps(5, 1000), 1000.0);
        // The first plan gains half of the prediction, so the average is 0.75. The second plan loses, which counts as 0, so the average is
        // 0.375.
        persistence.observe(2.0, 1.0);
        assert_eq!(persistence.steps(5, 1000), 15.0);
        assert_eq!(persistence.steps(5, 10), 10.0);
        persistence.observe(2.0, -3.0);
        assert_eq!(persistence.steps(5, 1000), 3.0);
        for _ in 0..50 {
            persistence.observe(2.0, -3.0);
        }
        assert!(persistence.steps(5, 1000) < 1e-9);
        // Confirmed gains restore the persistence.
        for _ in 0..60 {
            persistence.observe(2.0, 2.5);
        }
        assert_eq!(persistence.steps(5, 1000), 1000.0);
    }
}
