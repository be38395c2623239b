//! Runs a layer on several PEs, as threads of this process, over any transport.
#![allow(dead_code, unused_macros)]

use std::borrow::{Borrow, BorrowMut};
use std::collections::BTreeMap;
use std::ops::Range;

use aristos::check::{self, Problem, Reference};
use aristos::moe::kernels::Element;
use aristos::moe::metrics::Traffic;
use aristos::moe::placement::{Placement, block};
use aristos::moe::synthetic::{RouterKind, Synthetic, SyntheticSpec};
use aristos::moe::{
    Activation, Dtype, Gradients, Layer, LayerConfig, LayerSpec, MlpConfig, MoeError, MoeLayer, Options, Routed,
    RouterConfig, SharedConfig, WeightId, WeightSource,
};
use aristos::shmem::{Segment, ShmTransport, Shmem, Transport};

/// A value with some fields changed: `with!(base.clone(); router.top_k = 3, z_loss_coef = 0.1)`.
macro_rules! with {
    ($base:expr; $($($field:ident).+ = $value:expr),+) => {{
        let mut changed = $base;
        $(changed.$($field).+ = $value;)+
        changed
    }};
}

/// A small Mixtral-like layer: gated SiLU, softmax top-2, renormalised.
pub fn mixtral(hidden: usize, intermediate: usize, n_experts: usize, top_k: usize) -> LayerConfig {
    let expert = MlpConfig::gated(intermediate, Activation::Silu);
    LayerConfig::new(hidden, n_experts, RouterConfig::softmax(top_k), expert)
}

/// A synthetic source with uniform routing.
pub fn synthetic(layer: LayerConfig, seed: u64) -> Synthetic {
    Synthetic::new(SyntheticSpec::new(layer, seed)).unwrap()
}

/// A source in which the first `ratio` of the experts get the share `weight` of the rows.
pub fn hot(layer: &LayerConfig, ratio: f64, weight: f64) -> Synthetic {
    let spec = with!(SyntheticSpec::new(layer.clone(), 5); hot_ratio = ratio, hot_weight = weight);
    Synthetic::new(spec).unwrap()
}

/// Layers with every kind of router, activation, shared expert, capacity and loss, by name. `shared` is the
/// intermediate size of the shared experts.
pub fn variants(hidden: usize, intermediate: usize, shared: usize) -> Vec<(&'static str, LayerConfig)> {
    let base = mixtral(hidden, intermediate, 7, 2);
    let mut all = vec![("mixtral", base.clone())];
    for (name, kind) in [("softmax", RouterKind::Softmax), ("sigmoid", RouterKind::Sigmoid)] {
        all.push((name, with!(base.clone(); n_experts = 12, router = kind.config(12, 4))));
    }
    for (name, activation) in
        [("gelu", Activation::Gelu), ("gelu tanh", Activation::GeluTanh), ("relu", Activation::Relu)]
    {
        let gated = activation == Activation::GeluTanh;
        let expert = with!(MlpConfig::plain(intermediate, activation); gated = gated, bias = true);
        all.push((name, with!(base.clone(); expert = expert)));
    }
    for (name, sigmoid_gate) in [("shared", false), ("shared gated", true)] {
        let mlp = with!(base.expert; intermediate = shared, bias = sigmoid_gate);
        all.push((name, with!(base.clone(); shared = Some(SharedConfig::new(mlp, sigmoid_gate)))));
    }
    all.push(("capacity", with!(base.clone(); capacity_factor = Some(0.8))));
    all.push(("losses", with!(base.clone(); aux_loss_coef = 0.3, z_loss_coef = 0.1)));
    let sigmoid = with!(base; n_experts = 12, router = RouterKind::Sigmoid.config(12, 4));
    all.push(("sigmoid losses", with!(sigmoid; aux_loss_coef = 0.3, z_loss_coef = 0.1)));
    all
}

