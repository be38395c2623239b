//! Benchmarks: what the machine gives, and what of it the layer makes use of.

pub mod moe;
mod summary;

pub use summary::{samples_csv, LayerResult, MeasurementResult, MoeSummary, PeSpread, Ratio, Setting, Stats};
