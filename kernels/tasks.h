// The scheduler of both GEMM paths: finds the next task whose inputs are available.
#pragma once
#include "items.h"

namespace aristos {

enum Found : u32 { FOUND_NOTHING = 0, FOUND_TASK = 1, FOUND_ITEM = 2 };

struct Scheduler {
    Block& b;

    // One thread; never waits. Finds the next task, or an item with higher priority, in State::item.
    DEVICE u32 poll(GemmTask& t) {
        if (find_item(b, b.items)) return FOUND_ITEM;
        bool task = find_task(t, REST_SECOND, GRADIENT_TASKS);
        if (!task && find_background_item(b)) return FOUND_ITEM;
        return task || find_task(t, GRADIENT_TASKS, TASK_QUEUES) ? FOUND_TASK : FOUND_NOTHING;
    }

    // One thread. Finds the next task. False if the block has another item to run first, or no item is left (State::item). Repeats the code
    // of `poll`, because with a call ptxas spills on Hopper, where the scheduler has 56 registers.
    // Waits while there is no task. The wait counts as PHASE_WAITING if `task_in_progress()` is false, i.e. the block has no earlier task
    // left.
    template <class InProgress> DEVICE bool next(GemmTask& t, InProgress task_in_progress) {
        b.state.watchdog = {};
        for (;;) {
            if (find_item(b, b.items)) return false;
            bool task = find_task(t, REST_SECOND, GRADIENT_TASKS);
            if (!task && find_background_item(b)) return false;
            if (task || find_task(t, GRADIENT_TASKS, TASK_QUEUES)) {
                enter_now(b.l, b.pass, b.state, PHASE_EXPERT);
                return true;
            }
            if (!task_in_progress()) enter_now(b.l, b.pass, b.state, PHASE_WAITING);
            if (all_claimed(b, b.items) || !wait_for_item(b, b.items)) {
                set_item(b, ITEM_NONE, 0);
                return false;
            }
        }
    }

    // Counters to increment when a task is finished.
    DEVICE DoneCounters done_counters(const GemmTask& t) const {
        const Counters& c = b.counters();
        if (t.kind == FORWARD_UP || t.kind == BACKWARD_DOWN)
            return {c.first_done + t.tile, t.kind == BACKWARD_DOWN ? c.batch_done + t.batch : nullptr};
        if (t.kind == FORWARD_DOWN || t.kind == BACKWARD_UP) return {c.second_done + t.tile, nullptr};
        return {b.l.shape.summed ? c.gradients_done + t.batch : nullptr, nullptr};
    }
    // One thread, after a barrier of all threads that stored the task's results.
    DEVICE void done(const GemmTask& t) const { count_done(done_counters(t)); }

private:
    // Searches queues [begin, end).
    DEVICE bool find_task(GemmTask& t, u32 begin, u32 end) {
        const Counters& c = b.counters();
        if (!knows(b, KNOWN_OWN, c.own_known)) return false;
        const bool layout = knows(b, KNOWN_LAYOUT, c.layout);
        for (u32 queue = begin; queue < end; queue++) {
            if ((!layout && queue != OWN_FIRST && queue != OWN_SECOND) || (b.state.known & KNOWN_QUEUE << queue)) continue;
            u32& held = b.state.held_tasks[queue];
            b.state.ticket = held != NONE ? held : dev::load_relaxed(c.tasks + queue);
            while (describe(queue, b.state.ticket, t) && ready(queue, t)) {
                // Claims by an add, which succeeds for every block. Only one of several concurrent compare-and-swaps would succeed, and the
                // other blocks would have to poll again. With an add, the ticket may be a later one that is not ready yet.
                if (held == NONE) {
                    held = dev::fetch_add(c.tasks + queue, 1u);
                    if (held != b.state.ticket) {
                        b.state.ticket = held;
                        continue;
                    }
                }
                held = NONE;
                fill(queue, t);
                return true;
            }
        }
        return false;
    }

