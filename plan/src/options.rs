//! Options of the planner.

use serde::{Deserialize, Serialize};

/// How to choose the groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Search; and proof where the cluster is small.
    #[default]
    Auto,
    /// Search and proof, or an error.
    Exact,
    /// Search alone, with a bound on the gap.
    Search,
    /// Lysi, the published algorithm, for comparison.
    Lysi,
}

/// How to place the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlacementKind {
    /// The least time of the group; by the published objective, the least makespan.
    Auto,
    /// Lysi's placement, for comparison.
    Lysi,
}

/// The objective that a plan minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Objective {
    /// The time of an iteration with experts whole and where they are, and every group's own tokens.
    #[default]
    Placed,
    /// Equation (1) of the Lysi poster, which spreads the experts' work over a group as if they could be cut, for comparison.
    Published,
}

/// Options of the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// How to choose the groups.
    pub algorithm: Algorithm,
    /// What to minimise; by default [`Objective::Placed`], and with [`Algorithm::Lysi`], which minimises that, [`Objective::Published`].
    pub objective: Option<Objective>,
    /// How to place the experts; by default Lysi's way with [`Algorithm::Lysi`], else the best.
    pub placement: Option<PlacementKind>,
    /// Whether devices may be left out.
    pub allow_idle: bool,
    /// How many times the usual effort the search may take; 0 counts as 1.
    pub effort: u32,
    /// Replicas of experts, where they lower the placed objective; by default none.
    pub replicas: Option<Replication>,
}

impl Options {
    /// The groups chosen so.
    pub fn algorithm(self, algorithm: Algorithm) -> Options {
        Options { algorithm, ..self }
    }

    /// What is minimised.
    pub fn minimised(self) -> Objective {
        self.objective.unwrap_or(match self.algorithm {
            Algorithm::Lysi => Objective::Published,
            _ => Objective::Placed,
        })
    }

    /// To minimise this.
    pub fn objective(self, objective: Objective) -> Options {
        Options { objective: Some(objective), ..self }
    }

    /// The experts placed so, whatever chooses the groups.
    pub fn placement(self, placement: PlacementKind) -> Options {
        Options { placement: Some(placement), ..self }
    }

    /// Whether devices may be left out.
    pub fn allow_idle(self, allow_idle: bool) -> Options {
        Options { allow_idle, ..self }
    }

    /// With replicas of experts.
    pub fn replicas(self, replication: Replication) -> Options {
        Options { replicas: Some(replication), ..self }
    }

    /// A search of this many times the usual effort.
    pub fn effort(self, effort: u32) -> Options {
        Options { effort, ..self }
    }
}

pub(crate) fn placement_kind(options: Options) -> PlacementKind {
    options.placement.unwrap_or(match options.algorithm {
        Algorithm::Lysi => PlacementKind::Lysi,
        _ => PlacementKind::Auto,
    })
}

/// Replicas that a plan may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Replication {
    /// As many as the devices' memory holds.
    Auto,
    /// At most this many on a device in addition to its experts, and at most as many as its memory holds.
    AtMost(u64),
}
