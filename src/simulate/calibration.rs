//! Constants of the CPU engine on a machine, fitted by `aristos calibrate` to measured steps.
//!
//! The time of a phase is a sum of terms: counts, which follow from the layer and its routing, times the machine's constants. `docs/simulator.md` lists
//! the terms.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::moe::{LayerConfig, MlpConfig};
use crate::plan::InputError;
use crate::sim::step::{Affine, CopyFlop, Cores, LayerCost};

/// The version of the files.
pub(super) const VERSION: u64 = 1;
/// Maximum cores of a host.
pub const MAX_CORES: usize = 4096;
/// The rate that converts seconds of calibrated work to the simulator's FLOP, FLOP/s.
pub(super) const RATE: f64 = 1e12;

/// Constants of a phase, seconds per count, by the name of the term.
pub type Terms = BTreeMap<String, f64>;

/// Counts of a phase, by the name of the term.
pub(super) type Counts = Vec<(&'static str, f64)>;

/// A machine's constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The version of the file.
    pub version: u64,
    /// Element type of the measured layers.
    pub dtype: String,
    /// Cores of a host, shared by its PEs.
    pub cores: usize,
    /// Transport of rows between PEs.
    #[serde(default = "shm")]
    pub transport: String,
    /// Slowdown of work with all cores busy, relative to one.
    pub busy_factor: f64,
    /// Constants of a forward pass.
    pub forward: PassTerms,
    /// Constants of a backward pass.
    pub backward: PassTerms,
    /// Receiving rows from other PEs in either pass, if a separate thread does it.
    #[serde(default)]
    pub receive: Terms,
    /// The reports of the fit.
    pub fitted_to: Vec<Fitted>,
    /// Errors of the fit by pass and phase.
    pub residuals: BTreeMap<String, Residual>,
}

/// The transport within a host.
pub(super) const SHM: &str = "shm";
/// A transport with two kinds of links.
pub(super) const HYBRID: &str = "hybrid";

fn shm() -> String {
    SHM.into()
}

/// The constants of a pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassTerms {
    /// Routing, and the start and the end of a pass.
    pub router: Terms,
    /// Tiles of experts, in the backward pass with the gradients of the weights.
    pub expert: Terms,
    /// Putting and gathering rows.
    pub dispatch: Terms,
    /// Putting and summing results.
    pub combine: Terms,
}

/// A report of the fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// The file.
    pub report: String,
    /// Number of PEs.
    pub pes: usize,
    /// Time of a step, seconds.
    pub step_s: f64,
}

/// Relative errors of a fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// The median magnitude.
    pub median: f64,
    /// The largest magnitude.
    pub worst: f64,
}

/// The properties of a layer that determine its counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub hidden: f64,
    /// The router's number of experts, and experts per token.
    pub choices: f64,
    pub top_k: f64,
    /// Elements of an expert's matrices, and of the outputs of its products per row.
    pub weights: f64,
    pub outputs: f64,
    pub element_bytes: f64,
}

impl Shape {
    pub(super) fn new(config: &LayerConfig, element_bytes: usize) -> Shape {
        Shape {
            hidden: config.hidden as f64,
            choices: config.choices() as f64,
            top_k: config.router.top_k as f64,
            element_bytes: element_bytes as f64,
            weights: 0.0,
            outputs: 0.0,
        }
        .with(&config.expert)
    }

    /// The properties of a layer with experts of this shape.
    fn with(self, mlp: &MlpConfig) -> Shape {
        let inner = mlp.intermediate as f64 * if mlp.gated { 2.0 } else { 1.0 };
        Shape { weights: mlp.forward_flop_per_row(self.hidden as usize) / 2.0, outputs: inner + self.hidden, ..self }
    }

    /// Counts of the router for `tokens` tokens in `passes` passes.
    pub(super) fn router(&self, backward: bool, tokens: f64, passes: f64) -> Counts {
        let scores = tokens * self.choices;
        let products = if backward { 4.0 } else { 2.0 };
        let mut counts = vec![
            ("s_per_flop", products * scores * self.hidden),
            ("s_per_score", scores),
            ("s_per_element", tokens * self.hidden),
            ("s_per_pass", passes),
        ];
        match backward {
            true => counts.push(("s_per_gradient", passes * self.hidden * self.choices)),
            false => counts.push(("s_per_look", scores * self.top_k)),
        }
        counts
    }

    /// Counts of an expert for `slots` slots in `tiles` tiles.
    pub(super) fn tiles(&self, slots: f64, tiles: f64) -> Counts {
        vec![
            ("s_per_flop", 2.0 * self.weights * slots),
            ("s_per_output", self.outputs * slots),
            ("s_per_weight_byte", self.weights * self.element_bytes * tiles),
            ("s_per_tile", tiles),
        ]
    }

    /// Counts of the weight gradients of `experts` experts with `slots` slots together.
    pub(super) fn gradients(&self, slots: f64, experts: f64) -> Counts {
        vec![("s_per_flop", 2.0 * self.weights * slots), ("s_per_gradient", self.weights * experts)]
    }

    /// Counts of dispatch: rows put to other PEs, and gathered slots.
    pub(super) fn dispatch(&self, slots: f64, put_rows: f64, messages: f64) -> Counts {
        vec![
            ("s_per_gathered_element", slots * self.hidden),
            ("s_per_slot", slots),
            ("s_per_put_element", put_rows * self.hidden),
            ("s_per_message", messages),
        ]
    }

    /// Counts of rows received from other PEs.
    pub(super) fn receive(&self, rows: f64, messages: f64) -> Counts {
        vec![("s_per_element", rows * self.hidden), ("s_per_message", messages)]
    }

