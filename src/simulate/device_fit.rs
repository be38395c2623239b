//! Fits the constants of a [`DeviceCalibration`] to logs of `aristos bench moe` on one PE.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::bench_log::BenchLog;
use super::calibrate::{Sample, fit, relative};
use super::calibration::{Counts, Terms, VERSION, sum};
use super::device::{DeviceCalibration, DeviceTerms, LoggedPass, Tiling, combine, dispatch, idle, router};
use super::machine::Machine;
use super::{RowOrder, RowsPer, Simulated, Tokens};
use crate::cluster::{Cluster, parse_json, read_text};
use crate::moe::synthetic::{Synthetic, SyntheticSpec};
use crate::moe::{Dtype, Groups, Options, Placement};
use crate::plan::InputError;
use crate::sim::network::Nics;

/// Minimum layers of a fit: phases have up to two constants.
const MIN_LAYERS: usize = 2;
/// A cluster of one device. The calibration replaces its rate, and no row leaves it.
const ONE_DEVICE: &str = r#"{"version": 1, "devices": [{"id": 0, "host": "device", "flop_per_ms": 1, "memory_experts": 1}],
    "links": {"alpha_ms": [[0]], "beta_ms_per_mb": [[0]]}}"#;
/// Element types by their names in logs.
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The logs of a device.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLogs {
    /// Multiprocessors of the device, each with one block.
    multiprocessors: usize,
    /// By tile, such as "128x256".
    tiles: BTreeMap<String, TileLogs>,
}

/// The logs of a tile; paths are relative to the file's folder.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TileLogs {
    /// Layers to which the constants are fitted.
    fit: Vec<PathBuf>,
    /// A layer with and without epilogues.
    epilogue: [PathBuf; 2],
    /// Layers that the constants are only judged by.
    #[serde(default)]
    judge: Vec<PathBuf>,
}

/// A layer's log, its rows by expert, and the device's tiles.
struct Logged {
    name: String,
    log: BenchLog,
    dtype: Dtype,
    rows: Vec<usize>,
    tiling: Tiling,
}

impl Logged {
    fn read(folder: &Path, name: &Path, tiling: Tiling) -> Result<Logged> {
        let path = folder.join(name);
        let log = BenchLog::parse(&read_text(&path)?).map_err(|error| error.in_file(&path))?;
        let dtype = DTYPES.into_iter().find(|dtype| dtype.name() == log.dtype);
        let wrong = || InputError::value("element type", format!("is {:?}", log.dtype), "f32, bf16 or f16");
        let dtype = dtype.ok_or_else(wrong).map_err(|error| error.in_file(&path))?;
        let synthetic = synthetic(&log).with_context(|| path.display().to_string())?;
        let mut rows = vec![0; log.config.n_experts];
        (0..log.tokens).flat_map(|token| synthetic.draw_experts(token)).for_each(|expert| rows[expert] += 1);
        Ok(Logged { name: name.display().to_string(), log, dtype, rows, tiling })
    }

    fn slots(&self) -> f64 {
        self.rows.iter().sum::<usize>() as f64
    }

    fn expert(&self, backward: bool) -> [Counts; 2] {
        self.tiling.expert(&self.log.config, self.dtype.bytes(), &self.rows, backward)
    }

    fn pipelined_s(&self, phase: &str, backward: bool) -> Result<f64, InputError> {
        self.log.seconds("pipelined", phase, backward).map_err(|error| error.in_file(self.name.as_ref()))
    }

    /// Time of all products in a bulk pass, in which no block does anything else meanwhile, seconds.
    fn products_s(&self, backward: bool) -> Result<f64, InputError> {
        self.log.seconds("bulk", "expert GEMM", backward).map_err(|error| error.in_file(self.name.as_ref()))
    }

