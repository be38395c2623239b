//! `aristos calibrate --from`: the constants of a device from logs of `aristos bench moe`, and simulations with them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

const TILES: [&str; 2] = ["128x256", "256x256"];
const LOGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/gpu/2026-11-26");

fn aristos(folder: &Path, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    command.args(args.split_whitespace()).current_dir(folder).output().unwrap()
}

#[track_caller]
fn printed(folder: &Path, args: &str) -> String {
    let output = aristos(folder, args);
    assert!(output.status.success(), "{args}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn parsed(folder: &Path, args: &str) -> Value {
    serde_json::from_str(&printed(folder, args)).unwrap()
}

/// Runs a command that must be refused with one line that contains all of `parts`.
#[track_caller]
fn refused(folder: &Path, args: &str, parts: &[&str]) {
    let output = aristos(folder, args);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{args}: {line}");
    for part in parts {
        assert!(line.contains(part), "{args}: {line} lacks {part}");
    }
}

fn write(folder: &Path, name: &str, content: &Value) {
    fs::write(folder.join(name), content.to_string()).unwrap();
}

/// The sum of a pass's phases, and its total, seconds.
fn sums(pass: &Value) -> [f64; 2] {
    let max_s = |of: &Value| of["max_s"].as_f64().unwrap();
    [pass["phases"].as_object().unwrap().values().map(max_s).sum(), max_s(&pass["total"])]
}

/// One device without links.
fn one_device() -> Value {
    let device = json!({"id": 0, "host": "h", "flop_per_ms": 1e11, "memory_experts": 64});
    json!({"version": 1, "devices": [device], "links": {"alpha_ms": [[0]], "beta_ms_per_mb": [[0]]}})
}

/// A layer of 16 experts, each with about 160 rows, by its intermediate width.
fn flags(intermediate: usize) -> String {
    format!("--tokens 1280 --hidden 512 --intermediate {intermediate} --experts 16 --top-k 2 --mlp gated")
}

#[test]
fn kept_calibrations_follow_from_the_logs() {
    let folder = tempfile::tempdir().unwrap();
    let measured = fs::read_to_string(Path::new(LOGS).join("../../measurements/simulator.md")).unwrap();
    for tile in TILES {
        let table =
            printed(folder.path(), &format!("calibrate --from {LOGS}/calibration.json --tile {tile} --out m.json"));
        assert!(measured.contains(&table), "docs/measurements/simulator.md lacks\n{table}");
        let [kept, made] = [Path::new(LOGS).join(format!("h100-{tile}.json")), folder.path().join("m.json")];
        assert_eq!(fs::read_to_string(kept).unwrap(), fs::read_to_string(made).unwrap(), "{tile}");
    }
}

#[test]
fn phases_of_a_device_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write(folder, "one.json", &one_device());
    let layer = flags(768);
    let on_one = format!("simulate --cluster one.json {layer} --json --calibration {LOGS}/h100-128x256.json");
    for more in ["", "--mode bulk", "--shared-intermediate 256"] {
        let report = parsed(folder, &format!("{on_one} {more}"));
        for pass in ["forward", "backward"] {
            let [phases, total] = sums(&report[pass]);
            assert!((phases / total - 1.0).abs() < 1e-9, "{more} {pass}: {phases}, {total}");
            for phase in ["router", "start", "expert_gemm", "epilogue", "dispatch", "combine"] {
                assert!(report[pass]["phases"][phase]["max_s"].as_f64() > Some(0.0), "{more} {pass} {phase}");
            }
        }
        assert!(report["forward"]["phases"]["tail"]["max_s"].as_f64() > Some(0.0), "{more}");
    }
    // Rows are computed in whole tiles: one row more than a tile is a second one.
    let expert_s = |tokens: usize| {
        let layer =
            layer.replace("1280", &tokens.to_string()).replace("--experts 16 --top-k 2", "--experts 1 --top-k 1");
        let args = format!("simulate --cluster one.json {layer} --json --calibration {LOGS}/h100-256x256.json");
        parsed(folder, &args)["forward"]["phases"]["epilogue"]["max_s"].as_f64().unwrap()
    };
    assert_eq!(expert_s(256), expert_s(255));
    assert!((expert_s(257) / expert_s(256) - 2.0).abs() < 1e-9);
    assert!((expert_s(1025) / expert_s(256) - 5.0).abs() < 1e-9);
    // On several devices the phases are those of each, and rows take the time of their links.
    let several = parsed(folder, &on_one.replace("one.json", "preset:dgx-h100:1"));
    assert!(several["forward"]["phases"]["start"]["max_s"].as_f64() > Some(0.0), "{several}");
    assert!(several["backward"]["phases"]["replicated_sums"]["max_s"].as_f64() > Some(0.0), "{several}");
    refused(folder, &format!("{on_one} --cores 2"), &["--cores is set", "a device's calibration"]);
    refused(folder, &format!("{on_one} --dtype f32"), &["--dtype is f32, expected bf16"]);
    refused(folder, &format!("{on_one} --rows-per host"), &["--rows-per is host"]);
    let mut wrong: Value =
        serde_json::from_str(&fs::read_to_string(Path::new(LOGS).join("h100-128x256.json")).unwrap()).unwrap();
    wrong["tile"][0] = json!(0);
    write(folder, "w.json", &wrong);
    refused(
        folder,
        &on_one.replace(&format!("{LOGS}/h100-128x256.json"), "w.json"),
        &["w.json: tile[0] is 0, expected 64 to 4096"],
    );
    wrong["tile"][0] = json!(128);
    wrong["forward"]["start"]["s_per_pass"] = json!(-1.0);
    write(folder, "w.json", &wrong);
    let line = "w.json: forward.start.s_per_pass is -1, expected a number of seconds, 0 or more";
    refused(folder, &on_one.replace(&format!("{LOGS}/h100-128x256.json"), "w.json"), &[line]);
}

