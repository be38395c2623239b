//! The outcome of a search for groups, and the limits that both objectives' searches share.

use crate::objective::Evaluation;
use crate::placement::DeviceExperts;
use crate::search::Found;

/// Number of devices up to which a search takes a fraction of a second. Larger clusters get less effort.
pub(crate) const THOROUGH_DEVICES: f64 = 64.0;
/// Number of devices up to which the proof of optimality takes no longer than the search.
pub(crate) const PROVED_FAST: usize = 11;
/// Relative difference between an objective and the bound that rounding explains.
pub(crate) const EQUAL: f64 = 1e-10;

/// The groups that were chosen.
pub(crate) struct Chosen {
    pub groups: Vec<Vec<u32>>,
    /// By group; `None` if the objective does not depend on placements.
    pub placements: Option<Vec<DeviceExperts>>,
    pub evaluation: Evaluation,
    pub algorithm: &'static str,
    pub optimal: bool,
    /// The lower bound of all groupings, ms.
    pub bound_ms: f64,
    /// The best of other numbers of groups, by objective.
    pub others: Vec<Found>,
    /// The groups of the least published objective found, under another objective.
    pub published: Option<Vec<Vec<u32>>>,
}
