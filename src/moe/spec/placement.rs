//! Placement of routed experts on PEs.

use std::collections::BTreeMap;
use std::ops::Range;

/// The PEs of each expert. Expert `e` is on PE `owner(e)`, where its local number is `local(e)`. With replicas
/// ([`Placement::with_replicas`]) it is also on other PEs.
///
/// ```
/// use aristos::moe::Placement;
///
/// let even = Placement::even(5, 2);
/// assert_eq!((even.experts(0), even.experts(1)), (&[0, 1, 2][..], &[3, 4][..]));
///
/// let chosen = Placement::from_owners(vec![1, 0, 1, 0, 1], 2);
/// assert_eq!(chosen.experts(1), [0, 2, 4]);
/// assert_eq!((chosen.owner(4), chosen.local(4)), (1, 2));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    owner: Vec<u32>,
    local: Vec<u32>,
    by_pe: Vec<Vec<usize>>,
    /// The shares of each expert with replicas.
    splits: BTreeMap<usize, ReplicaShares>,
}

/// An expert with replicas: its holders, and the shares of each source's pairs that they get.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// The expert.
    pub expert: usize,
    /// The PEs that hold the expert, ascending; the first is the owner.
    pub holders: Vec<usize>,
    /// `[n_pes, holders]`: the share of each source PE's (token, expert) pairs that each holder gets. Rows sum to 1.
    pub shares: Vec<Vec<f64>>,
}

/// A [`Split`] in integers, so that it is the same on every machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ReplicaShares {
    /// By holder: the PE, and the expert's local number there.
    holders: Vec<(usize, usize)>,
    /// `[n_pes, holders]`: cumulative shares, in units of 1 / [`WHOLE`].
    until: Vec<Vec<u64>>,
}

/// A share of 1 in [`ReplicaShares::until`].
pub(super) const WHOLE: u64 = 1 << 32;
/// Tolerance of the sum of a source's shares.
const SHARE_ERROR: f64 = 1e-6;
impl Placement {
    /// Places experts in contiguous blocks. If `n_experts` is not a multiple of `n_pes`, the first PEs own one expert more than the others.
    /// If it is smaller than `n_pes`, the last PEs own no expert.
    pub fn even(n_experts: usize, n_pes: usize) -> Self {
        let owners = (0..n_pes).flat_map(|pe| block(n_experts, n_pes, pe).map(move |_| pe as u32)).collect();
        Self::from_owners(owners, n_pes)
    }

    /// Places expert `e` on PE `owner[e]`. Each PE numbers its experts in ascending order.
    ///
    /// # Panics
    ///
    /// If an owner is not below `n_pes`.
    pub fn from_owners(owner: Vec<u32>, n_pes: usize) -> Self {
        let mut by_pe = vec![Vec::new(); n_pes];
        let local = owner
            .iter()
            .enumerate()
            .map(|(e, &pe)| {
                by_pe[pe as usize].push(e);
                by_pe[pe as usize].len() as u32 - 1
            })
            .collect();
        Placement { owner, local, by_pe, splits: BTreeMap::new() }
    }

    /// Adds replicas of some experts; the first holder of an expert becomes its owner.
    ///
    /// A source assigns its pairs of an expert to holders in token order: the first pairs to the first holder, according to its share, and
    /// so on. This needs no communication. The boundaries are rounded, with an offset that depends on the source, so that a holder's number
    /// of pairs differs from its share by less than one pair per source.
    ///
    /// # Errors
    ///
    /// Returns a one-line message if an expert, a PE or the shares are invalid.
    ///
    /// ```
    /// use aristos::moe::Placement;
    /// use aristos::moe::placement::Split;
    ///
    /// // Expert 0 of four is on both PEs. Each PE computes the pairs of its own tokens.
    /// let split = Split { expert: 0, holders: vec![0, 1], shares: vec![vec![1.0, 0.0], vec![0.0, 1.0]] };
    /// let placement = Placement::even(4, 2).with_replicas(&[split])?;
    /// assert_eq!((placement.experts(0), placement.experts(1)), (&[0, 1][..], &[0, 2, 3][..]));
    /// assert_eq!((placement.holders(0), placement.holders(1)), (vec![0, 1], vec![0]));
    /// # Ok::<(), String>(())
    /// ```
    pub fn with_replicas(mut self, splits: &[Split]) -> Result<Self, String> {
        for split in splits {
            let Split { expert: e, holders, shares } = split;
            if *e >= self.n_experts() {
                return Err(format!("expert {e} has replicas, and there are {} experts", self.n_experts()));
            }
            if let Some(pe) = holders.iter().find(|pe| **pe >= self.n_pes()) {
                return Err(format!("expert {e} has a replica on PE {pe}, and there are {} PEs", self.n_pes()));
            }
            if holders.len() < 2 || !holders.is_sorted_by(|a, b| a < b) {
                return Err(format!("expert {e} is on PEs {holders:?}, expected at least two, ascending"));
            }
            if shares.len() != self.n_pes() {
                return Err(format!("expert {e} has shares of {} PEs, expected {}", shares.len(), self.n_pes()));
            }
            let mut until = Vec::with_capacity(shares.len());
            for (pe, row) in shares.iter().enumerate() {
                let sum: f64 = row.iter().sum();
                let valid = row.len() == holders.len() && row.iter().all(|share| (0.0..=2.0).contains(share));
                if !valid || (sum - 1.0).abs() > SHARE_ERROR {
                    let n = holders.len();
                    return Err(format!(
                        "expert {e} has shares {row:?} for PE {pe}, expected {n} from 0 to 1 that sum to 1"
                    ));
                }
                let mut before = 0.0;
                let mut row: Vec<u64> = row
                    .iter()
                    .map(|share| {
                        before += share;
                        ((before / sum * WHOLE as f64).round() as u64).min(WHOLE)
                    })
                    .collect();
                row.last_mut().into_iter().for_each(|last| *last = WHOLE);
                until.push(row);
            }
            self.by_pe[self.owner[*e] as usize].retain(|held| held != e);
            for &pe in holders {
                self.by_pe[pe].push(*e);
            }
            self.owner[*e] = holders[0] as u32;
            let holders = holders.iter().map(|&pe| (pe, 0)).collect();
            if self.splits.insert(*e, ReplicaShares { holders, until }).is_some() {
                return Err(format!("expert {e} has two splits, expected one"));
            }
        }
        self.by_pe.iter_mut().for_each(|held| held.sort_unstable());
        let Placement { owner, local, by_pe, splits } = &mut self;
        let number = |e: usize, pe: usize| by_pe[pe].binary_search(&e).expect("a PE has the experts that it holds");
        for (e, local) in local.iter_mut().enumerate() {
            *local = number(e, owner[e] as usize) as u32;
        }
        for (&e, replicas) in splits {
            replicas.holders.iter_mut().for_each(|(pe, local)| *local = number(e, *pe));
        }
        Ok(self)
    }

