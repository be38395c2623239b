//! What this process is among those that a launcher started, if one did.

use std::time::Duration;

use super::environment::{BadEnvironment, LaunchedProcess, launched_process};
use super::keeper::Keeper;
use super::{LaunchError, rendezvous};

/// How long processes wait for each other at the start, seconds.
const ENV_JOIN_LIMIT: &str = "ARISTOS_JOIN_LIMIT";
const JOIN_LIMIT: Duration = Duration::from_secs(60);
/// The same where the launcher says that there are several hosts, though it may count one host twice.
const SEVERAL_HOSTS_LIMIT: Duration = Duration::from_secs(10);

/// What a process is among those that a launcher started.
pub enum Role {
    /// No launcher started it, or it alone; it starts PEs itself.
    Alone,
    /// Rank 0: it runs the command.
    Supervisor,
    /// It keeps a PE: [`Keeper::serve`].
    Keeper(Keeper),
    /// Its launcher's environment makes no sense, and rank 0 says so: it ends.
    Silent,
}

/// Finds this process's role, and as rank 0 opens the rendezvous socket. To be called once.
///
/// # Errors
/// One line: the environment makes no sense; the rendezvous socket is taken.
pub fn enter() -> Result<Role, LaunchError> {
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid());
    let process = match launched_process(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()), parent) {
        Ok(None) => return Ok(Role::Alone),
        Ok(Some(process)) => process,
        Err(BadEnvironment { speaks: false, .. }) => return Ok(Role::Silent),
        Err(BadEnvironment { line, .. }) => return Err(LaunchError::Environment(line)),
    };
    let limit = match join_limit(&process) {
        Ok(limit) => limit,
        Err(_) if process.rank > 0 => return Ok(Role::Silent),
        Err(error) => return Err(error),
    };
    if process.rank > 0 {
        return Ok(Role::Keeper(Keeper::new(process, limit)));
    }
    rendezvous::open(process, limit)?;
    Ok(Role::Supervisor)
}

fn join_limit(process: &LaunchedProcess) -> Result<Duration, LaunchError> {
    let limit = match std::env::var_os(ENV_JOIN_LIMIT) {
        None => JOIN_LIMIT,
        Some(value) => {
            let seconds = value.to_str().and_then(|value| value.parse().ok()).filter(|s| (0.01..=1e6).contains(s));
            let wrong = || format!("{ENV_JOIN_LIMIT}={}: expected a number of seconds above 0", value.display());
            Duration::from_secs_f64(seconds.ok_or_else(|| LaunchError::Environment(wrong()))?)
        }
    };
    Ok(if process.one_host { limit } else { limit.min(SEVERAL_HOSTS_LIMIT) })
}
