// The exchange between PEs: header buffers, stamps, signals, and waits with a time limit. See docs/protocol.md and docs/kernels.md,
// "Rounds".
#pragma once
#include "layer.h"
#include "platform.h"

namespace aristos {

// ---- Words of a header. The counts of the destination's local experts follow, then, at header_counts_bytes, the loss sums as f64.
enum HeaderWord : u32 {
    HEADER_ROUNDS = 0,        // rounds for this destination; 0: no rows
    HEADER_WORLD_ROUNDS = 1,  // maximum number of rounds of this source for any destination
    HEADER_ROWS = 2,          // rows for this destination in all rounds
    HEADER_SLOTS = 3,         // slots in this round
    HEADER_RETURN_CHUNK = 4,  // first chunk buffer in the source's return area for the results of chunk 0
    HEADER_TOKENS = 5,        // tokens of the source
    HEADER_FIRST_CHUNK = 6,   // first chunk of this round
    HEADER_END_CHUNK = 7,
};
static_assert(HEADER_END_CHUNK + 1 == HEADER_WORDS, "counts follow the words");

// Index of one of the three header buffers at the destination. Forward passes alternate between two (docs/protocol.md). Backward needs only
// one: rows follow each of its headers, and the source waits for the results of these rows before it sends the next header.
DEVICE u32 header_buffer(const Pass& pass, bool backward) {
    if (ARISTOS_FAULT(ONE_HEADER_BUFFER)) return backward ? 2 : 0;
    return backward ? 2 : u32(pass.forward & 1);
}

DEVICE u64 header_offset(const Layer& l, u32 buffer, u32 source) {
    return (u64(buffer) * l.shape.n_pes + source) * l.sizes.header_bytes;
}
DEVICE u64* header_signal(const Layer& l, u32 buffer, u32 source) {
    return l.symmetric.header_signal + buffer * l.shape.n_pes + source;
}
// ---- One row per host: relays (relay.h). Without relays every PE represents only itself.
DEVICE u32 relay_entry(const Layer& l, RelayTable table, u32 pe) { return l.tables.relay[table * l.shape.n_pes + pe]; }
// Whether rows of `source` arrive through a relay on this host.
DEVICE bool relayed(const Layer& l, u32 source) { return l.shape.relays && relay_entry(l, RELAY_OF_SOURCE, source) != NONE; }
DEVICE u32 relay_of(const Layer& l, u32 source) { return relayed(l, source) ? relay_entry(l, RELAY_OF_SOURCE, source) : l.shape.my_pe; }
DEVICE bool is_relay_of(const Layer& l, u32 source) { return relayed(l, source) && relay_of(l, source) == l.shape.my_pe; }
DEVICE bool sends_to(const Layer& l, u32 dest) { return !l.shape.relays || relay_entry(l, RELAY_WINDOW_TO, dest) != NONE; }
DEVICE u32 member_pe(const Layer& l, u32 member) { return l.tables.relay[RELAY_TABLES * l.shape.n_pes + member]; }
DEVICE const u32* served_sources(const Layer& l) { return l.tables.relay + RELAY_TABLES * l.shape.n_pes + l.shape.members; }
// An inter-node source numbers the experts of this host by their number on their PE, then by PE. Rows in that order are ordered by expert
// on each PE, too.
DEVICE u32 expert_member(const Layer& l, u32 source, u32 number) { return relayed(l, source) ? number % l.shape.members : l.shape.member; }
DEVICE u32 expert_here(const Layer& l, u32 source, u32 number) { return relayed(l, source) ? number / l.shape.members : number; }

// Offset of chunk `index` of a round in the windows of `dest`; a PE has no window for itself. One of the two PEs is this one. The exception
// is an inter-node source with relays: then `dest` may be the source's relay on this host.
DEVICE u64 chunk_offset(const Layer& l, u32 source, u32 dest, u32 index) {
    u32 window = source < dest ? source : source - 1;
    if (l.shape.relays) window = source == l.shape.my_pe ? relay_entry(l, RELAY_WINDOW_TO, dest) : relay_entry(l, RELAY_WINDOW_FROM, source);
    return (u64(window) * l.shape.window_chunks + index % l.shape.window_chunks) * l.sizes.chunk_pitch;
}
DEVICE u64* chunk_signal(const Layer& l, u32 source, u32 index) {
    return l.symmetric.chunk_signal + u64(source) * l.shape.round_chunks + index;
}
// At a source: the buffer of chunk `index` of the round at `dest` is free again.
DEVICE u64* credit_signal(const Layer& l, u32 dest, u32 index) {
    return l.symmetric.credit_signal + u64(dest) * l.shape.round_chunks + index;
}
DEVICE u64* result_signal(const Layer& l, u32 dest, u32 chunk) {
    return l.symmetric.result_signal + u64(dest) * l.sizes.max_chunks + chunk;
}

// Signals at the relay of `source`: `member` has consumed a chunk, and `member`'s partial results of a chunk have arrived.
DEVICE u64* consumed_signal(const Layer& l, u32 member, u32 source, u32 index) {
    return l.symmetric.consumed_signal + (u64(member) * l.shape.n_pes + source) * l.shape.round_chunks + index;
}
DEVICE u64* part_signal(const Layer& l, u32 member, u32 source, u32 index) {
    return l.symmetric.part_signal + (u64(member) * l.shape.n_pes + source) * l.shape.round_chunks + index;
}
// At a PE: the buffer for its partial results is free again.
DEVICE u64* part_credit(const Layer& l, u32 source, u32 index) {
    return l.symmetric.part_credit + u64(source) * l.shape.round_chunks + index;
}
// The buffer at the relay of `source` for a member's partial results. The relay has no buffer for itself.
DEVICE u8* part_buffer(const Layer& l, u32 member, u32 source, u32 index) {
    const u32 other = member_pe(l, member) < relay_of(l, source) ? member : member - 1;
    const u64 number = u64(other) * l.shape.served + relay_entry(l, RELAY_NUMBER, source);
    return l.symmetric.parts + (number * PART_BUFFERS + index % PART_BUFFERS) * l.sizes.return_pitch;
}

// ---- Stamps. Every signal word is set by one PE, to increasing values.
constexpr u32 STEP_BITS = 24;
DEVICE u64 stamp(const Pass& pass, u32 step) {
    if (ARISTOS_FAULT(STAMP_WITHOUT_PASS)) return step + 1;
    return (pass.pass << STEP_BITS) + step + 1;
}
DEVICE u64 result_stamp(u64 stamp, bool overflow) { return stamp << 1 | (overflow ? 1 : 0); }

// ---- Addresses of weights and gradients of a batch: a local expert, or n_local for the shared expert.
template <class P> DEVICE P* of_expert(P* first, u64 stride, u32 expert) {
    return reinterpret_cast<P*>(reinterpret_cast<u64>(first) + expert * stride);
}
template <class Mlp> DEVICE Mlp of_batch(const Layer& l, const Mlp& first, const MlpStrides& strides, const Mlp& shared, u32 batch) {
    if (batch == l.shape.n_local) return shared;
    return {of_expert(first.gate, strides.gate, batch), of_expert(first.up, strides.up, batch), of_expert(first.down, strides.down, batch),
            of_expert(first.gate_bias, strides.gate_bias, batch), of_expert(first.up_bias, strides.up_bias, batch),
            of_expert(first.down_bias, strides.down_bias, batch)};
}
DEVICE MlpWeights mlp_weights(const Layer& l, u32 batch) {
    return of_batch(l, l.tables.weights, l.tables.weight_strides, l.tables.shared_weights, batch);
}
DEVICE MlpGradients mlp_gradients(const Layer& l, u32 batch) {
    return of_batch(l, l.tables.gradients, l.tables.gradient_strides, l.tables.shared_gradients, batch);
}

// ---- With a caller's routing, neither the router nor the shared expert takes part in the pass.
DEVICE bool routed_by_caller(const Pass& pass) { return pass.ids != nullptr || pass.grad_weights != nullptr; }
DEVICE bool has_shared(const Layer& l, const Pass& pass) { return l.shape.shared_intermediate && !routed_by_caller(pass); }

// ---- Pass numbers. Fills in the numbers of the pass, for kernels up to the persistent one. The last block of that kernel increments the
// counters (`count_pass`).
DEVICE Pass numbered(const Layer& l, Pass pass, bool backward) {
    if (pass.pass == 0) {
        pass.pass = l.symmetric.passes[0] + 1;
        pass.forward = backward ? l.control->forward : l.symmetric.passes[1] + 1;
    }
    return pass;
}
// Number of the pass, for kernels after the persistent one.
DEVICE u64 counted(const Layer& l, const Pass& pass) { return pass.pass == 0 ? l.symmetric.passes[0] : pass.pass; }
DEVICE void count_pass(const Layer& l, const Pass& pass, bool backward) {
    l.symmetric.passes[0] = pass.pass;
    if (backward) return;
    l.symmetric.passes[1] = pass.forward;
    l.control->forward = pass.forward;
}

// ---- Peers.
DEVICE bool reachable(const Layer& l, u32 pe) { return pe == l.shape.my_pe || l.tables.peer[pe] != 0; }

// The address at `pe`, which must be reachable, that corresponds to `mine`.
template <class P> DEVICE P* at_peer(const Layer& l, P* mine, u32 pe) {
    if (pe == l.shape.my_pe) return mine;
    return reinterpret_cast<P*>(l.tables.peer[pe] + (reinterpret_cast<u64>(mine) - l.symmetric_base));
}

// Destination of the results of `source`: the source, or its relay on this host, which adds the partial results of all PEs of the host.
DEVICE u32 returns_to(const Layer& l, u32 source) { return relayed(l, source) && !is_relay_of(l, source) ? relay_of(l, source) : source; }
DEVICE bool returns_inter_node(const Layer& l, u32 source) { return !reachable(l, returns_to(l, source)); }

// Address of data received from `source`: on this PE, or on the relay of `source`.
template <class P> DEVICE P* incoming(const Layer& l, u32 source, P* mine) { return at_peer(l, mine, relay_of(l, source)); }

DEVICE void store_signal(u64* to, u64 value) {
    if (ARISTOS_FAULT(NO_RELEASE)) dev::fetch_add(to, value - dev::load_relaxed(to));
    else dev::store_release_sys(to, value);
}
// Not inlined, like network_put: the persistent kernels have no registers to spare for code that few blocks run.
OUTLINE void network_signal(u64* mine, u64 value, const u32* world) {
    if (!ARISTOS_FAULT(NO_FENCE_SYS)) dev::fence_sys();
    dev::signal_set(mine, value, *world);
}
// Address of a PE's number in the world, which NVSHMEM needs.
DEVICE const u32* world_number(const Layer& l, u32 pe) { return l.tables.world + (ARISTOS_FAULT(WRONG_WORLD_NUMBER) ? 0 : pe); }
// All threads. Like dev::put_block, with the address of the PE's number in the world.
OUTLINE void network_put(void* mine, const void* from, u64 bytes, const u32* world) { dev::put_block(mine, from, bytes, *world); }

// One thread. An observer of the signal sees everything that the block stored before its last barrier, because release is cumulative. Over
// the network this includes completed reads, so that the observer may overwrite the data. Without a fence_puts() after the puts, the signal
// may overtake them.
DEVICE void signal_peer(const Layer& l, u64* mine, u64 value, u32 pe) {
    if (reachable(l, pe)) return store_signal(at_peer(l, mine, pe), value);
    network_signal(mine, value, world_number(l, pe));
}

// ---- Errors and waits.
// Waits within a PE have this multiple of the limit for peers, so that the reported error names the peer at fault.
constexpr u32 LOCAL_LIMIT_FACTOR = 4;

struct Waiting {
    u32 pe;
    u32 what;   // ErrorWhat
    u32 phase;  // PhaseId
    u64 expected;
    u64 index;
};

// `kind` is written last, because a reader may see it at any time.
DEVICE void write_error(ErrorRecord* e, u32 kind, const Waiting& w, u64 seen) {
    e->pe = w.pe;
    e->what = w.what;
    e->phase = w.phase;
    e->expected = w.expected;
    e->seen = seen;
    e->index = w.index;
    dev::fence_sys();
    dev::store_release(&e->kind, kind);
}
// A PE keeps its first error, which stops its other blocks.
DEVICE void record_error(const Layer& l, u32 kind, const Waiting& w, u64 seen) {
    if (!dev::compare_swap(&l.control->error_claimed, 0, 1)) return;
    HostErrors* host = l.tables.host_errors;
    if (host && dev::load_relaxed(&host->stopped.kind) == ERROR_NONE) write_error(&host->stopped, kind, w, seen);
    write_error(l.error, kind, w, seen);
}
// Records an invalid choice in a caller's routing. Stops the pass, unless the host can read the error while passes continue.
DEVICE void record_choice(const Layer& l, const Waiting& w, u64 id) {
    HostErrors* host = l.tables.host_errors;
    if (!host) return record_error(l, ERROR_ROUTING, w, id);
    if (!dev::compare_swap(&l.control->choice_claimed, 0, 1)) return;
    if (dev::load_relaxed(&host->routing.kind) == ERROR_NONE) write_error(&host->routing, ERROR_ROUTING, w, id);
}

DEVICE bool aborted(const Layer& l) { return dev::load_relaxed(&l.error->kind) != ERROR_NONE; }

// One thread. `poll(seen)` returns whether the condition holds, and sets `seen` to the value that it read.
template <class Poll> DEVICE bool wait_until(const Layer& l, const Waiting& w, Poll poll, u32 limit_factor = 1) {
    u64 seen = 0;
    if (poll(seen)) return true;
    u64 start = dev::nanoseconds();
    for (;;) {
        dev::pause();
        if (poll(seen)) return true;
        if (aborted(l)) return false;
        if (dev::nanoseconds() - start > limit_factor * l.shape.wait_limit_ns) {
            record_error(l, ERROR_TIMEOUT, w, seen);
            return false;
        }
    }
}

// One thread. Waits for a word that a peer sets; `shift` drops flag bits. Polls are relaxed and one acquire load follows, because every
// acquire load invalidates the SM's L1 cache.
DEVICE bool wait_signal(const Layer& l, const u64* word, const Waiting& w, u32 shift = 0) {
    bool arrived = wait_until(l, w, [&](u64& seen) {
        seen = dev::load_relaxed(word) >> shift;
        return seen >= w.expected;
    });
    if (arrived && !ARISTOS_FAULT(NO_ACQUIRE)) (void)dev::load_acquire_sys(word);
    return arrived;
}

struct IgnoreMissing { DEVICE void operator()(Waiting, u64) const {} };
// One thread. Like wait_signal, but without waiting: whether the signal has arrived. If not, calls `missing(w, seen)`.
template <class Missing> DEVICE bool signal_arrived(const u64* word, Waiting w, Missing missing, u32 shift = 0) {
    u64 seen = dev::load_relaxed(word) >> shift;
    if (seen < w.expected) {
        missing(w, seen);
        return false;
    }
    if (!ARISTOS_FAULT(NO_ACQUIRE)) (void)dev::load_acquire_sys(word);
    return true;
}
DEVICE bool counter_reached(const u32* word, u32 expected) {
    if (dev::load_relaxed(word) < expected) return false;
    if (!ARISTOS_FAULT(NO_LOCAL_ACQUIRE)) (void)dev::load_acquire(word);
    return true;
}

// All threads, after waits for signals: makes the data visible that arrived over the network before those signals. The call does not
// depend on the sender, because a PE knows which peers it reaches but not which peers reach it.
DEVICE void acquire_network(const Layer& l) {
    if (!l.shape.stage || ARISTOS_FAULT(NO_ACQUIRE_PUTS)) return;
    if (dev::thread() == 0) dev::acquire_puts(l.symmetric.passes);
    dev::sync_block();
}

// One thread. Waits for a word that other blocks of this PE increment.
DEVICE bool wait_local(const Layer& l, const u32* word, u32 expected, u32 phase, u64 index) {
    Waiting w{l.shape.my_pe, WHAT_LOCAL, phase, expected, index};
    bool arrived = wait_until(l, w, [&](u64& seen) {
        seen = dev::load_relaxed(word);
        return seen >= expected;
    }, LOCAL_LIMIT_FACTOR);
    if (arrived && !ARISTOS_FAULT(NO_LOCAL_ACQUIRE)) (void)dev::load_acquire(word);
    return arrived;
}

// All threads of all blocks. False if aborted; other blocks may have returned true.
OUTLINE bool grid_barrier(const Layer& l) {
    dev::sync_block();
    bool ok = true;
    if (dev::thread() == 0) {
        u64 blocks = dev::blocks();
        dev::fence_gpu();
        u64 before = dev::fetch_add(&l.control->barrier, u64(1));
        Waiting w{l.shape.my_pe, WHAT_LOCAL, PHASE_WAITING, (before / blocks + 1) * blocks, dev::block()};
        ok = wait_until(l, w, [&](u64& seen) {
            seen = dev::load_acquire(&l.control->barrier);
            return seen >= w.expected;
        }, LOCAL_LIMIT_FACTOR);
        dev::fence_gpu();
    }
    return !dev::sync_block_or(!ok);
}

// All threads of all blocks of all PEs; bulk mode only. Each of a step's three barriers has its own word: between two uses of a word
// every PE passes another barrier, so the first value has arrived before the second is set.
OUTLINE bool pe_barrier(const Layer& l, const Pass& pass, u32 which, u32 step) {
    if (!grid_barrier(l)) return false;
    bool ok = true;
    u32 n = l.shape.n_pes, me = l.shape.my_pe;
    if (dev::block() == 0) {
        u64 value = stamp(pass, step);
        u64* words = l.symmetric.barrier_signal + which * n;
        dev::fence_sys();
        for (u32 pe = dev::thread(); pe < n; pe += dev::threads())
            if (pe != me) signal_peer(l, words + me, value, pe);
        for (u32 pe = dev::thread(); pe < n && ok; pe += dev::threads())
            if (pe != me) ok = wait_signal(l, words + pe, {pe, WHAT_BARRIER, PHASE_WAITING, value, which});
    }
    if (dev::sync_block_or(!ok)) return false;
    return grid_barrier(l);
}

}  // namespace aristos
