//! Errors of the reference.

use thiserror::Error;

use crate::moe::{ConfigError, WeightError};

/// An error of the reference, one line.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A weight cannot be loaded.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// An input has a wrong length, or gives a logit that is not finite.
    #[error("{0}")]
    Input(String),
    /// The layer chose an expert that the router's rules do not allow: the token, the expert and the scores.
    #[error("{0}")]
    Choice(String),
}
