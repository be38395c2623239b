//! Tests of the kernels against plain float64 loops.

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::gemm_bf16::{self, ProductPath};
use super::{Bf16Weight, Borrowed, Element, InstructionSet, WeightShape, Workspace};

/// `[m, n, k]` with every tail: below, at and above vector, block and panel sizes.
const SHAPES: [[usize; 3]; 18] = [
    [1, 1, 1],
    [2, 3, 5],
    [7, 17, 31],
    [12, 32, 64],
    [13, 33, 65],
    [16, 64, 2],
    [5, 100, 1],
    [31, 1, 129],
    [40, 130, 300],
    [97, 161, 515],
    [64, 48, 1030],
    [300, 70, 33],
    // Whole tiles, and rows of whole cache lines that are read in place.
    [64, 96, 128],
    [48, 80, 96],
    // More than one block of rows, and of the summed dimension of each product.
    [200, 10, 2101],
    [70, 64, 2112],
    [3, 4100, 37],
    [4099, 20, 30],
];

fn values<E: Element>(rng: &mut ChaCha8Rng, len: usize) -> Vec<E> {
    (0..len).map(|_| E::from_f32(rng.random_range(-1.0..1.0))).collect()
}

fn wide<E: Element>(x: &[E]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

/// `c0 + a b` in float64, and the sum of the magnitudes of all terms, for each entry.
fn naive(
    [m, n, k]: [usize; 3],
    c0: &[f32],
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<(f64, f64)> {
    let mut c = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let start = f64::from(c0[i * n + j]);
            let (mut sum, mut size) = (start, start.abs());
            for l in 0..k {
                let term = f64::from(a(i, l)) * f64::from(b(l, j));
                sum += term;
                size += term.abs();
            }
            c.push((sum, size));
        }
    }
    c
}

/// Checks every entry against the error bound of a float32 sum of `k` terms.
fn assert_close(what: &str, got: &[f32], want: &[(f64, f64)]) {
    for (i, (&got, &(want, size))) in got.iter().zip(want).enumerate() {
        let bound = 1e-6 * size + 1e-30;
        assert!((f64::from(got) - want).abs() <= bound, "{what}: entry {i} is {got}, expected {want} within {bound}");
    }
}

fn products_match_float64<E: Element>(
    prepare: impl Fn(&[f32], usize, usize) -> E::Weight,
    gemm_tn: impl Fn(&mut Workspace, usize, usize, usize, &[E], &[E], &mut [f32], bool),
) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut ws = Workspace::default();
    for shape in SHAPES {
        let [m, n, k] = shape;
        for accumulate in [false, true] {
            let start = |rng: &mut ChaCha8Rng, len| {
                // Without accumulation the contents of `c` must not matter, not even NaN.
                if accumulate { values::<f32>(rng, len) } else { vec![f32::NAN; len] }
            };
            let base = |c: &[f32]| if accumulate { c.to_vec() } else { vec![0.0; c.len()] };

            let w = wide(&values::<E>(&mut rng, n * k));
            let weight = prepare(&w, n, k);
            assert_eq!((weight.out(), weight.inp()), (n, k));

            let a = values::<E>(&mut rng, m * k);
            let mut c = start(&mut rng, m * n);
            let want = naive([m, n, k], &base(&c), |i, l| a[i * k + l].to_f32(), |l, j| w[j * k + l]);
            let before = c.clone();
            E::gemm_nt(&mut ws, m, &a, &weight, &mut c, accumulate);
            assert_close(&format!("nt {shape:?} {accumulate}"), &c, &want);
            let mut again = before;
            E::gemm_nt(&mut ws, m, &a, &weight, &mut again, accumulate);
            assert_eq!(c, again, "nt {shape:?} repeats");

            let a = values::<E>(&mut rng, m * n);
            let mut c = start(&mut rng, m * k);
            let want = naive([m, k, n], &base(&c), |i, l| a[i * n + l].to_f32(), |l, j| w[l * k + j]);
            let before = c.clone();
            E::gemm_nn(&mut ws, m, &a, &weight, &mut c, accumulate);
            assert_close(&format!("nn {shape:?} {accumulate}"), &c, &want);
            let mut again = before;
            E::gemm_nn(&mut ws, m, &a, &weight, &mut again, accumulate);
            assert_eq!(c, again, "nn {shape:?} repeats");

            let a = values::<E>(&mut rng, m * n);
            let b = values::<E>(&mut rng, m * k);
            let mut c = start(&mut rng, n * k);
            let want = naive([n, k, m], &base(&c), |i, l| a[l * n + i].to_f32(), |l, j| b[l * k + j].to_f32());
            let before = c.clone();
            gemm_tn(&mut ws, m, n, k, &a, &b, &mut c, accumulate);
            assert_close(&format!("tn {shape:?} {accumulate}"), &c, &want);
            let mut again = before;
            gemm_tn(&mut ws, m, n, k, &a, &b, &mut again, accumulate);
            assert_eq!(c, again, "tn {shape:?} repeats");
        }
    }
}

