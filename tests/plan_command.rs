//! `aristos plan` as a command: the published case, its output and charts, and refused input.

mod binary;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

const CLUSTER: &str = include_str!("../examples/plan/cluster.json");
const WORKLOAD: &str = include_str!("../examples/plan/workload.json");
const OBJECTIVE_MS: f64 = 1210.4297966597494;

fn aristos(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    command.args(["plan", "--cluster", "c.json", "--workload", "w.json"]).args(args).current_dir(folder);
    command.output().unwrap()
}

fn folder(cluster: &str, workload: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("c.json"), cluster).unwrap();
    std::fs::write(folder.path().join("w.json"), workload).unwrap();
    folder
}

fn parsed(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The example with its tiers written out, the diagonal as in the notebook.
fn written_out() -> String {
    let mut cluster: Value = serde_json::from_str(CLUSTER).unwrap();
    let rows = |inside: f64, between: f64| -> Vec<Vec<f64>> {
        let link = |i: usize, j: usize| if i != j && i / 4 == j / 4 { inside } else { between };
        (0..16).map(|i| (0..16).map(|j| link(i, j)).collect()).collect()
    };
    cluster["links"] = json!({"alpha_ms": rows(0.009, 0.03), "beta_ms_per_mb": rows(0.014, 0.054)});
    cluster.to_string()
}

#[test]
fn the_notebook_is_planned_as_published() {
    for cluster in [CLUSTER.to_string(), written_out()] {
        let folder = folder(&cluster, WORKLOAD);
        for algorithm in ["lysi", "auto", "exact", "search"] {
            let args = [
                "--algorithm",
                algorithm,
                "--objective",
                "published",
                "--placement",
                "lysi",
                "--json",
                "--out",
                "plan.json",
            ];
            let plan = parsed(&aristos(folder.path(), &args));
            assert_eq!(plan["objective_ms"], json!(OBJECTIVE_MS), "{algorithm}");
            assert_eq!(plan["optimal"], json!(true));
            assert_eq!(plan["terms"]["gamma"], json!(144.0));
            let groups = plan["groups"].as_array().unwrap();
            assert_eq!(groups.len(), 1);
            for device in 0..16u32 {
                let mut held: Vec<u32> = (61 - 3 * device..64 - 3 * device).collect();
                held.insert(0, device);
                assert_eq!(groups[0]["experts"][device.to_string()], json!(held));
            }
            let written: Value =
                serde_json::from_slice(&std::fs::read(folder.path().join("plan.json")).unwrap()).unwrap();
            assert_eq!(written, plan);
        }
    }
}

#[test]
fn what_was_asked_for_is_shown_and_drawn() {
    let folder = folder(CLUSTER, WORKLOAD);
    let published = ["--objective", "published"];
    let output = aristos(
        folder.path(),
        &[&published[..], &["--explain", "--draw", "p.svg", "--draw-latency", "l.svg"]].concat(),
    );
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "1 group of 16 devices, 64 experts",
        "1210.4298 ms",
        "optimal",
        "one per device",
        "not valid: a group holds 32",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let json = parsed(&aristos(folder.path(), &[&published[..], &["--explain", "--json"]].concat()));
    let names: Vec<&str> =
        json["explanation"]["alternatives"].as_array().unwrap().iter().map(|a| a["name"].as_str().unwrap()).collect();
    for name in ["chosen", "all together", "one per node", "one per device", "lysi"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(read("p.svg").matches("<rect").count() >= 32, "a cell and a bar per device");
    let latency = read("l.svg");
    assert!(latency.contains("EP = 4") && latency.contains("EP = 16") && latency.contains("<circle"));
}

#[test]
fn a_picture_is_a_png_where_this_build_has_it() {
    let folder = folder(CLUSTER, WORKLOAD);
    let output = aristos(folder.path(), &["--draw", "p.png"]);
    let png = std::fs::read(folder.path().join("p.png")).unwrap_or_default();
    if cfg!(feature = "png") {
        assert!(output.status.success(), "{output:?}");
        assert!(png.starts_with(b"\x89PNG") && png.len() > 10_000, "{} bytes", png.len());
    } else {
        let line = "aristos: --draw: p.png: this build writes only SVG; PNG needs the cargo feature `png`\n";
        assert_eq!((output.status.code(), output.stderr), (Some(1), line.into()));
        assert!(output.stdout.is_empty() && png.is_empty());
    }
}

#[test]
fn a_measured_load_is_replanned_with_the_cost_of_moving() {
    let folder = folder(CLUSTER, WORKLOAD);
    parsed(&aristos(folder.path(), &["--json", "--out", "old.json"]));
    let tokens: Vec<u32> = (0..64).map(|e| if e < 4 { 1000 } else { 100 }).collect();
    std::fs::write(folder.path().join("report.json"), json!({"tokens_per_expert": tokens, "step_s": 1.0}).to_string())
        .unwrap();
    let args = ["--expert-load-from", "report.json", "--current", "old.json", "--expert-mb", "100", "--json"];
    let replan = parsed(&aristos(folder.path(), &args))["replan"].clone();
    let number = |key: &str| replan[key].as_f64().unwrap();
    assert!(number("gain_ms") > 0.0 && number("moved_experts") > 0.0 && number("move_ms") > 0.0, "{replan}");
    assert_eq!(number("moved_mb"), 100.0 * number("moved_experts"));
    assert!((number("repaid_after_iterations") - number("move_ms") / number("gain_ms")).abs() < 1e-9);
    // Device 0 holds the four hot experts, which have 4/10 of the load.
    let kept = parsed(&aristos(folder.path(), &["--current", "old.json", "--json"]))["replan"].clone();
    assert_eq!((kept["moved_experts"].clone(), kept["repaid_after_iterations"].clone()), (json!(0), json!(null)));
}

#[test]
fn no_plan_is_exit_code_2_and_the_shortage() {
    let folder = folder(&CLUSTER.replace("\"memory_experts\": 32", "\"memory_experts\": 3"), WORKLOAD);
    let output = aristos(folder.path(), &[]);
    let line = "aristos: no plan: memory: a group holds all 64 experts, all 16 devices together hold 48: 16 short\n";
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(2), line));
    let output = aristos(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["feasible"], json!(false));
    assert!(json["shortage"].as_str().unwrap().contains("16 short"));
}

