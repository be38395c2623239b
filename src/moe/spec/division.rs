//! Division of a source's (token, expert) pairs among the replicas of each expert.

use std::collections::BTreeMap;

use aristos_balance::{divide_sources, split_rows};
use aristos_formats::InputError;

use super::hosts::Hosts;
use super::placement::{Placement, WHOLE};

/// Fractional part of the golden ratio, in units of 1 / [`WHOLE`]. The multiples of this number modulo 1 are evenly spread.
const GOLDEN: u32 = 0x9E37_79B9;

/// Names the holder of each of a source's pairs, one pair after the other.
pub(crate) struct Division<'p> {
    placement: &'p Placement,
    /// By expert with replicas.
    replicated: BTreeMap<usize, Ranges>,
}

/// The ranges of a source's pairs of one expert that the expert's holders get.
struct Ranges {
    /// By holder: the PE, the expert's local number on it, and the end of its range.
    holders: Vec<(usize, usize, u64)>,
    /// Number of pairs whose holders have been named.
    named: u64,
}

impl<'p> Division<'p> {
    /// Divides by the shares of the placement. `pairs(e)` is the number of the source's pairs with expert `e`.
    pub fn by_shares(placement: &'p Placement, source: usize, pairs: impl Fn(usize) -> u64) -> Self {
        let ranges = |e: usize| {
            // The rounding offset of a source and expert, less than one pair. Without it all sources would round in the same way, and one
            // holder would get every remainder.
            let offset = u64::from((source as u32).wrapping_add(e as u32).wrapping_mul(GOLDEN));
            let n = pairs(e).min(u64::from(u32::MAX));
            let shares = placement.shares(e, source).into_iter();
            let holders = shares.map(|(pe, local, until)| (pe, local, (n * until + offset) / WHOLE)).collect();
            (e, Ranges { holders, named: 0 })
        };
        Division { placement, replicated: placement.replicated().map(ranges).collect() }
    }

    /// Divides by counts, so that the largest number of pairs on a PE is the least possible. `counts[pe][e]` is the number of PE `pe`'s pairs
    /// with expert `e`. A holder first gets its own tokens' pairs, then those of its host. All PEs are on one host if `hosts` is empty.
    ///
    /// Every PE of the group must use the same counts: with other counts the results would be the same, but not the loads.
    ///
    /// # Errors
    /// Returns an error if there are more than 2^48 pairs.
    pub fn by_counts(
        placement: &'p Placement,
        source: usize,
        counts: &[Vec<u32>],
        hosts: &Hosts,
    ) -> Result<Self, InputError> {
        let holders: Vec<Vec<usize>> = (0..placement.n_experts()).map(|e| placement.holders(e)).collect();
        let rows: Vec<u64> =
            (0..placement.n_experts()).map(|e| counts.iter().map(|of| u64::from(of[e])).sum()).collect();
        let quotas = split_rows(&rows, &holders, placement.n_pes())?;
        let host: Vec<usize> = (0..placement.n_pes()).map(|pe| hosts.host(pe).unwrap_or(0)).collect();
        let mut replicated = BTreeMap::new();
        for e in placement.replicated() {
            let sources: Vec<u64> = counts.iter().map(|of| u64::from(of[e])).collect();
            let parts = divide_sources(&sources, &quotas[e], &host)?.swap_remove(source);
            let mut end = 0;
            let ranges = placement.shares(e, source).into_iter().zip(parts).map(|((pe, local, _), part)| {
                end += part;
                (pe, local, end)
            });
            replicated.insert(e, Ranges { holders: ranges.collect(), named: 0 });
        }
        Ok(Division { placement, replicated })
    }

