//! NVSHMEM's fixed-size heap: it must be as large as the job needs, and set before NVSHMEM starts, under any launcher.

use std::process::{Command, Output, Stdio};

use crate::{Fakes, assert_says};

const LAYER: &str = "run --device cuda --hidden 64 --intermediate 64 --timeout 5";

/// The program with a fixed-size heap. The fake kernels are empty, so it fails once the devices are open.
fn command(fakes: &Fakes, args: &str, env: &[(&str, &str)]) -> Command {
    let mut command = fakes.add_to(Command::new("timeout"));
    command.args(["60", env!("CARGO_BIN_EXE_aristos")]).args(args.split_whitespace());
    command.env("NVSHMEM_DISABLE_CUDA_VMM", "1").env("FAKE_PUTS", "job").env("FAKE_DEVICES", "4");
    command.env_remove("NVSHMEM_SYMMETRIC_SIZE").envs(env.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The chosen size, bytes, which must be reported once, in one line.
#[track_caller]
fn chosen(text: &str) -> u64 {
    let start = "aristos: NVSHMEM_SYMMETRIC_SIZE=";
    let lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(start)).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert_says(lines[0], &["NVSHMEM_DISABLE_CUDA_VMM", "does not grow"]);
    lines[0].split(' ').next().unwrap().parse().unwrap()
}

/// Sizes of the heaps that NVSHMEM created, bytes.
fn made(fakes: &Fakes) -> Vec<u64> {
    let log = std::fs::read_to_string(fakes.log()).unwrap_or_default();
    let heap = |line: &str| line.strip_prefix("heap of ")?.strip_suffix(" bytes")?.parse().ok();
    log.lines().filter_map(heap).collect()
}

#[test]
fn launcher_sets_heap_size_for_the_layer() {
    let sizes = ["--tokens 64", "--tokens 65536"].map(|tokens| {
        let fakes = Fakes::new(&[], &[]);
        let text = stderr(&command(&fakes, &format!("{LAYER} --pes 2 {tokens}"), &[]).output().unwrap());
        let size = chosen(&text);
        assert_eq!(made(&fakes), [size; 2], "{text}");
        size
    });
    // At least the size of the test of puts, which exceeds that of the first layer.
    assert!(sizes[0] >= 3 << 20 && sizes[0] < 16 << 20 && sizes[1] > sizes[0], "{sizes:?}");
}

#[test]
fn benchmark_and_probe_set_heap_size() {
    for args in [
        "bench moe --device cuda --dtype bf16 --tokens 64 --hidden 64 --intermediate 64 --iterations 1 --warmup 0 --pes 2",
        "probe --device cuda --pes 2 --quick --hidden 64 --intermediate 64 --json",
    ] {
        let fakes = Fakes::new(&[], &[]);
        let text = stderr(&command(&fakes, args, &[]).output().unwrap());
        assert_eq!(made(&fakes), [chosen(&text); 2], "{text}");
    }
}

/// Under another launcher each PE process must set the variable itself.
#[test]
fn pes_under_another_launcher_set_heap_size() {
    let fakes = Fakes::new(&[], &[]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let pe = |rank: usize, env: &[(&str, &str)]| {
        let place = format!("--transport tcp --ranks 2 --rank {rank} --rendezvous 127.0.0.1:{port}");
        command(&fakes, &format!("{LAYER} --tokens 64 {place}"), env).spawn().unwrap()
    };
    let outputs = [pe(1, &[]), pe(0, &[])].map(|pe| pe.wait_with_output().unwrap());
    let [other, zero] = outputs.each_ref().map(stderr);
    assert!(!other.contains("NVSHMEM_SYMMETRIC_SIZE"), "{other}");
    assert_eq!(made(&fakes), [chosen(&zero); 2], "{zero}");
    // A size set by the user is kept, and checked once all PEs have joined.
    std::fs::remove_file(fakes.log()).unwrap();
    let outputs = [pe(1, &[("NVSHMEM_SYMMETRIC_SIZE", "1M")]), pe(0, &[("NVSHMEM_SYMMETRIC_SIZE", "1M")])];
    let [other, zero] = outputs.map(|pe| stderr(&pe.wait_with_output().unwrap()));
    assert!(other.is_empty() && zero.lines().count() == 1, "{other}{zero}");
    assert_says(&zero, &["NVSHMEM_SYMMETRIC_SIZE is 1M", "needs", "bytes"]);
    assert!(made(&fakes).is_empty(), "NVSHMEM has begun");
}

#[test]
fn heap_size_of_the_user_is_kept_or_refused() {
    let fakes = Fakes::new(&[], &[]);
    let args = format!("{LAYER} --tokens 64 --pes 2");
    let output = command(&fakes, &args, &[("NVSHMEM_SYMMETRIC_SIZE", "2M")]).output().unwrap();
    let text = stderr(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{text}");
    assert_says(
        &text,
        &["NVSHMEM_SYMMETRIC_SIZE is 2M", "needs", "bytes of a heap that does not grow", "leave it unset"],
    );
    assert!(made(&fakes).is_empty(), "a PE has started");
    let text = stderr(&command(&fakes, &args, &[("NVSHMEM_SYMMETRIC_SIZE", "33554432")]).output().unwrap());
    assert!(!text.contains("NVSHMEM_SYMMETRIC_SIZE"), "{text}");
    assert_eq!(made(&fakes), [32 << 20; 2]);
}

#[test]
fn growing_heap_has_no_size() {
    for env in [("NVSHMEM_DISABLE_CUDA_VMM", "0"), ("NVSHMEM_DISABLE_CUDA_VMM", "")] {
        let fakes = Fakes::new(&[], &[]);
        let text = stderr(&command(&fakes, &format!("{LAYER} --tokens 64 --pes 2"), &[env]).output().unwrap());
        assert!(!text.contains("NVSHMEM_SYMMETRIC_SIZE"), "{text}");
        let log = std::fs::read_to_string(fakes.log()).unwrap();
        assert!(log.starts_with("init"), "{log}");
    }
}
