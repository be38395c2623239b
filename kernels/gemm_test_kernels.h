// Kernels that do nothing but GEMM tiles, for tests of the products alone. Blocks take tiles in turn, as in the persistent kernel.
#pragma once
#include "gemm_ampere.h"

namespace aristos {

template <class T> DEVICE void gemm_test_body(const GemmTask* tasks, u32 count) {
    char* shared = dev::shared();
    auto* task = reinterpret_cast<GemmTask*>(shared + AmpereTile::SHARED_BYTES);
    for (u32 i = dev::block(); i < count; i += dev::blocks()) {
        if (dev::thread() == 0) *task = tasks[i];
        dev::sync_block();
        gemm_task_ampere<T>(*task, shared);
    }
}

constexpr u32 GEMM_TEST_SHARED_BYTES = AmpereTile::SHARED_BYTES + sizeof(GemmTask);

KERNEL(aristos_gemm_test_bf16, 256, 1)(const GemmTask* tasks, u32 count) { gemm_test_body<Bf16>(tasks, count); }
REGISTER_KERNEL(aristos_gemm_test_bf16)
KERNEL(aristos_gemm_test_f16, 256, 1)(const GemmTask* tasks, u32 count) { gemm_test_body<F16>(tasks, count); }
REGISTER_KERNEL(aristos_gemm_test_f16)

}  // namespace aristos
