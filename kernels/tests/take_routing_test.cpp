// aristos_take_routing: sorts a caller's choices, keeps their indices in the caller's routing, and reports invalid ones. Also
// aristos_accumulate.
#include <algorithm>
#include <limits>

#include "../accumulate.h"
#include "../take_routing.h"
#include "route_world.h"

using namespace world;

namespace {

struct Choices {
    std::vector<i32> ids;
    std::vector<float> weights;
};

// Distinct experts in random order, and some choices without an expert.
Choices random_choices(const LayerShape& s, u32 tokens, std::mt19937& random) {
    Choices c;
    std::vector<i32> all(s.n_experts);
    for (u32 e = 0; e < s.n_experts; e++) all[e] = i32(e);
    for (u32 t = 0; t < tokens; t++) {
        std::shuffle(all.begin(), all.end(), random);
        for (u32 j = 0; j < s.top_k; j++) {
            c.ids.push_back(random() % 4 ? all[j] : -1);
            c.weights.push_back(c.ids.back() < 0 ? NAN : float(i32(random() % 2000) - 1000));
        }
    }
    return c;
}

Pass pass_of(World& w, const Choices& c, u32 tokens) {
    Pass pass = w.pass(0, 1, 1, tokens);
    pass.ids = c.ids.data(), pass.weights = c.weights.data();
    return pass;
}

void sorts(u32 tokens, u32 experts, u32 k, u32 seed) {
    context = "tokens " + std::to_string(tokens) + " experts " + std::to_string(experts) + " k " + std::to_string(k);
    LayerShape s = shape();
    s.n_experts = experts, s.top_k = k, s.max_tokens = tokens + 3;
    World w(s, [](u32) { return 0; });
    const Layer& l = w.pes[0]->layer();
    std::mt19937 random(seed);
    const Choices c = random_choices(s, tokens, random);
    std::memset(l.stats, 0xff, sizeof(PassStats));
    if (!w.launch(0, KERNEL_TAKE_ROUTING, "aristos_take_routing", pass_of(w, c, tokens))) return;
    for (u64 i = 0; i < sizeof(PassStats) / 8; i++) CHECK(reinterpret_cast<u64*>(l.stats)[i] == 0, "counter %u is not cleared", u32(i));
    CHECK(*reinterpret_cast<u64*>(l.plan.scratch + plan_scratch(w.s).barrier) == 0, "the plan's barrier is not cleared");
    CHECK(l.error->kind == ERROR_NONE, "error %u", l.error->kind);
    for (u32 t = 0; t < tokens; t++) {
        std::vector<u32> order(k);
        for (u32 j = 0; j < k; j++) order[j] = j;
        const i32* ids = &c.ids[u64(t) * k];
        std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return u32(ids[a]) < u32(ids[b]); });
        for (u32 j = 0; j < k; j++) {
            const u64 at = u64(t) * k + j;
            const u32 from = order[j];
            const float weight = ids[from] < 0 ? 0.0f : c.weights[u64(t) * k + from];
            CHECK(l.routing.chosen[at] == u32(ids[from]) && l.routing.columns[at] == from, "token %u choice %u: expert %u of column %u instead of %d of %u",
                  t, j, l.routing.chosen[at], l.routing.columns[at], ids[from], from);
            CHECK(l.routing.routing_weights[at] == weight, "token %u choice %u: weight %g", t, j, l.routing.routing_weights[at]);
        }
    }
    for (u32 j = 0; j < k; j++) CHECK(l.routing.chosen[u64(tokens) * k + j] == 0xa5a5a5a5, "choices beyond the tokens");
}

// An invalid choice is named, and later kernels do not see it.
void refuses(i32 wrong, bool twice) {
    context = "wrong id " + std::to_string(wrong);
    LayerShape s = shape();
    s.n_experts = 13, s.top_k = 5;
    World w(s, [](u32) { return 0; });
    const Layer& l = w.pes[0]->layer();
    std::mt19937 random(u32(wrong) + 3);
    const u32 tokens = 50, token = 37;
    Choices c = random_choices(s, tokens, random);
    const i32 others[] = {4, 7, -1, 2, 9};
    std::copy(others, others + 5, &c.ids[token * 5]);
    c.ids[token * 5 + 3] = wrong;
    if (!w.launch(0, KERNEL_TAKE_ROUTING, "aristos_take_routing", pass_of(w, c, tokens))) return;
    const ErrorRecord& e = *l.error;
    CHECK(e.kind == ERROR_ROUTING && e.what == (twice ? WHAT_TWICE : WHAT_NO_EXPERT), "kind %u what %u", e.kind, e.what);
    CHECK(e.index == token && i32(u32(e.seen)) == wrong && e.expected == 13, "token %u id %d of %u", u32(e.index), i32(u32(e.seen)), u32(e.expected));
    for (u32 t = 0; t < tokens; t++) {
        std::vector<u32> of(l.routing.chosen + t * 5, l.routing.chosen + t * 5 + 5);
        std::sort(of.begin(), of.end());
        for (u32 j = 0; j < 5; j++)
            CHECK(of[j] == NONE || (of[j] < 13 && (j == 0 || of[j] != of[j - 1])), "token %u is left expert %u", t, of[j]);
    }
}

void accumulates() {
    context = "accumulate";
    LayerShape s = shape();
    World w(s, [](u32) { return 0; });
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const u64 count = 4 * 1003;
    struct alignas(16) Piece { float v[4]; };
    std::vector<Piece> sum(count / 4), last(count / 4);
    float *to = sum[0].v, *from = last[0].v;
    std::vector<float> want(count);
    for (u32 pass = 0; pass < 3; pass++) {
        u32 begin = pass == 0;
        for (u64 i = 0; i < count; i++) from[i] = normal(random), want[i] = begin ? from[i] : want[i] + from[i];
        u64 n = count;
        void* args[] = {&to, &from, &n, &begin};
        const int status = aristos_host_launch(w.handle, 0, "aristos_accumulate", 3, 256, 0, args);
        CHECK(status == 0, "%s", aristos_host_error());
        CHECK(std::memcmp(to, want.data(), count * 4) == 0, "pass %u", pass);
    }
}

}  // namespace

int main() {
    u32 seed = 1;
    for (u32 tokens : {0u, 1u, 31u, 32u, 100u})
        for (u32 k : {1u, 2u, 8u, 33u, 128u}) sorts(tokens, 130, k, seed++);
    sorts(70, 3, 3, seed++);
    for (i32 wrong : {13, 1 << 20, -2, std::numeric_limits<i32>::min(), std::numeric_limits<i32>::max()}) refuses(wrong, false);
    for (i32 twice : {4, 7, 9}) refuses(twice, true);
    accumulates();
    return report("take_routing_test");
}
