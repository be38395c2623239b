//! Heartbeats: the kernel's counters of a PE's process, and the PE's status words.
//!
//! A PE that waits for another PE has a limit of its own, and its error names the other PE. This module finds PEs for which no other PE
//! waits, and which are stopped or whose file system does not respond.

use std::fs;
use std::time::{Duration, Instant};

/// Time between two checks.
const PERIOD: Duration = Duration::from_millis(500);

/// A PE's process.
pub(super) enum Process {
    /// A child of this process.
    Child(u32),
    /// A child of another process. The PE has reported the id itself; if it is in another PID namespace, the id may belong to a different
    /// process here.
    Reported(u32),
}

/// The time since the last heartbeat of each PE.
pub(super) struct Heartbeats {
    pes: Vec<Option<Seen>>,
    checked: Instant,
}

struct Seen {
    counters: Counters,
    silent: Duration,
}

/// Counters that change while a process makes progress.
#[derive(PartialEq, Eq)]
struct Counters {
    /// The PE's status words.
    status: [u64; 4],
    /// Processor time of all its threads, in the kernel's ticks.
    ticks: u64,
    /// Bytes read from storage and written to it; `None` if the kernel does not provide them.
    moved: Option<[u64; 2]>,
}

impl Heartbeats {
    pub(super) fn new(n_pes: usize) -> Heartbeats {
        Heartbeats { pes: (0..n_pes).map(|_| None).collect(), checked: Instant::now() }
    }

    /// Checks the PEs for which `watched` returns a process and status words. Returns the first of them without a heartbeat for `limit`.
    /// The time of the unwatched PEs is reset.
    pub(super) fn check(
        &mut self,
        limit: Duration,
        watched: impl Fn(usize) -> Option<(Process, [u64; 4])>,
    ) -> Option<usize> {
        let since = self.checked.elapsed();
        if since < PERIOD {
            return None;
        }
        self.checked = Instant::now();
        // If this process was stopped together with the job, that time does not count.
        let since = since.min(2 * PERIOD);
        let mut silent = None;
        for (pe, seen) in self.pes.iter_mut().enumerate() {
            let counters = watched(pe).and_then(|(process, status)| Counters::of(process, pe, status));
            *seen = match (counters, seen.take()) {
                (None, _) => None,
                (Some(counters), Some(before)) if before.counters == counters => {
                    Some(Seen { counters, silent: before.silent + since })
                }
                (Some(counters), _) => Some(Seen { counters, silent: Duration::ZERO }),
            };
            if seen.as_ref().is_some_and(|seen| seen.silent >= limit) {
                silent.get_or_insert(pe);
            }
        }
        silent
    }
}

impl Counters {
    /// `None` if `/proc` does not provide the counters.
    fn of(process: Process, pe: usize, status: [u64; 4]) -> Option<Counters> {
        let (Process::Child(pid) | Process::Reported(pid)) = process;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses, and may contain parentheses.
        let (head, fields) = stat.rsplit_once(')')?;
        if matches!(process, Process::Reported(_)) && !head.ends_with(&process_name(pe)) {
            return None;
        }
        let field = |at: usize| fields.split_whitespace().nth(at)?.parse::<u64>().ok();
        // utime and stime, fields 14 and 15 of the line. The first field after the name is field 3.
        let ticks = field(11)? + field(12)?;
        let io = fs::read_to_string(format!("/proc/{pid}/io")).ok();
        let bytes = |name: &str| io.as_ref()?.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
        let moved = bytes("read_bytes:").zip(bytes("write_bytes:")).map(|(read, written)| [read, written]);
        Some(Counters { status, ticks, moved })
    }
}

/// The name of a PE's process in `ps` and `top`: at most 15 bytes.
pub(super) fn process_name(pe: usize) -> String {
    format!("aristos-pe{pe}")
}
