//! The results of `aristos sim` and `aristos sweep` as text.

use super::text::{TextTable, count, ms};
use crate::sim::comms::Exchange;
use crate::sim::linear::LinearTime;
use crate::sim::sweep::{Model, Outcome, Strategy};

/// Strategies that are listed, the fastest first.
const LISTED: usize = 12;

/// The time of a linear layer by part.
pub(crate) fn linear_text(device: &str, tokens: f64, time: &LinearTime) -> String {
    let bottleneck = serde_json::to_value(time.bottleneck).unwrap_or_default();
    let mut table = TextTable::new(1, ["part", "us"]);
    for (part, seconds) in [
        ("forward and backward", time.fwd_bwd_s),
        ("  FLOP", time.flop_s),
        ("  global memory", time.global_io_s),
        ("  network", time.net_io_s),
        ("all-reduce at the end of a batch", time.end_of_batch_s),
    ] {
        table.row([part.to_string(), format!("{:.3}", seconds * 1e6)]);
    }
    let bound = bottleneck.as_str().unwrap_or_default();
    format!("{device}, {tokens} tokens: bound by {bound}\n{}", table.render())
}

/// The time of an all-to-all exchange.
pub(crate) fn exchange_text(exchange: &Exchange, nodes: usize) -> String {
    let layers = count(exchange.layers.len() as u64, "layer");
    let mut text = format!("{nodes} nodes, {layers}: {} ms in {} rounds\n", exchange.time_ms, exchange.rounds);
    if let Some(closed_ms) = exchange.closed_form_ms {
        text += &format!("closed form: {closed_ms} ms\n");
    }
    let longest = exchange.runs.iter().flat_map(|run| run.times_ms.iter().copied()).fold(0.0, f64::max);
    if exchange.rounds > 0 {
        text += &format!("longest round: {longest} ms\n");
    }
    text
}

/// The fastest strategies of a sweep, and the models on one device.
pub(crate) fn sweep_text(rows: &[(Model, Strategy, Outcome)], models: &[Model], sequential_s: &[f64]) -> String {
    let mut text = String::new();
    for (model, seconds) in models.iter().zip(sequential_s) {
        let Model { layers, width, batch, .. } = model;
        text += &format!("{layers} layers of width {width}, batch {batch}, on one device: {} ms\n", ms(*seconds));
    }
    text += &format!("{} strategies, the fastest:\n", rows.len());
    let header = ["devices", "dp", "hp", "pp", "ep", "mb", "samples/s", "latency ms", "peak MB", "communication"];
    let mut table = TextTable::new(0, header).at_most(LISTED);
    let mut sorted: Vec<_> = rows.iter().collect();
    sorted.sort_by(|a, b| b.2.throughput.total_cmp(&a.2.throughput));
    for (_, strategy, outcome) in sorted {
        let Strategy { dp, hp, pp, ep, microbatches, .. } = strategy;
        let mut cells: Vec<String> =
            [strategy.devices(), *dp, *hp, *pp, *ep, *microbatches].map(|n| n.to_string()).into();
        cells.extend([
            format!("{:.2}", outcome.throughput),
            ms(outcome.latency_s),
            format!("{:.0}", outcome.peak_memory_bytes * 1e-6),
            format!("{:.1}%", outcome.communication_fraction * 100.0),
        ]);
        table.row(cells);
    }
    text + &table.render()
}
