//! What a PE reports of its steps, and what it writes of their results.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::steps::Results;
use super::{PreparedRun, gradient_name};
use crate::checkpoint::ResultLayout;
use crate::job::host::Host;
use crate::moe::metrics::Phase;
use crate::moe::{Load, WeightPlace, WeightSource};
use crate::report::{PeReport, TraceSpan};

/// The names of what a PE may be doing, by status code: before the layer, the layer's phases, and after it.
pub const PHASE_NAMES: [&str; FIRST_PHASE as usize + Phase::ALL.len()] = {
    let mut names = [""; FIRST_PHASE as usize + Phase::ALL.len()];
    names[START_UP as usize] = "start-up";
    names[LOADING as usize] = "loading";
    names[WRITING as usize] = "writing results";
    names[DEVICE_FORWARD as usize] = "forward on the device";
    names[DEVICE_BACKWARD as usize] = "backward on the device";
    let mut i = 0;
    while i < Phase::ALL.len() {
        assert!(Phase::ALL[i].code() == i);
        names[FIRST_PHASE as usize + i] = Phase::ALL[i].name();
        i += 1;
    }
    names
};
/// What a status page says at first.
const START_UP: u32 = 0;
pub(super) const LOADING: u32 = 1;
const WRITING: u32 = 2;
/// What the kernels of a pass do, nobody can follow.
pub(super) const DEVICE_FORWARD: u32 = 3;
pub(super) const DEVICE_BACKWARD: u32 = 4;
pub(super) const FIRST_PHASE: u32 = 5;

/// The files that the supervisor hands to the PEs.
pub const RESULTS: &str = "results";
/// The experts chosen for each token, `[tokens, top_k]` u32, little-endian.
pub const CHOSEN: &str = "chosen";

/// What a PE tells the supervisor.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// What it did when, where a trace was asked for: from time to time, so that nobody has to keep it.
    Spans(Vec<TraceSpan>),
    /// Its steps are done.
    Done(Box<Done>),
}

/// What a PE tells the supervisor at its end.
#[derive(Serialize, Deserialize)]
pub struct Done {
    /// Its measurements.
    pub report: PeReport,
    /// The losses over all PEs' tokens, by name, weighted.
    pub losses: BTreeMap<String, f64>,
}

/// Writes this PE's part of the files that the host has, and sends it the message.
pub(super) fn report_and_write(job: &PreparedRun, host: &dyn Host, report: PeReport, results: &Results) -> Result<()> {
    let me = host.my_pe();
    let done = Done { report, losses: losses(job, &results.routed.load) };
    let tokens = job.tokens_of(me);
    host.status().set_phase(WRITING);
    if host.has_file(RESULTS) {
        let layout = job.results()?;
        let file = job.request.output.as_ref().map_or("the result file".to_string(), |path| path.display().to_string());
        let write = |name: &str, first_row: usize, rows: &[f32]| -> Result<()> {
            let at = layout.rows_at(name, first_row, rows.len())?;
            Ok(host.write(RESULTS, at, bytemuck::cast_slice(rows), &format!("tensor {name} to {file}"))?)
        };
        write("output", tokens.start, &results.output)?;
        if job.backward {
            write("grad_hidden_states", tokens.start, &results.grad_input)?;
            let (placement, index) = job.place(me);
            let first_group = job.groups.place(me).0 == 0;
            let mut parts = Parts::default();
            let mut expert = None;
            for id in job.config.weights() {
                // Replicated weights' gradients are the same on every PE, experts' in every group; the first one writes them.
                let mine = if job.config.replicated_weights().contains(&id) { me == 0 } else { first_group };
                let Some(grad) = results.grads.get(id, placement, index).filter(|_| mine) else { continue };
                let place = job.weight_place(id);
                if place.is_whole() {
                    write(&gradient_name(&place.tensor), 0, grad)?;
                    continue;
                }
                let of = id.expert();
                if std::mem::replace(&mut expert, of) != of {
                    parts.write(host, &layout, &file)?;
                }
                parts.add(&place, grad);
            }
            parts.write(host, &layout, &file)?;
        }
    }
    if host.has_file(CHOSEN) {
        let offset = tokens.start * job.config.router.top_k * 4;
        host.write(CHOSEN, offset as u64, bytemuck::cast_slice(&results.routed.chosen), "the routing")?;
    }
    Ok(host.send(&serde_json::to_vec(&Message::Done(Box::new(done)))?)?)
}

/// Gradients of an expert's weights that share tensors with each other, gathered so that each part of a file is written at once.
#[derive(Default)]
struct Parts(Vec<(String, Range<usize>, Vec<f32>)>);

impl Parts {
    fn add(&mut self, place: &WeightPlace, grad: &[f32]) {
        let same = |(tensor, part, _): &&mut (String, Range<usize>, _)| *tensor == place.tensor && *part == place.part;
        if let Some((_, _, values)) = self.0.iter_mut().find(same) {
            return place.scatter(grad, values, place.part.start);
        }
        let mut values = vec![0.0; place.part.len()];
        place.scatter(grad, &mut values, place.part.start);
        self.0.push((place.tensor.clone(), place.part.clone(), values));
    }

    /// Writes what there is, to `file` by its name.
    fn write(&mut self, host: &dyn Host, layout: &ResultLayout, file: &str) -> Result<()> {
        for (tensor, part, values) in self.0.drain(..) {
            let name = gradient_name(&tensor);
            let at = layout.elements_at(&name, part)?;
            host.write(RESULTS, at, bytemuck::cast_slice(&values), &format!("tensor {name} to {file}"))?;
        }
        Ok(())
    }
}

/// The losses of all PEs' tokens, weighted.
fn losses(job: &PreparedRun, load: &Load) -> BTreeMap<String, f64> {
    let (aux, z) = (job.config.aux_loss_coef, job.config.z_loss_coef);
    let all = [("load_balancing", aux, load.aux_loss()), ("z", z, load.z_loss())];
    let weighted = all.into_iter().filter(|(_, coef, _)| *coef != 0.0);
    weighted.map(|(name, coef, loss)| (name.to_string(), f64::from(coef) * loss)).collect()
}
