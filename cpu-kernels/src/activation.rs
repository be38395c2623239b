//! Activations with their derivatives, and small vector helpers, as loops that vectorise.
//!
//! `exp` and `erf` are polynomials: a libm call per element would take longer than the GEMMs. They use fused
//! multiply-adds; a CPU without that instruction emulates them slowly, with the same result.

use serde::{Deserialize, Serialize};

use crate::{Element, vectorised};

/// Activation function of an expert's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    /// `x * sigmoid(x)` (also called swish).
    Silu,
    /// `x * Phi(x)`, with the Gaussian cumulative distribution computed through erf.
    Gelu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel, 2016, section 2).
    GeluTanh,
    /// `max(x, 0)`; its derivative at 0 is taken as 0.
    Relu,
    /// `max(x, 0)^2` (So et al., Primer, arXiv 2109.08668, section 4.2).
    Relu2,
    /// `x * sigmoid(1.702 x)` (Hendrycks and Gimpel, 2016, section 2).
    QuickGelu,
}

/// The combination of gate and up in a gated MLP: `act(min(gate, limit)) * (clamp(up, -limit, limit) + plus_one)`, or
/// with `limit_after` `min(act(gate), limit) * (...)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Glu {
    /// Limit of gate and up; 0 for none.
    pub limit: f32,
    /// Whether the limit applies to the activation's result instead of the gate.
    pub limit_after: bool,
    /// Whether 1 is added to up.
    pub plus_one: bool,
}

impl Glu {
    /// `act(gate) * up`.
    pub const PRODUCT: Glu = Glu { limit: 0.0, limit_after: false, plus_one: false };

    /// Gate and up are clamped at `limit`.
    pub const fn clamped(limit: f32) -> Glu {
        Glu { limit, ..Glu::PRODUCT }
    }
}

/// `e^x` for `-86.5 <= x <= 88`: relative error below 3e-7, and 1e-7 for `|x| < 20`. Undefined for NaN.
///
/// `x = n ln 2 + r`; a polynomial gives `e^r` (interpolation of `(e^r - 1 - r) / r²` at Chebyshev nodes, relative error
/// 1.1e-8 before rounding), and `n` is added to its exponent.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let r = (shifted - ROUND).mul_add(-std::f32::consts::LN_2, x);
    let mut p = 1.392_618_3e-3f32;
    p = p.mul_add(r, 8.363_179e-3);
    p = p.mul_add(r, 4.166_655_5e-2);
    p = p.mul_add(r, 1.666_657_7e-1);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    // The shift leaves only `n`, in the position of the exponent.
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `s = 1 / (1 + e^-x)` for `-88 <= x <= 86.5`, and `1 - s` without cancellation.
#[inline(always)]
fn logistic(x: f32) -> (f32, f32) {
    let e = exp(-x);
    let s = 1.0 / (1.0 + e);
    (s, e * s)
}

/// `1 / (1 + e^-x)`; NaN for NaN.
pub fn sigmoid(x: f32) -> f32 {
    if x.is_nan() { x } else { logistic(x.clamp(-88.0, 86.5)).0 }
}

// `f32::max` and `f32::min` return the other operand for NaN. These return NaN, and compile to one instruction.
#[inline(always)]
fn at_least(x: f32, low: f32) -> f32 {
    if x < low { low } else { x }
}

#[inline(always)]
fn at_most(x: f32, high: f32) -> f32 {
    if x > high { high } else { x }
}

/// An activation of one element, chosen at compile time. `x` is clamped where the activation is flat or linear in f32,
/// which keeps `exp` in its range and avoids infinity times zero. NaN gives NaN.
trait Act {
    fn value(x: f32) -> f32;
    /// The value and the derivative.
    fn slope(x: f32) -> (f32, f32);
}

struct Silu;
impl Act for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        Self::slope(x).0
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        let x = at_least(x, -88.0);
        let inner = at_most(x, 86.5);
        let (s, rest) = logistic(inner);
        (x * s, (inner * s).mul_add(rest, s))
    }
}

