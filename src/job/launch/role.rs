//! The role of this process among the processes that a launcher started.

use std::time::Duration;

use super::environment::{BadEnvironment, LaunchedProcess, launched_process};
use super::rank_parent::RankParent;
use super::{LaunchError, rendezvous};

/// Environment variable with the time for which processes wait for each other at the start, seconds.
const ENV_JOIN_LIMIT: &str = "ARISTOS_JOIN_LIMIT";
/// Environment variable with libfabric's provider, as named by `fi_info`. An empty value is the same as none.
#[cfg(feature = "ofi")]
const ENV_OFI_PROVIDER: &str = "ARISTOS_OFI_PROVIDER";
const JOIN_LIMIT: Duration = Duration::from_secs(60);
/// The limit if the launcher reports several hosts. It is shorter, since the job can start only if the launcher has counted one host twice.
const SEVERAL_HOSTS_LIMIT: Duration = Duration::from_secs(10);

/// The role of a process.
pub enum Role {
    /// No launcher started this process, or only this one. It starts PEs itself.
    Alone,
    /// Rank 0, which runs the command.
    Supervisor,
    /// The parent of one PE: [`RankParent::serve`].
    RankParent(RankParent),
    /// The launcher's environment is invalid. Rank 0 reports it; this process only exits.
    Silent,
}

/// Finds this process's role. Rank 0 also opens the rendezvous socket. Call it once.
///
/// # Errors
/// Returns an error of one line if the environment is invalid, or if another job uses the rendezvous socket.
pub fn enter() -> Result<Role, LaunchError> {
    let process = match this_process() {
        Ok(None) => return Ok(Role::Alone),
        Ok(Some(process)) => process,
        Err(BadEnvironment { speaks: false, .. }) => return Ok(Role::Silent),
        Err(BadEnvironment { line, .. }) => return Err(LaunchError::Environment(line)),
    };
    let limit = match join_limit() {
        Ok(limit) if process.one_host => limit,
        Ok(limit) => limit.min(SEVERAL_HOSTS_LIMIT),
        Err(_) if process.rank > 0 => return Ok(Role::Silent),
        Err(error) => return Err(error),
    };
    if process.rank > 0 {
        return Ok(Role::RankParent(RankParent::new(process, limit)));
    }
    rendezvous::open(process, limit)?;
    Ok(Role::Supervisor)
}

fn this_process() -> Result<Option<LaunchedProcess>, BadEnvironment> {
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid());
    launched_process(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()), parent)
}

/// The rank of a launched process, and the data for joining the other processes, which may be on other hosts.
pub struct LaunchedPlace {
    /// Its rank.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Rank 0's address for TCP, as HOST:PORT, if the launcher provides one.
    pub address: Option<String>,
    /// An identifier that all processes share.
    pub job: String,
}

/// Reads this process's place from the environment. `None` if no launcher started this process, or only this one.
///
/// # Errors
/// One line: the environment is invalid.
pub fn launched_place() -> Result<Option<LaunchedPlace>, LaunchError> {
    let place = |process: LaunchedProcess| {
        let LaunchedProcess { launcher, rank, size, one_host, job, address } = process;
        // The job's identifier contains the parent, which MPICH's processes share only within a host.
        let job = if launcher == "MPICH" && !one_host { launcher.to_string() } else { job };
        LaunchedPlace { rank, size, address, job }
    };
    match this_process() {
        Ok(process) => Ok(process.map(place)),
        Err(BadEnvironment { line, .. }) => Err(LaunchError::Environment(line)),
    }
}

/// Whether a launcher reports that it has started processes on several hosts.
pub fn on_several_hosts() -> bool {
    this_process().is_ok_and(|process| process.is_some_and(|process| !process.one_host))
}

/// How long processes wait for each other at the start.
///
/// # Errors
/// Returns an error of one line if `ARISTOS_JOIN_LIMIT` is not a valid time.
pub fn join_limit() -> Result<Duration, LaunchError> {
    let Some(value) = std::env::var_os(ENV_JOIN_LIMIT) else { return Ok(JOIN_LIMIT) };
    let seconds = value.to_str().and_then(|value| value.parse().ok()).filter(|s| (0.01..=1e6).contains(s));
    let wrong = || format!("{ENV_JOIN_LIMIT}={}: expected a number of seconds above 0", value.display());
    Ok(Duration::from_secs_f64(seconds.ok_or_else(|| LaunchError::Environment(wrong()))?))
}

/// The libfabric provider that the user has chosen.
///
/// # Errors
/// Returns an error of one line if `ARISTOS_OFI_PROVIDER` is not a valid name.
#[cfg(feature = "ofi")]
pub fn ofi_provider() -> Result<Option<String>, LaunchError> {
    let value = std::env::var_os(ENV_OFI_PROVIDER).filter(|value| !value.is_empty());
    let name = |value: std::ffi::OsString| {
        let wrong = |value: std::ffi::OsString| {
            format!("{ENV_OFI_PROVIDER}={}: expected a provider as fi_info names it", value.display())
        };
        value.into_string().map_err(|value| LaunchError::Environment(wrong(value)))
    };
    value.map(name).transpose()
}
