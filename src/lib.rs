//! Aristos: a Mixture-of-Experts (MoE) runtime. Processing elements (PEs) exchange tokens by one-sided puts and signals, so that experts compute on
//! tokens that have arrived while others are in flight. Forward and backward.
//!
//! The modules, from the bottom up. A module depends on modules above it in this list only:
//!
//! - [`shmem`] (package `aristos-shmem`): one-sided communication, a trait and its transports;
//! - `gpu` (features `cuda`, `emulate`): devices, their memory, and launches of the kernels in `kernels/`;
//! - [`moe`]: the layer: router, dispatch, experts, combine, and their backward; its CPU kernels are the package `aristos-cpu-kernels`;
//! - [`checkpoint`]: reads Hugging Face checkpoints, writes result files;
//! - [`check`]: a dense float64 reference that shares no code with the layer;
//! - [`job`]: requests, and the PEs that execute them: processes, launchers, TCP, MPI;
//! - [`stdio`]: standard output and standard error; [`out_of_memory`]: the end after a failed allocation;
//! - [`formats`] (package `aristos-formats`): files, with [`cluster`]: devices and links;
//! - [`plan`] (package `aristos-plan`): the planner of groups and placement;
//! - [`probe`]: measures a cluster over a transport;
//! - [`sim`] (package `aristos-sim`): models of layers, networks and steps in virtual time.
//!
//! With the feature `command`, which is a default feature:
//!
//! - `report`: tables, JSON and traces; `plot`: plots;
//! - `bench`: benchmarks;
//! - `doctor`: checks this machine for the requirements of each kind of run;
//! - `run`: steps of a layer; `simulate`: the same in virtual time;
//! - `cli`: one thin file per subcommand.

// `println!` panics on a full disk or a closed pipe: see `stdio`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(feature = "command")]
pub mod bench;
pub mod check;
pub mod checkpoint;
#[cfg(feature = "command")]
#[allow(unnameable_types, reason = "arguments are for clap")]
pub mod cli;
#[cfg(feature = "command")]
pub mod doctor;
#[cfg(feature = "device")]
pub mod gpu;
pub mod job;
pub mod moe;
pub mod out_of_memory;
#[cfg(feature = "command")]
pub mod plot;
pub mod probe;
#[cfg(feature = "command")]
pub mod report;
#[cfg(feature = "command")]
pub mod run;
#[cfg(feature = "command")]
pub mod simulate;
pub mod stdio;

pub use aristos_formats as formats;
pub use aristos_formats::cluster;
pub use aristos_plan as plan;
pub use aristos_shmem as shmem;
pub use aristos_sim as sim;
pub use aristos_strategy as strategy;
