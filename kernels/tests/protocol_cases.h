// Cases of protocol_test.cpp: routings and rounds in which the protocol had errors or might have some, the expected counters of each pass,
// and a bitwise comparison of two runs.
#pragma once
#include "layer_world.h"

namespace protocol_cases {

using namespace aristos;
using world::Forward;
using world::Layers;
using world::Options;
using world::Snapshot;

// ---- Reachability.
enum Reach { REACH_ALL, REACH_NONE, REACH_NODES, REACH_RANDOM, REACHES };
inline std::vector<u8> reach(u32 n, Reach kind, u64 seed) {
    std::mt19937_64 random(seed);
    std::vector<u8> mask(n * n, 1);
    for (u32 i = 0; i < n * n; i++) {
        const u32 from = i / n, to = i % n;
        if (from != to && kind == REACH_NONE) mask[i] = 0;
        if (kind == REACH_NODES) mask[i] = from / 2 == to / 2;
        if (from != to && kind == REACH_RANDOM) mask[i] = random() % 2;
    }
    return mask;
}

// PEs of a host reach each other; most others only over the network.
inline std::vector<u8> reach_hosts(const std::vector<u32>& host_of, u64 seed) {
    const u32 n = u32(host_of.size());
    std::mt19937_64 random(seed);
    std::vector<u8> mask(n * n, 1);
    for (u32 i = 0; i < n * n; i++) mask[i] = host_of[i / n] == host_of[i % n] || (seed % 3 == 0 && random() % 2);
    return mask;
}

// ---- Cases.
inline Options base(u32 n_pes) {
    Options o;
    o.path = world::PATH_SMALL;
    o.n_pes = n_pes, o.hidden = 16, o.intermediate = 16, o.chunk_rows = 4, o.delay_us = 500;
    return o;
}

// The PEs that have tokens change from pass to pass, and in some passes no PE has any. Some passes have no backward.
inline Options varying_tokens() {
    Options o = base(3);
    o.experts = 5, o.tokens = 30;
    o.passes = {{{13, 0, 7}, false}, {{0, 21, 0}, false}, {{0, 0, 0}}, {{30, 1, 0}}, {{0, 0, 0}, false}, {{5, 6, 7}}};
    return o;
}
// In hot passes all tokens choose one expert, whose windows have one chunk. The pass between them has even routing, without overflow.
inline Options one_expert_in_rounds() {
    Options o = base(4);
    o.top_k = 1, o.tokens = 24, o.round_chunks = 1, o.hot = 1;
    o.passes = {{{24, 9, 24, 3}, false, true}, {{24, 24, 24, 24}, true, true}, {{2, 3, 1, 4}}, {{24, 0, 17, 3}, true, true}};
    return o;
}
// A round has many chunks, which share one chunk buffer.
inline Options one_chunk_buffer_per_window() {
    Options o = base(3);
    o.top_k = 1, o.tokens = 40, o.window_chunks = 1, o.hot = 1;
    o.passes = {{{40, 33, 17}, true, true}, {{9, 40, 40}}};
    return o;
}
// A staging buffer has fewer slots than there are peers, and rounds have one chunk: slots are reused across rounds and passes.
inline Options fewer_chunk_buffers_than_peers() {
    Options o = base(4);
    o.top_k = 2, o.tokens = 30, o.round_chunks = 1, o.window_chunks = 1;
    o.passes = {{{30, 9, 30, 17}}, {{30, 30, 0, 5}, false}, {{9, 30, 30, 30}}};
    return o;
}
// Rounds are limited by slots. The layer has a shared expert and biases.
inline Options rounds_by_slots() {
    Options o = base(2);
    o.experts = 6, o.top_k = 3, o.tokens = 40, o.round_chunks = 4, o.round_slots = 16, o.shared = 1, o.bias = 1;
    o.passes = {{{40, 33}}, {{7, 40}, false}, {{0, 40}}};
    return o;
}
// PEs with neither tokens nor experts wait for no results, so they run ahead of the others.
inline Options running_ahead() {
    Options o = base(4);
    o.experts = 2, o.top_k = 1, o.hosts = 1, o.tokens = 10, o.round_chunks = 1;
    for (u32 i = 0; i < 8; i++) o.passes.push_back({{i % 3 ? 8u : 0u, 0, i == 5 ? 10u : 0u, 0}, i % 4 == 3});
    o.delay_us = 3000;
    return o;
}
inline Options losses_and_capacity() {
    Options o = base(3);
    o.experts = 5, o.tokens = 20, o.capacity = 0.9, o.aux_loss = 0.1f, o.z_loss = 0.01f, o.round_chunks = 2;
    o.passes = {{{13, 0, 20}, false}, {{20, 20, 5}}, {{0, 0, 3}, false}, {{1, 20, 20}}};
    return o;
}
inline Options expert_without_tokens() {
    Options o = base(2);
    o.experts = 3, o.hot = 2, o.cold = true, o.bias = 1, o.tokens = 12;
    o.passes = {{{12, 9}, true, true}, {{12, 12}}, {{5, 0}, true, true}};
    return o;
}
inline Options eight_pes() {
    Options o = base(8);
    o.experts = 11, o.tokens = 10, o.round_chunks = 1;
    o.passes = {{{10, 0, 3, 10, 1, 9, 0, 5}}, {{0, 10, 10, 2, 0, 10, 4, 10}}};
    return o;
}
inline Options inference() {
    Options o = base(3);
    o.training = 0, o.tokens = 20, o.round_chunks = 1, o.hot = 0;
    o.passes = {{{20, 3, 11}, false}, {{20, 20, 0}, false, true}, {{0, 20, 20}, false, true}, {{6, 7, 8}, false}};
    return o;
}
inline Options bulk() {
    Options o = base(3);
    o.bulk = 1, o.tokens = 20, o.round_chunks = 1, o.hot = 0, o.shared = 1;
    o.passes = {{{20, 3, 11}, true, true}, {{0, 0, 4}}, {{20, 20, 20}, false}};
    return o;
}
// A round has many chunks, so chunk buffers are reused within it.
inline Options bulk_in_small_windows() {
    Options o = bulk();
    o.round_chunks = 0;
    return o;
}

// Each expert is on two of four PEs; some experts have no tokens on one of the two, or on both. The gradient sums have more steps than a
// channel has buffers.
inline Options replicas() {
    Options o = base(4);
    o.copies = 2, o.host_plan = true, o.experts = 14, o.bias = 1, o.tokens = 24, o.intermediate = 40;
    o.passes = {{{24, 9, 24, 3}}, {{2, 1, 0, 0}}, {{0, 0, 0, 0}}, {{20, 20, 3, 7}}};
    return o;
}
inline Options replicas_in_rounds() {
    Options o = replicas();
    o.top_k = 1, o.round_chunks = 1, o.hot = 1;
    o.passes = {{{24, 9, 24, 3}, true, true}, {{2, 3, 1, 4}}, {{24, 0, 17, 3}, true, true}};
    return o;
}

// Cases with relays. Two hosts of two PEs.
inline Options relays() {
    Options o = base(4);
    o.host_of = {0, 0, 1, 1};
    o.experts = 9, o.top_k = 3, o.tokens = 30, o.bias = 1;
    o.passes = {{{30, 9, 24, 3}}, {{13, 0, 7, 30}, false}, {{0, 0, 0, 0}}, {{1, 30, 2, 21}}};
    return o;
}
// A hot expert, through windows of one chunk.
inline Options relays_in_rounds() {
    Options o = relays();
    o.top_k = 2, o.round_chunks = 1, o.hot = 1, o.tokens = 24;
    o.passes = {{{24, 9, 24, 3}, false, true}, {{24, 24, 24, 24}, true, true}, {{2, 3, 1, 4}}, {{24, 0, 17, 3}, true, true}};
    return o;
}
// A round has many chunks, which share one chunk buffer; the partial results of these chunks share PART_BUFFERS buffers.
inline Options relays_with_one_chunk_buffer() {
    Options o = relays();
    o.tokens = 40, o.window_chunks = 1, o.chunk_rows = 2;
    o.passes = {{{40, 33, 17, 0}}, {{9, 40, 40, 12}}};
    return o;
}
// Rounds limited by one PE's slots.
inline Options relays_by_slots() {
    Options o = relays();
    o.round_slots = 12, o.tokens = 40, o.passes = {{{40, 33, 0, 21}}, {{7, 40, 40, 1}, false}, {{0, 40, 5, 40}}};
    return o;
}
// Hosts of three, one and two PEs with interleaved numbers, and PEs without experts.
inline Options unequal_hosts() {
    Options o = base(6);
    o.host_of = {5, 1, 5, 2, 2, 5};
    o.experts = 11, o.hosts = 5, o.tokens = 18, o.shared = 1, o.aux_loss = 0.1f;
    o.passes = {{{18, 0, 3, 18, 1, 9}}, {{0, 18, 10, 2, 0, 18}}, {{18, 18, 18, 18, 18, 18}, false}};
    return o;
}
// Inference: no backward pass uses the rows that the windows still hold.
inline Options relays_in_inference() {
    Options o = relays();
    o.training = 0, o.hot = 0;
    o.passes = {{{20, 3, 11, 30}, false}, {{20, 20, 0, 1}, false, true}, {{0, 20, 30, 9}, false, true}};
    return o;
}
inline Options relays_running_ahead() {
    Options o = running_ahead();
    o.host_of = {0, 0, 1, 1};
    return o;
}

// Two groups of different sizes, each with all experts. Gradients are summed and losses and capacity counted over both.
inline Options groups() {
    Options o = base(5);
    o.group_of = {1, 0, 0, 1, 0};
    o.experts = 7, o.tokens = 20, o.bias = 1, o.capacity = 0.9, o.aux_loss = 0.1f, o.z_loss = 0.01f;
    o.passes = {{{20, 9, 14, 3, 20}}, {{13, 0, 7, 20, 1}, false}, {{0, 0, 0, 0, 5}}, {{1, 20, 2, 11, 0}}};
    return o;
}
// Two groups on two hosts of three PEs: on each host one group has one PE, and the other two. A row is sent once per host.
inline Options groups_of_hosts() {
    Options o = groups();
    o.n_pes = 6, o.host_of = {0, 0, 1, 1, 0, 1}, o.group_of = {1, 0, 0, 1, 1, 0};
    o.top_k = 3;
    o.passes = {{{20, 9, 14, 3, 20, 8}}, {{13, 0, 7, 20, 1, 0}, false}, {{0, 0, 0, 0, 5, 0}}, {{1, 20, 2, 11, 0, 19}}};
    return o;
}
inline Options groups_in_rounds() {
    Options o = groups_of_hosts();
    o.capacity = 0, o.top_k = 2, o.round_chunks = 1, o.hot = 1;
    o.passes = {{{20, 9, 20, 3, 20, 8}, false, true}, {{20, 20, 20, 20, 20, 20}, true, true}, {{2, 3, 1, 4, 0, 5}}};
    return o;
}
inline Options groups_with_one_chunk_buffer() {
    Options o = groups_of_hosts();
    o.capacity = 0, o.tokens = 40, o.window_chunks = 1, o.chunk_rows = 2;
    o.passes = {{{40, 33, 17, 0, 8, 40}}, {{9, 40, 40, 12, 40, 0}}};
    return o;
}
// Three groups: two PEs on one host; one PE on one host and three on the other; two PEs on each host.
inline Options group_within_a_host() {
    Options o = groups_of_hosts();
    o.n_pes = 10, o.host_of = {4, 4, 2, 2, 4, 2, 2, 4, 2, 4}, o.group_of = {0, 1, 1, 1, 0, 1, 2, 2, 2, 2};
    o.tokens = 12;
    o.passes = {{{12, 9, 4, 3, 12, 8, 0, 7, 12, 2}}, {{3, 0, 7, 12, 1, 0, 12, 12, 5, 9}}};
    return o;
}

// ---- Expected counters of a pass, from the routing alone.
struct Pair {
    u32 rows = 0, slots = 0, rounds = 0;
    std::vector<u32> chunk_rows, round_chunks;
    std::vector<u32> member_rows, member_slots;  // per PE that the destination represents
};
inline std::vector<std::vector<Pair>> pairs_of(const Layers& t, u32 pass) {
    const u32 n = t.o.n_pes;
    const auto kept = t.kept(pass);
    std::vector<std::vector<Pair>> all(n, std::vector<Pair>(n));
    for (u32 from = 0; from < n; from++) {
        const LayerShape& s = t.w->pes[from]->s;
        const auto& chosen = t.seen[from][pass].chosen;
        struct Row { u32 first = NONE; std::vector<u32> slots; };  // per PE that the destination represents
        std::vector<std::vector<Row>> rows(n);
        for (u32 token = 0; token < chosen.size() / s.top_k; token++) {
            std::vector<Row> of(n);
            for (u32 i = token * s.top_k; i < (token + 1) * s.top_k; i++) {
                if (!kept[from][i]) continue;
                const u32 holder = t.holder(chosen[i], from), to = t.w->relay_for(from, holder), number = t.w->number_for(from, chosen[i], holder);
                of[to].slots.resize(t.w->split(from, to), 0);
                of[to].slots[number % t.w->split(from, to)]++;
                of[to].first = std::min(of[to].first, number);
            }
            for (u32 to = 0; to < n; to++)
                if (of[to].first != NONE) rows[to].push_back(of[to]);
        }
        for (u32 to = 0; to < n; to++) {
            Pair& p = all[from][to];
            const u32 split = t.w->split(from, to);
            p.member_rows.assign(split, 0), p.member_slots.assign(split, 0);
            std::stable_sort(rows[to].begin(), rows[to].end(), [](const auto& a, const auto& b) { return a.first < b.first; });
            std::vector<std::vector<u32>> chunk_slots;
            for (const auto& row : rows[to]) {
                if (p.rows++ % s.chunk_rows == 0) p.chunk_rows.push_back(0), chunk_slots.emplace_back(split, 0);
                p.chunk_rows.back()++;
                for (u32 m = 0; m < split; m++) {
                    chunk_slots.back()[m] += row.slots[m], p.slots += row.slots[m];
                    p.member_rows[m] += row.slots[m] > 0, p.member_slots[m] += row.slots[m];
                }
            }
            u32 chunks = 0;
            std::vector<u32> in_round(split, 0);
            for (const auto& slots : chunk_slots) {
                bool full = false;
                for (u32 m = 0; m < split; m++) full = full || in_round[m] + slots[m] > s.round_slots;
                if (p.rounds == 0 || chunks == s.round_chunks || full) p.rounds++, chunks = 0, in_round.assign(split, 0), p.round_chunks.push_back(0);
                p.round_chunks.back()++, chunks++;
                for (u32 m = 0; m < split; m++) in_round[m] += slots[m];
            }
        }
    }
    return all;
}

inline bool is_inter_node(const Layers& t, u32 me, u32 pe) { return !t.o.reachable.empty() && !t.o.reachable[me * t.o.n_pes + pe] && pe != me; }
// Without relays all PEs count as one host.
inline bool same_host(const Layers& t, u32 me, u32 pe) { return t.w->intra_node(me, pe); }
// Whether rows for `pe` are sent again in backward; with relays, whether any destination has several rounds.
inline bool overflows_at(const Layers& t, const std::vector<std::vector<Pair>>& pairs, u32 pe) {
    bool any = false;
    for (u32 from : t.w->peers(pe))
        for (u32 to : t.w->peers(pe)) any = any || ((to == pe || t.w->pes[pe]->s.relays) && pairs[from][to].rounds > 1);
    return any;
}

// One fence for each send group with at least one message. The send groups of a step are its headers; its chunks, in groups of
// window_chunks (chunk 0 for all inter-node peers, then chunk 1, ...); and its results, likewise. If a window holds all chunks that any one
// inter-node peer receives or returns, a phase has at most one fence per inter-node peer. If a window holds 1/n of these chunks, a phase
// has at most n fences per peer.
inline u64 expected_fences(const Layers& t, const std::vector<std::vector<Pair>>& pairs, u32 me, bool backward) {
    const LayerShape& s = t.w->pes[me]->s;
    const auto& group = t.w->peers(me);
    const u32 n = s.n_pes;
    const auto inter_node = [&](u32 pe) { return is_inter_node(t, me, pe); };
    // Destinations of rows, and of results.
    const auto out_inter_node = [&](u32 pe) { return inter_node(pe) && t.w->relay_for(me, pe) == pe; };
    const auto in_inter_node = [&](u32 pe) { return inter_node(pe) && (same_host(t, me, pe) || t.w->is_relay_of(me, pe)); };
    auto overflows = [&](u32 pe) { return overflows_at(t, pairs, pe); };
    u64 fences = 0, most_rounds = 1;
    // Counts the send groups of one round's chunks. `of` returns the rows sent to a PE, null if there are none; `listed`, whether the PE's
    // chunks are numbered.
    auto chunks = [&](auto of, auto listed, u64 round) {
        std::vector<bool> group_used(n * s.round_chunks / s.window_chunks + 1, false);
        u32 peers = 0, most = 0;
        for (u32 index = 0, number = 0; index < s.round_chunks; index++) {
            for (u32 i = 1; i < n; i++) {
                const u32 pe = group[(s.my_pe + i) % n];
                if (!listed(pe)) continue;
                const Pair* p = of(pe);
                const u32 at = number++ / s.window_chunks, count = p && round < p->rounds ? p->round_chunks[round] : 0;
                if (index < count) group_used[at] = true;
                most = std::max(most, count), peers += index == 0;
            }
        }
        const u64 groups = u64(std::count(group_used.begin(), group_used.end(), true));
        CHECK(groups <= (u64(peers) * most + s.window_chunks - 1) / s.window_chunks, "%llu send groups to %u peers of at most %u chunks", (unsigned long long)groups, peers, most);
        if (most <= s.window_chunks) CHECK(groups <= peers, "%llu send groups to %u peers", (unsigned long long)groups, peers);
        fences += groups;
    };
    auto out = [&](u32 pe) { return out_inter_node(pe) ? &pairs[me][pe] : nullptr; };
    auto in = [&](u32 pe) { return in_inter_node(pe) ? &pairs[pe][me] : nullptr; };
    auto again = [&](u32 pe) { return overflows(pe) ? out(pe) : nullptr; };
    for (u32 pe : group) most_rounds = std::max<u64>({most_rounds, pairs[me][pe].rounds, pairs[pe][t.w->relay_for(pe, me)].rounds});
    for (u64 round = 0; round < most_rounds; round++) {
        bool header = false;
        for (u32 pe : group) {
            const Pair* p = backward ? again(pe) : out(pe);
            header = header || (p && (p->rounds > round || (round == 0 && !backward)));
        }
        fences += header;
        if (backward) chunks(again, out_inter_node, round);
        chunks(out, out_inter_node, round), chunks(in, in_inter_node, round);
    }
    bool any = false;
    for (u32 pe = 0; pe < t.o.n_pes; pe++) any = any || inter_node(pe);
    if (!backward) fences += any * ((t.o.capacity > 0) + t.sums_losses());
    return fences;
}

// Bytes that PE `p` sends to sum gradients, counting only the destinations for which `of` is true. For each unit, every other holder gets
// p's values of that holder's part, and the sums of p's own part.
template <class Of> u64 expected_sums(const world::Pe& p, Of of) {
    u64 bytes = 0;
    for (const SumUnit& u : p.sum_units) {
        if (u.parts == 0) continue;
        const u64 elements = u.batch == NONE ? reduce_elements(p.s) : expert_elements(p.s), part = reduce_part(elements, u.parts);
        auto length = [&](u32 holder) { return std::min(elements, (holder + 1) * part) - std::min(elements, holder * part); };
        for (u32 holder = 0; holder < u.parts; holder++)
            if (holder != u.me && of(p.sum_holders[u.first + holder].pe)) bytes += 4 * (length(holder) + length(u.me));
    }
    return bytes;
}

// Puts that sum gradients, each with a signal, and their fences. For each unit, every other holder gets this PE's values of that holder's
// part, and the sums of this PE's own part, in pieces. A step has one piece per channel. All its values for the network share one fence,
// and so do all its sums.
struct SumCounts { u64 puts = 0, fences = 0; };
template <class Far> SumCounts expected_sum_counts(const world::Pe& p, Far inter_node) {
    SumCounts c;
    const ReduceShape r = reduce_shape(p.s);
    for (const SumUnit& u : p.sum_units) {
        if (u.parts == 0) continue;
        const u64 elements = u.batch == NONE ? reduce_elements(p.s) : expert_elements(p.s), part = reduce_part(elements, u.parts);
        auto pieces = [&](u32 holder) { return (std::min(elements, (holder + 1) * part) - std::min(elements, holder * part) + r.piece - 1) / r.piece; };
        u64 sends = 0, sums = 0;  // steps whose values, and sums, go over the network
        for (u32 holder = 0; holder < u.parts; holder++) {
            if (holder == u.me) continue;
            c.puts += pieces(holder) + pieces(u.me);
            if (!inter_node(p.sum_holders[u.first + holder].pe)) continue;
            sends = std::max(sends, (pieces(holder) + r.channels - 1) / r.channels), sums = (pieces(u.me) + r.channels - 1) / r.channels;
        }
        c.fences += sends + sums;
    }
    return c;
}

// Adds to `w` the work of PE `me` for the rows of an inter-node `source`, except the results that a relay returns to the source.
inline void expect_relays(PassStats& w, const Layers& t, const Pair& rows, u32 me, u32 source, bool backward, bool again) {
    const LayerShape& s = t.w->pes[me]->s;
    const u32 chunks = u32(rows.chunk_rows.size()), copies = again ? 2 : 1, headers = !backward ? std::max(1u, rows.rounds) : again ? rows.rounds : 0;
    const auto here = t.w->members(me);
    const u32 member = u32(std::find(here.begin(), here.end(), me) - here.begin());
    if (again) w.signals += chunks;  // consumption reports: of chunks sent again and of chunks whose buffer is reused
    for (u32 count : rows.round_chunks) w.signals += copies * (count > s.window_chunks ? count - s.window_chunks : 0);
    if (again)
        for (u32 count : rows.round_chunks) w.signals -= count > s.window_chunks ? count - s.window_chunks : 0;
    if (t.w->is_relay_of(me, source)) {
        w.signals += (here.size() - 1) * (headers + copies * chunks);
        for (u32 count : rows.round_chunks)
            if (count > PART_BUFFERS) w.signals += (here.size() - 1) * (count - PART_BUFFERS);
        return;
    }
    w.puts += chunks, w.signals += chunks;
    w.relay_bytes += u64(copies + 1) * rows.member_rows[member] * s.hidden * 2 + (backward ? 4 * rows.member_slots[member] : 0);
}

inline PassStats expected_stats(const Layers& t, const std::vector<std::vector<Pair>>& pairs, u32 me, bool backward) {
    const LayerShape& s = t.w->pes[me]->s;
    const u32 n = t.o.n_pes;
    const u64 losses = t.o.aux_loss != 0 || t.o.z_loss != 0 ? 8 * (2 + 2 * s.n_experts) : 0;
    const u64 header = ((4 * (8 + s.max_local) + 7) / 8 * 8 + losses + 15) / 16 * 16;
    auto overflows = [&](u32 pe) { return overflows_at(t, pairs, pe); };
    PassStats w{};
    w.rounds = 1;
    for (u32 from : t.w->peers(me))
        for (const Pair& p : pairs[from]) w.rounds = std::max<u64>(w.rounds, p.rounds);
    for (u32 pe = 0; pe < n; pe++) {
        if (pe == me) continue;
        if (!backward && t.o.capacity > 0) {
            w.header_bytes += s.n_experts * 4, w.puts++, w.signals++;
            if (is_inter_node(t, me, pe)) w.network_bytes += s.n_experts * 4;
        }
        if (!backward && t.sums_losses()) {
            w.all_reduce_bytes += losses, w.puts++, w.signals++;
            if (is_inter_node(t, me, pe)) w.network_bytes += losses;
        }
        if (t.w->group[pe] != t.w->group[me]) continue;
        if (!same_host(t, me, pe)) expect_relays(w, t, pairs[pe][t.w->relay_for(pe, me)], me, pe, backward, backward && overflows(pe));
        if (t.w->relay_for(me, pe) != pe && !t.w->is_relay_of(me, pe)) continue;
        const Pair none, &out = pairs[me][pe], &in = same_host(t, me, pe) || t.w->is_relay_of(me, pe) ? pairs[pe][me] : none;
        const bool again = backward && overflows(pe), sends = t.w->relay_for(me, pe) == pe;
        const u32 chunks = u32(out.chunk_rows.size()), headers = !sends ? 0 : !backward ? std::max(1u, out.rounds) : again ? out.rounds : 0;
        const u32 copies = again ? 2 : 1;
        if (is_inter_node(t, me, pe)) {
            w.network_bytes += headers * header + u64(copies) * out.rows * s.hidden * 2 + u64(in.rows) * s.hidden * 2;
            w.network_bytes += (!backward || again ? 4 * out.rows + 8 * out.slots : 0) + (backward ? 4 * in.slots : 0);
        }
        w.header_bytes += headers * header;
        w.dispatch_rows += copies * out.rows;
        w.dispatch_row_bytes += u64(copies) * out.rows * s.hidden * 2;
        if (!backward || again) w.dispatch_slot_bytes += 4 * out.rows + 8 * out.slots;
        w.combine_rows += in.rows;
        w.combine_row_bytes += u64(in.rows) * s.hidden * 2;
        if (backward) w.combine_slot_bytes += 4 * in.slots;
        const u64 messages = headers + copies * chunks + in.chunk_rows.size();
        w.puts += messages, w.signals += messages;
        if (backward && overflows(me)) w.signals += in.chunk_rows.size();  // acknowledgements
        for (u32 count : in.round_chunks)
            if (count > s.window_chunks) w.signals += (backward && overflows(me) ? 2 : 1) * (count - s.window_chunks);  // credits
    }
    w.fences = expected_fences(t, pairs, me, backward);
    if (backward && t.o.copies > 1) {
        w.all_reduce_bytes = expected_sums(*t.w->pes[me], [](u32) { return true; });
        const auto inter_node = [&](u32 pe) { return is_inter_node(t, me, pe); };
        w.network_bytes += expected_sums(*t.w->pes[me], inter_node);
        const SumCounts sums = expected_sum_counts(*t.w->pes[me], inter_node);
        w.puts += sums.puts, w.signals += sums.puts, w.fences += sums.fences;
    }
    return w;
}

inline void check_stats(const char* what, const PassStats& got, const PassStats& want) {
    CHECK(std::memcmp(&got, &want, offsetof(PassStats, phase_block_ns)) == 0,
          "%s: headers %llu/%llu rows %llu/%llu slots %llu/%llu back %llu/%llu %llu/%llu puts %llu/%llu signals %llu/%llu fences "
          "%llu/%llu rounds %llu/%llu sums %llu/%llu network %llu/%llu relayed %llu/%llu", what,
          (unsigned long long)got.header_bytes, (unsigned long long)want.header_bytes, (unsigned long long)got.dispatch_rows,
          (unsigned long long)want.dispatch_rows, (unsigned long long)got.dispatch_slot_bytes,
          (unsigned long long)want.dispatch_slot_bytes, (unsigned long long)got.combine_rows, (unsigned long long)want.combine_rows,
          (unsigned long long)got.combine_slot_bytes, (unsigned long long)want.combine_slot_bytes, (unsigned long long)got.puts,
          (unsigned long long)want.puts, (unsigned long long)got.signals, (unsigned long long)want.signals,
          (unsigned long long)got.fences, (unsigned long long)want.fences, (unsigned long long)got.rounds,
          (unsigned long long)want.rounds, (unsigned long long)got.all_reduce_bytes, (unsigned long long)want.all_reduce_bytes,
          (unsigned long long)got.network_bytes, (unsigned long long)want.network_bytes, (unsigned long long)got.relay_bytes,
          (unsigned long long)want.relay_bytes);
}

inline void check_counters(const Layers& t) {
    for (u32 i = 0; i < t.o.passes.size(); i++) {
        const auto pairs = pairs_of(t, i);
        for (u32 pe = 0; pe < t.o.n_pes; pe++) {
            const Snapshot& s = t.seen[pe][i];
            check_stats("forward", s.forward, expected_stats(t, pairs, pe, false));
            if (t.o.passes[i].backward) check_stats("backward", s.backward, expected_stats(t, pairs, pe, true));
            for (u32 e = 0; e < t.o.experts; e++) {
                const u32 number = t.w->number(e, pe);
                if (number == NONE) continue;
                u32 slots = 0;
                const auto kept = t.kept(i);
                for (u32 from = 0; from < t.o.n_pes; from++)
                    for (u32 k = 0; k < kept[from].size() && t.holder(e, from) == pe; k++) slots += kept[from][k] && t.seen[from][i].chosen[k] == e;
                const u32 got = s.expert_rows[number];
                CHECK(got == slots, "expert %u: %u rows instead of %u", e, got, slots);
            }
        }
    }
}

// ---- Bitwise comparison.
template <class T> bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
// Names the first difference; null if there is none.
inline const char* difference(const Snapshot& a, const Snapshot& b) {
    if (!a.done || !b.done) return "an unfinished pass";
    if (!same_bits(a.out, b.out)) return "output";
    if (!same_bits(a.dx, b.dx)) return "input gradient";
    if (!same_bits(a.chosen, b.chosen) || !same_bits(a.weights, b.weights)) return "routing";
    if (!same_bits(a.d_weights, b.d_weights) || !same_bits(a.d_shared_weight, b.d_shared_weight)) return "weight gradient";
    if (!same_bits(a.expert_rows, b.expert_rows) || !same_bits(a.loss_sums, b.loss_sums)) return "counts";
    for (u32 i = 0; i < a.gradients.size(); i++)
        if (!same_bits(a.gradients[i], b.gradients[i])) return "gradients";
    return nullptr;
}
inline std::string difference(const Layers& got, const std::vector<std::vector<Snapshot>>& want) {
    for (u32 pe = 0; pe < got.o.n_pes; pe++) {
        const ErrorRecord& e = *got.w->pes[pe]->layer().error;
        char text[200];
        std::snprintf(text, sizeof text, "pe %u: error %u pe %u what %u phase %u expected %llx seen %llx index %llu", pe, e.kind, e.pe,
                      e.what, e.phase, (unsigned long long)e.expected, (unsigned long long)e.seen, (unsigned long long)e.index);
        if (e.kind) return text;
    }
    for (u32 i = 0; i < got.o.passes.size(); i++) {
        for (u32 pe = 0; pe < got.o.n_pes; pe++)
            if (const char* what = difference(got.seen[pe][i], want[pe][i]))
                return std::string(what) + " of pe " + std::to_string(pe) + " in pass " + std::to_string(i);
    }
    return "";
}

// One schedule of a case. The seed determines reachability, pass numbers, the number of blocks, the window and the emulator's schedule.
inline Options scheduled(Options o, u64 seed) {
    const u64 starts[] = {1, (1 << 24) - 1, (u64(1) << 39) - 100};
    o.schedule = seed;
    o.reachable = o.host_of.empty() ? reach(o.n_pes, Reach(seed % REACHES), seed) : reach_hosts(o.host_of, seed);
    o.first_pass = starts[seed / REACHES % 3], o.first_forward = o.first_pass + seed % 2;
    o.blocks = 1 + seed / 2 % 5, o.window_chunks = seed % 3;
    return o;
}

}  // namespace protocol_cases
