//! Assigns gradient sums to PEs: the units of `kernels/all_reduce.h`.

use std::collections::HashMap;

use super::shape::sum_steps;
use crate::gpu::params::{LayerShape, SumHolder, SumUnit};
use crate::moe::spec::Groups;

/// Value of [`SumUnit::batch`] for the replicated weights.
const REPLICATED: u32 = u32::MAX;

/// The sum units of a PE, and the holders of each unit, in the layout of the kernels' tables.
#[derive(Debug, Default, PartialEq)]
pub struct Sums {
    /// The units, followed by one without parts, which marks the end.
    pub units: Vec<SumUnit>,
    pub holders: Vec<SumHolder>,
}

/// The sum units of the shape's PE: those of its experts that other PEs hold too, in ascending order, then that of the replicated weights.
/// Any two PEs process their common units in the same order, so both number the steps between them in the same way.
pub fn sums(shape: &LayerShape, groups: &Groups) -> Sums {
    let me = shape.world_pe as usize;
    let (all, own) = (groups.holders(), groups.experts(me));
    let mut sums = Sums::default();
    let mut before: HashMap<usize, u32> = HashMap::new();
    let experts = own.iter().enumerate().map(|(local, &expert)| (local as u32, all[expert].clone()));
    let replicated = (REPLICATED, (0..shape.n_world as usize).collect());
    for (batch, holders) in experts.chain([replicated]) {
        let parts = holders.len() as u32;
        let Some(place) = holders.iter().position(|&pe| pe == me).filter(|_| parts > 1) else { continue };
        sums.units.push(SumUnit { batch, parts, me: place as u32, first: sums.holders.len() as u32 });
        let steps = sum_steps(shape, parts, batch == REPLICATED);
        for pe in holders {
            let before = before.entry(pe).or_default();
            sums.holders.push(SumHolder { pe: pe as u32, before: *before });
            *before += steps;
        }
    }
    sums.units.push(SumUnit::default());
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::spec::Placement;

    #[test]
    fn both_pes_number_reduction_steps_equally() {
        let even = |experts, pes| Placement::even(experts, pes);
        let groups = vec![(vec![3, 0], even(4, 2)), (vec![1], even(4, 1)), (vec![2, 4], even(4, 2))];
        let groups = Groups::new(5, groups).unwrap();
        let base = LayerShape {
            n_pes: 2,
            n_world: 5,
            hidden: 64,
            intermediate: 512,
            n_experts: 4,
            gated: 1,
            channels: 1,
            summed: 1,
            training: 1,
            ..LayerShape::default()
        };
        let of: Vec<Sums> = (0..5).map(|pe| sums(&LayerShape { world_pe: pe, ..base }, &groups)).collect();
        let expert = |pe: usize, unit: &SumUnit| groups.experts(pe).get(unit.batch as usize).copied();
        for (a, own) in of.iter().enumerate() {
            assert_eq!(own.units.last(), Some(&SumUnit::default()));
            assert_eq!(own.units.len(), groups.experts(a).len() + 2);
            for unit in &own.units[..own.units.len() - 1] {
                let holders = &own.holders[unit.first as usize..][..unit.parts as usize];
                assert_eq!(holders[unit.me as usize].pe, a as u32);
                for &SumHolder { pe, before } in holders.iter().filter(|holder| holder.pe != a as u32) {
                    let peer_sums = &of[pe as usize];
                    let same =
                        |other: &&SumUnit| expert(pe as usize, other) == expert(a, unit) && other.parts == unit.parts;
                    let other = peer_sums.units.iter().find(same).unwrap();
                    assert_eq!(
                        peer_sums.holders[other.first as usize + unit.me as usize],
                        SumHolder { pe: a as u32, before }
                    );
                }
            }
        }
        // Units have several steps, so that the numbering matters.
        assert!(of[0].holders.last().unwrap().before > 2, "{of:?}");
    }
}
