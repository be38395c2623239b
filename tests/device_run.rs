//! `aristos run --device emulated`: PEs as processes, each with an emulated device.

#[path = "binary/mod.rs"]
mod binary;

use std::time::{Duration, Instant};

use binary::{Outcome, Running, aristos_run, names_in, plan_with_replicas, read_tensors, relative_error, run, start};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

/// A layer that is quick to emulate.
const SMALL: &str = "--tokens 64 --hidden 32 --intermediate 32 --experts 5";

fn emulated(args: &str) -> Outcome {
    run(aristos_run(&format!("--device emulated {args}")))
}

/// Its report.
#[track_caller]
fn report(args: &str) -> Value {
    serde_json::from_str(&emulated(&format!("{args} --json")).success().stdout).unwrap()
}

#[test]
fn it_is_checked_in_every_way_to_run_it() {
    for args in [
        "--pes 3",
        "--pes 3 --mode bulk --dtype f16",
        "--pes 1 --dtype bf16",
        "--pes 2 --router sigmoid --top-k 3 --bias --shared-intermediate 24 --aux-loss-coef 0.1 --z-loss-coef 0.01",
        "--pes 3 --capacity-factor 1 --mlp plain --activation gelu",
        "--pes 3 --hot-ratio 0.2 --hot-weight 0.9 --budget-factor 0.5 --chunk-rows 4 --steps 2",
        "--pes 2 --forward-only",
    ] {
        let report = report(&format!("{SMALL} --check {args}"));
        assert_eq!(report["check"]["passed"], true, "{args}: {:#}", report["check"]);
        let config = &report["config"];
        assert_eq!((&config["device"], &config["gemm"]), (&"emulated Ampere".into(), &"ampere".into()));
        assert_eq!(
            config["dtype"],
            if args.contains("f16 ") || args.ends_with("--dtype f16") { "f16" } else { "bf16" }
        );
        let rounds = report["forward"]["rounds"].as_u64().unwrap();
        assert_eq!(rounds > 1, args.contains("--budget-factor"), "{args}");
        let losses = report["aux_losses"].as_object().unwrap();
        assert_eq!(losses.len(), if args.contains("loss") { 2 } else { 0 });
    }
}

/// Only network traffic has fences.
#[test]
fn what_several_hosts_run_runs_on_one() {
    for (args, gemm) in [("--pes 3", "ampere"), ("--pes 2 --steps 2", "hopper")] {
        let command = |reach: &str| {
            let mut command = aristos_run(&format!("--device emulated {SMALL} --check --json --gemm {gemm} {args}"));
            command.env("ARISTOS_REACH", reach);
            command
        };
        let report = |reach| serde_json::from_str::<Value>(&run(command(reach)).success().stdout).unwrap();
        let (loads, network) = (report(""), report("network"));
        for (report, some) in [(&loads, false), (&network, true)] {
            assert_eq!(report["check"]["passed"], true, "{:#}", report["check"]);
            let fences = report["traffic"]["fences"].as_u64().unwrap();
            assert_eq!(fences > 0, some, "{fences}");
        }
        assert_eq!(loads["traffic"]["remote_bytes"], network["traffic"]["remote_bytes"]);
    }
    let mut command = aristos_run(&format!("--device emulated {SMALL} --pes 2"));
    command.env("ARISTOS_REACH", "far");
    run(command).refused(&["ARISTOS_REACH is \"far\"", "`network`"]);
}

#[test]
fn hopper_too() {
    let report = report(&format!("{SMALL} --pes 2 --gemm hopper --check"));
    assert_eq!(report["check"]["passed"], true, "{:#}", report["check"]);
    assert_eq!((&report["config"]["device"], &report["config"]["gemm"]), (&"emulated Hopper".into(), &"hopper".into()));
}

