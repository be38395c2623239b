//! Where PEs ran while they measured: their CPUs, and how near these are to each other.
//!
//! A latency between two PEs is first of all that of the two CPUs they are on, and virtual CPUs move. So every figure has, beside it,
//! the CPUs at its start and end, and what they share according to the operating system.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::job::host::allowed_cpus;

/// Keeps this PE on a CPU of its own where there are enough: a measurement of two PEs that the scheduler leaves on one CPU
/// measures the scheduler. A CPU that a PE of another measurement has taken is left to it.
pub fn pin(pe: usize, n_pes: usize) {
    /// This process's CPU: as long as the socket is there, nobody else can have one of its name.
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
        // Where pinning is not allowed, the measurement goes on without it.
        if sched_setaffinity(None, &own).is_ok() {
            let _ = CLAIM.set(claim);
        }
        return;
    }
}

/// The CPU's name, as the kernel gives it.
pub fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| "CPU of unknown model".to_string(), |(_, name)| name.trim().to_string())
}

/// Where one PE was during one measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSpan {
    /// The CPU at the start.
    pub start: usize,
    /// The CPU at the end.
    pub end: usize,
    /// How many CPUs it was allowed to run on: 1 when it was pinned.
    pub allowed: usize,
}

impl CpuSpan {
    /// At the start of a measurement.
    pub fn take() -> CpuSpan {
        let cpu = sched_getcpu();
        CpuSpan { start: cpu, end: cpu, allowed: allowed_cpus().len() }
    }

    /// At its end.
    pub fn leave(self) -> CpuSpan {
        CpuSpan { end: sched_getcpu(), ..self }
    }
}

/// What two CPUs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nearness {
    /// They are the same: two PEs there take turns.
    SameCpu,
    /// Two threads of one core.
    SameCore,
    /// The last-level cache.
    SameL3,
    /// The package, and no cache.
    SamePackage,
    /// Nothing but memory.
    Apart,
    /// The operating system does not say.
    Unknown,
}

impl Nearness {
    /// Its name in tables.
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

/// Where the two PEs of a figure were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuPair {
    /// Of each PE.
    pub seats: [CpuSpan; 2],
    /// Whether they were on one CPU, at the start or at the end.
    pub shared_cpu: bool,
    /// What the CPUs at the end share.
    pub nearness: Nearness,
}

impl CpuPair {
    /// From where both PEs were, on one host whose CPUs are described below `/sys/devices/system/cpu`.
    pub fn of(seats: [CpuSpan; 2]) -> CpuPair {
        let [a, b] = seats;
        let nearness = nearness(Path::new("/sys/devices/system/cpu"), a.end, b.end);
        CpuPair { seats, shared_cpu: a.start == b.start || a.end == b.end, nearness }
    }

    /// As in the table: "0 1 same L3", "0+1 1 same CPU".
    pub fn render(&self) -> String {
        let seat = |s: CpuSpan| if s.start == s.end { s.end.to_string() } else { format!("{}+{}", s.start, s.end) };
        let name = if self.shared_cpu { Nearness::SameCpu.name() } else { self.nearness.name() };
        format!("{} {} {name}", seat(self.seats[0]), seat(self.seats[1]))
    }
}

/// By the files that Linux has for each CPU.
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
    fn nearness_is_read_from_the_files_of_the_cpus() {
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
    fn a_shared_cpu_is_said_even_if_it_was_left() {
        let seat = |start, end| CpuSpan { start, end, allowed: 2 };
        let placement = CpuPair::of([seat(0, 1), seat(0, 0)]);
        assert!(placement.shared_cpu);
        assert_eq!(placement.render(), "0+1 0 same CPU");
        assert!(!CpuPair::of([seat(0, 0), seat(1, 1)]).shared_cpu);
    }
}
