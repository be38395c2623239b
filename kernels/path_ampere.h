// How a block of a persistent kernel computes: one task after the other, by mma.sync.
#pragma once
#include "gemm_ampere.h"
#include "launch.h"
#include "tasks.h"

namespace aristos {

// Functions of their own: the products want every register, and both kernels share them.
template <class T> OUTLINE void ampere_task(const GemmTask& task, char* shared) { gemm_task_ampere<T>(task, shared); }
OUTLINE bool next_task(Scheduler& scheduler, GemmTask& task) { return scheduler.next(task); }

template <class T> struct AmperePath {
    using Element = T;
    static constexpr u32 SHARED_BYTES = AmpereTile::SHARED_BYTES;
    static_assert(SHARED_BYTES + STATE_BYTES <= AMPERE_SHARED && AmpereTile::THREADS == AMPERE_THREADS, "launch.h");

    static DEVICE void run(Scheduler& scheduler, State& state, char* shared) {
        for (;;) {
            if (dev::thread() == 0) state.more = next_task(scheduler, state.task);
            dev::sync_block();
            if (!state.more) return;
            ampere_task<T>(state.task, shared);
            if (dev::thread() == 0) scheduler.done(state.task);
        }
    }
};

}  // namespace aristos
