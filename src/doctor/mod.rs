//! `aristos doctor`: checks the requirements of runs on this machine, and suggests how to meet missing ones.
//!
//! Facts are collected first ([`Facts::gather`]: driver, NVSHMEM, files), then judged ([`examine`]), so that tests can
//! judge the facts of other machines.

mod cuda;
mod facts;
mod host;
mod network;

use serde::Serialize;

pub use facts::{CudaFacts, DeviceFacts, Facts, LibraryFacts};

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Meets the requirement.
    Ok,
    /// Works, but not at full speed, or not everywhere.
    Warn,
    /// Runs that need it fail.
    Fail,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        }
    }
}

/// The runs that need what a check covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Need {
    /// Every run.
    Cpu,
    /// Runs on CUDA devices.
    Cuda,
    /// Runs on CUDA devices of several hosts.
    Network,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Subject of the check: "driver", "memlock".
    pub topic: &'static str,
    /// Its result.
    pub level: Level,
    /// The runs that need it.
    pub need: Need,
    /// Description of the current state.
    pub found: String,
    /// Suggested remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

impl Finding {
    fn ok(topic: &'static str, need: Need, found: impl Into<String>) -> Self {
        Finding { topic, level: Level::Ok, need, found: found.into(), cure: None }
    }

    fn warn(topic: &'static str, need: Need, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Finding { topic, level: Level::Warn, need, found: found.into(), cure: Some(cure.into()) }
    }

    fn fail(topic: &'static str, need: Need, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Finding { topic, level: Level::Fail, need, found: found.into(), cure: Some(cure.into()) }
    }
}

/// Judges the facts.
pub fn examine(facts: &Facts) -> Vec<Finding> {
    let mut all = host::examine(facts);
    all.extend(cuda::examine(facts));
    all.extend(network::examine(facts));
    all
}

/// Whether a run on the CPU works.
pub fn cpu_runs(findings: &[Finding]) -> bool {
    !findings.iter().any(|f| f.need == Need::Cpu && f.level == Level::Fail)
}

/// One line per finding, with its cure below it.
pub fn render(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.topic.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { topic, level, found, cure, .. } in findings {
        text += &format!("{:<4}  {topic:<width$}  {found}\n", level.name());
        if let Some(cure) = cure {
            text += &format!("{:<4}  {:<width$}  -> {cure}\n", "", "");
        }
    }
    let count = |level| findings.iter().filter(|f| f.level == level).count();
    let runs = |need: &[Need]| !findings.iter().any(|f| need.contains(&f.need) && f.level == Level::Fail);
    let answer = |runs| if runs { "yes" } else { "no" };
    text += &format!(
        "{} ok, {} warn, {} fail; runs on the CPU: {}, on CUDA devices: {}\n",
        count(Level::Ok),
        count(Level::Warn),
        count(Level::Fail),
        answer(runs(&[Need::Cpu])),
        answer(runs(&[Need::Cpu, Need::Cuda])),
    );
    text
}

/// The findings of [`render`] as JSON.
pub fn to_json(findings: &[Finding]) -> serde_json::Value {
    let fails = |need: &[Need]| findings.iter().any(|f| need.contains(&f.need) && f.level == Level::Fail);
    serde_json::json!({
        "findings": findings,
        "cpu": !fails(&[Need::Cpu]),
        "cuda": !fails(&[Need::Cpu, Need::Cuda]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_say_what_does_not_run() {
        let findings = [
            Finding::ok("memory", Need::Cpu, "8 GB"),
            Finding::fail("driver", Need::Cuda, "none", "install it"),
            Finding::warn("memlock", Need::Network, "64 KiB", "raise it"),
        ];
        assert!(cpu_runs(&findings));
        let text = render(&findings);
        assert!(text.contains("fail  driver   none\n               -> install it\n"), "{text}");
        assert!(text.ends_with("1 ok, 1 warn, 1 fail; runs on the CPU: yes, on CUDA devices: no\n"), "{text}");
        let json = to_json(&findings);
        assert_eq!((json["cpu"].as_bool(), json["cuda"].as_bool()), (Some(true), Some(false)));
        assert_eq!(json["findings"][1]["level"], "fail");
        assert_eq!(json["findings"][1]["cure"], "install it");
        assert!(json["findings"][0].get("cure").is_none());
        assert!(!cpu_runs(&[Finding::fail("memory", Need::Cpu, "none", "buy some")]));
    }
}
