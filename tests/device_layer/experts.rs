//! The caller's routing, against dense loops in float64 and against the layer's own router.

use std::collections::BTreeMap;

use aristos::check;
use aristos::moe::{MlpId, Proj, RouterConfig, WeightId};

use super::*;

/// The caller's routing of some tokens, `[tokens, top_k]`.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    pub(crate) ids: Vec<i32>,
    pub(crate) weights: Vec<f32>,
}

impl Choices {
    /// The part for a range of tokens.
    pub(crate) fn of(&self, range: Range<usize>, k: usize) -> Choices {
        let range = range.start * k..range.end * k;
        Choices { ids: self.ids[range.clone()].to_vec(), weights: self.weights[range].to_vec() }
    }
}

/// Pseudo-random numbers: splitmix64.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A weight in -2..2, so that weights have either sign.
    fn weight(&mut self) -> f32 {
        (self.next() % 4000) as f32 / 1000.0 - 2.0
    }
}

/// Distinct experts in any order; every third choice is none, and some tokens have no expert.
pub(crate) fn any_choices(tokens: usize, experts: usize, k: usize, seed: u64) -> Choices {
    let mut draws = Draws(seed);
    let mut all = Choices { ids: Vec::new(), weights: Vec::new() };
    for token in 0..tokens {
        let mut order: Vec<i32> = (0..experts as i32).collect();
        for i in (1..experts).rev() {
            order.swap(i, draws.next() as usize % (i + 1));
        }
        for &id in &order[..k] {
            let none = token % 7 == 3 || draws.next().is_multiple_of(3);
            all.ids.push(if none { -1 } else { id });
            // Weights of missing experts must not be read.
            all.weights.push(if none { f32::NAN } else { draws.weight() });
        }
    }
    all
}

/// Every token has the single expert `hot`, in a random column.
pub(crate) fn all_to_one(tokens: usize, hot: i32, k: usize, seed: u64) -> Choices {
    let mut draws = Draws(seed);
    let mut all = Choices { ids: vec![-1; tokens * k], weights: vec![0.0; tokens * k] };
    for token in 0..tokens {
        let at = token * k + draws.next() as usize % k;
        (all.ids[at], all.weights[at]) = (hot, draws.weight());
    }
    all
}

/// Expected results of a pass with the caller's routing and its backward, over all tokens.
struct Dense {
    output: Vec<f64>,
    grad_input: Vec<f64>,
    grad_weights: Vec<f64>,
    grads: BTreeMap<WeightId, Vec<f64>>,
}

/// Weights of one gated SiLU expert in float64: gate, up, down, and their biases or zeros.
struct Expert {
    matrix: [Vec<f64>; 3],
    bias: [Vec<f64>; 3],
}

impl Expert {
    fn load(source: &Synthetic, e: usize, round: fn(f32) -> f32) -> Expert {
        let config = source.config();
        let wide = |values: Vec<f32>, round: fn(f32) -> f32| values.into_iter().map(|v| f64::from(round(v))).collect();
        let ids = [Proj::Gate, Proj::Up, Proj::Down].map(|proj| MlpId::Routed(e).ids(proj));
        Expert {
            matrix: ids.map(|(matrix, _)| wide(source.load(matrix).unwrap(), round)),
            bias: ids.map(|(matrix, bias)| match config.expert.bias {
                true => wide(source.load(bias).unwrap(), |v| v),
                false => vec![0.0; config.shape(matrix)[0]],
            }),
        }
    }

    /// `down(silu(gate(x)) * up(x))`, and gate(x), up(x) and the inner values for its gradient.
    fn forward(&self, x: &[f64]) -> (Vec<f64>, [Vec<f64>; 3]) {
        let linear = |m: usize, x: &[f64]| -> Vec<f64> {
            let rows = self.matrix[m].chunks_exact(x.len()).zip(&self.bias[m]);
            rows.map(|(row, bias)| bias + row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>()).collect()
        };
        let (gate, up) = (linear(0, x), linear(1, x));
        let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        (linear(2, &inner), [gate, up, inner])
    }
}

/// `sum += a * b^T` for a matrix `[a.len(), b.len()]`.
fn add_outer(sum: &mut [f64], a: &[f64], b: &[f64]) {
    sum.chunks_exact_mut(b.len()).zip(a).for_each(|(row, a)| row.iter_mut().zip(b).for_each(|(s, b)| *s += a * b));
}

