//! Strategies for training a whole model: pipeline stages, expert-parallel groups inside a stage, and data parallelism.
//!
//! A stage is a block of consecutive devices, and an expert-parallel (EP) group a block inside a stage. Experts have a replica in each group of their stage;
//! all other weights of a stage are on each of its devices. [`search`] returns the strategies that fit into memory, the fastest first; [`Memory`] is what one
//! takes on a device. `docs/planner.md` has the formulas.

mod memory;
mod search;
mod time;
mod training;

pub use memory::Memory;
pub use search::{Limits, Strategy, search};
pub use time::{Bottleneck, Time};
pub use training::{Optimizer, Shape, Training};
