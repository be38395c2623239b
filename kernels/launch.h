// How the kernels of a layer are launched.
#pragma once
#include "layer.h"

namespace aristos {

// Threads of the persistent kernels, and their dynamic shared memory: what the GEMM path wants. layer_ampere.cu and
// layer_hopper.cu assert that it is.
constexpr u32 AMPERE_TILE_M = 128, AMPERE_TILE_N = 256;
constexpr u32 HOPPER_TILE_M = 128, HOPPER_TILE_N = 256;
constexpr u32 AMPERE_THREADS = 256, AMPERE_SHARED = 150 << 10;
constexpr u32 HOPPER_THREADS = 384, HOPPER_SHARED = 227 << 10;

inline void layer_launches(const Layer& l, Launch (&launches)[KERNELS]) {
    const LayerShape& s = l.shape;
    Launch pass = l.sizes.hopper ? Launch{s.blocks, HOPPER_THREADS, HOPPER_SHARED, 1}
                                 : Launch{s.blocks, AMPERE_THREADS, AMPERE_SHARED, 1};
    launches[KERNEL_ROUTE] = route_launch(s);
    launches[KERNEL_PLAN] = plan_launch(s);
    launches[KERNEL_FORWARD] = launches[KERNEL_BACKWARD] = pass;
    launches[KERNEL_ROUTE_BACKWARD] = route_backward_launch(s);
    launches[KERNEL_ROUTER_GRADIENTS] = router_gradients_launch(s);
    launches[KERNEL_ALL_REDUCE] = all_reduce_launch(s);
    launches[KERNEL_TAKE_ROUTING] = take_routing_launch(s);
    launches[KERNEL_SUM_LOSSES] = {1, ROUTE_THREADS, 0, 0};
}

}  // namespace aristos
