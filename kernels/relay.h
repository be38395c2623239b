// One row per host: the work of a relay for its inter-node sources.
//
// A source has one relay on every other host and sends it the rows for all PEs there, as if the relay held all their experts. Each row thus
// crosses to a host once. Header and chunks stay in the relay's memory, where the PEs of its host read them by loads; the relay forwards
// signals alone. Each PE puts its partial results, the sums over its own experts, into a few buffers at the relay. The relay adds the
// partial results in PE order and returns one row. To the source the host looks like one PE; to the PEs of the host the source is one whose
// rows and results pass through another PE's memory. The source and these PEs belong to one EP group.
//
// No buffer is overwritten too early:
// - A chunk buffer is reused within a round once all PEs of the host have consumed it, because the relay returns the credit or the
//   acknowledgement only then.
// - A chunk buffer is reused in the next round once the source has the results of its chunk. The results need the partial results of all
//   PEs, and each PE sends these only after it has read all of its rows.
// - A header buffer follows the rules without relays.
// - A buffer of partial results is reused when the relay returns its credit.
#pragma once
#include "combine.h"

namespace aristos {

enum RelayItem : u32 {
    RELAY_HEADER = 0,
    RELAY_CHUNK = 1,    // forward its signal to all PEs of this host
    RELAY_CONSUMED = 2,  // all PEs of this host have consumed the chunk
};
constexpr u32 RELAY_BITS = 2;

DEVICE u32 source_chunks(const Block& b, u32 source) {
    return b.step.receives ? b.l.received.end_chunk[source] - b.l.received.first_chunk[source] : 0;
}
template <class Missing> DEVICE bool chunk_arrived(const Block& b, u32 source, u32 index, Missing missing) {
    const Layer& l = b.l;
    u32 chunk = l.received.first_chunk[source] + index;
    return signal_arrived(chunk_signal(l, source, index), {source, WHAT_ROWS, PHASE_DISPATCH, arrived_stamp(b), chunk}, missing);
}
// One thread. Whether all PEs of this host have consumed a chunk.
template <class Missing> DEVICE bool chunk_consumed(const Block& b, u32 source, u32 index, Missing missing) {
    const Layer& l = b.l;
    for (u32 m = 0; m < l.shape.members; m++) {
        const Waiting w{member_pe(l, m), WHAT_CREDIT, PHASE_DISPATCH, arrived_stamp(b), index};
        if (!signal_arrived(consumed_signal(l, m, source, index), w, missing)) return false;
    }
    return true;
}

// Runs ITEM_RELAY.
OUTLINE void relay(Block& b, u32 source, u32 item) {
    const Layer& l = b.l;
    const u32 what = item & ((1u << RELAY_BITS) - 1), index = item >> RELAY_BITS, me = l.shape.my_pe;
    enter(b, PHASE_DISPATCH);
    if (what == RELAY_CONSUMED) {
        acknowledge(b, source, l.received.first_chunk[source] + index);
        return_credit(b, source, index, arrived_stamp(b));
        return;
    }
    // Data from the network card must be visible on this PE before another PE of the host reads it from this PE's memory.
    acquire_network(l);
    const bool header = what == RELAY_HEADER;
    u64* word = header ? header_signal(l, header_buffer(b.pass, b.step.mode != MODE_FORWARD), source) : chunk_signal(l, source, index);
    const u64 value = header ? stamp(b.pass, 2 * b.step.round) : arrived_stamp(b);
    for (u32 i = dev::thread(); i < l.shape.members; i += dev::threads())
        if (member_pe(l, i) != me) signal_peer(l, word, value, member_pe(l, i));
    if (dev::thread() == 0) b.state.stats.signals += l.shape.members - 1;
}

}  // namespace aristos
