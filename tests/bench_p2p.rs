//! `aristos bench p2p` as a command, with few samples; the tests do not depend on the measured times.

mod bench_common;

use std::collections::BTreeSet;

use bench_common::{aristos, assert_png_if_built, kill_a_pe, refusal, rows};
use serde_json::Value;

/// Small enough for a test.
const FEW: [&str; 8] = ["bench", "p2p", "--iterations", "10", "--warmup", "5", "--max", "4KiB"];

fn text<'v>(row: &'v Value, key: &str) -> &'v str {
    row[key].as_str().unwrap_or_else(|| panic!("{key}: {row}"))
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}

#[test]
fn all_figures_and_plots_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, plots) = (folder.path().join("rows.csv"), folder.path().join("a/b"));
    let files = ["--json", "--csv", csv.to_str().unwrap(), "--plot", plots.to_str().unwrap()];
    let output = aristos(&[&FEW[..], &files].concat());
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((text(&report, "transport"), report["pes"].as_u64()), ("shm", Some(2)));
    let figures = report["rows"].as_array().unwrap();
    let of = |measure: &str, op: &str| -> Vec<&Value> {
        figures.iter().filter(|row| (text(row, "measure"), text(row, "op")) == (measure, op)).collect()
    };
    let sizes = [16.0, 64.0, 256.0, 1024.0, 4096.0];
    for (measure, op) in [
        ("latency", "put"),
        ("bandwidth", "put"),
        ("latency", "put-nbi"),
        ("issue", "put-nbi"),
        ("latency", "get"),
        ("bandwidth", "get"),
        ("latency", "put-signal"),
        ("consume", "put-signal"),
    ] {
        let of_op = of(measure, op);
        assert_eq!(of_op.iter().map(|row| number(row, "bytes")).collect::<Vec<_>>(), sizes, "{measure} {op}");
        for row in of_op {
            let (min, p50, p99) = (number(row, "min_us"), number(row, "p50_us"), number(row, "p99_us"));
            assert!(0.0 < min && min <= p50 && p50 <= p99, "{row}");
            assert_eq!(number(row, "iterations"), 10.0);
            let of_one = if measure == "consume" { number(row, "mean_us") } else { p50 };
            let gb_per_s = number(row, "bytes") / of_one * 1e-3;
            assert!((number(row, "gb_per_s") / gb_per_s - 1.0).abs() < 1e-6, "{row}");
            assert!((number(row, "messages_per_s") * of_one / 1e6 - 1.0).abs() < 1e-6, "{row}");
            assert!(number(row, "flag_us") > 0.0, "{row}");
            let seats = row["placement"]["seats"].as_array().unwrap();
            let start = |pe: usize| seats[pe]["start"].as_u64().unwrap();
            let end = |pe: usize| seats[pe]["end"].as_u64().unwrap();
            let shared = start(0) == start(1) || end(0) == end(1);
            assert_eq!(row["placement"]["shared_cpu"], shared, "{row}");
            if measure == "issue" {
                assert!(row["memcpy_us"].is_null());
            } else {
                let percent = 100.0 * number(row, "memcpy_us") / p50;
                assert!((number(row, "memcpy_percent") / percent - 1.0).abs() < 1e-6, "{row}");
            }
            if op == "put-signal" {
                let ratio = p50 / number(row, "raw_us");
                assert!((number(row, "raw_ratio") / ratio - 1.0).abs() < 1e-6, "{row}");
            } else {
                assert!(row["raw_us"].is_null());
            }
            let is_ping_pong = (measure, op) == ("latency", "put-signal");
            assert_eq!(row["round_trip_us"].as_f64(), is_ping_pong.then_some(2.0 * p50), "{row}");
        }
    }
    let atomics = figures.iter().filter(|row| row["op"] == "atomic");
    assert_eq!(atomics.map(|row| number(row, "bytes")).collect::<Vec<_>>(), [8.0, 8.0]);
    assert_eq!(figures.len(), 8 * sizes.len() + 2);

    let (heading, lines) = rows(&csv);
    assert_eq!(lines.len(), figures.len());
    assert!(lines.iter().all(|line| line.len() == heading.len()), "{lines:?}");
    let column = |name: &str| heading.iter().position(|cell| cell == name).unwrap();
    for (line, row) in lines.iter().zip(figures) {
        assert_eq!(line[column("op")], text(row, "op"));
        assert!((line[column("p50_us")].parse::<f64>().unwrap() - number(row, "p50_us")).abs() < 1e-4);
        assert_eq!(line[column("cpu_b_end")], row["placement"]["seats"][1]["end"].to_string());
    }
    for stem in ["latency", "bandwidth", "put-nbi"] {
        let svg = std::fs::read_to_string(plots.join(format!("{stem}.svg"))).unwrap();
        let unit = if stem == "bandwidth" { "GB/s" } else { "us" };
        assert!(svg.contains(unit) && svg.contains("bytes transmitted") && svg.contains("4 KiB"), "{stem}");
        assert_png_if_built(&plots.join(format!("{stem}.png")));
    }
}

