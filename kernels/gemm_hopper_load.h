// The copying warps of the Hopper GEMM: they fill stages, tile after tile, as fast as the consumers empty them.
//
// Weights come by TMA. Rows that are gathered through pointers, or whose tail must not be read, come by cp.async, 16 bytes per
// lane and a whole 128-byte line per quarter warp, to where TMA would have put them; what lies outside is filled with zeros.
//
// cp.async writes as a thread does, wgmma reads as the asynchronous proxy: so a thread waits for its own copies, fences, and only
// then arrives on the stage's barrier. IN_FLIGHT younger stages stay in flight meanwhile.
#pragma once
#include "gemm_hopper_stage.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

constexpr u32 IN_FLIGHT = 2;
static_assert(IN_FLIGHT < STAGES, "the consumers free a stage only after it was published");

struct Loader {
    char* stages;
    Control* control;
    u32 begun = 0, published = 0;  // stages, over all tiles
};

// Waits until the next stage is free. Each thread waits for itself, because each overwrites a part of the stage.
DEVICE char* begin_stage(const Loader& l) {
    u32 s = nth<STAGES>(l.begun);
    dev::mbarrier_wait(&l.control->empty[s], parity<STAGES>(l.begun) ^ 1);
    return l.stages + s * STAGE_BYTES;
}

DEVICE void publish_one(Loader& l) { dev::mbarrier_arrive(&l.control->full[nth<STAGES>(l.published++)]); }

DEVICE void end_stage(Loader& l) {
    dev::cp_async_commit();
    l.begun++;
    if (l.begun - l.published > IN_FLIGHT) {
        dev::cp_async_wait<IN_FLIGHT>();
        dev::fence_proxy_async();
        publish_one(l);
    }
}

DEVICE void publish_all(Loader& l) {
    dev::cp_async_wait<0>();
    dev::fence_proxy_async();
    while (l.published < l.begun) publish_one(l);
}

template <class T> DEVICE const T* shfl_pointer(const T* p, u32 lane) {
    return reinterpret_cast<const T*>(dev::shfl(reinterpret_cast<u64>(p), int(lane)));
}

// Where TMA finds the 256 columns of B. K-major: panels 0 and 1 are rows of `first`, panels 2 and 3 of `second`. MN-major: all
// panels are columns of `first`, or, in the second half of K, of `second`.
struct WeightBoxes {
    const TensorMap *first, *second;
    u32 n_first, n_second;
};

DEVICE WeightBoxes weight_boxes(const GemmTask& t) {
    auto* maps = static_cast<const TensorMap*>(t.tensor_maps);
    auto *gate = maps, *up = maps + 1, *down = maps + 2;
    switch (t.kind) {
        case FORWARD_UP:
            return t.gated ? WeightBoxes{gate, up, t.n0, t.n0} : WeightBoxes{up, up, t.n0, t.n0 + TILE_N / 2};
        case BACKWARD_UP: return t.gated ? WeightBoxes{gate, up, t.n0, t.n0} : WeightBoxes{up, up, t.n0, t.n0};
        default: return {down, down, t.n0, t.n0 + TILE_N / 2};
    }
}

