//! Fits the constants of a [`Calibration`] to reports of runs.

use std::collections::BTreeMap;

use super::calibration::{
    Calibration, Counts, Fitted, HYBRID, PassTerms, REMOTE, Residual, SHM, Shape, Terms, VERSION, sum,
};
use crate::moe::Options;
use crate::moe::cpu::experts::tiles;
use crate::moe::placement::block;
use crate::plan::InputError;
use crate::report::{PassTimes, RunReport, median};

/// Minimum steps of a report: the median of fewer is unreliable.
const MIN_STEPS: u64 = 3;
/// Maximum tokens and widths of a report.
const MAX_TOKENS: u64 = 1 << 28;
const MAX_WIDTH: u64 = 1 << 24;
/// Iterations of the fit, many times more than it needs.
const SWEEPS: usize = 20_000;

/// Fits the constants of a machine with `cores` cores per host to reports, which come with their file names.
///
/// Runs with one PE determine the terms of routing, experts and local rows. Runs with several PEs determine the terms of rows between PEs and the
/// slowdown of routing and experts: over shared memory because more cores are busy, over a network because the PE receives rows at the same time. The
/// sum over a run's PEs is approximated by their number times their median, which is exact for two.
///
/// # Errors
/// A report that is not of a run on the CPU with a backward pass, or too few reports; the line names the report and the field.
pub fn calibrate(reports: &[(String, RunReport)], cores: usize) -> Result<Calibration, InputError> {
    let several = reports.iter().find(|(_, report)| report.config.pes > 1);
    let transport = several.map_or(SHM, |(_, report)| &report.config.transport);
    for (file, report) in reports {
        check(report, &reports[0].1, transport, cores).map_err(|error| error.in_file(file.as_ref()))?;
    }
    let runs: Vec<Run> = reports.iter().map(|(_, report)| Run::of(report)).collect();
    let (alone, together): (Vec<&Run>, Vec<&Run>) = runs.iter().partition(|run| run.pes == 1);
    for (some, which) in [(&alone, "of one PE"), (&together, "of several")] {
        if some.is_empty() {
            let expected = "runs of one PE, and of as many as the machine has cores";
            return Err(InputError::value("reports", format!("have none {which}"), expected));
        }
    }
    let fitted = |(file, report): &(String, RunReport)| Fitted {
        report: file.clone(),
        pes: report.config.pes,
        step_s: report.step_s,
    };
    let mut calibration = Calibration {
        version: VERSION,
        dtype: reports[0].1.config.dtype.clone(),
        cores,
        transport: transport.to_string(),
        busy_factor: 1.0,
        forward: PassTerms::default(),
        backward: PassTerms::default(),
        receive: Terms::new(),
        fitted_to: reports.iter().map(fitted).collect(),
        residuals: BTreeMap::new(),
    };
    for (pass, backward) in [("forward", false), ("backward", true)] {
        let terms = if backward { &mut calibration.backward } else { &mut calibration.forward };
        for (phase, terms) in phases_mut(terms) {
            let samples = alone.iter().map(|run| run.phase(backward, phase));
            *terms = fit(samples.map(relative).collect(), |name| phase == EXPERT || !REMOTE.contains(&name));
            let errors = alone.iter().map(|run| run.phase(backward, phase)).filter(|(_, s)| *s > 0.0);
            let mut errors: Vec<f64> = errors.map(|(counts, s)| (sum(terms, &counts) / s - 1.0).abs()).collect();
            errors.sort_by(f64::total_cmp);
            let residual = Residual { worst: errors.last().copied().unwrap_or(0.0), median: median(errors) };
            calibration.residuals.insert(format!("{pass}.{phase}"), residual);
        }
    }
    match transport {
        SHM => calibration.busy_factor = busy_factor(&calibration, &together),
        _ => calibration.receive = receive(&calibration, &together),
    }
    for backward in [false, true] {
        let slowdown = |run: &Run| calibration.cores().slowdown(run.pes);
        let slowdowns: Vec<f64> = together.iter().map(|run| slowdown(run)).collect();
        let terms = if backward { &mut calibration.backward } else { &mut calibration.forward };
        for (phase, terms) in phases_mut(terms).into_iter().filter(|(phase, _)| *phase != ROUTER && *phase != EXPERT) {
            let left = together.iter().zip(&slowdowns).map(|(run, slowdown)| {
                let (counts, s) = run.phase(backward, phase);
                let left_s = (s / slowdown - sum(terms, &counts)).max(0.0);
                relative((counts, left_s))
            });
            let remote = fit(left.collect(), |name| REMOTE.contains(&name));
            terms.extend(remote);
        }
    }
    Ok(calibration)
}