struct Gelu;
impl Gelu {
    /// For `z = |x|`, clamped: `z`, `Phi(-z)`, and the standard normal density at `z`.
    ///
    /// The form is Abramowitz and Stegun's 7.1.26, `Phi(-z) = e^(-z²/2) t P(t)` with `t = 1 / (1 + a z)`; the
    /// coefficients of `P`, of degree 7, are a minimax fit (Remez) on `0 <= z <= 14` with relative error 1.5e-7.
    #[inline(always)]
    fn normal(x: f32) -> (f32, f32, f32) {
        let z = at_most(x.abs(), 13.0);
        let t = 1.0 / z.mul_add(0.3, 1.0);
        let mut p = 3.567_477e-2f32;
        p = p.mul_add(t, -1.572_030_6e-1);
        p = p.mul_add(t, 2.063_534_8e-1);
        p = p.mul_add(t, -5.368_361_6e-2);
        p = p.mul_add(t, 1.285_616_1e-1);
        p = p.mul_add(t, 9.991_35e-2);
        p = p.mul_add(t, 1.207_539_5e-1);
        p = p.mul_add(t, 1.196_293e-1);
        let e = exp(z * z * -0.5);
        (z, e * t * p, e * 0.398_942_3)
    }
}
impl Act for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        Self::slope(x).0
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        let (z, tail, density) = Self::normal(x);
        // x Phi(x) = max(x, 0) - |x| Phi(-|x|), and its derivative below 0 is Phi(-z) - z density.
        let below = z.mul_add(-density, tail);
        (z.mul_add(-tail, at_least(x, 0.0)), if x < 0.0 { below } else { 1.0 - below })
    }
}

struct GeluTanh;
impl Act for GeluTanh {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        Self::slope(x).0
    }

    /// `0.5 (1 + tanh(u)) = logistic(2 u)`, `u = sqrt(2 / pi) (x + 0.044715 x³)`: no subtraction near 0.
    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        const TWICE: f32 = 2.0 * 0.797_884_6;
        let x = at_least(x, -9.9);
        let inner = at_most(x, 9.9);
        let square = inner * inner;
        let (s, rest) = logistic(inner * square.mul_add(TWICE * 0.044_715, TWICE));
        let slope = square.mul_add(TWICE * 3.0 * 0.044_715, TWICE);
        (x * s, (inner * s * rest).mul_add(slope, s))
    }
}

struct Relu;
impl Act for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        at_least(x, 0.0)
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        (Self::value(x), if x <= 0.0 { 0.0 } else { 1.0 })
    }
}

struct Relu2;
impl Act for Relu2 {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let x = at_least(x, 0.0);
        x * x
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        let x = at_least(x, 0.0);
        (x * x, 2.0 * x)
    }
}

struct QuickGelu;
impl Act for QuickGelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        Self::slope(x).0
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        const SCALE: f32 = 1.702;
        let x = at_least(x, -88.0 / SCALE);
        let inner = at_most(x, 86.5 / SCALE);
        let (s, rest) = logistic(SCALE * inner);
        (x * s, (SCALE * inner * s).mul_add(rest, s))
    }
}

/// Calls a function whose last type parameter is an [`Act`] with the type of an [`Activation`].
macro_rules! with_act {
    ($act:expr, $f:ident$(::<$($e:ident),+>)?($($arg:tt)*)) => {
        match $act {
            Activation::Silu => $f::<$($($e,)+)? Silu>($($arg)*),
            Activation::Gelu => $f::<$($($e,)+)? Gelu>($($arg)*),
            Activation::GeluTanh => $f::<$($($e,)+)? GeluTanh>($($arg)*),
            Activation::Relu => $f::<$($($e,)+)? Relu>($($arg)*),
            Activation::Relu2 => $f::<$($($e,)+)? Relu2>($($arg)*),
            Activation::QuickGelu => $f::<$($($e,)+)? QuickGelu>($($arg)*),
        }
    };
}

/// Elements computed in f32 before rounding to the element type; buffers of this size stay in L1.
const BLOCK: usize = 1024;

/// The blocks of `0..n`.
fn blocks(n: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..n).step_by(BLOCK).map(move |start| start..n.min(start + BLOCK))
}

/// `h = act(up)`, and `up_saved = up` for the backward pass. All slices have the same length. `up` is the f32 result of
/// the GEMM, with bias.
pub fn forward_plain<E: Element>(act: Activation, up: &[f32], up_saved: &mut [E], h: &mut [E]) {
    let n = up.len();
    assert!(up_saved.len() == n && h.len() == n);
    let mut buffer = [0.0; BLOCK];
    for block in blocks(n) {
        let (up, wide) = (&up[block.clone()], &mut buffer[..block.len()]);
        with_act!(act, plain_values(up, wide));
        E::convert(up, &mut up_saved[block.clone()]);
        E::convert(wide, &mut h[block]);
    }
}