/// Runs `aristos` and returns its exit code and both outputs.
fn run(args: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    let output = command.args(args.split_whitespace()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn no_plan_comes_with_settings_that_fit() {
    let plan = "plan --cluster preset:perlmutter-a100-80gb:4 --model mixtral-8x7b --tokens-per-device 4096";
    let (code, _, text) = run(plan);
    assert_eq!(code, Some(2), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("aristos: no plan: memory: a group holds all 8 experts"), "{text}");
    assert!(lines[1].contains("a device has 72.0 GB") && lines[1].contains("GB short"), "{text}");
    assert!(text.contains(" stages, recomputation ") && text.contains("8 nodes, "), "{text}");
    let (code, json, _) = run(&format!("{plan} --json"));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, &json["feasible"]), (Some(2), &json!(false)));
    let cures = json["cures"].as_array().unwrap();
    assert!(cures.len() > 1, "{json}");
    for cure in cures {
        let parts = cure["memory"].as_object().unwrap().values().map(|mb| mb.as_f64().unwrap());
        assert!(parts.sum::<f64>() <= json["usable_mb"].as_f64().unwrap(), "{cure}");
        // The planner finds the same strategy by the flags.
        let nodes = cure["change"].as_str().unwrap().split_once(" nodes").map_or("4", |(nodes, _)| nodes);
        let plan = plan.replace("80gb:4", &format!("80gb:{nodes}"));
        let (stages, ep) = (&cure["stages"], &cure["ep"]);
        let optimizer = if cure["change"].as_str().unwrap().contains("8-bit") { "adamw-8bit" } else { "adamw" };
        let flags = format!("{plan} --top 1000 --stages {stages} --ep {ep} --optimizer {optimizer} --json");
        let (code, found, error) = run(&flags);
        assert_eq!(code, Some(0), "{flags}: {error}");
        let found: Value = serde_json::from_str(&found).unwrap();
        let same = |strategy: &Value| strategy["memory"]["weights_mb"] == cure["memory"]["weights_mb"];
        assert!(found["strategies"].as_array().unwrap().iter().any(same), "{flags}");
    }
    // A model that no setting fits to needs more nodes.
    let (code, _, text) =
        run("plan --cluster preset:perlmutter-a100-80gb:1 --model mixtral-8x22b --tokens-per-device 4096");
    assert!(code == Some(2) && text.contains(" nodes, "), "{text}");
}

