//! `aristos run --plan`: expert-parallel groups and unequal placements, as a command.

#[path = "binary/mod.rs"]
mod binary;
#[path = "run_plan/going_on.rs"]
mod going_on;
#[path = "run_plan/moving.rs"]
mod moving;
#[path = "undisturbed/mod.rs"]
mod undisturbed;

use std::path::Path;
use std::time::Duration;

use binary::{Outcome, aristos_run, plan_with_replicas, read_tensors, relative_error, run, start};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use undisturbed::first;

/// A layer whose experts take 0.049 MB each in training: 3 matrices of 32 x 64, weights and gradients in f32.
const LAYER: &str = "--pes 4 --tokens 96 --hidden 32 --intermediate 64 --experts 8 --top-k 3";

fn run_layer(args: &str) -> Outcome {
    run(aristos_run(&format!("{LAYER} {args}")))
}

fn report(outcome: Outcome) -> Value {
    serde_json::from_str(&outcome.success().stdout).unwrap()
}

/// Fails the test unless the results equal those of one group with even shares.
#[track_caller]
fn equals_one_group(dir: &Path, name: &str, flags: &str) {
    let one = dir.join("one.safetensors");
    run_layer(&format!("--output {} {flags}", one.display())).success();
    let (want, got) = (read_tensors(&one), read_tensors(&dir.join(name)));
    assert_eq!(want.keys().collect::<Vec<_>>(), got.keys().collect::<Vec<_>>());
    for (tensor, (shape, values)) in &want {
        assert_eq!(shape, &got[tensor].0);
        let error = relative_error(&got[tensor].1, values);
        assert!(error < 1e-5, "{tensor}: {error:e}");
    }
}

/// A plan file with groups of (devices, expert owners).
fn plan(groups: &[(&[u64], &[u64])]) -> Value {
    let group = |(devices, owners): &(&[u64], &[u64])| {
        let experts = |device: &u64| {
            let held: Vec<usize> = (0..owners.len()).filter(|&e| owners[e] == *device).collect();
            (device.to_string(), json!(held))
        };
        let experts: serde_json::Map<String, Value> = devices.iter().map(experts).collect();
        json!({"devices": devices, "objective_ms": 1.0, "experts": experts, "makespan_ms": 0.5})
    };
    json!({
        "feasible": true, "objective": "placed", "algorithm": "search", "optimal": false, "gap_bound": 0.1, "objective_ms": 1.0,
        "terms": {"gamma": 2.0, "compute_ms": 0.3, "communication_ms": 0.1, "all_reduce_ms": 0.2},
        "groups": groups.iter().map(group).collect::<Vec<_>>(), "idle_devices": [], "elapsed_ms": 0.0,
    })
}

fn two_groups() -> Value {
    plan(&[(&[0, 3], &[0, 0, 0, 0, 0, 0, 3, 3]), (&[1, 2], &[2, 2, 2, 1, 2, 2, 2, 2])])
}

#[test]
fn a_plan_for_unequal_memories_equals_one_group() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("planned.safetensors");
    // Room for 3, 1, 5 and 2 experts.
    let args = format!("--plan auto --memory-mb 0.15,0.05,0.25,0.1 --check --json --output {}", out.display());
    let report = report(run_layer(&args));
    assert_eq!(report["check"]["passed"], true, "{:#}", report["check"]);
    let plan = &report["plan"];
    assert_eq!((&plan["source"], &plan["algorithm"]), (&json!("auto"), &json!("exact")));
    let mut times_held = vec![0; 8];
    for group in plan["groups"].as_array().unwrap() {
        for (pe, experts) in group["pes"].as_array().unwrap().iter().zip(group["experts"].as_array().unwrap()) {
            let experts = experts.as_array().unwrap();
            assert!(experts.len() <= [3, 1, 5, 2][pe.as_u64().unwrap() as usize], "{plan:#}");
            experts.iter().for_each(|e| times_held[e.as_u64().unwrap() as usize] += 1);
        }
    }
    // All memory together holds 11 experts: one group.
    assert_eq!(times_held, [1; 8]);
    for times in ["predicted", "measured"] {
        for key in ["step_s", "compute_s"] {
            assert!(plan[times][key].as_f64().unwrap() > 0.0, "{times} {key}: {plan:#}");
        }
    }
    equals_one_group(dir.path(), "planned.safetensors", "");
}

