// The layer's persistent kernels: forward and backward of small layers on one and several PEs, against sums in float64.
// Routing is the layer's own (route_test.cpp checks it): what it chose is read back.
#include "../layer_ampere.cu"
#include "../layer_hopper.cu"
#include "../routing.cu"
#include "route_world.h"

using namespace world;

namespace {

struct Expert {
    std::vector<u16> gate, up, down;
    std::vector<float> gate_bias, up_bias, down_bias;
};

struct Doubles {
    std::vector<double> gate, up, down, gate_bias, up_bias, down_bias;
};

struct Options {
    u32 n_pes = 1, tokens = 40, hidden = 64, intermediate = 48, experts = 4, top_k = 2, dtype = DTYPE_F16;
    u32 shared = 0, bias = 0, gated = 1, window_chunks = 0, chunk_rows = 16, bulk = 0, skew = 0, idle_pe = NONE, passes = 2;
    u32 comm_blocks = 1, blocks = 3, training = 1;
    u64 wait_limit_ns = 60'000'000'000;
    bool network = false, hopper = false;
    u64 seed = 1;

    std::string kernel(const std::string& direction) const {
        return "aristos_" + direction + (hopper ? "_hopper" : "") + (dtype == DTYPE_F16 ? "_f16" : "_bf16");
    }
};

struct Test {
    Options o;
    std::mt19937_64 random;
    std::unique_ptr<World> w;
    std::vector<Expert> experts;  // routed by global number, then the shared one
    std::vector<std::vector<MlpWeights>> weights;    // by PE
    std::vector<std::vector<std::vector<float>>> gradients;  // by PE: six per expert
    std::vector<std::vector<u16>> grad_output;
    std::vector<std::vector<TensorMap>> maps;

    float uniform() { return float(random() % 20001) / 10000.0f - 1.0f; }
    std::vector<u16> matrix(u64 count, float scale) {
        std::vector<u16> m(count);
        for (u16& v : m) v = narrow(uniform() * scale, o.dtype);
        return m;
    }
    std::vector<float> vector(u64 count) {
        std::vector<float> v(count);
        for (float& f : v) f = uniform() * 0.3f;
        return v;
    }

    u32 place(u32 e) const { return o.skew ? 0 : e % o.n_pes; }

