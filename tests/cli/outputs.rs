//! Output that cannot be written: standard output and standard error are full or closed, or files are in the way.

use std::ffi::CString;
use std::fs;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::binary::{Outcome, Tensor, aristos, aristos_run, names_in, read_tensors, run, write_tensors};
use crate::files::Files;
use crate::skip::skip;

/// Commands that print, each in a different way.
fn printing() -> Vec<Command> {
    let mut all = vec![aristos_run("--tokens 16 --hidden 16 --intermediate 16 --pes 1")];
    for args in [
        "--help",
        "--version",
        "doctor",
        "doctor --json",
        "plan --cluster preset:dgx-h100:4 --model qwen3-30b-a3b --tokens-per-device 512",
        "plan --cluster preset:dgx-h100:4 --model qwen3-30b-a3b --tokens-per-device 512 --json",
        "workload --model mixtral-8x7b --tokens-per-device 512",
        "rebalance --load ../loads.json --physical-experts 8 --devices 4",
        "rebalance --load ../loads.json --physical-experts 8 --devices 4 --json",
        "probe --quick --pes 2 --json",
        "bench moe --tokens 16 --hidden 16 --intermediate 16 --iterations 1 --pes 1",
        "bench moe --tokens 16 --hidden 16 --intermediate 16 --iterations 1 --pes 1 --json",
        "bench p2p --pes 2 --max 16 --iterations 2",
        "bench p2p --pes 2 --max 16 --iterations 2 --json",
        "bench straggler --pes 2 --steps 20 --warmup 0",
        "bench straggler --pes 2 --steps 20 --warmup 0 --json",
        "sim linear --roofline H100 --shape ../layer.json --tokens 64",
        "sim comms --params ../params.json --traffic ../load.json",
        "sim routing --experts 4 --tokens 4 --top-k 1 --nodes 2 --out ../routing.json",
        "sweep --layers 4 --width 64 --batch 64 --devices 4",
        "simulate --cluster preset:dgx-h100:2 --tokens 64 --hidden 64 --intermediate 64",
        "bench summary --tokens 16 --hidden 16 --intermediate 16 --steps 2 --pes 1",
    ] {
        all.push(aristos(args.split_whitespace()));
    }
    all
}

/// A working folder for the commands, with the files that some of them read next to it.
fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("loads.json"), r#"{"weight": [[4, 3, 2, 1]]}"#).unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    for name in ["layer", "params", "load"] {
        let file = format!("{name}.json");
        fs::copy(corpus.join(name).join(&file), dir.path().join(&file)).unwrap();
    }
    let inner = dir.path().join("in");
    fs::create_dir(&inner).unwrap();
    (dir, inner)
}

