// Kernels that run only a queue of GEMM tiles, for tests and measurements of the Hopper path.
#pragma once
#include "gemm_hopper.h"

#if ARISTOS_HOPPER
namespace aristos {

struct HopperQueue {
    const GemmTask* tasks;
    const u32* needs;   // number of finished tasks that task i waits for
    u32 count;
    u32 delay;          // tasks become known up to 4 times this many pauses late
    u32* ticket;        // initially 0
    u32* done;          // initially 0
    u32* expired;       // set to 1 by a wait longer than `limit_ns`
    u64 limit_ns;
};

struct HopperTestScheduler {
    const HopperQueue* queue;

    template <class InProgress> DEVICE bool next(GemmTask& task, InProgress) {
        u32 i = dev::fetch_add(queue->ticket, 1u);
        if (i >= queue->count) return false;
        for (u32 n = i * 7 % 5 * queue->delay; n > 0; n--) dev::pause();
        u64 start = dev::nanoseconds();
        while (dev::load_acquire(queue->done) < queue->needs[i]) {
            if (dev::nanoseconds() - start > queue->limit_ns) {
                dev::store_release(queue->expired, 1u);
                return false;
            }
            dev::pause();
        }
        task = queue->tasks[i];
        for (u32 map = 0; map < WEIGHT_MAPS; map++) dev::tensor_map_fence(static_cast<const TensorMap*>(task.tensor_maps) + map);
        for (u32 map = 0; task.slot_maps && map < SLOT_MAPS; map++) {
            dev::tensor_map_fence(static_cast<const TensorMap*>(task.slot_maps) + map);
        }
        return true;
    }
    DEVICE void await() {}
    DEVICE void follow(bool) {}
    DEVICE DoneCounters done_counters(const GemmTask&) { return {queue->done, nullptr}; }
};

template <class T, u32 N, u32 BLOCKS = 1> DEVICE void gemm_hopper_test_body(const HopperQueue* queue) {
    HopperTestScheduler scheduler{queue};
    gemm_loop_hopper<T, ALL_KINDS, N, BLOCKS>(scheduler, dev::shared());
}

KERNEL(aristos_gemm_hopper_test_bf16, 384, 1)(const HopperQueue* queue) { gemm_hopper_test_body<Bf16, 256>(queue); }
REGISTER_KERNEL(aristos_gemm_hopper_test_bf16)
KERNEL(aristos_gemm_hopper_test_f16, 384, 1)(const HopperQueue* queue) { gemm_hopper_test_body<F16, 256>(queue); }
REGISTER_KERNEL(aristos_gemm_hopper_test_f16)
KERNEL(aristos_gemm_hopper_128_test_bf16, 384, 1)(const HopperQueue* queue) { gemm_hopper_test_body<Bf16, 128>(queue); }
REGISTER_KERNEL(aristos_gemm_hopper_128_test_bf16)
KERNEL(aristos_gemm_hopper_128_test_f16, 384, 1)(const HopperQueue* queue) { gemm_hopper_test_body<F16, 128>(queue); }
REGISTER_KERNEL(aristos_gemm_hopper_128_test_f16)
// For CTA pairs: the queue's tiles have 256 rows.
CLUSTER_KERNEL(aristos_gemm_hopper_cta_pair_test_bf16, 384)(const HopperQueue* queue) { gemm_hopper_test_body<Bf16, 256, 2>(queue); }
REGISTER_CLUSTER_KERNEL(aristos_gemm_hopper_cta_pair_test_bf16)
CLUSTER_KERNEL(aristos_gemm_hopper_cta_pair_128_test_f16, 384)(const HopperQueue* queue) { gemm_hopper_test_body<F16, 128, 2>(queue); }
REGISTER_CLUSTER_KERNEL(aristos_gemm_hopper_cta_pair_128_test_f16)

}  // namespace aristos
#endif
