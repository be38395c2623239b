//! Handles Ctrl-C while a pass waits for other processes. Python itself would handle the signal only after the pass, because the pass has
//! released the interpreter.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use aristos::shmem::{LostPe, Watch};
use pyo3::prelude::*;

/// The interval between checks for a signal. It is not shorter because each check takes the interpreter.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Runs Python's signal handlers while the main thread waits. Once a handler has raised an exception, all waits end.
pub(crate) struct Signals {
    rank: usize,
    last_check: Mutex<LastCheck>,
}

struct LastCheck {
    at: Instant,
    raised: Option<PyErr>,
}

impl Signals {
    pub(crate) fn new(rank: usize) -> Signals {
        Signals { rank, last_check: Mutex::new(LastCheck { at: Instant::now(), raised: None }) }
    }

    /// Returns the exception that has ended a wait.
    pub(crate) fn raised(&self) -> Option<PyErr> {
        let last_check = self.last_check.lock().ok()?;
        Python::attach(|py| last_check.raised.as_ref().map(|raised| raised.clone_ref(py)))
    }
}

impl Watch for Signals {
    fn lost(&self) -> Option<LostPe> {
        let mut last_check = self.last_check.lock().ok()?;
        if last_check.raised.is_none() && last_check.at.elapsed() >= CHECK_INTERVAL {
            // The result is `None` if the interpreter is shutting down.
            last_check.raised = Python::try_attach(|py| py.check_signals()).and_then(Result::err);
            last_check.at = Instant::now();
        }
        last_check.raised.is_some().then(|| LostPe::new(self.rank, "it was interrupted"))
    }
}
