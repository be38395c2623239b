// The products of gemm.h in float64 from the same rounded inputs, with bounds on the kernels' rounding errors.
//
// u = 2^-24, u_T = 2^-8 (bf16) or 2^-11 (f16). The bound of a dot product of K terms in f32 is 2 (K + 2) u sum |a b|. The bound holds for
// any order of the terms, and for sums that are truncated rather than rounded, as in tensor cores. All other bounds are first order in the
// errors of a function's inputs.
#pragma once
#include <cmath>
#include <vector>

#include "../gemm.h"

namespace reference {

using namespace aristos;

constexpr double U = 1.0 / (1 << 24);

struct Type {
    double unit, tiny;  // relative rounding error, and half of the smallest subnormal
    static Type of(bool f16) { return f16 ? Type{1.0 / 2048, 0x1p-25} : Type{1.0 / 256, 0x1p-134}; }
    double rounding(double v) const { return unit * std::fabs(v) + tiny; }
};

// A value, and the allowed distance of a kernel's value.
struct Near {
    double value = 0, error = 0;
    Near rounded(Type type) const { return {value, error + type.rounding(std::fabs(value) + error)}; }
};

using Matrix = std::vector<double>;

// sum_k a[i sa_i + k sa_k] b[j sb_j + k sb_k]
struct View { const double* data; size_t outer, inner; };
inline Near dot(View a, size_t i, View b, size_t j, size_t k_end) {
    double sum = 0, sizes = 0;
    for (size_t k = 0; k < k_end; k++) {
        double product = a.data[i * a.outer + k * a.inner] * b.data[j * b.outer + k * b.inner];
        sum += product;
        sizes += std::fabs(product);
    }
    return {sum, 2 * (double(k_end) + 2) * U * sizes};
}

inline double phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// Evaluated by definition, not with the kernels' formulas.
inline double value(u32 activation, double x) {
    switch (activation) {
        case ACT_SILU: return x / (1 + std::exp(-x));
        case ACT_GELU: return x * phi(x);
        case ACT_GELU_TANH: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        default: return x > 0 ? x : 0;
    }
}
inline double slope(u32 activation, double x) {
    switch (activation) {
        case ACT_SILU: { double s = 1 / (1 + std::exp(-x)); return s + x * s * (1 - s); }
        case ACT_GELU: return phi(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
        case ACT_GELU_TANH: {
            double c = std::sqrt(2 / M_PI), t = std::tanh(c * (x + 0.044715 * x * x * x));
            return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
        }
        default: return x > 0 ? 1 : 0;
    }
}
// Bounds of an evaluation in f32: 16 roundings of numbers up to |x| for the value, 24 of numbers up to 1 + |x| for the slope.
inline Near value_f32(u32 activation, double x) { return {value(activation, x), 16 * U * std::fabs(x)}; }
inline Near slope_f32(u32 activation, double x) { return {slope(activation, x), 24 * U * (1 + std::fabs(x))}; }

// For an argument with an error. No activation here has a slope above 1.2.
inline Near value_f32(u32 activation, Near x) {
    Near v = value_f32(activation, x.value);
    v.error += 1.2 * x.error + 16 * U * x.error;
    return v;
}

inline Near plus(Near a, double b) { return {a.value + b, a.error + U * (std::fabs(a.value + b) + a.error)}; }
inline Near times(Near a, Near b) {
    double error = a.error * std::fabs(b.value) + b.error * std::fabs(a.value) + a.error * b.error;
    double product = a.value * b.value;
    return {product, error + U * (std::fabs(product) + error)};
}
inline Near exact(double v) { return {v, 0}; }

}  // namespace reference
