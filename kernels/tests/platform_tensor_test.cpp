// Tensor-core instructions and their operand copies on the CPU, each against independent arithmetic.
#include "testing.h"

namespace aristos {

using namespace dev;
using testing::World;

// ---- mma

template <class T> struct Mma {
    const T *a, *b;
    float* d;
    u32 iterations;
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
    for (u32 iteration = 0; iteration < m.iterations; ++iteration) mma<T>(d, a, b);
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
    const u32 iterations = 20000;
    const u64 start = nanoseconds();
    world.launch(0, "test_mma_bf16", 1, 128, 0, Mma<Bf16>{a, a + 256, reinterpret_cast<float*>(a + 512), iterations});
    std::printf("  %.0f ns an mma of 32 lanes\n", double(nanoseconds() - start) / iterations / 4);
}

// ---- ldmatrix

KERNEL(test_ldmatrix, 32, 1)(const u16* in, u32* out) {
    // Rows of 24 elements, so that they are not contiguous.
    u16* s = reinterpret_cast<u16*>(shared());
    for (u32 i = lane(); i < 32 * 8; i += 32) s[i / 8 * 24 + i % 8] = in[i];
    sync_warp();
    u32 plain[4], transposed[4];
    ldmatrix_x4(plain, s + lane() * 24);
    ldmatrix_x4_trans(transposed, s + lane() * 24);
    for (u32 i = 0; i < 4; ++i) {
        out[lane() * 8 + i] = plain[i];
        out[lane() * 8 + 4 + i] = transposed[i];
    }
}
REGISTER_KERNEL(test_ldmatrix)

CASE(tsan_ldmatrix) {
    World world;
    u16* in = world.heap<u16>(0);
    u32* out = world.heap<u32>(0, 4096);
    for (u32 i = 0; i < 256; ++i) in[i] = u16(i * 7);
    world.launch(0, "test_ldmatrix", 1, 32, 32 * 48, static_cast<const u16*>(in), out);
    for (u32 l = 0; l < 32; ++l) {
        for (u32 i = 0; i < 4; ++i) {
            const u16* matrix = in + i * 64;
            const u32 row = l / 4, col = l % 4 * 2;
            const u32 plain = u32(matrix[row * 8 + col]) | u32(matrix[row * 8 + col + 1]) << 16;
            const u32 transposed = u32(matrix[col * 8 + row]) | u32(matrix[(col + 1) * 8 + row]) << 16;
            CHECK(out[l * 8 + i] == plain, "lane %u, register %u", l, i);
            CHECK(out[l * 8 + 4 + i] == transposed, "transposed, lane %u, register %u", l, i);
        }
    }
}

// ---- cp.async

KERNEL(test_cp_async, 32, 1)(const Vec16* in, Vec16* out, u32 mode) {
    Vec16* s = reinterpret_cast<Vec16*>(shared());
    const u32 i = lane();
    s[i] = s[32 + i] = Vec16{{1, 1, 1, 1}};
    cp_async16(s + i, in + i, true);
    cp_async_commit();
    cp_async16(s + 32 + i, in + 32 + i, i % 2 == 0);
    cp_async_commit();
    if (mode == 1) cp_async_wait<1>();
    if (mode == 2) cp_async_wait<0>();
    out[i] = s[i];
    out[32 + i] = s[32 + i];
}
REGISTER_KERNEL(test_cp_async)

CASE(tsan_cp_async_lands_at_the_wait) {
    u32 early = 0;
    for (u32 mode = 0; mode < 3; ++mode) {
        for (u32 seed = 0; seed < 4; ++seed) {
            World world(1, 1 << 20, seed);
            Vec16* in = world.heap<Vec16>(0);
            Vec16* out = world.heap<Vec16>(0, 4096);
            for (u32 i = 0; i < 64; ++i) in[i] = Vec16{{i + 100, 2, 3, i + 4}};
            world.launch(0, "test_cp_async", 1, 32, 2048, static_cast<const Vec16*>(in), out, mode);
            for (u32 i = 0; i < 64; ++i) {
                const Vec16 want = i < 32 || i % 2 == 0 ? in[i] : Vec16{};
                const bool there = std::memcmp(&out[i], &want, 16) == 0;
                const bool covered = mode == 2 || (mode == 1 && i < 32);
                CHECK(there || !covered, "mode %u, piece %u", mode, i);
                early += there && !covered;
            }
        }
    }
    CHECK(early < 4 * 96 / 3, "%u pieces of %u arrived before a wait", early, 4 * 96);
    CHECK(early > 0, "no copy arrived early");
}

// ---- TMA

constexpr i32 FLAT = -1000;  // Box::item of a 2-D map
struct Box { i32 col, row, item; };
KERNEL(test_tma, 64, 1)(const TensorMap* map, u16* out, Box at) {
    constexpr u32 BOX_ROWS = 24;
    u64* bar = reinterpret_cast<u64*>(shared() + 16384);
    if (thread() == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
    }
    sync_block();
    for (u32 iteration = 0; iteration < 3; ++iteration) {
        char* to = shared() + (iteration == 1 ? 1024 + 3072 : 1024);
        if (thread() == 0) {
            mbarrier_arrive_expect(bar, BOX_ROWS * 128);
            if (at.item == FLAT) tma_load_2d(to, map, bar, at.col, at.row + i32(iteration));
            else tma_load_3d(to, map, bar, at.col, at.row + i32(iteration), at.item);
        }
        mbarrier_wait(bar, iteration % 2);
        for (u32 i = thread(); i < BOX_ROWS * 64; i += threads()) {
            const u32 r = i / 64, c = i % 64;
            out[iteration * BOX_ROWS * 64 + i] = *reinterpret_cast<u16*>(to + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2);
        }
        sync_block();
    }
}
REGISTER_KERNEL(test_tma)

CASE(tsan_tma) {
    World world;
    constexpr u32 ROWS = 50, COLS = 100, STRIDE = 112;
    u16* matrix = world.heap<u16>(0);
    u16* out = world.heap<u16>(0, 65536);
    TensorMap* map = world.heap<TensorMap>(0, 32768);
    for (u32 i = 0; i < ROWS * STRIDE; ++i) matrix[i] = u16(i + 1);
    CHECK(aristos_host_tensor_map(map, u64(matrix), ROWS, COLS, STRIDE * 2, 24, 64, 2) == 0);
    CHECK(aristos_host_tensor_map(map, u64(matrix), ROWS, COLS, STRIDE * 2 + 2, 24, 64, 2) != 0);
    for (i32 col : {0, 8, 56, 99, -8}) {
        for (i32 row : {0, 20, 40, -3, 60}) {
            world.launch(0, "test_tma", 1, 64, 16384 + 8, static_cast<const TensorMap*>(map), out, Box{col, row, FLAT});
            for (i32 i = 0; i < 3 * 24 * 64; ++i) {
                const i32 r = row + i / (24 * 64) + i / 64 % 24, c = col + i % 64;
                const u16 want = r >= 0 && r < i32(ROWS) && c >= 0 && c < i32(COLS) ? matrix[r * i32(STRIDE) + c] : 0;
                CHECK(out[i] == want, "box at %d, %d: element %d is %u, not %u", row, col, i, out[i], want);
            }
        }
    }
}

// Matrices of a 3-D map: a box has rows of one matrix only, and zeros for a matrix that does not exist.
CASE(tsan_tma_3d) {
    World world;
    constexpr u32 ROWS = 30, COLS = 72, STRIDE = 80, ITEMS = 3, ITEM = 32 * STRIDE;
    u16* matrices = world.heap<u16>(0);
    u16* out = world.heap<u16>(0, 65536);
    TensorMap* map = world.heap<TensorMap>(0, 32768);
    for (u32 i = 0; i < ITEMS * ITEM; ++i) matrices[i] = u16(i + 1);
    CHECK(aristos_host_tensor_map_3d(map, u64(matrices), ROWS, COLS, STRIDE * 2, ITEMS, ITEM * 2 + 2, 24, 64, 2) != 0);
    CHECK(aristos_host_tensor_map_3d(map, u64(matrices), ROWS, COLS, STRIDE * 2, ITEMS, ITEM * 2, 24, 64, 2) == 0);
    for (i32 item : {0, 1, 2, 3, -1}) {
        for (i32 row : {0, 20, -3}) {
            const i32 col = row == 20 ? 56 : 0;
            world.launch(0, "test_tma", 1, 64, 16384 + 8, static_cast<const TensorMap*>(map), out, Box{col, row, item});
            for (i32 i = 0; i < 3 * 24 * 64; ++i) {
                const i32 r = row + i / (24 * 64) + i / 64 % 24, c = col + i % 64;
                const bool inside = item >= 0 && item < i32(ITEMS) && r >= 0 && r < i32(ROWS) && c < i32(COLS);
                const u16 want = inside ? matrices[item * i32(ITEM) + r * i32(STRIDE) + c] : 0;
                CHECK(out[i] == want, "matrix %d, box at %d, %d: element %d is %u, not %u", item, row, col, i, out[i], want);
            }
        }
    }
    const std::string error = world.try_launch(0, "test_tma", 1, 64, 16384 + 8, static_cast<const TensorMap*>(map), out, Box{0, 0, FLAT});
    CHECK(error.find("2 coordinates through a map of 3 dimensions") != std::string::npos, "%s", error.c_str());
}

// A ring of stages between a producer warp and a consumer warpgroup.
KERNEL(test_ring, 160, 1)(const TensorMap* map, u32* sums, u32 iterations) {
    constexpr u32 STAGES = 3;
    u64* full = reinterpret_cast<u64*>(shared() + STAGES * 8192);
    u64* empty = full + STAGES;
    if (thread() == 0) {
        for (u32 i = 0; i < STAGES; ++i) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, 128);
        }
        mbarrier_fence_init();
    }
    sync_block();
    if (warp() == 4) {
        for (u32 iteration = 0; iteration < iterations && lane() == 0; ++iteration) {
            const u32 stage = iteration % STAGES;
            mbarrier_wait(empty + stage, iteration / STAGES % 2 ^ 1);
            mbarrier_arrive_expect(full + stage, 8192);
            tma_load_2d(shared() + stage * 8192, map, full + stage, 0, i32(iteration));
        }
    } else {
        u32 sum = 0;
        for (u32 iteration = 0; iteration < iterations; ++iteration) {
            const u32 stage = iteration % STAGES;
            while (!mbarrier_test(full + stage, iteration / STAGES % 2)) pause();
            for (u32 i = 0; i < 32; ++i) sum += reinterpret_cast<u16*>(shared() + stage * 8192)[thread() * 32 + i] * (iteration + 1);
            mbarrier_arrive(empty + stage);
        }
        sums[thread()] = sum;
    }
}
REGISTER_KERNEL(test_ring)

