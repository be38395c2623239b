// aristos_plan against a plan built token by token: rows, slots, ranks, chunks, rounds, and the capacity limit over PEs.
#include <algorithm>

#include "../plan.h"
#include "route_world.h"

using namespace world;

namespace {

struct Slot { u32 expert, rank; float weight; u32 choice; };
struct Row { u32 token; std::vector<Slot> slots; u32 number = 0, slots_before = 0; };
struct Dest { std::vector<Row> rows; std::vector<u32> round_chunk; };

// The rows of one PE for each destination. `kept[choice]`: whether the capacity limit keeps the choice.
std::vector<Dest> serial_plan(const Pe& p, const std::vector<u32>& chosen, const std::vector<float>& weights,
                              const std::vector<bool>& kept) {
    const LayerShape& s = p.s;
    std::vector<Dest> all(s.n_pes);
    std::vector<u64> pairs(s.n_experts, 0), assigned(s.n_experts, 0);
    for (u32 choice = 0; choice < chosen.size(); choice++)
        if (kept[choice]) pairs[chosen[choice]]++;
    for (u32 choice = 0; choice < chosen.size(); choice++) {
        if (!kept[choice]) continue;
        const u32 token = choice / s.top_k, e = chosen[choice], first = p.first_holder[e], holders = p.first_holder[e + 1] - first;
        // A holder gets the pairs below its cumulative share. Before the share is rounded down, an offset is added that differs by source
        // and expert.
        u32 holder = 0;
        const u64 offset = u32((s.my_pe + e) * 0x9E3779B9u);
        while (holder + 1 < holders && assigned[e] >= (pairs[e] * p.holder_until[first + holder] + offset) >> 32) holder++;
        assigned[e]++;
        const u32 physical = p.holder_physical[first + holder], pe = p.physical_pe[physical];
        auto& rows = all[pe].rows;
        if (rows.empty() || rows.back().token != token) rows.push_back({token, {}});
        rows.back().slots.push_back({physical - p.first_physical[pe], 0, weights[choice], choice});
    }
    for (Dest& d : all) {
        auto first = [](const Row& row) { return row.slots.front().expert; };
        std::stable_sort(d.rows.begin(), d.rows.end(), [&](const Row& a, const Row& b) { return first(a) < first(b); });
        const u32 chunks = u32((d.rows.size() + s.chunk_rows - 1) / s.chunk_rows);
        u32 in_round = 0, slots_in_round = 0;
        std::vector<u32> ranks(s.max_local, 0);
        for (u32 c = 0; c < chunks; c++) {
            const u32 begin = c * s.chunk_rows, end = std::min<u32>(begin + s.chunk_rows, u32(d.rows.size()));
            u32 slots = 0;
            for (u32 r = begin; r < end; r++) slots += u32(d.rows[r].slots.size());
            if (c == 0 || in_round == s.round_chunks || slots_in_round + slots > s.round_slots) {
                d.round_chunk.push_back(c);
                in_round = slots_in_round = 0;
                ranks.assign(s.max_local, 0);
            }
            in_round++, slots_in_round += slots;
            for (u32 r = begin; r < end; r++)
                for (Slot& slot : d.rows[r].slots) slot.rank = ranks[slot.expert]++;
        }
        d.round_chunk.push_back(chunks);
        for (u32 round = 0; round + 1 < d.round_chunk.size(); round++) {
            std::vector<Row*> back;
            for (u32 r = d.round_chunk[round] * s.chunk_rows; r < d.round_chunk[round + 1] * s.chunk_rows && r < d.rows.size(); r++)
                back.push_back(&d.rows[r]);
            auto last = [](const Row* row) { return row->slots.back().expert; };
            std::stable_sort(back.begin(), back.end(), [&](const Row* a, const Row* b) { return last(a) < last(b); });
            u32 number = d.round_chunk[round] * s.chunk_rows, before = 0;
            for (Row* row : back) row->number = number++, row->slots_before = before, before += u32(row->slots.size());
        }
    }
    return all;
}

void compare(const Pe& p, const std::vector<Dest>& expected, u32 tokens) {
    const Layer& l = p.layer();
    const Plan& plan = l.plan;
    u32 slot_base = 0, chunk_base = 0;
    for (u32 d = 0; d < p.s.n_pes; d++) {
        const Dest& e = expected[d];
        const DestPlan& got = plan.dest[d];
        u32 slots = 0;
        for (auto& r : e.rows) slots += u32(r.slots.size());
        const u32 rounds = u32(e.round_chunk.size()) - 1;
        CHECK(got.rows == e.rows.size() && got.slots == slots && got.slot_base == slot_base, "PE %u to %u: %u rows %u slots from %u",
              p.s.my_pe, d, got.rows, got.slots, got.slot_base);
        CHECK(got.chunks == e.round_chunk.back() && got.return_chunk == chunk_base && got.rounds == rounds,
              "PE %u to %u: %u chunks from %u, %u rounds instead of %u", p.s.my_pe, d, got.chunks, got.return_chunk, got.rounds, rounds);
        if (failures) return;
        for (u32 r = 0; r <= rounds; r++) {
            const u32 chunk = plan.round_chunk[u64(d) * (l.sizes.max_chunks + 1) + r];
            CHECK(chunk == e.round_chunk[r], "to %u: round %u begins at %u instead of %u", d, r, chunk, e.round_chunk[r]);
        }
        const u32* row_slot = plan.row_slot + u64(d) * (p.s.max_tokens + 1);
        std::vector<u32> row_of(tokens, NONE);
        u32 at = 0;
        for (u32 r = 0; r < e.rows.size(); r++) {
            row_of[e.rows[r].token] = r;
            CHECK(plan.row_token[u64(d) * p.s.max_tokens + r] == e.rows[r].token && row_slot[r] == at, "to %u: row %u", d, r);
            const u32 number = plan.row_return[u64(d) * p.s.max_tokens + r];
            CHECK(number == e.rows[r].number, "to %u: row %u returns as number %u instead of %u", d, r, number, e.rows[r].number);
            if (number != e.rows[r].number) return;
            const u32 before = p.s.training ? plan.return_slot[u64(d) * p.s.max_tokens + number] : e.rows[r].slots_before;
            CHECK(before == e.rows[r].slots_before, "to %u: row %u returns after %u slots instead of %u", d, r, before,
                  e.rows[r].slots_before);
            for (const Slot& s : e.rows[r].slots) {
                const u32 i = slot_base + at++, word = plan.slot_word[i];
                CHECK(slot_expert(word) == s.expert && slot_rank(word) == s.rank, "to %u row %u: expert %u rank %u instead of %u %u", d,
                      r, slot_expert(word), slot_rank(word), s.expert, s.rank);
                CHECK(plan.slot_weight[i] == s.weight && plan.slot_choice[i] == s.choice, "to %u row %u: weight or choice", d, r);
            }
        }
        CHECK(row_slot[e.rows.size()] == at, "to %u: end of the slots", d);
        for (u32 t = 0; t < tokens; t++)
            CHECK(plan.token_row[u64(d) * p.s.max_tokens + t] == row_of[t], "to %u: row of token %u", d, t);
        slot_base += slots, chunk_base += got.chunks;
    }
}

enum Skew { EVEN, SKEWED, ONE_EXPERT };

struct Case {
    u32 n_pes, experts, k, max_tokens;
    std::vector<u32> tokens;  // of each PE
    double capacity = 0;
    u32 chunk_rows = 16, round_chunks = 0, round_slots = 0;
    Skew skew = EVEN;
    u32 network = 0;
    u32 losses = 0;
    u32 none = 0;  // one in this many choices has no expert; with a caller's routing, which has no losses
    u32 replicas = 0;  // one in this many experts is on up to three PEs
};

void run(const Case& c, u32 seed) {
    context = "pes " + std::to_string(c.n_pes) + " experts " + std::to_string(c.experts) + " k " + std::to_string(c.k) + " tokens " +
              std::to_string(c.tokens[0]) + " window " + std::to_string(c.round_chunks) + " capacity " + std::to_string(c.capacity) +
              " none " + std::to_string(c.none) + " replicas " + std::to_string(c.replicas) + " seed " + std::to_string(seed);
    LayerShape s = shape();
    s.n_pes = c.n_pes, s.n_experts = c.experts, s.top_k = c.k, s.max_tokens = c.max_tokens;
    s.capacity_factor = c.capacity, s.chunk_rows = c.chunk_rows, s.round_chunks = c.round_chunks, s.round_slots = c.round_slots;
    s.stage = c.network, s.hidden = 8;
    s.aux_loss_coef = c.losses ? 0.1f : 0.0f;
    std::vector<u8> reachable;
    for (u32 i = 0; i < c.n_pes * c.n_pes; i++) reachable.push_back(!c.network || i / c.n_pes == i % c.n_pes);
    // Experts are placed neither contiguously nor evenly; PE 0 has the most.
    auto replicas = [&](u32 e) {
        return c.replicas && e % c.replicas == 0 ? std::vector<u32>{(e + 1) % c.n_pes, (e + 2) % c.n_pes} : std::vector<u32>{};
    };
    World w(s, [&](u32 e) { return e * 7 % 5 == 0 ? 0 : e * 3 % c.n_pes; }, reachable, seed, replicas);
    std::mt19937 random(seed);
    for (u64 forward = 1; forward <= 2; forward++) {
        std::vector<std::vector<u32>> chosen(c.n_pes);
        std::vector<std::vector<float>> weights(c.n_pes);
        for (u32 pe = 0; pe < c.n_pes; pe++) {
            for (u32 t = 0; t < c.tokens[pe]; t++) {
                std::vector<u32> mine;
                while (mine.size() < c.k) {
                    u32 e = random() % c.experts;
                    if (c.skew == SKEWED) e = std::min(e, u32(random() % c.experts));
                    if (c.skew == ONE_EXPERT && mine.empty()) e = c.experts / 2;
                    if (std::find(mine.begin(), mine.end(), e) == mine.end()) mine.push_back(e);
                }
                for (u32& e : mine)
                    if (c.none && random() % c.none == 0) e = NONE;
                std::sort(mine.begin(), mine.end());
                for (u32 e : mine) chosen[pe].push_back(e), weights[pe].push_back(float(random() % 1000));
            }
        }
        // The capacity limit by its definition: in the order of global token indices, it keeps the first ceil(factor k T / E) pairs of an
        // expert.
        std::vector<std::vector<bool>> kept(c.n_pes);
        u64 pairs = 0;
        for (auto& of_pe : chosen) pairs += u64(of_pe.size() - std::count(of_pe.begin(), of_pe.end(), NONE));
        const u64 all_tokens = pairs / c.k;  // tokens with k choices each
        const u64 limit = c.capacity > 0 ? u64(std::ceil(c.capacity * c.k * double(all_tokens) / c.experts)) : ~0ull;
        std::vector<u64> count(c.experts, 0);
        for (u32 pe = 0; pe < c.n_pes; pe++)
            for (u32 e : chosen[pe]) kept[pe].push_back(e != NONE && count[e]++ < limit);

        w.all([&](u32 pe) {
            const Layer& l = w.pes[pe]->layer();
            std::copy(chosen[pe].begin(), chosen[pe].end(), l.routing.chosen);
            std::copy(weights[pe].begin(), weights[pe].end(), l.routing.routing_weights);
            *reinterpret_cast<u64*>(l.plan.scratch + plan_scratch(s).barrier) = 0;  // like aristos_route
            if (c.losses) std::memset(l.plan.scratch + plan_scratch(w.s).loss_parts, 0, plan_scratch(w.s).histogram);
            Pass pass = w.pass(pe, forward * 2 - 1, forward, c.tokens[pe]);
            const i32 ids[1] = {};  // not read by the plan
            if (c.none) pass.ids = ids;
            w.launch(pe, KERNEL_PLAN, "aristos_plan", pass);
        });
        for (u32 pe = 0; pe < c.n_pes; pe++) {
            CHECK(w.pes[pe]->layer().error->kind == ERROR_NONE, "PE %u has an error", pe);
            compare(*w.pes[pe], serial_plan(*w.pes[pe], chosen[pe], weights[pe], kept[pe]), c.tokens[pe]);
            if (!c.losses) continue;
            std::vector<double> routed(c.experts, 0);
            for (u32 e : chosen[pe])
                if (!c.none) routed[e]++;
            const double* mine = w.pes[pe]->layer().losses.mine;
            CHECK(mine[0] == c.tokens[pe], "tokens of the losses");
            for (u32 e = 0; e < c.experts; e++) CHECK(mine[2 + e] == routed[e], "expert %u: %g pairs instead of %g", e, mine[2 + e], routed[e]);
        }
    }
}

// A PE whose counts never arrive, and one whose counts are invalid.
void faults() {
    context = "faults";
    LayerShape s = shape();
    s.n_pes = 2, s.capacity_factor = 1.0, s.wait_limit_ns = 200'000'000;
    for (bool wrong : {false, true}) {
        World w(s, [](u32 e) { return e % 2; });
        const Layer& l = w.pes[0]->layer();
        *reinterpret_cast<u64*>(l.plan.scratch) = 0;
        if (wrong) {
            for (u32 e = 0; e < s.n_experts; e++) l.symmetric.capacity[(s.n_pes + 1) * s.n_experts + e] = e == 3 ? s.max_tokens + 1 : 0;
            l.symmetric.capacity_signal[1] = 1;
        }
        w.launch(0, KERNEL_PLAN, "aristos_plan", w.pass(0, 1, 1, 0));
        const ErrorRecord& e = *l.error;
        CHECK(e.kind == (wrong ? ERROR_PROTOCOL : ERROR_TIMEOUT) && e.pe == 1 && e.what == WHAT_CAPACITY, "kind %u pe %u what %u", e.kind,
              e.pe, e.what);
        if (wrong) CHECK(e.seen == s.max_tokens + 1 && e.index == 3, "seen %u of %u", u32(e.seen), u32(e.index));
    }
}

}  // namespace

