//! Delivers signals that end a job to the supervisor's poll loop.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use signal_hook::SigId;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::{pipe, unregister};

/// Number of jobs running in this process, and the flag that makes signals take their default action while no job is running.
///
/// signal-hook never restores a signal's default action. So without this flag Ctrl-C would have no effect after the job's end, while the
/// caller writes its results.
struct Handlers {
    jobs: usize,
    idle: Option<Arc<AtomicBool>>,
}

static HANDLERS: Mutex<Handlers> = Mutex::new(Handlers { jobs: 0, idle: None });

/// While this value exists, SIGINT, SIGTERM and SIGHUP are caught, unless the process was started with the signal ignored, as by `nohup`.
/// Caught signals and SIGCHLD wake a poll.
pub(super) struct Signals {
    pipe: UnixStream,
    caught: Arc<AtomicUsize>,
    actions: Vec<SigId>,
}

impl Signals {
    pub(super) fn catch() -> io::Result<Signals> {
        let (receiver, sender) = UnixStream::pair()?;
        receiver.set_nonblocking(true)?;
        let mut signals = Signals { pipe: receiver, caught: Arc::default(), actions: Vec::new() };
        let mut handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner);
        handlers.jobs += 1; // from here on, dropping `signals` undoes everything
        let ignored = ignored_signals();
        let ending: Vec<i32> =
            [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect();
        if handlers.idle.is_none() {
            let idle = Arc::new(AtomicBool::new(true));
            for &signal in &ending {
                signal_hook::flag::register_conditional_default(signal, idle.clone())?;
            }
            handlers.idle = Some(idle);
        }
        for &signal in &ending {
            let caught = signals.caught.clone();
            signals.actions.push(signal_hook::flag::register_usize(signal, caught, signal as usize)?);
        }
        for signal in ending.into_iter().chain([SIGCHLD]) {
            signals.actions.push(pipe::register(signal, sender.try_clone()?)?);
        }
        if let Some(idle) = &handlers.idle {
            idle.store(false, Ordering::SeqCst);
        }
        Ok(signals)
    }

    /// The last caught signal that ends the job.
    pub(super) fn caught(&self) -> Option<i32> {
        match self.caught.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// Readable after a signal; see [`Signals::clear`].
    pub(super) fn pipe(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// Empties the pipe.
    pub(super) fn clear(&self) {
        while matches!(io::Read::read(&mut &self.pipe, &mut [0; 64]), Ok(1..)) {}
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let mut handlers = HANDLERS.lock().unwrap_or_else(PoisonError::into_inner);
        handlers.jobs -= 1;
        if let (0, Some(idle)) = (handlers.jobs, &handlers.idle) {
            idle.store(true, Ordering::SeqCst);
        }
        for action in self.actions.drain(..) {
            unregister(action);
        }
    }
}

/// The mask of signals that this process ignores, bit `signal - 1`; 0 if /proc does not report it.
fn ignored_signals() -> u64 {
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
            u64::from_str_radix(mask.trim(), 16).ok()
        })
        .unwrap_or(0)
}

/// A signal's name, for messages.
pub(super) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string)
}
