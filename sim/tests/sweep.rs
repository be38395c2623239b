//! Strategies: the published program's output, cases computed by hand, and invariants of all strategies.

use aristos_sim::sweep::{Cost, Degrees, Isolate, Model, Strategy, grid};

fn near(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-9 * want.abs(), "{got}, expected {want}");
}

fn published() -> Model {
    Model::new(64, 8192, 8192).unwrap()
}

/// The published program's output: 64 layers of 8192, a batch of 8192.
#[test]
fn published_values_are_reproduced() {
    near(published().sequential_s(Cost::Compat), 2.1543609643827194);
    // Throughput of strategies, not in steady state.
    for ((dp, hp, pp, microbatches), throughput) in [
        ((1, 1, 1, 1), 3725.9179555393866),
        ((1, 2, 1, 1), 7189.391772456083),
        ((2, 1, 1, 1), 7480.758101733661),
        ((1, 1, 2, 8), 4820.721008762217),
        ((2, 2, 2, 4), 17616.077578988057),
        ((1, 1, 16, 32), 21432.53672620121),
        ((4, 4, 1, 1), 55313.02392496291),
    ] {
        let strategy = Strategy::new(dp, hp, pp, microbatches);
        near(published().simulate(strategy, Cost::Compat, false).unwrap().throughput, throughput);
    }
    // In steady state, with the share of communication and the peak of memory.
    for ((dp, hp, pp, microbatches), latency_s, communication, peak_bytes) in [
        ((1, 1, 16, 2), 1.1677192875758895, 0.018226903070949735, 2818572288.0),
        ((1, 1, 16, 32), 0.24269926258005195, 0.015230292171157471, 3556769792.0),
        ((4, 4, 1, 1), 0.14810255196159922, 0.05437491503919802, 5502926848.0),
    ] {
        let outcome = published().simulate(Strategy::new(dp, hp, pp, microbatches), Cost::Compat, true).unwrap();
        near(outcome.latency_s, latency_s);
        near(outcome.communication_fraction, communication);
        near(outcome.peak_memory_bytes, peak_bytes);
    }
}

fn best(rows: &[(Strategy, aristos_sim::sweep::Outcome)]) -> (Strategy, f64) {
    let best = rows.iter().max_by(|a, b| a.1.throughput.total_cmp(&b.1.throughput)).unwrap();
    (best.0, best.1.throughput)
}

#[test]
fn corrected_faults_reverse_the_conclusion() {
    let of = |cost| grid(&published(), 16, &Degrees::default(), cost, true).unwrap();
    let compat = of(Cost::Compat);
    assert_eq!(compat.len(), 52);
    assert_eq!(compat.iter().map(|(_, outcome)| outcome.ops).sum::<u64>(), 958_284);
    let (strategy, throughput) = best(&compat);
    assert_eq!(strategy, Strategy::new(4, 4, 1, 1));
    near(throughput, 55313.02392496291);
    assert_eq!(best(&of(Cost::Default)).0, Strategy::new(1, 1, 16, 32));
}

#[test]
fn data_parallelism_by_hand() {
    // Two layers of width 2, two replicas of 2 samples: products of (2, 2) and (2, 2), elementwise operations on 4.
    let model = Model::new(2, 2, 4).unwrap();
    let product = 1e-5 + 4.0 * 8.0 / 1.2e12 + 16.0 / 1e14;
    let elementwise = |operands: f64| 4.0 * operands * 4.0 / 1.2e12 + 4.0 / 1e14;
    // Forward: a product and a ReLU; loss and its gradient; backward: the ReLU's gradient and two products; the optimizer.
    let layer = product + elementwise(1.0) + elementwise(2.0) + 2.0 * product + elementwise(2.0);
    let all_reduce = 2.0 * 16.0 * 0.5 / 25e9;
    let outcome = model.simulate(Strategy::new(2, 1, 1, 1), Cost::Default, true).unwrap();
    near(outcome.latency_s, 2.0 * (layer + all_reduce) + 2.0 * elementwise(2.0));
    near(outcome.communication_fraction, 2.0 * all_reduce / outcome.latency_s);
    // Weights and gradients of two layers, and at the loss's gradient y0, a0, y1, a1 and itself, of 4 elements each.
    near(outcome.peak_memory_bytes, 4.0 * (2.0 * 2.0 * 4.0 + 5.0 * 4.0));
    near(
        model.sequential_s(Cost::Default)
            / model.simulate(Strategy::new(1, 1, 1, 1), Cost::Default, true).unwrap().latency_s,
        1.0,
    );
}