    explicit Test(const Options& options) : o(options), random(options.seed) {
        LayerShape s = world::shape();
        s.n_pes = o.n_pes, s.hidden = o.hidden, s.intermediate = o.intermediate, s.n_experts = o.experts, s.top_k = o.top_k;
        s.dtype = o.dtype, s.gated = o.gated, s.bias = o.bias, s.activation = ACT_SILU;
        s.shared_intermediate = o.shared ? 32 : 0, s.shared_gate = o.shared, s.shared_gated = 1, s.shared_activation = ACT_GELU;
        s.shared_bias = o.bias && o.shared;
        s.max_tokens = o.tokens, s.chunk_rows = o.chunk_rows, s.window_chunks = o.window_chunks;
        s.training = o.training, s.bulk = o.bulk, s.blocks = o.blocks, s.comm_blocks = o.comm_blocks;
        s.wait_limit_ns = o.wait_limit_ns;
        s.tile_m = 128, s.tile_n = 256, s.stage = o.network;
        std::vector<u8> reachable;
        if (o.network)
            for (u32 i = 0; i < o.n_pes * o.n_pes; i++) reachable.push_back(i / o.n_pes == i % o.n_pes);
        // The world reads the tables' addresses when it makes the layers; weights are added and the layers made again.
        w = std::make_unique<World>(s, [&](u32 e) { return place(e); }, reachable, o.seed);
        for (u32 e = 0; e <= o.experts; e++) {
            bool shared = e == o.experts, gated = shared || o.gated;
            u64 h = o.hidden, i = shared ? s.shared_intermediate : o.intermediate;
            Expert x;
            if (gated) x.gate = matrix(i * h, 0.25f);
            x.up = matrix(i * h, 0.25f), x.down = matrix(h * i, 0.25f);
            if (o.bias) x.gate_bias = vector(i), x.up_bias = vector(i), x.down_bias = vector(h);
            experts.push_back(x);
        }
        weights.resize(o.n_pes), gradients.resize(o.n_pes), grad_output.resize(o.n_pes);
        std::vector<float> router = vector(u64(o.experts) * o.hidden), gate = vector(o.hidden);
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            Pe& p = *w->pes[pe];
            p.router_f32 = router;
            w->set_router(p);
            p.gate.assign(gate.begin(), gate.end());
            p.x = matrix(u64(o.tokens) * o.hidden, 1.0f);
            grad_output[pe] = matrix(u64(o.tokens) * o.hidden, 1.0f);
            std::vector<MlpGradients> g;
            for (u32 e = 0; e <= o.experts; e++) {
                if (e < o.experts && place(e) != pe) continue;
                const Expert& x = experts[e];
                auto pointer = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
                weights[pe].push_back({pointer(x.gate), pointer(x.up), pointer(x.down), pointer(x.gate_bias),
                                       pointer(x.up_bias), pointer(x.down_bias)});
                float* to[6];
                u64 sizes[6] = {x.gate.size(), x.up.size(), x.down.size(), x.gate_bias.size(), x.up_bias.size(), x.down_bias.size()};
                for (int k = 0; k < 6; k++) {
                    gradients[pe].emplace_back(sizes[k] + 4, NAN);
                    to[k] = gradients[pe].back().data();
                }
                g.push_back({to[0], to[1], to[2], to[3], to[4], to[5]});
            }
            p.gradients = g;
            p.tables.gradients = p.gradients.data();
            p.tables.weights = weights[pe].data();
            if (o.hopper) {
                maps.emplace_back();
                for (const MlpWeights& m : weights[pe]) {
                    u32 n = m.up == experts.back().up.data() ? s.shared_intermediate : o.intermediate;
                    map(maps.back(), m.gate, n, o.hidden), map(maps.back(), m.up, n, o.hidden), map(maps.back(), m.down, o.hidden, n);
                }
                p.tables.tensor_maps = maps.back().data();
            }
            p.tables.router_f32 = p.router_f32.data();
            p.tables.shared_gate = s.shared_gate ? p.gate.data() : nullptr;
            p.tables.router = p.router.data();
            aristos_layer(&p.s, &p.tables, reinterpret_cast<u64>(p.local), p.peer[pe], p.layer_bytes.data(), &p.info);
        }
    }
    void map(std::vector<TensorMap>& to, const void* weights, u32 rows, u32 columns) const {
        to.emplace_back();
        if (weights && aristos_host_tensor_map(&to.back(), reinterpret_cast<u64>(weights), rows, columns, columns * 2, 64, 64, 2))
            fail(aristos_host_error());
    }

    double wide(u16 v) const { return widen(v, o.dtype); }

