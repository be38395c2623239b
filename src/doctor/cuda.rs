//! Requirements of runs on CUDA devices: driver, devices, kernels, NVSHMEM or NCCL.

use super::facts::{CudaFacts, LibraryFacts, line};
use super::{DeviceFacts, Facts, Finding, Need};

/// Containers often have a smaller /dev/shm, too small for CUDA and MPI.
const MIN_DEV_SHM: u64 = 256 << 20;

pub(super) fn examine(facts: &Facts) -> Vec<Finding> {
    let Some(cuda) = &facts.cuda else {
        let installed = facts.path("/proc/driver/nvidia/version").exists();
        let found = if installed { "an NVIDIA driver is here" } else { "no NVIDIA driver is here" };
        return vec![Finding::fail(
            "cuda",
            Need::Cuda,
            format!("this build has no CUDA; {found}"),
            "cargo build --release --features cuda (docs/cuda.md)",
        )];
    };
    let mut all = vec![driver(facts, cuda)];
    if let Ok(devices) = &cuda.devices {
        all.extend(devices.iter().map(|device| one_device(facts, device)));
        if devices.is_empty() {
            all.push(Finding::fail(
                "devices",
                Need::Cuda,
                "the driver sees no device",
                "check CUDA_VISIBLE_DEVICES, the container's options (--gpus all), and nvidia-smi",
            ));
        } else {
            all.push(mps(facts, devices.len()));
        }
    }
    all.push(kernels(cuda));
    all.push(nvshmem(cuda));
    all.push(nccl(cuda));
    if let Some(bytes) = facts.dev_shm.filter(|bytes| *bytes < MIN_DEV_SHM) {
        all.push(Finding::warn(
            "/dev/shm",
            Need::Cuda,
            format!("{} MB", bytes / 1_000_000),
            "NVSHMEM and MPI libraries share memory there: docker run --shm-size=8g",
        ));
    }
    all
}

fn driver(facts: &Facts, cuda: &CudaFacts) -> Finding {
    let module = line(&facts.path("/proc/driver/nvidia/version"));
    let number = module.as_deref().and_then(|line| {
        line.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'))
    });
    match (&cuda.devices, &cuda.driver_version) {
        (Err(error), _) => {
            let cure = match number {
                Some(number) => format!("the kernel module {number} is loaded: install its libcuda.so.1 too"),
                None => "install NVIDIA's driver; without a GPU, run with `device` cpu".to_string(),
            };
            Finding::fail("driver", Need::Cuda, error.clone(), cure)
        }
        (Ok(_), version) => {
            let version = version.as_deref().unwrap_or("?");
            let module = number.map_or(String::new(), |number| format!(" ({number})"));
            if older(version, &cuda.made_by) {
                Finding::fail(
                    "driver",
                    Need::Cuda,
                    format!("of CUDA {version}{module}, and the kernels are made by CUDA {}", cuda.made_by),
                    "install a newer driver, or build with that CUDA (CUDA_HOME)",
                )
            } else {
                Finding::ok("driver", Need::Cuda, format!("of CUDA {version}{module}"))
            }
        }
    }
}

/// Whether a driver of CUDA `driver` is too old for machine code of CUDA `compiler`; the major version decides.
fn older(driver: &str, compiler: &str) -> bool {
    let major = |text: &str| text.split('.').next().and_then(|n| n.parse::<u32>().ok());
    major(driver).zip(major(compiler)).is_some_and(|(driver, compiler)| driver < compiler)
}

fn one_device(facts: &Facts, device: &DeviceFacts) -> Finding {
    let DeviceFacts { name, capability: (major, minor), memory_total, pci, unusable } = device;
    let numa = super::network::numa(facts, pci).map_or(String::new(), |node| format!(", NUMA node {node}"));
    let found =
        format!("{name}: compute capability {major}.{minor}, {:.1} GB, {pci}{numa}", *memory_total as f64 / 1e9);
    match unusable {
        None => Finding::ok("device", Need::Cuda, found),
        Some(reason) => Finding::fail("device", Need::Cuda, found, reason.clone()),
    }
}

