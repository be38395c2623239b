//! The time limit that MPI's calls lack: a thread that ends the process when one has lasted too long.
//!
//! Where puts are messages, a flush waits for its target to take them; of a target that hangs, it waits for ever. So do collective
//! calls.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(100);

/// Watches one thread's calls. Nothing is ordered by its words: a look that comes too early is followed by another.
#[derive(Debug)]
pub struct Watchdog {
    calls: Arc<Calls>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Calls {
    /// Calls begun and ended: odd in a call.
    count: AtomicU64,
    /// For which PE.
    pe: AtomicUsize,
    stop: AtomicBool,
}

impl Watchdog {
    /// Starts the thread, for PE `me`; `what` says what it waited for, given the PE.
    ///
    /// # Errors
    /// When the system refuses the thread.
    pub fn start(me: usize, limit: Duration, what: fn(usize) -> String) -> io::Result<Watchdog> {
        let calls = Arc::new(Calls::default());
        let watched = calls.clone();
        let thread =
            thread::Builder::new().name("aristos-watchdog".into()).spawn(move || watch(&watched, me, limit, what))?;
        Ok(Watchdog { calls, thread: Some(thread) })
    }

    /// Makes a call that may wait for `pe`.
    pub fn during<R>(&self, pe: usize, call: impl FnOnce() -> R) -> R {
        let count = self.calls.count.load(Ordering::Relaxed);
        self.calls.pe.store(pe, Ordering::Relaxed);
        self.calls.count.store(count + 1, Ordering::Relaxed);
        let result = call();
        self.calls.count.store(count + 2, Ordering::Relaxed);
        result
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.calls.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

fn watch(calls: &Calls, me: usize, limit: Duration, what: fn(usize) -> String) {
    let (mut last, mut since) = (0, Instant::now());
    while !calls.stop.load(Ordering::Relaxed) {
        thread::park_timeout(PERIOD);
        let count = calls.count.load(Ordering::Relaxed);
        if count != last || count.is_multiple_of(2) {
            (last, since) = (count, Instant::now());
        } else if since.elapsed() >= limit {
            let what = what(calls.pe.load(Ordering::Relaxed));
            let _ = writeln!(io::stderr(), "aristos: PE {me} failed: waited {} s for {what}", limit.as_secs_f64());
            // The other thread is in MPI, which lets nobody else in: the process ends as it is, and mpirun ends the others.
            signal_hook::low_level::exit(1);
        }
    }
}
