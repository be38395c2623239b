//! `gpu/check.sh` on a machine without a GPU, with commands that pass, fail and hang. All programs that it calls are fakes on
//! its PATH.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The fake binary: logs its arguments; fails if they contain FAIL, and hangs if they contain HANG. `bench` measures the same
/// time in every iteration except the first.
const ARISTOS: &str = r#"echo "$*" >>"$CALLS"
if [ -n "${FAIL:-}" ] && [[ "$*" == *"$FAIL"* ]]; then echo "it failed, NVSHMEM_DEBUG=${NVSHMEM_DEBUG:-not set}"; exit 3; fi
if [ -n "${HANG:-}" ] && [[ "$*" == *"$HANG"* ]]; then sleep 600; fi
while [ $# -gt 0 ] && [ "$1" != --csv ]; do shift; done
[ $# = 0 ] || {
    echo dtype,iteration,measurement,passes,pe,rows,cpu,seconds
    for pass in forward forward+backward; do
        for seconds in 0.9 0.002 0.002; do echo "bf16,0,pipelined,$pass,0,1,0,$seconds"; done
        echo "bf16,0,bulk,$pass,0,1,0,0.5"
    done
} >"$2""#;

/// A copy of the script with fake programs and libraries.
struct World(TempDir);

impl World {
    fn new() -> World {
        let world = World(tempfile::tempdir().unwrap());
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        for file in ["gpu/check.sh", "gpu/beside_torch.awk", "kernels/launch.h"] {
            let copy = world.at(file);
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            fs::copy(root.join(file), copy).unwrap();
        }
        fs::create_dir_all(world.at("nvshmem/include")).unwrap();
        fs::write(world.at("nvshmem/include/nvshmem.h"), "").unwrap();
        // The compiler's output is a program that succeeds.
        let nvcc = "while [ \"$1\" != -o ]; do shift; done\nprintf '#!/bin/sh\\nexit 0\\n' >\"$2\" && chmod +x \"$2\"";
        world.program("cuda/bin/nvcc", nvcc);
        world.program(
            "bin/nvidia-smi",
            "case $* in *compute_cap*) echo 9.0 ;; --list-gpus) echo GPU 0 ;; *) echo the driver says ;; esac",
        );
        world.program("bin/ldconfig", "echo 'libcuda.so.1 (libc6,x86-64) => /nowhere/libcuda.so.1'");
        world.program("bin/dmesg", "echo 'NVRM: Xid 31'");
        for name in ["nvidia-cuda-mps-control", "pgrep", "compute-sanitizer"] {
            world.program(&format!("bin/{name}"), "exit 0");
        }
        let torch = "case $1 in -c) exit 1 ;; esac\nprintf 'what,shape,tokens,skew,pass,median_ms\\n\
            cublas,mixtral,4096,0,forward,1.0\\ntorch,mixtral,4096,0.0,forward,4.0\\ntorch,mixtral,4096,0.0,forward+backward,8.0\\n'";
        world.program("bin/python3", torch);
        world.program("target/gpu/aristos", ARISTOS);
        world
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn program(&self, path: &str, script: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/usr/bin/env bash\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn check(&self, args: &str, env: &[(&str, &str)]) -> Output {
        let path = format!("{}:{}", self.at("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("bash");
        command.arg(self.at("gpu/check.sh")).args(args.split_whitespace()).env("PATH", path).env_remove("LIMIT");
        for (name, home) in
            [("CUDA_HOME", "cuda"), ("NVSHMEM_HOME", "nvshmem"), ("TMPDIR", "mps"), ("OUT", "out"), ("CALLS", "calls")]
        {
            command.env(name, self.at(home));
        }
        command.envs(env.iter().copied()).output().unwrap()
    }

    /// The binary's calls since the last query.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.at("calls")).unwrap_or_default();
        let _ = fs::remove_file(self.at("calls"));
        text.lines().map(str::to_string).collect()
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.at("out").join(file)).unwrap_or_default()
    }
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The numbers of a stage in the last table: passed, passed before, failed.
#[track_caller]
fn counts(output: &Output, stage: &str) -> [usize; 3] {
    let text = stdout(output);
    let row = text
        .lines()
        .rev()
        .find(|line| line.split_whitespace().next() == Some(stage))
        .unwrap_or_else(|| panic!("{text}"));
    let mut numbers = row.split_whitespace().skip(1).map(|number| number.parse().unwrap());
    std::array::from_fn(|_| numbers.next().unwrap())
}

/// The most informative stages come first, limited to ten minutes.
#[test]
fn short_stages_come_first_within_ten_minutes() {
    let world = World::new();
    let text = stdout(&world.check("--dry-run all", &[]));
    let stages: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("== ")).collect();
    assert_eq!(stages[..4], ["facts", "smoke", "correct", "speed"], "{text}");
    assert_eq!(stages.len(), 16, "{stages:?}");
    let script = fs::read_to_string(world.at("gpu/check.sh")).unwrap();
    let limits = script.lines().find(|line| line.starts_with("declare -A limits=")).unwrap();
    let seconds: u32 = limits.split(['=', ' ', ')']).filter_map(|word| word.parse::<u32>().ok()).sum();
    assert_eq!(seconds, 600, "{limits}");
    let of = |stage: &str| {
        text.split("== ").find_map(|part| part.strip_prefix(&format!("{stage}\n"))).unwrap().lines().count()
    };
    assert!(of("correct") * 3 < of("correct-all") && of("speed") * 3 < of("speed-all"), "{text}");
    // The long stages include the commands of the short ones.
    for stage in ["correct", "speed"] {
        let commands = |stage: &str| -> Vec<&str> {
            text.split("== ").find_map(|part| part.strip_prefix(&format!("{stage}\n"))).unwrap().lines().collect()
        };
        let all = commands(&format!("{stage}-all"));
        for command in commands(stage).iter().filter(|command| !command.contains("torch_layer.py")) {
            assert!(all.contains(command), "{command}");
        }
    }
}

#[test]
fn stage_resumes_after_passed_commands() {
    let world = World::new();
    let first = world.check("smoke", &[("FAIL", "--graph")]);
    let calls = world.calls();
    let [passed, before, failed] = counts(&first, "smoke");
    assert_eq!((first.status.code(), before, failed), (Some(1), 0, 1), "{}", stdout(&first));
    // A failed command runs twice, to collect diagnostics.
    assert_eq!(calls.len(), passed + 2, "{calls:?}");
    // The next run repeats only the failed command; the run after it repeats none.
    let second = world.check("smoke", &[]);
    assert_eq!((second.status.code(), counts(&second, "smoke")), (Some(0), [1, passed, 0]));
    assert!(world.calls().iter().all(|call| call.contains("--graph")));
    let third = world.check("smoke", &[]);
    assert_eq!((counts(&third, "smoke"), world.calls().len()), ([0, passed + 1, 0], 0));
    let again = world.check("--again smoke", &[]);
    assert_eq!((counts(&again, "smoke"), world.calls().len()), ([passed + 1, 0, 0], passed + 1));
    // With another binary, all commands run again.
    world.program("target/gpu/aristos", &format!("{ARISTOS}\n# another"));
    assert_eq!(counts(&world.check("smoke", &[]), "smoke"), [passed + 1, 0, 0]);
}

/// A command that one stage has run is skipped by the others.
#[test]
fn long_stage_skips_commands_of_the_short_one() {
    let world = World::new();
    let [short, _, failed] = counts(&world.check("correct", &[]), "correct");
    assert!(short > 10 && failed == 0);
    let [passed, before, failed] = counts(&world.check("correct-all", &[]), "correct-all");
    assert_eq!((before, failed), (short, 0));
    assert!(passed > 3 * short, "{passed}");
}

#[test]
fn diagnostics_of_failures_are_kept() {
    let world = World::new();
    let output = world.check("correct", &[("FAIL", "--device cuda")]);
    let [passed, _, failed] = counts(&output, "correct");
    assert!(passed == 0 && failed > 4, "{}", stdout(&output));
    assert!(stdout(&output).contains("FAILED (3) correct: 1 PEs, hopper, odd sizes\n"), "{}", stdout(&output));
    let why = world.read("correct.why");
    for part in [
        "#### 1 PEs, hopper, odd sizes\n$ target/gpu/aristos run",
        "the driver says",
        "NVRM: Xid 31",
        "NVSHMEM_DEBUG=INFO",
    ] {
        assert!(why.contains(part), "no {part:?} in {why}");
    }
    // Diagnostics are collected for the first failures only.
    assert_eq!(why.matches("the second time").count(), 3, "{why}");
    assert!(world.read("correct.log").contains("it failed, NVSHMEM_DEBUG=not set\n#### exit code 3 after"));
    assert_eq!(world.read("smoke.why"), "");
}

#[test]
fn stage_ends_at_its_limit() {
    let world = World::new();
    let began = Instant::now();
    // The second command hangs; the following ones are not started.
    let output = world.check("smoke speed", &[("HANG", "--gemm ampere"), ("LIMIT", "4")]);
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
    let [passed, _, failed] = counts(&output, "smoke");
    let text = stdout(&output);
    assert!(passed == 1 && failed > 3 && output.status.code() == Some(1), "{text}");
    assert!(text.contains("FAILED (124) smoke: 1 PE, Ampere path\n"), "{text}");
    assert!(text.contains("not run: the stage's 4 s are over"), "{text}");
    // The next stage has its own limit.
    assert_eq!(counts(&output, "speed")[2], 0, "{text}");
    // Diagnostics get ten more seconds.
    let why = world.read("smoke.why");
    assert!(why.contains("the driver says") && why.contains("#### exit code 124 the second time"), "{why}");
}

#[test]
fn times_are_compared_with_pytorch_and_cublas() {
    let world = World::new();
    let output = world.check("speed", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    let calls = world.calls();
    assert!(calls.iter().any(|call| call.contains("--hidden 7168 --intermediate 2048 ")), "{calls:?}");
    // Medians for the configurations that PyTorch was measured with; cuBLAS's time covers the forward GEMMs.
    let table = world.read("speed.csv");
    let rows: Vec<&str> = table.lines().skip(1).collect();
    assert_eq!(
        rows,
        [
            "mixtral,4096,0,forward,2.0000,4.0000,1.0000,0.500,0.500",
            "mixtral,4096,0,forward+backward,2.0000,8.0000,3.0000,0.250,1.500"
        ]
    );
    assert!(stdout(&output).contains("ours_of_torch"), "{}", stdout(&output));
}
