//! Tests of the activations and vector helpers against float64.

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::Activation;

const ALL: [Activation; 5] =
    [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::QuickGelu];

/// The complementary error function in float64: the Taylor series of erf below 2.5, the continued fraction of erfc
/// above (Abramowitz and Stegun 7.1.5 and 7.1.14).
fn erfc64(x: f64) -> f64 {
    let z = x.abs();
    let positive = if z < 2.5 {
        let (mut term, mut sum) = (z, z);
        for n in 1..100 {
            term *= -z * z / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        1.0 - sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let mut tail = z;
        for n in (1..200).rev() {
            tail = z + f64::from(n) / 2.0 / tail;
        }
        (-z * z).exp() / tail / std::f64::consts::PI.sqrt()
    };
    if x < 0.0 { 2.0 - positive } else { positive }
}

fn logistic64(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Value and derivative in float64.
fn reference(act: Activation, x: f64) -> (f64, f64) {
    match act {
        Activation::Silu => {
            let s = logistic64(x);
            (x * s, s + x * s * (1.0 - s))
        }
        Activation::Gelu => {
            let phi = 0.5 * erfc64(-x / 2f64.sqrt());
            (x * phi, phi + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt())
        }
        Activation::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let t = (c * (x + 0.044715 * x.powi(3))).tanh();
            (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x))
        }
        Activation::Relu => (x.max(0.0), if x > 0.0 { 1.0 } else { 0.0 }),
        Activation::Relu2 => (x.max(0.0).powi(2), 2.0 * x.max(0.0)),
        Activation::QuickGelu => {
            let s = logistic64(1.702 * x);
            (x * s, s + 1.702 * x * s * (1.0 - s))
        }
    }
}

/// `act(x)`, through the public function.
fn values(act: Activation, x: &[f32]) -> Vec<f32> {
    let (mut saved, mut h) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    forward_plain(act, x, &mut saved, &mut h);
    assert!(saved.iter().zip(x).all(|(s, x)| s.to_bits() == x.to_bits()));
    h
}

/// `act'(x)`, through the public function.
fn slopes(act: Activation, x: &[f32]) -> Vec<f32> {
    let n = x.len();
    let (mut d_up, mut hw, mut dw) = (vec![0.0; n], vec![0.0; n], [0.0]);
    backward_plain(act, 1, n, &[1.0], &vec![1.0; n], x, &vec![0.0; n], &mut d_up, &mut hw, &mut dw);
    d_up
}

/// Dense near 0, sparse up to where all activations are flat, and powers of ten beyond.
fn grid() -> Vec<f32> {
    let mut x: Vec<f32> = (-60_000..=60_000).map(|i| i as f32 * 1e-3 / 3.0).collect();
    x.extend((-2_000..=2_000).map(|i| i as f32 * 0.05));
    for e in -40..38 {
        x.extend([10f32.powi(e), -10f32.powi(e)]);
    }
    x
}

#[test]
fn values_and_derivatives_match_float64() {
    let x = grid();
    for act in ALL {
        for ((&x, value), slope) in x.iter().zip(values(act, &x)).zip(slopes(act, &x)) {
            let (want, want_slope) = reference(act, f64::from(x));
            // Relative to x where the result is about x, absolute in the tail.
            let bound = 3e-7 * f64::from(x.abs()).min(1.0) + 3e-7 * want.abs();
            assert!((f64::from(value) - want).abs() <= bound, "{act:?}({x:e}) is {value:e}, expected {want:e}");
            // The float64 formula gives 0 * infinity here.
            let want_slope = if want_slope.is_nan() { f64::from(u8::from(x > 0.0)) } else { want_slope };
            assert!(
                (f64::from(slope) - want_slope).abs() <= 6e-7,
                "{act:?}'({x:e}) is {slope:e}, expected {want_slope:e}"
            );
        }
    }
}

#[test]
fn relu_squared_matches_its_formula() {
    let x: Vec<f32> = (-400..400).map(|i| i as f32 * 0.02).collect();
    for ((&x, value), slope) in x.iter().zip(values(Activation::Relu2, &x)).zip(slopes(Activation::Relu2, &x)) {
        let (want, want_slope) = reference(Activation::Relu2, f64::from(x));
        assert!(
            (f64::from(value) - want).abs() <= 1e-7 * want && f64::from(slope) == want_slope,
            "{x}: {value} {slope}"
        );
    }
    assert!(values(Activation::Relu2, &[f32::NAN])[0].is_nan());
}

