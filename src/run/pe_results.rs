//! Sends a PE's report, and writes its results.

use std::ops::Range;

use anyhow::Result;

pub use super::messages::{CHOSEN, Done, Message, RESULTS, ROUTING, WEIGHTS};
use super::non_finite::losses;
use super::steps::Results;
use super::{PreparedRun, gradient_name};
use crate::checkpoint::ResultLayout;
use crate::job::host::Host;
use crate::moe::metrics::Phase;
use crate::moe::{Groups, WeightId, WeightSource};
use crate::report::PeReport;

/// The names of a PE's phases, by status code: phases outside the layer, then the layer's phases.
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
/// The initial phase of a status page.
const START_UP: u32 = 0;
pub(super) const LOADING: u32 = 1;
const WRITING: u32 = 2;
/// One status code for each pass on a device, because the host cannot observe the phases inside a pass.
pub(super) const DEVICE_FORWARD: u32 = 3;
pub(super) const DEVICE_BACKWARD: u32 = 4;
pub(super) const FIRST_PHASE: u32 = 5;

/// Writes this PE's part of the job's files, then sends its report.
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
            let (group, index) = results.groups.position(job.rank(me));
            let placement = results.groups.placement(group);
            let held = job.config.weights().into_iter();
            let grads = held.filter_map(|id| Some((id, results.grads.get(id, placement, index)?)));
            let target = Target { host, groups: &results.groups, file: RESULTS, layout: &layout, path: &file };
            target.write_weights(job, grads, gradient_name)?;
        }
    }
    if host.has_file(WEIGHTS) {
        let layout = job.saved_weights()?;
        let file = job.request.save_weights.as_ref().map_or(String::new(), |path| path.display().to_string());
        let held = results.weights.iter().map(|(id, values)| (*id, &values[..]));
        let target = Target { host, groups: &results.groups, file: WEIGHTS, layout: &layout, path: &file };
        target.write_weights(job, held, |tensor| tensor.to_string())?;
    }
    if host.has_file(CHOSEN) {
        let offset = tokens.start * job.config.router.top_k * 4;
        host.write(CHOSEN, offset as u64, bytemuck::cast_slice(&results.routed.chosen), "the routing")?;
    }
    Ok(host.send(&serde_json::to_vec(&Message::Done(Box::new(done)))?)?)
}

/// A file with a tensor for each weight, or for its gradient.
struct Target<'t> {
    host: &'t dyn Host,
    /// The experts of every PE.
    groups: &'t Groups,
    /// The name of the job's file.
    file: &'static str,
    layout: &'t ResultLayout,
    /// The path of the file, for error messages.
    path: &'t str,
}

impl Target<'_> {
    /// Writes this PE's share of `values`, which are weights or gradients in the order of
    /// [`LayerConfig::weights`](crate::moe::LayerConfig::weights). `name` converts a tensor's name in the checkpoint to its name in the
    /// file.
    fn write_weights<'v>(
        &self,
        job: &PreparedRun,
        values: impl Iterator<Item = (WeightId, &'v [f32])>,
        name: fn(&str) -> String,
    ) -> Result<()> {
        let me = job.rank(self.host.my_pe());
        let replicated = job.config.replicated_weights();
        // Weights of one expert that are interleaved in a tensor are collected, so that each part of the file is written once.
        let mut parts: Vec<(String, Range<usize>, Vec<f32>)> = Vec::new();
        let mut expert = None;
        for (id, values) in values {
            // All holders of a weight have the same values, so only the first holder writes the weight.
            let first = if replicated.contains(&id) { Some(0) } else { id.expert().map(|e| self.groups.owner(0, e)) };
            if first != Some(me) {
                continue;
            }
            let place = job.weight_slice(id);
            if place.is_whole() {
                self.write(&name(&place.tensor), 0..values.len(), values)?;
                continue;
            }
            let of = id.expert();
            if std::mem::replace(&mut expert, of) != of {
                self.write_parts(&mut parts)?;
            }
            let tensor = name(&place.tensor);
            let same = |(other, part, _): &&mut (String, Range<usize>, _)| *other == tensor && *part == place.part;
            match parts.iter_mut().find(same) {
                Some((_, _, all)) => place.scatter(values, all, place.part.start),
                None => {
                    let mut all = vec![0.0; place.part.len()];
                    place.scatter(values, &mut all, place.part.start);
                    parts.push((tensor, place.part.clone(), all));
                }
            }
        }
        self.write_parts(&mut parts)
    }

    fn write_parts(&self, parts: &mut Vec<(String, Range<usize>, Vec<f32>)>) -> Result<()> {
        parts.drain(..).try_for_each(|(tensor, part, values)| self.write(&tensor, part, &values))
    }

    fn write(&self, tensor: &str, elements: Range<usize>, values: &[f32]) -> Result<()> {
        let at = self.layout.elements_at(tensor, elements)?;
        let what = format!("tensor {tensor} to {}", self.path);
        Ok(self.host.write(self.file, at, bytemuck::cast_slice(values), &what)?)
    }
}
