//! Activations with their derivatives, and small vector helpers, as loops that vectorise.
//!
//! `exp` and `erf` are polynomials written here: a libm call per element would cost more than the
//! matrix products do. They are fused multiply-adds throughout; on a CPU without that instruction
//! they give the same result slowly.

use super::{Element, vectorised};
use crate::moe::Activation;

/// `e^x`: relative error below 2e-7; 0 below -87 (no denormals), infinity above 88.8, NaN for NaN.
///
/// `x = n ln 2 + r`, then a polynomial for `e^r` (interpolation of `(e^r - 1 - r) / r²` at Chebyshev nodes,
/// relative error 1.1e-8 before rounding) and the exponent put together from `n`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // The comparisons keep NaN, which `f32::clamp` would too but `max` and `min` would not.
    let x = if x < -88.0 { -88.0 } else { x };
    let x = if x > 90.0 { 90.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts; the first has trailing zeros, so that its product with n is exact.
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.392_618_3e-3f32;
    p = p.mul_add(r, 8.363_179e-3);
    p = p.mul_add(r, 4.166_655_5e-2);
    p = p.mul_add(r, 1.666_657_7e-1);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r * r, r) + 1.0;
    // 2^(n-1), then doubled: n = 128 still fits, and n <= -126 gives 0.
    let scale = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(126) << 23;
    p * f32::from_bits(scale) * 2.0
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Bounds `x` where an activation is flat or linear, so that infinity times zero cannot arise; keeps NaN.
#[inline(always)]
fn bounded(x: f32) -> f32 {
    let x = if x < -1e4 { -1e4 } else { x };
    if x > 1e4 { 1e4 } else { x }
}

/// The standard normal distribution function and density at `x`.
///
/// The form is Abramowitz and Stegun's 7.1.26, `Phi(-z) = e^(-z²/2) P(t)`, `t = 1 / (1 + a z)`, `z >= 0`; the
/// coefficients are a minimax fit of degree 8 (Remez) on `0 <= z <= 14`, relative error 1.5e-7.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    let z = x.abs();
    let t = 1.0 / z.mul_add(0.3, 1.0);
    let mut p = 3.567_477e-2f32;
    p = p.mul_add(t, -1.572_030_6e-1);
    p = p.mul_add(t, 2.063_534_8e-1);
    p = p.mul_add(t, -5.368_361_6e-2);
    p = p.mul_add(t, 1.285_616_1e-1);
    p = p.mul_add(t, 9.991_35e-2);
    p = p.mul_add(t, 1.207_539_5e-1);
    p = p.mul_add(t, 1.196_293e-1);
    let e = exp(-0.5 * z * z);
    let tail = e * p * t;
    let phi = if x < 0.0 { tail } else { 1.0 - tail };
    (phi, e * 0.398_942_3)
}

/// An activation of one element, chosen at compile time.
trait Act {
    fn value(x: f32) -> f32;
    /// The value and the derivative.
    fn slope(x: f32) -> (f32, f32);
}

struct Silu;
impl Act for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let low = if x < -1e4 { -1e4 } else { x };
        low * sigmoid(low)
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        let x = bounded(x);
        let s = sigmoid(x);
        let value = x * s;
        (value, value.mul_add(1.0 - s, s))
    }
}

struct Gelu;
impl Act for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let low = if x < -1e4 { -1e4 } else { x };
        low * normal(low).0
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        let x = bounded(x);
        let (cumulative, density) = normal(x);
        (x * cumulative, x.mul_add(density, cumulative))
    }
}

struct GeluTanh;
impl GeluTanh {
    /// `sqrt(2 / pi)`.
    const C: f32 = 0.797_884_6;

