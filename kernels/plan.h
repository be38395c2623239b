// aristos_plan: derives from the chosen experts what goes where: the capacity limit, each PE's rows, slots, ranks, chunks and rounds.
// The meaning is that of `routes` (src/moe/cpu/router.rs) and `apply_capacity` (src/moe/cpu/layer.rs).
//
// Tokens are cut into segments of PLAN_TOKENS, one thread per token. Places follow from counts of the segments before, so they are
// in the order of tokens whichever block comes first:
//   count    pairs of each expert in each segment, and each pair's rank in its segment; dropless: also rows and slots of each PE
//   limit    with a capacity factor: PEs exchange their counts; what is kept, and rows and slots of each PE
//   write    every row and slot to its place; one round where the windows hold everything, and then nothing is left to do
//   rounds   else cuts the chunks into rounds, and subtracts from each rank the slots of the rounds before
#pragma once
#include "protocol.h"
#include "route_math.h"

namespace aristos {

// The kernel's state: shared memory, scratch, and what of the arguments is used everywhere.
struct Planner {
    const Layer& layer;
    const LayerShape& s;
    u32 tokens, segments;
    u32 *work;                      // masks of tokens, or positions
    u32 *rows_before, *slots_before;  // [n_pes]: of the segments before this one
    u32 *rows, *slots;                // [n_pes]: of all segments
    u32 *slot_base, *chunk_base;      // [n_pes]: of the PEs before
    u32 *experts_before;              // [E]: pairs of the segments before this one
    u32 *allowed;                     // [E]: pairs that the capacity limit leaves this PE
    u32 *total;                       // [2]: pairs of all PEs, in two words of 20 bits and the rest
    u32 *histogram, *dest_counts, *pair_rank, *round_first;
    u64 *barrier;

    DEVICE Planner(const Layer& l, const Pass& pass) : layer(l), s(l.shape), tokens(pass.tokens) {
        segments = div_up(tokens, PLAN_TOKENS);
        work = reinterpret_cast<u32*>(dev::shared());
        rows_before = work + plan_work_words(s);
        slots_before = rows_before + s.n_pes;
        rows = slots_before + s.n_pes;
        slots = rows + s.n_pes;
        slot_base = slots + s.n_pes;
        chunk_base = slot_base + s.n_pes;
        experts_before = chunk_base + s.n_pes;
        allowed = experts_before + s.n_experts;
        total = allowed + s.n_experts;
        const PlanScratch at = plan_scratch(s);
        u8* scratch = l.plan.scratch;
        histogram = reinterpret_cast<u32*>(scratch + at.histogram);
        dest_counts = reinterpret_cast<u32*>(scratch + at.dest_counts);
        pair_rank = reinterpret_cast<u32*>(scratch + at.pair_rank);
        round_first = reinterpret_cast<u32*>(scratch + at.round_first);
        barrier = reinterpret_cast<u64*>(scratch + at.barrier);
    }
    DEVICE bool limited() const { return s.capacity_factor > 0.0; }
    DEVICE u32 grid_thread() const { return dev::block() * PLAN_TOKENS + dev::thread(); }
    DEVICE u32 grid_threads() const { return dev::blocks() * PLAN_TOKENS; }
};

// All blocks meet. False: aborted.
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

// Pairs of each expert in a segment, and each pair's rank there: a bit for each token in the mask of each expert.
DEVICE void count_experts(const Planner& p, u32 segment) {
    const u32 experts = p.s.n_experts, k = p.s.top_k;
    const u32 token = segment * PLAN_TOKENS + dev::thread(), word = dev::thread() / 32, bit = dev::thread() % 32;
    const u32* chosen = p.layer.routing.chosen + u64(token) * k;
    for (u32 e0 = 0; e0 < experts; e0 += PLAN_EXPERTS) {
        const u32 n = least(experts - e0, PLAN_EXPERTS);
        for (u32 i = dev::thread(); i < n * PLAN_MASK_STRIDE; i += PLAN_TOKENS) p.work[i] = 0;
        dev::sync_block();
        for (u32 j = 0; j < k && token < p.tokens; j++) {
            const u32 e = chosen[j] - e0;
            if (e < n) dev::shared_add(&p.work[e * PLAN_MASK_STRIDE + word], 1u << bit);
        }
        dev::sync_block();
        for (u32 j = 0; j < k && token < p.tokens; j++) {
            if (chosen[j] == NONE) p.pair_rank[u64(token) * k + j] = NONE;
            const u32 e = chosen[j] - e0;
            if (e >= n) continue;
            const u32* mask = p.work + e * PLAN_MASK_STRIDE;
            u32 rank = count_bits(mask[word] & ((1u << bit) - 1));
            for (u32 w = 0; w < word; w++) rank += count_bits(mask[w]);
            p.pair_rank[u64(token) * k + j] = rank;
        }
        for (u32 e = dev::thread(); e < n; e += PLAN_TOKENS) {
            u32 count = 0;
            for (u32 w = 0; w < PLAN_TOKENS / 32; w++) count += count_bits(p.work[e * PLAN_MASK_STRIDE + w]);
            p.histogram[u64(segment) * experts + e0 + e] = count;
        }
        dev::sync_block();
    }
}

// Rows << 16 | slots of the tokens before each one of a segment, for PEs [d0, d0 + n), in work[pe - d0][token]; after the
// tokens the sum. A row is a token with at least one kept pair at the PE.
DEVICE void place_tokens(const Planner& p, u32 segment, u32 d0, u32 n) {
    constexpr u32 STRIDE = PLAN_TOKENS + 1;
    const u32 k = p.s.top_k, token = segment * PLAN_TOKENS + dev::thread();
    const u32* chosen = p.layer.routing.chosen + u64(token) * k;
    const u32* rank = p.pair_rank + u64(token) * k;
    for (u32 d = 0; d < n; d++) p.work[d * STRIDE + dev::thread()] = 0;
    for (u32 j = 0; j < k && token < p.tokens; j++) {
        if (rank[j] == NONE) continue;
        const u32 d = p.layer.tables.owner[chosen[j]] - d0;
        if (d >= n) continue;
        u32& mine = p.work[d * STRIDE + dev::thread()];
        mine += mine == 0 ? (1u << 16) + 1 : 1;
    }
    dev::sync_block();
    for (u32 d = dev::warp(); d < n; d += PLAN_TOKENS / 32) {
        u32 before = 0;
        for (u32 t0 = 0; t0 < PLAN_TOKENS; t0 += 32) {
            u32& mine = p.work[d * STRIDE + t0 + dev::lane()];
            u32 sum = mine;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = dev::shfl_up(sum, step);
                if (dev::lane() >= step) sum += other;
            }
            const u32 all = dev::shfl(sum, 31);
            mine = before + sum - mine;
            before += all;
        }
        if (dev::lane() == 0) p.work[d * STRIDE + PLAN_TOKENS] = before;
    }
    dev::sync_block();
}

