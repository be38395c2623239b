//! Tests of the CUDA kernels on the CPU. Builds `kernels/host` and a sixth of `kernels/tests/*_test.cpp`, or all of
//! them with `tools/test --deep`, using make and g++, and runs the programs; some that have cases for it also run under
//! ThreadSanitizer. `kernels/tests/testing.h` describes the programs. `kernels/tests/cute_layouts.cpp` also runs if its
//! headers are installed.

mod sample;
mod skip;

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sample::Sample;

/// Serialises calls of make, because two tests build the same objects.
static MAKE: Mutex<()> = Mutex::new(());

/// Time limit of one program, with a margin for a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

#[test]
fn programs_pass() {
    let all = programs(|_| true);
    let sample = Sample::new(all.len().div_ceil(6) as u64, all.len() as u64);
    let sampled: Vec<String> = sample.numbers().map(|number| all[number as usize].clone()).collect();
    check(&sampled, false);
}

#[test]
fn layouts_equal_cutes() {
    let cache =
        env::var_os("ARISTOS_CACHE").map_or(Path::new(env!("CARGO_MANIFEST_DIR")).join("target"), PathBuf::from);
    let cuda = env::var_os("CUDA_HOME").map_or(cache.join("cuda-toolchain/nvidia/cu13"), PathBuf::from).join("include");
    let cutlass = cache.join("cutlass/include");
    for (header, tool) in
        [(cutlass.join("cute/tensor.hpp"), "cutlass"), (cuda.join("cuda_runtime.h"), "cuda-toolchain")]
    {
        if !header.exists() {
            return skip::skip(format!("no {}: tools/{tool}", header.display()));
        }
    }
    let [mut to_cutlass, mut to_cuda] = ["CUTLASS=", "CUDA="].map(OsString::from);
    to_cutlass.push(cutlass);
    to_cuda.push(cuda);
    let out = build(&["cute_layouts".to_string()], &[to_cutlass, to_cuda], false);
    run(&out, "cute_layouts").unwrap();
}

#[test]
fn programs_pass_under_thread_sanitizer() {
    // Programs with cases for it, and those that pass as a whole.
    let all =
        programs(|source| source.contains("CASE(tsan_") || source.contains("// Passes with ThreadSanitizer, too."));
    let sample = Sample::new(1, all.len() as u64);
    let sampled: Vec<String> = sample.numbers().map(|number| all[number as usize].clone()).collect();
    check(&sampled, true);
}

/// The names of the test programs whose source is `wanted`.
fn programs(wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/tests");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("kernels/tests can be listed")
        .filter_map(|entry| entry.expect("kernels/tests can be listed").file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".cpp").map(str::to_owned))
        .filter(|name| name.ends_with("_test"))
        .filter(|name| wanted(&fs::read_to_string(folder.join(name).with_extension("cpp")).expect("a readable source")))
        .collect();
    names.sort();
    assert!(!names.is_empty(), "kernels/tests has no programs");
    names
}

/// Builds and runs `programs`, and fails with the output of those that failed.
fn check(programs: &[String], thread_sanitizer: bool) {
    let out = build(programs, &[], thread_sanitizer);
    let failures: Vec<String> = programs.iter().filter_map(|program| run(&out, program).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Builds `programs` with the make variables `settings`; returns the output folder.
fn build(programs: &[String], settings: &[OsString], thread_sanitizer: bool) -> PathBuf {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = if thread_sanitizer { "kernels-tsan" } else { "kernels" };
    let out = tmp.parent().expect("a target folder").join(folder);
    fs::create_dir_all(&out).expect("the target folder can be written");
    for tool in ["make", "g++"] {
        let found = Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        assert!(found.is_ok_and(|status| status.success()), "the kernels' tests need make and g++: no {tool} here");
    }
    let mut make = Command::new("make");
    make.arg("-C").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/host"));
    make.arg(format!("-j{}", thread::available_parallelism().map_or(1, usize::from)));
    make.arg(format!("OUT={}", out.display()));
    make.args(thread_sanitizer.then_some("TSAN=1")).args(settings);
    make.args(programs.iter().map(|program| out.join(program)));
    let _alone = MAKE.lock().unwrap_or_else(PoisonError::into_inner);
    // Cargo's jobserver must not affect this make.
    let output = make.env_remove("MAKEFLAGS").env_remove("MFLAGS").output().expect("make runs");
    assert!(output.status.success(), "make failed:\n{}", String::from_utf8_lossy(&output.stderr));
    out
}

fn run(out: &Path, program: &str) -> Result<(), String> {
    let result = attempt(out, program, Command::new(out.join(program)));
    // Older sanitizers fail with strong address space randomisation.
    if matches!(&result, Err(text) if text.contains("unexpected memory mapping")) {
        let mut fixed = Command::new("setarch");
        fixed.arg("-R").arg(out.join(program));
        return attempt(out, program, fixed);
    }
    result
}

fn attempt(out: &Path, program: &str, mut command: Command) -> Result<(), String> {
    let log = out.join(program).with_extension("log");
    let file = File::create(&log).expect("the target folder can be written");
    let errors = file.try_clone().expect("a file can be cloned");
    let start = Instant::now();
    let mut child = command.stdout(file).stderr(errors).spawn().map_err(|error| format!("{program}: {error}"))?;
    let status = loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => break status.to_string(),
            None if start.elapsed() > LIMIT => {
                child.kill().expect("a child can be killed");
                child.wait().expect("a child can be waited for");
                break format!("no end after {LIMIT:?}");
            }
            None => thread::sleep(Duration::from_millis(10)),
        }
    };
    let text = String::from_utf8_lossy(&fs::read(&log).expect("a log that was just written")).into_owned();
    // A program prints its result at the end; under the sanitizer, the exit status alone is not reliable.
    let ended = text.lines().any(|line| line.ends_with(" cases, 0 failed"));
    if ended && status == "exit status: 0" {
        return Ok(());
    }
    Err(format!("{program}: {status}\n{}", failed_cases(&text).join("\n")))
}

/// The last lines of each failed case, and of the output after the last case.
fn failed_cases(text: &str) -> Vec<&str> {
    let mut shown = Vec::new();
    let mut case = Vec::new();
    for line in text.lines() {
        if line.starts_with("ok ") {
            case.clear();
        }
        case.push(line);
        if line.starts_with("FAILED ") {
            shown.extend_from_slice(&case[case.len().saturating_sub(60)..]);
            case.clear();
        }
    }
    shown.extend_from_slice(&case[case.len().saturating_sub(60)..]);
    shown
}
