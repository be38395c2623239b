// aristos_plan: computes from the chosen experts the capacity limit and each destination's rows, slots, ranks, chunks and rounds. The
// results are those of `routes` (src/moe/cpu/router.rs) and `apply_capacity` (src/moe/cpu/layer.rs).
//
// Rows to a PE are ordered by (first of their experts there, token), results of a round by (last of these experts, row), as in
// src/moe/cpu/engine. Tokens are divided into segments of PLAN_TOKENS, one thread per token, and the rows of a PE's round into segments
// of the same size. Positions follow from the counts of earlier segments, so they do not depend on the order of blocks. A pair is a
// (token, expert) choice.
//   count    pairs of each expert in each segment, and each pair's rank in its segment, where needed
//   limit    with a capacity factor: PEs of the world exchange their counts to find the pairs that are kept
//   assign   each kept pair's physical expert; with replicas, by the pair's rank
//   heads    per physical expert and segment: the rows whose first expert it is, and their slots
//   rows     position of every row; one round if the windows hold everything, otherwise chunks are divided into rounds
//   slots    position of every slot; per local expert and row segment: slots, and the rows whose last expert it is
//   order    each slot's rank, each row's number in return order
#pragma once
#include "route_math.h"
#include "world.h"

namespace aristos {

// The kernel's state: shared memory, scratch memory, and frequently used arguments.
struct Planner {
    const Layer& layer;
    const LayerShape& s;
    u32 tokens, segments;
    u32 *work;                      // masks of tokens or rows, or sums by local expert
    const u32* first_physical;         // [n_pes + 1]: first physical expert of each PE
    u32 *first_row;                 // [n_pes]: rows of lower PEs
    u32 *rows, *slots;              // [n_pes]: over all segments
    u32 *slot_base, *chunk_base;    // [n_pes]: of lower PEs
    u32 *experts_before;            // [held]: by expert, pairs of earlier segments; later by physical expert, rows of lower ones
    u32 *allowed;                   // [held]: by expert, pairs of this PE that are kept; later by physical expert, slots of lower ones
    u32 *total;                     // [2]: pairs of all PEs, the low 20 bits and the rest; [8]: sums of warps
    u32 *histogram, *heads, *pair_physical, *pair_slots, *pair_before, *row_slots, *tails, *chunk_slots;
    u64 *barrier;

