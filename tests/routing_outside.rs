//! Experts with the caller's routing, weights set in place, and accumulated gradients: the layer as a training loop
//! uses it.

#[macro_use]
mod common;

use std::time::Duration;

use aristos::moe::kernels::Element;
use aristos::moe::placement::block;
use aristos::moe::synthetic::Synthetic;
use aristos::moe::{
    Activation, Gradients, Layer, LayerConfig, LayerSpec, Mode, MoeError, MoeLayer, NO_EXPERT, Options, Proj,
    RouterConfig, SharedConfig, WeightId, WeightSource, proj_index,
};
use aristos::shmem::reorder::ReorderWorld;
use aristos::shmem::{Shmem, Transport};
use common::{mixtral, on_pes, one_step, shm, synthetic};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const HIDDEN: usize = 12;
const INTERMEDIATE: usize = 10;
const EXPERTS: usize = 5;
const TOP_K: usize = 3;

/// A layer without a router.
fn external() -> LayerConfig {
    with!(mixtral(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K); router = RouterConfig::external(TOP_K))
}

fn spec<E: Element>(config: &LayerConfig, n: usize, max_tokens: usize) -> LayerSpec {
    let options = with!(Options::default(); chunk_rows = Some(4), tile_rows = Some(8));
    common::spec::<E>(config, n, max_tokens, &options)
}

/// The caller's routing of tokens, `[tokens, TOP_K]`.
#[derive(Clone)]
struct Routing {
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Routing {
    /// Random experts in random columns, some missing, with weights of either sign.
    fn random(tokens: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let mut left: Vec<i32> = (0..EXPERTS as i32).collect();
            for _ in 0..TOP_K {
                let id = left.swap_remove(rng.random_range(0..left.len()));
                ids.push(if rng.random_range(0..4) == 0 { -1 } else { id });
                weights.push(rng.random_range(-2.0f32..2.0));
            }
        }
        Routing { ids, weights }
    }

    /// Routes all tokens to one expert.
    fn one_expert(tokens: usize, expert: i32) -> Self {
        let ids = (0..tokens * TOP_K).map(|i| if i % TOP_K == 1 { expert } else { -1 }).collect();
        Routing { ids, weights: (0..tokens * TOP_K).map(|i| i as f32 * 0.1 - 1.0).collect() }
    }

    fn of(&self, tokens: std::ops::Range<usize>) -> (&[i32], &[f32]) {
        let range = tokens.start * TOP_K..tokens.end * TOP_K;
        (&self.ids[range.clone()], &self.weights[range])
    }
}

/// Results of a pass and its backward, over all PEs' tokens.
#[derive(Clone, Debug, Default, PartialEq)]
struct Outcome {
    output: Vec<f32>,
    grad_input: Vec<f32>,
    grad_weights: Vec<f32>,
    /// By expert: gate, up, down.
    grads: Vec<[Vec<f32>; 3]>,
}

/// Runs forward and backward with `routing` twice; the second run overwrites the gradients of the first.
fn run<T: Transport + Send, E: Element>(
    transports: Vec<T>,
    source: &Synthetic,
    routing: &Routing,
    tokens: usize,
) -> Outcome {
    let n = transports.len();
    run_in_passes::<T, E>(transports, source, routing, tokens, tokens.div_ceil(n))
}

/// Like [`run`], in passes of at most `max_tokens` tokens of a PE.
fn run_in_passes<T: Transport + Send, E: Element>(
    transports: Vec<T>,
    source: &Synthetic,
    routing: &Routing,
    tokens: usize,
    max_tokens: usize,
) -> Outcome {
    let n = transports.len();
    let spec = spec::<E>(source.config(), n, max_tokens);
    let by_pe = on_pes(transports, |shmem| {
        let me = shmem.my_pe();
        let mine = block(tokens, n, me);
        let mut layer = Layer::<_, E>::builder(spec.clone()).build(&shmem, source).unwrap();
        let mut done = Vec::new();
        for _ in 0..2 {
            done.push(experts_step(&mut layer, source, routing, mine.clone()).unwrap());
        }
        assert_eq!(done[0], done[1], "a step repeats bit for bit");
        layer.free().unwrap();
        done.remove(0)
    });
    let mut all = Outcome::default();
    for pe in by_pe {
        all.output.extend(pe.output);
        all.grad_input.extend(pe.grad_input);
        all.grad_weights.extend(pe.grad_weights);
        all.grads.extend(pe.grads);
    }
    all
}

