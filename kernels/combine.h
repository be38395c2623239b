// Results returned to their sources, and the sums over PEs.
#pragma once
#include "arrive.h"
#include "epilogue.h"

namespace aristos {

// One warp. sum.v[k] += weight * piece (piece + 32 k) of the row, for k in [0, SUM_DEPTH). A piece has 8 elements; `piece` is the lane's
// first.
constexpr u32 SUM_DEPTH = 4;
struct RowSum { float v[SUM_DEPTH][8]; };
template <class T> DEVICE void add_row(RowSum& sum, const char* row, u32 piece, u32 pieces, float weight) {
    Vec16 in[SUM_DEPTH];
    // Initialised on every path: the compiler treats a register that a load sets conditionally as live from the start of the kernel.
    UNROLL for (u32 k = 0; k < SUM_DEPTH; k++) in[k] = {{0, 0, 0, 0}};
    UNROLL for (u32 k = 0; k < SUM_DEPTH; k++)
        if (piece + 32 * k < pieces) in[k] = dev::load16(row + u64(piece + 32 * k) * 16);
    UNROLL for (u32 k = 0; k < SUM_DEPTH; k++) {
        if (piece + 32 * k >= pieces) continue;
        float v[8];
        unpack8<T>(in[k], v);
        UNROLL for (u32 i = 0; i < 8; i++) sum.v[k][i] += weight * v[i];
    }
}
DEVICE void clear(RowSum& sum) {
    UNROLL for (u32 k = 0; k < SUM_DEPTH; k++)
        UNROLL for (u32 i = 0; i < 8; i++) sum.v[k][i] = 0.0f;
}

DEVICE float sum_warp(float v) {
    UNROLL for (int d = 16; d > 0; d /= 2) v += dev::shfl_xor(v, d);
    return v;
}

// One warp. The gradient of a slot's weight: the tiles' parts of <q, h>, added in a fixed order, plus <dY, down bias>.
template <class T> DEVICE float weight_gradient(const Layer& l, u32 batch, u32 position) {
    const SlotStore& store = store_of(l, batch);
    const float* parts = store.d_weight + u64(position) * store.d_weight_stride;
    u32 tiles = tiles_across(l, BACKWARD_DOWN, batch);
    float sum = 0.0f;
    for (u32 i = dev::lane(); i < tiles; i += 32) sum += parts[i];
    if (has_bias(l, batch)) {
        const float* bias = mlp_weights(l, batch).down_bias;
        const char* row = static_cast<const char*>(store.grad_row[position]);
        for (u32 piece = dev::lane(); piece < l.shape.hidden / 8; piece += 32) {
            float v[8];
            unpack8<T>(dev::load16(row + u64(piece) * 16), v);
            UNROLL for (u32 i = 0; i < 8; i++) sum += v[i] * bias[piece * 8 + i];
        }
    }
    return sum_warp(sum);
}

// ---- Results for `source`: chunk `index` of the round, in return order.

// A row of the chunk; its slots are [first, end) of the tables.
struct ReturnRow {
    ChunkTables t;
    u32 first, end;
    u32 row;  // in the round
};
DEVICE ReturnRow return_row(const Block& b, u32 source, u32 number) {
    const LayerShape& s = b.l.shape;
    u32 row = b.l.received.return_row[u64(source) * s.round_chunks * s.chunk_rows + number];
    ChunkTables t = chunk_tables(b.l, source, row / s.chunk_rows, b.step.mode);
    return {t, t.row_start[row % s.chunk_rows], t.row_start[row % s.chunk_rows + 1], row};
}
DEVICE bool tile_computed(const Block& b, u32 expert, u32 position) {
    u32 tasks = tiles_across(b.l, second_kind(b.step.mode), expert);
    return counter_reached(b.counters().second_done + tile_of(b.l, expert, position), tasks);
}
// One thread. Whether a counter of this PE has reached `least`. If not and `note` is set, remembers the counter as the one that blocks
// the results for `source`, so that polling a blocked source costs two loads.
DEVICE bool poll_dependency(const Block& b, u32 source, bool note, const u32* word, u32 least) {
    if (counter_reached(word, least)) return true;
    if (note) dev::store_relaxed(b.counters().blocked_on + source, u64(word - b.l.counters_begin[b.set]) << 32 | least);
    return false;
}
// Whether the dependency that poll_dependency recorded for `source` is still unmet. The dependency may be of an earlier chunk: chunks
// become ready in order, so it blocks the later chunks, too.
DEVICE bool is_blocked(const Block& b, u32 source) {
    const u64 blocked_on = dev::load_relaxed(b.counters().blocked_on + source);
    return dev::load_relaxed(b.l.counters_begin[b.set] + (blocked_on >> 32)) < u32(blocked_on);
}
// One thread. Whether the slots of `source` in a batch are computed: those up to the slot at `position`, or all of them if `position` is
// NONE.
DEVICE bool slots_computed(const Block& b, u32 source, u32 expert, u32 position, bool note) {
    const Layer& l = b.l;
    const u64 at = u64(source) * l.shape.n_local + expert;
    const u32 count = l.received.counts[at], tile_m = l.shape.tile_m;
    for (u32 rank = 0; rank < count;) {
        const u32 slot = batch_slot(l, source, expert, rank), tile = tile_of(l, expert, slot_position(l, expert, slot));
        if (!poll_dependency(b, source, note, b.counters().second_done + tile, tiles_across(l, second_kind(b.step.mode), expert))) return false;
        if (position != NONE && tile == tile_of(l, expert, position)) return true;
        rank += is_reversed(l, source) ? slot % tile_m + 1 : tile_m - slot % tile_m;
    }
    return true;
}
DEVICE u64 arrived_stamp(const Block& b) { return stamp(b.pass, stamp_step(b.step.round, b.step.mode, *b.l.received.overflow)); }

// One thread. Whether chunk `index` of the results for an inter-node source can be summed. If this PE is the source's relay, the other
// PEs' partial results must have arrived; if not, this PE's buffer at the relay must be free.
template <class Missing> DEVICE bool relay_parts_arrived(const Block& b, u32 source, u32 index, Missing missing) {
    const Layer& l = b.l;
    const u64 value = arrived_stamp(b);
    if (!is_relay_of(l, source)) {
        if (index < PART_BUFFERS || ARISTOS_FAULT(NO_PART_CREDIT)) return true;
        const u32 before = index - PART_BUFFERS;
        return signal_arrived(part_credit(l, source, before), {relay_of(l, source), WHAT_CREDIT, PHASE_COMBINE, value, before}, missing);
    }
    for (u32 m = 0; m < l.shape.members; m++) {
        if (m == l.shape.member) continue;
        if (!signal_arrived(part_signal(l, m, source, index), {member_pe(l, m), WHAT_RESULTS, PHASE_COMBINE, value, index}, missing)) return false;
    }
    return true;
}
// One thread. Whether the results of chunk `index` of the round, in return order, can be summed and put. The chunk's staging slot must be
// free, its rows must have positions, and all slots of the source up to those of its last row must be computed. `note`: see
// poll_dependency.
DEVICE bool return_ready(const Block& b, u32 source, u32 index, bool note) {
    const Layer& l = b.l;
    const Received& in = l.received;
    bool slot_free =
        !returns_inter_node(l, source) ||
        stage_slot_free(b.counters().returned, group_message(l, l.tables.inter_node_returns, source, index, *l.queue.most_results));
    if (!slot_free || in.first_chunk[source] + index >= in.end_chunk[source]) return slot_free;
    u32 rows = chunk_count(l, in.rows[source], in.first_chunk[source] + index);
    u32 parts = source == l.shape.my_pe && own_in_parts(b.step) ? 2 : 1;
    if (b.step.mode == MODE_FORWARD && !poll_dependency(b, source, note, placed_rows(b, source, index), rows * parts)) return false;
    u32 expert, until;
    if (relayed(l, source)) {
        if (!relay_parts_arrived(b, source, index, IgnoreMissing())) return false;
        const u32 need = dev::load_relaxed(in.relay_need + u64(source) * l.shape.round_chunks + index);
        if (need == 0) return true;
        expert = slot_expert(need - 1), until = slot_position(l, expert, batch_slot(l, source, expert, slot_rank(need - 1)));
    } else {
        ReturnRow last = return_row(b, source, index * l.shape.chunk_rows + rows - 1);
        expert = last.t.expert[last.end - 1], until = last.t.position[last.end - 1];
    }
    u32* known = b.counters().returnable + source;
    u32 before = dev::load_relaxed(known), done = before;
    while (done < expert && slots_computed(b, source, done, NONE, note)) done++;
    if (done > before) dev::store_release(known, done);
    return done >= expert && slots_computed(b, source, expert, until, note);
}

DEVICE u64 returned_stamp(const Block& b) {
    bool overflow = *b.l.received.overflow;
    return result_stamp(stamp(b.pass, stamp_step(b.step.round, b.step.mode, overflow)), overflow);
}

// At a relay: the member that owns each slot of an inter-node row, in slot order.
struct RowMembers { const u8* of; u32 count; };
DEVICE RowMembers row_members(const Layer& l, u32 source, u32 row) {
    const u32 chunk = row / l.shape.chunk_rows, r = row % l.shape.chunk_rows, *starts = relay_starts(l, source, chunk);
    return {relay_members(l, source, chunk) + starts[r], starts[r + 1] - starts[r]};
}
// In another PE's partial results of a chunk: row `r`, and the offset of the gradients of that row's slot weights.
DEVICE const char* part_row(const Layer& l, u32 member, u32 source, u32 index, u32 r) {
    return reinterpret_cast<const char*>(part_buffer(l, member, source, index)) + u64(r) * l.sizes.row_bytes;
}
DEVICE u64 part_weights(const Layer& l, u32 r) { return u64(l.shape.chunk_rows) * l.sizes.row_bytes + u64(r) * l.sizes.max_slots * 4; }

// One warp, at a relay. Gathers the gradients of a row's slot weights from all PEs of the host, in slot order.
template <class T> DEVICE void gather_d_weights(const Layer& l, u32 source, u32 index, u32 r, const ReturnRow& row, float* to) {
    const RowMembers all = row_members(l, source, row.row);
    for (u32 j = dev::lane(); j < all.count; j += 32) {
        const u32 member = all.of[j];
        if (member == l.shape.member) continue;
        u32 before = 0;
        for (u32 i = 0; i < j; i++) before += all.of[i] == member;
        to[j] = reinterpret_cast<const float*>(part_row(l, member, source, index, 0) + part_weights(l, r))[before];
    }
    for (u32 j = 0, own = row.first; j < all.count; j++) {
        if (all.of[j] != l.shape.member) continue;
        float d = weight_gradient<T>(l, row.t.expert[own], row.t.position[own]);
        if (dev::lane() == 0) to[j] = d;
        own++;
    }
}

// A return item: some rows of a result chunk, in return order.
struct ReturnItem {
    u32 index, first;  // chunk in the round; first row in the chunk
};
DEVICE ReturnItem return_item(const Layer& l, u32 item) {
    const u32 each = return_items(l);
    return {item / each, item % each * RETURN_ROWS};
}

// Destination of a chunk's results: the source's return area, or this PE's part buffer at the relay.
DEVICE Message results_message(const Block& b, u32 source, u32 index, u8* stage) {
    const Layer& l = b.l;
    const bool part = relayed(l, source) && !is_relay_of(l, source);
    const u64 chunk = l.received.return_chunk[source] + l.received.first_chunk[source] + index;
    u8* mine = part ? part_buffer(l, l.shape.member, source, index) : l.symmetric.returns + chunk * l.sizes.return_pitch;
    return message(l, mine, stage, returns_to(l, source));
}

template <class T> DEVICE bool sum_rows(Block& b, u32 source, ReturnItem item, u8* stage) {
    const Layer& l = b.l;
    const Received& in = l.received;
    const u32 index = item.index, chunk = in.first_chunk[source] + index;
    if (chunk >= in.end_chunk[source]) return true;
    const u32 rows = chunk_count(l, in.rows[source], chunk), first = item.first, row_bytes = l.sizes.row_bytes;
    if (first >= rows) return true;
    enter(b, PHASE_COMBINE);
    const u32 end = return_items(l) > 1 && rows - first > RETURN_ROWS ? first + RETURN_ROWS : rows;
    u32 numbers = index * l.shape.chunk_rows;  // in the round
    // return_ready has checked the slots up to those of the chunk's last row. If another slot is not computed, the source did not number
    // its rows by their last experts.
    bool done = true;
    for (u32 i = dev::thread(), most = l.sizes.max_slots; i < (end - first) * most; i += dev::threads()) {
        const ReturnRow row = return_row(b, source, numbers + first + i / most);
        const u32 slot = row.first + i % most;
        done = (slot >= row.end || tile_computed(b, row.t.expert[slot], row.t.position[slot])) && done;
    }
    if (!check_peer(b, !done, source, WHAT_ROWS, rows, 0, chunk)) return false;

    bool backward = b.step.mode == MODE_GRADIENT;
    const SlotStore& store = l.batches.routed;
    const char* y = static_cast<const char*>(store.y);
    const bool serving = is_relay_of(l, source), part = relayed(l, source) && !serving;
    const Message m = results_message(b, source, index, stage);
    u32 pieces = row_bytes / 16;
    for (u32 r = first + dev::warp(); r < end; r += dev::threads() / 32) {
        const ReturnRow row = return_row(b, source, numbers + r);
        if (part && row.first == row.end) continue;
        // Bit set of the members whose partial sums are added, in ascending order. This PE is one of them.
        u32 members = 1u << l.shape.member;
        if (serving) {
            const RowMembers all = row_members(l, source, row.row);
            for (u32 i = 0; i < all.count; i++) members |= 1u << all.of[i];
        }
        for (u32 piece = dev::lane(); piece < pieces; piece += 32 * SUM_DEPTH) {
            RowSum sum;
            clear(sum);
            for (u32 member = 0; member < l.shape.members; member++) {
                if (!(members >> member & 1)) continue;
                if (member != l.shape.member) {
                    add_row<T>(sum, part_row(l, member, source, index, r), piece, pieces, 1.0f);
                    continue;
                }
                for (u32 i = row.first; i < row.end; i++) {
                    u32 position = row.t.position[i];
                    // In backward the rows are already weighted: the weight is part of the gradient of the expert's output.
                    float weight = backward ? 1.0f : store.weight[position];
                    add_row<T>(sum, y + u64(position) * row_bytes, piece, pieces, weight);
                }
            }
            UNROLL for (u32 k = 0; k < SUM_DEPTH; k++)
                if (piece + 32 * k < pieces)
                    dev::store16(m.to + u64(r) * row_bytes + u64(piece + 32 * k) * 16, pack8<T>(sum.v[k]));
        }
    }
    if (backward && part) {
        for (u32 r = first + dev::warp(); r < end; r += dev::threads() / 32) {
            const ReturnRow row = return_row(b, source, numbers + r);
            for (u32 i = row.first; i < row.end; i++) {
                float d = weight_gradient<T>(l, row.t.expert[i], row.t.position[i]);
                if (dev::lane() == 0) reinterpret_cast<float*>(m.to + part_weights(l, r))[i - row.first] = d;
            }
        }
    } else if (backward) {
        float* to = reinterpret_cast<float*>(m.to + u64(rows) * row_bytes);
        u32* before = in.return_slot + u64(source) * l.shape.round_chunks * l.shape.chunk_rows + numbers;
        auto count = [&](u32 r) {
            ReturnRow row = return_row(b, source, numbers + r);
            return serving ? row_members(l, source, row.row).count : row.end - row.first;
        };
        // The scan covers all earlier rows of the chunk, but only the sums of this item's rows are stored.
        (void)scan_block(b, end, count, [&](u32 r, u32 sum) {
            if (r >= first) before[r] = sum;
        });
        for (u32 r = first + dev::warp(); r < end; r += dev::threads() / 32) {
            const ReturnRow row = return_row(b, source, numbers + r);
            if (serving) gather_d_weights<T>(l, source, index, r, row, to + before[r]);
            for (u32 i = row.first; !serving && i < row.end; i++) {
                float d = weight_gradient<T>(l, row.t.expert[i], row.t.position[i]);
                if (dev::lane() == 0) to[before[r] + i - row.first] = d;
            }
        }
    }
    return true;
}

// Sends a result chunk whose rows are summed.
DEVICE void post_results(Block& b, u32 source, u32 index, u8* stage) {
    const Layer& l = b.l;
    const Received& in = l.received;
    const u32 chunk = in.first_chunk[source] + index;
    if (chunk >= in.end_chunk[source]) return;
    const u32 rows = chunk_count(l, in.rows[source], chunk), row_bytes = l.sizes.row_bytes, numbers = index * l.shape.chunk_rows;
    const bool backward = b.step.mode == MODE_GRADIENT, serving = is_relay_of(l, source);
    const Message m = results_message(b, source, index, stage);
    u64 bytes = u64(rows) * row_bytes;
    if (relayed(l, source) && !serving) {
        u32 written = 0;
        for (u32 r = dev::thread(); r < rows; r += dev::threads()) {
            const ReturnRow row = return_row(b, source, numbers + r);
            if (row.first < row.end) written += row_bytes + (backward ? 4 * (row.end - row.first) : 0);
        }
        if (written) dev::shared_add(&b.state.stats.relay_bytes, u64(written));
        if (!ARISTOS_FAULT(PART_LOST)) post(b, m, bytes, part_signal(l, l.shape.member, source, index), arrived_stamp(b), returns_to(l, source));
        return;
    }
    u32 slots = 0;
    if (backward) {
        const ReturnRow row = return_row(b, source, numbers + rows - 1);
        slots = in.return_slot[u64(source) * l.shape.round_chunks * l.shape.chunk_rows + numbers + rows - 1];
        slots += serving ? row_members(l, source, row.row).count : row.end - row.first;
        bytes += 4 * slots;
    }
    post(b, m, bytes, result_signal(l, l.shape.my_pe, chunk), returned_stamp(b), source);
    if (serving && index + PART_BUFFERS < in.end_chunk[source] - in.first_chunk[source]) {
        for (u32 i = dev::thread(); i < l.shape.members; i += dev::threads())
            if (i != l.shape.member) signal_peer(l, part_credit(l, source, index), arrived_stamp(b), member_pe(l, i));
        if (dev::thread() == 0) b.state.stats.signals += l.shape.members - 1;
    }
    if (dev::thread() == 0 && source != l.shape.my_pe) {
        PassStats& stats = b.state.stats;
        stats.combine_rows += rows;
        stats.combine_row_bytes += u64(rows) * row_bytes;
        if (backward) stats.combine_slot_bytes += 4 * slots;
    }
}

// Runs a return item. The block that finishes the last item of a chunk sends the chunk.
template <class T> OUTLINE bool return_rows(Block& b, u32 source, u32 number) {
    const Layer& l = b.l;
    const ReturnItem item = return_item(l, number);
    const bool inter_node = returns_inter_node(l, source);
    const GroupMessage w = inter_node ? group_message(l, l.tables.inter_node_returns, source, item.index, *l.queue.most_results) : GroupMessage{};
    u8* stage = inter_node ? l.symmetric.result_stage + u64(w.stage_slot) * l.sizes.return_pitch : nullptr;
    if (!sum_rows<T>(b, source, item, stage)) return false;
    if (return_items(l) > 1) {
        u32* ended = b.counters().return_done + u64(source) * l.shape.round_chunks + item.index;
        dev::sync_block();
        const bool last = dev::thread() == 0 && dev::fetch_add_acq_rel(ended, 1u) + 1 == return_items(l);
        if (!dev::sync_block_or(last)) return true;
    }
    post_results(b, source, item.index, stage);
    if (!inter_node) return true;
    end_chunk(b, l.tables.inter_node_returns, b.counters().returned, w, [&](u32 to, u32 number) -> PendingSignal {
        u32 chunk = l.received.first_chunk[to] + number;
        if (chunk >= l.received.end_chunk[to]) return {};
        return {to, result_signal(l, l.shape.my_pe, chunk), returned_stamp(b)};
    });
    return true;
}

// ---- Sums over PEs.

// The chunk in the return area that holds the result of row `row` from `pe`.
struct Returned {
    const char* chunk;
    u32 number, rows;  // the row's number in return order; rows of its chunk
    u32 first;         // number of the chunk's first row
};
DEVICE Returned returned(const Layer& l, u32 pe, u32 row) {
    const DestPlan& dest = l.plan.dest[pe];
    u32 number = row_returns(l, pe)[row], chunk = number / l.shape.chunk_rows;
    const u8* at = l.symmetric.returns + u64(dest.return_chunk + chunk) * l.sizes.return_pitch;
    return {reinterpret_cast<const char*>(at), number, chunk_count(l, dest.rows, chunk), chunk * l.shape.chunk_rows};
}

// One thread. Waits for the results of a token's row at `pe`, and in forward records whether `pe` keeps activations.
DEVICE bool wait_for_result(Block& b, u32 token, u32 pe) {
    const Layer& l = b.l;
    u32 row = l.plan.token_row[u64(pe) * l.shape.max_tokens + token];
    if (row == NONE) return true;
    u32 chunk = row_returns(l, pe)[row] / l.shape.chunk_rows, round = l.plan.dest[pe].rounds - 1;
    const u32* chunks = round_chunks(l, pe);
    while (chunks[round] > chunk) round--;
    bool forward = b.step.mode == MODE_FORWARD;
    bool overflow = !forward && l.received.peer_overflow[pe];
    u64 expected = stamp(b.pass, stamp_step(round, b.step.mode, overflow));
    const u64* word = result_signal(l, pe, chunk);
    if (!wait_signal(l, word, {pe, WHAT_RESULTS, b.phase, expected, chunk}, 1)) return false;
    // All result chunks that `pe` sends in a pass carry the same overflow flag.
    if (forward) dev::store_release(l.received.peer_overflow + pe, u32(dev::load_relaxed(word) & 1));
    return true;
}

// One warp. Reads the gradients of a token's routing weights from the rows listed in `pe_row`.
DEVICE void read_d_weights(Block& b, u32 token, const u32* pe_row, u32 count) {
    const Layer& l = b.l;
    u32 k = l.shape.top_k;
    // Dropped choices have gradient 0.
    for (u32 i = dev::lane(); i < k; i += 32) l.routing.d_weights[u64(token) * k + i] = 0.0f;
    dev::sync_warp();
    for (u32 e = 0; e < count; e++) {
        u32 pe = pe_row[2 * e], row = pe_row[2 * e + 1];
        Returned r = returned(l, pe, row);
        const u32* starts = row_slots(l, pe);
        const u32* return_slot = l.plan.return_slot + u64(pe) * l.shape.max_tokens;
        u32 first = starts[row], before = return_slot[r.number] - return_slot[r.first];
        const float* values = reinterpret_cast<const float*>(r.chunk + u64(r.rows) * l.sizes.row_bytes) + before;
        const u32* choices = l.plan.slot_choice + l.plan.dest[pe].slot_base + first;
        for (u32 i = dev::lane(); i < starts[row + 1] - first; i += 32) l.routing.d_weights[choices[i]] = values[i];
    }
}

// One warp, after read_d_weights and a sync_warp. Writes the token's gradients in the caller's order.
DEVICE void write_caller_d_weights(Block& b, u32 token) {
    const Layer& l = b.l;
    const u64 first = u64(token) * l.shape.top_k;
    for (u32 i = dev::lane(); i < l.shape.top_k; i += 32)
        b.pass.grad_weights[first + l.routing.columns[first + i]] = l.routing.d_weights[first + i];
}

// One warp. Computes a token's row of the output, or of the input gradient in backward. Adds the results of the PEs in PE order, then the
// shared expert's.
template <class T> DEVICE void sum_token(Block& b, u32 token, const u32* pe_row, u32 count) {
    const Layer& l = b.l;
    u32 row_bytes = l.sizes.row_bytes, pieces = row_bytes / 16;
    bool shared = has_shared(l, b.pass), backward = b.step.mode == MODE_GRADIENT;
    float weight = shared && l.shape.shared_gate && !backward ? l.routing.shared_weight[token] : 1.0f;
    const bool narrow = b.pass.narrow_output;
    char* out = static_cast<char*>(b.pass.output) + u64(token) * (narrow ? row_bytes : 2 * row_bytes);
    for (u32 piece = dev::lane(); piece < pieces; piece += 32 * SUM_DEPTH) {
        RowSum sum;
        clear(sum);
        for (u32 e = 0; e < count; e++) {
            Returned r = returned(l, pe_row[2 * e], pe_row[2 * e + 1]);
            add_row<T>(sum, r.chunk + u64(r.number - r.first) * row_bytes, piece, pieces, 1.0f);
        }
        if (shared) {
            const char* y = static_cast<const char*>(l.batches.shared.y) + u64(token) * row_bytes;
            add_row<T>(sum, y, piece, pieces, weight);
        }
        UNROLL for (u32 k = 0; k < SUM_DEPTH; k++) {
            if (piece + 32 * k >= pieces) continue;
            if (narrow) {
                dev::store16(out + u64(piece + 32 * k) * 16, pack8<T>(sum.v[k]));
                continue;
            }
            FloatQuad* to = reinterpret_cast<FloatQuad*>(out + u64(piece + 32 * k) * 32);
            UNROLL for (u32 half = 0; half < 2; half++) {
                const float* v = sum.v[k] + half * 4;
                to[half] = {{v[0], v[1], v[2], v[3]}};
            }
        }
    }
}

template <class T> OUTLINE bool final_sum(Block& b, u32 item) {
    const Layer& l = b.l;
    enter(b, PHASE_COMBINE);
    u32 n = l.shape.n_pes, first = item * FINAL_TOKENS;
    u32 tokens = b.pass.tokens - first < FINAL_TOKENS ? b.pass.tokens - first : FINAL_TOKENS;
    bool backward = b.step.mode == MODE_GRADIENT;
    bool arrived = wait_signals(b, tokens * n, [&](u32 i) { return wait_for_result(b, first + i / n, i % n); });
    if (!arrived) return false;
    if (b.step.with_shared) {
        u32 batch = l.shape.n_local, tile = l.batches.own_tile[batch];
        u32 begin = first / l.shape.tile_m, end = ceil_div(first + tokens, l.shape.tile_m);
        arrived = wait_block(b, end - begin, [&](u32 i) {
            return wait_local(l, b.counters().second_done + tile + begin + i,
                              tiles_across(l, second_kind(b.step.mode), batch), b.phase, batch);
        });
        if (!arrived) return false;
    }
    u32 targets = l.shape.top_k < n ? l.shape.top_k : n;
    u32* lists = reinterpret_cast<u32*>(b.scratch) + dev::warp() * 2 * targets;  // (PE, row) pairs of this warp's token
    for (u32 t = dev::warp(); t < tokens; t += dev::threads() / 32) {
        u32 token = first + t, count = 0;
        for (u32 begin = 0; begin < n; begin += 32) {
            u32 pe = begin + dev::lane();
            u32 row = pe < n ? l.plan.token_row[u64(pe) * l.shape.max_tokens + token] : NONE;
            u32 mask = dev::ballot(row != NONE);
            if (row != NONE) {
                u32 at = count;
                for (u32 below = mask & ((1u << dev::lane()) - 1); below; below &= below - 1) at++;
                lists[2 * at] = pe;
                lists[2 * at + 1] = row;
            }
            for (; mask; mask &= mask - 1) count++;
        }
        dev::sync_warp();
        sum_token<T>(b, token, lists, count);
        if (backward) {
            read_d_weights(b, token, lists, count);
            if (b.pass.grad_weights) {
                dev::sync_warp();
                write_caller_d_weights(b, token);
            } else if (l.shape.shared_gate) {
                float d = weight_gradient<T>(l, l.shape.n_local, token);
                if (dev::lane() == 0) l.routing.d_shared_weight[token] = d;
            }
        }
        dev::sync_warp();
    }
    return true;
}

// ---- Gradients without a GEMM.

// Computes up to BIAS_COLUMNS columns of a batch's bias gradients: sums over its slots, in order. Runs after the batch's first GEMM.
template <class T> OUTLINE void bias_gradient(Block& b, u32 item) {
    const Layer& l = b.l;
    const auto [batch, part] = bias_item(b, item);
    const SlotStore& store = store_of(l, batch);
    const MlpGradients g = mlp_gradients(l, batch);
    u32 rows = l.batches.total[batch], down_parts = ceil_div(l.shape.hidden, BIAS_COLUMNS);
    bool add = b.pass.accumulate || (!is_shared(l, batch) && b.step.round > 0);
    enter(b, PHASE_EXPERT);
    if (add && rows == 0) return;
    bool down = part < down_parts;
    u32 columns = down ? l.shape.hidden : gate_up_columns(l, batch);
    u32 begin = (down ? part : part - down_parts) * BIAS_COLUMNS;
    u32 end = columns - begin < BIAS_COLUMNS ? columns : begin + BIAS_COLUMNS;
    const float* weight = !is_shared(l, batch) ? store.weight : l.shape.shared_gate ? l.routing.shared_weight : nullptr;
    for (u32 c = begin + 2 * dev::thread(); c < end; c += 2 * dev::threads()) {
        float low = 0.0f, high = 0.0f;
        for (u32 r = 0; r < rows; r++) {
            u32 position = slot_position(l, batch, r);
            float lo, hi, w = down && weight ? weight[position] : 1.0f;
            const char* row = down ? static_cast<const char*>(store.grad_row[position])
                                   : static_cast<const char*>(store.gate_up) + u64(position) * columns * 2;
            dev::unpack<T>(*reinterpret_cast<const u32*>(row + u64(c) * 2), lo, hi);
            low += w * lo;
            high += w * hi;
        }
        u32 at = c;
        float* to = g.down_bias;
        if (!down) {
            bool gate = is_gated(l, batch) && c < store.intermediate;
            to = gate ? g.gate_bias : g.up_bias;
            if (is_gated(l, batch) && !gate) at -= store.intermediate;
        }
        to[at] = add ? to[at] + low : low;
        to[at + 1] = add ? to[at + 1] + high : high;
    }
}

// Zeroes up to ZERO_ELEMENTS elements of one matrix gradient of a batch without slots, unless gradients accumulate.
OUTLINE void zero_gradient(Block& b, u32 batch, u32 item) {
    const Layer& l = b.l;
    enter(b, PHASE_EXPERT);
    if (b.pass.accumulate) return;
    u32 pieces = zero_pieces(l), which = item / pieces, piece = item % pieces;
    const MlpGradients g = mlp_gradients(l, batch);
    float* to = which == 0 ? g.gate : which == 1 ? g.up : g.down;
    if (which == 0 && !is_gated(l, batch)) return;
    u64 count = u64(store_of(l, batch).intermediate) * l.shape.hidden;
    u64 begin = u64(piece) * ZERO_ELEMENTS, end = begin + ZERO_ELEMENTS < count ? begin + ZERO_ELEMENTS : count;
    for (u64 i = begin + 4 * dev::thread(); i < end; i += 4 * dev::threads())
        dev::store16(to + i, Vec16{{0, 0, 0, 0}});
}

}  // namespace aristos
