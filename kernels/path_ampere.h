// How a block of a persistent kernel computes: one task after the other, by mma.sync.
#pragma once
#include "gemm_ampere.h"
#include "launch.h"
#include "tasks.h"

namespace aristos {

template <class T> struct AmperePath {
    using Element = T;
    static constexpr u32 SHARED_BYTES = AmpereTile::SHARED_BYTES;
    static_assert(SHARED_BYTES + STATE_BYTES <= AMPERE_SHARED && AmpereTile::THREADS == AMPERE_THREADS, "launch.h");

    static DEVICE void run(Scheduler& scheduler, State& state, char* shared) {
        for (;;) {
            if (dev::thread() == 0) state.more = scheduler.next(state.task);
            dev::sync_block();
            if (!state.more) return;
            gemm_task_ampere<T>(state.task, shared);
            if (dev::thread() == 0) scheduler.done(state.task);
        }
    }
};

}  // namespace aristos
