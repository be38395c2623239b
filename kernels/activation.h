// Activations and their derivatives in f32, with the formulas of cpu-kernels/src/activation.rs. Arguments are clamped where the function
// is flat or linear in f32, which keeps exp in range and avoids infinity times zero. NaN gives NaN.
#pragma once
#include "params.h"
#include "platform.h"

namespace aristos {

struct ValueSlope { float value, slope; };

// Unlike fmaxf and fminf these return NaN for NaN.
DEVICE float at_least(float x, float low) { return x < low ? low : x; }
DEVICE float at_most(float x, float high) { return x > high ? high : x; }

constexpr float LOG2_E = 1.442695041f;

// s = 1 / (1 + e^-x) for -88 <= x <= 86.5, and 1 - s without cancellation.
struct Logistic { float s, rest; };
DEVICE Logistic logistic(float x) {
    float e = dev::exp2_(x * -LOG2_E);
    float s = dev::inverse_(1.0f + e);
    return {s, e * s};
}

struct Silu {
    static DEVICE ValueSlope at(float x) {
        x = at_least(x, -88.0f);
        float inner = at_most(x, 86.5f);
        Logistic l = logistic(inner);
        return {x * l.s, inner * l.s * l.rest + l.s};
    }
};

struct Gelu {
    // Computes Phi(-z) for z = |x| as e^(-z^2/2) t P(t) with t = 1 / (1 + a z), the form of Abramowitz and Stegun's 7.1.26. P has degree 7
    // and is the minimax fit of activation.rs (relative error 1.5e-7 on 0 <= z <= 14). Unlike 1 + erf(x), this form is exact in both tails.
    static DEVICE ValueSlope at(float x) {
        float z = at_most(x < 0.0f ? -x : x, 13.0f);
        float t = dev::inverse_(z * 0.3f + 1.0f);
        float p = 3.567477e-2f;
        p = p * t - 1.5720305e-1f;
        p = p * t + 2.0635348e-1f;
        p = p * t - 5.3683616e-2f;
        p = p * t + 1.2856161e-1f;
        p = p * t + 9.99135e-2f;
        p = p * t + 1.2075395e-1f;
        p = p * t + 1.196293e-1f;
        float e = dev::exp2_(z * z * (-0.5f * LOG2_E));
        float tail = e * t * p, density = e * 0.3989423f;
        // x Phi(x) = max(x, 0) - |x| Phi(-|x|), and its derivative below 0 is Phi(-z) - z density.
        float below = tail - z * density;
        return {at_least(x, 0.0f) - z * tail, x < 0.0f ? below : 1.0f - below};
    }
};

struct GeluTanh {
    // Uses 0.5 (1 + tanh(u)) = logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). The logistic form has no cancellation for negative u.
    static DEVICE ValueSlope at(float x) {
        constexpr float TWICE = 2.0f * 0.7978846f;
        x = at_least(x, -9.9f);
        float inner = at_most(x, 9.9f), square = inner * inner;
        Logistic l = logistic(inner * (square * (TWICE * 0.044715f) + TWICE));
        float slope = square * (TWICE * 3.0f * 0.044715f) + TWICE;
        return {x * l.s, inner * l.s * l.rest * slope + l.s};
    }
};

struct Relu {
    static DEVICE ValueSlope at(float x) { return {at_least(x, 0.0f), x <= 0.0f ? 0.0f : 1.0f}; }
};

}  // namespace aristos