    // Sets the kind, batch and tile of task `number` of a queue. False past the end.
    DEVICE bool describe(u32 queue, u32 number, GemmTask& t) {
        const Layer& l = b.l;
        const u32* tasks = l.queue.tasks[queue];
        if (number >= tasks[task_entries(l, queue)]) {
            b.state.held_tasks[queue] = NONE;
            b.state.known |= KNOWN_QUEUE << queue;
            return false;
        }
        // Finds the entry that contains the task. The search continues from the last entry found, because a queue's tickets only increase.
        u32& entry = b.state.entry[queue];
        while (tasks[entry + 1] <= number) entry++;
        u32 down, m, n;
        if (queue == GRADIENT_TASKS) {
            t.batch = entry / GRADIENTS;
            t.which = entry % GRADIENTS == 1;
            t.kind = entry % GRADIENTS == 2 ? GRAD_DOWN : GRAD_UP;
            down = tiles_down(l, t.kind, t.batch);
        } else {
            t.batch = entry;
            t.which = 0;
            t.kind = of_first_gemm(queue) ? first_kind(b.step.mode) : second_kind(b.step.mode);
            down = queue_tiles(l, queue, t.batch);
        }
        bool own = queue == OWN_FIRST || queue == OWN_SECOND, rest = !own && queue != GRADIENT_TASKS;
        tile_at(number - tasks[entry], down, tiles_across(l, t.kind, t.batch), rest ? REST_TILE_GROUP : TILE_GROUP, m, n);
        if (rest) m = l.batches.rest_order[l.batches.rest_tile[t.batch] + m];
        t.tile = queue == GRADIENT_TASKS ? NONE : m + (own ? l.batches.own_tile : l.batches.rest_tile)[t.batch];
        t.m0 = m * l.shape.tile_m;
        t.n0 = n * tile_columns(t.kind, is_gated(l, t.batch), l.shape.tile_n);
        t.rows = queue == GRADIENT_TASKS ? l.batches.total[t.batch]
                 : own                   ? l.batches.own[t.batch]
                                         : l.batches.total[t.batch] - l.batches.own[t.batch];
        return true;
    }

    DEVICE bool ready(u32 queue, const GemmTask& t) const {
        const Layer& l = b.l;
        const Counters& c = b.counters();
        if (queue == GRADIENT_TASKS) return counter_reached(c.batch_done + t.batch, batch_tasks(l, t.batch));
        if (!of_first_gemm(queue)) return counter_reached(c.first_done + t.tile, tiles_across(l, first_kind(b.step.mode), t.batch));
        u32 rows = t.rows - t.m0 < l.shape.tile_m ? t.rows - t.m0 : l.shape.tile_m;
        if (ARISTOS_FAULT(HALF_READY) && rows > l.shape.tile_m / 2) rows = l.shape.tile_m / 2;
        return counter_reached(c.arrived + t.tile, rows);
    }

    DEVICE void fill(u32 queue, GemmTask& t) {
        const Layer& l = b.l;
        const LayerShape& s = l.shape;
        const SlotStore& store = store_of(l, t.batch);
        const MlpWeights w = mlp_weights(l, t.batch);
        bool shared = is_shared(l, t.batch), gated = is_gated(l, t.batch), gradient = queue == GRADIENT_TASKS;
        u32 own = l.batches.own[t.batch];
        // Position of the first slot of the queue's part of the batch; for a gradient, of the whole batch.
        u64 base = queue == OWN_FIRST || queue == OWN_SECOND || (gradient && own > 0) ? l.batches.own_base[t.batch] : l.batches.rest_base[t.batch];
        u64 wide = store.intermediate;
        t.hidden = s.hidden;
        t.intermediate = store.intermediate;
        t.gated = gated;
        t.activation = u8(shared ? s.shared_activation : s.activation);
        // With several rounds, which share memory, activations are not kept for backward. Own tiles of the first round may be computed
        // before the number of rounds is known, so they always store activations in training.
        bool unknown = queue == OWN_FIRST && b.step.round == 0;
        t.training = s.training && (unknown || shared || b.step.mode == MODE_RECOMPUTE || !*l.received.overflow);
        t.accumulate = b.pass.accumulate || (!shared && b.step.round > 0);
        t.d_weight_stride = store.d_weight_stride;
        t.row = (t.kind == FORWARD_UP || t.kind == GRAD_UP ? store.x_row : store.grad_row) + base;
        t.gate_up = static_cast<char*>(store.gate_up) + base * wide * (gated ? 2 : 1) * l.sizes.elem_bytes;
        t.h = static_cast<char*>(store.h) + base * wide * l.sizes.elem_bytes;
        t.y = static_cast<char*>(store.y) + base * l.sizes.row_bytes;
        t.slot_maps = store.slot_maps;
        t.first_slot = u32(base);
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
        t.split = NONE;
        t.jump = 0;
        if (gradient) {
            const MlpGradients g = mlp_gradients(l, t.batch);
            t.out = t.kind == GRAD_DOWN ? g.down : t.which || !gated ? g.up : g.gate;
            if (own > 0 && own < t.rows) {
                t.split = own;
                t.jump = l.batches.rest_base[t.batch] - l.batches.own_base[t.batch] - own;
            }
        }
        t.tensor_maps = l.tables.tensor_maps ? static_cast<const TensorMap*>(l.tables.tensor_maps) + (shared ? WEIGHT_MAPS : 0) : nullptr;
        t.expert = shared ? 0 : t.batch;
    }
};

}  // namespace aristos
