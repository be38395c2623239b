//! The report of the delays of all steps: a table, CSV, JSON, and plots.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use super::attribute::{Cause, Step, attribute};
use super::pe::{PeSteps, on_one_clock};
use super::{PeStep, StragglerBench, StragglerMode};
use crate::bench::cpus::{CpuPair, CpuSpan, Nearness, cpu_model};
use crate::bench::p2p::percentile;
use crate::plot::{self, Axis, Mark, Plot, Scale, Series, Style};
use crate::report::text::{TextTable, count, list};
use crate::report::{Report, median};

/// Number of causes in the table.
const LISTED: usize = 5;
/// A cause is the culprit of the whole run if it has more than this share of the delay, and this many times the share of the next cause.
const CULPRIT: f64 = 0.5;
const CULPRIT_OVER_NEXT: f64 = 2.0;
/// Maximum points of a plot.
const POINTS: usize = 2000;
/// An axis is logarithmic if the longest delay exceeds the usual one by this factor.
const OUTLIER_FACTOR: f64 = 20.0;
/// Minimum of a logarithmic axis of times, microseconds. Shorter delays, including 0, are drawn there.
const FLOOR_US: f64 = 1.0;

/// The result of `aristos bench straggler`; `docs/measurements/README.md` describes its keys.
#[derive(Clone, Debug, Serialize)]
pub struct StragglerReport {
    /// The name of the CPU according to the kernel.
    pub cpu_model: String,
    /// The transport.
    pub transport: String,
    /// Number of PEs.
    pub pes: usize,
    /// Measured steps.
    pub steps: usize,
    /// Bytes of each message.
    pub bytes: usize,
    /// Mean compute time of a PE in a step, microseconds.
    pub compute_us: f64,
    /// Compute of the most loaded PE of a step over the mean.
    pub imbalance: f64,
    /// The injected noise, as on the command line.
    pub inject: Vec<String>,
    /// Seed of imbalance and jitter.
    pub seed: u64,
    /// The results of the modes.
    pub modes: Vec<ModeResult>,
}

/// The result of one mode. Times in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct ModeResult {
    /// The mode.
    pub mode: StragglerMode,
    /// The maximum delay.
    pub max_delay_us: f64,
    /// The median delay.
    pub median_delay_us: f64,
    /// The mean delay.
    pub mean_delay_us: f64,
    /// The 95th percentile of the delay.
    pub p95_delay_us: f64,
    /// The mean over the steps of the fastest PE's time.
    pub mean_actual_us: f64,
    /// The sum over the steps of the slowest PE's time over that of the fastest's.
    pub total_over_actual: f64,
    /// The cause of most of the delay; `None` if there are several.
    pub culprit: Option<Cause>,
    /// All causes by their share of the delay, the largest first.
    pub causes: Vec<Share>,
    /// Whether all PEs share a clock.
    pub one_clock: bool,
    /// Offset of each PE's clock to PE 0's at the start, and its uncertainty, microseconds; index = PE.
    pub clock_offsets_us: Vec<[f64; 2]>,
    /// The CPUs of each PE; index = PE.
    #[serde(rename = "seats")]
    pub cpu_spans: Vec<CpuSpan>,
    /// Whether two PEs were observed on one CPU.
    pub shared_cpu: bool,
    /// Mean time of each PE without a CPU in a step; index = PE. `None` if a system does not provide it.
    pub mean_queued_us: Option<Vec<f64>>,
    /// The steps, for CSV and plots.
    #[serde(skip)]
    pub all: Vec<Step>,
    /// Compute time of each PE by step, including time without a CPU, nanoseconds.
    #[serde(skip)]
    pub computed: Vec<Vec<i64>>,
    /// Time of each PE without a CPU by step, nanoseconds.
    #[serde(skip)]
    pub queued: Vec<Vec<i64>>,
}

/// The share of one cause in the delay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    /// The cause.
    #[serde(flatten)]
    pub cause: Cause,
    /// Number of steps with this cause.
    pub steps: usize,
    /// Share of the delay of all steps. Each step's delay is limited to the 95th percentile, so that a single event does not outweigh a permanent cause.
    pub share: f64,
}

fn us(ns: i64) -> f64 {
    ns as f64 * 1e-3
}

