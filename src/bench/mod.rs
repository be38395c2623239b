//! Benchmarks: what the machine gives, and what of it the layer makes use of.

pub mod moe;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub mod moe_device;
#[cfg(feature = "mpi")]
pub mod mpi_baseline;
pub mod p2p;
mod summary;

pub use summary::{LayerResult, MeasurementResult, MoeSummary, PeSpread, Ratio, Setting, Stats, samples_csv};
