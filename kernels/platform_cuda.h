// platform.h on a GPU, with PTX and NVSHMEM. Instruction names and operand layouts follow the PTX ISA.
//
// Compile with nvcc -std=c++17 --expt-relaxed-constexpr, for sm_80 and sm_90, or for sm_90a with -DARISTOS_HOPPER=1. With
// -DARISTOS_NVSHMEM (one translation unit per module, -I of NVSHMEM's headers) puts go over the network.
#pragma once

#ifdef ARISTOS_NVSHMEM
// NVSHMEM from headers only: its device library needs -rdc, which rules out setmaxnreg and asynchronous wgmma. Without IBGDA the headers
// are self-contained; the NUMBA switch defines the two symbols that nvshmemx_cumodule_init looks for.
#include "non_abi/nvshmem_build_options.h"
#undef NVSHMEM_IBGDA_SUPPORT
#undef NVSHMEM_GPUNETIO_SUPPORT
#define __NVSHMEM_NUMBA_SUPPORT__ 1
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

#ifndef ARISTOS_HOPPER
#define ARISTOS_HOPPER 0
#endif

#define DEVICE __device__ __forceinline__
#define KERNEL(name, max_threads, min_blocks) extern "C" __global__ void __launch_bounds__(max_threads, min_blocks) name
#define CLUSTER_KERNEL(name, max_threads) extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(max_threads, 1) name
#define REGISTER_KERNEL(name)
#define REGISTER_CLUSTER_KERNEL(name)
#define UNROLL _Pragma("unroll")
// Not unrolled, to leave registers to other loops.
#define ROLLED _Pragma("unroll 1")
// A separate function, so that its registers do not add to those of the caller's loops. Not with setmaxnreg: several calls in such a
// kernel make ptxas 13.0 fail ("C7600 Register allocation failed") and serialise wgmma.
#if ARISTOS_HOPPER
#define OUTLINE DEVICE
#else
#define OUTLINE static __device__ __noinline__
#endif

namespace aristos::dev {

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<Bf16> = true;

// ---- thread and block numbers

// With ARISTOS_PERSISTENT the register is read anew at each use. Otherwise the compiler hoists everything that depends on the thread
// number to the start of the kernel and keeps it in registers, of which the persistent kernels have none to spare.
DEVICE u32 thread() {
#ifdef ARISTOS_PERSISTENT
    u32 number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
#else
    return threadIdx.x;
#endif
}
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }
DEVICE u32 lane() { return thread() % 32; }
DEVICE u32 warp() { return thread() / 32; }
// The block's dynamic shared memory; kernels use no other.
DEVICE char* shared() {
    extern __shared__ __align__(1024) char aristos_shared[];
    return aristos_shared;
}
DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// ---- elements

