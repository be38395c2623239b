// Measures how much communication the GEMMs hide, in virtual time (host/virtual_time.h). The persistent kernels run unchanged except that
// products are not computed and only take the time of their FLOP. The network's rate makes the transfers as long as a given share of the
// GEMMs. Copies inside a PE cost no time.
//
//   overlap_test table     prints the tables of docs/measurements for models' shapes. "equal": only transfers as long as the GEMMs; "sums": only
//                          gradient sums; "pairs": CTA pairs against single blocks on 8 PEs; "counts": fences, signals, puts and bytes.
//
// Without an argument only small layers run, with checks. Models are scaled to 1/8: their 4,096 tokens, their columns, the rows and columns
// of tiles, and the rows of chunks. Scaled models run on as many blocks as an H100 has SMs, so that each block has the usual number of
// tasks of each kind. A task takes as long as the unscaled task does at 6 TFLOP/s per SM.
#include "testing.h"

#include "../host/virtual_time.h"
#include "protocol_cases.h"

namespace {

using namespace aristos;

constexpr u32 THREADS = 64, SCRATCH = 8192, TILE = 16;
constexpr u32 CHUNKS_LEAST = 16, LEAST_CHUNK_ROWS = 128 / 8, MOST_CHUNK_ROWS = 256 / 8;
constexpr u64 LATENCY_NS = 2000, POLL_NS = 1000;
constexpr double SHARES[] = {0.5, 0.82, 0.91};  // shares of the rows' transfer time at which startable tiles are counted

// Per PE: total time of the tasks, and end of the last one, ns.
std::vector<std::atomic<u64>> busy(64), last_end(64);

// The simulated device: blocks, columns of a tile, and the rate of a block.
struct Device {
    u32 blocks, tile_columns;
    double flop_per_ns;
};
constexpr Device SMALL_DEVICE{32, TILE, 8}, H100{132, 32, 6000.0 / (8 * 8 * 8)};
double flop_per_ns = 0;  // of the current device

u64 task_ns(const Block& b, const GemmTask& t) {
    const u32 tile_n = b.l.shape.tile_n;
    const double columns = is_paired(t) ? tile_n / 2 : tile_n, products = is_paired(t) ? 2 : 1;
    return u64(2.0 * TILE * columns * products * gemm_k(t) / flop_per_ns);
}

void spend_time(Block& b, u64 ns) {
    host::spend(ns);
    busy[b.l.shape.my_pe] += ns;
    std::atomic<u64>& last = last_end[b.l.shape.my_pe];
    last = std::max<u64>(last, dev::nanoseconds());
}

template <bool IS_BACKWARD> struct TimedPath {
    using Element = F16;
    static constexpr bool BACKWARD = IS_BACKWARD, CTA_PAIR = false;
    static constexpr u32 SHARED_BYTES = SCRATCH;
    static DEVICE void begin(const Layer&) {}
    static DEVICE void run(Block& b) {
        for (;;) {
            if (dev::thread() == 0) b.state.more = next_task(b);
            dev::sync_block();
            if (!b.state.more) return;
            if (dev::thread() == 0) {
                spend_time(b, task_ns(b, b.state.task));
                task_done(b);
            }
            dev::sync_block();
        }
    }
};

// Path of CTA pairs, with tiles of twice the rows. Everything around the tasks is the layer's code (cta_pair.h). A half without rows
// takes no time.
template <bool IS_BACKWARD> struct TimedCtaPairPath {
    using Element = F16;
    static constexpr bool BACKWARD = IS_BACKWARD, CTA_PAIR = true;
    using CtaPair = aristos::CtaPair;
    static constexpr u32 SHARED_BYTES = SCRATCH;
    static DEVICE void begin(const Layer&) {}
    static DEVICE void run(Block& b) {
        State& s = b.state;
        CtaPairScheduler source{b};
        const bool first = !CtaPair::is_second(), one = dev::thread() == 0;
        CtaPair::call(b);
        for (;;) {
            if (one && first) s.more = source.next(s.task, [] { return false; });
            if (one && !first) source.await();
            dev::cluster_sync();
            if (one && !first) {
                s.more = *dev::cluster_shared(&s.more, 0);
                if (s.more) s.task = *dev::cluster_shared(&s.task, 0), s.task.m0 += TILE;
                source.follow(s.more);
            }
            dev::cluster_sync();
            if (!s.more) return;
            if (one && s.task.m0 < gemm_m(s.task)) spend_time(b, task_ns(b, s.task));
            dev::cluster_sync();
            if (one && first) count_done(source.done_counters(s.task));
        }
    }
};

}  // namespace

