//! One PE's part of the main job.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use half::bf16;
use serde::{Deserialize, Serialize};

use super::{Device, Job};
use crate::checkpoint::InputTensor;
use crate::launch::{PeContext, StatusPage};
use crate::moe::Dtype;
use crate::moe::Load;
use crate::moe::kernels::Element;
use crate::moe::metrics::{self, Observer, Phase};
use crate::moe::{Gradients, Layer, Layout, Replicas};
use crate::report::{ExpertRows, PassReport, PeReport, Span, StepReport, SymmetricMemory, Traffic};
use crate::shmem::{GroupTransport, ShmTransport, Shmem, Transport};

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
const LOADING: u32 = 1;
const WRITING: u32 = 2;
/// What the kernels of a pass do, nobody can follow.
pub(super) const DEVICE_FORWARD: u32 = 3;
pub(super) const DEVICE_BACKWARD: u32 = 4;
const FIRST_PHASE: u32 = 5;

/// The files that the supervisor hands to the PEs.
pub const RESULTS: &str = "results";
/// The experts chosen for each token, `[tokens, top_k]` u32, little-endian.
pub const CHOSEN: &str = "chosen";

/// What a PE tells the supervisor at its end.
#[derive(Serialize, Deserialize)]
pub struct Message {
    /// Its measurements.
    pub report: PeReport,
    /// The losses over all PEs' tokens, by name, weighted.
    pub losses: BTreeMap<String, f64>,
}

/// Whom a PE reports to.
pub(super) trait Host {
    /// This PE's number.
    fn my_pe(&self) -> usize;
    /// Where it says what it is doing.
    fn status(&self) -> &StatusPage;
    /// Whether there is a file of this name, [`RESULTS`] or [`CHOSEN`].
    fn has_file(&self, name: &str) -> bool;
    /// Writes into that file; `what` it is, error lines say.
    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<()>;
    /// Sends what a PE has to say at its end: a [`Message`] as JSON.
    fn send(&self, body: &[u8]) -> Result<()>;
}

/// A supervisor on the same host has passed the files.
impl Host for PeContext {
    fn my_pe(&self) -> usize {
        self.my_pe()
    }

    fn status(&self) -> &StatusPage {
        self.status()
    }

    fn has_file(&self, name: &str) -> bool {
        self.file(name).is_some()
    }

    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<()> {
        let file = self.file(name).with_context(|| format!("there is no file for {what}"))?;
        let file = File::from(file.try_clone_to_owned().with_context(|| format!("cannot take the file for {what}"))?);
        file.write_all_at(bytes, at).with_context(|| format!("cannot write {what}"))
    }

    fn send(&self, body: &[u8]) -> Result<()> {
        Ok(self.send(body)?)
    }
}

struct StatusObserver<'c>(&'c StatusPage);

impl Observer for StatusObserver<'_> {
    fn phase(&self, phase: Phase) {
        self.0.set_phase(FIRST_PHASE + phase.code() as u32);
    }
}

/// Runs this PE's part and does not return before all is reported.
///
/// # Errors
/// One line.
pub fn run(job: &Job, context: &mut PeContext) -> Result<()> {
    loading(context);
    if job.request.device != Device::Cpu {
        #[cfg(any(feature = "cuda", feature = "emulate"))]
        return super::device::run(job, context);
        #[cfg(not(any(feature = "cuda", feature = "emulate")))]
        bail!("this build runs layers on the CPU only");
    }
    let segments = context.exchange_segments(heap_bytes(job)?)?;
    let transport = ShmTransport::new(context.my_pe(), segments)?;
    run_over(job, &*context, &Shmem::new(transport))
}

/// This PE's part on the CPU, over a heap of [`heap_bytes`].
pub(super) fn run_over<T: Transport>(job: &Job, host: &impl Host, shmem: &Shmem<T>) -> Result<()> {
    match job.request.dtype {
        Dtype::F32 => run_as::<T, f32>(job, host, shmem),
        Dtype::Bf16 => run_as::<T, bf16>(job, host, shmem),
        Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
    }
}

/// The symmetric heap of a group's layer, bytes: the same for all groups.
fn group_heap_bytes(job: &Job) -> Result<usize> {
    let (config, options, groups) = (&job.config, &job.request.options, &job.groups);
    let mut most = 0;
    for g in 0..groups.len() {
        let layout = Layout::new(config, groups.placement(g), job.request.dtype.bytes(), job.max_tokens(), options)?;
        most = most.max(Shmem::<ShmTransport>::heap_bytes_for(groups.members(g).len(), layout.total_bytes()));
    }
    Ok(most)
}

/// Says that the PE is reading weights and tokens.
pub(super) fn loading(host: &impl Host) {
    host.status().set_phase(LOADING);
}

