//! Ctrl-C while a pass waits for other processes: the interpreter is released meanwhile, so that Python itself would see a signal only
//! when the pass has ended.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use aristos::shmem::{LostPe, Watch};
use pyo3::prelude::*;

/// Between two looks, which each take the interpreter.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Runs Python's handlers of signals that came, in waits of the main thread; once one has raised an exception, all waits end.
pub(crate) struct Signals {
    rank: usize,
    looked: Mutex<Looked>,
}

struct Looked {
    at: Instant,
    raised: Option<PyErr>,
}

impl Signals {
    pub(crate) fn new(rank: usize) -> Signals {
        Signals { rank, looked: Mutex::new(Looked { at: Instant::now(), raised: None }) }
    }

    /// The exception that ended a wait.
    pub(crate) fn raised(&self) -> Option<PyErr> {
        let looked = self.looked.lock().ok()?;
        Python::attach(|py| looked.raised.as_ref().map(|raised| raised.clone_ref(py)))
    }
}

impl Watch for Signals {
    fn lost(&self) -> Option<LostPe> {
        let mut looked = self.looked.lock().ok()?;
        if looked.raised.is_none() && looked.at.elapsed() >= LOOK_EVERY {
            // None when the interpreter is about to end.
            looked.raised = Python::try_attach(|py| py.check_signals()).and_then(Result::err);
            looked.at = Instant::now();
        }
        looked.raised.is_some().then(|| LostPe::new(self.rank, "it was interrupted"))
    }
}
