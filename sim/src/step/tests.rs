use aristos_formats::cluster::{Device, Link, Links, Tier, Tiers};

use super::*;

/// One host of n PEs with 1 FLOP/s each; alpha is 1 s and beta 1 s/B.
fn cluster(n: usize) -> Cluster {
    let link = Link { alpha_ms: 1e3, beta_ms_per_mb: 1e9 };
    let devices = (0..n).map(|i| Device::new(i as u64, "h", 1e-3, 8)).collect();
    Cluster::new(devices, Links::Tiers(Tiers::new(n, vec![Tier { size: n, link }]).unwrap()))
}

/// One row with one slot for each of these experts.
fn rows(experts: &[u32]) -> Rows {
    Rows {
        starts: (0..=experts.len() as u32).collect(),
        experts: experts.to_vec(),
        returns: (0..experts.len() as u32).collect(),
        relay: None,
    }
}

/// The plan of a group with chunks of `chunk_rows` rows and tiles of at most `tile_rows` rows.
fn group_plan(rows: &[Vec<Rows>], experts: &[usize], chunk_rows: usize, tile_rows: usize) -> GroupPlan {
    let tokens: Vec<usize> = rows.iter().map(|rows| rows.iter().map(Rows::len).sum()).collect();
    let tiles = |run: std::ops::Range<usize>| -> Vec<_> {
        run.clone().step_by(tile_rows).map(|start| start..run.end.min(start + tile_rows)).collect()
    };
    GroupPlan::new(rows, &tokens, experts, &Cutting { chunk_rows, early_rows: tile_rows, tiles: &tiles })
}

fn cost() -> LayerCost {
    LayerCost {
        row_bytes: 10.0,
        tile_flop: [Affine::each(100.0); 2],
        gradient_flop: [Affine::each(100.0), Affine::default()],
        ..LayerCost::default()
    }
}

struct Case {
    cluster: Cluster,
    groups: Vec<Group>,
    plans: Vec<GroupPlan>,
    cost: LayerCost,
}

impl Case {
    fn one_group(plan: GroupPlan, experts: &[usize]) -> Case {
        let n = experts.len();
        let mut next = 0;
        let mut of = |count: &usize| {
            next += count;
            (next - count..next).collect()
        };
        let group = Group { members: (0..n).collect(), experts: experts.iter().map(&mut of).collect(), plan: 0 };
        Case { cluster: cluster(n), groups: vec![group], plans: vec![plan], cost: cost() }
    }

    fn step(&self) -> Step<'_> {
        Step {
            cluster: &self.cluster,
            groups: &self.groups,
            plans: &self.plans,
            cost: &self.cost,
            schedule: Schedule::Pipelined,
            backward: false,
            window_chunks: 8,
            steps: 1,
            jitter: None,
            cores: None,
            nics: Nics::PerPe,
            speed: (1.0, 1.0),
            traced: 8,
        }
    }
}

fn near(got: f64, want: f64) {
    assert!((got - want).abs() < 1e-9 * want.abs().max(1.0), "{got}, expected {want}");
}