/// The cause of most of the delay, if there is one. `causes` are sorted by share, the largest first.
fn culprit(causes: &[Share]) -> Option<Cause> {
    let next = causes.get(1).map_or(0.0, |next| next.share);
    causes.first().filter(|top| top.share > CULPRIT && top.share >= CULPRIT_OVER_NEXT * next).map(|top| top.cause)
}

impl ModeResult {
    fn new(mode: StragglerMode, of_mode: &[PeSteps]) -> ModeResult {
        let steps = on_one_clock(of_mode);
        let all = attribute(&steps, mode);
        let mut delays: Vec<f64> = all.iter().map(|step| us(step.delay)).collect();
        delays.sort_by(f64::total_cmp);
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / all.len().max(1) as f64;
        let p95 = percentile(&delays, 0.95);
        let mut by_cause: BTreeMap<Cause, (usize, f64)> = BTreeMap::new();
        for step in &all {
            if let Some(cause) = step.cause {
                let (steps, sum) = by_cause.entry(cause).or_default();
                *steps += 1;
                *sum += us(step.delay).min(p95);
            }
        }
        let whole: f64 = by_cause.values().map(|(_, sum)| sum).sum();
        let share = |sum: f64| if whole > 0.0 { sum / whole } else { 0.0 };
        let mut causes: Vec<Share> =
            by_cause.into_iter().map(|(cause, (steps, sum))| Share { cause, steps, share: share(sum) }).collect();
        causes.sort_by(|a, b| b.share.total_cmp(&a.share));
        let (actual, delay) = (mean(&mut all.iter().map(|s| us(s.actual))), mean(&mut delays.iter().copied()));
        let cpu_spans: Vec<CpuSpan> = of_mode.iter().map(|pe| pe.span).collect();
        let pairs = || cpu_spans.iter().enumerate().flat_map(|(i, &a)| cpu_spans[..i].iter().map(move |&b| [b, a]));
        let hosts = of_mode.iter().map(|pe| &pe.host);
        let first = of_mode.first();
        let queued: Vec<Vec<i64>> = steps.iter().map(|pes| pes.iter().map(PeStep::queued_ns).collect()).collect();
        let of_pe = |pe: usize| mean(&mut queued.iter().map(|of_step| us(of_step[pe])));
        let mean_queued_us: Vec<f64> = (0..of_mode.len()).map(of_pe).collect();
        ModeResult {
            mode,
            max_delay_us: delays.last().copied().unwrap_or(0.0),
            median_delay_us: median(delays.clone()),
            mean_delay_us: delay,
            p95_delay_us: p95,
            mean_actual_us: actual,
            total_over_actual: if actual > 0.0 { (actual + delay) / actual } else { 0.0 },
            culprit: culprit(&causes),
            causes,
            one_clock: hosts.clone().all(|host| !host.is_empty() && Some(host) == first.map(|pe| &pe.host)),
            clock_offsets_us: first
                .map(|pe| pe.offsets[0].iter().map(|o| [us(o.offset_ns), us(o.error_ns)]).collect())
                .unwrap_or_default(),
            shared_cpu: pairs().any(|pair| CpuPair::of(pair).shared_cpu),
            cpu_spans,
            mean_queued_us: of_mode.iter().all(|pe| pe.knows_queue).then_some(mean_queued_us),
            queued,
            computed: steps.iter().map(|pes| pes.iter().map(|pe| pe.send - pe.begin).collect()).collect(),
            all,
        }
    }

    /// The cause of most of the delay, in one line.
    fn verdict(&self) -> String {
        match (&self.culprit, self.causes.first()) {
            (Some(cause), Some(top)) => {
                let percent = 100.0 * top.share;
                let steps = self.all.len();
                match cause {
                    Cause::LatePe { pe } => {
                        format!(
                            "culprit: PE {pe}, which sent late, has {percent:.0}% of the delay ({} of {steps} steps)",
                            top.steps
                        )
                    }
                    Cause::SlowLink { from, to } => format!(
                        "culprit: the link from PE {from} to PE {to} has {percent:.0}% of the delay ({} of {steps} steps)",
                        top.steps
                    ),
                    Cause::Scheduler => format!(
                        "culprit: the scheduler, by which PEs had no CPU, has {percent:.0}% of the delay ({} of {steps} steps)",
                        top.steps
                    ),
                }
            }
            (None, Some(top)) => {
                format!(
                    "no single culprit: the first of several, {}, has {:.0}% of the delay",
                    top.cause.render(),
                    100.0 * top.share
                )
            }
            (_, None) => "no culprit: a single PE does not wait".to_string(),
        }
    }
}

