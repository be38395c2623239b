//! The rest of the layer's interface on a device: weights set in place, accumulated gradients, changes of mode, and
//! ownership of passes.

use aristos::gpu::GpuError;
use aristos::moe::{Gradients, WeightError, WeightId};

use super::*;

/// A layer with every kind of weight, and a sigmoid router with a correction bias.
fn rich() -> LayerConfig {
    let base = mixtral(32, 24, 12, 4);
    let expert = with!(base.expert; bias = true);
    let shared = Some(SharedConfig::new(with!(expert; intermediate = 40), true));
    let router = RouterKind::Sigmoid.config(12, 4);
    with!(base; expert = expert, shared = shared, router = router, aux_loss_coef = 0.1)
}

/// A source whose router weights are exact in bf16, so that one plane holds them.
struct OnePlane<'a>(&'a Synthetic);

impl WeightSource for OnePlane<'_> {
    fn config(&self) -> &LayerConfig {
        self.0.config()
    }

    fn name(&self, id: WeightId) -> String {
        self.0.name(id)
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        let values = self.0.load(id)?;
        Ok(if id == WeightId::Router { values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect() } else { values })
    }
}

fn set_all<L: MoeLayer>(layer: &mut L, source: &dyn WeightSource) {
    for id in layer.spec().held(layer.my_pe()) {
        layer.set_weights(id, &source.load(id).unwrap()).unwrap();
    }
}

/// All results of a step, for bitwise comparison.
type Left = (Vec<f32>, Vec<f32>, Vec<u32>, Vec<Vec<f32>>);

pub fn flat(grads: &Gradients) -> Vec<Vec<f32>> {
    let mlps = grads.experts.iter().chain([&grads.shared]);
    let mlps = mlps.flat_map(|mlp| mlp.matrix.iter().chain(&mlp.bias).cloned());
    [grads.router.clone(), grads.shared_gate.clone()].into_iter().chain(mlps).collect()
}

fn step<L: MoeLayer>(layer: &mut L, data: &Synthetic) -> Left {
    let first = 13 * layer.my_pe();
    let (x, dy) = (data.hidden_states(first..first + 13), data.grad_output(first..first + 13));
    let done = common::one_step(layer, &x, &dy).unwrap();
    (done.output, done.grad_input, done.routed.chosen, flat(&done.grads))
}

/// Replacing all weights of a layer equals making a new one from them, bit for bit, even if the router's weights then
/// need more or fewer planes.
#[test]
fn set_weights_equal_those_of_a_new_layer() {
    let (before, after) = (synthetic(rich(), 3), synthetic(rich(), 4));
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for hopper in [false, true] {
            let device = with!(EmulatedDevice::default(); hopper = hopper);
            let world = World { dtype, device, ..World::new() };
            let (before_one, after_one) = (OnePlane(&before), OnePlane(&after));
            let pairs: [(&(dyn WeightSource + Sync), &(dyn WeightSource + Sync)); 4] =
                [(&before, &after), (&before_one, &after), (&before, &after_one), (&before_one, &after_one)];
            for (i, (from, to)) in pairs.into_iter().enumerate() {
                on_pes(world.pes(2), |gpu| {
                    let make = |source: &dyn WeightSource| {
                        let spec = spec_of(&world, &before, 2, 13);
                        DeviceLayer::new(gpu, spec, source, &DeviceOptions::default()).unwrap()
                    };
                    let mut anew = make(to);
                    let want = step(&mut anew, &after);
                    anew.free().unwrap();
                    let mut layer = make(from);
                    let first = step(&mut layer, &after);
                    assert!(first != want, "other weights give other results");
                    set_all(&mut layer, to);
                    assert!(step(&mut layer, &after) == want, "{dtype:?}, Hopper {hopper}, pair {i}");
                    for id in layer.spec().held(gpu.my_pe()) {
                        let given = to.load(id).unwrap();
                        let rounded = matches!(id, WeightId::Expert(..) | WeightId::Shared(_));
                        let round = if rounded { world.round() } else { |v| v };
                        let mut got = vec![f32::NAN; given.len()];
                        layer.weights(id, &mut got).unwrap();
                        assert_eq!(got, given.into_iter().map(round).collect::<Vec<_>>(), "{id:?}");
                    }
                    set_all(&mut layer, from);
                    assert!(step(&mut layer, &after) == first, "and back");
                    layer.free().unwrap();
                });
            }
        }
    }
}