/// Calls `check` with a source, the number of tokens, the number of PEs and a description, for small and odd sizes.
pub fn few_tokens_and_few_experts(check: impl Fn(&Synthetic, usize, usize, &str)) {
    for tokens in [0, 1, 2, 5] {
        for n in [1, 2, 3, 4] {
            check(&synthetic(mixtral(16, 8, 3, 2), 1), tokens, n, &format!("{tokens} tokens, {n} PEs"));
        }
    }
    check(&synthetic(mixtral(16, 8, 1, 1), 1), 9, 3, "one expert");
    check(&synthetic(mixtral(16, 8, 2, 2), 1), 9, 4, "PEs without experts");
}

/// A run of several steps.
pub struct Case {
    pub name: &'static str,
    pub source: Synthetic,
    /// One split of the tokens per step.
    pub splits: Vec<Vec<Range<usize>>>,
    /// Maximum tokens of a PE in a pass; by default that of all splits, so that each batch is one pass.
    pub max_tokens: Option<usize>,
    pub options: Options,
}

/// Cases in which PEs run ahead, wait, or reuse memory. `idle` has the splits of the case with two experts, in which
/// some PEs have neither tokens nor experts.
pub fn ahead_cases(hidden: usize, intermediate: usize, options: &Options, idle: Vec<Vec<Range<usize>>>) -> Vec<Case> {
    let layer = mixtral(hidden, intermediate, 5, 2);
    let limited = with!(layer.clone(); aux_loss_coef = 0.1, capacity_factor = Some(0.9));
    let options = || options.clone();
    vec![
        Case {
            name: "PEs without tokens, other ones each step",
            source: synthetic(layer, 7),
            splits: vec![vec![0..9, 9..9, 9..12], vec![0..0, 0..12, 12..12], vec![0..0, 0..0, 0..0]],
            max_tokens: None,
            options: options(),
        },
        Case {
            name: "experts without tokens, all rows to one expert, through small windows in rounds",
            source: hot(&mixtral(hidden, intermediate, 5, 1), 0.2, 1.0),
            splits: vec![even(24, 3)],
            max_tokens: None,
            options: with!(options(); budget_factor = 0.5),
        },
        Case {
            name: "PEs with neither tokens nor experts run ahead",
            source: hot(&mixtral(hidden, intermediate, 2, 1), 0.5, 1.0),
            splits: idle,
            max_tokens: None,
            options: options(),
        },
        Case {
            name: "losses and a capacity",
            source: synthetic(limited, 4),
            splits: vec![even(13, 3)],
            max_tokens: None,
            options: options(),
        },
    ]
}

/// Merged results of all PEs in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    pub output: Vec<f32>,
    pub grad_hidden_states: Vec<f32>,
    pub grads: BTreeMap<WeightId, Vec<f32>>,
    pub chosen: Vec<u32>,
    /// Outputs of the preceding forward passes without backward.
    pub ahead: Vec<f32>,
    /// By PE.
    pub traffic: Vec<Traffic>,
    pub rounds: Vec<usize>,
    /// By PE: rows that its experts computed.
    pub expert_rows: Vec<u64>,
    pub peak_bytes: Vec<usize>,
}

/// The contiguous even split of `tokens` over `n` PEs.
pub fn even(tokens: usize, n: usize) -> Vec<Range<usize>> {
    (0..n).map(|pe| block(tokens, n, pe)).collect()
}

/// Transports over memfds, all in this process.
pub fn shm(n: usize, heap_bytes: usize) -> Vec<ShmTransport> {
    let segments: Vec<Segment> = (0..n).map(|_| Segment::create("test", heap_bytes).unwrap()).collect();
    (0..n)
        .map(|pe| {
            let mapped = segments.iter().map(|s| Segment::from_fd(s.fd().try_clone_to_owned().unwrap()).unwrap());
            ShmTransport::new(pe, mapped.collect()).unwrap()
        })
        .collect()
}

/// The spec of a layer for training with elements `E`.
pub fn spec<E: Element>(layer: &LayerConfig, n: usize, max_tokens: usize, options: &Options) -> LayerSpec {
    let dtype = if E::NAME == "f32" { Dtype::F32 } else { Dtype::Bf16 };
    LayerSpec::new(layer.clone(), n, max_tokens).dtype(dtype).options(options.clone())
}

/// Bytes of symmetric heap that a layer needs.
pub fn heap_bytes<E: Element>(layer: &LayerConfig, n: usize, max_tokens: usize, options: &Options) -> usize {
    spec::<E>(layer, n, max_tokens, options).heap_bytes().unwrap()
}

