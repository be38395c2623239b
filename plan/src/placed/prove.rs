//! Proof of optimality on small clusters: what each set of devices takes at least, by branch and bound over placements, then
//! `crate::exact` over the sets.

use super::{Known, Placed};
use crate::bound::Bounds;
use crate::cluster::Matrix;
use crate::exact::{Improvement, devices, improve_by};

/// Most devices: every set of them is looked at.
pub(super) const MOST_DEVICES: usize = 12;
/// Links that annealing a placement looks at before branch and bound.
const ANNEALED: u64 = 4_000;

/// Looks for a better grouping and placement than `known_ms`, in at most about `nodes` nodes of branch and bound and `steps` steps over sets.
/// `known` collects the placements.
pub(crate) fn prove(
    placed: &Placed<Matrix>,
    bounds: &Bounds,
    known_ms: f64,
    allow_idle: bool,
    (nodes, steps): (u64, u64),
    known: &mut Known,
) -> Improvement {
    let problem = placed.problem;
    let n = problem.n();
    if n > MOST_DEVICES {
        return Improvement { better: None, complete: false };
    }
    let all = (1u32 << n) - 1;
    let (mut complete, mut left) = (true, nodes.max(1));
    let mut work = vec![f64::INFINITY; 1 << n];
    // gamma is least with all devices.
    let limit = known_ms / problem.gamma(n);
    for set in 1..=all {
        let members = devices(set);
        if !problem.valid(&members) || placed.least_ms(&members) >= limit {
            continue;
        }
        let Some(dealt) = placed.dealt(&members) else { continue };
        let (improved, rest) = placed.improved_below(&members, dealt, limit, ANNEALED, left);
        left = rest;
        complete &= rest > 0;
        work[set as usize] = improved.1.ms();
        known.insert(members, improved);
    }
    let found = improve_by(problem, work, &|_| 0.0, bounds, known_ms, allow_idle, steps);
    Improvement { better: found.better, complete: found.complete && complete }
}
