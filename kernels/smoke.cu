// The smallest kernel that needs all of it: a driver that takes the module, NVSHMEM's device state set in it, a
// put with a signal to another PE. What `src/gpu/nvshmem.rs` is tried with before anything larger.
//
// NVSHMEM is used header-only, without relocatable device code: with -rdc, ptxas drops setmaxnreg and serialises wgmma
// around the calls. The price is IBGDA, which goes over InfiniBand only. __NVSHMEM_NUMBA_SUPPORT__ makes the headers
// define, in this translation unit, the two symbols that nvshmemx_cumodule_init looks for.
#include "non_abi/nvshmem_build_options.h"
#undef NVSHMEM_IBGDA_SUPPORT
#undef NVSHMEM_GPUNETIO_SUPPORT
#define __NVSHMEM_NUMBA_SUPPORT__ 1
#include <nvshmem.h>
#include <nvshmemx.h>

#include "params.h"

// What one PE of the ring has in symmetric memory.
struct SmokeCell {
    aristos::u64 sent, received, signal;
};

// Launches of this module so far; read by the host by its name.
__device__ aristos::u64 aristos_smoke_launches;

// One block. Each PE puts `value` to the next one and waits for the put of the one before it, at most `limit_ns`.
// `out`: what came, or ~0 where nothing came in time; then the PE that the device library takes this one for.
extern "C" __global__ void __launch_bounds__(128, 1)
    aristos_smoke(SmokeCell* cell, aristos::u64* out, aristos::u64 value, aristos::u64 limit_ns) {
    const int my_pe = nvshmem_my_pe(), n_pes = nvshmem_n_pes();
    if (threadIdx.x == 0) {
        cell->sent = value;
        aristos_smoke_launches += 1;
    }
    __syncthreads();
    nvshmemx_putmem_signal_nbi_block(&cell->received, &cell->sent, sizeof(aristos::u64), &cell->signal, value,
                                     NVSHMEM_SIGNAL_SET, (my_pe + 1) % n_pes);
    if (threadIdx.x == 0) {
        const volatile aristos::u64* signal = &cell->signal;
        aristos::u64 start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        now = start;
        while (*signal != value && now - start < limit_ns) {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        }
        const bool came = nvshmem_uint64_test(&cell->signal, NVSHMEM_CMP_EQ, value) != 0;
        out[0] = came ? *static_cast<const volatile aristos::u64*>(&cell->received) : ~aristos::u64{0};
        out[1] = static_cast<aristos::u64>(my_pe);
        nvshmem_quiet();
    }
}