/// `sum += y^T W`.
fn add_transposed(sum: &mut [f64], matrix: &[f64], y: &[f64]) {
    matrix.chunks_exact(sum.len()).zip(y).for_each(|(row, y)| sum.iter_mut().zip(row).for_each(|(s, w)| *s += y * w));
}

/// Dense loops over tokens and choices.
fn dense(source: &Synthetic, x: &[f64], grad_output: &[f64], choices: &Choices, round: fn(f32) -> f32) -> Dense {
    let config = source.config();
    let (h, k) = (config.hidden, config.router.top_k);
    let experts: Vec<Expert> = (0..config.n_experts).map(|e| Expert::load(source, e, round)).collect();
    let mut grads: BTreeMap<WeightId, Vec<f64>> = BTreeMap::new();
    for e in 0..config.n_experts {
        for id in config.expert_weights(e) {
            grads.insert(id, vec![0.0; config.shape(id).iter().product()]);
        }
    }
    let mut all = Dense {
        output: vec![0.0; x.len()],
        grad_input: vec![0.0; x.len()],
        grad_weights: vec![0.0; choices.ids.len()],
        grads,
    };
    for (i, &id) in choices.ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
        let (e, w, row) = (id as usize, f64::from(choices.weights[i]), i / k * h..(i / k + 1) * h);
        let (x, dy) = (&x[row.clone()], &grad_output[row.clone()]);
        let (y, [gate, up, inner]) = experts[e].forward(x);
        all.output[row.clone()].iter_mut().zip(&y).for_each(|(out, y)| *out += w * y);
        all.grad_weights[i] = dy.iter().zip(&y).map(|(dy, y)| dy * y).sum();
        let dy: Vec<f64> = dy.iter().map(|dy| w * dy).collect();
        let mut d_inner = vec![0.0; inner.len()];
        add_transposed(&mut d_inner, &experts[e].matrix[2], &dy);
        let (mut d_gate, mut d_up) = (Vec::new(), Vec::new());
        for ((g, u), d) in gate.iter().zip(&up).zip(&d_inner) {
            let s = 1.0 / (1.0 + (-g).exp());
            d_gate.push(d * u * (s + g * s * (1.0 - s)));
            d_up.push(d * g * s);
        }
        for (d, m) in [(&d_gate, 0), (&d_up, 1)] {
            add_transposed(&mut all.grad_input[row.clone()], &experts[e].matrix[m], d);
        }
        for (proj, d, input) in [(Proj::Gate, &d_gate, x), (Proj::Up, &d_up, x), (Proj::Down, &dy, &inner)] {
            let (matrix, bias) = MlpId::Routed(e).ids(proj);
            add_outer(all.grads.get_mut(&matrix).unwrap(), d, input);
            if let Some(bias) = all.grads.get_mut(&bias) {
                bias.iter_mut().zip(d).for_each(|(sum, d)| *sum += d);
            }
        }
    }
    all
}

/// Results of one PE's pass with the caller's routing.
pub(crate) struct PeExperts {
    pub(crate) output: Vec<f32>,
    pub(crate) grad_input: Vec<f32>,
    pub(crate) grad_weights: Vec<f32>,
    pub(crate) grads: BTreeMap<WeightId, Vec<f32>>,
    pub(crate) routed: Routed,
    pub(crate) rounds: u64,
    all_reduce_bytes: u64,
}

