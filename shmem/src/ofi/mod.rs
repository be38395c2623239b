//! The transport over libfabric: PEs on any number of hosts, using remote memory access of any network with a libfabric
//! provider.
//!
//! The PEs join over TCP with the job's token ([`crate::tcp::TcpWorld`]) and keep those connections for agreement, messages and
//! supervision, which detects lost PEs. The layer's data goes through libfabric: each PE registers its heap, sends its
//! endpoint's address and the heap's key to the others, and takes no part in their operations.
//!
//! # Ordering
//! - **put, put_nbi** are `fi_write`, of a copy and of the heap's own bytes, with `FI_DELIVERY_COMPLETE`: a completed write is
//!   in the target's memory.
//! - **put_signal** is a write and, after its completion, an atomic on the signal word. The signal cannot overtake its data,
//!   whatever path a provider uses, and no put waits for another one. The PE continues meanwhile; the thread that polls the
//!   write's completion posts the signal.
//! - **Signals** are `fi_atomic` with `FI_ATOMIC_WRITE` or `FI_SUM` of one 64-bit word, atomic with respect to each other and
//!   to `fi_fetch_atomic`. A PE also signals itself through libfabric, because a processor's atomics and a network card's may
//!   not be atomic with respect to each other.
//! - **fence** makes the next operation on each PE wait until all earlier ones have completed. `FI_FENCE` and message ordering
//!   (`FI_ORDER_WAW`) are not used, because not all providers have them.
//! - **quiet** waits for all completions. **get** is `fi_read` into a buffer owned by the operation, so that a late answer may
//!   still write it after the caller has stopped waiting.
//!
//! # Progress
//! A thread of each PE polls the completion queue when its descriptor is ready: it posts signals whose data has arrived,
//! retries operations that a provider had no room for, and progresses other PEs' operations on this PE's memory where software
//! performs them (`tcp;ofi_rxm`). A waiting PE polls too. If a network card writes signals, no thread wakes a waiter, so a wait
//! sleeps for some microseconds between polls.
//!
//! # Peers
//! The heap's key is random if the provider lets the application choose it: a stranger must know it to access a heap. A failed
//! operation marks its PE as lost, after the TCP connections have had half a second to name another PE.

mod engine;
mod error;
mod exit;
mod ffi;
#[cfg(all(test, not(miri)))] // Miri has no libfabric.
mod tests;
mod transport;

pub use error::OfiError;
pub use transport::{OfiTransport, PROVIDERS};