const ROUTER: &str = "router";
const EXPERT: &str = "expert";

fn phases_mut(terms: &mut PassTerms) -> [(&'static str, &mut Terms); 4] {
    let PassTerms { router, expert, dispatch, combine } = terms;
    [(ROUTER, router), (EXPERT, expert), ("dispatch", dispatch), ("combine", combine)]
}

fn check(report: &RunReport, first: &RunReport, transport: &str, cores: usize) -> Result<(), InputError> {
    let config = &report.config;
    let wrong = |field: &str, found: String, expected: String| {
        Err(InputError::value(format!("config.{field}"), format!("is {found}"), expected))
    };
    if config.device != "cpu" {
        return wrong("device", config.device.clone(), "cpu: of a device's passes no phase is known".into());
    }
    if config.dtype != first.config.dtype {
        return wrong("dtype", config.dtype.clone(), format!("{}, as in the first report", first.config.dtype));
    }
    if config.pes > 1 && config.transport == HYBRID {
        return wrong("transport", HYBRID.into(), "one kind of link between all PEs: shm, tcp, ofi or mpi".into());
    }
    if config.pes > 1 && config.transport != transport {
        let expected = format!("{transport}, as in the first report of several PEs");
        return wrong("transport", config.transport.clone(), expected);
    }
    if let Some(wire) = &config.wire {
        return wrong("wire", wire.clone(), "null: rows in the type of the layer".into());
    }
    if config.mode != "pipelined" {
        return wrong("mode", config.mode.clone(), "pipelined".into());
    }
    if !config.backward {
        return wrong("backward", "false".into(), "true: both passes are fitted".into());
    }
    if config.steps < MIN_STEPS {
        return wrong("steps", config.steps.to_string(), format!("at least {MIN_STEPS}: the median is used"));
    }
    if config.shared_intermediate > 0 {
        return wrong("shared_intermediate", config.shared_intermediate.to_string(), "0".into());
    }
    if report.plan.is_some() {
        return Err(InputError::value("plan", "is set", "a run without a plan, with one group and even shares"));
    }
    for (field, value, most) in [
        ("pes", config.pes as u64, cores.max(2) as u64),
        ("tokens", config.tokens, MAX_TOKENS),
        ("hidden", config.hidden, MAX_WIDTH),
        ("intermediate", config.intermediate, MAX_WIDTH),
        ("top_k", config.top_k, config.experts as u64),
        ("steps", config.steps, 1 << 40),
    ] {
        if !(1..=most).contains(&value) {
            return wrong(field, value.to_string(), format!("1 to {most}"));
        }
    }
    if report.tokens_per_expert.len() != config.experts {
        let found = format!("has {} numbers", report.tokens_per_expert.len());
        return Err(InputError::value("tokens_per_expert", found, config.experts.to_string()));
    }
    let slots = report.tokens_per_expert.iter().fold(0u64, |slots, rows| slots.saturating_add(*rows));
    if !(1..=config.tokens * config.top_k).contains(&slots) {
        let expected = format!("1 to {}, tokens times top_k", config.tokens * config.top_k);
        return Err(InputError::value("tokens_per_expert", format!("has {slots} tokens in all"), expected));
    }
    if !(config.flop_per_step.is_finite() && config.flop_per_step > 0.0) {
        return wrong("flop_per_step", config.flop_per_step.to_string(), "a number above 0".into());
    }
    for (pass, times) in [("forward", Some(&report.forward)), ("backward", report.backward.as_ref())] {
        for (phase, spread) in times.iter().flat_map(|times| &times.phases) {
            if !(0.0..=1e9).contains(&spread.median_s) {
                let found = format!("is {}", spread.median_s);
                return Err(InputError::value(format!("{pass}.phases.{phase}.median_s"), found, "0 to 10^9 seconds"));
            }
        }
        if times.and_then(|times| times.phases.get("expert_gemm")).is_none_or(|spread| spread.median_s == 0.0) {
            return Err(InputError::value(format!("{pass}.phases.expert_gemm"), "is 0", "a time above 0"));
        }
    }
    Ok(())
}

/// The counts and times of a report.
struct Run {
    pes: usize,
    shape: Shape,
    tokens: f64,
    slots: f64,
    /// Tiles in the forward and the backward pass, and the number of experts with rows.
    tiles: [f64; 2],
    experts: f64,
    /// Rows between PEs in a pass, all rows, and messages in each direction.
    put_rows: f64,
    rows: f64,
    messages: f64,
    times: [PassTimes; 2],
}

impl Run {
    fn of(report: &RunReport) -> Run {
        let config = &report.config;
        let (pes, hidden) = (config.pes, config.hidden as f64);
        let slots = report.tokens_per_expert.iter().sum::<u64>() as f64;
        // 2 FLOP per weight and slot in the forward pass, twice as many in the backward pass.
        let weights = config.flop_per_step / 6.0 / slots.max(1.0);
        let element_bytes = if config.dtype == "f32" { 4.0 } else { 2.0 };
        let inner = weights / hidden - config.intermediate as f64;
        let shape = Shape {
            hidden,
            choices: config.experts as f64,
            top_k: config.top_k as f64,
            weights,
            outputs: inner.max(0.0) + hidden,
            element_bytes,
        };
        let tile_rows = Options::DEFAULT_TILE_ROWS;
        let cut = |rows: usize| tiles(0..rows, tile_rows).count() as f64;
        let mut all_tiles = [0.0; 2];
        for &rows in &report.tokens_per_expert {
            // The local rows: about the PE's share of its own tokens.
            let (rows, own) = (rows as usize, block(rows as usize, pes, 0).len());
            all_tiles[0] += match 2 * own >= tile_rows {
                true => cut(own) + cut(rows - own),
                false => cut(rows),
            };
            all_tiles[1] += cut(rows);
        }
        let passes = 2.0 * config.steps as f64;
        let bytes = report.traffic.remote_bytes.get("dispatch_rows").copied().unwrap_or(0) as f64;
        let put_rows = bytes / (hidden * element_bytes) / passes;
        let own_rows = match pes {
            1 => config.tokens as f64,
            _ => put_rows / (pes - 1) as f64,
        };
        let pairs = (pes * (pes - 1)) as f64;
        let options = Options::default();
        let window_rows = options.window_rows(config.tokens as usize / pes, pes.min(config.top_k as usize), pes);
        let chunk_rows = options.chunk_rows(window_rows) as f64;
        Run {
            pes,
            shape,
            tokens: config.tokens as f64,
            slots,
            tiles: all_tiles,
            experts: report.tokens_per_expert.iter().filter(|rows| **rows > 0).count() as f64,
            put_rows,
            rows: put_rows + own_rows,
            messages: if pairs > 0.0 { pairs * (put_rows / pairs / chunk_rows).ceil() } else { 0.0 },
            times: [report.forward.clone(), report.backward.clone().unwrap_or_default()],
        }
    }

    /// The counts and the time of a phase over all PEs, seconds.
    fn phase(&self, backward: bool, phase: &str) -> (Counts, f64) {
        let (shape, pass) = (&self.shape, usize::from(backward));
        let (counts, measured): (Counts, &[&str]) = match phase {
            ROUTER => (shape.router(backward, self.tokens, self.pes as f64), &["router"]),
            EXPERT => {
                let mut counts = shape.tiles(self.slots, self.tiles[pass]);
                if backward {
                    counts.extend(shape.gradients(self.slots, self.experts));
                }
                (counts, &["expert_gemm"])
            }
            "dispatch" => (shape.dispatch(self.slots, self.put_rows, self.messages), &["dispatch"]),
            _ => (shape.combine(self.slots, self.rows, self.put_rows, self.messages), &["combine", "scale"]),
        };
        let of = |name: &&str| self.times[pass].phases.get(*name).map_or(0.0, |spread| spread.median_s);
        (counts, self.pes as f64 * measured.iter().map(of).sum::<f64>())
    }

    /// Time of routing and experts in a pass over all PEs, seconds: measured, and by the calibration.
    fn computing_s(&self, calibration: &Calibration, backward: bool) -> [f64; 2] {
        let terms = if backward { &calibration.backward } else { &calibration.forward };
        let of = |(phase, terms)| {
            let (counts, measured_s) = self.phase(backward, phase);
            [measured_s, sum(terms, &counts)]
        };
        let [router, expert] = [(ROUTER, &terms.router), (EXPERT, &terms.expert)].map(of);
        [router[0] + expert[0], router[1] + expert[1]]
    }
}

/// Fits the time to receive rows from other PEs, of both directions of a pass, to the excess of routing and experts over the calibration.
fn receive(calibration: &Calibration, together: &[&Run]) -> Terms {
    let passes = together.iter().flat_map(|run| [false, true].map(|backward| (run, backward)));
    let samples = passes.map(|(run, backward)| {
        let [measured_s, alone_s] = run.computing_s(calibration, backward);
        let counts = run.shape.receive(2.0 * run.put_rows, 2.0 * run.messages);
        Sample { counts, seconds: measured_s - alone_s, of_s: measured_s }
    });
    fit(samples.collect(), |_| true)
}

/// The slowdown with all cores busy, from routing and experts, which take most of the time.
fn busy_factor(calibration: &Calibration, together: &[&Run]) -> f64 {
    let cores = calibration.cores as f64;
    let of = |run: &&Run| {
        let [forward, backward] = [false, true].map(|backward| run.computing_s(calibration, backward));
        let longer = (forward[0] + backward[0]) / (forward[1] + backward[1]);
        // The inverse of `Cores::slowdown`.
        1.0 + (longer - 1.0) * (cores - 1.0).max(1.0) / (run.pes - 1) as f64
    };
    median(together.iter().map(of).collect()).max(1.0)
}

/// A sample of the fit: counts, their time, and the time that errors are relative to.
pub(super) struct Sample {
    pub(super) counts: Counts,
    seconds: f64,
    of_s: f64,
}

/// A sample with errors relative to its own time.
pub(super) fn relative((counts, seconds): (Counts, f64)) -> Sample {
    Sample { counts, seconds, of_s: seconds }
}

/// Non-negative least squares by coordinate descent: the constants that fit the samples' times best. Only terms selected by `fits` are used.
pub(super) fn fit(samples: Vec<Sample>, fits: impl Fn(&str) -> bool) -> Terms {
    let mut names: Vec<&'static str> = Vec::new();
    let mut rows: Vec<BTreeMap<&'static str, f64>> = Vec::new();
    let mut left = Vec::new();
    for Sample { counts, seconds, of_s } in samples.into_iter().filter(|sample| sample.of_s > 0.0) {
        left.push(seconds / of_s);
        let mut row = BTreeMap::new();
        for (name, count) in counts.into_iter().filter(|(name, _)| fits(name)) {
            if !names.contains(&name) {
                names.push(name);
            }
            *row.entry(name).or_insert(0.0) += count / of_s;
        }
        rows.push(row);
    }
    let value = |row: &BTreeMap<_, _>, name| row.get(name).copied().unwrap_or(0.0);
    let norms: Vec<f64> = names.iter().map(|name| rows.iter().map(|row| value(row, name).powi(2)).sum()).collect();
    let mut constants = vec![0.0; names.len()];
    for _ in 0..SWEEPS {
        for (at, name) in names.iter().enumerate().filter(|(at, _)| norms[*at] > 0.0) {
            let slope: f64 = rows.iter().zip(&left).map(|(row, left)| value(row, name) * left).sum();
            let to = (constants[at] + slope / norms[at]).max(0.0);
            let by = to - constants[at];
            rows.iter().zip(&mut left).for_each(|(row, left)| *left -= by * value(row, name));
            constants[at] = to;
        }
    }
    names.into_iter().map(str::to_string).zip(constants).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_recovers_the_constants() {
        // Constants 2 and 3 for a and b; c would be negative without the constraint.
        let sample = |a: f64, b: f64, c: f64| relative((vec![("a", a), ("b", b), ("c", c)], 2.0 * a + 3.0 * b));
        let samples =
            || vec![sample(1.0, 0.0, 2.0), sample(4.0, 1.0, 0.0), sample(1.0, 5.0, 1.0), sample(2.0, 2.0, 7.0)];
        let terms = fit(samples(), |_| true);
        assert!((terms["a"] - 2.0).abs() < 1e-6 && (terms["b"] - 3.0).abs() < 1e-6 && terms["c"] < 1e-6, "{terms:?}");
        assert_eq!(fit(samples(), |name| name == "a").len(), 1);
        assert!(fit(Vec::new(), |_| true).is_empty());
    }
}