/// A pass with the caller's routing, and its backward.
pub(crate) fn experts_step<L: MoeLayer>(layer: &mut L, x: &[f32], grad_output: &[f32], choices: &Choices) -> PeExperts {
    use std::borrow::{Borrow, BorrowMut};
    let mut output = vec![f32::NAN; x.len()];
    let (mut grad_input, mut grad_weights) = (output.clone(), vec![f32::NAN; choices.ids.len()]);
    let (x, dy) = (layer.rows(x, "x").unwrap(), layer.rows(grad_output, "dy").unwrap());
    let (ids, weights) = (layer.ids(&choices.ids).unwrap(), layer.values(&choices.weights).unwrap());
    let mut y = layer.values(&output).unwrap();
    let (mut dx, mut dw) = (layer.values(&grad_input).unwrap(), layer.values(&grad_weights).unwrap());
    let mut saved = layer.experts(x.borrow(), ids.borrow(), weights.borrow(), y.borrow_mut()).unwrap();
    let forward = layer.finish(&saved).unwrap();
    let routed = layer.routed(&saved).unwrap();
    layer.experts_backward(&mut saved, x.borrow(), dy.borrow(), dx.borrow_mut(), dw.borrow_mut()).unwrap();
    let backward = layer.finish(&saved).unwrap();
    layer.recycle(saved);
    layer.read(y.borrow(), &mut output).unwrap();
    layer.read(dx.borrow(), &mut grad_input).unwrap();
    layer.read(dw.borrow(), &mut grad_weights).unwrap();
    let (spec, me) = (layer.spec().clone(), layer.my_pe());
    let all = layer.gradients().unwrap();
    let ids = spec.config.weights().into_iter();
    let grads = ids.filter_map(|id| Some((id, all.get(id, &spec.placement, me)?.to_vec()))).collect();
    PeExperts {
        output,
        grad_input,
        grad_weights,
        grads,
        routed,
        rounds: forward.rounds,
        all_reduce_bytes: backward.all_reduce_bytes,
    }
}

/// Two passes with the caller's routing on `n` PEs, which must be bitwise equal, against the dense loops.
fn check_experts(world: &World, source: &Synthetic, choices: &Choices, n: usize, what: &str) -> Vec<PeExperts> {
    let config = source.config();
    let (h, k) = (config.hidden, config.router.top_k);
    let tokens = choices.ids.len() / k;
    let splits = even(tokens, n);
    let pes = on_pes(world.pes(n), |gpu| {
        let range = splits[gpu.my_pe()].clone();
        let mut layer = new_layer(gpu, world, source, tokens.div_ceil(n)).unwrap();
        let (x, dy) = (source.hidden_states(range.clone()), source.grad_output(range.clone()));
        let mine = choices.of(range, k);
        let [first, second] = [(); 2].map(|()| experts_step(&mut layer, &x, &dy, &mine));
        layer.free().unwrap();
        assert_eq!(first.routed.chosen, mine.ids.iter().map(|&id| id as u32).collect::<Vec<_>>(), "{what}");
        assert_eq!(second.output, first.output, "{what}");
        assert_eq!(second.grad_input, first.grad_input, "{what}");
        assert_eq!(second.grad_weights, first.grad_weights, "{what}");
        assert_eq!(second.grads, first.grads, "{what}");
        first
    });
    let wide = |values: Vec<f32>| values.into_iter().map(|v| f64::from(world.round()(v))).collect::<Vec<_>>();
    let (x, dy) = (wide(source.hidden_states(0..tokens)), wide(source.grad_output(0..tokens)));
    let want = dense(source, &x, &dy, choices, world.round());
    let near = |name: &str, got: Vec<f32>, want: &[f64]| {
        let deviation = check::compare(name, &got, want);
        assert!(deviation.relative <= world.tolerance(), "{what}: {deviation:?}");
    };
    let all = |part: fn(&PeExperts) -> &Vec<f32>| pes.iter().flat_map(|pe| part(pe).clone()).collect::<Vec<f32>>();
    near("output", all(|pe| &pe.output), &want.output);
    near("grad_input", all(|pe| &pe.grad_input), &want.grad_input);
    let grad_weights = all(|pe| &pe.grad_weights);
    for (i, d) in grad_weights.iter().enumerate().filter(|(i, _)| choices.ids[*i] < 0) {
        assert_eq!(*d, 0.0, "{what}: choice {i} is none");
    }
    near("grad_weights", grad_weights, &want.grad_weights);
    for (id, want) in &want.grads {
        let got = pes.iter().find_map(|pe| pe.grads.get(id)).unwrap();
        near(&format!("{id:?}"), got.clone(), want);
    }
    for pe in &pes {
        // Gradients of replicated weights are up to the caller.
        for id in config.replicated_weights() {
            assert!(pe.grads.get(&id).is_none_or(|grad| grad.iter().all(|&d| d == 0.0)), "{what}: {id:?}");
        }
        assert_eq!(pe.all_reduce_bytes, 0, "{what}");
        assert_eq!(pe.output.len() % h, 0);
    }
    let rows: Vec<u64> = pes.iter().flat_map(|pe| pe.routed.expert_rows.clone()).collect();
    let chosen = |e: usize| choices.ids.iter().filter(|&&id| id == e as i32).count() as u64;
    assert_eq!(rows, (0..config.n_experts).map(chosen).collect::<Vec<_>>(), "{what}");
    pes
}

