//! The report of a run, merged from the PEs' reports.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::balance::Balance;
use super::non_finite::{self, NonFinite, null_is_nan, nulls_are_nan};
use super::pe::{PassReport, PeReport, Replanned, StepReport, SymmetricMemory, TrafficReport};
use super::text::ranges;

/// The configuration of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    /// The checkpoint's directory, or "synthetic".
    pub model: String,
    /// The number of the layer in the checkpoint.
    pub layer: Option<usize>,
    /// Tokens per step, over all PEs.
    pub tokens: u64,
    /// Width of a token's hidden state, elements.
    pub hidden: u64,
    /// Width inside an expert, elements.
    pub intermediate: u64,
    /// Routed experts.
    pub experts: usize,
    /// Shared experts' width inside, elements; 0 without them.
    pub shared_intermediate: u64,
    /// Experts per token.
    pub top_k: u64,
    /// Element type of tokens and weights: "f32", "bf16" or "f16".
    pub dtype: String,
    /// Element type of rows between PEs, if it differs: "bf16"; null otherwise.
    #[serde(default)]
    pub wire: Option<String>,
    /// Division of an expert's rows among its replicas: by the plan's "shares", or "split" by the batch's counts.
    #[serde(default = "shares")]
    pub balance: String,
    /// Destinations of a row: "pe" for each PE, "host" for each host once.
    #[serde(default = "pe")]
    pub rows_per: String,
    /// "cpu", or the device's name.
    pub device: String,
    /// Transport of rows and signals: "shm", "tcp", "hybrid", "ofi", "mpi", "nvshmem", or "nccl".
    #[serde(default)]
    pub transport: String,
    /// The device's matrix products: "ampere" or "hopper"; null on a CPU.
    pub gemm: Option<String>,
    /// Tiles of the matrix products, such as "128x256"; null on a CPU.
    #[serde(default)]
    pub tile: Option<String>,
    /// Threads of a PE that compute tiles, on a CPU.
    #[serde(default = "one")]
    pub threads: usize,
    /// Schedule of communication and compute: "pipelined" or "bulk".
    pub mode: String,
    /// Number of PEs.
    pub pes: usize,
    /// Measured steps.
    pub steps: u64,
    /// Whether a step has a backward pass.
    pub backward: bool,
    /// Floating-point operations of one step of all PEs: the matrix products of routed and shared experts without the router, of all
    /// passes that ran; a multiply-add counts as two.
    pub flop_per_step: f64,
}

/// The value in reports of versions without a choice.
fn shares() -> String {
    "shares".to_string()
}

/// The value in reports of versions without a choice.
fn pe() -> String {
    "pe".to_string()
}

fn one() -> usize {
    1
}

/// A time of all PEs, from each PE's median over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median over the PEs, seconds.
    pub median_s: f64,
    /// The maximum over the PEs, seconds.
    pub max_s: f64,
}

/// The times of one pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PassTimes {
    /// The whole pass.
    pub total: Spread,
    /// By phase (the keys of [`PHASES`](super::PHASES)).
    pub phases: BTreeMap<String, Spread>,
    /// Rounds through the receive memory, the maximum over PEs and steps.
    pub rounds: u64,
}

/// One tensor against the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorCheck {
    /// Name of the tensor in the output file.
    pub name: String,
    /// Norm of the difference over the norm of the reference; null in JSON if it is not a number.
    #[serde(deserialize_with = "null_is_nan")]
    pub relative_error: f64,
    /// Maximum relative error.
    pub tolerance: f64,
    /// The row or column with the largest error relative to its bound; `None` without bounds.
    pub worst: Option<SliceCheck>,
    /// Whether both errors are within their limits: false if one is not a number.
    pub passed: bool,
}

/// A row or column of a tensor against the reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SliceCheck {
    /// "row" or "column".
    pub axis: String,
    /// Index of the row or column. In a tensor with a row per token the row is the token.
    pub index: usize,
    /// Norm of the difference; null in JSON if it is not a number.
    #[serde(deserialize_with = "null_is_nan")]
    pub error: f64,
    /// Maximum error.
    #[serde(deserialize_with = "null_is_nan")]
    pub bound: f64,
}

impl SliceCheck {
    /// Error over bound; infinite if it is not a number.
    pub(super) fn severity(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { not_nan(self.error / self.bound) }
    }
}