fn experts_step<L: MoeLayer<Rows = [E], Values = [f32], Ids = [i32]>, E: Element>(
    layer: &mut L,
    source: &Synthetic,
    routing: &Routing,
    tokens: std::ops::Range<usize>,
) -> Result<Outcome, MoeError>
where
    L::RowsBuf: AsRef<[E]>,
{
    let x = layer.rows(&source.hidden_states(tokens.clone()), "x")?;
    let g = layer.rows(&source.grad_output(tokens.clone()), "g")?;
    let (ids, weights) = routing.of(tokens);
    let mut output = vec![f32::NAN; x.as_ref().len()];
    let mut grad_input = output.clone();
    let mut grad_weights = vec![f32::NAN; weights.len()];
    let mut saved = layer.experts(x.as_ref(), ids, weights, &mut output)?;
    layer.finish(&saved)?;
    let chosen: Vec<u32> = ids.iter().map(|&id| u32::try_from(id).unwrap_or(NO_EXPERT)).collect();
    assert_eq!(layer.routed(&saved)?.chosen, chosen);
    layer.experts_backward(&mut saved, x.as_ref(), g.as_ref(), &mut grad_input, &mut grad_weights)?;
    layer.finish(&saved)?;
    layer.recycle(saved);
    let grads = layer.gradients()?.experts.iter().map(|e| e.matrix.clone()).collect();
    Ok(Outcome { output, grad_input, grad_weights, grads })
}

/// Reference in float64, one token and one expert at a time.
#[derive(Default)]
struct Dense {
    output: Vec<f64>,
    grad_input: Vec<f64>,
    grad_weights: Vec<f64>,
    grads: Vec<[Vec<f64>; 3]>,
}

struct Problem {
    x: Vec<f64>,
    g: Vec<f64>,
    ids: Vec<i32>,
    weights: Vec<f64>,
    /// By expert: gate, up `[INTERMEDIATE, HIDDEN]`, down `[HIDDEN, INTERMEDIATE]`.
    experts: Vec<[Vec<f64>; 3]>,
}

impl Problem {
    fn new<E: Element>(source: &Synthetic, routing: &Routing, tokens: usize) -> Self {
        let round = |v: Vec<f32>| v.into_iter().map(|x| f64::from(E::from_f32(x).to_f32())).collect::<Vec<f64>>();
        let matrix = |e, proj| round(source.load(WeightId::Expert(e, proj)).unwrap());
        Problem {
            x: round(source.hidden_states(0..tokens)),
            g: round(source.grad_output(0..tokens)),
            ids: routing.ids.clone(),
            weights: routing.weights.iter().map(|&w| f64::from(w)).collect(),
            experts: (0..EXPERTS).map(|e| [Proj::Gate, Proj::Up, Proj::Down].map(|proj| matrix(e, proj))).collect(),
        }
    }

    /// Gate, up, activation and result of expert `e` for token `t`.
    fn mlp(&self, e: usize, t: usize) -> [Vec<f64>; 4] {
        let [gate, up, down] = &self.experts[e];
        let x = &self.x[t * HIDDEN..(t + 1) * HIDDEN];
        let times = |w: &[f64], x: &[f64]| -> Vec<f64> {
            w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
        };
        let (g, u) = (times(gate, x), times(up, x));
        let h: Vec<f64> = g.iter().zip(&u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let y = times(down, &h);
        [g, u, h, y]
    }

    /// The loss whose gradients are tested: the sum over all outputs times `g`.
    fn loss(&self) -> f64 {
        let mut loss = 0.0;
        for (choice, &id) in self.ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            let t = choice / TOP_K;
            let y = &self.mlp(id as usize, t)[3];
            let g = &self.g[t * HIDDEN..(t + 1) * HIDDEN];
            loss += self.weights[choice] * y.iter().zip(g).map(|(y, g)| y * g).sum::<f64>();
        }
        loss
    }

