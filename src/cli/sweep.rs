//! `aristos sweep`.

use std::fmt::Write;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde::Serialize;

use super::files;
use super::flags::of_flags;
use super::shared::{PlotArgs, show};
use crate::plot;
use crate::report::sweep_text;
use crate::sim::sweep::{Cost, Degrees, Isolate, Model, Outcome, Strategy, grid};

/// The flags of `aristos sweep`.
#[derive(clap::Args)]
pub struct Args {
    /// Linear layers of the MLP; several numbers, separated by commas, are combined, as for the next three flags
    #[arg(long, value_name = "L", value_delimiter = ',', default_value = "64")]
    layers: Vec<usize>,
    /// Width of each layer
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "8192")]
    width: Vec<usize>,
    /// Samples of a batch
    #[arg(long, value_name = "B", value_delimiter = ',', default_value = "8192")]
    batch: Vec<usize>,
    /// Number of devices
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "16")]
    devices: Vec<usize>,
    /// Cost model
    #[arg(long, value_enum, default_value = "default")]
    cost: CostArg,
    /// Exclude the distribution of inputs and weights from device 0
    #[arg(long)]
    steady_state: bool,
    /// Data-parallel degrees [default: all that divide]
    #[arg(long, value_name = "D", value_delimiter = ',')]
    dp: Vec<usize>,
    /// Horizontal degrees: alternating column and row splits [default: all that divide]
    #[arg(long, value_name = "H", value_delimiter = ',')]
    hp: Vec<usize>,
    /// Stages of the pipeline [default: all that divide]
    #[arg(long, value_name = "P", value_delimiter = ',')]
    pp: Vec<usize>,
    /// Microbatches of a pipeline [default: powers of two below the square root of a replica's batch]
    #[arg(long, value_name = "M", value_delimiter = ',')]
    microbatches: Vec<usize>,
    /// Only one kind of parallelism
    #[arg(long, value_enum)]
    isolate: Option<IsolateArg>,
    /// Replace each pair of layers by this many experts
    #[arg(long, value_name = "E", requires = "top_k")]
    experts: Option<usize>,
    /// With --experts: experts per sample
    #[arg(long, value_name = "K", requires = "experts")]
    top_k: Option<usize>,
    /// With --experts: replicas whose devices share experts [default: all that divide]
    #[arg(long, value_name = "EP", value_delimiter = ',', requires = "experts")]
    ep: Vec<usize>,
    /// Write all rows
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print JSON: rows, best, sequential_s (docs/simulator.md)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    plots: PlotArgs,
}

/// `--cost`.
#[derive(Clone, Copy, ValueEnum)]
pub enum CostArg {
    /// The corrected cost model
    Default,
    /// The published program's cost model, including its errors
    Compat,
}

/// `--isolate`.
#[derive(Clone, Copy, ValueEnum)]
pub enum IsolateArg {
    /// Data parallelism
    Data,
    /// Horizontal parallelism
    Horizontal,
    /// Pipeline parallelism
    Pipeline,
}

impl From<IsolateArg> for Isolate {
    fn from(isolate: IsolateArg) -> Isolate {
        match isolate {
            IsolateArg::Data => Isolate::Data,
            IsolateArg::Horizontal => Isolate::Horizontal,
            IsolateArg::Pipeline => Isolate::Pipeline,
        }
    }
}

/// A row of `--json`.
#[derive(Serialize)]
struct Row<'a> {
    layers: usize,
    width: usize,
    batch: usize,
    devices: usize,
    #[serde(flatten)]
    strategy: &'a Strategy,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

#[derive(Serialize)]
struct Printed<'a> {
    /// Time of each model on one device.
    sequential_s: &'a [f64],
    best: Row<'a>,
    rows: Vec<Row<'a>>,
}

type Rows = Vec<(Model, Strategy, Outcome)>;