/// The factors of gate and up, each with its derivative, in float64.
fn glu_reference(act: Activation, glu: Glu, gate: f64, up: f64) -> [(f64, f64); 2] {
    let limit = f64::from(glu.limit);
    let (cut_gate, flat) = if glu.limit_after { (gate, false) } else { (gate.min(limit), gate > limit) };
    let (value, slope) = reference(act, cut_gate);
    let (value, flat) = if glu.limit_after { (value.min(limit), value > limit) } else { (value, flat) };
    let factor = up.clamp(-limit, limit) + f64::from(u8::from(glu.plus_one));
    [(value, if flat { 0.0 } else { slope }), (factor, f64::from(u8::from(up.abs() <= limit)))]
}

#[test]
fn clamped_glus_match_their_formula() {
    // Multiples of 1/8 below, above and equal to the limits.
    let grid: Vec<f32> = (-60..=60).map(|i| i as f32 / 8.0).collect();
    let (gate, up): (Vec<f32>, Vec<f32>) = grid.iter().flat_map(|&g| grid.iter().map(move |&u| (g, u))).unzip();
    let n = gate.len();
    for (act, glu) in [
        (Activation::Silu, Glu::clamped(2.5)),
        (Activation::Silu, Glu { limit_after: true, ..Glu::clamped(2.5) }),
        (Activation::QuickGelu, Glu { plus_one: true, ..Glu::clamped(7.0) }),
    ] {
        let [mut gate_saved, mut up_saved, mut h, mut d_gate, mut d_up, mut hw] =
            std::array::from_fn(|_| vec![0.0f32; n]);
        forward_gated(act, glu, &gate, &up, &mut gate_saved, &mut up_saved, &mut h);
        let (q, mut dw) = (vec![1.0; n], [0.0]);
        backward_gated(
            act,
            glu,
            1,
            n,
            &[0.5],
            &q,
            &gate_saved,
            &up_saved,
            &h,
            &mut d_gate,
            &mut d_up,
            &mut hw,
            &mut dw,
        );
        for i in 0..n {
            let [(value, slope), (factor, up_slope)] = glu_reference(act, glu, gate[i].into(), up[i].into());
            for (got, want) in [
                (h[i], value * factor),
                (d_gate[i], 0.5 * factor * slope),
                (d_up[i], 0.5 * value * up_slope),
                (hw[i], 0.5 * value * factor),
            ] {
                let close = (f64::from(got) - want).abs() <= 1e-5 * want.abs() + 1e-5;
                assert!(close, "{act:?} {glu:?} at {} {}: {got}, not {want}", gate[i], up[i]);
            }
        }
    }
}

#[test]
fn derivatives_match_finite_differences() {
    // Differences of float64 values allow a small step; relu has no derivative at 0.
    let step = 1e-5;
    for act in ALL {
        let x: Vec<f32> = (-400..400).map(|i| i as f32 * 0.02 + 0.003).collect();
        for (&x, slope) in x.iter().zip(slopes(act, &x)) {
            let x = f64::from(x);
            let want = (reference(act, x + step).0 - reference(act, x - step).0) / (2.0 * step);
            assert!((f64::from(slope) - want).abs() < 1e-6, "{act:?}'({x}) is {slope}, finite difference {want}");
        }
    }
}

#[test]
fn tails_of_gelu_keep_relative_accuracy() {
    // 1 + erf(x) would cancel here.
    let x: Vec<f32> = (10..120).map(|i| -0.1 * i as f32).collect();
    for (&x, value) in x.iter().zip(values(Activation::Gelu, &x)) {
        let want = reference(Activation::Gelu, f64::from(x)).0;
        assert!(((f64::from(value) - want) / want).abs() < 1e-5, "gelu({x}) is {value:e}, expected {want:e}");
    }
}