#[test]
fn one_token_makes_a_round_trip() {
    // PE 0 has a token for PE 1's expert: 1 + 10 s to PE 1, 100 s of work, 1 + 10 s back.
    let plan = group_plan(&[vec![rows(&[]), rows(&[0])], vec![rows(&[]), rows(&[])]], &[0, 1], 4, 4);
    let case = Case::one_group(plan, &[0, 1]);
    let times = simulate(&case.step());
    near(times.step_s[0], 122.0);
    near(times.pes[1].expert_s[0], 100.0);
    near(times.pes[0].waiting_s[0], 122.0);
    // PE 1 ends after its tile; PE 0 ends 11 s later, when the result has arrived.
    near(times.straggler_s[1], 11.0);
    let names: Vec<&str> = times.spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["router", "router", "rows from PE 0", "expert 0", "results from PE 1"]);
    // Bulk: counts take 1 s, rows 11, experts 100 and results 11, each followed by a barrier of 1 s (one message's latency).
    let bulk = simulate(&Step { schedule: Schedule::Bulk, ..case.step() });
    near(bulk.straggler_s[1], 100.0);
    near(bulk.step_s[0], 1.0 + 1.0 + 11.0 + 1.0 + 100.0 + 1.0 + 11.0 + 1.0);
    near(times.sent_bytes, 20.0);
    // The dispatch adds 3 bytes per row and 4 per slot.
    let mut with = Case::one_group(case.plans[0].clone(), &[0, 1]);
    (with.cost.out_bytes, with.cost.back_bytes) = ((3.0, 4.0), 5.0);
    near(simulate(&with.step()).step_s[0], 129.0);
    near(simulate(&Step { backward: true, ..with.step() }).sent_bytes, 27.0 + 25.0);
    // Backward: the gradient arrives at PE 1 after 11 s. PE 1 computes the input's gradient for 100 s, then the weights' gradient for 100 s
    // while it returns the input's.
    let backward = simulate(&Step { backward: true, ..case.step() });
    near(backward.step_s[0], 122.0 + 111.0 + 100.0);
    near(backward.pes[1].expert_s[1], 200.0);
    near(backward.pes[0].pass_s[1], 122.0);
    let bulk = simulate(&Step { schedule: Schedule::Bulk, backward: true, ..case.step() });
    near(bulk.step_s[0], 127.0 + 1.0 + 12.0 + 201.0 + 12.0);
}

#[test]
fn transfers_overlap_computation() {
    // PE 1 has two tokens of its own and receives two from PE 0, in chunks of one row and tiles of one row.
    let plan = group_plan(&[vec![rows(&[]), rows(&[0, 0])], vec![rows(&[]), rows(&[0, 0])]], &[0, 1], 1, 1);
    let case = Case::one_group(plan, &[0, 1]);
    let times = simulate(&case.step());
    // Rows arrive at 11 and 21. PE 1 computes a row of its own until 100, then the two received rows, for which PE 0 waits, until 300, and
    // then its other row.
    near(times.step_s[0], 400.0);
    near(times.pes[1].waiting_s[0], 0.0);
    assert!(times.overlap_efficiency() < 1.0);
    // A window of one chunk: the second row is sent when the credit of the first has arrived, at 11 + 1, and arrives at 12 + 11.
    let window = simulate(&Step { window_chunks: 1, ..case.step() });
    near(window.step_s[0], 400.0);
    let second = window.spans.iter().filter(|span| span.name == "rows from PE 0").nth(1).unwrap();
    near(second.start_s + second.dur_s, 23.0);
    // Bulk in windows of one chunk, with a barrier of 1 s after each part: counts 1 + 1, rows twice 11 + 1, experts 400 + 1, results of
    // two rows 21 + 1.
    let bulk = simulate(&Step { window_chunks: 1, schedule: Schedule::Bulk, ..case.step() });
    near(bulk.step_s[0], 2.0 + 24.0 + 401.0 + 22.0);
    // Twice the FLOP/s halve the time of the work; all transfers are hidden behind it.
    let fast = simulate(&Step { speed: (1.0, 2.0), ..case.step() });
    near(fast.step_s[0], 200.0);
}

#[test]
fn tile_waits_for_all_its_rows() {
    // One tile of two rows, from PEs 0 and 2, which both send to PE 1: the rows arrive one after the other.
    let none = || rows(&[]);
    let plan = group_plan(
        &[vec![none(), rows(&[0]), none()], vec![none(), none(), none()], vec![none(), rows(&[0]), none()]],
        &[0, 1, 0],
        4,
        4,
    );
    let case = Case::one_group(plan, &[0, 1, 0]);
    let times = simulate(&case.step());
    // The rows have arrived at 21. After 200 s of work the two results are sent one after the other, in 1 + 20.
    near(times.step_s[0], 21.0 + 200.0 + 21.0);
}

