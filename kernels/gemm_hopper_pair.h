// Two blocks of a cluster side by side: tiles one below the other, of the same columns, so that each loads half of B and TMA brings it to both.
//
// The first block's scheduler asks for tasks, the second's takes each from the first one's shared memory and goes to the rows below: `bool below(GemmTask&)` of
// the scheduler makes of a task the one of the next 128 rows. Both have the same steps of the sum, as these are the task's. Where there are no rows below, as
// at the end of a batch with an odd number of tiles, the second block has an empty tile: it copies no rows and multiplies nothing, but loads its half of B and
// frees its stages like any other, so both always take part and no barrier waits for what does not come. `done` is called for tiles that have rows.
//
// - A stage is free when the consumers of both blocks have read it: its `empty` counts both, in both blocks, as either block's TMA writes to both.
// - It is full when its own rows and both halves of B are there. The other block's half may come before this block has said how many bytes it expects:
//   the phase cannot end before that, as saying so is one of the arrivals (PTX ISA, "mbarrier", "Tracking asynchronous operations").
// - The first block's entry is filled again once the second has copied it, which is one of its `done`'s arrivals.
// - Neither block ends while the other may still arrive at its barriers or write to its stages: cluster_sync, after the last task.
#pragma once
#include "gemm_hopper_stage.h"

#if ARISTOS_HOPPER
namespace aristos {
namespace hopper {

template <class Tile> DEVICE bool is_second() { return Tile::PAIR && dev::cluster_rank() == 1; }

// Before TMA reads through the weights' maps, where they are not those of the last task.
template <class Control> DEVICE void fence_maps(Control* control, const GemmTask& t) {
    if (a_mn_major(t.kind) || t.tensor_maps == control->maps) return;
    control->maps = t.tensor_maps;
    for (u32 i = 0; i < 3; i++) dev::tensor_map_fence(static_cast<const TensorMap*>(control->maps) + i);
}

// All threads: before anyone uses barriers that a block's first thread has initialised, and once nobody uses them any more.
template <class Tile> DEVICE void meet() {
    if constexpr (Tile::PAIR) dev::cluster_sync();
    else dev::sync_block();
}

// One lane of a consumer warp.
template <class Tile> DEVICE void free_stage(u64* empty) {
    dev::mbarrier_arrive(empty);
    if constexpr (Tile::PAIR) dev::mbarrier_arrive_at(empty, dev::cluster_rank() ^ 1);
}

// For a barrier at which both blocks arrive.
template <class Tile> DEVICE void wait_free(u64* bar, u32 parity) {
    if constexpr (Tile::PAIR) dev::mbarrier_wait_cluster(bar, parity);
    else dev::mbarrier_wait(bar, parity);
}

// Panels of B that this block loads: all, or its half, to both blocks.
template <class Tile> DEVICE u32 first_panel() { return is_second<Tile>() ? Tile::B_PANELS / 2 : 0; }
template <class Tile> DEVICE void load_panel(char* panel, const TensorMap* map, u64* full, u32 column, u32 row) {
    if constexpr (Tile::PAIR) dev::tma_load_2d_both(panel, map, full, i32(column), i32(row));
    else dev::tma_load_2d(panel, map, full, i32(column), i32(row));
}

// The second block's scheduler: what the first offers.
template <class Scheduler, class Control> DEVICE void follow_loop(Scheduler& scheduler, Control* control) {
    control->maps = nullptr;
    bool more = true;
    for (u32 n = 0; more; n++) {
        const u32 e = nth<ENTRIES>(n);
        Entry& entry = control->entry[e];
        dev::mbarrier_wait(&control->done[e], parity<ENTRIES>(n) ^ 1);
        dev::mbarrier_wait_cluster(&control->offered[e], parity<ENTRIES>(n));
        const u64* from = dev::cluster_shared(reinterpret_cast<const u64*>(&entry), 0);
        for (u32 i = 0; i < sizeof(Entry) / 8; i++) reinterpret_cast<u64*>(&entry)[i] = from[i];
        more = entry.more;
        if (more) {
            scheduler.below(entry.task);
            fence_maps(control, entry.task);
        }
        dev::mbarrier_arrive_at(&control->done[e], 0);
        dev::mbarrier_arrive(&control->done[e]);
        dev::mbarrier_arrive(&control->known[e]);
    }
}

}  // namespace hopper
}  // namespace aristos
#endif
