// Tests of aristos_all_reduce: sums must equal those in holder order, bit for bit. The tests run over peers' memory, over a network, and
// over both, for replicated gradients and for those of experts that several PEs hold.
#include "../all_reduce.h"
#include "route_world.h"

using namespace world;

namespace {

// All replicated gradients of a PE.
std::vector<std::vector<float>*> replicated(Pe& p) {
    std::vector<std::vector<float>*> all{&p.grad_router};
    for (auto& g : p.shared_gradients) all.push_back(&g);
    if (p.s.shared_gate) all.push_back(&p.grad_gate);
    return all;
}

// The PEs that hold expert `e` in addition to PE e % n.
std::vector<u32> replicas_of(u32 e, u32 n) {
    return e % 3 == 0 ? std::vector<u32>{(e + 1) % n, (e + 2) % n} : e % 3 == 1 ? std::vector<u32>{0} : std::vector<u32>{};
}
struct Experts {
    std::vector<std::vector<float>> values;  // by PE: all local experts' gradients
    World& w;
    const u64 each;  // elements of a matrix

    explicit Experts(World& of) : values(of.s.n_pes), w(of), each(u64(w.s.hidden) * w.s.intermediate) {
        for (u32 pe = 0; pe < w.s.n_pes; pe++) {
            Pe& p = *w.pes[pe];
            values[pe].assign(p.s.n_local * 3 * each, 0.0f);
            float* at = values[pe].data();
            const u64 stride = 3 * each * sizeof(float);
            Tables& tables = reinterpret_cast<Layer*>(p.layer_bytes.data())->tables;
            tables.gradients = {at, at + each, at + 2 * each, nullptr, nullptr, nullptr};
            tables.gradient_strides = {stride, stride, stride, 0, 0, 0};
        }
    }
    // Fills the gradients and computes each PE's expected sums.
    std::vector<std::vector<float>> fill(std::mt19937& random) {
        std::uniform_real_distribution<float> value(-1, 1);
        for (auto& pe : values)
            for (float& v : pe) v = value(random) * std::exp2f(float(random() % 20));
        auto expected = values;
        const Pe& any = *w.pes[0];
        for (u32 e = 0; e < w.s.n_experts; e++) {
            const u32 begin = any.first_holder[e], end = any.first_holder[e + 1];
            auto of = [&](auto& all, u32 i) -> float* {
                const u32 physical = any.holder_physical[i], pe = any.physical_pe[physical];
                return &all[pe][(physical - any.first_physical[pe]) * 3 * each];
            };
            if (begin == end) continue;
            std::vector<float> sum(of(values, begin), of(values, begin) + 3 * each);
            for (u32 i = begin + 1; i < end; i++)
                for (size_t j = 0; j < sum.size(); j++) sum[j] += of(values, i)[j];
            for (u32 i = begin; i < end; i++) std::copy(sum.begin(), sum.end(), of(expected, i));
        }
        return expected;
    }
};

// Runs three passes. The second has a caller's routing, so only experts' gradients are summed.
void run(LayerShape s, const std::vector<u8>& reachable, u32 seed, bool replicas) {
    const u32 n = s.n_pes;
    World w(s, [&](u32 e) { return e % n; }, reachable, seed, [&](u32 e) { return replicas ? replicas_of(e, n) : std::vector<u32>{}; });
    Experts experts(w);
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> value(-1, 1);
    for (u64 pass = 1; pass <= 3; pass++) {
        const bool by_caller = pass == 2;
        float given;
        const auto expected_experts = experts.fill(random);
        std::vector<std::vector<float>> expected;
        for (u32 pe = 0; pe < s.n_pes; pe++) {
            auto grads = replicated(*w.pes[pe]);
            expected.resize(grads.size());
            if (by_caller) {
                for (size_t g = 0; g < grads.size(); g++) expected[g] = *grads[g];  // already summed in the last pass
                continue;
            }
            for (size_t g = 0; g < grads.size(); g++) {
                for (float& v : *grads[g]) v = value(random) * std::exp2f(float(random() % 20));
                if (pe == 0) expected[g] = *grads[g];
                else
                    for (size_t i = 0; i < grads[g]->size(); i++) expected[g][i] += (*grads[g])[i];
            }
        }
        w.all([&](u32 pe) {
            if (pe == seed % s.n_pes) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            Pass of = w.pass(pe, pass, pass, 0);
            if (by_caller) of.grad_weights = &given;
            w.launch(pe, KERNEL_ALL_REDUCE, "aristos_all_reduce", of);
        });
        for (u32 pe = 0; pe < s.n_pes; pe++) {
            for (u32 e = 0; e < w.pes[pe]->s.n_local; e++) {
                const u64 at = e * 3 * experts.each;
                CHECK(!std::memcmp(&expected_experts[pe][at], &experts.values[pe][at], 3 * experts.each * 4), "pass %u PE %u: local expert %u differs", u32(pass), pe, e);
            }
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

// A PE that never starts: the others fail with an error that names it.
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
        for (u32 network = 0; network < 3; network++) {  // none, everywhere, between some pairs of PEs
            if (n == 1 && network > 0) continue;
            if (brief && (n == 4 || n == 8)) continue;
            LayerShape s = shape();
            s.n_pes = n;
            s.stage = network > 0;
            std::vector<u8> reachable;
            for (u32 i = 0; i < n * n; i++)
                reachable.push_back(network == 0 || i / n == i % n || (network == 2 && i / n / 2 == i % n / 2));
            // Small: less than a piece per PE. Large: the buffers are used several times, and the last piece is partial.
            context = "n " + std::to_string(n) + " network " + std::to_string(network) + " little";
            s.n_experts = 9, s.hidden = 8;
            run(s, reachable, n, false);
            if (n > 1) run(s, reachable, n, true);
            context += ", much";
            s.blocks = 2, s.hidden = 520, s.n_experts = 17;
            s.shared_intermediate = network == 1 ? 24 * n : 8 * n + 8, s.shared_gated = n % 2, s.shared_bias = 1, s.shared_gate = 1;
            if (!brief) s.n_experts = network ? 600 : 300;
            run(s, reachable, n + 10, false);
            context += ", replicas";
            s.n_experts = 17;
            if (n > 1) run(s, reachable, n + 20, true);
        }
    }
    context = "a PE that never comes";
    missing();
    return report("all_reduce_test");
}
