// Incoming rows: copies them from a source's window, or leaves this PE's own rows in place, and assigns positions to their slots.
#pragma once
#include "layout.h"

namespace aristos {

// Tables of one chunk of one source, in local memory.
struct ChunkTables {
    u32* row_start;
    u32* position;
    u32* expert;
    char* rows;  // copies of the chunk's rows, if keeps_rows
};
DEVICE ChunkTables chunk_tables(const Layer& l, u32 source, u32 index, u32 mode) {
    u64 chunk = u64(source) * l.shape.round_chunks + index, slots = u64(l.shape.chunk_rows) * l.sizes.max_slots;
    u8* rows = mode == MODE_GRADIENT ? l.received.grad : l.received.x;
    return {l.received.row_start + chunk * (l.shape.chunk_rows + 1), l.received.position + chunk * slots,
            l.received.expert + chunk * slots,
            reinterpret_cast<char*>(rows + chunk * l.shape.chunk_rows * l.sizes.row_bytes)};
}

// One thread. Assigns positions to the slots [first, end) of a row. False if the message is invalid. `slot(i, word, weight)` reads slot i
// of the chunk.
template <class Slot>
DEVICE bool assign_positions(const Layer& l, const ChunkTables& to, u32 source, u32 first, u32 end, const void* row, Slot slot) {
    const u32* counts = l.received.counts + u64(source) * l.shape.n_local;
    for (u32 i = first; i < end; i++) {
        u32 word;
        float weight;
        slot(i, word, weight);
        u32 expert = slot_expert(word), rank = slot_rank(word);
        if (expert >= l.shape.n_local || rank >= counts[expert]) return false;
        u32 position = slot_position(l, expert, batch_slot(l, source, expert, rank));
        to.position[i] = position;
        to.expert[i] = expert;
        l.batches.routed.weight[position] = weight;
        l.batches.routed.x_row[position] = row;
    }
    return true;
}

DEVICE u32* placed_rows(const Block& b, u32 source, u32 index) {
    return b.counters().placed + u64(source) * b.l.shape.round_chunks + index;
}
// One thread. Records the return-order number of row `in_chunk` of chunk `index` of the round. False if the number is out of range or
// already used.
DEVICE bool number_row(const Block& b, u32 source, u32 index, u32 in_chunk, u32 number) {
    const Layer& l = b.l;
    const Received& in = l.received;
    u32 first = in.first_chunk[source] * l.shape.chunk_rows, window = l.shape.round_chunks * l.shape.chunk_rows;
    u32 end = in.end_chunk[source] * l.shape.chunk_rows < in.rows[source] ? in.end_chunk[source] * l.shape.chunk_rows : in.rows[source];
    if (number < first || number >= end) return false;
    u32 at = number - first, bit = 1u << at % 32;
    if (dev::fetch_add(b.counters().numbered + u64(source) * ceil_div(window, 32) + at / 32, bit) & bit) return false;
    in.return_row[u64(source) * window + at] = index * l.shape.chunk_rows + in_chunk;
    return true;
}
// All threads, after the rows and slots of a chunk are stored. Adds each slot with `placed(i)` to its tile's count of arrived slots. Except
// with gradients, adds each row to the count of placed rows of its result chunk, which follows from the row's return-order number,
// `number(r)`.
template <class Number, class Placed>
DEVICE void count_arrived(Block& b, u32 source, const ChunkTables& t, u32 rows, u32 slots, Number number, Placed placed) {
    const Layer& l = b.l;
    dev::sync_block();
    for (u32 r = dev::thread(); b.step.mode != MODE_GRADIENT && r < rows; r += dev::threads())
        dev::fetch_add_acq_rel(placed_rows(b, source, number(r) / l.shape.chunk_rows - l.received.first_chunk[source]), 1u);
    for (u32 i = dev::thread(); i < slots; i += dev::threads())
        if (placed(i)) dev::fetch_add_acq_rel(b.counters().arrived + tile_of(l, t.expert[i], t.position[i]), 1u);
}

// Runs the arrival of a chunk of this PE's own rows, which stay in the layer's input. Except with gradients, the chunk arrives in two parts
// (`own_in_parts`). The first part contains the slots in tiles that hold own slots alone. The second part contains the other slots, which
// get positions only in the layout.
OUTLINE void arrive_own(Block& b, u32 index, bool second) {
    const Layer& l = b.l;
    const u32 me = l.shape.my_pe, row_bytes = l.sizes.row_bytes, chunk = l.received.first_chunk[me] + index;
    const u32 first_row = chunk * l.shape.chunk_rows, rows = chunk_count(l, l.plan.dest[me].rows, chunk);
    enter(b, PHASE_DISPATCH);
    const ChunkTables t = chunk_tables(l, me, index, b.step.mode);
    const u32* tokens = row_tokens(l, me) + first_row;
    const u32* starts = row_slots(l, me) + first_row;
    const u32* numbers = row_returns(l, me) + first_row;
    const u32 first_slot = starts[0], base = l.plan.dest[me].slot_base + first_slot;
    const char* x = static_cast<const char*>(b.pass.x);
    const char* grad = static_cast<const char*>(b.pass.grad_output);
    const bool gradient = b.step.mode == MODE_GRADIENT;
    auto placed = [&](u32 i) {
        u32 word = l.plan.slot_word[base + i];
        return gradient || (slot_rank(word) >= l.batches.own[slot_expert(word)]) == second;
    };
    for (u32 r = dev::thread(); r < rows; r += dev::threads()) {
        const u64 at = u64(tokens[r]) * row_bytes;
        const u32 first = starts[r] - first_slot, end = starts[r + 1] - first_slot;
        if (!gradient && !second) {
            t.row_start[r] = first;
            if (r + 1 == rows) t.row_start[rows] = end;
            (void)number_row(b, me, index, r, numbers[r]);
        }
        for (u32 i = first; i < end; i++) {
            if (!placed(i)) continue;
            if (gradient) {
                l.batches.routed.x_row[t.position[i]] = x + at;
                l.batches.routed.grad_row[t.position[i]] = grad + at;
                continue;
            }
            const u32 word = l.plan.slot_word[base + i], position = slot_position(l, slot_expert(word), slot_rank(word));
            t.position[i] = position;
            t.expert[i] = slot_expert(word);
            l.batches.routed.weight[position] = l.plan.slot_weight[base + i];
            l.batches.routed.x_row[position] = x + at;
        }
    }
    count_arrived(b, me, t, rows, starts[rows] - first_slot, [&](u32 r) { return numbers[r]; }, placed);
}

// For a chunk of an inter-node source: each row's first slot among the slots of all PEs of this host, and the member that owns each of
// these slots. The relay needs both to sum the results.
DEVICE u32* relay_starts(const Layer& l, u32 source, u32 index) {
    return l.received.relay_start + (u64(source) * l.shape.round_chunks + index) * (l.shape.chunk_rows + 1);
}
DEVICE u8* relay_members(const Layer& l, u32 source, u32 index) {
    return l.received.relay_member + (u64(source) * l.shape.round_chunks + index) * l.shape.chunk_rows * l.sizes.max_slots;
}
// Reads the slots of a chunk from an inter-node source. The chunk has slots of all PEs of the host; only this PE's slots get positions. The
// row words are already validated.
DEVICE bool arrive_relayed_slots(Block& b, u32 source, u32 chunk, u32 index, u32 rows, const u32* words, const ChunkTables& t) {
    const Layer& l = b.l;
    const u32 row_bytes = l.sizes.row_bytes, first = l.received.first_chunk[source];
    const u32* slots = words + rows;
    u32* starts = relay_starts(l, source, index);
    u8* members = relay_members(l, source, index);
    const u32 all = scan_block(b, rows, [&](u32 r) { return words[r] >> RETURN_BITS; }, [&](u32 r, u32 sum) { starts[r] = sum; });
    if (dev::thread() == 0) starts[rows] = all;
    dev::sync_block();
    auto mine = [&](u32 i) { return expert_member(l, source, slot_expert(slots[2 * i])) == l.shape.member; };
    bool ok = true;
    auto count = [&](u32 r) {
        u32 own = 0;
        for (u32 i = starts[r]; i < starts[r + 1]; i++) {
            ok = ok && slot_expert(slots[2 * i]) < l.shape.max_local;
            members[i] = u8(expert_member(l, source, slot_expert(slots[2 * i])));
            own += mine(i);
        }
        return own;
    };
    const u32 own = scan_block(b, rows, count, [&](u32 r, u32 sum) { t.row_start[r] = sum; });
    if (dev::thread() == 0) t.row_start[rows] = own;
    dev::sync_block();
    for (u32 r = dev::thread(); r < rows; r += dev::threads()) {
        u32 i = starts[r], need = 0;
        ok = assign_positions(l, t, source, t.row_start[r], t.row_start[r + 1], t.rows + u64(r) * row_bytes, [&](u32, u32& word, float& weight) {
                 while (!mine(i)) i++;
                 word = expert_here(l, source, slot_expert(slots[2 * i])) << RANK_BITS | slot_rank(slots[2 * i]);
                 weight = reinterpret_cast<const float*>(slots)[2 * i + 1];
                 need = word + 1 > need ? word + 1 : need;
                 i++;
             }) && ok;
        const u32 number = words[r] & ((1u << RETURN_BITS) - 1);
        dev::fetch_max(l.received.relay_need + u64(source) * l.shape.round_chunks + number / l.shape.chunk_rows - first, need);
    }
    return check_peer(b, !ok, source, WHAT_ROWS, rows, all, chunk);
}

// Reads and validates the slots of a chunk, which follow the rows in `message`.
DEVICE bool arrive_slots(Block& b, u32 source, u32 chunk, u32 index, u32 rows, const char* message, const ChunkTables& t) {
    const Layer& l = b.l;
    u32 row_bytes = l.sizes.row_bytes;
    const u32* words = reinterpret_cast<const u32*>(message + u64(rows) * row_bytes);
    const u32* slots = words + rows;
    const char* kept = keeps_rows(l.shape) ? t.rows : message;
    bool ok = true;
    for (u32 r = dev::thread(); r < rows; r += dev::threads()) {
        u32 count = words[r] >> RETURN_BITS;
        ok = ok && count > 0 && count <= l.sizes.max_slots;
        ok = number_row(b, source, index, r, words[r] & ((1u << RETURN_BITS) - 1)) && ok;
    }
    if (!check_peer(b, !ok, source, WHAT_ROWS, rows, 0, chunk)) return false;
    if (relayed(l, source)) return arrive_relayed_slots(b, source, chunk, index, rows, words, t);
    u32 all = scan_block(b, rows, [&](u32 r) { return words[r] >> RETURN_BITS; }, [&](u32 r, u32 sum) { t.row_start[r] = sum; });
    if (dev::thread() == 0) t.row_start[rows] = all;
    dev::sync_block();
    for (u32 r = dev::thread(); r < rows; r += dev::threads()) {
        ok = assign_positions(l, t, source, t.row_start[r], t.row_start[r + 1], kept + u64(r) * row_bytes,
                       [&](u32 i, u32& word, float& weight) {
                           word = slots[2 * i];
                           weight = reinterpret_cast<const float*>(slots)[2 * i + 1];
                       }) && ok;
    }
    return check_peer(b, !ok, source, WHAT_ROWS, rows, all, chunk);
}

// In recomputation: signals to `source` that the chunk's rows are copied, so that the window is free for the gradients. The acknowledgement
// carries no data and does not wait for GEMMs.
DEVICE void acknowledge(Block& b, u32 source, u32 chunk) {
    const Layer& l = b.l;
    if (b.step.mode != MODE_RECOMPUTE) return;
    dev::sync_block();
    if (dev::thread() != 0) return;
    u64 value = result_stamp(stamp(b.pass, stamp_step(b.step.round, MODE_RECOMPUTE, true)), true);
    signal_peer(l, result_signal(l, l.shape.my_pe, chunk), value, source);
    b.state.stats.signals++;
}
// Marks a relayed chunk as consumed by this PE. The relay acknowledges it and returns its credit once all PEs of the host have consumed it.
DEVICE void ack_consumed(Block& b, u32 source, u32 index, u64 value) {
    const Layer& l = b.l;
    if (index >= consumed_acks_expected(b, l.received.end_chunk[source] - l.received.first_chunk[source])) return;
    dev::sync_block();
    if (dev::thread() != 0) return;
    signal_peer(l, consumed_signal(l, l.shape.member, source, index), value, relay_of(l, source));
    b.state.stats.signals++;
}
// After the rows are copied: returns the credit for the chunk's buffer to `source`, if a later chunk of this round needs it.
DEVICE void return_credit(Block& b, u32 source, u32 index, u64 value) {
    const Layer& l = b.l;
    if (index + l.shape.window_chunks >= l.received.end_chunk[source] - l.received.first_chunk[source]) return;
    dev::sync_block();
    if (dev::thread() != 0) return;
    signal_peer(l, credit_signal(l, l.shape.my_pe, index), value, source);
    b.state.stats.signals++;
}

// Runs the arrival of chunk `index` of the round from the peer `source`, whose signal has arrived.
OUTLINE bool arrive_chunk(Block& b, u32 source, u32 index) {
    const Layer& l = b.l;
    const Received& in = l.received;
    u32 chunk = in.first_chunk[source] + index;
    enter(b, PHASE_DISPATCH);
    acquire_network(l);
    u32 rows = chunk_count(l, in.rows[source], chunk);
    ChunkTables t = chunk_tables(l, source, index, b.step.mode);
    const char* message = reinterpret_cast<const char*>(incoming(l, source, l.symmetric.window + chunk_offset(l, source, l.shape.my_pe, index)));
    u32 row_bytes = l.sizes.row_bytes;
    if (b.step.mode == MODE_GRADIENT) {
        for (u32 r = dev::thread(); r < rows; r += dev::threads())
            for (u32 i = t.row_start[r]; i < t.row_start[r + 1]; i++)
                l.batches.routed.grad_row[t.position[i]] = t.rows + u64(r) * row_bytes;
    } else if (!arrive_slots(b, source, chunk, index, rows, message, t)) {
        return false;
    }
    if (keeps_rows(l.shape)) {
        for (u32 r = dev::warp(); r < rows; r += dev::threads() / 32)
            if (t.row_start[r] < t.row_start[r + 1]) copy_warp(t.rows + u64(r) * row_bytes, message + u64(r) * row_bytes, row_bytes);
    }
    const u32* words = reinterpret_cast<const u32*>(message + u64(rows) * row_bytes);
    count_arrived(b, source, t, rows, t.row_start[rows], [&](u32 r) { return words[r] & ((1u << RETURN_BITS) - 1); }, [](u32) { return true; });
    const u64 value = stamp(b.pass, stamp_step(b.step.round, b.step.mode, *in.overflow));
    if (relayed(l, source)) {
        if (!is_relay_of(l, source)) {
            u32 read = 0;
            for (u32 r = dev::thread(); r < rows; r += dev::threads()) read += t.row_start[r] < t.row_start[r + 1];
            if (read) dev::shared_add(&b.state.stats.relay_bytes, u64(read) * row_bytes);
        }
        return ack_consumed(b, source, index, value), true;
    }
    acknowledge(b, source, chunk);
    return_credit(b, source, index, value);
    return true;
}

// Runs the arrival of SHARED_TILES tiles of the shared expert, whose rows are this PE's tokens.
OUTLINE bool arrive_shared(Block& b, u32 item) {
    const Layer& l = b.l;
    enter(b, PHASE_DISPATCH);
    u32 tile_m = l.shape.tile_m, first_tile = item * SHARED_TILES;
    u32 first = first_tile * tile_m, end = first + SHARED_TILES * tile_m;
    if (end > b.pass.tokens) end = b.pass.tokens;
    const char* x = static_cast<const char*>(b.pass.x);
    const char* grad = static_cast<const char*>(b.pass.grad_output);
    for (u32 t = first + dev::thread(); t < end; t += dev::threads()) {
        l.batches.shared.x_row[t] = x + u64(t) * l.sizes.row_bytes;
        if (b.step.mode == MODE_GRADIENT) l.batches.shared.grad_row[t] = grad + u64(t) * l.sizes.row_bytes;
    }
    dev::sync_block();
    u32 tile = dev::thread(), begin = first + tile * tile_m;
    if (tile < SHARED_TILES && begin < end) {
        u32 rows = end - begin < tile_m ? end - begin : tile_m;
        dev::fetch_add_acq_rel(b.counters().arrived + l.batches.own_tile[l.shape.n_local] + first_tile + tile, rows);
    }
    return true;
}

}  // namespace aristos
