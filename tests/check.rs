//! The sensitivity of `--check`: its bounds hold for layers of every shape, and a single lost, stale or swapped row among thousands
//! violates them.

#[macro_use]
mod common;
mod sample;

use std::ops::Range;

use aristos::check::{self, Bounds, Comparison, Problem, Reference, Wire, judge};
use aristos::moe::kernels::Element;
use aristos::moe::synthetic::RouterKind;
use aristos::moe::{
    Activation, Dtype, Layer, LayerConfig, MlpConfig, Options, Placement, Proj, RouterConfig, SharedConfig,
    WeightError, WeightId, WeightSource,
};
use common::{Step, even, on_pes, one_step, shm, spec};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sample::Sample;

/// A layer and its tokens, in memory, rounded to the element type.
struct Case {
    config: LayerConfig,
    dtype: Dtype,
    /// Element type of rows between PEs, if it differs.
    wire: Option<Dtype>,
    x: Vec<f32>,
    grad_output: Vec<f32>,
    weights: Vec<(WeightId, Vec<f32>)>,
}

impl WeightSource for Case {
    fn config(&self) -> &LayerConfig {
        &self.config
    }

    fn name(&self, id: WeightId) -> String {
        format!("{id:?}")
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        Ok(self.weights.iter().find(|(other, _)| *other == id).expect("all weights are there").1.clone())
    }
}

/// The distribution of a case's values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Numbers {
    Even,
    /// Equal tokens, and weights of a single value.
    Constant,
    /// A few tokens, repeated many times.
    Repeated,
    /// Inputs of about a thousand.
    Large,
    /// Inputs of about 1e-20, whose products are below the smallest normal f32, and output gradients of about 1e-15.
    Tiny,
    /// Every second expert is the negative of the one before, so that their results cancel.
    Cancelling,
    /// One element of a token is far larger than the others.
    Outlier,
    /// Most are zero.
    Sparse,
}

const NUMBERS: [Numbers; 8] = [
    Numbers::Even,
    Numbers::Constant,
    Numbers::Repeated,
    Numbers::Large,
    Numbers::Tiny,
    Numbers::Cancelling,
    Numbers::Outlier,
    Numbers::Sparse,
];

impl Case {
    fn new(config: LayerConfig, dtype: Dtype, tokens: usize, numbers: Numbers, seed: u64) -> Case {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let hidden = config.hidden;
        let round = |v: f32| match dtype {
            Dtype::F32 => v,
            Dtype::Bf16 => bf16::from_f32(v).to_f32(),
            _ => f16::from_f32(v).to_f32(),
        };
        let sparse = |rng: &mut ChaCha8Rng, v: f32| if rng.random_bool(0.8) { 0.0 } else { v };
        let mut rows = |scale: f32, outlier: bool| -> Vec<f32> {
            let mut out: Vec<f32> = (0..tokens * hidden).map(|_| rng.random_range(-1.7..1.7) * scale).collect();
            for (t, row) in (0..tokens).zip(0..) {
                let source = match numbers {
                    Numbers::Constant => 0,
                    Numbers::Repeated => t % 3,
                    _ => t,
                };
                let from = out[source * hidden..(source + 1) * hidden].to_vec();
                let row = &mut out[row * hidden..][..hidden];
                row.copy_from_slice(&from);
                match numbers {
                    Numbers::Outlier if outlier => row[t % hidden] *= 300.0,
                    Numbers::Sparse => row.iter_mut().for_each(|v| *v = sparse(&mut rng, *v)),
                    _ => {}
                }
            }
            out.into_iter().map(round).collect()
        };
        let scale = match numbers {
            Numbers::Large => 1000.0,
            Numbers::Tiny => 1e-20,
            _ => 1.0,
        };
        let x = rows(scale, true);
        let grad_output = rows(if numbers == Numbers::Tiny { 1e-15 } else { 1.0 }, false);
        let mut weights: Vec<(WeightId, Vec<f32>)> = Vec::new();
        for id in config.weights() {
            let shape = config.shape(id);
            let fan_in = *shape.last().unwrap() as f32;
            let mut data: Vec<f32> =
                (0..shape.iter().product()).map(|_| rng.random_range(-1.7..1.7) / fan_in.sqrt()).collect();
            match (numbers, id) {
                (Numbers::Constant, _) if id != WeightId::Router => {
                    let value = data[0];
                    data.fill(value);
                }
                (Numbers::Sparse, _) => data.iter_mut().for_each(|v| *v = sparse(&mut rng, *v)),
                (Numbers::Cancelling, WeightId::Expert(e, proj)) if e % 2 == 1 => {
                    let other = weights.iter().find(|(id, _)| *id == WeightId::Expert(e - 1, proj)).unwrap();
                    let sign = if proj == Proj::Down { -1.0 } else { 1.0 };
                    data = other.1.iter().map(|v| sign * v).collect();
                }
                // Nearly tied scores, so that the two experts of a pair have nearly equal weights and their results cancel.
                (Numbers::Cancelling, WeightId::Router) => data.iter_mut().for_each(|v| *v *= 1e-3),
                _ => {}
            }
            if matches!(id, WeightId::Expert(..) | WeightId::Shared(_)) {
                data.iter_mut().for_each(|v| *v = round(*v));
            }
            weights.push((id, data));
        }
        Case { config, dtype, wire: None, x, grad_output, weights }
    }

