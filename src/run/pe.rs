//! One PE's part of the main job.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use half::bf16;
use serde::{Deserialize, Serialize};

use super::steps::{self, Results};
use super::{Device, Job};
use crate::launch::{PeContext, StatusPage};
use crate::moe::cpu::{Exchange, OneGroup, replica_bytes};
use crate::moe::kernels::Element;
use crate::moe::metrics::{Observer, Phase};
use crate::moe::{Dtype, Layer, Load, Replicas};
use crate::report::{PeReport, SymmetricMemory};
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

struct StatusObserver(StatusPage);

impl Observer for StatusObserver {
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
    let mut most = 0;
    for group in 0..job.groups.len() {
        most = most.max(job.layer_spec(job.groups.members(group)[0]).heap_bytes()?);
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
    let exchange = replica_bytes(&job.config, &job.groups);
    Ok(Shmem::<ShmTransport>::heap_bytes_for(job.request.pes, of_group.next_multiple_of(64) + exchange))
}

/// Over as many groups as the job has: `world` has all PEs.
fn run_as<T: Transport, E: Element>(job: &Job, host: &impl Host, world: &Shmem<T>) -> Result<()> {
    if job.groups.len() == 1 {
        return run_layer::<_, _, E, OneGroup>(job, host, world, None, world);
    }
    let team = world.team_split(world.world(), job.groups.members(job.groups.place(host.my_pe()).0))?;
    let team = team.context("a PE is in its group")?;
    let group = Shmem::new(GroupTransport::new(world, team, group_heap_bytes(job)?)?);
    let exchange = Replicas::new(world, &job.config, job.groups.clone())?;
    run_layer::<_, _, E, _>(job, host, &group, Some(exchange), world)
}

/// Runs the layer of this PE's group; `exchange` is with the others, where there are any, all of which `world` has.
fn run_layer<T: Transport, W: Transport, E: Element, X: Exchange>(
    job: &Job,
    host: &impl Host,
    shmem: &Shmem<T>,
    exchange: Option<X>,
    world: &Shmem<W>,
) -> Result<()> {
    let me = host.my_pe();
    let builder = Layer::<_, E>::builder(job.layer_spec(me)).observer(StatusObserver(host.status().clone()));
    let mut report = PeReport { pe: me, device: "cpu".into(), ..PeReport::default() };
    let done = match exchange {
        Some(exchange) => {
            steps::run(job, host.status(), &mut builder.exchange(exchange).build(shmem, job)?, &mut report)?
        }
        None => steps::run(job, host.status(), &mut builder.build(shmem, job)?, &mut report)?,
    };
    report.symmetric = SymmetricMemory {
        used_bytes: world.used_bytes() as u64,
        peak_bytes: world.peak_bytes() as u64,
        budget_bytes: world.heap_bytes() as u64,
    };
    report_and_write(job, host, report, &done)
    // Over shared memory the heap of a PE that is gone stays mapped by the others, so nothing is left to wait for; over MPI
    // the end of the window does.
}

/// Writes this PE's part of the files that the host has, and sends it the message.
pub(super) fn report_and_write(job: &Job, host: &impl Host, report: PeReport, results: &Results) -> Result<()> {
    let me = host.my_pe();
    let message = Message { report, losses: losses(job, &results.routed.load) };
    let tokens = job.tokens_of(me);
    host.status().set_phase(WRITING);
    if host.has_file(RESULTS) {
        let layout = job.results()?;
        let file = job.request.output.as_ref().map_or("the result file".to_string(), |path| path.display().to_string());
        let write = |name: &str, first_row: usize, rows: &[f32]| -> Result<()> {
            let at = layout.rows_at(name, first_row, rows.len())?;
            host.write(RESULTS, at, bytemuck::cast_slice(rows), &format!("tensor {name} to {file}"))
        };
        write("output", tokens.start, &results.output)?;
        if job.backward {
            write("grad_hidden_states", tokens.start, &results.grad_input)?;
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
        host.write(CHOSEN, offset as u64, bytemuck::cast_slice(&results.routed.chosen), "the routing")?;
    }
    host.send(&serde_json::to_vec(&message)?)
}

/// The losses of all PEs' tokens, weighted.
pub(super) fn losses(job: &Job, load: &Load) -> BTreeMap<String, f64> {
    let (aux, z) = (job.config.aux_loss_coef, job.config.z_loss_coef);
    let all = [("load_balancing", aux, load.aux_loss()), ("z", z, load.z_loss())];
    let weighted = all.into_iter().filter(|(_, coef, _)| *coef != 0.0);
    weighted.map(|(name, coef, loss)| (name.to_string(), f64::from(coef) * loss)).collect()
}
