//! Requirements of runs over several hosts, and known problems: NICs near the GPUs, NVSHMEM's plugins, libfabric, the
//! process manager, locked memory. docs/cuda.md lists the sources.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::facts::line;
use super::{CudaFacts, Facts, Finding, Need};
use crate::job::heap;

/// Larger regions, in bytes, are slow with the versions of libfabric in [`SLOW_LIBFABRIC`].
const SLOW_REGION: u64 = 3 << 29;
/// The first version of libfabric with a slow cxi provider, and the first with a fast one again.
const SLOW_LIBFABRIC: [(u32, u32); 2] = [(1, 22), (2, 5)];

/// A network interface.
struct Nic {
    /// For example "cxi0", "mlx5_2".
    name: String,
    slingshot: bool,
    /// Canonical path of its device in /sys.
    device: Option<PathBuf>,
    numa: Option<i32>,
}

pub(super) fn examine(facts: &Facts) -> Vec<Finding> {
    let nics = nics(facts);
    let mut all = vec![list(&nics)];
    let Some(cuda) = &facts.cuda else { return all };
    let several_hosts = !nics.is_empty() || facts.env("SLURM_JOB_ID").is_some();
    all.extend(affinity(facts, cuda, &nics));
    all.extend(plugins(facts, cuda));
    if several_hosts {
        all.push(memlock(facts));
        all.push(process_manager(facts));
        all.extend(gpu_binding(facts));
    }
    if nics.iter().any(|nic| nic.slingshot) || facts.env("NVSHMEM_REMOTE_TRANSPORT") == Some("libfabric") {
        all.extend(slingshot(facts, cuda));
    }
    all
}

fn nics(facts: &Facts) -> Vec<Nic> {
    let mut all = Vec::new();
    for (class, slingshot) in [("cxi", true), ("infiniband", false), ("net", true)] {
        for entry in facts.entries(&format!("/sys/class/{class}")) {
            let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            // If no cxi device is visible, use Slingshot's Ethernet interface.
            let cxi_known = all.iter().any(|nic: &Nic| nic.slingshot && nic.name.starts_with("cxi"));
            if class == "net" && (!name.starts_with("hsn") || cxi_known) {
                continue;
            }
            let numa = line(&entry.join("device/numa_node")).and_then(|text| text.parse().ok());
            let device = fs::canonicalize(entry.join("device")).ok();
            all.push(Nic { name, slingshot, device, numa: numa.filter(|node| *node >= 0) });
        }
    }
    all
}

fn list(nics: &[Nic]) -> Finding {
    if nics.is_empty() {
        return Finding::ok("NICs", Need::Network, "no InfiniBand, no Slingshot: PEs on one host");
    }
    let describe = |nic: &Nic| {
        let kind = if nic.slingshot { "Slingshot" } else { "InfiniBand" };
        let numa = nic.numa.map_or(String::new(), |node| format!(", NUMA node {node}"));
        format!("{} ({kind}{numa})", nic.name)
    };
    Finding::ok("NICs", Need::Network, nics.iter().map(describe).collect::<Vec<_>>().join(", "))
}

/// The NUMA node of a PCI device.
pub(super) fn numa(facts: &Facts, pci: &str) -> Option<i32> {
    let text = line(&facts.path("/sys/bus/pci/devices").join(pci).join("numa_node"))?;
    text.parse().ok().filter(|node| *node >= 0)
}

