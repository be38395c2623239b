//! Placement of experts in given groups: annealing from the placement of [`super::deal`], then branch and bound. Also the proof of optimality on small
//! clusters.

use std::collections::HashMap;

use super::branch::{Branch, GroupLinks};
use super::found::FoundPlaced;
use super::joint::{Joint, MOST_DEVICES, Schedule};
use super::{GroupTimes, Placed, PlacedTimes};
use crate::anneal::{Chain, exponential};
use crate::bound::Bounds;
use crate::cluster::{LinkTable, Matrix};
use crate::exact::{Improvement, devices, improve_by};
use aristos_balance::Random;

const SCHEDULE: Schedule = Schedule { under: (0.05, 0.002), temperature: (0.02, 0.0005) };
/// Maximum number of devices for a proof, which evaluates every set of them.
pub(super) const PROVED_MOST: usize = 12;
/// Links that annealing examines for a set of devices in a proof.
const PROOF_ANNEAL: u64 = 4_000;

/// Placements by group.
pub(crate) type Known = HashMap<Vec<u32>, Option<KnownPlacement>>;

/// A known placement of a group.
#[derive(Clone)]
pub(crate) struct KnownPlacement {
    pub placed: PlacedTimes,
    /// Whether annealing and branch and bound have run.
    pub improved: bool,
}

impl<L: LinkTable> Placed<'_, '_, L> {
    /// Improves a group's placement by annealing that examines about `budget` links and by branch and bound of at most `nodes` nodes, which looks for placements
    /// below `least_ms` alone. Also returns the nodes left: if there are any, no placement takes less, or none is below `least_ms`.
    pub fn improved(
        &self,
        members: &[u32],
        (mut placement, times): PlacedTimes,
        least_ms: f64,
        budget: u64,
        nodes: u64,
    ) -> (PlacedTimes, u64) {
        if members.len() > MOST_DEVICES || members.len() == 1 {
            return ((placement, times), if members.len() == 1 { nodes } else { 0 });
        }
        let joint = Joint::of_group(self, members, &placement, SCHEDULE);
        let start_ms = joint.objective_ms();
        let random = Random(members.len() as u64 * 1_000_003 + self.experts.costs.len() as u64);
        let mut chain = Chain::new(joint, start_ms, false, budget, random);
        chain.advance(&exponential(), 1.0);
        if let Some((_, mut placements)) = chain.into_answer() {
            placement = placements.pop().unwrap_or(placement);
        }
        let known_ms = self.placed_times(members, &placement).ms();
        let links = GroupLinks::new(self, members);
        let mut branch = Branch::new(&links, &self.experts, known_ms.min(least_ms), nodes);
        branch.search();
        let left = branch.nodes_left();
        let placement = branch.into_best().unwrap_or(placement);
        let times = self.placed_times(members, &placement);
        ((placement, times), left)
    }

    /// A lower bound on this group's time with any placement, ms.
    fn least_ms(&self, members: &[u32]) -> f64 {
        let problem = self.problem;
        let size = members.len() as f64;
        let with_memory =
            || members.iter().filter(|&&i| problem.memory[i as usize] > 0).map(|&i| problem.flops[i as usize]);
        let rate: f64 = with_memory().sum();
        let fastest = with_memory().fold(0.0, f64::max);
        let dearest = self.experts.order.first().map_or(0.0, |&e| self.experts.costs[e as usize]);
        let compute = size * (self.experts.total / rate).max(dearest / fastest);
        // Some holder has at least an even share.
        let share = self.received_mb(self.experts.total) / members.len().min(self.experts.costs.len()) as f64;
        let sums = problem.links.received_sums(members);
        let received = sums.iter().map(|(alpha, beta)| alpha + share * beta).fold(f64::INFINITY, f64::min);
        (compute + problem.workload.p2p_frequency * received) * (1.0 - 1e-12)
    }
}

/// Places the experts of a grouping: improves the placement of the group that takes longest until that is still the longest; `budget` and `nodes` are for all
/// groups together. Returns `None` where memory does not suffice.
pub(crate) fn place_thoroughly<L: LinkTable>(
    placed: &Placed<L>,
    groups: &[Vec<u32>],
    (budget, nodes): (u64, u64),
    known: &Known,
) -> Option<FoundPlaced> {
    let start = |members: &Vec<u32>| match known.get(members) {
        Some(known) => known.clone(),
        None => placed.dealt(members).map(|placed| KnownPlacement { placed, improved: false }),
    };
    let mut all: Vec<KnownPlacement> = groups.iter().map(start).collect::<Option<_>>()?;
    let share = groups.len() as u64;
    loop {
        let ms = |g: usize| all[g].placed.1.ms();
        let worst = (0..all.len()).fold(0, |worst, g| if ms(g) > ms(worst) { g } else { worst });
        if all[worst].improved {
            break;
        }
        let start = std::mem::take(&mut all[worst].placed);
        let (better, _) = placed.improved(&groups[worst], start, f64::INFINITY, budget / share, nodes / share);
        all[worst] = KnownPlacement { placed: better, improved: true };
    }
    let (placements, times): (Vec<_>, Vec<GroupTimes>) = all.into_iter().map(|known| known.placed).unzip();
    let objective_ms = placed.evaluate(groups, &times).objective_ms;
    Some(FoundPlaced { groups: groups.to_vec(), placements, times, objective_ms })
}

/// Looks for groups and placements with a lower objective than `known_ms`, in at most about `nodes` nodes of branch and bound and `steps` steps of
/// `crate::exact` over sets of devices. `known` collects the placements.
pub(super) fn prove(
    placed: &Placed<Matrix>,
    bounds: &Bounds,
    known_ms: f64,
    allow_idle: bool,
    (nodes, steps): (u64, u64),
    known: &mut Known,
) -> Improvement {
    let problem = placed.problem;
    let n = problem.n();
    if n > PROVED_MOST {
        return Improvement { better: None, complete: false };
    }
    let (mut complete, mut left) = (true, nodes.max(1));
    let mut work = vec![f64::INFINITY; 1 << n];
    // gamma is least with all devices.
    let limit = known_ms / problem.gamma(n);
    for set in 1..1u32 << n {
        let members = devices(set);
        if !problem.valid(&members) || placed.least_ms(&members) >= limit {
            continue;
        }
        let Some(dealt) = placed.dealt(&members) else { continue };
        let (improved, rest) = placed.improved(&members, dealt, limit, PROOF_ANNEAL, left);
        left = rest;
        complete &= rest > 0;
        work[set as usize] = improved.1.ms();
        known.insert(members, Some(KnownPlacement { placed: improved, improved: true }));
    }
    let found = improve_by(problem, work, &|_| 0.0, bounds, known_ms, allow_idle, steps);
    Improvement { better: found.better, complete: found.complete && complete }
}
