//! [`DeviceExperts`], a layer over its caller's memory, against a layer that owns its weights: the same bits.

use aristos::gpu::emulated::Emulated;
use aristos::moe::device::{DeviceExperts, ExpertAddresses, ExpertsBackward, ExpertsForward};
use aristos::moe::{Activation, MlpConfig, Proj, RouterConfig, WeightId};

use super::experts::{Choices, PeExperts, all_to_one, any_choices, experts_step};
use super::*;

/// A training loop's arrays of one PE, in device memory.
pub(super) struct Arrays<'g> {
    up: Buffer<'g>,
    down: Buffer<'g>,
    up_bias: Buffer<'g>,
    down_bias: Buffer<'g>,
}

impl<'g> Arrays<'g> {
    /// The weights of this PE's experts.
    pub(super) fn weights(gpu: &'g Emulated, spec: &LayerSpec, source: &Synthetic) -> Self {
        let expert = spec.config.expert;
        let (mut matrices, mut biases) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for &e in spec.placement.experts(gpu.my_pe()) {
            for &proj in expert.projections() {
                let to = usize::from(proj == Proj::Down);
                let values = source.load(WeightId::Expert(e, proj)).unwrap();
                matrices[to].extend(to_elements(&values, spec.dtype, "weights").unwrap());
                if expert.bias {
                    biases[to].extend(source.load(WeightId::ExpertBias(e, proj)).unwrap());
                }
            }
        }
        Arrays {
            up: Buffer::from_slice(gpu, &matrices[0]).unwrap(),
            down: Buffer::from_slice(gpu, &matrices[1]).unwrap(),
            up_bias: Buffer::from_slice(gpu, &biases[0]).unwrap(),
            down_bias: Buffer::from_slice(gpu, &biases[1]).unwrap(),
        }
    }

    /// f32 arrays of the same shapes, filled with `value`.
    pub(super) fn gradients(&self, gpu: &'g Emulated, value: f32) -> Self {
        let filled = |bytes: u64| Buffer::from_slice(gpu, &vec![value; bytes as usize / 4]).unwrap();
        Arrays {
            up: filled(2 * self.up.bytes()),
            down: filled(2 * self.down.bytes()),
            up_bias: filled(self.up_bias.bytes()),
            down_bias: filled(self.down_bias.bytes()),
        }
    }

    fn addresses(&self) -> ExpertAddresses {
        ExpertAddresses {
            up: self.up.address(),
            down: self.down.address(),
            up_bias: self.up_bias.address(),
            down_bias: self.down_bias.address(),
        }
    }

    /// Gradients in the order of `want`, the owning layer's.
    /// `tolerance` is relative to the larger of 1 and the expected value.
    fn check(
        &self,
        (spec, me): (&LayerSpec, usize),
        want: &PeExperts,
        expected: impl Fn(f32) -> f32,
        tolerance: f32,
        what: &str,
    ) {
        let (config, mlp) = (&spec.config, spec.config.expert);
        let read = |buffer: &Buffer<'_>| buffer.read_vec::<f32>(0, buffer.bytes() as usize / 4).unwrap();
        let arrays = [[&self.up, &self.down], [&self.up_bias, &self.down_bias]].map(|of| of.map(read));
        let mut at = [[0, 0], [0, 0]];
        for &e in spec.placement.experts(me) {
            for &proj in mlp.projections() {
                let ids = [WeightId::Expert(e, proj), WeightId::ExpertBias(e, proj)];
                for (kind, id) in ids.into_iter().enumerate().filter(|(kind, _)| *kind == 0 || mlp.bias) {
                    let (to, len) = (usize::from(proj == Proj::Down), config.shape(id).iter().product::<usize>());
                    let got = &arrays[kind][to][at[kind][to]..][..len];
                    at[kind][to] += len;
                    for (i, (&got, &value)) in got.iter().zip(&want.grads[&id]).enumerate() {
                        let want = expected(value);
                        let near = (got - want).abs() <= tolerance * want.abs().max(1.0);
                        assert!(got == want || near, "{what}: {id:?}: element {i} is {got}, expected {want}");
                    }
                }
            }
        }
    }
}

