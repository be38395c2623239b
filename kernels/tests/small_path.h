// A third GEMM path, for tests of the code around it: scalar products, tiles of 32 x 64 and blocks of two warps. On the emulator this path
// takes a hundredth of the time of the others, so that tests can run many seeds. The tiles are small, so that there are many.
#pragma once
#include "../pass.h"
#include "../cta_pair.h"
#include "../path_ampere.h"

namespace aristos {

struct SmallTile {
    static constexpr u32 M = 2 * UNIT_ROWS, N = UNIT_COLS, THREADS = 64;
    static constexpr u32 ROW_SUMS = 2 * UNIT_BYTES, SHARED_BYTES = ROW_SUMS + M * 4, LAUNCH_BYTES = SHARED_BYTES + STATE_BYTES;
};

template <class T, class Meanwhile> DEVICE void gemm_task_small(const GemmTask& t, char* shared, Meanwhile meanwhile) {
    const u32 kind = t.kind, first = t.m0 + dev::warp() * UNIT_ROWS, lane = dev::lane();
    const RowSource<T> a = a_rows<T>(t);
    char* unit = shared + dev::warp() * UNIT_BYTES;
    float acc[8][4] = {};
    for (u32 n = 0; n < 8; n++) {
        for (u32 i = 0; i < 4; i++) {
            const u32 row = first + lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
            if (row >= gemm_m(t)) continue;
            const T* a_row = a_mn_major(kind) ? nullptr : a.row(row);
            const T* b_row = b_mn_major(kind) ? nullptr : b_column<T>(t, column);
            if (b_mn_major(kind) ? t.n0 + column >= gemm_n(t) : b_row == nullptr) continue;
            float sum = 0.0f;
            for (u32 k = 0; k < gemm_k(t); k++) {
                // A slot that a faulty peer never filled has no row.
                const T* from_a = a_mn_major(kind) ? a.row(k) : a_row;
                const T* from_b = b_mn_major(kind) ? b_mn_major_rows<T>(t).row(k) : b_row;
                if (!from_a || !from_b) continue;
                sum += dev::to_float(from_a[a_row ? k : row]) * dev::to_float(from_b[b_row ? k : t.n0 + column]);
            }
            acc[n][i] = sum;
        }
    }
    stage_unit<by_halves<ALL_KINDS>()>(unit, [&](u32 n, u32 i) { return acc[n][i]; });
    if (dev::thread() == 0) meanwhile();
    dev::sync_warp();
    float* row_sums = reinterpret_cast<float*>(shared + SmallTile::ROW_SUMS);
    if (first < gemm_m(t)) finish_unit<T, ALL_KINDS>(t, unit, first - t.m0, 0, SmallTile::M, row_sums);
    dev::sync_block();
    finish_d_weight(t, row_sums, SmallTile::M, SmallTile::N, dev::thread());
    dev::sync_block();
}

template <class T, bool IS_BACKWARD> struct SmallPath {
    using Element = T;
    static constexpr bool BACKWARD = IS_BACKWARD, CTA_PAIR = false;
    static constexpr u32 SHARED_BYTES = SmallTile::SHARED_BYTES;
    static DEVICE void begin(const Layer&) {}
    static DEVICE void run(Block& b) {
        run_tasks(b, b.state, [&](const GemmTask& t, auto meanwhile) { gemm_task_small<T>(t, dev::shared(), meanwhile); });
    }
};

KERNEL(test_forward_small, SmallTile::THREADS, 1)(const Layer* layer, Pass pass) { run_pass<SmallPath<F16, false>>(*layer, pass); }
REGISTER_KERNEL(test_forward_small)
KERNEL(test_backward_small, SmallTile::THREADS, 1)(const Layer* layer, Pass pass) { run_pass<SmallPath<F16, true>>(*layer, pass); }
REGISTER_KERNEL(test_backward_small)

// The small path for CTA pairs, with tiles of 64 x 64. The code around the tasks is the layer's, the task loop is minimal.
template <class T, bool IS_BACKWARD> struct SmallCtaPairPath {
    using Element = T;
    static constexpr bool BACKWARD = IS_BACKWARD, CTA_PAIR = true;
    using CtaPair = aristos::CtaPair;
    static constexpr u32 SHARED_BYTES = SmallTile::SHARED_BYTES;
    static DEVICE void begin(const Layer&) {}
    static DEVICE void run(Block& b) {
        State& s = b.state;
        CtaPairScheduler source{b};
        const bool first = !CtaPair::is_second(), one = dev::thread() == 0;
        CtaPair::call(b);
        for (;;) {
            dev::cluster_sync();  // both blocks have finished with the previous task
            if (one && first) s.more = source.next(s.task, [] { return false; });
            if (one && !first) source.await();
            dev::cluster_sync();
            if (one && !first) {
                s.more = *dev::cluster_shared(&s.more, 0);
                if (s.more) s.task = *dev::cluster_shared(&s.task, 0), s.task.m0 += SmallTile::M;
                source.follow(s.more);
            }
            dev::cluster_sync();
            if (!s.more) return;
            gemm_task_small<T>(s.task, dev::shared(), [] {});
            if (!ARISTOS_FAULT(HALF_DONE)) dev::cluster_sync();
            if (one && first) count_done(source.done_counters(s.task));
        }
    }
};

CLUSTER_KERNEL(test_forward_small_cta_pair, SmallTile::THREADS)(const Layer* layer, Pass pass) { run_pass<SmallCtaPairPath<F16, false>>(*layer, pass); }
REGISTER_CLUSTER_KERNEL(test_forward_small_cta_pair)
CLUSTER_KERNEL(test_backward_small_cta_pair, SmallTile::THREADS)(const Layer* layer, Pass pass) { run_pass<SmallCtaPairPath<F16, true>>(*layer, pass); }
REGISTER_CLUSTER_KERNEL(test_backward_small_cta_pair)

}  // namespace aristos
