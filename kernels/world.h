// Exchange between all PEs of the world, across EP groups, by their numbers in the world.
//
// Only Symmetric::all_reduce, capacity and losses, and their signals, have the same offsets in the symmetric blocks of all PEs of the
// world.
#pragma once
#include "protocol.h"

namespace aristos {

DEVICE bool reaches(const Layer& l, u32 pe) { return pe == l.shape.world_pe || l.tables.world_peer[pe] != 0; }
// The address at the reachable `pe` that corresponds to `mine`.
template <class P> DEVICE P* at_world(const Layer& l, P* mine, u32 pe) {
    if (pe == l.shape.world_pe) return mine;
    return reinterpret_cast<P*>(l.tables.world_peer[pe] + (reinterpret_cast<u64>(mine) - l.symmetric_base));
}
// Like signal_peer.
DEVICE void signal_world(const Layer& l, u64* mine, u64 value, u32 pe) {
    if (reaches(l, pe)) return store_signal(at_world(l, mine, pe), value);
    if (!ARISTOS_FAULT(NO_FENCE_SYS)) dev::fence_sys();
    dev::signal_set(mine, value, pe);
}

// One record from each PE of the world per forward pass, double-buffered by the pass's parity. A buffer is free two passes later: by then
// this PE has all PEs' records of the pass in between, which they sent after reading this buffer.
struct Gathered {
    u8* buffers;    // [2][n_world][bytes]
    u64* signals;  // [n_world]
    u32 bytes;     // a multiple of 4
    u32 what;      // ErrorWhat

    template <class T> DEVICE T* of(const Layer& l, u64 forward, u32 pe) const {
        return reinterpret_cast<T*>(buffers + ((forward & 1) * l.shape.n_world + pe) * u64(bytes));
    }
};

// All threads of one block. Sends this PE's record to all others. Puts over the network read it from this PE's own buffer, which no peer
// writes.
DEVICE void put_record(const Layer& l, const Gathered& g, u64 forward, const void* record) {
    const u32 me = l.shape.world_pe, n = l.shape.n_world, words = g.bytes / 4;
    u32* buffer = g.of<u32>(l, forward, me);
    for (u32 i = 0; i < n; i++) {
        const u32 pe = (me + i) % n;
        if (!reaches(l, pe)) continue;
        u32* to = at_world(l, buffer, pe);
        for (u32 w = dev::thread(); w < words; w += dev::threads()) to[w] = static_cast<const u32*>(record)[w];
    }
    if (l.shape.stage) dev::fence_sys();  // for the network card
    dev::sync_block();
    for (u32 pe = dev::thread(); pe < n; pe += dev::threads())
        if (pe != me && reaches(l, pe)) signal_world(l, g.signals + me, forward, pe);
    u32 inter_node = 0;
    for (u32 pe = 0; l.shape.stage && pe < n; pe++) {
        if (reaches(l, pe)) continue;
        dev::put_block(buffer, buffer, g.bytes, pe);
        inter_node++;
    }
    if (dev::thread() != 0) return;
    if (inter_node) dev::fence_puts();
    for (u32 pe = 0; inter_node && pe < n; pe++)
        if (!reaches(l, pe)) signal_world(l, g.signals + me, forward, pe);
    dev::fetch_add(&l.stats->puts, u64(n - 1));
    dev::fetch_add(&l.stats->signals, u64(n - 1));
    if (!inter_node) return;
    dev::fetch_add(&l.stats->fences, u64(1));
    dev::fetch_add(&l.stats->network_bytes, u64(inter_node) * g.bytes);
}

// All threads. Waits for the records of all others. False if a wait failed.
DEVICE bool wait_records(const Layer& l, const Gathered& g, u64 forward) {
    bool ok = true;
    for (u32 pe = dev::thread(); pe < l.shape.n_world && ok; pe += dev::threads())
        if (pe != l.shape.world_pe) ok = wait_signal(l, g.signals + pe, {pe, g.what, PHASE_ROUTER, forward, 0});
    if (dev::sync_block_or(!ok)) return false;
    acquire_network(l);
    return true;
}

}  // namespace aristos
