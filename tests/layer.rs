//! The CPU layer over shared memory against the float64 reference: every router and expert, any number of PEs.

#[macro_use]
mod common;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aristos::check::{TOLERANCE_BF16, TOLERANCE_F32};
use aristos::moe::kernels::Element;
use aristos::moe::metrics::Traffic;
use aristos::moe::synthetic::Synthetic;
use aristos::moe::{
    Dtype, Layer, LayerConfig, Mode, MoeError, MoeLayer, Options, Placement, SharedConfig, WeightSource,
};
use aristos::shmem::{ShmTransport, Shmem};
use common::{
    Step, assert_close, even, heap_bytes, hot, mixtral, most_tokens, on_pes, reference, run, run_ahead, shm, synthetic,
    variants,
};
use half::bf16;

fn small_options(mode: Mode) -> Options {
    with!(Options::default(); mode = mode, chunk_rows = Some(5), tile_rows = Some(8))
}

fn check<E: Element>(source: &Synthetic, tokens: usize, n: usize, options: &Options, tolerance: f64, what: &str) {
    let splits = [even(tokens, n)];
    let heap = heap_bytes::<E>(source.config(), n, tokens.div_ceil(n), options);
    let steps = run::<_, E>(shm(n, heap), source, &splits, options, 2).unwrap();
    assert_eq!(steps[0].output, steps[1].output, "{what}: not repeatable");
    assert_eq!(steps[0].grads, steps[1].grads, "{what}: not repeatable");
    assert_close(&steps[0], &reference::<E>(source, tokens, &steps[0].chosen), tolerance, what);
}

#[test]
fn every_layer_matches_the_reference_on_any_number_of_pes() {
    for (name, layer) in variants(24, 20, 33) {
        let source = synthetic(layer, 3);
        for n in [1, 2, 3, 4, 8] {
            for mode in [Mode::Pipelined, Mode::Bulk] {
                let what = format!("{name}, {n} PEs, {mode:?}");
                check::<f32>(&source, 37, n, &small_options(mode), TOLERANCE_F32, &what);
            }
        }
        check::<bf16>(&source, 37, 3, &small_options(Mode::Pipelined), TOLERANCE_BF16, &format!("{name} in bf16"));
    }
}

