//! Aristos: a Mixture-of-Experts (MoE) runtime whose processing elements (PEs) move tokens with
//! one-sided puts and signals, so that an expert computes on the tokens that have arrived while
//! the others are still on their way. Forward and backward.
//!
//! The modules, from the bottom up; arrows point one way:
//!
//! - [`shmem`], a package of its own, `aristos-shmem`: the one-sided layer, a trait and its transports;
//! - `gpu` (features `cuda`, `emulate`): devices, their memory, and launches of the kernels in `kernels/`;
//! - [`moe`]: the layer: router, dispatch, experts, combine, their backward; its CPU kernels are a package of their own,
//!   `aristos-cpu-kernels`;
//! - [`checkpoint`]: Hugging Face layouts in, result files out;
//! - [`check`]: a dense float64 reference that shares no code with the layer;
//! - [`job`]: a request, the PEs that carry it out, and what they send: processes, launchers, MPI;
//! - [`stdio`]: what is said on standard output and standard error;
//! - [`formats`], a package of its own, `aristos-formats`: files, with [`cluster`]: devices and links;
//! - [`plan`], a package of its own, `aristos-plan`: the planner of groups and placement;
//! - [`probe`]: measures a cluster over a transport;
//! - [`sim`], a package of its own, `aristos-sim`: models of layers, networks and steps in virtual time;
//!
//! With the feature `command`, which is on unless a dependency is declared with `default-features = false`:
//!
//! - `report`: tables, JSON and traces; `plot`: pictures;
//! - `bench`: benchmarks;
//! - `doctor`: what this machine has of what a run needs;
//! - `run`: steps of a layer; `simulate`: the same in virtual time;
//! - `cli`: one thin file per subcommand.

// A full disk or a closed pipe would end the process: see `stdio`.
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