#[test]
fn setting_weights_allocates_no_memory() {
    // A small layer keeps the thousand steps short.
    let small = || mixtral(8, 8, 2, 1);
    let (source, other) = (synthetic(small(), 3), synthetic(small(), 4));
    let device = with!(EmulatedDevice::default(); multiprocessors = 2);
    let world = World { device, ..World::new() };
    let gpu = world.pes(1).remove(0);
    let mut layer = new_layer(&gpu, &world, &source, 2).unwrap();
    let mut tokens = Tokens::new(&gpu, &source, 0..2, world.dtype);
    let weights: Vec<_> = layer.spec().held(0).into_iter().map(|id| (id, other.load(id).unwrap())).collect();
    let mut allocations = 0;
    for turn in 0..1000 {
        for (id, values) in &weights {
            layer.set_weights(*id, values).unwrap();
        }
        let mut saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
        layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
        layer.finish(&saved).unwrap();
        layer.recycle(saved);
        if turn < 3 {
            allocations = gpu.allocations();
        }
    }
    assert_eq!(gpu.allocations(), allocations);
}

#[test]
fn invalid_weights_are_rejected() {
    let world = World { dtype: Dtype::F16, ..World::new() };
    let source = synthetic(mixtral(16, 8, 6, 2), 1);
    on_pes(world.pes(2), |gpu| {
        let mut layer = new_layer(gpu, &world, &source, 4).unwrap();
        let (me, other) = (3 * gpu.my_pe(), 3 - 3 * gpu.my_pe());
        let id = |e| WeightId::Expert(e, aristos::moe::Proj::Up);
        let error = |result: Result<(), MoeError>| result.unwrap_err().to_string();
        let pe = gpu.my_pe();
        let not_held = |id: WeightId| format!("cannot set a weight: PE {pe} holds no {id:?}");
        assert_eq!(error(layer.set_weights(id(other), &[0.0; 128])), not_held(id(other)));
        assert_eq!(error(layer.set_weights(id(6), &[0.0; 128])), not_held(id(6)));
        let bias = WeightId::SharedBias(aristos::moe::Proj::Up);
        assert_eq!(error(layer.set_weights(bias, &[0.0; 8])), not_held(bias));
        let name = format!("{:?}", id(me));
        assert_eq!(error(layer.set_weights(id(me), &[0.0; 127])), format!("{name} has 127 elements, expected 128"));
        assert_eq!(error(layer.weights(id(me), &mut [0.0; 129])), format!("{name} has 129 elements, expected 128"));
        let mut before = [0.0; 128];
        layer.weights(id(me), &mut before).unwrap();
        let mut large = [1.0; 128];
        large[5] = 70000.0;
        let want = format!("{name}: element 5 is 70000, too large for f16");
        assert_eq!(error(layer.set_weights(id(me), &large)), want);
        let mut after = [0.0; 128];
        layer.weights(id(me), &mut after).unwrap();
        assert_eq!(after, before, "what is refused changes nothing");
        layer.free().unwrap();
    });
}

