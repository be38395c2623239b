// The primitives of platform.h on the CPU, each against arithmetic of its own.
#include "testing.h"

namespace aristos {

using namespace dev;
using testing::World;

// ---- barriers, exchanges, memory

KERNEL(test_exchange, 1024, 1)(u32* out) {
    const u32 i = block() * threads() + thread();
    u32 sum = shfl(thread(), 5) + 3 * shfl_xor(thread(), 7) + 5 * shfl_up(thread(), 2) + 7 * (ballot(thread() % 3 == 0) & 0xffff);
    sum += u32(shfl(float(lane()) + 0.5f, 9) * 2) + u32(shfl(u64(lane()) << 40, 3) >> 40);
    u32* s = reinterpret_cast<u32*>(shared());
    s[thread()] = thread();
    sync_block();
    sum += s[(thread() + 33) % threads()];
    sync_block();
    if (thread() == 0) s[0] = 0;
    sync_block();
    shared_add(s, 1u);
    sum += sync_block_or(thread() == threads() - 1) * 1000 + sync_block_or(false) * 5000;
    out[i] = sum + s[0];
}
REGISTER_KERNEL(test_exchange)

CASE(exchange) {
    for (u32 seed = 0; seed < 3; ++seed) {
        World world(1, 1 << 20, seed);
        const u32 n = 256;
        world.launch(0, "test_exchange", 3, n, 4096, world.heap<u32>(0));
        for (u32 i = 0; i < 3 * n; ++i) {
            const u32 t = i % n, lane = t % 32, base = t / 32 * 32;
            u32 ballot = 0;
            for (u32 l = 0; l < 32; ++l) ballot |= u32((base + l) % 3 == 0) << l;
            u32 want = base + 5 + 3 * (t ^ 7) + 5 * (lane >= 2 ? t - 2 : t) + 7 * (ballot & 0xffff) + 19 + 3;
            want += (t + 33) % n + 1000 + n;
            CHECK(world.heap<u32>(0)[i] == want, "thread %u: %u, not %u", i, world.heap<u32>(0)[i], want);
        }
    }
}

}  // namespace aristos

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