/// Results of one PE in one step.
pub struct PeStep {
    pub output: Vec<f32>,
    pub grad_input: Vec<f32>,
    pub grads: Gradients,
    pub routed: Routed,
    pub traffic: Traffic,
    /// Of forward and backward.
    pub all_reduce_bytes: [u64; 2],
    pub rounds: usize,
}

/// A forward pass without backward; returns its output.
pub fn forward<L: MoeLayer>(layer: &mut L, x: &[f32]) -> Result<Vec<f32>, MoeError> {
    let mut output = vec![f32::NAN; x.len()];
    let x = layer.rows(x, "x")?;
    let mut on_layer = layer.values(&output)?;
    let saved = layer.forward(x.borrow(), on_layer.borrow_mut())?;
    layer.finish(&saved)?;
    layer.recycle(saved);
    layer.read(on_layer.borrow(), &mut output)?;
    Ok(output)
}

/// A forward pass and its backward, on any engine's layer.
pub fn one_step<L: MoeLayer>(layer: &mut L, x: &[f32], grad_output: &[f32]) -> Result<PeStep, MoeError> {
    let (mut output, mut grad_input) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
    let (x, grad_output) = (layer.rows(x, "x")?, layer.rows(grad_output, "grad_output")?);
    let (mut y, mut dx) = (layer.values(&output)?, layer.values(&grad_input)?);
    let mut saved = layer.forward(x.borrow(), y.borrow_mut())?;
    let forward = layer.finish(&saved)?;
    let routed = layer.routed(&saved)?;
    layer.backward(&mut saved, x.borrow(), grad_output.borrow(), dx.borrow_mut())?;
    let backward = layer.finish(&saved)?;
    layer.recycle(saved);
    layer.read(y.borrow(), &mut output)?;
    layer.read(dx.borrow(), &mut grad_input)?;
    let grads = layer.gradients()?.clone();
    let mut traffic = forward.traffic;
    traffic.add(&backward.traffic);
    let all_reduce_bytes = [forward.all_reduce_bytes, backward.all_reduce_bytes];
    Ok(PeStep { output, grad_input, grads, routed, traffic, all_reduce_bytes, rounds: forward.rounds as usize })
}

impl Step {
    /// Adds the results of PE `pe`, which has the same number in the placement.
    pub fn take(&mut self, done: &PeStep, config: &LayerConfig, placement: &Placement, pe: usize) {
        self.output.extend(&done.output);
        self.grad_hidden_states.extend(&done.grad_input);
        self.chosen.extend(&done.routed.chosen);
        self.traffic.push(done.traffic);
        self.rounds.push(done.rounds);
        for id in config.weights() {
            if let Some(grad) = done.grads.get(id, placement, pe) {
                self.grads.insert(id, grad.to_vec());
            }
        }
    }
}

