//! The special functions of the reference, in f64: the activations and their derivatives.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::moe::{Activation, Glu};

/// Maximum slope of all activations (GELU's reaches 1.129) except ReLU^2, with slope `2 x`.
pub const STEEPEST: f64 = 1.13;

/// Maximum slope of an activation between `x - by` and `x + by`.
pub fn steepest(activation: Activation, x: f64, by: f64) -> f64 {
    match activation {
        Activation::Relu2 => 2.0 * (x + by).max(0.0),
        _ => STEEPEST,
    }
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
            let phi = 0.5 * libm::erfc(-x * FRAC_1_SQRT_2);
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            (x * phi, phi + x * density)
        }
        Activation::GeluTanh => {
            let c = (2.0 / PI).sqrt();
            // 0.5 (1 + tanh(u)) = sigmoid(2 u), which is precise for small values.
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

/// The factors of an inner value from gate and up, each with its derivative, for an MLP that clamps or offsets them.
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
    fn gelu_is_precise_in_both_tails() {
        // x and erfc(x), from the C library.
        let table = [
            (0.0, 1.0),
            (1e-3, 0.998_871_621_209_030_7),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 0.004_677_734_981_047_266),
            (2.5, 4.069_520_174_449_589e-4),
            (3.0, 2.209_049_699_858_544e-5),
            (4.0, 1.541_725_790_028_002e-8),
            (5.0, 1.537_459_794_428_035e-12),
        ];
        for (x, erfc) in table {
            let at = -x / FRAC_1_SQRT_2;
            let (negative, positive) = (activate(Activation::Gelu, at).0, activate(Activation::Gelu, -at).0);
            assert!((negative - at * 0.5 * erfc).abs() <= 1e-13 * erfc * at.abs(), "at {at}: {negative}");
            assert!((positive + at * (1.0 - 0.5 * erfc)).abs() < 1e-13, "at {}: {positive}", -at);
        }
    }

    #[test]
    fn slopes_are_below_the_maximum() {
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
