// The GEMM tile with mma.sync, and the activations, against float64: all kinds, element types, activations, tails.
//
//     make -C kernels/host tests && target/kernels/gemm_test
#include <algorithm>
#include <memory>
#include <set>

#include "../gemm_test_kernels.h"
#include "../host/simt.h"
#include "gemm_problem.h"
#include "testing.h"

using namespace aristos;
using reference::Near, reference::Problem;
using GemmCase = reference::Case;

namespace {

// Runs tiles on an emulated device that schedules by `seed`; each block runs several in sequence.
template <class Tile> void launch(const std::vector<GemmTask>& list, u32 blocks, bool f16, u64 seed) {
    testing::World world(1, 4096, seed);
    const GemmTask* tasks = list.data();
    const std::string name = std::string("aristos_gemm_test") + (Tile::M == 64 ? "_64x128" : "") + (f16 ? "_f16" : "_bf16");
    world.launch(0, name.c_str(), blocks, Tile::THREADS, gemm_test_shared_bytes<Tile>(), tasks, u32(list.size()));
}
template <class Tile> void launch(Problem& problem, bool f16, u64 seed) {
    launch<Tile>(problem.tasks, u32(problem.tasks.size() + 1) / 2, f16, seed);
}

void check(const GemmCase& c, Problem& problem) {
    std::string wrong = problem.verify();
    CHECK(wrong.empty(), "%s:%s", c.name().c_str(), wrong.c_str());
}

// Sizes below, at, and just above multiples of 16, 64, 128 and 256. Each of the three dimensions is M, N and K of some kind.
struct Shape { u32 rows, hidden, intermediate; };
const Shape SHAPES[] = {{1, 64, 64}, {7, 72, 136}, {128, 200, 264}, {129, 264, 128}, {200, 136, 72}, {65, 320, 200}};

template <class Tile> double products(u32 kind) {
    double worst = 0;
    for (u32 f16 = 0; f16 < 2; f16++)
        for (u32 gated = 0; gated < 2; gated++)
            for (u32 s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++) {
                // Any four consecutive shapes have all activations; the flags take all values with each type.
                GemmCase c{kind, SHAPES[s].rows, SHAPES[s].hidden, SHAPES[s].intermediate, f16 != 0, gated != 0, (s + f16) % 4,
                           s % 2 == 0, s % 3 != 1, s / 2 % 2 == 0, (s + gated) % 3 != 2, s % 2};
                Problem problem(c, Tile::M, Tile::N);
                launch<Tile>(problem, c.f16, s + 1);
                check(c, problem);
                worst = std::fmax(worst, problem.worst());
            }
    return worst;
}
void products(u32 kind) {
    const double large = products<LargeTile>(kind), little = products<SmallTile>(kind);
    std::printf("  worst error %.3f of its bound, in small tiles %.3f\n", large, little);
}

template <class Act> void test_activation(u32 activation) {
    double worst_value = 0, worst_slope = 0;
    auto at = [&](float x) {
        ValueSlope got = Act::at(x);
        Near v = reference::value_f32(activation, x), s = reference::slope_f32(activation, x);
        // Allows half of the smallest normal number in addition, because results below it may be flushed to zero.
        double off_value = std::fabs(got.value - v.value) / (v.error + 0x1p-127);
        double off_slope = std::fabs(got.slope - s.value) / (s.error + 0x1p-127);
        CHECK(off_value <= 1 && off_slope <= 1, "activation %u at %.9g: %.9g, slope %.9g, not %.9g, %.9g", activation, x, got.value,
              got.slope, v.value, s.value);
        worst_value = std::fmax(worst_value, off_value), worst_slope = std::fmax(worst_slope, off_slope);
    };
    for (int i = -200000; i <= 200000; i++) at(float(i) * 1e-4f);
    for (float x = 1e-30f; x < 1e30f; x *= 1.7f) at(x), at(-x);
    at(0.0f), at(-0.0f);
    const float inf = INFINITY;
    CHECK(std::isnan(Act::at(NAN).value));
    CHECK(Act::at(inf).value == inf && Act::at(inf).slope == 1.0f);
    ValueSlope low = Act::at(-inf);
    CHECK(std::fabs(low.value) < 1e-34f && std::fabs(low.slope) < 1e-34f);
    std::printf("  activation %u: worst error %.3f of its bound, slope %.3f\n", activation, worst_value, worst_slope);
}

}  // namespace

