// aristos_all_reduce: what is left of the sums of gradients (gradient_sums.h) when the persistent kernel is over. A block for each channel.
#pragma once
#include "gradient_sums.h"

namespace aristos {

// What is sent, reduced and copied next.
struct Turns {
    VectorTurn of[SUM_PARTS];
};
static_assert(sizeof(Turns) <= 1024, "all_reduce_launch gives 1024 bytes");

DEVICE void list_turn(const Layer& l, const Pass& pass, VectorTurn& t, u32 number) {
    begin_unit(l, pass, t, number);
    t.list(l);
}
// All threads.
DEVICE void next_turn(const Layer& l, const Pass& pass, VectorTurn& t) {
    dev::sync_block();
    if (dev::thread() == 0) {
        t.turns++;
        if (++t.step == t.steps) list_turn(l, pass, t, t.number + 1);
    }
    dev::sync_block();
}

KERNEL(aristos_all_reduce, REDUCE_THREADS, 1)(const Layer* layer, Pass pass) {
    const Layer& l = *layer;
    if (l.shape.n_world == 1 || aborted(l)) return;
    SumProgress& progress = l.sums[dev::block()];
    Turns& turns = *reinterpret_cast<Turns*>(dev::shared());
    if (dev::thread() < SUM_PARTS) {
        begin_turn(l, pass, turns.of[dev::thread()], progress.at[dev::thread()]);
        turns.of[dev::thread()].list(l);
    }
    dev::sync_block();
    const Reducer reducer(l, counted(l, pass), dev::block(), l.stats);
    VectorTurn &sent = turns.of[SUM_SENT], &reduced = turns.of[SUM_REDUCED], &copied = turns.of[SUM_COPIED];
    // What is reduced was sent a turn before, what is copied was reduced a turn before: so what peers do for it had time.
    while (copied.steps > 0) {
        if (sent.steps > 0 && sent.turns - copied.turns < REDUCE_AHEAD) {
            reducer.send(sent);
            next_turn(l, pass, sent);
        }
        if (reduced.turns + (sent.steps > 0) < sent.turns) {
            if (!reducer.reduce(reduced)) return;
            next_turn(l, pass, reduced);
        }
        if (copied.turns + (reduced.steps > 0) < reduced.turns) {
            if (!reducer.copy(copied)) return;
            next_turn(l, pass, copied);
        }
    }
    // For the next pass.
    if (dev::thread() == 0) progress = {};
}
REGISTER_KERNEL(aristos_all_reduce)

}  // namespace aristos