/// A pass's memory, which a framework would have allocated.
pub(super) struct Memory<'g> {
    tokens: usize,
    x: Buffer<'g>,
    grad_output: Buffer<'g>,
    ids: Buffer<'g>,
    weights: Buffer<'g>,
    output: Buffer<'g>,
    grad_x: Buffer<'g>,
    grad_weights: Buffer<'g>,
    state: Buffer<'g>,
}

impl<'g> Memory<'g> {
    pub(super) fn new(gpu: &'g Emulated, layer: &DeviceExperts<'g>, rows: [&[f32]; 2], choices: &Choices) -> Self {
        let dtype = layer.spec().dtype;
        let row_buffer = |values| Buffer::from_slice(gpu, &to_elements(values, dtype, "rows").unwrap()).unwrap();
        let result = |elements: usize| Buffer::from_slice(gpu, &vec![f32::NAN; elements]).unwrap();
        let ids: Vec<i64> = choices.ids.iter().map(|&id| i64::from(id)).collect();
        Memory {
            tokens: choices.ids.len() / layer.spec().config.router.top_k,
            x: row_buffer(rows[0]),
            grad_output: row_buffer(rows[1]),
            ids: Buffer::from_slice(gpu, &ids).unwrap(),
            weights: Buffer::from_slice(gpu, &choices.weights).unwrap(),
            output: result(rows[0].len()),
            grad_x: result(rows[0].len()),
            grad_weights: result(choices.weights.len()),
            state: Buffer::new(gpu, layer.state_bytes()).unwrap(),
        }
    }

    pub(super) fn forward(&self, experts: &Arrays<'_>) -> ExpertsForward {
        ExpertsForward {
            stream: None,
            tokens: self.tokens,
            x: self.x.address(),
            ids: self.ids.address(),
            wide_ids: true,
            weights: self.weights.address(),
            output: self.output.address(),
            narrow_output: false,
            experts: experts.addresses(),
            state: self.state.address(),
        }
    }

    pub(super) fn backward(&self, experts: &Arrays<'_>, gradients: &Arrays<'_>) -> ExpertsBackward {
        ExpertsBackward {
            stream: None,
            tokens: self.tokens,
            x: self.x.address(),
            grad_output: self.grad_output.address(),
            grad_x: self.grad_x.address(),
            narrow_output: false,
            grad_weights: self.grad_weights.address(),
            experts: experts.addresses(),
            gradients: gradients.addresses(),
            accumulate: false,
            state: self.state.address(),
        }
    }

    /// Checks the results of both passes.
    fn check(&self, want: &PeExperts, what: &str) {
        let read = |buffer: &Buffer<'_>| buffer.read_vec::<f32>(0, buffer.bytes() as usize / 4).unwrap();
        assert_eq!(read(&self.output), want.output, "{what}: output");
        assert_eq!(read(&self.grad_x), want.grad_input, "{what}: gradient of x");
        assert_eq!(read(&self.grad_weights), want.grad_weights, "{what}: gradient of the weights");
    }
}

pub(super) fn forward(layer: &DeviceExperts<'_>, call: &ExpertsForward) -> Result<(), MoeError> {
    // SAFETY: the addresses are those of live buffers with the documented shapes; emulated kernels end in the call.
    unsafe { layer.forward(call) }
}

pub(super) fn backward(layer: &DeviceExperts<'_>, call: &ExpertsBackward) -> Result<(), MoeError> {
    // SAFETY: as in `forward`.
    unsafe { layer.backward(call) }
}

/// One PE's part of a test: the layer, its arrays, and the results of a layer that owns its weights.
struct Part<'g> {
    gpu: &'g Emulated,
    layer: DeviceExperts<'g>,
    arrays: Arrays<'g>,
    rows: [Vec<f32>; 2],
    choices: Choices,
    want: PeExperts,
}

impl<'g> Part<'g> {
    fn memory(&self) -> Memory<'g> {
        Memory::new(self.gpu, &self.layer, self.rows.each_ref().map(Vec::as_slice), &self.choices)
    }

    /// Checks `gradients` against the owning layer's, after `expected`.
    fn check(&self, gradients: &Arrays<'_>, expected: impl Fn(f32) -> f32, what: &str) {
        self.check_near(gradients, expected, 0.0, what);
    }

    /// Like [`check`](Self::check), with a tolerance.
    fn check_near(&self, gradients: &Arrays<'_>, expected: impl Fn(f32) -> f32, tolerance: f32, what: &str) {
        gradients.check((self.layer.spec(), self.gpu.my_pe()), &self.want, expected, tolerance, what);
    }
}

