//! Simulations, comparisons and calibrations as text for a terminal.

use super::{Calibration, Comparison, DeviceCalibration, SimulatedReport};
use crate::report::PassTimes;
use crate::report::text::{TextTable, count, fields, mb, ms};

/// The keys of a simulation's phases, in the order of the table, and their names there.
const PHASES: [(&str, &str); 11] = [
    ("router", "router and plan"),
    ("start", "start"),
    ("dispatch", "dispatch"),
    ("expert_gemm", "expert GEMM"),
    ("epilogue", "epilogue"),
    ("combine", "combine"),
    ("tail", "tail"),
    ("waiting", "waiting"),
    ("sums_wait", "waiting for sums"),
    ("expert_sums", "sums of experts"),
    ("replicated_sums", "sums of replicated"),
];

fn of_passes(report: &SimulatedReport) -> impl Iterator<Item = &PassTimes> {
    std::iter::once(&report.forward).chain(&report.backward)
}

/// A simulation: the step by phase, traffic, stragglers, memory, and the changes that would help.
pub fn simulated_text(report: &SimulatedReport) -> String {
    let config = &report.config;
    let mut text = format!(
        "{} in {}, {} tokens, {} experts, top-{}, hidden {}, {}, {}\nstep {} ms, {:.4e} tokens/s\n",
        count(config.pes as u64, "PE"),
        count(config.groups as u64, "group"),
        config.tokens,
        config.experts,
        config.top_k,
        config.hidden,
        config.dtype,
        config.mode,
        ms(report.step_s),
        report.tokens_per_s
    );
    let mut times = TextTable::new(1, ["time, ms", "forward median", "forward max", "backward median", "backward max"]);
    let of = |pass: Option<&PassTimes>, phase: Option<&str>| {
        let spread = pass.and_then(|pass| match phase {
            None => Some(pass.total),
            Some(phase) => pass.phases.get(phase).copied(),
        });
        spread.map_or_else(Default::default, |spread| [ms(spread.median_s), ms(spread.max_s)])
    };
    // Phases that only a device's calibration gives are left out without one.
    let has = |key: &str| of_passes(report).any(|pass| pass.phases.get(key).is_some_and(|spread| spread.max_s > 0.0));
    let phases = PHASES.iter().filter(|(key, _)| !["start", "epilogue", "tail"].contains(key) || has(key));
    for (name, phase) in std::iter::once(("total", None)).chain(phases.map(|(key, name)| (*name, Some(*key)))) {
        let [forward, backward] = [Some(&report.forward), report.backward.as_ref()].map(|pass| of(pass, phase));
        times.row(std::iter::once(name.to_string()).chain(forward).chain(backward));
    }
    text += &times.render();
    let (stragglers, memory) = (&report.stragglers, &report.memory);
    let whole_mb = |bytes: u64| format!("{:.0}", bytes as f64 * 1e-6);
    let mut rows = vec![
        (
            "sent in dispatch and combine, MB".to_string(),
            format!("{}, between hosts {}", mb(report.exchange_bytes_per_step), mb(report.network_bytes_per_step)),
        ),
        ("overlap efficiency".to_string(), format!("{:.1}%", report.overlap_efficiency * 100.0)),
        (
            "straggler delay, ms".to_string(),
            format!("median {}, P95 {}, max {}", ms(stragglers.median_s), ms(stragglers.p95_s), ms(stragglers.max_s)),
        ),
        (
            "memory of a PE, MB".to_string(),
            format!(
                "symmetric {}, weights {}, gradients {}, rows {}",
                whole_mb(memory.symmetric_bytes),
                whole_mb(memory.weights_bytes),
                whole_mb(memory.gradients_bytes),
                whole_mb(memory.rows_bytes)
            ),
        ),
    ];
    for change in &report.would_help {
        rows.push((format!("with {}", change.change), format!("{} ms, {:.2}x", ms(change.step_s), change.speedup)));
    }
    text += &format!("{}\n", fields(&rows));
    if let Some(model) = &report.model {
        text += &format!(
            "model, {} layers, {} with experts: step {} ms, {:.4e} tokens/s\n",
            model.layers,
            model.moe_layers,
            ms(model.step_s),
            model.tokens_per_s
        );
        let mut parts = TextTable::new(1, ["part of the step", "ms", "%"]);
        for (name, part) in [
            ("attention", model.attention),
            ("dense", model.dense),
            ("MoE", model.moe),
            ("exposed communication", model.exposed_communication),
        ] {
            parts.row([name.to_string(), ms(part.time_s), format!("{:.1}", part.share * 100.0)]);
        }
        text += &parts.render();
    }
    text
}

/// Simulated times next to measured ones.
pub fn comparison_text(comparison: &Comparison) -> String {
    let mut table = TextTable::new(1, ["time, ms", "simulated", "measured", "error"]);
    for row in &comparison.rows {
        let error = row.error.map_or(String::new(), |error| format!("{:+.1}%", error * 100.0));
        table.row([row.what.clone(), ms(row.predicted_s), ms(row.measured_s), error]);
    }
    table.render()
}

/// The fit of a calibration, phase by phase.
pub fn calibration_text(file: &str, calibration: &Calibration, cores: usize) -> String {
    let mut table = TextTable::new(1, ["off the runs, 1 PE", "median", "worst"]);
    for (phase, residual) in &calibration.residuals {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        table.row([phase.clone(), percent(residual.median), percent(residual.worst)]);
    }
    format!(
        "{file}: {}, {}, {}, {:.3} times as long with all of them busy\n{}",
        count(calibration.fitted_to.len() as u64, "report"),
        calibration.dtype,
        count(cores as u64, "core"),
        calibration.busy_factor,
        table.render()
    )
}

/// The passes of a device's logs, measured and simulated.
pub fn device_text(calibration: &DeviceCalibration) -> String {
    let mut table = TextTable::new(3, ["log", "pass", "constants", "measured ms", "simulated", "error"]);
    for pass in &calibration.passes {
        let used = if pass.fitted { "fitted" } else { "judged" };
        let error = format!("{:+.1}%", (pass.simulated_s / pass.measured_s - 1.0) * 100.0);
        let times = [ms(pass.measured_s), ms(pass.simulated_s), error];
        table.row([pass.log.clone(), pass.pass.clone(), used.to_string()].into_iter().chain(times));
    }
    let [rows, columns] = calibration.tile;
    format!("{}, {}, tiles {rows}x{columns}\n{}", calibration.device, calibration.dtype, table.render())
}
