// The work of a step and the order in which blocks do it.
//
// A block processes one *item* after the other: the layout of the own slots, a send, the layout of the other PEs' slots, the arrival or
// the return of a chunk, rows of the shared expert, a GEMM task, gradients without a GEMM (biases and zeros), or a step of the gradient
// sums. After all of these come the final sums over PEs. A block starts an item only when its dependencies are met (items.h). No block
// therefore waits for a peer or for another block inside an item, and no SM idles while there is work. There are two exceptions: a block
// that completes a send group whose staging slots are needed again waits for its delivery (dispatch.h, "Send groups"), and the final
// sums, which come last, wait for the results of peers.
//
// Blocks claim tasks and results by an atomic add that returns a ticket, once the next one is ready. A block that loses the race gets a
// later ticket. If that one is not ready, the block holds the ticket, runs other items and checks the ticket at every poll. Each block
// holds at most one ticket per task queue and one for results, and none beyond a step. The second block of a CTA pair follows the first
// into the task loop, where it would not poll, so it holds none: it claims results by compare-and-swap.
//
// Tasks are in five queues, each in the order of experts. A block takes the next task of the first queue whose next task is ready: (1) the
// second GEMM of tiles with other PEs' slots, on which results depend, (2) their first GEMM, (3, 4) likewise for tiles that hold own slots
// alone and for the shared expert, which need no peer and fill the time while rows are in flight, and (5) weight gradients. Before weight
// gradients come the gradients without a GEMM and steps of the gradient sums, so that the tasks hide their transfers. A step of the sums
// runs when its dependencies are met and this PE has returned all results, so that the network is free. aristos_all_reduce does the
// remaining steps.
//
// Deadlock freedom. Order all items of all PEs by (step, class), with own layout < send < layout < arrival < task (first GEMM, second
// GEMM, gradients) < return < final sums. Every item depends only on earlier items in this order:
// - a send of round q: on results of round q - 1, or on acknowledgements of this round's recomputation, which follow its arrivals; and on
//   the credit of an earlier chunk of the same window, i.e. on that chunk's arrival and send
// - a layout: on headers
// - an arrival: on its chunk and the layout
// - a task: on arrivals and earlier GEMMs
// - a return: on tasks
// - a final sum: on returns
// - the barrier at the end of a step: on all items of its own PE
//
// Staging slots (dispatch.h, "Send groups") are freed by sends or returns with lower numbers.
//
// Let X be the first unfinished item. If a block runs X, X finishes, since its dependencies are met. If a block holds X's ticket, the
// block's current item finishes, and then the block runs X. Otherwise X is next in its queue, since items are claimed in order. In that
// case a block that is between two items, or will be, claims X: every item takes finite time except final sums, and a block claims a final
// sum only when this PE neither has another item to claim nor holds one.
//
// A PE may skip a step in which it neither sends nor receives; peers wait only for data that was announced to them.
#pragma once
#include "block.h"

