// Shared by routing and its backward: warp sums in a fixed order, the total order of f32, scores from logits.
#pragma once
#include <cstring>
#include "layer.h"
#include "platform.h"
#include "route_sizes.h"

namespace aristos {

DEVICE u32 float_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
DEVICE float bits_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

DEVICE u32 count_bits(u32 x) {
    x = x - ((x >> 1) & 0x55555555u);
    x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
    return ((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
}

DEVICE float warp_sum(float x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x += dev::shfl_xor(x, mask);
    return x;
}
DEVICE float warp_max(float x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x = fmaxf(x, dev::shfl_xor(x, mask));
    return x;
}
DEVICE double warp_sum(double x) {
    for (u32 mask = 16; mask > 0; mask /= 2) {
        u64 bits;
        memcpy(&bits, &x, 8);
        bits = dev::shfl_xor(bits, mask);
        double other;
        memcpy(&other, &bits, 8);
        x += other;
    }
    return x;
}

// f32 as unsigned integers in total order (IEEE 754-2019, 5.10), in which NaN is a value like any other; and back.
DEVICE u32 total_order(float x) {
    const u32 bits = float_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float from_total_order(u32 key) { return bits_float(key >> 31 ? key & 0x7fffffffu : ~key); }

DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + dev::exp_(-x)); }

// One block of the first kernel of a forward pass: resets the pass's counters and the plan's grid barrier.
DEVICE void clear_pass(const Layer& layer) {
    static_assert(sizeof(PassStats) % 8 == 0, "words");
    for (u32 i = dev::thread(); i < sizeof(PassStats) / 8; i += ROUTE_THREADS) reinterpret_cast<u64*>(layer.stats)[i] = 0;
    if (dev::thread() == 0) *reinterpret_cast<u64*>(layer.plan.scratch + plan_scratch(layer.shape).barrier) = 0;
}

// Scores of a token as a function of its logits.
struct TokenScores {
    float max, sum;  // of exp(logit - max)
    u32 scoring;
    DEVICE float score(float logit) const {
        return scoring == SCORING_SIGMOID ? sigmoid_of(logit) : dev::exp_(logit - max) / sum;
    }
    DEVICE float lse() const { return max + dev::log_(sum); }
};

// One warp, for one token; every lane gets the result.
DEVICE TokenScores token_scores(const float* logits, u32 n_experts, u32 scoring) {
    float max = -INFINITY, sum = 0.0f;
    for (u32 e = dev::lane(); e < n_experts; e += 32) max = fmaxf(max, logits[e]);
    max = warp_max(max);
    for (u32 e = dev::lane(); e < n_experts; e += 32) sum += dev::exp_(logits[e] - max);
    return {max, warp_sum(sum), scoring};
}

// Divisor that turns scores into probabilities: 1 for softmax.
DEVICE double prob_norm(const TokenScores& scores, const float* logits, u32 n_experts) {
    if (scores.scoring != SCORING_SIGMOID) return 1.0;
    double sum = 0.0;
    for (u32 e = dev::lane(); e < n_experts; e += 32) sum += double(scores.score(logits[e]));
    sum = warp_sum(sum);
    return sum > 2.2250738585072014e-308 ? sum : 2.2250738585072014e-308;
}

// Divisor of renormalised weights, from the sum of the chosen scores.
DEVICE float weight_norm(const LayerShape& shape, float sum) {
    if (!shape.renormalise) return 1.0f;
    return shape.scoring == SCORING_SIGMOID ? sum + 1e-20f : sum;
}

}  // namespace aristos
