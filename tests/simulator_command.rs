//! The commands `aristos sim`, `sweep`, `simulate` and `compare`: published values, output, plots, and refused arguments.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

fn aristos(folder: &Path, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    command.args(args.split_whitespace()).current_dir(folder).output().unwrap()
}

#[track_caller]
fn parsed(folder: &Path, args: &str) -> Value {
    let output = aristos(folder, args);
    assert!(output.status.success(), "{args}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command that must be refused with one line that contains all of `parts`.
#[track_caller]
fn refused(folder: &Path, args: &str, parts: &[&str]) {
    let output = aristos(folder, args);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args}: {line}");
    assert_eq!(line.lines().count(), 1, "{args}: {line}");
    for part in parts {
        assert!(line.contains(part), "{args}: {line} lacks {part}");
    }
}

fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content.to_string()).unwrap();
    }
    folder
}

fn layer() -> Value {
    json!({"d_in": 16384, "d_out": 81920, "tp_in": 8, "tp_out": 40, "dp": 32, "bytewidth": 2})
}

#[test]
fn a_linear_layer_takes_what_was_published() {
    let device = json!({"name": "H100 SXM5", "flop_per_sec_8bit": 1979e12, "global_Bps": 3352e9, "net_Bps": 900e9});
    let folder = folder(&[("d.json", device), ("l.json", layer()), ("bad.json", json!({"name": "x"}))]);
    let folder = folder.path();
    for device in ["d.json", "H100", "h100"] {
        let time = parsed(folder, &format!("sim linear --roofline {device} --shape l.json --tokens 32768 --json"));
        assert_eq!(time["fwd_bwd_s"], json!(3.2554072481051035e-05));
        assert_eq!(time["bottleneck"], json!("flop"));
        for key in ["end_of_batch_s", "flop_s", "global_io_s", "net_io_s"] {
            assert!(time[key].as_f64().unwrap() > 0.0, "{key}");
        }
    }
    let text =
        String::from_utf8(aristos(folder, "sim linear --roofline B200 --shape l.json --tokens 8").stdout).unwrap();
    assert!(text.contains("bound by") && text.contains("forward and backward"), "{text}");
    let args = |device: &str, layer: &str, tokens: &str| {
        format!("sim linear --roofline {device} --shape {layer} --tokens {tokens}")
    };
    refused(folder, &args("H1000", "l.json", "8"), &["--device is H1000", "A100-80GB"]);
    refused(folder, &args("H100", "l.json", "0"), &["--tokens is 0", "expected a number"]);
    refused(folder, &args("H100", "l.json", "NaN"), &["--tokens is NaN"]);
    refused(folder, &args("bad.json", "l.json", "8"), &["bad.json", "flop_per_sec_8bit"]);
    refused(folder, &args("H100", "none.json", "8"), &["none.json", "No such file"]);
}

