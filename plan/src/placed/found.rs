//! A grouping with its placement and times.

use super::{GroupTimes, Placed};
use crate::cluster::LinkTable;
use crate::placement::DeviceExperts;

/// Groups, the placement of the experts in each, and the objective.
#[derive(Clone)]
pub(crate) struct FoundPlaced {
    pub groups: Vec<Vec<u32>>,
    pub placements: Vec<DeviceExperts>,
    pub times: Vec<GroupTimes>,
    pub objective_ms: f64,
}

impl FoundPlaced {
    pub fn new<L: LinkTable>(placed: &Placed<L>, groups: Vec<Vec<u32>>, placements: Vec<DeviceExperts>) -> FoundPlaced {
        let of = |(members, placement): (&Vec<u32>, &DeviceExperts)| placed.placed_times(members, placement);
        let times: Vec<GroupTimes> = groups.iter().zip(&placements).map(of).collect();
        let objective_ms = placed.evaluate(&groups, &times).objective_ms;
        FoundPlaced { groups, placements, times, objective_ms }
    }
}