#[test]
fn strategies_are_listed_with_memory_and_flags() {
    let plan =
        "plan --cluster preset:dgx-h100:2 --model qwen3-30b-a3b --tokens-per-device 8192 --top 3 --roofline H100";
    let (code, text, error) = run(plan);
    assert_eq!((code, error.as_str()), (Some(0), ""), "{text}");
    for part in [
        "tokens/s",
        "bottleneck",
        "receive windows",
        "usable",
        "torchrun --nnodes 2 --nproc-per-node 8",
        "torchtitan: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (_, json, _) = run(&format!("{plan} --json"));
    let json: Value = serde_json::from_str(&json).unwrap();
    let rates: Vec<f64> =
        json["strategies"].as_array().unwrap().iter().map(|s| s["tokens_per_s"].as_f64().unwrap()).collect();
    assert!(rates.len() == 3 && rates.is_sorted_by(|a, b| a >= b), "{rates:?}");
    let (code, _, error) = run(&format!("{plan} --stages 3"));
    assert!(code == Some(1) && error.contains("--stages") && error.contains("divisors of 16 devices"), "{error}");
    let (code, _, error) = run("plan --cluster preset:dgx-h100:1 --model deepseek-v3 --tokens-per-device 4096 --top 1");
    assert!(code == Some(2) && error.contains("no plan: memory: a device has 72.0 GB"), "{error}");
}

#[test]
fn routing_is_balanced_to_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routing.json");
    let routing = |flags: &str| {
        run(&format!("sim routing --experts 256 --tokens 8 --top-k 8 --nodes 16 --out {} {flags}", path.display()))
    };
    for (flags, first) in [("--balanced", 4), ("--imbalance 2.5", 10)] {
        let (code, _, error) = routing(flags);
        assert_eq!(code, Some(0), "{error}");
        let file: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let choices = file["records"][0]["choices"].as_array().unwrap().iter().map(|e| e.as_u64().unwrap());
        let mut counts = [0; 16];
        choices.for_each(|e| counts[e as usize / 16] += 1);
        assert!(counts[0] == first && counts[1..].iter().all(|n| *n == 3 || *n == 4), "{counts:?}");
    }
    assert!(routing("--balanced --zipf 1").2.contains("cannot be used with"));
    assert!(routing("--imbalance 17").2.contains("--imbalance is 17, expected 1 to 16"));
}

/// With the placed objective experts are whole: with fewer experts than devices, groups are smaller or devices idle.
#[test]
fn devices_without_experts_are_named() {
    let mut workload: Value = serde_json::from_str(WORKLOAD).unwrap();
    workload["expert_flop"] = json!([1e12, 1e12, 1e12, 1e12]);
    let mut cluster: Value = serde_json::from_str(CLUSTER).unwrap();
    cluster["devices"].as_array_mut().unwrap().iter_mut().for_each(|device| device["memory_experts"] = json!(4));
    let folder = folder(&cluster.to_string(), &workload.to_string());
    let placed = parsed(&aristos(folder.path(), &["--json", "--out", "placed.json"]));
    assert_eq!(placed["objective"], json!("placed"));
    let held = |plan: &Value| -> Vec<usize> {
        let groups = plan["groups"].as_array().unwrap().iter();
        groups.flat_map(|g| g["experts"].as_object().unwrap().values()).map(|e| e.as_array().unwrap().len()).collect()
    };
    assert!(held(&placed).iter().all(|held| *held > 0), "{placed:#}");
    let published = ["--objective", "published", "--explain"];
    let plan = parsed(&aristos(folder.path(), &[&published[..], &["--json"]].concat()));
    let empty = held(&plan).iter().filter(|held| **held == 0).count();
    let text = String::from_utf8(aristos(folder.path(), &published).stdout).unwrap();
    let line = text.lines().find(|line| line.contains("without experts"));
    assert_eq!(empty > 0, line.is_some(), "{empty} {text}");
    // The current and the new plan are evaluated by the same objective.
    std::fs::write(folder.path().join("published.json"), plan.to_string()).unwrap();
    let replan = parsed(&aristos(folder.path(), &["--current", "published.json", "--json"]))["replan"].clone();
    assert!(replan["current_ms"].as_f64() > replan["planned_ms"].as_f64(), "{replan}");
    assert_eq!(replan["planned_ms"], placed["objective_ms"], "one number");
}