impl TensorCheck {
    /// Compares the errors with their limits.
    pub fn new(name: &str, relative_error: f64, tolerance: f64, worst: Option<SliceCheck>) -> TensorCheck {
        let passed = relative_error <= tolerance && worst.as_ref().is_none_or(|slice| slice.error <= slice.bound);
        TensorCheck { name: name.to_string(), relative_error, tolerance, worst, passed }
    }

    /// The larger of both errors over their limits, for sorting; infinite if one is not a number.
    pub(super) fn severity(&self) -> f64 {
        let slice = self.worst.as_ref().map_or(0.0, SliceCheck::severity);
        not_nan(self.relative_error / self.tolerance).max(slice)
    }
}

fn not_nan(severity: f64) -> f64 {
    if severity.is_nan() { f64::INFINITY } else { severity }
}

/// The result of `--check`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Whether every tensor passed.
    pub passed: bool,
    /// The compared tensors.
    pub tensors: Vec<TensorCheck>,
}

impl CheckReport {
    /// The result: passed if all tensors passed.
    pub fn new(tensors: Vec<TensorCheck>) -> CheckReport {
        CheckReport { passed: tensors.iter().all(|tensor| tensor.passed), tensors }
    }
}

/// One expert-parallel group of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedPes {
    /// The PEs of the group.
    pub pes: Vec<usize>,
    /// The experts of each PE.
    pub experts: Vec<Vec<usize>>,
}

/// Times of a step, of the slowest PE by kind, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanTimes {
    /// The step.
    pub step_s: f64,
    /// Expert GEMMs.
    pub compute_s: f64,
    /// Dispatch and combine; if measured, waiting too.
    pub communication_s: f64,
    /// Gradient sums between groups; if measured, those of replicated weights too.
    pub all_reduce_s: f64,
}

/// The plan of a run, and its prediction next to the measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// "auto", or the plan's file.
    pub source: String,
    /// The algorithm that chose the groups.
    pub algorithm: String,
    /// The minimised objective (`docs/planner.md`), seconds.
    pub objective_s: f64,
    /// The reason for a missing prediction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_predicted: Option<String>,
    /// The groups.
    pub groups: Vec<PlannedPes>,
    /// Prediction of the planner's model: the parts of its objective.
    pub predicted: Option<PlanTimes>,
    /// Measurement of this run.
    pub measured: PlanTimes,
    /// Changes of the plan during the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replanned: Vec<Replanned>,
}

/// EP groups that were lost while the others continued.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LostGroups {
    /// The lost PEs, ascending.
    pub pes: Vec<usize>,
    /// The first step without them, from 0.
    pub from_step: u64,
    /// The first observed cause, one line.
    pub why: String,
}

/// A run, over all PEs and steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The configuration.
    pub config: RunConfig,
    /// Wall time of a step, seconds: the slowest PE's, as the median over the steps.
    pub step_s: f64,
    /// Time of all steps and the work between them, such as moving experts, on the slowest PE, seconds.
    #[serde(default)]
    pub all_steps_s: f64,
    /// Tokens of a step over `step_s`.
    pub tokens_per_s: f64,
    /// `flop_per_step` over `step_s`, in 10^9 per second.
    pub gflop_per_s: f64,
    /// The forward pass.
    pub forward: PassTimes,
    /// The backward pass, if there is one.
    pub backward: Option<PassTimes>,
    /// Traffic between all PEs over all measured steps.
    pub traffic: TrafficReport,
    /// Remote bytes of all kinds, per step.
    pub remote_bytes_per_step: f64,
    /// Tokens of each expert in one step, index = expert.
    pub tokens_per_expert: Vec<u64>,
    /// Rows that each PE's experts computed in one step, index = PE.
    #[serde(default)]
    pub expert_rows_per_pe: Vec<u64>,
    /// How rows are distributed over experts and PEs, and how that changes between the steps.
    #[serde(default)]
    pub balance: Balance,
    /// The CPUs on which each PE was allowed to run, such as "0-15", index = PE; empty on devices.
    #[serde(default)]
    pub cpus_per_pe: Vec<String>,
    /// Processor time of each PE's experts in both passes of a step, the median over the steps, seconds; 0 on a device.
    #[serde(default)]
    pub expert_cpu_s_per_pe: Vec<f64>,
    /// Symmetric memory: the maximum of each figure over the PEs.
    pub symmetric: SymmetricMemory,
    /// Auxiliary losses by name ("load_balancing", "z"), as weighted in the total loss. The caller of
    /// [`RunReport::merge`] adds them. Null in JSON if not finite.
    #[serde(deserialize_with = "nulls_are_nan")]
    pub aux_losses: BTreeMap<String, f64>,
    /// The plan, with `--plan`. The caller of [`RunReport::merge`] adds it.
    pub plan: Option<PlanReport>,
    /// The lost EP groups in the order of the losses. The caller of [`RunReport::merge`] adds them.
    #[serde(default)]
    pub lost: Vec<LostGroups>,
    /// The first values that are not finite, the cause first; at most 16 tensors.
    #[serde(default)]
    pub non_finite: Vec<NonFinite>,
    /// The result of `--check`. The caller of [`RunReport::merge`] adds it.
    pub check: Option<CheckReport>,
}

