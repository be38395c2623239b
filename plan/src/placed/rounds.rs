//! Rounds of annealing groups with what their devices hold: together with the placements ([`super::joint`]), or with experts as if they could be cut
//! ([`super::relaxed`]).

use super::joint::{Chain, Schedule};
use super::regroup::MOST_DEVICES;
use super::relaxed;
use super::search::{FoundPlaced, PlacedEffort, Start, THREAD_LEAST, best_first, improve_longest, place_all};
use super::{DealtOut, Known, Placed, few};
use crate::cluster::LinkTable;
use crate::random::Random;
use crate::search::in_threads;

/// How a round anneals groups: with experts where they are, or as if they could be cut.
#[derive(Clone, Copy)]
enum Way {
    Together(Schedule),
    /// And then, perhaps, a few groups of it again.
    Relaxed {
        again: bool,
    },
}

/// Chains of annealing groups with what their devices hold.
pub(super) struct Round {
    /// Numbers of groups that they begin with, and how far the best of these may be above the best of all.
    numbers: usize,
    within: f64,
    /// Chains in all, and their share of the effort.
    chains: usize,
    pub share: f64,
    way: Way,
    /// After so much of their time so many of the best go on.
    cuts: &'static [(f64, usize)],
}

impl Round {
    /// Ends of stages, in shares of a chain's time, and how many chains go on from there, or are the result.
    fn stages(&self) -> impl Iterator<Item = (f64, usize)> {
        self.cuts.iter().copied().chain([(1.0, self.chains)])
    }

    /// How long all chains take together, one by one, in times of one that goes to its end.
    fn time(&self) -> f64 {
        let mut from = (0.0, self.chains);
        let stage = |(end, stay): (f64, usize)| {
            let time = (end - from.0) * from.1 as f64;
            from = (end, stay);
            time
        };
        self.stages().map(stage).sum()
    }
}

/// From so many devices of a group on the mean, groups are so many that they hardly come by again, and where annealing begins matters little.
const LARGE: usize = 7;
/// Of what comes of a round, so many are placed anew, as experts are dealt better inside groups that stay.
const PLACED_ANEW: usize = 4;
/// Annealing that forgets where it began, and that does not.
const FORGETFUL: Way = Way::Together(Schedule { under: (0.85, 0.005), temperature: (0.3, 0.003), forgetful: true });
const MILD: Way = Way::Together(Schedule { under: (0.3, 0.005), temperature: (0.05, 0.002), forgetful: false });
/// The first round says which numbers of groups are promising. Where chains forget where they began, chance decides what comes of one; but half-way it
/// shows, so few are brought to their ends.
const CUTS: &[(f64, usize)] = &[(0.4, 10), (0.6, 4)];
/// Efforts are such that all plans take about as long: with large groups there is no annealing with remembered times.
const ROUNDS_LARGE: [Round; 3] = [
    Round { numbers: 6, within: 0.5, chains: 12, share: 0.8, way: FORGETFUL, cuts: &[] },
    Round { numbers: 3, within: 0.15, chains: 30, share: 1.9, way: FORGETFUL, cuts: CUTS },
    Round { numbers: 2, within: 0.04, chains: 4, share: 0.5, way: MILD, cuts: &[] },
];
const ROUNDS_SMALL: [Round; 3] = [
    Round { numbers: 6, within: 0.5, chains: 12, share: 0.28, way: MILD, cuts: &[] },
    Round { numbers: 3, within: 0.15, chains: 30, share: 0.45, way: FORGETFUL, cuts: CUTS },
    Round { numbers: 2, within: 0.04, chains: 8, share: 0.37, way: MILD, cuts: &[] },
];
/// From so many experts of a device on the mean, they may be looked at as if they could be cut.
const MANY_EXPERTS: f64 = 3.5;
/// After relaxed chains, annealing with experts where they are finds little.
const ROUNDS_MANY: [Round; 3] = [
    Round { numbers: 6, within: 0.5, chains: 12, share: 0.46, way: Way::Relaxed { again: false }, cuts: &[(0.3, 6)] },
    Round { numbers: 2, within: 0.03, chains: 8, share: 0.74, way: Way::Relaxed { again: true }, cuts: &[(0.5, 3)] },
    Round { numbers: 2, within: 0.04, chains: 4, share: 0.05, way: MILD, cuts: &[] },
];
/// In large groups chains need longer, so few begin.
const ROUNDS_MANY_LARGE: [Round; 3] = [
    Round { numbers: 6, within: 0.5, chains: 12, share: 0.75, way: Way::Relaxed { again: false }, cuts: &[(0.3, 6)] },
    Round { numbers: 2, within: 0.03, chains: 4, share: 2.4, way: Way::Relaxed { again: true }, cuts: &[(0.6, 2)] },
    Round { numbers: 2, within: 0.04, chains: 4, share: 0.06, way: MILD, cuts: &[] },
];
/// The placements that come of relaxed chains are improved with one part in so many of the effort for a grouping.
const PLACED_QUICKLY: u64 = 4;

