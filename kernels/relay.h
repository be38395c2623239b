// Rows once per host: what a home does for the sources on other hosts that it stands for.
//
// A source has one home on every other host, and sends it what it has for all PEs there, as if the home had their experts: a row crosses once. Header and
// chunks stay in the home's memory, where the PEs of its host, which reach it by loads, take what they need: so the home passes on signals alone. Of
// results each PE puts its part of a row, the sum over its own experts, to the home, through a few places; the home adds the parts in the order of
// PEs and returns one row. What the source sees is one PE. What the PEs of the host see is a source whose rows come and go through another's memory. All of
// them are of one expert-parallel group.
//
// Why nothing is overwritten too early: a place in a window within a round when all PEs of the host have emptied it, since only then the home gives
// credit or an acknowledgement; after the round when its results are back, which need all parts, and a part all of its rows; a header as ever; a part
// when the home gives credit.
#pragma once
#include "combine.h"

namespace aristos {

enum RelayItem : u32 {
    RELAY_HEADER = 0,
    RELAY_CHUNK = 1,    // its signal goes to all PEs of this host
    RELAY_CONSUMED = 2,  // by all of them
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
// One thread: whether all PEs of this host have what they need of a chunk.
template <class Missing> DEVICE bool chunk_consumed(const Block& b, u32 source, u32 index, Missing missing) {
    const Layer& l = b.l;
    for (u32 m = 0; m < l.shape.members; m++) {
        const Waiting w{member_pe(l, m), WHAT_CREDIT, PHASE_DISPATCH, arrived_stamp(b), index};
        if (!signal_arrived(consumed_signal(l, m, source, index), w, missing)) return false;
    }
    return true;
}

// The item.
OUTLINE void relay(Block& b, u32 source, u32 item) {
    const Layer& l = b.l;
    const u32 what = item & ((1u << RELAY_BITS) - 1), index = item >> RELAY_BITS, me = l.shape.my_pe;
    enter(b, PHASE_DISPATCH);
    if (what == RELAY_CONSUMED) {
        acknowledge(b, source, l.received.first_chunk[source] + index);
        return_credit(b, source, index, arrived_stamp(b));
        return;
    }
    // What the network card wrote is seen here before another PE reads it here.
    acquire_network(l);
    const bool header = what == RELAY_HEADER;
    u64* word = header ? header_signal(l, header_buffer(b.pass, b.step.mode != MODE_FORWARD), source) : chunk_signal(l, source, index);
    const u64 value = header ? stamp(b.pass, 2 * b.step.round) : arrived_stamp(b);
    for (u32 i = dev::thread(); i < l.shape.members; i += dev::threads())
        if (member_pe(l, i) != me) signal_peer(l, word, value, member_pe(l, i));
    if (dev::thread() == 0) b.state.stats.signals += l.shape.members - 1;
}

}  // namespace aristos