#[test]
fn infinities_give_limits_and_nan_propagates() {
    // Lengths for both the vector loop and its scalar tail.
    for len in [1, 3, 16, 37] {
        for act in ALL {
            let at = |x: f32| (values(act, &vec![x; len])[len - 1], slopes(act, &vec![x; len])[len - 1]);
            assert_eq!(at(f32::INFINITY), (f32::INFINITY, 1.0), "{act:?}");
            let (value, slope) = at(f32::NEG_INFINITY);
            assert!(value.abs() < 1e-30 && slope.abs() < 1e-30, "{act:?} at -infinity: {value:e} {slope:e}");
            assert_eq!(at(f32::MAX), (f32::MAX, 1.0), "{act:?}");
            for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
                assert!(at(nan).0.is_nan(), "{act:?}");
                // The gradient of relu is 1 for NaN.
                assert!(act == Activation::Relu || at(nan).1.is_nan(), "{act:?}");
            }
        }
    }
    assert!(sigmoid(f32::NAN).is_nan());
    assert_eq!(sigmoid(f32::INFINITY), 1.0);
    assert!(sigmoid(f32::NEG_INFINITY) < 1e-37);
}

#[test]
fn sigmoid_matches_float64() {
    for x in grid() {
        let want = logistic64(f64::from(x));
        let got = f64::from(sigmoid(x));
        assert!((got - want).abs() <= 4e-7 * want + 1e-37, "sigmoid({x:e}) is {got:e}, expected {want:e}");
    }
}

fn uniform<E: Element>(rng: &mut ChaCha8Rng, len: usize) -> Vec<E> {
    (0..len).map(|_| E::from_f32(rng.random_range(-3.0..3.0))).collect()
}

fn assert_near(what: &str, got: f32, want: f64, tolerance: f64) {
    assert!((f64::from(got) - want).abs() <= tolerance * (1.0 + want.abs()), "{what}: {got}, expected {want}");
}

/// Compares every output of every function with its formula in float64, for lengths with every kind of tail.
fn passes_match_formulas<E: Element>(tolerance: f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for (m, n) in [(1, 1), (3, 7), (2, 64), (2, 100), (1, 1024), (2, 1100), (0, 5), (4, 0)] {
        for act in ALL {
            let what = format!("{} {act:?} [{m}, {n}]", E::NAME);
            let wide = |x: &[E]| x.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
            let new = || vec![E::default(); m * n];
            let (gate, up): (Vec<f32>, Vec<f32>) = (uniform(&mut rng, m * n), uniform(&mut rng, m * n));
            let [mut gate_saved, mut up_saved, mut h] = [new(), new(), new()];
            forward_plain(act, &up, &mut up_saved, &mut h);
            for i in 0..m * n {
                assert!(up_saved[i].to_f32() == E::from_f32(up[i]).to_f32());
                assert_near(&what, h[i].to_f32(), reference(act, f64::from(up[i])).0, tolerance);
            }
            forward_gated(act, Glu::PRODUCT, &gate, &up, &mut gate_saved, &mut up_saved, &mut h);
            for i in 0..m * n {
                assert!(gate_saved[i].to_f32() == E::from_f32(gate[i]).to_f32());
                assert!(up_saved[i].to_f32() == E::from_f32(up[i]).to_f32());
                let want = reference(act, f64::from(gate[i])).0 * f64::from(up[i]);
                assert_near(&what, h[i].to_f32(), want, tolerance);
            }

            let (w, q): (Vec<f32>, Vec<f32>) = (uniform(&mut rng, m), uniform(&mut rng, m * n));
            let [mut d_gate, mut d_up, mut hw] = [new(), new(), new()];
            let mut dw = vec![f32::NAN; m];
            let (gate64, up64, h64) = (wide(&gate_saved), wide(&up_saved), wide(&h));
            let check_rows = |hw: &[E], dw: &[f32]| {
                for r in 0..m {
                    let row = r * n..(r + 1) * n;
                    let sum: f64 = row.clone().map(|i| f64::from(q[i]) * h64[i]).sum();
                    let size: f64 = row.clone().map(|i| (f64::from(q[i]) * h64[i]).abs()).sum();
                    assert!((f64::from(dw[r]) - sum).abs() <= 1e-6 * size, "{what}: dw {} for {sum}", dw[r]);
                    for i in row {
                        assert_near(&what, hw[i].to_f32(), f64::from(w[r]) * h64[i], tolerance);
                    }
                }
            };
            backward_plain(act, m, n, &w, &q, &up_saved, &h, &mut d_up, &mut hw, &mut dw);
            check_rows(&hw, &dw);
            for i in 0..m * n {
                let dh = f64::from(w[i / n]) * f64::from(q[i]);
                assert_near(&what, d_up[i].to_f32(), dh * reference(act, up64[i]).1, tolerance);
            }
            backward_gated(
                act,
                Glu::PRODUCT,
                m,
                n,
                &w,
                &q,
                &gate_saved,
                &up_saved,
                &h,
                &mut d_gate,
                &mut d_up,
                &mut hw,
                &mut dw,
            );
            check_rows(&hw, &dw);
            for i in 0..m * n {
                let dh = f64::from(w[i / n]) * f64::from(q[i]);
                let (value, slope) = reference(act, gate64[i]);
                assert_near(&what, d_up[i].to_f32(), dh * value, tolerance);
                assert_near(&what, d_gate[i].to_f32(), dh * up64[i] * slope, tolerance);
            }
        }
    }
}

