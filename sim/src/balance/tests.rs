use aristos_formats::cluster::{Device, Link, Links, Tier, Tiers};

use super::*;
use crate::routing::Drift;

/// PEs that compute a row in 1 s, in hosts of two; a byte takes 1 s inside a host and 10 s to another.
fn cluster(pes: usize) -> Cluster {
    let device = |pe: usize| Device::new(pe as u64, format!("n{}", pe / 2), 1e-3, 8);
    let tier = |size, seconds: f64| Tier { size, link: Link { alpha_ms: 0.0, beta_ms_per_mb: seconds * 1e9 } };
    let tiers = if pes > 2 { vec![tier(2, 1.0), tier(pes, 10.0)] } else { vec![tier(2, 1.0)] };
    Cluster::new((0..pes).map(device).collect(), Links::Tiers(Tiers::new(pes, tiers).unwrap()))
}

fn experts(count: usize, top_k: usize) -> Experts {
    let (row_flop, weights_bytes, gradients_bytes) = (1.0, 1.0, 2.0);
    Experts { count, top_k, row_flop, row_bytes: 0.5, weights_bytes, gradients_bytes, tile_rows: 1 }
}

fn rules() -> Rules {
    Rules {
        replan_every: 1,
        microbatches: 1,
        replicas: 1,
        borrowed: 1,
        replan_s: 0.25,
        assign_s: 0.125,
        memory_bytes_per_s: f64::INFINITY,
    }
}

fn record(tokens_per_node: &[usize], choices: &[u32]) -> Record {
    Record { layer: 0, step: 0, tokens_per_node: tokens_per_node.to_vec(), choices: choices.to_vec() }
}

fn near(found: f64, want: f64) {
    assert!((found - want).abs() < 1e-9, "{found}, expected {want}");
}

fn compared(rules: &Rules, balances: &[Balance], records: &[Record]) -> Comparison {
    let mut next = records.iter().cloned();
    compare(&cluster(2), &experts(2, 1), rules, balances, &mut || next.next()).unwrap()
}

#[test]
fn times_by_hand() {
    // Each PE's 8 tokens choose expert 0, on PE 0.
    let batch = || record(&[8, 8], &[0; 16]);
    let found = compared(&rules(), &Balance::ALL, &[batch(), batch()]);
    assert_eq!(found.microbatches, 1);
    // 8 of 16 rows a PE; 8 rows of 0.5 bytes are less.
    near(found.ideal_s, 8.0 + 16.0);
    let [none, replan, split, borrow] = &found.balances[..] else { panic!("{found:?}") };
    near(none.time_s, 16.0 + 32.0);
    near(none.imbalance, 2.0);
    // Both PEs hold both experts and compute their own rows. The gradients of two experts: 2 / 2 * 2 bytes each.
    near(replan.gradients_s, 4.0);
    near(replan.plan_s, 0.25);
    near(replan.time_s, 8.0 + 16.0 + 4.0 + 0.25);
    near(split.time_s, replan.time_s + 0.125);
    assert_eq!((borrow, borrow.borrowed), (split, 0.0));
}

#[test]
fn split_follows_the_counts_and_replan_the_plan() {
    let machine = Machine::new(&cluster(2), &experts(2, 1), &rules()).unwrap();
    // The plan expected more rows of expert 1, and gave PE 0 three quarters of those of expert 0.
    let placement = Placement {
        holders: vec![vec![0, 1], vec![1]],
        shares: vec![vec![0.75, 0.25], vec![1.0]],
        slots: Vec::new(),
        moves: Vec::new(),
    };
    let choices: Vec<u32> = (0..16).map(|token| token % 2).collect();
    let record = record(&[8, 8], &choices);
    let batch = Microbatch::new(&record, &machine.experts, 2).unwrap();
    let rows = |balance: Balance| {
        let assigned = batch.assign(&placement, balance, &machine).unwrap();
        let mut rows = [0; 2];
        assigned.batches.iter().flatten().for_each(|batch| rows[batch.pe] += batch.rows);
        rows
    };
    assert_eq!((rows(Balance::Replan), rows(Balance::Split)), ([6, 10], [8, 8]));
}

#[test]
fn borrowed_tiles_wait_for_their_weights() {
    let rules = Rules { replicas: 0, replan_s: 0.0, assign_s: 0.0, ..rules() };
    let batch = || record(&[16, 0], &[0; 16]);
    let found = compared(&rules, &[Balance::Split, Balance::Borrow], &[batch(), batch()]);
    near(found.balances[0].time_s, 16.0 + 32.0);
    // The weights take 1 s, so PE 1 ends 7 rows when PE 0 ends 9: 1 + 7 < 9. Backward 18 > 1 + 14.
    near(found.balances[1].time_s, 9.0 + 18.0);
    near(found.balances[1].borrowed, 7.0 / 16.0);
    // A weight that arrives after 10 rows leaves room for 3 tiles at most; a row's gradients of 2 bytes and weights share the link.
    let slow = Experts { weights_bytes: 10.0, gradients_bytes: 30.0, row_bytes: 0.0, ..experts(2, 1) };
    let mut next = [batch(), batch()].into_iter();
    let found = compare(&cluster(2), &slow, &rules, &[Balance::Borrow], &mut || next.next()).unwrap();
    // Forward: PE 0 computes 13 rows, PE 1 waits 10 s for 3. Backward: gradients out after weights in, 30 s on the link at least.
    near(found.balances[0].time_s, 13.0 + 30.0);
}