CASE(tsan_ring_of_mbarriers) {
    for (u64 seed = 0; seed < 4; ++seed) {
        World world(1, 1 << 20, seed);
        u16* matrix = world.heap<u16>(0);
        u32* sums = world.heap<u32>(0, 65536);
        TensorMap* map = world.heap<TensorMap>(0, 60000 / 64 * 64);
        for (u32 i = 0; i < 100 * 64; ++i) matrix[i] = u16(i % 251);
        CHECK(aristos_host_tensor_map(map, u64(matrix), 100, 64, 128, 64, 64, 2) == 0);
        world.launch(0, "test_ring", 1, 160, 3 * 8192 + 48, static_cast<const TensorMap*>(map), sums, 20u);
        u32 sum = 0, want = 0;
        for (u32 t = 0; t < 128; ++t) sum += sums[t];
        for (u32 iteration = 0; iteration < 20; ++iteration) {
            for (u32 i = 0; i < 64 * 64; ++i) want += matrix[iteration * 64 + i] * (iteration + 1);
        }
        CHECK(sum == want, "%u, not %u", sum, want);
    }
}

// ---- cp.async counted by an mbarrier

// A warp copies and a warpgroup multiplies the data with itself, `iterations` times, through two stages. `mode` selects a mistake: 1, no
// fence; 2, the fence before the wait; 3, no wait; 4, only one warp fences; 5, TMA overwrites copied data without a fence; 6, one
// thread's copies are not counted.
struct Counted {
    const Vec16* in;
    float* out;
    const TensorMap* map;
    u32 iterations, mode;
};
KERNEL(test_counted, 160, 1)(Counted c) {
    u64* full = reinterpret_cast<u64*>(shared() + 2 * 8192);
    u64* empty = full + 2;
    if (thread() < 2) {
        mbarrier_init(full + thread(), 32);
        mbarrier_init(empty + thread(), 128);
    }
    fence_proxy_async();
    sync_block();
    float acc[32] = {};
    for (u32 iteration = 0; iteration < c.iterations; ++iteration) {
        const u32 s = iteration % 2, phase = iteration / 2 % 2;
        char* stage = shared() + s * 8192;
        if (warp() == 4) {
            mbarrier_wait(empty + s, phase ^ 1);
            for (u32 i = lane(); i < 512; i += 32) cp_async16(stage + i * 16, c.in + iteration * 512 + i, true);
            if (c.mode == 6 && lane() == 7) mbarrier_arrive(full + s);
            else cp_async_mbarrier_arrive(full + s);
            continue;
        }
        if (c.mode == 2) fence_proxy_async();
        if (c.mode != 3) mbarrier_wait(full + s, phase);
        if (c.mode == 0 || c.mode == 3 || c.mode == 6 || (c.mode == 4 && warp() == 2)) fence_proxy_async();
        if (c.mode == 5 && thread() == 0) tma_load_2d(stage, c.map, full + s, 0, 0);
        if (c.mode == 5) continue;
        const u64 desc = smem_descriptor(stage, 0, 1024);
        wgmma_fence();
        for (u32 k = 0; k < 4; ++k) wgmma<Bf16, 64, 0, 0>(acc, desc + k * 2, desc + k * 2, true);
        wgmma_commit();
        wgmma_wait<0>();
        mbarrier_arrive(empty + s);
    }
    if (warp() < 4) {
        for (u32 i = 0; i < 32; ++i) c.out[thread() * 32 + i] = acc[i];
    }
    sync_block();
    if (thread() < 2) mbarrier_inval(full + thread()), mbarrier_inval(empty + thread());
}
REGISTER_KERNEL(test_counted)