impl RunReport {
    /// Merges the PEs' reports, in any order. Times of no steps and rates of no time are 0.
    pub fn merge(config: RunConfig, pes: &[PeReport]) -> RunReport {
        let n_steps = pes.iter().map(|pe| pe.n_steps).min().unwrap_or(0);
        let sampled = pes.iter().map(|pe| pe.steps.len()).min().unwrap_or(0);
        let slowest = |step: usize| pes.iter().map(|pe| pe.steps[step].seconds()).fold(0.0, f64::max);
        let step_s = median((0..sampled).map(slowest).collect());
        let per_second = |amount: f64| if step_s > 0.0 { amount / step_s } else { 0.0 };

        let mut traffic = TrafficReport::default();
        let mut symmetric = SymmetricMemory::default();
        let mut tokens_per_expert = vec![0; config.experts];
        let mut expert_rows_per_pe = vec![0; config.pes];
        let mut cpus_per_pe =
            vec![String::new(); if pes.iter().any(|pe| !pe.cpus.is_empty()) { config.pes } else { 0 }];
        let mut expert_cpu_s_per_pe = vec![0.0; config.pes];
        for pe in pes {
            traffic.add(&pe.traffic);
            symmetric.used_bytes = symmetric.used_bytes.max(pe.symmetric.used_bytes);
            symmetric.peak_bytes = symmetric.peak_bytes.max(pe.symmetric.peak_bytes);
            symmetric.budget_bytes = symmetric.budget_bytes.max(pe.symmetric.budget_bytes);
            if let Some(rows) = expert_rows_per_pe.get_mut(pe.pe) {
                *rows = pe.expert_rows.iter().map(|received| received.rows).sum();
            }
            if let Some(cpus) = cpus_per_pe.get_mut(pe.pe) {
                *cpus = ranges(pe.cpus.iter().map(|&cpu| cpu as u64));
            }
            if let Some(cpu_s) = expert_cpu_s_per_pe.get_mut(pe.pe) {
                *cpu_s = median(pe.steps.iter().map(StepReport::expert_cpu_s).collect());
            }
            for received in &pe.expert_rows {
                if let Some(tokens) = tokens_per_expert.get_mut(received.expert) {
                    *tokens += received.rows;
                }
            }
        }
        let remote_bytes: u64 = traffic.remote_bytes.values().sum();
        RunReport {
            step_s,
            all_steps_s: pes.iter().map(|pe| pe.all_steps_s).fold(0.0, f64::max),
            tokens_per_s: per_second(config.tokens as f64),
            gflop_per_s: per_second(config.flop_per_step / 1e9),
            forward: merge_pass(pes, 0, |step| Some(&step.forward)).unwrap_or_default(),
            backward: merge_pass(pes, 1, |step| step.backward.as_ref()),
            remote_bytes_per_step: remote_bytes as f64 / n_steps.max(1) as f64,
            traffic,
            tokens_per_expert,
            expert_rows_per_pe,
            balance: Balance::new(config.experts, config.pes, pes),
            cpus_per_pe,
            expert_cpu_s_per_pe,
            symmetric,
            aux_losses: BTreeMap::new(),
            plan: None,
            lost: Vec::new(),
            non_finite: non_finite::merge(pes.iter().flat_map(|pe| pe.non_finite.iter().cloned())),
            check: None,
            config,
        }
    }
}

