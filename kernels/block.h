// State of one block of a persistent kernel: its pass and step, its statistics, and its time per phase.
#pragma once
#include "gemm.h"
#include "protocol.h"

namespace aristos {

// Kind of a step. RECOMPUTE: in backward, the rows of a round are received again and the first GEMM is recomputed, because activations of
// several rounds are not kept.
enum Mode : u32 { MODE_FORWARD = 0, MODE_RECOMPUTE = 1, MODE_GRADIENT = 2 };

struct Step {
    u32 round;
    u32 mode;
    u32 receives;   // 1: this PE receives slots
    u32 with_shared;  // 1: the step computes the shared expert
};

struct Item { u32 kind, index, pe; };  // items.h
// Facts about a step that a block caches in State::known: the bit of each ItemKind whose items are all claimed, and these flags. KNOWN_OWN,
// KNOWN_LAYOUT: the layout is complete. KNOWN_QUEUE << q: all tasks of queue q are claimed.
enum Known : u32 { KNOWN_OWN = 1u << 16, KNOWN_LAYOUT = 1u << 17, KNOWN_QUEUE = 1u << 18 };
// Progress watchdog of a wait for an item: time of the last progress, time of the last check, and items claimed at that check.
struct ProgressWatchdog {
    u64 last_progress, last_check;
    u32 items_claimed;
};

// A block's state in shared memory, after the GEMM's memory. Only one thread at a time writes the times and counts.
struct State {
    u64 phase_ns[PHASES];
    u64 since;
    u32 phase;
    Item item;        // the current item
    u32 ticket;       // ticket of the task being checked
    u32 more;         // 1: `task` is valid
    u32 early;        // Found: result of polling for the next task before the current one was finished
    // Cursors into this step, so that polling resumes where it stopped:
    u32 headers_seen; // leading PEs whose headers have arrived
    u32 source;
    u32 channel;      // of the gradient sums
    u32 served;       // index among the sources that this PE relays
    u32 entry[TASK_QUEUES];
    // Claimed work whose inputs are still missing, or NONE: one task per queue, and results for one source.
    u32 held_tasks[TASK_QUEUES];
    u32 held_results, results_source;
    u32 known;        // ItemKinds and Known
    u32 is_second_cta;      // 1: the second block of a CTA pair
    ProgressWatchdog watchdog;
    u32 sums[32];     // per warp, for scans
    PassStats stats;
    GemmTask task;
    GemmTask next;    // valid with FOUND_TASK
};
// A block's context in shared memory, with a copy of the pass. In registers these values would be live across the GEMMs, which need every
// register. Thread 0 writes them between barriers.
struct Block {
    const Layer& l;
    const Pass pass;
    State& state;
    char* scratch;        // shared memory that items may use
    u64 first_step;       // steps finished before this pass
    u32 steps = 0;        // steps begun in this pass
    u32 set = 0;          // index of the set of counters
    u32 phase = PHASE_IDLE;  // PhaseId of the current item
    u32 actions = 0;      // actions begun in this step
    u32 items = 0;        // set of ItemKinds that this block may claim now
    Step step = {};

