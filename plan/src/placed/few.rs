//! The longest group of a grouping annealed again with few others.
//!
//! When the annealing of all groups has become cold, hardly a change of the longest group is taken any more. Of a few groups alone a short annealing
//! that begins a little warmer still finds better ones, as in POPMUSIC (Taillard and Voß 2002, "POPMUSIC: partial optimization metaheuristic under
//! special intensification conditions").

use super::Placed;
use super::relaxed::{Chain, WARM};
use super::search::{FoundPlaced, longest};
use crate::cluster::LinkTable;
use crate::random::Random;

/// So many groups are annealed, the longest and others.
const FEW: usize = 3;
/// What is gained by less, as a share, is nothing.
const LITTLE: f64 = 1e-6;

/// The longest group and others annealed again, each time with `budget`, and their placement `improved`, until as often as there are groups nothing has
/// come of it.
pub(super) fn again<L: LinkTable>(
    placed: &Placed<L>,
    exponential: &[f64],
    (mut found, whole): (FoundPlaced, bool),
    budget: u64,
    mut random: Random,
    improved: impl Fn(FoundPlaced) -> FoundPlaced,
) -> FoundPlaced {
    let mut in_vain = 0;
    while found.groups.len() > 1 && in_vain < found.groups.len() {
        in_vain += 1;
        let few = longest_and_others(&found, &mut random);
        let groups = few.iter().map(|&g| found.groups[g].clone()).collect();
        let placements = few.iter().map(|&g| found.placements[g].clone()).collect();
        let start = FoundPlaced::new(placed, groups, placements);
        let mut chain =
            Chain::new(placed, (&start, whole), WARM, budget, Random(random.below(u32::MAX as usize) as u64));
        chain.advance(exponential, 1.0);
        let Some(best) = chain.into_best().map(&improved) else { continue };
        let shorter = longest_ms(&best) < longest_ms(&start) * (1.0 - LITTLE);
        let (mut groups, mut placements) = (best.groups, best.placements);
        for g in (0..found.groups.len()).filter(|g| !few.contains(g)) {
            groups.push(found.groups[g].clone());
            placements.push(found.placements[g].clone());
        }
        let all = FoundPlaced::new(placed, groups, placements);
        // Others may take as long as the longest did.
        if shorter && all.objective_ms <= found.objective_ms {
            (found, in_vain) = (all, 0);
        }
    }
    found
}

fn longest_ms(found: &FoundPlaced) -> f64 {
    found.times[longest(&found.times)].ms()
}

/// The number of the group that takes longest, and those of others.
fn longest_and_others(found: &FoundPlaced, random: &mut Random) -> Vec<usize> {
    let mut few = vec![longest(&found.times)];
    let mut others: Vec<usize> = (0..found.groups.len()).filter(|g| *g != few[0]).collect();
    while few.len() < FEW && !others.is_empty() {
        few.push(others.swap_remove(random.below(others.len())));
    }
    few
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;
    use crate::cluster::{Cluster, Device, Links, Matrix};
    use crate::objective::Problem;
    use crate::search::exponential;

    /// Five groups, more than are annealed at once.
    #[test]
    fn a_few_at_a_time_groups_become_better() {
        let mut random = Random(5);
        let mut links = || (0..400).map(|_| 0.01 * (1 + random.below(100)) as f64).collect::<Vec<f64>>();
        let devices = (0..20).map(|id| Device::new(id, "a", 1e9, 12)).collect();
        let cluster = Cluster::new(devices, Links::Matrix(Matrix::new(20, links(), links())));
        let workload = Workload { p2p_buffer_mb: 0.5, p2p_frequency: 2.0, ..Workload::new(vec![1e8; 12]) };
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        let groups: Vec<Vec<u32>> = (0..5).map(|g| (4 * g..4 * g + 4).collect()).collect();
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let start = FoundPlaced::new(&placed, groups, placements);
        let found = again(&placed, &exponential(), (start.clone(), false), 100_000, Random(1), |found| found);
        let [before, after] = [&start, &found].map(longest_ms);
        assert!(after < 0.8 * before && found.objective_ms < start.objective_ms, "{after} {before}");
        let mut devices = found.groups.concat();
        devices.sort_unstable();
        assert_eq!(devices, (0..20).collect::<Vec<u32>>());
        for placement in &found.placements {
            let mut held = placement.concat();
            held.sort_unstable();
            assert_eq!(held, (0..12).collect::<Vec<u32>>());
        }
        let changed = (0..5).filter(|&g| found.groups[g] != start.groups[g]).count();
        assert!(changed > FEW, "of {changed} groups the devices are others");
        let anew = FoundPlaced::new(&placed, found.groups, found.placements);
        assert_eq!(anew.objective_ms, found.objective_ms);
    }
}