#[test]
fn lanes_store_the_bits_that_tma_does() {
    let dir = tempfile::tempdir().unwrap();
    let results = |name: &str, how: &str| {
        let path = dir.path().join(name);
        emulated(&format!(
            "--pes 2 --gemm hopper --tokens 300 --hidden 64 --intermediate 96 --experts 3 {how} --output {}",
            path.display()
        ))
        .success();
        std::fs::read(path).unwrap()
    };
    assert!(results("tma.safetensors", "") == results("lanes.safetensors", "--lane-stores --check"));
}

#[test]
fn in_tiles_of_every_size() {
    let ampere = ["128x256", "64x128"].map(|tile| ("ampere", tile));
    let hopper = ["128x256", "128x128", "256x256"].map(|tile| ("hopper", tile));
    for (gemm, tile) in ampere.into_iter().chain(hopper) {
        let report = report(&format!("{SMALL} --pes 2 --gemm {gemm} --tile {tile} --check"));
        assert_eq!((&report["check"]["passed"], &report["config"]["tile"]), (&true.into(), &tile.into()));
    }
}

#[test]
fn the_bundled_example_passes_its_check() {
    let report = report("");
    assert_eq!((&report["config"]["pes"], &report["config"]["tokens"]), (&4.into(), &512.into()));
    assert_eq!(report["check"]["passed"], true, "{:#}", report["check"]);
    assert_eq!(report["check"]["tensors"].as_array().unwrap().len(), 2 + 1 + 3 * 8);
}

#[test]
fn the_report_has_the_keys_of_the_cpus() {
    fn keys(value: &Value, path: String, all: &mut Vec<String>) {
        if let Value::Object(map) = value {
            for (key, value) in map {
                all.push(format!("{path}/{key}"));
                keys(value, format!("{path}/{key}"), all);
            }
        }
    }
    let args = format!("{SMALL} --pes 2 --check --json");
    let cpu: Value = serde_json::from_str(&run(aristos_run(&format!("--dtype bf16 {args}"))).success().stdout).unwrap();
    let device = report(&format!("{SMALL} --pes 2 --check"));
    let (mut want, mut got) = (Vec::new(), Vec::new());
    keys(&cpu, String::new(), &mut want);
    keys(&device, String::new(), &mut got);
    assert_eq!(got, want);
    assert_eq!((&cpu["config"]["device"], &cpu["config"]["gemm"]), (&"cpu".into(), &Value::Null));
    assert_eq!(cpu["tokens_per_expert"], device["tokens_per_expert"]);
    for kind in ["dispatch_rows", "combine_rows", "combine_slots"] {
        assert_eq!(cpu["traffic"]["remote_bytes"][kind], device["traffic"]["remote_bytes"][kind], "{kind}");
    }
    let symmetric = |key: &str| device["symmetric"][key].as_u64().unwrap();
    assert!(0 < symmetric("used_bytes") && symmetric("peak_bytes") <= symmetric("budget_bytes"), "{device:#}");
}

#[test]
fn outputs_are_those_of_the_cpu_but_for_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, device: &str| {
        let path = dir.path().join(name);
        let mut command = aristos_run(&format!("{device} --dtype bf16 --pes 3 --output"));
        command.arg(&path).args(SMALL.split_whitespace());
        run(command).success();
        read_tensors(&path)
    };
    let (cpu, device) = (write("cpu.safetensors", ""), write("device.safetensors", "--device emulated"));
    assert_eq!(cpu.keys().collect::<Vec<_>>(), device.keys().collect::<Vec<_>>());
    for (name, want) in &cpu {
        let got = &device[name];
        assert!(relative_error(&got.1, &want.1) < 2e-2, "{name}");
    }
}

