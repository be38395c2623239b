//! Parity with `transformers`: runs the binary on the cases of `tests/parity/make_cases.py`. `tools/test` makes the
//! cases and runs this test.

mod binary;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use binary::{Tensor, aristos, read_tensors, relative_error, run};
use serde_json::Value;

const PES: [usize; 5] = [1, 2, 3, 4, 8];
/// Norm-wise relative, for every tensor.
const F32_TOLERANCE: f64 = 1e-5;
const BF16_TOLERANCE: f64 = 2e-2;
/// Between two numbers of PEs, f32.
const PES_TOLERANCE: f64 = 1e-6;

struct Case {
    dir: PathBuf,
    layer: u64,
    dtype: String,
    tokens_per_expert: Value,
}

fn cases() -> Vec<(String, Case)> {
    const HOW: &str = "run tools/test, which makes the cases";
    let root = std::env::var_os("ARISTOS_PARITY_CASES");
    let root = PathBuf::from(root.unwrap_or_else(|| panic!("ARISTOS_PARITY_CASES does not name their folder: {HOW}")));
    let list =
        fs::read(root.join("cases.json")).unwrap_or_else(|e| panic!("{}/cases.json: {e}: {HOW}", root.display()));
    let list: Vec<Value> = serde_json::from_slice(&list).unwrap();
    let case = |case: &Value| {
        let name = case["name"].as_str().unwrap();
        let (layer, dtype) = (case["layer"].as_u64().unwrap(), case["dtype"].as_str().unwrap().to_string());
        let tokens_per_expert = case["tokens_per_expert"].clone();
        (name.to_string(), Case { dir: root.join(name), layer, dtype, tokens_per_expert })
    };
    list.iter().map(case).collect()
}

impl Case {
    /// Runs the case; returns the bytes and tensors of the result file, and the report.
    fn run(&self, pes: usize, mode: &str) -> (Vec<u8>, BTreeMap<String, Tensor>, Value) {
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("out.safetensors");
        let mut command = aristos(["run", "--json", "--mode", mode, "--dtype", &self.dtype]);
        command.args(["--pes", &pes.to_string(), "--layer", &self.layer.to_string()]);
        command.arg("--model").arg(&self.dir).arg("--input").arg(self.dir.join("input.safetensors"));
        let outcome = run({
            command.arg("--output").arg(&out);
            command
        });
        let report = serde_json::from_str(&outcome.success().stdout).unwrap();
        (fs::read(&out).unwrap(), read_tensors(&out), report)
    }

    fn expected(&self) -> BTreeMap<String, Tensor> {
        read_tensors(&self.dir.join("expected.safetensors"))
    }
}

/// Adds to `wrong` each difference of `got` and `want` above `tolerance`.
fn compare(
    what: &str,
    got: &BTreeMap<String, Tensor>,
    want: &BTreeMap<String, Tensor>,
    tolerance: f64,
    wrong: &mut Vec<String>,
) {
    let shapes = |tensors: &BTreeMap<String, Tensor>| -> BTreeMap<String, Vec<usize>> {
        tensors.iter().map(|(name, (shape, _))| (name.clone(), shape.clone())).collect()
    };
    let (got_shapes, want_shapes) = (shapes(got), shapes(want));
    if got_shapes != want_shapes {
        let only = |a: &BTreeMap<String, Vec<usize>>, b: &BTreeMap<String, Vec<usize>>| {
            a.iter().filter(|(name, shape)| b.get(*name) != Some(shape)).map(|(n, s)| format!("{n}{s:?}")).collect()
        };
        let (more, fewer): (Vec<String>, Vec<String>) =
            (only(&got_shapes, &want_shapes), only(&want_shapes, &got_shapes));
        wrong.push(format!("{what}: has {more:?}, expected {fewer:?}"));
        return;
    }
    for (name, (_, want)) in want {
        let error = relative_error(&got[name].1, want);
        if error > tolerance {
            wrong.push(format!("{what}: {name} is off by {error:.2e}, at most {tolerance:.0e}"));
        }
    }
}

fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn relative_error_matches_its_definition() {
    assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    assert_eq!(relative_error(&[0.0, 0.0], &[0.0, 0.0]), 0.0);
    assert_eq!(relative_error(&[3.0, 5.0], &[3.0, 4.0]), 0.2);
    assert_eq!(relative_error(&[3.0], &[0.0]), f64::INFINITY);
    assert_eq!(relative_error(&[f32::NAN], &[1.0]), f64::INFINITY);
}

#[test]
fn cases_cover_every_family_in_both_types() {
    let cases = cases();
    let mut seen: Vec<(String, String)> = Vec::new();
    for (_, case) in &cases {
        let config: Value = serde_json::from_slice(&fs::read(case.dir.join("config.json")).unwrap()).unwrap();
        seen.push((config["model_type"].as_str().unwrap().to_string(), case.dtype.clone()));
    }
    for family in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"] {
        for dtype in ["f32", "bf16"] {
            assert!(seen.contains(&(family.to_string(), dtype.to_string())), "no case of {family} in {dtype}");
        }
    }
    assert!(cases.iter().any(|(_, case)| Path::exists(&case.dir.join("model.safetensors.index.json"))));
}

#[test]
fn every_case_matches_transformers_on_any_number_of_pes() {
    let mut wrong = Vec::new();
    for (name, case) in cases() {
        let expected = case.expected();
        let tolerance = if case.dtype == "f32" { F32_TOLERANCE } else { BF16_TOLERANCE };
        let mut alone = None;
        for pes in PES {
            let what = format!("{name} on {pes} PEs");
            let (bytes, tensors, report) = case.run(pes, "pipelined");
            compare(&what, &tensors, &expected, tolerance, &mut wrong);
            if report["tokens_per_expert"] != case.tokens_per_expert {
                let (got, want) = (&report["tokens_per_expert"], &case.tokens_per_expert);
                wrong.push(format!("{what}: tokens per expert {got}, expected {want}"));
            }
            if case.run(pes, "pipelined").0 != bytes {
                wrong.push(format!("{what}: a second run gives other bits"));
            }
            if case.dtype == "f32" {
                let alone = alone.get_or_insert_with(|| tensors.clone());
                compare(&format!("{what}, against 1"), &tensors, alone, PES_TOLERANCE, &mut wrong);
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn every_case_matches_transformers_in_bulk_mode() {
    let mut wrong = Vec::new();
    for (name, case) in cases() {
        let tolerance = if case.dtype == "f32" { F32_TOLERANCE } else { BF16_TOLERANCE };
        compare(&format!("{name} in bulk"), &case.run(3, "bulk").1, &case.expected(), tolerance, &mut wrong);
    }
    assert_none(&wrong);
}
