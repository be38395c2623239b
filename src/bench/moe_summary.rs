//! The result of all PEs: a table, JSON, and raw samples as CSV.

use std::fmt::Write as _;

use serde::Serialize;

use super::cpus::cpu_model;
use super::moe_samples::{Measurement, PeSamples, Sample, Subject};
use crate::job::request::MoeBench;
use crate::moe::Mode;
use crate::moe::gemm_flop;
use crate::moe::kernels::InstructionSet;
use crate::moe::metrics::Phase;
use crate::report::text::{TextTable, count, join, list, ms};
use crate::report::{Report, median};

/// The result of `aristos bench moe`. `docs/measurements/README.md` describes its keys.
#[derive(Clone, Debug, Serialize)]
pub struct MoeSummary {
    /// The measured layer and the machine.
    pub setting: Setting,
    /// One result per element type.
    pub results: Vec<LayerResult>,
}

/// The measured layer and the machine.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    /// The name of the CPU according to the kernel.
    pub cpu_model: String,
    /// The instruction set of the CPU's kernels (`InstructionSet::name`).
    pub instruction_set: &'static str,
    /// The devices' name; empty for the CPU.
    pub device: String,
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
    /// Type and nonlinearity of the experts.
    pub expert: String,
    /// Share of the experts that are hot.
    pub hot_ratio: f64,
    /// Share of the routing that the hot experts get.
    pub hot_weight: f64,
    /// Seed of weights, tokens and routing.
    pub seed: u64,
    /// Measured iterations.
    pub iterations: usize,
}

/// The result with one element type.
#[derive(Clone, Debug, Serialize)]
pub struct LayerResult {
    /// The element type.
    pub dtype: String,
    /// Rows that each PE's experts compute.
    pub rows_per_pe: Vec<u64>,
    /// The maximum over the mean of the rows of a PE.
    pub imbalance: f64,
    /// The CPUs on which each PE was observed.
    pub cpus: Vec<Vec<usize>>,
    /// Number of measurements that ended with two PEs on one CPU.
    pub shared_cpu: usize,
    /// Each of [`MoeBench::measurements`].
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
    /// Time of an iteration on the slowest PE, seconds.
    pub seconds: Stats,
    /// FLOP of the experts over the median time, 10^9 per second.
    pub gflop_per_s: f64,
    /// Times by phase; empty for bare GEMMs.
    pub phases: Vec<PeSpread>,
}

/// The time of one phase on each PE.
#[derive(Clone, Debug, Serialize)]
pub struct PeSpread {
    /// The phase.
    pub phase: &'static str,
    /// The median over the iterations, seconds, index = PE.
    pub median_s: Vec<f64>,
}

/// The ratio of two measurements' times.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// The numerator.
    pub of: &'static str,
    /// The denominator.
    pub to: &'static str,
    /// "forward" or "forward+backward".
    pub passes: &'static str,
    /// Statistics of the ratios of each iteration.
    pub ratio: Stats,
}

/// Statistics over the iterations.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stats {
    /// The median.
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
}

impl Stats {
    fn of(values: Vec<f64>) -> Stats {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Stats { median: median(values), min, max }
    }
}