#[test]
fn groups_sum_their_gradients() {
    // Two groups of one PE each, with one token and one expert.
    let plan = group_plan(&[vec![rows(&[0])]], &[1], 4, 4);
    let mut case = Case::one_group(plan, &[1]);
    case.cluster = cluster(2);
    case.groups.push(Group { members: vec![1], ..case.groups[0].clone() });
    case.cost.gradient_bytes = (50.0, 0.0);
    let times = simulate(&Step { backward: true, ..case.step() });
    // 300 s of work, then 2 latencies and 2 (2 - 1) / 2 of 50 bytes.
    near(times.step_s[0], 300.0 + 2.0 + 50.0);
    let sums = |pe: &PeTime| [pe.sums_wait_s, pe.expert_sums_s, pe.replicated_sums_s];
    assert_eq!(sums(&times.pes[0]), [0.0, 52.0, 0.0]);
    // The replicated weights' gradients take 2 latencies and 2 (2 - 1) / 2 of 70 bytes, while the experts' take 52 s.
    case.cost.gradient_bytes = (50.0, 70.0);
    let times = simulate(&Step { backward: true, ..case.step() });
    near(times.step_s[0], 300.0 + 72.0);
    assert_eq!(sums(&times.pes[0]), [0.0, 0.0, 72.0]);
    // One device is 100 s faster and waits for the other.
    case.cluster.devices[1].flop_per_ms *= 1.5;
    let times = simulate(&Step { backward: true, ..case.step() });
    near(times.step_s[0], 300.0 + 72.0);
    near(times.pes[1].sums_wait_s, 100.0);
    case.cost.gradient_bytes.1 = 0.0;
    near(simulate(&Step { backward: true, ..case.step() }).pes[1].sums_wait_s, 100.0);
}

#[test]
fn device_work_is_divided_into_phases() {
    // Three tokens for one expert, in tiles of two rows; a device computes multiples of two rows.
    let plan = group_plan(&[vec![rows(&[0, 0, 0])]], &[1], 4, 2);
    let mut case = Case::one_group(plan, &[1]);
    case.cost.tile_flop = [Affine { base: 0.0, each: 10.0, multiple: 2.0 }; 2];
    case.cost.epilogue_flop = [Affine::each(1.0), Affine::each(2.0)];
    case.cost.weights_flop = [7.0, 0.0];
    case.cost.gradient_flop = [Affine::each(10.0), Affine { base: 5.0, ..Affine::default() }];
    (case.cost.start_flop, case.cost.tail_flop) = ([11.0, 13.0].map(Affine::each), [17.0, 19.0].map(Affine::each));
    case.cost.router_flop = [Affine::each(1.0); 2];
    for copies in [0.0, 2.0] {
        // Own rows are gathered before the products, in both schedules.
        case.cost.copy_flop = [CopyFlop { gather_slot: copies, ..CopyFlop::default() }; 2];
        for schedule in [Schedule::Pipelined, Schedule::Bulk] {
            let times = simulate(&Step { schedule, backward: true, ..case.step() });
            near(times.step_s[0], 81.0 + 116.0 + 2.0 * 3.0 * copies);
            near(times.pes[0].expert_s.iter().sum(), 47.0 + 70.0);
        }
    }
    case.cost.copy_flop = [CopyFlop::default(); 2];
    for schedule in [Schedule::Pipelined, Schedule::Bulk] {
        let times = simulate(&Step { schedule, backward: true, ..case.step() });
        let time = times.pes[0];
        let phases = [time.router_s, time.start_s, time.expert_s, time.epilogue_s, time.tail_s, time.pass_s];
        for (phase, expected) in phases.iter().zip([
            [3.0, 3.0],
            [11.0, 13.0],
            // Four rows of ten each, and the weights once; backward without weights, and with gradients of three rows.
            [47.0, 70.0],
            // Three rows in forward; three of two each and the gradients' five in backward.
            [3.0, 11.0],
            [17.0, 19.0],
            [81.0, 116.0],
        ]) {
            phase.iter().zip(expected).for_each(|(s, expected)| near(*s, expected));
        }
    }
}

