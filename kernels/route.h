// aristos_route: logits on tensor cores, scores, expert selection, routing weights, loss sums, and the shared expert's gate. A block
// handles ROUTE_TOKENS tokens. For few tokens several blocks share the logits (route_split), and the last of them to finish does the
// rest. src/moe/cpu/router.rs defines the results.
#pragma once
#include "route_math.h"
#include "small_gemm.h"

namespace aristos {

// The tokens of a block, and its share of their logits.
struct RouteItem {
    RouteSplit split;
    u32 number, token0, tile, range;

    DEVICE RouteItem(const LayerShape& s, u32 tokens) : split(route_split(s, tokens)) {
        number = dev::block() / split.blocks(), token0 = number * ROUTE_TOKENS;
        tile = dev::block() % split.tiles, range = dev::block() % split.blocks() / split.tiles;
    }
};

DEVICE float* logit_partials(const Layer& layer) { return reinterpret_cast<float*>(layer.plan.scratch + plan_scratch(layer.shape).partials); }

// Writes the block's share of the logits to memory. `PARTS` planes of the layer's dtype add up to the f32 weights.
template <class T, u32 PARTS>
DEVICE void route_logits(const Layer& layer, const Pass& pass, const RouteItem& item) {
    const LayerShape& s = layer.shape;
    const SmallOperand x{pass.x, 0, s.hidden, pass.tokens, s.hidden};
    const SmallOperand w{layer.tables.router, u64(s.n_experts) * s.hidden, s.hidden, s.n_experts, s.hidden};
    const u32 tokens = pass.tokens, experts = s.n_experts, begin = item.range * item.split.range;
    float* logits = item.split.ranges == 1 ? layer.routing.logits : logit_partials(layer) + u64(item.range) * tokens * experts;
    SmallGemm<T, ROUTE_TOKENS, false, false, 1, PARTS> gemm;
    for (u32 e0 = item.tile * SMALL_TILE_N; e0 < experts; e0 += item.split.tiles * SMALL_TILE_N) {
        gemm.run(x, w, item.token0, e0, tokens, experts, begin, min_of(begin + item.split.range, s.hidden), [](u32) { return 1.0f; });
        gemm.each(item.token0, e0, [&](u32 t, u32 e, float v0, float v1) {
            if (t >= tokens) return;
            float* to = logits + u64(t) * experts + e;
            if (e < experts) to[0] = v0;
            if (e + 1 < experts) to[1] = v1;
        });
    }
}

// Whether this block is the last one to finish the logits; if so, they are complete in memory.
DEVICE bool complete_logits(const Layer& layer, const RouteItem& item, u32 tokens) {
    const u32 blocks = item.split.blocks();
    dev::sync_block();  // the logits are stored, and shared memory is free
    if (blocks == 1) return true;
    bool last = false;
    if (dev::thread() == 0) {
        u32* done = layer.routing.done + item.number;
        last = dev::fetch_add_acq_rel(done, 1) == blocks - 1;
        if (last) *done = 0;  // for the next pass
    }
    if (!dev::sync_block_or(last)) return false;
    if (item.split.ranges == 1) return true;
    const u32 experts = layer.shape.n_experts;
    const u64 first = u64(item.token0) * experts, plane = u64(tokens) * experts;
    const float* partials = logit_partials(layer) + first;
    for (u32 i = dev::thread(); i < min_of(tokens - item.token0, ROUTE_TOKENS) * experts; i += ROUTE_THREADS) {
        float sum = 0.0f;
        for (u32 r = 0; r < item.split.ranges; r++) sum += partials[r * plane + i];
        layer.routing.logits[first + i] = sum;
    }
    dev::sync_block();
    return true;
}

// Selection keys: scores in total order; the two lowest values are reserved.
constexpr u32 KEY_SELECTED = 0, KEY_MASKED = 1, KEY_LEAST = 2;
DEVICE u32 live_key(float x) {
    const u32 key = total_order(x);
    return key < KEY_LEAST ? KEY_LEAST : key;
}

// One warp. Marks the `count` largest of `keys` as selected, ties to the smaller index. There must be at least `count` keys.
DEVICE void select_largest(u32* keys, u32 n, u32 count) {
    const u32 lane = dev::lane();
    // The largest of this lane's keys; searched again only after it was selected.
    u32 key = 0, index = NONE;
    auto find_largest = [&] {
        key = 0, index = NONE;
        for (u32 i = lane; i < n; i += 32) {
            if (keys[i] > key) key = keys[i], index = i;
        }
    };
    find_largest();
    for (u32 c = 0; c < count; c++) {
        u32 best = key, at = index;
        for (u32 mask = 16; mask > 0; mask /= 2) {
            const u32 other = dev::shfl_xor(best, mask), other_at = dev::shfl_xor(at, mask);
            if (other > best || (other == best && other_at < at)) best = other, at = other_at;
        }
        if (at == index && at != NONE) {
            keys[at] = KEY_SELECTED;
            find_largest();
        }
    }
    dev::sync_warp();
}

// Masks all experts outside the best groups (DeepSeek-V3, section 2.1.2). A group's score is the sum of its two best.
DEVICE void mask_groups(u32* keys, u32* group_keys, const LayerShape& s) {
    const u32 lane = dev::lane(), size = s.n_experts / s.n_groups;
    for (u32 g = lane; g < s.n_groups; g += 32) {
        u32 first = 0, second = 0;
        for (u32 i = 0; i < size; i++) {
            const u32 key = keys[g * size + i];
            if (key > first) {
                second = first, first = key;
            } else if (key > second) {
                second = key;
            }
        }
        group_keys[g] = live_key(from_total_order(first) + (size > 1 ? from_total_order(second) : 0.0f));
    }
    dev::sync_warp();
    select_largest(group_keys, s.n_groups, s.top_groups);
    for (u32 e = lane; e < s.n_experts; e += 32) {
        if (group_keys[e / size] != KEY_SELECTED) keys[e] = KEY_MASKED;
    }
    dev::sync_warp();
}

// One warp. Selects a token's experts and computes their weights.
DEVICE void select_experts(const Layer& layer, u32 token, const TokenScores& scores, u32* keys) {
    const LayerShape& s = layer.shape;
    const u32 lane = dev::lane(), experts = s.n_experts;
    const float* logits = layer.routing.logits + u64(token) * experts;
    const float* bias = s.correction_bias ? layer.tables.router_bias : nullptr;
    for (u32 e = lane; e < experts; e += 32) {
        const float score = scores.score(logits[e]);
        keys[e] = live_key(bias != nullptr ? score + bias[e] : score);
    }
    dev::sync_warp();
    if (s.n_groups > 0) mask_groups(keys, keys + experts, s);
    select_largest(keys, experts, s.top_k);

    // The selected experts in ascending order; their lanes write them and, once their sum is known, their weights.
    u32* chosen = layer.routing.chosen + u64(token) * s.top_k;
    float* weights = layer.routing.routing_weights + u64(token) * s.top_k;
    const u32 below = (1u << lane) - 1;
    float sum = 0.0f;
    u32 found = 0;
    for (u32 e0 = 0; e0 < experts; e0 += 32) {
        const u32 e = e0 + lane;
        const bool selected = e < experts && keys[e] == KEY_SELECTED;
        const u32 all = dev::ballot(selected);
        if (selected) {
            const float score = scores.score(logits[e]);
            chosen[found + count_bits(all & below)] = e;
            sum += score;
        }
        found += count_bits(all);
    }
    const float norm = weight_norm(s, warp_sum(sum));
    found = 0;
    for (u32 e0 = 0; e0 < experts; e0 += 32) {
        const u32 e = e0 + lane;
        const bool selected = e < experts && keys[e] == KEY_SELECTED;
        const u32 all = dev::ballot(selected);
        if (selected) weights[found + count_bits(all & below)] = scores.score(logits[e]) / norm * s.scaling;
        found += count_bits(all);
    }
    dev::sync_warp();
}

// Computes sigmoid(x w^T) for each of the block's tokens. A warp handles four tokens at a time and reads w once for all four.
template <class T>
DEVICE void shared_gate(const Layer& layer, const Pass& pass, u32 token0) {
    const u32 hidden = layer.shape.hidden, lane = dev::lane();
    const float* w = layer.tables.shared_gate;
    const u16* x = static_cast<const u16*>(pass.x);
    for (u32 first = token0 + dev::warp() * 4; first < min_of(token0 + ROUTE_TOKENS, pass.tokens); first += 32) {
        float dot[4] = {};
        for (u32 h = lane * 8; h < hidden; h += 256) {
            float g[8];
            UNROLL
            for (u32 i = 0; i < 8; i++) g[i] = w[h + i];
            UNROLL
            for (u32 n = 0; n < 4; n++) {
                if (first + n >= pass.tokens) continue;
                const Vec16 v = dev::load16(x + u64(first + n) * hidden + h);
                UNROLL
                for (u32 i = 0; i < 4; i++) {
                    float lo, hi;
                    dev::unpack<T>(v.w[i], lo, hi);
                    dot[n] += lo * g[2 * i] + hi * g[2 * i + 1];
                }
            }
        }
        UNROLL
        for (u32 n = 0; n < 4; n++) {
            const float sum = warp_sum(dot[n]);
            if (lane == 0 && first + n < pass.tokens) layer.routing.shared_weight[first + n] = sigmoid_of(sum);
        }
    }
}

// Per-token data for the losses, at the end of shared memory.
struct LossTokens {
    double norm[ROUTE_TOKENS];
    float max[ROUTE_TOKENS], sum[ROUTE_TOKENS], lse[ROUTE_TOKENS];
};
static_assert(sizeof(LossTokens) <= 1024, "route_launch leaves 1024 bytes");

// Computes the block's loss sums, in token order. aristos_plan adds the sums of all blocks.
DEVICE void block_losses(const Layer& layer, const LossTokens& of, u32 number, u32 tokens) {
    const LayerShape& s = layer.shape;
    const u32 token0 = number * ROUTE_TOKENS;
    double* sums = reinterpret_cast<double*>(layer.plan.scratch + plan_scratch(s).loss_parts) +
                   u64(number) * (1 + s.n_experts);
    for (u32 e = dev::thread(); e < s.n_experts; e += ROUTE_THREADS) {
        double sum = 0.0;
        for (u32 i = 0; i < tokens; i++) {
            const TokenScores scores{of.max[i], of.sum[i], s.scoring};
            sum += double(scores.score(layer.routing.logits[u64(token0 + i) * s.n_experts + e])) / of.norm[i];
        }
        sums[1 + e] = sum;
    }
    if (dev::thread() == 0) {
        double sum = 0.0;
        for (u32 i = 0; i < tokens; i++) sum += double(of.lse[i]) * double(of.lse[i]);
        sums[0] = sum;
    }
}

template <class T>
DEVICE void route(const Layer& layer, const Pass& pass) {
    const LayerShape& s = layer.shape;
    if (dev::block() == 0) clear_pass(layer);
    const RouteItem item(s, pass.tokens);
    const u32 token0 = item.token0;
    if (token0 >= pass.tokens) return;
    if (s.router_parts == 1) {
        route_logits<T, 1>(layer, pass, item);
    } else if (s.router_parts == 2) {
        route_logits<T, 2>(layer, pass, item);
    } else {
        route_logits<T, 3>(layer, pass, item);
    }
    if (s.shared_gate && dev::block() % item.split.blocks() == 0) shared_gate<T>(layer, pass, token0);
    if (!complete_logits(layer, item, pass.tokens)) return;

    const u32 tokens = min_of(pass.tokens - token0, ROUTE_TOKENS), warps = select_warps(s);
    LossTokens& losses = *reinterpret_cast<LossTokens*>(dev::shared() + route_launch(s).shared_bytes - 1024);
    if (dev::warp() < warps) {
        u32* keys = reinterpret_cast<u32*>(dev::shared()) + dev::warp() * (s.n_experts + s.n_groups);
        for (u32 i = dev::warp(); i < tokens; i += warps) {
            const float* logits = layer.routing.logits + u64(token0 + i) * s.n_experts;
            const TokenScores scores = token_scores(logits, s.n_experts, s.scoring);
            select_experts(layer, token0 + i, scores, keys);
            const double norm = has_losses(s) ? prob_norm(scores, logits, s.n_experts) : 1.0;
            if (dev::lane() == 0) {
                const float lse = scores.lse();
                layer.routing.lse[token0 + i] = lse;
                losses.norm[i] = norm, losses.max[i] = scores.max, losses.sum[i] = scores.sum, losses.lse[i] = lse;
            }
        }
    }
    if (!has_losses(s)) return;
    dev::sync_block();
    block_losses(layer, losses, item.number, tokens);
}

KERNEL(aristos_route, 256, 2)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) {
        route<Bf16>(*layer, pass);
    } else {
        route<F16>(*layer, pass);
    }
}
REGISTER_KERNEL(aristos_route)

}  // namespace aristos
