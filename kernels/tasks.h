// The scheduler that both GEMM paths ask for tasks: takes a ticket, finds its tile, waits for what the tile reads.
#pragma once
#include "schedule.h"

namespace aristos {

// Where a task's tile is counted.
DEVICE u32 task_tile(const Layer& l, const GemmTask& t) { return l.batches.tile[t.batch] + t.m0 / l.shape.tile_m; }

struct Scheduler {
    const Layer& l;
    const Pass& pass;
    const Step& step;
    const Counters& counters;
    State& state;

    // One thread. The next task, once all that it reads is there; false at the end of the queue, or when the PE aborts.
    DEVICE bool next(GemmTask& t) {
        enter_now(l, pass, state, PHASE_WAITING);
        bool found = find(t) && inputs(t);
        if (found) enter_now(l, pass, state, PHASE_EXPERT);
        return found;
    }

    // One thread, after a barrier of all threads that stored the task's results.
    DEVICE void done(const GemmTask& t) {
        bool first = t.kind == FORWARD_UP || t.kind == BACKWARD_DOWN;
        bool second = t.kind == FORWARD_DOWN || t.kind == BACKWARD_UP;
        if (!first && !second) return;
        dev::fetch_add_acq_rel((first ? counters.first_done : counters.second_done) + task_tile(l, t), 1u);
        if (t.kind == BACKWARD_DOWN) dev::fetch_add_acq_rel(counters.batch_done + t.batch, 1u);
    }

private:
    DEVICE bool find(GemmTask& t) {
        const Queue& q = l.queue;
        u32 ticket = dev::fetch_add(counters.compute, 1u);
        if (!wait_local(l, counters.layout, 1, PHASE_EXPERT, ticket)) return false;
        u32 entries = l.sizes.max_entries;
        if (ticket >= q.entry_ticket[entries]) return false;
        // The last entry that begins at or before the ticket: those before it end before the ticket, or are empty.
        u32 entry = count_below(entries, ticket + 1, [&](u32 i) { return q.entry_ticket[i]; }) - 1;
        u32 what = q.entry_what[entry], index = what & ENTRY_INDEX, tile = ticket - q.entry_ticket[entry];
        u32 m, n;
        if (what & ENTRY_GRAD) {
            t.batch = index / GRAD_ENTRIES;
            t.which = index % GRAD_ENTRIES == 1;
            t.kind = index % GRAD_ENTRIES == 2 ? GRAD_DOWN : GRAD_UP;
            tile_at(tile, tiles_down(l, t.kind, t.batch), tiles_across(l, t.kind, t.batch), m, n);
        } else {
            t.kind = what & ENTRY_SECOND ? second_kind(step.mode) : first_kind(step.mode);
            t.which = 0;
            Segment g = segment(l, step, index);
            t.batch = g.batch;
            tile_at(tile, g.tiles, tiles_across(l, t.kind, t.batch), m, n);
            m += g.first;
        }
        fill(t, m, n);
        return true;
    }

    DEVICE void fill(GemmTask& t, u32 m, u32 n) {
        const LayerShape& s = l.shape;
        const SlotStore& store = store_of(l, t.batch);
        const MlpWeights& w = l.tables.weights[t.batch];
        bool shared = is_shared(l, t.batch), gated = is_gated(l, t.batch);
        u64 base = l.batches.base[t.batch], wide = store.intermediate;
        t.rows = l.batches.total[t.batch];
        t.m0 = m * s.tile_m;
        t.n0 = n * tile_columns(t.kind, gated, s.tile_n);
        t.hidden = s.hidden;
        t.intermediate = store.intermediate;
        t.gated = gated;
        t.activation = u8(shared ? s.shared_activation : s.activation);
        // Where several rounds use the same memory, what backward needs is not kept.
        t.training = s.training && (shared || step.mode == MODE_RECOMPUTE || !*l.received.overflow);
        t.accumulate = !shared && step.round > 0;
        t.d_weight_stride = store.d_weight_stride;
        t.row = (t.kind == FORWARD_UP || t.kind == GRAD_UP ? store.x_row : store.grad_row) + base;
        t.gu = static_cast<char*>(store.gu) + base * wide * (gated ? 2 : 1) * l.sizes.elem_bytes;
        t.h = static_cast<char*>(store.h) + base * wide * l.sizes.elem_bytes;
        t.y = static_cast<char*>(store.y) + base * l.sizes.row_bytes;
        t.gate = w.gate;
        t.up = w.up;
        t.down = w.down;
        t.gate_bias = w.gate_bias;
        t.up_bias = w.up_bias;
        t.down_bias = w.down_bias;
        // The shared expert's output is weighted by its gate, if it has one.
        t.weight = !shared ? store.weight + base : s.shared_gate ? l.routing.shared_weight : nullptr;
        t.d_weight = !shared || s.shared_gate ? store.d_weight + base * store.d_weight_stride : nullptr;
        t.out = nullptr;
        if (t.kind == GRAD_UP || t.kind == GRAD_DOWN) {
            const MlpGradients& g = l.tables.gradients[t.batch];
            t.out = t.kind == GRAD_DOWN ? g.down : t.which || !gated ? g.up : g.gate;
        }
        t.tensor_maps = l.tables.tensor_maps
            ? static_cast<const char*>(l.tables.tensor_maps) + u64(t.batch) * 3 * sizeof(TensorMap) : nullptr;
    }

    DEVICE bool inputs(const GemmTask& t) {
        u32 tile = task_tile(l, t);
        switch (t.kind) {
            case FORWARD_UP: case BACKWARD_DOWN: {
                u32 rows = t.rows - t.m0 < l.shape.tile_m ? t.rows - t.m0 : l.shape.tile_m;
                return wait_local(l, counters.arrived + tile, rows, PHASE_EXPERT, t.batch);
            }
            case FORWARD_DOWN: case BACKWARD_UP: {
                u32 tasks = tiles_across(l, first_kind(step.mode), t.batch);
                return wait_local(l, counters.first_done + tile, tasks, PHASE_EXPERT, t.batch);
            }
            default: {
                u32 tasks = tiles_down(l, BACKWARD_DOWN, t.batch) * tiles_across(l, BACKWARD_DOWN, t.batch);
                return wait_local(l, counters.batch_done + t.batch, tasks, PHASE_EXPERT, t.batch);
            }
        }
    }
};

DEVICE Scheduler scheduler_of(Block& b) { return {b.l, b.pass, b.step, b.counters(), b.state}; }

}  // namespace aristos
