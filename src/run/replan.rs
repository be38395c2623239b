//! A plan that is made anew while the steps run, by the loads that they measure.
//!
//! Every PE makes the same plan of the same loads. Should they come to different ones after all, since a mathematical function rounds differently on
//! one of the machines, the plan in use stays.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use anyhow::{Context, Result};

use super::PreparedRun;
use crate::cluster::Cluster;
use crate::job::request::PlanSource;
use crate::moe::{ExpertState, Groups, LayerConfig, WeightId};
use crate::plan::{self, Options, Outcome, Plan, Workload};
use crate::report::Replanned;

/// What all PEs have said, in their order; each says as many words.
pub(super) type Gather<'g> = dyn Fn(&[u64]) -> Result<Vec<u64>> + 'g;

/// A plan that gains less, as a share of a step, is not worth a change: loads differ by as much from one batch to the next.
const LEAST_GAIN: f64 = 0.01;

/// How far loads stay as they were measured: of the gain that a plan made of some steps' loads promised, the part that it would have had in as many
/// steps after them, on average. 1 where nothing is known yet.
#[derive(Clone, Copy, Debug)]
struct Lasting(f64);

impl Lasting {
    /// A plan that promised to gain `promised` would have gained `gained`; the last one counts half.
    fn observe(&mut self, promised: f64, gained: f64) {
        self.0 = 0.5 * (self.0 + (gained / promised).clamp(0.0, 1.0));
    }

    /// For how many of the `left` steps that follow the gain counts: in each `every` of them it is a share r of what it was in those before, so r + r^2 +
    /// ... times `every` in all.
    fn steps(self, every: usize, left: usize) -> f64 {
        (every as f64 * self.0 / (1.0 - self.0)).min(left as f64)
    }
}

/// A plan made anew that promised a gain, taken or not.
struct Proposal {
    from: Plan,
    to: Plan,
    gain_ms: f64,
}

/// The plan in use, and the loads since it was last looked at.
pub(super) struct Replanner<'g> {
    every: usize,
    cluster: Cluster,
    workload: Workload,
    options: Options,
    plan: Plan,
    /// Where experts are.
    pub groups: Groups,
    /// Rows that this PE's experts have got, by expert.
    loads: Vec<u64>,
    lasting: Lasting,
    proposed: Option<Proposal>,
    /// What each expert took here in the last move, ns; 0 before.
    move_ns: u64,
    /// What each expert took on the slowest PE in the quickest move so far: one that was disturbed must not keep all others from being made.
    expert_move_ms: Option<f64>,
    gather: &'g Gather<'g>,
    /// Plans that were changed.
    pub done: Vec<Replanned>,
}

