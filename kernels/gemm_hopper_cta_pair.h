// A CTA pair that computes tiles of 256 x N: 128 rows per block with the same columns, so that each block loads half of B and TMA
// multicasts it to both.
//
// The first block's scheduler gets the tasks. The second block's scheduler copies each task from the first block's shared memory and takes
// the 128 rows below. Both blocks have the same number of steps of K. If there are no rows below, the second block neither copies rows nor
// multiplies, but it still loads its half of B and frees its stages, so that no barrier waits for a missing arrival.
//
// - A task is reported once, by the last of both blocks' warps to store its part. The warps count in the first block's memory.
// - A stage is free when the consumers of both blocks have read it, because either block's TMA writes to both; `empty` counts both, in
//   both blocks.
// - A stage is full when its own rows and both halves of B have arrived. A half from the other block may arrive before this block has
//   announced its bytes: the phase cannot complete earlier, since the announcement is one of the arrivals (PTX ISA, "mbarrier", "Tracking
//   asynchronous operations").
// - The first block's entry is refilled once the consumers of both blocks have finished with it. By then the second block has copied it,
//   and all warps that count in one slot of REPORTS are at the same task.
// - Neither block exits while the other may still arrive at its barriers or write to its stages: a cluster_sync follows the last task.
#pragma once
#include "gemm_hopper_stage.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

template <class Tile> DEVICE bool is_second() { return Tile::CTA_PAIR && dev::cluster_rank() == 1; }

// All threads: before the first use of barriers that a block's first thread has initialised, and after the last use.
template <class Tile> DEVICE void sync_tile_blocks() {
    if constexpr (Tile::CTA_PAIR) dev::cluster_sync();
    else dev::sync_block();
}

// One lane of a consumer warp. TMA of the other block may overwrite data that this block copied into B by cp.async, which requires a
// release; between two TMA loads no release is needed.
template <class Tile, bool COPIED> DEVICE void free_stage(u64* empty) {
    dev::mbarrier_arrive(empty);
    if constexpr (!Tile::CTA_PAIR) return;
    else if constexpr (COPIED) dev::mbarrier_arrive_remote(empty, dev::cluster_rank() ^ 1);
    else dev::mbarrier_arrive_remote_relaxed(empty, dev::cluster_rank() ^ 1);
}

// One lane of a consumer warp, which has stored its part of a task. True for the last warp, which has then acquired the others' stores.
template <class Tile> DEVICE bool is_last(u32* finished) {
    u32 before;
    if (Tile::CTA_PAIR && ARISTOS_FAULT(HALF_DONE))
        return !is_second<Tile>() && dev::shared_add_acq_rel(finished, 1u) % CONSUMER_WARPS == CONSUMER_WARPS - 1;
    if constexpr (Tile::CTA_PAIR) before = dev::cluster_add_acq_rel(finished, 1u, 0);
    else before = dev::shared_add_acq_rel(finished, 1u);
    return before % Tile::STORING_WARPS == Tile::STORING_WARPS - 1;
}
// One lane of a consumer warp, after its last read of the entry.
template <class Tile> DEVICE void end_entry(u64* done) {
    if (is_second<Tile>()) dev::mbarrier_arrive_remote(done, 0);
    dev::mbarrier_arrive(done);
}

// Waits for a phase of a barrier at which both blocks arrive.
template <class Tile> DEVICE void wait_free(u64* bar, u32 parity) {
    if constexpr (Tile::CTA_PAIR) dev::mbarrier_wait_cluster(bar, parity);
    else dev::mbarrier_wait(bar, parity);
}

// First panel of B that this block loads. A block alone loads all panels; each block of a CTA pair loads half of them, for both blocks.
template <class Tile> DEVICE u32 first_panel() { return is_second<Tile>() ? Tile::B_PANELS / 2 : 0; }
template <class Tile> DEVICE void load_panel(char* panel, const TensorMap* map, u64* full, u32 column, u32 row, u32 expert) {
    if constexpr (Tile::CTA_PAIR) dev::tma_load_3d_multicast(panel, map, full, i32(column), i32(row), i32(expert));
    else dev::tma_load_3d(panel, map, full, i32(column), i32(row), i32(expert));
}

// The scheduler's thread: whether the task before entry `n` is unfinished.
template <class Control> DEVICE bool task_in_progress(Control* control, u32 n) {
    return n > 0 && !dev::mbarrier_test(&control->done[nth<ENTRIES>(n - 1)], parity<ENTRIES>(n - 1));
}

// The second block's scheduler loop: takes the tasks that the first block offers. While it has neither an offer nor a task in progress, it
// calls `void await()`. After each offer it calls `void follow(bool more)`. If `more` is false, the first block's `next` has returned
// false, and that block waits until this block has also left its loop.
template <class Scheduler, class Control> DEVICE void follow_loop(Scheduler& scheduler, Control* control) {
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
        if (more) entry.task.m0 += TILE_M;
        dev::mbarrier_arrive(&control->filled[e]);
    }
}

}  // namespace hopper
}  // namespace aristos
#endif