impl Report for StragglerReport {
    /// Times in microseconds.
    fn render_table(&self) -> String {
        let mut text = format!("{}\n{}, seed {}\n\n", self.setting(), count(self.steps as u64, "step"), self.seed);
        let header = ["", "max delay us", "median", "mean", "P95", "mean actual us", "total / actual"];
        let mut table = TextTable::new(1, header);
        for mode in &self.modes {
            let times =
                [mode.max_delay_us, mode.median_delay_us, mode.mean_delay_us, mode.p95_delay_us, mode.mean_actual_us];
            let mut cells = vec![mode.mode.name().to_string()];
            cells.extend(times.map(|us| format!("{us:.2}")));
            cells.push(format!("{:.3}", mode.total_over_actual));
            table.row(cells);
        }
        text += &table.render();
        for mode in &self.modes {
            let _ = writeln!(text, "\n{}: {}", mode.mode.name(), mode.verdict());
            for share in mode.causes.iter().take(LISTED) {
                let cause = share.cause.render();
                let _ = writeln!(text, "  {cause:<18} {:5.1}%  {:>6} steps", 100.0 * share.share, share.steps);
            }
            let shared = if mode.shared_cpu { format!(" ({})", Nearness::SameCpu.name()) } else { String::new() };
            let clock = if mode.one_clock {
                "one clock".to_string()
            } else {
                let most = mode.clock_offsets_us.iter().map(|[_, error]| *error).fold(0.0, f64::max);
                format!("clocks aligned to within {most:.1} us")
            };
            let queued = match &mode.mean_queued_us {
                Some(us) => format!("without a CPU {} us a step", list(us.iter().map(|us| format!("{us:.1}")))),
                None => "the time that PEs had no CPU is unknown".to_string(),
            };
            let _ = writeln!(
                text,
                "  CPUs {}{shared}; {clock}; {queued}",
                list(mode.cpu_spans.iter().map(|span| span.end))
            );
        }
        text
    }

    /// The delay over the steps and its distribution, for each mode.
    fn plot(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for mode in &self.modes {
            let name = mode.mode.name();
            files.extend(plot::save(folder, &format!("straggler-{name}"), &self.over_steps(mode).svg()?)?);
            files.extend(plot::save(folder, &format!("straggler-{name}-ecdf"), &self.distribution(mode).svg()?)?);
        }
        Ok(files)
    }
}

impl StragglerReport {
    /// Merges the PEs' steps, in any order.
    pub fn new(bench: &StragglerBench, transport: &str, inject: &[String], mut parts: Vec<PeSteps>) -> StragglerReport {
        parts.sort_by_key(|part| part.pe);
        let of_mode = |&mode: &StragglerMode| {
            let of_mode: Vec<PeSteps> = parts.iter().filter(|part| part.mode == mode).cloned().collect();
            ModeResult::new(mode, &of_mode)
        };
        StragglerReport {
            cpu_model: cpu_model(),
            transport: transport.to_string(),
            pes: bench.pes,
            steps: bench.steps,
            bytes: bench.bytes,
            compute_us: bench.compute_us,
            imbalance: bench.imbalance,
            inject: inject.to_vec(),
            seed: bench.seed,
            modes: bench.modes.iter().map(of_mode).collect(),
        }
    }

    /// A line for each mode, step and PE, after a header.
    pub fn to_csv(&self) -> String {
        let mut csv = String::from("mode,step,pe,compute_us,queued_us,time_us,actual_us,delay_us,cause,culprit\n");
        for mode in &self.modes {
            for (k, step) in mode.all.iter().enumerate() {
                let (cause, culprit) = match step.cause {
                    Some(Cause::LatePe { pe }) => ("late-pe", pe.to_string()),
                    Some(Cause::SlowLink { from, to }) => ("slow-link", format!("{from}-{to}")),
                    Some(Cause::Scheduler) => ("scheduler", String::new()),
                    None => ("", String::new()),
                };
                for (pe, &time) in step.times.iter().enumerate() {
                    let _ = writeln!(
                        csv,
                        "{},{k},{pe},{:.3},{:.3},{:.3},{:.3},{:.3},{cause},{culprit}",
                        mode.mode.name(),
                        us(mode.computed[k][pe]),
                        us(mode.queued[k][pe]),
                        us(time),
                        us(step.actual),
                        us(step.delay),
                    );
                }
            }
        }
        csv
    }

