//! What the PEs measured, as one result: a table, JSON, and raw samples as CSV.

use std::fmt::Write as _;

use serde::Serialize;

use super::moe::{MEASUREMENTS, Measurement, MoeBench, PeSamples, Sample, What};
use crate::moe::Mode;
use crate::moe::experts::gemm_flop;
use crate::moe::metrics::Phase;
use crate::report::median;
use crate::report::table::{count, ms, plain, right_aligned};

/// The result of `aristos bench moe`. `docs/measurements/README.md` describes its keys.
#[derive(Clone, Debug, Serialize)]
pub struct MoeSummary {
    /// What was measured, and on what.
    pub setting: Setting,
    /// One result per element type.
    pub results: Vec<LayerResult>,
}

/// What was measured, and on what.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    /// The CPU's name, as the kernel gives it.
    pub cpu_model: String,
    /// Number of PEs, one thread each.
    pub pes: usize,
    /// Tokens, over all PEs.
    pub tokens: usize,
    /// Hidden width.
    pub hidden: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Routed experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// The experts' nonlinearity and whether they are gated.
    pub expert: String,
    /// Share of the experts that are hot.
    pub hot_ratio: f64,
    /// Share of the routing that they get.
    pub hot_weight: f64,
    /// Seed of weights, tokens and routing.
    pub seed: u64,
    /// Kept iterations.
    pub iterations: usize,
}

/// The result with one element type.
#[derive(Clone, Debug, Serialize)]
pub struct LayerResult {
    /// The element type.
    pub dtype: String,
    /// Rows that each PE's experts compute.
    pub rows_per_pe: Vec<u64>,
    /// The most rows of a PE over their mean.
    pub imbalance: f64,
    /// The CPUs that each PE was seen on.
    pub cpus: Vec<Vec<usize>>,
    /// Measurements at whose end two PEs were on one CPU.
    pub shared_cpu: usize,
    /// Each of [`MEASUREMENTS`].
    pub measurements: Vec<MeasurementResult>,
    /// Ratios of two measurements' times.
    pub ratios: Vec<Ratio>,
}

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct MeasurementResult {
    /// "gemms", "bulk" or "pipelined".
    pub what: &'static str,
    /// "forward" or "forward+backward".
    pub passes: &'static str,
    /// Time of an iteration: the slowest PE's, seconds.
    pub seconds: Stats,
    /// The experts' arithmetic over the median time, 10^9 FLOP per second.
    pub gflop_per_s: f64,
    /// Time by phase of each PE's median iteration; empty for bare GEMMs.
    pub phases: Vec<PeSpread>,
}

/// Of an iteration's time in one phase the median over the iterations, by PE.
#[derive(Clone, Debug, Serialize)]
pub struct PeSpread {
    /// The phase.
    pub phase: &'static str,
    /// Seconds, index = PE.
    pub median_s: Vec<f64>,
}

/// One measurement's time over another's.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// What is above the line.
    pub of: &'static str,
    /// What is below it.
    pub to: &'static str,
    /// "forward" or "forward+backward".
    pub passes: &'static str,
    /// Over the ratios of each iteration.
    pub ratio: Stats,
}

/// Over iterations.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stats {
    /// The median.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

impl Stats {
    fn of(values: Vec<f64>) -> Stats {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Stats { median: median(values), min, max }
    }
}

impl MoeSummary {
    /// One result from all PEs' samples: for each element type those of every PE, index = PE.
    pub fn new(bench: &MoeBench, samples: &[Vec<PeSamples>]) -> MoeSummary {
        let layer = &bench.layer.layer;
        let gated = if layer.expert.gated { "gated" } else { "plain" };
        let setting = Setting {
            cpu_model: cpu_model(),
            pes: samples.first().map_or(0, Vec::len),
            tokens: bench.tokens,
            hidden: layer.hidden,
            intermediate: layer.expert.intermediate,
            experts: layer.n_experts,
            top_k: layer.router.top_k,
            expert: format!("{gated}, {:?}", layer.expert.activation),
            hot_ratio: bench.layer.hot_ratio,
            hot_weight: bench.layer.hot_weight,
            seed: bench.layer.seed,
            iterations: bench.iterations,
        };
        MoeSummary { setting, results: samples.iter().map(|pes| LayerResult::new(bench, pes)).collect() }
    }

