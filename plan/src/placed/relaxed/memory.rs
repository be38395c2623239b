//! Shares that memory can hold.

use super::Relaxed;
use crate::cluster::LinkTable;
use crate::placed::regroup::MOST_DEVICES;
use crate::placed::{larger, smaller};

/// A share that is less too much is none.
const LITTLE: f32 = 1e-5;

impl<L: LinkTable> Relaxed<'_, '_, '_, L> {
    /// How many experts devices have room for, each for all at most.
    pub(super) fn room_of(&self, devices: &[u32]) -> usize {
        let experts = self.placed.experts.costs.len();
        devices.iter().map(|&i| self.placed.problem.memory[i as usize].min(experts as u64) as usize).sum()
    }

    /// For what share of all experts the members of a group have no room, with `share` by place; `None` where those that have a share have none for all.
    /// Where that is not 0, `held` has shares that there is room for.
    ///
    /// Any members together can have as many of the dearest experts as they have room for. With experts that could be cut that is all there is to it,
    /// as the dearest so many are concave in their number (these are the constraints of a polymatroid); and those that have most too much are of those
    /// with most for their room. So going by share for room, what these have too much goes to the next.
    pub(super) fn without_room(&self, members: &[u32], share: &[f32], held: &mut Vec<f32>) -> Option<f32> {
        let experts = self.placed.experts.costs.len();
        let mut holders = [(0.0f32, 0usize, 0usize); MOST_DEVICES];
        let mut count = 0;
        for (place, (&i, &share)) in members.iter().zip(share).enumerate() {
            if share > 0.0 {
                let room = self.room_of(&[i]);
                holders[count] = (share / room as f32, room, place);
                count += 1;
            }
        }
        let holders = &mut holders[..count];
        holders.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let (mut all, mut rooms, mut too_much) = (0.0, 0, 0.0);
        for &(_, room, place) in holders.iter() {
            all += share[place];
            rooms += room;
            if rooms < experts {
                too_much = larger(all - self.dearest[rooms], too_much);
            }
        }
        if rooms < experts {
            return None;
        }
        if too_much < LITTLE {
            return Some(0.0);
        }
        held.clear();
        held.resize(share.len(), 0.0);
        let (mut all, mut given, mut rooms) = (0.0, 0.0, 0);
        for &(_, room, place) in holders.iter() {
            all += share[place];
            rooms += room;
            let most = if rooms < experts { smaller(self.dearest[rooms], all) } else { all };
            held[place] = most - given;
            given = most;
        }
        Some(too_much)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::mixed;
    use super::*;
    use crate::objective::Problem;
    use crate::placed::Placed;
    use crate::placed::search::FoundPlaced;

    /// Two devices with room for two experts each cannot have more than the four dearest; nor can they have all where the third is to have none.
    #[test]
    fn some_shares_have_no_room() {
        let (mut cluster, workload) = mixed(12);
        cluster.devices[..2].iter_mut().for_each(|device| device.memory_experts = 2);
        let problem = Problem::new(&cluster.devices, &cluster.links, &workload, false);
        let placed = Placed::new(&problem);
        let groups = vec![vec![0, 1, 2], vec![3, 4, 5]];
        let placements = groups.iter().map(|members| placed.dealt(members).unwrap().0).collect();
        let relaxed = Relaxed::new(&placed, &FoundPlaced::new(&placed, groups, placements));
        // Costs are 1, 2 and 3, four of each: the four dearest are half of all.
        let look = |shares: [f32; 3]| {
            let mut held = Vec::new();
            let without_room = relaxed.without_room(&[0, 1, 2], &shares, &mut held)?;
            Some((without_room, held))
        };
        let near = |list: &[f32], wanted: [f32; 3]| list.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6);
        assert_eq!(look([0.25, 0.25, 0.5]), Some((0.0, Vec::new())));
        assert_eq!(look([0.0, 0.0, 1.0]), Some((0.0, Vec::new())));
        assert_eq!(look([0.5, 0.5, 0.0]), None, "room for four of twelve");
        for (shares, too_much, wanted) in [
            // One has too much, and the other room for what that is; or both have.
            ([0.3, 0.2, 0.5], 0.05, [0.25, 0.25, 0.5]),
            ([0.25, 0.35, 0.4], 0.1, [0.25, 0.25, 0.5]),
            ([0.3, 0.3, 0.4], 0.1, [0.25, 0.25, 0.5]),
            ([0.4, 0.0, 0.6], 0.15, [0.25, 0.0, 0.75]),
        ] {
            let (found, held) = look(shares).unwrap();
            assert!((found - too_much).abs() < 1e-6, "{shares:?} {found}");
            assert!(near(&held, wanted), "{shares:?} {held:?}");
        }
    }
}
