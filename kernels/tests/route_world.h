// PEs of one layer in one process, on the emulator, for the tests of routing, plan and all-reduce.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../host/host.h"
#include "../memory.h"

namespace world {

using namespace aristos;

inline int failures = 0;
inline std::string context;
inline void fail(const std::string& what) {
    if (++failures <= 20) std::fprintf(stderr, "FAILED %s: %s\n", context.c_str(), what.c_str());
}
#ifndef CHECK  // testing.h has its own
#define CHECK(ok, ...)                                  \
    do {                                                \
        if (!(ok)) {                                    \
            char text_[400];                            \
            std::snprintf(text_, sizeof text_, __VA_ARGS__); \
            ::world::fail(text_);                       \
        }                                               \
    } while (0)
#endif

inline float from_bits(u32 bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Elements of the layer's dtype, by the test's own arithmetic.
inline float widen(u16 v, u32 dtype) {
    if (dtype == DTYPE_BF16) return from_bits(u32(v) << 16);
    const int exponent = v >> 10 & 31, fraction = v & 1023;
    const float sign = v >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(fraction + 1024), exponent - 25));
}
inline u16 narrow(float f, u32 dtype) {
    if (f != f) return 0x7fff;
    u32 bits;
    std::memcpy(&bits, &f, 4);
    if (dtype == DTYPE_BF16) return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    // Nearest of the f16 values, ties to even: scaled to integers.
    const float a = std::fabs(f);
    const u16 sign = f < 0 ? 0x8000 : 0;
    if (a < std::ldexp(1.0f, -14)) return u16(sign | u16(std::nearbyint(std::ldexp(a, 24))));
    int e;
    std::frexp(a, &e);  // a = m 2^e, m in [0.5, 1)
    const u32 m = u32(std::nearbyint(std::ldexp(a, 11 - e)));  // 1024 to 2048
    const u32 code = u32(e + 14) * 1024 + (m - 1024);
    return u16(sign | (code >= 0x7c00 ? 0x7c00 : code));
}

// A small layer that the caller changes.
inline LayerShape shape() {
    LayerShape s{};
    s.n_pes = s.n_world = s.hosts = s.members = s.most_members = 1;
    s.hidden = 64;
    s.intermediate = 16;
    s.n_experts = 8;
    s.top_k = 2;
    s.gated = 1;
    s.router_parts = 3;
    s.scaling = 1.0f;
    s.max_tokens = 64;
    s.chunk_rows = 16;
    s.round_chunks = 0;   // all of them
    s.window_chunks = 0;  // as many
    s.training = 1;
    s.blocks = s.channels = 4;
    s.tile_m = 128;
    s.tile_n = 128;
    s.wait_limit_ns = 60'000'000'000;
    return s;
}

struct Pe {
    LayerShape s{};
    Tables tables{};
    LayerInfo info{};
    std::vector<char> layer_bytes;
    char* local = nullptr;
    std::vector<u16> x, router;
    std::vector<float> router_f32, bias, gate, grad_router, grad_gate, output;
    std::vector<u32> owner, local_index;  // of an expert's first holder
    std::vector<u32> first_place, place_pe, first_holder, holder_place, numbers;
    std::vector<u64> holder_until;
    std::vector<SumUnit> sum_units;
    std::vector<SumHolder> sum_holders;
    std::vector<MlpGradients> gradients;
    std::vector<std::vector<float>> shared_gradients;
    std::vector<u64> peer;
    std::vector<u32> far, far_back, relay;
    ~Pe() { std::free(local); }
    const Layer& layer() const { return *reinterpret_cast<const Layer*>(layer_bytes.data()); }
};

// All PEs, in one group; `place(expert)` says where an expert lives, and `replicas(expert)`, where given, where else it does.
struct World {
    LayerShape s;
    void* handle = nullptr;
    std::vector<std::unique_ptr<Pe>> pes;

