//! Search under the placed objective. Anneals groups and placement together, in rounds. Each round keeps fewer candidates for the
//! number of groups.

use super::Placed;
use super::found::FoundPlaced;
use super::joint::{Joint, MOST_DEVICES, Schedule};
use super::place::{Known, KnownPlacement, place_thoroughly};
use crate::anneal::{Chain, exponential, in_threads};
use crate::bound::Bounds;
use crate::cluster::LinkTable;
use crate::search::{Evaluate, Found};
use aristos_balance::Random;

/// A plan within this share of the lower bound ends the search.
const NEAR: f64 = 1e-3;
/// Chains shorter than this are not worth a thread.
const THREAD_LEAST: u64 = 100_000;
/// Groupings that are placed thoroughly before the rounds, each of another number of groups.
const PLACED: usize = 10;
/// Best results of a round that are placed anew, as chains end warm.
const PLACED_ANEW: usize = 4;

/// Chains from the best groupings of several numbers of groups.
struct Round {
    /// Most numbers of groups, and how far the best of each may be above the best of all.
    numbers: usize,
    within: f64,
    chains: usize,
    /// Share of the effort.
    share: f64,
    schedule: Schedule,
    /// Whether chains forget where they began.
    restart: bool,
    /// Successive halving (Karnin et al. 2013): after this share of a chain's budget, this many of the best chains continue.
    cuts: &'static [(f64, usize)],
}

const HOT: Schedule = Schedule { under: (0.85, 0.005), temperature: (0.3, 0.003) };
const MILD: Schedule = Schedule { under: (0.3, 0.005), temperature: (0.05, 0.002) };
/// The first round tells which numbers of groups are promising, the second restarts most chains from chance, the third refines the best.
const ROUNDS: [Round; 3] = [
    Round { numbers: 6, within: 0.5, chains: 12, share: 0.25, schedule: HOT, restart: true, cuts: &[] },
    Round {
        numbers: 3,
        within: 0.15,
        chains: 30,
        share: 0.6,
        schedule: HOT,
        restart: true,
        cuts: &[(0.4, 10), (0.6, 4)],
    },
    Round { numbers: 2, within: 0.04, chains: 4, share: 0.15, schedule: MILD, restart: false, cuts: &[] },
];

impl Round {
    /// Ends of stages, as shares of a chain's budget, and how many chains are left then.
    fn stages(&self) -> impl Iterator<Item = (f64, usize)> {
        self.cuts.iter().copied().chain([(1.0, self.chains)])
    }

    /// Budget of the round in budgets of one whole chain.
    fn whole_chains(&self) -> f64 {
        let mut from = (0.0, self.chains);
        let stage = |(end, stay): (f64, usize)| {
            let budget = (end - from.0) * from.1 as f64;
            from = (end, from.1.min(stay));
            budget
        };
        self.stages().map(stage).sum()
    }
}

/// How hard to try.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedEffort {
    /// Links examined for constructed groupings.
    pub construct: u64,
    /// Links examined and nodes of branch and bound for the placements of one grouping.
    pub place: (u64, u64),
    /// Links examined by the rounds.
    pub joint: u64,
}

/// Evaluates groupings with experts placed by [`super::deal`]; keeps the placements of all groups.
pub(super) struct Dealt<'s, 'p, 'a, L> {
    pub placed: &'s Placed<'p, 'a, L>,
    pub known: Known,
}

impl<L: LinkTable> Evaluate for Dealt<'_, '_, '_, L> {
    fn objective_ms(&mut self, groups: &[Vec<u32>], ops: &mut u64) -> Option<f64> {
        let placed = self.placed;
        let mut times = Vec::with_capacity(groups.len());
        for members in groups {
            if !self.known.contains_key(members) {
                *ops += 3 * placed.problem.links.sums_cost(members.len()) + 4 * placed.experts.costs.len() as u64;
                let dealt = placed.dealt(members).map(|placed| KnownPlacement { placed, improved: false });
                self.known.insert(members.clone(), dealt);
            }
            times.push(self.known.get(members)?.as_ref()?.placed.1);
        }
        Some(placed.evaluate(groups, &times).objective_ms)
    }
}

/// Whether no plan can be much better than `ms`.
pub(super) fn near(bounds: &Bounds, ms: f64) -> bool {
    ms <= bounds.least() * (1.0 + NEAR)
}

/// Places the best groupings thoroughly and improves them in rounds; returns the best found. `candidates` are the best of each number of groups, best first.
pub(super) fn improve<L: LinkTable>(
    placed: &Placed<L>,
    bounds: &Bounds,
    candidates: &[Found],
    allow_idle: bool,
    effort: PlacedEffort,
    known: &Known,
) -> Option<FoundPlaced> {
    let exponential = exponential();
    let groupings = candidates.iter().take(PLACED).map(|found| found.groups.clone()).collect();
    let mut best = place_all(placed, groupings, effort, known);
    for (number, round) in ROUNDS.iter().enumerate() {
        let done = best.first().is_none_or(|best| near(bounds, best.objective_ms));
        if done || effort.joint == 0 || placed.problem.n() > MOST_DEVICES {
            break;
        }
        best_of_each_number(&mut best, round);
        let budget = (effort.joint as f64 * round.share / round.whole_chains()) as u64;
        let start = |chain: usize| {
            let start = &best[chain % best.len()];
            let joint = Joint::new(placed, start, allow_idle, round.schedule);
            Chain::new(joint, start.objective_ms, round.restart, budget, Random((chain + 1 + 100 * number) as u64))
        };
        let mut chains: Vec<Chain<Joint<L>>> = (0..round.chains).map(start).collect();
        for (end, stay) in round.stages() {
            chains = in_threads(chains, budget >= THREAD_LEAST, |mut chain| {
                chain.advance(&exponential, end);
                chain
            });
            chains.sort_by(|a, b| a.best_ms().total_cmp(&b.best_ms()));
            chains.truncate(stay);
        }
        let answers = chains.into_iter().filter_map(Chain::into_answer);
        let found: Vec<FoundPlaced> =
            answers.map(|(groups, placements)| FoundPlaced::new(placed, groups, placements)).collect();
        let again = found.iter().take(PLACED_ANEW).map(|found| found.groups.clone()).collect();
        best.extend(place_all(placed, again, effort, known));
        best.extend(found);
        best_first(&mut best);
    }
    best.into_iter().next()
}

/// Keeps the best of each number of groups, of as many numbers as the round takes.
fn best_of_each_number(best: &mut Vec<FoundPlaced>, round: &Round) {
    let mut seen = Vec::new();
    let most_ms = best.first().map_or(0.0, |best| best.objective_ms * (1.0 + round.within));
    best.retain(|found| {
        let number = found.groups.len();
        let new = found.objective_ms <= most_ms && !seen.contains(&number) && seen.len() < round.numbers;
        seen.extend(new.then_some(number));
        new
    });
}

/// Groupings with thorough placements, best first, without those that memory does not allow.
fn place_all<L: LinkTable>(
    placed: &Placed<L>,
    groupings: Vec<Vec<Vec<u32>>>,
    effort: PlacedEffort,
    known: &Known,
) -> Vec<FoundPlaced> {
    let place = |groups: Vec<Vec<u32>>| place_thoroughly(placed, &groups, effort.place, known);
    let found = in_threads(groupings, effort.place.0 >= THREAD_LEAST, place);
    let mut found: Vec<FoundPlaced> = found.into_iter().flatten().collect();
    best_first(&mut found);
    found
}

fn best_first(found: &mut [FoundPlaced]) {
    found.sort_by(|a, b| a.objective_ms.total_cmp(&b.objective_ms));
}
