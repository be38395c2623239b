//! The distribution of straggler delays.

use anyhow::Result;

use super::{Axis, Mark, Plot, Scale, Series, Style};

/// The empirical distribution function of the delays at each percent, as SVG.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_stragglers(ecdf_s: &[f64]) -> Result<String> {
    let last = (ecdf_s.len().max(2) - 1) as f64;
    let points: Vec<(f64, f64)> = ecdf_s.iter().enumerate().map(|(at, s)| (s * 1e3, at as f64 / last)).collect();
    let at = |share: f64| points.get((share * last).round() as usize).map_or(0.0, |point| point.0);
    let mark = |name: &str, share: f64, color: usize| Mark {
        name: format!("{name} {:.3} ms", at(share)),
        at: at(share),
        upright: true,
        color,
    };
    Plot {
        title: "Straggler delay".to_string(),
        subtitle: "how much later than the first of its group a PE is done; simulated".to_string(),
        x: Axis::new("delay, ms", Scale::Linear),
        y: Axis::new("share of PEs and steps", Scale::Linear),
        series: vec![Series { name: "ECDF".to_string(), points: points.clone(), style: Style::Line, color: 0 }],
        marks: vec![mark("median", 0.5, 1), mark("P95", 0.95, 2)],
    }
    .svg()
}