    /// Time of a pipelined pass that is in no phase of work, seconds.
    fn idle_s(&self, backward: bool) -> Result<f64, InputError> {
        let mut left_s = self.pipelined_s("total", backward)? - self.products_s(backward)?;
        for phase in ["router", "dispatch", "combine"] {
            left_s -= self.pipelined_s(phase, backward)?;
        }
        Ok(left_s.max(0.0))
    }

    /// Forward and backward with these constants, seconds.
    fn simulated_s(&self, calibration: &DeviceCalibration) -> Result<[f64; 2]> {
        let config = self.log.config.clone();
        let simulated = Simulated {
            groups: Groups::one(Placement::even(config.n_experts, 1)),
            cluster: Cluster::from_json(ONE_DEVICE)?,
            config,
            dtype: self.dtype,
            options: Options::default(),
            tokens: Tokens::Synthetic(Box::new(synthetic(&self.log)?), self.log.tokens),
            order: RowOrder::Expert,
            rows_per: RowsPer::Pe,
            backward: true,
            steps: 1,
            jitter: None,
            nics: Nics::PerPe,
            cores: None,
            calibration: Some(Machine::Device(calibration.clone())),
            dense: None,
            traced: 0,
        };
        let (report, _) = simulated.run().with_context(|| self.name.clone())?;
        let backward = report.backward.context("the simulation has no backward pass")?;
        Ok([report.forward.total.max_s, backward.total.max_s])
    }
}

/// The tokens of a benchmark with default flags.
fn synthetic(log: &BenchLog) -> Result<Synthetic> {
    Ok(Synthetic::new(SyntheticSpec::new(log.config.clone(), 0))?)
}

