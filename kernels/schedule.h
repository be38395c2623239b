// What a step has to do, and in which order blocks take it.
//
// A block takes one *item* after the other: the layout of the own slots; a send; the layout of the others' slots; the arrival of a chunk; the
// return of one; rows of the shared expert; a task of a GEMM; gradients without one, of biases and zeros; a step of the sums of gradients; and when
// all of these but the last are taken, the final sums over PEs. It begins an item only once nothing is missing that the item needs (items.h), so no block waits inside one for
// a peer or another block, and no multiprocessor is parked while there is something to compute; a block that ends a wave whose places are
// needed again waits for the network to deliver it (dispatch.h, "Waves"). Only the final sums wait, for results of peers: they are the last.
//
// Tasks and results have numbers, which blocks take by an addition, once they see that nothing is missing for the next. Where others were faster a block's
// number is a later one, for which something may be missing: then it keeps it, does other items, and looks at it again whenever it looks for one. It keeps at most one of each
// queue of tasks and one of results, and none beyond a step. The second block of a pair, which follows the first into the tasks and would not look,
// keeps none: it takes results by a comparison.
//
// Tasks come in five queues, each in the order of experts. The first one whose next task has its inputs is taken from: the second GEMM of tiles with
// slots of others, which results wait for; their first GEMM; the same of tiles that hold slots of this PE alone, and of the shared expert, which need
// no peer, and so fill the time in which rows travel; the gradients of weights, which nobody waits for. Before these come the gradients without a
// GEMM, and steps of the sums of gradients, whose time to travel the tasks hide. Such a step is taken if nothing is missing for it and this PE has returned
// all results: the wire is free then. Nobody waits for one: what is left is aristos_all_reduce's.
//
// Why no step can deadlock. Order all items of all PEs by (step, class), with classes own layout < send < layout < arrival < task (first GEMM, second
// GEMM, gradients, with a GEMM and without) < return < final sums. What an item needs comes from items before it in this order: a send of round q needs results of
// round q - 1, or acknowledgements of this round's recomputation, which follow its arrivals, and the credit of a chunk some places before it, whose arrival
// needs that chunk's send; a layout headers; an arrival its chunk and the layout; a task arrivals and earlier GEMMs; a return tasks; a sum returns; the
// barrier at the end of a step all of its own PE's items. A place in a stage (dispatch.h, "Waves") is given back by sends or returns with lower numbers.
// Of the unfinished items take the first, X. If a block does X, X ends, as it needs nothing more. If a block keeps X's number, what it does meanwhile
// ends, and then it begins X. If nobody has X, X is the next of its queue, as items are taken in order there, and a block that is between two items, or will
// be, takes it: blocks do items only for a time, but for sums, and those are taken when nothing else is left to take on this PE, nor kept.
// A step of one PE may have no counterpart at another that has nothing to send or to receive in it: nobody waits for what was
// not announced.
#pragma once
#include "block.h"