/// Runs one closure per PE, each on its own thread, and returns the results by PE.
pub fn on_pes<T: Transport + Send, R: Send>(transports: Vec<T>, f: impl Fn(Shmem<T>) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = transports.into_iter().map(|t| scope.spawn(move || f(Shmem::new(t)))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Runs `steps` steps (forward and backward); step `s` has the token ranges `splits[s % splits.len()]`.
pub fn run<T: Transport + Send, E: Element>(
    transports: Vec<T>,
    source: &Synthetic,
    splits: &[Vec<Range<usize>>],
    options: &Options,
    steps: usize,
) -> Result<Vec<Step>, MoeError> {
    run_ahead::<T, E>(transports, source, splits, options, steps, 0, most_tokens(splits))
}

/// The most tokens of a PE in any split.
pub fn most_tokens(splits: &[Vec<Range<usize>>]) -> usize {
    splits.iter().flatten().map(Range::len).max().unwrap()
}

/// Like [`run`], by passes of at most `max_tokens` tokens of a PE, and with `ahead` forward passes without backward before each step. In these only the protocol limits how
/// far a PE without rows to send or receive can run ahead.
pub fn run_ahead<T: Transport + Send, E: Element>(
    transports: Vec<T>,
    source: &Synthetic,
    splits: &[Vec<Range<usize>>],
    options: &Options,
    steps: usize,
    ahead: usize,
    max_tokens: usize,
) -> Result<Vec<Step>, MoeError> {
    let n = transports.len();
    let config = source.config();
    let spec = spec::<E>(config, n, max_tokens, options);
    let by_pe = on_pes(transports, |shmem| {
        let me = shmem.my_pe();
        let mut layer = Layer::<_, E>::builder(spec.clone()).build(&shmem, source)?;
        let mut all = Vec::new();
        for step in 0..steps {
            let mut before = Vec::new();
            for pass in 0..ahead {
                let x = source.hidden_states(splits[(step + pass) % splits.len()][me].clone());
                before.extend(forward(&mut layer, &x)?);
            }
            let range = splits[step % splits.len()][me].clone();
            let (bytes_put, network) = (shmem.bytes_put(), shmem.network_bytes_put());
            let done = one_step(&mut layer, &source.hidden_states(range.clone()), &source.grad_output(range))?;
            // The layer's traffic counters match those of the one-sided layer.
            let [in_forward, in_backward] = done.all_reduce_bytes;
            assert_eq!((shmem.bytes_put() - bytes_put, 0), (done.traffic.total_bytes() + in_backward, in_forward));
            // All transports here reach either every PE by loads and stores, or none.
            let by_network = if shmem.is_reachable((me + 1) % n) { 0 } else { shmem.bytes_put() - bytes_put };
            assert_eq!((done.traffic.network_bytes, shmem.network_bytes_put() - network), (by_network, by_network));
            all.push((done, shmem.peak_bytes(), before));
        }
        layer.free()?;
        Ok(all)
    });
    // A peer's error may be a consequence of the first one; a test needs any of them.
    let by_pe = by_pe.into_iter().collect::<Result<Vec<_>, MoeError>>()?;
    Ok((0..steps)
        .map(|s| {
            let mut step = Step::default();
            for (pe, results) in by_pe.iter().enumerate() {
                let (done, peak, before) = &results[s];
                step.ahead.extend(before);
                step.take(done, &spec.config, &spec.placement, pe);
                step.peak_bytes.push(*peak);
            }
            step
        })
        .collect())
}

/// The float64 reference of a step over tokens `0..tokens`, with values rounded to `E` as in the layer.
pub fn reference<E: Element>(source: &Synthetic, tokens: usize, chosen: &[u32]) -> Reference {
    reference_rounded(source, tokens, chosen, |x| E::from_f32(x).to_f32())
}

/// Like [`reference`], with a given rounding.
pub fn reference_rounded(source: &Synthetic, tokens: usize, chosen: &[u32], round: fn(f32) -> f32) -> Reference {
    let round = |v: Vec<f32>| v.into_iter().map(round).collect::<Vec<f32>>();
    let x = round(source.hidden_states(0..tokens));
    let g = round(source.grad_output(0..tokens));
    let weights = |id: WeightId| {
        let values = source.load(id)?;
        Ok(if matches!(id, WeightId::Expert(..) | WeightId::Shared(_)) { round(values) } else { values })
    };
    check::reference(&Problem {
        config: source.config(),
        tokens,
        hidden_states: &x,
        grad_output: Some(&g),
        weights: &weights,
        chosen: Some(chosen),
        choice_tolerance: check::CHOICE_TOLERANCE,
        dtype: Dtype::F32,
        wire: None,
    })
    .unwrap()
}

/// Asserts that a step deviates from the reference by at most `tolerance`, norm-wise.
pub fn assert_close(step: &Step, want: &Reference, tolerance: f64, what: &str) {
    let assert_near = |name: &str, got: &[f32], want: &[f64]| {
        let deviation = check::compare(name, got, want);
        assert!(deviation.relative <= tolerance, "{what}: {deviation:?}");
    };
    assert_near("output", &step.output, &want.output);
    assert_near("grad_hidden_states", &step.grad_hidden_states, want.grad_hidden_states.as_ref().unwrap());
    assert_eq!(step.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (id, want) in &want.grads {
        assert_near(&format!("{id:?}"), &step.grads[id], want);
    }
}