#[test]
fn pipeline_by_hand() {
    // One layer on each of two devices, two microbatches of one sample of one element. The slots are F0 F1 - B0 - B1 and - F0 B0 F1 B1 -; a
    // send makes both wait for the later of them: after F0 of stage 0; after F1 during F0 of stage 1; after each backward of stage 1.
    let model = Model::new(2, 1, 2).unwrap();
    let of = |cost| model.simulate(Strategy::new(1, 1, 2, 2), cost, true).unwrap().latency_s;
    let time_s = |forward: f64, loss: f64, backward: f64, send: f64, add: f64| {
        forward + 2.0 * (forward + loss) + 3.0 * backward + 4.0 * send + 2.0 * add
    };
    let (product, element) = (2.0 * 2.0 / 1.2e12 + 2.0 / 1e14, 4.0 / 1e14);
    let want = time_s(product + element, 2.0 * element, element + 2.0 * product, 16.0 / 8e9 / 200.0, element);
    near(of(Cost::Compat), want);
    let product = 1e-5 + 4.0 * 2.0 / 1.2e12 + 2.0 / 1e14;
    let element = |operands: f64| 4.0 * operands / 1.2e12 + 1.0 / 1e14;
    let (loss, add) = (2.0 * element(2.0), element(2.0));
    let want = time_s(product + element(1.0), loss, element(2.0) + 2.0 * product, 4.0 / 25e9, add);
    near(of(Cost::Default), want + element(2.0));
}

#[test]
fn experts_share_the_replicas_devices() {
    let dense = Model::new(8, 256, 512).unwrap();
    let model = dense.with_experts(16, 2).unwrap();
    let rows = grid(&model, 8, &Degrees::default(), Cost::Default, true).unwrap();
    for (strategy, outcome) in &rows {
        assert!(strategy.dp.is_multiple_of(strategy.ep) && strategy.devices() == 8, "{strategy:?}");
        // Each stage has pairs of layers.
        assert!((8 / strategy.pp).is_multiple_of(2), "{strategy:?}");
        assert!(outcome.latency_s.is_finite() && outcome.peak_memory_bytes > 0.0);
    }
    assert!(rows.iter().any(|(strategy, _)| strategy.ep == 8));
    let of = |ep| model.simulate(Strategy::new(8, 1, 1, 1).ep(ep), Cost::Default, true).unwrap();
    let (alone, shared) = (of(1), of(8));
    // Sharing needs an eighth of the weights, and no all-reduce of their gradients.
    let weights = 2.0 * 4.0 * (8 * 16 * 256 * 256) as f64;
    near(alone.peak_memory_bytes - shared.peak_memory_bytes, weights * 7.0 / 8.0);
    let all_reduce = 8.0 * 2.0 * 4.0 * (16 * 256 * 256) as f64 * 7.0 / 8.0 / 25e9;
    let all_to_all = 4.0 * 4.0 * 4.0 * (64 * 2 * 256) as f64 * 7.0 / 8.0 / 25e9;
    near(alone.communication_fraction * alone.latency_s, all_reduce);
    near(shared.communication_fraction * shared.latency_s, all_to_all);
    // One expert for every sample is the model without experts, and a router of one column.
    let one = dense.with_experts(1, 1).unwrap().simulate(Strategy::new(2, 1, 1, 1), Cost::Default, true).unwrap();
    let none = dense.simulate(Strategy::new(2, 1, 1, 1), Cost::Default, true).unwrap();
    let router =
        4.0 * (3.0 * 1e-5 + 4.0 * ((256.0 * 256.0 + 256.0) + (256.0 + 256.0) + (256.0 * 256.0 + 256.0)) / 1.2e12);
    assert!((one.latency_s - none.latency_s - router).abs() < 1e-6, "{} {} {router}", one.latency_s, none.latency_s);
    // Each of four layers of experts keeps the rows that it received.
    near(one.peak_memory_bytes, none.peak_memory_bytes + 4.0 * 4.0 * (256 * 256) as f64);
}