    fn setting(&self) -> String {
        let mut text = format!(
            "{}, {} over {}, all-to-all of {}",
            self.cpu_model,
            count(self.pes as u64, "PE"),
            self.transport,
            plot::bytes(self.bytes as u64)
        );
        if self.compute_us > 0.0 {
            let _ = write!(text, ", {} us of compute", self.compute_us);
        }
        if self.imbalance > 1.0 {
            let _ = write!(text, ", imbalance {}", self.imbalance);
        }
        if !self.inject.is_empty() {
            let _ = write!(text, ", injected {}", self.inject.join(" "));
        }
        text
    }

    fn over_steps(&self, mode: &ModeResult) -> Plot {
        // Many steps are drawn as the maximum of each stretch, so that peaks stay visible.
        let stretch = mode.all.len().div_ceil(POINTS).max(1);
        let far = mode.max_delay_us > OUTLIER_FACTOR * mode.median_delay_us;
        let floor_us = if far { FLOOR_US } else { 0.0 };
        let of = |value: fn(&Step) -> i64| -> Vec<(f64, f64)> {
            let most = |steps: &[Step]| steps.iter().map(|step| us(value(step))).fold(floor_us, f64::max) * 1e-3;
            mode.all.chunks(stretch).enumerate().map(|(i, steps)| ((i * stretch) as f64, most(steps))).collect()
        };
        let series = |name: String, points, color| Series { name, points, style: Style::Line, color };
        let (max, mean) = (mode.max_delay_us * 1e-3, mode.mean_actual_us * 1e-3);
        Plot {
            title: format!("All-to-all straggler effect, {}", mode.mode.name()),
            subtitle: self.setting(),
            x: Axis::new("all-to-all step", Scale::Linear),
            y: Axis::new("time, ms", if far { Scale::Log } else { Scale::Linear }),
            series: vec![
                series(format!("delay (max {max:.3} ms)"), of(|step| step.delay), 1),
                series(format!("actual (mean {mean:.3} ms)"), of(|step| step.actual), 0),
            ],
            marks: Vec::new(),
        }
    }

