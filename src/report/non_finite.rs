//! Values of a run that are not finite.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// Maximum entries in a report.
const LISTED: usize = 16;

/// Kinds of values, in the order in which one causes the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFiniteKind {
    /// A row of `hidden_states` or `grad_output`.
    #[default]
    Token,
    /// A weight before the step, or after the update of the step before.
    Weight,
    /// The weights that the router gives the experts of a token.
    Routing,
    /// An auxiliary loss.
    Loss,
    /// A row of `output`.
    Output,
    /// A row of `grad_hidden_states`, or the gradient of a weight.
    Gradient,
}

/// The values of one tensor or loss that are not finite, on one PE in one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NonFinite {
    /// The step, from 0.
    pub step: u64,
    /// Kind of the values.
    pub kind: NonFiniteKind,
    /// Name of the tensor in its file, or of the loss.
    pub name: String,
    /// The PE.
    pub pe: usize,
    /// The layer of the checkpoint; `None` for a synthetic layer.
    pub layer: Option<usize>,
    /// The routed expert of a weight or gradient, or the one expert that all such rows of `output` chose.
    pub expert: Option<usize>,
    /// The token of the first value, for a tensor with a row per token.
    pub token: Option<usize>,
    /// Index of the first value in the token's row or in the weight; 0 for a loss.
    pub index: usize,
    /// The first value: "NaN", "inf" or "-inf".
    pub value: String,
    /// Number of such values.
    pub count: u64,
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NonFinite { step, name, pe, index, value, count, .. } = self;
        match self.kind {
            NonFiniteKind::Loss => write!(f, "the loss {name} is {value}")?,
            _ => {
                write!(f, "{name} has {count} values that are not finite, the first {value} at ")?;
                match self.token {
                    Some(token) => write!(f, "token {token}, column {index}")?,
                    None => write!(f, "element {index}")?,
                }
            }
        }
        let layer = self.layer.map_or_else(String::new, |layer| format!(", layer {layer}"));
        let expert = self.expert.map_or_else(String::new, |expert| format!(", expert {expert}"));
        write!(f, ": step {step}, PE {pe}{layer}{expert}")
    }
}

/// The entries of all PEs, those of the first step first; a loss, which all PEs have, once.
pub(super) fn merge(all: impl Iterator<Item = NonFinite>) -> Vec<NonFinite> {
    let mut all: Vec<NonFinite> = all.collect();
    all.sort_by_key(|one| (one.step, one.kind, one.pe));
    let mut merged: Vec<NonFinite> = Vec::new();
    for one in all {
        let listed = one.kind == NonFiniteKind::Loss && merged.iter().any(|other| other.name == one.name);
        if !listed && merged.len() < LISTED {
            merged.push(one);
        }
    }
    merged
}

/// Reads null, which JSON has in place of NaN and infinities, as NaN.
pub(crate) fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// [`null_is_nan`] for numbers by name.
pub(crate) fn nulls_are_nan<'de, D, M>(deserializer: D) -> Result<M, D::Error>
where
    D: Deserializer<'de>,
    M: FromIterator<(String, f64)>,
{
    let all = std::collections::BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(all.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}
