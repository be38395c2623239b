//! Invalid input: one clear line, a non-zero exit code, and no files left behind.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode};
use serde_json::json;

use crate::binary::{aristos, aristos_run, names_in, run, write_tensors};
use crate::files::{Files, HIDDEN};
use crate::skip::skip;

/// Runs the files' job, which must fail with a line that contains all of `parts`, and leave no output.
#[track_caller]
fn refused(files: &Files, more: &[&str], parts: &[&str]) {
    files.run(more).refused(parts);
    assert_eq!(names_in(&files.path("out")), [""; 0], "{parts:?}");
}

fn truncate(path: &Path, len: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn missing_files_are_errors() {
    let refused_without = |missing: &str, parts: &[&str]| {
        let files = Files::new();
        if missing == "model" {
            fs::remove_dir_all(files.path(missing)).unwrap();
        } else {
            fs::remove_file(files.path(missing)).unwrap();
        }
        refused(&files, &[], parts);
    };
    refused_without("in.safetensors", &["in.safetensors", "No such file"]);
    refused_without("model/config.json", &["model/config.json", "No such file"]);
    refused_without("model/model.safetensors", &["model", "model.safetensors"]);
    refused_without("model", &["model/config.json", "No such file"]);
    let files = Files::new();
    fs::remove_file(files.shard()).unwrap();
    refused(&files, &[], &["model-00001-of-00001.safetensors", "No such file"]);
}

#[test]
fn named_pipes_do_not_block() {
    for name in ["in.safetensors", "model/config.json", "model/model.safetensors", "model/model.safetensors.index.json"]
    {
        let files = Files::new();
        if name.ends_with("index.json") {
            files.shard();
        }
        let path = files.path(name);
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        refused(&files, &[], &[path.to_str().unwrap(), "is not a regular file"]);
    }
}

#[test]
fn truncated_files_are_errors() {
    for (len, parts) in [
        (0, ["in.safetensors", "too short"]),
        (7, ["in.safetensors", "too short"]),
        (50, ["in.safetensors", "truncated"]),
        (1000, ["in.safetensors", "truncated"]),
    ] {
        let files = Files::new();
        truncate(&files.path("in.safetensors"), len);
        refused(&files, &[], &parts);
    }
    let files = Files::new();
    let input = files.path("in.safetensors");
    truncate(&input, fs::metadata(&input).unwrap().len() - 1);
    refused(&files, &[], &["in.safetensors", "tensor ", "truncated"]);
    for sharded in [false, true] {
        for lost in [1, 100_000] {
            let files = Files::new();
            let name = if sharded { "model-00001-of-00001.safetensors" } else { "model.safetensors" };
            let shard = if sharded { files.shard() } else { files.path("model/model.safetensors") };
            truncate(&shard, fs::metadata(&shard).unwrap().len() - lost);
            refused(&files, &[], &[name, "truncated", "tensor "]);
        }
    }
}

#[test]
fn files_of_another_format_are_errors() {
    let spoiled = |name: &str, content: &[u8], parts: &[&str]| {
        let files = Files::new();
        fs::write(files.path(name), content).unwrap();
        refused(&files, &[], parts);
    };
    spoiled(
        "in.safetensors",
        b"hidden_states are not here, this is text",
        &["in.safetensors", "not a safetensors file"],
    );
    spoiled("in.safetensors", &[0xff; 4096], &["in.safetensors", "not a safetensors file"]);
    spoiled("in.safetensors", b"\x02\0\0\0\0\0\0\0{}", &["in.safetensors", "hidden_states"]);
    spoiled("model/config.json", b"{", &["config.json", "JSON"]);
    spoiled("model/config.json", b"[]", &["config.json", "JSON"]);
    spoiled("model/config.json", b"{}", &["config.json", "model_type"]);
    for index in [&b"{"[..], b"{}", b"{\"weight_map\": []}", b"{\"weight_map\": {\"a\": 1}}"] {
        let files = Files::new();
        files.shard();
        fs::write(files.path("model/model.safetensors.index.json"), index).unwrap();
        refused(&files, &[], &["model.safetensors.index.json"]);
    }
    let files = Files::new();
    fs::remove_file(files.path("in.safetensors")).unwrap();
    fs::create_dir(files.path("in.safetensors")).unwrap();
    refused(&files, &[], &["in.safetensors"]);
}

#[test]
fn wrong_shapes_are_errors() {
    let with = |hidden: &[usize], grad: &[usize], parts: &[&str]| {
        let files = Files::new();
        let numbers = vec![0.5; 4096];
        let sized = |shape: &[usize]| shape.iter().product::<usize>();
        let tensors =
            [("hidden_states", hidden, &numbers[..sized(hidden)]), ("grad_output", grad, &numbers[..sized(grad)])];
        write_tensors(&files.path("in.safetensors"), &tensors);
        refused(&files, &[], parts);
    };
    with(&[4, 72], &[4, 72], &["in.safetensors", "hidden_states has shape [4, 72]", "[tokens, 80]"]);
    with(&[4, HIDDEN], &[3, HIDDEN], &["grad_output has shape [3, 80]", "expected [4, 80]"]);
    with(&[4, HIDDEN], &[HIDDEN, 4], &["grad_output has shape [80, 4]", "expected [4, 80]"]);
    with(&[4 * HIDDEN], &[4 * HIDDEN], &["hidden_states has shape [320]", "[tokens, hidden]"]);
    with(&[1, 4, HIDDEN], &[1, 4, HIDDEN], &["hidden_states has shape [1, 4, 80]", "[tokens, hidden]"]);
    with(&[4, 0], &[4, 0], &["hidden_states has shape [4, 0]", "[tokens, hidden]"]);
    let files = Files::new();
    files.set("moe_intermediate_size", json!(100));
    refused(&files, &[], &["model.safetensors", "shape [104, 80]", "expected [100, 80]"]);
    let files = Files::new();
    files.set("num_local_experts", json!(9));
    refused(&files, &[], &["model.safetensors", "shape [8, 80]", "expected [9, 80]"]);
}

#[test]
fn missing_models_and_layers_are_errors() {
    let changed = |field: &str, value: serde_json::Value, more: &[&str], parts: &[&str]| {
        let files = Files::new();
        files.set(field, value);
        refused(&files, more, parts);
    };
    changed("model_type", json!("llama"), &[], &["model_type is \"llama\"", "mixtral", "deepseek_v3"]);
    changed("model_type", json!(null), &[], &["model_type is missing"]);
    changed("x", json!(0), &["--layer", "2"], &["layer 2 is out of range", "0 to 1"]);
    changed("x", json!(0), &["--layer", "18446744073709551615"], &["out of range"]);
    changed("mlp_only_layers", json!([1]), &[], &["layer 1 is dense"]);
    changed("num_experts_per_tok", json!(9), &[], &["top-k is 9", "1 to 8"]);
    changed("num_experts_per_tok", json!(0), &[], &["top-k is 0", "1 to 8"]);
    changed("num_experts_per_tok", json!(-1), &[], &["num_experts_per_tok is -1"]);
    changed("hidden_size", json!("80"), &[], &["hidden_size is \"80\""]);
    changed("hidden_size", json!(u64::MAX), &[], &["18446744073709551615"]);
    changed("num_local_experts", json!(1u64 << 62), &[], &["4611686018427387904"]);
    changed("quantization_config", json!({"quant_method": "fp8"}), &[], &["quantization_config", "fp8"]);
}

#[test]
fn non_finite_numbers_are_reported_with_their_position() {
    for (tensor, position, value, part) in [
        ("hidden_states", (17, 3), f32::NAN, "hidden_states[17, 3] is NaN"),
        ("hidden_states", (0, 0), f32::INFINITY, "hidden_states[0, 0] is inf"),
        ("grad_output", (23, 79), f32::NAN, "grad_output[23, 79] is NaN"),
        ("grad_output", (5, 6), f32::NEG_INFINITY, "grad_output[5, 6] is -inf"),
    ] {
        let mut files = Files::new();
        let values = if tensor == "grad_output" { &mut files.grad_output } else { &mut files.hidden_states };
        values[position.0 * HIDDEN + position.1] = value;
        files.write_input(24);
        refused(&files, &[], &["in.safetensors", part]);
        refused(&files, &["--check"], &["in.safetensors", part]);
    }
}

#[test]
fn invalid_synthetic_layers_are_errors() {
    for (args, parts) in [
        ("--experts 8 --top-k 9", ["top-k is 9", "1 to 8"]),
        ("--top-k 0", ["top-k is 0", "1 to 8"]),
        ("--experts 0", ["experts is 0", "1 to 1048576"]),
        ("--hidden 0", ["hidden is 0", "1 to 1048576"]),
        ("--intermediate 0", ["intermediate is 0", "1 to 1048576"]),
        ("--shared-intermediate 0", ["shared intermediate is 0", "1 to 1048576"]),
        ("--experts 300 --hidden 256", ["experts is 300", "256"]),
        ("--hot-ratio 1.5", ["hot ratio is 1.5", "0 to 1"]),
        ("--hot-weight NaN", ["hot weight is NaN", "0 to 1"]),
        ("--capacity-factor 0", ["capacity factor is 0", "above 0"]),
        ("--tokens 10000000000000", ["memory", "available"]),
        ("--tokens 18446744073709551615 --pes 1", ["memory", "available"]),
        ("--hidden 4294967296 --intermediate 4294967296", ["hidden is", "1 to 1048576"]),
        ("--hidden 1000000 --intermediate 1000000", ["memory", "available"]),
        // The first needs most memory for the PEs' routers, the second for their receive windows.
        ("--experts 16384 --hidden 16384 --intermediate 1 --tokens 0 --pes 1024", ["memory", "available"]),
        ("--tokens 1048576 --hidden 1024 --intermediate 1 --pes 1024 --budget-factor 1e9", ["memory", "available"]),
        ("--intermediate 18446744073709551615", ["intermediate is 18446744073709551615", "1 to 1048576"]),
        ("--experts 9223372036854775807 --hidden 1024", ["experts is", "1 to 1048576"]),
    ] {
        run(aristos_run(args)).refused(&parts);
    }
}

#[test]
fn control_characters_in_names_are_removed() {
    let files = Files::new();
    let outcome = files.run_to(&files.path("no\n\x1b[2J\rsuch/out"), &[]);
    outcome.refused(&["/no [2J such/out", "No such file"]);
}

#[test]
fn invalid_flags_are_errors() {
    for (args, parts) in [
        ("--pes 0", ["--pes 0", "1 to 1024"]),
        ("--pes 1025", ["--pes 1025", "1 to 1024"]),
        ("--steps 0", ["--steps is 0", "at least 1"]),
        ("--timeout 0", ["--timeout is 0,", "a number of seconds above 0"]),
        ("--timeout nan", ["--timeout is NaN", "a number of seconds above 0"]),
        ("--timeout=-1", ["--timeout is -1", "a number of seconds above 0"]),
        ("--timeout 1e30", ["--timeout is 1", "at most 16777216 seconds"]),
        ("--timeout inf", ["--timeout is inf", "at most 16777216 seconds"]),
        ("--budget-factor 0", ["--budget-factor is 0", "above 0"]),
        ("--budget-factor inf", ["--budget-factor is inf", "above 0"]),
        ("--chunk-rows 0", ["--chunk-rows is 0", "at least 1"]),
    ] {
        run(aristos_run(args)).refused(&parts);
        run(aristos_run(&format!("--tokens 4 {args}"))).refused(&parts);
    }
    run(aristos(["bench", "moe", "--timeout", "0"])).refused(&["--timeout is 0, expected a number of seconds above 0"]);
    for (args, parts) in [
        ("--pes two", ["'two'", "--pes"]),
        ("--pes=-1", ["'-1'", "--pes"]),
        ("--pes 18446744073709551616", ["'18446744073709551616'", "--pes"]),
        ("--steps 1.5", ["'1.5'", "--steps"]),
        ("--tokens x", ["'x'", "--tokens"]),
        ("--hot-ratio much", ["'much'", "--hot-ratio"]),
        ("--seed=-1", ["'-1'", "--seed"]),
        ("--dtype f64", ["'f64'", "bf16"]),
        ("--mode fast", ["'fast'", "pipelined"]),
        ("--router best", ["'best'", "softmax"]),
        ("--activation tanh", ["'tanh'", "gelu-tanh"]),
        ("--no-such-flag", ["--no-such-flag", "Usage"]),
        ("--layer 1", ["--model", "Usage"]),
        ("--input examples/tiny-moe/hidden_states.safetensors", ["--model", "Usage"]),
        ("--model examples/tiny-moe", ["--input", "Usage"]),
        ("--model examples/tiny-moe --input x --tokens 4", ["--tokens", "Usage"]),
        ("--output", ["--output", "value"]),
    ] {
        run(aristos_run(args)).misused(&parts);
    }
    run(aristos(["fly"])).misused(&["'fly'", "Usage"]);
    assert_eq!(run(aristos([""; 0])).status.code(), Some(2));
}

#[test]
fn unwritable_output_fails_before_the_run() {
    let files = Files::new();
    let out = files.path("out");
    let to = |path: &Path, parts: &[&str]| {
        files.run_to(path, &[]).refused(&[&[path.to_str().unwrap()], parts].concat());
        let mut traced = aristos_run("--tokens 4 --pes 2");
        traced.arg("--trace").arg(path);
        run(traced).refused(&[path.to_str().unwrap()]);
        assert_eq!(names_in(&out), [""; 0]);
    };
    to(&out.join("none/out"), &["No such file"]);
    to(&out, &["a folder"]);
    to(&files.path("in.safetensors").join("out"), &["Not a directory"]);
    // Even root cannot create a file here.
    to(Path::new("/proc/out"), &[]);
    for flag in ["--output=", "--trace="] {
        run(aristos_run(&format!("--tokens 4 {flag}"))).misused(&["a value is required"]);
    }
}

#[test]
fn trace_cannot_replace_another_file_of_the_job() {
    let files = Files::new();
    let link = files.path("link");
    std::os::unix::fs::symlink(files.path("out"), &link).unwrap();
    std::os::unix::fs::symlink(files.path("model/model.safetensors"), files.path("weights")).unwrap();
    let refused_at = |trace: &str, part: &str| {
        refused(&files, &["--trace", files.path(trace).to_str().unwrap()], &["--trace", trace, part]);
    };
    for trace in ["out/out.safetensors", "out/./out.safetensors", "out/../out/out.safetensors", "link/out.safetensors"]
    {
        refused_at(trace, "is --output too");
    }
    let before = fs::read(files.path("in.safetensors")).unwrap();
    refused_at("in.safetensors", "is the input");
    refused_at("model/../in.safetensors", "is the input");
    for trace in ["model/config.json", "model/model.safetensors", "weights"] {
        refused_at(trace, "is a file of the model");
    }
    assert!(fs::read(files.path("in.safetensors")).unwrap() == before);
    // An existing file that is not part of the job is replaced.
    fs::write(files.path("trace.json"), "old").unwrap();
    files.run(&["--trace", files.path("trace.json").to_str().unwrap()]).success();
    let trace = fs::read(files.path("trace.json")).unwrap();
    assert!(serde_json::from_slice::<serde_json::Value>(&trace).is_ok());
}

/// Runs `aristos` with these arguments, in which DISK is a disk of 64 KiB. `None` if mounts are not permitted.
fn on_a_small_disk(args: &[&str]) -> Option<crate::binary::Outcome> {
    let disk = tempfile::tempdir().unwrap();
    let path = disk.path().to_str().unwrap();
    let mount = "mount -t tmpfs -o size=64k small \"$0\" || exit 77; \"$@\"; code=$?; ls -A \"$0\"; exit $code";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", mount, path]);
    command.arg(aristos([""; 0]).get_program()).args(args.iter().map(|arg| arg.replace("DISK", path)));
    if !Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "true"])
        .status()
        .is_ok_and(|s| s.success())
    {
        return None;
    }
    let outcome = run(command);
    (outcome.status.code() != Some(77)).then_some(outcome)
}