#[test]
fn jitter_is_seeded_and_makes_stragglers() {
    let n = 8;
    let all = |from: usize| (0..n).map(|to| rows(if from == to { &[0, 0][..] } else { &[0] })).collect::<Vec<_>>();
    let plan = group_plan(&(0..n).map(all).collect::<Vec<_>>(), &[1; 8], 2, 4);
    let case = Case::one_group(plan, &[1; 8]);
    let of =
        |seed| simulate(&Step { jitter: Some(Jitter { seed, sigma: 0.3 }), steps: 3, backward: true, ..case.step() });
    let (first, again, other) = (of(1), of(1), of(2));
    assert_eq!(first, again);
    assert_ne!(first.step_s, other.step_s);
    assert_ne!(first.step_s[0], first.step_s[1]);
    assert_eq!(first.straggler_s.len(), 24);
    assert!(first.straggler_s.windows(2).all(|pair| pair[0] <= pair[1]) && first.straggler_s[23] > 10.0);
    let even = simulate(&Step { backward: true, ..case.step() });
    assert!(first.step_s.iter().sum::<f64>() / 3.0 > even.step_s[0]);
}

#[test]
fn all_work_is_done_for_random_rows() {
    let mut state = 5u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let n = 1 + random(5) as usize;
        let experts: Vec<usize> = (0..n).map(|_| random(3) as usize).collect();
        let mut of = |to: usize| -> Rows {
            let count = if experts[to] == 0 { 0 } else { random(9) };
            let mut rows = Rows { starts: vec![0], ..Rows::default() };
            for _ in 0..count {
                let first = random(experts[to] as u64) as u32;
                rows.experts.extend(first..experts[to] as u32);
                rows.returns.insert(random(rows.starts.len() as u64) as usize, rows.starts.len() as u32 - 1);
                rows.starts.push(rows.experts.len() as u32);
            }
            rows
        };
        let all: Vec<Vec<Rows>> = (0..n).map(|_| (0..n).map(&mut of).collect()).collect();
        let slots: usize = all.iter().flatten().map(|rows| rows.experts.len()).sum();
        let (chunk, tile) = (1 + random(4) as usize, 1 + random(4) as usize);
        let mut case = Case::one_group(group_plan(&all, &experts, chunk, tile), &experts);
        case.cost.router_flop = [3.0, 6.0].map(Affine::each);
        case.cost.shared_flop = [5.0, 10.0].map(Affine::each);
        for schedule in [Schedule::Pipelined, Schedule::Bulk] {
            for window_chunks in [1, 2, 9] {
                let times = simulate(&Step { schedule, window_chunks, backward: true, steps: 2, ..case.step() });
                let work: f64 = times.pes.iter().map(|pe| pe.expert_s.iter().sum::<f64>()).sum();
                let tokens: f64 = case.plans[0].pes.iter().map(|pe| f64::from(pe.tokens)).sum();
                near(work, 2.0 * (300.0 * slots as f64 + 15.0 * tokens));
                let router: f64 = times.pes.iter().map(|pe| pe.router_s.iter().sum::<f64>()).sum();
                near(router, 2.0 * 9.0 * tokens);
                assert_eq!(times.step_s.len(), 2);
                near(times.step_s[0], times.step_s[1]);
            }
        }
    }
}

