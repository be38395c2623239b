// The smallest kernel that needs everything: a driver that loads the module, NVSHMEM's device state in it, a put with a
// signal to another PE. Several PEs try it before anything larger (`CudaGpu::try_put`).
#include "params.h"
#include "platform.h"

using namespace aristos;

// What one PE of the ring has in symmetric memory.
struct SmokeCell {
    u64 sent, received, signal;
};

// One block. Each PE puts `value` to the next one and waits for the put of the one before it, at most `limit_ns`.
// `out`: what came, or ~0 where nothing came in time; this PE's number and the number of PEs according to the device library.
KERNEL(aristos_smoke, 128, 1)(SmokeCell* cell, u64* out, u64 value, u64 limit_ns) {
    const u32 my_pe = u32(nvshmem_my_pe()), n_pes = u32(nvshmem_n_pes());
    if (dev::thread() == 0) {
        cell->sent = value;
    }
    dev::sync_block();
    dev::put_signal_block(&cell->received, &cell->sent, sizeof(u64), &cell->signal, value, (my_pe + 1) % n_pes);
    dev::quiet_block();
    if (dev::thread() == 0) {
        const u64 start = dev::nanoseconds();
        bool came;
        while (!(came = dev::load_acquire_sys(&cell->signal) == value) && dev::nanoseconds() - start < limit_ns) {
            dev::pause();
        }
        out[0] = came ? dev::load_relaxed(&cell->received) : ~u64{0};
        out[1] = my_pe;
        out[2] = n_pes;
    }
}