    fn tokens(&self) -> usize {
        self.x.len() / self.config.hidden
    }

    fn run(&self, n: usize) -> Step {
        match self.dtype {
            Dtype::F32 => self.run_as::<f32>(n),
            _ => self.run_as::<bf16>(n),
        }
    }

    /// One step on `n` PEs.
    fn run_as<E: Element>(&self, n: usize) -> Step {
        let options = with!(Options::default(); chunk_rows = Some(7), tile_rows = Some(64), wire = self.wire);
        let spec = spec::<E>(&self.config, n, self.tokens().div_ceil(n), &options);
        let splits = even(self.tokens(), n);
        let by_pe = on_pes(shm(n, spec.heap_bytes().unwrap()), |shmem| {
            let h = self.config.hidden;
            let Range { start, end } = splits[shmem.my_pe()].clone();
            let mut layer = Layer::<_, E>::builder(spec.clone()).build(&shmem, self).unwrap();
            let done = one_step(&mut layer, &self.x[start * h..end * h], &self.grad_output[start * h..end * h]);
            layer.free().unwrap();
            done.unwrap()
        });
        let mut step = Step::default();
        for (pe, done) in by_pe.iter().enumerate() {
            step.take(done, &self.config, &spec.placement, pe);
        }
        step
    }

    fn reference(&self, n: usize, chosen: &[u32]) -> Reference {
        self.reference_of(n, Some(chosen))
    }

    fn reference_of(&self, n: usize, chosen: Option<&[u32]>) -> Reference {
        let (splits, placement) = (even(self.tokens(), n), Placement::even(self.config.n_experts, n));
        let pe_of = |token: usize| splits.iter().position(|split| split.contains(&token)).unwrap();
        let top_k = self.config.router.top_k;
        let pairs = chosen.unwrap_or_default().iter().enumerate();
        let sent: Vec<bool> = pairs.map(|(p, &e)| placement.owner(e as usize) != pe_of(p / top_k)).collect();
        check::reference(&Problem {
            config: &self.config,
            tokens: self.tokens(),
            hidden_states: &self.x,
            grad_output: Some(&self.grad_output),
            weights: &|id| self.load(id),
            chosen,
            choice_tolerance: check::CHOICE_TOLERANCE,
            dtype: self.dtype,
            wire: self.wire.map(|dtype| Wire { dtype, sent: &sent, roundings: 1 }),
        })
        .unwrap()
    }

    /// Compares rows of tokens, which are sent, unlike gradients of weights.
    fn judge(&self, name: &str, got: &[f32], want: &[f64], bounds: &Bounds) -> Comparison {
        judge(name, got, want, bounds, self.wire.unwrap_or(self.dtype))
    }

    /// Runs the check; returns every tensor that fails it.
    fn wrong(&self, step: &Step, want: &Reference) -> Vec<Comparison> {
        let mut all = vec![
            self.judge("output", &step.output, &want.output, &want.output_bounds),
            self.judge(
                "grad_hidden_states",
                &step.grad_hidden_states,
                want.grad_hidden_states.as_ref().unwrap(),
                &want.grad_hidden_states_bounds,
            ),
        ];
        for (id, grad) in &want.grads {
            all.push(judge(&format!("{id:?}"), &step.grads[id], grad, &want.grad_bounds[id], self.dtype));
        }
        all.retain(|comparison| !comparison.passed());
        all
    }
}

