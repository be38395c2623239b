//! Repeats measurements until one is not disturbed by other work on the machine.
#![allow(dead_code)]

use std::time::{Duration, Instant};

use serde_json::Value;

/// The first report of `bench straggler --json` that does not attribute more than a tenth of the delay to the scheduler. If
/// other work keeps the CPUs busy, that attribution is correct.
pub fn undisturbed(report: impl Fn() -> Value) -> Value {
    first(report, |report| {
        let modes = report["modes"].as_array().unwrap();
        let mut causes = modes.iter().flat_map(|mode| mode["causes"].as_array().unwrap());
        causes.any(|cause| cause["cause"] == "scheduler" && cause["share"].as_f64().unwrap() > 0.1)
    })
}

/// The first report that is not `disturbed`. Gives up after a minute and at least five reports, and then returns the last one.
pub fn first<R>(report: impl Fn() -> R, disturbed: impl Fn(&R) -> bool) -> R {
    let began = Instant::now();
    let mut reports = (0..).map(|of| (of, report()));
    let calm = |(of, report): &(u32, R)| !disturbed(report) || (*of >= 4 && began.elapsed() > Duration::from_secs(60));
    reports.find(calm).expect("reports without end").1
}
