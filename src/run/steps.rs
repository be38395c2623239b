//! The steps of a run on one PE, over the layer of any engine.

use std::borrow::{Borrow, BorrowMut};
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;

use super::PreparedRun;
use super::pe_results::{Message, ROUTING};
use super::replan::{Gather, Masters, Replanner};
use crate::checkpoint::InputTensor;
use crate::job::host::Host;
use crate::job::request::OnFailure;
use crate::moe::metrics::{self, PassOutcome, Phase};
use crate::moe::{Gradients, Groups, MoeLayer, Routed, WeightId};
use crate::report::{ExpertRows, PassReport, PeReport, StepReport, StepSample, TraceSpan, TrafficReport};

/// Spans of a trace are sent when there are so many.
const SPANS_AT_ONCE: usize = 512;

/// What a PE computed in its last step.
pub(super) struct Results {
    /// `[tokens, hidden]`.
    pub(super) output: Vec<f32>,
    /// `[tokens, hidden]`; empty without backward, as the gradients are.
    pub(super) grad_input: Vec<f32>,
    pub(super) grads: Gradients,
    pub(super) routed: Routed,
    /// Where experts are at the end.
    pub(super) groups: Groups,
    /// What this PE holds of the weights at the end, where they are to be saved.
    pub(super) weights: Vec<(WeightId, Vec<f32>)>,
}

/// How far this PE is, which it keeps where the job goes on without others.
#[derive(Default)]
pub(super) struct Progress {
    /// The steps that are done for good: every PE has their results.
    settled: usize,
    /// The step after these, where its results are here, and nobody knows yet whether everywhere.
    pending: Option<StepReport>,
    /// With SGD, the weights that this PE holds after these steps.
    weights: Vec<(WeightId, Vec<f32>)>,
    /// Those before the pending step, where it may have to be done again.
    weights_before: Vec<(WeightId, Vec<f32>)>,
    sample: StepSample,
    sent: metrics::Traffic,
    all_reduce_bytes: u64,
    rounds: [u64; 2],
    /// Not sent yet.
    spans: Vec<TraceSpan>,
}

impl Progress {
    pub(super) fn settled(&self) -> usize {
        self.settled
    }

    /// The steps whose results are here.
    pub(super) fn complete(&self) -> usize {
        self.settled + usize::from(self.pending.is_some())
    }

    /// Every PE has the results of the pending step.
    fn settle(&mut self) {
        if let Some(report) = self.pending.take() {
            self.sample.offer(report);
            self.settled += 1;
        }
    }

    /// The next step is `step`: the pending one counts, or is forgotten.
    pub(super) fn go_on_from(&mut self, step: usize) {
        if step > self.settled {
            self.settle();
        } else if self.pending.take().is_some() {
            self.weights = std::mem::take(&mut self.weights_before);
        }
    }
}

/// The steps of a job on this PE's tokens that are left to do.
pub(super) struct Steps<'s> {
    pub(super) job: &'s PreparedRun,
    pub(super) host: &'s dyn Host,
    /// Status codes of a forward and a backward, of a layer that does not say itself what it is doing.
    pub(super) passes: Option<[u32; 2]>,
    /// Returns when all PEs have the results of a step, where that matters.
    pub(super) settle: &'s dyn Fn() -> Result<()>,
    /// Brings together what all PEs say, where the plan may be made anew.
    pub(super) gather: &'s Gather<'s>,
    pub(super) progress: &'s mut Progress,
}