/// Runs a command; returns its exit code and standard error.
fn ended(mut command: Command, stdout: Stdio) -> (Option<i32>, String) {
    let output = command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn full_standard_output_is_an_error() {
    let (_dir, inner) = folder();
    for mut command in printing() {
        command.current_dir(&inner);
        let what = format!("{:?}", command.get_args().collect::<Vec<_>>());
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (code, said) = ended(command, full.into());
        assert_eq!(code, Some(1), "{what}: {said}");
        let said = said.lines().last().unwrap_or_default();
        assert_eq!(said, "aristos: cannot write to standard output: No space left on device (os error 28)", "{what}");
    }
}

#[test]
fn closed_pipe_ends_a_command_silently() {
    let (_dir, inner) = folder();
    for mut command in printing() {
        command.current_dir(&inner);
        let what = format!("{:?}", command.get_args().collect::<Vec<_>>());
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        // The exit code that shells report for a process killed by SIGPIPE.
        assert_eq!(ended(command, writer.into()), (Some(141), String::new()), "{what}");
    }
}

#[test]
fn unwritable_standard_error_is_ignored() {
    let (_dir, inner) = folder();
    for (kind, stderr) in [
        ("full", File::options().write(true).open("/dev/full").unwrap().into()),
        ("closed", {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            Stdio::from(writer)
        }),
    ] {
        let mut command = aristos_run("--tokens 16 --hidden 16 --intermediate 16 --pes 2 --check --json");
        let output = command.env("RUST_LOG", "debug").current_dir(&inner).stdin(Stdio::null()).stderr(stderr).output();
        let output = output.unwrap();
        assert!(output.status.success() && !output.stdout.is_empty(), "{kind}: {output:?}");
    }
    // Also a command that prints an error.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let status = aristos(["run", "--steps", "0"]).stderr(full).stdout(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

/// Calls `work` with a folder on a small file system, if one can be mounted.
fn on_small_disk(work: impl FnOnce(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    let name = CString::new(dir.path().to_str().unwrap()).unwrap();
    let options = CString::new("size=1m").unwrap();
    if rustix::mount::mount(c"tmpfs", &name, c"tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str()).is_err()
    {
        return skip("no file system can be mounted here: no full disk");
    }
    struct Mounted<'a>(&'a Path);
    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
    let _mounted = Mounted(dir.path());
    work(dir.path());
}

/// Fills the disk.
fn fill(disk: &Path) {
    use std::io::Write;
    let mut file = File::create(disk.join("filler")).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    while file.write_all(&[1]).is_ok() {}
}

#[test]
fn full_disk_keeps_the_old_files() {
    on_small_disk(|disk| {
        let plan = disk.join("plan.json");
        let cluster = aristos(["plan", "--cluster", "preset:dgx-h100:4", "--model", "qwen3-30b-a3b"]);
        let planning = |mut command: Command| {
            command.args(["--tokens-per-device", "512", "--out"]).arg(&plan);
            run(command)
        };
        planning(cluster).success();
        let before = fs::read(&plan).unwrap();
        let csv = disk.join("samples.csv");
        fs::write(&csv, "old\n").unwrap();
        fill(disk);
        let again = aristos(["plan", "--cluster", "preset:dgx-h100:4", "--model", "qwen3-30b-a3b", "--effort", "2"]);
        planning(again).refused(&["cannot write", "plan.json", "No space left on device"]);
        assert_eq!(fs::read(&plan).unwrap(), before);
        let mut bench = aristos("bench p2p --pes 2 --max 16 --iterations 2 --csv".split_whitespace());
        bench.arg(&csv);
        run(bench).refused(&["samples.csv", "No space left on device"]);
        assert_eq!(fs::read_to_string(&csv).unwrap(), "old\n");
        let mut plots = aristos("bench p2p --pes 2 --max 16 --iterations 2 --plot".split_whitespace());
        let folder = tempfile::tempdir_in(disk).unwrap();
        plots.arg(folder.path());
        let outcome = run(plots);
        assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
        assert!(outcome.stderr.contains("No space left on device"), "{outcome:?}");
        assert_eq!(names_in(folder.path()), [""; 0]);
        assert_eq!(names_in(disk).len(), 4, "{:?}", names_in(disk));
    });
}

/// Kills a run at moments from its start to its end. The old files must stay until the new ones replace all of them.
#[test]
fn killed_run_leaves_the_files_of_one_run() {
    const NAMES: [&str; 3] = ["routing.json", "weights", "output"];
    const KILLS: u32 = 24;
    let training = |dir: &Path, seed: usize| {
        let mut command = aristos_run("--tokens 64 --hidden 32 --intermediate 32 --pes 2 --sgd 0.1");
        command.arg("--seed").arg(seed.to_string());
        for (flag, name) in ["--save-routing", "--save-weights", "--output"].iter().zip(NAMES) {
            command.arg(flag).arg(dir.join(name));
        }
        command
    };
    let files = |dir: &Path| NAMES.map(|name| fs::read(dir.join(name)).ok());
    let mut wall = Duration::ZERO;
    let wanted = [0, 1].map(|seed| {
        let dir = tempfile::tempdir().unwrap();
        let began = Instant::now();
        run(training(dir.path(), seed)).success();
        wall = began.elapsed();
        files(dir.path())
    });
    assert!(NAMES.iter().enumerate().all(|(at, _)| wanted[0][at] != wanted[1][at]));
    let dir = tempfile::tempdir().unwrap();
    let mut held = 0;
    run(training(dir.path(), held)).success();
    for kill in 1..=KILLS {
        let mut child = training(dir.path(), 1 - held).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(wall * kill / KILLS);
        child.kill().unwrap();
        child.wait().unwrap();
        let found = files(dir.path());
        if found[2].is_none() {
            // Killed between the first and the last file.
            run(training(dir.path(), held)).success();
            continue;
        }
        let seed = wanted.iter().position(|files| *files == found);
        held = seed.unwrap_or_else(|| panic!("kill {kill} of {KILLS} left files of two runs"));
    }
}

#[test]
fn file_system_without_block_counts_is_supported() {
    let dir = tempfile::tempdir().unwrap();
    let name = CString::new(dir.path().to_str().unwrap()).unwrap();
    if rustix::mount::mount(c"ramfs", &name, c"ramfs", rustix::mount::MountFlags::empty(), None).is_err() {
        return skip("no ramfs can be mounted here");
    }
    let mut command = aristos_run("--tokens 16 --hidden 16 --intermediate 16 --pes 1 --output");
    command.arg(dir.path().join("out.safetensors"));
    let outcome = run(command);
    let names = names_in(dir.path());
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    outcome.success();
    assert_eq!(names, ["out.safetensors"]);
}

#[test]
fn input_files_are_never_overwritten() {
    let files = Files::new();
    let model = files.path("model/model.safetensors");
    let input = files.path("in.safetensors");
    let before = (fs::read(&model).unwrap(), fs::read(&input).unwrap());
    let refused = |outcome: Outcome, what: &str| outcome.refused(&[what, "expected another file"]);
    refused(files.run_to(&model, &[]), "a file of the model");
    refused(files.run_to(&files.path("model/config.json"), &[]), "a file of the model");
    refused(files.run_to(&input, &[]), "is the input");
    // By another name.
    std::os::unix::fs::symlink(&model, files.path("link")).unwrap();
    refused(files.run_to(&files.path("link"), &[]), "a file of the model");
    refused(files.run_to(&files.path("out/../model/./model.safetensors"), &[]), "a file of the model");
    assert_eq!((fs::read(&model).unwrap(), fs::read(&input).unwrap()), before);

    let path = |name: &str| files.path(name).display().to_string();
    let plan = |more: &[String]| {
        let preset =
            ["plan", "--cluster", "preset:dgx-h100:4", "--tokens-per-device", "512", "--model", "qwen3-30b-a3b"];
        run(aristos(preset.map(String::from).iter().chain(more)))
    };
    plan(&["--out".into(), path("plan.json")]).success();
    let plan_before = fs::read(files.path("plan.json")).unwrap();
    refused(files.run_to(&files.path("plan.json"), &["--plan", &path("plan.json")]), "is the plan");
    assert_eq!(fs::read(files.path("plan.json")).unwrap(), plan_before);
    refused(plan(&["--out".into(), path("x"), "--draw".into(), path("x")]), "is --out too");
    // An output with the path of an input is refused.
    run(aristos(["workload", "--model", "mixtral-8x7b", "--tokens-per-device", "512", "--out", &path("w.json")]))
        .success();
    run(aristos(["probe", "--quick", "--pes", "2", "--out", &path("c.json")]));
    for (flag, file) in [("--out", "w.json"), ("--draw", "c.json")] {
        let args =
            ["plan", "--cluster", &path("c.json"), "--workload", &path("w.json"), flag, &path(file)].map(String::from);
        refused(run(aristos(args)), file);
    }
    let args =
        ["simulate", "--cluster", "preset:dgx-h100:1", "--plan", &path("plan.json"), "--trace", &path("plan.json")];
    refused(run(aristos(args.map(String::from))), "plan.json");
    assert_eq!(fs::read(files.path("plan.json")).unwrap(), plan_before);
}

/// Files that never end: a pipe without a writer, the kernel's log, a device.
#[test]
fn endless_files_are_errors() {
    let files = Files::new();
    let pipe = files.path("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    let pipe = pipe.display().to_string();
    let config = files.path("model/config.json");
    let input = files.path("in.safetensors").display().to_string();
    let model = files.path("model").display().to_string();
    for file in [&pipe, "/proc/kmsg", "/dev/zero", "/dev/random"] {
        fs::remove_file(&config).unwrap();
        std::os::unix::fs::symlink(file, &config).unwrap();
        for command in [
            vec!["bench", "summary", "--report", file],
            vec!["plan", "--cluster", file, "--model", "mixtral-8x7b", "--tokens-per-device", "512"],
            vec!["plan", "--cluster", "preset:dgx-h100", "--workload", file],
            vec!["rebalance", "--load", file, "--physical-experts", "8", "--devices", "4"],
            vec!["run", "--model", "examples/tiny-moe", "--input", file],
            vec!["run", "--plan", file],
            vec!["run", "--model", &model, "--input", &input],
        ] {
            let start = Instant::now();
            let outcome = run(aristos(&command));
            assert!(start.elapsed() < Duration::from_secs(10), "{command:?}");
            let named = if command.contains(&file) { file } else { "config.json" };
            outcome.refused(&[named]);
        }
    }
}

/// Rows sent as bf16 pass the check with bf16's rounding bound, and take half as many bytes as f32 rows.
#[test]
fn bf16_rows_halve_the_traffic() {
    let layer = "--pes 3 --tokens 100 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --check --json";
    let sent = |flags: &str| {
        let report = run(aristos_run(&format!("{layer} {flags}"))).success().stdout;
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["check"]["passed"], true, "{report}");
        let bytes = |kind: &str| report["traffic"]["remote_bytes"][kind].as_u64().unwrap();
        (report["config"]["wire"].clone(), ["dispatch_rows", "combine_rows", "dispatch_slots"].map(bytes))
    };
    let (own, [out, back, slots]) = sent("");
    assert!(own.is_null() && out > 0 && slots > 0);
    assert_eq!(sent("--wire bf16"), ("bf16".into(), [out / 2, back / 2, slots]));
}

/// If threads cannot be started, a command only takes longer.
#[test]
fn run_continues_without_threads_that_cannot_start() {
    let plan = "plan --cluster preset:perlmutter-a100-40gb:64 --model qwen3-30b-a3b --tokens-per-device 512 --json";
    let simulate = "simulate --cluster preset:perlmutter-a100-40gb --tokens 600 --json";
    for args in
        [plan, simulate, "run --tokens 600 --hidden 128 --intermediate 256 --pes 2 --check", "run --plan auto --check"]
    {
        let command = || aristos(args.split_whitespace());
        let mut without = command();
        // No machine can allocate a stack of this size.
        without.env("RUST_MIN_STACK", (1_u64 << 60).to_string());
        let outcome = run(without).success();
        if args == plan || args == simulate {
            let untimed = |outcome: Outcome| -> Vec<String> {
                outcome.stdout.lines().filter(|line| !line.contains("elapsed_ms")).map(String::from).collect()
            };
            assert_eq!(untimed(outcome), untimed(run(command()).success()));
        }
    }
}

/// With any limit on open files, a run works or reports the low limit in one line, once.
#[test]
fn low_limit_on_open_files_is_one_error() {
    let mut refused = 0;
    for limit in 5..40 {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")]).arg(aristos([""; 0]).get_program());
        command.args("run --tokens 16 --hidden 16 --intermediate 16 --pes 4".split_whitespace());
        let outcome = run(command);
        if outcome.status.success() {
            continue;
        }
        refused += 1;
        let line = outcome.refused(&["open files"]).stderr;
        assert!(line.matches("os error").count() <= 1, "{limit}: {line}");
    }
    assert!((3..30).contains(&refused), "{refused}");
}

/// Under a limit on memory a job ends with one line, and so does a command without PEs.
#[test]
fn low_limit_on_memory_is_one_error() {
    let limited = |kib: usize, args: &str| {
        let mut command = Command::new("sh");
        let script = format!("ulimit -c 0; ulimit -v {kib}; exec \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(aristos([""; 0]).get_program());
        run({
            command.args(args.split_whitespace());
            command
        })
    };
    // Below this limit the loader cannot map the program and its libraries, which with MPI are large.
    let loads = |kib: &usize| limited(*kib, "--version").status.success();
    let least = (20_000..400_000).step_by(20_000).find(loads).unwrap();
    let mut by_allocation = 0;
    for kib in (least..least + 400_000).step_by(40_000) {
        let outcome =
            limited(kib, "run --pes 2 --tokens 20000 --hidden 512 --intermediate 256 --experts 8 --forward-only");
        if outcome.status.success() {
            continue;
        }
        by_allocation += usize::from(outcome.refused(&[]).stderr.contains("ran out of memory"));
    }
    assert!(by_allocation > 0);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("r.json");
    let routing = format!("sim routing --experts 64 --tokens 4000000 --top-k 8 --nodes 8 --out {}", out.display());
    limited(least + 40_000, &routing).refused(&["out of memory", "bytes cannot be allocated", "ulimit -v"]);
}

/// A warning about an unsupported feature of the model is printed once, not by each PE.
#[test]
fn warning_is_printed_once() {
    let files = Files::new();
    // The model becomes a Mixtral, a family with such a field, so its tensors get Mixtral's names.
    let model = files.path("model/model.safetensors");
    let renamed: Vec<(String, Tensor)> = read_tensors(&model)
        .into_iter()
        .map(|(name, tensor)| {
            let names = [(".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")];
            (names.iter().fold(name, |name, (from, to)| name.replace(from, to)), tensor)
        })
        .collect();
    let tensors: Vec<(&str, &[usize], &[f32])> =
        renamed.iter().map(|(name, (shape, x))| (&**name, &**shape, &**x)).collect();
    write_tensors(&model, &tensors);
    let text = fs::read_to_string(files.path("model/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    files.set("model_type", "mixtral".into());
    files.set("intermediate_size", config["moe_intermediate_size"].clone());
    files.set("num_local_experts", 8.into());
    files.set("router_jitter_noise", 0.1.into());
    let outcome = files.run(&[]);
    assert!(outcome.status.success(), "{outcome:?}");
    assert_eq!(outcome.stderr.matches("router_jitter_noise, random noise").count(), 1, "{outcome:?}");
}
