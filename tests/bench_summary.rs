//! `aristos bench summary` as a command: the shares of a run and of a report.

mod bench_common;

use bench_common::{aristos, assert_png_if_built, refusal};
use serde_json::Value;

const SMALL: [&str; 12] =
    ["--tokens", "96", "--hidden", "32", "--intermediate", "64", "--experts", "4", "--steps", "2", "--pes", "2"];

fn parts(summary: &Value) -> Vec<(&str, f64)> {
    let parts = summary["parts"].as_array().unwrap();
    parts.iter().map(|part| (part["name"].as_str().unwrap(), part["percent"].as_f64().unwrap())).collect()
}

#[test]
fn run_and_report_have_the_same_parts() {
    let output = aristos(&[&["bench", "summary", "--json", "--attention-ms", "1.5"], &SMALL[..]].concat());
    assert!(output.status.success(), "{output:?}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = parts(&summary).iter().map(|(name, _)| *name).collect();
    for name in ["attention", "router", "dispatch", "expert FFN", "combine", "scale"] {
        assert!(names.contains(&name), "{name}: {summary}");
    }
    let sum: f64 = parts(&summary).iter().map(|(_, percent)| percent).sum();
    assert!((sum - 100.0).abs() < 1e-6, "{summary}");
    let attention = 100.0 * 0.0015 / summary["total_s"].as_f64().unwrap();
    assert!((parts(&summary)[0].1 - attention).abs() < 1e-6, "{summary}");

    let folder = tempfile::tempdir().unwrap();
    let (file, plots) = (folder.path().join("run.json"), folder.path().join("plots"));
    let run = aristos(&[&["run", "--json", "--forward-only"], &SMALL[..]].concat());
    std::fs::write(&file, &run.stdout).unwrap();
    let output =
        aristos(&["bench", "summary", "--report", file.to_str().unwrap(), "--json", "--plot", plots.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    let phases = report["forward"]["phases"].as_object().unwrap();
    let total: f64 = phases.values().map(|phase| phase["median_s"].as_f64().unwrap()).sum();
    assert!((summary["total_s"].as_f64().unwrap() - total).abs() < 1e-9, "{summary}");
    let ffn = parts(&summary).into_iter().find(|(name, _)| *name == "expert FFN").unwrap().1;
    assert!((ffn - 100.0 * phases["expert_gemm"]["median_s"].as_f64().unwrap() / total).abs() < 1e-6);
    let svg = std::fs::read_to_string(plots.join("kernel-summary.svg")).unwrap();
    assert!(svg.contains("expert FFN") && svg.contains(&format!("{ffn:.1}%")), "{svg}");
    assert_png_if_built(&plots.join("kernel-summary.png"));
    let table = aristos(&["bench", "summary", "--report", file.to_str().unwrap()]);
    assert!(String::from_utf8(table.stdout).unwrap().contains("forward pass"));
}

#[test]
fn invalid_arguments_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let said = |args: &[&str]| refusal(&[&["bench", "summary"], args].concat());
    assert_eq!(said(&["--attention-ms=-1"]), "--attention-ms is -1, expected 0 to 10^9 milliseconds");
    assert_eq!(said(&["--steps", "0"]), "--steps is 0, expected at least 1");
    assert_eq!(said(&["--dtype", "f16"]), "--dtype f16 on the CPU, expected f32 or bf16");
    assert_eq!(said(&["--report", "/nowhere"]), "cannot read /nowhere: No such file or directory (os error 2)");
    let text = file("text", "ms 12");
    assert!(said(&["--report", &text]).starts_with(&format!("{text}: not the JSON report of a run: ")));
    let other = file("other", "{\"config\": {}}");
    assert!(said(&["--report", &other]).contains(": missing field "), "{}", said(&["--report", &other]));
    let output = aristos(&["bench", "summary", "--report", &text, "--steps", "3"]);
    assert_eq!(output.status.code(), Some(2), "a report is not run: {output:?}");
}
