// The task loop of a persistent kernel with mma.sync: one task after the other.
#pragma once
#include "gemm_ampere.h"
#include "launch.h"
#include "tasks.h"

namespace aristos {

// Separate functions, so that they keep no registers live: the GEMMs need them all.
OUTLINE u32 poll_ahead(Block& b) { return Scheduler{b}.poll(b.state.next); }
OUTLINE bool next_task(Block& b) { return Scheduler{b}.next(b.state.task, [] { return false; }); }
OUTLINE void task_done(Block& b) { Scheduler{b}.done(b.state.task); }

// Runs tasks until there is another item. All threads call `compute(task, meanwhile)`, which ends with a barrier after the last use of
// the task. Late in the task one thread calls `meanwhile`, which polls for the next task or item while other warps still work. The work
// found does not depend on the current task, so both can be finished. If none is found, the thread polls again, and may wait, after the
// current task is reported.
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