    DEVICE Planner(const Layer& l, const Pass& pass) : layer(l), s(l.shape), tokens(pass.tokens) {
        segments = div_up(tokens, PLAN_TOKENS);
        work = reinterpret_cast<u32*>(dev::shared());
        first_physical = l.tables.first_physical;
        first_row = work + plan_work_words(s);
        rows = first_row + s.n_pes;
        slots = rows + s.n_pes;
        slot_base = slots + s.n_pes;
        chunk_base = slot_base + s.n_pes;
        experts_before = chunk_base + s.n_pes;
        allowed = experts_before + s.held;
        total = allowed + s.held;
        const PlanScratch at = plan_scratch(s);
        u8* scratch = l.plan.scratch;
        auto words = [&](u64 offset) { return reinterpret_cast<u32*>(scratch + offset); };
        histogram = words(at.histogram);
        heads = words(at.heads);
        pair_physical = words(at.pair_physical);
        pair_slots = words(at.pair_slots);
        pair_before = words(at.pair_before);
        row_slots = words(at.row_slots);
        tails = words(at.tails);
        chunk_slots = words(at.chunk_slots);
        barrier = reinterpret_cast<u64*>(scratch + at.barrier);
    }
    DEVICE bool limited() const { return s.capacity_factor > 0.0; }
    // Whether ranks among all of this PE's pairs of an expert are needed.
    DEVICE bool ranked() const { return limited() || has_replicas(s); }
    // The PE that computes a pair, or NONE if it is dropped.
    DEVICE u32 pe_of(u64 pair) const { return pair_physical[pair] == NONE ? NONE : layer.tables.physical_pe[pair_physical[pair]]; }
    DEVICE u32 grid_thread() const { return dev::block() * PLAN_TOKENS + dev::thread(); }
    DEVICE u32 grid_threads() const { return dev::blocks() * PLAN_TOKENS; }
};

// Barrier of all blocks. False if aborted.
DEVICE bool plan_barrier(const Planner& p) {
    dev::sync_block();
    bool ok = true;
    if (dev::thread() == 0) {
        const u64 blocks = dev::blocks();
        dev::fence_gpu();
        const u64 before = dev::fetch_add(p.barrier, u64(1));
        const Waiting w{p.s.my_pe, WHAT_LOCAL, PHASE_ROUTER, (before / blocks + 1) * blocks, dev::block()};
        ok = wait_until(p.layer, w, [&](u64& seen) {
            seen = dev::load_acquire(p.barrier);
            return seen >= w.expected;
        });
        dev::fence_gpu();
    }
    return !dev::sync_block_or(!ok);
}

// ---- Masks: one bit per token or row of a segment, one mask per expert.
DEVICE void clear_masks(const Planner& p, u32 n) {
    for (u32 i = dev::thread(); i < n * PLAN_MASK_STRIDE; i += PLAN_TOKENS) p.work[i] = 0;
    dev::sync_block();
}
DEVICE void mark(const Planner& p, u32 e) {
    dev::shared_add(&p.work[e * PLAN_MASK_STRIDE + dev::thread() / 32], 1u << dev::thread() % 32);
}
// The bits of word `w` below this thread's bit.
DEVICE u32 below(const Planner& p, u32 e, u32 w) {
    const u32 bits = p.work[e * PLAN_MASK_STRIDE + w], mine = dev::thread() / 32;
    return w < mine ? bits : w == mine ? bits & ((1u << dev::thread() % 32) - 1) : 0;
}
DEVICE u32 count_below(const Planner& p, u32 e) {
    u32 rank = 0;
    for (u32 w = 0; w <= dev::thread() / 32; w++) rank += count_bits(below(p, e, w));
    return rank;
}
DEVICE u32 count_all(const Planner& p, u32 e) {
    u32 count = 0;
    for (u32 w = 0; w < PLAN_TOKENS / 32; w++) count += count_bits(p.work[e * PLAN_MASK_STRIDE + w]);
    return count;
}
// The sum of `value(i)` over the set bits below this thread's bit.
template <class Value> DEVICE u32 sum_below(const Planner& p, u32 e, Value value) {
    u32 sum = 0;
    for (u32 w = 0; w <= dev::thread() / 32; w++)
        for (u32 bits = below(p, e, w); bits; bits &= bits - 1) sum += value(w * 32 + count_bits((bits & (0 - bits)) - 1));
    return sum;
}
// Whether this thread's bit is the last one set.
DEVICE bool is_last(const Planner& p, u32 e) { return count_below(p, e) + 1 == count_all(p, e); }

// All threads: in-place exclusive prefix sums; returns the total.
DEVICE u32 scan_words(const Planner& p, u32* words, u32 n) {
    u32* sums = p.total + 2;
    u32 total = 0;
    dev::sync_block();
    for (u32 first = 0; first < n; first += PLAN_TOKENS) {
        const u32 i = first + dev::thread(), value = i < n ? words[i] : 0;
        u32 sum = value;
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = dev::shfl_up(sum, step);
            if (dev::lane() >= step) sum += other;
        }
        if (dev::lane() == 31) sums[dev::warp()] = sum;
        dev::sync_block();
        u32 before = 0, all = 0;
        for (u32 w = 0; w < PLAN_TOKENS / 32; w++) {
            if (w == dev::warp()) before = all;
            all += sums[w];
        }
        if (i < n) words[i] = total + before + sum - value;
        total += all;
        dev::sync_block();
    }
    return total;
}

// ---- Tokens.

