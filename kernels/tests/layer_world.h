// Small layers with weights on the emulator, for tests of the persistent kernels. Every PE runs several passes, whose results are kept and
// compared with float64. Routing is the layer's own (checked by route_test.cpp), and its choices are read back.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>

#include "../layer_ampere.cu"
#include "../layer_ampere_64x128.cu"
#include "../layer_hopper.cu"
#include "../layer_hopper_128x128.cu"
#include "../layer_hopper_256x256.cu"
#include "../routing.cu"
#include "route_world.h"
#include "small_path.h"

namespace world {

// One forward pass of all PEs, optionally with its backward.
struct Forward {
    std::vector<u32> tokens;  // by PE
    bool backward = true;
    bool hot = false;         // tokens prefer Options::hot
};

// Chunk buffers of a window as chosen by the host (src/moe/device/windows.rs) for evenly spread experts: at least as many as even routing
// fills.
inline u32 window_buffers(u32 tokens, u32 experts, u32 top_k, u32 pes, u32 chunk_rows, u32 round_chunks) {
    double none = 1;
    for (u32 i = 0; i < top_k; i++) none *= std::max(0.0, 1.0 - double((experts + pes - 1) / pes) / (experts - i));
    const double rows = std::min(double(tokens), std::ceil(tokens * (1 - none) + 3 * std::sqrt(tokens * (1 - none) * none)));
    return std::min(round_chunks, std::max((7 * round_chunks + 15) / 16, u32(std::ceil(rows / chunk_rows))));
}

enum Path { PATH_AMPERE, PATH_HOPPER, PATH_SMALL, PATH_AMPERE_64X128, PATH_HOPPER_128X128, PATH_HOPPER_256X256, PATH_SMALL_CTA_PAIR };
inline bool is_hopper(Path path) { return path == PATH_HOPPER || path == PATH_HOPPER_128X128 || path == PATH_HOPPER_256X256; }
inline bool in_cta_pairs(Path path) { return path == PATH_HOPPER_256X256 || path == PATH_SMALL_CTA_PAIR; }
inline bool is_small(Path path) { return path == PATH_SMALL || path == PATH_SMALL_CTA_PAIR; }

struct Options {
    u32 n_pes = 1, tokens = 40, hidden = 64, intermediate = 48, experts = 4, top_k = 2, dtype = DTYPE_F16;
    u32 shared = 0, bias = 0, gated = 1, round_chunks = 0, chunk_rows = 16, round_slots = 0, bulk = 0;
    u32 window_chunks = 0, blocks = 3, training = 1;
    u32 tile = 0, tile_columns = 0;  // tile size; for CTA pairs half of the rows; 0: the path's
    u32 hosts = 0;                // PEs with experts; 0: all
    u32 copies = 1;               // PEs that hold each expert; several with host_plan only
    double capacity = 0;
    float aux_loss = 0, z_loss = 0;
    u32 hot = NONE;               // expert that hot passes prefer, or avoid if `cold`
    bool cold = false;
    std::vector<Forward> passes;  // empty: two passes, with different token counts
    std::vector<u8> reachable;    // as for aristos_host_world; empty: all
    std::vector<u32> host_of;     // host of each PE, with one row per host; empty: one row per PE
    std::vector<u32> group_of;    // EP group of each PE; each group has all experts; empty: one group, where `copies` are replicas
    Path path = PATH_AMPERE;
    u64 seed = 1;                 // of all data
    u64 schedule = 1;             // of the emulator and of delays between launches
    u32 delay_us = 0;             // maximum delay
    u64 first_pass = 1, first_forward = 1;
    const char* forward_kernel = nullptr;  // null: of `path`
    bool host_plan = false;       // routing and plan made at random by the test instead of the kernels
    u64 wait_limit_ns = 60'000'000'000;
};

struct Expert {
    std::vector<u16> gate, up, down;
    std::vector<float> gate_bias, up_bias, down_bias;
};

// Weights and gradients of experts of one shape, with a gap after each array.
struct Arrays {
    static constexpr u32 MATRIX_GAP = 8, GAP = 4;  // elements
    std::vector<u16> matrices[3];                  // gate, up, down
    std::vector<float> biases[3], gradients[6];
    u64 sizes[6] = {};  // elements of one expert's array