#[test]
fn f32_passes_match_formulas() {
    passes_match_formulas::<f32>(1e-6);
}

#[test]
fn bf16_passes_match_formulas() {
    passes_match_formulas::<bf16>(1.0 / 256.0);
}

/// The number of rows in a long step of a large layer.
#[test]
fn column_sums_of_a_million_rows_are_accurate() {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let (m, n) = (1 << 20, 3);
    // A mean of 1 makes every partial sum large compared to the next term.
    let mut x: Vec<f32> = uniform(&mut rng, m * n);
    x.iter_mut().for_each(|x| *x += 1.0);
    let weights: Vec<f32> = uniform(&mut rng, m);
    for weights in [None, Some(&weights[..])] {
        let mut acc = vec![0.0; n];
        column_sum(m, n, &x, weights, &mut acc);
        for (j, &got) in acc.iter().enumerate() {
            let term = |r: usize| f64::from(weights.map_or(1.0, |w| w[r])) * f64::from(x[r * n + j]);
            let (want, norm) = (0..m).fold((0.0, 0.0), |(sum, norm), r| (sum + term(r), norm + term(r).powi(2)));
            let scale = if weights.is_some() { norm.sqrt() } else { want };
            assert!((f64::from(got) - want).abs() < 1e-6 * scale, "{got} {want}");
        }
    }
}

#[test]
fn vector_helpers_match_formulas() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for (m, n) in [(1, 1), (3, 5), (5, 64), (7, 100), (2, 1000), (0, 4), (4, 0)] {
        let x: Vec<bf16> = uniform(&mut rng, m * n);
        let (start, weights, y): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (uniform(&mut rng, n), uniform(&mut rng, m), uniform(&mut rng, n));
        for weights in [None, Some(&weights[..])] {
            let mut acc = start.clone();
            column_sum(m, n, &x, weights, &mut acc);
            for j in 0..n {
                let sum = (0..m).fold(f64::from(start[j]), |sum, r| {
                    sum + f64::from(weights.map_or(1.0, |w| w[r])) * f64::from(x[r * n + j].to_f32())
                });
                assert_near("column_sum", acc[j], sum, 3e-6);
            }
        }
        let mut acc = start.clone();
        axpy(&mut acc, -1.5, &y);
        let product = dot(&start, &y);
        let mut want = 0.0;
        for j in 0..n {
            assert_near("axpy", acc[j], f64::from(start[j]) - 1.5 * f64::from(y[j]), 1e-6);
            want += f64::from(start[j]) * f64::from(y[j]);
        }
        assert!((f64::from(product) - want).abs() < 1e-5 * (1.0 + n as f64), "dot {product}, expected {want}");
        let mut c: Vec<f32> = uniform(&mut rng, m * n);
        let before = c.clone();
        add_bias(m, n, &mut c, &y);
        assert!((0..m * n).all(|i| c[i] == before[i] + y[i % n]));
    }
}