// Counts the pairs of each expert in a segment, and computes each pair's rank there.
DEVICE void count_experts(const Planner& p, u32 segment) {
    const u32 experts = p.s.n_experts, k = p.s.top_k;
    const u32 token = segment * PLAN_TOKENS + dev::thread();
    const u32* chosen = p.layer.routing.chosen + u64(token) * k;
    for (u32 e0 = 0; e0 < experts; e0 += PLAN_EXPERTS) {
        const u32 n = min_of(experts - e0, PLAN_EXPERTS);
        clear_masks(p, n);
        for (u32 j = 0; j < k && token < p.tokens; j++)
            if (chosen[j] - e0 < n) mark(p, chosen[j] - e0);
        dev::sync_block();
        for (u32 j = 0; j < k && token < p.tokens; j++) {
            if (chosen[j] == NONE) p.pair_physical[u64(token) * k + j] = NONE;
            if (chosen[j] - e0 < n) p.pair_physical[u64(token) * k + j] = count_below(p, chosen[j] - e0);
        }
        for (u32 e = dev::thread(); e < n; e += PLAN_TOKENS) p.histogram[u64(segment) * experts + e0 + e] = count_all(p, e);
        dev::sync_block();
    }
}

// Per physical expert: the rows of a segment whose first expert it is, and their slots, as slots << 16 | rows. Per pair: the slots of the
// row that the pair begins, or 0. Also per pair: the rows and slots that earlier tokens of the segment begin with the same physical expert.
DEVICE void count_heads(const Planner& p, u32 segment) {
    const u32 held = p.s.held, k = p.s.top_k, token = segment * PLAN_TOKENS + dev::thread();
    const u64 pairs = u64(token) * k;
    const u32* physical = p.pair_physical;
    for (u32 j = 0; j < k && token < p.tokens; j++) {
        u32 slots = 0;
        const u32 d = p.pe_of(pairs + j);
        if (d != NONE) {
            bool first = true;
            for (u32 i = 0; i < k; i++) {
                if (p.pe_of(pairs + i) != d) continue;
                slots++;
                first = first && physical[pairs + i] >= physical[pairs + j];
            }
            if (!first) slots = 0;
        }
        p.pair_slots[pairs + j] = slots;
    }
    for (u32 e0 = 0; e0 < held; e0 += PLAN_EXPERTS) {
        const u32 n = min_of(held - e0, PLAN_EXPERTS);
        clear_masks(p, n);
        for (u32 j = 0; j < k && token < p.tokens; j++)
            if (p.pair_slots[pairs + j] && physical[pairs + j] - e0 < n) mark(p, physical[pairs + j] - e0);
        dev::sync_block();
        for (u32 j = 0; j < k && token < p.tokens; j++) {
            const u32 e = physical[pairs + j], slots = p.pair_slots[pairs + j];
            if (slots == 0 || e - e0 >= n) continue;
            const u32 before = sum_below(p, e - e0, [&](u32 other) {
                u64 pair = u64(segment * PLAN_TOKENS + other) * k;
                while (physical[pair] != e) pair++;
                return p.pair_slots[pair];
            });
            const u32 rank = count_below(p, e - e0);
            p.pair_before[pairs + j] = before << 16 | rank;
            if (is_last(p, e - e0)) p.heads[u64(segment) * held + e] = (before + slots) << 16 | (rank + 1);
        }
        for (u32 e = dev::thread(); e < n; e += PLAN_TOKENS)
            if (count_all(p, e) == 0) p.heads[u64(segment) * held + e0 + e] = 0;
        dev::sync_block();
    }
}

// Sums the pairs of each expert in earlier segments.
DEVICE void sum_experts(const Planner& p, u32 segment, u32* sums) {
    for (u32 e = dev::thread(); e < p.s.n_experts; e += PLAN_TOKENS) {
        u32 sum = 0;
        for (u32 i = 0; i < segment; i++) sum += p.histogram[u64(i) * p.s.n_experts + e];
        sums[e] = sum;
    }
    dev::sync_block();
}

