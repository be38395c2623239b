// The Hopper GEMM path: a queue of `GemmTask`s with wgmma, in tiles of 128 x N, with N = 128 or 256.
//
// A block has three warpgroups. In the first, one warp gets tasks from the scheduler, one ahead of the consumers, and three warps load
// operands (gemm_hopper_load.h). Each of the two consumer warpgroups computes 64 rows of the tile and all N columns: N / 2 accumulators per
// thread, for which registers are redistributed (setmaxnreg). A gated FORWARD_UP has gate's N / 2 columns first, then up's, so that a
// thread holds both operands of each product.
//
// Interface of the scheduler, called by thread 96 alone:
// - `bool next(GemmTask&, task_in_progress)` returns the next task once all of its inputs are available, or false at the end of the queue,
//   after which it is not called again. `bool task_in_progress()` returns whether the block still works on an earlier task. `next` may wait
//   for any earlier task of the queue, including this block's, which finishes its tasks without the next one.
// - `DoneCounters done_counters(const GemmTask&)` returns the counters that the last warp to report its part of the task increments,
//   after all results are stored.
//
// Stores are asynchronous: a warp reports a tile complete a few stages into the next one, or at once if no next tile is known.
//
// The consumers never synchronise with each other: one multiplies the next tile while the other is still in its epilogue, which keeps the
// tensor cores busy. The number of stages bounds how far one consumer can be ahead, because both must free a stage before it is refilled.
#pragma once
#include "gemm_hopper_load.h"
#include "gemm_hopper_store.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

// A block may have 384 threads of 168 registers; 128 * 56 + 256 * 224 is the same total.
constexpr u32 EQUAL_REGISTERS = 168, PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;

// Values that live across `next` are in shared memory: the scheduler has no registers left.
template <class Tile, class Scheduler> DEVICE void schedule_loop(Scheduler& scheduler, typename Tile::Control* control) {
    control->requested = 0;
    for (bool more = true; more; control->requested++) {
        u32 n = control->requested;
        wait_free<Tile>(&control->done[nth<ENTRIES>(n)], parity<ENTRIES>(n) ^ 1);
        more = scheduler.next(control->entry[nth<ENTRIES>(n)].task, [&] { return task_in_progress(control, control->requested); });
        n = control->requested;
        Entry& entry = control->entry[nth<ENTRIES>(n)];
        entry.more = more;
        if (more) control->done_counters[nth<REPORTS>(n)] = scheduler.done_counters(entry.task);
        dev::mbarrier_arrive(&control->filled[nth<ENTRIES>(n)]);
        if constexpr (Tile::CTA_PAIR) dev::mbarrier_arrive_remote(&control->offered[nth<ENTRIES>(n)], 1);
    }
}

// A warp reports a tile after this many stages of the next tile, or after all of its stages if there are fewer.
constexpr u32 DEFERRED_STAGES = 3;

template <class Tile> struct Consumer {
    using Accumulators = float (&)[Tile::N / 2];
    char* stages;
    typename Tile::Control* control;
    char* unit;      // this warp's epilogue unit
    u32 group;       // index of its 64 rows in the tile
    bool leads;      // first lane of a warp
    u32 used = 0;    // number of stages used, over all tiles
};

template <bool COPIED, class Tile> DEVICE void release_stage(const Consumer<Tile>& c, u32 n) {
    if (c.leads) free_stage<Tile, COPIED>(&c.control->empty[nth<Tile::STAGES>(n)]);
}

// `copied`: cp.async may have written a part of the stage.
template <class Tile> DEVICE void wait_stage(const Consumer<Tile>& c, u32 n, bool copied) {
    dev::mbarrier_wait(&c.control->full[nth<Tile::STAGES>(n)], parity<Tile::STAGES>(n));
    // The wait makes cp.async writes of other threads visible to this thread in the generic proxy; wgmma reads through the async proxy. A
    // proxy fence must lie between the two, in either thread (PTX ISA, "Proxy-preserved base causality order").
    if (copied) dev::fence_proxy_async();
}

// First lane of a warp, after all lanes have stored: counts the warp's part of the task in `slot` (of REPORTS); the last warp counts the
// task.
template <class Tile> DEVICE void report_part(const Consumer<Tile>& c, u32 slot) {
    if (!ARISTOS_FAULT(EARLY_DONE)) dev::bulk_wait<0>();
    // Releases this warp's stores; the last warp acquires those of all others and releases them with its own.
    if (is_last<Tile>(&c.control->finished[slot])) count_done(c.control->done_counters[slot]);
}
template <class Tile> DEVICE void report_deferred(const Consumer<Tile>& c) {
    if (c.leads) {
        u32& deferred = c.control->deferred[dev::warp() - PRODUCERS / 32];
        if (deferred != 0) report_part(c, deferred - 1);
        deferred = 0;
    }
    dev::sync_warp();
}