/// Gradients accumulated over several backward passes are the sums of the separate ones, in their order.
#[test]
fn accumulated_gradients_are_sums() {
    let source = synthetic(rich(), 3);
    let world = World::new();
    on_pes(world.pes(2), |gpu| {
        let mut layer = new_layer(gpu, &world, &source, 13).unwrap();
        // The second of the three passes uses the caller's routing, which has no gradients of replicated weights.
        let pass = |layer: &mut DeviceLayer<'_>, batch: usize| -> Vec<Vec<f32>> {
            let first = 26 * batch + 13 * gpu.my_pe();
            let (x, dy) = (source.hidden_states(first..first + 13), source.grad_output(first..first + 13));
            if batch != 1 {
                return flat(&common::one_step(layer, &x, &dy).unwrap().grads);
            }
            let (x, dy) = (layer.rows(&x, "x").unwrap(), layer.rows(&dy, "dy").unwrap());
            let ids: Vec<i32> =
                (0..13 * 4).map(|i| if i % 5 == 0 { -1 } else { (i % 4) + 4 * ((i / 4) % 3) }).collect();
            let weights: Vec<f32> = (0..13 * 4).map(|i| i as f32 / 20.0 - 1.0).collect();
            let (ids, weights) = (layer.ids(&ids).unwrap(), layer.values(&weights).unwrap());
            let [mut y, mut dx] = [(); 2].map(|()| layer.values(&[0.0; 13 * 32]).unwrap());
            let mut dw = layer.values(&[0.0; 13 * 4]).unwrap();
            let mut saved = layer.experts(&x, &ids, &weights, &mut y).unwrap();
            layer.experts_backward(&mut saved, &x, &dy, &mut dx, &mut dw).unwrap();
            layer.finish(&saved).unwrap();
            layer.recycle(saved);
            flat(layer.gradients().unwrap())
        };
        let separate: Vec<_> = (0..3).map(|batch| pass(&mut layer, batch)).collect();
        let sums = |batches: &[usize]| {
            let mut sum = separate[batches[0]].clone();
            for &batch in &batches[1..] {
                let pairs = sum.iter_mut().flatten().zip(separate[batch].iter().flatten());
                pairs.for_each(|(sum, d)| *sum += d);
            }
            sum
        };
        // Twice, so that the second run starts with existing sums.
        for _ in 0..2 {
            layer.set_accumulate(false).unwrap();
            assert_eq!(pass(&mut layer, 0), separate[0], "overwritten");
            layer.set_accumulate(true).unwrap();
            assert_eq!(flat(layer.gradients().unwrap()), separate[0], "nothing is lost");
            assert_eq!(pass(&mut layer, 1), sums(&[0, 1]));
            assert_eq!(pass(&mut layer, 2), sums(&[0, 1, 2]));
            assert_eq!(pass(&mut layer, 0), sums(&[0, 1, 2, 0]));
        }
        layer.free().unwrap();
    });
}

/// Making the layer loads all kernels of a step, including the accumulating one: a caller may capture a step, during
/// which drivers cannot load kernels. The emulator refuses to record a kernel that is not prepared.
#[test]
fn accumulating_step_can_be_recorded() {
    let source = synthetic(rich(), 3);
    let world = World::new();
    on_pes(world.pes(1), |gpu| {
        let mut layer = new_layer(gpu, &world, &source, 13).unwrap();
        let (x, dy) = (source.hidden_states(0..13), source.grad_output(0..13));
        let (x, dy) = (layer.rows(&x, "x").unwrap(), layer.rows(&dy, "dy").unwrap());
        let [mut y, mut dx] = [(); 2].map(|()| layer.values(&[0.0; 13 * 32]).unwrap());
        layer.set_accumulate(true).unwrap();
        let mut step = || {
            let mut saved = layer.forward(&x, &mut y)?;
            layer.backward(&mut saved, &x, &dy, &mut dx)
        };
        let recorded = gpu.record(&mut || step().map_err(|error| GpuError::failed("run a step", error)));
        assert_eq!(recorded.err().map(|error| error.to_string()), None);
    });
}

/// Changing the mode between passes, even between forward and backward, changes no bit.
#[test]
fn mode_can_change_between_passes() {
    for source in [synthetic(rich(), 3), hot(&mixtral(32, 16, 8, 2), 0.25, 1.0)] {
        let mut world = World::new();
        world.options = with!(small_options(); chunk_rows = Some(3), budget_factor = 0.5);
        on_pes(world.pes(3), |gpu| {
            let mut layer = new_layer(gpu, &world, &source, 13).unwrap();
            let want = step(&mut layer, &source);
            for modes in [[Mode::Bulk, Mode::Bulk], [Mode::Bulk, Mode::Pipelined], [Mode::Pipelined, Mode::Bulk]] {
                let first = 13 * gpu.my_pe();
                let mut tokens = Tokens::new(gpu, &source, first..first + 13, world.dtype);
                layer.set_mode(modes[0]).unwrap();
                let mut saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
                layer.set_mode(modes[1]).unwrap();
                layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
                layer.finish(&saved).unwrap();
                layer.recycle(saved);
                assert_eq!((tokens.output(), tokens.grad_input()), (want.0.clone(), want.1.clone()), "{modes:?}");
                assert_eq!(flat(layer.gradients().unwrap()), want.3, "{modes:?}");
                assert_eq!(layer.spec().options.mode, modes[1]);
            }
            layer.free().unwrap();
        });
    }
}