impl<'g> Replanner<'g> {
    /// Of a job that is to be replanned; `None` of any other.
    pub fn new(job: &PreparedRun, gather: &'g Gather<'g>) -> Result<Option<Self>> {
        let (Some(replan), Some(PlanSource::Made(plan))) = (&job.request.replan, &job.request.plan) else {
            return Ok(None);
        };
        let mut cluster = Cluster::from_json(&replan.cluster).context("the probed cluster")?;
        // What the layer has room for, beside what memory there is.
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
            groups: job.groups.clone(),
            loads: vec![0; job.config.n_experts],
            lasting: Lasting(1.0),
            proposed: None,
            move_ns: 0,
            expert_move_ms: None,
            gather,
            done: Vec::new(),
        }))
    }

    /// Counts the rows of PE `me`'s experts in a step.
    pub fn count(&mut self, me: usize, expert_rows: &[u64]) {
        for (&expert, rows) in self.groups.experts(me).iter().zip(expert_rows) {
            self.loads[expert] += rows;
        }
    }

    /// After step `step` of `steps` (collective): where experts are to be from now on, if the plan is made anew and its gain
    /// repays the move.
    pub fn renew(&mut self, job: &PreparedRun, step: usize, steps: usize) -> Result<Option<Groups>> {
        let left = steps - (step + 1);
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
            self.lasting.observe(gain_ms, gained);
        }
        let planned = plan::plan_from(&self.cluster, &self.workload, self.options, Some(&self.plan))?;
        let Outcome::Plan(planned) = planned else { return Ok(None) };
        let copies = if job.request.sgd.is_some() { 2 } else { 1 };
        let expert_mb = (4 * copies * job.config.expert_elements()) as f64 * 1e-6;
        let change = plan::replan(&self.cluster, &self.workload, &self.plan, &planned, expert_mb)?;
        let gains = change.gain_ms > LEAST_GAIN * change.current_ms;
        // Links say the least that a move takes: weights are packed for it too, and prepared again.
        let move_ms = change.move_ms.max(self.expert_move_ms.unwrap_or(0.0) * change.moved_experts as f64);
        let repaid = gains && change.gain_ms * self.lasting.steps(self.every, left) >= move_ms;
        tracing::debug!(
            step,
            plan_ms = planned.elapsed_ms,
            gain_ms = change.gain_ms,
            move_ms,
            lasting = self.lasting.0,
            repaid,
            "planned anew"
        );
        if gains {
            self.proposed = Some(Proposal { from: self.plan.clone(), to: planned.clone(), gain_ms: change.gain_ms });
        }
        let mut hasher = DefaultHasher::new();
        (repaid, serde_json::to_string(&planned.groups)?).hash(&mut hasher);
        let said = (self.gather)(&[hasher.finish()])?;
        if !repaid || said.iter().any(|hash| *hash != said[0]) {
            return Ok(None);
        }
        let groups = job.groups_of(&planned).context("the plan made anew")?;
        self.plan = planned;
        self.groups = groups.clone();
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

    /// The move that was last asked for took from `start` to now.
    pub fn moved(&mut self, start: Instant) {
        if let Some(last) = self.done.last_mut() {
            last.move_s = start.elapsed().as_secs_f64();
            let each_ns = (start.elapsed().as_nanos() as u64).checked_div(last.moved_experts);
            self.move_ns = each_ns.unwrap_or(self.move_ns);
        }
    }
}

/// Weights in f32 that a step of gradient descent changes, where there are any: an expert's go with it.
pub(super) struct Masters<'m> {
    pub config: &'m LayerConfig,
    pub weights: &'m mut Vec<(WeightId, Vec<f32>)>,
}

impl ExpertState for Masters<'_> {
    fn len(&self) -> usize {
        if self.weights.is_empty() { 0 } else { self.config.expert_elements() }
    }

    fn give(&mut self, expert: usize, into: &mut [f32]) {
        for (id, part) in self.config.expert_parts(expert) {
            if let Some((_, values)) = self.weights.iter().find(|(other, _)| *other == id) {
                into[part].copy_from_slice(values);
            }
        }
    }

    fn take(&mut self, expert: usize, values: &[f32]) {
        if !values.is_empty() {
            let parts = self.config.expert_parts(expert).into_iter();
            self.weights.extend(parts.map(|(id, part)| (id, values[part].to_vec())));
        }
    }

    fn forget(&mut self, expert: usize) {
        self.weights.retain(|(id, _)| id.expert() != Some(expert));
    }
}

#[cfg(test)]
mod tests {
    use super::Lasting;

    #[test]
    fn gains_count_for_as_long_as_loads_have_lasted() {
        let mut lasting = Lasting(1.0);
        assert_eq!(lasting.steps(5, 1000), 1000.0);
        lasting.observe(2.0, 2.0);
        assert_eq!(lasting.steps(5, 1000), 1000.0);
        // Half of what was promised, then less than nothing: the next 5 steps, or some of them.
        lasting.observe(2.0, 1.0);
        assert_eq!(lasting.steps(5, 1000), 15.0);
        assert_eq!(lasting.steps(5, 10), 10.0);
        lasting.observe(2.0, -3.0);
        assert_eq!(lasting.steps(5, 1000), 3.0);
        for _ in 0..50 {
            lasting.observe(2.0, -3.0);
        }
        assert!(lasting.steps(5, 1000) < 1e-9);
        // It finds back.
        for _ in 0..60 {
            lasting.observe(2.0, 2.5);
        }
        assert_eq!(lasting.steps(5, 1000), 1000.0);
    }
}