/// The gradients of the dense loops match finite differences.
#[test]
fn dense_reference_gradients_match_finite_differences() {
    let base = mixtral(8, 16, 4, 3);
    let source = synthetic(with!(base; expert.bias = true), 9);
    let choices = any_choices(3, 4, 3, 1);
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
    let (x, dy) = (wide(source.hidden_states(0..3)), wide(source.grad_output(0..3)));
    let of = |x: &[f64], choices: &Choices| dense(&source, x, &dy, choices, |v| v);
    let loss = |x: &[f64], choices: &Choices| of(x, choices).output.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
    let want = of(&x, &choices);
    for i in 0..x.len() {
        let (mut more, mut less) = (x.clone(), x.clone());
        (more[i], less[i]) = (x[i] + 1e-5, x[i] - 1e-5);
        let d = (loss(&more, &choices) - loss(&less, &choices)) / 2e-5;
        assert!((d - want.grad_input[i]).abs() < 1e-6 * (1.0 + d.abs()), "{i}: {d}, not {}", want.grad_input[i]);
    }
    for i in (0..choices.ids.len()).filter(|&i| choices.ids[i] >= 0) {
        let (mut more, mut less) = (choices.clone(), choices.clone());
        // Linear in the weights, so the step may be large.
        (more.weights[i], less.weights[i]) = (choices.weights[i] + 0.5, choices.weights[i] - 0.5);
        let step = f64::from(more.weights[i]) - f64::from(less.weights[i]);
        let d = (loss(&x, &more) - loss(&x, &less)) / step;
        assert!((d - want.grad_weights[i]).abs() < 1e-9 * (1.0 + d.abs()), "{i}: {d}, not {}", want.grad_weights[i]);
    }
}

#[test]
fn any_routing_matches_float64() {
    let base = mixtral(32, 24, 7, 4);
    let expert = with!(base.expert; bias = true);
    let shared = Some(SharedConfig::new(with!(expert; intermediate = 40), true));
    let rich = with!(base.clone(); expert = expert, shared = shared, aux_loss_coef = 0.1, z_loss_coef = 0.1);
    for (name, layer) in [("plain", base), ("biases, a shared expert and losses", rich)] {
        let source = synthetic(layer, 6);
        for (n, mode, dtype) in [
            (1, Mode::Pipelined, Dtype::Bf16),
            (3, Mode::Pipelined, Dtype::Bf16),
            (3, Mode::Bulk, Dtype::F16),
            (4, Mode::Pipelined, Dtype::F16),
        ] {
            let world = World { dtype, ..World::new().mode(mode) };
            check_experts(&world, &source, &any_choices(41, 7, 4, 2), n, &format!("{name}, {n} PEs, {mode:?}"));
        }
        check_experts(&World::new().network(3), &source, &any_choices(41, 7, 4, 3), 3, &format!("{name}, network"));
        let device = with!(EmulatedDevice::default(); hopper = true);
        let world = World { device, ..World::new() };
        check_experts(&world, &source, &any_choices(41, 7, 4, 4), 2, &format!("{name}, Hopper"));
    }
}

#[test]
fn callers_routing_may_send_all_tokens_to_one_expert() {
    let source = synthetic(mixtral(32, 24, 7, 3), 6);
    for (n, hot) in [(1, 0), (3, 6), (3, 2)] {
        let options = with!(small_options(); budget_factor = 0.5, chunk_rows = Some(4));
        let world = World { options, ..World::new() };
        let pes = check_experts(&world, &source, &all_to_one(90, hot, 3, 5), n, &format!("{n} PEs to {hot}"));
        assert!(pes.iter().all(|pe| pe.rounds > 1), "{:?}", pes.iter().map(|pe| pe.rounds).collect::<Vec<_>>());
    }
    let none = Choices { ids: vec![-1; 30], weights: vec![f32::NAN; 30] };
    check_experts(&World::new(), &source, &none, 2, "no token has an expert");
}

