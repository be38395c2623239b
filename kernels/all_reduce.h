// aristos_all_reduce: runs the steps of the gradient sums (gradient_sums.h) that the persistent kernel has not run. One block per channel.
#pragma once
#include "gradient_sums.h"

namespace aristos {

// The next steps to send, to reduce and to copy.
struct SumSteps {
    VectorStep of[SUM_PARTS];
};
static_assert(sizeof(SumSteps) <= 1024, "all_reduce_launch gives 1024 bytes");

DEVICE void start_unit(const Layer& l, const Pass& pass, VectorStep& t, u32 number) {
    begin_unit(l, pass, t, number);
    t.list(l);
}
// All threads. Sets `t` to its next step, in the next unit if the current one has no more.
DEVICE void advance(const Layer& l, const Pass& pass, VectorStep& t) {
    dev::sync_block();
    if (dev::thread() == 0) {
        t.steps_before++;
        if (++t.step == t.steps) start_unit(l, pass, t, t.number + 1);
    }
    dev::sync_block();
}

KERNEL(aristos_all_reduce, REDUCE_THREADS, 1)(const Layer* layer, Pass pass) {
    const Layer& l = *layer;
    if (l.shape.n_world == 1 || aborted(l)) return;
    SumProgress& progress = l.sums[dev::block()];
    SumSteps& steps = *reinterpret_cast<SumSteps*>(dev::shared());
    if (dev::thread() < SUM_PARTS) {
        begin_sum_step(l, pass, steps.of[dev::thread()], progress.at[dev::thread()]);
        steps.of[dev::thread()].list(l);
    }
    dev::sync_block();
    const Reducer reducer(l, counted(l, pass), dev::block(), l.stats);
    VectorStep &sent = steps.of[SUM_SENT], &reduced = steps.of[SUM_REDUCED], &copied = steps.of[SUM_COPIED];
    // Software pipeline: send, reduce and copy are one step apart, so that peers can respond meanwhile.
    while (copied.steps > 0) {
        if (sent.steps > 0 && sent.steps_before - copied.steps_before < REDUCE_AHEAD) {
            reducer.send(sent);
            advance(l, pass, sent);
        }
        if (reduced.steps_before + (sent.steps > 0) < sent.steps_before) {
            if (!reducer.reduce(reduced)) return;
            advance(l, pass, reduced);
        }
        if (copied.steps_before + (reduced.steps > 0) < reduced.steps_before) {
            if (!reducer.copy(copied)) return;
            advance(l, pass, copied);
        }
    }
    // Resets the channel's progress for the next pass.
    if (dev::thread() == 0) progress = {};
}
REGISTER_KERNEL(aristos_all_reduce)

}  // namespace aristos
