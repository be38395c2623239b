//! The search over strategies.

use aristos_formats::InputError;
use serde::Serialize;

use crate::memory::{self, Memory};
use crate::time::{Time, Times};
use crate::training::{Shape, Training};

/// Microbatches of a stage over the number of stages.
const MICROBATCHES: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// What a strategy may be; by default anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Number of pipeline stages.
    pub stages: Option<usize>,
    /// Devices of an expert-parallel group.
    pub ep: Option<usize>,
    /// Whether activations are recomputed.
    pub recompute: Option<bool>,
    /// Whether optimizer state is sharded over replicas.
    pub sharded: Option<bool>,
}

/// A strategy, its memory and its time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Strategy {
    /// The division.
    #[serde(flatten)]
    pub shape: Shape,
    /// Memory of a device.
    pub memory: Memory,
    /// Time of a step.
    pub time: Time,
    /// Tokens of all devices in a second.
    pub tokens_per_s: f64,
}

/// The strategies within `limits` that fit, the fastest first, and the one with the least memory of all. A strategy that another one equals but for
/// recomputation or sharding that it does not need is left out.
///
/// # Errors
/// Returns an error if a device has no `memory_mb`, or a number is out of range.
pub fn search(training: &Training, limits: Limits) -> Result<(Vec<Strategy>, Strategy), InputError> {
    let devices = training.cluster.devices.len();
    let (usable_mb, layers) = (training.usable_mb()?, training.dense.layers.0);
    // A microbatch is of whole sequences, where the tokens of a device are.
    let sequence = if training.tokens_per_device.is_multiple_of(training.sequence) { training.sequence } else { 1 };
    let whole = |more: usize| training.tokens_per_device.is_multiple_of(more * sequence);
    let divisors = |n: usize, most: usize| (1..=n.min(most)).filter(move |d| n.is_multiple_of(*d));
    let of = |limit: Option<bool>| limit.map_or(vec![false, true], |only| vec![only]);
    let (mut fitting, mut least, mut times) = (Vec::new(), None::<Strategy>, Times::default());
    for stages in divisors(devices, layers).filter(|stages| limits.stages.is_none_or(|only| only == *stages)) {
        let width = devices / stages;
        for ep in divisors(width, training.model.experts).filter(|ep| limits.ep.is_none_or(|only| only == *ep)) {
            for more in MICROBATCHES.into_iter().filter(|more| whole(*more)) {
                'kind: for recompute in of(limits.recompute) {
                    for sharded in of(limits.sharded) {
                        let shape = Shape {
                            stages,
                            ep,
                            replicas: width / ep,
                            microbatches: stages * more,
                            microbatch_tokens: training.tokens_per_device / more,
                            recompute,
                            sharded,
                        };
                        let memory = memory::of(training, &shape);
                        let time = Time::default();
                        let mut strategy = Strategy { shape, memory, time, tokens_per_s: 0.0 };
                        if least.as_ref().is_none_or(|least| memory.all_mb() < least.memory.all_mb()) {
                            least = Some(strategy.clone());
                        }
                        if memory.all_mb() > usable_mb {
                            continue;
                        }
                        strategy.time = times.of(training, &strategy.shape)?;
                        strategy.tokens_per_s =
                            (training.tokens_per_device * devices) as f64 / strategy.time.step_ms() * 1e3;
                        fitting.push(strategy);
                        break 'kind;
                    }
                }
            }
        }
    }
    fitting.sort_by(|a, b| a.time.step_ms().total_cmp(&b.time.step_ms()));
    let none = || InputError::value("`stages` and `ep`", "match no strategy", format!("divisors of {devices} devices"));
    Ok((fitting, least.ok_or_else(none)?))
}
