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

    /// After step `step` of `steps` (collective): where experts are to be from now on, if the plan is made anew and the steps that are left
    /// repay the move.
    pub fn renew(&mut self, job: &PreparedRun, step: usize, steps: usize) -> Result<Option<Groups>> {
        let left = steps - (step + 1);
        if !(step + 1).is_multiple_of(self.every) || left == 0 {
            return Ok(None);
        }
        let n = self.loads.len();
        let loads = (self.gather)(&self.loads)?;
        let loads: Vec<f64> = (0..n).map(|e| loads.iter().skip(e).step_by(n).sum::<u64>() as f64).collect();
        self.loads.fill(0);
        if loads.iter().sum::<f64>() <= 0.0 {
            return Ok(None);
        }
        self.workload.set_load(loads, "the measured loads")?;
        let planned = plan::plan_from(&self.cluster, &self.workload, self.options, Some(&self.plan))?;
        let Outcome::Plan(planned) = planned else { return Ok(None) };
        let copies = if job.request.sgd.is_some() { 2 } else { 1 };
        let expert_mb = (4 * copies * expert_elements(&job.config)) as f64 * 1e-6;
        let change = plan::replan(&self.cluster, &self.workload, &self.plan, &planned, expert_mb)?;
        let gains = change.gain_ms > LEAST_GAIN * change.current_ms;
        let repaid = gains && change.repaid_after_iterations.is_some_and(|n| n <= left as f64);
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
            predicted_move_s: change.move_ms * 1e-3,
            move_s: 0.0,
        });
        Ok(Some(groups))
    }

    /// The move that was last asked for took from `start` to now.
    pub fn moved(&mut self, start: Instant) {
        if let Some(last) = self.done.last_mut() {
            last.move_s = start.elapsed().as_secs_f64();
        }
    }
}

/// Elements of an expert's weights.
fn expert_elements(config: &LayerConfig) -> usize {
    config.expert_weights(0).into_iter().map(|id| config.shape(id).iter().product::<usize>()).sum()
}

/// Weights in f32 that a step of gradient descent changes, where there are any: an expert's go with it.
pub(super) struct Masters<'m> {
    pub config: &'m LayerConfig,
    pub weights: &'m mut Vec<(WeightId, Vec<f32>)>,
}

impl ExpertState for Masters<'_> {
    fn len(&self) -> usize {
        if self.weights.is_empty() { 0 } else { expert_elements(self.config) }
    }

    fn give(&mut self, expert: usize, into: &mut [f32]) {
        let mut rest = into;
        for id in self.config.expert_weights(expert) {
            let Some((_, values)) = self.weights.iter().find(|(other, _)| *other == id) else { continue };
            let (head, tail) = rest.split_at_mut(values.len());
            head.copy_from_slice(values);
            rest = tail;
        }
    }

    fn take(&mut self, expert: usize, values: &[f32]) {
        if values.is_empty() {
            return;
        }
        let mut rest = values;
        for id in self.config.expert_weights(expert) {
            let (head, tail) = rest.split_at(self.config.shape(id).iter().product());
            self.weights.push((id, head.to_vec()));
            rest = tail;
        }
    }

    fn forget(&mut self, expert: usize) {
        self.weights.retain(|(id, _)| id.expert() != Some(expert));
    }
}