    // With relays, the host of each PE.
    std::vector<u32> hosts;
    std::vector<u32> members(u32 pe) const {
        std::vector<u32> all;
        for (u32 other = 0; other < s.n_pes; other++)
            if (hosts[other] == hosts[pe]) all.push_back(other);
        return all;
    }
    // As src/moe/spec/hosts.rs.
    u32 home(u32 source, u32 target) const {
        if (hosts.empty() || hosts[source] == hosts[target]) return target;
        const std::vector<u32> of = members(source), to = members(target);
        return to[u32(std::find(of.begin(), of.end(), source) - of.begin()) % to.size()];
    }
    bool serves(u32 pe, u32 source) const { return !hosts.empty() && hosts[source] != hosts[pe] && home(source, pe) == pe; }
    // Of how many PEs the experts are that a destination stands for.
    u32 split(u32 source, u32 dest) const { return hosts.empty() || hosts[source] == hosts[dest] ? 1 : u32(members(dest).size()); }

    World(LayerShape shape, const std::function<u32(u32)>& place, const std::vector<u8>& reachable = {}, u64 seed = 1,
          const std::function<std::vector<u32>(u32)>& replicas = {}, const std::vector<u32>& hosts = {})
        : s(shape), hosts(hosts) {
        const u32 n = s.n_pes;
        s.n_world = n;
        s.channels = s.blocks;
        std::vector<u32> owner(s.n_experts), index(s.n_experts), locals(n, 0), first_place(n + 1, 0), place_pe, first_holder{0}, holder_place;
        std::vector<std::vector<u32>> holders(s.n_experts), numbers(s.n_experts);
        for (u32 e = 0; e < s.n_experts; e++) {
            if (replicas) holders[e] = replicas(e);
            holders[e].push_back(place(e));
            std::sort(holders[e].begin(), holders[e].end());
            holders[e].erase(std::unique(holders[e].begin(), holders[e].end()), holders[e].end());
            for (u32 pe : holders[e]) numbers[e].push_back(locals[pe]++);
            owner[e] = holders[e][0], index[e] = numbers[e][0];
            s.summed |= holders[e].size() > 1;
        }
        holding = holders, numbering = numbers;
        for (u32 pe = 0; pe < n; pe++) {
            first_place[pe + 1] = first_place[pe] + locals[pe];
            place_pe.insert(place_pe.end(), locals[pe], pe);
        }
        for (u32 e = 0; e < s.n_experts; e++) {
            for (size_t i = 0; i < holders[e].size(); i++) holder_place.push_back(first_place[holders[e][i]] + numbers[e][i]);
            first_holder.push_back(u32(holder_place.size()));
        }
        s.held = u32(holder_place.size());
        s.max_local = 0, s.hosts = 0;
        for (u32 l : locals) s.max_local = std::max(s.max_local, l), s.hosts += l > 0;
        s.members = s.most_members = 1;
        s.relays = !hosts.empty();
        for (u32 pe = 0; pe < n && s.relays; pe++) {
            u32 served = 0, windows = 0, most = 0;
            for (u32 q = 0; q < n; q++) served += serves(pe, q), windows += q != pe && (serves(pe, q) || hosts[q] == hosts[pe]);
            for (u32 q : members(pe)) most = std::max(most, locals[q]);
            s.served = std::max(s.served, served), s.windows = std::max(s.windows, windows);
            s.most_members = std::max(s.most_members, u32(members(pe).size()));
            s.max_local = std::max(s.max_local, most * u32(members(pe).size()));
        }
        const u32 chunks = (s.max_tokens + s.chunk_rows - 1) / s.chunk_rows;
        if (s.round_chunks == 0) s.round_chunks = chunks;
        s.round_chunks = std::min(s.round_chunks, chunks);
        if (s.window_chunks == 0) s.window_chunks = s.round_chunks;
        s.window_chunks = std::min(s.window_chunks, s.round_chunks);
        const u32 slots = std::min(s.top_k, s.max_local);
        if (s.round_slots == 0) s.round_slots = s.round_chunks * s.chunk_rows * slots;
        s.round_slots = std::max(s.round_slots, s.chunk_rows * slots);
        u64 heap = 0;
        for (u32 pe = 0; pe < n; pe++) {
            pes.push_back(std::make_unique<Pe>());
            Pe& p = *pes.back();
            p.s = s;
            p.s.my_pe = p.s.world_pe = pe;
            p.s.n_local = locals[pe];
            p.owner = owner, p.local_index = index;
            p.first_place = first_place, p.place_pe = place_pe, p.first_holder = first_holder, p.holder_place = holder_place;
            if (s.relays) list_relays(p, holders, numbers, locals);
            // Shares at random, the same each time.
            std::mt19937 random(u32(seed) + pe);
            for (auto& of : holders) {
                for (size_t i = 1; i < of.size(); i++) p.holder_until.push_back(u64(random()));
                std::sort(p.holder_until.end() - long(of.size() - 1), p.holder_until.end());
                p.holder_until.push_back(u64(1) << 32);
            }
            list_sums(p, holders, numbers);
            if (int field = aristos_layer(&p.s, &p.tables, 0, 0, nullptr, &p.info)) {
                std::fprintf(stderr, "%s: field %d of the shape\n", context.c_str(), field);
                std::exit(1);
            }
            heap = std::max(heap, p.info.symmetric_bytes);
        }
        handle = aristos_host_world(n, heap, seed, reachable.empty() ? nullptr : reachable.data());
        if (!handle) std::fprintf(stderr, "%s\n", aristos_host_error()), std::exit(1);
        for (u32 pe = 0; pe < n; pe++) make(pe);
    }
    ~World() { aristos_host_free(handle); }