/// Batches of more tokens than `max_tokens`, on all PEs or on one, take several passes.
#[test]
fn long_batches_match_the_reference() {
    const MAX_TOKENS: usize = 4;
    for (name, layer) in variants(24, 20, 33) {
        let source = synthetic(layer.clone(), 3);
        for n in [1, 2, 3, 4] {
            let last = |tokens| (0..n).map(|pe| if pe + 1 < n { 0..0 } else { 0..tokens }).collect::<Vec<_>>();
            let splits = [even(37, n), last(11), even(3, n)];
            for mode in [Mode::Pipelined, Mode::Bulk] {
                let (what, options) = (format!("{name}, {n} PEs, {mode:?}"), small_options(mode));
                let run = |splits: &[Vec<Range<usize>>], steps, max_tokens| {
                    let heap = heap_bytes::<f32>(&layer, n, max_tokens, &options);
                    run_ahead::<_, f32>(shm(n, heap), &source, splits, &options, steps, 0, max_tokens).unwrap()
                };
                let got = run(&splits, 6, MAX_TOKENS);
                let one_pass = run(&splits, 3, 37);
                for (k, (got, one_pass)) in got.iter().zip(&one_pass).enumerate() {
                    let tokens = [37, 11, 3][k];
                    assert_close(got, &reference::<f32>(&source, tokens, &got.chosen), TOLERANCE_F32, &what);
                    assert_eq!(got.chosen, one_pass.chosen, "{what}");
                    // Passes beyond the first add a header without the sums for the losses.
                    let passes = if n == 1 { 1 } else { most_tokens(&splits[k..=k]).div_ceil(MAX_TOKENS).max(1) };
                    let header = 4 * (n - 1) * (6 * n + layer.n_experts);
                    let sent = |step: &Step, bytes: fn(&Traffic) -> u64| step.traffic.iter().map(bytes).sum::<u64>();
                    let headers = sent(one_pass, |t| t.header_bytes) + ((passes - 1) * header) as u64;
                    assert_eq!(sent(got, |t| t.header_bytes), headers, "{what}");
                    let rows = |t: &Traffic| t.total_bytes() - t.header_bytes;
                    assert_eq!(sent(got, rows), sent(one_pass, rows), "{what}");
                }
                for (step, again) in got[..3].iter().zip(&got[3..]) {
                    assert_eq!((&step.output, &step.grads), (&again.output, &again.grads), "{what}: not repeatable");
                    assert_eq!(step.traffic, again.traffic, "{what}");
                }
                // Long batches leave no trace in the messages of the others.
                assert_eq!(
                    got[2],
                    with!(run(&splits[2..], 1, MAX_TOKENS).remove(0); peak_bytes = got[2].peak_bytes.clone()),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn few_tokens_and_few_experts() {
    for mode in [Mode::Pipelined, Mode::Bulk] {
        common::few_tokens_and_few_experts(|source, tokens, n, what| {
            check::<f32>(source, tokens, n, &small_options(mode), TOLERANCE_F32, &format!("{what}, {mode:?}"));
        });
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_pes() {
    let source = synthetic(mixtral(64, 48, 8, 2), 9);
    let options = Options::default();
    let one = run::<_, f32>(shm(1, 1 << 20), &source, &[even(100, 1)], &options, 1).unwrap().remove(0);
    for n in [2, 3, 4, 8] {
        let heap = heap_bytes::<f32>(&mixtral(64, 48, 8, 2), n, 100, &options);
        let many = run::<_, f32>(shm(n, heap), &source, &[even(100, n)], &options, 1).unwrap().remove(0);
        let as_f64 = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        assert!(aristos::check::compare("output", &many.output, &as_f64(&one.output)).relative < 1e-6);
        for (id, grad) in &many.grads {
            assert!(
                aristos::check::compare("grad", grad, &as_f64(&one.grads[id])).relative < 1e-6,
                "{id:?} on {n} PEs"
            );
        }
    }
}

/// With tiles large enough for several threads.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    fn check<E: Element>(layer: &LayerConfig) {
        let (tokens, source) = (1500usize, synthetic(layer.clone(), 11));
        for n in [1, 2] {
            let steps: Vec<_> = [1, 2, 5]
                .into_iter()
                .map(|threads| {
                    let options = with!(Options::default(); threads = threads, tile_rows = Some(128));
                    let heap = heap_bytes::<E>(layer, n, tokens.div_ceil(n), &options);
                    run::<_, E>(shm(n, heap), &source, &[even(tokens, n)], &options, 1).unwrap().remove(0)
                })
                .collect();
            assert!(steps[0].output.iter().all(|x| x.is_finite()));
            for step in &steps[1..] {
                assert_eq!(step.output, steps[0].output, "{n} PEs");
                assert_eq!(step.grads, steps[0].grads, "{n} PEs");
            }
        }
    }
    let base = mixtral(128, 256, 6, 2);
    let shared = Some(SharedConfig::new(base.expert, true));
    check::<f32>(&with!(base.clone(); shared = shared));
    check::<bf16>(&base);
}

/// Rows sent as bf16 are within bf16 rounding of the reference, and further from it than f32 rows, so they were
/// rounded; rows that stay on a PE are exact.
#[test]
fn rows_are_sent_in_the_wire_type() {
    let layer = mixtral(64, 48, 8, 3);
    let (tokens, source) = (90, synthetic(layer.clone(), 21));
    for mode in [Mode::Pipelined, Mode::Bulk] {
        for n in [1, 2, 4] {
            let options = with!(small_options(mode); wire = Some(Dtype::Bf16));
            let what = format!("{n} PEs, {mode:?}");
            let tolerance = if n == 1 { TOLERANCE_F32 } else { TOLERANCE_BF16 };
            check::<f32>(&source, tokens, n, &options, tolerance, &what);
            let heap = heap_bytes::<f32>(&layer, n, tokens.div_ceil(n), &options);
            let step = run::<_, f32>(shm(n, heap), &source, &[even(tokens, n)], &options, 1).unwrap().remove(0);
            let want = reference::<f32>(&source, tokens, &step.chosen);
            let error = aristos::check::compare("output", &step.output, &want.output).relative;
            assert!(if n == 1 { error < 1e-6 } else { error > 1e-5 }, "{what}: {error:e}");
        }
    }
}

#[test]
fn all_tokens_to_one_pe_in_rounds_within_the_budget() {
    let layer = mixtral(32, 16, 8, 1);
    let source = hot(&layer, 1.0 / 8.0, 1.0);
    for mode in [Mode::Pipelined, Mode::Bulk] {
        let options = with!(Options::default(); mode = mode, chunk_rows = Some(4), tile_rows = Some(16));
        let (tokens, n) = (160, 8);
        let heap = heap_bytes::<f32>(&layer, n, tokens / n, &options);
        let steps = run::<_, f32>(shm(n, heap), &source, &[even(tokens, n)], &options, 2).unwrap();
        // 20 rows from each PE through windows of 2 * 20 / 8 = 5 rows, which is two chunks of 3.
        assert_eq!(steps[0].rounds, vec![4; n]);
        assert!(steps[0].peak_bytes.iter().all(|&peak| peak <= heap));
        assert_close(&steps[0], &reference::<f32>(&source, tokens, &steps[0].chosen), TOLERANCE_F32, "all to one");
        assert_eq!(steps[0].output, steps[1].output);
    }
}

#[test]
fn even_routing_takes_one_round() {
    // Every row goes to the other PE or stays: windows of twice the even share hold all of them for any chunk size.
    for tokens in [1, 2, 7, 90, 91, 93] {
        let (source, n) = (synthetic(mixtral(8, 4, 4, 2), 5), 2);
        for chunk_rows in [1, 2, 4, 32, 64] {
            let options = with!(Options::default(); chunk_rows = Some(chunk_rows));
            let heap = heap_bytes::<f32>(&mixtral(8, 4, 4, 2), n, tokens, &options);
            let steps = run::<_, f32>(shm(n, heap), &source, &[even(2 * tokens, n)], &options, 1).unwrap();
            assert!(steps[0].rounds.iter().all(|&r| r <= 1), "{tokens} tokens in chunks of {chunk_rows}");
        }
    }
}

#[test]
fn traffic_matches_the_formula() {
    let layer = mixtral(40, 16, 6, 3);
    let source = synthetic(layer.clone(), 2);
    let options = small_options(Mode::Pipelined);
    let (tokens, n, h) = (50, 3, 40u64);
    let heap = heap_bytes::<f32>(&layer, n, tokens, &options);
    let splits = [even(tokens, n)];
    let step = run::<_, f32>(shm(n, heap), &source, &splits, &options, 1).unwrap().remove(0);
    for (pe, range) in splits[0].iter().enumerate() {
        // A token is sent once to each PE that has any of its experts (two experts per PE here), and returned once.
        let (mut rows, mut slots) = (0u64, 0u64);
        for t in range.clone() {
            let mut owners: Vec<u32> = step.chosen[t * 3..(t + 1) * 3].iter().map(|e| e / 2).collect();
            owners.retain(|&o| o != pe as u32);
            slots += owners.len() as u64;
            owners.dedup();
            rows += owners.len() as u64;
        }
        let sent = &step.traffic[pe];
        assert_eq!(sent.dispatch_rows, 2 * rows, "rows out, forward and backward");
        assert_eq!(sent.dispatch_row_bytes, 2 * rows * h * 4);
        assert_eq!(sent.dispatch_slot_bytes, rows * 4 + slots * 8);
        assert_eq!(sent.header_bytes, 2 * (6 + 2) * 4);
    }
    let total = |f: fn(&aristos::moe::metrics::Traffic) -> u64| step.traffic.iter().map(f).sum::<u64>();
    assert_eq!(total(|t| t.combine_rows), total(|t| t.dispatch_rows), "every row comes back");
    assert_eq!(total(|t| t.combine_row_bytes), total(|t| t.dispatch_row_bytes));
    // Backward returns one routing-weight gradient per slot: 4 of the 8 bytes that forward sent for it, without the
    // counts.
    let forward_rows = total(|t| t.dispatch_rows) / 2;
    assert_eq!(total(|t| t.combine_slot_bytes) * 2, total(|t| t.dispatch_slot_bytes) - 4 * forward_rows);
}

#[test]
fn invalid_layer_is_rejected() {
    let source = synthetic(mixtral(8, 4, 6, 2), 1);
    let heap = heap_bytes::<f32>(source.config(), 2, 4, &Options::default());
    let refused = |placement: Placement, options: Options, want: &str| {
        for result in on_pes(shm(2, heap), |shmem| {
            let spec = common::spec::<f32>(source.config(), 2, 4, &options).placement(placement.clone());
            let made = Layer::<_, f32>::builder(spec).build(&shmem, &source);
            made.map(drop).map_err(|error| error.to_string())
        }) {
            assert_eq!(result, Err(want.to_string()));
        }
    };
    let options = Options::default;
    refused(Placement::even(6, 3), options(), "the placement's number of PEs is 3, expected 2");
    refused(Placement::even(5, 2), options(), "the placement's number of experts is 5, expected 6");
    refused(Placement::even(7, 2), options(), "the placement's number of experts is 7, expected 6");
    let even = Placement::even(6, 2);
    refused(even.clone(), with!(options(); tile_rows = Some(0)), "tile rows is 0, expected at least 1");
    refused(
        even.clone(),
        with!(options(); wire = Some(Dtype::F16)),
        "wire is f16 in a layer of f32, expected bf16 in a layer of f32, or none",
    );
    refused(even.clone(), with!(options(); chunk_rows = Some(0)), "chunk rows is 0, expected at least 1");
    for budget_factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let want = format!("budget factor is {budget_factor}, expected a finite number above 0");
        refused(even.clone(), with!(options(); budget_factor = budget_factor), &want);
    }
}

/// A saved pass belongs to its layer, for one backward of the same kind.
#[test]
fn wrong_saved_pass_is_rejected() {
    let source = synthetic(mixtral(8, 4, 6, 2), 1);
    // A deadline that overflows the clock means no deadline.
    let options = with!(Options::default(); wait_limit = Duration::MAX);
    let spec = common::spec::<f32>(source.config(), 2, 4, &options);
    let heap = Shmem::<ShmTransport>::heap_bytes_for(2, 2 * spec.layout().unwrap().total_bytes());
    on_pes(shm(2, heap), |shmem| {
        let first = 4 * shmem.my_pe();
        let x = source.hidden_states(first..first + 4);
        let mut layers = [0, 1].map(|_| Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap());
        let [layer, other] = &mut layers;
        let (mut y, mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; x.len()], vec![0.0; 8]);
        let mut saved = layer.forward(&x, &mut y).unwrap();
        let refused = |result: Result<(), MoeError>| match result {
            Err(error @ MoeError::Usage { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let elsewhere = other.backward(&mut saved, &x, &x, &mut dx);
        assert_eq!(refused(elsewhere), "cannot run backward: the forward pass was another layer's");
        assert_eq!(
            refused(other.routed(&saved).map(drop)),
            "cannot say where rows went: the forward pass was another layer's"
        );
        let external = layer.experts_backward(&mut saved, &x, &x, &mut dx, &mut dw);
        let want = "cannot run the backward of experts: the layer's own router routed the forward pass";
        assert_eq!(refused(external), want);
        // Refused calls send no rows, so the layer is still usable, for one backward only.
        layer.backward(&mut saved, &x, &x, &mut dx).unwrap();
        let again = layer.backward(&mut saved, &x, &x, &mut dx);
        assert_eq!(refused(again), "cannot run backward: the forward pass has had its backward");
        let (ids, w) = (vec![0, 5, 1, -1, -1, -1, 2, 3], vec![1.0; 8]);
        let mut saved = layer.experts(&x, &ids, &w, &mut y).unwrap();
        let own = layer.backward(&mut saved, &x, &x, &mut dx);
        assert_eq!(refused(own), "cannot run backward: the caller routed the forward pass");
        layer.experts_backward(&mut saved, &x, &x, &mut dx, &mut dw).unwrap();
        shmem.barrier_all(Instant::now() + Duration::from_secs(60)).unwrap();
    });
}

#[test]
fn inference_layer_has_no_backward() {
    let source = synthetic(mixtral(8, 4, 6, 2), 1);
    let spec = common::spec::<f32>(source.config(), 1, 4, &Options::default()).training(false);
    on_pes(shm(1, spec.heap_bytes().unwrap()), |shmem| {
        let mut layer = Layer::<_, f32>::builder(spec.clone()).build(shmem, &source).unwrap();
        let x = source.hidden_states(0..4);
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let mut saved = layer.forward(&x, &mut y).unwrap();
        let why = "the layer was not made for training";
        let errors = [
            layer.backward(&mut saved, &x, &x, &mut dx).unwrap_err(),
            layer.gradients().map(drop).unwrap_err(),
            layer.set_accumulate(true).unwrap_err(),
        ];
        for (error, what) in errors.iter().zip(["run backward", "read gradients", "accumulate gradients"]) {
            assert_eq!(error.to_string(), format!("cannot {what}: {why}"));
        }
    });
}

/// A thread other than the one that made a layer may use it.
#[test]
fn layer_is_send() {
    fn is_send<T: Send>() {}
    is_send::<Layer<Shmem<ShmTransport>, f32>>();
    is_send::<Layer<&Shmem<ShmTransport>, bf16>>();
    is_send::<Layer<Shmem<ShmTransport>, f32, aristos::moe::Replicas<Arc<Shmem<ShmTransport>>>>>();
}
