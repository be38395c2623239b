// aristos_router_gradients: gradients of the router, of the shared expert's gate, and of the input through both.
//
//   grad_router [E, H] = d_logits^T x       split into ranges of tokens; the last block of a tile adds the ranges in order
//   output [T, H]     += d_logits W + d_gate w^T
//
// d_logits is in GRAD_PARTS planes (aristos_route_backward) with all of its 24 bits; the gate's gradient is one more column. Each block
// computes one tile; surplus blocks exit.
#pragma once
#include "route_backward.h"
#include "small_gemm.h"

namespace aristos {

DEVICE float* router_gradient_row(const Layer& layer, u32 row) {
    if (row >= layer.shape.n_experts) return layer.tables.grad_shared_gate;
    return layer.tables.grad_router + u64(row) * layer.shape.hidden;
}

DEVICE SmallOperand gradient_planes(const Layer& layer, u32 tokens) {
    const LayerShape& s = layer.shape;
    const u32 stride = grad_stride(s);
    return {layer.route_scratch + grad_scratch(s).planes, u64(s.max_tokens) * stride, stride, tokens, stride};
}

// A tile of 64 experts by 128 columns over one range of tokens. The range is the fastest index of `item`.
template <class T>
DEVICE void router_gradient_tile(const Layer& layer, const Pass& pass, u32 item) {
    const LayerShape& s = layer.shape;
    const GradScratch scratch = grad_scratch(s);
    const u32 splits = grad_splits(s), split = item % splits, tile = item / splits;
    const u32 m0 = tile / grad_tiles_n(s) * 64, n0 = tile % grad_tiles_n(s) * SMALL_TILE_N;
    const u32 rows = grad_rows(s), hidden = s.hidden;
    // Ranges are multiples of the tokens that share a scale.
    const u32 range = div_up(div_up(pass.tokens, SCALE_TOKENS), splits) * SCALE_TOKENS;
    const u32 begin = min_of(split * range, pass.tokens), end = min_of(begin + range, pass.tokens);
    const float* scales = reinterpret_cast<const float*>(layer.route_scratch + scratch.scales);
    const SmallOperand x{pass.x, 0, hidden, pass.tokens, hidden};
    SmallGemm<T, 64, true, true, GRAD_PARTS, 1> gemm;
    gemm.run(gradient_planes(layer, pass.tokens), x, m0, n0, rows, hidden, begin, end,
             [&](u32 token) { return scales[token / SCALE_TOKENS]; });
    float* partials = reinterpret_cast<float*>(layer.route_scratch + scratch.partials);
    gemm.each(m0, n0, [&](u32 row, u32 col, float v0, float v1) {
        if (row >= rows || col >= hidden) return;
        float* to = splits == 1 ? router_gradient_row(layer, row) : partials + (u64(split) * rows + row) * hidden;
        to[col] = v0, to[col + 1] = v1;
    });
    if (splits == 1) return;

    dev::sync_block();
    bool last = false;
    if (dev::thread() == 0) {
        u32* counters = reinterpret_cast<u32*>(layer.route_scratch + scratch.counters);
        last = dev::fetch_add_acq_rel(&counters[tile], 1) == splits - 1;
    }
    if (dev::sync_block_or(last) == 0) return;
    for (u32 i = dev::thread(); i < 64 * SMALL_TILE_N; i += ROUTE_THREADS) {
        const u32 row = m0 + i / SMALL_TILE_N, col = n0 + i % SMALL_TILE_N;
        if (row >= rows || col >= hidden) continue;
        float sum = 0.0f;
        for (u32 p = 0; p < splits; p++) sum += partials[(u64(p) * rows + row) * hidden + col];
        router_gradient_row(layer, row)[col] = sum;
    }
}

// A tile of 64 tokens by 128 columns of the input's gradient.
template <class T, u32 PARTS>
DEVICE void input_gradient_tile(const Layer& layer, const Pass& pass, u32 m0, u32 n0) {
    const LayerShape& s = layer.shape;
    const u32 tokens = pass.tokens, hidden = s.hidden;
    const SmallOperand w{layer.tables.router, u64(s.n_experts) * hidden, hidden, s.n_experts, hidden};
    // The gate is not part of this GEMM: its weights exist only in f32 and are applied below.
    const float scale = reinterpret_cast<const float*>(layer.route_scratch + grad_scratch(s).scales)[m0 / SCALE_TOKENS];
    SmallGemm<T, 64, false, true, GRAD_PARTS, PARTS> gemm;
    gemm.run(gradient_planes(layer, tokens), w, m0, n0, tokens, hidden, 0, s.n_experts, [&](u32) { return scale; });
    const float* gate = s.shared_gate ? layer.tables.shared_gate : nullptr;
    gemm.each(m0, n0, [&](u32 token, u32 col, float v0, float v1) {
        if (token >= tokens || col >= hidden) return;
        if (gate != nullptr) {
            const float d = gate_gradient(layer, token);
            v0 += d * gate[col], v1 += d * gate[col + 1];
        }
        float* to = static_cast<float*>(pass.output) + u64(token) * hidden + col;
        to[0] += v0, to[1] += v1;
    });
}

template <class T>
DEVICE void router_gradients(const Layer& layer, const Pass& pass) {
    const LayerShape& s = layer.shape;
    static_assert(SCALE_TOKENS == 64, "a tile of tokens has one scale");
    u32 item = dev::block();
    // First the tiles that are split over several blocks.
    const u32 router_items = grad_tiles(s) * grad_splits(s);
    if (item < router_items) {
        router_gradient_tile<T>(layer, pass, item);
        return;
    }
    item -= router_items;
    const u32 m0 = item / grad_tiles_n(s) * 64, n0 = item % grad_tiles_n(s) * SMALL_TILE_N;
    if (m0 >= pass.tokens) return;
    if (s.router_parts == 1) {
        input_gradient_tile<T, 1>(layer, pass, m0, n0);
    } else if (s.router_parts == 2) {
        input_gradient_tile<T, 2>(layer, pass, m0, n0);
    } else {
        input_gradient_tile<T, 3>(layer, pass, m0, n0);
    }
}

KERNEL(aristos_router_gradients, 256, 2)(const Layer* layer, Pass pass) {
    if (layer->shape.dtype == DTYPE_BF16) {
        router_gradients<Bf16>(*layer, pass);
    } else {
        router_gradients<F16>(*layer, pass);
    }
}
REGISTER_KERNEL(aristos_router_gradients)

}  // namespace aristos
