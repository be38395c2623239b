//! Strategies for a whole model: `aristos plan --model M --top N`, and what fits where a plan does not.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use super::flags::of_flags;
use super::sim_linear::read_device;
use super::workload::OptionalModelArgs;
use crate::cluster::{Cluster, preset};
use crate::report::{StrategyRow, launch_text, memory_text, strategies_text};
use crate::sim::linear::Device;
use crate::stdio::{print, print_line};
use crate::strategy::{Limits, Optimizer, Strategy, Training, search};

/// Most nodes that are tried, over those of the cluster.
const NODES: [usize; 6] = [2, 4, 8, 16, 32, 64];

/// The flags of strategies.
#[derive(clap::Args)]
pub struct StrategyArgs {
    /// With --model: show the N fastest ways to train all of its layers: pipeline stages, expert-parallel groups, data parallelism, with the memory of a device
    #[arg(
        long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with_all = ["layers", "explain", "out", "draw", "draw_latency", "current", "replicas"],
    )]
    pub top: Option<u32>,
    /// With --top: number of pipeline stages [default: any]
    #[arg(long, value_name = "P", requires = "top")]
    stages: Option<usize>,
    /// With --top: devices of an expert-parallel group [default: any]
    #[arg(long, value_name = "N", requires = "top")]
    ep: Option<usize>,
    /// With --top: optimizer, if --bytes-per-parameter is not given
    #[arg(long, value_enum, default_value = "adamw", requires = "top")]
    optimizer: OptimizerArg,
    /// With --top: count bytes of memory in the dense parts too, by the roofline of this device: a JSON file or a name (docs/simulator.md)
    #[arg(long, value_name = "DEVICE", requires = "top")]
    roofline: Option<PathBuf>,
    /// With --top: tokens of a sequence
    #[arg(long, value_name = "S", default_value_t = 4096, requires = "top")]
    sequence: usize,
}

/// `--optimizer`.
#[derive(Clone, Copy, ValueEnum)]
enum OptimizerArg {
    /// Moments in f32
    Adamw,
    /// Moments in bf16
    AdamwBf16,
    /// Moments of 8 bits
    #[value(name = "adamw-8bit")]
    Adamw8bit,
}

/// A change of settings, and the fastest strategy with it.
#[derive(Serialize)]
struct Cure {
    change: String,
    #[serde(flatten)]
    strategy: Strategy,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Printed<'a> {
    feasible: bool,
    usable_mb: f64,
    strategies: &'a [Strategy],
}

impl StrategyArgs {
    fn training<'c>(&self, cluster: &'c Cluster, of_model: &OptionalModelArgs) -> Result<Training<'c>> {
        let (model, dense, tokens_per_device) = of_model.parts()?;
        let element_bytes = of_model.element_bytes();
        let rate = cluster.devices.iter().map(|device| device.flop_per_ms).fold(f64::INFINITY, f64::min);
        let device = match &self.roofline {
            Some(device) => read_device(device)?,
            None => {
                // The rate of the experts' products in the cluster file is a reached one. Memory is not counted.
                let mut device = Device::preset("H100").map_err(of_flags)?;
                (device.flop_per_s_8bit, device.base_util) = (rate * 1e3 * element_bytes as f64, 1.0);
                device.global_bytes_per_s = 1e30;
                device
            }
        };
        let optimizer = match (of_model.bytes_per_parameter(), self.optimizer) {
            (Some(bytes), _) => Optimizer::Bytes((bytes - element_bytes as f64 - 4.0).max(0.0)),
            (None, OptimizerArg::Adamw) => Optimizer::AdamW,
            (None, OptimizerArg::AdamwBf16) => Optimizer::Bf16,
            (None, OptimizerArg::Adamw8bit) => Optimizer::EightBit,
        };
        let sequence = self.sequence.min(tokens_per_device);
        Ok(Training { cluster, model, dense, device, tokens_per_device, sequence, element_bytes, optimizer })
    }
}

/// Prints the fastest strategies. The exit code is 0, or `infeasible` if none fits.
pub fn main(
    args: &StrategyArgs,
    of_model: &OptionalModelArgs,
    cluster: &Cluster,
    json: bool,
    infeasible: u8,
) -> Result<u8> {
    let training = args.training(cluster, of_model)?;
    let recompute = (of_model.recomputation() > 0.0).then_some(true);
    let limits = Limits { stages: args.stages, ep: args.ep, recompute, sharded: None };
    let (mut found, least) = search(&training, limits).map_err(of_flags)?;
    found.truncate(args.top.unwrap_or(1) as usize);
    let usable_mb = training.usable_mb()?;
    if json {
        print_line(&serde_json::to_string_pretty(&Printed {
            feasible: !found.is_empty(),
            usable_mb,
            strategies: &found,
        })?)?;
        return Ok(if found.is_empty() { infeasible } else { 0 });
    }
    let Some(best) = found.first() else {
        crate::stdio::say(&format!("aristos: no plan: {}", shortage(usable_mb, &least)));
        return Ok(infeasible);
    };
    let rows: Vec<StrategyRow> = found.iter().enumerate().map(|(i, s)| ((i + 1).to_string(), s)).collect();
    let text = [
        strategies_text(&rows),
        memory_text(best, usable_mb),
        launch_text(best, cluster.hosts().len(), cluster.devices.len(), training.sequence),
    ];
    print(&text.join("\n"))?;
    Ok(0)
}

