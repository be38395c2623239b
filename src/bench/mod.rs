//! Benchmarks: what the machine gives, and what of it the layer makes use of.
//!
//! | command | measured by | reported by |
//! |---|---|---|
//! | `bench moe` | [`moe`] | `moe_summary` |
//! | `bench p2p` | [`p2p::host`], and `p2p::device` | [`p2p::report`] |
//! | `bench summary` | `aristos run`'s layer | [`kernel_summary`] |
//! | `bench straggler` | [`straggler::pe`] | [`straggler::report`] |

pub mod kernel_summary;
pub mod moe;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub mod moe_device;
mod moe_summary;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "mpi")]
pub mod mpi_baseline;
pub mod p2p;
pub mod probe;
pub mod straggler;

pub use moe_summary::{LayerResult, MeasurementResult, MoeSummary, PeSpread, Ratio, Setting, Stats, samples_csv};

use crate::launch::{PeContext, StatusPage};

/// Where a PE of a benchmark says what it is doing, and what it sends its measurements by.
pub struct BenchHost<'h> {
    /// For whoever shows progress.
    pub status: &'h StatusPage,
    /// Sends a message to who prints the report.
    pub send: &'h dyn Fn(&[u8]) -> anyhow::Result<()>,
}

/// Works as a PE that a supervisor started.
pub fn supervised<R>(context: &PeContext, work: impl FnOnce(&BenchHost<'_>) -> R) -> R {
    work(&BenchHost { status: context.status(), send: &|body| Ok(context.send(body)?) })
}