#[test]
fn groups_with_unequal_placements_equal_one_group() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("plan.json"), dir.path().join("planned.safetensors"));
    std::fs::write(&file, two_groups().to_string()).unwrap();
    for flags in ["", "--aux-loss-coef 0.1 --z-loss-coef 0.01 --shared-intermediate 24", "--capacity-factor 1.1"] {
        let args = format!("--plan {} --check --steps 3 --json --output {} {flags}", file.display(), out.display());
        let report = report(run_layer(&args));
        assert_eq!(report["check"]["passed"], true, "{flags}: {:#}", report["check"]);
        let groups = &report["plan"]["groups"];
        assert_eq!((&groups[0]["pes"], &groups[1]["pes"]), (&json!([0, 3]), &json!([1, 2])));
        assert_eq!(groups[1]["experts"], json!([[3], [0, 1, 2, 4, 5, 6, 7]]));
        let tokens: u64 = report["tokens_per_expert"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
        assert!(flags.contains("capacity") || tokens == 96 * 3, "{tokens}");
        assert!(report["traffic"]["remote_bytes"]["all_reduce"].as_u64().unwrap() > 8 * 3 * 32 * 64 * 4);
        equals_one_group(dir.path(), "planned.safetensors", flags);
    }
    // The table shows it, too.
    let text = run_layer(&format!("--plan {} --dtype bf16 --check", file.display())).success().stdout;
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("EP groups") && text.contains("0 (6) 3 (2) | 1 (1) 2 (7)"), "{text}");
    assert!(text.contains("planned not compared: ") && text.contains("measured "), "{text}");
}

#[test]
fn an_injected_cluster_takes_its_time_and_changes_no_result() {
    let dir = tempfile::tempdir().unwrap();
    let (cluster, out) = (dir.path().join("cluster.json"), dir.path().join("slow.safetensors"));
    let inject = |devices: u64| {
        let device = |id: u64| json!({"id": id, "host": "a", "flop_per_ms": if id == 2 { 5e4 } else { 1e9 }, "memory_experts": 8});
        let links = json!({"tiers": [{"size": devices, "alpha_ms": 1.0, "beta_ms_per_mb": 200.0}]});
        let cluster_json =
            json!({"version": 1, "devices": (0..devices).map(device).collect::<Vec<_>>(), "links": links});
        std::fs::write(&cluster, cluster_json.to_string()).unwrap();
        format!("--emulate-cluster {}", cluster.display())
    };
    let args = format!("{} --check --json --output {}", inject(4), out.display());
    // PE 2 computes at 5e7 FLOP/s. A row takes 2 * 3 * 32 * 64 FLOP in forward, and twice as many in backward. Every PE sends three headers and
    // three messages of rows, each with a latency of 1 ms.
    let slow = |report: &Value| {
        let phase = |pass: &str, name: &str| report[pass]["phases"][name]["max_s"].as_f64().unwrap();
        let forward_s = report["expert_rows_per_pe"][2].as_f64().unwrap() * (2 * 3 * 32 * 64) as f64 / 5e7;
        let (forward, backward) = (phase("forward", "expert_gemm"), phase("backward", "expert_gemm"));
        forward >= 0.99 * forward_s && backward >= 1.98 * forward_s && phase("forward", "dispatch") >= 6e-3
    };
    // A sleep that overshoots (by milliseconds on a busy machine) shortens the next one, even in another pass.
    let report = first(|| report(run_layer(&args)), |report| !slow(report));
    assert_eq!(report["check"]["passed"], true, "{:#}", report["check"]);
    assert!(slow(&report), "{report:#}");
    equals_one_group(dir.path(), "slow.safetensors", "");
    run_layer(&inject(3)).refused(&["cluster.json: devices has 3, expected 4, one for each PE (--pes)"]);
}

