//! One PE's part of a run: the layer on the CPU, and the steps over the layer of any engine.

use std::borrow::{Borrow, BorrowMut};
use std::ops::Range;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use half::bf16;

use super::hooks::{Gather, Pass, Progress, StepContext, hooks, read_weights};
use super::inject::Rate;
use super::pe_results::{FIRST_PHASE, LOADING, report_and_write};
use super::{PreparedRun, Source};
use crate::checkpoint::InputTensor;
use crate::cluster::{Cluster, LinkTable};
use crate::job::host::{Host, MemoryHost, PePart, allowed_cpus};
use crate::job::launch::StatusPage;
use crate::job::request::{DeviceKind, OnFailure, RowsPer};
use crate::moe::cpu::{Exchange, OneGroup, replica_bytes};
use crate::moe::kernels::Element;
use crate::moe::metrics::{Observer, Phase};
use crate::moe::{Dtype, Gradients, Groups, Layer, MoeError, MoeLayer, Replicas, Routed, WeightId};
use crate::report::{ExpertRows, PeReport, SymmetricMemory};
use crate::shmem::{GroupTransport, Pace, ShmTransport, Shmem, Transport};

struct StatusObserver {
    status: StatusPage,
    rate: Option<Rate>,
}

impl Observer for StatusObserver {
    fn phase(&self, phase: Phase) {
        self.status.set_phase(FIRST_PHASE + phase.code() as u32);
        self.rate.iter().for_each(Rate::begin);
    }

    fn computed(&self, flop: f64) {
        self.rate.iter().for_each(|rate| rate.end(flop));
    }
}

/// Runs this PE's part, and returns once it has reported. With `--on-failure continue` it continues after the loss of other groups.
///
/// # Errors
/// A layer that cannot be built, a peer that does not respond, or a file or message that cannot be written.
pub fn run(job: &mut PreparedRun, host: &mut impl MemoryHost) -> Result<()> {
    host.status().set_phase(LOADING);
    if job.request.rows_per == RowsPer::Host {
        job.hosts = host.hosts();
    }
    if job.request.device != DeviceKind::Cpu {
        #[cfg(any(feature = "cuda", feature = "emulate"))]
        return super::device::run(job, host);
        #[cfg(not(any(feature = "cuda", feature = "emulate")))]
        bail!("this build runs layers on the CPU only");
    }
    let mut progress = Progress::default();
    loop {
        let ended = host.work(OnCpu { job, progress: &mut progress });
        if ended.is_ok() || job.request.on_failure == OnFailure::Stop || host.lost().is_none() {
            return ended;
        }
        host.status().set_phase(LOADING);
        let how = host.go_on(progress.settled() as u64, progress.complete() as u64)?;
        job.exclude_pes(&how.lost)?;
        progress.resume_from(how.from as usize);
    }
}

/// The remaining steps on the CPU.
struct OnCpu<'j> {
    job: &'j PreparedRun,
    progress: &'j mut Progress,
}

impl PePart for OnCpu<'_> {
    type Error = anyhow::Error;

    fn heap_bytes<T: Transport>(&self) -> Result<usize> {
        heap_bytes(self.job)
    }

    fn pace(&self, my_pe: usize) -> Option<Pace> {
        self.job.pace(my_pe)
    }

    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
        match self.job.request.dtype {
            Dtype::F32 => run_as::<T, f32>(self, host, shmem),
            Dtype::Bf16 => run_as::<T, bf16>(self, host, shmem),
            Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
        }
    }
}

/// The symmetric heap of a group's layer, bytes: the same for all groups.
fn group_heap_bytes(job: &PreparedRun) -> Result<usize> {
    let mut most = 0;
    for group in 0..job.groups.len() {
        most = most.max(job.layer_spec(group).heap_bytes()?);
    }
    Ok(most)
}

/// The symmetric heap of the job's layer, bytes.
pub fn heap_bytes(job: &PreparedRun) -> Result<usize> {
    let of_group = group_heap_bytes(job)?;
    if !needs_exchange(job) {
        return Ok(of_group);
    }
    let exchange = replica_bytes(&job.config, &job.groups, job.slots());
    Ok(Shmem::<ShmTransport>::heap_bytes_for(job.world.len(), of_group.next_multiple_of(64) + exchange))
}