    /// The result as JSON, indented.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("no map has keys other than strings")
    }

    /// The result as text, ending with a newline. Times in ms.
    pub fn render_table(&self) -> String {
        let Setting { cpu_model, pes, tokens, hidden, intermediate, experts, top_k, expert, .. } = &self.setting;
        let mut text = format!(
            "{cpu_model}\n{}, 1 thread each; {}, hidden {hidden}, {} of {intermediate} ({expert}), top-{top_k}\n",
            count(*pes as u64, "PE"),
            count(*tokens as u64, "token"),
            count(*experts as u64, "expert"),
        );
        if self.setting.hot_ratio > 0.0 {
            let Setting { hot_ratio, hot_weight, .. } = self.setting;
            let _ = writeln!(text, "{hot_ratio} of the experts get {hot_weight} of the routing");
        }
        let _ = writeln!(text, "{}, slowest PE of each", count(self.setting.iterations as u64, "iteration"));
        for result in &self.results {
            let _ = write!(text, "\n{}", result.render());
        }
        text
    }
}

impl LayerResult {
    fn new(bench: &MoeBench, pes: &[PeSamples]) -> LayerResult {
        let rows_per_pe: Vec<u64> = pes.iter().map(|pe| pe.expert_rows.iter().sum()).collect();
        let rows: u64 = rows_per_pe.iter().sum();
        let most = rows_per_pe.iter().copied().max().unwrap_or(0);
        let (iterations, n) = (bench.iterations, pes.len());
        let sample = |pe: usize, iteration: usize, which: usize| -> &Sample { &pes[pe].iterations[iteration][which] };
        // By measurement and iteration, the slowest PE.
        let seconds: Vec<Vec<f64>> = (0..MEASUREMENTS.len())
            .map(|which| {
                let slowest = |i| (0..n).map(|pe| sample(pe, i, which).seconds).fold(0.0, f64::max);
                (0..iterations).map(slowest).collect()
            })
            .collect();

        let phases = |which: usize| {
            let of = |phase: &Phase| PeSpread {
                phase: phase.name(),
                median_s: (0..n)
                    .map(|pe| median((0..iterations).map(|i| sample(pe, i, which).phases_s[phase.code()]).collect()))
                    .collect(),
            };
            Phase::ALL.iter().filter(|&&phase| phase != Phase::Idle).map(of).collect()
        };
        let measurements = MEASUREMENTS.iter().enumerate().map(|(which, measurement)| {
            let (what, passes) = measurement.name();
            let seconds = Stats::of(seconds[which].clone());
            let flop = gemm_flop(&bench.layer.layer, rows, bench.tokens as u64, measurement.backward);
            MeasurementResult {
                what,
                passes,
                seconds,
                gflop_per_s: flop / seconds.median * 1e-9,
                phases: if measurement.what == What::Gemms { Vec::new() } else { phases(which) },
            }
        });
        let ratios = [false, true].into_iter().flat_map(|backward| {
            let (gemms, bulk) = (What::Gemms, What::Layer(Mode::Bulk));
            let pipelined = What::Layer(Mode::Pipelined);
            [(pipelined, gemms), (bulk, gemms), (pipelined, bulk)].map(|(of, to)| {
                let [of, to] = [of, to].map(|what| Measurement { what, backward });
                let [above, below] = [of, to].map(|m| &seconds[index(m)]);
                let ratio = Stats::of(above.iter().zip(below).map(|(a, b)| a / b).collect());
                Ratio { of: of.name().0, to: to.name().0, passes: of.name().1, ratio }
            })
        });
        let cpus_of = |pe: usize| {
            let mut cpus: Vec<usize> = pes[pe].iterations.iter().flatten().map(|sample| sample.cpu).collect();
            cpus.sort_unstable();
            cpus.dedup();
            cpus
        };
        let all = (0..iterations).flat_map(|i| (0..MEASUREMENTS.len()).map(move |which| (i, which)));
        let shared_cpu = all
            .filter(|&(i, which)| (1..n).any(|a| (0..a).any(|b| sample(a, i, which).cpu == sample(b, i, which).cpu)));
        LayerResult {
            dtype: pes.first().map(|pe| pe.dtype.clone()).unwrap_or_default(),
            imbalance: most as f64 * n as f64 / rows.max(1) as f64,
            cpus: (0..n).map(cpus_of).collect(),
            shared_cpu: shared_cpu.count(),
            measurements: measurements.collect(),
            ratios: ratios.collect(),
            rows_per_pe,
        }
    }