    // The number of expert `e` at PE `pe`, which holds it; NONE elsewhere.
    u32 number(u32 e, u32 pe) const {
        for (size_t i = 0; i < holding[e].size(); i++)
            if (holding[e][i] == pe) return numbering[e][i];
        return NONE;
    }
    // The same where rows of `source` go: at the PE, or at its home.
    u32 number_for(u32 source, u32 e, u32 pe) const {
        if (hosts.empty() || hosts[source] == hosts[pe]) return number(e, pe);
        const auto all = members(pe);
        return number(e, pe) * u32(all.size()) + u32(std::find(all.begin(), all.end(), pe) - all.begin());
    }

    // Who stands for whom, and where experts are as this PE sees it.
    void list_relays(Pe& p, const std::vector<std::vector<u32>>& holders, const std::vector<std::vector<u32>>& numbers, const std::vector<u32>& locals) const {
        const u32 n = s.n_pes, me = p.s.my_pe;
        const auto here = members(me);
        p.s.members = u32(here.size()), p.s.member = u32(std::find(here.begin(), here.end(), me) - here.begin());
        p.relay.assign(RELAY_TABLES * n, NONE);
        // Windows at a PE: of all that put rows there, in their order.
        auto window = [&](u32 at, u32 source) {
            u32 number = 0;
            for (u32 q = 0; q < source; q++) number += q != at && (hosts[q] == hosts[at] || serves(at, q));
            return number;
        };
        auto number = [&](u32 at, u32 source) {
            u32 count = 0;
            for (u32 q = 0; q < source; q++) count += serves(at, q);
            return count;
        };
        p.first_place.assign(1, 0), p.place_pe.clear();
        for (u32 q = 0; q < n; q++) {
            const bool near = hosts[q] == hosts[me];
            if (!near) p.relay[RELAY_HOME * n + q] = home(q, me);
            if (q != me && home(me, q) == q) p.relay[RELAY_TO * n + q] = window(q, me);
            if (q != me) p.relay[RELAY_FROM * n + q] = window(near ? me : home(q, me), q);
            if (!near) p.relay[RELAY_NUMBER * n + q] = number(home(q, me), q);
            const auto split = members(q);
            p.relay[RELAY_SPLIT * n + q] = near ? 1 : u32(split.size());
            u32 places = 0;
            for (u32 m : split) places = std::max(places, locals[m] * u32(split.size()));
            if (near) places = locals[q];
            else if (home(me, q) != q) places = 0;
            p.first_place.push_back(p.first_place.back() + places);
            p.place_pe.insert(p.place_pe.end(), places, q);
        }
        p.s.held = std::max<u32>(s.held, p.first_place.back());
        p.holder_place.clear();
        for (u32 e = 0; e < s.n_experts; e++) {
            for (size_t i = 0; i < holders[e].size(); i++) {
                const u32 q = holders[e][i];
                const auto split = members(q);
                const u32 place = hosts[q] == hosts[me] ? numbers[e][i]
                                                        : numbers[e][i] * u32(split.size()) + u32(std::find(split.begin(), split.end(), q) - split.begin());
                p.holder_place.push_back(p.first_place[home(me, q)] + place);
            }
        }
        p.relay.insert(p.relay.end(), here.begin(), here.end());
        const size_t count = p.relay.size();
        p.relay.push_back(0);
        for (u32 q = 0; q < n; q++)
            if (serves(me, q)) p.relay.push_back(q), p.relay[count]++;
    }
    std::vector<std::vector<u32>> holding, numbering;  // by expert: its holders, and its number at each

