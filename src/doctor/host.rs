//! Requirements of every run.

use super::{Facts, Finding, Need};

/// Approximate memory of the bundled example, bytes.
const MIN_MEMORY: u64 = 512 << 20;
/// Approximate number of files that a PE opens: its own, and one segment per peer.
const MIN_FILES: u64 = 256;

pub(super) fn examine(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![build(facts), Finding::ok("CPUs", Need::Cpu, format!("{}", facts.cpus))];
    all.push(match facts.available_bytes {
        Some(bytes) if bytes < MIN_MEMORY => Finding::fail(
            "memory",
            Need::Cpu,
            format!("{:.2} GB available", bytes as f64 / 1e9),
            "the smallest runs take half a GB: end other programs, or raise the container's limit",
        ),
        Some(bytes) => Finding::ok("memory", Need::Cpu, format!("{:.1} GB available", bytes as f64 / 1e9)),
        None => Finding::warn("memory", Need::Cpu, "/proc does not say what is available", "mount /proc"),
    });
    all.push(match &facts.memfd {
        Ok(()) => Finding::ok("shared memory", Need::Cpu, "memfd works"),
        Err(error) => Finding::fail(
            "shared memory",
            Need::Cpu,
            error.clone(),
            "PEs share memory by memfd_create and mmap: allow them (seccomp, memory limits)",
        ),
    });
    all.push(match facts.open_files {
        Some(limit) if limit < MIN_FILES => Finding::warn(
            "open files",
            Need::Cpu,
            format!("at most {limit}"),
            "a PE opens one file per PE: ulimit -n 4096",
        ),
        Some(limit) => Finding::ok("open files", Need::Cpu, format!("at most {limit}")),
        None => Finding::ok("open files", Need::Cpu, "no limit"),
    });
    all
}

fn build(facts: &Facts) -> Finding {
    let mut features = vec![];
    for (feature, enabled) in [("cuda", facts.cuda.is_some()), ("emulate", cfg!(feature = "emulate"))] {
        if enabled {
            features.push(feature);
        }
    }
    let features = if features.is_empty() { "no features".to_string() } else { features.join(", ") };
    Finding::ok("build", Need::Cpu, format!("aristos {}, {features}", env!("CARGO_PKG_VERSION")))
}