DEVICE float to_float(Bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
DEVICE float to_float(F16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
    return f;
}
template <class T> DEVICE T from_float(float f) {
    T v;
    if constexpr (is_bf16<T>) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v.bits) : "f"(f));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v.bits) : "f"(f));
    return v;
}
template <class T> DEVICE u32 pack(float lo, float hi) {
    u32 v;
    if constexpr (is_bf16<T>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
template <class T> DEVICE void unpack(u32 v, float& lo, float& hi) {
    lo = to_float(T{u16(v)});
    hi = to_float(T{u16(v >> 16)});
}

DEVICE float exp_(float x) { return expf(x); }
DEVICE float log_(float x) { return logf(x); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE float erf_(float x) { return erff(x); }
// 2^x to 2 ulp and 1 / x to 1 ulp, in one instruction each; expf takes ten instructions, and a division takes ten and a branch. Denormal
// results are flushed to 0.
DEVICE float exp2_(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float inverse_(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---- block and warp

DEVICE void sync_block() { __syncthreads(); }
DEVICE u32 sync_block_or(bool v) { return __syncthreads_or(v); }
// A barrier among `count` threads (whole warps); `id` is 1 to 15.
DEVICE void named_barrier(u32 id, u32 count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE u32 shfl(u32 v, int from) { return __shfl_sync(~0u, v, from); }
DEVICE u64 shfl(u64 v, int from) { return __shfl_sync(~0u, (unsigned long long)v, from); }
DEVICE float shfl(float v, int from) { return __shfl_sync(~0u, v, from); }
DEVICE u32 shfl_xor(u32 v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE u64 shfl_xor(u64 v, int mask) { return __shfl_xor_sync(~0u, (unsigned long long)v, mask); }
DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE u32 shfl_up(u32 v, u32 delta) { return __shfl_up_sync(~0u, v, delta); }
DEVICE u64 shfl_up(u64 v, u32 delta) { return __shfl_up_sync(~0u, (unsigned long long)v, delta); }
DEVICE float shfl_up(float v, u32 delta) { return __shfl_up_sync(~0u, v, delta); }
DEVICE u32 ballot(bool v) { return __ballot_sync(~0u, v); }

// ---- memory

// For global memory only: the compiler is told so and need not order these accesses with those to shared memory.
DEVICE Vec16 load16(const void* p) {
    __builtin_assume(__isGlobal(p));
    const uint4 v = *static_cast<const uint4*>(p);
    return {{v.x, v.y, v.z, v.w}};
}
// For data that is read once: does not allocate in L1.
DEVICE Vec16 load16_stream(const void* p) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(__cvta_generic_to_global(p))
                 : "memory");
    return v;
}
DEVICE void store16(void* p, Vec16 v) {
    __builtin_assume(__isGlobal(p));
    *static_cast<uint4*>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}
// Evict-first in the caches.
DEVICE void store16_stream(void* p, Vec16 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

// Prefetches the 128-byte line into L2.
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p))); }

DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 load_acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 load_acquire_sys(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 load_relaxed(const u32* p) { return *const_cast<const volatile u32*>(p); }
DEVICE u64 load_relaxed(const u64* p) { return *const_cast<const volatile u64*>(p); }
DEVICE void store_relaxed(u32* p, u32 v) { *const_cast<volatile u32*>(p) = v; }
DEVICE void store_relaxed(u64* p, u64 v) { *const_cast<volatile u64*>(p) = v; }
DEVICE void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void store_release(u64* p, u64 v) { asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void store_release_sys(u64* p, u64 v) { asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u32 fetch_add(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
DEVICE u64 fetch_add(u64* p, u64 v) {
    u64 old;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
DEVICE u32 fetch_add_acq_rel(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
DEVICE u32 fetch_max(u32* p, u32 v) { return atomicMax(p, v); }
// Acquires and releases. True if `*p` was `expected` and is now `v`.
DEVICE bool compare_swap(u32* p, u32 expected, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(v) : "memory");
    return old == expected;
}
DEVICE void fence_gpu() { __threadfence(); }
DEVICE void fence_sys() { __threadfence_system(); }
// After this thread's stores to tensor maps, for later kernels (PTX ISA, "membar/fence": .proxykind tensormap::generic).
DEVICE void tensor_maps_written() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
#endif
}
// In shared memory, relaxed; returns the previous value.
DEVICE u32 shared_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEVICE u64 shared_add(u64* p, u64 v) { return atomicAdd(reinterpret_cast<unsigned long long*>(p), (unsigned long long)v); }
DEVICE float shared_add(float* p, float v) { return atomicAdd(p, v); }
// Acquires and releases among the block's threads.
DEVICE u32 shared_add_acq_rel(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(shared_address(p)), "r"(v) : "memory");
    return old;
}

DEVICE u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
// SM clock, for intervals that the global timer cannot resolve; kernels report both to calibrate it.
DEVICE u64 cycles() { return u64(clock64()); }
DEVICE void pause() { __nanosleep(32); }

// ---- asynchronous copies and mma

DEVICE void cp_async16(void* smem, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last N groups of this thread are in flight. To see other threads' copies, a barrier must follow their waits.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8x8 matrices of 16-bit elements: lane 8 i + j gives the address of row j of matrix i (16 bytes). r[i] of lane l holds row l / 4,
// columns 2 (l % 4) and the next of matrix i; with _trans, of the transposed matrix.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* smem_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(smem_row))
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* smem_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(smem_row))
                 : "memory");
}
// D[16, 8] += A[16, 16] B[16, 8]. With g = lane / 4 and t = lane % 4:
// a[i]: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next; b[i]: rows 2 t + 8 i and the next, column g;
// d[i]: row g + 8 (i / 2), column 2 t + i % 2.
template <class T> DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (is_bf16<T>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// ---- One-sided operations, for PEs whose memory cannot be stored to directly. A put sends data that the block's threads have written
// and released with fence_sys(). The source must not change until quiet_puts(), or until the peer has answered. Put-with-signal calls
// would cost a fence each.

#ifdef ARISTOS_NVSHMEM
DEVICE void put_block(void* dst_mine, const void* src, u64 bytes, u32 pe) {
    __syncthreads();
    nvshmemx_putmem_nbi_block(dst_mine, src, bytes, int(pe));
}
// One thread: orders all puts that it has observed before every signal that it sets later.
DEVICE void fence_puts() { nvshmem_fence(); }
// One thread.
DEVICE void signal_set(u64* signal_mine, u64 value, u32 pe) {
    nvshmemx_signal_op(signal_mine, value, NVSHMEM_SIGNAL_SET, int(pe));
}
// One thread: completes all puts that it has observed.
DEVICE void quiet_puts() { nvshmem_quiet(); }
// One thread that has observed a signal over the network: makes the data sent before the signal visible to this PE. Some network cards
// deliver to a GPU out of order, and only NVSHMEM's own test and wait calls enforce the order; this test succeeds at once.
DEVICE void acquire_puts(const u64* word_mine) { (void)nvshmem_uint64_test(const_cast<u64*>(word_mine), NVSHMEM_CMP_GE, 0); }
DEVICE u32 my_pe() { return u32(nvshmem_my_pe()); }
DEVICE u32 n_pes() { return u32(nvshmem_n_pes()); }
#else
// Without NVSHMEM a module is loaded only if every peer's memory is mapped; reaching these functions is a bug in the host code.
DEVICE void put_block(void*, const void*, u64, u32) { __trap(); }
DEVICE void fence_puts() { __trap(); }
DEVICE void signal_set(u64*, u64, u32) { __trap(); }
DEVICE void quiet_puts() { __trap(); }
DEVICE void acquire_puts(const u64*) { __trap(); }
#endif

}  // namespace aristos::dev

#if ARISTOS_HOPPER
#include "platform_cuda_hopper.h"
#endif
