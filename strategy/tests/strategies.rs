//! Strategies of small cases by hand, and of published models.

use aristos_formats::cluster::{Cluster, preset};
use aristos_formats::{MODELS, Model, Transformer};
use aristos_sim::linear::Device;
use aristos_strategy::{Limits, Memory, Optimizer, Strategy, Training, search};

fn training<'a>(cluster: &'a Cluster, model: &str, tokens_per_device: usize) -> Training<'a> {
    Training {
        cluster,
        model: Model::preset(model).unwrap(),
        dense: Transformer::preset(model).unwrap(),
        device: Device::preset("H100").unwrap(),
        tokens_per_device,
        sequence: 4096,
        element_bytes: 2,
        optimizer: Optimizer::AdamW,
    }
}

fn near(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 1e-9, "{got}, expected {want}");
}

/// Two layers of width 4 with 4 experts of width 8, top-1, two heads of width 2, and a vocabulary of 10.
fn tiny(cluster: &Cluster) -> Training<'_> {
    let dense = Transformer {
        hidden: 4,
        layers: (2, 2),
        heads: (2, 1),
        head_dim: (2, 2),
        latent: None,
        windowed: (0, 0),
        dense_intermediate: 0,
        shared_intermediate: 0,
        vocabulary: 10,
    };
    let device = Device::preset("H100").unwrap();
    let model = Model::gated((2, 2), 4, 8, 4, 1);
    Training {
        cluster,
        model,
        dense,
        device,
        tokens_per_device: 8,
        sequence: 8,
        element_bytes: 2,
        optimizer: Optimizer::AdamW,
    }
}

#[test]
fn memory_of_a_tiny_model_by_hand() {
    let cluster = preset("dgx-h100:1").unwrap();
    let tiny = tiny(&cluster);
    let one = |limits: Limits, microbatch_tokens: usize| -> Strategy {
        let (all, _) = search(&tiny, limits).unwrap();
        all.into_iter().find(|strategy| strategy.shape.microbatch_tokens == microbatch_tokens).unwrap()
    };
    let limits = Limits { stages: Some(1), ep: Some(4), recompute: Some(false), sharded: Some(false) };
    let strategy = one(limits, 8);
    // One expert of 96 weights in each of two layers; attention 4 x 8 and 4 x 4 in each, embedding and head of 40.
    let (experts, dense) = (2.0 * 96.0, 2.0 * 48.0 + 80.0);
    // Of a token a layer keeps two times two states, 4 + 2 + 2 and 4 of attention, the row and its result, and 24 of the expert.
    let kept = 2.0 * (16.0 + 12.0 + 8.0 + 24.0);
    let want = Memory {
        weights_mb: (experts + dense) * 2e-6,
        gradients_mb: (experts + dense) * 4e-6,
        optimizer_mb: (experts + dense) * 12e-6,
        activations_mb: (8.0 * kept * 2.0 + 8.0 * 10.0 * 6.0) * 1e-6,
        windows_mb: 2.0 * 2.0 * 8.0 * 4.0 * 2.0 * 1e-6,
    };
    for (got, want) in [
        (strategy.memory.weights_mb, want.weights_mb),
        (strategy.memory.gradients_mb, want.gradients_mb),
        (strategy.memory.optimizer_mb, want.optimizer_mb),
        (strategy.memory.activations_mb, want.activations_mb),
        (strategy.memory.windows_mb, want.windows_mb),
        (strategy.memory.all_mb(), want.all_mb()),
    ] {
        near(got, want);
    }
    assert_eq!((strategy.shape.replicas, strategy.shape.microbatches), (2, 1));
    // The experts' state has two replicas, the rest eight.
    let sharded = one(Limits { sharded: Some(true), ..limits }, 8);
    near(sharded.memory.optimizer_mb, (experts / 2.0 + dense / 8.0) * 12e-6);
    // Recomputation keeps a state of each layer, and one layer.
    let again = one(Limits { recompute: Some(true), ..limits }, 8);
    near(again.memory.activations_mb, (8.0 * (2.0 * 4.0 + kept / 2.0) * 2.0 + 480.0) * 1e-6);
    // Of two stages the first has one layer, the embedding, and two microbatches in flight.
    let staged = one(Limits { stages: Some(2), ..limits }, 8);
    near(staged.memory.weights_mb, (96.0 + 48.0 + 40.0) * 2e-6);
    near(staged.memory.activations_mb, 2.0 * 8.0 * kept / 2.0 * 2e-6);
    assert_eq!((staged.shape.replicas, staged.shape.microbatches), (1, 2));
}