// Computes the number of pairs of each expert that this PE keeps: at most capacity(e) less the pairs of lower PEs. False if a PE's counts
// did not arrive or are invalid.
DEVICE bool limit_experts(const Planner& p, const Pass& pass) {
    const u32 experts = p.s.n_experts, me = p.s.world_pe, n = p.s.n_world;
    const Gathered counts{reinterpret_cast<u8*>(p.layer.symmetric.capacity), p.layer.symmetric.capacity_signal, experts * 4, WHAT_CAPACITY};
    if (dev::block() == 0) {
        put_record(p.layer, counts, pass.forward, p.allowed);
        if (dev::thread() == 0) dev::fetch_add(&p.layer.stats->header_bytes, u64(n - 1) * experts * 4);
    }
    if (dev::thread() < 2) p.total[dev::thread()] = 0;
    if (!wait_records(p.layer, counts, pass.forward)) return false;
    bool ok = true;
    u64 pairs = 0;
    for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) {
        u32 before = 0;
        for (u32 pe = 0; pe < n; pe++) {
            const u32 count = pe == me ? p.allowed[e] : counts.of<u32>(p.layer, pass.forward, pe)[e];
            if (count > p.s.max_tokens) {
                record_error(p.layer, ERROR_PROTOCOL, {pe, WHAT_CAPACITY, PHASE_ROUTER, p.s.max_tokens, e}, count);
                ok = false;
            }
            if (pe < me) before += count;
            pairs += count;
        }
        p.experts_before[e] = before;  // of lower PEs, temporarily
    }
    dev::shared_add(&p.total[0], u32(pairs & 0xfffff));
    dev::shared_add(&p.total[1], u32(pairs >> 20));
    if (dev::sync_block_or(!ok)) return false;
    const u64 all_tokens = ((u64(p.total[1]) << 20) + p.total[0]) / p.s.top_k;
    const double capacity = ceil(p.s.capacity_factor * double(p.s.top_k) * double(all_tokens) / double(experts));
    for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) {
        // Clamped to u32, which no count of pairs exceeds.
        const u32 limit = capacity < 4294967295.0 ? u32(capacity) : ~0u, before = p.experts_before[e];
        p.allowed[e] = min_of(p.allowed[e], limit > before ? limit - before : 0);
    }
    dev::sync_block();
    return true;
}

// The physical expert of the pair with rank `rank` among this PE's `pairs` with the expert (as in src/moe/spec/placement.rs).
DEVICE u32 assign_holder(const Planner& p, u32 e, u32 rank, u32 pairs) {
    constexpr u32 GOLDEN = 0x9E3779B9u;
    const u64 offset = u32((p.s.my_pe + e) * GOLDEN);
    u32 at = p.layer.tables.first_holder[e], last = p.layer.tables.first_holder[e + 1] - 1;
    while (at < last && (pairs * p.layer.tables.holder_until[at] + offset) >> 32 <= rank) at++;
    return p.layer.tables.holder_physical[at];
}

// Assigns a physical expert to each pair of a segment; NONE to pairs beyond the limit and to choices without an expert.
DEVICE void assign_pairs(const Planner& p, u32 segment) {
    const u32 k = p.s.top_k, token = segment * PLAN_TOKENS + dev::thread();
    if (p.ranked()) sum_experts(p, segment, p.experts_before);
    for (u32 j = 0; j < k && token < p.tokens; j++) {
        const u64 pair = u64(token) * k + j;
        const u32 e = p.layer.routing.chosen[pair];
        u32 physical = NONE;
        if (e != NONE && !p.ranked()) {
            physical = p.layer.tables.holder_physical[p.layer.tables.first_holder[e]];
        } else if (e != NONE) {
            const u32 rank = p.experts_before[e] + p.pair_physical[pair];
            if (rank < p.allowed[e]) physical = assign_holder(p, e, rank, p.allowed[e]);
        }
        p.pair_physical[pair] = physical;
    }
    dev::sync_block();
}

// Per PE: its rows and slots over all segments, and where they begin. Per physical expert: the rows and slots of all lower physical
// experts.
DEVICE void sum_heads(const Planner& p) {
    const u32 n = p.s.n_pes, held = p.s.held;
    for (u32 physical = dev::thread(); physical < held; physical += PLAN_TOKENS) {
        u32 rows = 0, slots = 0;
        for (u32 i = 0; i < p.segments; i++) {
            const u32 both = p.heads[u64(i) * held + physical];
            rows += both & 0xffff, slots += both >> 16;
        }
        p.experts_before[physical] = rows, p.allowed[physical] = slots;
    }
    const u32 all_rows = scan_words(p, p.experts_before, held), all_slots = scan_words(p, p.allowed, held);
    for (u32 d = dev::thread(); d < n; d += PLAN_TOKENS) {
        const u32 begin = p.first_physical[d], end = p.first_physical[d + 1];
        p.first_row[d] = begin < held ? p.experts_before[begin] : all_rows;
        p.slot_base[d] = begin < held ? p.allowed[begin] : all_slots;
        p.rows[d] = (end < held ? p.experts_before[end] : all_rows) - p.first_row[d];
        p.slots[d] = (end < held ? p.allowed[end] : all_slots) - p.slot_base[d];
        p.chunk_base[d] = div_up(p.rows[d], p.s.chunk_rows);
    }
    scan_words(p, p.chunk_base, n);
}

