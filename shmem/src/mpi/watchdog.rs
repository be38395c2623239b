//! A time limit for MPI calls: a thread that ends the process if a call takes too long.
//!
//! If the network sends puts as messages, a flush waits for the target to receive them, and it waits forever if the target
//! hangs. Collective calls can hang likewise.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval between checks.
const PERIOD: Duration = Duration::from_millis(100);

/// Watches calls of which one is made at a time. The shared words need no ordering: a stale read only delays detection until the next check.
#[derive(Debug)]
pub struct Watchdog {
    calls: Arc<Calls>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Calls {
    /// Number of calls begun plus calls ended: odd during a call.
    count: AtomicU64,
    /// The PE that the current call waits for.
    pe: AtomicUsize,
    stop: AtomicBool,
}

impl Watchdog {
    /// Starts the thread for PE `me`. `what` returns, for a PE, what the call waited for.
    ///
    /// # Errors
    /// The system's error if the thread cannot be started.
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
            // The thread does not panic.
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
            // The watched thread is inside MPI, which other threads must not call, so this one exits the process; mpirun ends
            // the others.
            signal_hook::low_level::exit(1);
        }
    }
}
