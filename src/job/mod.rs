//! A job: a request, the PEs that execute it, and their results.
//!
//! - [`request`]: the work of a job's PEs, and its encoding;
//! - [`launch`]: the processes of the PEs, and the launchers that start them;
//! - [`peers`]: PEs without a supervisor, also on several hosts: over MPI (`mpi`), or over TCP ([`tcp`]);
//! - [`host`]: a PE's interface to its job, the same in both cases;
//! - [`messages`]: collects the PEs' messages;
//! - `device`: the device of a PE; [`heap`]: the size of NVSHMEM's symmetric memory, if that is fixed at the start.
//!
//! This module does not depend on command-line flags or on the meaning of a request: `cli` makes requests, and `run` and `bench` execute
//! them.

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