#[test]
fn pes_share_cores() {
    // Four PEs, each with one token for its own expert: 100 s of work in forward and 200 s in backward.
    let n = 4;
    let own = |from: usize| (0..n).map(|to| rows(if from == to { &[0][..] } else { &[] })).collect::<Vec<_>>();
    let plan = group_plan(&(0..n).map(own).collect::<Vec<_>>(), &[1; 4], 4, 1);
    let case = Case::one_group(plan, &[1; 4]);
    let with = |count, busy_factor| {
        simulate(&Step { cores: Some(Cores { count, busy_factor }), backward: true, ..case.step() })
    };
    // Own rows are computed while headers are in flight (1 s), so each PE works for 300 s without a wait.
    for (count, busy_factor, step_s) in
        [(4, 1.0, 300.0), (4, 1.5, 450.0), (2, 1.0, 600.0), (2, 1.5, 900.0), (1, 7.0, 1200.0)]
    {
        let times = with(count, busy_factor);
        near(times.step_s[0], step_s);
        near(times.pes[3].expert_s[0] + times.pes[3].expert_s[1], step_s);
    }
    // Three of four busy cores are two thirds of the way from one to four: 1 + 0.3 * 2 / 3.
    near(Cores { count: 4, busy_factor: 1.3 }.slowdown(3), 1.2);
    // Three PEs on two cores: one has a core alone, and the other two share a core. PEs at work do not move to a core that becomes idle.
    let own = |from: usize| (0..3).map(|to| rows(if from == to { &[0][..] } else { &[] })).collect::<Vec<_>>();
    let three = Case::one_group(group_plan(&(0..3).map(own).collect::<Vec<_>>(), &[1; 3], 4, 1), &[1; 3]);
    let times = simulate(&Step { cores: Some(Cores { count: 2, busy_factor: 1.0 }), ..three.step() });
    near(times.pes[0].expert_s[0], 200.0);
    near(times.pes[1].expert_s[0], 100.0);
    // Five PEs on two cores. The two PEs of the second core have half the work. Once they have ended, one of the first core's three PEs
    // moves there.
    let own = |from: usize| {
        let tokens = &[0, 0][..2 - from % 2];
        (0..5).map(|to| rows(if from == to { tokens } else { &[] })).collect::<Vec<_>>()
    };
    let five = Case::one_group(group_plan(&(0..5).map(own).collect::<Vec<_>>(), &[1; 5], 4, 1), &[1; 5]);
    let times = simulate(&Step { cores: Some(Cores { count: 2, busy_factor: 1.0 }), ..five.step() });
    // Both have 100 s of work and end at 200. The three PEs each finish a tile at 300; the first of them that starts its second tile moves.
    near(times.pes[1].expert_s[0], 200.0);
    let mut ends: Vec<f64> = [0, 2, 4].map(|pe| times.pes[pe].expert_s[0]).to_vec();
    ends.sort_by(f64::total_cmp);
    near(ends[0], 400.0);
    near(times.step_s[0], 500.0);
    // Two PEs on one core, with 100 s and 200 s of work: both work at half the speed until 200, then the second works alone.
    let plan = group_plan(&[vec![rows(&[0]), rows(&[])], vec![rows(&[]), rows(&[0, 0])]], &[1, 1], 4, 1);
    let case = Case::one_group(plan, &[1, 1]);
    let times = simulate(&Step { cores: Some(Cores { count: 1, busy_factor: 1.0 }), ..case.step() });
    near(times.pes[0].expert_s[0], 200.0);
    near(times.step_s[0], 300.0);
}

#[test]
fn pes_copy_rows_themselves() {
    // PE 0 has a token for PE 1's expert. Putting the row takes 2 + 3 s, its transfer 1, gathering the row 5, and the expert 100. Summing
    // and putting the result takes 7 + 2 + 3, its transfer 1, and adding the result 11.
    let plan = group_plan(&[vec![rows(&[]), rows(&[0])], vec![rows(&[]), rows(&[])]], &[0, 1], 4, 4);
    let mut case = Case::one_group(plan, &[0, 1]);
    let copy = CopyFlop {
        message: [2.0; 2],
        put_row: [3.0; 2],
        gather_slot: 5.0,
        sum_slot: 7.0,
        add_row: 11.0,
        ..CopyFlop::default()
    };
    case.cost.copy_flop = [copy; 2];
    let times = simulate(&case.step());
    near(times.step_s[0], 5.0 + 1.0 + 5.0 + 100.0 + 12.0 + 1.0 + 11.0);
    near(times.pes[0].dispatch_s[0], 5.0);
    near(times.pes[1].dispatch_s[0], 5.0);
    near(times.pes[1].combine_s[0], 12.0);
    near(times.pes[0].combine_s[0], 11.0);
    // The bulk schedule adds barriers of 1 s after counts, rows, experts and results.
    let bulk = simulate(&Step { schedule: Schedule::Bulk, ..case.step() });
    near(bulk.step_s[0], times.step_s[0] + 1.0 + 4.0);
    // A local row is only gathered, summed and added.
    let mut own = Case::one_group(group_plan(&[vec![rows(&[0])]], &[1], 4, 4), &[1]);
    own.cost.copy_flop = [copy; 2];
    near(simulate(&own.step()).step_s[0], 5.0 + 100.0 + 18.0);
}