// Writes every row of a segment's tokens to its position.
DEVICE void write_rows(const Planner& p, u32 segment) {
    const Plan& plan = p.layer.plan;
    const u32 k = p.s.top_k, max = p.s.max_tokens, token = segment * PLAN_TOKENS + dev::thread();
    if (token >= p.tokens) return;
    for (u32 d = 0; d < p.s.n_pes; d++) plan.token_row[u64(d) * max + token] = NONE;
    for (u64 pair = u64(token) * k; pair < u64(token + 1) * k; pair++) {
        if (p.pair_slots[pair] == 0) continue;
        const u32 physical = p.pair_physical[pair], d = p.layer.tables.physical_pe[physical];
        u32 row = p.experts_before[physical] - p.first_row[d] + (p.pair_before[pair] & 0xffff);
        u32 slot = p.allowed[physical] - p.slot_base[d] + (p.pair_before[pair] >> 16);
        for (u32 i = 0; i < segment; i++) {
            const u32 both = p.heads[u64(i) * p.s.held + physical];
            row += both & 0xffff, slot += both >> 16;
        }
        plan.row_token[u64(d) * max + row] = token;
        plan.row_slot[u64(d) * (max + 1) + row] = slot;
        plan.token_row[u64(d) * max + token] = row;
    }
}

// Block 0: each destination's plan before rounds are split; it is final if one round suffices.
DEVICE void write_dests(const Planner& p) {
    const u32 max = p.s.max_tokens;
    for (u32 d = dev::thread(); d < p.s.n_pes; d += PLAN_TOKENS) {
        const u32 chunks = div_up(p.rows[d], p.s.chunk_rows), rounds = chunks > 0 ? 1 : 0;
        p.layer.plan.dest[d] = {p.rows[d], p.slots[d], p.slot_base[d], chunks, rounds, p.chunk_base[d]};
        p.layer.plan.row_slot[u64(d) * (max + 1) + p.rows[d]] = p.slots[d];
        u32* round_chunk = p.layer.plan.round_chunk + u64(d) * (p.layer.sizes.max_chunks + 1);
        round_chunk[0] = 0;
        if (rounds > 0) round_chunk[1] = chunks;
    }
}

// One warp: splits a PE's chunks into rounds. A round takes chunks until its window or its slots are full; one chunk always fits.
DEVICE void split_rounds(const Planner& p, u32 d) {
    DestPlan& dest = p.layer.plan.dest[d];
    const u32 rows = dest.rows, chunks = dest.chunks, chunk_rows = p.s.chunk_rows;
    const u32* row_slot = p.layer.plan.row_slot + u64(d) * (p.s.max_tokens + 1);
    u32* round_chunk = p.layer.plan.round_chunk + u64(d) * (p.layer.sizes.max_chunks + 1);
    u32 rounds = 0;
    for (u32 first = 0; first < chunks; rounds++) {
        const u32 first_slot = row_slot[u64(first) * chunk_rows];
        const u32 last = min_of(chunks, first + p.s.round_chunks);
        u32 end = first + 1;
        for (bool more = true; more && end < last;) {
            const u32 candidate = end + 1 + dev::lane();
            const bool fits = candidate <= last &&
                              row_slot[min_of(candidate * chunk_rows, rows)] - first_slot <= p.s.round_slots;
            const u32 fitting = count_bits(dev::ballot(fits));
            end += fitting, more = fitting == 32;
        }
        if (dev::lane() == 0) round_chunk[rounds] = first;
        first = end;
    }
    dev::sync_warp();
    if (dev::lane() == 0) round_chunk[rounds] = chunks, dest.rounds = rounds;
}

