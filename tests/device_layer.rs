//! The layer on emulated devices against the float64 reference: every router and expert, any number of PEs, any order
//! of events.

#[macro_use]
mod common;
#[path = "device_layer/caller.rs"]
mod caller;
#[path = "device_layer/contract.rs"]
mod contract;
#[path = "device_layer/experts.rs"]
mod experts;
#[path = "common/groupings.rs"]
mod groupings;
#[path = "device_layer/groups.rs"]
mod groups;
#[path = "device_layer/margin.rs"]
mod margin;
#[path = "device_layer/relays.rs"]
mod relays;
mod sample;

use std::ops::Range;
use std::time::Duration;

use aristos::check::{TOLERANCE_BF16, TOLERANCE_F16};
use aristos::gpu::emulated::{self, Emulated, EmulatedDevice, Fault};
use aristos::gpu::{Buffer, Gpu};
use aristos::moe::device::{DeviceLayer, DeviceOptions, DeviceSaved, GemmPath, RecordedLayer, Tile, to_elements};
use aristos::moe::metrics::{PassOutcome, Traffic};
use aristos::moe::synthetic::{RouterKind, Synthetic};
use aristos::moe::{
    Dtype, LayerConfig, LayerSpec, Mode, MoeError, MoeLayer, Options, Placement, Routed, SharedConfig, WeightSource,
};
use common::{
    Case, Step, ahead_cases, assert_close, even, heap_bytes, hot, mixtral, reference_rounded, shm, synthetic, variants,
};
use half::{bf16, f16};
use sample::Sample;

/// Symmetric memory of each PE: far more than these layers need; pages are touched only after allocation.
const HEAP_BYTES: usize = 64 << 20;

/// A world of emulated PEs and its options.
#[derive(Clone)]
struct World {
    device: EmulatedDevice,
    reachable: Option<Vec<u8>>,
    options: Options,
    dtype: Dtype,
    fault: Fault,
    tile: Option<Tile>,
}

impl World {
    fn new() -> Self {
        let (device, options) = (EmulatedDevice::default(), small_options());
        World { device, reachable: None, options, dtype: Dtype::Bf16, fault: Fault::None, tile: None }
    }

    fn mode(mut self, mode: Mode) -> Self {
        self.options.mode = mode;
        self
    }

    fn seed(mut self, seed: u64) -> Self {
        self.device.seed = seed;
        self
    }

    /// PEs of different parity reach each other only over the network.
    fn network(mut self, n: usize) -> Self {
        self.reachable = Some((0..n * n).map(|i| u8::from((i / n) % 2 == (i % n) % 2)).collect());
        self
    }

    fn pes(&self, n: usize) -> Vec<Emulated> {
        emulated::world(n, HEAP_BYTES, &self.device, self.reachable.as_deref()).unwrap()
    }

    fn round(&self) -> fn(f32) -> f32 {
        match self.dtype {
            Dtype::F16 => |x| f16::from_f32(x).to_f32(),
            _ => |x| bf16::from_f32(x).to_f32(),
        }
    }

    fn tolerance(&self) -> f64 {
        if self.dtype == Dtype::F16 { TOLERANCE_F16 } else { TOLERANCE_BF16 }
    }
}

fn small_options() -> Options {
    with!(Options::default(); chunk_rows = Some(5), wait_limit = Duration::from_secs(60))
}

/// Runs one closure per PE, each on its own thread, and returns the results by PE.
fn on_pes<R: Send>(pes: Vec<Emulated>, f: impl Fn(&Emulated) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = pes.into_iter().map(|pe| scope.spawn(move || f(&pe))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// One PE's tokens and result buffers on its device.
struct Tokens<'g> {
    elements: usize,
    x: Buffer<'g>,
    grad_output: Buffer<'g>,
    output: Buffer<'g>,
    grad_input: Buffer<'g>,
}

impl<'g> Tokens<'g> {
    fn new(gpu: &'g dyn Gpu, source: &Synthetic, range: Range<usize>, dtype: Dtype) -> Self {
        let rows = |values: Vec<f32>| Buffer::from_slice(gpu, &to_elements(&values, dtype, "rows").unwrap()).unwrap();
        let elements = range.len() * source.config().hidden;
        let result = || Buffer::new(gpu, 4 * elements as u64).unwrap();
        Tokens {
            elements,
            x: rows(source.hidden_states(range.clone())),
            grad_output: rows(source.grad_output(range)),
            output: result(),
            grad_input: result(),
        }
    }

    fn output(&self) -> Vec<f32> {
        self.output.read_vec(0, self.elements).unwrap()
    }

    fn grad_input(&self) -> Vec<f32> {
        self.grad_input.read_vec(0, self.elements).unwrap()
    }
}

fn new_layer<'g>(
    gpu: &'g Emulated,
    world: &World,
    source: &Synthetic,
    max_tokens: usize,
) -> Result<DeviceLayer<'g>, MoeError> {
    let spec = spec_of(world, source, gpu.n_pes(), max_tokens);
    DeviceLayer::new(gpu, spec, source, &with!(DeviceOptions::default(); tile = world.tile))
}