/// Replicas in a group and between groups: the same results, weights after training too, whichever PE computes which row.
#[test]
fn replicas_equal_one_group() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("plan.json"), dir.path().join("planned.safetensors"));
    let weights = |name: &str| dir.path().join(name).display().to_string();
    run_layer(&format!("--sgd 0.01 --steps 3 --save-weights {}", weights("want.safetensors"))).success();
    for groups in [1, 2] {
        std::fs::write(&file, plan_with_replicas(groups)).unwrap();
        for flags in [
            "",
            "--aux-loss-coef 0.1 --shared-intermediate 24",
            "--capacity-factor 1.1",
            "--balance split",
            "--balance split --wire bf16",
            "--balance split --capacity-factor 1.1 --mode bulk",
        ] {
            let args = format!("--plan {} --check --steps 2 --json --output {} {flags}", file.display(), out.display());
            let report = report(run_layer(&args));
            assert_eq!(report["check"]["passed"], true, "{flags}: {:#}", report["check"]);
            let sum = |key: &str| report[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
            assert_eq!(sum("expert_rows_per_pe"), sum("tokens_per_expert"));
            assert!(flags.contains("capacity") || sum("tokens_per_expert") == 96 * 3, "{report:#}");
            if !flags.contains("--wire") {
                equals_one_group(dir.path(), "planned.safetensors", flags);
            }
        }
        let saved = weights("got.safetensors");
        run_layer(&format!("--plan {} --sgd 0.01 --steps 3 --save-weights {saved}", file.display())).success();
        let want = read_tensors(&dir.path().join("want.safetensors"));
        for (tensor, (_, got)) in read_tensors(&dir.path().join("got.safetensors")) {
            let error = relative_error(&got, &want[&tensor].1);
            assert!(error < 1e-5, "{tensor}: {error:e}");
        }
    }
    // bf16 runs too, and so does a forward pass alone, which sums no gradients.
    let args = format!("--plan {} --dtype bf16 --check", file.display());
    assert!(run_layer(&args).success().stdout.contains("check passed"));
    run_layer(&format!("--plan {} --forward-only --check", file.display())).success();
}

/// Three experts on four PEs with memory for two each: in any grouping, only a replica makes the work even.
#[test]
fn a_plan_made_with_replicas_is_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let layer = "--pes 4 --tokens 600 --hidden 32 --intermediate 4096 --experts 3 --top-k 1 --forward-only";
    let is_right = |report: &Value| assert_eq!(report["check"]["passed"], true, "{:#}", report["check"]);
    let copies = |report: &Value, of_group: fn(&Value) -> Vec<&Value>| -> usize {
        let groups = report["groups"].as_array().unwrap().iter();
        groups.map(|group| of_group(group).iter().map(|held| held.as_array().unwrap().len()).sum()).max().unwrap()
    };
    // `plan` for equal PEs, then `run`.
    let device = |id: u64| json!({"id": id, "host": "here", "flop_per_ms": 1e7, "memory_experts": 2});
    let links = json!({"tiers": [{"size": 4, "alpha_ms": 0.01, "beta_ms_per_mb": 0.2}]});
    let cluster = json!({"version": 1, "devices": (0..4).map(device).collect::<Vec<_>>(), "links": links});
    std::fs::write(path("c.json"), cluster.to_string()).unwrap();
    // 150 tokens per PE, 50 per expert, of 6 * 32 * 4096 FLOP; a token is 32 values of f32.
    let workload = json!({
        "expert_flop": vec![50.0 * 6.0 * 32.0 * 4096.0; 3],
        "p2p_buffer_mb": 150.0 * 32.0 * 4e-6, "p2p_frequency": 2, "all_reduce_buffer_mb": 0, "num_layers": 1,
        "moe_frequency": 1, "mini_batch_size": 150, "global_batch_size": 600, "recomputation_amount": 0,
    });
    std::fs::write(path("w.json"), workload.to_string()).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_aristos"));
    let files = ["--cluster", &path("c.json"), "--workload", &path("w.json"), "--out", &path("p.json")];
    let output = command.args(["plan", "--replicas", "auto"]).args(files).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let planned: Value = serde_json::from_slice(&std::fs::read(path("p.json")).unwrap()).unwrap();
    assert!(copies(&planned, |group| group["experts"].as_object().unwrap().values().collect()) > 3, "{planned:#}");
    is_right(&report(run(aristos_run(&format!("{layer} --plan {} --check --json", path("p.json"))))));
    // `run --plan auto` for these PEs. On a busy machine a PE may be measured so slow that it is better without an expert.
    let args = format!("{layer} --plan auto --replicas auto --memory-mb 8 --check --json");
    let has_replicas =
        |report: &Value| copies(&report["plan"], |group| group["experts"].as_array().unwrap().iter().collect()) > 3;
    let report = first(|| report(run(aristos_run(&args))), |report| !has_replicas(report));
    is_right(&report);
    assert!(has_replicas(&report), "{:#}", report["plan"]);
}