namespace aristos {
KERNEL(test_forward_timed, THREADS, 1)(const Layer* layer, Pass pass) { run_pass<TimedPath<false>>(*layer, pass); }
REGISTER_KERNEL(test_forward_timed)
KERNEL(test_backward_timed, THREADS, 1)(const Layer* layer, Pass pass) { run_pass<TimedPath<true>>(*layer, pass); }
REGISTER_KERNEL(test_backward_timed)
CLUSTER_KERNEL(test_forward_timed_cta_pair, THREADS)(const Layer* layer, Pass pass) { run_pass<TimedCtaPairPath<false>>(*layer, pass); }
REGISTER_CLUSTER_KERNEL(test_forward_timed_cta_pair)
CLUSTER_KERNEL(test_backward_timed_cta_pair, THREADS)(const Layer* layer, Pass pass) { run_pass<TimedCtaPairPath<true>>(*layer, pass); }
REGISTER_CLUSTER_KERNEL(test_backward_timed_cta_pair)
}  // namespace aristos

namespace {

struct Model {
    const char* name;
    u32 hidden, intermediate, experts, top_k;
};
// Mixtral 8x7B: 4096, 14336; Qwen3-30B-A3B: 2048, 768; DeepSeek-V3: 7168, 2048.
constexpr Model MIXTRAL{"Mixtral", 512, 1792, 8, 2}, QWEN{"Qwen3-30B", 256, 96, 128, 8}, DEEPSEEK{"DeepSeek-V3", 896, 256, 256, 8};

// Measurements of one pass over all PEs: times in ns, bytes, and the share of tiles that could start at each of SHARES.
struct Result {
    double compute = 0, end = 0, gemm_end = 0, waits = 0, wire_bytes = 0, row_bytes = 0, sum_bytes = 0;
    double startable[3] = {};
};

// Rows of each tile of a PE, own tiles first.
std::vector<u32> tile_rows(const Layer& l) {
    std::vector<u32> rows(l.sizes.max_tiles, 0);
    for (u32 e = 0; e < l.shape.n_local; e++) {
        const u32 own = l.batches.own[e], rest = l.batches.total[e] - own;
        const u32 tile = l.shape.tile_m;
        for (u32 r = 0; r < own; r += tile) rows[l.batches.own_tile[e] + r / tile] = tile;
        for (u32 r = 0; r < rest; r += tile) rows[l.batches.rest_tile[e] + r / tile] = std::min(tile, rest - r);
    }
    return rows;
}

// Gradient sums after a backward: none, or those of experts that several PEs hold, with or without the persistent kernel's part.
enum Sums { NO_SUMS, SUMS_HIDDEN, SUMS_AFTER };

Result pass(world::Layers& t, bool backward, double bytes_per_ns, double row_wire_ns, Sums sums = NO_SUMS) {
    const u32 n = t.o.n_pes;
    host::VirtualTime time(n, n * t.o.blocks, {bytes_per_ns, LATENCY_NS, POLL_NS});
    host::World& w = *static_cast<host::World*>(t.w->handle);
    for (u32 pe = 0; pe < n; pe++) busy[pe] = last_end[pe] = 0;
    // [share][pe]: counts of arrived rows per tile.
    std::vector<std::vector<std::vector<u32>>> arrived(3, std::vector<std::vector<u32>>(n));
    for (u32 i = 0; i < 3; i++) {
        time.at(u64(SHARES[i] * row_wire_ns), [&, i] {
            for (u32 pe = 0; pe < n; pe++) {
                const Layer& l = t.w->pes[pe]->layer();
                const u32* counts = l.counters[l.control->steps & 1].arrived;
                arrived[i][pe].assign(counts, counts + l.sizes.max_tiles);
            }
        });
    }
    w.time = &time;
    t.w->all([&](u32 pe) {
        Pass p = t.pass(pe, 0);
        std::vector<float> out(u64(t.o.tokens) * t.o.hidden);
        p.output = out.data();
        if (backward) p.pass++, p.grad_output = t.grad_output[pe][0].data();
        u32& summed = const_cast<Layer&>(t.w->pes[pe]->layer()).shape.summed;
        const u32 as_made = summed;
        if (sums != SUMS_HIDDEN) summed = 0;
        const std::string kernel = backward ? "test_backward_timed" : "test_forward_timed";
        t.w->launch(pe, backward ? KERNEL_BACKWARD : KERNEL_FORWARD, (kernel + (world::in_cta_pairs(t.o.path) ? "_cta_pair" : "")).c_str(), p);
        summed = as_made;
    });
    if (sums != NO_SUMS) {
        time.next(n * t.w->pes[0]->info.launches[KERNEL_ALL_REDUCE].grid);
        // With `grad_weights` the caller has routed the pass. The kernel then sums only the experts' gradients.
        float given;
        t.w->all([&](u32 pe) {
            Pass p = t.pass(pe, 0);
            p.pass++, p.grad_weights = &given;
            t.w->launch(pe, KERNEL_ALL_REDUCE, "aristos_all_reduce", p);
        });
    }
    w.time = nullptr;
    Result r;
    r.end = double(time.ended());
    double tiles = 0, started[3] = {};
    for (u32 pe = 0; pe < n; pe++) {
        const Layer& l = t.w->pes[pe]->layer();
        CHECK(l.error->kind == ERROR_NONE, "pe %u: error %u pe %u what %u", pe, l.error->kind, l.error->pe, l.error->what);
        r.compute = std::max(r.compute, double(busy[pe]) / t.o.blocks);
        r.gemm_end = std::max(r.gemm_end, double(last_end[pe]));
        r.waits += (double(last_end[pe]) - double(busy[pe]) / t.o.blocks) / n;
        r.wire_bytes = std::max(r.wire_bytes, double(time.sent_bytes(pe)));
        r.row_bytes = std::max(r.row_bytes, double(l.stats->dispatch_row_bytes + l.stats->dispatch_slot_bytes));
        r.sum_bytes = std::max(r.sum_bytes, double(l.stats->all_reduce_bytes));
        const auto rows = tile_rows(l);
        for (u32 tile = 0; tile < rows.size(); tile++) {
            tiles += rows[tile] > 0;
            for (u32 i = 0; i < 3; i++) started[i] += rows[tile] > 0 && tile < arrived[i][pe].size() && arrived[i][pe][tile] >= rows[tile];
        }
    }
    for (u32 i = 0; i < 3; i++) r.startable[i] = started[i] / tiles;
    return r;
}

struct Scaled {
    world::Options o;
    Device device;
    explicit Scaled(const Model& m, u32 pes, u32 tokens, const Device& device, u32 copies = 1, bool pair = false) : device(device) {
        o.copies = copies;
        o.path = pair ? world::PATH_SMALL_CTA_PAIR : world::PATH_SMALL, o.tile = TILE, o.tile_columns = device.tile_columns, o.blocks = device.blocks;
        o.host_plan = true;
        o.n_pes = pes, o.tokens = tokens, o.hidden = m.hidden, o.intermediate = m.intermediate, o.experts = m.experts, o.top_k = m.top_k;
        o.reachable.assign(pes * pes, 0);
        // Twice the even share of rows per round, with chunks and windows as chosen by the host.
        const u32 group = pes / copies, round_rows = std::min(tokens, 2 * tokens * std::min(m.top_k, group) / group);
        o.chunk_rows = std::clamp(round_rows / CHUNKS_LEAST, LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS);
        o.round_chunks = round_rows / o.chunk_rows;
        o.window_chunks = world::window_buffers(tokens, m.experts, m.top_k, group, o.chunk_rows, o.round_chunks);
        o.wait_limit_ns = 1'000'000'000'000;
        o.passes = {{std::vector<u32>(pes, tokens)}};
    }
    // Forward, or the backward after it, with transfers that take `ratio` of the GEMMs' time.
    Result run(bool backward, double ratio) const {
        flop_per_ns = device.flop_per_ns;
        world::Layers t(o);
        for (u32 pe = 0; pe < o.n_pes; pe++) t.plan(pe, 0);
        const double fast = 1e9;
        Result free = pass(t, false, fast, 0);
        if (backward) free = pass(t, true, fast, 0);
        if (ratio == 0) return free;
        const double rate = free.wire_bytes / (ratio * free.compute);
        world::Layers again(o);
        for (u32 pe = 0; pe < o.n_pes; pe++) again.plan(pe, 0);
        if (!backward) return pass(again, false, rate, free.row_bytes / rate);
        pass(again, false, fast, 0);
        return pass(again, true, rate, free.row_bytes / rate);
    }
    // A backward with sums whose transfers alone take `ratio` of the GEMMs' time.
    Result run_sums(Sums sums, double ratio) const {
        flop_per_ns = device.flop_per_ns;
        auto backward = [&](double rate) {
            world::Layers t(o);
            for (u32 pe = 0; pe < o.n_pes; pe++) t.plan(pe, 0);
            pass(t, false, 1e9, 0);
            return pass(t, true, rate, 0, sums);
        };
        const Result free = backward(1e9);
        return backward(free.sum_bytes / (ratio * free.compute));
    }
};

void print(const char* name, u32 pes, bool backward, double ratio, const Result& r) {
    std::printf("| %s | %u | %s | %.1f | %.0f / %.0f / %.0f | %.2f | %.2f | %.3f |\n", name, pes, backward ? "backward" : "forward", ratio, 100 * r.startable[0],
                100 * r.startable[1], 100 * r.startable[2], r.gemm_end / r.compute, r.waits / r.compute, (r.end - r.compute) / r.compute);
    std::fflush(stdout);
}

// Prints the time that backward and the sums take beyond the GEMMs: with the sums after backward, and inside it.
void print_sums(const char* name, u32 groups, u32 pes, double ratio, const Result& after, const Result& hidden) {
    const double was = after.end / after.compute - 1, is = hidden.end / hidden.compute - 1;
    std::printf("| %s | %u x %u | %.1f | %.2f | %.2f | %.2f | %.0f |\n", name, groups, pes / groups, ratio, was, is, is / was, 100 * (was - is) / ratio);
    std::fflush(stdout);
}

void sums_table() {
    std::puts("\nSums of experts' gradients between groups. Wire: of the sums alone, in times of the GEMMs of backward. Exposed: what backward and sums take beyond "
              "these. Hidden: of the sums' time on the wire, %.\n");
    std::puts("| model | groups x PEs | wire | exposed, sums after backward | inside | ratio | hidden |\n|---|---|---:|---:|---:|---:|---:|");
    for (const Model& m : {MIXTRAL, QWEN, DEEPSEEK}) {
        for (u32 groups : {2u, 4u}) {
            const Scaled layer(m, 4 * groups, 512, H100, groups);
            for (double ratio : {0.25, 0.5, 1.0})
                print_sums(m.name, groups, 4 * groups, ratio, layer.run_sums(SUMS_AFTER, ratio), layer.run_sums(SUMS_HIDDEN, ratio));
        }
    }
}

// Prints maximum counts over the PEs. Chunks have 1/8 of 256 rows, so that there are as many chunks as with 4,096 tokens.
void counts_table() {
    std::puts("| model | PEs | inter-node peers | pass | fences | signals | puts | bytes over the network |\n|---|---:|---:|---|---:|---:|---:|---:|");
    for (const Model& m : {MIXTRAL, QWEN, DEEPSEEK}) {
        for (u32 pes : {2u, 4u, 8u, 16u}) {
            if (m.experts < pes) continue;
            const Scaled layer(m, pes, 512, H100);
            flop_per_ns = H100.flop_per_ns;
            world::Layers t(layer.o);
            for (u32 pe = 0; pe < pes; pe++) t.plan(pe, 0);
            for (bool backward : {false, true}) {
                pass(t, backward, 1e9, 0);
                PassStats most{};
                for (u32 pe = 0; pe < pes; pe++) {
                    const PassStats& s = *t.w->pes[pe]->layer().stats;
                    most.fences = std::max(most.fences, s.fences), most.signals = std::max(most.signals, s.signals);
                    most.puts = std::max(most.puts, s.puts), most.network_bytes = std::max(most.network_bytes, s.network_bytes);
                }
                std::printf("| %s | %u | %u | %s | %llu | %llu | %llu | %llu |\n", m.name, pes, pes - 1, backward ? "backward" : "forward", (unsigned long long)most.fences,
                            (unsigned long long)most.signals, (unsigned long long)most.puts, (unsigned long long)most.network_bytes);
                std::fflush(stdout);
            }
        }
    }
    std::puts("\nSums of experts' gradients between two groups in a backward, by the formula that protocol_test sets beside the counters, at the models' own sizes.\n");
    std::puts("| model | groups x PEs | experts a PE | fences, one for each piece | fences | signals, as many puts | bytes |\n|---|---|---:|---:|---:|---:|---:|");
    struct Full { const char* name; u32 hidden, intermediate, experts, pes; };
    for (const Full& f : {Full{"Mixtral", 4096, 14336, 8, 4}, {"Qwen3-30B", 2048, 768, 128, 8}, {"DeepSeek-V3", 7168, 2048, 256, 16}}) {
        world::Pe p;
        p.s = world::shape();
        p.s.n_pes = f.pes, p.s.n_world = 2 * f.pes, p.s.hidden = f.hidden, p.s.intermediate = f.intermediate, p.s.n_experts = f.experts;
        p.s.gated = p.s.training = p.s.stage = p.s.summed = 1, p.s.bias = p.s.shared_intermediate = 0, p.s.channels = 108;
        p.sum_holders = {{0, 0}, {f.pes, 0}};
        for (u32 e = 0; e < f.experts / f.pes; e++) p.sum_units.push_back({e, 2, 0, 0});
        const auto inter_node = [](u32) { return true; };
        const protocol_cases::SumCounts c = protocol_cases::expected_sum_counts(p, inter_node);
        std::printf("| %s | 2 x %u | %u | %llu | %llu | %llu | %llu |\n", f.name, f.pes, f.experts / f.pes, (unsigned long long)c.puts, (unsigned long long)c.fences,
                    (unsigned long long)c.puts, (unsigned long long)protocol_cases::expected_sums(p, inter_node));
    }
}

void table_head() {
    std::puts("Times in those of the GEMMs. Startable: tiles whose rows are there at 50 / 82 / 91% of the rows' time on the wire, %.\n");
    std::puts("| model | PEs | pass | wire | startable | end of GEMMs | tensor cores wait | exposed |\n|---|---:|---|---:|---|---:|---:|---:|");
}

void cta_pairs_table() {
    table_head();
    for (const Model& m : {MIXTRAL, QWEN, DEEPSEEK}) {
        for (bool backward : {false, true}) {
            for (bool pair : {false, true}) {
                const std::string name = std::string(m.name) + (pair ? ", pairs" : "");
                print(name.c_str(), 8, backward, 1, Scaled(m, 8, 512, H100, 1, pair).run(backward, 1));
            }
        }
    }
}

void table(std::initializer_list<double> ratios) {
    table_head();
    for (const Model& m : {MIXTRAL, QWEN, DEEPSEEK}) {
        for (u32 pes : {4u, 8u, 16u}) {
            if (m.experts < pes) continue;
            const Scaled layer(m, pes, 512, H100);
            for (bool backward : {false, true})
                for (double ratio : ratios) print(m.name, pes, backward, ratio, layer.run(backward, ratio));
        }
    }
}

}  // namespace

