// The queues of a step: which block takes what, and when.
//
// Items of communication are taken in the order of their classes, GEMM tasks in the order of `Queue`'s entries. The batches'
// tiles come as segments: first the tiles that hold own slots only, of every expert, since they need not wait for a peer; then
// the other tiles of every expert; then the shared expert, which only this PE waits for. A segment's second GEMM follows
// its first at a lag of at least as many tasks as there are blocks, so that it finds its inputs done; weight gradients, which
// nobody waits for at all, are last.
//
// Why no step can deadlock. Order all items of all PEs by (step, class), with classes send < layout < arrive < GEMM (in queue
// order) < return < final sum < the rest. Every wait is for items before the waiting one in this order: a send of round q for
// results of round q - 1, or for the acknowledgements of this round's recomputation, which follow its arrivals, a layout for
// headers, an arrival for its chunk and the layout, a GEMM for arrivals and earlier GEMMs, a return for GEMMs, a final sum for
// returns; the barrier at the end of a step is after all of its own PE's items. Of the unfinished items take the first, X; all
// items before it are done. If a block holds X, nothing that X waits for is missing, and X ends. If nobody holds X, X is in a
// queue whose earlier items are all done, and some block takes it next: communication is taken first by the first
// `comm_blocks` blocks (at least one), and GEMM tasks by the others (at least one); a block of either kind holds nothing of
// the other queue before its own is exhausted, but for sends, which are before everything. All blocks are resident, so that
// block runs. (A Hopper block asks for one GEMM task while it still computes another: the former waits in a warp of its own.)
// A step of one PE may have no counterpart at another that has nothing to send or to receive in it: nobody waits for what was
// not announced.
#pragma once
#include "block.h"

