//! Balance on random and hostile loads, next to EPLB's rules and to the lower bound.

use aristos_balance::{Random, Rebalance, Rebalanced, rebalance_auto, rebalance_experts, rebalance_with};

const EVEN: Rebalance = Rebalance { shares: false, current: None, move_cost: 0.0 };
const SHARES: Rebalance = Rebalance { shares: true, ..EVEN };

/// Checks invariants: each expert's shares add up to 1, the imbalance is as stated, and no expert is twice on a rank while another rank lacks it.
fn check(weight: &[f64], ranks: usize, all: &Rebalanced) {
    let slots = &all.phy2log[0];
    let size = slots.len() / ranks;
    let share = |slot: usize| match all.shares.first() {
        Some(shares) => shares[slot],
        None => 1.0 / all.logcnt[0][slots[slot]] as f64,
    };
    let mut sums = vec![0.0; weight.len()];
    let mut loads = vec![0.0; ranks];
    for (slot, &e) in slots.iter().enumerate() {
        sums[e] += share(slot);
        loads[slot / size] += share(slot) * weight[e];
        assert!(share(slot) >= 0.0);
        let holders = slots.chunks(size).filter(|rank| rank.contains(&e)).count();
        let twice = slots[slot / size * size..slot].contains(&e);
        assert!(!twice || holders == ranks, "expert {e} is twice on rank {}, and on {holders} of {ranks}", slot / size);
    }
    assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-9), "{sums:?}");
    let mean = weight.iter().sum::<f64>() / ranks as f64;
    let imbalance = if mean > 0.0 { loads.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 };
    assert!((imbalance - all.imbalance[0]).abs() < 1e-9, "{imbalance} {:?}", all.imbalance);
    assert!(all.imbalance_least[0] <= imbalance * (1.0 + 1e-9));
}

/// The largest load over the mean by EPLB's rules: replicas go to the expert with the most load per replica, and the heaviest ones to the lightest rank.
fn eplb(weight: &[f64], ranks: usize, size: usize) -> f64 {
    let mut counts = vec![1.0; weight.len()];
    for _ in weight.len()..ranks * size {
        let heaviest =
            (0..weight.len()).max_by(|&a, &b| (weight[a] / counts[a]).total_cmp(&(weight[b] / counts[b]))).unwrap();
        counts[heaviest] += 1.0;
    }
    let mut replicas: Vec<f64> = weight.iter().zip(counts).flat_map(|(w, c)| vec![w / c; c as usize]).collect();
    replicas.sort_by(|a, b| b.total_cmp(a));
    let mut held = vec![(0.0f64, 0); ranks];
    for load in replicas {
        let free = held.iter_mut().filter(|(_, n)| *n < size);
        let lightest = free.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        *lightest = (lightest.0 + load, lightest.1 + 1);
    }
    held.iter().map(|(load, _)| *load).fold(0.0, f64::max) / (weight.iter().sum::<f64>() / ranks as f64)
}

fn loads(kind: usize, experts: usize, random: &mut Random) -> Vec<f64> {
    let mut normal = || (0..12).map(|_| random.real()).sum::<f64>() - 6.0;
    match kind {
        0 => (0..experts).map(|_| (1000.0 + 44_000.0 * random.real()).floor()).collect(),
        1 => (0..experts).map(|_| normal().exp()).collect(),
        2 => (0..experts).map(|_| (2.0 * normal()).exp()).collect(),
        3 => (0..experts).map(|e| 1e6 / (e as f64 + 1.0)).collect(),
        _ => (0..experts)
            .map(|_| if random.below(8) == 0 { 5e4 * random.real() } else { 100.0 * random.real() })
            .collect(),
    }
}

#[test]
fn random_loads_are_within_a_percent_of_the_bound() {
    let (mut even, mut greedy, mut worse) = (Vec::new(), Vec::new(), 0);
    for case in 0..500 {
        let mut random = Random(case);
        let experts = [8, 16, 64, 128, 160, 256][random.below(6)];
        let ranks: usize = [4, 8, 12, 16, 32][random.below(5)];
        let size = usize::div_ceil(experts, ranks) + 1 + random.below(2);
        let weight = loads(case as usize % 5, experts, &mut random);
        let shared = rebalance_with(SHARES, std::slice::from_ref(&weight), ranks * size, 1, 1, ranks).unwrap();
        check(&weight, ranks, &shared);
        assert!(shared.imbalance[0] < 1.01 * shared.imbalance_least[0], "case {case}: {:?}", shared.imbalance);
        // Even shares take longer.
        if case % 10 == 0 || case % 10 == 6 {
            let all = rebalance_experts(std::slice::from_ref(&weight), ranks * size, 1, 1, ranks).unwrap();
            check(&weight, ranks, &all);
            let by_rule = eplb(&weight, ranks, size);
            worse += usize::from(all.imbalance[0] > by_rule * (1.0 + 1e-9));
            even.push(all.imbalance[0] / all.imbalance_least[0]);
            greedy.push(by_rule / all.imbalance_least[0]);
        }
    }
    for ratios in [&mut even, &mut greedy] {
        ratios.sort_by(f64::total_cmp);
        println!("median {:.4}, 90% {:.4}, worst {:.4}", ratios[50], ratios[90], ratios[99]);
    }
    assert_eq!(worse, 0);
    assert!(even[50] < 1.001 && even[90] < 1.02, "{even:?}");
}