fn spec_of(world: &World, source: &Synthetic, n_pes: usize, max_tokens: usize) -> LayerSpec {
    LayerSpec::new(source.config().clone(), n_pes, max_tokens).dtype(world.dtype).options(world.options.clone())
}

/// The results of one PE in one step.
struct PeStep {
    step: Step,
    rounds: [u64; 2],
    expert_rows: Vec<u64>,
    losses: (f64, f64),
    all_reduce_bytes: u64,
}

/// Runs `steps` steps, step `s` on the token ranges `splits[s % splits.len()]`. Runs `ahead` forward passes without
/// backward before each.
fn run(
    world: &World,
    source: &Synthetic,
    splits: &[Vec<Range<usize>>],
    steps: usize,
    ahead: usize,
) -> Result<Vec<Vec<PeStep>>, MoeError> {
    let n = splits[0].len();
    let config = source.config();
    let placement = Placement::even(config.n_experts, n);
    let max_tokens = splits.iter().flatten().map(Range::len).max().unwrap();
    let by_pe = on_pes(world.pes(n), |gpu| {
        let me = gpu.my_pe();
        let mut layer = new_layer(gpu, world, source, max_tokens)?;
        gpu.set_fault(world.fault);
        let mut all = Vec::new();
        for step in 0..steps {
            let mut before = Vec::new();
            for pass in 0..ahead {
                let range = splits[(step + pass) % splits.len()][me].clone();
                let mut tokens = Tokens::new(gpu, source, range, world.dtype);
                let saved = layer.forward(&tokens.x, &mut tokens.output)?;
                layer.finish(&saved)?;
                layer.recycle(saved);
                before.extend(tokens.output());
            }
            let mut tokens = Tokens::new(gpu, source, splits[step % splits.len()][me].clone(), world.dtype);
            let mut saved = layer.forward(&tokens.x, &mut tokens.output)?;
            let forward = layer.finish(&saved)?;
            let Routed { chosen, expert_rows, load, .. } = layer.routed(&saved)?;
            layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input)?;
            let backward = layer.finish(&saved)?;
            layer.recycle(saved);
            let grads = layer.gradients()?;
            let ids = config.weights().into_iter();
            let grads = ids.filter_map(|id| Some((id, grads.get(id, &placement, me)?.to_vec()))).collect();
            let mut traffic = forward.traffic;
            traffic.add(&backward.traffic);
            all.push(PeStep {
                step: Step {
                    output: tokens.output(),
                    grad_hidden_states: tokens.grad_input(),
                    grads,
                    chosen,
                    ahead: before,
                    traffic: vec![traffic],
                    rounds: vec![forward.rounds as usize],
                    peak_bytes: vec![layer.symmetric_bytes() as usize],
                    ..Step::default()
                },
                rounds: [forward.rounds, backward.rounds],
                expert_rows,
                losses: if config.has_losses() { (load.aux_loss(), load.z_loss()) } else { (0.0, 0.0) },
                all_reduce_bytes: backward.all_reduce_bytes,
            });
        }
        layer.free()?;
        Ok(all)
    });
    let mut by_pe = by_pe.into_iter().collect::<Result<Vec<_>, MoeError>>()?;
    // By step, then by PE.
    Ok((0..steps).map(|_| by_pe.iter_mut().map(|pe| pe.remove(0)).collect()).collect())
}

/// Merges the results of all PEs in a step. Gradients of replicated weights must be the same on all PEs.
fn together(pes: &[PeStep], config: &LayerConfig) -> Step {
    let mut all = Step::default();
    for pe in pes {
        let step = &pe.step;
        all.output.extend(&step.output);
        all.grad_hidden_states.extend(&step.grad_hidden_states);
        all.chosen.extend(&step.chosen);
        all.ahead.extend(&step.ahead);
        all.traffic.extend(&step.traffic);
        all.rounds.extend(&step.rounds);
        all.peak_bytes.extend(&step.peak_bytes);
        for (id, grad) in &step.grads {
            if let Some(before) = all.grads.insert(*id, grad.clone()) {
                assert!(config.replicated_weights().contains(id));
                assert_eq!(&before, grad, "{id:?} differs between PEs");
            }
        }
    }
    all
}

