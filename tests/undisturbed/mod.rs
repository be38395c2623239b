//! What is measured on a machine that has time for it.
#![allow(dead_code)]

use std::time::{Duration, Instant};

use serde_json::Value;

/// The first report of `bench straggler` (`--json`) in which the scheduler has no tenth of the delay: where something else keeps the CPUs busy, it
/// is rightly blamed.
pub fn undisturbed(report: impl Fn() -> Value) -> Value {
    first(report, |report| {
        let modes = report["modes"].as_array().unwrap();
        let mut causes = modes.iter().flat_map(|mode| mode["causes"].as_array().unwrap());
        causes.any(|cause| cause["cause"] == "scheduler" && cause["share"].as_f64().unwrap() > 0.1)
    })
}

/// The first report that is not `disturbed`, of those that begin within a minute and of at least five, or the last one.
pub fn first<R>(report: impl Fn() -> R, disturbed: impl Fn(&R) -> bool) -> R {
    let began = Instant::now();
    let mut reports = (0..).map(|of| (of, report()));
    let calm = |(of, report): &(u32, R)| !disturbed(report) || (*of >= 4 && began.elapsed() > Duration::from_secs(60));
    reports.find(calm).expect("reports without end").1
}
