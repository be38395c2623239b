//! The steps of a run on one PE, for a layer on the CPU or on a device.

use std::borrow::{Borrow, BorrowMut};
use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

use super::hooks::{Gather, Pass, Progress, StepContext, hooks, read_weights};
use super::{PreparedRun, Source};
use crate::checkpoint::InputTensor;
use crate::job::host::Host;
use crate::moe::{Gradients, Groups, MoeLayer, Routed, WeightId};
use crate::report::{ExpertRows, PeReport};

/// The results of a PE's last step.
pub(super) struct Results {
    /// `[tokens, hidden]`.
    pub(super) output: Vec<f32>,
    /// `[tokens, hidden]`. Without a backward pass this and `grads` are empty.
    pub(super) grad_input: Vec<f32>,
    pub(super) grads: Gradients,
    pub(super) routed: Routed,
    /// The groups, and the experts of every PE, after the last step.
    pub(super) groups: Groups,
    /// The weights that this PE holds after the last step, if the request saves weights.
    pub(super) weights: Vec<(WeightId, Vec<f32>)>,
}

/// The remaining steps of a job on this PE's tokens.
pub(super) struct Steps<'s> {
    pub(super) job: &'s PreparedRun,
    pub(super) host: &'s dyn Host,
    /// Status codes of the forward and the backward pass, if the layer does not report its phases itself.
    pub(super) passes: Option<[u32; 2]>,
    /// Called after each step. If the job may continue without some PEs, it returns when all PEs have the results of the step.
    pub(super) settle: &'s dyn Fn() -> Result<()>,
    pub(super) gather: &'s Gather<'s>,
    pub(super) progress: &'s mut Progress,
}

impl Steps<'_> {
    /// Runs the steps, and stores their measurements in `report`, whose `pe` is this PE.
    pub(super) fn run<L: MoeLayer>(self, layer: &mut L, report: &mut PeReport) -> Result<Results> {
        let Steps { job, host, passes, settle, gather, progress } = self;
        let (pe, first) = (report.pe, progress.settled());
        let tokens = job.tokens_of(pe);
        report.tokens = tokens.len() as u64;
        tracing::debug!(pe, experts = job.experts(pe).len(), "the layer is ready");
        let zeros = vec![0.0; tokens.len() * job.config.hidden];
        let input = layer.rows(&job.rows_in(InputTensor::HiddenStates, tokens.clone(), first)?, "hidden_states")?;
        let output = layer.values(&zeros)?;
        let mut backward = None;
        if job.backward {
            let grad_output = layer.rows(&job.rows(InputTensor::GradOutput, tokens)?, "grad_output")?;
            backward = Some((grad_output, layer.values(&zeros)?));
        }
        let (routed, groups) = (Routed::default(), job.groups.clone());
        let mut run = StepContext {
            job,
            host,
            pe,
            layer,
            step: first,
            input,
            output,
            backward,
            stopped: false,
            routed,
            expert_rows: Vec::new(),
            groups,
            progress,
        };
        let mut hooks = hooks(&mut run, settle, gather)?;
        let needs_routing = hooks.iter().any(|hook| hook.needs_routing());
        let show = |pass: Pass| passes.iter().for_each(|codes| host.status().set_phase(codes[pass as usize]));

        let begin = Instant::now();
        for step in first..job.request.steps {
            run.step = step;
            host.status().set_progress(step as u64, job.request.steps as u64);
            hooks.iter_mut().try_for_each(|hook| hook.before(&mut run))?;
            show(Pass::Forward);
            let mut saved = run.layer.forward(run.input.borrow(), run.output.borrow_mut())?;
            let outcome = run.layer.finish(&saved)?;
            run.expert_rows = run.layer.expert_rows(&saved)?;
            if needs_routing || step + 1 == job.request.steps {
                run.routed = run.layer.routed(&saved)?;
            }
            hooks.iter_mut().try_for_each(|hook| hook.after_pass(&mut run, Pass::Forward, &outcome))?;
            if let Some((grad_output, grad_input)) = &mut run.backward {
                show(Pass::Backward);
                let (x, grad_output) = (run.input.borrow(), (*grad_output).borrow());
                run.layer.backward(&mut saved, x, grad_output, grad_input.borrow_mut())?;
                let outcome = run.layer.finish(&saved)?;
                hooks.iter_mut().try_for_each(|hook| hook.after_pass(&mut run, Pass::Backward, &outcome))?;
            }
            run.layer.recycle(saved);
            hooks.iter_mut().try_for_each(|hook| hook.after(&mut run))?;
            if run.stopped {
                break;
            }
        }
        report.all_steps_s = begin.elapsed().as_secs_f64();
        hooks.iter_mut().try_for_each(|hook| hook.finish(&mut run, report))?;
        drop(hooks);

        let StepContext { layer, output, backward, routed, groups, .. } = run;
        let rows = groups.experts(job.rank(pe)).iter().zip(&routed.expert_rows);
        report.expert_rows = rows.map(|(&expert, &rows)| ExpertRows { expert, rows }).collect();
        let weights = if job.request.save_weights.is_some() { read_weights(layer)? } else { Vec::new() };
        let (grad_input, grads) = (Vec::new(), Gradients::default());
        let mut results = Results { output: zeros.clone(), grad_input, grads, routed, groups, weights };
        layer.read(output.borrow(), &mut results.output)?;
        if let Some((_, grad_input)) = &backward {
            results.grad_input = zeros;
            layer.read(grad_input.borrow(), &mut results.grad_input)?;
            results.grads = layer.gradients()?.clone();
            let scale = job.gradient_scale();
            if scale != 1.0 {
                results.grads.scale(scale);
            }
        }
        Ok(results)
    }
}

impl PreparedRun {
    /// How often the hot experts have changed before step `step`.
    pub(super) fn shifts(&self, step: usize) -> usize {
        self.request.hot_shift_every.map_or(0, |every| step / every)
    }

    /// Reads rows of an input tensor for the last step, f32.
    pub(super) fn rows(&self, tensor: InputTensor, rows: Range<usize>) -> Result<Vec<f32>> {
        self.rows_in(tensor, rows, self.request.steps.saturating_sub(1))
    }

    /// Reads rows of an input tensor for step `step`, f32.
    pub(super) fn rows_in(&self, tensor: InputTensor, rows: Range<usize>, step: usize) -> Result<Vec<f32>> {
        match (&self.source, tensor) {
            (Source::Checkpoint(_, input), _) => Ok(input.rows(tensor, rows)?),
            (Source::Synthetic(s), InputTensor::HiddenStates) if self.shifts(step) > 0 => {
                Ok(s.shifted(self.shifts(step)).hidden_states(rows))
            }
            (Source::Synthetic(s), InputTensor::HiddenStates) => Ok(s.hidden_states(rows)),
            (Source::Synthetic(s), InputTensor::GradOutput) => Ok(s.grad_output(rows)),
        }
    }
}
