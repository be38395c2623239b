//! The control plane: how the ranks of a job find each other and prove that they belong to it, and the frames in which processes of a job
//! talk to each other outside of the data path.
//!
//! Each rank calls an acceptor, at a TCP address ([`crate::tcp`]) or at a Unix socket with an abstract name. Both sides prove that they know
//! the job's token, the acceptor first:
//!
//! | frame | from | body |
//! |---|---|---|
//! | `Join` | caller | its [`Hello`]: version, rank, program, a nonce |
//! | `Challenge` | acceptor | its proof over the hello and its nonce; the nonce |
//! | `Proof` | caller | its proof over the hello and the acceptor's nonce |
//! | `Accepted` | acceptor | its proof that the caller is admitted |
//! | `Refused` | acceptor | its proof, and why, instead of either of its frames |
//!
//! A proof is HMAC-SHA256 under a key made of the token ([`Key`]), so the token never travels. Both nonces are new for each connection, so a
//! recorded proof is worth nothing in another one, and the two sides' proofs differ, so a proof cannot be sent back to its maker. Every wait
//! has a deadline for the whole frame. An acceptor without a valid proof is not the one that the caller looks for: the caller tries again,
//! for [`UNPROVEN_LIMIT`] at most.
//!
//! A process that connects and does not belong to the job is refused or closed, and delays no rank ([`Gate`]).

mod call;
pub mod frame;
mod gate;
mod hello;
mod key;
pub mod local;

pub use call::{Attempt, CallError, Introduction, Link, UNPROVEN_LIMIT, call};
pub use gate::{Gate, Joined};
pub use hello::{Hello, MAX_TEXT_BYTES, Session, VERSION};
pub use key::{Key, Nonce, Proof, Side};