// Number of wrong sums; the launch's error in `error`.
u32 run_counted(u32 mode, u64 seed, std::string& error) {
    constexpr u32 ITERATIONS = 7;
    World world(1, 1 << 20, seed);
    Vec16* in = world.heap<Vec16>(0);
    float* out = world.heap<float>(0, 1 << 19);
    TensorMap* map = world.heap<TensorMap>(0, 1 << 18);
    CHECK(aristos_host_tensor_map(map, u64(in), 64, 64, 128, 64, 64, 2) == 0);
    // All elements of an iteration are equal, so that their positions do not matter.
    double want = 0;
    for (u32 iteration = 0; iteration < ITERATIONS; ++iteration) {
        const u32 bits = from_float<Bf16>(float(iteration + 1)).bits;
        for (u32 i = 0; i < 512; ++i) in[iteration * 512 + i] = Vec16{{bits * 65537, bits * 65537, bits * 65537, bits * 65537}};
        want += 64.0 * (iteration + 1) * (iteration + 1);
    }
    error = world.try_launch(0, "test_counted", 1, 160, 2 * 8192 + 32, Counted{in, out, map, ITERATIONS, mode});
    u32 wrong = 0;
    for (u32 i = 0; i < 128 * 32; ++i) wrong += out[i] != float(want);
    return wrong;
}

