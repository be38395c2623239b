//! The result of a simulation. Keys that a run's report has too have the same names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::plans::{Plans, host_of};
use super::{GRADIENT_BYTES, ModelTime, Simulated};
use crate::moe::{Layout, Mode, header_words};
use crate::report::{PassTimes, Spread, median};
use crate::sim::step::{LayerCost, PeTime, StepTimes};

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimulatedReport {
    /// The configuration.
    pub config: SimulatedConfig,
    /// Time of a step from its start to the end of the last PE, the median over the steps, seconds.
    pub step_s: f64,
    /// Time of each step, seconds.
    pub all_steps_s: Vec<f64>,
    /// Tokens of a step over `step_s`.
    pub tokens_per_s: f64,
    /// The forward pass; its phases are `router`, `start`, `expert_gemm` (products), `epilogue`, `dispatch`, `combine`, `tail` and `waiting`.
    pub forward: PassTimes,
    /// The backward pass; also `sums_wait`, `expert_sums` and `replicated_sums`, of gradients.
    pub backward: Option<PassTimes>,
    /// Bytes between PEs in dispatch and combine, per step: counts, rows and slots.
    pub exchange_bytes_per_step: f64,
    /// Bytes of dispatch and combine between hosts, per step.
    pub network_bytes_per_step: f64,
    /// Tokens of each expert in the first step.
    pub tokens_per_expert: Vec<u64>,
    /// Share of the busiest ports' time in which no PE waited, 0 to 1.
    pub overlap_efficiency: f64,
    /// Delays of PEs relative to the first PE of their group, at the end of the passes, or in bulk mode of the last pass's experts.
    pub stragglers: Stragglers,
    /// Memory of the PE that needs the most.
    pub memory: Memory,
    /// Steps with one change each, the most helpful first.
    pub would_help: Vec<Change>,
    /// Number of simulated events.
    pub events: u64,
    /// A step of all layers, if the whole model is simulated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelTime>,
}

/// The configuration of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimulatedConfig {
    /// Number of PEs.
    pub pes: usize,
    /// Number of expert-parallel groups.
    pub groups: usize,
    /// Tokens of a step over all PEs.
    pub tokens: u64,
    /// Width of a token's hidden state, elements.
    pub hidden: usize,
    /// Width inside an expert, elements.
    pub intermediate: usize,
    /// Routed experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Element type: "f32", "bf16" or "f16".
    pub dtype: String,
    /// "pipelined" or "bulk".
    pub mode: String,
    /// Number of steps.
    pub steps: usize,
    /// Whether a step has a backward pass.
    pub backward: bool,
}

/// Straggler delays of all PEs and steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stragglers {
    /// The median, seconds.
    pub median_s: f64,
    /// The 95th percentile, seconds.
    pub p95_s: f64,
    /// The maximum, seconds.
    pub max_s: f64,
    /// The distribution: seconds at each percent from 0 to 100.
    pub ecdf_s: Vec<f64>,
}

/// Memory, bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Symmetric memory of the layer's protocol.
    pub symmetric_bytes: u64,
    /// Weights of the PE's experts, in the layer's element type.
    pub weights_bytes: u64,
    /// Gradients of these weights, f32.
    pub gradients_bytes: u64,
    /// Rows of the PE's experts: inputs, inner values, outputs, in the layer's element type.
    pub rows_bytes: u64,
}

/// A step with one change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The change.
    pub change: String,
    /// The median step with the change, seconds.
    pub step_s: f64,
    /// The speedup.
    pub speedup: f64,
}

impl SimulatedReport {
    pub(super) fn new(
        simulated: &Simulated,
        layout: &Layout,
        cost: &LayerCost,
        plans: &Plans,
        times: &StepTimes,
        changes: &[(&str, StepTimes)],
    ) -> SimulatedReport {
        let step_s = median(times.step_s.clone());
        let mut would_help: Vec<Change> = changes
            .iter()
            .map(|(change, times)| {
                let changed_s = median(times.step_s.clone());
                Change { change: change.to_string(), step_s: changed_s, speedup: step_s / changed_s }
            })
            .collect();
        would_help.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
        let tokens = simulated.tokens() as u64;
        let (steps, headers) = (times.step_s.len() as f64, header_bytes(simulated));
        SimulatedReport {
            config: SimulatedConfig {
                pes: simulated.pes(),
                groups: simulated.groups.len(),
                tokens,
                hidden: simulated.config.hidden,
                intermediate: simulated.config.expert.intermediate,
                experts: simulated.config.n_experts,
                top_k: simulated.config.router.top_k,
                dtype: simulated.dtype.name().to_string(),
                mode: match simulated.options.mode {
                    Mode::Pipelined => "pipelined".to_string(),
                    Mode::Bulk => "bulk".to_string(),
                },
                steps: times.step_s.len(),
                backward: simulated.backward,
            },
            step_s,
            all_steps_s: times.step_s.clone(),
            tokens_per_s: tokens as f64 / step_s,
            forward: pass_times(times, 0),
            backward: simulated.backward.then(|| pass_times(times, 1)),
            exchange_bytes_per_step: times.sent_bytes / steps + headers[0] as f64,
            network_bytes_per_step: times.network_bytes / steps + headers[1] as f64,
            tokens_per_expert: plans.tokens_per_expert(simulated.config.n_experts),
            overlap_efficiency: times.overlap_efficiency(),
            stragglers: stragglers(&times.straggler_s),
            memory: memory(simulated, layout, cost, plans),
            would_help,
            events: times.events,
            model: None,
        }
    }
}

