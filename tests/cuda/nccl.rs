//! `--symmetric nccl` over the fake driver and NCCL: PE processes that map each other's memory.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use aristos::gpu::cuda::{CudaGpu, check_host, pe_environment};
use aristos::gpu::nvshmem::Bootstrap;
use aristos::gpu::{Gpu, GpuError, SymmetricBuffer, SymmetricBy};

use crate::{Fakes, assert_says};

const LIMIT: Duration = Duration::from_secs(10);
/// Two PEs with a device each, and a version with symmetric memory.
const PAIR: [(&str, &str); 2] = [("FAKE_NCCL_VERSION", "22902"), ("FAKE_DEVICES", "2")];

/// A bootstrap of processes that exchange data through files in a folder.
struct Folder {
    path: PathBuf,
    me: usize,
    n: usize,
    turn: std::cell::Cell<usize>,
    /// The exchange from which on this PE does not take part.
    missing_from: usize,
}

impl Folder {
    fn of_this_process() -> Folder {
        let number = |name| std::env::var(name).unwrap().parse().unwrap();
        let path = std::env::var_os("FAKE_NCCL_DIR").unwrap().into();
        Folder { path, me: number("PE"), n: number("PES"), turn: 0.into(), missing_from: usize::MAX }
    }
}

impl Bootstrap for Folder {
    fn my_pe(&self) -> usize {
        self.me
    }
    fn n_pes(&self) -> usize {
        self.n
    }
    fn all_gather(&self, mine: &[u8], limit: Duration) -> Result<Vec<u8>, GpuError> {
        let start = Instant::now();
        let turn = self.turn.replace(self.turn.get() + 1);
        let of = |pe: usize| self.path.join(format!("turn-{turn}-{pe}"));
        if turn < self.missing_from {
            std::fs::write(of(self.me).with_extension("part"), mine).unwrap();
            std::fs::rename(of(self.me).with_extension("part"), of(self.me)).unwrap();
        }
        let mut all = Vec::new();
        for pe in 0..self.n {
            all.extend(loop {
                if let Ok(bytes) = std::fs::read(of(pe)) {
                    break bytes;
                }
                if start.elapsed() > limit {
                    return Err(GpuError::Barrier { pe: self.me, peer: Some(pe), waited: start.elapsed() });
                }
                std::thread::sleep(Duration::from_millis(1));
            });
        }
        Ok(all)
    }
    fn barrier(&self, limit: Duration) -> Result<(), GpuError> {
        self.all_gather(&[0], limit).map(|_| ())
    }
}