/// The NICs near each GPU: those that share the most PCI bridges with it, otherwise those on its NUMA node.
fn affinity(facts: &Facts, cuda: &CudaFacts, nics: &[Nic]) -> Vec<Finding> {
    let mut all = Vec::new();
    let devices = cuda.devices.as_deref().unwrap_or_default();
    if nics.is_empty() {
        return all;
    }
    for gpu in devices {
        let place = fs::canonicalize(facts.path("/sys/bus/pci/devices").join(&gpu.pci)).ok();
        let node = numa(facts, &gpu.pci);
        let proximity = |nic: &Nic| {
            let bridges = place.as_deref().zip(nic.device.as_deref()).map_or(0, |(gpu, nic)| bridges(gpu, nic));
            (bridges, node.is_some() && node == nic.numa)
        };
        let best = nics.iter().map(proximity).max().unwrap_or((0, false));
        if best == (0, false) {
            all.push(Finding::warn(
                "affinity",
                Need::Network,
                format!("{}: no NIC is near it", gpu.name),
                "puts cross sockets: bind each PE's CPUs to the node of its GPU, and check the machine's topology",
            ));
            continue;
        }
        let names: Vec<&str> = nics.iter().filter(|nic| proximity(nic) == best).map(|nic| nic.name.as_str()).collect();
        let how = if best.0 > 0 { "behind the same PCI bridge" } else { "on the same NUMA node" };
        all.push(Finding::ok("affinity", Need::Network, format!("{}: {}, {how}", gpu.name, names.join(", "))));
    }
    all
}

/// Number of PCI bridges below the root complex that two devices share, from their paths in /sys.
fn bridges(a: &Path, b: &Path) -> usize {
    let common = a.components().zip(b.components()).take_while(|(a, b)| a == b);
    common
        .filter(|(part, _)| matches!(part, Component::Normal(name) if is_pci_function(&name.to_string_lossy())))
        .count()
}

/// Matches names such as "0000:07:00.0".
fn is_pci_function(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let hex = |text: &str, len| text.len() == len && text.chars().all(|c| c.is_ascii_hexdigit());
    matches!(parts[..], [domain, bus, slot, function]
        if domain.len() >= 4 && hex(domain, domain.len()) && hex(bus, 2) && hex(slot, 2) && hex(function, 1))
}

/// Checks the plugins in the folder of NVSHMEM's host library. NVSHMEM opens plugins by name and might find those of
/// another version, which would be incompatible.
fn plugins(facts: &Facts, cuda: &CudaFacts) -> Vec<Finding> {
    let Ok(library) = &cuda.nvshmem else { return Vec::new() };
    let Some(dir) = library.path.parent().filter(|dir| dir.is_absolute()) else { return Vec::new() };
    let named = |dir: &Path, prefix: &str| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let kinds = names.filter_map(|name| Some(name.strip_prefix(prefix)?.strip_suffix(".so.3")?.to_string()));
        let mut kinds: Vec<String> = kinds.collect();
        kinds.sort();
        kinds
    };
    let (transports, bootstraps) = (named(dir, "nvshmem_transport_"), named(dir, "nvshmem_bootstrap_"));
    let mut all = vec![Finding::ok(
        "plugins",
        Need::Network,
        format!("transports {}; bootstraps {}", join_or_none(&transports), join_or_none(&bootstraps)),
    )];
    if !bootstraps.iter().any(|kind| kind == "uid") {
        all.push(Finding::fail(
            "plugins",
            Need::Cuda,
            format!("no nvshmem_bootstrap_uid.so.3 in {}", dir.display()),
            "PEs bootstrap by a unique id: set NVSHMEM_HOME to a complete NVSHMEM",
        ));
    }
    if let Some(wanted) = facts.env("NVSHMEM_REMOTE_TRANSPORT").filter(|wanted| *wanted != "none")
        && !transports.iter().any(|kind| kind == wanted)
    {
        all.push(Finding::fail(
            "plugins",
            Need::Network,
            format!("NVSHMEM_REMOTE_TRANSPORT={wanted}, and there is no such plugin in {}", dir.display()),
            format!("use one of {}, or set another NVSHMEM_HOME", join_or_none(&transports)),
        ));
    }
    for other in facts.env("LD_LIBRARY_PATH").unwrap_or_default().split(':').filter(|other| !other.is_empty()) {
        let other = Path::new(other);
        if other != dir
            && !(named(other, "nvshmem_transport_").is_empty() && named(other, "nvshmem_bootstrap_").is_empty())
        {
            all.push(Finding::warn(
                "plugins",
                Need::Network,
                format!("LD_LIBRARY_PATH has plugins of another NVSHMEM, in {}", other.display()),
                "plugins must be of the host library's version: take it out, or set NVSHMEM_HOME to that NVSHMEM",
            ));
        }
    }
    all
}

