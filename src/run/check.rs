//! `--check`: compares the results of the PEs with the dense float64 reference.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use half::{bf16, f16};

use super::routing::leave_out;
use super::{PreparedRun, gradient_name};
use crate::check::{Bounds, CHOICE_TOLERANCE, Comparison, Problem, Wire, judge, reference_with};
use crate::checkpoint::{InputTensor, ResultLayout};
use crate::job::request::RowsPer;
use crate::moe::{Balance, Division, Dtype, Hosts, WeightId, WeightSource};
use crate::report::{CheckReport, SliceCheck, TensorCheck};

/// A score tolerance that accepts every choice.
const ANY_CHOICE: f64 = 1e6;

/// Compares every tensor of the results with the reference.
///
/// # Errors
/// Returns an error if results cannot be read back, or if the layer chose experts that the reference would not choose for the token. The
/// latter error gives the scores of both.
pub fn check(job: &PreparedRun, results: &ResultLayout, file: &File, chosen: &File) -> Result<CheckReport> {
    let round = |mut values: Vec<f32>| {
        match job.request.dtype {
            Dtype::F32 => {}
            Dtype::Bf16 => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
            Dtype::F16 => values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
        }
        values
    };
    let x = round(job.rows(InputTensor::HiddenStates, 0..job.tokens)?);
    let grad_output = if job.backward { Some(round(job.rows(InputTensor::GradOutput, 0..job.tokens)?)) } else { None };
    let weights = |id: WeightId| {
        let values = job.load(id)?;
        // Router, shared gate and biases stay f32 in the layer.
        Ok(if matches!(id, WeightId::Expert(..) | WeightId::Shared(_)) { round(values) } else { values })
    };
    let mut choice = vec![0u32; job.tokens * job.config.router.top_k];
    chosen.read_exact_at(bytemuck::cast_slice_mut(&mut choice), 0).context("cannot read the routing back")?;

    let mut config = job.config.clone();
    if let Some(routing) = &job.routing {
        // The file gives the choices, so groups of experts, which limit the router's choice, do not apply.
        routing.check(job.request.steps - 1, &choice)?;
        config.router.groups = None;
    }
    let dtype = job.request.dtype;
    let on_wire = job.request.options.wire(dtype);
    let sent = if on_wire == dtype { Vec::new() } else { sent(job, &choice)? };
    let roundings = if job.request.rows_per == RowsPer::Host { 2 } else { 1 };
    let mut tensors = Vec::new();
    let problem = Problem {
        config: &config,
        tokens: job.tokens,
        hidden_states: &x,
        grad_output: grad_output.as_deref(),
        weights: &weights,
        chosen: Some(&choice),
        choice_tolerance: if job.routing.is_some() { ANY_CHOICE } else { CHOICE_TOLERANCE },
        dtype,
        wire: (on_wire != dtype).then_some(Wire { dtype: on_wire, sent: &sent, roundings }),
    };
    // `dtype` selects the tolerance. The output and the input gradient are sums of rows that were sent, so their tolerance is that of the
    // wire type. Gradients of weights are only computed from such rows, so their tolerance is that of the layer's type.
    let mut test = |name: &str, got: &[f32], want: &[f64], bounds: &Bounds, dtype: Dtype| -> Result<()> {
        let Comparison { deviation, tolerance, worst } = judge(name, got, want, bounds, dtype);
        let worst = worst.map(|slice| SliceCheck {
            axis: slice.axis.name().to_string(),
            index: slice.index,
            error: slice.error,
            bound: slice.bound,
        });
        tensors.push(TensorCheck::new(name, deviation.relative, tolerance, worst));
        Ok(())
    };
    let want = reference_with(&problem, &mut |id, grad| {
        let place = job.weight_slice(id);
        let name = gradient_name(&place.tensor);
        if place.is_whole() {
            return test(&name, &results.read(file, &name)?, &grad.values, &grad.bounds, dtype);
        }
        // Only a part of the tensor belongs to this weight, so the name includes the part.
        let span = place.span();
        let got = place.gather(&results.read_elements(file, &name, span.clone())?, span.start);
        let part = match id {
            WeightId::Expert(e, proj) | WeightId::ExpertBias(e, proj) => format!("{e}, {proj:?}"),
            other => format!("{other:?}"),
        };
        test(&format!("{name} ({part})"), &got, &grad.values, &grad.bounds, dtype)
    })?;
    test("output", &results.read(file, "output")?, &want.output, &want.output_bounds, on_wire)?;
    if let Some(grad) = &want.grad_hidden_states {
        let name = "grad_hidden_states";
        test(name, &results.read(file, name)?, grad, &want.grad_hidden_states_bounds, on_wire)?;
    }
    Ok(CheckReport::new(tensors))
}

/// For each choice, `[tokens, top_k]`: whether the token is sent to another PE for it.
fn sent(job: &PreparedRun, choice: &[u32]) -> Result<Vec<bool>> {
    let top_k = job.config.router.top_k;
    let mut kept = choice.to_vec();
    leave_out(&job.config, &mut kept);
    let of = |pe: usize| {
        let tokens = job.tokens_of(pe);
        &kept[tokens.start * top_k..tokens.end * top_k]
    };
    let counts = |pe: usize| {
        let mut counts = vec![0u32; job.config.n_experts];
        of(pe).iter().for_each(|&e| counts.get_mut(e as usize).into_iter().for_each(|count| *count += 1));
        counts
    };
    let mut sent = Vec::with_capacity(kept.len());
    for pe in 0..job.request.pes {
        let (group, source) = job.groups.position(pe);
        let (placement, options) = (job.groups.placement(group), &job.request.options);
        let division = if options.balance == Balance::Split {
            let of_group: Vec<_> = job.groups.members(group).iter().map(|&pe| counts(pe)).collect();
            Division::by_counts(placement, source, &of_group, &Hosts::default())?
        } else {
            let own = counts(pe);
            Division::by_shares(placement, source, |e| u64::from(own[e]))
        };
        sent.extend(division.holders(of(pe)).into_iter().map(|holder| holder.is_some_and(|holder| holder != source)));
    }
    Ok(sent)
}
