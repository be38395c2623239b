//! What the CPU engine's work takes on a machine, as `aristos calibrate` has fitted it to measured steps.
//!
//! Each phase is a sum of terms: a count that follows from the layer and its routing, times a constant that is the machine's. `docs/simulator.md`
//! lists them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cluster::{parse_json, read_text};
use crate::moe::{LayerConfig, MlpConfig};
use crate::plan::InputError;
use crate::sim::step::{Affine, CopyFlop, Cores};

/// The version of the files.
pub(super) const VERSION: u64 = 1;
/// Cores of a host.
pub const CORES_MOST: usize = 4096;
/// The rate that seconds of calibrated work are told to the simulator in, FLOP/s.
pub(super) const RATE: f64 = 1e12;

/// Seconds of each of a phase's counts, by the name of the term.
pub type Terms = BTreeMap<String, f64>;

/// Counts of a phase, by the name of the term.
pub(super) type Counts = Vec<(&'static str, f64)>;

/// A machine's constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The version of the file.
    pub version: u64,
    /// Element type of the layers measured.
    pub dtype: String,
    /// Cores of a host, which its PEs share.
    pub cores: usize,
    /// What carried rows between PEs.
    #[serde(default = "shm")]
    pub transport: String,
    /// How many times as long the same work takes with all cores busy as with one.
    pub busy_factor: f64,
    /// A forward pass.
    pub forward: PassTerms,
    /// A backward pass.
    pub backward: PassTerms,
    /// Taking in what comes from other PEs, in either pass, where a thread of its own does.
    #[serde(default)]
    pub receive: Terms,
    /// What it was fitted to.
    pub fitted_to: Vec<Fitted>,
    /// By pass and phase: how far the fit is from what it was fitted to.
    pub residuals: BTreeMap<String, Residual>,
}

/// The transport of one host; the one whose puts are over when their targets have them.
pub(super) const SHM: &str = "shm";
pub(super) const MPI: &str = "mpi";
/// Two kinds of links in one run.
pub(super) const HYBRID: &str = "hybrid";

fn shm() -> String {
    SHM.into()
}

/// The constants of a pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassTerms {
    /// Routing, and what a pass begins and ends with.
    pub router: Terms,
    /// Tiles of experts; in backward the gradients of their weights too.
    pub expert: Terms,
    /// Putting and gathering rows.
    pub dispatch: Terms,
    /// Putting and summing results.
    pub combine: Terms,
}

/// A report that constants were fitted to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// Its file.
    pub report: String,
    /// Its PEs.
    pub pes: usize,
    /// Its step, seconds.
    pub step_s: f64,
}

/// Errors of a fit, shares of what was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// The median of their magnitudes.
    pub median: f64,
    /// The largest magnitude.
    pub worst: f64,
}

/// What of a layer decides what its work takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub hidden: f64,
    /// What the router chooses among, and how many it takes.
    pub choices: f64,
    pub top_k: f64,
    /// Elements of an expert's matrices, and of what its products give for a row.
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

    /// With experts like this one.
    fn with(self, mlp: &MlpConfig) -> Shape {
        let inner = mlp.intermediate as f64 * if mlp.gated { 2.0 } else { 1.0 };
        Shape { weights: mlp.forward_flop_per_row(self.hidden as usize) / 2.0, outputs: inner + self.hidden, ..self }
    }

    /// The router's, of so many tokens in so many passes of a PE.
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

    /// An expert's, of so many slots in so many tiles.
    pub(super) fn tiles(&self, slots: f64, tiles: f64) -> Counts {
        vec![
            ("s_per_flop", 2.0 * self.weights * slots),
            ("s_per_output", self.outputs * slots),
            ("s_per_weight_byte", self.weights * self.element_bytes * tiles),
            ("s_per_tile", tiles),
        ]
    }

    /// The gradients of the weights of so many experts, of so many slots together.
    pub(super) fn gradients(&self, slots: f64, experts: f64) -> Counts {
        vec![("s_per_flop", 2.0 * self.weights * slots), ("s_per_gradient", self.weights * experts)]
    }

    /// Rows put to other PEs, and slots gathered.
    pub(super) fn dispatch(&self, slots: f64, put_rows: f64, messages: f64) -> Counts {
        vec![
            ("s_per_gathered_element", slots * self.hidden),
            ("s_per_slot", slots),
            ("s_per_put_element", put_rows * self.hidden),
            ("s_per_message", messages),
        ]
    }

    /// Rows that came from other PEs.
    pub(super) fn receive(&self, rows: f64, messages: f64) -> Counts {
        vec![("s_per_element", rows * self.hidden), ("s_per_message", messages)]
    }

    /// Results of slots summed, of rows added, and of rows put to other PEs before.
    pub(super) fn combine(&self, slots: f64, rows: f64, put_rows: f64, messages: f64) -> Counts {
        vec![
            ("s_per_summed_element", slots * self.hidden),
            ("s_per_added_element", rows * self.hidden),
            ("s_per_put_element", put_rows * self.hidden),
            ("s_per_message", messages),
        ]
    }
}

