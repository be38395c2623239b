//! `aristos run` on valid input.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::binary::{
    aristos, aristos_run, names_in, plan_with_replicas, read_tensors, relative_error, run, write_tensors,
};
use crate::files::{Files, HIDDEN};

/// Runs the layer with `--json`, with arguments separated by spaces; returns the report.
#[track_caller]
fn report(args: &str) -> Value {
    serde_json::from_str(&run(aristos_run(&format!("{args} --json"))).success().stdout).unwrap()
}

#[track_caller]
fn assert_checked(report: &Value, tensors: usize) {
    let check = &report["check"];
    assert_eq!(check["passed"], true, "{check:#}");
    assert_eq!(check["tensors"].as_array().unwrap().len(), tensors, "{check:#}");
}

#[test]
fn bundled_example_runs_without_flags() {
    let mut command = aristos(["run"]);
    let elsewhere = tempfile::tempdir().unwrap();
    let table = run({
        command.current_dir(elsewhere.path());
        command
    });
    let table = table.success().stdout;
    for part in ["tiny-moe", "router", "dispatch", "expert GEMM", "combine", "waiting", "median", "max"] {
        assert!(table.contains(part), "no {part} in\n{table}");
    }
    for part in ["tokens/s", "GFLOP/s", "symmetric", "remote", "tokens per expert", "check"] {
        assert!(table.to_lowercase().contains(&part.to_lowercase()), "no {part} in\n{table}");
    }
    assert!(!table.contains('\x1b'), "colours, though no terminal: {table:?}");
    assert_eq!(names_in(elsewhere.path()), [""; 0]);

    let report = report("");
    assert_eq!((&report["config"]["pes"], &report["config"]["layer"]), (&4.into(), &1.into()));
    assert_eq!((&report["config"]["tokens"], &report["config"]["backward"]), (&512.into(), &true.into()));
    // output, grad_hidden_states, the router, and three matrices of each of the 8 experts.
    assert_checked(&report, 2 + 1 + 3 * 8);
    let per_expert = report["tokens_per_expert"].as_array().unwrap();
    assert_eq!(per_expert.iter().map(|n| n.as_u64().unwrap()).sum::<u64>(), 512 * 2);
}

#[test]
fn json_has_exactly_the_documented_keys() {
    let page = include_str!("../../docs/report.md");
    // The keys in each table, by the heading above it: one object each.
    let mut documented: Vec<(&str, BTreeSet<&str>)> = Vec::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix('#') {
            documented.push((heading.trim_start_matches('#').trim(), BTreeSet::new()));
        } else if let Some((key, _)) = line.strip_prefix("| `").and_then(|rest| rest.split_once('`')) {
            documented.last_mut().unwrap().1.insert(key);
        }
    }
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let section = |name: &str| {
        let section = documented.iter().find(|(heading, _)| heading.contains(name)).unwrap();
        section.1.iter().map(|key| key.to_string()).collect::<BTreeSet<_>>()
    };
    let report = report("--pes 2 --tokens 40 --hidden 16 --intermediate 24 --experts 4 --steps 2 --check");
    assert_eq!(keys(&report), section("The report of a run"));
    assert_eq!(keys(&report["config"]), section("config"));
    for pass in ["forward", "backward"] {
        assert_eq!(keys(&report[pass]), section("forward"));
        assert_eq!(keys(&report[pass]["total"]), ["max_s", "median_s"].map(String::from).into());
        for phase in ["router", "dispatch", "expert_gemm", "combine", "waiting"] {
            assert_eq!(keys(&report[pass]["phases"][phase]), ["max_s", "median_s"].map(String::from).into());
        }
    }
    assert_eq!(keys(&report["traffic"]), section("traffic"));
    assert_eq!(keys(&report["symmetric"]), section("symmetric"));
    let mut check = keys(&report["check"]);
    let tensor = &report["check"]["tensors"][0];
    check.extend(keys(tensor));
    check.extend(keys(&tensor["worst"]).into_iter().map(|key| format!("worst.{key}")));
    assert_eq!(check, section("check"));

    let config = &report["config"];
    let numbers = [("tokens", 40), ("hidden", 16), ("intermediate", 24), ("experts", 4), ("top_k", 2), ("pes", 2)];
    for (key, value) in numbers.into_iter().chain([("steps", 2), ("shared_intermediate", 0)]) {
        assert_eq!(config[key], value, "{key}");
    }
    assert_eq!(
        (&config["dtype"], &config["mode"], &config["layer"]),
        (&"f32".into(), &"pipelined".into(), &Value::Null)
    );
    assert!(report["step_s"].as_f64().unwrap() > 0.0);
    let symmetric = |key: &str| report["symmetric"][key].as_u64().unwrap();
    assert!(0 < symmetric("used_bytes") && symmetric("peak_bytes") <= symmetric("budget_bytes"), "{report:#}");
}

