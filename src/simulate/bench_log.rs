//! Reads the table that `aristos bench moe` prints for a layer on one device.

use std::collections::BTreeMap;

use crate::moe::{Activation, LayerConfig, MlpConfig, RouterConfig};
use crate::plan::InputError;

/// Maximum of a layer's sizes and tokens.
const MAX_SIZE: usize = 1 << 24;
/// Maximum tokens times experts per token times experts: the steps to draw the experts of all tokens.
const MAX_STEPS: usize = 1 << 31;

/// The layer of a table, and the times of its passes.
#[derive(Clone, Debug)]
pub(super) struct BenchLog {
    pub device: String,
    pub dtype: String,
    pub config: LayerConfig,
    pub tokens: usize,
    /// Median times by (passes, mode), such as ("forward+backward", "bulk"): of all phases together ("total"), and of each; seconds.
    times: BTreeMap<(String, String), BTreeMap<String, f64>>,
}

impl BenchLog {
    /// Parses the text of a table.
    ///
    /// # Errors
    /// A table of several PEs or of a CPU, or without a measurement; the line names the missing or wrong line.
    pub(super) fn parse(text: &str) -> Result<BenchLog, InputError> {
        let mut lines = text.lines();
        let device = lines.next().unwrap_or_default().trim().to_string();
        let layer = lines.next().unwrap_or_default();
        let (config, tokens) = parse_layer(layer).ok_or_else(|| {
            let expected = "\"1 PE; N tokens, hidden H, E experts of I (gated, Silu), top-K\"";
            InputError::value("line 2", format!("is {layer:?}"), expected)
        })?;
        let mut log = BenchLog { device, dtype: String::new(), config, tokens, times: BTreeMap::new() };
        let mut phases: Vec<String> = Vec::new();
        for line in lines {
            if let Some((dtype, _)) = line.split_once(": rows per PE ") {
                if !log.dtype.is_empty() {
                    return Err(InputError::value("the table", "has several element types", "one"));
                }
                log.dtype = dtype.to_string();
            }
            let cells: Vec<&str> = line.trim().split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
            match &cells[..] {
                ["ms by phase and PE", names @ ..] => phases = names.iter().map(ToString::to_string).collect(),
                [passes, mode @ ("bulk" | "pipelined"), median, ..] => log.add(passes, mode, "total", median)?,
                [passes, mode, values @ ..] if mode.ends_with(", PE 0") && values.len() == phases.len() => {
                    for (phase, value) in phases.iter().zip(values) {
                        log.add(passes, mode.trim_end_matches(", PE 0"), phase, value)?;
                    }
                }
                _ => {}
            }
        }
        Ok(log)
    }

    fn add(&mut self, passes: &str, mode: &str, phase: &str, ms: &str) -> Result<(), InputError> {
        let field = || format!("{passes}, {mode}, {phase}");
        let value = ms.parse::<f64>().ok().filter(|ms| (0.0..1e9).contains(ms));
        let value =
            value.ok_or_else(|| InputError::value(field(), format!("is {ms:?}"), "a number of ms, 0 or more"))?;
        let times = self.times.entry((passes.to_string(), mode.to_string())).or_default();
        times.insert(phase.to_string(), value * 1e-3);
        Ok(())
    }

    /// Median time of a phase, or of all ("total"), in a forward or a backward pass, seconds. A backward pass is the difference of both
    /// passes and a forward pass.
    ///
    /// # Errors
    /// A phase that the table does not have.
    pub(super) fn seconds(&self, mode: &str, phase: &str, backward: bool) -> Result<f64, InputError> {
        let of = |passes: &str| {
            let times = self.times.get(&(passes.to_string(), mode.to_string()));
            let time = times.and_then(|times| times.get(phase)).copied();
            time.ok_or_else(|| InputError::value(format!("{passes}, {mode}, {phase}"), "is missing", "a time"))
        };
        let forward = of("forward")?;
        if backward { Ok((of("forward+backward")? - forward).max(0.0)) } else { Ok(forward) }
    }
}

/// The layer in "1 PE; 4096 tokens, hidden 7168, 32 experts of 2048 (gated, Silu), top-8", and its tokens.
fn parse_layer(line: &str) -> Option<(LayerConfig, usize)> {
    let size = |text: &str| text.parse().ok().filter(|size| (1..=MAX_SIZE).contains(size));
    let rest = line.strip_prefix("1 PE; ")?;
    let (tokens, rest) = rest.split_once(" tokens, hidden ")?;
    let (hidden, rest) = rest.split_once(", ")?;
    let (experts, rest) = rest.split_once(" experts of ")?;
    let (intermediate, rest) = rest.split_once(" (")?;
    let (kind, top_k) = rest.split_once("), top-")?;
    let mlp = match kind {
        "gated, Silu" => MlpConfig::gated(size(intermediate)?, Activation::Silu),
        _ => return None,
    };
    let (tokens, experts, top_k) = (size(tokens)?, size(experts)?, size(top_k)?);
    let config = LayerConfig::new(size(hidden)?, experts, RouterConfig::softmax(top_k), mlp);
    let steps = tokens.checked_mul(top_k)?.checked_mul(experts)?;
    (top_k <= experts && steps <= MAX_STEPS).then_some((config, tokens))
}