/// Fits a device's constants to the logs that a file names, for one tile; and simulates every log with them.
///
/// The time of epilogues is the difference of two logs, with epilogues and without. Products are those of bulk passes. The rest of a pipelined
/// pass, without router, dispatch and combine, is idle time. The start of either pass is the idle time of a backward pass, on the assumption
/// that weight gradients hide a backward pass's returns and sums. A forward pass's idle time after the start is its tail.
///
/// # Errors
/// A file or a log that cannot be read, or a tile without logs; the line names the file and the field.
pub fn calibrate_device(path: &Path, tile: &str) -> Result<DeviceCalibration> {
    let logs: DeviceLogs = parse_json(&read_text(path)?).map_err(|error| error.in_file(path))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let Some(names) = logs.tiles.get(tile) else {
        let all = logs.tiles.keys().map(String::as_str).collect::<Vec<_>>().join(" or ");
        bail!("{}: tiles have no {tile:?}, expected {all}", path.display());
    };
    let sizes = tile.split_once('x').and_then(|(rows, columns)| Some([rows.parse().ok()?, columns.parse().ok()?]));
    let sizes = sizes.with_context(|| format!("{}: tiles have {tile:?}, expected ROWSxCOLUMNS", path.display()))?;
    let mut calibration = DeviceCalibration {
        version: VERSION,
        device: String::new(),
        multiprocessors: logs.multiprocessors,
        dtype: String::new(),
        tile: sizes,
        forward: DeviceTerms::default(),
        backward: DeviceTerms::default(),
        passes: Vec::new(),
    };
    calibration.check_sizes().map_err(|error| error.in_file(path))?;
    let tiling = Tiling { tile: sizes, multiprocessors: logs.multiprocessors };
    let read = |name: &PathBuf| Logged::read(folder, name, tiling);
    let fitted = names.fit.iter().map(read).collect::<Result<Vec<_>>>()?;
    let judged = names.judge.iter().map(read).collect::<Result<Vec<_>>>()?;
    let [with, without] = [read(&names.epilogue[0])?, read(&names.epilogue[1])?];
    ensure!(
        fitted.len() >= MIN_LAYERS,
        "{}: tiles.{tile}.fit has {} logs, expected at least {MIN_LAYERS}",
        path.display(),
        fitted.len()
    );
    (calibration.device, calibration.dtype) = (fitted[0].log.device.clone(), fitted[0].log.dtype.clone());
    for logged in fitted.iter().chain(&judged).chain([&with, &without]) {
        let of = (&logged.log.device, &logged.log.dtype);
        ensure!(
            of == (&calibration.device, &calibration.dtype),
            "{}: is of {} and {}, expected {} and {}, as in the first log",
            logged.name,
            of.0,
            of.1,
            calibration.device,
            calibration.dtype
        );
    }
    // Backward first: its idle time is a forward's start.
    for backward in [true, false] {
        let epilogue_s = with.products_s(backward)? - without.products_s(backward)?;
        ensure!(epilogue_s >= 0.0, "{}: epilogues take {:.3} ms, expected 0 or more", with.name, epilogue_s * 1e3);
        let [_, tiles] = with.expert(backward);
        let mut terms = DeviceTerms { epilogue: constants(vec![relative((tiles, epilogue_s))]), ..Default::default() };
        let mut samples: [Vec<Sample>; 5] = Default::default();
        for logged in &fitted {
            let [products, tiles] = logged.expert(backward);
            let (config, slots) = (&logged.log.config, logged.slots());
            let idle_s = logged.idle_s(backward)?;
            let of_experts = idle(1.0, config.n_experts as f64);
            let tail_s = if backward { 0.0 } else { (idle_s - sum(&calibration.backward.start, &of_experts)).max(0.0) };
            let phases = [
                (router(config.hidden, 1.0, logged.log.tokens as f64), logged.pipelined_s("router", backward)?),
                (products, (logged.products_s(backward)? - sum(&terms.epilogue, &tiles)).max(0.0)),
                (dispatch(slots), logged.pipelined_s("dispatch", backward)?),
                (combine(config.hidden, slots), logged.pipelined_s("combine", backward)?),
                (of_experts, if backward { idle_s } else { tail_s }),
            ];
            samples.iter_mut().zip(phases).for_each(|(samples, phase)| samples.push(relative(phase)));
        }
        for (phase, samples) in ["router", "products", "dispatch", "combine", "idle time"].iter().zip(&samples) {
            let pass = if backward { "backward" } else { "forward" };
            ensure!(
                are_determined(samples),
                "{}: tiles.{tile}.fit has layers with proportional counts of {pass}, {phase}, expected layers that differ in tokens, \
                 experts and widths",
                path.display()
            );
        }
        let [router, products, dispatch, combine, idle] = samples.map(constants);
        (terms.router, terms.products, terms.dispatch, terms.combine) = (router, products, dispatch, combine);
        if backward {
            terms.start = idle;
            calibration.backward = terms;
        } else {
            (terms.start, terms.tail) = (calibration.backward.start.clone(), idle);
            calibration.forward = terms;
        }
    }
    calibration.check().map_err(|error| error.in_file(path))?;
    for (logged, is_fitted) in fitted.iter().map(|log| (log, true)).chain(judged.iter().map(|log| (log, false))) {
        let simulated_s = logged.simulated_s(&calibration)?;
        for (pass, backward) in [("forward", false), ("backward", true)] {
            calibration.passes.push(LoggedPass {
                log: logged.name.clone(),
                pass: pass.to_string(),
                fitted: is_fitted,
                measured_s: logged.pipelined_s("total", backward)?,
                simulated_s: simulated_s[usize::from(backward)],
            });
        }
    }
    Ok(calibration)
}

/// Whether the samples determine two constants: the ratio of their counts differs by more than a percent.
fn are_determined(samples: &[Sample]) -> bool {
    let ratio = |sample: &Sample| match &sample.counts[..] {
        [one, other] if other.1 > 0.0 => Some(one.1 / other.1),
        _ => None,
    };
    let ratios: Vec<f64> = samples.iter().filter_map(ratio).collect();
    let most = ratios.iter().copied().fold(0.0, f64::max);
    ratios.is_empty() || most > 1.01 * ratios.iter().copied().fold(f64::INFINITY, f64::min)
}

fn constants(samples: Vec<Sample>) -> Terms {
    fit(samples, |_| true)
}
