//! The transport over TCP: PEs on any number of hosts, without MPI.
//!
//! Every PE has its heap in its own memory, a connection to each other PE, and a progress thread that reads all connections: the data of a
//! put is received at its final place in the heap, then the signal word is updated, and threads that wait for it are woken. The target PE
//! computes meanwhile; it takes no part in the operation.
//!
//! # Order
//! - **put, put_nbi, put_signal, signals** are one frame each (`frame.rs`). The caller writes header and data in one call, as far as the
//!   socket has room; the progress thread writes the rest, from a copy for put, from the heap itself for put_nbi. Issuing an operation
//!   therefore does not block, unless 64 MiB are queued for the peer.
//! - **fence** is free: TCP preserves the order of frames, and the peer carries them out in order.
//! - **quiet** waits until each peer has carried out all frames sent to it. Every header carries the number of the receiver's frames that its
//!   sender has carried out; if that number is too old, quiet queries the peer once.
//! - **get, fetch_add** are a question and an answer, which the target's progress thread sends. The answer is queued before the question
//!   counts as carried out, so that quiet waits for answers too.
//! - Signals and fetch_add are atomic operations on the words themselves, from the progress thread and from the PE alike.
//! - Within a host, if [`TcpTransport::hybrid`] has mapped the heaps, all operations are the loads and stores of [`crate::ShmTransport`], without
//!   frames.
//!
//! # Peers
//! Frames are untrusted: offsets must lie in the heap, and an answer must belong to a question; otherwise the sender is lost. A PE is also
//! lost when its connection ends without a farewell (its process has ended), when its host sends no acknowledgement for
//! [`JoinLimits::silence`], when it has not answered a get or a quiet within the transport's limit, or when it does not answer a query after a
//! wait timed out (it is stopped). The first lost PE ends all waits, with an error that names it; a PE that ends for that reason reports it to
//! the others, which name the same PE.
//!
//! PEs prove themselves to each other when they connect ([`crate::control`]). The data after that is not encrypted: the network is assumed to
//! be the cluster's own.

mod error;
mod frame;
mod inbox;
mod intra_host;
mod join;
mod liveness;
mod mesh;
mod outbox;
mod places;
mod progress;
#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;
mod transport;
mod world;

pub use error::TcpError;
pub use join::{JoinLimits, Joining, listen_anywhere};
pub use transport::TcpTransport;
pub use world::TcpWorld;

// Shared with the transport over libfabric: the rendezvous and the detection of lost PEs.
#[cfg(feature = "ofi")]
pub(crate) use {
    mesh::{Mesh, lock},
    world::{Running, Watch},
};
