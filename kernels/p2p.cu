// Point-to-point microbenchmarks between two PEs: latency and bandwidth of put, get, put_nbi and put with signal. The method is that of
// NVSHMEM's perftest (block scope for bandwidth, one block for latency, ping-pong for put with signal), but every iteration is timed, so
// that medians and tails can be reported.
//
// A separate module for GPUs only, since it measures NVSHMEM itself. Times are SM clock cycles, which are cheap to read; each kernel also
// reports the nanoseconds of the global timer and the cycles of its whole loop, which give the clock rate.
#include "platform.h"

namespace {

using u32 = unsigned;
using u64 = unsigned long long;

enum Op : u32 { PUT = 0, PUT_NBI = 1, GET = 2 };
enum Scope : u32 { THREAD = 0, WARP = 1, BLOCK = 2 };

struct Loop {
    char* remote;       // this PE's address of the peer's symmetric buffer
    char* local;        // also symmetric
    uint64_t* signal;   // symmetric: put with signal
    u64* cycles;        // [iterations]: per iteration, by thread 0 of block 0
    u64* issue_cycles;  // [iterations]: until the call returned, before quiet
    u64* total;         // [2]: nanoseconds and cycles of the loop after the warm-up
    u32* arrived;       // [1], zero: grid barrier
    u64 bytes;
    u32 iterations, warmup;
    u32 op, scope;
    u32 peer, me;
};

__device__ u64 global_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Called by all threads that `l.scope` selects (in_group), which transfer `bytes` together.
__device__ void transfer(const Loop& l, char* remote, char* local, u64 bytes) {
    if (l.scope == BLOCK) {
        if (l.op == PUT) nvshmemx_putmem_block(remote, local, bytes, l.peer);
        if (l.op == PUT_NBI) nvshmemx_putmem_nbi_block(remote, local, bytes, l.peer);
        if (l.op == GET) nvshmemx_getmem_block(local, remote, bytes, l.peer);
    } else if (l.scope == WARP) {
        if (l.op == PUT) nvshmemx_putmem_warp(remote, local, bytes, l.peer);
        if (l.op == PUT_NBI) nvshmemx_putmem_nbi_warp(remote, local, bytes, l.peer);
        if (l.op == GET) nvshmemx_getmem_warp(local, remote, bytes, l.peer);
    } else {
        if (l.op == PUT) nvshmem_putmem(remote, local, bytes, l.peer);
        if (l.op == PUT_NBI) nvshmem_putmem_nbi(remote, local, bytes, l.peer);
        if (l.op == GET) nvshmem_getmem(local, remote, bytes, l.peer);
    }
}

__device__ bool in_group(u32 scope) { return scope == BLOCK || (scope == WARP && threadIdx.x < 32) || threadIdx.x == 0; }

}  // namespace

// One block. An iteration is the transfer and, for puts, a quiet, after which the bytes are at the peer.
extern "C" __global__ void __launch_bounds__(1024, 1) p2p_latency(Loop l) {
    u64 start_ns = 0, start = 0;
    for (u32 i = 0; i < l.iterations + l.warmup; ++i) {
        __syncthreads();
        if (i == l.warmup) start_ns = global_ns(), start = clock64();
        const u64 t0 = clock64();
        if (in_group(l.scope)) transfer(l, l.remote, l.local, l.bytes);
        __syncthreads();
        const u64 t1 = clock64();
        if (threadIdx.x == 0) nvshmem_quiet();
        const u64 t2 = clock64();
        if (threadIdx.x == 0 && i >= l.warmup) l.issue_cycles[i - l.warmup] = t1 - t0, l.cycles[i - l.warmup] = t2 - t0;
    }
    if (threadIdx.x == 0) l.total[0] = global_ns() - start_ns, l.total[1] = clock64() - start;
}

// Many blocks, each with its own part of the bytes. Every iteration ends with a quiet and a barrier of all blocks.
extern "C" __global__ void __launch_bounds__(1024, 1) p2p_bandwidth(Loop l) {
    const u64 part = (l.bytes / gridDim.x) & ~u64(15);
    const u64 from = part * blockIdx.x;
    const u64 mine = blockIdx.x + 1 == gridDim.x ? l.bytes - from : part;
    u64 start_ns = 0, start = 0;
    for (u32 i = 0; i < l.iterations + l.warmup; ++i) {
        if (blockIdx.x == 0 && i == l.warmup) start_ns = global_ns(), start = clock64();
        const u64 t0 = clock64();
        if (mine && in_group(l.scope)) transfer(l, l.remote + from, l.local + from, mine);
        __syncthreads();
        if (threadIdx.x == 0) {
            if (l.op != GET) nvshmem_quiet();
            __threadfence();
            atomicAdd(l.arrived, 1);
            while (*(volatile u32*)l.arrived < (i + 1) * gridDim.x) {
            }
            __threadfence();
        }
        __syncthreads();
        if (blockIdx.x == 0 && threadIdx.x == 0 && i >= l.warmup) l.cycles[i - l.warmup] = clock64() - t0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) l.total[0] = global_ns() - start_ns, l.total[1] = clock64() - start;
}

// Two PEs, one block each: PE 0 puts with a signal, PE 1 waits and puts back. An iteration is the round trip.
extern "C" __global__ void __launch_bounds__(1024, 1) p2p_ping_pong(Loop l) {
    u64 start_ns = 0, start = 0;
    for (u32 i = 0; i < l.iterations + l.warmup; ++i) {
        if (i == l.warmup) start_ns = global_ns(), start = clock64();
        const u64 t0 = clock64();
        const uint64_t value = i + 1;
        if (l.me != 0) {
            if (threadIdx.x == 0) nvshmem_uint64_wait_until(l.signal, NVSHMEM_CMP_GE, value);
            __syncthreads();
        }
        if (l.scope == BLOCK) nvshmemx_putmem_signal_block(l.remote, l.local, l.bytes, l.signal, value, NVSHMEM_SIGNAL_SET, l.peer);
        if (l.scope == WARP && threadIdx.x < 32)
            nvshmemx_putmem_signal_warp(l.remote, l.local, l.bytes, l.signal, value, NVSHMEM_SIGNAL_SET, l.peer);
        if (l.scope == THREAD && threadIdx.x == 0)
            nvshmem_putmem_signal(l.remote, l.local, l.bytes, l.signal, value, NVSHMEM_SIGNAL_SET, l.peer);
        if (l.me == 0) {
            if (threadIdx.x == 0) nvshmem_uint64_wait_until(l.signal, NVSHMEM_CMP_GE, value);
            __syncthreads();
        }
        if (threadIdx.x == 0 && i >= l.warmup) l.cycles[i - l.warmup] = clock64() - t0;
    }
    if (threadIdx.x == 0) {
        nvshmem_quiet();
        l.total[0] = global_ns() - start_ns, l.total[1] = clock64() - start;
    }
}
