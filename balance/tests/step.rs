//! Properties of the assignments inside a step.

use aristos_balance::{Borrowed, Borrowing, Quota, Random, borrow, divide_sources, split_rows};

/// Random rows and holders. A third of the experts have replicas on up to all PEs.
fn case(random: &mut Random, experts: usize, pes: usize, most: usize) -> (Vec<u64>, Vec<Vec<usize>>) {
    let rows = (0..experts).map(|_| random.below(most + 1) as u64).collect();
    let holders = (0..experts).map(|_| {
        let n = if random.below(3) > 0 { 1 } else { 1 + random.below(pes) };
        let mut free: Vec<usize> = (0..pes).collect();
        (0..n).map(|_| free.swap_remove(random.below(free.len()))).collect()
    });
    let holders = holders.collect();
    (rows, holders)
}

fn loads(quotas: &[Vec<Quota>], pes: usize) -> Vec<u64> {
    let mut loads = vec![0; pes];
    quotas.iter().flatten().for_each(|quota| loads[quota.pe] += quota.rows);
    loads
}

/// The fractional optimum, rounded up: by linear programming duality the largest mean over a set of PEs of the rows that only they can compute.
fn least_load(rows: &[u64], holders: &[Vec<usize>], pes: usize) -> u64 {
    let of_set = |set: usize| {
        let inside = |holders: &Vec<usize>| holders.iter().all(|&pe| set >> pe & 1 == 1);
        let all: u64 = rows.iter().zip(holders).filter(|(_, holders)| inside(holders)).map(|(rows, _)| rows).sum();
        all.div_ceil(u64::from(set.count_ones()))
    };
    (1..1usize << pes).map(of_set).max().unwrap_or(0)
}

/// The least largest load over all assignments in whole rows, one expert after the other.
fn brute_force(rows: &[u64], holders: &[Vec<usize>], loads: &mut [u64]) -> u64 {
    fn deal(left: u64, to: &[usize], rest: (&[u64], &[Vec<usize>]), loads: &mut [u64]) -> u64 {
        let give = |rows: u64| {
            let mut loads = loads.to_vec();
            loads[to[0]] += rows;
            match to.len() {
                1 => brute_force(rest.0, rest.1, &mut loads),
                _ => deal(left - rows, &to[1..], rest, &mut loads),
            }
        };
        let first = if to.len() == 1 { left } else { 0 };
        (first..=left).map(give).min().unwrap()
    }
    match rows.split_first() {
        None => loads.iter().copied().max().unwrap(),
        Some((&first, rest)) => deal(first, &holders[0], (rest, &holders[1..]), loads),
    }
}

#[test]
fn split_conserves_rows_and_uses_only_holders() {
    let mut random = Random(1);
    for (experts, pes) in [(1, 1), (5, 3), (8, 8), (32, 16), (128, 64), (256, 64)].repeat(20) {
        let (rows, holders) = case(&mut random, experts, pes, 5000);
        let quotas = split_rows(&rows, &holders, pes).unwrap();
        for ((rows, holders), quotas) in rows.iter().zip(&holders).zip(&quotas) {
            assert_eq!(quotas.iter().map(|quota| quota.pe).collect::<Vec<_>>(), *holders);
            assert_eq!(quotas.iter().map(|quota| quota.rows).sum::<u64>(), *rows);
        }
    }
}

#[test]
fn split_reaches_the_fractional_optimum_rounded_up() {
    let mut random = Random(2);
    let mut gains = 0;
    for _ in 0..3000 {
        let (experts, pes) = (1 + random.below(10), 1 + random.below(7));
        let most = [3, 50, 5000][random.below(3)];
        let (rows, holders) = case(&mut random, experts, pes, most);
        let largest = *loads(&split_rows(&rows, &holders, pes).unwrap(), pes).iter().max().unwrap();
        assert_eq!(largest, least_load(&rows, &holders, pes), "{rows:?} {holders:?}");
        let owners: Vec<Vec<usize>> = holders.iter().map(|holders| vec![holders[0]]).collect();
        gains += usize::from(largest < *loads(&split_rows(&rows, &owners, pes).unwrap(), pes).iter().max().unwrap());
    }
    assert!(gains > 1000, "replicas help in {gains} cases");
    // The bound is itself the optimum of all assignments in whole rows.
    for _ in 0..200 {
        let pes = 1 + random.below(3);
        let experts = 1 + random.below(4);
        let (rows, holders) = case(&mut random, experts, pes, 5);
        assert_eq!(brute_force(&rows, &holders, &mut vec![0; pes]), least_load(&rows, &holders, pes));
    }
}

#[test]
fn sources_keep_their_rows_and_near_holders_come_first() {
    let mut random = Random(3);
    for _ in 0..2000 {
        let pes = 1 + random.below(12);
        let host: Vec<usize> = (0..pes).map(|pe| pe / 4).collect();
        let sources: Vec<u64> = (0..pes).map(|_| random.below(40) as u64).collect();
        let (_, holders) = case(&mut random, 1, pes, 0);
        let quotas = split_rows(&[sources.iter().sum()], &holders, pes).unwrap().remove(0);
        let all = divide_sources(&sources, &quotas, &host).unwrap();
        for (source, rows) in all.iter().enumerate() {
            assert_eq!(rows.iter().sum::<u64>(), sources[source]);
        }
        for (at, quota) in quotas.iter().enumerate() {
            assert_eq!(all.iter().map(|rows| rows[at]).sum::<u64>(), quota.rows);
            assert_eq!(all[quota.pe][at], quota.rows.min(sources[quota.pe]), "own rows stay");
        }
    }
    let error = divide_sources(&[1], &[Quota { pe: 0, rows: 2 }], &[0]).unwrap_err().to_string();
    assert_eq!(error, "quotas add up to 2, expected 1, the rows");
}

