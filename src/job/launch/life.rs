//! Signs of life: what the kernel counts of a PE's process, and what the PE says itself.
//!
//! A PE that waits for another has its own limit, and names the other. A PE that is stopped, or whose file system does not answer, while
//! nobody waits for it, would otherwise be waited for without end.

use std::fs;
use std::time::{Duration, Instant};

/// How often the processes are looked at.
const PERIOD: Duration = Duration::from_millis(500);

/// A PE's process.
pub(super) enum Process {
    /// A child of this process.
    Child(u32),
    /// A child of another one, by what it says: another process may have that number, where namespaces differ.
    Said(u32),
}

/// How long each PE has shown no sign of life.
pub(super) struct Life {
    pes: Vec<Option<Seen>>,
    looked: Instant,
}

struct Seen {
    signs: Signs,
    silent: Duration,
}

/// What changes while a process does anything.
#[derive(PartialEq, Eq)]
struct Signs {
    /// What the PE says.
    status: [u64; 4],
    /// Processor time of all its threads, in the kernel's ticks.
    ticks: u64,
    /// Bytes that it had read from storage and written to it; `None` where the kernel does not say.
    moved: Option<[u64; 2]>,
}

impl Life {
    pub(super) fn new(n_pes: usize) -> Life {
        Life { pes: (0..n_pes).map(|_| None).collect(), looked: Instant::now() }
    }

    /// Looks at the PEs that `watched` gives, with their processes and what they say; the first that has been silent for `limit`.
    /// Those that it does not give start anew.
    pub(super) fn look(
        &mut self,
        limit: Duration,
        watched: impl Fn(usize) -> Option<(Process, [u64; 4])>,
    ) -> Option<usize> {
        let since = self.looked.elapsed();
        if since < PERIOD {
            return None;
        }
        self.looked = Instant::now();
        // Where this process itself was stopped, as with all others of the job, that time does not count.
        let since = since.min(2 * PERIOD);
        let mut silent = None;
        for (pe, seen) in self.pes.iter_mut().enumerate() {
            let signs = watched(pe).and_then(|(process, status)| Signs::of(process, pe, status));
            *seen = match (signs, seen.take()) {
                (None, _) => None,
                (Some(signs), Some(before)) if before.signs == signs => {
                    Some(Seen { signs, silent: before.silent + since })
                }
                (Some(signs), _) => Some(Seen { signs, silent: Duration::ZERO }),
            };
            if seen.as_ref().is_some_and(|seen| seen.silent >= limit) {
                silent.get_or_insert(pe);
            }
        }
        silent
    }
}

impl Signs {
    /// `None` where `/proc` does not say.
    fn of(process: Process, pe: usize, status: [u64; 4]) -> Option<Signs> {
        let (Process::Child(pid) | Process::Said(pid)) = process;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses, and may have some itself.
        let (head, fields) = stat.rsplit_once(')')?;
        if matches!(process, Process::Said(_)) && !head.ends_with(&process_name(pe)) {
            return None;
        }
        let field = |at: usize| fields.split_whitespace().nth(at)?.parse::<u64>().ok();
        // Fields 14 and 15 of the line, utime and stime; the first after the name is field 3.
        let ticks = field(11)? + field(12)?;
        let io = fs::read_to_string(format!("/proc/{pid}/io")).ok();
        let bytes = |name: &str| io.as_ref()?.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
        let moved = bytes("read_bytes:").zip(bytes("write_bytes:")).map(|(read, written)| [read, written]);
        Some(Signs { status, ticks, moved })
    }
}

/// What a PE's process calls itself, for `ps` and `top`: at most 15 bytes.
pub(super) fn process_name(pe: usize) -> String {
    format!("aristos-pe{pe}")
}