/// A random case, with a description.
fn random_case(seed: u64) -> (Case, usize, String) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut pick = |values: &[usize]| values[rng.random_range(0..values.len())];
    let n_experts = pick(&[1, 2, 3, 4, 8, 16]);
    let top_k = pick(&[1, 2, 2, 8]).min(n_experts);
    let hidden = pick(&[1, 2, 3, 5, 8, 33, 64]);
    let intermediate = pick(&[1, 2, 3, 7, 16, 48]);
    let tokens = pick(&[1, 2, 3, 9, 40, 150, 300]);
    let n = pick(&[1, 2, 3]);
    let numbers = NUMBERS[pick(&[0, 0, 1, 2, 3, 4, 5, 6, 7])];
    let activation = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu][pick(&[0, 1, 2, 3])];
    let expert = MlpConfig::plain(intermediate, activation);
    let expert = with!(expert; gated = pick(&[0, 1]) == 1, bias = pick(&[0, 0, 1]) == 1);
    let mlp = with!(expert; intermediate = pick(&[1, 2, 17]));
    let shared = [None, Some(false), Some(true)][pick(&[0, 0, 1, 2])];
    let kind = [RouterKind::Softmax, RouterKind::SoftmaxRenormalised, RouterKind::Sigmoid][pick(&[0, 1, 2])];
    let mut config = LayerConfig::new(hidden, n_experts, kind.config(n_experts, top_k), expert);
    config.shared = shared.map(|sigmoid_gate| SharedConfig::new(mlp, sigmoid_gate));
    config.capacity_factor = [None, Some(0.4), Some(1.5)][pick(&[0, 0, 0, 1, 2])];
    // If all sigmoid scores of a token underflow to 0, each expert's share in the balance loss is NaN in f32.
    config.aux_loss_coef = if numbers == Numbers::Large { 0.0 } else { [0.0, 0.01, 1000.0][pick(&[0, 0, 1, 2])] };
    config.z_loss_coef = [0.0, 0.001, 1000.0][pick(&[0, 0, 1, 2])];
    let (dtype, wire) = [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::F32, Some(Dtype::Bf16))][pick(&[0, 1, 2, 2])];
    let what = format!("seed {seed}, {tokens} tokens on {n} PEs, {numbers:?}, {dtype:?}, wire {wire:?}, {config:?}");
    (Case { wire, ..Case::new(config, dtype, tokens, numbers, seed) }, n, what)
}

#[test]
fn correct_runs_of_any_shape_pass() {
    let sample = Sample::new(100, 5000);
    let (mut alarms, mut skipped) = (Vec::new(), 0);
    for seed in sample.numbers() {
        let (case, n, what) = random_case(seed);
        let step = case.run(n);
        let want = case.reference(n, &step.chosen);
        let finite = |values: &[f64]| values.iter().all(|v| v.is_finite());
        let mut all = want.grads.values().chain([&want.output]).chain(&want.grad_hidden_states);
        if !all.all(|values| finite(values)) {
            // Scores that underflow even in f64: the reference is not finite.
            skipped += 1;
            continue;
        }
        let mut wrong = case.wrong(&step, &want);
        // The results of some outliers overflow f32. An infinite result is not a false alarm if the rounding bound alone exceeds the whole
        // result.
        let overflown =
            |comparison: &Comparison| comparison.deviation.relative.is_infinite() && comparison.tolerance > 1e3;
        wrong.retain(|comparison| !overflown(comparison));
        alarms.extend(wrong.iter().map(|comparison| format!("{what}: {comparison:?}")));
    }
    assert!(skipped <= sample.len() / 25, "{skipped} skipped");
    assert!(alarms.is_empty(), "{} alarms:\n{}", alarms.len(), alarms.join("\n"));
}