DEVICE void count_dests(const Planner& p, u32 segment) {
    for (u32 d0 = 0; d0 < p.s.n_pes; d0 += PLAN_PES) {
        const u32 n = least(p.s.n_pes - d0, PLAN_PES);
        place_tokens(p, segment, d0, n);
        if (dev::thread() < n)
            p.dest_counts[u64(segment) * p.s.n_pes + d0 + dev::thread()] = p.work[dev::thread() * (PLAN_TOKENS + 1) + PLAN_TOKENS];
        dev::sync_block();
    }
}

// Pairs of each expert in the segments before this one.
DEVICE void sum_experts(const Planner& p, u32 segment, u32* sums) {
    for (u32 e = dev::thread(); e < p.s.n_experts; e += PLAN_TOKENS) {
        u32 sum = 0;
        for (u32 i = 0; i < segment; i++) sum += p.histogram[u64(i) * p.s.n_experts + e];
        sums[e] = sum;
    }
    dev::sync_block();
}

// By block 0: this PE's counts to all others, each into the place of this PE and with its signal.
DEVICE void send_counts(const Planner& p, const Pass& pass) {
    const u32 experts = p.s.n_experts, me = p.s.my_pe, n = p.s.n_pes;
    u32* place = p.layer.symmetric.capacity + u64(me) * experts;
    u64* signal = p.layer.symmetric.capacity_signal + me;
    // Puts over the network start from the own place, which nobody else reads or writes; `place` is free of the last forward's,
    // since this pass has begun only after every PE's header of that one, which follows its reading of the counts.
    for (u32 pe = 0; pe < n; pe++) {
        if (!reachable(p.layer, pe)) continue;
        u32* to = at_peer(p.layer, place, pe);
        for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) to[e] = p.allowed[e];
    }
    if (p.s.stage) dev::fence_sys();  // the network card reads them
    dev::sync_block();
    for (u32 pe = dev::thread(); pe < n; pe += PLAN_TOKENS) {
        if (pe != me && reachable(p.layer, pe)) signal_peer(p.layer, signal, pass.forward, pe);
    }
    for (u32 pe = 0; pe < n; pe++) {
        if (!reachable(p.layer, pe)) dev::put_signal_block(place, place, u64(experts) * 4, signal, pass.forward, pe);
    }
    if (dev::thread() == 0) {
        dev::fetch_add(&p.layer.stats->header_bytes, u64(n - 1) * experts * 4);
        dev::fetch_add(&p.layer.stats->puts, u64(n - 1));
        dev::fetch_add(&p.layer.stats->signals, u64(n - 1));
    }
}