/// With `memory_mb` in the cluster and `expert_mb` in the workload, memory limits the experts of a device. An expert takes `expert_mb` in
/// each MoE layer.
#[test]
fn memory_is_counted_in_bytes_where_it_is_known() {
    let mut cluster: Value = serde_json::from_str(CLUSTER).unwrap();
    let mut workload: Value = serde_json::from_str(WORKLOAD).unwrap();
    // 24 layers, every second with experts: 12 of them.
    workload["expert_mb"] = json!(10.0);
    for device in cluster["devices"].as_array_mut().unwrap() {
        device["memory_mb"] = json!(10.0 * 12.0 * 5.0 + 1.0);
    }
    let held = |cluster: &Value, workload: &Value| {
        let folder = folder(&cluster.to_string(), &workload.to_string());
        let plan = parsed(&aristos(folder.path(), &["--json"]));
        let most = |group: &Value| {
            group["experts"].as_object().unwrap().values().map(|e| e.as_array().unwrap().len()).max().unwrap()
        };
        plan["groups"].as_array().unwrap().iter().map(most).max().unwrap()
    };
    assert!(held(&cluster, &workload) <= 5);
    for device in cluster["devices"].as_array_mut().unwrap() {
        device.as_object_mut().unwrap().remove("memory_experts");
    }
    assert!(held(&cluster, &workload) <= 5);
    workload["expert_mb"] = json!(1000.0);
    let short = folder(&cluster.to_string(), &workload.to_string());
    let line = String::from_utf8(aristos(short.path(), &[]).stderr).unwrap();
    assert!(line.contains("64 short (an expert takes 12000 MB in its 12 layers)"), "{line}");
    workload.as_object_mut().unwrap().remove("expert_mb");
    refused(
        &cluster.to_string(),
        &workload.to_string(),
        &["c.json: devices[0].memory_mb", "expert_mb in the workload"],
    );
    workload["expert_mb"] = json!(0.0);
    refused(CLUSTER, &workload.to_string(), &["w.json: expert_mb is 0"]);
}