    explicit Arrays(const std::vector<const Expert*>& of) {
        for (const Expert* e : of) {
            const std::vector<u16>* from[3] = {&e->gate, &e->up, &e->down};
            const std::vector<float>* from_bias[3] = {&e->gate_bias, &e->up_bias, &e->down_bias};
            for (u32 k = 0; k < 3; k++) {
                sizes[k] = from[k]->size(), sizes[3 + k] = from_bias[k]->size();
                matrices[k].insert(matrices[k].end(), from[k]->begin(), from[k]->end());
                matrices[k].resize(matrices[k].size() + MATRIX_GAP, 0x7fff);
                biases[k].insert(biases[k].end(), from_bias[k]->begin(), from_bias[k]->end());
                biases[k].resize(biases[k].size() + GAP, NAN);
            }
            for (u32 k = 0; k < 6; k++) gradients[k].resize(gradients[k].size() + sizes[k] + GAP, NAN);
        }
    }
    // Bytes from one expert's array to the next one's; 0 if absent.
    u64 pitch(u32 k) const { return sizes[k] == 0 ? 0 : k < 3 ? (sizes[k] + MATRIX_GAP) * 2 : (sizes[k] + GAP) * 4; }
    u64 gradient_pitch(u32 k) const { return (sizes[k] + GAP) * 4; }
    MlpWeights weights() const {
        auto pointer = [&](const auto& v, u32 k) { return sizes[k] ? v.data() : nullptr; };
        return {pointer(matrices[0], 0), pointer(matrices[1], 1), pointer(matrices[2], 2),
                pointer(biases[0], 3), pointer(biases[1], 4), pointer(biases[2], 5)};
    }
    MlpStrides weight_strides() const { return {pitch(0), pitch(1), pitch(2), pitch(3), pitch(4), pitch(5)}; }
    MlpGradients gradient() {
        return {gradients[0].data(), gradients[1].data(), gradients[2].data(), gradients[3].data(), gradients[4].data(), gradients[5].data()};
    }
    MlpStrides gradient_strides() const {
        return {gradient_pitch(0), gradient_pitch(1), gradient_pitch(2), gradient_pitch(3), gradient_pitch(4), gradient_pitch(5)};
    }
};

struct Doubles {
    std::vector<double> gate, up, down, gate_bias, up_bias, down_bias;
};

// Results of one PE after one forward pass and its backward.
struct Snapshot {
    bool done = false;
    std::vector<float> out, dx, weights, d_weights, shared_weight, d_shared_weight;
    std::vector<u32> chosen, expert_rows;
    std::vector<double> loss_sums;
    std::vector<std::vector<float>> gradients;  // six of each expert
    PassStats forward{}, backward{};
    u64 hidden_bytes = 0;  // bytes of gradient sums put by the persistent kernel
};

struct Layers {
    Options o;
    std::mt19937_64 random;
    std::unique_ptr<World> w;
    std::vector<Expert> experts;  // routed experts by global number, then the shared one
    std::vector<std::unique_ptr<Arrays>> routed, shared;  // by PE
    std::vector<std::vector<std::vector<u16>>> x, grad_output;  // by PE and pass
    std::vector<std::vector<TensorMap>> maps;
    std::vector<std::vector<Snapshot>> seen;  // by PE and pass

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

    // Sets of PEs that each hold all experts: the groups, or without groups `copies` consecutive ranges of PEs.
    std::vector<std::vector<u32>> ranges;
    u32 range_of(u32 pe) const { return o.group_of.empty() ? pe * o.copies / o.n_pes : o.group_of[pe]; }
    void list_ranges() {
        const u32 hosts = o.hosts ? o.hosts : o.n_pes;
        if (!o.group_of.empty()) o.copies = *std::max_element(o.group_of.begin(), o.group_of.end()) + 1;
        ranges.resize(o.copies);
        for (u32 pe = 0; pe < hosts; pe++) ranges[o.group_of.empty() ? pe * o.copies / hosts : o.group_of[pe]].push_back(pe);
    }
    // Destination of PE `from`'s rows for expert `e`.
    u32 holder(u32 e, u32 from) const {
        const auto& of = ranges[range_of(from)];
        return of[e % of.size()];
    }
    std::vector<u32> holders(u32 e) const {
        std::vector<u32> all;
        for (const auto& of : ranges) all.push_back(of[e % of.size()]);
        return all;
    }

