//! `CudaGpu` over the fake driver and NVSHMEM. Each case runs in its own process, because the driver is opened once per process
//! and is found through the LD_LIBRARY_PATH set at its start.

use std::process::Command;
use std::time::Duration;

use aristos::gpu::cuda::{CudaGpu, pe_environment};
use aristos::gpu::nvshmem::Bootstrap;
use aristos::gpu::{Buffer, Gpu, GpuError, Launch, Recording, SymmetricBuffer, SymmetricBy, TensorMap};

use crate::{Fakes, assert_says};

const LIMIT: Duration = Duration::from_secs(10);

/// A bootstrap of `n_pes` PEs that all send the same data.
struct SameOnAllPes {
    my_pe: usize,
    n_pes: usize,
}

impl Bootstrap for SameOnAllPes {
    fn my_pe(&self) -> usize {
        self.my_pe
    }
    fn n_pes(&self) -> usize {
        self.n_pes
    }
    fn all_gather(&self, mine: &[u8], _: Duration) -> Result<Vec<u8>, GpuError> {
        Ok(mine.repeat(self.n_pes))
    }
    fn barrier(&self, _: Duration) -> Result<(), GpuError> {
        Ok(())
    }
}

fn alone() -> CudaGpu {
    CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes: 1 }, LIMIT).unwrap()
}