/// A recorded layer follows changes of the mode and of the number of planes of its router's weights.
#[test]
fn recorded_layer_follows_changes() {
    let (before, after) = (synthetic(rich(), 3), synthetic(rich(), 4));
    let world = World::new();
    let source = OnePlane(&before);
    let gpu = world.pes(1).remove(0);
    let make = |source: &dyn WeightSource| {
        DeviceLayer::new(&gpu, spec_of(&world, &before, 1, 13), source, &DeviceOptions::default()).unwrap()
    };
    let want = [step(&mut make(&source), &after), step(&mut make(&after), &after)];
    let mut layer = make(&source);
    let mut recorded = RecordedLayer::new(&mut layer).unwrap();
    let mut tokens = Tokens::new(&gpu, &after, 0..13, world.dtype);
    let mut got = Vec::new();
    for turn in 0..3 {
        match turn {
            1 => recorded.set_mode(Mode::Bulk).unwrap(),
            2 => set_all(&mut recorded, &after),
            _ => {}
        }
        let mut saved = recorded.forward(&tokens.x, &mut tokens.output).unwrap();
        recorded.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
        recorded.finish(&saved).unwrap();
        got.push((tokens.output(), tokens.grad_input(), flat(recorded.gradients().unwrap())));
    }
    for (turn, (got, which)) in got.into_iter().zip([0, 0, 1]).enumerate() {
        let (output, grad_input, _, grads) = want[which].clone();
        assert!(got == (output, grad_input, grads), "turn {turn}");
    }
}

/// A saved pass belongs to its layer, for one backward.
#[test]
fn saved_pass_of_another_layer_is_rejected() {
    let source = synthetic(mixtral(16, 8, 6, 2), 1);
    let world = World::new();
    let gpu = world.pes(1).remove(0);
    let new = || new_layer(&gpu, &world, &source, 4).unwrap();
    let (mut one, mut other) = (new(), new());
    let mut tokens = Tokens::new(&gpu, &source, 0..4, world.dtype);
    let mut saved = one.forward(&tokens.x, &mut tokens.output).unwrap();
    one.finish(&saved).unwrap();
    let text = |result: Result<(), MoeError>| result.unwrap_err().to_string();
    let Tokens { x, grad_output, grad_input, .. } = &mut tokens;

    let foreign = |what: &str| format!("cannot {what}: the forward pass was another layer's");
    let result = other.backward(&mut saved, x, grad_output, grad_input);
    assert_eq!(text(result), foreign("run backward"));
    assert_eq!(text(other.finish(&saved).map(drop)), foreign("finish a pass"));
    assert_eq!(text(other.routed(&saved).map(drop)), foreign("read a pass's routing"));
    let mut weights = other.values(&[0.0; 8]).unwrap();
    let result = other.experts_backward(&mut saved, x, grad_output, grad_input, &mut weights);
    assert_eq!(text(result), foreign("run the backward of experts"));

    let result = one.experts_backward(&mut saved, x, grad_output, grad_input, &mut weights);
    let want = "cannot run the backward of experts: the layer's own router routed the forward pass";
    assert_eq!(text(result), want);
    one.backward(&mut saved, x, grad_output, grad_input).unwrap();
    one.finish(&saved).unwrap();
    let result = one.backward(&mut saved, x, grad_output, grad_input);
    assert_eq!(text(result), "cannot run backward: the forward pass has had its backward");

    let ids = one.ids(&[0, 1, 1, 2, 3, 4, -1, 5]).unwrap();
    let mut output = one.values(&[0.0; 64]).unwrap();
    let mut given = one.experts(x, &ids, &weights, &mut output).unwrap();
    let result = one.backward(&mut given, x, grad_output, grad_input);
    assert_eq!(text(result), "cannot run backward: the caller routed the forward pass");
    one.experts_backward(&mut given, x, grad_output, grad_input, &mut weights).unwrap();
    one.finish(&given).unwrap();

    // Recycling another layer's state only frees it.
    let fresh = one.forward(x, &mut output).unwrap();
    one.finish(&fresh).unwrap();
    other.recycle(fresh);
    let before = other.forward(x, &mut output).unwrap();
    other.finish(&before).unwrap();

    // The layer is freed, and a new one uses its memory.
    let mut left = one.forward(x, &mut output).unwrap();
    one.finish(&left).unwrap();
    one.free().unwrap();
    let mut next = new();
    let result = next.backward(&mut left, x, grad_output, grad_input);
    assert_eq!(text(result), foreign("run backward"));
    assert_eq!(text(next.finish(&left).map(drop)), foreign("finish a pass"));
}

