use super::*;

fn params(text: &str) -> Params {
    Params::from_json(text).unwrap()
}

fn even(nodes: usize, bytes: u64) -> Load {
    Load::new(nodes, vec![(0..nodes * nodes).map(|at| if at / nodes == at % nodes { 0 } else { bytes }).collect()])
}

fn run(params: &Params, load: &Load, schedule: Schedule) -> Exchange {
    exchange(params, load, schedule, None).unwrap()
}

/// The published program's rules, as described in `docs/simulator.md`, simulated packet by packet: the reference for counted packets.
fn packet_by_packet(params: &Params, load: &Load) -> Vec<f64> {
    let n = load.nodes;
    let mut left: Vec<i64> = load.layers[0].iter().map(|bytes| *bytes as i64).collect();
    let mut times = Vec::new();
    while left.iter().sum::<i64>() > 0 {
        let mut nic = vec![0; n];
        // For each unordered pair and link: the direction, and the sizes of the packets.
        let mut links = vec![vec![(0i32, Vec::new()); params.num_links]; n * n];
        for from in 0..n {
            let mut moved = true;
            while moved {
                moved = false;
                for to in 0..n {
                    let mut sent = 0;
                    while left[from * n + to] > 0 && sent < params.round_robin_max_packets {
                        let packet = left[from * n + to].min(params.packet_size_bytes as i64);
                        if nic[from].max(nic[to]) as f64 + packet as f64 > params.nic_rate_bytes {
                            break;
                        }
                        let way = if from < to { 1 } else { -1 };
                        let links = &mut links[from.min(to) * n + from.max(to)];
                        let fits = |(direction, packets): &(i32, Vec<i64>)| {
                            (packets.iter().sum::<i64>() + packet) as f64 <= params.intra_bw_bytes_per_ms
                                && direction * way >= 0
                        };
                        let Some(place) = links.iter().position(fits) else { break };
                        links[place].0 = way;
                        links[place].1.push(packet);
                        nic[from] += packet;
                        nic[to] += packet;
                        left[from * n + to] -= packet;
                        (sent, moved) = (sent + 1, true);
                    }
                }
            }
        }
        let first = || links.iter().map(|links| &links[0].1);
        let packets = first().map(Vec::len).max().unwrap().max(1);
        let bytes = first().map(|packets| packets.iter().sum::<i64>()).max().unwrap();
        let slowest = packets as f64 * params.packet_prep_delay_ms + bytes as f64 / params.intra_bw_bytes_per_ms;
        times.push(params.base_delay_ms + slowest);
    }
    times
}

/// SplitMix64.
fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % below
}

#[test]
fn the_published_example() {
    for schedule in [Schedule::Compat, Schedule::Fair] {
        let exchange = run(&Params::default(), &even(8, 1600), schedule);
        assert_eq!((exchange.time_ms, exchange.rounds, exchange.closed_form_ms), (256.0, 32, Some(256.0)));
        assert_eq!(exchange.round_times_ms.unwrap(), [8.0; 32]);
    }
}

#[test]
fn counting_packets_is_sending_them_one_by_one() {
    let mut state = 11;
    let mut bound = (0, 0);
    for case in 0..300 {
        let mut next = |below| random(&mut state, below);
        let nodes = 2 + next(5) as usize;
        let packet = 1 + next(30);
        let params = Params {
            num_links: 1 + next(3) as usize,
            packet_size_bytes: packet,
            intra_bw_bytes_per_ms: (packet + next(90)) as f64 + 0.25 * next(4) as f64,
            nic_rate_bytes: (packet + next(400)) as f64,
            round_robin_max_packets: 1 + next(7),
            packet_prep_delay_ms: next(5) as f64 * 0.3,
            ..Params::default()
        };
        let most = [10, 300, 3000][next(3) as usize];
        let bytes = (0..nodes * nodes).map(|at| if at.is_multiple_of(nodes + 1) { 0 } else { next(most) }).collect();
        let load = Load::new(nodes, vec![bytes]);
        let want = packet_by_packet(&params, &load);
        let got = run(&params, &load, Schedule::Compat);
        assert_eq!(got.round_times_ms.as_deref(), Some(&want[..]), "case {case}: {params:?} {load:?}");
        assert!((got.time_ms - want.iter().sum::<f64>()).abs() <= 1e-9 * got.time_ms);
        let nic = params.nic_rate_bytes < params.intra_bw_bytes_per_ms * params.num_links as f64;
        bound = (bound.0 + usize::from(nic), bound.1 + usize::from(got.runs.iter().any(|run| run.repeats > 1)));
    }
    // In more than 50 cases each, a NIC's limit is below that of a pair's links, and rounds repeat.
    assert!(bound.0 > 50 && bound.1 > 50, "{bound:?}");
}