fn steps(world: &World, source: &Synthetic, splits: &[Vec<Range<usize>>], count: usize, ahead: usize) -> Vec<Step> {
    let steps = run(world, source, splits, count, ahead).unwrap_or_else(|error| panic!("{error}"));
    steps.iter().map(|pes| together(pes, source.config())).collect()
}

/// Asserts bitwise equality of everything except traffic and memory.
fn assert_same(got: &[Step], want: &[Step], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.chosen, want.chosen, "{what}, step {step}");
        assert_eq!(got.ahead, want.ahead, "{what}, step {step}");
        assert_eq!(got.output, want.output, "{what}, step {step}");
        assert_eq!(got.grad_hidden_states, want.grad_hidden_states, "{what}, step {step}");
        assert_eq!(got.grads, want.grads, "{what}, step {step}");
        assert_eq!(got.rounds, want.rounds, "{what}, step {step}");
    }
}

/// Compares two steps with the reference and with each other, and returns the first one.
fn check(world: &World, source: &Synthetic, tokens: usize, n: usize, what: &str) -> Vec<PeStep> {
    let mut steps = run(world, source, &[even(tokens, n)], 2, 0).unwrap_or_else(|error| panic!("{what}: {error}"));
    let all: Vec<Step> = steps.iter().map(|pes| together(pes, source.config())).collect();
    assert_same(&all[1..], &all[..1], what);
    let want = reference_rounded(source, tokens, &all[0].chosen, world.round());
    assert_close(&all[0], &want, world.tolerance(), what);
    if source.config().has_losses() {
        for pe in &steps[0] {
            let assert_near =
                |got: f64, want: f64| assert!((got - want).abs() <= 1e-4 * want.abs(), "{what}: {got}, not {want}");
            assert_near(pe.losses.0, want.aux_loss);
            assert_near(pe.losses.1, want.z_loss);
        }
    }
    let rows: Vec<u64> = steps[0].iter().flat_map(|pe| pe.expert_rows.iter().copied()).collect();
    if source.config().capacity_factor.is_none() {
        assert_eq!(rows, want.tokens_per_expert, "{what}");
    } else {
        assert_eq!(rows.iter().sum::<u64>() + want.dropped, (tokens * source.config().router.top_k) as u64, "{what}");
    }
    steps.swap_remove(0)
}

#[test]
fn every_layer_matches_the_reference() {
    for (name, layer) in variants(32, 24, 40) {
        let source = synthetic(layer, 3);
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let world = World { dtype, ..World::new() };
            check(&world, &source, 37, 3, &format!("{name} in {}", dtype.name()));
        }
    }
}

#[test]
fn results_match_the_reference_on_any_number_of_pes_and_in_any_mode() {
    let base = mixtral(32, 24, 7, 2);
    let mlp = with!(base.expert; bias = true);
    let shared = Some(SharedConfig::new(mlp, true));
    let rich = with!(base.clone(); aux_loss_coef = 0.1, capacity_factor = Some(0.9), shared = shared);
    for layer in [base, rich] {
        let source = synthetic(layer, 4);
        for n in [1, 2, 4, 8] {
            for mode in [Mode::Pipelined, Mode::Bulk] {
                check(&World::new().mode(mode), &source, 37, n, &format!("{n} PEs, {mode:?}"));
            }
        }
    }
}

#[test]
fn hopper_kernels_match_the_reference() {
    for (name, layer) in variants(32, 24, 40) {
        let device = with!(EmulatedDevice::default(); hopper = true);
        let world = World { device, ..World::new() };
        check(&world, &synthetic(layer, 3), 37, 2, &format!("{name} on Hopper"));
    }
}

#[test]
fn experts_of_several_tiles_match_the_reference() {
    // More rows and columns than a tile, with a remainder of each.
    let base = mixtral(288, 264, 3, 2);
    let mlp = with!(base.expert; bias = true);
    let source = synthetic(with!(base; shared = Some(SharedConfig::new(mlp, true))), 8);
    for hopper in [false, true] {
        let device = with!(EmulatedDevice::default(); hopper = hopper);
        let options = with!(small_options(); chunk_rows = Some(64));
        let world = World { device, options, ..World::new() };
        check(&world, &source, 421, 2, &format!("large, Hopper {hopper}"));
    }
}

