// Launch parameters of a layer's kernels.
#pragma once
#include "layer.h"

namespace aristos {

// The persistent kernels: one row per tile of a GEMM path; the first row of a path is its default. Rust chooses among them
// (src/moe/device/tiles.rs). Kernel names are aristos_forward, `infix`, _bf16 and so on; layer_*.cu define the kernels. path_ampere.h and
// path_hopper.h assert that they match their rows.
enum Architecture : u32 { AMPERE = 0, HOPPER = 1 };
struct TileLaunch {
    u32 architecture;
    u32 tile_m, tile_n;
    u32 threads, shared_bytes;  // dynamic
    u32 blocks;                 // per SM, as shared memory and registers allow
    u32 cluster;                // blocks that share a tile by rows
    char infix[20];
};
constexpr TileLaunch TILES[] = {
    {AMPERE, 128, 256, 256, 150 << 10, 1, 1, ""},
    {AMPERE, 64, 128, 128, 78 << 10, 2, 1, "_64x128"},
    {HOPPER, 128, 256, 384, 227 << 10, 1, 1, "_hopper"},
    {HOPPER, 128, 128, 384, 227 << 10, 1, 1, "_hopper_128x128"},
    {HOPPER, 256, 256, 384, 227 << 10, 1, 2, "_hopper_256x256"},
};
constexpr u32 N_TILES = sizeof TILES / sizeof *TILES;

constexpr const TileLaunch& tile_launch(u32 architecture, u32 tile_m, u32 tile_n) {
    const TileLaunch* usual = nullptr;
    for (const TileLaunch& t : TILES) {
        if (t.architecture != architecture) continue;
        if (t.tile_m == tile_m && t.tile_n == tile_n) return t;
        if (!usual) usual = &t;
    }
    return *usual;
}
// Whether a path's kernels are launched as they are compiled.
constexpr bool launched_as(u32 architecture, u32 tile_m, u32 tile_n, u32 threads, u32 shared_bytes, u32 cluster) {
    const TileLaunch& t = tile_launch(architecture, tile_m, tile_n);
    return t.tile_m == tile_m && t.tile_n == tile_n && t.threads == threads && shared_bytes <= t.shared_bytes && t.cluster == cluster;
}

inline void layer_launches(const Layer& l, Launch (&launches)[KERNELS]) {
    const LayerShape& s = l.shape;
    const TileLaunch& tile = tile_launch(l.sizes.hopper ? HOPPER : AMPERE, s.tile_m, s.tile_n);
    launches[KERNEL_ROUTE] = route_launch(s);
    launches[KERNEL_PLAN] = plan_launch(s);
    launches[KERNEL_FORWARD] = launches[KERNEL_BACKWARD] = {s.blocks, tile.threads, tile.shared_bytes, 1, tile.cluster};
    launches[KERNEL_ROUTE_BACKWARD] = route_backward_launch(s);
    launches[KERNEL_ROUTER_GRADIENTS] = router_gradients_launch(s);
    launches[KERNEL_ALL_REDUCE] = all_reduce_launch(s);
    launches[KERNEL_TAKE_ROUTING] = take_routing_launch(s);
    launches[KERNEL_SUM_LOSSES] = {1, ROUTE_THREADS, 0, 0};
    launches[KERNEL_BEGIN_PASS] = {1, 256, 0, 0};  // BEGIN_THREADS; the host chooses the grid by the words to zero
    launches[KERNEL_ACCUMULATE] = {1, ROUTE_THREADS, 0, 0};  // the host chooses the grid by the number of gradients
}

}  // namespace aristos