    /// Counts of combine: summed slots, added rows, and rows put to other PEs.
    pub(super) fn combine(&self, slots: f64, rows: f64, put_rows: f64, messages: f64) -> Counts {
        vec![
            ("s_per_summed_element", slots * self.hidden),
            ("s_per_added_element", rows * self.hidden),
            ("s_per_put_element", put_rows * self.hidden),
            ("s_per_message", messages),
        ]
    }
}

/// Checks the constants of a phase `of`.
pub(super) fn check_terms(of: &str, terms: &Terms) -> Result<(), InputError> {
    let Some((name, value)) = terms.iter().find(|(_, value)| !(0.0..1e9).contains(*value)) else { return Ok(()) };
    Err(InputError::value(format!("{of}.{name}"), format!("is {value}"), "a number of seconds, 0 or more"))
}

/// Terms of rows between PEs.
pub(super) const REMOTE: [&str; 2] = ["s_per_put_element", "s_per_message"];

/// Time of a phase, seconds.
pub(super) fn sum(terms: &Terms, counts: &Counts) -> f64 {
    counts.iter().map(|(name, count)| terms.get(*name).copied().unwrap_or(0.0) * count).sum()
}

impl Calibration {
    pub(super) fn check(&self) -> Result<(), InputError> {
        let wrong = |field: String, found: String, expected: &str| Err(InputError::value(field, found, expected));
        if self.version != VERSION {
            return wrong("version".into(), format!("is {}", self.version), &VERSION.to_string());
        }
        if !(1..=MAX_CORES).contains(&self.cores) {
            return wrong("cores".into(), format!("is {}", self.cores), &format!("1 to {MAX_CORES}"));
        }
        if !(1.0..=100.0).contains(&self.busy_factor) {
            return wrong("busy_factor".into(), format!("is {}", self.busy_factor), "a number from 1 to 100");
        }
        check_terms("receive", &self.receive)?;
        for (pass, terms) in [("forward", &self.forward), ("backward", &self.backward)] {
            for (phase, terms) in terms.phases() {
                check_terms(&format!("{pass}.{phase}"), terms)?;
            }
            if terms.expert.values().all(|value| *value == 0.0) {
                return wrong(format!("{pass}.expert"), "is 0 in all terms".into(), "one above 0");
            }
        }
        Ok(())
    }

    /// The cores of a host.
    pub(super) fn cores(&self) -> Cores {
        Cores { count: self.cores, busy_factor: self.busy_factor }
    }

    pub(super) fn cost(
        &self,
        config: &LayerConfig,
        element_bytes: usize,
        tile_rows: usize,
        rated: LayerCost,
    ) -> LayerCost {
        let shape = Shape::new(config, element_bytes);
        let passes = [&self.forward, &self.backward];
        let affine = |terms: &Terms, base: Counts, each: Counts| Affine {
            base: RATE * sum(terms, &base),
            each: RATE * sum(terms, &each),
            multiple: 0.0,
        };
        let tile = |shape: &Shape, terms: &Terms| affine(terms, shape.tiles(0.0, 1.0), shape.tiles(1.0, 0.0));
        let gradient =
            |shape: &Shape, terms: &Terms| affine(terms, shape.gradients(0.0, 1.0), shape.gradients(1.0, 0.0));
        let shared = |backward: bool| {
            let Some(shared) = config.shared else { return Affine::default() };
            let (shape, terms) = (shape.with(&shared.mlp), &passes[usize::from(backward)].expert);
            let (tile, gradient) = (tile(&shape, terms), gradient(&shape, terms));
            // The base of the first tile, and for the others a share per token.
            let each = tile.each + tile.base / tile_rows as f64;
            let backward_too = if backward { (gradient.base, gradient.each) } else { (0.0, 0.0) };
            Affine { base: tile.base + backward_too.0, each: each + backward_too.1, multiple: 0.0 }
        };
        let copies = |terms: &PassTerms| {
            let dispatch = |counts| RATE * sum(&terms.dispatch, &counts);
            let combine = |counts| RATE * sum(&terms.combine, &counts);
            let receive = |counts| RATE * sum(&self.receive, &counts);
            CopyFlop {
                message: [dispatch(shape.dispatch(0.0, 0.0, 1.0)), combine(shape.combine(0.0, 0.0, 0.0, 1.0))],
                put_row: [dispatch(shape.dispatch(0.0, 1.0, 0.0)), combine(shape.combine(0.0, 0.0, 1.0, 0.0))],
                gather_slot: dispatch(shape.dispatch(1.0, 0.0, 0.0)),
                sum_slot: combine(shape.combine(1.0, 0.0, 0.0, 0.0)),
                add_row: combine(shape.combine(0.0, 1.0, 0.0, 0.0)),
                take_message: receive(shape.receive(0.0, 1.0)),
                take_row: receive(shape.receive(1.0, 0.0)),
            }
        };
        let router = |backward: bool| {
            let terms = &passes[usize::from(backward)].router;
            affine(terms, shape.router(backward, 0.0, 1.0), shape.router(backward, 1.0, 0.0))
        };
        LayerCost {
            tile_flop: passes.map(|pass| tile(&shape, &pass.expert)),
            gradient_flop: [gradient(&shape, &self.backward.expert), Affine::default()],
            router_flop: [router(false), router(true)],
            shared_flop: [shared(false), shared(true)],
            copy_flop: passes.map(copies),
            ..rated
        }
    }
}

impl PassTerms {
    fn phases(&self) -> [(&'static str, &Terms); 4] {
        [("router", &self.router), ("expert", &self.expert), ("dispatch", &self.dispatch), ("combine", &self.combine)]
    }
}