    // One token through one expert; with `dy`, gradients too: of x into `dx`, of the weights into `d`, and <dy, y>.
    std::vector<double> mlp(u32 e, const u16* x, double weight, const u16* dy, double* dx, Doubles* d, double* d_weight) const {
        const Expert& m = experts[e];
        bool shared = e == o.experts, gated = shared || o.gated;
        u32 h = o.hidden, n = u32(m.up.size() / h);
        std::vector<double> g(n), u(n), a(n), slope(n), act(n), y(h);
        for (u32 i = 0; i < n; i++) {
            g[i] = m.gate_bias.empty() ? 0 : m.gate_bias[i];
            u[i] = m.up_bias.empty() ? 0 : m.up_bias[i];
            for (u32 c = 0; c < h; c++) {
                if (gated) g[i] += wide(m.gate[u64(i) * h + c]) * wide(x[c]);
                u[i] += wide(m.up[u64(i) * h + c]) * wide(x[c]);
            }
            double z = gated ? g[i] : u[i];
            if (shared) {
                double phi = 0.5 * std::erfc(-z / std::sqrt(2.0));
                act[i] = z * phi, slope[i] = phi + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
            } else {
                double s = 1 / (1 + std::exp(-z));
                act[i] = z * s, slope[i] = s + z * s * (1 - s);
            }
            a[i] = gated ? act[i] * u[i] : act[i];
        }
        for (u32 c = 0; c < h; c++) {
            y[c] = m.down_bias.empty() ? 0 : m.down_bias[c];
            for (u32 i = 0; i < n; i++) y[c] += wide(m.down[u64(c) * n + i]) * a[i];
        }
        if (!dy) return y;
        *d_weight = 0;
        for (u32 c = 0; c < h; c++) *d_weight += wide(dy[c]) * y[c];
        for (u32 i = 0; i < n; i++) {
            double q = 0;
            for (u32 c = 0; c < h; c++) {
                q += wide(dy[c]) * wide(m.down[u64(c) * n + i]);
                d->down[u64(c) * n + i] += weight * wide(dy[c]) * a[i];
            }
            q *= weight;
            double du = gated ? q * act[i] : q * slope[i], dg = gated ? q * u[i] * slope[i] : 0;
            d->up_bias[i] += du, d->gate_bias[i] += dg;
            for (u32 c = 0; c < h; c++) {
                if (gated) {
                    d->gate[u64(i) * h + c] += dg * wide(x[c]);
                    dx[c] += dg * wide(m.gate[u64(i) * h + c]);
                }
                d->up[u64(i) * h + c] += du * wide(x[c]);
                dx[c] += du * wide(m.up[u64(i) * h + c]);
            }
        }
        for (u32 c = 0; c < h; c++) d->down_bias[c] += weight * wide(dy[c]);
        return y;
    }

    // Largest difference against the largest value.
    void compare(const char* what, const float* got, const std::vector<double>& want) const {
        double scale = 1e-3, worst = 0;
        u64 at = 0;
        for (double v : want) scale = std::max(scale, std::fabs(v));
        for (u64 i = 0; i < want.size(); i++) {
            double d = std::fabs(got[i] - want[i]);
            if (!(d <= worst)) worst = d, at = i;
        }
        double tolerance = o.dtype == DTYPE_F16 ? 3e-3 : 2.4e-2;
        CHECK(worst <= tolerance * scale, "%s at %llu: %g instead of %g (scale %g)", what, (unsigned long long)at,
              double(got[at]), want[at], scale);
    }

    void run() {
        for (u32 round = 0; round < o.passes; round++) {
            std::vector<u32> tokens(o.n_pes, o.tokens);
            for (u32 pe = 0; pe < o.n_pes; pe++) tokens[pe] = pe == o.idle_pe ? 0 : o.tokens - (round * 7 + pe * 3) % o.tokens;
            u64 number = (o.training ? 2 : 1) * round + 1, forward = round + 1;
            std::vector<std::vector<float>> out(o.n_pes, std::vector<float>(u64(o.tokens) * o.hidden, NAN)), dx = out;
            w->all([&](u32 pe) {
                Pass p = w->pass(pe, number, forward, tokens[pe]);
                p.output = out[pe].data();
                bool ok = w->launch(pe, KERNEL_ROUTE, "aristos_route", p) && w->launch(pe, KERNEL_PLAN, "aristos_plan", p) &&
                          w->launch(pe, KERNEL_FORWARD, o.kernel("forward").c_str(), p);
                if (!ok || !o.training) return;
                p.pass++;
                p.grad_output = grad_output[pe].data();
                p.output = dx[pe].data();
                w->launch(pe, KERNEL_BACKWARD, o.kernel("backward").c_str(), p);
            });
            for (u32 pe = 0; pe < o.n_pes; pe++) {
                const ErrorRecord& e = *w->pes[pe]->layer().error;
                CHECK(e.kind == 0, "pe %u: error %u pe %u what %u phase %u expected %llx seen %llx index %llu", pe, e.kind, e.pe,
                      e.what, e.phase, (unsigned long long)e.expected, (unsigned long long)e.seen, (unsigned long long)e.index);
                if (e.kind) return;
            }
            verify(tokens, out, dx);
        }
    }

