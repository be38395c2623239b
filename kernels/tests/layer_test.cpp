// The layer's persistent kernels: forward and backward of small layers on one and several PEs, against sums in float64.
#include "layer_world.h"

using namespace world;

namespace {

void layer_case(const char* name, const Options& o) {
    world::context = name;
    int before = failures;
    u64 start = dev::nanoseconds();
    Layers layers(o);
    layers.run();
    layers.verify();
    std::printf("%s %s (%.0f ms)\n", failures > before ? "FAILED" : "ok", name, double(dev::nanoseconds() - start) / 1e6);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    struct Named { const char* name; Options o; };
    std::vector<Named> all;
    auto add = [&](const char* name, auto change) {
        Options o;
        change(o);
        all.push_back({name, o});
    };
    add("one_pe", [](Options&) {});
    add("one_pe_inference", [](Options& o) { o.training = 0; });
    add("two_pes", [](Options& o) { o.n_pes = 2; });
    add("three_pes_shared_bias", [](Options& o) { o.n_pes = 3, o.shared = 1, o.bias = 1, o.experts = 5, o.top_k = 3; });
    add("not_gated_bf16", [](Options& o) { o.n_pes = 2, o.gated = 0, o.bias = 1, o.dtype = DTYPE_BF16; });
    add("rounds", [](Options& o) { o.n_pes = 2, o.chunk_rows = 8, o.window_chunks = 1, o.shared = 1, o.bias = 1; });
    add("rounds_skewed", [](Options& o) { o.n_pes = 3, o.chunk_rows = 8, o.window_chunks = 2, o.hosts = 1, o.passes = {{{40, 0, 34}}, {{33, 0, 27}}}; });
    add("rounds_inference", [](Options& o) { o.n_pes = 2, o.chunk_rows = 8, o.window_chunks = 1, o.training = 0; });
    add("network", [](Options& o) { o.n_pes = 2, o.reachable = {1, 0, 0, 1}, o.shared = 1; });
    add("network_rounds", [](Options& o) { o.n_pes = 2, o.reachable = {1, 0, 0, 1}, o.chunk_rows = 8, o.window_chunks = 1; });
    add("bulk", [](Options& o) { o.n_pes = 2, o.bulk = 1, o.shared = 1; });
    add("bulk_rounds", [](Options& o) { o.n_pes = 3, o.bulk = 1, o.chunk_rows = 8, o.window_chunks = 1, o.hosts = 1; });
    add("hopper", [](Options& o) { o.path = PATH_HOPPER, o.n_pes = 2, o.shared = 1, o.bias = 1; });
    add("hopper_rounds", [](Options& o) { o.path = PATH_HOPPER, o.n_pes = 2, o.chunk_rows = 8, o.window_chunks = 1, o.dtype = DTYPE_BF16; });
    for (const Named& n : all) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted = wanted || std::strcmp(argv[i], n.name) == 0;
        if (wanted) layer_case(n.name, n.o);
    }
    return report("layer");
}