// How many pairs of each expert this PE may keep: capacity(e) less those of the PEs before. False: a PE's counts did not come,
// or are invalid.
DEVICE bool limit_experts(const Planner& p, const Pass& pass) {
    const u32 experts = p.s.n_experts, me = p.s.my_pe, n = p.s.n_pes;
    sum_experts(p, p.segments, p.allowed);
    if (dev::block() == 0) send_counts(p, pass);
    bool ok = true;
    for (u32 pe = dev::thread(); pe < n && ok; pe += PLAN_TOKENS) {
        const Waiting w{pe, WHAT_CAPACITY, PHASE_ROUTER, pass.forward, 0};
        if (pe != me) ok = wait_signal(p.layer, p.layer.symmetric.capacity_signal + pe, w);
    }
    if (dev::thread() < 2) p.total[dev::thread()] = 0;
    if (dev::sync_block_or(!ok)) return false;
    u64 pairs = 0;
    for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) {
        u32 before = 0;
        for (u32 pe = 0; pe < n; pe++) {
            const u32 count = pe == me ? p.allowed[e] : p.layer.symmetric.capacity[u64(pe) * experts + e];
            if (count > p.s.max_tokens) {
                record_error(p.layer, ERROR_PROTOCOL, {pe, WHAT_CAPACITY, PHASE_ROUTER, p.s.max_tokens, e}, count);
                ok = false;
            }
            if (pe < me) before += count;
            pairs += count;
        }
        p.experts_before[e] = before;  // of the PEs before, for now
    }
    dev::shared_add(&p.total[0], u32(pairs & 0xfffff));
    dev::shared_add(&p.total[1], u32(pairs >> 20));
    if (dev::sync_block_or(!ok)) return false;
    const u64 all_tokens = ((u64(p.total[1]) << 20) + p.total[0]) / p.s.top_k;
    const double capacity = ceil(p.s.capacity_factor * double(p.s.top_k) * double(all_tokens) / double(experts));
    for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) {
        // Capped at what a word holds, which no count of pairs exceeds.
        const u32 limit = capacity < 4294967295.0 ? u32(capacity) : ~0u, before = p.experts_before[e];
        p.allowed[e] = limit > before ? limit - before : 0;
    }
    dev::sync_block();
    return true;
}

// Ranks among all of this PE's pairs of an expert; NONE for those beyond the limit, and for choices without an expert.
DEVICE void rank_pairs(const Planner& p, u32 segment) {
    const u32 k = p.s.top_k, token = segment * PLAN_TOKENS + dev::thread();
    sum_experts(p, segment, p.experts_before);
    for (u32 j = 0; j < k && token < p.tokens; j++) {
        const u64 pair = u64(token) * k + j;
        if (p.pair_rank[pair] == NONE) continue;
        const u32 e = p.layer.routing.chosen[pair], rank = p.experts_before[e] + p.pair_rank[pair];
        p.pair_rank[pair] = !p.limited() || rank < p.allowed[e] ? rank : NONE;
    }
    dev::sync_block();
}

// Rows and slots of each PE over all segments, and where they begin.
DEVICE void sum_dests(const Planner& p) {
    const u32 n = p.s.n_pes;
    for (u32 d = dev::thread(); d < n; d += PLAN_TOKENS) {
        u32 rows = 0, slots = 0;
        for (u32 i = 0; i < p.segments; i++) {
            const u32 both = p.dest_counts[u64(i) * n + d];
            rows += both >> 16, slots += both & 0xffff;
        }
        p.rows[d] = rows, p.slots[d] = slots;
    }
    dev::sync_block();
    if (dev::warp() == 0) {
        u32 slots_before = 0, chunks_before = 0;
        for (u32 d0 = 0; d0 < n; d0 += 32) {
            const u32 d = d0 + dev::lane();
            const u32 slots = d < n ? p.slots[d] : 0, chunks = d < n ? div_up(p.rows[d], p.s.chunk_rows) : 0;
            u32 slot_sum = slots, chunk_sum = chunks;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 s = dev::shfl_up(slot_sum, step), c = dev::shfl_up(chunk_sum, step);
                if (dev::lane() >= step) slot_sum += s, chunk_sum += c;
            }
            if (d < n) {
                p.slot_base[d] = slots_before + slot_sum - slots;
                p.chunk_base[d] = chunks_before + chunk_sum - chunks;
            }
            slots_before += dev::shfl(slot_sum, 31);
            chunks_before += dev::shfl(chunk_sum, 31);
        }
    }
    dev::sync_block();
}

