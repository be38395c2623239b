//! Which PE owns which routed expert.

use std::ops::Range;

/// Expert `e` lives on PE `owner(e)`, as that PE's expert number `local(e)`.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    owner: Vec<u32>,
    local: Vec<u32>,
    by_pe: Vec<Vec<usize>>,
}

impl Placement {
    /// Contiguous blocks; where `n_experts` does not divide by `n_pes`, the first PEs own one more. PEs beyond the
    /// number of experts own none.
    pub fn even(n_experts: usize, n_pes: usize) -> Self {
        let owners = (0..n_pes).flat_map(|pe| block(n_experts, n_pes, pe).map(move |_| pe as u32)).collect();
        Self::from_owners(owners, n_pes)
    }

    /// Any placement: `owners[e]` is the PE of expert `e`; a PE numbers its experts in ascending order.
    ///
    /// # Panics
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
        Placement { owner, local, by_pe }
    }

    /// The PE that owns expert `e`.
    pub fn owner(&self, e: usize) -> usize {
        self.owner[e] as usize
    }

    /// Expert `e`'s number on its owner.
    pub fn local(&self, e: usize) -> usize {
        self.local[e] as usize
    }

    /// Expert `e`'s number on `pe`, where `pe` owns it.
    pub fn local_on(&self, e: usize, pe: usize) -> Option<usize> {
        (e < self.n_experts() && self.owner(e) == pe).then(|| self.local(e))
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

    /// Number of PEs that own at least one expert.
    pub fn hosts(&self) -> usize {
        self.by_pe.iter().filter(|e| !e.is_empty()).count()
    }

    /// The largest number of experts on one PE.
    pub fn max_local(&self) -> usize {
        self.by_pe.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// The `pe`-th of `n_pes` contiguous blocks of `0..n`, sizes differing by at most one, larger ones first. Tokens
/// are split this way too.
pub fn block(n: usize, n_pes: usize, pe: usize) -> Range<usize> {
    let (base, extra) = (n / n_pes, n % n_pes);
    let start = pe * base + pe.min(extra);
    start..start + base + usize::from(pe < extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_everything_once() {
        for n in [0, 1, 5, 8, 13] {
            for p in 1..=9 {
                let all: Vec<usize> = (0..p).flat_map(|pe| block(n, p, pe)).collect();
                assert_eq!(all, (0..n).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn more_pes_than_experts_leaves_pes_without() {
        let p = Placement::even(2, 3);
        assert_eq!((p.experts(0), p.experts(1), p.experts(2)), (&[0][..], &[1][..], &[][..]));
        assert_eq!((p.hosts(), p.max_local()), (2, 1));
    }
}
