//! Constants of a device, fitted by `aristos calibrate --from` to logs of `aristos bench moe`.
//!
//! The time of a phase is a sum of counts, which follow from the layer, its routing and the device's tiles, times the device's constants.

use serde::{Deserialize, Serialize};

use super::calibration::{Counts, RATE, Terms, VERSION, check_terms, sum};
use crate::moe::{LayerConfig, MlpConfig};
use crate::plan::InputError;
use crate::sim::step::{Affine, CopyFlop, LayerCost};

/// Steps of the sum in a stage of the main loop, and rows that a block computes (`kernels/gemm_hopper.h`).
const STAGE: usize = 64;
const BLOCK_ROWS: usize = 128;
/// Maximum of a tile's sizes and of a device's multiprocessors.
const MAX_SIZE: usize = 4096;

/// A device's constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCalibration {
    /// The version of the file.
    pub version: u64,
    /// The device's name.
    pub device: String,
    /// Multiprocessors, each with one block.
    pub multiprocessors: usize,
    /// Element type of the measured layers.
    pub dtype: String,
    /// Rows and columns of a tile.
    pub tile: [usize; 2],
    /// Constants of a forward pass.
    pub forward: DeviceTerms,
    /// Constants of a backward pass.
    pub backward: DeviceTerms,
    /// The passes of the logs, measured and simulated with these constants.
    pub passes: Vec<LoggedPass>,
}

/// The constants of a pass, seconds per count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceTerms {
    /// The router and the plan of a pass.
    pub router: Terms,
    /// Products of tiles, on one multiprocessor.
    pub products: Terms,
    /// Epilogues of tiles, on one multiprocessor.
    pub epilogue: Terms,
    /// Positions of the PE's own slots.
    pub dispatch: Terms,
    /// Sums of results.
    pub combine: Terms,
    /// Idle time before the first tiles.
    pub start: Terms,
    /// Idle time after the last tiles.
    pub tail: Terms,
}

impl DeviceTerms {
    fn phases(&self) -> [(&'static str, &Terms); 7] {
        let DeviceTerms { router, products, epilogue, dispatch, combine, start, tail } = self;
        [
            ("router", router),
            ("products", products),
            ("epilogue", epilogue),
            ("dispatch", dispatch),
            ("combine", combine),
            ("start", start),
            ("tail", tail),
        ]
    }
}

/// Work of an expert's products on one multiprocessor: the mean over the multiprocessors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Tiles {
    /// Stages of the main loops.
    pub stages: f64,
    /// Tiles.
    pub tiles: f64,
}

/// The tiles of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    pub tile: [usize; 2],
    pub multiprocessors: usize,
}

impl Tiling {
    /// Blocks that share a tile, each with [`BLOCK_ROWS`] of its rows, per multiprocessor.
    fn blocks(&self) -> f64 {
        self.tile[0].div_ceil(BLOCK_ROWS) as f64 / self.multiprocessors as f64
    }

    /// Both products of one row of tiles, in a forward or a backward pass.
    pub(super) fn row(&self, mlp: &MlpConfig, hidden: usize, backward: bool) -> Tiles {
        let (inner, columns) = (mlp.intermediate, self.tile[1]);
        let halves = if mlp.gated { 2 } else { 1 };
        // Gate and up share a forward tile's columns, and are summed together backward.
        let first = inner.div_ceil(if backward { columns } else { columns / halves });
        let second = hidden.div_ceil(columns);
        let second_sum = (if backward { halves * inner } else { inner }).div_ceil(STAGE);
        let stages = first * hidden.div_ceil(STAGE) + second * second_sum;
        Tiles { stages: self.blocks() * stages as f64, tiles: self.blocks() * (first + second) as f64 }
    }

    /// The gradients of one expert's weights; stages for one stage of rows.
    pub(super) fn gradients(&self, mlp: &MlpConfig, hidden: usize) -> Tiles {
        let [rows, columns] = self.tile;
        let halves = if mlp.gated { 2 } else { 1 };
        let up = halves * mlp.intermediate.div_ceil(rows) * hidden.div_ceil(columns);
        let down = hidden.div_ceil(rows) * mlp.intermediate.div_ceil(columns);
        let tiles = self.blocks() * (up + down) as f64;
        Tiles { stages: tiles, tiles }
    }

