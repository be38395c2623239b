// aristos_route_backward: the gradient of the logits from those of the routing weights and the losses (with the formulas of
// `Routing::backward` in src/moe/cpu/router.rs), and its planes for the tensor cores. A block handles SCALE_TOKENS tokens.
#pragma once
#include "route_math.h"

namespace aristos {

// One warp. Computes one token's gradient of the logits in `out` [E], which temporarily holds the gradient of the scores. Between barriers
// only one lane accesses an element. Returns the largest magnitude.
DEVICE float logit_gradients(const Layer& layer, u32 token, double all_tokens, float* out) {
    const LayerShape& s = layer.shape;
    const u32 lane = dev::lane(), experts = s.n_experts, k = s.top_k;
    const float* logits = layer.routing.logits + u64(token) * experts;
    const u32* chosen = layer.routing.chosen + u64(token) * k;
    const float* weights = layer.routing.routing_weights + u64(token) * k;
    const float* dw = layer.routing.d_weights + u64(token) * k;
    const TokenScores scores = token_scores(logits, experts, s.scoring);

    const bool aux = s.aux_loss_coef != 0.0f;
    const double aux_scale = aux ? double(s.aux_loss_coef) * experts / (all_tokens * all_tokens) : 0.0;
    auto aux_of = [&](u32 e) { return float(aux_scale * layer.losses.all[2 + e]); };
    // p = s / norm; for softmax, norm is 1 and is not differentiated, since softmax's own derivative covers it.
    const float p_norm = aux ? float(prob_norm(scores, logits, experts)) : 1.0f;
    float aux_mean = 0.0f;
    if (aux && s.scoring == SCORING_SIGMOID) {
        for (u32 e = lane; e < experts; e += 32) aux_mean += aux_of(e) * scores.score(logits[e]) / p_norm;
        aux_mean = warp_sum(aux_mean);
    }
    for (u32 e = lane; e < experts; e += 32) out[e] = aux ? (aux_of(e) - aux_mean) / p_norm : 0.0f;
    dev::sync_warp();

    // w_j = scaling * s_j / norm, so ds_j = (scaling * dw_j - [renormalised] sum_i dw_i w_i) / norm
    float sum = 0.0f, mean = 0.0f;
    if (s.renormalise) {
        for (u32 j = lane; j < k; j += 32) {
            sum += scores.score(logits[chosen[j]]);
            mean += dw[j] * weights[j];
        }
        sum = warp_sum(sum), mean = warp_sum(mean);
    }
    const float norm = weight_norm(s, sum);
    for (u32 j = lane; j < k; j += 32) out[chosen[j]] += (s.scaling * dw[j] - mean) / norm;
    dev::sync_warp();

    float dot = 0.0f;
    if (s.scoring == SCORING_SOFTMAX) {
        for (u32 e = lane; e < experts; e += 32) dot += out[e] * scores.score(logits[e]);
        dot = warp_sum(dot);
    }
    const float lse = layer.routing.lse[token];
    const float z = float(double(s.z_loss_coef) * 2.0 / all_tokens) * lse;
    float largest = 0.0f;
    for (u32 e = lane; e < experts; e += 32) {
        const float l = logits[e], score = scores.score(l);
        float d = s.scoring == SCORING_SOFTMAX ? score * (out[e] - dot) : out[e] * score * (1.0f - score);
        if (s.z_loss_coef != 0.0f) d += z * dev::exp_(l - lse);
        out[e] = d;
        largest = fmaxf(largest, fabsf(d));
    }
    return warp_max(largest);
}

// The power of two that scales `largest` into [2^13, 2^14), where f16 has full precision down to 2^-27 of it; 1 if all are 0. bf16 has
// the exponent range of f32 and needs no scaling.
template <class T>
DEVICE float plane_scale(float) { return 1.0f; }
template <>
DEVICE float plane_scale<F16>(float largest) {
    const i32 exponent = i32(float_bits(largest) >> 23) - 127;
    if (!(largest > 0.0f) || exponent == 128) return 1.0f;
    const i32 scale = 13 - exponent;
    return bits_float(u32((scale > 126 ? 126 : scale) + 127) << 23);
}

// Gradient of the shared expert's gate before its sigmoid.
DEVICE float gate_gradient(const Layer& layer, u32 token) {
    const float s = layer.routing.shared_weight[token];
    return layer.routing.d_shared_weight[token] * s * (1.0f - s);
}

template <class T>
DEVICE void route_backward(const Layer& layer, const Pass& pass) {
    const LayerShape& s = layer.shape;
    const GradScratch scratch = grad_scratch(s);
    if (dev::block() == 0) {
        u32* counters = reinterpret_cast<u32*>(layer.route_scratch + scratch.counters);
        for (u32 i = dev::thread(); i < grad_tiles(s); i += ROUTE_THREADS) counters[i] = 0;
    }
    const u32 token0 = dev::block() * SCALE_TOKENS;
    if (token0 >= pass.tokens) return;
    const u32 tokens = min_of(pass.tokens - token0, SCALE_TOKENS);
    const double sum = has_losses(s) ? layer.losses.all[0] : 1.0, all_tokens = sum > 1.0 ? sum : 1.0;

    float largest = 0.0f;
    for (u32 i = dev::warp(); i < tokens; i += ROUTE_THREADS / 32) {
        float* out = layer.routing.d_logits + u64(token0 + i) * s.n_experts;
        largest = fmaxf(largest, logit_gradients(layer, token0 + i, all_tokens, out));
        if (s.shared_gate) largest = fmaxf(largest, fabsf(gate_gradient(layer, token0 + i)));
    }
    float* of_warps = reinterpret_cast<float*>(dev::shared());
    if (dev::lane() == 0) of_warps[dev::warp()] = largest;
    dev::sync_block();  // the gradients are stored, too
    for (u32 w = 0; w < ROUTE_THREADS / 32; w++) largest = fmaxf(largest, of_warps[w]);
    const float scale = plane_scale<T>(largest);
    if (dev::thread() == 0)
        reinterpret_cast<float*>(layer.route_scratch + scratch.scales)[dev::block()] = 1.0f / scale;

    // Two columns at a time, because a plane's elements have two bytes. Columns: the experts, the gate, zeros.
    const u32 stride = grad_stride(s), rows = grad_rows(s);
    u32* planes = reinterpret_cast<u32*>(layer.route_scratch + scratch.planes);
    auto value = [&](u32 token, u32 column) {
        if (column < s.n_experts) return layer.routing.d_logits[u64(token) * s.n_experts + column] * scale;
        return column < rows ? gate_gradient(layer, token) * scale : 0.0f;
    };
    for (u32 i = dev::thread(); i < tokens * stride / 2; i += ROUTE_THREADS) {
        const u32 token = token0 + i / (stride / 2), column = i % (stride / 2) * 2;
        float a = value(token, column), b = value(token, column + 1);
        UNROLL
        for (u32 part = 0; part < GRAD_PARTS; part++) {
            const u32 both = dev::pack<T>(a, b);
            planes[((u64(part) * s.max_tokens + token) * stride + column) / 2] = both;
            float high_a, high_b;
            dev::unpack<T>(both, high_a, high_b);
            a -= high_a, b -= high_b;
        }
    }
}

KERNEL(aristos_route_backward, 256, 2)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) {
        route_backward<Bf16>(*layer, pass);
    } else {
        route_backward<F16>(*layer, pass);
    }
}
REGISTER_KERNEL(aristos_route_backward)

}  // namespace aristos