/// Whether PEs hold the same experts.
fn needs_exchange(job: &PreparedRun) -> bool {
    job.groups.len() > 1 || job.groups.has_replicas() || job.request.replan.is_some()
}

/// Runs the layer in its groups. `world` contains all PEs.
fn run_as<T: Transport, E: Element>(part: OnCpu<'_>, host: &dyn Host, world: &Shmem<T>) -> Result<()> {
    let job = part.job;
    if !needs_exchange(job) {
        return run_layer::<_, _, E, OneGroup>(part, host, world, None, world);
    }
    let team = world.team_split(world.world(), job.groups.members(job.groups.place(world.my_pe()).0))?;
    let team = team.context("a PE is in its group")?;
    let group = Shmem::new(GroupTransport::new(world, team, group_heap_bytes(job)?)?);
    let exchange = Replicas::with_slots(world, &job.config, job.groups.clone(), job.slots())?;
    run_layer::<_, _, E, _>(part, host, &group, Some(exchange), world)
}

/// Runs the layer of this PE's group. `exchange` connects the groups, if there are several; `world` contains all PEs.
fn run_layer<T: Transport, W: Transport, E: Element, X: Exchange>(
    part: OnCpu<'_>,
    host: &dyn Host,
    shmem: &Shmem<T>,
    exchange: Option<X>,
    world: &Shmem<W>,
) -> Result<()> {
    let OnCpu { job, progress } = part;
    let me = host.my_pe();
    let group = job.groups.place(job.rank(me)).0;
    let observer = StatusObserver { status: host.status().clone(), rate: job.rate(me) };
    let builder = Layer::<_, E>::builder(job.layer_spec(group)).observer(observer);
    let mut report = PeReport {
        pe: me,
        device: "cpu".into(),
        cpus: allowed_cpus(),
        transport: host.transport().into(),
        ..PeReport::default()
    };
    let gather = |mine: &[u64]| -> Result<Vec<u64>> {
        let mut all = vec![0; mine.len() * world.n_pes()];
        let deadline = job.request.options.deadline();
        let gathered = world.all_gather(world.world(), mine, &mut all, deadline);
        gathered.map_err(|timeout| MoeError::wait(world, timeout.index, "its loads", Phase::Idle, timeout))?;
        Ok(all)
    };
    // A step that some PE has not completed may be repeated, so no PE continues before all have completed it.
    let settle = || match job.request.on_failure {
        OnFailure::Stop => Ok(()),
        OnFailure::Continue => world.sync_all(Instant::now() + job.wait_limit()).map_err(|timeout| {
            MoeError::wait(world, timeout.index, "the end of its step", Phase::AllReduce, timeout).into()
        }),
    };
    let steps = Steps { job, host, passes: None, settle: &settle, gather: &gather, progress };
    let done = match exchange {
        Some(exchange) => steps.run(&mut builder.exchange(exchange).build(shmem, job)?, &mut report)?,
        None => steps.run(&mut builder.build(shmem, job)?, &mut report)?,
    };
    if job.request.on_failure == OnFailure::Continue {
        host.say_final()?;
    }
    report.symmetric = SymmetricMemory {
        used_bytes: world.used_bytes() as u64,
        peak_bytes: world.peak_bytes() as u64,
        budget_bytes: world.heap_bytes() as u64,
    };
    report_and_write(job, host, report, &done)
    // No barrier at the end: over shared memory the other PEs keep this PE's heap mapped, and MPI waits when the window is freed.
}

/// The results of a PE's last step.
pub(super) struct Results {
    /// `[tokens, hidden]`.
    pub(super) output: Vec<f32>,
    /// `[tokens, hidden]`; empty without a backward pass, as `grads`.
    pub(super) grad_input: Vec<f32>,
    pub(super) grads: Gradients,
    pub(super) routed: Routed,
    /// The experts of every PE at the end.
    pub(super) groups: Groups,
    /// The weights that this PE holds at the end, if they are to be saved.
    pub(super) weights: Vec<(WeightId, Vec<f32>)>,
}

/// The remaining steps of a job on this PE's tokens.
pub(super) struct Steps<'s> {
    pub(super) job: &'s PreparedRun,
    pub(super) host: &'s dyn Host,
    /// Status codes of the forward and the backward pass, for a layer that does not report its phases.
    pub(super) passes: Option<[u32; 2]>,
    /// Returns when all PEs have the results of a step, if the job may continue without some of them.
    pub(super) settle: &'s dyn Fn() -> Result<()>,
    pub(super) gather: &'s Gather<'s>,
    pub(super) progress: &'s mut Progress,
}