// Everything of a segment to its place. Ranks are over all rounds.
DEVICE void write_segment(const Planner& p, u32 segment) {
    constexpr u32 STRIDE = PLAN_TOKENS + 1, HAS_ROW = 1u << 31;
    const Plan& plan = p.layer.plan;
    const u32 k = p.s.top_k, n = p.s.n_pes, max = p.s.max_tokens, token = segment * PLAN_TOKENS + dev::thread();
    for (u32 d = dev::thread(); d < n; d += PLAN_TOKENS) {
        u32 rows = 0, slots = 0;
        for (u32 i = 0; i < segment; i++) {
            const u32 both = p.dest_counts[u64(i) * n + d];
            rows += both >> 16, slots += both & 0xffff;
        }
        p.rows_before[d] = rows, p.slots_before[d] = slots;
    }
    for (u32 d0 = 0; d0 < n; d0 += PLAN_PES) {
        const u32 some = least(n - d0, PLAN_PES);
        place_tokens(p, segment, d0, some);
        for (u32 j = 0; j < k && token < p.tokens; j++) {
            const u32 choice = token * k + j, e = p.layer.routing.chosen[choice], rank = p.pair_rank[choice];
            if (rank == NONE) continue;
            const u32 d = p.layer.tables.owner[e];
            if (d - d0 >= some) continue;
            u32& at = p.work[(d - d0) * STRIDE + dev::thread()];
            const u32 slot = p.slots_before[d] + (at & 0xffff);
            if (!(at & HAS_ROW)) {
                const u32 row = p.rows_before[d] + (at >> 16);
                plan.row_token[u64(d) * max + row] = token;
                plan.row_slot[u64(d) * (max + 1) + row] = slot;
                at |= HAS_ROW;
            }
            at += 1;
            const u32 place = p.slot_base[d] + slot;
            plan.slot_word[place] = p.layer.tables.local_index[e] << RANK_BITS | rank;
            plan.slot_weight[place] = p.layer.routing.routing_weights[choice];
            plan.slot_choice[place] = choice;
        }
        for (u32 d = d0; d < d0 + some && token < p.tokens; d++) {
            const u32 at = p.work[(d - d0) * STRIDE + dev::thread()];
            plan.token_row[u64(d) * max + token] = at & HAS_ROW ? p.rows_before[d] + ((at & ~HAS_ROW) >> 16) : NONE;
        }
        dev::sync_block();
    }
}

// By block 0: what is known of each PE before the rounds are made; it stands where one round is enough.
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

// By a warp: the rounds of a PE. A round takes chunks until its window or its slots are full; one chunk always fits.
DEVICE void cut_rounds(const Planner& p, u32 d) {
    DestPlan& dest = p.layer.plan.dest[d];
    const u32 rows = dest.rows, chunks = dest.chunks, chunk_rows = p.s.chunk_rows;
    const u32* row_slot = p.layer.plan.row_slot + u64(d) * (p.s.max_tokens + 1);
    u32* round_chunk = p.layer.plan.round_chunk + u64(d) * (p.layer.sizes.max_chunks + 1);
    u32 rounds = 0;
    for (u32 first = 0; first < chunks; rounds++) {
        const u32 first_slot = row_slot[u64(first) * chunk_rows];
        const u32 last = least(chunks, first + p.s.window_chunks);
        u32 end = first + 1;
        for (bool more = true; more && end < last;) {
            const u32 candidate = end + 1 + dev::lane();
            const bool fits = candidate <= last &&
                              row_slot[least(candidate * chunk_rows, rows)] - first_slot <= p.s.round_slots;
            const u32 fitting = count_bits(dev::ballot(fits));
            end += fitting, more = fitting == 32;
        }
        if (dev::lane() == 0) round_chunk[rounds] = first;
        first = end;
    }
    dev::sync_warp();
    if (dev::lane() == 0) round_chunk[rounds] = chunks, dest.rounds = rounds;
}

