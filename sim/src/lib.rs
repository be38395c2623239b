//! Models of Mixture-of-Experts training, in virtual time.
//!
//! - [`linear`]: FLOP and data movement of a linear layer;
//! - [`balance`]: ways to balance experts between and inside steps;
//! - [`comms`]: an all-to-all exchange over a full mesh, in rounds;
//! - [`routing`]: synthetic routing, and the loads that a routing causes;
//! - [`network`]: an alpha-beta network with contention at the NICs;
//! - [`roofline`]: the time of a transformer's operations outside its experts;
//! - [`step`]: a step of an MoE layer, event by event;
//! - [`sweep`]: data, horizontal, pipeline and expert parallelism of an MLP.
//!
//! `docs/simulator.md` describes the assumptions of each model and their sources.
//!
//! ```
//! use aristos_sim::comms::{Load, Params, Schedule, exchange};
//!
//! let load = Load::from_json(r#"{"load_bytes": [[0, 1600], [1600, 0]]}"#)?;
//! let time = exchange(&Params::default(), &load, Schedule::Fair, None)?;
//! assert_eq!((time.time_ms, time.rounds), (256.0, 32));
//! # Ok::<(), aristos_formats::InputError>(())
//! ```

pub mod balance;
pub mod comms;
pub mod linear;
pub mod network;
pub mod roofline;
pub mod routing;
pub mod step;
pub mod sweep;
