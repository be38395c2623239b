// The emulated platform: stmatrix and TMA stores, and the mistakes that kernels can make with them.
#include <string>

#include "testing.h"

namespace aristos {
namespace {

using namespace dev;
using testing::World;

KERNEL(test_stmatrix, 32, 1)(const u32* in, u16* out) {
    u16* s = reinterpret_cast<u16*>(shared());
    const u32 r[4] = {in[lane()], in[32 + lane()], in[64 + lane()], in[96 + lane()]};
    stmatrix_x4(s + lane() * 24, r);
    sync_warp();
    for (u32 i = lane(); i < 32 * 8; i += 32) out[i] = s[i / 8 * 24 + i % 8];
}
REGISTER_KERNEL(test_stmatrix)

CASE(tsan_stmatrix) {
    World world;
    u32* in = world.heap<u32>(0);
    u16* out = world.heap<u16>(0, 4096);
    for (u32 i = 0; i < 128; ++i) in[i] = i * 2 | (i * 2 + 1) << 16;
    world.launch(0, "test_stmatrix", 1, 32, 32 * 48, static_cast<const u32*>(in), out);
    for (u32 i = 0; i < 256; ++i) {
        // Row i / 8 % 8 of matrix i / 64 has the registers of lanes 4 (i / 8 % 8) to + 3, two elements each.
        CHECK(out[i] == i, "element %u is %u", i, out[i]);
    }
}

enum StoreFault : u32 { STORE_RIGHT, STORE_WITHOUT_FENCE, STORE_REUSED, STORE_UNFINISHED, STORE_FORGOTTEN };

// Block 0 stores two boxes of 16 rows through the same shared memory, from row 8 and column 40 on. Block 0 then sets a flag, after which
// block 1 reads the boxes.
KERNEL(test_tma_store, 32, 1)(const TensorMap* map, u16* out, u32* flag, u32 fault) {
    u16* s = reinterpret_cast<u16*>(shared());
    if (block() == 0) {
        for (u32 box = 0; box < 2; ++box) {
            for (u32 row = 0; row < 16; row += 4) {
                // Four rows of 8 pieces: piece p of row r is at p ^ r % 8; each element encodes the box, its row and its column.
                const u32 r = row + lane() / 8;
                u32 words[4];
                for (u32 i = 0; i < 4; ++i) {
                    // Register i of lane l belongs to row l / 4 of matrix i. The addresses of this matrix's rows are those of the 8 lanes
                    // from 8 i on.
                    const u32 of = 8 * i + lane() / 4, its_row = row + of / 8, column = of % 8 * 8 + lane() % 4 * 2;
                    words[i] = (box << 12 | its_row << 6 | column) | (box << 12 | its_row << 6 | (column + 1)) << 16;
                }
                stmatrix_x4(reinterpret_cast<char*>(s) + r * 128 + (lane() % 8 ^ r % 8) * 16, words);
            }
            if (fault != STORE_WITHOUT_FENCE) fence_proxy_async();
            sync_warp();
            if (lane() == 0) {
                tma_store_2d(map, 40, i32(8 + 16 * box), s);
                bulk_commit();
                if (fault != STORE_REUSED) bulk_wait_read<0>();
            }
            sync_warp();
        }
        if (lane() == 0) {
            if (fault != STORE_UNFINISHED && fault != STORE_FORGOTTEN) bulk_wait<0>();
            store_release(flag, 1u);
            while (fault == STORE_UNFINISHED && load_acquire(flag + 1) == 0) pause();
            if (fault != STORE_FORGOTTEN) bulk_wait<0>();
        }
    } else {
        if (lane() == 0)
            while (load_acquire(flag) == 0) pause();
        sync_warp();
        const u16* from = reinterpret_cast<const u16*>(out + 40 * 72);
        for (u32 i = lane(); i < 40 * 72; i += 32) out[i] = from[i];
        sync_warp();
        if (lane() == 0) store_release(flag + 1, 1u);
    }
}
REGISTER_KERNEL(test_tma_store)

// Number of wrong elements that the other block read; `error` is the launch's.
u32 store_by_tma(u32 fault, u32 seed, std::string& error) {
    World world(1, 1 << 20, seed);
    u16* out = world.heap<u16>(0);
    u16* matrix = out + 40 * 72;
    u32* flag = world.heap<u32>(0, 1 << 16);
    TensorMap* map = world.heap<TensorMap>(0, 1 << 17);
    // 36 rows of 72 columns: the second box has 12 valid rows, both have 32 valid columns.
    CHECK(aristos_host_tensor_map(map, reinterpret_cast<u64>(matrix), 36, 72, 144, 16, 64, 2) == 0, "%s", aristos_host_error());
    for (u32 i = 0; i < 2 * 40 * 72; ++i) out[i] = 0xeeee;
    flag[0] = flag[1] = 0;
    error = world.try_launch(0, "test_tma_store", 2, 32, 2048, static_cast<const TensorMap*>(map), out, flag, fault);
    u32 wrong = 0;
    for (u32 row = 0; row < 40; ++row) {
        for (u32 column = 0; column < 72; ++column) {
            const bool inside = row >= 8 && row < 36 && column >= 40;
            const u32 want = inside ? (row - 8) / 16 << 12 | (row - 8) % 16 << 6 | (column - 40) : 0xeeee;
            wrong += out[row * 72 + column] != want;
        }
    }
    return wrong;
}

CASE(tsan_tma_store) {
    for (u32 seed = 0; seed < 8; ++seed) {
        std::string error;
        const u32 wrong = store_by_tma(STORE_RIGHT, seed, error);
        CHECK(error.empty() && wrong == 0, "%s, %u elements are wrong", error.c_str(), wrong);
    }
}

CASE(tma_store_without_fence_or_wait_is_reported) {
    u32 reused = 0, unfinished = 0, forgotten = 0;
    for (u32 seed = 0; seed < 16; ++seed) {
        std::string error;
        store_by_tma(STORE_WITHOUT_FENCE, seed, error);
        CHECK(error.find("tma_store_2d reads data of thread") != std::string::npos, "without a fence: %s", error.c_str());
        reused += store_by_tma(STORE_REUSED, seed, error) != 0;
        unfinished += store_by_tma(STORE_UNFINISHED, seed, error) != 0;
        store_by_tma(STORE_FORGOTTEN, seed, error);
        forgotten += error.find("without waiting for its tma_store_2d") != std::string::npos;
    }
    CHECK(reused > 0 && unfinished > 0 && forgotten > 0, "unnoticed: %u, %u, %u", reused, unfinished, forgotten);
}

}  // namespace
}  // namespace aristos

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