    fn solve(&self) -> Dense {
        let zeros = |n: usize| vec![0.0; n];
        let mut d = Dense {
            output: zeros(self.x.len()),
            grad_input: zeros(self.x.len()),
            grad_weights: zeros(self.ids.len()),
            grads: self.experts.iter().map(|e| [0, 1, 2].map(|i: usize| zeros(e[i].len()))).collect(),
        };
        for (choice, &id) in self.ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            let (t, e, w) = (choice / TOP_K, id as usize, self.weights[choice]);
            let [gate, up, down] = &self.experts[e];
            let [g, u, h, y] = self.mlp(e, t);
            let row = t * HIDDEN..(t + 1) * HIDDEN;
            let (x, dy) = (&self.x[row.clone()], &self.g[row.clone()]);
            for j in 0..HIDDEN {
                d.output[row.start + j] += w * y[j];
                d.grad_weights[choice] += dy[j] * y[j];
            }
            for i in 0..INTERMEDIATE {
                let dh: f64 = (0..HIDDEN).map(|j| w * dy[j] * down[j * INTERMEDIATE + i]).sum();
                let s = 1.0 / (1.0 + (-g[i]).exp());
                let (du, dg) = (dh * g[i] * s, dh * u[i] * s * (1.0 + g[i] * (1.0 - s)));
                for j in 0..HIDDEN {
                    d.grads[e][0][i * HIDDEN + j] += dg * x[j];
                    d.grads[e][1][i * HIDDEN + j] += du * x[j];
                    d.grads[e][2][j * INTERMEDIATE + i] += w * dy[j] * h[i];
                    d.grad_input[row.start + j] += dg * gate[i * HIDDEN + j] + du * up[i * HIDDEN + j];
                }
            }
        }
        d
    }
}

fn assert_near(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
    let error = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum::<f64>().sqrt();
    assert!(error <= tolerance * norm.max(1e-30), "{what}: {error:e} of {norm:e}");
}

fn assert_dense(got: &Outcome, want: &Dense, tolerance: f64, what: &str) {
    assert_near(&format!("{what}: output"), &got.output, &want.output, tolerance);
    assert_near(&format!("{what}: gradient of x"), &got.grad_input, &want.grad_input, tolerance);
    assert_near(&format!("{what}: gradient of the weights"), &got.grad_weights, &want.grad_weights, tolerance);
    for (e, (got, want)) in got.grads.iter().zip(&want.grads).enumerate() {
        for i in 0..3 {
            assert_near(&format!("{what}: gradient {i} of expert {e}"), &got[i], &want[i], tolerance);
        }
    }
}