    /// `0.5 (1 + tanh(u)) = sigmoid(2 u)`, `u = C (x + 0.044715 x³)`: no subtraction near 0.
    #[inline(always)]
    fn factor(x: f32) -> f32 {
        sigmoid((2.0 * Self::C) * x * (x * x).mul_add(0.044_715, 1.0))
    }
}
impl Act for GeluTanh {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let low = if x < -1e4 { -1e4 } else { x };
        low * Self::factor(low)
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        let x = bounded(x);
        let s = Self::factor(x);
        let inner = (2.0 * Self::C) * (x * x).mul_add(3.0 * 0.044_715, 1.0);
        let value = x * s;
        (value, (value * (1.0 - s)).mul_add(inner, s))
    }
}

struct Relu;
impl Act for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        if x < 0.0 { 0.0 } else { x }
    }

    #[inline(always)]
    fn slope(x: f32) -> (f32, f32) {
        (Self::value(x), if x <= 0.0 { 0.0 } else { 1.0 })
    }
}

/// Calls a function generic over [`Act`] for the activation at hand.
macro_rules! with_act {
    ($act:expr, $f:ident::<$e:ident>($($arg:expr),* $(,)?)) => {
        match $act {
            Activation::Silu => $f::<$e, Silu>($($arg),*),
            Activation::Gelu => $f::<$e, Gelu>($($arg),*),
            Activation::GeluTanh => $f::<$e, GeluTanh>($($arg),*),
            Activation::Relu => $f::<$e, Relu>($($arg),*),
        }
    };
}

/// `h = act(up)`, and `up_saved = up` for the backward pass. All of one length; `up` is the product's f32 result
/// with the bias added.
pub fn forward_plain<E: Element>(act: Activation, up: &[f32], up_saved: &mut [E], h: &mut [E]) {
    with_act!(act, forward_plain_loop::<E>(up, up_saved, h));
}

vectorised! {
    fn forward_plain_loop<E: Element, A: Act>(up: &'a [f32], up_saved: &'a mut [E], h: &'a mut [E]) -> () {
        let n = up.len();
        assert!(up_saved.len() == n && h.len() == n);
        for i in 0..n {
            up_saved[i] = E::from_f32(up[i]);
            h[i] = E::from_f32(A::value(up[i]));
        }
    }
}

/// `h = act(gate) up`, and both pre-activations saved for the backward pass. All of one length.
pub fn forward_gated<E: Element>(
    act: Activation,
    gate: &[f32],
    up: &[f32],
    gate_saved: &mut [E],
    up_saved: &mut [E],
    h: &mut [E],
) {
    with_act!(act, forward_gated_loop::<E>(gate, up, gate_saved, up_saved, h));
}

vectorised! {
    fn forward_gated_loop<E: Element, A: Act>(
        gate: &'a [f32],
        up: &'a [f32],
        gate_saved: &'a mut [E],
        up_saved: &'a mut [E],
        h: &'a mut [E],
    ) -> () {
        let n = up.len();
        assert!(gate.len() == n && gate_saved.len() == n && up_saved.len() == n && h.len() == n);
        for i in 0..n {
            gate_saved[i] = E::from_f32(gate[i]);
            up_saved[i] = E::from_f32(up[i]);
            h[i] = E::from_f32(A::value(gate[i]) * up[i]);
        }
    }
}

/// Backward of [`forward_plain`] for rows whose result was weighted by `w [m]`.
///
/// `q [m, n]` is the gradient of the *unweighted* result multiplied by the down projection. Writes, for each row,
/// `d_up = w q act'(up)`, `hw = w h` (what the down projection's gradient needs), and `dw = q . h`, the weight's
/// gradient.
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
    for r in 0..m {
        let row = r * n..(r + 1) * n;
        let (q, h) = (&q[row.clone()], &h[row.clone()]);
        with_act!(act, backward_plain_row::<E>(w[r], q, &up[row.clone()], h, &mut d_up[row.clone()], &mut hw[row]));
        dw[r] = dot_element(q, h);
    }
}

