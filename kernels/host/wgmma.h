// State of asynchronous wgmma (tensor.cpp).
//
// When a thread issues a wgmma, its accumulators are borrowed and replaced by NaN; the wait that covers their last wgmma returns them. The
// products are computed at a seeded moment in between, after all 128 threads have issued the wgmma. Code that reads accumulators or
// overwrites operands too early thus gets wrong results.
#pragma once
#include <memory>

#include "../params.h"
#include "tsan.h"

namespace aristos::host {

constexpr u32 WARPGROUP = 128;

// 64 x n accumulators, row-major, while borrowed from their threads.
struct Accumulators {
    u32 n = 0;
    u32 open = 0;                 // threads whose accumulators are still borrowed
    float* of_thread[WARPGROUP];  // where they return to; null if not borrowed
    u64 last_use[WARPGROUP];      // the thread's last wgmma that uses them, counted from 1
    UntrackedVector<float> values;
};

struct WgmmaOp {
    u64 desc_a, desc_b;
    u32 n, arrived;
    bool accumulate, bf16, trans_a, trans_b;
    Accumulators* accumulators;
    u32 fenced[32];  // Fiber::fenced at issue, minimum over all threads
};

struct WgmmaGroup {
    UntrackedVector<WgmmaOp> ops;  // from number `first` on
    u64 first = 0, done = 0;      // counted in wgmmas since the block began
    UntrackedVector<std::unique_ptr<Accumulators>> accumulators;
};

struct WgmmaThread {
    u64 issued = 0;
    u64 groups = 0;
    u64 group_end[16];            // for the last 16 groups: wgmmas issued until then
    bool fenced = false;
    u32 borrowed = 0;                // borrowed accumulators
};

}  // namespace aristos::host
