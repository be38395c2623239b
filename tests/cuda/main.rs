//! Tests of CUDA devices without a GPU: the real binary and the device's Rust code with fake driver, NVSHMEM and NCCL
//! libraries, compiled from the C files next to this one. The kernels' results are tested elsewhere.

mod device;
mod heap;
#[path = "../hosts/mod.rs"]
mod hosts;
mod nccl;
mod p2p;
#[path = "../skip/mod.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A directory with the fake driver, NVSHMEM's host library in `nvshmem/lib` and NCCL in `nccl/lib`.
struct Fakes(TempDir);

impl Fakes {
    /// Compiles the libraries with these compiler flags.
    fn new(nvshmem_flags: &[&str], driver_flags: &[&str]) -> Fakes {
        Self::with_nccl(nvshmem_flags, driver_flags, &[])
    }

    /// Like [`Fakes::new`], with flags for NCCL.
    fn with_nccl(nvshmem_flags: &[&str], driver_flags: &[&str], nccl_flags: &[&str]) -> Fakes {
        let dir = tempfile::tempdir().unwrap();
        for home in ["nvshmem/lib", "nccl/lib"] {
            std::fs::create_dir_all(dir.path().join(home)).unwrap();
        }
        for (source, library, flags) in [
            ("driver.c", "libcuda.so.1", driver_flags),
            ("nvshmem.c", "nvshmem/lib/libnvshmem_host.so.3", nvshmem_flags),
            ("nccl.c", "nccl/lib/libnccl.so.2", nccl_flags),
        ] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda").join(source);
            let mut cc = Command::new("cc");
            let name = format!("-Wl,-soname,{}", library.rsplit('/').next().unwrap());
            cc.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", &name, "-o"]).arg(dir.path().join(library));
            assert!(cc.args(flags).arg(source).status().unwrap().success());
        }
        Fakes(dir)
    }

    fn log(&self) -> PathBuf {
        self.0.path().join("log")
    }

    /// Adds the fakes to a command's environment and removes the user's variables that would interfere.
    fn add_to(&self, mut command: Command) -> Command {
        for name in ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] {
            command.env_remove(name);
        }
        command
            .env("LD_LIBRARY_PATH", self.0.path())
            .env("NVSHMEM_HOME", self.0.path().join("nvshmem"))
            .env("NCCL_HOME", self.0.path().join("nccl"))
            .env("FAKE_NVSHMEM_LOG", self.log())
            .env("FAKE_NCCL_DIR", self.0.path())
            .env("CUDA_MPS_PIPE_DIRECTORY", self.0.path());
        command
    }
}

/// Runs `aristos run --device cuda`, which must fail with one line and no other output; returns the line.
fn refusal(fakes: &Fakes, pes: &str, env: &[(&str, &str)]) -> String {
    let mut command = fakes.add_to(Command::new(env!("CARGO_BIN_EXE_aristos")));
    command.args(["run", "--device", "cuda", "--pes", pes, "--tokens", "64"]).envs(env.iter().copied());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), stdout.len()), (Some(1), 0), "{text}");
    assert!(text.starts_with("aristos: ") && text.lines().count() == 1, "{text}");
    assert!(!text.contains("PE 0") && !text.contains("panic"), "{text}");
    text
}

#[track_caller]
fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

#[test]
fn old_driver_is_refused_with_its_version() {
    // Old drivers also lack functions of newer ones.
    let fakes = Fakes::new(&[], &["-DWITHOUT_TENSOR_MAPS"]);
    let text = refusal(&fakes, "1", &[("FAKE_VERSION", "11040")]);
    assert_says(&text, &["CUDA 11.4", "12.0", "newer NVIDIA driver"]);
}

#[test]
fn missing_driver_function_is_named() {
    let text = refusal(&Fakes::new(&[], &["-DWITHOUT_TENSOR_MAPS"]), "1", &[]);
    assert_says(&text, &["of CUDA 13.0", "no cuTensorMapEncodeTiled", "newer NVIDIA driver"]);
    let text = refusal(&Fakes::new(&[], &["-DWITHOUT_VERSION"]), "1", &[]);
    assert_says(&text, &["libcuda.so.1 is not a CUDA driver"]);
}

#[test]
fn unknown_error_code_is_reported_by_number() {
    let fakes = Fakes::new(&[], &[]);
    // An unassigned code between assigned ones, a code above all of them, and the maximum.
    for code in ["920", "1000", "4294967295"] {
        let text = refusal(&fakes, "1", &[("FAKE_INIT", code)]);
        assert_says(&text, &["does not start", &format!("CUDA error {code}")]);
    }
}