pub(super) fn external(mut layer: LayerConfig) -> LayerConfig {
    layer.router = RouterConfig::external(layer.router.top_k);
    layer
}

/// Runs `test` with a layer over the caller's memory on `n` PEs.
fn on_parts(world: &World, config: LayerConfig, choices: &Choices, n: usize, test: impl Fn(Part<'_>) + Sync) {
    let source = synthetic(external(config), 4);
    let k = source.config().router.top_k;
    let tokens = choices.ids.len() / k;
    let splits = even(tokens, n);
    on_pes(world.pes(n), |gpu| {
        let range = splits[gpu.my_pe()].clone();
        let max_tokens = tokens.div_ceil(n);
        let (rows, choices) =
            ([source.hidden_states(range.clone()), source.grad_output(range.clone())], choices.of(range, k));
        let mut owner = new_layer(gpu, world, &source, max_tokens).unwrap();
        let want = experts_step(&mut owner, &rows[0], &rows[1], &choices);
        owner.free().unwrap();
        let spec = spec_of(world, &source, n, max_tokens);
        let options = with!(DeviceOptions::default(); tile = world.tile);
        let layer = DeviceExperts::new(gpu, spec, &options).unwrap();
        let arrays = Arrays::weights(gpu, layer.spec(), &source);
        test(Part { gpu, layer, arrays, rows, choices, want });
    });
}

/// The plain layer, one with biases, and one without gates.
fn layers() -> Vec<(&'static str, LayerConfig)> {
    let base = mixtral(32, 24, 7, 4);
    let bias = with!(base.expert; bias = true);
    let plain = with!(MlpConfig::plain(24, Activation::Gelu); bias = true);
    vec![
        ("biases", with!(base.clone(); expert = bias)),
        ("without gates", with!(base.clone(); expert = plain)),
        ("gated", base),
    ]
}

fn worlds() -> Vec<(&'static str, World, usize)> {
    let hopper = with!(EmulatedDevice::default(); hopper = true);
    let rounds = with!(small_options(); budget_factor = 0.3, chunk_rows = Some(4));
    vec![
        ("one PE", World::new(), 1),
        ("three PEs, f16", World { dtype: Dtype::F16, ..World::new() }, 3),
        ("network", World::new().network(3), 3),
        ("Hopper", World { device: hopper, ..World::new() }, 2),
        ("rounds", World { options: rounds, ..World::new() }, 2),
    ]
}

#[test]
fn callers_memory_gives_the_bits_of_an_owning_layer() {
    for (kind, world, n) in worlds() {
        for (name, config) in layers() {
            let what = format!("{kind}, {name}");
            on_parts(&world, config, &any_choices(41, 7, 4, 3), n, |part| {
                let (memory, gradients) = (part.memory(), part.arrays.gradients(part.gpu, f32::NAN));
                let allocations = part.gpu.allocations();
                forward(&part.layer, &memory.forward(&part.arrays)).unwrap();
                backward(&part.layer, &memory.backward(&part.arrays, &gradients)).unwrap();
                assert_eq!(part.gpu.allocations(), allocations, "{what}: a call allocated memory");
                part.layer.finish().unwrap();
                memory.check(&part.want, &what);
                part.check(&gradients, |value| value, &what);
                part.layer.free().unwrap();
            });
        }
    }
}

/// Rows of the layer's element type are the rounded f32 rows, and ids may be i32.
#[test]
fn narrow_rows_and_ids_give_rounded_results() {
    let world = World::new();
    on_parts(&world, mixtral(32, 24, 7, 4), &any_choices(41, 7, 4, 3), 2, |part| {
        let (memory, gradients) = (part.memory(), part.arrays.gradients(part.gpu, f32::NAN));
        let ids = Buffer::from_slice(part.gpu, &part.choices.ids).unwrap();
        let call = memory.forward(&part.arrays);
        forward(&part.layer, &with!(call; ids = ids.address(), wide_ids = false, narrow_output = true)).unwrap();
        let call = memory.backward(&part.arrays, &gradients);
        backward(&part.layer, &with!(call; narrow_output = true)).unwrap();
        part.layer.finish().unwrap();
        let rounded = |values: &[f32]| to_elements(values, world.dtype, "rows").unwrap();
        let read = |buffer: &Buffer<'_>| buffer.read_vec::<u16>(0, buffer.bytes() as usize / 4).unwrap();
        assert_eq!(read(&memory.output), rounded(&part.want.output));
        assert_eq!(read(&memory.grad_x), rounded(&part.want.grad_input));
        part.check(&gradients, |value| value, "narrow");
    });
}

/// A framework may move saved tensors between a forward and its backward, and an optimizer its weights.
#[test]
fn state_rows_and_weights_may_move_before_the_backward() {
    for (kind, world, n) in worlds() {
        on_parts(&world, mixtral(32, 24, 7, 4), &any_choices(41, 7, 4, 5), n, |part| {
            let (mut memory, gradients) = (part.memory(), part.arrays.gradients(part.gpu, f32::NAN));
            forward(&part.layer, &memory.forward(&part.arrays)).unwrap();
            let moved = |buffer: &mut Buffer<'_>| {
                let bytes: Vec<u8> = buffer.read_vec(0, buffer.bytes() as usize).unwrap();
                let to = Buffer::from_slice(part.gpu, &bytes).unwrap();
                buffer.write(0, &vec![0xffu8; bytes.len()]).unwrap();
                to
            };
            let (x, state) = (moved(&mut memory.x), moved(&mut memory.state));
            let old = (std::mem::replace(&mut memory.x, x), std::mem::replace(&mut memory.state, state));
            let mut arrays = part.arrays;
            let up = moved(&mut arrays.up);
            let old_up = std::mem::replace(&mut arrays.up, up);
            backward(&part.layer, &memory.backward(&arrays, &gradients)).unwrap();
            part.layer.finish().unwrap();
            memory.check(&part.want, kind);
            gradients.check((part.layer.spec(), part.gpu.my_pe()), &part.want, |value| value, 0.0, kind);
            drop((old, old_up));
        });
    }
}