/// The symmetric heap that the job's layer needs, bytes.
pub fn heap_bytes(job: &Job) -> Result<usize> {
    let of_group = group_heap_bytes(job)?;
    if job.groups.len() == 1 {
        return Ok(of_group);
    }
    let exchange = Replicas::<ShmTransport>::bytes(&job.config, &job.groups);
    Ok(Shmem::<ShmTransport>::heap_bytes_for(job.request.pes, of_group.next_multiple_of(64) + exchange))
}

/// Over as many groups as the job has: `world` has all PEs.
fn run_as<T: Transport, E: Element>(job: &Job, host: &impl Host, world: &Shmem<T>) -> Result<()> {
    if job.groups.len() == 1 {
        return run_layer::<_, T, E>(job, host, world, None);
    }
    let team = world.team_split(world.world(), job.groups.members(job.groups.place(host.my_pe()).0))?;
    let team = team.context("a PE is in its group")?;
    let group = Shmem::new(GroupTransport::new(world, team, group_heap_bytes(job)?)?);
    run_layer::<_, _, E>(job, host, &group, Some(world))
}

/// Runs the layer of this PE's group; where there are several, `world` has all of them.
fn run_layer<T: Transport, W: Transport, E: Element>(
    job: &Job,
    host: &impl Host,
    shmem: &Shmem<T>,
    world: Option<&Shmem<W>>,
) -> Result<()> {
    let me = host.my_pe();
    let (placement, index) = job.place(me);
    let observer = StatusObserver(host.status());
    let options = job.request.options.clone();
    let mut layer = Layer::<_, E>::new(shmem, job, placement.clone(), job.max_tokens(), options, &observer)?;
    if let Some(world) = world {
        layer.join(Replicas::new(world, &job.config, job.groups.clone())?);
    }
    let bytes_put = || shmem.bytes_put() + world.map_or(0, Shmem::bytes_put);
    tracing::debug!(pe = me, experts = layer.experts().len(), "the layer is ready");
    if job.request.trace.is_some() {
        layer.recorder.record_spans();
    }
    let to_elements = |values: Vec<f32>| {
        let mut elements = vec![E::default(); values.len()];
        E::convert(&values, &mut elements);
        elements
    };
    let tokens = job.tokens_of(me);
    let x = to_elements(job.rows(InputTensor::HiddenStates, tokens.clone())?);
    let mut output = vec![0.0; x.len()];
    let (mut grad_output, mut grad_input, mut grads) = (Vec::new(), Vec::new(), Gradients::default());
    if job.backward {
        grad_output = to_elements(job.rows(InputTensor::GradOutput, tokens.clone())?);
        grad_input = vec![0.0; x.len()];
        grads = Gradients::zeros(&job.config, placement, index);
    }

    let mut message = Message {
        report: PeReport { pe: me, tokens: tokens.len() as u64, device: "cpu".into(), ..PeReport::default() },
        losses: BTreeMap::new(),
    };
    let report = &mut message.report;
    layer.recorder.take();
    let before = bytes_put();
    let mut sent = metrics::Traffic::default();
    let mut chosen = Vec::new();
    for step in 0..job.request.steps {
        host.status().set_progress(step as u64, job.request.steps as u64);
        let mut done = StepReport::default();
        let saved = layer.forward(&x, &mut output)?;
        done.forward = pass_report(&mut layer, saved.rounds, &mut sent);
        if step + 1 == job.request.steps {
            chosen.clone_from(&saved.routing.chosen);
            report.expert_rows = expert_rows(job, me, saved.batches.iter().map(|batch| batch.rows as u64));
            let mut load = Load::default();
            saved.loads.iter().for_each(|l| load.add(l));
            message.losses = losses(job, &load);
        }
        let rounds = saved.rounds;
        if job.backward {
            layer.backward(saved, &grad_output, &mut grad_input, &mut grads)?;
            done.backward = Some(pass_report(&mut layer, rounds, &mut sent));
        } else {
            layer.recycle(saved);
        }
        report.steps.push(done);
        let spans = layer.recorder.take_spans().into_iter().map(|s| Span {
            name: s.phase.name().to_string(),
            start_ns: s.start_ns,
            dur_ns: s.dur_ns,
            step: step as u64,
            track: 0,
        });
        report.spans.extend(spans);
    }
    // What was put beyond the layer's own protocol is the all-reduce.
    let all_reduce = (bytes_put() - before).saturating_sub(sent.total_bytes());
    report.traffic = traffic(&sent, all_reduce);
    // A group's heap is a part of the world's.
    let (used, peak, budget) = match world {
        Some(world) => (world.used_bytes(), world.peak_bytes(), world.heap_bytes()),
        None => (shmem.used_bytes(), shmem.peak_bytes(), shmem.heap_bytes()),
    };
    report.symmetric =
        SymmetricMemory { used_bytes: used as u64, peak_bytes: peak as u64, budget_bytes: budget as u64 };

    let results = Results { output: &output, grad_input: &grad_input, grads: &grads, chosen: &chosen };
    report_and_write(job, host, &message, &results)
    // Over shared memory the heap of a PE that is gone stays mapped by the others, so nothing is left to wait for; over MPI
    // the end of the window does.
}

