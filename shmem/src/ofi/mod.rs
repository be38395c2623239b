//! The transport over libfabric: PEs on any number of hosts, by remote memory access of whatever network a provider of libfabric's drives.
//!
//! The PEs meet over TCP, with the job's token ([`crate::tcp::TcpWorld`]), and keep these connections for agreement, messages and supervision: who is lost is
//! noticed there. What the layer sends goes through libfabric: every PE registers its heap, tells the others its endpoint's address and the heap's key, and
//! from then on takes part in nobody else's operations.
//!
//! # What gives which order
//! - **put, put_nbi** are `fi_write`, of a copy and of the heap's own bytes, with `FI_DELIVERY_COMPLETE`: one that has ended is in the target's memory.
//! - **put_signal** is a write, and when that has ended an atomic of the signal word. So the signal cannot overtake its data, whatever way a
//!   provider takes, and no put waits for another one's. The PE goes on meanwhile: who sees that the write has ended posts the signal.
//! - **Signals** are `fi_atomic` with `FI_ATOMIC_WRITE` or `FI_SUM` of one 64-bit word, atomic to each other and to `fi_fetch_atomic`. The own word is signalled
//!   through libfabric as well: a processor's atomic and a network card's may not know of each other.
//! - **fence** makes the next operation on each PE wait until all before it have ended. Neither `FI_FENCE` nor an order of
//!   messages (`FI_ORDER_WAW`) is asked for, which not all providers have.
//! - **quiet** waits until all has ended. **get** is `fi_read` into a buffer of the operation's own, which a late answer may still write when nobody waits for it.
//!
//! # Progress
//! A thread of each PE polls the completion queue when its descriptor says so: it posts signals whose data is there, retries what a provider had no
//! room for, and moves others' operations on this PE's memory where software does that (`tcp;ofi_rxm`). A PE that waits polls too. Where a network card writes signals nobody
//! wakes who waits: there a wait naps for some microseconds and looks again.
//!
//! # Peers
//! The heap's key is a random number, where the provider lets us choose: to write to a heap a stranger has to know it. An operation that fails loses its PE, after
//! the connections over TCP had half a second to name another.

mod engine;
mod error;
mod exit;
mod ffi;
#[cfg(all(test, not(miri)))] // Miri has no libfabric.
mod tests;
mod transport;

pub use error::OfiError;
pub use transport::{OfiTransport, PROVIDERS};