vectorised! {
    fn plain_values<A: Act>(up: &'a [f32], h: &'a mut [f32]) -> () {
        for (h, &up) in h.iter_mut().zip(up) {
            *h = A::value(up);
        }
    }
}

/// `h = act(gate) up`, or the variant `glu`. Saves both pre-activations for the backward pass. All slices have the same
/// length.
pub fn forward_gated<E: Element>(
    act: Activation,
    glu: Glu,
    gate: &[f32],
    up: &[f32],
    gate_saved: &mut [E],
    up_saved: &mut [E],
    h: &mut [E],
) {
    let n = up.len();
    assert!(gate.len() == n && gate_saved.len() == n && up_saved.len() == n && h.len() == n);
    let mut buffer = [0.0; BLOCK];
    for block in blocks(n) {
        let (gate, up, wide) = (&gate[block.clone()], &up[block.clone()], &mut buffer[..block.len()]);
        if glu == Glu::PRODUCT {
            with_act!(act, gated_values(gate, up, wide));
        } else {
            let limits = Limits::of(glu);
            if glu.limit_after {
                with_act!(act, glu_values::<AfterAct>(limits, gate, up, wide));
            } else {
                with_act!(act, glu_values::<BeforeAct>(limits, gate, up, wide));
            }
        }
        E::convert(gate, &mut gate_saved[block.clone()]);
        E::convert(up, &mut up_saved[block.clone()]);
        E::convert(wide, &mut h[block]);
    }
}

vectorised! {
    fn gated_values<A: Act>(gate: &'a [f32], up: &'a [f32], h: &'a mut [f32]) -> () {
        for (h, (&gate, &up)) in h.iter_mut().zip(gate.iter().zip(up)) {
            *h = A::value(gate) * up;
        }
    }
}

/// The limit and offset of a [`Glu`], as the loops use them.
#[derive(Clone, Copy)]
struct Limits {
    limit: f32,
    offset: f32,
}

/// [`Glu::limit_after`] at compile time: each test in the loop would cost 5% of its time.
trait LimitOrder {
    const AFTER: bool;
}

struct BeforeAct;
impl LimitOrder for BeforeAct {
    const AFTER: bool = false;
}

struct AfterAct;
impl LimitOrder for AfterAct {
    const AFTER: bool = true;
}

impl Limits {
    fn of(glu: Glu) -> Limits {
        let limit = if glu.limit > 0.0 { glu.limit } else { f32::INFINITY };
        Limits { limit, offset: f32::from(u8::from(glu.plus_one)) }
    }

    /// The activation's value, limited.
    #[inline(always)]
    fn value<O: LimitOrder, A: Act>(self, gate: f32) -> f32 {
        if O::AFTER { at_most(A::value(gate), self.limit) } else { A::value(at_most(gate, self.limit)) }
    }

    /// The activation's value, limited, and its derivative with respect to the gate.
    #[inline(always)]
    fn slope<O: LimitOrder, A: Act>(self, gate: f32) -> (f32, f32) {
        let inner = if O::AFTER { gate } else { at_most(gate, self.limit) };
        let (value, slope) = A::slope(inner);
        let flat = if O::AFTER { value > self.limit } else { gate > self.limit };
        (if O::AFTER { at_most(value, self.limit) } else { value }, if flat { 0.0 } else { slope })
    }

    /// Up, clamped.
    #[inline(always)]
    fn up(self, up: f32) -> f32 {
        at_least(at_most(up, self.limit), -self.limit)
    }
}

vectorised! {
    fn glu_values<O: LimitOrder, A: Act>(limits: Limits, gate: &'a [f32], up: &'a [f32], h: &'a mut [f32]) -> () {
        for (h, (&gate, &up)) in h.iter_mut().zip(gate.iter().zip(up)) {
            *h = limits.value::<O, A>(gate) * (limits.up(up) + limits.offset);
        }
    }
}

