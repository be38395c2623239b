// A pass of a persistent kernel: its steps, and how a block goes through one.
#pragma once
#include "combine.h"
#include "tasks.h"
#include <new>

namespace aristos {

// ---- The communication queue.
template <class T> DEVICE bool run_item(Block& b, u32 ticket) {
    const u32* end = b.l.queue.comm_end;
    u32 n = b.l.shape.n_pes, me = b.l.shape.my_pe;
    if (ticket == 0) return make_layout(b);
    // Chunk 0 of all sources, then chunk 1: own rows arrive first and return last.
    if (ticket < end[CLASS_ARRIVE]) {
        u32 item = ticket - end[CLASS_LAYOUT];
        return arrive_chunk(b, (me + item % n) % n, item / n);
    }
    if (ticket < end[CLASS_SHARED]) return arrive_shared(b, ticket - end[CLASS_ARRIVE]);
    if (ticket < end[CLASS_RETURN]) {
        u32 item = ticket - end[CLASS_SHARED];
        return return_chunk<T>(b, (me + 1 + item % n) % n, item / n);
    }
    if (ticket < end[CLASS_FINAL]) return final_sum<T>(b, ticket - end[CLASS_RETURN]);
    if (ticket < end[CLASS_BIAS]) return bias_gradient<T>(b, ticket - end[CLASS_FINAL]);
    zero_gradient(b, ticket - end[CLASS_BIAS]);
    return true;
}

// Items of the communication queue up to the end of class `last`. The ticket after them is held for the next call.
template <class T> DEVICE bool run_comm(Block& b, u32 last) {
    u32 ticket = b.held;
    for (bool layout_known = false;;) {
        if (ticket == NONE) ticket = take_ticket(b, b.counters().comm);
        if (ticket > 0 && !layout_known) {
            layout_known = wait_block(b, 1, [&](u32) {
                return wait_local(b.l, b.counters().layout, 1, b.phase, ticket);
            });
            if (!layout_known) return false;
        }
        if (ticket > 0 && ticket >= b.l.queue.comm_end[last]) break;
        if (!run_item<T>(b, ticket)) return false;
        ticket = NONE;
    }
    if (dev::thread() == 0) b.held = ticket;  // read after the barriers of the action that follows
    return true;
}

// Sends, to the end of the queue, or, by a block that prefers to compute, until there is something to compute.
DEVICE bool run_sends(Block& b, bool all) {
    for (;;) {
        if (!all && dev::sync_block_or(dev::thread() == 0 && dev::load_relaxed(b.counters().layout))) return true;
        u32 ticket = take_ticket(b, b.counters().send);
        if (ticket >= send_items(b.l)) return true;
        if (!send(b, ticket)) return false;
    }
}

template <class Path> DEVICE bool run_compute(Block& b) {
    dev::sync_block();
    if (dev::thread() == 0) b.phase = PHASE_EXPERT;
    Path::run(b);
    // False where the queue ended because the PE aborts.
    return !dev::sync_block_or(dev::thread() == 0 && aborted(b.l));
}

// The set of the next step: nobody uses it before the barrier or the end of the kernel.
DEVICE void clear_next_counters(Block& b) {
    u32* words = b.l.counters_begin[b.set ^ 1];
    for (u32 i = dev::block() * dev::threads() + dev::thread(); i < b.l.counters_words; i += dev::blocks() * dev::threads())
        words[i] = 0;
}

// How a block goes through a step: a list of at most 16 actions. A list rather than a sequence of calls, so that each action's
// code is in the kernel once.
enum Action : u32 {
    ACTION_END = 0, ACTION_SENDS = 1, ACTION_SENDS_FIRST = 2, ACTION_COMPUTE = 3, ACTION_GRID_BARRIER = 4,
    ACTION_PE_BARRIER = 5,  // and 6 and 7: the second and the third of a step
    ACTION_COMM = 8,        // and the number of a class: up to its end
};
template <class... Actions> constexpr u64 actions(Actions... list) {
    u64 all = 0;
    u32 shift = 0;
    ((all |= u64(list) << shift, shift += 4), ...);
    return all;
}
constexpr u64 COMM_FIRST = actions(ACTION_SENDS, ACTION_COMM + CLASS_ZERO, ACTION_COMPUTE);
constexpr u64 COMPUTE_FIRST = actions(ACTION_SENDS_FIRST, ACTION_COMPUTE, ACTION_SENDS, ACTION_COMM + CLASS_ZERO);
// The bulk-synchronous baseline: the same items, each class finished everywhere before the next begins.
constexpr u64 BULK = actions(ACTION_SENDS, ACTION_PE_BARRIER, ACTION_COMM + CLASS_LAYOUT, ACTION_GRID_BARRIER,
                             ACTION_COMM + CLASS_SHARED, ACTION_GRID_BARRIER, ACTION_COMPUTE, ACTION_PE_BARRIER + 1,
                             ACTION_COMM + CLASS_RETURN, ACTION_PE_BARRIER + 2, ACTION_COMM + CLASS_ZERO);

template <class Path> DEVICE bool run_step(Block& b) {
    clear_next_counters(b);
    for (;;) {
        u32 action = u32(b.actions) & 15;
        if (action == ACTION_END) return true;
        dev::sync_block();
        if (dev::thread() == 0) b.actions >>= 4;  // every action has a barrier, so that this is seen after it
        bool ok;
        if (action >= ACTION_COMM) ok = run_comm<typename Path::Element>(b, action - ACTION_COMM);
        else if (action == ACTION_COMPUTE) ok = run_compute<Path>(b);
        else if (action <= ACTION_SENDS_FIRST) ok = run_sends(b, action == ACTION_SENDS);
        else if (action == ACTION_GRID_BARRIER) ok = grid_barrier(b.l);
        else ok = pe_barrier(b.l, b.pass, action - ACTION_PE_BARRIER, stamp_step(b.step.round, b.step.mode, true));
        if (!ok) return false;
    }
}

// ---- Steps.

// Does any destination of round `round`, or this PE, need recomputation? All threads.
DEVICE bool recomputes(const Block& b, u32 round) {
    const Received& in = b.l.received;
    if (b.l.shape.bulk) return *in.world_rounds > 1;  // all PEs pass the same barriers
    bool any = *in.overflow;
    for (u32 pe = dev::thread(); pe < b.l.shape.n_pes && !any; pe += dev::threads())
        any = b.l.plan.dest[pe].rounds > round && in.peer_overflow[pe];
    return dev::sync_block_or(any);
}

// Sets up the step; all threads.
DEVICE void begin_step(Block& b, u32 round, u32 mode) {
    const Layer& l = b.l;
    // The first step of a forward pass receives from everyone, and so learns whether anyone overflows.
    bool overflow = (mode != MODE_FORWARD || round > 0) && *l.received.overflow;
    bool receives = mode == MODE_RECOMPUTE ? overflow : round == 0 || overflow;
    bool with_shared = mode != MODE_RECOMPUTE && round == 0 && has_shared(l, b.pass);
    dev::sync_block();
    if (dev::thread() == 0) {
        b.step = {round, mode, receives, with_shared};
        b.set = u32(b.first_step + b.steps) & 1;
        b.steps++;
        b.held = NONE;
        b.actions = l.shape.bulk ? BULK : b.is_comm() ? COMM_FIRST : COMPUTE_FIRST;
    }
    dev::sync_block();
}

DEVICE void begin_round(Block& b, u32 round, bool backward) {
    begin_step(b, round, !backward ? MODE_FORWARD : recomputes(b, round) ? MODE_RECOMPUTE : MODE_GRADIENT);
}

template <class Path> DEVICE void run_steps(Block& b) {
    begin_round(b, 0, Path::BACKWARD);
    while (run_step<Path>(b)) {
        bool again = b.step.mode == MODE_RECOMPUTE;  // the gradients of the same round
        // Forward knows the number of rounds only once its first step is over.
        if (!again && b.step.round + 1 >= pass_rounds(b.l)) return;
        if (!grid_barrier(b.l)) return;
        if (again) begin_step(b, b.step.round, MODE_GRADIENT);
        else begin_round(b, b.step.round + 1, Path::BACKWARD);
    }
}

// All blocks of the kernel end here, after an error too; the last one adds up what they counted.
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
        // Forward's begin with what routing counted; this is the first kernel of a backward.
        u64 sum = backward ? 0 : to[i];
        for (u32 block = 0; block < dev::blocks(); block++)
            sum += reinterpret_cast<const u64*>(&l.block_stats[block].stats)[i];
        to[i] = sum;
    }
    dev::sync_block();
    if (dev::thread() == 0) {
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
        for (u32 i = 0; i < PHASES; i++) state.phase_ns[i] = 0;
        state.stats = {};
        state.phase = PHASE_IDLE;
        state.since = dev::nanoseconds();
        new (&b) Block{l, numbered(l, given, Path::BACKWARD), state, dev::shared(), l.control->steps};
    }
    dev::sync_block();
    if (!dev::sync_block_or(aborted(l))) run_steps<Path>(b);
    leave(b, Path::BACKWARD);
}

}  // namespace aristos
