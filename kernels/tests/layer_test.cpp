// The layer's persistent kernels: forward and backward of small layers on one and several PEs, against sums in float64.
#include "layer_world.h"

using namespace world;

namespace {

void right(Layers& t) {
    t.run();
    t.verify();
}

// Network signals of PE 1 are lost: both PEs time out, and each names the other.
void lost(Layers& t) {
    aristos_host_fault(t.w->handle, 1, ARISTOS_FAULT_SIGNAL_LOST);
    t.run();
    for (u32 pe = 0; pe < 2; pe++) {
        const ErrorRecord& e = *t.w->pes[pe]->layer().error;
        CHECK(e.kind == ERROR_TIMEOUT && e.pe == 1 - pe && e.what == (pe == 0 ? WHAT_COUNTS : WHAT_RESULTS),
              "pe %u: error %u pe %u what %u", pe, e.kind, e.pe, e.what);
        CHECK(e.seen < e.expected, "pe %u: seen %llx of %llx", pe, (unsigned long long)e.seen, (unsigned long long)e.expected);
    }
}

// PE 1 sends a header by which its results would lie outside its return area. PE 0 must report an error that names PE 1.
void wrong(Layers& t) {
    t.w->all([&](u32 pe) {
        Pass p = t.pass(pe, 0);
        bool ok = t.w->launch(pe, KERNEL_ROUTE, "aristos_route", p) && t.w->launch(pe, KERNEL_PLAN, "aristos_plan", p);
        const Layer& l = t.w->pes[pe]->layer();
        if (pe == 1) l.plan.dest[0].return_chunk = l.sizes.return_chunks;
        if (ok) t.w->launch(pe, KERNEL_FORWARD, t.kernel("forward").c_str(), p);
    });
    const ErrorRecord& e = *t.w->pes[0]->layer().error;
    CHECK(e.kind == ERROR_PROTOCOL && e.pe == 1 && e.what == WHAT_COUNTS, "error %u pe %u what %u", e.kind, e.pe, e.what);
}

void layer_case(const char* name, const Options& o, void (*body)(Layers&)) {
    world::context = name;
    int before = failures;
    u64 start = dev::nanoseconds();
    Layers layers(o);
    body(layers);
    std::printf("%s %s (%.0f ms)\n", failures > before ? "FAILED" : "ok", name, double(dev::nanoseconds() - start) / 1e6);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    struct Named { const char* name; Options o; void (*body)(Layers&) = right; };
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
    add("rounds", [](Options& o) { o.n_pes = 2, o.chunk_rows = 8, o.round_chunks = 1, o.shared = 1, o.bias = 1; });
    add("rounds_skewed", [](Options& o) { o.n_pes = 3, o.chunk_rows = 8, o.round_chunks = 2, o.hosts = 1, o.passes = {{{40, 0, 34}}, {{33, 0, 27}}}; });
    add("rounds_inference", [](Options& o) { o.n_pes = 2, o.chunk_rows = 8, o.round_chunks = 1, o.training = 0; });
    add("network", [](Options& o) { o.n_pes = 2, o.reachable = {1, 0, 0, 1}, o.shared = 1; });
    add("network_rounds", [](Options& o) { o.n_pes = 2, o.reachable = {1, 0, 0, 1}, o.chunk_rows = 8, o.round_chunks = 1; });
    add("bulk", [](Options& o) { o.n_pes = 2, o.bulk = 1, o.shared = 1; });
    add("bulk_rounds", [](Options& o) { o.n_pes = 3, o.bulk = 1, o.chunk_rows = 8, o.round_chunks = 1, o.hosts = 1; });
    add("hopper", [](Options& o) { o.path = PATH_HOPPER, o.n_pes = 2, o.shared = 1, o.bias = 1; });
    add("hopper_rounds", [](Options& o) { o.path = PATH_HOPPER, o.n_pes = 2, o.chunk_rows = 8, o.round_chunks = 1, o.dtype = DTYPE_BF16; });
    add("hopper_narrow_tiles", [](Options& o) { o.path = PATH_HOPPER_128X128, o.n_pes = 2, o.shared = 1, o.bias = 1, o.tokens = 150, o.intermediate = 200; });
    add("hopper_narrow_tiles_rounds", [](Options& o) { o.path = PATH_HOPPER_128X128, o.n_pes = 2, o.chunk_rows = 8, o.round_chunks = 1, o.dtype = DTYPE_BF16; });
    add("hopper_cta_pairs", [](Options& o) { o.path = PATH_HOPPER_256X256, o.n_pes = 2, o.shared = 1, o.bias = 1, o.tokens = 300, o.intermediate = 200, o.experts = 3; });
    add("hopper_cta_pairs_rounds", [](Options& o) { o.path = PATH_HOPPER_256X256, o.n_pes = 2, o.chunk_rows = 8, o.round_chunks = 1, o.dtype = DTYPE_BF16; });
    *add("hopper_cta_pairs_lost", [](Options& o) { o.path = PATH_HOPPER_256X256, o.n_pes = 2, o.reachable = {1, 0, 0, 1}, o.wait_limit_ns = 2'000'000'000; }) = lost;
    *add("hopper_cta_pairs_wrong", [](Options& o) { o.path = PATH_HOPPER_256X256, o.n_pes = 2, o.wait_limit_ns = 2'000'000'000; }) = wrong;
    add("little_tiles", [](Options& o) { o.path = PATH_AMPERE_64X128, o.n_pes = 2, o.shared = 1, o.bias = 1, o.tokens = 150, o.intermediate = 136; });
    add("little_tiles_rounds", [](Options& o) { o.path = PATH_AMPERE_64X128, o.n_pes = 2, o.chunk_rows = 8, o.round_chunks = 1, o.dtype = DTYPE_BF16; });
    add("many_blocks", [](Options& o) { o.n_pes = 2, o.blocks = 8, o.tokens = 150, o.intermediate = 264; });
    *add("lost", [](Options& o) { o.n_pes = 2, o.reachable = {1, 0, 0, 1}, o.wait_limit_ns = 2'000'000'000; }) = lost;
    *add("wrong", [](Options& o) { o.n_pes = 2, o.wait_limit_ns = 2'000'000'000; }) = wrong;
    for (const Named& n : all) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted = wanted || std::strcmp(argv[i], n.name) == 0;
        if (wanted) layer_case(n.name, n.o, n.body);
    }
    return report("layer");
}