#[test]
fn backwards_may_run_in_any_order() {
    on_parts(&World::new(), mixtral(32, 24, 7, 4), &any_choices(41, 7, 4, 6), 2, |part| {
        let states = [part.memory(), part.memory(), part.memory()];
        for memory in &states {
            forward(&part.layer, &memory.forward(&part.arrays)).unwrap();
        }
        for index in [1, 0, 2] {
            let gradients = part.arrays.gradients(part.gpu, f32::NAN);
            backward(&part.layer, &states[index].backward(&part.arrays, &gradients)).unwrap();
            part.layer.finish().unwrap();
            states[index].check(&part.want, "any order");
            part.check(&gradients, |value| value, "any order");
        }
    });
}

/// The gradients of a pass are added once to the caller's values, which stay as they are for experts without tokens.
#[test]
fn gradients_are_added_to_the_callers() {
    for (kind, world, n) in worlds() {
        for (routing, choices) in [("any", any_choices(41, 7, 4, 7)), ("one expert", all_to_one(41, 2, 4, 7))] {
            for (name, config) in layers() {
                let what = format!("{kind}, {routing}, {name}");
                on_parts(&world, config, &choices, n, |part| {
                    let (memory, gradients) = (part.memory(), part.arrays.gradients(part.gpu, 1.5));
                    for _ in 0..2 {
                        forward(&part.layer, &memory.forward(&part.arrays)).unwrap();
                        let call = memory.backward(&part.arrays, &gradients);
                        backward(&part.layer, &with!(call; accumulate = true)).unwrap();
                    }
                    part.layer.finish().unwrap();
                    // In rounds, the second pass adds each round's sum to the total, in another order.
                    if part.want.rounds == 1 {
                        part.check(&gradients, |value| 1.5 + value + value, &what);
                    } else {
                        part.check_near(&gradients, |value| 1.5 + value + value, 1e-5, &what);
                    }
                    memory.check(&part.want, &what);
                });
            }
        }
    }
}