#[test]
fn pipelines_wait_at_their_ends() {
    let cluster = preset("dgx-h200:1").unwrap();
    let training = training(&cluster, "qwen3-30b-a3b", 32_768);
    let limits = Limits { stages: Some(2), ep: Some(4), recompute: Some(true), sharded: Some(true) };
    let (all, _) = search(&training, limits).unwrap();
    for strategy in &all {
        let time = &strategy.time;
        let of_one = (time.dense_ms + time.experts_ms + time.exchange_ms) / strategy.shape.microbatches as f64;
        assert!(time.bubble_ms > of_one && time.bubble_ms < 1.1 * of_one, "{strategy:?}");
        near(strategy.tokens_per_s, 8.0 * 32_768.0 / time.step_ms() * 1e3);
        assert!(time.exchange_ms > 0.0 && time.gradients_ms > 0.0);
    }
    assert!(all.len() > 2 && all.is_sorted_by(|a, b| a.time.step_ms() <= b.time.step_ms()), "{all:?}");
    // No exchange in a group of one device, whose experts compute as long.
    let alone = Limits { ep: Some(1), stages: Some(8), ..limits };
    let (alone, _) = search(&training, alone).unwrap();
    let of = |all: &[Strategy], stages: usize| {
        let strategy = all.iter().find(|strategy| strategy.shape.microbatch_tokens == 8192).unwrap();
        strategy.time.experts_ms / strategy.shape.microbatches as f64 * stages as f64
    };
    assert!(alone.iter().all(|strategy| strategy.time.exchange_ms == 0.0));
    near(of(&alone, 8), of(&all, 2));
}

#[test]
fn published_models_have_a_strategy_on_enough_nodes() {
    for name in ["perlmutter-a100-80gb", "dgx-h100", "dgx-h200"] {
        for model in MODELS {
            let fits = |nodes: usize| {
                let cluster = preset(&format!("{name}:{nodes}")).unwrap();
                let training = training(&cluster, model, 4096);
                let (all, least) = search(&training, Limits::default()).unwrap();
                let usable = training.usable_mb().unwrap();
                assert!(all.iter().all(|strategy| strategy.memory.all_mb() <= usable), "{name} {model} {nodes}");
                assert_eq!(all.is_empty(), least.memory.all_mb() > usable);
                all.first().map(|best| best.tokens_per_s)
            };
            let found = (0..8).map(|doublings| 1 << doublings).find(|nodes| fits(*nodes).is_some());
            let nodes = found.unwrap_or_else(|| panic!("{name} {model}: no strategy on 128 nodes"));
            println!("{name} {model}: {nodes} nodes, {:.0} tokens/s", fits(nodes).unwrap());
        }
    }
    // As before on 16 A100: 8 experts in 32 layers with Adam's state take 101 GB each; stages and shards make them fit.
    let cluster = preset("perlmutter-a100-80gb:4").unwrap();
    let mixtral = training(&cluster, "mixtral-8x7b", 4096);
    let (none, least) =
        search(&mixtral, Limits { stages: Some(1), sharded: Some(false), ..Limits::default() }).unwrap();
    assert!(none.is_empty() && least.memory.all_mb() > mixtral.usable_mb().unwrap());
    let (all, _) = search(&mixtral, Limits::default()).unwrap();
    assert!(!all.is_empty());
    // Experts on all 8 devices of a group and nothing sharded cannot hold 46.7 x 10^9 parameters of 18 bytes in 16 x 72 GB.
    let fewer = Training { optimizer: Optimizer::EightBit, ..mixtral.clone() };
    let (_, fewer) = search(&fewer, Limits::default()).unwrap();
    let (_, least) = search(&mixtral, Limits::default()).unwrap();
    assert!(fewer.memory.all_mb() < least.memory.all_mb());
}

#[test]
fn large_clusters_are_searched_quickly_and_alike_devices_once() {
    let cluster = preset("dgx-h100:128").unwrap();
    let training = training(&cluster, "deepseek-v3", 4096);
    let (all, _) = search(&training, Limits::default()).unwrap();
    assert!(!all.is_empty());
    // A slower device slows every strategy of all devices down.
    let mut slow = preset("dgx-h100:2").unwrap();
    let fast = search(&self::training(&slow, "qwen3-30b-a3b", 4096), Limits::default()).unwrap().0;
    slow.devices[9].flop_per_ms /= 4.0;
    let slow = search(&self::training(&slow, "qwen3-30b-a3b", 4096), Limits::default()).unwrap().0;
    assert!(slow[0].time.experts_ms > 1.1 * fast[0].time.experts_ms, "{:?} {:?}", slow[0], fast[0]);
}

#[test]
fn devices_without_memory_are_named() {
    let mut cluster = preset("dgx-h100:1").unwrap();
    cluster.devices[3].memory_mb = None;
    let line = search(&training(&cluster, "deepseek-v3", 4096), Limits::default()).unwrap_err().to_string();
    assert_eq!(line, "devices[3].memory_mb is missing, expected the device's memory in MB");
    let cluster = preset("dgx-h100:1").unwrap();
    let limits = Limits { stages: Some(3), ..Limits::default() };
    let line = search(&training(&cluster, "deepseek-v3", 4096), limits).unwrap_err().to_string();
    assert_eq!(line, "`stages` and `ep` match no strategy, expected divisors of 8 devices");
}
