//! The layer on a CPU: router, dispatch, experts, combine; forward and backward, over one-sided communication.
//!
//! The entry point is [`Layer`]. `docs/protocol.md` describes the messages between PEs.

mod blocks;
mod counts;
mod engine;
pub mod experts;
mod layer;
mod memory;
mod moves;
mod pass;
mod relay;
mod replicas;
pub mod router;
mod weights;

pub use aristos_cpu_kernels as kernels;
pub use engine::Saved;
pub use layer::{Layer, LayerBuilder};
pub use pass::BorrowedGradients;
pub use replicas::{Exchange, OneGroup, Replicas, replica_bytes};
