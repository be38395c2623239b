// The gradient sums (gradient_sums.h) as items of the persistent kernel: one step of a channel whose dependencies are met.
//
// The scheduler warp has few registers, so each channel's dependencies are precomputed at the end of its previous step, as signal words
// and required values.
#pragma once
#include "gradient_sums.h"
#include "schedule.h"

namespace aristos {

constexpr u32 SUM_LISTED = 1u << SUM_PARTS;  // flag in SumProgress::next: the dependencies are listed
constexpr u32 SUM_LIST = SUM_PARTS;          // in place of a SumPart: only precompute the dependencies

DEVICE SumWait* sum_waits(const Layer& l, u32 channel, u32 kind) { return l.sum_waits + (u64(channel) * 2 + kind) * l.shape.n_world; }

// One thread. The SumPart of a channel that can run, SUM_LIST, or NONE if a dependency is unmet. Sets `version` to the channel's version. A
// block claims the channel by advancing the version from this value, which fails if another block has claimed the channel since.
DEVICE u32 ready_part(const Block& b, u32 channel, u32& version) {
    const Layer& l = b.l;
    const SumProgress& progress = l.sums[channel];
    version = dev::load_relaxed(&progress.version);
    if (version & 1) return NONE;
    (void)dev::load_acquire(&progress.version);
    const u32 next = dev::load_relaxed(&progress.next);
    if ((next & SUM_LISTED) == 0) return SUM_LIST;
    for (u32 kind = 2; kind-- > 0;) {
        if ((next >> (SUM_REDUCED + kind) & 1) == 0) continue;
        const SumWait* wait = sum_waits(l, channel, kind);
        u32 i = 0, count = dev::load_relaxed(&progress.waits[kind]);
        while (i < count && signal_arrived(l.symmetric.all_reduce_signal + dev::load_relaxed(&wait[i].word),
                                           {0, 0, 0, dev::load_relaxed(&wait[i].least), 0}, IgnoreMissing()))
            i++;
        if (i == count) return SUM_REDUCED + kind;
    }
    const u32* done = b.counters().gradients_done + dev::load_relaxed(&progress.batch);
    const bool ready = counter_reached(done, dev::load_relaxed(&progress.least)) || ARISTOS_FAULT(EARLY_SUM);
    return (next >> SUM_SENT & 1) && ready ? u32(SUM_SENT) : NONE;
}

// One thread. Lists the dependencies of a channel's next steps. `steps` is scratch memory.
DEVICE void list_waits(const Block& b, const Reducer& reducer, SumStep* steps) {
    const Layer& l = b.l;
    SumProgress& progress = l.sums[reducer.channel];
    for (u32 part = 0; part < SUM_PARTS; part++) begin_sum_step(l, b.pass, steps[part], progress.at[part]);
    const SumStep &sent = steps[SUM_SENT], &reduced = steps[SUM_REDUCED], &copied = steps[SUM_COPIED];
    u32 next = SUM_LISTED;
    if (reduced.steps_before < sent.steps_before) next |= 1u << SUM_REDUCED;
    if (copied.steps_before < reduced.steps_before) next |= 1u << SUM_COPIED;
    const u32 batch = sent.unit.batch;
    if (sent.steps > 0 && batch != NONE && (sent.steps_before - copied.steps_before < REDUCE_AHEAD || ARISTOS_FAULT(NO_SUM_BUFFER_WAIT))) {
        next |= 1u << SUM_SENT;
        dev::store_relaxed(&progress.batch, batch);
        dev::store_relaxed(&progress.least, gradient_items(b, batch));
    }
    for (u32 kind = 0; kind < 2; kind++) {
        const SumStep& t = steps[SUM_REDUCED + kind];
        SumWait* wait = sum_waits(l, reducer.channel, kind);
        u32 count = 0;
        if (next >> (SUM_REDUCED + kind) & 1) {
            for (u32 holder = 0; holder < t.unit.parts; holder++) {
                if (holder == t.unit.me || reducer.length(t, kind == 0 ? t.unit.me : holder) == 0) continue;
                const u32 of = reducer.number(t, holder);
                dev::store_relaxed(&wait[count].word, u32(reducer.signal(kind, t.holders[holder].pe, of) - l.symmetric.all_reduce_signal));
                dev::store_relaxed(&wait[count].least, reducer.stamp_of(of));
                count++;
            }
        }
        dev::store_relaxed(&progress.waits[kind], count);
    }
    dev::store_relaxed(&progress.next, next);
}

// All threads. Runs the part found by ready_part() on a channel that this block has claimed.
OUTLINE bool run_sum(Block& b, u32 channel, u32 part) {
    const Layer& l = b.l;
    enter(b, PHASE_ALL_REDUCE);
    SumProgress& progress = l.sums[channel];
    VectorStep& t = *reinterpret_cast<VectorStep*>(b.scratch);
    const Reducer reducer(l, b.pass.pass, channel, &b.state.stats);
    if (part != SUM_LIST) {
        if (dev::thread() == 0) {
            begin_sum_step(l, b.pass, t, progress.at[part]);
            t.list(l);
        }
        dev::sync_block();
        bool ok = true;
        if (part == SUM_SENT) reducer.send(t);
        else ok = part == SUM_REDUCED ? reducer.reduce(t) : reducer.copy(t);
        dev::sync_block();
        if (!ok) return false;
    }
    if (dev::thread() == 0) {
        if (part != SUM_LIST) {
            SumCursor& at = progress.at[part];
            const bool next = t.step + 1 == t.steps;
            dev::store_relaxed(&at.unit, t.number + next);
            dev::store_relaxed(&at.step, next ? 0 : t.step + 1);
            dev::store_relaxed(&at.steps_before, t.steps_before + 1);
        }
        list_waits(b, reducer, reinterpret_cast<SumStep*>(b.scratch));
        dev::store_release(&progress.version, dev::load_relaxed(&progress.version) + 1);
    }
    return true;
}

}  // namespace aristos