/// With groups of several PEs, uneven placements and replicas, the step, its report and the trained weights equal those of the CPU.
#[test]
fn a_plan_is_run_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let layer = "--pes 4 --tokens 60 --hidden 32 --intermediate 32 --experts 8 --top-k 3 --dtype bf16";
    for (groups, flags) in [
        (1, "--check --graph --steps 2"),
        (2, "--check --aux-loss-coef 0.1 --shared-intermediate 24 --capacity-factor 1.1"),
        (2, "--sgd 0.05 --steps 2"),
    ] {
        std::fs::write(at("plan.json"), plan_with_replicas(groups)).unwrap();
        let step = |flags: &str| {
            let files = format!("--output {} --save-weights {}", at("out.safetensors"), at("weights.safetensors"));
            let args = format!("{layer} --plan {} --json {flags} {files}", at("plan.json"));
            let report: Value = serde_json::from_str(&run(aristos_run(&args)).success().stdout).unwrap();
            if flags.contains("--check") {
                assert_eq!(report["check"]["passed"], true, "{args}: {:#}", report["check"]);
            }
            let mut tensors = read_tensors(&dir.path().join("out.safetensors"));
            tensors.extend(read_tensors(&dir.path().join("weights.safetensors")));
            (report, tensors)
        };
        let (on_cpu, want) = step(&flags.replace("--graph", ""));
        let (report, got) = step(&format!("--device emulated {flags}"));
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        for (name, want) in &want {
            let error = relative_error(&got[name].1, &want.1);
            assert!(error < 2e-2, "{flags}, {name}: {error}");
        }
        let placed = |report: &Value| {
            let groups = report["plan"]["groups"].as_array().unwrap();
            groups.iter().map(|group| (group["pes"].clone(), group["experts"].clone())).collect::<Vec<_>>()
        };
        assert_eq!(placed(&report), placed(&on_cpu));
        for key in ["tokens_per_expert", "expert_rows_per_pe"] {
            assert_eq!(report[key], on_cpu[key], "{key}");
        }
        let bytes = |report: &Value, kind: &str| report["traffic"]["remote_bytes"][kind].as_u64().unwrap();
        assert_eq!(bytes(&report, "dispatch_rows"), bytes(&on_cpu, "dispatch_rows"));
        assert!(bytes(&report, "all_reduce") > 0);
        let symmetric = |key: &str| report["symmetric"][key].as_u64().unwrap();
        assert!(0 < symmetric("used_bytes") && symmetric("used_bytes") <= symmetric("budget_bytes"), "{report:#}");
    }
}

/// The plan uses the memory of devices: 0.037 MB hold two experts, each with one copy of its bf16 weights and an f32 gradient. A CPU
/// stores the weights twice, so the memory would be too small there, and five experts on three PEs would be refused.
#[test]
fn a_plan_is_made_for_the_devices() {
    for more in ["", "--gemm hopper --graph --steps 2", "--forward-only", "--dtype f16 --replicas 1 --memory-mb 1"] {
        let memory = if more.contains("--memory-mb") { "" } else { "--memory-mb 0.037" };
        let report = report(&format!("{SMALL} --pes 3 --plan auto {memory} --check {more}"));
        assert_eq!(report["check"]["passed"], true, "{more}: {:#}", report["check"]);
        let plan = &report["plan"];
        assert_eq!(plan["source"], "auto", "{plan:#}");
        let pes: usize =
            plan["groups"].as_array().unwrap().iter().map(|group| group["pes"].as_array().unwrap().len()).sum();
        assert_eq!(pes, 3, "{plan:#}");
        let predicted = plan["predicted"]["compute_s"].as_f64().unwrap();
        assert!(predicted > 0.0 && predicted.is_finite(), "{plan:#}");
    }
}

#[test]
fn a_trace_has_every_block() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let mut command = aristos_run(&format!("--device emulated --pes 2 {SMALL} --trace"));
    command.arg(&path);
    run(command).success();
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let spans: Vec<&Value> = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
    let tracks: std::collections::BTreeSet<u64> = spans.iter().map(|span| span["tid"].as_u64().unwrap()).collect();
    assert!(tracks.len() > 1, "{tracks:?}");
    for phase in ["dispatch", "expert GEMM", "combine"] {
        assert!(spans.iter().any(|span| span["name"] == phase), "no {phase}");
    }
}

