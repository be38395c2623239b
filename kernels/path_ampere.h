// How a block of a persistent kernel computes: one task after the other, by mma.sync.
#pragma once
#include "gemm_ampere.h"
#include "launch.h"
#include "tasks.h"

namespace aristos {

// Functions of their own that keep nothing in registers: the products need them all.
OUTLINE u32 poll_ahead(Block& b) { return Scheduler{b}.poll(b.state.next); }
OUTLINE bool next_task(Block& b) { return Scheduler{b}.next(b.state.task, [] { return false; }); }
OUTLINE void task_done(Block& b) { Scheduler{b}.done(b.state.task); }

// Tasks until there is another item. `compute(task, meanwhile)`: by all threads, with a barrier after the last use of the task; one thread calls `meanwhile`
// once, towards the end of it, and finds the next one while others still work. What that look took needs nothing of the present task, so the block ends
// both; what needs it is found by the look after it is done, which may wait.
template <class Compute> DEVICE void run_tasks(Block& b, State& state, Compute compute) {
    if (dev::thread() == 0) state.more = next_task(b);
    for (;;) {
        dev::sync_block();
        if (!state.more) return;
        compute(state.task, [&] {
            if (ARISTOS_FAULT(EARLY_DONE)) task_done(b);
            state.early = poll_ahead(b);
            while (ARISTOS_FAULT(LATE_DONE) && state.early == FOUND_NOTHING && wait_for_item(b, b.items)) state.early = poll_ahead(b);
        });
        if (dev::thread() == 0) {
            if (!ARISTOS_FAULT(EARLY_DONE)) task_done(b);
            if (state.early == FOUND_TASK) state.task = state.next;
            else state.more = (state.early == FOUND_NOTHING || ARISTOS_FAULT(ITEM_DROPPED)) && next_task(b);
        }
    }
}

template <class T, class Tile, u32 KINDS> struct AmperePath {
    using Element = T;
    static constexpr bool BACKWARD = KINDS == BACKWARD_KINDS, CTA_PAIR = false;
    static constexpr u32 SHARED_BYTES = Tile::SHARED_BYTES;
    static_assert(launched_as(AMPERE, Tile::M, Tile::N, Tile::THREADS, SHARED_BYTES + STATE_BYTES, 1), "launch.h");

    static DEVICE void begin(const Layer&) {}
    static DEVICE void run(Block& b) {
        State& state = *reinterpret_cast<State*>(dev::shared() + SHARED_BYTES);
        run_tasks(b, state, [&](const GemmTask& t, auto meanwhile) { gemm_task_ampere<T, Tile, KINDS>(t, dev::shared(), meanwhile); });
    }
};

}  // namespace aristos