/// Runs the ignored test `case` of this program as each of `n` PEs, which must pass; returns each PE's log lines.
fn run(case: &str, n: usize, env: &[(&str, &str)]) -> Vec<Vec<String>> {
    let fakes = Fakes::new(&[], &[]);
    let pe = |pe: usize| {
        let mut command = fakes.add_to(Command::new(std::env::current_exe().unwrap()));
        command.args(["--ignored", "--exact", &format!("nccl::{case}"), "--nocapture"]).envs(env.iter().copied());
        command.env("PE", pe.to_string()).env("PES", n.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env_remove("NCCL_MULTI_RANK_GPU_ENABLE").env_remove("NCCL_SOCKET_IFNAME");
        command.spawn().unwrap()
    };
    let pes: Vec<_> = (0..n).map(pe).collect();
    for output in pes.into_iter().map(|pe| pe.wait_with_output().unwrap()) {
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }
    let log = std::fs::read_to_string(fakes.log()).unwrap_or_default();
    assert!(!log.contains("wrong"), "{log}");
    let of = |pe: usize| -> Vec<String> {
        let start = format!("PE {pe} ");
        log.lines().filter_map(|line| line.strip_prefix(&start)).map(str::to_string).collect()
    };
    (0..n).map(of).collect()
}

/// Defines tests that run a case as two processes.
macro_rules! pairs {
    ($($name:ident / $case:ident [$($env:expr),*];)*) => { $(
        #[test]
        fn $name() {
            run(stringify!($case), 2, &[&PAIR[..], &[$($env),*]].concat());
        }
    )* };
}

pairs! {
    bytes_reach_the_peers / copies_case [];
    non_blocking_communicator_works / copies_case [("FAKE_NCCL", "later")];
    out_of_memory_on_one_pe_fails_on_all / full_case [("FAKE_NCCL", "full1")];
    failed_registration_on_one_pe_fails_on_all / refused_case [("FAKE_NCCL", "refuses1")];
    hanging_registration_times_out / stuck_case [("FAKE_NCCL", "stuck")];
    missing_pe_is_named / missing_case [];
    unreachable_pe_is_refused / unreachable_case [("FAKE_UNREACHABLE", "1")];
    missing_symmetric_memory_is_refused / no_window_case [("FAKE_NCCL", "nowindow")];
    different_sizes_are_refused / sizes_case [];
    old_nccl_is_refused / old_case [("FAKE_NCCL_VERSION", "22806")];
    shared_device_needs_permission / sharing_case [("FAKE_DEVICES", "1"), ("FAKE_NCCL_VERSION", "23003")];
}

fn attach() -> Result<CudaGpu, GpuError> {
    CudaGpu::attach_by(SymmetricBy::Nccl, Folder::of_this_process(), LIMIT)
}

#[track_caller]
fn refusal(words: &[&str]) {
    let error = attach().map(|_| ()).unwrap_err();
    assert!(matches!(error, GpuError::Unavailable(_)), "{error:?}");
    assert_says(&error.to_string(), words);
}

/// Writes a byte to every other PE's symmetric memory and checks the received bytes.
fn exchange(gpu: &CudaGpu, memory: &SymmetricBuffer<'_>) {
    let (me, n) = (gpu.my_pe(), gpu.n_pes());
    for pe in (0..n).filter(|&pe| pe != me) {
        assert_ne!(memory.peer(pe), memory.address());
        // Addresses inside an allocation are translated too.
        assert_eq!(gpu.peer_raw(memory.address() + 24, pe), memory.peer(pe) + 24);
        // SAFETY: a byte of the peer's memory, a file that this process has mapped.
        unsafe { gpu.copy_in_raw(memory.peer(pe) + me as u64, &[me as u8 + 1]) }.unwrap();
    }
    gpu.barrier(LIMIT).unwrap();
    for pe in (0..n).filter(|&pe| pe != me) {
        let mut received = [0];
        // SAFETY: a byte of this PE's memory.
        unsafe { gpu.copy_out_raw(&mut received, memory.address() + pe as u64) }.unwrap();
        assert_eq!(received, [pe as u8 + 1]);
    }
}

#[test]
#[ignore = "runs in processes of its own"]
fn copies_case() {
    let gpu = attach().unwrap();
    assert!(gpu.all_reachable().unwrap());
    gpu.try_put().unwrap();
    let (first, second) = (SymmetricBuffer::new(&gpu, 300).unwrap(), SymmetricBuffer::new(&gpu, 100_000).unwrap());
    exchange(&gpu, &first);
    exchange(&gpu, &second);
    assert_eq!((first.peer(gpu.my_pe()), second.peer(gpu.my_pe())), (first.address(), second.address()));
    assert_eq!(gpu.peer_raw(first.address() + 300, 1 - gpu.my_pe()), 0, "beyond its end");
    first.free(LIMIT).unwrap();
    exchange(&gpu, &second);
    second.free(LIMIT).unwrap();
    gpu.finish().unwrap();
}

#[test]
#[ignore = "runs in processes of its own"]
fn full_case() {
    let gpu = attach().unwrap();
    let error = SymmetricBuffer::new(&gpu, 1 << 17).map(|_| ()).unwrap_err();
    assert!(matches!(error, GpuError::OutOfMemory { kind: "symmetric device", asked: 131_072, .. }), "{error}");
    // Smaller allocations still succeed.
    SymmetricBuffer::new(&gpu, 1 << 10).unwrap().free(LIMIT).unwrap();
    gpu.finish().unwrap();
}

#[test]
#[ignore = "runs in processes of its own"]
fn refused_case() {
    let gpu = attach().unwrap();
    let error = SymmetricBuffer::new(&gpu, 1 << 17).map(|_| ()).unwrap_err().to_string();
    let why = if gpu.my_pe() == 1 { "NCCL 2.29.2 answers 3 (it is not to be)" } else { "PE 1 has failed to" };
    assert_says(&error, &["cannot register symmetric memory with NCCL", why]);
    gpu.finish().unwrap();
}

#[test]
#[ignore = "runs in processes of its own"]
fn stuck_case() {
    let limit = Duration::from_secs(2);
    let gpu = CudaGpu::attach_by(SymmetricBy::Nccl, Folder::of_this_process(), limit).unwrap();
    let error = SymmetricBuffer::new(&gpu, 1 << 17).map(|_| ()).unwrap_err().to_string();
    assert_says(&error, &["cannot register symmetric memory with NCCL: it is not ready after 2.0 s", "NCCL_DEBUG"]);
}

#[test]
#[ignore = "runs in processes of its own"]
fn missing_case() {
    let mut folder = Folder::of_this_process();
    // PE 1 takes part in attaching (6 exchanges) but not in all of the first allocation (3).
    folder.missing_from = if folder.me == 1 { 8 } else { usize::MAX };
    let me = folder.me;
    let gpu = CudaGpu::attach_by(SymmetricBy::Nccl, folder, Duration::from_secs(2)).unwrap();
    let first = SymmetricBuffer::new(&gpu, 64).and_then(|_| SymmetricBuffer::new(&gpu, 64));
    let error = first.map(|_| ()).unwrap_err();
    if me == 0 {
        assert!(matches!(error, GpuError::Barrier { pe: 0, peer: Some(1), .. }), "{error}");
    }
}

#[test]
#[ignore = "runs in processes of its own"]
fn unreachable_case() {
    refusal(&["PE 0's GPU does not reach the memory of PE 1's", "loads and stores", "`symmetric` nvshmem"]);
}

#[test]
#[ignore = "runs in processes of its own"]
fn no_window_case() {
    refusal(&["NCCL 2.29.2 has no symmetric memory for these GPUs", "nvidia-smi topo", "`symmetric` nvshmem"]);
}

#[test]
#[ignore = "runs in processes of its own"]
fn sizes_case() {
    let gpu = attach().unwrap();
    let error = SymmetricBuffer::new(&gpu, 64 << gpu.my_pe()).map(|_| ()).unwrap_err().to_string();
    assert_says(&error, &["PE 0 asks for 64 bytes and PE 1 for 128"]);
    gpu.finish().unwrap();
}

#[test]
#[ignore = "runs in processes of its own"]
fn old_case() {
    refusal(&["libnccl.so.2 is NCCL 2.28.6", "needs 2.29.2 or newer", "NCCL_HOME"]);
}

#[test]
#[ignore = "runs in processes of its own"]
fn sharing_case() {
    refusal(&["2 PEs share a GPU", "NCCL 2.30.3", "set NCCL_MULTI_RANK_GPU_ENABLE=1"]);
    let of = |env: &[(String, String)], name: &str| env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    // The launcher sets it.
    let env = pe_environment(2, SymmetricBy::Nccl).unwrap();
    assert_eq!(of(&env, "NCCL_MULTI_RANK_GPU_ENABLE").as_deref(), Some("1"));
    assert_eq!(of(&env, "NCCL_SOCKET_IFNAME").as_deref(), Some("lo"));
    assert!(env.iter().all(|(name, _)| !name.starts_with("NVSHMEM")), "{env:?}");
    assert_eq!(of(&pe_environment(1, SymmetricBy::Nccl).unwrap(), "NCCL_MULTI_RANK_GPU_ENABLE"), None);
    let hosts = check_host(1, 2, SymmetricBy::Nccl).unwrap_err().to_string();
    assert_says(&hosts, &["the GPUs of one host", "1 of the 2 PEs", "`symmetric` nvshmem"]);
}

#[test]
fn memory_is_registered_and_freed_in_order() {
    for lines in run("copies_case", 2, &PAIR) {
        // Memory 0 is from the start, 1 from `try_put`; of the last two the earlier is freed first.
        let ends: Vec<String> =
            (0..3).flat_map(|i| [format!("deregisters memory {i}"), format!("frees memory {i}")]).collect();
        let begins = |i: usize| [format!("allocates memory {i}"), format!("registers memory {i}")];
        let want = [
            &begins(0)[..],
            &ends[..2],
            &begins(1),
            &ends[2..4],
            &begins(2),
            &begins(3),
            &ends[4..6],
            &["deregisters memory 3".into(), "frees memory 3".into(), "leaves after memory 3".into()],
        ];
        assert_eq!(lines, want.concat());
    }
}

#[test]
fn single_pe_has_windows() {
    let lines = run("alone_case", 1, &[("FAKE_NCCL_VERSION", "23203")]);
    assert!(lines[0].contains(&"registers memory 1".to_string()), "{lines:?}");
}

#[test]
#[ignore = "runs in processes of its own"]
fn alone_case() {
    let gpu = attach().unwrap();
    gpu.try_put().unwrap();
    gpu.finish().unwrap();
}

/// Remaining memory is freed, and the caller's communicator stays alive.
#[test]
fn communicator_of_the_caller_is_kept() {
    for lines in run("shared_case", 2, &PAIR) {
        let ends = ["deregisters memory 2", "frees memory 2"];
        assert_eq!(lines[lines.len() - 2..], ends, "{lines:?}");
        assert!(lines.iter().all(|line| !line.starts_with("leaves")), "{lines:?}");
    }
}

#[test]
#[ignore = "runs in processes of its own"]
fn shared_case() {
    let folder = Folder::of_this_process();
    let (me, n) = (folder.me, folder.n);
    // SAFETY: the functions of the fake NCCL have these types.
    let (communicator, library) = unsafe {
        let attach = |communicator, folder| CudaGpu::attach_communicator(communicator, folder, LIMIT);
        let error = attach(0, Folder::of_this_process()).map(|_| ()).unwrap_err().to_string();
        assert_says(&error, &["the communicator is null"]);
        let path = PathBuf::from(std::env::var_os("NCCL_HOME").unwrap()).join("lib/libnccl.so.2");
        let library = libloading::Library::new(path).unwrap();
        let start = library
            .get::<unsafe extern "C" fn(*mut *mut c_void, c_int, [u8; 128], c_int) -> c_int>(b"ncclCommInitRank\0")
            .unwrap();
        let mut communicator = std::ptr::null_mut();
        assert_eq!(start(&raw mut communicator, n as c_int, [0xcd; 128], me as c_int), 0);
        (communicator as usize, library)
    };
    // The failed attempt above has done one exchange.
    folder.turn.set(1);
    // SAFETY: created above by the loaded NCCL, and not used elsewhere.
    let gpu = unsafe { CudaGpu::attach_communicator(communicator, folder, LIMIT) }.unwrap();
    assert_eq!(gpu.info().number, me, "the communicator's device");
    gpu.try_put().unwrap();
    // Deliberately not freed.
    exchange(&gpu, &SymmetricBuffer::new(&gpu, 4096).unwrap());
    gpu.finish().unwrap();
    drop(library);
}

fn aristos(fakes: &Fakes, args: &str, env: &[(&str, &str)]) -> Output {
    let mut command = fakes.add_to(Command::new("timeout"));
    command.arg("60").arg(env!("CARGO_BIN_EXE_aristos")).args(args.split_whitespace());
    command.env_remove("NCCL_MULTI_RANK_GPU_ENABLE").envs(env.iter().copied()).output().unwrap()
}

#[track_caller]
fn line(fakes: &Fakes, args: &str, env: &[(&str, &str)]) -> String {
    let Output { status, stdout, stderr } = aristos(fakes, args, env);
    let text = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), stdout.len(), text.lines().count()), (Some(1), 0, 1), "{text}");
    text
}

