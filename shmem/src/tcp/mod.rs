//! The transport over TCP: PEs on any number of hosts, without MPI.
//!
//! Every PE has its heap in its own memory, a connection to each other PE, and a progress thread that reads what comes: the data of a
//! put goes from the socket to its final place in the heap, then the signal word is updated, and who waits for it is woken. A PE may
//! compute meanwhile; it takes part in nobody else's operations.
//!
//! # What gives which order
//! - **put, put_nbi, put_signal, signals** are one frame each (`frame.rs`). The caller writes it, header and data in one call, as far as the
//!   socket takes it at once; the progress thread writes the rest: of a put a copy, of a put_nbi the heap's own bytes. So issuing returns
//!   at once, unless 64 MiB wait for the peer already.
//! - **fence** is free: TCP keeps the order of what is sent to a peer, and the peer carries frames out in their order.
//! - **quiet** waits until each peer has carried out what was sent to it. Every header says how many frames of the receiver its sender has
//!   carried out; where that is too old, quiet asks, once for each peer.
//! - **get, fetch_add** are a question and an answer, which the target's progress thread gives. An answer is queued before the question
//!   counts as carried out, so that quiet waits for answers too.
//! - Signals and fetch_add are atomics on the words themselves, by the progress thread as by the PE.
//! - Within a host, where [`TcpTransport::hybrid`] maps the heaps, everything is as over shared memory ([`crate::ShmTransport`]): loads and stores
//!   by the PE itself, and no frames.
//!
//! # Peers
//! A frame is untrusted: what it names must lie in the heap, an answer must be to a question; otherwise its sender is lost. A PE is lost
//! too when its connection ends without a farewell (its process has ended), when its host acknowledges nothing for too long ([`JoinLimits::silence`]), when it has not
//! answered a get, or a quiet, within the transport's limit, or says nothing after a wait for it was in vain (it is stopped). The first PE
//! that is lost ends all waits, with an error that names it; a PE that ends for that says so to the others, who name the same.
//!
//! Data and token travel as they are, not encrypted: the network between the hosts is taken to be the cluster's own.

mod error;
mod frame;
mod inbox;
mod join;
mod mesh;
mod near;
mod outbox;
mod places;
mod progress;
mod silence;
#[cfg(all(test, not(miri)))] // Miri has no sockets.
mod tests;
mod transport;
mod world;

pub use error::TcpError;
pub use join::{JoinLimits, Joining};
pub use transport::TcpTransport;
pub use world::TcpWorld;

// What the transport over libfabric has in common with this one: who meets, and who is lost.
#[cfg(feature = "ofi")]
pub(crate) use {
    mesh::{Mesh, lock},
    world::{Running, Watch},
};
