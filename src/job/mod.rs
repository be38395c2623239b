//! A job: a request, the PEs that carry it out, and what they send.
//!
//! - [`request`]: what the PEs are asked to do, and how it travels to them;
//! - [`launch`]: the processes of the PEs, and the launchers that start them;
//! - [`peers`]: PEs that something else started, on several hosts too: over MPI (`mpi`), or over TCP ([`tcp`]);
//! - [`host`]: what a PE sees, whoever started it;
//! - [`messages`]: what the PEs send, collected;
//! - `device`: the device of a PE; [`heap`]: the symmetric memory of NVSHMEM where it must be known at the start.
//!
//! Nothing here knows a flag, or what a request means: `cli` makes it, `run` and `bench` carry it out.

#[cfg(feature = "mpi")]
mod addresses;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub mod device;
mod error;
pub mod heap;
pub mod host;
pub mod launch;
pub mod messages;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod peers;
pub mod request;
pub mod tcp;

pub use error::{JobError, PeFailure};