    explicit Layers(const Options& options) : o(options), random(options.seed) {
        list_ranges();
        for (u32 i = 0; i < 2 && options.passes.empty(); i++) {
            Forward f;
            f.backward = o.training;
            for (u32 pe = 0; pe < o.n_pes; pe++) f.tokens.push_back(o.tokens - (i * 7 + pe * 3) % o.tokens);
            o.passes.push_back(f);
        }
        if (in_cta_pairs(o.path)) o.blocks = (o.blocks + 1) / 2 * 2;
        LayerShape s = world::shape();
        s.n_pes = o.n_pes, s.hidden = o.hidden, s.intermediate = o.intermediate, s.n_experts = o.experts, s.top_k = o.top_k;
        s.dtype = o.dtype, s.gated = o.gated, s.bias = o.bias, s.activation = ACT_SILU;
        s.shared_intermediate = o.shared ? 32 : 0, s.shared_gate = o.shared, s.shared_gated = 1, s.shared_activation = ACT_GELU;
        s.shared_bias = o.bias && o.shared;
        s.aux_loss_coef = o.aux_loss, s.z_loss_coef = o.z_loss, s.capacity_factor = o.capacity;
        s.max_tokens = o.tokens, s.chunk_rows = o.chunk_rows, s.round_chunks = o.round_chunks, s.window_chunks = o.window_chunks, s.round_slots = o.round_slots;
        s.training = o.training, s.bulk = o.bulk, s.blocks = o.blocks;
        s.tile_m = is_small(o.path) ? SmallTile::M : 128, s.tile_n = is_small(o.path) ? SmallTile::N : 256;
        if (in_cta_pairs(o.path)) s.tile_m *= 2;
        if (o.path == PATH_AMPERE_64X128) s.tile_m = 64, s.tile_n = 128;
        if (o.path == PATH_HOPPER_128X128) s.tile_n = 128;
        if (o.tile) s.tile_m = in_cta_pairs(o.path) ? 2 * o.tile : o.tile, s.tile_n = o.tile_columns;
        s.wait_limit_ns = o.wait_limit_ns;
        for (u8 r : o.reachable) s.stage |= !r;
        w = std::make_unique<World>(s, [&](u32 e) { return holders(e)[0]; }, o.reachable, o.schedule, [&](u32 e) { return holders(e); }, o.host_of, o.group_of);
        for (u32 e = 0; e <= o.experts; e++) {
            bool shared = e == o.experts, gated = shared || o.gated;
            u64 h = o.hidden, i = shared ? s.shared_intermediate : o.intermediate;
            Expert m;
            if (gated) m.gate = matrix(i * h, 0.25f);
            m.up = matrix(i * h, 0.25f), m.down = matrix(h * i, 0.25f);
            if (o.bias) m.gate_bias = vector(i), m.up_bias = vector(i), m.down_bias = vector(h);
            experts.push_back(m);
        }
        routed.resize(o.n_pes), shared.resize(o.n_pes), x.resize(o.n_pes), grad_output.resize(o.n_pes), seen.resize(o.n_pes);
        std::vector<float> router = vector(u64(o.experts) * o.hidden), gate = vector(o.hidden);
        // The first feature marks hot tokens.
        if (o.hot != NONE) {
            for (u32 e = 0; e < o.experts; e++) router[u64(e) * o.hidden] = 0;
            router[u64(o.hot) * o.hidden] = o.cold ? -16.0f : 16.0f;
        }
        for (u32 pe = 0; pe < o.n_pes; pe++) make(pe, router, gate);
    }