/// The loads with borrowed tiles, each after the arrival of its weights.
fn after(tiles: &[Vec<(usize, u64)>], price: u64, notes: &[Borrowed]) -> Vec<u64> {
    let own = |pe: usize| {
        let given: u64 = notes.iter().filter(|note| note.owner == pe).map(|note| note.tiles).sum();
        tiles[pe].iter().map(|(_, tiles)| tiles).sum::<u64>() - given
    };
    (0..tiles.len())
        .map(|pe| {
            let taken: Vec<&Borrowed> = notes.iter().filter(|note| note.borrower == pe).collect();
            let wait = taken.iter().map(|note| note.arrival * price).max().unwrap_or(0);
            own(pe).max(wait) + taken.iter().map(|note| note.tiles).sum::<u64>()
        })
        .collect()
}

#[test]
fn borrowing_lowers_the_largest_load_inside_a_host() {
    let mut random = Random(4);
    let mut lower = 0;
    for _ in 0..3000 {
        let pes = 1 + random.below(16);
        let host: Vec<usize> = (0..pes).map(|pe| pe / [2, 4, 8][pes % 3]).collect();
        let of_pe = |random: &mut Random, pe: usize| (0..3).map(|e| (3 * pe + e, random.below(60) as u64)).collect();
        let tiles: Vec<Vec<(usize, u64)>> = (0..pes).map(|pe| of_pe(&mut random, pe)).collect();
        let rules = Borrowing { host: &host, price: 1 + random.below(20) as u64, most: 1 + random.below(3) };
        let notes = borrow(&tiles, &rules).unwrap();
        let before = after(&tiles, rules.price, &[]);
        let with = after(&tiles, rules.price, &notes);
        if notes.is_empty() {
            assert_eq!(before, with);
        } else {
            assert!(with.iter().max() < before.iter().max(), "{notes:?}");
            lower += 1;
        }
        for (at, note) in notes.iter().enumerate() {
            // An owner's port sends one expert after the other, and a borrower's receives one after the other.
            let earlier = |of: &dyn Fn(&Borrowed) -> bool| notes[..=at].iter().filter(|note| of(note)).count() as u64;
            let (lent, taken) = (earlier(&|n| n.owner == note.owner), earlier(&|n| n.borrower == note.borrower));
            assert_eq!(note.arrival, lent.max(taken));
            assert_eq!(host[note.owner], host[note.borrower]);
            assert_ne!(note.owner, note.borrower);
            let given = notes.iter().filter(|other| (other.owner, other.expert) == (note.owner, note.expert));
            let has = tiles[note.owner].iter().find(|(e, _)| *e == note.expert).unwrap().1;
            assert!(note.tiles > 0 && given.map(|note| note.tiles).sum::<u64>() <= has);
            assert!(notes.iter().filter(|other| other.borrower == note.borrower).count() <= rules.most);
        }
    }
    assert!(lower > 1000, "{lower} of 3000 cases borrow");
}

#[test]
fn assignments_are_the_same_everywhere() {
    // Frozen values: PEs compute them apart from each other, on any machine and with any version of the standard library.
    let mut random = Random(5);
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut mix = |word: u64| hash = (hash ^ word).wrapping_mul(0x100_0000_01b3);
    for _ in 0..50 {
        let (rows, holders) = case(&mut random, 64, 16, 3000);
        let quotas = split_rows(&rows, &holders, 16).unwrap();
        quotas.iter().flatten().for_each(|quota| mix(quota.rows << 8 | quota.pe as u64));
        let mut tiles = vec![Vec::new(); 16];
        for (e, quota) in quotas.iter().enumerate().flat_map(|(e, all)| all.iter().map(move |quota| (e, quota))) {
            tiles[quota.pe].push((e, quota.rows.div_ceil(128)));
        }
        let host: Vec<usize> = (0..16).map(|pe| pe / 8).collect();
        let notes = borrow(&tiles, &Borrowing { host: &host, price: 3, most: 1 }).unwrap();
        notes.iter().for_each(|note| mix(note.tiles << 16 | (note.owner as u64) << 8 | note.borrower as u64));
    }
    assert_eq!(hash, 13_914_355_585_635_834_418);
}

#[test]
fn bad_input_is_reported_in_one_line() {
    let error = |rows: &[u64], holders: &[Vec<usize>]| split_rows(rows, holders, 2).unwrap_err().to_string();
    assert_eq!(error(&[1], &[]), "holders has 0 experts, expected 1, as rows");
    let wrong = "expected different PEs below 2, at least one if the expert has rows";
    for holders in [vec![], vec![2], vec![1, 1]] {
        let found = format!("holders[0] is {holders:?}, {wrong}");
        assert_eq!(error(&[1], &[holders]), found);
    }
    let most = "expected at most 281474976710656";
    assert_eq!(error(&[u64::MAX, 9], &[vec![0], vec![0]]), format!("rows are {}, {most}", u64::MAX));
    assert_eq!(split_rows(&[0], &[vec![]], 2).unwrap(), [vec![]]);
    assert_eq!(split_rows(&[], &[], 0).unwrap(), Vec::<Vec<Quota>>::new());
    let rules = |price| Borrowing { host: &[0], price, most: 1 };
    assert_eq!(borrow(&[vec![]], &rules(0)).unwrap_err().to_string(), "price is 0, expected at least 1");
    let error = borrow(&[], &rules(1)).unwrap_err().to_string();
    assert_eq!(error, "host has 1 PEs, expected 0, as tiles");
}
