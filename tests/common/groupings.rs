//! Groups of every kind, with and without replicas.

use aristos::moe::placement::Split;
use aristos::moe::{Groups, Placement};

/// Groups by their members; expert `e` of group `g` is assigned to member `assign(g, e)`.
pub fn groups(n: usize, members: &[&[usize]], experts: usize, assign: impl Fn(usize, usize) -> usize) -> Groups {
    let of = |(g, members): (usize, &&[usize])| {
        let owners = (0..experts).map(|e| (assign(g, e) % members.len()) as u32).collect();
        (members.to_vec(), Placement::from_owners(owners, members.len()))
    };
    Groups::new(n, members.iter().enumerate().map(of).collect()).unwrap()
}

/// Adds replicas to groups of several PEs: expert 0 on all PEs, in shares that differ by source; expert 2 on the first
/// two, each of which keeps its own tokens.
pub fn replicated(n: usize, groups: &Groups) -> Groups {
    let of = |g: usize| {
        let (members, placement) = (groups.members(g).to_vec(), groups.placement(g).clone());
        let m = members.len();
        if m == 1 {
            return (members, placement);
        }
        let share = |source: usize, holder: usize| ((source + holder) % m) as f64 * 2.0 / (m * (m - 1)) as f64;
        let all = Split {
            expert: 0,
            holders: (0..m).collect(),
            shares: (0..m).map(|source| (0..m).map(|holder| share(source, holder)).collect()).collect(),
        };
        let own = |source: usize| [vec![1.0, 0.0], vec![0.0, 1.0], vec![0.5, 0.5]][source.min(2)].clone();
        let two = Split { expert: 2, holders: vec![0, 1], shares: (0..m).map(own).collect() };
        (members, placement.with_replicas(&[all, two]).unwrap())
    };
    Groups::new(n, (0..groups.len()).map(of).collect()).unwrap()
}

/// Groups of every kind, each with its number of PEs.
pub fn groupings(experts: usize) -> Vec<(&'static str, usize, Groups)> {
    let pairs = groups(5, &[&[4, 0, 1], &[2, 3]], experts, |g, e| e + g);
    let one = groups(3, &[&[0, 1, 2]], experts, |_, e| usize::from(e > 1));
    vec![
        ("one group with replicas", 3, replicated(3, &one)),
        ("two groups with replicas", 5, replicated(5, &pairs)),
        ("one group, uneven", 3, groups(3, &[&[0, 1, 2]], experts, |_, e| usize::from(e > 1))),
        ("two pairs", 4, groups(4, &[&[0, 1], &[2, 3]], experts, |_, e| e)),
        ("two pairs, crossed and uneven", 4, groups(4, &[&[3, 0], &[1, 2]], experts, |g, e| usize::from(e > 4 * g))),
        ("three groups of other sizes", 6, groups(6, &[&[5], &[0, 2, 4], &[1, 3]], experts, |g, e| e / (g + 1))),
        ("all alone", 3, groups(3, &[&[0], &[1], &[2]], experts, |_, _| 0)),
        ("a PE without experts", 4, groups(4, &[&[0, 1, 2], &[3]], experts, |_, e| 1 + e % 2)),
    ]
}
