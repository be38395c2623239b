//! The special functions of the reference, in f64: erf, the activations and their derivatives.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::moe::{Activation, Glu};

/// From here on the continued fraction converges faster than the series.
const SERIES_LIMIT: f64 = 2.5;

/// No activation is steeper than this anywhere (GELU's slope reaches 1.129), but ReLU^2, whose slope is `2 x`.
pub const STEEPEST: f64 = 1.13;

/// The steepest that an activation is between `x - by` and `x + by`.
pub fn steepest(activation: Activation, x: f64, by: f64) -> f64 {
    match activation {
        Activation::Relu2 => 2.0 * (x + by).max(0.0),
        _ => STEEPEST,
    }
}

/// `1 - erf(x)`, within 1e-14 absolute everywhere, and relative to the value for `x >= 0`.
///
/// Near zero by the series of Abramowitz and Stegun 7.1.6, whose terms are all positive; in the
/// tail by the continued fraction 7.1.14, evaluated from its far end.
pub fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < SERIES_LIMIT {
        return 1.0 - erf_series(x);
    }
    // erfc(x) = exp(-x^2) / sqrt(pi) / (x + (1/2)/(x + 1/(x + (3/2)/(x + 2/(x + ...))))).
    // At x = 2.5 sixty levels leave an error below 1e-16 of the value.
    let mut tail = x;
    for level in (1..=60).rev() {
        tail = x + 0.5 * f64::from(level) / tail;
    }
    (-x * x).exp() / (PI.sqrt() * tail)
}

/// `erf(x) = 2/sqrt(pi) exp(-x^2) sum_n 2^n x^(2n+1) / (1*3*...*(2n+1))`.
fn erf_series(x: f64) -> f64 {
    let square = 2.0 * x * x;
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term > 1e-18 * sum {
        odd += 2.0;
        term *= square / odd;
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

/// The logistic function, `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The activation's value and derivative at `x`.
pub fn activate(activation: Activation, x: f64) -> (f64, f64) {
    match activation {
        Activation::Silu => {
            let s = sigmoid(x);
            (x * s, s + x * s * (1.0 - s))
        }
        Activation::Gelu => {
            let phi = 0.5 * erfc(-x * FRAC_1_SQRT_2);
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            (x * phi, phi + x * density)
        }
        Activation::GeluTanh => {
            let c = (2.0 / PI).sqrt();
            // 0.5 (1 + tanh(u)) = sigmoid(2 u), which keeps its digits where it is small.
            let s = sigmoid(2.0 * c * (x + 0.044715 * x * x * x));
            let inner = c * (1.0 + 3.0 * 0.044715 * x * x);
            (x * s, s + x * 2.0 * s * (1.0 - s) * inner)
        }
        Activation::Relu => {
            if x > 0.0 {
                (x, 1.0)
            } else {
                (0.0, 0.0)
            }
        }
        Activation::Relu2 => {
            if x > 0.0 {
                (x * x, 2.0 * x)
            } else {
                (0.0, 0.0)
            }
        }
        Activation::QuickGelu => {
            let s = sigmoid(1.702 * x);
            (x * s, s + 1.702 * x * s * (1.0 - s))
        }
    }
}

/// `ln(1 + e^x)`.
pub fn softplus(x: f64) -> f64 {
    if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }
}

/// Gate's and up's factors of an inner value, each with its derivative, for an MLP that cuts them off or adds to them.
pub fn glu_factors(activation: Activation, glu: Glu, gate: f64, up: f64) -> [(f64, f64); 2] {
    let limit = if glu.limit == 0.0 { f64::INFINITY } else { f64::from(glu.limit) };
    let value = if glu.limit_after {
        let (value, slope) = activate(activation, gate);
        if value > limit { (limit, 0.0) } else { (value, slope) }
    } else if gate > limit {
        (activate(activation, limit).0, 0.0)
    } else {
        activate(activation, gate)
    };
    let offset = if glu.plus_one { 1.0 } else { 0.0 };
    let factor = if up.abs() > limit { (limit.copysign(up) + offset, 0.0) } else { (up + offset, 1.0) };
    [value, factor]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erfc_agrees_with_tables() {
        // From the C library's erfc.
        let table = [
            (0.0, 1.0),
            (1e-3, 0.998_871_621_209_030_7),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 0.004_677_734_981_047_266),
            (2.499_999, 4.069_541_957_346_353e-4),
            (2.5, 4.069_520_174_449_589e-4),
            (3.0, 2.209_049_699_858_544e-5),
            (4.0, 1.541_725_790_028_002e-8),
            (5.0, 1.537_459_794_428_035e-12),
        ];
        for (x, want) in table {
            assert!((erfc(x) - want).abs() < 1e-14, "erfc({x}) = {}, not {want}", erfc(x));
            assert!((erfc(-x) - (2.0 - want)).abs() < 1e-14, "erfc(-{x})");
            if x >= SERIES_LIMIT {
                assert!((erfc(x) / want - 1.0).abs() < 1e-13, "erfc({x}) relative");
            }
        }
    }

    #[test]
    fn no_activation_is_steeper_than_stated() {
        use Activation::{Gelu, GeluTanh, QuickGelu, Relu, Silu};
        for activation in [Silu, Gelu, GeluTanh, Relu, QuickGelu] {
            let steepest =
                (-8000..8000).map(|i| activate(activation, f64::from(i) / 1000.0).1.abs()).fold(0.0, f64::max);
            assert!((1.0..STEEPEST).contains(&steepest), "{activation:?}: {steepest}");
        }
    }

    #[test]
    fn activations_at_known_points() {
        let close = |(value, slope): (f64, f64), v: f64, s: f64| {
            assert!((value - v).abs() < 1e-12 && (slope - s).abs() < 1e-12, "{value} {slope}, not {v} {s}");
        };
        close(activate(Activation::Relu, 0.0), 0.0, 0.0);
        close(activate(Activation::Relu, 2.0), 2.0, 1.0);
        close(activate(Activation::Relu2, -1.0), 0.0, 0.0);
        close(activate(Activation::Relu2, 1.5), 2.25, 3.0);
        close(activate(Activation::QuickGelu, 1.0), 0.845_795_765_932_821_2, 1.067_779_606_556_334);
        close(activate(Activation::Silu, 0.0), 0.0, 0.5);
        close(activate(Activation::Silu, 1.0), 0.731_058_578_630_004_9, 0.927_670_511_871_486_7);
        close(activate(Activation::Gelu, 1.0), 0.841_344_746_068_542_9, 1.083_315_470_587_686_4);
        close(activate(Activation::GeluTanh, 1.0), 0.841_191_990_608_276_8, 1.082_964_083_845_782_6);
    }
}
