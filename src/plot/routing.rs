//! The imbalance of experts.

use anyhow::Result;

use super::{Axis, Mark, Plot, Scale, Series, Style};

/// Tokens of each expert, the busiest first, as SVG.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_expert_load(tokens: &[f64]) -> Result<String> {
    let mut sorted = tokens.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
    Plot {
        title: "Tokens of each expert".to_string(),
        subtitle: format!("{} experts; the busiest has {:.2} times the mean", sorted.len(), sorted[0] / mean),
        x: Axis::new("experts, the busiest first", Scale::Linear),
        y: Axis::new("tokens", Scale::Linear),
        series: vec![Series {
            name: "tokens".to_string(),
            points: sorted.iter().enumerate().map(|(rank, tokens)| (rank as f64 + 1.0, *tokens)).collect(),
            style: Style::Dotted,
            color: 0,
        }],
        marks: vec![Mark { name: "mean".to_string(), at: mean, upright: false, color: 1 }],
    }
    .svg()
}