// One warp, with relays: counts the slots of each PE of the host in a chunk to that host.
DEVICE void count_chunk(const Planner& p, u32 d, u32 chunk) {
    const u32 k = p.s.top_k, split = relay_entry(p.layer, RELAY_SPLIT, d), end = min_of((chunk + 1) * p.s.chunk_rows, p.rows[d]);
    u32* counts = p.chunk_slots + (u64(d) * p.layer.sizes.max_chunks + chunk) * p.s.most_members;
    if (dev::lane() < p.s.most_members) counts[dev::lane()] = 0;
    dev::sync_warp();
    for (u32 row = chunk * p.s.chunk_rows + dev::lane(); row < end; row += 32) {
        const u64 pairs = u64(p.layer.plan.row_token[u64(d) * p.s.max_tokens + row]) * k;
        for (u64 pair = pairs; pair < pairs + k; pair++)
            if (p.pe_of(pair) == d) dev::fetch_add(counts + (p.pair_physical[pair] - p.first_physical[d]) % split, 1u);
    }
}
// One warp, one lane per PE of a host: splits the chunks into rounds. A chunk begins a new round if the window is full or some PE has no
// room left for its slots.
DEVICE void split_host_rounds(const Planner& p, u32 d) {
    DestPlan& dest = p.layer.plan.dest[d];
    u32* round_chunk = p.layer.plan.round_chunk + u64(d) * (p.layer.sizes.max_chunks + 1);
    const u32* counts = p.chunk_slots + u64(d) * p.layer.sizes.max_chunks * p.s.most_members;
    u32 rounds = 0, first = 0, used = 0;
    for (u32 chunk = 0; chunk < dest.chunks; chunk++) {
        const u32 more = dev::lane() < p.s.most_members ? counts[chunk * p.s.most_members + dev::lane()] : 0;
        const bool full = dev::ballot(used + more > p.s.round_slots) != 0;
        if (chunk == 0 || full || chunk - first == p.s.round_chunks) {
            first = chunk, used = 0;
            if (dev::lane() == 0) round_chunk[rounds] = chunk;
            rounds++;
        }
        used += more;
    }
    if (dev::lane() == 0) round_chunk[rounds] = dest.chunks, dest.rounds = rounds;
}

// ---- Rows.

// A segment of the rows of one round of one PE. Segments are numbered over all rounds; this round has [first_item, end_item).
struct RowSegment {
    u32 d, round_row, first, rows;
    u32 number, first_item, end_item;
};
// Calls `work` for the segments of this block.
template <class Work> DEVICE void each_row_segment(const Planner& p, Work work) {
    u32 item = 0;
    for (u32 d = 0; d < p.s.n_pes; d++) {
        const u32* round_chunk = p.layer.plan.round_chunk + u64(d) * (p.layer.sizes.max_chunks + 1);
        for (u32 round = 0; round < p.layer.plan.dest[d].rounds; round++) {
            const u32 begin = round_chunk[round] * p.s.chunk_rows;
            const u32 end = min_of(round_chunk[round + 1] * p.s.chunk_rows, p.rows[d]);
            const u32 first_item = item, end_item = item + div_up(end - begin, PLAN_TOKENS);
            for (u32 row = begin; row < end; row += PLAN_TOKENS, item++)
                if (item % dev::blocks() == dev::block()) work({d, begin, row, min_of(end - row, PLAN_TOKENS), item, first_item, end_item});
        }
    }
}

// The largest expert number in slots [begin, end). Slots are in expert order, which differs from the order of the numbers if these cover
// several PEs (expert_member).
DEVICE u32 last_expert(const u32* words, u32 begin, u32 end) {
    u32 last = 0;
    for (u32 i = begin; i < end; i++) last = slot_expert(words[i]) > last ? slot_expert(words[i]) : last;
    return last;
}