impl Report for MoeSummary {
    /// Times in ms.
    fn render_table(&self) -> String {
        let Setting {
            cpu_model,
            instruction_set,
            device,
            pes,
            tokens,
            hidden,
            intermediate,
            experts,
            top_k,
            expert,
            ..
        } = &self.setting;
        let (what, each) = match &device[..] {
            "" => (format!("{cpu_model}, kernels for {instruction_set}"), ", 1 thread each"),
            device => (device.to_string(), ""),
        };
        let mut text = format!(
            "{what}\n{}{each}; {}, hidden {hidden}, {} of {intermediate} ({expert}), top-{top_k}\n",
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

impl MoeSummary {
    /// The result of all PEs' samples: a list for each element type, index = PE.
    pub fn new(bench: &MoeBench, samples: &[Vec<PeSamples>]) -> MoeSummary {
        let layer = &bench.layer.layer;
        let gated = if layer.expert.gated { "gated" } else { "plain" };
        let setting = Setting {
            cpu_model: cpu_model(),
            instruction_set: InstructionSet::in_use().name(),
            device: samples.first().and_then(|pes| pes.first()).map(|pe| pe.device.clone()).unwrap_or_default(),
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
}

impl LayerResult {
    fn new(bench: &MoeBench, pes: &[PeSamples]) -> LayerResult {
        let rows_per_pe: Vec<u64> = pes.iter().map(|pe| pe.expert_rows.iter().sum()).collect();
        let rows: u64 = rows_per_pe.iter().sum();
        let most = rows_per_pe.iter().copied().max().unwrap_or(0);
        let (iterations, n) = (bench.iterations, pes.len());
        let all_measurements = bench.measurements();
        let sample = |pe: usize, iteration: usize, which: usize| -> &Sample { &pes[pe].iterations[iteration][which] };
        // The slowest PE of each measurement and iteration.
        let seconds: Vec<Vec<f64>> = (0..all_measurements.len())
            .map(|which| {
                let slowest = |i| (0..n).map(|pe| sample(pe, i, which).seconds).fold(0.0, f64::max);
                (0..iterations).map(slowest).collect()
            })
            .collect();

        let phases = |which: usize| {
            let of = |phase: Phase| PeSpread {
                phase: phase.name(),
                median_s: (0..n)
                    .map(|pe| median((0..iterations).map(|i| sample(pe, i, which).phases_s[phase.code()]).collect()))
                    .collect(),
            };
            Phase::of_passes().map(of).collect()
        };
        let measurements = all_measurements.iter().enumerate().map(|(which, measurement)| {
            let (what, passes) = measurement.name();
            let seconds = Stats::of(seconds[which].clone());
            let flop = gemm_flop(&bench.layer.layer, rows, bench.tokens as u64, measurement.backward);
            MeasurementResult {
                what,
                passes,
                seconds,
                gflop_per_s: flop / seconds.median * 1e-9,
                phases: if measurement.what == Subject::Gemms { Vec::new() } else { phases(which) },
            }
        });
        let ratios = [false, true].into_iter().flat_map(|backward| {
            let (gemms, bulk) = (Subject::Gemms, Subject::Layer(Mode::Bulk));
            let pipelined = Subject::Layer(Mode::Pipelined);
            let index = move |what| all_measurements.iter().position(|&m| m == Measurement { what, backward });
            let seconds = &seconds;
            [(pipelined, gemms), (bulk, gemms), (pipelined, bulk)].into_iter().filter_map(move |(of, to)| {
                let (above, below) = (&seconds[index(of)?], &seconds[index(to)?]);
                let [of, to] = [of, to].map(|what| Measurement { what, backward });
                let ratio = Stats::of(above.iter().zip(below).map(|(a, b)| a / b).collect());
                Some(Ratio { of: of.name().0, to: to.name().0, passes: of.name().1, ratio })
            })
        });
        let cpus_of = |pe: usize| {
            let mut cpus: Vec<usize> = pes[pe].iterations.iter().flatten().map(|sample| sample.cpu).collect();
            cpus.sort_unstable();
            cpus.dedup();
            cpus
        };
        let all = (0..iterations).flat_map(|i| (0..all_measurements.len()).map(move |which| (i, which)));
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
        let mut text = format!(
            "{}: rows per PE {} (most over mean {:.3}); seen on CPUs {}",
            self.dtype,
            list(&self.rows_per_pe),
            self.imbalance,
            list(self.cpus.iter().map(|cpus| join(cpus, "+"))),
        );
        if self.shared_cpu > 0 {
            let _ = write!(text, "; two PEs on one CPU after {}", count(self.shared_cpu as u64, "measurement"));
        }
        let name = |what| if what == "gemms" { "bare GEMMs" } else { what };
        let mut times = TextTable::new(2, ["", "", "median ms", "min", "max", "GFLOP/s"]);
        for m in &self.measurements {
            let Stats { median, min, max } = m.seconds;
            times.row([m.passes, name(m.what), &ms(median), &ms(min), &ms(max), &format!("{:.1}", m.gflop_per_s)]);
        }
        let mut ratios = TextTable::new(2, ["", "ratio of times", "median", "min", "max"]);
        for r in &self.ratios {
            let [median, min, max] = [r.ratio.median, r.ratio.min, r.ratio.max].map(|x| format!("{x:.3}"));
            ratios.row([r.passes.to_string(), format!("{} / {}", name(r.of), name(r.to)), median, min, max]);
        }
        let mut header = vec![String::new(), "ms by phase and PE".to_string()];
        let names = self.measurements.iter().find(|m| !m.phases.is_empty()).map(|m| &m.phases);
        header.extend(names.into_iter().flatten().map(|phase| phase.phase.to_string()));
        let mut phases = TextTable::new(2, header);
        for m in self.measurements.iter().filter(|m| !m.phases.is_empty()) {
            for pe in 0..self.rows_per_pe.len() {
                let mut row = vec![m.passes.to_string(), format!("{}, PE {pe}", m.what)];
                row.extend(m.phases.iter().map(|phase| ms(phase.median_s[pe])));
                phases.row(row);
            }
        }
        for table in [times, ratios, phases] {
            let _ = write!(text, "\n{}", table.render());
        }
        text
    }
}

/// The raw samples: a line for each element type, iteration, measurement and PE.
pub fn samples_csv(bench: &MoeBench, samples: &[Vec<PeSamples>]) -> String {
    let mut csv = String::from("dtype,iteration,measurement,passes,pe,rows,cpu,seconds");
    for phase in Phase::of_passes() {
        let _ = write!(csv, ",{}_s", phase.name().replace([' ', '-'], "_").to_lowercase());
    }
    csv.push('\n');
    for (pe, of_pe) in samples.iter().flat_map(|pes| pes.iter().enumerate()) {
        let rows: u64 = of_pe.expert_rows.iter().sum();
        for (iteration, of_iteration) in of_pe.iterations.iter().enumerate() {
            for (measurement, sample) in bench.measurements().iter().zip(of_iteration) {
                let (what, passes) = measurement.name();
                let Sample { seconds, phases_s, cpu } = sample;
                let _ = write!(csv, "{},{iteration},{what},{passes},{pe},{rows},{cpu},{seconds:.9}", of_pe.dtype);
                for phase in Phase::of_passes() {
                    let _ = write!(csv, ",{:.9}", phases_s[phase.code()]);
                }
                csv.push('\n');
            }
        }
    }
    csv
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::request::DeviceKind;
    use crate::moe::Dtype;
    use crate::moe::synthetic::{RouterKind, SyntheticSpec};
    use crate::moe::{Activation, LayerConfig, MlpConfig, Options};

    /// Two PEs, three iterations. A forward pass takes the seconds below, with a backward pass three times as long.
    fn example() -> (MoeBench, Vec<Vec<PeSamples>>) {
        let expert = MlpConfig::plain(5000, Activation::Gelu);
        let layer = LayerConfig::new(1000, 4, RouterKind::Softmax.config(4, 2), expert);
        let bench = MoeBench {
            pes: 2,
            layer: SyntheticSpec { layer, hot_ratio: 0.25, hot_weight: 0.7, seed: 0 },
            routing: None,
            tokens: 200,
            device: DeviceKind::Cpu,
            #[cfg(feature = "device")]
            symmetric: crate::gpu::SymmetricBy::Nvshmem,
            #[cfg(feature = "device")]
            gemm: None,
            #[cfg(feature = "device")]
            tile: None,
            #[cfg(feature = "device")]
            lane_stores: false,
            dtypes: vec![Dtype::F32],
            options: Options::default(),
            warmup: 0,
            iterations: 3,
        };
        // By iteration and PE: bare GEMMs, bulk, pipelined.
        let seconds = [
            [[1.0, 2.0], [4.0, 3.0], [3.0, 2.0]],
            [[4.0, 2.0], [6.0, 6.0], [5.0, 1.0]],
            [[1.0, 1.0], [1.0, 2.0], [1.0, 2.0]],
        ];
        let pe = |pe: usize, expert_rows: [u64; 2]| PeSamples {
            dtype: "f32".into(),
            device: String::new(),
            expert_rows: expert_rows.to_vec(),
            iterations: seconds
                .iter()
                .enumerate()
                .map(|(iteration, forward)| {
                    let sample = |seconds: f64| Sample {
                        seconds,
                        // In the second iteration both are on CPU 1.
                        cpu: if iteration == 1 { 1 } else { pe },
                        ..Sample::default()
                    };
                    let forward: Vec<f64> = forward.iter().map(|pes| pes[pe]).collect();
                    forward.iter().map(|&s| sample(s)).chain(forward.iter().map(|&s| sample(3.0 * s))).collect()
                })
                .collect(),
        };
        (bench, vec![vec![pe(0, [100, 200]), pe(1, [60, 40])]])
    }

    #[test]
    fn times_are_of_the_slowest_pe_and_ratios_of_iterations() {
        let (bench, samples) = example();
        let summary = MoeSummary::new(&bench, &samples);
        let result = &summary.results[0];
        assert_eq!((&result.rows_per_pe[..], result.imbalance), (&[300, 100][..], 1.5));
        assert_eq!((&result.cpus[..], result.shared_cpu), (&[vec![0, 1], vec![1]][..], 6));
        let times: Vec<_> =
            result.measurements.iter().map(|m| (m.seconds.min, m.seconds.median, m.seconds.max)).collect();
        let forward = [(1.0, 2.0, 4.0), (2.0, 4.0, 6.0), (2.0, 3.0, 5.0)];
        assert_eq!(times[..3], forward);
        assert_eq!(times[3..], forward.map(|(a, b, c)| (3.0 * a, 3.0 * b, 3.0 * c)));
        // 400 rows through 2 x 2 x 1000 x 5000, in 2 s.
        assert_eq!(result.measurements[0].gflop_per_s, 4.0);
        assert_eq!(result.measurements[3].gflop_per_s, 4.0);
        let ratio = |k: usize| {
            let Ratio { of, to, ratio, .. } = result.ratios[k].clone();
            (of, to, ratio.min, ratio.median, ratio.max)
        };
        assert_eq!(ratio(0), ("pipelined", "gemms", 1.25, 1.5, 2.0));
        assert_eq!(ratio(1), ("bulk", "gemms", 1.5, 2.0, 2.0));
        assert_eq!(ratio(2), ("pipelined", "bulk", 0.75, 5.0 / 6.0, 1.0));
        assert_eq!(ratio(3), ("pipelined", "gemms", 1.25, 1.5, 2.0));
    }

    #[test]
    fn table_and_csv_have_a_line_for_each_measurement() {
        let (bench, samples) = example();
        let text = MoeSummary::new(&bench, &samples).render_table();
        let line = |start: &str| {
            text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"))
        };
        assert!(
            line("f32: ").contains("300 100 (most over mean 1.500); seen on CPUs 0+1 1; two PEs on one CPU after 6")
        );
        assert!(line("forward           pipelined / bare GEMMs").ends_with("1.500  1.250  2.000"), "{text}");
        assert!(text.contains("0.25 of the experts get 0.7 of the routing"));
        assert!(text.lines().skip(1).all(|line| line.chars().count() <= 120), "{text}");
        let csv = samples_csv(&bench, &samples);
        let columns = csv.lines().next().unwrap().split(',').count();
        assert_eq!(csv.lines().count(), 1 + 3 * 6 * 2);
        assert!(csv.lines().all(|line| line.split(',').count() == columns));
        assert!(csv.contains("\nf32,2,pipelined,forward+backward,1,100,1,6.000000000,"), "{csv}");
    }
}