/// Terms that only rows between PEs have.
pub(super) const REMOTE: [&str; 2] = ["s_per_put_element", "s_per_message"];

/// The sum of a phase, s.
pub(super) fn sum(terms: &Terms, counts: &Counts) -> f64 {
    counts.iter().map(|(name, count)| terms.get(*name).copied().unwrap_or(0.0) * count).sum()
}

/// What calibrated work costs in a layer, FLOP at [`RATE`].
pub(super) struct CalibratedCost {
    pub tile_flop: [Affine; 2],
    pub gradient_flop: Affine,
    pub router_flop: [Affine; 2],
    pub shared_flop: [Affine; 2],
    pub copy_flop: [CopyFlop; 2],
}

impl Calibration {
    /// Reads a calibration.
    ///
    /// # Errors
    /// One line that names the file, the field, what is there and what is right.
    pub fn read(path: &Path) -> Result<Calibration, InputError> {
        Calibration::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// A calibration from its JSON text.
    ///
    /// # Errors
    /// As [`Calibration::read`], without the file.
    pub fn from_json(text: &str) -> Result<Calibration, InputError> {
        let calibration: Calibration = parse_json(text)?;
        calibration.check()?;
        Ok(calibration)
    }

    fn check(&self) -> Result<(), InputError> {
        let wrong = |field: String, found: String, expected: &str| Err(InputError::value(field, found, expected));
        if self.version != VERSION {
            return wrong("version".into(), format!("is {}", self.version), &VERSION.to_string());
        }
        if !(1..=CORES_MOST).contains(&self.cores) {
            return wrong("cores".into(), format!("is {}", self.cores), &format!("1 to {CORES_MOST}"));
        }
        if !(1.0..=100.0).contains(&self.busy_factor) {
            return wrong("busy_factor".into(), format!("is {}", self.busy_factor), "a number from 1 to 100");
        }
        let in_seconds = |of: &str, terms: &Terms| {
            let is_wrong = |value: f64| !(value.is_finite() && (0.0..1e9).contains(&value));
            let Some((name, value)) = terms.iter().find(|(_, value)| is_wrong(**value)) else { return Ok(()) };
            wrong(format!("{of}.{name}"), format!("is {value}"), "a number of seconds, 0 or more")
        };
        in_seconds("receive", &self.receive)?;
        for (pass, terms) in [("forward", &self.forward), ("backward", &self.backward)] {
            for (phase, terms) in terms.phases() {
                in_seconds(&format!("{pass}.{phase}"), terms)?;
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

    /// Whether a put takes its PE's time until its target has it.
    pub(super) fn puts_block(&self) -> bool {
        self.transport == MPI
    }

    /// What a layer's work costs, with tiles of about so many rows.
    pub(super) fn cost(&self, config: &LayerConfig, element_bytes: usize, tile_rows: usize) -> CalibratedCost {
        let shape = Shape::new(config, element_bytes);
        let passes = [&self.forward, &self.backward];
        let affine = |terms: &Terms, base: Counts, each: Counts| Affine {
            base: RATE * sum(terms, &base),
            each: RATE * sum(terms, &each),
        };
        let tile = |shape: &Shape, terms: &Terms| affine(terms, shape.tiles(0.0, 1.0), shape.tiles(1.0, 0.0));
        let gradient =
            |shape: &Shape, terms: &Terms| affine(terms, shape.gradients(0.0, 1.0), shape.gradients(1.0, 0.0));
        let shared = |backward: bool| {
            let Some(shared) = config.shared else { return Affine::default() };
            let (shape, terms) = (shape.with(&shared.mlp), &passes[usize::from(backward)].expert);
            let (tile, gradient) = (tile(&shape, terms), gradient(&shape, terms));
            // The first tile's base, and of the others a share for each token.
            let each = tile.each + tile.base / tile_rows as f64;
            let backward_too = if backward { (gradient.base, gradient.each) } else { (0.0, 0.0) };
            Affine { base: tile.base + backward_too.0, each: each + backward_too.1 }
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
        CalibratedCost {
            tile_flop: passes.map(|pass| tile(&shape, &pass.expert)),
            gradient_flop: gradient(&shape, &self.backward.expert),
            router_flop: [router(false), router(true)],
            shared_flop: [shared(false), shared(true)],
            copy_flop: passes.map(copies),
        }
    }
}

impl PassTerms {
    fn phases(&self) -> [(&'static str, &Terms); 4] {
        [("router", &self.router), ("expert", &self.expert), ("dispatch", &self.dispatch), ("combine", &self.combine)]
    }
}