    /// Counts of the products and of the epilogues of experts with these rows in a pass.
    pub(super) fn expert(
        &self,
        config: &LayerConfig,
        element_bytes: usize,
        rows: &[usize],
        backward: bool,
    ) -> [Counts; 2] {
        let (mlp, hidden) = (&config.expert, config.hidden);
        let rows_of_tiles = rows.iter().map(|rows| rows.div_ceil(self.tile[0])).sum::<usize>() as f64;
        let experts = rows.iter().filter(|rows| **rows > 0).count() as f64;
        let row = self.row(mlp, hidden, backward);
        let (mut stages, mut tiles) = (row.stages * rows_of_tiles, row.tiles * rows_of_tiles);
        let second = if backward {
            let gradients = self.gradients(mlp, hidden);
            stages += gradients.stages * rows.iter().map(|rows| rows.div_ceil(STAGE)).sum::<usize>() as f64;
            tiles += gradients.tiles * experts;
            ("s_per_gradient_tile", gradients.tiles * experts)
        } else {
            ("s_per_weight_byte", experts * weight_bytes(mlp, hidden, element_bytes))
        };
        [vec![("s_per_stage", stages), second], vec![("s_per_tile", tiles)]]
    }
}

/// Bytes of an expert's weights.
fn weight_bytes(mlp: &MlpConfig, hidden: usize, element_bytes: usize) -> f64 {
    mlp.forward_flop_per_row(hidden) / 2.0 * element_bytes as f64
}

/// Counts of the router and the plan for `tokens` tokens.
pub(super) fn router(hidden: usize, passes: f64, tokens: f64) -> Counts {
    vec![("s_per_pass", passes), ("s_per_element", tokens * hidden as f64)]
}

/// Counts of dispatch for own slots.
pub(super) fn dispatch(slots: f64) -> Counts {
    vec![("s_per_slot", slots)]
}

/// Counts of combine for slots.
pub(super) fn combine(hidden: usize, slots: f64) -> Counts {
    vec![("s_per_element", slots * hidden as f64)]
}

/// Counts of idle time at the start or the end of a pass, on a PE with this number of experts.
pub(super) fn idle(passes: f64, experts: f64) -> Counts {
    vec![("s_per_pass", passes), ("s_per_expert", experts)]
}

/// A pass of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoggedPass {
    /// The log.
    pub log: String,
    /// "forward" or "backward".
    pub pass: String,
    /// Whether the constants were fitted to the log.
    pub fitted: bool,
    /// Measured, seconds.
    pub measured_s: f64,
    /// Simulated, seconds.
    pub simulated_s: f64,
}

impl DeviceCalibration {
    pub(super) fn check(&self) -> Result<(), InputError> {
        let wrong = |field: &str, found: String, expected: String| Err(InputError::value(field, found, expected));
        if self.version != VERSION {
            return wrong("version", format!("is {}", self.version), VERSION.to_string());
        }
        self.check_sizes()?;
        for (pass, terms) in [("forward", &self.forward), ("backward", &self.backward)] {
            for (phase, terms) in terms.phases() {
                check_terms(&format!("{pass}.{phase}"), terms)?;
            }
            if terms.products.get("s_per_stage").is_none_or(|s| *s == 0.0) {
                return wrong(&format!("{pass}.products.s_per_stage"), "is 0".into(), "a time above 0".into());
            }
        }
        Ok(())
    }

    pub(super) fn check_sizes(&self) -> Result<(), InputError> {
        let sizes = [("multiprocessors", self.multiprocessors), ("tile[0]", self.tile[0]), ("tile[1]", self.tile[1])];
        for (field, size) in sizes {
            let least = if field == "multiprocessors" { 1 } else { STAGE };
            if !(least..=MAX_SIZE).contains(&size) {
                return Err(InputError::value(field, format!("is {size}"), format!("{least} to {MAX_SIZE}")));
            }
        }
        Ok(())
    }

    fn tiling(&self) -> Tiling {
        Tiling { tile: self.tile, multiprocessors: self.multiprocessors }
    }

    fn terms(&self, backward: bool) -> &DeviceTerms {
        if backward { &self.backward } else { &self.forward }
    }