#[test]
fn receiving_thread_uses_idle_cores() {
    // PE 0 has a token for PE 1's expert, and each PE has one for its own expert. PE 1 is computing its own token (100 s) when PE 0's
    // arrives. Receiving that takes 6 + 7 s of PE 1's time if no core is idle.
    let plan = group_plan(&[vec![rows(&[0]), rows(&[0])], vec![rows(&[]), rows(&[0])]], &[1, 1], 4, 1);
    let mut case = Case::one_group(plan, &[1, 1]);
    case.cost.copy_flop = [CopyFlop { take_message: 6.0, take_row: 7.0, ..CopyFlop::default() }; 2];
    for (count, expert_s) in [(3, 200.0), (2, 213.0)] {
        let times = simulate(&Step { cores: Some(Cores { count, busy_factor: 1.0 }), ..case.step() });
        near(times.pes[1].expert_s[0], expert_s);
        // PE 0 is idle when its result arrives, so its core receives the result and no work is delayed.
        near(times.pes[0].expert_s[0], 100.0);
    }
}

#[test]
fn results_return_in_order_of_last_expert() {
    // PE 0 has four rows for PE 1, in chunks of two. The first and the last row have experts 0 and 1; the other two have only expert 0 and
    // return first. PE 1 has a row of its own for expert 2, which it computes until PE 0's rows have arrived.
    let four =
        Rows { starts: vec![0, 2, 3, 4, 6], experts: vec![0, 1, 0, 0, 0, 1], returns: vec![1, 2, 0, 3], relay: None };
    let none = || Rows { starts: vec![0], ..Rows::default() };
    let tiles = |run: std::ops::Range<usize>| if run.is_empty() { Vec::new() } else { vec![run] };
    let cutting = Cutting { chunk_rows: 2, early_rows: 1, tiles: &tiles };
    let plan = GroupPlan::new(&[vec![none(), four], vec![none(), rows(&[2])]], &[4, 1], &[0, 3], &cutting);
    let times = simulate(&Case::one_group(plan, &[0, 3]).step());
    // PE 1 computes expert 2 until 100, expert 0 until 500 and expert 1 until 700. Returning two rows takes 1 + 20 s.
    let back = times.spans.iter().filter(|span| span.name == "results from PE 1");
    let back: Vec<f64> = back.map(|span| span.start_s + span.dur_s).collect();
    assert_eq!(back.len(), 2);
    near(back[0], 521.0);
    near(back[1], 721.0);
}

/// Two hosts of two PEs; alpha is 1 s and beta 1 s/B inside a host, and 10 s and 4 s/B between hosts.
fn two_hosts() -> Cluster {
    let link = |alpha_ms, beta_ms_per_mb| Link { alpha_ms, beta_ms_per_mb };
    let tiers = vec![Tier { size: 2, link: link(1e3, 1e9) }, Tier { size: 4, link: link(1e4, 4e9) }];
    let devices = (0..4).map(|i| Device::new(i as u64, format!("h{}", i / 2), 1e-3, 8)).collect();
    Cluster::new(devices, Links::Tiers(Tiers::new(4, tiers).unwrap()))
}