#[test]
fn what_cannot_be_is_one_line() {
    emulated(&format!("{SMALL} --dtype f32")).refused(&["--dtype f32 on a device, expected bf16 or f16"]);
    run(aristos_run(&format!("{SMALL} --dtype f16"))).refused(&["--dtype f16 on the CPU, expected f32 or bf16"]);
    emulated("--hidden 36").refused(&["hidden is 36, expected a multiple of 8 on a device"]);
    emulated("--intermediate 1001").refused(&["intermediate is 1001, expected a multiple of 8 on a device"]);
    emulated(&format!("{SMALL} --plan auto --replan-every 2"))
        .refused(&["--replan-every is 2 on a device, expected --device cpu"]);
    emulated(&format!("{SMALL} --pes 3 --plan auto --memory-mb 0.02")).refused(&["--plan auto: no plan: memory"]);
    run(aristos_run(&format!("{SMALL} --gemm ampere"))).refused(&["--gemm on the CPU, expected --device"]);
    run(aristos_run(&format!("{SMALL} --tile 64x128"))).refused(&["--tile on the CPU, expected --device"]);
    run(aristos_run(&format!("{SMALL} --lane-stores"))).refused(&["--lane-stores on the CPU, expected --device"]);
    emulated(&format!("{SMALL} --tile 64")).misused(&["expected rows and columns, such as 64x128"]);
    let line = "the tile is 64x64, expected 128x256 or 64x128, which there are kernels for (ampere)";
    emulated(&format!("{SMALL} --tile 64x64")).refused(&[line]);
    if cfg!(not(feature = "cuda")) {
        run(aristos_run(&format!("{SMALL} --device cuda"))).refused(&["--device cuda", "--features cuda"]);
    }
}

/// Starts a run of several hours that writes its results to `out`.
fn long_run(pes: usize, more: &str, out: &std::path::Path) -> Running {
    let mut command = aristos_run(&format!("--device emulated --pes {pes} {SMALL} --steps 100000000"));
    command.args(more.split_whitespace()).arg("--output").arg(out.join("out.safetensors"));
    start(command)
}

#[test]
fn a_killed_pe_is_named() {
    let out = tempfile::tempdir().unwrap();
    for round in 0..6 {
        let (pes, victim) = (2 + round % 3, round % 2);
        let mut running = long_run(pes, ["", "--mode bulk"][round % 2], out.path());
        let pid = running.pe(victim);
        std::thread::sleep(Duration::from_millis(150 * round as u64));
        kill_process(pid, Signal::KILL).unwrap();
        let killed = Instant::now();
        let outcome = running.end();
        assert!(killed.elapsed() < Duration::from_secs(5), "round {round}: {:?}", killed.elapsed());
        outcome.refused(&[&format!("aristos: PE {victim} was killed by signal 9 (SIGKILL) in phase ")]);
        assert_eq!(names_in(out.path()), [""; 0], "round {round}");
    }
}

#[test]
fn a_stopped_pe_is_named_by_who_waits_for_it() {
    let out = tempfile::tempdir().unwrap();
    for (pes, victim, mode) in [(2, 0, "pipelined"), (2, 1, "bulk"), (3, 1, "pipelined")] {
        let mut running = long_run(pes, &format!("--timeout 2 --mode {mode}"), out.path());
        let pid = running.pe(victim);
        std::thread::sleep(Duration::from_millis(1000));
        kill_process(pid, Signal::STOP).unwrap();
        let stopped = Instant::now();
        let outcome = running.end();
        assert!(stopped.elapsed() < Duration::from_secs(10), "{:?}", stopped.elapsed());
        outcome.refused(&[&format!(" for PE {victim}: "), " waited 2.0 s"]);
        assert_eq!(names_in(out.path()), [""; 0]);
    }
}
