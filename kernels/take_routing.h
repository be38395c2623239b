// aristos_take_routing: checks a caller's routing and replaces aristos_route. Each token's experts are sorted in ascending order, as
// later kernels expect, and their indices in the caller's routing are stored. One warp per token.
#pragma once
#include "protocol.h"
#include "route_math.h"

namespace aristos {

DEVICE i64 choice_id(const Pass& pass, u64 at) {
    return pass.wide_ids ? static_cast<const i64*>(pass.ids)[at] : static_cast<const i32*>(pass.ids)[at];
}
// Sort key of a choice: experts in ascending order, then everything that is not an expert.
DEVICE u32 choice_key(i64 id, u32 experts) { return id >= 0 && id < i64(experts) ? u32(id) : NONE; }

DEVICE void take_choices(const Layer& layer, const Pass& pass, u32 token) {
    const u32 k = layer.shape.top_k, experts = layer.shape.n_experts;
    const u64 first = u64(token) * k;
    for (u32 j = dev::lane(); j < k; j += 32) {
        const i64 id = choice_id(pass, first + j);
        const u32 key = choice_key(id, experts);
        u32 rank = 0;
        bool twice = false;
        for (u32 i = 0; i < k; i++) {
            const u32 other = choice_key(choice_id(pass, first + i), experts);
            rank += other < key || (other == key && i < j);
            twice |= other == key && i < j;
        }
        twice = twice && key != NONE;
        if (twice || (key == NONE && id != -1)) {
            const Waiting w{layer.shape.my_pe, twice ? WHAT_TWICE : WHAT_NO_EXPERT, PHASE_ROUTER, experts, token};
            record_choice(layer, w, u64(id));
        }
        // Later kernels see NONE for invalid choices, because the plan relies on a token having each expert at most once.
        const bool none = twice || key == NONE;
        layer.routing.chosen[first + rank] = none ? NONE : key;
        layer.routing.routing_weights[first + rank] = none ? 0.0f : pass.weights[first + j];
        layer.routing.columns[first + rank] = j;
    }
}

KERNEL(aristos_take_routing, 256, 2)(const Layer* layer, Pass pass) {
    if (dev::block() == 0) clear_pass(*layer);
    const u32 begin = dev::block() * ROUTE_TOKENS, end = min_of(begin + ROUTE_TOKENS, pass.tokens);
    for (u32 token = begin + dev::warp(); token < end; token += ROUTE_THREADS / 32) take_choices(*layer, pass, token);
}
REGISTER_KERNEL(aristos_take_routing)

}  // namespace aristos