/// A few groups of what comes of a relaxed chain are annealed again with so much of the chain's effort.
const FEW_SHARE: f64 = 0.02;

/// The rounds for clusters whose best grouping so far has so many groups.
pub(super) fn rounds<L: LinkTable>(placed: &Placed<L>, groups: usize) -> &'static [Round; 3] {
    match (many_experts(placed, groups), large(placed.problem.n(), groups)) {
        (true, true) => &ROUNDS_MANY_LARGE,
        (true, false) => &ROUNDS_MANY,
        (false, true) => &ROUNDS_LARGE,
        (false, false) => &ROUNDS_SMALL,
    }
}

/// Whether devices hold so many experts on the mean that these may be looked at as if they could be cut.
pub(super) fn many_experts<L: LinkTable>(placed: &Placed<L>, groups: usize) -> bool {
    (groups * placed.experts.costs.len()) as f64 >= MANY_EXPERTS * placed.problem.n() as f64
}

/// Whether groups have so many devices that they hardly come by again.
pub(super) fn large(devices: usize, groups: usize) -> bool {
    devices >= LARGE * groups
}

/// The chains that go to their ends, best first: after each stage of a round only the best go on, of each kind in proportion. All kinds share the
/// threads.
fn staged<C: Send>(
    stages: impl Iterator<Item = (f64, usize)>,
    mut kinds: Vec<Vec<C>>,
    threads: bool,
    advance: impl Fn(&mut C, f64) + Sync,
    best_ms: impl Fn(&C) -> f64,
) -> Vec<Vec<C>> {
    let begun: Vec<usize> = kinds.iter().map(Vec::len).collect();
    let all: usize = begun.iter().sum();
    for (end, stay) in stages {
        kinds = of_kinds_in_threads(kinds, threads, |mut chain| {
            advance(&mut chain, end);
            chain
        });
        for (chains, begun) in kinds.iter_mut().zip(&begun) {
            chains.sort_by(|a, b| best_ms(a).total_cmp(&best_ms(b)));
            chains.truncate((stay * begun).div_ceil(all));
        }
    }
    kinds
}

/// `in_threads` of all kinds together.
fn of_kinds_in_threads<T: Send, R: Send>(
    kinds: Vec<Vec<T>>,
    threads: bool,
    work: impl Fn(T) -> R + Sync,
) -> Vec<Vec<R>> {
    let counts: Vec<usize> = kinds.iter().map(Vec::len).collect();
    let mut done = in_threads(kinds.into_iter().flatten().collect(), threads, work).into_iter();
    counts.into_iter().map(|count| done.by_ref().take(count).collect()).collect()
}