    /// The cost of a layer, FLOP at [`RATE`]. A shared expert's tiles are counted by the token. Only a device's own rows were measured, so
    /// rows from and to other PEs cost the time of their link, and their sums that of own ones.
    pub(super) fn cost(&self, config: &LayerConfig, element_bytes: usize, rated: LayerCost) -> LayerCost {
        let (tiling, hidden) = (self.tiling(), config.hidden);
        let flop = |terms: &Terms, counts: Counts| RATE * sum(terms, &counts);
        let by_pass = |of: &dyn Fn(&DeviceTerms, bool) -> Affine| [false, true].map(|b| of(self.terms(b), b));
        let per_row = |term: f64, of_row: f64| Affine {
            each: RATE * term * of_row / self.tile[0] as f64,
            multiple: self.tile[0] as f64,
            base: 0.0,
        };
        let term = |terms: &Terms, name: &str| terms.get(name).copied().unwrap_or(0.0);
        let products = |mlp: &MlpConfig, terms: &DeviceTerms, backward: bool| {
            per_row(term(&terms.products, "s_per_stage"), tiling.row(mlp, hidden, backward).stages)
        };
        let epilogue = |mlp: &MlpConfig, terms: &DeviceTerms, backward: bool| {
            per_row(term(&terms.epilogue, "s_per_tile"), tiling.row(mlp, hidden, backward).tiles)
        };
        let weights = |mlp: &MlpConfig, terms: &DeviceTerms| {
            RATE * term(&terms.products, "s_per_weight_byte") * weight_bytes(mlp, hidden, element_bytes)
        };
        let gradients = |mlp: &MlpConfig| {
            let (of, terms) = (tiling.gradients(mlp, hidden), &self.backward);
            let multiple = STAGE as f64;
            let each = RATE * term(&terms.products, "s_per_stage") * of.stages / multiple;
            let tiles = |terms: &Terms, name: &str| RATE * term(terms, name) * of.tiles;
            let base = tiles(&terms.products, "s_per_gradient_tile");
            let epilogue = Affine { base: tiles(&terms.epilogue, "s_per_tile"), ..Affine::default() };
            [Affine { base, each, multiple }, epilogue]
        };
        let shared = |terms: &DeviceTerms, backward: bool| {
            let Some(shared) = &config.shared else { return Affine::default() };
            let mlp = &shared.mlp;
            let (mut of, after) = (products(mlp, terms, backward), epilogue(mlp, terms, backward));
            (of.base, of.each) = (weights(mlp, terms), of.each + after.each);
            if backward {
                let [gradients, after] = gradients(mlp);
                (of.base, of.each) = (of.base + gradients.base + after.base, of.each + gradients.each);
            }
            of
        };
        let copies = |terms: &DeviceTerms| CopyFlop {
            gather_slot: flop(&terms.dispatch, dispatch(1.0)),
            sum_slot: flop(&terms.combine, combine(hidden, 1.0)),
            ..CopyFlop::default()
        };
        let affine = |terms: &Terms, base: Counts, each: Counts| Affine {
            base: flop(terms, base),
            each: flop(terms, each),
            multiple: 0.0,
        };
        let idle = |terms: &Terms| affine(terms, idle(1.0, 0.0), idle(0.0, 1.0));
        LayerCost {
            tile_flop: by_pass(&|terms, backward| products(&config.expert, terms, backward)),
            epilogue_flop: by_pass(&|terms, backward| epilogue(&config.expert, terms, backward)),
            weights_flop: [false, true].map(|backward| weights(&config.expert, self.terms(backward))),
            gradient_flop: gradients(&config.expert),
            router_flop: by_pass(&|terms, _| affine(&terms.router, router(hidden, 1.0, 0.0), router(hidden, 0.0, 1.0))),
            shared_flop: by_pass(&shared),
            copy_flop: [false, true].map(|backward| copies(self.terms(backward))),
            start_flop: by_pass(&|terms, _| idle(&terms.start)),
            tail_flop: by_pass(&|terms, _| idle(&terms.tail)),
            ..rated
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::{Activation, RouterConfig};

    #[test]
    fn tiles_are_counted_by_hand() {
        // 300 rows of expert 0 are three rows of tiles of 128 x 256, or two of pairs; expert 1 has no rows.
        let mlp = MlpConfig::gated(384, Activation::Silu);
        let config = LayerConfig::new(640, 2, RouterConfig::softmax(1), mlp);
        let of = |rows, backward| {
            let tiling = Tiling { tile: [rows, 256], multiprocessors: 10 };
            let [products, epilogue] = tiling.expert(&config, 2, &[300, 0], backward);
            // Rounded, because the counts are divided by the multiprocessors.
            [products[0].1, products[1].1, epilogue[0].1].map(|count| (1000.0 * count).round() / 1000.0)
        };
        // Forward: 3 tiles of gate and up with 10 stages, 3 of down with 6; 3 * 640 * 384 weights of two bytes.
        let bytes = 3.0 * 640.0 * 384.0 * 2.0;
        assert_eq!(of(128, false), [3.0 * 48.0 / 10.0, bytes, 3.0 * 6.0 / 10.0]);
        assert_eq!(of(256, false), [2.0 * 2.0 * 48.0 / 10.0, bytes, 2.0 * 2.0 * 6.0 / 10.0]);
        // Backward: 2 tiles with 10 stages, 3 with 12; gradients: 2 * 3 * 3 and 5 * 2 tiles with 5 stages of rows.
        assert_eq!(of(128, true), [(3.0 * 56.0 + 28.0 * 5.0) / 10.0, 28.0 / 10.0, (3.0 * 5.0 + 28.0) / 10.0]);
        // Pairs: 2 * 2 * 3 and 3 * 2 gradient tiles, each of two blocks.
        assert_eq!(of(256, true), [2.0 * (2.0 * 56.0 + 18.0 * 5.0) / 10.0, 3.6, 2.0 * (2.0 * 5.0 + 18.0) / 10.0]);
    }
}