namespace aristos {

constexpr u32 SHARED_TILES = 8;      // per item
constexpr u32 FINAL_TOKENS = 16;     // per item
constexpr u32 RETURN_ROWS = 32;      // per item
constexpr u32 BIAS_COLUMNS = 512;    // per item
constexpr u32 ZERO_ELEMENTS = 1 << 19;  // per item

DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

DEVICE bool is_shared(const Layer& l, u32 batch) { return batch == l.shape.n_local; }
DEVICE const SlotStore& store_of(const Layer& l, u32 batch) {
    return is_shared(l, batch) ? l.batches.shared : l.batches.routed;
}
DEVICE bool is_gated(const Layer& l, u32 batch) { return is_shared(l, batch) ? l.shape.shared_gated : l.shape.gated; }
DEVICE bool has_bias(const Layer& l, u32 batch) { return is_shared(l, batch) ? l.shape.shared_bias : l.shape.bias; }

// Whether the step computes a batch.
DEVICE bool takes_part(const Layer& l, const Step& step, u32 batch) {
    return is_shared(l, batch) ? step.with_shared : step.receives;
}

// ---- Positions and tiles of a batch's slots: tiles of own slots alone come first in the store, the others lie elsewhere.
DEVICE u32 slot_position(const Layer& l, u32 expert, u32 slot) {
    const Batches& b = l.batches;
    return slot < b.own[expert] ? b.own_base[expert] + slot : b.rest_base[expert] + slot - b.own[expert];
}
// Slots of a source in a batch are in the order of ranks, reversed for every other source. A tile with slots of two sources then has the
// first slots of both or the last slots of both. No tile with the first slots of one source therefore waits for the last slots of another.
DEVICE bool is_reversed(const Layer& l, u32 source) {
    u32 distance = source < l.shape.my_pe ? source + l.shape.n_pes - l.shape.my_pe : source - l.shape.my_pe;
    return distance > 0 && distance % 2 == 0;
}
DEVICE u32 batch_slot(const Layer& l, u32 source, u32 expert, u32 rank) {
    const u64 at = u64(source) * l.shape.n_local + expert;
    return l.received.first[at] + (is_reversed(l, source) ? l.received.counts[at] - 1 - rank : rank);
}
DEVICE u32 tile_of(const Layer& l, u32 expert, u32 position) {
    const Batches& b = l.batches;
    u32 own = position - b.own_base[expert];  // positions of other slots are above all own ones
    return own < b.own[expert] ? b.own_tile[expert] + own / l.shape.tile_m
                               : b.rest_tile[expert] + (position - b.rest_base[expert]) / l.shape.tile_m;
}

// ---- Tasks of a batch.
DEVICE u32 first_kind(u32 mode) { return mode == MODE_GRADIENT ? BACKWARD_DOWN : FORWARD_UP; }
DEVICE u32 second_kind(u32 mode) { return mode == MODE_GRADIENT ? BACKWARD_UP : FORWARD_DOWN; }
DEVICE u32 tiles_across(const Layer& l, u32 kind, u32 batch) {
    u32 columns = tile_columns(kind, is_gated(l, batch), l.shape.tile_n);
    bool over_hidden = kind == FORWARD_DOWN || kind == BACKWARD_UP || kind == GRAD_UP;
    return ceil_div(over_hidden ? l.shape.hidden : store_of(l, batch).intermediate, columns);
}
DEVICE u32 tiles_down(const Layer& l, u32 kind, u32 batch) {
    u32 rows = kind == GRAD_UP     ? store_of(l, batch).intermediate
               : kind == GRAD_DOWN ? l.shape.hidden
                                   : l.batches.total[batch];
    return ceil_div(rows, l.shape.tile_m);
}

// PLAIN_BIAS items of a batch: first columns of the down projection's bias, then of the gate and up biases.
DEVICE u32 gate_up_columns(const Layer& l, u32 batch) {
    return store_of(l, batch).intermediate * (is_gated(l, batch) ? 2 : 1);
}
DEVICE u32 bias_items(const Layer& l, u32 batch) {
    return ceil_div(l.shape.hidden, BIAS_COLUMNS) + ceil_div(gate_up_columns(l, batch), BIAS_COLUMNS);
}
// Batch and part of a bias item, numbered without the zero items.
struct BiasItem { u32 batch, part; };
DEVICE BiasItem bias_item(const Block& b, u32 item) {
    const Layer& l = b.l;
    u32 n = l.shape.n_local, each = bias_items(l, 0), routed = l.shape.bias && b.step.receives ? n * each : 0;
    if (item < routed) return {item / each, item % each};
    return {n, item - routed};
}
// PLAIN_ZERO items: each of three matrices has as many as the largest needs.
DEVICE u32 zero_pieces(const Layer& l) {
    u32 wide = l.shape.intermediate > l.shape.shared_intermediate ? l.shape.intermediate : l.shape.shared_intermediate;
    return u32((u64(wide) * l.shape.hidden + ZERO_ELEMENTS - 1) / ZERO_ELEMENTS);
}
DEVICE u32 zero_items(const Layer& l) { return GRADIENTS * zero_pieces(l); }

// Position of tile `index` in a grid of `down` x `across` tiles. Tiles are visited `group` rows at a time, so that shared operands stay in
// L2. Where rows are still arriving the group is smaller, because a tile's results are complete only when its whole group is. The smaller
// group has three rows: with two, all SMs of an H100 together would read weights at about its memory bandwidth (256 FLOP per byte).
constexpr u32 TILE_GROUP = 8, REST_TILE_GROUP = 3;
DEVICE void tile_at(u32 index, u32 down, u32 across, u32 group, u32& m, u32& n) {
    u32 first = index / (group * across) * group, in = index % (group * across);
    u32 rows = down - first < group ? down - first : group;
    n = in / rows;
    m = first + in % rows;
}

DEVICE u32 task_entries(const Layer& l, u32 queue) {
    u32 n = l.shape.n_local;
    return queue == GRADIENT_TASKS ? GRADIENTS * (n + 1) : queue >= OWN_SECOND ? n + 1 : n;
}
DEVICE bool of_first_gemm(u32 queue) { return queue == REST_FIRST || queue == OWN_FIRST; }
// Row tiles of a batch in a queue of first or second GEMMs.
DEVICE u32 queue_tiles(const Layer& l, u32 queue, u32 batch) {
    const Batches& b = l.batches;
    return ceil_div(queue >= OWN_SECOND ? b.own[batch] : b.total[batch] - b.own[batch], l.shape.tile_m);
}

// Rounds that this PE takes part in. In bulk mode all PEs take part in all rounds, because of the barriers.
DEVICE u32 pass_rounds(const Layer& l) {
    u32 rounds = l.shape.bulk ? *l.received.world_rounds : *l.received.my_rounds;
    return rounds > 1 ? rounds : 1;
}

DEVICE bool last_round(const Block& b) { return b.step.round + 1 == pass_rounds(b.l); }
// Whether experts' gradients are complete at the end of this step and other PEs hold some of these experts.
DEVICE bool sums_gradients(const Block& b) {
    return b.l.shape.summed && !b.l.shape.bulk && b.step.mode == MODE_GRADIENT && last_round(b);
}

// Whether own chunks arrive in two parts: slots that get positions before the headers are known, and the rest.
DEVICE bool own_in_parts(const Step& step) { return step.mode != MODE_GRADIENT; }

// Tasks of backward's first GEMM, which produces the operands of the gradients.
DEVICE u32 batch_tasks(const Layer& l, u32 batch) { return tiles_down(l, BACKWARD_DOWN, batch) * tiles_across(l, BACKWARD_DOWN, batch); }
// Number of tasks and items for a routed batch's gradients in this step.
DEVICE u32 gradient_items(const Block& b, u32 batch) {
    const Layer& l = b.l;
    const u32* tasks = l.queue.tasks[GRADIENT_TASKS] + GRADIENTS * batch;
    u32 count = tasks[GRADIENTS] - tasks[0];
    if (l.shape.bias && b.step.receives) count += bias_items(l, batch);
    if (b.step.round == 0 && takes_part(l, b.step, batch) && l.batches.total[batch] == 0) count += zero_items(l);
    return count;
}

// Return items per result chunk; one if a chunk is the sum of several PEs' partial results.
DEVICE u32 return_items(const Layer& l) { return l.shape.relays ? 1 : ceil_div(l.shape.chunk_rows, RETURN_ROWS); }

// Whether a header of `source` is due in this step.
DEVICE bool header_due(const Block& b, u32 source) {
    if (source == b.l.shape.my_pe) return false;
    if (b.step.mode == MODE_FORWARD && b.step.round == 0) return true;
    return b.l.received.rounds[source] > b.step.round;
}

// With relays: number of a source's chunks in this step whose consumption the members report to the relay. In recomputation these are all
// chunks, because there are no results that acknowledge them; otherwise those whose buffer is used again.
DEVICE u32 consumed_acks_expected(const Block& b, u32 chunks) {
    if (b.step.mode == MODE_RECOMPUTE) return chunks;
    return chunks > b.l.shape.window_chunks ? chunks - b.l.shape.window_chunks : 0;
}

// ---- Filling the queues: all threads of a block.
template <class Count> DEVICE void fill_tasks(Block& b, u32 queue, Count count) {
    u32* tasks = b.l.queue.tasks[queue];
    u32 entries = task_entries(b.l, queue);
    u32 total = scan_block(b, entries, count, [&](u32 i, u32 sum) { tasks[i] = sum; });
    if (dev::thread() == 0) tasks[entries] = total;
}
// Queues of the first and the second GEMM; the batches' `own` and `total` are set.
DEVICE void fill_gemms(Block& b, u32 first, u32 second) {
    const Layer& l = b.l;
    auto fill = [&](u32 queue, u32 kind, bool none) {
        fill_tasks(b, queue, [&](u32 batch) {
            return none || !takes_part(l, b.step, batch) ? 0u : queue_tiles(l, queue, batch) * tiles_across(l, kind, batch);
        });
    };
    fill(first, first_kind(b.step.mode), false);
    fill(second, second_kind(b.step.mode), b.step.mode == MODE_RECOMPUTE);
}

// All queues except those of the own tiles.
DEVICE void fill_queues(Block& b) {
    const Layer& l = b.l;
    const Queue& q = l.queue;
    const Received& in = l.received;
    u32 mode = b.step.mode, n = l.shape.n_local;
    fill_gemms(b, REST_FIRST, REST_SECOND);
    fill_tasks(b, GRADIENT_TASKS, [&](u32 i) {
        u32 batch = i / GRADIENTS, which = i % GRADIENTS;
        if (mode != MODE_GRADIENT || !takes_part(l, b.step, batch) || l.batches.total[batch] == 0) return 0u;
        if (which == 0 && !is_gated(l, batch)) return 0u;
        u32 kind = which == 2 ? GRAD_DOWN : GRAD_UP;
        return tiles_down(l, kind, batch) * tiles_across(l, kind, batch);
    });
    u32 empty = 0;
    if (mode == MODE_GRADIENT && b.step.round == 0) {
        empty = scan_block(b, n + 1,
            [&](u32 batch) { return u32(takes_part(l, b.step, batch) && l.batches.total[batch] == 0); },
            [&](u32 batch, u32 sum) {
                if (takes_part(l, b.step, batch) && l.batches.total[batch] == 0) q.empty[sum] = batch;
            });
    }
    u32 chunks = 0, intra_node = 0, most = 0;  // intra_node: chunks of sources whose results need no send group
    if (b.step.receives) {
        for (u32 s = dev::lane(); s < l.shape.n_pes; s += 32) {
            u32 count = in.end_chunk[s] - in.first_chunk[s];
            chunks += count;
            const bool inter_node = returns_inter_node(l, s);
            if (!inter_node) intra_node += count;
            else most = count > most ? count : most;
        }
        UNROLL for (int d = 16; d > 0; d /= 2) {
            chunks += dev::shfl_xor(chunks, d);
            intra_node += dev::shfl_xor(intra_node, d);
            u32 other = dev::shfl_xor(most, d);
            most = other > most ? other : most;
        }
    }
    u32 relays = 0;
    for (u32 i = 0; l.shape.relays && b.step.receives && i < served_sources(l)[0]; i++) {
        const u32 source = served_sources(l)[1 + i];
        const u32 arriving = in.end_chunk[source] - in.first_chunk[source];
        relays += (mode != MODE_GRADIENT && header_due(b, source)) + arriving + consumed_acks_expected(b, arriving);
    }
    if (dev::thread() == 0) {
        *q.relays = relays;
        u32 me = l.shape.my_pe, own = b.step.receives && own_in_parts(b.step) ? in.end_chunk[me] - in.first_chunk[me] : 0;
        u32 zeros = empty * zero_items(l), biases = 0;
        *q.arrivals = chunks + own;
        *q.results = mode == MODE_RECOMPUTE ? 0 : (intra_node + l.tables.inter_node_returns[0] * most) * return_items(l);
        *q.most_results = mode == MODE_RECOMPUTE ? 0 : most;
        if (mode == MODE_GRADIENT) {
            if (l.shape.bias && b.step.receives) biases += n * bias_items(l, 0);
            if (l.shape.shared_bias && b.step.with_shared) biases += bias_items(l, n);
        }
        q.plain_end[PLAIN_ZERO] = zeros;
        q.plain_end[PLAIN_BIAS] = zeros + biases;
        *q.finals = mode != MODE_RECOMPUTE && last_round(b) ? ceil_div(b.pass.tokens, FINAL_TOKENS) : 0;
    }
    dev::sync_block();
}
DEVICE u32 shared_items(const Block& b) {
    return b.step.with_shared ? ceil_div(b.pass.tokens, b.l.shape.tile_m * SHARED_TILES) : 0;
}

}  // namespace aristos
