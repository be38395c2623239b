//! Every family's layer against `transformers`: runs the binary on the cases of `tests/parity/make_families.py`.
//! `tools/test` makes the cases and runs this test.

mod binary;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use aristos::checkpoint::Family;
use binary::{aristos, read_tensors, relative_error, run};
use serde_json::Value;

/// Norm-wise relative, for every tensor.
const F32_TOLERANCE: f64 = 1e-5;
const BF16_TOLERANCE: f64 = 2e-2;

fn root() -> PathBuf {
    const HOW: &str = "run tools/test, which makes the cases";
    let root = std::env::var_os("ARISTOS_FAMILY_CASES");
    PathBuf::from(root.unwrap_or_else(|| panic!("ARISTOS_FAMILY_CASES does not name their folder: {HOW}")))
}

fn read(name: &str) -> Value {
    serde_json::from_slice(&fs::read(root().join(name)).unwrap()).unwrap()
}

fn cases() -> Vec<Value> {
    read("cases.json").as_array().unwrap().clone()
}

fn text<'v>(case: &'v Value, field: &str) -> &'v str {
    case[field].as_str().unwrap()
}

#[test]
fn cases_cover_every_family_in_both_types() {
    let seen: BTreeSet<(String, String)> =
        cases().iter().map(|case| (text(case, "family").into(), text(case, "dtype").into())).collect();
    for family in Family::all() {
        for dtype in ["f32", "bf16"] {
            assert!(seen.contains(&(family.model_type().into(), dtype.into())), "no case of {family:?} in {dtype}");
        }
    }
    println!("{} families", Family::all().count());
}

/// A tensor of a file, if it exists.
fn tensor_as_f32(path: &std::path::Path, name: &str) -> Option<binary::Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).ok()?;
    let values = match tensor.dtype() {
        safetensors::Dtype::F32 => {
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        }
        safetensors::Dtype::BF16 => {
            tensor.data().chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        // Quantised tensors are not compared.
        _ => Vec::new(),
    };
    Some((tensor.shape().to_vec(), values))
}

/// Runs a case on `pes` PEs with `--check`; returns the faults found.
fn wrong(case: &Value, pes: usize) -> Vec<String> {
    let (name, dtype) = (text(case, "name"), text(case, "dtype"));
    let what = format!("{name} on {pes} PEs");
    let dir = root().join(name);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    let mut command = aristos(["run", "--json", "--check", "--dtype", dtype, "--pes", &pes.to_string()]);
    command.args(["--layer", &case["layer"].to_string()]).arg("--model").arg(&dir);
    command.arg("--input").arg(dir.join("input.safetensors")).arg("--output").arg(&out);
    let weights = folder.path().join("weights.safetensors");
    command.arg("--save-weights").arg(&weights);
    let outcome = run(command);
    if outcome.status.code() != Some(0) {
        return vec![format!("{what}: {}{}", outcome.stderr.trim(), outcome.stdout.trim())];
    }
    let mut wrong = Vec::new();
    let (got, want) = (read_tensors(&out), read_tensors(&dir.join("expected.safetensors")));
    let names = |tensors: &std::collections::BTreeMap<_, _>| tensors.keys().cloned().collect::<BTreeSet<String>>();
    if names(&got) != names(&want) {
        let other: Vec<_> = names(&got).symmetric_difference(&names(&want)).cloned().collect();
        wrong.push(format!("{what}: {other:?} on one side only"));
    }
    // Weights are written as they were read: as transformers saved them. (Quantised weights are written as numbers.)
    let on_disk = |name: &str| {
        let mut all = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let shards = all.by_ref().filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("model"));
        let shards = shards.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        shards.into_iter().find_map(|path| tensor_as_f32(&path, name))
    };
    for (tensor, (shape, values)) in read_tensors(&weights) {
        match on_disk(&tensor) {
            Some(theirs) if theirs == (shape, values) => {}
            None if name.contains("mxfp4") => {}
            Some(_) if name.contains("fp8") => {}
            other => wrong.push(format!("{what}: weight {tensor} is another one on disk: {:?}", other.map(|t| t.0))),
        }
    }
    let tolerance = if dtype == "f32" { F32_TOLERANCE } else { BF16_TOLERANCE };
    for (tensor, (shape, values)) in &want {
        let Some((got_shape, got_values)) = got.get(tensor) else { continue };
        if got_shape != shape {
            wrong.push(format!("{what}: {tensor} has shape {got_shape:?}, expected {shape:?}"));
            continue;
        }
        let error = relative_error(got_values, values);
        if error > tolerance {
            wrong.push(format!("{what}: {tensor} is off by {error:.2e}, at most {tolerance:.0e}"));
        }
    }
    wrong
}

