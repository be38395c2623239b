// Memory of a layer, on the host: sizes, addresses, launches. No CUDA calls; dereferences only the caller's structs.
#include "memory.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "launch.h"

namespace aristos {
namespace {

constexpr u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }
constexpr u64 align(u64 a, u64 to) { return ceil_div(a, to) * to; }

// Upper bound of u32 offsets and counts in the tables.
constexpr u64 LIMIT = 1u << 31;

}  // namespace

int check_shape(const LayerShape& s) {
    // In field order, so that the number identifies the field. A field is checked against earlier ones.
    int field = 0;
    auto bad = [&](bool wrong) {
        ++field;
        return wrong;
    };
    auto flag = [](u32 v) { return v > 1; };
    if (bad(s.my_pe >= s.n_pes)) return field;
    if (bad(s.n_pes == 0 || s.n_pes > MAX_PES)) return field;
    if (bad(s.world_pe >= s.n_world)) return field;
    if (bad(s.n_world < s.n_pes || s.n_world > MAX_PES)) return field;
    if (bad(s.hidden == 0 || s.hidden % 8 || s.hidden > 1u << 20)) return field;
    if (bad(s.intermediate == 0 || s.intermediate % 8 || s.intermediate > 1u << 20)) return field;
    if (bad(s.shared_intermediate % 8 || s.shared_intermediate > 1u << 20)) return field;
    if (bad(flag(s.shared_gate) || (s.shared_gate && !s.shared_intermediate))) return field;
    if (bad(s.n_experts == 0 || s.n_experts > MAX_EXPERTS)) return field;
    if (bad(s.n_local > MAX_LOCAL || s.n_local > s.n_experts)) return field;
    if (bad(s.max_local == 0 || s.max_local > MAX_LOCAL || s.max_local < s.n_local)) return field;
    if (bad(s.held < s.n_experts || s.held > s.n_pes * s.max_local)) return field;
    if (bad(s.hosts == 0 || s.hosts > s.n_pes)) return field;
    if (bad(flag(s.relays))) return field;
    if (bad(s.member >= s.members)) return field;
    if (bad(s.members == 0 || s.members > s.n_pes)) return field;
    if (bad(s.most_members < s.members || s.most_members > MAX_MEMBERS)) return field;
    if (bad(s.served >= s.n_pes)) return field;
    if (bad(s.windows >= s.n_pes)) return field;
    if (bad(s.top_k == 0 || s.top_k > s.n_experts || s.top_k > MAX_TOP_K)) return field;
    if (bad(s.dtype > DTYPE_F16)) return field;
    if (bad(flag(s.gated))) return field;
    if (bad(s.activation > ACT_RELU)) return field;
    if (bad(flag(s.bias))) return field;
    if (bad(flag(s.shared_gated))) return field;
    if (bad(s.shared_activation > ACT_RELU)) return field;
    if (bad(flag(s.shared_bias))) return field;
    if (bad(s.router_parts < 1 || s.router_parts > 3)) return field;
    if (bad(s.scoring > SCORING_SIGMOID)) return field;
    if (bad(flag(s.renormalise))) return field;
    if (bad(s.n_groups && s.n_experts % s.n_groups)) return field;
    if (bad(!route_shape_ok(s))) return field;
    if (bad(flag(s.correction_bias))) return field;
    if (bad(!(s.scaling == s.scaling))) return field;
    if (bad(!(s.aux_loss_coef == s.aux_loss_coef))) return field;
    if (bad(!(s.z_loss_coef == s.z_loss_coef))) return field;
    if (bad(!(s.capacity_factor >= 0))) return field;
    if (bad(s.max_tokens == 0 || s.max_tokens > MAX_RANK || u64{s.max_tokens} * s.top_k >= LIMIT / 8)) return field;
    u64 max_slots = std::min<u64>(s.top_k, s.max_local);
    if (bad(s.chunk_rows == 0 || s.chunk_rows > 1u << 16)) return field;
    u64 max_chunks = ceil_div(s.max_tokens, s.chunk_rows);
    if (bad(s.round_chunks == 0 || s.round_chunks > max_chunks || 2 * max_chunks + 2 >= 1u << 24)) return field;
    if (bad(s.window_chunks == 0 || s.window_chunks > s.round_chunks)) return field;
    if (bad(s.round_slots < s.chunk_rows * max_slots || u64{s.round_slots} * s.n_pes >= LIMIT)) return field;
    if (bad(flag(s.training))) return field;
    if (bad(flag(s.stage))) return field;
    if (bad(flag(s.bulk))) return field;
    if (bad(s.blocks == 0 || s.blocks > 1u << 16)) return field;
    if (bad(s.channels == 0 || s.channels > 1u << 16)) return field;
    if (bad(flag(s.summed) || (s.summed && s.n_world == 1))) return field;
    if (bad(s.tile_m == 0 || s.tile_m % 16)) return field;
    if (bad(s.tile_n == 0 || s.tile_n % 16)) return field;
    if (bad(flag(s.lane_stores))) return field;
    if (bad(s.wait_limit_ns == 0)) return field;
    return 0;
}