#[test]
fn disk_that_fills_during_a_run_is_an_error() {
    let small = ["run", "--pes", "2", "--hidden", "32", "--intermediate", "32", "--forward-only", "--tokens"];
    let with = |more: &[&str]| on_a_small_disk(&[&small, more].concat());
    // These results fit.
    let Some(outcome) = with(&["64", "--output", "DISK/out"]) else { return skip("no mounts here") };
    assert!(outcome.success().stdout.ends_with("\nout\n"));
    // The listing of the disk after the report is empty.
    with(&["4096", "--output", "DISK/out"]).unwrap().refused(&["/out", "needs", "free"]);
    with(&["64", "--steps", "1000", "--trace", "DISK/trace"]).unwrap().refused(&["/trace", "No space left"]);
}

#[test]
fn full_device_and_file_size_limit_are_errors() {
    let run_to = |flag: &str, path: &Path| {
        let sh = "ulimit -f 8; exec \"$0\" \"$@\""; // 512-byte or 1024-byte blocks
        let mut command = Command::new("/bin/sh");
        command.args(["-c", sh]).arg(aristos([""; 0]).get_program());
        command.args("run --pes 2 --tokens 64 --hidden 32 --intermediate 32 --steps 200".split(' '));
        run({
            command.arg(flag).arg(path);
            command
        })
    };
    let out = tempfile::tempdir().unwrap();
    run_to("--output", &out.path().join("out")).refused(&["/out", "needs", "ulimit -f"]);
    run_to("--output", Path::new("/dev/full")).refused(&["/dev/full", "a device"]);
    assert_eq!(names_in(out.path()), [""; 0]);
    run_to("--trace", Path::new("/dev/full")).refused(&["/dev/full", "a device"]);
}