/// The times of one pass: `which` is 0 for forward, 1 for backward. `None` if no step has it.
fn merge_pass<'p>(
    pes: &'p [PeReport],
    which: usize,
    pass: impl Fn(&'p StepReport) -> Option<&'p PassReport>,
) -> Option<PassTimes> {
    let passes: Vec<Vec<&PassReport>> = pes.iter().map(|pe| pe.steps.iter().filter_map(&pass).collect()).collect();
    let all = || passes.iter().flatten();
    let names: BTreeSet<&String> = all().flat_map(|pass| pass.phases_s.keys()).collect();
    let phase = |name: &str| spread(&passes, |pass| pass.phases_s.get(name).copied().unwrap_or(0.0));
    all().next()?;
    Some(PassTimes {
        rounds: pes.iter().map(|pe| pe.rounds[which]).max()?,
        total: spread(&passes, |pass| pass.seconds),
        phases: names.into_iter().map(|name| (name.clone(), phase(name))).collect(),
    })
}

/// The spread of one time over the PEs' medians over their steps.
fn spread(passes: &[Vec<&PassReport>], time: impl Fn(&PassReport) -> f64) -> Spread {
    let medians: Vec<f64> = passes.iter().map(|steps| median(steps.iter().map(|pass| time(pass)).collect())).collect();
    Spread { max_s: medians.iter().copied().fold(0.0, f64::max), median_s: median(medians) }
}