fn shortage(usable_mb: f64, least: &Strategy) -> String {
    let (needed, usable) = (least.memory.all_mb() * 1e-3, usable_mb * 1e-3);
    format!(
        "memory: a device has {usable:.1} GB (nine tenths), the least that any strategy needs is {needed:.1} GB ({} stages, EP {}): {:.1} GB short",
        least.shape.stages,
        least.shape.ep,
        needed - usable
    )
}

/// What is short on a device with all layers on each device, and the nearest settings that fit, each searched: `None` if there is no model, or not all of it.
pub struct Cures {
    shortage: String,
    usable_mb: f64,
    cures: Vec<Cure>,
}

impl Cures {
    /// Searches them for the settings of `of_model` on the cluster read from `path`.
    pub fn of(
        args: &StrategyArgs,
        of_model: &OptionalModelArgs,
        cluster: &Cluster,
        path: &str,
    ) -> Result<Option<Cures>> {
        if !of_model.is_whole() {
            return Ok(None);
        }
        let Ok(training) = args.training(cluster, of_model) else { return Ok(None) };
        let Ok(usable_mb) = training.usable_mb() else { return Ok(None) };
        let recompute = of_model.recomputation() > 0.0;
        let base = Limits { stages: Some(1), ep: None, recompute: Some(recompute), sharded: Some(false) };
        let free = Limits { recompute: recompute.then_some(true), ..Limits::default() };
        let original = training.optimizer;
        let less = Training { optimizer: Optimizer::EightBit, ..training.clone() };
        let best = |training: &Training, limits: Limits| -> Result<Option<Strategy>> {
            Ok(search(training, limits).map_err(of_flags)?.0.into_iter().next())
        };
        let mut cures: Vec<Cure> = Vec::new();
        let mut add = |nodes: Option<usize>, training: &Training, limits: Limits| -> Result<bool> {
            let Some(strategy) = best(training, limits)? else { return Ok(false) };
            let shape = &strategy.shape;
            let changes = [
                nodes.map(|nodes| format!("{nodes} nodes")),
                (shape.stages > 1).then(|| format!("{} stages", shape.stages)),
                (shape.recompute && !recompute).then(|| "recomputation".to_string()),
                shape.sharded.then(|| "sharded optimizer state".to_string()),
                (training.optimizer != original).then(|| "8-bit moments".to_string()),
            ];
            let change = changes.into_iter().flatten().collect::<Vec<String>>().join(", ");
            if cures.iter().all(|cure| cure.change != change) {
                cures.push(Cure { change, strategy });
            }
            Ok(true)
        };
        // One change, then two, then all.
        for (training, limits) in [
            (&training, Limits { stages: None, ..base }),
            (&training, Limits { sharded: None, ..base }),
            (&training, Limits { recompute: None, ..base }),
            (&less, base),
            (&training, Limits { stages: None, recompute: None, ..base }),
            (&training, Limits { stages: None, sharded: None, ..base }),
            (&training, free),
            (&less, free),
        ] {
            add(None, training, limits)?;
        }
        if let Some(name) = path.strip_prefix("preset:") {
            let (name, nodes) = (name.split(':').next().unwrap_or(name), cluster.hosts().len());
            for more in NODES.map(|more| more * nodes) {
                let larger = preset(&format!("{name}:{more}"))?;
                if add(Some(more), &Training { cluster: &larger, ..training.clone() }, free)? {
                    break;
                }
            }
        }
        let (_, least) = search(&training, base).map_err(of_flags)?;
        let shortage = shortage(usable_mb, &least);
        Ok(Some(Cures { shortage, usable_mb, cures }))
    }

    /// The lines after "no plan".
    pub fn text(&self) -> String {
        let rows: Vec<StrategyRow> = self.cures.iter().map(|cure| (cure.change.clone(), &cure.strategy)).collect();
        match rows.is_empty() {
            true => format!("with all layers on each device: {}\nno setting that was tried fits\n", self.shortage),
            false => format!(
                "with all layers on each device: {}\nwhat fits, by `--top`:\n{}",
                self.shortage,
                strategies_text(&rows)
            ),
        }
    }

    /// Adds the keys `usable_mb` and `cures` to an outcome.
    ///
    /// # Errors
    /// Returns an error if `outcome` is not a JSON object.
    pub fn add_to(&self, outcome: &str) -> Result<String> {
        let mut map: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(outcome).context("the outcome")?;
        map.insert("usable_mb".into(), self.usable_mb.into());
        map.insert("cures".into(), serde_json::to_value(&self.cures)?);
        Ok(serde_json::to_string_pretty(&map)?)
    }
}
