// Picks a block's next work item: the first whose dependencies are all met. One thread calls this between two items.
#pragma once
#include "relay.h"
#include "sum_steps.h"

namespace aristos {

enum ItemKind : u32 {
    ITEM_OWN = 0,      // layout of the own slots
    ITEM_SEND = 1,     // (destination, chunk), or its header
    ITEM_LAYOUT = 2,   // layout of the other PEs' slots
    ITEM_RETURN = 3,   // (source, chunk)
    ITEM_ARRIVE = 4,   // (source, chunk)
    ITEM_SHARED = 5,   // the shared expert's rows
    ITEM_TASKS = 6,    // GEMM tasks, until another item is available
    ITEM_PLAIN = 7,    // PlainItems
    ITEM_SUM = 8,      // SumPart of a channel, or SUM_LIST
    ITEM_FINAL = 9,    // final sums over PEs
    ITEM_RELAY = 10,   // RelayItem for a source that this PE relays
    ITEM_NONE = 11,    // all items are claimed, or the PE aborts
};
template <class... Kinds> constexpr u32 items(Kinds... kinds) { return ((1u << kinds) | ...); }
DEVICE bool has(u32 set, ItemKind kind) { return set >> kind & 1; }

constexpr u32 SOURCES_PER_POLL = 8;  // sources checked per call

// Claims ticket `number` if it is the next.
DEVICE bool claim(u32* tickets, u32 number) { return dev::compare_swap(tickets, number, number + 1); }
DEVICE bool set_item(Block& b, ItemKind kind, u32 index, u32 pe = 0) {
    b.state.item = {kind, index, pe};
    return true;
}
// Claims the next of `end` items that have no dependencies.
DEVICE bool claim_next(Block& b, ItemKind kind, u32* tickets, u32 end) {
    if (dev::load_relaxed(tickets) >= end) return false;
    const u32 number = dev::fetch_add(tickets, 1u);
    return number < end && set_item(b, kind, number);
}

DEVICE bool headers_arrived(Block& b) {
    u32& seen = b.state.headers_seen;
    while (seen < b.l.shape.n_pes && header_arrived(b, seen, IgnoreMissing())) seen++;
    return seen == b.l.shape.n_pes;
}

// Claims the next return item for `source` if its chunk is computed. As with tasks (tasks.h) the block may get a later ticket and hold it
// until that chunk is ready; a block holds at most one.
DEVICE bool find_results(Block& b, u32 source) {
    const Layer& l = b.l;
    const Counters& c = b.counters();
    if (b.state.held_results != NONE) return false;
    const bool intra_node = !returns_inter_node(l, source);
    const u32 each = return_items(l), end = (intra_node ? source_chunks(b, source) : *l.queue.most_results) * each;
    const u32 next = dev::load_relaxed(c.result + source);
    // Inter-node results are sent after this PE's own rows: peers compute with the rows, but need results only at the end.
    if (next >= end || !(intra_node || dev::load_relaxed(c.send) >= send_items(l)) || is_blocked(b, source) ||
        !return_ready(b, source, next / each, true))
        return false;
    // The second block of a CTA pair follows the first into the task loop, where it would not poll a ticket that it holds. The second block
    // therefore claims only an item that is ready.
    if (b.state.is_second_cta && !claim(c.result + source, next)) return false;
    const u32 number = b.state.is_second_cta ? next : dev::fetch_add(c.result + source, 1u);
    if (number >= end) return false;
    if (number / each != next / each && !return_ready(b, source, number / each, false)) {
        b.state.held_results = number;
        b.state.results_source = source;
        return false;
    }
    dev::fetch_add(c.results, 1u);
    return set_item(b, ITEM_RETURN, number, source);
}
DEVICE bool find_held_results(Block& b) {
    const u32 number = b.state.held_results, source = b.state.results_source;
    if (number == NONE || !return_ready(b, source, number / return_items(b.l), false)) return false;
    b.state.held_results = NONE;
    dev::fetch_add(b.counters().results, 1u);
    return set_item(b, ITEM_RETURN, number, source);
}

// Claims an arrived chunk of `source`. If own chunks arrive in two parts, the numbers of the second parts follow those of the first parts.
DEVICE bool find_chunk(Block& b, u32 source, bool layout) {
    const Counters& c = b.counters();
    u32 own = source == b.l.shape.my_pe;
    if (!own && !layout) return false;
    u32 chunks = source_chunks(b, source);
    u32 next = dev::load_relaxed(c.arrival + source), parts = own && layout && own_in_parts(b.step) ? 2 : 1;
    if (next >= parts * chunks || !(own || chunk_arrived(b, source, next, IgnoreMissing())) || !claim(c.arrival + source, next)) return false;
    dev::fetch_add(c.arrivals, 1u);
    return set_item(b, ITEM_ARRIVE, next, source);
}

// One thread. Claims, for the next source that this PE relays, a header or chunk to forward, or a chunk that all PEs of this host have
// consumed.
OUTLINE bool find_relay(Block& b) {
    const Layer& l = b.l;
    const Counters& c = b.counters();
    const u32* served = served_sources(l);
    if (served[0] == 0 || !b.step.receives) return false;
    const u32 source = served[1 + b.state.served];
    b.state.served = b.state.served + 1 == served[0] ? 0 : b.state.served + 1;
    auto set_relay_item = [&](RelayItem what, u32 index) {
        dev::fetch_add(c.relays, 1u);
        return set_item(b, ITEM_RELAY, index << RELAY_BITS | what, source);
    };
    if (b.step.mode != MODE_GRADIENT && dev::load_relaxed(c.header_passed + source) == 0 && header_due(b, source) &&
        header_arrived(b, source, IgnoreMissing()) && claim(c.header_passed + source, 0))
        return set_relay_item(RELAY_HEADER, 0);
    if (!counter_reached(c.layout, 1)) return false;
    const u32 chunks = source_chunks(b, source);
    u32 next = dev::load_relaxed(c.passed + source);
    if (next < chunks && chunk_arrived(b, source, next, IgnoreMissing()) && claim(c.passed + source, next)) return set_relay_item(RELAY_CHUNK, next);
    next = dev::load_relaxed(c.consumed + source);
    return next < consumed_acks_expected(b, chunks) && chunk_consumed(b, source, next, IgnoreMissing()) &&
           claim(c.consumed + source, next) && set_relay_item(RELAY_CONSUMED, next);
}

// Finds an item of `set` other than a task and stores it in State::item.
DEVICE bool find_item(Block& b, u32 set) {
    const Layer& l = b.l;
    const Counters& c = b.counters();
    u32& known = b.state.known;
    if (has(set & ~known, ITEM_OWN)) {
        if (dev::load_relaxed(c.own) == 0 && claim(c.own, 0)) return set_item(b, ITEM_OWN, 0);
        known |= items(ITEM_OWN);
    }
    if (has(set & ~known, ITEM_SEND)) {
        const u32 next = dev::load_relaxed(c.send);
        if (next >= send_items(l)) known |= items(ITEM_SEND);
        else if (send_ready(b, next, IgnoreMissing()) && claim(c.send, next)) return set_item(b, ITEM_SEND, next);
    }
    if (has(set, ITEM_RELAY) && find_relay(b)) return true;
    if (has(set & ~known, ITEM_FINAL)) {
        if (claim_next(b, ITEM_FINAL, c.finals, *l.queue.finals)) return true;
        known |= items(ITEM_FINAL);
    }
    if (!knows(b, KNOWN_OWN, c.own_known)) return false;
    const bool layout = knows(b, KNOWN_LAYOUT, c.layout);
    if (has(set & ~known, ITEM_LAYOUT)) {
        if (dev::load_relaxed(c.headers_read) != 0) known |= items(ITEM_LAYOUT);
        else if (headers_arrived(b) && claim(c.headers_read, 0)) return set_item(b, ITEM_LAYOUT, 0);
    }
    if (layout) {
        if (has(set & ~known, ITEM_ARRIVE) && dev::load_relaxed(c.arrivals) >= *l.queue.arrivals) known |= items(ITEM_ARRIVE);
        if (has(set & ~known, ITEM_RETURN) && dev::load_relaxed(c.results) >= *l.queue.results) known |= items(ITEM_RETURN);
    }
    const bool arrivals = has(set & ~known, ITEM_ARRIVE), results = layout && has(set & ~known, ITEM_RETURN) && b.step.mode != MODE_RECOMPUTE;
    if (results && find_held_results(b)) return true;
    for (u32 i = 0; (arrivals || results) && i < SOURCES_PER_POLL && i < l.shape.n_pes; i++) {
        u32 source = b.state.source;
        b.state.source = source + 1 == l.shape.n_pes ? 0 : source + 1;
        if ((results && find_results(b, source)) || (arrivals && find_chunk(b, source, layout))) return true;
    }
    if (has(set & ~known, ITEM_SHARED)) {
        if (claim_next(b, ITEM_SHARED, c.shared, shared_items(b))) return true;
        known |= items(ITEM_SHARED);
    }
    return false;
}

// One thread. Finds a background item (bias gradients, zeroing, gradient sums) that should run before the weight-gradient GEMMs and
// stores it in State::item.
OUTLINE bool find_background_item(Block& b) {
    const Layer& l = b.l;
    const Counters& c = b.counters();
    if (!has(b.items, ITEM_PLAIN) || !knows(b, KNOWN_LAYOUT, c.layout)) return false;
    if (!has(b.state.known, ITEM_PLAIN)) {
        const u32* end = l.queue.plain_end;
        u32 next = dev::load_relaxed(c.plain);
        if (next < end[PLAIN_BIAS]) {
            const u32 batch = next < end[PLAIN_ZERO] ? NONE : bias_item(b, next - end[PLAIN_ZERO]).batch;
            const bool ready = batch == NONE || counter_reached(c.batch_done + batch, batch_tasks(l, batch));
            if (ready && claim(c.plain, next)) return set_item(b, ITEM_PLAIN, next);
        } else {
            b.state.known |= items(ITEM_PLAIN);
        }
    }
    if (!has(b.items, ITEM_SUM) || dev::load_relaxed(c.results) < *l.queue.results) return false;
    const u32 channels = reduce_shape(l.shape).channels, channel = b.state.channel;
    b.state.channel = channel + 1 == channels ? 0 : channel + 1;
    u32 version, part = ready_part(b, channel, version);
    return part != NONE && claim(&l.sums[channel].version, version) && set_item(b, ITEM_SUM, part, channel);
}

// Whether all items of `set` are claimed; items that other blocks work on may be unfinished. Steps of the gradient sums do not count.
DEVICE bool all_claimed(const Block& b, u32 set) {
    const Layer& l = b.l;
    const Counters& c = b.counters();
    if (has(set, ITEM_FINAL) && dev::load_relaxed(c.finals) < *l.queue.finals) return false;
    if (has(set, ITEM_OWN) && dev::load_relaxed(c.own) == 0) return false;
    if (has(set, ITEM_SEND) && dev::load_relaxed(c.send) < send_items(l)) return false;
    if (has(set, ITEM_LAYOUT) && dev::load_relaxed(c.headers_read) == 0) return false;
    if (has(set, ITEM_SHARED) && dev::load_relaxed(c.shared) < shared_items(b)) return false;
    if ((set & items(ITEM_ARRIVE, ITEM_RETURN, ITEM_TASKS, ITEM_PLAIN)) == 0) return true;
    if (!counter_reached(c.layout, 1)) return false;
    if (has(set, ITEM_PLAIN) && dev::load_relaxed(c.plain) < l.queue.plain_end[PLAIN_BIAS]) return false;
    if (has(set, ITEM_ARRIVE) && dev::load_relaxed(c.arrivals) < *l.queue.arrivals) return false;
    if (has(set, ITEM_RELAY) && dev::load_relaxed(c.relays) < *l.queue.relays) return false;
    if (has(set, ITEM_RETURN) && dev::load_relaxed(c.results) < *l.queue.results) return false;
    for (u32 queue = 0; has(set, ITEM_TASKS) && queue < TASK_QUEUES; queue++)
        if (b.state.held_tasks[queue] != NONE || dev::load_relaxed(c.tasks + queue) < l.queue.tasks[queue][task_entries(l, queue)]) return false;
    return true;
}

// For timeout reports: calls `missing(w, seen)` for the first unmet remote dependency of any item in `set`. False if there is none.
template <class Missing> DEVICE bool report_missing(const Block& b, u32 set, Missing missing) {
    const Layer& l = b.l;
    const Counters& c = b.counters();
    bool any = false;
    auto note = [&](Waiting w, u64 seen) {
        any = true;
        missing(w, seen);
    };
    u32 next = dev::load_relaxed(c.send);
    if (has(set, ITEM_SEND) && next < send_items(l)) (void)send_ready(b, next, note);
    // If the relay already has the header or chunk, reports the relay, which has not forwarded the signal.
    u64* word = nullptr;
    auto note_sent = [&](Waiting w, u64 seen) {
        if (relayed(l, w.pe) && dev::load_relaxed(incoming(l, w.pe, word)) >= w.expected) w.pe = relay_of(l, w.pe);
        note(w, seen);
    };
    if (has(set, ITEM_LAYOUT) && counter_reached(c.own_known, 1) && dev::load_relaxed(c.headers_read) == 0) {
        for (u32 pe = 0; pe < l.shape.n_pes && !any; pe++) {
            word = header_signal(l, header_buffer(b.pass, b.step.mode != MODE_FORWARD), pe);
            (void)header_arrived(b, pe, note_sent);
        }
    }
    if (has(set, ITEM_ARRIVE) && counter_reached(c.layout, 1)) {
        for (u32 pe = 0; pe < l.shape.n_pes && !any; pe++) {
            next = dev::load_relaxed(c.arrival + pe);
            word = chunk_signal(l, pe, next);
            if (pe != l.shape.my_pe && next < source_chunks(b, pe)) (void)chunk_arrived(b, pe, next, note_sent);
        }
        for (u32 pe = 0; l.shape.relays && pe < l.shape.n_pes && !any; pe++) {
            if (!relayed(l, pe)) continue;
            next = dev::load_relaxed(c.consumed + pe);
            if (is_relay_of(l, pe) && next < consumed_acks_expected(b, source_chunks(b, pe))) (void)chunk_consumed(b, pe, next, note);
        }
    }
    if (has(set, ITEM_RETURN) && l.shape.relays && b.step.mode != MODE_RECOMPUTE && counter_reached(c.layout, 1)) {
        for (u32 pe = 0; pe < l.shape.n_pes && !any; pe++) {
            next = dev::load_relaxed(c.result + pe);  // chunk index: with relays a chunk is one item
            if (relayed(l, pe) && next < source_chunks(b, pe)) (void)relay_parts_arrived(b, pe, next, note);
        }
    }
    return any;
}

// ---- Waits for an item. The wait times out if no item is claimed on this PE for the whole limit.
DEVICE u32 count_claimed(const Block& b) {
    const Counters& c = b.counters();
    u32 sum = dev::load_relaxed(c.own) + dev::load_relaxed(c.send) + dev::load_relaxed(c.headers_read) + dev::load_relaxed(c.shared);
    sum += dev::load_relaxed(c.arrivals) + dev::load_relaxed(c.results) + dev::load_relaxed(c.plain) + dev::load_relaxed(c.relays);
    for (u32 queue = 0; queue < TASK_QUEUES; queue++) sum += dev::load_relaxed(c.tasks + queue);
    return sum;
}
// One thread. State::watchdog must be zero when a wait begins. False if the PE aborts, because of this wait or another error.
OUTLINE bool wait_for_item(Block& b, u32 set) {
    const Layer& l = b.l;
    ProgressWatchdog& p = b.state.watchdog;
    dev::pause();
    if (aborted(l)) return false;
    u64 now = dev::nanoseconds();
    if (now - p.last_check < l.shape.wait_limit_ns / 16) return true;
    u32 claimed = count_claimed(b);
    if (p.last_check == 0 || claimed != p.items_claimed) p.last_progress = now;
    p.last_check = now;
    p.items_claimed = claimed;
    if (now - p.last_progress <= l.shape.wait_limit_ns) return true;
    bool peer = report_missing(b, set, [&](Waiting w, u64 seen) { record_error(l, ERROR_TIMEOUT, w, seen); });
    if (peer) return false;
    if (now - p.last_progress <= LOCAL_LIMIT_FACTOR * l.shape.wait_limit_ns) return true;
    record_error(l, ERROR_TIMEOUT, {l.shape.my_pe, WHAT_LOCAL, PHASE_WAITING, claimed + 1, b.step.round}, claimed);
    return false;
}

}  // namespace aristos