    // The world reads the tables' addresses when it makes the layers, so the layers are made again after the weights are added.
    void make(u32 pe, const std::vector<float>& router, const std::vector<float>& gate) {
        Pe& p = *w->pes[pe];
        p.router_f32 = router;
        w->set_router(p);
        p.gate.assign(gate.begin(), gate.end());
        for (const Forward& f : o.passes) {
            x[pe].push_back(matrix(u64(o.tokens) * o.hidden, 1.0f));
            grad_output[pe].push_back(matrix(u64(o.tokens) * o.hidden, 1.0f));
            for (u32 t = 0; t < o.tokens && o.hot != NONE; t++) x[pe].back()[u64(t) * o.hidden] = narrow(f.hot, o.dtype);
        }
        seen[pe].resize(o.passes.size());
        std::vector<const Expert*> held;
        for (u32 e = 0; e < o.experts; e++)
            if (w->number(e, pe) != NONE) held.push_back(&experts[e]);
        routed[pe] = std::make_unique<Arrays>(held);
        shared[pe] = std::make_unique<Arrays>(std::vector<const Expert*>{&experts.back()});
        p.tables.weights = routed[pe]->weights(), p.tables.weight_strides = routed[pe]->weight_strides();
        p.tables.shared_weights = shared[pe]->weights();
        p.tables.gradients = routed[pe]->gradient(), p.tables.gradient_strides = routed[pe]->gradient_strides();
        p.tables.shared_gradients = shared[pe]->gradient();
        if (is_hopper(o.path)) {
            maps.emplace_back(2 * WEIGHT_MAPS);
            list_maps(maps.back().data(), *routed[pe], u32(held.size()), o.intermediate);
            list_maps(maps.back().data() + WEIGHT_MAPS, *shared[pe], o.shared ? 1 : 0, p.s.shared_intermediate);
            p.tables.tensor_maps = maps.back().data();
        }
        p.tables.router_f32 = p.router_f32.data();
        p.tables.shared_gate = p.s.shared_gate ? p.gate.data() : nullptr;
        p.tables.router = p.router.data();
        aristos_layer(&p.s, &p.tables, reinterpret_cast<u64>(p.local), p.world_peer[pe], p.layer_bytes.data(), &p.info);
        for (const SlotArray& a : p.info.slot_arrays) {
            if (a.at && aristos_host_tensor_map(reinterpret_cast<void*>(a.at), a.base, a.rows, a.cols, a.row_stride_bytes, a.box_rows, 64, 2))
                fail(aristos_host_error());
        }
        if (is_small(o.path))
            p.info.launches[KERNEL_FORWARD] = p.info.launches[KERNEL_BACKWARD] = {o.blocks, SmallTile::THREADS, SmallTile::LAUNCH_BYTES, 1};
    }
    void list_maps(TensorMap* to, const Arrays& of, u32 experts, u32 intermediate) const {
        for (u32 k = 0; k < WEIGHT_MAPS; k++) {
            const u32 rows = k == 2 ? o.hidden : intermediate, columns = k == 2 ? intermediate : o.hidden;
            if (experts == 0 || of.sizes[k] == 0) continue;
            if (aristos_host_tensor_map_3d(to + k, reinterpret_cast<u64>(of.matrices[k].data()), rows, columns, columns * 2, experts, of.pitch(k), 64, 64, 2))
                fail(aristos_host_error());
        }
    }

    // ---- The passes.
    bool failed(u32 pe) const { return w->pes[pe]->layer().error->kind != ERROR_NONE; }