    DEVICE const Counters& counters() const { return l.counters[set]; }
};

constexpr u32 STATE_BYTES = 1024;  // a State, then a Block
static_assert(sizeof(State) % alignof(Block) == 0 && sizeof(State) + sizeof(Block) <= STATE_BYTES, "state");

// ---- Phases. One thread.
DEVICE void add_span(const Layer& l, u64 start, u64 end, u32 phase) {
    u32 at = dev::fetch_add(&l.control->span_count, 1u);
    if (at < MAX_SPANS) l.spans[at] = {start, end, dev::block(), phase};
}

DEVICE void enter_now(const Layer& l, const Pass& pass, State& s, u32 phase) {
    if (s.phase == phase) return;
    u64 now = dev::nanoseconds();
    s.phase_ns[s.phase] += now - s.since;
    if (pass.trace && s.phase != PHASE_IDLE) add_span(l, s.since, now, s.phase);
    s.since = now;
    s.phase = phase;
}

// All threads. A barrier must separate this call from the last read of the previous item's phase.
DEVICE void enter(Block& b, u32 phase) {
    if (dev::thread() == 0) {
        b.phase = phase;
        enter_now(b.l, b.pass, b.state, phase);
    }
    dev::sync_block();
}

// One thread. Whether a once-per-step event has happened, cached in State::known.
DEVICE bool knows(Block& b, Known what, const u32* word) {
    if (b.state.known & what) return true;
    if (!counter_reached(word, 1)) return false;
    b.state.known |= what;
    return true;
}

// ---- Waits of a block. All threads. For each i in [0, count) one thread calls `word(i)`, which waits and returns whether it succeeded.
// Afterwards the data is visible to all threads.
template <class Word> DEVICE bool wait_block(Block& b, u32 count, Word word) {
    if (dev::thread() == 0) enter_now(b.l, b.pass, b.state, PHASE_WAITING);
    bool ok = true;
    for (u32 i = dev::thread(); i < count && ok; i += dev::threads()) ok = word(i);
    bool all = !dev::sync_block_or(!ok);
    if (dev::thread() == 0) enter_now(b.l, b.pass, b.state, b.phase);
    return all;
}

// Like wait_block, for signals of peers.
template <class Word> DEVICE bool wait_signals(Block& b, u32 count, Word word) {
    if (!wait_block(b, count, word)) return false;
    acquire_network(b.l);
    return true;
}

// All threads. Records an error that names the PE if any thread has `wrong`.
DEVICE bool check_peer(Block& b, bool wrong, u32 pe, u32 what, u64 expected, u64 seen, u64 index) {
    if (wrong) record_error(b.l, ERROR_PROTOCOL, {pe, what, b.phase, expected, index}, seen);
    return !dev::sync_block_or(wrong);
}

// All threads. Exclusive prefix sums of `get(i)`, i in [0, n), passed to `put(i, sum)`; returns the total.
template <class Get, class Put> DEVICE u32 scan_block(Block& b, u32 n, Get get, Put put) {
    u32 lane = dev::lane(), warp = dev::warp(), warps = dev::threads() / 32;
    u32 total = 0;
    for (u32 first = 0; first < n; first += dev::threads()) {
        u32 i = first + dev::thread();
        u32 value = i < n ? get(i) : 0;
        u32 sum = value;
        UNROLL for (u32 d = 1; d < 32; d *= 2) {
            u32 other = dev::shfl_up(sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) b.state.sums[warp] = sum;
        dev::sync_block();
        u32 before = 0, all = 0;
        for (u32 w = 0; w < warps; w++) {
            if (w == warp) before = all;
            all += b.state.sums[w];
        }
        if (i < n) put(i, total + before + sum - value);
        total += all;
        dev::sync_block();
    }
    return total;
}

// ---- Copies of whole 16-byte pieces. Each lane issues several loads before its first store.
DEVICE void copy_warp(char* to, const char* from, u32 bytes) {
    constexpr u32 DEPTH = 8;
    u32 pieces = bytes / 16, lane = dev::lane();
    u32 i = lane;
    for (; i + (DEPTH - 1) * 32 < pieces; i += DEPTH * 32) {
        Vec16 v[DEPTH];
        UNROLL for (u32 k = 0; k < DEPTH; k++) v[k] = dev::load16_stream(from + u64(i + k * 32) * 16);
        UNROLL for (u32 k = 0; k < DEPTH; k++) dev::store16(to + u64(i + k * 32) * 16, v[k]);
    }
    for (; i < pieces; i += 32) dev::store16(to + u64(i) * 16, dev::load16_stream(from + u64(i) * 16));
}

// ---- Chunks.
DEVICE u32 chunk_count(const Layer& l, u32 rows, u32 chunk) {
    u32 first = chunk * l.shape.chunk_rows;
    u32 left = rows - first;
    return left < l.shape.chunk_rows ? left : l.shape.chunk_rows;
}
DEVICE u32 chunks_of(const Layer& l, u32 rows) { return (rows + l.shape.chunk_rows - 1) / l.shape.chunk_rows; }

}  // namespace aristos