#[test]
fn the_closed_form_is_exact_where_it_is_given() {
    let mut given = 0;
    for links in 1..=3 {
        for packet in [10, 20, 25, 30, 50] {
            for bytes in [0, 100, 150, 600, 1200] {
                for nic in [200.0, 10_000.0] {
                    let params = Params {
                        num_links: links,
                        packet_size_bytes: packet,
                        nic_rate_bytes: nic,
                        initial_cpu_delay_ms: 3.0,
                        ..Params::default()
                    };
                    for schedule in [Schedule::Compat, Schedule::Fair] {
                        let exchange = run(&params, &even(5, bytes), schedule);
                        if let Some(closed) = exchange.closed_form_ms {
                            assert!(
                                (closed - exchange.time_ms).abs() < 1e-9 * closed,
                                "{params:?} {bytes} {exchange:?}"
                            );
                            given += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(given > 40, "{given}");
}

#[test]
fn both_directions_get_their_turn() {
    // Node 0 has the only link in even rounds and node 1 in odd ones; as published, node 0 keeps it until its load is sent.
    let load = Load::new(2, vec![vec![0, 200, 100, 0]]);
    for (schedule, senders) in [(Schedule::Fair, [0, 1, 0]), (Schedule::Compat, [0, 0, 1])] {
        let mut trace = Vec::new();
        let exchange = exchange(&Params::default(), &load, schedule, Some(&mut trace)).unwrap();
        assert_eq!((exchange.rounds, exchange.time_ms), (3, 24.0));
        assert_eq!(trace.iter().map(|span| span.pe).collect::<Vec<_>>(), senders);
    }
}

#[test]
fn the_second_link_is_timed_in_the_default_alone() {
    // Link 0 carries one packet from 0 to 1, and link 1 five packets from 1 to 0, in 5 + 1 ms. The published program times only link 0,
    // 1 + 0.2 ms.
    let params = params(r#"{"num_links": 2, "base_delay_ms": 0}"#);
    let load = Load::new(2, vec![vec![0, 20, 100, 0]]);
    let [fair, compat] = [Schedule::Fair, Schedule::Compat].map(|schedule| run(&params, &load, schedule).time_ms);
    assert_eq!((fair, compat), (6.0, 1.2));
}

#[test]
fn clusters_overlap_and_layers() {
    let base = r#"{"nodes_per_cluster": 2, "inter_bw_bytes_per_ms": 50, "base_delay_ms": 0, "packet_size_bytes": 25}"#;
    let one = |from: usize, to: usize, bytes: u64| {
        let mut load = vec![0; 16];
        load[from * 4 + to] = bytes;
        Load::new(4, vec![load])
    };
    // 100 bytes take one round of 4 packets inside a cluster, and two rounds of 2 packets between clusters.
    let inside = run(&params(base), &one(0, 1, 100), Schedule::Fair);
    assert_eq!((inside.rounds, inside.time_ms), (1, 5.0));
    let between = run(&params(base), &one(1, 2, 100), Schedule::Fair);
    assert_eq!((between.rounds, between.time_ms, between.closed_form_ms), (2, 6.0, None));
    // Preparing a packet takes 1 ms and transferring it 0.25 ms. The four preparations are not hidden, nor is the last transfer; all times
    // 1.2.
    let overlapped = Params { parallelization_multiplier: Some(1.2), ..params(base) };
    assert!((run(&overlapped, &one(0, 1, 100), Schedule::Fair).time_ms - 1.2 * 4.25).abs() < 1e-12);
    // Transferring a packet takes 0.5 ms and preparing it 0.1 ms. In each of two rounds the first preparation and both transfers are not
    // hidden.
    let slow = Params { packet_prep_delay_ms: 0.1, ..overlapped };
    assert!((run(&slow, &one(1, 2, 100), Schedule::Fair).time_ms - 2.0 * 1.2 * 1.1).abs() < 1e-12);
    // Layers are exchanged one after the other, and the initial delay is added once.
    let layers = Params { num_layers: 3, initial_cpu_delay_ms: 7.0, ..Params::default() };
    let once = Params { num_layers: 1, ..layers.clone() };
    let (three, one) = (run(&layers, &even(8, 1600), Schedule::Fair), run(&once, &even(8, 1600), Schedule::Fair));
    assert_eq!((three.time_ms, three.rounds, three.closed_form_ms), (7.0 + 3.0 * 256.0, 96, Some(775.0)));
    assert_eq!((one.time_ms, one.rounds), (263.0, 32));
    let written = Load { layers: vec![even(8, 1600).layers[0].clone(); 3], ..even(8, 1600) };
    assert_eq!(run(&once, &written, Schedule::Fair).time_ms, three.time_ms);
    assert_eq!(Load::from_json(&written.to_json()).unwrap(), written);
    assert_eq!(Load::from_json(&even(3, 5).to_json()).unwrap(), even(3, 5));
}

#[test]
fn nothing_to_send_takes_no_round() {
    let params = Params { initial_cpu_delay_ms: 3.0, ..Params::default() };
    for load in [Load::new(1, vec![vec![0]]), even(4, 0)] {
        let exchange = run(&params, &load, Schedule::Compat);
        assert_eq!((exchange.time_ms, exchange.rounds), (3.0, 0));
    }
    // The diagonal is not sent.
    let local = Load::from_json(r#"{"load_bytes": [[900, 0], [0, 900]]}"#).unwrap();
    assert_eq!(run(&params, &local, Schedule::Compat).time_ms, 3.0);
}

#[test]
fn bad_input_is_reported_in_one_line() {
    let error = |text: &str| Params::from_json(text).unwrap_err().to_string();
    assert_eq!(error(r#"{"num_links": 0}"#), "num_links is 0, expected 1 to 4194304");
    assert!(error(r#"{"base_delay_ms": -1}"#).starts_with("base_delay_ms is -1.0, expected 0 or"));
    assert!(error(r#"{"packet_size_bytes": 1e30}"#).starts_with("packet_size_bytes: "));
    assert!(error(r#"{"packet_size": 3}"#).contains("packet_size"));
    assert!(error(r#"{"nic_rate_bytes": NaN}"#).contains("`NaN` is not JSON"));
    assert!(error(r#"{"inter_bw_bytes_per_ms": 5}"#).starts_with("nodes_per_cluster is missing"));
    assert!(error(r#"{"parallelization_multiplier": 0.5}"#).contains("0.5"));
    let error = |text: &str| Load::from_json(text).unwrap_err().to_string();
    assert_eq!(error(r#"{"load_bytes": []}"#), "load_bytes is empty, expected 1 to 1024 rows, one for each source");
    assert_eq!(error("{}"), "load_bytes is missing, expected it, or layers");
    assert_eq!(error(r#"{"layers": []}"#), "layers is empty, expected at least one layer");
    let ragged = error(r#"{"load_bytes": [[0, 1], [1]]}"#);
    assert_eq!(ragged, "load_bytes[1] has 1 numbers, expected 2, one for each destination");
    assert!(error(r#"{"load_bytes": [[0, -1], [1, 0]]}"#).starts_with("load_bytes[0][1]: "));
    assert!(error(r#"{"load_bytes": [[0, 1e15], [1e15, 0]]}"#).contains("bytes in all"));
    assert!(error(r#"{"layers": [{"load_bytes": [[0]]}, {"load_bytes": [[0, 1], [1, 0]]}]}"#).contains("layers[1]."));
    // Packets of `packet_size_bytes` do not fit through a link, or through a NIC. Such a size is accepted if all loads are small, because a
    // packet is not larger than its load.
    let params = params(r#"{"packet_size_bytes": 200}"#);
    let error = exchange(&params, &even(2, 300), Schedule::Compat, None).unwrap_err().to_string();
    assert!(error.starts_with("packet_size_bytes is 200, expected at most 100 (intra_bw_bytes_per_ms"), "{error}");
    assert!(exchange(&params, &even(2, 100), Schedule::Compat, None).is_ok());
    let narrow = Params { nic_rate_bytes: 10.0, ..Params::default() };
    let error = exchange(&narrow, &even(2, 300), Schedule::Fair, None).unwrap_err().to_string();
    assert!(error.contains("nic_rate_bytes"), "{error}");
    let layers = Params { num_layers: 2, ..Params::default() };
    let three = Load { layers: vec![vec![0; 4]; 3], nodes: 2 };
    assert!(exchange(&layers, &three, Schedule::Fair, None).unwrap_err().to_string().starts_with("num_layers is 2"));
}

#[test]
fn many_packets_are_few_steps() {
    // 8 nodes with uneven loads of some MB in packets of 20 bytes: tens of millions of packets, but little work.
    let mut state = 3;
    let load = Load::new(
        8,
        vec![(0..64usize).map(|at| if at.is_multiple_of(9) { 0 } else { random(&mut state, 6_000_000) }).collect()],
    );
    let params = Params { intra_bw_bytes_per_ms: 1e4, nic_rate_bytes: 5e4, ..Params::default() };
    let of = |work_most| {
        let round = Round::new(&params, 8, work_most);
        let mut simulation =
            Simulation { params: &params, schedule: Schedule::Fair, round, nodes: 8, runs: Vec::new() };
        (simulation.layer(&load.layers[0], 0.0, None), simulation.round.work)
    };
    let (layer, work) = of(WORK_MOST);
    assert!(layer.unwrap().rounds > 1000 && work < 1_000_000, "{work}");
    // With half of this work as the limit, the exchange is rejected.
    let error = of(work / 2).0.unwrap_err().to_string();
    assert!(error.starts_with("num_links is 1, expected fewer links, or fewer than 8 nodes"), "{error}");
}