#[test]
fn relayed_rows_cross_the_network_once() {
    // PE 0 has one token for the experts of PEs 2 and 3, which take 100 s each. A row has 10 B.
    let none = || rows(&[]);
    let relayed = |relay: Option<u32>| Rows {
        relay: relay.map(|pe| Relay { pe, rows: 1, places: vec![0], result_places: vec![0] }),
        ..rows(&[0])
    };
    let case = |relay: Option<u32>| {
        let quiet = || vec![none(), none(), none(), none()];
        let sent = vec![vec![none(), none(), relayed(relay), relayed(relay)], quiet(), quiet(), quiet()];
        let mut case = Case::one_group(group_plan(&sent, &[0, 0, 1, 1], 4, 4), &[0, 0, 1, 1]);
        case.cluster = two_hosts();
        case
    };
    // One row for each PE: they arrive at 10 + 40 and at 90. Results leave at 150 and 190, and arrive 50 s later.
    let direct = simulate(&case(None).step());
    near(direct.step_s[0], 90.0 + 100.0 + 50.0);
    near(direct.sent_bytes, 40.0);
    near(direct.network_bytes, 40.0);
    // With PE 2 as relay: the row arrives at PE 2 at 50 and at PE 3 at 50 + 1 + 10. PE 3's result arrives at PE 2 at 161 + 11, and the sum
    // arrives at PE 0 50 s later.
    let (once, once_case) = (simulate(&case(Some(2)).step()), case(Some(2)));
    near(once.step_s[0], 61.0 + 100.0 + 11.0 + 50.0);
    near(once.sent_bytes, 40.0);
    near(once.network_bytes, 20.0);
    near(once.pes[2].expert_s[0], 100.0);
    let names: Vec<&str> =
        once.spans.iter().map(|span| span.name.as_str()).filter(|name| name.contains(" PE ")).collect();
    assert_eq!(names, ["rows from PE 0", "rows from PE 2", "results from PE 3", "results from PE 2"]);
    // The dispatch adds 3 bytes per row and 4 per slot, and backward 5 per returned slot. Both slots cross the network; one is forwarded.
    let mut with = case(Some(2));
    (with.cost.out_bytes, with.cost.back_bytes) = ((3.0, 4.0), 5.0);
    let with = simulate(&Step { backward: true, ..with.step() });
    near(with.network_bytes, (10.0 + 3.0 + 8.0) + 10.0 + 10.0 + (10.0 + 10.0));
    near(with.sent_bytes, with.network_bytes + (10.0 + 3.0 + 4.0) + 10.0 + 10.0 + (10.0 + 5.0));
    // Bulk: counts take 10 (the longest latency), rows 61, experts 100 and results 11 + 50. A barrier of four PEs takes 2 * 10.
    let bulk = simulate(&Step { schedule: Schedule::Bulk, ..once_case.step() });
    near(bulk.step_s[0], (10.0 + 20.0) + (61.0 + 20.0) + (100.0 + 20.0) + (61.0 + 20.0));
    near(bulk.network_bytes, 20.0);
}

#[test]
fn relays_return_their_slots() {
    // Three tokens for both PEs of the other host, in chunks of one row and a window of one chunk: a chunk leaves when both PEs have
    // gathered the previous one.
    let none = || rows(&[]);
    let three = || Rows {
        relay: Some(Relay { pe: 2, rows: 3, places: vec![0, 1, 2], result_places: vec![0, 1, 2] }),
        ..rows(&[0, 0, 0])
    };
    let quiet = || vec![none(), none(), none(), none()];
    let sent = vec![vec![none(), none(), three(), three()], quiet(), quiet(), quiet()];
    let mut case = Case::one_group(group_plan(&sent, &[0, 0, 1, 1], 1, 1), &[0, 0, 1, 1]);
    case.cluster = two_hosts();
    let times = simulate(&Step { window_chunks: 1, ..case.step() });
    // Row 0 is at PE 2 at 50 and at PE 3 at 61; the credits are back at PE 2 at 62 and at PE 0 at 72. Row 1 follows at 122 and 133 (credit
    // at 144), row 2 at 194 and 205. PE 3 computes from 61 to 361, and its sum takes 11 + 50.
    let ends: Vec<f64> =
        times.spans.iter().filter(|span| span.name == "rows from PE 0").map(|span| span.start_s + span.dur_s).collect();
    assert_eq!(ends, [50.0, 122.0, 194.0]);
    near(times.step_s[0], 361.0 + 61.0);
    for (schedule, window_chunks) in [(Schedule::Pipelined, 2), (Schedule::Bulk, 1), (Schedule::Bulk, 2)] {
        let step = Step { schedule, window_chunks, backward: true, steps: 2, ..case.step() };
        let times = simulate(&step);
        near(times.network_bytes, 2.0 * 2.0 * 6.0 * 10.0);
        near(times.sent_bytes, 2.0 * times.network_bytes);
        near(times.pes[3].expert_s[1], 2.0 * 600.0);
    }
}