fn rounded_products_are_those_of_f32<E: Element>() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut ws = Workspace::default();
    for [m, n, k] in SHAPES {
        let (a, b) = (values::<E>(&mut rng, m * n), values::<E>(&mut rng, m * k));
        let (mut sums, mut want) = (vec![0.0; n * k], vec![bf16::ZERO; n * k]);
        E::gemm_tn(&mut ws, m, n, k, &a, &b, &mut sums, false);
        bf16::convert(&sums, &mut want);
        let mut rounded = vec![bf16::NAN; n * k];
        E::gemm_tn_bf16(&mut ws, m, n, k, &a, &b, &mut rounded);
        assert_eq!(rounded, want, "{:?}", [m, n, k]);
    }
}

#[test]
fn rounded_products_round_the_sums() {
    rounded_products_are_those_of_f32::<f32>();
    rounded_products_are_those_of_f32::<bf16>();
}

#[test]
fn f32_products_match_float64() {
    products_match_float64::<f32>(f32::prepare, f32::gemm_tn);
}

#[test]
fn bf16_products_match_float64() {
    products_match_float64::<bf16>(<bf16 as Element>::prepare, <bf16 as Element>::gemm_tn);
}

/// Implementations of bf16 products that this CPU has besides the default.
fn other_paths() -> Vec<ProductPath> {
    let mut paths = vec![ProductPath::Widen];
    #[cfg(target_arch = "x86_64")]
    if let (Some(avx512), ProductPath::Amx(_)) = (super::cpu::Avx512Bf16::detect(), ProductPath::detect()) {
        paths.push(ProductPath::Avx512Bf16(avx512));
    }
    paths
}

#[test]
fn bf16_products_of_every_path_match_float64() {
    for path in other_paths() {
        products_match_float64::<bf16>(
            |w, out, inp| Bf16Weight::with_path(path, w, out, inp),
            |ws, m, n, k, a, b, c, accumulate| {
                gemm_bf16::tn_with_path(path, ws, [m, n, k], a, b, c, accumulate);
            },
        );
    }
}

/// A borrowed weight with these values, which `E` represents exactly.
fn borrowed<E: Element>(w: &[f32]) -> Borrowed<E> {
    let mut values = vec![E::default(); w.len()];
    E::convert(w, &mut values);
    Box::new(values)
}

#[test]
fn products_with_borrowed_weights_match_float64() {
    products_match_float64::<f32>(|w, out, inp| f32::borrow_weight(borrowed(w), out, inp), f32::gemm_tn);
    products_match_float64::<bf16>(|w, out, inp| bf16::borrow_weight(borrowed(w), out, inp), bf16::gemm_tn);
    for path in other_paths() {
        let weight = |w: &[f32], out, inp| Bf16Weight::borrowed(path, borrowed(w), out, inp);
        products_match_float64::<bf16>(weight, bf16::gemm_tn);
    }
}

#[test]
fn replaced_borrowed_weight_is_copied() {
    let mut ws = Workspace::default();
    fn replaced<E: Element>(ws: &mut Workspace) {
        let mut weight = E::borrow_weight(borrowed(&[1.0, 2.0]), 2, 1);
        let mut is = [0.0; 2];
        E::get_weight(&weight, &mut is);
        assert_eq!(is, [1.0, 2.0]);
        E::set_weight(ws, &mut weight, &[3.0, 4.0]);
        E::get_weight(&weight, &mut is);
        assert_eq!(is, [3.0, 4.0]);
    }
    replaced::<f32>(&mut ws);
    replaced::<bf16>(&mut ws);
}

