//! The layer over a transport that delays and reorders everything the OpenSHMEM model permits: results are bitwise
//! those of shared memory for every seed.

#[macro_use]
mod common;
mod sample;

use std::ops::Range;
use std::time::Instant;

use aristos::moe::{Hosts, Mode, MoeError, Options};
use aristos::shmem::reorder::ReorderWorld;
use aristos::shmem::{RawWait, SignalOp, Transport};
use common::{Case, Step, ahead_cases, even, heap_bytes, hot, mixtral, most_tokens, run_ahead, shm, synthetic};
use sample::Sample;

impl Case {
    fn max_tokens(&self) -> usize {
        self.max_tokens.unwrap_or(most_tokens(&self.splits))
    }

    fn heap(&self) -> usize {
        use aristos::moe::WeightSource;
        heap_bytes::<f32>(self.source.config(), self.splits[0].len(), self.max_tokens(), &self.options)
    }

    fn on_shm(&self) -> Vec<Step> {
        self.on(shm(self.splits[0].len(), self.heap())).unwrap()
    }

    fn reordered(&self, seed: u64) -> Vec<Step> {
        let n = self.splits[0].len();
        let world = ReorderWorld::with_reachable(n, self.heap(), seed, seed.is_multiple_of(2));
        self.on(world).unwrap_or_else(|e| panic!("{}, seed {seed}: {e}", self.name))
    }

    fn on<T: Transport + Send>(&self, transports: Vec<T>) -> Result<Vec<Step>, MoeError> {
        run_ahead::<_, f32>(transports, &self.source, &self.splits, &self.options, STEPS, AHEAD, self.max_tokens())
    }
}

/// Steps per run: enough to reuse headers and windows.
const STEPS: usize = 2;
/// Forward passes before each step, in which PEs without rows may run ahead.
const AHEAD: usize = 3;
/// Number of orders, and number of orders per test run.
const SEEDS: u64 = 1000;
const SEEDS_A_RUN: u64 = 100;

fn cases() -> Vec<Case> {
    let options = with!(Options::default(); chunk_rows = Some(2), tile_rows = Some(4));
    let limited = with!(mixtral(6, 4, 5, 2); aux_loss_coef = 0.1, capacity_factor = Some(0.9));
    let first = vec![0..8, 8..8, 8..8, 8..8];
    let idle = vec![first.clone(), first, vec![0..0, 0..0, 0..8, 8..8]];
    let mut all = ahead_cases(6, 4, &options, idle);
    all.extend([
        Case {
            name: "rows once per host, through small windows",
            source: synthetic(mixtral(10, 4, 9, 4), 5),
            splits: vec![even(30, 4), vec![0..3, 3..3, 3..20, 20..20]],
            max_tokens: None,
            options: with!(options.clone(); budget_factor = 0.5, hosts = Hosts::new(vec![0, 1, 0, 1])),
        },
        Case {
            name: "hosts of three PEs, of two and of one",
            source: synthetic(limited.clone(), 6),
            splits: vec![even(26, 6), vec![0..0, 0..9, 9..9, 9..9, 9..10, 10..10]],
            max_tokens: None,
            options: with!(options.clone(); hosts = Hosts::new(vec![0, 1, 1, 0, 2, 1])),
        },
        Case {
            name: "all rows to one expert of another host, whose relay has none",
            source: hot(&mixtral(6, 4, 3, 1), 0.4, 1.0),
            splits: vec![even(24, 4)],
            max_tokens: None,
            options: with!(options.clone(); budget_factor = 0.5, hosts = Hosts::new(vec![1, 1, 0, 0])),
        },
        Case {
            name: "a token's rows to another PE of its host, and through a relay",
            source: synthetic(mixtral(6, 4, 5, 3), 3),
            splits: vec![even(5, 5), even(10, 5)],
            max_tokens: None,
            options: with!(options.clone(); hosts = Hosts::new(vec![0, 1, 0, 0, 1])),
        },
        Case {
            name: "long batches in several passes, on other PEs each step, with losses and a capacity",
            source: synthetic(limited.clone(), 8),
            splits: vec![vec![0..10, 10..10, 10..12], vec![0..2, 2..5, 5..6], vec![0..0, 0..12, 12..12]],
            max_tokens: Some(3),
            options: options.clone(),
        },
        Case {
            name: "long batches of PEs with neither tokens nor experts, through small windows",
            source: hot(&mixtral(6, 4, 2, 1), 0.5, 1.0),
            splits: vec![vec![0..8, 8..8, 8..8, 8..8], vec![0..1, 1..2, 2..2, 2..2], vec![0..0, 0..0, 0..8, 8..8]],
            max_tokens: Some(3),
            options: with!(options.clone(); budget_factor = 0.5),
        },
        Case {
            name: "long batches with rows once per host",
            source: synthetic(limited, 9),
            splits: vec![even(30, 4), vec![0..3, 3..3, 3..20, 20..20]],
            max_tokens: Some(5),
            options: with!(options; hosts = Hosts::new(vec![0, 1, 0, 1])),
        },
    ]);
    all
}