fn mps(facts: &Facts, devices: usize) -> Finding {
    let pipes = facts.env("CUDA_MPS_PIPE_DIRECTORY").unwrap_or("/tmp/nvidia-mps");
    let on = facts.path(pipes).join("control").exists();
    let share = facts.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    match (on, share) {
        (true, Some(share)) => Finding::ok("MPS", Need::Cuda, format!("on, {share}% of a device for each process")),
        (true, None) => Finding::ok("MPS", Need::Cuda, "on; PEs that share a device get equal shares of it"),
        (false, Some(share)) => Finding::warn(
            "MPS",
            Need::Cuda,
            format!("off, but CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {share}, which PEs keep to"),
            "unset it, or start nvidia-cuda-mps-control -d",
        ),
        (false, None) => Finding::ok("MPS", Need::Cuda, format!("off; for more than {devices} PEs start it")),
    }
}

fn kernels(cuda: &CudaFacts) -> Finding {
    let found = format!("made by CUDA {}: {}", cuda.made_by, cuda.modules.join("; "));
    if cuda.modules.iter().any(|module| module.starts_with("layer_")) {
        Finding::ok("kernels", Need::Cuda, found)
    } else {
        Finding::fail(
            "kernels",
            Need::Cuda,
            found,
            "the layer's are not among them: build again from a complete source tree",
        )
    }
}

fn nvshmem(cuda: &CudaFacts) -> Finding {
    match &cuda.nvshmem {
        Ok(library) => Finding::ok(
            "NVSHMEM",
            Need::Cuda,
            format!("{}, {}; kernels built with {}", library.path.display(), library.version, cuda.nvshmem_headers),
        ),
        Err(error) => Finding::warn(
            "NVSHMEM",
            Need::Cuda,
            error.clone(),
            "one PE runs without it; for more, set NVSHMEM_HOME or run tools/cuda-toolchain, or on one host use `symmetric` nccl",
        ),
    }
}