#[test]
fn tiles_of_two_blocks_give_the_same_bits() {
    let base = mixtral(96, 264, 3, 2);
    let shared = Some(SharedConfig::new(with!(base.expert; bias = true), true));
    let device = with!(EmulatedDevice::default(); hopper = true, multiprocessors = 5);
    // Batches with more rows than a block's part of a tile, and with fewer, for which the second block has none. In one
    // round, and in several.
    for (tokens, mode, budget) in [(421, Mode::Pipelined, 2.0), (60, Mode::Pipelined, 0.5), (160, Mode::Bulk, 2.0)] {
        let source = hot(&with!(base.clone(); shared = shared), 0.3, 0.7);
        let options = with!(small_options(); chunk_rows = Some(16), mode = mode, budget_factor = budget);
        let step = |tile: &str| {
            let world = World {
                device: device.clone(),
                options: options.clone(),
                tile: Some(tile.parse().unwrap()),
                ..World::new()
            };
            together(&check(&world, &source, tokens, 2, &format!("{tokens} tokens, {mode:?}, {tile}")), source.config())
        };
        assert_same(&[step("256x256")], &[step("128x256")], &format!("{tokens} tokens, {mode:?}"));
    }
}

#[test]
fn few_tokens_and_few_experts() {
    common::few_tokens_and_few_experts(|source, tokens, n, what| {
        check(&World::new(), source, tokens, n, what);
    });
}

#[test]
fn all_tokens_to_one_expert_in_rounds_within_the_budget() {
    let source = hot(&mixtral(32, 16, 8, 1), 1.0 / 8.0, 1.0);
    let (tokens, n) = (160, 8);
    let mut peaks = Vec::new();
    for mode in [Mode::Pipelined, Mode::Bulk] {
        let options = with!(small_options(); mode = mode, chunk_rows = Some(4));
        let world = World { options, ..World::new() };
        let pes = check(&world, &source, tokens, n, "all to one");
        // 20 rows from each PE through windows of 2 * 20 / 8 = 5 rows, which is two chunks of 3, as on the CPU.
        assert!(pes.iter().all(|pe| pe.rounds[0] == 4), "{:?}", pes.iter().map(|pe| pe.rounds).collect::<Vec<_>>());
        peaks.extend(pes.iter().map(|pe| pe.step.peak_bytes[0]));
    }
    // Even routing needs the same memory.
    let even_source = synthetic(mixtral(32, 16, 8, 1), 5);
    let options = with!(small_options(); chunk_rows = Some(4));
    let pes = check(&World { options, ..World::new() }, &even_source, tokens, n, "even");
    assert!(peaks.iter().all(|&peak| peak == pes[0].step.peak_bytes[0]));
}

#[test]
fn several_rounds_with_losses_and_a_shared_expert() {
    let base = mixtral(32, 16, 8, 3);
    let shared = Some(SharedConfig::new(with!(base.expert; bias = true), true));
    let layer = with!(base; shared = shared, aux_loss_coef = 0.1, z_loss_coef = 0.1);
    for (ratio, weight, budget_factor) in [(0.25, 0.9, 0.5), (0.5, 1.0, 0.25)] {
        let source = hot(&layer, ratio, weight);
        let options = with!(small_options(); chunk_rows = Some(3), budget_factor = budget_factor);
        let pes = check(&World { options, ..World::new() }, &source, 61, 3, "hot");
        assert!(pes.iter().all(|pe| pe.rounds[0] > 1));
    }
}

#[test]
fn even_routing_takes_one_round() {
    for tokens in [1, 2, 7, 33] {
        let source = synthetic(mixtral(16, 8, 4, 2), 5);
        for chunk_rows in [1, 4, 32] {
            let world = World { options: with!(small_options(); chunk_rows = Some(chunk_rows)), ..World::new() };
            let pes = check(&world, &source, 2 * tokens, 2, "even");
            assert!(pes.iter().all(|pe| pe.rounds[0] <= 1), "{tokens} tokens in chunks of {chunk_rows}");
        }
    }
}

fn cases() -> Vec<Case> {
    ahead_cases(16, 8, &with!(small_options(); chunk_rows = Some(2)), vec![vec![0..4, 4..8, 8..8]])
}

const STEPS: usize = 3;
const AHEAD: usize = 2;
const SEEDS: u64 = 12;
const SEEDS_A_RUN: u64 = 1;