#[test]
fn hostile_loads_are_within_a_percent_of_the_bound() {
    let hot = |experts: usize, hot: &[f64]| {
        let mut weight = vec![100.0; experts];
        weight[experts - hot.len()..].copy_from_slice(hot);
        weight
    };
    let cases: Vec<(Vec<f64>, usize, usize)> = vec![
        // Routers that collapsed to some experts.
        (hot(256, &[20_000.0]), 32, 9),
        (hot(256, &[900_000.0, 800_000.0]), 32, 9),
        (hot(256, &[90_000.0, 80_000.0]), 32, 9),
        (hot(256, &[3000.0; 3]), 32, 9),
        (hot(256, &[20_000.0; 2]), 32, 9),
        (hot(128, &[1e9; 5]), 16, 9),
        (hot(64, &[1e30]), 8, 9),
        // One expert with all tokens, none, ties, and zeros.
        ((0..64).map(|e| f64::from(u8::from(e == 63))).collect(), 8, 9),
        (vec![0.0; 64], 8, 9),
        (vec![7.0; 64], 8, 9),
        (vec![7.0; 65], 8, 9),
        ((0..64).map(|e| if e % 2 == 0 { 0.0 } else { 5.0 }).collect(), 8, 9),
        ((0..64).map(|e| if e < 60 { 0.0 } else { 3.0 }).collect(), 8, 9),
        // Loads over many orders of magnitude, and few values.
        ((0..64).map(|e| 2f64.powi(e)).collect(), 8, 9),
        ((0..64).map(|e| 1e-300 * f64::from(e)).collect(), 8, 9),
        ((0..256).map(|e| 1.0 / f64::from(e + 1).powi(3)).collect(), 32, 9),
        // More slots than experts on a rank, one rank, one expert, one slot a rank.
        (vec![5.0, 1.0, 1.0], 4, 5),
        (vec![5.0, 1.0, 7.0], 1, 3),
        (vec![5.0], 6, 2),
        (vec![8.0, 4.0, 4.0], 4, 1),
    ];
    assert_eq!(cases.len(), 20);
    for (case, (weight, ranks, size)) in cases.into_iter().enumerate() {
        for how in [EVEN, SHARES] {
            let all = rebalance_with(how, std::slice::from_ref(&weight), ranks * size, 1, 1, ranks).unwrap();
            check(&weight, ranks, &all);
            let (reached, least) = (all.imbalance[0], all.imbalance_least[0]);
            println!("{case}: {reached:.4} (shares: {}), EPLB {:.4}", how.shares, eplb(&weight, ranks, size));
            // Equal parts of five hot experts on 16 ranks cannot be more even than three each.
            let most = if how.shares { 1.01 } else { 1.07 };
            assert!(reached <= most * least, "case {case}, shares {}: {reached}, least {least}", how.shares);
        }
    }
}

#[test]
fn few_experts_move_if_loads_change_little() {
    for seed in 0..10 {
        let mut random = Random(seed);
        let weight = loads(seed as usize % 3, 256, &mut random);
        let changed: Vec<f64> = weight.iter().map(|w| w * (0.98 + 0.04 * random.real())).collect();
        for shares in [false, true] {
            let how = Rebalance { shares, ..EVEN };
            let first = rebalance_with(how, std::slice::from_ref(&weight), 288, 1, 1, 32).unwrap();
            let how = Rebalance { current: Some(&first.phy2log), move_cost: 0.001, ..how };
            let next = rebalance_with(how, std::slice::from_ref(&changed), 288, 1, 1, 32).unwrap();
            check(&changed, 32, &next);
            let (before, after, moved) = (next.imbalance_current[0], next.imbalance[0], next.moved[0]);
            println!("{seed} {shares}: {before:.4} -> {after:.4}, {moved} moved");
            assert!(moved <= 14 && after + 0.001 * moved as f64 <= before + 1e-9, "{before} {after} {moved}");
            assert!(after < 1.02, "{after}");
        }
    }
    // Other loads pay for any moves, and free moves reach the new optimum.
    let weight: Vec<f64> = loads(2, 256, &mut Random(1));
    let reversed: Vec<f64> = weight.iter().rev().copied().collect();
    let first = rebalance_experts(std::slice::from_ref(&weight), 288, 1, 1, 32).unwrap();
    let free = Rebalance { current: Some(&first.phy2log), ..EVEN };
    let next = rebalance_with(free, std::slice::from_ref(&reversed), 288, 1, 1, 32).unwrap();
    assert!(next.imbalance_current[0] > 1.5 && next.imbalance[0] < 1.01 * next.imbalance_least[0], "{next:?}");
}