/// Loads differ from those of the first plan: the job replans, results stay right, and trained weights move with their experts.
#[test]
fn a_plan_is_made_anew_for_the_loads_that_are_measured() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    // Memory for one group only.
    let layer =
        "--pes 4 --tokens 600 --hidden 16 --intermediate 1024 --experts 8 --top-k 2 --hot-ratio 0.25 --hot-weight 0.7";
    let plan = "--plan auto --memory-mb 1.3 --replan-every 2 --steps 5 --json";
    let args = format!("{layer} {plan} --forward-only --output {}", path("got.safetensors"));
    // A probe of a busy machine may find links so slow that no change pays.
    let first = (0..6).map(|_| report(run(aristos_run(&args)))).find(|report| report["plan"]["replanned"].is_array());
    let first = first.expect("a plan that is changed");
    let changes = first["plan"]["replanned"].as_array().unwrap();
    assert!(changes[0]["after_step"] == 2 && changes[0]["moved_experts"].as_u64() > Some(0), "{:#}", first["plan"]);
    let rows: Vec<u64> = first["expert_rows_per_pe"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert_eq!(rows.iter().sum::<u64>(), 1200);
    run(aristos_run(&format!("{layer} --forward-only --output {}", path("want.safetensors")))).success();
    let want = read_tensors(&dir.path().join("want.safetensors"));
    for (tensor, (_, got)) in read_tensors(&dir.path().join("got.safetensors")) {
        assert!(relative_error(&got, &want[&tensor].1) < 1e-5, "{tensor}");
    }
    // A rate at which training is stable, so that rounding stays rounding.
    let sgd = "--sgd 0.0003 --save-weights";
    let outcome = run(aristos_run(&format!("{layer} {plan} {sgd} {}", path("got-w.safetensors"))));
    let trained = report(outcome);
    run(aristos_run(&format!("{layer} --steps 5 {sgd} {}", path("want-w.safetensors")))).success();
    let want = read_tensors(&dir.path().join("want-w.safetensors"));
    for (tensor, (_, got)) in read_tensors(&dir.path().join("got-w.safetensors")) {
        assert!(relative_error(&got, &want[&tensor].1) < 1e-5, "{tensor}: {:#}", trained["plan"]);
    }
    // Hot experts that change: the reference computes the last step's tokens.
    let changing = run(aristos_run(&format!("{layer} {plan} --hot-shift-every 2 --check")));
    let changing = report(changing);
    assert_eq!(changing["check"]["passed"], true, "{:#}", changing["check"]);
    let busiest = |report: &Value| {
        let tokens: Vec<u64> =
            report["tokens_per_expert"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
        (0..tokens.len()).max_by_key(|&e| tokens[e]).unwrap()
    };
    assert!(busiest(&first) < 2 && (4..6).contains(&busiest(&changing)), "{changing:#}");
    run(aristos_run(&format!("{layer} --hot-shift-every 0"))).refused(&["--hot-shift-every is 0"]);
    run(aristos_run(&format!("{layer} --replan-every 2"))).misused(&["--plan"]);
    run(aristos_run(&format!("{layer} --plan auto --replan-every 0"))).refused(&["--replan-every is 0"]);
}

/// From a model to a prediction and a measurement: `workload`, `plan`, `run`.
#[test]
fn a_plan_is_compared_with_a_run_of_its_own_workload() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let model = format!("{}/examples/tiny-moe", env!("CARGO_MANIFEST_DIR"));
    let devices: Vec<Value> = (0..2)
        .map(|i| json!({"id": i, "host": "here", "flop_per_ms": 1e7, "memory_experts": 1, "memory_mb": 1e4}))
        .collect();
    let links = json!({"tiers": [{"size": 2, "alpha_ms": 0.01, "beta_ms_per_mb": 0.2}]});
    let cluster = json!({"version": 1, "devices": devices, "links": links});
    std::fs::write(path("c.json"), cluster.to_string()).unwrap();
    let aristos = |args: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_aristos"));
        let output = command.args(args.split_whitespace()).output().unwrap();
        assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let first: Value = serde_json::from_slice(&aristos(&format!(
        "run --model {model} --input {model}/hidden_states.safetensors --pes 2 --json"
    )))
    .unwrap();
    let tokens = first["config"]["tokens"].as_u64().unwrap();
    assert_eq!(tokens % 2, 0, "{first:#}");
    let (w, c, p) = (path("w.json"), path("c.json"), path("p.json"));
    for (tokens, compared) in [(tokens / 2, true), (tokens, false)] {
        aristos(&format!(
            "workload --model {model} --tokens-per-device {tokens} --devices 2 --layers 1 --dtype f32 --out {w}"
        ));
        aristos(&format!("plan --cluster {c} --workload {w} --out {p}"));
        let planned: Value = serde_json::from_slice(&std::fs::read(&p).unwrap()).unwrap();
        let report: Value = serde_json::from_slice(&aristos(&format!(
            "run --model {model} --input {model}/hidden_states.safetensors --pes 2 --plan {p} --json"
        )))
        .unwrap();
        let plan = &report["plan"];
        assert_eq!(plan["predicted"].is_null(), !compared, "{plan:#}");
        if compared {
            // `run` and `plan` give the same number.
            let step_s = plan["predicted"]["step_s"].as_f64().unwrap();
            assert!((step_s - planned["objective_ms"].as_f64().unwrap() * 1e-3).abs() < 1e-12 * step_s, "{plan:#}");
        } else {
            let why = plan["not_predicted"].as_str().unwrap();
            assert!(why.contains("another workload") && why.contains("expert_flop[0]"), "{why}");
        }
        // `plan --model` gives the same as the separate commands.
        let args =
            format!("plan --cluster {c} --model {model} --tokens-per-device {tokens} --layers 1 --dtype f32 --json");
        let at_once: Value = serde_json::from_slice(&aristos(&args)).unwrap();
        assert_eq!(at_once["groups"], planned["groups"]);
        assert_eq!(at_once["workload"], planned["workload"]);
    }
}

