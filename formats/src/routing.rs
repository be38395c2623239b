//! Routing files: the experts of each token, by layer and step, synthetic or recorded.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::InputError;
use crate::json::{Count, parse_json, read_text};

/// Version of the files.
const VERSION: u64 = 1;
/// Maximum number of experts.
pub const EXPERTS_MOST: u64 = 1 << 16;
/// Maximum number of nodes.
pub const NODES_MOST: usize = 1 << 16;
/// Maximum number of choices in a file, over all tokens, layers and steps: 2 GiB.
pub const CHOICES_MOST: usize = 1 << 28;

/// A choice without an expert, because of a capacity limit.
pub const NO_EXPERT: u32 = u32::MAX;

/// The routing of some steps of some layers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Routing {
    /// Experts of each layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Nodes, or PEs, where the tokens start.
    pub nodes: usize,
    /// By step and layer.
    pub records: Vec<Record>,
}

/// The routing of one step of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Layer number.
    pub layer: u64,
    /// Step number.
    pub step: u64,
    /// Number of tokens of each node; those of the first node come first.
    pub tokens_per_node: Vec<usize>,
    /// The experts of each token: `top_k` different ones, or [`NO_EXPERT`].
    pub choices: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRouting {
    version: Count,
    experts: Count,
    top_k: Count,
    nodes: Count,
    records: Vec<RawRecord>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRecord {
    layer: Count,
    step: Count,
    tokens_per_node: Vec<Count>,
    choices: Vec<i64>,
}

#[derive(Serialize)]
struct Written<'a> {
    version: u64,
    experts: usize,
    top_k: usize,
    nodes: usize,
    records: Vec<WrittenRecord<'a>>,
}

#[derive(Serialize)]
struct WrittenRecord<'a> {
    layer: u64,
    step: u64,
    tokens_per_node: &'a [usize],
    choices: Vec<i64>,
}

impl Routing {
    /// The routing of these records, which must satisfy the checks of [`Routing::read`].
    pub fn new(experts: usize, top_k: usize, nodes: usize, records: Vec<Record>) -> Routing {
        Routing { experts, top_k, nodes, records }
    }

    /// Reads a routing file.
    ///
    /// # Errors
    /// Returns an error that names the file, the path in it, the value, and the values allowed.
    pub fn read(path: &Path) -> Result<Routing, InputError> {
        Routing::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses a routing from JSON text.
    ///
    /// # Errors
    /// Those of [`Routing::read`], without the file.
    pub fn from_json(text: &str) -> Result<Routing, InputError> {
        let raw: RawRouting = parse_json(text)?;
        if raw.version.0 != VERSION {
            return Err(InputError::value("version", format!("is {}", raw.version.0), VERSION.to_string()));
        }
        let between = |count: Count, most: u64, field: &str| match count.0 {
            count if (1..=most).contains(&count) => Ok(count as usize),
            count => Err(InputError::value(field, format!("is {count}"), format!("1 to {most}"))),
        };
        let experts = between(raw.experts, EXPERTS_MOST, "experts")?;
        let top_k = between(raw.top_k, experts as u64, "top_k")?;
        let nodes = between(raw.nodes, NODES_MOST as u64, "nodes")?;
        if raw.records.is_empty() {
            return Err(InputError::value("records", "is empty", "at least one"));
        }
        let record = |(r, raw): (usize, RawRecord)| record(r, raw, experts, top_k, nodes);
        let records = raw.records.into_iter().enumerate().map(record).collect::<Result<_, _>>()?;
        Ok(Routing { experts, top_k, nodes, records })
    }

    /// The routing as JSON text, a record per line.
    pub fn to_json(&self) -> String {
        let choice = |&expert: &u32| if expert == NO_EXPERT { -1 } else { i64::from(expert) };
        let record = |record: &Record| {
            let choices = record.choices.iter().map(choice).collect();
            let (layer, step) = (record.layer, record.step);
            let written = WrittenRecord { layer, step, tokens_per_node: &record.tokens_per_node, choices };
            serde_json::to_string(&written).expect("numbers only")
        };
        let Routing { experts, top_k, nodes, .. } = *self;
        let head = Written { version: VERSION, experts, top_k, nodes, records: Vec::new() };
        let head = serde_json::to_string(&head).expect("numbers only");
        let records = self.records.iter().map(record).collect::<Vec<_>>().join(",\n");
        format!("{}\n{records}\n]}}", head.trim_end_matches("]}"))
    }

    /// Tokens of each expert, over all layers and steps.
    pub fn tokens_per_expert(&self) -> Vec<f64> {
        let mut tokens = vec![0.0; self.experts];
        for &expert in self.records.iter().flat_map(|record| &record.choices) {
            if expert != NO_EXPERT {
                tokens[expert as usize] += 1.0;
            }
        }
        tokens
    }

    /// Checks that the routing fits a model.
    ///
    /// # Errors
    /// Returns an error that names the difference.
    pub fn check_model(&self, experts: usize, top_k: usize) -> Result<(), InputError> {
        for (field, here, there) in [("experts", self.experts, experts), ("top_k", self.top_k, top_k)] {
            if here != there {
                return Err(InputError::value(field, format!("is {here}"), format!("{there}, the model's")));
            }
        }
        Ok(())
    }
}

impl Record {
    /// The choices of each node's tokens.
    pub fn choices_by_node(&self, top_k: usize) -> impl Iterator<Item = (usize, &[u32])> {
        let mut at = 0;
        self.tokens_per_node.iter().enumerate().map(move |(node, tokens)| {
            let from = at;
            at += tokens * top_k;
            (node, &self.choices[from..at])
        })
    }
}

fn record(r: usize, raw: RawRecord, experts: usize, top_k: usize, nodes: usize) -> Result<Record, InputError> {
    let wrong = |field: String, found: String, expected: String| {
        Err(InputError::value(format!("records[{r}].{field}"), found, expected))
    };
    if raw.tokens_per_node.len() != nodes {
        let found = format!("has {} numbers", raw.tokens_per_node.len());
        return wrong("tokens_per_node".into(), found, format!("{nodes}, one per node"));
    }
    let sum = raw.tokens_per_node.iter().fold(0u64, |sum, tokens| sum.saturating_add(tokens.0));
    if sum.saturating_mul(top_k as u64) != raw.choices.len() as u64 {
        let found = format!("has {} numbers", raw.choices.len());
        return wrong(
            "choices".into(),
            found,
            format!("{} ({sum} tokens, top_k {top_k})", sum.saturating_mul(top_k as u64)),
        );
    }
    let mut choices = Vec::with_capacity(raw.choices.len());
    for (at, &choice) in raw.choices.iter().enumerate() {
        let expert = match choice {
            -1 => NO_EXPERT,
            choice if (0..experts as i64).contains(&choice) => choice as u32,
            choice => {
                let expected = format!("an expert from 0 to {}, or -1 for none", experts - 1);
                return wrong(format!("choices[{at}]"), format!("is {choice}"), expected);
            }
        };
        let before = &choices[at - at % top_k..];
        if expert != NO_EXPERT && before.contains(&expert) {
            let expected = format!("another expert: token {} has it already", at / top_k);
            return wrong(format!("choices[{at}]"), format!("is {choice}"), expected);
        }
        choices.push(expert);
    }
    let tokens_per_node = raw.tokens_per_node.iter().map(|tokens| tokens.0 as usize).collect();
    Ok(Record { layer: raw.layer.0, step: raw.step.0, tokens_per_node, choices })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"version": 1, "experts": 4, "top_k": 2, "nodes": 2, "records": [
        {"layer": 3, "step": 7, "tokens_per_node": [2, 1], "choices": [0, 3, 2, 1, 0, -1]}]}"#;

