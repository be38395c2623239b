// aristos_all_reduce: bit for bit the sum in the order of PEs, over peers' memory, over a network, and both.
#include "../all_reduce.h"
#include "route_world.h"

using namespace world;

namespace {

// Every replicated gradient of a PE.
std::vector<std::vector<float>*> replicated(Pe& p) {
    std::vector<std::vector<float>*> all{&p.grad_router};
    for (auto& g : p.shared_gradients) all.push_back(&g);
    if (p.s.shared_gate) all.push_back(&p.grad_gate);
    return all;
}

void run(LayerShape s, const std::vector<u8>& reachable, u32 seed) {
    World w(s, [&](u32 e) { return e % s.n_pes; }, reachable, seed);
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> value(-1, 1);
    for (u64 pass = 1; pass <= 3; pass++) {
        std::vector<std::vector<float>> expected;
        for (u32 pe = 0; pe < s.n_pes; pe++) {
            auto grads = replicated(*w.pes[pe]);
            expected.resize(grads.size());
            for (size_t g = 0; g < grads.size(); g++) {
                for (float& v : *grads[g]) v = value(random) * std::exp2f(float(random() % 20));
                if (pe == 0) expected[g] = *grads[g];
                else
                    for (size_t i = 0; i < grads[g]->size(); i++) expected[g][i] += (*grads[g])[i];
            }
        }
        w.all([&](u32 pe) {
            if (pe == seed % s.n_pes) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            w.launch(pe, KERNEL_ALL_REDUCE, "aristos_all_reduce", w.pass(pe, pass, pass, 0));
        });
        for (u32 pe = 0; pe < s.n_pes; pe++) {
            const ErrorRecord& e = *w.pes[pe]->layer().error;
            CHECK(e.kind == ERROR_NONE, "PE %u: error %u, PE %u, expected %llx, seen %llx", pe, e.kind, e.pe,
                  static_cast<unsigned long long>(e.expected), static_cast<unsigned long long>(e.seen));
            auto grads = replicated(*w.pes[pe]);
            for (size_t g = 0; g < grads.size(); g++) {
                const bool same = !std::memcmp(expected[g].data(), grads[g]->data(), expected[g].size() * 4);
                CHECK(same, "pass %u PE %u: gradient %zu differs", u32(pass), pe, g);
            }
        }
    }
}

// A PE that never comes: the others end with an error that names it.
void missing() {
    LayerShape s = shape();
    s.n_pes = 3;
    s.wait_limit_ns = 2'000'000'000;
    World w(s, [](u32 e) { return e % 3; });
    w.all([&](u32 pe) {
        if (pe != 1) w.launch(pe, KERNEL_ALL_REDUCE, "aristos_all_reduce", w.pass(pe, 1, 1, 0));
    });
    for (u32 pe : {0u, 2u}) {
        const ErrorRecord& e = *w.pes[pe]->layer().error;
        CHECK(e.kind == ERROR_TIMEOUT && e.pe == 1 && e.what == WHAT_ALL_REDUCE && e.expected == (1 << 24) + 1 && e.seen == 0,
              "PE %u: kind %u pe %u what %u", pe, e.kind, e.pe, e.what);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const bool brief = argc > 1 && !std::strcmp(argv[1], "brief");
    for (u32 n : {1u, 2u, 3u, 4u, 8u}) {
        for (u32 network = 0; network < 3; network++) {  // none, everywhere, between pairs of PEs
            if (n == 1 && network > 0) continue;
            if (brief && (n == 4 || n == 8)) continue;
            LayerShape s = shape();
            s.n_pes = n;
            s.stage = network > 0;
            std::vector<u8> reachable;
            for (u32 i = 0; i < n * n; i++)
                reachable.push_back(network == 0 || i / n == i % n || (network == 2 && i / n / 2 == i % n / 2));
            // Little: less than a piece for each. Much: several turns through the places, the last piece short.
            context = "n " + std::to_string(n) + " network " + std::to_string(network) + " little";
            s.n_experts = 9, s.hidden = 8;
            run(s, reachable, n);
            context += ", much";
            s.blocks = 2, s.hidden = 520, s.n_experts = 17;
            s.shared_intermediate = network == 1 ? 24 * n : 8 * n + 8, s.shared_gated = n % 2, s.shared_bias = 1, s.shared_gate = 1;
            if (!brief) s.n_experts = network ? 600 : 300;
            run(s, reachable, n + 10);
        }
    }
    context = "a PE that never comes";
    missing();
    return report("all_reduce_test");
}