#[test]
fn invalid_recordings_are_rejected() {
    let source = synthetic(mixtral(16, 8, 6, 2), 1);
    let world = World::new();
    let gpu = world.pes(1).remove(0);
    let (mut one, mut other) = [(); 2].map(|()| new_layer(&gpu, &world, &source, 4).unwrap()).into();
    let mut tokens = Tokens::new(&gpu, &source, 0..4, world.dtype);
    let Tokens { x, grad_output, grad_input, output, .. } = &mut tokens;
    let (mut one, mut other) = (RecordedLayer::new(&mut one).unwrap(), RecordedLayer::new(&mut other).unwrap());
    let text = |result: Result<(), MoeError>| result.unwrap_err().to_string();
    let mut first = one.forward(x, output).unwrap();
    let result = other.backward(&mut first, x, grad_output, grad_input);
    assert_eq!(text(result), "cannot run backward: the forward pass was another layer's");
    let mut second = one.forward(x, output).unwrap();
    let taken = "another forward pass took the recorded pass's memory";
    let result = one.backward(&mut first, x, grad_output, grad_input);
    assert_eq!(text(result), format!("cannot run backward: {taken}"));
    assert_eq!(text(one.finish(&first).map(drop)), format!("cannot finish a pass: {taken}"));

    // Buffers other than the recorded ones are rejected, and a correct call still works after that.
    let why = "cannot repeat a recorded pass: its buffers or the number of tokens are others than those recorded";
    let mut more = one.values(&[0.0; 64]).unwrap();
    assert_eq!(text(one.forward(x, &mut more).map(drop)), why);
    let fewer = one.rows(&[0.5; 48], "x").unwrap();
    let mut fewer_out = one.values(&[0.0; 48]).unwrap();
    assert_eq!(text(one.forward(&fewer, &mut fewer_out).map(drop)), why);
    one.backward(&mut second, x, grad_output, grad_input).unwrap();
    one.finish(&second).unwrap();
    let result = one.backward(&mut second, x, grad_output, grad_input);
    assert_eq!(text(result), "cannot run backward: the forward pass has had its backward");
    let mut third = one.forward(x, output).unwrap();
    assert_eq!(text(one.backward(&mut third, x, grad_output, &mut more)), why);
    one.backward(&mut third, x, grad_output, grad_input).unwrap();
    one.finish(&third).unwrap();
}

#[test]
fn memory_of_another_device_is_rejected() {
    let source = synthetic(mixtral(16, 8, 6, 2), 1);
    let world = World::new();
    let (gpu, elsewhere) = (world.pes(1).remove(0), world.pes(1).remove(0));
    let mut layer = new_layer(&gpu, &world, &source, 4).unwrap();
    let here = Tokens::new(&gpu, &source, 0..4, world.dtype);
    let mut there = Tokens::new(&elsewhere, &source, 0..4, world.dtype);
    let error = layer.forward(&here.x, &mut there.output).map(drop).unwrap_err().to_string();
    assert_eq!(error, "cannot run a pass: output is memory of another device");
    let mut output = layer.values(&[0.0; 64]).unwrap();
    let error = layer.forward(&there.x, &mut output).map(drop).unwrap_err().to_string();
    assert_eq!(error, "cannot run a pass: hidden_states is memory of another device");
}
