// The state of asynchronous wgmma: tensor.cpp.
//
// A thread's accumulators are taken from it when it issues a wgmma on them, and NaN is left in their place; they come back at
// the wait that covers the last wgmma on them. In between, the products are computed at a seeded moment after the last of the
// 128 threads has issued theirs, so that reading accumulators or overwriting operands too early gives wrong answers.
#pragma once
#include <memory>

#include "../params.h"
#include "tsan.h"

namespace aristos::host {

constexpr u32 WARPGROUP = 128;

// 64 x n accumulators, row-major, while they are taken from their threads.
struct Accumulators {
    u32 n = 0;
    u32 open = 0;                 // threads that do not have theirs back yet
    float* of_thread[WARPGROUP];  // where they go back to; null when not taken, or returned
    u64 last_use[WARPGROUP];      // by the thread's own wgmmas
    UntrackedVector<float> values;
};

struct WgmmaOp {
    u64 desc_a, desc_b;
    u32 n, arrived;
    bool accumulate, bf16, trans_a, trans_b;
    Accumulators* accumulators;
    u32 fenced[32];  // Fiber::fenced when it was issued, the least of all threads
};

struct WgmmaGroup {
    UntrackedVector<WgmmaOp> ops;  // from number `first` on
    u64 first = 0, done = 0;      // numbers of wgmmas since the block began
    UntrackedVector<std::unique_ptr<Accumulators>> accumulators;
};

struct WgmmaThread {
    u64 issued = 0;
    u64 groups = 0;
    u64 group_end[16];            // of the last 16 groups: wgmmas issued until then
    bool fenced = false;
    u32 taken = 0;                // accumulators that are taken
};

}  // namespace aristos::host
