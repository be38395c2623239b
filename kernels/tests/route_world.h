// PEs of one layer in one process on the emulator, for tests of routing, plan and all-reduce.
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

// Conversions of elements of the layer's dtype that do not depend on the kernels' code.
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
    // Nearest f16 value, ties to even: scaled to integers.
    const float a = std::fabs(f);
    const u16 sign = f < 0 ? 0x8000 : 0;
    if (a < std::ldexp(1.0f, -14)) return u16(sign | u16(std::nearbyint(std::ldexp(a, 24))));
    int e;
    std::frexp(a, &e);  // a = m 2^e, m in [0.5, 1)
    const u32 m = u32(std::nearbyint(std::ldexp(a, 11 - e)));  // 1024 to 2048
    const u32 code = u32(e + 14) * 1024 + (m - 1024);
    return u16(sign | (code >= 0x7c00 ? 0x7c00 : code));
}

// A small layer, to be changed by the caller.
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
    s.round_chunks = 0;   // all chunks
    s.window_chunks = 0;  // the same number
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
    std::vector<u32> first_physical, physical_pe, first_holder, holder_physical, numbers;
    std::vector<u64> holder_until;
    std::vector<SumUnit> sum_units;
    std::vector<SumHolder> sum_holders;
    std::vector<std::vector<float>> shared_gradients;
    std::vector<u64> peer, world_peer;
    std::vector<u32> inter_node, inter_node_returns, relay;
    ~Pe() { std::free(local); }
    const Layer& layer() const { return *reinterpret_cast<const Layer*>(layer_bytes.data()); }
};

// All PEs, by default in one group. `owner_of(expert)` returns an expert's PE, and `replicas(expert)`, if given, the other holders in its
// group and in others. PEs are numbered in the world, except in the layer's tables, which use group numbers.
struct World {
    LayerShape s;  // of the world; with a single group, that group's
    void* handle = nullptr;
    std::vector<std::unique_ptr<Pe>> pes;

    std::vector<u32> group;                // of each PE
    std::vector<std::vector<u32>> groups;  // the PEs of each
    const std::vector<u32>& peers(u32 pe) const { return groups[group[pe]]; }
    static u32 index(const std::vector<u32>& in, u32 of) { return u32(std::find(in.begin(), in.end(), of) - in.begin()); }

    // `hosts`: the host of each PE, in cases with one row per host. `relays`: for each group, whether rows are relayed in it.
    std::vector<u32> hosts;
    std::vector<u8> relays;
    bool intra_node(u32 a, u32 b) const { return !relays[group[a]] || hosts[a] == hosts[b]; }
    // The PEs of a PE's host and group.
    std::vector<u32> members(u32 pe) const {
        std::vector<u32> all;
        for (u32 other : peers(pe))
            if (hosts[other] == hosts[pe]) all.push_back(other);
        return all;
    }
    // The PE to which `source` sends rows for `target`, a PE of the same group, as in src/moe/spec/hosts.rs.
    u32 relay_for(u32 source, u32 target) const {
        if (intra_node(source, target)) return target;
        const std::vector<u32> to = members(target);
        return to[index(members(source), source) % to.size()];
    }
    bool is_relay_of(u32 pe, u32 source) const { return group[pe] == group[source] && !intra_node(pe, source) && relay_for(source, pe) == pe; }
    // Number of PEs whose experts a destination represents.
    u32 split(u32 source, u32 dest) const { return intra_node(source, dest) ? 1 : u32(members(dest).size()); }