/// A well-conditioned case, with a description.
fn clear_case(seed: u64) -> (Case, usize, String) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut pick = |values: &[usize]| values[rng.random_range(0..values.len())];
    let n_experts = pick(&[2, 3, 4, 8]);
    let top_k = pick(&[1, 2, 3]).min(n_experts);
    let (hidden, intermediate, tokens) = (pick(&[8, 24, 40, 64]), pick(&[8, 16, 48]), pick(&[24, 60, 150, 400]));
    let activation = [Activation::Silu, Activation::Gelu, Activation::GeluTanh][pick(&[0, 1, 2])];
    let expert = MlpConfig::plain(intermediate, activation);
    let expert = with!(expert; gated = pick(&[0, 1]) == 1, bias = pick(&[0, 1]) == 1);
    let kind = [RouterKind::Softmax, RouterKind::SoftmaxRenormalised, RouterKind::Sigmoid][pick(&[0, 1, 2])];
    let config = LayerConfig::new(hidden, n_experts, kind.config(n_experts, top_k), expert);
    let (dtype, wire) = [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::F32, Some(Dtype::Bf16))][seed as usize % 3];
    let what = format!("seed {seed}, {tokens} tokens, {dtype:?}, wire {wire:?}, {config:?}");
    (Case { wire, ..Case::new(config, dtype, tokens, Numbers::Even, seed) }, pick(&[1, 2, 3]), what)
}

/// The check detects a lost token, swapped experts, an expert's weights of another step, and a gradient with the wrong sign, in any shape.
#[test]
fn injected_faults_are_detected() {
    for seed in Sample::new(20, 500).numbers() {
        let (case, n, what) = clear_case(seed);
        let fault = ["lost row", "swapped experts", "stale weight", "wrong sign"][(seed / 3) as usize % 4];
        let mut step = case.run(n);
        let want = case.reference(n, &step.chosen);
        let right = case.wrong(&step, &want);
        assert!(right.is_empty(), "{what}: {right:?}");
        let h = case.config.hidden;
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0xfa17);
        // Two experts that have tokens.
        let mut used: Vec<usize> = step.chosen.iter().map(|&e| e as usize).collect();
        used.sort_unstable();
        used.dedup();
        match fault {
            "lost row" => {
                let t = rng.random_range(0..case.tokens());
                step.output[t * h..(t + 1) * h].fill(0.0);
            }
            "wrong sign" => {
                let id = WeightId::Expert(
                    used[rng.random_range(0..used.len())],
                    [Proj::Up, Proj::Down][seed as usize / 12 % 2],
                );
                step.grads.get_mut(&id).unwrap().iter_mut().for_each(|g| *g = -*g);
            }
            _ => {
                let mut other = Case { config: case.config.clone(), x: case.x.clone(), ..clear_case(seed).0 };
                let weights = |case: &mut Case, e: usize, proj| {
                    let at = case.weights.iter().position(|(id, _)| *id == WeightId::Expert(e, proj)).unwrap();
                    std::mem::take(&mut case.weights[at].1)
                };
                let set = |case: &mut Case, e: usize, proj, values| {
                    let at = case.weights.iter().position(|(id, _)| *id == WeightId::Expert(e, proj)).unwrap();
                    case.weights[at].1 = values;
                };
                let (a, b) = (used[0], used[used.len() - 1]);
                let b = if a == b { (a + 1) % case.config.n_experts } else { b };
                for proj in [Proj::Up, Proj::Down] {
                    let of_a = weights(&mut other, a, proj);
                    if fault == "swapped experts" {
                        let of_b = weights(&mut other, b, proj);
                        set(&mut other, a, proj, of_b);
                        set(&mut other, b, proj, of_a);
                    } else if proj == Proj::Down {
                        // Stale weights, as if an optimizer step were missing: each weight differs by a tenth, up or down.
                        let moved = of_a.iter().map(|w| w * if rng.random() { 1.1 } else { 0.9 }).collect();
                        set(&mut other, a, proj, moved);
                    } else {
                        set(&mut other, a, proj, of_a);
                    }
                }
                step = other.run(n);
            }
        }
        let wrong = case.wrong(&step, &want);
        assert!(!wrong.is_empty(), "{fault} is not seen: {what}");
    }
}

/// Number of tokens below, so large that at bf16's tolerance the norm over all tokens does not detect one wrong token.
const TOKENS: usize = 2600;
const HIDDEN: usize = 64;

fn plain_config(n_experts: usize) -> LayerConfig {
    LayerConfig::new(HIDDEN, n_experts, RouterConfig::softmax(2), MlpConfig::gated(96, Activation::Silu))
}

/// The element types to test: one of them per run, or all.
fn dtypes() -> Vec<Dtype> {
    let all = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    Sample::new(1, all.len() as u64).numbers().map(|number| all[number as usize]).collect()
}

