//! The steps of a run on one PE, over the layer of any engine.

use std::borrow::{Borrow, BorrowMut};
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;

use super::PreparedRun;
use super::pe_results::Message;
use super::replan::{Gather, Masters, Replanner};
use crate::checkpoint::InputTensor;
use crate::job::host::Host;
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

/// Runs the job's steps on this PE's tokens, and enters in `report` what they took and sent; `report.pe` says which PE
/// this is. `passes`: status codes of a forward and a backward, of a layer that does not say itself what it is doing.
pub(super) fn run<L: MoeLayer>(
    job: &PreparedRun,
    host: &dyn Host,
    passes: Option<[u32; 2]>,
    layer: &mut L,
    gather: &Gather,
    report: &mut PeReport,
) -> Result<Results> {
    let mut replanner = Replanner::new(job, gather)?;
    let (me, status) = (report.pe, host.status());
    let tokens = job.tokens_of(me);
    report.tokens = tokens.len() as u64;
    tracing::debug!(pe = me, experts = job.groups.experts(me).len(), "the layer is ready");
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
    let mut weights = Vec::new();
    if job.request.sgd.is_some() {
        weights = read_weights(layer, &held)?;
    }
    let mut sample = StepSample::default();
    let mut spans = Vec::new();
    let mut sent = metrics::Traffic::default();
    let mut all_reduce_bytes = 0;
    let mut routed = Routed::default();
    let begin = Instant::now();
    for step in 0..job.request.steps {
        status.set_progress(step as u64, job.request.steps as u64);
        let mut take = |outcome: PassOutcome| {
            sent.add(&outcome.traffic);
            all_reduce_bytes += outcome.all_reduce_bytes;
            spans.extend(outcome.spans.iter().map(|s| TraceSpan {
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
        let mut saved = layer.forward(x.borrow(), output.borrow_mut())?;
        let mut done = StepReport { forward: take(layer.finish(&saved)?), backward: None };
        if step + 1 == job.request.steps || replanner.is_some() {
            routed = layer.routed(&saved)?;
        }
        if let Some(replanner) = &mut replanner {
            replanner.count(me, &routed.expert_rows);
        }
        if let Some((grad_output, grad_input)) = &mut backward {
            enter(1);
            layer.backward(&mut saved, x.borrow(), (*grad_output).borrow(), grad_input.borrow_mut())?;
            done.backward = Some(take(layer.finish(&saved)?));
        }
        layer.recycle(saved);
        if let Some(rate) = job.request.sgd {
            descend(layer, rate, &mut weights)?;
        }
        for (most, pass) in report.rounds.iter_mut().zip([Some(&done.forward), done.backward.as_ref()]) {
            *most = pass.map_or(0, |pass| pass.rounds).max(*most);
        }
        sample.offer(done);
        if let Some(replanner) = &mut replanner
            && let Some(groups) = replanner.renew(job, step, job.request.steps)?
        {
            let start = Instant::now();
            let config = layer.spec().config.clone();
            layer.move_experts(&groups, &mut Masters { config: &config, weights: &mut weights })?;
            held = layer.spec().held(layer.my_pe());
            weights.sort_by_key(|(id, _)| held.iter().position(|held| held == id));
            replanner.moved(start);
        }
        if spans.len() >= SPANS_AT_ONCE {
            host.send(&serde_json::to_vec(&Message::Spans(std::mem::take(&mut spans)))?)?;
        }
    }
    if !spans.is_empty() {
        host.send(&serde_json::to_vec(&Message::Spans(spans))?)?;
    }
    report.all_steps_s = begin.elapsed().as_secs_f64();
    report.n_steps = sample.seen();
    report.steps = sample.into_steps();
    report.traffic = traffic(&sent, all_reduce_bytes);
    let groups = replanner.as_ref().map_or(&job.groups, |replanner| &replanner.groups).clone();
    report.replanned = replanner.map(|replanner| replanner.done).unwrap_or_default();
    let rows = groups.experts(me).iter().zip(&routed.expert_rows);
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
    }
    Ok(results)
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
    let gradients = layer.gradients()?.clone();
    for (id, weight) in weights.iter_mut().filter(|(id, _)| id.has_gradient()) {
        let Some(gradient) = gradients.get(*id, &placement, me) else { continue };
        weight.iter_mut().zip(gradient).for_each(|(weight, gradient)| *weight -= rate * gradient);
        layer.set_weights(*id, weight)?;
    }
    Ok(())
}

/// A pass's times by the report's names of phases.
pub(super) fn pass_report(outcome: &PassOutcome) -> PassReport {
    let mut phases_s = BTreeMap::new();
    let mut seconds = 0.0;
    for phase in Phase::ALL {
        let key = match phase {
            Phase::Router => "router",
            Phase::Dispatch => "dispatch",
            Phase::Expert => "expert_gemm",
            Phase::Combine => "combine",
            Phase::Scale => "scale",
            Phase::Waiting => "waiting",
            Phase::AllReduce => "other",
            // Time between passes is not part of any.
            Phase::Idle => continue,
        };
        let time = outcome.phases_s[phase.code()];
        seconds += time;
        *phases_s.entry(key.to_string()).or_default() += time;
    }
    PassReport { seconds, phases_s, rounds: outcome.rounds }
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
    }
}
