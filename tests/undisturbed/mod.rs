//! What is measured on a machine that has time for it.
#![allow(dead_code)]

use serde_json::Value;

/// The first of five reports of `bench straggler` (`--json`) in which the scheduler has no tenth of the delay, or the last: where something else keeps
/// the CPUs busy, it is rightly blamed.
pub fn undisturbed(report: impl Fn() -> Value) -> Value {
    first(report, |report| {
        let modes = report["modes"].as_array().unwrap();
        let mut causes = modes.iter().flat_map(|mode| mode["causes"].as_array().unwrap());
        causes.any(|cause| cause["cause"] == "scheduler" && cause["share"].as_f64().unwrap() > 0.1)
    })
}

/// The same of reports that are not `disturbed`.
pub fn first<R>(report: impl Fn() -> R, disturbed: impl Fn(&R) -> bool) -> R {
    let calm = (0..4).map(|_| report()).find(|report| !disturbed(report));
    calm.unwrap_or_else(report)
}