namespace aristos {

enum CommClass : u32 {
    CLASS_LAYOUT = 0,
    CLASS_ARRIVE = 1,  // (source, chunk)
    CLASS_SHARED = 2,  // the shared expert's rows
    CLASS_RETURN = 3,  // (source, chunk)
    CLASS_FINAL = 4,   // some tokens
    CLASS_BIAS = 5,    // gradients of biases: (batch, some columns)
    CLASS_ZERO = 6,    // gradients of experts without slots: (batch, matrix, some elements)
};

constexpr u32 SHARED_TILES = 8;      // of one item
constexpr u32 FINAL_TOKENS = 16;     // of one item
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

// Items of CLASS_BIAS of a batch: columns of the down projection's, then those of what the activation saw.
DEVICE u32 gu_columns(const Layer& l, u32 batch) {
    return store_of(l, batch).intermediate * (is_gated(l, batch) ? 2 : 1);
}
DEVICE u32 bias_items(const Layer& l, u32 batch) {
    return ceil_div(l.shape.hidden, BIAS_COLUMNS) + ceil_div(gu_columns(l, batch), BIAS_COLUMNS);
}
// Items of CLASS_ZERO: for each of three matrices, as many as the largest needs.
DEVICE u32 zero_pieces(const Layer& l) {
    u32 wide = l.shape.intermediate > l.shape.shared_intermediate ? l.shape.intermediate : l.shape.shared_intermediate;
    return u32((u64(wide) * l.shape.hidden + ZERO_ELEMENTS - 1) / ZERO_ELEMENTS);
}
DEVICE u32 zero_items(const Layer& l) { return GRAD_ENTRIES * zero_pieces(l); }

struct Segment { u32 batch, first, tiles; };
DEVICE Segment segment(const Layer& l, const Step& step, u32 index) {
    u32 n = l.shape.n_local;
    u32 batch = index < n ? index : index < 2 * n ? index - n : n;
    if (!takes_part(l, step, batch)) return {batch, 0, 0};
    u32 tiles = ceil_div(l.batches.total[batch], l.shape.tile_m);
    if (index == 2 * n) return {batch, 0, tiles};
    u32 own = l.batches.own[batch] / l.shape.tile_m;
    return index < n ? Segment{batch, 0, own} : Segment{batch, own, tiles - own};
}

// Tile `index` of `down` x `across`: a few rows of tiles at a time, so that what they share of both operands stays in L2.
DEVICE void tile_at(u32 index, u32 down, u32 across, u32& m, u32& n) {
    constexpr u32 GROUP = 8;
    u32 group = index / (GROUP * across), in = index % (GROUP * across);
    u32 rows = down - group * GROUP < GROUP ? down - group * GROUP : GROUP;
    n = in / rows;
    m = group * GROUP + in % rows;
}

// ---- Entries of the queue.
constexpr u32 ENTRY_SECOND = 1u << 28, ENTRY_GRAD = 2u << 28, ENTRY_INDEX = ENTRY_SECOND - 1;

// How many of the ascending values get(0..n) are below `limit`.
template <class Get> DEVICE u32 count_below(u32 n, u32 limit, Get get) {
    u32 low = 0, high = n;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (get(middle) < limit) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Rounds that this PE takes part in; with barriers between classes everyone does in all.
DEVICE u32 pass_rounds(const Layer& l) {
    u32 rounds = l.shape.bulk ? *l.received.world_rounds : *l.received.my_rounds;
    return rounds > 1 ? rounds : 1;
}

// All threads of the block that makes the layout; total, own and tile of the batches are there.
DEVICE void build_queue(Block& b) {
    const Layer& l = b.l;
    const Queue& q = l.queue;
    u32 segments = l.sizes.segments, mode = b.step.mode;
    u32* first = q.segment_prefix;
    u32* second = first + segments + 1;
    u32 first_total = scan_block(b, segments,
        [&](u32 s) { Segment g = segment(l, b.step, s); return g.tiles * tiles_across(l, first_kind(mode), g.batch); },
        [&](u32 s, u32 sum) { first[s] = sum; });
    u32 second_total = scan_block(b, segments,
        [&](u32 s) {
            Segment g = segment(l, b.step, s);
            return mode == MODE_RECOMPUTE ? 0 : g.tiles * tiles_across(l, second_kind(mode), g.batch);
        },
        [&](u32 s, u32 sum) { second[s] = sum; });
    if (dev::thread() == 0) {
        first[segments] = first_total;
        second[segments] = second_total;
    }
    dev::sync_block();
    // A merge of two ascending lists: the second GEMM of j comes before the first of i if first[i] >= first[j + 1] + lag.
    u32 lag = l.shape.blocks;
    for (u32 s = dev::thread(); s < segments; s += dev::threads()) {
        u32 before = first[s] < lag ? 0 : count_below(s, first[s] - lag + 1, [&](u32 j) { return first[j + 1]; });
        q.entry_ticket[s + before] = first[s] + second[before];
        q.entry_what[s + before] = s;
        before = count_below(segments, first[s + 1] + lag, [&](u32 i) { return first[i]; });
        q.entry_ticket[s + before] = first[before] + second[s];
        q.entry_what[s + before] = ENTRY_SECOND | s;
    }
    u32 grads = GRAD_ENTRIES * (l.shape.n_local + 1), begin = first_total + second_total;
    u32 grad_total = scan_block(b, grads,
        [&](u32 i) {
            u32 batch = i / GRAD_ENTRIES, which = i % GRAD_ENTRIES;
            if (mode != MODE_GRADIENT || !takes_part(l, b.step, batch) || l.batches.total[batch] == 0) return 0u;
            if (which == 0 && !is_gated(l, batch)) return 0u;
            u32 kind = which == 2 ? GRAD_DOWN : GRAD_UP;
            return tiles_down(l, kind, batch) * tiles_across(l, kind, batch);
        },
        [&](u32 i, u32 sum) {
            q.entry_ticket[2 * segments + i] = begin + sum;
            q.entry_what[2 * segments + i] = ENTRY_GRAD | i;
        });
    u32 empty = 0;
    if (mode == MODE_GRADIENT && b.step.round == 0) {
        empty = scan_block(b, l.shape.n_local + 1,
            [&](u32 batch) { return u32(takes_part(l, b.step, batch) && l.batches.total[batch] == 0); },
            [&](u32 batch, u32 sum) {
                if (takes_part(l, b.step, batch) && l.batches.total[batch] == 0) q.empty[sum] = batch;
            });
    }
    // Chunks of the source that sent the most.
    u32 chunks = 0;
    if (b.step.receives) {
        for (u32 s = dev::lane(); s < l.shape.n_pes; s += 32) {
            u32 count = l.received.end_chunk[s] - l.received.first_chunk[s];
            chunks = count > chunks ? count : chunks;
        }
        for (u32 d = 16; d > 0; d /= 2) {
            u32 other = dev::shfl_xor(chunks, int(d));
            chunks = other > chunks ? other : chunks;
        }
    }
    if (dev::thread() == 0) {
        q.entry_ticket[l.sizes.max_entries] = begin + grad_total;
        bool last = mode != MODE_RECOMPUTE && b.step.round + 1 == pass_rounds(l);
        u32 tokens = b.pass.tokens, n = l.shape.n_local, end = 0;
        q.comm_end[CLASS_LAYOUT] = end += 1;
        q.comm_end[CLASS_ARRIVE] = end += chunks * l.shape.n_pes;
        q.comm_end[CLASS_SHARED] =
            end += b.step.with_shared ? ceil_div(tokens, l.shape.tile_m * SHARED_TILES) : 0;
        q.comm_end[CLASS_RETURN] = end += mode == MODE_RECOMPUTE ? 0 : chunks * l.shape.n_pes;
        q.comm_end[CLASS_FINAL] = end += last ? ceil_div(tokens, FINAL_TOKENS) : 0;
        if (mode == MODE_GRADIENT) {
            if (l.shape.bias && b.step.receives) end += n * bias_items(l, 0);
            if (l.shape.shared_bias && b.step.with_shared) end += bias_items(l, n);
        }
        q.comm_end[CLASS_BIAS] = end;
        q.comm_end[CLASS_ZERO] = end += empty * zero_items(l);
    }
    dev::sync_block();
}

}  // namespace aristos