/// With the choices of the layer's own router, in any order, the pass equals the router's own pass, bit for bit.
#[test]
fn routers_own_choices_give_the_same_bits() {
    for (name, layer) in variants(32, 24, 40).into_iter().filter(|(_, layer)| layer.shared.is_none()) {
        let source = synthetic(layer.clone(), 3);
        let k = layer.router.top_k;
        // With a single choice of constant weight 1, the router contributes no gradient of the input.
        let router_is_constant = k == 1 && layer.router.renormalise;
        let world = World::new();
        let splits = even(37, 3);
        on_pes(world.pes(3), |gpu| {
            let range = splits[gpu.my_pe()].clone();
            let (x, dy) = (source.hidden_states(range.clone()), source.grad_output(range.clone()));
            let mut layer = new_layer(gpu, &world, &source, 13).unwrap();
            let own = common::one_step(&mut layer, &x, &dy).unwrap();
            let mut choices = Choices { ids: Vec::new(), weights: Vec::new() };
            for (token, (ids, weights)) in own.routed.chosen.chunks(k).zip(own.routed.weights.chunks(k)).enumerate() {
                for j in 0..k {
                    choices.ids.push(ids[(j + token) % k] as i32);
                    choices.weights.push(weights[(j + token) % k]);
                }
            }
            let given = experts_step(&mut layer, &x, &dy, &choices);
            assert_eq!(given.output, own.output, "{name}");
            assert_eq!(given.routed.expert_rows, own.routed.expert_rows, "{name}");
            let (config, placement) = (source.config(), layer.spec().placement.clone());
            for &e in placement.experts(gpu.my_pe()) {
                for id in config.expert_weights(e) {
                    let own = own.grads.get(id, &placement, gpu.my_pe()).unwrap();
                    assert_eq!(given.grads[&id], own, "{name}: {id:?}");
                }
            }
            if router_is_constant {
                assert_eq!(given.grad_input, own.grad_input, "{name}");
            }
            // A later pass with the layer's router is unaffected by the caller's routing.
            let again = common::one_step(&mut layer, &x, &dy).unwrap();
            assert_eq!((&again.output, &again.grad_input), (&own.output, &own.grad_input), "{name}");
            assert_eq!(again.grads.router, own.grads.router, "{name}");
            layer.free().unwrap();
        });
    }
}

#[test]
fn constant_router_adds_no_input_gradient() {
    let source = synthetic(mixtral(32, 24, 7, 1), 3);
    let world = World::new();
    let gpu = world.pes(1).remove(0);
    let mut layer = new_layer(&gpu, &world, &source, 20).unwrap();
    let (x, dy) = (source.hidden_states(0..20), source.grad_output(0..20));
    let own = common::one_step(&mut layer, &x, &dy).unwrap();
    assert!(own.routed.weights.iter().all(|&w| w == 1.0));
    let ids = own.routed.chosen.iter().map(|&e| e as i32).collect();
    let given = experts_step(&mut layer, &x, &dy, &Choices { ids, weights: own.routed.weights.clone() });
    assert_eq!(given.grad_input, own.grad_input);
}

/// A layer without a router has the same results.
#[test]
fn layer_without_a_router_takes_the_callers_routing() {
    let layer = mixtral(32, 24, 7, 3);
    let with = synthetic(layer.clone(), 3);
    let without = synthetic(with!(layer; router = RouterConfig::external(3)), 3);
    let world = World::new();
    let choices = any_choices(37, 7, 3, 8);
    let run = |source: &Synthetic| check_experts(&world, source, &choices, 2, "with and without a router");
    for (with, without) in run(&with).iter().zip(run(&without)) {
        assert_eq!(with.output, without.output);
        assert_eq!(with.grad_input, without.grad_input);
        assert_eq!(with.grad_weights, without.grad_weights);
    }
    let gpu = world.pes(1).remove(0);
    let mut layer = new_layer(&gpu, &world, &without, 4).unwrap();
    let mut tokens = Tokens::new(&gpu, &without, 0..4, world.dtype);
    let error = layer.forward(&tokens.x, &mut tokens.output).map(drop).unwrap_err().to_string();
    assert_eq!(error, "cannot run forward: the layer has no router: the caller routes, by experts");
    let error = layer.set_weights(WeightId::Router, &[0.0; 7 * 32]).unwrap_err().to_string();
    assert_eq!(error, "cannot set a weight: PE 0 holds no Router");
    assert!(layer.gradients().unwrap().router.is_empty());
}