#[test]
fn results_do_not_depend_on_seed_network_or_mode() {
    for case in cases() {
        let world = World { options: case.options.clone(), ..World::new() };
        let n = case.splits[0].len();
        let want = steps(&world, &case.source, &case.splits, STEPS, AHEAD);
        for (step, split) in want.iter().zip(case.splits.iter().cycle()) {
            let tokens = split.iter().map(|range| range.end).max().unwrap();
            let close = reference_rounded(&case.source, tokens, &step.chosen, world.round());
            assert_close(step, &close, world.tolerance(), case.name);
        }
        for seed in Sample::new(SEEDS_A_RUN, SEEDS).numbers().map(|number| 1 + number) {
            let what = |how: &str| format!("{}, seed {seed}, {how}", case.name);
            let seeded = world.clone().seed(seed);
            assert_same(&steps(&seeded, &case.source, &case.splits, STEPS, AHEAD), &want, &what("reachable"));
            let network = seeded.network(n);
            assert_same(&steps(&network, &case.source, &case.splits, STEPS, AHEAD), &want, &what("network"));
            let bulk = network.mode(Mode::Bulk);
            assert_same(&steps(&bulk, &case.source, &case.splits, STEPS, AHEAD), &want, &what("bulk"));
        }
    }
}

#[test]
fn injected_faults_are_detected() {
    let case = cases().swap_remove(1);
    let n = case.splits[0].len();
    let mut options = case.options.clone();
    options.wait_limit = Duration::from_millis(700);
    let world = World { options, ..World::new() };
    let run = |world: &World| run(world, &case.source, &case.splits, STEPS, AHEAD);
    let all = |steps: &[Vec<PeStep>]| steps.iter().map(|pes| together(pes, case.source.config())).collect::<Vec<_>>();
    let want = all(&run(&world).unwrap());
    for (network, fault) in [(false, Fault::StoreLost), (true, Fault::SignalLost), (true, Fault::SignalFirst)] {
        let detected = (1..10).any(|seed| {
            let world = World { fault, ..world.clone().seed(seed) };
            let world = if network { world.network(n) } else { world };
            match std::panic::catch_unwind(|| run(&world).map(|steps| all(&steps))) {
                Ok(Ok(got)) => got != want,
                Ok(Err(_)) | Err(_) => true,
            }
        });
        assert!(detected, "{fault:?}");
    }
}

#[test]
fn several_forward_passes_may_precede_a_backward() {
    let source = synthetic(mixtral(16, 8, 5, 2), 7);
    let world = World::new();
    let (n, batches) = (3, 3);
    // Each batch alone, and all forward passes before the first backward, in reverse order.
    let range = |me: usize, batch: usize| {
        let first = 12 * batch + 4 * me;
        first..first + if batch == 1 { me } else { 4 }
    };
    let results = |interleaved: bool| {
        on_pes(world.pes(n), |gpu| {
            let me = gpu.my_pe();
            let mut layer = new_layer(gpu, &world, &source, 4).unwrap();
            let mut tokens: Vec<_> =
                (0..batches).map(|b| Tokens::new(gpu, &source, range(me, b), world.dtype)).collect();
            let mut grads = Vec::new();
            if interleaved {
                let mut waiting: Vec<_> =
                    tokens.iter_mut().map(|t| layer.forward(&t.x, &mut t.output).unwrap()).collect();
                for t in tokens.iter_mut().rev() {
                    let mut saved = waiting.pop().unwrap();
                    layer.backward(&mut saved, &t.x, &t.grad_output, &mut t.grad_input).unwrap();
                    layer.finish(&saved).unwrap();
                    grads.insert(0, layer.gradients().unwrap().router.clone());
                    layer.recycle(saved);
                }
            } else {
                for t in &mut tokens {
                    let mut saved = layer.forward(&t.x, &mut t.output).unwrap();
                    layer.backward(&mut saved, &t.x, &t.grad_output, &mut t.grad_input).unwrap();
                    layer.finish(&saved).unwrap();
                    grads.push(layer.gradients().unwrap().router.clone());
                    layer.recycle(saved);
                }
            }
            let all: Vec<_> = tokens.iter().map(|t| (t.output(), t.grad_input())).collect();
            layer.free().unwrap();
            (all, grads)
        })
    };
    assert_eq!(results(true), results(false));
}

