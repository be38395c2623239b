//! The font, and the error of the drawing libraries.

use anyhow::anyhow;

pub(super) const FAMILY: &str = "DejaVu Sans";

/// An error of the drawing library.
pub fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}