#[test]
fn unavailable_devices_and_element_types_are_errors() {
    if cfg!(not(feature = "cuda")) {
        run(aristos_run("--tokens 8 --device cuda")).refused(&["--device cuda", "--features cuda"]);
    }
    run(aristos_run("--tokens 8 --dtype f16")).refused(&["--dtype f16 on the CPU, expected f32 or bf16"]);
    run(aristos_run("--wire bf16 --dtype bf16")).refused(&["--wire bf16 with --dtype bf16, expected --dtype f32"]);
}

#[test]
fn unavailable_transports_are_errors() {
    run(aristos_run("--transport bogus")).misused(&["invalid value 'bogus'", "shm, tcp, hybrid, ofi, mpi"]);
    #[cfg(not(feature = "ofi"))]
    for command in ["run", "probe --out nowhere", "bench p2p"] {
        let args = format!("{command} --transport ofi --rank 0 --ranks 2 --rendezvous a:1");
        run(aristos(args.split_whitespace())).refused(&["--transport ofi", "no libfabric transport", "--features ofi"]);
    }
    #[cfg(not(feature = "mpi"))]
    run(aristos_run("--transport mpi")).refused(&["--transport mpi", "no MPI transport", "--features mpi"]);
    let mut alone = aristos_run("--tokens 10 --hidden 8 --intermediate 8 --forward-only --pes 2");
    alone.env("OMPI_COMM_WORLD_SIZE", "1").env("OMPI_COMM_WORLD_RANK", "0");
    run(alone).success();
}