fn join_or_none(names: &[String]) -> String {
    if names.is_empty() { "none".to_string() } else { names.join(" ") }
}

fn memlock(facts: &Facts) -> Finding {
    match facts.memlock {
        None => Finding::ok("memlock", Need::Network, "no limit"),
        Some(bytes) => Finding::warn(
            "memlock",
            Need::Network,
            format!("at most {} KiB of locked memory", bytes >> 10),
            "NICs register memory, which locks it: ulimit -l unlimited, or LimitMEMLOCK=infinity for slurmd",
        ),
    }
}

/// The process manager, and whether NVSHMEM's own bootstrap supports it. PEs bootstrap with a unique id, so it does not
/// have to.
fn process_manager(facts: &Facts) -> Finding {
    let has = |prefix: &str| facts.env.keys().any(|name| name.starts_with(prefix));
    let cray = facts.env("SLURM_MPI_TYPE").is_some_and(|kind| kind.starts_with("cray")) || has("PMI_CONTROL_PORT");
    let interface = facts.env("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME");
    if cray {
        let found = "Cray's PMI, which NVSHMEM cannot use";
        return match interface {
            Some(interface) if interface != "lo" => {
                Finding::ok("PMI", Need::Network, format!("{found}; the unique id goes over {interface}"))
            }
            _ => Finding::warn(
                "PMI",
                Need::Network,
                found,
                "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=hsn0 for the unique id, or srun --mpi=pmi2",
            ),
        };
    }
    let kind = [("PMIX_", "PMIx"), ("PMI_", "PMI"), ("SLURM_JOB_ID", "Slurm without PMI")];
    let kind = kind.iter().find(|(prefix, _)| has(prefix)).map_or("none", |(_, kind)| kind);
    Finding::ok("PMI", Need::Network, format!("{kind}; PEs meet by NVSHMEM's unique id"))
}

/// A task that sees only its own GPU cannot map its neighbours' memory.
fn gpu_binding(facts: &Facts) -> Option<Finding> {
    let tasks = facts.env("SLURM_NTASKS_PER_NODE").or(facts.env("SLURM_STEP_TASKS_PER_NODE"));
    let several = tasks.and_then(|tasks| tasks.split('(').next()?.parse::<u32>().ok()).is_none_or(|tasks| tasks > 1);
    let bound = facts.env("SLURM_GPUS_PER_TASK").map(|n| format!("--gpus-per-task={n}")).or_else(|| {
        let bind = facts.env("SLURM_GPU_BIND").filter(|bind| !bind.contains("none"));
        bind.map(|bind| format!("--gpu-bind={bind}"))
    });
    let bound = bound.filter(|_| several)?;
    Some(Finding::warn(
        "GPU binding",
        Need::Network,
        format!("{bound}: each task sees its own GPU alone, and CUDA cannot map the others' memory"),
        "use srun --gpus-per-node=4 --gpu-bind=none, and let each PE choose by its local rank",
    ))
}