// A small layer whose transfers take as long as its GEMMs. The bound is far above the actual time, and far below the time with rows sent in
// token order.
CASE(communication_is_mostly_hidden) {
    const Result r = Scaled({"small", 64, 64, 32, 4}, 4, 256, SMALL_DEVICE).run(false, 1);
    print("small", 4, false, 1, r);
    CHECK(r.end < 1.5 * r.compute, "%.2f of the GEMMs", r.end / r.compute);
    CHECK(r.startable[1] > 0.4, "%.0f%% of tiles", 100 * r.startable[1]);
}

// With CTA pairs, which have half as many tiles, about as much is hidden. Outside tasks each block of a pair works on its own.
CASE(communication_is_mostly_hidden_with_cta_pairs) {
    const Model small{"small, pairs", 64, 64, 32, 4};
    const Scaled layer(small, 4, 256, SMALL_DEVICE, 1, true);
    const Result r = layer.run(false, 1), back = layer.run(true, 1);
    print(small.name, 4, false, 1, r);
    print(small.name, 4, true, 1, back);
    CHECK(r.end < 1.5 * r.compute && back.end < 1.5 * back.compute, "%.2f and %.2f of the GEMMs", r.end / r.compute, back.end / back.compute);
}

// The sums' transfers take 0.25 of the GEMMs' time. Inside backward they must cost at least 0.15 of the GEMMs' time less than after it.
CASE(gradient_sums_are_mostly_hidden) {
    const Scaled layer({"small", 64, 64, 16, 4}, 4, 256, SMALL_DEVICE, 2);
    const Result after = layer.run_sums(SUMS_AFTER, 0.25), hidden = layer.run_sums(SUMS_HIDDEN, 0.25);
    print_sums("small", 2, 4, 0.25, after, hidden);
    CHECK(hidden.end < after.end - 0.15 * after.compute, "%.2f instead of %.2f of the GEMMs", hidden.end / hidden.compute, after.end / after.compute);
}

int main(int argc, char** argv) {
    if (argc == 2 && std::string(argv[1]) == "table") return table({0.0, 0.5, 1.0, 2.0}), sums_table(), world::failures > 0;
    if (argc == 2 && std::string(argv[1]) == "equal") return table({1.0}), world::failures > 0;
    if (argc == 2 && std::string(argv[1]) == "sums") return sums_table(), world::failures > 0;
    if (argc == 2 && std::string(argv[1]) == "counts") return counts_table(), world::failures > 0;
    if (argc == 2 && std::string(argv[1]) == "pairs") return cta_pairs_table(), world::failures > 0;
    return testing::testing_main(argc, argv);
}
