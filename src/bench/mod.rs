//! Benchmarks of the machine and of the layer.
//!
//! | command | measured by | reported by |
//! |---|---|---|
//! | `bench moe` | [`moe`], `moe_device` | `moe_summary` |
//! | `bench p2p` | [`p2p::host`], and `p2p::device` | [`p2p::report`] |
//! | `bench summary` | `aristos run`'s layer | [`kernel_summary`] |
//! | `bench straggler` | [`straggler::pe`] | [`straggler::report`] |
//!
//! Each has a `run` for a PE's part, which executes the [request](crate::job::request) of the command.

pub mod cpus;
pub mod kernel_summary;
pub mod moe;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub mod moe_device;
pub mod moe_samples;
mod moe_steps;
mod moe_summary;
#[cfg(feature = "mpi")]
pub mod mpi_baseline;
pub mod p2p;
pub mod straggler;

pub use moe_summary::{LayerResult, MeasurementResult, MoeSummary, PeSpread, Ratio, Setting, Stats, samples_csv};
