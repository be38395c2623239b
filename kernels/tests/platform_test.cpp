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

// ---- mma

template <class T> struct Mma {
    const T *a, *b;
    float* d;
    u32 turns;
};
template <class T> DEVICE void multiply(Mma<T> m) {
    const u32 g = lane() / 4, t = lane() % 4;
    u32 a[4], b[2];
    float d[4];
    for (u32 i = 0; i < 4; ++i) {
        const T* p = m.a + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2);
        a[i] = u32(p[0].bits) | u32(p[1].bits) << 16;
        d[i] = m.d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    }
    for (u32 i = 0; i < 2; ++i) {
        const T* p = m.b + (2 * t + 8 * i) * 8 + g;
        b[i] = u32(p[0].bits) | u32(p[8].bits) << 16;
    }
    for (u32 turn = 0; turn < m.turns; ++turn) mma<T>(d, a, b);
    if (warp() == 0) {
        for (u32 i = 0; i < 4; ++i) m.d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];
    }
}
KERNEL(test_mma_bf16, 128, 1)(Mma<Bf16> m) { multiply(m); }
REGISTER_KERNEL(test_mma_bf16)
KERNEL(test_mma_f16, 128, 1)(Mma<F16> m) { multiply(m); }
REGISTER_KERNEL(test_mma_f16)

template <class T> void fill(T* p, u32 n, std::mt19937& random) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (u32 i = 0; i < n; ++i) p[i] = from_float<T>(uniform(random));
}

template <class T> void check_mma(const char* kernel) {
    World world;
    std::mt19937 random(5);
    T* a = world.heap<T>(0);
    T* b = a + 256;
    float* d = reinterpret_cast<float*>(b + 128);
    fill(a, 256 + 128, random);
    std::vector<float> before(128);
    for (u32 i = 0; i < 128; ++i) before[i] = d[i] = float(i) / 64;
    world.launch(0, kernel, 1, 32, 0, Mma<T>{a, b, d, 1});
    for (u32 m = 0; m < 16; ++m) {
        for (u32 n = 0; n < 8; ++n) {
            double want = before[m * 8 + n];
            for (u32 k = 0; k < 16; ++k) want += double(to_float(a[m * 16 + k])) * to_float(b[k * 8 + n]);
            CHECK(std::abs(want - d[m * 8 + n]) < 1e-5, "%u, %u: %g, not %g", m, n, d[m * 8 + n], want);
        }
    }
}
CASE(mma_bf16) { check_mma<Bf16>("test_mma_bf16"); }
CASE(mma_f16) { check_mma<F16>("test_mma_f16"); }

CASE(mma_speed) {
    World world;
    Bf16* a = world.heap<Bf16>(0);
    const u32 turns = 20000;
    const u64 start = nanoseconds();
    world.launch(0, "test_mma_bf16", 1, 128, 0, Mma<Bf16>{a, a + 256, reinterpret_cast<float*>(a + 512), turns});
    std::printf("  %.0f ns an mma of 32 lanes\n", double(nanoseconds() - start) / turns / 4);
}

}  // namespace aristos

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
