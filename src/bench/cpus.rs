//! The CPUs of PEs during a measurement, and the caches that these share.
//!
//! A latency between two PEs depends mainly on their CPUs, and virtual CPUs migrate. So every figure comes with the CPUs at its start and end, and
//! the caches that they share according to the operating system.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::job::host::allowed_cpus;

/// Pins this PE to a CPU of its own, if there are enough: two PEs on one CPU would measure the scheduler. Skips CPUs that PEs of another
/// measurement have claimed.
pub fn pin(pe: usize, n_pes: usize) {
    /// The claim of this process on its CPU: an abstract socket name is unique while the socket is open.
    static CLAIM: OnceLock<UnixDatagram> = OnceLock::new();
    let cpus = allowed_cpus();
    if n_pes > cpus.len() {
        return;
    }
    for &cpu in cpus.iter().cycle().skip(pe).take(cpus.len()) {
        let name = SocketAddr::from_abstract_name(format!("aristos-cpu-{cpu}"));
        let Ok(claim) = name.and_then(|name| UnixDatagram::bind_addr(&name)) else { continue };
        let mut own = CpuSet::new();
        own.set(cpu);
        // Without the permission to pin, the measurement continues unpinned.
        if sched_setaffinity(None, &own).is_ok() {
            let _ = CLAIM.set(claim);
        }
        return;
    }
}

/// The name of the CPU according to the kernel.
pub fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| "CPU of unknown model".to_string(), |(_, name)| name.trim().to_string())
}

/// The CPUs of a PE during a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSpan {
    /// The CPU at the start.
    pub start: usize,
    /// The CPU at the end.
    pub end: usize,
    /// Number of CPUs on which the PE was allowed to run: 1 if it was pinned.
    pub allowed: usize,
}

impl CpuSpan {
    /// Records the CPU at the start of a measurement.
    pub fn start_here() -> CpuSpan {
        let cpu = sched_getcpu();
        CpuSpan { start: cpu, end: cpu, allowed: allowed_cpus().len() }
    }

    /// Records the CPU at the end of the measurement.
    pub fn end_here(self) -> CpuSpan {
        CpuSpan { end: sched_getcpu(), ..self }
    }
}

/// The resources that two CPUs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nearness {
    /// Both PEs were on one CPU, where the scheduler alternates between them.
    SameCpu,
    /// Two threads of one core.
    SameCore,
    /// The last-level cache.
    SameL3,
    /// The package, and no cache.
    SamePackage,
    /// Only memory.
    Apart,
    /// The operating system does not provide it.
    Unknown,
}

impl Nearness {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Nearness::SameCpu => "same CPU",
            Nearness::SameCore => "same core",
            Nearness::SameL3 => "same L3",
            Nearness::SamePackage => "same package",
            Nearness::Apart => "apart",
            Nearness::Unknown => "unknown",
        }
    }
}

/// The CPUs of the two PEs of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuPair {
    /// The CPUs of each PE.
    #[serde(rename = "seats")]
    pub cpu_spans: [CpuSpan; 2],
    /// Whether both were on one CPU, at the start or at the end.
    pub shared_cpu: bool,
    /// The resources that the CPUs at the end share.
    pub nearness: Nearness,
}

impl CpuPair {
    /// Compares the CPUs of two PEs of this host.
    pub fn of(cpu_spans: [CpuSpan; 2]) -> CpuPair {
        let [a, b] = cpu_spans;
        let nearness = nearness(Path::new("/sys/devices/system/cpu"), a.end, b.end);
        CpuPair { cpu_spans, shared_cpu: a.start == b.start || a.end == b.end, nearness }
    }

    /// The text in tables: "0 1 same L3", "0+1 1 same CPU".
    pub fn render(&self) -> String {
        let span = |s: CpuSpan| if s.start == s.end { s.end.to_string() } else { format!("{}+{}", s.start, s.end) };
        let name = if self.shared_cpu { Nearness::SameCpu.name() } else { self.nearness.name() };
        format!("{} {} {name}", span(self.cpu_spans[0]), span(self.cpu_spans[1]))
    }
}

/// Compares the files that Linux has for each CPU below `root`.
fn nearness(root: &Path, a: usize, b: usize) -> Nearness {
    if a == b {
        return Nearness::SameCpu;
    }
    let read = |cpu: usize, file: &str| {
        fs::read_to_string(root.join(format!("cpu{cpu}")).join(file)).ok().map(|text| text.trim().to_string())
    };
    let same = |file: &str| match (read(a, file), read(b, file)) {
        (Some(a), Some(b)) => Some(a == b),
        _ => None,
    };
    match (same("topology/physical_package_id"), same("topology/core_id"), same("cache/index3/shared_cpu_list")) {
        (Some(true), Some(true), _) => Nearness::SameCore,
        (_, _, Some(true)) => Nearness::SameL3,
        (Some(true), ..) => Nearness::SamePackage,
        (Some(false), ..) => Nearness::Apart,
        (None, ..) => Nearness::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearness_is_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        // Two threads of a core, another core of the same cache, one of another cache, one of another package.
        let cpus = [("0", "0", "0-2"), ("0", "0", "0-2"), ("0", "1", "0-2"), ("0", "2", "3"), ("1", "0", "4")];
        for (cpu, (package, core, l3)) in cpus.iter().enumerate() {
            for (file, text) in [
                ("topology/physical_package_id", package),
                ("topology/core_id", core),
                ("cache/index3/shared_cpu_list", l3),
            ] {
                let path = root.path().join(format!("cpu{cpu}")).join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{text}\n")).unwrap();
            }
        }
        let near = [0, 1, 2, 3, 4, 5].map(|b| nearness(root.path(), 0, b));
        use Nearness::*;
        assert_eq!(near, [SameCpu, SameCore, SameL3, SamePackage, Apart, Unknown]);
    }

    #[test]
    fn shared_cpu_at_the_start_is_reported() {
        let span = |start, end| CpuSpan { start, end, allowed: 2 };
        let placement = CpuPair::of([span(0, 1), span(0, 0)]);
        assert!(placement.shared_cpu);
        assert_eq!(placement.render(), "0+1 0 same CPU");
        assert!(!CpuPair::of([span(0, 0), span(1, 1)]).shared_cpu);
    }
}
