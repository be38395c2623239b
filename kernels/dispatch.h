// Outgoing headers and chunks of rows.
#pragma once
#include "schedule.h"

namespace aristos {

// ---- Destinations of this PE in a step.

// Whether destination `pe` gets a header in this step. This PE's own rows need none.
DEVICE bool sends_header(const Block& b, u32 pe) {
    const Layer& l = b.l;
    u32 round = b.step.round;
    if (pe == l.shape.my_pe || !sends_to(l, pe)) return false;
    if (b.step.mode == MODE_FORWARD) return round == 0 || l.plan.dest[pe].rounds > round;
    return b.step.mode == MODE_RECOMPUTE && l.plan.dest[pe].rounds > round && l.received.peer_overflow[pe];
}
DEVICE bool sends_rows(const Block& b, u32 pe) {
    const Layer& l = b.l;
    u32 round = b.step.round;
    if (pe == l.shape.my_pe || l.plan.dest[pe].rounds <= round) return false;
    return b.step.mode != MODE_RECOMPUTE || l.received.peer_overflow[pe];
}

// The step number in stamps. A peer that overflows, i.e. keeps no activations, has two steps per round of backward: recomputation, then
// gradients. The latter have the second number.
DEVICE u32 stamp_step(u32 round, u32 mode, bool overflow) {
    return 2 * round + (mode == MODE_GRADIENT && overflow ? 1 : 0);
}
DEVICE u32 send_step(const Block& b, u32 pe) {
    bool overflow = b.step.mode != MODE_FORWARD && b.l.received.peer_overflow[pe];
    return stamp_step(b.step.round, b.step.mode, overflow);
}

DEVICE const u32* round_chunks(const Layer& l, u32 pe) {
    return l.plan.round_chunk + u64(pe) * (l.sizes.max_chunks + 1);
}
DEVICE const u32* row_slots(const Layer& l, u32 pe) {
    return l.plan.row_slot + u64(pe) * (l.shape.max_tokens + 1);
}
DEVICE const u32* row_returns(const Layer& l, u32 pe) { return l.plan.row_return + u64(pe) * l.shape.max_tokens; }
DEVICE const u32* row_tokens(const Layer& l, u32 pe) { return l.plan.row_token + u64(pe) * l.shape.max_tokens; }

// One thread. Whether this step may write to the windows of `pe`, which must have finished reading the rows of the previous step. The
// results of the previous round show that it has. If this round was recomputed, the acknowledgements of the recomputation show it. In round
// 0 the previous pass has already waited for the results.
template <class Missing> DEVICE bool window_free(const Block& b, u32 pe, Missing missing) {
    const Layer& l = b.l;
    u32 round = b.step.round;
    bool overflow = b.step.mode != MODE_FORWARD && l.received.peer_overflow[pe];
    if (ARISTOS_FAULT(NO_WINDOW_WAIT)) return true;
    u32 step;
    if (b.step.mode == MODE_GRADIENT && overflow) step = stamp_step(round, MODE_RECOMPUTE, true);
    else if (round > 0) step = stamp_step(--round, b.step.mode == MODE_FORWARD ? MODE_FORWARD : MODE_GRADIENT, overflow);
    else return true;
    const u32* chunks = round_chunks(l, pe);
    u32 first = chunks[round], end = chunks[round + 1];
    u64 expected = stamp(b.pass, step);
    for (u32 chunk = first; chunk < end; chunk++)
        if (!signal_arrived(result_signal(l, pe, chunk), {pe, WHAT_RESULTS, PHASE_DISPATCH, expected, chunk}, missing, 1)) return false;
    return true;
}
// Whether the buffer for chunk `index` of the round is free: either no earlier chunk used it, or its credit has arrived.
template <class Missing> DEVICE bool credit_available(const Block& b, u32 pe, u32 index, Missing missing) {
    const Layer& l = b.l;
    if (ARISTOS_FAULT(NO_CREDIT) || index < l.shape.window_chunks) return true;
    u32 before = index - l.shape.window_chunks;
    return signal_arrived(credit_signal(l, pe, before), {pe, WHAT_CREDIT, PHASE_DISPATCH, stamp(b.pass, send_step(b, pe)), before}, missing);
}

// Destination of a message of at most one chunk for `pe`: the memory of `pe`, or a staging slot on this PE.
struct Message {
    char* to;
    u8* mine;     // the symmetric address
    u8* stage;
};
DEVICE Message message(const Layer& l, u8* mine, u8* stage, u32 pe) {
    bool direct = reachable(l, pe);
    return {reinterpret_cast<char*>(direct ? at_peer(l, mine, pe) : stage), mine, stage};
}

// All threads, once the message is written: sends it. For an inter-node peer the signal follows later, after a fence. A header's staging
// buffer is reused only after the peer has answered the header, by results or, in a forward pass, by its next header.
DEVICE void post(Block& b, const Message& m, u64 bytes, u64* signal, u64 value, u32 pe) {
    const Layer& l = b.l;
    if (!ARISTOS_FAULT(EARLY_SIGNAL)) dev::sync_block();
    const bool direct = reachable(l, pe);
    if (!direct) {
        dev::fence_sys();  // for the network card
        network_put(m.mine, m.stage, bytes, world_number(l, pe));
        if (dev::thread() == 0) b.state.stats.network_bytes += bytes;
    }
    if (dev::thread() != 0) return;
    if (direct) signal_peer(l, signal, value, pe);
    if (pe == l.shape.my_pe) return;  // the PE's own results, which are not counted
    b.state.stats.puts++;
    if (direct) b.state.stats.signals++;
}

// ---- Send groups: inter-node messages under one fence, since on some networks a fence waits for all earlier puts. The headers of a step
// form a group. The chunks of a step (chunk 0 for all inter-node peers, then chunk 1, and so on) are divided into groups of window_chunks
// messages. The results are divided likewise. With several peers, the signals of the first chunks therefore do not wait for the last
// chunks. If a window holds as many chunks as any peer gets, a step has at most one group per inter-node peer. A staging buffer holds two
// groups. If a later group of the step needs the staging slots of a group, the group's last block issues a quiet after its signals and so
// waits for delivery. For the other groups, one block does this at the end of the step (end_stages). `inter_node` is Tables::inter_node for
// headers and chunks, Tables::inter_node_returns for results.
DEVICE bool sends_inter_node(const Layer& l, u32 pe) { return !reachable(l, pe) && sends_to(l, pe); }
// Added to a group's message count when its signals are sent, and when its staging slots are free.
constexpr u32 GROUP_SIGNALLED = 1u << 29, GROUP_FREE = 1u << 30, GROUP_DONE = GROUP_SIGNALLED + GROUP_FREE;

// The send group and the staging slot of a message; `chunks` is the number of chunks per peer in this phase.
struct GroupMessage {
    u32 group, size, stage_slot;  // send group, its number of messages, and the message's slot in the staging buffer
};
DEVICE GroupMessage group_message(const Layer& l, const u32* inter_node, u32 pe, u32 index, u32 chunks) {
    const u32 group_size = l.shape.window_chunks, number = index * inter_node[0] + inter_node[1 + l.shape.n_pes + pe], group = number / group_size;
    const u32 left = inter_node[0] * chunks - group * group_size;
    return {group, left < group_size ? left : group_size, number % (STAGE_GROUPS * group_size)};
}
// One thread. Whether the message may be staged: its staging slot is free, and the signals of the previous group are sent. Without the
// second condition, that group's fence would also wait for this message. `ended`: the groups' message counts.
DEVICE bool stage_slot_free(const u32* ended, const GroupMessage& m) {
    return (m.group == 0 || counter_reached(ended + m.group - 1, GROUP_SIGNALLED)) &&
           (m.group < STAGE_GROUPS || counter_reached(ended + m.group - STAGE_GROUPS, GROUP_DONE));
}

// The signal that follows a message to `pe`, and its value. `signal` is null if no message was sent.
struct PendingSignal {
    u32 pe;
    u64* signal;
    u64 value;
};
// All threads, at the end of an item of a group of `size` messages. The block that ends the group's last item sends the signals of all
// messages, `get(i)`. Each thread evaluates a part of `reused()`: whether the group's staging slots are needed again in this step.
template <class Get, class Reused> DEVICE void end_group_item(Block& b, u32* ended, u32 size, Get get, Reused reused) {
    dev::sync_block();
    bool last = dev::thread() == 0 && dev::fetch_add_acq_rel(ended, 1u) + 1 == size;
    if (!dev::sync_block_or(last)) return;
    u32 sent = 0;
    for (u32 i = dev::thread(); i < size; i += dev::threads()) sent += get(i).signal != nullptr;
    const bool any = dev::sync_block_or(sent > 0);
    if (any) {
        if (dev::thread() == 0) {
            dev::fence_puts();
            b.state.stats.fences++;
        }
        dev::sync_block();
        for (u32 i = dev::thread(); i < size; i += dev::threads()) {
            PendingSignal s = get(i);
            if (s.signal) signal_peer(b.l, s.signal, s.value, s.pe);
        }
        if (sent) dev::shared_add(&b.state.stats.signals, u64(sent));
    }
    const bool waits = dev::sync_block_or(any && reused());
    if (dev::thread() != 0) return;
    dev::fetch_add_acq_rel(ended, GROUP_SIGNALLED);
    if (waits && !ARISTOS_FAULT(NO_GROUP_QUIET)) dev::quiet_puts();
    dev::fetch_add_acq_rel(ended, GROUP_FREE);
}
// Like end_group_item, for a group of chunks or results. `get(pe, index)` returns the signal of chunk `index` for `pe`.
template <class Get> DEVICE void end_chunk(Block& b, const u32* inter_node, u32* ended, const GroupMessage& m, Get get) {
    const u32 group_size = b.l.shape.window_chunks, first = m.group * group_size, peers = inter_node[0], later = first + STAGE_GROUPS * group_size;
    auto at = [&](u32 number) { return get(inter_node[1 + number % peers], number / peers); };
    end_group_item(b, ended + m.group, m.size, [&](u32 i) { return at(first + i); }, [&] {
        // Successive chunks of a peer are `peers` messages apart. Therefore, if a peer has any chunk in a later group, its first one is
        // among the first `peers` messages from `later` on.
        bool any = false;
        for (u32 i = dev::thread(); i < peers; i += dev::threads()) any = any || at(later + i).signal != nullptr;
        return any;
    });
}

// One thread, after all blocks have finished a step: completes the step's puts, so that the next step may use all staging slots.
DEVICE void end_stages(const Layer& l) {
    if (l.shape.stage && !ARISTOS_FAULT(NO_STEP_QUIET)) dev::quiet_puts();
}

// ---- Headers.
// All threads. Counts the slots of each of `pe`'s experts in this round, in scratch memory.
DEVICE const u32* count_slots(Block& b, u32 pe, u32 first_slot, u32 end_slot) {
    const Layer& l = b.l;
    u32* counts = reinterpret_cast<u32*>(b.scratch);
    for (u32 e = dev::thread(); e < l.shape.max_local; e += dev::threads()) counts[e] = 0;
    dev::sync_block();
    for (u32 i = first_slot + dev::thread(); i < end_slot; i += dev::threads())
        dev::shared_add(counts + slot_expert(l.plan.slot_word[l.plan.dest[pe].slot_base + i]), 1u);
    dev::sync_block();
    return counts;
}
// The part of the rows for `pe` that is sent in this round.
struct RoundPart { u32 first_chunk, end_chunk, first_slot, end_slot; };
DEVICE RoundPart round_part(const Block& b, u32 pe) {
    const Layer& l = b.l;
    const DestPlan& dest = l.plan.dest[pe];
    if (dest.rounds <= b.step.round) return {0, 0, 0, 0};
    const u32* chunks = round_chunks(l, pe) + b.step.round;
    const u32* starts = row_slots(l, pe);
    u32 end_row = chunks[1] * l.shape.chunk_rows < dest.rows ? chunks[1] * l.shape.chunk_rows : dest.rows;
    return {chunks[0], chunks[1], starts[chunks[0] * l.shape.chunk_rows], starts[end_row]};
}
DEVICE void send_header(Block& b, u32 pe) {
    const Layer& l = b.l;
    if (!sends_header(b, pe)) return;
    enter(b, PHASE_DISPATCH);
    const DestPlan& dest = l.plan.dest[pe];
    bool backward = b.step.mode != MODE_FORWARD;
    const RoundPart part = round_part(b, pe);
    const u32* counts = count_slots(b, pe, part.first_slot, part.end_slot);

    u32 buffer = header_buffer(b.pass, backward);
    u64 at = header_offset(l, buffer, l.shape.my_pe);
    // The destination is the peer's buffer for this PE's headers. There is a staging buffer per destination.
    Message m = message(l, l.symmetric.header + at, l.symmetric.header_stage + header_offset(l, buffer, pe), pe);
    u32* words = reinterpret_cast<u32*>(m.to);
    for (u32 e = dev::thread(); e < l.shape.max_local; e += dev::threads()) words[HEADER_WORDS + e] = counts[e];
    u32 world = 0;
    for (u32 p = dev::lane(); p < l.shape.n_pes; p += 32) world = l.plan.dest[p].rounds > world ? l.plan.dest[p].rounds : world;
    for (u32 d = 16; d > 0; d /= 2) {
        u32 other = dev::shfl_xor(world, int(d));
        world = other > world ? other : world;
    }
    if (dev::thread() == 0) {
        words[HEADER_ROUNDS] = dest.rounds;
        words[HEADER_WORLD_ROUNDS] = world;
        words[HEADER_ROWS] = dest.rows;
        words[HEADER_SLOTS] = part.end_slot - part.first_slot;
        words[HEADER_RETURN_CHUNK] = dest.return_chunk;
        words[HEADER_TOKENS] = b.pass.tokens;
        words[HEADER_FIRST_CHUNK] = part.first_chunk;
        words[HEADER_END_CHUNK] = part.end_chunk;
        b.state.stats.header_bytes += l.sizes.header_bytes;
    }
    if (l.sizes.has_losses && !backward && b.step.round == 0) {
        double* sums = reinterpret_cast<double*>(m.to + l.sizes.header_counts_bytes);
        for (u32 i = dev::thread(); i < 2 + 2 * l.shape.n_experts; i += dev::threads()) sums[i] = l.losses.mine[i];
    }
    post(b, m, l.sizes.header_bytes, header_signal(l, buffer, l.shape.my_pe), stamp(b.pass, send_step(b, pe)), pe);
}

// ---- Chunks.

// Chunk `index` of the round for `pe`: whether it exists, and its send. For an inter-node peer the chunk is written to `stage` first.
DEVICE bool has_chunk(const Block& b, u32 pe, u32 index) {
    const u32* chunks = round_chunks(b.l, pe) + b.step.round;
    return sends_rows(b, pe) && chunks[0] + index < chunks[1];
}
DEVICE void send_chunk(Block& b, u32 pe, u32 index, u8* stage) {
    const Layer& l = b.l;
    if (!has_chunk(b, pe, index)) return;
    const DestPlan& dest = l.plan.dest[pe];
    u32 chunk = round_chunks(l, pe)[b.step.round] + index;
    enter(b, PHASE_DISPATCH);

    u32 first_row = chunk * l.shape.chunk_rows, rows = chunk_count(l, dest.rows, chunk), row_bytes = l.sizes.row_bytes;
    Message m = message(l, l.symmetric.window + chunk_offset(l, l.shape.my_pe, pe, index), stage, pe);
    bool gradient = b.step.mode == MODE_GRADIENT;
    const char* from = static_cast<const char*>(gradient ? b.pass.grad_output : b.pass.x);
    const u32* tokens = row_tokens(l, pe) + first_row;
    for (u32 r = dev::warp(); r < rows; r += dev::threads() / 32)
        copy_warp(m.to + u64(r) * row_bytes, from + u64(tokens[r]) * row_bytes, row_bytes);
    u64 bytes = u64(rows) * row_bytes;
    u32 slots = 0;
    if (!gradient) {
        const u32 *starts = row_slots(l, pe) + first_row, *numbers = row_returns(l, pe) + first_row;
        u32 first_slot = starts[0];
        slots = starts[rows] - first_slot;
        u32* to_rows = reinterpret_cast<u32*>(m.to + bytes);
        for (u32 r = dev::thread(); r < rows; r += dev::threads())
            to_rows[r] = (starts[r + 1] - starts[r]) << RETURN_BITS | numbers[r];
        u32* to_slots = to_rows + rows;
        const u32* words = l.plan.slot_word + dest.slot_base + first_slot;
        const u32* weights = reinterpret_cast<const u32*>(l.plan.slot_weight) + dest.slot_base + first_slot;
        for (u32 i = dev::thread(); i < 2 * slots; i += dev::threads())
            to_slots[i] = i % 2 ? weights[i / 2] : words[i / 2];
        bytes += 4 * rows + 8 * slots;
    }
    post(b, m, bytes, chunk_signal(l, l.shape.my_pe, index), stamp(b.pass, send_step(b, pe)), pe);
    if (dev::thread() == 0) {
        PassStats& stats = b.state.stats;
        stats.dispatch_rows += rows;
        stats.dispatch_row_bytes += u64(rows) * row_bytes;
        if (!gradient) stats.dispatch_slot_bytes += 4 * rows + 8 * slots;
    }
}

// Send items of a step: headers for all PEs, then chunk 0 for all, then chunk 1, and so on. Each PE starts with the PE after itself, so
// that the PEs do not all write to PE 0 first.
DEVICE u32 send_items(const Layer& l) { return l.shape.n_pes * (1 + l.shape.round_chunks); }
DEVICE u32 send_pe(const Layer& l, u32 item) { return (l.shape.my_pe + 1 + item % l.shape.n_pes) % l.shape.n_pes; }

// One thread. Whether a send item's window, credit and staging slot are available.
template <class Missing> DEVICE bool send_ready(const Block& b, u32 item, Missing missing) {
    const Layer& l = b.l;
    u32 pe = send_pe(l, item);
    if (item < l.shape.n_pes) return !sends_header(b, pe) || window_free(b, pe, missing);
    u32 index = item / l.shape.n_pes - 1;
    if (has_chunk(b, pe, index) && !(window_free(b, pe, missing) && credit_available(b, pe, index, missing))) return false;
    return !sends_inter_node(l, pe) || stage_slot_free(b.counters().sent, group_message(l, l.tables.inter_node, pe, index, l.shape.round_chunks));
}

// Not OUTLINE: as a separate function it crashes ptxas 13.0 for sm_80.
DEVICE void send(Block& b, u32 item) {
    const Layer& l = b.l;
    u32 n = l.shape.n_pes, me = l.shape.my_pe, pe = send_pe(l, item);
    bool inter_node = sends_inter_node(l, pe);
    if (item < n) {
        send_header(b, pe);
        auto signal = [&](u32 i) -> PendingSignal {
            u32 to = l.tables.inter_node[1 + i];
            if (!sends_header(b, to)) return {};
            return {to, header_signal(l, header_buffer(b.pass, b.step.mode != MODE_FORWARD), me), stamp(b.pass, send_step(b, to))};
        };
        if (inter_node) end_group_item(b, b.counters().headers, l.tables.inter_node[0], signal, [] { return false; });
        return;
    }
    u32 index = item / n - 1;
    if (!inter_node) return send_chunk(b, pe, index, nullptr);
    GroupMessage m = group_message(l, l.tables.inter_node, pe, index, l.shape.round_chunks);
    send_chunk(b, pe, index, l.symmetric.chunk_stage + u64(m.stage_slot) * l.sizes.chunk_pitch);
    end_chunk(b, l.tables.inter_node, b.counters().sent, m, [&](u32 to, u32 number) -> PendingSignal {
        if (!has_chunk(b, to, number)) return {};
        return {to, chunk_signal(l, me, number), stamp(b.pass, send_step(b, to))};
    });
}

}  // namespace aristos
