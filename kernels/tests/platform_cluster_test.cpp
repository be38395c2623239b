// The emulated platform: clusters of two blocks, and the mistakes that kernels can make with them.
#include <string>

#include "testing.h"

namespace aristos {
namespace {

using namespace dev;
using testing::World;

enum ClusterFault : u32 { CLUSTER_RIGHT, CLUSTER_LEAVES_EARLY, CLUSTER_WAITS_IN_VAIN, CLUSTER_OVERWRITES };

struct ClusterTest {
    const TensorMap* map;  // 128 rows of 64 columns
    u16* out;              // [2][ITERATIONS][128][64]: each block's shared memory
    u32* words;            // [2]: values read from the other block
    u32 fault;
};
constexpr u32 ITERATIONS = 6, BOX = 64 * 64 * 2, FULL = 2 * BOX, EMPTY = FULL + 8, WORD = FULL + 16, CLUSTER_SHARED = FULL + 24;

// In each iteration each block loads one half of 16 KB by multicast to both blocks, and both blocks read all of it.
CLUSTER_KERNEL(test_cluster, 64)(ClusterTest t) {
    char* s = shared();
    u64 *full = reinterpret_cast<u64*>(s + FULL), *empty = reinterpret_cast<u64*>(s + EMPTY);
    u32* word = reinterpret_cast<u32*>(s + WORD);
    const u32 rank = cluster_rank();
    if (thread() == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, t.fault == CLUSTER_OVERWRITES ? 1 : t.fault == CLUSTER_WAITS_IN_VAIN ? 3 : 2);
        mbarrier_fence_init();
        *word = 100 + block();
    }
    cluster_sync();
    if (thread() == 0) t.words[block()] = *cluster_shared(word, rank ^ 1);
    for (u32 iteration = 0; iteration < ITERATIONS; ++iteration) {
        if (warp() == 0) {
            if (lane() == 0) {
                mbarrier_wait_cluster(empty, iteration % 2 ^ 1);
                mbarrier_arrive_expect(full, 2 * BOX);
                tma_load_3d_multicast(s + rank * BOX, t.map, full, 0, i32((rank * 64 + iteration) % 128), 0);
            }
            sync_warp();
        } else {
            mbarrier_wait(full, iteration % 2);
            for (u32 i = 0; i < rank * 40; ++i) pause();  // the second block is slower
            for (u32 i = lane(); i < 128 * 64; i += 32) {
                const u32 at = i * 2, swizzled = at ^ (at >> 7 & 7) << 4;
                t.out[(block() * ITERATIONS + iteration) * 128 * 64 + i] = *reinterpret_cast<const u16*>(s + swizzled);
            }
            fence_proxy_async();
            sync_warp();
            if (lane() == 0) {
                mbarrier_arrive(empty);
                if (t.fault != CLUSTER_OVERWRITES) mbarrier_arrive_remote(empty, rank ^ 1);
            }
        }
    }
    if (t.fault != CLUSTER_LEAVES_EARLY) cluster_sync();
}
REGISTER_CLUSTER_KERNEL(test_cluster)

// Number of wrong elements; `error` is the launch's.
u32 run_cluster(u32 fault, u32 seed, std::string& error) {
    World world(1, 1 << 20, seed);
    u16* in = world.heap<u16>(0);
    TensorMap* map = world.heap<TensorMap>(0, 1 << 16);
    u32* words = world.heap<u32>(0, (1 << 16) + 1024);
    u16* out = world.heap<u16>(0, 1 << 17);
    for (u32 i = 0; i < 128 * 64; ++i) in[i] = u16(i + 1);
    CHECK(aristos_host_tensor_map_3d(map, reinterpret_cast<u64>(in), 128, 64, 128, 1, 128 * 128, 64, 64, 2) == 0, "%s", aristos_host_error());
    error = world.try_launch(0, "test_cluster", 2, 64, CLUSTER_SHARED, ClusterTest{map, out, words, fault});
    u32 wrong = 0;
    for (u32 b = 0; b < 2; ++b) {
        wrong += words[b] != 101 - b;
        for (u32 iteration = 0; iteration < ITERATIONS; ++iteration) {
            for (u32 i = 0; i < 128 * 64; ++i) {
                // Rows past the end are zeros.
                const u32 half = i / 4096, row = (half * 64 + iteration) % 128 + i % 4096 / 64;
                wrong += out[(b * ITERATIONS + iteration) * 128 * 64 + i] != (row < 128 ? u16(row * 64 + i % 64 + 1) : 0);
            }
        }
    }
    return wrong;
}

CASE(tsan_cluster) {
    for (u32 seed = 0; seed < 8; ++seed) {
        std::string error;
        const u32 wrong = run_cluster(CLUSTER_RIGHT, seed, error);
        CHECK(error.empty() && wrong == 0, "%s, %u elements are wrong", error.c_str(), wrong);
    }
}

CASE(cluster_misuse_is_reported) {
    u32 early = 0, overwritten = 0;
    for (u32 seed = 0; seed < 6; ++seed) {
        std::string error;
        run_cluster(CLUSTER_LEAVES_EARLY, seed, error);
        early += error.find("which is") != std::string::npos || error.find("ends before the other") != std::string::npos;
        overwritten += run_cluster(CLUSTER_OVERWRITES, seed, error) != 0;
        run_cluster(CLUSTER_WAITS_IN_VAIN, seed, error);
        CHECK(error.find("deadlock") != std::string::npos, "both wait forever: %s", error.c_str());
    }
    CHECK(early > 0 && overwritten > 0, "unnoticed: %u, %u", early, overwritten);
    World world;
    const std::string error = world.try_launch(0, "test_cluster", 3, 64, CLUSTER_SHARED, ClusterTest{});
    CHECK(error.find("of clusters of two, with 3 blocks") != std::string::npos, "%s", error.c_str());
}

}  // namespace
}  // namespace aristos

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