#[test]
fn memory_that_does_not_suffice_is_named() {
    run_layer("--plan auto --memory-mb 0.05").refused(&[
        "--plan auto: no plan: memory",
        "8 experts",
        "hold 4",
        "4 short",
    ]);
}

#[test]
fn flags_that_do_not_fit() {
    run_layer("--memory-mb 5").misused(&["--plan"]);
    run_layer("--plan auto --memory-mb 1,2").refused(&["--memory-mb has 2 numbers", "4, one for each PE"]);
    run_layer("--plan auto --memory-mb=-1").refused(&["--memory-mb is -1"]);
    run_layer("--plan none.json").refused(&["none.json", "No such file"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.json");
    std::fs::write(&file, two_groups().to_string()).unwrap();
    run_layer(&format!("--plan {} --memory-mb 1", file.display())).refused(&["--memory-mb with --plan", "--plan auto"]);
}

#[test]
fn plans_that_are_for_something_else() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.json");
    let refused = |change: &dyn Fn(&mut Value), parts: &[&str]| {
        let mut plan = two_groups();
        change(&mut plan);
        std::fs::write(&file, plan.to_string()).unwrap();
        run_layer(&format!("--plan {}", file.display())).refused(&[&["p.json: "], parts].concat());
    };
    refused(&|p| p["groups"] = json!([p["groups"][0]]), &["2 devices", "expected 4", "--pes"]);
    refused(&|p| p["idle_devices"] = json!([7]), &["idle_devices has device 7"]);
    refused(&|p| p["groups"][1]["devices"][0] = json!(9), &["groups[1].devices[0] is 9", "below 4"]);
    refused(&|p| p["groups"][1]["devices"][0] = json!(0), &["groups[1]", "device 1", "not in the group"]);
    refused(&|p| p["groups"][0]["experts"]["3"] = json!([6]), &["groups[0].experts lacks expert 7"]);
    refused(&|p| p["groups"][0]["experts"]["3"] = json!([6, 7, 0]), &["groups[0].experts.3 has expert 0", "another"]);
    refused(&|p| p["groups"][0]["experts"]["3"] = json!([6, 7, 8]), &["has expert 8", "the layer has 8"]);
    refused(&|p| p["groups"][0]["experts"]["3"] = json!([-1]), &["groups[0].experts.3[0]"]);
    refused(&|p| *p = json!({"feasible": false, "shortage": "memory", "elapsed_ms": 1}), &["feasible is false"]);
    refused(&|p| p["groups"] = json!("all"), &["groups"]);
    refused(&|p| *p = json!([]), &[]);
}

#[test]
fn replicas_that_cannot_be_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.json");
    let refused = |change: &dyn Fn(&mut Value), parts: &[&str]| {
        let mut plan: Value = serde_json::from_str(&plan_with_replicas(1)).unwrap();
        change(&mut plan["groups"][0]);
        std::fs::write(&file, plan.to_string()).unwrap();
        run_layer(&format!("--plan {}", file.display())).refused(&[&["p.json: groups[0]."], parts].concat());
    };
    refused(&|g| g["replicas"] = json!([]), &["experts.1 has expert 0, which another device has too", "in replicas"]);
    refused(&|g| g["replicas"][0]["devices"] = json!([0, 1]), &["replicas[0].devices is [0, 1]", "hold expert 0"]);
    refused(&|g| g["replicas"][0]["expert"] = json!(8), &["has expert 0"]);
    refused(&|g| g["replicas"][1]["split"][0] = json!([1]), &["replicas[1].split", "4 x 2"]);
    refused(&|g| g["replicas"][1]["split"][0] = json!([1, 1]), &["expert 1 has shares [1.0, 1.0] for PE 0"]);
    refused(&|g| g["experts"]["0"] = json!([0, 1, 2, 2]), &["experts.0 has expert 2 twice"]);
    run_layer(&format!("--plan {} --replicas 1", file.display())).refused(&["--replicas with --plan", "--plan auto"]);
    run_layer("--plan auto --replicas some").misused(&["--replicas", "a number of experts, or auto"]);
}

/// A PE that is killed while groups wait for each other is named, and no process is left.
#[test]
fn a_pe_of_a_group_that_dies_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.json");
    std::fs::write(&file, two_groups().to_string()).unwrap();
    let mut running = start(aristos_run(&format!("{LAYER} --plan {} --steps 1000000", file.display())));
    let pe = running.pe(2);
    std::thread::sleep(Duration::from_millis(300));
    kill_process(pe, Signal::KILL).unwrap();
    running.end().refused(&["PE 2", "signal 9"]);
}