/// A round of annealing groups with what their devices hold, from the best of each number of groups; these and what comes of it, best first.
pub(super) fn improve_together<L: LinkTable>(
    placed: &Placed<L>,
    exponential: &[f64],
    mut best: Vec<FoundPlaced>,
    (number, round): (usize, &Round),
    whole: &mut Option<bool>,
    (budget, effort): (u64, PlacedEffort),
    (dealt, known): (&DealtOut, &mut Known),
) -> Vec<FoundPlaced> {
    let mut seen = Vec::new();
    best.retain(|found| {
        let new = !seen.contains(&found.groups.len());
        seen.push(found.groups.len());
        new
    });
    best.truncate(round.numbers);
    let most_ms = best.first().map_or(0.0, |best| best.objective_ms * (1.0 + round.within));
    best.retain(|found| found.objective_ms <= most_ms);
    if best.is_empty() || placed.problem.n() > MOST_DEVICES {
        return best;
    }
    let each = (budget as f64 / round.time()) as u64;
    let start = |chain: usize| (best[chain % best.len()].clone(), Random((chain + 1 + 100 * number) as u64));
    let starts: Vec<(FoundPlaced, Random)> = (0..round.chains).map(start).collect();
    let threads = each >= THREAD_LEAST;
    match round.way {
        Way::Together(schedule) => {
            let begin = |(start, random)| Chain::new(placed, start, schedule, each, random);
            let chains = vec![starts.into_iter().map(begin).collect()];
            let chains =
                staged(round.stages(), chains, threads, |chain, end| chain.advance(exponential, end), Chain::best_ms);
            let found: Vec<FoundPlaced> = chains.into_iter().flatten().map(Chain::into_best).collect();
            let again = found.iter().take(PLACED_ANEW).map(|found| &found.groups).collect();
            let anew = place_all(placed, again, effort, (dealt, known));
            best.extend(found);
            best.extend(anew);
        }
        Way::Relaxed { again } => {
            let (budget, nodes) = (effort.place / PLACED_QUICKLY, effort.nodes / PLACED_QUICKLY);
            let improve = |found: FoundPlaced| {
                let FoundPlaced { groups, placements, times, .. } = found;
                let start = Start { improved: vec![false; groups.len()], placements, times };
                improve_longest(placed, &groups, start, (budget, nodes), |_, _| ())
            };
            let few_budget = (each as f64 * FEW_SHARE) as u64;
            let begin = |starts: Vec<(FoundPlaced, Random)>, whole: bool| -> Vec<relaxed::Chain<L>> {
                let begin = |(start, random)| relaxed::Chain::new(placed, (&start, whole), relaxed::HOT, each, random);
                starts.into_iter().map(begin).collect()
            };
            let kinds = match *whole {
                Some(whole) => vec![begin(starts, whole)],
                None => {
                    let mut cut = starts;
                    let as_whole = cut.split_off(cut.len() / 2);
                    vec![begin(as_whole, true), begin(cut, false)]
                }
            };
            let advance = |chain: &mut relaxed::Chain<L>, end| chain.advance(exponential, end);
            let kinds = staged(round.stages(), kinds, threads, advance, relaxed::Chain::best_ms);
            let finish = |(chain, seed): (relaxed::Chain<L>, u64)| {
                let whole = chain.whole();
                let found = improve(chain.into_best()?);
                if !again {
                    return Some(found);
                }
                Some(few::again(placed, exponential, (found, whole), few_budget, Random(seed), improve))
            };
            let kinds = kinds.into_iter().map(|chains| chains.into_iter().zip(1..).collect()).collect();
            let found = of_kinds_in_threads(kinds, threads, finish);
            let found: Vec<Vec<FoundPlaced>> =
                found.into_iter().map(|found| found.into_iter().flatten().collect()).collect();
            if let [as_whole, cut] = &found[..] {
                let least =
                    |found: &[FoundPlaced]| found.iter().map(|found| found.objective_ms).fold(f64::INFINITY, f64::min);
                *whole = Some(least(as_whole) < least(cut));
            }
            best.extend(found.into_iter().flatten());
        }
    }
    best_first(&mut best);
    best
}