#[test]
fn results_do_not_depend_on_delivery_order() {
    let sample = Sample::new(SEEDS_A_RUN, SEEDS);
    for case in cases() {
        let want = case.on_shm();
        for seed in sample.numbers() {
            let got = case.reordered(seed);
            for (step, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{}, seed {seed}, step {step}", case.name);
                assert_eq!(got.ahead, want.ahead, "{what}");
                assert_eq!(got.output, want.output, "{what}");
                assert_eq!(got.grad_hidden_states, want.grad_hidden_states, "{what}");
                assert_eq!(got.grads, want.grads, "{what}");
                assert_eq!(got.rounds, want.rounds, "{what}");
            }
        }
    }
}

#[test]
fn bulk_results_do_not_depend_on_delivery_order() {
    for mut case in cases() {
        let want = case.on_shm();
        case.options.mode = Mode::Bulk;
        for seed in 0..50 {
            let got = case.reordered(seed);
            assert!(got.iter().zip(&want).all(|(g, w)| g.output == w.output && g.grads == w.grads), "{}", case.name);
        }
    }
}

#[test]
fn layer_can_reuse_the_memory_of_a_freed_layer() {
    use aristos::moe::{Layer, WeightSource};
    let source = synthetic(mixtral(6, 4, 5, 2), 1);
    let options = with!(Options::default(); chunk_rows = Some(2));
    let spec = common::spec::<f32>(source.config(), 3, 4, &options);
    let heap = spec.heap_bytes().unwrap();
    // Two layers in the same heap, one after the other: the second must not read stale data of the first.
    let outputs = |seed: u64, batches: Range<usize>| -> Vec<Vec<f32>> {
        common::on_pes(ReorderWorld::new(3, heap, seed), |shmem| {
            let layer_output = |batch: usize| {
                let first = 12 * batch + 4 * shmem.my_pe();
                let x = source.hidden_states(first..first + 4);
                let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
                let output = common::forward(&mut layer, &x).unwrap();
                layer.free().unwrap();
                output
            };
            batches.clone().map(layer_output).last().unwrap()
        })
    };
    let want = outputs(0, 1..2);
    for seed in 0..50 {
        assert_eq!(outputs(seed, 0..2), want, "seed {seed}");
    }
}

#[test]
fn silent_peer_is_reported() {
    use std::sync::mpsc;
    use std::time::Duration;

    use aristos::moe::{Layer, WeightSource};
    let source = synthetic(mixtral(6, 4, 6, 3), 1);
    let options = with!(Options::default(); wait_limit = Duration::from_millis(200));
    let spec = common::spec::<f32>(source.config(), 3, 4, &options);
    let heap = spec.heap_bytes().unwrap();
    let (sender, receiver) = mpsc::channel();
    // PEs 0 and 1 have each other's rows, which they cannot gather without the header of PE 2.
    std::thread::spawn(move || {
        let errors = common::on_pes(shm(3, heap), |shmem| {
            let me = shmem.my_pe();
            let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
            let x = source.hidden_states(4 * me..4 * me + 4);
            (me < 2).then(|| common::forward(&mut layer, &x).unwrap_err().to_string())
        });
        sender.send(errors)
    });
    let errors = receiver.recv_timeout(Duration::from_secs(30)).expect("the PEs wait without end");
    for error in errors.into_iter().flatten() {
        assert!(error.contains("for PE 2: its counts"), "{error}");
    }
}

/// A transport with an injected fault that the tests above must detect.
struct Faulty<T> {
    inner: T,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Fences do nothing.
    NoFence,
    /// put_signal sends the signal before its data.
    SignalFirst,
    /// A quiet (and therefore a barrier) completes no operation.
    NoQuiet,
    /// The header of PE 0's second forward pass has another number of tokens.
    OtherTokens,
}

impl<T: Transport> Transport for Faulty<T> {
    fn my_pe(&self) -> usize {
        self.inner.my_pe()
    }
    fn n_pes(&self) -> usize {
        self.inner.n_pes()
    }
    fn heap_bytes(&self) -> usize {
        self.inner.heap_bytes()
    }
    fn put(&self, dest: usize, src: &[u8], pe: usize) {
        self.inner.put(dest, src, pe);
    }
    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.inner.put_nbi(dest, src, bytes, pe);
    }
    fn get(&self, dest: &mut [u8], src: usize, pe: usize) {
        self.inner.get(dest, src, pe);
    }
    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize) {
        self.inner.get_nbi(dest, src, bytes, pe);
    }
    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize) {
        if matches!(self.fault, Fault::SignalFirst) {
            self.inner.signal_op(signal, value, op, pe);
            self.inner.put(dest, src, pe);
        } else if matches!(self.fault, Fault::OtherTokens) && self.my_pe() == 0 && value == 2 {
            let mut src = src.to_vec();
            src[16] += 1;
            self.inner.put_signal(dest, &src, signal, value, op, pe);
        } else {
            self.inner.put_signal(dest, src, signal, value, op, pe);
        }
    }
    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize) {
        self.inner.signal_op(signal, value, op, pe);
    }
    fn signal_fetch(&self, signal: usize) -> u64 {
        self.inner.signal_fetch(signal)
    }
    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64 {
        self.inner.fetch_add(target, value, pe)
    }
    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize> {
        self.inner.wait_any(waits, deadline)
    }
    fn fence(&self) {
        if !matches!(self.fault, Fault::NoFence) {
            self.inner.fence();
        }
    }
    fn quiet(&self) {
        if !matches!(self.fault, Fault::NoQuiet) {
            self.inner.quiet();
        }
    }
    fn ptr(&self, offset: usize, pe: usize) -> Option<std::ptr::NonNull<u8>> {
        self.inner.ptr(offset, pe)
    }
    fn is_reachable(&self, pe: usize) -> bool {
        self.inner.is_reachable(pe)
    }
}

