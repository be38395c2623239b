//! Expert-parallel (EP) groups. Each group holds all experts and has its own tokens; all groups together are one layer.

use super::placement::Placement;

/// The EP groups of a world, and the placement of experts in each group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// The PEs of each group, by index in the group.
    members: Vec<Vec<usize>>,
    /// The placement of each group. Its PE numbers are indices in the group.
    placements: Vec<Placement>,
}

impl Groups {
    /// One group of all PEs.
    pub fn one(placement: Placement) -> Self {
        Groups { members: vec![(0..placement.n_pes()).collect()], placements: vec![placement] }
    }

    /// Groups of PEs `0..n_pes`, each with a placement of the same experts over its members.
    ///
    /// # Errors
    ///
    /// Returns a one-line message if a PE is in no group or in two, or if a placement has another number of PEs or
    /// experts.
    pub fn new(n_pes: usize, groups: Vec<(Vec<usize>, Placement)>) -> Result<Self, String> {
        let (members, placements): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        let mut seen = vec![false; n_pes];
        for &pe in members.iter().flatten() {
            match seen.get_mut(pe) {
                None => return Err(format!("PE {pe} is in a group, and there are {n_pes} PEs")),
                Some(seen) if *seen => return Err(format!("PE {pe} is in two groups")),
                Some(seen) => *seen = true,
            }
        }
        if let Some(pe) = seen.iter().position(|seen| !seen) {
            return Err(format!("PE {pe} is in no group"));
        }
        let experts = placements.first().map_or(0, Placement::n_experts);
        for (g, (members, placement)) in members.iter().zip(&placements).enumerate() {
            if members.len() != placement.n_pes() {
                return Err(format!("group {g} has {} PEs, its placement {}", members.len(), placement.n_pes()));
            }
            if placement.n_experts() != experts {
                return Err(format!("group {g} places {} experts, group 0 {experts}", placement.n_experts()));
            }
        }
        Ok(Groups { members, placements })
    }

    /// Number of groups.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is no group.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The group of `pe`, and its index in the group.
    ///
    /// # Panics
    ///
    /// If `pe` is not a PE of these groups.
    pub fn position(&self, pe: usize) -> (usize, usize) {
        let mut all = self.members.iter().enumerate();
        all.find_map(|(g, members)| members.iter().position(|&member| member == pe).map(|index| (g, index)))
            .expect("every PE is in a group")
    }

    /// The PEs of a group.
    pub fn members(&self, group: usize) -> &[usize] {
        &self.members[group]
    }

    /// A group's placement.
    pub fn placement(&self, group: usize) -> &Placement {
        &self.placements[group]
    }

    /// The PE that owns `expert` in `group`.
    pub fn owner(&self, group: usize, expert: usize) -> usize {
        self.members[group][self.placements[group].owner(expert)]
    }

    /// For each expert the PEs that hold it, in the order of groups, and by ascending index within a group.
    pub fn holders(&self) -> Vec<Vec<usize>> {
        let in_group = |expert: usize, g: usize| {
            self.placements[g].holders(expert).into_iter().map(move |index| self.members[g][index])
        };
        let experts = self.placements.first().map_or(0, Placement::n_experts);
        (0..experts).map(|expert| (0..self.len()).flat_map(|g| in_group(expert, g)).collect()).collect()
    }

    /// Whether any expert has replicas within a group.
    pub fn has_replicas(&self) -> bool {
        self.placements.iter().any(Placement::has_replicas)
    }

    /// The experts of `pe`, ascending.
    pub fn experts(&self, pe: usize) -> &[usize] {
        let (group, index) = self.position(pe);
        self.placements[group].experts(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_groups_are_rejected() {
        let even = |pes| Placement::even(4, pes);
        let new = |groups| Groups::new(3, groups).map(|_| ()).unwrap_err();
        assert_eq!(new(vec![(vec![0, 1], even(2))]), "PE 2 is in no group");
        assert_eq!(new(vec![(vec![0, 1], even(2)), (vec![1, 2], even(2))]), "PE 1 is in two groups");
        assert_eq!(new(vec![(vec![0, 1, 3], even(3))]), "PE 3 is in a group, and there are 3 PEs");
        assert_eq!(new(vec![(vec![0, 1, 2], even(2))]), "group 0 has 3 PEs, its placement 2");
        let other = Placement::even(5, 1);
        assert_eq!(new(vec![(vec![0, 1], even(2)), (vec![2], other)]), "group 1 places 5 experts, group 0 4");
    }

    #[test]
    fn every_pe_has_a_group_and_a_number_in_it() {
        let groups = vec![(vec![3, 0], Placement::from_owners(vec![0, 1, 1], 2)), (vec![1, 2], Placement::even(3, 2))];
        let groups = Groups::new(4, groups).unwrap();
        assert_eq!((groups.position(0), groups.position(2)), ((0, 1), (1, 1)));
        assert_eq!((groups.owner(0, 0), groups.owner(0, 2), groups.owner(1, 2)), (3, 0, 2));
        assert_eq!((groups.experts(0), groups.experts(1)), (&[1, 2][..], &[0, 1][..]));
    }
}
