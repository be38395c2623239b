//! `--non-finite`: values that are not finite are named, and the files of the job are written.

use std::path::Path;

use serde_json::Value;

use crate::binary::{Outcome, aristos, read_tensors, run, write_tensors};
use crate::files::{Files, HIDDEN};

const EXPERT: usize = 3;

/// Multiplies a projection of expert 3 by `factor`; returns the tensor's name.
fn scale_weight(files: &Files, proj: &str, factor: f32) -> String {
    let path = files.path("model/model.safetensors");
    let mut all = read_tensors(&path);
    let name = format!("model.layers.1.mlp.experts.{EXPERT}.{proj}.weight");
    all.get_mut(&name).unwrap_or_else(|| panic!("{name}")).1.iter_mut().for_each(|w| *w *= factor);
    let tensors: Vec<_> = all.iter().map(|(name, (shape, values))| (&**name, &**shape, &**values)).collect();
    write_tensors(&path, &tensors);
    name
}

/// The entries of the report, after exit code `code`.
fn entries(outcome: &Outcome, code: i32) -> Vec<Value> {
    assert_eq!(outcome.status.code(), Some(code), "{outcome:?}");
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    report["non_finite"].as_array().unwrap().clone()
}

fn is_finite(values: &[f32]) -> bool {
    values.iter().all(|v| v.is_finite())
}

#[test]
fn output_that_overflows_is_named_with_its_expert() {
    let files = Files::new();
    scale_weight(&files, "down_proj", 1e38);
    scale_weight(&files, "up_proj", 1e4);
    let one = files.run(&["--json"]).says(&["output has", "inf at token", "step 0", "layer 1, expert 3"]);
    let first = &entries(&one, 1)[0];
    assert_eq!((&first["kind"], &first["expert"], &first["step"]), (&"output".into(), &EXPERT.into(), &0.into()));
    let token = first["token"].as_u64().unwrap() as usize;
    assert_eq!(first["pe"], Value::from(token / 12), "{first}");
    // The rows of other tokens are written.
    let output = &read_tensors(&files.path("out/out.safetensors"))["output"].1;
    let finite: Vec<bool> = output.chunks(HIDDEN).map(is_finite).collect();
    assert!(!finite[token] && finite.contains(&true), "{finite:?}");
    let warned = files.run(&["--json", "--non-finite", "warn"]);
    assert_eq!(&entries(&warned, 0)[0], first);
    assert!(warned.stderr.contains("WARN") && warned.stderr.contains("expert 3"), "{warned:?}");
}

#[test]
fn gradient_that_overflows_stops_the_run_before_the_update() {
    let mut files = Files::new();
    // Token 17 belongs to PE 1.
    files.grad_output[17 * HIDDEN..18 * HIDDEN].fill(3e38);
    files.write_input(24);
    let weights = files.path("out/weights.safetensors");
    let trained = |more: &[&str]| {
        let path = weights.display().to_string();
        files.run(&[&["--json", "--sgd", "1e-30", "--steps", "3", "--save-weights", &path], more].concat())
    };
    let stopped = trained(&[]).says(&["step 0", "layer 1"]);
    let all = entries(&stopped, 1);
    let named = |entry: &&Value| entry["kind"] == "gradient" && entry["name"] == "grad_hidden_states";
    let row = all.iter().find(named).unwrap_or_else(|| panic!("{all:#?}"));
    assert_eq!((&row["token"], &row["pe"]), (&17.into(), &1.into()));
    assert!(all.iter().all(|entry| entry["kind"] == "gradient" && entry["step"] == 0), "{all:#?}");
    let report: Value = serde_json::from_str(&stopped.stdout).unwrap();
    assert_eq!(report["config"]["steps"], 1);
    // The weights are those before the step.
    let model = read_tensors(&files.path("model/model.safetensors"));
    read_tensors(&weights).iter().for_each(|(name, tensor)| assert_eq!(Some(tensor), model.get(name), "{name}"));
    let output = &read_tensors(&files.path("out/out.safetensors"))["output"].1;
    assert!(is_finite(output));

    let warned = trained(&["--non-finite", "warn"]);
    assert_eq!(entries(&warned, 0)[0]["step"], 0);
    let report: Value = serde_json::from_str(&warned.stdout).unwrap();
    assert_eq!(report["config"]["steps"], 3);
    assert!(read_tensors(&weights).values().any(|(_, values)| !is_finite(values)));
}

#[test]
fn weight_that_overflows_in_the_last_update_is_named() {
    let mut files = Files::new();
    files.grad_output.iter_mut().for_each(|g| *g *= 1e4);
    files.write_input(24);
    let path = files.path("out/weights.safetensors").display().to_string();
    let one = files.run(&["--json", "--sgd", "3e38", "--save-weights", &path]).says(&["layer 1", "step 0"]);
    let all = entries(&one, 1);
    assert_eq!(all[0]["kind"], "weight", "{all:#?}");
    let (name, index) = (all[0]["name"].as_str().unwrap(), all[0]["index"].as_u64().unwrap() as usize);
    assert!(!read_tensors(Path::new(&path))[name].1[index].is_finite());
    let two = files.run(&["--json", "--sgd", "3e38", "--steps", "5", "--save-weights", &path]);
    assert_eq!(entries(&two, 1)[0], all[0]);
}

#[test]
fn loss_that_is_not_finite_keeps_the_results() {
    for (pes, stop) in [("1", true), ("3", false)] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = aristos("run --tokens 64 --hidden 16 --intermediate 16 --experts 4 --steps 12".split(' '));
        command.args("--sgd 1 --aux-loss-coef 0.01 --z-loss-coef 0.01 --json --pes".split(' ')).arg(pes);
        command.args(["--non-finite", if stop { "stop" } else { "warn" }]).current_dir(&folder);
        let routing = ["--output", "o.safetensors", "--save-weights", "w.safetensors", "--save-routing", "r.json"];
        command.args(routing);
        let outcome = run(command);
        let all = entries(&outcome, i32::from(stop));
        let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let steps = report["config"]["steps"].as_u64().unwrap();
        assert!(if stop { steps < 12 } else { steps == 12 && report["aux_losses"]["z"].is_null() }, "{report:#}");
        assert!(!all.is_empty() && all.iter().all(|entry| entry["step"] == all[0]["step"]), "{all:#?}");
        let weights = read_tensors(&folder.path().join("w.safetensors"));
        assert_eq!(weights.values().all(|(_, values)| is_finite(values)), stop);
        assert!(read_tensors(&folder.path().join("o.safetensors")).contains_key("output"));
        let routing: Value = serde_json::from_slice(&std::fs::read(folder.path().join("r.json")).unwrap()).unwrap();
        assert_eq!(routing["records"].as_array().unwrap().len() as u64, steps);
    }
}

/// Files with values that are not finite are refused before a step.
#[test]
fn nan_in_a_file_is_named() {
    let mut files = Files::new();
    let name = scale_weight(&files, "up_proj", f32::NAN);
    files.run(&[]).refused(&[&name, "NaN at [0, 0]"]);
    files = Files::new();
    files.hidden_states[9 * HIDDEN + 3] = f32::NAN;
    files.write_input(24);
    files.run(&[]).refused(&["hidden_states[9, 3] is NaN"]);
}