Sizes layer_sizes(const LayerShape& s, bool hopper) {
    Sizes z{};
    z.elem_bytes = 2;
    z.row_bytes = s.hidden * z.elem_bytes;
    z.max_slots = static_cast<u32>(std::min<u64>(s.top_k, s.max_local));
    z.max_chunks = static_cast<u32>(ceil_div(s.max_tokens, s.chunk_rows));
    z.has_losses = has_losses(s);
    z.header_counts_bytes = static_cast<u32>(align((HEADER_WORDS + u64{s.max_local}) * 4, 8));
    u64 loss_bytes = z.has_losses ? (2 + 2 * u64{s.n_experts}) * 8 : 0;
    z.header_bytes = static_cast<u32>(align(z.header_counts_bytes + loss_bytes, 16));
    // Rows, then a word per row, then (word, weight) per slot.
    z.chunk_pitch = static_cast<u32>(align(u64{s.chunk_rows} * (z.row_bytes + 4 + 8 * z.max_slots), 16));
    z.return_pitch = static_cast<u32>(align(u64{s.chunk_rows} * (z.row_bytes + 4 * z.max_slots), 16));
    // A PE sends at most tokens * targets rows, and each destination's last chunk may be partial.
    u64 targets = std::min<u64>(s.top_k, s.hosts);
    z.return_chunks = static_cast<u32>(
        std::min<u64>(u64{s.hosts} * z.max_chunks, u64{s.max_tokens} * targets / s.chunk_rows + s.hosts));
    u64 slots = u64{s.n_pes} * s.round_slots;
    u64 shared_tiles = s.shared_intermediate ? ceil_div(s.max_tokens, s.tile_m) : 0;
    z.max_tiles = static_cast<u32>(slots / s.tile_m + s.n_local + shared_tiles + 1);
    z.send_groups = s.stage ? static_cast<u32>(ceil_div(u64{s.n_pes} * s.round_chunks, s.window_chunks)) : 0;
    z.hopper = hopper;
    return z;
}

namespace {

void place_store(SlotStore& store, Bump& local, const LayerShape& s, const Sizes& z, u64 capacity, u64 intermediate,
                 bool gated) {
    store.capacity = static_cast<u32>(capacity);
    store.intermediate = static_cast<u32>(intermediate);
    store.d_weight_stride = static_cast<u32>(ceil_div(intermediate, s.tile_n));
    u64 wide = capacity * intermediate * z.elem_bytes;
    local.allocate(store.weight, capacity);
    local.allocate(store.gate_up, s.training ? (gated ? 2 : 1) * wide : 0);
    local.allocate(store.h, wide);
    local.allocate(store.y, capacity * z.row_bytes);
    local.allocate(store.d_weight, s.training ? capacity * store.d_weight_stride : 0);
    local.allocate(store.slot_maps, SLOT_MAPS * SLOT_MAP_BYTES);
    if (!z.hopper || !capacity || s.lane_stores) store.slot_maps = nullptr;
}

// Lists the arrays for which a store needs maps.
void list_slot_arrays(const SlotStore& store, const LayerShape& s, const Sizes& z, bool gated, SlotArray* to) {
    if (!store.slot_maps) return;
    const u64 at = reinterpret_cast<u64>(store.slot_maps), gate_up = reinterpret_cast<u64>(store.gate_up);
    const u64 half = u64{store.intermediate} * z.elem_bytes, wide = gated ? 2 * half : half;
    auto list = [&](SlotMap map, u32 box_rows, u64 base, u64 row_stride_bytes, u32 cols) {
        to[map] = {at + map * SLOT_MAP_BYTES, base, row_stride_bytes, store.capacity, cols, box_rows, 0};
    };
    auto list_both = [&](SlotMap result, SlotMap operand, u64 base, u64 row_stride_bytes) {
        list(result, RESULT_BOX_ROWS, base, row_stride_bytes, store.intermediate);
        list(operand, OPERAND_BOX_ROWS, base, row_stride_bytes, store.intermediate);
    };
    if (s.training && gated) list_both(RESULT_GATE, OPERAND_GATE, gate_up, wide);
    if (s.training) list_both(RESULT_UP, OPERAND_UP, gated ? gate_up + half : gate_up, wide);
    list_both(RESULT_H, OPERAND_H, reinterpret_cast<u64>(store.h), half);
    list(RESULT_Y, RESULT_BOX_ROWS, reinterpret_cast<u64>(store.y), z.row_bytes, s.hidden);
}

}  // namespace

