// Kernels that run only GEMM tiles, for tests. Blocks take tiles in turn, as in the persistent kernel.
#pragma once
#include "gemm_ampere.h"

namespace aristos {

// Fills shared memory with NaN before each tile, so that a result that used data without a copy is NaN.
template <class T, class Tile> DEVICE void gemm_test_body(const GemmTask* tasks, u32 count) {
    char* shared = dev::shared();
    auto* task = reinterpret_cast<GemmTask*>(shared + Tile::SHARED_BYTES);
    for (u32 i = dev::block(); i < count; i += dev::blocks()) {
        for (u32 at = dev::thread() * 4; at < Tile::SHARED_BYTES; at += dev::threads() * 4) *reinterpret_cast<u32*>(shared + at) = ~0u;
        if (dev::thread() == 0) *task = tasks[i];
        dev::sync_block();
        gemm_task_ampere<T, Tile>(*task, shared, [] {});
    }
}

template <class Tile> constexpr u32 gemm_test_shared_bytes() { return Tile::SHARED_BYTES + sizeof(GemmTask); }

using LargeTile = AmpereTile<128, 256>;
using SmallTile = AmpereTile<64, 128>;

KERNEL(aristos_gemm_test_bf16, LargeTile::THREADS, 1)(const GemmTask* tasks, u32 count) { gemm_test_body<Bf16, LargeTile>(tasks, count); }
REGISTER_KERNEL(aristos_gemm_test_bf16)
KERNEL(aristos_gemm_test_f16, LargeTile::THREADS, 1)(const GemmTask* tasks, u32 count) { gemm_test_body<F16, LargeTile>(tasks, count); }
REGISTER_KERNEL(aristos_gemm_test_f16)
KERNEL(aristos_gemm_test_64x128_bf16, SmallTile::THREADS, 2)(const GemmTask* tasks, u32 count) { gemm_test_body<Bf16, SmallTile>(tasks, count); }
REGISTER_KERNEL(aristos_gemm_test_64x128_bf16)
KERNEL(aristos_gemm_test_64x128_f16, SmallTile::THREADS, 2)(const GemmTask* tasks, u32 count) { gemm_test_body<F16, SmallTile>(tasks, count); }
REGISTER_KERNEL(aristos_gemm_test_64x128_f16)

}  // namespace aristos