/// NVSHMEM over libfabric and Slingshot.
fn slingshot(facts: &Facts, cuda: &CudaFacts) -> Vec<Finding> {
    let mut all = Vec::new();
    for (name, wanted, why) in [
        ("NVSHMEM_REMOTE_TRANSPORT", "libfabric", "Slingshot has no InfiniBand verbs"),
        ("NVSHMEM_LIBFABRIC_PROVIDER", "cxi", "Slingshot's provider is cxi"),
        ("NVSHMEM_DISABLE_CUDA_VMM", "1", "the cxi provider cannot register memory of CUDA's VMM"),
        ("FI_CXI_DISABLE_HOST_REGISTER", "1", "registering host memory with CUDA can hang in the cxi provider"),
        ("FI_MR_CACHE_MONITOR", "userfaultfd", "the default monitor misses frees"),
    ] {
        if facts.env(name) != Some(wanted) {
            let is = facts.env(name).map_or("is not set".to_string(), |value| format!("is {value}"));
            let found = format!("{name} {is}; {why}");
            all.push(Finding::warn("Slingshot", Need::Network, found, format!("export {name}={wanted}")));
        }
    }
    // If the variable is not set, a job's PEs get a heap of the required size.
    let size = facts.env(heap::SIZE).and_then(heap::bytes);
    if let (Some(value), None) = (facts.env(heap::SIZE), size) {
        let found = format!("{} is {value}, which is no size", heap::SIZE);
        all.push(Finding::warn(
            "Slingshot",
            Need::Network,
            found,
            format!("unset {}: it is made as large as needed", heap::SIZE),
        ));
    }
    match cuda.libfabric {
        None => all.push(Finding::warn(
            "libfabric",
            Need::Network,
            "libfabric.so.1 was not found",
            "load the system's module (module load libfabric), or add its directory to LD_LIBRARY_PATH",
        )),
        Some(version @ (major, minor)) => {
            let slow = version >= SLOW_LIBFABRIC[0] && version < SLOW_LIBFABRIC[1];
            let large = size.is_none_or(|bytes| bytes > SLOW_REGION);
            if slow && large {
                all.push(Finding::warn(
                    "libfabric",
                    Need::Network,
                    format!("{major}.{minor}: puts fall from 20 to 1.7 GB/s with a symmetric heap above 1.5 GiB"),
                    "keep NVSHMEM_SYMMETRIC_SIZE at most 1536M (a job prints what it needs), or use libfabric 2.5 or newer",
                ));
            } else {
                all.push(Finding::ok("libfabric", Need::Network, format!("{major}.{minor}")));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::{facts, with_gpus};
    use super::super::{Level, LibraryFacts};
    use super::*;

    /// Creates a network device in /sys at a PCI path, as the kernel links it.
    fn nic(facts: &Facts, class: &str, name: &str, device: &str, node: i32) {
        let device = facts.path("/sys/devices").join(device);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
        let entry = facts.path("/sys/class").join(class).join(name);
        fs::create_dir_all(&entry).unwrap();
        std::os::unix::fs::symlink(&device, entry.join("device")).unwrap();
    }

    fn of<'a>(all: &'a [Finding], topic: &str) -> Vec<&'a Finding> {
        all.iter().filter(|f| f.topic == topic).collect()
    }

    /// A Perlmutter node with its NICs on different PCI roots, and a correct environment.
    fn perlmutter() -> (tempfile::TempDir, Facts) {
        let (dir, mut facts) = with_gpus();
        nic(&facts, "cxi", "cxi0", "pci0000:00/0000:00:01.1/0000:05:00.0", 1);
        nic(&facts, "cxi", "cxi1", "pci0000:40/0000:40:01.1/0000:45:00.0", 0);
        nic(&facts, "net", "hsn0", "pci0000:00/0000:00:01.1/0000:05:00.0", 1);
        nic(&facts, "net", "eth0", "pci0000:80/0000:81:00.0", 0);
        for (name, value) in [
            ("SLURM_JOB_ID", "1"),
            ("NVSHMEM_REMOTE_TRANSPORT", "libfabric"),
            ("NVSHMEM_LIBFABRIC_PROVIDER", "cxi"),
            ("NVSHMEM_DISABLE_CUDA_VMM", "1"),
            ("NVSHMEM_SYMMETRIC_SIZE", "1G"),
            ("FI_CXI_DISABLE_HOST_REGISTER", "1"),
            ("FI_MR_CACHE_MONITOR", "userfaultfd"),
        ] {
            facts.env.insert(name.into(), value.into());
        }
        facts.cuda.as_mut().unwrap().libfabric = Some((1, 22));
        (dir, facts)
    }

    #[test]
    fn single_host_has_no_network_findings() {
        let (_dir, facts) = facts();
        let all = examine(&facts);
        assert_eq!((all.len(), all[0].level), (1, Level::Ok), "{all:?}");
    }

    #[test]
    fn valid_environment_is_ok() {
        let (_dir, facts) = perlmutter();
        let all = examine(&facts);
        assert!(all.iter().all(|f| f.level == Level::Ok), "{all:#?}");
        assert_eq!(of(&all, "NICs")[0].found, "cxi0 (Slingshot, NUMA node 1), cxi1 (Slingshot, NUMA node 0)");
        let affinity: Vec<&str> = of(&all, "affinity").iter().map(|f| f.found.as_str()).collect();
        assert_eq!(affinity, ["GPU 0 (A): cxi0, behind the same PCI bridge", "GPU 1 (B): cxi1, on the same NUMA node"]);
    }

    #[test]
    fn invalid_variables_are_reported() {
        let (_dir, facts) = perlmutter();
        for (name, invalid) in [
            ("NVSHMEM_REMOTE_TRANSPORT", Some("ibrc")),
            ("NVSHMEM_LIBFABRIC_PROVIDER", None),
            ("NVSHMEM_DISABLE_CUDA_VMM", Some("0")),
            ("FI_CXI_DISABLE_HOST_REGISTER", None),
            ("FI_MR_CACHE_MONITOR", Some("memhooks")),
            ("NVSHMEM_SYMMETRIC_SIZE", Some("plenty")),
        ] {
            let mut facts = facts.clone();
            match invalid {
                Some(value) => facts.env.insert(name.into(), value.into()),
                None => facts.env.remove(name),
            };
            let all = examine(&facts);
            let findings = of(&all, "Slingshot");
            assert_eq!(findings.len(), 1, "{name}: {findings:?}");
            assert!(findings[0].level == Level::Warn && findings[0].found.contains(name), "{findings:?}");
        }
    }

    #[test]
    fn slow_libfabric_is_reported_for_a_large_heap() {
        let (_dir, mut facts) = perlmutter();
        let level = |facts: &Facts| of(&examine(facts), "libfabric")[0].level;
        for (version, size, expected) in [
            ((1, 22), "1536M", Level::Ok),
            ((1, 22), "1537M", Level::Warn),
            ((2, 4), "4G", Level::Warn),
            ((2, 5), "4G", Level::Ok),
            ((1, 15), "4G", Level::Ok),
        ] {
            facts.cuda.as_mut().unwrap().libfabric = Some(version);
            facts.env.insert("NVSHMEM_SYMMETRIC_SIZE".into(), size.into());
            assert_eq!(level(&facts), expected, "{version:?} {size}");
        }
        facts.cuda.as_mut().unwrap().libfabric = None;
        assert_eq!(level(&facts), Level::Warn);
    }

    #[test]
    fn slurm_pitfalls_are_reported() {
        let (_dir, facts) = perlmutter();
        let with = |pairs: &[(&str, &str)]| {
            let mut facts = facts.clone();
            facts.env.extend(pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())));
            examine(&facts)
        };
        let cray = with(&[("SLURM_MPI_TYPE", "cray_shasta")]);
        assert!(
            of(&cray, "PMI")[0].level == Level::Warn && of(&cray, "PMI")[0].cure.as_ref().unwrap().contains("hsn0")
        );
        let cured = with(&[("PMI_CONTROL_PORT", "1"), ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "hsn0")]);
        assert!(of(&cured, "PMI")[0].level == Level::Ok && of(&cured, "PMI")[0].found.contains("hsn0"));
        assert!(of(&with(&[("PMIX_RANK", "0")]), "PMI")[0].found.starts_with("PMIx"));
        assert_eq!(of(&with(&[("SLURM_GPUS_PER_TASK", "1")]), "GPU binding").len(), 1);
        assert_eq!(of(&with(&[("SLURM_GPUS_PER_TASK", "4"), ("SLURM_NTASKS_PER_NODE", "1")]), "GPU binding").len(), 0);
        assert_eq!(of(&with(&[("SLURM_GPU_BIND", "none")]), "GPU binding").len(), 0);
        assert_eq!(of(&with(&[("SLURM_GPU_BIND", "single:1")]), "GPU binding").len(), 1);
        let mut small = facts.clone();
        small.memlock = Some(64 << 10);
        assert!(of(&examine(&small), "memlock")[0].found.contains("64 KiB"));
    }

    #[test]
    fn plugins_are_listed_and_unknown_ones_reported() {
        let (dir, mut facts) = perlmutter();
        let lib = dir.path().join("nvshmem/lib");
        let other = dir.path().join("other");
        for place in [&lib, &other] {
            fs::create_dir_all(place).unwrap();
        }
        for name in ["nvshmem_transport_libfabric.so.3", "nvshmem_transport_ibrc.so.3", "nvshmem_bootstrap_uid.so.3"] {
            fs::write(lib.join(name), "").unwrap();
        }
        let library = LibraryFacts { path: lib.join("libnvshmem_host.so.3"), version: "3.4.5".into() };
        facts.cuda.as_mut().unwrap().nvshmem = Ok(library);
        facts.env.insert("LD_LIBRARY_PATH".into(), format!("{}:{}", lib.display(), other.display()));
        let all = examine(&facts);
        let findings = of(&all, "plugins");
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].found, "transports ibrc libfabric; bootstraps uid");

        fs::write(other.join("nvshmem_transport_ucx.so.3"), "").unwrap();
        fs::remove_file(lib.join("nvshmem_transport_libfabric.so.3")).unwrap();
        fs::remove_file(lib.join("nvshmem_bootstrap_uid.so.3")).unwrap();
        let all = examine(&facts);
        let levels: Vec<Level> = of(&all, "plugins").iter().map(|f| f.level).collect();
        assert_eq!(levels, [Level::Ok, Level::Fail, Level::Fail, Level::Warn], "{all:?}");
    }

    #[test]
    fn gpu_without_a_local_nic_is_reported() {
        let (_dir, facts) = with_gpus();
        nic(&facts, "infiniband", "mlx5_0", "pci0000:c0/0000:c0:01.1/0000:c1:00.0", 7);
        let all = examine(&facts);
        assert_eq!(of(&all, "NICs")[0].found, "mlx5_0 (InfiniBand, NUMA node 7)");
        assert!(of(&all, "affinity").iter().all(|f| f.level == Level::Warn), "{all:?}");
        // Slingshot is visible only as an Ethernet interface.
        nic(&facts, "net", "hsn0", "pci0000:00/0000:00:01.1/0000:05:00.0", 1);
        assert!(of(&examine(&facts), "NICs")[0].found.ends_with("hsn0 (Slingshot, NUMA node 1)"));
    }

    #[test]
    fn pci_functions_are_recognised_in_a_path() {
        for (name, is) in [
            ("0000:07:00.0", true),
            ("10000:07:1f.7", true),
            ("pci0000:00", false),
            ("0000:07", false),
            ("numa", false),
        ] {
            assert_eq!(is_pci_function(name), is, "{name}");
        }
        let root = Path::new("/sys/devices/pci0000:00/0000:00:01.1");
        assert_eq!(bridges(&root.join("0000:05:00.0"), &root.join("0000:07:00.0")), 1);
        assert_eq!(
            bridges(&root.join("0000:05:00.0"), Path::new("/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0")),
            0
        );
    }
}