// Writes every slot of a segment to its position, with its rank among those of its expert in the segment. Per local expert: its slots,
// and the rows whose last expert it is, as slots << 16 | rows. A row's return number temporarily holds the same counts over earlier rows.
DEVICE void count_slots(const Planner& p, const RowSegment& g) {
    const Plan& plan = p.layer.plan;
    const u32 k = p.s.top_k, row = g.first + dev::thread();
    const u32* starts = plan.row_slot + u64(g.d) * (p.s.max_tokens + 1);
    const bool mine = dev::thread() < g.rows;
    const u32 begin = mine ? plan.dest[g.d].slot_base + starts[row] : 0, end = mine ? plan.dest[g.d].slot_base + starts[row + 1] : 0;
    const u64 pairs = u64(mine ? plan.row_token[u64(g.d) * p.s.max_tokens + row] : 0) * k;
    u32 at = begin;
    for (u64 pair = pairs; mine && pair < pairs + k; pair++) {
        if (p.pe_of(pair) != g.d) continue;
        plan.slot_word[at] = (p.pair_physical[pair] - p.first_physical[g.d]) << RANK_BITS;
        plan.slot_weight[at] = p.layer.routing.routing_weights[pair];
        plan.slot_choice[at++] = u32(pair);
    }
    const u32 last = mine ? last_expert(plan.slot_word, begin, end) : 0;
    const u64 counts = u64(g.number) * p.s.max_local;
    for (u32 e0 = 0; e0 < p.s.max_local; e0 += PLAN_EXPERTS) {
        const u32 n = min_of(p.s.max_local - e0, PLAN_EXPERTS);
        auto in = [&](u32 e) { return e - e0 < n; };
        clear_masks(p, n);
        for (u32 i = begin; i < end; i++)
            if (u32 e = slot_expert(plan.slot_word[i]); in(e)) mark(p, e - e0);
        dev::sync_block();
        for (u32 i = begin; i < end; i++)
            if (u32 e = slot_expert(plan.slot_word[i]); in(e)) plan.slot_word[i] |= count_below(p, e - e0);
        for (u32 e = dev::thread(); e < n; e += PLAN_TOKENS) p.row_slots[counts + e0 + e] = count_all(p, e);
        dev::sync_block();
        clear_masks(p, n);
        if (mine && in(last)) mark(p, last - e0);
        dev::sync_block();
        if (mine && in(last)) {
            const u32 rank = count_below(p, last - e0);
            const u32 before =
                sum_below(p, last - e0, [&](u32 other) { return starts[g.first + other + 1] - starts[g.first + other]; });
            plan.row_return[u64(g.d) * p.s.max_tokens + row] = before << 16 | rank;
            if (is_last(p, last - e0)) p.tails[counts + last] = (before + end - begin) << 16 | (rank + 1);
        }
        for (u32 e = dev::thread(); e < n; e += PLAN_TOKENS)
            if (count_all(p, e) == 0) p.tails[counts + e0 + e] = 0;
        dev::sync_block();
    }
}

// Converts ranks and return numbers within a segment to ranks and return numbers within the round.
DEVICE void order_rows(const Planner& p, const RowSegment& g) {
    const Plan& plan = p.layer.plan;
    const u32 experts = p.s.max_local, row = g.first + dev::thread();
    u32 *before = p.work, *rows = before + experts, *slots = rows + experts;
    for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) {
        before[e] = rows[e] = slots[e] = 0;
        for (u32 i = g.first_item; i < g.end_item; i++) {
            const u32 both = p.tails[u64(i) * experts + e];
            if (i < g.number) before[e] += p.row_slots[u64(i) * experts + e];
            rows[e] += both & 0xffff, slots[e] += both >> 16;
        }
    }
    scan_words(p, rows, experts);
    scan_words(p, slots, experts);
    if (dev::thread() < g.rows) {
        const u32* starts = plan.row_slot + u64(g.d) * (p.s.max_tokens + 1);
        const u32 base = plan.dest[g.d].slot_base, end = base + starts[row + 1];
        for (u32 i = base + starts[row]; i < end; i++) plan.slot_word[i] += before[slot_expert(plan.slot_word[i])];
        const u32 last = last_expert(plan.slot_word, base + starts[row], end);
        u32& number = plan.row_return[u64(g.d) * p.s.max_tokens + row];
        u32 row_number = rows[last] + (number & 0xffff), slot = slots[last] + (number >> 16);
        for (u32 i = g.first_item; i < g.number; i++) {
            const u32 both = p.tails[u64(i) * experts + last];
            row_number += both & 0xffff, slot += both >> 16;
        }
        number = g.round_row + row_number;
        if (p.s.training) plan.return_slot[u64(g.d) * p.s.max_tokens + number] = slot;
    }
    dev::sync_block();
}

