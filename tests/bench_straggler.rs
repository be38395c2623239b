//! `aristos bench straggler` as a command, and the culprits that it names. The injected noise exceeds that of a busy machine,
//! where PEs lose their CPUs for tens of milliseconds.

mod bench_common;
mod undisturbed;

use bench_common::{aristos, assert_png_if_built, kill_a_pe, refusal, rows};
use serde_json::Value;
use undisturbed::{first, undisturbed};

/// Number of seeds of the culprit test; the environment variable `ARISTOS_STRAGGLER_SEEDS` overrides it.
const SEEDS: u64 = 8;

fn report(args: &[&str]) -> Value {
    let output = aristos(&[&["bench", "straggler", "--json"], args].concat());
    assert!(output.status.success(), "{args:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn injected_culprit_is_reported() {
    let seeds = std::env::var("ARISTOS_STRAGGLER_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(SEEDS);
    let mut wrong = Vec::new();
    for seed in 0..seeds {
        let pes = 2 + seed as usize % 2;
        // The seed determines the culprit and its kind. Imbalance and jitter are added.
        let (pe, other) = (seed as usize / 2 % pes, (seed as usize / 2 + 1) % pes);
        let (inject, want) = match seed / 4 % 2 {
            0 => (format!("slow-pe={pe}:60"), serde_json::json!({"cause": "late-pe", "pe": pe})),
            _ => (
                format!("slow-link={pe}-{other}:60000"),
                serde_json::json!({"cause": "slow-link", "from": pe, "to": other}),
            ),
        };
        let (pes, seed) = (pes.to_string(), seed.to_string());
        let small = ["--steps", "12", "--warmup", "1", "--compute-us", "1000", "--bytes", "4KiB"];
        let noise =
            ["--imbalance", "1.1", "--inject", "jitter=20", "--inject", &inject, "--pes", &pes, "--seed", &seed];
        let args = [&small[..], &noise].concat();
        for mode in undisturbed(|| report(&args))["modes"].as_array().unwrap() {
            if mode["culprit"] != want {
                wrong.push(format!("seed {seed}, {pes} PEs, {inject}, {}: {}", mode["mode"], mode["causes"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {seeds}: {wrong:#?}", wrong.len());
}

#[test]
fn statistics_are_those_of_the_csv() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, plots) = (folder.path().join("steps.csv"), folder.path().join("plots"));
    let files = ["--csv", csv.to_str().unwrap(), "--plot", plots.to_str().unwrap()];
    let report =
        report(&[&["--steps", "40", "--pes", "3", "--compute-us", "50", "--bytes", "64"], &files[..]].concat());
    let (heading, lines) = rows(&csv);
    assert_eq!(heading.join(","), "mode,step,pe,compute_us,queued_us,time_us,actual_us,delay_us,cause,culprit");
    assert_eq!(lines.len(), 2 * 40 * 3);
    let number = |line: &[String], column: usize| line[column].parse::<f64>().unwrap();
    for mode in report["modes"].as_array().unwrap() {
        let of_mode: Vec<&Vec<String>> = lines.iter().filter(|line| mode["mode"] == line[0]).collect();
        let (mut delays, mut actuals) = (Vec::new(), Vec::new());
        for step in of_mode.chunks(3) {
            let times: Vec<f64> = step.iter().map(|line| number(line, 5)).collect();
            let fastest = times.iter().copied().fold(f64::INFINITY, f64::min);
            let slowest = times.iter().copied().fold(0.0, f64::max);
            assert!((number(step[0], 6) - fastest).abs() < 2e-3, "{step:?}");
            assert!((number(step[0], 7) - (slowest - fastest)).abs() < 2e-3, "{step:?}");
            assert!(step.iter().all(|line| number(line, 3) >= 50.0), "{step:?}");
            delays.push(number(step[0], 7));
            actuals.push(number(step[0], 6));
        }
        delays.sort_by(f64::total_cmp);
        let close = |key: &str, want: f64| {
            let got = mode[key].as_f64().unwrap();
            assert!((got - want).abs() <= 1e-3 * want.abs() + 2e-3, "{key}: {got}, expected {want}");
        };
        close("max_delay_us", delays[39]);
        close("median_delay_us", (delays[19] + delays[20]) / 2.0);
        close("p95_delay_us", delays[37]);
        close("mean_actual_us", actuals.iter().sum::<f64>() / 40.0);
        let total: f64 = delays.iter().chain(&actuals).sum();
        close("total_over_actual", total / actuals.iter().sum::<f64>());
        let name = mode["mode"].as_str().unwrap();
        for stem in [format!("straggler-{name}"), format!("straggler-{name}-ecdf")] {
            let svg = std::fs::read_to_string(plots.join(format!("{stem}.svg"))).unwrap();
            assert!(svg.contains(if stem.ends_with("ecdf") { "P95 = " } else { "all-to-all step" }), "{stem}");
            assert_png_if_built(&plots.join(format!("{stem}.png")));
        }
    }
}

#[test]
fn single_pe_has_no_delay_and_the_table_names_the_culprit() {
    let alone = report(&["--steps", "5", "--pes", "1", "--sync", "bulk"]);
    assert_eq!((alone["modes"][0]["max_delay_us"].as_f64(), &alone["modes"][0]["culprit"]), (Some(0.0), &Value::Null));
    let args = ["--steps", "12", "--pes", "2", "--sync", "one-sided", "--inject", "slow-pe=1:300", "--bytes", "64"];
    let table = || String::from_utf8(aristos(&[&["bench", "straggler"], &args[..]].concat()).stdout).unwrap();
    let table = first(table, |table| table.contains("scheduler"));
    assert!(table.contains("one-sided: culprit: PE 1, which sent late, has "), "{table}");
    assert!(table.contains("injected slow-pe=1:300") && table.contains("total / actual"), "{table}");
}

#[test]
fn invalid_arguments_are_one_line() {
    let noise = |text: &str| format!("--inject is {text}, expected slow-pe=P:FACTOR, slow-link=A-B:US or jitter=US");
    for (args, line) in [
        (&["--steps", "0"][..], "--steps is 0, expected at least 1".to_string()),
        (&["--pes", "0"], "--pes 0: the number of PEs must be 1 to 1024".into()),
        (&["--pes", "2", "--imbalance", "3"], "--imbalance is 3, expected 1 to 2, the number of PEs".into()),
        (&["--compute-us=-1"], "--compute-us is -1, expected 0 to 10^7 microseconds".into()),
        (&["--bytes", "many"], "--bytes is many, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB".into()),
        (&["--inject", "slow-pe=1"], noise("slow-pe=1")),
        (&["--inject", "fast-pe=1:2"], noise("fast-pe=1:2")),
        (&["--inject", "slow-link=1:2"], noise("slow-link=1:2")),
        (
            &["--pes", "2", "--inject", "slow-pe=2:3"],
            "--inject slow-pe: PE 2, expected one below --pes, which is 2".into(),
        ),
        (&["--inject", "slow-pe=1:0.5"], "--inject slow-pe: factor 0.5, expected 1 to 10^6".into()),
        (&["--inject", "jitter=NaN"], "--inject jitter is NaN, expected 0 to 10^7 microseconds".into()),
        (
            &["--csv", "/nowhere/x"],
            "cannot write /nowhere/x: folder /nowhere: No such file or directory (os error 2)".into(),
        ),
    ] {
        assert_eq!(refusal(&[&["bench", "straggler"], args].concat()), line);
    }
}

#[test]
fn killed_pe_is_reported() {
    let error = kill_a_pe(&["bench", "straggler", "--steps", "1000000", "--pes", "3", "--sync", "one-sided"], 1);
    assert!(error.starts_with("aristos: PE 1 was killed by signal 9 (SIGKILL) in phase "), "{error}");
}