CASE(tsan_counted_cp_async) {
    std::string error;
    for (u64 seed = 0; seed < 6; ++seed) {
        const u32 wrong = run_counted(0, seed, error);
        CHECK(wrong == 0 && error.empty(), "seed %u: %u wrong %s", u32(seed), wrong, error.c_str());
    }
}
CASE(counted_cp_async_misuse_is_reported) {
    std::string error;
    u32 unseen = 0, uncounted = 0;
    for (u64 seed = 0; seed < 6; ++seed) {
        for (u32 mode : {1, 2, 4}) {
            run_counted(mode, seed, error);
            CHECK(error.find("data of thread") != std::string::npos && error.find("without fence") != std::string::npos, "%u: %s", mode, error.c_str());
        }
        run_counted(5, seed, error);
        CHECK(error.find("tma_load_2d overwrites data of thread") != std::string::npos, "%s", error.c_str());
        unseen += run_counted(3, seed, error) > 0 || !error.empty();
        uncounted += run_counted(6, seed, error) > 0 || !error.empty();
    }
    CHECK(unseen == 6, "copies without a wait were missed %u times of 6", unseen);
    CHECK(uncounted >= 3, "copies that no mbarrier counts were missed %u times of 6", uncounted);
}

// ---- wgmma

// d = 2 a b^T for a[64, 64] and b[n, 64], both row-major: the product is accumulated twice, each time by four wgmmas. Shared memory holds
// an operand K-major, or MN-major if it is transposed (TRANS_A, TRANS_B).
struct Wgmma {
    const void *a, *b;
    float* d;
    u32 mode;  // 0: correct; 1: reads accumulators before the wait; 2: overwrites B before the wait
};
constexpr u32 A_BYTES = 8192, B_BYTES = 256 * 128;