#[test]
fn single_pe_has_no_traffic() {
    let bytes = |pes: usize| {
        let report = report(&format!("--pes {pes} --tokens 40 --hidden 16 --intermediate 24 --forward-only"));
        assert_eq!(report["backward"], Value::Null);
        report["remote_bytes_per_step"].as_f64().unwrap()
    };
    assert_eq!(bytes(1), 0.0);
    // At least one token's row must cross, and its result.
    assert!(bytes(2) >= 2.0 * 16.0 * 4.0);
}

#[test]
fn trace_has_every_pe_and_phase() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let mut command = aristos_run("--pes 3 --tokens 100 --hidden 16 --intermediate 24 --steps 2");
    let outcome = run({
        command.arg("--trace").arg(&path);
        command
    });
    assert!(outcome.success().stdout.contains("synthetic"));
    let trace: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    // The spans of each PE are in order of time.
    let mut last = [0.0; 3];
    for span in &spans {
        let (start, duration) = (span["ts"].as_f64().unwrap(), span["dur"].as_f64().unwrap());
        let last = &mut last[span["pid"].as_u64().unwrap() as usize];
        assert!(start >= *last && duration >= 0.0, "{span}");
        *last = start;
        assert!(span["tid"].is_u64() && span["name"].is_string(), "{span}");
    }
    let seen = |key: &str| spans.iter().map(|span| span[key].to_string()).collect::<BTreeSet<_>>();
    assert_eq!(seen("pid"), ["0", "1", "2"].map(String::from).into());
    let steps: BTreeSet<_> = spans.iter().map(|span| span["args"]["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 1].into());
    for phase in ["router", "dispatch", "expert GEMM", "combine"] {
        assert!(seen("name").contains(&format!("{phase:?}")), "no {phase} in {:?}", seen("name"));
    }
    assert_eq!(names_in(dir.path()), ["trace.json"]);
}

#[test]
fn modes_budgets_chunks_and_steps_keep_the_results() {
    let files = Files::new();
    let results = |more: &[&str]| {
        files.run(more).success();
        read_tensors(&files.path("out/out.safetensors"))
    };
    let want = results(&[]);
    assert_eq!(want["output"].0, [24, HIDDEN]);
    assert_eq!(want.len(), 2 + 1 + 3 * 8);
    assert_eq!(results(&["--steps", "3"]), want);
    assert_eq!(results(&["--trace", files.path("trace.json").to_str().unwrap()]), want);
    for more in [["--mode", "bulk"], ["--budget-factor", "0.3"], ["--chunk-rows", "1"], ["--pes", "5"]] {
        // clap takes the last of a repeated flag only if configured to, so --pes needs a separate run.
        let got = if more[0] == "--pes" { on_pes(&files, more[1]) } else { results(&more) };
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{more:?}");
        for (name, (_, want)) in &want {
            let error = relative_error(&got[name].1, want);
            assert!(error <= 1e-6, "{more:?}: {name} is off by {error:.2e}");
        }
    }
    assert_eq!(names_in(&files.path("out")), ["out.safetensors"]);
}

fn on_pes(files: &Files, pes: &str) -> std::collections::BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let out = files.path("out/out.safetensors");
    let mut command = aristos(["run", "--layer", "1", "--pes", pes]);
    command.arg("--model").arg(files.path("model")).arg("--input").arg(files.path("in.safetensors"));
    run({
        command.arg("--output").arg(&out);
        command
    })
    .success();
    read_tensors(&out)
}

#[test]
fn inputs_without_gradient_and_with_few_tokens_run() {
    let files = Files::new();
    for tokens in [1, 0] {
        files.write_input(tokens);
        files.run(&["--check"]).success();
        let results = read_tensors(&files.path("out/out.safetensors"));
        assert_eq!(results.len(), 2 + 1 + 3 * 8);
        assert_eq!(results["output"].0, [tokens, HIDDEN]);
        assert_eq!(results["grad_hidden_states"].0, [tokens, HIDDEN]);
        if tokens == 0 {
            assert!(results.iter().all(|(_, (_, values))| values.iter().all(|x| *x == 0.0)));
        }
    }
    let tensor: (&str, &[usize], &[f32]) = ("hidden_states", &[5, HIDDEN], &files.hidden_states[..5 * HIDDEN]);
    crate::binary::write_tensors(&files.path("in.safetensors"), &[tensor]);
    files.run(&["--check"]).success();
    let results = read_tensors(&files.path("out/out.safetensors"));
    assert_eq!(results.keys().collect::<Vec<_>>(), ["output"]);
}

