//! Reports that a test cannot run on this machine: `tools/sums` then counts it as skipped, not as passed.

use std::fmt::Display;
use std::io::Write;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Reports why this test, or a part of it, cannot run here. Call it once and return from the test.
///
/// The line goes to standard error directly, which the test harness does not capture.
#[track_caller]
pub fn skip(why: impl Display) {
    COUNT.fetch_add(1, Ordering::Relaxed);
    let (caller, thread) = (Location::caller(), thread::current());
    // The harness may have begun a line about this test.
    let line = format!("\nskipped: {}: {}: {why}\n", caller.file(), thread.name().unwrap_or("a test"));
    std::io::stderr().write_all(line.as_bytes()).expect("standard error can be written");
}

/// Number of skipped tests of this process.
#[allow(dead_code)] // For tests with their own `main`.
pub fn count() -> usize {
    COUNT.load(Ordering::Relaxed)
}