void place_layer(Layer& l, Bump& local, Bump& symmetric, u64& zero_bytes, u64& signals, u64& signal_bytes) {
    const LayerShape& s = l.shape;
    const Sizes& z = l.sizes;
    u64 pes = s.n_pes, tokens = s.max_tokens, k = s.top_k, batches = s.n_local + 1;
    u64 round_rows = u64{s.round_chunks} * s.chunk_rows;
    l.symmetric_base = symmetric.base;

    local.allocate(l.control, 1);
    l.error = reinterpret_cast<ErrorRecord*>(l.control);
    for (int set = 0; set < 2; ++set) {
        Counters& c = l.counters[set];
        u64 begin = local.used;
        for (u32** word : {&c.own, &c.send, &c.headers_read, &c.shared, &c.plain, &c.finals, &c.arrivals, &c.results, &c.own_known, &c.layout, &c.headers})
            local.allocate(*word, 1);
        local.allocate(c.tasks, TASK_QUEUES);
        local.allocate(c.relays, 1);
        for (u32** words : {&c.header_passed, &c.passed, &c.consumed}) local.allocate(*words, s.relays ? pes : 0);
        for (u32** words : {&c.arrival, &c.result, &c.returnable}) local.allocate(*words, pes);
        local.allocate(c.sent, z.send_groups);
        local.allocate(c.returned, z.send_groups);
        local.allocate(c.blocked_on, pes);
        local.allocate(c.return_done, pes * s.round_chunks);
        local.allocate(c.placed, pes * s.round_chunks);
        local.allocate(c.numbered, pes * ceil_div(round_rows, 32));
        local.allocate(c.arrived, z.max_tiles);
        local.allocate(c.first_done, z.max_tiles);
        local.allocate(c.second_done, z.max_tiles);
        local.allocate(c.batch_done, batches);
        local.allocate(c.gradients_done, batches);
        l.counters_begin[set] = c.own;
        l.counters_words = static_cast<u32>((local.used - begin) / 4);
    }
    // Zeroed, so that a slot that a faulty peer never fills has a null row.
    u64 slots = pes * s.round_slots;
    local.allocate(l.batches.routed.x_row, slots);
    local.allocate(l.batches.routed.grad_row, slots);
    local.allocate(l.batches.shared.x_row, s.shared_intermediate ? tokens : 0);
    local.allocate(l.batches.shared.grad_row, s.shared_intermediate ? tokens : 0);
    Routing& r = l.routing;
    local.allocate(r.done, route_blocks(s));
    local.allocate(l.sums, s.training ? reduce_shape(s).channels : 0);
    local.allocate(l.sum_waits, s.training && s.summed ? u64{reduce_shape(s).channels} * 2 * s.n_world : 0);
    local.allocate(l.channels_done, s.training && s.stage && s.n_world > 1 ? 2 * max_sum_steps(s) : 0);
    zero_bytes = local.used;

    local.allocate(r.logits, tokens * s.n_experts);
    local.allocate(r.lse, tokens);
    local.allocate(r.chosen, tokens * k);
    local.allocate(r.routing_weights, tokens * k);
    local.allocate(r.columns, tokens * k);
    local.allocate(r.shared_weight, tokens);
    local.allocate(r.d_weights, s.training ? tokens * k : 0);
    local.allocate(r.d_logits, s.training ? tokens * s.n_experts : 0);
    local.allocate(r.d_shared_weight, s.training ? tokens : 0);

    Plan& p = l.plan;
    local.allocate(p.dest, pes);
    local.allocate(p.row_token, pes * tokens);
    local.allocate(p.token_row, pes * tokens);
    local.allocate(p.row_slot, pes * (tokens + 1));
    local.allocate(p.round_chunk, pes * (z.max_chunks + 1));
    local.allocate(p.row_return, pes * tokens);
    local.allocate(p.return_slot, s.training ? pes * tokens : 0);
    local.allocate(p.slot_word, tokens * k);
    local.allocate(p.slot_weight, tokens * k);
    local.allocate(p.slot_choice, tokens * k);
    local.allocate(p.scratch, plan_scratch_bytes(s));
    local.allocate(l.route_scratch, route_scratch_bytes(s));

    u64 sums = z.has_losses ? 2 + 2 * u64{s.n_experts} : 0;
    local.allocate(l.losses.mine, sums);
    local.allocate(l.losses.all, sums);

    Received& in = l.received;
    local.allocate(in.overflow, 1);
    local.allocate(in.world_rounds, 1);
    local.allocate(in.my_rounds, 1);
    local.allocate(in.rounds, pes);
    local.allocate(in.rows, pes);
    local.allocate(in.first_chunk, pes);
    local.allocate(in.end_chunk, pes);
    local.allocate(in.return_chunk, pes);
    local.allocate(in.counts, pes * s.n_local);
    local.allocate(in.first, pes * s.n_local);
    local.allocate(in.before, pes * s.n_local);
    local.allocate(in.row_start, pes * s.round_chunks * (s.chunk_rows + 1));
    local.allocate(in.return_row, pes * round_rows);
    local.allocate(in.return_slot, s.training ? pes * round_rows : 0);
    local.allocate(in.position, pes * round_rows * z.max_slots);
    local.allocate(in.expert, pes * round_rows * z.max_slots);
    local.allocate(in.peer_overflow, pes);
    local.allocate(in.relay_start, s.relays ? pes * s.round_chunks * (s.chunk_rows + 1) : 0);
    local.allocate(in.relay_member, s.relays ? pes * round_rows * z.max_slots : 0);
    local.allocate(in.relay_need, s.relays ? pes * s.round_chunks : 0);
    local.allocate(in.x, keeps_rows(s) ? pes * round_rows * z.row_bytes : 0);
    local.allocate(in.grad, s.training ? pes * round_rows * z.row_bytes : 0);

    Batches& b = l.batches;
    local.allocate(b.total, batches);
    local.allocate(b.own, batches);
    local.allocate(b.own_base, batches);
    local.allocate(b.own_tile, batches);
    local.allocate(b.rest_base, s.n_local);
    local.allocate(b.rest_tile, s.n_local);
    local.allocate(b.rest_order, z.max_tiles);
    local.allocate(b.rest_due, z.max_tiles);
    local.allocate(b.expert_rows, s.n_local);
    place_store(b.routed, local, s, z, slots, s.intermediate, s.gated);
    place_store(b.shared, local, s, z, s.shared_intermediate ? tokens : 0, s.shared_intermediate, s.shared_gated);

    Queue& q = l.queue;
    for (u32** tasks : {&q.tasks[OWN_FIRST], &q.tasks[OWN_SECOND]}) local.allocate(*tasks, batches + 1);
    for (u32** tasks : {&q.tasks[REST_FIRST], &q.tasks[REST_SECOND]}) local.allocate(*tasks, batches);
    local.allocate(q.tasks[GRADIENT_TASKS], GRADIENTS * batches + 1);
    for (u32** word : {&q.arrivals, &q.results, &q.most_results, &q.relays}) local.allocate(*word, 1);
    local.allocate(q.plain_end, PLAIN_ITEMS);
    local.allocate(q.finals, 1);
    local.allocate(q.empty, batches);

    local.allocate(l.stats, 1);
    local.allocate(l.block_stats, s.blocks);
    local.allocate(l.spans, MAX_SPANS);

    Symmetric& y = l.symmetric;
    const u64 world = s.n_world;
    symmetric.allocate(y.all_reduce, all_reduce_bytes(s));
    symmetric.allocate(y.capacity, s.capacity_factor > 0 ? 2 * world * s.n_experts : 0);
    symmetric.allocate(y.losses, gathers_losses(s) ? 2 * world * sums : 0);
    signals = symmetric.used;
    symmetric.allocate(y.all_reduce_signal, all_reduce_signal_words(s));
    symmetric.allocate(y.capacity_signal, world);
    symmetric.allocate(y.losses_signal, world);
    symmetric.allocate(y.header_signal, 3 * pes);
    symmetric.allocate(y.chunk_signal, pes * s.round_chunks);
    symmetric.allocate(y.credit_signal, pes * s.round_chunks);
    symmetric.allocate(y.result_signal, pes * z.max_chunks);
    symmetric.allocate(y.barrier_signal, 3 * pes);
    symmetric.allocate(y.consumed_signal, s.relays ? u64{s.most_members} * pes * s.round_chunks : 0);
    symmetric.allocate(y.part_signal, s.relays ? u64{s.most_members} * pes * s.round_chunks : 0);
    symmetric.allocate(y.part_credit, s.relays ? pes * s.round_chunks : 0);
    symmetric.allocate(y.passes, 2);
    signal_bytes = symmetric.used - signals;
    symmetric.allocate(y.header, 3 * pes * z.header_bytes);
    symmetric.allocate(y.window, u64{s.relays ? s.windows : s.n_pes - 1} * s.window_chunks * z.chunk_pitch);
    symmetric.allocate(y.returns, u64{z.return_chunks} * z.return_pitch);
    symmetric.allocate(y.parts, s.relays ? u64{s.most_members - 1} * s.served * PART_BUFFERS * z.return_pitch : 0);
    symmetric.allocate(y.header_stage, s.stage ? 3 * pes * z.header_bytes : 0);
    symmetric.allocate(y.chunk_stage, s.stage ? u64{STAGE_GROUPS} * s.window_chunks * z.chunk_pitch : 0);
    symmetric.allocate(y.result_stage, s.stage ? u64{STAGE_GROUPS} * s.window_chunks * z.return_pitch : 0);
}

}  // namespace aristos

