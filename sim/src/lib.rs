//! Models of Mixture-of-Experts training, in virtual time.
//!
//! - [`linear`]: FLOP and data movement of a linear layer;
//! - [`comms`]: an all-to-all exchange over a full mesh, in rounds;
//! - [`routing`]: which experts tokens go to: files, made-up routing, and the loads that follow;
//! - [`network`]: an alpha-beta network with contention at the NICs;
//! - [`step`]: a step of an MoE layer, event by event;
//! - [`sweep`]: data, horizontal, pipeline and expert parallelism of an MLP.
//!
//! `docs/simulator.md` says what each model assumes and where it comes from.

pub mod comms;
pub mod linear;
pub mod network;
pub mod routing;
pub mod step;
pub mod sweep;
pub mod timeline;