/// Backward of [`forward_plain`] for rows whose result is weighted by `w [m]`.
///
/// `q [m, n]` is the gradient of the *unweighted* result times the down projection. Writes, for each row, `d_up = w q
/// act'(up)`, `hw = w h` (for the gradient of the down projection), and `dw = q . h`, the gradient of the weight.
#[allow(clippy::too_many_arguments)]
pub fn backward_plain<E: Element>(
    act: Activation,
    m: usize,
    n: usize,
    w: &[f32],
    q: &[f32],
    up: &[E],
    h: &[E],
    d_up: &mut [E],
    hw: &mut [E],
    dw: &mut [f32],
) {
    assert!(w.len() == m && dw.len() == m);
    assert!([q.len(), up.len(), h.len(), d_up.len(), hw.len()] == [m * n; 5]);
    let mut buffers = [[0.0; BLOCK]; 3];
    for r in 0..m {
        dw[r] = 0.0;
        for block in blocks(n) {
            let block = r * n + block.start..r * n + block.end;
            let [wide_h, wide_up, wide_hw] = buffers.each_mut().map(|b| &mut b[..block.len()]);
            let (q, up, h) = (&q[block.clone()], &up[block.clone()], &h[block.clone()]);
            E::widen(h, wide_h);
            dw[r] += dot(q, wide_h);
            with_act!(act, plain_gradients::<E>(w[r], q, up, wide_h, wide_up, wide_hw));
            E::convert(wide_up, &mut d_up[block.clone()]);
            E::convert(wide_hw, &mut hw[block]);
        }
    }
}

vectorised! {
    fn plain_gradients<E: Element, A: Act>(
        w: f32,
        q: &'a [f32],
        up: &'a [E],
        h: &'a [f32],
        d_up: &'a mut [f32],
        hw: &'a mut [f32],
    ) -> () {
        let n = q.len();
        assert!([up.len(), h.len(), d_up.len(), hw.len()] == [n; 4]);
        for i in 0..n {
            d_up[i] = w * q[i] * A::slope(up[i].to_f32()).1;
            hw[i] = w * h[i];
        }
    }
}

/// Backward of [`forward_gated`]. Like [`backward_plain`], with `d_up = w q act(gate)` and `d_gate = w q up
/// act'(gate)`, each 0 where `glu` limits it.
#[allow(clippy::too_many_arguments)]
pub fn backward_gated<E: Element>(
    act: Activation,
    glu: Glu,
    m: usize,
    n: usize,
    w: &[f32],
    q: &[f32],
    gate: &[E],
    up: &[E],
    h: &[E],
    d_gate: &mut [E],
    d_up: &mut [E],
    hw: &mut [E],
    dw: &mut [f32],
) {
    assert!(w.len() == m && dw.len() == m);
    assert!([q.len(), gate.len(), up.len(), h.len(), d_gate.len(), d_up.len(), hw.len()] == [m * n; 7]);
    let mut buffers = [[0.0; BLOCK]; 4];
    for r in 0..m {
        dw[r] = 0.0;
        for block in blocks(n) {
            let block = r * n + block.start..r * n + block.end;
            let [wide_h, wide_gate, wide_up, wide_hw] = buffers.each_mut().map(|b| &mut b[..block.len()]);
            let (q, gate) = (&q[block.clone()], &gate[block.clone()]);
            let (up, h) = (&up[block.clone()], &h[block.clone()]);
            E::widen(h, wide_h);
            dw[r] += dot(q, wide_h);
            if glu == Glu::PRODUCT {
                with_act!(act, gated_gradients::<E>(w[r], q, gate, up, wide_h, wide_gate, wide_up, wide_hw));
            } else {
                let limits = Limits::of(glu);
                if glu.limit_after {
                    with_act!(
                        act,
                        glu_gradients::<E, AfterAct>(limits, w[r], q, gate, up, wide_h, wide_gate, wide_up, wide_hw)
                    );
                } else {
                    with_act!(
                        act,
                        glu_gradients::<E, BeforeAct>(limits, w[r], q, gate, up, wide_h, wide_gate, wide_up, wide_hw)
                    );
                }
            }
            E::convert(wide_gate, &mut d_gate[block.clone()]);
            E::convert(wide_up, &mut d_up[block.clone()]);
            E::convert(wide_hw, &mut hw[block]);
        }
    }
}

vectorised! {
    #[allow(clippy::too_many_arguments)]
    fn gated_gradients<E: Element, A: Act>(
        w: f32,
        q: &'a [f32],
        gate: &'a [E],
        up: &'a [E],
        h: &'a [f32],
        d_gate: &'a mut [f32],
        d_up: &'a mut [f32],
        hw: &'a mut [f32],
    ) -> () {
        let n = q.len();
        assert!([gate.len(), up.len(), h.len(), d_gate.len(), d_up.len(), hw.len()] == [n; 6]);
        for i in 0..n {
            let dh = w * q[i];
            let (value, slope) = A::slope(gate[i].to_f32());
            d_up[i] = dh * value;
            d_gate[i] = dh * up[i].to_f32() * slope;
            hw[i] = w * h[i];
        }
    }
}