#[test]
fn sharded_checkpoint_gives_the_same_results() {
    let files = Files::new();
    files.run(&[]).success();
    let want = fs::read(files.path("out/out.safetensors")).unwrap();
    files.shard();
    files.run(&[]).success();
    assert!(fs::read(files.path("out/out.safetensors")).unwrap() == want);
}

#[test]
fn synthetic_layers_of_every_kind_pass_the_check() {
    let small = "--check --tokens 50 --hidden 24 --intermediate 40";
    let cases = [
        // (PEs, what, weights with a gradient)
        (1, "--experts 4", 1 + 3 * 4),
        (2, "--experts 8 --router softmax --activation gelu", 1 + 3 * 8),
        (3, "--experts 8 --router sigmoid --top-k 4 --activation gelu-tanh", 1 + 3 * 8),
        (2, "--experts 6 --top-k 6 --activation relu --mlp plain", 1 + 2 * 6),
        (2, "--experts 5 --top-k 1 --mlp plain --bias", 1 + 4 * 5),
        (3, "--experts 7 --top-k 3 --bias --shared-intermediate 20", 1 + 6 * 7 + 6),
        (2, "--experts 8 --hot-ratio 0.25 --hot-weight 0.7", 1 + 3 * 8),
        (4, "--experts 8 --hot-ratio 0.125 --hot-weight 1 --top-k 1 --budget-factor 0.5", 1 + 3 * 8),
        (3, "--experts 8 --mode bulk --hot-ratio 0.5 --hot-weight 0.9 --seed 7", 1 + 3 * 8),
        (2, "--experts 8 --aux-loss-coef 0.01 --z-loss-coef 0.001", 1 + 3 * 8),
        (2, "--experts 8 --capacity-factor 0.5", 1 + 3 * 8),
        // More PEs than tokens, and more PEs than experts.
        (8, "--experts 3", 1 + 3 * 3),
        (5, "--experts 2 --top-k 1 --steps 3", 1 + 3 * 2),
    ];
    for (pes, args, weights) in cases {
        let report = report(&format!("{small} --pes {pes} {args}"));
        assert_checked(&report, 2 + weights);
    }
    for tokens in [0, 1, 3] {
        for mode in ["pipelined", "bulk"] {
            let args = format!("--check --hidden 24 --intermediate 40 --mode {mode}");
            assert_checked(&report(&format!("{args} --tokens {tokens} --pes 4")), 2 + 1 + 3 * 8);
        }
    }
    assert_checked(&report(&format!("{small} --forward-only --pes 2")), 1);
}

#[test]
fn bf16_passes_the_check_with_its_tolerance() {
    for more in ["--pes 2 --mode pipelined", "--pes 3 --mode bulk", "--pes 8 --tokens 1"] {
        let tokens = if more.contains("--tokens") { "" } else { "--tokens 50" };
        let report = report(&format!("--check --dtype bf16 --hidden 48 --intermediate 40 {tokens} {more}"));
        assert_eq!(report["config"]["dtype"], "bf16");
        assert_checked(&report, 2 + 1 + 3 * 8);
        let tolerance = report["check"]["tensors"][0]["tolerance"].as_f64().unwrap();
        assert!(tolerance > 1e-3 && tolerance <= 2e-2, "{tolerance}");
    }
    let files = Files::new();
    files.run(&["--dtype", "bf16", "--check"]).success();
    let results = read_tensors(&files.path("out/out.safetensors"));
    assert_eq!(results["output"].0, [24, HIDDEN]);
}

/// With `--wire bf16` the check rounds the rows of those pairs whose expert is on another PE, wherever the plan and the capacity put them. If it
/// rounded others, gradients of weights would exceed their f32 tolerance.
#[test]
fn rows_rounded_in_transit_pass_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let plan = |groups: usize| {
        let path = folder.path().join(format!("{groups}.json"));
        fs::write(&path, plan_with_replicas(groups)).unwrap();
        format!("--pes 4 --plan {}", path.display())
    };
    let split = plan(1) + " --balance split";
    let on = ["--pes 2".to_string(), "--pes 3".to_string(), plan(1), plan(2), split];
    let shapes = [
        "--tokens 300 --hidden 64 --intermediate 96 --bias",
        "--tokens 7 --hidden 33 --intermediate 17 --router sigmoid --mlp plain --shared-intermediate 8",
        "--tokens 129 --hidden 100 --intermediate 24 --top-k 1",
        "--tokens 150 --hidden 40 --intermediate 48 --top-k 4 --capacity-factor 0.6 --hot-ratio 0.25 --hot-weight 0.8",
    ];
    let options = ["--wire bf16", "--wire bf16 --mode bulk --chunk-rows 5", "--dtype bf16"];
    for (on, shape) in on.iter().flat_map(|on| shapes.iter().map(move |shape| (on, shape))) {
        for (seed, option) in options.iter().enumerate() {
            let report = report(&format!("{on} {shape} {option} --seed {seed} --check"));
            assert_eq!(report["check"]["passed"], true, "{on} {shape} {option}: {:#}", report["check"]);
        }
    }
    let both = "run --pes 2 --tokens 64 --check --wire bf16 --plan auto --replan-every 1 --steps 2 --memory-mb 80";
    run(aristos(both.split(' '))).refused(&["--check with --wire and --replan-every, expected two of them"]);
}

