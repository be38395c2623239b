//! `aristos doctor`: checks the requirements of runs on this machine, and suggests how to meet missing ones.
//!
//! Facts are collected first ([`Facts::gather`]: driver, NVSHMEM, files), then judged ([`examine`]), so that tests can
//! judge the facts of other machines.

mod cuda;
mod facts;
mod finding;
mod host;
mod network;

pub use facts::{CudaFacts, DeviceFacts, Facts, LibraryFacts};
pub use finding::{Finding, Level, Need};

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