/// Bytes of the headers in a step, one from each PE to each other PE of its group; and of those between hosts. A header has a count for each expert of
/// its receiver.
fn header_bytes(simulated: &Simulated) -> [usize; 2] {
    let host_of = host_of(simulated);
    let mut bytes = [0; 2];
    for g in 0..simulated.groups.len() {
        let members = simulated.groups.members(g);
        let mut on_host = BTreeMap::new();
        members.iter().for_each(|&pe| *on_host.entry(host_of[pe]).or_insert(0) += 1);
        for (index, pe) in members.iter().enumerate() {
            let of_one = 4 * header_words(&simulated.config, simulated.groups.placement(g).experts(index).len());
            bytes[0] += (members.len() - 1) * of_one;
            bytes[1] += (members.len() - on_host[&host_of[*pe]]) * of_one;
        }
    }
    bytes
}

/// The mean over the steps of each PE, then the median and the maximum over the PEs.
fn pass_times(times: &StepTimes, pass: usize) -> PassTimes {
    let steps = times.step_s.len() as f64;
    let spread = |of: &dyn Fn(&PeTime) -> f64| {
        let each = || times.pes.iter().map(|pe| of(pe) / steps);
        Spread { median_s: median(each().collect()), max_s: each().fold(0.0, f64::max) }
    };
    let mut phases = BTreeMap::from([
        ("router".to_string(), spread(&|pe| pe.router_s[pass])),
        ("expert_gemm".to_string(), spread(&|pe| pe.expert_s[pass])),
        ("dispatch".to_string(), spread(&|pe| pe.dispatch_s[pass])),
        ("combine".to_string(), spread(&|pe| pe.combine_s[pass])),
        ("waiting".to_string(), spread(&|pe| pe.waiting_s[pass])),
        ("start".to_string(), spread(&|pe| pe.start_s[pass])),
        ("epilogue".to_string(), spread(&|pe| pe.epilogue_s[pass])),
        ("tail".to_string(), spread(&|pe| pe.tail_s[pass])),
    ]);
    if pass == 1 {
        phases.insert("sums_wait".to_string(), spread(&|pe| pe.sums_wait_s));
        phases.insert("expert_sums".to_string(), spread(&|pe| pe.expert_sums_s));
        phases.insert("replicated_sums".to_string(), spread(&|pe| pe.replicated_sums_s));
    }
    let sums_s = |pe: &PeTime| pe.sums_wait_s + pe.expert_sums_s + pe.replicated_sums_s;
    let sums_s = |pe: &PeTime| if pass == 1 { sums_s(pe) } else { 0.0 };
    PassTimes { total: spread(&|pe| pe.pass_s[pass] + sums_s(pe)), phases, rounds: 0 }
}

fn stragglers(sorted_s: &[f64]) -> Stragglers {
    let at =
        |share: f64| sorted_s.get((share * (sorted_s.len() as f64 - 1.0)).round() as usize).copied().unwrap_or(0.0);
    Stragglers {
        median_s: at(0.5),
        p95_s: at(0.95),
        max_s: at(1.0),
        ecdf_s: (0..=100).map(|percent| at(f64::from(percent) / 100.0)).collect(),
    }
}

fn memory(simulated: &Simulated, layout: &Layout, cost: &LayerCost, plans: &Plans) -> Memory {
    let element_bytes = simulated.dtype.bytes() as f64;
    let parameters = cost.gradient_bytes.0 / GRADIENT_BYTES;
    let most_experts =
        (0..simulated.groups.len()).map(|g| simulated.groups.placement(g).max_local()).max().unwrap_or(0);
    let rows = |rows: &[u32]| rows.iter().map(|&rows| u64::from(rows)).sum::<u64>();
    let most_rows = plans.plans.iter().flat_map(|plan| plan.expert_rows().map(rows)).max().unwrap_or(0);
    let expert = &simulated.config.expert;
    // Input and output, the result of each inner projection, and their product.
    let inside = expert.intermediate * if expert.gated { 3 } else { 2 };
    let of_row = (2 * simulated.config.hidden + inside) as f64 * element_bytes;
    Memory {
        symmetric_bytes: layout.total_bytes() as u64,
        weights_bytes: (most_experts as f64 * parameters * element_bytes) as u64,
        gradients_bytes: if simulated.backward {
            (most_experts as f64 * parameters * GRADIENT_BYTES) as u64
        } else {
            0
        },
        rows_bytes: (most_rows as f64 * of_row) as u64,
    }
}
