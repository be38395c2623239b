//! A job from its command to its report, whoever starts the PEs.

use std::time::Duration;

use anyhow::Result;
use serde::de::DeserializeOwned;

use super::progress::Progress;
use crate::job::launch::Processes;
use crate::job::messages::collect;
use crate::job::request::Request;

/// The processes of a job, as a command finds them.
pub struct JobProcesses {
    /// How many PEs there are, where `mpirun` has started them; otherwise the request says.
    pub started: Option<usize>,
    /// How many of them are on this host.
    pub here: Option<usize>,
    /// Whether this process reports the job, and so opens its files.
    pub reports: bool,
}

/// What a command asks of its job, and what it keeps for the report.
pub struct JobSpec<S> {
    /// What the PEs do.
    pub request: Request,
    /// How many they are.
    pub pes: usize,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
    /// Environment variables of the PEs' processes.
    pub env: Vec<(String, String)>,
    /// The files of the report, and whatever else it is made of.
    pub kept: S,
}

/// Runs a job's PEs, as processes or, `over_mpi`, as those that `mpirun` started; says whether all went well. `ask` is called in
/// every process that has to know the request, `report` in one, with what the PEs sent.
///
/// # Errors
/// One line.
pub fn run<S, M: DeserializeOwned>(
    over_mpi: bool,
    phase_names: &[&'static str],
    progress: Progress,
    ask: impl FnOnce(JobProcesses) -> Result<JobSpec<S>>,
    report: impl FnOnce(S, Vec<(usize, M)>) -> Result<bool>,
) -> Result<bool> {
    #[cfg(feature = "mpi")]
    if over_mpi {
        return run_over_mpi(phase_names, ask, report);
    }
    // Without MPI the command's flags are refused where the request is made of them.
    let _ = over_mpi;
    let JobSpec { request, pes, wait_limit, env, kept } =
        ask(JobProcesses { started: None, here: None, reports: true })?;
    let mut processes = Processes::new(pes, request.to_bytes()?, phase_names);
    processes.set_wait_limit(wait_limit);
    processes.env = env;
    let mut sent = Vec::new();
    let ended = collect(processes, |pe, message| sent.push((pe, message)), |status| progress.show(status));
    progress.clear();
    ended?;
    report(kept, sent)
}

#[cfg(feature = "mpi")]
fn run_over_mpi<S, M: DeserializeOwned>(
    phase_names: &[&'static str],
    ask: impl FnOnce(JobProcesses) -> Result<JobSpec<S>>,
    report: impl FnOnce(S, Vec<(usize, M)>) -> Result<bool>,
) -> Result<bool> {
    use super::flags::as_flags;
    use super::pe::{carry_out, failure};
    use crate::job::mpi::{MpiPes, START_LIMIT};

    let Some(pes) = MpiPes::join(phase_names, as_flags)? else { return Ok(false) };
    let n = pes.world().n_pes();
    let found = JobProcesses { started: Some(n), here: Some(pes.world().pes_on_host()), reports: pes.reports() };
    let asked = ask(found).and_then(|asked| {
        let expected = asked.pes;
        anyhow::ensure!(n == expected, "--transport mpi with {n} PEs, expected {expected}: mpirun -n {expected}");
        Ok(asked)
    });
    let Some(JobSpec { request, wait_limit, kept, .. }) = pes.agree(asked, START_LIMIT) else { return Ok(false) };
    let sent = pes.run(&[], Vec::new(), wait_limit, |host| carry_out(request, host).map_err(|error| failure(&error)));
    let well = sent.unwrap_or_else(|failure| pes.fail(&failure)).map(|sent| {
        report(kept, sent).unwrap_or_else(|error| {
            pes.say(&error);
            false
        })
    });
    Ok(pes.conclude(well, START_LIMIT.max(wait_limit)))
}