#[test]
fn missing_requirements_are_reported_before_pes_start() {
    let run = "run --device cuda --pes 2 --tokens 64 --symmetric nccl";
    let fakes = Fakes::new(&[], &[]);
    let of = |env: &[(&str, &str)]| line(&fakes, run, &[&PAIR[..], env].concat());
    assert_says(&of(&[("FAKE_NCCL_VERSION", "22703")]), &["is NCCL 2.27.3", "2.29.2 or newer", "--symmetric nvshmem"]);
    let apart = of(&[("FAKE_NO_REACH", "1")]);
    assert_says(
        &apart,
        &["GPU 0 (0000:07:00.0) does not reach the memory of GPU 1 (0000:08:00.0)", "--symmetric nvshmem"],
    );
    assert_says(
        &of(&[("FAKE_DEVICES", "1")]),
        &["2 PEs share a GPU, which NCCL 2.29.2 does not take: 2.30.0 or newer"],
    );
    let bench = "bench moe --device cuda --pes 2 --tokens 64 --symmetric nccl";
    assert_says(&line(&fakes, bench, &[("FAKE_DEVICES", "2")]), &["is NCCL 2.27.3"]);
    let auto = line(&fakes, &format!("{run} --plan auto"), &PAIR);
    assert_says(&auto, &["--plan auto with --symmetric nccl", "a plan in a file"]);
    assert_says(&line(&fakes, "run --tokens 64 --symmetric nccl", &[]), &["--symmetric without --device cuda"]);
    std::fs::remove_file(fakes.0.path().join("nccl/lib/libnccl.so.2")).unwrap();
    assert_says(&of(&[]), &["no NCCL (", "libnccl.so.2", "NCCL_HOME"]);
    assert!(!fakes.log().exists(), "something was started");
    // A library whose version is new enough but lacks a function.
    let fakes = Fakes::with_nccl(&[], &[], &["-DWITHOUT_PEERS"]);
    assert_says(&line(&fakes, run, &PAIR), &["NCCL 2.29.2, lacks", "undefined symbol: ncclGetPeerDevicePointer"]);
}