    fn render(&self) -> String {
        let join = |values: Vec<String>| values.join(" ");
        let mut text = format!(
            "{}: rows per PE {} (most over mean {:.3}); seen on CPUs {}",
            self.dtype,
            join(self.rows_per_pe.iter().map(u64::to_string).collect()),
            self.imbalance,
            join(
                self.cpus.iter().map(|cpus| cpus.iter().map(usize::to_string).collect::<Vec<_>>().join("+")).collect()
            ),
        );
        if self.shared_cpu > 0 {
            let _ = write!(text, "; two PEs on one CPU after {}", count(self.shared_cpu as u64, "measurement"));
        }
        let mut times = plain();
        times.set_header(["", "", "median ms", "min", "max", "GFLOP/s"]);
        for m in &self.measurements {
            let name = if m.what == "gemms" { "bare GEMMs" } else { m.what };
            let Stats { median, min, max } = m.seconds;
            times.add_row([m.passes, name, &ms(median), &ms(min), &ms(max), &format!("{:.1}", m.gflop_per_s)]);
        }
        let mut ratios = plain();
        ratios.set_header(["", "ratio of times", "median", "min", "max"]);
        for r in &self.ratios {
            let name = |what| if what == "gemms" { "bare GEMMs" } else { what };
            let [median, min, max] = [r.ratio.median, r.ratio.min, r.ratio.max].map(|x| format!("{x:.3}"));
            ratios.add_row([r.passes.to_string(), format!("{} / {}", name(r.of), name(r.to)), median, min, max]);
        }
        let mut phases = plain();
        let mut header = vec![String::new(), "ms by phase and PE".to_string()];
        let names = self.measurements.iter().find(|m| !m.phases.is_empty()).map(|m| &m.phases);
        header.extend(names.into_iter().flatten().map(|phase| phase.phase.to_string()));
        phases.set_header(header);
        for m in self.measurements.iter().filter(|m| !m.phases.is_empty()) {
            for pe in 0..self.rows_per_pe.len() {
                let mut row = vec![m.passes.to_string(), format!("{}, PE {pe}", m.what)];
                row.extend(m.phases.iter().map(|phase| ms(phase.median_s[pe])));
                phases.add_row(row);
            }
        }
        for table in [times, ratios, phases] {
            let _ = write!(text, "\n{}\n", right_aligned(table, 2));
        }
        text
    }
}

/// The raw samples: one line per element type, iteration, measurement and PE.
pub fn samples_csv(samples: &[Vec<PeSamples>]) -> String {
    let mut csv = String::from("dtype,iteration,measurement,passes,pe,rows,cpu,seconds");
    for phase in Phase::ALL.iter().filter(|&&phase| phase != Phase::Idle) {
        let _ = write!(csv, ",{}_s", phase.name().replace([' ', '-'], "_").to_lowercase());
    }
    csv.push('\n');
    for (pe, of_pe) in samples.iter().flat_map(|pes| pes.iter().enumerate()) {
        let rows: u64 = of_pe.expert_rows.iter().sum();
        for (iteration, of_iteration) in of_pe.iterations.iter().enumerate() {
            for (measurement, sample) in MEASUREMENTS.iter().zip(of_iteration) {
                let (what, passes) = measurement.name();
                let Sample { seconds, phases_s, cpu } = sample;
                let _ = write!(csv, "{},{iteration},{what},{passes},{pe},{rows},{cpu},{seconds:.9}", of_pe.dtype);
                for phase in Phase::ALL.iter().filter(|&&phase| phase != Phase::Idle) {
                    let _ = write!(csv, ",{:.9}", phases_s[phase.code()]);
                }
                csv.push('\n');
            }
        }
    }
    csv
}

/// The index of a measurement in [`MEASUREMENTS`].
fn index(measurement: Measurement) -> usize {
    MEASUREMENTS.iter().position(|&m| m == measurement).expect("all of them are there")
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| "CPU of unknown model".to_string(), |(_, name)| name.trim().to_string())
}
