// How a block of a persistent kernel computes on Hopper: loads, products and epilogues of successive tasks overlap.
#pragma once
#include "gemm_hopper.h"
#include "launch.h"
#include "tasks.h"

#if ARISTOS_HOPPER
namespace aristos {

template <class T> struct HopperPath {
    using Element = T;
    static constexpr u32 SHARED_BYTES = (hopper::SHARED_BYTES + 127) / 128 * 128;
    static_assert(SHARED_BYTES + STATE_BYTES <= HOPPER_SHARED && hopper::THREADS == HOPPER_THREADS, "launch.h");

    static DEVICE void run(Scheduler& scheduler, State&, char* shared) { gemm_loop_hopper<T>(scheduler, shared); }
};

}  // namespace aristos
#endif
