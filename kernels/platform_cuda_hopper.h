// Instructions of sm_90a that Ampere lacks: mbarriers, TMA, wgmma. Included only by platform_cuda.h.
#pragma once
#include "platform_cuda_wgmma.h"

namespace aristos::dev {

// ---- mbarriers: 8 bytes of shared memory. A phase completes after `count` arrivals and all announced bytes.

DEVICE void mbarrier_init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
// After the last use: required before the memory is reused or initialised again.
DEVICE void mbarrier_inval(u64* bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}
// After the inits, before other threads or TMA use the barriers.
DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
DEVICE void mbarrier_arrive(u64* bar, u32 count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
DEVICE void mbarrier_arrive_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
// True if the phase with parity `parity` has completed. A new barrier is in phase 0, so parity 1 is true at once.
DEVICE bool mbarrier_test(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
    return done != 0;
}
DEVICE void mbarrier_wait(u64* bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
    } while (done == 0);
}

// Arrives when all earlier cp.async of this thread are complete. A thread that waits for the phase sees their writes, but not this
// thread's other writes (PTX ISA, "cp.async.mbarrier.arrive" and "mbarrier.test_wait, mbarrier.try_wait").
DEVICE void cp_async_mbarrier_arrive(u64* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Makes shared-memory writes of this thread, and those that it has observed through a wait, visible to TMA and to its later wgmma (PTX
// ISA, "Proxy-preserved base causality order": a proxy fence anywhere between the write and the read).
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA

// One thread. Loads the map's box at element (row, col) to `smem`, 128-byte swizzled, with zeros out of bounds.
DEVICE void tma_load_2d(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(smem)),
        "l"(map), "r"(col), "r"(row), "r"(shared_address(bar))
        : "memory");
}
// Like tma_load_2d, for a 3-D map: the box at (row, col) of matrix `item`.
DEVICE void tma_load_3d(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, i32 item) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(smem)),
        "l"(map), "r"(col), "r"(row), "r"(item), "r"(shared_address(bar))
        : "memory");
}
// For a map that the host copied to device memory before the kernel: once per block before its first use there, by a thread that afterwards
// synchronises with the thread that uses the map (CUDA C++ Programming Guide, "Passing a tensor map through global memory").
DEVICE void tensor_map_fence(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// ---- TMA stores

// Stores four 8 x 8 matrices of 16-bit elements to shared memory: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes, and
// `r[i]` is row l / 4, columns 2 (l % 4), + 1 of matrix i.
DEVICE void stmatrix_x4(void* smem_row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(smem_row)), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}
// One thread. Stores `smem`, in the layout of tma_load_2d, to the map's box at element (row, col), without elements out of bounds. Part
// of the thread's next bulk_commit group.
DEVICE void tma_store_2d(const TensorMap* map, i32 col, i32 row, const void* smem) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(col), "r"(row), "r"(shared_address(smem))
                 : "memory");
}
// Closes a group of this thread's stores, possibly empty.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but this thread's last N groups have finished reading shared memory, or (bulk_wait) have completed and are visible to
// this thread.
template <int N> DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
// Orders this thread's accesses of global memory, and those that it has observed, before its later TMA accesses.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Clusters of two blocks: blocks 2 i and 2 i + 1 of a CLUSTER_KERNEL

// Read anew at each use, because loops have no register to spare.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// A barrier of all threads of both blocks, with release and acquire.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Address of block `rank`'s counterpart of `p` in shared memory, for loads.
template <class P> DEVICE const P* cluster_shared(const P* p, u32 rank) {
    u64 at;
    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(p), "r"(rank));
    return reinterpret_cast<const P*>(at);
}
// Arrives at block `rank`'s mbarrier at the same offset as `bar`. Releases to threads that wait with mbarrier_wait_cluster.
DEVICE void mbarrier_arrive_remote(u64* bar, u32 rank) {
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [at];\n}\n" ::"r"(
            shared_address(bar)),
        "r"(rank)
        : "memory");
}
// Remote arrive without release, for a consumer that only read the stage (its wgmma have completed). A release at cluster scope is a
// fence of the whole GPU, which is too expensive per stage.
DEVICE void mbarrier_arrive_remote_relaxed(u64* bar, u32 rank) {
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(shared_address(bar)), "r"(rank)
                 : "memory");
}
// Adds to block `rank`'s word at the same offset as `p`; returns the previous value. Acquires and releases among the threads of both
// blocks.
DEVICE u32 cluster_add_acq_rel(u32* p, u32 v, u32 rank) {
    u32 old;
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %1, %2;\natom.acq_rel.cluster.shared::cluster.add.u32 %0, [at], %3;\n}\n"
        : "=r"(old)
        : "r"(shared_address(p)), "r"(rank), "r"(v)
        : "memory");
    return old;
}
// Like mbarrier_wait, for a barrier at which threads of both blocks arrive.
DEVICE void mbarrier_wait_cluster(u64* bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
    } while (done == 0);
}
// Like fence_proxy_async, for the shared memory of both blocks.
DEVICE void fence_proxy_async_cluster() { asm volatile("fence.proxy.async.shared::cluster;" ::: "memory"); }
// Like tma_load_3d, to both blocks, at the offsets of `smem` and `bar` in each.
DEVICE void tma_load_3d_multicast(void* smem, const TensorMap* map, u64* bar, i32 col, i32 row, i32 item) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
            shared_address(smem)),
        "l"(map), "r"(col), "r"(row), "r"(item), "r"(shared_address(bar)), "h"(u16(3))
        : "memory");
}

// ---- wgmma

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the last N groups of this warpgroup are in flight.
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving accesses to `acc` across this call. Call it before wgmma_fence() and after wgmma_wait().
template <int K> DEVICE void wgmma_fence_operand(float (&acc)[K]) {
    UNROLL
    for (int i = 0; i < K; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Descriptor of an operand of 16-bit elements in shared memory with 128-byte swizzle, in atoms of 8 lines of 128 bytes, 1024-byte aligned.
// K-major (TRANS 0): a line is 64 elements along K of one row (A) or column (B). `sbo_bytes` is the distance between groups of 8 lines;
// `lbo_bytes` is unused. The next 16 elements along K are 32 bytes further. MN-major (TRANS 1): a line is 64 rows (A) or columns (B) at one
// k. `sbo_bytes` is the distance between groups of 8 k, `lbo_bytes` that between groups of 64 rows or columns. Bits: address 0-13, LBO
// 16-29, SBO 32-45 (all in units of 16 bytes), swizzle 62-63.
DEVICE u64 smem_descriptor(const void* smem, u32 lbo_bytes, u32 sbo_bytes) {
    return u64(shared_address(smem) >> 4 & 0x3fff) | u64(lbo_bytes >> 4 & 0x3fff) << 16 | u64(sbo_bytes >> 4 & 0x3fff) << 32 |
           u64(1) << 62;
}

// Raises or lowers the register limit of every thread of this warpgroup.
template <int N> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

}  // namespace aristos::dev