    // The units of a PE's sums, as the host has them.
    void list_sums(Pe& p, const std::vector<std::vector<u32>>& holders, const std::vector<std::vector<u32>>& numbers) const {
        std::vector<u32> before(s.n_pes, 0), all;
        auto add = [&](u32 batch, const std::vector<u32>& of) {
            const u32 me = u32(std::find(of.begin(), of.end(), p.s.my_pe) - of.begin()), parts = u32(of.size());
            if (me == parts || parts < 2) return;
            p.sum_units.push_back({batch, parts, me, u32(p.sum_holders.size())});
            for (u32 pe : of) {
                p.sum_holders.push_back({pe, before[pe]});
                before[pe] += aristos_sum_steps(&p.s, parts, batch == NONE);
            }
        };
        for (u32 e = 0; e < s.n_experts; e++) {
            const auto at = std::find(holders[e].begin(), holders[e].end(), p.s.my_pe);
            if (at != holders[e].end()) add(numbers[e][u32(at - holders[e].begin())], holders[e]);
        }
        for (u32 pe = 0; pe < s.n_pes; pe++) all.push_back(pe);
        add(NONE, all);
        p.sum_units.push_back({});
    }

    void make(u32 pe) {
        Pe& p = *pes[pe];
        const u32 h = s.hidden, e = s.n_experts, i = s.shared_intermediate;
        p.router.assign(u64(s.router_parts) * e * h, 0);
        p.router_f32.assign(u64(e) * h, 0);
        p.bias.assign(e, 0), p.gate.assign(h, 0);
        p.grad_router.assign(u64(e) * h, NAN), p.grad_gate.assign(h, NAN);
        p.output.assign(u64(s.max_tokens) * h, 0);
        p.x.assign(u64(s.max_tokens) * h, 0);
        p.gradients.assign(p.s.n_local + 1, {});
        auto gradient = [&](u64 count) {
            p.shared_gradients.emplace_back(count);
            return p.shared_gradients.back().data();
        };
        if (i) {
            MlpGradients& g = p.gradients.back();
            if (s.shared_gated) g.gate = gradient(u64(i) * h);
            g.up = gradient(u64(i) * h), g.down = gradient(u64(h) * i);
            if (s.shared_bias) {
                if (s.shared_gated) g.gate_bias = gradient(i);
                g.up_bias = gradient(i), g.down_bias = gradient(h);
            }
        }
        for (u32 q = 0; q < s.n_pes; q++) p.peer.push_back(aristos_host_heap(handle, pe, q));
        Tables& t = p.tables;
        t.router = p.router.data(), t.router_f32 = p.router_f32.data();
        t.router_bias = s.correction_bias ? p.bias.data() : nullptr;
        t.shared_gate = s.shared_gate ? p.gate.data() : nullptr;
        t.first_place = p.first_place.data(), t.place_pe = p.place_pe.data();
        t.first_holder = p.first_holder.data(), t.holder_place = p.holder_place.data(), t.holder_until = p.holder_until.data();
        t.sum_units = p.sum_units.data(), t.sum_holders = p.sum_holders.data();
        for (u32 q = 0; q < s.n_pes; q++) p.numbers.push_back(q);
        t.world = p.numbers.data(), t.world_peer = p.peer.data();
        t.gradients = p.gradients.data();
        t.grad_router = p.grad_router.data(), t.grad_shared_gate = p.grad_gate.data();
        t.peer = p.peer.data();
        p.far.assign(1 + 2 * s.n_pes, 0), p.far_back = p.far;
        for (u32 i = 1; i < s.n_pes; i++) {
            const u32 other = (pe + i) % s.n_pes;
            if (p.peer[other]) continue;
            auto list = [&](std::vector<u32>& far) {
                far[1 + s.n_pes + other] = far[0];
                far[1 + far[0]++] = other;
            };
            if (home(pe, other) == other) list(p.far);
            if (hosts.empty() || hosts[other] == hosts[pe] || serves(pe, other)) list(p.far_back);
        }
        t.far = p.far.data(), t.far_back = p.far_back.data(), t.relay = p.relay.data();
        p.local = static_cast<char*>(std::aligned_alloc(256, (p.info.local_bytes + 255) / 256 * 256));
        // What nobody writes must not look like a value.
        std::memset(p.local, 0xa5, p.info.local_bytes);
        p.layer_bytes.resize(p.info.layer_bytes);
        aristos_layer(&p.s, &t, reinterpret_cast<u64>(p.local), p.peer[pe], p.layer_bytes.data(), &p.info);
        std::memset(reinterpret_cast<char*>(p.info.local_zero), 0, p.info.local_zero_bytes);
    }