// A: rows of the output. B: weights.
template <class T> DEVICE void load_rows_and_weights(const GemmTask& t, Loader& l) {
    // A warp copies every third group of 4 lines, at most 11 of the 32. Lane i holds the pointers of the warp's lines i and
    // 32 + i.
    constexpr u32 GROUPS = TILE_M / 4, TURNS = (GROUPS + COPY_WARPS - 1) / COPY_WARPS;
    static_assert(TURNS * 4 <= 64, "two pointers a lane");
    const u32 thread = dev::thread(), warp = thread / 32, lane = thread % 32, piece = lane % 8, sub = lane / 8;
    const RowSource<T> rows = a_rows<T>(t);
    const T* held[2];
    UNROLL for (u32 j = 0; j < 2; j++) {
        u32 of_warp = lane + 32 * j, line = (warp + of_warp / 4 * COPY_WARPS) * 4 + of_warp % 4;
        held[j] = line < TILE_M ? rows.row(t.m0 + line) : nullptr;
    }
    const u32 place = swizzled(warp * 4 + sub, piece);
    publish_all(l);  // of the previous tile, while these pointers arrive

    const WeightBoxes boxes = weight_boxes(t);
    const bool mn_major = b_mn_major(t.kind);
    // Gate's and up's rows are apart in memory, so neither may begin in the middle of a box.
    const u32 halves = t.kind == BACKWARD_UP && t.gated ? 2 : 1, half_k = gemm_k(t) / halves;
    for (u32 half = 0; half < halves; half++) {
        for (u32 k = 0; k < half_k; k += TILE_K) {
            char* stage = begin_stage(l);
            if (thread == 0) {
                u64* full = &l.control->full[nth<STAGES>(l.begun)];
                dev::mbarrier_arrive_expect(full, B_BYTES);
                UNROLL for (u32 p = 0; p < TILE_N / PANEL; p++) {
                    char* panel = stage + A_BYTES + p * PANEL_BYTES;
                    if (mn_major) {
                        dev::tma_load_2d(panel, half ? boxes.second : boxes.first, full, i32(t.n0 + p * PANEL), i32(k));
                    } else {
                        u32 n = (p < 2 ? boxes.n_first : boxes.n_second) + p % 2 * PANEL;
                        dev::tma_load_2d(panel, p < 2 ? boxes.first : boxes.second, full, i32(k), i32(n));
                    }
                }
            }
            dev::sync_warp();
            const bool inside = k + piece * 8 < half_k;
            const u32 column = half * half_k + k + piece * 8;
            UNROLL for (u32 i = 0; i < TURNS; i++) {
                const T* row = shfl_pointer(held[i / 8], i % 8 * 4 + sub);
                // As `swizzled`: lines are 12 apart, which flips bit 2 of `line & 7` each time.
                char* to = stage + (i % 2 ? place ^ 64 : place) + i * (COPY_WARPS * 4 * 128);
                if (i < GROUPS / COPY_WARPS || warp < GROUPS % COPY_WARPS) dev::cp_async16(to, row + column, row && inside);
            }
            end_stage(l);
        }
    }
}

// Both operands MN-major, a line for each slot: weight gradients.
template <class T> DEVICE void load_slots(const GemmTask& t, Loader& l) {
    // The first warp copies A's two panels, the second B's first two, the third B's last two.
    const u32 thread = dev::thread(), warp = thread / 32, lane = thread % 32, piece = lane % 8, sub = lane / 8;
    const u32 column = (warp == 0 ? t.m0 : t.n0 + (warp - 1) * 2 * PANEL) + piece * 8;
    const u32 limit = warp == 0 ? gemm_m(t) : gemm_n(t);
    const bool inside[2] = {column < limit, column + PANEL < limit};
    const u32 place = warp * (2 * PANEL_BYTES) + swizzled(sub, piece);
    // Lane i holds the pointers of lines i and 32 + i: those of this stage, and those of the next, whose loads are in flight.
    const RowSource<T> rows = warp == 0 ? a_rows<T>(t) : b_mn_major_rows<T>(t);
    const T* next[2];
    UNROLL for (u32 j = 0; j < 2; j++) next[j] = rows.row(lane + 32 * j);
    publish_all(l);

    for (u32 k = 0; k < t.rows; k += TILE_K) {
        const T* held[2];
        UNROLL for (u32 j = 0; j < 2; j++) {
            held[j] = next[j];
            next[j] = rows.row(k + TILE_K + lane + 32 * j);
        }
        char* stage = begin_stage(l);
        if (thread == 0) dev::mbarrier_arrive(&l.control->full[nth<STAGES>(l.begun)]);  // in place of TMA
        UNROLL for (u32 i = 0; i < TILE_K / 4; i++) {
            const T* row = shfl_pointer(held[i / 8], i % 8 * 4 + sub);
            // As `swizzled`: lines are 4 apart, which flips bit 2 of `line & 7` each time.
            char* to = stage + (i % 2 ? place ^ 64 : place) + i * (4 * 128);
            UNROLL for (u32 p = 0; p < 2; p++) {
                dev::cp_async16(to + p * PANEL_BYTES, row + column + p * PANEL, row && inside[p]);
            }
        }
        end_stage(l);
    }
}

// What the copying warps do: all tasks' loads, in the order of the queue.
template <class T, u32 KINDS> DEVICE void copy_loop(Loader l) {
    for (u32 n = 0;; n++) {
        u32 e = nth<ENTRIES>(n);
        const Entry& entry = l.control->entry[e];
        // The next task may wait for what the stages in flight will give, so they are published before waiting for it.
        if (!dev::mbarrier_test(&l.control->known[e], parity<ENTRIES>(n))) {
            publish_all(l);
            dev::mbarrier_wait(&l.control->known[e], parity<ENTRIES>(n));
        }
        if (!entry.more) break;
        if (a_mn_major<KINDS>(entry.task.kind)) load_slots<T>(entry.task, l);
        else load_rows_and_weights<T>(entry.task, l);
        dev::sync_warp();
        if (dev::lane() == 0) dev::mbarrier_arrive(&l.control->done[e]);
    }
    publish_all(l);
}

}  // namespace hopper
}  // namespace aristos
#endif