int main(int argc, char** argv) {
    const bool brief = argc > 1 && !std::strcmp(argv[1], "brief");
    u32 seed = 1;
    for (u32 tokens : {0u, 1u, 127u, 129u, 256u, 257u, 1000u}) {
        if (brief && tokens > 300) continue;
        for (u32 experts : {1u, 3u, 8u, 60u, 256u}) {
            if (brief && (experts != 60 || tokens == 256)) continue;
            const u32 k = std::min(experts, 1 + seed % 8);
            run({1, experts, k, std::max(tokens, 1u), {tokens}}, seed++);
            run({4, experts, k, 1000, {tokens, 0, 5, 300}}, seed++);
            run({3, experts, k, 1000, {tokens, 300, 1}, 0.5 + seed % 3 * 0.5}, seed++);
        }
    }
    // Many PEs, more experts than are counted in one pass, many choices.
    if (!brief) run({40, 80, 8, 300, std::vector<u32>(40, 70)}, seed++);
    run({18, 40, 8, 20, std::vector<u32>(18, 20)}, seed++);
    if (!brief) run({2, 1100, 8, 600, {600, 520}, 1.0}, seed++);
    run({2, 128, 128, 300, {300, 10}}, seed++);
    // Rounds limited by chunks, by slots, and by both; the last chunk of a round just fits.
    for (Skew skew : {EVEN, SKEWED, ONE_EXPERT}) {
        for (double capacity : {0.0, 1.0}) {
            if (brief && (skew == EVEN || capacity > 0)) continue;
            run({2, 16, 4, 700, {700, 300}, capacity, 8, 1, 0, skew}, seed++);
            run({2, 16, 4, 700, {700, 300}, capacity, 8, 3, 0, skew}, seed++);
            run({3, 12, 3, 1000, {1000, 512, 0}, capacity, 16, 7, 70, skew}, seed++);
            run({3, 12, 3, 1000, {999, 1, 257}, capacity, 4, 40, 64, skew}, seed++);
        }
    }
    run({1, 1, 1, 1000, {1000}, 0.0, 10, 100, 1000, ONE_EXPERT}, seed++);  // one round, to the last slot
    run({1, 1, 1, 1000, {1000}, 0.0, 10, 100, 999, ONE_EXPERT}, seed++);   // one slot too many
    run({1, 1, 1, 1000, {1000}, 0.0, 10, 99, 0, ONE_EXPERT}, seed++);      // one chunk too many
    for (u32 n : {2u, 4u}) run({n, 8, 2, 400, std::vector<u32>(n, 390), 0.75, 16, 0, 0, SKEWED, 1}, seed++);  // over a network
    run({2, 60, 4, 600, {600, 3}, 1.25, 16, 0, 0, SKEWED, 0, 1}, seed++);
    run({1, 8, 2, 600, {600}, 0, 16, 0, 0, SKEWED, 0, 1}, seed++);
    // Tokens with fewer choices, and with none.
    for (u32 none : {1u, 2u, 5u}) {
        run({3, 12, 3, 600, {600, 0, 257}, 0.0, 16, 0, 0, SKEWED, 0, 0, none}, seed++);
        run({3, 12, 3, 600, {599, 1, 257}, 0.75, 4, 40, 64, SKEWED, 0, 1, none}, seed++);
    }
    run({2, 1100, 8, 300, {300, 20}, 0.0, 8, 3, 0, EVEN, 0, 0, 3}, seed++);
    // Experts with replicas, with and without a limit, in rounds, over a network.
    for (u32 replicas : {1u, 3u}) {
        run({3, 12, 3, 700, {700, 0, 257}, 0.0, 16, 0, 0, SKEWED, 0, 1, 0, replicas}, seed++);
        run({4, 40, 4, 300, {300, 1, 64, 290}, 0.75, 8, 3, 0, SKEWED, replicas == 1, 0, 2, replicas}, seed++);
        run({3, 12, 3, 600, {600, 3, 257}, 0.0, 4, 40, 64, ONE_EXPERT, 0, 0, 0, replicas}, seed++);
    }
    if (!brief) run({2, 1100, 8, 300, {300, 20}, 0.9, 8, 3, 0, EVEN, 0, 0, 0, 2}, seed++);
    faults();
    return report("plan_test");
}