    // Cuts weights into planes of the layer's dtype; what the planes do not hold is not part of the weights.
    void set_router(Pe& p) const {
        for (u64 i = 0; i < p.router_f32.size(); i++) {
            float rest = p.router_f32[i];
            float sum = 0;
            for (u32 part = 0; part < s.router_parts; part++) {
                const u16 v = narrow(rest, s.dtype);
                p.router[part * p.router_f32.size() + i] = v;
                rest -= widen(v, s.dtype), sum += widen(v, s.dtype);
            }
            p.router_f32[i] = sum;
        }
    }

    // Launches a kernel on one PE; false when it failed.
    bool launch(u32 pe, KernelId id, const char* name, Pass pass) {
        Pe& p = *pes[pe];
        const Layer* layer = &p.layer();
        void* args[] = {&layer, &pass};
        const Launch& l = p.info.launches[id];
        if (aristos_host_launch(handle, pe, name, l.grid, l.block, l.shared_bytes, args) == 0) return true;
        std::fprintf(stderr, "%s: %s\n", name, aristos_host_error());
        failures++;
        return false;
    }

    // `work(pe)` of all PEs, concurrently.
    void all(const std::function<void(u32)>& work) const {
        std::vector<std::thread> threads;
        for (u32 pe = 0; pe < s.n_pes; pe++) threads.emplace_back(work, pe);
        for (auto& t : threads) t.join();
    }

    Pass pass(u32 pe, u64 number, u64 forward, u32 tokens) {
        Pass p{};
        p.pass = number, p.forward = forward, p.tokens = tokens;
        p.x = pes[pe]->x.data(), p.output = pes[pe]->output.data();
        return p;
    }
};

inline int report(const char* what) {
    std::printf("%s: %s\n", what, failures ? "FAILED" : "ok");
    std::printf("1 cases, %d failed\n", failures ? 1 : 0);  // the last line, as testing.h has it
    return failures ? 1 : 0;
}

}  // namespace world
