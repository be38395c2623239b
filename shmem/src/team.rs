//! Teams and their synchronisation.
//!
//! A team owns no symmetric memory, and creating one needs no communication. Synchronisation is a dissemination barrier
//! (Hensgen, Finkel and Manber 1988): in round `r` member `i` signals member `i + 2^r` and waits for member `i - 2^r`, modulo
//! the size. The words belong to *pairs* of PEs rather than to teams or rounds: word `s` of PE `d` counts all signals from `s`
//! to `d`, and `d` counts the signals that it expects from `s`.
//!
//! This is correct without resets and with PEs that run ahead:
//! - Within one synchronisation a PE signals another at most once, because the distances `2^r` below the size differ.
//! - Two PEs that share several teams synchronise on them in the same order (otherwise they would deadlock in any
//!   implementation), so the n-th signal from `s` to `d` is the n-th that `d` waits for.
//! - Signals are ADDs of 1: `word >= n` means that `s` has issued at least n signals, in whatever order they arrived, hence has
//!   reached the n-th; a PE that is ahead only increases the word.

use super::{ShmemError, Sym};

/// A list of PEs that synchronise and reduce together, in a fixed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Team {
    /// World numbers of the members, in team order.
    members: Vec<usize>,
    /// This PE's index in `members`.
    my_index: usize,
}

impl Team {
    /// The team of all PEs, in order.
    pub(super) fn world(my_pe: usize, n_pes: usize) -> Self {
        Self { members: (0..n_pes).collect(), my_index: my_pe }
    }

    /// The team of `members`, which must be in this team; `None` if `my_pe` is not among them.
    pub(super) fn split(&self, my_pe: usize, members: &[usize]) -> Result<Option<Self>, ShmemError> {
        let refuse = |why: String| Err(ShmemError::Team { members: members.to_vec(), why });
        if members.is_empty() {
            return refuse("it has no member".into());
        }
        for (i, pe) in members.iter().enumerate() {
            if !self.members.contains(pe) {
                return refuse(format!("PE {pe} is not in the parent team {:?}", self.members));
            }
            if members[..i].contains(pe) {
                return refuse(format!("PE {pe} is named twice"));
            }
        }
        let my_index = members.iter().position(|&pe| pe == my_pe);
        Ok(my_index.map(|my_index| Self { members: members.to_vec(), my_index }))
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// This PE's index among the members.
    pub fn my_index(&self) -> usize {
        self.my_index
    }

    /// The members' world numbers, in team order.
    pub fn members(&self) -> &[usize] {
        &self.members
    }
}

/// Rounds of a dissemination barrier for member `my_index` of `size`: (member to signal, member to wait for).
pub(super) fn rounds(my_index: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    std::iter::successors(Some(1), |distance| Some(distance * 2))
        .take_while(move |&distance| distance < size)
        .map(move |distance| ((my_index + distance) % size, (my_index + size - distance) % size))
}

/// This PE's synchronisation words.
#[derive(Debug)]
pub(super) struct SyncWords {
    /// One word per PE: the number of its signals to this PE.
    pub(super) arrived: Sym<u64>,
    /// Per PE: the number of its signals that this PE has waited for.
    pub(super) expected: Vec<u64>,
}

impl SyncWords {
    /// Requires zeroed `arrived`, with one word per PE.
    pub(super) fn new(arrived: Sym<u64>) -> Self {
        Self { arrived, expected: vec![0; arrived.len()] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn barrier_rounds_reach_every_member() {
        for size in 1..40 {
            // reached[i]: the members whose arrival has reached i, directly or through others.
            let mut reached: Vec<Vec<bool>> = (0..size).map(|i| (0..size).map(|j| i == j).collect()).collect();
            let schedule: Vec<Vec<_>> = (0..size).map(|i| rounds(i, size).collect()).collect();
            for (round, _) in schedule[0].iter().enumerate() {
                let before = reached.clone();
                for i in 0..size {
                    let (to, _) = schedule[i][round];
                    assert_eq!(schedule[to][round].1, i, "the signalled member must wait for the signalling one");
                    (0..size).for_each(|j| reached[to][j] |= before[i][j]);
                }
            }
            assert!(reached.iter().flatten().all(|&known| known), "size {size}");
            for schedule in schedule {
                let mut targets: Vec<_> = schedule.iter().map(|(to, _)| *to).collect();
                targets.sort_unstable();
                targets.dedup();
                assert_eq!(targets.len(), schedule.len(), "a PE signals another at most once");
            }
        }
    }

    #[test]
    fn split_keeps_the_given_order() {
        let world = Team::world(2, 5);
        let team = world.split(2, &[4, 2, 0]).unwrap().unwrap();
        assert_eq!((team.size(), team.my_index(), team.members()), (3, 1, &[4, 2, 0][..]));
        assert_eq!(world.split(2, &[1, 3]).unwrap(), None);
        let nested = team.split(2, &[2, 4]).unwrap().unwrap();
        assert_eq!((nested.size(), nested.my_index()), (2, 0));
    }

    #[test]
    fn split_errors_name_the_member() {
        let team = Team::world(0, 4).split(0, &[0, 1]).unwrap().unwrap();
        let message = |members: &[usize]| team.split(0, members).unwrap_err().to_string();
        assert_eq!(message(&[]), "cannot form the team []: it has no member");
        assert_eq!(message(&[0, 2]), "cannot form the team [0, 2]: PE 2 is not in the parent team [0, 1]");
        assert_eq!(message(&[1, 0, 1]), "cannot form the team [1, 0, 1]: PE 1 is named twice");
    }
}