namespace aristos {

constexpr u32 SHARED_TILES = 8;      // of one item
constexpr u32 FINAL_TOKENS = 16;     // of one item
constexpr u32 RETURN_ROWS = 32;      // of one item
constexpr u32 BIAS_COLUMNS = 512;    // of one item
constexpr u32 ZERO_ELEMENTS = 1 << 19;  // of one item

DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

DEVICE bool is_shared(const Layer& l, u32 batch) { return batch == l.shape.n_local; }
DEVICE const SlotStore& store_of(const Layer& l, u32 batch) {
    return is_shared(l, batch) ? l.batches.shared : l.batches.routed;
}
DEVICE bool is_gated(const Layer& l, u32 batch) { return is_shared(l, batch) ? l.shape.shared_gated : l.shape.gated; }
DEVICE bool has_bias(const Layer& l, u32 batch) { return is_shared(l, batch) ? l.shape.shared_bias : l.shape.bias; }

// Whether a batch is computed in this step.
DEVICE bool takes_part(const Layer& l, const Step& step, u32 batch) {
    return is_shared(l, batch) ? step.with_shared : step.receives;
}

// ---- Places and tiles of a batch's slots: first those of tiles that are this PE's alone, elsewhere the others.
DEVICE u32 slot_position(const Layer& l, u32 expert, u32 slot) {
    const Batches& b = l.batches;
    return slot < b.own[expert] ? b.own_base[expert] + slot : b.rest_base[expert] + slot - b.own[expert];
}
// Slots of a source in a batch lie one after another, by rank, of every other source the other way round: so where a tile has slots of two, both are
// among the first of theirs to come, or among the last, and no tile waits for the last of one with the first of another.
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
    u32 own = position - b.own_base[expert];  // places of others are above all own ones
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

// Items of PLAIN_BIAS of a batch: columns of the down projection's, then those of what the activation saw.
DEVICE u32 gate_up_columns(const Layer& l, u32 batch) {
    return store_of(l, batch).intermediate * (is_gated(l, batch) ? 2 : 1);
}
DEVICE u32 bias_items(const Layer& l, u32 batch) {
    return ceil_div(l.shape.hidden, BIAS_COLUMNS) + ceil_div(gate_up_columns(l, batch), BIAS_COLUMNS);
}
// Which of a batch's an item is, counted without the zeros.
struct BiasItem { u32 batch, part; };
DEVICE BiasItem bias_item(const Block& b, u32 item) {
    const Layer& l = b.l;
    u32 n = l.shape.n_local, each = bias_items(l, 0), routed = l.shape.bias && b.step.receives ? n * each : 0;
    if (item < routed) return {item / each, item % each};
    return {n, item - routed};
}
// Items of PLAIN_ZERO: for each of three matrices, as many as the largest needs.
DEVICE u32 zero_pieces(const Layer& l) {
    u32 wide = l.shape.intermediate > l.shape.shared_intermediate ? l.shape.intermediate : l.shape.shared_intermediate;
    return u32((u64(wide) * l.shape.hidden + ZERO_ELEMENTS - 1) / ZERO_ELEMENTS);
}
DEVICE u32 zero_items(const Layer& l) { return GRADIENTS * zero_pieces(l); }

// Tile `index` of `down` x `across`: `group` rows of tiles at a time, so that what they share of both operands stays in L2. Fewer where rows still
// come, as a tile's results are complete only when its whole group is: three, since with two all multiprocessors of an H100 together would read weights
// at about the rate of its memory (256 FLOP a byte).
constexpr u32 TILE_GROUP = 8, REST_TILE_GROUP = 3;
DEVICE void tile_at(u32 index, u32 down, u32 across, u32 group, u32& m, u32& n) {
    u32 first = index / (group * across) * group, in = index % (group * across);
    u32 rows = down - first < group ? down - first : group;
    n = in / rows;
    m = first + in % rows;
}

// Entries of a queue of tasks.
DEVICE u32 task_entries(const Layer& l, u32 queue) {
    u32 n = l.shape.n_local;
    return queue == GRADIENT_TASKS ? GRADIENTS * (n + 1) : queue >= OWN_SECOND ? n + 1 : n;
}
DEVICE bool of_first_gemm(u32 queue) { return queue == REST_FIRST || queue == OWN_FIRST; }
// Row tiles of a batch's tasks in a queue of the first or the second GEMM.
DEVICE u32 queue_tiles(const Layer& l, u32 queue, u32 batch) {
    const Batches& b = l.batches;
    return ceil_div(queue >= OWN_SECOND ? b.own[batch] : b.total[batch] - b.own[batch], l.shape.tile_m);
}

// Rounds that this PE takes part in; with barriers between classes everyone does in all.
DEVICE u32 pass_rounds(const Layer& l) {
    u32 rounds = l.shape.bulk ? *l.received.world_rounds : *l.received.my_rounds;
    return rounds > 1 ? rounds : 1;
}

DEVICE bool last_round(const Block& b) { return b.step.round + 1 == pass_rounds(b.l); }
// Whether experts' gradients are complete at the end of this step, and others hold some too.
DEVICE bool sums_gradients(const Block& b) {
    return b.l.shape.summed && !b.l.shape.bulk && b.step.mode == MODE_GRADIENT && last_round(b);
}

// Whether own chunks arrive in two parts: what has its place before the headers are known, and what then gets one.
DEVICE bool own_in_parts(const Step& step) { return step.mode != MODE_GRADIENT; }

// Tasks of the first GEMM in backward, which leave what the gradients are made of.
DEVICE u32 batch_tasks(const Layer& l, u32 batch) { return tiles_down(l, BACKWARD_DOWN, batch) * tiles_across(l, BACKWARD_DOWN, batch); }
// Tasks and items of a routed batch's gradients in this step.
DEVICE u32 gradient_items(const Block& b, u32 batch) {
    const Layer& l = b.l;
    const u32* tasks = l.queue.tasks[GRADIENT_TASKS] + GRADIENTS * batch;
    u32 count = tasks[GRADIENTS] - tasks[0];
    if (l.shape.bias && b.step.receives) count += bias_items(l, batch);
    if (b.step.round == 0 && takes_part(l, b.step, batch) && l.batches.total[batch] == 0) count += zero_items(l);
    return count;
}

// Items of a chunk of results; where it is made of several PEs' parts, one.
DEVICE u32 return_items(const Layer& l) { return l.shape.relays ? 1 : ceil_div(l.shape.chunk_rows, RETURN_ROWS); }

// Whether a header of `source` is due in this step.
DEVICE bool header_due(const Block& b, u32 source) {
    if (source == b.l.shape.my_pe) return false;
    if (b.step.mode == MODE_FORWARD && b.step.round == 0) return true;
    return b.l.received.rounds[source] > b.step.round;
}

// With relays: how many of a source's chunks in this step its home wants to know to be emptied by all: those that have one more for their place, or, as
// rows that are sent again have no results, all.
DEVICE u32 consumed_acks_expected(const Block& b, u32 chunks) {
    if (b.step.mode == MODE_RECOMPUTE) return chunks;
    return chunks > b.l.shape.window_chunks ? chunks - b.l.shape.window_chunks : 0;
}

// ---- What makes the queues: all threads of a block.
template <class Count> DEVICE void fill_tasks(Block& b, u32 queue, Count count) {
    u32* tasks = b.l.queue.tasks[queue];
    u32 entries = task_entries(b.l, queue);
    u32 total = scan_block(b, entries, count, [&](u32 i, u32 sum) { tasks[i] = sum; });
    if (dev::thread() == 0) tasks[entries] = total;
}
// The first GEMM's and the second's; own, total of the batches are there.
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

// All but the queues of the own tiles.
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
    u32 chunks = 0, intra_node = 0, most = 0;  // near: of sources that results reach without a wave
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
        const u32 come = in.end_chunk[source] - in.first_chunk[source];
        relays += (mode != MODE_GRADIENT && header_due(b, source)) + come + consumed_acks_expected(b, come);
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
