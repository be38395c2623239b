// Sizes and launches of routing, plan, their backward and the all-reduce, as functions of the shape, for the kernels and for memory.cpp.
// Needs no GPU.
#pragma once
#include "params.h"

namespace aristos {

constexpr u32 MAX_EXPERTS = 8192;     // a warp's scores are in shared memory during selection
constexpr u32 MAX_TOP_K = 128;        // the slots of one segment of tokens must fit in 16 bits

constexpr u32 ROUTE_TOKENS = 32;      // per block of aristos_route and of aristos_take_routing
constexpr u32 ROUTE_THREADS = 256;
constexpr u32 PLAN_TOKENS = 256;      // per segment of aristos_plan, one thread each
constexpr u32 PLAN_EXPERTS = 1024;    // experts counted in one pass over a segment
constexpr u32 SCALE_TOKENS = 64;      // tokens whose logit gradients share a scale: a block of aristos_route_backward
constexpr u32 GRAD_PARTS = 3;         // planes of the layer's dtype per logit gradient

constexpr u32 div_up(u32 a, u32 b) { return (a + b - 1) / b; }
constexpr u32 min_of(u32 a, u32 b) { return a < b ? a : b; }
constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
constexpr u64 align_bytes(u64 bytes) { return (bytes + 255) / 256 * 256; }

constexpr bool has_losses(const LayerShape& s) { return s.aux_loss_coef != 0.0f || s.z_loss_coef != 0.0f; }
// Whether the loss sums cover more PEs than this group, within which headers carry them.
constexpr bool gathers_losses(const LayerShape& s) { return has_losses(s) && s.n_world > s.n_pes; }
// Whether an expert of this group has replicas.
constexpr bool has_replicas(const LayerShape& s) { return s.held > s.n_experts; }

// Whether these kernels support the shape; memory.cpp rejects it otherwise.
constexpr bool route_shape_ok(const LayerShape& s) {
    return s.n_experts >= 1 && s.n_experts <= MAX_EXPERTS && s.top_k >= 1 && s.top_k <= MAX_TOP_K &&
           s.top_k <= s.n_experts && s.hidden % 8 == 0 && s.router_parts >= 1 && s.router_parts <= 3 &&
           (s.n_groups == 0 || (s.n_experts % s.n_groups == 0 && s.top_groups >= 1 && s.top_groups <= s.n_groups &&
                                s.n_experts / s.n_groups * s.top_groups >= s.top_k));
}

// ---- Tiles of the small GEMMs: `tile_m` by 128 columns by steps of 32. If possible, the number of steps in flight lets two blocks fit
// on an A100 SM, because latency dominates such short steps.
constexpr u32 SMALL_TILE_N = 128, SMALL_TILE_K = 32;
constexpr u32 small_step_bytes(u32 tile_m, u32 parts_a, u32 parts_b) {
    return (parts_a * tile_m + parts_b * SMALL_TILE_N) * SMALL_TILE_K * 2;
}
constexpr u32 small_stages(u32 tile_m, u32 parts_a, u32 parts_b) {
    return max_of(3, min_of(8, (80 << 10) / small_step_bytes(tile_m, parts_a, parts_b)));
}
constexpr u32 small_gemm_bytes(u32 tile_m, u32 parts_a, u32 parts_b) {
    return small_stages(tile_m, parts_a, parts_b) * small_step_bytes(tile_m, parts_a, parts_b);
}

// ---- Scratch: local memory that one pass's kernels of this family share. Scratch need not be zero and is not kept after the pass. In
// forward: loss sums, then the plan's counts.
constexpr u32 route_blocks(const LayerShape& s) { return div_up(s.max_tokens, ROUTE_TOKENS); }
// In passes with few tokens several blocks compute the logits of ROUTE_TOKENS tokens, each for some tiles of experts and a range of the
// hidden size. Two blocks fit on an SM.
constexpr u32 ROUTE_RANGE = 256;  // minimum part of the hidden size
struct RouteSplit {
    u32 tiles, ranges, range;  // number of parts of each; elements per range
    constexpr u32 blocks() const { return tiles * ranges; }
};
constexpr RouteSplit route_split(const LayerShape& s, u32 tokens) {
    const u32 blocks = max_of(1, 2 * s.blocks / max_of(1, div_up(tokens, ROUTE_TOKENS)));
    RouteSplit c{};
    c.tiles = min_of(div_up(s.n_experts, SMALL_TILE_N), blocks);
    c.ranges = min_of(max_of(1, s.hidden / ROUTE_RANGE), blocks / c.tiles);
    c.range = div_up(div_up(s.hidden, SMALL_TILE_K), c.ranges) * SMALL_TILE_K;
    return c;
}
// Upper bound, for all token counts, of the number of (token group, tile of experts, range) triples and of blocks that have work.
constexpr u32 route_spread(const LayerShape& s) {
    const u64 all = u64(route_blocks(s)) * div_up(s.n_experts, SMALL_TILE_N) * max_of(1, s.hidden / ROUTE_RANGE);
    return all < 2 * s.blocks ? u32(all) : 2 * s.blocks;
}
constexpr u64 route_partials_bytes(const LayerShape& s) {
    return s.hidden < 2 * ROUTE_RANGE ? 0 : align_bytes(u64(route_spread(s)) * ROUTE_TOKENS * SMALL_TILE_N * 4);
}
constexpr u32 plan_segments(const LayerShape& s) { return div_up(s.max_tokens, PLAN_TOKENS); }
constexpr u32 plan_max_chunks(const LayerShape& s) { return div_up(s.max_tokens, s.chunk_rows); }
// Whether any routing needs more than one round.
constexpr bool plan_may_split(const LayerShape& s) {
    return plan_max_chunks(s) > s.round_chunks || u64(s.max_tokens) * min_of(s.top_k, s.max_local) > s.round_slots;
}
// Row segments: for each round of each PE, its rows / PLAN_TOKENS, rounded up.
constexpr u64 plan_row_segments(const LayerShape& s) {
    const u64 rows = u64(s.max_tokens) * min_of(s.top_k, s.hosts);
    return rows / PLAN_TOKENS + (plan_may_split(s) ? rows / s.chunk_rows : 0) + s.hosts;
}
struct PlanScratch {
    u64 barrier;      // u64: arrivals at aristos_plan's grid barrier; zeroed by aristos_route
    u64 loss_parts;   // f64 [route_blocks][1 + E]: z_sum, prob_sums
    u64 histogram;    // u32 [segments][E]: pairs
    u64 heads;        // u32 [segments][held]: slots << 16 | rows, by the physical expert that begins the row
    u64 pair_physical;   // u32 [max_tokens][k]: rank among its expert's pairs of the segment; then its physical expert, or NONE
    u64 pair_slots;   // u32 [max_tokens][k]: slots of the row that begins with this pair, or 0
    u64 pair_before;  // u32 [max_tokens][k]: `heads` of the same physical expert over the earlier tokens of the segment
    u64 row_slots;    // u32 [row segments][max_local]: slots
    u64 tails;        // u32 [row segments][max_local]: slots << 16 | rows, by last expert
    u64 chunk_slots;  // u32 [n_pes][chunks][most_members]: with relays, slots per PE of the destination's host
    u64 partials;     // f32 [ranges][tokens][E]: of aristos_route; shares memory with the plan's counts
    u64 bytes;
};
constexpr PlanScratch plan_scratch(const LayerShape& s) {
    PlanScratch p{};
    const u64 by_expert = align_bytes(u64(plan_segments(s)) * s.n_experts * 4);
    const u64 by_physical = align_bytes(u64(plan_segments(s)) * s.held * 4), pairs = align_bytes(u64(s.max_tokens) * s.top_k * 4);
    const u64 by_local = align_bytes(plan_row_segments(s) * s.max_local * 4);
    p.barrier = 0;
    p.loss_parts = align_bytes(8);
    p.histogram = p.loss_parts + align_bytes(has_losses(s) ? u64(route_blocks(s)) * (1 + s.n_experts) * 8 : 0);
    p.heads = p.histogram + by_expert;
    p.pair_physical = p.heads + by_physical;
    p.pair_slots = p.pair_physical + pairs;
    p.pair_before = p.pair_slots + pairs;
    p.row_slots = p.pair_before + pairs;
    p.tails = p.row_slots + by_local;
    p.chunk_slots = p.tails + by_local;
    p.partials = p.histogram;
    const u64 by_member = s.relays ? align_bytes(u64(s.n_pes) * div_up(s.max_tokens, s.chunk_rows) * s.most_members * 4) : 0;
    const u64 counts = p.chunk_slots + by_member, partials = p.partials + route_partials_bytes(s);
    p.bytes = counts > partials ? counts : partials;
    return p;
}

// In backward: logit gradients in planes, and partial sums of the router's gradient. The shared expert's gate counts as one more expert.
constexpr u32 grad_rows(const LayerShape& s) { return s.n_experts + (s.shared_gate ? 1 : 0); }
constexpr u32 grad_stride(const LayerShape& s) { return div_up(grad_rows(s), 8) * 8; }
constexpr u32 grad_tiles_m(const LayerShape& s) { return div_up(grad_rows(s), 64); }
constexpr u32 grad_tiles_n(const LayerShape& s) { return div_up(s.hidden, SMALL_TILE_N); }
constexpr u32 grad_tiles(const LayerShape& s) { return grad_tiles_m(s) * grad_tiles_n(s); }
// Number of token ranges that the sum over tokens is split into. The launch then has about twice as many blocks as can be resident.
constexpr u32 grad_splits(const LayerShape& s) {
    return max_of(1, min_of(min_of(2 * s.blocks / max_of(1, grad_tiles(s)), div_up(s.max_tokens, 4 * SCALE_TOKENS)), 32));
}
struct GradScratch {
    u64 planes;    // T [GRAD_PARTS][max_tokens][grad_stride]
    u64 scales;    // f32 [tokens / SCALE_TOKENS]: factor to apply to the planes
    u64 counters;  // u32 [grad_tiles]: finished ranges of tokens; zeroed by aristos_route_backward
    u64 partials;  // f32 [splits][grad_rows][H]
    u64 bytes;
};
constexpr GradScratch grad_scratch(const LayerShape& s) {
    GradScratch g{};
    if (!s.training) return g;
    g.planes = 0;
    g.scales = align_bytes(u64(GRAD_PARTS) * s.max_tokens * grad_stride(s) * 2);
    g.counters = g.scales + align_bytes(u64(div_up(s.max_tokens, SCALE_TOKENS)) * 4);
    g.partials = g.counters + align_bytes(u64(grad_tiles(s)) * 4);
    g.bytes = g.partials + (grad_splits(s) > 1 ? align_bytes(u64(grad_splits(s)) * grad_rows(s) * s.hidden * 4) : 0);
    return g;
}

// Sizes of Plan::scratch and Layer::route_scratch in bytes; both are local and 256-byte aligned.
constexpr u64 plan_scratch_bytes(const LayerShape& s) { return plan_scratch(s).bytes; }
constexpr u64 route_scratch_bytes(const LayerShape& s) { return grad_scratch(s).bytes; }

// ---- All-reduce. The gradients of a unit (SumUnit) form one vector, in which each array is padded to whole 16-byte pieces.
constexpr u32 REDUCE_SEGMENTS = 8;
constexpr u32 REDUCE_THREADS = 256;
constexpr u32 REDUCE_SLOTS = 4;  // pieces of one channel in flight between two PEs
constexpr u64 reduce_round(u64 count) { return (count + 3) / 4 * 4; }
constexpr u64 reduce_elements(const LayerShape& s) {
    const u64 h = s.hidden, i = s.shared_intermediate;
    u64 n = reduce_round(u64(s.n_experts) * h);
    if (i > 0) {
        n += (s.shared_gated ? 3 : 2) * reduce_round(h * i);
        if (s.shared_bias) n += (s.shared_gated ? 2 : 1) * reduce_round(i) + reduce_round(h);
        if (s.shared_gate) n += reduce_round(h);
    }
    return n;
}
constexpr u64 expert_elements(const LayerShape& s) {
    const u64 h = s.hidden, i = s.intermediate;
    u64 n = (s.gated ? 3 : 2) * reduce_round(h * i);
    if (s.bias) n += (s.gated ? 2 : 1) * reduce_round(i) + reduce_round(h);
    return n;
}
// Elements of one holder's part.
constexpr u64 reduce_part(u64 elements, u32 parts) { return reduce_round((elements + parts - 1) / parts); }
// Over the network few large pieces, since each is a message; otherwise many small ones, one per block. At most 1 MiB per peer and
// direction in both cases.
struct ReduceShape {
    u32 channels, piece;    // blocks, and elements per piece
};
constexpr ReduceShape reduce_shape(const LayerShape& s) {
    ReduceShape r{};
    const u64 replicated = reduce_part(reduce_elements(s), s.n_world), of_two = s.summed ? reduce_part(expert_elements(s), 2) : 0;
    const u64 part = replicated > of_two ? replicated : of_two;
    const u32 channels = s.stage ? 4 : 16, piece = s.stage ? 16384 : 4096;
    r.channels = max_of(1, min_of(channels, s.channels));
    const u64 share = reduce_round((part + r.channels - 1) / r.channels);
    r.piece = share < piece ? u32(share) : piece;
    return r;
}
// Pieces per channel and part.
constexpr u32 reduce_steps(const LayerShape& s, u64 elements, u32 parts) {
    const ReduceShape r = reduce_shape(s);
    const u64 stride = u64(r.piece) * r.channels;
    return u32((reduce_part(elements, parts) + stride - 1) / stride);
}
// Maximum number of steps of a PE in a pass; an expert in two parts has the most.
constexpr u64 max_sum_steps(const LayerShape& s) {
    return (s.summed ? u64(s.n_local) * reduce_steps(s, expert_elements(s), 2) : 0) + reduce_steps(s, reduce_elements(s), s.n_world);
}
// Buffers for the sums, each [n_world][channels][slots][piece] f32: received values and received sums; with a network also outgoing
// values, and [channels][slots][piece] of outgoing sums.
constexpr u64 reduce_area(const LayerShape& s) {
    const ReduceShape r = reduce_shape(s);
    return u64(r.channels) * REDUCE_SLOTS * r.piece * 4;
}
constexpr u64 all_reduce_bytes(const LayerShape& s) {
    if (!s.training || s.n_world == 1) return 0;
    return align_bytes(reduce_area(s) * (s.stage ? 3 * s.n_world + 1 : 2 * s.n_world));
}
// Signal words: [2][n_world][channels][slots], for values and for sums.
constexpr u32 all_reduce_signal_words(const LayerShape& s) {
    return s.training && s.n_world > 1 ? 2 * s.n_world * reduce_shape(s).channels * REDUCE_SLOTS : 0;
}

// ---- Launches.
constexpr u32 select_warps(const LayerShape& s) { return max_of(1, min_of(8, (64 << 10) / (8 * s.n_experts))); }
constexpr Launch route_launch(const LayerShape& s) {
    const u32 gemm = small_gemm_bytes(ROUTE_TOKENS, 1, s.router_parts);
    const u32 select = select_warps(s) * (s.n_experts + s.n_groups) * 4;
    return {max_of(1, max_of(route_blocks(s), route_spread(s))), ROUTE_THREADS, div_up(max_of(gemm, select), 16) * 16 + 1024, 0};
}
constexpr Launch take_routing_launch(const LayerShape& s) { return {max_of(1, route_blocks(s)), ROUTE_THREADS, 0, 0}; }
constexpr u32 PLAN_MASK_STRIDE = PLAN_TOKENS / 32 + 1;  // words of one expert's mask; odd, against bank conflicts
constexpr u32 plan_work_words(const LayerShape& s) {
    return max_of(min_of(max_of(s.held, s.max_local), PLAN_EXPERTS) * PLAN_MASK_STRIDE, 3 * s.max_local);
}
constexpr Launch plan_launch(const LayerShape& s) {
    const u32 words = plan_work_words(s) + 5 * s.n_pes + 2 * s.held + 2 + PLAN_TOKENS / 32;
    return {max_of(1, min_of(s.blocks, plan_segments(s))), PLAN_TOKENS, words * 4, 1};
}
constexpr Launch route_backward_launch(const LayerShape& s) {
    return {max_of(1, div_up(s.max_tokens, SCALE_TOKENS)), ROUTE_THREADS, 1024, 0};
}
constexpr Launch router_gradients_launch(const LayerShape& s) {
    const u32 items = grad_tiles(s) * grad_splits(s) + div_up(s.max_tokens, 64) * grad_tiles_n(s);
    return {max_of(1, items), ROUTE_THREADS, small_gemm_bytes(64, GRAD_PARTS, s.router_parts) + 1024, 0};
}
constexpr Launch all_reduce_launch(const LayerShape& s) {
    return {s.n_world > 1 ? reduce_shape(s).channels : 1, REDUCE_THREADS, 1024, 1};
}

}  // namespace aristos