/// The median: the mean of the middle two of an even number of values, 0 without values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Report;
    use super::super::pe::ExpertRows;
    use super::*;

    fn pass(seconds: f64, gemm: f64, rounds: u64) -> PassReport {
        let phases_s = BTreeMap::from([("expert_gemm".to_string(), gemm)]);
        PassReport { seconds, phases_s, expert_cpu_s: 0.5 * gemm, rounds }
    }

    /// Two PEs, three steps, four experts. The second PE is slower except in step 2.
    pub(in super::super) fn example() -> (RunConfig, Vec<PeReport>) {
        let config = RunConfig {
            model: "synthetic".into(),
            tokens: 300,
            hidden: 64,
            intermediate: 128,
            experts: 4,
            top_k: 2,
            dtype: "f32".into(),
            mode: "pipelined".into(),
            pes: 2,
            steps: 3,
            backward: true,
            flop_per_step: 6e9,
            ..RunConfig::default()
        };
        let pe = |pe: usize, forward: [f64; 3], expert_rows: [(usize, u64); 2]| PeReport {
            pe,
            tokens: 150,
            n_steps: 3,
            rounds: [3, 1],
            steps: forward
                .iter()
                .enumerate()
                .map(|(step, &s)| StepReport {
                    forward: pass(s, s / 2.0, 1 + step as u64),
                    backward: Some(pass(2.0 * s, s, 1)),
                    expert_rows: expert_rows.map(|(expert, rows)| (expert, rows + 30 * step as u64)).to_vec(),
                })
                .collect(),
            traffic: TrafficReport {
                remote_bytes: BTreeMap::from([("dispatch".into(), 3000), ("combine".into(), 600 * pe as u64)]),
                puts: 6,
                signals: 9,
                fences: 0,
                ..TrafficReport::default()
            },
            expert_rows: expert_rows.map(|(expert, rows)| ExpertRows { expert, rows }).to_vec(),
            symmetric: SymmetricMemory { used_bytes: 100, peak_bytes: 200 - pe as u64, budget_bytes: 400 },
            ..PeReport::default()
        };
        let first = pe(0, [0.1, 0.3, 0.9], [(0, 10), (1, 400)]);
        let second = pe(1, [0.5, 0.6, 0.4], [(2, 0), (3, 190)]);
        (config, vec![first, second])
    }

    #[test]
    fn times_are_medians_over_steps_then_over_pes() {
        let (config, pes) = example();
        let report = RunReport::merge(config, &pes);
        // Medians over steps: PE 0 0.3, PE 1 0.5.
        assert_eq!(report.forward.total, Spread { median_s: 0.4, max_s: 0.5 });
        assert_eq!(report.forward.phases["expert_gemm"], Spread { median_s: 0.2, max_s: 0.25 });
        assert_eq!(report.forward.rounds, 3);
        assert_eq!(report.backward.unwrap().total, Spread { median_s: 0.8, max_s: 1.0 });
        let cpu_s = report.expert_cpu_s_per_pe.iter().zip([0.225, 0.375]);
        assert!(cpu_s.into_iter().all(|(got, want)| (got - want).abs() < 1e-12), "{:?}", report.expert_cpu_s_per_pe);
        // The slowest PE of each step takes 3 * [0.5, 0.6, 0.9].
        assert!((report.step_s - 1.8).abs() < 1e-12);
        assert!((report.tokens_per_s - 300.0 / 1.8).abs() < 1e-9);
        assert!((report.gflop_per_s - 6.0 / 1.8).abs() < 1e-9);
    }

    #[test]
    fn counts_are_summed_and_memory_is_the_largest() {
        let (config, mut pes) = example();
        (pes[0].traffic.network_bytes, pes[1].traffic.network_bytes, pes[1].traffic.relay_bytes) = (500, 400, 30);
        let report = RunReport::merge(config, &pes);
        assert_eq!(report.traffic.remote_bytes, BTreeMap::from([("dispatch".into(), 6000), ("combine".into(), 600)]));
        assert_eq!((report.traffic.puts, report.traffic.signals), (12, 18));
        assert_eq!(report.remote_bytes_per_step, 2200.0);
        assert_eq!((report.traffic.network_bytes, report.traffic.relay_bytes), (900, 30));
        assert_eq!(report.tokens_per_expert, [10, 400, 0, 190]);
        assert_eq!(report.expert_rows_per_pe.iter().sum::<u64>(), 600);
        let most = SymmetricMemory { used_bytes: 100, peak_bytes: 200, budget_bytes: 400 };
        assert_eq!(report.symmetric, most);
    }

    #[test]
    fn nothing_measured_is_zero_and_no_backward_is_none() {
        let (config, mut pes) = example();
        let empty = RunReport::merge(config.clone(), &[]);
        assert_eq!((empty.step_s, empty.tokens_per_s, empty.remote_bytes_per_step), (0.0, 0.0, 0.0));
        assert_eq!(empty.backward, None);
        pes.iter_mut().flat_map(|pe| &mut pe.steps).for_each(|step| step.backward = None);
        let forward = RunReport::merge(config, &pes);
        assert_eq!(forward.backward, None);
        assert!((forward.step_s - 0.6).abs() < 1e-12);
    }

    #[test]
    fn json_round_trips_even_with_a_nan() {
        let (config, pes) = example();
        let mut report = RunReport::merge(config, &pes);
        report.aux_losses.insert("z".into(), 0.125);
        report.check = Some(CheckReport::new(vec![TensorCheck::new("output", 1e-7, 1e-5, None)]));
        let back: RunReport = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(back, report);
        let back: Vec<PeReport> = serde_json::from_str(&serde_json::to_string(&pes).unwrap()).unwrap();
        assert_eq!(back, pes);

        report.check = Some(CheckReport::new(vec![TensorCheck::new("output", f64::NAN, 1e-5, None)]));
        let back: RunReport = serde_json::from_str(&report.to_json()).unwrap();
        let check = back.check.unwrap();
        assert!(!check.passed && !check.tensors[0].passed && check.tensors[0].relative_error.is_nan());
    }

    #[test]
    fn every_key_is_documented() {
        let (config, pes) = example();
        let mut report = RunReport::merge(config, &pes);
        report.check = Some(CheckReport::new(vec![TensorCheck::new("output", 0.0, 1e-5, None)]));
        report.non_finite.push(NonFinite::default());
        let page = include_str!("../../docs/report.md");
        let mut missing = Vec::new();
        let mut visit = vec![serde_json::to_value(&report).unwrap()];
        while let Some(value) = visit.pop() {
            match value {
                serde_json::Value::Object(fields) => {
                    for (key, value) in fields {
                        // Of maps by name the page gives the names of phases and losses in the text.
                        if !page.contains(&format!("`{key}`")) {
                            missing.push(key);
                        }
                        visit.push(value);
                    }
                }
                serde_json::Value::Array(values) => visit.extend(values),
                _ => {}
            }
        }
        assert_eq!(missing, Vec::<String>::new());
    }
}