#[test]
fn all_dividing_degrees_are_simulated() {
    let model = Model::new(6, 12, 36).unwrap();
    let rows = grid(&model, 12, &Degrees::default(), Cost::Default, true).unwrap();
    assert!(rows.iter().any(|(s, _)| (s.dp, s.hp, s.pp) == (2, 2, 3)), "{rows:?}");
    assert!(rows.iter().any(|(s, _)| (s.dp, s.hp, s.pp) == (3, 4, 1)));
    // Four stages do not divide six layers.
    assert!(rows.iter().all(|(s, _)| s.pp != 4));
    for isolate in [Isolate::Data, Isolate::Horizontal, Isolate::Pipeline] {
        let mut degrees = Degrees::default();
        degrees.isolate = Some(isolate);
        degrees.microbatches = vec![2, 3];
        let rows = grid(&model, 3, &degrees, Cost::Default, true).unwrap();
        assert_eq!(rows.len(), if isolate == Isolate::Pipeline { 2 } else { 1 });
    }
}

#[test]
fn bad_input_is_reported_in_one_line() {
    for (layers, width, batch, field) in [(0, 8, 8, "`layers`"), (2, 0, 8, "`width`"), (2, 8, usize::MAX, "`batch`")] {
        let error = Model::new(layers, width, batch).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{field} is ")) && error.contains("expected 1 to"), "{error}");
    }
    let model = Model::new(5, 8, 8).unwrap();
    let error = |strategy| model.simulate(strategy, Cost::Default, true).unwrap_err().to_string();
    assert_eq!(error(Strategy::new(3, 1, 1, 1)), "`dp` is 3, expected a divisor of the batch of 8");
    assert_eq!(error(Strategy::new(1, 3, 1, 1)), "`hp` is 3, expected a divisor of the width of 8");
    assert!(error(Strategy::new(1, 2, 1, 1)).starts_with("`hp` is 2, expected 1 with 5 layers"));
    assert_eq!(error(Strategy::new(1, 1, 2, 1)), "`pp` is 2, expected a divisor of the 5 layers");
    assert!(error(Strategy::new(1, 1, 5, 3)).starts_with("`microbatches` is 3"));
    assert_eq!(error(Strategy::new(1, 1, 1, 2)), "`microbatches` is 2, expected 1 without a pipeline");
    assert_eq!(error(Strategy::new(0, 1, 1, 1)), "`dp` is 0, expected 1 to 16777216");
    assert_eq!(error(Strategy::new(1, 1, 1, 1).ep(2)), "`ep` is 2, expected 1 without experts");
    assert!(model.with_experts(4, 2).unwrap_err().to_string().starts_with("`layers` is 5"));
    let experts = Model::new(8, 8, 8).unwrap().with_experts(4, 2).unwrap();
    let error = |strategy| experts.simulate(strategy, Cost::Default, true).unwrap_err().to_string();
    assert!(error(Strategy::new(2, 1, 1, 1).ep(4)).starts_with("`ep` is 4, expected a divisor of the 2"));
    assert!(error(Strategy::new(8, 1, 1, 1).ep(8)).starts_with("`ep` is 8, expected a divisor of the 4 experts"));
    assert!(error(Strategy::new(1, 1, 8, 1)).starts_with("`pp` is 8, expected stages"));
    let compat = experts.simulate(Strategy::new(1, 1, 1, 1), Cost::Compat, true).unwrap_err().to_string();
    assert!(compat.starts_with("`experts` is 4"), "{compat}");
    assert!(experts.with_experts(4, 5).unwrap_err().to_string().starts_with("`top_k` is 5"));
    // A number of devices that no combination of degrees gives.
    let error = grid(&model, 7, &Degrees::default(), Cost::Default, true).unwrap_err().to_string();
    assert!(error.starts_with("`devices` is 7, expected a number that some strategy fits; of the first, `"), "{error}");
    let mut given = Degrees::default();
    given.dp = vec![7];
    let error = grid(&model, 7, &given, Cost::Default, true).unwrap_err().to_string();
    assert!(error.starts_with("`dp` is 7, expected a divisor of the batch"), "{error}");
    let mut degrees = Degrees::default();
    degrees.dp = vec![3];
    let error = grid(&model, 8, &degrees, Cost::Default, true).unwrap_err().to_string();
    assert_eq!(error, "`devices` is 8, expected degrees whose product it is");
    assert!(
        grid(&model, 0, &Degrees::default(), Cost::Default, true)
            .unwrap_err()
            .to_string()
            .starts_with("`devices` is 0")
    );
}