#[test]
fn hot_experts_are_replicated() {
    let folder = tempfile::tempdir().unwrap();
    let rebalance = |loads: Value, args: &str| {
        let path = folder.path().join("loads.json");
        std::fs::write(&path, loads.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
        command.args(["rebalance", "--load"]).arg(path).args(args.split_whitespace()).output().unwrap()
    };
    let tokens = json!({"tokens_per_expert": [600, 560, 120, 120, 20, 10, 10, 10]});
    let all = parsed(&rebalance(tokens.clone(), "--physical-experts 16 --devices 8 --json"));
    assert!(all["imbalance"][0].as_f64().unwrap() < 1.0852, "{all}");
    assert_eq!(all["phy2log"][0].as_array().unwrap().len(), 16);
    // The number of physical experts is found, and a placement in use moves no further than it pays.
    let many = json!({"weight": [(0..160).map(|e| 1 + e * e % 97).collect::<Vec<u32>>()]});
    let found = parsed(&rebalance(many.clone(), "--devices 12 --json"));
    assert_eq!(found["phy2log"][0].as_array().unwrap().len(), 168);
    let reached =
        parsed(&rebalance(many.clone(), "--devices 12 --physical-experts auto --imbalance 1.01 --shares --json"));
    assert!(reached["imbalance"][0].as_f64().unwrap() <= 1.01 && reached["shares"][0].as_array().unwrap().len() >= 168);
    let current = folder.path().join("current.json");
    std::fs::write(&current, found.to_string()).unwrap();
    let args = format!("--devices 12 --current {} --json", current.display());
    assert_eq!(parsed(&rebalance(many.clone(), &args))["moved"][0], 0);
    let text = rebalance(json!({"weight": [[3, 1], [1, 1]]}), "--physical-experts 4 --devices 2").stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("1.0000") && text.contains(" | "), "{text}");
    for (loads, args, part) in [
        (tokens.clone(), "--physical-experts 7 --devices 1", "--physical-experts is 7, expected at least 8"),
        (many.clone(), "--physical-experts 160 --devices 12", "a multiple of --devices, 12: 168"),
        (many.clone(), "--devices 12 --imbalance 0.5", "--imbalance is 0.5, expected at least 1"),
        (many, "--devices 12 --physical-experts 168 --imbalance 2", "--imbalance needs --physical-experts auto"),
        (tokens, "--physical-experts 16 --devices 3", "a multiple of --devices, 3"),
        (json!({"weight": [[1, -2]]}), "--physical-experts 2 --devices 1", "loads.json: weight[0][1] is -2"),
        (json!({}), "--physical-experts 2 --devices 1", "loads.json: weight is missing"),
        (
            json!({"weight": [[5, 1, 1, 1], [1, 2, 3, 4]]}),
            "--physical-experts 9223372036854775807 --devices 9223372036854775807",
            "--physical-experts is 9223372036854775807, expected at most 16384",
        ),
        (
            json!({"weight": [[5, 1, 1, 1]]}),
            "--physical-experts 4294967296 --devices 16",
            "--physical-experts is 4294967296, expected at most 16384",
        ),
        (
            json!({"weight": [[5, 1, 1, 1]]}),
            "--physical-experts 16400 --devices 16",
            "--physical-experts is 16400, expected at most 16384",
        ),
        (
            json!({"weight": vec![[5, 1]; 100]}),
            "--physical-experts 2622 --devices 2",
            "--physical-experts is 2622, expected at most 2621, 262144 in 100 layers",
        ),
    ] {
        let output = rebalance(loads, args);
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && line.contains(part), "{line:?} does not say {part:?}");
    }
}

#[test]
fn a_model_that_is_not_there_is_refused() {
    for (args, part) in [
        ("--model gpt-2 --tokens-per-device 8", "--model gpt-2 is unknown, expected a folder with a config.json"),
        ("--model deepseek-v3 --tokens-per-device 8 --bytes-per-parameter 0", "--bytes-per-parameter is 0"),
        ("--model deepseek-v3 --tokens-per-device 8 --recomputation=-1", "--recomputation is -1"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
        let output = command.arg("workload").args(args.split_whitespace()).output().unwrap();
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && line.contains(part), "{args}: {line}");
    }
}

/// Fails the test unless the changed example is refused with a line that contains all `parts`.
#[track_caller]
fn refused(cluster: &str, workload: &str, parts: &[&str]) {
    let folder = folder(cluster, workload);
    let output = aristos(folder.path(), &["--json"]);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{parts:?} {line}");
    assert!(output.stdout.is_empty() && line.starts_with("aristos: ") && line.lines().count() == 1, "{line}");
    parts.iter().for_each(|part| assert!(line.contains(part), "{line:?} does not say {part:?}"));
}

fn changed(text: &str, path: &str, value: Value) -> String {
    let mut json: Value = serde_json::from_str(text).unwrap();
    *json.pointer_mut(path).unwrap() = value;
    json.to_string()
}

fn without(text: &str, path: &str, key: &str) -> String {
    let mut json: Value = serde_json::from_str(text).unwrap();
    json.pointer_mut(path).unwrap().as_object_mut().unwrap().remove(key).unwrap();
    json.to_string()
}