#[test]
fn seed_determines_the_result() {
    let output = |seed: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let mut command = aristos_run(&format!("--pes 2 --tokens 20 --hidden 16 --intermediate 16 --seed {seed}"));
        run({
            command.arg("--output").arg(&path);
            command
        })
        .success();
        fs::read(path).unwrap()
    };
    let first = output("1");
    assert!(first == output("1"));
    assert!(first != output("2"));
}

#[test]
fn help_lists_the_flags() {
    let outcome = run(aristos(["--help"])).success();
    assert!(outcome.stdout.contains("Usage: aristos") && outcome.stdout.contains("run"), "{outcome:?}");
    let outcome = run(aristos(["run", "--help"])).success();
    let flags = "pes model layer input output dtype mode steps check json trace timeout \
                 tokens hidden intermediate experts top-k activation router hot-ratio hot-weight seed";
    for flag in flags.split_whitespace() {
        assert!(outcome.stdout.contains(&format!("--{flag}")), "no --{flag} in {outcome:?}");
    }
    for value in ["f32", "bf16", "pipelined", "bulk", "silu", "sigmoid"] {
        assert!(outcome.stdout.contains(value), "no {value} in {outcome:?}");
    }
    let outcome = run(aristos(["--version"])).success();
    assert_eq!(outcome.stdout, format!("aristos {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn final_weights_are_saved() {
    let files = Files::new();
    let (out, weights) = (files.path("out/out.safetensors"), files.path("out/weights.safetensors"));
    let path = weights.display().to_string();
    // Without training, the saved weights equal the checkpoint's, with the same names.
    files.run(&["--save-weights", &path]).success();
    let (model, saved) = (read_tensors(&files.path("model/model.safetensors")), read_tensors(&weights));
    assert!(saved.len() > 3 * 8, "{}", saved.len());
    saved.iter().for_each(|(name, tensor)| assert_eq!(Some(tensor), model.get(name), "{name}"));
    let gradients = read_tensors(&out);
    // A gradient descent step has the same result with any number of PEs.
    for pes in ["1", "2", "3"] {
        let mut command = aristos(["run", "--pes", pes, "--sgd", "0.5", "--layer", "1", "--save-weights", &path]);
        command.arg("--model").arg(files.path("model")).arg("--input").arg(files.path("in.safetensors"));
        run(command).success();
        let stepped = read_tensors(&weights);
        assert_eq!(stepped.len(), saved.len());
        for (name, (shape, values)) in &stepped {
            let gradient = &gradients[&format!("grad.{name}")].1;
            let want: Vec<f32> = saved[name].1.iter().zip(gradient).map(|(w, g)| w - 0.5 * g).collect();
            assert_eq!(shape, &saved[name].0);
            assert!(relative_error(values, &want) < 1e-6, "{name}");
        }
    }
    // One step, saved as a checkpoint, and a step from there must equal two steps.
    let mut two =
        aristos(["run", "--pes", "2", "--sgd", "0.5", "--steps", "2", "--layer", "1", "--save-weights", &path]);
    two.arg("--model").arg(files.path("model")).arg("--input").arg(files.path("in.safetensors"));
    run(two).success();
    let twice = read_tensors(&weights);
    let step = |source: &std::path::Path| {
        let mut command = aristos(["run", "--pes", "2", "--sgd", "0.5", "--layer", "1", "--save-weights", &path]);
        command.arg("--model").arg(source).arg("--input").arg(files.path("in.safetensors"));
        run(command).success();
        read_tensors(&weights)
    };
    let once = step(&files.path("model"));
    let tensors: Vec<_> = once.iter().map(|(name, (shape, x))| (&**name, &**shape, &**x)).collect();
    write_tensors(&files.path("model/model.safetensors"), &tensors);
    for (name, (_, values)) in step(&files.path("model")) {
        assert!(relative_error(&values, &twice[&name].1) < 1e-6, "{name}");
    }
    // Invalid combinations and values are refused.
    files.run(&["--sgd", "0.1", "--check"]).misused(&["--sgd", "--check"]);
    files.run(&["--sgd", "inf"]).refused(&["--sgd is inf"]);
    run(aristos_run("--forward-only --sgd 0.1")).refused(&["--sgd without a backward pass"]);
    files.run(&["--save-weights", &out.display().to_string()]).refused(&["--save-weights", "is --output too"]);
}