/// Tokens, hidden width, experts, intermediate width.
type Layer = [usize; 4];

/// A log of `bench moe` in which the phases of a forward and of both passes take these times, ms.
fn log([tokens, hidden, experts, intermediate]: Layer, ms: [[f64; 6]; 2]) -> String {
    let mut text = format!(
        "Device\n1 PE; {tokens} tokens, hidden {hidden}, {experts} experts of {intermediate} (gated, Silu), top-2\n\
         9 iterations, slowest PE of each\n\nbf16: rows per PE {} (most over mean 1.000); seen on CPUs 1\n",
        2 * tokens
    );
    let passes = ["forward", "forward+backward"];
    for (passes, ms) in passes.iter().zip(ms) {
        text += &format!("{passes}  pipelined  {:.3}  1.000  2.000  3.0\n", ms.iter().sum::<f64>());
    }
    text += "\n  ms by phase and PE  router  dispatch  expert GEMM  combine  waiting  all-reduce\n";
    for (passes, ms) in passes.iter().zip(ms) {
        for mode in ["bulk", "pipelined"] {
            let cells: Vec<String> = ms.iter().map(|ms| format!("{ms:.3}")).collect();
            text += &format!("{passes}  {mode}, PE 0  {}\n", cells.join("  "));
        }
    }
    text
}

/// The constants that the test's device has: pass, phase, term, ms.
const CONSTANTS: [(&str, &str, &str, f64); 16] = [
    ("forward", "router", "s_per_pass", 2.0),
    ("forward", "router", "s_per_element", 1e-5),
    ("backward", "router", "s_per_pass", 3.0),
    ("backward", "router", "s_per_element", 2e-5),
    ("forward", "products", "s_per_stage", 0.5),
    ("forward", "products", "s_per_weight_byte", 1e-6),
    ("backward", "products", "s_per_stage", 0.75),
    ("backward", "products", "s_per_gradient_tile", 5.0),
    ("forward", "epilogue", "s_per_tile", 0.25),
    ("backward", "epilogue", "s_per_tile", 0.125),
    ("forward", "dispatch", "s_per_slot", 1e-3),
    ("backward", "combine", "s_per_element", 4e-6),
    ("forward", "start", "s_per_pass", 4.0),
    ("backward", "start", "s_per_expert", 0.5),
    ("forward", "tail", "s_per_pass", 6.0),
    ("forward", "tail", "s_per_expert", 0.25),
];

