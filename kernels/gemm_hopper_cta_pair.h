// Two blocks of a cluster at one tile of 256 x N: 128 rows each, of the same columns, so that each loads half of B and TMA brings it to both.
//
// The first block's scheduler asks for tasks, the second's takes each from the first one's shared memory and goes to the rows below. Both have the same steps of
// the sum, as these are the task's. Where there are no rows below, the second block's half is empty: it copies no rows and multiplies nothing, but loads its
// half of B and frees its stages like any other, so both always take part and no barrier waits for what does not come.
//
// - A task is reported once, by the last warp of both blocks that has stored its part: they count in the first block's memory.
// - A stage is free when the consumers of both blocks have read it: its `empty` counts both, in both blocks, as either block's TMA writes to both.
// - It is full when its own rows and both halves of B are there. The other block's half may come before this block has said how many bytes it expects:
//   the phase cannot end before that, as saying so is one of the arrivals (PTX ISA, "mbarrier", "Tracking asynchronous operations").
// - The first block's entry is filled again once the consumers of both blocks are done with it: so the second block has copied it before, and those that count
//   at one of REPORTS are at the same task.
// - Neither block ends while the other may still arrive at its barriers or write to its stages: cluster_sync, after the last task.
#pragma once
#include "gemm_hopper_stage.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

template <class Tile> DEVICE bool is_second() { return Tile::CTA_PAIR && dev::cluster_rank() == 1; }

// Before TMA reads through the weights' maps, where they are not those of the last task.
template <class Control> DEVICE void fence_maps(Control* control, const GemmTask& t) {
    if (a_mn_major(t.kind) || t.tensor_maps == control->maps) return;
    control->maps = t.tensor_maps;
    for (u32 i = 0; i < 3; i++) dev::tensor_map_fence(static_cast<const TensorMap*>(control->maps) + i);
}

// All threads: before anyone uses barriers that a block's first thread has initialised, and once nobody uses them any more.
template <class Tile> DEVICE void sync_tile_blocks() {
    if constexpr (Tile::CTA_PAIR) dev::cluster_sync();
    else dev::sync_block();
}

// One lane of a consumer warp. What this block copied into the stage's B by cp.async, the other may load over by TMA; between two loads by TMA there
// is nothing to release.
template <class Tile, bool COPIED> DEVICE void free_stage(u64* empty) {
    dev::mbarrier_arrive(empty);
    if constexpr (!Tile::CTA_PAIR) return;
    else if constexpr (COPIED) dev::mbarrier_arrive_remote(empty, dev::cluster_rank() ^ 1);
    else dev::mbarrier_arrive_remote_relaxed(empty, dev::cluster_rank() ^ 1);
}

// One lane of a consumer warp, which has stored its part of an entry's task. True for the last; its stores happen before what that does.
template <class Tile> DEVICE bool is_last(u32* finished) {
    u32 before;
    if (Tile::CTA_PAIR && ARISTOS_FAULT(HALF_DONE)) return !is_second<Tile>() && dev::shared_add_acq_rel(finished, 1u) % CONSUMER_WARPS == CONSUMER_WARPS - 1;
    if constexpr (Tile::CTA_PAIR) before = dev::cluster_add_acq_rel(finished, 1u, 0);
    else before = dev::shared_add_acq_rel(finished, 1u);
    return before % Tile::STORING_WARPS == Tile::STORING_WARPS - 1;
}
// The same lane then, which reads the entry no more.
template <class Tile> DEVICE void end_entry(u64* done) {
    if (is_second<Tile>()) dev::mbarrier_arrive_remote(done, 0);
    dev::mbarrier_arrive(done);
}

// For a barrier at which both blocks arrive.
template <class Tile> DEVICE void wait_free(u64* bar, u32 parity) {
    if constexpr (Tile::CTA_PAIR) dev::mbarrier_wait_cluster(bar, parity);
    else dev::mbarrier_wait(bar, parity);
}

// Panels of B that this block loads: all, or its half, to both blocks.
template <class Tile> DEVICE u32 first_panel() { return is_second<Tile>() ? Tile::B_PANELS / 2 : 0; }
template <class Tile> DEVICE void load_panel(char* panel, const TensorMap* map, u64* full, u32 column, u32 row) {
    if constexpr (Tile::CTA_PAIR) dev::tma_load_2d_multicast(panel, map, full, i32(column), i32(row));
    else dev::tma_load_2d(panel, map, full, i32(column), i32(row));
}

// The scheduler's thread: whether the task before entry `n` is still in work.
template <class Control> DEVICE bool task_in_progress(Control* control, u32 n) {
    return n > 0 && !dev::mbarrier_test(&control->done[nth<ENTRIES>(n - 1)], parity<ENTRIES>(n - 1));
}

// The second block's scheduler: what the first offers. It calls `void await()` where there is nothing to do until it comes, and then `void follow(bool more)`; without more, the first
// block's scheduler has returned false, and does nothing before this block has ended its loop too.
template <class Scheduler, class Control> DEVICE void follow_loop(Scheduler& scheduler, Control* control) {
    control->maps = nullptr;
    bool more = true;
    for (u32 n = 0; more; n++) {
        const u32 e = nth<ENTRIES>(n);
        Entry& entry = control->entry[e];
        dev::mbarrier_wait(&control->done[e], parity<ENTRIES>(n) ^ 1);
        while (!dev::mbarrier_test(&control->offered[e], parity<ENTRIES>(n))) {
            if (!task_in_progress(control, n)) scheduler.await();
            dev::pause();
        }
        dev::mbarrier_wait_cluster(&control->offered[e], parity<ENTRIES>(n));
        const u64* from = dev::cluster_shared(reinterpret_cast<const u64*>(&entry), 0);
        for (u32 i = 0; i < sizeof(Entry) / 8; i++) reinterpret_cast<u64*>(&entry)[i] = from[i];
        const u64* done_counters = dev::cluster_shared(reinterpret_cast<const u64*>(control->done_counters + nth<REPORTS>(n)), 0);
        for (u32 i = 0; i < sizeof(DoneCounters) / 8; i++) reinterpret_cast<u64*>(control->done_counters + nth<REPORTS>(n))[i] = done_counters[i];
        more = entry.more && !(ARISTOS_FAULT(CTA_LEAVES_ALONE) && n > 0);
        scheduler.follow(more);
        if (more) {
            entry.task.m0 += TILE_M;
            fence_maps(control, entry.task);
        }
        dev::mbarrier_arrive(&control->filled[e]);
    }
}

}  // namespace hopper
}  // namespace aristos
#endif