    World(LayerShape shape, const std::function<u32(u32)>& owner_of, const std::vector<u8>& reachable = {}, u64 seed = 1,
          const std::function<std::vector<u32>(u32)>& replicas = {}, const std::vector<u32>& hosts = {}, const std::vector<u32>& group_of = {})
        : s(shape), group(group_of), hosts(hosts) {
        const u32 n = s.n_pes;
        s.n_world = n;
        s.channels = s.blocks;
        if (group.empty()) group.assign(n, 0);
        groups.resize(*std::max_element(group.begin(), group.end()) + 1);
        for (u32 pe = 0; pe < n; pe++) groups[group[pe]].push_back(pe);
        std::vector<u32> owner(s.n_experts), index(s.n_experts), locals(n, 0);
        std::vector<std::vector<u32>> holders(s.n_experts), numbers(s.n_experts);
        for (u32 e = 0; e < s.n_experts; e++) {
            if (replicas) holders[e] = replicas(e);
            holders[e].push_back(owner_of(e));
            std::sort(holders[e].begin(), holders[e].end());
            holders[e].erase(std::unique(holders[e].begin(), holders[e].end()), holders[e].end());
            for (u32 pe : holders[e]) numbers[e].push_back(locals[pe]++);
            owner[e] = holders[e][0], index[e] = numbers[e][0];
            s.summed |= holders[e].size() > 1;
        }
        holding = holders, numbering = numbers;
        const u32 chunks = (s.max_tokens + s.chunk_rows - 1) / s.chunk_rows;
        if (s.round_chunks == 0) s.round_chunks = chunks;
        s.round_chunks = std::min(s.round_chunks, chunks);
        if (s.window_chunks == 0) s.window_chunks = s.round_chunks;
        s.window_chunks = std::min(s.window_chunks, s.round_chunks);
        for (const auto& of : groups) relays.push_back(relays_in(of));
        std::vector<LayerShape> shapes;
        for (const auto& of : groups) shapes.push_back(group_shape(of, locals));
        if (groups.size() == 1) s = shapes[0];
        u64 heap = 0;
        for (u32 pe = 0; pe < n; pe++) {
            pes.push_back(std::make_unique<Pe>());
            Pe& p = *pes.back();
            p.s = shapes[group[pe]];
            p.s.my_pe = World::index(peers(pe), pe), p.s.world_pe = pe;
            p.s.n_local = locals[pe];
            p.owner = owner, p.local_index = index;
            list_placement(p, locals);
            if (p.s.relays) list_relays(p);
            // Random shares, the same in every run.
            std::mt19937 random(u32(seed) + pe);
            for (u32 e = 0; e < s.n_experts; e++) {
                const long count = long(p.first_holder[e + 1] - p.first_holder[e]);
                if (count == 0) continue;
                for (long i = 1; i < count; i++) p.holder_until.push_back(u64(random()));
                std::sort(p.holder_until.end() - (count - 1), p.holder_until.end());
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

    bool relays_in(const std::vector<u32>& of) const {
        bool several = false, apart = false;
        for (u32 a : of)
            for (u32 b : of)
                if (!hosts.empty() && a != b) (hosts[a] == hosts[b] ? several : apart) = true;
        return several && apart;
    }
    // The shape of a group's layers, except per-PE fields.
    LayerShape group_shape(const std::vector<u32>& of, const std::vector<u32>& locals) const {
        LayerShape g = s;
        g.n_pes = u32(of.size());
        g.held = g.max_local = g.hosts = 0;
        for (u32 pe : of) g.held += locals[pe], g.max_local = std::max(g.max_local, locals[pe]), g.hosts += locals[pe] > 0;
        g.members = g.most_members = 1;
        g.relays = relays_in(of);
        for (u32 pe : of) {
            if (!g.relays) break;
            u32 served = 0, windows = 0, most = 0;
            for (u32 q : of) served += is_relay_of(pe, q), windows += q != pe && (is_relay_of(pe, q) || hosts[q] == hosts[pe]);
            for (u32 q : members(pe)) most = std::max(most, locals[q]);
            g.served = std::max(g.served, served), g.windows = std::max(g.windows, windows);
            g.most_members = std::max(g.most_members, u32(members(pe).size()));
            g.max_local = std::max(g.max_local, most * u32(members(pe).size()));
        }
        const u32 slots = std::min(g.top_k, g.max_local);
        if (g.round_slots == 0) g.round_slots = g.round_chunks * g.chunk_rows * slots;
        g.round_slots = std::max(g.round_slots, g.chunk_rows * slots);
        return g;
    }

    // The number of expert `e` on PE `pe`, or NONE if the PE does not hold the expert.
    u32 number(u32 e, u32 pe) const {
        for (size_t i = 0; i < holding[e].size(); i++)
            if (holding[e][i] == pe) return numbering[e][i];
        return NONE;
    }
    // The number of expert `e` of PE `pe` in rows from `source`, which are sent to the PE or to the relay there.
    u32 number_for(u32 source, u32 e, u32 pe) const {
        if (intra_node(source, pe)) return number(e, pe);
        const auto all = members(pe);
        return number(e, pe) * u32(all.size()) + index(all, pe);
    }

    // The placement of a PE's group; with relays as that PE sees it.
    void list_placement(Pe& p, const std::vector<u32>& locals) const {
        const u32 me = p.s.world_pe;
        const auto& of = peers(me);
        p.first_physical.assign(1, 0);
        for (u32 q : of) {
            u32 experts = locals[q];
            if (!intra_node(me, q)) {
                const auto all = members(q);
                for (u32 m : all) experts = std::max(experts, locals[m]);
                experts = relay_for(me, q) == q ? experts * u32(all.size()) : 0;
            }
            p.first_physical.push_back(p.first_physical.back() + experts);
            p.physical_pe.insert(p.physical_pe.end(), experts, index(of, q));
        }
        p.s.held = std::max<u32>(p.s.held, p.first_physical.back());
        p.first_holder.assign(1, 0);
        for (u32 e = 0; e < s.n_experts; e++) {
            for (u32 q : holding[e])
                if (group[q] == group[me]) p.holder_physical.push_back(p.first_physical[index(of, relay_for(me, q))] + number_for(me, e, q));
            p.first_holder.push_back(u32(p.holder_physical.size()));
        }
    }
    void list_relays(Pe& p) const {
        const u32 me = p.s.world_pe;
        const auto& of = peers(me);
        const u32 n = u32(of.size());
        const auto here = members(me);
        p.s.members = u32(here.size()), p.s.member = index(here, me);
        p.relay.assign(RELAY_TABLES * n, NONE);
        // Number of the window of `source` at PE `at`. A PE's windows are in the order of its senders.
        auto window = [&](u32 at, u32 source) {
            u32 number = 0;
            for (u32 q : of) number += q < source && q != at && (hosts[q] == hosts[at] || is_relay_of(at, q));
            return number;
        };
        auto number = [&](u32 at, u32 source) {
            u32 count = 0;
            for (u32 q : of) count += q < source && is_relay_of(at, q);
            return count;
        };
        for (u32 i = 0; i < n; i++) {
            const u32 q = of[i];
            if (!intra_node(me, q)) p.relay[RELAY_OF_SOURCE * n + i] = index(of, relay_for(q, me));
            if (q != me && relay_for(me, q) == q) p.relay[RELAY_WINDOW_TO * n + i] = window(q, me);
            if (q != me) p.relay[RELAY_WINDOW_FROM * n + i] = window(intra_node(me, q) ? me : relay_for(q, me), q);
            if (!intra_node(me, q)) p.relay[RELAY_NUMBER * n + i] = number(relay_for(q, me), q);
            p.relay[RELAY_SPLIT * n + i] = split(me, q);
        }
        for (u32 q : here) p.relay.push_back(index(of, q));
        const size_t count = p.relay.size();
        p.relay.push_back(0);
        for (u32 q : of)
            if (is_relay_of(me, q)) p.relay.push_back(index(of, q)), p.relay[count]++;
    }
    std::vector<std::vector<u32>> holding, numbering;  // by expert: its holders, and its number on each

    // Lists the units of a PE's gradient sums, as the host does.
    void list_sums(Pe& p, const std::vector<std::vector<u32>>& holders, const std::vector<std::vector<u32>>& numbers) const {
        std::vector<u32> before(s.n_world, 0), all;
        auto add = [&](u32 batch, const std::vector<u32>& of) {
            const u32 me = index(of, p.s.world_pe), parts = u32(of.size());
            if (me == parts || parts < 2) return;
            p.sum_units.push_back({batch, parts, me, u32(p.sum_holders.size())});
            for (u32 pe : of) {
                p.sum_holders.push_back({pe, before[pe]});
                before[pe] += aristos_sum_steps(&p.s, parts, batch == NONE);
            }
        };
        for (u32 e = 0; e < s.n_experts; e++) {
            const auto at = std::find(holders[e].begin(), holders[e].end(), p.s.world_pe);
            if (at != holders[e].end()) add(numbers[e][u32(at - holders[e].begin())], holders[e]);
        }
        for (u32 pe = 0; pe < s.n_world; pe++) all.push_back(pe);
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
        Tables& t = p.tables;
        auto gradient = [&](u64 count) {
            p.shared_gradients.emplace_back(count);
            return p.shared_gradients.back().data();
        };
        if (i) {
            MlpGradients& g = t.shared_gradients;
            if (s.shared_gated) g.gate = gradient(u64(i) * h);
            g.up = gradient(u64(i) * h), g.down = gradient(u64(h) * i);
            if (s.shared_bias) {
                if (s.shared_gated) g.gate_bias = gradient(i);
                g.up_bias = gradient(i), g.down_bias = gradient(h);
            }
        }
        for (u32 q = 0; q < s.n_world; q++) p.world_peer.push_back(aristos_host_heap(handle, pe, q));
        for (u32 q : peers(pe)) p.peer.push_back(p.world_peer[q]), p.numbers.push_back(q);
        t.router = p.router.data(), t.router_f32 = p.router_f32.data();
        t.router_bias = s.correction_bias ? p.bias.data() : nullptr;
        t.shared_gate = s.shared_gate ? p.gate.data() : nullptr;
        t.first_physical = p.first_physical.data(), t.physical_pe = p.physical_pe.data();
        t.first_holder = p.first_holder.data(), t.holder_physical = p.holder_physical.data(), t.holder_until = p.holder_until.data();
        t.sum_units = p.sum_units.data(), t.sum_holders = p.sum_holders.data();
        t.world = p.numbers.data(), t.world_peer = p.world_peer.data();
        t.grad_router = p.grad_router.data(), t.grad_shared_gate = p.grad_gate.data();
        t.peer = p.peer.data();
        const auto& of = peers(pe);
        const u32 n = u32(of.size());
        p.inter_node.assign(1 + 2 * n, 0), p.inter_node_returns = p.inter_node;
        for (u32 i = 1; i < n; i++) {
            const u32 number = (p.s.my_pe + i) % n, other = of[number];
            if (p.peer[number]) continue;
            auto list = [&](std::vector<u32>& inter_node) {
                inter_node[1 + n + number] = inter_node[0];
                inter_node[1 + inter_node[0]++] = number;
            };
            if (relay_for(pe, other) == other) list(p.inter_node);
            if (intra_node(pe, other) || is_relay_of(pe, other)) list(p.inter_node_returns);
        }
        t.inter_node = p.inter_node.data(), t.inter_node_returns = p.inter_node_returns.data(), t.relay = p.relay.data();
        p.local = static_cast<char*>(std::aligned_alloc(256, (p.info.local_bytes + 255) / 256 * 256));
        // Memory that is never written must not look like a valid value.
        std::memset(p.local, 0xa5, p.info.local_bytes);
        p.layer_bytes.resize(p.info.layer_bytes);
        aristos_layer(&p.s, &t, reinterpret_cast<u64>(p.local), p.world_peer[pe], p.layer_bytes.data(), &p.info);
        std::memset(reinterpret_cast<char*>(p.info.local_zero), 0, p.info.local_zero_bytes);
    }

    // Splits weights into planes of the layer's dtype; the remainder is dropped from the weights.
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

    // Launches a kernel on one PE; false if it failed.
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

    // Runs `work(pe)` for all PEs, concurrently.
    void all(const std::function<void(u32)>& work) const {
        std::vector<std::thread> threads;
        for (u32 pe = 0; pe < s.n_world; pe++) threads.emplace_back(work, pe);
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
    std::printf("1 cases, %d failed\n", failures ? 1 : 0);  // the last line, as in testing.h
    return failures ? 1 : 0;
}

}  // namespace world