CASE(activations) {
    test_activation<Silu>(ACT_SILU);
    test_activation<Gelu>(ACT_GELU);
    test_activation<GeluTanh>(ACT_GELU_TANH);
    test_activation<Relu>(ACT_RELU);
}

CASE(forward_up) { products(FORWARD_UP); }
CASE(forward_down) { products(FORWARD_DOWN); }
CASE(backward_down) { products(BACKWARD_DOWN); }
CASE(backward_up) { products(BACKWARD_UP); }
CASE(grad_up) { products(GRAD_UP); }
CASE(grad_down) { products(GRAD_DOWN); }

namespace {

// Results must not depend on the order in which the device runs warps and copies.
template <class Tile> void repeatable() {
    for (u32 kind = 0; kind < GEMM_KINDS; kind++) {
        GemmCase c{kind, 137, 136, 328, kind % 2 != 0, true, ACT_SILU, true, true, true, true, 1};
        Problem first(c, Tile::M, Tile::N);
        launch<Tile>(first, c.f16, 1);
        check(c, first);
        for (u64 seed = 2; seed < 5; seed++) {
            Problem again(c, Tile::M, Tile::N);
            launch<Tile>(again, c.f16, seed);
            CHECK(again.same_outputs(first), "%s: other bits with seed %llu", c.name().c_str(), static_cast<unsigned long long>(seed));
        }
    }
}

// One block computes tiles of different kinds in sequence, so one must leave no state for the next.
template <class Tile> void kinds_in_turn() {
    for (u64 seed = 1; seed < 4; seed++) {
        std::vector<GemmCase> cases;
        std::vector<std::unique_ptr<Problem>> problems;
        std::vector<GemmTask> tasks;
        for (u32 kind = 0; kind < GEMM_KINDS; kind++) {
            cases.push_back({kind, 40 + 33 * kind, 136, 264, false, kind % 2 == 0, ACT_GELU, true, true, seed == 2, true, 1});
            problems.push_back(std::make_unique<Problem>(cases.back(), Tile::M, Tile::N));
        }
        for (size_t i = 0, before = ~size_t(0); before != tasks.size(); i++) {
            before = tasks.size();
            for (auto& problem : problems)
                if (i < problem->tasks.size()) tasks.push_back(problem->tasks[i]);
        }
        launch<Tile>(tasks, 2, false, seed);
        for (u32 kind = 0; kind < GEMM_KINDS; kind++) check(cases[kind], *problems[kind]);
    }
}

// Threads of a block, and blocks with neighbouring tiles, share memory only across barriers.
template <class Tile> void tsan_products() {
    for (u32 kind = 0; kind < GEMM_KINDS; kind++) {
        GemmCase c{kind, 130, 136, 264, false, true, ACT_SILU, true, true, true, true, 0};
        Problem problem(c, Tile::M, Tile::N);
        launch<Tile>(problem, c.f16, 1);
        check(c, problem);
    }
}

// Checks the numbers of products and copies for tiles with few rows. A half without rows must not be multiplied, and rows past the end must
// not be copied.
template <class Tile> void empty_rows(u32 kind) {
    auto run = [&](u32 rows, u64& products, u64& copies) {
        GemmCase c{kind, rows, 128, 128, false, true, ACT_SILU, true, true, true, true, 0};
        Problem problem(c, Tile::M, Tile::N);
        products = host::work.products, copies = host::work.copies;
        launch<Tile>({problem.tasks[0]}, 1, false, 1);
        products = host::work.products - products, copies = host::work.copies - copies;
    };
    u64 all, all_copies;
    run(Tile::M, all, all_copies);
    const u64 pieces = (kind == BACKWARD_UP ? 256 : 128) / 8, b_pieces = all_copies - Tile::M * pieces;
    for (u32 rows : {1u, Tile::M / 2 - 1, Tile::M / 2, Tile::M / 2 + 1}) {
        u64 products, copies;
        run(rows, products, copies);
        CHECK(products == (rows > Tile::M / 2 ? all : all / 2), "kind %u, %u rows: %llu products of %llu", kind, rows, (unsigned long long)products,
              (unsigned long long)all);
        CHECK(copies == b_pieces + rows * pieces, "kind %u, %u rows: %llu copies, not %llu", kind, rows, (unsigned long long)copies,
              (unsigned long long)(b_pieces + rows * pieces));
    }
}

}  // namespace

