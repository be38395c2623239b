//! One PE's part of a run, with the layer on the CPU.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use half::bf16;

use super::PreparedRun;
use super::hooks::Progress;
use super::inject::Rate;
use super::pe_results::{FIRST_PHASE, LOADING, report_and_write};
use super::steps::Steps;
use crate::cluster::{Cluster, LinkTable};
use crate::job::host::{Host, PeTask, SymmetricRuntime, allowed_cpus};
use crate::job::launch::StatusPage;
use crate::job::request::{DeviceKind, OnFailure, RowsPer};
use crate::moe::cpu::{Exchange, OneGroup, replica_bytes};
use crate::moe::kernels::Element;
use crate::moe::metrics::{Observer, Phase};
use crate::moe::{Dtype, Layer, MoeError, Replicas};
use crate::report::{PeReport, SymmetricMemory};
use crate::shmem::{GroupTransport, ShmTransport, Shmem, Throttle, Transport};

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

/// Runs this PE's part. Returns after the PE has sent its report. With `--on-failure continue` the PE continues after the loss of other
/// groups.
///
/// # Errors
/// Returns an error if the layer cannot be built, a peer does not respond, or a file or message cannot be written.
pub fn run(job: &mut PreparedRun, host: &mut impl SymmetricRuntime) -> Result<()> {
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
        let how = host.continuation(progress.settled() as u64, progress.complete() as u64)?;
        job.exclude_pes(&how.lost)?;
        progress.resume_from(how.from as usize);
    }
}

/// The remaining steps on the CPU.
struct OnCpu<'j> {
    job: &'j PreparedRun,
    progress: &'j mut Progress,
}

impl PeTask for OnCpu<'_> {
    type Error = anyhow::Error;

    fn heap_bytes<T: Transport>(&self) -> Result<usize> {
        heap_bytes(self.job)
    }

    fn throttle(&self, my_pe: usize) -> Option<Throttle> {
        self.job.throttle(my_pe)
    }

    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<()> {
        match self.job.request.dtype {
            Dtype::F32 => run_as::<T, f32>(self, host, shmem),
            Dtype::Bf16 => run_as::<T, bf16>(self, host, shmem),
            Dtype::F16 => bail!("dtype is f16, expected f32 or bf16 on the CPU"),
        }
    }
}

/// Size of the symmetric heap of a group's layer, bytes: the maximum over the groups, as all groups have the same size.
fn group_heap_bytes(job: &PreparedRun) -> Result<usize> {
    let mut most = 0;
    for group in 0..job.groups.len() {
        most = most.max(job.layer_spec(group).heap_bytes()?);
    }
    Ok(most)
}

/// Size of the symmetric heap of the job, bytes.
pub fn heap_bytes(job: &PreparedRun) -> Result<usize> {
    let of_group = group_heap_bytes(job)?;
    if !needs_exchange(job) {
        return Ok(of_group);
    }
    let exchange = replica_bytes(&job.config, &job.groups, job.slots());
    Ok(Shmem::<ShmTransport>::heap_bytes_for(job.world.len(), of_group.next_multiple_of(64) + exchange))
}

/// Whether an expert is on several PEs, or may be after replanning.
fn needs_exchange(job: &PreparedRun) -> bool {
    job.groups.len() > 1 || job.groups.has_replicas() || job.request.replan.is_some()
}

/// Runs the layer with elements of type `E`. `world` contains all PEs.
fn run_as<T: Transport, E: Element>(part: OnCpu<'_>, host: &dyn Host, world: &Shmem<T>) -> Result<()> {
    let job = part.job;
    if !needs_exchange(job) {
        return run_layer::<_, _, E, OneGroup>(part, host, world, None, world);
    }
    let team = world.team_split(world.world(), job.groups.members(job.groups.position(world.my_pe()).0))?;
    let team = team.context("a PE is in its group")?;
    let group = Shmem::new(GroupTransport::new(world, team, group_heap_bytes(job)?)?);
    let exchange = Replicas::with_slots(world, &job.config, job.groups.clone(), job.slots())?;
    run_layer::<_, _, E, _>(part, host, &group, Some(exchange), world)
}

/// Runs the layer of this PE's group. `exchange` sums gradients and moves experts between PEs that hold the same experts. `world` contains
/// all PEs.
fn run_layer<T: Transport, W: Transport, E: Element, X: Exchange>(
    part: OnCpu<'_>,
    host: &dyn Host,
    shmem: &Shmem<T>,
    exchange: Option<X>,
    world: &Shmem<W>,
) -> Result<()> {
    let OnCpu { job, progress } = part;
    let me = host.my_pe();
    let group = job.groups.position(job.rank(me)).0;
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
    // A step that is incomplete on some PE may be repeated, so every PE waits until all PEs have completed the step.
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
        host.commit_steps()?;
    }
    report.symmetric = SymmetricMemory {
        used_bytes: world.used_bytes() as u64,
        peak_bytes: world.peak_bytes() as u64,
        budget_bytes: world.heap_bytes() as u64,
    };
    report_and_write(job, host, report, &done)
    // No barrier is needed at the end. With shared memory the other PEs keep this PE's heap mapped. With MPI, freeing the window waits for
    // all PEs.
}

impl PreparedRun {
    /// The minimum times of this PE's messages to the remaining PEs, if links are slowed down.
    pub(super) fn throttle(&self, pe: usize) -> Option<Throttle> {
        let of = |cluster: &Cluster, to: usize| {
            let link = cluster.links.link(pe, to);
            // ms/MB is the same as ns/B.
            (link.alpha_ms * 1e-3, link.beta_ms_per_mb * 1e-9)
        };
        let links =
            |cluster| self.world.iter().map(|&to| if to == pe { (0.0, 0.0) } else { of(cluster, to) }).collect();
        self.injected.as_ref().map(|cluster| Throttle::new(links(cluster), self.wait_limit()))
    }

    /// The maximum compute rate of this PE, if PEs are slowed down.
    pub(super) fn rate(&self, pe: usize) -> Option<Rate> {
        self.injected.as_ref().map(|cluster| Rate::new(cluster.devices[pe].flop_per_ms * 1e3, self.wait_limit()))
    }
}