    std::string kernel(const std::string& direction) const {
        if (is_small(o.path)) return "test_" + direction + (o.path == PATH_SMALL ? "_small" : "_small_cta_pair");
        const char* infix = tile_launch(is_hopper(o.path) ? HOPPER : AMPERE, w->pes[0]->s.tile_m, w->pes[0]->s.tile_n).infix;
        return "aristos_" + direction + infix + (o.dtype == DTYPE_F16 ? "_f16" : "_bf16");
    }
    bool forward(u32 pe, Pass& p) {
        bool planned = o.host_plan ? plan(pe, u32(p.forward - o.first_forward))
                                   : w->launch(pe, KERNEL_ROUTE, "aristos_route", p) && w->launch(pe, KERNEL_PLAN, "aristos_plan", p);
        if (!planned || !w->launch(pe, KERNEL_FORWARD, o.forward_kernel ? o.forward_kernel : kernel("forward").c_str(), p) || failed(pe)) return false;
        return !sums_losses() || (w->launch(pe, KERNEL_SUM_LOSSES, "aristos_sum_losses", p) && !failed(pe));
    }
    // Whether losses are summed over several groups.
    bool sums_losses() const { return w->groups.size() > 1 && (o.aux_loss != 0 || o.z_loss != 0); }
    bool backward(u32 pe, Pass& p, u64& hidden_bytes) {
        if (!w->launch(pe, KERNEL_BACKWARD, kernel("backward").c_str(), p) || failed(pe)) return false;
        hidden_bytes = w->pes[pe]->layer().stats->all_reduce_bytes;
        return o.copies == 1 || (w->launch(pe, KERNEL_ALL_REDUCE, "aristos_all_reduce", p) && !failed(pe));
    }
    // Writes random choices in place of the routing kernels, which have many threads and take long under ThreadSanitizer.
    bool plan(u32 pe, u32 i) {
        const Layer& l = w->pes[pe]->layer();
        const LayerShape& s = l.shape;
        const Forward& f = o.passes[i];
        std::mt19937_64 draws(o.seed * 1000 + i * 64 + pe);
        *l.stats = {};
        for (u32 k = 0; l.sizes.has_losses && k < 2 + 2 * s.n_experts; k++) l.losses.mine[k] = double(draws() % 1000);
        for (u32 t = 0; t < f.tokens[pe]; t++) {
            std::vector<u32> all(s.n_experts);
            for (u32 e = 0; e < s.n_experts; e++) all[e] = e;
            std::shuffle(all.begin(), all.end(), draws);
            if (f.hot && o.hot != NONE) std::swap(*std::find(all.begin(), all.end(), o.hot), o.cold ? all.back() : all.front());
            std::sort(all.begin(), all.begin() + s.top_k);
            for (u32 k = t * s.top_k; k < (t + 1) * s.top_k; k++)
                l.routing.chosen[k] = all[k - t * s.top_k], l.routing.routing_weights[k] = float(draws() % 1000) / 1000;
            if (o.shared) l.routing.shared_weight[t] = float(draws() % 1000) / 1000;
        }
        u32 slot_base = 0, chunk_base = 0;
        for (u32 d = 0; d < s.n_pes; d++) {
            DestPlan& to = l.plan.dest[d] = {0, 0, slot_base, 0, 0, chunk_base};
            u32* row_slot = l.plan.row_slot + u64(d) * (s.max_tokens + 1);
            u32* round_chunk = l.plan.round_chunk + u64(d) * (l.sizes.max_chunks + 1);
            u32* row_return = l.plan.row_return + u64(d) * s.max_tokens;
            // Rows by (first local expert, token).
            const u32 dest = w->peers(pe)[d];
            auto at_d = [&](u32 k) { return w->relay_for(pe, holder(l.routing.chosen[k], pe)) == dest; };
            auto local = [&](u32 k) { return w->number_for(pe, l.routing.chosen[k], holder(l.routing.chosen[k], pe)); };
            const u32 split = w->split(pe, dest);
            std::vector<std::pair<u32, u32>> heads;
            for (u32 t = 0; t < f.tokens[pe]; t++) {
                l.plan.token_row[u64(d) * s.max_tokens + t] = NONE;
                u32 head = NONE;
                for (u32 k = t * s.top_k; k < (t + 1) * s.top_k; k++)
                    if (at_d(k)) head = std::min(head, local(k));
                if (head != NONE) heads.push_back({head, t});
            }
            std::sort(heads.begin(), heads.end());
            std::vector<u32> lasts;
            for (const auto& [head, t] : heads) {
                const u32 row = to.rows++;
                l.plan.token_row[u64(d) * s.max_tokens + t] = row;
                l.plan.row_token[u64(d) * s.max_tokens + row] = t, row_slot[row] = to.slots;
                u32 last = 0;
                for (u32 k = t * s.top_k; k < (t + 1) * s.top_k; k++) {
                    if (!at_d(k)) continue;
                    const u32 at = slot_base + to.slots++;
                    last = std::max(last, local(k));
                    l.plan.slot_word[at] = local(k) << RANK_BITS;
                    l.plan.slot_weight[at] = l.routing.routing_weights[k], l.plan.slot_choice[at] = k;
                }
                lasts.push_back(last);
            }
            row_slot[to.rows] = to.slots;
            // Rounds, with ranks from 0 in each.
            to.chunks = (to.rows + s.chunk_rows - 1) / s.chunk_rows;
            std::vector<u32> ranks(s.max_local, 0);
            u32 first = 0;
            for (u32 c = 0; c < to.chunks; c++) {
                const u32 begin = row_slot[c * s.chunk_rows], end = row_slot[std::min((c + 1) * s.chunk_rows, to.rows)];
                std::vector<u32> slots(split, 0);  // slots of the round at each PE that the destination represents
                for (u32 at = slot_base + row_slot[first * s.chunk_rows]; at < slot_base + end; at++) slots[slot_expert(l.plan.slot_word[at]) % split]++;
                if (c == 0 || c - first == s.round_chunks || *std::max_element(slots.begin(), slots.end()) > s.round_slots) {
                    round_chunk[to.rounds++] = first = c;
                    ranks.assign(s.max_local, 0);
                }
                for (u32 at = slot_base + begin; at < slot_base + end; at++)
                    l.plan.slot_word[at] += ranks[slot_expert(l.plan.slot_word[at])]++;
            }
            round_chunk[to.rounds] = to.chunks;
            // Results of a round by (last local expert, row).
            for (u32 round = 0; round < to.rounds; round++) {
                std::vector<std::pair<u32, u32>> back;
                for (u32 row = round_chunk[round] * s.chunk_rows; row < std::min(round_chunk[round + 1] * s.chunk_rows, to.rows); row++)
                    back.push_back({lasts[row], row});
                std::sort(back.begin(), back.end());
                u32 number = round_chunk[round] * s.chunk_rows, before = 0;
                for (const auto& [last, row] : back) {
                    if (s.training) l.plan.return_slot[u64(d) * s.max_tokens + number] = before;
                    row_return[row] = number++, before += row_slot[row + 1] - row_slot[row];
                }
            }
            slot_base += to.slots, chunk_base += to.chunks;
        }
        return true;
    }
    // Pass `i`, with its numbers among all passes and among the forward passes.
    Pass pass(u32 pe, u32 i) {
        u64 number = o.first_pass + i;
        for (u32 k = 0; k < i; k++) number += o.passes[k].backward;
        Pass p = w->pass(pe, number, o.first_forward + i, o.passes[i].tokens[pe]);
        p.x = x[pe][i].data();
        return p;
    }