/// The pass ends on all PEs, the error comes with the next call, and the layer stays usable.
#[test]
fn invalid_choice_is_reported_by_a_later_call() {
    for (id, expected) in [
        (7, "token 3 has expert 7, expected 0 to 6, or -1 for none"),
        (1i64 << 40, "token 3 has expert 1099511627776, expected"),
    ] {
        on_parts(&World::new(), mixtral(32, 24, 7, 4), &any_choices(41, 7, 4, 8), 2, |part| {
            let (memory, gradients) = (part.memory(), part.arrays.gradients(part.gpu, f32::NAN));
            let wrong =
                Buffer::from_slice(part.gpu, &memory.ids.read_vec::<i64>(0, part.choices.ids.len()).unwrap()).unwrap();
            wrong.write(8 * 13, &[id]).unwrap();
            let call = memory.forward(&part.arrays);
            let bad = part.gpu.my_pe() == 0;
            forward(&part.layer, &if bad { with!(call; ids = wrong.address()) } else { call }).unwrap();
            // The backward is launched all the same, since the other PE's waits for it.
            backward(&part.layer, &memory.backward(&part.arrays, &gradients)).unwrap();
            if bad {
                let error = forward(&part.layer, &call).unwrap_err();
                assert!(matches!(error, MoeError::Usage { .. }), "{error}");
                let line = error.to_string();
                assert!(
                    line.starts_with("cannot route by the ids of an earlier pass: ") && line.contains(expected),
                    "{line}"
                );
            }
            forward(&part.layer, &call).unwrap();
            backward(&part.layer, &memory.backward(&part.arrays, &gradients)).unwrap();
            part.layer.finish().unwrap();
            memory.check(&part.want, "after an invalid choice");
            part.check(&gradients, |value| value, "after an invalid choice");
        });
    }
}

#[test]
fn missing_pe_is_named_by_every_call() {
    let mut world = World::new();
    world.options.wait_limit = Duration::from_millis(500);
    // The other layer's passes need the time limit, too, so that a busy machine has a second chance.
    on_parts(&world, mixtral(32, 24, 7, 4), &any_choices(8, 7, 4, 8), 2, |part| {
        if part.gpu.my_pe() == 1 {
            return std::mem::forget(part);
        }
        let memory = part.memory();
        for _ in 0..3 {
            let error = forward(&part.layer, &memory.forward(&part.arrays)).unwrap_err();
            assert_eq!(error.awaited_pe(), Some(1), "{error}");
        }
        assert_eq!(part.layer.finish().unwrap_err().awaited_pe(), Some(1));
    });
}

#[test]
fn wrong_arguments_are_named() {
    on_parts(&World::new(), mixtral(32, 24, 7, 4), &any_choices(8, 7, 4, 8), 1, |part| {
        let memory = part.memory();
        let call = memory.forward(&part.arrays);
        let error = |call: &ExpertsForward| forward(&part.layer, call).unwrap_err().to_string();
        assert!(error(&with!(call; tokens = 9)).contains("tokens"), "{}", error(&with!(call; tokens = 9)));
        let line = error(&with!(call; x = call.x + 2));
        assert!(line.contains("x is at address") && line.contains("a multiple of 16"), "{line}");
        let line = error(&with!(call; state = call.state + 16));
        assert!(line.contains("state is at address") && line.contains("a multiple of 64"), "{line}");
        forward(&part.layer, &call).unwrap();
    });
    let world = World::new();
    let gpu = world.pes(1).remove(0);
    let made = |config: LayerConfig, spare: u32| {
        let source = synthetic(config, 1);
        let options = with!(DeviceOptions::default(); spare_multiprocessors = spare);
        DeviceExperts::new(&gpu, spec_of(&world, &source, 1, 4), &options).map(|layer| layer.blocks())
    };
    let line = made(mixtral(32, 24, 7, 4), 0).unwrap_err().to_string();
    assert!(line.contains("it has a router or a shared expert"), "{line}");
    let config = external(mixtral(32, 24, 7, 4));
    assert_eq!([made(config.clone(), 0).unwrap(), made(config.clone(), 1).unwrap()], [3, 2]);
    let line = made(config, 3).unwrap_err().to_string();
    assert!(line.contains("spare multiprocessors") && line.contains("fewer than the device's 3"), "{line}");
}