/// What a PE computed in its last step.
pub(super) struct Results<'r> {
    pub(super) output: &'r [f32],
    pub(super) grad_input: &'r [f32],
    pub(super) grads: &'r Gradients,
    pub(super) chosen: &'r [u32],
}

/// Writes this PE's part of the files that the host has, and sends it the message.
pub(super) fn report_and_write(job: &Job, host: &impl Host, message: &Message, results: &Results<'_>) -> Result<()> {
    let me = host.my_pe();
    let tokens = job.tokens_of(me);
    host.status().set_phase(WRITING);
    if host.has_file(RESULTS) {
        let layout = job.results()?;
        let file = job.request.output.as_ref().map_or("the result file".to_string(), |path| path.display().to_string());
        let write = |name: &str, first_row: usize, rows: &[f32]| -> Result<()> {
            let at = layout.rows_at(name, first_row, rows.len())?;
            host.write(RESULTS, at, bytemuck::cast_slice(rows), &format!("tensor {name} to {file}"))
        };
        write("output", tokens.start, results.output)?;
        if job.backward {
            write("grad_hidden_states", tokens.start, results.grad_input)?;
            let (placement, index) = job.place(me);
            let first_group = job.groups.place(me).0 == 0;
            for id in job.config.weights() {
                // Replicated weights' gradients are the same on every PE, experts' in every group; the first one writes them.
                let mine = if job.config.replicated_weights().contains(&id) { me == 0 } else { first_group };
                if let Some(grad) = results.grads.get(id, placement, index).filter(|_| mine) {
                    write(&job.gradient_name(id), 0, grad)?;
                }
            }
        }
    }
    if host.has_file(CHOSEN) {
        let offset = tokens.start * job.config.router.top_k * 4;
        host.write(CHOSEN, offset as u64, bytemuck::cast_slice(results.chosen), "the routing")?;
    }
    host.send(&serde_json::to_vec(message)?)
}

/// Times of the pass that just ended; adds what it sent to `sent`.
fn pass_report<T: Transport, E: Element>(
    layer: &mut Layer<'_, '_, T, E>,
    rounds: usize,
    sent: &mut metrics::Traffic,
) -> PassReport {
    let (times_ns, traffic) = layer.recorder.take();
    sent.add(&traffic);
    pass_times(&times_ns.map(|ns| ns as f64 * 1e-9), rounds as u64)
}

/// A report of these times, seconds, by [`Phase::code`].
pub(super) fn pass_times(times_s: &[f64; Phase::ALL.len()], rounds: u64) -> PassReport {
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
            // Time between passes is nobody's.
            Phase::Idle => continue,
        };
        let time = times_s[phase.code()];
        seconds += time;
        *phases_s.entry(key.to_string()).or_default() += time;
    }
    PassReport { seconds, phases_s, rounds }
}

/// Rows of this PE's experts, in their order.
pub(super) fn expert_rows(job: &Job, me: usize, rows: impl Iterator<Item = u64>) -> Vec<ExpertRows> {
    job.groups.experts(me).iter().zip(rows).map(|(&expert, rows)| ExpertRows { expert, rows }).collect()
}

/// The losses of all PEs' tokens, weighted.
pub(super) fn losses(job: &Job, load: &Load) -> BTreeMap<String, f64> {
    let (aux, z) = (job.config.aux_loss_coef, job.config.z_loss_coef);
    let all = [("load_balancing", aux, load.aux_loss()), ("z", z, load.z_loss())];
    let weighted = all.into_iter().filter(|(_, coef, _)| *coef != 0.0);
    weighted.map(|(name, coef, loss)| (name.to_string(), f64::from(coef) * loss)).collect()
}

/// The traffic of the measured steps.
pub(super) fn traffic(sent: &metrics::Traffic, all_reduce_bytes: u64) -> Traffic {
    let kinds = [
        ("counts", sent.header_bytes),
        ("dispatch_rows", sent.dispatch_row_bytes),
        ("dispatch_slots", sent.dispatch_slot_bytes),
        ("combine_rows", sent.combine_row_bytes),
        ("combine_slots", sent.combine_slot_bytes),
        ("all_reduce", all_reduce_bytes),
    ];
    Traffic {
        remote_bytes: kinds.into_iter().map(|(kind, bytes)| (kind.to_string(), bytes)).collect(),
        puts: sent.puts,
        signals: sent.signals,
        fences: sent.fences,
    }
}