#[test]
fn stub_library_is_not_used_as_driver() {
    let fakes = Fakes::new(&[], &[]);
    let stub = fakes.0.path().join("libcuda.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-DSTUB", "-o"]).arg(stub);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/driver.c"));
    assert!(cc.status().unwrap().success());
    // The real driver's answer, not the stub's.
    assert_says(&refusal(&fakes, "1", &[("FAKE_DEVICES", "0")]), &["no device"]);
}

/// Only the types of `cudarc`'s functions are used: the functions themselves panic without a driver.
#[test]
fn binary_contains_no_cudarc_loader() {
    let binary = std::fs::read(env!("CARGO_BIN_EXE_aristos")).unwrap();
    let has = |text: &str| binary.windows(text.len()).any(|bytes| bytes == text.as_bytes());
    assert!(has("no CUDA driver here"), "our own text is to be found");
    assert!(!has("Missing symbol ") && !has("Unable to dynamically load"));
}

#[test]
fn missing_and_old_devices_are_refused() {
    let fakes = Fakes::new(&[], &[]);
    assert_says(&refusal(&fakes, "1", &[("FAKE_DEVICES", "0")]), &["no device", "CUDA_VISIBLE_DEVICES"]);
    let text = refusal(&fakes, "1", &[("FAKE_CAPABILITY", "70")]);
    assert_says(&text, &["GPU 0 (Fake 0)", "compute capability 7.0", "8.0"]);
}

#[test]
fn incompatible_nvshmem_is_refused_before_pes_start() {
    let fakes = Fakes::new(&[], &[]);
    for version in ["3.4.4", "2.11.0", "4.0.0"] {
        let text = refusal(&fakes, "2", &[("FAKE_NVSHMEM", version)]);
        assert_says(&text, &["libnvshmem_host.so.3", &format!("NVSHMEM {version}"), "3.4.5", "NVSHMEM_HOME"]);
    }
    assert!(!fakes.log().exists(), "it was initialised");
}

#[test]
fn missing_nvshmem_function_is_named() {
    let text = refusal(&Fakes::new(&["-DWITHOUT_QUIET"], &[]), "2", &[]);
    assert_says(&text, &["libnvshmem_host.so.3", "undefined symbol: nvshmemx_quiet_on_stream", "NVSHMEM_HOME"]);
}

/// Two PEs that are time-sliced on one device cannot be measured.
#[test]
fn probe_of_time_sliced_pes_is_refused_before_pes_start() {
    let fakes = Fakes::new(&[], &[]);
    for args in
        [&["probe", "--device", "cuda", "--json"][..], &["run", "--device", "cuda", "--tokens", "64", "--plan", "auto"]]
    {
        let mut command = fakes.add_to(Command::new(env!("CARGO_BIN_EXE_aristos")));
        let Output { status, stdout, stderr } = command.args(args).args(["--pes", "2"]).output().unwrap();
        let text = String::from_utf8(stderr).unwrap();
        assert_eq!((status.code(), stdout.len(), text.lines().count()), (Some(1), 0, 1), "{text}");
        assert_says(
            &text,
            &["--pes is 2 with 1 CUDA device and no MPS", "take turns", "at most 1", "nvidia-cuda-mps-control"],
        );
    }
    assert!(!fakes.log().exists(), "NVSHMEM was initialised");
}

#[test]
fn binary_does_not_link_cuda() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    let out = command.env_remove("LD_LIBRARY_PATH").arg("--version").output().unwrap();
    assert!(out.status.success());
    // The libraries that the loader resolves at start.
    let out = Command::new("readelf").args(["-d", env!("CARGO_BIN_EXE_aristos")]).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("NEEDED") && !text.contains("cuda") && !text.contains("nvshmem"), "{text}");
}

#[test]
fn missing_driver_is_reported_in_one_line() {
    if aristos::gpu::cuda::driver::version().is_some() {
        return skip::skip("this machine has a CUDA driver");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    let out = command.env_remove("LD_LIBRARY_PATH").args(["run", "--device", "cuda"]).output().unwrap();
    let text = String::from_utf8(out.stderr).unwrap();
    assert_eq!((out.status.code(), text.lines().count()), (Some(1), 1), "{text}");
    assert_says(&text, &["no CUDA driver", "libcuda.so.1", "--device cpu"]);
}