// By a block: of each expert of a PE, the pairs before the first token of a round, from the segments before and a count of the
// rest. Dropped ones may be among them, but then the expert has no slot from there on.
DEVICE void first_of_round(const Planner& p, u32 d, u32 round) {
    const u32 k = p.s.top_k, experts = p.s.n_experts;
    const u32 chunk = p.layer.plan.round_chunk[u64(d) * (p.layer.sizes.max_chunks + 1) + round];
    const u32 token = p.layer.plan.row_token[u64(d) * p.s.max_tokens + u64(chunk) * p.s.chunk_rows];
    const u32 segment = token / PLAN_TOKENS, mine = segment * PLAN_TOKENS + dev::thread();
    sum_experts(p, segment, p.work);
    for (u32 j = 0; j < k && mine < token; j++) {
        const u32 e = p.layer.routing.chosen[u64(mine) * k + j];
        if (e != NONE) dev::shared_add(&p.work[e], 1);
    }
    dev::sync_block();
    for (u32 e = dev::thread(); e < experts; e += PLAN_TOKENS) {
        if (p.layer.tables.owner[e] == d) p.round_first[u64(round) * experts + e] = p.work[e];
    }
    dev::sync_block();
}

DEVICE void rank_in_rounds(const Planner& p, u32 d) {
    const Plan& plan = p.layer.plan;
    const DestPlan dest = plan.dest[d];
    if (dest.rounds < 2) return;
    const u32* row_slot = plan.row_slot + u64(d) * (p.s.max_tokens + 1);
    const u32* round_chunk = plan.round_chunk + u64(d) * (p.layer.sizes.max_chunks + 1);
    for (u32 row = p.grid_thread(); row < dest.rows; row += p.grid_threads()) {
        const u32 chunk = row / p.s.chunk_rows;
        u32 round = 0, end = dest.rounds;  // the round is in [round, end)
        while (end - round > 1) {
            const u32 middle = (round + end) / 2;
            if (round_chunk[middle] <= chunk) round = middle;
            else end = middle;
        }
        if (round == 0) continue;
        for (u32 i = dest.slot_base + row_slot[row]; i < dest.slot_base + row_slot[row + 1]; i++) {
            const u32 e = p.layer.routing.chosen[plan.slot_choice[i]];
            plan.slot_word[i] -= p.round_first[u64(round) * p.s.n_experts + e];
        }
    }
}

DEVICE bool cut_all_rounds(const Planner& p) {
    const u32 warps = PLAN_TOKENS / 32, n = p.s.n_pes;
    for (u32 d = dev::block() * warps + dev::warp(); d < n; d += dev::blocks() * warps) cut_rounds(p, d);
    if (!plan_barrier(p)) return false;
    u32 item = 0;
    for (u32 d = 0; d < n; d++) {
        for (u32 round = 1; round < p.layer.plan.dest[d].rounds; round++, item++) {
            if (item % dev::blocks() == dev::block()) first_of_round(p, d, round);
        }
    }
    if (!plan_barrier(p)) return false;
    for (u32 d = 0; d < n; d++) rank_in_rounds(p, d);
    return true;
}

// This PE's sums for the losses: those of the router's blocks in their order, and pairs of each expert before any drop. With a
// caller's routing, the tokens alone: the losses are those of the layer's router.
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
    for (u32 i = dev::block(); i < p.segments; i += dev::blocks()) {
        count_experts(p, i);
        if (!p.limited()) count_dests(p, i);
    }
    if (!plan_barrier(p)) return;
    if (has_losses(p.s)) sum_losses(p, routed_by_caller(pass));
    if (p.limited() && !limit_experts(p, pass)) return;
    for (u32 i = dev::block(); i < p.segments; i += dev::blocks()) {
        rank_pairs(p, i);
        if (p.limited()) count_dests(p, i);
    }
    if (p.limited() && !plan_barrier(p)) return;
    sum_dests(p);
    for (u32 i = dev::block(); i < p.segments; i += dev::blocks()) write_segment(p, i);
    if (dev::block() == 0) write_dests(p);
    bool split = false;
    for (u32 d = dev::thread(); d < p.s.n_pes; d += PLAN_TOKENS)
        split |= div_up(p.rows[d], p.s.chunk_rows) > p.s.window_chunks || p.slots[d] > p.s.round_slots;
    // Every block has the same sums, so either all of them go on or none.
    if (!dev::sync_block_or(split) || !plan_barrier(p)) return;
    cut_all_rounds(p);
}
REGISTER_KERNEL(aristos_plan)

}  // namespace aristos