#[test]
fn invalid_choices_are_reported() {
    let source = synthetic(mixtral(16, 8, 6, 3), 1);
    let world = World::new();
    let good = any_choices(9, 6, 3, 1);
    let error = |at: usize, ids: [i32; 3]| {
        // A layer is unusable after an error.
        let gpu = world.pes(1).remove(0);
        let mut layer = new_layer(&gpu, &world, &source, 9).unwrap();
        let mut choices = good.clone();
        choices.ids[3 * at..3 * at + 3].copy_from_slice(&ids);
        let mut tokens = Tokens::new(&gpu, &source, 0..9, world.dtype);
        let (ids, weights) = (layer.ids(&choices.ids).unwrap(), layer.values(&choices.weights).unwrap());
        let saved = layer.experts(&tokens.x, &ids, &weights, &mut tokens.output).unwrap();
        layer.finish(&saved).map(drop).unwrap_err().to_string()
    };
    let expected = "expected 0 to 5, or -1 for none";
    assert_eq!(error(4, [0, 6, -1]), format!("cannot route by the given ids: token 4 has expert 6, {expected}"));
    assert_eq!(error(8, [-2, 0, 1]), format!("cannot route by the given ids: token 8 has expert -2, {expected}"));
    assert_eq!(error(0, [3, -1, 3]), "cannot route by the given ids: token 0 has expert 3 twice");

    let gpu = world.pes(1).remove(0);
    let mut layer = new_layer(&gpu, &world, &source, 9).unwrap();
    let mut tokens = Tokens::new(&gpu, &source, 0..9, world.dtype);
    let (ids, weights) = (layer.ids(&good.ids).unwrap(), layer.values(&good.weights).unwrap());
    let short = layer.ids(&good.ids[..26]).unwrap();
    let refused = |result: Result<DeviceSaved<'_>, MoeError>| result.map(drop).unwrap_err().to_string();
    let error = refused(layer.experts(&tokens.x, &short, &weights, &mut tokens.output));
    assert_eq!(error, "ids has 26 elements, expected 27");
    let error = refused(layer.experts(&tokens.x, &ids, &short, &mut tokens.output));
    assert_eq!(error, "weights has 26 elements, expected 27");
    let mut saved = layer.experts(&tokens.x, &ids, &weights, &mut tokens.output).unwrap();
    let mut short = short;
    let result = layer.experts_backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input, &mut short);
    assert_eq!(result.unwrap_err().to_string(), "grad_weights has 26 elements, expected 27");
}

#[test]
fn recorded_passes_accept_the_callers_routing() {
    let source = synthetic(mixtral(32, 24, 6, 2), 11);
    let world = World::new();
    let by_pe = on_pes(world.pes(2), |gpu| {
        let mut layer = new_layer(gpu, &world, &source, 20).unwrap();
        let first = 20 * gpu.my_pe();
        let choices = |seed| any_choices(20, 6, 2, seed);
        let (x, dy) = (source.hidden_states(first..first + 20), source.grad_output(first..first + 20));
        let want = [1, 2, 3].map(|seed| experts_step(&mut layer, &x, &dy, &choices(seed)));
        let mut tokens = Tokens::new(gpu, &source, first..first + 20, world.dtype);
        let mut recorded = RecordedLayer::new(&mut layer).unwrap();
        let (ids, weights) = (recorded.ids(&[-1; 40]).unwrap(), recorded.values(&[0.0; 40]).unwrap());
        let mut grad_weights = recorded.values(&[f32::NAN; 40]).unwrap();
        let mut all = Vec::new();
        for (seed, want) in [1, 2, 3].into_iter().zip(want) {
            ids.write(0, &choices(seed).ids).unwrap();
            weights.write(0, &choices(seed).weights).unwrap();
            let mut saved = recorded.experts(&tokens.x, &ids, &weights, &mut tokens.output).unwrap();
            let Tokens { x, grad_output, grad_input, .. } = &mut tokens;
            recorded.experts_backward(&mut saved, x, grad_output, grad_input, &mut grad_weights).unwrap();
            recorded.finish(&saved).unwrap();
            let got = (tokens.output(), tokens.grad_input(), grad_weights.read_vec::<f32>(0, 40).unwrap());
            all.push((got, (want.output, want.grad_input, want.grad_weights)));
        }
        drop(recorded);
        layer.free().unwrap();
        all
    });
    for (got, want) in by_pe.into_iter().flatten() {
        assert!(got == want);
    }
}