// acc += A B over `steps` stages. The products of a stage are issued before those of the previous stage have completed.
template <class T, bool A_MN_MAJOR, bool B_MN_MAJOR, class Tile>
DEVICE void multiply(typename Consumer<Tile>::Accumulators acc, Consumer<Tile>& c, u32 steps, bool copied) {
    const u64 a = descriptor<A_MN_MAJOR>(c.stages + c.group * PANEL_BYTES), b = descriptor<B_MN_MAJOR>(c.stages + A_BYTES);
    dev::wgmma_fence_operand(acc);
    for (u32 i = 0; i < steps; i++) {
        const u32 n = c.used + i, stage = nth<Tile::STAGES>(n) * Tile::STAGE_BYTES;
        wait_stage(c, n, A_MN_MAJOR || copied);
        dev::wgmma_fence();
        UNROLL for (u32 k16 = 0; k16 < TILE_K / 16; k16++) {
            dev::wgmma<T, Tile::N, A_MN_MAJOR, B_MN_MAJOR>(acc, descriptor_at<A_MN_MAJOR>(a, stage, k16), descriptor_at<B_MN_MAJOR>(b, stage, k16), true);
        }
        dev::wgmma_commit();
        dev::wgmma_wait<1>();
        if (i > 0) release_stage<A_MN_MAJOR>(c, n - 1);
        // By now the warp's stores of its previous tile are usually complete, so the report does not wait for long.
        if (i == DEFERRED_STAGES || i + 1 == steps) report_deferred(c);
    }
    dev::wgmma_wait<0>();
    dev::wgmma_fence_operand(acc);
    c.used += steps;
    release_stage<A_MN_MAJOR>(c, c.used - 1);
}

// Writes columns 64 u to 64 u + 63 of this warp to its unit, in epilogue.h's order. One branch per u keeps the accumulators' indices
// constant.
template <class Tile, u32 U = 0>
DEVICE void stage_columns(typename Consumer<Tile>::Accumulators acc, u32 u, bool paired, char* unit) {
    if constexpr (U + 1 < Tile::N / UNIT_COLS) {
        if (u != U) return stage_columns<Tile, U + 1>(acc, u, paired, unit);
    }
    stage_unit<false>(unit, [&](u32 n, u32 i) {
        u32 half = GATED_GROUP / 8;
        u32 pair = (U * half + n % half + (n < half ? 0 : Tile::N / 16)) * 4 + i;
        return paired ? acc[pair] : acc[(U * 8 + n) * 4 + i];
    });
}

template <class T, u32 KINDS, class Tile>
DEVICE void finish_tile(typename Consumer<Tile>::Accumulators acc, const GemmTask& t, const Consumer<Tile>& c) {
    const u32 row = c.group * PANEL + dev::warp() % 4 * UNIT_ROWS, r = dev::lane() % UNIT_ROWS;
    const bool paired = is_paired(t);
    if (t.m0 + row >= gemm_m(t)) return;
    if ((KINDS & STORED_KINDS & 1u << t.kind) != 0) return store_tile<T, KINDS, Tile>(acc, t, row, c.unit);
    float* row_sums = c.control->row_sums;
    float row_sum = 0.0f;
    // Not unrolled, so that there is one copy of the epilogue's code.
    for (u32 u = 0; u < Tile::N / UNIT_COLS && t.n0 + (paired ? u * GATED_GROUP : u * UNIT_COLS) < gemm_n(t); u++) {
        stage_columns<Tile>(acc, u, paired, c.unit);
        dev::sync_warp();
        // A row of the tile belongs to one warp, so its units' sums are added here, in ascending order of columns.
        static_assert(!by_halves<KINDS & ~STORED_KINDS>(), "as stage_columns has staged it");
        finish_unit<T, KINDS & ~STORED_KINDS>(t, c.unit, row, u * UNIT_COLS, 0, row_sums);
        dev::sync_warp();
        if (t.kind == BACKWARD_DOWN) row_sum += row_sums[row + r];
    }
    if (t.kind == BACKWARD_DOWN && t.d_weight && dev::lane() < UNIT_ROWS && t.m0 + row + r < t.rows) {
        t.d_weight[u64(t.m0 + row + r) * t.d_weight_stride + t.n0 / Tile::N] = row_sum;
    }
}