    // What PE 1 sends never arrives: both PEs give up, and each names the other.
    void run_lost() {
        aristos_host_fault(w->handle, 1, ARISTOS_FAULT_SIGNAL_LOST);
        w->all([&](u32 pe) {
            Pass p = w->pass(pe, 1, 1, o.tokens);
            w->launch(pe, KERNEL_ROUTE, "aristos_route", p) && w->launch(pe, KERNEL_PLAN, "aristos_plan", p) &&
                w->launch(pe, KERNEL_FORWARD, o.kernel("forward").c_str(), p);
        });
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            const ErrorRecord& e = *w->pes[pe]->layer().error;
            CHECK(e.kind == ERROR_TIMEOUT && e.pe == 1 - pe && e.what == (pe == 0 ? WHAT_COUNTS : WHAT_RESULTS),
                  "pe %u: error %u pe %u what %u", pe, e.kind, e.pe, e.what);
            CHECK(e.seen < e.expected, "pe %u: seen %llx of %llx", pe, (unsigned long long)e.seen, (unsigned long long)e.expected);
        }
    }

    // A header that claims more slots than a round holds.
    void run_wrong() {
        w->all([&](u32 pe) {
            Pass p = w->pass(pe, 1, 1, o.tokens);
            bool ok = w->launch(pe, KERNEL_ROUTE, "aristos_route", p) && w->launch(pe, KERNEL_PLAN, "aristos_plan", p);
            const Layer& l = w->pes[pe]->layer();
            if (pe == 1) l.plan.dest[0].return_chunk = l.sizes.return_chunks;
            if (ok) w->launch(pe, KERNEL_FORWARD, o.kernel("forward").c_str(), p);
        });
        const ErrorRecord& e = *w->pes[0]->layer().error;
        CHECK(e.kind == ERROR_PROTOCOL && e.pe == 1 && e.what == WHAT_COUNTS, "error %u pe %u what %u", e.kind, e.pe, e.what);
    }

    void verify(const std::vector<u32>& tokens, const std::vector<std::vector<float>>& out, const std::vector<std::vector<float>>& dx) {
        std::vector<Doubles> d(o.experts + 1);
        for (u32 e = 0; e < o.experts; e++) clear(d[e], e);
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            const Pe& p = *w->pes[pe];
            const Layer& l = p.layer();
            clear(d[o.experts], o.experts);
            std::vector<double> y(u64(tokens[pe]) * o.hidden), gx = y, dw(u64(tokens[pe]) * o.top_k), ds(tokens[pe]);
            for (u32 t = 0; t < tokens[pe]; t++) {
                const u16* x = p.x.data() + u64(t) * o.hidden;
                const u16* dy = o.training ? grad_output[pe].data() + u64(t) * o.hidden : nullptr;
                auto one = [&](u32 e, double weight, double* d_weight) {
                    auto v = mlp(e, x, weight, dy, &gx[u64(t) * o.hidden], &d[e], d_weight);
                    for (u32 c = 0; c < o.hidden; c++) y[u64(t) * o.hidden + c] += weight * v[c];
                };
                for (u32 k = 0; k < o.top_k; k++)
                    one(l.routing.chosen[t * o.top_k + k], l.routing.routing_weights[t * o.top_k + k], &dw[t * o.top_k + k]);
                if (o.shared) one(o.experts, l.routing.shared_weight[t], &ds[t]);
            }
            compare("output", out[pe].data(), y);
            if (!o.training) continue;
            compare("input gradient", dx[pe].data(), gx);
            compare("weight gradient", l.routing.d_weights, dw);
            if (o.shared) compare("shared weight gradient", l.routing.d_shared_weight, ds);
            if (o.shared) compare_gradients(pe, u32(p.s.n_local), o.experts, d[o.experts]);
        }
        if (!o.training) return;
        for (u32 e = 0; e < o.experts; e++) {
            u32 pe = place(e);
            compare_gradients(pe, w->pes[pe]->local_index[e], e, d[e]);
        }
    }
    void clear(Doubles& d, u32 e) const {
        const Expert& x = experts[e];
        d.gate.assign(x.gate.size(), 0), d.up.assign(x.up.size(), 0), d.down.assign(x.down.size(), 0);
        d.gate_bias.assign(x.up.size() / o.hidden, 0), d.up_bias = d.gate_bias, d.down_bias.assign(o.hidden, 0);
    }
    void compare_gradients(u32 pe, u32 local, u32 e, const Doubles& d) const {
        const auto* g = &gradients[pe][6 * local];
        if (!experts[e].gate.empty()) compare("gate gradient", g[0].data(), d.gate);
        compare("up gradient", g[1].data(), d.up);
        compare("down gradient", g[2].data(), d.down);
        if (!o.bias) return;
        if (!experts[e].gate.empty()) compare("gate bias gradient", g[3].data(), d.gate_bias);
        compare("up bias gradient", g[4].data(), d.up_bias);
        compare("down bias gradient", g[5].data(), d.down_bias);
    }
};