#[test]
fn flags_select_operations_sizes_and_pairs() {
    let chosen = ["--op", "put-signal", "--min", "1", "--max", "1KiB", "--pair", "all", "--pes", "3", "--json"];
    let output = aristos(&[&FEW[..6], &chosen].concat());
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["rows"].as_array().unwrap();
    let pairs: BTreeSet<String> = figures.iter().map(|row| row["pair"].to_string()).collect();
    assert_eq!(pairs.into_iter().collect::<Vec<_>>(), ["[0,1]", "[0,2]", "[1,2]"]);
    let sizes: BTreeSet<u64> = figures.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [1, 4, 16, 64, 256, 1024]);
    assert_eq!(figures.len(), 3 * 2 * 6);
    // The pair in reverse order, and a size that is not a power of two.
    let output =
        aristos(&[&FEW[..6], &["--op", "get", "--min", "24B", "--max", "24", "--pair", "2,0", "--json"]].concat());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["pes"], 3);
    assert!(report["rows"].as_array().unwrap().iter().all(|row| row["pair"] == serde_json::json!([2, 0])));
    let output = aristos(&[&FEW[..], &["--op", "put"]].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("% memcpy") && table.contains("round trip") && table.contains("transport shm"), "{table}");
}

#[test]
fn invalid_arguments_are_one_line() {
    for (args, line) in [
        (&["--min", "x"][..], "--min is x, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"),
        (&["--max", "4XiB"], "--max is 4XiB, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"),
        (&["--min", "1MiB", "--max", "4KiB"], "--min is 1MiB, expected at most --max, which is 4KiB"),
        (&["--min", "0"], "--min is 0, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"),
        (&["--scope", "warp"], "--scope on --transport shm, expected --transport nvshmem: the threads are a device's"),
        (&["--op", "send-recv"], "--op send-recv on --transport shm, expected mpi or nvshmem"),
        (
            &["--op", "send-recv", "--transport", "nvshmem", "--scope", "thread"],
            "--op send-recv on --scope thread, expected stream",
        ),
        (
            &["--op", "put-nbi", "--transport", "nvshmem", "--scope", "stream"],
            "--op put-nbi on --scope stream, expected thread, warp or block",
        ),
        (
            &["--op", "send-recv", "--transport", "nvshmem", "--scope", "warp", "--scope", "stream"],
            "--scope warp for --op send-recv: it has none such",
        ),
        (
            &["--op", "atomic", "--transport", "nvshmem"],
            "--op atomic on --transport nvshmem, expected shm, tcp, ofi or mpi",
        ),
        (&["--pair", "0"], "--pair is 0, expected two numbers of PEs, as 0,1, or all"),
        (&["--pair", "1,1"], "--pair is 1,1, expected two different PEs"),
        (&["--pair", "0,4", "--pes", "4"], "--pair is 0,4, expected PEs below --pes, which is 4"),
        (&["--pair", "0,99999"], "--pair is 0,99999, expected PEs below 1024"),
        (&["--pair", "all", "--pes", "1"], "--pes is 1, expected 2 to 1024"),
        (&["--iterations", "0"], "--iterations is 0, expected at least 1"),
        (
            &["--csv", "/nowhere/x.csv"],
            "cannot write /nowhere/x.csv: folder /nowhere: No such file or directory (os error 2)",
        ),
        (&["--plot", "/dev/null/x"], "cannot create /dev/null/x: Not a directory (os error 20)"),
    ] {
        assert_eq!(refusal(&[&["bench", "p2p"], args].concat()), line);
    }
}

#[test]
fn killed_pe_is_reported() {
    let args = ["bench", "p2p", "--iterations", "1000000", "--max", "64", "--op", "put-signal", "--pes", "3"];
    for pe in [0, 2] {
        let error = kill_a_pe(&args, pe);
        assert!(error.starts_with(&format!("aristos: PE {pe} was killed by signal 9 (SIGKILL) in phase ")), "{error}");
    }
}