    fn distribution(&self, mode: &ModeResult) -> Plot {
        let mut delays: Vec<f64> = mode.all.iter().map(|step| us(step.delay) * 1e-3).collect();
        delays.sort_by(f64::total_cmp);
        let n = delays.len();
        let every = n.div_ceil(POINTS).max(1);
        let kept = (0..n).filter(|i| i % every == 0 || i + 1 == n);
        // A step function.
        let points = kept.flat_map(|i| [(delays[i], i as f64 / n as f64), (delays[i], (i + 1) as f64 / n as f64)]);
        let (mean, p95) = (mode.mean_delay_us * 1e-3, mode.p95_delay_us * 1e-3);
        // On a linear axis a few long delays would hide the others.
        let far = mode.max_delay_us > OUTLIER_FACTOR * mode.p95_delay_us.max(1e-9);
        Plot {
            title: format!("Distribution of the delay (ECDF), {}", mode.mode.name()),
            subtitle: self.setting(),
            x: Axis::new("delay, ms", if far { Scale::Log } else { Scale::Linear }),
            y: Axis::new("share of the steps with at most that delay", Scale::Linear),
            series: vec![Series { name: "ECDF".into(), points: points.collect(), style: Style::Line, color: 0 }],
            marks: vec![
                Mark { name: format!("mean = {mean:.3} ms"), at: mean, upright: true, color: 1 },
                Mark { name: format!("P95 = {p95:.3} ms"), at: p95, upright: true, color: 2 },
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::clock::Offset;
    use super::*;

    /// Two PEs, 20 steps; PE 1 sends 300 us late, in the last step 3 ms.
    fn example() -> StragglerReport {
        let bench = StragglerBench {
            pes: 2,
            steps: 20,
            warmup: 0,
            bytes: 4096,
            compute_us: 100.0,
            imbalance: 1.0,
            modes: vec![StragglerMode::OneSided],
            inject: Vec::new(),
            seed: 7,
            wait_limit: std::time::Duration::from_secs(1),
        };
        let step = |pe: usize, k: i64| {
            let late = if k == 19 { 3_000_000 } else { 300_000 };
            let begin = k * 10_000_000;
            let sends = [begin + 100_000, begin + 100_000 + late];
            let end = if pe == 0 { sends[1] + 1000 } else { sends[1] + 2000 };
            let arrived = if pe == 0 { [sends[0], end] } else { [end, sends[1]] };
            PeStep {
                begin,
                send: sends[pe],
                end,
                sent: sends.to_vec(),
                arrived: arrived.to_vec(),
                queued_compute: 7_000,
                ..PeStep::default()
            }
        };
        let pe = |pe: usize| PeSteps {
            pe,
            mode: StragglerMode::OneSided,
            host: "this".into(),
            span: CpuSpan { start: pe, end: pe, allowed: 1 },
            knows_queue: true,
            offsets: [vec![Offset::default(); 2], vec![Offset::default(); 2]],
            steps: (0..20).map(|k| step(pe, k)).collect(),
        };
        StragglerReport::new(&bench, "shm", &["slow-pe=1:4".into()], vec![pe(1), pe(0)])
    }

    #[test]
    fn culprit_needs_a_dominant_share() {
        let of = |shares: &[f64]| {
            let share = |(pe, &share): (usize, &f64)| Share { cause: Cause::LatePe { pe }, steps: 1, share };
            culprit(&shares.iter().enumerate().map(share).collect::<Vec<_>>())
        };
        let first = Some(Cause::LatePe { pe: 0 });
        assert_eq!([of(&[1.0]), of(&[0.7, 0.3]), of(&[0.51, 0.2, 0.2])], [first; 3]);
        // Two PEs with similar shares; many causes; no cause.
        assert_eq!([of(&[0.52, 0.48]), of(&[0.45, 0.1, 0.1]), of(&[])], [None; 3]);
    }

    #[test]
    fn statistics_are_those_of_the_steps() {
        let mode = &example().modes[0];
        // PE 0 takes 301 us, PE 1 2 us; in the last step 3001.
        assert_eq!((mode.median_delay_us, mode.max_delay_us, mode.p95_delay_us), (299.0, 2999.0, 299.0));
        assert!((mode.mean_delay_us - (19.0 * 299.0 + 2999.0) / 20.0).abs() < 1e-9);
        assert_eq!(mode.mean_actual_us, 2.0);
        assert!((mode.total_over_actual - (2.0 + 434.0) / 2.0).abs() < 1e-9);
        assert_eq!(mode.culprit, Some(Cause::LatePe { pe: 1 }));
        assert_eq!(mode.causes, [Share { cause: Cause::LatePe { pe: 1 }, steps: 20, share: 1.0 }]);
        assert!(mode.one_clock && !mode.shared_cpu);
        assert_eq!(mode.mean_queued_us, Some(vec![7.0, 7.0]));
    }

    #[test]
    fn table_csv_and_plots_show_the_culprit() {
        let report = example();
        let table = report.render_table();
        assert!(
            table.contains("one-sided: culprit: PE 1, which sent late, has 100% of the delay (20 of 20 steps)"),
            "{table}"
        );
        assert!(table.lines().skip(1).all(|line| line.chars().count() <= 120), "{table}");
        let csv = report.to_csv();
        assert_eq!(csv.lines().count(), 1 + 20 * 2);
        assert!(csv.contains("\none-sided,0,1,400.000,7.000,2.000,2.000,299.000,late-pe,1\n"), "{csv}");
        // A delay of 0 is drawn at the minimum of the logarithmic axis.
        let mut far = ModeResult { max_delay_us: 7000.0, ..report.modes[0].clone() };
        far.all[3].delay = 0;
        let over_steps = report.over_steps(&far);
        assert_eq!(over_steps.series[0].points[3], (3.0, 1e-3));
        // A delay far beyond the usual one makes the axis logarithmic.
        let scale = |max_delay_us| report.over_steps(&ModeResult { max_delay_us, ..report.modes[0].clone() }).y.scale;
        assert_eq!((scale(5000.0), scale(7000.0)), (Scale::Linear, Scale::Log), "299 us are usual");
        let folder = tempfile::tempdir().unwrap();
        let files = report.plot(folder.path()).unwrap();
        // Two plots, as SVG, and as PNG where the build writes it.
        assert_eq!(files.len(), if cfg!(feature = "png") { 4 } else { 2 });
        let ecdf = std::fs::read_to_string(folder.path().join("straggler-one-sided-ecdf.svg")).unwrap();
        assert!(ecdf.contains("P95 = 0.299 ms") && ecdf.contains("mean = 0.434 ms"), "{ecdf}");
    }
}