void layer_case(const char* name, const Options& o, void (Test::*body)()) {
    world::context = name;
    int before = failures;
    u64 start = dev::nanoseconds();
    Test test(o);
    (test.*body)();
    std::printf("%s %s (%.0f ms)\n", failures > before ? "FAILED" : "ok", name, double(dev::nanoseconds() - start) / 1e6);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    struct Named { const char* name; Options o; void (Test::*body)() = &Test::run; };
    std::vector<Named> all;
    auto add = [&](const char* name, auto change) {
        Options o;
        change(o);
        all.push_back({name, o});
        return &all.back().body;
    };
    add("one_pe", [](Options&) {});
    add("one_pe_inference", [](Options& o) { o.training = 0; });
    add("two_pes", [](Options& o) { o.n_pes = 2; });
    add("three_pes_shared_bias", [](Options& o) { o.n_pes = 3, o.shared = 1, o.bias = 1, o.experts = 5, o.top_k = 3; });
    add("not_gated_bf16", [](Options& o) { o.n_pes = 2, o.gated = 0, o.bias = 1, o.dtype = DTYPE_BF16; });
    add("rounds", [](Options& o) { o.n_pes = 2, o.chunk_rows = 8, o.window_chunks = 1, o.shared = 1, o.bias = 1; });
    add("rounds_skewed", [](Options& o) { o.n_pes = 3, o.chunk_rows = 8, o.window_chunks = 2, o.skew = 1, o.idle_pe = 1; });
    add("rounds_inference", [](Options& o) { o.n_pes = 2, o.chunk_rows = 8, o.window_chunks = 1, o.training = 0; });
    add("network", [](Options& o) { o.n_pes = 2, o.network = true, o.shared = 1; });
    add("network_rounds", [](Options& o) { o.n_pes = 2, o.network = true, o.chunk_rows = 8, o.window_chunks = 1; });
    add("bulk", [](Options& o) { o.n_pes = 2, o.bulk = 1, o.shared = 1; });
    add("bulk_rounds", [](Options& o) { o.n_pes = 3, o.bulk = 1, o.chunk_rows = 8, o.window_chunks = 1, o.skew = 1; });
    add("hopper", [](Options& o) { o.hopper = true, o.n_pes = 2, o.shared = 1, o.bias = 1; });
    add("hopper_rounds", [](Options& o) { o.hopper = true, o.n_pes = 2, o.chunk_rows = 8, o.window_chunks = 1, o.dtype = DTYPE_BF16; });
    add("many_blocks", [](Options& o) { o.n_pes = 2, o.blocks = 8, o.comm_blocks = 3, o.tokens = 150, o.intermediate = 264; });
    *add("lost", [](Options& o) { o.n_pes = 2, o.network = true, o.wait_limit_ns = 2'000'000'000; }) = &Test::run_lost;
    *add("wrong", [](Options& o) { o.n_pes = 2, o.wait_limit_ns = 2'000'000'000; }) = &Test::run_wrong;
    for (const Named& n : all) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted = wanted || std::strcmp(argv[i], n.name) == 0;
        if (wanted) layer_case(n.name, n.o, n.body);
    }
    return report("layer");
}