/// NCCL is optional, so missing capabilities are not warnings.
fn nccl(cuda: &CudaFacts) -> Finding {
    let found = match (&cuda.nccl, &cuda.nccl_windows) {
        (Err(error), _) => error.clone(),
        (Ok(LibraryFacts { path, version }), can) => {
            let symmetric = match can {
                Ok(()) => "symmetric memory between the GPUs of one host (`symmetric` nccl)".to_string(),
                Err(error) => format!("no `symmetric` nccl: {error}"),
            };
            format!("{}, {version}; {symmetric}", path.display())
        }
    };
    Finding::ok("NCCL", Need::Cuda, found)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::facts::tests::{facts, with_gpus};
    use super::*;

    #[track_caller]
    fn only(all: &[Finding], topic: &str) -> Finding {
        let mut of_topic = all.iter().filter(|f| f.topic == topic);
        let found = of_topic.next().unwrap_or_else(|| panic!("no {topic} in {all:?}")).clone();
        assert!(of_topic.next().is_none());
        found
    }

    #[test]
    fn build_without_cuda_gives_build_instructions() {
        let (_dir, mut facts) = facts();
        facts.cuda = None;
        let all = examine(&facts);
        assert_eq!((all.len(), all[0].level, all[0].need), (1, Level::Fail, Need::Cuda));
        assert!(all[0].found.contains("no NVIDIA driver is here"));
    }

    #[test]
    fn missing_driver_fails_cuda_only() {
        let (_dir, facts) = facts();
        let all = examine(&facts);
        let driver = only(&all, "driver");
        assert_eq!((driver.level, driver.need), (Level::Fail, Need::Cuda));
        assert!(driver.cure.unwrap().contains("`device` cpu"));
        assert!(super::super::cpu_runs(&all));
        // The kernel module without its library is a separate case.
        std::fs::create_dir_all(facts.path("/proc/driver/nvidia")).unwrap();
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\nGCC\n";
        std::fs::write(facts.path("/proc/driver/nvidia/version"), version).unwrap();
        assert!(only(&examine(&facts), "driver").cure.unwrap().contains("580.95.05 is loaded"));
    }

    #[test]
    fn driver_older_than_the_kernels_is_reported() {
        let (_dir, mut facts) = with_gpus();
        assert_eq!(only(&examine(&facts), "driver").level, Level::Ok);
        let set = |facts: &mut Facts, version: &str| {
            facts.cuda.as_mut().unwrap().driver_version = Some(version.to_string());
        };
        set(&mut facts, "12.8");
        let driver = only(&examine(&facts), "driver");
        assert_eq!(driver.level, Level::Fail);
        assert!(driver.found.contains("CUDA 12.8") && driver.found.contains("CUDA 13.0"), "{}", driver.found);
        set(&mut facts, "13.3");
        assert_eq!(only(&examine(&facts), "driver").level, Level::Ok);
    }

    #[test]
    fn devices_report_their_location_and_old_ones_fail() {
        let (_dir, mut facts) = with_gpus();
        let devices: Vec<Finding> = examine(&facts).into_iter().filter(|f| f.topic == "device").collect();
        assert_eq!(devices.len(), 2);
        assert!(devices[0].found.contains("compute capability 8.0, 40.0 GB, 0000:07:00.0, NUMA node 1"), "{devices:?}");
        let cuda = facts.cuda.as_mut().unwrap();
        cuda.devices.as_mut().unwrap()[1].unusable = Some("too old".into());
        let levels: Vec<Level> = examine(&facts).iter().filter(|f| f.topic == "device").map(|f| f.level).collect();
        assert_eq!(levels, [Level::Ok, Level::Fail]);
        facts.cuda.as_mut().unwrap().devices = Ok(Vec::new());
        assert_eq!(only(&examine(&facts), "devices").level, Level::Fail);
    }

    #[test]
    fn mps_off_with_a_thread_share_is_reported() {
        let (_dir, mut facts) = with_gpus();
        assert!(only(&examine(&facts), "MPS").found.starts_with("off; for more than 2 PEs"));
        facts.env.insert("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".into(), "50".into());
        assert_eq!(only(&examine(&facts), "MPS").level, Level::Warn);
        std::fs::create_dir_all(facts.path("/tmp/nvidia-mps")).unwrap();
        std::fs::write(facts.path("/tmp/nvidia-mps/control"), "").unwrap();
        let mps = only(&examine(&facts), "MPS");
        assert_eq!((mps.level, mps.found.as_str()), (Level::Ok, "on, 50% of a device for each process"));
    }

    #[test]
    fn missing_nvshmem_and_kernels_are_reported() {
        let (_dir, mut facts) = with_gpus();
        let cuda = facts.cuda.as_mut().unwrap();
        cuda.modules = vec!["smoke: sm_80 sm_90".into()];
        cuda.nvshmem = Err("cannot load it".into());
        facts.dev_shm = Some(64 << 20);
        let all = examine(&facts);
        assert_eq!(only(&all, "kernels").level, Level::Fail);
        assert_eq!(only(&all, "NVSHMEM").level, Level::Warn);
        assert!(only(&all, "/dev/shm").found.contains("67 MB"));
        let cuda = facts.cuda.as_mut().unwrap();
        cuda.modules.push("layer_ampere: sm_80 sm_90".into());
        cuda.nvshmem = Ok(LibraryFacts { path: "/opt/lib/libnvshmem_host.so.3".into(), version: "3.8.0".into() });
        let all = examine(&facts);
        assert_eq!((only(&all, "kernels").level, only(&all, "NVSHMEM").level), (Level::Ok, Level::Ok));
        assert!(only(&all, "NVSHMEM").found.contains("3.8.0; kernels built with 3.4.5"));
    }

    #[test]
    fn nccl_version_and_symmetric_memory_are_reported() {
        let (_dir, mut facts) = with_gpus();
        let found = |facts: &Facts| only(&examine(facts), "NCCL").found;
        assert_eq!(found(&facts), "no NCCL here");
        let cuda = facts.cuda.as_mut().unwrap();
        cuda.nccl = Ok(LibraryFacts { path: "libnccl.so.2".into(), version: "2.32.3".into() });
        cuda.nccl_windows = Ok(());
        assert_eq!(
            found(&facts),
            "libnccl.so.2, 2.32.3; symmetric memory between the GPUs of one host (`symmetric` nccl)"
        );
        facts.cuda.as_mut().unwrap().nccl_windows = Err("GPU 0 does not reach GPU 1".into());
        assert!(found(&facts).ends_with("2.32.3; no `symmetric` nccl: GPU 0 does not reach GPU 1"));
    }
}