/// Simulates all strategies and prints the fastest.
pub fn command(args: &Args) -> Result<bool> {
    let cost = match args.cost {
        CostArg::Default => Cost::Default,
        CostArg::Compat => Cost::Compat,
    };
    args.plots.create()?;
    let csv = files::create(args.csv.as_ref())?;
    let models = args.models()?;
    let sequential_s: Vec<f64> = models.iter().map(|model| model.sequential_s(cost)).collect();
    let mut rows = Rows::new();
    for model in &models {
        for &devices in &args.devices {
            let found = grid(model, devices, &args.degrees(), cost, args.steady_state).map_err(of_flags)?;
            rows.extend(found.into_iter().map(|(strategy, outcome)| (*model, strategy, outcome)));
        }
    }
    files::write(csv, csv_text(&rows))?;
    if args.plots.folder.is_some() {
        for (stem, svg) in args.draw(&rows, cost)? {
            args.plots.save(&stem, || Ok(svg))?;
        }
    }
    let best = rows.iter().max_by(|a, b| a.2.throughput.total_cmp(&b.2.throughput));
    let Some(best) = best else { return Ok(true) };
    let printed = Printed { sequential_s: &sequential_s, best: row(best), rows: rows.iter().map(row).collect() };
    show(args.json, &printed, || sweep_text(&rows, &models, &sequential_s))?;
    Ok(true)
}

impl Args {
    fn models(&self) -> Result<Vec<Model>> {
        let mut models = Vec::new();
        for &layers in &self.layers {
            for &width in &self.width {
                for &batch in &self.batch {
                    let model = Model::new(layers, width, batch).map_err(of_flags)?;
                    models.push(match self.experts.zip(self.top_k) {
                        Some((experts, top_k)) => model.with_experts(experts, top_k).map_err(of_flags)?,
                        None => model,
                    });
                }
            }
        }
        ensure!(!models.is_empty() && !self.devices.is_empty(), "--devices: expected at least one number");
        Ok(models)
    }

    fn degrees(&self) -> Degrees {
        let mut degrees = Degrees::default();
        (degrees.dp, degrees.hp, degrees.pp) = (self.dp.clone(), self.hp.clone(), self.pp.clone());
        (degrees.ep, degrees.microbatches) = (self.ep.clone(), self.microbatches.clone());
        degrees.isolate = self.isolate.map(Isolate::from);
        degrees
    }

    fn draw(&self, rows: &Rows, cost: Cost) -> Result<Vec<(String, String)>> {
        let model = match self.cost {
            CostArg::Default => "corrected cost model",
            CostArg::Compat => "published cost model",
        };
        let state = if self.steady_state { ", steady state" } else { "" };
        let list = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let subtitle = format!(
            "{} layers of width {}, batch {}, {model}{state}",
            list(&self.layers),
            list(&self.width),
            list(&self.batch)
        );
        let subtitle = format!("{subtitle}, {} devices", list(&self.devices));
        let mut plots = match self.isolate {
            Some(isolate) => vec![plot::plot_isolated(rows, isolate.into(), &subtitle)?],
            None => plot::plot_grid(rows, &subtitle)?,
        };
        // The minimum of three, because other processes may disturb a measurement.
        let own_s = |(model, strategy, _): &(Model, Strategy, Outcome)| {
            let once = |_| {
                let start = Instant::now();
                let _ = black_box(model.simulate(*strategy, cost, self.steady_state));
                start.elapsed().as_secs_f64()
            };
            (0..3).map(once).fold(f64::INFINITY, f64::min)
        };
        let own_s: Vec<f64> = rows.iter().map(own_s).collect();
        plots.push(plot::plot_own_time(rows, &own_s, &subtitle)?);
        Ok(plots)
    }
}

fn row((model, strategy, outcome): &(Model, Strategy, Outcome)) -> Row<'_> {
    let Model { layers, width, batch, .. } = *model;
    Row { layers, width, batch, devices: strategy.devices(), strategy, outcome }
}

fn csv_text(rows: &Rows) -> String {
    let mut text = "layers,width,batch,devices,dp,hp,pp,ep,microbatches,throughput,latency_s,peak_memory_bytes,\
                    communication_fraction\n"
        .to_string();
    for (model, strategy, outcome) in rows {
        let Model { layers, width, batch, .. } = model;
        let Strategy { dp, hp, pp, ep, microbatches, .. } = strategy;
        let Outcome { throughput, latency_s, peak_memory_bytes, communication_fraction, .. } = outcome;
        let devices = strategy.devices();
        let _ = writeln!(
            text,
            "{layers},{width},{batch},{devices},{dp},{hp},{pp},{ep},{microbatches},{throughput},{latency_s},\
             {peak_memory_bytes},{communication_fraction}"
        );
    }
    text
}