#[test]
fn rows_do_not_depend_on_each_other() {
    // Holds for the kernel of this crate; faer uses other code paths for few rows.
    if InstructionSet::in_use() < InstructionSet::Avx512Bf16 {
        return crate::skip::skip("this CPU has no AVX512-BF16");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut ws = Workspace::default();
    // Several blocks of one summed dimension, then of the other.
    for [m, n, k] in [[200, 70, 2103], [200, 2103, 70]] {
        let weight = <bf16 as Element>::prepare(&values::<f32>(&mut rng, n * k), n, k);
        let (a, b) = (values::<bf16>(&mut rng, m * k), values::<bf16>(&mut rng, m * n));
        let (mut nt, mut nn) = (vec![0.0; m * n], vec![0.0; m * k]);
        bf16::gemm_nt(&mut ws, m, &a, &weight, &mut nt, false);
        bf16::gemm_nn(&mut ws, m, &b, &weight, &mut nn, false);
        for (first, rows) in [(0, 1), (11, 13), (150, 50)] {
            let (mut nt_rows, mut nn_rows) = (vec![0.0; rows * n], vec![0.0; rows * k]);
            bf16::gemm_nt(&mut ws, rows, &a[first * k..(first + rows) * k], &weight, &mut nt_rows, false);
            bf16::gemm_nn(&mut ws, rows, &b[first * n..(first + rows) * n], &weight, &mut nn_rows, false);
            assert_eq!(nt_rows, nt[first * n..(first + rows) * n]);
            assert_eq!(nn_rows, nn[first * k..(first + rows) * k]);
        }
    }
}

fn no_rows<E: Element>() {
    let mut ws = Workspace::default();
    let weight = E::prepare(&[1.0; 15], 3, 5);
    E::gemm_nt(&mut ws, 0, &[], &weight, &mut [], false);
    E::gemm_nn(&mut ws, 0, &[], &weight, &mut [], true);
    let mut c = [2.0; 15];
    E::gemm_tn(&mut ws, 0, 3, 5, &[], &[], &mut c, true);
    assert_eq!(c, [2.0; 15]);
    E::gemm_tn(&mut ws, 0, 3, 5, &[], &[], &mut c, false);
    assert_eq!(c, [0.0; 15]);
}

fn no_columns<E: Element>() {
    let mut ws = Workspace::default();
    for (out, inp) in [(0, 5), (3, 0), (0, 0)] {
        let weight = E::prepare(&[], out, inp);
        let zero = E::default();
        let (mut narrow, mut wide) = (vec![1.0; 2 * out], vec![1.0; 2 * inp]);
        E::gemm_nt(&mut ws, 2, &vec![zero; 2 * inp], &weight, &mut narrow, false);
        E::gemm_nn(&mut ws, 2, &vec![zero; 2 * out], &weight, &mut wide, false);
        assert!(narrow.iter().chain(&wide).all(|&x| x == 0.0), "an empty sum is 0");
        E::gemm_tn(&mut ws, 2, out, inp, &vec![zero; 2 * out], &vec![zero; 2 * inp], &mut [], false);
    }
}

#[test]
fn zero_rows_and_columns_are_valid() {
    no_rows::<f32>();
    no_rows::<bf16>();
    no_columns::<f32>();
    no_columns::<bf16>();
}

#[test]
fn bf16_rounds_to_nearest_even_and_keeps_nan() {
    let mut src: Vec<f32> = (0..=u16::MAX).map(|b| bf16::from_bits(b).to_f32()).collect();
    // Halfway points, and their neighbours on both sides.
    for b in (0..0x7f80u32).step_by(7) {
        for low in [0x7fff, 0x8000, 0x8001] {
            src.push(f32::from_bits(b << 16 | low));
            src.push(-f32::from_bits(b << 16 | low));
        }
    }
    let mut dst = vec![bf16::default(); src.len()];
    <bf16 as Element>::convert(&src, &mut dst);
    for (&s, &d) in src.iter().zip(&dst) {
        // A denormal may become 0.
        let want = if d == bf16::ZERO && s.abs() < f32::MIN_POSITIVE { d } else { bf16::from_f32(s) };
        assert!(d == want && d.is_sign_negative() == want.is_sign_negative() || (s.is_nan() && d.is_nan()), "{s:e}");
    }
    let mut back = vec![0.0; dst.len()];
    <bf16 as Element>::widen(&dst, &mut back);
    for (&d, &b) in dst.iter().zip(&back) {
        assert_eq!(half::bf16::to_f32(d).to_bits(), b.to_bits());
    }
}

/// Runs all other tests again with each lower instruction set, in processes of their own, since a process detects its CPU once.
#[test]
fn lower_instruction_sets_pass_the_tests() {
    let of_this_process = InstructionSet::in_use();
    for set in InstructionSet::ALL.into_iter().filter(|set| *set < of_this_process) {
        let mut tests = std::process::Command::new(std::env::current_exe().unwrap());
        tests.args(["--skip", "lower_instruction_sets"]).env("ARISTOS_CPU", set.name());
        let output = tests.output().unwrap();
        assert!(output.status.success(), "{set:?}:\n{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn instruction_set_in_use_is_within_the_limit() {
    assert!(InstructionSet::in_use() <= InstructionSet::limit().unwrap());
    if InstructionSet::limit() == Ok(InstructionSet::Scalar) {
        assert!(matches!(super::cpu::vectors(), pulp::Arch::Scalar));
    }
}