#[test]
fn tiles_begin_after_the_arrival_of_their_weights() {
    let machine = Machine::new(&cluster(2), &experts(1, 1), &rules()).unwrap();
    let batch = |pe, rows, borrowed| assign::Batch { pe, rows, borrowed };
    let batches = vec![vec![batch(0, 2, None), batch(1, 3, Some((0, 4)))]];
    let assigned = assign::Assigned { batches, inside: vec![0; 2], between: vec![0; 2] };
    let record = record(&[5, 0], &[0; 5]);
    let times = machine.times(&Microbatch::new(&record, &machine.experts, 2).unwrap(), &assigned);
    // Four prices of 1 s, then three rows.
    assert_eq!(times.pass_s, [4.0 + 3.0, 4.0 + 6.0]);
}

#[test]
fn rows_cross_to_a_host_once() {
    let machine = Machine::new(&cluster(4), &experts(4, 2), &rules()).unwrap();
    // PE 1's token needs experts 2 and 3 on the other host: PE 3 has PE 1's number there and forwards to PE 2. PE 0's token stays.
    let record = record(&[1, 1, 0, 0], &[0, 1, 2, 3]);
    let batch = Microbatch::new(&record, &machine.experts, 4).unwrap();
    let assigned = batch.assign(&Placement::blocks(4, 4), Balance::None, &machine).unwrap();
    assert_eq!((assigned.between, assigned.inside), (vec![0, 1, 0, 1], vec![1, 1, 1, 1]));
}

#[test]
fn moves_and_gradients_use_the_slowest_port() {
    let machine = Machine::new(&cluster(4), &experts(4, 2), &rules()).unwrap();
    near(machine.move_s(&[(0, 1), (0, 2), (3, 2)]), 11.0);
    // PE 2 sends 2 / 2 * 2 bytes inside its host, and 2 * 2 / 3 * 2 bytes with PEs of both hosts.
    near(machine.gradients_s(&[vec![2, 3], vec![0, 1, 2], vec![1]]), 2.0 + 80.0 / 3.0);
}

#[test]
fn more_balance_is_more_even_under_drift() {
    for (pes, count, top_k) in [(8, 32, 4), (8, 16, 2)] {
        let drift = Drift {
            experts: count,
            top_k,
            pes,
            tokens_per_pe: 2000,
            zipf: 0.8,
            sigma: 0.3,
            correlation: 0.9,
            microbatches: 4,
            seed: 3,
        };
        let run = || {
            let mut next = drift.start().unwrap().take(24);
            let rules = Rules { microbatches: 4, assign_s: 0.0, ..rules() };
            let experts = Experts { row_bytes: 0.0, weights_bytes: 20.0, ..experts(count, top_k) };
            compare(&cluster(pes), &experts, &rules, &Balance::ALL, &mut || next.next()).unwrap()
        };
        let found = run();
        assert_eq!(found, run());
        let imbalance: Vec<f64> = found.balances.iter().map(|balanced| balanced.imbalance).collect();
        assert!(imbalance.is_sorted_by(|a, b| a >= b) && imbalance[0] > imbalance[1] + 0.05, "{imbalance:?}");
        assert!(imbalance[1] > imbalance[2] + 0.02, "{imbalance:?}");
        assert!(found.balances.iter().all(|balanced| balanced.time_s >= found.ideal_s), "{found:?}");
    }
}

#[test]
fn bad_input_is_reported_in_one_line() {
    let error = |rules: &Rules, records: &[Record]| {
        let mut next = records.iter().cloned();
        let found = compare(&cluster(2), &experts(2, 1), rules, &Balance::ALL, &mut || next.next());
        found.unwrap_err().to_string()
    };
    let none = Rules { microbatches: 0, ..rules() };
    assert_eq!(error(&none, &[]), "`microbatches` is 0, expected 1 to 1048576");
    let short = error(&Rules { microbatches: 2, ..rules() }, &[record(&[1], &[0]), record(&[1], &[0])]);
    let want = "`microbatches` is 2, and the layer has 2, expected fewer: the first plan needs 2, those of `replan_every` steps";
    assert_eq!(short, want);
    assert_eq!(error(&rules(), &[record(&[1], &[2])]), "choices have 2, expected an expert below 2");
    assert_eq!(error(&rules(), &[record(&[], &[])]), "tokens_per_node is empty, expected at least one node");
}