namespace {

// Number of shared-memory cycles of an access in which lane l reads or writes `bytes` bytes at `at(l)`. As many lanes as access 128 bytes
// in total, 4 from each bank, are executed at a time. Bank conflicts add cycles.
template <class At> u32 wavefronts(u32 bytes, At at) {
    u32 count = 0;
    for (u32 first = 0, together = 128 / bytes; first < 32; first += together) {
        std::set<u32> words[32];
        for (u32 lane = first; lane < first + together; lane++)
            for (u32 byte = 0; byte < bytes; byte += 4) words[(at(lane) + byte) / 4 % 32].insert((at(lane) + byte) / 4);
        size_t most = 0;
        for (const auto& of_bank : words) most = std::max(most, of_bank.size());
        count += u32(most);
    }
    return count;
}

// All accesses of the epilogue to every unit of a tile must be free of bank conflicts. Lanes access consecutive pieces of a unit.
template <class Tile, bool HALVES> void bank_conflicts() {
    std::set<u32> written;
    for (u32 unit = 0; unit < Tile::UNITS; unit++) {
        const u32 begin = unit * UNIT_BYTES;
        for (u32 n = 0; n < 8; n++)
            for (u32 low = 0; low < 16; low += 8) {
                const auto at = [&](u32 lane) { return begin + stored_at<HALVES>(lane / 4 + low, lane % 4 * 2, n); };
                CHECK(wavefronts(8, at) == 2, "%u x %u, unit %u: stores of columns %u take %u", Tile::M, Tile::N, unit, n * 8, wavefronts(8, at));
                for (u32 lane = 0; lane < 32; lane++) written.insert(at(lane));
            }
        for (u32 gated = 0; gated <= u32(HALVES); gated++) {
            const u32 pieces = gated ? UNIT_PIECES / 2 : UNIT_PIECES;
            for (u32 item = 0; item < UNIT_ROWS * pieces; item += 32)
                for (u32 of_up = 0; of_up <= gated; of_up++)
                    for (u32 half = 0; half < 2; half++) {
                        const u32 took = wavefronts(16, [&](u32 lane) {
                            const u32 row = (item + lane) / pieces, piece = (item + lane) % pieces + of_up * pieces;
                            return begin + unit_offset<HALVES>(row, piece * 2 + half);
                        });
                        CHECK(took == 4, "%u x %u, unit %u, gated %u: loads of item %u take %u wavefronts", Tile::M, Tile::N, unit, gated, item, took);
                    }
        }
    }
    CHECK(written.size() == Tile::M * Tile::N / 2, "offsets shared by two accumulators");
}
template <class Tile> void bank_conflicts() { bank_conflicts<Tile, true>(), bank_conflicts<Tile, false>(); }

}  // namespace

CASE(bank_conflicts) { bank_conflicts<LargeTile>(), bank_conflicts<SmallTile>(); }

CASE(repeatable) { repeatable<LargeTile>(), repeatable<SmallTile>(); }
CASE(kinds_in_turn) { kinds_in_turn<LargeTile>(), kinds_in_turn<SmallTile>(); }
CASE(tsan_products) { tsan_products<LargeTile>(), tsan_products<SmallTile>(); }

CASE(empty_rows) {
    for (u32 kind : {FORWARD_UP, FORWARD_DOWN, BACKWARD_DOWN, BACKWARD_UP}) empty_rows<LargeTile>(kind), empty_rows<SmallTile>(kind);
}

int main(int argc, char** argv) { return testing::testing_main(argc, argv); }