#[test]
fn an_exchange_takes_what_was_published() {
    let even: Vec<Vec<u64>> = (0..8).map(|i| (0..8).map(|j| if i == j { 0 } else { 1600 }).collect()).collect();
    let folder = folder(&[
        ("p.json", json!({"num_links": 1})),
        ("large.json", json!({"packet_size_bytes": 101})),
        ("l.json", json!({"load_bytes": even})),
        ("empty.json", json!({"load_bytes": []})),
        ("negative.json", json!({"load_bytes": [[0, -5], [1, 0]]})),
    ]);
    let folder = folder.path();
    for compat in ["", "--compat"] {
        let args = format!("sim comms --params p.json --traffic l.json {compat} --json --trace t.json");
        let exchange = parsed(folder, &args);
        assert_eq!((&exchange["time_ms"], &exchange["rounds"]), (&json!(256.0), &json!(32)));
        assert_eq!(exchange["closed_form_ms"], json!(256.0));
        assert_eq!(exchange["round_times_ms"], json!(vec![8.0; 32]));
        let trace: Value = serde_json::from_slice(&std::fs::read(folder.join("t.json")).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert!(events.iter().any(|event| event["name"] == "to node 1: 100 B in 5 packets"), "{events:?}");
    }
    refused(folder, "sim comms --params large.json --traffic l.json", &["large.json: packet_size_bytes is 101", "100"]);
    refused(folder, "sim comms --params p.json --traffic empty.json", &["empty.json: load_bytes is empty"]);
    refused(folder, "sim comms --params p.json --traffic negative.json", &["negative.json: load_bytes[0][1]", "-5"]);
}

#[test]
fn routing_becomes_loads_and_workloads() {
    let folder = folder(&[("p.json", json!({"intra_bw_bytes_per_ms": 1000}))]);
    let folder = folder.path();
    let made = "sim routing --experts 128 --tokens 512 --top-k 8 --nodes 8 --seed 3 --zipf 0.7 --out r.json";
    let output = aristos(folder, &format!("{made} --save-traffic l.json --plot plots"));
    assert!(output.status.success(), "{output:?}");
    assert!(folder.join("plots/expert_load.svg").is_file());
    let of_load = parsed(folder, "sim comms --params p.json --traffic l.json --json");
    assert_eq!(parsed(folder, "sim comms --params p.json --routing r.json --json"), of_load);
    let wide = parsed(folder, "sim comms --params p.json --routing r.json --embed-dim 64 --json");
    assert!(wide["time_ms"].as_f64() > of_load["time_ms"].as_f64());
    let workload = parsed(folder, "workload --model qwen3-30b-a3b --tokens-per-device 64 --routing r.json");
    let load: f64 = workload["expert_load"].as_array().unwrap().iter().filter_map(Value::as_f64).sum();
    assert_eq!(load, 512.0 * 8.0);
    let other = "workload --model mixtral-8x7b --tokens-per-device 64 --routing r.json";
    refused(folder, other, &["r.json: experts is 128, expected 8, the model's"]);
    refused(folder, "sim routing --experts 4 --tokens 8 --top-k 5 --nodes 2 --out x.json", &["--top-k is 5"]);
    let ragged = "sim routing --experts 4 --tokens 8 --top-k 1 --nodes 3 --out x.json --save-traffic y.json";
    refused(folder, ragged, &["nodes is 3", "4 experts"]);
    assert!(!folder.join("x.json").exists());
}

#[test]
fn a_sweep_is_the_published_grid() {
    let folder = folder(&[]);
    let folder = folder.path();
    let args = "sweep --layers 64 --width 8192 --batch 8192 --devices 16 --steady-state --json";
    let compat = parsed(folder, &format!("{args} --cost compat --csv grid.csv --plot plots"));
    assert_eq!(compat["rows"].as_array().unwrap().len(), 52);
    let best = |sweep: &Value| ["dp", "hp", "pp", "microbatches"].map(|key| sweep["best"][key].as_u64().unwrap());
    assert_eq!(best(&compat), [4, 4, 1, 1]);
    let throughput = compat["best"]["throughput"].as_f64().unwrap();
    assert!((throughput / 55313.02392496291 - 1.0).abs() < 1e-12, "{throughput}");
    assert!((compat["sequential_s"][0].as_f64().unwrap() - 2.154361).abs() < 1e-6);
    for key in ["latency_s", "peak_memory_bytes", "communication_fraction", "ep", "devices"] {
        assert!(compat["rows"][7][key].is_number(), "{key}");
    }
    assert_eq!(std::fs::read_to_string(folder.join("grid.csv")).unwrap().lines().count(), 53);
    for dp in [1, 2, 4, 8, 16] {
        assert!(folder.join(format!("plots/grid_dp{dp}.svg")).is_file());
    }
    assert_eq!(best(&parsed(folder, args)), [1, 1, 16, 32]);
    let isolated = "sweep --isolate pipeline --devices 2,4 --batch 512,1024 --microbatches 8 --json --plot plots";
    assert_eq!(parsed(folder, isolated)["rows"].as_array().unwrap().len(), 4);
    assert!(folder.join("plots/isolated_pipeline.svg").is_file() && folder.join("plots/own_time.svg").is_file());
    let experts = parsed(folder, "sweep --layers 8 --width 256 --batch 256 --devices 8 --experts 8 --top-k 2 --json");
    assert!(experts["rows"].as_array().unwrap().iter().any(|row| row["ep"] == json!(8)));
    // Batches of 8 are too small for the published numbers of microbatches.
    let small = "sweep --layers 4 --width 8 --batch 8 --devices 2 --json";
    assert_eq!(parsed(folder, &format!("{small} --cost compat"))["rows"].as_array().unwrap().len(), 2);
    assert_eq!(parsed(folder, small)["rows"].as_array().unwrap().len(), 3);
    refused(folder, "sweep --layers 65 --hp 2", &["--hp is 2", "65 layers"]);
    refused(folder, "sweep --devices 7", &["--pp is 7"]);
    refused(folder, "sweep --devices 0", &["--devices is 0"]);
    refused(folder, "sweep --width 0", &["--width is 0"]);
    refused(folder, "sweep --cost compat --experts 8 --top-k 2", &["--experts is 8"]);
    refused(folder, "sweep --experts 8 --top-k 9", &["--top-k is 9"]);
    refused(folder, "sweep --microbatches 3 --pp 2 --devices 2", &["--microbatches is 3"]);
}

#[test]
fn a_step_is_simulated_and_compared() {
    let folder = folder(&[]);
    let folder = folder.path();
    let layer = "--tokens 256 --hidden 64 --intermediate 96 --experts 8 --top-k 2";
    let args =
        format!("simulate --cluster preset:dgx-h100:1 {layer} --json --jitter 4 --steps 3 --trace t.json --plot plots");
    let report = parsed(folder, &args);
    assert_eq!(report["all_steps_s"].as_array().unwrap().len(), 3);
    assert_eq!(report["config"]["pes"], json!(8));
    for key in ["step_s", "overlap_efficiency", "tokens_per_s"] {
        assert!(report[key].is_number(), "{key}");
    }
    assert_eq!(report["stragglers"]["ecdf_s"].as_array().unwrap().len(), 101);
    assert_eq!(report["would_help"].as_array().unwrap().len(), 3);
    assert!(report["memory"]["symmetric_bytes"].as_u64().unwrap() > 0);
    assert!(folder.join("plots/stragglers.svg").is_file());
    let trace: Value = serde_json::from_slice(&std::fs::read(folder.join("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let rows = |event: &&Value| event["name"].as_str().is_some_and(|name| name.starts_with("rows from PE"));
    assert!(events.iter().find(rows).is_some());
    // The same seed gives the same report. Bulk mode is slower.
    assert_eq!(parsed(folder, &args), report);
    let bulk = parsed(folder, &format!("{args} --mode bulk"));
    assert!(bulk["step_s"].as_f64() > report["step_s"].as_f64());
    // A run, and simulations of the same layer and of one with fewer tokens.
    let dtype = "--dtype f32 --json";
    let run = parsed(folder, &format!("run --pes 8 {layer} --json"));
    std::fs::write(folder.join("run.json"), run.to_string()).unwrap();
    for (name, tokens) in [("same.json", 256), ("other.json", 128)] {
        let args = format!("simulate --cluster preset:dgx-h100:1 {layer} {dtype}")
            .replace("256 --hidden", &format!("{tokens} --hidden"));
        std::fs::write(folder.join(name), parsed(folder, &args).to_string()).unwrap();
    }
    // Simulation and run send tokens to the same experts, and the same number of bytes.
    let same: Value = serde_json::from_slice(&std::fs::read(folder.join("same.json")).unwrap()).unwrap();
    assert_eq!(same["tokens_per_expert"], run["tokens_per_expert"]);
    let bytes = run["traffic"]["remote_bytes"].as_object().unwrap().iter();
    let bytes: f64 = bytes.filter(|(kind, _)| *kind != "all_reduce").filter_map(|(_, bytes)| bytes.as_f64()).sum();
    assert!(bytes > 0.0 && same["exchange_bytes_per_step"].as_f64() == Some(bytes), "{bytes} {same}");
    let compared = parsed(folder, "compare run.json same.json --json");
    let whats: Vec<&str> = compared["rows"].as_array().unwrap().iter().filter_map(|row| row["what"].as_str()).collect();
    assert_eq!((whats[0], whats[1], whats[3]), ("step", "forward", "forward, expert_gemm"));
    assert_eq!(whats.len(), 17);
    for row in compared["rows"].as_array().unwrap() {
        let [predicted, measured] = ["predicted_s", "measured_s"].map(|key| row[key].as_f64().unwrap());
        match row["error"].as_f64() {
            Some(error) => assert!((predicted / measured - 1.0 - error).abs() < 1e-9, "{row}"),
            None => assert_eq!(measured, 0.0, "{row}"),
        }
    }
    refused(folder, "compare run.json other.json", &["run.json: config.tokens is 256, expected 128"]);
    refused(folder, "compare same.json run.json", &["same.json"]);
}

#[test]
fn a_plan_and_a_routing_file_are_simulated() {
    let folder = folder(&[]);
    let folder = folder.path();
    let plan =
        "plan --cluster preset:dgx-h100:2 --model qwen3-30b-a3b --tokens-per-device 512 --layers 1 --out plan.json";
    assert!(aristos(folder, plan).status.success());
    let routing = "sim routing --experts 128 --tokens 4096 --top-k 8 --nodes 8 --steps 2 --zipf 1 --out r.json";
    assert!(aristos(folder, routing).status.success());
    let args =
        "simulate --cluster preset:dgx-h100:2 --model qwen3-30b-a3b --plan plan.json --routing r.json --steps 4 --json";
    let report = parsed(folder, args);
    assert_eq!(report["config"]["tokens"], json!(8192));
    let steps: Vec<f64> = report["all_steps_s"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
    // Each record is simulated for two steps.
    let alike = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(steps.len() == 4 && alike(steps[0], steps[1]) && !alike(steps[1], steps[2]), "{steps:?}");
    // With experts as skewed as these, a placement by load helps.
    let change = |name: &str| {
        let all = report["would_help"].as_array().unwrap().iter();
        all.filter(|change| change["change"] == name).filter_map(|change| change["speedup"].as_f64()).next().unwrap()
    };
    assert!(change("experts placed by their loads") > 1.0 && change("2x NIC") >= 1.0, "{report}");
    // If rows are sent in token order, tiles wait longer for their rows.
    let waiting_s = |args: &str| parsed(folder, args)["forward"]["phases"]["waiting"]["max_s"].as_f64().unwrap();
    assert!(waiting_s(&format!("{args} --order token")) > waiting_s(args));
    refused(folder, &args.replace("qwen3-30b-a3b", "mixtral-8x7b"), &["r.json: experts is 128, expected 8"]);
    refused(folder, &args.replace("h100:2", "h100:4"), &["plan.json: the groups have 16 devices, expected 32"]);
    let cluster = "simulate --cluster preset:dgx-h100:1";
    refused(folder, &format!("{cluster} --tokens 0"), &["--tokens is 0"]);
    refused(folder, &format!("{cluster} --steps 0"), &["--steps is 0"]);
    refused(folder, &format!("{cluster} --tokens 64 --budget-factor NaN"), &["budget"]);
    refused(folder, &format!("{cluster} --tokens 64 --jitter 1 --jitter-sigma=-1"), &["--jitter-sigma is -1"]);
    refused(folder, &format!("{cluster} --tokens 9999999999"), &["--tokens is 9999999999"]);
    let rows = "--tokens 65536 --experts 8 --hidden 64 --top-k 4 --chunk-rows 1 --steps 1000";
    refused(folder, &format!("{cluster} {rows}"), &["--chunk-rows is 1", "chunks"]);
    refused(folder, "simulate --cluster preset:dgx-h100:1280 --model deepseek-v3", &["10240 PEs", "2048"]);
}

#[test]
fn a_whole_model_is_simulated() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny-moe");
    let mut hybrid: Value = serde_json::from_slice(&std::fs::read(tiny.join("config.json")).unwrap()).unwrap();
    hybrid["layer_types"] = json!(["full_attention", "linear_attention"]);
    let folder = folder(&[("config.json", hybrid)]);
    let folder = folder.path();
    let args = |model: &str, more: &str| {
        format!("simulate --cluster preset:dgx-h100:2 --model {model} --tokens 16384 --roofline H100 --json {more}")
    };
    const PARTS: [&str; 4] = ["attention", "dense", "moe", "exposed_communication"];
    let of = |report: &Value, key: &str| report["model"][key].as_f64().unwrap();
    let time = |report: &Value, part: &str| report["model"][part]["time_s"].as_f64().unwrap();
    for (model, moe_layers) in [("deepseek-v3", 58.0), ("qwen3-30b-a3b", 48.0), (tiny.to_str().unwrap(), 2.0)] {
        let report = parsed(folder, &args(model, ""));
        let sum: f64 = PARTS.iter().map(|part| time(&report, part)).sum();
        let in_layers = moe_layers * report["step_s"].as_f64().unwrap();
        for (got, want) in [
            (of(&report, "step_s"), sum),
            (time(&report, "moe") + time(&report, "exposed_communication"), in_layers),
            (time(&report, "dense") / of(&report, "step_s"), report["model"]["dense"]["share"].as_f64().unwrap()),
        ] {
            assert!((got / want - 1.0).abs() < 1e-9, "{model}: {got}, expected {want}");
        }
        assert!(PARTS.iter().all(|part| time(&report, part) > 0.0), "{report}");
        // A longer sequence only adds attention time. Forward alone takes less time in every part.
        let long = parsed(folder, &args(model, "--sequence 65536"));
        assert!(time(&long, "attention") > time(&report, "attention"));
        assert_eq!(time(&long, "dense"), time(&report, "dense"));
        let forward = parsed(folder, &args(model, "--forward-only"));
        assert!(PARTS.iter().all(|part| time(&forward, part) < time(&report, part)), "{forward}");
    }
    let text = String::from_utf8(aristos(folder, &args("mixtral-8x7b", "").replace("--json", "")).stdout).unwrap();
    assert!(text.contains("32 layers") && text.contains("exposed communication"), "{text}");
    refused(folder, &args("mixtral-8x7b", "--sequence 0"), &["--sequence is 0"]);
    refused(folder, &args("mixtral-8x7b", "").replace("H100 ", "H1000 "), &["--device is H1000"]);
    refused(folder, &args(".", ""), &["config.json: layer_types has \"linear_attention\"", "attention in all layers"]);
}

#[test]
fn rows_are_sent_once_per_expert_pe_or_host() {
    let folder = folder(&[]);
    let folder = folder.path();
    // 2 hosts of 8 PEs with 2 experts each; every token goes to all experts. In forward a row has 128 B and a count of 4 B, and each of
    // its slots 8 B; in backward each returned slot has 4 B.
    let args = "simulate --cluster preset:dgx-h100:2 --tokens 320 --hidden 64 --experts 32 --top-k 32 --json";
    let bytes = |per: &str, key: &str| parsed(folder, &format!("{args} {per}"))[key].as_f64().unwrap();
    let [all, network] = ["exchange_bytes_per_step", "network_bytes_per_step"];
    let of = |rows: f64, slots: f64| 320.0 * (rows * (4.0 * 128.0 + 4.0) + slots * 12.0);
    // Headers go to every PE; 128 of 240 cross between hosts.
    let header = (bytes("", all) - of(15.0, 30.0)) / 240.0;
    assert!(header > 0.0);
    assert_eq!(bytes("", network), of(8.0, 16.0) + 128.0 * header);
    assert_eq!(bytes("--rows-per expert", all), of(30.0, 30.0) + 240.0 * header);
    assert_eq!(bytes("--rows-per expert", network), of(16.0, 16.0) + 128.0 * header);
    // A row goes to the 7 other PEs of its host, once to the relay of the other host, and from there to 7 PEs.
    assert_eq!(bytes("--rows-per host", network), of(1.0, 16.0) + 128.0 * header);
    assert_eq!(bytes("--rows-per host --mode bulk", all), of(15.0, 16.0 + 28.0) + 240.0 * header);
    // With one expert per token, relays save no network bytes, and the only extra bytes are those that relays forward.
    let one = |per: &str| parsed(folder, &format!("{} {per}", args.replace("top-k 32", "top-k 1 --order token")));
    let [pe, expert, node] = ["pe", "expert", "host"].map(|per| one(&format!("--rows-per {per}")));
    assert_eq!(pe, expert);
    assert_eq!((&pe[network], &pe["tokens_per_expert"]), (&node[network], &node["tokens_per_expert"]));
    assert!(node[all].as_f64() > pe[all].as_f64());
}

#[test]
fn commands_that_would_run_for_minutes_are_refused() {
    let folder = folder(&[("c.json", four_devices())]);
    let routing = "sim routing --experts 4 --tokens 1 --top-k 1 --nodes 1 --out r.json";
    for (more, part) in [
        ("--layers 1000000", "--layers is 1000000, expected at most 262144 records"),
        ("--layers 1000 --steps 1000", "--steps is 1000, expected at most 262144 records"),
    ] {
        refused(folder.path(), &format!("{routing} {more}"), &[part]);
    }
    let simulate = "simulate --cluster c.json --tokens 4 --hidden 8 --intermediate 8 --experts 4 --steps 1000000";
    refused(folder.path(), simulate, &["--steps is 1000000, expected at most 131072"]);
}

/// A node's sent and received bytes together are at most a NIC's bytes in a round (docs/simulator.md).
#[test]
fn nic_limits_sent_and_received_bytes_together() {
    // Two nodes send each other 40 bytes over two links that each carry 40 bytes in a round.
    let params =
        |nic: u64| json!({"num_links": 2, "intra_bw_bytes_per_ms": 40, "packet_size_bytes": 20, "nic_rate_bytes": nic});
    let load = json!({"load_bytes": [[0, 40], [40, 0]]});
    let folder = folder(&[("40.json", params(40)), ("80.json", params(80)), ("l.json", load)]);
    let rounds = |nic: u64| {
        let args = format!("sim comms --params {nic}.json --traffic l.json --json");
        parsed(folder.path(), &args)["rounds"].clone()
    };
    assert_eq!((rounds(80), rounds(40)), (json!(1), json!(2)));
}

/// A cluster of 4 equal devices on one host.
fn four_devices() -> Value {
    let device = |id: usize| json!({"id": id, "host": "h", "flop_per_ms": 1e7, "memory_experts": 16});
    let tiers = json!({"tiers": [{"size": 4, "alpha_ms": 0.01, "beta_ms_per_mb": 0.1}]});
    json!({"version": 1, "devices": (0..4).map(device).collect::<Vec<_>>(), "links": tiers})
}

/// Bytes of the exchange in a step: of a run on 4 PEs, and simulated.
fn exchanged(folder: &Path, layer: &str, simulated: &str) -> [f64; 2] {
    let run = parsed(folder, &format!("run --pes 4 --json {layer}"));
    let kinds = run["traffic"]["remote_bytes"].as_object().unwrap();
    let bytes: f64 =
        kinds.iter().filter(|(kind, _)| *kind != "all_reduce").map(|(_, bytes)| bytes.as_f64().unwrap()).sum();
    let steps = run["config"]["steps"].as_f64().unwrap();
    let simulated = parsed(folder, &format!("simulate --cluster c.json --dtype f32 --json {simulated}"));
    assert_eq!(simulated["tokens_per_expert"], run["tokens_per_expert"], "{layer}");
    [bytes / steps, simulated["exchange_bytes_per_step"].as_f64().unwrap()]
}

#[test]
fn simulated_bytes_are_those_of_a_run_with_unequal_shares() {
    let folder = folder(&[("c.json", four_devices())]);
    for more in ["--experts 4", "--experts 5", "--experts 6 --top-k 3", "--experts 7", "--experts 9 --forward-only"] {
        let layer = format!("--tokens 61 --hidden 16 --intermediate 8 {more}");
        let [run, simulated] = exchanged(folder.path(), &layer, &layer);
        assert_eq!(run, simulated, "{more}");
    }
}

#[test]
fn ragged_tokens_of_a_routing_file_stay_on_their_pes() {
    let (experts, top_k, counts) = (8, 2, [9, 3, 0, 4]);
    let choice = |token: usize| [token * 3 % experts, (token * 3 + 1 + token / 8) % experts];
    let choices: Vec<usize> = (0..16).flat_map(choice).collect();
    let record = |counts: &[usize], step: usize| json!({"layer": 0, "step": step, "tokens_per_node": counts, "choices": choices});
    let file = |nodes: usize, records: &[Value]| json!({"version": 1, "experts": experts, "top_k": top_k, "nodes": nodes, "records": records});
    let ragged = file(4, &[record(&counts, 0), record(&counts, 1)]);
    let moving = file(4, &[record(&counts, 0), record(&[4, 4, 4, 4], 1)]);
    let folder = folder(&[("c.json", four_devices()), ("r.json", ragged.clone()), ("moving.json", moving)]);
    let layer = "--hidden 16 --intermediate 8 --experts 8 --top-k 2";
    let args = format!("{layer} --steps 2 --check --save-routing again.json --routing r.json");
    let [run, simulated] = exchanged(folder.path(), &args, &format!("{layer} --routing r.json"));
    assert_eq!(run, simulated);
    let again: Value = serde_json::from_slice(&std::fs::read(folder.path().join("again.json")).unwrap()).unwrap();
    for step in 0..2 {
        assert_eq!(again["records"][step]["tokens_per_node"], json!(counts));
    }
    let expected = "r.json: tokens_per_node is [9, 3, 0, 4], expected 4 PEs";
    refused(folder.path(), &format!("run --pes 3 {layer} --routing r.json"), &[expected]);
    let moved = "moving.json: records[1].tokens_per_node is [4, 4, 4, 4], expected [9, 3, 0, 4]";
    refused(folder.path(), &format!("run --pes 4 {layer} --routing moving.json"), &[moved]);
    let bench = format!("bench moe --pes 4 --iterations 1 --tokens 16 {layer} --routing r.json");
    refused(folder.path(), &bench, &["tokens_per_node is [9, 3, 0, 4], expected the same number for all"]);
}

#[test]
fn a_run_is_repeated_by_its_routing() {
    let folder = folder(&[]);
    let folder = folder.path();
    let layer = "--tokens 90 --hidden 32 --intermediate 24 --experts 8 --top-k 3 --router softmax --shared-intermediate 16 --seed 3";
    let first = format!("run --pes 2 {layer} --hot-ratio 0.25 --hot-weight 0.7 --steps 2 --json");
    let run = parsed(folder, &format!("{first} --save-routing r.json --output first.safetensors"));
    let routing: Value = serde_json::from_slice(&std::fs::read(folder.join("r.json")).unwrap()).unwrap();
    assert_eq!((&routing["nodes"], routing["records"].as_array().unwrap().len()), (&json!(2), 2));
    assert_eq!(routing["records"][1]["tokens_per_node"], json!([45, 45]));
    // Replaying a run's own routing gives the same bits.
    parsed(folder, &format!("{first} --routing r.json --save-routing again.json --output again.safetensors"));
    for (one, other) in [("r.json", "again.json"), ("first.safetensors", "again.safetensors")] {
        assert!(std::fs::read(folder.join(one)).unwrap() == std::fs::read(folder.join(other)).unwrap(), "{other}");
    }
    // A layer of a checkpoint.
    for args in ["--save-routing model.json --output one.safetensors", "--routing model.json --output two.safetensors"]
    {
        parsed(folder, &format!("run --pes 2 --json {args}"));
    }
    assert!(
        std::fs::read(folder.join("one.safetensors")).unwrap()
            == std::fs::read(folder.join("two.safetensors")).unwrap()
    );
    refused(folder, "run --pes 2 --routing r.json", &["r.json: top_k is 3, expected 2, the model's"]);
    // The routing also applies to other tokens, on more PEs, with a check.
    let other = format!("run --pes 3 {} --routing r.json --json --check", layer.replace("--seed 3", "--seed 4"));
    let elsewhere = parsed(folder, &other.replace("--tokens 90 ", ""));
    assert_eq!(elsewhere["tokens_per_expert"], run["tokens_per_expert"]);
    assert_eq!(elsewhere["check"]["passed"], json!(true));
    assert_ne!(parsed(folder, &other.replace("--routing r.json", ""))["tokens_per_expert"], run["tokens_per_expert"]);
    // A simulation, a benchmark and a workload with this routing.
    let simulated = format!("simulate --cluster preset:dgx-h100:1 --routing r.json --json {layer}");
    let simulated = parsed(folder, &simulated.replace("--tokens 90", "").replace("--seed 3", ""));
    let four_times: Vec<u64> =
        run["tokens_per_expert"].as_array().unwrap().iter().map(|tokens| 4 * tokens.as_u64().unwrap()).collect();
    assert_eq!(simulated["tokens_per_expert"], json!(four_times));
    let bench =
        "bench moe --pes 2 --dtype f32 --tokens 90 --hidden 32 --intermediate 24 --experts 8 --top-k 3 --iterations 1";
    let rows = |args: &str| parsed(folder, args)["results"][0]["rows_per_pe"].clone();
    let by_run: u64 = run["tokens_per_expert"].as_array().unwrap()[..4].iter().filter_map(Value::as_u64).sum();
    assert_eq!(rows(&format!("{bench} --routing r.json --json"))[0], json!(by_run));
    // Routings that do not fit the layer.
    refused(
        folder,
        &format!("{} --routing r.json", first.replace("--tokens 90", "--tokens 91")),
        &["r.json: records[0] has 90"],
    );
    refused(
        folder,
        &format!("{} --routing r.json", first.replace("--top-k 3", "--top-k 2")),
        &["r.json: top_k is 3, expected 2"],
    );
    refused(
        folder,
        &format!("{} --routing r.json", first.replace("--experts 8", "--experts 16")),
        &["r.json: experts is 8"],
    );
    refused(
        folder,
        &format!("{first} --routing r.json --save-routing r.json"),
        &["--save-routing r.json is the routing"],
    );
    refused(folder, &format!("{bench} --routing first.safetensors"), &["first.safetensors"]);
    let capped = format!("{first} --capacity-factor 0.7 --save-routing capped.json");
    parsed(folder, &capped);
    refused(folder, &format!("{first} --routing capped.json"), &["capped.json: records[0].choices[", "is -1"]);
    assert!(
        aristos(folder, "sim routing --experts 8 --tokens 90 --top-k 3 --nodes 2 --layers 2 --out two.json")
            .status
            .success()
    );
    std::fs::write(
        folder.join("one.json"),
        std::fs::read_to_string(folder.join("two.json")).unwrap().replace("\"layer\":0", "\"layer\":5"),
    )
    .unwrap();
    refused(
        folder,
        &format!("{first} --routing one.json"),
        &["one.json: records have layer 5, expected one of layer 0"],
    );
}

#[test]
fn a_machine_is_calibrated_by_its_runs() {
    let folder = folder(&[]);
    let folder = folder.path();
    let layer = |tokens: usize| format!("--tokens {tokens} --hidden 64 --intermediate 96 --experts 8 --top-k 2");
    for (name, pes, tokens, steps) in
        [("a", 1, 64, 3), ("b", 1, 256, 3), ("c", 2, 128, 3), ("few", 1, 64, 2), ("d", 2, 200, 3)]
    {
        let report = parsed(folder, &format!("run --pes {pes} {} --steps {steps} --json", layer(tokens)));
        std::fs::write(folder.join(format!("{name}.json")), report.to_string()).unwrap();
    }
    let calibration = parsed(folder, "calibrate a.json b.json c.json --cores 2 --out m.json --json");
    assert_eq!(calibration["fitted_to"].as_array().unwrap().len(), 3);
    assert!(calibration["forward"]["expert"]["s_per_flop"].is_number(), "{calibration}");
    let simulate =
        |more: &str| format!("simulate --cluster preset:dgx-h100:1 --dtype f32 {} --json {more}", layer(400));
    let simulated = parsed(folder, &simulate("--calibration m.json"));
    let time = |report: &Value, pass: &str, phase: &str| report[pass]["phases"][phase]["max_s"].as_f64().unwrap();
    for (pass, phase) in [("forward", "dispatch"), ("backward", "combine"), ("forward", "router")] {
        assert!(time(&simulated, pass, phase) > 0.0, "{pass} {phase}: {simulated}");
    }
    // The calibration has two cores for eight PEs; eight cores are faster.
    let cores = parsed(folder, &simulate("--calibration m.json --cores 8"));
    assert!(cores["step_s"].as_f64() < simulated["step_s"].as_f64());
    // Without a calibration, compute times follow from the devices' rates, and copies take no time.
    assert_eq!(time(&parsed(folder, &simulate("")), "forward", "dispatch"), 0.0);
    refused(
        folder,
        "calibrate a.json few.json c.json --out x.json",
        &["few.json: config.steps is 2, expected at least 3"],
    );
    refused(folder, "calibrate a.json b.json --out x.json", &["reports have none of several"]);
    refused(folder, "calibrate a.json m.json --out x.json", &["m.json"]);
    refused(folder, "calibrate a.json c.json --out a.json", &["--out a.json"]);
    refused(folder, "calibrate a.json c.json --cores 0 --out x.json", &["--cores is 0"]);
    assert!(!folder.join("x.json").exists());
    refused(folder, &simulate("--calibration a.json"), &["a.json"]);
    refused(folder, &simulate("--calibration m.json").replace("f32", "bf16"), &["--dtype is bf16, expected f32"]);
    refused(
        folder,
        &simulate("--calibration m.json --rows-per host"),
        &["--rows-per is host", "expected pe or expert"],
    );
    // A calibration in bf16 has its own reports.
    for (name, pes, tokens) in [("e", 1, 64), ("f", 1, 256), ("g", 2, 128)] {
        let report = parsed(folder, &format!("run --pes {pes} {} --steps 3 --dtype bf16 --json", layer(tokens)));
        assert_eq!(report["config"]["transport"], json!("shm"));
        std::fs::write(folder.join(format!("{name}.json")), report.to_string()).unwrap();
    }
    let half = parsed(folder, "calibrate e.json f.json g.json --cores 2 --out b.m.json --json");
    assert_eq!((&half["dtype"], &half["transport"]), (&json!("bf16"), &json!("shm")));
    parsed(folder, &simulate("--calibration b.m.json").replace("f32", "bf16"));
    refused(folder, "calibrate a.json g.json --out x.json", &["g.json: config.dtype is bf16, expected f32"]);
    // A PE computes while its messages move, over MPI as over TCP.
    let mut network = calibration.clone();
    let over = ["tcp", "mpi"].map(|transport| {
        network["transport"] = json!(transport);
        std::fs::write(folder.join("over.json"), network.to_string()).unwrap();
        parsed(folder, &simulate("--calibration over.json"))["forward"].clone()
    });
    assert_eq!(over[0], over[1]);
    network["receive"] = json!({"s_per_element": -1});
    std::fs::write(folder.join("n.json"), network.to_string()).unwrap();
    refused(folder, &simulate("--calibration n.json"), &["n.json: receive.s_per_element is -1, expected a number"]);
    let mut negative = calibration.clone();
    negative["forward"]["expert"]["s_per_flop"] = json!(-1.0);
    std::fs::write(folder.join("n.json"), negative.to_string()).unwrap();
    refused(folder, &simulate("--calibration n.json"), &["n.json: forward.expert.s_per_flop is -1, expected a number"]);
}

#[test]
fn balances_are_compared_on_drawn_and_captured_routing() {
    let folder = folder(&[]);
    let folder = folder.path();
    let layer = "--hidden 64 --intermediate 256 --experts 16 --top-k 2";
    let base = format!("simulate --cluster preset:dgx-h100:1 {layer}");
    let drawn =
        format!("{base} --tokens 16384 --microbatches 4 --steps 2 --assign-us 0 --balance none,replan,split,borrow");
    let report = parsed(folder, &format!("{drawn} --json"));
    assert_eq!((&report["pes"], &report["experts"], &report["top_k"]), (&json!(8), &json!(16), &json!(2)));
    let of = &report["layers"][0];
    assert_eq!(of["microbatches"], json!(8));
    let balances = of["balances"].as_array().unwrap();
    let names: Vec<&str> = balances.iter().map(|balance| balance["balance"].as_str().unwrap()).collect();
    assert_eq!(names, ["none", "replan", "split", "borrow"]);
    let each = |key: &str| balances.iter().map(|balance| balance[key].as_f64().unwrap()).collect::<Vec<f64>>();
    let imbalance = each("imbalance");
    assert!(
        imbalance[0] > imbalance[1] && imbalance[1] > imbalance[2] && imbalance[2] >= imbalance[3],
        "{imbalance:?}"
    );
    for (share, time) in each("ideal_share").iter().zip(each("time_s")) {
        assert!(*share < 1.0 && (share * time - of["ideal_s"].as_f64().unwrap()).abs() < 1e-12);
    }
    let text = String::from_utf8(aristos(folder, &drawn).stdout).unwrap();
    let page = include_str!("../docs/simulator.md");
    for key in of.as_object().unwrap().keys().chain(balances[0].as_object().unwrap().keys()) {
        assert!(page.contains(&format!("`{key}`")), "{key}");
    }
    assert!(text.contains("layer 0, 8 microbatches, ideal ") && text.contains("\nborrow "), "{text}");

    // A file with two layers. A record is a microbatch.
    let made = "sim routing --experts 16 --tokens 4096 --top-k 2 --zipf 1 --nodes 8 --layers 2 --steps 6 --out r.json";
    assert!(aristos(folder, made).status.success());
    let file = format!("{base} --routing r.json --balance none,split --replan-every 2");
    let report = parsed(folder, &format!("{file} --microbatches 2 --json"));
    let layers: Vec<(&Value, &Value)> =
        report["layers"].as_array().unwrap().iter().map(|layer| (&layer["layer"], &layer["microbatches"])).collect();
    assert_eq!(layers, [(&json!(0), &json!(2)), (&json!(1), &json!(2))]);
    refused(folder, &format!("{file} --microbatches 3"), &["--microbatches is 3, and the layer has 6, expected fewer"]);
    refused(folder, &format!("{base} --tokens 100 --balance split"), &["--tokens is 100, expected a multiple of 8"]);
    refused(folder, &format!("{drawn} --zipf 21"), &["--zipf is 21, expected a number from 0 to 20"]);
    refused(folder, &format!("{drawn} --drift NaN"), &["--drift is NaN, expected a number from 0 to 10"]);
    refused(folder, &format!("{drawn} --plan-us=-1"), &["--plan-us is -1, expected a number from 0 to 1e9"]);
    refused(folder, &format!("{drawn} --hot-ratio 0.5 --hot-weight 0.9"), &["--hot-ratio"]);
    refused(folder, &format!("{drawn} --replan-every 0"), &["--replan-every is 0, expected 1 to 1048576"]);
    refused(folder, &format!("{drawn} --forward-only"), &["--forward-only"]);
    refused(
        folder,
        "simulate --cluster preset:dgx-h100:4 --tokens 1024 --balance split",
        &["--experts is 8, expected at least 32"],
    );
}