/// A recorded step equals one launched kernel by kernel, in repeated runs, with changed inputs, and between passes that
/// are not recorded.
#[test]
fn recorded_step_equals_the_launched_step() {
    let source = synthetic(mixtral(32, 24, 6, 2), 11);
    for world in [World::new(), World { device: with!(EmulatedDevice::default(); hopper = true), ..World::new() }] {
        let by_pe = on_pes(world.pes(2), |gpu| {
            let mut layer = new_layer(gpu, &world, &source, 20).unwrap();
            let range = |step: usize| {
                if gpu.my_pe() == 0 { 20 * step..20 * step + 20 } else { 100 + 17 * step..117 + 17 * step }
            };
            let steps = [0, 0, 1, 2];
            fn one<'g>(layer: &mut DeviceLayer<'g>, tokens: &mut Tokens<'g>) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
                let mut saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
                layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
                layer.finish(&saved).unwrap();
                layer.recycle(saved);
                (tokens.output(), tokens.grad_input(), layer.gradients().unwrap().router.clone())
            }
            let fresh = |step| Tokens::new(gpu, &source, range(step), world.dtype);
            let want = steps.map(|step| one(&mut layer, &mut fresh(step)));
            let mut tokens = fresh(0);
            let mut recorded = RecordedLayer::new(&mut layer).unwrap();
            let mut results = Vec::new();
            for (step, want) in steps.into_iter().zip(want) {
                let fresh = fresh(step);
                let elements = |rows: &Buffer<'_>| rows.read_vec::<u16>(0, fresh.elements).unwrap();
                tokens.x.write(0, &elements(&fresh.x)).unwrap();
                tokens.grad_output.write(0, &elements(&fresh.grad_output)).unwrap();
                let mut saved = recorded.forward(&tokens.x, &mut tokens.output).unwrap();
                recorded.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
                recorded.finish(&saved).unwrap();
                recorded.recycle(saved);
                let got = (tokens.output(), tokens.grad_input(), recorded.gradients().unwrap().router.clone());
                results.push((got, want));
            }
            drop(recorded);
            // A later unrecorded step.
            results.push((one(&mut layer, &mut fresh(2)), results[3].1.clone()));
            layer.free().unwrap();
            results
        });
        for (got, want) in by_pe.into_iter().flatten() {
            assert!(got == want);
        }
    }
}

#[test]
fn layer_can_reuse_the_memory_of_a_freed_layer() {
    let source = synthetic(mixtral(16, 8, 5, 2), 1);
    let world = World::new();
    let outputs = |batches: Range<usize>| {
        on_pes(world.pes(3), |gpu| {
            let of = |batch: usize| {
                let first = 12 * batch + 4 * gpu.my_pe();
                let mut tokens = Tokens::new(gpu, &source, first..first + 4, world.dtype);
                let mut layer = new_layer(gpu, &world, &source, 4).unwrap();
                let saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
                layer.finish(&saved).unwrap();
                drop(saved);
                layer.free().unwrap();
                assert_eq!(gpu.symmetric_bytes().0, 0, "all is free again");
                tokens.output()
            };
            batches.clone().map(of).last().unwrap()
        })
    };
    assert_eq!(outputs(0..2), outputs(1..2));
}

#[test]
fn traffic_equals_the_cpu_layers() {
    let layer = mixtral(40, 16, 6, 3);
    let source = synthetic(layer.clone(), 2);
    let (tokens, n, h) = (50, 3, 40u64);
    let world = World::new();
    let splits = [even(tokens, n)];
    let on_cpu = {
        let heap = heap_bytes::<bf16>(&layer, n, tokens, &world.options);
        common::run::<_, bf16>(shm(n, heap), &source, &splits, &world.options, 1).unwrap().remove(0)
    };
    for world in [world.clone(), world.clone().mode(Mode::Bulk), world.network(n)] {
        let pes = run(&world, &source, &splits, 1, 0).unwrap().remove(0);
        let step = together(&pes, &layer);
        let chunk_rows = world.options.chunk_rows.unwrap() as u64;
        assert_eq!(step.chosen, on_cpu.chosen);
        for (pe, (got, want)) in step.traffic.iter().zip(&on_cpu.traffic).enumerate() {
            assert_eq!((got.dispatch_rows, got.combine_rows), (want.dispatch_rows, want.combine_rows), "PE {pe}");
            assert_eq!(got.dispatch_row_bytes, got.dispatch_rows * h * 2, "PE {pe}");
            assert_eq!(got.combine_row_bytes, got.combine_rows * h * 2, "PE {pe}");
            assert_eq!(got.combine_slot_bytes, want.combine_slot_bytes, "PE {pe}");
            // One word per row, and two per slot.
            assert_eq!(got.dispatch_slot_bytes, want.dispatch_slot_bytes, "PE {pe}");
            // Forward and backward send the same rows.
            let chunks = (got.dispatch_rows / 2).div_ceil(chunk_rows);
            // Forward has one header per peer: 8 words, plus one per expert of the PE with most experts, rounded up to
            // 16 bytes. Backward needs no header, because all activations are kept.
            assert_eq!(got.header_bytes, 2 * (4 * (8 + 2u64)).next_multiple_of(16), "PE {pe}");
            // Every header and every chunk is one put with signal. Forward sends the headers; both passes dispatch chunks
            // and return chunks. In both, each received chunk beyond the window's slots adds a credit. protocol_cases.h
            // counts them.
            let credits = got.signals - got.puts;
            assert!(credits.is_multiple_of(2) && credits < got.puts, "PE {pe}: {got:?}");
            assert!(got.puts >= 2 + 2 * chunks, "PE {pe}: {got:?}");
            let reaches = |to: usize| world.reachable.as_ref().is_none_or(|mask| mask[pe * n + to] != 0);
            let inter_node = (0..n).filter(|&to| !reaches(to)).count() as u64;
            assert!(
                got.fences <= max_fences(inter_node) && (got.fences > inter_node) == (inter_node > 0),
                "PE {pe}: {got:?}"
            );
            assert_eq!(pes[pe].rounds, [1, 1]);
        }
        // Sum of the router's gradient: each PE sends its part of each owner's share, and receives the sums.
        let bytes: u64 = pes.iter().map(|pe| pe.all_reduce_bytes).sum();
        let elements = (layer.n_experts * layer.hidden) as u64;
        assert!(bytes >= 2 * 4 * elements * (n as u64 - 1), "{bytes}");
    }
}