    /// The PE that owns expert `e`.
    pub fn owner(&self, e: usize) -> usize {
        self.owner[e] as usize
    }

    /// Expert `e`'s local number on its owner.
    pub fn local(&self, e: usize) -> usize {
        self.local[e] as usize
    }

    /// Expert `e`'s local number on `pe`; `None` if `pe` does not hold the expert.
    pub fn local_on(&self, e: usize, pe: usize) -> Option<usize> {
        self.by_pe.get(pe)?.binary_search(&e).ok()
    }

    /// The PEs that hold expert `e`, ascending; the first is its owner.
    pub fn holders(&self, e: usize) -> Vec<usize> {
        self.splits
            .get(&e)
            .map_or_else(|| vec![self.owner(e)], |replicas| replicas.holders.iter().map(|(pe, _)| *pe).collect())
    }

    /// The holders of expert `e`, ascending, as (PE, local number, cumulative share of `source`'s pairs in units of 2^-32).
    pub(in crate::moe) fn shares(&self, e: usize, source: usize) -> Vec<(usize, usize, u64)> {
        match self.splits.get(&e) {
            None => vec![(self.owner(e), self.local(e), WHOLE)],
            Some(ReplicaShares { holders, until }) => {
                holders.iter().zip(&until[source]).map(|(&(pe, local), &until)| (pe, local, until)).collect()
            }
        }
    }

    /// The experts with replicas, ascending.
    pub(super) fn replicated(&self) -> impl Iterator<Item = usize> + '_ {
        self.splits.keys().copied()
    }

    /// Whether any expert has replicas.
    pub fn has_replicas(&self) -> bool {
        !self.splits.is_empty()
    }

    /// The experts of `pe`, ascending.
    pub fn experts(&self, pe: usize) -> &[usize] {
        &self.by_pe[pe]
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.by_pe.len()
    }

    /// Number of experts.
    pub fn n_experts(&self) -> usize {
        self.owner.len()
    }

    /// Number of PEs that hold at least one expert.
    pub fn hosts(&self) -> usize {
        self.by_pe.iter().filter(|e| !e.is_empty()).count()
    }

    /// The largest number of experts on one PE.
    pub fn max_local(&self) -> usize {
        self.by_pe.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Block `pe` of `n_pes` contiguous blocks of `0..n`. Sizes differ by at most one, and larger blocks are first. Tokens are divided in the
/// same way.
pub fn block(n: usize, n_pes: usize, pe: usize) -> Range<usize> {
    let (base, extra) = (n / n_pes, n % n_pes);
    let start = pe * base + pe.min(extra);
    start..start + base + usize::from(pe < extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_each_expert_once() {
        for n in [0, 1, 5, 8, 13] {
            for p in 1..=9 {
                let all: Vec<usize> = (0..p).flat_map(|pe| block(n, p, pe)).collect();
                assert_eq!(all, (0..n).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn some_pes_have_no_experts_if_there_are_more_pes() {
        let p = Placement::even(2, 3);
        assert_eq!((p.experts(0), p.experts(1), p.experts(2)), (&[0][..], &[1][..], &[][..]));
        assert_eq!((p.hosts(), p.max_local()), (2, 1));
    }

    #[test]
    fn invalid_replicas_are_rejected() {
        let with = |expert, holders: &[usize], shares: Vec<Vec<f64>>| {
            let split = Split { expert, holders: holders.to_vec(), shares };
            Placement::even(4, 2).with_replicas(&[split.clone(), split]).unwrap_err()
        };
        let half = || vec![vec![0.5, 0.5]; 2];
        assert_eq!(with(4, &[0, 1], half()), "expert 4 has replicas, and there are 4 experts");
        assert_eq!(with(3, &[0, 2], half()), "expert 3 has a replica on PE 2, and there are 2 PEs");
        assert_eq!(with(3, &[1], half()), "expert 3 is on PEs [1], expected at least two, ascending");
        assert_eq!(with(3, &[0, 1], vec![vec![1.0, 0.0]]), "expert 3 has shares of 1 PEs, expected 2");
        let wrong = with(3, &[0, 1], vec![vec![0.5, 0.5], vec![0.5, f64::NAN]]);
        assert_eq!(wrong, "expert 3 has shares [0.5, NaN] for PE 1, expected 2 from 0 to 1 that sum to 1");
        assert_eq!(with(3, &[0, 1], half()), "expert 3 has two splits, expected one");
    }
}
