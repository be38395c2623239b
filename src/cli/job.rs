//! A job from its command to its report, with or without a supervisor.

use std::time::Duration;

use anyhow::Result;
use serde::de::DeserializeOwned;

use super::flags::as_flags;
use super::pe::{carry_out, failure};
use super::progress::Progress;
use super::ranks::Over;
use crate::job::launch::Processes;
use crate::job::messages::collect;
use crate::job::peers::{Peers, START_LIMIT, World};
use crate::job::request::Request;
use crate::job::tcp;

/// The processes of a job.
pub struct JobProcesses {
    /// Number of PEs, if a launcher has started them; otherwise the request sets it.
    pub started: Option<usize>,
    /// Number of PEs on this host.
    pub here: Option<usize>,
    /// Whether this process reports the job, and so opens its files.
    pub reports: bool,
}

/// A command's request, and its data for the report.
pub struct JobSpec<S> {
    /// The PEs' work.
    pub request: Request,
    /// Number of PEs.
    pub pes: usize,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
    /// Environment variables of the PEs' processes.
    pub env: Vec<(String, String)>,
    /// The files of the report, and its other data.
    pub kept: S,
}

/// Runs a job's PEs, as children of this process or as processes of a launcher; returns whether the job succeeded. `ask` is called in
/// every process that needs the request, `report` in one, with the PEs' messages.
///
/// # Errors
/// One line.
pub fn run<S, M: DeserializeOwned>(
    over: Over,
    phase_names: &[&'static str],
    progress: Progress,
    ask: impl FnOnce(JobProcesses) -> Result<JobSpec<S>>,
    report: impl FnOnce(S, Vec<(usize, M)>) -> Result<bool>,
) -> Result<bool> {
    match over {
        Over::Tcp(place, sockets) => {
            let pes = tcp::join(&place, sockets, phase_names, as_flags)?;
            return Ok(run_as_one(&pes, ask, report));
        }
        #[cfg(feature = "ofi")]
        Over::Ofi(place) => {
            let pes = tcp::join(&place, tcp::Ofi, phase_names, as_flags)?;
            return Ok(run_as_one(&pes, ask, report));
        }
        #[cfg(feature = "mpi")]
        Over::Mpi => {
            let pes = crate::job::mpi::join(phase_names, as_flags)?;
            return Ok(pes.is_some_and(|pes| run_as_one(&pes, ask, report)));
        }
        // Without the feature the flag is refused.
        #[cfg(not(feature = "mpi"))]
        Over::Mpi => {}
        #[cfg(not(feature = "ofi"))]
        Over::Ofi(_) => {}
        Over::Processes => {}
    }
    let JobSpec { request, pes, wait_limit, env, kept } =
        ask(JobProcesses { started: None, here: None, reports: true })?;
    let mut processes = Processes::new(pes, request.to_bytes()?, phase_names);
    processes.set_wait_limit(wait_limit);
    processes.env = env;
    let mut sent = Vec::new();
    let ended = collect(processes, |pe, message| sent.push((pe, message)), |status| progress.show(status), |_, _| ());
    progress.clear();
    ended?;
    report(kept, sent)
}

/// The same as one of the PEs of a world.
fn run_as_one<W: World, S, M: DeserializeOwned>(
    pes: &Peers<W>,
    ask: impl FnOnce(JobProcesses) -> Result<JobSpec<S>>,
    report: impl FnOnce(S, Vec<(usize, M)>) -> Result<bool>,
) -> bool {
    let n = pes.world().n_pes();
    let found = JobProcesses { started: Some(n), here: Some(pes.world().pes_on_host()), reports: pes.reports() };
    let asked = ask(found).and_then(|asked| {
        pes.world().set_wait_limit(asked.wait_limit);
        let expected = asked.pes;
        let transport = pes.world().transport();
        anyhow::ensure!(
            n == expected,
            "--transport {transport} with {n} PEs, expected {expected}: start {expected} processes"
        );
        Ok(asked)
    });
    let Some(JobSpec { request, wait_limit, kept, .. }) = pes.agree(asked, START_LIMIT) else { return false };
    if pes.agree(pes.check_same(&request, START_LIMIT), START_LIMIT).is_none() {
        return false;
    }
    let sent = pes.run(&[], Vec::new(), wait_limit, |host| carry_out(request, host).map_err(|error| failure(&error)));
    let well = sent.unwrap_or_else(|failure| pes.fail(&failure)).map(|sent| {
        report(kept, sent).unwrap_or_else(|error| {
            pes.say(error);
            false
        })
    });
    pes.conclude(well, START_LIMIT.max(wait_limit))
}