// Computes this PE's loss sums: those of the router's blocks, added in order, and the pairs of each expert before any are dropped. With a
// caller's routing only the tokens are counted, because the losses belong to the layer's router.
DEVICE void sum_losses(const Planner& p, bool by_caller) {
    const u32 experts = p.s.n_experts, blocks = div_up(p.tokens, ROUTE_TOKENS);
    const double* parts = reinterpret_cast<const double*>(p.layer.plan.scratch + plan_scratch(p.s).loss_parts);
    double* mine = p.layer.losses.mine;
    for (u32 i = p.grid_thread(); i < 1 + experts; i += p.grid_threads()) {
        double sum = 0.0;
        for (u32 b = 0; b < blocks && !by_caller; b++) sum += parts[u64(b) * (1 + experts) + i];
        mine[i == 0 ? 1 : 2 + experts + i - 1] = sum;
    }
    for (u32 e = p.grid_thread(); e < experts; e += p.grid_threads()) {
        u64 sum = 0;
        for (u32 i = 0; i < p.segments && !by_caller; i++) sum += p.histogram[u64(i) * experts + e];
        mine[2 + e] = double(sum);
    }
    if (p.grid_thread() == 0) mine[0] = double(p.tokens);
}

KERNEL(aristos_plan, 256, 1)(const Layer* layer, Pass given) {
    const Pass pass = numbered(*layer, given, false);
    const Planner p(*layer, pass);
    if (p.ranked() || has_losses(p.s)) {
        for (u32 i = dev::block(); i < p.segments; i += dev::blocks()) count_experts(p, i);
        if (!plan_barrier(p)) return;
    }
    if (has_losses(p.s)) sum_losses(p, routed_by_caller(pass));
    if (p.ranked()) sum_experts(p, p.segments, p.allowed);
    if (p.limited() && !limit_experts(p, pass)) return;
    for (u32 i = dev::block(); i < p.segments; i += dev::blocks()) {
        assign_pairs(p, i);
        count_heads(p, i);
    }
    if (!plan_barrier(p)) return;
    sum_heads(p);
    for (u32 i = dev::block(); i < p.segments; i += dev::blocks()) write_rows(p, i);
    if (dev::block() == 0) write_dests(p);
    if (!plan_barrier(p)) return;
    bool split = false;
    for (u32 d = dev::thread(); d < p.s.n_pes; d += PLAN_TOKENS)
        split |= div_up(p.rows[d], p.s.chunk_rows) > p.s.round_chunks || p.slots[d] > p.s.round_slots;
    // All blocks have the same sums, so either all of them split rounds or none does.
    if (dev::sync_block_or(split)) {
        const u32 warps = PLAN_TOKENS / 32, first = dev::block() * warps + dev::warp(), all = dev::blocks() * warps;
        if (p.s.relays) {
            u32 item = 0;
            for (u32 d = 0; d < p.s.n_pes; d++)
                for (u32 chunk = 0; chunk < div_up(p.rows[d], p.s.chunk_rows); chunk++)
                    if (item++ % all == first) count_chunk(p, d, chunk);
            if (!plan_barrier(p)) return;
        }
        for (u32 d = first; d < p.s.n_pes; d += all) {
            if (p.s.relays) split_host_rounds(p, d);
            else split_rounds(p, d);
        }
        if (!plan_barrier(p)) return;
    }
    each_row_segment(p, [&](const RowSegment& g) { count_slots(p, g); });
    if (!plan_barrier(p)) return;
    each_row_segment(p, [&](const RowSegment& g) { order_rows(p, g); });
}
REGISTER_KERNEL(aristos_plan)

}  // namespace aristos
