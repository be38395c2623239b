//! Facts about this machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A device, as reported by its driver.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceFacts {
    /// For example "GPU 0 (NVIDIA A100-SXM4-40GB)".
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Memory, bytes.
    pub memory_total: u64,
    /// PCI address, "0000:07:00.0".
    pub pci: String,
    /// The reason why kernels cannot run on it, if any.
    pub unusable: Option<String>,
}

/// Facts that need a build with the feature `cuda`.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaFacts {
    /// CUDA version of the kernels' compiler, "13.0".
    pub made_by: String,
    /// The kernels' modules and architectures: "smoke: sm_80 sm_90".
    pub modules: Vec<String>,
    /// CUDA version of the driver, if there is one.
    pub driver_version: Option<String>,
    /// The visible devices, or the reason why there are none.
    pub devices: Result<Vec<DeviceFacts>, String>,
    /// NVSHMEM's host library, or the reason why it cannot be used.
    pub nvshmem: Result<LibraryFacts, String>,
    /// Version of the NVSHMEM headers that the kernels are built with.
    pub nvshmem_headers: String,
    /// NCCL, or the reason why it cannot be used.
    pub nccl: Result<LibraryFacts, String>,
    /// An error if NCCL cannot provide symmetric memory on these devices.
    pub nccl_windows: Result<(), String>,
    /// Version (major, minor) of libfabric, if it can be opened.
    pub libfabric: Option<(u32, u32)>,
}

/// A library that is opened at run time.
#[derive(Clone, Debug, PartialEq)]
pub struct LibraryFacts {
    /// Path; a bare name if the dynamic loader found it.
    pub path: PathBuf,
    /// Its version, "3.4.5".
    pub version: String,
}

/// All facts.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Parent of `sys`, `dev`, `proc` and `tmp`; "/" except in tests.
    pub root: PathBuf,
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Available memory, bytes.
    pub available_bytes: Option<u64>,
    /// CPUs this process may use.
    pub cpus: usize,
    /// An error if shared memory cannot be created.
    pub memfd: Result<(), String>,
    /// Limit of locked memory, bytes; `None` for no limit.
    pub memlock: Option<u64>,
    /// Limit of open files; `None` for no limit.
    pub open_files: Option<u64>,
    /// Size of /dev/shm, bytes, if it exists.
    pub dev_shm: Option<u64>,
    /// In builds with the feature `cuda`.
    pub cuda: Option<CudaFacts>,
}

impl Facts {
    /// Collects the facts of this machine.
    pub fn gather() -> Facts {
        use rustix::process::{Resource, getrlimit};
        let env = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect();
        let dev_shm = rustix::fs::statvfs("/dev/shm").ok().map(|fs| fs.f_blocks.saturating_mul(fs.f_frsize));
        Facts {
            root: PathBuf::from("/"),
            env,
            available_bytes: crate::shmem::available_bytes(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memfd: crate::shmem::Segment::create("aristos-doctor", 1 << 20).map(|_| ()).map_err(|e| e.to_string()),
            memlock: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            dev_shm,
            #[cfg(feature = "cuda")]
            cuda: Some(CudaFacts::gather()),
            #[cfg(not(feature = "cuda"))]
            cuda: None,
        }
    }

    /// An environment variable that is set and not empty.
    pub(super) fn env(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// `path` below the root.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The entries of a directory, sorted; empty if it does not exist.
    pub(super) fn entries(&self, dir: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path(dir)).into_iter().flatten().flatten();
        let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        all.sort();
        all
    }
}

/// The first line of a small file.
pub(super) fn line(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.lines().next()?.trim().to_string())
}

