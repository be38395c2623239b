// Assigns positions to all slots: to those in tiles of own slots alone at once, to the others once all headers are received.
#pragma once
#include "dispatch.h"

namespace aristos {

DEVICE const u32* header_words(const Layer& l, u32 buffer, u32 source) {
    return reinterpret_cast<const u32*>(incoming(l, source, l.symmetric.header + header_offset(l, buffer, source)));
}

// One warp. Validates a header, which is untrusted, and stores its values.
DEVICE bool read_header(Block& b, u32 source) {
    const Layer& l = b.l;
    const LayerShape& s = l.shape;
    const Received& in = l.received;
    bool first = b.step.mode == MODE_FORWARD && b.step.round == 0;
    u32* counts = in.counts + u64(source) * s.n_local;
    if (source == s.my_pe) return true;  // place_own_slots sets these values
    if (!header_due(b, source)) {
        for (u32 e = dev::lane(); e < s.n_local; e += 32) counts[e] = 0;
        if (dev::lane() == 0) in.first_chunk[source] = in.end_chunk[source] = 0;
        return true;
    }
    u32 buffer = header_buffer(b.pass, b.step.mode != MODE_FORWARD);
    const u32* words = header_words(l, buffer, source);
    u64 slots = 0, here = 0;  // slots of all PEs that the header covers, and of this PE
    u32 most = 0;
    for (u32 number = dev::lane(); number < (relayed(l, source) ? s.max_local : s.n_local); number += 32) {
        u32 count = words[HEADER_WORDS + number], e = expert_here(l, source, number);
        slots += count;
        if (expert_member(l, source, number) != s.member) continue;
        if (e < s.n_local) counts[e] = count;
        else if (count > 0) most = NONE;  // slots for an expert that does not exist
        here += count;
        most = count > most ? count : most;
    }
    UNROLL for (int d = 16; d > 0; d /= 2) {
        slots += dev::shfl_xor(slots, d);
        here += dev::shfl_xor(here, d);
        u32 other = dev::shfl_xor(most, d);
        most = other > most ? other : most;
    }
    u32 rounds = words[HEADER_ROUNDS], world = words[HEADER_WORLD_ROUNDS], rows = words[HEADER_ROWS];
    u32 return_chunk = words[HEADER_RETURN_CHUNK], tokens = words[HEADER_TOKENS];
    u32 first_chunk = words[HEADER_FIRST_CHUNK], end_chunk = words[HEADER_END_CHUNK];
    u32 chunks = chunks_of(l, rows);
    u32 round_rows = (end_chunk - first_chunk) * s.chunk_rows;
    bool valid = tokens <= s.max_tokens && rows <= tokens && rounds <= world && world <= l.sizes.max_chunks &&
                 (rounds > 0) == (rows > 0) && rounds <= chunks && first_chunk <= end_chunk && end_chunk <= chunks &&
                 end_chunk - first_chunk <= s.round_chunks && (rounds > 0) == (end_chunk > first_chunk) &&
                 (b.step.round > 0 || first_chunk == 0) && (b.step.round + 1 < rounds || end_chunk == chunks) &&
                 slots == words[HEADER_SLOTS] && here <= s.round_slots && most <= MAX_RANK &&
                 slots <= u64(round_rows) * l.sizes.max_slots && return_chunk <= l.sizes.return_chunks &&
                 chunks <= l.sizes.return_chunks - return_chunk;
    if (!first) valid = valid && rounds == in.rounds[source] && rows == in.rows[source];
    dev::sync_warp();
    if (dev::lane() == 0) {
        // The source's totals are those of its first header.
        if (first) {
            in.rounds[source] = rounds;
            in.rows[source] = rows;
        }
        in.first_chunk[source] = first_chunk;
        in.end_chunk[source] = end_chunk;
        in.return_chunk[source] = return_chunk;
        if (!valid) record_error(l, ERROR_PROTOCOL, {source, WHAT_COUNTS, b.phase, rounds, b.step.round}, slots);
    }
    return valid;
}

// One thread. Whether the header of `source` has arrived, if one is due.
template <class Missing> DEVICE bool header_arrived(const Block& b, u32 source, Missing missing) {
    if (!b.step.receives || b.step.mode == MODE_GRADIENT || !header_due(b, source)) return true;
    const u64* word = header_signal(b.l, header_buffer(b.pass, b.step.mode != MODE_FORWARD), source);
    return signal_arrived(word, {source, WHAT_COUNTS, PHASE_DISPATCH, stamp(b.pass, 2 * b.step.round), b.step.round}, missing);
}

// All threads, after the headers that are due have arrived: reads them and derives the rounds and the loss sums.
DEVICE bool read_headers(Block& b) {
    const Layer& l = b.l;
    const Received& in = l.received;
    u32 n = l.shape.n_pes, buffer = header_buffer(b.pass, b.step.mode != MODE_FORWARD);
    acquire_network(l);
    bool ok = true;
    for (u32 pe = dev::warp(); pe < n; pe += dev::threads() / 32) ok = read_header(b, pe) && ok;
    if (dev::sync_block_or(!ok)) return false;
    if (b.step.mode != MODE_FORWARD || b.step.round > 0) return true;

    if (dev::warp() == 0) {
        u32 received = 0, mine = 0, world = 0;
        for (u32 pe = dev::lane(); pe < n; pe += 32) {
            const u32* words = header_words(l, buffer, pe);
            received = in.rounds[pe] > received ? in.rounds[pe] : received;
            mine = l.plan.dest[pe].rounds > mine ? l.plan.dest[pe].rounds : mine;
            if (pe == l.shape.my_pe) continue;
            world = words[HEADER_WORLD_ROUNDS] > world ? words[HEADER_WORLD_ROUNDS] : world;
        }
        UNROLL for (int d = 16; d > 0; d /= 2) {
            u32 other = dev::shfl_xor(received, d);
            received = other > received ? other : received;
            other = dev::shfl_xor(mine, d);
            mine = other > mine ? other : mine;
            other = dev::shfl_xor(world, d);
            world = other > world ? other : world;
        }
        if (dev::lane() == 0) {
            world = world > mine ? world : mine;
            // With relays all PEs have the same flag. A source gets the flag from one PE of a host, and all PEs of that host get the rows
            // that it sends again.
            *in.overflow = (l.shape.relays ? world : received) > 1;
            *in.my_rounds = received > mine ? received : mine;
            *in.world_rounds = world;
        }
    }
    if (l.sizes.has_losses) {
        for (u32 i = dev::thread(); i < 2 + 2 * l.shape.n_experts; i += dev::threads()) {
            double sum = 0;
            for (u32 pe = 0; pe < n; pe++)
                sum += pe == l.shape.my_pe ? l.losses.mine[i]
                                           : reinterpret_cast<const double*>(reinterpret_cast<const u8*>(header_words(l, buffer, pe)) +
                                                                             l.sizes.header_counts_bytes)[i];
            l.losses.all[i] = sum;
        }
    }
    dev::sync_block();
    return true;
}

// All threads. Computes the positions of the own slots in tiles without other PEs' slots, from this PE's counts alone.
DEVICE void place_own_slots(Block& b) {
    const Layer& l = b.l;
    const LayerShape& s = l.shape;
    const Received& in = l.received;
    const Batches& batches = l.batches;
    const DestPlan& mine = l.plan.dest[s.my_pe];
    const RoundPart part = round_part(b, s.my_pe);
    const u32* counted = count_slots(b, s.my_pe, part.first_slot, part.end_slot);
    u32* counts = in.counts + u64(s.my_pe) * s.n_local;
    for (u32 e = dev::thread(); e < s.n_local; e += dev::threads()) {
        counts[e] = counted[e];
        batches.own[e] = counted[e] / s.tile_m * s.tile_m;
    }
    dev::sync_block();
    u32 own = scan_block(b, s.n_local, [&](u32 e) { return batches.own[e]; }, [&](u32 e, u32 sum) {
        batches.own_base[e] = sum;
        batches.own_tile[e] = sum / s.tile_m;
    });
    if (dev::thread() == 0) {
        batches.own_tile[s.n_local] = own / s.tile_m;
        in.rounds[s.my_pe] = mine.rounds;
        in.rows[s.my_pe] = mine.rows;
        in.first_chunk[s.my_pe] = part.first_chunk;
        in.end_chunk[s.my_pe] = part.end_chunk;
        in.return_chunk[s.my_pe] = mine.return_chunk;
    }
}

// Runs ITEM_OWN.
OUTLINE void make_own_layout(Block& b) {
    const Layer& l = b.l;
    enter(b, PHASE_DISPATCH);
    if (b.step.receives && b.step.mode != MODE_GRADIENT) place_own_slots(b);
    if (dev::thread() == 0) {
        u32 shared = l.shape.n_local;
        l.batches.total[shared] = l.batches.own[shared] = b.pass.tokens;
        l.batches.own_base[shared] = 0;
    }
    dev::sync_block();
    fill_gemms(b, OWN_FIRST, OWN_SECOND);
    dev::sync_block();
    if (dev::thread() == 0) {
        dev::fence_gpu();
        dev::store_release(b.counters().own_known, 1);
    }
}

// All threads. Computes the positions of all sources' slots in the batches: own slots first, then those of the following PEs. Also computes
// the first tile of each batch's slots outside the own tiles.
DEVICE void place_slots(Block& b) {
    const Layer& l = b.l;
    const LayerShape& s = l.shape;
    const Received& in = l.received;
    const Batches& batches = l.batches;
    for (u32 e = dev::thread(); e < s.n_local; e += dev::threads()) {
        u32 total = 0;
        u32 pe = s.my_pe;
        for (u32 k = 0; k < s.n_pes; k++) {
            u64 at = u64(pe) * s.n_local + e;
            in.first[at] = total;
            total += in.counts[at];
            pe = pe + 1 == s.n_pes ? 0 : pe + 1;
        }
        batches.total[e] = total;
        if (b.step.mode == MODE_FORWARD) batches.expert_rows[e] = total + (b.step.round ? batches.expert_rows[e] : 0);
    }
    dev::sync_block();
    auto rest = [&](u32 e) { return batches.total[e] - batches.own[e]; };
    u32 base = batches.own_tile[s.n_local] * s.tile_m;
    u32 tile = batches.own_tile[s.n_local] + (s.shared_intermediate ? ceil_div(b.pass.tokens, s.tile_m) : 0);
    scan_block(b, s.n_local, rest, [&](u32 e, u32 sum) { batches.rest_base[e] = base + sum; });
    scan_block(b, s.n_local, [&](u32 e) { return ceil_div(rest(e), s.tile_m); }, [&](u32 e, u32 sum) { batches.rest_tile[e] = tile + sum; });
}

// One thread. Estimates when a tile's last row arrives, in rows that its source has sent by then. The estimate assumes that all sources
// send at the same time and at the same rate, each in the order of experts.
DEVICE float tile_due(const Layer& l, u32 e, u32 tile) {
    const LayerShape& s = l.shape;
    const Received& in = l.received;
    const u32 begin = l.batches.own[e] + tile * s.tile_m, end = begin + s.tile_m;
    float due = 0.0f;
    for (u32 pe = 0; pe < s.n_pes; pe++) {
        const u64 at = u64(pe) * s.n_local + e;
        const u32 first = in.first[at], last = first + in.counts[at] < end ? first + in.counts[at] : end;
        if (pe == s.my_pe || first >= end || last <= begin || first == last) continue;
        const u64 of_all = u64(pe) * s.n_local + s.n_local - 1;
        const u32 slots = in.before[of_all] + in.counts[of_all], left = in.rows[pe] - in.first_chunk[pe] * s.chunk_rows;
        const u32 round = (in.end_chunk[pe] - in.first_chunk[pe]) * s.chunk_rows, rows = left < round ? left : round;
        const u32 ranks = is_reversed(l, pe) ? in.counts[at] - (first > begin ? 0 : begin - first) : last - first;
        const float there = float(in.before[at] + ranks) * float(rows) / float(slots);
        due = there > due ? there : due;
    }
    return due;
}
// All threads. Computes the order of the tiles with other PEs' rows, by the time at which their rows are expected. Positions do not give
// this order: they are by source, but all sources send at the same time.
DEVICE void order_tiles(Block& b) {
    const Layer& l = b.l;
    const LayerShape& s = l.shape;
    const Batches& batches = l.batches;
    auto tiles = [&](u32 e) { return ceil_div(batches.total[e] - batches.own[e], s.tile_m); };
    for (u32 pe = dev::thread(); pe < s.n_pes; pe += dev::threads()) {
        u32 sum = 0;
        for (u32 e = 0; e < s.n_local; e++) {
            l.received.before[u64(pe) * s.n_local + e] = sum;
            sum += l.received.counts[u64(pe) * s.n_local + e];
        }
    }
    dev::sync_block();
    for (u32 e = 0; e < s.n_local; e++)
        for (u32 tile = dev::thread(); tile < tiles(e); tile += dev::threads()) batches.rest_due[batches.rest_tile[e] + tile] = tile_due(l, e, tile);
    dev::sync_block();
    for (u32 e = 0; e < s.n_local; e++) {
        const u32 begin = batches.rest_tile[e];
        const float* due = batches.rest_due + begin;
        for (u32 tile = dev::thread(); tile < tiles(e); tile += dev::threads()) {
            u32 number = 0;
            for (u32 other = 0; other < tiles(e); other++) number += due[other] < due[tile] || (due[other] == due[tile] && other < tile);
            batches.rest_order[begin + number] = tile;
        }
    }
    dev::sync_block();
}

// Runs ITEM_LAYOUT. A step that receives no rows has queues as well. Gradients use the positions that the previous step assigned.
OUTLINE bool make_layout(Block& b) {
    enter(b, PHASE_DISPATCH);
    if (b.step.receives && b.step.mode != MODE_GRADIENT) {
        if (!read_headers(b)) return false;
        for (u32 i = dev::thread(); b.l.shape.relays && i < b.l.shape.n_pes * b.l.shape.round_chunks; i += dev::threads())
            b.l.received.relay_need[i] = 0;
        place_slots(b);
        order_tiles(b);
    }
    fill_queues(b);
    if (dev::thread() == 0) {
        dev::fence_gpu();
        dev::store_release(b.counters().layout, 1);
    }
    return true;
}

}  // namespace aristos