/// As far as a driver without the layer's kernels permits: PEs join, register memory, and write to each other.
#[test]
fn run_with_nccl_does_not_need_nvshmem() {
    let fakes = Fakes::new(&[], &[]);
    std::fs::remove_file(fakes.0.path().join("nvshmem/lib/libnvshmem_host.so.3")).unwrap();
    let env = [&PAIR[..], &[("FAKE_MEMORY", "1000000000")]].concat();
    let text = line(&fakes, "run --device cuda --pes 2 --tokens 64 --symmetric nccl", &env);
    assert_says(&text, &["cannot find kernel aristos_", "no module contains it"]);
    let log = std::fs::read_to_string(fakes.log()).unwrap();
    assert!(!log.contains("wrong") && !log.contains("module") && !log.contains("init"), "{log}");
    for pe in 0..2 {
        assert_says(&log, &[&format!("PE {pe} registers memory 1"), &format!("PE {pe} frees memory 1")]);
    }
}

#[test]
fn doctor_reports_nccl_support() {
    let fakes = Fakes::new(&[], &[]);
    let said = |env: &[(&str, &str)]| {
        let text = String::from_utf8(aristos(&fakes, "doctor", env).stdout).unwrap();
        text.lines().find(|line| line.contains("NCCL ")).unwrap_or_else(|| panic!("{text}")).to_string()
    };
    assert_says(
        &said(&PAIR),
        &["ok ", "libnccl.so.2, 2.29.2; symmetric memory between the GPUs of one host (--symmetric nccl)"],
    );
    assert_says(&said(&[]), &["2.27.3; no --symmetric nccl", "2.29.2 or newer"]);
    assert_says(&said(&[&PAIR[..], &[("FAKE_NO_REACH", "1")]].concat()), &["no --symmetric nccl: GPU 0", "GPU 1"]);
}