#[test]
fn each_wrong_field_of_a_cluster_is_named() {
    let bad = |path: &str, value: Value, parts: &[&str]| {
        refused(&changed(CLUSTER, path, value), WORKLOAD, &[&["c.json"], parts].concat());
    };
    bad("/version", json!(2), &["version is 2", "expected 1"]);
    bad("/devices", json!([]), &["devices is empty"]);
    bad("/devices/3/id", json!(2), &["devices[3].id is 2", "devices[2] has it"]);
    bad("/devices/3/id", json!(-2), &["devices[3].id", "-2", "whole number"]);
    bad("/devices/3/host", json!(7), &["devices[3].host", "7", "string"]);
    for key in ["flop_per_ms", "memory_experts"] {
        let path = format!("devices[5].{key}");
        for value in [json!("fast"), json!(null), json!([1])] {
            bad(&format!("/devices/5/{key}"), value, &[&path, "number"]);
        }
        bad(&format!("/devices/5/{key}"), json!(-3), &[&path, "-3", "expected"]);
    }
    bad("/devices/5/flop_per_ms", json!(0), &["devices[5].flop_per_ms is 0", "expected"]);
    bad("/devices/5/flop_per_ms", json!(1e300), &["devices[5].flop_per_ms is 1e300", "expected"]);
    bad("/devices/5/memory_experts", json!(1.5), &["devices[5].memory_experts", "1.5", "whole number"]);
    bad("/devices/5/memory_experts", json!(u64::MAX), &["devices[5].memory_experts", "whole number"]);
    bad("/links/tiers/0/size", json!(3), &["links.tiers[0].size is 3", "divides 16"]);
    bad("/links/tiers/1/size", json!(8), &["links.tiers[1].size is 8", "all 16"]);
    bad("/links/tiers/0/size", json!(0), &["links.tiers[0].size is 0"]);
    bad("/links/tiers/1/alpha_ms", json!(-0.1), &["links.tiers[1].alpha_ms is -0.1", "expected"]);
    bad("/links/tiers", json!([]), &["links.tiers is empty"]);
    bad("/links", json!({}), &["links is empty"]);
    bad("/links", json!({"alpha_ms": [[0.0]]}), &["links", "beta_ms_per_mb"]);
    for (path, key) in [("", "version"), ("", "devices"), ("", "links"), ("/devices/2", "id"), ("/devices/2", "host")] {
        refused(&without(CLUSTER, path, key), WORKLOAD, &["c.json", "missing field", key]);
    }
    for (path, key) in [("/devices/2", "flop_per_ms"), ("/links/tiers/1", "size"), ("/links/tiers/1", "alpha_ms")] {
        refused(&without(CLUSTER, path, key), WORKLOAD, &["c.json", "missing field", key]);
    }
    refused(&CLUSTER.replacen("\"host\"", "\"node\"", 1), WORKLOAD, &["devices[0]", "unknown field `node`"]);
    refused(&CLUSTER.replacen("134160000000", "NaN", 1), WORKLOAD, &["devices[0].flop_per_ms", "`NaN`"]);
    refused(&CLUSTER.replacen("134160000000", "-Infinity", 1), WORKLOAD, &["devices[0].flop_per_ms", "Infinity"]);
    refused(&CLUSTER.replacen("134160000000", "1e999", 1), WORKLOAD, &["devices[0].flop_per_ms", "out of range"]);
    refused("", WORKLOAD, &["c.json"]);
    refused("[]", WORKLOAD, &["c.json"]);
    refused(&format!("{CLUSTER}x"), WORKLOAD, &["c.json", "expected nothing more"]);
    refused(&CLUSTER[..CLUSTER.len() / 2], WORKLOAD, &["c.json", "EOF"]);
}