    // Runs all passes of one PE, up to the first error.
    void run_pe(u32 pe) {
        std::mt19937_64 delays(o.schedule * 64 + pe);
        auto nap = [&] {
            if (o.delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delays() % 4 ? 0 : delays() % o.delay_us));
        };
        for (u32 i = 0; i < o.passes.size(); i++) {
            Snapshot& s = seen[pe][i];
            s.out.assign(u64(o.tokens) * o.hidden, NAN), s.dx = s.out;
            Pass p = pass(pe, i);
            p.output = s.out.data();
            nap();
            if (!forward(pe, p)) return;
            s.forward = *w->pes[pe]->layer().stats;
            if (o.passes[i].backward) {
                p.pass++;
                p.grad_output = grad_output[pe][i].data();
                p.output = s.dx.data();
                nap();
                if (!backward(pe, p, s.hidden_bytes)) return;
                s.backward = *w->pes[pe]->layer().stats;
            }
            take(pe, p.tokens, o.passes[i].backward, s);
        }
    }
    void run() {
        w->all([&](u32 pe) { run_pe(pe); });
    }

    void take(u32 pe, u32 tokens, bool backward, Snapshot& s) const {
        const Layer& l = w->pes[pe]->layer();
        auto copy = [](auto& to, const auto* from, u64 count) { to.assign(from, from + count); };
        copy(s.chosen, l.routing.chosen, u64(tokens) * o.top_k);
        copy(s.weights, l.routing.routing_weights, u64(tokens) * o.top_k);
        copy(s.expert_rows, l.batches.expert_rows, l.shape.n_local);
        if (l.sizes.has_losses) copy(s.loss_sums, l.losses.all, 2 + 2 * o.experts);
        if (o.shared) copy(s.shared_weight, l.routing.shared_weight, tokens);
        if (backward) {
            copy(s.d_weights, l.routing.d_weights, u64(tokens) * o.top_k);
            if (o.shared) copy(s.d_shared_weight, l.routing.d_shared_weight, tokens);
            for (const Arrays* of : {routed[pe].get(), shared[pe].get()}) {
                const u32 experts = of == shared[pe].get() ? 1 : l.shape.n_local;
                for (u32 e = 0; e < experts; e++) {
                    for (u32 k = 0; k < 6; k++) {
                        const u64 pitch = of->gradient_pitch(k) / 4;
                        const auto begin = of->gradients[k].begin() + e * pitch;
                        s.gradients.emplace_back(begin, begin + pitch);
                    }
                }
            }
        }
        s.done = true;
    }

    // ---- Expected results.
    // Choices of a pass that the capacity limit keeps, by PE.
    std::vector<std::vector<u8>> kept(u32 i) const {
        std::vector<std::vector<u8>> all(o.n_pes);
        std::vector<u64> used(o.experts, 0);
        u64 tokens = 0;
        for (u32 t : o.passes[i].tokens) tokens += t;
        const double limit = std::ceil(o.capacity * o.top_k * double(tokens) / o.experts);
        for (u32 pe = 0; pe < o.n_pes; pe++)
            for (u32 e : seen[pe][i].chosen) all[pe].push_back(o.capacity == 0 || double(used[e]++) < limit);
        return all;
    }