impl Steps<'_> {
    /// Runs the steps, and enters their measurements in `report`, whose `pe` names this PE.
    pub(super) fn run<L: MoeLayer>(self, layer: &mut L, report: &mut PeReport) -> Result<Results> {
        let Steps { job, host, passes, settle, gather, progress } = self;
        let (pe, first) = (report.pe, progress.settled());
        let tokens = job.tokens_of(pe);
        report.tokens = tokens.len() as u64;
        tracing::debug!(pe, experts = job.experts(pe).len(), "the layer is ready");
        let zeros = vec![0.0; tokens.len() * job.config.hidden];
        let input = layer.rows(&job.rows_in(InputTensor::HiddenStates, tokens.clone(), first)?, "hidden_states")?;
        let mut output = layer.values(&zeros)?;
        let mut backward = None;
        if job.backward {
            let grad_output = layer.rows(&job.rows(InputTensor::GradOutput, tokens)?, "grad_output")?;
            backward = Some((grad_output, layer.values(&zeros)?));
        }
        let (routed, groups) = (Routed::default(), job.groups.clone());
        let mut run = StepContext { job, host, pe, layer, step: first, input, routed, groups, progress };
        let mut hooks = hooks(&mut run, settle, gather)?;
        let needs_routing = hooks.iter().any(|hook| hook.needs_routing());
        let show = |pass: Pass| passes.iter().for_each(|codes| host.status().set_phase(codes[pass as usize]));

        let begin = Instant::now();
        for step in first..job.request.steps {
            run.step = step;
            host.status().set_progress(step as u64, job.request.steps as u64);
            hooks.iter_mut().try_for_each(|hook| hook.before(&mut run))?;
            show(Pass::Forward);
            let mut saved = run.layer.forward(run.input.borrow(), output.borrow_mut())?;
            let outcome = run.layer.finish(&saved)?;
            if needs_routing || step + 1 == job.request.steps {
                run.routed = run.layer.routed(&saved)?;
            }
            hooks.iter_mut().try_for_each(|hook| hook.after_pass(&mut run, Pass::Forward, &outcome))?;
            if let Some((grad_output, grad_input)) = &mut backward {
                show(Pass::Backward);
                let (x, grad_output) = (run.input.borrow(), (*grad_output).borrow());
                run.layer.backward(&mut saved, x, grad_output, grad_input.borrow_mut())?;
                let outcome = run.layer.finish(&saved)?;
                hooks.iter_mut().try_for_each(|hook| hook.after_pass(&mut run, Pass::Backward, &outcome))?;
            }
            run.layer.recycle(saved);
            hooks.iter_mut().try_for_each(|hook| hook.after(&mut run))?;
        }
        hooks.iter_mut().try_for_each(|hook| hook.finish(&mut run, report))?;
        report.all_steps_s = begin.elapsed().as_secs_f64();
        drop(hooks);

        let StepContext { layer, routed, groups, .. } = run;
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

    /// Rows of an input tensor in the last step, f32.
    pub(super) fn rows(&self, tensor: InputTensor, rows: Range<usize>) -> Result<Vec<f32>> {
        self.rows_in(tensor, rows, self.request.steps.saturating_sub(1))
    }

    /// Rows of an input tensor in step `step`, f32.
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

impl PreparedRun {
    /// The minimum time of this PE's messages to each remaining PE.
    pub(super) fn pace(&self, pe: usize) -> Option<Pace> {
        let of = |cluster: &Cluster, to: usize| {
            let link = cluster.links.link(pe, to);
            // ms/MB are ns a byte.
            (link.alpha_ms * 1e-3, link.beta_ms_per_mb * 1e-9)
        };
        let links =
            |cluster| self.world.iter().map(|&to| if to == pe { (0.0, 0.0) } else { of(cluster, to) }).collect();
        self.injected.as_ref().map(|cluster| Pace::new(links(cluster), self.wait_limit()))
    }

    /// The maximum rate at which this PE computes.
    pub(super) fn rate(&self, pe: usize) -> Option<Rate> {
        self.injected.as_ref().map(|cluster| Rate::new(cluster.devices[pe].flop_per_ms * 1e3, self.wait_limit()))
    }
}
