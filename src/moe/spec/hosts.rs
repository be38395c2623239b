//! The hosts of PEs, for rows that are sent to another host once, to a relay.

use serde::{Deserialize, Serialize};

/// The host number of each PE; host numbers are arbitrary.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hosts(Vec<usize>);

impl Hosts {
    /// `hosts[pe]` is the host of PE `pe`.
    pub fn new(of: Vec<usize>) -> Hosts {
        Hosts(of)
    }

    /// The hosts of some of the PEs, such as a group: element `i` is the host of `pes[i]`. Empty if `self` is empty.
    pub fn of(&self, pes: &[usize]) -> Hosts {
        Hosts(pes.iter().filter_map(|&pe| self.0.get(pe).copied()).collect())
    }

    /// The host of `pe`, if the hosts are known.
    pub fn host(&self, pe: usize) -> Option<usize> {
        self.0.get(pe).copied()
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.0.len()
    }

    /// Whether rows are relayed: some host has several PEs, and there is more than one host.
    pub fn relays(&self) -> bool {
        (0..self.n_pes()).any(|pe| self.members(pe).nth(1).is_some() && self.0.iter().any(|host| *host != self.0[pe]))
    }

    /// The PEs on the host of `pe`, including itself, ascending.
    pub fn members(&self, pe: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_pes()).filter(move |other| self.0[*other] == self.0[pe])
    }

    /// The PE to which `source` sends rows for `target`: `target` itself if both are on the same host, otherwise the relay of `source` on
    /// the target's host. The PEs of a host are assigned round-robin to the PEs of another host as their relays.
    pub fn relay(&self, source: usize, target: usize) -> usize {
        if self.0[source] == self.0[target] {
            return target;
        }
        let rank = self.members(source).position(|pe| pe == source).unwrap_or(0);
        let members: Vec<usize> = self.members(target).collect();
        members[rank % members.len()]
    }

    /// The PEs of other hosts for which `relay` is the relay on its host, ascending.
    pub fn served(&self, relay: usize) -> Vec<usize> {
        let others = (0..self.n_pes()).filter(|source| self.0[*source] != self.0[relay]);
        others.filter(|source| self.relay(*source, relay) == relay).collect()
    }

    /// Number of hosts.
    pub fn count(&self) -> usize {
        (0..self.n_pes()).filter(|&pe| self.members(pe).next() == Some(pe)).count()
    }

    /// Maximum number of PEs on a host.
    pub fn most_members(&self) -> usize {
        (0..self.n_pes()).map(|pe| self.members(pe).count()).max().unwrap_or(1)
    }

    /// Maximum number of sources for which one PE is the relay.
    pub fn most_served(&self) -> usize {
        (0..self.n_pes()).map(|pe| self.served(pe).len()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relays_are_assigned_round_robin() {
        let hosts = Hosts::new(vec![7, 2, 7, 2, 7]);
        assert_eq!(hosts.members(4).collect::<Vec<_>>(), [0, 2, 4]);
        assert_eq!([0, 2, 4].map(|source| hosts.relay(source, 1)), [1, 3, 1]);
        assert_eq!([1, 3].map(|source| hosts.relay(source, 4)), [0, 2]);
        assert_eq!(hosts.relay(0, 4), 4);
        assert_eq!(
            (0..5).map(|pe| hosts.served(pe)).collect::<Vec<_>>(),
            [vec![1], vec![0, 4], vec![3], vec![2], vec![]]
        );
        assert_eq!((hosts.most_members(), hosts.most_served()), (3, 2));
        assert_eq!((hosts.count(), Hosts::default().count()), (2, 0));
        assert!(hosts.relays());
        // In this group PE 4 is the second member of its host.
        let group = hosts.of(&[1, 2, 4]);
        assert_eq!((group.relay(0, 2), group.relay(1, 0), group.served(1)), (1, 0, vec![0]));
        assert!(group.relays() && !hosts.of(&[0, 2]).relays() && Hosts::default().of(&[1, 2]) == Hosts::default());
        assert!(!Hosts::new(vec![0, 1, 2]).relays() && !Hosts::new(vec![3, 3]).relays() && !Hosts::default().relays());
    }
}