vectorised! {
    #[allow(clippy::too_many_arguments, clippy::double_comparisons)]
    fn glu_gradients<E: Element, O: LimitOrder, A: Act>(
        limits: Limits,
        w: f32,
        q: &'a [f32],
        gate: &'a [E],
        up: &'a [E],
        h: &'a [f32],
        d_gate: &'a mut [f32],
        d_up: &'a mut [f32],
        hw: &'a mut [f32],
    ) -> () {
        let n = q.len();
        assert!([gate.len(), up.len(), h.len(), d_gate.len(), d_up.len(), hw.len()] == [n; 6]);
        for i in 0..n {
            let dh = w * q[i];
            let (value, slope) = limits.slope::<O, A>(gate[i].to_f32());
            let up = up[i].to_f32();
            let inner = limits.up(up);
            // Not `!=`, which is true for NaN. Compiles to one vector comparison.
            let flat = inner < up || inner > up;
            d_up[i] = if flat { 0.0 } else { dh * value };
            d_gate[i] = dh * (inner + limits.offset) * slope;
            hw[i] = w * h[i];
        }
    }
}

/// `sum_i a[i] b[i]`. The order of summation depends on the length and the CPU's vector width.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    crate::cpu::vectors().dispatch(Dot { a, b })
}

struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

// Explicit vectors: the compiler would keep an array of sums in memory, which serialises the additions.
impl pulp::WithSimd for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, simd: S) -> f32 {
        const CHAINS: usize = 4;
        let (a, a_rest) = S::as_simd_f32s(self.a);
        let (b, b_rest) = S::as_simd_f32s(self.b);
        let (a, a_single) = a.as_chunks::<CHAINS>();
        let (b, b_single) = b.as_chunks::<CHAINS>();
        let mut sums = [simd.splat_f32s(0.0); CHAINS];
        for (a, b) in a.iter().zip(b) {
            for i in 0..CHAINS {
                sums[i] = simd.mul_add_f32s(a[i], b[i], sums[i]);
            }
        }
        for (&a, &b) in a_single.iter().zip(b_single) {
            sums[0] = simd.mul_add_f32s(a, b, sums[0]);
        }
        let pairs = [simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3])];
        let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
        simd.reduce_sum_f32s(simd.add_f32s(pairs[0], pairs[1])) + rest
    }
}

vectorised! {
    /// `acc += w x`.
    pub fn axpy<>(acc: &'a mut [f32], w: f32, x: &'a [f32]) -> () {
        assert_eq!(acc.len(), x.len());
        for (acc, &x) in acc.iter_mut().zip(x) {
            *acc = w.mul_add(x, *acc);
        }
    }
}

vectorised! {
    /// Adds `bias [n]` to every row of `c [m, n]`.
    pub fn add_bias<>(m: usize, n: usize, c: &'a mut [f32], bias: &'a [f32]) -> () {
        assert!(c.len() == m * n && bias.len() == n);
        for r in 0..m {
            for (c, &b) in c[r * n..(r + 1) * n].iter_mut().zip(bias) {
                *c += b;
            }
        }
    }
}

/// Rows summed in f32 before the sum is added to one in f64, which bounds the f32 roundings per sum.
const SUMMED_IN_F32: usize = 32;

/// `acc [n] += sum_r w[r] x[r, :]` over the rows of `x [m, n]`, in row order; `None` for weights of 1. Long sums use
/// f64, so accuracy does not decrease with the number of rows.
pub fn column_sum<E: Element>(m: usize, n: usize, x: &[E], weights: Option<&[f32]>, acc: &mut [f32]) {
    assert!(x.len() == m * n && acc.len() == n && weights.is_none_or(|w| w.len() == m));
    let mut total: Vec<f64> = acc.iter().map(|&acc| f64::from(acc)).collect();
    for first in (0..m).step_by(SUMMED_IN_F32) {
        acc.fill(0.0);
        for r in first..m.min(first + SUMMED_IN_F32) {
            axpy_element(acc, weights.map_or(1.0, |w| w[r]), &x[r * n..(r + 1) * n]);
        }
        total.iter_mut().zip(&*acc).for_each(|(total, &sum)| *total += f64::from(sum));
    }
    acc.iter_mut().zip(total).for_each(|(acc, total)| *acc = total as f32);
}

vectorised! {
    fn axpy_element<E: Element>(acc: &'a mut [f32], w: f32, x: &'a [E]) -> () {
        for (acc, &x) in acc.iter_mut().zip(x) {
            *acc = w.mul_add(x.to_f32(), *acc);
        }
    }
}
