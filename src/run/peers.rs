//! A run on PEs without a supervisor: PE 0 does the supervisor's work before and after the steps.

use std::fs::File;
use std::io;

use anyhow::{Context, Result, anyhow};

use super::pe_results::{CHOSEN, Message, PHASE_NAMES, RESULTS, ROUTING, WEIGHTS};
#[cfg(feature = "device")]
use super::probe::device::probe_before;
use super::probe::{heap_bytes, probe_pes};
use super::supervisor::{self, Outputs};
use super::{PreparedRun, pe};
use crate::cluster::Cluster;
use crate::job::PeFailure;
use crate::job::peers::{Peers, START_LIMIT, World};
use crate::job::request::{DeviceKind, ProbeRequest, Request, RunRequest};

/// The names of the phases of a run without a supervisor.
pub const PHASES: &[&str] = &PHASE_NAMES;

/// Runs this process's part as one of the PEs. PE 0 prints the report. Returns whether the check, if requested, passed. `request` receives
/// the number of PEs. `failure` converts an error to the report that ends the job. Ends the process if a PE fails during the steps. An
/// error before the steps is printed by one PE, and all PEs return `false`.
pub fn run<W: World>(
    pes: &Peers<W>,
    request: impl FnOnce(usize) -> Result<RunRequest>,
    failure: fn(&anyhow::Error) -> PeFailure,
) -> bool {
    let open = || {
        let job = PreparedRun::open(request(pes.world().n_pes())?)?;
        pes.world().set_wait_limit(job.wait_limit());
        let probed = job.probe_request()?.is_some();
        check_host(&job, pes.world().pes_on_host(), probed)?;
        anyhow::Ok(job)
    };
    let Some(mut job) = pes.agree(open(), START_LIMIT) else { return false };
    let limit = job.wait_limit();
    let same = pes.check_same(&Request::Run(Box::new(job.request.clone())), START_LIMIT);
    if pes.agree(same, START_LIMIT).is_none() {
        return false;
    }
    // The probe returns the same cluster on all PEs, so all make the same plan.
    let cluster = probe(pes, &mut job).unwrap_or_else(|error| pes.fail(&failure(&error)));
    let prepared = prepare(pes, &mut job, cluster);
    let Some((outputs, files)) = pes.agree(prepared, limit.max(START_LIMIT)) else { return false };
    let mut names: Vec<&'static str> = match (&job.request.output, job.request.check) {
        (_, true) => vec![RESULTS, CHOSEN],
        (Some(_), false) => vec![RESULTS],
        (None, false) => Vec::new(),
    };
    names.extend(job.request.save_weights.iter().map(|_| WEIGHTS));
    names.extend(job.request.save_routing.iter().map(|_| ROUTING));
    let sent =
        pes.run::<Message>(&names, files, limit, |host| pe::run(&mut job, host).map_err(|error| failure(&error)));
    let sent = match sent {
        Ok(sent) => sent,
        Err(failure) => {
            drop(outputs);
            pes.fail(&failure)
        }
    };
    let report = outputs.zip(sent).map(|(mut outputs, sent)| {
        sent.into_iter().for_each(|(pe, message)| outputs.take(pe, message));
        let passed = outputs.finish(&job).and_then(|report| supervisor::print(&job, &report));
        passed.unwrap_or_else(|error| {
            pes.say(error);
            false
        })
    });
    pes.conclude(report, limit.max(START_LIMIT))
}

/// Probes the PEs if the run needs a plan for them. Collective.
fn probe<W: World>(pes: &Peers<W>, job: &mut PreparedRun) -> Result<Option<Cluster>> {
    let Some(request) = job.probe_request()? else { return Ok(None) };
    let cluster = match request.device {
        DeviceKind::Cpu => probe_cpus(pes, &request),
        _ => probe_devices(pes, &request, job),
    };
    Ok(Some(cluster.context("`plan` auto: the probe failed")?))
}

fn probe_cpus<W: World>(pes: &Peers<W>, request: &ProbeRequest) -> Result<Cluster> {
    let heap_bytes = heap_bytes::<W::Transport<'_>>(&request.options, request.pes);
    let here = pes.world().pes_on_host();
    pes.over_memory(heap_bytes, request.options.wait_limit, |shmem| {
        probe_pes(shmem, request, pes.world().transport(), here, &mut |_, _, _| {})
    })
}

/// Probes the devices. If the PE's device stays open, the layer will run on it.
#[cfg(feature = "device")]
fn probe_devices<W: World>(pes: &Peers<W>, request: &ProbeRequest, job: &mut PreparedRun) -> Result<Cluster> {
    let mut host = pes.before_part(request.options.wait_limit);
    let (cluster, open) = probe_before(request, &mut host)?;
    job.open_device = open;
    Ok(cluster)
}

#[cfg(not(feature = "device"))]
fn probe_devices<W: World>(_: &Peers<W>, _: &ProbeRequest, _: &mut PreparedRun) -> Result<Cluster> {
    anyhow::bail!("this build probes CPUs only")
}

/// Checks that the host has the features that the job needs, so that a missing one is reported once rather than by each PE of the host.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables, clippy::unnecessary_wraps))]
fn check_host(job: &PreparedRun, here: usize, probed: bool) -> Result<()> {
    #[cfg(feature = "cuda")]
    if job.request.device == DeviceKind::Cuda {
        crate::gpu::cuda::check_host(here, job.request.pes, job.request.symmetric)?;
        if probed {
            crate::gpu::cuda::check_times(here).context("`plan` auto")?;
        }
    }
    Ok(())
}

/// Checks the job before its steps. PE 0 also creates the outputs, and returns them with the files to which the PEs write.
fn prepare<W: World>(
    pes: &Peers<W>,
    job: &mut PreparedRun,
    cluster: Option<Cluster>,
) -> Result<(Option<Outputs>, Vec<File>)> {
    supervisor::check_outputs(&job.request)?;
    job.make_plan(|_| cluster.ok_or_else(|| anyhow!("`plan` auto: nothing was probed")))?;
    let here = pes.world().pes_on_host();
    job.check_memory(here)?;
    // This process set the heap's size earlier, unless the user had set it. A size set by the user is checked here.
    #[cfg(feature = "cuda")]
    if job.request.device == DeviceKind::Cuda {
        job.heap_variable()?;
    }
    if !pes.reports() {
        return Ok((None, Vec::new()));
    }
    supervisor::check_input(job)?;
    tracing::info!(
        pes = job.request.pes,
        tokens = job.tokens,
        mode = job.mode(),
        transport = pes.world().transport(),
        "starting"
    );
    let outputs = Outputs::create(job)?;
    let files = outputs.files().map(|(_, file)| file.try_clone()).collect::<io::Result<Vec<File>>>();
    let files = files.context("cannot keep the files open")?;
    Ok((Some(outputs), files))
}