/// The layer's results and the reference. The CPU layer has no f16: there, the rounded reference replaces the layer.
fn computed(case: &Case) -> (Step, Reference) {
    if case.dtype != Dtype::F16 {
        let step = case.run(3);
        let want = case.reference(3, &step.chosen);
        return (step, want);
    }
    let want = case.reference_of(1, None);
    let rounded = |v: &[f64]| v.iter().map(|&v| f16::from_f64(v).to_f32()).collect::<Vec<_>>();
    let step = Step {
        output: rounded(&want.output),
        grad_hidden_states: rounded(want.grad_hidden_states.as_ref().unwrap()),
        grads: want.grads.iter().map(|(id, grad)| (*id, rounded(grad))).collect(),
        chosen: want.chosen.clone(),
        ..Step::default()
    };
    (step, want)
}

/// One tensor with a row per token: its values, the reference's, and the bounds.
struct Rows<'a> {
    name: &'static str,
    got: &'a [f32],
    want: &'a [f64],
    bounds: &'a Bounds,
}

impl Rows<'_> {
    fn row(&self, t: usize) -> &[f32] {
        &self.got[t * HIDDEN..(t + 1) * HIDDEN]
    }

    /// Replaces token `t`'s row by `row`; asserts that the check fails and names the token.
    fn caught(&self, case: &Case, fault: &str, t: usize, row: &[f32]) -> Comparison {
        let mut got = self.got.to_vec();
        got[t * HIDDEN..(t + 1) * HIDDEN].copy_from_slice(row);
        let comparison = case.judge(self.name, &got, self.want, self.bounds);
        let worst = comparison.worst.as_ref().unwrap();
        assert!(worst.severity() > 1.0, "{fault}, token {t}, {:?}: {comparison:?}", case.dtype);
        assert_eq!(worst.index, t, "{fault}, {:?}: {comparison:?}", case.dtype);
        comparison
    }
}

#[test]
fn wrong_row_among_thousands_is_detected() {
    for dtype in dtypes() {
        let case = Case::new(plain_config(8), dtype, TOKENS, Numbers::Even, 77);
        let (step, want) = computed(&case);
        let wrong = case.wrong(&step, &want);
        assert!(wrong.is_empty(), "{wrong:?}");
        let relative = |bounds: &Bounds, want: &[f64]| {
            let row = |t: usize| want[t * HIDDEN..(t + 1) * HIDDEN].iter().map(|v| v * v).sum::<f64>().sqrt();
            let mut all: Vec<f64> = bounds.rows.iter().enumerate().map(|(t, bound)| bound / row(t)).collect();
            all.sort_by(f64::total_cmp);
            [all[TOKENS / 2], all[TOKENS * 99 / 100]]
        };
        let of_output = relative(&want.output_bounds, &want.output);
        let of_gradient = relative(&want.grad_hidden_states_bounds, want.grad_hidden_states.as_ref().unwrap());
        println!("{dtype:?}: bounds over norms of rows, median and P99: {of_output:?}, gradient {of_gradient:?}");
        // The layer without one expert.
        let lost = 3;
        let mut without = Case::new(plain_config(8), dtype, TOKENS, Numbers::Even, 77);
        let down = without.weights.iter_mut().find(|(id, _)| *id == WeightId::Expert(lost, Proj::Down)).unwrap();
        down.1.fill(0.0);
        let without = without.reference(3, &step.chosen);
        let tensors = [
            (
                Rows { name: "output", got: &step.output, want: &want.output, bounds: &want.output_bounds },
                &without.output,
            ),
            (
                Rows {
                    name: "grad_hidden_states",
                    got: &step.grad_hidden_states,
                    want: want.grad_hidden_states.as_ref().unwrap(),
                    bounds: &want.grad_hidden_states_bounds,
                },
                without.grad_hidden_states.as_ref().unwrap(),
            ),
        ];
        for (rows, without) in &tensors {
            let size = |t: usize| rows.row(t).iter().map(|v| v * v).sum::<f32>();
            let smallest = (0..TOKENS).min_by(|&a, &b| size(a).total_cmp(&size(b))).unwrap();
            let unseen = rows.caught(&case, "lost", smallest, &[0.0; HIDDEN]);
            // The norm of the whole tensor alone would pass.
            assert!(dtype != Dtype::Bf16 || unseen.deviation.relative <= unseen.tolerance, "{unseen:?}");
            let mut contributions = 0;
            for t in [0, 1, 17, 866, 867, 1300, TOKENS - 1] {
                let other = (t + 1) % TOKENS;
                rows.caught(&case, "lost", t, &[0.0; HIDDEN]);
                rows.caught(&case, "stale", t, rows.row(other));
                let twice: Vec<f32> = rows.row(t).iter().map(|v| 2.0 * v).collect();
                rows.caught(&case, "twice", t, &twice);
                let mut swapped = rows.got.to_vec();
                let (a, b) = (t.min(other), t.max(other));
                let (head, tail) = swapped.split_at_mut(b * HIDDEN);
                head[a * HIDDEN..(a + 1) * HIDDEN].swap_with_slice(&mut tail[..HIDDEN]);
                let comparison = case.judge(rows.name, &swapped, rows.want, rows.bounds);
                assert!(!comparison.passed() && [a, b].contains(&comparison.worst.unwrap().index));
            }
            for t in (0..TOKENS).filter(|t| step.chosen[2 * t..2 * t + 2].contains(&(lost as u32))).take(20) {
                let range = t * HIDDEN..(t + 1) * HIDDEN;
                let share = without[range.clone()].iter().zip(&rows.want[range]).map(|(a, b)| (a - b) as f32);
                let row: Vec<f32> = rows.row(t).iter().zip(share).map(|(got, share)| got + share).collect();
                rows.caught(&case, "an expert's share lost", t, &row);
                contributions += 1;
            }
            assert_eq!(contributions, 20);
        }
    }
}