#[test]
fn every_family_matches_transformers() {
    let cases = cases();
    let jobs: Vec<(&Value, usize)> = cases.iter().flat_map(|case| [(case, 1), (case, 3)]).collect();
    let (next, all) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((case, pes)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let wrong = wrong(case, *pes);
                    all.lock().unwrap().extend(wrong);
                }
            });
        }
    });
    let all = all.into_inner().unwrap();
    assert!(all.is_empty(), "{} wrong:\n{}", all.len(), all.join("\n"));
    let families: BTreeSet<&str> = cases.iter().map(|case| text(case, "family")).collect();
    println!("{} families in {} cases, each on 1 and 3 PEs and checked", families.len(), cases.len());
}

#[test]
fn defaults_equal_the_configuration_classes() {
    let classes = read("defaults.json");
    let mut compared = 0;
    for family in Family::all() {
        let class = &classes[family.model_type()];
        for (field, default, null) in family.fields() {
            let there = &class[field];
            assert!(there.is_object(), "{family:?}: its configuration class has no field {field}");
            let same = match (&default, &there["default"]) {
                // The class has no default, and the model class needs a value.
                (None, value) => value.is_null(),
                (Some(ours), theirs) => ours == theirs || (ours.is_number() && ours.as_f64() == theirs.as_f64()),
            };
            assert!(same, "{family:?}: {field} is {default:?} here where absent, there {}", there["default"]);
            // Null is refused here wherever it is refused there. Refusals only here are fields without which the model
            // class would fail.
            assert!(null.is_none() || there["null"] == true, "{family:?}: {field} may not be null there");
            compared += 1;
        }
    }
    println!("{compared} defaults of {} families", Family::all().count());
}

#[test]
fn wrong_formula_is_detected() {
    // A changed field of config.json, with the same tensors, stands for a mistake in the formula.
    let mistakes: [(&str, &str, Value); 15] = [
        ("gpt_oss", "swiglu_limit", 1.6.into()),
        ("deepseek_v4", "swiglu_limit", 1.1.into()),
        ("deepseek_v4", "scoring_func", "sigmoid".into()),
        ("minimax_m3_vl", "swiglu_limit", 7.0.into()),
        ("nemotron_h", "mlp_hidden_act", "relu".into()),
        ("laguna", "moe_router_logit_softcapping", 0.0.into()),
        ("phimoe", "router_jitter_noise", 0.1.into()),
        ("ernie4_5_moe-floor", "moe_norm_min", 1e-12.into()),
        ("cohere2_moe-mean", "shared_expert_combination_strategy", "sum".into()),
        ("cohere2_moe-sigmoid", "norm_topk_prob", true.into()),
        ("deepseek_v3-null", "norm_topk_prob", true.into()),
        ("deepseek_v2-groups", "topk_method", "greedy".into()),
        ("kolibri1", "norm_topk_prob", false.into()),
        ("longcat_flash", "routed_scaling_factor", 6.1.into()),
        ("afmoe", "route_scale", 1.0.into()),
    ];
    let cases = cases();
    for (name, field, value) in mistakes {
        let case = cases.iter().find(|case| case["name"] == name).unwrap_or_else(|| panic!("no case {name}"));
        let folder = tempfile::tempdir().unwrap();
        let from = root().join(name);
        for file in fs::read_dir(&from).unwrap().flatten() {
            fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_ne!(config[field], value, "{name}: {field} is that already");
        config[field] = value.clone();
        fs::write(&path, config.to_string()).unwrap();
        let mut moved = case.clone();
        moved["name"] = folder.path().to_str().unwrap().into();
        assert!(!wrong(&moved, 1).is_empty(), "{name}: {field} {value} is not seen");
    }
}