/// The times of the test's device with one multiprocessor, by hand; with `epilogues` or without.
fn times(folder: &Path, layer: Layer, epilogues: f64) -> [[f64; 6]; 2] {
    let [tokens, hidden, experts, inner] = layer;
    let flags = format!("--tokens {tokens} --hidden {hidden} --intermediate {inner} --experts {experts} --top-k 2");
    let report = parsed(folder, &format!("simulate --cluster one.json {flags} --mlp gated --json"));
    let rows = report["tokens_per_expert"].as_array().unwrap();
    let across = |multiple: u64| rows.iter().map(|rows| rows.as_u64().unwrap().div_ceil(multiple)).sum::<u64>() as f64;
    let [tokens, hidden, experts, inner] = layer.map(|size| size as f64);
    let (down, stages) = (across(128), [hidden / 64.0, inner / 64.0]);
    // Tiles of 128 x 256: gate and up, down; backward to the intermediate width, to the hidden one.
    let forward = [down * inner / 128.0, down * hidden / 256.0];
    let backward = [down * inner / 256.0, down * hidden / 256.0];
    let gradients = 3.0 * (inner / 128.0) * (hidden / 256.0);
    let forward_ms = (forward[0] * stages[0] + forward[1] * stages[1]) * 0.5
        + experts * 3.0 * hidden * inner * 2.0 * 1e-6
        + epilogues * 0.25 * (forward[0] + forward[1]);
    let backward_ms = (backward[0] * stages[0] + backward[1] * 2.0 * stages[1] + gradients * across(64)) * 0.75
        + experts * gradients * 5.0
        + epilogues * 0.125 * (backward[0] + backward[1] + experts * gradients);
    let (slots, elements) = (2.0 * tokens, tokens * hidden);
    let start = 4.0 + 0.5 * experts;
    let forward =
        [2.0 + 1e-5 * elements, 1e-3 * slots, forward_ms, 3e-6 * slots * hidden, start + 6.0 + 0.25 * experts, 0.0];
    let backward = [3.0 + 2e-5 * elements, 2e-3 * slots, backward_ms, 4e-6 * slots * hidden, start, 0.0];
    [forward, std::array::from_fn(|phase| forward[phase] + backward[phase])]
}

#[test]
fn constants_of_a_device_are_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write(folder, "one.json", &one_device());
    let (a, b) = ([1280, 512, 16, 256], [960, 1024, 4, 768]);
    for (name, layer, epilogues) in [
        ("a", a, 1.0),
        ("b", b, 1.0),
        ("c", [960, 256, 8, 1280], 1.0),
        ("same", [1280, 512, 16, 512], 1.0),
        ("without", b, 0.0),
    ] {
        fs::write(folder.join(format!("{name}.txt")), log(layer, times(folder, layer, epilogues))).unwrap();
    }
    let logs = |fit: &[&str]| {
        let tile = json!({"fit": fit, "epilogue": ["b.txt", "without.txt"], "judge": ["c.txt"]});
        json!({"multiprocessors": 1, "tiles": {"128x256": tile}})
    };
    write(folder, "logs.json", &logs(&["a.txt", "b.txt"]));
    let command = "calibrate --from logs.json --tile 128x256 --out m.json --json";
    let made = parsed(folder, command);
    for (pass, phase, term, ms) in CONSTANTS {
        let s = made[pass][phase][term].as_f64().unwrap();
        assert!((s * 1e3 / ms - 1.0).abs() < 1e-2, "{pass} {phase} {term}: {s}, expected {ms} ms\n{made}");
    }
    let passes = made["passes"].as_array().unwrap();
    for pass in passes {
        let error = pass["simulated_s"].as_f64().unwrap() / pass["measured_s"].as_f64().unwrap() - 1.0;
        assert!(error.abs() < 1e-3, "{pass}: {error}");
    }
    let judged = passes.iter().filter(|pass| pass["fitted"] == json!(false)).count();
    assert_eq!((judged, passes.len()), (2, 6));

    write(folder, "logs.json", &logs(&["a.txt", "same.txt"]));
    refused(folder, command, &["tiles.128x256.fit has layers with proportional counts of backward, router"]);
    refused(folder, &command.replace("128x256", "64x64"), &["logs.json: tiles have no \"64x64\", expected 128x256"]);
    refused(folder, &command.replace("m.json", "logs.json"), &["--out logs.json"]);
    write(folder, "logs.json", &logs(&["a.txt"]));
    refused(folder, command, &["logs.json: tiles.128x256.fit has 1 logs, expected at least 2"]);
    write(folder, "logs.json", &logs(&["a.txt", "none.txt"]));
    refused(folder, command, &["none.txt"]);
    let whole = fs::read_to_string(folder.join("a.txt")).unwrap();
    for (from, to, part) in [
        ("1 PE;", "2 PEs;", "x.txt: line 2 is \"2 PEs;"),
        ("bf16: ", "f8: ", "x.txt: element type is \"f8\", expected f32, bf16 or f16"),
        ("bf16: ", "f16: ", "x.txt: is of Device and f16, expected Device and bf16"),
        ("combine", "other", "x.txt: forward, pipelined, combine is missing"),
        ("pipelined  ", "pipelined  -", "x.txt: forward, pipelined, total is \"-"),
        ("1280 tokens", "16000000000 tokens", "x.txt: line 2 is"),
        ("hidden 512", "hidden 5", "x.txt"),
    ] {
        fs::write(folder.join("x.txt"), whole.replacen(from, to, 1)).unwrap();
        assert_ne!(whole, whole.replacen(from, to, 1), "{from}");
        write(folder, "logs.json", &logs(&["a.txt", "x.txt"]));
        refused(folder, command, &[part]);
    }
}