    /// The placement whose holders the pairs get.
    pub fn placement(&self) -> &'p Placement {
        self.placement
    }

    /// The PE that gets the next pair with expert `e`, and the expert's local number on this PE.
    pub fn next(&mut self, e: usize) -> (usize, usize) {
        let Some(of) = self.replicated.get_mut(&e) else { return (self.placement.owner(e), self.placement.local(e)) };
        let holder = of.holders.partition_point(|(.., end)| *end <= of.named);
        of.named += 1;
        let (pe, local, _) = of.holders[holder.min(of.holders.len() - 1)];
        (pe, local)
    }

    /// For each pair, in the order of tokens, the PE that gets it; `None` for an id that is not an expert.
    pub fn holders(mut self, experts: &[u32]) -> Vec<Option<usize>> {
        let n = self.placement.n_experts();
        experts.iter().map(|&e| ((e as usize) < n).then(|| self.next(e as usize).0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::moe::spec::placement::Split;

    #[test]
    fn assignments_follow_the_shares_for_any_count() {
        let n_pes = 16;
        // Each holder gets a third of a source's pairs, except that PE 0 keeps all of its own pairs.
        let mut shares = vec![vec![1.0 / 3.0; 3]; n_pes];
        shares[0] = vec![1.0, 0.0, 0.0];
        let split = Split { expert: 1, holders: vec![0, 2, 5], shares };
        let placement = Placement::even(4, n_pes).with_replicas(&[split]).unwrap();
        assert_eq!((placement.owner(1), placement.local(1), placement.local_on(1, 2)), (0, 1, Some(0)));
        assert_eq!(
            (placement.experts(0), placement.experts(1), placement.experts(2)),
            (&[0, 1][..], &[][..], &[1, 2][..])
        );
        for pairs in [0u64, 1, 2, 3, 100] {
            let mut got = [0u64; 3];
            for source in 1..n_pes {
                let mut assigner = Division::by_shares(&placement, source, |_| pairs);
                let to: Vec<usize> = (0..pairs).map(|_| assigner.next(1).0).collect();
                assert!(to.is_sorted(), "{to:?}");
                to.iter().for_each(|pe| got[[0, 2, 5].iter().position(|holder| holder == pe).unwrap()] += 1);
                assert_eq!(assigner.next(3), (3, 0));
            }
            // The holders' totals are nearly equal, even though every source rounds.
            let even = (n_pes as u64 - 1) * pairs / 3;
            assert!(got.iter().all(|&got| got.abs_diff(even) <= 2), "{pairs} pairs each: {got:?}");
            let mut own = Division::by_shares(&placement, 0, |_| pairs);
            assert!((0..pairs).all(|_| own.next(1) == (0, 1)));
        }
    }

    /// Two holders per expert: with any counts, the pairs of all sources add up to the least possible largest load.
    #[test]
    fn division_by_counts_has_the_least_largest_load() {
        let mut rng = ChaCha8Rng::seed_from_u64(53);
        for case in 0..200 {
            let (pes, experts) = (rng.random_range(2..9), rng.random_range(2..17));
            let mut placement = Placement::even(experts, pes);
            let mut splits = Vec::new();
            for expert in 0..experts {
                let (a, b) = (rng.random_range(0..pes), rng.random_range(0..pes));
                if a != b {
                    let holders = vec![a.min(b), a.max(b)];
                    splits.push(Split { expert, holders, shares: vec![vec![0.5, 0.5]; pes] });
                }
            }
            placement = placement.with_replicas(&splits).unwrap();
            let count = |rng: &mut ChaCha8Rng| if rng.random_bool(0.3) { 0 } else { rng.random_range(0..100) };
            let counts: Vec<Vec<u32>> = (0..pes).map(|_| (0..experts).map(|_| count(&mut rng)).collect()).collect();
            let mut loads = vec![0u64; pes];
            for (source, of) in counts.iter().enumerate() {
                let mut division = Division::by_counts(&placement, source, &counts, &Hosts::default()).unwrap();
                for (e, &pairs) in of.iter().enumerate() {
                    let to: Vec<usize> = (0..pairs).map(|_| division.next(e).0).collect();
                    assert!(to.is_sorted() && to.iter().all(|&pe| placement.holders(e).contains(&pe)), "case {case}");
                    to.into_iter().for_each(|pe| loads[pe] += 1);
                }
            }
            assert_eq!(loads.iter().max(), Some(&least_load(&placement, &counts)), "case {case}: {loads:?}");
        }
    }

    /// The least possible largest load: the largest mean over a set of PEs of the pairs that no other PE can compute (Hall's theorem).
    fn least_load(placement: &Placement, counts: &[Vec<u32>]) -> u64 {
        let pes = placement.n_pes();
        let of_set = |set: u32| {
            let inside = |e: &usize| placement.holders(*e).iter().all(|&pe| set >> pe & 1 == 1);
            let pairs: u64 = (0..placement.n_experts())
                .filter(inside)
                .flat_map(|e| counts.iter().map(move |of| u64::from(of[e])))
                .sum();
            pairs.div_ceil(u64::from(set.count_ones()))
        };
        (1..1u32 << pes).map(of_set).max().unwrap_or(0)
    }

    /// If one source reads other counts, the loads are no longer the least.
    #[test]
    fn misread_counts_are_seen_in_the_loads() {
        let splits = [0, 1].map(|expert| Split { expert, holders: vec![0, 1], shares: vec![vec![0.5, 0.5]; 2] });
        let placement = Placement::even(2, 2).with_replicas(&splits).unwrap();
        let right = vec![vec![30, 10], vec![20, 40]];
        let mut misread = right.clone();
        misread[0] = vec![0, 0];
        let largest = |counts: [&Vec<Vec<u32>>; 2]| {
            let mut loads = [0; 2];
            for (source, counts) in counts.into_iter().enumerate() {
                let mut division = Division::by_counts(&placement, source, counts, &Hosts::default()).unwrap();
                for (e, &pairs) in right[source].iter().enumerate() {
                    (0..pairs).for_each(|_| loads[division.next(e).0] += 1);
                }
            }
            loads.into_iter().max()
        };
        assert_eq!(largest([&right, &right]), Some(50));
        assert!(largest([&right, &misread]) > Some(50));
    }

    /// Sources of a host keep their pairs there while its holders have room.
    #[test]
    fn pairs_stay_on_their_host_if_there_is_room() {
        let split = Split { expert: 0, holders: vec![0, 2], shares: vec![vec![0.5, 0.5]; 4] };
        let placement = Placement::even(4, 4).with_replicas(&[split]).unwrap();
        let counts = vec![vec![0, 0, 0, 0], vec![10, 0, 0, 0], vec![0, 0, 0, 0], vec![10, 0, 0, 0]];
        let hosts = Hosts::new(vec![0, 0, 1, 1]);
        let of = |source: usize| Division::by_counts(&placement, source, &counts, &hosts).unwrap().holders(&[0; 10]);
        assert_eq!((of(1), of(3)), (vec![Some(0); 10], vec![Some(2); 10]));
    }
}