#[test]
fn each_wrong_place_of_a_matrix_is_named() {
    let written = written_out();
    let bad = |path: &str, value: Value, parts: &[&str]| {
        refused(&changed(&written, path, value), WORKLOAD, &[&["c.json"], parts].concat());
    };
    for key in ["alpha_ms", "beta_ms_per_mb"] {
        let at = |place: &str| format!("/links/{key}{place}");
        bad(&at("/3/4"), json!(-1.0), &[&format!("links.{key}[3][4] is -1"), "expected"]);
        bad(&at("/3/4"), json!("x"), &[&format!("links.{key}[3][4]"), "number"]);
        bad(&at("/3/4"), json!(null), &[&format!("links.{key}[3][4]"), "number"]);
        bad(&at("/3"), json!([1.0, 2.0]), &[&format!("links.{key}[3] has 2 numbers, expected 16")]);
        bad(&at(""), json!([[0.0]]), &[&format!("links.{key} has 1 rows, expected 16")]);
    }
    refused(&written.replacen("0.014", "NaN", 1), WORKLOAD, &["links.beta_ms_per_mb[0][1]", "`NaN`"]);
    bad("/links", json!({"alpha_ms": [], "beta_ms_per_mb": [], "tiers": []}), &["expected one or the other"]);
}

#[test]
fn each_wrong_field_of_a_workload_is_named() {
    let keys = [
        "p2p_buffer_mb",
        "p2p_frequency",
        "all_reduce_buffer_mb",
        "num_layers",
        "moe_frequency",
        "mini_batch_size",
        "recomputation_amount",
    ];
    for key in keys {
        let path = format!("/{key}");
        refused(CLUSTER, &changed(WORKLOAD, &path, json!(-1)), &["w.json", &format!("{key} is -1"), "expected"]);
        refused(CLUSTER, &changed(WORKLOAD, &path, json!("4")), &["w.json", key, "number"]);
        refused(CLUSTER, &without(WORKLOAD, "", key), &["w.json", "missing field", key]);
        let nan = changed(WORKLOAD, &path, json!("NaN")).replace("\"NaN\"", "NaN");
        refused(CLUSTER, &nan, &["w.json", key, "`NaN`"]);
    }
    for key in ["num_layers", "moe_frequency", "global_batch_size", "mini_batch_size"] {
        refused(CLUSTER, &changed(WORKLOAD, &format!("/{key}"), json!(0)), &["w.json", &format!("{key} is 0")]);
    }
    refused(CLUSTER, &changed(WORKLOAD, "/expert_flop", json!([])), &["w.json", "expert_flop is empty"]);
    refused(CLUSTER, &changed(WORKLOAD, "/expert_flop/7", json!(-5)), &["w.json", "expert_flop[7] is -5"]);
    refused(CLUSTER, &without(WORKLOAD, "", "expert_flop"), &["w.json", "missing field `expert_flop`"]);
    let load = |load: Value| {
        let mut json: Value = serde_json::from_str(WORKLOAD).unwrap();
        json["expert_load"] = load;
        json.to_string()
    };
    refused(CLUSTER, &load(json!([1.0])), &["w.json", "expert_load has 1 numbers, expected 64"]);
    refused(CLUSTER, &load(json!(vec![0.0; 64])), &["w.json", "expert_load is all zeros"]);
    let mut one = vec![1.0; 64];
    one[9] = -1.0;
    refused(CLUSTER, &load(json!(one)), &["w.json", "expert_load[9] is -1"]);
    refused(CLUSTER, &load(json!(7)).replace("expert_load", "load"), &["w.json", "unknown field `load`"]);
}

#[test]
fn links_that_could_not_be_measured_are_refused_unless_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cluster.json");
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/cluster/probed.json");
    let mut cluster: serde_json::Value = serde_json::from_slice(&std::fs::read(corpus).unwrap()).unwrap();
    cluster["probe"]["residual"] = serde_json::json!([[0.0, 0.1], [0.9, 0.0]]);
    std::fs::write(&path, cluster.to_string()).unwrap();
    let plan = |more: &[&str]| {
        let path = path.to_str().unwrap();
        let args = ["plan", "--cluster", path, "--workload", "tests/corpus/workload/small.json"];
        binary::run(binary::aristos(args.iter().chain(more)))
    };
    let said = ["cluster.json: probe.residual[1][0] is 0.90", "of 1 links", "at most 0.5", "--max-residual 0.91"];
    plan(&[]).refused(&said);
    plan(&["--max-residual", "0.91"]).success();
    plan(&["--max-residual", "0.05"]).refused(&["of 2 links"]);
    plan(&["--max-residual=-1"]).refused(&["--max-residual is -1"]);
}