vectorised! {
    fn backward_plain_row<E: Element, A: Act>(
        w: f32,
        q: &'a [f32],
        up: &'a [E],
        h: &'a [E],
        d_up: &'a mut [E],
        hw: &'a mut [E],
    ) -> () {
        let n = q.len();
        assert!(up.len() == n && h.len() == n && d_up.len() == n && hw.len() == n);
        for i in 0..n {
            d_up[i] = E::from_f32(w * q[i] * A::slope(up[i].to_f32()).1);
            hw[i] = E::from_f32(w * h[i].to_f32());
        }
    }
}

/// Backward of [`forward_gated`]; as [`backward_plain`], with `d_up = w q act(gate)` and
/// `d_gate = w q up act'(gate)`.
#[allow(clippy::too_many_arguments)]
pub fn backward_gated<E: Element>(
    act: Activation,
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
    for r in 0..m {
        let row = r * n..(r + 1) * n;
        let (q, h) = (&q[row.clone()], &h[row.clone()]);
        with_act!(
            act,
            backward_gated_row::<E>(
                w[r],
                q,
                &gate[row.clone()],
                &up[row.clone()],
                h,
                &mut d_gate[row.clone()],
                &mut d_up[row.clone()],
                &mut hw[row],
            )
        );
        dw[r] = dot_element(q, h);
    }
}

vectorised! {
    #[allow(clippy::too_many_arguments)]
    fn backward_gated_row<E: Element, A: Act>(
        w: f32,
        q: &'a [f32],
        gate: &'a [E],
        up: &'a [E],
        h: &'a [E],
        d_gate: &'a mut [E],
        d_up: &'a mut [E],
        hw: &'a mut [E],
    ) -> () {
        let n = q.len();
        assert!(gate.len() == n && up.len() == n && h.len() == n);
        assert!(d_gate.len() == n && d_up.len() == n && hw.len() == n);
        for i in 0..n {
            let dh = w * q[i];
            let (value, slope) = A::slope(gate[i].to_f32());
            d_up[i] = E::from_f32(dh * value);
            d_gate[i] = E::from_f32(dh * up[i].to_f32() * slope);
            hw[i] = E::from_f32(w * h[i].to_f32());
        }
    }
}

/// Lanes of a sum: enough for several vector accumulators, and fixed, so that a sum does not depend on the CPU.
const LANES: usize = 64;

vectorised! {
    /// `sum_i a[i] b[i]`, summed in a fixed order.
    fn dot_element<E: Element>(a: &'a [f32], b: &'a [E]) -> f32 {
        assert_eq!(a.len(), b.len());
        let mut lanes = [0.0f32; LANES];
        let (a_chunks, a_rest) = a.as_chunks::<LANES>();
        let (b_chunks, b_rest) = b.as_chunks::<LANES>();
        for (a, b) in a_chunks.iter().zip(b_chunks) {
            for l in 0..LANES {
                lanes[l] = a[l].mul_add(b[l].to_f32(), lanes[l]);
            }
        }
        for (l, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
            lanes[l] = a.mul_add(b.to_f32(), lanes[l]);
        }
        let mut width = LANES / 2;
        while width > 0 {
            for l in 0..width {
                lanes[l] += lanes[l + width];
            }
            width /= 2;
        }
        lanes[0]
    }
}

/// `sum_i a[i] b[i]`, summed in a fixed order.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_element::<f32>(a, b)
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

/// `acc [n] += sum_r w[r] x[r, :]` over the rows of `x [m, n]`, in row order; `w` is 1 where `None`.
pub fn column_sum<E: Element>(m: usize, n: usize, x: &[E], weights: Option<&[f32]>, acc: &mut [f32]) {
    assert!(x.len() == m * n && acc.len() == n && weights.is_none_or(|w| w.len() == m));
    for r in 0..m {
        axpy_element(acc, weights.map_or(1.0, |w| w[r]), &x[r * n..(r + 1) * n]);
    }
}

vectorised! {
    fn axpy_element<E: Element>(acc: &'a mut [f32], w: f32, x: &'a [E]) -> () {
        for (acc, &x) in acc.iter_mut().zip(x) {
            *acc = w.mul_add(x.to_f32(), *acc);
        }
    }
}
