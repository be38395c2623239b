//! Teams, synchronisation and reductions.

use super::{World, read, soon};
use aristos_shmem::{Shmem, Team, Transport};

fn members<T: Transport>(shmem: &Shmem<T>, list: &[usize]) -> Option<Team> {
    shmem.team_split(shmem.world(), list).unwrap()
}

/// After a synchronisation all members have arrived, in every round, even if one PE runs ahead.
pub fn teams_synchronise_one_pe_ahead(world: &impl World) {
    for n_pes in [2, 3, 4, 5] {
        world.run(n_pes, |shmem| {
            let (rounds, n) = (12, shmem.n_pes());
            let arrived = shmem.alloc::<u64>(rounds).unwrap();
            // Alternates between all PEs and all but the last in reverse order.
            let all = shmem.world().clone();
            let some = members(shmem, &(0..n - 1).rev().collect::<Vec<_>>());
            for round in 0..rounds {
                let team = if round % 3 == 2 { some.as_ref() } else { Some(&all) };
                let Some(team) = team else { continue };
                shmem.fetch_add(arrived.at(round), 1, 0);
                shmem.sync(team, soon()).unwrap();
                let mut seen = [0];
                shmem.get(&mut seen, arrived.at(round), 0);
                assert_eq!(seen[0], team.size() as u64, "round {round}, PE {}", shmem.my_pe());
            }
        });
    }
}

/// Nested teams that share PEs.
pub fn nested_teams(world: &impl World) {
    world.run(4, |shmem| {
        let arrived = shmem.alloc::<u64>(4).unwrap();
        let odd = members(shmem, &[3, 1]);
        let low = members(shmem, &[0, 1, 2]);
        let inner = low.as_ref().and_then(|low| shmem.team_split(low, &[2, 1]).unwrap());
        assert_eq!(odd.as_ref().map(Team::my_index), [None, Some(1), None, Some(0)][shmem.my_pe()]);
        assert_eq!(inner.as_ref().map(Team::my_index), [None, Some(1), Some(0), None][shmem.my_pe()]);
        for _ in 0..5 {
            for (i, team) in [&odd, &low, &inner].into_iter().enumerate() {
                let Some(team) = team else { continue };
                let mut sum = [shmem.my_pe() as f32];
                shmem.all_reduce_sum(team, &mut sum, soon()).unwrap();
                assert_eq!(sum, [[4.0, 3.0, 3.0][i]]);
                shmem.fetch_add(arrived.at(i), 1, 0);
                shmem.sync(team, soon()).unwrap();
            }
        }
        shmem.sync_all(soon()).unwrap();
        let mut seen = [0; 4];
        shmem.get(&mut seen, arrived, 0);
        assert_eq!(seen, [10, 15, 10, 0]);
        assert!(shmem.team_split(shmem.world(), &[0, 4]).is_err());
    });
}

/// Values whose sum depends on the order in which they are added.
fn value(pe: usize, i: usize) -> f32 {
    (1.0 + i as f32 * 0.37) * 10f32.powi(((pe * 7 + i) % 5) as i32 * 2 - 4)
}

/// The sum in team order.
fn sum(team: &Team, i: usize) -> f32 {
    team.members().iter().map(|&pe| value(pe, i)).reduce(|sum, x| sum + x).unwrap()
}

/// For short and long data, every member gets the bits of a sum computed in team order.
pub fn all_reduce_adds_in_team_order(world: &impl World) {
    for n_pes in [1, 2, 3, 4] {
        world.run(n_pes, |shmem| {
            let reverse: Vec<_> = (0..shmem.n_pes()).rev().collect();
            for team in [shmem.world().clone(), members(shmem, &reverse).unwrap()] {
                for len in [0, 1, 2, 7, 700, 3001] {
                    let mut data: Vec<f32> = (0..len).map(|i| value(shmem.my_pe(), i)).collect();
                    shmem.all_reduce_sum(&team, &mut data, soon()).unwrap();
                    let wrong = (0..len).find(|&i| data[i].to_bits() != sum(&team, i).to_bits());
                    assert_eq!(wrong, None, "length {len}");
                }
            }
        });
    }
}

/// Back-to-back reductions on changing teams: no PE overwrites data that a slower one still needs.
pub fn all_reduce_back_to_back(world: &impl World) {
    world.run(3, |shmem| {
        let pairs = [members(shmem, &[0, 1]), members(shmem, &[2, 1]), members(shmem, &[0, 2])];
        for round in 0..12 {
            let mut data = [(shmem.my_pe() + round) as f32; 5];
            shmem.all_reduce_sum(shmem.world(), &mut data, soon()).unwrap();
            assert_eq!(data, [(3 + 3 * round) as f32; 5]);
            if let Some(team) = &pairs[round % 3] {
                let mut data = [(shmem.my_pe() * 10 + round) as f32];
                shmem.all_reduce_sum(team, &mut data, soon()).unwrap();
                assert_eq!(data, [(team.members().iter().sum::<usize>() * 10 + 2 * round) as f32]);
            }
        }
    });
}

/// Every member gets all members' values, in team order.
pub fn all_gather_collects(world: &impl World) {
    world.run(3, |shmem| {
        let team = members(shmem, &[1, 2, 0]).unwrap();
        let untouched = shmem.alloc::<u64>(1).unwrap();
        for len in [0, 1, 1000] {
            let mine: Vec<u64> = (0..len).map(|i| (shmem.my_pe() * 10_000 + i) as u64).collect();
            let mut all = vec![0; 3 * len];
            shmem.all_gather(&team, &mine, &mut all, soon()).unwrap();
            let expected: Vec<u64> =
                [1, 2, 0].iter().flat_map(|pe| (0..len).map(move |i| (pe * 10_000 + i) as u64)).collect();
            assert_eq!(all, expected);
        }
        assert_eq!(read(shmem, untouched), [0]);
    });
}
