//! `aristos bench summary`: the share of each part of a forward pass in its time.
//!
//! The times are those of a run's phases: the median over the steps of each PE, then the median over the PEs, so that the shares are those of a
//! typical PE. Attention is outside the layer; a training loop can supply its time.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::cluster::read_text;
use crate::plot::{Bar, Bars, save};
use crate::report::text::{TextTable, count, ms};
use crate::report::{Report, RunConfig, RunReport};

/// The parts in order: the key in the run's report, and the name in the summary.
const PARTS: [(&str, &str); 8] = [
    ("attention", "attention"),
    ("router", "router"),
    ("dispatch", "dispatch"),
    ("expert_gemm", "expert FFN"),
    ("combine", "combine"),
    ("scale", "scale"),
    ("waiting", "waiting for peers"),
    ("other", "other"),
];

/// A forward pass by its parts.
#[derive(Clone, Debug, Serialize)]
pub struct KernelSummary {
    /// The configuration of the run.
    pub config: RunConfig,
    /// Time of all parts, seconds.
    pub total_s: f64,
    /// The parts that took time, in the order of the pass.
    pub parts: Vec<PassPart>,
}

/// One part of a pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassPart {
    /// Name of the part.
    pub name: String,
    /// Time, seconds.
    pub seconds: f64,
    /// Share of the total, percent.
    pub percent: f64,
}

impl Report for KernelSummary {
    fn render_table(&self) -> String {
        let mut table = TextTable::new(1, ["forward pass", "ms", "%"]);
        for part in &self.parts {
            table.row([part.name.clone(), ms(part.seconds), format!("{:.1}", part.percent)]);
        }
        table.row(["total".to_string(), ms(self.total_s), "100.0".to_string()]);
        format!("{}\n\n{}", self.setting(), table.render())
    }

    /// The parts as bars.
    fn plot(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let bar = |part: &PassPart| Bar {
            name: part.name.clone(),
            value: part.percent,
            text: format!("{:.1}% ({} ms)", part.percent, ms(part.seconds)),
        };
        let bars = Bars {
            title: "Forward pass by part".into(),
            subtitle: self.setting(),
            label: format!("share of the forward pass, {} ms, in percent", ms(self.total_s)),
            bars: self.parts.iter().map(bar).collect(),
        };
        save(folder, "kernel-summary", &bars.svg()?)
    }
}

impl KernelSummary {
    /// Summarises a run's report. `attention_ms` is the time of attention if the run has not measured it, milliseconds.
    ///
    /// # Errors
    /// A report whose forward pass has no time, or that has attention already.
    pub fn new(report: &RunReport, attention_ms: Option<f64>) -> Result<KernelSummary> {
        let phases = &report.forward.phases;
        ensure!(
            attention_ms.is_none() || !phases.contains_key("attention"),
            "`attention_ms` with a report that has attention, expected one of them"
        );
        let time = |key: &str| match phases.get(key) {
            Some(spread) => spread.median_s,
            None if key == "attention" => attention_ms.unwrap_or(0.0) * 1e-3,
            None => 0.0,
        };
        let others = phases.keys().map(String::as_str).filter(|key| PARTS.iter().all(|(known, _)| known != key));
        let names = PARTS.into_iter().chain(others.map(|key| (key, key)));
        let times: Vec<(&str, f64)> = names.map(|(key, name)| (name, time(key))).filter(|(_, s)| *s > 0.0).collect();
        let total_s: f64 = times.iter().map(|(_, seconds)| seconds).sum();
        ensure!(phases.values().any(|spread| spread.median_s > 0.0), "its forward pass has no phases that took time");
        let part = |(name, seconds): (&str, f64)| PassPart {
            name: name.to_string(),
            seconds,
            percent: 100.0 * seconds / total_s,
        };
        Ok(KernelSummary { config: report.config.clone(), total_s, parts: times.into_iter().map(part).collect() })
    }

    /// Summarises a file with a run's report as JSON.
    ///
    /// # Errors
    /// A file that cannot be read or is not a report, and as [`KernelSummary::new`]; the line names the file.
    pub fn read(path: &Path, attention_ms: Option<f64>) -> Result<KernelSummary> {
        let shown = path.display();
        let text = read_text(path)?;
        let report: RunReport =
            serde_json::from_str(&text).with_context(|| format!("{shown}: not the JSON report of a run"))?;
        KernelSummary::new(&report, attention_ms).with_context(|| format!("{shown}"))
    }

    fn setting(&self) -> String {
        let RunConfig { model, pes, tokens, hidden, experts, intermediate, top_k, dtype, mode, .. } = &self.config;
        let pes = count(*pes as u64, "PE");
        format!(
            "{model}, {tokens} tokens, hidden {hidden}, {experts} experts of {intermediate}, top-{top_k}, {dtype}; {pes}, {mode}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Spread;

    fn report(phases: &[(&str, f64)]) -> RunReport {
        let mut report = RunReport::default();
        let spread = |ms: f64| Spread { median_s: ms * 1e-3, max_s: 1.0 };
        report.forward.phases = phases.iter().map(|(key, ms)| (key.to_string(), spread(*ms))).collect();
        report
    }

    fn shares(summary: &KernelSummary) -> Vec<(&str, f64)> {
        summary.parts.iter().map(|p| (p.name.as_str(), (p.percent * 10.0).round() / 10.0)).collect()
    }

    #[test]
    fn shares_include_attention() {
        let run = report(&[("router", 1.0), ("combine", 2.0), ("expert_gemm", 4.0), ("scale", 0.0), ("new", 1.0)]);
        let summary = KernelSummary::new(&run, None).unwrap();
        assert_eq!(shares(&summary), [("router", 12.5), ("expert FFN", 50.0), ("combine", 25.0), ("new", 12.5)]);
        let summary = KernelSummary::new(&run, Some(8.0)).unwrap();
        assert_eq!(shares(&summary)[..2], [("attention", 50.0), ("router", 6.3)]);
        assert!((summary.total_s - 0.016).abs() < 1e-12);
        assert!(summary.render_table().contains("attention      8.000   50.0"), "{}", summary.render_table());
        // A report of a training loop may contain attention.
        let run = report(&[("attention", 3.0), ("router", 1.0)]);
        assert_eq!(shares(&KernelSummary::new(&run, None).unwrap()), [("attention", 75.0), ("router", 25.0)]);
        assert!(KernelSummary::new(&run, Some(1.0)).unwrap_err().to_string().starts_with("`attention_ms` with"));
    }

    #[test]
    fn run_without_times_is_an_error() {
        let error = KernelSummary::new(&report(&[("router", 0.0)]), Some(1.0)).unwrap_err().to_string();
        assert_eq!(error, "its forward pass has no phases that took time");
    }
}