fn routings(tokens: usize) -> [(&'static str, Routing); 3] {
    [
        ("random", Routing::random(tokens, 3)),
        ("all to expert 3", Routing::one_expert(tokens, 3)),
        ("to nobody", Routing { ids: vec![-1; tokens * TOP_K], weights: vec![1.0; tokens * TOP_K] }),
    ]
}

#[test]
fn any_routing_matches_the_dense_sum() {
    let source = synthetic(external(), 7);
    for (name, routing) in routings(29) {
        for n in [1, 2, 3, 6] {
            let what = format!("{name}, {n} PEs");
            let heap = |max_tokens| spec::<f32>(source.config(), n, max_tokens).heap_bytes().unwrap();
            let got = run::<_, f32>(shm(n, heap(29)), &source, &routing, 29);
            assert_dense(&got, &Problem::new::<f32>(&source, &routing, 29).solve(), 1e-5, &what);
            let got = run::<_, bf16>(shm(n, heap(29)), &source, &routing, 29);
            assert_dense(&got, &Problem::new::<bf16>(&source, &routing, 29).solve(), 2e-2, &what);
            let got = run_in_passes::<_, f32>(shm(n, heap(29)), &source, &routing, 29, 4);
            assert_dense(&got, &Problem::new::<f32>(&source, &routing, 29).solve(), 1e-5, &what);
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    let source = synthetic(external(), 7);
    let routing = Routing::random(9, 5);
    let heap = spec::<f32>(source.config(), 2, 5).heap_bytes().unwrap();
    let got = run::<_, f32>(shm(2, heap), &source, &routing, 9);
    let mut problem = Problem::new::<f32>(&source, &routing, 9);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut test = |what: &str, got: &[f32], values: fn(&mut Problem) -> &mut Vec<f64>| {
        for _ in 0..40 {
            let i = rng.random_range(0..got.len());
            let mut at = |shift: f64| {
                values(&mut problem)[i] += shift;
                let loss = problem.loss();
                values(&mut problem)[i] -= shift;
                loss
            };
            const STEP: f64 = 1e-4;
            let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let error = (f64::from(got[i]) - slope).abs();
            assert!(error <= 1e-4 * slope.abs().max(1.0), "{what}[{i}]: {} and {slope}", got[i]);
        }
    };
    test("x", &got.grad_input, |p| &mut p.x);
    test("weights", &got.grad_weights, |p| &mut p.weights);
    test("expert 2, gate", &got.grads[2][0], |p| &mut p.experts[2][0]);
    test("expert 2, down", &got.grads[2][2], |p| &mut p.experts[2][2]);
}

#[test]
fn results_do_not_depend_on_column_or_delivery_order() {
    let source = synthetic(external(), 7);
    let (n, tokens) = (3, 17);
    let routing = Routing::random(tokens, 11);
    let heap = spec::<f32>(source.config(), n, tokens).heap_bytes().unwrap();
    let want = run::<_, f32>(shm(n, heap), &source, &routing, tokens);
    for seed in 0..40 {
        assert_eq!(run::<_, f32>(ReorderWorld::new(n, heap, seed), &source, &routing, tokens), want, "seed {seed}");
    }
    let turned = |values: &[i32]| values.chunks(TOP_K).flat_map(|c| c.iter().rev().copied()).collect::<Vec<_>>();
    let reversed = Routing {
        ids: turned(&routing.ids),
        weights: routing.weights.chunks(TOP_K).flat_map(|c| c.iter().rev().copied()).collect(),
    };
    let got = run::<_, f32>(shm(n, heap), &source, &reversed, tokens);
    let grad_weights: Vec<f32> = got.grad_weights.chunks(TOP_K).flat_map(|c| c.iter().rev().copied()).collect();
    assert_eq!((grad_weights, got.output, got.grads), (want.grad_weights, want.output, want.grads));
}

/// With the choices of the layer's own router, `experts` equals `forward`, and its backward equals backward except for
/// the router.
#[test]
fn own_routers_choices_give_the_same_bits() {
    let own = synthetic(mixtral(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K), 7);
    for n in [1, 3] {
        for mode in [Mode::Pipelined, Mode::Bulk] {
            let mut spec = spec::<f32>(own.config(), n, 8);
            spec.options.mode = mode;
            on_pes(shm(n, spec.heap_bytes().unwrap()), |shmem| {
                let tokens = 8 * shmem.my_pe()..8 * shmem.my_pe() + 8;
                let (x, g) = (own.hidden_states(tokens.clone()), own.grad_output(tokens));
                let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &own).unwrap();
                let want = one_step(&mut layer, &x, &g).unwrap();
                let ids: Vec<i32> = want.routed.chosen.iter().map(|&e| e as i32).collect();
                let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
                let mut dw = vec![0.0; ids.len()];
                let mut saved = layer.experts(&x, &ids, &want.routed.weights, &mut y).unwrap();
                layer.experts_backward(&mut saved, &x, &g, &mut dx, &mut dw).unwrap();
                assert_eq!(y, want.output);
                let grads = layer.gradients().unwrap();
                for (got, want) in grads.experts.iter().zip(&want.grads.experts) {
                    assert_eq!((&got.matrix, &got.bias), (&want.matrix, &want.bias));
                }
                assert!(grads.router.iter().all(|&g| g == 0.0) && dw.iter().any(|&d| d != 0.0));
            });
        }
    }
}

#[test]
fn invalid_ids_are_reported_and_the_layer_stays_usable() {
    let source = synthetic(external(), 7);
    let spec = spec::<f32>(source.config(), 1, 4);
    on_pes(shm(1, spec.heap_bytes().unwrap()), |shmem| {
        let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
        let (x, mut y) = (source.hidden_states(0..2), vec![0.0; 2 * HIDDEN]);
        let weights = [1.0; 2 * TOP_K];
        let mut refused = |ids: &[i32], weights: &[f32], want: &str| {
            assert_eq!(layer.experts(&x, ids, weights, &mut y).unwrap_err().to_string(), want);
        };
        let what = "cannot route by the given ids: token 1 has expert";
        refused(&[0, 1, 2, 0, 1, 5], &weights, &format!("{what} 5, expected 0 to 4, or -1 for none"));
        refused(&[0, 1, 2, 0, -2, 1], &weights, &format!("{what} -2, expected 0 to 4, or -1 for none"));
        refused(&[0, 1, 2, 3, 1, 3], &weights, &format!("{what} 3 twice"));
        refused(&[0, 1, 2], &weights, "ids has 3 elements, expected 6");
        refused(&[0, 1, 2, 0, 1, 4], &weights[..5], "weights has 5 elements, expected 6");
        let want = "cannot run forward: the layer has no router: the caller routes, by experts";
        assert_eq!(layer.forward(&x, &mut y).unwrap_err().to_string(), want);
        layer.experts(&x, &[0, 1, 2, -1, -1, 4], &weights, &mut y).unwrap();
    });
}

/// A layer with every kind of weight.
fn full() -> LayerConfig {
    let base = mixtral(HIDDEN, INTERMEDIATE, EXPERTS, 2);
    let mlp = with!(base.expert; bias = true, activation = Activation::Gelu);
    let shared = Some(SharedConfig::new(with!(mlp; intermediate = 6), true));
    with!(base; expert = mlp, shared = shared)
}

/// A layer whose weights are replaced by another layer's equals that layer, bit for bit.
fn set_weights_equal_loaded_weights<E: Element>() {
    let (old, new) = (synthetic(full(), 1), synthetic(full(), 2));
    let spec = spec::<E>(old.config(), 3, 6);
    let heap = Shmem::<aristos::shmem::ShmTransport>::heap_bytes_for(3, 2 * spec.layout().unwrap().total_bytes());
    on_pes(shm(3, heap), |shmem| {
        let me = shmem.my_pe();
        let (x, g) = (old.hidden_states(6 * me..6 * me + 6), old.grad_output(6 * me..6 * me + 6));
        let mut made = Layer::<_, E>::builder(spec.clone()).build(&shmem, &new).unwrap();
        let mut changed = Layer::<_, E>::builder(spec.clone()).build(&shmem, &old).unwrap();
        let before = one_step(&mut changed, &x, &g).unwrap();
        for id in spec.held(me) {
            changed.set_weights(id, &new.load(id).unwrap()).unwrap();
        }
        let (want, got) = (one_step(&mut made, &x, &g).unwrap(), one_step(&mut changed, &x, &g).unwrap());
        assert_ne!(before.output, want.output);
        assert_eq!((&got.output, &got.grad_input), (&want.output, &want.grad_input));
        for id in spec.held(me) {
            let of = |grads: &Gradients| grads.get(id, &spec.placement, me).map(<[f32]>::to_vec);
            assert_eq!(of(&got.grads), of(&want.grads), "{id:?}");
            // Reading returns the rounded weights.
            let mut read = vec![f32::NAN; spec.config.shape(id).iter().product()];
            changed.weights(id, &mut read).unwrap();
            let is_matrix = matches!(id, WeightId::Expert(..) | WeightId::Shared(_));
            let rounded = |x: &f32| if is_matrix { E::from_f32(*x).to_f32() } else { *x };
            assert_eq!(read, new.load(id).unwrap().iter().map(rounded).collect::<Vec<_>>(), "{id:?}");
        }
        let elsewhere = spec.placement.experts((me + 1) % 3)[0];
        let id = WeightId::Expert(elsewhere, Proj::Up);
        let len = spec.config.shape(id).iter().product();
        let error = changed.set_weights(id, &vec![0.0; len]).unwrap_err().to_string();
        assert_eq!(error, format!("cannot use this weight: PE {me} holds no Expert({elsewhere}, Up)"));
        let error = changed.set_weights(WeightId::Router, &[0.0]).unwrap_err().to_string();
        assert_eq!(error, "Router has 1 elements, expected 60");
    });
}

#[test]
fn set_weights_equal_loaded_weights_f32() {
    set_weights_equal_loaded_weights::<f32>();
}

#[test]
fn set_weights_equal_loaded_weights_bf16() {
    set_weights_equal_loaded_weights::<bf16>();
}

#[test]
fn accumulated_gradients_are_sums() {
    let source = synthetic(full(), 1);
    let spec = spec::<f32>(source.config(), 2, 6);
    on_pes(shm(2, spec.heap_bytes().unwrap()), |shmem| {
        let me = shmem.my_pe();
        let batch = |i: usize| {
            let first = 12 * i + 6 * me;
            (source.hidden_states(first..first + 6), source.grad_output(first..first + 6))
        };
        let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
        let alone = [0, 1, 2].map(|i| one_step(&mut layer, &batch(i).0, &batch(i).1).unwrap().grads);
        let mut sums = Gradients::default();
        for i in 0..3 {
            layer.set_accumulate(i > 0).unwrap();
            sums = one_step(&mut layer, &batch(i).0, &batch(i).1).unwrap().grads;
        }
        for id in spec.held(me) {
            let of = |grads: &Gradients| grads.get(id, &spec.placement, me).map(<[f32]>::to_vec);
            let want = of(&alone[0]).map(|mut sum| {
                for grads in &alone[1..] {
                    sum.iter_mut().zip(of(grads).unwrap()).for_each(|(s, g)| *s += g);
                }
                sum
            });
            assert_eq!(of(&sums), want, "{id:?}");
        }
        // With accumulation off, a backward overwrites.
        layer.set_accumulate(false).unwrap();
        let again = one_step(&mut layer, &batch(1).0, &batch(1).1).unwrap().grads;
        assert_eq!(again.router, alone[1].router);
        assert_eq!(again.experts[0].matrix[proj_index(Proj::Down)], alone[1].experts[0].matrix[proj_index(Proj::Down)]);
    });
}

/// Resident memory of this process, bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn memory_does_not_grow_over_a_thousand_steps() {
    let source = synthetic(mixtral(32, 48, 4, 2), 1);
    let spec = common::spec::<bf16>(source.config(), 2, 64, &Options::default());
    let grown = on_pes(shm(2, spec.heap_bytes().unwrap()), |shmem| {
        let me = shmem.my_pe();
        let (x, g) = (source.hidden_states(64 * me..64 * me + 64), source.grad_output(64 * me..64 * me + 64));
        let mut layer = Layer::<_, bf16>::builder(spec.clone()).build(&shmem, &source).unwrap();
        let held = spec.held(me);
        let mut values: Vec<Vec<f32>> = held.iter().map(|&id| source.load(id).unwrap()).collect();
        let mut settled = 0;
        for step in 0..1000 {
            if step == 100 {
                settled = resident_bytes();
            }
            let grads = one_step(&mut layer, &x, &g).unwrap().grads;
            for (&id, values) in held.iter().zip(&mut values) {
                let grad = grads.get(id, &spec.placement, me).unwrap();
                values.iter_mut().zip(grad).for_each(|(w, g)| *w -= 1e-4 * g);
                layer.set_weights(id, values).unwrap();
            }
        }
        layer.barrier().unwrap();
        resident_bytes().saturating_sub(settled)
    });
    // The bound is loose, because this process also runs the other PEs and other tests.
    assert!(grown.iter().all(|&bytes| bytes < 64 << 20), "{grown:?}");
}

#[test]
fn missing_peer_is_reported() {
    let source = synthetic(external(), 7);
    let mut spec = spec::<f32>(source.config(), 2, 4);
    // Also covers construction of the layer on a busy machine.
    spec.options.wait_limit = Duration::from_secs(2);
    let errors = on_pes(shm(2, spec.heap_bytes().unwrap()), |shmem| {
        let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
        let routing = Routing::random(4, 1);
        let (x, mut y) = (source.hidden_states(0..4), vec![0.0; 4 * HIDDEN]);
        (shmem.my_pe() == 0).then(|| layer.experts(&x, &routing.ids, &routing.weights, &mut y).unwrap_err().to_string())
    });
    let error = errors[0].as_ref().unwrap();
    assert!(error.starts_with("PE 0 waited 2.0 s in phase") && error.contains("for PE 1: its counts"), "{error}");
}