extern "C" {
// For the host: row `i` of launch.h's table of persistent kernels, null past the end.
const aristos::TileLaunch* aristos_tile(aristos::u32 i) { return i < aristos::N_TILES ? aristos::TILES + i : nullptr; }
// Dynamic shared memory per block of the default Ampere kernels, bytes.
extern const aristos::u32 aristos_ampere_shared_bytes = aristos::TILES[0].shared_bytes;
}

extern "C" int aristos_layer(const aristos::LayerShape* shape, const aristos::Tables* tables, aristos::u64 local_base,
                             aristos::u64 symmetric_base, void* layer, aristos::LayerInfo* info) {
    using namespace aristos;
    if (int field = check_shape(*shape)) return field;
    Layer l{};
    l.shape = *shape;
    l.tables = *tables;
    l.sizes = layer_sizes(*shape, tables->tensor_maps != nullptr);
    Bump local{local_base}, symmetric{symmetric_base};
    u64 zero_bytes = 0, signals = 0, signal_bytes = 0;
    place_layer(l, local, symmetric, zero_bytes, signals, signal_bytes);

    auto address = [](const void* p) { return reinterpret_cast<u64>(p); };
    *info = LayerInfo{};
    info->layer_bytes = sizeof(Layer);
    info->local_bytes = local.used;
    info->symmetric_bytes = symmetric.used;
    info->signals = symmetric_base + signals;
    info->signal_bytes = signal_bytes;
    info->local_zero = local_base;
    info->local_zero_bytes = zero_bytes;
    info->chosen = address(l.routing.chosen);
    info->routing_weights = address(l.routing.routing_weights);
    info->columns = address(l.routing.columns);
    info->expert_rows = address(l.batches.expert_rows);
    info->loss_sums = address(l.losses.all);
    info->stats = address(l.stats);
    info->error = address(l.error);
    info->spans = address(l.spans);
    info->span_count = address(l.control) + offsetof(ControlWords, span_count);
    layer_launches(l, info->launches);
    list_slot_arrays(l.batches.routed, *shape, l.sizes, shape->gated, info->slot_arrays);
    list_slot_arrays(l.batches.shared, *shape, l.sizes, shape->shared_gated, info->slot_arrays + SLOT_MAPS);
    if (layer) std::memcpy(layer, &l, sizeof l);
    return 0;
}

extern "C" aristos::u32 aristos_sum_steps(const aristos::LayerShape* shape, aristos::u32 parts, aristos::u32 replicated) {
    using namespace aristos;
    return reduce_steps(*shape, replicated ? reduce_elements(*shape) : expert_elements(*shape), parts);
}
