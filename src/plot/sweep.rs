//! Throughput by strategy.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::{Axis, Plot, Scale, Series, Style};
use crate::sim::sweep::{Isolate, Model, Outcome, Strategy};

type Rows<'a> = &'a [(Model, Strategy, Outcome)];

/// The key of a grid plot: layers, width, batch, devices, dp, ep.
type Picture = [usize; 6];
/// The key of a line in it: whether there is a pipeline, and the number of microbatches.
type Line = (bool, usize);
/// The key of a line of isolated strategies: layers, width, batch, microbatches.
type Alone = [usize; 4];
/// The points of each line.
type Lines<Key> = BTreeMap<Key, Vec<(f64, f64)>>;

/// Throughput over the horizontal degree: a plot for each data- and expert-parallel degree of each model, with its file name, and a line for each
/// number of microbatches.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_grid(rows: Rows, subtitle: &str) -> Result<Vec<(String, String)>> {
    let mut pictures: BTreeMap<Picture, Lines<Line>> = BTreeMap::new();
    for (model, strategy, outcome) in rows {
        let key = [model.layers, model.width, model.batch, strategy.devices(), strategy.dp, strategy.ep];
        let lines = pictures.entry(key).or_default();
        let line = lines.entry((strategy.pp > 1, strategy.microbatches)).or_default();
        line.push((strategy.hp as f64, outcome.throughput));
    }
    let names = ["layers", "width", "batch", "devices", "dp", "ep"];
    // The file name has dp, and the other keys with several values.
    let varies = |at: usize| at == 4 || pictures.keys().map(|key| key[at]).collect::<BTreeSet<_>>().len() > 1;
    let said: Vec<usize> = (0..names.len()).filter(|at| varies(*at)).collect();
    let picture = |(key, lines): (&Picture, &Lines<Line>)| {
        let series = lines.iter().enumerate().map(|(place, ((pipeline, microbatches), points))| Series {
            name: if *pipeline { format!("{microbatches} microbatches") } else { "no pipeline".to_string() },
            points: points.clone(),
            style: Style::Dotted,
            color: place,
        });
        let plot = Plot {
            title: said.iter().map(|at| format!("{} {}", names[*at], key[*at])).collect::<Vec<_>>().join(", "),
            subtitle: subtitle.to_string(),
            x: Axis::new("horizontal degree (the rest are stages of a pipeline)", Scale::Powers),
            y: Axis::new("samples/s", Scale::Linear),
            series: series.collect(),
            marks: Vec::new(),
        };
        let parts: Vec<String> = said.iter().map(|at| format!("{}{}", names[*at], key[*at])).collect();
        Ok((format!("grid_{}", parts.join("_")), plot.svg()?))
    };
    pictures.iter().map(picture).collect()
}

/// Throughput over the degree of one kind of parallelism, a line for each model, with the file name.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_isolated(rows: Rows, isolate: Isolate, subtitle: &str) -> Result<(String, String)> {
    let (stem, label) = match isolate {
        Isolate::Data => ("data", "data-parallel replicas"),
        Isolate::Horizontal => ("horizontal", "horizontal degree"),
        Isolate::Pipeline => ("pipeline", "stages of the pipeline"),
    };
    let mut lines: Lines<Alone> = Lines::new();
    for (model, strategy, outcome) in rows {
        let line = lines.entry([model.layers, model.width, model.batch, strategy.microbatches]).or_default();
        line.push((strategy.devices() as f64, outcome.throughput));
    }
    let varies = |at: usize| lines.keys().map(|key| key[at]).collect::<BTreeSet<_>>().len() > 1;
    let names = ["layers", "width", "batch", "microbatches"];
    let said: Vec<usize> = (0..names.len()).filter(|at| varies(*at)).collect();
    let name = |key: &Alone| match &said[..] {
        [] => format!("batch {}", key[2]),
        said => said.iter().map(|at| format!("{} {}", names[*at], key[*at])).collect::<Vec<_>>().join(", "),
    };
    let series = lines.iter().enumerate().map(|(place, (key, points))| Series {
        name: name(key),
        points: points.clone(),
        style: Style::Dotted,
        color: place,
    });
    let plot = Plot {
        title: "One kind of parallelism alone".to_string(),
        subtitle: subtitle.to_string(),
        x: Axis::new(label, Scale::Powers),
        y: Axis::new("samples/s", Scale::Linear),
        series: series.collect(),
        marks: Vec::new(),
    };
    Ok((format!("isolated_{stem}"), plot.svg()?))
}

/// Time of the simulator itself, seconds, over the simulated operations, a line for each number of microbatches, with the file name.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_own_time(rows: Rows, own_s: &[f64], subtitle: &str) -> Result<(String, String)> {
    let mut lines: Lines<usize> = Lines::new();
    for ((_, strategy, outcome), own_s) in rows.iter().zip(own_s) {
        lines.entry(strategy.microbatches).or_default().push((outcome.ops as f64, own_s * 1e6));
    }
    let series = lines.into_iter().enumerate().map(|(place, (microbatches, mut points))| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: format!("microbatches {microbatches}"), points, style: Style::Dotted, color: place }
    });
    let plot = Plot {
        title: "The simulator's own time for a strategy".to_string(),
        subtitle: subtitle.to_string(),
        x: Axis::new("operations", Scale::Log),
        y: Axis::new("us", Scale::Log),
        series: series.collect(),
        marks: Vec::new(),
    };
    Ok(("own_time".to_string(), plot.svg()?))
}
