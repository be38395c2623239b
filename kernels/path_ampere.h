// How a block of a persistent kernel computes: one task after the other, by mma.sync.
#pragma once
#include "gemm_ampere.h"
#include "launch.h"
#include "tasks.h"

namespace aristos {

// Functions of their own that keep nothing in registers: the products need them all.
OUTLINE bool next_task(Block& b) { return Scheduler{b}.next(b.state.task); }
OUTLINE void task_done(Block& b) { Scheduler{b}.done(b.state.task); }

template <class T, u32 KINDS> struct AmperePath {
    using Element = T;
    static constexpr bool BACKWARD = KINDS == BACKWARD_KINDS;
    static constexpr u32 SHARED_BYTES = AmpereTile::SHARED_BYTES;
    static_assert(SHARED_BYTES + STATE_BYTES <= AMPERE_SHARED && AmpereTile::THREADS == AMPERE_THREADS, "launch.h");
    static_assert(AmpereTile::M == AMPERE_TILE_M && AmpereTile::N == AMPERE_TILE_N, "launch.h");

    static DEVICE void run(Block& b) {
        State& state = *reinterpret_cast<State*>(dev::shared() + SHARED_BYTES);
        for (;;) {
            if (dev::thread() == 0) state.more = next_task(b);
            dev::sync_block();
            if (!state.more) return;
            gemm_task_ampere<T, KINDS>(state.task, dev::shared());
            if (dev::thread() == 0) task_done(b);
        }
    }
};

}  // namespace aristos
