//! Planning errors.

use aristos_formats::InputError;

/// Why there is neither a plan nor a shortage to report.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// [`Algorithm::Exact`](crate::Algorithm::Exact) was asked for, and optimality cannot be proved in reasonable time.
    #[error(
        "algorithm exact: optimality cannot be proved for these {devices} devices; search finds {found_ms} ms, at most \
         {:.3}% above the least possible",
        100.0 * .gap
    )]
    Unproved {
        /// Number of devices.
        devices: usize,
        /// The objective of the best groups found, ms.
        found_ms: f64,
        /// At most this share above the least possible objective.
        gap: f64,
    },
    /// Invalid input.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The search found no grouping, although all devices together form a valid group.
    #[error("no grouping was found, though all devices together are one")]
    NoGrouping,
}