    double wide(u16 v) const { return widen(v, o.dtype); }

    // Computes one expert's result for one token. With `dy`, also adds the gradient of x to `dx` and those of the weights to `d`, and
    // stores <dy, y>.
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

    // Checks the largest difference, relative to the largest value. The divisor is at least `least`, because terms may cancel almost
    // completely.
    void compare(const char* what, const float* got, const std::vector<double>& want, double least = 1e-3) const {
        double scale = least, worst = 0;
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

    // Checks that there is no error and that every pass agrees with float64.
    void verify() {
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            const ErrorRecord& e = *w->pes[pe]->layer().error;
            CHECK(e.kind == 0, "pe %u: error %u pe %u what %u phase %u expected %llx seen %llx index %llu", pe, e.kind, e.pe,
                  e.what, e.phase, (unsigned long long)e.expected, (unsigned long long)e.seen, (unsigned long long)e.index);
            if (e.kind || !seen[pe].back().done) return fail("a pass did not end");
        }
        for (u32 i = 0; i < o.passes.size(); i++) verify(i);
    }
    void verify(u32 i) {
        std::vector<Doubles> d(o.experts + 1);
        for (u32 e = 0; e < o.experts; e++) clear(d[e], e);
        const auto keep = kept(i);
        bool backward = o.passes[i].backward;
        for (u32 pe = 0; pe < o.n_pes; pe++) {
            const Snapshot& s = seen[pe][i];
            u32 tokens = o.passes[i].tokens[pe];
            clear(d[o.experts], o.experts);
            std::vector<double> y(u64(tokens) * o.hidden), gx = y, dw(u64(tokens) * o.top_k), ds(tokens);
            for (u32 t = 0; t < tokens; t++) {
                const u16* row = x[pe][i].data() + u64(t) * o.hidden;
                const u16* dy = backward ? grad_output[pe][i].data() + u64(t) * o.hidden : nullptr;
                auto one = [&](u32 e, double weight, double* d_weight) {
                    auto v = mlp(e, row, weight, dy, &gx[u64(t) * o.hidden], &d[e], d_weight);
                    for (u32 c = 0; c < o.hidden; c++) y[u64(t) * o.hidden + c] += weight * v[c];
                };
                for (u32 k = t * o.top_k; k < (t + 1) * o.top_k; k++)
                    if (keep[pe][k]) one(s.chosen[k], s.weights[k], &dw[k]);
                if (o.shared) one(o.experts, s.shared_weight[t], &ds[t]);
            }
            compare("output", s.out.data(), y);
            if (!backward) continue;
            compare("input gradient", s.dx.data(), gx);
            compare("weight gradient", s.d_weights.data(), dw, 0.1);
            if (o.shared) compare("shared weight gradient", s.d_shared_weight.data(), ds, 0.1);
            if (o.shared) compare_gradients(s, w->pes[pe]->s.n_local, o.experts, d[o.experts]);
        }
        if (!backward) return;
        for (u32 e = 0; e < o.experts; e++)
            for (u32 pe : holders(e)) compare_gradients(seen[pe][i], w->number(e, pe), e, d[e]);
    }
    void clear(Doubles& d, u32 e) const {
        const Expert& x = experts[e];
        d.gate.assign(x.gate.size(), 0), d.up.assign(x.up.size(), 0), d.down.assign(x.down.size(), 0);
        d.gate_bias.assign(x.up.size() / o.hidden, 0), d.up_bias = d.gate_bias, d.down_bias.assign(o.hidden, 0);
    }
    void compare_gradients(const Snapshot& s, u32 local, u32 e, const Doubles& d) const {
        const auto* g = &s.gradients[6 * local];
        if (!experts[e].gate.empty()) compare("gate gradient", g[0].data(), d.gate);
        compare("up gradient", g[1].data(), d.up);
        compare("down gradient", g[2].data(), d.down);
        if (!o.bias) return;
        if (!experts[e].gate.empty()) compare("gate bias gradient", g[3].data(), d.gate_bias);
        compare("up bias gradient", g[4].data(), d.up_bias);
        compare("down bias gradient", g[5].data(), d.down_bias);
    }
};

}  // namespace world
