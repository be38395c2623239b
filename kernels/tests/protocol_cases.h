// What protocol_test.cpp runs: routings and rounds in which the protocol has been wrong or might be, the counters that each pass
// should have, and a comparison of two runs bit by bit.
#pragma once
#include "layer_world.h"

namespace protocol_cases {

using namespace aristos;
using world::Forward;
using world::Layers;
using world::Options;
using world::Snapshot;

// ---- Who reaches whom.
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

// ---- Cases.
inline Options base(u32 n_pes) {
    Options o;
    o.path = world::PATH_SMALL;
    o.n_pes = n_pes, o.hidden = 16, o.intermediate = 16, o.chunk_rows = 4, o.delay_us = 500;
    return o;
}

// Other PEs have tokens in each pass, or none has any; passes without backward in between.
inline Options tokens_come_and_go() {
    Options o = base(3);
    o.experts = 5, o.tokens = 30;
    o.passes = {{{13, 0, 7}, false}, {{0, 21, 0}, false}, {{0, 0, 0}}, {{30, 1, 0}}, {{0, 0, 0}, false}, {{5, 6, 7}}};
    return o;
}
// All rows to one expert through windows of one chunk; then evenly, so that nothing overflows; then again.
inline Options one_expert_in_rounds() {
    Options o = base(4);
    o.top_k = 1, o.tokens = 24, o.round_chunks = 1, o.hot = 1;
    o.passes = {{{24, 9, 24, 3}, false, true}, {{24, 24, 24, 24}, true, true}, {{2, 3, 1, 4}}, {{24, 0, 17, 3}, true, true}};
    return o;
}
// A round is many chunks, which go through one place.
inline Options one_place_in_each_window() {
    Options o = base(3);
    o.top_k = 1, o.tokens = 40, o.window_chunks = 1, o.hot = 1;
    o.passes = {{{40, 33, 17}, true, true}, {{9, 40, 40}}};
    return o;
}
// Rounds that end because slots run out, with everything that has gradients.
inline Options rounds_by_slots() {
    Options o = base(2);
    o.experts = 6, o.top_k = 3, o.tokens = 40, o.round_chunks = 4, o.round_slots = 16, o.shared = 1, o.bias = 1;
    o.passes = {{{40, 33}}, {{7, 40}, false}, {{0, 40}}};
    return o;
}
// PEs with neither tokens nor experts wait for nobody's results.
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
inline Options an_expert_without_tokens() {
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
// A round is many chunks, whose places are used again.
inline Options bulk_in_small_windows() {
    Options o = bulk();
    o.round_chunks = 0;
    return o;
}

// Experts on two of four PEs each; some have no tokens at one of theirs, or at both. More than a channel has places for.
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

// ---- The counters of a pass, from the routing alone.
struct Pair { u32 rows = 0, slots = 0, rounds = 0; std::vector<u32> chunk_rows, chunk_slots, round_chunks; };
inline std::vector<std::vector<Pair>> pairs_of(const Layers& t, u32 pass) {
    const LayerShape& s = t.w->s;
    const auto kept = t.kept(pass);
    std::vector<std::vector<Pair>> all(s.n_pes, std::vector<Pair>(s.n_pes));
    for (u32 from = 0; from < s.n_pes; from++) {
        const auto& chosen = t.seen[from][pass].chosen;
        std::vector<std::vector<std::pair<u32, u32>>> rows(s.n_pes);  // (first local expert, slots)
        for (u32 token = 0; token < chosen.size() / s.top_k; token++) {
            std::vector<u32> slots(s.n_pes, 0);
            for (u32 i = token * s.top_k; i < (token + 1) * s.top_k; i++) {
                const u32 to = kept[from][i] ? t.holder(chosen[i], from) : NONE;
                if (to == NONE) continue;
                if (slots[to]++ == 0) rows[to].push_back({t.w->number(chosen[i], to), 0});
                rows[to].back().second++;
            }
        }
        for (u32 to = 0; to < s.n_pes; to++) {
            Pair& p = all[from][to];
            std::stable_sort(rows[to].begin(), rows[to].end(), [](const auto& a, const auto& b) { return a.first < b.first; });
            for (const auto& row : rows[to]) {
                if (p.rows++ % s.chunk_rows == 0) p.chunk_rows.push_back(0), p.chunk_slots.push_back(0);
                p.chunk_rows.back()++, p.chunk_slots.back() += row.second, p.slots += row.second;
            }
        }
        for (Pair& p : all[from]) {
            u32 chunks = 0, in_round = 0;
            for (u32 slots : p.chunk_slots) {
                if (p.rounds == 0 || chunks == s.round_chunks || in_round + slots > s.round_slots) p.rounds++, chunks = in_round = 0, p.round_chunks.push_back(0);
                p.round_chunks.back()++, chunks++, in_round += slots;
            }
        }
    }
    return all;
}

// One for each wave in which something goes over the network: the headers of a step; its chunks, chunk 0 of all such peers, then chunk 1, in
// waves of window_chunks; and its results in the same way. So no phase has more fences than there are such peers, where a window holds a round.
inline u64 expected_fences(const Layers& t, const std::vector<std::vector<Pair>>& pairs, u32 me, bool backward) {
    const LayerShape& s = t.w->s;
    const u32 n = s.n_pes;
    auto far = [&](u32 pe) { return !t.o.reachable.empty() && !t.o.reachable[me * n + pe] && pe != me; };
    auto overflows = [&](u32 pe) {
        return std::any_of(pairs.begin(), pairs.end(), [&](const auto& of) { return of[pe].rounds > 1; });
    };
    u64 fences = 0, most_rounds = 1;
    // Waves of the messages of the pairs that `of` gives, null where nothing is sent.
    auto chunks = [&](auto of, u64 round) {
        std::vector<bool> wave(n * s.round_chunks / s.window_chunks + 1, false);
        for (u32 index = 0, number = 0; index < s.round_chunks; index++) {
            for (u32 i = 1; i < n; i++) {
                if (!far((me + i) % n)) continue;
                const Pair* p = of((me + i) % n);
                const u32 at = number++ / s.window_chunks;
                CHECK(at < n - 1 || s.window_chunks < s.round_chunks, "more waves than peers");
                if (p && round < p->rounds && index < p->round_chunks[round]) wave[at] = true;
            }
        }
        fences += u64(std::count(wave.begin(), wave.end(), true));
    };
    auto out = [&](u32 pe) { return far(pe) ? &pairs[me][pe] : nullptr; };
    auto in = [&](u32 pe) { return far(pe) ? &pairs[pe][me] : nullptr; };
    auto again = [&](u32 pe) { return overflows(pe) ? out(pe) : nullptr; };
    for (u32 pe = 0; pe < n; pe++) most_rounds = std::max<u64>({most_rounds, pairs[me][pe].rounds, pairs[pe][me].rounds});
    for (u64 round = 0; round < most_rounds; round++) {
        bool header = false;
        for (u32 pe = 0; pe < n; pe++) {
            const Pair* p = backward ? again(pe) : out(pe);
            header = header || (p && (p->rounds > round || (round == 0 && !backward)));
        }
        fences += header;
        if (backward) chunks(again, round);
        chunks(out, round), chunks(in, round);
    }
    bool any = false;
    for (u32 pe = 0; pe < n; pe++) any = any || far(pe);
    if (!backward && t.o.capacity > 0) fences += any;
    return fences;
}

// Bytes of sums: of each unit the others' parts of this PE's values, and the own part's sums to each of them.
inline u64 expected_sums(const world::Pe& p) {
    u64 bytes = 0;
    for (const SumUnit& u : p.sum_units) {
        if (u.parts == 0) continue;
        const u64 elements = u.batch == NONE ? reduce_elements(p.s) : expert_elements(p.s), part = reduce_part(elements, u.parts);
        const u64 begin = std::min(elements, u.me * part), own = std::min(elements, begin + part) - begin;
        bytes += 4 * (elements - own + (u.parts - 1) * own);
    }
    return bytes;
}

inline PassStats expected_stats(const Layers& t, const std::vector<std::vector<Pair>>& pairs, u32 me, bool backward) {
    const LayerShape& s = t.w->s;
    const u32 n = s.n_pes;
    const u64 losses = t.o.aux_loss != 0 || t.o.z_loss != 0 ? 8 * (2 + 2 * s.n_experts) : 0;
    const u64 header = ((4 * (8 + s.max_local) + 7) / 8 * 8 + losses + 15) / 16 * 16;
    auto overflows = [&](u32 pe) {
        bool any = false;
        for (u32 from = 0; from < n; from++) any = any || pairs[from][pe].rounds > 1;
        return any;
    };
    PassStats w{};
    w.rounds = 1;
    for (const auto& row : pairs)
        for (const Pair& p : row) w.rounds = std::max<u64>(w.rounds, p.rounds);
    for (u32 pe = 0; pe < n; pe++) {
        if (pe == me) continue;
        const Pair &out = pairs[me][pe], &in = pairs[pe][me];
        const bool again = backward && overflows(pe);
        const u32 chunks = u32(out.chunk_rows.size()), headers = !backward ? std::max(1u, out.rounds) : again ? out.rounds : 0;
        const u32 copies = again ? 2 : 1;
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
        if (!backward && t.o.capacity > 0) w.header_bytes += s.n_experts * 4, w.puts++, w.signals++;
    }
    w.fences = expected_fences(t, pairs, me, backward);
    if (backward && t.o.copies > 1) w.all_reduce_bytes = expected_sums(*t.w->pes[me]);
    return w;
}

inline void check_stats(const char* what, const PassStats& got, const PassStats& want) {
    CHECK(std::memcmp(&got, &want, offsetof(PassStats, phase_block_ns)) == 0,
          "%s: headers %llu/%llu rows %llu/%llu slots %llu/%llu back %llu/%llu %llu/%llu puts %llu/%llu signals %llu/%llu fences "
          "%llu/%llu rounds %llu/%llu sums %llu/%llu", what,
          (unsigned long long)got.header_bytes, (unsigned long long)want.header_bytes, (unsigned long long)got.dispatch_rows,
          (unsigned long long)want.dispatch_rows, (unsigned long long)got.dispatch_slot_bytes,
          (unsigned long long)want.dispatch_slot_bytes, (unsigned long long)got.combine_rows, (unsigned long long)want.combine_rows,
          (unsigned long long)got.combine_slot_bytes, (unsigned long long)want.combine_slot_bytes, (unsigned long long)got.puts,
          (unsigned long long)want.puts, (unsigned long long)got.signals, (unsigned long long)want.signals,
          (unsigned long long)got.fences, (unsigned long long)want.fences, (unsigned long long)got.rounds,
          (unsigned long long)want.rounds, (unsigned long long)got.all_reduce_bytes, (unsigned long long)want.all_reduce_bytes);
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

// ---- The same bits.
template <class T> bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
// What differs, or null.
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

// One schedule: who reaches whom, numbers of passes and of blocks' kinds follow from the seed.
inline Options scheduled(Options o, u64 seed) {
    const u64 starts[] = {1, (1 << 24) - 1, (u64(1) << 39) - 100};
    o.schedule = seed;
    o.reachable = reach(o.n_pes, Reach(seed % REACHES), seed);
    o.first_pass = starts[seed / REACHES % 3], o.first_forward = o.first_pass + seed % 2;
    o.blocks = 1 + seed / 2 % 5, o.window_chunks = seed % 3;
    return o;
}

}  // namespace protocol_cases