/// Whether any of 200 seeds reveals the fault: a different result, an error, or a panic of a PE.
fn is_detected(case: &Case, fault: Fault) -> bool {
    let want = case.on_shm();
    (0..200).any(|seed| {
        let world = ReorderWorld::with_reachable(case.splits[0].len(), case.heap(), seed, true);
        let world: Vec<_> = match fault {
            // If no PE is reachable, the layer sends by put_signal.
            Fault::SignalFirst => ReorderWorld::new(case.splits[0].len(), case.heap(), seed),
            _ => world,
        }
        .into_iter()
        .map(|inner| Faulty { inner, fault })
        .collect();
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.on(world))) {
            Ok(Ok(got)) => got.iter().zip(&want).any(|(g, w)| g.output != w.output || g.grads != w.grads),
            Ok(Err(_)) | Err(_) => true,
        }
    })
}

#[test]
fn peer_whose_headers_disagree_is_reported() {
    use std::time::Duration;

    use aristos::moe::{Layer, WeightSource};
    let source = synthetic(mixtral(6, 4, 6, 3), 1);
    let options = with!(Options::default(); wait_limit = Duration::from_secs(2));
    let spec = common::spec::<f32>(source.config(), 2, 4, &options);
    let world = shm(2, spec.heap_bytes().unwrap());
    let world = world.into_iter().map(|inner| Faulty { inner, fault: Fault::OtherTokens }).collect();
    // Two passes of four tokens each.
    let errors = common::on_pes(world, |shmem| {
        let me = shmem.my_pe();
        let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
        common::forward(&mut layer, &source.hidden_states(8 * me..8 * me + 8)).map_err(|error| error.to_string())
    });
    let error = errors[1].as_ref().unwrap_err();
    assert!(error.contains("PE 0 sent a header for 9 tokens in pass 2 of a batch of 8"), "{error}");
}

/// Relayed rows change results only by rounding.
#[test]
fn relayed_rows_give_the_same_results() {
    let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let mut relayed = 0;
    for mut case in cases().into_iter().filter(|case| case.options.hosts != Hosts::default()) {
        let got = case.on_shm();
        case.options.hosts = Hosts::default();
        for (step, (got, want)) in got.iter().zip(&case.on_shm()).enumerate() {
            let pairs = [(&got.output, &want.output), (&got.grad_hidden_states, &want.grad_hidden_states)];
            let pairs = pairs.into_iter().map(|(got, want)| (&got[..], &want[..]));
            let grads = got.grads.iter().zip(&want.grads).map(|((_, got), (_, want))| (&got[..], &want[..]));
            for (got, want) in pairs.chain(grads) {
                let error: Vec<f32> = got.iter().zip(want).map(|(got, want)| got - want).collect();
                assert_eq!(got.len(), want.len());
                assert!(norm(&error) <= 1e-6 * norm(want), "{}, step {step}: {got:?}, {want:?}", case.name);
            }
            relayed += usize::from(got.output != want.output);
        }
    }
    assert!(relayed > 0, "no sum was rounded in another way");
}

#[test]
fn injected_faults_are_detected() {
    for (mode, fault) in [
        (Mode::Pipelined, Fault::NoFence),
        (Mode::Pipelined, Fault::SignalFirst),
        (Mode::Bulk, Fault::NoFence),
        (Mode::Bulk, Fault::NoQuiet),
    ] {
        let mut case = cases().swap_remove(1);
        case.options.mode = mode;
        let detected = is_detected(&case, fault);
        if !matches!(fault, Fault::NoQuiet) {
            let mut relayed = cases().swap_remove(4);
            relayed.options.mode = mode;
            // Within a host no barrier separates writes from reads, even in bulk mode.
            assert!(is_detected(&relayed, fault), "{mode:?}, {fault:?}, rows once per host");
        }
        // Bulk mode separates writes from reads by barriers, and a barrier includes a quiet, so it needs no fence.
        let harmless = matches!((mode, fault), (Mode::Bulk, Fault::NoFence));
        assert_eq!(detected, !harmless, "{mode:?}, {fault:?}");
    }
}