/// Runs the ignored test `case` of this program with the fakes; it must pass.
fn run(case: &str, fakes: &Fakes, env: &[(&str, &str)]) {
    let mut command = fakes.add_to(Command::new(std::env::current_exe().unwrap()));
    command.args(["--ignored", "--exact", &format!("device::{case}"), "--nocapture"]).envs(env.iter().copied());
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

/// Defines tests that each run a case in its own process.
macro_rules! cases {
    ($($name:ident / $case:ident $env:expr;)*) => { $(
        #[test]
        fn $name() {
            run(stringify!($case), &Fakes::new(&[], &[]), &$env);
        }
    )* };
}

cases! {
    memory_and_copies_work / memory_case [("FAKE_UNKNOWN", "8")];
    launch_passes_parameters / launch_case [];
    oversized_cooperative_grid_is_refused / residency_case [("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")];
    marks_and_graphs_work / graph_case [];
    tensor_maps_are_encoded / tensor_map_case [];
    kernels_newer_than_the_driver_are_refused / kernels_case [("FAKE_VERSION", "12040"), ("FAKE_NEEDS", "13000")];
    failed_nvshmem_initialisation_is_reported / status_case [("FAKE_STATUS", "1")];
    smoke_test_passes / put_case [("FAKE_PUTS", "0 3 -1 -1")];
    lost_put_names_the_pe / lost_case [("FAKE_PUTS", "0 2 1 -1")];
    corrupt_put_names_the_pe / wrong_case [("FAKE_PUTS", "0 2 -1 1")];
    wrong_pe_number_in_kernels_is_reported / wrong_pe_case [("FAKE_PUTS", "1 2 -1 -1")];
    unreachable_pe_has_no_address / unreachable_case [("FAKE_UNREACHABLE", "1")];
    limits_are_the_minimum_of_all_devices / minimum_case [];
    environment_of_pe_processes / environment_case [("FAKE_DEVICES", "2"), ("NVSHMEM_DISABLE_NVLS", "0")];
}

#[test]
fn nvshmem_is_initialised_and_finalised_in_order() {
    let fakes = Fakes::new(&[], &[]);
    run("nvshmem_case", &fakes, &[]);
    let log = std::fs::read_to_string(fakes.log()).unwrap();
    let words: Vec<&str> = log.lines().collect();
    assert_eq!((words.first(), words.last()), (Some(&"init"), Some(&"finalize")), "{words:?}");
    let count = |word| words.iter().filter(|w| **w == word).count();
    assert!(count("module") >= 1 && count("module") == count("module ends"), "{words:?}");
    assert!(count("quiet") >= 1);
}

#[test]
#[ignore = "runs in a process of its own"]
fn memory_case() {
    let gpu = alone();
    assert_eq!(gpu.name(), "Fake 0");
    let limits = gpu.limits().unwrap();
    assert_eq!((limits.capability, limits.multiprocessors, limits.memory_total), ((8, 0), 10, 1 << 20));
    assert_eq!(limits.shared_bytes_per_block, 163 << 10);
    let buffer = Buffer::from_slice(&gpu, &[1u32, 2, 3, 4]).unwrap();
    buffer.zero(4, 8).unwrap();
    assert_eq!(buffer.read_vec::<u32>(0, 4).unwrap(), [1, 0, 0, 4]);
    buffer.write::<u32>(16, &[]).unwrap();
    // An unknown code must not count as success.
    assert_says(&Buffer::new(&gpu, 8).map(|_| ()).unwrap_err().to_string(), &["allocate 8 bytes", "CUDA error 1000"]);
    let error = Buffer::new(&gpu, 2 << 20).map(|_| ()).unwrap_err().to_string();
    assert_says(&error, &["out of device memory", "2097152", &format!("{} of 1048576", (1 << 20) - 16)]);
    drop(buffer);
    assert_eq!(gpu.limits().unwrap().memory_free, 1 << 20, "freed");
    let symmetric = SymmetricBuffer::new(&gpu, 64).unwrap();
    assert_eq!(symmetric.peer(0), symmetric.address());
    assert!(gpu.all_reachable().unwrap());
    symmetric.free(LIMIT).unwrap();
    gpu.finish().unwrap();
}

fn smoke(gpu: &CudaGpu, out: &Buffer<'_>, launch: Launch) -> Result<(), GpuError> {
    let (cell, limit) = (0u64, 77u64);
    let args = [cell, out.address(), 0x1234_5678_9abc_def0, limit].map(u64::to_ne_bytes);
    let args: Vec<&[u8]> = args.iter().map(|arg| &arg[..]).collect();
    // SAFETY: the fake kernel writes three words to the buffer at its second parameter.
    unsafe { gpu.launch("aristos_smoke", launch, &args) }
}

const LAUNCH: Launch = Launch { grid: 1, block: 128, shared_bytes: 0, cooperative: 0, cluster: 1 };

#[test]
#[ignore = "runs in a process of its own"]
fn launch_case() {
    let gpu = alone();
    let out = Buffer::from_slice(&gpu, &[0u64; 3]).unwrap();
    for (n, cooperative) in [(1, 0), (2, 1)] {
        out.zero(0, 24).unwrap();
        smoke(&gpu, &out, Launch { cooperative, ..LAUNCH }).unwrap();
        gpu.synchronise().unwrap();
        assert_eq!(out.read_vec::<u64>(0, 3).unwrap(), [0x1234_5678_9abc_def0, 77, n]);
    }
    let unknown = gpu.resident_blocks("aristos_nothing", LAUNCH).unwrap_err().to_string();
    assert_says(&unknown, &["aristos_nothing", "no module"]);
    // Driver errors are reported by name.
    let error = smoke(&gpu, &out, Launch { grid: 0, ..LAUNCH }).unwrap_err().to_string();
    assert_says(&error, &["cannot launch aristos_smoke", "CUDA_ERROR_INVALID_VALUE (1, invalid argument)"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn residency_case() {
    let gpu = alone();
    // Half of ten multiprocessors with two blocks each, or one with much shared memory.
    assert_eq!(gpu.limits().unwrap().multiprocessors, 5);
    assert_eq!(gpu.resident_blocks("aristos_smoke", LAUNCH).unwrap(), 10);
    assert_eq!(gpu.resident_blocks("aristos_smoke", Launch { shared_bytes: 100 << 10, ..LAUNCH }).unwrap(), 5);
    let out = Buffer::from_slice(&gpu, &[0u64; 3]).unwrap();
    smoke(&gpu, &out, Launch { grid: 10, cooperative: 1, ..LAUNCH }).unwrap();
    let error = smoke(&gpu, &out, Launch { grid: 11, cooperative: 1, ..LAUNCH }).unwrap_err().to_string();
    assert_says(&error, &["cannot launch aristos_smoke", "11 blocks", "and 10 do on 5 of Fake 0"]);
    // Of eight multiprocessors in pairs three are available: one multiprocessor has no partner.
    let pairs = Launch { cooperative: 1, cluster: 2, ..LAUNCH };
    assert_eq!(gpu.resident_blocks("aristos_smoke", pairs).unwrap(), 6);
    smoke(&gpu, &out, Launch { grid: 6, ..pairs }).unwrap();
    let error = smoke(&gpu, &out, Launch { grid: 8, ..pairs }).unwrap_err().to_string();
    assert_says(&error, &["cannot launch aristos_smoke", "8 blocks", "and 6 do on 5 of Fake 0"]);
    let error = smoke(&gpu, &out, Launch { shared_bytes: 164 << 10, ..LAUNCH }).unwrap_err().to_string();
    assert_says(&error, &["167936 bytes of shared memory", "at most 166912"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn graph_case() {
    let gpu = alone();
    let out = Buffer::from_slice(&gpu, &[0u64; 3]).unwrap();
    let graph = gpu
        .capture(|| {
            smoke(&gpu, &out, LAUNCH)?;
            smoke(&gpu, &out, LAUNCH)
        })
        .unwrap();
    assert_eq!(out.read_vec::<u64>(16, 1).unwrap(), [0], "recorded, not run");
    gpu.mark(3).unwrap();
    for _ in 0..3 {
        // SAFETY: `out`, the only address in the recorded parameters, is still allocated.
        unsafe { graph.replay() }.unwrap();
    }
    gpu.mark(63).unwrap();
    gpu.synchronise().unwrap();
    assert_eq!(out.read_vec::<u64>(16, 1).unwrap(), [6]);
    assert_eq!(gpu.elapsed(3, 63).unwrap(), Duration::from_millis(6));
    assert!(gpu.elapsed(3, 4).is_err() && gpu.mark(64).is_err());
    // An operation that cannot be recorded is an error, and the stream stays usable.
    let failed = gpu.capture(|| out.zero(0, 8).and_then(|()| out.write(0, &[1u64])));
    assert_says(&failed.map(|_| ()).unwrap_err().to_string(), &["cannot copy 8 bytes to the device"]);
    out.write(0, &[1u64]).unwrap();
}

#[test]
#[ignore = "runs in a process of its own"]
fn tensor_map_case() {
    let gpu = alone();
    let matrix = TensorMap {
        base: 0x10000,
        rows: 96,
        cols: 72,
        row_stride_bytes: 160,
        items: 0,
        item_stride_bytes: 0,
        box_rows: 128,
        box_cols: 64,
        element_bytes: 2,
    };
    let map = gpu.tensor_map(matrix).unwrap();
    let words: Vec<u64> = map[..80].chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    // With cuda.h's numbers: UINT16 = 1; two dimensions, columns first; swizzle 128 B = 3, promotion 256 B = 3.
    assert_eq!(words, [1, 2, 0x10000, 72, 96, 160, 64, 128, 11, 330]);
    let map = gpu.tensor_map(TensorMap { items: 5, item_stride_bytes: 16000, ..matrix }).unwrap();
    let words: Vec<u64> = map[..104].chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words, [1, 3, 0x10000, 72, 96, 5, 160, 16000, 64, 128, 1, 111, 330]);
    let error = gpu.tensor_map(TensorMap { row_stride_bytes: 144 + 8, ..matrix }).unwrap_err().to_string();
    assert_says(&error, &["tensor memory accelerator", "16 bytes apart"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn kernels_case() {
    let error = CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes: 1 }, LIMIT).map(|_| ()).unwrap_err().to_string();
    assert_says(&error, &["made by CUDA", "Fake 0", "compute capability 8.0", "driver of CUDA 12.4", "newer driver"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn status_case() {
    let error = CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes: 2 }, LIMIT).map(|_| ()).unwrap_err().to_string();
    assert_says(&error, &["cannot initialise NVSHMEM", "status 1", "2 is needed"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn nvshmem_case() {
    let gpu = CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes: 3 }, LIMIT).unwrap();
    assert!(gpu.all_reachable().unwrap());
    let symmetric = SymmetricBuffer::new(&gpu, 4096).unwrap();
    assert_eq!(symmetric.peer(2), symmetric.address() + 8192);
    symmetric.zero(0, 4096).unwrap();
    let error = SymmetricBuffer::new(&gpu, 1 << 30).map(|_| ()).unwrap_err().to_string();
    assert_says(&error, &["out of symmetric device memory", "1073741824"]);
    gpu.barrier(LIMIT).unwrap();
    symmetric.free(LIMIT).unwrap();
    gpu.finish().unwrap();
}

fn try_put(n_pes: usize) -> Result<(), GpuError> {
    CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes }, LIMIT).unwrap().try_put()
}

#[test]
#[ignore = "runs in a process of its own"]
fn put_case() {
    try_put(3).unwrap();
}

#[test]
#[ignore = "runs in a process of its own"]
fn lost_case() {
    assert_says(&try_put(2).unwrap_err().to_string(), &["PE 0 waited 10.0 s", "PE 1 puts to it", "did not come"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn wrong_case() {
    assert_says(&try_put(2).unwrap_err().to_string(), &["PE 1 put", "bytes to PE 0", "byte 24 began the word 0x11"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn wrong_pe_case() {
    assert_says(&try_put(2).unwrap_err().to_string(), &["they are PE 1 of 2", "this is PE 0 of 2", "aristos doctor"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn unreachable_case() {
    let gpu = CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes: 2 }, LIMIT).unwrap();
    let symmetric = SymmetricBuffer::new(&gpu, 64).unwrap();
    assert_eq!((symmetric.peer(0), symmetric.peer(1)), (symmetric.address(), 0));
    assert!(!gpu.all_reachable().unwrap());
}

/// Like [`SameOnAllPes`], but the other PE's device has three multiprocessors.
struct SmallerPeer;

impl Bootstrap for SmallerPeer {
    fn my_pe(&self) -> usize {
        0
    }
    fn n_pes(&self) -> usize {
        2
    }
    fn all_gather(&self, mine: &[u8], _: Duration) -> Result<Vec<u8>, GpuError> {
        let mut others = mine.to_vec();
        let share = mine.len() - 4;
        if others[share..] == 10u32.to_le_bytes() {
            others[share..].copy_from_slice(&3u32.to_le_bytes());
        }
        Ok([mine, &others].concat())
    }
    fn barrier(&self, _: Duration) -> Result<(), GpuError> {
        Ok(())
    }
}

#[test]
#[ignore = "runs in a process of its own"]
fn minimum_case() {
    assert_eq!(
        CudaGpu::attach(SameOnAllPes { my_pe: 0, n_pes: 2 }, LIMIT).unwrap().limits().unwrap().multiprocessors,
        10
    );
    assert_eq!(CudaGpu::attach(SmallerPeer, LIMIT).unwrap().limits().unwrap().multiprocessors, 3);
}

#[test]
#[ignore = "runs in a process of its own"]
fn environment_case() {
    let of = |pes| pe_environment(pes, SymmetricBy::Nvshmem).unwrap();
    assert!(of(1).is_empty(), "one PE needs no NVSHMEM");
    let two = of(2);
    let get = |env: &[(String, String)], name: &str| env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    assert_eq!(get(&two, "NVSHMEM_REMOTE_TRANSPORT").as_deref(), Some("none"));
    assert_eq!(get(&two, "NVSHMEM_DISABLE_NVLS"), None, "the user's stays");
    assert_eq!(get(&two, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), None, "a device each");
    assert_eq!(get(&of(5), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), None, "no MPS");
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap();
    std::fs::write(std::path::Path::new(&pipes).join("control"), "").unwrap();
    // Five PEs on two devices: three on the first.
    assert_eq!(get(&of(5), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").as_deref(), Some("33"));
    assert_eq!(get(&of(2), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), None);
}

/// With PEs on two hosts, an error between devices names the network settings.
#[test]
fn failure_between_hosts_names_the_network() {
    let Some(hosts) = crate::hosts::Hosts::make(2) else { return };
    let fakes = Fakes::new(&[], &[]);
    let run = |rank: usize, puts: &str| {
        let args = "run --device cuda --tokens 64 --transport tcp --ranks 2 --timeout 5";
        let mut command = hosts.command(rank, "timeout", ["60", env!("CARGO_BIN_EXE_aristos")]);
        command.args(args.split(' ')).args(["--rank", &rank.to_string()]);
        command.arg("--rendezvous").arg(format!("{}:29400", hosts.address(0))).env("FAKE_PUTS", puts);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        fakes.add_to(command).spawn().unwrap()
    };
    // As seen by the kernels: PE 0 of 2, to which PE 1's put is lost, and vice versa.
    let outputs = [run(0, "0 2 1 -1"), run(1, "1 2 0 -1")].map(|pe| pe.wait_with_output().unwrap());
    for (rank, output) in outputs.iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stderr);
        // NVSHMEM must not be confined to one host.
        assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{text}");
        let lost = format!("PE {} puts to it by NVSHMEM, and they did not come", 1 - rank);
        assert_says(&text, &[&lost, "several hosts", "NVSHMEM_REMOTE_TRANSPORT is not set", "cxi", "aristos doctor"]);
    }
}