    #[test]
    fn small_file_is_read_and_written() {
        let routing = Routing::from_json(SMALL).unwrap();
        assert_eq!(routing.tokens_per_expert(), [2.0, 1.0, 1.0, 1.0]);
        assert_eq!(Routing::from_json(&routing.to_json()).unwrap(), routing);
    }

    #[test]
    fn bad_files_are_reported_in_one_line() {
        let error = |from: &str, to: &str| {
            let text = SMALL.replace(from, to);
            assert_ne!(text, SMALL);
            Routing::from_json(&text).unwrap_err().to_string()
        };
        assert_eq!(error("\"version\": 1", "\"version\": 2"), "version is 2, expected 1");
        assert_eq!(error("\"top_k\": 2", "\"top_k\": 5"), "top_k is 5, expected 1 to 4");
        assert_eq!(error("\"experts\": 4", "\"experts\": 0"), "experts is 0, expected 1 to 65536");
        assert_eq!(error("[2, 1]", "[3]"), "records[0].tokens_per_node has 1 numbers, expected 2, one per node");
        let error_ = error("[2, 1]", "[3, 1]");
        assert_eq!(error_, "records[0].choices has 6 numbers, expected 8 (4 tokens, top_k 2)");
        assert!(error("[2, 1]", "[1e15, 1e15]").starts_with("records[0].choices has 6 numbers"));
        let error_ = error("[0, 3,", "[0, 4,");
        assert_eq!(error_, "records[0].choices[1] is 4, expected an expert from 0 to 3, or -1 for none");
        let error_ = error("2, 1, 0", "2, 2, 0");
        assert_eq!(error_, "records[0].choices[3] is 2, expected another expert: token 1 has it already");
        assert!(error("[0, 3,", "[0, NaN,").contains("`NaN` is not JSON"));
        assert!(error("\"step\": 7", "\"step\": -7").starts_with("records[0].step: "));
        let empty = r#"{"version": 1, "experts": 4, "top_k": 2, "nodes": 2, "records": []}"#;
        assert_eq!(Routing::from_json(empty).unwrap_err().to_string(), "records is empty, expected at least one");
        let routing = Routing::from_json(SMALL).unwrap();
        assert_eq!(routing.check_model(8, 2).unwrap_err().to_string(), "experts is 4, expected 8, the model's");
        assert_eq!(routing.check_model(4, 1).unwrap_err().to_string(), "top_k is 2, expected 1, the model's");
    }
}
