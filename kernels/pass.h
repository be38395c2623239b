// A pass of a persistent kernel: its steps, and the path of a block through one step.
#pragma once
#include "tasks.h"
#include <new>

namespace aristos {

// ---- Items.
template <class T> DEVICE void run_plain(Block& b, u32 item) {
    const Layer& l = b.l;
    const u32 zeros = l.queue.plain_end[PLAIN_ZERO];
    u32 batch;
    if (item < zeros) {
        batch = l.queue.empty[item / zero_items(l)];
        zero_gradient(b, batch, item % zero_items(l));
    } else {
        batch = bias_item(b, item - zeros).batch;
        bias_gradient<T>(b, item - zeros);
    }
    if (!l.shape.summed) return;
    dev::sync_block();
    if (dev::thread() == 0) dev::fetch_add_acq_rel(b.counters().gradients_done + batch, 1u);
}
template <class T> DEVICE bool run_item(Block& b, const Item& item) {
    switch (item.kind) {
        case ITEM_OWN: return make_own_layout(b), true;
        case ITEM_SEND: return send(b, item.index), true;
        case ITEM_LAYOUT: return make_layout(b);
        case ITEM_RETURN: return return_rows<T>(b, item.pe, item.index);
        case ITEM_ARRIVE: {
            if (item.pe != b.l.shape.my_pe) return arrive_chunk(b, item.pe, item.index);
            u32 chunks = source_chunks(b, item.pe);
            return arrive_own(b, item.index % chunks, item.index >= chunks), true;
        }
        case ITEM_SHARED: return arrive_shared(b, item.index), true;
        case ITEM_PLAIN: return run_plain<T>(b, item.index), true;
        case ITEM_SUM: return run_sum(b, item.pe, item.index);
        case ITEM_RELAY: return relay(b, item.pe, item.index), true;
        default: return final_sum<T>(b, item.index);
    }
}

// One thread. Finds the next item: ITEM_TASKS if tasks are allowed and no other item is ready.
OUTLINE void next_item(Block& b) {
    enter_now(b.l, b.pass, b.state, PHASE_WAITING);
    b.state.watchdog = {};
    while (!find_item(b, b.items)) {
        if (has(b.items, ITEM_TASKS)) return (void)set_item(b, ITEM_TASKS, 0);  // the task loop looks for background items
        if (find_background_item(b)) return;
        if (all_claimed(b, b.items) || !wait_for_item(b, b.items)) return (void)set_item(b, ITEM_NONE, 0);
    }
}

template <class Path> DEVICE void next_item(Block& b) {
    if constexpr (Path::CTA_PAIR) {
        if (has(b.items, ITEM_TASKS) && Path::CtaPair::is_second()) return Path::CtaPair::next_item(b);
    }
    next_item(b);
}

// All threads. In a CTA pair (cta_pair.h): whether `ok` holds in both blocks, so that both continue or neither does.
template <class Path> DEVICE bool agree_across_pair(Block& b, bool ok) {
    if constexpr (Path::CTA_PAIR) return Path::CtaPair::agree(b, ok);
    return ok;
}

// Whether a block that fails continues until its CTA pair leaves the task loop. If it left alone, the other block would wait for it at the
// next task. If it continues, both leave there, because the PE aborts.
template <class Path> DEVICE bool keeps_running_after_error(const Block& b) {
    if constexpr (Path::CTA_PAIR) return has(b.items, ITEM_TASKS) && !(ARISTOS_FAULT(CTA_FAILS_ALONE) && Path::CtaPair::is_second());
    return false;
}

// All threads. Runs items of `set` until none is left to claim.
template <class Path> DEVICE bool run_items(Block& b, u32 set) {
    dev::sync_block();
    if (dev::thread() == 0) b.items = set;
    for (;;) {
        dev::sync_block();
        if (dev::thread() == 0) next_item<Path>(b);
        dev::sync_block();
        Item item = b.state.item;
        if (item.kind == ITEM_TASKS) {
            dev::sync_block();  // before the next item is written
            if (dev::thread() == 0) b.phase = PHASE_EXPERT;
            Path::run(b);
            dev::sync_block();
            item = b.state.item;
            if constexpr (Path::CTA_PAIR) {
                if (item.kind == ITEM_TASKS) continue;  // the first block has found an item
            }
        }
        if (item.kind == ITEM_NONE) return !dev::sync_block_or(dev::thread() == 0 && aborted(b.l));
        if (!run_item<typename Path::Element>(b, item) && !keeps_running_after_error<Path>(b)) return false;
    }
}

// Clears the counters of the next step, which no block uses before the barrier or the end of the kernel.
DEVICE void clear_next_counters(Block& b) {
    u32* words = b.l.counters_begin[b.set ^ 1];
    for (u32 i = dev::block() * dev::threads() + dev::thread(); i < b.l.counters_words; i += dev::blocks() * dev::threads())
        words[i] = 0;
}

// Actions of a step. Normally: all items, then the final sums. In bulk mode: dispatch, GEMMs and results, each finished on all PEs before
// the next begins. Dispatch includes sends and arrivals together, because a chunk buffer is free for reuse only once its chunk has been
// copied.
constexpr u32 PE_BARRIER = 1u << 16, BARRIER_NUMBER = 17;
DEVICE u32 step_action(const Layer& l, u32 number) {
    const u32 dispatch = items(ITEM_OWN, ITEM_SEND, ITEM_LAYOUT, ITEM_ARRIVE, ITEM_SHARED) | (l.shape.relays ? items(ITEM_RELAY) : 0);
    if (!l.shape.bulk) {
        switch (number) {
            case 0: return dispatch | items(ITEM_TASKS, ITEM_RETURN, ITEM_PLAIN);
            case 1: return items(ITEM_FINAL);
            default: return 0;
        }
    }
    switch (number) {
        case 0: return dispatch;
        case 1: return PE_BARRIER;
        case 2: return items(ITEM_TASKS, ITEM_PLAIN);
        case 3: return PE_BARRIER | 1u << BARRIER_NUMBER;
        case 4: return items(ITEM_RETURN);
        case 5: return PE_BARRIER | 2u << BARRIER_NUMBER;
        case 6: return items(ITEM_FINAL);
        default: return 0;
    }
}

template <class Path> DEVICE bool run_step(Block& b) {
    clear_next_counters(b);
    for (;;) {
        u32 action = step_action(b.l, b.actions);
        if (action == 0) return true;
        dev::sync_block();
        if (dev::thread() == 0) b.actions++;  // other threads read it after a barrier of the action
        bool ok;
        if (action & PE_BARRIER) ok = pe_barrier(b.l, b.pass, action >> BARRIER_NUMBER, stamp_step(b.step.round, b.step.mode, true));
        else ok = run_items<Path>(b, action | (has(action, ITEM_PLAIN) && sums_gradients(b) ? items(ITEM_SUM) : 0));
        if (!agree_across_pair<Path>(b, ok)) return false;
    }
}

// ---- Steps.

// All threads. Whether this PE, or a destination of round `round`, needs recomputation.
DEVICE bool recomputes(const Block& b, u32 round) {
    const Received& in = b.l.received;
    if (b.l.shape.bulk) return *in.world_rounds > 1;  // all PEs take part in the same barriers
    bool any = *in.overflow;
    for (u32 pe = dev::thread(); pe < b.l.shape.n_pes && !any; pe += dev::threads())
        any = b.l.plan.dest[pe].rounds > round && in.peer_overflow[pe];
    return dev::sync_block_or(any);
}

// All threads. Sets up the step.
DEVICE void begin_step(Block& b, u32 round, u32 mode) {
    const Layer& l = b.l;
    // In the first step of a forward pass `*overflow` is not yet known, because it follows from the headers that this step receives.
    bool overflow = (mode != MODE_FORWARD || round > 0) && *l.received.overflow;
    bool receives = mode == MODE_RECOMPUTE ? overflow : round == 0 || overflow;
    bool with_shared = mode != MODE_RECOMPUTE && round == 0 && has_shared(l, b.pass);
    dev::sync_block();
    if (dev::thread() == 0) {
        b.step = {round, mode, receives, with_shared};
        b.set = u32(b.first_step + b.steps) & 1;
        b.steps++;
        b.actions = 0;
        b.state.headers_seen = 0;
        b.state.source = (l.shape.my_pe + dev::block()) % l.shape.n_pes;
        b.state.served = 0;
        b.state.channel = dev::block() % reduce_shape(l.shape).channels;
        for (u32& entry : b.state.entry) entry = 0;
        for (u32& held : b.state.held_tasks) held = NONE;
        b.state.held_results = NONE;
        b.state.known = 0;
    }
    dev::sync_block();
}

DEVICE void begin_round(Block& b, u32 round, bool backward) {
    begin_step(b, round, !backward ? MODE_FORWARD : recomputes(b, round) ? MODE_RECOMPUTE : MODE_GRADIENT);
}

template <class Path> DEVICE void run_steps(Block& b) {
    begin_round(b, 0, Path::BACKWARD);
    while (run_step<Path>(b)) {
        bool again = b.step.mode == MODE_RECOMPUTE;  // the step for the gradients of the same round follows
        // In forward the number of rounds is known only after the first step.
        if (!again && b.step.round + 1 >= pass_rounds(b.l)) return;
        if (!agree_across_pair<Path>(b, grid_barrier(b.l))) return;
        if (b.l.shape.stage) {
            if (dev::block() == 0 && dev::thread() == 0) end_stages(b.l);
            if (!agree_across_pair<Path>(b, grid_barrier(b.l))) return;
        }
        if (again) begin_step(b, b.step.round, MODE_GRADIENT);
        else begin_round(b, b.step.round + 1, Path::BACKWARD);
    }
}

// All threads of every block, at its exit, also after an error. The last block sums the statistics.
OUTLINE void leave(Block& b, bool backward) {
    const Layer& l = b.l;
    constexpr u32 WORDS = sizeof(PassStats) / sizeof(u64);
    dev::sync_block();
    bool last = false;
    if (dev::thread() == 0) {
        enter_now(l, b.pass, b.state, PHASE_IDLE);
        for (u32 i = 0; i < PHASES; i++) b.state.stats.phase_block_ns[i] = b.state.phase_ns[i];
        l.block_stats[dev::block()].stats = b.state.stats;
        dev::fence_gpu();
        last = (dev::fetch_add(&l.control->exits, u64(1)) + 1) % dev::blocks() == 0;
        dev::fence_gpu();
    }
    if (!dev::sync_block_or(last)) return;
    u64* to = reinterpret_cast<u64*>(l.stats);
    for (u32 i = dev::thread(); i < WORDS; i += dev::threads()) {
        // In a forward pass the routing kernels have already counted. In backward this kernel is the first one that counts.
        u64 sum = backward ? 0 : to[i];
        for (u32 block = 0; block < dev::blocks(); block++)
            sum += reinterpret_cast<const u64*>(&l.block_stats[block].stats)[i];
        to[i] = sum;
    }
    dev::sync_block();
    if (dev::thread() == 0) {
        if (!aborted(l)) end_stages(l);
        l.stats->rounds = *l.received.world_rounds > 1 ? *l.received.world_rounds : 1;
        l.control->steps = b.first_step + b.steps;
        count_pass(l, b.pass, backward);
    }
}

// The body of a persistent kernel.
template <class Path> DEVICE void run_pass(const Layer& l, const Pass& given) {
    State& state = *reinterpret_cast<State*>(dev::shared() + Path::SHARED_BYTES);
    Block& b = *reinterpret_cast<Block*>(dev::shared() + Path::SHARED_BYTES + sizeof(State));
    if (dev::thread() == 0) {
        Path::begin(l);
        for (u32 i = 0; i < PHASES; i++) state.phase_ns[i] = 0;
        state.stats = {};
        state.phase = PHASE_IDLE;
        state.is_second_cta = 0;
        state.since = dev::nanoseconds();
        new (&b) Block{l, numbered(l, given, Path::BACKWARD), state, dev::shared(), l.control->steps};
        if constexpr (Path::CTA_PAIR) Path::CtaPair::begin(b);
    }
    dev::sync_block();
    if (agree_across_pair<Path>(b, !dev::sync_block_or(aborted(l)))) run_steps<Path>(b);
    leave(b, Path::BACKWARD);
    if constexpr (Path::CTA_PAIR) Path::CtaPair::end(b);
}

}  // namespace aristos
