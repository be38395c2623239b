// aristos_sum_losses: with several EP groups, the loss sums over all PEs of the world, added in PE order. Runs as one block after the
// forward pass. Backward is the first to use these sums.
#pragma once
#include "route_math.h"
#include "world.h"

namespace aristos {

DEVICE void sum_losses_of_world(const Layer& l, const Pass& pass) {
    const u32 count = 2 + 2 * l.shape.n_experts;
    const Gathered g{reinterpret_cast<u8*>(l.symmetric.losses), l.symmetric.losses_signal, count * 8, WHAT_LOSSES};
    // The persistent kernel has already counted the pass.
    const u64 forward = pass.pass == 0 ? l.symmetric.passes[1] : pass.forward;
    put_record(l, g, forward, l.losses.mine);
    if (dev::thread() == 0) dev::fetch_add(&l.stats->all_reduce_bytes, u64(l.shape.n_world - 1) * count * 8);
    if (!wait_records(l, g, forward)) return;
    for (u32 i = dev::thread(); i < count; i += dev::threads()) {
        double sum = 0;
        for (u32 pe = 0; pe < l.shape.n_world; pe++) sum += pe == l.shape.world_pe ? l.losses.mine[i] : g.of<double>(l, forward, pe)[i];
        l.losses.all[i] = sum;
    }
}

KERNEL(aristos_sum_losses, 256, 1)(const Layer* layer, Pass pass) {
    if (!aborted(*layer)) sum_losses_of_world(*layer, pass);
}
REGISTER_KERNEL(aristos_sum_losses)

}  // namespace aristos
