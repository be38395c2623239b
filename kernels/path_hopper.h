// The task loop of a persistent kernel on Hopper: loads, GEMMs and epilogues of successive tasks overlap.
#pragma once
#include "gemm_hopper.h"
#include "launch.h"
#include "cta_pair.h"

#if ARISTOS_HOPPER
namespace aristos {

// Tiles of 128 x N, or of 256 x N for CTA pairs.
template <class T, u32 KINDS, u32 N, u32 BLOCKS = 1> struct HopperPath {
    using Element = T;
    static constexpr bool BACKWARD = KINDS == BACKWARD_KINDS;
    static constexpr bool CTA_PAIR = BLOCKS == 2;
    using CtaPair = aristos::CtaPair;
    static constexpr u32 SHARED_BYTES = (hopper::Tile<N, BLOCKS>::SHARED_BYTES + 127) / 128 * 128;
    static_assert(launched_as(HOPPER, BLOCKS * hopper::TILE_M, N, hopper::THREADS, SHARED_BYTES + STATE_BYTES, BLOCKS), "launch.h");

    // Inlined: a separate function would not know the producers' reduced register limit (setmaxnreg).
    struct Source {
        Block& b;
        template <class InProgress> DEVICE bool next(GemmTask& t, InProgress task_in_progress) { return Scheduler{b}.next(t, task_in_progress); }
        DEVICE DoneCounters done_counters(const GemmTask& t) { return Scheduler{b}.done_counters(t); }
    };
    // One thread of each block; a barrier before `run` follows.
    static DEVICE void begin(const Layer& l) {
        for (u32 i = 0; i < 2 * WEIGHT_MAPS; i++) dev::tensor_map_fence(static_cast<const TensorMap*>(l.tables.tensor_maps) + i);
        for (const SlotStore* store : {&l.batches.routed, &l.batches.shared}) {
            for (u32 i = 0; store->slot_maps && i < SLOT_MAPS; i++) {
                dev::tensor_map_fence(reinterpret_cast<const TensorMap*>(store->slot_maps) + i);
            }
        }
    }
    static DEVICE void run(Block& b) {
        if constexpr (CTA_PAIR) {
            CtaPair::call(b);
            CtaPairScheduler source{b};
            gemm_loop_hopper<T, KINDS, N, BLOCKS>(source, dev::shared());
        } else {
            Source source{b};
            gemm_loop_hopper<T, KINDS, N>(source, dev::shared());
        }
    }
};

}  // namespace aristos
#endif