template <class T, int N, int TRANS_A, int TRANS_B> DEVICE void warpgroup_multiply(Wgmma w) {
    char* a = shared();
    char* b = shared() + A_BYTES;
    const auto lay_out = [](const void* from, u32 rows, int trans, char* to) {
        for (u32 i = thread(); i < rows * 64; i += threads()) {
            const u32 r = i / 64, k = i % 64;
            // 128-byte lines whose 16-byte pieces are permuted by the line's index within 8.
            const u32 at = trans ? r / 64 * 8192 + k * 128 + (r % 64 / 8 ^ k % 8) * 16 + r % 8 * 2
                                 : r * 128 + (k / 8 ^ r % 8) * 16 + k % 8 * 2;
            std::memcpy(to + at, static_cast<const T*>(from) + i, 2);
        }
    };
    lay_out(w.a, 64, TRANS_A, a);
    lay_out(w.b, N, TRANS_B, b);
    fence_proxy_async();
    sync_block();
    const u32 t = thread();
    float acc[N / 2];
    for (u32 i = 0; i < N / 2; ++i) acc[i] = 77;
    for (u32 iteration = 0; iteration < 2; ++iteration) {
        wgmma_fence_operand(acc);
        wgmma_fence();
        for (u32 k = 0; k < 4; ++k) {
            const u64 desc_a = smem_descriptor(a + k * (TRANS_A ? 2048 : 32), 0, 1024);
            const u64 desc_b = smem_descriptor(b + k * (TRANS_B ? 2048 : 32), 8192, 1024);
            wgmma<T, N, TRANS_A, TRANS_B>(acc, desc_a, desc_b, iteration + k > 0);
        }
        wgmma_commit();
    }
    float early = 0;
    if (w.mode == 1) early = acc[3];
    if (w.mode == 2) std::memset(b + t * 16, 0, 16);
    wgmma_wait<0>();
    wgmma_fence_operand(acc);
    if (w.mode == 1) acc[3] = early;
    for (u32 i = 0; i < N / 2; ++i) {
        const u32 row = t / 32 * 16 + t % 32 / 4 + (i % 4 >= 2 ? 8 : 0), col = i / 4 * 8 + t % 4 * 2 + i % 2;
        w.d[row * N + col] = acc[i];
    }
}
#define WGMMA_KERNEL(T, N, A, B)                                                                          \
    KERNEL(test_wgmma_##T##_##N##_##A##B, 128, 1)(Wgmma w) { warpgroup_multiply<T, N, A, B>(w); } \
    REGISTER_KERNEL(test_wgmma_##T##_##N##_##A##B)
#define WGMMA_KERNELS(T, N) WGMMA_KERNEL(T, N, 0, 0) WGMMA_KERNEL(T, N, 0, 1) WGMMA_KERNEL(T, N, 1, 0) WGMMA_KERNEL(T, N, 1, 1)
WGMMA_KERNELS(Bf16, 64)
WGMMA_KERNELS(Bf16, 128)
WGMMA_KERNELS(Bf16, 256)
WGMMA_KERNELS(F16, 64)
WGMMA_KERNELS(F16, 128)
WGMMA_KERNELS(F16, 256)

// Number of elements that differ from the product.
template <class T> u32 run_wgmma(const std::string& name, u32 n, u32 mode, u64 seed, bool expect_right) {
    World world(1, 1 << 20, seed);
    std::mt19937 random(9);
    T* a = world.heap<T>(0);
    T* b = a + 64 * 64;
    float* d = world.heap<float>(0, 1 << 17);
    fill(a, 64 * 64, random);
    fill(b, n * 64, random);
    world.launch(0, name.c_str(), 1, 128, A_BYTES + B_BYTES, Wgmma{a, b, d, mode});
    u32 wrong = 0;
    for (u32 m = 0; m < 64; ++m) {
        for (u32 j = 0; j < n; ++j) {
            double want = 0;
            for (u32 k = 0; k < 64; ++k) want += 2.0 * to_float(a[m * 64 + k]) * to_float(b[j * 64 + k]);
            const bool right = std::abs(want - d[m * n + j]) < 1e-4;
            wrong += !right;
            CHECK(right || !expect_right, "%s: %u, %u: %g, not %g", name.c_str(), m, j, d[m * n + j], want);
        }
    }
    return wrong;
}

CASE(wgmma) {
    for (u32 n : {64, 128, 256}) {
        for (const char* trans : {"00", "01", "10", "11"}) {
            const std::string end = "_" + std::to_string(n) + "_" + trans;
            run_wgmma<Bf16>("test_wgmma_Bf16" + end, n, 0, n, true);
            run_wgmma<F16>("test_wgmma_F16" + end, n, 0, n + 1, true);
        }
    }
}

CASE(wgmma_before_its_wait) {
    u32 wrong = 0;
    for (u64 seed = 0; seed < 8; ++seed) {
        CHECK(run_wgmma<Bf16>("test_wgmma_Bf16_64_00", 64, 1, seed, false) >= 128);
        wrong += run_wgmma<Bf16>("test_wgmma_Bf16_64_00", 64, 2, seed, false) > 0;
    }
    CHECK(wrong >= 6, "overwriting an operand was seen with %u seeds of 8", wrong);
}

// Two products in flight; the wait covers only the first.
KERNEL(test_wgmma_groups, 256, 1)(const Bf16* ones, float* d) {
    char* s = shared();
    for (u32 i = thread(); i < 64 * 64; i += threads()) reinterpret_cast<Bf16*>(s)[i] = ones[0];
    fence_proxy_async();
    sync_block();
    float first[32], second[32];
    for (u32 i = 0; i < 32; ++i) first[i] = second[i] = float(warp() / 4);
    const u64 desc = smem_descriptor(s, 0, 1024);
    wgmma_fence();
    wgmma<Bf16, 64, 0, 0>(first, desc, desc, true);
    wgmma_commit();
    wgmma<Bf16, 64, 0, 0>(second, desc, desc, true);
    wgmma<Bf16, 64, 0, 0>(second, desc, desc, true);
    wgmma_commit();
    wgmma_wait<1>();
    d[thread()] = first[31];
    d[512 + thread()] = second[31];
    wgmma_wait<0>();
    d[256 + thread()] = second[31];
}
REGISTER_KERNEL(test_wgmma_groups)

CASE(wgmma_groups) {
    World world;
    Bf16* ones = world.heap<Bf16>(0);
    float* d = world.heap<float>(0, 4096);
    ones[0] = from_float<Bf16>(1);
    world.launch(0, "test_wgmma_groups", 1, 256, 8192, static_cast<const Bf16*>(ones), d);
    for (u32 t = 0; t < 256; ++t) {
        CHECK(d[t] == 16 + float(t / 128), "thread %u: %g", t, d[t]);
        CHECK(d[256 + t] == 32 + float(t / 128), "thread %u: %g", t, d[256 + t]);
        CHECK(std::isnan(d[512 + t]), "thread %u sees %g before the wait", t, d[512 + t]);
    }
}

KERNEL(test_wgmma_no_fence, 128, 1)() {
    float acc[32] = {};
    wgmma<Bf16, 64, 0, 0>(acc, smem_descriptor(shared(), 0, 1024), smem_descriptor(shared(), 0, 1024), false);
    wgmma_commit();
    wgmma_wait<0>();
}
REGISTER_KERNEL(test_wgmma_no_fence)

CASE(wgmma_without_fence_is_refused) {
    World world;
    const std::string error = world.try_launch(0, "test_wgmma_no_fence", 1, 128, 8192);
    CHECK(error.find("without wgmma_fence") != std::string::npos, "%s", error.c_str());
}

CASE(wgmma_speed) {
    World world;
    const u64 start = nanoseconds();
    for (u32 i = 0; i < 20; ++i) world.launch(0, "test_wgmma_Bf16_256_00", 1, 128, A_BYTES + B_BYTES,
                                              Wgmma{world.heap(0), world.heap(0, 65536), world.heap<float>(0, 1 << 17), 0});
    std::printf("  %.1f us a wgmma of n = 256, with all around it\n", double(nanoseconds() - start) / 20 / 8 / 1000);
}

}  // namespace aristos

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