impl Steps<'_> {
    /// Runs them, and enters in `report` what they took and sent; `report.pe` says which PE this is.
    pub(super) fn run<L: MoeLayer>(self, layer: &mut L, report: &mut PeReport) -> Result<Results> {
        let Steps { job, host, passes, settle, gather, progress } = self;
        let mut replanner = Replanner::new(job, gather)?;
        let (me, status) = (report.pe, host.status());
        let tokens = job.tokens_of(me);
        report.tokens = tokens.len() as u64;
        tracing::debug!(pe = me, experts = job.experts(me).len(), "the layer is ready");
        if job.request.trace.is_some() {
            layer.record_spans();
        }
        let zeros = vec![0.0; tokens.len() * job.config.hidden];
        let mut x = layer.rows(&job.rows_in(InputTensor::HiddenStates, tokens.clone(), 0)?, "hidden_states")?;
        let mut output = layer.values(&zeros)?;
        let mut backward = None;
        if job.backward {
            let grad_output = layer.rows(&job.rows(InputTensor::GradOutput, tokens.clone())?, "grad_output")?;
            backward = Some((grad_output, layer.values(&zeros)?));
        }

        let mut held = layer.spec().held(layer.my_pe());
        if job.request.sgd.is_some() {
            match progress.weights.is_empty() {
                true => progress.weights = read_weights(layer, &held)?,
                // A layer made anew goes on with what was trained.
                false => progress.weights.iter().try_for_each(|(id, weight)| layer.set_weights(*id, weight))?,
            }
        }
        let mut routed = Routed::default();
        let begin = Instant::now();
        for step in progress.settled..job.request.steps {
            status.set_progress(step as u64, job.request.steps as u64);
            let mut take = |outcome: PassOutcome| {
                progress.sent.add(&outcome.traffic);
                progress.all_reduce_bytes += outcome.all_reduce_bytes;
                progress.spans.extend(outcome.spans.iter().map(|s| TraceSpan {
                    name: s.phase.name().to_string(),
                    start_ns: s.start_ns,
                    dur_ns: s.dur_ns,
                    step: step as u64,
                    track: s.track.into(),
                }));
                pass_report(&outcome)
            };
            if job.shifts(step) != job.shifts(step.saturating_sub(1)) {
                x = layer.rows(&job.rows_in(InputTensor::HiddenStates, tokens.clone(), step)?, "hidden_states")?;
            }
            let enter = |pass: usize| passes.iter().for_each(|codes| status.set_phase(codes[pass]));
            enter(0);
            if let Some(routing) = &job.routing {
                layer.set_choices(Some(routing.of_step(step, job.tokens_of(me))))?;
            }
            let mut saved = layer.forward(x.borrow(), output.borrow_mut())?;
            let mut done = StepReport { forward: take(layer.finish(&saved)?), backward: None };
            if step + 1 == job.request.steps || job.request.save_routing.is_some() || replanner.is_some() {
                routed = layer.routed(&saved)?;
            }
            if let Some(replanner) = &mut replanner {
                replanner.count(me, &routed.expert_rows);
            }
            if job.request.save_routing.is_some() {
                let at = job.captured().offset_bytes(step, job.tokens_of(me).start);
                host.write(ROUTING, at, bytemuck::cast_slice(&routed.chosen), "the routing")?;
            }
            if let Some((grad_output, grad_input)) = &mut backward {
                enter(1);
                layer.backward(&mut saved, x.borrow(), (*grad_output).borrow(), grad_input.borrow_mut())?;
                done.backward = Some(take(layer.finish(&saved)?));
            }
            layer.recycle(saved);
            if let Some(rate) = job.request.sgd {
                if job.request.on_failure == OnFailure::Continue {
                    progress.weights_before.clone_from(&progress.weights);
                }
                descend(layer, rate * job.gradient_scale(), &mut progress.weights)?;
            }
            for (most, pass) in progress.rounds.iter_mut().zip([Some(&done.forward), done.backward.as_ref()]) {
                *most = pass.map_or(0, |pass| pass.rounds).max(*most);
            }
            progress.pending = Some(done);
            settle()?;
            progress.settle();
            if let Some(replanner) = &mut replanner
                && let Some(groups) = replanner.renew(job, step, job.request.steps)?
            {
                tracing::info!(pe = me, step, "experts move");
                let start = Instant::now();
                let (config, weights) = (layer.spec().config.clone(), &mut progress.weights);
                layer.move_experts(&groups, &mut Masters { config: &config, weights })?;
                held = layer.spec().held(layer.my_pe());
                progress.weights.sort_by_key(|(id, _)| held.iter().position(|held| held == id));
                replanner.moved(start);
            }
            if progress.spans.len() >= SPANS_AT_ONCE {
                host.send(&serde_json::to_vec(&Message::Spans(std::mem::take(&mut progress.spans)))?)?;
            }
        }
        let Progress { sample, sent, all_reduce_bytes, rounds, spans, .. } = std::mem::take(progress);
        if !spans.is_empty() {
            host.send(&serde_json::to_vec(&Message::Spans(spans))?)?;
        }
        report.all_steps_s = begin.elapsed().as_secs_f64();
        report.rounds = rounds;
        report.n_steps = sample.seen();
        report.steps = sample.into_steps();
        report.traffic = traffic(&sent, all_reduce_bytes);
        let groups = replanner.as_ref().map_or(&job.groups, |replanner| &replanner.groups).clone();
        report.replanned = replanner.map(|replanner| replanner.done).unwrap_or_default();
        let rows = groups.experts(job.rank(me)).iter().zip(&routed.expert_rows);
        report.expert_rows = rows.map(|(&expert, &rows)| ExpertRows { expert, rows }).collect();

        let mut results = Results {
            output: zeros.clone(),
            grad_input: Vec::new(),
            grads: Gradients::default(),
            routed,
            groups,
            weights: Vec::new(),
        };
        if job.request.save_weights.is_some() {
            results.weights = read_weights(layer, &held)?;
        }
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

/// The weights that this PE holds, as the layer computes with them.
fn read_weights<L: MoeLayer>(layer: &L, held: &[WeightId]) -> Result<Vec<(WeightId, Vec<f32>)>> {
    let mut weights = Vec::with_capacity(held.len());
    for &id in held {
        let mut values = vec![0.0; layer.spec().config.shape(id).iter().product()];
        layer.weights(id, &mut values)?;
        weights.push((id, values));
    }
    Ok(weights)
}

/// A step of stochastic gradient descent. `weights` are kept in f32, whatever the layer computes in, so that small steps add up.
fn descend<L: MoeLayer>(layer: &mut L, rate: f32, weights: &mut [(WeightId, Vec<f32>)]) -> Result<()> {
    let (placement, me) = (layer.spec().placement.clone(), layer.my_pe());
    let gradients = layer.gradients()?;
    for (id, weight) in weights.iter_mut() {
        let gradient = gradients.get(*id, &placement, me).unwrap_or_default();
        weight.iter_mut().zip(gradient).for_each(|(weight, gradient)| *weight -= rate * gradient);
    }
    for (id, weight) in weights.iter().filter(|(id, _)| id.has_gradient()) {
        layer.set_weights(*id, weight)?;
    }
    Ok(())
}

/// A pass's times by the report's names of phases.
pub(super) fn pass_report(outcome: &PassOutcome) -> PassReport {
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

/// The traffic of the measured steps.
pub(super) fn traffic(sent: &metrics::Traffic, all_reduce_bytes: u64) -> TrafficReport {
    let kinds = [
        ("counts", sent.header_bytes),
        ("dispatch_rows", sent.dispatch_row_bytes),
        ("dispatch_slots", sent.dispatch_slot_bytes),
        ("combine_rows", sent.combine_row_bytes),
        ("combine_slots", sent.combine_slot_bytes),
        ("all_reduce", all_reduce_bytes),
    ];
    TrafficReport {
        remote_bytes: kinds.into_iter().map(|(kind, bytes)| (kind.to_string(), bytes)).collect(),
        puts: sent.puts,
        signals: sent.signals,
        fences: sent.fences,
        network_bytes: sent.network_bytes,
        relay_bytes: sent.relay_bytes,
    }
}