#[cfg(feature = "cuda")]
impl CudaFacts {
    fn gather() -> CudaFacts {
        use crate::gpu::cuda::{device, driver, modules, nccl};
        use crate::gpu::nvshmem;
        let devices = driver::driver().and_then(device::devices).map_err(|error| error.to_string()).map(|devices| {
            let facts = |device: device::DeviceInfo| DeviceFacts {
                unusable: device.usable().err().map(|error| error.to_string()),
                name: format!("GPU {} ({})", device.number, device.name),
                capability: device.capability,
                memory_total: device.memory_total,
                pci: device.pci,
            };
            devices.into_iter().map(facts).collect()
        });
        let nvshmem = nvshmem::find_library().map_err(|error| error.to_string()).map(|(path, library)| {
            let [major, minor, patch] = library.version;
            LibraryFacts { path, version: format!("{major}.{minor}.{patch}") }
        });
        let library = nccl::find_library();
        // A missing driver is reported elsewhere.
        let reach = driver::driver().map_or(Ok(()), |driver| device::check_reach(driver, &device::devices(driver)?));
        CudaFacts {
            made_by: modules::MADE_BY.to_string(),
            modules: modules::MODULES.iter().map(|m| format!("{}: {}", m.name, m.architectures)).collect(),
            driver_version: driver::version().map(|version| version.to_string()),
            devices,
            nvshmem,
            nvshmem_headers: nvshmem::HEADER_VERSION.to_string(),
            nccl: library
                .as_ref()
                .map(|library| LibraryFacts { path: library.path.clone(), version: library.version_text() })
                .map_err(ToString::to_string),
            nccl_windows: library.and_then(nccl::Library::check_windows).and(reach).map_err(|error| error.to_string()),
            libfabric: libfabric_version(),
        }
    }
}

/// The result of `fi_version` in the libfabric that the dynamic loader finds.
#[cfg(feature = "cuda")]
fn libfabric_version() -> Option<(u32, u32)> {
    // SAFETY: opening libfabric only registers its providers; fi_version has this type and needs no initialisation.
    let version = unsafe {
        let library = std::mem::ManuallyDrop::new(libloading::Library::new("libfabric.so.1").ok()?);
        library.get::<unsafe extern "C" fn() -> u32>(b"fi_version\0").ok()?()
    };
    Some((version >> 16, version & 0xffff))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An empty machine below a temporary directory, in a build with CUDA.
    pub fn facts() -> (tempfile::TempDir, Facts) {
        let dir = tempfile::tempdir().unwrap();
        let facts = Facts {
            root: dir.path().to_path_buf(),
            env: BTreeMap::new(),
            available_bytes: Some(8 << 30),
            cpus: 2,
            memfd: Ok(()),
            memlock: None,
            open_files: Some(1024),
            dev_shm: Some(8 << 30),
            cuda: Some(CudaFacts {
                made_by: "13.0".into(),
                modules: vec!["layer_ampere: sm_80 sm_90".into()],
                driver_version: None,
                devices: Err("no CUDA driver here".into()),
                nvshmem: Err("no NVSHMEM here".into()),
                nvshmem_headers: "3.4.5".into(),
                nccl: Err("no NCCL here".into()),
                nccl_windows: Err("no NCCL here".into()),
                libfabric: None,
            }),
        };
        (dir, facts)
    }

    /// [`facts`] with a driver and two devices on two NUMA nodes, the first below a bridge.
    pub fn with_gpus() -> (tempfile::TempDir, Facts) {
        let (dir, mut facts) = facts();
        let mut devices = Vec::new();
        for (name, path, node) in [
            ("GPU 0 (A)", "pci0000:00/0000:00:01.1/0000:07:00.0", 1),
            ("GPU 1 (B)", "pci0000:20/0000:20:01.1/0000:27:00.0", 0),
        ] {
            let device = facts.path("/sys/devices").join(path);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
            let pci = device.file_name().unwrap().to_string_lossy().into_owned();
            fs::create_dir_all(facts.path("/sys/bus/pci/devices")).unwrap();
            std::os::unix::fs::symlink(&device, facts.path("/sys/bus/pci/devices").join(&pci)).unwrap();
            let name = name.to_string();
            devices.push(DeviceFacts { name, capability: (8, 0), memory_total: 40_000_000_000, pci, unusable: None });
        }
        let cuda = facts.cuda.as_mut().unwrap();
        cuda.devices = Ok(devices);
        cuda.driver_version = Some("13.0".into());
        (dir, facts)
    }

    #[test]
    fn facts_of_this_machine_can_be_collected() {
        let facts = Facts::gather();
        assert!(facts.cpus >= 1 && facts.memfd.is_ok());
        assert!(super::super::cpu_runs(&super::super::examine(&facts)));
        assert_eq!(facts.cuda.is_some(), cfg!(feature = "cuda"));
    }
}