/// Maximum fences of a step (forward and backward) with `inter_node` PEs reachable only over the network: one for the headers; per pass
/// and such PE, one for the rows and one for the results; two for the sum of the router's gradient (values and sums), which has one piece
/// per part.
fn max_fences(inter_node: u64) -> u64 {
    inter_node.min(1) * (1 + 2) + 2 * 2 * inter_node
}

/// The expert counts and top-k of real models, few tokens, chunks per window as by default. A synthetic router needs a
/// hidden size of at least its number of experts.
#[test]
fn even_routing_has_at_most_one_fence_per_inter_node_peer() {
    for (experts, top_k, pes) in [(8, 2, &[2, 4, 8][..]), (128, 8, &[2, 4, 8])] {
        let source = synthetic(mixtral(experts, 8, experts, top_k), 3);
        for &n in pes {
            let tokens = 64;
            let mut world = World { options: with!(small_options(); chunk_rows = Some(tokens / 16)), ..World::new() };
            world.reachable = Some((0..n * n).map(|i| u8::from(i / n == i % n)).collect());
            let pes = run(&world, &source, &[even(n * tokens, n)], 1, 0).unwrap().remove(0);
            for (pe, of) in pes.iter().enumerate() {
                let (got, most) = (&of.step.traffic[0], max_fences(n as u64 - 1));
                assert!(
                    got.fences > 0 && got.fences <= most,
                    "{experts} experts, PE {pe} of {n}: at most {most}, {got:?}"
                );
                assert_eq!(of.rounds, [1, 1]);
            }
        }
    }
}

#[test]
fn single_pe_sends_nothing() {
    let pes = check(&World::new(), &synthetic(mixtral(16, 8, 3, 2), 1), 9, 1, "alone");
    assert_eq!(pes[0].step.traffic, [Traffic::default()]);
    assert_eq!(pes[0].all_reduce_bytes, 0);
}

#[test]
fn pass_report_has_counts_and_times() {
    let source = synthetic(mixtral(16, 8, 4, 2), 1);
    let world = World::new();
    on_pes(world.pes(2), |gpu| {
        let mut layer = new_layer(gpu, &world, &source, 20).unwrap();
        layer.record_spans();
        let first = 20 * gpu.my_pe();
        let mut tokens = Tokens::new(gpu, &source, first..first + 20, world.dtype);
        let launches = gpu.launches();
        let mut saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
        assert_eq!(gpu.launches() - launches, 3, "router, plan, layer");
        let outcome = |o: PassOutcome| {
            assert!(o.seconds > 0.0 && (o.phases_s.iter().sum::<f64>() - o.seconds).abs() < 1e-9);
            assert!(!o.spans.is_empty());
            for s in &o.spans {
                assert!(s.track < layer_blocks(gpu) && s.dur_ns < 60_000_000_000, "{s:?}");
            }
            for phase in ["dispatch", "expert GEMM", "combine"] {
                assert!(o.spans.iter().any(|s| s.phase.name() == phase), "no {phase}");
            }
        };
        outcome(layer.finish(&saved).unwrap());
        layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
        assert_eq!(gpu.launches() - launches, 7, "layer, router twice, all-reduce");
        outcome(layer.finish(&saved).unwrap());
    });
}

fn layer_blocks(gpu: &Emulated) -> u32 {
    gpu.limits().unwrap().multiprocessors
}

