//! `aristos bench` as a command, on a layer small enough for a test; the tests do not depend on its speed.

#[path = "binary/mod.rs"]
mod binary;
mod hosts;
mod skip;

use std::process::{Command, Output};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::process::Signal;

fn bench(args: &[&str]) -> Output {
    let common = ["bench", "moe", "--tokens", "24", "--hidden", "16", "--intermediate", "32", "--experts", "5"];
    let output = Command::new(env!("CARGO_BIN_EXE_aristos")).args(common).args(args).output();
    output.expect("the binary was built for this test")
}

#[test]
fn all_measurements_run_with_any_number_of_pes() {
    let folder = tempfile::tempdir().unwrap();
    for pes in [1, 2, 3, 7] {
        let file = folder.path().join("samples.csv");
        let pes_arg = pes.to_string();
        let args = ["--pes", &pes_arg, "--iterations", "2", "--warmup", "1", "--json", "--csv", file.to_str().unwrap()];
        let output = bench(&args);
        assert!(output.status.success(), "{output:?}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let results = json["results"].as_array().unwrap();
        assert_eq!(results.iter().map(|r| r["dtype"].as_str().unwrap()).collect::<Vec<_>>(), ["f32", "bf16"]);
        for result in results {
            let rows: Vec<u64> =
                result["rows_per_pe"].as_array().unwrap().iter().map(|r| r.as_u64().unwrap()).collect();
            assert_eq!((rows.len(), rows.iter().sum::<u64>()), (pes, 48), "24 tokens of top-2");
            let measurements = result["measurements"].as_array().unwrap();
            assert_eq!(measurements.len(), 6);
            assert!(measurements.iter().all(|m| m["seconds"]["median"].as_f64().unwrap() > 0.0), "{result}");
            assert_eq!(result["ratios"].as_array().unwrap().len(), 6);
        }
        let csv = std::fs::read_to_string(&file).unwrap();
        assert_eq!(csv.lines().count(), 1 + 2 * 2 * 6 * pes);
    }
}

#[test]
fn layer_beyond_the_memory_is_an_error() {
    let args = ["bench", "moe", "--hidden", "65536", "--intermediate", "65536", "--experts", "512", "--tokens", "24"];
    let output = Command::new(env!("CARGO_BIN_EXE_aristos")).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.starts_with("aristos: the layer needs about ") && said.contains("GB available"), "{said}");
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1));
}

#[test]
fn invalid_arguments_are_one_line() {
    for (args, line) in [
        (&["--iterations", "0"][..], "aristos: --iterations is 0, expected at least 1\n"),
        (&["--top-k", "6"], "aristos: top-k is 6, expected 1 to 5, the number of experts\n"),
        (&["--hot-ratio", "1.5"], "aristos: hot ratio is 1.5, expected a number from 0 to 1\n"),
        (&["--pes", "0"], "aristos: --pes 0: the number of PEs must be 1 to 1024\n"),
        (
            &["--csv", "/nowhere/x.csv"],
            "aristos: cannot write /nowhere/x.csv: folder /nowhere: No such file or directory (os error 2)\n",
        ),
    ] {
        let output = bench(args);
        assert_eq!(String::from_utf8_lossy(&output.stderr), line);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn concurrent_measurements_use_different_cpus() {
    // Runs on a separate host, because measurements of other tests also claim CPUs.
    let Some(hosts) = hosts::Hosts::make(1) else { return };
    if thread::available_parallelism().map_or(1, |cpus| cpus.get()) < 2 {
        return skip::skip("there is one CPU");
    }
    let args = "bench moe --pes 1 --iterations 1000000 --tokens 24 --hidden 16 --intermediate 32 --experts 5";
    let job = || binary::start(hosts.command(0, env!("CARGO_BIN_EXE_aristos"), args.split_whitespace()));
    let mut jobs = [job(), job()];
    let begun = Instant::now();
    let cpus = jobs.each_mut().map(|job| {
        let status = format!("/proc/{}/status", job.pe(0).as_raw_nonzero());
        loop {
            let status = fs::read_to_string(&status).unwrap();
            let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
            if cpus.parse::<usize>().is_ok() {
                return cpus.to_string();
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "on CPUs {cpus}, not on one of its own");
            thread::sleep(Duration::from_millis(5));
        }
    });
    for job in jobs {
        job.signal(Signal::TERM);
        job.end();
    }
    assert_ne!(cpus[0], cpus[1]);
}