#[test]
fn least_number_of_physical_experts() {
    let weight = vec![loads(0, 160, &mut Random(4))];
    let fits = rebalance_auto(EVEN, &weight, None, 1, 1, 12).unwrap();
    assert_eq!(fits.phy2log[0].len(), 168);
    let weight = vec![loads(3, 16, &mut Random(4))];
    for most in [1.2, 1.02] {
        let reached = rebalance_auto(EVEN, &weight, Some(most), 1, 1, 8).unwrap();
        let slots = reached.phy2log[0].len();
        assert!(reached.imbalance[0] <= most && slots > 16, "{reached:?}");
        assert!(rebalance_experts(&weight, slots - 8, 1, 1, 8).unwrap().imbalance[0] > most);
    }
    let line = rebalance_auto(EVEN, &weight, Some(0.9), 1, 1, 12).unwrap_err().to_string();
    assert!(line.contains("imbalance is 0.9, expected at least 1"), "{line}");
}

#[test]
fn imbalances_near_1_are_reached() {
    let weight = vec![loads(1, 256, &mut Random(4))];
    for how in [EVEN, SHARES] {
        for most in [1.0, 1.0005] {
            let all = rebalance_auto(how, &weight, Some(most), 1, 1, 12).unwrap();
            check(&weight[0], 12, &all);
            let slots = all.phy2log[0].len();
            println!("shares {}, at most {most}: {slots} physical experts, {:?}", how.shares, all.imbalance);
            assert!(all.imbalance[0] <= most * (1.0 + 1e-9), "{:?}", all.imbalance);
            assert!(slots <= if how.shares { 276 } else { 12 * 256 }, "{slots}");
        }
    }
    // Two nodes whose groups differ in load never have equal loads.
    let weight = vec![vec![1.0, 1.0, 2.0, 4.0]];
    let line = rebalance_auto(EVEN, &weight, Some(1.0), 2, 2, 4).unwrap_err().to_string();
    assert!(
        line.contains("imbalance is 1, expected at least 1.5, which the search reaches with 8 physical experts"),
        "{line}"
    );
}

#[test]
fn groups_stay_on_their_nodes() {
    let weight = vec![loads(1, 64, &mut Random(9))];
    let groups = |all: &Rebalanced, node: usize| -> Vec<usize> {
        let mut groups: Vec<usize> = all.phy2log[0][node * 40..][..40].iter().map(|e| e / 8).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    };
    for how in [EVEN, SHARES] {
        let first = rebalance_with(how, &weight, 80, 8, 2, 8).unwrap();
        check(&weight[0], 8, &first);
        assert!(groups(&first, 0).len() == 4 && groups(&first, 0).iter().all(|g| !groups(&first, 1).contains(g)));
        let changed = vec![weight[0].iter().rev().copied().collect()];
        let next = rebalance_with(Rebalance { current: Some(&first.phy2log), ..how }, &changed, 80, 8, 2, 8).unwrap();
        assert_eq!((groups(&next, 0), groups(&next, 1)), (groups(&first, 0), groups(&first, 1)));
    }
}

#[test]
fn placements_in_use_are_checked() {
    let weight = vec![vec![1.0, 2.0, 3.0]];
    for (current, cost, part) in [
        (vec![vec![0, 1, 2, 0], vec![0; 4]], 0.0, "phy2log has 2 layers, expected 1, as weight"),
        (vec![vec![0, 1, 2]], 0.0, "phy2log[0] has 3 numbers, expected num_replicas, 4"),
        (vec![vec![0, 1, 3, 0]], 0.0, "phy2log[0][2] is 3, expected an expert, below 3"),
        (vec![vec![0, 1, 1, 0]], 0.0, "phy2log[0] lacks expert 2, expected every expert"),
        (vec![vec![0, 1, 2, 0]], -1.0, "move_cost is -1, expected a number from 0 to 1e30"),
    ] {
        let how = Rebalance { current: Some(&current), move_cost: cost, ..EVEN };
        let line = rebalance_with(how, &weight, 4, 1, 1, 2).unwrap_err().to_string();
        assert!(line.contains(part), "{line:?} does not say {part:?}");
    }
    // An expert with 8,192 replicas among 8,193 experts.
    let skewed = (0..8193).map(|e| if e == 0 { 1e6 } else { 1.0 }).collect::<Vec<f64>>();
    let line = rebalance_experts(&[skewed], 16_384, 1, 1, 8192).unwrap_err().to_string();
    assert!(line.contains("a log2phy of more than 67108864 numbers"), "{line}");
    // EPLB may put an expert twice on a rank: one of the two goes.
    let twice = vec![vec![0, 0, 1, 2]];
    let how = Rebalance { current: Some(&twice), move_cost: 1.0, ..EVEN };
    let next = rebalance_with(how, &weight, 4, 1, 1, 2).unwrap();
    check(&weight[0], 2, &next);
    assert_eq!(next.moved, [1]);
}