#[test]
fn silent_peer_is_reported() {
    let source = synthetic(mixtral(16, 8, 6, 3), 1);
    let mut world = World::new();
    world.options.wait_limit = Duration::from_millis(500);
    let errors = on_pes(world.pes(3), |gpu| {
        let mut layer = new_layer(gpu, &world, &source, 4).unwrap();
        let mut tokens = Tokens::new(gpu, &source, 4 * gpu.my_pe()..4 * gpu.my_pe() + 4, world.dtype);
        (gpu.my_pe() < 2).then(|| {
            let saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
            let error = layer.finish(&saved).unwrap_err();
            assert_eq!(error.awaited_pe(), Some(2), "{error}");
            error.to_string()
        })
    });
    for (pe, error) in errors.into_iter().flatten().enumerate() {
        assert!(error.starts_with(&format!("PE {pe} waited 0.5 s in phase ")), "{error}");
        assert!(error.contains(" for PE 2: its counts: expected at least "), "{error}");
    }
}

#[test]
fn unsupported_layer_is_rejected() {
    let world = World::new();
    let refused = |layer: LayerConfig, change: fn(&mut World, &mut DeviceOptions), want: &str| {
        let source = synthetic(layer, 1);
        let (mut world, mut device) = (world.clone(), DeviceOptions::default());
        change(&mut world, &mut device);
        let gpu = world.pes(1).remove(0);
        let made = DeviceLayer::new(&gpu, spec_of(&world, &source, 1, 4), &source, &device);
        assert_eq!(made.map(drop).unwrap_err().to_string(), want);
    };
    let valid = || mixtral(16, 8, 6, 2);
    refused(mixtral(12, 8, 6, 2), |_, _| {}, "hidden is 12, expected a multiple of 8 on a device");
    refused(mixtral(16, 9, 6, 2), |_, _| {}, "intermediate is 9, expected a multiple of 8 on a device");
    let shared = Some(SharedConfig::new(with!(valid().expert; intermediate = 4), false));
    let want = "shared intermediate is 4, expected a multiple of 8 on a device";
    refused(with!(valid(); shared = shared), |_, _| {}, want);
    refused(valid(), |world, _| world.dtype = Dtype::F32, "dtype is f32, expected bf16 or f16 on a device");
    let want = "this device, of capability 8.0, is no Hopper";
    refused(valid(), |_, device| device.path = Some(GemmPath::Hopper), want);
    refused(valid(), |world, _| world.options.chunk_rows = Some(0), "chunk rows is 0, expected at least 1");

    let want = "tile rows is 64, expected none on a device, whose kernels have tiles of their own";
    refused(valid(), |world, _| world.options.tile_rows = Some(64), want);

    let want = "the tile is 48x128, expected 128x256 or 64x128, which there are kernels for (ampere)";
    refused(valid(), |_, device| device.tile = "48x128".parse().ok(), want);

    let gpu = world.pes(1).remove(0);
    let source = synthetic(valid(), 1);
    let device = DeviceOptions::default();
    let error = DeviceLayer::new(&gpu, spec_of(&world, &source, 2, 4), &source, &device);
    let want = "the placement's number of PEs is 2, expected 1";
    assert_eq!(error.map(drop).unwrap_err().to_string(), want);
    let spec = spec_of(&world, &source, 1, 4).training(false);
    let mut layer = DeviceLayer::new(&gpu, spec, &source, &device).unwrap();
    let mut tokens = Tokens::new(&gpu, &source, 0..4, world.dtype);
    let error = |result: Result<DeviceSaved<'_>, MoeError>| result.map(drop).unwrap_err().to_string();
    let five = Buffer::new(&gpu, 5 * 16 * 2).unwrap();
    let want = "expected a multiple of 16, the hidden size, up to 64";
    assert_eq!(error(layer.forward(&five, &mut tokens.output)), format!("hidden_states has 80 elements, {want}"));
    let mut small = Buffer::new(&gpu, 4).unwrap();
    assert_eq!(error(layer.forward(&small, &mut tokens.output)), format!("hidden_states has 2 elements, {want}"));
    assert_eq!(error(layer.forward(&tokens.x, &mut small)), "output has 1 elements, expected 64");
    let mut saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
    layer.finish(&saved).unwrap();
    let error = layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap_err();
    assert_eq!(error.to_string(), "cannot run backward: the layer was not made for training");
}

#[test]
fn insufficient_memory_reports_the_required_bytes() {
    let source = synthetic(mixtral(16, 8, 6, 2), 1);
    let world = World::new();
    let errors = on_pes(emulated::world(2, 4096, &world.device, None).unwrap(), |gpu| {
        new_layer(gpu, &world, &source, 4).map(drop).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("out of symmetric device memory: "), "{error}");
        assert!(error.ends_with(" bytes asked for, 4096 of 4096 bytes free"), "{error}");
    }
    let gpu = world.pes(1).remove(0);
    let error = Buffer::new(&gpu, 1 << 60).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("out of device memory: 1152921504606846976 bytes asked for, "), "{error}");
}
