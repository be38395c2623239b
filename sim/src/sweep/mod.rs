//! Throughput of an MLP with data, horizontal (tensor), pipeline and expert parallelism.
//!
//! The MLP has linear layers with a ReLU after each, and a loss. A step is forward, backward and optimizer. A strategy combines data,
//! horizontal (layers split by columns and by rows alternately) and pipeline parallelism (1F1B with microbatches). Each strategy is
//! simulated op by op. With experts, each pair of layers is an expert layer. Expert-parallel groups, which have devices of several
//! replicas, share its experts.
//!
//! [`Cost::Compat`] gives the published numbers, [`Cost::Default`] corrects the faults of the published program, which `docs/simulator.md`
//! lists.

mod cost;
mod grid;
mod pipeline;
mod strategy;

use aristos_formats::InputError;
use serde::Serialize;

pub use cost::Cost;
pub use grid::{Degrees, Isolate, grid};

/// An MLP and its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Model {
    /// Linear layers.
    pub layers: usize,
    /// Width of every layer, elements.
    pub width: usize,
    /// Samples of a batch.
    pub batch: usize,
    /// Experts of each pair of layers, if any.
    pub experts: Option<Experts>,
}

/// The experts of a pair of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Number of experts.
    pub count: usize,
    /// Experts per sample; all experts get the same number of samples.
    pub top_k: usize,
}

/// Maximum of a size; the product of two sizes is still exact in `f64`.
const SIZE_MOST: usize = 1 << 24;
const LAYERS_MOST: usize = 1 << 16;
/// Maximum of microbatches times layers.
const WORK_MOST: usize = 1 << 23;

impl Model {
    /// An MLP without experts.
    ///
    /// # Errors
    /// Returns an error that names the field.
    pub fn new(layers: usize, width: usize, batch: usize) -> Result<Model, InputError> {
        for (field, value, most) in
            [("`layers`", layers, LAYERS_MOST), ("`width`", width, SIZE_MOST), ("`batch`", batch, SIZE_MOST)]
        {
            if !(1..=most).contains(&value) {
                return Err(InputError::value(field, format!("is {value}"), format!("1 to {most}")));
            }
        }
        Ok(Model { layers, width, batch, experts: None })
    }

    /// Adds experts.
    ///
    /// # Errors
    /// Returns an error that names the field.
    pub fn with_experts(self, count: usize, top_k: usize) -> Result<Model, InputError> {
        if !(1..=SIZE_MOST).contains(&count) {
            return Err(InputError::value("`experts`", format!("is {count}"), format!("1 to {SIZE_MOST}")));
        }
        if !(1..=count).contains(&top_k) {
            return Err(InputError::value("`top_k`", format!("is {top_k}"), format!("1 to {count}, the experts")));
        }
        if !self.layers.is_multiple_of(2) {
            let found = format!("is {}", self.layers);
            return Err(InputError::value("`layers`", found, "an even number: experts are pairs of layers"));
        }
        Ok(Model { experts: Some(Experts { count, top_k }), ..self })
    }

    fn check(&self, strategy: Strategy, cost: Cost) -> Result<(), InputError> {
        let Strategy { dp, hp, pp, ep, microbatches } = strategy;
        let wrong = |field: &str, value: usize, expected: String| {
            Err(InputError::value(format!("`{field}`"), format!("is {value}"), expected))
        };
        if self.experts.is_some() && cost == Cost::Compat {
            let found = format!("is {}", self.experts.map_or(0, |experts| experts.count));
            return Err(InputError::value(
                "`experts`",
                found,
                "none with the published cost model, which has no experts",
            ));
        }
        for (field, value) in [("dp", dp), ("hp", hp), ("pp", pp), ("ep", ep), ("microbatches", microbatches)] {
            if !(1..=SIZE_MOST).contains(&value) {
                return wrong(field, value, format!("1 to {SIZE_MOST}"));
            }
        }
        if !self.batch.is_multiple_of(dp) {
            return wrong("dp", dp, format!("a divisor of the batch of {}", self.batch));
        }
        if !(self.batch / dp).is_multiple_of(microbatches) {
            let expected = format!("a divisor of a replica's batch of {}", self.batch / dp);
            return wrong("microbatches", microbatches, expected);
        }
        if microbatches.saturating_mul(self.layers) > WORK_MOST {
            return wrong("microbatches", microbatches, format!("at most {}", WORK_MOST / self.layers));
        }
        if microbatches > 1 && pp == 1 {
            return wrong("microbatches", microbatches, "1 without a pipeline".to_string());
        }
        if !self.width.is_multiple_of(hp) {
            return wrong("hp", hp, format!("a divisor of the width of {}", self.width));
        }
        if hp > 1 && !self.layers.is_multiple_of(2) {
            return wrong(
                "hp",
                hp,
                format!("1 with {} layers: splits by columns and by rows come in pairs", self.layers),
            );
        }
        if !self.layers.is_multiple_of(pp) {
            return wrong("pp", pp, format!("a divisor of the {} layers", self.layers));
        }
        let Some(experts) = self.experts else {
            return if ep == 1 { Ok(()) } else { wrong("ep", ep, "1 without experts".to_string()) };
        };
        if !(self.layers / pp).is_multiple_of(2) {
            return wrong("pp", pp, "stages of an even number of layers: experts are pairs of layers".to_string());
        }
        if !dp.is_multiple_of(ep) {
            return wrong(
                "ep",
                ep,
                format!("a divisor of the {dp} data-parallel replicas, whose devices share experts"),
            );
        }
        if !experts.count.is_multiple_of(ep) {
            return wrong("ep", ep, format!("a divisor of the {} experts", experts.count));
        }
        Ok(())
    }
}

/// The split of a model over `dp * hp * pp` devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Strategy {
    /// Data-parallel replicas.
    pub dp: usize,
    /// Shards of each layer.
    pub hp: usize,
    /// Stages of the pipeline.
    pub pp: usize,
    /// Replicas whose devices share the experts.
    pub ep: usize,
    /// Microbatches of a replica's batch.
    pub microbatches: usize,
}

impl Strategy {
    const SEQUENTIAL: Strategy = Strategy::new(1, 1, 1, 1);

    /// A strategy without expert parallelism.
    pub const fn new(dp: usize, hp: usize, pp: usize, microbatches: usize) -> Strategy {
        Strategy { dp, hp, pp, ep: 1, microbatches }
    }

    /// Sets the number of replicas whose devices share the experts.
    pub fn ep(self, ep: usize) -> Strategy {
        Strategy { ep, ..self }
    }

    /// Number of devices.
    pub fn devices(self) -> usize {
        self.dp * self.hp * self.pp
    }
}

/// The simulated performance of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// Samples per second.
    pub throughput: f64,
    /// Time of a batch, s.
    pub latency_s: f64,
    /// Peak memory of a device, bytes.
    pub peak_memory_bytes: f64,
    /// Fraction of the devices' busy time that is communication.
    pub communication_fraction: f64,
    /// Number of simulated operations, each counted once per device that it occupies.
    #[serde(skip)]
    pub ops: u64,
}