#[test]
fn wrong_row_or_column_of_a_gradient_is_detected() {
    for dtype in dtypes() {
        let case = Case::new(plain_config(8), dtype, TOKENS, Numbers::Even, 78);
        let (step, want) = computed(&case);
        for (id, grad) in &want.grads {
            let bounds = &want.grad_bounds[id];
            let (rows, cols) = (bounds.rows.len(), bounds.columns.len());
            assert_eq!(rows * cols, grad.len(), "{id:?}");
            let caught = |what: &str, index: usize, wrong: &dyn Fn(usize, usize) -> bool| {
                let mut got = step.grads[id].clone();
                for (_, g) in got.iter_mut().enumerate().filter(|(i, _)| wrong(i / cols, i % cols)) {
                    *g = if what == "twice" { 2.0 * *g } else { 0.0 };
                }
                let comparison = case.judge(what, &got, grad, bounds);
                let worst = comparison.worst.as_ref().unwrap();
                assert!(worst.severity() > 1.0, "{what} {index} of {id:?}, {dtype:?}: {comparison:?}");
            };
            for index in [0, rows / 2, rows - 1] {
                caught("row", index, &|r, _| r == index);
                caught("twice", index, &|r, _| r == index);
            }
            caught("column", cols / 2, &|_, c| c == cols / 2);
        }
    }
}

/// A missing contribution of one token to an expert's gradient is detected if the expert has few rows, and in f32 even with hundreds.
#[test]
fn token_missing_from_a_gradient_is_detected_above_rounding() {
    for dtype in dtypes() {
        let tokens = if dtype == Dtype::Bf16 { 160 } else { TOKENS };
        let case = Case::new(plain_config(8), dtype, tokens, Numbers::Even, 79);
        let (step, want) = computed(&case);
        for t in [0, tokens / 2, tokens - 1] {
            let range = t * HIDDEN..(t + 1) * HIDDEN;
            let alone = Case {
                config: case.config.clone(),
                x: case.x[range.clone()].to_vec(),
                grad_output: case.grad_output[range].to_vec(),
                weights: case.weights.clone(),
                dtype,
                wire: None,
            };
            let share = alone.reference(1, &step.chosen[2 * t..2 * t + 2]);
            for &expert in &step.chosen[2 * t..2 * t + 2] {
                for proj in [Proj::Gate, Proj::Up, Proj::Down] {
                    let id = WeightId::Expert(expert as usize, proj);
                    let got: Vec<f32> =
                        step.grads[&id].iter().zip(&share.grads[&id]).map(|(g, s)| g - *s as f32).collect();
                    let comparison = case.judge("gradient", &got, &want.grads[&id], &want.grad_bounds[&id]);
                    let severity = comparison.worst.as_ref().unwrap().severity();
                    assert!(severity > 1.0, "token {t} of {id:?}, {dtype:?}: {comparison:?}");
                }
            }
        }
    }
}