template <class T, u32 KINDS, class Tile> DEVICE void consume_loop(Consumer<Tile> c) {
    for (u32 n = 0;; n++) {
        u32 e = nth<ENTRIES>(n);
        const Entry& entry = c.control->entry[e];
        const GemmTask& t = entry.task;
        dev::mbarrier_wait(&c.control->filled[e], parity<ENTRIES>(n));
        if (!entry.more) break;
        const u32 steps = task_stages(t);
        if (t.m0 + c.group * PANEL < gemm_m(t)) {
            float acc[Tile::N / 2];
            UNROLL for (u32 i = 0; i < Tile::N / 2; i++) acc[i] = 0.0f;
            const bool copied = !rows_by_tma(t, t.m0 + c.group * PANEL);
            if (a_mn_major<KINDS>(t.kind)) multiply<T, true, true, Tile>(acc, c, steps, true);
            else if (b_mn_major<KINDS>(t.kind)) multiply<T, false, true, Tile>(acc, c, steps, copied);
            else multiply<T, false, false, Tile>(acc, c, steps, copied);
            finish_tile<T, KINDS, Tile>(acc, t, c);
        } else {
            report_deferred(c);
            for (u32 i = 0; i < steps; i++, c.used++) {
                wait_stage(c, c.used, true);
                release_stage<KINDS != FORWARD_KINDS>(c, c.used);
            }
        }
        dev::sync_warp();  // orders all lanes' stores before the report
        if (dev::lane() == 0) {
            const u32 next = nth<ENTRIES>(n + 1), slot = nth<REPORTS>(n);
            const bool filled = dev::mbarrier_test(&c.control->filled[next], parity<ENTRIES>(n + 1)) && c.control->entry[next].more;
            if (filled || ARISTOS_FAULT(LATE_DONE)) {
                c.control->deferred[dev::warp() - PRODUCERS / 32] = slot + 1;
            } else {
                report_part(c, slot);
            }
            end_entry<Tile>(&c.control->done[e]);
        }
    }
}

}  // namespace hopper

// Runs the scheduler's queue to its end, in tiles of 128 x N. Called by all 384 threads of a block with `hopper::Tile<N>::SHARED_BYTES` of
// 1024-byte aligned shared memory, used exclusively and without meaningful contents before or after. With BLOCKS = 2, both blocks of a CTA
// pair call this; the first one gets the tasks, and tiles are 256 x N (gemm_hopper_cta_pair.h).
template <class T, u32 KINDS = ALL_KINDS, u32 N = 256, u32 BLOCKS = 1, class Scheduler>
DEVICE void gemm_loop_hopper(Scheduler& scheduler, char* shared) {
    using namespace hopper;
    using Tile = hopper::Tile<N, BLOCKS>;
    using Control = typename Tile::Control;
    constexpr u32 STAGES = Tile::STAGES;
    Control* control = reinterpret_cast<Control*>(shared + Tile::CONTROL_AT);
    if (dev::thread() == 0) {
        for (u32 s = 0; s < STAGES; s++) {
            dev::mbarrier_init(&control->full[s], LOAD_WARPS * 32);
            dev::mbarrier_init(&control->empty[s], BLOCKS * CONSUMER_WARPS);
        }
        for (u32 e = 0; e < ENTRIES; e++) {
            dev::mbarrier_init(&control->filled[e], 1);
            dev::mbarrier_init(&control->done[e], LOAD_WARPS + (is_second<Tile>() ? CONSUMER_WARPS : Tile::STORING_WARPS));
            if (Tile::CTA_PAIR) dev::mbarrier_init(&control->offered[e], 1);
        }
        for (u32 r = 0; r < REPORTS; r++) control->finished[r] = 0;
        for (u32 w = 0; w < CONSUMER_WARPS; w++) control->deferred[w] = 0;
        control->copied_until = 0;
        dev::mbarrier_fence_init();
    }
    dev::fence_proxy_async();  // before TMA writes to memory that threads may have written
    sync_tile_blocks<Tile>();
    if (dev::thread() < PRODUCERS) {
        dev::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (dev::warp() == SCHEDULER_WARP) {
            if (dev::lane() == 0) {
                if constexpr (Tile::CTA_PAIR) {
                    if (is_second<Tile>()) follow_loop(scheduler, control);
                    else schedule_loop<Tile>(scheduler, control);
                } else {
                    schedule_loop<Tile>(scheduler, control);
                }
            }
            dev::sync_warp();
        } else {
            load_loop<T, KINDS>(Loader<Tile>{shared, control});
        }
        dev::named_barrier(PRODUCER_BARRIER, PRODUCERS);  // setmaxnreg needs the whole warpgroup
        dev::setmaxnreg_inc<EQUAL_REGISTERS>();
    } else {
        dev::setmaxnreg_inc<CONSUMER_REGISTERS>();
        u32 warp = dev::warp() - PRODUCERS / 32;
        char* unit = shared + Tile::UNITS_AT + warp * UNIT_BYTES;
        consume_loop<T, KINDS>(Consumer<Tile>{shared, control, unit, warp / 4, dev::lane() == 0});
        dev::named_barrier(CONSUMER_BARRIER, CONSUMERS);
        dev::setmaxnreg_dec<EQUAL_REGISTERS>();
    }
    sync_tile_blocks<Tile>();
    // Required before the barriers' memory is reused (PTX ISA, "mbarrier.inval").
    if (dev::thread() == 0) {
        for (u32 s = 0; s < STAGES; s++) dev::mbarrier_inval(&control->full[s]), dev::mbarrier_inval(&control->empty[s]);
        for (u32 e = 0; e < ENTRIES; e++) dev::mbarrier_inval(&control->filled[e]), dev::mbarrier_inval(&control->done[e]);
        for (u32 e = 0; Tile::CTA_PAIR && e < ENTRIES; e++) dev::mbarrier_inval(&control->offered[e]);
    }
    dev::sync_block();
}

}  // namespace aristos
#endif
