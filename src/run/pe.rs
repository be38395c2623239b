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
use crate::moe::kernels::Element;
use crate::moe::metrics::{self, Observer, Phase};
use crate::moe::router::Load;
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
    context.status().set_phase(LOADING);
    if job.request.device != Device::Cpu {
        #[cfg(any(feature = "cuda", feature = "emulate"))]
        return super::device::run(job, context);
        #[cfg(not(any(feature = "cuda", feature = "emulate")))]
        bail!("this build runs layers on the CPU only");
    }
    match job.request.dtype {
        Dtype::F32 => run_as::<f32>(job, context),
        Dtype::Bf16 => run_as::<bf16>(job, context),
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

/// The symmetric heap that the job's layer needs, bytes.
pub fn heap_bytes(job: &Job) -> Result<usize> {
    let of_group = group_heap_bytes(job)?;
    if job.groups.len() == 1 {
        return Ok(of_group);
    }
    let exchange = Replicas::<ShmTransport>::bytes(&job.config, &job.groups);
    Ok(Shmem::<ShmTransport>::heap_bytes_for(job.request.pes, of_group.next_multiple_of(64) + exchange))
}

fn run_as<E: Element>(job: &Job, context: &mut PeContext) -> Result<()> {
    let segments = context.exchange_segments(heap_bytes(job)?)?;
    let context: &PeContext = context;
    let me = context.my_pe();
    let world = Shmem::new(ShmTransport::new(me, segments)?);
    if job.groups.len() == 1 {
        return run_layer::<_, ShmTransport, E>(job, context, &world, None);
    }
    let team = world.team_split(world.world(), job.groups.members(job.groups.place(me).0))?;
    let team = team.context("a PE is in its group")?;
    let group = Shmem::new(GroupTransport::new(&world, team, group_heap_bytes(job)?)?);
    run_layer::<_, _, E>(job, context, &group, Some(&world))
}

/// Runs the layer of this PE's group; where there are several, `world` has all of them.
fn run_layer<T: Transport, W: Transport, E: Element>(
    job: &Job,
    context: &PeContext,
    shmem: &Shmem<T>,
    world: Option<&Shmem<W>>,
) -> Result<()> {
    let me = context.my_pe();
    let (placement, index) = job.place(me);
    let observer = StatusObserver(context.status());
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
        context.status().set_progress(step as u64, job.request.steps as u64);
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
    report_and_write(job, context, &message, &results)
    // The heap of a PE that is gone stays mapped by the others, so nothing is left to wait for.
}

/// What a PE computed in its last step.
pub(super) struct Results<'r> {
    pub(super) output: &'r [f32],
    pub(super) grad_input: &'r [f32],
    pub(super) grads: &'r Gradients,
    pub(super) chosen: &'r [u32],
}

/// Writes this PE's part of the files that the supervisor handed over, and sends it the message.
pub(super) fn report_and_write(job: &Job, context: &PeContext, message: &Message, results: &Results<'_>) -> Result<()> {
    let me = context.my_pe();
    let tokens = job.tokens_of(me);
    context.status().set_phase(WRITING);
    if let Some(file) = context.file(RESULTS) {
        let file = File::from(file.try_clone_to_owned().context("cannot take the result file")?);
        let layout = job.results()?;
        layout.write_rows(&file, "output", tokens.start, results.output)?;
        if job.backward {
            layout.write_rows(&file, "grad_hidden_states", tokens.start, results.grad_input)?;
            let (placement, index) = job.place(me);
            let first_group = job.groups.place(me).0 == 0;
            for id in job.config.weights() {
                // Replicated weights' gradients are the same on every PE, experts' in every group; the first one writes them.
                let mine = if job.config.replicated_weights().contains(&id) { me == 0 } else { first_group };
                if let Some(grad) = results.grads.get(id, placement, index).filter(|_| mine) {
                    layout.write_rows(&file, &job.gradient_name(id), 0, grad)?;
                }
            }
        }
    }
    if let Some(file) = context.file(CHOSEN) {
        let file = File::from(file.try_clone_to_owned().context("cannot take the routing file")?);
        let offset = tokens.start * job.config.router.top_k * 4;
        file.write_all_at(bytemuck::cast_slice(results.chosen), offset as u64).context("cannot write the routing")?;
    }
    context.send(&serde_json::to_vec(message)?)?;
    Ok(())
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
